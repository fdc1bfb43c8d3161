// Matmuls of rows with weight tiles, 16 outputs at a time. Layouts: weights.h.
//
// Every variant follows one rule, so that the result of a row never depends on other rows: over the groups
// g of 32 inputs, in order, acc = fma(float(isum), scale * d, acc), then acc = fma(min, d * sum, acc),
// where isum is the exact int32 sum of (code - zero_point) * q and sum is the sum of q. A group's zero
// point stands for min = -zero * scale. Rows for codes with one scale per output have one d, so that exact
// sums run over all inputs and are scaled once; their integers have two int8 terms on AMX (`scale_whole`),
// elsewhere most have one (`matmul_outliers`). fp32 and fp16 use four chains over k mod 4, added as
// (c0 + c1) + (c2 + c3); bf16 one chain over pairs; float codes likewise over the groups that share a scale,
// with acc = fma(sum, scale, acc) over these. `M` rows share each weight that is loaded; they never straddle
// a block of 16 rows. Float weights: linear_floats.inl.
#pragma once
#include <algorithm>

#include "linear_grouped.inl"
#include "linear_whole.inl"

namespace octavo {
namespace {

// -- dispatch --

// Multiplies M rows from `row` on by T tiles and stores the results from row `pass.first_row` of their
// `acc` on.
using MatmulFn = void (*)(const TileRef* tiles, const QuantizedRows& x, int64_t row, const RowPass& pass);

template <int M, ScaleType S, ZeroPointKind Z>
MatmulFn choose_zero_point(const Tiles& w) {
    if constexpr (Z != ZeroPointKind::zero) {
        if constexpr (S == ScaleType::small && Z == ZeroPointKind::min)
            if (w.code == Code::u2) return matmul_u8<M, S, Z, true, Code::u2>;
        if constexpr (S == ScaleType::small && Z == ZeroPointKind::none) {
            if (w.code == Code::u3) return matmul_u8<M, S, Z, true, Code::u3>;
            if (w.code == Code::u6) return matmul_u8<M, S, Z, true, Code::u6>;
        }
        if constexpr (S != ScaleType::fp32)
            if (w.code == Code::u5) return matmul_u8<M, S, Z, false, Code::u5>;
        if (w.half_groups)
            return w.code == Code::l4 ? matmul_u8<M, S, Z, true, Code::l4> : matmul_u8<M, S, Z, true>;
        if (w.code == Code::l4) return matmul_u8<M, S, Z, false, Code::l4>;
    }
    return w.code == Code::u4 ? matmul_u4<M, S, Z> : matmul_u8<M, S, Z, false>;
}

template <int M, ScaleType S>
MatmulFn choose_scaled(const Tiles& w) {
    if constexpr (S != ScaleType::small)
        if (w.zero_point_kind == ZeroPointKind::zero) return choose_zero_point<M, S, ZeroPointKind::zero>(w);
    return w.zero_point_kind == ZeroPointKind::min ? choose_zero_point<M, S, ZeroPointKind::min>(w)
                                                   : choose_zero_point<M, S, ZeroPointKind::none>(w);
}

template <int M, int T>
MatmulFn choose(const Tiles& w) {
    if (w.code == Code::i8 && !kTwoTerms) return matmul_outliers<M, T>;
    if (w.code == Code::bf16) return matmul_bf16<M, T>;
    if constexpr (T > 1) return nullptr;
    switch (w.code) {
        case Code::f4: return matmul_f4<M>;
        case Code::e4m3: return matmul_e4m3<M>;
        case Code::i8: return matmul_whole<M>;
        case Code::fp16: return matmul_float<M, true>;
        case Code::fp32: return matmul_float<M, false>;
        default: break;
    }
    switch (w.scale_type) {
        case ScaleType::fp16: return choose_scaled<M, ScaleType::fp16>(w);
        case ScaleType::small: return choose_scaled<M, ScaleType::small>(w);
        default: return choose_scaled<M, ScaleType::fp32>(w);
    }
}

RowType row_type(Code code) {
    switch (code) {
        case Code::u4:
        case Code::u8:
        case Code::l4:
        case Code::u2:
        case Code::u3:
        case Code::u5:
        case Code::u6: return RowType::int8;
        case Code::i8: return kTwoTerms ? RowType::whole : RowType::outliers;
        case Code::bf16:
        case Code::e4m3: return RowType::bf16;
        default: return RowType::fp32;
    }
}

// Rows, rows of floats, and row-tile sums that fit into registers at a time.
constexpr bool kManyRegisters = kRegisterLanes == kLanes;
constexpr int kMaxRows = kManyRegisters ? 8 : 4, kMaxFloatRows = kManyRegisters ? 4 : 2,
              kMaxSums = kManyRegisters ? 16 : 4;

// Multiplies rows by one tile or two. With one or two rows memory bandwidth dominates, and tiles are
// computed one after another to read one stream.
void vector_matmul(const TileRef* tiles, int count, const QuantizedRows& x, int64_t row0, int num_rows) {
    const Tiles& w = *tiles->weight;
    if (count == 2 && !w.is_laid_out_as(*tiles[1].weight)) {
        vector_matmul(tiles, 1, x, row0, num_rows);
        return vector_matmul(tiles + 1, 1, x, row0, num_rows);
    }
    const bool pairs = count == 2 && num_rows > 2;
    const int max_rows = row_type(w.code) == RowType::fp32 ? kMaxFloatRows : kMaxRows;
    RowPass pass{count, 0, 0, std::max(num_rows / max_rows + (num_rows % max_rows > 2), 1)};
    Prefetcher prefetcher(tiles->prefetch, num_rows / max_rows + __builtin_popcount(num_rows % max_rows));
    const auto run = [&]<int M>() {
        const MatmulFn one = choose<M, 1>(w), two = pairs && 2 * M <= kMaxSums ? choose<M, 2>(w) : nullptr;
        for (; num_rows - pass.first_row >= M; pass.first_row += M, pass.index++) {
            prefetcher.step();
            if (two)
                two(tiles, x, row0 + pass.first_row, pass);
            else
                for (int i = 0; i < count; i++) one(tiles + i, x, row0 + pass.first_row, pass);
        }
    };
    if constexpr (kMaxRows >= 8)
        if (max_rows >= 8) run.template operator()<8>();
    if (max_rows >= 4) run.template operator()<4>();
    run.template operator()<2>();
    run.template operator()<1>();
}

}  // namespace
}  // namespace octavo
