// The lanes of an attention piece: query rows of one head each, in sets of up to 16 that share a kv head.
//
// How K and V are multiplied follows from how they are stored (`Way`):
//   fp32     as they are, queries and weights in fp32
//   bf16     in pairs, queries and weights rounded to bf16
//   int16    codes of int8 in pairs, queries and weights as integers of 15 bits: sums are exact, and the same
//            at every level
//   widened  codes of int8 as bf16 pairs, which hold them exactly; on the tile unit only
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
// Smallest scale; one below it counts as 0, so that the inverse is finite.
constexpr float kTiny = 1e-30f;

struct Keys {
    int first, last;  // keys first .. last - 1
};
struct Lane {
    int row, head, first_key, last_key;  // keys first_key .. last_key - 1 are seen
};

// The places in a thread's memory for a piece. Those that all sets use, one after another, come first.
struct AttentionScratch {
    int width, state_size;
    float* at;

    AttentionScratch(const KvLayer& kv, float* scratch)
        : width((kv.k_width + 1) / 2 * 2),
          state_size(2 + kv.v_padded),
          at(reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64)) {}
    float* scores() const { return at; }  // [lanes][256]; 16-bit weights in the first half
    // [lanes][2 + v_padded]: m, l, acc
    float* split_state() const { return scores() + kMaxLanes * kSplitKeys; }
    // [256], see ValueScales
    float* value_scales() const { return split_state() + kMaxLanes * state_size; }
    // [lanes]: the unit of each lane's integer sums of values
    float* units() const { return value_scales() + kSplitKeys; }
    // One head's values of a block in bf16, where the block stores them otherwise.
    uint8_t* values() const { return reinterpret_cast<uint8_t*>(units() + kMaxLanes); }
    // One head's keys of four blocks in bf16, where the blocks store them otherwise.
    uint8_t* keys() const { return values() + sizeof(uint16_t) * kTile * (state_size - 2); }
    float* sets() const { return reinterpret_cast<float*>(keys() + sizeof(uint16_t) * 4 * kTile * width); }
    size_t set_size() const { return static_cast<size_t>(kMaxLanes) * (width + state_size); }
};

// A set of up to 16 lanes of a piece.
struct LaneSet {
    const AttentionArgs* args = nullptr;
    const AttentionPiece* piece = nullptr;
    Way way = Way::fp32;
    BlockRange ahead{};  // what is read next: the first set of a piece prefetches it while it computes
    int count = 0, width = 0, state_size = 0, row0 = 0, num_rows = 0, first_key = 0, last_key = 0;
    Lane lanes[kMaxLanes];
    float factors[kMaxLanes];  // by which a lane's sums become scores
    float* q = nullptr;  // [lanes][width]; numbers of 16 bits take the first half
    float* state = nullptr;  // [lanes][2 + v_padded]
    float *scores = nullptr, *split_state = nullptr, *value_scales = nullptr, *units = nullptr;
    uint8_t *values = nullptr, *keys = nullptr;

    void fill(const AttentionArgs& a, const AttentionPiece& p, int first_row, int rows,
              const AttentionScratch& scratch, int index) {
        args = &a;
        piece = &p;
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
    const uint8_t* keys_of(int b) const { return k_of(args->kv, piece->block_table[b], piece->kv_head); }
    const uint8_t* values_of(int b) const { return v_of(args->kv, piece->block_table[b], piece->kv_head); }
    const uint16_t* scales(int b) const { return scales_of(args->kv, piece->block_table[b], piece->kv_head); }
    // Returns the keys among key0 .. key1 - 1 that a lane sees.
    Keys seen(int lane, int key0, int key1) const {
        const Lane& l = lanes[lane];
        return {l.first_key > key0 ? l.first_key : key0, l.last_key < key1 ? l.last_key : key1};
    }
    // Returns the keys of the i-th block ahead; past the last one, `instead`.
    const uint8_t* block_ahead(int i, const uint8_t* instead) const {
        return ahead.first + i < ahead.last
                   ? k_of(args->kv, ahead.block_table[ahead.first + i], ahead.kv_head)
                   : instead;
    }

  private:
    void add(int row, int head) {
        const int place = piece->places[row];
        const int limit = piece->limits ? piece->limits[row] : place + 1;
        const int last = args->mask.full() || limit > piece->context_len ? piece->context_len : limit;
        const int first = args->mask.first_key(place);
        factors[count] = put_query(
            args->q + row * args->q_stride + static_cast<int64_t>(head) * args->kv.k_width, count * width);
        first_key = count && first_key < first ? first_key : first;
        last_key = count && last_key > last ? last_key : last;
        lanes[count++] = Lane{row, head, first, last};
    }

    // Converts a query. Returns the factor by which sums with it become scores; a NaN or an infinity among
    // int16 queries makes it NaN, so that it shows.
    float put_query(const float* from, int at) {
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
