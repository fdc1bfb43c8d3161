// Measures upper bounds of this machine: bandwidth of memory, and throughput of matmuls whose operands are
// in a core's caches.
#pragma once

#include <vector>

#include "../kernels/table.h"
#include "step.h"
#include "thread_pool.h"

namespace octavo {

// Returns the bytes per second that all threads together read from `bytes` of memory, each its own part:
// the best of several passes.
double read_bandwidth(ThreadPool& pool, size_t bytes);

// Returns multiplications and additions per second of `rows` rows (at most 32) with two tiles of a code, on
// all threads at once: the kernel's instruction mix without memory accesses.
double matmul_rate(ThreadPool& pool, const KernelTable& kernels, Code code, int rows);

// Bytes per second of one pass over the same memory: a plain read, and a matmul of one row with tiles.
struct StreamRound {
    double read, matmul;
};

// Measures matmuls of one row with tiles of a layout in `bytes` of memory, each thread its own part,
// alternating with a plain read. Each matmul reads `matmul_bytes`, like those of a model; 0: one matmul
// reads all.
std::vector<StreamRound> stream_rounds(ThreadPool& pool, const KernelTable& kernels, const Tiles& layout,
                                       size_t bytes, size_t matmul_bytes, int rounds);

// Returns the bytes per second at which attention of single rows reads K and V of a cache group, the median
// of `rounds`. Each thread computes requests of `context` keys whose blocks are in its own part of `bytes`
// of memory.
double attention_rate(ThreadPool& pool, const KernelTable& kernels, KvGroup group, int num_query_heads,
                      int context, size_t bytes, int rounds);

// Returns the seconds that a cache line takes from one thread's core to another's; 0 with one thread. On a
// Zen 4: 25 to 45 ns if both share a third-level cache or a core (matmul_rate distinguishes these), and 160
// to 170 ns if they do not and each has to read the weights itself.
double hop_seconds(ThreadPool& pool);

}  // namespace octavo
