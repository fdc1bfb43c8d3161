// Samples one token from a row of logits. The rules and their order are those of executor/sampling.py, and
// tests compare both: bias, bans and penalties; argmax at temperature 0; otherwise filters (filters.inl,
// cutoffs.inl), then the largest sum of (logit - best logit) / temperature and the token's noise. Logprobs
// are those of the raw logits.
#pragma once
#include <algorithm>

#include "../simd/simd.h"
#include "cutoff_proof.inl"
#include "cutoffs.inl"
#include "filters.inl"
#include "noise.inl"
#include "table.h"

namespace octavo {
namespace {

// Scratch: modified logits [V], then candidates [V].
inline size_t padded_vocab(int vocab) { return (static_cast<size_t>(vocab) + 15) / 16 * 16; }
size_t sample_scratch_bytes(int vocab) { return padded_vocab(vocab) * (sizeof(float) + sizeof(Candidate)); }

bool holds_nan(const float* x, int n) {
    vi bad = {};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const vf v = load(x + i);
        bad |= v != v;
    }
    bool found = sum_lanes_i(bad) != 0;
    for (; i < n; i++) found |= x[i] != x[i];
    return found;
}

// -- logprobs of the raw logits --

double log_sum_exp(const float* x, int n, float largest) {
    double total = 0;
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) total += sum_lanes(exp(load(x + i) - largest));
    for (; i < n; i++) total += std::exp(static_cast<double>(x[i]) - largest);
    return static_cast<double>(largest) + std::log(total);
}

// Returns the rank of `token` in the order (logit down, id up), from 1.
int logit_rank(const float* x, int n, int token) {
    const float logit = x[token];
    int rank = 1;
    for (int id = 0; id < token; id++) rank += x[id] >= logit;
    for (int id = token + 1; id < n; id++) rank += x[id] > logit;
    return rank;
}

void write_logprobs(const SampleArgs& a, int at, const float* x, int token, Candidate* space) {
    const double normal = log_sum_exp(x, a.vocab, x[best_id(x, a.vocab)]);
    a.out_logprobs[at] = static_cast<float>(x[token] - normal);
    a.out_ranks[at] = logit_rank(x, a.vocab, token);
    const int top = std::min(a.records[at].num_logprobs, a.vocab);
    if (top <= 0) return;
    select_top(x, a.vocab, top, space);
    std::sort(space, space + top, better);
    for (int j = 0; j < top; j++) {
        a.out_top_ids[static_cast<int64_t>(at) * a.max_top + j] = space[j].id;
        a.out_top_logprobs[static_cast<int64_t>(at) * a.max_top + j] =
            static_cast<float>(space[j].logit - normal);
    }
}

// -- changes of the logits --

// Bans those of the 32 tokens from `first` on whose bit is not set. Most words are all zeros or all ones.
void ban_others(float* z, int first, int vocab, uint32_t allowed) {
    const int end = std::min(vocab, first + 32);
    if (allowed == 0) std::fill(z + first, z + end, -INFINITY);
    if (allowed == 0 || allowed == ~0u) return;
    for (int id = first; id < end; id++)
        if (!(allowed >> (id - first) & 1)) z[id] = -INFINITY;
}

void change_logits(const SampleArgs& a, int at, float* z) {
    const SamplingRecord& record = a.records[at];
    for (int i = a.bias_starts[at]; i < a.bias_starts[at + 1]; i++) z[a.bias_ids[i]] += a.bias_values[i];
    if (record.allowed_mask >= 0) {
        const uint32_t* mask = a.allowed_masks + static_cast<int64_t>(record.allowed_mask) * a.mask_words();
        for (int word = 0; word < a.mask_words(); word++) ban_others(z, 32 * word, a.vocab, mask[word]);
    }
    for (int i = a.history_starts[at]; i < a.history_starts[at + 1]; i++) {
        float& value = z[a.history_ids[i]];
        value = value > 0 ? value / record.repetition_penalty : value * record.repetition_penalty;
        if (a.history_counts[i] > 0)
            value -=
                record.presence_penalty + record.frequency_penalty * static_cast<float>(a.history_counts[i]);
    }
}

// -- sampling --

// The tokens with the largest sums of distance and noise so far, best first, and the bounds that another
// token has to exceed.
class GumbelTopK {
  public:
    GumbelTopK(const Row& row, Candidate last, int wanted)
        : row_(row),
          last_(last),
          wanted_(wanted),
          largest_(row.z[row.best]),
          slope_(static_cast<float>(std::min(kOctave / (row.record.temperature * std::log(2.0)),
                                             static_cast<double>(kLargestFloat)))) {
        insert(row.best, gumbel(noise_word(row.record, row.best)));
    }

    int id() const { return ids_[0]; }
    int count() const { return count_; }
    const int32_t* ids() const { return ids_; }

    // A token with a smaller logit cannot enter, whatever its noise.
    float min_logit() const { return min_logit_; }

    // Whether logits with these noise words may enter; `consider` decides. Rarely true otherwise. The noise
    // exceeds x only if 1 - u < e^-x. Instead of logarithms of 1 - u, the bits of a float are compared: as
    // an integer they are its logarithm to base 2 in units of kOctave, at most 0.09 too small.
    OCTAVO_INLINE vi may_enter(vf z, vi words) const {
        const vi rest = ((words ^ -1) >> 1) & 0x7FFFFFFF;
        const vf logarithm = to_float(as_int(to_float(rest)));
        return logarithm < fma(z - splat(largest_), splat(slope_), splat(limit_));
    }

    void consider(int id, uint32_t word) {
        const float logit = row_.z[id];
        if (id == row_.best || better(last_, Candidate{logit, id}) || row_.weight(logit) < row_.record.min_p)
            return;
        const double score = row_.distance(logit) + gumbel(word);
        if (count_ < wanted_ || comes_before(score, id, count_ - 1)) insert(id, score);
    }

  private:
    static constexpr double kOctave = 1 << 23;

    bool comes_before(double score, int id, int rank) const {
        return score > scores_[rank] || (score == scores_[rank] && id < ids_[rank]);
    }

    void insert(int id, double score) {
        int rank = count_ < wanted_ ? count_++ : wanted_ - 1;
        for (; rank > 0 && comes_before(score, id, rank - 1); rank--) {
            ids_[rank] = ids_[rank - 1];
            scores_[rank] = scores_[rank - 1];
        }
        ids_[rank] = id;
        scores_[rank] = score;
        update_bounds();
    }

    void update_bounds() {
        limit_ = kLargestFloat;
        min_logit_ = last_.logit;
        if (count_ < wanted_) return;
        const double score = scores_[count_ - 1];
        // `rest` is (1 - u) * 2^31, rounded down; the exponent bias of a float is 127. The last term is
        // larger than the rounding error.
        limit_ = static_cast<float>((31 + 127 - score / std::log(2.0) + 0x1p-10) * kOctave);
        const double threshold = row_.z[row_.best] + (score - kLargestNoise) * row_.record.temperature;
        min_logit_ = std::max(last_.logit, rounded_down(threshold));
    }

    const Row& row_;
    const Candidate last_;
    const int wanted_;
    const float largest_, slope_;
    int count_ = 0;
    int32_t ids_[kMaxCandidates];
    double scores_[kMaxCandidates];
    float limit_, min_logit_;
};

// Considers tokens from .. from + RowNoise::kTokens - 1, whose logits are z.
OCTAVO_INLINE void consider_tokens(const RowNoise& noise, GumbelTopK& top, const float* z, int from) {
    constexpr int kTokens = RowNoise::kTokens;
    const vf threshold = splat(top.min_logit());
    vi any = {};
    for (int i = 0; i < kTokens; i += kLanes) any |= load(z + i) >= threshold;
    if (!any_lane(any)) return;
    uint32_t words[kTokens];
    noise.write(from, words);
    int32_t may_enter_lanes[kTokens];
    any = vi{};
    for (int i = 0; i < kTokens; i += kLanes) {
        const vi some = top.may_enter(load(z + i), load_i(words + i));
        store_i(may_enter_lanes + i, some);
        any |= some;
    }
    if (!any_lane(any)) return;
    for (int i = 0; i < kTokens; i++)
        if (may_enter_lanes[i]) top.consider(from + i, words[i]);
}

GumbelTopK sample_tokens(const Row& row, Candidate* space, int wanted) {
    constexpr int kTokens = RowNoise::kTokens;
    const RowNoise noise(row.record);
    GumbelTopK top(row, last_kept(row, space), wanted);
    int from = 0;
    for (; from + kTokens <= row.vocab; from += kTokens) consider_tokens(noise, top, row.z + from, from);
    if (from < row.vocab) {
        float rest[kTokens];
        std::fill(rest, rest + kTokens, -INFINITY);
        std::memcpy(rest, row.z + from, sizeof(float) * (row.vocab - from));
        consider_tokens(noise, top, rest, from);
    }
    return top;
}

// Like sample_tokens, for rows with a filter over the whole distribution. Overwrites z.
int sample_filtered(const SampleArgs& a, int at, float* z, Candidate* space) {
    SamplingRecord record = a.records[at];
    filter_whole(record, z, a.vocab, space);
    if (record.has_after_cutoff_filter()) filter_kept(record, z, a.vocab, space);
    const Row row{record, z, a.vocab, best_id(z, a.vocab)};
    const int token = sample_tokens(row, space, 1).id();
    if (record.mirostat_mode) a.out_surprises[at] = static_cast<float>(surprise_bits(row, token));
    return token;
}

// Most logits are far below the best one: sixteen are compared at once, and one by one only if that fails.
// Columns from `width` on may hold anything.
void update_best(const float* logits, int num_rows, int column, int width, BestLogit* best) {
    for (int row = 0; row < num_rows; row++, logits += kGroup) {
        const vf threshold = splat(best[row].value);
        const vi below = (load(logits) < threshold) & (load(logits + kLanes) < threshold);
        if (any_lane(below ^ -1))
            for (int i = 0; i < width; i++) best[row].update(logits[i], column + i);
    }
}

// Writes the tokens with the largest logits in order, as sampling at temperature 0 orders them. Returns
// their number.
int best_tokens(const float* z, int vocab, int wanted, Candidate* space, int32_t* ids) {
    const int found = select_top(z, vocab, std::min(wanted, vocab), space);
    std::sort(space, space + found, better);
    int count = 0;
    while (count < found && space[count].logit > -INFINITY) {
        ids[count] = space[count].id;
        count++;
    }
    return count;
}

// Samples row `at` from z, whose largest logit is that of `best`, and writes its candidates if the caller
// wants them.
int sample_with_cutoffs(const SampleArgs& a, int at, const float* z, int best, Candidate* space) {
    const SamplingRecord& record = a.records[at];
    const Row row{record, z, a.vocab, best};
    if (!a.out_candidates) return record.temperature == 0 ? best : sample_tokens(row, space, 1).id();
    int32_t* ids = a.out_candidates + static_cast<int64_t>(at) * a.num_candidates;
    std::fill(ids, ids + a.num_candidates, -1);
    if (record.temperature == 0) {
        best_tokens(z, a.vocab, a.num_candidates, space, ids);
        return best;
    }
    const GumbelTopK top = sample_tokens(row, space, a.num_candidates);
    std::copy(top.ids(), top.ids() + top.count(), ids);
    return top.id();
}

// Samples row `at` from z without its cut-offs and writes the proof that they keep the token.
int sample_without_cutoffs(const SampleArgs& a, int at, const float* z, int best, Candidate* space) {
    SamplingRecord skips_cutoffs = a.records[at];
    skips_cutoffs.min_p = 0;
    skips_cutoffs.top_k = 0;
    skips_cutoffs.top_p = 1;
    const int token = sample_tokens(Row{skips_cutoffs, z, a.vocab, best}, space, 1).id();
    write_cutoff_proof(Row{a.records[at], z, a.vocab, best}, token,
                       a.out_cutoff_proofs + static_cast<int64_t>(at) * kMaxProofTokens);
    return token;
}

void sample_row(const SampleArgs& a, int row, void* scratch) {
    const float* x = a.logits + row * a.stride;
    const int at = a.first + row;
    const SamplingRecord& record = a.records[at];
    float* z = static_cast<float*>(scratch);
    Candidate* space = reinterpret_cast<Candidate*>(z + padded_vocab(a.vocab));
    const float* source = a.replacement_logits && a.replacement_logits[at] ? a.replacement_logits[at] : x;
    int token = record.target_id;
    bool failed = holds_nan(source, a.vocab);
    if (token < 0 && !failed) {
        const bool changed = a.changes_logits(at), filtered = record.temperature != 0 && record.has_filter();
        if (changed || filtered) std::memcpy(z, source, sizeof(float) * a.vocab);
        if (changed) change_logits(a, at, z);
        const float* logits = changed ? z : source;
        token = best_id(logits, a.vocab);
        failed = !std::isfinite(logits[token]) || (changed && holds_nan(z, a.vocab));
        if (!failed && filtered)
            token = sample_filtered(a, at, z, space);
        else if (!failed)
            token = a.defers_cutoffs(at) ? sample_without_cutoffs(a, at, logits, token, space)
                                         : sample_with_cutoffs(a, at, logits, token, space);
    }
    a.out_failed[at] = failed;
    a.out_ids[at] = failed ? 0 : token;
    if (record.num_logprobs >= 0 && !failed) write_logprobs(a, at, x, token, space);
}

}  // namespace
}  // namespace octavo
