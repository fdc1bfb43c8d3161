// Packed weights: the layouts of tiles and the codes in them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

constexpr int kTile = 16;  // outputs in a weight tile, tokens in a KV block
constexpr int kGroup = 32;  // inputs that share an activation scale

// Layout of a tile of 16 outputs in memory (k: input, o: one of the 16 outputs). Inputs are padded to a
// multiple of 32 with codes whose activations are zero, outputs to a multiple of 16 with zero scales.
//   u4          for each group of 32 inputs 4 vectors of [16 o][4 bytes], byte b of vector v =
//               code(k = 8v + b) | code(k = 8v + 4 + b) << 4; then scales [16 o]; then mins [16 o] of the
//               scales' type, or zero points [16 o] as signed bytes, if any
//   u8          for each group of 32 inputs 8 vectors of [16 o][4 bytes], byte b of vector v =
//               code(k = 4v + b); then scales [16 o], or two rows of them if they change every 16 inputs;
//               then mins, as many rows as scales, or zero points [16 o], if any (never with two rows of scales)
//   u2          for each group of 32 inputs 2 vectors of [16 o][4 bytes], byte b of vector v =
//               code(k = 16v + b) | code(k = 16v + 4 + b) << 2 | code(k = 16v + 8 + b) << 4 |
//               code(k = 16v + 12 + b) << 6; then two rows of scales and two of mins, always `small`
//   l4          4-bit codes in u4's order, each an index into the weight's table of sixteen values;
//               then scales and mins as in u8
//   u3          the low 2 bits in u2's order, then the high bit of each code in one vector [16 o][4 bytes]: bit v
//               of byte b = code(k = 4v + b) >> 2; then scales and mins as in u8
//   u5          the low 4 bits in u4's order, then a vector of high bits as in u3; then as in u8
//   u6          the low 4 bits in u4's order, then two vectors of [16 o][4 bytes] with the high 2 bits of each
//               code: bits 2(v % 4) and 2(v % 4) + 1 of byte b of vector v / 4 = code(k = 4v + b) >> 4; then as in u8
//   f4          4-bit codes in u4's order, each an index into the weight's sixteen floats
//   e4m3        8-bit floats, for each group 8 vectors of [16 o][4 bytes], bytes 0 to 3 of vector v =
//               codes 4v, 4v + 2, 4v + 1, 4v + 3
//               f4 and e4m3 have fp32 scales [16 o] before the codes of each `span` groups, and nothing after them.
//   i8          signed codes only, in u8's order, inputs padded to a multiple of 64; fp32 scales [16 o], one per
//               output, at the end of the tile
// Scale type `small`: the scales and mins of groups are signed bytes. The codes of each eight groups are
// preceded by the factors of these scales [16 o], fp32 or (`half_factors`) fp16, and the factors of the
// mins [16 o], if any.
// Stored by columns (`column_stride`), for all tiles together:
//   i8          codes [inputs][outputs], then scales [outputs]
//   u4          an even number of tiles; for each group of 32 inputs codes [32][outputs / 2], byte j of sixteen
//               = code(o = j) | code(o = 16 + j) << 4 of two tiles; then scales and mins or zero points [outputs]
//   bf16        [K/2][16 o][2]
//   fp16, fp32  [K][16 o]
// value = (code - zero_point - zero) * scale + min, with table[code] for the code of l4 and numbers[code]
// for that of f4.
enum class Code : int32_t { u4, u8, l4, i8, bf16, fp16, fp32, f4, e4m3, u2, u3, u5, u6 };
constexpr int kNumCodes = 13;
constexpr const char* kCodeNames[kNumCodes] = {"u4", "u8",   "l4", "i8", "bf16", "fp16", "fp32",
                                               "f4", "e4m3", "u2", "u3", "u5",   "u6"};
// Bits of a code that are stored together (u2's or u4's order, or one byte each), and those in vectors
// after them.
constexpr int low_bits(Code code) {
    switch (code) {
        case Code::u2:
        case Code::u3: return 2;
        case Code::u4:
        case Code::l4:
        case Code::f4:
        case Code::u5:
        case Code::u6: return 4;
        default: return 8;
    }
}
constexpr int high_bits(Code code) {
    return code == Code::u6 ? 2 : code == Code::u3 || code == Code::u5 ? 1 : 0;
}
// Returns the bytes of a group's codes for all outputs of a tile, for integer codes in groups.
constexpr size_t codes_bytes(Code code) { return 64 * (low_bits(code) + high_bits(code)); }
// Whether a group's scale and min share a byte: the scale in the low 4 bits, the negated min in the high 4.
constexpr bool shares_levels(Code code) { return code == Code::u2; }
constexpr bool is_float_code(Code code) { return code == Code::f4 || code == Code::e4m3; }
enum class ScaleType : int32_t { fp16, fp32, small };
constexpr int kNumScaleTypes = 3;
constexpr const char* kScaleTypeNames[kNumScaleTypes] = {"fp16", "fp32", "small"};
constexpr int kSmallSpan = 8;  // groups that share the factors of small scales
constexpr int kMaxSpan = 4;  // upper bound on groups that share a scale of float codes
// What is stored with a group's scales.
enum class ZeroPointKind : int32_t { none, min, zero };
constexpr int kNumZeroPointKinds = 3;
constexpr const char* kZeroPointKindNames[kNumZeroPointKinds] = {"none", "min", "zero"};

struct Tiles {
    Code code;
    ScaleType scale_type;
    ZeroPointKind zero_point_kind;
    bool half_groups;  // scales every 16 inputs instead of every 32
    int32_t zero_point;
    int32_t num_rows;  // N, outputs
    int32_t num_inputs;  // K without padding
    int32_t num_groups;  // ceil(K / 32); even with i8
    size_t tile_bytes;
    size_t
        tile_stride;  // bytes to the next tile; twice tile_bytes if two weights are interleaved tile by tile
    const uint8_t* data;  // [ceil(N / 16)] tiles
    // Bytes from one input's codes to the next if the weight is stored by columns; then tile_stride is 16,
    // and a tile starts at the codes of its outputs. 0: stored in tiles.
    int32_t column_stride = 0;
    // Code column of each input of i8 by columns [num_groups * 32], readable up to 64 bytes past the last
    // output; `data` then holds the scales only. Null: the columns are adjacent.
    const uint8_t* const* columns = nullptr;
    uint8_t table[16] = {};  // of l4: values of its codes plus 128, which is the zero point
    float numbers[16] = {};  // of f4: values of its codes
    int32_t span = 0;  // of f4 and e4m3: groups that share a scale
    bool half_factors = false;  // whether the factors of small scales are fp16

    bool is_laid_out_as(const Tiles& w) const {
        return code == w.code && scale_type == w.scale_type && zero_point_kind == w.zero_point_kind &&
               half_groups == w.half_groups && num_groups == w.num_groups &&
               column_stride == w.column_stride && span == w.span && half_factors == w.half_factors;
    }
    int num_tiles() const { return (num_rows + kTile - 1) / kTile; }
    const uint8_t* tile(int index) const { return data + static_cast<size_t>(index) * tile_stride; }
};

constexpr int kColumnRows = 4;  // rows up to which only the columns of nonzero inputs are read
// Upper bound on the tiles of a call of column_matmul, for up to kColumnRows rows and for more.
constexpr int kColumnTiles = 128, kGatheredTiles = 4;

// Scattered memory that a thread reads after a matmul. The matmul prefetches it in shares, so that memory
// and compute units are busy at the same time.
struct PrefetchList {
    struct Range {
        const uint8_t* first;
        int32_t num_lines;  // of kLineBytes
    };
    const Range* ranges;
    int count;
    int num_lines;  // of all ranges
};
constexpr int kLineBytes = 64;

// One tile of a weight and the memory for its sums. Two tiles with the same layout (neighbours, or gate and
// up projection) are multiplied together if that loads the rows once instead of twice.
struct TileRef {
    const Tiles* weight;
    int tile;
    float* acc;
    const PrefetchList* prefetch = nullptr;  // set on the first of two; or null
    const uint8_t* data() const { return weight->tile(tile); }
};

}  // namespace octavo
