// Preparation of matmul inputs: RMS norm, layer norm, and conversion to integers (with one scale per group
// or per row; in one or two int8 terms, or with a second term for outliers), bf16 or fp32. Rows are
// independent.
#pragma once
#include "../simd/dots.h"
#include "table.h"

namespace octavo {
namespace {

// Computes y = (x - mean) / sqrt(var + eps) * w + b, or x / sqrt(mean(x^2) + eps) * (w + offset), 16 lanes
// at a time.
struct Normalizer {
    const Norm& norm;
    float mean = 0, inverse = 1;

    Normalizer(const float* x, int k, const Norm& n) : norm(n) {
        if (!n.weight) return;
        if (n.is_layer_norm) mean = sum(x, k) / static_cast<float>(k);
        inverse = 1.0f / std::sqrt(sum_of_squares(x, k) / static_cast<float>(k) + n.eps);
    }
    static float sum(const float* x, int k) {
        vf total = {};
        int i = 0;
        for (; i + kLanes <= k; i += kLanes) total += load(x + i);
        if (i < k) total += load_first(x + i, k - i);
        return sum_lanes(total);
    }
    float sum_of_squares(const float* x, int k) const {
        vf total = {};
        int i = 0;
        for (; i + kLanes <= k; i += kLanes) {
            const vf v = load(x + i) - mean;
            total = fma(v, v, total);
        }
        if (i < k) {
            vf v = load_first(x + i, k - i) - mean;
            v = select((iota() < k - i), v, vf{});
            total = fma(v, v, total);
        }
        return sum_lanes(total);
    }
    // Returns elements i .. i + n - 1 of the result, n <= 16; zeros after them.
    OCTAVO_INLINE vf at(const float* x, int i, int n) const {
        const vf v = n == kLanes ? load(x + i) : load_first(x + i, n);
        if (!norm.weight) return without_small(v, v, norm.threshold);
        const vf w =
            (n == kLanes ? load(norm.weight + i) : load_first(norm.weight + i, n)) + norm.weight_offset;
        vf y = (v - mean) * inverse * w;
        if (norm.bias) y += n == kLanes ? load(norm.bias + i) : load_first(norm.bias + i, n);
        if (n < kLanes) y = select((iota() < n), y, vf{});
        return without_small(y, y, norm.threshold);
    }
};

void norm_row(const float* x, int k, const Norm& norm, float* out) {
    const Normalizer normal(x, k, norm);
    for (int i = 0; i < k; i += kLanes) {
        const int n = k - i < kLanes ? k - i : kLanes;
        store_first(out + i, normal.at(x, i, n), n);
    }
}

OCTAVO_INLINE vf absolute(vf v) { return as_float(as_int(v) & 0x7fffffff); }

// Largest value of one int8 term as a multiple of the row's mean magnitude; larger values are outliers.
constexpr float kOutlierMeans = 6;

// Quantizes a group of 32 with d = absmax / 127; a group of zeros has d = 0. A NaN or an infinity makes d
// NaN, so that it propagates.
OCTAVO_INLINE void store_int8_group(const vf (&half)[2], const QuantizedRows& rows, int64_t index, int g) {
    constexpr float kLargest = 127.0f;
    int8_t* q = static_cast<int8_t*>(rows.values) + index * rows.stride + g * kGroup;
    // Magnitudes have the same order as their bit patterns as integers; infinities and NaNs are above all
    // numbers.
    const int32_t bits = max_lanes_i(max_i(as_int(absolute(half[0])), as_int(absolute(half[1]))));
    const bool finite = bits < 0x7f800000;
    float largest;
    std::memcpy(&largest, &bits, 4);
    const float d = finite ? largest / kLargest : NAN;
    const float inverse = finite && largest > 0 ? kLargest / largest : 0.0f;
    int32_t sum = 0;
    for (int h = 0; h < 2; h++) {
        const vi whole = finite ? round_to_int(half[h] * inverse) : vi{};
        store_int8(q + h * kLanes, whole);
        const int32_t half_sum = sum_bytes(q + h * kLanes);
        rows.sums[rows.half_at(index, g, h)] = half_sum;
        sum += half_sum;
    }
    rows.scales[rows.at(index, g)] = d;
    rows.scaled_sums[rows.at(index, g)] = d * static_cast<float>(sum);
}

// Converts the 32 values of group g of row `index`.
OCTAVO_INLINE void store_group(const vf (&half)[2], const QuantizedRows& rows, int64_t index, int g) {
    const int64_t at = index * rows.stride + g * kGroup;
    switch (rows.type) {
        case RowType::int8: return store_int8_group(half, rows, index, g);
        case RowType::whole:
        case RowType::outliers:
            return;  // quantized by rows: see quantize_whole_row and quantize_with_outliers
        case RowType::bf16:
            store_bf16(static_cast<uint16_t*>(rows.values) + at, half[0]);
            return store_bf16(static_cast<uint16_t*>(rows.values) + at + kLanes, half[1]);
        case RowType::fp32:
            store(static_cast<float*>(rows.values) + at, half[0]);
            return store(static_cast<float*>(rows.values) + at + kLanes, half[1]);
    }
}

// Quantizes a row with one d = absmax / 16319 to two int8 terms. A NaN or an infinity makes d NaN.
template <typename Lanes>
OCTAVO_INLINE void quantize_whole_row(const Lanes& lanes_at, int k, const QuantizedRows& rows,
                                      int64_t index) {
    constexpr float kLargest = 127.0f * kWholeUnit + (kWholeUnit / 2 - 1);
    const int padded = rows.num_groups * kGroup;
    int8_t* q = static_cast<int8_t*>(rows.values) + index * rows.stride;
    vf magnitudes{}, not_finite{};
    for (int i = 0; i < k; i += kLanes) {
        const vf v = lanes_at(i);
        magnitudes = max(magnitudes, absolute(v));
        not_finite += v * 0.0f;
    }
    const float largest = max_lanes(magnitudes),
                check = sum_lanes(not_finite);  // 0, or NaN if a value is not finite
    const float inverse = largest > 0 && check == 0 ? kLargest / largest : 0.0f;
    vi sums[2] = {};
    for (int i = 0; i < padded; i += kLanes) {
        const vi whole = i < k && check == 0 ? round_to_int(lanes_at(i) * inverse) : vi{};
        const vi first = (whole + kWholeUnit / 2) >> 7, second = whole - first * kWholeUnit;
        store_int8(q + i, first);
        store_int8(q + padded + i, second);
        sums[0] += first;
        sums[1] += second;
    }
    for (int term = 0; term < 2; term++) rows.sums[rows.half_at(index, 0, term)] = sum_lanes_i(sums[term]);
    rows.scales[rows.at(index, 0)] = largest / kLargest + check;
}

// Appends those of sixteen quads, from quad `first` on, that have a second term. Returns the new count.
OCTAVO_INLINE int append_outliers(vi terms, int first, const OutlierList& list, int count) {
    return count + keep_nonzero(terms, iota() + first, list.quads + count,
                                list.terms + 4 * static_cast<int64_t>(count));
}

// Quantizes a row with one d such that its mean magnitude is 127 / kOutlierMeans; values above 127 d have a
// second term. d is smaller if there are no such values, and larger if a value would need a third term. A
// NaN or an infinity makes d NaN.
template <typename Lanes>
OCTAVO_INLINE void quantize_with_outliers(const Lanes& lanes_at, int k, const QuantizedRows& rows,
                                          int64_t index) {
    constexpr float kLargest = 127.0f * (kOutlierUnit + 1);
    static_assert(kOutlierUnit == 255);  // the shift by 8 below relies on it
    const int padded = rows.num_groups * kGroup;
    int8_t* q = static_cast<int8_t*>(rows.values) + index * rows.stride;
    vf magnitudes{}, total{};
    for (int i = 0; i < k; i += kLanes) {
        const vf v = absolute(lanes_at(i));
        magnitudes = max(magnitudes, v);
        total += v;
    }
    const float largest = max_lanes(magnitudes), sum = sum_lanes(total);
    const bool finite = sum < INFINITY;  // false for a NaN too
    const float with_outliers =
        std::max(kOutlierMeans / 127 * sum / static_cast<float>(k), largest / kLargest);
    const float d = finite ? std::min(largest / 127, with_outliers) : NAN;
    const float inverse = d >= std::numeric_limits<float>::min() ? 1 / d : 0.0f;
    const OutlierList list(q, padded);
    int count = 0;
    vi sums[2] = {};
    for (int i = 0; i < padded; i += 4 * kLanes) {
        vi first[4], second[4];
        for (int j = 0; j < 4; j++) {
            const int at = i + j * kLanes;
            const vi whole = at < k && finite ? round_to_int(lanes_at(at) * inverse) : vi{};
            second[j] = round_to_int(to_float(whole) * (1.0f / kOutlierUnit));
            first[j] = whole - (second[j] << 8) + second[j];
        }
        const vi ones = splat_i(0x01010101), firsts = pack_int8(first), seconds = pack_int8(second);
        store_i(q + i, firsts);
        sums[0] = dot4(sums[0], ones, firsts);
        sums[1] = dot4(sums[1], ones, seconds);
        count = append_outliers(seconds, i / 4, list, count);
    }
    store_i(list.quads + count, vi{});
    store_i(list.terms + 4 * static_cast<int64_t>(count), vi{});
    *list.count = count;
    for (int term = 0; term < 2; term++) rows.sums[rows.half_at(index, 0, term)] = sum_lanes_i(sums[term]);
    rows.scales[rows.at(index, 0)] = d;
}

void quantize_row(const float* x, int k, const Norm& norm, const QuantizedRows& rows, int64_t index) {
    if (rows.type == RowType::whole || rows.type == RowType::outliers) {
        constexpr int kBuffered = 4096;  // the row is read twice, and normalized only once up to this width
        float buffer[kBuffered];
        const bool buffers = norm.weight && k <= kBuffered;
        if (buffers) norm_row(x, k, norm, buffer);
        const Norm none{};
        const Normalizer normal(x, k, buffers ? none : norm);
        const float* from = buffers ? buffer : x;
        const auto lanes_at = [&](int i) { return normal.at(from, i, k - i < kLanes ? k - i : kLanes); };
        return rows.type == RowType::whole ? quantize_whole_row(lanes_at, k, rows, index)
                                           : quantize_with_outliers(lanes_at, k, rows, index);
    }
    const Normalizer normal(x, k, norm);
    for (int g = 0; g < rows.num_groups; g++) {
        vf half[2];
        for (int h = 0; h < 2; h++) {
            const int i = g * kGroup + h * kLanes, n = k - i < kLanes ? k - i : kLanes;
            half[h] = n <= 0 ? vf{} : normal.at(x, i, n);
        }
        store_group(half, rows, index, g);
    }
}

// Converts from [num_rows][32], of which `width` columns are valid, to group g of rows row0 and on.
void quantize_group(const float* from, const QuantizedRows& rows, int64_t row0, int num_rows, int g,
                    int width) {
    for (int m = 0; m < num_rows; m++, from += kGroup) {
        vf half[2];
        for (int h = 0; h < 2; h++) {
            const int n = width - h * kLanes;
            half[h] = n >= kLanes ? load(from + h * kLanes) : n > 0 ? load_first(from + h * kLanes, n) : vf{};
        }
        store_group(half, rows, row0 + m, g);
    }
}

}  // namespace
}  // namespace octavo
