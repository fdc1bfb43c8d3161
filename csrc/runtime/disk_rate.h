// Measures how fast a disk gives a file's blocks to several readers, past the system's cache of files.
#pragma once

#include <cstddef>
#include <string>

namespace octavo {

struct DiskReads {
    size_t block_bytes;  // of one read, a multiple of 4096
    int num_threads;  // reads in flight
    bool in_order;  // one block after another; else at random places
    double seconds;  // how long the measurement takes
};

// Returns the bytes per second; 0 where the file system has no reads that pass by its cache. The file holds at
// least one block. Throws std::system_error where it cannot be read.
double disk_rate(const std::string& path, const DiskReads& reads);

}  // namespace octavo
