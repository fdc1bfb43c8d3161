// The key blocks that sparse rows of a step read in one layer, and the batch for that layer's attention:
// each sparse row becomes a request whose block table has the selected blocks only, in order. Rotary keys
// contain their positions, so nothing else changes; splits are counted over the selected keys. Idea:
// InfiniGen (arXiv 2406.19707).
#pragma once

#include <memory>
#include <vector>

#include "attention_plan.h"
#include "memory.h"
#include "step.h"

namespace octavo {

class SelectedKeys {
  public:
    // plan: of the attention. budget: share of the blocks to read.
    SelectedKeys(AttentionPlan plan, double budget);

    // Finds the sparse rows of a step; without any, its attention is unchanged. With `sees_earlier_only`
    // they only attend to keys from before the step.
    void begin(const Batch& batch, const KvMemory& kv, const uint8_t* is_sparse,
               bool sees_earlier_only = false);
    int num_rows() const { return static_cast<int>(rows_.size()); }
    // Row of the step, its request, and the number of keys that it attends to.
    struct Row {
        int row, request, num_keys;
    };
    const Row& row(int index) const { return rows_[index]; }
    // Attention weights of a KV head's lanes on each block of a row.
    float* masses(int index, int kv_head) {
        return masses_.data() + (static_cast<size_t>(index) * num_heads_ + kv_head) * table_width_;
    }
    // Selects each row's blocks by its masses, and plans the attention.
    void select(const KvMemory& kv, int threads);
    const Batch& batch() const { return batch_; }
    // Blocks that the attention of the step reads, after the selection; shared blocks may occur twice.
    std::vector<int32_t> blocks_read() const;
    // Blocks that rows would select by their masses.
    std::vector<int32_t> blocks_by_mass();
    const AttentionPlan& plan() const { return plan_; }
    float* partials() const { return reinterpret_cast<float*>(partials_->data()); }

    // Number of blocks that a row reads, and its minimum.
    static int count(double budget, int num_blocks);
    static constexpr int kMinBlocks = 4;
    // Blocks that are always read: the first, and this many at the end.
    static constexpr int kLastBlocks = 2;

  private:
    void add_request(int first_row, int context);
    void add_dense_rows(const Batch& dense, int request, int num_rows);
    void add_sparse_row(int index);
    void select_blocks(int index);
    const int32_t* block_table_at(int index) const;

    AttentionPlan plan_;
    const double budget_;
    const Batch* step_ = nullptr;
    int num_heads_ = 0, table_width_ = 0;
    std::vector<Row> rows_;
    std::vector<float> masses_, sums_;
    std::vector<int32_t> chosen_;
    Batch batch_{};
    std::vector<int32_t> key_indices_, limits_, query_starts_, context_lens_, tables_;
    std::unique_ptr<Memory> partials_;
};

}  // namespace octavo
