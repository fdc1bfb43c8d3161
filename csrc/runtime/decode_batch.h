// A batch of decoding requests that advances from step to step without Python: a row's sampled token is its
// next input. Sampled rows after those of the requests return logprobs of given tokens for the same rows.
//
// It owns copies of the data that changes between steps (tokens, key indices, positions, slots, contexts,
// sampling records, the history for penalties). Block tables cover the last step, and everything else is
// constant, except for sampling inputs that only Python can compute from the tokens
// (`set_sampling_inputs`).
#pragma once

#include <vector>

#include "step.h"

namespace octavo {

// Stop tokens of each request: ids[starts[r]] to ids[starts[r + 1] - 1].
struct EndTokens {
    const int32_t *starts, *ids;
};

class DecodeBatch {
  public:
    // `first` has one row per request, in order, and each is sampled. Step i writes its results from index
    // i * num_samples on. Throws invalid_argument if the batch differs from that, or if a block table ends
    // before the last of `num_steps`.
    DecodeBatch(const Batch& first, int num_groups, int num_steps, const EndTokens& ends);
    DecodeBatch(const DecodeBatch&) = delete;
    DecodeBatch& operator=(const DecodeBatch&) = delete;

    const Batch& batch() const { return batch_; }
    // Advances to the next step. Returns false and does nothing if a request has ended or failed.
    bool advance();
    // Sets the logit biases and mirostat bounds of the current step. The arrays must live until it is
    // computed.
    void set_sampling_inputs(const SampleArgs& sampling);

  private:
    bool any_ended() const;
    void advance_request(int request);
    void count(int request, int32_t token);
    void next_results();

    Batch batch_;
    const int num_groups_;
    const EndTokens ends_;
    std::vector<int32_t> token_ids_, key_indices_, positions_, context_lens_, slots_, history_starts_,
        history_ids_, history_counts_;
    std::vector<SamplingRecord> records_;
};

}  // namespace octavo
