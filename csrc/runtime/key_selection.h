// Blocks of keys that sparse rows of a step read in one layer, and the step as that layer's attention then sees
// it: each sparse row is a request of its own, whose block table has the chosen blocks alone, in their order.
// Since rotary keys carry their places, nothing else changes; the attention's splits are counted over what is
// read. Idea: InfiniGen (arXiv 2406.19707).
#pragma once

#include <memory>
#include <vector>

#include "attention_plan.h"
#include "memory.h"
#include "step.h"

namespace octavo {

class SelectedKeys {
  public:
    // The plan is that of the attention; a share `budget` of the blocks is read.
    SelectedKeys(AttentionPlan plan, double budget);

    // Finds the sparse rows of a step; none: its attention is as it was. With `of_earlier` they see the keys alone
    // that were there before the step.
    void begin(const Batch& batch, const KvMemory& kv, const uint8_t* is_sparse, bool of_earlier = false);
    int num_rows() const { return static_cast<int>(rows_.size()); }
    // Row of the step, its request, and the keys that it sees.
    struct Row {
        int row, request, num_keys;
    };
    const Row& row(int index) const { return rows_[index]; }
    // Shares of the attention of a kv head's lanes that fall on each block of a row's.
    float* masses(int index, int kv_head) {
        return masses_.data() + (static_cast<size_t>(index) * num_heads_ + kv_head) * table_width_;
    }
    // Chooses each row's blocks by its masses, and plans the attention.
    void choose(const KvMemory& kv, int threads);
    const Batch& batch() const { return batch_; }
    // The blocks that the attention of the step reads, once they are chosen; some twice where requests share them.
    std::vector<int32_t> blocks_read() const;
    // The blocks that rows would choose by their masses alone.
    std::vector<int32_t> blocks_wanted();
    const AttentionPlan& plan() const { return plan_; }
    float* partials() const { return reinterpret_cast<float*>(partials_->data()); }

    // Blocks that a row reads of those that it sees, and the fewest.
    static int count(double budget, int num_blocks);
    static constexpr int kLeast = 4;
    // Blocks that it always reads: the first one, and the last ones.
    static constexpr int kLast = 2;

  private:
    void add_request(int first_row, int context);
    void add_whole(const Batch& whole, int request, int num_rows);
    void add_row(int index);
    void order_blocks(int index);
    const int32_t* table_of(int index) const;

    AttentionPlan plan_;
    const double budget_;
    const Batch* step_ = nullptr;
    int num_heads_ = 0, table_width_ = 0;
    std::vector<Row> rows_;
    std::vector<float> masses_, sums_;
    std::vector<int32_t> order_;
    Batch batch_{};
    std::vector<int32_t> places_, limits_, query_starts_, context_lens_, tables_;
    std::unique_ptr<Memory> partials_;
};

}  // namespace octavo
