// The stages of feed-forward weights that are read neuron by neuron: what each row uses, what of it is missing,
// and the products of the up projection. The last product is a LinearStage over the cache's columns.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "stages.h"

namespace octavo {
namespace {

// Prepares the rows: marks the neurons that each row uses, and converts x for the rows of records.
struct NeuronRowsStage : Stage {
    static constexpr int kRowsAPiece = 4;
    NeuronsSpec spec;
    explicit NeuronRowsStage(NeuronsSpec s) : spec(std::move(s)) {}
    std::string name() const override { return "neurons chosen"; }
    // A single piece asks for the neurons as well, which saves a barrier.
    static bool requests(const View& view) { return view.batch.num_tokens <= kRowsAPiece; }
    int pieces(const View& view) const override {
        return (view.batch.num_tokens + kRowsAPiece - 1) / kRowsAPiece;
    }
    void run(const View& view, int piece, ThreadState&, int) const override {
        const int last = std::min(view.batch.num_tokens, (piece + 1) * kRowsAPiece);
        for (int row = piece * kRowsAPiece; row < last; row++) {
            mark(view.at(spec.opened, row), view.sparse_rows(false)[row]);
            if (!spec.rows) continue;
            std::fill_n(view.at(spec.out, row), spec.out.width, 0.0f);
            spec.rows->convert(view, row, view.runner.rows(*spec.rows), row);
        }
        if (requests(view)) request(view);
    }
    void request(const View&) const {
        spec.cache->request(spec.layer);
        // No later stage waits where there is no up projection.
        if (!spec.rows)
            spec.cache->await(spec.layer, static_cast<int>(spec.cache->requested(spec.layer).size()));
    }
    // `opened` are scores where gates are not computed yet; rows that are not sparse then use all neurons.
    void mark(float* opened, bool is_sparse) const {
        if (is_sparse && spec.threshold > 0) cut(opened);
        for (int n = 0; n < spec.opened.width; n++)
            if (spec.computes_gate() ? !is_sparse || opened[n] >= 0 : opened[n] != 0) spec.cache->mark(n);
    }
    // Compares magnitudes by their bits, as the kernels do.
    void cut(float* opened) const {
        for (int n = 0; n < spec.opened.width; n++)
            if (std::fabs(opened[n]) < spec.threshold) opened[n] = 0;
    }
};

// Has the neurons of a later layer read that guessed scores say rows may use; rows that are not sparse use all,
// and nothing is guessed of their steps.
struct ForeseeStage : Stage {
    ForeseeSpec spec;
    explicit ForeseeStage(ForeseeSpec s) : spec(std::move(s)) {}
    std::string name() const override { return "neurons foreseen"; }
    int pieces(const View& view) const override {
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
        spec.cache->foresee(spec.layer, neurons);
    }
};

// Asks for the neurons of more rows than one piece has.
struct NeuronRequestStage : Stage {
    const NeuronRowsStage& rows;
    explicit NeuronRequestStage(const NeuronRowsStage& r) : rows(r) {}
    std::string name() const override { return "neurons asked for"; }
    int pieces(const View& view) const override { return NeuronRowsStage::requests(view) ? 0 : 1; }
    void run(const View& view, int, ThreadState&, int) const override { rows.request(view); }
};

// Multiplies the rows of records as they arrive: tiles are put together from the rows of sixteen neurons each,
// so that sums have the bits of the same weight in tiles. Two tiles are taken at a time: of the up projection,
// or of the gates and the up projection of the same neurons.
struct NeuronUpStage : Stage {
    static constexpr int kTilesAPiece = 2;
    NeuronsSpec spec;
    Tiles gathered;  // a weight of kTilesAPiece tiles, without memory
    NeuronUpStage(NeuronsSpec s, const Tiles& g) : spec(std::move(s)), gathered(g) {}
    std::string name() const override { return spec.computes_gate() ? "neurons gate and up" : "neurons up"; }
    const char* code() const override { return kCodeNames[static_cast<int>(gathered.code)]; }
    bool depends_on_data(const View&) const override { return true; }
    int count() const { return static_cast<int>(spec.cache->requested(spec.layer).size()); }
    int neurons_a_piece() const { return spec.computes_gate() ? kTile : kTilesAPiece * kTile; }
    Cost cost(const View& view) const override {
        const double numbers = static_cast<double>(count()) * spec.rows->x.width * spec.num_rows();
        return {numbers, 2.0 * numbers * view.batch.num_tokens};
    }
    int pieces(const View& view) const override {
        return view.batch.num_tokens ? (count() + neurons_a_piece() - 1) / neurons_a_piece() : 0;
    }
    void run(const View& view, int piece, ThreadState& thread, int) const override {
        const int first = piece * neurons_a_piece(), used = std::min(count() - first, neurons_a_piece());
        if (!spec.cache->await(spec.layer, first + used)) return;
        const int32_t* neurons = spec.cache->requested(spec.layer).data() + first;
        const Tiles tiles = gather_all(neurons, used, thread.gathered->data());
        const int rows = view.batch.num_tokens;
        for (int row0 = 0; row0 < rows; row0 += kRowBlock) {
            const int num_rows = std::min(kRowBlock, rows - row0);
            const TileRef refs[2] = {{&tiles, 0, thread.acc[0].data()}, {&tiles, 1, thread.acc[1].data()}};
            view.runner.kernels().tile_products(refs, tiles.num_tiles(), view.runner.rows(*spec.rows), row0,
                                                num_rows, thread.product->data());
            if (spec.computes_gate())
                open_gates(view, thread, neurons, used, row0, num_rows);
            else
                for (int i = 0; i < used; i++)
                    write(view, neurons[i], row0, num_rows, thread.acc[i / kTile].data() + i % kTile);
        }
    }
    // Returns tiles of the neurons' rows, which lie at `to`.
    Tiles gather_all(const int32_t* neurons, int used, uint8_t* to) const {
        Tiles tiles = gathered;
        tiles.num_rows = spec.computes_gate() ? kTilesAPiece * kTile : used;
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
    // Writes f(gate) * (up + bias + offset) of a neuron; `sums` lie a tile apart.
    void write(const View& view, int neuron, int row0, int num_rows, const float* sums) const {
        const float bias = spec.up_bias ? spec.up_bias[neuron] : 0;
        for (int i = 0; i < num_rows; i++) {
            const float up = sums[i * kTile] + bias;
            view.at(spec.out, row0 + i)[neuron] =
                view.at(spec.opened, row0 + i)[neuron] * (up + spec.gate.up_offset);
        }
    }
    // Writes the same from the sums of both, by the products' epilogue, where a row's scores say so.
    void open_gates(const View& view, ThreadState& thread, const int32_t* neurons, int used, int row0,
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
        float* made = thread.group.data();
        view.runner.kernels().write_tile(gate, thread.acc[0].data(), thread.acc[1].data(), row0, num_rows, 0,
                                         kTile, made, kTile);
        for (int row = row0; row < row0 + num_rows; row++, made += kTile) {
            const float* scores = view.at(spec.opened, row);
            float* out = view.at(spec.out, row);
            for (int i = 0; i < used; i++)
                if (!is_sparse[row] || scores[neurons[i]] >= 0) out[neurons[i]] = made[i];
        }
    }
    // Puts up to sixteen neurons' rows of one matrix together as a tile, their scales behind them.
    void gather(const int32_t* neurons, int used, int matrix, const float* of_neurons, uint8_t* to) const {
        const int inputs = gathered.num_groups * kGroup;
        const uint8_t* rows[kTile];
        float scales[kTile] = {};
        std::fill_n(rows, kTile, spec.cache->zeros());
        for (int i = 0; i < used; i++) {
            rows[i] = spec.cache->row(spec.layer, neurons[i]) + static_cast<size_t>(matrix) * inputs;
            scales[i] = of_neurons[neurons[i]];
        }
        for (int k = 0; k < inputs; k += 16)
            for (int o = 0; o < kTile; o += 4)
                put_quads(rows + o, k, to + static_cast<size_t>(k) * kTile + 4 * o);
        std::memcpy(to + static_cast<size_t>(inputs) * kTile, scales, sizeof scales);
    }
    // Writes sixteen inputs of four rows as a tile has them: quads of inputs, those of the rows side by side.
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
