// Scores and weighted values on AMX, for K and V in bf16 or codes with a key width that is a multiple of 32.
//
// A lane is a row of a tile, so up to 16 lanes cost as much as one. The keys of a block, [D/2][16
// tokens][2], are B tiles as stored, and so are the values, [8 pairs of tokens][Dv][2], 16 columns at a
// time. AMX is used for any number of lanes, since its sums have an order of their own. Blocks of codes are
// first widened to bf16, a few at a time.
#pragma once
#include "../simd/amx.h"
#include "attention_matmul.inl"

namespace octavo {
namespace {

// Returns the keys of block b in bf16. The pointer is valid for the next three calls.
template <Way way, int bits>
const uint8_t* tile_keys(const LaneSet& set, int b) {
    const uint8_t* k = set.keys_at(b);
    if (way == Way::bf16) return k;
    uint8_t* to = set.keys + sizeof(uint16_t) * (b % 4) * kTile * set.width;
    if constexpr (bits == 4) {
        for (int g = 0; g < set.width / 8; g++)
            for (int j = 0; j < kCodesPerWord; j++)
                store_i(to + 64 * (kCodesPerWord * g + j), code_levels<true>(load_i(k + 64 * g), j));
    } else {
        for (int p = 0; p < set.width / 2; p++)
            store_i(to + 64 * p, int8_to_bf16(reinterpret_cast<const int8_t*>(k) + 32 * p));
    }
    return to;
}
// Returns the values of block b as stored. The memory after the last key may hold NaN: bf16 values are
// zeroed there. int8 may hold anything, since its weights are 0.
template <Way way>
const uint8_t* values_until(const LaneSet& set, int b, int key1) {
    const int padded = set.args->kv.v_padded, tokens = key1 - b * kTile;
    const uint8_t* v = set.values_at(b);
    if (way != Way::bf16 || tokens >= kTile) return v;
    std::memcpy(set.values, v, sizeof(uint16_t) * padded * kTile);
    uint32_t* pairs = reinterpret_cast<uint32_t*>(set.values);
    if (tokens % 2)
        for (int d = 0; d < padded; d++) pairs[tokens / 2 * padded + d] &= 0xffff;
    std::memset(pairs + (tokens + 1) / 2 * padded, 0,
                sizeof(uint32_t) * (kTile / 2 - (tokens + 1) / 2) * padded);
    return set.values;
}
// Returns up to 64 columns of block b's values from `column` on, in bf16 and finite after key1. Valid until
// the next call.
template <Way way, int bits>
const uint8_t* tile_columns(const LaneSet& set, int b, int key1, int column) {
    const int padded = set.args->kv.v_padded, last = column + 64 < padded ? column + 64 : padded;
    const uint8_t* v = values_until<way>(set, b, key1);
    if (way == Way::bf16) return v + 4 * column;
    for (int j = 0; j < kTile / 2; j++) {
        if constexpr (bits == 4) {
            for (int c = 0; c < kCodesPerWord; c++)
                store_i(set.values + 4 * (j * padded + column + c * kLanes),
                        code_levels<true>(load_i(v + j * padded + column), c));
        } else {
            for (int d = column; d < last; d += kLanes)
                store_i(set.values + 4 * (j * padded + d),
                        int8_to_bf16(reinterpret_cast<const int8_t*>(v) + 2 * (j * padded + d)));
        }
    }
    return set.values + 4 * column;
}

OCTAVO_INLINE void prefetch_tile(const uint8_t* p, int bytes) {
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch(p + line, 0, 3);
}

// Computes scores [lanes][256] of blocks block0 .. block1 - 1, four blocks at a time so that the tile unit
// has independent sums.
template <Way way, int bits>
void tile_scores(const LaneSet& set, int block0, int block1, int split0) {
    constexpr int share = way == Way::widened ? 64 * bits : 1024;  // bytes of 32 dimensions of a block
    const auto keys = [&](int b) { return set.keys_at(b); };
    const auto values = [&](int b) { return set.values_at(b); };
    const auto block_keys = [&](int b) { return tile_keys<way, bits>(set, b); };
    // Prefetches the keys of block b + 4 and the values of block b, which are about as wide as its keys.
    const auto prefetch = [&](int b, int d) {
        if (b + 4 < block1) prefetch_tile(keys(b + 4) + d / 32 * share, share);
        prefetch_tile(values(b) + d / 32 * share, share);
    };
    constexpr int kStride = kSplitKeys * sizeof(float);
    configure_attention(set.count);
    int b = block0;
    for (; b + 4 <= block1; b += 4) {
        const uint8_t *k0 = block_keys(b), *k1 = block_keys(b + 1), *k2 = block_keys(b + 2),
                      *k3 = block_keys(b + 3);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int d = 0; d < set.width; d += 32) {
            const size_t at = static_cast<size_t>(d) * 32;
            _tile_loadd(4, set.q_bf16() + d, set.width * 2);
            _tile_loadd(6, k0 + at, 64);
            _tile_dpbf16ps(0, 4, 6);
            prefetch(b + 0, d);
            _tile_loadd(6, k1 + at, 64);
            _tile_dpbf16ps(1, 4, 6);
            prefetch(b + 1, d);
            _tile_loadd(6, k2 + at, 64);
            _tile_dpbf16ps(2, 4, 6);
            prefetch(b + 2, d);
            _tile_loadd(6, k3 + at, 64);
            _tile_dpbf16ps(3, 4, 6);
            prefetch(b + 3, d);
        }
        float* scores = set.scores + b * kTile - split0;
        _tile_stored(0, scores, kStride);
        _tile_stored(1, scores + kTile, kStride);
        _tile_stored(2, scores + 2 * kTile, kStride);
        _tile_stored(3, scores + 3 * kTile, kStride);
    }
    for (; b < block1; b++) {
        const uint8_t* k = block_keys(b);
        _tile_zero(0);
        for (int d = 0; d < set.width; d += 32) {
            _tile_loadd(4, set.q_bf16() + d, set.width * 2);
            _tile_loadd(6, k + static_cast<size_t>(d) * 32, 64);
            _tile_dpbf16ps(0, 4, 6);
            prefetch(b, d);
        }
        _tile_stored(0, set.scores + b * kTile - split0, kStride);
    }
}

// Multiplies the integer sums by each key's scale.
template <Way way>
void scale_scores(const LaneSet& set, int block0, int block1, int split0) {
    if (way != Way::widened) return;
    for (int b = block0; b < block1; b++) {
        const vf scales = load_bf16(set.scales(b));
        float* scores = set.scores + b * kTile - split0;
        for (int lane = 0; lane < set.count; lane++)
            store(scores + lane * kSplitKeys, load(scores + lane * kSplitKeys) * scales);
    }
}

// Computes acc = weights times V in split_state, for keys key0 .. key1 - 1.
template <Way way, int bits>
void tile_values(const LaneSet& set, int key0, int key1, int split0) {
    const int padded = set.args->kv.v_padded, stride = set.state_size * static_cast<int>(sizeof(float));
    configure_attention(set.count);
    for (int column = 0; column < padded; column += 64) {
        const int columns = (padded - column) / 16;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int key = key0; key < key1; key += kTile) {
            const uint8_t* v = tile_columns<way, bits>(set, key / kTile, key1, column);
            _tile_loadd(5, set.weights_bf16() + key - split0, kSplitKeys * 4);
            _tile_loadd(7, v, padded * 4);
            _tile_dpbf16ps(0, 5, 7);
            if (columns > 1) {
                _tile_loadd(7, v + 64, padded * 4);
                _tile_dpbf16ps(1, 5, 7);
            }
            if (columns > 2) {
                _tile_loadd(7, v + 128, padded * 4);
                _tile_dpbf16ps(2, 5, 7);
            }
            if (columns > 3) {
                _tile_loadd(7, v + 192, padded * 4);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        float* out = set.split_state + 2 + column;
        _tile_stored(0, out, stride);
        if (columns > 1) _tile_stored(1, out + 16, stride);
        if (columns > 2) _tile_stored(2, out + 32, stride);
        if (columns > 3) _tile_stored(3, out + 48, stride);
    }
}

}  // namespace
}  // namespace octavo
