// Random quantized weights and the values that they stand for.
#pragma once

#include "../plan/packing.h"
#include "check.h"

namespace octavo::test {

inline float from_half(uint16_t h) {  // positive, normal
    return std::ldexp(1.0f + static_cast<float>(h & 1023) / 1024, (h >> 10 & 31) - 15);
}

// A weight of random codes, and the values that they stand for.
struct Example {
    int rows, inputs, bits, group, zero_point;
    bool halves, is_signed, mins, supers;
    std::vector<uint8_t> codes;
    std::vector<uint16_t> scales;  // fp16
    std::vector<int8_t> small;  // scales of groups, if there are two levels
    Floats least;
    const int8_t* table = nullptr;  // values of 4-bit codes

    Example(int n, int k, int b, int g, int zero, bool h, bool s, bool m, bool two)
        : rows(n),
          inputs(k),
          bits(b),
          group(g),
          zero_point(zero),
          halves(h),
          is_signed(s),
          mins(m),
          supers(two) {
        std::mt19937 generator(static_cast<uint32_t>(n * 1000 + k + b));
        codes.resize(static_cast<size_t>(rows) * inputs * bits / 8);
        for (auto& code : codes) code = static_cast<uint8_t>(generator());
        for (int i = 0; i < rows * groups(); i++) {
            scales.push_back(static_cast<uint16_t>((10 + generator() % 8) << 10 | generator() % 1024));
            small.push_back(static_cast<int8_t>(generator()));
            least.push_back(static_cast<float>(generator() % 1000) / 300 - 1.5f);
        }
    }
    int groups() const { return (inputs + group - 1) / group; }
    int code(int row, int k) const {
        if (bits == 8)
            return is_signed ? static_cast<int8_t>(codes[static_cast<size_t>(row) * inputs + k])
                             : codes[static_cast<size_t>(row) * inputs + k];
        const int in = k % group, half = group / 2;
        const int byte = halves ? k / group * half + in % half : k / 2;
        const bool high = halves ? in >= half : k % 2;
        const int nibble = codes[static_cast<size_t>(row) * inputs / 2 + byte] >> (high ? 4 : 0) & 15;
        return table ? table[nibble] : nibble;
    }
    float value(int row, int k) const {
        const int at = row * groups() + k / group;
        const float scale =
            supers ? from_half(scales[row]) * static_cast<float>(small[at]) : from_half(scales[at]);
        const float scaled = static_cast<float>(code(row, k) - zero_point) * scale;
        return mins ? scaled + least[at] : scaled;
    }
    QuantizedSource source() const {
        const auto matrix = [&](Matrix::Kind kind, const void* data, int columns, int item) {
            return Matrix{kind,    static_cast<const uint8_t*>(data),    rows,
                          columns, static_cast<int64_t>(columns) * item, item};
        };
        QuantizedSource s{};
        s.group = group;
        s.zero_point = zero_point;
        s.num_inputs = inputs;
        s.codes = CodeRows::plain(codes.data(), rows, inputs, bits, is_signed, halves ? group / 2 : 1);
        s.scales = supers ? matrix(Matrix::Kind::i8, small.data(), groups(), 1)
                          : matrix(Matrix::Kind::fp16, scales.data(), groups(), 2);
        if (supers) s.super_scales = matrix(Matrix::Kind::fp16, scales.data(), 1, 2);
        if (mins) s.mins = matrix(Matrix::Kind::fp32, least.data(), groups(), 4);
        s.whole_rows = group >= inputs && bits == 8;
        s.table = table;
        return s;
    }
};

inline Example with_table(Example e) {
    static constexpr int8_t table[16] = {-128, -104, -83, -65, -49, -35, -22, 0,
                                         1,    13,   25,  38,  53,  69,  89,  127};
    e.table = table;
    return e;
}

inline Example other_codes(Example e) {
    for (uint8_t& code : e.codes) code ^= 0x5a;
    return e;
}

// Random codes of 2, 3, 4, 5, 6 or 8 bits in groups of 16 or 32, with scales and optional mins, of one
// level or two.
struct Grouped {
    static constexpr int kRows = 37, kInputs = 768, kFactors = kInputs / 256;
    std::vector<uint8_t> codes, scales, mins;
    std::vector<uint16_t> factors, halves;  // fp16
    Floats floats;

    explicit Grouped(uint32_t seed)
        : codes(static_cast<size_t>(kRows) * kInputs),
          scales(codes.size() / 16),
          mins(scales),
          factors(kRows * kFactors),
          halves(scales.size()) {
        std::mt19937 generator(seed);
        for (auto* bytes : {&codes, &scales, &mins})
            for (uint8_t& byte : *bytes) byte = static_cast<uint8_t>(generator());
        for (uint8_t& min : mins) min &= 63;
        for (auto* numbers : {&factors, &halves})
            for (uint16_t& half : *numbers)
                half = static_cast<uint16_t>((10 + generator() % 8) << 10 | generator() % 1024);
        for (const uint16_t half : factors) floats.push_back(from_half(half));
    }
    static Matrix matrix(Matrix::Kind kind, const void* data, int columns, int item) {
        return Matrix{kind,    static_cast<const uint8_t*>(data),    kRows,
                      columns, static_cast<int64_t>(columns) * item, item};
    }
    QuantizedSource source(int bits, int group, bool has_mins) const {
        QuantizedSource s{};
        s.group = group;
        s.num_inputs = kInputs;
        if (bits == 4 || bits == 8) {
            s.codes = CodeRows::plain(codes.data(), kRows, kInputs, bits, bits == 8);
        } else {
            const int low = bits == 2 || bits == 3 ? 2 : 4, high = bits - low;
            const int row_bytes = kInputs * bits / 8, run = 16 * low;
            s.codes = {codes.data(), kRows, row_bytes, row_bytes, 128, 16 * bits, {{0, low, run}}};
            if (high) s.codes.planes.push_back({run, high, 16 * high});
            if (!has_mins) s.zero_point = 1 << (bits - 1);
        }
        return s;
    }
    QuantizedSource two_levels(int bits, int group, bool has_mins, Matrix::Kind factor_kind) const {
        QuantizedSource s = source(bits, group, has_mins);
        const bool half = factor_kind == Matrix::Kind::fp16;
        s.scales = matrix(Matrix::Kind::i8, scales.data(), kInputs / group, 1);
        s.super_scales =
            matrix(factor_kind, half ? reinterpret_cast<const void*>(factors.data()) : floats.data(),
                   kFactors, half ? sizeof(uint16_t) : sizeof(float));
        if (!has_mins) return s;
        s.mins = matrix(Matrix::Kind::u8, mins.data(), kInputs / group, 1);
        s.super_mins = s.super_scales;
        if (bits == 2 && group == 16) {  // as in Q2_K: both in one byte
            s.scales = matrix(Matrix::Kind::scales4, mins.data(), kInputs / group, 1);
            s.mins = matrix(Matrix::Kind::mins4, mins.data(), kInputs / group, 1);
        }
        return s;
    }
    QuantizedSource one_level(int bits, bool has_mins) const {
        QuantizedSource s = source(bits, kGroup, has_mins);
        s.scales = matrix(Matrix::Kind::fp16, halves.data(), kInputs / kGroup, sizeof(uint16_t));
        if (has_mins)
            s.mins = matrix(Matrix::Kind::fp16, halves.data() + 5, kInputs / kGroup, sizeof(uint16_t));
        return s;
    }
};

}  // namespace octavo::test
