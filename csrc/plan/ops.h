// Fused row ops and sampling.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../runtime/step_runner.h"
#include "op.h"

namespace octavo {
namespace {

struct FusedRowOps : Op {
    static constexpr int kRowsPerItem = 4;
    bool samples;
    std::vector<std::unique_ptr<RowOp>> ops;

    FusedRowOps(bool s, std::vector<std::unique_ptr<RowOp>> o) : samples(s), ops(std::move(o)) {}
    std::string name() const override { return samples ? "rows of samples" : "rows"; }
    bool on_samples() const override { return samples; }
    int num_items(const View& view) const override {
        const int rows = view.num_rows(samples);
        const bool any =
            std::any_of(ops.begin(), ops.end(), [&](const auto& op) { return op->needed(rows); });
        return any ? (rows + kRowsPerItem - 1) / kRowsPerItem : 0;
    }
    void run(const View& view, int item, ThreadState& thread, int) const override {
        run_rows(view, item * kRowsPerItem, std::min(view.num_rows(samples), (item + 1) * kRowsPerItem),
                 thread);
    }
    bool row_local() const override { return true; }
    void run_rows(const View& view, int row0, int row1, ThreadState&) const override {
        const int rows = view.num_rows(samples);
        for (int row = row0; row < row1; row++)
            for (const auto& op : ops)
                if (op->needed(rows)) op->run(view, row);
    }
};

struct SampleOp : Op {
    ValueSlice logits;
    int vocab;
    SampleOp(ValueSlice slice, int v) : logits(slice), vocab(v) {}
    std::string name() const override { return "sample"; }
    bool on_samples() const override { return true; }
    int num_items(const View& view) const override { return view.batch.has_sampling ? view.num_samples : 0; }
    void run(const View& view, int item, ThreadState& thread, int) const override {
        const int sample = view.first_sample + item;
        if (view.batch.deferred && view.batch.deferred[sample]) return write_none(view, sample);
        if (view.argmax_op) return write_best(view, sample);
        SampleArgs args = view.batch.sampling;
        args.logits = view.at(logits, 0);
        args.stride = view.stride(logits);
        args.vocab = vocab;
        args.first = view.first_sample;
        view.runner.kernels().sample_row(args, item, thread.sampling->data());
    }
    static void write_none(const View& view, int sample) {
        view.batch.sampling.out_ids[sample] = 0;
        view.batch.sampling.out_failed[sample] = false;
    }
    static void write_best(const View& view, int sample) {
        const BestLogit best = view.runner.best(sample);
        view.batch.sampling.out_ids[sample] = best.failed() ? 0 : best.id;
        view.batch.sampling.out_failed[sample] = best.failed();
    }
};

}  // namespace
}  // namespace octavo
