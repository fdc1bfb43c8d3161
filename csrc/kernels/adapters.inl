// Adapters: h = A x of some rows, and B h added to a tile of sums. Every sum is fp32 and goes through its
// terms in one order, however many rows or ranks are computed together.
#pragma once
#include "simd.h"
#include "table.h"

namespace octavo {
namespace {

OCTAVO_INLINE vf load_numbers(const LowRankMatrix& m, int64_t at) {
    return m.is_bf16 ? load_bf16((const uint16_t*)m.numbers + at) : load((const float*)m.numbers + at);
}

// How much a block holds at once: as many sums as the registers of a level have room for, beside what they are
// made of. The order of a sum's terms is the same in all blocks.
#if defined(__AVX512F__)
constexpr int kRanksAlone = 8, kRanks = 4, kRows = 4, kExpandedRows = 8;
#elif defined(__AVX2__)
constexpr int kRanksAlone = 4, kRanks = 2, kRows = 2, kExpandedRows = 4;
#else
constexpr int kRanksAlone = 2, kRanks = 2, kRows = 1, kExpandedRows = 2;
#endif

// J ranks from `rank` on, times M rows from `row` on.
template <int J, int M>
void shrink_block(const LowRankMatrix& a, int rank, const float* x, int row, float scale, float* const* h) {
    vf sums[J][M] = {};
    const float* first = x + (int64_t)row * a.stride;
    for (int k = 0; k < a.stride; k += kLanes) {
        vf xs[M];
        for (int m = 0; m < M; m++) xs[m] = load(first + (int64_t)m * a.stride + k);
        for (int j = 0; j < J; j++) {
            const vf weights = load_numbers(a, (int64_t)(rank + j) * a.stride + k);
            for (int m = 0; m < M; m++) sums[j][m] = fma(weights, xs[m], sums[j][m]);
        }
    }
    for (int j = 0; j < J; j++)
        for (int m = 0; m < M; m++) h[row + m][rank + j] = scale * sum_lanes(sums[j][m]);
}

// The rows from `row` on, M at a time, and the last ones in smaller blocks.
template <int J, int M>
void shrink_rows(const LowRankMatrix& a, int rank, const float* x, int row, int num_rows, float scale,
                 float* const* h) {
    for (; row + M <= num_rows; row += M) shrink_block<J, M>(a, rank, x, row, scale, h);
    if constexpr (M > 1) shrink_rows<J, M / 2>(a, rank, x, row, num_rows, scale, h);
}

template <int J, int M>
void shrink_ranks(const LowRankMatrix& a, const float* x, int num_rows, float scale, float* const* h) {
    int rank = 0;
    for (; rank + J <= a.rank; rank += J) shrink_rows<J, M>(a, rank, x, 0, num_rows, scale, h);
    for (; rank < a.rank; rank++) shrink_rows<1, M>(a, rank, x, 0, num_rows, scale, h);
}

void shrink(const LowRankMatrix& a, const float* x, int num_rows, float scale, float* const* h) {
    if (num_rows == 1)
        shrink_ranks<kRanksAlone, 1>(a, x, num_rows, scale, h);
    else
        shrink_ranks<kRanks, kRows>(a, x, num_rows, scale, h);
}

// M of the rows from the i-th on. A row's sum is one chain, so that several are needed to fill the units.
template <int M>
void expand_block(const LowRankMatrix& b, int tile, const ExpandedRows& rows, int i, float* acc) {
    const int64_t first = (int64_t)tile * kTile * b.rank;
    const float* h[M];
    vf sums[M] = {};
    for (int m = 0; m < M; m++) h[m] = rows.h + rows.rows[i + m] * rows.stride;
    for (int j = 0; j < b.rank; j++) {
        const vf weights = load_numbers(b, first + (int64_t)j * kTile);
        for (int m = 0; m < M; m++) sums[m] = fma(splat(h[m][j]), weights, sums[m]);
    }
    for (int m = 0; m < M; m++) {
        float* to = acc + (int64_t)(rows.rows[i + m] - rows.first) * kTile;
        vf y = load(to) + sums[m];
        if (rows.gain) y = y * load(rows.gain + tile * kTile);
        if (rows.bias) y = y + load(rows.bias + tile * kTile);
        store(to, y);
    }
}

// The rows from the i-th on, M at a time, and the last ones in smaller blocks.
template <int M>
void expand_rows(const LowRankMatrix& b, int tile, const ExpandedRows& rows, int i, float* acc) {
    for (; i + M <= rows.count; i += M) expand_block<M>(b, tile, rows, i, acc);
    if constexpr (M > 1) expand_rows<M / 2>(b, tile, rows, i, acc);
}

void expand(const LowRankMatrix& b, int tile, const ExpandedRows& rows, float* acc) {
    expand_rows<kExpandedRows>(b, tile, rows, 0, acc);
}

void read_ranks(const LowRankMatrix& table, int row, float scale, float* h) {
    const int64_t first = (int64_t)row * table.rank;
    for (int j = 0; j < table.rank; j++)
        h[j] = scale * (table.is_bf16 ? bf16_to_float(((const uint16_t*)table.numbers)[first + j])
                                      : ((const float*)table.numbers)[first + j]);
}

}  // namespace
}  // namespace octavo
