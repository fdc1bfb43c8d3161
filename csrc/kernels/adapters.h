// Low-rank matrices of adapters (LoRA) and the rows that they apply to.
#pragma once

#include <cstdint>

#include "weights.h"

namespace octavo {

// Element type of an adapter's matrices; the value is its size in bytes. The scale of int8 elements is part
// of the scale of their rank.
enum class AdapterNumber : int8_t { int8 = 1, bf16 = 2, fp32 = 4 };

// A matrix of an adapter, stored in pairs of vectors of 16 elements. A: [rank][stride / 32][2][16], rows
// padded with zeros. B: [tiles][(rank + 1) / 2][2][16]; for an odd rank the last vector is zeros. A pair of
// bf16 vectors is interleaved into one vector of 16 words, the first vector in the low halves. The A of an
// embedding table is [rows][rank].
struct LowRankMatrix {
    const void* numbers;
    AdapterNumber type;
    int32_t rank, stride;

    int number_bytes() const { return static_cast<int>(type); }
    // Returns the bytes of one tile of a B.
    int64_t tile_bytes() const { return static_cast<int64_t>(rank + 1) / 2 * 2 * kTile * number_bytes(); }
    const uint8_t* tile(int index) const {
        return static_cast<const uint8_t*>(numbers) + index * tile_bytes();
    }

    // Returns ranks from .. end - 1 of an A.
    LowRankMatrix ranks(int from, int end) const {
        const char* start =
            static_cast<const char*>(numbers) + static_cast<int64_t>(from) * stride * number_bytes();
        return {start, type, end - from, stride};
    }
};

// Rows of one adapter, whose sums become gain * (sum + B h) + bias.
struct ExpandedRows {
    LowRankMatrix b;
    const float* h;  // h of row 0
    const int32_t* rows;
    int count;
    const float *gain, *bias;  // [tiles * 16] or null
};
// The runs of all adapters of a block of rows.
struct Expansion {
    const ExpandedRows* runs;
    int num_runs;
    int64_t stride;  // from the h of one row to the next
    int first;  // row of the first sum
};

}  // namespace octavo
