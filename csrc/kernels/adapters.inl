// Adapters: h = A x of some rows, and B h added to a tile of sums. Every sum is fp32 and goes through its
// terms in one order, however many rows or ranks are computed together.
#pragma once
#include "simd.h"
#include "table.h"

namespace octavo {
namespace {

struct Bf16Numbers {
    const uint16_t* numbers;
    vf at(int64_t i) const { return load_bf16(numbers + i); }
};
struct Fp32Numbers {
    const float* numbers;
    vf at(int64_t i) const { return load(numbers + i); }
};
// Calls `compute` with what reads the numbers of a matrix, so that no loop asks for their type.
template <typename Compute>
OCTAVO_INLINE void with_numbers(const LowRankMatrix& m, const Compute& compute) {
    m.is_bf16 ? compute(Bf16Numbers{(const uint16_t*)m.numbers})
              : compute(Fp32Numbers{(const float*)m.numbers});
}

// How much a block holds at once: as many sums as the registers of a level have room for, beside what they are
// made of. The order of a sum's terms is the same in all blocks.
#if defined(__AVX512F__)
constexpr int kRanksAlone = 8, kRanks = 4, kRows = 4, kExpandedRows = 8, kExpandedPairs = 8;
#elif defined(__AVX2__)
constexpr int kRanksAlone = 4, kRanks = 2, kRows = 2, kExpandedRows = 4, kExpandedPairs = 2;
#else
constexpr int kRanksAlone = 2, kRanks = 2, kRows = 1, kExpandedRows = 2, kExpandedPairs = 1;
#endif

struct Shrunk {
    int stride, num_ranks;  // of A
    const float* x;
    int num_rows;
    float scale;
    float* const* h;
};

// J ranks from `rank` on, times M rows from `row` on.
template <int J, int M, typename Numbers>
void shrink_block(const Numbers& a, const Shrunk& s, int rank, int row) {
    vf sums[J][M] = {};
    const float* first = s.x + (int64_t)row * s.stride;
    for (int k = 0; k < s.stride; k += kLanes) {
        vf xs[M];
        for (int m = 0; m < M; m++) xs[m] = load(first + (int64_t)m * s.stride + k);
        for (int j = 0; j < J; j++) {
            const vf weights = a.at((int64_t)(rank + j) * s.stride + k);
            for (int m = 0; m < M; m++) sums[j][m] = fma(weights, xs[m], sums[j][m]);
        }
    }
    for (int j = 0; j < J; j++)
        for (int m = 0; m < M; m++) s.h[row + m][rank + j] = s.scale * sum_lanes(sums[j][m]);
}

// The rows from `row` on, M at a time, and the last ones in smaller blocks.
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

void shrink(const LowRankMatrix& a, const float* x, int num_rows, float scale, float* const* h) {
    const Shrunk shrunk{a.stride, a.rank, x, num_rows, scale, h};
    with_numbers(a, [&](const auto& numbers) {
        num_rows == 1 ? shrink_ranks<kRanksAlone, 1>(numbers, shrunk)
                      : shrink_ranks<kRanks, kRows>(numbers, shrunk);
    });
}

// N tiles of M of the rows from the i-th on. A row's sum is one chain, so that several are needed to fill the
// units.
template <int M, int N, typename Numbers>
OCTAVO_INLINE void expand_block(const Numbers& b, int rank, int tile, const ExpandedRows& rows, int i,
                                float* const* acc) {
    const int64_t first = (int64_t)tile * kTile * rank, next = (int64_t)kTile * rank;
    const float* h[M];
    vf sums[N][M] = {};
    for (int m = 0; m < M; m++) h[m] = rows.h + rows.rows[i + m] * rows.stride;
    for (int j = 0; j < rank; j++) {
        vf weights[N];
        for (int n = 0; n < N; n++) weights[n] = b.at(first + n * next + (int64_t)j * kTile);
        for (int m = 0; m < M; m++) {
            const vf each = splat(h[m][j]);
            for (int n = 0; n < N; n++) sums[n][m] = fma(each, weights[n], sums[n][m]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            float* to = acc[n] + (int64_t)(rows.rows[i + m] - rows.first) * kTile;
            vf y = load(to) + sums[n][m];
            if (rows.gain) y = y * load(rows.gain + (tile + n) * kTile);
            if (rows.bias) y = y + load(rows.bias + (tile + n) * kTile);
            store(to, y);
        }
}

// The rows from the i-th on, M at a time, and the last ones in smaller blocks.
template <int M, int N, typename Numbers>
void expand_rows(const Numbers& b, int rank, int tile, const ExpandedRows& rows, int i, float* const* acc) {
    for (; i + M <= rows.count; i += M) expand_block<M, N>(b, rank, tile, rows, i, acc);
    if constexpr (M > 1) expand_rows<M / 2, N>(b, rank, tile, rows, i, acc);
}

// Asks for the tiles behind these, which the same thread expands next. With an adapter for each row they lie
// in as many places as there are rows, more than the hardware's prefetcher follows.
void prefetch_tiles(const LowRankMatrix& b, int tile, int num_tiles) {
    const int64_t bytes = (int64_t)num_tiles * kTile * b.rank * (b.is_bf16 ? 2 : 4);
    const char* next = (const char*)b.numbers + bytes / num_tiles * (tile + num_tiles);
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(next + line, 0, 3);
}

void expand(const LowRankMatrix& b, int tile, int num_tiles, const ExpandedRows& rows, float* const* acc) {
    if (rows.count <= 2) prefetch_tiles(b, tile, num_tiles);
    with_numbers(b, [&](const auto& numbers) {
        if (num_tiles == 2)
            rows.count == 1 ? expand_block<1, 2>(numbers, b.rank, tile, rows, 0, acc)
                            : expand_rows<kExpandedPairs, 2>(numbers, b.rank, tile, rows, 0, acc);
        else
            rows.count == 1 ? expand_block<1, 1>(numbers, b.rank, tile, rows, 0, acc)
                            : expand_rows<kExpandedRows, 1>(numbers, b.rank, tile, rows, 0, acc);
    });
}

void read_ranks(const LowRankMatrix& table, int row, float scale, float* h) {
    const int64_t first = (int64_t)row * table.rank;
    for (int j = 0; j < table.rank; j++)
        h[j] = scale * (table.is_bf16 ? bf16_to_float(((const uint16_t*)table.numbers)[first + j])
                                      : ((const float*)table.numbers)[first + j]);
}

}  // namespace
}  // namespace octavo
