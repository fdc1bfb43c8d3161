// Sixteen lanes at every level: one vector type, so that weight tiles and KV blocks have the same layout
// everywhere.
//
// `vf` is 16 fp32 lanes, `vi` 16 int32 lanes (vectors.h). On AVX-512 each is one register, on AVX2 two, on
// SSE2 or NEON four. Operators are those of the compiler's vectors. All other functions are defined in one
// file per instruction set; operations without an instruction come from by_lane.h:
//
//   load_first, store_first    the first n lanes; the others are loaded as 0, and no memory after them is touched
//   fma, max, min              per lane; max and min return their second operand for a NaN
//   to_float, round_to_int     round_to_int rounds to nearest even, for |v| < 2^22
//   reciprocal                 1 / x to about 1 ulp, for x >= 1
//   sum_lanes, max_lanes, ..   in a fixed order at each level; `_i` for integers
//   nonzero_lanes, any_lane    bit mask of nonzero lanes, lowest bit first; whether there is one
//   keep_in_register           keeps the compiler from loading a register again for each use
//   load_bf16, load_fp16, ..   sixteen numbers, widened; store_bf16 rounds to nearest even
//   to_bf16, int8_to_bf16, ..  thirty-two numbers in pairs, in order
//   store_bf16_pairs           the first n of 16 values to every second element; the others are not written
//   pack_int8                  sixty-four numbers of -128 .. 127 as bytes, v[0]'s sixteen first
//   e4m3_to_bf16               converts the low byte of each 16 bits; the high byte is ignored
//   dot4(acc, u, s)            adds four products of uint8 and int8 in each lane: exact, without saturation
//   dot4_pairs, add_pairs, ..  the same in pairs of products with 16-bit sums, without dot products (dots.h)
//   dot4_turned(acc, w, s)     dot4 with signed codes w of -127 .. 127, without VNNI
//   dot2_int16, dot2_bf16      adds two products of pairs in each lane
//   multiply_words             low half times low half, in 64 bits, of each wide lane
//   interleave_words           words of `low` in the low halves, of `high` in the high halves
//   interleave_pairs           wide lanes of a and b alternating: all even ones, then all odd ones
//   interleave, load_sums      four columns at kInterleaved outputs as quads, and sums of these in output order
//   keep_nonzero               indices and terms of the lanes with a nonzero term (by_lane.h)
//   Table16, Floats16          lookup in sixteen bytes or floats by the low bits of each byte or lane
//   Numbers16                  lookup in sixteen numbers of 16 bits by the low four bits of each 16 bits (dots.h)
//
// Kernels are compiled with -ffp-contract=off: a product is fused into a sum only by `fma`, so that the
// arithmetic does not depend on how many rows a template computes at once.
#pragma once

#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__)
#include "avx2.h"
#elif defined(OCTAVO_NEON)
#include "neon.h"
#else
#include "portable.h"
#endif

namespace octavo {
namespace {

// Whether the level has AMX (amx.h).
#if defined(__AMX_INT8__)
constexpr bool kHasTileUnit = true;
#else
constexpr bool kHasTileUnit = false;
#endif

// -- functions --

// e^x to about 1 ulp for x in [-87, 88]; below -87 exactly 0; NaN stays NaN. Cody and Waite's range
// reduction, Cephes' polynomial.
OCTAVO_INLINE vf exp(vf x) {
    const vf clipped = min(splat(88.0f), max(splat(-87.0f), x));  // this order of operands passes a NaN
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
    return select(x < splat(-87.0f), vf{}, p * as_float((n + 127) << 23));
}

// 2^x with a relative error of 2^-18, for values that are rounded afterwards: x <= 0; below -125 exactly 0;
// 1 at 0; NaN stays NaN. Adding 1.5 * 2^23 leaves x rounded in the low bits; the polynomial interpolates
// 2^f at five Chebyshev points of [-1/2, 1/2].
OCTAVO_INLINE vf exp2_coarse(vf x) {
    const vf magic = splat(12582912.0f), shifted = x + magic;
    const vf f = x - (shifted - magic);
    vf p = splat(9.666368515e-3f);
    p = fma(p, f, splat(5.592197584e-2f));
    p = fma(p, f, splat(2.402234904e-1f));
    p = fma(p, f, splat(6.931210452e-1f));
    p = fma(p, f, splat(1.0f));
    return select(x < splat(-125.0f), vf{}, as_float(as_int(p) + (as_int(shifted) << 23)));
}

OCTAVO_INLINE vf sigmoid(vf x) { return reciprocal(splat(1.0f) + exp(-x)); }

// erfc(z) for z in [0, 10.5]: e^(-z^2) times a polynomial in t = 1 / (1 + 0.4 z), fitted by least squares
// to 6e-8 of its value up to z = 9.5; beyond 9.4, where e^(-z^2) is below e^-87, exactly 0. NaN stays NaN.
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
// x times the normal distribution function at x, computed from the tail above |x| so that no digits of the
// tail are lost in a difference.
OCTAVO_INLINE vf gelu(vf x) {
    const vf size = min(splat(14.5f), max(x, -x));  // this order of operands passes a NaN
    return max(x, vf{}) - splat(0.5f) * size * erfc(splat(0.70710678f) * size);
}

}  // namespace
}  // namespace octavo
