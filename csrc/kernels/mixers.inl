// Short convolutions and selective scans, 16 columns at a time. The operations of a row have one order,
// independent of the rows that are computed with it, so the result does not depend on how a request is
// chunked.
#pragma once
#include "epilogue.inl"
#include "table.h"

namespace octavo {
namespace {

void short_conv(const ShortConvArgs& args, const float* const* rows, float* out) {
    for (int i = 0; i < args.width; i += kLanes) {
        const int n = args.width - i < kLanes ? args.width - i : kLanes;
        vf sum = {};
        for (int tap = 0; tap < args.taps; tap++)
            if (rows[tap])
                sum = fma(load_first(args.weight + static_cast<int64_t>(tap) * args.width + i, n),
                          load_first(rows[tap] + i, n), sum);
        if (args.bias) sum += load_first(args.bias + i, n);
        store_first(out + i, args.activation < 0 ? sum : activated(args.activation, sum), n);
    }
}

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|), where log1p(e) = 2 atanh(e / (2 + e)) as a series: its argument
// is at most 1/3, so eight terms have an error of 1e-8.
OCTAVO_INLINE vf softplus(vf x) {
    const vf e = exp(min(x, -x)), s = e / (e + 2.0f), q = s * s;
    vf series = splat(1.0f / 15);
    for (const float term : {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f})
        series = fma(series, q, splat(term));
    return max(x, vf{}) + 2.0f * s * series;
}

template <bool kByState>
void scan(const ScanArgs& args, const ScanLanes& lanes) {
    const vf skip = load(lanes.skip), bias = lanes.bias ? load(lanes.bias) : vf{};
    const float* from = lanes.from;
    for (int t = 0; t < args.num_rows; t++) {
        const float* widths = args.dt + t * args.dt_stride;
        const vf dt =
            args.by_lane ? load_first(widths + lanes.column, lanes.count) : splat(widths[lanes.head]);
        const vf rate = min(max(softplus(dt + bias), splat(args.low)), splat(args.high));
        const vf x = load_first(args.x + t * args.x_stride + lanes.column, lanes.count);
        const vf entering = rate * x;
        const float *b = lanes.b + t * args.b_stride, *c = lanes.c + t * args.c_stride;
        const vf common = kByState ? vf{} : exp(-rate * load(lanes.decay));
        vf read = {};
        for (int n = 0; n < args.state_size; n++) {
            const vf decay = kByState ? exp(-rate * load(lanes.decay + n * kLanes)) : common;
            const vf before = from ? load(from + n * kLanes) : vf{};
            const vf state = fma(decay, before, entering * b[n]);
            store(lanes.to + n * kLanes, state);
            read = fma(state, splat(c[n]), read);
        }
        from = lanes.to;
        store_first(args.out + t * args.out_stride + lanes.column, fma(skip, x, read), lanes.count);
    }
}

// The gated delta rule: the difference between x and the state's value for key b is added to the state.
void delta_scan(const ScanArgs& args, const ScanLanes& lanes) {
    const vf skip = load(lanes.skip), bias = lanes.bias ? load(lanes.bias) : vf{};
    const vf rate_of_decay = load(lanes.decay);
    const float* from = lanes.from;
    for (int t = 0; t < args.num_rows; t++) {
        const vf dt = splat(args.dt[t * args.dt_stride + lanes.head]);
        const vf rate = min(max(softplus(dt + bias), splat(args.low)), splat(args.high));
        const vf decay = exp(-rate * rate_of_decay);
        const vf x = load_first(args.x + t * args.x_stride + lanes.column, lanes.count);
        const float *b = lanes.b + t * args.b_stride, *c = lanes.c + t * args.c_stride;
        vf known = {}, read = {};
        for (int n = 0; n < args.state_size; n++) {
            const vf state = decay * (from ? load(from + n * kLanes) : vf{});
            store(lanes.to + n * kLanes, state);
            known = fma(state, splat(b[n]), known);
        }
        const vf entering = splat(args.beta[t * args.beta_stride + lanes.head]) * (x - known);
        for (int n = 0; n < args.state_size; n++) {
            const vf state = fma(entering, splat(b[n]), load(lanes.to + n * kLanes));
            store(lanes.to + n * kLanes, state);
            read = fma(state, splat(c[n]), read);
        }
        from = lanes.to;
        store_first(args.out + t * args.out_stride + lanes.column, fma(skip, x, read), lanes.count);
    }
}

void scan_lanes(const ScanArgs& args, const ScanLanes& lanes) {
    if (args.beta) return delta_scan(args, lanes);
    args.by_state ? scan<true>(args, lanes) : scan<false>(args, lanes);
}

}  // namespace
}  // namespace octavo
