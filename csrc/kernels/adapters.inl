// Adapter kernels: h = A x for some rows, and sums += B h for a tile. Each sum is fp32 and adds its terms
// in one fixed order, independent of the rows, ranks and adapters that are computed together.
#pragma once
#include <algorithm>

#include "../simd/dots.h"
#include "../simd/simd.h"
#include "table.h"

namespace octavo {
namespace {

// Two adjacent vectors of a matrix.
struct Pair {
    vf first, second;
};
struct Bf16Pairs {
    const uint16_t* numbers;
    // Returns the pair that starts at element i; one load reads both vectors.
    OCTAVO_INLINE Pair at(int64_t i) const {
        const vi both = load_i(numbers + i);
        return {as_float(both << 16), as_float(both & static_cast<int32_t>(0xffff0000))};
    }
};
struct Fp32Pairs {
    const float* numbers;
    OCTAVO_INLINE Pair at(int64_t i) const { return {load(numbers + i), load(numbers + i + kLanes)}; }
};
struct Int8Pairs {
    const int8_t* numbers;
    OCTAVO_INLINE Pair at(int64_t i) const {
        return {to_float(load_int8(numbers + i)), to_float(load_int8(numbers + i + kLanes))};
    }
};
constexpr int kPair = 2 * kLanes;

// Calls `compute` with a reader for the matrix's element type, so that inner loops have no branch on the
// type.
template <typename Compute>
OCTAVO_INLINE void with_numbers(AdapterNumber type, const Compute& compute) {
    if (type == AdapterNumber::int8)
        compute([](const LowRankMatrix& m) { return Int8Pairs{static_cast<const int8_t*>(m.numbers)}; });
    else if (type == AdapterNumber::bf16)
        compute([](const LowRankMatrix& m) { return Bf16Pairs{static_cast<const uint16_t*>(m.numbers)}; });
    else
        compute([](const LowRankMatrix& m) { return Fp32Pairs{static_cast<const float*>(m.numbers)}; });
}

// Block sizes: as many sums as fit into the registers of the level beside their operands. All block sizes
// add the terms of a sum in the same order.
#if defined(__AVX512F__)
constexpr int kRanksAlone = 8, kRanks = 4, kRows = 4, kExpandedRows = 8, kExpandedPairs = 8, kApart = 4;
#elif defined(__AVX2__) || defined(OCTAVO_NEON)
constexpr int kRanksAlone = 4, kRanks = 2, kRows = 2, kExpandedRows = 4, kExpandedPairs = 2, kApart = 2;
#else
constexpr int kRanksAlone = 2, kRanks = 2, kRows = 1, kExpandedRows = 2, kExpandedPairs = 1, kApart = 1;
#endif

struct Shrunk {
    int stride, num_ranks;  // of A
    const float* const* x;
    int num_rows;
    const float* scales;  // by rank
    float* const* h;
};

// Computes J ranks from `rank` on for M rows from `row` on, and prefetches the J ranks after them.
template <int J, int M, typename Numbers>
void shrink_block(const Numbers& a, const Shrunk& s, int rank, int row) {
    vf sums[J][M] = {};
    const float* x[M];
    for (int m = 0; m < M; m++) x[m] = s.x[row + m];
    const int64_t first = static_cast<int64_t>(rank) * s.stride;
    for (int k = 0; k < s.stride; k += kPair) {
        vf xs[2][M];
        for (int m = 0; m < M; m++) xs[0][m] = load(x[m] + k), xs[1][m] = load(x[m] + k + kLanes);
        for (int j = 0; j < J; j++) {
            const int64_t at = first + static_cast<int64_t>(j) * s.stride + k;
            __builtin_prefetch(a.numbers + at + static_cast<int64_t>(J) * s.stride, 0, 2);
            const Pair weights = a.at(at);
            for (int m = 0; m < M; m++) sums[j][m] = fma(weights.first, xs[0][m], sums[j][m]);
            for (int m = 0; m < M; m++) sums[j][m] = fma(weights.second, xs[1][m], sums[j][m]);
        }
    }
    for (int j = 0; j < J; j++)
        for (int m = 0; m < M; m++) s.h[row + m][rank + j] = s.scales[rank + j] * sum_lanes(sums[j][m]);
}

// Computes the rows from `row` on, M at a time, and the remaining ones in smaller blocks.
template <int J, int M, typename Numbers>
void shrink_rows(const Numbers& a, const Shrunk& s, int rank, int row) {
    for (; row + M <= s.num_rows; row += M) shrink_block<J, M>(a, s, rank, row);
    if constexpr (M > 1) shrink_rows<J, M / 2>(a, s, rank, row);
}

template <int J, int M, typename Numbers>
void shrink_ranks(const Numbers& a, const Shrunk& s) {
    int rank = 0;
    for (; rank + J <= s.num_ranks; rank += J) shrink_rows<J, M>(a, s, rank, 0);
    for (; rank < s.num_ranks; rank++) shrink_rows<1, M>(a, s, rank, 0);
}

void shrink(const LowRankMatrix& a, const float* const* x, int num_rows, const float* scales,
            float* const* h) {
    const Shrunk shrunk{a.stride, a.rank, x, num_rows, scales, h};
    with_numbers(a.type, [&](const auto& numbers) {
        num_rows == 1 ? shrink_ranks<kRanksAlone, 1>(numbers(a), shrunk)
                      : shrink_ranks<kRanks, kRows>(numbers(a), shrunk);
    });
}

// The h and the sums of a block of tiles.
struct ExpandedTiles {
    const Expansion& rows;
    int tile;
    float* const* acc;  // by tile

    OCTAVO_INLINE const float* h(const ExpandedRows& run, int i) const {
        return run.h + run.rows[i] * rows.stride;
    }
    OCTAVO_INLINE void add(const ExpandedRows& run, int i, int n, vf sum) const {
        float* to = acc[n] + static_cast<int64_t>(run.rows[i] - rows.first) * kTile;
        vf y = load(to) + sum;
        if (run.gain) y = y * load(run.gain + (tile + n) * kTile);
        if (run.bias) y = y + load(run.bias + (tile + n) * kTile);
        store(to, y);
    }
};

// Computes N tiles of M rows of one adapter, from row i on. The sum of a row is one dependency chain, so
// several rows are needed to keep the FMA units busy.
template <int M, int N, typename Numbers>
OCTAVO_INLINE void expand_block(const Numbers& b, const ExpandedRows& run, int i, const ExpandedTiles& to) {
    const int rank = run.b.rank;
    const int64_t next = static_cast<int64_t>(rank + 1) / 2 * kPair, first = to.tile * next;
    const float* h[M];
    vf sums[N][M] = {};
    for (int m = 0; m < M; m++) h[m] = to.h(run, i + m);
    const auto step = [&](int j, bool is_whole) __attribute__((always_inline)) {
        Pair weights[N];
        for (int n = 0; n < N; n++) weights[n] = b.at(first + n * next + static_cast<int64_t>(j) * kLanes);
        for (int m = 0; m < M; m++) {
            const vf each = splat(h[m][j]);
            for (int n = 0; n < N; n++) sums[n][m] = fma(each, weights[n].first, sums[n][m]);
        }
        for (int m = 0; is_whole && m < M; m++) {
            const vf each = splat(h[m][j + 1]);
            for (int n = 0; n < N; n++) sums[n][m] = fma(each, weights[n].second, sums[n][m]);
        }
    };
    int j = 0;
    for (; j + 2 <= rank; j += 2) step(j, true);
    if (j < rank) step(j, false);
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) to.add(run, i + m, n, sums[n][m]);
}

// Computes N tiles of M adapters of the same rank with one row each.
template <int M, int N, typename Numbers>
OCTAVO_INLINE void expand_apart(const Numbers& numbers, const ExpandedRows* runs, const ExpandedTiles& to) {
    const int rank = runs->b.rank;
    const int64_t next = static_cast<int64_t>(rank + 1) / 2 * kPair, first = to.tile * next;
    decltype(numbers(runs->b)) b[M];
    const float* h[M];
    vf sums[N][M] = {};
    for (int m = 0; m < M; m++) b[m] = numbers(runs[m].b), h[m] = to.h(runs[m], 0);
    const auto step = [&](int j, bool is_whole) __attribute__((always_inline)) {
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) {
                const Pair weights = b[m].at(first + n * next + static_cast<int64_t>(j) * kLanes);
                sums[n][m] = fma(splat(h[m][j]), weights.first, sums[n][m]);
                if (is_whole) sums[n][m] = fma(splat(h[m][j + 1]), weights.second, sums[n][m]);
            }
    };
    int j = 0;
    for (; j + 2 <= rank; j += 2) step(j, true);
    if (j < rank) step(j, false);
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) to.add(runs[m], 0, n, sums[n][m]);
}

// Computes the rows from row i on, M at a time, and the remaining ones in smaller blocks.
template <int M, int N, typename Numbers>
OCTAVO_INLINE void expand_rows(const Numbers& b, const ExpandedRows& run, int i, const ExpandedTiles& to) {
    for (; i + M <= run.count; i += M) expand_block<M, N>(b, run, i, to);
    if constexpr (M > 1) expand_rows<M / 2, N>(b, run, i, to);
}

// Returns how many of the first runs, at most kApart, have one row each and the same rank and type.
inline int runs_apart(const ExpandedRows* runs, int num_runs) {
    int count = 0;
    while (count < std::min(num_runs, kApart) && runs[count].count == 1 &&
           runs[count].b.rank == runs->b.rank && runs[count].b.type == runs->b.type)
        count++;
    return count;
}

// Computes the first runs that can be computed together and returns how many.
template <int N>
int expand_next(const ExpandedRows* runs, int num_runs, const ExpandedTiles& to) {
    const int apart = runs_apart(runs, num_runs);
    with_numbers(runs->b.type, [&](const auto& numbers) {
        constexpr int kMaxRows = N == 2 ? kExpandedPairs : kExpandedRows;
        if (apart == kApart)
            expand_apart<kApart, N>(numbers, runs, to);
        else if (runs->count == 1)
            expand_block<1, N>(numbers(runs->b), *runs, 0, to);
        else
            expand_rows<kMaxRows, N>(numbers(runs->b), *runs, 0, to);
    });
    return apart == kApart ? kApart : 1;
}

void expand(const Expansion& expansion, int tile, int num_tiles, float* const* acc) {
    const ExpandedTiles to{expansion, tile, acc};
    for (int run = 0; run < expansion.num_runs;) {
        const ExpandedRows* runs = expansion.runs + run;
        const int left = expansion.num_runs - run;
        run += num_tiles == 2 ? expand_next<2>(runs, left, to) : expand_next<1>(runs, left, to);
    }
}

// Returns element i of a table.
inline float number_at(const LowRankMatrix& table, int64_t i) {
    if (table.type == AdapterNumber::int8) return (static_cast<const int8_t*>(table.numbers))[i];
    if (table.type == AdapterNumber::bf16)
        return bf16_to_float((static_cast<const uint16_t*>(table.numbers))[i]);
    return (static_cast<const float*>(table.numbers))[i];
}

void read_ranks(const LowRankMatrix& table, int row, const float* scales, float scale, float* h) {
    const int64_t first = static_cast<int64_t>(row) * table.rank;
    for (int j = 0; j < table.rank; j++) h[j] = scales[j] * scale * number_at(table, first + j);
}

}  // namespace
}  // namespace octavo
