// Measures the most that this machine can do: bytes read from a working set, and products whose operands lie
// in a core's own caches.
#pragma once

#include "../kernels/table.h"
#include "thread_pool.h"

namespace octavo {

// Returns the bytes per second that all threads together read from `bytes` of memory, each its own part; the
// best of several passes.
double read_bandwidth(ThreadPool& pool, size_t bytes);

// Returns the multiplications and additions per second of `rows` rows (at most 32) with two tiles of a code,
// all threads at once: the kernel's own mix of instructions, with no memory to wait for.
double product_rate(ThreadPool& pool, const KernelTable& kernels, Code code, int rows);

// Returns the seconds that a cache line takes from one thread's core to another's, 0 with one thread. On a
// Zen 4 these are 25 to 45 ns where both share a third-level cache or a core (which product_rate tells
// apart), and 160 to 170 where they do not and each has to read the weights for itself.
double hop_seconds(ThreadPool& pool);

}  // namespace octavo
