// What an executor walks over: row-local work, products, attention, draws.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "executor.h"

namespace octavo {
namespace {

// -- rows --

struct RowStage : Stage {
    static constexpr int kRowsAPiece = 4;
    bool samples;
    std::vector<std::unique_ptr<RowOp>> ops;

    explicit RowStage(bool s) : samples(s) {}
    std::string name() const override { return samples ? "rows of samples" : "rows"; }
    bool on_samples() const override { return samples; }
    int pieces(const View& view) const override {
        const int rows = view.rows(samples);
        const bool any =
            std::any_of(ops.begin(), ops.end(), [&](const auto& op) { return op->needed(rows); });
        return any ? (rows + kRowsAPiece - 1) / kRowsAPiece : 0;
    }
    void run(const View& view, int piece, ThreadState& thread, int) const override {
        run_rows(view, piece * kRowsAPiece, std::min(view.rows(samples), (piece + 1) * kRowsAPiece), thread);
    }
    bool row_local() const override { return true; }
    void run_rows(const View& view, int row0, int row1, ThreadState&) const override {
        const int rows = view.rows(samples);
        for (int row = row0; row < row1; row++)
            for (const auto& op : ops)
                if (op->needed(rows)) op->run(view, row);
    }
};

// Converts a product's rows ahead of it, into the executor's shared rows, where there are more than a few.
struct PrepareOp : RowOp {
    Place x;
    Norm norm;
    const PreparedRows* rows;
    PrepareOp(Place place, Norm n, const PreparedRows* r) : x(place), norm(n), rows(r) {}
    bool needed(int count) const override { return count > kFewRows; }
    void run(const View& view, int64_t row) const override {
        view.executor.kernels().prepare_row(view.at(x, row), x.width, norm, rows->rows, rows->at(view, row));
    }
};

size_t element_bytes(RowType type) { return type == RowType::fp32 ? 4 : type == RowType::bf16 ? 2 : 1; }

// -- products --

struct LinearStage : Stage {
    LinearSpec spec;
    const PreparedRows* shared;  // where PrepareOp, or the stage before, puts the rows
    std::vector<int> first;  // of each part: its first tile in the stage's count
    int num_tiles = 0;

    LinearStage(LinearSpec s, const PreparedRows* rows) : spec(std::move(s)), shared(rows) {
        const size_t counted = spec.gated ? 1 : spec.parts.size();
        for (size_t i = 0; i < counted; i++) {
            first.push_back(num_tiles);
            num_tiles += spec.parts[i].tiles.num_tiles();
        }
    }
    bool on_samples() const override { return spec.x.on_samples(); }
    std::string name() const override {
        return "linear " + std::to_string(spec.x.width) + " to " +
               std::to_string(num_tiles * kTile * (spec.gated ? 2 : 1)) + " " + code();
    }
    const char* code() const override { return kCodeNames[(int)spec.parts.front().tiles.code]; }
    Cost cost(const View& view) const override {
        Cost sum;
        for (const auto& part : spec.parts) {
            const Tiles& w = part.tiles;
            sum.bytes += (double)w.num_tiles() * w.tile_bytes;
            sum.operations += 2.0 * w.num_rows * w.num_inputs * view.rows(on_samples());
        }
        return sum;
    }

    bool writes_only(const Place& out) const {
        const Place& first = spec.parts.front().out;
        return spec.parts.size() == 1 && first.axis == out.axis && first.offset == out.offset &&
               first.width == out.width;
    }
    int row_blocks(int rows) const { return (rows + kRowBlock - 1) / kRowBlock; }
    // Four pieces a thread, so that all have as many where the tiles allow it; an even number of tiles, which
    // are taken two at a time.
    int tiles_a_piece(int threads) const {
        const int each = (num_tiles + threads - 1) / threads;
        return std::clamp(((each + 3) / 4 + 1) / 2 * 2, 2, 16);
    }
    int pieces(const View& view) const override {
        const int chunk = tiles_a_piece(view.executor.pool().num_threads());
        return row_blocks(view.rows(on_samples())) * ((num_tiles + chunk - 1) / chunk);
    }
    Span reads_first(const View& view, int thread) const override {
        const ThreadPool& pool = view.executor.pool();
        const int threads = pool.num_threads(), chunk = tiles_a_piece(threads);
        const int tile = std::min(num_tiles, pool.first_piece(pieces(view), thread) * chunk),
                  end = std::min(num_tiles, tile + num_tiles / threads);
        size_t part = 0;
        while (part + 1 < first.size() && tile >= first[part + 1]) part++;
        const Tiles& w = spec.parts[part].tiles;
        return {w.tile(tile - first[part]), w.tile(std::min(end - first[part], w.num_tiles()))};
    }

    void run(const View& view, int piece, ThreadState& thread, int stage) const override {
        const int rows = view.rows(on_samples()), chunk = tiles_a_piece(view.executor.pool().num_threads()),
                  chunks = (num_tiles + chunk - 1) / chunk;
        const int row0 = piece / chunks * kRowBlock, rows_here = std::min(kRowBlock, rows - row0);
        const int tile0 = piece % chunks * chunk, tile1 = std::min(num_tiles, tile0 + chunk);
        write_tiles(view, thread,
                    rows <= kFewRows && !spec.converted ? own_rows(view, rows, thread, stage) : shared->rows,
                    tile0, tile1, row0, rows_here);
    }
    bool row_local() const override { return true; }
    void run_rows(const View& view, int row0, int row1, ThreadState& thread) const override {
        write_tiles(view, thread, shared->rows, 0, num_tiles, row0, row1 - row0);
    }

    void write_tiles(const View& view, ThreadState& thread, const Rows& x, int tile0, int tile1, int row0,
                     int rows) const {
        size_t part = 0;
        for (int tile = tile0; tile < tile1;) {
            while (part + 1 < first.size() && tile >= first[part + 1]) part++;
            const int end = part + 1 < first.size() ? std::min(tile1, first[part + 1]) : tile1;
            const int count = std::min(2, end - tile);
            write(view, thread, x, spec.parts[part], tile - first[part], count, row0, rows);
            tile += count;
        }
    }

    Rows own_rows(const View& view, int rows, ThreadState& thread, int stage) const {
        Rows own = shared->rows;
        uint8_t* memory = thread.rows->data();
        const size_t element = element_bytes(own.type);
        own.values = memory;
        memory += (kFewRows * own.stride * element + 63) / 64 * 64;
        own.scales = (float*)memory;
        own.sums = (int32_t*)(own.scales + (size_t)kTile * own.group_stride);
        own.scaled_sums = (float*)(own.sums + (size_t)kTile * own.group_stride * 2);
        if (thread.prepared_stage != stage) {
            for (int row = 0; row < rows; row++)
                view.executor.kernels().prepare_row(view.at(spec.x, row), spec.x.width, spec.norm, own, row);
            thread.prepared_stage = stage;
        }
        return own;
    }

    // One tile of the part or two neighbours, to the out, to the next product's rows or to the best of each
    // row.
    void write(const View& view, ThreadState& thread, const Rows& x, const LinearPart& part, int tile,
               int count, int row0, int rows) const {
        const KernelTable& k = view.executor.kernels();
        const int column = tile * kTile, width = std::min(count * kTile, part.tiles.num_rows - column);
        const bool keeps_best = spec.makes_logits && view.best_only, passes_on = spec.converts || keeps_best;
        float* out = passes_on ? thread.group.data() : view.at(part.out, row0) + column;
        const int64_t stride = passes_on ? kGroup : view.stride(part.out);
        const Epilogue e = epilogue(view, part);
        const int64_t x0 = shared->at(view, row0);
        float *acc = thread.acc[0].data(), *other = thread.acc[1].data();
        const auto finish = [&](int i, const float* sums) {
            k.write_tile(e, sums, other, row0, rows, column + i * kTile, std::min(kTile, width - i * kTile),
                         out + i * kTile, stride);
        };
        if (spec.gated) {
            for (int i = 0; i < count; i++) {
                const TileRef refs[2] = {{&part.tiles, tile + i, acc},
                                         {&spec.parts[1].tiles, tile + i, other}};
                k.tile_products(refs, 2, x, x0, rows, thread.product->data());
                finish(i, acc);
            }
        } else {
            const TileRef refs[2] = {{&part.tiles, tile, acc}, {&part.tiles, tile + 1, other}};
            k.tile_products(refs, count, x, x0, rows, thread.product->data());
            for (int i = 0; i < count; i++) finish(i, refs[i].acc);
        }
        if (spec.converts)
            k.put_rows(out, spec.converts->rows, spec.converts->at(view, row0), rows, column / kGroup, width);
        if (keeps_best) k.keep_best(out, rows, column, width, thread.best.data() + view.first_sample + row0);
    }

    Epilogue epilogue(const View& view, const LinearPart& part) const {
        Epilogue e{};
        e.bias = part.bias;
        e.up_bias = spec.gated ? spec.parts[1].bias : nullptr;
        e.activation = spec.activation;
        e.gated = spec.gated;
        e.clamp = spec.clamp, e.alpha = spec.alpha, e.up_offset = spec.up_offset;
        if (part.has_residual)
            e.residual = view.at(part.residual, 0), e.residual_stride = view.stride(part.residual);
        return e;
    }
};

// -- attention --

struct AttentionStage : Stage {
    AttentionSpec spec;
    int plan_index;
    bool merges;  // the second of the two stages

    AttentionStage(const AttentionSpec& s, int plan, bool m) : spec(s), plan_index(plan), merges(m) {}
    bool on_samples() const override { return false; }
    std::string name() const override { return merges ? "attention merge" : "attention"; }
    Cost cost(const View& view) const override {
        if (merges) return {};
        const KvGroup& kv = view.kv.group(spec.group);
        const Batch& b = view.batch;
        Cost sum;
        for (int r = 0; r < b.num_requests; r++) {
            const int context = b.context_lens[(int64_t)spec.group * b.num_requests + r];
            int longest = 0;
            for (int row = b.query_starts[r]; row < b.query_starts[r + 1]; row++) {
                const int last = spec.window < 0 ? context : std::min(context, b.positions[row] + 1);
                const int keys = spec.window > 0 ? std::min(last, spec.window) : last;
                longest = std::max(longest, keys);
                sum.operations += 2.0 * keys * spec.num_heads * (kv.k_width + kv.v_width);
            }
            sum.bytes += (double)longest * kv.block_bytes() / kTile;
        }
        sum.bytes -= (double)view.executor.plan(plan_index).saved_keys * kv.block_bytes() / kTile;
        return sum;
    }
    int pieces(const View& view) const override {
        const AttentionPlan& plan = view.executor.plan(plan_index);
        return merges ? (int)plan.merged.size() * view.kv.group(spec.group).num_heads
                      : (int)plan.pieces.size();
    }

    void run(const View& view, int piece, ThreadState& thread, int) const override {
        const AttentionPlan& plan = view.executor.plan(plan_index);
        const KvLayer kv = view.kv.layer(spec.group, spec.layer);
        const Rows* converted = spec.converts ? &spec.converts->rows : nullptr;
        const AttentionArgs args{view.at(spec.q, 0),
                                 view.at(spec.out, 0),
                                 converted,
                                 view.stride(spec.q),
                                 view.stride(spec.out),
                                 kv,
                                 spec.num_heads,
                                 spec.scale,
                                 spec.softcap,
                                 spec.window,
                                 spec.sinks};
        AttentionPiece work;  // whose rows are many, and few of them used
        work.positions = view.batch.positions;
        work.num_rows = 0;
        if (merges) {
            const QueryRun& run = plan.runs[plan.merged[piece / kv.num_heads]];
            work.kv_head = piece % kv.num_heads;
            work.first_split = run.first_split, work.last_split = run.last_split;
            add_run(view, work, run, kv);
            return view.executor.kernels().attention_merge(args, work);
        }
        const AttentionWork& todo = plan.works[plan.pieces[piece].work];
        work.kv_head = plan.pieces[piece].kv_head;
        work.first_split = todo.first_split, work.last_split = todo.last_split;
        if (todo.shared) {
            const SharedRun& shared = plan.shared[todo.run];
            for (int i = 0; i < shared.num_runs; i++)
                add_run(view, work, plan.runs[plan.sharers[shared.first + i]], kv);
            work.context_len = shared.num_splits * kSplitKeys;
        } else {
            add_run(view, work, plan.runs[todo.run], kv);
        }
        work.asked = thread.asked_stage == this && thread.asked_piece == piece;
        work.ahead = view.executor.pool().goes_on((int)plan.pieces.size(), piece)
                         ? read_first(view, piece + 1)
                         : BlockRange{};
        if (work.ahead.last) thread.asked_stage = this, thread.asked_piece = piece + 1;
        view.executor.kernels().attention(args, work, thread.attention.data());
    }

    void ask(const View& view, int piece, ThreadState& thread) const override {
        if (merges) return;
        const KvLayer kv = view.kv.layer(spec.group, spec.layer);
        ask_for_blocks(kv, read_first(view, piece), 0, kv.block_end());
        thread.asked_stage = this, thread.asked_piece = piece;
    }

    // The blocks that a piece reads first.
    BlockRange read_first(const View& view, int piece) const {
        const AttentionPlan& plan = view.executor.plan(plan_index);
        const auto [index, kv_head] = plan.pieces[piece];
        const AttentionWork& work = plan.works[index];
        const QueryRun& run = plan.runs[work.shared ? plan.sharers[plan.shared[work.run].first] : work.run];
        return {block_table(view, run), kv_head, work.first_block, work.last_block};
    }
    const int32_t* block_table(const View& view, const QueryRun& run) const {
        return view.batch.block_tables +
               ((int64_t)spec.group * view.batch.num_requests + run.request) * view.batch.table_width;
    }

    // A run's rows, and where their states of the piece's splits go.
    void add_run(const View& view, AttentionPiece& work, const QueryRun& run, const KvLayer& kv) const {
        const Batch& b = view.batch;
        const int64_t request = (int64_t)spec.group * b.num_requests + run.request;
        work.block_table = block_table(view, run);
        work.context_len = b.context_lens[request];
        const int64_t row_floats = (int64_t)(spec.num_heads / kv.num_heads) * (2 + kv.v_padded),
                      split_floats = run.num_rows * row_floats;
        const int64_t at = run.partial + ((int64_t)work.kv_head * (run.last_split - run.first_split) +
                                          work.first_split - run.first_split) *
                                             split_floats;
        for (int i = 0; i < run.num_rows; i++)
            work.rows[work.num_rows++] = AttentionRow{
                run.row0 + i, run.partial < 0 ? nullptr : view.executor.partials() + at + i * row_floats,
                split_floats};
    }
};

// -- draws --

struct SampleStage : Stage {
    Place logits;
    int vocab;
    SampleStage(Place place, int v) : logits(place), vocab(v) {}
    std::string name() const override { return "sample"; }
    bool on_samples() const override { return true; }
    int pieces(const View& view) const override { return view.batch.draws ? view.num_samples : 0; }
    void run(const View& view, int piece, ThreadState& thread, int) const override {
        if (view.best_only) return write_best(view, view.first_sample + piece);
        SampleArgs args = view.batch.sampling;
        args.logits = view.at(logits, 0);
        args.stride = view.stride(logits);
        args.vocab = vocab;
        args.first = view.first_sample;
        view.executor.kernels().sample_row(args, piece, thread.sampling->data());
    }
    static void write_best(const View& view, int sample) {
        const Best best = view.executor.best(sample);
        view.batch.sampling.out_ids[sample] = best.failed() ? 0 : best.id;
        view.batch.sampling.out_failed[sample] = best.failed();
    }
};

}  // namespace
}  // namespace octavo
