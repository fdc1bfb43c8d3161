// Attention over the KV cache.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "../runtime/step_runner.h"
#include "op.h"

namespace octavo {
namespace {

struct AttentionOp : Op {
    AttentionSpec spec;
    int plan_index;
    bool merges;  // whether this is the op that merges splits
    int selection;  // index of the key selection of sparse rows; -1: they read all keys

    AttentionOp(const AttentionSpec& s, int plan, bool m, int keys)
        : spec(s), plan_index(plan), merges(m), selection(keys) {}
    // Returns the selected keys of the step's sparse rows, or null if there are none.
    const SelectedKeys* selected(const View& view) const {
        if (selection < 0) return nullptr;
        const SelectedKeys& keys = view.runner.selected(selection);
        return keys.num_rows() ? &keys : nullptr;
    }
    bool depends_on_data(const View& view) const override { return selected(view); }
    // Plan, batch and first request of the group, with selected keys if there are any.
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
                const int keys = std::max(0, last - spec.mask().first_key(b.key_indices[row]));
                longest = std::max(longest, keys);
                sum.operations += 2.0 * keys * spec.num_heads * (kv.k_width + kv.v_width);
            }
            sum.bytes += static_cast<double>(longest) * kv.block_bytes() / kTile;
        }
        sum.bytes -=
            static_cast<double>(view.runner.attention_plan(plan_index).saved_keys) * kv.block_bytes() / kTile;
        return sum;
    }
    int num_items(const View& view) const override {
        const AttentionPlan& plan = this->plan(view);
        return merges ? static_cast<int>(plan.merged.size()) * view.kv.group(spec.group).num_heads
                      : static_cast<int>(plan.items.size());
    }

    void run(const View& view, int item, ThreadState& thread, int) const override {
        const AttentionPlan& plan = this->plan(view);
        const KvLayer kv = layer(view);
        const AttentionArgs args{
            .q = view.at(spec.q, 0),
            .out = view.at(spec.out, 0),
            .rows = spec.next_input ? &view.runner.quantized_rows(*spec.next_input) : nullptr,
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
        AttentionItem work;  // not zeroed: it has room for many rows, and most items have few
        work.key_indices = batch(view).key_indices;
        work.limits = batch(view).limits;
        work.num_rows = 0;
        if (merges) {
            const QueryRun& run = plan.runs[plan.merged[item / kv.num_heads]];
            work.kv_head = item % kv.num_heads;
            work.first_split = run.first_split;
            work.last_split = run.last_split;
            add_run(view, work, run, kv);
            return view.runner.kernels().attention_merge(args, work);
        }
        const AttentionWork& todo = plan.works[plan.items[item].work];
        work.kv_head = plan.items[item].kv_head;
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
        work.is_prefetched = thread.prefetched_op == this && thread.prefetched_item == item;
        work.next_blocks = view.runner.pool().runs_next_item(static_cast<int>(plan.items.size()), item)
                               ? first_blocks(view, item + 1)
                               : BlockRange{};
        if (work.next_blocks.last) note_prefetched(thread, item + 1);
        if (!spec.buckets.empty()) return run_row_by_row(view, args, work, thread);
        view.runner.kernels().attention(args, work, thread.attention.data());
    }

    // Computes one row at a time, each with its own biases.
    void run_row_by_row(const View& view, AttentionArgs args, const AttentionItem& work,
                        ThreadState& thread) const {
        const int share = spec.num_heads / args.kv.num_heads, length = 2 * spec.reach() + 1;
        thread.biases.resize(static_cast<size_t>(spec.num_heads) * length);
        args.distances = thread.biases.data();
        AttentionItem one = work;
        one.num_rows = 1;
        for (int i = 0; i < work.num_rows; i++) {
            one.rows[0] = work.rows[i];
            one.next_blocks = i + 1 == work.num_rows ? work.next_blocks : BlockRange{};
            for (int head = work.kv_head * share; head < (work.kv_head + 1) * share; head++)
                add_up_biases(view, one, head, thread.biases.data() + static_cast<size_t>(head) * length);
            view.runner.kernels().attention(args, one, thread.attention.data());
            one.is_prefetched = false;
        }
    }
    // Computes the biases of the keys that the item reads. The row of a key is the row of its token.
    void add_up_biases(const View& view, const AttentionItem& item, int head, float* to) const {
        const int rows_per_head = spec.of_queries.width / spec.num_heads, row = item.rows[0].row;
        const int key_index = view.batch.key_indices[row];
        const int last = std::min(item.context_len, item.last_split * kSplitKeys);
        const float* own = view.at(spec.of_queries, row) + static_cast<int64_t>(head) * rows_per_head;
        for (int key = item.first_split * kSplitKeys; key < last; key++) {
            const int32_t bucket = spec.buckets[spec.reach() + key_index - key];
            const float* its =
                view.at(spec.of_keys, row - key_index + key) + static_cast<int64_t>(head) * rows_per_head;
            to[spec.reach() + key - key_index] = spec.scale * (own[bucket] + its[bucket]);
        }
    }
    void check(const Batch& batch, const KvMemory&) const override {
        if (spec.buckets.empty()) return;
        for (int r = 0; r < batch.num_requests; r++) {
            const int row = batch.query_starts[r], rows = batch.query_starts[r + 1] - row;
            const int context = batch.context_lens[static_cast<int64_t>(spec.group) * batch.num_requests + r];
            if (rows && (batch.key_indices[row] != 0 || context != rows || context > spec.reach() + 1))
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
    void prefetch(const View& view, int item, ThreadState& thread) const override {
        if (merges) return;
        const KvLayer kv = view.kv.layer(spec.group, spec.layer);
        prefetch_blocks(kv, first_blocks(view, item), 0, kv.block_end());
        note_prefetched(thread, item);
    }
    void note_prefetched(ThreadState& thread, int item) const {
        thread.prefetched_op = this;
        thread.prefetched_item = item;
    }

    // Returns the blocks that an item reads first.
    BlockRange first_blocks(const View& view, int item) const {
        const AttentionPlan& plan = this->plan(view);
        const auto [index, kv_head] = plan.items[item];
        const AttentionWork& work = plan.works[index];
        const QueryRun& run = plan.runs[work.shared ? plan.sharers[plan.shared[work.run].first] : work.run];
        return {block_table(view, run), kv_head, work.first_block, work.last_block};
    }
    const int32_t* block_table(const View& view, const QueryRun& run) const {
        const Batch& b = batch(view);
        return b.block_tables + (first_request(view) + run.request) * b.table_width;
    }

    // Adds a run's rows to an item, with the addresses for the states of their splits.
    void add_run(const View& view, AttentionItem& work, const QueryRun& run, const KvLayer& kv) const {
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

}  // namespace
}  // namespace octavo
