// Dot products of weight codes and int8 terms in the sixteen lanes. Integer results are exact at every
// level and are composed of other operations on levels without an instruction for them.
#pragma once
#include "simd.h"

namespace octavo {
namespace {

// Whether bytes are multiplied in pairs with 16-bit sums, because there is no VNNI (`dot4_pairs`).
#if (defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512VNNI__)) || \
    (defined(OCTAVO_NEON) && !defined(__ARM_FEATURE_DOTPROD))
constexpr bool kPairSums = true;
#else
constexpr bool kPairSums = false;
OCTAVO_INLINE vi dot4_pairs(vi u, vi s) { return dot4(vi{}, u, s); }
OCTAVO_INLINE vi add_pairs(vi a, vi b) { return a + b; }
OCTAVO_INLINE vi widen_pairs(vi sum) { return sum; }
OCTAVO_INLINE vi dot4_turned(vi acc, vi codes, vi s) { return dot4(acc, codes, s); }
#endif

// dot4 with signed codes of -127 .. 127. `for_dot4_signed` does the part of the work that several rows
// share. For instructions that require unsigned codes 128 is added, and the result is too large by
// kSignedOffset times the sum of s; otherwise the code's sign is transferred to s, so that pair sums of
// 8-bit products fit 16 bits.
constexpr int kSignedOffset = kPairSums ? 0 : 128;
OCTAVO_INLINE vi for_dot4_signed(vi codes) { return kPairSums ? codes : codes ^ each_byte(0x80); }
OCTAVO_INLINE vi dot4_signed(vi acc, vi codes, vi s) {
    return kPairSums ? dot4_turned(acc, codes, s) : dot4(acc, codes, s);
}

// Dot products of unsigned codes of at most 6 bits: `dot4_narrow` adds four products in each lane, and
// `widen_pairs` converts the sum to 32 bits. Without VNNI, kNarrowVectors<bits> vectors of codes are added
// in 16 bits before they are widened, which saves most multiplications.
template <int kBits>
constexpr int kNarrowVectors = kPairSums ? 32767 / (((1 << kBits) - 1) * 2 * 127) : 1 << 20;
OCTAVO_INLINE vi dot4_narrow(vi acc, vi u, vi s) {
    return kPairSums ? add_pairs(acc, dot4_pairs(u, s)) : dot4(acc, u, s);
}

// Two 4-bit codes in a byte. Products of low nibbles are summed directly; those of high nibbles as codes
// times 16, which saves a shift per vector (`nibble_sum` undoes it, exactly). With 16-bit pair sums the
// codes are shifted down instead, since 240 * 127 * 2 would overflow.
OCTAVO_INLINE vi high_nibbles(vi both) {
    return kPairSums ? (both >> 4) & each_byte(0x0f) : both & each_byte(0xf0);
}
// Returns the sum of a group's products of low and high nibbles.
OCTAVO_INLINE vi nibble_sum(vi low, vi high) {
    return kPairSums ? widen_pairs(add_pairs(low, high)) : low + (high >> 4);
}

// 8-bit codes in the form that `CodeSum` expects, and the offset that it subtracts. Without VNNI they
// become signed bytes, so that the sums of two products fit 16 bits.
constexpr int kCodeOffset = kPairSums ? 128 : 0;
OCTAVO_INLINE vi code_operand(vi codes) { return kPairSums ? codes ^ each_byte(0x80) : codes; }

// Sum of dot products of kBits-bit codes and terms, in two chains.
template <int kBits>
class CodeSum {
  public:
    OCTAVO_INLINE void start(vi sum) { second_ = sum; }
    // Adds the products of vector v = 0, 1, 2 ... in order. 8-bit codes come from `code_operand`.
    OCTAVO_INLINE void add(int v, vi codes, vi terms) {
        if constexpr (kBits == 8) {
            vi& sum = v % 2 ? second_ : first_;
            sum = kPairSums ? dot4_signed(sum, codes, terms) : dot4(sum, codes, terms);
        } else if constexpr (kPairSums) {
            if (v && v % kNarrowVectors<kBits> == 0) second_ = second_ + widen_pairs(first_), first_ = vi{};
            first_ = dot4_narrow(first_, codes, terms);
        } else {
            vi& sum = v % 2 ? second_ : first_;
            sum = dot4(sum, codes, terms);
        }
    }
    OCTAVO_INLINE vi total() const { return (kBits < 8 ? widen_pairs(first_) : first_) + second_; }

  private:
    vi first_ = {}, second_ = {};
};

#if !defined(__AVX512F__)
// Looks up the lowest four bits of each 16 bits in sixteen numbers of -128 .. 127.
class Numbers16 {
  public:
    OCTAVO_INLINE explicit Numbers16(const uint16_t (&numbers)[16]) {
        for (int i = 0; i < 16; i++) bytes_[i] = static_cast<uint8_t>(numbers[i]);
    }
    OCTAVO_INLINE vi operator()(vi indices) const {
        return widen_low_bytes(Table16(bytes_)(indices & 0x000f000f));
    }

  private:
    uint8_t bytes_[16];
};
#endif

#if !defined(__AVX512BF16__) && !(defined(OCTAVO_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
// acc[i] += w[2i] * a[2i] + w[2i+1] * a[2i+1] over pairs of bf16 in each lane.
OCTAVO_INLINE vf dot2_bf16(vf acc, vi w, vi a) {
    const int32_t high = static_cast<int32_t>(0xffff0000u);
    acc = fma(as_float(w << 16), as_float(a << 16), acc);
    return fma(as_float(w & high), as_float(a & high), acc);
}
// Converts thirty-two int8 to pairs of bf16, which represent them exactly.
OCTAVO_INLINE vi int8_to_bf16(const int8_t* p) {
    const vi pair = load_int16(p);
    const vi first = as_int(to_float((pair << 24) >> 24)), second = as_int(to_float(pair >> 8));
    return ((first >> 16) & 0xffff) | second;
}
#endif

}  // namespace
}  // namespace octavo
