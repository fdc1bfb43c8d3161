// The turns of a product's rows, and how each of them reads ahead in the weights.
#pragma once
#include <algorithm>

#include "../simd/dots.h"
#include "table.h"

namespace octavo {
namespace {

// Weights stream through once a step; the hardware's prefetcher stops at each page, so a product prefetches.
// Tiles follow one another, so what lies past the end of this one is the next. Measured on a 2-core Xeon with
// AMX: 2 to 4 KiB ahead into the first-level cache is best; on a 2-core EPYC it is 6 KiB ahead into the
// second, by less than its neighbours move the memory's rate.
constexpr size_t kAhead = kHasTileUnit ? 3072 : 6144;
constexpr int kIntoCache = kHasTileUnit ? 3 : 2;
template <size_t kBytes>
OCTAVO_INLINE void prefetch_ahead(const uint8_t* p) {
    for (size_t line = 0; line < kBytes; line += 64) __builtin_prefetch(p + kAhead + line, 0, kIntoCache);
}

// A call multiplies its tiles with all of its rows in turns of M rows at a time; this is one of them.
struct Turn {
    int num_tiles;  // tiles of the call
    int done;  // rows of the turns before
    int index;  // of this turn
    int prefetchers;  // number of turns, the first ones, that share the prefetch of the next tiles
};

// Prefetches for one turn, step by step. With one row or two it is what follows in this tile and the next.
// With more, the later turns find the weights in a cache, and each turn prefetches its share of the tiles
// behind these: a core has so few lines under way at once that the first turn alone would wait for them.
template <int M>
class ReadAhead {
  public:
    ReadAhead(const Turn& turn, const Tiles& w)
        : distance_(turn.num_tiles * w.tile_bytes),
          prefetchers_(turn.prefetchers),
          wait_(turn.index < turn.prefetchers ? turn.index : 1 << 30) {}
    OCTAVO_INLINE void step() {
        is_turn_ = wait_ == 0;
        wait_ = is_turn_ ? prefetchers_ - 1 : wait_ - 1;
    }
    // Prefetches what corresponds to the kBytes at p that this step reads.
    template <size_t kBytes>
    OCTAVO_INLINE void prefetch(const uint8_t* p) const {
        if (M <= 2)
            prefetch_ahead<kBytes>(p);
        else if (is_turn_)
            for (size_t line = 0; line < kBytes; line += 64) __builtin_prefetch(p + distance_ + line, 0, 2);
    }

  private:
    const size_t distance_;
    const int prefetchers_;
    int wait_;  // steps until this turn's next share
    bool is_turn_ = false;
};

// Asks for what is read behind a product, a share before each of its turns: a core has so few lines under way
// at once that it would wait if it asked for all of them together.
class SoonReader {
  public:
    SoonReader(const ReadSoon* soon, int num_turns)
        : soon_(soon), share_(soon ? (soon->num_lines + num_turns - 1) / num_turns : 0) {}
    void step() {
        for (int left = share_; left > 0 && part_ < soon_->count;) {
            const ReadSoon::Part& part = soon_->parts[part_];
            const int end = std::min(part.num_lines, line_ + left);
            left -= end - line_;
            for (; line_ < end; line_++)
                __builtin_prefetch(part.first + static_cast<int64_t>(line_) * kLineBytes, 0, kIntoCache);
            if (line_ == part.num_lines) part_++, line_ = 0;
        }
    }

  private:
    const ReadSoon* const soon_;
    const int share_;  // lines of a turn
    int part_ = 0, line_ = 0;
};

}  // namespace
}  // namespace octavo
