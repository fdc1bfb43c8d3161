// Measures the read bandwidth of a disk with several reads in flight, bypassing the page cache (O_DIRECT).
#pragma once

#include <cstddef>
#include <string>

namespace octavo {

struct DiskReads {
    size_t block_bytes;  // per read, a multiple of 4096
    int num_threads;  // reads in flight
    bool in_order;  // sequential; else at random offsets
    double seconds;  // duration of the measurement
};

// Returns bytes per second; 0 if the file system does not support O_DIRECT. The file must hold at least one
// block. Throws std::system_error if it cannot be read.
double disk_rate(const std::string& path, const DiskReads& reads);

}  // namespace octavo
