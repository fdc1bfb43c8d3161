// Attention's two products on vectors: scores of queries and keys, and values times their weights. Layouts: KvLayer in table.h.
//
// In all of them a register of K or V is what 16 lanes of sums take: with 16 bits or 8, pairs of dimensions of 16 keys, or pairs of
// tokens of 16 dimensions; with fp32 single ones. It meets four bytes of a query or of weights in all lanes. Each lane and block has one
// chain of sums, so its bits do not depend on how many are computed at once.
#pragma once
#include "attention_lanes.inl"

namespace octavo {
namespace {

// How many lanes (and of values, vectors of 16 columns) have their sums in registers together.
#if defined(__AVX512F__)
constexpr int kScoreLanes = 8, kValueLanes = 4, kValueVectors = 4, kScoreSums = 16;
#elif defined(__AVX2__)
constexpr int kScoreLanes = 4, kValueLanes = 4, kValueVectors = 1, kScoreSums = 4;
#else
constexpr int kScoreLanes = 2, kValueLanes = 2, kValueVectors = 1, kScoreSums = 2;
#endif

// Bytes of K or V that a register takes.
template <Way way>
constexpr int kStep = way == Way::int16 ? 32 : 64;
template <Way way>
using Sums = std::conditional_t<way == Way::int16, vi, vf>;

template <Way way>
OCTAVO_INLINE vi load_numbers(const uint8_t* p) {
    if constexpr (way == Way::int16)
        return int8_to_int16((const int8_t*)p);
    else
        return load_i(p);
}
template <Way way>
OCTAVO_INLINE Sums<way> multiply_add(Sums<way> sum, vi numbers, vi factors) {
    if constexpr (way == Way::fp32)
        return fma((vf)numbers, (vf)factors, sum);
    else if constexpr (way == Way::int16)
        return dot2_int16(sum, numbers, factors);
    else
        return dot2_bf16(sum, numbers, factors);
}

// fn<n>(first) over 0 .. count - 1 in parts of at most `Most`, nearly alike.
template <int N, typename Fn>
OCTAVO_INLINE void call_with(int n, int first, const Fn& fn) {
    if (n == N)
        fn.template operator()<N>(first);
    else if constexpr (N > 1)
        call_with<N - 1>(n, first, fn);
}
template <int Most, typename Fn>
OCTAVO_INLINE void in_parts(int count, const Fn& fn) {
    const int parts = (count + Most - 1) / Most;
    for (int i = 0; i < parts; i++) {
        const int first = count * i / parts;
        call_with<Most>(count * (i + 1) / parts - first, first, fn);
    }
}

// Blocks lie scattered, where the hardware's prefetcher is of no help. The second-level cache holds a split's keys or values.
OCTAVO_INLINE void ask_for(const uint8_t* p, size_t bytes) {
    for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(p + line, 0, 2);
}

// scores [N][256] of B neighbouring blocks. The first lanes ask for the values of these blocks, which are needed when all scores of the split are
// there, and for the keys B blocks on, if nobody has before (`asks_keys`).
template <int N, int B, Way way>
OCTAVO_INLINE void block_scores(const LaneSet& set, int lane0, int block, int split0, bool asks, bool asks_keys) {
    constexpr int step = kStep<way>;
    const int steps = way == Way::fp32 ? set.width : set.width / 2;
    const int query_bytes = set.width * (way == Way::fp32 ? 4 : 2);
    const uint8_t* queries = (const uint8_t*)set.q + lane0 * query_bytes;
    const uint8_t *keys[B], *values[B], *next[B];
    for (int b = 0; b < B; b++) {
        keys[b] = set.keys_of(block + b);
        values[b] = asks ? set.values_of(block + b) : nullptr;
        next[b] = asks_keys && block + b + B < set.end_block() ? set.keys_of(block + b + B) : nullptr;
    }
    Sums<way> sums[N][B] = {};
    for (int i = 0; i < steps; i++) {
        vi numbers[B];
        for (int b = 0; b < B; b++) numbers[b] = load_numbers<way>(keys[b] + i * step);
        if (asks && (step == 64 || i % 2 == 0))
            for (int b = 0; b < B; b++) {
                __builtin_prefetch(values[b] + i * step, 0, 2);
                if (next[b]) __builtin_prefetch(next[b] + i * step, 0, 3);
            }
        for (int n = 0; n < N; n++) {
            const vi query = broadcast4(queries + n * query_bytes + 4 * i);
            for (int b = 0; b < B; b++) sums[n][b] = multiply_add<way>(sums[n][b], numbers[b], query);
        }
    }
    for (int b = 0; b < B; b++) {
        float* scores = set.scores + lane0 * kSplitKeys + (block + b) * kTile - split0;
        if constexpr (way == Way::int16) {
            const vf scales = load_bf16(set.scales(block + b));
            for (int n = 0; n < N; n++) store(scores + n * kSplitKeys, to_float(sums[n][b]) * scales);
        } else {
            for (int n = 0; n < N; n++) store(scores + n * kSplitKeys, sums[n][b]);
        }
    }
}

// Sums over d of blocks block0 .. block1 - 1 for all lanes; with `int16`, times each key's scale.
template <Way way>
void score_blocks(const LaneSet& set, int block0, int block1, int split0) {
    const bool first_split = split0 == set.piece->first_split * kSplitKeys;
    in_parts<kScoreLanes>(set.count, [&]<int N>(int lane0) {
        constexpr int B = N > kScoreSums / 2 ? 1 : N > kScoreSums / 4 ? 2 : 4;
        const bool asks = set.asks && lane0 == 0;
        int b = block0;
        for (; b + B <= block1; b += B) block_scores<N, B, way>(set, lane0, b, split0, asks, asks && first_split);
        for (; b < block1; b++) block_scores<N, 1, way>(set, lane0, b, split0, asks, asks && first_split);
    });
}

// The values of block b, as they lie. What lies beyond the last key may be anything, NaN too, and bf16 reads whole pairs and blocks: there it
// is zeroed. (int8 may be any integer there: its weights are 0.)
template <Way way>
const uint8_t* values_until(const LaneSet& set, int b, int key1) {
    const int padded = set.args->kv.v_padded, tokens = key1 - b * kTile;
    const uint8_t* v = set.values_of(b);
    if (way != Way::bf16 || tokens >= kTile) return v;
    std::memcpy(set.values, v, sizeof(uint16_t) * padded * kTile);
    uint32_t* pairs = (uint32_t*)set.values;
    if (tokens % 2)
        for (int d = 0; d < padded; d++) pairs[tokens / 2 * padded + d] &= 0xffff;
    std::memset(pairs + (tokens + 1) / 2 * padded, 0, sizeof(uint32_t) * (kTile / 2 - (tokens + 1) / 2) * padded);
    return set.values;
}

// acc [N][16 C] = weights times V, of the columns from `column` on. The first lanes ask for the keys that the next split begins with.
template <int N, int C, Way way>
OCTAVO_INLINE void weigh_columns(const LaneSet& set, int lane0, int column, int key0, int key1, int split0) {
    constexpr int step = kStep<way>;
    const KvLayer& kv = set.args->kv;
    const bool asks = set.asks && lane0 == 0 && column == 0;
    const int end_block = set.end_block();
    Sums<way> sums[N][C] = {};
    for (int key = key0; key < key1; key += kTile) {
        const int tokens = key1 - key < kTile ? key1 - key : kTile, steps = way == Way::fp32 ? tokens : (tokens + 1) / 2, ahead = (key + kSplitKeys) / kTile;
        if (asks && ahead < end_block) {
            ask_for(set.keys_of(ahead), kv.v_offset);
            if constexpr (way == Way::int16) __builtin_prefetch(set.scales(ahead), 0, 2);
        }
        const uint8_t* v = values_until<way>(set, key / kTile, key1) + column / kLanes * step;
        const uint8_t* weights = (const uint8_t*)(set.scores + lane0 * kSplitKeys) + (key - split0) * (way == Way::fp32 ? 4 : 2);
        for (int i = 0; i < steps; i++) {
            vi numbers[C];
            for (int c = 0; c < C; c++) numbers[c] = load_numbers<way>(v + (size_t)(i * (kv.v_padded / kLanes) + c) * step);
            for (int n = 0; n < N; n++) {
                const vi weight = broadcast4(weights + n * (kSplitKeys * sizeof(float)) + 4 * i);
                for (int c = 0; c < C; c++) sums[n][c] = multiply_add<way>(sums[n][c], numbers[c], weight);
            }
        }
    }
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) {
            float* acc = set.split_state + (lane0 + n) * set.state_size + 2 + column + kLanes * c;
            if constexpr (way == Way::int16)
                store(acc, to_float(sums[n][c]) * splat(set.units[lane0 + n]));
            else
                store(acc, sums[n][c]);
        }
}

template <Way way>
void weigh_blocks(const LaneSet& set, int key0, int key1, int split0) {
    in_parts<kValueLanes>(set.count, [&]<int N>(int lane0) {
        const int padded = set.args->kv.v_padded;
        int column = 0;
        for (; column + kLanes * kValueVectors <= padded; column += kLanes * kValueVectors) weigh_columns<N, kValueVectors, way>(set, lane0, column, key0, key1, split0);
        for (; column < padded; column += kLanes) weigh_columns<N, 1, way>(set, lane0, column, key0, key1, split0);
    });
}

}  // namespace
}  // namespace octavo
