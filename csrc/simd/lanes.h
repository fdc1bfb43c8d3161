// Operations common to all instruction sets: loads, stores, selects, and scalar conversions of bf16, fp16
// and e4m3.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "vectors.h"

namespace octavo {
namespace {

constexpr int kLanes = 16;

// Returns a lane whose four bytes are all `byte`.
constexpr int32_t each_byte(uint32_t byte) { return static_cast<int32_t>(0x01010101u * byte); }

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
// Returns y with zeros where |x| is smaller than the threshold. Magnitudes have the same order as their bit
// patterns as integers; a NaN is above all of them and is kept.
OCTAVO_INLINE vf without_small(vf x, vf y, float threshold) {
    if (threshold == 0) return y;
    int32_t threshold_bits;
    std::memcpy(&threshold_bits, &threshold, 4);
    return select((as_int(x) & 0x7fffffff) < splat_i(threshold_bits), vf{}, y);
}
OCTAVO_INLINE vi max_i(vi a, vi b) {
    return each([](RegisterI x, RegisterI y) { return x > y ? x : y; }, a, b);
}

// 64-bit lanes, each with a 32-bit word in the low half.
typedef uint64_t RegisterW __attribute__((vector_size(4 * kRegisterLanes)));
constexpr int kWideLanes = kRegisterLanes / 2;
struct WordPair {
    RegisterW even, odd;
};

// -- half precisions --

OCTAVO_INLINE float bf16_to_float(uint16_t h) {
    const uint32_t bits = static_cast<uint32_t>(h) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
// Rounds to nearest even; NaN stays NaN.
OCTAVO_INLINE uint16_t float_to_bf16(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
OCTAVO_INLINE float fp16_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    uint32_t magnitude = static_cast<uint32_t>(h & 0x7fff) << 13;
    float f;
    std::memcpy(&f, &magnitude, 4);
    f *= 0x1p112f;  // shifts the exponent's bias, subnormals included
    if ((h & 0x7c00) == 0x7c00) {
        magnitude = 0x7f800000u | (static_cast<uint32_t>(h & 0x3ff) << 13);
        std::memcpy(&f, &magnitude, 4);
    }
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    bits |= sign;
    std::memcpy(&f, &bits, 4);
    return f;
}

// Converts an e4m3 code to bf16, which represents it exactly; NaN codes become 480. The exponent biases
// differ by 120; subnormals are looked up.
constexpr uint16_t kSmallE4m3[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
OCTAVO_INLINE uint16_t e4m3_bits(uint8_t code) {
    const int magnitude = code & 0x7f;
    const int bits = magnitude < 8 ? kSmallE4m3[magnitude] : (magnitude << 4) + (120 << 7);
    return static_cast<uint16_t>(bits | (code & 0x80) << 8);
}

}  // namespace
}  // namespace octavo
