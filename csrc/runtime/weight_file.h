// A file of weights, read with O_DIRECT if the file system supports it.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace octavo {

constexpr int64_t kDirectAlign = 4096;

// A read failed. The step fails; the next one retries.
struct WeightReadError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// The file has become shorter; no later step can be computed.
struct WeightFileTruncated : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class WeightFile {
  public:
    using ReadAt = ssize_t (*)(int file, void* to, size_t bytes, off_t offset);
    struct Failure {
        int code = 0;  // errno; 0: none
        int64_t offset = 0;
        bool truncated = false;
        explicit operator bool() const { return code || truncated; }
    };

    // Opens the file; throws WeightReadError. `scratch` has kDirectAlign bytes and is overwritten.
    WeightFile(std::string path, ReadAt read_at, uint8_t* scratch);
    ~WeightFile();
    WeightFile(const WeightFile&) = delete;
    WeightFile& operator=(const WeightFile&) = delete;

    // Whether reads bypass the page cache (O_DIRECT); offset, length and address are then multiples of
    // kDirectAlign.
    bool is_direct() const { return direct_; }
    // Reads all bytes and adds them to `counted`. Thread-safe.
    Failure read(int64_t offset, size_t bytes, uint8_t* to, std::atomic<int64_t>& counted) const;
    [[noreturn]] void raise(const Failure& failure) const;

  private:
    const std::string path_;
    const ReadAt read_at_;
    int file_ = -1;
    bool direct_ = true;
};

}  // namespace octavo
