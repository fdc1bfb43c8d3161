// How a step's attention over one cache group (and mask) is cut into pieces; the same for all its layers.
//
// Requests whose block tables begin with the same blocks read these together (ChunkAttention, Ye et al.
// 2024): whole splits of 256 keys that all their rows see, up to kMaxSets sets of lanes at a time. Such a
// row's states of splits go to memory, the shared ones from one piece, its own from another, and a second
// stage merges them left to right, as a piece by itself does. So the results are the same, bit for bit.
#pragma once

#include <vector>

#include "step.h"

namespace octavo {

// Neighbouring rows of one request that are attended together. Splits first_split .. own_split - 1 are shared
// with other requests.
struct QueryRun {
    int request, row0, num_rows, first_key, last_key, first_split, own_split, last_split;
    // Place of its states [kv heads][splits][lanes][2 + v_padded] among the partials, in floats; -1: it has
    // none.
    int64_t partial = -1;
};

// Runs of several requests, sharers[first] and on, that begin with the same `num_splits` splits.
struct SharedRun {
    int first, num_runs, num_splits;
};

// One thread's work for one kv head: some splits of a run, or of a shared run. It reads blocks first_block ..
// last_block - 1 first.
struct AttentionWork {
    bool shared;
    int run, first_split, last_split, first_block, last_block;
};

struct HeadWork {
    int work, kv_head;
};

// What attentions that are cut alike have in common.
struct AttentionShape {
    int group, num_heads;
    Mask mask;
    int latent_width = 0;  // of values that lie in the keys; 0: there are none such
    bool operator==(const AttentionShape&) const = default;
};

struct AttentionPlan : AttentionShape {
    explicit AttentionPlan(const AttentionShape& shape) : AttentionShape(shape) {}
    std::vector<QueryRun> runs;
    std::vector<int> sharers;  // indices of runs, grouped by shared run
    std::vector<SharedRun> shared;
    std::vector<AttentionWork> works;
    std::vector<HeadWork> pieces;  // every work for every kv head
    std::vector<int> merged;  // runs with partials
    size_t partial_floats = 0;
    int64_t saved_keys = 0;  // keys of each kv head that need not be read since they are shared

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
    void make_runs(const Batch& batch, int rows_a_run);
    void share_prefixes(const Batch& batch, int rows_a_run);
    void pack(const std::vector<Sharer>& sharers, const Division& division, int rows_a_run);
    int choose_rows_a_run(const Batch& batch, const KvGroup& kv, int threads) const;
    void make_works(const KvGroup& kv, int threads);
    void order_pieces(int num_kv_heads);
    static int common(const Sharer& a, const Sharer& b);
    static int64_t divide(const std::vector<Sharer>& sharers, size_t first, size_t last,
                          std::vector<Division>& out);
};

}  // namespace octavo
