// Sixteen lanes at every level: one vector type, so that weight tiles and KV blocks have one layout
// everywhere.
//
// `vf` is 16 fp32 lanes, `vi` 16 int32 lanes (vectors.h). On AVX-512 each is one register, on AVX2 two, on
// SSE2 or NEON four. Operators are those of the compiler's vectors; here stands what they do not cover.
// Kernels are compiled with -ffp-contract=off: a product is fused into a sum where `fma` says so and nowhere
// else, so that the same arithmetic comes out however many rows a template handles at once.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "vectors.h"

namespace octavo {
namespace {

constexpr int kLanes = 16;

OCTAVO_INLINE vf load(const float* p) { return Memory16<vf>::load(p); }
OCTAVO_INLINE vi load_i(const void* p) { return Memory16<vi>::load(p); }
OCTAVO_INLINE void store(float* p, vf v) { Memory16<vf>::store(p, v); }
OCTAVO_INLINE void store_i(void* p, vi v) { Memory16<vi>::store(p, v); }
OCTAVO_INLINE vi splat_i(int32_t x) {
    return each([x](RegisterI zero) { return zero + x; }, vi{});
}
OCTAVO_INLINE vf splat(float x) {
    return each([x](RegisterF zero) { return x - zero; }, vf{});  // x - 0 is x, whatever its sign
}
// Loads four bytes, four int8 or a pair of 16 bits, into every lane.
OCTAVO_INLINE vi broadcast4(const void* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    return splat_i(bits);
}
OCTAVO_INLINE vi iota() {
    static constexpr int32_t lanes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load_i(lanes);
}
OCTAVO_INLINE vf select(vi mask, vf yes, vf no) {
    return each([](RegisterI m, RegisterF a, RegisterF b) { return m ? a : b; }, mask, yes, no);
}
// Returns y, with zeros where x is smaller than a threshold in magnitude. Magnitudes have the same order as
// integers, and a NaN is above all of them, so that it shows.
OCTAVO_INLINE vf without_small(vf x, vf y, float threshold) {
    if (threshold == 0) return y;
    int32_t least;
    std::memcpy(&least, &threshold, 4);
    return select((vi)(((vi)x & 0x7fffffff) < splat_i(least)), vf{}, y);
}
OCTAVO_INLINE vf bits_to_float(vi v) { return (vf)v; }

// Load and store the first `n` lanes (the others are loaded as 0). Nothing behind the n-th is touched.
#if defined(__AVX512F__)
OCTAVO_INLINE vf load_first(const float* p, int n) {
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
OCTAVO_INLINE void store_first(float* p, vf v, int n) {
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
}
#else
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
#endif

#if defined(__AVX512F__)
OCTAVO_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
OCTAVO_INLINE vf max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
OCTAVO_INLINE vf min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
OCTAVO_INLINE vf to_float(vi v) { return (vf)_mm512_cvtepi32_ps((__m512i)v); }
OCTAVO_INLINE vi round_to_int(vf v) { return (vi)_mm512_cvtps_epi32((__m512)v); }
#elif defined(__AVX2__)
OCTAVO_INLINE vf fma(vf a, vf b, vf c) {
    return each([](RegisterF x, RegisterF y,
                   RegisterF z) { return (RegisterF)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z); },
                a, b, c);
}
OCTAVO_INLINE vf max(vf a, vf b) {
    return each([](RegisterF x, RegisterF y) { return (RegisterF)_mm256_max_ps((__m256)x, (__m256)y); }, a,
                b);
}
OCTAVO_INLINE vf min(vf a, vf b) {
    return each([](RegisterF x, RegisterF y) { return (RegisterF)_mm256_min_ps((__m256)x, (__m256)y); }, a,
                b);
}
OCTAVO_INLINE vf to_float(vi v) {
    return each([](RegisterI x) { return (RegisterF)_mm256_cvtepi32_ps((__m256i)x); }, v);
}
OCTAVO_INLINE vi round_to_int(vf v) {
    return each([](RegisterF x) { return (RegisterI)_mm256_cvtps_epi32((__m256)x); }, v);
}
#else
OCTAVO_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
OCTAVO_INLINE vf max(vf a, vf b) { return select(a > b, a, b); }
OCTAVO_INLINE vf min(vf a, vf b) { return select(a < b, a, b); }
OCTAVO_INLINE vf to_float(vi v) {
    return each([](RegisterI x) { return __builtin_convertvector(x, RegisterF); }, v);
}
OCTAVO_INLINE vi round_to_int(vf v) {
    // Adding and taking away 1.5 * 2^23 rounds to nearest even; good for |v| < 2^22.
    const vf magic = splat(12582912.0f);
    return each([](RegisterF x) { return __builtin_convertvector(x, RegisterI); }, (v + magic) - magic);
}
#endif

// Sums and maxima over lanes, always in the same order at one level.
#if defined(__AVX512F__)
OCTAVO_INLINE float sum_lanes(vf v) { return _mm512_reduce_add_ps((__m512)v); }
OCTAVO_INLINE float max_lanes(vf v) { return _mm512_reduce_max_ps((__m512)v); }
OCTAVO_INLINE int32_t sum_lanes_i(vi v) { return _mm512_reduce_add_epi32((__m512i)v); }
OCTAVO_INLINE int32_t max_lanes_i(vi v) { return _mm512_reduce_max_epi32((__m512i)v); }
#else
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
    int32_t most = lanes[0];
    for (const int32_t lane : lanes) most = most > lane ? most : lane;
    return most;
}
#endif
OCTAVO_INLINE vi max_i(vi a, vi b) {
    return each([](RegisterI x, RegisterI y) { return x > y ? x : y; }, a, b);
}
// Returns whether any lane of a comparison's result is set.
OCTAVO_INLINE bool any_lane(vi mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    const __m256i both = (__m256i)(mask.low | mask.high);
    return !_mm256_testz_si256(both, both);
#else
    return max_lanes_i(mask & 1) != 0;
#endif
}
// Returns a bit for each lane that is not zero, the first lane's lowest.
OCTAVO_INLINE uint32_t nonzero_lanes(vi v) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)v, (__m512i)v);
#elif defined(__AVX2__)
    const auto zeros = [](RegisterI half) {
        return (uint32_t)_mm256_movemask_ps((__m256)_mm256_cmpeq_epi32((__m256i)half, __m256i{}));
    };
    return ~(zeros(v.low) | zeros(v.high) << 8) & 0xffff;
#else
    alignas(64) int32_t lanes[kLanes];
    store_i(lanes, v);
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; i++) bits |= (uint32_t)(lanes[i] != 0) << i;
    return bits;
#endif
}
// Returns the sum of sixteen int8.
OCTAVO_INLINE int32_t sum_bytes(const int8_t* p) {
#if defined(__SSE2__)
    const __m128i biased = _mm_xor_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi8((char)0x80));
    const __m128i sums = _mm_sad_epu8(biased, _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 128 * kLanes;
#else
    int32_t sum = 0;
    for (int i = 0; i < kLanes; i++) sum += p[i];
    return sum;
#endif
}

// -- half precisions --

OCTAVO_INLINE float bf16_to_float(uint16_t h) {
    const uint32_t bits = (uint32_t)h << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
// Rounds to nearest even; NaN stays NaN.
OCTAVO_INLINE uint16_t float_to_bf16(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
// Loads sixteen bf16 as fp32.
OCTAVO_INLINE vf load_bf16(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
    const auto half = [](const uint16_t* at) {
        return (RegisterF)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at)), 16);
    };
    return {half(p), half(p + 8)};
#else
    uint32_t v[kLanes];
    for (int i = 0; i < kLanes; i++) v[i] = (uint32_t)p[i] << 16;
    return (vf)load_i(v);
#endif
}
OCTAVO_INLINE void store_bf16(uint16_t* p, vf v) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
    const __m256i packed = (__m256i)_mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &packed, 32);
#else
    float x[kLanes];
    store(x, v);
    for (int i = 0; i < kLanes; i++) p[i] = float_to_bf16(x[i]);
#endif
}
OCTAVO_INLINE float fp16_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13;
    float f;
    std::memcpy(&f, &magnitude, 4);
    f *= 0x1p112f;  // shifts the exponent's bias, subnormals included
    if ((h & 0x7c00) == 0x7c00) {
        magnitude = 0x7f800000u | ((uint32_t)(h & 0x3ff) << 13);
        std::memcpy(&f, &magnitude, 4);
    }
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    bits |= sign;
    std::memcpy(&f, &bits, 4);
    return f;
}
OCTAVO_INLINE vf load_fp16(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    const auto half = [](const uint16_t* at) {
        return (RegisterF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
    };
    return {half(p), half(p + 8)};
#else
    float v[kLanes];
    for (int i = 0; i < kLanes; i++) v[i] = fp16_to_float(p[i]);
    return load(v);
#endif
}

// -- functions --

// e^x to about 1 ulp for x in [-87, 88]; below, exactly 0; NaN stays NaN. Cody and Waite's reduction, Cephes'
// polynomial.
OCTAVO_INLINE vf exp(vf x) {
    const vf clipped = min(splat(88.0f), max(splat(-87.0f), x));  // in this order a NaN passes
    const vi n = round_to_int(clipped * splat(1.44269504f));
    const vf nf = to_float(n);
    vf r = fma(nf, splat(-0.693359375f), clipped);
    r = fma(nf, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p * r, r, r) + splat(1.0f);
    return select((vi)(x < splat(-87.0f)), vf{}, p * (vf)((n + 127) << 23));
}

// 2^x to 2^-18 of itself, for what is rounded anyway: x <= 0; below -125 exactly 0; 1 at 0; NaN stays NaN.
// Adding 1.5 * 2^23 leaves x rounded in the low bits; the polynomial interpolates 2^f at five Chebyshev
// points of [-1/2, 1/2].
OCTAVO_INLINE vf exp2_coarse(vf x) {
    const vf magic = splat(12582912.0f), shifted = x + magic;
    const vf f = x - (shifted - magic);
    vf p = splat(9.666368515e-3f);
    p = fma(p, f, splat(5.592197584e-2f));
    p = fma(p, f, splat(2.402234904e-1f));
    p = fma(p, f, splat(6.931210452e-1f));
    p = fma(p, f, splat(1.0f));
    return select((vi)(x < splat(-125.0f)), vf{}, (vf)((vi)p + ((vi)shifted << 23)));
}

// 1 / x to about 1 ulp, for x of at least 1: an estimate and one step of Newton's take a fraction of a
// division's time.
OCTAVO_INLINE vf reciprocal(vf x) {
#if defined(__AVX512F__)
    const vf estimate = (vf)_mm512_rcp14_ps((__m512)x);
    return fma(estimate, fma(-x, estimate, splat(1.0f)), estimate);
#else
    return splat(1.0f) / x;
#endif
}
OCTAVO_INLINE vf sigmoid(vf x) { return reciprocal(splat(1.0f) + exp(-x)); }

// erfc(z) for z in [0, 10.5]: e^(-z^2) times a polynomial in t = 1 / (1 + 0.4 z), fitted by least squares to
// 6e-8 of its value up to z = 9.5; beyond 9.4, where e^(-z^2) is below e^-87, exactly 0. NaN stays NaN.
OCTAVO_INLINE vf erfc(vf z) {
    const vf t = reciprocal(fma(splat(0.4f), z, splat(1.0f)));
    vf p = splat(0.0392933156f);
    p = fma(p, t, splat(-0.131053613f));
    p = fma(p, t, splat(0.0653588599f));
    p = fma(p, t, splat(0.10871833f));
    p = fma(p, t, splat(0.0657746423f));
    p = fma(p, t, splat(0.199212578f));
    p = fma(p, t, splat(0.200429393f));
    p = fma(p, t, splat(0.226643877f));
    p = fma(p, t, splat(0.225622618f));
    return p * t * exp(-z * z);
}
// x times the normal distribution's share below x. The share above |x| is taken from x or, where x is negative,
// is what remains: no digit of the tail is lost to a difference.
OCTAVO_INLINE vf gelu(vf x) {
    const vf size = min(splat(14.5f), max(x, -x));  // in this order a NaN passes
    return max(x, vf{}) - splat(0.5f) * size * erfc(splat(0.70710678f) * size);
}

}  // namespace
}  // namespace octavo
