// Matmuls with float weights: bf16, fp16 and fp32, and codes that stand for floats. Summation order:
// linear.inl.
#pragma once
#include <algorithm>

#include "prefetch.inl"

namespace octavo {
namespace {

// One chain of sums per row and output, over pairs of inputs. Working on as many rows and tiles as
// registers hold hides the latency of the chain.
template <int M, int T>
void matmul_bf16(const TileRef* refs, const QuantizedRows& x, int64_t row, const RowPass& pass) {
    const auto* values = static_cast<const uint16_t*>(x.values) + row * x.stride;
    const uint8_t* tile[T];
    for (int t = 0; t < T; t++) tile[t] = refs[t].data();
    const int pairs = x.num_groups * kGroup / 2;
    vf acc[T][M] = {};
    WeightPrefetcher<M> prefetcher(pass, *refs->weight);
    for (int p = 0; p < pairs; p++) {
        prefetcher.step();
        vi weights[T];
        for (int t = 0; t < T; t++) {
            prefetcher.template prefetch<64>(tile[t] + 64 * static_cast<size_t>(p));
            weights[t] = load_i(tile[t] + 64 * static_cast<size_t>(p));
        }
        for (int m = 0; m < M; m++) {
            const vi a = broadcast4(values + m * x.stride + 2 * p);
            for (int t = 0; t < T; t++) acc[t][m] = dot2_bf16(acc[t][m], weights[t], a);
        }
    }
    for (int t = 0; t < T; t++)
        for (int m = 0; m < M; m++) store(refs[t].acc + 16 * (pass.first_row + m), acc[t][m]);
}

template <int M, bool kHalf>
void matmul_float(const TileRef* ref, const QuantizedRows& x, int64_t row, const RowPass& pass) {
    const Tiles& w = *ref->weight;
    const uint8_t* tile = ref->data();
    const float* values = static_cast<const float*>(x.values) + row * x.stride;
    const int inputs = w.num_groups * kGroup;
    vf acc[M][4] = {};
    WeightPrefetcher<M> prefetcher(pass, w);
    for (int k = 0; k < inputs; k += 4) {
        prefetcher.step();
        prefetcher.template prefetch<(kHalf ? 128 : 256)>(tile +
                                                          static_cast<size_t>(k) * kTile * (kHalf ? 2 : 4));
        for (int c = 0; c < 4; c++) {
            const size_t at = static_cast<size_t>(k + c) * kTile;
            const vf weights = kHalf ? load_fp16(reinterpret_cast<const uint16_t*>(tile) + at)
                                     : load(reinterpret_cast<const float*>(tile) + at);
            for (int m = 0; m < M; m++)
                acc[m][c] = fma(weights, splat(values[m * x.stride + k + c]), acc[m][c]);
        }
    }
    for (int m = 0; m < M; m++)
        store(ref->acc + 16 * (pass.first_row + m), (acc[m][0] + acc[m][1]) + (acc[m][2] + acc[m][3]));
}

// 4-bit float codes, in four chains over k mod 4 for the inputs that share a scale.
template <int M>
void matmul_f4(const TileRef* ref, const QuantizedRows& x, int64_t row, const RowPass& pass) {
    constexpr int kCodes = kGroup * kTile / 2;
    const Tiles& w = *ref->weight;
    const uint8_t* tile = ref->data();
    const float* values = static_cast<const float*>(x.values) + row * x.stride;
    const Floats16 numbers(w.numbers);
    vf acc[M] = {};
    WeightPrefetcher<M> prefetcher(pass, w);
    for (int g = 0; g < w.num_groups;) {
        const vf scale = load(reinterpret_cast<const float*>(tile));
        tile += kTile * sizeof(float);
        vf sum[M][4] = {};
        for (const int end = std::min(g + w.span, static_cast<int>(w.num_groups)); g < end;
             g++, tile += kCodes) {
            prefetcher.step();
            prefetcher.template prefetch<kCodes>(tile);
            for (int v = 0; v < 4; v++) {
                const vi both = load_i(tile + 64 * v);
                const float* at = values + kGroup * g + 8 * v;
                for (int b = 0; b < 4; b++) {
                    const vf low = numbers(both >> (8 * b)), high = numbers(both >> (8 * b + 4));
                    for (int m = 0; m < M; m++) {
                        sum[m][b] = fma(low, splat(at[m * x.stride + b]), sum[m][b]);
                        sum[m][b] = fma(high, splat(at[m * x.stride + 4 + b]), sum[m][b]);
                    }
                }
            }
        }
        for (int m = 0; m < M; m++)
            acc[m] = fma((sum[m][0] + sum[m][1]) + (sum[m][2] + sum[m][3]), scale, acc[m]);
    }
    for (int m = 0; m < M; m++) store(ref->acc + 16 * (pass.first_row + m), acc[m]);
}

// e4m3, which bf16 represents exactly, in one chain over pairs for the inputs that share a scale.
template <int M>
void matmul_e4m3(const TileRef* ref, const QuantizedRows& x, int64_t row, const RowPass& pass) {
    constexpr int kCodes = kGroup * kTile;
    const Tiles& w = *ref->weight;
    const uint8_t* tile = ref->data();
    const uint16_t* values = static_cast<const uint16_t*>(x.values) + row * x.stride;
    vf acc[M] = {};
    WeightPrefetcher<M> prefetcher(pass, w);
    for (int g = 0; g < w.num_groups;) {
        const vf scale = load(reinterpret_cast<const float*>(tile));
        tile += kTile * sizeof(float);
        vf sum[M] = {};
        for (const int end = std::min(g + w.span, static_cast<int>(w.num_groups)); g < end;
             g++, tile += kCodes) {
            prefetcher.step();
            prefetcher.template prefetch<kCodes>(tile);
            for (int v = 0; v < 8; v++) {
                const vi four = load_i(tile + 64 * v);
                const vi first = e4m3_to_bf16(four), second = e4m3_to_bf16(four >> 8);
                const uint16_t* at = values + kGroup * g + 4 * v;
                for (int m = 0; m < M; m++) {
                    sum[m] = dot2_bf16(sum[m], first, broadcast4(at + m * x.stride));
                    sum[m] = dot2_bf16(sum[m], second, broadcast4(at + m * x.stride + 2));
                }
            }
        }
        for (int m = 0; m < M; m++) acc[m] = fma(sum[m], scale, acc[m]);
    }
    for (int m = 0; m < M; m++) store(ref->acc + 16 * (pass.first_row + m), acc[m]);
}

// Returns the value of input k and output `lane` in a tile of float codes.
float float_code_at(const Tiles& w, const uint8_t* tile, int lane, int k) {
    const int g = k / kGroup, in = k % kGroup;
    const size_t codes = kGroup * kTile / (w.code == Code::f4 ? 2 : 1), scales = kTile * sizeof(float);
    const uint8_t* span = tile + g / w.span * (scales + w.span * codes);
    const uint8_t* group = span + scales + g % w.span * codes;
    const float scale = (reinterpret_cast<const float*>(span))[lane];
    if (w.code == Code::f4) {
        const uint8_t byte = group[64 * (in / 8) + 4 * lane + in % 4];
        return w.numbers[in % 8 < 4 ? byte & 15 : byte >> 4] * scale;
    }
    constexpr int kPlaces[4] = {0, 2, 1, 3};
    return bf16_to_float(e4m3_bits(group[64 * (in / 4) + 4 * lane + kPlaces[in % 4]])) * scale;
}

}  // namespace
}  // namespace octavo
