// Measures the most that this machine can do: bytes read from a working set, and products whose operands lie
// in a core's own caches.
#pragma once

#include <vector>

#include "../kernels/table.h"
#include "step.h"
#include "thread_pool.h"

namespace octavo {

// Returns the bytes per second that all threads together read from `bytes` of memory, each its own part; the
// best of several passes.
double read_bandwidth(ThreadPool& pool, size_t bytes);

// Returns the multiplications and additions per second of `rows` rows (at most 32) with two tiles of a code,
// all threads at once: the kernel's own mix of instructions, with no memory to wait for.
double product_rate(ThreadPool& pool, const KernelTable& kernels, Code code, int rows);

// Bytes per second of one pass over the same memory: read in a plain loop, and as tiles that one row is
// multiplied with.
struct StreamRound {
    double read, product;
};

// Measures products of one row with tiles of a layout that lie in `bytes` of memory, each thread its own part,
// in turns with a plain read. Products take `product_bytes` each, one after another, as a model's do; 0: one
// product takes all.
std::vector<StreamRound> stream_rounds(ThreadPool& pool, const KernelTable& kernels, const Tiles& layout,
                                       size_t bytes, size_t product_bytes, int rounds);

// Returns the bytes per second at which attention of single rows reads K and V of a cache group: each thread
// computes requests of `context` keys whose blocks are its own part of `bytes` of memory; the median of some
// rounds.
double attention_rate(ThreadPool& pool, const KernelTable& kernels, KvGroup group, int num_query_heads,
                      int context, size_t bytes, int rounds);

// Returns the seconds that a cache line takes from one thread's core to another's, 0 with one thread. On a
// Zen 4 these are 25 to 45 ns where both share a third-level cache or a core (which product_rate tells
// apart), and 160 to 170 where they do not and each has to read the weights for itself.
double hop_seconds(ThreadPool& pool);

}  // namespace octavo
