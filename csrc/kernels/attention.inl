// Rotary positions, and attention over splits of 256 keys.
//
// A lane is one query row of one head; the lanes of a piece share a kv head, so that each key and value is loaded once for up
// to 16 of them. Per lane and split: scores of all its keys, m = max, p = exp(score - m), l = sum p, acc = sum p V, all fp32 and
// in a fixed order; then (m, l, acc) of the splits are merged left to right. What a lane computes depends on its own
// row alone: neither on the other lanes nor on how the splits were shared out.
#pragma once
#include "kv_store.inl"

namespace octavo {
namespace {

void rope_head(float* x, const float* cos, const float* sin, int rotary, bool interleaved) {
    const int half = rotary / 2;
    if (interleaved) {
        for (int i = 0; i < half; i++) {
            const float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cos[i] - b * sin[i];
            x[2 * i + 1] = b * cos[i] + a * sin[i];
        }
        return;
    }
    for (int i = 0; i < half; i += kLanes) {
        const int n = half - i < kLanes ? half - i : kLanes;
        const vf a = load_first(x + i, n), b = load_first(x + half + i, n), c = load_first(cos + i, n), s = load_first(sin + i, n);
        store_first(x + i, a * c - b * s, n);
        store_first(x + half + i, b * c + a * s, n);
    }
}

// -- scores --------------------------------------------------------------------------------------------------------------

// Memory that is needed next: blocks lie scattered, so a block's scores ask for the next block's keys and for its own values.
OCTAVO_INLINE void prefetch_pair(const uint8_t* next_k, const uint8_t* v, int pair, int bytes) {
    for (int line = 0; line < bytes; line += 64) {
        __builtin_prefetch(next_k + (size_t)bytes * pair + line, 0, 3);
        __builtin_prefetch(v + (size_t)bytes * pair + line, 0, 3);
    }
}

// scores [N][256] of 16 keys, in two chains. fp32: q [N][width]; over even and odd d.
template <int N>
OCTAVO_INLINE void block_scores(const uint8_t* k, const uint8_t* next_k, const uint8_t* v, const float* q, int width, float* scores) {
    vf even[N] = {}, odd[N] = {};
    for (int d = 0; d < width; d += 2) {
        prefetch_pair(next_k, v, d / 2, 128);
        const vf low = load((const float*)k + d * kTile), high = load((const float*)k + (d + 1) * kTile);
        for (int n = 0; n < N; n++) {
            even[n] = fma(low, splat(q[n * width + d]), even[n]);
            odd[n] = fma(high, splat(q[n * width + d + 1]), odd[n]);
        }
    }
    for (int n = 0; n < N; n++) store(scores + n * kSplitKeys, even[n] + odd[n]);
}
// bf16, int8: q rounded to bf16, [N][width]; over even and odd pairs of d.
template <int N, typename Element>
OCTAVO_INLINE void block_scores(const uint8_t* k, const uint8_t* next_k, const uint8_t* v, const uint16_t* q, int width, float* scores) {
    vf chain[N][2] = {};
    for (int p = 0; p < width / 2; p++) {
        prefetch_pair(next_k, v, p, 32 * sizeof(Element));
        const vi keys = load_pairs((const Element*)k + 32 * p);
        for (int n = 0; n < N; n++) chain[n][p % 2] = dot2_bf16(chain[n][p % 2], keys, broadcast4(q + n * width + 2 * p));
    }
    for (int n = 0; n < N; n++) store(scores + n * kSplitKeys, chain[n][0] + chain[n][1]);
}

// acc [N][C] += weights V over `tokens` tokens of a block, C vectors of V from column `column` on. fp32: weights [N][256].
template <int N, int C>
OCTAVO_INLINE void block_values(const float* v, const float* weights, int tokens, int padded, int column, vf (&acc)[N][C]) {
    for (int j = 0; j < tokens; j++) {
        vf values[C];
        for (int c = 0; c < C; c++) values[c] = load(v + j * padded + column + 16 * c);
        for (int n = 0; n < N; n++)
            for (int c = 0; c < C; c++) acc[n][c] = fma(values[c], splat(weights[n * kSplitKeys + j]), acc[n][c]);
    }
}
// bf16, int8: weights rounded to bf16, each lane's in the first half of its 256 floats; whole pairs of tokens.
template <int N, int C, typename Element>
OCTAVO_INLINE void block_values(const Element* v, const uint16_t* weights, int tokens, int padded, int column, vf (&acc)[N][C]) {
    for (int j = 0; j < (tokens + 1) / 2; j++) {
        vi values[C];
        for (int c = 0; c < C; c++) values[c] = load_pairs(v + 2 * (j * padded + column + 16 * c));
        for (int n = 0; n < N; n++)
            for (int c = 0; c < C; c++) acc[n][c] = dot2_bf16(acc[n][c], values[c], broadcast4(weights + n * 2 * kSplitKeys + 2 * j));
    }
}

}  // namespace
}  // namespace octavo

#ifdef __AMX_INT8__
#include "attention_amx.inl"
#endif

namespace octavo {
namespace {

#ifdef __AMX_INT8__
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
template <typename Set, typename Keys>
void tile_scores(const Set&, int, int, int, const Keys&) {}
template <typename Set, typename Values>
void tile_values(const Set&, int, int, int, const Values&) {}
#endif

struct Lane {
    int row, head, first_key, last_key;  // keys first_key .. last_key - 1 are seen
};

// What a piece knows about its lanes, and its scratch memory.
struct LaneSet {
    const AttentionArgs& args;
    const AttentionPiece& piece;
    int count = 0, width;
    Lane lanes[kMaxLanes];
    float *q, *scores, *split_state, *state;  // [lanes][width] (bf16 in the first half), [lanes][256], twice [lanes][2 + v_padded]
    uint8_t* values;                          // a block's values of one head in bf16, where they do not lie so in the block
    uint8_t* keys;                            // keys of four blocks likewise

    LaneSet(const AttentionArgs& a, const AttentionPiece& p, float* scratch) : args(a), piece(p) {
        const int group = a.num_heads / a.kv.num_heads;
        width = (a.kv.k_width + 1) / 2 * 2;
        q = scratch;
        scores = q + kMaxLanes * width;
        split_state = scores + kMaxLanes * kSplitKeys;
        state = split_state + kMaxLanes * (2 + a.kv.v_padded);
        values = (uint8_t*)(state + kMaxLanes * (2 + a.kv.v_padded));
        keys = values + sizeof(uint16_t) * kTile * a.kv.v_padded;
        for (int i = 0; i < p.num_rows; i++)
            for (int h = 0; h < group; h++) add(p.rows[i].row, p.kv_head * group + h);
    }
    void add(int row, int head) {
        const int position = piece.positions[row];
        const int last = args.window < 0 || position >= piece.context_len ? piece.context_len : position + 1;
        const int first = args.window > 0 && position - args.window + 1 > 0 ? position - args.window + 1 : 0;
        put_query(args.q + row * args.q_stride + (int64_t)head * args.kv.k_width, count * width);
        lanes[count++] = Lane{row, head, first, last};
    }
    // fp32: times the scale. bf16, int8: rounded, and the scores are scaled.
    void put_query(const float* from, int at) {
        for (int d = 0; d < width; d += kLanes) {
            const int n = args.kv.k_width - d < kLanes ? args.kv.k_width - d : kLanes, padded = width - d < kLanes ? width - d : kLanes;
            const vf part = load_first(from + d, n);
            if (args.kv.type == KvType::fp32) {
                store_first(q + at + d, part * args.scale, padded);
                continue;
            }
            if (padded == kLanes) {
                store_bf16((uint16_t*)q + at + d, part);
                continue;
            }
            uint16_t values[kLanes];
            store_bf16(values, part);
            std::memcpy((uint16_t*)q + at + d, values, sizeof(uint16_t) * padded);
        }
    }
    const uint16_t* scales(int b) const { return scales_of(args.kv, piece.block_table[b], piece.kv_head); }
    const uint16_t* q_bf16() const { return (const uint16_t*)q; }
    uint16_t* weights_bf16() const { return (uint16_t*)scores; }
    int first_key() const {
        int key = lanes[0].first_key;
        for (int i = 1; i < count; i++) key = lanes[i].first_key < key ? lanes[i].first_key : key;
        return key;
    }
    int last_key() const {
        int key = lanes[0].last_key;
        for (int i = 1; i < count; i++) key = lanes[i].last_key > key ? lanes[i].last_key : key;
        return key;
    }
};

template <int N, KvType kType>
void score_lanes(const LaneSet& set, int lane0, int block0, int block1, int split0) {
    const KvLayer& kv = set.args.kv;
    for (int b = block0; b < block1; b++) {
        const int block = set.piece.block_table[b], next = set.piece.block_table[b + 1 < block1 ? b + 1 : b];
        const uint8_t *k = k_of(kv, block, set.piece.kv_head), *next_k = k_of(kv, next, set.piece.kv_head), *v = v_of(kv, block, set.piece.kv_head);
        float* scores = set.scores + lane0 * kSplitKeys + b * kTile - split0;
        if constexpr (kType == KvType::int8) __builtin_prefetch(scales_of(kv, next, set.piece.kv_head), 0, 3);
        if constexpr (kType != KvType::fp32)
            block_scores<N, Element<kType>>(k, next_k, v, set.q_bf16() + lane0 * set.width, set.width, scores);
        else
            block_scores<N>(k, next_k, v, set.q + lane0 * set.width, set.width, scores);
    }
}

// The scores of 16 keys as they count: capped, and -inf where the lane does not see the key.
OCTAVO_INLINE vf masked(const LaneSet& set, const Lane& lane, vf s, int key) {
    const vf cap = splat(set.args.softcap);
    if (set.args.softcap > 0) s = cap * (splat(2.0f) * sigmoid(splat(2.0f) * s / cap) - splat(1.0f));
    if (key >= lane.first_key && key + kTile <= lane.last_key) return s;
    const vi at = iota() + key;
    return select((vi)(at >= lane.first_key) & (vi)(at < lane.last_key), s, splat(-INFINITY));
}

// Scores to weights: masks, caps, exponentials. Returns (m, l) in the lane's split state; m = -inf where it sees no key here.
// fp32: e^(s - m), in place. bf16: the same rounded to bf16, and the sum that of the rounded ones. int8: scores are multiplied by their
// key's scale first; the weights are e^(s - m) times their value's scale, rounded to bf16, and the sum is that of e^(s - m).
// A NaN among the scores stays.
template <KvType kType>
void soften_lane(const LaneSet& set, int lane, int key0, int key1, int split0) {
    float* scores = set.scores + lane * kSplitKeys - split0;
    uint16_t* weights = set.weights_bf16() + lane * 2 * kSplitKeys - split0;
    float* state = set.split_state + lane * (2 + set.args.kv.v_padded);
    const Lane& l = set.lanes[lane];
    vf largest = splat(-INFINITY);
    vi bad = {};
    for (int key = key0; key < key1; key += kTile) {
        vf s = load(scores + key);
        if constexpr (kType != KvType::fp32) s *= set.args.scale;
        if constexpr (kType == KvType::int8) s *= load_bf16(set.scales(key / kTile));
        s = masked(set, l, s, key);
        store(scores + key, s);
        largest = max(largest, s);
        bad |= (vi)(s != s);
    }
    const float m = sum_lanes_i(bad) ? NAN : max_lanes(largest);
    vf total = {};
    const bool seen = m != -INFINITY;
    for (int key = key0; key < key1; key += kTile) {
        const vf s = load(scores + key);
        if constexpr (kType == KvType::bf16) {
            store_bf16(weights + key, seen ? exp_coarse(s - m) : vf{});
            total += load_bf16(weights + key);
        } else if constexpr (kType == KvType::int8) {
            const vf p = seen ? exp_coarse(s - m) : vf{};
            store_bf16(weights + key, select((vi)(p == 0.0f), vf{}, p * load_bf16(set.scales(key / kTile) + kTile)));  // unseen scales may be NaN
            total += p;
        } else {
            const vf p = seen ? exp(s - m) : vf{};
            store(scores + key, p);
            total += p;
        }
    }
    state[0] = m;
    state[1] = sum_lanes(total);
}

// The values of block b, as they lie. What lies beyond the last key may be anything, NaN too, and bf16 reads whole pairs and blocks: there it
// is zeroed. (int8 may be any integer there: its weights are 0.)
template <KvType kType>
const uint8_t* values_of(const LaneSet& set, int b, int key1) {
    const KvLayer& kv = set.args.kv;
    const uint8_t* v = v_of(kv, set.piece.block_table[b], set.piece.kv_head);
    const int tokens = key1 - b * kTile;
    if (kType != KvType::bf16 || tokens >= kTile) return v;
    std::memcpy(set.values, v, sizeof(uint16_t) * kv.v_padded * kTile);
    uint32_t* pairs = (uint32_t*)set.values;
    if (tokens % 2)
        for (int d = 0; d < kv.v_padded; d++) pairs[tokens / 2 * kv.v_padded + d] &= 0xffff;
    std::memset(pairs + (tokens + 1) / 2 * kv.v_padded, 0, sizeof(uint32_t) * (kTile / 2 - (tokens + 1) / 2) * kv.v_padded);
    return set.values;
}

// For the tile unit, whose operands are bf16: the keys of block b, and the values of up to 64 columns from `column` on.
template <KvType kType>
const uint8_t* tile_keys(const LaneSet& set, int b) {
    const uint8_t* k = k_of(set.args.kv, set.piece.block_table[b], set.piece.kv_head);
    if (kType == KvType::bf16) return k;
    uint8_t* to = set.keys + sizeof(uint16_t) * (b % 4) * kTile * set.width;
    for (int p = 0; p < set.width / 2; p++) store_i(to + 64 * p, load_pairs((const int8_t*)k + 32 * p));
    return to;
}
template <KvType kType>
const uint8_t* tile_columns(const LaneSet& set, int b, int key1, int column) {
    const int padded = set.args.kv.v_padded, last = column + 64 < padded ? column + 64 : padded;
    const uint8_t* v = values_of<kType>(set, b, key1);
    if (kType == KvType::bf16) return v + 4 * column;
    for (int j = 0; j < kTile / 2; j++)
        for (int d = column; d < last; d += kLanes) store_i(set.values + 4 * (j * padded + d), load_pairs((const int8_t*)v + 2 * (j * padded + d)));
    return set.values + 4 * column;
}

template <int N, int C, KvType kType>
void weigh_columns(const LaneSet& set, int lane0, int column, int key0, int key1, int split0) {
    vf acc[N][C] = {};
    const int padded = set.args.kv.v_padded;
    for (int key = key0; key < key1; key += kTile) {
        const int tokens = key1 - key < kTile ? key1 - key : kTile;
        const uint8_t* v = values_of<kType>(set, key / kTile, key1);
        if constexpr (kType != KvType::fp32)
            block_values<N, C>((const Element<kType>*)v, set.weights_bf16() + lane0 * 2 * kSplitKeys + key - split0, tokens, padded, column, acc);
        else
            block_values<N, C>((const float*)v, set.scores + lane0 * kSplitKeys + key - split0, tokens, padded, column, acc);
    }
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) store(set.split_state + (lane0 + n) * (2 + padded) + 2 + column + 16 * c, acc[n][c]);
}

template <int N, KvType kType>
void weigh_lanes(const LaneSet& set, int lane0, int key0, int key1, int split0) {
    int column = 0;
    for (; column + 64 <= set.args.kv.v_padded; column += 64) weigh_columns<N, 4, kType>(set, lane0, column, key0, key1, split0);
    for (; column < set.args.kv.v_padded; column += 16) weigh_columns<N, 1, kType>(set, lane0, column, key0, key1, split0);
}

template <KvType kType>
void score_all(const LaneSet& set, int block0, int block1, int split0) {
    int lane = 0;
    for (; lane + 8 <= set.count; lane += 8) score_lanes<8, kType>(set, lane, block0, block1, split0);
    switch (set.count - lane) {
        case 7: return score_lanes<7, kType>(set, lane, block0, block1, split0);
        case 6: return score_lanes<6, kType>(set, lane, block0, block1, split0);
        case 5: return score_lanes<5, kType>(set, lane, block0, block1, split0);
        case 4: return score_lanes<4, kType>(set, lane, block0, block1, split0);
        case 3: return score_lanes<3, kType>(set, lane, block0, block1, split0);
        case 2: return score_lanes<2, kType>(set, lane, block0, block1, split0);
        case 1: return score_lanes<1, kType>(set, lane, block0, block1, split0);
    }
}

template <KvType kType>
void weigh_all(const LaneSet& set, int key0, int key1, int split0) {
    int lane = 0;
    for (; lane + 4 <= set.count; lane += 4) weigh_lanes<4, kType>(set, lane, key0, key1, split0);
    switch (set.count - lane) {
        case 3: return weigh_lanes<3, kType>(set, lane, key0, key1, split0);
        case 2: return weigh_lanes<2, kType>(set, lane, key0, key1, split0);
        case 1: return weigh_lanes<1, kType>(set, lane, key0, key1, split0);
    }
}

// -- merging -------------------------------------------------------------------------------------------------------------

// into (m, l, acc) += part, both relative to their own maxima. A part that saw no key (m = -inf) changes nothing.
void merge_state(float* into, const float* part, int v_padded) {
    if (part[0] == -INFINITY) return;
    if (into[0] == -INFINITY) {
        std::memcpy(into, part, sizeof(float) * (2 + v_padded));
        return;
    }
    const float m = into[0] > part[0] || into[0] != into[0] ? into[0] : part[0];
    const float keep = exp(splat(into[0] - m))[0], add = exp(splat(part[0] - m))[0];
    into[0] = m;
    into[1] = into[1] * keep + part[1] * add;
    for (int d = 2; d < 2 + v_padded; d += kLanes) store(into + d, load(into + d) * keep + load(part + d) * add);
}

void finish_lane(const AttentionArgs& args, const Lane& lane, float* state) {
    if (args.sinks) {
        const float sink = args.sinks[lane.head], m = state[0] > sink ? state[0] : sink;
        const float keep = state[0] == -INFINITY ? 0 : exp(splat(state[0] - m))[0];
        state[1] = state[1] * keep + exp(splat(sink - m))[0];
        for (int d = 2; d < 2 + args.kv.v_padded; d++) state[d] *= keep;
    }
    float* acc = state + 2;
    for (int d = 0; d < args.kv.v_padded; d += kLanes) store(acc + d, load(acc + d) / splat(state[1]));
    if (!args.rows) {
        std::memcpy(args.out + lane.row * args.out_stride + (int64_t)lane.head * args.kv.v_width, acc, sizeof(float) * args.kv.v_width);
        return;
    }
    const int first_group = lane.head * args.kv.v_width / kGroup;
    for (int g = 0; g < args.kv.v_width / kGroup; g++) put_rows(acc + g * kGroup, *args.rows, lane.row, 1, first_group + g, kGroup);
}

template <KvType kType>
void attend_keys(const LaneSet& set, int key0, int key1, int split0) {
    const int block0 = key0 / kTile, block1 = (key1 + kTile - 1) / kTile;
    const bool tiles = kType != KvType::fp32 && kHasTiles && set.width % 32 == 0;
    if (tiles)
        tile_scores(set, block0, block1, split0, [&](int block) { return tile_keys<kType>(set, block); });
    else
        score_all<kType>(set, block0, block1, split0);
    for (int lane = 0; lane < set.count; lane++) soften_lane<kType>(set, lane, key0, key1, split0);
    if (tiles)
        tile_values(set, key0, key1, split0, [&](int block, int column) { return tile_columns<kType>(set, block, key1, column); });
    else
        weigh_all<kType>(set, key0, key1, split0);
}

// One split of every lane into split_state.
void attend_split(const LaneSet& set, int split) {
    const int split0 = split * kSplitKeys;
    int key0 = set.first_key(), key1 = set.last_key();
    key0 = key0 > split0 ? key0 / kTile * kTile : split0;
    key1 = key1 < split0 + kSplitKeys ? key1 : split0 + kSplitKeys;
    if (key0 >= key1) {
        for (int lane = 0; lane < set.count; lane++) set.split_state[lane * (2 + set.args.kv.v_padded)] = -INFINITY;
        return;
    }
    switch (set.args.kv.type) {
        case KvType::fp32: return attend_keys<KvType::fp32>(set, key0, key1, split0);
        case KvType::bf16: return attend_keys<KvType::bf16>(set, key0, key1, split0);
        case KvType::int8: return attend_keys<KvType::int8>(set, key0, key1, split0);
    }
}

void attention(const AttentionArgs& args, const AttentionPiece& piece, float* scratch) {
    const LaneSet set(args, piece, scratch);
    const int size = 2 + args.kv.v_padded, row_size = args.num_heads / args.kv.num_heads * size;
    const bool merges = !piece.rows[0].partial;
    for (int lane = 0; merges && lane < set.count; lane++) {
        std::memset(set.state + lane * size, 0, sizeof(float) * size);
        set.state[lane * size] = -INFINITY;
    }
    for (int split = piece.first_split; split < piece.last_split; split++) {
        attend_split(set, split);
        for (int lane = 0; merges && lane < set.count; lane++) merge_state(set.state + lane * size, set.split_state + lane * size, args.kv.v_padded);
        for (int i = 0; !merges && i < piece.num_rows; i++) {
            const AttentionRow& row = piece.rows[i];
            std::memcpy(row.partial + (split - piece.first_split) * row.split_stride, set.split_state + i * row_size, sizeof(float) * row_size);
        }
    }
    for (int lane = 0; merges && lane < set.count; lane++) finish_lane(args, set.lanes[lane], set.state + lane * size);
}

// The partials of a piece's rows, merged left to right and written out.
void attention_merge(const AttentionArgs& args, const AttentionPiece& piece) {
    const int group = args.num_heads / args.kv.num_heads, size = 2 + args.kv.v_padded;
    for (int i = 0; i < piece.num_rows; i++)
        for (int h = 0; h < group; h++) {
            const AttentionRow& row = piece.rows[i];
            float* state = row.partial + h * size;
            for (int split = 1; split < piece.last_split - piece.first_split; split++) merge_state(state, state + split * row.split_stride, args.kv.v_padded);
            finish_lane(args, Lane{row.row, piece.kv_head * group + h, 0, 0}, state);
        }
}

}  // namespace
}  // namespace octavo
