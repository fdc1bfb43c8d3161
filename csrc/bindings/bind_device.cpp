#include "bind.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <system_error>

#include "../runtime/ceilings.h"
#include "../runtime/disk_rate.h"
#include "device.h"
#include "parse.h"

namespace octavo {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

std::vector<std::pair<double, double>> measure_stream(Device& d, const std::string& code,
                                                      const std::string& scale_type,
                                                      const std::string& zero_point_kind, bool half_groups,
                                                      bool half_factors, int span, int num_inputs,
                                                      size_t bytes, size_t matmul_bytes, int rounds) {
    const TileFormat format =
        make_tile_format(code, scale_type, zero_point_kind, half_groups, half_factors, span);
    std::vector<std::pair<double, double>> found;
    for (const StreamRound& round :
         stream_rounds(d.pool, d.kernels, make_tiles(format, kTile, num_inputs), bytes, matmul_bytes, rounds))
        found.push_back({round.read, round.matmul});
    return found;
}

}  // namespace

void bind_device(nb::module_& m) {
    nb::class_<Device>(m, "Device")
        .def(nb::init<int, const std::string&, const std::string&, std::vector<std::vector<int>>>(),
             "threads"_a, "directory"_a, "level"_a, "group_cpus"_a = std::vector<std::vector<int>>{})
        .def_prop_ro("level", [](const Device& d) { return std::string(d.kernels.name); })
        .def(
            "read_bandwidth", [](Device& d, size_t bytes) { return read_bandwidth(d.pool, bytes); },
            "bytes"_a, nb::call_guard<nb::gil_scoped_release>(), "Bytes per second from a working set.")
        .def("stream_rounds", &measure_stream, "code"_a, nb::kw_only(), "scale_type"_a, "low"_a,
             "half_groups"_a, "half_factors"_a, "span"_a, "num_inputs"_a, "bytes"_a, "product_bytes"_a = 0,
             "rounds"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Bytes per second of each round: of a plain read, and of matmuls of one row with tiles in the "
             "same memory, each reading `product_bytes` if given.")
        .def(
            "attention_rate",
            [](Device& d, const std::string& dtype, int num_query_heads, int num_kv_heads, int k_width,
               int v_width, int context, size_t bytes, int rounds) {
                const KvGroup group = make_kv_group(1, num_kv_heads, k_width, v_width, dtype, 0);
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
                return kRowTypeNames[static_cast<int>(d.kernels.row_type(parse_code(code)))];
            },
            "code"_a,
            "Type of quantized rows for weights of this code at this level: int8, two_terms, whole, "
            "outliers, bf16 or fp32.")
        .def(
            "skips_zeros",
            [](const Device& d, const std::string& code) { return d.kernels.skips_zeros(parse_code(code)); },
            "code"_a, "Whether matmuls with weights of this code can skip zeros at this level.")
        .def(
            "product_rate",
            [](Device& d, const std::string& code, int rows) {
                return matmul_rate(d.pool, d.kernels, parse_code(code), rows);
            },
            "code"_a, "rows"_a, nb::call_guard<nb::gil_scoped_release>(),
            "Matmul operations per second with operands in the first-level cache; rows: at most 32.");

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
        "Bytes per second read from a file with O_DIRECT; 0 if the file system does not support it.");
}

}  // namespace octavo
