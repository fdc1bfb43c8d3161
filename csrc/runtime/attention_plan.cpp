#include "attention_plan.h"

#include <algorithm>

namespace octavo {

namespace {

constexpr int kSplitBlocks = kSplitKeys / kTile;
// Target number of items per thread: more items make the threads finish more evenly.
constexpr int kItemsPerThread = 8;

}  // namespace

void AttentionPlan::make(const Batch& batch, const KvGroup& kv, int threads, bool share) {
    const int rows_per_run = choose_rows_per_run(batch, kv, threads);
    make_runs(batch, rows_per_run);
    sharers.clear();
    shared.clear();
    saved_keys = 0;
    if (share && rows_per_run > 1 && runs.size() > 1) share_prefixes(batch, rows_per_run);
    make_works(kv, threads);
    order_items(kv);
}

// Returns the rows of one set of lanes, or of kMaxSets sets if there are enough items then: the sets of an
// item read their keys from memory only once.
int AttentionPlan::choose_rows_per_run(const Batch& batch, const KvGroup& kv, int threads) const {
    const int rows_per_set = kMaxLanes / (num_heads / kv.num_heads), rows = rows_per_set * kMaxSets;
    int64_t items = 0;
    for (int r = 0; r < batch.num_requests; r++)
        items += (batch.query_starts[r + 1] - batch.query_starts[r] + rows - 1) / rows;
    return items * kv.num_heads < static_cast<int64_t>(kItemsPerThread) * threads ? rows_per_set : rows;
}

// Returns one past the last key that any of the rows attends to under a causal mask.
int AttentionPlan::last_limit(const Batch& batch, int row, int last_row) {
    int limit = batch.limit(last_row);
    for (; batch.limits && row < last_row; row++) limit = std::max(limit, batch.limit(row));
    return limit;
}

void AttentionPlan::make_runs(const Batch& batch, int rows_per_run) {
    runs.clear();
    for (int r = 0; r < batch.num_requests; r++) {
        const int context = batch.context_lens[static_cast<int64_t>(group) * batch.num_requests + r];
        for (int row = batch.query_starts[r]; row < batch.query_starts[r + 1]; row += rows_per_run) {
            const int last_row = std::min(row + rows_per_run, batch.query_starts[r + 1]) - 1;
            if (context <= 0 || batch.key_indices[last_row] < 0) continue;
            const int last_key = mask.full() ? context : std::min(context, last_limit(batch, row, last_row));
            const int first_key = mask.first_key(batch.key_indices[row]);
            const int first_split = first_key / kSplitKeys;
            runs.push_back(QueryRun{r, row, last_row - row + 1, first_key, last_key, first_split, first_split,
                                    (last_key + kSplitKeys - 1) / kSplitKeys});
        }
    }
}

// Lets requests that consist of a single run share their first splits; requests with more rows fill their
// lanes themselves. All rows of a sharer attend to every key of the splits that it may share.
void AttentionPlan::share_prefixes(const Batch& batch, int rows_per_run) {
    std::vector<Sharer> found;
    for (int i = 0; i < static_cast<int>(runs.size()); i++) {
        const QueryRun& run = runs[i];
        if (run.num_rows != batch.query_starts[run.request + 1] - batch.query_starts[run.request]) continue;
        const int64_t request = static_cast<int64_t>(group) * batch.num_requests + run.request;
        const int context = batch.context_lens[request],
                  last = batch.key_indices[run.row0 + run.num_rows - 1];
        const int visible = mask.full() ? context : std::min(context, batch.key_indices[run.row0] + 1);
        if (visible < kSplitKeys || mask.first_key(last) > 0) continue;
        found.push_back(Sharer{i, visible / kSplitKeys, batch.block_tables + request * batch.table_width});
    }
    std::sort(found.begin(), found.end(), [](const Sharer& a, const Sharer& b) {
        return std::lexicographical_compare(a.table, a.table + a.splits * kSplitBlocks, b.table,
                                            b.table + b.splits * kSplitBlocks);
    });
    std::vector<Division> divisions;
    divide(found, 0, found.size(), divisions);
    for (const Division& division : divisions) pack(found, division, rows_per_run);
}

// Returns the number of whole splits that two block tables have in common at their start.
int AttentionPlan::common(const Sharer& a, const Sharer& b) {
    const int32_t* end = a.table + std::min(a.splits, b.splits) * kSplitBlocks;
    return static_cast<int>(std::mismatch(a.table, end, b.table).first - a.table) / kSplitBlocks;
}

// Divides sorted sharers so that the fewest splits are read: either all share their common prefix, or each
// part with a longer common prefix shares by itself. Returns the number of split reads that this saves.
int64_t AttentionPlan::divide(const std::vector<Sharer>& sharers, size_t first, size_t last,
                              std::vector<Division>& out) {
    if (last - first < 2) return 0;
    const int splits = common(sharers[first], sharers[last - 1]);
    const int64_t together = static_cast<int64_t>(last - first - 1) * splits;
    std::vector<Division> parts;
    int64_t separately = 0;
    for (size_t i = first, j; i < last; i = j) {
        for (j = i + 1; j < last && common(sharers[i], sharers[j]) > splits;) j++;
        separately += divide(sharers, i, j, parts);
    }
    if (together > 0 && together >= separately) {
        out.push_back(Division{first, last, splits});
        return together;
    }
    out.insert(out.end(), parts.begin(), parts.end());
    return separately;
}

void AttentionPlan::pack(const std::vector<Sharer>& all, const Division& division, int rows_per_run) {
    for (size_t i = division.first, j; i < division.last; i = j) {
        int rows = runs[all[i].run].num_rows;
        for (j = i + 1; j < division.last && rows + runs[all[j].run].num_rows <= rows_per_run; j++)
            rows += runs[all[j].run].num_rows;
        if (j - i < 2) continue;
        shared.push_back(
            SharedRun{static_cast<int>(sharers.size()), static_cast<int>(j - i), division.splits});
        saved_keys += static_cast<int64_t>(j - i - 1) * division.splits * kSplitKeys;
        for (size_t k = i; k < j; k++) {
            sharers.push_back(all[k].run);
            runs[all[k].run].own_split = division.splits;
        }
    }
}

// Divides runs into works. A run with more splits than an item's share is cut into parts of a few splits.
void AttentionPlan::make_works(const KvGroup& kv, int threads) {
    int64_t all = 0;
    for (const SharedRun& run : shared) all += run.num_splits;
    for (const QueryRun& run : runs) all += run.last_split - run.own_split;
    const int64_t share = std::max<int64_t>(
        1, threads == 1 ? all : all * kv.num_heads / (static_cast<int64_t>(kItemsPerThread) * threads));
    works.clear();
    merged.clear();
    partial_floats = 0;
    const auto add = [&](bool is_shared, int run, int first, int last) {
        const int64_t parts = (last - first + share - 1) / share;
        for (int64_t i = 0; i < parts; i++) {
            const int split0 = first + static_cast<int>(i * (last - first) / parts);
            const int split1 = first + static_cast<int>((i + 1) * (last - first) / parts);
            int block0 = split0 * kSplitBlocks, block1 = block0 + kSplitBlocks;
            if (!is_shared) {
                block0 = std::max(block0, runs[run].first_key / kTile);
                block1 = std::min(block1, (runs[run].last_key + kTile - 1) / kTile);
            }
            works.push_back(AttentionWork{is_shared, run, split0, split1, block0, block1});
        }
        return parts;
    };
    for (size_t i = 0; i < shared.size(); i++) add(true, static_cast<int>(i), 0, shared[i].num_splits);
    for (size_t i = 0; i < runs.size(); i++) {
        QueryRun& run = runs[i];
        const int64_t parts = add(false, static_cast<int>(i), run.own_split, run.last_split);
        if (parts <= 1 && run.own_split == run.first_split) continue;
        run.partial = static_cast<int64_t>(partial_floats);
        merged.push_back(static_cast<int>(i));
        partial_floats += static_cast<size_t>(run.last_split - run.first_split) * run.num_rows * num_heads *
                          (2 + v_padded(kv));
    }
}

// Orders items by request, so that a thread gets rows that it has computed before, and within a request by
// KV head, so that the keys that works of a head share stay in the cache. With heads on NUMA nodes, by KV head
// first: each node has as many threads, so that the items of its heads are those of its threads.
void AttentionPlan::order_items(const KvGroup& kv) {
    items.clear();
    const auto request = [&](const AttentionWork& w) { return w.shared ? -1 : runs[w.run].request; };
    for (int i = 0, end, count = static_cast<int>(works.size()); i < count; i = end) {
        for (end = i + 1; end < count && (kv.by_heads || request(works[end]) == request(works[i]));) end++;
        for (int head = 0; head < kv.num_heads; head++)
            for (int work = i; work < end; work++) items.push_back(HeadWork{work, head});
    }
}

}  // namespace octavo
