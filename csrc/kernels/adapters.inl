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

template <int J>
void shrink_ranks(const LowRankMatrix& a, int rank, const float* x, int num_rows, float scale,
                  float* const* h) {
    int row = 0;
    for (; row + 2 <= num_rows; row += 2) shrink_block<J, 2>(a, rank, x, row, scale, h);
    if (row < num_rows) shrink_block<J, 1>(a, rank, x, row, scale, h);
}

void shrink(const LowRankMatrix& a, const float* x, int num_rows, float scale, float* const* h) {
    int rank = 0;
    for (; rank + 4 <= a.rank; rank += 4) shrink_ranks<4>(a, rank, x, num_rows, scale, h);
    for (; rank < a.rank; rank++) shrink_ranks<1>(a, rank, x, num_rows, scale, h);
}

void expand(const LowRankMatrix& b, int tile, const float* h, const float* gain, const float* bias,
            float* acc) {
    vf sum{};
    const int64_t first = (int64_t)tile * kTile * b.rank;
    for (int j = 0; j < b.rank; j++) sum = fma(splat(h[j]), load_numbers(b, first + (int64_t)j * kTile), sum);
    vf y = load(acc) + sum;
    if (gain) y = y * load(gain + tile * kTile);
    if (bias) y = y + load(bias + tile * kTile);
    store(acc, y);
}

void read_ranks(const LowRankMatrix& table, int row, float scale, float* h) {
    const int64_t first = (int64_t)row * table.rank;
    for (int j = 0; j < table.rank; j++)
        h[j] = scale * (table.is_bf16 ? bf16_to_float(((const uint16_t*)table.numbers)[first + j])
                                      : ((const float*)table.numbers)[first + j]);
}

}  // namespace
}  // namespace octavo
