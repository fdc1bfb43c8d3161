// Matmuls on the dot product levels of NEON. Up to three rows keep their quads in registers, whose elements the
// instructions multiply with all lanes. More rows are multiplied in blocks of 4 rows and 8 outputs, whose sums
// and totals fit into 32 registers.
//
// For these, a part of a weight tile is unpacked once, to signed codes and fp32 scales, and multiplied by all
// rows while it is in the first-level cache. With I8MM, matrix products multiply two rows by two outputs with a
// depth of 8 bytes: codes are unpacked to pairs of outputs, and sums stay in the products' order, 2 by 2, until
// they are stored. Every sum has the terms and the order of linear.inl, so results are bitwise equal for any
// number of rows.
#pragma once
#include "neon_blocks.inl"

namespace octavo {
namespace {

constexpr int kManyRows = 4;  // fewer rows do not pay for unpacking

// -- codes --

// Returns vector v of a group's codes, four bytes per output.
template <Code C>
OCTAVO_INLINE vi load_operand(const uint8_t* group, const Table16& table, int v) {
    if constexpr (low_bits(C) != 4 || high_bits(C) != 0) return load_codes<C>(group, table, v);
    const vi both = load_i(group + 64 * (v / 2));
    const vi codes = v % 2 ? shift_nibbles(both) : both & each_byte(0x0f);
    return C == Code::l4 ? table(codes) : codes;
}

// Calls get<S, Z, kHalves, code>() of a family for the format of a weight, as `choose` does.
template <typename Family, ScaleType S, ZeroPointKind Z>
auto choose_code(const Tiles& w) {
    if constexpr (Z != ZeroPointKind::zero) {
        if constexpr (S == ScaleType::small && Z == ZeroPointKind::min)
            if (w.code == Code::u2) return Family::template get<S, Z, true, Code::u2>();
        if constexpr (S == ScaleType::small && Z == ZeroPointKind::none) {
            if (w.code == Code::u3) return Family::template get<S, Z, true, Code::u3>();
            if (w.code == Code::u6) return Family::template get<S, Z, true, Code::u6>();
        }
        if constexpr (S != ScaleType::fp32)
            if (w.code == Code::u5) return Family::template get<S, Z, false, Code::u5>();
        if (w.code == Code::l4)
            return w.half_groups ? Family::template get<S, Z, true, Code::l4>()
                                 : Family::template get<S, Z, false, Code::l4>();
        if (w.half_groups) return Family::template get<S, Z, true, Code::u8>();
    }
    return w.code == Code::u4 ? Family::template get<S, Z, false, Code::u4>()
                              : Family::template get<S, Z, false, Code::u8>();
}
template <typename Family, ScaleType S>
auto choose_zeros(const Tiles& w) {
    if constexpr (S != ScaleType::small)
        if (w.zero_point_kind == ZeroPointKind::zero) return choose_code<Family, S, ZeroPointKind::zero>(w);
    return w.zero_point_kind == ZeroPointKind::min ? choose_code<Family, S, ZeroPointKind::min>(w)
                                                   : choose_code<Family, S, ZeroPointKind::none>(w);
}
template <typename Family>
auto choose_format(const Tiles& w) {
    switch (w.scale_type) {
        case ScaleType::fp16: return choose_zeros<Family, ScaleType::fp16>(w);
        case ScaleType::small: return choose_zeros<Family, ScaleType::small>(w);
        default: return choose_zeros<Family, ScaleType::fp32>(w);
    }
}

// -- one, two or three rows --

// matmul_u8 for codes in any group format, with the terms of a row in registers.
template <int M, ScaleType S, ZeroPointKind Z, bool kHalves, Code C>
void multiply_few(const TileRef& ref, const QuantizedRows& x, int64_t row, float* acc) {
    constexpr int kParts = kHalves ? 2 : 1, kVectors = 8 / kParts, kBits = sum_bits<C>();
    constexpr bool kShared = shares_levels(C), kMixed = kBits == 8 && kHasMatrixProducts;
    constexpr size_t kCodes = codes_bytes(C), kScale = scale_bytes<S>(),
                     kZeroPoints = kShared ? 0 : zero_point_bytes<S, Z>(),
                     kStep = kCodes + (kScale + kZeroPoints) * kParts;
    const Tiles& w = *ref.weight;
    const Table16 table(w.table);
    const int offset = (kBits == 8 && !kMixed ? 128 : 0) - w.zero_point;
    const uint8_t* tile = ref.data();
    const int8_t* q = static_cast<const int8_t*>(x.values) + row * x.stride;
    vf total[M] = {};
    GroupLevels<S, Z, kShared> levels(w);
    RowGroup at(x, row);
    for (int g = 0; g < w.num_groups; g++, tile += kStep, q += kGroup, at.next()) {
        tile = levels.begin(tile, g);
        prefetch_ahead<kStep>(tile);
        for (int part = 0; part < kParts; part++) {
            int32_t terms[M];
            vi sum[M] = {};
#pragma GCC unroll 3
            for (int m = 0; m < M; m++) {
                terms[m] = kHalves ? (part ? at.second : at.first)[m] : at.first[m] + at.second[m];
                if constexpr (has_zero_point<C, Z>()) sum[m] = splat_i(offset * terms[m]);
            }
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; v++) {
                vi codes = load_operand<C>(tile, table, part * kVectors + v);
                if constexpr (kBits == 8 && !kMixed) codes = codes ^ each_byte(0x80);
#pragma GCC unroll 3
                for (int m = 0; m < M; m++) {
                    const Quad quad = Quads<kVectors>(q + m * x.stride + 16 * part)[v];
                    if constexpr (kMixed)
                        sum[m] = dot4_mixed(sum[m], codes, quad);
                    else
                        sum[m] = dot4_int8(sum[m], codes, quad);
                }
            }
            const uint8_t* at_scale = tile + kCodes + part * kScale;
            const vf scale = levels.scale(at_scale);
            const vf group_min =
                levels.min(kShared ? at_scale : tile + kCodes + kScale * kParts + part * kZeroPoints, scale);
#pragma GCC unroll 3
            for (int m = 0; m < M; m++) {
                total[m] = fma(to_float(sum[m]), scale * at.scale[m], total[m]);
                const float scaled = kHalves ? at.scale[m] * static_cast<float>(terms[m]) : at.scaled_sum[m];
                if (Z != ZeroPointKind::none) total[m] = fma(group_min, splat(scaled), total[m]);
            }
        }
    }
    for (int m = 0; m < M; m++) store(acc + 16 * m, total[m]);
}

using FewFn = void (*)(const TileRef& ref, const QuantizedRows& x, int64_t row, float* acc);
template <int M>
struct FewRows {
    template <ScaleType S, ZeroPointKind Z, bool kHalves, Code C>
    static FewFn get() {
        return multiply_few<M, S, Z, kHalves, C>;
    }
};

// Multiplies one, two or three rows from row `done` of a call on.
void multiply_rest(const TileRef& ref, const QuantizedRows& x, int64_t row0, int done, int num_rows) {
    if (num_rows - done >= 2) {
        choose_format<FewRows<2>> (*ref.weight)(ref, x, row0 + done, ref.acc + 16 * done);
        done += 2;
    }
    if (done < num_rows) choose_format<FewRows<1>> (*ref.weight)(ref, x, row0 + done, ref.acc + 16 * done);
}

// -- integer codes in groups --

constexpr int kUnpackedGroups = 32;  // groups of a tile that are unpacked at a time; a multiple of kSmallSpan

// A part of a tile in the form that blocks are multiplied from.
struct UnpackedGroups {
    alignas(64) int8_t codes[kUnpackedGroups][4 * kPairStep];
    // Of each half group, or of each group in the first.
    alignas(64) float scales[kUnpackedGroups][2][kLevelFloats], mins[kUnpackedGroups][2][kLevelFloats];
};

// Unpacks groups first .. last - 1; returns the address of the group after them. `tile` is that of the
// first.
using UnpackFn = const uint8_t* (*)(const Tiles& w, const uint8_t* tile, int first, int last,
                                    UnpackedGroups& to);

// What `UnpackedGroups` subtracts from codes, so that they are signed bytes; the rest of the zero point is
// subtracted from the sums.
OCTAVO_INLINE int unpacked_zero(const Tiles& w, int bits) {
    return bits == 8 ? 128 : w.zero_point_kind == ZeroPointKind::min ? 0 : w.zero_point;
}

template <ScaleType S, ZeroPointKind Z, bool kHalves, Code C>
const uint8_t* unpack_groups(const Tiles& w, const uint8_t* tile, int first, int last, UnpackedGroups& to) {
    constexpr int kParts = kHalves ? 2 : 1;
    constexpr bool kShared = shares_levels(C);
    constexpr size_t kCodes = codes_bytes(C), kScale = scale_bytes<S>(),
                     kZeroPoints = kShared ? 0 : zero_point_bytes<S, Z>(),
                     kStep = kCodes + (kScale + kZeroPoints) * kParts;
    const Table16 table(w.table);
    const auto zero = vdupq_n_s8(static_cast<int8_t>(unpacked_zero(w, sum_bits<C>())));
    const auto signed_codes = [&](int v) {
        const vi codes = load_operand<C>(tile, table, v);
        if (sum_bits<C>() == 8) return codes ^ each_byte(0x80);
        if (Z == ZeroPointKind::min) return codes;
        return each([&](RegisterI x) { return lanes(vsubq_s8(bytes(x), zero)); }, codes);
    };
    GroupLevels<S, Z, kShared> levels(w);
    for (int g = first; g < last; g++, tile += kStep) {
        tile = levels.begin(tile, g);
        prefetch_ahead<kStep>(tile);
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++)
            store_pair(to.codes[g - first] + kPairStep * v, signed_codes(2 * v), signed_codes(2 * v + 1));
        for (int part = 0; part < kParts; part++) {
            const uint8_t* at_scale = tile + kCodes + part * kScale;
            const vf scale = levels.scale(at_scale);
            store_levels(to.scales[g - first][part], scale);
            if (Z != ZeroPointKind::none)
                store_levels(
                    to.mins[g - first][part],
                    levels.min(kShared ? at_scale : tile + kCodes + kScale * kParts + part * kZeroPoints,
                               scale));
        }
    }
    return tile;
}

struct Unpacking {
    template <ScaleType S, ZeroPointKind Z, bool kHalves, Code C>
    static UnpackFn get() {
        return unpack_groups<S, Z, kHalves, C>;
    }
};

// Adds the products of groups first .. last - 1 to acc [R][16], for 8 outputs from 8 * half on.
template <int R, bool kHalves, bool kMins, bool kOffset>
void add_groups(const UnpackedGroups& from, int half, int offset, const QuantizedRows& x, int64_t row,
                int first, int last, float* acc) {
    constexpr int kParts = kHalves ? 2 : 1;
    const int8_t* q = static_cast<const int8_t*>(x.values) + row * x.stride + kGroup * first;
    float32x4_t total[kBlockRows<R>][kBlockColumns];
    load_block<R>(total, acc + kHalfTile * half);
    RowGroup at(x, row);
    const auto next = static_cast<size_t>(first) * kTile;
    at.scale += next, at.scaled_sum += next, at.first += 2 * next, at.second += 2 * next;
    const auto numbers = [](const auto* p) { return load_numbers_of_rows<R>(p); };
    for (int g = 0; g < last - first; g++, q += kGroup, at.next()) {
        const float32x4_t d = numbers(at.scale);
        for (int part = 0; part < kParts; part++) {
            const int level = kLevelFloats / 2 * half;
            int32x4_t sum[kBlockRows<R>][kBlockColumns];
            int32x4_t start = zero_sum();
            if constexpr (kOffset) {
                int32x4_t terms = numbers(kHalves && part ? at.second : at.first);
                if (!kHalves) terms = vaddq_s32(terms, numbers(at.second));
                start = vmlaq_n_s32(start, terms, offset);
            }
            start_block<R>(sum, start);
            const int8_t* codes = from.codes[g] + kHalfStep * half;
#pragma GCC unroll 2
            for (int i = part; i < (kHalves ? part + 1 : 2); i++)
                add_products<R>(sum, q + 16 * i, x.stride, codes + 2 * kPairStep * i, kPairStep);
            add_scaled<R>(total, sum, from.scales[g][part] + level, d);
            if constexpr (kMins) {
                const float32x4_t scaled =
                    kHalves ? vmulq_f32(d, vcvtq_f32_s32(numbers(part ? at.second : at.first)))
                            : numbers(at.scaled_sum);
                add_mins<R>(total, from.mins[g][part] + level, scaled);
            }
        }
    }
    store_block<R>(total, acc + kHalfTile * half);
}

template <bool kHalves, bool kMins, bool kOffset>
void add_groups_to_rows(const UnpackedGroups& from, int offset, const QuantizedRows& x, int64_t row0,
                        int num_rows, int first, int last, float* acc) {
    for (int half = 0; half < 2; half++) {
        int done = 0;
        for (; done + 4 <= num_rows; done += 4)
            add_groups<4, kHalves, kMins, kOffset>(from, half, offset, x, row0 + done, first, last,
                                                   acc + 16 * done);
        for (; done < num_rows; done += 2)
            add_groups<2, kHalves, kMins, kOffset>(from, half, offset, x, row0 + done, first, last,
                                                   acc + 16 * done);
    }
}

// Multiplies an even number of rows by one tile.
void multiply_grouped(const TileRef& ref, const QuantizedRows& x, int64_t row0, int num_rows) {
    const Tiles& w = *ref.weight;
    const UnpackFn unpack = choose_format<Unpacking>(w);
    const int bits = w.code == Code::l4 ? 8 : low_bits(w.code) + high_bits(w.code);
    const int offset =
        bits < 8 && w.zero_point_kind == ZeroPointKind::min ? 0 : unpacked_zero(w, bits) - w.zero_point;
    const bool mins = w.zero_point_kind != ZeroPointKind::none;
    const auto choose = [&]<bool kHalves>() {
        if (mins)
            return offset ? add_groups_to_rows<kHalves, true, true>
                          : add_groups_to_rows<kHalves, true, false>;
        return offset ? add_groups_to_rows<kHalves, false, true> : add_groups_to_rows<kHalves, false, false>;
    };
    const auto add = w.half_groups ? choose.template operator()<true>() : choose.template operator()<false>();
    std::memset(ref.acc, 0, sizeof(float) * kTile * num_rows);
    UnpackedGroups unpacked;
    const uint8_t* tile = ref.data();
    for (int first = 0; first < w.num_groups; first += kUnpackedGroups) {
        const int last = std::min(first + kUnpackedGroups, static_cast<int>(w.num_groups));
        tile = unpack(w, tile, first, last, unpacked);
        add(unpacked, offset, x, row0, num_rows, first, last, ref.acc);
    }
}

// -- signed 8-bit codes with one scale per output, and bf16 --

// Multiplies R rows by one tile of signed codes: exact sums over all inputs.
template <int R>
void multiply_int8(const TileRef& ref, const QuantizedRows& x, int64_t row, int32_t* sums) {
    const int8_t* q = static_cast<const int8_t*>(x.values) + row * x.stride;
    const uint8_t* tile = ref.data();
    vi sum[R] = {};
    for (int k = 0; k < x.num_groups * kGroup; k += 16) {
        const uint8_t* at = tile + 16 * static_cast<size_t>(k);
        prefetch_ahead<256>(at);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const vi codes = load_i(at + 64 * i);
#pragma GCC unroll 4
            for (int m = 0; m < R; m++) sum[m] = dot4_int8(sum[m], codes, Quads<4>(q + m * x.stride + k)[i]);
        }
    }
    for (int m = 0; m < R; m++) store_i(sums + 16 * m, sum[m]);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Adds `num_words` words of 4 bytes of R rows, times unpacked vectors of 16 outputs, to acc [R][16].
template <int R>
void add_words(const int8_t* codes, const int8_t* rows, int64_t stride, int num_words, float* acc,
               bool bf16) {
    const auto run = [&]<typename Sum>() {
        Sum sum[2][R / 2][4];
        const auto* from = reinterpret_cast<const float*>(acc);
        for (int half = 0; half < 2; half++) {
            float32x4_t bits[R / 2][4];
            load_block<R>(bits, from + kHalfTile * half);
            std::memcpy(sum[half], bits, sizeof bits);
        }
        for (int v = 0; v < num_words; v += 4)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
                add_products<R>(sum[half], rows + 4 * v, stride,
                                codes + kPairStep / 2 * static_cast<size_t>(v) + kHalfStep * half, kPairStep);
        for (int half = 0; half < 2; half++) store_block<R>(sum[half], acc + kHalfTile * half);
    };
    bf16 ? run.template operator()<float32x4_t>() : run.template operator()<int32x4_t>();
}

// Multiplies an even number of rows by a tile of bf16, or of signed codes into exact sums, which are stored as
// integers. `rows` are `stride` bytes apart.
void multiply_words(const TileRef& ref, const int8_t* rows, int64_t stride, int num_words, int num_rows,
                    bool bf16) {
    constexpr int kWords = 256;  // unpacked at a time
    alignas(64) int8_t codes[64 * kWords];
    const uint8_t* tile = ref.data();
    std::memset(ref.acc, 0, sizeof(float) * kTile * num_rows);
    for (int first = 0; first < num_words; first += kWords) {
        const int count = std::min(kWords, num_words - first);
        for (int v = 0; v < count; v += 2) {
            const uint8_t* at = tile + 64 * static_cast<size_t>(first + v);
            prefetch_ahead<128>(at);
            store_pair(codes + 64 * v, load_i(at), load_i(at + 64));
        }
        int done = 0;
        for (; done + 4 <= num_rows; done += 4)
            add_words<4>(codes, rows + done * stride + 4 * first, stride, count, ref.acc + 16 * done, bf16);
        for (; done < num_rows; done += 2)
            add_words<2>(codes, rows + done * stride + 4 * first, stride, count, ref.acc + 16 * done, bf16);
    }
}
#endif

// Multiplies an even number of rows by a tile of bf16; only with matrix products.
void multiply_bf16(const TileRef& ref, const QuantizedRows& x, int64_t row0, int num_rows) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    multiply_words(ref, static_cast<const int8_t*>(x.values) + 2 * row0 * x.stride, 2 * x.stride,
                   x.num_groups * kGroup / 2, num_rows, true);
#else
    (void)ref, (void)x, (void)row0, (void)num_rows;
#endif
}

// Like matmul_outliers.
void multiply_outliers(const TileRef& ref, const QuantizedRows& x, int64_t row0, int num_rows) {
    const int inputs = x.num_groups * kGroup;
    const int8_t* q = static_cast<const int8_t*>(x.values) + row0 * x.stride;
    int done = 0;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if (num_rows >= kManyRows) {
        done = num_rows / 2 * 2;
        multiply_words(ref, q, x.stride, inputs / 4, done, false);
    }
#endif
    const auto run = [&]<int R>() {
        for (; done + R <= num_rows; done += R)
            multiply_int8<R>(ref, x, row0 + done, reinterpret_cast<int32_t*>(ref.acc + 16 * done));
    };
    run.template operator()<4>();
    run.template operator()<2>();
    run.template operator()<1>();
    const uint8_t* const tile[1] = {ref.data()};
    const vf scale = output_scales(*ref.weight, tile[0]);
    for (int m = 0; m < num_rows; m++) {
        vi more[1] = {splat_i(-kSignedOffset * x.sums[x.half_at(row0 + m, 0, 1)])};
        add_outliers<1>(OutlierList(const_cast<int8_t*>(q) + m * x.stride, inputs), tile, more);
        float* acc = ref.acc + 16 * m;
        store(acc, fma(to_float(more[0]), splat(kOutlierUnit), to_float(load_i(acc))) *
                       (scale * splat(x.scales[x.at(row0 + m, 0)])));
    }
}

// -- dispatch --

OCTAVO_INLINE bool has_groups(Code code) {
    return code != Code::i8 && code != Code::bf16 && code != Code::fp16 && code != Code::fp32 &&
           !is_float_code(code);
}

void neon_matmul(const TileRef* tiles, int count, const QuantizedRows& x, int64_t row0, int num_rows,
                 uint8_t*) {
    const Code code = tiles->weight->code;
    const bool grouped = has_groups(code),
               words = kHasMatrixProducts && code == Code::bf16 && num_rows >= kManyRows;
    if (!grouped && !words && code != Code::i8) return vector_matmul(tiles, count, x, row0, num_rows);
    Prefetcher(tiles->prefetch, 1).step();
    const int even = num_rows >= kManyRows ? num_rows / 2 * 2 : 0;
    for (int i = 0; i < count; i++) {
        if (code == Code::i8) {
            multiply_outliers(tiles[i], x, row0, num_rows);
        } else if (grouped) {
            if (even) multiply_grouped(tiles[i], x, row0, even);
            multiply_rest(tiles[i], x, row0, even, num_rows);
        } else {
            multiply_bf16(tiles[i], x, row0, even);
            if (even == num_rows) continue;
            const TileRef rest{tiles[i].weight, tiles[i].tile, tiles[i].acc + 16 * even};
            vector_matmul(&rest, 1, x, row0 + even, 1);
        }
    }
}

}  // namespace
}  // namespace octavo
