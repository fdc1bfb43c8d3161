// Whether the cuts of a row (min_p, top_k, top_p) keep a token that was drawn without them, whatever a mask
// takes from the others.
//
// A mask can only make the token better placed. Let X weigh what stands before it unmasked, and R what stands
// from it on and is known to be legal: whatever part x of X is legal, x + R is the least that all legal
// tokens weigh, and top_p keeps the token where x < top_p * (x + R). That holds for every x up to X where
// X * (1 - top_p) < top_p * R.
#pragma once
#include <algorithm>
#include <cmath>

#include "../simd/simd.h"
#include "cuts.inl"
#include "table.h"

namespace octavo {
namespace {

// More than the weights' rounding moves any of the comparisons below.
constexpr double kSure = 1 + 1e-4;

// The tokens whose logits are a token's or larger, without itself.
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

// The `wanted` largest logits below `bound`, in their order, to `best`; returns how many there are.
int best_below(const Row& row, float bound, int wanted, Candidate* best) {
    int count = 0;
    float least = -INFINITY;
    for (int from = 0; from < row.vocab; from += kLanes) {
        const vf logits = row.logits(from);
        if (!any_lane((logits < splat(bound)) & (logits > splat(least)))) continue;
        for (int id = from; id < std::min(from + kLanes, row.vocab); id++) {
            if (!(row.z[id] < bound && row.z[id] > least)) continue;
            int place = count < wanted ? count++ : wanted - 1;
            for (; place > 0 && best[place - 1].logit < row.z[id]; place--) best[place] = best[place - 1];
            best[place] = Candidate{row.z[id], id};
            if (count == wanted) least = best[wanted - 1].logit;
        }
    }
    return count;
}

// Writes tokens behind one until they and it weigh `wanted`, top_p of them; returns whether they do.
bool write_followers(const Row& row, int token, int place, double wanted, int32_t* followers) {
    Candidate next[kMostWitnesses];
    int most = best_below(row, row.z[token], kMostWitnesses - 1, next);
    if (row.record.top_k > 0) most = std::min(most, row.record.top_k - place - 1);
    double known = row.weight(row.z[token]);
    for (int i = 0; i < most; i++) {
        const double weight = row.weight(next[i].logit);
        if (weight == 0 || weight < row.record.min_p * kSure) return false;
        followers[i] = next[i].id;
        known += weight;
        if (wanted < row.record.top_p * known) return true;
    }
    return false;
}

// Writes the token and those behind it that, if all of them are legal, show that the row's cuts keep it; -1
// behind the last. The first is -1 where so few do not show it.
void write_witnesses(const Row& row, int token, int32_t* witnesses) {
    const SamplingRecord& record = row.record;
    std::fill(witnesses, witnesses + kMostWitnesses, -1);
    const double weight = row.weight(row.z[token]);
    if (weight < record.min_p * kSure) return;
    const Before first = before(row, token);
    if (record.top_k > 0 && first.count >= record.top_k) return;
    const double wanted = first.weight * (1 - static_cast<double>(record.top_p)) * kSure,
                 alone = record.top_p * weight;
    const bool is_shown = wanted < alone || (wanted < alone * kMostWitnesses &&
                                             write_followers(row, token, first.count, wanted, witnesses + 1));
    if (is_shown)
        witnesses[0] = token;
    else
        std::fill(witnesses, witnesses + kMostWitnesses, -1);
}

}  // namespace
}  // namespace octavo
