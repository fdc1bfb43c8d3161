// Levels from AVX2 (with FMA and F16C) on: two registers hold the sixteen lanes. AVX-VNNI replaces the dot
// products that it has instructions for.
#pragma once
#include "by_lane.h"

namespace octavo {
namespace {

using namespace by_lane;

OCTAVO_INLINE __m256 raw(RegisterF v) { return reinterpret_cast<__m256>(v); }
OCTAVO_INLINE __m256i raw(RegisterI v) { return reinterpret_cast<__m256i>(v); }
OCTAVO_INLINE RegisterF lanes(__m256 v) { return reinterpret_cast<RegisterF>(v); }
OCTAVO_INLINE RegisterI lanes(__m256i v) { return reinterpret_cast<RegisterI>(v); }
OCTAVO_INLINE __m128i load8(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
OCTAVO_INLINE __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

// -- lanes --

OCTAVO_INLINE vf fma(vf a, vf b, vf c) {
    return each(
        [](RegisterF x, RegisterF y, RegisterF z) { return lanes(_mm256_fmadd_ps(raw(x), raw(y), raw(z))); },
        a, b, c);
}
OCTAVO_INLINE vf max(vf a, vf b) {
    return each([](RegisterF x, RegisterF y) { return lanes(_mm256_max_ps(raw(x), raw(y))); }, a, b);
}
OCTAVO_INLINE vf min(vf a, vf b) {
    return each([](RegisterF x, RegisterF y) { return lanes(_mm256_min_ps(raw(x), raw(y))); }, a, b);
}
OCTAVO_INLINE vf to_float(vi v) {
    return each([](RegisterI x) { return lanes(_mm256_cvtepi32_ps(raw(x))); }, v);
}
OCTAVO_INLINE vi round_to_int(vf v) {
    return each([](RegisterF x) { return lanes(_mm256_cvtps_epi32(raw(x))); }, v);
}

OCTAVO_INLINE bool any_lane(vi mask) {
    const __m256i both = raw(mask.low | mask.high);
    return !_mm256_testz_si256(both, both);
}
OCTAVO_INLINE uint32_t nonzero_lanes(vi v) {
    const auto zeros = [](RegisterI half) {
        const __m256i is_zero = _mm256_cmpeq_epi32(raw(half), __m256i{});
        return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(is_zero)));
    };
    return ~(zeros(v.low) | zeros(v.high) << 8) & 0xffff;
}

OCTAVO_INLINE vi keep_in_register(vi numbers) { return numbers; }

// -- conversions --

OCTAVO_INLINE vf load_bf16(const uint16_t* p) {
    const auto half = [](const uint16_t* at) {
        const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(at)), 16);
        return lanes(_mm256_castsi256_ps(wide));
    };
    return {half(p), half(p + 8)};
}
OCTAVO_INLINE vf load_fp16(const uint16_t* p) {
    return {lanes(_mm256_cvtph_ps(load16(p))), lanes(_mm256_cvtph_ps(load16(p + 8)))};
}
OCTAVO_INLINE vi load_int16(const void* p) {
    const auto half = [](const void* at) { return lanes(_mm256_cvtepi16_epi32(load16(at))); };
    return {half(p), half(static_cast<const char*>(p) + 16)};
}
OCTAVO_INLINE vi load_int8(const int8_t* p) {
    return {lanes(_mm256_cvtepi8_epi32(load8(p))), lanes(_mm256_cvtepi8_epi32(load8(p + 8)))};
}
OCTAVO_INLINE vi int8_to_int16(const int8_t* p) {
    return {lanes(_mm256_cvtepi8_epi16(load16(p))), lanes(_mm256_cvtepi8_epi16(load16(p + 16)))};
}
OCTAVO_INLINE void store_int16(uint16_t* p, vi v) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(raw(v.low), raw(v.high)), 0xd8);
    std::memcpy(p, &packed, 32);
}
OCTAVO_INLINE vi e4m3_to_bf16(vi codes) {
    const auto half = [](RegisterI codes_of) {
        const __m256i x = raw(codes_of);
        // Low bytes of the eight smallest numbers, then their high bytes.
        const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(
            0, 0, -0x80, -0x40, 0, 0x20, 0x40, 0x60, 0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c));
        const __m256i index = _mm256_and_si256(x, _mm256_set1_epi16(7));
        const __m256i small = _mm256_shuffle_epi8(
            table,
            _mm256_or_si256(_mm256_or_si256(index, _mm256_slli_epi16(index, 8)), _mm256_set1_epi16(0x0800)));
        const __m256i magnitude = _mm256_and_si256(_mm256_slli_epi16(x, 4), _mm256_set1_epi16(0x07f0));
        const __m256i is_small = _mm256_cmpeq_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x78)), __m256i{});
        const __m256i whole =
            _mm256_blendv_epi8(_mm256_add_epi16(magnitude, _mm256_set1_epi16(120 << 7)), small, is_small);
        const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(x, 8), _mm256_set1_epi16(-0x8000));
        return lanes(_mm256_or_si256(whole, sign));
    };
    return each(half, codes);
}

// Sign-extends the low byte of each 16 bits.
OCTAVO_INLINE vi widen_low_bytes(vi v) {
    return each([](RegisterI x) { return lanes(_mm256_srai_epi16(_mm256_slli_epi16(raw(x), 8), 8)); }, v);
}

// -- products --

#if defined(__AVXVNNI__)
OCTAVO_INLINE vi dot4(vi acc, vi u, vi s) {
    const auto half = [](RegisterI sum, RegisterI x, RegisterI y) {
        return lanes(_mm256_dpbusd_avx_epi32(raw(sum), raw(x), raw(y)));
    };
    return each(half, acc, u, s);
}
OCTAVO_INLINE vi dot2_int16(vi acc, vi a, vi b) {
    const auto half = [](RegisterI sum, RegisterI x, RegisterI y) {
        return lanes(_mm256_dpwssd_avx_epi32(raw(sum), raw(x), raw(y)));
    };
    return each(half, acc, a, b);
}
#else
OCTAVO_INLINE vi dot4(vi acc, vi u, vi s) {
    const auto half = [](RegisterI sum, RegisterI x, RegisterI y) {
        const __m256i even = _mm256_madd_epi16(_mm256_and_si256(raw(x), _mm256_set1_epi16(0xff)),
                                               _mm256_srai_epi16(_mm256_slli_epi16(raw(y), 8), 8));
        const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(raw(x), 8), _mm256_srai_epi16(raw(y), 8));
        return lanes(_mm256_add_epi32(raw(sum), _mm256_add_epi32(even, odd)));
    };
    return each(half, acc, u, s);
}
OCTAVO_INLINE vi dot2_int16(vi acc, vi a, vi b) {
    const auto half = [](RegisterI sum, RegisterI x, RegisterI y) {
        return lanes(_mm256_add_epi32(raw(sum), _mm256_madd_epi16(raw(x), raw(y))));
    };
    return each(half, acc, a, b);
}
OCTAVO_INLINE vi dot4_pairs(vi u, vi s) {
    return each([](RegisterI x, RegisterI y) { return lanes(_mm256_maddubs_epi16(raw(x), raw(y))); }, u, s);
}
OCTAVO_INLINE vi add_pairs(vi a, vi b) {
    return each([](RegisterI x, RegisterI y) { return lanes(_mm256_add_epi16(raw(x), raw(y))); }, a, b);
}
OCTAVO_INLINE vi widen_pairs(vi pairs) {
    return each([](RegisterI sums) { return lanes(_mm256_madd_epi16(raw(sums), _mm256_set1_epi16(1))); },
                pairs);
}
OCTAVO_INLINE vi dot4_turned(vi acc, vi codes, vi s) {
    const auto half = [](RegisterI sum, RegisterI x, RegisterI y) {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(raw(x)), _mm256_sign_epi8(raw(y), raw(x)));
        return lanes(_mm256_add_epi32(raw(sum), _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
    };
    return each(half, acc, codes, s);
}
#endif

// -- words of 64 bits --

OCTAVO_INLINE __m256i wide(RegisterW v) { return reinterpret_cast<__m256i>(v); }
OCTAVO_INLINE RegisterW words(__m256i v) { return reinterpret_cast<RegisterW>(v); }
OCTAVO_INLINE RegisterW multiply_words(RegisterW a, RegisterW b) {
    return words(_mm256_mul_epu32(wide(a), wide(b)));
}
OCTAVO_INLINE RegisterW interleave_words(RegisterW low, RegisterW high) {
    return words(_mm256_blend_epi32(wide(low), wide(high << 32), 0xAA));
}
OCTAVO_INLINE WordPair interleave_pairs(RegisterW a, RegisterW b) {
    return {words(_mm256_unpacklo_epi64(wide(a), wide(b))), words(_mm256_unpackhi_epi64(wide(a), wide(b)))};
}

// -- tables --

// Looks up each byte's low nibble in sixteen bytes; the high nibbles must be zero.
class Table16 {
  public:
    OCTAVO_INLINE explicit Table16(const uint8_t (&bytes)[16])
        : all_(_mm256_broadcastsi128_si256(load16(bytes))) {}
    OCTAVO_INLINE vi operator()(vi nibbles) const {
        return each([this](RegisterI indices) { return lanes(_mm256_shuffle_epi8(all_, raw(indices))); },
                    nibbles);
    }

  private:
    __m256i all_;
};
// Looks up the lowest four bits of each lane in sixteen floats.
class Floats16 {
  public:
    OCTAVO_INLINE explicit Floats16(const float (&numbers)[16]) : all_(load(numbers)) {}
    OCTAVO_INLINE vf operator()(vi indices) const {
        const __m256 low = raw(all_.low), high = raw(all_.high);
        return each(
            [low, high](RegisterI at) {
                const __m256 first = _mm256_permutevar8x32_ps(low, raw(at));
                const __m256 second = _mm256_permutevar8x32_ps(high, raw(at));
                return lanes(_mm256_blendv_ps(first, second, reinterpret_cast<__m256>(at << 28)));
            },
            indices);
    }

  private:
    vf all_;
};

}  // namespace
}  // namespace octavo
