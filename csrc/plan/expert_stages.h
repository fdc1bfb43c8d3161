// The stages of a mixture of experts: the choice of each row, the order of all rows by expert, the conversion
// of experts' rows, and their products.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "stages.h"

namespace octavo {
namespace {

// -- choosing --

struct RouteStage : Stage {
    static constexpr int kRowsAPiece = 4;
    RouteSpec spec;
    explicit RouteStage(const RouteSpec& s) : spec(s) {}
    std::string name() const override { return "experts chosen"; }
    // A single piece gives the rows their order as well, which saves a barrier.
    static bool orders(const View& view, const ExpertPlan& plan) {
        return !plan.gathers && view.batch.num_tokens <= kRowsAPiece;
    }
    int pieces(const View& view) const override {
        return (view.batch.num_tokens + kRowsAPiece - 1) / kRowsAPiece;
    }
    void run(const View& view, int piece, ThreadState& thread, int) const override {
        ExpertPlan& plan = view.runner.expert_plan(spec.route);
        const PreparedRows* converts = spec.converts;
        const int last = std::min(view.batch.num_tokens, (piece + 1) * kRowsAPiece);
        for (int row = piece * kRowsAPiece; row < last; row++) {
            choose(view.at(spec.logits, row), thread.scores.data(),
                   plan.ids.data() + static_cast<size_t>(row) * spec.top_k, view.at(spec.weights, row));
            if (converts)
                view.runner.kernels().prepare_row(view.at(converts->x, row), converts->x.width,
                                                  converts->norm.args(), view.runner.rows(*converts), row);
        }
        if (orders(view, plan)) plan.order(view.batch.num_tokens);
    }

    // Writes a row's experts and their weights, best first. Numbers that are not numbers choose something
    // too, so that such a row harms no other.
    void choose(const float* logits, float* scores, int32_t* ids, float* weights) const {
        const int experts = spec.num_experts();
        float *choice = scores + experts, *taken = choice + experts;
        score(logits, scores);
        for (int e = 0; e < experts; e++) choice[e] = spec.bias ? scores[e] + spec.bias[e] : scores[e];
        if (spec.num_groups > 1) keep_best_groups(choice, taken);
        std::fill_n(taken, experts, 0.0f);
        for (int j = 0; j < spec.top_k; j++) {
            ids[j] = largest(choice, taken, experts);
            weights[j] = scores[ids[j]];
            if (spec.score == RouteSpec::Score::sigmoid_top_k) weights[j] = sigmoid(weights[j]);
            if (spec.score == RouteSpec::Score::sparsemixer) weights[j] = mixed(logits, taken, ids[j]);
        }
        if (spec.score == RouteSpec::Score::softmax_top_k) softmax(weights, spec.top_k, weights);
        float sum = 0;
        for (int j = 0; j < spec.top_k; j++) sum += weights[j];
        for (int j = 0; j < spec.top_k; j++)
            weights[j] = (spec.normalize ? weights[j] / sum : weights[j]) * spec.scale;
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
        float most = x[0], sum = 0;
        for (int i = 1; i < count; i++) most = std::max(most, x[i]);
        for (int i = 0; i < count; i++) sum += out[i] = std::exp(x[i] - most);
        for (int i = 0; i < count; i++) out[i] /= sum;
    }
    // Returns an expert's weight among itself and those not taken that come near it.
    float mixed(const float* logits, const float* taken, int chosen) const {
        const float best = logits[chosen];
        float sum = 0;
        for (int e = 0; e < spec.num_experts(); e++) {
            const bool far = best - logits[e] > 2 * spec.jitter * std::max(std::fabs(logits[e]), best);
            if (e == chosen || (!taken[e] && !far)) sum += std::exp(logits[e] - best);
        }
        return 1 / sum;
    }
    // Returns the place of the largest number that is not taken, of equals the first, and takes it.
    static int largest(const float* x, float* taken, int count) {
        int best = -1;
        for (int i = 0; i < count; i++)
            if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
        taken[best] = 1;
        return best;
    }
    // Sets the experts outside the best groups to -inf. `memory` is as long as `choice`.
    void keep_best_groups(float* choice, float* memory) const {
        const int size = spec.num_experts() / spec.num_groups;
        float* taken = memory + spec.num_groups;
        for (int g = 0; g < spec.num_groups; g++) memory[g] = rank(choice + g * size, size);
        std::fill_n(taken, spec.num_groups, 0.0f);
        for (int i = 0; i < spec.top_groups; i++) largest(memory, taken, spec.num_groups);
        for (int g = 0; g < spec.num_groups; g++)
            if (!taken[g]) std::fill_n(choice + g * size, size, -INFINITY);
    }
    float rank(const float* x, int count) const {
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

// Gives the rows of all experts their order.
struct OrderStage : Stage {
    int route;
    explicit OrderStage(int r) : route(r) {}
    std::string name() const override { return "experts ordered"; }
    int pieces(const View& view) const override {
        const ExpertPlan& plan = view.runner.expert_plan(route);
        return plan.gathers || RouteStage::orders(view, plan) ? 0 : 1;
    }
    void run(const View& view, int, ThreadState&, int) const override {
        view.runner.expert_plan(route).order(view.batch.num_tokens);
    }
};

// -- products --

// Converts the experts' rows for their next product, a block a piece.
struct ExpertRowsStage : Stage {
    const PreparedRows& rows;
    int route;
    Place by;  // weights of the tokens that the rows are made of; none: rows as they are
    ExpertRowsStage(const PreparedRows& r, int choice, const Place& b) : rows(r), route(choice), by(b) {}
    std::string name() const override { return "rows of experts"; }
    bool depends_on_data(const View&) const override { return true; }
    int pieces(const View& view) const override {
        return view.runner.expert_plan(route).num_blocks(view.batch.num_tokens);
    }
    void run(const View& view, int piece, ThreadState& thread, int) const override {
        const ExpertPlan::Block& block = view.runner.expert_plan(route).blocks[piece];
        for (int row = block.row0; row < block.row0 + block.num_rows; row++) {
            const float* x = by.width ? scaled(view, row, thread.scores.data()) : view.at(rows.x, row);
            view.runner.kernels().prepare_row(x, rows.x.width, rows.norm.args(), view.runner.rows(rows), row);
        }
    }
    // Writes the row's token times the weight of this choice.
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

// Copies a converted row.
void copy_row(const Rows& from, int64_t row, const Rows& to, int64_t index) {
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

// A product of each expert with its rows, in pieces of some tiles of an expert and a block of its rows.
struct ExpertsStage : Stage {
    ExpertsSpec spec;
    explicit ExpertsStage(ExpertsSpec s) : spec(std::move(s)) {}

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

    // Four pieces a thread, an even number of tiles each, as LinearStage has them.
    int tiles_a_piece(const View& view) const {
        const int pieces = 4 * view.runner.pool().num_threads();
        const int each = static_cast<int>(plan(view).blocks.size() * num_tiles() + pieces - 1) / pieces;
        return std::clamp((each + 1) / 2 * 2, 2, 16);
    }
    int chunks(const View& view) const {
        const int chunk = tiles_a_piece(view);
        return (num_tiles() + chunk - 1) / chunk;
    }
    int pieces(const View& view) const override {
        return plan(view).num_blocks(view.batch.num_tokens) * chunks(view);
    }

    void run(const View& view, int piece, ThreadState& thread, int stage) const override {
        const int chunk = tiles_a_piece(view), index = piece / chunks(view);
        const ExpertPlan::Block& block = plan(view).blocks[index];
        Rows x = view.runner.rows(*spec.rows);
        int64_t x0 = block.row0;
        if (spec.rows->area == RowArea::attended) {
            x0 = plan(view).tokens[block.row0];
            if (block.num_rows > 1) x = gathered(view, block, thread, stage, index), x0 = 0;
        }
        const int tile0 = piece % chunks(view) * chunk, tile1 = std::min(num_tiles(), tile0 + chunk);
        for (int tile = tile0; tile < tile1; tile += 2)
            write(view, thread, block, x, x0, {tile, std::min(2, tile1 - tile)});
    }

    // Puts the rows of a block's tokens side by side, in memory of the thread.
    Rows gathered(const View& view, const ExpertPlan::Block& block, ThreadState& thread, int stage,
                  int index) const {
        const Rows& rows = view.runner.rows(*spec.rows);
        Rows own = rows;
        place_rows_at(thread.rows->data(), kExpertRows, own);
        if (thread.prepared_stage != stage || thread.prepared_block != index)
            for (int i = 0; i < block.num_rows; i++)
                copy_row(rows, plan(view).tokens[block.row0 + i], own, i);
        thread.prepared_stage = stage;
        thread.prepared_block = index;
        return own;
    }

    struct TilePair {
        int tile, count;
    };
    void write(const View& view, ThreadState& thread, const ExpertPlan::Block& block, const Rows& x,
               int64_t x0, const TilePair& tiles) const {
        const KernelTable& k = view.runner.kernels();
        const int column = tiles.tile * kTile;
        float* out = spec.converts ? thread.group.data() : view.at(spec.out, block.row0) + column;
        const Product product{.weight = &spec.weights[block.expert].tiles,
                              .up = spec.ups.empty() ? nullptr : &spec.ups[block.expert].tiles,
                              .tile = tiles.tile,
                              .count = tiles.count,
                              .x = x,
                              .x0 = x0,
                              .row0 = block.row0,
                              .num_rows = block.num_rows,
                              .epilogue = epilogue(block.expert),
                              .out = out,
                              .stride = spec.converts ? kGroup : view.stride(spec.out)};
        multiply(k, thread, product);
        if (spec.converts)
            k.put_rows(out, view.runner.rows(*spec.converts), block.row0, block.num_rows, column / kGroup,
                       product.width());
    }

    Epilogue epilogue(int expert) const {
        Epilogue e = spec.gate.epilogue(!spec.ups.empty());
        const int64_t at = static_cast<int64_t>(expert) * first().num_rows;
        e.bias = spec.bias ? spec.bias + at : nullptr;
        e.up_bias = spec.up_bias ? spec.up_bias + at : nullptr;
        return e;
    }
};

// -- products of heads --

// Each head's columns times its own matrix, in pieces of a head and a block of rows, which each converts.
struct HeadsStage : Stage {
    HeadsSpec spec;
    explicit HeadsStage(HeadsSpec s) : spec(std::move(s)) {}

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
    int pieces(const View& view) const override { return num_heads() * blocks(view.batch.num_tokens); }
    void run(const View& view, int piece, ThreadState& thread, int) const override {
        const int row0 = piece / num_heads() * kExpertRows;
        compute(view, thread, piece % num_heads(), row0, std::min(kExpertRows, view.batch.num_tokens - row0));
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
        Rows x = view.runner.rows(*spec.rows);
        place_rows_at(thread.rows->data(), kExpertRows, x);
        thread.prepared_stage = -1;
        const int columns = w.num_inputs, tail = spec.tail.width / num_heads();
        const int64_t column = static_cast<int64_t>(head) * (w.num_rows + tail);
        for (int i = 0; i < rows; i++) {
            k.prepare_row(view.at(spec.x, row0 + i) + head * columns, columns, {}, x, i);
            if (tail)
                std::copy_n(view.at(spec.tail, row0 + i) + head * tail, tail,
                            view.at(spec.out, row0 + i) + column + w.num_rows);
        }
        for (int tile = 0; tile < w.num_tiles(); tile += 2)
            multiply(k, thread,
                     Product{.weight = &w,
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
