// Non-temporal stores for data that is written once and rarely read: they bypass the caches, and a line
// that is stored as a whole is not read first.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace octavo {

// Copies floats. Before other threads are notified of the data, call fence_non_temporal.
inline void copy_non_temporal(const float* from, int count, float* to) {
#if defined(__SSE2__)
    constexpr int kLine = 16;
    if (count % kLine == 0 && reinterpret_cast<uintptr_t>(to) % (kLine * sizeof(float)) == 0) {
        for (int i = 0; i < count; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
        return;
    }
#endif
    std::copy_n(from, count, to);
}

inline void fence_non_temporal() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

}  // namespace octavo
