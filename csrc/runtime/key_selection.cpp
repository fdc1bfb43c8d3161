#include "key_selection.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace octavo {

SelectedKeys::SelectedKeys(AttentionPlan plan, double budget) : plan_(std::move(plan)), budget_(budget) {}

int SelectedKeys::count(double budget, int num_blocks) {
    return std::min(num_blocks, std::max(kLeast, static_cast<int>(std::ceil(budget * num_blocks))));
}

void SelectedKeys::begin(const Batch& batch, const KvMemory& kv, const uint8_t* is_sparse, bool of_earlier) {
    step_ = &batch;
    num_heads_ = kv.group(plan_.group).num_heads;
    table_width_ = batch.table_width;
    rows_.clear();
    for (int r = 0; r < batch.num_requests; r++) {
        const int context = batch.context_lens[static_cast<int64_t>(plan_.group) * batch.num_requests + r];
        for (int row = batch.query_starts[r]; row < batch.query_starts[r + 1]; row++) {
            const int seen = of_earlier ? batch.places[batch.query_starts[r]] : batch.places[row] + 1;
            if (is_sparse[row] && std::min(context, seen) > 0)
                rows_.push_back({row, r, std::min(context, seen)});
        }
    }
    masses_.resize(rows_.size() * num_heads_ * table_width_);
}

void SelectedKeys::choose(const KvMemory& kv, int threads) {
    const Batch& whole = *step_;
    places_.assign(whole.places, whole.places + whole.num_tokens);
    limits_.resize(whole.num_tokens);
    for (int row = 0; row < whole.num_tokens; row++) limits_[row] = whole.limit(row);
    query_starts_.clear();
    context_lens_.clear();
    tables_.clear();
    size_t next = 0;
    for (int r = 0; r < whole.num_requests; r++) {
        const size_t first = next;
        while (next < rows_.size() && rows_[next].request == r) next++;
        const int end = next > first ? rows_[first].row : whole.query_starts[r + 1];
        add_whole(whole, r, end - whole.query_starts[r]);
        for (size_t i = first; i < next; i++) add_row(static_cast<int>(i));
    }
    query_starts_.push_back(whole.num_tokens);
    batch_ = whole;
    batch_.num_requests = static_cast<int>(context_lens_.size());
    batch_.places = places_.data();
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
    const bool is_whole = rows_.empty();
    const Batch& batch = is_whole ? *step_ : batch_;
    const int64_t first = is_whole ? static_cast<int64_t>(plan_.group) * batch.num_requests : 0;
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

// Adds the rows of a request that read all of its blocks; they come before its sparse ones.
void SelectedKeys::add_whole(const Batch& whole, int request, int num_rows) {
    if (!num_rows) return;
    const int64_t at = static_cast<int64_t>(plan_.group) * whole.num_requests + request;
    add_request(whole.query_starts[request], whole.context_lens[at]);
    std::copy_n(whole.block_tables + at * table_width_, table_width_, tables_.end() - table_width_);
}

const int32_t* SelectedKeys::table_of(int index) const {
    return step_->block_tables +
           (static_cast<int64_t>(plan_.group) * step_->num_requests + rows_[index].request) * table_width_;
}

std::vector<int32_t> SelectedKeys::blocks_wanted() {
    std::vector<int32_t> found;
    for (int index = 0; index < num_rows(); index++) {
        order_blocks(index);
        for (const int32_t block : order_) found.push_back(table_of(index)[block]);
    }
    return found;
}

// Chooses a row's blocks, in their order.
void SelectedKeys::order_blocks(int index) {
    const int blocks = (rows_[index].num_keys + kTile - 1) / kTile, chosen = count(budget_, blocks);
    order_.resize(blocks);
    std::iota(order_.begin(), order_.end(), 0);
    if (chosen < blocks) {
        sums_.assign(blocks, 0);
        for (int head = 0; head < num_heads_; head++)
            for (int b = 0; b < blocks; b++) sums_[b] += masses(index, head)[b];
        sums_[0] = std::numeric_limits<float>::infinity();
        for (int b = std::max(0, blocks - kLast); b < blocks; b++)
            sums_[b] = std::numeric_limits<float>::infinity();
        std::nth_element(order_.begin(), order_.begin() + chosen, order_.end(), [&](int32_t a, int32_t b) {
            return sums_[a] != sums_[b] ? sums_[a] > sums_[b] : a < b;
        });
        order_.resize(chosen);
        std::sort(order_.begin(), order_.end());
    }
}

// The last block is read as far as the row sees it, so its place among what it reads is known.
void SelectedKeys::add_row(int index) {
    const Row& row = rows_[index];
    order_blocks(index);
    const int blocks = (row.num_keys + kTile - 1) / kTile, chosen = static_cast<int>(order_.size());
    const int num_keys = row.num_keys - (blocks - chosen) * kTile;
    add_request(row.row, num_keys);
    int32_t* to = &*(tables_.end() - table_width_);
    for (int i = 0; i < chosen; i++) to[i] = table_of(index)[order_[i]];
    places_[row.row] = num_keys - 1;
    limits_[row.row] = num_keys;
}

}  // namespace octavo
