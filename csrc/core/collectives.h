// Stages in which a rank meets the others (shared_ranks.h): the sum of their rows, their columns side by side,
// or the rows of their experts.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "executor.h"
#include "shared_ranks.h"

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
    bool depends_on_data() const override { return true; }
    int own_width() const { return spec.widths.empty() ? spec.x.width : spec.widths[ranks.tensor_place()]; }
    int pieces(const View& view) const override {
        const int rows = view.rows(on_samples());
        return !reads && rows <= kRowsAPiece ? 0 : (rows + kRowsAPiece - 1) / kRowsAPiece;
    }

    void run(const View& view, int piece, ThreadState&, int) const override {
        const uint32_t number = view.executor.collective(index, view);
        const int rows = view.rows(on_samples());
        const int first = piece * kRowsAPiece, end = std::min(rows, first + kRowsAPiece);
        if (!reads) return give(view, number, first, end);
        if (rows <= kRowsAPiece) give(view, number, first, end);
        if (!ranks.exchange(number)) return;  // the step fails when it is done
        for (int row = first; row < end; row++)
            spec.widths.empty() ? sum(view, number, row) : join(view, number, row);
    }
    void give(const View& view, uint32_t number, int first, int end) const {
        float* own = (float*)ranks.own_slot(number);
        const int64_t width = own_width();
        for (int64_t row = first; row < end; row++)
            std::memcpy(own + row * width, view.at(spec.x, row), width * sizeof(float));
    }
    void sum(const View& view, uint32_t number, int64_t row) const {
        float* out = view.at(spec.out, row);
        const int64_t width = spec.x.width;
        const auto part_of = [&](int place) {
            return (const float*)ranks.slot(ranks.tensor_rank(place), number) + row * width;
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
            const auto* part = (const float*)ranks.slot(ranks.tensor_rank(r), number);
            std::memcpy(out, part + row * width, width * sizeof(float));
            out += width;
        }
    }
};

// Two stages as above: this rank's experts' rows go into its slot, by the choice that they are of; then those
// of the other ranks come from theirs.
struct CollectStage : Stage {
    static constexpr int kTokensAPiece = 4;
    CollectSpec spec;
    SharedRanks& ranks;
    int index;  // among the collectives of the body
    bool reads;  // the second of the two stages

    CollectStage(CollectSpec s, SharedRanks& r, int i, bool second)
        : spec(std::move(s)), ranks(r), index(i), reads(second) {}

    std::string name() const override { return reads ? "experts' rows" : "experts' rows give"; }
    bool on_samples() const override { return false; }
    bool depends_on_data() const override { return true; }
    int pieces(const View& view) const override {
        const int tokens = view.batch.num_tokens;
        return !reads && tokens <= kTokensAPiece ? 0 : (tokens + kTokensAPiece - 1) / kTokensAPiece;
    }

    void run(const View& view, int piece, ThreadState&, int) const override {
        const uint32_t number = view.executor.collective(index, view);
        const int k = spec.plan->top_k, tokens = view.batch.num_tokens;
        const int first = piece * kTokensAPiece * k, end = std::min(tokens, (piece + 1) * kTokensAPiece) * k;
        if (!reads) return give(view, number, first, end);
        if (tokens <= kTokensAPiece) give(view, number, first, end);
        if (!ranks.exchange(number)) return;  // the step fails when it is done
        for (int choice = first; choice < end; choice++) take(view, number, choice);
    }
    size_t row_bytes() const { return (size_t)spec.x.width * sizeof(float); }
    // The place of the rank that has the expert of a choice.
    int owner(int choice) const {
        const auto& firsts = spec.firsts;
        return (int)(std::upper_bound(firsts.begin(), firsts.end(), spec.plan->ids[choice]) -
                     firsts.begin()) -
               1;
    }
    void give(const View& view, uint32_t number, int first, int end) const {
        uint8_t* own = ranks.own_slot(number);
        for (int choice = first; choice < end; choice++)
            if (owner(choice) == ranks.expert_place())
                std::memcpy(own + choice * row_bytes(), view.at(spec.x, spec.plan->rows[choice]),
                            row_bytes());
    }
    void take(const View& view, uint32_t number, int choice) const {
        const int place = owner(choice), row = spec.plan->rows[choice];
        const void* from = place == ranks.expert_place()
                               ? (const void*)view.at(spec.x, row)
                               : ranks.slot(ranks.expert_rank(place), number) + choice * row_bytes();
        std::memmove(view.at(spec.out, row), from, row_bytes());
    }
};

}  // namespace
}  // namespace octavo
