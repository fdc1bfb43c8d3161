#include "bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <iterator>
#include <stdexcept>

#include "../plan/packing.h"
#include "device.h"
#include "parse.h"

namespace octavo {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using AnyArray = nb::ndarray<nb::device::cpu, nb::ro>;
using ByteRows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;

Matrix::Kind parse_matrix_kind(const std::string& name) {
    const char* names[] = {"uint8",   "int8",  "float16", "bfloat16", "float32",
                           "scales6", "mins6", "scales4", "mins4",    "signed6"};
    for (int i = 0; i < static_cast<int>(std::size(names)); i++)
        if (name == names[i]) return static_cast<Matrix::Kind>(i);
    throw std::invalid_argument("numbers of the type " + name);
}

// Returns the numbers per column, whose last axis has `count` bytes or numbers.
int numbers_in(Matrix::Kind kind, int count) {
    switch (kind) {
        case Matrix::Kind::scales6:
        case Matrix::Kind::mins6: return 8;
        case Matrix::Kind::signed6: return 16;
        default: return count;
    }
}

// Reads an array [rows][columns], or [rows][columns][bytes or numbers per column]. `kind` names the type of
// the numbers, since bfloat16 arrives as uint16.
Matrix read_matrix(const AnyArray& a, const std::string& kind) {
    Matrix m;
    m.kind = parse_matrix_kind(kind);
    const int64_t item = a.itemsize();
    m.data = static_cast<const uint8_t*>(a.data());
    m.rows = a.shape(0);
    m.columns = a.shape(1);
    m.row_stride = a.stride(0) * item;
    m.column_stride = a.stride(1) * item;
    if (a.ndim() == 3) m.per_column = numbers_in(m.kind, static_cast<int>(a.shape(2)));
    if (a.stride(a.ndim() - 1) != 1) throw std::invalid_argument("the numbers of a row are not adjacent");
    return m;
}

Matrix matrix_or_none(const nb::object& pair) {
    if (pair.is_none()) return {};
    const auto t = nb::cast<nb::tuple>(pair);
    return read_matrix(nb::cast<AnyArray>(t[0]), nb::cast<std::string>(t[1]));
}

// Returns the numbers of a table's codes; zeros if there is no table.
std::array<int8_t, 16> make_table(const std::vector<int>& numbers) {
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

// A packer that keeps the NumPy arrays alive until they are packed.
class ArrayPacker {
  public:
    // apart: in memory that is freed with the tiles, instead of the device's.
    ArrayPacker(std::shared_ptr<Device> device, bool apart)
        : device_(std::move(device)), packer_(apart ? own_ : device_->weights) {}

    // codes [rows][bytes], block (inputs, bytes), planes (start, bits, run) each; scales, mins, and those
    // of the second level as pairs (array, type name); table: values of 4-bit codes, or empty.
    std::shared_ptr<PackedTiles> codes(const nb::object& codes, std::tuple<int, int> block,
                                       const std::vector<std::tuple<int, int, int>>& planes, bool is_signed,
                                       const nb::tuple& scales, const nb::object& mins,
                                       const nb::object& super_scales, const nb::object& super_mins,
                                       const nb::object& zeros, const std::vector<int>& table, int group,
                                       int zero_point, int num_inputs, bool small_levels, bool whole_rows,
                                       bool by_columns) {
        const auto numbers = make_table(table);
        const QuantizedSource source{.codes = code_rows(codes, block, planes, is_signed),
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
                                     .whole_rows = whole_rows,
                                     .by_columns = by_columns};
        sources_.push_back(nb::make_tuple(codes, scales, mins, super_scales, super_mins, zeros));
        return std::make_shared<PackedTiles>(packer_.add(source));
    }
    // Float codes, with scales only; numbers: [16] of 4-bit codes, or empty.
    std::shared_ptr<PackedTiles> float_codes(const nb::object& codes, std::tuple<int, int> block,
                                             const std::vector<std::tuple<int, int, int>>& planes,
                                             const nb::tuple& scales, const std::string& code,
                                             const std::vector<float>& numbers, int group, int num_inputs) {
        if (!numbers.empty() && numbers.size() != 16)
            throw std::invalid_argument("a table has 16 numbers, got " + std::to_string(numbers.size()));
        const QuantizedSource source{.codes = code_rows(codes, block, planes, false),
                                     .group = group,
                                     .zero_point = 0,
                                     .num_inputs = num_inputs,
                                     .scales = matrix_or_none(scales),
                                     .floats = parse_code(code),
                                     .numbers = numbers.empty() ? nullptr : numbers.data()};
        sources_.push_back(nb::make_tuple(codes, scales));
        return std::make_shared<PackedTiles>(packer_.add(source));
    }
    std::shared_ptr<PackedTiles> values(const nb::tuple& values, const std::string& code) {
        sources_.push_back(values);
        return std::make_shared<PackedTiles>(packer_.add(matrix_or_none(values), parse_code(code)));
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

TileTuple get_layout(const PackedTiles& packed) {
    const Tiles& t = packed.tiles;
    return {kCodeNames[static_cast<int>(t.code)],
            kScaleTypeNames[static_cast<int>(t.scale_type)],
            kZeroPointKindNames[static_cast<int>(t.zero_point_kind)],
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

}  // namespace

void bind_packing(nb::module_& m) {
    nb::class_<ArrayPacker>(m, "Packer")
        .def(nb::init<std::shared_ptr<Device>, bool>(), "device"_a, "apart"_a = false)
        .def("codes", &ArrayPacker::codes, "codes"_a, "block"_a, "planes"_a, "is_signed"_a, "scales"_a,
             "mins"_a.none(), "super_scales"_a.none(), "super_mins"_a.none(), "zeros"_a.none(), "table"_a,
             "group"_a, "zero_point"_a, "num_inputs"_a, "small_levels"_a, "whole_rows"_a, "by_columns"_a)
        .def("float_codes", &ArrayPacker::float_codes, "codes"_a, "block"_a, "planes"_a, "scales"_a, "code"_a,
             "numbers"_a, "group"_a, "num_inputs"_a)
        .def("values", &ArrayPacker::values, "values"_a, "code"_a)
        .def("interleave", &ArrayPacker::interleave, "first"_a, "second"_a,
             "Interleaves the tiles of the last two weights. Returns whether their layouts match.")
        .def("run", &ArrayPacker::run, "Packs all weights added since the last call.")
        .def_prop_ro("num_waiting_bytes", &ArrayPacker::num_waiting_bytes);

    nb::class_<PackedTiles>(m, "PackedTiles")
        .def_prop_ro("num_bytes", &PackedTiles::num_bytes)
        .def_prop_ro("is_interleaved",
                     [](const PackedTiles& p) { return p.tiles.tile_stride != p.tiles.tile_bytes; })
        .def_prop_ro("layout", &get_layout, "Argument of `WeightStream.tiles`.")
        .def(
            "raw",
            [](const PackedTiles& p, size_t bytes) {
                return nb::bytes(reinterpret_cast<const char*>(p.tiles.data), bytes);
            },
            "num_bytes"_a, "The first `num_bytes` bytes of memory from the first tile on.")
        .def("copy", &copy_tiles, "The tiles in consecutive memory (csrc/kernels/weights.h).")
        .def_prop_ro(
            "code", [](const PackedTiles& p) { return kCodeNames[static_cast<int>(p.tiles.code)]; },
            "u4, u8, u2, u3, u5, u6, l4, i8, bf16, fp16, fp32, f4 or e4m3");

    m.def(
        "tile_bytes",
        [](const std::string& code, const std::string& scale_type, const std::string& zero_point_kind,
           bool half_groups, bool half_factors, int span, int64_t num_rows, int num_inputs) {
            const TileFormat format =
                make_tile_format(code, scale_type, zero_point_kind, half_groups, half_factors, span);
            return total_bytes(make_tiles(format, num_rows, num_inputs));
        },
        "code"_a, "scale_type"_a, "low"_a, "half_groups"_a, "half_factors"_a, "span"_a, "num_rows"_a,
        "num_inputs"_a, "Bytes of all tiles of a weight [num_rows, num_inputs].");
}

}  // namespace octavo
