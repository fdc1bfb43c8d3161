// Drawing one token from a row of logits. The rules, and their order, are those of backends/sampling.py,
// which tests hold this to.
//
// bias, bans and penalties; temperature (0: the best, lowest id first); min_p; top_k; top_p; then the inverse
// of the cumulative distribution over the kept tokens in id order, at a point that Philox4x32-10 gives
// (Salmon et al. 2011). Logprobs are of the raw logits.
#pragma once
#include <algorithm>
#include <cfloat>

#include "simd.h"
#include "table.h"

namespace octavo {
namespace {

struct Candidate {
    float logit, p;
    int32_t id;
};
inline bool better(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// Scratch: adjusted logits [V padded], probabilities [V padded], then candidates [V].
inline size_t padded_vocab(int vocab) { return ((size_t)vocab + 15) / 16 * 16; }
size_t sample_scratch_bytes(int vocab) {
    return padded_vocab(vocab) * (2 * sizeof(float) + sizeof(Candidate));
}

// Uniform in [0, 1), 53 bits.
double philox_uniform(uint64_t seed, uint32_t position, uint32_t sample_index, uint32_t draw) {
    uint32_t c[4] = {position, sample_index, draw, 0}, key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
        const uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ key[0], (uint32_t)b,
                                  (uint32_t)(a >> 32) ^ c[3] ^ key[1], (uint32_t)a};
        std::memcpy(c, next, sizeof c);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return (double)(((uint64_t)c[0] << 21) | (c[1] >> 11)) * 0x1p-53;
}

bool holds_nan(const float* x, int n) {
    vi bad = {};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const vf v = load(x + i);
        bad |= (vi)(v != v);
    }
    bool found = sum_lanes_i(bad) != 0;
    for (; i < n; i++) found |= x[i] != x[i];
    return found;
}

int best_id(const float* x, int n) {
    vf best = splat(-INFINITY);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) best = max(best, load(x + i));
    float value = max_lanes(best);
    for (; i < n; i++) value = std::max(value, x[i]);
    int id = 0;
    while (id < n - 1 && x[id] != value) id++;
    return id;
}

// -- logprobs of the raw logits --

double log_sum_exp(const float* x, int n, float largest) {
    double total = 0;
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) total += sum_lanes(exp(load(x + i) - largest));
    for (; i < n; i++) total += std::exp((double)x[i] - largest);
    return (double)largest + std::log(total);
}

void write_logprobs(const SampleArgs& a, int at, const float* x, int token, int wanted, Candidate* space) {
    const int best = best_id(x, a.vocab);
    const double normal = log_sum_exp(x, a.vocab, x[best]);
    int rank = 1;
    for (int id = 0; id < a.vocab; id++) rank += x[id] > x[token];
    a.out_logprobs[at] = (float)(x[token] - normal);
    a.out_ranks[at] = rank;
    const int top = std::min(wanted, a.vocab);
    if (top <= 0) return;
    for (int id = 0; id < a.vocab; id++) space[id] = Candidate{x[id], 0, id};
    std::partial_sort(space, space + top, space + a.vocab, better);
    for (int j = 0; j < top; j++) {
        a.out_top_ids[(int64_t)at * a.max_top + j] = space[j].id;
        a.out_top_logprobs[(int64_t)at * a.max_top + j] = (float)(space[j].logit - normal);
    }
}

// -- what changes the logits --

void change_logits(const SampleArgs& a, int at, float* z) {
    for (int i = a.bias_starts[at]; i < a.bias_starts[at + 1]; i++) z[a.bias_ids[i]] += a.bias_values[i];
    if (a.allowed[at] >= 0) {
        const uint8_t* mask = a.allowed_masks + (int64_t)a.allowed[at] * a.vocab;
        for (int id = 0; id < a.vocab; id++)
            if (!mask[id]) z[id] = -INFINITY;
    }
    for (int i = a.history_starts[at]; i < a.history_starts[at + 1]; i++) {
        float& value = z[a.history_ids[i]];
        value = value > 0 ? value / a.repetition[at] : value * a.repetition[at];
        if (a.history_counts[i] > 0) value -= a.presence[at] + a.frequency[at] * (float)a.history_counts[i];
    }
}

// -- the draw --

// The first token in id order whose cumulative probability exceeds `point` of the total.
int draw_dense(const float* p, int vocab, double point) {
    constexpr int kBlock = 256;
    double total = 0;
    const auto block_sum = [&](int from) {
        double sum = 0;
        for (int i = from; i < from + kBlock && i < vocab; i += kLanes) sum += sum_lanes(load(p + i));
        return sum;
    };
    for (int from = 0; from < vocab; from += kBlock) total += block_sum(from);
    const double goal = point * total;
    double sum = 0;
    int from = 0;
    for (; from + kBlock < vocab; from += kBlock) {
        const double next = sum + block_sum(from);
        if (next > goal) break;
        sum = next;
    }
    int last = -1;
    for (int id = from; id < vocab; id++) {
        if (p[id] <= 0) continue;
        last = id;
        sum += p[id];
        if (sum > goal) return id;
    }
    while (last < 0 && --from >= 0)
        if (p[from] > 0) last = from;
    return last;
}

int draw_among(Candidate* kept, int count, double point) {
    std::sort(kept, kept + count, [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    double total = 0, sum = 0;
    for (int i = 0; i < count; i++) total += kept[i].p;
    for (int i = 0; i < count; i++) {
        sum += kept[i].p;
        if (sum > point * total) return kept[i].id;
    }
    return kept[count - 1].id;
}

// How many of the best candidates reach `top_p` of their total; they are sorted as far as needed.
int keep_top_p(Candidate* kept, int count, float top_p) {
    double total = 0, sum = 0;
    for (int i = 0; i < count; i++) total += kept[i].p;
    int sorted = 0;
    for (int i = 0; i < count; i++) {
        if (i == sorted) {
            const int next = std::min(count, std::max(64, sorted * 4));
            std::partial_sort(kept + sorted, kept + next, kept + count, better);
            sorted = next;
        }
        sum += kept[i].p;
        if (sum >= (double)top_p * total) return i + 1;
    }
    return count;
}

int draw(const SampleArgs& a, int at, const float* z, float* p, Candidate* kept) {
    const float largest = z[best_id(z, a.vocab)], inverse = std::min(1.0f / a.temperatures[at], FLT_MAX);
    for (size_t i = 0; i < padded_vocab(a.vocab); i += kLanes)
        store(p + i, exp((load(z + i) - largest) * inverse));
    const double point = philox_uniform(a.seeds[at], a.positions[at], a.sample_indices[at], 0);
    const int top_k = a.top_ks[at];
    if (top_k <= 0 && a.top_ps[at] >= 1 && a.min_ps[at] <= 0) return draw_dense(p, a.vocab, point);
    int count = 0;
    for (int id = 0; id < a.vocab; id++)
        if (p[id] > 0 && p[id] >= a.min_ps[at]) kept[count++] = Candidate{z[id], p[id], id};
    if (top_k > 0 && top_k < count) {
        std::nth_element(kept, kept + top_k, kept + count, better);
        count = top_k;
    }
    if (a.top_ps[at] < 1) count = keep_top_p(kept, count, a.top_ps[at]);
    return draw_among(kept, count, point);
}

// Most logits are below the best by far: one look at all of them, and at each only where that fails (behind
// `width` lies anything).
void keep_best(const float* logits, int num_rows, int column, int width, Best* best) {
    for (int row = 0; row < num_rows; row++, logits += kGroup) {
        const vf least = splat(best[row].value);
        const vi below = (vi)(load(logits) < least) & (vi)(load(logits + kLanes) < least);
        if (any_lane(below ^ -1))
            for (int i = 0; i < width; i++) best[row].see(logits[i], column + i);
    }
}

void sample_row(const SampleArgs& a, int row, void* scratch) {
    const float* x = a.logits + row * a.stride;
    const int at = a.first + row;
    float *z = (float*)scratch, *p = z + padded_vocab(a.vocab);
    Candidate* space = (Candidate*)(p + padded_vocab(a.vocab));
    int token = a.targets[at];
    bool failed = holds_nan(x, a.vocab);
    if (token < 0 && !failed) {
        const bool greedy = a.temperatures[at] == 0, changed = a.changes_logits(at);
        if (changed || !greedy) {
            std::memcpy(z, x, sizeof(float) * a.vocab);
            for (size_t i = a.vocab; i < padded_vocab(a.vocab); i++) z[i] = -INFINITY;
        }
        if (changed) change_logits(a, at, z);
        const float* final_logits = changed ? z : x;
        token = best_id(final_logits, a.vocab);
        failed = !std::isfinite(final_logits[token]) || (changed && holds_nan(z, a.vocab));
        if (!failed && !greedy) token = draw(a, at, z, p, space);
    }
    a.out_failed[at] = failed;
    a.out_ids[at] = failed ? 0 : token;
    if (a.num_logprobs[at] >= 0 && !failed) write_logprobs(a, at, x, token, a.num_logprobs[at], space);
}

}  // namespace
}  // namespace octavo
