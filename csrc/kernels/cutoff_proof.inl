// Cut-off proofs: whether the cut-offs of a row (min_p, top_k, top_p) keep a token that was sampled without
// them, whichever other tokens a grammar mask removes.
//
// A mask can only improve the token's rank. Let X be the unmasked weight of the tokens before it, and R the
// weight of tokens from it on that are known to be legal. If the legal part of X is x, the legal tokens
// weigh at least x + R, and top_p keeps the token if x < top_p * (x + R). This holds for every x <= X if X
// * (1 - top_p) < top_p * R.
#pragma once
#include <algorithm>
#include <cmath>

#include "../simd/simd.h"
#include "cutoffs.inl"
#include "table.h"

namespace octavo {
namespace {

// Safety margin, larger than the rounding error of the weights.
constexpr double kMargin = 1 + 1e-4;

// Tokens with a larger or equal logit, without the token itself.
struct Before {
    int count = 0;
    double weight = 0;
};
Before before(const Row& row, int token) {
    const float logit = row.z[token];
    Before found{.count = -1, .weight = -row.weight(logit)};
    for (int from = 0; from < row.vocab; from += kLanes) {
        const vf logits = row.logits(from);
        const vi first = logits >= splat(logit);
        if (!any_lane(first)) continue;
        found.count -= sum_lanes_i(first);
        found.weight += sum_lanes(select(first, row.weights(logits), vf{}));
    }
    return found;
}

// Writes the `wanted` largest logits below `bound` to `best` in descending order and returns their number.
int best_below(const Row& row, float bound, int wanted, Candidate* best) {
    int count = 0;
    float threshold = -INFINITY;
    for (int from = 0; from < row.vocab; from += kLanes) {
        const vf logits = row.logits(from);
        if (!any_lane((logits < splat(bound)) & (logits > splat(threshold)))) continue;
        for (int id = from; id < std::min(from + kLanes, row.vocab); id++) {
            if (!(row.z[id] < bound && row.z[id] > threshold)) continue;
            int rank = count < wanted ? count++ : wanted - 1;
            for (; rank > 0 && best[rank - 1].logit < row.z[id]; rank--) best[rank] = best[rank - 1];
            best[rank] = Candidate{row.z[id], id};
            if (count == wanted) threshold = best[wanted - 1].logit;
        }
    }
    return count;
}

// Writes tokens after `token` until top_p of their and its weight exceeds `wanted`. Returns whether it
// does.
bool write_followers(const Row& row, int token, int rank, double wanted, int32_t* followers) {
    Candidate next[kMaxProofTokens];
    int num_next = best_below(row, row.z[token], kMaxProofTokens - 1, next);
    if (row.record.top_k > 0) num_next = std::min(num_next, row.record.top_k - rank - 1);
    double known = row.weight(row.z[token]);
    for (int i = 0; i < num_next; i++) {
        const double weight = row.weight(next[i].logit);
        if (weight == 0 || weight < row.record.min_p * kMargin) return false;
        followers[i] = next[i].id;
        known += weight;
        if (wanted < row.record.top_p * known) return true;
    }
    return false;
}

// Writes the proof: the token and the tokens after it that, if all of them are legal, show that the row's
// cut-offs keep it; -1 after the last. The first is -1 if kMaxProofTokens do not suffice.
void write_cutoff_proof(const Row& row, int token, int32_t* proof) {
    const SamplingRecord& record = row.record;
    std::fill(proof, proof + kMaxProofTokens, -1);
    const double weight = row.weight(row.z[token]);
    if (weight < record.min_p * kMargin) return;
    const Before first = before(row, token);
    if (record.top_k > 0 && first.count >= record.top_k) return;
    const double wanted = first.weight * (1 - static_cast<double>(record.top_p)) * kMargin,
                 alone = record.top_p * weight;
    const bool is_proven = wanted < alone || (wanted < alone * kMaxProofTokens &&
                                              write_followers(row, token, first.count, wanted, proof + 1));
    if (is_proven)
        proof[0] = token;
    else
        std::fill(proof, proof + kMaxProofTokens, -1);
}

}  // namespace
}  // namespace octavo
