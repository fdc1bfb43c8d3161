// The stages of row ops, products, attention and draws.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "../runtime/past_caches.h"
#include "../runtime/step_runner.h"
#include "adapter_stages.h"
#include "plan.h"

namespace octavo {
namespace {

// -- rows --

struct RowStage : Stage {
    static constexpr int kRowsAPiece = 4;
    bool samples;
    std::vector<std::unique_ptr<RowOp>> ops;

    RowStage(bool s, std::vector<std::unique_ptr<RowOp>> o) : samples(s), ops(std::move(o)) {}
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

// -- products --

// One tile of a weight, or two neighbours, times some rows; with `up`, a gate's weight and its up projection.
struct Product {
    const Tiles *weight, *up;
    int tile, count;
    const Rows& x;
    int64_t x0;
    int row0, num_rows;
    Epilogue epilogue;
    float* out;
    int64_t stride;
    // Sums that are there already, [count][num_rows][16], or null: they are to be computed.
    float *sums = nullptr, *up_sums = nullptr;
    int column() const { return tile * kTile; }
    int width() const { return std::min(count * kTile, weight->num_rows - column()); }
};

// `update.soon` says what is read while a tile or two are multiplied; `update.add` is called with their sums
// before they are finished; `of_up`: of the up projection.
template <typename Update>
void multiply(const KernelTable& k, ThreadState& thread, const Product& p, Update&& update) {
    float *acc = thread.acc[0].data(), *other = thread.acc[1].data();
    const auto finish = [&](int i, const float* sums, const float* of_up) {
        k.write_tile(p.epilogue, sums, of_up, p.row0, p.num_rows, p.column() + i * kTile,
                     std::min(kTile, p.width() - i * kTile), p.out + i * kTile, p.stride);
    };
    if (p.sums) {
        const int64_t second = static_cast<int64_t>(p.num_rows) * kTile;
        float* const sums[2] = {p.sums, p.sums + second};
        float* const ups[2] = {p.up_sums, p.up ? p.up_sums + second : nullptr};
        update.add(p.tile, p.count, sums, false);
        if (p.up) update.add(p.tile, p.count, ups, true);
        for (int i = 0; i < p.count; i++) finish(i, sums[i], ups[i]);
    } else if (p.up) {
        for (int i = 0; i < p.count; i++) {
            const ReadSoon soon = update.soon(p.tile + i, 1);
            const TileRef refs[2] = {{p.weight, p.tile + i, acc, &soon}, {p.up, p.tile + i, other}};
            k.tile_products(refs, 2, p.x, p.x0, p.num_rows, thread.product->data());
            update.add(p.tile + i, 1, &refs[0].acc, false);
            update.add(p.tile + i, 1, &refs[1].acc, true);
            finish(i, acc, other);
        }
    } else {
        const ReadSoon soon = update.soon(p.tile, p.count);
        const TileRef refs[2] = {{p.weight, p.tile, acc, &soon}, {p.weight, p.tile + 1, other}};
        k.tile_products(refs, p.count, p.x, p.x0, p.num_rows, thread.product->data());
        float* const sums[2] = {acc, other};
        update.add(p.tile, p.count, sums, false);
        for (int i = 0; i < p.count; i++) finish(i, sums[i], nullptr);
    }
}

struct NoUpdate {
    ReadSoon soon(int, int) const { return {}; }
    void add(int, int, float* const*, bool) const {}
};
void multiply(const KernelTable& k, ThreadState& thread, const Product& p) {
    multiply(k, thread, p, NoUpdate{});
}

struct LinearStage : Stage {
    LinearSpec spec;
    std::vector<int> first;  // each part's first tile in the stage's count
    int num_tiles = 0;

    explicit LinearStage(LinearSpec s) : spec(std::move(s)) {
        const size_t counted = is_gated() ? 1 : spec.parts.size();
        for (size_t i = 0; i < counted; i++) {
            first.push_back(num_tiles);
            num_tiles += spec.parts[i].tiles().num_tiles();
        }
    }
    bool is_gated() const { return spec.gated; }
    bool on_samples() const override { return spec.rows->x.on_samples(); }
    std::string name() const override {
        return "linear " + std::to_string(spec.rows->x.width) + " to " +
               std::to_string(num_tiles * kTile * (is_gated() ? 2 : 1)) + " " + code();
    }
    const char* code() const override {
        return kCodeNames[static_cast<int>(spec.parts.front().tiles().code)];
    }
    Cost cost(const View& view) const override {
        Cost sum;
        for (const auto& part : spec.parts) {
            const Tiles& w = part.tiles();
            sum.bytes += static_cast<double>(w.num_tiles()) * w.tile_bytes;
            sum.operations += 2.0 * w.num_rows * w.num_inputs * view.rows(on_samples());
        }
        return sum;
    }

    int row_blocks(int rows) const { return (rows + kRowBlock - 1) / kRowBlock; }
    // Whether any of the weights lies by columns; a thread then takes as long parts of these as it can.
    bool lies_by_columns() const {
        return std::any_of(spec.parts.begin(), spec.parts.end(),
                           [](const LinearPart& part) { return part.tiles().column_stride > 0; });
    }
    // Four pieces a thread, so that all have as many where the tiles allow it; an even number of tiles, which
    // are taken two at a time.
    int tiles_a_piece(int threads) const {
        const int each = (num_tiles + threads - 1) / threads;
        if (lies_by_columns()) return std::max((each + 3) / 4 * 4, 4);
        return std::clamp(((each + 3) / 4 + 1) / 2 * 2, 2, 16);
    }
    int pieces(const View& view) const override {
        const int chunk = tiles_a_piece(view.runner.pool().num_threads());
        return row_blocks(view.rows(on_samples())) * ((num_tiles + chunk - 1) / chunk);
    }
    Span reads_first(const View& view, int thread) const override {
        const ThreadPool& pool = view.runner.pool();
        const int threads = pool.num_threads(), chunk = tiles_a_piece(threads);
        if (lies_by_columns()) return {};
        const int tile = std::min(num_tiles, pool.first_piece(pieces(view), thread) * chunk),
                  end = std::min(num_tiles, tile + num_tiles / threads);
        size_t part = 0;
        while (part + 1 < first.size() && tile >= first[part + 1]) part++;
        const Tiles& w = spec.parts[part].tiles();
        return {w.tile(tile - first[part]), w.tile(std::min(end - first[part], w.num_tiles()))};
    }

    void run(const View& view, int piece, ThreadState& thread, int stage) const override {
        const int rows = view.rows(on_samples());
        const int chunk = tiles_a_piece(view.runner.pool().num_threads());
        const int chunks = (num_tiles + chunk - 1) / chunk;
        const int row0 = piece / chunks * kRowBlock, tile0 = piece % chunks * chunk;
        const bool converts_own = rows <= kFewRows && spec.rows->area == RowArea::prepared;
        const Rows x = converts_own ? own_rows(view, rows, thread, stage) : view.runner.rows(*spec.rows);
        const Output output{row0, std::min(kRowBlock, rows - row0), tile0,
                            std::min(num_tiles, tile0 + chunk)};
        if (view.batch.adapters)
            run_adapted(view, thread, x, output);
        else
            write_tiles(view, thread, x, output, NoAdapters{});
        if (view.best_only == this && view.batch.keeps_logits) end_past_caches();
    }
    bool row_local() const override { return true; }
    void run_rows(const View& view, int row0, int row1, ThreadState& thread) const override {
        const Output output{row0, row1 - row0, 0, num_tiles};
        const Rows& x = view.runner.rows(*spec.rows);
        if (!view.batch.adapters) return write_tiles(view, thread, x, output, NoAdapters{});
        write_tiles(view, thread, x, output,
                    TileAdapters(view, thread, thread.block_rows, row0, {&spec.next_sites, num_tiles}));
    }

    // The output of a piece: tiles tile0 .. tile1 - 1 of rows row0 and on.
    struct Output {
        int row0, num_rows, tile0, tile1;
    };
    void run_adapted(const View& view, ThreadState& thread, const Rows& x, const Output& output) const {
        const int row0 = output.row0;
        const bool is_whole = output.num_rows == view.rows(on_samples());
        if (!is_whole) thread.block_rows.sort(view.batch.adapters, row0, row0 + output.num_rows);
        const AdapterRows& adapted =
            is_whole ? view.runner.adapted(on_samples(), view.first_sample) : thread.block_rows;
        write_tiles(view, thread, x, output, TileAdapters(view, thread, adapted, row0, {}));
    }
    // Adapters: what is to be done about those of the rows; NoAdapters where there are none.
    template <typename Adapters>
    void write_tiles(const View& view, ThreadState& thread, const Rows& x, const Output& output,
                     Adapters&& adapters) const {
        size_t part = 0;
        bool has_begun = false;
        for (int tile = output.tile0; tile < output.tile1;) {
            while (part + 1 < first.size() && tile >= first[part + 1]) part++, has_begun = false;
            if (!has_begun) adapters.begin(spec.parts[part].site, is_gated() ? spec.parts[1].site : -1);
            has_begun = true;
            const int end = part + 1 < first.size() ? std::min(output.tile1, first[part + 1]) : output.tile1;
            const bool by_columns = spec.parts[part].tiles().column_stride > 0;
            const int most = !by_columns ? 2 : output.num_rows <= kColumnRows ? kColumnTiles : kGatheredTiles;
            const TileRun tiles{tile - first[part], std::min(most, end - tile), output.row0, output.num_rows};
            by_columns ? write_columns(view, thread, x, spec.parts[part], tiles, adapters)
                       : write(view, thread, x, spec.parts[part], tiles, adapters);
            tile += tiles.count;
        }
    }

    Rows own_rows(const View& view, int rows, ThreadState& thread, int stage) const {
        Rows own = view.runner.rows(*spec.rows);
        place_rows_at(thread.rows->data(), kTile, own);
        if (thread.prepared_stage != stage) {
            for (int row = 0; row < rows; row++) spec.rows->convert(view, row, own, row);
            thread.prepared_stage = stage;
        }
        return own;
    }

    // Neighbouring tiles of a part, for rows row0 and on.
    struct TileRun {
        int tile, count, row0, num_rows;
    };
    // Multiplies a run of tiles that lies by columns, and writes their sums two by two.
    template <typename Adapters>
    void write_columns(const View& view, ThreadState& thread, const Rows& x, const LinearPart& part,
                       const TileRun& tiles, Adapters& adapters) const {
        float *sums = thread.columns[0].data(), *up_sums = thread.columns[1].data();
        const auto multiply = [&](const Tiles& w, float* to) {
            view.runner.kernels().column_products(w, tiles.tile, tiles.count, x,
                                                  spec.rows->at(view, tiles.row0), tiles.num_rows, to,
                                                  thread.product->data());
        };
        multiply(part.tiles(), sums);
        if (is_gated()) multiply(spec.parts[1].tiles(), up_sums);
        for (int i = 0; i < tiles.count; i += 2) {
            const int64_t at = static_cast<int64_t>(i) * tiles.num_rows * kTile;
            const TileRun pair{tiles.tile + i, std::min(2, tiles.count - i), tiles.row0, tiles.num_rows};
            write(view, thread, x, part, pair, adapters, sums + at, up_sums + at);
        }
    }
    // Sums of one tile or two go to the out, to the next product's rows, or to the best logit of each row.
    template <typename Adapters>
    void write(const View& view, ThreadState& thread, const Rows& x, const LinearPart& part,
               const TileRun& tiles, Adapters& adapters, float* sums = nullptr,
               float* up_sums = nullptr) const {
        const KernelTable& k = view.runner.kernels();
        const int row0 = tiles.row0, rows = tiles.num_rows, column = tiles.tile * kTile;
        const bool keeps_best = view.best_only == this, passes_on = spec.converts || keeps_best;
        float* out = passes_on ? thread.group.data() : view.at(part.out, row0) + column;
        const Product product{.weight = &part.tiles(),
                              .up = is_gated() ? &spec.parts[1].tiles() : nullptr,
                              .tile = tiles.tile,
                              .count = tiles.count,
                              .x = x,
                              .x0 = spec.rows->at(view, row0),
                              .row0 = row0,
                              .num_rows = rows,
                              .epilogue = epilogue(view, part),
                              .out = out,
                              .stride = passes_on ? kGroup : view.stride(part.out),
                              .sums = sums,
                              .up_sums = up_sums};
        multiply(k, thread, product, adapters);
        const int width = product.width();
        if (spec.converts && spec.keeps_out && view.batch.adapters)
            keep_out(view, part.out, tiles, width, out);
        if (keeps_best && view.batch.keeps_logits)
            for (int i = 0; i < rows; i++)
                copy_past_caches(out + i * kGroup, width, view.at(part.out, row0 + i) + column);
        if (spec.converts)
            k.put_rows(out, view.runner.rows(*spec.converts), spec.converts->at(view, row0), rows,
                       column / kGroup, width);
        if (keeps_best) k.keep_best(out, rows, column, width, thread.best.data() + view.first_sample + row0);
    }

    // Writes rows with an adapter to the out, which the next product's adapters read.
    void keep_out(const View& view, const Place& out, const TileRun& tiles, int width,
                  const float* from) const {
        for (int i = 0; i < tiles.num_rows; i++)
            if (view.adapter(on_samples(), tiles.row0 + i) >= 0)
                std::copy_n(from + i * kGroup, width, view.at(out, tiles.row0 + i) + tiles.tile * kTile);
    }

    Epilogue epilogue(const View& view, const LinearPart& part) const {
        Epilogue e = spec.gate.epilogue(spec.gated);
        e.bias = part.bias;
        e.up_bias = is_gated() ? static_cast<const float*>(spec.parts[1].bias) : nullptr;
        if (part.residual.width) {
            e.residual = view.at(part.residual, 0);
            e.residual_stride = view.stride(part.residual);
        }
        if (e.threshold > 0) e.is_sparse = view.sparse_rows(on_samples());
        return e;
    }
};

// -- attention --

struct AttentionStage : Stage {
    AttentionSpec spec;
    int plan_index;
    bool merges;  // the second of the two stages
    int selection;  // index of what sparse rows read; -1: all

    AttentionStage(const AttentionSpec& s, int plan, bool m, int keys)
        : spec(s), plan_index(plan), merges(m), selection(keys) {}
    // What the step's sparse rows read; null: it has none.
    const SelectedKeys* selected(const View& view) const {
        if (selection < 0) return nullptr;
        const SelectedKeys& keys = view.runner.selected(selection);
        return keys.num_rows() ? &keys : nullptr;
    }
    bool depends_on_data(const View& view) const override { return selected(view); }
    // The plan, the step and the group's place in its arrays, as the rows that choose keys make them.
    const AttentionPlan& plan(const View& view) const {
        const SelectedKeys* keys = selected(view);
        return keys ? keys->plan() : view.runner.attention_plan(plan_index);
    }
    const Batch& batch(const View& view) const {
        const SelectedKeys* keys = selected(view);
        return keys ? keys->batch() : view.batch;
    }
    int64_t first_request(const View& view) const {
        return selected(view) ? 0 : static_cast<int64_t>(spec.group) * view.batch.num_requests;
    }
    float* partials(const View& view) const {
        const SelectedKeys* keys = selected(view);
        return keys ? keys->partials() : view.runner.partials();
    }
    std::string name() const override { return merges ? "attention merge" : "attention"; }
    Cost cost(const View& view) const override {
        if (merges) return {};
        const KvGroup& kv = view.kv.group(spec.group);
        const Batch& b = view.batch;
        Cost sum;
        for (int r = 0; r < b.num_requests; r++) {
            const int context = b.context_lens[static_cast<int64_t>(spec.group) * b.num_requests + r];
            int longest = 0;
            for (int row = b.query_starts[r]; row < b.query_starts[r + 1]; row++) {
                const int last = spec.mask().full() ? context : std::min(context, b.limit(row));
                const int keys = std::max(0, last - spec.mask().first_key(b.places[row]));
                longest = std::max(longest, keys);
                sum.operations += 2.0 * keys * spec.num_heads * (kv.k_width + kv.v_width);
            }
            sum.bytes += static_cast<double>(longest) * kv.block_bytes() / kTile;
        }
        sum.bytes -=
            static_cast<double>(view.runner.attention_plan(plan_index).saved_keys) * kv.block_bytes() / kTile;
        return sum;
    }
    int pieces(const View& view) const override {
        const AttentionPlan& plan = this->plan(view);
        return merges ? static_cast<int>(plan.merged.size()) * view.kv.group(spec.group).num_heads
                      : static_cast<int>(plan.pieces.size());
    }

    void run(const View& view, int piece, ThreadState& thread, int) const override {
        const AttentionPlan& plan = this->plan(view);
        const KvLayer kv = layer(view);
        const AttentionArgs args{.q = view.at(spec.q, 0),
                                 .out = view.at(spec.out, 0),
                                 .rows = spec.converts ? &view.runner.rows(*spec.converts) : nullptr,
                                 .keeps_out = spec.keeps_out && view.batch.adapters,
                                 .q_stride = view.stride(spec.q),
                                 .out_stride = view.stride(spec.out),
                                 .kv = kv,
                                 .num_heads = spec.num_heads,
                                 .scale = spec.scale,
                                 .softcap = spec.softcap,
                                 .mask = spec.mask(),
                                 .sinks = spec.sinks,
                                 .slopes = spec.slopes,
                                 .distances = spec.distances,
                                 .reach = spec.reach()};
        AttentionPiece work;  // not zeroed: it has room for many rows, and most pieces have few
        work.places = batch(view).places;
        work.limits = batch(view).limits;
        work.num_rows = 0;
        if (merges) {
            const QueryRun& run = plan.runs[plan.merged[piece / kv.num_heads]];
            work.kv_head = piece % kv.num_heads;
            work.first_split = run.first_split;
            work.last_split = run.last_split;
            add_run(view, work, run, kv);
            return view.runner.kernels().attention_merge(args, work);
        }
        const AttentionWork& todo = plan.works[plan.pieces[piece].work];
        work.kv_head = plan.pieces[piece].kv_head;
        work.first_split = todo.first_split;
        work.last_split = todo.last_split;
        if (todo.shared) {
            const SharedRun& shared = plan.shared[todo.run];
            for (int i = 0; i < shared.num_runs; i++)
                add_run(view, work, plan.runs[plan.sharers[shared.first + i]], kv);
            work.context_len = shared.num_splits * kSplitKeys;
        } else {
            add_run(view, work, plan.runs[todo.run], kv);
        }
        work.is_prefetched = thread.prefetched_stage == this && thread.prefetched_piece == piece;
        work.ahead = view.runner.pool().goes_on(static_cast<int>(plan.pieces.size()), piece)
                         ? read_first(view, piece + 1)
                         : BlockRange{};
        if (work.ahead.last) note_prefetched(thread, piece + 1);
        if (!spec.buckets.empty()) return run_row_by_row(view, args, work, thread);
        view.runner.kernels().attention(args, work, thread.attention.data());
    }

    // Each row has biases of its own.
    void run_row_by_row(const View& view, AttentionArgs args, const AttentionPiece& work,
                        ThreadState& thread) const {
        const int share = spec.num_heads / args.kv.num_heads, length = 2 * spec.reach() + 1;
        thread.biases.resize(static_cast<size_t>(spec.num_heads) * length);
        args.distances = thread.biases.data();
        AttentionPiece one = work;
        one.num_rows = 1;
        for (int i = 0; i < work.num_rows; i++) {
            one.rows[0] = work.rows[i];
            one.ahead = i + 1 == work.num_rows ? work.ahead : BlockRange{};
            for (int head = work.kv_head * share; head < (work.kv_head + 1) * share; head++)
                add_up_biases(view, one, head, thread.biases.data() + static_cast<size_t>(head) * length);
            view.runner.kernels().attention(args, one, thread.attention.data());
            one.is_prefetched = false;
        }
    }
    // Fills the biases of the keys that the piece reads; the row of a key is that of its token.
    void add_up_biases(const View& view, const AttentionPiece& piece, int head, float* to) const {
        const int rows_a_head = spec.of_queries.width / spec.num_heads, row = piece.rows[0].row;
        const int place = view.batch.places[row];
        const int last = std::min(piece.context_len, piece.last_split * kSplitKeys);
        const float* own = view.at(spec.of_queries, row) + static_cast<int64_t>(head) * rows_a_head;
        for (int key = piece.first_split * kSplitKeys; key < last; key++) {
            const int32_t bucket = spec.buckets[spec.reach() + place - key];
            const float* its =
                view.at(spec.of_keys, row - place + key) + static_cast<int64_t>(head) * rows_a_head;
            to[spec.reach() + key - place] = spec.scale * (own[bucket] + its[bucket]);
        }
    }
    void check(const Batch& batch, const KvMemory&) const override {
        if (spec.buckets.empty()) return;
        for (int r = 0; r < batch.num_requests; r++) {
            const int row = batch.query_starts[r], rows = batch.query_starts[r + 1] - row;
            const int context = batch.context_lens[static_cast<int64_t>(spec.group) * batch.num_requests + r];
            if (rows && (batch.places[row] != 0 || context != rows || context > spec.reach() + 1))
                throw std::invalid_argument("a text of " + std::to_string(context) + " tokens, of which " +
                                            std::to_string(rows) + " are in the step, at most " +
                                            std::to_string(spec.reach() + 1) + " must be there at once");
        }
    }

    KvLayer layer(const View& view) const {
        KvLayer kv = view.kv.layer(spec.group, spec.layer);
        if (spec.latent_width) {
            kv.latent = true;
            kv.v_width = spec.latent_width;
            kv.v_padded = view.runner.attention_plan(plan_index).v_padded(view.kv.group(spec.group));
        }
        return kv;
    }
    void prefetch(const View& view, int piece, ThreadState& thread) const override {
        if (merges) return;
        const KvLayer kv = view.kv.layer(spec.group, spec.layer);
        prefetch_blocks(kv, read_first(view, piece), 0, kv.block_end());
        note_prefetched(thread, piece);
    }
    void note_prefetched(ThreadState& thread, int piece) const {
        thread.prefetched_stage = this;
        thread.prefetched_piece = piece;
    }

    // The blocks that a piece reads first.
    BlockRange read_first(const View& view, int piece) const {
        const AttentionPlan& plan = this->plan(view);
        const auto [index, kv_head] = plan.pieces[piece];
        const AttentionWork& work = plan.works[index];
        const QueryRun& run = plan.runs[work.shared ? plan.sharers[plan.shared[work.run].first] : work.run];
        return {block_table(view, run), kv_head, work.first_block, work.last_block};
    }
    const int32_t* block_table(const View& view, const QueryRun& run) const {
        const Batch& b = batch(view);
        return b.block_tables + (first_request(view) + run.request) * b.table_width;
    }

    // Adds a run's rows to a piece, with the places that the states of its splits go to.
    void add_run(const View& view, AttentionPiece& work, const QueryRun& run, const KvLayer& kv) const {
        work.block_table = block_table(view, run);
        work.context_len = batch(view).context_lens[first_request(view) + run.request];
        const int64_t row_floats = static_cast<int64_t>(spec.num_heads / kv.num_heads) * (2 + kv.v_padded);
        const int64_t split_floats = run.num_rows * row_floats;
        const int64_t splits_before =
            static_cast<int64_t>(work.kv_head) * (run.last_split - run.first_split) + work.first_split -
            run.first_split;
        const int64_t at = run.partial + splits_before * split_floats;
        for (int i = 0; i < run.num_rows; i++) {
            float* partial = run.partial < 0 ? nullptr : partials(view) + at + i * row_floats;
            work.rows[work.num_rows++] = AttentionRow{run.row0 + i, partial, split_floats};
        }
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
        const int sample = view.first_sample + piece;
        if (view.batch.late && view.batch.late[sample]) return write_none(view, sample);
        if (view.best_only) return write_best(view, sample);
        SampleArgs args = view.batch.sampling;
        args.logits = view.at(logits, 0);
        args.stride = view.stride(logits);
        args.vocab = vocab;
        args.first = view.first_sample;
        view.runner.kernels().sample_row(args, piece, thread.sampling->data());
    }
    static void write_none(const View& view, int sample) {
        view.batch.sampling.out_ids[sample] = 0;
        view.batch.sampling.out_failed[sample] = false;
    }
    static void write_best(const View& view, int sample) {
        const Best best = view.runner.best(sample);
        view.batch.sampling.out_ids[sample] = best.failed() ? 0 : best.id;
        view.batch.sampling.out_failed[sample] = best.failed();
    }
};

}  // namespace
}  // namespace octavo
