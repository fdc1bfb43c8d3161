// Adapters of linear ops: the op that computes h = A x before them, and the update of their tiles.
//
// The rows of a step may have as many adapters as there are rows. Their matrices are read once, in
// scattered ranges of about a kilobyte. While a thread multiplies base weights, it prefetches the adapter
// data that it needs next, so that compute units and memory are busy at the same time: the next tiles of
// every B, and the A of the next linear op.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "../runtime/step_runner.h"
#include "op.h"
#include "specs.h"

namespace octavo {
namespace {

// Computes h = scales * A x for each site of a linear op. Rows of one adapter are computed together.
struct ShrinkOp : Op {
    ShrinkSpec spec;

    explicit ShrinkOp(ShrinkSpec s) : spec(std::move(s)) {}
    std::string name() const override { return "adapters"; }
    bool on_samples() const override { return spec.x.on_samples(); }
    bool row_local() const override { return true; }
    bool is_adapter_only() const override { return true; }
    const AdapterRows& adapted(const View& view) const {
        return view.runner.adapter_rows(on_samples(), view.first_sample);
    }
    // If there are fewer runs than threads, several threads share the ranks of a run.
    int parts(const View& view) const {
        const int runs = static_cast<int>(adapted(view).runs.size());
        return runs ? std::clamp((view.runner.pool().num_threads() + runs - 1) / runs, 1, kMaxParts) : 1;
    }
    int num_items(const View& view) const override {
        if (!view.batch.adapters) return 0;
        return parts(view) * static_cast<int>(adapted(view).runs.size());
    }
    void run(const View& view, int item, ThreadState& thread, int) const override {
        const AdapterRows& rows = adapted(view);
        const int num_parts = parts(view);
        shrink(view, thread, rows, rows.runs[item / num_parts], Part{item % num_parts, num_parts});
    }
    void run_rows(const View& view, int, int, ThreadState& thread) const override {
        if (!view.batch.adapters) return;
        for (const auto& run : thread.block_adapter_rows.runs)
            shrink(view, thread, thread.block_adapter_rows, run, Part{0, 1});
    }
    // Prefetches the start of the A that an item reads.
    void prefetch(const View& view, int item, ThreadState&) const override {
        if (!view.batch.adapters) return;
        const int slot = adapted(view).runs[item / parts(view)].slot;
        for_each_update(view, spec.sites, slot, [&](const SiteUpdate& update) {
            const int64_t bytes =
                std::min(static_cast<int64_t>(kFirstBytes), update.a.rank * row_bytes(update));
            for (int64_t at = 0; at < bytes; at += kLineBytes)
                __builtin_prefetch(static_cast<const uint8_t*>(update.a.numbers) + at, 0, 2);
        });
    }
    // Appends the ranges that rows read of their adapters in the shrink op of these sites, and at the start
    // of the linear op.
    static void add_prefetch_ranges(const View& view, const std::vector<int>& sites, const AdapterRows& rows,
                                    std::vector<PrefetchList::Range>& reads) {
        for (const auto& run : rows.runs)
            for_each_update(view, sites, run.slot, [&](const SiteUpdate& update) {
                reads.push_back(line_range(update.a.numbers, update.a.rank * row_bytes(update)));
            });
        for (const auto& run : rows.runs)
            for_each_update(view, sites, run.slot, [&](const SiteUpdate& update) {
                reads.push_back(line_range(update.b.numbers, 2 * update.b.tile_bytes()));
            });
    }
    static PrefetchList::Range line_range(const void* first, int64_t bytes) {
        return {static_cast<const uint8_t*>(first),
                static_cast<int32_t>((bytes + kLineBytes - 1) / kLineBytes)};
    }

  private:
    static constexpr int kMaxParts = 16, kPartRanks = 4;  // the ranks of a part are a multiple of kPartRanks
    static constexpr int kFirstBytes = 8 << 10;
    struct Part {
        int index, count;
        int first_rank(int rank) const { return std::min(rank, blocks(rank) * index / count * kPartRanks); }
        int end_rank(int rank) const {
            return std::min(rank, blocks(rank) * (index + 1) / count * kPartRanks);
        }
        static int blocks(int rank) { return (rank + kPartRanks - 1) / kPartRanks; }
    };
    static int64_t row_bytes(const SiteUpdate& update) {
        return static_cast<int64_t>(update.a.stride) * update.a.number_bytes();
    }
    template <typename Visit>
    static void for_each_update(const View& view, const std::vector<int>& sites, int slot,
                                const Visit& visit) {
        for (const int site : sites)
            if (const SiteUpdate* update = view.runner.adapters().update(slot, site)) visit(*update);
    }
    void shrink(const View& view, ThreadState& thread, const AdapterRows& rows, const AdapterRows::Run& run,
                Part part) const {
        const Adapters& adapters = view.runner.adapters();
        const KernelTable& k = view.runner.kernels();
        const float* from[AdapterRows::kMaxRunRows] = {};
        for_each_update(view, spec.sites, run.slot, [&](const SiteUpdate& update) {
            const int first = part.first_rank(update.a.rank), end = part.end_rank(update.a.rank);
            if (first == end) return;
            float* h[AdapterRows::kMaxRunRows];
            for (int i = 0; i < run.count; i++) {
                const int row = rows.rows[run.first + i];
                if (!from[i]) from[i] = read(view, thread, k, row, i);
                h[i] = adapters.h(row) + update.offset + first;
            }
            k.shrink(update.a.ranks(first, end), from, run.count, update.scales + first, h);
        });
    }
    // Returns the input of row `row`, the i-th row of a run.
    const float* read(const View& view, ThreadState& thread, const KernelTable& k, int row, int i) const {
        const float* from = view.at(spec.x, row);
        const int width = spec.x.width;
        const int64_t stride = padded_width(width);
        if (!spec.norm.weight && stride == width) return from;
        float* to = reinterpret_cast<float*>(thread.adapter_input->data()) + i * stride;
        if (spec.norm.weight)
            k.norm_row(from, width, spec.norm.args(), to);
        else
            std::copy_n(from, width, to);
        std::fill(to + width, to + stride, 0.0f);
        return to;
    }
};

// A matmul without adapters.
struct NoAdapters {
    void begin(int, int) const {}
    PrefetchList prefetch_list(int, int) const { return {}; }
    void add(int, int, float* const*, bool) const {}
};

// Adapter updates of the tiles of a linear op for a block of rows, one part after another.
class TileAdapters {
  public:
    // Sites whose matrices are prefetched during the matmul; null: none.
    struct Next {
        const std::vector<int>* sites = nullptr;
        int num_tiles = 1;
    };

    TileAdapters(const View& view, ThreadState& thread, const AdapterRows& rows, int row0, const Next& next)
        : view_(view), thread_(thread), rows_(rows), row0_(row0) {
        thread.next_prefetch.clear();
        if (!next.sites || next.sites->empty()) return;
        ShrinkOp::add_prefetch_ranges(view, *next.sites, rows, thread.next_prefetch);
        num_next_ = (num_lines(thread.next_prefetch) + next.num_tiles - 1) / next.num_tiles;
    }
    // Starts a part with this site, and the site of its up projection; -1: none.
    void begin(int site, int up_site) {
        const Adapters& adapters = view_.runner.adapters();
        const int sites[] = {site, up_site};
        for (int i = 0; i < 2; i++) {
            thread_.expanded[i].clear();
            for (const auto& run : rows_.runs)
                if (const SiteUpdate* update = adapters.update(run.slot, sites[i]))
                    thread_.expanded[i].push_back(ExpandedRows{.b = update->b,
                                                               .h = adapters.h(0) + update->offset,
                                                               .rows = rows_.rows.data() + run.first,
                                                               .count = run.count,
                                                               .gain = update->gain,
                                                               .bias = update->bias});
        }
    }
    // Returns the ranges to prefetch during the matmul of these tiles: B of the next tiles, and a share of
    // the next linear op's ranges.
    PrefetchList prefetch_list(int tile, int count) {
        auto& reads = thread_.prefetch;
        reads.clear();
        for (const auto& runs : thread_.expanded)
            for (const auto& run : runs)
                reads.push_back(ShrinkOp::line_range(run.b.tile(tile + count), count * run.b.tile_bytes()));
        add_next_ranges(num_next_ * count);
        return {reads.data(), static_cast<int>(reads.size()), num_lines(reads)};
    }
    void add(int tile, int count, float* const* acc, bool of_up) const {
        const auto& runs = thread_.expanded[of_up];
        const Expansion expansion{runs.data(), static_cast<int>(runs.size()),
                                  view_.runner.adapters().stride(), row0_};
        view_.runner.kernels().expand(expansion, tile, count, acc);
    }

  private:
    static int num_lines(const std::vector<PrefetchList::Range>& parts) {
        int sum = 0;
        for (const auto& part : parts) sum += part.num_lines;
        return sum;
    }
    // Moves up to `most` lines of the next linear op's ranges to the current list.
    void add_next_ranges(int num_lines_left) {
        auto& next = thread_.next_prefetch;
        while (num_lines_left > 0 && next_ < next.size()) {
            PrefetchList::Range& part = next[next_];
            const int count = std::min(num_lines_left, part.num_lines);
            thread_.prefetch.push_back({part.first, count});
            part.first += static_cast<int64_t>(count) * kLineBytes;
            part.num_lines -= count;
            num_lines_left -= count;
            if (part.num_lines == 0) next_++;
        }
    }

    const View& view_;
    ThreadState& thread_;
    const AdapterRows& rows_;
    const int row0_;
    int num_next_ = 0;  // lines of the next linear op to prefetch with each tile
    size_t next_ = 0;
};

}  // namespace
}  // namespace octavo
