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

// Prepares the rows: marks the neurons that each row uses, and converts x for the up projection.
struct NeuronRowsStage : Stage {
    static constexpr int kRowsAPiece = 4;
    NeuronsSpec spec;
    explicit NeuronRowsStage(NeuronsSpec s) : spec(std::move(s)) {}
    std::string name() const override { return "neurons chosen"; }
    bool on_samples() const override { return false; }
    // A single piece asks for the neurons as well, which saves a barrier.
    static bool requests(const View& view) { return view.batch.num_tokens <= kRowsAPiece; }
    int pieces(const View& view) const override {
        return (view.batch.num_tokens + kRowsAPiece - 1) / kRowsAPiece;
    }
    void run(const View& view, int piece, ThreadState&, int) const override {
        const int last = std::min(view.batch.num_tokens, (piece + 1) * kRowsAPiece);
        for (int row = piece * kRowsAPiece; row < last; row++) {
            float* opened = view.at(spec.opened, row);
            if (spec.threshold > 0 && view.sparse_rows(false)[row]) cut(opened);
            for (int n = 0; n < spec.opened.width; n++)
                if (opened[n] != 0) spec.cache->mark(n);
            if (!spec.rows) continue;
            std::fill_n(view.at(spec.out, row), spec.out.width, 0.0f);
            spec.rows->convert(view, row, spec.rows->rows, row);
        }
        if (requests(view)) request(view);
    }
    void request(const View&) const {
        spec.cache->request(spec.layer);
        // No later stage waits where there is no up projection.
        if (!spec.rows) spec.cache->await(spec.layer, (int)spec.cache->requested(spec.layer).size());
    }
    // Compares magnitudes by their bits, as the kernels do.
    void cut(float* opened) const {
        for (int n = 0; n < spec.opened.width; n++)
            if (std::fabs(opened[n]) < spec.threshold) opened[n] = 0;
    }
};

// Asks for the neurons of more rows than one piece has.
struct NeuronRequestStage : Stage {
    const NeuronRowsStage& rows;
    explicit NeuronRequestStage(const NeuronRowsStage& r) : rows(r) {}
    std::string name() const override { return "neurons asked for"; }
    bool on_samples() const override { return false; }
    int pieces(const View& view) const override { return NeuronRowsStage::requests(view) ? 0 : 1; }
    void run(const View& view, int, ThreadState&, int) const override { rows.request(view); }
};

// Multiplies the rows of the up projection as they arrive: tiles are put together from the rows of sixteen
// neurons each, so that sums have the bits of the same weight in tiles.
struct NeuronUpStage : Stage {
    static constexpr int kTilesAPiece = 2;
    NeuronsSpec spec;
    Tiles gathered;  // a weight of kTilesAPiece tiles, without memory
    NeuronUpStage(NeuronsSpec s, const Tiles& g) : spec(std::move(s)), gathered(g) {}
    std::string name() const override { return "neurons up"; }
    const char* code() const override { return kCodeNames[(int)gathered.code]; }
    bool on_samples() const override { return false; }
    bool depends_on_data() const override { return true; }
    int count() const { return (int)spec.cache->requested(spec.layer).size(); }
    Cost cost(const View& view) const override {
        const double numbers = (double)count() * spec.rows->x.width;
        return {numbers, 2.0 * numbers * view.batch.num_tokens};
    }
    int pieces(const View& view) const override {
        constexpr int kNeurons = kTilesAPiece * kTile;
        return view.batch.num_tokens ? (count() + kNeurons - 1) / kNeurons : 0;
    }
    void run(const View& view, int piece, ThreadState& thread, int) const override {
        const int first = piece * kTilesAPiece * kTile,
                  used = std::min(count() - first, kTilesAPiece * kTile);
        if (!spec.cache->await(spec.layer, first + used)) return;
        const int32_t* neurons = spec.cache->requested(spec.layer).data() + first;
        Tiles tiles = gathered;
        tiles.num_rows = used;
        tiles.data = thread.gathered->data();
        for (int t = 0; t < tiles.num_tiles(); t++)
            gather(neurons + t * kTile, std::min(kTile, used - t * kTile),
                   thread.gathered->data() + t * tiles.tile_bytes);
        const int rows = view.batch.num_tokens;
        for (int row0 = 0; row0 < rows; row0 += kRowBlock) {
            const int num_rows = std::min(kRowBlock, rows - row0);
            const TileRef refs[2] = {{&tiles, 0, thread.acc[0].data()}, {&tiles, 1, thread.acc[1].data()}};
            view.executor.kernels().tile_products(refs, tiles.num_tiles(), spec.rows->rows, row0, num_rows,
                                                  thread.product->data());
            for (int i = 0; i < used; i++)
                write(view, neurons[i], row0, num_rows, thread.acc[i / kTile].data() + i % kTile);
        }
    }
    // Writes f(gate) * (up + bias + offset) of a neuron; `sums` lie a tile apart.
    void write(const View& view, int neuron, int row0, int num_rows, const float* sums) const {
        const float bias = spec.up_bias ? spec.up_bias[neuron] : 0;
        for (int i = 0; i < num_rows; i++) {
            const float up = sums[i * kTile] + bias;
            view.at(spec.out, row0 + i)[neuron] =
                view.at(spec.opened, row0 + i)[neuron] * (up + spec.up_offset);
        }
    }
    // Puts up to sixteen neurons' rows together as a tile, their scales behind them.
    void gather(const int32_t* neurons, int used, uint8_t* to) const {
        const uint8_t* rows[kTile];
        float scales[kTile] = {};
        std::fill_n(rows, kTile, spec.cache->zeros());
        for (int i = 0; i < used; i++) {
            rows[i] = spec.cache->row(spec.layer, neurons[i]);
            scales[i] = spec.up_scales[neurons[i]];
        }
        const int inputs = gathered.num_groups * kGroup;
        for (int k = 0; k < inputs; k += 16)
            for (int o = 0; o < kTile; o += 4) put_quads(rows + o, k, to + (size_t)k * kTile + 4 * o);
        std::memcpy(to + (size_t)inputs * kTile, scales, sizeof scales);
    }
    // Writes sixteen inputs of four rows as a tile has them: quads of inputs, those of the rows side by side.
    static void put_quads(const uint8_t* const* rows, int k, uint8_t* to) {
#if defined(__SSE2__)
        __m128i r[4];
        for (int i = 0; i < 4; i++) r[i] = _mm_loadu_si128((const __m128i*)(rows[i] + k));
        const __m128i low01 = _mm_unpacklo_epi32(r[0], r[1]), high01 = _mm_unpackhi_epi32(r[0], r[1]),
                      low23 = _mm_unpacklo_epi32(r[2], r[3]), high23 = _mm_unpackhi_epi32(r[2], r[3]);
        const __m128i quads[4] = {_mm_unpacklo_epi64(low01, low23), _mm_unpackhi_epi64(low01, low23),
                                  _mm_unpacklo_epi64(high01, high23), _mm_unpackhi_epi64(high01, high23)};
        for (int q = 0; q < 4; q++) _mm_storeu_si128((__m128i*)(to + q * 4 * kTile), quads[q]);
#else
        for (int q = 0; q < 4; q++)
            for (int i = 0; i < 4; i++) std::memcpy(to + q * 4 * kTile + 4 * i, rows[i] + k + 4 * q, 4);
#endif
    }
};

}  // namespace
}  // namespace octavo
