// Matmuls with packed weights, and the linear op: all its parts, with adapters and epilogue.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "../runtime/non_temporal.h"
#include "../runtime/step_runner.h"
#include "adapter_ops.h"
#include "op.h"

namespace octavo {
namespace {

// One tile of a weight, or two neighbouring tiles, times some rows. `up`: the up projection of a gate.
struct TileMatmul {
    const Tiles *weight, *up;
    int tile, count;
    const QuantizedRows& x;
    int64_t x0;
    int row0, num_rows;
    Epilogue epilogue;
    float* out;
    int64_t stride;
    // Sums computed before, [count][num_rows][16]; null: to be computed.
    float *sums = nullptr, *up_sums = nullptr;
    int column() const { return tile * kTile; }
    int width() const { return std::min(count * kTile, weight->num_rows - column()); }
};

// Calls update.prefetch_list(tile, count) for the ranges to prefetch during the matmul, and update.add with
// the sums before the epilogue. `of_up`: of the up projection.
template <typename Update>
void multiply(const KernelTable& k, ThreadState& thread, const TileMatmul& p, Update&& update) {
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
            const PrefetchList prefetch = update.prefetch_list(p.tile + i, 1);
            const TileRef refs[2] = {{p.weight, p.tile + i, acc, &prefetch}, {p.up, p.tile + i, other}};
            k.tile_matmul(refs, 2, p.x, p.x0, p.num_rows, thread.matmul_scratch->data());
            update.add(p.tile + i, 1, &refs[0].acc, false);
            update.add(p.tile + i, 1, &refs[1].acc, true);
            finish(i, acc, other);
        }
    } else {
        const PrefetchList prefetch = update.prefetch_list(p.tile, p.count);
        const TileRef refs[2] = {{p.weight, p.tile, acc, &prefetch}, {p.weight, p.tile + 1, other}};
        k.tile_matmul(refs, p.count, p.x, p.x0, p.num_rows, thread.matmul_scratch->data());
        float* const sums[2] = {acc, other};
        update.add(p.tile, p.count, sums, false);
        for (int i = 0; i < p.count; i++) finish(i, sums[i], nullptr);
    }
}

struct NoUpdate {
    PrefetchList prefetch_list(int, int) const { return {}; }
    void add(int, int, float* const*, bool) const {}
};
void multiply(const KernelTable& k, ThreadState& thread, const TileMatmul& p) {
    multiply(k, thread, p, NoUpdate{});
}

struct LinearOp : Op {
    LinearSpec spec;
    std::vector<int> first;  // first tile of each part among all tiles of the op
    int num_tiles = 0;

    explicit LinearOp(LinearSpec s) : spec(std::move(s)) {
        const size_t counted = is_gated() ? 1 : spec.parts.size();
        for (size_t i = 0; i < counted; i++) {
            first.push_back(num_tiles);
            num_tiles += spec.parts[i].tiles().num_tiles();
        }
    }
    bool is_gated() const { return spec.gated; }
    bool on_samples() const override { return spec.input->x.on_samples(); }
    std::string name() const override {
        return "linear " + std::to_string(spec.input->x.width) + " to " +
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
            sum.operations += 2.0 * w.num_rows * w.num_inputs * view.num_rows(on_samples());
        }
        return sum;
    }

    int row_blocks(int rows) const { return (rows + kRowBlock - 1) / kRowBlock; }
    // Whether a weight is stored by columns; a thread then computes as long runs of tiles as possible.
    bool is_by_columns() const {
        return std::any_of(spec.parts.begin(), spec.parts.end(),
                           [](const LinearPart& part) { return part.tiles().column_stride > 0; });
    }
    int tiles_per_item(int threads) const {
        if (!is_by_columns()) return even_tiles_per_item(num_tiles, threads);
        const int each = (num_tiles + threads - 1) / threads;
        return std::max((each + 3) / 4 * 4, 4);
    }
    int num_items(const View& view) const override {
        const int chunk = tiles_per_item(view.runner.pool().num_threads());
        return row_blocks(view.num_rows(on_samples())) * ((num_tiles + chunk - 1) / chunk);
    }
    Span weights_to_prefetch(const View& view, int thread) const override {
        const ThreadPool& pool = view.runner.pool();
        const int threads = pool.num_threads(), chunk = tiles_per_item(threads);
        if (is_by_columns()) return {};
        const int tile = std::min(num_tiles, pool.first_item(num_items(view), thread) * chunk),
                  end = std::min(num_tiles, tile + num_tiles / threads);
        size_t part = 0;
        while (part + 1 < first.size() && tile >= first[part + 1]) part++;
        const Tiles& w = spec.parts[part].tiles();
        return {w.tile(tile - first[part]), w.tile(std::min(end - first[part], w.num_tiles()))};
    }

    void run(const View& view, int item, ThreadState& thread, int op_index) const override {
        const int rows = view.num_rows(on_samples());
        const int chunk = tiles_per_item(view.runner.pool().num_threads());
        const int chunks = (num_tiles + chunk - 1) / chunk;
        const int row0 = item / chunks * kRowBlock, tile0 = item % chunks * chunk;
        const bool quantizes_own = rows <= kFewRows && spec.input->area == RowArea::prepared;
        const QuantizedRows x = quantizes_own ? quantize_own_rows(view, rows, thread, op_index)
                                              : view.runner.quantized_rows(*spec.input);
        const Output output{row0, std::min(kRowBlock, rows - row0), tile0,
                            std::min(num_tiles, tile0 + chunk)};
        if (view.batch.adapters)
            run_adapted(view, thread, x, output);
        else
            write_tiles(view, thread, x, output, NoAdapters{});
        if (view.argmax_op == this && view.batch.keeps_logits) fence_non_temporal();
    }
    bool row_local() const override { return true; }
    void run_rows(const View& view, int row0, int row1, ThreadState& thread) const override {
        const Output output{row0, row1 - row0, 0, num_tiles};
        const QuantizedRows& x = view.runner.quantized_rows(*spec.input);
        if (!view.batch.adapters) return write_tiles(view, thread, x, output, NoAdapters{});
        write_tiles(
            view, thread, x, output,
            TileAdapters(view, thread, thread.block_adapter_rows, row0, {&spec.next_sites, num_tiles}));
    }

    // Output of an item: tiles tile0 .. tile1 - 1 of rows row0 and on.
    struct Output {
        int row0, num_rows, tile0, tile1;
    };
    void run_adapted(const View& view, ThreadState& thread, const QuantizedRows& x,
                     const Output& output) const {
        const int row0 = output.row0;
        const bool is_all_rows = output.num_rows == view.num_rows(on_samples());
        if (!is_all_rows) thread.block_adapter_rows.sort(view.batch.adapters, row0, row0 + output.num_rows);
        const AdapterRows& adapted = is_all_rows ? view.runner.adapter_rows(on_samples(), view.first_sample)
                                                 : thread.block_adapter_rows;
        write_tiles(view, thread, x, output, TileAdapters(view, thread, adapted, row0, {}));
    }
    // Adapters: TileAdapters, or NoAdapters if no row has one.
    template <typename Adapters>
    void write_tiles(const View& view, ThreadState& thread, const QuantizedRows& x, const Output& output,
                     Adapters&& adapters) const {
        size_t part = 0;
        bool has_begun = false;
        for (int tile = output.tile0; tile < output.tile1;) {
            while (part + 1 < first.size() && tile >= first[part + 1]) part++, has_begun = false;
            if (!has_begun) adapters.begin(spec.parts[part].site, is_gated() ? spec.parts[1].site : -1);
            has_begun = true;
            const int end = part + 1 < first.size() ? std::min(output.tile1, first[part + 1]) : output.tile1;
            const bool by_columns = spec.parts[part].tiles().column_stride > 0;
            const int max_tiles = !by_columns                      ? 2
                                  : output.num_rows <= kColumnRows ? kColumnTiles
                                                                   : kGatheredTiles;
            const TileRun tiles{tile - first[part], std::min(max_tiles, end - tile), output.row0,
                                output.num_rows};
            by_columns ? write_columns(view, thread, x, spec.parts[part], tiles, adapters)
                       : write(view, thread, x, spec.parts[part], tiles, adapters);
            tile += tiles.count;
        }
    }

    QuantizedRows quantize_own_rows(const View& view, int rows, ThreadState& thread, int op_index) const {
        QuantizedRows own = view.runner.quantized_rows(*spec.input);
        set_rows_memory(thread.own_rows->data(), kTile, own);
        if (thread.prepared_op != op_index) {
            for (int row = 0; row < rows; row++) spec.input->convert(view, row, own, row);
            thread.prepared_op = op_index;
        }
        return own;
    }

    // Neighbouring tiles of a part, for rows row0 and on.
    struct TileRun {
        int tile, count, row0, num_rows;
    };
    // Multiplies a run of tiles stored by columns and writes their sums in pairs.
    template <typename Adapters>
    void write_columns(const View& view, ThreadState& thread, const QuantizedRows& x, const LinearPart& part,
                       const TileRun& tiles, Adapters& adapters) const {
        float *sums = thread.columns[0].data(), *up_sums = thread.columns[1].data();
        const auto multiply = [&](const Tiles& w, float* to) {
            view.runner.kernels().column_matmul(w, tiles.tile, tiles.count, x,
                                                spec.input->at(view, tiles.row0), tiles.num_rows, to,
                                                thread.matmul_scratch->data());
        };
        multiply(part.tiles(), sums);
        if (is_gated()) multiply(spec.parts[1].tiles(), up_sums);
        for (int i = 0; i < tiles.count; i += 2) {
            const int64_t at = static_cast<int64_t>(i) * tiles.num_rows * kTile;
            const TileRun pair{tiles.tile + i, std::min(2, tiles.count - i), tiles.row0, tiles.num_rows};
            write(view, thread, x, part, pair, adapters, sums + at, up_sums + at);
        }
    }
    // Writes the sums of one or two tiles to the output, to the next matmul's input, or to the best logit
    // of each row.
    template <typename Adapters>
    void write(const View& view, ThreadState& thread, const QuantizedRows& x, const LinearPart& part,
               const TileRun& tiles, Adapters& adapters, float* sums = nullptr,
               float* up_sums = nullptr) const {
        const KernelTable& k = view.runner.kernels();
        const int row0 = tiles.row0, rows = tiles.num_rows, column = tiles.tile * kTile;
        const bool keeps_best = view.argmax_op == this, passes_on = spec.next_input || keeps_best;
        float* out = passes_on ? thread.group.data() : view.at(part.out, row0) + column;
        const TileMatmul matmul{.weight = &part.tiles(),
                                .up = is_gated() ? &spec.parts[1].tiles() : nullptr,
                                .tile = tiles.tile,
                                .count = tiles.count,
                                .x = x,
                                .x0 = spec.input->at(view, row0),
                                .row0 = row0,
                                .num_rows = rows,
                                .epilogue = epilogue(view, part),
                                .out = out,
                                .stride = passes_on ? kGroup : view.stride(part.out),
                                .sums = sums,
                                .up_sums = up_sums};
        multiply(k, thread, matmul, adapters);
        const int width = matmul.width();
        if (spec.next_input && spec.keeps_out && view.batch.adapters)
            keep_out(view, part.out, tiles, width, out);
        if (keeps_best && view.batch.keeps_logits)
            for (int i = 0; i < rows; i++)
                copy_non_temporal(out + i * kGroup, width, view.at(part.out, row0 + i) + column);
        if (spec.next_input)
            k.quantize_group(out, view.runner.quantized_rows(*spec.next_input),
                             spec.next_input->at(view, row0), rows, column / kGroup, width);
        if (keeps_best)
            k.update_best(out, rows, column, width, thread.best.data() + view.first_sample + row0);
    }

    // Writes the rows with an adapter to the output, which the next op's adapters read.
    void keep_out(const View& view, const ValueSlice& out, const TileRun& tiles, int width,
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

}  // namespace
}  // namespace octavo
