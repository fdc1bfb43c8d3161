#include "decode_batch.h"

#include <algorithm>
#include <stdexcept>

namespace octavo {

namespace {

template <typename T>
std::vector<T> copy(const T* from, size_t count) {
    return {from, from + count};
}

void check(const Batch& b, int num_groups, int num_steps) {
    const auto fail = [](const char* what) { throw std::invalid_argument(what); };
    if (!b.has_sampling || b.num_tokens != b.num_requests || b.num_samples < b.num_requests)
        fail("decode steps: a request does not have one row, or is not sampled");
    if (b.input_rows || b.limits) fail("decode steps: input rows, or rows that attend to later keys");
    for (int r = 0; r < b.num_requests; r++)
        if (b.query_starts[r] != r || b.sample_rows[r] != r)
            fail("decode steps: the rows are not in the order of the requests");
    for (int s = b.num_requests; s < b.num_samples; s++)
        if (b.sampling.records[s].target_id < 0) fail("decode steps: a request is sampled twice");
    for (int i = 0; i < num_groups * b.num_requests; i++)
        if (b.slots[i] >= 0 && b.context_lens[i] + num_steps - 1 > b.table_width * kTile)
            fail("decode steps: a block table ends before the last step");
}

}  // namespace

DecodeBatch::DecodeBatch(const Batch& first, int num_groups, int num_steps, const EndTokens& ends)
    : batch_(first), num_groups_(num_groups), ends_(ends) {
    check(first, num_groups, num_steps);
    const size_t num = first.num_requests, samples = first.num_samples;
    const size_t history = first.sampling.history_starts[samples];
    token_ids_ = copy(first.token_ids, num);
    key_indices_ = copy(first.key_indices, num);
    positions_ = copy(first.positions, num * first.num_axes);
    context_lens_ = copy(first.context_lens, num * num_groups);
    slots_ = copy(first.slots, num * num_groups);
    records_ = copy(first.sampling.records, samples);
    history_starts_ = copy(first.sampling.history_starts, samples + 1);
    history_ids_ = copy(first.sampling.history_ids, history);
    history_counts_ = copy(first.sampling.history_counts, history);
    batch_.token_ids = token_ids_.data();
    batch_.key_indices = key_indices_.data();
    batch_.positions = positions_.data();
    batch_.context_lens = context_lens_.data();
    batch_.slots = slots_.data();
    batch_.sampling.records = records_.data();
    batch_.sampling.history_starts = history_starts_.data();
}

bool DecodeBatch::advance() {
    if (any_ended()) return false;
    for (int r = 0; r < batch_.num_requests; r++) {
        const int32_t token = batch_.sampling.out_ids[r];
        token_ids_[r] = token;
        advance_request(r);
        count(r, token);
    }
    for (SamplingRecord& record : records_) record.position++;
    batch_.sampling.history_ids = history_ids_.data();
    batch_.sampling.history_counts = history_counts_.data();
    next_results();
    return true;
}

void DecodeBatch::set_sampling_inputs(const SampleArgs& sampling) {
    batch_.sampling.bias_starts = sampling.bias_starts;
    batch_.sampling.bias_ids = sampling.bias_ids;
    batch_.sampling.bias_values = sampling.bias_values;
    for (int r = 0; r < batch_.num_requests; r++) records_[r].mirostat_mu = sampling.records[r].mirostat_mu;
}

bool DecodeBatch::any_ended() const {
    for (int r = 0; r < batch_.num_requests; r++) {
        const int32_t *first = ends_.ids + ends_.starts[r], *last = ends_.ids + ends_.starts[r + 1];
        if (batch_.sampling.out_failed[r] || std::find(first, last, batch_.sampling.out_ids[r]) != last)
            return true;
    }
    return false;
}

// Advances a request by one token in every group that it writes, and by one position on every axis, as
// generated text does.
void DecodeBatch::advance_request(int request) {
    const int num = batch_.num_requests;
    for (int axis = 0; axis < batch_.num_axes; axis++) positions_[axis * num + request]++;
    const int key_index = ++key_indices_[request];
    for (int group = 0; group < num_groups_; group++) {
        const int i = group * num + request;
        if (slots_[i] < 0) continue;
        context_lens_[i]++;
        slots_[i] =
            batch_.block_tables[static_cast<int64_t>(i) * batch_.table_width + key_index / kTile] * kTile +
            key_index % kTile;
    }
}

// Counts a generated token in the history, which only requests with penalties have.
void DecodeBatch::count(int request, int32_t token) {
    if (!records_[request].has_penalty()) return;
    const auto first = history_ids_.begin() + history_starts_[request],
               last = history_ids_.begin() + history_starts_[request + 1];
    const auto at = std::find(first, last, token) - history_ids_.begin();
    if (at < history_starts_[request + 1]) {
        history_counts_[at]++;
        return;
    }
    history_ids_.insert(history_ids_.begin() + at, token);
    history_counts_.insert(history_counts_.begin() + at, 1);
    for (int s = request + 1; s <= batch_.num_samples; s++) history_starts_[s]++;
}

void DecodeBatch::next_results() {
    SampleArgs& s = batch_.sampling;
    const int num = batch_.num_samples;
    s.out_ids += num;
    s.out_failed += num;
    if (s.out_surprises) s.out_surprises += num;
    if (s.out_cutoff_proofs) s.out_cutoff_proofs += static_cast<int64_t>(num) * kMaxProofTokens;
    if (!s.out_logprobs) return;
    s.out_logprobs += num;
    s.out_ranks += num;
    s.out_top_ids += static_cast<int64_t>(num) * s.max_top;
    s.out_top_logprobs += static_cast<int64_t>(num) * s.max_top;
}

}  // namespace octavo
