// Attention over splits of 256 keys.
//
// A lane is one query row of one head. The lanes of an item share a KV head, so that each key and value is
// loaded once for up to 16 lanes and comes from memory once for all of them. For each lane and split:
// scores of all keys, m = max, p = exp(score - m), l = sum p, acc = sum p V, in a fixed order or exactly;
// then (m, l, acc) of the splits are merged from left to right. The result of a lane depends on its own row
// only, not on the other lanes or on the distribution of splits over threads.
#pragma once
#include "attention_matmul.inl"
#include "attention_softmax.inl"
#ifdef __AMX_INT8__
#include "attention_amx.inl"
#endif

namespace octavo {
namespace {

// Prefetches the part of the next blocks that the matmuls have not prefetched: blocks in excess of this
// split's, and the scales.
void prefetch_rest(const LaneSet& set, int num_blocks) {
    BlockRange rest = set.next_blocks;
    const KvLayer& kv = set.args->kv;
    if (has_scales(kv.type)) prefetch_blocks(kv, rest, kv.scales_offset, kv.block_end());
    rest.first += num_blocks;
    prefetch_blocks(kv, rest, 0, kv.scales_offset);
}

// Computes the states of all lanes for keys key0 .. key1 - 1 of one split into split_state.
template <Way way, int k_bits = 8, int v_bits = 8>
void attend_keys(const LaneSet& set, int key0, int key1, int split0) {
    const int block0 = key0 / kTile, block1 = (key1 + kTile - 1) / kTile;
#ifdef __AMX_INT8__
    if (way != Way::fp32 && set.on_tiles()) {
        tile_scores<way, k_bits>(set, block0, block1, split0);
        scale_scores<way>(set, block0, block1, split0);
        soften<way>(set, key0, key1, split0);
        return tile_values<way, v_bits>(set, key0, key1, split0);
    }
#endif
    score_blocks<way, k_bits>(set, block0, block1, split0);
    soften<way>(set, key0, key1, split0);
    weigh_blocks<way, v_bits>(set, key0, key1, split0);
    prefetch_rest(set, block1 - block0);
}

template <Way way>
void attend_codes(const LaneSet& set, int key0, int key1, int split0) {
    switch (set.args->kv.type) {
        case KvType::k8v4: return attend_keys<way, 8, 4>(set, key0, key1, split0);
        case KvType::int4: return attend_keys<way, 4, 4>(set, key0, key1, split0);
        default: return attend_keys<way>(set, key0, key1, split0);
    }
}

// Computes the states of all lanes for one split into split_state.
void attend_split(const LaneSet& set, int split) {
    const int split0 = split * kSplitKeys;
    const int key0 = set.first_key > split0 ? set.first_key / kTile * kTile : split0;
    const int key1 = set.last_key < split0 + kSplitKeys ? set.last_key : split0 + kSplitKeys;
    if (key0 >= key1) {
        std::memset(set.split_state, 0, sizeof(float) * set.count * set.state_size);
        for (int lane = 0; lane < set.count; lane++) set.split_state[lane * set.state_size] = -INFINITY;
        return;
    }
    switch (set.way) {
        case Way::fp32: return attend_keys<Way::fp32>(set, key0, key1, split0);
        case Way::bf16: return attend_keys<Way::bf16>(set, key0, key1, split0);
        case Way::int16: return attend_codes<Way::int16>(set, key0, key1, split0);
        case Way::widened: return attend_codes<Way::widened>(set, key0, key1, split0);
    }
}

// -- merging --

struct Exps {
    float first, second;
};
Exps two_exps(float first, float second) {
    float x[kLanes] = {first, second};
    store(x, exp(load(x)));
    return {x[0], x[1]};
}

// Merges the state `part` (m, l, acc) into the state `into`. A part without keys (m = -inf) changes
// nothing.
void merge_state(float* into, const float* part, int v_padded) {
    if (part[0] == -INFINITY) return;
    if (into[0] == -INFINITY) {
        std::memcpy(into, part, sizeof(float) * (2 + v_padded));
        return;
    }
    const float m = into[0] > part[0] || into[0] != into[0] ? into[0] : part[0];
    const auto [keep, add] = two_exps(into[0] - m, part[0] - m);
    into[0] = m;
    into[1] = into[1] * keep + part[1] * add;
    for (int d = 2; d < 2 + v_padded; d += kLanes)
        store(into + d, load(into + d) * keep + load(part + d) * add);
}

void finish_lane(const AttentionArgs& args, const Lane& lane, float* state) {
    if (args.sinks) {
        const float sink = args.sinks[lane.head], m = state[0] > sink ? state[0] : sink;
        const auto [kept, sunk] = two_exps(state[0] - m, sink - m);
        const float keep = state[0] == -INFINITY ? 0 : kept;
        state[1] = state[1] * keep + sunk;
        for (int d = 2; d < 2 + args.kv.v_padded; d++) state[d] *= keep;
    }
    float *acc = state + 2, divisor = state[1];
    if (value_bits(args.kv.type) == 4) {
        rotate(acc, args.kv.v_width);
        divisor *= static_cast<float>(rotation_size(args.kv.v_width));
    }
    for (int d = 0; d < args.kv.v_padded; d += kLanes) store(acc + d, load(acc + d) / splat(divisor));
    if (!args.rows || args.keeps_out)
        std::memcpy(args.out + lane.row * args.out_stride + static_cast<int64_t>(lane.head) * args.kv.v_width,
                    acc, sizeof(float) * args.kv.v_width);
    if (!args.rows) return;
    const int first_group = lane.head * args.kv.v_width / kGroup;
    for (int g = 0; g < args.kv.v_width / kGroup; g++)
        quantize_group(acc + g * kGroup, *args.rows, lane.row, 1, first_group + g, kGroup);
}

void finish_set(const LaneSet& set, float* states) {
    for (int lane = 0; lane < set.count; lane++)
        finish_lane(*set.args, set.lanes[lane], states + lane * set.state_size);
}

// Merges the states of a split into the set's states, or copies them to the partials of the rows.
void keep_split(const LaneSet& set, int split, bool merges) {
    if (merges) {
        for (int lane = 0; lane < set.count; lane++)
            merge_state(set.state + lane * set.state_size, set.split_state + lane * set.state_size,
                        set.state_size - 2);
        return;
    }
    const size_t row_size = static_cast<size_t>(set.count) / set.num_rows * set.state_size;
    for (int i = 0; i < set.num_rows; i++) {
        const AttentionRow& row = set.item->rows[set.row0 + i];
        std::memcpy(row.partial + (split - set.item->first_split) * row.split_stride,
                    set.split_state + i * row_size, sizeof(float) * row_size);
    }
}

// Returns the blocks of a split that any of the sets reads.
BlockRange split_blocks(const AttentionItem& item, const LaneSet* sets, int num_sets, int split) {
    BlockRange blocks{item.block_table, item.kv_head, (split + 1) * kSplitKeys / kTile,
                      split * kSplitKeys / kTile};
    const int first = blocks.last, last = blocks.first;
    for (int i = 0; i < num_sets; i++) {
        const int from = sets[i].first_key / kTile, to = (sets[i].last_key + kTile - 1) / kTile;
        if (from < blocks.first) blocks.first = from > first ? from : first;
        if (to > blocks.last) blocks.last = to < last ? to : last;
    }
    return blocks;
}

void attention(const AttentionArgs& args, const AttentionItem& item, float* memory) {
    const AttentionScratch scratch(args.kv, memory);
    const int rows_per_set = kMaxLanes / (args.num_heads / args.kv.num_heads);
    const bool merges = !item.rows[0].partial, one_split = item.last_split - item.first_split == 1;
    LaneSet sets[kMaxSets];
    int num_sets = 0;
    for (int row = 0; row < item.num_rows; row += rows_per_set) {
        LaneSet& set = sets[num_sets];
        set.fill(args, item, row, item.num_rows - row < rows_per_set ? item.num_rows - row : rows_per_set,
                 scratch, num_sets++);
        for (int lane = 0; merges && !one_split && lane < set.count; lane++) {
            std::memset(set.state + lane * set.state_size, 0, sizeof(float) * set.state_size);
            set.state[lane * set.state_size] = -INFINITY;
        }
    }
    if (!item.is_prefetched)
        prefetch_blocks(args.kv, split_blocks(item, sets, num_sets, item.first_split), 0,
                        args.kv.block_end());
    for (int split = item.first_split; split < item.last_split; split++) {
        sets[0].next_blocks =
            split + 1 < item.last_split ? split_blocks(item, sets, num_sets, split + 1) : item.next_blocks;
        for (int i = 0; i < num_sets; i++) {
            attend_split(sets[i], split);
            if (merges && one_split)
                finish_set(sets[i], sets[i].split_state);
            else
                keep_split(sets[i], split, merges);
        }
    }
    for (int i = 0; merges && !one_split && i < num_sets; i++) finish_set(sets[i], sets[i].state);
}

// Merges the partials of an item's rows from left to right and writes the output.
void attention_merge(const AttentionArgs& args, const AttentionItem& item) {
    const int group = args.num_heads / args.kv.num_heads, size = 2 + args.kv.v_padded;
    for (int i = 0; i < item.num_rows; i++)
        for (int h = 0; h < group; h++) {
            const AttentionRow& row = item.rows[i];
            float* state = row.partial + h * size;
            for (int split = 1; split < item.last_split - item.first_split; split++)
                merge_state(state, state + split * row.split_stride, args.kv.v_padded);
            finish_lane(args, Lane{row.row, item.kv_head * group + h, 0, 0}, state);
        }
}

}  // namespace
}  // namespace octavo
