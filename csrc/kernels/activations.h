// Activations as matmuls read and write them: quantized rows, norms and the epilogue.
#pragma once

#include <cstddef>
#include <cstdint>

#include "weights.h"

namespace octavo {

enum class RowType : int32_t { int8, whole, outliers, bf16, fp32 };
constexpr int kNumRowTypes = 5;
constexpr const char* kRowTypeNames[kNumRowTypes] = {"int8", "whole", "outliers", "bf16", "fp32"};

// A quantized activation is the sum of one or two int8 terms, each times its unit.
constexpr int kWholeUnit = 128;  // unit of the first term with `whole`; the second's is 1
constexpr int kOutlierUnit = 255;  // unit of the second term with `outliers`; the first's is 1

// Activations as the matmul kernels read them, one row per token. Strides count elements.
//
// RowType int8 has one scale d per group of 32 inputs (`scales`), the sum of each half group's integers
// (`sums`), and d times the whole group's sum (`scaled_sums`). These three arrays are stored in blocks of 16
// rows, so that the numbers of neighbouring rows are adjacent: [rows / 16][group stride][16] (sums:
// [rows / 16][group stride][2][16]).
//   int8       d = absmax / 127, q = x / d: values [rows][groups][32]
// RowType whole and outliers have one d per row, for weights with one scale per output. d and the sums of
// the terms are stored at the position of group 0.
//   whole      on AMX. d = absmax / 16319, q = 128 first + second, first in -127 .. 127, second in
//              -64 .. 63: values [rows][2 terms][32 groups]
//   outliers   otherwise. q = first + 255 second, both in -127 .. 127, with d such that most second terms
//              are 0: values [rows] of first [32 groups], followed by the arrays of an OutlierList
// RowType bf16 and fp32: values [rows][stride].
struct QuantizedRows {
    RowType type;
    void* values;
    int64_t stride;
    float* scales;
    int32_t* sums;
    float* scaled_sums;
    int32_t num_groups;  // groups per row
    int32_t group_stride;  // groups from one block of 16 rows to the next
    bool skips_zeros = false;  // whether to skip weights whose input is zero

    size_t at(int64_t row, int g) const {
        return (static_cast<size_t>(row / kTile) * group_stride + g) * kTile + row % kTile;
    }
    size_t half_at(int64_t row, int g, int half) const {
        return ((static_cast<size_t>(row / kTile) * group_stride + g) * 2 + half) * kTile + row % kTile;
    }
};

// The second terms of a row, stored after the first terms: the quads (four neighbouring inputs) with at
// least one nonzero second term, and their terms. At least kUnrolled zeros follow the last quad.
struct OutlierList {
    static constexpr int kUnrolled = 16;
    int32_t* count;
    int32_t* quads;
    int8_t* terms;  // [..][4]

    static int64_t capacity(int64_t inputs) { return inputs / 4 + kUnrolled; }
    static int64_t num_bytes(int64_t inputs) { return 64 + 8 * capacity(inputs); }
    OutlierList(int8_t* row, int64_t inputs)
        : count(reinterpret_cast<int32_t*>(row + inputs)),
          quads(count + 16),
          terms(reinterpret_cast<int8_t*>(quads + capacity(inputs))) {}
};

inline size_t element_bytes(RowType type) {
    return type == RowType::fp32 ? 4 : type == RowType::bf16 ? 2 : 1;
}

// Returns the number of elements from one row to the next. A line lies between rows whose distance would be a
// multiple of 512 bytes: the same inputs of 16 rows would compete for few sets of the first-level cache.
inline int64_t row_elements(RowType type, int num_groups) {
    const int64_t inputs = static_cast<int64_t>(num_groups) * kGroup;
    const int64_t elements = type == RowType::whole      ? 2 * inputs
                             : type == RowType::outliers ? inputs + OutlierList::num_bytes(inputs)
                                                         : inputs;
    const int64_t bytes = static_cast<int64_t>(element_bytes(type));
    return elements + (elements * bytes % 512 == 0 ? 64 / bytes : 0);
}

struct Norm {
    const float* weight;  // null: no norm
    const float* bias;
    float eps;
    float weight_offset;
    bool is_layer_norm;
    float threshold = 0;  // after the norm, values of smaller magnitude become 0
};

// out = positive * x^2 + beta * x if x > 0, else negative * (e^min(x, eps) - 1 - x) + beta * x; eps < 0.
struct XieluArgs {
    float positive = 0, negative = 0, beta = 0, eps = 0;
};

// Operations on a tile of sums before it is stored, in this order: bias, activation or gate, residual. With
// `gated`: out = f(gate) * (up + up_offset), where f is the activation, or g * sigmoid(alpha * g) if alpha
// is not 1.
struct Epilogue {
    const float* bias = nullptr;  // [N] or null
    const float* up_bias = nullptr;  // [N] or null, bias of the up projection
    int32_t activation = -1;  // -1: none; else see KernelTable::activate
    bool gated = false;
    float clamp = 0;  // 0: none
    float alpha = 1, up_offset = 0;
    // The output of a sparse row is 0 if |f(gate)| is smaller; 0: no threshold.
    float threshold = 0;
    const uint8_t* is_sparse = nullptr;  // by row, indexed as `residual`; null: no row is sparse
    const float* residual = nullptr;  // row t starts at residual + t * residual_stride; or null
    int64_t residual_stride = 0;
};

}  // namespace octavo
