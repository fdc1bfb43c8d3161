#include "disk_rate.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <random>
#include <system_error>
#include <thread>
#include <vector>

#include "direct_file.h"
#include "memory.h"

namespace octavo {

namespace {

using Clock = std::chrono::steady_clock;

struct OpenFile {
    int number;
    explicit OpenFile(const std::string& path) : number(open_direct(path.c_str())) {}
    ~OpenFile() {
        if (number >= 0) close(number);
    }
    OpenFile(const OpenFile&) = delete;
    OpenFile& operator=(const OpenFile&) = delete;
};

struct Measurement {
    const int file;
    const DiskReads reads;
    const int64_t num_blocks;
    const Clock::time_point end;
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<int> error{0};

    // Reads blocks for the duration of the measurement, at least one. `index`: of the thread.
    void read(int index) {
        const Memory memory(reads.block_bytes);
        std::mt19937_64 generator(static_cast<uint64_t>(index));
        do {
            const int64_t pass = reads.in_order ? next++ : static_cast<int64_t>(generator() >> 1);
            const off_t offset = pass % num_blocks * static_cast<int64_t>(reads.block_bytes);
            const ssize_t got = pread(file, memory.data(), reads.block_bytes, offset);
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) error = errno;
            if (got > 0) done += got;
        } while (!error && Clock::now() < end);
    }
};

[[noreturn]] void fail(const std::string& path, int code) {
    throw std::system_error(code, std::generic_category(), path + " cannot be read");
}

}  // namespace

double disk_rate(const std::string& path, const DiskReads& reads) {
    const OpenFile file(path);
    if (file.number < 0 && errno == EINVAL) return 0;
    struct stat found;
    if (file.number < 0 || fstat(file.number, &found) < 0) fail(path, errno);
    const int64_t num_blocks = found.st_size / static_cast<int64_t>(reads.block_bytes);
    if (num_blocks < 1) fail(path, ENODATA);
    const auto start = Clock::now();
    const auto duration =
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(reads.seconds));
    Measurement measurement{file.number, reads, num_blocks, start + duration};
    std::vector<std::thread> threads;
    for (int t = 0; t < reads.num_threads; t++) threads.emplace_back([&, t] { measurement.read(t); });
    for (auto& thread : threads) thread.join();
    if (measurement.error == EINVAL) return 0;
    if (measurement.error) fail(path, measurement.error);
    return static_cast<double>(measurement.done) /
           std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace octavo
