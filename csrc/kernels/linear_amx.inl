// Matmuls on AMX: 16 rows by 16 outputs at a time.
//
// The path for codes in groups unpacks a weight tile once to signed bytes (codes minus the zero point) in
// scratch, multiplies 16 rows at a time, and scales each group's exact int32 sums by the same fmas in the
// same order as linear.inl. The results are bitwise equal, so few rows may take either path. dpbf16ps has a
// summation order of its own, so bf16 uses AMX for any number of rows.
#pragma once
#include "../simd/amx.h"
#include "linear.inl"

namespace octavo {
namespace {

constexpr int kAmxMinRows = 6;  // of codes with one scale per output: crossover at 5 to 7

// -- integers in groups --

// Writes the signed codes of one tile as B tiles, [groups][8][16 o][4].
template <Code C>
void unpack_tile(const Tiles& w, const uint8_t* tile, int8_t* out) {
    static_assert(kCodeOffset == 0);
    const Table16 table(w.table);
    const __m512i zero = _mm512_set1_epi8(static_cast<char>(w.zero_point));
    const size_t factors = factor_bytes(w), spans = (w.num_groups + kSmallSpan - 1) / kSmallSpan,
                 step = (w.tile_bytes - spans * factors) / w.num_groups;
    for (int g = 0; g < w.num_groups; g++, tile += step, out += kTile * kGroup) {
        if (g % kSmallSpan == 0) tile += factors;
        prefetch_ahead<codes_bytes(C)>(tile);
        for (int v = 0; v < 8; v++)
            _mm512_store_si512(out + 64 * v, _mm512_sub_epi8(raw(load_codes<C>(tile, table, v)), zero));
    }
}

// Adds the scaled sums [16 rows][16 o] of inputs that share a scale to the accumulators, which are in
// registers. `scaled_sums`: of the rows' integers.
template <ZeroPointKind Z>
OCTAVO_INLINE void add_scaled(vf scale, vf group_min, const float* d, const float* scaled_sums,
                              const int32_t* sums, vf (&acc)[kTile]) {
#pragma GCC unroll 16
    for (int m = 0; m < kTile; m++) {
        acc[m] = fma(to_float(load_i(sums + m * kTile)), scale * d[m], acc[m]);
        if (Z != ZeroPointKind::none) acc[m] = fma(group_min, splat(scaled_sums[m]), acc[m]);
    }
}

// Multiplies 16 rows by kDepth inputs into tile register kTileIndex, 0 or 1.
template <int kTileIndex>
OCTAVO_INLINE void multiply_group(const int8_t* q, int64_t stride, const int8_t* codes) {
    // The intrinsics require literal register numbers.
    if constexpr (kTileIndex == 0) {
        _tile_zero(0);
        _tile_loadd(4, q, stride);
        _tile_loadd(6, codes, 64);
        _tile_dpbssd(0, 4, 6);
    } else {
        _tile_zero(1);
        _tile_loadd(5, q, stride);
        _tile_loadd(7, codes, 64);
        _tile_dpbssd(1, 5, 7);
    }
}

// Multiplies one tile by 16 rows. AMX computes a group while it stores the sums of the one before and the
// vector unit scales those of the one before that: so few instructions are between them that the processor
// executes them at the same time. kHalves: scales and mins change every 16 inputs.
template <ScaleType S, ZeroPointKind Z, bool kHalves, bool kShared = false>
void sixteen_rows(const Tiles& w, const uint8_t* tile, const int8_t* codes, const QuantizedRows& x,
                  int64_t row, float* out) {
    constexpr int kParts = kHalves ? 2 : 1, kDepth = kGroup / kParts;
    constexpr size_t kScale = scale_bytes<S>(), kMin = kShared ? 0 : zero_point_bytes<S, Z>();
    alignas(64) int32_t sums[4][kTile * kTile];
    alignas(64) float scaled_sums[kTile];
    const int8_t* q = reinterpret_cast<const int8_t*>(x.values) + row * x.stride;
    const size_t codes_size = codes_bytes(w.code), step = codes_size + (kScale + kMin) * kParts;
    const int count = w.num_groups * kParts;
    configure_matmul(kTile, kDepth);
    vf acc[kTile] = {};
    GroupLevels<S, Z, kShared> levels(w);
    const auto scale_one = [&](int i, const int32_t* from) {
        const int g = i / kParts, part = i % kParts;
        if (part == 0) tile = levels.begin(tile, g);
        const uint8_t* at_scale = tile + codes_size + part * kScale;
        const vf scale = levels.scale(at_scale);
        const vf group_min =
            levels.min(kShared ? at_scale : tile + codes_size + kScale * kParts + part * kMin, scale);
        const float* d = x.scales + x.at(row, g);
        if (kHalves && Z != ZeroPointKind::none)
            store(scaled_sums, load(d) * to_float(load_i(x.sums + x.half_at(row, g, part))));
        add_scaled<Z>(scale, group_min, d, kHalves ? scaled_sums : x.scaled_sums + x.at(row, g), from, acc);
        if (part == kParts - 1) tile += step;
    };
    const auto multiply = [&]<int kTileIndex>(int i) {
        multiply_group<kTileIndex>(q + i * kDepth, x.stride, codes + i * kTile * kDepth);
    };
    multiply.template operator()<0>(0);
    for (int i = 1; i < count + 2; i += 2) {
        if (i < count) multiply.template operator()<1>(i);
        if (i <= count) _tile_stored(0, sums[(i - 1) % 4], 64);
        if (i >= 2) scale_one(i - 2, sums[(i - 2) % 4]);
        if (i + 1 < count) multiply.template operator()<0>(i + 1);
        if (i < count) _tile_stored(1, sums[i % 4], 64);
        if (i - 1 < count) scale_one(i - 1, sums[(i - 1) % 4]);
    }
    for (int m = 0; m < kTile; m++) store(out + 16 * m, acc[m]);
}

using SixteenRowsFn = void (*)(const Tiles& w, const uint8_t* tile, const int8_t* codes,
                               const QuantizedRows& x, int64_t row, float* out);

template <ScaleType S>
SixteenRowsFn choose_sixteen_rows(const Tiles& w) {
    const bool has_min = w.zero_point_kind == ZeroPointKind::min;
    if constexpr (S == ScaleType::small)
        if (shares_levels(w.code)) return sixteen_rows<S, ZeroPointKind::min, true, true>;
    if (w.half_groups)
        return has_min ? sixteen_rows<S, ZeroPointKind::min, true>
                       : sixteen_rows<S, ZeroPointKind::none, true>;
    if constexpr (S != ScaleType::small)
        if (w.zero_point_kind == ZeroPointKind::zero) return sixteen_rows<S, ZeroPointKind::zero, false>;
    return has_min ? sixteen_rows<S, ZeroPointKind::min, false> : sixteen_rows<S, ZeroPointKind::none, false>;
}

SixteenRowsFn choose_sixteen_rows(const Tiles& w) {
    switch (w.scale_type) {
        case ScaleType::fp16: return choose_sixteen_rows<ScaleType::fp16>(w);
        case ScaleType::small: return choose_sixteen_rows<ScaleType::small>(w);
        default: return choose_sixteen_rows<ScaleType::fp32>(w);
    }
}

using UnpackFn = void (*)(const Tiles& w, const uint8_t* tile, int8_t* out);

UnpackFn choose_unpacking(Code code) {
    switch (code) {
        case Code::u2: return unpack_tile<Code::u2>;
        case Code::u3: return unpack_tile<Code::u3>;
        case Code::u4: return unpack_tile<Code::u4>;
        case Code::u5: return unpack_tile<Code::u5>;
        case Code::u6: return unpack_tile<Code::u6>;
        case Code::l4: return unpack_tile<Code::l4>;
        case Code::u8: return unpack_tile<Code::u8>;
        default: return nullptr;
    }
}

// Whether AMX multiplies blocks of 16 rows. 8-bit codes without a zero point may exceed 127 and stay on the
// vector unit.
OCTAVO_INLINE bool is_multiplied_in_blocks(const Tiles& w) {
    return choose_unpacking(w.code) && (w.zero_point || !(w.code == Code::u8 || w.code == Code::l4));
}

// Multiplies a tile by whole blocks of 16 rows.
void amx_matmul_blocks(const TileRef& ref, const QuantizedRows& x, int64_t row0, int num_rows,
                       uint8_t* scratch) {
    const Tiles& w = *ref.weight;
    int8_t* codes = reinterpret_cast<int8_t*>(scratch);
    choose_unpacking(w.code)(w, ref.data(), codes);
    const SixteenRowsFn run = choose_sixteen_rows(w);
    for (int done = 0; done < num_rows; done += kTile)
        run(w, ref.data(), codes, x, row0 + done, ref.acc + 16 * done);
}

// Prefetches 1 KiB into the second-level cache, at the same offset in the pair of tiles after this pair.
OCTAVO_INLINE void prefetch_successor(const TileRef* refs, const uint8_t* p) {
    const size_t ahead = 2 * refs->weight->tile_bytes;
    for (size_t line = 0; line < 1024; line += 64) __builtin_prefetch(p + ahead + line, 0, 2);
}

// -- integers with one scale per output --

// Multiplies two tiles (or one) by up to 16 rows of two terms into exact sums [2 tiles][2 terms][rows][16
// o], with four loads for four multiplications. With `kFirst` the weights are read from memory for the
// first time in this step.
template <bool kFirst, bool kBoth>
OCTAVO_INLINE void multiply_whole(const TileRef* refs, const QuantizedRows& x, int64_t row,
                                  int32_t (*sums)[kTile * kTile]) {
    const int inputs = refs->weight->num_groups * kGroup;
    const uint8_t *left = refs[0].data(), *right = kBoth ? refs[1].data() : left;
    const int8_t* q = reinterpret_cast<const int8_t*>(x.values) + row * x.stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < inputs; k += 64) {
        if (kFirst && kBoth) prefetch_successor(refs, left + static_cast<size_t>(k) * 16);
        _tile_loadd(6, left + static_cast<size_t>(k) * 16, 64);
        _tile_loadd(4, q + k, x.stride);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(5, q + inputs + k, x.stride);
        _tile_dpbssd(1, 5, 6);
        if (!kBoth) continue;
        if (kFirst) prefetch_successor(refs, right + static_cast<size_t>(k) * 16);
        _tile_loadd(7, right + static_cast<size_t>(k) * 16, 64);
        _tile_dpbssd(2, 4, 7);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (!kBoth) return;
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
}

// Writes the scaled sums to the tiles' accumulators from row `done` on.
OCTAVO_INLINE void scale_all(const TileRef* refs, int count, const QuantizedRows& x, int64_t row, int rows,
                             int done, const int32_t (*sums)[kTile * kTile]) {
    for (int t = 0; t < count; t++) {
        const vf scale = output_scales(*refs[t].weight, refs[t].data());
        for (int m = 0; m < rows; m++)
            store(refs[t].acc + 16 * (done + m), scale_whole(x, row + m, scale, load_i(sums[2 * t] + 16 * m),
                                                             load_i(sums[2 * t + 1] + 16 * m)));
    }
}

// The vector unit scales 16 rows while AMX multiplies the next 16.
void amx_matmul_whole(const TileRef* refs, int count, const QuantizedRows& x, int64_t row0, int num_rows) {
    alignas(64) int32_t sums[2][4][kTile * kTile];
    const auto rows_at = [&](int done) { return num_rows - done < kTile ? num_rows - done : kTile; };
    for (int done = 0; done < num_rows + kTile; done += kTile) {
        if (done < num_rows) {
            configure_matmul(rows_at(done), 64);
            auto* to = sums[done / kTile % 2];
            if (count == 1)
                multiply_whole<false, false>(refs, x, row0 + done, to);
            else
                done ? multiply_whole<false, true>(refs, x, row0 + done, to)
                     : multiply_whole<true, true>(refs, x, row0 + done, to);
        }
        const int before = done - kTile;
        if (before >= 0)
            scale_all(refs, count, x, row0 + before, rows_at(before), before, sums[before / kTile % 2]);
    }
}

// -- bf16 --

// One tile by up to 16 rows.
void bf16_one(const TileRef& ref, const uint16_t* values, int64_t stride, int done) {
    const uint8_t* data = ref.data();
    _tile_zero(0);
    for (int g = 0; g < ref.weight->num_groups; g++) {
        prefetch_ahead<1024>(data + static_cast<size_t>(g) * 1024);
        _tile_loadd(6, data + static_cast<size_t>(g) * 1024, 64);
        _tile_loadd(4, values + g * kGroup, stride * 2);
        _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, ref.acc + 16 * done, 64);
}

// Two tiles by up to 16 rows: two independent chains of sums.
void bf16_two(const TileRef* refs, const uint16_t* values, int64_t stride, int done) {
    const uint8_t *first = refs[0].data(), *second = refs[1].data();
    _tile_zero(0);
    _tile_zero(1);
    for (int g = 0; g < refs->weight->num_groups; g++) {
        prefetch_ahead<1024>(first + static_cast<size_t>(g) * 1024);
        prefetch_ahead<1024>(second + static_cast<size_t>(g) * 1024);
        _tile_loadd(4, values + g * kGroup, stride * 2);
        _tile_loadd(6, first + static_cast<size_t>(g) * 1024, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, second + static_cast<size_t>(g) * 1024, 64);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, refs[0].acc + 16 * done, 64);
    _tile_stored(1, refs[1].acc + 16 * done, 64);
}

// Two tiles by 32 rows: four loads for four multiplications, which keeps AMX busy. With `kFirst` the
// weights are read from memory for the first time in this step.
template <bool kFirst>
void bf16_square(const TileRef* refs, const uint16_t* values, int64_t stride, int done) {
    const uint8_t *first = refs[0].data(), *second = refs[1].data();
    const uint16_t* more = values + 16 * stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int g = 0; g < refs->weight->num_groups; g++) {
        if (kFirst) prefetch_successor(refs, first + static_cast<size_t>(g) * 1024);
        _tile_loadd(6, first + static_cast<size_t>(g) * 1024, 64);
        _tile_loadd(4, values + g * kGroup, stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        if (kFirst) prefetch_successor(refs, second + static_cast<size_t>(g) * 1024);
        _tile_loadd(7, second + static_cast<size_t>(g) * 1024, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, more + g * kGroup, stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, refs[0].acc + 16 * done, 64);
    _tile_stored(1, refs[1].acc + 16 * done, 64);
    _tile_stored(2, refs[0].acc + 16 * (done + 16), 64);
    _tile_stored(3, refs[1].acc + 16 * (done + 16), 64);
}

void amx_matmul_bf16(const TileRef* refs, int count, const QuantizedRows& x, int64_t row0, int num_rows) {
    for (int done = 0; done < num_rows;) {
        const int left = num_rows - done, rows = left < 16 ? left : 16;
        const uint16_t* values = reinterpret_cast<const uint16_t*>(x.values) + (row0 + done) * x.stride;
        configure_matmul(rows, 64);
        if (count == 2 && left >= 32) {
            done ? bf16_square<false>(refs, values, x.stride, done)
                 : bf16_square<true>(refs, values, x.stride, done);
            done += 32;
            continue;
        }
        count == 2 ? bf16_two(refs, values, x.stride, done) : bf16_one(refs[0], values, x.stride, done);
        done += rows;
    }
}

// -- dispatch --

void amx_matmul(const TileRef* tiles, int count, const QuantizedRows& x, int64_t row0, int num_rows,
                uint8_t* scratch) {
    const auto prefetch_first = [&] { Prefetcher(tiles->prefetch, 1).step(); };
    if (tiles->weight->code == Code::bf16)
        return prefetch_first(), amx_matmul_bf16(tiles, count, x, row0, num_rows);
    if (tiles->weight->code == Code::i8 && num_rows >= kAmxMinRows)
        return prefetch_first(), amx_matmul_whole(tiles, count, x, row0, num_rows);
    if (count == 2 && !tiles->weight->is_laid_out_as(*tiles[1].weight)) {
        amx_matmul(tiles, 1, x, row0, num_rows, scratch);
        return amx_matmul(tiles + 1, 1, x, row0, num_rows, scratch);
    }
    // Fewer than 16 rows are faster on dpbusd.
    const int in_blocks = is_multiplied_in_blocks(*tiles->weight) ? num_rows / kTile * kTile : 0;
    TileRef rest[2];
    for (int i = 0; i < count; i++) {
        rest[i] = tiles[i];
        if (!in_blocks) continue;
        rest[i].acc += kTile * in_blocks;
        rest[i].prefetch = nullptr;
        if (i == 0) prefetch_first();
        amx_matmul_blocks(tiles[i], x, row0, in_blocks, scratch);
    }
    if (in_blocks < num_rows) vector_matmul(rest, count, x, row0 + in_blocks, num_rows - in_blocks);
}

size_t amx_scratch_bytes(const Tiles& w) {
    return is_multiplied_in_blocks(w) ? static_cast<size_t>(w.num_groups) * kTile * kGroup : 0;
}

}  // namespace
}  // namespace octavo
