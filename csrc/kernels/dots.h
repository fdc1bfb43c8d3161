// Dot products of a few bytes in each of the sixteen lanes (int8, int16 and bf16; exact in integers at every
// level), and the functions that make their operands.
#pragma once
#include "simd.h"

namespace octavo {
namespace {

#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
OCTAVO_INLINE __m512i dot4_wide(__m512i u, __m512i s) {
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(u, _mm512_set1_epi16(0xff)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(s, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(u, 8), _mm512_srai_epi16(s, 8));
    return _mm512_add_epi32(even, odd);
}
#elif defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
OCTAVO_INLINE __m256i dot4_wide(__m256i u, __m256i s) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(0xff)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
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
    const auto half = [](RegisterI sum, RegisterI x, RegisterI y) {
#if defined(__AVXVNNI__)
        return (RegisterI)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)y);
#else
        return (RegisterI)_mm256_add_epi32((__m256i)sum, dot4_wide((__m256i)x, (__m256i)y));
#endif
    };
    return each(half, acc, u, s);
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

// dot4 with signed codes of -127 .. 127. `for_dot4_signed` does the part of the work that several rows share.
// Where the instruction wants unsigned codes, they come with 128 added, and the result is too large by
// kSignedOffset times the sum of s; elsewhere the code's sign goes over to s, so that pair sums of 8-bit
// products fit 16 bits.
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
constexpr int kSignedOffset = 0;
OCTAVO_INLINE vi for_dot4_signed(vi codes) { return codes; }
OCTAVO_INLINE vi dot4_signed(vi acc, vi codes, vi s) {
    const __m512i w = (__m512i)codes,
                  turned = _mm512_mask_sub_epi8((__m512i)s, _mm512_movepi8_mask(w), __m512i{}, (__m512i)s);
    return acc +
           (vi)_mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_abs_epi8(w), turned), _mm512_set1_epi16(1));
}
#elif defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
constexpr int kSignedOffset = 0;
OCTAVO_INLINE vi for_dot4_signed(vi codes) { return codes; }
OCTAVO_INLINE vi dot4_signed(vi acc, vi codes, vi s) {
    const auto half = [](RegisterI sum, RegisterI x, RegisterI y) {
        const __m256i pairs =
            _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)x), _mm256_sign_epi8((__m256i)y, (__m256i)x));
        return (RegisterI)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    };
    return each(half, acc, codes, s);
}
#else
constexpr int kSignedOffset = 128;
OCTAVO_INLINE vi for_dot4_signed(vi codes) { return codes ^ (int32_t)0x80808080; }
OCTAVO_INLINE vi dot4_signed(vi acc, vi codes, vi s) { return dot4(acc, codes, s); }
#endif

// Sums of products of unsigned codes of at most 6 bits with terms. `dot4_narrow` adds four products in each
// lane, and `widen` makes 32 bits of the sum. Without VNNI, sums of pairs have 16 bits: vectors of
// kNarrowVectors<bits> codes are added there before they are widened, which saves most multiplications.
#if (defined(__AVX2__) && !defined(__AVX512BW__) && !defined(__AVXVNNI__)) || \
    (defined(__AVX512BW__) && !defined(__AVX512VNNI__))
constexpr bool kPairSums = true;
template <int kBits>
constexpr int kNarrowVectors = 32767 / (((1 << kBits) - 1) * 2 * 127);
OCTAVO_INLINE vi add_narrow(vi a, vi b) {
#if defined(__AVX512BW__)
    return (vi)_mm512_add_epi16((__m512i)a, (__m512i)b);
#else
    return each([](RegisterI x, RegisterI y) { return (RegisterI)_mm256_add_epi16((__m256i)x, (__m256i)y); },
                a, b);
#endif
}
OCTAVO_INLINE vi dot4_narrow(vi acc, vi u, vi s) {
#if defined(__AVX512BW__)
    return add_narrow(acc, (vi)_mm512_maddubs_epi16((__m512i)u, (__m512i)s));
#else
    const auto half = [](RegisterI x, RegisterI y) {
        return (RegisterI)_mm256_maddubs_epi16((__m256i)x, (__m256i)y);
    };
    return add_narrow(acc, each(half, u, s));
#endif
}
OCTAVO_INLINE vi widen(vi pairs) {
#if defined(__AVX512BW__)
    return (vi)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
#else
    return each(
        [](RegisterI sums) { return (RegisterI)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); },
        pairs);
#endif
}
#else
constexpr bool kPairSums = false;
template <int kBits>
constexpr int kNarrowVectors = 1 << 20;
OCTAVO_INLINE vi add_narrow(vi a, vi b) { return a + b; }
OCTAVO_INLINE vi dot4_narrow(vi acc, vi u, vi s) { return dot4(acc, u, s); }
OCTAVO_INLINE vi widen(vi sum) { return sum; }
#endif

// Two 4-bit codes in a byte. The products of the low nibbles are summed as they are; those of the high ones
// as codes times 16, which saves a shift for each vector (`nibble_sum` undoes it, exactly). Where sums of pairs
// have 16 bits the codes are shifted down instead, since 240 * 127 * 2 would not fit.
OCTAVO_INLINE vi high_nibbles(vi both) {
    return kPairSums ? (both >> 4) & 0x0f0f0f0f : both & (int32_t)0xf0f0f0f0;
}
// Returns the sum of a group's products, of its low nibbles and its high ones.
OCTAVO_INLINE vi nibble_sum(vi low, vi high) {
    return kPairSums ? widen(add_narrow(low, high)) : low + (high >> 4);
}

// Codes of 8 bits as `CodeSum` takes them, and what it takes away from them. Without VNNI they become signed
// bytes, so that the sums of two products fit 16 bits.
constexpr int kCodeOffset = kPairSums ? 128 : 0;
OCTAVO_INLINE vi code_operand(vi codes) { return kPairSums ? codes ^ (int32_t)0x80808080 : codes; }

// The sum of products of vectors of codes of kBits bits with terms, in two chains.
template <int kBits>
class CodeSum {
  public:
    OCTAVO_INLINE void start(vi sum) { second_ = sum; }
    // Adds vector v's products, of vectors 0, 1, 2 ... in order. Codes of 8 bits have been through `code_operand`.
    OCTAVO_INLINE void add(int v, vi codes, vi terms) {
        if constexpr (kBits == 8) {
            vi& sum = v % 2 ? second_ : first_;
            sum = kPairSums ? dot4_signed(sum, codes, terms) : dot4(sum, codes, terms);
        } else if constexpr (kPairSums) {
            if (v && v % kNarrowVectors<kBits> == 0) second_ = second_ + widen(first_), first_ = vi{};
            first_ = dot4_narrow(first_, codes, terms);
        } else {
            vi& sum = v % 2 ? second_ : first_;
            sum = dot4(sum, codes, terms);
        }
    }
    OCTAVO_INLINE vi total() const { return (kBits < 8 ? widen(first_) : first_) + second_; }

  private:
    vi first_ = {}, second_ = {};
};

// Sixteen bytes, and the one that each byte's low nibble names; the high nibbles are zeros.
class Table16 {
  public:
    OCTAVO_INLINE explicit Table16(const uint8_t (&bytes)[16]) {
#if defined(__AVX512BW__)
        all_ = (vi)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)bytes));
#elif defined(__AVX2__)
        const auto half = (RegisterI)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bytes));
        all_ = {half, half};
#else
        std::memcpy(bytes_, bytes, sizeof bytes_);
#endif
    }
    OCTAVO_INLINE vi operator()(vi nibbles) const {
#if defined(__AVX512BW__)
        return (vi)_mm512_shuffle_epi8((__m512i)all_, (__m512i)nibbles);
#elif defined(__AVX2__)
        return each(
            [](RegisterI table, RegisterI places) {
                return (RegisterI)_mm256_shuffle_epi8((__m256i)table, (__m256i)places);
            },
            all_, nibbles);
#else
        uint8_t bytes[4 * kLanes];
        store_i(bytes, nibbles);
        for (uint8_t& byte : bytes) byte = bytes_[byte];
        return load_i(bytes);
#endif
    }

  private:
#if defined(__AVX2__)
    vi all_;
#else
    uint8_t bytes_[16];
#endif
};

// Sixteen floats, and the one that the lowest four bits of each lane name.
class Floats16 {
  public:
    OCTAVO_INLINE explicit Floats16(const float (&numbers)[16]) {
#if defined(__AVX2__)
        all_ = load(numbers);
#else
        std::memcpy(numbers_, numbers, sizeof numbers_);
#endif
    }
    OCTAVO_INLINE vf operator()(vi places) const {
#if defined(__AVX512F__)
        return (vf)_mm512_permutexvar_ps((__m512i)places, (__m512)all_);
#elif defined(__AVX2__)
        const __m256 low = (__m256)all_.low, high = (__m256)all_.high;
        return each(
            [low, high](RegisterI at) {
                const __m256 first = _mm256_permutevar8x32_ps(low, (__m256i)at);
                const __m256 second = _mm256_permutevar8x32_ps(high, (__m256i)at);
                return (RegisterF)_mm256_blendv_ps(first, second, (__m256)(at << 28));
            },
            places);
#else
        int32_t lanes[kLanes];
        store_i(lanes, places);
        float found[kLanes];
        for (int i = 0; i < kLanes; i++) found[i] = numbers_[lanes[i] & 15];
        return load(found);
#endif
    }

  private:
#if defined(__AVX2__)
    vf all_;
#else
    float numbers_[16];
#endif
};

// Returns an e4m3 code's number as bf16, which holds it exactly; what e4m3 has as NaN becomes 480. The
// exponents' biases are 120 apart; numbers below the smallest exponent are looked up.
constexpr uint16_t kSmallE4m3[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
OCTAVO_INLINE uint16_t e4m3_bits(uint8_t code) {
    const int magnitude = code & 0x7f;
    const int bits = magnitude < 8 ? kSmallE4m3[magnitude] : (magnitude << 4) + (120 << 7);
    return (uint16_t)(bits | (code & 0x80) << 8);
}

// The same of the codes in the low bytes of all 16 bits, whatever their high bytes hold.
OCTAVO_INLINE vi e4m3_to_bf16(vi codes) {
#if defined(__AVX512BW__)
    const __m512i x = (__m512i)codes;
    const __m512i small = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)kSmallE4m3));
    const __m512i magnitude = _mm512_and_si512(_mm512_slli_epi16(x, 4), _mm512_set1_epi16(0x07f0));
    const __m512i whole =
        _mm512_mask_permutexvar_epi16(_mm512_add_epi16(magnitude, _mm512_set1_epi16(120 << 7)),
                                      _mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x78)), x, small);
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(x, 8), _mm512_set1_epi16((short)0x8000));
    return (vi)_mm512_or_si512(whole, sign);
#elif defined(__AVX2__)
    const auto half = [](RegisterI codes_of) {
        const __m256i x = (__m256i)codes_of;
        // The low bytes of the eight smallest numbers, then the high ones.
        const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(
            0, 0, (char)0x80, (char)0xc0, 0, 0x20, 0x40, 0x60, 0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c));
        const __m256i place = _mm256_and_si256(x, _mm256_set1_epi16(7));
        const __m256i small = _mm256_shuffle_epi8(
            table,
            _mm256_or_si256(_mm256_or_si256(place, _mm256_slli_epi16(place, 8)), _mm256_set1_epi16(0x0800)));
        const __m256i magnitude = _mm256_and_si256(_mm256_slli_epi16(x, 4), _mm256_set1_epi16(0x07f0));
        const __m256i is_small = _mm256_cmpeq_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x78)), __m256i{});
        const __m256i whole =
            _mm256_blendv_epi8(_mm256_add_epi16(magnitude, _mm256_set1_epi16(120 << 7)), small, is_small);
        const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(x, 8), _mm256_set1_epi16((short)0x8000));
        return (RegisterI)_mm256_or_si256(whole, sign);
    };
    return each(half, codes);
#else
    uint16_t halves[2 * kLanes];
    store_i(halves, codes);
    for (uint16_t& half : halves) half = e4m3_bits((uint8_t)half);
    return load_i(halves);
#endif
}

// acc[i] += w[2i] * a[2i] + w[2i+1] * a[2i+1] over pairs of bf16 in each lane.
OCTAVO_INLINE vf dot2_bf16(vf acc, vi w, vi a) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)a);
#else
    acc = fma((vf)(w << 16), (vf)(a << 16), acc);
    return fma((vf)(w & (int32_t)0xffff0000), (vf)(a & (int32_t)0xffff0000), acc);
#endif
}

// Loads sixteen int16, widened.
OCTAVO_INLINE vi load_int16(const void* p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    const auto half = [](const void* at) {
        return (RegisterI)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)at));
    };
    return {half(p), half((const char*)p + 16)};
#else
    int16_t values[kLanes];
    std::memcpy(values, p, sizeof values);
    int32_t wide[kLanes];
    for (int i = 0; i < kLanes; i++) wide[i] = values[i];
    return load_i(wide);
#endif
}

// Loads sixteen int8.
OCTAVO_INLINE vi load_int8(const int8_t* p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    const auto half = [](const int8_t* at) {
        return (RegisterI)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at));
    };
    return {half(p), half(p + 8)};
#else
    int32_t wide[kLanes];
    for (int i = 0; i < kLanes; i++) wide[i] = p[i];
    return load_i(wide);
#endif
}

// Loads thirty-two int8 as pairs of int16.
OCTAVO_INLINE vi int8_to_int16(const int8_t* p) {
#if defined(__AVX512BW__)
    return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    const auto half = [](const int8_t* at) {
        return (RegisterI)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)at));
    };
    return {half(p), half(p + 16)};
#elif defined(__SSE2__)
    const auto quarter = [](const int8_t* at) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i*)at);
        return (RegisterI)_mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8);
    };
    return {{quarter(p), quarter(p + 8)}, {quarter(p + 16), quarter(p + 24)}};
#else
    const vi pair = load_int16(p);  // the second number in the high byte, the first in the low one
    return (((pair << 24) >> 24) & 0xffff) | ((pair >> 8) << 16);
#endif
}

// acc[i] += a[2i] * b[2i] + a[2i+1] * b[2i+1] over pairs of int16 in each lane, exact while the sums fit 32
// bits.
OCTAVO_INLINE vi dot2_int16(vi acc, vi a, vi b) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return acc + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    const auto half = [](RegisterI sum, RegisterI x, RegisterI y) {
#if defined(__AVXVNNI__)
        return (RegisterI)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)y);
#else
        return (RegisterI)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)x, (__m256i)y));
#endif
    };
    return each(half, acc, a, b);
#elif defined(__SSE2__)
    const auto quarter = [](RegisterI sum, RegisterI x, RegisterI y) {
        return (RegisterI)_mm_add_epi32((__m128i)sum, _mm_madd_epi16((__m128i)x, (__m128i)y));
    };
    return each(quarter, acc, a, b);
#else
    return acc + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Stores sixteen int32 in -32768 .. 32767 as int16.
OCTAVO_INLINE void store_int16(uint16_t* p, vi v) {
#if defined(__AVX512F__)
    const __m256i packed = _mm512_cvtepi32_epi16((__m512i)v);
    std::memcpy(p, &packed, 32);
#elif defined(__AVX2__)
    const __m256i packed =
        _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v.low, (__m256i)v.high), 0xd8);
    std::memcpy(p, &packed, 32);
#elif defined(__SSE2__)
    const __m128i packed[2] = {_mm_packs_epi32((__m128i)v.low.low, (__m128i)v.low.high),
                               _mm_packs_epi32((__m128i)v.high.low, (__m128i)v.high.high)};
    std::memcpy(p, packed, 32);
#else
    int32_t lanes[kLanes];
    store_i(lanes, v);
    for (int i = 0; i < kLanes; i++) p[i] = (uint16_t)lanes[i];
#endif
}

// Loads thirty-two int8 as pairs of bf16, which hold them exactly.
OCTAVO_INLINE vi int8_to_bf16(const int8_t* p) {
#if defined(__AVX512BF16__)
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + 16))));
    return (vi)_mm512_cvtne2ps_pbh(high, low);
#else
    const vi pair = load_int16(p);
    const vi first = (vi)to_float((pair << 24) >> 24), second = (vi)to_float(pair >> 8);
    return ((first >> 16) & 0xffff) | second;
#endif
}

// Stores the first n of 16 values in every second place of `to`; nothing is written between them.
OCTAVO_INLINE void store_bf16_pairs(uint16_t* to, const uint16_t* from, int n) {
#if defined(__AVX512BW__)
    const __mmask32 mask = 0x55555555u & (n == kLanes ? 0xffffffffu : (1u << (2 * n)) - 1);
    _mm512_mask_storeu_epi16(to, mask, _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)));
#else
    for (int i = 0; i < n; i++) to[2 * i] = from[i];
#endif
}

}  // namespace
}  // namespace octavo
