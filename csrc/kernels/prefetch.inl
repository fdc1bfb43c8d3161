// Prefetching of weights by matmuls.
#pragma once
#include <algorithm>

#include "../simd/dots.h"
#include "table.h"

namespace octavo {
namespace {

// Weights are read once per step. The hardware prefetcher stops at page boundaries, so matmuls prefetch
// explicitly. Tiles are adjacent in memory, so the prefetch past the end of a tile reads the next one.
// Measured on a 2-core Xeon with AMX: 2 to 4 KiB ahead into the first-level cache is best. On a 2-core
// EPYC: 6 KiB ahead into the second-level cache, by less than the variation of the memory bandwidth.
constexpr size_t kPrefetchDistance = kHasTileUnit ? 3072 : 6144;
constexpr int kPrefetchLocality = kHasTileUnit ? 3 : 2;
template <size_t kBytes>
OCTAVO_INLINE void prefetch_ahead(const uint8_t* p) {
    for (size_t line = 0; line < kBytes; line += 64)
        __builtin_prefetch(p + kPrefetchDistance + line, 0, kPrefetchLocality);
}

// A call multiplies its tiles by all of its rows in passes of M rows; this is one pass.
struct RowPass {
    int num_tiles;  // tiles per call
    int first_row;  // first row of the pass within the call
    int index;  // of this pass
    int num_prefetching;  // number of passes, from the first on, that share the prefetch of the next tiles
};

// Prefetches for one pass, step by step. With M <= 2, the continuation of this tile and the next. With more
// rows, later passes find the weights in a cache, and each pass prefetches its share of the next tiles: a
// core has too few line fill buffers for the first pass to do it alone.
template <int M>
class WeightPrefetcher {
  public:
    WeightPrefetcher(const RowPass& pass, const Tiles& w)
        : distance_(pass.num_tiles * w.tile_bytes),
          num_prefetching_(pass.num_prefetching),
          wait_(pass.index < pass.num_prefetching ? pass.index : 1 << 30) {}
    OCTAVO_INLINE void step() {
        is_own_step_ = wait_ == 0;
        wait_ = is_own_step_ ? num_prefetching_ - 1 : wait_ - 1;
    }
    // Prefetches the next tiles' counterpart of the kBytes at p, which this step reads.
    template <size_t kBytes>
    OCTAVO_INLINE void prefetch(const uint8_t* p) const {
        if (M <= 2)
            prefetch_ahead<kBytes>(p);
        else if (is_own_step_)
            for (size_t line = 0; line < kBytes; line += 64) __builtin_prefetch(p + distance_ + line, 0, 2);
    }

  private:
    const size_t distance_;
    const int num_prefetching_;
    int wait_;  // steps until this pass prefetches again
    bool is_own_step_ = false;
};

// Prefetches the ranges of a PrefetchList, an equal share before each pass. All at once would stall the
// core, which has too few line fill buffers.
class Prefetcher {
  public:
    Prefetcher(const PrefetchList* list, int num_passes)
        : list_(list), share_(list ? (list->num_lines + num_passes - 1) / num_passes : 0) {}
    void step() {
        for (int left = share_; left > 0 && range_ < list_->count;) {
            const PrefetchList::Range& range = list_->ranges[range_];
            const int end = std::min(range.num_lines, line_ + left);
            left -= end - line_;
            for (; line_ < end; line_++)
                __builtin_prefetch(range.first + static_cast<int64_t>(line_) * kLineBytes, 0,
                                   kPrefetchLocality);
            if (line_ == range.num_lines) range_++, line_ = 0;
        }
    }

  private:
    const PrefetchList* const list_;
    const int share_;  // lines per pass
    int range_ = 0, line_ = 0;
};

}  // namespace
}  // namespace octavo
