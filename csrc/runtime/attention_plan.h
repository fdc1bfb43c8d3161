// How a step's attention over one cache group and mask is divided into work items. The plan is the same for
// all layers.
//
// Requests whose block tables start with the same blocks read them together (ChunkAttention, Ye et al.
// 2024): whole splits of 256 keys that all their rows attend to, for up to kMaxSets sets of lanes at a
// time. The states of such a row's splits are written to memory, shared ones by one item and its own by
// another, and a second op merges them from left to right, as a single item does. So the results are
// bitwise equal.
#pragma once

#include <vector>

#include "step.h"

namespace octavo {

// Neighbouring rows of one request that are computed together. Splits first_split .. own_split - 1 are
// shared with other requests.
struct QueryRun {
    int request, row0, num_rows, first_key, last_key, first_split, own_split, last_split;
    // Offset of its states [kv heads][splits][lanes][2 + v_padded] in the partials, in floats; -1: it has
    // none.
    int64_t partial = -1;
};

// Runs of several requests, sharers[first] and on, that start with the same `num_splits` splits.
struct SharedRun {
    int first, num_runs, num_splits;
};

// Some splits of a run, or of a shared run, for one KV head. Blocks first_block .. last_block - 1 are read
// first.
struct AttentionWork {
    bool shared;
    int run, first_split, last_split, first_block, last_block;
};

struct HeadWork {
    int work, kv_head;
};

// Attentions of the same shape have the same plan.
struct AttentionShape {
    int group, num_heads;
    Mask mask;
    int latent_width = 0;  // width of values that are stored in the keys; 0: separate values
    bool operator==(const AttentionShape&) const = default;
};

struct AttentionPlan : AttentionShape {
    explicit AttentionPlan(const AttentionShape& shape) : AttentionShape(shape) {}
    std::vector<QueryRun> runs;
    std::vector<int> sharers;  // indices of runs, grouped by shared run
    std::vector<SharedRun> shared;
    std::vector<AttentionWork> works;
    std::vector<HeadWork> items;  // every work for every KV head
    std::vector<int> merged;  // runs with partials
    size_t partial_floats = 0;
    int64_t saved_keys = 0;  // keys per KV head that are not read again because they are shared

    void make(const Batch& batch, const KvGroup& kv, int threads, bool share);
    int v_padded(const KvGroup& kv) const {
        return latent_width ? (latent_width + kTile - 1) / kTile * kTile : kv.v_padded();
    }

  private:
    struct Sharer {
        int run, splits;
        const int32_t* table;
    };
    struct Division {
        size_t first, last;
        int splits;
    };
    static int last_limit(const Batch& batch, int row, int last_row);
    void make_runs(const Batch& batch, int rows_per_run);
    void share_prefixes(const Batch& batch, int rows_per_run);
    void pack(const std::vector<Sharer>& sharers, const Division& division, int rows_per_run);
    int choose_rows_per_run(const Batch& batch, const KvGroup& kv, int threads) const;
    void make_works(const KvGroup& kv, int threads);
    void order_items(const KvGroup& kv);
    static int common(const Sharer& a, const Sharer& b);
    static int64_t divide(const std::vector<Sharer>& sharers, size_t first, size_t last,
                          std::vector<Division>& out);
};

}  // namespace octavo
