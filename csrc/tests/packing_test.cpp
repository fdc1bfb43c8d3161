// Weights in tiles: a row that is read back has the format's own values, bit for bit, and products are those
// of these values.
#include "../core/packing.h"

#include "check.h"

namespace octavo::test {

namespace {

float from_half(uint16_t h) {  // positive, normal
    return std::ldexp(1.0f + (float)(h & 1023) / 1024, (h >> 10 & 31) - 15);
}

// A weight of random codes, and the values that they stand for.
struct Example {
    int rows, inputs, bits, group, zero_point;
    bool halves, is_signed, mins, supers;
    std::vector<uint8_t> codes;
    std::vector<uint16_t> scales;  // fp16
    std::vector<int8_t> small;  // the scales of groups, where there are two levels
    Floats least;

    Example(int n, int k, int b, int g, int zero, bool h, bool s, bool m, bool two)
        : rows(n),
          inputs(k),
          bits(b),
          group(g),
          zero_point(zero),
          halves(h),
          is_signed(s),
          mins(m),
          supers(two) {
        std::mt19937 generator((uint32_t)(n * 1000 + k + b));
        codes.resize((size_t)rows * inputs * bits / 8);
        for (auto& code : codes) code = (uint8_t)generator();
        for (int i = 0; i < rows * groups(); i++) {
            scales.push_back((uint16_t)((10 + generator() % 8) << 10 | generator() % 1024));
            small.push_back((int8_t)generator());
            least.push_back((float)(generator() % 1000) / 300 - 1.5f);
        }
    }
    int groups() const { return (inputs + group - 1) / group; }
    int code(int row, int k) const {
        if (bits == 8)
            return is_signed ? (int8_t)codes[(size_t)row * inputs + k] : codes[(size_t)row * inputs + k];
        const int in = k % group, half = group / 2;
        const int byte = halves ? k / group * half + in % half : k / 2;
        const bool high = halves ? in >= half : k % 2;
        return codes[(size_t)row * inputs / 2 + byte] >> (high ? 4 : 0) & 15;
    }
    float value(int row, int k) const {
        const int at = row * groups() + k / group;
        const float scale = supers ? from_half(scales[row]) * (float)small[at] : from_half(scales[at]);
        const float scaled = (float)(code(row, k) - zero_point) * scale;
        return mins ? scaled + least[at] : scaled;
    }
    QuantisedSource source() const {
        const auto matrix = [&](Matrix::Kind kind, const void* data, int columns, int item) {
            return Matrix{kind, (const uint8_t*)data, rows, columns, (int64_t)columns * item, item};
        };
        QuantisedSource s{};
        s.group = group;
        s.zero_point = zero_point;
        s.num_inputs = inputs;
        s.codes = CodeRows::plain(codes.data(), rows, inputs, bits, is_signed, halves ? group / 2 : 1);
        s.scales = supers ? matrix(Matrix::Kind::i8, small.data(), groups(), 1)
                          : matrix(Matrix::Kind::fp16, scales.data(), groups(), 2);
        if (supers) s.super_scales = matrix(Matrix::Kind::fp16, scales.data(), 1, 2);
        if (mins) s.mins = matrix(Matrix::Kind::fp32, least.data(), groups(), 4);
        s.whole_rows = group >= inputs && bits == 8;
        return s;
    }
};

void check_rows(const KernelTable& kernels, const PackedTiles& packed, const Example& e) {
    Floats row(e.inputs);
    for (int r = 0; r < e.rows; r++) {
        kernels.read_row(packed.tiles, r, 1, row.data());
        for (int k = 0; k < e.inputs; k++)
            CHECK(row[k] == e.value(r, k), "row %d input %d: %g, not %g", r, k, row[k], e.value(r, k));
    }
}

// Checks products with rows whose quantisation is exact (codes times a power of two), so that the right
// result is known to fp32's rounding.
void check_products(const KernelTable& kernels, const PackedTiles& packed, const Example& e) {
    constexpr int kRows = 37;
    const int blocks = (kRows + kTile - 1) / kTile * kTile;
    std::mt19937 generator(5);
    Floats x((size_t)kRows * e.inputs);
    for (float& value : x) value = (float)((int)(generator() % 255) - 127) / 64;
    for (int r = 0; r < kRows; r++)
        for (int k = 0; k < e.inputs; k += kGroup) x[(size_t)r * e.inputs + k] = 127.0f / 64;
    const RowType type = kernels.row_type(packed.tiles.code);
    const int stride = (int)row_elements(type, packed.tiles.num_groups);
    Memory values((size_t)blocks * stride), scales((size_t)blocks * packed.tiles.num_groups * 4),
        sums(scales.size() * 2), scaled(scales.size());
    const Rows rows{.type = type,
                    .values = values.data(),
                    .stride = stride,
                    .scales = (float*)scales.data(),
                    .sums = (int32_t*)sums.data(),
                    .scaled_sums = (float*)scaled.data(),
                    .num_groups = packed.tiles.num_groups,
                    .group_stride = packed.tiles.num_groups};
    for (int r = 0; r < kRows; r++)
        kernels.prepare_row(x.data() + (size_t)r * e.inputs, e.inputs, Norm{}, rows, r);
    Memory scratch(kernels.scratch_bytes(packed.tiles));
    Floats product((size_t)kRows * kTile);
    for (int tile = 0; tile < (e.rows + kTile - 1) / kTile; tile++) {
        const TileRef ref{&packed.tiles, tile, product.data()};
        kernels.tile_products(&ref, 1, rows, 0, kRows, scratch.data());
        for (int r = 0; r < kRows; r++)
            for (int o = 0; o < kTile && tile * kTile + o < e.rows; o++) {
                double sum = 0, size = 0;
                for (int k = 0; k < e.inputs; k++) {
                    const double term = (double)x[(size_t)r * e.inputs + k] * e.value(tile * kTile + o, k);
                    sum += term;
                    size += std::fabs(term);
                }
                CHECK(std::fabs(product[(size_t)r * kTile + o] - sum) <= 2e-5 * size,
                      "row %d output %d: %g, not %g", r, tile * kTile + o, product[r * kTile + o], sum);
            }
    }
}

void test_floats(const KernelTable& kernels, ThreadPool& pool) {
    const int n = 21, k = 45;
    WeightMemory memory;
    const Floats values = normal((size_t)n * k, 3);
    const Matrix matrix{Matrix::Kind::fp32, (const uint8_t*)values.data(), n, k, k * 4, 4};
    Floats row(k);
    for (const Code code : {Code::fp32, Code::bf16}) {
        const PackedTiles packed = pack(pool, memory, matrix, code);
        for (int r = 0; r < n; r++) {
            kernels.read_row(packed.tiles, r, 2, row.data());
            for (int i = 0; i < k; i++)
                CHECK(std::fabs(row[i] - 2 * values[(size_t)r * k + i]) <=
                      (code == Code::fp32 ? 0 : std::fabs(row[i]) / 256));
        }
    }
    const uint16_t halves[] = {0x3c00, 0xc000, 0x0001, 0x7bff};  // 1, -2, 2^-24, 65504
    const Matrix half{Matrix::Kind::fp16, (const uint8_t*)halves, 1, 4, 8, 2};
    const PackedTiles packed = pack(pool, memory, half, Code::fp16);
    kernels.read_row(packed.tiles, 0, 1, row.data());
    CHECK(row[0] == 1 && row[1] == -2 && row[2] == std::ldexp(1.0f, -24) && row[3] == 65504);
}

Example other_codes(Example e) {
    for (uint8_t& code : e.codes) code ^= 0x5a;
    return e;
}

// Two weights whose tiles lie in turns give the same products as apart; nothing is moved where they are not
// laid out alike, or are not the last two.
void test_interleaved(const KernelTable& kernels, ThreadPool& pool) {
    const Example gate(40, 96, 4, 32, 8, true, false, true, false);
    const Example up = other_codes(gate);
    const Example shorter(24, 96, 4, 32, 8, true, false, true, false),
        other(40, 96, 8, 32, 0, false, true, false, false);
    WeightMemory memory;
    Packer packer(memory);
    PackedTiles a = packer.add(gate.source());
    PackedTiles b = packer.add(up.source());
    CHECK(!packer.interleave(b, a));
    CHECK(packer.interleave(a, b));
    CHECK(b.tiles.data == a.tiles.data + a.tiles.tile_bytes &&
          a.tiles.tile(1) == b.tiles.data + b.tiles.tile_bytes);
    CHECK(!packer.interleave(a, b));
    PackedTiles c = packer.add(shorter.source());
    PackedTiles d = packer.add(other.source());
    CHECK(!packer.interleave(a, b) && !packer.interleave(b, c) && !packer.interleave(c, d));
    PackedTiles e = packer.add(gate.source());
    PackedTiles f = packer.add(up.source());
    packer.run(pool);
    CHECK(!packer.interleave(e, f));
    const std::pair<const PackedTiles&, const Example&> all[] = {{a, gate},  {b, up},   {c, shorter},
                                                                 {d, other}, {e, gate}, {f, up}};
    for (const auto& [packed, example] : all) {
        check_rows(kernels, packed, example);
        check_products(kernels, packed, example);
    }
}

// Both weights move to the next piece of memory where one ends between them.
void test_interleaved_in_two_pieces(const KernelTable& kernels, ThreadPool& pool) {
    const Example gate(40, 96, 4, 32, 8, true, false, true, false);
    const Example up = other_codes(gate);
    WeightMemory memory;
    Packer packer(memory);
    const std::shared_ptr<uint8_t> most = memory.take((32u << 20) - 4096);
    PackedTiles a = packer.add(gate.source());
    CHECK(a.num_bytes() < 4096 && 2 * a.num_bytes() > 4096, "%zu bytes", a.num_bytes());
    PackedTiles b = packer.add(up.source());
    const uint8_t* before = a.tiles.data;
    CHECK(packer.interleave(a, b));
    CHECK(a.tiles.data != before && b.tiles.data == a.tiles.data + a.tiles.tile_bytes &&
          a.tiles.tile(1) == b.tiles.data + b.tiles.tile_bytes);
    packer.run(pool);
    const std::pair<const PackedTiles&, const Example&> all[] = {{a, gate}, {b, up}};
    for (const auto& [packed, example] : all) {
        check_rows(kernels, packed, example);
        check_products(kernels, packed, example);
    }
}

}  // namespace

void test_packing(const KernelTable& kernels) {
    ThreadPool pool(3);
    WeightMemory memory;
    const Example examples[] = {
        //      rows inputs bits group zero halves signed mins two levels
        Example(5, 96, 4, 32, 8, true, false, false, false),
        Example(40, 64, 4, 32, 0, true, false, true, false),
        Example(17, 256, 4, 128, 8, false, false, false, false),
        Example(33, 100, 8, 32, 0, false, true, false, false),
        Example(16, 160, 8, 32, 0, false, false, true, false),
        Example(20, 80, 8, 16, 0, false, true, false, true),
        Example(1, 64, 8, 32, 0, false, true, false, true),
        // one scale an output
        Example(37, 100, 8, 100, 0, false, true, false, false),
        Example(16, 192, 8, 192, 0, false, true, false, false),
    };
    Packer packer(memory);
    std::vector<PackedTiles> packed;
    for (const Example& e : examples) packed.push_back(packer.add(e.source()));
    CHECK(packer.num_waiting_bytes() > 0);
    packer.run(pool);
    CHECK(packer.num_waiting_bytes() == 0);
    for (size_t i = 0; i < packed.size(); i++) {
        check_rows(kernels, packed[i], examples[i]);
        check_products(kernels, packed[i], examples[i]);
    }
    test_floats(kernels, pool);
    test_interleaved(kernels, pool);
    test_interleaved_in_two_pieces(kernels, pool);
}

}  // namespace octavo::test
