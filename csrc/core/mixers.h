// Stages that mix a request's rows without attention: short convolutions, whose earlier rows lie in a cache
// group of their own, and selective scans, whose states do. octavo/program/mixers.py has the formulas.
#pragma once

#include <memory>
#include <optional>

#include "executor.h"

namespace octavo {

// The rows lie where a group without keys has its values.
struct ShortConvSpec {
    Place x, out;
    int group, layer, taps;
    const float *weight, *bias;  // [taps][width]; [width] or null
    int activation;  // -1: none
    bool fills;  // whether the program fills the group itself, so that a row without a slot is none
};
std::unique_ptr<Stage> make_short_conv(const ShortConvSpec& spec);

// Columns are taken in blocks of 16 lanes: of one head, or, where heads have one column, of as many heads. A
// head of the group is a part: as many blocks as its states have room for.
struct ScanSpec {
    Place x, dt, b, c, out;
    std::optional<Place> beta;
    int group, layer, state_size, head_width, num_blocks;
    bool by_state;
    const float *decay, *skip, *bias;  // [blocks][state_size or 1][16], [blocks][16], the same or null
    float low, high;

    int num_heads() const { return dt.width; }
    int blocks_a_head() const { return (head_width + kTile - 1) / kTile; }
};
std::unique_ptr<Stage> make_selective_scan(const ScanSpec& spec);

}  // namespace octavo
