// Matmuls with weights stored by columns: the codes of all outputs for one input are adjacent.
//
// For few rows, only the columns of inputs that are nonzero in at least one row are read, four at a time,
// and their bytes are interleaved to quads as in a tile. The sums of a block stay in the first-level cache.
// Sums of codes are exact, over all inputs or over a group, so the results are bitwise those of the same
// weight in tiles. With more rows, tiles are gathered from the columns and multiplied as usual, and the
// rows share the cost.
#pragma once
#include "linear.inl"

namespace octavo {
namespace {

// kInterleaved: outputs whose quads one interleaving produces.
constexpr int kQuadVectors = kInterleaved / kTile;
// Outputs times rows of a block.
constexpr int kBlockSums = 2048;

// Codes of one input of a weight with one scale per output, and its scales.
OCTAVO_INLINE const uint8_t* get_column(const Tiles& w, int64_t input) {
    return w.columns ? w.columns[input] : w.data + input * w.column_stride;
}
OCTAVO_INLINE const uint8_t* output_scales(const Tiles& w) {
    return w.columns ? w.data : w.data + static_cast<size_t>(w.num_groups) * kGroup * w.column_stride;
}

// Inputs that are nonzero in at least one of M rows, and both terms of each row for them. The inputs of a
// run (a group or all inputs) start at a multiple of four and are padded with zeros.
struct ActiveInputs {
    static constexpr int kBehind = 8;
    int64_t capacity;
    int32_t *inputs, *ends;
    int8_t* terms;  // [kColumnRows][2][capacity]

    ActiveInputs(uint8_t* memory, int num_groups)
        : capacity(get_capacity(num_groups)),
          inputs(reinterpret_cast<int32_t*>(memory)),
          ends(inputs + capacity),
          terms(reinterpret_cast<int8_t*>(ends + num_groups)) {}
    static int64_t get_capacity(int num_groups) {
        return static_cast<int64_t>(num_groups) * kGroup + kBehind;
    }
    static size_t num_bytes(int num_groups) {
        const size_t inputs = static_cast<size_t>(num_groups) * kGroup;
        return get_capacity(num_groups) * (sizeof(int32_t) + 2 * kColumnRows) + num_groups * sizeof(int32_t) +
               inputs * kColumnRows;
    }
    int8_t* of(int row, int term) const { return terms + (2 * row + term) * capacity; }
    // Memory for the second terms of all inputs of a row.
    int8_t* seconds(int row, int num_inputs) const {
        return of(kColumnRows, 0) + static_cast<int64_t>(row) * num_inputs;
    }
};

// Both terms of a row. `second` is null if there is one term.
struct RowTerms {
    const int8_t *first, *second;

    RowTerms() = default;
    // `memory` receives second terms that are not stored in the row.
    RowTerms(const QuantizedRows& x, int64_t row, int8_t* memory)
        : first(static_cast<const int8_t*>(x.values) + row * x.stride), second(nullptr) {
        const int num_inputs = x.num_groups * kGroup;
        if (x.type == RowType::whole) second = first + num_inputs;
        if (x.type != RowType::outliers) return;
        const OutlierList list(const_cast<int8_t*>(first), num_inputs);
        std::memset(memory, 0, num_inputs);
        for (int i = 0; i < *list.count; i++) std::memcpy(memory + 4 * list.quads[i], list.terms + 4 * i, 4);
        second = memory;
    }
};

// `run`: inputs per run, a multiple of 32.
template <int M>
void find_active(const QuantizedRows& x, int64_t row0, int run, ActiveInputs& active) {
    const int num_inputs = x.num_groups * kGroup;
    RowTerms rows[M];
    for (int m = 0; m < M; m++) rows[m] = RowTerms(x, row0 + m, active.seconds(m, num_inputs));
    int count = 0;
    const auto add = [&](int input, bool is_active) {
        active.inputs[count] = input;
        for (int m = 0; m < M; m++) {
            active.of(m, 0)[count] = is_active ? rows[m].first[input] : 0;
            active.of(m, 1)[count] = is_active && rows[m].second ? rows[m].second[input] : 0;
        }
        count++;
    };
    for (int base = 0; base < num_inputs; base += 8) {
        uint64_t some = 0;
        for (int m = 0; m < M; m++) {
            uint64_t words[2] = {};
            std::memcpy(words, rows[m].first + base, 8);
            if (rows[m].second) std::memcpy(words + 1, rows[m].second + base, 8);
            some |= words[0] | words[1];
        }
        for (; some; some &= ~(0xffull << (__builtin_ctzll(some) & ~7)))
            add(base + __builtin_ctzll(some) / 8, true);
        if ((base + 8) % run == 0) {
            while (count % 4) add(base, false);
            active.ends[(base + 8) / run - 1] = count;
        }
    }
    for (int i = 0; i < 4; i++) add(num_inputs - 1, false);  // read by the prefetch only
}

// Loads the rows' terms of four inputs from `i` on. Returns whether any second term is nonzero.
template <int M>
OCTAVO_INLINE bool load_terms(const ActiveInputs& active, int i, vi (&terms)[M][2]) {
    int32_t second = 0;
    for (int m = 0; m < M; m++) {
        int32_t quad;
        std::memcpy(&quad, active.of(m, 1) + i, 4);
        second |= quad;
        for (int term = 0; term < 2; term++) terms[m][term] = broadcast4(active.of(m, term) + i);
    }
    return second != 0;
}

// -- 8-bit with one scale per output --

// Adds four columns, from output `from` of the weight on, to the sums of a block: [M][2 terms][outputs].
template <int M, bool kSecond>
OCTAVO_INLINE void add_columns(const Columns& columns, const Columns& ahead, const vi (&terms)[M][2],
                               int num_outputs, int outputs, int32_t* sums) {
    for (int at = 0; at < num_outputs; at += kInterleaved) {
        vi quads[kQuadVectors];
        interleave(columns, at, quads);
        for (int i = 0; i < 4; i++) __builtin_prefetch(ahead[i] + at, 0, 3);
        for (int v = 0; v < kQuadVectors; v++) {
            const vi codes = quads[v] ^ static_cast<int32_t>(0x80808080);
            for (int m = 0; m < M; m++) {
                int32_t* to = sums + 2 * m * outputs + at + v * kTile;
                store_i(to, dot4(load_i(to), codes, terms[m][0]));
                if (kSecond) store_i(to + outputs, dot4(load_i(to + outputs), codes, terms[m][1]));
            }
        }
    }
}

// Multiplies M rows by `count` tiles from `tile` on, into acc [..][M][16].
template <int M>
void sparse_columns(const Tiles& w, int tile, int count, const QuantizedRows& x, int64_t row0, float* acc,
                    uint8_t* scratch) {
    constexpr int kOutputs = kBlockSums / M;  // per block
    ActiveInputs active(scratch, x.num_groups);
    find_active<M>(x, row0, x.num_groups * kGroup, active);
    alignas(64) int32_t sums[2 * (kOutputs + kInterleaved) * M];
    constexpr int kStride = kOutputs + kInterleaved;
    const float* scales = reinterpret_cast<const float*>(output_scales(w));
    for (int first = 0; first < count * kTile; first += kOutputs) {
        const int outputs = std::min(kOutputs, count * kTile - first);
        const int64_t from = static_cast<int64_t>(tile) * kTile + first;
        std::memset(sums, 0, sizeof sums);
        const auto columns_at = [&](int i, Columns& columns) {
            for (int c = 0; c < 4; c++) columns[c] = get_column(w, active.inputs[i + c]) + from;
        };
        for (int i = 0; i < active.ends[0]; i += 4) {
            Columns columns, ahead;
            columns_at(i, columns);
            columns_at(i + 4, ahead);
            vi terms[M][2];
            const bool second = load_terms<M>(active, i, terms);
            second ? add_columns<M, true>(columns, ahead, terms, outputs, kStride, sums)
                   : add_columns<M, false>(columns, ahead, terms, outputs, kStride, sums);
        }
        for (int m = 0; m < M; m++) {
            const int64_t row = row0 + m;
            const int32_t* of_terms = x.sums + x.half_at(row, 0, 0);
            for (int at = 0; at < outputs; at += kInterleaved) {
                vi firsts[kQuadVectors], seconds[kQuadVectors];
                load_sums(sums + 2 * m * kStride + at, firsts);
                load_sums(sums + (2 * m + 1) * kStride + at, seconds);
                for (int v = 0; v < kQuadVectors && at + v * kTile < outputs; v++) {
                    const int output = first + at + v * kTile;
                    const vf whole = to_float(firsts[v] - splat_i(128 * of_terms[0])),
                             more = to_float(seconds[v] - splat_i(128 * of_terms[kTile]));
                    const vf unscaled = kTwoTerms ? fma(whole, splat(kWholeUnit), more)
                                                  : fma(more, splat(kOutlierUnit), whole);
                    const vf scale = load(scales + static_cast<int64_t>(tile) * kTile + output);
                    store(acc + (static_cast<int64_t>(output) * M + m * kTile),
                          unscaled * (scale * splat(x.scales[x.at(row, 0)])));
                }
            }
        }
    }
}

// -- 4-bit --

// A group of 32 inputs is stored as [32 inputs][outputs / 2]: byte j of sixteen holds the codes of outputs
// j (low) and j + 16 of two tiles. The scales of all outputs follow, then their mins or zeros.

template <ScaleType S, ZeroPointKind Z>
constexpr size_t tile_group_bytes() {
    return 256 + scale_bytes<S>() + zero_point_bytes<S, Z>();
}

// add_columns for 4-bit codes: sums [M][outputs]; each 2 * kInterleaved sums are those of the low codes, then
// of the high codes.
template <int M>
OCTAVO_INLINE void add_nibbles(const Columns& columns, const Columns& ahead, const vi (&inputs)[M],
                               int num_bytes, int outputs, int32_t* sums) {
    for (int at = 0; at < num_bytes; at += kInterleaved) {
        vi quads[kQuadVectors];
        interleave(columns, at, quads);
        for (int i = 0; i < 4; i++) __builtin_prefetch(ahead[i] + at, 0, 3);
        for (int v = 0; v < kQuadVectors; v++)
            for (int half = 0; half < 2; half++) {
                const vi codes = (half ? quads[v] >> 4 : quads[v]) & 0x0f0f0f0f;
                for (int m = 0; m < M; m++) {
                    int32_t* to = sums + m * outputs + 2 * at + half * kInterleaved + v * kTile;
                    store_i(to, dot4(load_i(to), codes, inputs[m]));
                }
            }
    }
}

// Multiplies M rows by `count` tiles from `tile` on, into acc [..][M][16]. For one tile of a pair, both are
// computed.
template <int M, ScaleType S, ZeroPointKind Z>
void sparse_nibbles(const Tiles& w, int tile, int count, const QuantizedRows& x, int64_t row0, float* acc,
                    uint8_t* scratch) {
    constexpr int kOutputs = kBlockSums / M, kStride = kOutputs + 2 * kInterleaved;
    const size_t group_bytes = static_cast<size_t>(w.num_tiles()) * tile_group_bytes<S, Z>();
    const size_t codes = static_cast<size_t>(kGroup) * w.column_stride,
                 all_scales = w.num_tiles() * scale_bytes<S>();
    ActiveInputs active(scratch, x.num_groups);
    find_active<M>(x, row0, kGroup, active);
    alignas(64) int32_t sums[M * kStride];
    alignas(64) float totals[M * kStride];
    const int from = tile / 2 * 2, end = (tile + count + 1) / 2 * 2;
    for (int block = from; block < end; block += kOutputs / kTile) {
        const int tiles = std::min(kOutputs / kTile, end - block);
        const auto columns_at = [&](int i, Columns& columns) {
            for (int c = 0; c < 4; c++) {
                const int input = active.inputs[i + c];
                columns[c] = w.data + input / kGroup * group_bytes +
                             static_cast<int64_t>(input % kGroup) * w.column_stride + block * (kTile / 2);
            }
        };
        std::memset(totals, 0, sizeof totals);
        for (int g = 0; g < x.num_groups; g++) {
            std::memset(sums, 0, sizeof sums);
            for (int i = g ? active.ends[g - 1] : 0; i < active.ends[g]; i += 4) {
                Columns columns, ahead;
                columns_at(i, columns);
                columns_at(i + 4, ahead);
                vi inputs[M];
                for (int m = 0; m < M; m++) inputs[m] = broadcast4(active.of(m, 0) + i);
                add_nibbles<M>(columns, ahead, inputs, tiles * kTile / 2, kStride, sums);
            }
            const uint8_t* scales = w.data + g * group_bytes + codes;
            for (int m = 0; m < M; m++) {
                const int64_t row = row0 + m;
                const int32_t* halves = x.sums + x.half_at(row, g, 0);
                const vi zeros = splat_i(-w.zero_point * (halves[0] + halves[kTile]));
                const float d = x.scales[x.at(row, g)], scaled = x.scaled_sums[x.at(row, g)];
                const int both = 2 * kInterleaved;  // sums of low codes, then of high codes
                for (int at = 0; at < (tiles * kTile + both - 1) / both * both; at += kInterleaved) {
                    vi of_codes[kQuadVectors];
                    load_sums(sums + m * kStride + at, of_codes);
                    for (int v = 0; v < kQuadVectors; v++) {
                        const int pair = at / (2 * kInterleaved) * kQuadVectors + v,
                                  of = 2 * pair + at / kInterleaved % 2;  // index of the tile in the block
                        if (of >= tiles) break;
                        const vi sum = of_codes[v] + zeros;
                        const vf scale = load_scale<S>(scales + (block + of) * scale_bytes<S>());
                        float* total = totals + m * kStride + of * kTile;
                        vf to = fma(to_float(sum), scale * d, load(total));
                        if (Z != ZeroPointKind::none)
                            to =
                                fma(load_min<S, Z>(
                                        scales + all_scales + (block + of) * zero_point_bytes<S, Z>(), scale),
                                    splat(scaled), to);
                        store(total, to);
                    }
                }
            }
        }
        for (int of = std::max(tile - block, 0); of < std::min(tiles, tile + count - block); of++)
            for (int m = 0; m < M; m++)
                store(acc + (static_cast<int64_t>(block + of - tile) * M + m) * kTile,
                      load(totals + m * kStride + of * kTile));
    }
}

template <int M, ScaleType S>
void choose_nibbles(const Tiles& w, int tile, int count, const QuantizedRows& x, int64_t row0, float* acc,
                    uint8_t* scratch) {
    switch (w.zero_point_kind) {
        case ZeroPointKind::none:
            return sparse_nibbles<M, S, ZeroPointKind::none>(w, tile, count, x, row0, acc, scratch);
        case ZeroPointKind::min:
            return sparse_nibbles<M, S, ZeroPointKind::min>(w, tile, count, x, row0, acc, scratch);
        case ZeroPointKind::zero:
            return sparse_nibbles<M, S, ZeroPointKind::zero>(w, tile, count, x, row0, acc, scratch);
    }
}

// -- many rows --

// Gathers tiles of a weight with 4-bit codes; see gather_tiles.
void gather_nibbles(const Tiles& w, int tile, int count, uint8_t* to) {
    const size_t scale = w.scale_type == ScaleType::fp16 ? 32 : 64,
                 low = w.zero_point_kind == ZeroPointKind::none   ? 0
                       : w.zero_point_kind == ZeroPointKind::zero ? kTile
                                                                  : scale,
                 step = 256 + scale + low;
    const int all = w.num_tiles();
    for (int g = 0; g < w.num_groups; g++) {
        const uint8_t* group = w.data + g * all * step;
        const uint8_t* levels = group + static_cast<size_t>(kGroup) * w.column_stride;
        for (int t = tile / 2 * 2; t < tile + count; t += 2)
            for (int v = 0; v < 4; v++) {
                alignas(64) uint8_t low_codes[4][kTile], high_codes[4][kTile];
                for (int b = 0; b < 4; b++) {
                    const uint8_t* first =
                        group + static_cast<int64_t>(8 * v + b) * w.column_stride + t * (kTile / 2);
                    const uint8_t* second = first + 4 * static_cast<int64_t>(w.column_stride);
                    for (int o = 0; o < kTile; o++) {
                        low_codes[b][o] = static_cast<uint8_t>((first[o] & 15) | (second[o] << 4));
                        high_codes[b][o] = static_cast<uint8_t>((first[o] >> 4) | (second[o] & 240));
                    }
                }
                const Columns lows = {low_codes[0], low_codes[1], low_codes[2], low_codes[3]},
                              highs = {high_codes[0], high_codes[1], high_codes[2], high_codes[3]};
                const auto at = [&](int of) { return to + (of - tile) * w.tile_bytes + g * step + 64 * v; };
                if (t >= tile) interleave16(lows, 0, at(t));
                if (t + 1 < tile + count) interleave16(highs, 0, at(t + 1));
            }
        for (int t = tile; t < tile + count; t++) {
            uint8_t* out = to + (t - tile) * w.tile_bytes + g * step + 256;
            std::memcpy(out, levels + t * scale, scale);
            std::memcpy(out + scale, levels + all * scale + t * low, low);
        }
    }
}

// Gathers `count` tiles from their columns into consecutive memory. Returns a weight that consists of these
// tiles.
Tiles gather_tiles(const Tiles& w, int tile, int count, uint8_t* to) {
    Tiles gathered = w;
    gathered.column_stride = 0;
    gathered.num_rows = std::min(count * kTile, w.num_rows - tile * kTile);
    gathered.tile_stride = w.tile_bytes;
    gathered.data = to;
    if (w.code == Code::u4) {
        gather_nibbles(w, tile, count, to);
        return gathered;
    }
    for (int k = 0; k < w.num_groups * kGroup; k += 4) {
        Columns columns;
        for (int c = 0; c < 4; c++) columns[c] = get_column(w, k + c);
        for (int t = 0; t < count; t++)
            interleave16(columns, static_cast<int64_t>(tile + t) * kTile,
                         to + t * w.tile_bytes + 16 * static_cast<size_t>(k));
    }
    const uint8_t* scales = output_scales(w);
    constexpr size_t kScales = kTile * sizeof(float);
    for (int t = 0; t < count; t++)
        std::memcpy(to + (t + 1) * w.tile_bytes - kScales, scales + (tile + t) * kScales, kScales);
    return gathered;
}

size_t column_scratch_bytes(const Tiles& w) {
    const size_t few = ActiveInputs::num_bytes(w.num_groups), many = kGatheredTiles * w.tile_bytes;
    return (std::max(few, many) + 63) / 64 * 64;
}

template <int M>
void few_columns(const Tiles& w, int tile, int count, const QuantizedRows& x, int64_t row0, float* acc,
                 uint8_t* scratch) {
    if (w.code == Code::i8) return sparse_columns<M>(w, tile, count, x, row0, acc, scratch);
    w.scale_type == ScaleType::fp16
        ? choose_nibbles<M, ScaleType::fp16>(w, tile, count, x, row0, acc, scratch)
        : choose_nibbles<M, ScaleType::fp32>(w, tile, count, x, row0, acc, scratch);
}

// `dense` multiplies tiles; see KernelTable::tile_matmul.
template <typename Dense>
void multiply_columns(const Dense& dense, const Tiles& w, int tile, int count, const QuantizedRows& x,
                      int64_t row0, int num_rows, float* acc, uint8_t* scratch) {
    switch (num_rows) {
        case 1: return few_columns<1>(w, tile, count, x, row0, acc, scratch);
        case 2: return few_columns<2>(w, tile, count, x, row0, acc, scratch);
        case 3: return few_columns<3>(w, tile, count, x, row0, acc, scratch);
        case 4: return few_columns<4>(w, tile, count, x, row0, acc, scratch);
    }
    const Tiles gathered = gather_tiles(w, tile, count, scratch);
    for (int t = 0; t < count; t += 2) {
        const auto sums_at = [&](int at) { return acc + static_cast<int64_t>(at) * num_rows * kTile; };
        const TileRef refs[2] = {{&gathered, t, sums_at(t)}, {&gathered, t + 1, sums_at(t + 1)}};
        dense(refs, std::min(2, count - t), x, row0, num_rows, scratch + column_scratch_bytes(w));
    }
}

}  // namespace
}  // namespace octavo
