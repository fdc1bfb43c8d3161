// The kernels of one instruction set, and the threads that run them.
#pragma once

#include <string>

#include "../plan/packing.h"
#include "../runtime/levels.h"
#include "../runtime/thread_pool.h"

namespace octavo {

struct Device {
    ThreadPool pool;
    const KernelTable& kernels;
    WeightMemory weights;
    Device(int threads, const std::string& directory, const std::string& level)
        : pool(threads), kernels(load_level(directory, level)) {}
};

}  // namespace octavo
