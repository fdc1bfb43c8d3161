// Matrices in the formats of weights, with the values that they stand for, and allocation of Values, for
// tests that build a plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../plan/specs.h"
#include "check.h"

namespace octavo::test {

using Row = std::vector<double>;

enum class Format { fp32, bf16, int8, int4 };
inline const char* const kFormatNames[] = {"fp32", "bf16", "int8", "int4"};

// A matrix [rows][columns] in a format; `values` are random numbers as the format rounds them.
struct TestMatrix {
    int rows, columns;
    Floats values;
    PackedTiles packed;

    TestMatrix(int n, int k, uint32_t seed, Format format, ThreadPool& pool)
        : rows(n),
          columns(k),
          values(normal(static_cast<size_t>(n) * k, seed, 1 / std::sqrt(static_cast<float>(k)))) {
        WeightMemory memory;
        if (format == Format::fp32 || format == Format::bf16) {
            packed = pack(
                pool, memory,
                Matrix{Matrix::Kind::fp32, reinterpret_cast<const uint8_t*>(values.data()), n, k, k * 4, 4},
                format == Format::fp32 ? Code::fp32 : Code::bf16);
            return;
        }
        const int levels = format == Format::int8 ? 127 : 7, groups = (k + kGroup - 1) / kGroup;
        Floats scales(static_cast<size_t>(n) * groups);
        std::vector<int8_t> codes(static_cast<size_t>(n) * k);
        for (int r = 0; r < n; r++)
            for (int i = 0; i < k; i++) {
                float& scale = scales[static_cast<size_t>(r) * groups + i / kGroup];
                if (i % kGroup == 0)
                    for (int j = i; j < std::min(k, i + kGroup); j++)
                        scale = std::max(scale, std::fabs(values[static_cast<size_t>(r) * k + j]) /
                                                    static_cast<float>(levels));
                const int code =
                    static_cast<int>(std::lround(values[static_cast<size_t>(r) * k + i] / scale));
                codes[static_cast<size_t>(r) * k + i] = static_cast<int8_t>(code);
                values[static_cast<size_t>(r) * k + i] = static_cast<float>(code) * scale;
            }
        QuantizedSource source{};
        source.num_inputs = k;
        source.group = kGroup;
        source.scales = Matrix{
            Matrix::Kind::fp32, reinterpret_cast<const uint8_t*>(scales.data()), n, groups, groups * 4, 4};
        std::vector<uint8_t> nibbles(static_cast<size_t>(n) * k / 2);
        if (format == Format::int8) {
            source.codes = CodeRows::plain(reinterpret_cast<const uint8_t*>(codes.data()), n, k, 8, true);
        } else {
            for (size_t i = 0; i < nibbles.size(); i++)
                nibbles[i] = static_cast<uint8_t>((codes[2 * i] + 8) | (codes[2 * i + 1] + 8) << 4);
            source.zero_point = 8;
            source.codes = CodeRows::plain(nibbles.data(), n, k, 4, false);
        }
        packed = pack(pool, memory, source);
    }
    std::vector<double> times(const std::vector<double>& x) const {
        std::vector<double> y(rows, 0);
        for (int r = 0; r < rows; r++)
            for (int k = 0; k < columns; k++)
                y[r] += static_cast<double>(values[static_cast<size_t>(r) * columns + k]) * x[k];
        return y;
    }
};

struct Arena {
    Axis axis;
    int64_t used = 0;
    ValueSlice add(int width) {
        const int stride = (width + 15) / 16 * 16;
        const ValueSlice p{axis, used, width};
        used += stride;
        return p;
    }
};

inline LinearPart part(const TestMatrix& m, const ValueSlice& out, const ValueSlice* residual = nullptr) {
    return {.weight = m.packed, .out = out, .residual = residual ? *residual : ValueSlice{}};
}

}  // namespace octavo::test
