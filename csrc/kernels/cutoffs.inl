// The cut-offs min_p, top_k and top_p of a row: steps 4 to 6 of executor/filters.py, without sorting the
// row.
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>

#include "../simd/simd.h"
#include "table.h"

namespace octavo {
namespace {

constexpr float kLargestFloat = std::numeric_limits<float>::max();

struct Candidate {
    float logit;
    int32_t id;
    float weight = 0;  // set if top_p needs it
};
inline bool better(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

int best_id(const float* x, int n) {
    vf best = splat(-INFINITY);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) best = max(best, load(x + i));
    float value = max_lanes(best);
    for (; i < n; i++) value = std::max(value, x[i]);
    int id = 0;
    while (id + kLanes <= n && !any_lane(load(x + id) == splat(value))) id += kLanes;
    while (id < n - 1 && x[id] != value) id++;
    return id;
}

// Writes the `wanted` largest of n logits, unsorted, to `best` (room for n) and returns their number. After
// the first few, most logits are smaller than those kept, so sixteen are compared at once.
int select_top(const float* x, int n, int wanted, Candidate* best) {
    const int capacity = wanted + std::max(wanted, 256);
    int count = 0;
    float threshold = -INFINITY;
    const auto prune = [&] {
        if (count <= wanted) return;
        std::nth_element(best, best + wanted - 1, best + count, better);
        count = wanted;
        threshold = best[wanted - 1].logit;
    };
    for (int from = 0; from < n; from += kLanes) {
        const int end = std::min(n, from + kLanes);
        if (count >= wanted && end == from + kLanes && !any_lane(load(x + from) > splat(threshold))) continue;
        // A later logit that equals the smallest one kept has a higher id and ranks after it.
        for (int id = from; id < end; id++)
            if (count < wanted || x[id] > threshold) best[count++] = Candidate{x[id], id};
        if (count >= capacity) prune();
    }
    prune();
    return count;
}

// The modified logits of one row and their weights: in fp64 one by one, in fp32 sixteen at a time.
struct Row {
    const SamplingRecord& record;
    const float* z;
    int vocab, best;

    double distance(float logit) const { return (static_cast<double>(logit) - z[best]) / record.temperature; }
    double weight(float logit) const { return std::exp(distance(logit)); }
    OCTAVO_INLINE vf weights(vf logits) const {
        return exp((logits - splat(z[best])) * std::min(1.0f / record.temperature, kLargestFloat));
    }
    // Returns logits from .. from + 15, -inf past the end.
    OCTAVO_INLINE vf logits(int from) const {
        if (from + kLanes <= vocab) return load(z + from);
        float rest[kLanes];
        std::fill(rest, rest + kLanes, -INFINITY);
        std::memcpy(rest, z + from, sizeof(float) * (vocab - from));
        return load(rest);
    }
};

// Returns a float below x, for lower bounds.
inline float rounded_down(double x) {
    return std::nextafter(static_cast<float>(std::max(x, -static_cast<double>(kLargestFloat))), -INFINITY);
}

// Returns the sum of all weights >= min_p.
double total_weight(const Row& row) {
    const vf threshold = splat(row.record.min_p);
    double total = 0;
    for (int from = 0; from < row.vocab; from += kLanes) {
        const vf weights = row.weights(row.logits(from));
        total += sum_lanes(select(weights >= threshold, weights, vf{}));
    }
    return total;
}

// Buckets of logits: kCount equal ranges from the largest logit down to `least`. A smaller logit never has
// a smaller bucket number, and equal ones have the same.
struct Ranges {
    static constexpr int kCount = 1024;
    float best, per_logit;

    Ranges(float best, float threshold)
        : best(best),
          per_logit(std::min(kCount / std::min(best - threshold, kLargestFloat), kLargestFloat)) {}

    // Returns bucket numbers; the bucket is the integer part.
    OCTAVO_INLINE vf of(vf logits) const {
        return min((splat(best) - logits) * splat(per_logit), splat(static_cast<float>(kCount - 1)));
    }
};

// Calls see(id, weight, bucket) for all tokens with weight >= min_p and logit >= `least` whose bucket
// number is `wanted`. Sixteen tokens without a match are skipped at once.
template <typename Wanted, typename See>
OCTAVO_INLINE void for_each_heavy(const Row& row, const Ranges& ranges, float threshold, Wanted wanted,
                                  See see) {
    for (int from = 0; from < row.vocab; from += kLanes) {
        const vf logits = row.logits(from), numbers = ranges.of(logits);
        const vi heavy = (logits >= splat(threshold)) & wanted(numbers);
        if (!any_lane(heavy)) continue;
        const vf weight_lanes = row.weights(logits);
        float weights[kLanes], key_indices[kLanes];
        int32_t selected[kLanes];
        store(weights, weight_lanes);
        store(key_indices, numbers);
        store_i(selected, heavy & (weight_lanes >= splat(row.record.min_p)));
        for (int i = 0; i < kLanes; i++)
            if (selected[i]) see(from + i, weights[i], static_cast<int>(key_indices[i]));
    }
}

// Returns the number of the top_k tokens that min_p keeps, which it moves to the front of `best` with their
// weights.
int best_tokens(const Row& row, Candidate* best) {
    const int count = select_top(row.z, row.vocab, row.record.top_k, best);
    for (int i = 0; i < count; i++) best[i].weight = static_cast<float>(row.weight(best[i].logit));
    const auto end =
        std::partition(best, best + count, [&](const Candidate& c) { return c.weight >= row.record.min_p; });
    return static_cast<int>(end - best);
}

// Returns the last token of the shortest prefix of the order (logit down, id up) that weighs at least
// `goal`, or of all. Halves the range in each step, so that nothing is sorted.
Candidate last_of_weight(Candidate* range, int count, double goal) {
    while (count > 1) {
        const int half = count / 2;
        std::nth_element(range, range + half, range + count, better);
        double weight = 0;
        for (int i = 0; i < half; i++) weight += range[i].weight;
        if (weight >= goal) {
            count = half;
        } else {
            goal -= weight;
            range += half;
            count -= half;
        }
    }
    return *range;
}

// Returns the last token of the shortest prefix that reaches top_p. Collects only the bucket that contains
// it: a flat row has tens of thousands of other tokens.
Candidate last_of_top_p(const Row& row, Candidate* space) {
    const double total = total_weight(row);
    // All smaller logits together weigh less than the remainder after top_p.
    const double share = (1 - static_cast<double>(row.record.top_p)) * total / row.vocab * 0.999;
    const float threshold = rounded_down(row.z[row.best] + row.record.temperature * std::log(share));
    const Ranges ranges(row.z[row.best], threshold);
    double weights[Ranges::kCount] = {};
    const auto all = [](vf) { return vi{} ^ -1; };
    for_each_heavy(row, ranges, threshold, all,
                   [&](int, float weight, int range) { weights[range] += weight; });
    double goal = row.record.top_p * total;
    int range = 0;
    for (int next = 0; next < Ranges::kCount; next++) {
        if (weights[next] == 0) continue;
        range = next;
        if (weights[range] >= goal) break;
        goal -= weights[range];
    }
    int count = 0;
    const vf first = splat(static_cast<float>(range)), end = splat(static_cast<float>(range + 1));
    const auto in_range = [&](vf numbers) { return (numbers >= first) & (numbers < end); };
    for_each_heavy(row, ranges, threshold, in_range,
                   [&](int id, float weight, int) { space[count++] = Candidate{row.z[id], id, weight}; });
    return last_of_weight(space, count, goal);
}

// Returns the last token in the order (logit down, id up) that top_k and top_p keep. min_p may end the
// order earlier.
Candidate last_kept(const Row& row, Candidate* space) {
    const SamplingRecord& record = row.record;
    const bool has_top_k = record.top_k > 0 && record.top_k < row.vocab, has_top_p = record.top_p < 1;
    if (!has_top_k && !has_top_p) return Candidate{-kLargestFloat, row.vocab};
    if (!has_top_k) return last_of_top_p(row, space);
    const int count = best_tokens(row, space);
    if (!has_top_p) return *std::max_element(space, space + count, better);
    double total = 0;
    for (int i = 0; i < count; i++) total += space[i].weight;
    return last_of_weight(space, count, record.top_p * total);
}

}  // namespace
}  // namespace octavo
