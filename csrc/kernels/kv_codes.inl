// Keys and values of 4 bits: rotation, codes, and their words in a block.
//
// Each vector of a head is multiplied by a Hadamard matrix, which makes its numbers nearly normal and spreads
// outliers over all of them. Each number becomes the code of the nearest of sixteen levels, the optimal ones
// of a normal distribution (Max 1960), times a scale per token and head. The first scale comes from the root
// mean square; the stored one has the least squared error for these codes. Sums have the same order at every
// level of instructions and in the reference. Levels are int8, so that attention computes with them as with
// an int8 cache.
//
// A vector of 32 words of 16 bits holds four codes of each of 32 operands: of 8 dimensions of 16 keys, or of
// 64 columns of two tokens. No byte belongs to two tokens, since other threads may write neighbouring ones.
#pragma once
#include <bit>

#include "quantize.inl"

namespace octavo {
namespace {

constexpr int8_t kLevels[16] = {-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127};
constexpr float kLevelUnit = 0.0215165f;  // of a level, for a root mean square of 1

// Multiplies each block of x [width] by a Hadamard matrix of size rotation_size(width), which is its own
// inverse up to that factor.
inline int rotation_size(int width) { return width & -width; }
OCTAVO_INLINE void rotate(float* x, int width) {
    for (int stride = 1; stride < rotation_size(width); stride *= 2)
        for (int at = 0; at < width; at += 2 * stride)
            for (int i = at; i < at + stride; i++) {
                const float a = x[i], b = x[i + stride];
                x[i] = a + b;
                x[i + stride] = a - b;
            }
}

// Writes the codes of x [n] and returns their scale as bf16: 0 for zeros, NaN if a number is not finite.
inline uint16_t encode(const float* x, int n, uint8_t* codes) {
    constexpr int kHalf = 8;
    vf squares = {}, products = {}, norms = {};
    for (int d = 0; d < n; d += kLanes) {
        const vf v = load_first(x + d, n - d < kLanes ? n - d : kLanes);
        squares += v * v;
    }
    const float sum = by_lane::sum_lanes(squares);
    const vf step = splat(std::sqrt(sum / static_cast<float>(n)) * kLevelUnit);
    for (int d = 0; d < n; d += kLanes) {
        const vf v = load_first(x + d, n - d < kLanes ? n - d : kLanes), size = absolute(v), at = size / step;
        vf level = splat(kLevels[kHalf]);
        vi code = {};
        for (int i = kHalf + 1; i < 2 * kHalf; i++) {
            const vi above = at > splat(0.5f * static_cast<float>(kLevels[i - 1] + kLevels[i]));
            level = select(above, splat(kLevels[i]), level);
            code = code - above;
        }
        level = select(iota() < splat_i(n - d), level, vf{});
        products += size * level;
        norms += level * level;
        store_int8(reinterpret_cast<int8_t*>(codes + d), (code ^ (as_int(v) >> 31)) + kHalf);
    }
    const bool finite = sum * 0.0f == 0;
    return float_to_bf16(finite ? by_lane::sum_lanes(products) / by_lane::sum_lanes(norms) : NAN);
}

// Rotates and encodes x [n], with zeros behind it up to a multiple of 64. `codes` has room for them.
inline uint16_t encode_rotated(const float* x, int n, uint8_t* codes) {
    float rotated[kMaxPackedWidth];
    std::memcpy(rotated, x, sizeof(float) * n);
    rotate(rotated, n);
    std::memset(codes, 0, (static_cast<unsigned>(n) + 63) / 64 * 64);
    return encode(rotated, n, codes);
}

// Returns a word of the codes at codes[0], codes[stride] ...
OCTAVO_INLINE uint16_t pack_word(const uint8_t* codes, int stride) {
    int word = 0;
    for (int j = 0; j < kCodesPerWord; j++) word |= codes[j * stride] << (4 * j);
    return static_cast<uint16_t>(word);
}

// Store a key [n] or a value [n] in its block and return its scale.
inline uint16_t store_packed_key(uint8_t* to, int token, const float* k, int n) {
    uint8_t codes[kMaxPackedWidth];
    const uint16_t scale = encode_rotated(k, n, codes);
    for (int d = 0; d < n; d += 2 * kCodesPerWord) {
        const uint16_t words[2] = {pack_word(codes + d, 2), pack_word(codes + d + 1, 2)};
        std::memcpy(to + 8 * d + 4 * token, words, 4);
    }
    return scale;
}
inline uint16_t store_packed_value(uint8_t* to, int token, const float* v, int n, int v_padded) {
    uint8_t codes[kMaxPackedWidth];
    const uint16_t scale = encode_rotated(v, n, codes);
    to += token / 2 * v_padded + token % 2 * 2;
    for (int d = 0; d < n; d += kCodesPerWord * kLanes)
        for (int c = 0; c < kLanes; c++) {
            const uint16_t word = pack_word(codes + d + c, kLanes);
            std::memcpy(to + d + 4 * c, &word, 2);
        }
    return scale;
}

// Returns the levels of code j of each word: int16, or bf16 with `as_bf16`.
template <bool as_bf16>
OCTAVO_INLINE vi code_levels(vi words, int j) {
    struct Numbers {
        uint16_t numbers[16];
        constexpr Numbers() : numbers() {
            for (int i = 0; i < 16; i++)
                numbers[i] = static_cast<uint16_t>(
                    as_bf16 ? std::bit_cast<uint32_t>(static_cast<float>(kLevels[i])) >> 16
                            : static_cast<uint32_t>(kLevels[i]));
        }
    };
    static constexpr Numbers table;
    return Numbers16(table.numbers)(words >> (4 * j));
}

}  // namespace
}  // namespace octavo
