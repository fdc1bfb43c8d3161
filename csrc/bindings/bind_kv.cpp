#include "bind.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "../runtime/step.h"
#include "arrays.h"
#include "parse.h"

namespace octavo {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

void check_block(const KvMemory& kv, int group, int block, size_t num_bytes) {
    if (!kv.has_block(group, block))
        throw std::invalid_argument("block " + std::to_string(block) + " of group " + std::to_string(group) +
                                    " is outside the KV memory");
    const size_t needed = kv.group(group).num_layers * kv.group(group).block_bytes();
    if (num_bytes != needed)
        throw std::invalid_argument("a block has " + std::to_string(needed) + " bytes, got an array of " +
                                    std::to_string(num_bytes));
}

void check_layer(const KvMemory& kv, int group, int layer, int block, size_t num_bytes) {
    if (kv.has_block(group, block) && layer >= 0 && layer < kv.group(group).num_layers &&
        num_bytes == kv.group(group).block_bytes())
        return;
    throw std::invalid_argument("layer " + std::to_string(layer) + " of block " + std::to_string(block) +
                                " of group " + std::to_string(group) +
                                " is not in the KV memory, or has not " + std::to_string(num_bytes) +
                                " bytes");
}

void check_blocks(const KvMemory& kv, int group, int first, int count) {
    if (count > 0 && kv.has_block(group, first) && kv.has_block(group, first + count - 1)) return;
    throw std::invalid_argument(std::to_string(count) + " blocks from " + std::to_string(first) +
                                " on of group " + std::to_string(group) + " are not in the KV memory");
}

}  // namespace

void bind_kv(nb::module_& m) {
    nb::exception<KvSpillError>(m, "KvSpillError", PyExc_OSError);
    m.attr("RECORD_ALIGN") = kRecordAlign;

    nb::class_<KvMemory>(m, "KvMemory")
        .def(
            "__init__",
            [](KvMemory* self, const std::vector<std::tuple<int, int, int, int, std::string, int>>& groups,
               const std::vector<int>& by_blocks, const std::vector<int>& nodes) {
                std::vector<KvGroup> list;
                for (const auto& [layers, heads, k_width, v_width, type, num_blocks] : groups)
                    list.push_back(make_kv_group(layers, heads, k_width, v_width, type, num_blocks));
                for (const int group : by_blocks) list.at(group).by_blocks = true;
                new (self) KvMemory(std::move(list), nodes);
            },
            "groups"_a, "by_blocks"_a = std::vector<int>(), "nodes"_a = std::vector<int>())
        .def(
            "spill_to",
            [](KvMemory& kv, int group, const std::vector<int>& layers, int file, int num_threads,
               int num_kept) { kv.spill_to(group, {file, num_threads, num_kept}, layers); },
            "group"_a, "layers"_a, "file"_a, "num_threads"_a, "num_kept"_a,
            "Keeps blocks of some layers of a group in a file, and `num_kept` of each layer in memory; the "
            "file "
            "descriptor is duplicated.")
        .def(
            "spilled",
            [](const KvMemory& kv, int group) -> nb::object {
                const KvSpill* spill = kv.spill(group);
                if (!spill) return nb::none();
                return nb::cast(std::make_tuple(spill->num_found(), spill->num_read(), spill->bytes_read(),
                                                spill->bytes_written(), spill->wait_seconds(),
                                                spill->num_prefetched(), spill->num_prefetched_used(),
                                                spill->num_in_memory(), spill->is_direct()));
            },
            "group"_a,
            "Requested parts of blocks that were in memory and that were read, bytes read and written, "
            "seconds "
            "waited, parts prefetched and those of them that were used, parts in memory now, and whether "
            "reads "
            "bypass the page cache; None if all are in memory.")
        .def("copy_block", &KvMemory::copy_block, "group"_a, "source"_a, "target"_a)
        .def(
            "read_block",
            [](const KvMemory& kv, int group, int block, const Out<uint8_t>& bytes) {
                check_block(kv, group, block, bytes.size());
                kv.read_block(group, block, bytes.data());
            },
            "group"_a, "block_id"_a, "into"_a)
        .def(
            "read_layer",
            [](const KvMemory& kv, int group, int layer, int block, const Out<uint8_t>& bytes) {
                check_layer(kv, group, layer, block, bytes.size());
                kv.read_layer(group, layer, block, bytes.data());
            },
            "group"_a, "layer"_a, "block_id"_a, "into"_a)
        .def(
            "write_block",
            [](KvMemory& kv, int group, int block, const Array<uint8_t>& bytes) {
                check_block(kv, group, block, bytes.size());
                kv.write_block(group, block, bytes.data());
            },
            "group"_a, "block_id"_a, "data"_a)
        .def(
            "give_back",
            [](KvMemory& kv, int group, int first, int count) {
                check_blocks(kv, group, first, count);
                kv.release(group, first, count);
            },
            "group"_a, "first_block"_a, "num_blocks"_a)
        .def(
            "spans",
            [](const KvMemory& kv, int group) {
                return std::vector{std::make_tuple(reinterpret_cast<uintptr_t>(kv.memory(group).data()),
                                                   kv.memory(group).size())};
            },
            "group"_a);

    m.def("kv_layer_bytes", [](int heads, int k_width, int v_width, const std::string& type) {
        return make_kv_group(1, heads, k_width, v_width, type, 0).block_bytes();
    });
}

}  // namespace octavo
