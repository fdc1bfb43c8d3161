// Arguments of the attention kernels and the layout of KV blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "activations.h"

namespace octavo {

constexpr int kSplitKeys = 256;  // keys per split

// One layer of a cache group. A block of 16 tokens holds, for each KV head, K and then V (the K of all
// heads first):
//   K fp32 [D][16 tokens]          bf16 [D/2][16 tokens][2]       (D padded to even)
//   V fp32 [16 tokens][Dv]         bf16 [16 tokens / 2][Dv][2]    (Dv padded to 16)
// int8 has the layout of bf16 with one byte per element, followed by the bf16 scales of K [16 tokens] and V
// [16 tokens]. Codes of 4 bits (V of k8v4, both of int4; kv_codes.inl) are packed in words of 16 bits:
//   K      [D/8][16 tokens][2], of dimensions 2 apart              (D padded to 8)
//   V      [16 tokens / 2][Dv/64][16][2], of columns 16 apart      (Dv padded to 64)
enum class KvType : int32_t { fp32, bf16, int8, k8v4, int4 };
constexpr int kNumKvTypes = 5;
constexpr const char* kKvTypeNames[kNumKvTypes] = {"fp32", "bf16", "int8", "k8v4", "int4"};

constexpr int kCodesPerWord = 4;
constexpr int kMaxPackedWidth = 1024;  // of keys and of values with packed codes

constexpr int key_bits(KvType type) {
    constexpr int bits[kNumKvTypes] = {32, 16, 8, 8, 4};
    return bits[static_cast<int>(type)];
}
constexpr int value_bits(KvType type) {
    constexpr int bits[kNumKvTypes] = {32, 16, 8, 4, 4};
    return bits[static_cast<int>(type)];
}
constexpr bool has_scales(KvType type) { return type >= KvType::int8; }
constexpr int padded_key_width(KvType type, int width) {
    const int unit = key_bits(type) == 4 ? 2 * kCodesPerWord : 2;
    return (width + unit - 1) / unit * unit;
}
constexpr int padded_value_width(KvType type, int width) {
    const int unit = value_bits(type) == 4 ? kCodesPerWord * kTile : kTile;
    return (width + unit - 1) / unit * unit;
}

struct KvLayer {
    uint8_t* base;  // head h of block b starts at base + h * head_stride + b * block_stride
    size_t head_stride, block_stride;
    size_t v_offset, scales_offset;  // offsets of V and of the scales from the start of K
    KvType type;
    int32_t num_heads, k_width, v_width, v_padded;
    bool latent = false;  // V is the first v_width elements of K and is not stored (MLA)

    size_t block_end() const { return scales_offset + (has_scales(type) ? 2 * kTile * sizeof(uint16_t) : 0); }
};

// The keys that a row attends to among those up to its limit. `window` 0: all; `window` > 0: the last
// `window` keys up to its own, or with `chunks` those in its own chunk of `window` tokens; `window` -1:
// every key of the request.
struct Mask {
    int32_t window = 0;
    bool chunks = false;

    bool full() const { return window < 0; }
    int first_key(int key_index) const {
        if (window <= 0) return 0;
        const int first = chunks ? key_index - key_index % window : key_index - window + 1;
        return first > 0 ? first : 0;
    }
    bool operator==(const Mask& other) const { return window == other.window && chunks == other.chunks; }
};

struct AttentionArgs {
    const float* q;  // row t, head h at q + t * q_stride + h * k_width
    float* out;  // row t at out + t * out_stride
    const QuantizedRows*
        rows;  // if not null, the quantized input of the next matmul (v_width is a multiple of 32)
    bool keeps_out;  // whether both `out` and `rows` are written
    int64_t q_stride, out_stride;
    KvLayer kv;
    int32_t num_heads;
    float scale, softcap;  // softcap 0: none
    Mask mask;
    const float* sinks;  // [H] or null
    const float* slopes;  // [H], ALiBi: score += slope * (key index - query index); or null
    // [H][2 * reach + 1], T5: score += distances[h][reach + key index - query index], clamped to +-reach;
    // or null.
    const float* distances;
    int32_t reach;
};

// A row of an attention item and the memory for its lanes' states (m, l, acc) of the item's first split;
// the states of each next split are `split_stride` floats further. Null: the item merges its splits itself
// and writes the output.
struct AttentionRow {
    int32_t row;
    float* partial;  // [query heads of the kv head][2 + v_padded]
    int64_t split_stride;
};

constexpr int kMaxLanes = 16;  // lanes per set: rows times query heads of one KV head, computed together
constexpr int kMaxSets = 4;  // sets per item, which read the same splits one after another

// K and V of one KV head, blocks first .. last - 1 of a block table.
struct BlockRange {
    const int32_t* block_table;
    int32_t kv_head, first, last;
};

// Work item of attention: rows that attend to the same blocks, of one request or of several requests with a
// shared prefix; one KV head; splits first_split .. last_split - 1.
struct AttentionItem {
    const int32_t* key_indices;  // [T]
    const int32_t* limits;  // [T], one past the last key under a causal mask; or null: key index + 1
    const int32_t* block_table;  // of the request
    int32_t context_len, kv_head, first_split, last_split, num_rows;
    bool is_prefetched;  // whether the first split's blocks have been prefetched
    BlockRange next_blocks;  // blocks that the thread reads next and prefetches here; may be empty
    AttentionRow rows[kMaxSets * kMaxLanes];
};

// Queries of one row that share a KV head, and the first num_keys keys of a block table, both restricted to
// a part of their dimensions.
struct BlockMassArgs {
    KvLayer kv;
    const int32_t* block_table;
    int32_t kv_head, num_keys;
    const float* q;  // [lanes][k_width]
    int32_t num_lanes;
    float scale;
    float* scores;  // scratch [blocks][16]
    float* masses;  // [blocks], each the sum over lanes of the attention weight on the block
};

// Prefetches bytes `from` .. `to` - 1 of each block of the range into the second-level cache, kBlocksAtOnce
// blocks at a time. Blocks are scattered over pages, where the hardware prefetcher does not help, and
// interleaving pages hides TLB misses.
inline void prefetch_blocks(const KvLayer& kv, const BlockRange& range, size_t from, size_t to) {
    constexpr int kBlocksAtOnce = 4;
    for (int block = range.first; block < range.last; block += kBlocksAtOnce)
        for (size_t line = from; line < to; line += 64)
            for (int b = block; b < range.last && b < block + kBlocksAtOnce; b++)
                __builtin_prefetch(
                    kv.base + range.kv_head * kv.head_stride + range.block_table[b] * kv.block_stride + line,
                    0, 2);
}

// Scratch of an attention item in floats; see AttentionScratch.
inline size_t attention_scratch_floats(int k_width, int v_padded) {
    const size_t width = k_width + 2 * kCodesPerWord - 1, state = v_padded + 2;
    return kMaxLanes * (kSplitKeys + state + 1) + kSplitKeys + kTile / 2 * (state + 4 * width) +
           kMaxSets * kMaxLanes * (width + state) + 256;
}

}  // namespace octavo
