// The extension's Python names: the device with its threads, the packer of weights, KV memory, plans and their
// runner. Arrays cross as NumPy arrays that live at least as long as the call; the interpreter's lock is released
// while a step runs.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <array>
#include <iterator>

#include "../plan/packing.h"
#include "../runtime/ceilings.h"
#include "../runtime/disk_rate.h"
#include "arrays.h"
#include "decode_call.h"
#include "plan.h"
#include "source_digest.h"

namespace octavo {

using namespace nb::literals;

namespace {

using AnyArray = nb::ndarray<nb::device::cpu, nb::ro>;
using ByteRows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;

Matrix::Kind kind_of(const std::string& name) {
    const char* names[] = {"uint8",   "int8",  "float16", "bfloat16", "float32",
                           "scales6", "mins6", "scales4", "mins4",    "signed6"};
    for (int i = 0; i < static_cast<int>(std::size(names)); i++)
        if (name == names[i]) return static_cast<Matrix::Kind>(i);
    throw std::invalid_argument("numbers of the type " + name);
}

// Returns the numbers of a column that takes as many bytes, or numbers, in the last axis.
int numbers_in(Matrix::Kind kind, int count) {
    switch (kind) {
        case Matrix::Kind::scales6:
        case Matrix::Kind::mins6: return 8;
        case Matrix::Kind::signed6: return 16;
        default: return count;
    }
}

// Reads an array [rows][columns], or [rows][columns][bytes or numbers of a column]; `kind` names the type of
// the numbers, since bfloat16 arrives as uint16.
Matrix matrix_of(const AnyArray& a, const std::string& kind) {
    Matrix m;
    m.kind = kind_of(kind);
    const int64_t item = a.itemsize();
    m.data = static_cast<const uint8_t*>(a.data());
    m.rows = a.shape(0);
    m.columns = a.shape(1);
    m.row_stride = a.stride(0) * item;
    m.column_stride = a.stride(1) * item;
    if (a.ndim() == 3) m.per_column = numbers_in(m.kind, static_cast<int>(a.shape(2)));
    if (a.stride(a.ndim() - 1) != 1)
        throw std::invalid_argument("numbers of a row that are not side by side");
    return m;
}

Matrix matrix_or_none(const nb::object& pair) {
    if (pair.is_none()) return {};
    const auto t = nb::cast<nb::tuple>(pair);
    return matrix_of(nb::cast<AnyArray>(t[0]), nb::cast<std::string>(t[1]));
}

Code code_of(const std::string& name) {
    for (int i = 0; i < kNumCodes; i++)
        if (name == kCodeNames[i]) return static_cast<Code>(i);
    throw std::invalid_argument("code " + name +
                                ": allowed are u4, u8, u2, u3, u5, u6, l4, i8, bf16, fp16, fp32, f4, e4m3");
}

ScaleType scale_type_of(const std::string& name) {
    for (int i = 0; i < kNumScaleTypes; i++)
        if (name == kScaleTypeNames[i]) return static_cast<ScaleType>(i);
    throw std::invalid_argument("scales of type " + name + ": allowed are fp16, fp32, small");
}

KvType kv_type_of(const std::string& name) {
    for (int i = 0; i < kNumKvTypes; i++)
        if (name == kKvTypeNames[i]) return static_cast<KvType>(i);
    throw std::invalid_argument("KV type " + name + ": allowed are fp32, bf16, int8");
}

// "states": as KvGroup says.
KvGroup kv_group_of(int layers, int heads, int k_width, int v_width, const std::string& type, int blocks) {
    const bool holds_states = type == "states";
    const KvType kept = holds_states ? KvType::fp32 : kv_type_of(type);
    return KvGroup{layers, heads, k_width, v_width, kept, blocks, holds_states};
}

// The numbers of a table's codes; zeros where there is none.
std::array<int8_t, 16> table_of(const std::vector<int>& numbers) {
    std::array<int8_t, 16> table{};
    if (!numbers.empty() && numbers.size() != table.size())
        throw std::invalid_argument("a table has 16 numbers, got " + std::to_string(numbers.size()));
    for (size_t i = 0; i < numbers.size(); i++) {
        if (numbers[i] < -128 || numbers[i] > 127)
            throw std::invalid_argument("a table's numbers are -128 to 127, got " +
                                        std::to_string(numbers[i]));
        table[i] = static_cast<int8_t>(numbers[i]);
    }
    return table;
}

// A packer with the NumPy arrays that it reads, which it keeps alive until they are packed.
class ArrayPacker {
  public:
    // apart: in memory of its own, which goes with the tiles, instead of the device's.
    ArrayPacker(std::shared_ptr<Device> device, bool apart)
        : device_(std::move(device)), packer_(apart ? own_ : device_->weights) {}

    // codes [rows][bytes], block (inputs, bytes), planes (start, bits, run) each; scales, mins, and those of
    // the second level as pairs (array, its type's name); table: numbers of 4-bit codes, or none.
    std::shared_ptr<PackedTiles> codes(const nb::object& codes, std::tuple<int, int> block,
                                       const std::vector<std::tuple<int, int, int>>& planes, bool is_signed,
                                       const nb::tuple& scales, const nb::object& mins,
                                       const nb::object& super_scales, const nb::object& super_mins,
                                       const nb::object& zeros, const std::vector<int>& table, int group,
                                       int zero_point, int num_inputs, bool small_levels, bool wide,
                                       bool whole_rows, bool by_columns) {
        const auto numbers = table_of(table);
        const QuantisedSource source{.codes = code_rows(codes, block, planes, is_signed),
                                     .group = group,
                                     .zero_point = zero_point,
                                     .num_inputs = num_inputs,
                                     .scales = matrix_or_none(scales),
                                     .mins = matrix_or_none(mins),
                                     .super_scales = matrix_or_none(super_scales),
                                     .super_mins = matrix_or_none(super_mins),
                                     .zeros = matrix_or_none(zeros),
                                     .table = table.empty() ? nullptr : numbers.data(),
                                     .small_levels = small_levels,
                                     .wide = wide,
                                     .whole_rows = whole_rows,
                                     .by_columns = by_columns};
        sources_.push_back(nb::make_tuple(codes, scales, mins, super_scales, super_mins, zeros));
        return std::make_shared<PackedTiles>(packer_.add(source));
    }
    // Codes that stand for floats, with scales alone; numbers: [16] of codes of 4 bits, or none.
    std::shared_ptr<PackedTiles> float_codes(const nb::object& codes, std::tuple<int, int> block,
                                             const std::vector<std::tuple<int, int, int>>& planes,
                                             const nb::tuple& scales, const std::string& code,
                                             const std::vector<float>& numbers, int group, int num_inputs) {
        if (!numbers.empty() && numbers.size() != 16)
            throw std::invalid_argument("a table has 16 numbers, got " + std::to_string(numbers.size()));
        const QuantisedSource source{.codes = code_rows(codes, block, planes, false),
                                     .group = group,
                                     .zero_point = 0,
                                     .num_inputs = num_inputs,
                                     .scales = matrix_or_none(scales),
                                     .floats = code_of(code),
                                     .numbers = numbers.empty() ? nullptr : numbers.data()};
        sources_.push_back(nb::make_tuple(codes, scales));
        return std::make_shared<PackedTiles>(packer_.add(source));
    }
    std::shared_ptr<PackedTiles> values(const nb::tuple& values, const std::string& code) {
        sources_.push_back(values);
        return std::make_shared<PackedTiles>(packer_.add(matrix_or_none(values), code_of(code)));
    }
    void run() {
        {
            nb::gil_scoped_release release;
            packer_.run(device_->pool);
        }
        sources_.clear();
    }
    bool interleave(PackedTiles& first, PackedTiles& second) { return packer_.interleave(first, second); }
    size_t num_waiting_bytes() const { return packer_.num_waiting_bytes(); }

  private:
    static CodeRows code_rows(const nb::object& codes, std::tuple<int, int> block,
                              const std::vector<std::tuple<int, int, int>>& planes, bool is_signed) {
        const auto bytes = nb::cast<ByteRows>(codes);
        CodeRows rows{.data = bytes.data(),
                      .rows = static_cast<int64_t>(bytes.shape(0)),
                      .row_stride = bytes.stride(0),
                      .row_bytes = static_cast<int64_t>(bytes.shape(1)),
                      .block_inputs = std::get<0>(block),
                      .block_bytes = std::get<1>(block),
                      .is_signed = is_signed};
        for (const auto& [start, bits, run] : planes) rows.planes.push_back({start, bits, run});
        return rows;
    }

    std::shared_ptr<Device> device_;
    WeightMemory own_;
    Packer packer_;
    std::vector<nb::object> sources_;
};

nb::bytes copy_tiles(const PackedTiles& packed) {
    std::string bytes;
    for (int i = 0; i < packed.tiles.num_tiles(); i++)
        bytes.append(reinterpret_cast<const char*>(packed.tiles.tile(i)), packed.tiles.tile_bytes);
    return nb::bytes(bytes.data(), bytes.size());
}

Low low_of(const std::string& name) {
    for (int i = 0; i < kNumLows; i++)
        if (name == kLowNames[i]) return static_cast<Low>(i);
    throw std::invalid_argument("unknown numbers behind scales: " + name);
}

TileFormat format_of(const std::string& code, const std::string& scale_type, const std::string& low,
                     bool half_groups, bool half_factors, int span) {
    return {.code = code_of(code),
            .scale_type = scale_type_of(scale_type),
            .low = low_of(low),
            .half_groups = half_groups,
            .span = span,
            .half_factors = half_factors};
}

std::vector<std::pair<double, double>> measure_stream(Device& d, const std::string& code,
                                                      const std::string& scale_type, const std::string& low,
                                                      bool half_groups, bool half_factors, int span,
                                                      int num_inputs, size_t bytes, size_t product_bytes,
                                                      int rounds) {
    const TileFormat format = format_of(code, scale_type, low, half_groups, half_factors, span);
    std::vector<std::pair<double, double>> found;
    for (const StreamRound& round :
         stream_rounds(d.pool, d.kernels, tiles_of(format, kTile, num_inputs), bytes, product_bytes, rounds))
        found.push_back({round.read, round.product});
    return found;
}

// How a weight lies in tiles, and the bytes from a tile to the next one, as `WeightStream.tiles` takes them.
using TileTuple = std::tuple<std::string, std::string, std::string, bool, bool, int, int, int, int, size_t,
                             std::vector<int>, std::vector<float>>;

TileTuple layout_of(const PackedTiles& packed) {
    const Tiles& t = packed.tiles;
    return {kCodeNames[static_cast<int>(t.code)],
            kScaleTypeNames[static_cast<int>(t.scale_type)],
            kLowNames[static_cast<int>(t.low)],
            t.half_groups,
            t.half_factors,
            t.span,
            t.zero_point,
            t.num_rows,
            t.num_inputs,
            t.tile_stride,
            {std::begin(t.table), std::end(t.table)},
            {std::begin(t.numbers), std::end(t.numbers)}};
}

std::shared_ptr<PackedTiles> tiles_in(const std::shared_ptr<WeightStream>& stream, size_t offset,
                                      const TileTuple& layout) {
    const auto& [code, scale_type, low, half_groups, half_factors, span, zero_point, num_rows, num_inputs,
                 stride, table, numbers] = layout;
    if (table.size() != kTile || numbers.size() != kTile)
        throw std::invalid_argument("a layout has tables of 16 numbers");
    const TileFormat format{code_of(code), scale_type_of(scale_type), low_of(low), half_groups, span,
                            half_factors};
    auto packed = std::make_shared<PackedTiles>();
    packed->tiles = tiles_of(format, num_rows, num_inputs);
    packed->tiles.zero_point = zero_point;
    std::copy(table.begin(), table.end(), packed->tiles.table);
    std::copy(numbers.begin(), numbers.end(), packed->tiles.numbers);
    packed->tiles.tile_stride = stride;
    const Tiles& t = packed->tiles;
    if (stride < t.tile_bytes ||
        offset + (t.num_tiles() - 1) * stride + t.tile_bytes > stream->memory_bytes())
        throw std::invalid_argument("tiles outside the memory of weights");
    packed->memory = {stream, stream->memory() + offset};
    packed->tiles.data = packed->memory.get();
    return packed;
}

std::vector<WeightChunk> chunks_of(const std::vector<std::tuple<int64_t, size_t, size_t>>& tuples) {
    std::vector<WeightChunk> chunks;
    for (const auto& [file_offset, bytes, memory_offset] : tuples)
        chunks.push_back({file_offset, bytes, memory_offset});
    return chunks;
}

using NeuronTuple = std::tuple<int64_t, int, size_t, size_t, int, std::vector<int32_t>>;

std::vector<NeuronCache::Layer> neuron_layers_of(const std::vector<NeuronTuple>& tuples) {
    std::vector<NeuronCache::Layer> layers;
    for (const auto& [offset, neurons, up_bytes, record_bytes, slots, pinned] : tuples)
        layers.push_back({offset, neurons, up_bytes, record_bytes, slots, pinned});
    return layers;
}

// A layer's last product, which reads the columns of the cache: its tiles without codes.
std::shared_ptr<PackedTiles> columns_in(const std::shared_ptr<NeuronCache>& cache, int layer,
                                        const Array<float, nb::ndim<1>>& scales) {
    if (layer < 0 || layer >= cache->num_layers()) throw std::invalid_argument("no layer of the cache");
    const NeuronCache::Layer& shape = cache->layer(layer);
    auto packed = std::make_shared<PackedTiles>();
    packed->tiles = tiles_of({Code::i8}, static_cast<int64_t>(scales.size()), shape.num_neurons);
    Tiles& t = packed->tiles;
    t.tile_stride = kTile;
    t.column_stride = t.num_tiles() * kTile;
    if (shape.record_bytes - shape.up_bytes < static_cast<size_t>(t.column_stride))
        throw std::invalid_argument("columns of another number of outputs");
    struct Held {
        std::shared_ptr<NeuronCache> cache;
        std::vector<float> scales;
    };
    const auto held = std::make_shared<Held>();
    held->cache = cache;
    held->scales.assign(scales.data(), scales.data() + scales.size());
    held->scales.resize(t.column_stride);
    t.columns = cache->columns();
    packed->memory = {held, reinterpret_cast<uint8_t*>(held->scales.data())};
    t.data = packed->memory.get();
    return packed;
}

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

NB_MODULE(_native, m) {
    m.def("supported_levels", &supported_levels, "Instruction-set levels that this machine runs, best last.");
    m.attr("SOURCE_DIGEST") = source_digest();
    m.attr("SAMPLE_CHUNK") = kSampleChunk;
    m.attr("MOST_CANDIDATES") = kMostCandidates;
    m.attr("MOST_WITNESSES") = kMostWitnesses;
    m.attr("SAMPLING_RECORD") = sampling_record();

    nb::class_<Device>(m, "Device")
        .def(nb::init<int, const std::string&, const std::string&>(), "threads"_a, "directory"_a, "level"_a)
        .def_prop_ro("level", [](const Device& d) { return std::string(d.kernels.name); })
        .def(
            "read_bandwidth", [](Device& d, size_t bytes) { return read_bandwidth(d.pool, bytes); },
            "bytes"_a, nb::call_guard<nb::gil_scoped_release>(), "Bytes per second from a working set.")
        .def("stream_rounds", &measure_stream, "code"_a, nb::kw_only(), "scale_type"_a, "low"_a,
             "half_groups"_a, "half_factors"_a, "span"_a, "num_inputs"_a, "bytes"_a, "product_bytes"_a = 0,
             "rounds"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Bytes per second of each round: of a plain read, and of products of one row with tiles in the "
             "same memory, each of `product_bytes` where these are given.")
        .def(
            "attention_rate",
            [](Device& d, const std::string& dtype, int num_query_heads, int num_kv_heads, int k_width,
               int v_width, int context, size_t bytes, int rounds) {
                const KvGroup group = kv_group_of(1, num_kv_heads, k_width, v_width, dtype, 0);
                return attention_rate(d.pool, d.kernels, group, num_query_heads, context, bytes, rounds);
            },
            "dtype"_a, nb::kw_only(), "num_query_heads"_a, "num_kv_heads"_a, "k_width"_a, "v_width"_a,
            "context"_a, "bytes"_a, "rounds"_a, nb::call_guard<nb::gil_scoped_release>(),
            "Bytes per second at which attention of single rows reads K and V.")
        .def(
            "hop_seconds", [](Device& d) { return hop_seconds(d.pool); },
            nb::call_guard<nb::gil_scoped_release>(),
            "Seconds that a cache line takes from one thread's core to another's; 0 with one thread.")
        .def(
            "row_type",
            [](const Device& d, const std::string& code) {
                return kRowTypeNames[static_cast<int>(d.kernels.row_type(code_of(code)))];
            },
            "code"_a,
            "How products of weights in that code read their rows, at this level: int8, two_terms, whole, "
            "outliers, bf16 or fp32.")
        .def(
            "skips_zeros",
            [](const Device& d, const std::string& code) { return d.kernels.skips_zeros(code_of(code)); },
            "code"_a, "Whether products with weights in that code can skip zeros, at this level.")
        .def(
            "product_rate",
            [](Device& d, const std::string& code, int rows) {
                return product_rate(d.pool, d.kernels, code_of(code), rows);
            },
            "code"_a, "rows"_a, nb::call_guard<nb::gil_scoped_release>(),
            "Operations per second with operands in the nearest cache; rows: at most 32.");

    nb::class_<ArrayPacker>(m, "Packer")
        .def(nb::init<std::shared_ptr<Device>, bool>(), "device"_a, "apart"_a = false)
        .def("codes", &ArrayPacker::codes, "codes"_a, "block"_a, "planes"_a, "is_signed"_a, "scales"_a,
             "mins"_a.none(), "super_scales"_a.none(), "super_mins"_a.none(), "zeros"_a.none(), "table"_a,
             "group"_a, "zero_point"_a, "num_inputs"_a, "small_levels"_a, "wide"_a, "whole_rows"_a,
             "by_columns"_a)
        .def("float_codes", &ArrayPacker::float_codes, "codes"_a, "block"_a, "planes"_a, "scales"_a, "code"_a,
             "numbers"_a, "group"_a, "num_inputs"_a)
        .def("values", &ArrayPacker::values, "values"_a, "code"_a)
        .def("interleave", &ArrayPacker::interleave, "first"_a, "second"_a,
             "Lets the last two weights lie tile by tile in turns; whether they fit.")
        .def("run", &ArrayPacker::run, "Packs all that was given since the last time.")
        .def_prop_ro("num_waiting_bytes", &ArrayPacker::num_waiting_bytes);

    nb::class_<PackedTiles>(m, "PackedTiles")
        .def_prop_ro("num_bytes", &PackedTiles::num_bytes)
        .def_prop_ro("is_interleaved",
                     [](const PackedTiles& p) { return p.tiles.tile_stride != p.tiles.tile_bytes; })
        .def_prop_ro("layout", &layout_of, "As `WeightStream.tiles` takes it.")
        .def(
            "raw",
            [](const PackedTiles& p, size_t bytes) {
                return nb::bytes(reinterpret_cast<const char*>(p.tiles.data), bytes);
            },
            "num_bytes"_a, "Bytes of memory from the first tile on, at most those that were packed with it.")
        .def("copy", &copy_tiles, "The tiles, one behind the other (csrc/kernels/table.h).")
        .def_prop_ro(
            "code", [](const PackedTiles& p) { return kCodeNames[static_cast<int>(p.tiles.code)]; },
            "u4, u8, u2, u3, u5, u6, l4, i8, bf16, fp16, fp32, f4 or e4m3");

    m.def(
        "tile_bytes",
        [](const std::string& code, const std::string& scale_type, const std::string& low, bool half_groups,
           bool half_factors, int span, int64_t num_rows, int num_inputs) {
            const TileFormat format = format_of(code, scale_type, low, half_groups, half_factors, span);
            return total_bytes(tiles_of(format, num_rows, num_inputs));
        },
        "code"_a, "scale_type"_a, "low"_a, "half_groups"_a, "half_factors"_a, "span"_a, "num_rows"_a,
        "num_inputs"_a, "Bytes of all tiles of a weight [num_rows, num_inputs], as the packer takes them.");

    nb::class_<KvMemory>(m, "KvMemory")
        .def(
            "__init__",
            [](KvMemory* self, const std::vector<std::tuple<int, int, int, int, std::string, int>>& groups,
               const std::vector<int>& by_blocks) {
                std::vector<KvGroup> list;
                for (const auto& [layers, heads, k_width, v_width, type, num_blocks] : groups)
                    list.push_back(kv_group_of(layers, heads, k_width, v_width, type, num_blocks));
                for (const int group : by_blocks) list.at(group).by_blocks = true;
                new (self) KvMemory(std::move(list));
            },
            "groups"_a, "by_blocks"_a = std::vector<int>())
        .def(
            "spill_to",
            [](KvMemory& kv, int group, const std::vector<int>& layers, int file, int num_threads,
               int num_kept) { kv.spill_to(group, {file, num_threads, num_kept}, layers); },
            "group"_a, "layers"_a, "file"_a, "num_threads"_a, "num_kept"_a,
            "Keeps blocks of some layers of a group by blocks in a file, `num_kept` of each layer in memory; "
            "the "
            "descriptor stays open as long as this memory.")
        .def(
            "spilled",
            [](const KvMemory& kv, int group) -> nb::object {
                const KvSpill* spill = kv.spill(group);
                if (!spill) return nb::none();
                return nb::cast(std::make_tuple(spill->num_found(), spill->num_read(), spill->bytes_read(),
                                                spill->bytes_written(), spill->wait_seconds(),
                                                spill->num_foreseen(), spill->num_foreseen_used(),
                                                spill->num_in_memory(), spill->is_direct()));
            },
            "group"_a,
            "Layers' parts of blocks that were in memory when an attention asked for them, and those that "
            "were read, "
            "bytes read and written, seconds waited, parts read by a guess and those of them that were used, "
            "parts in memory now, and whether reads pass by the "
            "system's "
            "cache; None where all are in memory.")
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
                kv.give_back(group, first, count);
            },
            "group"_a, "first_block"_a, "num_blocks"_a)
        .def(
            "spans",
            [](const KvMemory& kv, int group) {
                return std::vector{std::make_tuple(reinterpret_cast<uintptr_t>(kv.memory(group).data()),
                                                   kv.memory(group).size())};
            },
            "group"_a);

    nb::exception<WeightReadError>(m, "WeightReadError", PyExc_OSError);
    nb::exception<KvSpillError>(m, "KvSpillError", PyExc_OSError);
    nb::exception<WeightFileTruncated>(m, "WeightFileTruncated", PyExc_OSError);
    using ChunkTuples = std::vector<std::tuple<int64_t, size_t, size_t>>;
    nb::class_<WeightStream>(m, "WeightStream")
        .def(
            "__init__",
            [](WeightStream* self, const std::string& path, const ChunkTuples& resident,
               const ChunkTuples& streamed, size_t memory_bytes, int num_threads, size_t block_bytes) {
                nb::gil_scoped_release release;
                new (self) WeightStream({path, num_threads, block_bytes}, chunks_of(resident),
                                        chunks_of(streamed), memory_bytes);
            },
            "path"_a, "resident"_a, "streamed"_a, "memory_bytes"_a, "num_threads"_a, "block_bytes"_a,
            "Chunks are (offset in the file, bytes, offset in memory), multiples of 4096.")
        .def(
            "tiles",
            [](const std::shared_ptr<WeightStream>& stream, size_t offset, const TileTuple& layout) {
                return tiles_in(stream, offset, layout);
            },
            "offset"_a, "layout"_a, "Returns the PackedTiles that lie at a place in memory.")
        .def_prop_ro("is_direct", &WeightStream::is_direct)
        .def_prop_ro("bytes_read", &WeightStream::bytes_read, "Bytes read since all was opened.")
        .def_prop_ro("num_found", &WeightStream::num_found,
                     "Chunks that were in memory when a stage asked for them.")
        .def_prop_ro("num_waited", &WeightStream::num_waited, "Chunks that a stage waited for.")
        .def_prop_ro("wait_seconds", &WeightStream::wait_seconds,
                     "Time that stages have waited for weights.");

    nb::class_<NeuronCache>(m, "NeuronCache")
        .def(
            "__init__",
            [](NeuronCache* self, const std::string& path, const std::vector<NeuronTuple>& layers,
               int num_threads, size_t most_bytes, size_t gap_bytes, int window) {
                nb::gil_scoped_release release;
                new (self)
                    NeuronCache({path, num_threads, most_bytes, gap_bytes, window}, neuron_layers_of(layers));
            },
            "path"_a, "layers"_a, "num_threads"_a, "most_bytes"_a, "gap_bytes"_a, "window"_a,
            "Layers are (offset in the file, neurons, bytes of its rows, bytes of a record, slots, pinned "
            "neurons).")
        .def_static(
            "in_memory",
            [](const std::vector<std::tuple<int, size_t, size_t>>& layers) {
                std::vector<NeuronCache::Layer> shapes;
                for (const auto& [neurons, up_bytes, record_bytes] : layers)
                    shapes.push_back({0, neurons, up_bytes, record_bytes, 0});
                return std::make_shared<NeuronCache>(std::move(shapes));
            },
            "layers"_a,
            "Returns a cache of all records of layers (neurons, bytes of its rows, bytes of a record).")
        .def(
            "fill",
            [](NeuronCache& self, int layer, const Array<uint8_t, nb::ndim<2>>& records) {
                if (layer < 0 || layer >= self.num_layers())
                    throw std::invalid_argument("no layer of the cache");
                self.fill(layer, records.data(), records.size());
            },
            "layer"_a, "records"_a, "Brings all records of a layer of a cache in memory.")
        .def("columns", &columns_in, "layer"_a, "scales"_a,
             "Returns the PackedTiles of a layer's last product, whose outputs have these scales.")
        .def_prop_ro("is_direct", &NeuronCache::is_direct)
        .def_prop_ro("memory_bytes", &NeuronCache::memory_bytes)
        .def_prop_ro("bytes_read", &NeuronCache::bytes_read, "Bytes read since all was opened.")
        .def_prop_ro("num_found", &NeuronCache::num_found, "Records in memory that steps asked for.")
        .def_prop_ro("num_read", &NeuronCache::num_read, "Records that were read for a step.")
        .def_prop_ro("num_foreseen", &NeuronCache::num_foreseen, "Records that were read by a guess.")
        .def_prop_ro("num_foreseen_used", &NeuronCache::num_foreseen_used,
                     "Records that were read by a guess, and then asked for.")
        .def_prop_ro("wait_seconds", &NeuronCache::wait_seconds, "Time that stages have waited for them.");

    m.def(
        "disk_rate",
        [](const std::string& path, size_t block_bytes, int num_threads, bool in_order, double seconds) {
            try {
                nb::gil_scoped_release release;
                return disk_rate(path, {block_bytes, num_threads, in_order, seconds});
            } catch (const std::system_error& error) {
                errno = error.code().value();
                PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
                throw nb::python_error();
            }
        },
        "path"_a, "block_bytes"_a, "num_threads"_a, "in_order"_a, "seconds"_a,
        "Bytes per second read from a file past the system's cache; 0 where there is no such reading.");

    nb::exception<RanksAborted>(m, "RanksAborted", PyExc_ConnectionError);
    nb::class_<SharedRanks>(m, "SharedRanks")
        .def(nb::init<int, int, int, int>(), "file"_a, "rank"_a, "num_ranks"_a, "num_tensor"_a,
             "file: a descriptor of a file in memory, empty at first, that all ranks have.")
        .def_prop_ro("rank", &SharedRanks::rank)
        .def_prop_ro("num_ranks", &SharedRanks::num_ranks)
        .def(
            "all_reduce",
            [](SharedRanks& ranks, const Array<float>& x, const Out<float>& out) {
                if (x.size() != out.size()) throw std::invalid_argument("out: not as large as x");
                nb::gil_scoped_release release;
                ranks.all_reduce(x.data(), out.data(), x.size());
            },
            "x"_a, "out"_a, "Writes the sum of all ranks' x, added in rank order.")
        .def(
            "all_gather",
            [](SharedRanks& ranks, const Array<float, nb::ndim<2>>& x, const Out<float, nb::ndim<2>>& out,
               const std::vector<int>& widths) {
                size_t width = 0;
                for (const int w : widths) width += static_cast<size_t>(std::max(w, 0));
                if (static_cast<int>(widths.size()) != ranks.num_tensor() ||
                    static_cast<int>(x.shape(1)) != widths.at(ranks.tensor_place()) ||
                    out.shape(1) != width || x.shape(0) != out.shape(0))
                    throw std::invalid_argument("out: not the columns of all ranks");
                nb::gil_scoped_release release;
                ranks.all_gather(x.data(), out.data(), x.shape(0), widths);
            },
            "x"_a, "out"_a, "widths"_a, "Writes the columns of all ranks' x side by side.")
        .def(
            "collect",
            [](SharedRanks& ranks, const Array<float, nb::ndim<2>>& x, const Array<int32_t>& owners,
               const Out<float, nb::ndim<2>>& out) {
                if (owners.size() != x.shape(0) || out.shape(0) != x.shape(0) || out.shape(1) != x.shape(1))
                    throw std::invalid_argument("out: not as large as x");
                for (size_t i = 0; i < owners.size(); i++)
                    if (owners.data()[i] < 0 || owners.data()[i] >= ranks.num_experts())
                        throw std::invalid_argument("owners: a place that no rank has");
                nb::gil_scoped_release release;
                ranks.collect(x.data(), owners.data(), out.data(), x.shape(0), x.shape(1));
            },
            "x"_a, "owners"_a, "out"_a, "Writes each row as its owner has it.")
        .def(
            "from_first",
            [](SharedRanks& ranks, const Out<uint8_t>& bytes) {
                nb::gil_scoped_release release;
                ranks.from_first(bytes.data(), bytes.size());
            },
            "bytes"_a, "Replaces the other ranks' bytes by the first rank's.")
        .def("abort", &SharedRanks::abort, "Ends all collectives, now and later, with RanksAborted.");

    m.def("kv_layer_bytes", [](int heads, int k_width, int v_width, const std::string& type) {
        return kv_group_of(1, heads, k_width, v_width, type, 0).block_bytes();
    });
    m.attr("RECORD_ALIGN") = kRecordAlign;

    bind_plan(m);
    nb::class_<BoundRunner>(m, "StepRunner")
        .def(nb::init<std::shared_ptr<Device>, std::shared_ptr<const Plan>, std::shared_ptr<WeightStream>,
                      bool>(),
             "device"_a, "plan"_a, "stream"_a = nb::none(), "share_prefixes"_a = true,
             nb::call_guard<nb::gil_scoped_release>(),
             "stream: the weights that are read while steps run; share_prefixes: whether requests that begin "
             "with the same blocks read them together.")
        .def_prop_ro(
            "plan", [](const BoundRunner& b) { return &b.runner.plan(); }, nb::rv_policy::reference_internal)
        .def("put_adapter", &BoundRunner::put_adapter, "slot"_a, "updates"_a,
             "Puts an adapter's matrices in a slot; by site None, or (A, B, scales, gain, bias).")
        .def("drop_adapter", &BoundRunner::drop_adapter, "slot"_a)
        .def_prop_ro(
            "rows_of_blocks", [](const BoundRunner& b) { return b.runner.rows_of_blocks(); },
            "Rows of a step from which on threads may share its rows instead of a product's outputs.")
        .def_prop_ro(
            "kv_written",
            [](const BoundRunner& b) {
                const uint64_t packed = b.runner.kv_written();
                return std::make_pair(static_cast<uint32_t>(packed >> 32), static_cast<uint32_t>(packed));
            },
            "The number of the newest walk over the stages, and how many of its kv_writes are done.")
        .def_prop_ro(
            "progress", [](const BoundRunner& b) { return b.runner.progress(); },
            "Grows while a step computes or weights arrive; may be read meanwhile.")
        .def(
            "profile", [](BoundRunner& b, bool on) { b.runner.profile(on); }, "on"_a)
        .def("profiled", &BoundRunner::profiled,
             "Per kind of stage: (name, code of its weights or \"\", calls, seconds, bytes, operations).")
        .def(
            "run", &BoundRunner::run, "batch"_a, "output"_a, "kv"_a, "check"_a.none(),
            "Computes a StepBatch into the arrays of a StepOutput. Rows that check(0) returns, a Redraw, are "
            "drawn again.")
        .def("copy_logits", &BoundRunner::copy_logits, "sample"_a, "out"_a,
             "Copies the logits of a sampled row of the step that was just run, which kept them.")
        .def("candidates", &BoundRunner::candidates, "samples"_a, "out"_a,
             "Writes the tokens that sampled rows would draw one after another, while their draws are "
             "checked.");
    nb::class_<DecodeCall>(m, "DecodeCall",
                           "Up to steps.num_steps steps of a decoding batch, each row's draw its next token. "
                           "Nothing is computed yet.")
        .def(nb::init<BoundRunner&, const nb::object&, const nb::object&, const std::shared_ptr<KvMemory>&,
                      const nb::object&>(),
             "runner"_a, "batch"_a, "output"_a, "kv"_a, "steps"_a, nb::keep_alive<1, 2>())
        .def("step", &DecodeCall::step, "check"_a.none(),
             "Computes the next step into its part of the output's arrays. Returns whether another may "
             "follow.");
}

}  // namespace octavo
