// CHECK, which prints where it failed, and seeded random numbers, for all native tests.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../runtime/levels.h"

namespace octavo::test {

#define CHECK(condition, ...)                                                                  \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
            __VA_OPT__(std::fprintf(stderr, "  " __VA_ARGS__); std::fputc('\n', stderr);)      \
            std::exit(1);                                                                      \
        }                                                                                      \
    } while (false)

using Floats = std::vector<float>;

inline Floats normal(size_t count, uint32_t seed, float scale = 1) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> distribution(0, scale);
    Floats values(count);
    for (float& value : values) value = distribution(generator);
    return values;
}

inline bool same_bits(const Floats& a, const Floats& b) {
    if (a.size() != b.size()) return false;
    return a.empty() ||
           !std::memcmp(a.data(), b.data(), a.size() * sizeof(float));  // data() may be null if empty
}

void test_thread_pool();
void test_attention_plan();
void test_step_run();
void test_weight_stream(const std::string& directory);
void test_neuron_cache(const std::string& directory);
void test_kv_spill(const std::string& directory);
void test_shared_ranks(const std::string& directory);
void test_packing(const KernelTable& kernels);
void test_float_codes(const KernelTable& kernels);
void test_plan(const KernelTable& kernels);
void test_step_runner(const KernelTable& kernels);
void test_experts(const KernelTable& kernels);

}  // namespace octavo::test
