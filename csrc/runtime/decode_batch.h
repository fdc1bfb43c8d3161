// A batch of requests that all decode, advanced from step to step without Python: the token that a row draws
// is its next one. Behind the draws may stand tokens whose logprobs are wanted after the same rows.
//
// It owns copies of what changes between steps (tokens, places, positions, slots, contexts, sampling records,
// the history that penalties count). Block tables reach beyond the last step, and the rest stays as it is, but
// for what follows from the tokens by rules that only Python knows (`follow`).
#pragma once

#include <vector>

#include "step.h"

namespace octavo {

// Tokens that end each request: ids[starts[r]] to ids[starts[r + 1] - 1].
struct EndTokens {
    const int32_t *starts, *ids;
};

class DecodeBatch {
  public:
    // `first` has one row for each request, in order, and each draws. Step i writes its results from index i
    // * num_samples on. Throws invalid_argument where the batch is another, or a block table ends before the
    // last of `num_steps`.
    DecodeBatch(const Batch& first, int num_groups, int num_steps, const EndTokens& ends);
    DecodeBatch(const DecodeBatch&) = delete;
    DecodeBatch& operator=(const DecodeBatch&) = delete;

    const Batch& batch() const { return batch_; }
    // Advances to the next step. Returns false, and does nothing, where a request has ended or failed.
    bool advance();
    // Takes over what is added to logits, and the bounds of mirostat, for the step to which it has advanced.
    // The arrays must live until that step is computed.
    void follow(const SampleArgs& sampling);

  private:
    bool any_ended() const;
    void place(int request);
    void count(int request, int32_t token);
    void next_results();

    Batch batch_;
    const int num_groups_;
    const EndTokens ends_;
    std::vector<int32_t> token_ids_, places_, positions_, context_lens_, slots_, history_starts_,
        history_ids_, history_counts_;
    std::vector<SamplingRecord> records_;
};

}  // namespace octavo
