// Scores and weighted values on the AMX tile unit, for K and V in bf16 with a key width that is a multiple of 32.
//
// A lane is a row of a tile, so up to 16 lanes cost what one does. A block's keys, [D/2][16 tokens][2], are B tiles as they lie; so
// are its values, [8 pairs of tokens][Dv][2], 16 columns at a time. Every number of lanes takes the tile unit: its sums have an
// order of their own.
#pragma once
#include "amx.inl"

namespace octavo {
namespace {

// Asks for 1 KiB. Blocks lie scattered, where the hardware's prefetcher is of no help.
OCTAVO_INLINE void prefetch_tile(const uint8_t* p) {
    for (int line = 0; line < 1024; line += 64) __builtin_prefetch(p + line, 0, 3);
}

// scores [lanes][256] of blocks block0 .. block1 - 1; four blocks at a time, so that the unit has independent sums to work on.
template <typename Set>
void tile_scores(const Set& set, int block0, int block1, int split0) {
    const KvLayer& kv = set.args.kv;
    const auto keys = [&](int b) { return k_of(kv, set.piece.block_table[b], set.piece.kv_head); };
    const auto values = [&](int b) { return v_of(kv, set.piece.block_table[b], set.piece.kv_head); };
    // What is needed soon: the keys four blocks on, and the block's own values (as wide as its keys, or nearly).
    const auto prefetch = [&](int b, size_t at) {
        if (b + 4 < block1) prefetch_tile(keys(b + 4) + at);
        prefetch_tile(values(b) + at);
    };
    constexpr int kStride = kSplitKeys * sizeof(float);
    configure_attention(set.count);
    int b = block0;
    for (; b + 4 <= block1; b += 4) {
        const uint8_t *k0 = keys(b), *k1 = keys(b + 1), *k2 = keys(b + 2), *k3 = keys(b + 3);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int d = 0; d < set.width; d += 32) {
            const size_t at = (size_t)d * 32;
            _tile_loadd(4, set.q_bf16() + d, set.width * 2);
            _tile_loadd(6, k0 + at, 64);
            _tile_dpbf16ps(0, 4, 6);
            prefetch(b + 0, at);
            _tile_loadd(6, k1 + at, 64);
            _tile_dpbf16ps(1, 4, 6);
            prefetch(b + 1, at);
            _tile_loadd(6, k2 + at, 64);
            _tile_dpbf16ps(2, 4, 6);
            prefetch(b + 2, at);
            _tile_loadd(6, k3 + at, 64);
            _tile_dpbf16ps(3, 4, 6);
            prefetch(b + 3, at);
        }
        float* scores = set.scores + b * kTile - split0;
        _tile_stored(0, scores, kStride);
        _tile_stored(1, scores + kTile, kStride);
        _tile_stored(2, scores + 2 * kTile, kStride);
        _tile_stored(3, scores + 3 * kTile, kStride);
    }
    for (; b < block1; b++) {
        const uint8_t* k = keys(b);
        _tile_zero(0);
        for (int d = 0; d < set.width; d += 32) {
            _tile_loadd(4, set.q_bf16() + d, set.width * 2);
            _tile_loadd(6, k + (size_t)d * 32, 64);
            _tile_dpbf16ps(0, 4, 6);
            prefetch(b, (size_t)d * 32);
        }
        _tile_stored(0, set.scores + b * kTile - split0, kStride);
    }
}

// split_state's acc = weights times V, for keys key0 .. key1 - 1. `values(block)`: a block's values, zero beyond key1.
template <typename Set, typename Values>
void tile_values(const Set& set, int key0, int key1, int split0, const Values& values) {
    const int padded = set.args.kv.v_padded, stride = (2 + padded) * (int)sizeof(float);
    configure_attention(set.count);
    for (int column = 0; column < padded; column += 64) {
        const int columns = (padded - column) / 16;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int key = key0; key < key1; key += kTile) {
            const uint8_t* v = values(key / kTile) + (size_t)column * 4;
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
