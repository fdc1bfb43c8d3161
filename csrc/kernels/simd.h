// Sixteen lanes at every level: one vector type, so that weight tiles and KV blocks have one layout everywhere.
//
// `vf` is 16 fp32 lanes, `vi` 16 int32 lanes. On AVX-512 each is one register, on AVX2 two, on SSE2 or NEON four; the
// compiler lowers loads, stores, + - * / and comparisons by itself, and only what it cannot guess stands here. Kernels are
// compiled with -ffp-contract=off: a product is fused into a sum where `fma` says so and nowhere else, so that the same
// arithmetic comes out however many rows a template handles at once.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

#define OCTAVO_INLINE inline __attribute__((always_inline))

constexpr int kLanes = 16;

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));

OCTAVO_INLINE vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
OCTAVO_INLINE vi load_i(const void* p) {
    vi v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
OCTAVO_INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
OCTAVO_INLINE void store_i(void* p, vi v) { std::memcpy(p, &v, sizeof v); }
OCTAVO_INLINE vf splat(float x) { return vf{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
OCTAVO_INLINE vi splat_i(int32_t x) { return vi{} + x; }
// Four bytes, as int8 or a pair of bf16, in every lane.
OCTAVO_INLINE vi broadcast4(const void* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    return splat_i(bits);
}
OCTAVO_INLINE vi iota() { return vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
OCTAVO_INLINE vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
OCTAVO_INLINE vf bits_to_float(vi v) { return (vf)v; }

// The first `n` lanes of memory (0 elsewhere), and back. Nothing behind the n-th is touched.
#if defined(__AVX512F__)
OCTAVO_INLINE vf load_first(const float* p, int n) { return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
OCTAVO_INLINE void store_first(float* p, vf v, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v); }
#else
OCTAVO_INLINE vf load_first(const float* p, int n) {
    vf v = {};
    std::memcpy(&v, p, sizeof(float) * n);
    return v;
}
OCTAVO_INLINE void store_first(float* p, vf v, int n) { std::memcpy(p, &v, sizeof(float) * n); }
#endif

#if defined(__AVX512F__)
OCTAVO_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
OCTAVO_INLINE vf max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
OCTAVO_INLINE vf min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
OCTAVO_INLINE vf to_float(vi v) { return (vf)_mm512_cvtepi32_ps((__m512i)v); }
OCTAVO_INLINE vi round_to_int(vf v) { return (vi)_mm512_cvtps_epi32((__m512)v); }
#elif defined(__AVX2__)
union Halves {
    vf v;
    vi i;
    __m256 f[2];
    __m256i n[2];
};
#define OCTAVO_BY_HALVES(out, expression) \
    for (int h = 0; h < 2; h++) out = expression
OCTAVO_INLINE vf fma(vf a, vf b, vf c) {
    Halves x{a}, y{b}, z{c};
    OCTAVO_BY_HALVES(z.f[h], _mm256_fmadd_ps(x.f[h], y.f[h], z.f[h]));
    return z.v;
}
OCTAVO_INLINE vf max(vf a, vf b) {
    Halves x{a}, y{b};
    OCTAVO_BY_HALVES(x.f[h], _mm256_max_ps(x.f[h], y.f[h]));
    return x.v;
}
OCTAVO_INLINE vf min(vf a, vf b) {
    Halves x{a}, y{b};
    OCTAVO_BY_HALVES(x.f[h], _mm256_min_ps(x.f[h], y.f[h]));
    return x.v;
}
OCTAVO_INLINE vf to_float(vi v) {
    Halves x;
    x.i = v;
    OCTAVO_BY_HALVES(x.f[h], _mm256_cvtepi32_ps(x.n[h]));
    return x.v;
}
OCTAVO_INLINE vi round_to_int(vf v) {
    Halves x{v};
    OCTAVO_BY_HALVES(x.n[h], _mm256_cvtps_epi32(x.f[h]));
    return x.i;
}
#else
OCTAVO_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
OCTAVO_INLINE vf max(vf a, vf b) { return select((vi)(a > b), a, b); }
OCTAVO_INLINE vf min(vf a, vf b) { return select((vi)(a < b), a, b); }
OCTAVO_INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }
OCTAVO_INLINE vi round_to_int(vf v) {
    // Adding and taking away 1.5 * 2^23 rounds to nearest even; good for |v| < 2^22.
    const vf magic = splat(12582912.0f);
    return __builtin_convertvector((v + magic) - magic, vi);
}
#endif

// Sums and maxima over lanes, always in the same order at one level.
#if defined(__AVX512F__)
OCTAVO_INLINE float sum_lanes(vf v) { return _mm512_reduce_add_ps((__m512)v); }
OCTAVO_INLINE float max_lanes(vf v) { return _mm512_reduce_max_ps((__m512)v); }
OCTAVO_INLINE int32_t sum_lanes_i(vi v) { return _mm512_reduce_add_epi32((__m512i)v); }
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
    int32_t sum = 0;
    for (int i = 0; i < kLanes; i++) sum += v[i];
    return sum;
}
#endif

// -- half precisions -----------------------------------------------------------------------------------------------------

OCTAVO_INLINE float bf16_to_float(uint16_t h) {
    const uint32_t bits = (uint32_t)h << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
// Round to nearest even; NaN stays NaN.
OCTAVO_INLINE uint16_t float_to_bf16(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
// Sixteen bf16 in a row as fp32.
OCTAVO_INLINE vf load_bf16(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
    Halves x;
    OCTAVO_BY_HALVES(x.n[h], _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8 * h))), 16));
    return x.v;
#else
    vi v;
    for (int i = 0; i < kLanes; i++) v[i] = (int32_t)((uint32_t)p[i] << 16);
    return (vf)v;
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
    Halves x;
    OCTAVO_BY_HALVES(x.f[h], _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8 * h))));
    return x.v;
#else
    vf v;
    for (int i = 0; i < kLanes; i++) v[i] = fp16_to_float(p[i]);
    return v;
#endif
}

// -- integer and bf16 dot products ---------------------------------------------------------------------------------------

#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
OCTAVO_INLINE __m512i dot4_wide(__m512i u, __m512i s) {
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(u, _mm512_set1_epi16(0xff)), _mm512_srai_epi16(_mm512_slli_epi16(s, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(u, 8), _mm512_srai_epi16(s, 8));
    return _mm512_add_epi32(even, odd);
}
#elif defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
OCTAVO_INLINE __m256i dot4_wide(__m256i u, __m256i s) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(0xff)), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
    return _mm256_add_epi32(even, odd);
}
#endif

// acc[i] += sum over b of 0..3 of uint8(u, 4i+b) * int8(s, 4i+b): exact, without saturation, at every level.
OCTAVO_INLINE vi dot4(vi acc, vi u, vi s) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, (__m512i)s);
#elif defined(__AVX512BW__)
    return acc + (vi)dot4_wide((__m512i)u, (__m512i)s);
#elif defined(__AVX2__)
    Halves a, x, y;
    a.i = acc, x.i = u, y.i = s;
#if defined(__AVXVNNI__)
    OCTAVO_BY_HALVES(a.n[h], _mm256_dpbusd_avx_epi32(a.n[h], x.n[h], y.n[h]));
#else
    OCTAVO_BY_HALVES(a.n[h], _mm256_add_epi32(a.n[h], dot4_wide(x.n[h], y.n[h])));
#endif
    return a.i;
#else
    const vi even_u = u & 0x00ff00ff, odd_u = (vi)((u >> 8) & 0x00ff00ff);
    vi sum = acc;
    // byte b of each lane, sign-extended by shifting it to the top first
    sum += (even_u & 0xffff) * ((s << 24) >> 24);
    sum += (odd_u & 0xffff) * ((s << 16) >> 24);
    sum += (even_u >> 16) * ((s << 8) >> 24);
    sum += (odd_u >> 16) * (s >> 24);
    return sum;
#endif
}

// Two 4-bit codes a byte. The products of the low nibbles are summed as they are; those of the high ones as codes times 16,
// which saves a shift a vector (`high_sum` undoes it; exact). Where 16-bit pair sums serve (AVX2 without VNNI) the codes are
// shifted down instead, since 240 * 127 * 2 would not fit 16 bits.
#if defined(__AVX2__) && !defined(__AVX512BW__) && !defined(__AVXVNNI__)
OCTAVO_INLINE vi high_nibbles(vi both) { return (both >> 4) & 0x0f0f0f0f; }
OCTAVO_INLINE vi high_sum(vi sum) { return sum; }
OCTAVO_INLINE vi dot4_nibbles(vi acc, vi u, vi s) {
    Halves a, x, y;
    a.i = acc, x.i = u, y.i = s;
    OCTAVO_BY_HALVES(a.n[h], _mm256_add_epi32(a.n[h], _mm256_madd_epi16(_mm256_maddubs_epi16(x.n[h], y.n[h]), _mm256_set1_epi16(1))));
    return a.i;
}
#else
OCTAVO_INLINE vi high_nibbles(vi both) { return both & (int32_t)0xf0f0f0f0; }
OCTAVO_INLINE vi high_sum(vi sum) { return sum >> 4; }
OCTAVO_INLINE vi dot4_nibbles(vi acc, vi u, vi s) { return dot4(acc, u, s); }
#endif

// acc[i] += w[2i] * a[2i] + w[2i+1] * a[2i+1] over pairs of bf16 in each lane.
OCTAVO_INLINE vf dot2_bf16(vf acc, vi w, vi a) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)a);
#else
    acc = fma((vf)(w << 16), (vf)(a << 16), acc);
    return fma((vf)(w & (int32_t)0xffff0000), (vf)(a & (int32_t)0xffff0000), acc);
#endif
}

// Sixteen int16 in a row, widened.
OCTAVO_INLINE vi load_int16(const void* p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    Halves x;
    OCTAVO_BY_HALVES(x.n[h], _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)p + h)));
    return x.i;
#else
    int16_t values[kLanes];
    std::memcpy(values, p, sizeof values);
    vi wide;
    for (int i = 0; i < kLanes; i++) wide[i] = values[i];
    return wide;
#endif
}

// Thirty-two int8 as pairs of bf16, of which each is one exactly.
OCTAVO_INLINE vi int8_to_bf16(const int8_t* p) {
#if defined(__AVX512BF16__)
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + 16))));
    return (vi)_mm512_cvtne2ps_pbh(high, low);
#else
    const vi pair = load_int16(p);  // the second number in the high byte, the first in the low one
    const vi first = (vi)to_float((pair << 24) >> 24), second = (vi)to_float(pair >> 8);
    return ((first >> 16) & 0xffff) | second;
#endif
}

// The first n of 16 values to every second place of `to`; nothing is written between them.
OCTAVO_INLINE void store_bf16_pairs(uint16_t* to, const uint16_t* from, int n) {
#if defined(__AVX512BW__)
    const __mmask32 mask = 0x55555555u & (n == kLanes ? 0xffffffffu : (1u << (2 * n)) - 1);
    _mm512_mask_storeu_epi16(to, mask, _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)));
#else
    for (int i = 0; i < n; i++) to[2 * i] = from[i];
#endif
}

// -- functions -----------------------------------------------------------------------------------------------------------

// e^x to about 1 ulp for x in [-87, 88]; below, exactly 0; NaN stays NaN. Cody and Waite's reduction, Cephes' polynomial.
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

// e^x to 2^-18 of itself, for what is rounded to bf16 anyway: x <= 0; below -87 exactly 0; NaN stays NaN. The polynomial
// interpolates 2^f at five Chebyshev points of [-1/2, 1/2].
OCTAVO_INLINE vf exp_coarse(vf x) {
    const vf log2 = max(splat(-126.0f), x * splat(1.44269504f));  // in this order a NaN passes
    const vi n = round_to_int(log2);
    const vf f = log2 - to_float(n);
    vf p = splat(9.666368515e-3f);
    p = fma(p, f, splat(5.592197584e-2f));
    p = fma(p, f, splat(2.402234904e-1f));
    p = fma(p, f, splat(6.931210452e-1f));
    p = fma(p, f, splat(1.0f));
    return select((vi)(x < splat(-87.0f)), vf{}, p * (vf)((n + 127) << 23));
}

// 1 / x to about 1 ulp, for x of at least 1: an estimate and one step of Newton's take a fraction of a division's time.
OCTAVO_INLINE vf reciprocal(vf x) {
#if defined(__AVX512F__)
    const vf estimate = (vf)_mm512_rcp14_ps((__m512)x);
    return fma(estimate, fma(-x, estimate, splat(1.0f)), estimate);
#else
    return splat(1.0f) / x;
#endif
}
OCTAVO_INLINE vf sigmoid(vf x) { return reciprocal(splat(1.0f) + exp(-x)); }

}  // namespace
}  // namespace octavo
