// Stages in which a rank meets the others (shared_ranks.h): the sum of their rows, their columns side by side,
// the tokens of other engines, or the rows of all ranks' experts.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "../runtime/shared_ranks.h"
#include "../runtime/step_runner.h"
#include "specs.h"
#include "stage.h"

namespace octavo {
namespace {

// Two stages: the pieces of the first put this rank's rows into its slot, those of the second wait for the
// other ranks and read theirs. A few rows are a single piece, which does both and spares a barrier.
struct CollectiveStage : Stage {
    static constexpr int kRowsAPiece = 4;
    CollectiveSpec spec;
    SharedRanks& ranks;
    int index;  // among the collectives of the body, or of the head
    bool reads;  // the second of the two stages

    CollectiveStage(CollectiveSpec s, SharedRanks& r, int i, bool second)
        : spec(std::move(s)), ranks(r), index(i), reads(second) {}

    std::string name() const override {
        return std::string(spec.widths.empty() ? "all reduce" : "all gather") + (reads ? "" : " gives");
    }
    bool on_samples() const override { return spec.x.on_samples(); }
    bool depends_on_data(const View&) const override { return true; }
    int own_width() const { return spec.widths.empty() ? spec.x.width : spec.widths[ranks.tensor_place()]; }
    int pieces(const View& view) const override {
        const int rows = view.rows(on_samples());
        return !reads && rows <= kRowsAPiece ? 0 : (rows + kRowsAPiece - 1) / kRowsAPiece;
    }

    void run(const View& view, int piece, ThreadState&, int) const override {
        const uint32_t number = view.runner.collective(index, view);
        const int rows = view.rows(on_samples());
        const int first = piece * kRowsAPiece, end = std::min(rows, first + kRowsAPiece);
        if (!reads) return give(view, number, first, end);
        if (rows <= kRowsAPiece) give(view, number, first, end);
        if (!ranks.exchange(number)) return;  // the step fails when it is done
        for (int row = first; row < end; row++)
            spec.widths.empty() ? sum(view, number, row) : join(view, number, row);
    }
    void give(const View& view, uint32_t number, int first, int end) const {
        float* own = reinterpret_cast<float*>(ranks.own_slot(number));
        const int64_t width = own_width();
        for (int64_t row = first; row < end; row++)
            std::memcpy(own + row * width, view.at(spec.x, row), width * sizeof(float));
    }
    void sum(const View& view, uint32_t number, int64_t row) const {
        float* out = view.at(spec.out, row);
        const int64_t width = spec.x.width;
        const auto part_of = [&](int place) {
            return reinterpret_cast<const float*>(ranks.slot(ranks.tensor_rank(place), number)) + row * width;
        };
        std::memcpy(out, part_of(0), width * sizeof(float));
        for (int r = 1; r < ranks.num_tensor(); r++) {
            const float* part = part_of(r);
            for (int64_t i = 0; i < width; i++) out[i] += part[i];
        }
    }
    void join(const View& view, uint32_t number, int64_t row) const {
        float* out = view.at(spec.out, row);
        for (int r = 0; r < ranks.num_tensor(); r++) {
            const int64_t width = spec.widths[r];
            const auto* part = reinterpret_cast<const float*>(ranks.slot(ranks.tensor_rank(r), number));
            std::memcpy(out, part + row * width, width * sizeof(float));
            out += width;
        }
    }
};

// Three stages, where several engines have tokens of their own and share their experts. Each puts its tokens
// into its slot: their number, then for each its experts, their weights and its x. One piece waits for the
// others and puts all tokens' choices in order; then the rows that this rank's experts want are converted.
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

struct DispatchStage : Stage {
    DispatchSpec spec;
    SharedRanks& ranks;
    const int index, num_engines;
    DispatchStage(const DispatchSpec& s, SharedRanks& r, int i, int engines)
        : spec(s), ranks(r), index(i), num_engines(engines) {}
    bool depends_on_data(const View&) const override { return true; }
    // The ranks of an engine have the same tokens: the first of its expert places gives them.
    int places_an_engine() const { return ranks.num_experts() / num_engines; }
    bool gives() const { return ranks.expert_place() % places_an_engine() == 0; }
    ExpertPlan& plan(const View& view) const { return view.runner.expert_plan(spec.route); }
};

struct DispatchGivesStage : DispatchStage {
    static constexpr int kTokensAPiece = 4;
    using DispatchStage::DispatchStage;
    std::string name() const override { return "tokens give"; }
    int pieces(const View& view) const override {
        return gives() ? (view.batch.num_tokens + kTokensAPiece - 1) / kTokensAPiece : 0;
    }
    void run(const View& view, int piece, ThreadState&, int) const override {
        uint8_t* own = ranks.own_slot(view.runner.expert_exchange(index, view));
        const DispatchSlot at(spec);
        const ExpertPlan& plan = this->plan(view);
        const int64_t k = plan.top_k;
        const int last = std::min(view.batch.num_tokens, (piece + 1) * kTokensAPiece);
        for (int64_t token = piece * kTokensAPiece; token < last; token++) {
            std::copy_n(plan.ids.data() + token * k, k, at.ids(own, token));
            std::copy_n(view.at(spec.weights, token), k, at.weights(own, token));
            std::copy_n(view.at(spec.x, token), spec.x.width, at.x(own, token));
        }
    }
};

struct DispatchMeetsStage : DispatchStage {
    using DispatchStage::DispatchStage;
    std::string name() const override { return "tokens of all engines"; }
    int pieces(const View&) const override { return 1; }
    void run(const View& view, int, ThreadState&, int) const override {
        ExpertPlan& plan = this->plan(view);
        plan.num_tokens = 0;
        plan.blocks.clear();
        const uint32_t number = view.runner.expert_exchange(index, view);
        if (gives()) *reinterpret_cast<int32_t*>(ranks.own_slot(number)) = view.batch.num_tokens;
        if (!ranks.exchange(number)) return;  // the step fails when it is done
        for (int engine = 0; engine < num_engines; engine++) {
            if (engine == ranks.expert_place() / places_an_engine()) plan.first_token = plan.num_tokens;
            take(plan, ranks.slot(ranks.expert_rank(engine * places_an_engine()), number),
                 view.runner.plan().options.max_tokens);
        }
        plan.order(plan.num_tokens);
    }
    void take(ExpertPlan& plan, uint8_t* slot, int most) const {
        const DispatchSlot at(spec);
        const int64_t k = plan.top_k;
        const int count = std::clamp(*reinterpret_cast<const int32_t*>(slot), 0, most);
        for (int64_t token = 0; token < count; token++, plan.num_tokens++) {
            std::copy_n(at.ids(slot, token), k, plan.ids.data() + plan.num_tokens * k);
            std::copy_n(at.weights(slot, token), k, plan.weights.data() + plan.num_tokens * k);
            plan.token_rows[plan.num_tokens] = at.x(slot, token);
        }
    }
};

struct DispatchRowsStage : DispatchStage {
    static constexpr int kTokensAPiece = 4;
    using DispatchStage::DispatchStage;
    std::string name() const override { return "rows of all engines"; }
    int pieces(const View& view) const override {
        return spec.converts ? (plan(view).num_tokens + kTokensAPiece - 1) / kTokensAPiece : 0;
    }
    void run(const View& view, int piece, ThreadState&, int) const override {
        const ExpertPlan& plan = this->plan(view);
        const PreparedRows& to = *spec.converts;
        const int last = std::min(plan.num_tokens, (piece + 1) * kTokensAPiece);
        for (int token = piece * kTokensAPiece; token < last; token++)
            if (is_wanted(plan, token))
                view.runner.kernels().prepare_row(plan.token_rows[token], to.x.width, to.norm.args(),
                                                  view.runner.rows(to), token);
    }
    static bool is_wanted(const ExpertPlan& plan, int64_t token) {
        const int32_t* ids = plan.ids.data() + token * plan.top_k;
        return std::any_of(ids, ids + plan.top_k,
                           [&](int32_t id) { return id >= plan.first_expert && id < plan.last_expert; });
    }
};

// Two stages as those of a sum: this rank's experts' rows go into its slot, by the choice that they are of;
// then those of the other ranks come from theirs. Behind a dispatch the choices given are those of all engines'
// tokens, and those taken this engine's own.
struct CollectStage : Stage {
    static constexpr int kTokensAPiece = 4;
    CollectSpec spec;
    SharedRanks& ranks;
    int index;  // among the exchanges of the body
    bool reads;  // the second of the two stages

    CollectStage(CollectSpec s, SharedRanks& r, int i, bool second)
        : spec(std::move(s)), ranks(r), index(i), reads(second) {}

    std::string name() const override { return reads ? "experts' rows" : "experts' rows give"; }
    bool depends_on_data(const View&) const override { return true; }
    ExpertPlan& plan(const View& view) const { return view.runner.expert_plan(spec.route); }
    int tokens(const View& view) const {
        return plan(view).gathers && !reads ? plan(view).num_tokens : view.batch.num_tokens;
    }
    // Whether the second stage's pieces give what they take.
    bool is_one(const View& view) const {
        return !plan(view).gathers && view.batch.num_tokens <= kTokensAPiece;
    }
    // An engine without tokens meets the others too.
    int pieces(const View& view) const override {
        const int least = reads && plan(view).gathers ? 1 : 0;
        return !reads && is_one(view) ? 0
                                      : std::max(least, (tokens(view) + kTokensAPiece - 1) / kTokensAPiece);
    }

    void run(const View& view, int piece, ThreadState&, int) const override {
        const uint32_t number = view.runner.expert_exchange(index, view);
        const int k = plan(view).top_k, before = reads ? plan(view).first_token : 0;
        const int first = (before + piece * kTokensAPiece) * k;
        const int end = (before + std::min(tokens(view), (piece + 1) * kTokensAPiece)) * k;
        if (!reads) return give(view, number, first, end);
        if (is_one(view)) give(view, number, first, end);
        if (!ranks.exchange(number)) return;  // the step fails when it is done
        for (int choice = first; choice < end; choice++) take(view, number, choice);
    }
    size_t row_bytes() const { return static_cast<size_t>(spec.x.width) * sizeof(float); }
    // The place of the rank that has the expert of a choice.
    int owner(const View& view, int choice) const {
        const auto& firsts = spec.firsts;
        return static_cast<int>(std::upper_bound(firsts.begin(), firsts.end(), plan(view).ids[choice]) -
                                firsts.begin()) -
               1;
    }
    void give(const View& view, uint32_t number, int first, int end) const {
        uint8_t* own = ranks.own_slot(number);
        for (int choice = first; choice < end; choice++)
            if (owner(view, choice) == ranks.expert_place())
                std::memcpy(own + choice * row_bytes(), view.at(spec.x, plan(view).rows[choice]),
                            row_bytes());
    }
    void take(const View& view, uint32_t number, int choice) const {
        const int place = owner(view, choice), row = plan(view).rows[choice];
        const void* from = place == ranks.expert_place()
                               ? reinterpret_cast<const void*>(view.at(spec.x, row))
                               : ranks.slot(ranks.expert_rank(place), number) + choice * row_bytes();
        std::memmove(view.at(spec.out, row), from, row_bytes());
    }
};

}  // namespace
}  // namespace octavo
