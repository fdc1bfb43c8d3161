// Weights that are not all in memory: chunks of a file, some read once and kept, the others read in each
// step into a ring buffer by I/O threads, ahead of the ops that use them.
//
// Every step uses the streamed chunks in the same order, so each chunk has a fixed address and tiles never
// move. A chunk is read when the chunks at its address are released. Idea: FlexGen (arXiv 2303.06865).
// octavo/program/passes/offload.py decides the layout.
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

// Bytes of the file and their offset in memory, all multiples of kDirectAlign.
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
        size_t block_bytes;  // per read, a multiple of kDirectAlign
        WeightFile::ReadAt read_at = ::pread;
    };
    // Opens the file, reads the resident chunks, and starts to read the others.
    WeightStream(Source source, const std::vector<WeightChunk>& resident, std::vector<WeightChunk> streamed,
                 size_t memory_bytes);
    ~WeightStream();
    WeightStream(const WeightStream&) = delete;
    WeightStream& operator=(const WeightStream&) = delete;

    uint8_t* memory() const { return memory_.data(); }
    size_t memory_bytes() const { return memory_.size(); }
    const std::vector<WeightChunk>& streamed() const { return chunks_; }
    // Whether reads bypass the page cache (O_DIRECT).
    bool is_direct() const { return file_.is_direct(); }
    // Bytes read of streamed chunks, since the start.
    int64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }
    // Seconds that ops have waited, and the requested chunks that had arrived and that had not.
    double wait_seconds() const {
        return static_cast<double>(wait_ns_.load(std::memory_order_relaxed)) * 1e-9;
    }
    int64_t num_found() const { return num_found_.load(std::memory_order_relaxed); }
    int64_t num_waited() const { return num_waited_.load(std::memory_order_relaxed); }

    // Waits for a chunk of the running step. Returns false if a read has failed. Thread-safe.
    bool await(int chunk);
    bool failed() const { return failed_.load(std::memory_order_acquire); }
    // Releases the step's chunks before `end`; their memory may be overwritten.
    void release(int end);
    // Ends the step. Throws if one of its reads has failed.
    void end_step();

  private:
    int count() const { return static_cast<int>(chunks_.size()); }
    void serve();
    void stop();
    bool may_read() const;
    bool count_requested(int64_t position);

    const Source source_;
    std::vector<WeightChunk> chunks_;
    std::vector<int> back_;  // by chunk: distance to the previous chunk at its address
    Memory memory_;
    const WeightFile file_;
    std::atomic<int64_t> bytes_read_{0}, wait_ns_{0}, num_found_{0}, num_waited_{0};

    // Positions count the chunks of all steps. The mutex guards all members below, except the atomics.
    std::mutex mutex_;
    std::condition_variable may_read_, has_arrived_;
    int64_t first_ = 0;  // position of the running step's first chunk
    int64_t reading_ = 0;  // chunk whose blocks are being read
    size_t block_ = 0;  // its next block
    int64_t released_ = 0;  // positions before it are released
    std::atomic<int64_t> arrived_{0};  // all positions before it are in memory
    std::atomic<int64_t> requested_{0};  // all positions before it have been requested
    std::vector<size_t> left_;  // by chunk: blocks that have not arrived
    int in_flight_ = 0;
    WeightFile::Failure failure_;
    std::atomic<bool> failed_{false};
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace octavo
