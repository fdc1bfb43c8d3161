// The lanes of an attention item: query rows of one head each, in sets of up to 16 that share a KV head.
//
// The storage type of K and V determines the arithmetic (`Way`):
//   fp32     queries and weights in fp32
//   bf16     in pairs, queries and weights rounded to bf16
//   int16    int8 codes in pairs, queries and weights as 15-bit integers: sums are exact, and equal at every
//            level
//   widened  int8 codes as bf16 pairs, which represent them exactly; only on AMX
// Codes of 4 bits are replaced by their levels, which are int8, when they are loaded. Their queries are
// rotated as the keys are, and the outputs rotated back.
#pragma once
#include <type_traits>

#include "kv_store.inl"

namespace octavo {
namespace {

enum class Way { fp32, bf16, int16, widened };

// Largest integer of a query: 1024 products with a code fit 31 bits.
constexpr float kQueryCodes = 16383;
// Largest integer of a weight: 256 products with a code fit 31 bits.
constexpr float kWeightCodes = 32767;
// Smallest scale; smaller ones count as 0, so that the inverse is finite.
constexpr float kTiny = 1e-30f;

struct Keys {
    int first, last;  // keys first .. last - 1
};
struct Lane {
    int row, head, first_key, last_key;  // attends to keys first_key .. last_key - 1
};

// Layout of a thread's scratch memory for one item. The parts that all sets use in turn come first.
struct AttentionScratch {
    int width, state_size;
    float* at;

    AttentionScratch(const KvLayer& kv, float* scratch)
        : width(padded_key_width(kv.type, kv.k_width)),
          state_size(2 + kv.v_padded),
          at(reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64)) {}
    float* scores() const { return at; }  // [lanes][256]; 16-bit weights in the first half
    // [lanes][2 + v_padded]: m, l, acc
    float* split_state() const { return scores() + kMaxLanes * kSplitKeys; }
    // [256], see ValueScales
    float* value_scales() const { return split_state() + kMaxLanes * state_size; }
    // [lanes]: unit of each lane's integer sums of values
    float* units() const { return value_scales() + kSplitKeys; }
    // Values of one head and block, converted to bf16.
    uint8_t* values() const { return reinterpret_cast<uint8_t*>(units() + kMaxLanes); }
    // Keys of one head and four blocks, converted to bf16.
    uint8_t* keys() const { return values() + sizeof(uint16_t) * kTile * (state_size - 2); }
    float* sets() const { return reinterpret_cast<float*>(keys() + sizeof(uint16_t) * 4 * kTile * width); }
    size_t set_size() const { return static_cast<size_t>(kMaxLanes) * (width + state_size); }
};

// A set of up to 16 lanes of an item.
struct LaneSet {
    const AttentionArgs* args = nullptr;
    const AttentionItem* item = nullptr;
    Way way = Way::fp32;
    BlockRange next_blocks{};  // read next; the first set of an item prefetches them while it computes
    int count = 0, width = 0, state_size = 0, row0 = 0, num_rows = 0, first_key = 0, last_key = 0;
    Lane lanes[kMaxLanes];
    float factors[kMaxLanes];  // by which a lane's sums are multiplied to give scores
    float* q = nullptr;  // [lanes][width]; 16-bit elements use the first half
    float* state = nullptr;  // [lanes][2 + v_padded]
    float *scores = nullptr, *split_state = nullptr, *value_scales = nullptr, *units = nullptr;
    uint8_t *values = nullptr, *keys = nullptr;

    void fill(const AttentionArgs& a, const AttentionItem& p, int first_row, int rows,
              const AttentionScratch& scratch, int index) {
        args = &a;
        item = &p;
        const int group = a.num_heads / a.kv.num_heads;
        width = scratch.width;
        state_size = scratch.state_size;
        row0 = first_row;
        num_rows = rows;
        way = a.kv.type == KvType::fp32   ? Way::fp32
              : a.kv.type == KvType::bf16 ? Way::bf16
              : on_tiles()                ? Way::widened
                                          : Way::int16;
        scores = scratch.scores();
        split_state = scratch.split_state();
        value_scales = scratch.value_scales();
        units = scratch.units();
        values = scratch.values();
        keys = scratch.keys();
        q = scratch.sets() + index * scratch.set_size();
        state = q + kMaxLanes * width;
        for (int i = 0; i < rows; i++)
            for (int h = 0; h < group; h++) add(p.rows[first_row + i].row, p.kv_head * group + h);
    }
    bool on_tiles() const {
        return kHasTileUnit && args->kv.type != KvType::fp32 && width % 32 == 0 && !args->kv.latent;
    }

    const uint16_t* q_bf16() const { return reinterpret_cast<const uint16_t*>(q); }
    uint16_t* weights_bf16() const { return reinterpret_cast<uint16_t*>(scores); }
    const uint8_t* keys_at(int b) const { return k_block(args->kv, item->block_table[b], item->kv_head); }
    const uint8_t* values_at(int b) const { return v_block(args->kv, item->block_table[b], item->kv_head); }
    const uint16_t* scales(int b) const {
        return scales_block(args->kv, item->block_table[b], item->kv_head);
    }
    // Returns the keys among key0 .. key1 - 1 that a lane attends to.
    Keys seen(int lane, int key0, int key1) const {
        const Lane& l = lanes[lane];
        return {l.first_key > key0 ? l.first_key : key0, l.last_key < key1 ? l.last_key : key1};
    }
    // Returns the keys of the i-th of the next blocks, or `instead` past the last one.
    const uint8_t* next_block_keys(int i, const uint8_t* instead) const {
        return next_blocks.first + i < next_blocks.last
                   ? k_block(args->kv, next_blocks.block_table[next_blocks.first + i], next_blocks.kv_head)
                   : instead;
    }

  private:
    void add(int row, int head) {
        const int key_index = item->key_indices[row];
        const int limit = item->limits ? item->limits[row] : key_index + 1;
        const int last = args->mask.full() || limit > item->context_len ? item->context_len : limit;
        const int first = args->mask.first_key(key_index);
        const float* query = args->q + row * args->q_stride + static_cast<int64_t>(head) * args->kv.k_width;
        factors[count] = key_bits(args->kv.type) == 4 ? quantize_rotated_query(query, count * width)
                                                      : quantize_query(query, count * width);
        first_key = count && first_key < first ? first_key : first;
        last_key = count && last_key > last ? last_key : last;
        lanes[count++] = Lane{row, head, first, last};
    }

    float quantize_rotated_query(const float* from, int at) {
        float rotated[kMaxPackedWidth];
        const int k_width = args->kv.k_width;
        std::memcpy(rotated, from, sizeof(float) * k_width);
        rotate(rotated, k_width);
        return quantize_query(rotated, at) / static_cast<float>(rotation_size(k_width));
    }

    // Quantizes a query and returns the factor by which sums with it become scores. With int16 a NaN or an
    // infinity in the query makes the factor NaN, so that it propagates.
    float quantize_query(const float* from, int at) {
        float unit = 1, inverse = 1;
        if (way == Way::int16) {
            vf largest = {}, check = {};
            for (int d = 0; d < args->kv.k_width; d += kLanes) {
                const vf part = load_first(from + d, left(args->kv.k_width, d));
                largest = max(largest, absolute(part));
                check += part * 0.0f;
            }
            const bool finite = sum_lanes(check) == 0;
            const float top = max_lanes(largest) > kTiny ? max_lanes(largest) : kTiny;
            unit = finite ? top / kQueryCodes : NAN;
            inverse = finite ? kQueryCodes / top : 0;
        }
        for (int d = 0; d < width; d += kLanes) {
            const vf part = load_first(from + d, left(args->kv.k_width, d));
            if (way == Way::fp32) {
                store_first(q + at + d, part * args->scale, left(width, d));
                continue;
            }
            uint16_t values[kLanes], *to = reinterpret_cast<uint16_t*>(q) + at + d;
            uint16_t* put = left(width, d) == kLanes ? to : values;
            if (way == Way::int16)
                store_int16(put, round_to_int(inverse ? part * inverse : vf{}));
            else
                store_bf16(put, part);
            if (put == values) std::memcpy(to, values, sizeof(uint16_t) * left(width, d));
        }
        return way == Way::fp32 ? 1 : args->scale * unit;
    }
    static int left(int width, int d) { return width - d < kLanes ? width - d : kLanes; }
};

}  // namespace
}  // namespace octavo
