// Feed-forward weights by neuron. A file holds a record for each neuron of a layer: its rows of the matrices
// before the last product, where there are some, and its column of that. Records of neurons that the last tokens
// used stay in slots of memory; those of the others that a step uses are read for it by threads of their own,
// neighbours in one read. Without a file all records are in memory.
//
// Neurons of later layers may be read before they are asked for, by a guess (`foresee`), where the running layer
// leaves the disk idle; what was not guessed is read as ever. Idea: ActiveFlow (arXiv 2504.08378).
//
// A step uses one layer after the other: `request` names the neurons that its rows use, and `await` waits for
// them in the order in which they arrive. Where they are more than a layer has slots for, the missing ones go
// to a landing place that all layers share, and the slots stay as they are. Idea: LLM in a Flash (arXiv
// 2312.11514); pinned neurons: PowerInfer (arXiv 2312.12456).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "memory.h"
#include "weight_file.h"

namespace octavo {

class NeuronCache {
  public:
    struct Layer {
        int64_t file_offset;  // of the first record, a multiple of kDirectAlign
        int num_neurons;
        size_t up_bytes, record_bytes;  // multiples of 64; the column lies behind the rows
        int num_slots;
        std::vector<int32_t> pinned{};  // neurons that are read once and stay, in slots of their own
    };
    struct Source {
        std::string path;
        int num_threads;
        size_t most_bytes;  // of one read, a multiple of kDirectAlign
        size_t gap_bytes;  // that a read passes over rather than end
        int window;  // steps for which a neuron that none has used stays; 0: as long as there is room
        WeightFile::ReadAt read_at = ::pread;
    };
    // Opens the file and reads the pinned neurons.
    NeuronCache(Source source, std::vector<Layer> layers);
    // Takes memory for all records of the layers, which `fill` then brings.
    explicit NeuronCache(std::vector<Layer> layers);
    // Brings the records of a layer; `bytes` are all that it has.
    void fill(int layer, const uint8_t* records, size_t bytes);
    ~NeuronCache();
    NeuronCache(const NeuronCache&) = delete;
    NeuronCache& operator=(const NeuronCache&) = delete;

    bool is_direct() const { return !file_ || file_->is_direct(); }
    size_t memory_bytes() const { return memory_.size() + buffers_.size(); }
    int num_layers() const { return static_cast<int>(layers_.size()); }
    const Layer& layer(int index) const { return layers_[index].shape; }
    // Bytes read from the file, the records of running steps that were in memory and those that were read, and
    // the seconds that stages have waited, since the start.
    int64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }
    int64_t num_found() const { return num_found_.load(std::memory_order_relaxed); }
    int64_t num_read() const { return num_read_.load(std::memory_order_relaxed); }
    // Records that were read by a guess, and those of them that the layer then asked for.
    int64_t num_foreseen() const { return num_foreseen_.load(std::memory_order_relaxed); }
    int64_t num_foreseen_used() const { return num_foreseen_used_.load(std::memory_order_relaxed); }
    double wait_seconds() const {
        return static_cast<double>(wait_ns_.load(std::memory_order_relaxed)) * 1e-9;
    }

    void begin_step() { now_++; }
    // Marks that a row of the running layer uses a neuron; from any thread.
    void mark(int neuron) {
        if (!marks_[neuron].load(std::memory_order_relaxed))
            marks_[neuron].store(1, std::memory_order_relaxed);
    }
    // Has neurons of a layer that comes later read, as far as it has slots, behind what is asked for.
    void foresee(int layer, const std::vector<int32_t>& neurons);
    // Takes in the marks of a layer, whose stages come next, and has what is missing read.
    void request(int layer);
    // The neurons that were requested of a layer in this step, in the order in which they arrive.
    const std::vector<int32_t>& requested(int layer) const { return layers_[layer].requested; }
    // Waits for the first `count` of them; false where a read has failed. From any thread.
    bool await(int layer, int count);
    // The first row of a requested neuron of the running layer, in front of all others.
    const uint8_t* row(int layer, int neuron) const {
        return columns_[neuron] - layers_[layer].shape.up_bytes;
    }
    // A row of zeros.
    const uint8_t* zeros() const { return zeros_; }
    // The columns of the running layer by neuron; zeros for those that were not requested.
    const uint8_t* const* columns() const { return columns_.data(); }
    bool failed() const { return failed_.load(std::memory_order_acquire); }
    // Waits for the reads in flight; throws what the step's have met.
    void end_step();

  private:
    struct LayerState {
        Layer shape;
        uint8_t* slots = nullptr;
        std::vector<int32_t> slot_of;  // by neuron, -1: none
        std::vector<int32_t> neuron_in;  // by slot, -1: none
        std::vector<int64_t> used_at;  // by slot: the last step that used it
        std::vector<int32_t> requested;
        int num_found = 0;  // of these, which come first
        std::vector<uint8_t> is_foreseen;  // by neuron: whether a guess of this step has read it
    };
    struct Read {
        int64_t offset;
        uint8_t* to;
        int32_t neuron = -1, slot = -1;
    };
    // A read from the file for records `first` .. `end` - 1 of reads_.
    struct Job {
        int64_t offset;
        size_t bytes;
        int first, end;
    };
    // The reads of a layer's guess.
    struct Ahead {
        LayerState* state;
        std::vector<Read> reads;
        std::vector<Job> jobs;
        size_t next = 0;
        int in_flight = 0;
    };
    static constexpr int64_t kPinned = INT64_MAX;

    static void check(const std::vector<Layer>& layers);
    void lay_out(std::vector<Layer> layers);
    void read_pinned();
    void take_marks(LayerState& state);
    void drop_old(LayerState& state) const;
    static void clear(LayerState& state, int slot);
    // Returns `count` slots, emptied; none where fewer are free of what this step uses.
    std::vector<int32_t> free_slots(LayerState& state, size_t count) const;
    int64_t offset_of(const LayerState& state, int neuron) const;
    std::vector<Job> jobs_of(const std::vector<Read>& reads, const LayerState& state) const;
    static void fetch(const Job& job, const std::vector<Read>& reads, size_t record, const uint8_t* buffer);
    void settle(const LayerState* state);
    Ahead* next_ahead();
    void serve(int thread);
    void read_job(std::unique_lock<std::mutex>& lock, uint8_t* buffer);
    void read_ahead(std::unique_lock<std::mutex>& lock, Ahead& ahead, uint8_t* buffer);
    void stop();
    uint8_t* buffer(int thread) const { return buffers_.data() + thread * buffer_bytes_; }

    const Source source_;
    std::vector<LayerState> layers_;
    const size_t buffer_bytes_;
    Memory memory_, buffers_;
    const std::unique_ptr<const WeightFile> file_;  // null: all records are in memory
    uint8_t *landing_ = nullptr, *zeros_ = nullptr;
    std::unique_ptr<std::atomic<uint8_t>[]> marks_;
    std::vector<const uint8_t*> columns_;
    std::vector<int32_t> missing_;
    int64_t now_ = 0;
    LayerState* running_ = nullptr;
    std::atomic<int64_t> bytes_read_{0}, wait_ns_{0}, num_found_{0}, num_read_{0}, num_foreseen_{0},
        num_foreseen_used_{0};

    std::vector<Read> reads_;  // of the running layer, in the file's order; changed while no job is left
    std::vector<Job> jobs_;
    std::list<Ahead> ahead_;  // guesses of layers that have not been asked for
    std::mutex mutex_;
    std::condition_variable may_read_, has_arrived_;
    size_t next_ = 0;  // the job that is handed out next
    int in_flight_ = 0;
    std::vector<uint8_t> is_done_;  // by job
    size_t done_ = 0;  // jobs before it are done
    std::atomic<int> arrived_{0};  // records of reads_ before it are in memory
    WeightFile::Failure failure_;
    std::atomic<bool> failed_{false};
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace octavo
