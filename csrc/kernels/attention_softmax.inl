// Weights from the scores of a split: mask, softcap, bias, exponential, and each lane's maximum m and sum
// l.
#pragma once
#include "attention_lanes.inl"

namespace octavo {
namespace {

// Factors that int16 weights are multiplied by before they become integers: each value's scale divided by
// the largest scale that the lane attends to in the split, times kWeightCodes; 0 for keys outside. Lanes
// with the same keys share them.
struct ValueScales {
    const LaneSet& set;
    const int from, to, split0;
    float* scales;  // [256]
    int first = 0, last = 0;
    float unit = 0;  // unit of the integer sums of weighted values

    ValueScales(const LaneSet& s, int a, int b, int split)
        : set(s), from(a), to(b), split0(split), scales(s.value_scales) {}

    void see(int seen_first, int seen_last) {
        if (seen_first == first && seen_last == last) return;
        first = seen_first;
        last = seen_last;
        vf largest = {}, check = {};
        for (int key = from; key < to; key += kTile) {
            vf s = {};
            if (key < last && key + kTile > first) s = seen(load_bf16(set.scales(key / kTile) + kTile), key);
            store(scales + key - split0, s);
            largest = max(largest, s);
            check += s * 0.0f;
        }
        const bool finite = sum_lanes(check) == 0;
        const float top = max_lanes(largest);
        unit = finite ? top / kWeightCodes : NAN;
        const vf inverse = splat(finite && top > kTiny ? kWeightCodes / top : 0);
        for (int i = from - split0; i < to - split0; i += kTile)
            store(scales + i, finite ? load(scales + i) * inverse : vf{});
    }
    vf seen(vf s, int key) const {
        if (key >= first && key + kTile <= last) return s;
        const vi at = iota() + key;
        return select((at >= first) & (at < last), s, vf{});
    }
};

// Maps sums to scores if there is a softcap or a bias. Otherwise the sums stay unchanged, and the
// exponential applies the lane's factor.
struct ScoreMap {
    const float factor, softcap, slope;
    const float* distances;  // of the lane's head, from -reach on; or null
    const int reach, key_index;
    const bool changes;

    ScoreMap(const LaneSet& set, int lane)
        : factor(set.factors[lane]),
          softcap(set.args->softcap),
          slope(set.args->slopes ? set.args->slopes[set.lanes[lane].head] : 0),
          distances(set.args->distances ? set.args->distances + static_cast<int64_t>(set.lanes[lane].head) *
                                                                    (2 * set.args->reach + 1)
                                        : nullptr),
          reach(set.args->reach),
          key_index(set.item->key_indices[set.lanes[lane].row]),
          changes(softcap > 0 || set.args->slopes || distances) {}

    // Returns the scores of keys key .. key + 15.
    vf operator()(vf s, int key) const {
        if (!changes) return s;
        s = softcap > 0 ? softcap * (splat(2.0f) * sigmoid(splat(2.0f * factor / softcap) * s) - splat(1.0f))
                        : splat(factor) * s;
        if (distances) return s + bias_from(key - key_index);
        return slope != 0 ? s + splat(slope) * to_float(iota() + (key - key_index)) : s;
    }

    // Returns the biases of distances first .. first + 15.
    vf bias_from(int first) const {
        if (first >= -reach && first + kLanes - 1 <= reach) return load(distances + reach + first);
        float each[kLanes];
        for (int i = 0; i < kLanes; i++) {
            const int distance = first + i < -reach ? -reach : first + i > reach ? reach : first + i;
            each[i] = distances[reach + distance];
        }
        return load(each);
    }
};

// Maps the scores and sets those outside the lane's mask to -inf. Returns the largest. A NaN may be lost in
// the maximum, but appears in the sum of the weights.
OCTAVO_INLINE float mask_scores(const ScoreMap& map, float* scores, int from, int to, Keys seen) {
    vf largest = splat(-INFINITY);
    const auto mask = [&](int key, int end) {
        for (; key < end; key += kTile) {
            const vi at = iota() + key;
            const vf masked =
                select((at >= seen.first) & (at < seen.last), map(load(scores + key), key), splat(-INFINITY));
            store(scores + key, masked);
            largest = max(largest, masked);
        }
    };
    const int inner = (seen.first + kTile - 1) / kTile * kTile,
              outer = seen.last / kTile * kTile > inner ? seen.last / kTile * kTile : inner;
    mask(from, inner);
    for (int key = inner; key < outer; key += kTile) {  // blocks that are inside the mask
        const vf s = map(load(scores + key), key);
        if (map.changes) store(scores + key, s);
        largest = max(largest, s);
    }
    mask(outer, to);
    return max_lanes(largest);
}

// Computes a lane's weights e^(s - m), its m and its l; m = -inf if the lane attends to no key here.
//   fp32     weights replace the scores; l is their sum
//   bf16     weights are rounded to bf16; l is the sum of the rounded weights
//   int16    weights times their value's scale, as integers; l is the sum of e^(s - m)
//   widened  weights times their value's scale, rounded to bf16; l is the sum of e^(s - m)
template <Way way>
void soften_lane(const LaneSet& set, int lane, float largest, int key0, int key1, int split0,
                 ValueScales& values) {
    float* scores = set.scores + lane * kSplitKeys - split0;
    uint16_t* weights = set.weights_bf16() + lane * 2 * kSplitKeys - split0;
    float* state = set.split_state + lane * set.state_size;
    const auto [first, last] = set.seen(lane, key0, key1);
    state[0] = -INFINITY;
    state[1] = 0;
    set.units[lane] = 0;
    if (first >= last) {
        std::memset(set.scores + lane * kSplitKeys, 0, sizeof(float) * kSplitKeys);
        return;
    }
    const float factor = ScoreMap(set, lane).changes ? 1 : set.factors[lane];
    if constexpr (way == Way::int16) values.see(first, last);
    const vf top = splat(largest), slope = splat(factor * 1.44269504f), ones = as_float(splat_i(0x3f803f80));
    const auto weigh = [&](int key) {
        const vf s = load(scores + key) - top;
        return way == Way::fp32 ? exp(s) : exp2_coarse(s * slope);
    };
    vf total = {};
    for (int key = values.from; way == Way::bf16 && key < values.to; key += 2 * kTile) {
        const vi pairs = to_bf16(weigh(key), weigh(key + kTile));
        store_i(weights + key, pairs);
        total = dot2_bf16(total, pairs, as_int(ones));
    }
    for (int key = values.from; way != Way::bf16 && key < values.to; key += kTile) {
        const vf p = weigh(key);
        if constexpr (way == Way::fp32) store(scores + key, p);
        if constexpr (way == Way::int16)
            store_int16(weights + key, round_to_int(p * load(values.scales + key - split0)));
        if constexpr (way == Way::widened) {
            const bool read = key >= key0 && key < key1;  // the block table may end before it
            store_bf16(weights + key,
                       read ? select(p == 0.0f, vf{}, p * load_bf16(set.scales(key / kTile) + kTile))
                            : vf{});  // scales outside the mask may be NaN
        }
        total += p;
    }
    state[0] = largest * factor;
    state[1] = sum_lanes(total);
    set.units[lane] = values.unit;
    if (state[1] != state[1]) state[0] = NAN;
}

template <Way way>
void soften(const LaneSet& set, int key0, int key1, int split0) {
    // Whole vectors of 16-bit weights; keys around key0 .. key1 - 1 are masked.
    ValueScales values(set, key0 / (2 * kTile) * 2 * kTile, (key1 + 2 * kTile - 1) / (2 * kTile) * 2 * kTile,
                       split0);
    float largest[kMaxLanes];
    for (int lane = 0; lane < set.count; lane++) {
        const Keys seen = set.seen(lane, key0, key1);
        if (seen.first < seen.last)
            largest[lane] = mask_scores(ScoreMap(set, lane), set.scores + lane * kSplitKeys - split0,
                                        values.from, values.to, seen);
    }
    for (int lane = 0; lane < set.count; lane++)
        soften_lane<way>(set, lane, largest[lane], key0, key1, split0, values);
}

}  // namespace
}  // namespace octavo
