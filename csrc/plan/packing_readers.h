// Reads codes, scales and mins of the weights that Packer packs.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "packing.h"

namespace octavo {
namespace {

template <typename T>
T load(const uint8_t* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

float half_to_float(uint16_t h) {
    const uint32_t exponent = h >> 10 & 31, mantissa = h & 1023;
    const float value = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-24f
                        : exponent == 31
                            ? (mantissa ? NAN : INFINITY)
                            : std::bit_cast<float>((static_cast<uint32_t>(h & 0x7fff) << 13) + (112u << 23));
    return h & 0x8000 ? -value : value;
}

uint16_t float_to_bf16_bits(float f) {
    const uint32_t bits = std::bit_cast<uint32_t>(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// Sixteen bytes as two words for shifts.
typedef uint64_t Bytes __attribute__((vector_size(16)));

// Layout: ggml's get_scale_min_k4. Scales and mins 0 to 3 are the low six bits of bytes 0-3 and 4-7. Bytes
// 8-11 hold the low four bits of scales and mins 4 to 7, the top two bits of bytes 0-3 and 4-7 the high
// two.
int six_bits(const uint8_t* p, int index, bool is_min) {
    const int own = is_min ? 4 : 0;
    if (index < 4) return p[own + index] & 63;
    return (p[4 + index] >> own & 15) | (p[own + index - 4] >> 6 << 4);
}

// Layout: ggml's dequantize_row_q3_K. The low four bits of numbers 0 to 7 are the low nibbles of bytes 0-7,
// those of 8 to 15 the high nibbles; bytes 8-11 hold the top two bits of four numbers each.
int signed_six_bits(const uint8_t* p, int index) {
    return ((p[index % 8] >> index / 8 * 4 & 15) | (p[8 + index % 4] >> index / 4 * 2 & 3) << 4) - 32;
}

float number_at(Matrix::Kind kind, const uint8_t* column, int index) {
    switch (kind) {
        case Matrix::Kind::u8: return column[index];
        case Matrix::Kind::i8: return static_cast<int8_t>(column[index]);
        case Matrix::Kind::fp16: return half_to_float(load<uint16_t>(column + 2 * index));
        case Matrix::Kind::bf16:
            return std::bit_cast<float>(static_cast<uint32_t>(load<uint16_t>(column + 2 * index)) << 16);
        case Matrix::Kind::fp32: return load<float>(column + 4 * index);
        case Matrix::Kind::scales6: return static_cast<float>(six_bits(column, index, false));
        case Matrix::Kind::mins6: return -static_cast<float>(six_bits(column, index, true));
        case Matrix::Kind::scales4: return column[index] & 15;
        case Matrix::Kind::mins4: return -static_cast<float>(column[index] >> 4);
        case Matrix::Kind::signed6: return static_cast<float>(signed_six_bits(column, index));
    }
    return 0;
}

// Reads the codes of groups of 32 inputs from rows of blocks.
class CodeReader {
  public:
    CodeReader(const CodeRows& rows, int num_inputs, int padding)
        : rows_(rows), num_inputs_(num_inputs), padding_(padding) {
        int low = 0;
        for (const Plane& plane : rows.planes) {
            const uint64_t mask = kOnes * ((1u << plane.bits) - 1);
            parts_.push_back(Part{Bytes{mask, mask}, low, plane.run == 1 ? plane.bits : 0});
            low += plane.bits;
        }
        for (int first = 0; first < num_inputs; first += kGroup)
            for (const Plane& plane : rows.planes)
                for (int half = 0; half < 2; half++)
                    locations_.push_back(locate(plane, first + half * kHalf));
    }

    // Reads a group's 32 codes as bytes; those past the last input are padding.
    void read(int64_t row, int g, Bytes (&codes)[2]) const {
        const uint8_t* from = rows_.data + row * rows_.row_stride;
        if (num_inputs_ - g * kGroup < kGroup) return read_end(from, g, codes);
        read_whole(from, g, codes);
    }

  private:
    // A plane: mask of its bits in each byte, number of bits of the planes before it, and its own number of
    // bits if neighbouring inputs share a byte, else 0.
    struct Part {
        Bytes mask;
        int low, spread;
    };
    // Half a group in a plane: offset of its bytes in a row, and shift of its bits.
    struct Location {
        int64_t offset;
        int shift;
    };

    Location locate(const Plane& plane, int input) const {
        const int64_t block =
            static_cast<int64_t>(input / rows_.block_inputs) * rows_.block_bytes + plane.start;
        const int i = input % rows_.block_inputs, span = plane.run * 8 / plane.bits;
        if (plane.run == 1) return {block + i * plane.bits / 8, 0};
        return {block + i / span * plane.run + i % plane.run, i % span / plane.run * plane.bits};
    }

    void read_whole(const uint8_t* row, int g, Bytes (&codes)[2]) const {
        const Location* at = locations_.data() + static_cast<size_t>(g) * parts_.size() * 2;
        Bytes first{}, second{};
        for (const Part& part : parts_) {
            first |= read_bits(part, row, at[0]) << part.low;
            second |= read_bits(part, row, at[1]) << part.low;
            at += 2;
        }
        codes[0] = first;
        codes[1] = second;
    }

    // Reads a group that contains or follows the last input.
    [[gnu::noinline]] void read_end(const uint8_t* row, int g, Bytes (&codes)[2]) const {
        const int left = std::max(num_inputs_ - g * kGroup, 0);
        if (left) {
            std::vector<uint8_t> whole(rows_.row_bytes + rows_.block_bytes);
            std::memcpy(whole.data(), row, rows_.row_bytes);
            read_whole(whole.data(), g, codes);
        }
        std::memset(reinterpret_cast<uint8_t*>(codes) + left, padding_, kGroup - left);
    }

    static Bytes read_bits(const Part& part, const uint8_t* row, const Location& at) {
        const uint8_t* from = row + at.offset;
        if (part.spread) return Bytes{spread(from, part.spread), spread(from + part.spread, part.spread)};
        return load<Bytes>(from) >> at.shift & part.mask;
    }

    // Expands eight neighbouring codes, packed into `bits` bytes, to one byte each.
    [[gnu::noinline]] static uint64_t spread(const uint8_t* from, int bits) {
        uint64_t codes = 0;
        for (int i = 0; i < bits; i++) codes |= static_cast<uint64_t>(from[i]) << 8 * i;
        codes = (codes | codes << (32 - 4 * bits)) & 0x0000000100000001 * ((1ull << 4 * bits) - 1);
        codes = (codes | codes << (16 - 2 * bits)) & 0x0001000100010001 * ((1ull << 2 * bits) - 1);
        return (codes | codes << (8 - bits)) & kOnes * ((1ull << bits) - 1);
    }

    static constexpr int kHalf = kGroup / 2;
    static constexpr uint64_t kOnes = 0x0101010101010101;
    const CodeRows rows_;
    const int num_inputs_, padding_;
    std::vector<Part> parts_;
    std::vector<Location> locations_;  // [groups][planes][2]
};

// Writes scales or mins in the format of a tile: single-level fp16 stays fp16, small ones stay bytes with
// factors, all others become fp32, which is exact.
class LevelReader {
  public:
    // The tile has one number per `unit` inputs, the source one per `group`.
    LevelReader(const Matrix& values, const Matrix& supers, ScaleType type, int unit, int group,
                int num_inputs)
        : values_(values), supers_(supers), type_(type) {
        for (int first = 0; values.data && first < num_inputs; first += unit) {
            const int number = first / group;
            const int64_t super = supers.data ? number * supers.numbers() / values.numbers() : 0;
            locations_.push_back({number / values.per_column * values.column_stride,
                                  super * supers.column_stride, number % values.per_column});
        }
    }

    // Writes number `index` of a row, if it exists.
    void write(int64_t row, int index, uint8_t* to) const {
        if (index >= static_cast<int>(locations_.size())) return;
        const Location& at = locations_[index];
        const uint8_t* column = values_.data + row * values_.row_stride + at.value;
        if (type_ == ScaleType::fp16) {
            std::memcpy(to, column + 2 * at.number, 2);
            return;
        }
        float value = number_at(values_.kind, column, at.number);
        if (type_ == ScaleType::small) {
            *to = static_cast<uint8_t>(static_cast<int8_t>(value));
            return;
        }
        if (supers_.data) value = read_super(row, at) * value;
        std::memcpy(to, &value, 4);
    }

    // Writes the factor of number `index` of a row, if it exists: as stored fp16, or fp32.
    void write_factor(int64_t row, int index, bool as_stored, uint8_t* to) const {
        if (index >= static_cast<int>(locations_.size())) return;
        if (as_stored) {
            std::memcpy(to, super_bytes(row, locations_[index]), sizeof(uint16_t));
            return;
        }
        const float value = read_super(row, locations_[index]);
        std::memcpy(to, &value, sizeof value);
    }

  private:
    struct Location {
        int64_t value, super;
        int number;
    };
    const uint8_t* super_bytes(int64_t row, const Location& at) const {
        return supers_.data + row * supers_.row_stride + at.super;
    }
    float read_super(int64_t row, const Location& at) const {
        return number_at(supers_.kind, super_bytes(row, at), 0);
    }
    const Matrix values_, supers_;
    const ScaleType type_;
    std::vector<Location> locations_;
};

}  // namespace
}  // namespace octavo
