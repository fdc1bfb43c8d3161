// Matmuls with signed 8-bit codes and one scale per output.
#pragma once
#include "group_scales.inl"

namespace octavo {
namespace {

OCTAVO_INLINE vf output_scales(const Tiles& w, const uint8_t* tile) {
    return load(reinterpret_cast<const float*>(tile + w.tile_bytes) - kTile);
}

// Adds the dot products of a row's second terms to `sum`, two quads at a time in independent chains. The
// list is padded with zeros, so an odd number of quads needs no special case.
template <int T>
OCTAVO_INLINE void add_outliers(const OutlierList& list, const uint8_t* const (&tile)[T], vi (&sum)[T]) {
    const int count = *list.count;
    vi other[T] = {};
    const auto add = [&](vi(&to)[T], int i) {
        const vi terms = broadcast4(list.terms + 4 * i);
        for (int t = 0; t < T; t++)
            to[t] = dot4_signed(
                to[t], for_dot4_signed(load_i(tile[t] + 64 * static_cast<size_t>(list.quads[i]))), terms);
    };
    for (int i = 0; i < count; i += 2) add(sum, i), add(other, i + 1);
    for (int t = 0; t < T; t++) sum[t] += other[t];
}

// One term for most values of a row, and one d per row. The sums over all inputs of T tiles and M rows stay
// in registers; the few quads with a second term are added afterwards, row by row. All sums are exact, so T
// and M do not change them. Loops over rows are unrolled, since only arrays with constant indices stay in
// registers.
template <int M, int T>
void matmul_outliers(const TileRef* refs, const QuantizedRows& x, int64_t row, const RowPass& pass) {
    constexpr int kChains = M * T >= 8 ? 1 : 8 / (M * T);  // independent chains of sums
    const int inputs = x.num_groups * kGroup;
    const int8_t* q = static_cast<const int8_t*>(x.values) + row * x.stride;
    const int32_t* first =
        x.sums + x.half_at(row, 0, 0);  // sums of the terms, which correct for the offset of the codes
    const int32_t* second = first + kTile;
    const float* d = x.scales + x.at(row, 0);
    const uint8_t* tile[T];
    float* acc[T];
    for (int t = 0; t < T; t++) tile[t] = refs[t].data(), acc[t] = refs[t].acc + 16 * pass.first_row;
    vi sum[T][M][kChains] = {};
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        const vi offset = splat_i(-kSignedOffset * first[m]);
#pragma GCC unroll 2
        for (int t = 0; t < T; t++) sum[t][m][0] = offset;
    }
    WeightPrefetcher<M> prefetcher(pass, *refs->weight);
    for (int k = 0; k < inputs; k += 4 * kChains) {
        prefetcher.step();
        for (int c = 0; c < kChains; c++) {
            const size_t at = k + 4 * c;
            vi codes[T];
            for (int t = 0; t < T; t++) {
                prefetcher.template prefetch<64>(tile[t] + 16 * at);
                codes[t] = for_dot4_signed(load_i(tile[t] + 16 * at));
            }
            for (int m = 0; m < M; m++) {
                const vi terms = broadcast4(q + m * x.stride + at);
                for (int t = 0; t < T; t++) sum[t][m][c] = dot4_signed(sum[t][m][c], codes[t], terms);
            }
        }
    }
    vf scale[T];
    prefetcher.step();
    for (int t = 0; t < T; t++) {
        scale[t] = output_scales(*refs[t].weight, tile[t]);
        prefetcher.template prefetch<64>(tile[t] + 16 * static_cast<size_t>(inputs));
    }
    vi more[M][T];
    for (int m = 0; m < M; m++) {
        for (int t = 0; t < T; t++) more[m][t] = splat_i(-kSignedOffset * second[m]);
        add_outliers<T>(OutlierList(const_cast<int8_t*>(q) + m * x.stride, inputs), tile, more[m]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        const vf by = splat(d[m]);
#pragma GCC unroll 2
        for (int t = 0; t < T; t++) {
            vi whole = sum[t][m][0];
            for (int c = 1; c < kChains; c++) whole += sum[t][m][c];
            store(acc[t] + 16 * m,
                  fma(to_float(more[m][t]), splat(kOutlierUnit), to_float(whole)) * (scale[t] * by));
        }
    }
}

// Returns the result of a row from its sums of code * first term and code * second term over all inputs.
OCTAVO_INLINE vf scale_whole(const QuantizedRows& x, int64_t row, vf scale, vi first, vi second) {
    return fma(to_float(first), splat(kWholeUnit), to_float(second)) * (scale * x.scales[x.at(row, 0)]);
}

// Two terms and one scale per row. Adding 128 makes the codes unsigned, as the instruction requires;
// subtracting 128 times the sum of the terms corrects for it. Few rows use several independent chains.
template <int M>
void matmul_whole(const TileRef* ref, const QuantizedRows& x, int64_t row, const RowPass& pass) {
    const Tiles& w = *ref->weight;
    const uint8_t* tile = ref->data();
    constexpr int kChains = M == 1 ? 4 : M == 2 ? 2 : 1;
    const int inputs = w.num_groups * kGroup;
    const int8_t* q = static_cast<const int8_t*>(x.values) + row * x.stride;
    vi first[M][kChains] = {}, second[M][kChains] = {};
    WeightPrefetcher<M> prefetcher(pass, w);
    for (int k = 0; k < inputs; k += 4 * kChains) {
        prefetcher.step();
        prefetcher.template prefetch<64 * kChains>(tile + 16 * static_cast<size_t>(k));
        for (int c = 0; c < kChains; c++) {
            const vi codes =
                load_i(tile + 16 * static_cast<size_t>(k + 4 * c)) ^ static_cast<int32_t>(0x80808080);
            for (int m = 0; m < M; m++) {
                const int8_t* at = q + m * x.stride + k + 4 * c;
                first[m][c] = dot4(first[m][c], codes, broadcast4(at));
                second[m][c] = dot4(second[m][c], codes, broadcast4(at + inputs));
            }
        }
    }
    const vf scale = output_scales(w, tile);
    prefetcher.step();
    prefetcher.template prefetch<64>(tile + 16 * static_cast<size_t>(inputs));
    for (int m = 0; m < M; m++) {
        for (int c = 1; c < kChains; c++) first[m][0] += first[m][c], second[m][0] += second[m][c];
        const int32_t* sums = x.sums + x.half_at(row + m, 0, 0);
        store(ref->acc + 16 * (pass.first_row + m),
              scale_whole(x, row + m, scale, first[m][0] - 128 * sums[0], second[m][0] - 128 * sums[kTile]));
    }
}

}  // namespace
}  // namespace octavo
