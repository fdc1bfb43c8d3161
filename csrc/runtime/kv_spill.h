// Keys and values of which memory keeps a part and a file the rest: those of some layers of one cache group, block by
// block. A record is one layer's part of a block. It has one place in memory and one in the file for good, so block
// tables and kernels know nothing of files: where a record is not in memory, its pages belong to the system again.
//
// A step names what it writes (`begin_step`), and before the attention of each layer what that reads (`request`):
// records that are missing are read, neighbours together, and each layer keeps the same number of records, those that
// were used last. What one layer reads may be more; it is given back before the next layer's is read. Changed records
// are written when they leave memory. Idea: InfiniGen (arXiv 2406.19707), whose host memory is a file here.
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

constexpr size_t kRecordAlign = 4096;  // of places in the file and in memory: a page

// A record that could not be read or written: the step fails, and a later one tries again.
struct KvSpillError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class KvSpill {
  public:
    using ReadAt = ssize_t (*)(int file, void* to, size_t bytes, off_t offset);
    using WriteAt = ssize_t (*)(int file, const void* from, size_t bytes, off_t offset);
    struct Source {
        int file;  // open for reading and writing, with room for all records; what reads it is a copy
        int num_threads;
        int num_kept;  // records that each layer keeps in memory from step to step
        ReadAt read_at = ::pread;
        WriteAt write_at = ::pwrite;
    };
    // The places of records in memory: those of one layer lie side by side, by block.
    struct Shape {
        int num_blocks;
        size_t record_bytes;  // a multiple of kRecordAlign
        size_t used_bytes;  // of a record, what a block really has
        std::vector<int> layers;  // of the group, whose records may leave memory
    };
    KvSpill(const Source& source, Shape shape, Memory& memory);
    ~KvSpill();
    KvSpill(const KvSpill&) = delete;
    KvSpill& operator=(const KvSpill&) = delete;

    bool spills(int layer) const {
        return layer < static_cast<int>(index_of_.size()) && index_of_[layer] >= 0;
    }
    // Whether reads and writes pass by the system's cache of files (O_DIRECT).
    bool is_direct() const { return direct_; }

    // Begins a step that writes these blocks in every layer; `continued` are those of them whose first tokens
    // stay as they are. Throws where these cannot be read; then nothing may be written.
    void begin_step(std::vector<int32_t> written, const std::vector<int32_t>& continued);
    // Brings the blocks that the attention of a layer reads; those that the step has written are there. Called by
    // one thread, while no other touches the layer.
    void request(int layer, const std::vector<int32_t>& blocks);
    // Has blocks that a later layer may ask for read while others are computed, as far as its share has room. What a
    // guess brings is found as if it had stayed; what it misses is read as ever.
    void foresee(int layer, const std::vector<int32_t>& blocks);
    // Ends the step; throws what its reads and writes have met.
    void end_step();

    // Copies a record's bytes, wherever it is; not while a step runs.
    void read_record(int layer, int block, uint8_t* to);
    void write_record(int layer, int block, const uint8_t* from);

    // Records that were in memory when a layer asked for them, those that were read for it, bytes read and written,
    // and the seconds that stages have waited, since the start.
    int64_t num_found() const { return num_found_; }
    int64_t num_read() const { return num_read_; }
    int64_t bytes_read() const { return bytes_read_; }
    int64_t bytes_written() const { return bytes_written_; }
    double wait_seconds() const { return wait_seconds_; }
    // Records that were read by a guess, and those of them that the layer then asked for.
    int64_t num_foreseen() const { return num_foreseen_; }
    int64_t num_foreseen_used() const { return num_foreseen_used_; }
    // Records in memory now.
    int64_t num_in_memory() const;

  private:
    // The place of a record's bytes: nowhere yet; in memory and in the file; newer in memory; in the file alone.
    enum class Home : uint8_t { none, both, memory, file };
    struct Layer {
        uint8_t* memory;
        int64_t file_offset;
        std::vector<Home> homes;  // by block
        std::vector<int64_t> used_at;  // by block: larger is later
        std::vector<int32_t> in_memory;  // blocks, in no order
        std::vector<uint8_t> is_foreseen;  // by block: brought by a guess, and not asked for since
    };
    // Neighbouring records that are read or written together.
    struct Job {
        Layer* layer;
        int32_t first, count;
        bool writes, is_guess;
        int code = 0;  // errno of its failure; kEnded: the file is too short
        int64_t failed_at = 0;
    };
    static constexpr int kEnded = -1;
    static constexpr size_t kMostBytes = 1u << 20;  // of one read or write

    Layer& layer_of(int layer) {
        return layers_.at(static_cast<size_t>(index_of_.at(static_cast<size_t>(layer))));
    }
    size_t bytes() const { return shape_.record_bytes; }
    bool is_used_now(const Layer& layer, int32_t block) const { return layer.used_at[block] >= 2 * now_; }
    void take_in(Layer& layer, int32_t block);
    int64_t ask(Layer& layer, const std::vector<int32_t>& blocks, std::vector<int32_t>& missing);
    void count_foreseen(Layer& layer);
    void make_room(Layer& layer, size_t missing);
    void drop(Layer& layer, int32_t block);
    void add_jobs(Layer& layer, std::vector<int32_t> blocks, bool writes, bool is_guess = false);
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
    std::vector<int> index_of_;  // by layer of the group, -1: always in memory
    std::vector<Layer> layers_;
    Layer* running_ = nullptr;
    std::vector<int32_t> written_;  // blocks that the running step writes
    int64_t now_ = 1;  // counts requests
    int64_t num_found_ = 0, num_read_ = 0, num_foreseen_ = 0, num_foreseen_used_ = 0;
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
