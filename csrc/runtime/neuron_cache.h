// Feed-forward weights by neuron. A file holds one record per neuron of a layer: its rows of the gate and
// up matrices, if any, and its column of the down projection. Records of recently used neurons stay in
// memory slots; those of other neurons that a step uses are read by I/O threads, neighbouring records in
// one read. Without a file all records are in memory.
//
// Neurons of later layers may be prefetched by prediction (`prefetch`) while the disk is idle; the others
// are read when they are requested. Idea: ActiveFlow (arXiv 2504.08378).
//
// A step uses one layer after another: `request` starts reads of the marked neurons, and `await` waits for
// them in the order of arrival. If they are more than the layer's slots, the missing ones go to an overflow
// area that all layers share, and the slots stay unchanged. Idea: LLM in a Flash (arXiv 2312.11514); pinned
// neurons: PowerInfer (arXiv 2312.12456).
//
// The experts of a mixture are stored in the same way, one record for all matrices of an expert. Those used
// most often stay in memory, by counts that decay with each step. With `predicts`, the experts that usually
// follow those of the layer before are prefetched while predictions are right often enough. Idea: Fast
// Inference of Mixture-of-Experts Language Models with Offloading (arXiv 2312.17238).
#pragma once

#include <algorithm>
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
        size_t up_bytes, record_bytes;  // multiples of 64; the column follows the rows
        int num_slots;
        std::vector<int32_t> pinned{};  // neurons that are read once and kept in extra slots
    };
    struct Source {
        std::string path;
        int num_threads;
        size_t max_read_bytes;  // per read, a multiple of kDirectAlign
        size_t gap_bytes;  // largest gap between records of one read
        int window;  // steps that an unused neuron is kept; 0: until its slot is needed
        double half_life = 0;  // requests after which a use counts half; 0: the least recently used goes
        bool predicts = false;  // whether neurons are prefetched by those of the layer before
        WeightFile::ReadAt read_at = ::pread;
    };
    // Opens the file and reads the pinned neurons.
    NeuronCache(Source source, std::vector<Layer> layers);
    // Allocates memory for all records; `fill` sets them.
    explicit NeuronCache(std::vector<Layer> layers);
    // Sets all records of a layer.
    void fill(int layer, const uint8_t* records, size_t bytes);
    ~NeuronCache();
    NeuronCache(const NeuronCache&) = delete;
    NeuronCache& operator=(const NeuronCache&) = delete;

    bool is_direct() const { return !file_ || file_->is_direct(); }
    size_t memory_bytes() const { return memory_.size() + buffers_.size(); }
    int num_layers() const { return static_cast<int>(layers_.size()); }
    const Layer& layer(int index) const { return layers_[index].shape; }
    // Bytes read from the file, requested records that were in memory and that were read, and seconds that
    // ops have waited, since the start.
    int64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }
    int64_t num_found() const { return num_found_.load(std::memory_order_relaxed); }
    int64_t num_read() const { return num_read_.load(std::memory_order_relaxed); }
    // Records that were prefetched, and those of them that were requested afterwards.
    int64_t num_prefetched() const { return num_prefetched_.load(std::memory_order_relaxed); }
    int64_t num_prefetched_used() const { return num_prefetched_used_.load(std::memory_order_relaxed); }
    double wait_seconds() const {
        return static_cast<double>(wait_ns_.load(std::memory_order_relaxed)) * 1e-9;
    }

    void begin_step() { now_++; }
    // Marks a neuron as used by a row of the running layer. Thread-safe.
    void mark(int neuron) {
        if (!marks_[neuron].load(std::memory_order_relaxed))
            marks_[neuron].store(1, std::memory_order_relaxed);
    }
    // Starts to read neurons of a later layer, as far as it has slots, with lower priority than requests.
    void prefetch(int layer, const std::vector<int32_t>& neurons);
    // Collects the marks of a layer, whose ops come next, and starts to read missing neurons.
    void request(int layer);
    // Neurons requested of a layer in this step, in the order of arrival.
    const std::vector<int32_t>& requested(int layer) const { return layers_[layer].requested; }
    // Waits for the first `count` of them. Returns false if a read has failed. Thread-safe.
    bool await(int layer, int count);
    // Waits for a requested neuron; returns its record. Returns null if a read has failed. Thread-safe.
    const uint8_t* await_record(int layer, int neuron) {
        const std::vector<int32_t>& all = requested(layer);
        const auto position = std::find(all.begin(), all.end(), neuron) - all.begin();
        return await(layer, static_cast<int>(position) + 1) ? row(layer, neuron) : nullptr;
    }
    // First matrix row in the record of a requested neuron of the running layer.
    const uint8_t* row(int layer, int neuron) const {
        return columns_[neuron] - layers_[layer].shape.up_bytes;
    }
    // A row of zeros.
    const uint8_t* zeros() const { return zeros_; }
    // Columns of the running layer by neuron; zeros for neurons that were not requested.
    const uint8_t* const* columns() const { return columns_.data(); }
    bool failed() const { return failed_.load(std::memory_order_acquire); }
    // Waits for reads in flight. Throws if a read of the step has failed.
    void end_step();

  private:
    struct LayerState {
        Layer shape;
        uint8_t* slots = nullptr;
        std::vector<int32_t> slot_by_neuron;  // by neuron, -1: none
        std::vector<int32_t> neuron_by_slot;  // by slot, -1: none
        std::vector<int64_t> used_at;  // by slot: last step that used it
        std::vector<int32_t> requested;
        int num_found = 0;  // of `requested`, at its front
        std::vector<uint8_t> is_prefetched;  // by neuron: whether it was prefetched in this step
        std::vector<float> uses;  // by neuron, with a half life: decayed number of uses, times `gain`
        float gain = 1;  // weight of a use now
        std::vector<float> follows;  // [neuron of the layer before][neuron]: how often both were used
        std::vector<int32_t> predicted;  // neurons that were predicted for this step and not in memory
    };
    struct Read {
        int64_t offset;
        uint8_t* to;
        int32_t neuron = -1, slot = -1;
    };
    // A read of the file for records `first` .. `end` - 1 of a list of reads.
    struct Job {
        int64_t offset;
        size_t bytes;
        int first, end;
    };
    // The prefetch of a layer.
    struct Prefetch {
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
    void collect_marks(LayerState& state);
    void count_uses(LayerState& state) const;
    std::vector<int32_t> choose_slots(LayerState& state) const;
    void learn(const LayerState& before, LayerState& state);
    void predict_next(int layer);
    void evict_old(LayerState& state) const;
    static void clear(LayerState& state, int slot);
    // Returns `count` emptied slots; none if fewer are unused in this step.
    std::vector<int32_t> free_slots(LayerState& state, size_t count) const;
    int64_t file_offset(const LayerState& state, int neuron) const;
    std::vector<Job> make_jobs(const std::vector<Read>& reads, const LayerState& state) const;
    static void copy_records(const Job& job, const std::vector<Read>& reads, size_t record,
                             const uint8_t* buffer);
    void finish_prefetch(const LayerState* state);
    Prefetch* next_prefetch();
    void serve(int thread);
    void read_job(std::unique_lock<std::mutex>& lock, uint8_t* buffer);
    void read_prefetch(std::unique_lock<std::mutex>& lock, Prefetch& prefetch, uint8_t* buffer);
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
    double accuracy_ = 0;  // running mean of the share of predicted neurons that were used
    std::vector<float> scores_;  // by neuron of the next layer, during a prediction
    std::atomic<int64_t> bytes_read_{0}, wait_ns_{0}, num_found_{0}, num_read_{0}, num_prefetched_{0},
        num_prefetched_used_{0};

    std::vector<Read> reads_;  // of the running layer, in file order; changed only when no job is left
    std::vector<Job> jobs_;
    std::list<Prefetch> prefetches_;  // of layers that have not been requested yet
    std::mutex mutex_;
    std::condition_variable may_read_, has_arrived_;
    size_t next_ = 0;  // next job to start
    int in_flight_ = 0;
    std::vector<uint8_t> is_done_;  // by job
    size_t done_ = 0;  // all jobs before it are done
    std::atomic<int> arrived_{0};  // all records of reads_ before it are in memory
    WeightFile::Failure failure_;
    std::atomic<bool> failed_{false};
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace octavo
