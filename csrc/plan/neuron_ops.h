// Ops of feed-forward layers whose weights are read neuron by neuron: selection, request of missing
// neurons, and the up projection. The down projection is a LinearOp over the cache's columns.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "../runtime/step_runner.h"
#include "op.h"

namespace octavo {
namespace {

// Marks the neurons that each row uses, and quantizes x for the up projection.
struct SelectNeuronsOp : Op {
    static constexpr int kRowsPerItem = 4;
    NeuronsSpec spec;
    explicit SelectNeuronsOp(NeuronsSpec s) : spec(std::move(s)) {}
    std::string name() const override { return "neurons chosen"; }
    // A single item also requests the neurons, which saves a barrier.
    static bool requests_at_once(const View& view) { return view.batch.num_tokens <= kRowsPerItem; }
    int num_items(const View& view) const override {
        return (view.batch.num_tokens + kRowsPerItem - 1) / kRowsPerItem;
    }
    void run(const View& view, int item, ThreadState&, int) const override {
        const int last = std::min(view.batch.num_tokens, (item + 1) * kRowsPerItem);
        for (int row = item * kRowsPerItem; row < last; row++) {
            mark(view.at(spec.opened, row), view.sparse_rows(false)[row]);
            if (!spec.input) continue;
            std::fill_n(view.at(spec.out, row), spec.out.width, 0.0f);
            spec.input->convert(view, row, view.runner.quantized_rows(*spec.input), row);
        }
        if (requests_at_once(view)) request(view);
    }
    void request(const View&) const {
        spec.cache->request(spec.layer);
        // Without an up projection no later op waits for the reads.
        if (!spec.input)
            spec.cache->await(spec.layer, static_cast<int>(spec.cache->requested(spec.layer).size()));
    }
    // `opened` holds scores if gates are not computed yet; rows that are not sparse then use all neurons.
    void mark(float* opened, bool is_sparse) const {
        if (is_sparse && spec.threshold > 0) cut(opened);
        for (int n = 0; n < spec.opened.width; n++)
            if (spec.computes_gate() ? !is_sparse || opened[n] >= 0 : opened[n] != 0) spec.cache->mark(n);
    }
    // Sets values below the threshold to 0.
    void cut(float* opened) const {
        for (int n = 0; n < spec.opened.width; n++)
            if (std::fabs(opened[n]) < spec.threshold) opened[n] = 0;
    }
};

// Prefetches neurons of a later layer by predicted scores. Rows that are not sparse use all neurons, so
// nothing is prefetched in steps with such rows.
struct PrefetchNeuronsOp : Op {
    PrefetchNeuronsSpec spec;
    explicit PrefetchNeuronsOp(PrefetchNeuronsSpec s) : spec(std::move(s)) {}
    std::string name() const override { return "prefetch neurons"; }
    int num_items(const View& view) const override {
        const uint8_t* rows = view.sparse_rows(false);
        const int count = view.batch.num_tokens;
        return count && std::all_of(rows, rows + count, [](uint8_t is_sparse) { return is_sparse; }) ? 1 : 0;
    }
    void run(const View& view, int, ThreadState&, int) const override {
        std::vector<int32_t> neurons;
        for (int n = 0; n < spec.scores.width; n++)
            for (int row = 0; row < view.batch.num_tokens; row++)
                if (view.at(spec.scores, row)[n] >= 0) {
                    neurons.push_back(n);
                    break;
                }
        spec.cache->prefetch(spec.layer, neurons);
    }
};

// Requests the neurons if there are several selection items.
struct RequestNeuronsOp : Op {
    const SelectNeuronsOp& rows;
    explicit RequestNeuronsOp(const SelectNeuronsOp& r) : rows(r) {}
    std::string name() const override { return "neurons asked for"; }
    int num_items(const View& view) const override { return SelectNeuronsOp::requests_at_once(view) ? 0 : 1; }
    void run(const View& view, int, ThreadState&, int) const override { rows.request(view); }
};

// Multiplies neuron rows as they arrive. Tiles are gathered from the rows of sixteen neurons each, so the
// sums are bitwise those of the same weight in tiles. Two tiles are multiplied at a time: of the up
// projection, or of gate and up projection of the same neurons.
struct NeuronUpOp : Op {
    static constexpr int kTilesPerItem = 2;
    NeuronsSpec spec;
    Tiles gathered;  // layout of kTilesPerItem tiles
    NeuronUpOp(NeuronsSpec s, const Tiles& g) : spec(std::move(s)), gathered(g) {}
    std::string name() const override { return spec.computes_gate() ? "neurons gate and up" : "neurons up"; }
    const char* code() const override { return kCodeNames[static_cast<int>(gathered.code)]; }
    bool depends_on_data(const View&) const override { return true; }
    int count() const { return static_cast<int>(spec.cache->requested(spec.layer).size()); }
    int neurons_per_item() const { return spec.computes_gate() ? kTile : kTilesPerItem * kTile; }
    Cost cost(const View& view) const override {
        const double numbers = static_cast<double>(count()) * spec.input->x.width * spec.num_rows();
        return {numbers, 2.0 * numbers * view.batch.num_tokens};
    }
    int num_items(const View& view) const override {
        return view.batch.num_tokens ? (count() + neurons_per_item() - 1) / neurons_per_item() : 0;
    }
    void run(const View& view, int item, ThreadState& thread, int) const override {
        const int first = item * neurons_per_item(), used = std::min(count() - first, neurons_per_item());
        if (!spec.cache->await(spec.layer, first + used)) return;
        const int32_t* neurons = spec.cache->requested(spec.layer).data() + first;
        const Tiles tiles = gather_all(neurons, used, thread.gathered->data());
        const int rows = view.batch.num_tokens;
        for (int row0 = 0; row0 < rows; row0 += kRowBlock) {
            const int num_rows = std::min(kRowBlock, rows - row0);
            const TileRef refs[2] = {{&tiles, 0, thread.acc[0].data()}, {&tiles, 1, thread.acc[1].data()}};
            view.runner.kernels().tile_matmul(refs, tiles.num_tiles(),
                                              view.runner.quantized_rows(*spec.input), row0, num_rows,
                                              thread.matmul_scratch->data());
            if (spec.computes_gate())
                write_gated(view, thread, neurons, used, row0, num_rows);
            else
                for (int i = 0; i < used; i++)
                    write(view, neurons[i], row0, num_rows, thread.acc[i / kTile].data() + i % kTile);
        }
    }
    // Gathers the neurons' rows into tiles at `to`.
    Tiles gather_all(const int32_t* neurons, int used, uint8_t* to) const {
        Tiles tiles = gathered;
        tiles.num_rows = spec.computes_gate() ? kTilesPerItem * kTile : used;
        tiles.data = to;
        if (spec.computes_gate()) {
            gather(neurons, used, 0, spec.gate_scales, to);
            gather(neurons, used, 1, spec.up_scales, to + tiles.tile_bytes);
        } else {
            for (int t = 0; t < tiles.num_tiles(); t++)
                gather(neurons + t * kTile, std::min(kTile, used - t * kTile), 0, spec.up_scales,
                       to + t * tiles.tile_bytes);
        }
        return tiles;
    }
    // Writes f(gate) * (up + bias + offset) of a neuron; the `sums` of consecutive rows are a tile apart.
    void write(const View& view, int neuron, int row0, int num_rows, const float* sums) const {
        const float bias = spec.up_bias ? spec.up_bias[neuron] : 0;
        for (int i = 0; i < num_rows; i++) {
            const float up = sums[i * kTile] + bias;
            view.at(spec.out, row0 + i)[neuron] =
                view.at(spec.opened, row0 + i)[neuron] * (up + spec.gate.up_offset);
        }
    }
    // Writes the same from the sums of gate and up projection through the epilogue, for rows whose scores
    // select the neuron.
    void write_gated(const View& view, ThreadState& thread, const int32_t* neurons, int used, int row0,
                     int num_rows) const {
        const uint8_t* is_sparse = view.sparse_rows(false);
        float gate_bias[kTile] = {}, up_bias[kTile] = {};
        for (int i = 0; i < used; i++) {
            if (spec.gate_bias) gate_bias[i] = spec.gate_bias[neurons[i]];
            if (spec.up_bias) up_bias[i] = spec.up_bias[neurons[i]];
        }
        Epilogue gate = spec.gate.epilogue(true);
        gate.bias = gate_bias, gate.up_bias = up_bias;
        if (gate.threshold > 0) gate.is_sparse = is_sparse;
        float* gated = thread.group.data();
        view.runner.kernels().write_tile(gate, thread.acc[0].data(), thread.acc[1].data(), row0, num_rows, 0,
                                         kTile, gated, kTile);
        for (int row = row0; row < row0 + num_rows; row++, gated += kTile) {
            const float* scores = view.at(spec.opened, row);
            float* out = view.at(spec.out, row);
            for (int i = 0; i < used; i++)
                if (!is_sparse[row] || scores[neurons[i]] >= 0) out[neurons[i]] = gated[i];
        }
    }
    // Gathers up to sixteen neurons' rows of one matrix into a tile, followed by their scales.
    void gather(const int32_t* neurons, int used, int matrix, const float* scales_by_neuron,
                uint8_t* to) const {
        const int inputs = gathered.num_groups * kGroup;
        const uint8_t* rows[kTile];
        float scales[kTile] = {};
        std::fill_n(rows, kTile, spec.cache->zeros());
        for (int i = 0; i < used; i++) {
            rows[i] = spec.cache->row(spec.layer, neurons[i]) + static_cast<size_t>(matrix) * inputs;
            scales[i] = scales_by_neuron[neurons[i]];
        }
        for (int k = 0; k < inputs; k += 16)
            for (int o = 0; o < kTile; o += 4)
                put_quads(rows + o, k, to + static_cast<size_t>(k) * kTile + 4 * o);
        std::memcpy(to + static_cast<size_t>(inputs) * kTile, scales, sizeof scales);
    }
    // Writes sixteen inputs of four rows in tile order: quads of inputs, with the rows adjacent.
    static void put_quads(const uint8_t* const* rows, int k, uint8_t* to) {
#if defined(__SSE2__)
        __m128i r[4];
        for (int i = 0; i < 4; i++) r[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + k));
        const __m128i low01 = _mm_unpacklo_epi32(r[0], r[1]), high01 = _mm_unpackhi_epi32(r[0], r[1]),
                      low23 = _mm_unpacklo_epi32(r[2], r[3]), high23 = _mm_unpackhi_epi32(r[2], r[3]);
        const __m128i quads[4] = {_mm_unpacklo_epi64(low01, low23), _mm_unpackhi_epi64(low01, low23),
                                  _mm_unpacklo_epi64(high01, high23), _mm_unpackhi_epi64(high01, high23)};
        for (int q = 0; q < 4; q++)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + q * 4 * kTile), quads[q]);
#else
        for (int q = 0; q < 4; q++)
            for (int i = 0; i < 4; i++) std::memcpy(to + q * 4 * kTile + 4 * i, rows[i] + k + 4 * q, 4);
#endif
    }
};

}  // namespace
}  // namespace octavo
