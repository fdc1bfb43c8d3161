// Matmuls of one or two rows that do not read weights whose input is zero.
//
// A row is a sequence of 32-bit words (four int8, two bf16, one fp32), and a tile of these formats has one
// vector of 16 outputs per word. A zero word changes no sum, and the other words are added in the order of
// linear.inl, so the results are bitwise equal. Lines are prefetched word by word, since the hardware
// prefetcher sees no stream if words are skipped.
#pragma once
#include "linear.inl"

namespace octavo {
namespace {

// Up to this many rows skipping pays off: more rows have few zeros in common, and reading each weight once
// for all of them is cheaper.
constexpr int kSkippingRows = 2;
// Whether bf16 sums have the order of linear.inl; AMX has an order of its own.
constexpr bool kSkipsBf16 = !kHasTileUnit;
// Prefetch distance in words. With a tenth of the inputs nonzero, 256 was better than 64 and 768 on a
// 2-core Xeon (avx512_bf16), for int8 and bf16.
constexpr int kPrefetchWords = 256;

// The words of a row.
struct RowWords {
    const uint8_t* first;
    const uint8_t* second;  // of the second terms, or null
    int32_t bits;  // mask of the bits that make a word nonzero: a float's sign does not
    int count;  // a multiple of 16

    // Returns a bit mask of the nonzero words among the sixteen from `base` on.
    OCTAVO_INLINE uint32_t active(int base) const {
        vi words = load_i(first + 4 * static_cast<size_t>(base));
        if (second) words = words | load_i(second + 4 * static_cast<size_t>(base));
        return nonzero_lanes(words & bits);
    }
};

// Calls fn(base, mask) for each sixteen words, in order. A tile has kBytes per word, and the next tile,
// which the same row is multiplied by, follows it in memory.
template <size_t kBytes, typename Fn>
OCTAVO_INLINE void each_word(const RowWords& row, const uint8_t* tile, size_t tile_bytes, const Fn& fn) {
    for (int base = 0; base < row.count; base += 16) {
        int ahead = base + kPrefetchWords;
        const uint8_t* to = tile;
        if (ahead >= row.count) ahead -= row.count, to += tile_bytes;
        if (ahead >= 0 && ahead < row.count)
            for (uint32_t left = row.active(ahead); left; left &= left - 1)
                __builtin_prefetch(to + kBytes * static_cast<size_t>(ahead + __builtin_ctz(left)), 0,
                                   kPrefetchLocality);
        fn(base, row.active(base));
    }
}

// Four inputs per word. Sums are exact, so their order does not matter.
void skipping_int8(const TileRef& ref, const QuantizedRows& x, int64_t row, int done) {
    const Tiles& w = *ref.weight;
    const uint8_t* tile = ref.data();
    const int inputs = w.num_groups * kGroup;
    const uint8_t* q = static_cast<const uint8_t*>(x.values) + row * x.stride;
    const int32_t* sums = x.sums + x.half_at(row, 0, 0);
    float* out = ref.acc + 16 * done;
    vi first = {}, second = {};
    const RowWords words{q, kTwoTerms ? q + inputs : nullptr, -1, inputs / 4};
    each_word<64>(words, tile, w.tile_bytes, [&](int base, uint32_t left) {
        for (; left; left &= left - 1) {
            const size_t at = base + __builtin_ctz(left);
            const vi codes = load_i(tile + 64 * at);
            if (kTwoTerms) {
                const vi offset = codes ^ static_cast<int32_t>(0x80808080);
                first = dot4(first, offset, broadcast4(q + 4 * at));
                second = dot4(second, offset, broadcast4(q + inputs + 4 * at));
            } else {
                first = dot4_signed(first, for_dot4_signed(codes), broadcast4(q + 4 * at));
            }
        }
    });
    const vf scale = output_scales(w, tile);
    if (kTwoTerms)
        return store(out, scale_whole(x, row, scale, first - 128 * sums[0], second - 128 * sums[kTile]));
    vi more[1] = {splat_i(-kSignedOffset * sums[kTile])};
    const uint8_t* const tiles[1] = {tile};
    add_outliers<1>(OutlierList(reinterpret_cast<int8_t*>(const_cast<uint8_t*>(q)), inputs), tiles, more);
    first += splat_i(-kSignedOffset * sums[0]);
    store(out, fma(to_float(more[0]), splat(kOutlierUnit), to_float(first)) *
                   (scale * splat(x.scales[x.at(row, 0)])));
}

// Two inputs per word, in one chain.
void skipping_bf16(const TileRef& ref, const QuantizedRows& x, int64_t row, int done) {
    const uint8_t* tile = ref.data();
    const uint8_t* values = static_cast<const uint8_t*>(x.values) + 2 * row * x.stride;
    vf acc = {};
    const RowWords words{values, nullptr, 0x7fff7fff, x.num_groups * kGroup / 2};
    each_word<64>(words, tile, ref.weight->tile_bytes, [&](int base, uint32_t left) {
        for (; left; left &= left - 1) {
            const size_t at = base + __builtin_ctz(left);
            acc = dot2_bf16(acc, load_i(tile + 64 * at), broadcast4(values + 4 * at));
        }
    });
    store(ref.acc + 16 * done, acc);
}

// One input per word, in four chains.
template <bool kHalf>
void skipping_float(const TileRef& ref, const QuantizedRows& x, int64_t row, int done) {
    constexpr size_t kBytes = kHalf ? 32 : 64;
    const uint8_t* tile = ref.data();
    const float* values = static_cast<const float*>(x.values) + row * x.stride;
    vf acc[4] = {};
    const RowWords words{reinterpret_cast<const uint8_t*>(values), nullptr, 0x7fffffff,
                         x.num_groups * kGroup};
    each_word<kBytes>(words, tile, ref.weight->tile_bytes, [&](int base, uint32_t active) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++)
            for (uint32_t left = active & (0x1111u << c); left; left &= left - 1) {
                const size_t at = base + __builtin_ctz(left);
                const uint8_t* p = tile + kBytes * at;
                const vf weights = kHalf ? load_fp16(reinterpret_cast<const uint16_t*>(p))
                                         : load(reinterpret_cast<const float*>(p));
                acc[c] = fma(weights, splat(values[at]), acc[c]);
            }
    });
    store(ref.acc + 16 * done, (acc[0] + acc[1]) + (acc[2] + acc[3]));
}

using SkippingMatmul = void (*)(const TileRef& ref, const QuantizedRows& x, int64_t row, int done);

// Returns null for weights with scales between their codes: a group's sum is scaled whether or not words
// are skipped.
SkippingMatmul choose_skipping(Code code) {
    switch (code) {
        case Code::i8: return skipping_int8;
        case Code::bf16: return kSkipsBf16 ? skipping_bf16 : nullptr;
        case Code::fp16: return skipping_float<true>;
        case Code::fp32: return skipping_float<false>;
        default: return nullptr;
    }
}

// Multiplies like vector_matmul. Returns false and does nothing if skipping does not apply.
bool skipping_matmul(const TileRef* tiles, int count, const QuantizedRows& x, int64_t row0, int num_rows) {
    const SkippingMatmul matmul = choose_skipping(tiles->weight->code);
    if (!x.skips_zeros || num_rows > kSkippingRows || !matmul) return false;
    for (int i = 0; i < count; i++)
        for (int m = 0; m < num_rows; m++) matmul(tiles[i], x, row0 + m, m);
    return true;
}

}  // namespace
}  // namespace octavo
