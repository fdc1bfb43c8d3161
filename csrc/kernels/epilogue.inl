// Activations, and the epilogue of matmuls: bias, activation or gate, residual.
#pragma once
#include "../simd/simd.h"
#include "table.h"

namespace octavo {
namespace {

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|), where log1p(e) = 2 atanh(e / (2 + e)) as a series: its argument
// is at most 1/3, so eight terms have an error of 1e-8.
OCTAVO_INLINE vf softplus(vf x) {
    const vf e = exp(min(x, -x)), s = e / (e + 2.0f), q = s * s;
    vf series = splat(1.0f / 15);
    for (const float term : {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f})
        series = fma(series, q, splat(term));
    return max(x, vf{}) + 2.0f * s * series;
}

OCTAVO_INLINE vf activated(int kind, vf v) {
    switch (kind) {
        case 0: return v * sigmoid(v);  // silu
        case 1: return gelu(v);
        case 2:
            return v * sigmoid(splat(1.59576912f) *
                               fma(splat(0.044715f) * v * v, v, v));  // gelu_tanh: 2 sqrt(2 / pi)
        case 3: return max(v, vf{});  // relu
        case 4: return max(v, vf{}) * max(v, vf{});  // relu2
        case 5: return sigmoid(v);
        case 6: return splat(2.0f) * sigmoid(splat(2.0f) * v) - splat(1.0f);  // tanh
        default: return softplus(v);
    }
}

void activate(int kind, float* x, int n) {
    for (int i = 0; i < n; i += kLanes) {
        const int lanes = n - i < kLanes ? n - i : kLanes;
        store_first(x + i, activated(kind, load_first(x + i, lanes)), lanes);
    }
}

// e^x - 1 for x <= 0. Near 0 a series, where the difference would lose digits: its error at -1/2 is 5e-9.
OCTAVO_INLINE vf expm1(vf x) {
    vf series = splat(1.0f / 40320);
    for (const float term : {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f})
        series = fma(series, x, splat(term));
    return select(x < splat(-0.5f), exp(x) - splat(1.0f), series * x);
}

void xielu(const XieluArgs& args, const float* x, float* out, int n) {
    for (int i = 0; i < n; i += kLanes) {
        const int lanes = n - i < kLanes ? n - i : kLanes;
        const vf v = load_first(x + i, lanes);
        const vf low = args.negative * (expm1(min(v, splat(args.eps))) - v);
        const vf high = args.positive * v * v;
        store_first(out + i, fma(splat(args.beta), v, select(vf{} < v, high, low)), lanes);
    }
}

OCTAVO_INLINE vf gate(const Epilogue& e, vf g, vf up, float threshold) {
    if (e.clamp > 0) {
        g = min(g, splat(e.clamp));
        up = max(min(up, splat(e.clamp)), splat(-e.clamp));
    }
    const vf opened = e.alpha == 1.0f ? activated(e.activation, g) : g * sigmoid(splat(e.alpha) * g);
    return without_small(opened, opened * (up + e.up_offset), threshold);
}

void write_tile(const Epilogue& e, const float* acc, const float* up, int64_t row0, int num_rows, int column,
                int width, float* out, int64_t out_stride) {
    const vf bias = e.bias ? load_first(e.bias + column, width) : vf{};
    const vf up_bias = e.up_bias ? load_first(e.up_bias + column, width) : vf{};
    for (int m = 0; m < num_rows; m++, out += out_stride) {
        vf v = load(acc + 16 * m) + bias;
        if (e.gated)
            v = gate(e, v, load(up + 16 * m) + up_bias,
                     e.is_sparse && e.is_sparse[row0 + m] ? e.threshold : 0);
        else if (e.activation >= 0)
            v = activated(e.activation, v);
        if (e.residual) v += load_first(e.residual + (row0 + m) * e.residual_stride + column, width);
        if (width == kLanes)
            store(out, v);
        else
            store_first(out, v, width);
    }
}

}  // namespace
}  // namespace octavo
