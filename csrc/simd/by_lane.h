// Operations that go through memory, one lane after another, for levels without an instruction for them.
// The first functions use SSE2 on all levels of x86-64, NEON on all levels of AArch64.
#pragma once
#include "lanes.h"

namespace octavo {
namespace {
// Start of four columns of codes, one byte per output.
using Columns = const uint8_t* [4];

// Returns the sum of sixteen int8.
OCTAVO_INLINE int32_t sum_bytes(const int8_t* p) {
#if defined(__SSE2__)
    const __m128i biased =
        _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(-0x80));
    const __m128i sums = _mm_sad_epu8(biased, _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 128 * kLanes;
#elif defined(__aarch64__)
    return vaddlvq_s8(vld1q_s8(p));
#else
    int32_t sum = 0;
    for (int i = 0; i < kLanes; i++) sum += p[i];
    return sum;
#endif
}

// Writes the bytes of four columns at sixteen outputs as quads [16][4].
OCTAVO_INLINE void interleave16(const Columns& columns, int64_t at, uint8_t* to) {
#if defined(__SSE2__)
    const auto column = [&](int i) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(columns[i] + at));
    };
    const auto store = [&](int offset, __m128i quads) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + offset), quads);
    };
    const __m128i c[4] = {column(0), column(1), column(2), column(3)};
    const __m128i low01 = _mm_unpacklo_epi8(c[0], c[1]), high01 = _mm_unpackhi_epi8(c[0], c[1]),
                  low23 = _mm_unpacklo_epi8(c[2], c[3]), high23 = _mm_unpackhi_epi8(c[2], c[3]);
    store(0, _mm_unpacklo_epi16(low01, low23));
    store(16, _mm_unpackhi_epi16(low01, low23));
    store(32, _mm_unpacklo_epi16(high01, high23));
    store(48, _mm_unpackhi_epi16(high01, high23));
#elif defined(__aarch64__)
    const uint8x16x4_t quads = {{vld1q_u8(columns[0] + at), vld1q_u8(columns[1] + at),
                                 vld1q_u8(columns[2] + at), vld1q_u8(columns[3] + at)}};
    vst4q_u8(to, quads);
#else
    for (int o = 0; o < kLanes; o++)
        for (int i = 0; i < 4; i++) to[4 * o + i] = columns[i][at + o];
#endif
}

namespace by_lane {

OCTAVO_INLINE vf load_first(const float* p, int n) {
    if (n == kLanes) return load(p);
    float values[kLanes] = {};
    std::memcpy(values, p, sizeof(float) * n);
    return load(values);
}
OCTAVO_INLINE void store_first(float* p, vf v, int n) {
    if (n == kLanes) return store(p, v);
    float values[kLanes];
    store(values, v);
    std::memcpy(p, values, sizeof(float) * n);
}

OCTAVO_INLINE float sum_lanes(vf v) {
    float x[kLanes];
    store(x, v);
    for (int width = 8; width >= 1; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}
OCTAVO_INLINE float max_lanes(vf v) {
    float x[kLanes];
    store(x, v);
    for (int width = 8; width >= 1; width /= 2)
        for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
}
OCTAVO_INLINE int32_t sum_lanes_i(vi v) {
    int32_t lanes[kLanes], sum = 0;
    store_i(lanes, v);
    for (const int32_t lane : lanes) sum += lane;
    return sum;
}
OCTAVO_INLINE int32_t max_lanes_i(vi v) {
    int32_t lanes[kLanes];
    store_i(lanes, v);
    int32_t largest = lanes[0];
    for (const int32_t lane : lanes) largest = largest > lane ? largest : lane;
    return largest;
}

OCTAVO_INLINE vf reciprocal(vf x) { return splat(1.0f) / x; }

OCTAVO_INLINE void store_bf16(uint16_t* p, vf v) {
    float x[kLanes];
    store(x, v);
    for (int i = 0; i < kLanes; i++) p[i] = float_to_bf16(x[i]);
}
OCTAVO_INLINE vi to_bf16(vf first, vf second) {
    uint16_t numbers[2 * kLanes];
    store_bf16(numbers, first);
    store_bf16(numbers + kLanes, second);
    return load_i(numbers);
}
OCTAVO_INLINE void store_bf16_pairs(uint16_t* to, const uint16_t* from, int n) {
    for (int i = 0; i < n; i++) to[2 * i] = from[i];
}

OCTAVO_INLINE void store_int8(int8_t* p, vi v) {
    int32_t lanes[kLanes];
    store_i(lanes, v);
    for (int i = 0; i < kLanes; i++) p[i] = static_cast<int8_t>(lanes[i]);
}
OCTAVO_INLINE vi pack_int8(const vi (&v)[4]) {
    alignas(64) int8_t bytes[4 * kLanes];
    for (int j = 0; j < 4; j++) store_int8(bytes + j * kLanes, v[j]);
    return load_i(bytes);
}

// Writes the indices and terms of the lanes with a nonzero term and returns their number. May write up to
// sixteen of each. Branchless, since the branches would be unpredictable.
OCTAVO_INLINE int keep_nonzero(vi terms, vi indices, int32_t* kept_indices, int8_t* kept_terms) {
    int32_t term[kLanes], index[kLanes];
    store_i(term, terms);
    store_i(index, indices);
    int count = 0;
    for (int i = 0; i < kLanes; i++) {
        kept_indices[count] = index[i];
        std::memcpy(kept_terms + 4 * count, term + i, 4);
        count += term[i] != 0;
    }
    return count;
}

// Interleaves four columns at kInterleaved outputs, and loads the sums of the interleaved outputs.
constexpr int kInterleaved = 16;
OCTAVO_INLINE void interleave(const Columns& columns, int64_t at, vi (&quads)[1]) {
    alignas(64) uint8_t bytes[64];
    interleave16(columns, at, bytes);
    quads[0] = load_i(bytes);
}
OCTAVO_INLINE void load_sums(const int32_t* sums, vi (&tiles)[1]) { tiles[0] = load_i(sums); }

}  // namespace by_lane
}  // namespace
}  // namespace octavo
