// Ops that select the keys that sparse rows of a layer read (AttentionOp).
#pragma once

#include <stdexcept>
#include <string>

#include "../runtime/key_selection.h"
#include "../runtime/step_runner.h"
#include "op.h"

namespace octavo {
namespace {

// Computes the attention weight of each block, for each sparse row and KV head.
struct BlockMassOp : Op {
    KeySelection spec;
    int num_heads;  // of queries
    float scale;
    int selection;  // index
    BlockMassOp(const AttentionSpec& s, const KeySelection& chosen, int keys)
        : spec(chosen), num_heads(s.num_heads), scale(s.scale), selection(keys) {}
    std::string name() const override { return "keys weighed"; }
    Cost cost(const View& view) const override {
        const KvGroup& kv = view.kv.group(spec.group);
        const SelectedKeys& selected = view.runner.selected(selection);
        double keys = 0;
        for (int i = 0; i < selected.num_rows(); i++) keys += selected.row(i).num_keys;
        return {keys * static_cast<double>(kv.block_bytes()) / kTile, 2.0 * keys * num_heads * kv.k_width};
    }
    int num_items(const View& view) const override {
        return view.runner.selected(selection).num_rows() * view.kv.group(spec.group).num_heads;
    }
    void run(const View& view, int item, ThreadState& thread, int) const override {
        const KvLayer kv = view.kv.layer(spec.group, spec.layer);
        SelectedKeys& selected = view.runner.selected(selection);
        const int index = item / kv.num_heads, head = item % kv.num_heads, lanes = num_heads / kv.num_heads;
        const SelectedKeys::Row& row = selected.row(index);
        const size_t needed = static_cast<size_t>(row.num_keys + kTile - 1) / kTile * kTile;
        if (thread.scores.size() < needed) thread.scores.resize(needed);
        view.runner.kernels().block_masses(
            BlockMassArgs{.kv = kv,
                          .block_table = block_table_at(view.batch, row.request),
                          .kv_head = head,
                          .num_keys = row.num_keys,
                          .q = view.at(spec.q, row.row) + static_cast<int64_t>(head) * lanes * kv.k_width,
                          .num_lanes = lanes,
                          .scale = scale,
                          .scores = thread.scores.data(),
                          .masses = selected.masses(index, head)});
    }
    const int32_t* block_table_at(const Batch& batch, int request) const {
        return batch.block_tables +
               (static_cast<int64_t>(spec.group) * batch.num_requests + request) * batch.table_width;
    }
    void check(const Batch& batch, const KvMemory& kv) const override {
        const KvGroup& group = kv.group(spec.group);
        if (has_scales(group.type)) throw std::invalid_argument("partial keys with scales");
        if (spec.q.width != num_heads * group.k_width)
            throw std::invalid_argument("partial queries of another width than their keys");
        for (int r = 0; r < batch.num_requests; r++) {
            const int context = batch.context_lens[static_cast<int64_t>(spec.group) * batch.num_requests + r];
            for (int b = 0; b < (context + kTile - 1) / kTile; b++)
                if (b >= batch.table_width || !kv.has_block(spec.group, block_table_at(batch, r)[b]))
                    throw std::invalid_argument("a block of partial keys is outside the KV memory");
        }
    }
};

// Selects the blocks, plans the attention over them, and reads those that are not in memory from the spill
// file.
struct SelectKeysOp : Op {
    int group, layer;  // of the attention
    int selection;  // index
    SelectKeysOp(const AttentionSpec& spec, int keys)
        : group(spec.group), layer(spec.layer), selection(keys) {}
    std::string name() const override { return "keys chosen"; }
    int num_items(const View& view) const override {
        return view.runner.selected(selection).num_rows() || view.kv.spill(group) ? 1 : 0;
    }
    void run(const View& view, int, ThreadState&, int) const override {
        SelectedKeys& selected = view.runner.selected(selection);
        if (selected.num_rows()) selected.select(view.kv, view.runner.pool().num_threads());
        if (KvSpill* spill = view.kv.spill(group); spill && spill->spills(layer))
            spill->request(layer, selected.blocks_read());
    }
};

// Prefetches the blocks that the next layer is predicted to select, while this layer computes.
struct PrefetchKeysOp : Op {
    int group, layer;  // of the next attention
    int selection;  // index
    PrefetchKeysOp(const AttentionSpec& spec, int keys)
        : group(spec.group), layer(spec.ahead_layer), selection(keys) {}
    std::string name() const override { return "prefetch keys"; }
    int num_items(const View& view) const override {
        const KvSpill* spill = view.kv.spill(group);
        return view.runner.selected(selection).num_rows() && spill && spill->spills(layer) ? 1 : 0;
    }
    void run(const View& view, int, ThreadState&, int) const override {
        view.kv.spill(group)->prefetch(layer, view.runner.selected(selection).blocks_by_mass());
    }
};

}  // namespace
}  // namespace octavo
