// The kernels of one instruction set, and the threads that run them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "../plan/packing.h"
#include "../runtime/levels.h"
#include "../runtime/thread_pool.h"

namespace octavo {

struct Device {
    ThreadPool pool;
    const KernelTable& kernels;
    WeightMemory weights;
    Device(int threads, const std::string& directory, const std::string& level,
           std::vector<std::vector<int>> group_cpus)
        : pool(threads, std::move(group_cpus)), kernels(load_level(directory, level)) {}
};

}  // namespace octavo
