// One step as a StepRunner sees it: the batch's arrays, and the KV blocks. Shapes are those of StepBatch in
// executor/batch.py.
#pragma once

#include <memory>
#include <vector>

#include "../kernels/table.h"
#include "../plan/packing.h"
#include "kv_spill.h"

namespace octavo {

constexpr int kStates = 2;  // states in a block: the one that a step reads, and the one that it writes
constexpr size_t kCountBytes = 64;  // of their counts, which lie on a cache line of their own

// A group of states has, in place of keys and values, two states of k_width fp32 numbers in each head, and
// behind them the counts of tokens that they stand for, int32: at v_offset.
struct KvGroup {
    int num_layers, num_heads, k_width, v_width;
    KvType type;
    int num_blocks;
    bool holds_states = false;
    bool by_blocks = false;  // whether all heads of a block lie together, on pages of its own

    int v_padded() const { return (v_width + 15) / 16 * 16; }
    size_t element() const { return type == KvType::fp32 ? 4 : type == KvType::bf16 ? 2 : 1; }
    size_t v_offset() const {
        if (holds_states) return static_cast<size_t>(kStates) * k_width * sizeof(float);
        return static_cast<size_t>((k_width + 1) / 2 * 2) * kTile * element();
    }
    size_t scales_offset() const {
        return v_offset() +
               (holds_states ? kCountBytes : static_cast<size_t>(v_padded()) * kTile * element());
    }
    // Bytes of a block: one head of one layer, and one layer.
    size_t head_bytes() const {
        return scales_offset() + (type == KvType::int8 ? 2 * kTile * sizeof(uint16_t) : 0);
    }
    size_t block_bytes() const { return num_heads * head_bytes(); }
    // Bytes in memory of one layer's part of a block, where its heads lie together.
    size_t record_bytes() const { return (block_bytes() + kRecordAlign - 1) / kRecordAlign * kRecordAlign; }
    size_t memory_bytes() const {
        return static_cast<size_t>(num_blocks) * num_layers * (by_blocks ? record_bytes() : block_bytes());
    }
};

// Owns each group's blocks, 0 .. num_blocks - 1. Memory is [layer][head][block], so that what one head reads
// of neighbouring blocks lies together, or [layer][block][head] (`by_blocks`), and costs nothing until it is written. Pages are small: the first
// blocks of each head of each layer would fill a large one each, 180 MiB of zeros for SmolLM2 before its
// first token, and only whole pages can be given back.
class KvMemory {
  public:
    explicit KvMemory(std::vector<KvGroup> groups);
    KvMemory(const KvMemory&) = delete;
    KvMemory& operator=(const KvMemory&) = delete;
    KvLayer layer(int group, int layer) const;
    const KvGroup& group(int index) const { return groups_[index]; }
    int num_groups() const { return static_cast<int>(groups_.size()); }
    void copy_block(int group, int source, int target);
    // Copies a block's bytes, [layer][head]: num_layers * block_bytes.
    void read_block(int group, int block, uint8_t* bytes) const;
    // Copies one layer's part of them, [head]: block_bytes, from offset layer * block_bytes on.
    void read_layer(int group, int layer, int block, uint8_t* bytes) const;
    void write_block(int group, int block, const uint8_t* bytes);
    // Frees the memory of whole pages within `count` neighbouring blocks; their contents are lost.
    void give_back(int group, int block, int count);
    // Keeps the blocks of some layers of a group, which lies by blocks, in a file where memory has no room.
    void spill_to(int group, const KvSpill::Source& source, std::vector<int> layers);
    // The owner of that file; null where all of a group is in memory.
    KvSpill* spill(int group) const { return spills_[group].get(); }
    const Memory& memory(int group) const { return *memory_[group]; }
    bool has_block(int group, int block) const {
        return group >= 0 && group < num_groups() && block >= 0 && block < groups_[group].num_blocks;
    }

  private:
    uint8_t* at(int group, int layer, int head, int block) const;
    void write_layer(int group, int layer, int block, const uint8_t* bytes);

    std::vector<KvGroup> groups_;
    std::vector<std::unique_ptr<Memory>> memory_;
    std::vector<std::unique_ptr<KvSpill>> spills_;  // by group
};

struct Batch {
    int num_tokens, num_requests, num_samples, table_width;
    int num_axes;  // axes of `positions` [num_axes][num_tokens]
    // `places` [num_tokens]: each row's index among its request's keys, for masks. Rope and learned
    // embeddings read `positions`.
    const int32_t *token_ids, *places, *positions, *query_starts, *context_lens, *slots, *block_tables,
        *sample_rows;
    const int32_t* adapters = nullptr;  // slot of each row's adapter [num_tokens], -1: none; or null
    // Place [num_requests] from which on a request's rows are sparse; null: all rows are dense.
    const int32_t* sparse_from = nullptr;
    // Rows from outside [num_given][given_width], and which of them each row of the step is [num_tokens], -1:
    // none; or null.
    const float* given = nullptr;
    const int32_t* given_rows = nullptr;
    int num_given = 0, given_width = 0;
    // One past the last key that each row sees under a causal mask or a window's [num_tokens]; null: its place
    // + 1.
    const int32_t* limits = nullptr;
    // Further slots that rows write their keys and values to: row t those of copy_slots
    // [num_groups][num_copies] from copy_starts[t] to copy_starts[t + 1] - 1; or null.
    const int32_t *copy_starts = nullptr, *copy_slots = nullptr;
    int num_copies = 0;
    // Rows that the stage of the model before has made [num_tokens][hidden_width], or null.
    const float* hidden = nullptr;
    int hidden_width = 0;
    bool draws;  // whether `sampling` is set; otherwise the rows that are made go to out_rows [rows][width]
    SampleArgs sampling;  // all but logits, stride, vocab and first, which the stage of draws knows
    float* out_rows;
    bool keeps_logits = false;  // whether rows may be drawn again once all are drawn
    // Rows that are drawn only once they are drawn again [num_samples], or null.
    const uint8_t* late = nullptr;

    // Returns one past the last key that a row sees under a causal mask.
    int limit(int row) const { return limits ? limits[row] : places[row] + 1; }

    // Whether each draw is its row's best logit and looks at no other.
    bool draws_best() const {
        for (int at = 0; at < num_samples; at++)
            if (!draws || !sampling.takes_best(at)) return false;
        return true;
    }
};

}  // namespace octavo
