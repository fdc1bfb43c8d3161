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
// kByState: each row of the state has its own step size.
template <bool kByState>
void delta_scan(const ScanArgs& args, const ScanLanes& lanes) {
    const vf skip = load(lanes.skip), bias = lanes.bias && !kByState ? load(lanes.bias) : vf{};
    const vf rate_of_decay = kByState ? splat(lanes.decay[0]) : load(lanes.decay);
    const auto decays = [&](vf dt, vf added) {
        return exp(-min(max(softplus(dt + added), splat(args.low)), splat(args.high)) * rate_of_decay);
    };
    const float* from = lanes.from;
    for (int t = 0; t < args.num_rows; t++) {
        const float* widths = args.dt + t * args.dt_stride + lanes.head * (kByState ? args.state_size : 1);
        const vf common = kByState ? vf{} : decays(splat(*widths), bias);
        const vf x = load_first(args.x + t * args.x_stride + lanes.column, lanes.count);
        const float *b = lanes.b + t * args.b_stride, *c = lanes.c + t * args.c_stride;
        vf known = {}, read = {};
        float each[kLanes];
        for (int n = 0; n < args.state_size; n++) {
            if (kByState && n % kLanes == 0) {
                const int count = args.state_size - n < kLanes ? args.state_size - n : kLanes;
                const vf added = lanes.bias ? load_first(lanes.bias + n, count) : vf{};
                store(each, decays(load_first(widths + n, count), added));
            }
            const vf decay = kByState ? splat(each[n % kLanes]) : common;
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
    if (args.beta) return args.dt_by_state ? delta_scan<true>(args, lanes) : delta_scan<false>(args, lanes);
    args.by_state ? scan<true>(args, lanes) : scan<false>(args, lanes);
}

}  // namespace
}  // namespace octavo
