// Float codes: rows that are read back have exactly the codes' values, matmuls use these values, and the
// result of a row does not depend on the number of rows.
#include "../plan/packing.h"
#include "check.h"

namespace octavo::test {

namespace {

constexpr float kNumbers[16] = {
    -1.0f,      -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f, -0.09105004f, 0.0f,
    0.0795803f, 0.1609302f,  0.2461123f,   0.33791524f, 0.44070983f,  0.562617f,    0.72295684f,  1.0f};

// Returns the value of an e4m3 code that is not NaN.
float e4m3_to_float(uint8_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float size = exponent ? std::ldexp(1 + static_cast<float>(fraction) / 8, exponent - 7)
                                : std::ldexp(static_cast<float>(fraction) / 8, -6);
    return code & 0x80 ? -size : size;
}

// A weight of random codes, with a scale for each group.
struct Coded {
    Code code;
    int rows, inputs, group;
    std::vector<uint8_t> codes;  // one per byte
    std::vector<uint8_t> bytes;  // as in a file
    Floats scales;

    Coded(Code c, int n, int k, int g) : code(c), rows(n), inputs(k), group(g) {
        std::mt19937 generator(static_cast<uint32_t>(n + k + g));
        codes.resize(static_cast<size_t>(n) * k);
        for (uint8_t& each : codes) {
            each = static_cast<uint8_t>(generator());
            if (code == Code::f4) each &= 15;
            if (code == Code::e4m3 && (each & 0x7f) == 0x7f) each = 0;
        }
        for (int i = 0; i < n * groups(); i++)
            scales.push_back(static_cast<float>(1 + generator() % 1000) / 300);
        bytes = codes;
        if (code == Code::f4) {
            bytes.resize(codes.size() / 2);
            for (size_t i = 0; i < bytes.size(); i++)
                bytes[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
        }
    }
    int groups() const { return (inputs + group - 1) / group; }
    float value(int row, int k) const {
        const uint8_t each = codes[static_cast<size_t>(row) * inputs + k];
        const float number = code == Code::f4 ? kNumbers[each] : e4m3_to_float(each);
        return number * scales[static_cast<size_t>(row) * groups() + k / group];
    }
    QuantizedSource source() const {
        QuantizedSource s{};
        s.group = group;
        s.num_inputs = inputs;
        s.codes = CodeRows::plain(bytes.data(), rows, inputs, code == Code::f4 ? 4 : 8, false);
        s.scales = Matrix{Matrix::Kind::fp32,
                          reinterpret_cast<const uint8_t*>(scales.data()),
                          rows,
                          groups(),
                          groups() * 4,
                          4};
        s.floats = code;
        s.numbers = code == Code::f4 ? kNumbers : nullptr;
        return s;
    }
};

void check_matmul(const KernelTable& kernels, const PackedTiles& packed, const Coded& e) {
    constexpr int kRows = 37, kBlocks = 3 * kTile;
    const Tiles& w = packed.tiles;
    std::mt19937 generator(5);
    Floats x(static_cast<size_t>(kRows) * e.inputs);  // exact in bf16
    for (float& value : x) value = static_cast<float>(static_cast<int>(generator() % 255) - 127) / 64;
    const RowType type = kernels.row_type(w.code);
    CHECK(type == (e.code == Code::f4 ? RowType::fp32 : RowType::bf16));
    const int stride = static_cast<int>(row_elements(type, w.num_groups));
    Memory values(static_cast<size_t>(kBlocks) * stride * 4), scratch(kernels.scratch_bytes(w));
    const QuantizedRows rows{.type = type,
                             .values = values.data(),
                             .stride = stride,
                             .num_groups = w.num_groups,
                             .group_stride = w.num_groups};
    for (int r = 0; r < kRows; r++)
        kernels.quantize_row(x.data() + static_cast<size_t>(r) * e.inputs, e.inputs, Norm{}, rows, r);
    Floats together(static_cast<size_t>(kRows) * kTile), alone(kTile),
        both(static_cast<size_t>(2) * kRows * kTile);
    for (int tile = 0; tile < w.num_tiles(); tile++) {
        const TileRef ref{&w, tile, together.data()};
        kernels.tile_matmul(&ref, 1, rows, 0, kRows, scratch.data());
        const TileRef pair[] = {{&w, tile, both.data()},
                                {&w, 0, both.data() + static_cast<size_t>(kRows) * kTile}};
        kernels.tile_matmul(pair, 2, rows, 0, kRows, scratch.data());
        CHECK(!std::memcmp(both.data(), together.data(), together.size() * sizeof(float)));
        for (int r = 0; r < kRows; r++) {
            const TileRef one{&w, tile, alone.data()};
            kernels.tile_matmul(&one, 1, rows, r, 1, scratch.data());
            CHECK(!std::memcmp(alone.data(), together.data() + static_cast<size_t>(r) * kTile,
                               kTile * sizeof(float)),
                  "%s, row %d of tile %d", kCodeNames[static_cast<int>(e.code)], r, tile);
            for (int o = 0; o < kTile && tile * kTile + o < e.rows; o++) {
                double sum = 0, size = 0;
                for (int k = 0; k < e.inputs; k++) {
                    const double term = static_cast<double>(x[static_cast<size_t>(r) * e.inputs + k]) *
                                        e.value(tile * kTile + o, k);
                    sum += term;
                    size += std::fabs(term);
                }
                CHECK(std::fabs(alone[o] - sum) <= 2e-5 * size, "%s, row %d output %d: %g, not %g",
                      kCodeNames[static_cast<int>(e.code)], r, tile * kTile + o, alone[o], sum);
            }
        }
    }
}

}  // namespace

void test_float_codes(const KernelTable& kernels) {
    ThreadPool pool(2);
    WeightMemory memory;
    for (const Code code : {Code::f4, Code::e4m3})
        for (const auto& [rows, inputs, group] :
             {std::tuple(40, 96, 32), std::tuple(17, 640, 64), std::tuple(16, 576, 128),
              std::tuple(5, 320, 320), std::tuple(33, 132, 132), std::tuple(1, 32, 96)}) {
            const Coded e(code, rows, inputs, group);
            const PackedTiles packed = pack(pool, memory, e.source());
            const size_t spans = group >= inputs ? (inputs + 127) / 128
                                                 : (inputs + std::min(group, 128) - 1) / std::min(group, 128);
            const size_t codes = (inputs + 31) / 32 * (code == Code::f4 ? 256 : 512);
            CHECK(packed.tiles.code == code && packed.tiles.tile_bytes == codes + 64 * spans);
            Floats row(inputs);
            for (int r = 0; r < rows; r++) {
                kernels.read_row(packed.tiles, r, 1, row.data());
                for (int k = 0; k < inputs; k++)
                    CHECK(row[k] == e.value(r, k), "%s, row %d input %d: %g, not %g",
                          kCodeNames[static_cast<int>(code)], r, k, row[k], e.value(r, k));
            }
            check_matmul(kernels, packed, e);
        }
}

}  // namespace octavo::test
