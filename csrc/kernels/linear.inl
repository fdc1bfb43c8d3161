// Products of rows with weight tiles, 16 outputs at a time. The layouts are drawn in table.h.
//
// One rule holds in every variant, so that a row's result never depends on its neighbours: over the groups g
// of 32 inputs, in order, acc = fma(float(isum), scale * d, acc), then acc = fma(min, d * sum, acc), where
// isum is the exact int32 sum of (code - zero_point) * q and sum that of q; a zero of its group stands for
// the min -zero * scale. Rows beside codes with one scale
// an output have one d, so that exact sums run over all inputs and are scaled once; their numbers have two
// int8 terms where the level has the tile unit (`scale_whole`), elsewhere most have one (`product_outliers`).
// Rows beside 4-bit codes have two terms with the tile unit. fp32 and fp16 run in four chains over k mod 4,
// added as (c0 + c1) + (c2 + c3); bf16 in one chain over pairs; codes of floats likewise over the groups that
// share a scale, and acc = fma(sum, scale, acc) over these. `M` rows share each weight that is loaded;
// they never straddle a block of 16 rows. Products of floats stand in linear_floats.inl.
#pragma once
#include <algorithm>

#include "linear_floats.inl"

namespace octavo {
namespace {

template <ScaleType S>
OCTAVO_INLINE vf load_scale(const uint8_t* p) {
    if constexpr (S == ScaleType::small) return to_float(load_int8(reinterpret_cast<const int8_t*>(p)));
    return S == ScaleType::fp16 ? load_fp16(reinterpret_cast<const uint16_t*>(p))
                                : load(reinterpret_cast<const float*>(p));
}
constexpr size_t scale_bytes_of(ScaleType type) {
    return type == ScaleType::small ? kTile : type == ScaleType::fp16 ? 32 : 64;
}
template <ScaleType S>
constexpr size_t scale_bytes() {
    return scale_bytes_of(S);
}

template <ScaleType S, Low L>
constexpr size_t low_bytes() {
    return L == Low::none ? 0 : L == Low::zero ? static_cast<size_t>(kTile) : scale_bytes<S>();
}
// Returns a group's mins, those that its zeros stand for where it has zeros.
template <ScaleType S, Low L>
OCTAVO_INLINE vf load_min(const uint8_t* p, vf scale) {
    if (L == Low::none) return vf{};
    return L == Low::zero ? to_float(load_int8(reinterpret_cast<const int8_t*>(p))) * (-scale)
                          : load_scale<S>(p);
}

// Returns the bytes of the factors before each kSmallSpan groups.
OCTAVO_INLINE size_t factor_bytes(const Tiles& w) {
    if (w.scale_type != ScaleType::small) return 0;
    return kTile * (w.half_factors ? 2 : 4) * (w.low == Low::min ? 2 : 1);
}

// The scales and mins of a tile's groups, one group after the other.
template <ScaleType S, Low L, bool kShared = false>
class GroupLevels {
  public:
    explicit GroupLevels(const Tiles& w) : half_(w.half_factors), num_bytes_(factor_bytes(w)) {}
    // Returns where group g's codes begin, of which the tile's next bytes are at `tile`.
    OCTAVO_INLINE const uint8_t* begin(const uint8_t* tile, int g) {
        if constexpr (S == ScaleType::small)
            if (g % kSmallSpan == 0) {
                scales_ = factors(tile, 0);
                if (L == Low::min) mins_ = factors(tile, kTile);
                return tile + num_bytes_;
            }
        return tile;
    }
    OCTAVO_INLINE vf scale(const uint8_t* p) const {
        if constexpr (kShared)
            return to_float(load_int8(reinterpret_cast<const int8_t*>(p)) & splat_i(15)) * scales_;
        const vf stored = load_scale<S>(p);
        return S == ScaleType::small ? stored * scales_ : stored;
    }
    OCTAVO_INLINE vf min(const uint8_t* p, vf scale) const {
        if constexpr (kShared) {
            const vi levels = load_int8(reinterpret_cast<const int8_t*>(p));
            return to_float(-(levels >> 4 & splat_i(15))) * mins_;
        }
        const vf stored = load_min<S, L>(p, scale);
        return S == ScaleType::small && L == Low::min ? stored * mins_ : stored;
    }

  private:
    OCTAVO_INLINE vf factors(const uint8_t* from, int first) const {
        return half_ ? load_fp16(reinterpret_cast<const uint16_t*>(from) + first)
                     : load(reinterpret_cast<const float*>(from) + first);
    }
    const bool half_;
    const size_t num_bytes_;
    vf scales_{}, mins_{};
};

// Whether rows beside 4-bit codes, and beside codes with one scale an output, have two int8 terms. The tile
// unit multiplies the second one at almost no cost; on the vector unit it would double the work (decision
// 0017).
constexpr bool kTwoTerms = kHasTileUnit;

// What rows, from one on, have of a group of inputs: scales, the sums of each half's terms, and the sum of all
// of them times the scale.
struct RowGroup {
    RowGroup(const Rows& x, int64_t row)
        : scale(x.scales + x.at(row, 0)),
          scaled_sum(x.scaled_sums + x.at(row, 0)),
          first(x.sums + x.half_at(row, 0, 0)),
          second(first + kTile) {}
    OCTAVO_INLINE void next() {
        scale += kTile, scaled_sum += kTile, first += 2 * kTile, second += 2 * kTile;
    }
    const float *scale, *scaled_sum;
    const int32_t *first, *second;
};

// -- 4-bit --

template <int M, ScaleType S, Low L>
void product_u4(const TileRef* ref, const Rows& x, int64_t row, const Turn& turn) {
    constexpr size_t kCodes = 256, kStep = kCodes + scale_bytes<S>() + low_bytes<S, L>();
    constexpr int kTerms = kTwoTerms ? 2 : 1;
    const Tiles& w = *ref->weight;
    const uint8_t* tile = ref->data();
    const int groups = w.num_groups;
    const int8_t* q[M];
    for (int m = 0; m < M; m++) q[m] = static_cast<const int8_t*>(x.values) + (row + m) * x.stride;
    vf acc[M] = {};
    GroupLevels<S, L> levels(w);
    ReadAhead<M> ahead(turn, w);
    RowGroup at(x, row);
    for (int g = 0; g < groups; g++, tile += kStep, at.next()) {
        tile = levels.begin(tile, g);
        ahead.step();
        ahead.template prefetch<kStep>(tile);
        const auto zeros = [&](int m) {
            return L == Low::min ? vi{} : splat_i(-w.zero_point * (at.first[m] + at.second[m]));
        };
        vi low[kTerms][M] = {}, high[kTerms][M] = {};
        if constexpr (!kPairSums)
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) low[kTerms - 1][m] = zeros(m);
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            const vi both = load_i(tile + 64 * v), lows = both & 0x0f0f0f0f, highs = high_nibbles(both);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++)
#pragma GCC unroll 2
                for (int t = 0; t < kTerms; t++) {
                    const int8_t* terms = q[m] + kGroup * (kTerms * g + t) + 8 * v;
                    low[t][m] = dot4_narrow(low[t][m], lows, broadcast4(terms));
                    high[t][m] = dot4_narrow(high[t][m], highs, broadcast4(terms + 4));
                }
        }
        const vf scale = levels.scale(tile + kCodes);
        const vf least = levels.min(tile + kCodes + scale_bytes<S>(), scale);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            vi sum = nibble_sum(low[kTerms - 1][m], high[kTerms - 1][m]);
            if (kTerms == 2) sum += nibble_sum(low[0][m], high[0][m]) * kFirstUnit;
            if (kPairSums && L != Low::min) sum += zeros(m);
            acc[m] = fma(to_float(sum), scale * at.scale[m], acc[m]);
            if (L != Low::none) acc[m] = fma(least, splat(at.scaled_sum[m]), acc[m]);
        }
    }
    for (int m = 0; m < M; m++) store(ref->acc + 16 * (turn.done + m), acc[m]);
}

// -- 8-bit, 4-bit codes that stand for numbers of 8 bits, and codes of 2, 3, 5 and 6 bits --

// Returns the bits of a code's numbers.
template <Code C>
constexpr int sum_bits() {
    return C == Code::l4 ? 8 : low_bits(C) + high_bits(C);
}

// Whether codes may have a zero point: codes of few bits have mins or a zero point.
template <Code C, Low L>
constexpr bool has_zero_point() {
    return L != Low::min || sum_bits<C>() == 8;
}

// Returns vector v of a group's codes, four bytes an output, as `CodeSum` takes them.
template <Code C>
OCTAVO_INLINE vi load_codes(const uint8_t* group, const Table16& table, int v) {
    constexpr int kLow = low_bits(C), kHigh = high_bits(C), kPerLoad = 8 / kLow;
    vi codes = load_i(group + 64 * (v / kPerLoad));
    if constexpr (kLow < 8) {
        const int shift = kLow * (v % kPerLoad);
        codes = (shift ? codes >> shift : codes) & (kLow == 4 ? 0x0f0f0f0f : 0x03030303);
    }
    if constexpr (C == Code::l4) codes = table(codes);
    if constexpr (kHigh > 0) {
        constexpr int kMask = (0x01010101 << kLow) * ((1 << kHigh) - 1), kPerVector = 8 / kHigh;
        const vi high = load_i(group + 64 * (kLow + v / kPerVector));
        const int left = kLow - kHigh * (v % kPerVector);
        codes |= (left >= 0 ? high << left : high >> -left) & kMask;
    }
    return sum_bits<C>() == 8 ? code_operand(codes) : codes;
}

// kHalves: scales change every 16 inputs (Q6_K), and mins do; the two halves are two steps of the same rule.
template <int M, ScaleType S, Low L, bool kHalves, Code C = Code::u8>
void product_u8(const TileRef* ref, const Rows& x, int64_t row, const Turn& turn) {
    constexpr int kParts = kHalves ? 2 : 1, kVectors = 8 / kParts, kBits = sum_bits<C>();
    constexpr bool kShared = shares_levels(C);
    constexpr size_t kCodes = codes_bytes(C), kScale = scale_bytes<S>(),
                     kLows = kShared ? 0 : low_bytes<S, L>(), kStep = kCodes + (kScale + kLows) * kParts;
    const Tiles& w = *ref->weight;
    const Table16 table(w.table);
    const int offset = (kBits == 8 ? kCodeOffset : 0) - w.zero_point;
    const uint8_t* tile = ref->data();
    const int groups = w.num_groups;
    const int8_t* q[M];
    for (int m = 0; m < M; m++) q[m] = static_cast<const int8_t*>(x.values) + (row + m) * x.stride;
    vf acc[M] = {};
    GroupLevels<S, L, kShared> levels(w);
    ReadAhead<M> ahead(turn, w);
    RowGroup at(x, row);
    for (int g = 0; g < groups; g++, tile += kStep, at.next()) {
        tile = levels.begin(tile, g);
        ahead.step();
        ahead.template prefetch<kStep>(tile);
        for (int part = 0; part < kParts; part++) {
            int32_t sum[M];
            CodeSum<kBits> codes_sum[M];
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                sum[m] = kHalves ? (part ? at.second : at.first)[m] : at.first[m] + at.second[m];
                if constexpr (has_zero_point<C, L>()) codes_sum[m].start(splat_i(offset * sum[m]));
            }
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; v++) {
                const vi codes = load_codes<C>(tile, table, part * kVectors + v);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++)
                    codes_sum[m].add(v, codes, broadcast4(q[m] + 32 * g + 16 * part + 4 * v));
            }
            const uint8_t* at_scale = tile + kCodes + part * kScale;
            const vf scale = levels.scale(at_scale);
            const vf least =
                levels.min(kShared ? at_scale : tile + kCodes + kScale * kParts + part * kLows, scale);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                acc[m] = fma(to_float(codes_sum[m].total()), scale * at.scale[m], acc[m]);
                const float scaled = kHalves ? at.scale[m] * static_cast<float>(sum[m]) : at.scaled_sum[m];
                if (L != Low::none) acc[m] = fma(least, splat(scaled), acc[m]);
            }
        }
    }
    for (int m = 0; m < M; m++) store(ref->acc + 16 * (turn.done + m), acc[m]);
}

// -- 8-bit with one scale an output --

OCTAVO_INLINE vf scales_of(const Tiles& w, const uint8_t* tile) {
    return load(reinterpret_cast<const float*>(tile + w.tile_bytes) - kTile);
}

// Adds the products of a row's second terms to `sum`, two quads at a time, each in a chain of its own. The
// list ends in zeros, so an odd number of quads needs no end of its own.
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

// One term for most numbers of a row, and one d for all. The sums over all inputs of T tiles and M rows stay
// in registers; then come the few quads with a second term, row by row. All sums are exact, so neither T nor
// M changes them. Loops over the sums' rows are unrolled, since only arrays with constant indices stay in
// registers.
template <int M, int T>
void product_outliers(const TileRef* refs, const Rows& x, int64_t row, const Turn& turn) {
    constexpr int kChains = M * T >= 8 ? 1 : 8 / (M * T);  // sums that need not wait for one another
    const int inputs = x.num_groups * kGroup;
    const int8_t* q = static_cast<const int8_t*>(x.values) + row * x.stride;
    const int32_t* first = x.sums + x.half_at(row, 0, 0);  // sums of terms, which undo the codes' offset
    const int32_t* second = first + kTile;
    const float* d = x.scales + x.at(row, 0);
    const uint8_t* tile[T];
    float* acc[T];
    for (int t = 0; t < T; t++) tile[t] = refs[t].data(), acc[t] = refs[t].acc + 16 * turn.done;
    vi sum[T][M][kChains] = {};
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        const vi offset = splat_i(-kSignedOffset * first[m]);
#pragma GCC unroll 2
        for (int t = 0; t < T; t++) sum[t][m][0] = offset;
    }
    ReadAhead<M> ahead(turn, *refs->weight);
    for (int k = 0; k < inputs; k += 4 * kChains) {
        ahead.step();
        for (int c = 0; c < kChains; c++) {
            const size_t at = k + 4 * c;
            vi codes[T];
            for (int t = 0; t < T; t++) {
                ahead.template prefetch<64>(tile[t] + 16 * at);
                codes[t] = for_dot4_signed(load_i(tile[t] + 16 * at));
            }
            for (int m = 0; m < M; m++) {
                const vi terms = broadcast4(q + m * x.stride + at);
                for (int t = 0; t < T; t++) sum[t][m][c] = dot4_signed(sum[t][m][c], codes[t], terms);
            }
        }
    }
    vf scale[T];
    ahead.step();
    for (int t = 0; t < T; t++) {
        scale[t] = scales_of(*refs[t].weight, tile[t]);
        ahead.template prefetch<64>(tile[t] + 16 * static_cast<size_t>(inputs));
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

// Returns a row's result from its sums of code * first term and code * second term over all inputs.
OCTAVO_INLINE vf scale_whole(const Rows& x, int64_t row, vf scale, vi first, vi second) {
    return fma(to_float(first), splat(kWholeUnit), to_float(second)) * (scale * x.scales[x.at(row, 0)]);
}

// Two terms and one scale for a whole row. Adding 128 makes the codes unsigned, as the instruction wants
// them; taking 128 times the sum of the terms away undoes it. Few rows take several vectors of weights at a
// time, so that sums need not wait for one another.
template <int M>
void product_whole(const TileRef* ref, const Rows& x, int64_t row, const Turn& turn) {
    const Tiles& w = *ref->weight;
    const uint8_t* tile = ref->data();
    constexpr int kChains = M == 1 ? 4 : M == 2 ? 2 : 1;
    const int inputs = w.num_groups * kGroup;
    const int8_t* q = static_cast<const int8_t*>(x.values) + row * x.stride;
    vi first[M][kChains] = {}, second[M][kChains] = {};
    ReadAhead<M> ahead(turn, w);
    for (int k = 0; k < inputs; k += 4 * kChains) {
        ahead.step();
        ahead.template prefetch<64 * kChains>(tile + 16 * static_cast<size_t>(k));
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
    const vf scale = scales_of(w, tile);
    ahead.step();
    ahead.template prefetch<64>(tile + 16 * static_cast<size_t>(inputs));
    for (int m = 0; m < M; m++) {
        for (int c = 1; c < kChains; c++) first[m][0] += first[m][c], second[m][0] += second[m][c];
        const int32_t* sums = x.sums + x.half_at(row + m, 0, 0);
        store(ref->acc + 16 * (turn.done + m),
              scale_whole(x, row + m, scale, first[m][0] - 128 * sums[0], second[m][0] - 128 * sums[kTile]));
    }
}

// -- choosing --

// Multiplies M rows, from `row` on, with T tiles, into rows `turn.done` and on of their `acc`.
using Product = void (*)(const TileRef* tiles, const Rows& x, int64_t row, const Turn& turn);

template <int M, ScaleType S, Low L>
Product choose_low(const Tiles& w) {
    if constexpr (L != Low::zero) {
        if constexpr (S == ScaleType::small && L == Low::min)
            if (w.code == Code::u2) return product_u8<M, S, L, true, Code::u2>;
        if constexpr (S == ScaleType::small && L == Low::none) {
            if (w.code == Code::u3) return product_u8<M, S, L, true, Code::u3>;
            if (w.code == Code::u6) return product_u8<M, S, L, true, Code::u6>;
        }
        if constexpr (S != ScaleType::fp32)
            if (w.code == Code::u5) return product_u8<M, S, L, false, Code::u5>;
        if (w.half_groups)
            return w.code == Code::l4 ? product_u8<M, S, L, true, Code::l4> : product_u8<M, S, L, true>;
        if (w.code == Code::l4) return product_u8<M, S, L, false, Code::l4>;
    }
    return w.code == Code::u4 ? product_u4<M, S, L> : product_u8<M, S, L, false>;
}

template <int M, ScaleType S>
Product choose_scaled(const Tiles& w) {
    if constexpr (S != ScaleType::small)
        if (w.low == Low::zero) return choose_low<M, S, Low::zero>(w);
    return w.low == Low::min ? choose_low<M, S, Low::min>(w) : choose_low<M, S, Low::none>(w);
}

template <int M, int T>
Product choose(const Tiles& w) {
    if (w.code == Code::i8 && !kTwoTerms) return product_outliers<M, T>;
    if (w.code == Code::bf16) return product_bf16<M, T>;
    if constexpr (T > 1) return nullptr;
    switch (w.code) {
        case Code::f4: return product_f4<M>;
        case Code::e4m3: return product_e4m3<M>;
        case Code::i8: return product_whole<M>;
        case Code::fp16: return product_float<M, true>;
        case Code::fp32: return product_float<M, false>;
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
        case Code::u4: return kTwoTerms ? RowType::two_terms : RowType::int8;
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

// The rows, rows of floats, and sums of rows times tiles that registers hold at a time.
constexpr bool kManyRegisters = kRegisterLanes == kLanes;
constexpr int kMostRows = kManyRegisters ? 8 : 4, kMostFloatRows = kManyRegisters ? 4 : 2,
              kMostSums = kManyRegisters ? 16 : 4;

// One tile or two. With one row or two the time goes into reading memory, and one tile after the other makes
// one stream of it.
void vector_products(const TileRef* tiles, int count, const Rows& x, int64_t row0, int num_rows) {
    const Tiles& w = *tiles->weight;
    if (count == 2 && !w.is_laid_out_as(*tiles[1].weight)) {
        vector_products(tiles, 1, x, row0, num_rows);
        return vector_products(tiles + 1, 1, x, row0, num_rows);
    }
    const bool pairs = count == 2 && num_rows > 2;
    const int most = row_type(w.code) == RowType::fp32 ? kMostFloatRows : kMostRows;
    Turn turn{count, 0, 0, std::max(num_rows / most + (num_rows % most > 2), 1)};
    SoonReader soon(tiles->soon, num_rows / most + __builtin_popcount(num_rows % most));
    const auto run = [&]<int M>() {
        const Product one = choose<M, 1>(w), two = pairs && 2 * M <= kMostSums ? choose<M, 2>(w) : nullptr;
        for (; num_rows - turn.done >= M; turn.done += M, turn.index++) {
            soon.step();
            if (two)
                two(tiles, x, row0 + turn.done, turn);
            else
                for (int i = 0; i < count; i++) one(tiles + i, x, row0 + turn.done, turn);
        }
    };
    if constexpr (kMostRows >= 8)
        if (most >= 8) run.template operator()<8>();
    if (most >= 4) run.template operator()<4>();
    run.template operator()<2>();
    run.template operator()<1>();
}

// -- one row back --

float scale_at(const Tiles& w, const uint8_t* p, int lane) {
    if (w.scale_type == ScaleType::small) return static_cast<float>(static_cast<int8_t>(p[lane]));
    if (w.scale_type == ScaleType::fp16) {
        uint16_t h;
        std::memcpy(&h, p + 2 * lane, 2);
        return fp16_to_float(h);
    }
    float f;
    std::memcpy(&f, p + 4 * lane, 4);
    return f;
}

float quantised_at(const Tiles& w, const uint8_t* tile, int lane, int k) {
    const int parts = w.half_groups ? 2 : 1, g = k / kGroup, in = k % kGroup;
    const size_t scale = scale_bytes_of(w.scale_type), codes = codes_bytes(w.code);
    const bool half = w.half_factors;
    const bool shared = shares_levels(w.code);
    const size_t low = w.low == Low::none || shared ? 0 : w.low == Low::zero ? kTile : scale;
    const size_t bytes = codes + (scale + low) * parts, factors = factor_bytes(w);
    const uint8_t* span = tile + g / kSmallSpan * (kSmallSpan * bytes + factors);
    const uint8_t* group = span + factors + g % kSmallSpan * bytes;
    // Its vector of four bytes an output, among those that lie in bytes of `bits` bits each.
    const int vector = in / 4;
    const auto bits_at = [&](size_t begin, int bits) {
        const int shared = 8 / bits;
        const uint8_t byte = group[begin + 64 * (vector / shared) + 4 * lane + in % 4];
        return byte >> bits * (vector % shared) & ((1 << bits) - 1);
    };
    const int of_low = low_bits(w.code), of_high = high_bits(w.code);
    int code = bits_at(0, of_low);
    if (of_high) code |= bits_at(64 * of_low, of_high) << of_low;
    if (w.code == Code::l4) code = w.table[code];
    const int part = parts == 2 ? in / 16 : 0;
    const uint8_t* scales = group + codes + part * scale;
    const uint8_t* lows = group + codes + scale * parts + part * low;
    const int zero = w.low == Low::zero ? (reinterpret_cast<const int8_t*>(lows))[lane] : 0;
    const auto factor = [&](int index) {
        if (!factors) return 1.0f;
        if (half) return fp16_to_float((reinterpret_cast<const uint16_t*>(span))[index]);
        return (reinterpret_cast<const float*>(span))[index];
    };
    const float level = shared ? static_cast<float>(scales[lane] & 15) : scale_at(w, scales, lane);
    const float value = static_cast<float>(code - w.zero_point - zero) * (level * factor(lane));
    if (w.low != Low::min) return value;
    const float min = shared ? -static_cast<float>(scales[lane] >> 4) : scale_at(w, lows, lane);
    return value + min * factor(kTile + lane);
}

// Writes row `row` of w times `factor` to out [K], as an embedding table is read.
void read_row(const Tiles& w, int row, float factor, float* out) {
    const uint8_t* tile = w.tile(row / kTile);
    const int lane = row % kTile;
    const float scale =
        w.code == Code::i8 ? (reinterpret_cast<const float*>(tile + w.tile_bytes) - kTile)[lane] : 1;
    for (int k = 0; k < w.num_inputs; k++) {
        float value;
        switch (w.code) {
            case Code::i8:
                value = static_cast<float>(
                            static_cast<int8_t>(tile[static_cast<size_t>(k / 4) * 64 + 4 * lane + k % 4])) *
                        scale;
                break;
            case Code::bf16:
                value =
                    bf16_to_float((reinterpret_cast<const uint16_t*>(tile))[(k / 2) * 32 + 2 * lane + k % 2]);
                break;
            case Code::fp16:
                value = fp16_to_float((reinterpret_cast<const uint16_t*>(tile))[k * kTile + lane]);
                break;
            case Code::fp32: value = (reinterpret_cast<const float*>(tile))[k * kTile + lane]; break;
            case Code::f4:
            case Code::e4m3: value = float_code_at(w, tile, lane, k); break;
            default: value = quantised_at(w, tile, lane, k);
        }
        out[k] = value * factor;
    }
}

}  // namespace
}  // namespace octavo
