// Stores a token's K and V in its slot of a KV block, in the cache's type. Layouts: KvLayer in attention.h.
//
// int8: per token and head, scale = absmax / 127 rounded to bf16, code = round(x / scale), in fp32 and with
// true divisions, so that every level and the reference store the same bytes. A row of zeros has scale 0; a
// NaN or an infinity makes the scale NaN, so that it propagates. Codes of 4 bits: kv_codes.inl.
#pragma once
#include "kv_codes.inl"

namespace octavo {
namespace {

OCTAVO_INLINE uint8_t* k_block(const KvLayer& kv, int block, int head) {
    return kv.base + head * kv.head_stride + block * kv.block_stride;
}
OCTAVO_INLINE uint8_t* v_block(const KvLayer& kv, int block, int head) {
    return k_block(kv, block, head) + kv.v_offset;
}
OCTAVO_INLINE uint16_t* scales_block(const KvLayer& kv, int block, int head) {
    return reinterpret_cast<uint16_t*>(k_block(kv, block, head) + kv.scales_offset);
}

void store_fp32(const KvLayer& kv, uint8_t* k_to, uint8_t* v_to, int token, const float* k, const float* v) {
    for (int d = 0; d < kv.k_width; d++) (reinterpret_cast<float*>(k_to))[d * kTile + token] = k[d];
    std::memcpy(reinterpret_cast<float*>(v_to) + token * kv.v_padded, v, sizeof(float) * kv.v_width);
}

void store_bf16_block(const KvLayer& kv, uint8_t* k_to, uint8_t* v_to, int token, const float* k,
                      const float* v) {
    uint16_t values[kLanes];
    for (int d = 0; d < kv.k_width; d += kLanes) {
        const int n = kv.k_width - d < kLanes ? kv.k_width - d : kLanes;
        store_bf16(values, load_first(k + d, n));
        for (int i = 0; i < n; i += 2)
            std::memcpy(k_to + 64 * static_cast<size_t>((d + i) / 2) + 4 * token, values + i, 4);
    }
    uint16_t* first =
        reinterpret_cast<uint16_t*>(v_to) + static_cast<size_t>(token / 2) * 2 * kv.v_padded + token % 2;
    for (int d = 0; d < kv.v_width; d += kLanes) {
        const int n = kv.v_width - d < kLanes ? kv.v_width - d : kLanes;
        store_bf16(values, load_first(v + d, n));
        store_bf16_pairs(first + 2 * d, values, n);
    }
}

// Quantizes x [n], calls put(d, code) for each element, and returns the scale as bf16.
template <typename Put>
uint16_t put_codes(const float* x, int n, const Put& put) {
    vf largest = {}, check = {};
    for (int d = 0; d < n; d += kLanes) {
        const vf v = load_first(x + d, n - d < kLanes ? n - d : kLanes);
        largest = max(largest, absolute(v));
        check += v * 0.0f;  // 0, or NaN if an element is not finite
    }
    const bool finite = sum_lanes(check) == 0;
    const uint16_t scale = float_to_bf16(finite ? max_lanes(largest) / 127.0f : NAN);
    const float step = finite && scale ? bf16_to_float(scale) : INFINITY;
    for (int d = 0; d < n; d += kLanes) {
        const int count = n - d < kLanes ? n - d : kLanes;
        const vf codes = finite ? load_first(x + d, count) / splat(step) : vf{};
        int8_t values[kLanes];
        store_int8(values, round_to_int(min(splat(127.0f), max(splat(-127.0f), codes))));
        for (int i = 0; i < count; i++) put(d + i, values[i]);
    }
    return scale;
}

uint16_t store_int8_key(uint8_t* to, int token, const float* k, int n) {
    return put_codes(k, n, [&](int d, int8_t code) {
        to[(d / 2 * kTile + token) * 2 + d % 2] = static_cast<uint8_t>(code);
    });
}

void store_int8_block(const KvLayer& kv, uint8_t* k_to, uint8_t* v_to, uint16_t* scales, int token,
                      const float* k, const float* v) {
    scales[token] = store_int8_key(k_to, token, k, kv.k_width);
    uint8_t* first = v_to + static_cast<size_t>(token / 2) * 2 * kv.v_padded + token % 2;
    scales[kTile + token] =
        put_codes(v, kv.v_width, [&](int d, int8_t code) { first[2 * d] = static_cast<uint8_t>(code); });
}

void store_packed_block(const KvLayer& kv, uint8_t* k_to, uint8_t* v_to, uint16_t* scales, int token,
                        const float* k, const float* v) {
    scales[token] = key_bits(kv.type) == 4 ? store_packed_key(k_to, token, k, kv.k_width)
                                           : store_int8_key(k_to, token, k, kv.k_width);
    scales[kTile + token] = store_packed_value(v_to, token, v, kv.v_width, kv.v_padded);
}

// Prefetches the keys of a block. A token writes to every line of its block's K. In a decode step none of
// them is cached, since attention has read other requests' blocks in between; prefetching overlaps the
// misses.
OCTAVO_INLINE void prefetch_keys(const KvLayer& kv, int block) {
    for (int head = 0; head < kv.num_heads; head++)
        for (size_t line = 0; line < kv.v_offset; line += 64)
            __builtin_prefetch(k_block(kv, block, head) + line, 1, 3);
}

// Stores k [heads * k_width] and v [heads * v_width] of one token in its slot. Other threads may write
// neighbouring tokens of the block at the same time.
void kv_store(const KvLayer& kv, int32_t slot, const float* k, const float* v) {
    const int block = slot / kTile, token = slot % kTile;
    prefetch_keys(kv, block);
    for (int head = 0; head < kv.num_heads; head++, k += kv.k_width, v += kv.v_width) {
        uint8_t *k_to = k_block(kv, block, head), *v_to = v_block(kv, block, head);
        switch (kv.type) {
            case KvType::fp32: store_fp32(kv, k_to, v_to, token, k, v); break;
            case KvType::bf16: store_bf16_block(kv, k_to, v_to, token, k, v); break;
            case KvType::int8:
                store_int8_block(kv, k_to, v_to, scales_block(kv, block, head), token, k, v);
                break;
            case KvType::k8v4:
            case KvType::int4:
                store_packed_block(kv, k_to, v_to, scales_block(kv, block, head), token, k, v);
                break;
        }
    }
}

}  // namespace
}  // namespace octavo
