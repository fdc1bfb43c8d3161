// One step as a StepRunner receives it: the batch's arrays, and the KV blocks. Shapes are those of
// StepBatch in executor/batch.py.
#pragma once

#include <memory>
#include <vector>

#include "../kernels/table.h"
#include "../plan/packing.h"
#include "kv_spill.h"

namespace octavo {

constexpr int kStates = 2;  // states per block: the one that a step reads, and the one that it writes
constexpr size_t kCountBytes = 64;  // of the states' token counts, which have a cache line of their own

// A group of states has, instead of keys and values, two states of k_width fp32 numbers per head, and their
// token counts, int32, at v_offset.
struct KvGroup {
    int num_layers, num_heads, k_width, v_width;
    KvType type;
    int num_blocks;
    bool holds_states = false;
    bool by_blocks = false;  // whether all heads of a block are adjacent, on pages of their own
    bool by_heads = false;  // whether each NUMA node has the memory of some of the heads

    int v_padded() const { return padded_value_width(type, v_width); }
    size_t v_offset() const {
        if (holds_states) return static_cast<size_t>(kStates) * k_width * sizeof(float);
        return static_cast<size_t>(padded_key_width(type, k_width)) * kTile * key_bits(type) / 8;
    }
    size_t scales_offset() const {
        return v_offset() +
               (holds_states ? kCountBytes : static_cast<size_t>(v_padded()) * kTile * value_bits(type) / 8);
    }
    // Bytes of a block for one head of one layer, and for one layer.
    size_t head_bytes() const {
        return scales_offset() + (has_scales(type) ? 2 * kTile * sizeof(uint16_t) : 0);
    }
    size_t block_bytes() const { return num_heads * head_bytes(); }
    // Bytes of one layer's part of a block with `by_blocks`, padded to pages.
    size_t record_bytes() const { return (block_bytes() + kRecordAlign - 1) / kRecordAlign * kRecordAlign; }
    size_t memory_bytes() const {
        return static_cast<size_t>(num_blocks) * num_layers * (by_blocks ? record_bytes() : block_bytes());
    }
};

// Owns each group's blocks, 0 .. num_blocks - 1. Memory is [layer][head][block], so that neighbouring
// blocks of a head are adjacent, or [layer][block][head] (`by_blocks`), and is committed on first write.
// Pages are small: with huge pages the first blocks of each head of each layer would commit one each, 180
// MiB for SmolLM2 before its first token, and only whole pages can be released.
class KvMemory {
  public:
    // `nodes`: NUMA nodes of the threads, as many on each, in order. They divide the heads of each group whose
    // heads can be divided evenly; none: the system places each page on the node that first writes it.
    explicit KvMemory(std::vector<KvGroup> groups, const std::vector<int>& nodes = {});
    KvMemory(const KvMemory&) = delete;
    KvMemory& operator=(const KvMemory&) = delete;
    KvLayer layer(int group, int layer) const;
    const KvGroup& group(int index) const { return groups_[index]; }
    int num_groups() const { return static_cast<int>(groups_.size()); }
    void copy_block(int group, int source, int target);
    // Copies a block, [layer][head]: num_layers * block_bytes.
    void read_block(int group, int block, uint8_t* bytes) const;
    // Copies one layer's part of a block, [head]: block_bytes, which read_block stores at layer *
    // block_bytes.
    void read_layer(int group, int layer, int block, uint8_t* bytes) const;
    void write_block(int group, int block, const uint8_t* bytes);
    // Releases the whole pages within `count` neighbouring blocks; their contents are lost.
    void release(int group, int block, int count);
    // Keeps blocks of some layers of a group with `by_blocks` in a file when memory has no room for them.
    void spill_to(int group, const KvSpill::Source& source, std::vector<int> layers);
    // The spill file of a group; null if all of it is in memory.
    KvSpill* spill(int group) const { return spills_[group].get(); }
    const Memory& memory(int group) const { return *memory_[group]; }
    bool has_block(int group, int block) const {
        return group >= 0 && group < num_groups() && block >= 0 && block < groups_[group].num_blocks;
    }

  private:
    void divide_heads(int group, const std::vector<int>& nodes);
    uint8_t* at(int group, int layer, int head, int block) const;
    void write_layer(int group, int layer, int block, const uint8_t* bytes);

    std::vector<KvGroup> groups_;
    std::vector<std::unique_ptr<Memory>> memory_;
    std::vector<std::unique_ptr<KvSpill>> spills_;  // by group
};

struct Batch {
    int num_tokens, num_requests, num_samples, table_width;
    int num_axes;  // axes of `positions` [num_axes][num_tokens]
    // `key_indices` [num_tokens]: each row's index among its request's keys, for masks. Rotary and learned
    // position embeddings use `positions`.
    const int32_t *token_ids, *key_indices, *positions, *query_starts, *context_lens, *slots, *block_tables,
        *sample_rows;
    const int32_t* adapters = nullptr;  // [num_tokens], slot of each row's adapter, -1: none; or null
    // [num_requests], key index from which on a request's rows are sparse; null: all rows are dense.
    const int32_t* sparse_from = nullptr;
    // Rows that replace embeddings [num_input_rows][input_width], and the index of each token's row among
    // them [num_tokens], -1: none; or null.
    const float* input_rows = nullptr;
    const int32_t* input_row_indices = nullptr;
    int num_input_rows = 0, input_width = 0;
    // [num_tokens], one past the last key that each row attends to under a causal or sliding-window mask;
    // null: its key index + 1.
    const int32_t* limits = nullptr;
    // Further slots that rows write their keys and values to: row t writes copy_slots
    // [num_groups][num_copies] from copy_starts[t] to copy_starts[t + 1] - 1; or null.
    const int32_t *copy_starts = nullptr, *copy_slots = nullptr;
    int num_copies = 0;
    // Hidden rows from the previous pipeline stage [num_tokens][hidden_width], or null.
    const float* hidden = nullptr;
    int hidden_width = 0;
    // Whether `sampling` is set; otherwise the head's rows are written to out_rows [rows][width].
    bool has_sampling;
    SampleArgs sampling;  // all fields except logits, stride, vocab and first, which the sampling op sets
    float* out_rows;
    bool keeps_logits = false;  // whether logits are kept for `StepRunner::resample`
    // [num_samples], rows that are sampled only by `StepRunner::resample`; or null.
    const uint8_t* deferred = nullptr;

    // Returns one past the last key that a row attends to under a causal mask.
    int limit(int row) const { return limits ? limits[row] : key_indices[row] + 1; }

    // Whether each sampled row takes its largest logit and uses no other.
    bool is_greedy() const {
        for (int at = 0; at < num_samples; at++)
            if (!has_sampling || !sampling.is_greedy(at)) return false;
        return true;
    }
};

}  // namespace octavo
