#include "weight_file.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "direct_file.h"

namespace octavo {

// Not every file system supports O_DIRECT; the first read shows it.
WeightFile::WeightFile(std::string path, ReadAt read_at, uint8_t* scratch)
    : path_(std::move(path)), read_at_(read_at) {
    file_ = open_direct(path_.c_str());
    if (file_ >= 0 && read_at_(file_, scratch, kDirectAlign, 0) < 0 && errno == EINVAL) {
        close(file_);
        file_ = -1;
        errno = EINVAL;
    }
    if (file_ < 0 && errno == EINVAL) {
        direct_ = false;
        file_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    }
    if (file_ < 0) raise({errno, 0, false});
}

WeightFile::~WeightFile() {
    if (file_ >= 0) close(file_);
}

WeightFile::Failure WeightFile::read(int64_t offset, size_t bytes, uint8_t* to,
                                     std::atomic<int64_t>& counted) const {
    constexpr size_t kMost = 4u << 20;
    while (bytes) {
        const ssize_t got = read_at_(file_, to, std::min(bytes, kMost), offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return {errno, offset, false};
        // A direct read is short only at the end of the file.
        if (got == 0 || (direct_ && got % kDirectAlign)) return {0, offset + got, true};
        counted.fetch_add(got, std::memory_order_relaxed);
        offset += got, to += got, bytes -= static_cast<size_t>(got);
    }
    return {};
}

void WeightFile::raise(const Failure& failure) const {
    const std::string where = path_ + " at byte " + std::to_string(failure.offset);
    if (failure.truncated) throw WeightFileTruncated("the file of weights ends too early: " + where);
    throw WeightReadError("weights could not be read from " + where + ": " + std::strerror(failure.code));
}

}  // namespace octavo
