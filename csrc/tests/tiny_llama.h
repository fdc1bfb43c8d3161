// A two-layer llama with random weights: in plain loops over doubles, and as a plan on a StepRunner.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "../plan/builder.h"
#include "../runtime/step_runner.h"
#include "matrices.h"

namespace octavo::test {

constexpr int kVocab = 50, kHidden = 48, kHeads = 4, kKvHeads = 2, kWidth = 32, kInner = 70, kLayers = 2,
              kBlocks = 64;
constexpr int kQ = kHeads * kWidth, kKv = kKvHeads * kWidth;

struct Layer {
    TestMatrix q, k, v, o, gate, up, down;
    Floats norm, inner_norm;
};

struct Model {
    TestMatrix table, head;
    Floats final_norm;
    std::vector<double> inv_freq;
    std::vector<Layer> layers;

    Model(Format f, ThreadPool& pool)
        : table(kVocab, kHidden, 1, Format::fp32, pool),
          head(kVocab, kHidden, 2, f, pool),
          final_norm(gains(3)) {
        for (int i = 0; i < kWidth / 2; i++) inv_freq.push_back(std::pow(100.0, -2.0 * i / kWidth));
        for (uint32_t l = 0; l < kLayers; l++) {
            const uint32_t s = 100 * (l + 1);
            layers.push_back(Layer{{kQ, kHidden, s, f, pool},
                                   {kKv, kHidden, s + 1, f, pool},
                                   {kKv, kHidden, s + 2, f, pool},
                                   {kHidden, kQ, s + 3, f, pool},
                                   {kInner, kHidden, s + 4, f, pool},
                                   {kInner, kHidden, s + 5, f, pool},
                                   {kHidden, kInner, s + 6, f, pool},
                                   gains(s + 7),
                                   gains(s + 8)});
        }
    }
    static Floats gains(uint32_t seed) {
        Floats values = normal(kHidden, seed, 0.2f);
        for (float& value : values) value += 1;
        return values;
    }
};

// -- plain loops --

inline Row normed(const Row& x, const Floats& weight) {
    double squares = 0;
    for (const double value : x) squares += value * value;
    Row y(x.size());
    for (size_t i = 0; i < x.size(); i++)
        y[i] = x[i] / std::sqrt(squares / static_cast<double>(x.size()) + 1e-5) * weight[i];
    return y;
}

inline void rotate(Row& x, int heads, int position, const std::vector<double>& inv_freq) {
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < kWidth / 2; i++) {
            double &a = x[h * kWidth + i], &b = x[h * kWidth + kWidth / 2 + i];
            const double c = std::cos(position * inv_freq[i]), s = std::sin(position * inv_freq[i]),
                         first = a;
            a = a * c - b * s;
            b = b * c + first * s;
        }
}

inline Row attended(const Row& q, const std::vector<Row>& keys, const std::vector<Row>& values) {
    Row out(kQ, 0);
    for (int h = 0; h < kHeads; h++) {
        const int kv = h / (kHeads / kKvHeads) * kWidth;
        Row scores;
        for (const Row& key : keys) {
            double score = 0;
            for (int d = 0; d < kWidth; d++) score += q[h * kWidth + d] * key[kv + d];
            scores.push_back(std::exp(score * 0.3));
        }
        double total = 0;
        for (const double score : scores) total += score;
        for (size_t j = 0; j < keys.size(); j++)
            for (int d = 0; d < kWidth; d++) out[h * kWidth + d] += scores[j] / total * values[j][kv + d];
    }
    return out;
}

inline void add(Row& x, const Row& y) {
    for (size_t i = 0; i < x.size(); i++) x[i] += y[i];
}

inline std::vector<Row> plain_logits(const Model& model, const std::vector<int>& tokens) {
    std::vector<std::vector<Row>> keys(kLayers), values(kLayers);
    std::vector<Row> logits;
    for (size_t t = 0; t < tokens.size(); t++) {
        const float* first = model.table.values.data() + static_cast<size_t>(tokens[t]) * kHidden;
        Row x(first, first + kHidden);
        for (int l = 0; l < kLayers; l++) {
            const Layer& layer = model.layers[l];
            const Row h = normed(x, layer.norm);
            Row q = layer.q.times(h), k = layer.k.times(h);
            rotate(q, kHeads, static_cast<int>(t), model.inv_freq);
            rotate(k, kKvHeads, static_cast<int>(t), model.inv_freq);
            keys[l].push_back(k);
            values[l].push_back(layer.v.times(h));
            add(x, layer.o.times(attended(q, keys[l], values[l])));
            const Row m = normed(x, layer.inner_norm), up = layer.up.times(m);
            Row inner = layer.gate.times(m);
            for (int i = 0; i < kInner; i++) inner[i] = inner[i] / (1 + std::exp(-inner[i])) * up[i];
            add(x, layer.down.times(inner));
        }
        logits.push_back(model.head.times(normed(x, model.final_norm)));
    }
    return logits;
}

// -- the plan --

inline ValueSlice columns(const ValueSlice& whole, int first, int width) {
    return ValueSlice{whole.axis, whole.offset + first, width};
}

inline NormSpec make_norm(const Floats& weight) { return {.weight = FloatArray(weight), .eps = 1e-5f}; }

// The Values of a layer in the arenas.
struct LayerValues {
    ValueSlice x, q, k, v, attended, inner;

    LayerValues(Arena& tokens, Arena& block) : x(tokens.add(kHidden)) {
        const ValueSlice qkv = tokens.add(kQ + 2 * kKv);
        q = columns(qkv, 0, kQ);
        k = columns(qkv, kQ, kKv);
        v = columns(qkv, kQ + kKv, kKv);
        attended = tokens.add(kQ);
        inner = block.add(kInner);
    }
};

inline void add_layer(PlanBuilder& builder, const Layer& layer, int index, int angles,
                      const LayerValues& key_indices) {
    const auto& [x, q, k, v, attended, inner] = key_indices;
    const auto rope = [&](const ValueSlice& heads, int num_heads) {
        builder.add(RopeSpec{.x = heads,
                             .out = heads,
                             .num_heads = num_heads,
                             .head_width = kWidth,
                             .rotary_dim = kWidth,
                             .angles = angles});
    };
    builder.add(LinearSpec{.x = x,
                           .parts = {part(layer.q, q), part(layer.k, k), part(layer.v, v)},
                           .norm = make_norm(layer.norm)});
    rope(q, kHeads);
    rope(k, kKvHeads);
    builder.add(KvWriteSpec{.k_parts = {k}, .v = v, .layer = index});
    builder.add(AttentionSpec{.q = q, .out = attended, .layer = index, .num_heads = kHeads, .scale = 0.3f});
    builder.add(LinearSpec{.x = attended, .parts = {part(layer.o, x, &x)}, .fuses_input = true});
    builder.add(LinearSpec{.x = x,
                           .parts = {part(layer.gate, inner), part(layer.up, inner)},
                           .norm = make_norm(layer.inner_norm),
                           .gated = true,
                           .gate = {.activation = 0}});
    builder.add(LinearSpec{.x = inner, .parts = {part(layer.down, x, &x)}, .fuses_input = true});
}

inline std::shared_ptr<const Plan> build_plan(const KernelTable& kernels, const Model& model) {
    Arena tokens{Axis::tokens}, block{Axis::block}, samples{Axis::samples};
    const LayerValues key_indices(tokens, block);
    const ValueSlice sampled = samples.add(kHidden), logits = samples.add(kVocab);
    PlanBuilder builder(kernels, {.max_tokens = 600, .vocab = kVocab});
    const int angles = builder.add(AnglesSpec{.inv_freq = model.inv_freq});
    builder.add(EmbeddingSpec{.table = model.table.packed, .out = key_indices.x});
    for (int l = 0; l < kLayers; l++) add_layer(builder, model.layers[l], l, angles, key_indices);
    builder.add(GatherSpec{key_indices.x, sampled});
    builder.add(
        LinearSpec{.x = sampled, .parts = {part(model.head, logits)}, .norm = make_norm(model.final_norm)});
    builder.add(SampleSpec{logits});
    return builder.build();
}

struct Request {
    std::vector<int> tokens;
    std::vector<int> blocks;
};

struct Span {
    const Request* request;
    int start, stop;
};

// Difference of a token's position and its key index: code that confuses them computes other numbers.
constexpr int kPositionOffset = 3;

// A model on its own pool, with KV memory; `run` computes spans of requests and returns all their logits.
struct Engine {
    ThreadPool pool;
    StepRunner runner;
    KvMemory kv;

    Engine(const KernelTable& kernels, const Model& model, int threads, KvType cache)
        : pool(threads),
          runner(pool, build_plan(kernels, model)),
          kv({KvGroup{kLayers, kKvHeads, kWidth, kWidth, cache, kBlocks}}) {}

    Floats run(const std::vector<Span>& spans, int padding = 0) {
        std::vector<int32_t> ids, key_indices, positions, slots, starts = {0}, contexts, rows;
        size_t width = 0;
        for (const Span& s : spans) width = std::max(width, s.request->blocks.size());
        std::vector<int32_t> tables(spans.size() * width, -1);
        for (size_t r = 0; r < spans.size(); r++) {
            const Span& s = spans[r];
            for (int t = s.start; t < s.stop; t++) {
                rows.push_back(static_cast<int>(ids.size()));
                ids.push_back(s.request->tokens[t]);
                key_indices.push_back(t);
                positions.push_back(t + kPositionOffset);
                slots.push_back(s.request->blocks[t / 16] * 16 + t % 16);
            }
            starts.push_back(static_cast<int>(ids.size()));
            contexts.push_back(s.stop);
            std::copy(s.request->blocks.begin(), s.request->blocks.end(),
                      tables.begin() + static_cast<int64_t>(r * width));
        }
        for (int i = 0; i < padding; i++) {
            ids.push_back(1 << 30);
            key_indices.push_back(-7);
            positions.push_back(-7);
            slots.push_back(-1);
        }
        Floats logits(rows.size() * kVocab);
        Batch b{};
        b.num_tokens = static_cast<int>(ids.size());
        b.num_requests = static_cast<int>(spans.size());
        b.num_samples = static_cast<int>(rows.size());
        b.table_width = static_cast<int>(width);
        b.num_axes = 1;
        b.token_ids = ids.data();
        b.key_indices = key_indices.data();
        b.positions = positions.data();
        b.query_starts = starts.data();
        b.context_lens = contexts.data();
        b.slots = slots.data();
        b.block_tables = tables.data();
        b.sample_rows = rows.data();
        b.out_rows = logits.data();
        runner.run(b, kv);
        return logits;
    }
};

}  // namespace octavo::test
