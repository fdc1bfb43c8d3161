// Sampling noise: Philox4x32-10 (Salmon et al. 2011) and Gumbel noise from its words. Same formulas as
// executor/noise.py: a token's word is word token % 4 of the block with counter (position, sample, token /
// 4, purpose) and the row's seed as key.
#pragma once
#include <cmath>

#include "../simd/simd.h"
#include "table.h"

namespace octavo {
namespace {

constexpr uint32_t kPhiloxMultipliers[2] = {0xD2511F53u, 0xCD9E8D57u};
constexpr uint32_t kPhiloxWeyl[2] = {0x9E3779B9u, 0xBB67AE85u};
constexpr int kPhiloxRounds = 10;
constexpr uint32_t kSamplePurpose = 0;
constexpr double kLargestNoise = 22.88;  // for u = 1 - 2^-33, rounded up

// g = -ln(-ln u), u = (word + 1/2) / 2^32.
inline double gumbel(uint32_t word) {
    const double u = (word + 0.5) * 0x1p-32, rest = (~word + 0.5) * 0x1p-32;
    return -std::log(u > 0.5 ? -std::log1p(-rest) : -std::log(u));
}

struct PhiloxBlock {
    uint32_t words[4];
};
inline PhiloxBlock philox(uint64_t seed, PhiloxBlock counter) {
    uint32_t* c = counter.words;
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int round = 0; round < kPhiloxRounds; round++) {
        const uint64_t a = static_cast<uint64_t>(kPhiloxMultipliers[0]) * c[0],
                       b = static_cast<uint64_t>(kPhiloxMultipliers[1]) * c[2];
        counter = {{static_cast<uint32_t>(b >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(b),
                    static_cast<uint32_t>(a >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(a)}};
        key[0] += kPhiloxWeyl[0];
        key[1] += kPhiloxWeyl[1];
    }
    return counter;
}

inline uint32_t noise_word(const SamplingRecord& record, int token) {
    const PhiloxBlock counter{
        {record.position, record.sample_index, static_cast<uint32_t>(token) / 4, kSamplePurpose}};
    return philox(record.seed, counter).words[token % 4];
}

// -- many tokens at once --

// The words of one row for consecutive tokens, kTokens at a time.
class RowNoise {
  public:
    static constexpr int kTokens = 64;
    static constexpr int kRegisters =
        kTokens / (2 * kRegisterLanes);  // each has 4 words of kWideLanes counters

    explicit RowNoise(const SamplingRecord& record)
        : key_{static_cast<uint32_t>(record.seed), static_cast<uint32_t>(record.seed >> 32)} {
        // In the first round only the counter's third word differs between tokens, and its product enters
        // the first two words only; the other two are the same for the whole row.
        const uint64_t product = static_cast<uint64_t>(kPhiloxMultipliers[0]) * record.position;
        second_ = record.sample_index;
        row_words_[0] = static_cast<uint32_t>(product >> 32) ^ kSamplePurpose ^ key_[1];
        row_words_[1] = static_cast<uint32_t>(product);
        // So is their product in the second round.
        row_product_ = static_cast<uint64_t>(kPhiloxMultipliers[1]) * row_words_[0];
    }

    // Writes to [kTokens] the words of tokens first_token (a multiple of kTokens) and on.
    OCTAVO_INLINE void write(uint32_t first_token, uint32_t* to) const {
        RegisterW c[kRegisters][4];
        for (int r = 0; r < kRegisters; r++) start(first_token / 4 + r * kWideLanes, c[r]);
        uint32_t keys[2] = {key_[0] + 2 * kPhiloxWeyl[0], key_[1] + 2 * kPhiloxWeyl[1]};
        for (int round = 2; round < kPhiloxRounds; round++) {
            for (int r = 0; r < kRegisters; r++) mix(c[r], keys);
            keys[0] += kPhiloxWeyl[0];
            keys[1] += kPhiloxWeyl[1];
        }
        for (int r = 0; r < kRegisters; r++) {
            const WordPair words =
                interleave_pairs(interleave_words(c[r][0], c[r][1]), interleave_words(c[r][2], c[r][3]));
            std::memcpy(to + 2 * r * kRegisterLanes, &words, sizeof words);
        }
    }

  private:
    static OCTAVO_INLINE RegisterW every(uint64_t x) { return RegisterW{} + x; }

    // The counters of kWideLanes neighbouring quads after two rounds. The order of lanes is such that
    // `interleave_pairs` puts neighbours next to each other: even lanes hold the first half of the quads.
    OCTAVO_INLINE void start(uint32_t quad, RegisterW* c) const {
        RegisterW lanes;
        for (int lane = 0; lane < kWideLanes; lane++) lanes[lane] = lane / 2 + lane % 2 * (kWideLanes / 2);
        const RegisterW product = multiply_words(lanes + quad, every(kPhiloxMultipliers[1]));
        const RegisterW first = (product >> 32) ^ every(second_ ^ key_[0]);
        const RegisterW next = multiply_words(first, every(kPhiloxMultipliers[0]));
        c[0] = every(static_cast<uint32_t>(row_product_ >> 32) ^ (key_[0] + kPhiloxWeyl[0])) ^ product;
        c[1] = every(static_cast<uint32_t>(row_product_));
        c[2] = (next >> 32) ^ every(row_words_[1] ^ (key_[1] + kPhiloxWeyl[1]));
        c[3] = next;
    }

    static OCTAVO_INLINE void mix(RegisterW* c, const uint32_t* keys) {
        const RegisterW a = multiply_words(c[0], every(kPhiloxMultipliers[0])),
                        b = multiply_words(c[2], every(kPhiloxMultipliers[1]));
        c[0] = (b >> 32) ^ c[1] ^ every(keys[0]);
        c[1] = b;
        c[2] = (a >> 32) ^ c[3] ^ every(keys[1]);
        c[3] = a;
    }

    uint32_t key_[2], second_, row_words_[2];
    uint64_t row_product_;
};

}  // namespace
}  // namespace octavo
