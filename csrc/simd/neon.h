// Levels from NEON (ARMv8.0) on: four registers hold the sixteen lanes. The dot product, I8MM and BF16
// extensions replace the products that they have instructions for.
#pragma once
#include "by_lane.h"

namespace octavo {
namespace {

using by_lane::interleave, by_lane::keep_nonzero, by_lane::kInterleaved, by_lane::load_first,
    by_lane::load_sums;
using by_lane::reciprocal, by_lane::store_bf16_pairs, by_lane::store_first;

OCTAVO_INLINE float32x4_t raw(RegisterF v) { return reinterpret_cast<float32x4_t>(v); }
OCTAVO_INLINE int32x4_t raw(RegisterI v) { return reinterpret_cast<int32x4_t>(v); }
OCTAVO_INLINE RegisterF lanes(float32x4_t v) { return reinterpret_cast<RegisterF>(v); }
OCTAVO_INLINE RegisterI lanes(int32x4_t v) { return reinterpret_cast<RegisterI>(v); }
OCTAVO_INLINE int8x16_t bytes(RegisterI v) { return vreinterpretq_s8_s32(raw(v)); }
OCTAVO_INLINE int16x8_t halves(RegisterI v) { return vreinterpretq_s16_s32(raw(v)); }
OCTAVO_INLINE RegisterI lanes(int8x16_t v) { return lanes(vreinterpretq_s32_s8(v)); }
OCTAVO_INLINE RegisterI lanes(int16x8_t v) { return lanes(vreinterpretq_s32_s16(v)); }
OCTAVO_INLINE RegisterI lanes(uint8x16_t v) { return lanes(vreinterpretq_s32_u8(v)); }
OCTAVO_INLINE RegisterI lanes(uint16x8_t v) { return lanes(vreinterpretq_s32_u16(v)); }

// -- lanes --

OCTAVO_INLINE vf fma(vf a, vf b, vf c) {
    return each(
        [](RegisterF x, RegisterF y, RegisterF z) { return lanes(vfmaq_f32(raw(z), raw(x), raw(y))); }, a, b,
        c);
}
OCTAVO_INLINE vf max(vf a, vf b) { return select(a > b, a, b); }
OCTAVO_INLINE vf min(vf a, vf b) { return select(a < b, a, b); }
OCTAVO_INLINE vf to_float(vi v) {
    return each([](RegisterI x) { return lanes(vcvtq_f32_s32(raw(x))); }, v);
}
OCTAVO_INLINE vi round_to_int(vf v) {
    return each([](RegisterF x) { return lanes(vcvtnq_s32_f32(raw(x))); }, v);
}

OCTAVO_INLINE float sum_lanes(vf v) {
    const Two<RegisterF> half = v.low + v.high;
    const float32x4_t quarter = raw(half.low + half.high);
    const float32x2_t pair = vadd_f32(vget_low_f32(quarter), vget_high_f32(quarter));
    return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
}
OCTAVO_INLINE float max_lanes(vf v) {
    const auto larger = [](RegisterF x, RegisterF y) { return x > y ? x : y; };
    const Two<RegisterF> half = each(larger, v.low, v.high);
    const RegisterF quarter = larger(half.low, half.high);
    const RegisterF pair = larger(quarter, lanes(vextq_f32(raw(quarter), raw(quarter), 2)));
    return pair[0] > pair[1] ? pair[0] : pair[1];
}
OCTAVO_INLINE int32_t sum_lanes_i(vi v) {
    const Two<RegisterI> half = v.low + v.high;
    return vaddvq_s32(raw(half.low + half.high));
}
OCTAVO_INLINE int32_t max_lanes_i(vi v) {
    const int32x4_t first = vmaxq_s32(raw(v.low.low), raw(v.low.high)),
                    second = vmaxq_s32(raw(v.high.low), raw(v.high.high));
    return vmaxvq_s32(vmaxq_s32(first, second));
}
OCTAVO_INLINE bool any_lane(vi mask) {
    const Two<RegisterI> half = mask.low | mask.high;
    return vmaxvq_u32(vreinterpretq_u32_s32(raw(half.low | half.high))) != 0;
}
OCTAVO_INLINE uint32_t nonzero_lanes(vi v) {
    const auto shorter = [](Two<RegisterI> half) {
        return vuzp1q_u16(vreinterpretq_u16_s32(raw(half.low)), vreinterpretq_u16_s32(raw(half.high)));
    };
    const vi set = each([](RegisterI x) { return x != 0; }, v);
    const uint8x16_t all =
        vuzp1q_u8(vreinterpretq_u8_u16(shorter(set.low)), vreinterpretq_u8_u16(shorter(set.high)));
    constexpr uint8_t kBits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t bits = vandq_u8(all, vld1q_u8(kBits));
    return vaddv_u8(vget_low_u8(bits)) | static_cast<uint32_t>(vaddv_u8(vget_high_u8(bits))) << 8;
}

OCTAVO_INLINE vi keep_in_register(vi numbers) { return numbers; }

// -- conversions --

OCTAVO_INLINE vf load_bf16(const uint16_t* p) {
    const auto half = [](const uint16_t* at) {
        const uint16x8_t v = vld1q_u16(at);
        const auto widen = [](uint16x4_t x) { return lanes(vreinterpretq_f32_u32(vshll_n_u16(x, 16))); };
        return two(widen(vget_low_u16(v)), lanes(vreinterpretq_f32_u16(vzip2q_u16(vdupq_n_u16(0), v))));
    };
    return {half(p), half(p + 8)};
}
// Rounds eight numbers to bf16, to nearest even; NaN stays NaN.
OCTAVO_INLINE uint16x8_t round_to_bf16(Two<RegisterF> v) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(raw(v.low)), raw(v.high)));
#else
    const auto rounded = [](RegisterF x) {
        const uint32x4_t bits = vreinterpretq_u32_f32(raw(x));
        const uint32x4_t up =
            vaddq_u32(vdupq_n_u32(0x7fff), vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1)));
        const uint32x4_t is_number = vceqq_f32(raw(x), raw(x));
        return vreinterpretq_u16_u32(
            vbslq_u32(is_number, vaddq_u32(bits, up), vorrq_u32(bits, vdupq_n_u32(0x400000))));
    };
    return vuzp2q_u16(rounded(v.low), rounded(v.high));
#endif
}
OCTAVO_INLINE void store_bf16(uint16_t* p, vf v) {
    vst1q_u16(p, round_to_bf16(v.low));
    vst1q_u16(p + 8, round_to_bf16(v.high));
}
OCTAVO_INLINE vi to_bf16(vf first, vf second) {
    return {{lanes(round_to_bf16(first.low)), lanes(round_to_bf16(first.high))},
            {lanes(round_to_bf16(second.low)), lanes(round_to_bf16(second.high))}};
}
OCTAVO_INLINE vf load_fp16(const uint16_t* p) {
    const auto half = [](const uint16_t* at) {
        const float16x8_t v = vreinterpretq_f16_u16(vld1q_u16(at));
        return two(lanes(vcvt_f32_f16(vget_low_f16(v))), lanes(vcvt_high_f32_f16(v)));
    };
    return {half(p), half(p + 8)};
}
// Widens eight int16.
OCTAVO_INLINE Two<RegisterI> widen(int16x8_t v) {
    return {lanes(vmovl_s16(vget_low_s16(v))), lanes(vmovl_high_s16(v))};
}
OCTAVO_INLINE vi load_int16(const void* p) {
    const int16_t* at = static_cast<const int16_t*>(p);
    return {widen(vld1q_s16(at)), widen(vld1q_s16(at + 8))};
}
// Sixteen int8 as they are loaded. Converted to floats, they need fewer instructions than lanes do.
struct Int8s {
    int8x16_t v;
    OCTAVO_INLINE operator vi() const { return {widen(vmovl_s8(vget_low_s8(v))), widen(vmovl_high_s8(v))}; }
};
OCTAVO_INLINE Int8s load_int8(const int8_t* p) { return {vld1q_s8(p)}; }
OCTAVO_INLINE vi operator&(Int8s a, vi b) { return static_cast<vi>(a) & b; }
// Moves each byte to the top of a lane, which is then converted as a number with 24 fraction bits: exact.
OCTAVO_INLINE vf to_float(Int8s numbers) {
    const auto quarter = [&](uint8_t first) {
        const uint32x4_t at = {0xffffff, 0x1ffffff, 0x2ffffff, 0x3ffffff};  // 0xff: a zero byte
        const uint8x16_t index = vreinterpretq_u8_u32(vaddq_u32(at, vdupq_n_u32(first << 24)));
        return lanes(vcvtq_n_f32_s32(vreinterpretq_s32_s8(vqtbl1q_s8(numbers.v, index)), 24));
    };
    return {{quarter(0), quarter(4)}, {quarter(8), quarter(12)}};
}
OCTAVO_INLINE vi int8_to_int16(const int8_t* p) {
    const auto half = [](const int8_t* at) {
        const int8x16_t v = vld1q_s8(at);
        return two(lanes(vmovl_s8(vget_low_s8(v))), lanes(vmovl_high_s8(v)));
    };
    return {half(p), half(p + 16)};
}
// Returns the low 16 bits of eight lanes.
OCTAVO_INLINE int16x8_t low_halves(Two<RegisterI> v) { return vuzp1q_s16(halves(v.low), halves(v.high)); }
OCTAVO_INLINE void store_int16(uint16_t* p, vi v) {
    vst1q_u16(p, vreinterpretq_u16_s16(low_halves(v.low)));
    vst1q_u16(p + 8, vreinterpretq_u16_s16(low_halves(v.high)));
}
OCTAVO_INLINE int8x16_t low_bytes(vi v) {
    return vuzp1q_s8(vreinterpretq_s8_s16(low_halves(v.low)), vreinterpretq_s8_s16(low_halves(v.high)));
}
OCTAVO_INLINE void store_int8(int8_t* p, vi v) { vst1q_s8(p, low_bytes(v)); }
OCTAVO_INLINE vi pack_int8(const vi (&v)[4]) {
    return {{lanes(low_bytes(v[0])), lanes(low_bytes(v[1]))},
            {lanes(low_bytes(v[2])), lanes(low_bytes(v[3]))}};
}
OCTAVO_INLINE vi e4m3_to_bf16(vi codes) {
    const auto quarter = [](RegisterI codes_of) {
        const uint16x8_t x = vreinterpretq_u16_s32(raw(codes_of));
        // Low bytes of the eight smallest numbers, then their high bytes.
        constexpr uint8_t kSmall[16] = {0, 0,    0x80, 0xc0, 0,    0x20, 0x40, 0x60,
                                        0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c};
        const uint16x8_t index = vandq_u16(x, vdupq_n_u16(7));
        const uint16x8_t at = vorrq_u16(vsliq_n_u16(index, index, 8), vdupq_n_u16(0x0800));
        const uint16x8_t small = vreinterpretq_u16_u8(vqtbl1q_u8(vld1q_u8(kSmall), vreinterpretq_u8_u16(at)));
        const uint16x8_t magnitude = vandq_u16(vshlq_n_u16(x, 4), vdupq_n_u16(0x07f0));
        const uint16x8_t is_large = vtstq_u16(x, vdupq_n_u16(0x78));
        const uint16x8_t whole = vbslq_u16(is_large, vaddq_u16(magnitude, vdupq_n_u16(120 << 7)), small);
        return lanes(vorrq_u16(whole, vandq_u16(vshlq_n_u16(x, 8), vdupq_n_u16(0x8000))));
    };
    return each(quarter, codes);
}

// Sign-extends the low byte of each 16 bits.
OCTAVO_INLINE vi widen_low_bytes(vi v) {
    return each([](RegisterI x) { return lanes(vshrq_n_s16(vshlq_n_s16(halves(x), 8), 8)); }, v);
}

// -- products --

#if defined(__ARM_FEATURE_DOTPROD)
// dot4 with signed bytes.
OCTAVO_INLINE vi dot4_int8(vi acc, vi a, vi b) {
    return each([](RegisterI sum, RegisterI x,
                   RegisterI y) { return lanes(vdotq_s32(raw(sum), bytes(x), bytes(y))); },
                acc, a, b);
}
// Four neighbouring bytes of sixteen, which are multiplied with every lane.
struct Quad {
    int8x16_t bytes_of;
    int index;
};
// Calls fn with the quad's index, which the instructions need as a constant.
template <typename Fn>
OCTAVO_INLINE auto with_index(int index, const Fn& fn) {
    using std::integral_constant;
    switch (index) {
        case 0: return fn(integral_constant<int, 0>{});
        case 1: return fn(integral_constant<int, 1>{});
        case 2: return fn(integral_constant<int, 2>{});
        default: return fn(integral_constant<int, 3>{});
    }
}
OCTAVO_INLINE vi dot4_int8(vi acc, vi a, Quad b) {
    return with_index(b.index, [&](auto index) {
        return each(
            [&](RegisterI sum, RegisterI x) {
                return lanes(vdotq_laneq_s32(raw(sum), bytes(x), b.bytes_of, decltype(index)::value));
            },
            acc, a);
    });
}
// The quads of consecutive bytes.
template <int kCount>
class Quads {
  public:
    OCTAVO_INLINE explicit Quads(const int8_t* p) {
        for (int i = 0; i < kCount / 4; i++) bytes_[i] = vld1q_s8(p + 16 * i);
    }
    OCTAVO_INLINE Quad operator[](int i) const { return {bytes_[i / 4], i % 4}; }

  private:
    int8x16_t bytes_[kCount / 4];
};
#endif
// Whether unsigned bytes are multiplied with signed ones, and matrices of 2 rows with 2 outputs.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kHasMatrixProducts = true;
#else
constexpr bool kHasMatrixProducts = false;
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
OCTAVO_INLINE vi dot4(vi acc, vi u, vi s) {
    return each(
        [](RegisterI sum, RegisterI x, RegisterI y) {
            return lanes(vusdotq_s32(raw(sum), vreinterpretq_u8_s8(bytes(x)), bytes(y)));
        },
        acc, u, s);
}
OCTAVO_INLINE vi dot4_mixed(vi acc, vi u, Quad s) {
    return with_index(s.index, [&](auto index) {
        return each(
            [&](RegisterI sum, RegisterI x) {
                return lanes(vusdotq_laneq_s32(raw(sum), vreinterpretq_u8_s8(bytes(x)), s.bytes_of,
                                               decltype(index)::value));
            },
            acc, u);
    });
}
#elif defined(__ARM_FEATURE_DOTPROD)
// Codes minus 128 are signed; 128 times the sum of s corrects for it.
OCTAVO_INLINE vi dot4(vi acc, vi u, vi s) {
    const vi half = splat_i(each_byte(64));
    return dot4_int8(dot4_int8(dot4_int8(acc, u ^ each_byte(0x80), s), half, s), half, s);
}
#else
OCTAVO_INLINE vi dot4(vi acc, vi u, vi s) {
    const auto quarter = [](RegisterI sum, RegisterI x, RegisterI y) {
        const uint8x16_t codes = vreinterpretq_u8_s8(bytes(x));
        const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(codes))),
                        high = vreinterpretq_s16_u16(vmovl_high_u8(codes)),
                        first = vmovl_s8(vget_low_s8(bytes(y))), second = vmovl_high_s8(bytes(y));
        const auto products = [](int16x8_t a, int16x8_t b) {
            return vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
        };
        return sum + lanes(vpaddq_s32(products(low, first), products(high, second)));
    };
    return each(quarter, acc, u, s);
}
OCTAVO_INLINE vi dot4_pairs(vi u, vi s) {
    const auto quarter = [](RegisterI x, RegisterI y) {
        return lanes(vpaddq_s16(vmull_s8(vget_low_s8(bytes(x)), vget_low_s8(bytes(y))),
                                vmull_high_s8(bytes(x), bytes(y))));
    };
    return each(quarter, u, s);
}
OCTAVO_INLINE vi add_pairs(vi a, vi b) {
    return each([](RegisterI x, RegisterI y) { return lanes(vaddq_s16(halves(x), halves(y))); }, a, b);
}
OCTAVO_INLINE vi widen_pairs(vi pairs) {
    return each([](RegisterI sums) { return lanes(vpaddlq_s16(halves(sums))); }, pairs);
}
OCTAVO_INLINE vi dot4_turned(vi acc, vi codes, vi s) {
    return each([](RegisterI sum, RegisterI pairs) { return lanes(vpadalq_s16(raw(sum), halves(pairs))); },
                acc, dot4_pairs(codes, s));
}
#endif
OCTAVO_INLINE vi shift_nibbles(vi both) {
    return each([](RegisterI x) { return lanes(vshrq_n_u8(vreinterpretq_u8_s8(bytes(x)), 4)); }, both);
}
OCTAVO_INLINE vi dot2_int16(vi acc, vi a, vi b) {
    const auto quarter = [](RegisterI sum, RegisterI x, RegisterI y) {
        const int32x4_t low = vmull_s16(vget_low_s16(halves(x)), vget_low_s16(halves(y)));
        return sum + lanes(vpaddq_s32(low, vmull_high_s16(halves(x), halves(y))));
    };
    return each(quarter, acc, a, b);
}
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
OCTAVO_INLINE vf dot2_bf16(vf acc, vi w, vi a) {
    const auto quarter = [](RegisterF sum, RegisterI x, RegisterI y) {
#if defined(__GNUC__) && !defined(__clang__)
        // GCC 12 writes a constant of bf16 with the bits of fp16: the empty statement hides that y is one.
        asm("" : "+w"(y));
#endif
        return lanes(vbfdotq_f32(raw(sum), vreinterpretq_bf16_s32(raw(x)), vreinterpretq_bf16_s32(raw(y))));
    };
    return each(quarter, acc, w, a);
}
#endif

// -- words of 64 bits --

OCTAVO_INLINE uint64x2_t wide(RegisterW v) { return reinterpret_cast<uint64x2_t>(v); }
OCTAVO_INLINE RegisterW words(uint64x2_t v) { return reinterpret_cast<RegisterW>(v); }
OCTAVO_INLINE RegisterW multiply_words(RegisterW a, RegisterW b) {
    return words(vmull_u32(vmovn_u64(wide(a)), vmovn_u64(wide(b))));
}
OCTAVO_INLINE RegisterW interleave_words(RegisterW low, RegisterW high) {
    return words(vsliq_n_u64(wide(low), wide(high), 32));
}
OCTAVO_INLINE WordPair interleave_pairs(RegisterW a, RegisterW b) {
    return {words(vzip1q_u64(wide(a), wide(b))), words(vzip2q_u64(wide(a), wide(b)))};
}

// -- tables --

// Looks up each byte's low nibble in sixteen bytes; the high nibbles must be zero.
class Table16 {
  public:
    OCTAVO_INLINE explicit Table16(const uint8_t (&bytes_of)[16]) : all_(vld1q_u8(bytes_of)) {}
    OCTAVO_INLINE vi operator()(vi nibbles) const {
        return each([this](RegisterI at) { return lanes(vqtbl1q_u8(all_, vreinterpretq_u8_s8(bytes(at)))); },
                    nibbles);
    }

  private:
    uint8x16_t all_;
};
// Looks up the lowest four bits of each lane in sixteen floats.
class Floats16 {
  public:
    OCTAVO_INLINE explicit Floats16(const float (&numbers)[16]) {
        const auto* from = reinterpret_cast<const uint8_t*>(numbers);
        for (int i = 0; i < 4; i++) all_.val[i] = vld1q_u8(from + 16 * i);
    }
    OCTAVO_INLINE vf operator()(vi indices) const {
        // Indices of the four bytes of each float.
        const vi at = (indices & 15) * each_byte(4) + 0x03020100;
        return as_float(each(
            [this](RegisterI of) { return lanes(vqtbl4q_u8(all_, vreinterpretq_u8_s8(bytes(of)))); }, at));
    }

  private:
    uint8x16x4_t all_;
};

}  // namespace
}  // namespace octavo
