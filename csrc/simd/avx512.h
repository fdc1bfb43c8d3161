// Levels from AVX-512 (F, BW, DQ, VL) on: one register holds the sixteen lanes. VNNI and BF16 replace the
// dot products that they have instructions for.
#pragma once
#include "by_lane.h"

namespace octavo {
namespace {

OCTAVO_INLINE __m512 raw(vf v) { return reinterpret_cast<__m512>(v); }
OCTAVO_INLINE __m512i raw(vi v) { return reinterpret_cast<__m512i>(v); }
OCTAVO_INLINE vf lanes(__m512 v) { return reinterpret_cast<vf>(v); }
OCTAVO_INLINE vi lanes(__m512i v) { return reinterpret_cast<vi>(v); }
OCTAVO_INLINE __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
OCTAVO_INLINE __m256i load32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
OCTAVO_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }

// -- lanes --

OCTAVO_INLINE vf load_first(const float* p, int n) { return lanes(_mm512_maskz_loadu_ps(first_lanes(n), p)); }
OCTAVO_INLINE void store_first(float* p, vf v, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), raw(v)); }

OCTAVO_INLINE vf fma(vf a, vf b, vf c) { return lanes(_mm512_fmadd_ps(raw(a), raw(b), raw(c))); }
OCTAVO_INLINE vf max(vf a, vf b) { return lanes(_mm512_max_ps(raw(a), raw(b))); }
OCTAVO_INLINE vf min(vf a, vf b) { return lanes(_mm512_min_ps(raw(a), raw(b))); }
OCTAVO_INLINE vf to_float(vi v) { return lanes(_mm512_cvtepi32_ps(raw(v))); }
OCTAVO_INLINE vi round_to_int(vf v) { return lanes(_mm512_cvtps_epi32(raw(v))); }
OCTAVO_INLINE vf reciprocal(vf x) {
    const vf estimate = lanes(_mm512_rcp14_ps(raw(x)));
    return fma(estimate, fma(-x, estimate, splat(1.0f)), estimate);
}

OCTAVO_INLINE float sum_lanes(vf v) { return _mm512_reduce_add_ps(raw(v)); }
OCTAVO_INLINE float max_lanes(vf v) { return _mm512_reduce_max_ps(raw(v)); }
OCTAVO_INLINE int32_t sum_lanes_i(vi v) { return _mm512_reduce_add_epi32(raw(v)); }
OCTAVO_INLINE int32_t max_lanes_i(vi v) { return _mm512_reduce_max_epi32(raw(v)); }
OCTAVO_INLINE uint32_t nonzero_lanes(vi v) { return _mm512_test_epi32_mask(raw(v), raw(v)); }
OCTAVO_INLINE bool any_lane(vi mask) { return nonzero_lanes(mask) != 0; }

// Keeps the compiler from loading the operand again for each use.
OCTAVO_INLINE vi keep_in_register(vi numbers) {
    asm("" : "+v"(numbers));
    return numbers;
}

// -- conversions --

OCTAVO_INLINE vf load_bf16(const uint16_t* p) {
    return lanes(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load32(p)), 16)));
}
#if defined(__AVX512BF16__)
OCTAVO_INLINE void store_bf16(uint16_t* p, vf v) {
    const auto packed = _mm512_cvtneps_pbh(raw(v));
    std::memcpy(p, &packed, 32);
}
OCTAVO_INLINE vi to_bf16(vf first, vf second) {
    return reinterpret_cast<vi>(_mm512_cvtne2ps_pbh(raw(second), raw(first)));
}
#else
using by_lane::store_bf16;
using by_lane::to_bf16;
#endif
OCTAVO_INLINE void store_bf16_pairs(uint16_t* to, const uint16_t* from, int n) {
    const __mmask32 mask = 0x55555555u & (n == kLanes ? 0xffffffffu : (1u << (2 * n)) - 1);
    _mm512_mask_storeu_epi16(to, mask, _mm512_cvtepu16_epi32(load32(from)));
}
OCTAVO_INLINE vf load_fp16(const uint16_t* p) { return lanes(_mm512_cvtph_ps(load32(p))); }
OCTAVO_INLINE vi load_int16(const void* p) { return lanes(_mm512_cvtepi16_epi32(load32(p))); }
OCTAVO_INLINE vi load_int8(const int8_t* p) { return lanes(_mm512_cvtepi8_epi32(load16(p))); }
OCTAVO_INLINE vi int8_to_int16(const int8_t* p) { return lanes(_mm512_cvtepi8_epi16(load32(p))); }
OCTAVO_INLINE void store_int16(uint16_t* p, vi v) {
    const __m256i packed = _mm512_cvtepi32_epi16(raw(v));
    std::memcpy(p, &packed, 32);
}
OCTAVO_INLINE void store_int8(int8_t* p, vi v) {
    const __m128i bytes = _mm512_cvtepi32_epi8(raw(v));
    std::memcpy(p, &bytes, 16);
}
OCTAVO_INLINE vi pack_int8(const vi (&v)[4]) {
    const __m512i low = _mm512_packs_epi32(raw(v[0]), raw(v[1])),
                  high = _mm512_packs_epi32(raw(v[2]), raw(v[3]));
    // Packing works within 128-bit lanes: lane q now holds the q-th four numbers of each v.
    return lanes(
        _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                                 _mm512_packs_epi16(low, high)));
}
OCTAVO_INLINE vi e4m3_to_bf16(vi codes) {
    const __m512i x = raw(codes);
    const __m512i small = _mm512_broadcast_i32x4(load16(kSmallE4m3));
    const __m512i magnitude = _mm512_and_si512(_mm512_slli_epi16(x, 4), _mm512_set1_epi16(0x07f0));
    const __m512i whole =
        _mm512_mask_permutexvar_epi16(_mm512_add_epi16(magnitude, _mm512_set1_epi16(120 << 7)),
                                      _mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x78)), x, small);
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(x, 8), _mm512_set1_epi16(-0x8000));
    return lanes(_mm512_or_si512(whole, sign));
}

// -- products --

#if defined(__AVX512VNNI__)
OCTAVO_INLINE vi dot4(vi acc, vi u, vi s) { return lanes(_mm512_dpbusd_epi32(raw(acc), raw(u), raw(s))); }
OCTAVO_INLINE vi dot2_int16(vi acc, vi a, vi b) {
    return lanes(_mm512_dpwssd_epi32(raw(acc), raw(a), raw(b)));
}
#else
OCTAVO_INLINE vi dot4(vi acc, vi u, vi s) {
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(raw(u), _mm512_set1_epi16(0xff)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(raw(s), 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(raw(u), 8), _mm512_srai_epi16(raw(s), 8));
    return acc + lanes(_mm512_add_epi32(even, odd));
}
OCTAVO_INLINE vi dot2_int16(vi acc, vi a, vi b) { return acc + lanes(_mm512_madd_epi16(raw(a), raw(b))); }
OCTAVO_INLINE vi dot4_pairs(vi u, vi s) { return lanes(_mm512_maddubs_epi16(raw(u), raw(s))); }
OCTAVO_INLINE vi add_pairs(vi a, vi b) { return lanes(_mm512_add_epi16(raw(a), raw(b))); }
OCTAVO_INLINE vi widen_pairs(vi pairs) { return lanes(_mm512_madd_epi16(raw(pairs), _mm512_set1_epi16(1))); }
OCTAVO_INLINE vi dot4_turned(vi acc, vi codes, vi s) {
    const __m512i w = raw(codes),
                  turned = _mm512_mask_sub_epi8(raw(s), _mm512_movepi8_mask(w), __m512i{}, raw(s));
    return acc + widen_pairs(lanes(_mm512_maddubs_epi16(_mm512_abs_epi8(w), turned)));
}
#endif
#if defined(__AVX512BF16__)
OCTAVO_INLINE vf dot2_bf16(vf acc, vi w, vi a) {
    return lanes(_mm512_dpbf16_ps(raw(acc), reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(a)));
}
OCTAVO_INLINE vi int8_to_bf16(const int8_t* p) {
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(p)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(p + 16)));
    return reinterpret_cast<vi>(_mm512_cvtne2ps_pbh(high, low));
}
#endif

// -- columns --

// Vector j holds outputs 4j .. 4j + 3 of each sixteen; `load_sums` restores the order of the sums.
constexpr int kInterleaved = 64;
OCTAVO_INLINE void interleave(const Columns& columns, int64_t at, vi (&quads)[4]) {
    __m512i c[4];
    for (int i = 0; i < 4; i++) c[i] = _mm512_loadu_si512(columns[i] + at);
    const __m512i low01 = _mm512_unpacklo_epi8(c[0], c[1]), high01 = _mm512_unpackhi_epi8(c[0], c[1]),
                  low23 = _mm512_unpacklo_epi8(c[2], c[3]), high23 = _mm512_unpackhi_epi8(c[2], c[3]);
    quads[0] = lanes(_mm512_unpacklo_epi16(low01, low23));
    quads[1] = lanes(_mm512_unpackhi_epi16(low01, low23));
    quads[2] = lanes(_mm512_unpacklo_epi16(high01, high23));
    quads[3] = lanes(_mm512_unpackhi_epi16(high01, high23));
}
OCTAVO_INLINE void load_sums(const int32_t* sums, vi (&tiles)[4]) {
    __m512i v[4];
    for (int j = 0; j < 4; j++) v[j] = _mm512_loadu_si512(sums + kLanes * j);
    const __m512i even01 = _mm512_shuffle_i32x4(v[0], v[1], 0x88),
                  odd01 = _mm512_shuffle_i32x4(v[0], v[1], 0xdd),
                  even23 = _mm512_shuffle_i32x4(v[2], v[3], 0x88),
                  odd23 = _mm512_shuffle_i32x4(v[2], v[3], 0xdd);
    tiles[0] = lanes(_mm512_shuffle_i32x4(even01, even23, 0x88));
    tiles[1] = lanes(_mm512_shuffle_i32x4(odd01, odd23, 0x88));
    tiles[2] = lanes(_mm512_shuffle_i32x4(even01, even23, 0xdd));
    tiles[3] = lanes(_mm512_shuffle_i32x4(odd01, odd23, 0xdd));
}
OCTAVO_INLINE int keep_nonzero(vi terms, vi indices, int32_t* kept_indices, int8_t* kept_terms) {
    const __mmask16 some = _mm512_test_epi32_mask(raw(terms), raw(terms));
    store_i(kept_indices, lanes(_mm512_maskz_compress_epi32(some, raw(indices))));
    store_i(kept_terms, lanes(_mm512_maskz_compress_epi32(some, raw(terms))));
    return __builtin_popcount(some);
}

// -- words of 64 bits --

OCTAVO_INLINE __m512i wide(RegisterW v) { return reinterpret_cast<__m512i>(v); }
OCTAVO_INLINE RegisterW words(__m512i v) { return reinterpret_cast<RegisterW>(v); }
OCTAVO_INLINE RegisterW multiply_words(RegisterW a, RegisterW b) {
    return words(_mm512_mul_epu32(wide(a), wide(b)));
}
OCTAVO_INLINE RegisterW interleave_words(RegisterW low, RegisterW high) {
    return words(_mm512_mask_blend_epi32(0xAAAA, wide(low), wide(high << 32)));
}
OCTAVO_INLINE WordPair interleave_pairs(RegisterW a, RegisterW b) {
    return {words(_mm512_unpacklo_epi64(wide(a), wide(b))), words(_mm512_unpackhi_epi64(wide(a), wide(b)))};
}

// -- tables --

// Looks up each byte's low nibble in sixteen bytes; the high nibbles must be zero.
class Table16 {
  public:
    OCTAVO_INLINE explicit Table16(const uint8_t (&bytes)[16])
        : all_(_mm512_broadcast_i32x4(load16(bytes))) {}
    OCTAVO_INLINE vi operator()(vi nibbles) const { return lanes(_mm512_shuffle_epi8(all_, raw(nibbles))); }

  private:
    __m512i all_;
};
// Looks up the lowest four bits of each 16 bits in sixteen numbers.
class Numbers16 {
  public:
    OCTAVO_INLINE explicit Numbers16(const uint16_t (&numbers)[16])
        : twice_(_mm512_broadcast_i64x4(load32(numbers))) {}
    OCTAVO_INLINE vi operator()(vi indices) const {
        return lanes(_mm512_permutexvar_epi16(raw(indices), twice_));
    }

  private:
    __m512i twice_;  // five bits are looked up
};
// Looks up the lowest four bits of each lane in sixteen floats.
class Floats16 {
  public:
    OCTAVO_INLINE explicit Floats16(const float (&numbers)[16]) : all_(load(numbers)) {}
    OCTAVO_INLINE vf operator()(vi indices) const {
        return lanes(_mm512_permutexvar_ps(raw(indices), raw(all_)));
    }

  private:
    vf all_;
};

}  // namespace
}  // namespace octavo
