// Arguments of short convolutions and selective scans.
#pragma once

#include <cstdint>

namespace octavo {

// out = activation(bias + sum over taps of weight * row, oldest row first); null rows are skipped.
struct ShortConvArgs {
    int32_t taps, width;
    const float* weight;  // [taps][width]
    const float* bias;  // [width] or null
    int32_t activation;  // -1: none; else see KernelTable::activate
};

// The rows of one request in a scan; formula: SelectiveScan in octavo/program/mixers.py.
struct ScanArgs {
    // Row t of each array starts at its pointer + t * its stride.
    const float *x, *dt, *b, *c;
    const float* beta;  // null if the scan is not a delta rule
    float* out;
    int64_t x_stride, dt_stride, b_stride, c_stride, beta_stride, out_stride;
    int32_t num_rows, state_size;
    bool by_state;  // whether each element of the state has its own decay
    bool by_lane;  // whether each column is a head with its own step size
    bool dt_by_state;  // whether each row of a head's state has its own step size; delta rule only
    float low, high;  // bounds of the step size
};

// A block of up to 16 columns, of one head or of heads with one column each. A state is [state_size][16].
struct ScanLanes {
    int32_t column, count, head;
    const float* decay;  // [state_size or 1][16], exp(a_log)
    const float *skip, *bias;  // [16]; bias may be null, and is [state_size] with dt_by_state
    const float* b;  // of the first row, for these columns
    const float* c;
    const float* from;  // state before the rows; null: zeros
    float* to;  // state after the rows
};

}  // namespace octavo
