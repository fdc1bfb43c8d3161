// KV blocks of some layers of one cache group, of which a part is in memory and the rest in a file. A
// record is one layer's part of a block. It has a fixed address and a fixed file offset, so block tables
// and kernels are independent of the file; the pages of a record that is not in memory are released to the
// system.
//
// A step names the blocks that it writes (`begin_step`) and, before the attention of each layer, the blocks
// that it reads (`request`). Missing records are read, neighbouring ones together. Each layer keeps the
// same number of records, the most recently used. A layer may read more than that; the excess is evicted
// before the next layer's reads. Modified records are written when they are evicted. Idea: InfiniGen (arXiv
// 2406.19707), with a file in place of host memory.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "memory.h"

namespace octavo {

constexpr size_t kRecordAlign = 4096;  // alignment in the file and in memory: a page

// A record could not be read or written. The step fails; a later one retries.
struct KvSpillError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class KvSpill {
  public:
    using ReadAt = ssize_t (*)(int file, void* to, size_t bytes, off_t offset);
    using WriteAt = ssize_t (*)(int file, const void* from, size_t bytes, off_t offset);
    struct Source {
        int file;  // open for reading and writing, with room for all records; duplicated
        int num_threads;
        int num_kept;  // records that each layer keeps in memory between steps
        ReadAt read_at = ::pread;
        WriteAt write_at = ::pwrite;
    };
    // Layout of records in memory: by layer, then by block.
    struct Shape {
        int num_blocks;
        size_t record_bytes;  // a multiple of kRecordAlign
        size_t used_bytes;  // of a record, without padding
        std::vector<int> layers;  // layers of the group whose records may be evicted
    };
    KvSpill(const Source& source, Shape shape, Memory& memory);
    ~KvSpill();
    KvSpill(const KvSpill&) = delete;
    KvSpill& operator=(const KvSpill&) = delete;

    bool spills(int layer) const {
        return layer < static_cast<int>(layer_index_.size()) && layer_index_[layer] >= 0;
    }
    // Whether reads and writes bypass the page cache (O_DIRECT).
    bool is_direct() const { return direct_; }

    // Begins a step that writes these blocks in every layer. `continued`: those that keep their first
    // tokens. Throws if these cannot be read; nothing may be written then.
    void begin_step(std::vector<int32_t> written, const std::vector<int32_t>& continued);
    // Reads the missing blocks among those that the attention of a layer reads. Called by one thread, while
    // no other accesses the layer.
    void request(int layer, const std::vector<int32_t>& blocks);
    // Starts to read blocks that a later layer may request, as far as its share has room. A record that was
    // not prefetched is read when it is requested.
    void prefetch(int layer, const std::vector<int32_t>& blocks);
    // Ends the step. Throws if a read or write has failed.
    void end_step();

    // Copies a record, wherever it is. Not while a step runs.
    void read_record(int layer, int block, uint8_t* to);
    void write_record(int layer, int block, const uint8_t* from);

    // Requested records that were in memory and that were read, bytes read and written, and seconds that
    // ops have waited, since the start.
    int64_t num_found() const { return num_found_; }
    int64_t num_read() const { return num_read_; }
    int64_t bytes_read() const { return bytes_read_; }
    int64_t bytes_written() const { return bytes_written_; }
    double wait_seconds() const { return wait_seconds_; }
    // Records that were prefetched, and those of them that were requested afterwards.
    int64_t num_prefetched() const { return num_prefetched_; }
    int64_t num_prefetched_used() const { return num_prefetched_used_; }
    // Number of records in memory.
    int64_t num_in_memory() const;

  private:
    // Location of a record: not written yet; in memory and in the file; newer in memory; in the file only.
    enum class Location : uint8_t { none, both, memory, file };
    struct Layer {
        uint8_t* memory;
        int64_t file_offset;
        std::vector<Location> locations;  // by block
        std::vector<int64_t> used_at;  // by block: time of the last use
        std::vector<int32_t> in_memory;  // blocks, in no order
        std::vector<uint8_t> is_prefetched;  // by block: prefetched and not requested since
    };
    // Neighbouring records that are read or written together.
    struct Job {
        Layer* layer;
        int32_t first, count;
        bool writes, is_prefetch;
        int code = 0;  // errno; kEnded: the file is too short
        int64_t failed_at = 0;
    };
    static constexpr int kEnded = -1;
    static constexpr size_t kMaxJobBytes = 1u << 20;  // per read or write

    Layer& get_layer(int layer) {
        return layers_.at(static_cast<size_t>(layer_index_.at(static_cast<size_t>(layer))));
    }
    size_t bytes() const { return shape_.record_bytes; }
    bool is_used_now(const Layer& layer, int32_t block) const { return layer.used_at[block] >= 2 * now_; }
    void add_to_memory(Layer& layer, int32_t block);
    int64_t mark_used(Layer& layer, const std::vector<int32_t>& blocks, std::vector<int32_t>& missing);
    void count_prefetched_used(Layer& layer);
    void make_room(Layer& layer, size_t missing);
    void evict(Layer& layer, int32_t block);
    void add_jobs(Layer& layer, std::vector<int32_t> blocks, bool writes, bool is_prefetch = false);
    void run_jobs();
    void finish(const Job& job);
    void do_job(Job& job) const;
    int transfer(bool writes, uint8_t* at, size_t bytes, int64_t& offset) const;
    [[noreturn]] static void raise(bool writes, int code, int64_t offset);
    void stop();
    void throw_failure();
    void serve();

    const Source source_;
    const int file_;
    const Shape shape_;
    Memory& pages_;
    Memory scratch_;
    bool direct_ = true;
    std::vector<int> layer_index_;  // by layer of the group, -1: always in memory
    std::vector<Layer> layers_;
    Layer* running_ = nullptr;
    std::vector<int32_t> written_;  // blocks that the running step writes
    int64_t now_ = 1;  // counts requests
    int64_t num_found_ = 0, num_read_ = 0, num_prefetched_ = 0, num_prefetched_used_ = 0;
    int64_t bytes_read_ = 0, bytes_written_ = 0;
    double wait_seconds_ = 0;
    std::string failure_;  // of the running step

    std::mutex mutex_;  // guards what follows
    std::condition_variable has_jobs_, are_done_;
    std::vector<Job> jobs_;
    size_t next_ = 0, done_ = 0;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace octavo
