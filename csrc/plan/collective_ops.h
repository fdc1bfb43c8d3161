// Ops that exchange data with other ranks (shared_ranks.h): all-reduce, all-gather, and dispatch and
// collection of expert rows.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "../runtime/shared_ranks.h"
#include "../runtime/step_runner.h"
#include "op.h"
#include "specs.h"

namespace octavo {
namespace {

// All-reduce or all-gather in two ops. The items of the first write this rank's rows to its slot, those of
// the second wait for the other ranks and read theirs. With up to kRowsPerItem tokens or samples, a single
// item of the second op does both, which saves a barrier. Otherwise an item is kRowsPerItem rows, or a block
// of expert rows.
struct CollectiveOp : Op {
    static constexpr int kRowsPerItem = 4;
    CollectiveSpec spec;
    SharedRanks& ranks;
    int index;  // among the collectives of the body, or of the head
    bool receives;  // whether this is the second op

    CollectiveOp(CollectiveSpec s, SharedRanks& r, int i, bool second)
        : spec(std::move(s)), ranks(r), index(i), receives(second) {}

    std::string name() const override {
        return std::string(spec.widths.empty() ? "all reduce" : "all gather") + (receives ? "" : " gives");
    }
    bool on_samples() const override { return spec.x.on_samples(); }
    bool depends_on_data(const View&) const override { return true; }
    int own_width() const { return spec.widths.empty() ? spec.x.width : spec.widths[ranks.tensor_index()]; }
    const ExpertPlan* experts(const View& view) const {
        return spec.route < 0 ? nullptr : &view.runner.expert_plan(spec.route);
    }
    bool is_single_item(const View& view) const {
        const ExpertPlan* plan = experts(view);
        return !(plan && plan->gathers) && view.num_rows(on_samples()) <= kRowsPerItem;
    }
    int num_items(const View& view) const override {
        const ExpertPlan* plan = experts(view);
        const int rows = view.num_rows(on_samples()), items = (rows + kRowsPerItem - 1) / kRowsPerItem;
        if (is_single_item(view)) return receives ? items : 0;
        // A rank whose experts are not chosen takes part in the exchange too.
        return plan ? std::max(plan->num_blocks(rows), receives ? 1 : 0) : items;
    }
    // Calls fn(first, end) for the rows of an item.
    template <typename Fn>
    void each_range(const View& view, int item, const Fn& fn) const {
        const int rows = view.num_rows(on_samples());
        const ExpertPlan* plan = experts(view);
        if (!plan) return fn(item * kRowsPerItem, std::min(rows, (item + 1) * kRowsPerItem));
        const bool all = is_single_item(view);
        const int first = all ? 0 : item, blocks = plan->num_blocks(rows);
        for (int i = first; i < (all ? blocks : std::min(blocks, item + 1)); i++)
            fn(plan->blocks[i].row0, plan->blocks[i].row0 + plan->blocks[i].num_rows);
    }

    void run(const View& view, int item, ThreadState&, int) const override {
        const uint32_t number = view.runner.collective(index, view);
        const auto send_rows = [&](int first, int end) { send(view, number, first, end); };
        if (!receives) return each_range(view, item, send_rows);
        if (is_single_item(view)) each_range(view, item, send_rows);
        if (!ranks.exchange(number)) return;  // the step fails when it ends
        each_range(view, item, [&](int first, int end) {
            for (int row = first; row < end; row++)
                spec.widths.empty() ? sum(view, number, row) : gather(view, number, row);
        });
    }
    void send(const View& view, uint32_t number, int first, int end) const {
        float* own = reinterpret_cast<float*>(ranks.own_slot(number));
        const int64_t width = own_width();
        for (int64_t row = first; row < end; row++)
            std::memcpy(own + row * width, view.at(spec.x, row), width * sizeof(float));
    }
    void sum(const View& view, uint32_t number, int64_t row) const {
        float* out = view.at(spec.out, row);
        const int64_t width = spec.x.width;
        const auto get_part = [&](int index) {
            return reinterpret_cast<const float*>(ranks.slot(ranks.tensor_rank(index), number)) + row * width;
        };
        std::memcpy(out, get_part(0), width * sizeof(float));
        for (int r = 1; r < ranks.num_tensor(); r++) {
            const float* part = get_part(r);
            for (int64_t i = 0; i < width; i++) out[i] += part[i];
        }
    }
    void gather(const View& view, uint32_t number, int64_t row) const {
        float* out = view.at(spec.out, row);
        for (int r = 0; r < ranks.num_tensor(); r++) {
            const int64_t width = spec.widths[r];
            const auto* part = reinterpret_cast<const float*>(ranks.slot(ranks.tensor_rank(r), number));
            std::memcpy(out, part + row * width, width * sizeof(float));
            out += width;
        }
    }
};

// Dispatch in three ops, if several engines with their own tokens share the experts. First, each engine
// writes its tokens to its slot: their number, then for each token its expert ids, their weights and x.
// Then one item waits for the others and assigns rows to all choices. Last, the rows for this rank's
// experts are quantized.
struct DispatchSlot {
    static constexpr size_t kHeader = 64;
    size_t top_k, width;
    explicit DispatchSlot(const DispatchSpec& spec)
        : top_k(static_cast<size_t>(spec.weights.width)), width(static_cast<size_t>(spec.x.width)) {}
    size_t row_bytes() const { return top_k * (sizeof(int32_t) + sizeof(float)) + width * sizeof(float); }
    size_t bytes(int tokens) const { return kHeader + static_cast<size_t>(tokens) * row_bytes(); }
    int32_t* ids(uint8_t* slot, int64_t token) const {
        return reinterpret_cast<int32_t*>(slot + kHeader + static_cast<size_t>(token) * row_bytes());
    }
    float* weights(uint8_t* slot, int64_t token) const {
        return reinterpret_cast<float*>(ids(slot, token) + top_k);
    }
    float* x(uint8_t* slot, int64_t token) const { return weights(slot, token) + top_k; }
};

struct DispatchOp : Op {
    DispatchSpec spec;
    SharedRanks& ranks;
    const int index, num_engines;
    DispatchOp(const DispatchSpec& s, SharedRanks& r, int i, int engines)
        : spec(s), ranks(r), index(i), num_engines(engines) {}
    bool depends_on_data(const View&) const override { return true; }
    // The ranks of an engine have the same tokens: the first of its expert ranks sends them.
    int ranks_per_engine() const { return ranks.num_experts() / num_engines; }
    bool sends() const { return ranks.expert_index() % ranks_per_engine() == 0; }
    ExpertPlan& plan(const View& view) const { return view.runner.expert_plan(spec.route); }
};

struct DispatchSendOp : DispatchOp {
    static constexpr int kTokensPerItem = 4;
    using DispatchOp::DispatchOp;
    std::string name() const override { return "tokens give"; }
    int num_items(const View& view) const override {
        return sends() ? (view.batch.num_tokens + kTokensPerItem - 1) / kTokensPerItem : 0;
    }
    void run(const View& view, int item, ThreadState&, int) const override {
        uint8_t* own = ranks.own_slot(view.runner.expert_exchange(index, view));
        const DispatchSlot at(spec);
        const ExpertPlan& plan = this->plan(view);
        const int64_t k = plan.top_k;
        const int last = std::min(view.batch.num_tokens, (item + 1) * kTokensPerItem);
        for (int64_t token = item * kTokensPerItem; token < last; token++) {
            std::copy_n(plan.ids.data() + token * k, k, at.ids(own, token));
            std::copy_n(view.at(spec.weights, token), k, at.weights(own, token));
            std::copy_n(view.at(spec.x, token), spec.x.width, at.x(own, token));
        }
    }
};

struct DispatchReceiveOp : DispatchOp {
    using DispatchOp::DispatchOp;
    std::string name() const override { return "tokens of all engines"; }
    int num_items(const View&) const override { return 1; }
    void run(const View& view, int, ThreadState&, int) const override {
        ExpertPlan& plan = this->plan(view);
        plan.num_tokens = 0;
        plan.blocks.clear();
        const uint32_t number = view.runner.expert_exchange(index, view);
        if (sends()) *reinterpret_cast<int32_t*>(ranks.own_slot(number)) = view.batch.num_tokens;
        if (!ranks.exchange(number)) return;  // the step fails when it ends
        for (int engine = 0; engine < num_engines; engine++) {
            if (engine == ranks.expert_index() / ranks_per_engine()) plan.first_token = plan.num_tokens;
            receive(plan, ranks.slot(ranks.expert_rank(engine * ranks_per_engine()), number),
                    view.runner.plan().options.max_tokens);
        }
        plan.assign_rows(plan.num_tokens);
    }
    void receive(ExpertPlan& plan, uint8_t* slot, int max_tokens) const {
        const DispatchSlot at(spec);
        const int64_t k = plan.top_k;
        const int count = std::clamp(*reinterpret_cast<const int32_t*>(slot), 0, max_tokens);
        for (int64_t token = 0; token < count; token++, plan.num_tokens++) {
            std::copy_n(at.ids(slot, token), k, plan.ids.data() + plan.num_tokens * k);
            std::copy_n(at.weights(slot, token), k, plan.weights.data() + plan.num_tokens * k);
            plan.token_rows[plan.num_tokens] = at.x(slot, token);
        }
    }
};

struct DispatchQuantizeOp : DispatchOp {
    static constexpr int kTokensPerItem = 4;
    using DispatchOp::DispatchOp;
    std::string name() const override { return "rows of all engines"; }
    int num_items(const View& view) const override {
        return spec.next_input ? (plan(view).num_tokens + kTokensPerItem - 1) / kTokensPerItem : 0;
    }
    void run(const View& view, int item, ThreadState&, int) const override {
        const ExpertPlan& plan = this->plan(view);
        const QuantizedInput& to = *spec.next_input;
        const int last = std::min(plan.num_tokens, (item + 1) * kTokensPerItem);
        for (int token = item * kTokensPerItem; token < last; token++)
            if (is_wanted(plan, token))
                view.runner.kernels().quantize_row(plan.token_rows[token], to.x.width, to.norm.args(),
                                                   view.runner.quantized_rows(to), token);
    }
    static bool is_wanted(const ExpertPlan& plan, int64_t token) {
        const int32_t* ids = plan.ids.data() + token * plan.top_k;
        return std::any_of(ids, ids + plan.top_k,
                           [&](int32_t id) { return id >= plan.first_expert && id < plan.last_expert; });
    }
};

// Collection in two ops, like CollectiveOp: the output rows of this rank's experts are written to its slot,
// indexed by choice, then those of the other ranks are read. After a dispatch, the rows sent are those of
// all engines' tokens, and the rows received those of this engine's tokens.
struct CollectOp : Op {
    static constexpr int kTokensPerItem = 4;
    CollectSpec spec;
    SharedRanks& ranks;
    int index;  // among the exchanges of the body
    bool receives;  // whether this is the second op

    CollectOp(CollectSpec s, SharedRanks& r, int i, bool second)
        : spec(std::move(s)), ranks(r), index(i), receives(second) {}

    std::string name() const override { return receives ? "experts' rows" : "experts' rows give"; }
    bool depends_on_data(const View&) const override { return true; }
    ExpertPlan& plan(const View& view) const { return view.runner.expert_plan(spec.route); }
    int tokens(const View& view) const {
        return plan(view).gathers && !receives ? plan(view).num_tokens : view.batch.num_tokens;
    }
    // Whether the items of the second op also send their rows.
    bool is_single_item(const View& view) const {
        return !plan(view).gathers && view.batch.num_tokens <= kTokensPerItem;
    }
    // An engine without tokens takes part in the exchange too.
    int num_items(const View& view) const override {
        const int min_items = receives && plan(view).gathers ? 1 : 0;
        return !receives && is_single_item(view)
                   ? 0
                   : std::max(min_items, (tokens(view) + kTokensPerItem - 1) / kTokensPerItem);
    }

    void run(const View& view, int item, ThreadState&, int) const override {
        const uint32_t number = view.runner.expert_exchange(index, view);
        const int k = plan(view).top_k, before = receives ? plan(view).first_token : 0;
        const int first = (before + item * kTokensPerItem) * k;
        const int end = (before + std::min(tokens(view), (item + 1) * kTokensPerItem)) * k;
        if (!receives) return send(view, number, first, end);
        if (is_single_item(view)) send(view, number, first, end);
        if (!ranks.exchange(number)) return;  // the step fails when it ends
        for (int choice = first; choice < end; choice++) receive(view, number, choice);
    }
    size_t row_bytes() const { return static_cast<size_t>(spec.x.width) * sizeof(float); }
    // Returns the index of the expert rank that has the expert of a choice.
    int owner(const View& view, int choice) const {
        const auto& firsts = spec.firsts;
        return static_cast<int>(std::upper_bound(firsts.begin(), firsts.end(), plan(view).ids[choice]) -
                                firsts.begin()) -
               1;
    }
    void send(const View& view, uint32_t number, int first, int end) const {
        uint8_t* own = ranks.own_slot(number);
        for (int choice = first; choice < end; choice++)
            if (owner(view, choice) == ranks.expert_index())
                std::memcpy(own + choice * row_bytes(), view.at(spec.x, plan(view).rows[choice]),
                            row_bytes());
    }
    void receive(const View& view, uint32_t number, int choice) const {
        const int index = owner(view, choice), row = plan(view).rows[choice];
        const void* from = index == ranks.expert_index()
                               ? reinterpret_cast<const void*>(view.at(spec.x, row))
                               : ranks.slot(ranks.expert_rank(index), number) + choice * row_bytes();
        std::memmove(view.at(spec.out, row), from, row_bytes());
    }
};

}  // namespace
}  // namespace octavo
