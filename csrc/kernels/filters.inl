// The distribution and after_cutoff filters of executor/filters.py. Each bans tokens (sets -inf) in the
// row's own copy of the logits. Sums and thresholds are fp64 over fp32 weights. Rows without such a filter
// do not run this code.
#pragma once
#include <algorithm>
#include <cmath>

#include "cutoffs.inl"
#include "noise.inl"

namespace octavo {
namespace {

constexpr uint32_t kXtcPurpose = 1;
constexpr double kMinTemperature = 0.01;
constexpr int kMirostatTokens = 100;

template <typename See>
OCTAVO_INLINE void for_each_token(const Row& row, See see) {
    float weights[kLanes];
    for (int from = 0; from < row.vocab; from += kLanes) {
        store(weights, row.weights(row.logits(from)));
        const int end = std::min(kLanes, row.vocab - from);
        for (int i = 0; i < end; i++)
            if (weights[i] > 0) see(from + i, weights[i]);
    }
}

// Sum and entropy of a row's weights, and the number of its finite logits.
struct Distribution {
    double total = 0, entropy = 0;
    int64_t count = 0;

    explicit Distribution(const Row& row) {
        double sum = 0;
        for_each_token(row, [&](int id, float weight) {
            total += weight;
            sum += weight * row.distance(row.z[id]);
        });
        for (int id = 0; id < row.vocab; id++) count += row.z[id] != -INFINITY;
        entropy = std::log(total) - sum / total;
    }
    double surprise(const Row& row, int id) const { return std::log(total) - row.distance(row.z[id]); }
};

void ban_below_sigmas(float* z, int vocab, double num_sigmas) {
    double sum = 0, squares = 0;
    int64_t count = 0;
    for (int id = 0; id < vocab; id++)
        if (z[id] != -INFINITY) sum += z[id], count++;
    const double mean = sum / count;
    for (int id = 0; id < vocab; id++)
        if (z[id] != -INFINITY) squares += (z[id] - mean) * (z[id] - mean);
    const double threshold = z[best_id(z, vocab)] - num_sigmas * std::sqrt(squares / count);
    for (int id = 0; id < vocab; id++)
        if (z[id] < threshold) z[id] = -INFINITY;
}

float dynamic_temperature(SamplingRecord record, const float* z, int vocab) {
    const double middle = record.temperature, reach = record.dynatemp_range;
    record.temperature = 1;
    const Distribution all(Row{record, z, vocab, best_id(z, vocab)});
    if (all.count < 2) return static_cast<float>(middle);
    const double low = std::max(middle - reach, kMinTemperature), high = middle + reach;
    const double share = std::clamp(all.entropy / std::log(static_cast<double>(all.count)), 0.0, 1.0);
    return static_cast<float>(low +
                              (high - low) * std::pow(share, static_cast<double>(record.dynatemp_exponent)));
}

void ban_untypical(const Row& row, float* z, Candidate* space) {
    const Distribution all(row);
    int count = 0;
    for_each_token(row, [&](int id, float weight) {
        const double distance = std::abs(all.surprise(row, id) - all.entropy);
        space[count++] = Candidate{static_cast<float>(-distance), id, weight};
    });
    const Candidate last = last_of_weight(space, count, row.record.typical_p * all.total);
    int kept = 0;
    for (int i = 0; i < count; i++)
        if (!better(last, space[i])) space[kept++] = Candidate{z[space[i].id], space[i].id};
    std::fill(z, z + row.vocab, -INFINITY);
    for (int i = 0; i < kept; i++) z[space[i].id] = space[i].logit;
}

// Applies the distribution filters and sets record.temperature to the temperature for the following steps.
void filter_whole(SamplingRecord& record, float* z, int vocab, Candidate* space) {
    if (record.top_n_sigma > 0) ban_below_sigmas(z, vocab, record.top_n_sigma);
    if (record.dynatemp_range > 0) record.temperature = dynamic_temperature(record, z, vocab);
    if (record.typical_p < 1) ban_untypical(Row{record, z, vocab, best_id(z, vocab)}, z, space);
}

// Writes the `count` largest finite logits in order and returns their number.
int sorted_best(const float* z, int vocab, int count, Candidate* best) {
    const int found = select_top(z, vocab, count, best);
    std::sort(best, best + found, better);
    return static_cast<int>(
        std::find_if(best, best + found, [](const Candidate& c) { return c.logit == -INFINITY; }) - best);
}

// Bans every token before (or after) a token in the order (logit down, id up).
void ban_before(float* z, int vocab, Candidate first) {
    for (int id = 0; id < vocab; id++)
        if (better(Candidate{z[id], id}, first)) z[id] = -INFINITY;
}
void ban_behind(float* z, int vocab, Candidate last) {
    for (int id = 0; id < vocab; id++)
        if (better(last, Candidate{z[id], id})) z[id] = -INFINITY;
}

bool applies_xtc(const SamplingRecord& record) {
    if (record.xtc_probability <= 0) return false;
    const PhiloxBlock counter{{record.position, record.sample_index, 0, kXtcPurpose}};
    return (philox(record.seed, counter).words[0] + 0.5) * 0x1p-32 < record.xtc_probability;
}

void ban_top_choices(const Row& row, float* z) {
    const double threshold = row.record.xtc_threshold * Distribution(row).total;
    Candidate last{INFINITY, -1};
    for_each_token(row, [&](int id, float) {
        if (row.weight(z[id]) >= threshold && better(last, Candidate{z[id], id})) last = Candidate{z[id], id};
    });
    if (last.id >= 0) ban_before(z, row.vocab, last);
}

// Returns how many of the best tokens have a surprise of at most mu bits under Zipf's law, whose exponent
// is fitted to the first kMirostatTokens.
int zipf_count(const Row& row, Candidate* best) {
    const int count = sorted_best(row.z, row.vocab, std::min(kMirostatTokens, row.vocab), best);
    if (count < 2) return 1;
    double products = 0, squares = 0;
    for (int i = 1; i < count; i++) {
        const double t = std::log((i + 1.0) / i);
        products += t * (row.distance(best[i - 1].logit) - row.distance(best[i].logit));
        squares += t * t;
    }
    const double exponent = products / squares, epsilon = exponent - 1,
                 log_vocab = std::log(static_cast<double>(row.vocab));
    if (exponent <= 0) return row.vocab;
    const double log_quotient = std::abs(epsilon) > 1e-9
                                    ? std::log(epsilon / -std::expm1(-epsilon * log_vocab))
                                    : -std::log(log_vocab);
    const double log_count = (log_quotient + row.record.mirostat_mu * std::log(2.0)) / exponent;
    return std::max(
        1, static_cast<int>(std::min(std::exp(std::min(log_count, 40.0)), static_cast<double>(row.vocab))));
}

void ban_surprising(const Row& row, float* z, Candidate* space) {
    Candidate last{z[row.best], row.best};
    if (row.record.mirostat_mode == 2) {
        const double total = Distribution(row).total;
        const double threshold = total * std::exp2(-static_cast<double>(row.record.mirostat_mu));
        for_each_token(row, [&](int id, float) {
            if (row.weight(z[id]) >= threshold && better(last, Candidate{z[id], id}))
                last = Candidate{z[id], id};
        });
    } else {
        const int wanted = zipf_count(row, space), count = select_top(z, row.vocab, wanted, space);
        last = *std::max_element(space, space + count, better);
    }
    ban_behind(z, row.vocab, last);
}

// Applies the cut-offs first, so that the remaining tokens are a distribution of their own.
void filter_kept(SamplingRecord& record, float* z, int vocab, Candidate* space) {
    const Row all{record, z, vocab, best_id(z, vocab)};
    const Candidate last = last_kept(all, space);
    const double threshold = record.min_p;
    const float best = z[all.best];
    for (int id = 0; id < vocab; id++) {
        const bool light =
            threshold > 0 && std::exp((static_cast<double>(z[id]) - best) / record.temperature) < threshold;
        if (light || better(last, Candidate{z[id], id})) z[id] = -INFINITY;
    }
    record.top_k = 0;
    record.top_p = 1;
    record.min_p = 0;
    if (applies_xtc(record)) ban_top_choices(Row{record, z, vocab, best_id(z, vocab)}, z);
    if (record.mirostat_mode) ban_surprising(Row{record, z, vocab, best_id(z, vocab)}, z, space);
}

// Returns the surprise of a token, in bits, among the remaining tokens.
double surprise_bits(const Row& row, int token) {
    return Distribution(row).surprise(row, token) / std::log(2.0);
}

}  // namespace
}  // namespace octavo
