#include "key_selection.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace octavo {

SelectedKeys::SelectedKeys(AttentionPlan plan, double budget) : plan_(std::move(plan)), budget_(budget) {}

int SelectedKeys::count(double budget, int num_blocks) {
    return std::min(num_blocks, std::max(kMinBlocks, static_cast<int>(std::ceil(budget * num_blocks))));
}

void SelectedKeys::begin(const Batch& batch, const KvMemory& kv, const uint8_t* is_sparse,
                         bool sees_earlier_only) {
    step_ = &batch;
    num_heads_ = kv.group(plan_.group).num_heads;
    table_width_ = batch.table_width;
    rows_.clear();
    for (int r = 0; r < batch.num_requests; r++) {
        const int context = batch.context_lens[static_cast<int64_t>(plan_.group) * batch.num_requests + r];
        for (int row = batch.query_starts[r]; row < batch.query_starts[r + 1]; row++) {
            const int seen =
                sees_earlier_only ? batch.key_indices[batch.query_starts[r]] : batch.key_indices[row] + 1;
            if (is_sparse[row] && std::min(context, seen) > 0)
                rows_.push_back({row, r, std::min(context, seen)});
        }
    }
    masses_.resize(rows_.size() * num_heads_ * table_width_);
}

void SelectedKeys::select(const KvMemory& kv, int threads) {
    const Batch& dense = *step_;
    key_indices_.assign(dense.key_indices, dense.key_indices + dense.num_tokens);
    limits_.resize(dense.num_tokens);
    for (int row = 0; row < dense.num_tokens; row++) limits_[row] = dense.limit(row);
    query_starts_.clear();
    context_lens_.clear();
    tables_.clear();
    size_t next = 0;
    for (int r = 0; r < dense.num_requests; r++) {
        const size_t first = next;
        while (next < rows_.size() && rows_[next].request == r) next++;
        const int end = next > first ? rows_[first].row : dense.query_starts[r + 1];
        add_dense_rows(dense, r, end - dense.query_starts[r]);
        for (size_t i = first; i < next; i++) add_sparse_row(static_cast<int>(i));
    }
    query_starts_.push_back(dense.num_tokens);
    batch_ = dense;
    batch_.num_requests = static_cast<int>(context_lens_.size());
    batch_.key_indices = key_indices_.data();
    batch_.limits = limits_.data();
    batch_.query_starts = query_starts_.data();
    batch_.context_lens = context_lens_.data();
    batch_.block_tables = tables_.data();
    const int group = std::exchange(plan_.group, 0);
    plan_.make(batch_, kv.group(group), threads, false);
    plan_.group = group;
    const size_t bytes = plan_.partial_floats * sizeof(float);
    if (!partials_ || partials_->size() < bytes) partials_ = std::make_unique<Memory>(bytes);
}

std::vector<int32_t> SelectedKeys::blocks_read() const {
    const bool is_dense = rows_.empty();
    const Batch& batch = is_dense ? *step_ : batch_;
    const int64_t first = is_dense ? static_cast<int64_t>(plan_.group) * batch.num_requests : 0;
    std::vector<int32_t> found;
    for (int r = 0; r < batch.num_requests; r++) {
        if (batch.query_starts[r] == batch.query_starts[r + 1]) continue;
        const int32_t* table = batch.block_tables + (first + r) * batch.table_width;
        found.insert(found.end(), table, table + (batch.context_lens[first + r] + kTile - 1) / kTile);
    }
    return found;
}

void SelectedKeys::add_request(int first_row, int context) {
    query_starts_.push_back(first_row);
    context_lens_.push_back(context);
    tables_.resize(context_lens_.size() * table_width_);
}

// Adds the first `num_rows` rows of a request, which read all of its blocks; sparse rows come after them.
void SelectedKeys::add_dense_rows(const Batch& dense, int request, int num_rows) {
    if (!num_rows) return;
    const int64_t at = static_cast<int64_t>(plan_.group) * dense.num_requests + request;
    add_request(dense.query_starts[request], dense.context_lens[at]);
    std::copy_n(dense.block_tables + at * table_width_, table_width_, tables_.end() - table_width_);
}

const int32_t* SelectedKeys::block_table_at(int index) const {
    return step_->block_tables +
           (static_cast<int64_t>(plan_.group) * step_->num_requests + rows_[index].request) * table_width_;
}

std::vector<int32_t> SelectedKeys::blocks_by_mass() {
    std::vector<int32_t> found;
    for (int index = 0; index < num_rows(); index++) {
        select_blocks(index);
        for (const int32_t block : chosen_) found.push_back(block_table_at(index)[block]);
    }
    return found;
}

// Selects a row's blocks, in ascending order.
void SelectedKeys::select_blocks(int index) {
    const int blocks = (rows_[index].num_keys + kTile - 1) / kTile, chosen = count(budget_, blocks);
    chosen_.resize(blocks);
    std::iota(chosen_.begin(), chosen_.end(), 0);
    if (chosen < blocks) {
        sums_.assign(blocks, 0);
        for (int head = 0; head < num_heads_; head++)
            for (int b = 0; b < blocks; b++) sums_[b] += masses(index, head)[b];
        sums_[0] = std::numeric_limits<float>::infinity();
        for (int b = std::max(0, blocks - kLastBlocks); b < blocks; b++)
            sums_[b] = std::numeric_limits<float>::infinity();
        std::nth_element(chosen_.begin(), chosen_.begin() + chosen, chosen_.end(), [&](int32_t a, int32_t b) {
            return sums_[a] != sums_[b] ? sums_[a] > sums_[b] : a < b;
        });
        chosen_.resize(chosen);
        std::sort(chosen_.begin(), chosen_.end());
    }
}

// The last block is always read, as far as the row's mask allows, so the key index of the row among the
// selected keys is known.
void SelectedKeys::add_sparse_row(int index) {
    const Row& row = rows_[index];
    select_blocks(index);
    const int blocks = (row.num_keys + kTile - 1) / kTile, chosen = static_cast<int>(chosen_.size());
    const int num_keys = row.num_keys - (blocks - chosen) * kTile;
    add_request(row.row, num_keys);
    int32_t* to = &*(tables_.end() - table_width_);
    for (int i = 0; i < chosen; i++) to[i] = block_table_at(index)[chosen_[i]];
    key_indices_[row.row] = num_keys - 1;
    limits_[row.row] = num_keys;
}

}  // namespace octavo
