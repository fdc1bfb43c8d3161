// Stages in which a rank meets the others (shared_ranks.h): the sum of all ranks' rows, or their columns side
// by side.
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
    int own_width() const { return spec.widths.empty() ? spec.x.width : spec.widths[ranks.rank()]; }
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
        std::memcpy(out, (const float*)ranks.slot(0, number) + row * width, width * sizeof(float));
        for (int r = 1; r < ranks.num_ranks(); r++) {
            const float* part = (const float*)ranks.slot(r, number) + row * width;
            for (int64_t i = 0; i < width; i++) out[i] += part[i];
        }
    }
    void join(const View& view, uint32_t number, int64_t row) const {
        float* out = view.at(spec.out, row);
        for (int r = 0; r < ranks.num_ranks(); r++) {
            const int64_t width = spec.widths[r];
            std::memcpy(out, (const float*)ranks.slot(r, number) + row * width, width * sizeof(float));
            out += width;
        }
    }
};

}  // namespace
}  // namespace octavo
