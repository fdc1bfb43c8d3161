// Weights that are not all in memory: a file's chunks, some read once and kept, the rest read for each step
// into a ring by threads of their own, ahead of the stages that multiply them.
//
// Every step takes the streamed chunks in one order, so each has one place in memory for good, and a
// product's tiles never move. A chunk is read as soon as the chunks that lay in its place are released. Idea:
// FlexGen (arXiv 2303.06865). Which chunk lies where is decided by octavo/program/passes/offload.py.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "memory.h"
#include "weight_file.h"

namespace octavo {

// Bytes of the file and their place in memory: offsets and lengths are multiples of kDirectAlign.
struct WeightChunk {
    int64_t file_offset;
    size_t bytes, memory_offset;
    bool overlaps(const WeightChunk& other) const {
        return memory_offset < other.memory_offset + other.bytes &&
               other.memory_offset < memory_offset + bytes;
    }
};

class WeightStream {
  public:
    struct Source {
        std::string path;
        int num_threads;
        size_t block_bytes;  // of one read, a multiple of kDirectAlign
        WeightFile::ReadAt read_at = ::pread;
    };
    // Opens the file, reads the chunks that stay, and begins to read the others.
    WeightStream(Source source, const std::vector<WeightChunk>& resident, std::vector<WeightChunk> streamed,
                 size_t memory_bytes);
    ~WeightStream();
    WeightStream(const WeightStream&) = delete;
    WeightStream& operator=(const WeightStream&) = delete;

    uint8_t* memory() const { return memory_.data(); }
    size_t memory_bytes() const { return memory_.size(); }
    const std::vector<WeightChunk>& streamed() const { return chunks_; }
    // Whether reads pass by the system's cache of files (O_DIRECT).
    bool is_direct() const { return file_.is_direct(); }
    // Bytes of the chunks that are not kept, since the start.
    int64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }
    // Seconds that stages have waited, and the chunks that stages have asked for: those that had arrived by
    // then, and those that had not.
    double wait_seconds() const {
        return static_cast<double>(wait_ns_.load(std::memory_order_relaxed)) * 1e-9;
    }
    int64_t num_found() const { return num_found_.load(std::memory_order_relaxed); }
    int64_t num_waited() const { return num_waited_.load(std::memory_order_relaxed); }

    // Waits for a chunk of the running step; false where a read has failed. Called from every thread.
    bool await(int chunk);
    bool failed() const { return failed_.load(std::memory_order_acquire); }
    // Says that the step's chunks before `end` are not read again in it.
    void release(int end);
    // Ends the step; throws what its reads have met.
    void end_step();

  private:
    int count() const { return static_cast<int>(chunks_.size()); }
    void serve();
    void stop();
    bool may_read() const;
    bool count_asked(int64_t position);

    const Source source_;
    std::vector<WeightChunk> chunks_;
    std::vector<int> back_;  // by chunk: how many chunks before it the last one in its place is read
    Memory memory_;
    const WeightFile file_;
    std::atomic<int64_t> bytes_read_{0}, wait_ns_{0}, num_found_{0}, num_waited_{0};

    // Positions count the chunks of all steps; all below is under the mutex, but for the atomics.
    std::mutex mutex_;
    std::condition_variable may_read_, has_arrived_;
    int64_t first_ = 0;  // position of the running step's first chunk
    int64_t reading_ = 0;  // the chunk of which blocks are handed out
    size_t block_ = 0;  // its next block
    int64_t released_ = 0;  // positions before it are released
    std::atomic<int64_t> arrived_{0};  // and before it are in memory
    std::atomic<int64_t> asked_{0};  // and before it a stage has asked for
    std::vector<size_t> left_;  // by chunk: blocks that have not arrived
    int in_flight_ = 0;
    WeightFile::Failure failure_;
    std::atomic<bool> failed_{false};
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace octavo
