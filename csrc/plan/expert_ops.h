// Ops of a mixture of experts: routing, sorting of rows by expert, quantization of expert rows, and
// matmuls.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "linear_op.h"

namespace octavo {
namespace {

// -- routing --

// Requests the experts that have rows, if they are not all in memory.
void request_experts(const View& view, const ExpertPlan& plan) {
    if (plan.cache_layer < 0) return;
    NeuronCache& cache = *view.runner.plan().neurons;
    for (const ExpertPlan::Block& block : plan.blocks) cache.mark(block.expert);
    cache.request(plan.cache_layer);
}

struct RouteOp : Op {
    static constexpr int kRowsPerItem = 4;
    RouteSpec spec;
    explicit RouteOp(const RouteSpec& s) : spec(s) {}
    std::string name() const override { return "experts chosen"; }
    // A single item also assigns the expert rows, which saves a barrier.
    static bool assigns_rows(const View& view, const ExpertPlan& plan) {
        return !plan.gathers && view.batch.num_tokens <= kRowsPerItem;
    }
    int num_items(const View& view) const override {
        return (view.batch.num_tokens + kRowsPerItem - 1) / kRowsPerItem;
    }
    void run(const View& view, int item, ThreadState& thread, int) const override {
        ExpertPlan& plan = view.runner.expert_plan(spec.route);
        const QuantizedInput* next_input = spec.next_input;
        const int last = std::min(view.batch.num_tokens, (item + 1) * kRowsPerItem);
        for (int row = item * kRowsPerItem; row < last; row++) {
            choose(view.at(spec.logits, row), thread.scores.data(),
                   plan.ids.data() + static_cast<size_t>(row) * spec.top_k, view.at(spec.weights, row));
            if (next_input)
                view.runner.kernels().quantize_row(view.at(next_input->x, row), next_input->x.width,
                                                   next_input->norm.args(),
                                                   view.runner.quantized_rows(*next_input), row);
        }
        if (!assigns_rows(view, plan)) return;
        plan.assign_rows(view.batch.num_tokens);
        request_experts(view, plan);
    }

    // Writes a row's experts and their weights, best first. NaN logits choose some expert too, so that such
    // a row affects no other.
    void choose(const float* logits, float* scores, int32_t* ids, float* weights) const {
        const int experts = spec.num_experts();
        float *choice = scores + experts, *is_taken = choice + experts;
        score(logits, scores);
        for (int e = 0; e < experts; e++) choice[e] = spec.bias ? scores[e] + spec.bias[e] : scores[e];
        if (spec.num_groups > 1) keep_best_groups(choice, is_taken);
        std::fill_n(is_taken, experts, 0.0f);
        for (int j = 0; j < spec.top_k; j++) {
            ids[j] = take_largest(choice, is_taken, experts);
            weights[j] = scores[ids[j]];
            if (spec.score == RouteSpec::Score::sigmoid_top_k) weights[j] = sigmoid(weights[j]);
            if (spec.score == RouteSpec::Score::sparsemixer)
                weights[j] = sparsemixer_weight(logits, is_taken, ids[j]);
        }
        if (spec.score == RouteSpec::Score::softmax_top_k) softmax(weights, spec.top_k, weights);
        float sum = 0;
        for (int j = 0; j < spec.top_k; j++) sum += weights[j];
        for (int j = 0; j < spec.top_k; j++)
            weights[j] = (spec.normalize ? weights[j] / sum : weights[j]) * spec.scale;
        if (spec.factors)
            for (int j = 0; j < spec.top_k; j++) weights[j] *= spec.factors[ids[j]];
    }

  private:
    void score(const float* logits, float* scores) const {
        const int experts = spec.num_experts();
        switch (spec.score) {
            case RouteSpec::Score::softmax: return softmax(logits, experts, scores);
            case RouteSpec::Score::sigmoid:
                for (int e = 0; e < experts; e++) scores[e] = sigmoid(logits[e]);
                return;
            default: std::copy_n(logits, experts, scores);
        }
    }
    static float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
    static void softmax(const float* x, int count, float* out) {
        float largest = x[0], sum = 0;
        for (int i = 1; i < count; i++) largest = std::max(largest, x[i]);
        for (int i = 0; i < count; i++) sum += out[i] = std::exp(x[i] - largest);
        for (int i = 0; i < count; i++) out[i] /= sum;
    }
    // Returns an expert's softmax weight over itself and the remaining experts within the jitter margin
    // (SparseMixer).
    float sparsemixer_weight(const float* logits, const float* is_taken, int chosen) const {
        const float best = logits[chosen];
        float sum = 0;
        for (int e = 0; e < spec.num_experts(); e++) {
            const bool far = best - logits[e] > 2 * spec.jitter * std::max(std::fabs(logits[e]), best);
            if (e == chosen || (!is_taken[e] && !far)) sum += std::exp(logits[e] - best);
        }
        return 1 / sum;
    }
    // Returns the index of the largest number that is not taken, the first among equals, and marks it as
    // taken.
    static int take_largest(const float* x, float* is_taken, int count) {
        int best = -1;
        for (int i = 0; i < count; i++)
            if (!is_taken[i] && (best < 0 || x[i] > x[best])) best = i;
        is_taken[best] = 1;
        return best;
    }
    // Sets the experts outside the best groups to -inf. `memory` has the length of `choice`.
    void keep_best_groups(float* choice, float* memory) const {
        const int size = spec.num_experts() / spec.num_groups;
        float* is_taken = memory + spec.num_groups;
        for (int g = 0; g < spec.num_groups; g++) memory[g] = score_group(choice + g * size, size);
        std::fill_n(is_taken, spec.num_groups, 0.0f);
        for (int i = 0; i < spec.top_groups; i++) take_largest(memory, is_taken, spec.num_groups);
        for (int g = 0; g < spec.num_groups; g++)
            if (!is_taken[g]) std::fill_n(choice + g * size, size, -INFINITY);
    }
    float score_group(const float* x, int count) const {
        if (spec.group_rank == RouteSpec::GroupRank::best) return *std::max_element(x, x + count);
        return two_best(x, count);
    }
    static float two_best(const float* x, int count) {
        float first = -INFINITY, second = -INFINITY;
        for (int i = 0; i < count; i++) {
            if (x[i] > first)
                second = std::exchange(first, x[i]);
            else if (x[i] > second)
                second = x[i];
        }
        return count > 1 ? first + second : first;
    }
};

// Assigns rows to the choices of all tokens.
struct SortRowsByExpertOp : Op {
    int route;
    explicit SortRowsByExpertOp(int r) : route(r) {}
    std::string name() const override { return "experts ordered"; }
    int num_items(const View& view) const override {
        const ExpertPlan& plan = view.runner.expert_plan(route);
        return plan.gathers || RouteOp::assigns_rows(view, plan) ? 0 : 1;
    }
    void run(const View& view, int, ThreadState&, int) const override {
        ExpertPlan& plan = view.runner.expert_plan(route);
        plan.assign_rows(view.batch.num_tokens);
        request_experts(view, plan);
    }
};

// -- matmuls --

// Quantizes the expert rows for the next matmul, one block per item.
struct QuantizeExpertRowsOp : Op {
    const QuantizedInput& rows;
    int route;
    ValueSlice by;  // weights of the choices that rows are multiplied by; none: rows are used unchanged
    QuantizeExpertRowsOp(const QuantizedInput& r, int choice, const ValueSlice& b)
        : rows(r), route(choice), by(b) {}
    std::string name() const override { return "rows of experts"; }
    bool depends_on_data(const View&) const override { return true; }
    int num_items(const View& view) const override {
        return view.runner.expert_plan(route).num_blocks(view.batch.num_tokens);
    }
    void run(const View& view, int item, ThreadState& thread, int) const override {
        const ExpertPlan::Block& block = view.runner.expert_plan(route).blocks[item];
        for (int row = block.row0; row < block.row0 + block.num_rows; row++) {
            const float* x = by.width ? scaled(view, row, thread.scores.data()) : view.at(rows.x, row);
            view.runner.kernels().quantize_row(x, rows.x.width, rows.norm.args(),
                                               view.runner.quantized_rows(rows), row);
        }
    }
    // Writes the row's token times the weight of its choice to `out`.
    const float* scaled(const View& view, int row, float* out) const {
        const ExpertPlan& plan = view.runner.expert_plan(route);
        const int token = plan.tokens[row];
        const int32_t* choices = plan.rows.data() + static_cast<size_t>(token) * plan.top_k;
        const auto choice = std::find(choices, choices + plan.top_k, row) - choices;
        const float weight =
            plan.gathers ? plan.weights[static_cast<size_t>(token) * plan.top_k + static_cast<size_t>(choice)]
                         : view.at(by, token)[choice];
        const float* x = plan.gathers ? plan.token_rows[token] : view.at(rows.x, token);
        for (int i = 0; i < rows.x.width; i++) out[i] = x[i] * weight;
        return out;
    }
};

// Copies a quantized row.
void copy_row(const QuantizedRows& from, int64_t row, const QuantizedRows& to, int64_t index) {
    const size_t element = element_bytes(from.type);
    std::memcpy(static_cast<uint8_t*>(to.values) + index * to.stride * element,
                static_cast<const uint8_t*>(from.values) + row * from.stride * element,
                row_elements(from.type, from.num_groups) * element);
    if (from.type == RowType::bf16 || from.type == RowType::fp32) return;
    const bool one_scale = from.type == RowType::whole || from.type == RowType::outliers;
    for (int g = 0; g < (one_scale ? 1 : from.num_groups); g++) {
        to.scales[to.at(index, g)] = from.scales[from.at(row, g)];
        to.scaled_sums[to.at(index, g)] = from.scaled_sums[from.at(row, g)];
        for (int half = 0; half < 2; half++)
            to.sums[to.half_at(index, g, half)] = from.sums[from.half_at(row, g, half)];
    }
}

// Multiplies the rows of each expert by its weight. An item is some tiles of an expert by a block of its
// rows.
struct ExpertsOp : Op {
    ExpertsSpec spec;
    explicit ExpertsOp(ExpertsSpec s) : spec(std::move(s)) {}

    const Tiles& first() const { return spec.weights.front().tiles; }
    const ExpertPlan& plan(const View& view) const { return view.runner.expert_plan(spec.route); }
    int num_tiles() const { return first().num_tiles(); }
    bool depends_on_data(const View&) const override { return true; }
    std::string name() const override {
        return "experts " + std::to_string(first().num_inputs) + " to " +
               std::to_string(first().num_rows * (spec.ups.empty() ? 1 : 2)) + " " + code();
    }
    const char* code() const override { return kCodeNames[static_cast<int>(first().code)]; }
    Cost cost(const View& view) const override {
        Cost sum;
        for (const auto* list : {&spec.weights, &spec.ups}) {
            if (list->empty()) continue;
            const Tiles& w = list->front().tiles;
            int expert = -1;
            for (const auto& block : plan(view).blocks) {
                if (std::exchange(expert, block.expert) != block.expert)
                    sum.bytes += static_cast<double>(w.num_tiles()) * w.tile_bytes;
                sum.operations += 2.0 * w.num_rows * w.num_inputs * block.num_rows;
            }
        }
        return sum;
    }

    // Four items per thread with an even number of tiles each, as in LinearOp.
    int tiles_per_item(const View& view) const {
        const int items = 4 * view.runner.pool().num_threads();
        const int each = static_cast<int>(plan(view).blocks.size() * num_tiles() + items - 1) / items;
        return std::clamp((each + 1) / 2 * 2, 2, 16);
    }
    int chunks(const View& view) const {
        const int chunk = tiles_per_item(view);
        return (num_tiles() + chunk - 1) / chunk;
    }
    int num_items(const View& view) const override {
        return plan(view).num_blocks(view.batch.num_tokens) * chunks(view);
    }

    void run(const View& view, int item, ThreadState& thread, int op_index) const override {
        const int chunk = tiles_per_item(view), index = item / chunks(view);
        const ExpertPlan::Block& block = plan(view).blocks[index];
        const uint8_t* record = nullptr;
        if (const PackedTiles& weight = spec.weights.front(); weight.records) {
            record = weight.records->await_record(weight.layer, block.expert);
            if (!record) return;
        }
        const Tiles weight = in_memory(spec.weights[block.expert], record);
        const Tiles up = spec.ups.empty() ? weight : in_memory(spec.ups[block.expert], record);
        QuantizedRows x = view.runner.quantized_rows(*spec.input);
        int64_t x0 = block.row0;
        if (spec.input->area == RowArea::attended) {
            x0 = plan(view).tokens[block.row0];
            if (block.num_rows > 1) x = gather_rows(view, block, thread, op_index, index), x0 = 0;
        }
        const int tile0 = item % chunks(view) * chunk, tile1 = std::min(num_tiles(), tile0 + chunk);
        for (int tile = tile0; tile < tile1; tile += 2)
            write(view, thread, block, x, x0, {&weight, &up, tile, std::min(2, tile1 - tile)});
    }
    // Returns a weight's tiles. Those of an expert in a cache are in its record.
    static Tiles in_memory(const PackedTiles& weight, const uint8_t* record) {
        Tiles tiles = weight.tiles;
        if (record) tiles.data = record + reinterpret_cast<uintptr_t>(tiles.data);
        return tiles;
    }

    // Copies the rows of a block's tokens to adjacent rows in the thread's memory.
    QuantizedRows gather_rows(const View& view, const ExpertPlan::Block& block, ThreadState& thread,
                              int op_index, int index) const {
        const QuantizedRows& rows = view.runner.quantized_rows(*spec.input);
        QuantizedRows own = rows;
        set_rows_memory(thread.own_rows->data(), kExpertRows, own);
        if (thread.prepared_op != op_index || thread.prepared_block != index)
            for (int i = 0; i < block.num_rows; i++)
                copy_row(rows, plan(view).tokens[block.row0 + i], own, i);
        thread.prepared_op = op_index;
        thread.prepared_block = index;
        return own;
    }

    struct TilePair {
        const Tiles *weight, *up;
        int tile, count;
    };
    void write(const View& view, ThreadState& thread, const ExpertPlan::Block& block, const QuantizedRows& x,
               int64_t x0, const TilePair& tiles) const {
        const KernelTable& k = view.runner.kernels();
        const int column = tiles.tile * kTile;
        float* out = spec.next_input ? thread.group.data() : view.at(spec.out, block.row0) + column;
        const TileMatmul matmul{.weight = tiles.weight,
                                .up = spec.ups.empty() ? nullptr : tiles.up,
                                .tile = tiles.tile,
                                .count = tiles.count,
                                .x = x,
                                .x0 = x0,
                                .row0 = block.row0,
                                .num_rows = block.num_rows,
                                .epilogue = epilogue(block.expert),
                                .out = out,
                                .stride = spec.next_input ? kGroup : view.stride(spec.out)};
        multiply(k, thread, matmul);
        if (spec.next_input)
            k.quantize_group(out, view.runner.quantized_rows(*spec.next_input), block.row0, block.num_rows,
                             column / kGroup, matmul.width());
    }

    Epilogue epilogue(int expert) const {
        Epilogue e = spec.gate.epilogue(!spec.ups.empty());
        const int64_t at = static_cast<int64_t>(expert) * first().num_rows;
        e.bias = spec.bias ? spec.bias + at : nullptr;
        e.up_bias = spec.up_bias ? spec.up_bias + at : nullptr;
        return e;
    }
};

// -- per-head matmuls --

// Multiplies each head's columns by its own matrix. An item is a head by a block of rows, which it
// quantizes itself.
struct HeadsOp : Op {
    HeadsSpec spec;
    explicit HeadsOp(HeadsSpec s) : spec(std::move(s)) {}

    int num_heads() const { return static_cast<int>(spec.weights.size()); }
    const Tiles& first() const { return spec.weights.front().tiles; }
    std::string name() const override {
        return "heads " + std::to_string(first().num_inputs) + " to " + std::to_string(first().num_rows) +
               " " + code();
    }
    const char* code() const override { return kCodeNames[static_cast<int>(first().code)]; }
    Cost cost(const View& view) const override {
        const double weights = static_cast<double>(num_heads()) * first().num_tiles();
        return {weights * first().tile_bytes,
                2.0 * num_heads() * first().num_rows * first().num_inputs * view.batch.num_tokens};
    }
    static int blocks(int rows) { return (rows + kExpertRows - 1) / kExpertRows; }
    int num_items(const View& view) const override { return num_heads() * blocks(view.batch.num_tokens); }
    void run(const View& view, int item, ThreadState& thread, int) const override {
        const int row0 = item / num_heads() * kExpertRows;
        compute(view, thread, item % num_heads(), row0, std::min(kExpertRows, view.batch.num_tokens - row0));
    }
    bool row_local() const override { return true; }
    void run_rows(const View& view, int row0, int row1, ThreadState& thread) const override {
        for (int head = 0; head < num_heads(); head++)
            for (int row = row0; row < row1; row += kExpertRows)
                compute(view, thread, head, row, std::min(kExpertRows, row1 - row));
    }

    void compute(const View& view, ThreadState& thread, int head, int row0, int rows) const {
        const KernelTable& k = view.runner.kernels();
        const Tiles& w = spec.weights[head].tiles;
        QuantizedRows x = view.runner.quantized_rows(*spec.input);
        set_rows_memory(thread.own_rows->data(), kExpertRows, x);
        thread.prepared_op = -1;
        const int columns = w.num_inputs, tail = spec.tail.width / num_heads();
        const int64_t column = static_cast<int64_t>(head) * (w.num_rows + tail);
        for (int i = 0; i < rows; i++) {
            k.quantize_row(view.at(spec.x, row0 + i) + head * columns, columns, {}, x, i);
            if (tail)
                std::copy_n(view.at(spec.tail, row0 + i) + head * tail, tail,
                            view.at(spec.out, row0 + i) + column + w.num_rows);
        }
        for (int tile = 0; tile < w.num_tiles(); tile += 2)
            multiply(k, thread,
                     TileMatmul{.weight = &w,
                                .up = nullptr,
                                .tile = tile,
                                .count = std::min(2, w.num_tiles() - tile),
                                .x = x,
                                .x0 = 0,
                                .row0 = row0,
                                .num_rows = rows,
                                .epilogue = {},
                                .out = view.at(spec.out, row0) + column + tile * kTile,
                                .stride = view.stride(spec.out)});
    }
};

}  // namespace
}  // namespace octavo
