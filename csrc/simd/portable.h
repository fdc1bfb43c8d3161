// The level for every machine: compiler vectors, with SSE2 on x86-64 for a few operations.
#pragma once
#include "by_lane.h"

namespace octavo {
namespace {

using namespace by_lane;

// -- lanes --

OCTAVO_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
OCTAVO_INLINE vf max(vf a, vf b) { return select(a > b, a, b); }
OCTAVO_INLINE vf min(vf a, vf b) { return select(a < b, a, b); }
OCTAVO_INLINE vf to_float(vi v) {
    return each([](RegisterI x) { return __builtin_convertvector(x, RegisterF); }, v);
}
OCTAVO_INLINE vi round_to_int(vf v) {
    // Adding and subtracting 1.5 * 2^23 rounds to nearest even, for |v| < 2^22.
    const vf magic = splat(12582912.0f);
    return each([](RegisterF x) { return __builtin_convertvector(x, RegisterI); }, (v + magic) - magic);
}

OCTAVO_INLINE bool any_lane(vi mask) { return max_lanes_i(mask & 1) != 0; }
OCTAVO_INLINE uint32_t nonzero_lanes(vi v) {
    alignas(64) int32_t lanes[kLanes];
    store_i(lanes, v);
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; i++) bits |= static_cast<uint32_t>(lanes[i] != 0) << i;
    return bits;
}

OCTAVO_INLINE vi keep_in_register(vi numbers) { return numbers; }

// -- conversions --

OCTAVO_INLINE vf load_bf16(const uint16_t* p) {
    uint32_t v[kLanes];
    for (int i = 0; i < kLanes; i++) v[i] = static_cast<uint32_t>(p[i]) << 16;
    return as_float(load_i(v));
}
OCTAVO_INLINE vf load_fp16(const uint16_t* p) {
    float v[kLanes];
    for (int i = 0; i < kLanes; i++) v[i] = fp16_to_float(p[i]);
    return load(v);
}
OCTAVO_INLINE vi load_int16(const void* p) {
    int16_t values[kLanes];
    std::memcpy(values, p, sizeof values);
    int32_t wide[kLanes];
    for (int i = 0; i < kLanes; i++) wide[i] = values[i];
    return load_i(wide);
}
OCTAVO_INLINE vi load_int8(const int8_t* p) {
    int32_t wide[kLanes];
    for (int i = 0; i < kLanes; i++) wide[i] = p[i];
    return load_i(wide);
}
OCTAVO_INLINE vi int8_to_int16(const int8_t* p) {
#if defined(__SSE2__)
    const auto quarter = [](const int8_t* at) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
        return reinterpret_cast<RegisterI>(_mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8));
    };
    return {{quarter(p), quarter(p + 8)}, {quarter(p + 16), quarter(p + 24)}};
#else
    const vi pair = load_int16(p);  // the second number in the high byte, the first in the low one
    return (((pair << 24) >> 24) & 0xffff) | ((pair >> 8) << 16);
#endif
}
OCTAVO_INLINE void store_int16(uint16_t* p, vi v) {
#if defined(__SSE2__)
    const auto pack = [](Two<RegisterI> half) {
        return _mm_packs_epi32(reinterpret_cast<__m128i>(half.low), reinterpret_cast<__m128i>(half.high));
    };
    const __m128i packed[2] = {pack(v.low), pack(v.high)};
    std::memcpy(p, packed, 32);
#else
    int32_t lanes[kLanes];
    store_i(lanes, v);
    for (int i = 0; i < kLanes; i++) p[i] = static_cast<uint16_t>(lanes[i]);
#endif
}
OCTAVO_INLINE vi e4m3_to_bf16(vi codes) {
    uint16_t halves[2 * kLanes];
    store_i(halves, codes);
    for (uint16_t& half : halves) half = e4m3_bits(static_cast<uint8_t>(half));
    return load_i(halves);
}

// Sign-extends the low byte of each 16 bits.
OCTAVO_INLINE vi widen_low_bytes(vi v) { return (((v << 24) >> 24) & 0xffff) | (((v << 8) >> 24) << 16); }

// -- products --

OCTAVO_INLINE vi dot4(vi acc, vi u, vi s) {
    const vi even_u = u & 0x00ff00ff, odd_u = (u >> 8) & 0x00ff00ff;
    vi sum = acc;
    // byte b of each lane, sign-extended by shifting it to the top first
    sum += (even_u & 0xffff) * ((s << 24) >> 24);
    sum += (odd_u & 0xffff) * ((s << 16) >> 24);
    sum += (even_u >> 16) * ((s << 8) >> 24);
    sum += (odd_u >> 16) * (s >> 24);
    return sum;
}
OCTAVO_INLINE vi dot2_int16(vi acc, vi a, vi b) {
#if defined(__SSE2__)
    const auto quarter = [](RegisterI sum, RegisterI x, RegisterI y) {
        const __m128i pairs = _mm_madd_epi16(reinterpret_cast<__m128i>(x), reinterpret_cast<__m128i>(y));
        return reinterpret_cast<RegisterI>(_mm_add_epi32(reinterpret_cast<__m128i>(sum), pairs));
    };
    return each(quarter, acc, a, b);
#else
    return acc + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// -- words of 64 bits --

OCTAVO_INLINE RegisterW multiply_words(RegisterW a, RegisterW b) {
#if defined(__SSE2__)
    return reinterpret_cast<RegisterW>(
        _mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
    return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}
OCTAVO_INLINE RegisterW interleave_words(RegisterW low, RegisterW high) {
    return (low & 0xFFFFFFFFu) | (high << 32);
}
OCTAVO_INLINE WordPair interleave_pairs(RegisterW a, RegisterW b) {
    return {RegisterW{a[0], b[0]}, RegisterW{a[1], b[1]}};
}

// -- tables --

// Looks up each byte's low nibble in sixteen bytes; the high nibbles must be zero.
class Table16 {
  public:
    OCTAVO_INLINE explicit Table16(const uint8_t (&bytes)[16]) { std::memcpy(bytes_, bytes, sizeof bytes_); }
    OCTAVO_INLINE vi operator()(vi nibbles) const {
        uint8_t bytes[4 * kLanes];
        store_i(bytes, nibbles);
        for (uint8_t& byte : bytes) byte = bytes_[byte];
        return load_i(bytes);
    }

  private:
    uint8_t bytes_[16];
};
// Looks up the lowest four bits of each lane in sixteen floats.
class Floats16 {
  public:
    OCTAVO_INLINE explicit Floats16(const float (&numbers)[16]) {
        std::memcpy(numbers_, numbers, sizeof numbers_);
    }
    OCTAVO_INLINE vf operator()(vi indices) const {
        int32_t lanes[kLanes];
        store_i(lanes, indices);
        float found[kLanes];
        for (int i = 0; i < kLanes; i++) found[i] = numbers_[lanes[i] & 15];
        return load(found);
    }

  private:
    float numbers_[16];
};

}  // namespace
}  // namespace octavo
