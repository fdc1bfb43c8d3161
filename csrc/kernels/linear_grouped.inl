// Matmuls with weights whose scales change every 16 or 32 inputs, with codes of 2 to 8 bits.
#pragma once
#include "group_scales.inl"

namespace octavo {
namespace {

// -- 4-bit --

template <int M, ScaleType S, ZeroPointKind Z>
void matmul_u4(const TileRef* ref, const QuantizedRows& x, int64_t row, const RowPass& pass) {
    constexpr size_t kCodes = 256, kStep = kCodes + scale_bytes<S>() + zero_point_bytes<S, Z>();
    const Tiles& w = *ref->weight;
    const uint8_t* tile = ref->data();
    const int groups = w.num_groups;
    const int8_t* q[M];
    for (int m = 0; m < M; m++) q[m] = static_cast<const int8_t*>(x.values) + (row + m) * x.stride;
    vf acc[M] = {};
    GroupLevels<S, Z> levels(w);
    WeightPrefetcher<M> prefetcher(pass, w);
    RowGroup at(x, row);
    for (int g = 0; g < groups; g++, tile += kStep, at.next()) {
        tile = levels.begin(tile, g);
        prefetcher.step();
        prefetcher.template prefetch<kStep>(tile);
        const auto zeros = [&](int m) {
            return Z == ZeroPointKind::min ? vi{} : splat_i(-w.zero_point * (at.first[m] + at.second[m]));
        };
        vi low[M] = {}, high[M] = {};
        if constexpr (!kPairSums)
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) low[m] = zeros(m);
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            const vi both = load_i(tile + 64 * v), lows = both & 0x0f0f0f0f, highs = high_nibbles(both);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                const int8_t* inputs = q[m] + kGroup * g + 8 * v;
                low[m] = dot4_narrow(low[m], lows, broadcast4(inputs));
                high[m] = dot4_narrow(high[m], highs, broadcast4(inputs + 4));
            }
        }
        const vf scale = levels.scale(tile + kCodes);
        const vf group_min = levels.min(tile + kCodes + scale_bytes<S>(), scale);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            vi sum = nibble_sum(low[m], high[m]);
            if (kPairSums && Z != ZeroPointKind::min) sum += zeros(m);
            acc[m] = fma(to_float(sum), scale * at.scale[m], acc[m]);
            if (Z != ZeroPointKind::none) acc[m] = fma(group_min, splat(at.scaled_sum[m]), acc[m]);
        }
    }
    for (int m = 0; m < M; m++) store(ref->acc + 16 * (pass.first_row + m), acc[m]);
}

// -- 8-bit codes, 4-bit codes with a table of 8-bit values, and codes of 2, 3, 5 and 6 bits --

// Returns the bits of the values that are multiplied.
template <Code C>
constexpr int sum_bits() {
    return C == Code::l4 ? 8 : low_bits(C) + high_bits(C);
}

// Whether codes may have a zero point: codes of few bits have mins or a zero point, never both.
template <Code C, ZeroPointKind Z>
constexpr bool has_zero_point() {
    return Z != ZeroPointKind::min || sum_bits<C>() == 8;
}

// Returns vector v of a group's codes, four bytes per output, in the form that `CodeSum` expects.
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

// kHalves: scales and mins change every 16 inputs (Q6_K); each half group is a step of the same rule.
template <int M, ScaleType S, ZeroPointKind Z, bool kHalves, Code C = Code::u8>
void matmul_u8(const TileRef* ref, const QuantizedRows& x, int64_t row, const RowPass& pass) {
    constexpr int kParts = kHalves ? 2 : 1, kVectors = 8 / kParts, kBits = sum_bits<C>();
    constexpr bool kShared = shares_levels(C);
    constexpr size_t kCodes = codes_bytes(C), kScale = scale_bytes<S>(),
                     kZeroPoints = kShared ? 0 : zero_point_bytes<S, Z>(),
                     kStep = kCodes + (kScale + kZeroPoints) * kParts;
    const Tiles& w = *ref->weight;
    const Table16 table(w.table);
    const int offset = (kBits == 8 ? kCodeOffset : 0) - w.zero_point;
    const uint8_t* tile = ref->data();
    const int groups = w.num_groups;
    const int8_t* q[M];
    for (int m = 0; m < M; m++) q[m] = static_cast<const int8_t*>(x.values) + (row + m) * x.stride;
    vf acc[M] = {};
    GroupLevels<S, Z, kShared> levels(w);
    WeightPrefetcher<M> prefetcher(pass, w);
    RowGroup at(x, row);
    for (int g = 0; g < groups; g++, tile += kStep, at.next()) {
        tile = levels.begin(tile, g);
        prefetcher.step();
        prefetcher.template prefetch<kStep>(tile);
        for (int part = 0; part < kParts; part++) {
            int32_t sum[M];
            CodeSum<kBits> codes_sum[M];
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                sum[m] = kHalves ? (part ? at.second : at.first)[m] : at.first[m] + at.second[m];
                if constexpr (has_zero_point<C, Z>()) codes_sum[m].start(splat_i(offset * sum[m]));
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
            const vf group_min =
                levels.min(kShared ? at_scale : tile + kCodes + kScale * kParts + part * kZeroPoints, scale);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                acc[m] = fma(to_float(codes_sum[m].total()), scale * at.scale[m], acc[m]);
                const float scaled = kHalves ? at.scale[m] * static_cast<float>(sum[m]) : at.scaled_sum[m];
                if (Z != ZeroPointKind::none) acc[m] = fma(group_min, splat(scaled), acc[m]);
            }
        }
    }
    for (int m = 0; m < M; m++) store(ref->acc + 16 * (pass.first_row + m), acc[m]);
}

}  // namespace
}  // namespace octavo
