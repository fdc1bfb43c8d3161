// Blocks of 4 rows (or 2) and 8 outputs on the dot product levels of NEON: the sums of a block, in the order of
// its instructions, and their conversion from and to rows. Used by linear_neon.inl.
#pragma once
#include "linear.inl"

namespace octavo {
namespace {

constexpr int kHalfTile = kTile / 2;  // outputs of a block

// The vectors of a block's sums: rows by four outputs, or with I8MM pairs of rows by pairs of outputs.
template <int R>
constexpr int kBlockRows = kHasMatrixProducts ? R / 2 : R;
constexpr int kBlockColumns = kHasMatrixProducts ? 4 : 2;

// Loads a number of each of R rows.
template <int R>
OCTAVO_INLINE float32x4_t load_numbers_of_rows(const float* p) {
    return R == 4 ? vld1q_f32(p) : vcombine_f32(vld1_f32(p), vdup_n_f32(0));
}
template <int R>
OCTAVO_INLINE int32x4_t load_numbers_of_rows(const int32_t* p) {
    return R == 4 ? vld1q_s32(p) : vcombine_s32(vld1_s32(p), vdup_n_s32(0));
}

// Sums of a group start at the bits of 1.5 * 2^23, so that they become floats by a subtraction: more units
// subtract than convert. The sum of 32 products of 9 and 8 bits is below 2^22.
OCTAVO_INLINE int32x4_t zero_sum() { return vdupq_n_s32(0x4b400000); }
OCTAVO_INLINE float32x4_t sum_to_float(int32x4_t sum) {
    return vsubq_f32(vreinterpretq_f32_s32(sum), vdupq_n_f32(12582912.0f));
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Returns four numbers by pairs of rows: the first or the second two, each twice.
OCTAVO_INLINE float32x4_t twice(float32x4_t numbers, int pair) {
    return pair ? vzip2q_f32(numbers, numbers) : vzip1q_f32(numbers, numbers);
}
// The two 8-byte halves of two rows as matrices.
struct RowPair {
    int8x16_t first, second;
    OCTAVO_INLINE RowPair(const void* row, const void* next) {
        const int64x2_t a = vreinterpretq_s64_s8(vld1q_s8(static_cast<const int8_t*>(row))),
                        b = vreinterpretq_s64_s8(vld1q_s8(static_cast<const int8_t*>(next)));
        first = vreinterpretq_s8_s64(vzip1q_s64(a, b));
        second = vreinterpretq_s8_s64(vzip2q_s64(a, b));
    }
};
OCTAVO_INLINE int32x4_t multiply_matrices(int32x4_t sum, int8x16_t rows, int8x16_t outputs) {
    return vmmlaq_s32(sum, rows, outputs);
}
OCTAVO_INLINE float32x4_t multiply_matrices(float32x4_t sum, int8x16_t rows, int8x16_t outputs) {
    return vbfmmlaq_f32(sum, vreinterpretq_bf16_s8(rows), vreinterpretq_bf16_s8(outputs));
}
// Adds 16 bytes of each row times four vectors [8 outputs][4 bytes], in pairs of outputs, `step` bytes apart
// for each 8 bytes of the rows.
template <int R, typename Sum>
OCTAVO_INLINE void add_products(Sum (&sum)[R / 2][4], const int8_t* rows, int64_t stride, const int8_t* codes,
                                int step) {
#pragma GCC unroll 2
    for (int pair = 0; pair < R / 2; pair++) {
        const RowPair both(rows + 2 * pair * stride, rows + (2 * pair + 1) * stride);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++)
            sum[pair][c] = multiply_matrices(sum[pair][c], both.first, vld1q_s8(codes + 16 * c));
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++)
            sum[pair][c] = multiply_matrices(sum[pair][c], both.second, vld1q_s8(codes + step + 16 * c));
    }
}
// Writes the sums of R rows and 8 outputs to rows of 16, or reads them; integers are stored as they are.
template <int R, typename Sum>
OCTAVO_INLINE void store_block(const Sum (&sum)[R / 2][4], float* to) {
    for (int pair = 0; pair < R / 2; pair++)
        for (int c = 0; c < 4; c += 2) {
            const auto a = reinterpret_cast<int64x2_t>(sum[pair][c]),
                       b = reinterpret_cast<int64x2_t>(sum[pair][c + 1]);
            vst1q_f32(to + 32 * pair + 2 * c, vreinterpretq_f32_s64(vzip1q_s64(a, b)));
            vst1q_f32(to + 32 * pair + 16 + 2 * c, vreinterpretq_f32_s64(vzip2q_s64(a, b)));
        }
}
template <int R>
OCTAVO_INLINE void load_block(float32x4_t (&sum)[R / 2][4], const float* from) {
    for (int pair = 0; pair < R / 2; pair++)
        for (int c = 0; c < 4; c += 2) {
            const auto a = vreinterpretq_s64_f32(vld1q_f32(from + 32 * pair + 2 * c)),
                       b = vreinterpretq_s64_f32(vld1q_f32(from + 32 * pair + 16 + 2 * c));
            sum[pair][c] = vreinterpretq_f32_s64(vzip1q_s64(a, b));
            sum[pair][c + 1] = vreinterpretq_f32_s64(vzip2q_s64(a, b));
        }
}
// total += sum * (scales * numbers), with a number of each row.
template <int R>
OCTAVO_INLINE void add_scaled(float32x4_t (&total)[R / 2][4], const int32x4_t (&sum)[R / 2][4],
                              const float* scales, float32x4_t numbers) {
#pragma GCC unroll 2
    for (int pair = 0; pair < R / 2; pair++) {
        const float32x4_t by = twice(numbers, pair);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++)
            total[pair][c] = vfmaq_f32(total[pair][c], sum_to_float(sum[pair][c]),
                                       vmulq_f32(vld1q_f32(scales + 4 * c), by));
    }
}
template <int R>
OCTAVO_INLINE void add_mins(float32x4_t (&total)[R / 2][4], const float* mins, float32x4_t numbers) {
#pragma GCC unroll 2
    for (int pair = 0; pair < R / 2; pair++) {
        const float32x4_t by = twice(numbers, pair);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) total[pair][c] = vfmaq_f32(total[pair][c], vld1q_f32(mins + 4 * c), by);
    }
}
// Starts the sums with a number of each row.
template <int R>
OCTAVO_INLINE void start_block(int32x4_t (&sum)[R / 2][4], int32x4_t numbers) {
    for (int pair = 0; pair < R / 2; pair++)
        for (int c = 0; c < 4; c++)
            sum[pair][c] = pair ? vzip2q_s32(numbers, numbers) : vzip1q_s32(numbers, numbers);
}
// Writes two vectors [16 o][4 bytes], whose bytes follow each other, as [8 pairs][2 o][8 bytes].
OCTAVO_INLINE void store_pair(int8_t* to, vi even, vi odd) {
    const auto put = [&](int at, RegisterI a, RegisterI b) {
        vst1q_s8(to + at, vreinterpretq_s8_s32(vzip1q_s32(raw(a), raw(b))));
        vst1q_s8(to + at + 16, vreinterpretq_s8_s32(vzip2q_s32(raw(a), raw(b))));
    };
    put(0, even.low.low, odd.low.low);
    put(32, even.low.high, odd.low.high);
    put(64, even.high.low, odd.high.low);
    put(96, even.high.high, odd.high.high);
}
constexpr int kPairStep = 128, kHalfStep = 64;  // bytes of a vector pair, and of half its outputs
constexpr int kLevelFloats = 32;  // floats of 16 outputs' levels: [8 pairs][2 rows][2 o]
OCTAVO_INLINE void store_levels(float* to, vf levels) {
    const auto put = [&](int at, RegisterF v) {
        const float64x2_t pairs = vreinterpretq_f64_f32(raw(v));
        vst1q_f32(to + at, vreinterpretq_f32_f64(vzip1q_f64(pairs, pairs)));
        vst1q_f32(to + at + 4, vreinterpretq_f32_f64(vzip2q_f64(pairs, pairs)));
    };
    put(0, levels.low.low);
    put(8, levels.low.high);
    put(16, levels.high.low);
    put(24, levels.high.high);
}
#else
// Adds 16 bytes of each row times four vectors [16 o][4 bytes], of which 8 outputs are used.
template <int R>
OCTAVO_INLINE void add_products(int32x4_t (&sum)[R][2], const int8_t* rows, int64_t stride,
                                const int8_t* codes, int step) {
    int8x16_t quads[R];
    for (int m = 0; m < R; m++) quads[m] = vld1q_s8(rows + m * stride);
    const auto add = [&](auto index) {
        constexpr int i = decltype(index)::value;
        const int8_t* at = codes + i / 2 * step + i % 2 * 64;
#pragma GCC unroll 2
        for (int c = 0; c < 2; c++) {
            const int8x16_t codes_of = vld1q_s8(at + 16 * c);
#pragma GCC unroll 4
            for (int m = 0; m < R; m++) sum[m][c] = vdotq_laneq_s32(sum[m][c], codes_of, quads[m], i);
        }
    };
    add(std::integral_constant<int, 0>{});
    add(std::integral_constant<int, 1>{});
    add(std::integral_constant<int, 2>{});
    add(std::integral_constant<int, 3>{});
}
template <int R>
OCTAVO_INLINE void store_block(const float32x4_t (&sum)[R][2], float* to) {
    for (int m = 0; m < R; m++)
        for (int c = 0; c < 2; c++) vst1q_f32(to + 16 * m + 4 * c, sum[m][c]);
}
template <int R>
OCTAVO_INLINE void load_block(float32x4_t (&sum)[R][2], const float* from) {
    for (int m = 0; m < R; m++)
        for (int c = 0; c < 2; c++) sum[m][c] = vld1q_f32(from + 16 * m + 4 * c);
}
template <int R>
OCTAVO_INLINE void add_scaled(float32x4_t (&total)[R][2], const int32x4_t (&sum)[R][2], const float* scales,
                              float32x4_t numbers) {
#pragma GCC unroll 2
    for (int c = 0; c < 2; c++) {
        const float32x4_t scale = vld1q_f32(scales + 4 * c);
        const auto add = [&](auto index) {
            constexpr int m = decltype(index)::value;
            if constexpr (m < R)
                total[m][c] =
                    vfmaq_f32(total[m][c], sum_to_float(sum[m][c]), vmulq_laneq_f32(scale, numbers, m));
        };
        add(std::integral_constant<int, 0>{});
        add(std::integral_constant<int, 1>{});
        add(std::integral_constant<int, 2>{});
        add(std::integral_constant<int, 3>{});
    }
}
template <int R>
OCTAVO_INLINE void add_mins(float32x4_t (&total)[R][2], const float* mins, float32x4_t numbers) {
#pragma GCC unroll 2
    for (int c = 0; c < 2; c++) {
        const float32x4_t min = vld1q_f32(mins + 4 * c);
        const auto add = [&](auto index) {
            constexpr int m = decltype(index)::value;
            if constexpr (m < R) total[m][c] = vfmaq_laneq_f32(total[m][c], min, numbers, m);
        };
        add(std::integral_constant<int, 0>{});
        add(std::integral_constant<int, 1>{});
        add(std::integral_constant<int, 2>{});
        add(std::integral_constant<int, 3>{});
    }
}
template <int R>
OCTAVO_INLINE void start_block(int32x4_t (&sum)[R][2], int32x4_t numbers) {
    for (int c = 0; c < 2; c++) {
        sum[0][c] = vdupq_laneq_s32(numbers, 0), sum[1][c] = vdupq_laneq_s32(numbers, 1);
        if constexpr (R == 4)
            sum[2][c] = vdupq_laneq_s32(numbers, 2), sum[3][c] = vdupq_laneq_s32(numbers, 3);
    }
}
OCTAVO_INLINE void store_pair(int8_t* to, vi even, vi odd) {
    store_i(to, even);
    store_i(to + 64, odd);
}
constexpr int kPairStep = 128, kHalfStep = 32, kLevelFloats = 16;
OCTAVO_INLINE void store_levels(float* to, vf levels) { store(to, levels); }
#endif

}  // namespace
}  // namespace octavo
