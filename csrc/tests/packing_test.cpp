// Packed weights: a row that is read back has exactly the format's values, and matmuls use these values.
#include "../plan/packing.h"

#include "weights.h"

namespace octavo::test {

namespace {

void check_rows(const KernelTable& kernels, const PackedTiles& packed, const Example& e) {
    Floats row(e.inputs);
    for (int r = 0; r < e.rows; r++) {
        kernels.read_row(packed.tiles, r, 1, row.data());
        for (int k = 0; k < e.inputs; k++)
            CHECK(row[k] == e.value(r, k), "row %d input %d: %g, not %g", r, k, row[k], e.value(r, k));
    }
}

// Checks matmuls of rows whose quantization is exact (codes times a power of two), so that the expected
// result is known up to fp32 rounding. `largest`: with the largest values only.
void check_matmul(const KernelTable& kernels, const PackedTiles& packed, const Example& e,
                  bool largest = false) {
    constexpr int kRows = 37;
    const int blocks = (kRows + kTile - 1) / kTile * kTile;
    std::mt19937 generator(5);
    Floats x(static_cast<size_t>(kRows) * e.inputs);
    for (float& value : x)
        value = largest ? 127.0f / 64 : static_cast<float>(static_cast<int>(generator() % 255) - 127) / 64;
    for (int r = 0; r < kRows; r++)
        for (int k = 0; k < e.inputs; k += kGroup) x[static_cast<size_t>(r) * e.inputs + k] = 127.0f / 64;
    const RowType type = kernels.row_type(packed.tiles.code);
    const int stride = static_cast<int>(row_elements(type, packed.tiles.num_groups));
    Memory values(static_cast<size_t>(blocks) * stride),
        scales(static_cast<size_t>(blocks) * packed.tiles.num_groups * 4), sums(scales.size() * 2),
        scaled(scales.size());
    const QuantizedRows rows{.type = type,
                             .values = values.data(),
                             .stride = stride,
                             .scales = reinterpret_cast<float*>(scales.data()),
                             .sums = reinterpret_cast<int32_t*>(sums.data()),
                             .scaled_sums = reinterpret_cast<float*>(scaled.data()),
                             .num_groups = packed.tiles.num_groups,
                             .group_stride = packed.tiles.num_groups};
    for (int r = 0; r < kRows; r++)
        kernels.quantize_row(x.data() + static_cast<size_t>(r) * e.inputs, e.inputs, Norm{}, rows, r);
    Memory scratch(kernels.scratch_bytes(packed.tiles));
    Floats results(static_cast<size_t>(kRows) * kTile);
    for (int tile = 0; tile < (e.rows + kTile - 1) / kTile; tile++) {
        const TileRef ref{&packed.tiles, tile, results.data()};
        kernels.tile_matmul(&ref, 1, rows, 0, kRows, scratch.data());
        for (int r = 0; r < kRows; r++)
            for (int o = 0; o < kTile && tile * kTile + o < e.rows; o++) {
                double sum = 0, size = 0;
                for (int k = 0; k < e.inputs; k++) {
                    const double term = static_cast<double>(x[static_cast<size_t>(r) * e.inputs + k]) *
                                        e.value(tile * kTile + o, k);
                    sum += term;
                    size += std::fabs(term);
                }
                CHECK(std::fabs(results[static_cast<size_t>(r) * kTile + o] - sum) <= 2e-5 * size,
                      "row %d output %d: %g, not %g", r, tile * kTile + o, results[r * kTile + o], sum);
            }
    }
}

// Checks that matmuls with two weights are bitwise equal, and that each row has the bits that it has alone.
void check_same(const KernelTable& kernels, const PackedTiles& a, const PackedTiles& b, int num_rows,
                bool largest = false) {
    const int inputs = a.tiles.num_inputs, groups = a.tiles.num_groups;
    const RowType type = kernels.row_type(a.tiles.code);
    const int stride = static_cast<int>(row_elements(type, groups));
    Memory values(static_cast<size_t>(2) * kTile * stride),
        scales(static_cast<size_t>(2) * kTile * groups * 4), sums(scales.size() * 2), scaled(scales.size()),
        scratch(kernels.scratch_bytes(b.tiles));
    const QuantizedRows rows{.type = type,
                             .values = values.data(),
                             .stride = stride,
                             .scales = reinterpret_cast<float*>(scales.data()),
                             .sums = reinterpret_cast<int32_t*>(sums.data()),
                             .scaled_sums = reinterpret_cast<float*>(scaled.data()),
                             .num_groups = groups,
                             .group_stride = groups};
    for (int r = 0; r < num_rows; r++) {
        const Floats x = largest ? Floats(inputs, r % 2 ? -3.0f : 3.0f) : normal(inputs, 90 + r);
        kernels.quantize_row(x.data(), inputs, Norm{}, rows, r);
    }
    for (int tile = 0; tile < a.tiles.num_tiles(); tile++) {
        Floats expected(static_cast<size_t>(num_rows) * kTile), found(expected.size(), 1);
        const TileRef first{&a.tiles, tile, found.data()}, second{&b.tiles, tile, expected.data()};
        kernels.tile_matmul(&first, 1, rows, 0, num_rows, scratch.data());
        kernels.tile_matmul(&second, 1, rows, 0, num_rows, scratch.data());
        CHECK(same_bits(expected, found), "%d rows, tile %d", num_rows, tile);
        Floats alone(expected.size());
        for (int r = 0; r < num_rows; r++) {
            const TileRef row{&b.tiles, tile, alone.data() + static_cast<size_t>(r) * kTile};
            kernels.tile_matmul(&row, 1, rows, r, 1, scratch.data());
        }
        CHECK(same_bits(expected, alone), "%d rows and each alone, tile %d", num_rows, tile);
    }
}

// Checks that matmuls that skip zeros are bitwise equal to those that do not, for one row and two.
void check_skipping(const KernelTable& kernels, const PackedTiles& packed, int inputs) {
    const RowType type = kernels.row_type(packed.tiles.code);
    const int stride = static_cast<int>(row_elements(type, packed.tiles.num_groups));
    Memory values(static_cast<size_t>(kTile) * stride * 4),
        scales(static_cast<size_t>(kTile) * packed.tiles.num_groups * 4), sums(scales.size() * 2),
        scaled(scales.size()), scratch(kernels.scratch_bytes(packed.tiles));
    QuantizedRows rows{.type = type,
                       .values = values.data(),
                       .stride = stride,
                       .scales = reinterpret_cast<float*>(scales.data()),
                       .sums = reinterpret_cast<int32_t*>(sums.data()),
                       .scaled_sums = reinterpret_cast<float*>(scaled.data()),
                       .num_groups = packed.tiles.num_groups,
                       .group_stride = packed.tiles.num_groups};
    for (const double kept : {0.0, 0.03, 0.3, 1.0}) {
        for (int r = 0; r < 2; r++) {
            Floats x = normal(inputs, 7 + r);
            std::mt19937 generator(r);
            for (float& value : x)
                if (generator() % 1000 >= 1000 * kept) value = generator() % 2 ? 0.0f : -0.0f;
            if (kept > 0.1) x[3] = 40;  // needs a second term
            kernels.quantize_row(x.data(), inputs, Norm{}, rows, r);
        }
        for (int tile = 0; tile < packed.tiles.num_tiles(); tile++)
            for (const int num_rows : {1, 2}) {
                Floats dense(static_cast<size_t>(num_rows) * kTile, 1), skipping(dense);
                const TileRef plain{&packed.tiles, tile, dense.data()};
                kernels.tile_matmul(&plain, 1, rows, 0, num_rows, scratch.data());
                QuantizedRows marked = rows;
                marked.skips_zeros = true;
                const TileRef ref{&packed.tiles, tile, skipping.data()};
                kernels.tile_matmul(&ref, 1, marked, 0, num_rows, scratch.data());
                CHECK(same_bits(dense, skipping), "%s, %g kept, tile %d",
                      kCodeNames[static_cast<int>(packed.tiles.code)], kept, tile);
            }
    }
}

void test_floats(const KernelTable& kernels, ThreadPool& pool) {
    const int n = 21, k = 45;
    WeightMemory memory;
    const Floats values = normal(static_cast<size_t>(n) * k, 3);
    const Matrix matrix{Matrix::Kind::fp32, reinterpret_cast<const uint8_t*>(values.data()), n, k, k * 4, 4};
    Floats row(k);
    for (const Code code : {Code::fp32, Code::bf16}) {
        const PackedTiles packed = pack(pool, memory, matrix, code);
        for (int r = 0; r < n; r++) {
            kernels.read_row(packed.tiles, r, 2, row.data());
            for (int i = 0; i < k; i++)
                CHECK(std::fabs(row[i] - 2 * values[static_cast<size_t>(r) * k + i]) <=
                      (code == Code::fp32 ? 0 : std::fabs(row[i]) / 256));
        }
    }
    const uint16_t halves[] = {0x3c00, 0xc000, 0x0001, 0x7bff};  // 1, -2, 2^-24, 65504
    const Matrix half{Matrix::Kind::fp16, reinterpret_cast<const uint8_t*>(halves), 1, 4, 8, 2};
    const PackedTiles packed = pack(pool, memory, half, Code::fp16);
    kernels.read_row(packed.tiles, 0, 1, row.data());
    CHECK(row[0] == 1 && row[1] == -2 && row[2] == std::ldexp(1.0f, -24) && row[3] == 65504);
}

void test_skipping(const KernelTable& kernels, ThreadPool& pool) {
    const int n = 21, k = 1100;
    WeightMemory memory;
    const Floats values = normal(static_cast<size_t>(n) * k, 11);
    std::vector<uint16_t> halves(values.size());
    for (uint16_t& half : halves)
        half = static_cast<uint16_t>(0x3000 + (&half - halves.data()) * 2654435761u % 0x800);
    const Matrix floats{Matrix::Kind::fp32, reinterpret_cast<const uint8_t*>(values.data()), n, k, k * 4, 4};
    const Matrix half{Matrix::Kind::fp16, reinterpret_cast<const uint8_t*>(halves.data()), n, k, k * 2, 2};
    check_skipping(kernels, pack(pool, memory, floats, Code::fp32), k);
    check_skipping(kernels, pack(pool, memory, floats, Code::bf16), k);
    check_skipping(kernels, pack(pool, memory, half, Code::fp16), k);
    for (const Example& e : {Example(n, k, 8, k, 0, false, true, false, false),
                             Example(n, k, 8, 32, 0, false, true, false, false)}) {
        Packer packer(memory);
        const PackedTiles packed = packer.add(e.source());
        packer.run(pool);
        check_skipping(kernels, packed, k);
    }
    for (const Code code : {Code::i8, Code::fp16, Code::fp32}) CHECK(kernels.skips_zeros(code));
    CHECK(!kernels.skips_zeros(Code::u4) && !kernels.skips_zeros(Code::u8));
}

// Matmuls with a weight stored by columns are bitwise equal to those with its tiles, for any number of rows
// and of zeros in them.
void check_columns(const KernelTable& kernels, const PackedTiles& tiles, const PackedTiles& columns,
                   int inputs) {
    constexpr int kRows = 21;
    const Tiles& w = columns.tiles;
    const RowType type = kernels.row_type(w.code);
    const int stride = static_cast<int>(row_elements(type, w.num_groups));
    Memory values(static_cast<size_t>(2) * kTile * stride),
        scales(static_cast<size_t>(2) * kTile * w.num_groups * 4), sums(scales.size() * 2),
        scaled(scales.size()), scratch(kernels.scratch_bytes(tiles.tiles)),
        own_scratch(kernels.scratch_bytes(w));
    const QuantizedRows rows{.type = type,
                             .values = values.data(),
                             .stride = stride,
                             .scales = reinterpret_cast<float*>(scales.data()),
                             .sums = reinterpret_cast<int32_t*>(sums.data()),
                             .scaled_sums = reinterpret_cast<float*>(scaled.data()),
                             .num_groups = w.num_groups,
                             .group_stride = w.num_groups};
    for (const double kept : {0.0, 0.02, 0.5, 1.0}) {
        for (int r = 0; r < kRows; r++) {
            Floats x = normal(inputs, 70 + r);
            std::mt19937 generator(r);
            for (float& value : x)
                if (generator() % 1000 >= 1000 * kept) value = 0;
            if (kept > 0.1) x[r % inputs] = 40, x[inputs - 1] = -30;  // need a second term
            kernels.quantize_row(x.data(), inputs, Norm{}, rows, r);
        }
        for (const int num_rows : {1, 2, 3, 4, 5, 16})
            for (int tile = 0; tile < w.num_tiles();) {
                const int most = num_rows <= kColumnRows ? 5 : 3;
                const int count = std::min(most, w.num_tiles() - tile);
                const size_t each = static_cast<size_t>(num_rows) * kTile;
                Floats expected(count * each), found(count * each, 1);
                for (int t = 0; t < count; t++) {
                    const TileRef ref{&tiles.tiles, tile + t, expected.data() + t * each};
                    kernels.tile_matmul(&ref, 1, rows, 5, num_rows, scratch.data());
                }
                kernels.column_matmul(w, tile, count, rows, 5, num_rows, found.data(), own_scratch.data());
                CHECK(same_bits(expected, found), "%g kept, %d rows, %d tiles from %d", kept, num_rows, count,
                      tile);
                tile += count;
            }
    }
}

void test_columns(const KernelTable& kernels, ThreadPool& pool) {
    const Example examples[] = {Example(149, 1100, 8, 1100, 0, false, true, false, false),
                                Example(16, 64, 8, 64, 0, false, true, false, false),
                                Example(7, 3, 8, 3, 0, false, true, false, false),
                                Example(2600, 96, 8, 96, 0, false, true, false, false),
                                Example(155, 1120, 4, 32, 8, true, false, false, false),
                                Example(32, 64, 4, 32, 0, true, false, true, false),
                                Example(2600, 96, 4, 32, 0, false, false, true, false)};
    for (const Example& e : examples) {
        QuantizedSource by_columns = e.source();
        by_columns.by_columns = true;
        WeightMemory memory;
        Packer packer(memory);
        const PackedTiles tiles = packer.add(e.source()), columns = packer.add(by_columns);
        packer.run(pool);
        const bool in_pairs = e.bits == 8 || tiles.tiles.num_tiles() % 2 == 0;
        CHECK(columns.num_bytes() == tiles.num_bytes() && (columns.tiles.column_stride > 0) == in_pairs);
        if (in_pairs) check_columns(kernels, tiles, columns, e.inputs);
    }
}

// Matmuls with codes of a table are bitwise equal to those with the table's values.
void test_tables(const KernelTable& kernels, ThreadPool& pool) {
    for (const int group : {16, 32, 96}) {
        const Example codes = with_table(Example(40, 192, 4, group, 0, false, false, false, false));
        Example numbers(40, 192, 8, group, 0, false, true, false, false);
        numbers.scales = codes.scales;
        for (int row = 0; row < 40; row++)
            for (int k = 0; k < 192; k++)
                numbers.codes[static_cast<size_t>(row) * 192 + k] =
                    static_cast<uint8_t>(static_cast<int8_t>(codes.code(row, k)));
        WeightMemory memory;
        Packer packer(memory);
        const PackedTiles some[] = {packer.add(codes.source()), packer.add(numbers.source())};
        packer.run(pool);
        CHECK(some[0].tiles.code == Code::l4 && some[0].num_bytes() < some[1].num_bytes());
        CHECK(kernels.row_type(Code::l4) == kernels.row_type(Code::u8));
        for (const int num_rows : {1, 2, 4, 8, 31}) check_same(kernels, some[0], some[1], num_rows);
    }
}

// Checks that a weight needs less memory than another, with bitwise equal rows and matmuls.
void check_smaller(const KernelTable& kernels, const PackedTiles& plain, const PackedTiles& small) {
    CHECK(small.num_bytes() < plain.num_bytes());
    const int inputs = plain.tiles.num_inputs;
    Floats wanted(inputs), found(inputs);
    for (int row = 0; row < plain.tiles.num_rows; row++) {
        kernels.read_row(plain.tiles, row, 1, wanted.data());
        kernels.read_row(small.tiles, row, 1, found.data());
        CHECK(same_bits(wanted, found), "%s, row %d", kCodeNames[static_cast<int>(small.tiles.code)], row);
    }
    for (const int num_rows : {1, 2, 3, 4, 8, 15, 27, 32}) check_same(kernels, plain, small, num_rows);
}

// Scales and mins that stay bytes with factors have the same values as in floats, and matmuls are bitwise
// equal; so are codes of 2, 3, 5 and 6 bits and the same codes in nibbles or bytes.
void test_small_levels(const KernelTable& kernels, ThreadPool& pool) {
    const Grouped numbers(3);
    const auto parse_code = [](int bits, int group, bool has_mins) {
        const bool halves = group == 16;
        if (bits == 2 && halves && has_mins) return Code::u2;
        if (bits == 3 && halves && !has_mins) return Code::u3;
        if (bits <= 4) return halves ? Code::l4 : Code::u4;
        if (bits == 5 && !halves) return Code::u5;
        return bits == 6 && halves && !has_mins ? Code::u6 : Code::u8;
    };
    for (const int bits : {2, 3, 4, 5, 6, 8})
        for (const int group : {16, 32})
            for (const bool has_mins : {false, true})
                for (const Matrix::Kind factor_kind : {Matrix::Kind::fp16, Matrix::Kind::fp32}) {
                    QuantizedSource s = numbers.two_levels(bits, group, has_mins, factor_kind);
                    WeightMemory memory;
                    Packer packer(memory);
                    const PackedTiles plain = packer.add(s);
                    s.small_levels = true;
                    const PackedTiles small = packer.add(s);
                    packer.run(pool);
                    CHECK(small.tiles.code == parse_code(bits, group, has_mins), "%d bits in groups of %d",
                          bits, group);
                    CHECK(small.tiles.half_factors == (factor_kind == Matrix::Kind::fp16));
                    check_smaller(kernels, plain, small);
                }
}

Floats to_floats(const std::vector<uint16_t>& halves) {
    Floats numbers;
    for (const uint16_t half : halves) numbers.push_back(from_half(half));
    return numbers;
}

// 5-bit codes with fp16 scales have the same matmuls as codes in bytes with the same scales as fp32.
void test_five_bits(const KernelTable& kernels, ThreadPool& pool) {
    const Grouped numbers(4);
    for (const bool has_mins : {false, true}) {
        QuantizedSource s = numbers.one_level(5, has_mins);
        WeightMemory memory;
        Packer packer(memory);
        const PackedTiles small = packer.add(s);
        const Floats scales = to_floats(numbers.halves);
        const auto as_fp32 = [&](const Matrix& m, int first) {
            return Grouped::matrix(Matrix::Kind::fp32, scales.data() + first, m.columns, sizeof(float));
        };
        s.scales = as_fp32(s.scales, 0);
        if (has_mins) s.mins = as_fp32(s.mins, 5);
        const PackedTiles wide = packer.add(s);
        packer.run(pool);
        CHECK(small.tiles.code == Code::u5 && wide.tiles.code == Code::u8);
        check_smaller(kernels, wide, small);
    }
}

// Sums of the largest codes and values are exact, though most levels add some of them in 16 bits.
void test_largest_sums(const KernelTable& kernels, ThreadPool& pool) {
    Example examples[] = {Example(16, 512, 4, 32, 8, true, false, false, false),
                          Example(16, 512, 4, 32, 0, true, false, true, false),
                          Example(16, 512, 8, 32, 0, false, false, false, false),
                          Example(16, 512, 8, 16, 0, false, true, false, false)};
    for (Example& e : examples) {
        std::fill(e.codes.begin(), e.codes.end(), e.is_signed ? 0x80 : 0xff);
        WeightMemory memory;
        Packer packer(memory);
        const PackedTiles packed = packer.add(e.source());
        packer.run(pool);
        check_matmul(kernels, packed, e, true);
    }
    Grouped numbers(5);
    std::fill(numbers.codes.begin(), numbers.codes.end(), 0xff);
    for (const auto& [bits, group, has_mins] :
         {std::tuple(2, 16, true), {3, 16, false}, {4, 32, true}, {5, 32, true}, {6, 16, false}}) {
        QuantizedSource s = numbers.two_levels(bits, group, has_mins, Matrix::Kind::fp16);
        WeightMemory memory;
        Packer packer(memory);
        const PackedTiles wide = packer.add(s);
        s.small_levels = true;
        const PackedTiles narrow = packer.add(s);
        packer.run(pool);
        for (const int num_rows : {1, 2, 4}) check_same(kernels, wide, narrow, num_rows, true);
    }
}

// Two weights with interleaved tiles have the same matmuls as separate ones. Nothing is moved if their
// layouts differ or if they are not the last two.
void test_interleaved(const KernelTable& kernels, ThreadPool& pool) {
    const Example gate(40, 96, 4, 32, 0, true, false, true, false);
    const Example up = other_codes(gate);
    const Example shorter(24, 96, 4, 32, 0, true, false, true, false),
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
        check_matmul(kernels, packed, example);
    }
}

// Both weights move to the next memory block if a block ends between them.
void test_interleaved_across_blocks(const KernelTable& kernels, ThreadPool& pool) {
    const Example gate(40, 96, 4, 32, 0, true, false, true, false);
    const Example up = other_codes(gate);
    WeightMemory memory;
    Packer packer(memory);
    const std::shared_ptr<uint8_t> most = memory.allocate((32u << 20) - 4096);
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
        check_matmul(kernels, packed, example);
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
        with_table(Example(37, 128, 4, 32, 0, true, false, false, false)),
        with_table(Example(20, 96, 4, 16, 0, false, false, false, true)),
        Example(21, 96, 4, 16, 0, false, false, true, false),
        // one scale per output
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
        check_matmul(kernels, packed[i], examples[i]);
    }
    test_floats(kernels, pool);
    test_skipping(kernels, pool);
    test_tables(kernels, pool);
    test_small_levels(kernels, pool);
    test_five_bits(kernels, pool);
    test_largest_sums(kernels, pool);
    test_columns(kernels, pool);
    test_interleaved(kernels, pool);
    test_interleaved_across_blocks(kernels, pool);
}

}  // namespace octavo::test
