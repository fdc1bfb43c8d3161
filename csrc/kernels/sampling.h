// Arguments and results of the sampling kernel.
#pragma once

#include <cmath>
#include <cstdint>

#include "sampling_fields.h"

namespace octavo {

// Parameters of one sampled row: SAMPLING_RECORD of executor/batch.py, which documents the fields. Python
// compares the offsets when it loads the library.
struct SamplingRecord {
#define OCTAVO_FIELD(type, name) type name;
#define OCTAVO_IS_ON(name, neutral) || name != neutral
    OCTAVO_SAMPLING_FIELDS(OCTAVO_FIELD)

    // Whether a filter depends on the tokens that the cut-offs keep.
    bool has_after_cutoff_filter() const { return false OCTAVO_AFTER_CUTOFF_FILTERS(OCTAVO_IS_ON); }
    // Whether a filter depends on more than the order of the tokens.
    bool has_filter() const { return has_after_cutoff_filter() OCTAVO_DISTRIBUTION_FILTERS(OCTAVO_IS_ON); }
#undef OCTAVO_FIELD
#undef OCTAVO_IS_ON
    bool has_penalty() const {
        return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0;
    }
};

// Upper bound on the candidates of a row.
constexpr int kMaxCandidates = 8;

// Upper bound on the tokens of a cut-off proof, the sampled token included.
constexpr int kMaxProofTokens = 16;

// Fields of SamplingBatch and SampleResult of executor/batch.py; rules: executor/sampling.py. S sampled
// rows, A masks.
struct SampleArgs {
    const float* logits;  // [rows of this chunk][V]
    int64_t stride;
    int32_t vocab;
    int32_t first;  // index of the chunk's first row in the arrays below
    const SamplingRecord* records;
    const int32_t *history_starts, *history_ids, *history_counts;
    const int32_t *bias_starts, *bias_ids;
    const float* bias_values;
    const uint32_t* allowed_masks;  // [A][mask_words()], one bit per token
    int32_t *out_ids, *out_ranks, *out_top_ids;
    uint8_t* out_failed;
    float *out_logprobs, *out_top_logprobs;
    int32_t max_top;  // columns of out_top_*
    float* out_surprises;
    const float* const* replacement_logits;  // [S], logits to sample from instead of the row's own; or null
    int32_t* out_candidates;  // [S][num_candidates], the sampled token first, -1 after the last; or null
    int32_t num_candidates;  // at most kMaxCandidates
    const uint8_t*
        skips_cutoffs;  // [S], whether a row is sampled without its cut-offs and gets a proof; or null
    int32_t* out_cutoff_proofs;  // [S][kMaxProofTokens], not null if `skips_cutoffs` is set

    int mask_words() const { return (vocab + 31) / 32; }

    bool changes_logits(int at) const {
        return bias_starts[at + 1] > bias_starts[at] || records[at].allowed_mask >= 0 ||
               records[at].has_penalty();
    }
    bool defers_cutoffs(int at) const {
        return skips_cutoffs && skips_cutoffs[at] && records[at].temperature != 0;
    }
    // Whether row `at` takes its largest logit and uses no other.
    bool is_greedy(int at) const {
        const SamplingRecord& r = records[at];
        return r.target_id < 0 && r.temperature == 0 && r.num_logprobs < 0 && !changes_logits(at);
    }
};

// The largest of a row's logits so far, the lowest id among equals, and whether a logit was NaN.
struct BestLogit {
    float value = -INFINITY;
    int32_t id = 0;
    bool has_nan = false;

    void update(float logit, int32_t at) {
        has_nan |= logit != logit;
        if (logit > value || (logit == value && at < id)) value = logit, id = at;
    }
    void update(const BestLogit& other) {
        update(other.value, other.id);
        has_nan |= other.has_nan;
    }
    bool failed() const { return has_nan || !std::isfinite(value); }
};

}  // namespace octavo
