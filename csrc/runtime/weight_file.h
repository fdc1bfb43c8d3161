// A file of weights, read past the system's cache of files where that can be done.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace octavo {

constexpr int64_t kDirectAlign = 4096;

// A read that failed: the step fails, and the next one tries again.
struct WeightReadError : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// A file that has become shorter: no later step can be computed.
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

    // Opens the file; throws WeightReadError. `scratch` has kDirectAlign bytes, which are lost.
    WeightFile(std::string path, ReadAt read_at, uint8_t* scratch);
    ~WeightFile();
    WeightFile(const WeightFile&) = delete;
    WeightFile& operator=(const WeightFile&) = delete;

    // Whether reads pass by the system's cache of files (O_DIRECT); then place, length and memory are
    // multiples of kDirectAlign.
    bool is_direct() const { return direct_; }
    // Reads all bytes and counts them as they come. Called from every thread.
    Failure read(int64_t offset, size_t bytes, uint8_t* to, std::atomic<int64_t>& counted) const;
    [[noreturn]] void raise(const Failure& failure) const;

  private:
    const std::string path_;
    const ReadAt read_at_;
    int file_ = -1;
    bool direct_ = true;
};

}  // namespace octavo
