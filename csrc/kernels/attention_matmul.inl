// The two matmuls of attention on vector registers: scores of queries and keys, and weights times values.
// Layouts: KvLayer in attention.h.
//
// A register of K or V holds operands for 16 sums: pairs of dimensions of 16 keys or pairs of tokens of 16
// dimensions with 16- and 8-bit types, single ones with fp32. It is multiplied by four bytes of a query or
// of weights, broadcast to all lanes. Each lane and block has one chain of sums, so the result does not
// depend on how many are computed at once.
#pragma once
#include "attention_lanes.inl"

namespace octavo {
namespace {

// Number of lanes, and of vectors of 16 value columns, whose sums are in registers at the same time.
#if defined(__AVX512F__)
constexpr int kScoreLanes = 8, kValueLanes = 4, kValueVectors = 4, kScoreSums = 16;
#elif defined(__AVX2__) || defined(OCTAVO_NEON)
constexpr int kScoreLanes = 4, kValueLanes = 4, kValueVectors = 1, kScoreSums = 4;
#else
constexpr int kScoreLanes = 2, kValueLanes = 2, kValueVectors = 1, kScoreSums = 2;
#endif

// Bytes of K or V that are loaded at once: a register of operands, or the words of four.
template <Way way, int bits>
constexpr int kStep = way == Way::int16 && bits == 8 ? 32 : 64;
template <int bits>
constexpr int kPerLoad = bits == 4 ? kCodesPerWord : 1;
template <Way way>
using Sums = std::conditional_t<way == Way::int16, vi, vf>;

template <Way way, int bits>
OCTAVO_INLINE vi load_numbers(const uint8_t* p) {
    if constexpr (way == Way::int16 && bits == 8)
        return int8_to_int16(reinterpret_cast<const int8_t*>(p));
    else
        return load_i(p);
}
// Returns register j of the kPerLoad registers of operands in what was loaded.
template <int bits>
OCTAVO_INLINE vi operands(vi loaded, int j) {
    if constexpr (bits == 4)
        return code_levels<false>(loaded, j);
    else
        return loaded;
}
template <Way way>
OCTAVO_INLINE Sums<way> multiply_add(Sums<way> sum, vi numbers, vi factors) {
    if constexpr (way == Way::fp32)
        return fma(as_float(numbers), as_float(factors), sum);
    else if constexpr (way == Way::int16)
        return dot2_int16(sum, numbers, factors);
    else
        return dot2_bf16(sum, numbers, factors);
}

// Calls fn<n>(first) for a run-time n <= N; does nothing if n is 0.
template <int N, typename Fn>
OCTAVO_INLINE void call_with(int n, int first, const Fn& fn) {
    if constexpr (N > 0) {
        if (n == N)
            fn.template operator()<N>(first);
        else
            call_with<N - 1>(n, first, fn);
    }
}
// Calls fn<n>(first) for 0 .. count - 1 in parts of nearly equal size n <= kMax.
template <int kMax, typename Fn>
OCTAVO_INLINE void in_parts(int count, const Fn& fn) {
    const int parts = (count + kMax - 1) / kMax;
    for (int i = 0; i < parts; i++) {
        const int first = count * i / parts;
        call_with<kMax>(count * (i + 1) / parts - first, first, fn);
    }
}

// Prefetches `bytes` from p on into the second-level cache.
OCTAVO_INLINE void prefetch_bytes(const uint8_t* p, int bytes) {
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch(p + line, 0, 2);
}

// Computes scores [N][256] of B neighbouring blocks; `first_block` is the first block of the split. The
// first lanes of a set prefetch the keys of the next blocks, one line for each line that they read.
template <int N, int B, Way way, int bits>
OCTAVO_INLINE void block_scores(const LaneSet& set, int lane0, int block, int first_block, int split0) {
    constexpr int step = kStep<way, bits>, per_load = kPerLoad<bits>;
    const int steps = (way == Way::fp32 ? set.width : set.width / 2) / per_load;
    const int query_bytes = set.width * (way == Way::fp32 ? 4 : 2);
    const uint8_t* queries = reinterpret_cast<const uint8_t*>(set.q) + lane0 * query_bytes;
    const bool prefetches = lane0 == 0 && set.next_blocks.first + block - first_block < set.next_blocks.last;
    const uint8_t *keys[B], *ahead[B];
    for (int b = 0; b < B; b++) {
        keys[b] = set.keys_at(block + b);
        ahead[b] = set.next_block_keys(block + b - first_block, keys[b]);
    }
    Sums<way> sums[N][B] = {};
    for (int i = 0; i < steps; i++) {
        vi loaded[B];
        for (int b = 0; b < B; b++) loaded[b] = keep_in_register(load_numbers<way, bits>(keys[b] + i * step));
        if (prefetches && (step == 64 || i % 2 == 0))
            for (int b = 0; b < B; b++) prefetch_bytes(ahead[b] + i * step, 1);
#pragma GCC unroll 4
        for (int j = 0; j < per_load; j++) {
            vi numbers[B];
            for (int b = 0; b < B; b++) numbers[b] = operands<bits>(loaded[b], j);
            for (int n = 0; n < N; n++) {
                const vi query = broadcast4(queries + n * query_bytes + 4 * (i * per_load + j));
                for (int b = 0; b < B; b++) sums[n][b] = multiply_add<way>(sums[n][b], numbers[b], query);
            }
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

// Computes q K for blocks block0 .. block1 - 1 and all lanes; with `int16`, times each key's scale.
template <Way way, int bits>
void score_blocks(const LaneSet& set, int block0, int block1, int split0) {
    in_parts<kScoreLanes>(set.count, [&]<int N>(int lane0) {
        constexpr int B = N > kScoreSums / 2 ? 1 : N > kScoreSums / 4 ? 2 : 4;
        int b = block0;
        for (; b + B <= block1; b += B) block_scores<N, B, way, bits>(set, lane0, b, block0, split0);
        call_with<B - 1>(block1 - b, b, [&]<int Left>(int first) {
            block_scores<N, Left, way, bits>(set, lane0, first, block0, split0);
        });
    });
}

// Computes acc [N][16 C] = weights times V for the columns from `column` on. The first lanes prefetch the
// values of the next blocks. The memory after the last key may hold NaN: bf16, which reads whole pairs,
// masks it. int8 may hold anything there, since its weights are 0.
template <int N, int C, Way way, int bits>
OCTAVO_INLINE void weigh_columns(const LaneSet& set, int lane0, int column, int key0, int key1, int split0) {
    constexpr int step = kStep<way, bits>, tokens_per_step = way == Way::fp32 ? 1 : 2;
    constexpr int columns_per_load = kLanes * kPerLoad<bits>;
    const KvLayer& kv = set.args->kv;
    const size_t row = static_cast<size_t>(kv.v_padded) / columns_per_load * step;
    const int first = C == kPerLoad<bits> ? 0 : column % columns_per_load / kLanes;
    Sums<way> sums[N][C] = {};
    const auto add = [&](const uint8_t* v, const uint8_t* weights, const uint8_t* ahead, bool half)
                         __attribute__((always_inline)) {
                             vi numbers[C];
                             for (int c = 0; c < C; c++) {
                                 const vi loaded = load_numbers<way, bits>(v + (bits == 4 ? 0 : c) * step);
                                 const vi whole = operands<bits>(loaded, first + c);
                                 numbers[c] = keep_in_register(half ? whole & 0xffff : whole);
                             }
                             if (ahead) prefetch_bytes(ahead, (bits == 4 ? 1 : C) * step);
                             for (int n = 0; n < N; n++) {
                                 const vi weight = broadcast4(weights + n * (kSplitKeys * sizeof(float)));
                                 for (int c = 0; c < C; c++)
                                     sums[n][c] = multiply_add<way>(sums[n][c], numbers[c], weight);
                             }
                         };
    for (int key = key0; key < key1; key += kTile) {
        const int tokens = key1 - key < kTile ? key1 - key : kTile;
        const size_t at = column / columns_per_load * step;
        const uint8_t *v = set.values_at(key / kTile) + at,
                      *ahead = lane0 == 0 ? set.next_block_keys((key - key0) / kTile, nullptr) : nullptr;
        if (ahead) ahead += kv.v_offset + at;
        const uint8_t* weights = reinterpret_cast<const uint8_t*>(set.scores + lane0 * kSplitKeys) +
                                 (key - split0) * (4 / tokens_per_step);
        const int steps = way == Way::bf16 ? tokens / 2 : (tokens + tokens_per_step - 1) / tokens_per_step;
        for (int i = 0; i < steps; i++)
            add(v + i * row, weights + 4 * i, ahead ? ahead + i * row : nullptr, false);
        if (way == Way::bf16 && tokens % 2) add(v + steps * row, weights + 4 * steps, nullptr, true);
        if (ahead && column == 0)
            prefetch_bytes(ahead + steps * row, (kTile / tokens_per_step - steps) * row);
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

// Computes weights times the values that are stored in K, 16 keys per vector: sums over the blocks in each
// lane, then over the lanes. One vector holds one dimension in fp32, two in bf16. Keys after the last one
// are masked.
template <int N, Way way>
OCTAVO_INLINE void weigh_latents(const LaneSet& set, int lane0, int key0, int key1, int split0) {
    constexpr int dims = way == Way::fp32 ? 1 : 2;
    for (int d = 0; d < set.args->kv.v_width; d += dims) {
        vf sums[N][dims] = {};
        for (int key = key0; key < key1; key += kTile) {
            const vi stored = load_i(set.keys_at(key / kTile) + static_cast<size_t>(d) / dims * 64);
            const vi seen = stored & (iota() < splat_i(key1 - key));
            const vf first = way == Way::fp32 ? as_float(seen) : as_float(seen << 16);
            const vf second = as_float(seen & static_cast<int32_t>(0xffff0000u));
            for (int n = 0; n < N; n++) {
                const vf weights =
                    way == Way::fp32
                        ? load(set.scores + (lane0 + n) * kSplitKeys + key - split0)
                        : load_bf16(set.weights_bf16() + (lane0 + n) * 2 * kSplitKeys + key - split0);
                sums[n][0] = fma(first, weights, sums[n][0]);
                if (dims == 2) sums[n][dims - 1] = fma(second, weights, sums[n][dims - 1]);
            }
        }
        for (int n = 0; n < N; n++)
            for (int i = 0; i < dims; i++)
                set.split_state[(lane0 + n) * set.state_size + 2 + d + i] = sum_lanes(sums[n][i]);
    }
}

template <Way way, int bits>
void weigh_blocks(const LaneSet& set, int key0, int key1, int split0) {
    if constexpr (way == Way::fp32 || way == Way::bf16)
        if (set.args->kv.latent)
            return in_parts<kValueLanes>(
                set.count, [&]<int N>(int lane0) { weigh_latents<N, way>(set, lane0, key0, key1, split0); });
    in_parts<kValueLanes>(set.count, [&]<int N>(int lane0) {
        const int padded = set.args->kv.v_padded;
        int column = 0;
        for (; column + kLanes * kValueVectors <= padded; column += kLanes * kValueVectors)
            weigh_columns<N, kValueVectors, way, bits>(set, lane0, column, key0, key1, split0);
        for (; column < padded; column += kLanes)
            weigh_columns<N, 1, way, bits>(set, lane0, column, key0, key1, split0);
    });
}

}  // namespace
}  // namespace octavo
