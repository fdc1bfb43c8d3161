// Matmuls on AMX: 16 rows by 16 outputs at a time.
//
// The integer path unpacks the groups of a weight tile once to signed bytes (codes minus the zero point) in
// scratch, multiplies 16 rows at a time, and scales each group's exact int32 sums by the same fmas in the
// same order as linear.inl. The results are bitwise equal, so few rows may take either path. dpbf16ps has a
// summation order of its own, so bf16 uses AMX for any number of rows.
#pragma once
#include "../simd/amx.h"
#include "linear.inl"

namespace octavo {
namespace {

constexpr int kAmxMinRows = 6;  // fewer rows are faster on dpbusd (measured: crossover at 5 to 7)

// -- integers --

OCTAVO_INLINE bool is_integer(Code code) { return code == Code::u4 || code == Code::u8; }

// Returns the bytes of a row that one multiplication reads: a group of 32 inputs, with both terms for 4-bit
// weights.
OCTAVO_INLINE constexpr int row_depth(Code code) { return code == Code::u4 ? 2 * kGroup : kGroup; }

// Writes the signed codes of one tile as B tiles, [groups][depth / 4][16 o][4]. 4-bit codes are written
// twice: times 8 for the first terms, and unchanged for the second.
void unpack_tile(const Tiles& w, const uint8_t* tile, size_t step, int8_t* out) {
    const __m512i zero = _mm512_set1_epi8(static_cast<char>(w.zero_point)), nibble = _mm512_set1_epi8(15),
                  eights = _mm512_set1_epi8(static_cast<char>(0xf8));
    for (int g = 0; g < w.num_groups; g++, tile += step, out += 16 * row_depth(w.code)) {
        prefetch_ahead<320>(tile);
        if (w.code == Code::u4) {
            const auto put = [&](int row, __m512i codes) {
                codes = _mm512_sub_epi8(codes, zero);
                _mm512_store_si512(out + 64 * row, _mm512_and_si512(_mm512_slli_epi16(codes, 3), eights));
                _mm512_store_si512(out + 64 * (row + 8), codes);
            };
            for (int v = 0; v < 4; v++) {
                const __m512i both = _mm512_loadu_si512(tile + 64 * v);
                put(2 * v, _mm512_and_si512(both, nibble));
                put(2 * v + 1, _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble));
            }
        } else {
            for (int v = 0; v < 8; v++)
                _mm512_store_si512(out + 64 * v, _mm512_sub_epi8(_mm512_loadu_si512(tile + 64 * v), zero));
        }
    }
}

// Unsigned 8-bit codes with zero point 0 may exceed 127 and do not fit signed bytes; such weights use
// dpbusd.
OCTAVO_INLINE bool fits_signed(const Tiles& w) { return w.code == Code::u4 || w.zero_point != 0; }

// Adds the scaled sums [R][16 o] of one group to the accumulators of R rows, which are in registers.
template <int R, ScaleType S, ZeroPointKind Z>
OCTAVO_INLINE void scale_group(const uint8_t* scales, const QuantizedRows& x, int64_t row, int g,
                               const int32_t* sums, vf (&acc)[R]) {
    const vf scale = load_scale<S>(scales);
    const vf group_min = load_min<S, Z>(scales + scale_bytes<S>(), scale);
    const float* d = x.scales + x.at(row, g);
    const float* sum = x.scaled_sums + x.at(row, g);
#pragma GCC unroll 16
    for (int m = 0; m < R; m++) {
        acc[m] = fma(to_float(load_i(sums + m * 16)), scale * d[m], acc[m]);
        if (Z != ZeroPointKind::none) acc[m] = fma(group_min, splat(sum[m]), acc[m]);
    }
}

// Multiplies two groups (or the last one alone) into exact sums [2][R][16 o]. The intrinsics require
// literal register numbers, hence the macro: `multiply_even` and `multiply_odd` alternate, each with its
// own registers.
#define OCTAVO_MULTIPLY_PAIR(NAME, FIRST, SECOND)                                            \
    template <int R, int kDepth>                                                             \
    OCTAVO_INLINE void NAME(const int8_t* q, int64_t stride, const int8_t* codes, bool both, \
                            int32_t* sums) {                                                 \
        _tile_zero(FIRST);                                                                   \
        _tile_loadd(4, q, stride);                                                           \
        _tile_loadd(6, codes, 64);                                                           \
        _tile_dpbssd(FIRST, 4, 6);                                                           \
        if (both) {                                                                          \
            _tile_zero(SECOND);                                                              \
            _tile_loadd(5, q + kDepth, stride);                                              \
            _tile_loadd(7, codes + 16 * kDepth, 64);                                         \
            _tile_dpbssd(SECOND, 5, 7);                                                      \
            _tile_stored(SECOND, sums + R * 16, 64);                                         \
        }                                                                                    \
        _tile_stored(FIRST, sums, 64);                                                       \
    }
OCTAVO_MULTIPLY_PAIR(multiply_even, 0, 1)
OCTAVO_MULTIPLY_PAIR(multiply_odd, 2, 3)
#undef OCTAVO_MULTIPLY_PAIR

// Multiplies one tile by R rows, R = 16, 8, 4, 2 or 1. The vector unit scales a pair of groups while AMX
// multiplies the next pair.
template <int R, int kDepth, ScaleType S, ZeroPointKind Z>
void int8_rows(const Tiles& w, const uint8_t* tile, size_t step, const int8_t* codes, const QuantizedRows& x,
               int64_t row, float* out) {
    alignas(64) int32_t sums[2][2 * R * 16];
    const int8_t* q = reinterpret_cast<const int8_t*>(x.values) + row * x.stride;
    const uint8_t* scales = tile + codes_bytes(w.code);
    const int groups = w.num_groups;
    configure_matmul(R, kDepth);
    vf acc[R] = {};
    const auto scale = [&](int g, const int32_t* from) {
        if (g < groups) scale_group<R, S, Z>(scales + g * step, x, row, g, from, acc);
        if (g + 1 < groups) scale_group<R, S, Z>(scales + (g + 1) * step, x, row, g + 1, from + R * 16, acc);
    };
    multiply_even<R, kDepth>(q, x.stride, codes, groups > 1, sums[0]);
    for (int g = 0; g < groups; g += 4, q += 4 * kDepth, codes += 4 * 16 * kDepth) {
        if (g + 2 < groups)
            multiply_odd<R, kDepth>(q + 2 * kDepth, x.stride, codes + 2 * 16 * kDepth, g + 3 < groups,
                                    sums[1]);
        scale(g, sums[0]);
        if (g + 4 < groups)
            multiply_even<R, kDepth>(q + 4 * kDepth, x.stride, codes + 4 * 16 * kDepth, g + 5 < groups,
                                     sums[0]);
        scale(g + 2, sums[1]);
    }
    for (int m = 0; m < R; m++) store(out + 16 * m, acc[m]);
}

template <int kDepth, ScaleType S, ZeroPointKind Z>
void int8_all_rows(const Tiles& w, const uint8_t* data, const int8_t* codes, const QuantizedRows& x,
                   int64_t row0, int num_rows, float* acc) {
    const size_t step = w.tile_bytes / w.num_groups;
    int done = 0;
    const auto run = [&](auto kernel, int rows) {
        for (; num_rows - done >= rows; done += rows)
            kernel(w, data, step, codes, x, row0 + done, acc + 16 * done);
    };
    run(int8_rows<16, kDepth, S, Z>, 16);
    run(int8_rows<8, kDepth, S, Z>, 8);
    run(int8_rows<4, kDepth, S, Z>, 4);
    run(int8_rows<2, kDepth, S, Z>, 2);
    run(int8_rows<1, kDepth, S, Z>, 1);
}

template <int kDepth, ScaleType S>
auto choose_all_rows(const Tiles& w) {
    if (w.zero_point_kind == ZeroPointKind::zero) return int8_all_rows<kDepth, S, ZeroPointKind::zero>;
    return w.zero_point_kind == ZeroPointKind::min ? int8_all_rows<kDepth, S, ZeroPointKind::min>
                                                   : int8_all_rows<kDepth, S, ZeroPointKind::none>;
}

template <int kDepth>
auto choose_all_rows(const Tiles& w) {
    return w.scale_type == ScaleType::fp16 ? choose_all_rows<kDepth, ScaleType::fp16>(w)
                                           : choose_all_rows<kDepth, ScaleType::fp32>(w);
}

void amx_matmul_int8(const Tiles& w, int tile, const QuantizedRows& x, int64_t row0, int num_rows, float* acc,
                     uint8_t* scratch) {
    const uint8_t* data = w.tile(tile);
    int8_t* codes = reinterpret_cast<int8_t*>(scratch);
    unpack_tile(w, data, w.tile_bytes / w.num_groups, codes);
    const auto run = w.code == Code::u4 ? choose_all_rows<2 * kGroup>(w) : choose_all_rows<kGroup>(w);
    run(w, data, codes, x, row0, num_rows, acc);
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
    for (int i = 0; i < count; i++) {
        const Tiles& w = *tiles[i].weight;
        const bool integers = is_integer(w.code) && !w.half_groups && w.scale_type != ScaleType::small &&
                              fits_signed(w) && num_rows >= kAmxMinRows;
        if (integers && i == 0) prefetch_first();
        integers ? amx_matmul_int8(w, tiles[i].tile, x, row0, num_rows, tiles[i].acc, scratch)
                 : vector_matmul(tiles + i, 1, x, row0, num_rows);
    }
}

size_t amx_scratch_bytes(const Tiles& w) {
    return is_integer(w.code) ? static_cast<size_t>(w.num_groups) * 16 * row_depth(w.code) : 0;
}

}  // namespace
}  // namespace octavo
