// The attention weight of a row on each block of keys, estimated from a part of the dimensions of queries
// and keys, to select the blocks to read. One key per lane; the sums of a lane have one order, so that they
// depend on the row and its keys only.
#pragma once
#include "../simd/simd.h"
#include "table.h"

namespace octavo {
namespace {

// Returns the unscaled scores of a query with the sixteen keys of a block.
OCTAVO_INLINE vf partial_scores(const KvLayer& kv, const uint8_t* keys, const float* q) {
    vf sum{};
    if (kv.type == KvType::fp32) {
        for (int d = 0; d < kv.k_width; d++)
            sum = fma(load(reinterpret_cast<const float*>(keys) + d * kLanes), splat(q[d]), sum);
        return sum;
    }
    const vi high = splat_i(static_cast<int32_t>(0xffff0000));
    for (int d = 0; d < kv.k_width; d += 2) {
        const vi pair = load_i(keys + d * kLanes * 2);
        sum = fma(as_float(pair << 16), splat(q[d]), sum);
        sum = fma(as_float(pair & high), splat(d + 1 < kv.k_width ? q[d + 1] : 0), sum);
    }
    return sum;
}

void block_masses(const BlockMassArgs& args) {
    const int blocks = (args.num_keys + kTile - 1) / kTile, rest = args.num_keys - (blocks - 1) * kTile;
    const uint8_t* base = args.kv.base + args.kv_head * args.kv.head_stride;
    const vi is_key = iota() < splat_i(rest);
    const vf none = splat(-1e30f);
    for (int lane = 0; lane < args.num_lanes; lane++) {
        const float* q = args.q + static_cast<int64_t>(lane) * args.kv.k_width;
        vf largest = none;
        for (int b = 0; b < blocks; b++) {
            const uint8_t* keys = base + args.block_table[b] * args.kv.block_stride;
            vf scores = partial_scores(args.kv, keys, q) * splat(args.scale);
            if (b + 1 == blocks) scores = select(is_key, scores, none);
            store(args.scores + b * kTile, scores);
            largest = max(largest, scores);
        }
        const vf top = splat(max_lanes(largest));
        vf sum{};
        for (int b = 0; b < blocks; b++) {
            const vf weights = exp(load(args.scores + b * kTile) - top);
            store(args.scores + b * kTile, weights);
            sum += weights;
        }
        const float share = 1.0f / sum_lanes(sum);
        for (int b = 0; b < blocks; b++) {
            const float mass = sum_lanes(load(args.scores + b * kTile)) * share;
            args.masses[b] = lane ? args.masses[b] + mass : mass;
        }
    }
}

}  // namespace
}  // namespace octavo
