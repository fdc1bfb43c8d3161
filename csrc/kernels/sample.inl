// Drawing one token from a row of logits. The rules, and their order, are those of executor/sampling.py,
// which tests hold this to: bias, bans and penalties; at temperature 0 the best; else the filters (filters.inl
// and cuts.inl), then the largest sum of (logit - best logit) / temperature and the token's noise. Logprobs
// are of the raw logits.
#pragma once
#include <algorithm>
#include <cfloat>

#include "../simd/simd.h"
#include "cuts.inl"
#include "filters.inl"
#include "noise.inl"
#include "table.h"
#include "witnesses.inl"

namespace octavo {
namespace {

// Scratch: changed logits [V], then candidates [V].
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

// Place of `token` in the order (logit down, id up), from 1.
int rank_of(const float* x, int n, int token) {
    const float logit = x[token];
    int rank = 1;
    for (int id = 0; id < token; id++) rank += x[id] >= logit;
    for (int id = token + 1; id < n; id++) rank += x[id] > logit;
    return rank;
}

void write_logprobs(const SampleArgs& a, int at, const float* x, int token, Candidate* space) {
    const double normal = log_sum_exp(x, a.vocab, x[best_id(x, a.vocab)]);
    a.out_logprobs[at] = static_cast<float>(x[token] - normal);
    a.out_ranks[at] = rank_of(x, a.vocab, token);
    const int top = std::min(a.records[at].num_logprobs, a.vocab);
    if (top <= 0) return;
    best_of(x, a.vocab, top, space);
    std::sort(space, space + top, better);
    for (int j = 0; j < top; j++) {
        a.out_top_ids[static_cast<int64_t>(at) * a.max_top + j] = space[j].id;
        a.out_top_logprobs[static_cast<int64_t>(at) * a.max_top + j] =
            static_cast<float>(space[j].logit - normal);
    }
}

// -- what changes the logits --

// Bans those of the 32 tokens from `first` on whose bit is not set. Most words hold no token, or all.
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

// -- the draw --

// The tokens with the largest sums of distance and noise so far, best first, and what another needs to come
// among them.
class Leaders {
  public:
    Leaders(const Row& row, Candidate last, int wanted)
        : row_(row),
          last_(last),
          wanted_(wanted),
          largest_(row.z[row.best]),
          slope_(static_cast<float>(
              std::min(kOctave / (row.record.temperature * std::log(2.0)), static_cast<double>(FLT_MAX)))) {
        lead(row.best, gumbel(noise_word(row.record, row.best)));
    }

    int id() const { return ids_[0]; }
    int count() const { return count_; }
    const int32_t* ids() const { return ids_; }

    // A logit below it cannot lead, whatever its noise.
    float least_logit() const { return least_logit_; }

    // Whether logits may lead with these words as their noise; seldom true where `see` then is not. The noise
    // exceeds x only where 1 - u < e^-x. Instead of logarithms of 1 - u the bits of a float are compared:
    // read as a number they are its logarithm to base 2, at most 0.09 too small, in units of kOctave.
    OCTAVO_INLINE vi may_lead(vf z, vi words) const {
        const vi rest = ((words ^ -1) >> 1) & 0x7FFFFFFF;
        const vf logarithm = to_float(as_int(to_float(rest)));
        return logarithm < fma(z - splat(largest_), splat(slope_), splat(limit_));
    }

    void see(int id, uint32_t word) {
        const float logit = row_.z[id];
        if (id == row_.best || better(last_, Candidate{logit, id}) || row_.weight(logit) < row_.record.min_p)
            return;
        const double score = row_.distance(logit) + gumbel(word);
        if (count_ < wanted_ || comes_before(score, id, count_ - 1)) lead(id, score);
    }

  private:
    static constexpr double kOctave = 1 << 23;

    bool comes_before(double score, int id, int place) const {
        return score > scores_[place] || (score == scores_[place] && id < ids_[place]);
    }

    void lead(int id, double score) {
        int place = count_ < wanted_ ? count_++ : wanted_ - 1;
        for (; place > 0 && comes_before(score, id, place - 1); place--) {
            ids_[place] = ids_[place - 1];
            scores_[place] = scores_[place - 1];
        }
        ids_[place] = id;
        scores_[place] = score;
        bound();
    }

    void bound() {
        limit_ = FLT_MAX;
        least_logit_ = last_.logit;
        if (count_ < wanted_) return;
        const double score = scores_[count_ - 1];
        // `rest` is (1 - u) * 2^31, rounded down; a float's exponent counts from -127. The last term is more
        // than what rounding takes.
        limit_ = static_cast<float>((31 + 127 - score / std::log(2.0) + 0x1p-10) * kOctave);
        const double least = row_.z[row_.best] + (score - kLargestNoise) * row_.record.temperature;
        least_logit_ = std::max(last_.logit, rounded_down(least));
    }

    const Row& row_;
    const Candidate last_;
    const int wanted_;
    const float largest_, slope_;
    int count_ = 0;
    int32_t ids_[kMostCandidates];
    double scores_[kMostCandidates];
    float limit_, least_logit_;
};

// Tokens `from` and on, RowNoise::kTokens of them, whose logits are z.
OCTAVO_INLINE void see_tokens(const RowNoise& noise, Leaders& leaders, const float* z, int from) {
    constexpr int kTokens = RowNoise::kTokens;
    const vf least = splat(leaders.least_logit());
    vi any = {};
    for (int i = 0; i < kTokens; i += kLanes) any |= load(z + i) >= least;
    if (!any_lane(any)) return;
    uint32_t words[kTokens];
    noise.write(from, words);
    int32_t leads[kTokens];
    any = vi{};
    for (int i = 0; i < kTokens; i += kLanes) {
        const vi some = leaders.may_lead(load(z + i), load_i(words + i));
        store_i(leads + i, some);
        any |= some;
    }
    if (!any_lane(any)) return;
    for (int i = 0; i < kTokens; i++)
        if (leads[i]) leaders.see(from + i, words[i]);
}

Leaders draw(const Row& row, Candidate* space, int wanted) {
    constexpr int kTokens = RowNoise::kTokens;
    const RowNoise noise(row.record);
    Leaders leaders(row, last_kept(row, space), wanted);
    int from = 0;
    for (; from + kTokens <= row.vocab; from += kTokens) see_tokens(noise, leaders, row.z + from, from);
    if (from < row.vocab) {
        float rest[kTokens];
        std::fill(rest, rest + kTokens, -INFINITY);
        std::memcpy(rest, row.z + from, sizeof(float) * (row.vocab - from));
        see_tokens(noise, leaders, rest, from);
    }
    return leaders;
}

// Draws like `draw` where a filter looks at the whole distribution; z is overwritten.
int draw_filtered(const SampleArgs& a, int at, float* z, Candidate* space) {
    SamplingRecord record = a.records[at];
    filter_whole(record, z, a.vocab, space);
    if (record.looks_at_kept()) filter_kept(record, z, a.vocab, space);
    const Row row{record, z, a.vocab, best_id(z, a.vocab)};
    const int token = draw(row, space, 1).id();
    if (record.mirostat_mode) a.out_surprises[at] = static_cast<float>(surprise_of(row, token));
    return token;
}

// Most logits are below the best by far: one look at all of them, and at each only where that fails (columns
// from `width` on hold anything).
void keep_best(const float* logits, int num_rows, int column, int width, Best* best) {
    for (int row = 0; row < num_rows; row++, logits += kGroup) {
        const vf least = splat(best[row].value);
        const vi below = (load(logits) < least) & (load(logits + kLanes) < least);
        if (any_lane(below ^ -1))
            for (int i = 0; i < width; i++) best[row].see(logits[i], column + i);
    }
}

// Writes the tokens of the largest logits, as draws at temperature 0 take them; returns how many there are.
int best_tokens(const float* z, int vocab, int wanted, Candidate* space, int32_t* ids) {
    const int found = best_of(z, vocab, std::min(wanted, vocab), space);
    std::sort(space, space + found, better);
    int count = 0;
    while (count < found && space[count].logit > -INFINITY) {
        ids[count] = space[count].id;
        count++;
    }
    return count;
}

// Draws the row at `at` from z, whose best logit is that of `best`, and writes its candidates where they are
// wanted.
int draw_in_order(const SampleArgs& a, int at, const float* z, int best, Candidate* space) {
    const SamplingRecord& record = a.records[at];
    const Row row{record, z, a.vocab, best};
    if (!a.out_candidates) return record.temperature == 0 ? best : draw(row, space, 1).id();
    int32_t* ids = a.out_candidates + static_cast<int64_t>(at) * a.num_candidates;
    std::fill(ids, ids + a.num_candidates, -1);
    if (record.temperature == 0) {
        best_tokens(z, a.vocab, a.num_candidates, space, ids);
        return best;
    }
    const Leaders leaders = draw(row, space, a.num_candidates);
    std::copy(leaders.ids(), leaders.ids() + leaders.count(), ids);
    return leaders.id();
}

// Draws the row at `at` from z without its cuts, and writes what shows that these keep the token.
int draw_uncut(const SampleArgs& a, int at, const float* z, int best, Candidate* space) {
    SamplingRecord uncut = a.records[at];
    uncut.min_p = 0;
    uncut.top_k = 0;
    uncut.top_p = 1;
    const int token = draw(Row{uncut, z, a.vocab, best}, space, 1).id();
    write_witnesses(Row{a.records[at], z, a.vocab, best}, token,
                    a.out_witnesses + static_cast<int64_t>(at) * kMostWitnesses);
    return token;
}

void sample_row(const SampleArgs& a, int row, void* scratch) {
    const float* x = a.logits + row * a.stride;
    const int at = a.first + row;
    const SamplingRecord& record = a.records[at];
    float* z = static_cast<float*>(scratch);
    Candidate* space = reinterpret_cast<Candidate*>(z + padded_vocab(a.vocab));
    const float* given = a.replaced && a.replaced[at] ? a.replaced[at] : x;
    int token = record.target_id;
    bool failed = holds_nan(given, a.vocab);
    if (token < 0 && !failed) {
        const bool changed = a.changes_logits(at),
                   filtered = record.temperature != 0 && record.looks_at_all();
        if (changed || filtered) std::memcpy(z, given, sizeof(float) * a.vocab);
        if (changed) change_logits(a, at, z);
        const float* logits = changed ? z : given;
        token = best_id(logits, a.vocab);
        failed = !std::isfinite(logits[token]) || (changed && holds_nan(z, a.vocab));
        if (!failed && filtered)
            token = draw_filtered(a, at, z, space);
        else if (!failed)
            token = a.leaves_cuts(at) ? draw_uncut(a, at, logits, token, space)
                                      : draw_in_order(a, at, logits, token, space);
    }
    a.out_failed[at] = failed;
    a.out_ids[at] = failed ? 0 : token;
    if (record.num_logprobs >= 0 && !failed) write_logprobs(a, at, x, token, space);
}

}  // namespace
}  // namespace octavo
