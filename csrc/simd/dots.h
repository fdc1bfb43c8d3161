// Sums of products of codes with a row's terms, in the sixteen lanes: exact in integers at every level, and
// made of other operations where a level has no instruction.
#pragma once
#include "simd.h"

namespace octavo {
namespace {

// Whether bytes are multiplied in pairs whose sums have 16 bits, for lack of VNNI (`dot4_pairs`).
#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
constexpr bool kPairSums = true;
#else
constexpr bool kPairSums = false;
OCTAVO_INLINE vi dot4_pairs(vi u, vi s) { return dot4(vi{}, u, s); }
OCTAVO_INLINE vi add_pairs(vi a, vi b) { return a + b; }
OCTAVO_INLINE vi widen_pairs(vi sum) { return sum; }
OCTAVO_INLINE vi dot4_turned(vi acc, vi codes, vi s) { return dot4(acc, codes, s); }
#endif

// dot4 with signed codes of -127 .. 127. `for_dot4_signed` does the part of the work that several rows share.
// Where the instruction wants unsigned codes, they come with 128 added, and the result is too large by
// kSignedOffset times the sum of s; elsewhere the code's sign goes over to s, so that pair sums of 8-bit
// products fit 16 bits.
constexpr int kSignedOffset = kPairSums ? 0 : 128;
OCTAVO_INLINE vi for_dot4_signed(vi codes) { return kPairSums ? codes : codes ^ each_byte(0x80); }
OCTAVO_INLINE vi dot4_signed(vi acc, vi codes, vi s) {
    return kPairSums ? dot4_turned(acc, codes, s) : dot4(acc, codes, s);
}

// Sums of products of unsigned codes of at most 6 bits with terms: `dot4_narrow` adds four products in each
// lane, and `widen_pairs` makes 32 bits of the sum. Without VNNI, kNarrowVectors<bits> vectors of codes are
// added in 16 bits before they are widened, which saves most multiplications.
template <int kBits>
constexpr int kNarrowVectors = kPairSums ? 32767 / (((1 << kBits) - 1) * 2 * 127) : 1 << 20;
OCTAVO_INLINE vi dot4_narrow(vi acc, vi u, vi s) {
    return kPairSums ? add_pairs(acc, dot4_pairs(u, s)) : dot4(acc, u, s);
}

// Two 4-bit codes in a byte. The products of the low nibbles are summed as they are; those of the high ones
// as codes times 16, which saves a shift for each vector (`nibble_sum` undoes it, exactly). Where sums of pairs
// have 16 bits the codes are shifted down instead, since 240 * 127 * 2 would not fit.
OCTAVO_INLINE vi high_nibbles(vi both) {
    return kPairSums ? (both >> 4) & each_byte(0x0f) : both & each_byte(0xf0);
}
// Returns the sum of a group's products, of its low nibbles and its high ones.
OCTAVO_INLINE vi nibble_sum(vi low, vi high) {
    return kPairSums ? widen_pairs(add_pairs(low, high)) : low + (high >> 4);
}

// Codes of 8 bits as `CodeSum` takes them, and what it takes away from them. Without VNNI they become signed
// bytes, so that the sums of two products fit 16 bits.
constexpr int kCodeOffset = kPairSums ? 128 : 0;
OCTAVO_INLINE vi code_operand(vi codes) { return kPairSums ? codes ^ each_byte(0x80) : codes; }

// The sum of products of vectors of codes of kBits bits with terms, in two chains.
template <int kBits>
class CodeSum {
  public:
    OCTAVO_INLINE void start(vi sum) { second_ = sum; }
    // Adds vector v's products, of vectors 0, 1, 2 ... in order. Codes of 8 bits have been through
    // `code_operand`.
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

#if !defined(__AVX512BF16__)
// acc[i] += w[2i] * a[2i] + w[2i+1] * a[2i+1] over pairs of bf16 in each lane.
OCTAVO_INLINE vf dot2_bf16(vf acc, vi w, vi a) {
    const int32_t high = static_cast<int32_t>(0xffff0000u);
    acc = fma(as_float(w << 16), as_float(a << 16), acc);
    return fma(as_float(w & high), as_float(a & high), acc);
}
// Loads thirty-two int8 as pairs of bf16, which hold them exactly.
OCTAVO_INLINE vi int8_to_bf16(const int8_t* p) {
    const vi pair = load_int16(p);
    const vi first = as_int(to_float((pair << 24) >> 24)), second = as_int(to_float(pair >> 8));
    return ((first >> 16) & 0xffff) | second;
}
#endif

}  // namespace
}  // namespace octavo
