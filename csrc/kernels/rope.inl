// Rotary position embedding of one head, in place.
#pragma once
#include "../simd/simd.h"

namespace octavo {
namespace {

void rope_head(float* x, const float* cos, const float* sin, int rotary, bool interleaved) {
    const int half = rotary / 2;
    if (interleaved) {
        for (int i = 0; i < half; i++) {
            const float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cos[i] - b * sin[i];
            x[2 * i + 1] = b * cos[i] + a * sin[i];
        }
        return;
    }
    for (int i = 0; i < half; i += kLanes) {
        const int n = half - i < kLanes ? half - i : kLanes;
        const vf a = load_first(x + i, n), b = load_first(x + half + i, n), c = load_first(cos + i, n),
                 s = load_first(sin + i, n);
        store_first(x + i, a * c - b * s, n);
        store_first(x + half + i, b * c + a * s, n);
    }
}

}  // namespace
}  // namespace octavo
