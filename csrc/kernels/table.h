// The interface of executor and kernels: plain structs of pointers, and a table of functions for each
// instruction set.
//
// Each level (portable ... amx) compiles the same sources into a shared object of its own, which exports one
// symbol, octavo_kernel_table. Shapes: T rows, N outputs, K inputs; a tile is 16 outputs.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "sampling_fields.h"

namespace octavo {

constexpr int kTile = 16;  // outputs in a weight tile, tokens in a KV block
constexpr int kGroup = 32;  // inputs that share an activation scale
constexpr int kSplitKeys = 256;  // keys in a split of the attention's definition

// -- weights

// How a tile of 16 outputs lies in memory (k runs over inputs, o over the 16 outputs). Inputs are padded to a
// multiple of 32 with codes whose activations are zero, outputs to a multiple of 16 with zero scales.
//   u4          for each group of 32 inputs 4 vectors of [16 o][4 bytes], byte b of vector v =
//               code(k = 8v + b) | code(k = 8v + 4 + b) << 4; then scales [16 o]; then mins [16 o], of the
//               scales' type, or zeros [16 o], signed bytes, if any
//   u8          for each group of 32 inputs 8 vectors of [16 o][4 bytes], byte b of vector v =
//               code(k = 4v + b); then scales [16 o], or two rows of them where they change every 16 inputs;
//               then mins, as many rows as of scales, or zeros [16 o], if any (never with two rows of scales)
//   u2          for each group of 32 inputs 2 vectors of [16 o][4 bytes], byte b of vector v =
//               code(k = 16v + b) | code(k = 16v + 4 + b) << 2 | code(k = 16v + 8 + b) << 4 |
//               code(k = 16v + 12 + b) << 6; then two rows of scales and two of mins, always `small`
//   l4          codes of 4 bits in u4's order, each the place of its number in the weight's table of sixteen;
//               then scales and mins as u8 has them
//   u3          the low 2 bits in u2's order, then the high bit of each code in one vector [16 o][4 bytes]: bit v
//               of byte b = code(k = 4v + b) >> 2; then scales and mins as u8 has them
//   u5          the low 4 bits in u4's order, then a vector of high bits as in u3; then as u8
//   u6          the low 4 bits in u4's order, then two vectors of [16 o][4 bytes] with the high 2 bits of each
//               code: bits 2(v % 4) and 2(v % 4) + 1 of byte b of vector v / 4 = code(k = 4v + b) >> 4; then as u8
//   f4          codes of 4 bits in u4's order, each the place of its number in the weight's sixteen floats
//   e4m3        floats of 8 bits, for each group 8 vectors of [16 o][4 bytes], bytes 0 to 3 of vector v =
//               codes 4v, 4v + 2, 4v + 1, 4v + 3
//               Both have fp32 scales [16 o] before the codes of each `span` groups, and nothing behind them.
//   i8          signed codes alone, in u8's order, of inputs padded to a multiple of 64; at the end of the
//               tile scales [16 o], fp32, one for each output
// Where scales are `small`, those of groups are signed bytes, and so are mins; before the codes of each eight
// groups then lie the factors of these scales [16 o], fp32 or (`half_factors`) fp16, and behind them those of the
// mins [16 o], if any.
// Or by columns (`column_stride`), of all tiles:
//   i8          codes [inputs][outputs], then scales [outputs]
//   u4          an even number of tiles; for each group of 32 inputs codes [32][outputs / 2], byte j of sixteen
//               = code(o = j) | code(o = 16 + j) << 4 of two tiles; then scales and mins or zeros [outputs]
//   bf16        [K/2][16 o][2]
//   fp16, fp32  [K][16 o]
// value = (code - zero_point - zero) * scale + min, with table[code] in place of the code of l4, and
// numbers[code] in place of that of f4.
enum class Code : int32_t { u4, u8, l4, i8, bf16, fp16, fp32, f4, e4m3, u2, u3, u5, u6 };
constexpr int kNumCodes = 13;
constexpr const char* kCodeNames[kNumCodes] = {"u4", "u8",   "l4", "i8", "bf16", "fp16", "fp32",
                                               "f4", "e4m3", "u2", "u3", "u5",   "u6"};
// The bits of a code that lie together (u2's or u4's order, or a byte each), and those in vectors behind them.
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
// Returns the bytes of a group's codes, of all outputs of a tile, where codes are integers in groups.
constexpr size_t codes_bytes(Code code) { return 64 * (low_bits(code) + high_bits(code)); }
// Whether a group's scale and its min share a byte: the scale in the low 4 bits, the min, negated, in the high 4.
constexpr bool shares_levels(Code code) { return code == Code::u2; }
constexpr bool is_float_code(Code code) { return code == Code::f4 || code == Code::e4m3; }
enum class ScaleType : int32_t { fp16, fp32, small };
constexpr int kNumScaleTypes = 3;
constexpr const char* kScaleTypeNames[kNumScaleTypes] = {"fp16", "fp32", "small"};
constexpr int kSmallSpan = 8;  // groups that share the factors of small scales
constexpr int kMostSpan = 4;  // groups that share a scale of float codes, at most
// The numbers behind a group's scales.
enum class Low : int32_t { none, min, zero };
constexpr int kNumLows = 3;
constexpr const char* kLowNames[kNumLows] = {"none", "min", "zero"};

struct Tiles {
    Code code;
    ScaleType scale_type;
    Low low;
    bool half_groups;  // scales every 16 inputs instead of every 32
    int32_t zero_point;
    int32_t num_rows;  // N, outputs
    int32_t num_inputs;  // K as the model has it
    int32_t num_groups;  // ceil(K / 32); even with i8
    size_t tile_bytes;
    size_t
        tile_stride;  // bytes to the next tile: twice tile_bytes where two weights lie tile by tile in turns
    const uint8_t* data;  // [ceil(N / 16)] tiles
    // Bytes from an input's codes to the next one's where a weight lies by columns, and then tile_stride is 16:
    // a tile begins at the codes of its outputs. 0: in tiles.
    int32_t column_stride = 0;
    // The codes of each input of i8 by columns [num_groups * 32], readable up to 64 bytes behind the last
    // output's, and then `data` holds the scales alone; or null: they lie side by side.
    const uint8_t* const* columns = nullptr;
    uint8_t table[16] = {};  // of l4: numbers of its codes, 128 added, which is the zero point
    float numbers[16] = {};  // of f4: numbers of its codes
    int32_t span = 0;  // of f4 and e4m3: groups that share scales
    bool half_factors = false;  // whether the factors of small scales are fp16

    bool is_laid_out_as(const Tiles& w) const {
        return code == w.code && scale_type == w.scale_type && low == w.low && half_groups == w.half_groups &&
               num_groups == w.num_groups && column_stride == w.column_stride && span == w.span &&
               half_factors == w.half_factors;
    }
    int num_tiles() const { return (num_rows + kTile - 1) / kTile; }
    const uint8_t* tile(int index) const { return data + static_cast<size_t>(index) * tile_stride; }
};

constexpr int kColumnRows = 4;  // rows up to which a product reads the columns of their numbers alone
// Tiles that a product by columns takes at most, with as few rows and with more.
constexpr int kColumnTiles = 128, kGatheredTiles = 4;

// Memory that a thread reads behind a product, in many places: the product asks for it turn by turn, so that
// memory is busy while the units are.
struct ReadSoon {
    struct Part {
        const uint8_t* first;
        int32_t num_lines;  // of kLineBytes
    };
    const Part* parts;
    int count;
    int num_lines;  // of all parts
};
constexpr int kLineBytes = 64;

// One tile of a weight, and the memory for its product. Two tiles that are laid out alike (neighbours, or a
// gate and its up projection) are multiplied together where that loads the rows once instead of twice.
struct TileRef {
    const Tiles* weight;
    int tile;
    float* acc;
    const ReadSoon* soon = nullptr;  // of the first of two; or null
    const uint8_t* data() const { return weight->tile(tile); }
};

// -- rows on their way into a product

enum class RowType : int32_t { int8, two_terms, whole, outliers, bf16, fp32 };
constexpr int kNumRowTypes = 6;
constexpr const char* kRowTypeNames[kNumRowTypes] = {"int8",     "two_terms", "whole",
                                                     "outliers", "bf16",      "fp32"};

// A number of a row is the sum of one or two int8 terms, each times its unit.
constexpr int kFirstUnit = 8;  // unit of the first term with `two_terms`; the second's is 1
constexpr int kWholeUnit = 128;  // unit of the first term with `whole`; the second's is 1
constexpr int kOutlierUnit = 255;  // unit of the second term with `outliers`; the first's is 1

// Rows as a product reads them.
//
// Rows in groups have for each group of 32 inputs a scale d (`scales`), the sums of the group's two halves
// (`sums`), and d times the whole group's sum (`scaled_sums`). These three lie in blocks of 16 rows, so that
// a kernel finds the numbers of its rows side by side: [rows / 16][group stride][16] (sums: [rows / 16][group
// stride][2][16]).
//   int8       d = absmax / 127, q = x / d: values [rows][groups][32]
//   two_terms  beside 4-bit weights, with the tile unit. d = absmax / 1016, q = 8 first + second, first in
//              -127 .. 127, second in -4 .. 3: values [rows][groups][2 terms][32]
// Rows beside weights with one scale an output have one d. It and the terms' sums lie where those of group 0
// do.
//   whole      with the tile unit. d = absmax / 16319, q = 128 first + second, first in -127 .. 127, second
//              in -64 .. 63: values [rows][2 terms][32 groups]
//   outliers   without it. q = first + 255 second, both in -127 .. 127, with a d for which most numbers have
//              no second term: values [rows] of first [32 groups], then an OutlierList's arrays
// Rows of floats are values [rows][stride].
//   bf16, fp32
// Strides count elements.
struct Rows {
    RowType type;
    void* values;
    int64_t stride;
    float* scales;
    int32_t* sums;
    float* scaled_sums;
    int32_t num_groups;  // groups of a row
    int32_t group_stride;  // groups from one block of 16 rows to the next
    bool skips_zeros = false;  // whether weights whose input is zero need not be read

    size_t at(int64_t row, int g) const {
        return (static_cast<size_t>(row / kTile) * group_stride + g) * kTile + row % kTile;
    }
    size_t half_at(int64_t row, int g, int half) const {
        return ((static_cast<size_t>(row / kTile) * group_stride + g) * 2 + half) * kTile + row % kTile;
    }
};

// The second terms of a row, in memory behind its first ones: the quads (four neighbouring inputs) in which
// at least one number has a second term, and these terms. At least kUnrolled zeros follow the last.
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

// Returns the elements that one row takes.
inline int64_t row_elements(RowType type, int num_groups) {
    const int64_t inputs = static_cast<int64_t>(num_groups) * kGroup;
    switch (type) {
        case RowType::two_terms:
        case RowType::whole: return 2 * inputs;
        case RowType::outliers: return inputs + OutlierList::num_bytes(inputs);
        default: return inputs;
    }
}

inline size_t element_bytes(RowType type) {
    return type == RowType::fp32 ? 4 : type == RowType::bf16 ? 2 : 1;
}

struct Norm {
    const float* weight;  // null: no norm
    const float* bias;
    float eps;
    float weight_offset;
    bool is_layer_norm;
    float threshold = 0;  // numbers of smaller magnitude become zeros, after the norm
};

// The operations on a tile of sums on its way to memory, in this order: bias, activation (or gate), residual.
// With `gated`: out = f(gate) * (up + up_offset), f the activation, or g * sigmoid(alpha * g) where alpha is
// not 1.
struct Epilogue {
    const float* bias = nullptr;  // [N] or null
    const float* up_bias = nullptr;  // [N] or null, of the second product where gated
    int32_t activation = -1;  // -1: none; else as `activate`
    bool gated = false;
    float clamp = 0;  // 0: none
    float alpha = 1, up_offset = 0;
    // The out of sparse rows is zero where f of the gate is smaller in magnitude; 0: nowhere.
    float threshold = 0;
    const uint8_t* is_sparse = nullptr;  // by row, as `residual`; null: no row is
    const float* residual = nullptr;  // row t at residual + t * residual_stride, or null
    int64_t residual_stride = 0;
};

// -- attention

// One layer of a cache group. A block of 16 tokens holds, per kv head, K then (all heads' K first) V:
//   K fp32 [D][16 tokens]          bf16 [D/2][16 tokens][2]       (D padded to even)
//   V fp32 [16 tokens][Dv]         bf16 [16 tokens / 2][Dv][2]    (Dv padded to 16)
// int8 lies as bf16 does, with a byte for a number; behind V the scales, bf16: of K [16 tokens], of V [16
// tokens].
enum class KvType : int32_t { fp32, bf16, int8 };
constexpr int kNumKvTypes = 3;
constexpr const char* kKvTypeNames[kNumKvTypes] = {"fp32", "bf16", "int8"};

struct KvLayer {
    uint8_t* base;  // head h of block b starts at base + h * head_stride + b * block_stride
    size_t head_stride, block_stride;
    size_t v_offset, scales_offset;  // of V, and of the scales, behind K
    KvType type;
    int32_t num_heads, k_width, v_width, v_padded;
    bool latent = false;  // V is the first v_width numbers of K, and not stored

    size_t block_end() const {
        return scales_offset + (type == KvType::int8 ? 2 * kTile * sizeof(uint16_t) : 0);
    }
};

// The keys that a row sees among those up to its limit: all of them (`window` 0), the last `window` ones up
// to its own place, or, with `chunks`, those in its own chunk of `window` places. `window` -1: every key of
// the request.
struct Mask {
    int32_t window = 0;
    bool chunks = false;

    bool full() const { return window < 0; }
    int first_key(int place) const {
        if (window <= 0) return 0;
        const int first = chunks ? place - place % window : place - window + 1;
        return first > 0 ? first : 0;
    }
    bool operator==(const Mask& other) const { return window == other.window && chunks == other.chunks; }
};

struct AttentionArgs {
    const float* q;  // row t, head h at q + t * q_stride + h * k_width
    float* out;  // row t at out + t * out_stride
    const Rows* rows;  // or, where not null, the next product's rows (v_width a multiple of 32)
    bool keeps_out;  // whether both are written
    int64_t q_stride, out_stride;
    KvLayer kv;
    int32_t num_heads;
    float scale, softcap;  // softcap 0: none
    Mask mask;
    const float* sinks;  // [H] or null
    const float* slopes;  // [H], of ALiBi: score += slope * (key's place - row's place), or null
    // [H][2 * reach + 1], of T5: score += distances[h][reach + key's place - row's place], at its ends beyond
    // `reach`; or null.
    const float* distances;
    int32_t reach;
};

// A row of a piece, and the memory for its lanes' states (m, l, acc): those of the piece's first split, each
// next split's `split_stride` floats further. Null: the piece merges its splits itself and writes the out.
struct AttentionRow {
    int32_t row;
    float* partial;  // [query heads of the kv head][2 + v_padded]
    int64_t split_stride;
};

constexpr int kMaxLanes = 16;  // lanes of a set: rows times query heads of one kv head, attended together
constexpr int kMaxSets = 4;  // sets of a piece, which read the same splits one after another

// K and V of one kv head, blocks first .. last - 1 of a table.
struct BlockRange {
    const int32_t* block_table;
    int32_t kv_head, first, last;
};

// Rows that see the same blocks, of one request or of several in the prefix that they share; one kv head;
// splits first_split .. last_split - 1.
struct AttentionPiece {
    const int32_t* places;  // [T]
    const int32_t* limits;  // [T], one past the last key under a causal mask, or null: place + 1
    const int32_t* block_table;  // of the request
    int32_t context_len, kv_head, first_split, last_split, num_rows;
    bool is_prefetched;  // whether what its first split reads has been prefetched
    BlockRange ahead;  // what its thread reads next, to be prefetched; may be empty
    AttentionRow rows[kMaxSets * kMaxLanes];
};

// Queries of one row that share a kv head, and the keys that they are compared with: the first num_keys of a
// table, by part of their columns.
struct BlockMassArgs {
    KvLayer kv;
    const int32_t* block_table;
    int32_t kv_head, num_keys;
    const float* q;  // [lanes][k_width]
    int32_t num_lanes;
    float scale;
    float* scores;  // scratch [blocks][16]
    float* masses;  // [blocks], each the sum of the lanes' shares of attention
};

// Prefetches bytes `from` .. `to` - 1 of each block of the range into the second-level cache. A few blocks at
// a time: they lie scattered over pages, where the hardware's prefetcher is of no help, and finding several
// pages at once hides what finding each costs.
inline void prefetch_blocks(const KvLayer& kv, const BlockRange& range, size_t from, size_t to) {
    constexpr int kTogether = 4;
    for (int block = range.first; block < range.last; block += kTogether)
        for (size_t line = from; line < to; line += 64)
            for (int b = block; b < range.last && b < block + kTogether; b++)
                __builtin_prefetch(
                    kv.base + range.kv_head * kv.head_stride + range.block_table[b] * kv.block_stride + line,
                    0, 2);
}

// -- convolutions and recurrences

// out = activation(bias + sum over taps of weight * row, the oldest first); a row that is null adds nothing.
struct ShortConvArgs {
    int32_t taps, width;
    const float* weight;  // [taps][width]
    const float* bias;  // [width] or null
    int32_t activation;  // -1: none; else as `activate`
};

// The rows of one request in a scan; SelectiveScan in octavo/program/mixers.py is the formula.
struct ScanArgs {
    // Row t at its pointer + t * its stride.
    const float *x, *dt, *b, *c;
    const float* beta;  // null: not the delta rule
    float* out;
    int64_t x_stride, dt_stride, b_stride, c_stride, beta_stride, out_stride;
    int32_t num_rows, state_size;
    bool by_state;  // whether each number of the state has a decay of its own
    bool by_lane;  // whether each column is a head, with a step width of its own
    float low, high;  // bounds of the step width
};

// A block of up to 16 columns: of one head, or of heads of one column each. A state is [state_size][16].
struct ScanLanes {
    int32_t column, count, head;
    const float* decay;  // [state_size or 1][16], exp(a_log)
    const float *skip, *bias;  // [16]; bias may be null
    const float* b;  // of the first row, for these columns
    const float* c;
    const float* from;  // the state before the rows; null: zeros
    float* to;  // the state behind them
};

// Type of an adapter's numbers, by the bytes of one. What int8 is to be multiplied with is in the scale of its
// rank.
enum class AdapterNumber : int8_t { int8 = 1, bf16 = 2, fp32 = 4 };

// A matrix of an adapter, in pairs of vectors of 16 numbers: A [rank][stride / 32][2][16], its rows padded
// with zeros; B [tiles][(rank + 1) / 2][2][16], the second vector of an odd rank zeros. A pair of bf16 is one
// vector of 16 times 32 bits, the first vector's numbers in the low halves. Or a table's A [rows][rank].
struct LowRankMatrix {
    const void* numbers;
    AdapterNumber type;
    int32_t rank, stride;

    int number_bytes() const { return static_cast<int>(type); }
    // Bytes of a tile of a B.
    int64_t tile_bytes() const { return static_cast<int64_t>(rank + 1) / 2 * 2 * kTile * number_bytes(); }
    const uint8_t* tile(int index) const {
        return static_cast<const uint8_t*>(numbers) + index * tile_bytes();
    }

    // The ranks from .. end - 1 of an A.
    LowRankMatrix ranks(int from, int end) const {
        const char* start =
            static_cast<const char*>(numbers) + static_cast<int64_t>(from) * stride * number_bytes();
        return {start, type, end - from, stride};
    }
};

// Rows whose sums one adapter changes by B h: gain * (sum + B h) + bias.
struct ExpandedRows {
    LowRankMatrix b;
    const float* h;  // of row 0
    const int32_t* rows;
    int count;
    const float *gain, *bias;  // [tiles * 16] or null
};
// Runs of all adapters of a block of rows.
struct Expansion {
    const ExpandedRows* runs;
    int num_runs;
    int64_t stride;  // from one row's h to the next one's
    int first;  // row of the first sums
};

struct SampleArgs;
struct Best;

struct KernelTable {
    const char* name;
    // Rows that one thread takes through several stages at a time: their numbers stay in its second-level
    // cache.
    int row_block;
    // Number of rows whose products with a weight take as long as reading one byte of it: with as many rows a
    // thread may as well read all weights by itself.
    int rows_per_byte;
    // Called before a step by the thread that starts it: other code may have used the tile unit on that
    // thread since the last step.
    void (*begin_step)();
    // Converts x [K] to row `index` of `rows`, after the norm where one is set.
    void (*prepare_row)(const float* x, int k, const Norm& norm, const Rows& rows, int64_t index);
    // Multiplies rows row0 and on of x by each of the `count` tiles, 1 or 2, into acc [num_rows][16].
    // `scratch` has scratch_bytes(w).
    void (*tile_products)(const TileRef* tiles, int count, const Rows& x, int64_t row0, int num_rows,
                          uint8_t* scratch);
    size_t (*scratch_bytes)(const Tiles& w);
    // Multiplies rows by tiles tile .. tile + count - 1 of a weight that lies by columns, into acc
    // [count][num_rows][16]: up to kColumnTiles tiles with up to kColumnRows rows, else up to kGatheredTiles.
    void (*column_products)(const Tiles& w, int tile, int count, const Rows& x, int64_t row0, int num_rows,
                            float* acc, uint8_t* scratch);
    // Takes acc [num_rows][16] (and `up` where gated), the sums of rows row0 and on in columns column ..
    // column + width - 1, width <= 16, through the epilogue to out [num_rows][out_stride].
    void (*write_tile)(const Epilogue& e, const float* acc, const float* up, int64_t row0, int num_rows,
                       int column, int width, float* out, int64_t out_stride);
    // Converts from [num_rows][32], of which `width` columns count, to group g of rows row0 and on, as
    // prepare_row does without a norm.
    void (*put_rows)(const float* from, const Rows& rows, int64_t row0, int num_rows, int g, int width);
    RowType (*row_type)(Code code);
    // Whether products with weights of this code skip zeros where rows say so.
    bool (*skips_zeros)(Code code);
    // out [K] = row `row` of w, times scale.
    void (*read_row)(const Tiles& w, int row, float scale, float* out);
    void (*norm_row)(const float* x, int k, const Norm& norm, float* out);
    // Applies an activation in place to n values: 0 silu, 1 gelu, 2 gelu_tanh, 3 relu, 4 relu2, 5 sigmoid,
    // 6 tanh.
    void (*activate)(int kind, float* x, int n);
    // Rotates one head in place. cos, sin [rotary / 2].
    void (*rope_head)(float* x, const float* cos, const float* sin, int rotary, bool interleaved);
    void (*kv_store)(const KvLayer& kv, int32_t slot, const float* k, const float* v);
    void (*attention)(const AttentionArgs& args, const AttentionPiece& piece, float* scratch);
    void (*attention_merge)(const AttentionArgs& args, const AttentionPiece& piece);
    void (*block_masses)(const BlockMassArgs& args);
    void (*short_conv)(const ShortConvArgs& args, const float* const* rows, float* out);
    // Takes a block of up to 16 columns through all rows of a scan.
    void (*scan_lanes)(const ScanArgs& args, const ScanLanes& lanes);
    // h[i][j] = scales[j] * (A x[i])[j] for rows x[i] [a.stride], zeros behind their last number.
    void (*shrink)(const LowRankMatrix& a, const float* const* x, int num_rows, const float* scales,
                   float* const* h);
    // Adds B h to the sums of one tile or of two neighbours, acc[i] [rows][16].
    void (*expand)(const Expansion& expansion, int tile, int num_tiles, float* const* acc);
    // h[j] = scale * scales[j] times number j of a table's row.
    void (*read_ranks)(const LowRankMatrix& table, int row, const float* scales, float scale, float* h);
    // Updates each row's best logit by logits [num_rows][32], whose first `width` are the outputs column and
    // on.
    void (*keep_best)(const float* logits, int num_rows, int column, int width, Best* best);
    // Draws one row; see sample.inl.
    void (*sample_row)(const SampleArgs& args, int row, void* scratch);
    size_t (*sample_scratch_bytes)(int vocab);
};

// Scratch of an attention piece, in floats; see AttentionScratch.
inline size_t attention_scratch_floats(int k_width, int v_padded) {
    const size_t width = k_width + 1, state = v_padded + 2;
    return kMaxLanes * (kSplitKeys + state + 1) + kSplitKeys + kTile / 2 * (state + 4 * width) +
           kMaxSets * kMaxLanes * (width + state) + 256;
}

// -- sampling

// Parameters of one sampled row: SAMPLING_RECORD of executor/batch.py, which says what each field means. Python
// checks the offsets when it loads the library.
struct SamplingRecord {
#define OCTAVO_FIELD(type, name) type name;
#define OCTAVO_IS_ON(name, neutral) || name != neutral
    OCTAVO_SAMPLING_FIELDS(OCTAVO_FIELD)

    // Whether a filter looks at the tokens that the cuts leave.
    bool looks_at_kept() const { return false OCTAVO_AFTER_CUTOFF_FILTERS(OCTAVO_IS_ON); }
    // Whether a filter looks at more than the order of the tokens.
    bool looks_at_all() const { return looks_at_kept() OCTAVO_DISTRIBUTION_FILTERS(OCTAVO_IS_ON); }
#undef OCTAVO_FIELD
#undef OCTAVO_IS_ON
    bool has_penalty() const {
        return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0;
    }
};

// Most tokens that a draw keeps in their order.
constexpr int kMostCandidates = 8;

// Most tokens that show that the cuts keep a draw, itself among them.
constexpr int kMostWitnesses = 16;

// SamplingBatch and SampleResult of executor/batch.py; the rules are in executor/sampling.py.
struct SampleArgs {
    const float* logits;  // [rows of this chunk][V]
    int64_t stride;
    int32_t vocab;
    int32_t first;  // the chunk's first row within the arrays below
    const SamplingRecord* records;
    const int32_t *history_starts, *history_ids, *history_counts;
    const int32_t *bias_starts, *bias_ids;
    const float* bias_values;
    const uint32_t* allowed_masks;  // [A][mask_words()], a bit for each token
    int32_t *out_ids, *out_ranks, *out_top_ids;
    uint8_t* out_failed;
    float *out_logprobs, *out_top_logprobs;
    int32_t max_top;  // columns of out_top_*
    float* out_surprises;
    const float* const* replaced;  // logits that a row is drawn from in place of its own [S], or null
    int32_t* out_candidates;  // [S][num_candidates], the drawn token first, -1 behind the last; or null
    int32_t num_candidates;  // at most kMostCandidates
    const uint8_t* uncut;  // whether a row is drawn without its cuts, and has witnesses written [S]; or null
    int32_t* out_witnesses;  // [S][kMostWitnesses], set wherever `uncut` is

    int mask_words() const { return (vocab + 31) / 32; }

    bool changes_logits(int at) const {
        return bias_starts[at + 1] > bias_starts[at] || records[at].allowed_mask >= 0 ||
               records[at].has_penalty();
    }
    bool leaves_cuts(int at) const { return uncut && uncut[at] && records[at].temperature != 0; }
    // Whether the row at `at` draws its best logit, whatever the others are.
    bool takes_best(int at) const {
        const SamplingRecord& r = records[at];
        return r.target_id < 0 && r.temperature == 0 && r.num_logprobs < 0 && !changes_logits(at);
    }
};

// The best of a row's logits so far, the lowest id among equals, and whether one of the logits was NaN.
struct Best {
    float value = -INFINITY;
    int32_t id = 0;
    bool has_nan = false;

    void see(float logit, int32_t at) {
        has_nan |= logit != logit;
        if (logit > value || (logit == value && at < id)) value = logit, id = at;
    }
    void see(const Best& other) {
        see(other.value, other.id);
        has_nan |= other.has_nan;
    }
    bool failed() const { return has_nan || !std::isfinite(value); }
};

}  // namespace octavo
