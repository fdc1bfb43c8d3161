// The stages that choose which keys the sparse rows of a layer read; AttentionStage (stages.h) reads them.
#pragma once

#include <stdexcept>
#include <string>

#include "key_selection.h"
#include "stages.h"

namespace octavo {
namespace {

// The share of attention of each block, for each sparse row and kv head.
struct BlockMassStage : Stage {
    KeySelection spec;
    int num_heads;  // of queries
    float scale;
    SelectedKeys& selected;
    BlockMassStage(const AttentionSpec& s, SelectedKeys& keys)
        : spec(s.selection), num_heads(s.num_heads), scale(s.scale), selected(keys) {}
    std::string name() const override { return "keys weighed"; }
    bool on_samples() const override { return false; }
    Cost cost(const View& view) const override {
        const KvGroup& kv = view.kv.group(spec.group);
        double keys = 0;
        for (int i = 0; i < selected.num_rows(); i++) keys += selected.row(i).num_keys;
        return {keys * (double)kv.block_bytes() / kTile, 2.0 * keys * num_heads * kv.k_width};
    }
    int pieces(const View& view) const override {
        return selected.num_rows() * view.kv.group(spec.group).num_heads;
    }
    void run(const View& view, int piece, ThreadState& thread, int) const override {
        const KvLayer kv = view.kv.layer(spec.group, spec.layer);
        const int index = piece / kv.num_heads, head = piece % kv.num_heads, lanes = num_heads / kv.num_heads;
        const SelectedKeys::Row& row = selected.row(index);
        const size_t needed = (size_t)(row.num_keys + kTile - 1) / kTile * kTile;
        if (thread.scores.size() < needed) thread.scores.resize(needed);
        view.executor.kernels().block_masses(
            BlockMassArgs{.kv = kv,
                          .block_table = table_of(view.batch, row.request),
                          .kv_head = head,
                          .num_keys = row.num_keys,
                          .q = view.at(spec.q, row.row) + (int64_t)head * lanes * kv.k_width,
                          .num_lanes = lanes,
                          .scale = scale,
                          .scores = thread.scores.data(),
                          .masses = selected.masses(index, head)});
    }
    const int32_t* table_of(const Batch& batch, int request) const {
        return batch.block_tables + ((int64_t)spec.group * batch.num_requests + request) * batch.table_width;
    }
    void check(const Batch& batch, const KvMemory& kv) const override {
        const KvGroup& group = kv.group(spec.group);
        if (group.type == KvType::int8) throw std::invalid_argument("partial keys of 8 bits");
        if (spec.q.width != num_heads * group.k_width)
            throw std::invalid_argument("partial queries of another width than their keys");
        for (int r = 0; r < batch.num_requests; r++) {
            const int context = batch.context_lens[(int64_t)spec.group * batch.num_requests + r];
            for (int b = 0; b < (context + kTile - 1) / kTile; b++)
                if (b >= batch.table_width || !kv.has_block(spec.group, table_of(batch, r)[b]))
                    throw std::invalid_argument("a block of partial keys is outside the KV memory");
        }
    }
};

// The choice, and the plan of the attention over what was chosen.
struct ChooseKeysStage : Stage {
    SelectedKeys& selected;
    explicit ChooseKeysStage(SelectedKeys& keys) : selected(keys) {}
    std::string name() const override { return "keys chosen"; }
    bool on_samples() const override { return false; }
    int pieces(const View&) const override { return selected.num_rows() ? 1 : 0; }
    void run(const View& view, int, ThreadState&, int) const override {
        selected.choose(view.kv, view.executor.pool().num_threads());
    }
};

}  // namespace
}  // namespace octavo
