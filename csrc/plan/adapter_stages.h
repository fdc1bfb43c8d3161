// The work of adapters in a product: the stage that shrinks its rows ahead of it, and the sums of its tiles.
//
// A step's rows may have as many adapters as there are rows, whose matrices are read once, in pieces of a
// kilobyte all over memory. So what a thread needs next it asks for while it multiplies the base's weights,
// which keeps the units busy and memory idle: the next tiles of every B, and the A of the next product.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "../runtime/step_runner.h"
#include "specs.h"
#include "stage.h"

namespace octavo {
namespace {

// Shrinks a product's rows for adapters: h = scales * A x for each of its sites. Rows of one adapter are taken
// together.
struct ShrinkStage : Stage {
    ShrinkSpec spec;

    explicit ShrinkStage(ShrinkSpec s) : spec(std::move(s)) {}
    std::string name() const override { return "adapters"; }
    bool on_samples() const override { return spec.x.on_samples(); }
    bool row_local() const override { return true; }
    bool only_adapters() const override { return true; }
    const AdapterRows& adapted(const View& view) const {
        return view.runner.adapted(on_samples(), view.first_sample);
    }
    // Several threads share the ranks of a run where there are fewer runs of rows than threads.
    int parts(const View& view) const {
        const int runs = static_cast<int>(adapted(view).runs.size());
        return runs ? std::clamp((view.runner.pool().num_threads() + runs - 1) / runs, 1, kMostParts) : 1;
    }
    int pieces(const View& view) const override {
        if (!view.batch.adapters) return 0;
        return parts(view) * static_cast<int>(adapted(view).runs.size());
    }
    void run(const View& view, int piece, ThreadState& thread, int) const override {
        const AdapterRows& rows = adapted(view);
        const int num_parts = parts(view);
        shrink(view, thread, rows, rows.runs[piece / num_parts], Part{piece % num_parts, num_parts});
    }
    void run_rows(const View& view, int, int, ThreadState& thread) const override {
        if (!view.batch.adapters) return;
        for (const auto& run : thread.block_rows.runs)
            shrink(view, thread, thread.block_rows, run, Part{0, 1});
    }
    // Asks for the A that a piece reads first.
    void prefetch(const View& view, int piece, ThreadState&) const override {
        if (!view.batch.adapters) return;
        const int slot = adapted(view).runs[piece / parts(view)].slot;
        each_update(view, spec.sites, slot, [&](const SiteUpdate& update) {
            const int64_t bytes =
                std::min(static_cast<int64_t>(kFirstBytes), update.a.rank * row_bytes(update));
            for (int64_t at = 0; at < bytes; at += kLineBytes)
                __builtin_prefetch(static_cast<const uint8_t*>(update.a.numbers) + at, 0, 2);
        });
    }
    // Appends what rows read of their adapters in the stage of these sites, and first in their product.
    static void add_reads(const View& view, const std::vector<int>& sites, const AdapterRows& rows,
                          std::vector<ReadSoon::Part>& reads) {
        for (const auto& run : rows.runs)
            each_update(view, sites, run.slot, [&](const SiteUpdate& update) {
                reads.push_back(lines(update.a.numbers, update.a.rank * row_bytes(update)));
            });
        for (const auto& run : rows.runs)
            each_update(view, sites, run.slot, [&](const SiteUpdate& update) {
                reads.push_back(lines(update.b.numbers, 2 * update.b.tile_bytes()));
            });
    }
    static ReadSoon::Part lines(const void* first, int64_t bytes) {
        return {static_cast<const uint8_t*>(first),
                static_cast<int32_t>((bytes + kLineBytes - 1) / kLineBytes)};
    }

  private:
    static constexpr int kMostParts = 16, kPartRanks = 4;  // ranks of a part are a multiple of the latter
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
    template <typename Take>
    static void each_update(const View& view, const std::vector<int>& sites, int slot, const Take& take) {
        for (const int site : sites)
            if (const SiteUpdate* update = view.runner.adapters().update(slot, site)) take(*update);
    }
    void shrink(const View& view, ThreadState& thread, const AdapterRows& rows, const AdapterRows::Run& run,
                Part part) const {
        const Adapters& adapters = view.runner.adapters();
        const KernelTable& k = view.runner.kernels();
        const float* from[AdapterRows::kTogether] = {};
        each_update(view, spec.sites, run.slot, [&](const SiteUpdate& update) {
            const int first = part.first_rank(update.a.rank), end = part.end_rank(update.a.rank);
            if (first == end) return;
            float* h[AdapterRows::kTogether];
            for (int i = 0; i < run.count; i++) {
                const int row = rows.rows[run.first + i];
                if (!from[i]) from[i] = read(view, thread, k, row, i);
                h[i] = adapters.h(row) + update.offset + first;
            }
            k.shrink(update.a.ranks(first, end), from, run.count, update.scales + first, h);
        });
    }
    // Returns a row's numbers, the i-th one's of a run.
    const float* read(const View& view, ThreadState& thread, const KernelTable& k, int row, int i) const {
        const float* from = view.at(spec.x, row);
        const int width = spec.x.width;
        const int64_t stride = padded_width(width);
        if (!spec.norm.weight && stride == width) return from;
        float* to = reinterpret_cast<float*>(thread.adapted->data()) + i * stride;
        if (spec.norm.weight)
            k.norm_row(from, width, spec.norm.args(), to);
        else
            std::copy_n(from, width, to);
        std::fill(to + width, to + stride, 0.0f);
        return to;
    }
};

// A product of rows without adapters.
struct NoAdapters {
    void begin(int, int) const {}
    ReadSoon soon(int, int) const { return {}; }
    void add(int, int, float* const*, bool) const {}
};

// The adapters of a block of rows at the tiles of a product, of one part of it after the other.
class TileAdapters {
  public:
    // The sites whose matrices are prefetched while the tiles of a product are multiplied; null: none.
    struct Next {
        const std::vector<int>* sites = nullptr;
        int num_tiles = 1;
    };

    TileAdapters(const View& view, ThreadState& thread, const AdapterRows& rows, int row0, const Next& next)
        : view_(view), thread_(thread), rows_(rows), row0_(row0) {
        thread.next_reads.clear();
        if (!next.sites || next.sites->empty()) return;
        ShrinkStage::add_reads(view, *next.sites, rows, thread.next_reads);
        num_next_ = (num_lines(thread.next_reads) + next.num_tiles - 1) / next.num_tiles;
    }
    // Takes the site of the part whose tiles come now, and that of its up projection; -1: none.
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
    // Returns what is read behind the product of these tiles: the same of B for the tiles behind them, and a
    // share of what the next product reads.
    ReadSoon soon(int tile, int count) {
        auto& reads = thread_.reads;
        reads.clear();
        for (const auto& runs : thread_.expanded)
            for (const auto& run : runs)
                reads.push_back(ShrinkStage::lines(run.b.tile(tile + count), count * run.b.tile_bytes()));
        add_next(num_next_ * count);
        return {reads.data(), static_cast<int>(reads.size()), num_lines(reads)};
    }
    void add(int tile, int count, float* const* acc, bool of_up) const {
        const auto& runs = thread_.expanded[of_up];
        const Expansion expansion{runs.data(), static_cast<int>(runs.size()),
                                  view_.runner.adapters().stride(), row0_};
        view_.runner.kernels().expand(expansion, tile, count, acc);
    }

  private:
    static int num_lines(const std::vector<ReadSoon::Part>& parts) {
        int sum = 0;
        for (const auto& part : parts) sum += part.num_lines;
        return sum;
    }
    // Moves as many lines of the next product's to those that are read now.
    void add_next(int most) {
        auto& next = thread_.next_reads;
        while (most > 0 && next_ < next.size()) {
            ReadSoon::Part& part = next[next_];
            const int taken = std::min(most, part.num_lines);
            thread_.reads.push_back({part.first, taken});
            part.first += static_cast<int64_t>(taken) * kLineBytes;
            part.num_lines -= taken;
            most -= taken;
            if (part.num_lines == 0) next_++;
        }
    }

    const View& view_;
    ThreadState& thread_;
    const AdapterRows& rows_;
    const int row0_;
    int num_next_ = 0;  // lines of the next product's that are asked for with each tile
    size_t next_ = 0;
};

}  // namespace
}  // namespace octavo
