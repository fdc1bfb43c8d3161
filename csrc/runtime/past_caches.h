// Stores that leave the caches alone, for what is written once and seldom read: a line that is stored whole is
// not read before.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace octavo {

// Copies floats. What other threads are to read needs `end_past_caches` before they are told.
inline void copy_past_caches(const float* from, int count, float* to) {
#if defined(__SSE2__)
    constexpr int kLine = 16;
    if (count % kLine == 0 && reinterpret_cast<uintptr_t>(to) % (kLine * sizeof(float)) == 0) {
        for (int i = 0; i < count; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
        return;
    }
#endif
    std::copy_n(from, count, to);
}

inline void end_past_caches() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

}  // namespace octavo
