// Runs a plan over batches, one call per step.
//
// There is a barrier after each op and nowhere else. Ops are grouped in ranges: with many rows there is no
// barrier within a range either, and each thread computes a block of rows through all ops of the range, in
// its own cache. If every row is greedy and a linear op computes just the logits, these are not written:
// each thread keeps the best logit of each row.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "../plan/plan.h"
#include "key_selection.h"
#include "rope_angles.h"
#include "thread_pool.h"
#include "weight_stream.h"

namespace octavo {

// Totals over steps for each kind of op. `code`: of a linear op's weights, else "".
struct OpTime {
    const char* code = "";
    int64_t calls = 0;
    double seconds = 0;
    Cost cost;
};

class StepRunner {
  public:
    // stream: weights that are read from a file while steps run; null if all are in memory.
    // share_prefixes: whether requests that start with the same blocks read them together.
    StepRunner(ThreadPool& pool, std::shared_ptr<const Plan> plan,
               std::shared_ptr<WeightStream> stream = nullptr, bool share_prefixes = true);
    StepRunner(const StepRunner&) = delete;
    StepRunner& operator=(const StepRunner&) = delete;

    void run(const Batch& batch, const KvMemory& kv);
    // Samples some rows of the last step again, with these records of all sampled rows, each row under its
    // mask of masks [samples][mask_words] and from its logits of replacement_logits [samples], its own if
    // null. The step must have kept its logits and had at most kSampleChunk sampled rows.
    void resample(const Batch& batch, const KvMemory& kv, const std::vector<int32_t>& samples,
                  std::vector<SamplingRecord> records, const uint32_t* masks,
                  const std::vector<const float*>& replacement_logits);
    // Writes the candidates of some sampled rows of the last step, which must have kept its logits: the
    // tokens that each row would sample one after another if the previous ones were masked, its sampled
    // token first, -1 after the last; [samples][kMaxCandidates].
    void write_candidates(const Batch& batch, const KvMemory& kv, const std::vector<int32_t>& samples,
                          int32_t* out);
    // Returns the logits [V] of a sampled row of the last step, which must have kept them.
    const float* kept_logits(int sample) const;

    // Total of ops computed and bytes of weights read. Grows while a step runs, even if it only waits for a
    // slow disk. Thread-safe.
    uint64_t progress() const {
        return ops_done_.load(std::memory_order_relaxed) +
               (stream_ ? static_cast<uint64_t>(stream_->bytes_read()) : 0) +
               (plan_->neurons ? static_cast<uint64_t>(plan_->neurons->bytes_read()) : 0);
    }
    // Number of the last step, from 1 on, in the upper 32 bits, and the number of its completed kv_writes
    // in the lower ones. Thread-safe; a reader that sees a count also sees the data written.
    uint64_t kv_written() const { return kv_written_.load(std::memory_order_acquire); }

    // Starts or stops profiling, and clears the times.
    void profile(bool on);
    const std::map<std::string, OpTime>& profiled() const { return profiled_; }

    const Plan& plan() const { return *plan_; }
    ThreadPool& pool() const { return pool_; }
    const KernelTable& kernels() const { return *plan_->kernels; }
    // Number of tokens from which on threads may share a step's rows instead of outputs.
    int min_row_block_tokens() const { return pool_.num_threads() * plan_->min_rows_per_thread; }
    Adapters& adapters() { return adapters_; }
    const Adapters& adapters() const { return adapters_; }
    // Rows of the adapters' h.
    int num_adapter_rows() const { return std::max(plan_->options.max_tokens, kSampleChunk); }

    // -- state of the running step, for ops --
    float* arena(Axis axis) const {
        return reinterpret_cast<float*>(arenas_[static_cast<int>(axis)]->data());
    }
    int64_t row_floats(Axis axis) const { return row_floats_[static_cast<int>(axis)]; }
    const QuantizedRows& quantized_rows(const QuantizedInput& input) const { return rows_[input.index]; }
    const RopeAngles& angles(int index) const { return angles_[index]; }
    const AttentionPlan& attention_plan(int index) const { return attention_plans_[index]; }
    SelectedKeys& selected(int index) const { return *selected_[index]; }
    ExpertPlan& expert_plan(int index) const { return *expert_plans_[index]; }
    float* partials() const { return reinterpret_cast<float*>(partials_->data()); }
    // Rows with adapters: all tokens, or a chunk of sampled rows.
    const AdapterRows& adapter_rows(bool samples, int first_sample) const {
        return samples ? sample_adapter_rows_[first_sample / kSampleChunk] : adapter_rows_;
    }
    // Whether each row of the step, or each sampled row, is sparse.
    const uint8_t* sparse_rows(bool samples) const {
        return samples ? sparse_samples_.data() : sparse_rows_.data();
    }
    // Best logit of a sampled row, if its logits were not written.
    BestLogit best(int sample) const;
    // Number of a collective in the running step; `index`: among those of the body or the head.
    uint32_t collective(int index, const View& view) const;
    // Number of an exchange of expert rows in the running step.
    uint32_t expert_exchange(int index, const View& view) const {
        return plan_->options.engines ? first_engine_exchange_ + static_cast<uint32_t>(index)
                                      : collective(index, view);
    }

  private:
    friend struct StepRun;

    void allocate_arenas();
    void allocate_quantized_rows();
    void allocate_thread_states();
    void plan_chunk_releases();
    void check_overlaps(int first, int end) const;
    void check(const Batch& batch, const KvMemory& kv) const;
    void check_tables(const AttentionPlan& plan, const Batch& batch, const KvMemory& kv) const;
    void mark_sparse(const Batch& batch);
    void group_adapter_rows(const Batch& batch);
    void plan_attention(const Batch& batch, const KvMemory& kv);
    void begin_spill(const Batch& batch, const KvMemory& kv);
    void finish_reads(const KvMemory& kv);
    // Returns the number of collectives of a step.
    int count_collectives(const Batch& batch) const;
    void run_sampling(const Batch& batch, const KvMemory& kv, const std::vector<int32_t>& samples);
    void record(const Op& op, const View& view, double seconds);

    ThreadPool& pool_;
    const std::shared_ptr<const Plan> plan_;
    const std::shared_ptr<WeightStream> stream_;  // null if all weights are in memory
    const bool share_prefixes_;
    std::vector<int> released_;  // by op of the body: streamed chunks that are released after it

    // -- memory --
    int64_t row_floats_[kNumAxes] = {};
    std::unique_ptr<Memory> arenas_[kNumAxes], areas_[kNumRowAreas], partials_;
    std::vector<QuantizedRows> rows_;  // by the plan's inputs
    std::vector<ThreadState> threads_;
    size_t attention_scratch_ = 0;

    // -- state of the running step --
    std::vector<RopeAngles> angles_;
    std::vector<AttentionPlan> attention_plans_;
    std::vector<std::unique_ptr<SelectedKeys>> selected_;
    std::set<int> selected_groups_;  // groups with key selection
    std::vector<std::unique_ptr<ExpertPlan>> expert_plans_;
    Adapters adapters_;
    AdapterRows adapter_rows_;
    std::vector<AdapterRows> sample_adapter_rows_;
    std::vector<uint8_t> sparse_rows_, sparse_samples_;
    uint32_t first_collective_ = 0, first_engine_exchange_ = 0;  // numbers of the step's first ones
    int num_kept_ = 0;  // sampled rows of the last step, if it kept their logits
    std::atomic<uint64_t> ops_done_{0}, kv_written_{0};
    bool profiling_ = false;
    std::map<std::string, OpTime> profiled_;
};

}  // namespace octavo
