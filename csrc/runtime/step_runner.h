// Runs a plan over batches, one call a step: the thread pool walks the plan's stages.
//
// A barrier stands between stages and nowhere else. The stages are grouped in ranges: with many rows there is no
// barrier within a range either, and each thread takes a block of rows through all of its stages, in its own
// cache. Where each row draws the best of its logits as a product makes them, they are not written at all: each
// thread keeps the best that it has made.
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

// Sums over steps, for each kind of stage. `code`: that of a product's weights, else "".
struct StageTime {
    const char* code = "";
    int64_t calls = 0;
    double seconds = 0;
    Cost cost;
};

class StepRunner {
  public:
    // stream: the weights that are read from a file while steps run, null where all are in memory.
    // share_prefixes: whether requests that begin with the same blocks read them together.
    StepRunner(ThreadPool& pool, std::shared_ptr<const Plan> plan,
               std::shared_ptr<WeightStream> stream = nullptr, bool share_prefixes = true);
    StepRunner(const StepRunner&) = delete;
    StepRunner& operator=(const StepRunner&) = delete;

    void run(const Batch& batch, const KvMemory& kv);
    // Draws some sampled rows of the step that was just run again, by these records of all sampled rows: each
    // under its mask of masks [samples][mask_words] and from its logits of replaced [samples], its own where
    // these are null. The step kept its logits, and they are those of all its sampled rows: at most
    // kSampleChunk.
    void redraw(const Batch& batch, const KvMemory& kv, const std::vector<int32_t>& samples,
                std::vector<SamplingRecord> records, const uint32_t* masks,
                const std::vector<const float*>& replaced);
    // Writes the candidates of some sampled rows of the step that was just run, which kept its logits: the
    // tokens that each would draw one after another if those before were masked, its own draw first, -1 behind
    // the last; [samples][kMostCandidates].
    void write_candidates(const Batch& batch, const KvMemory& kv, const std::vector<int32_t>& samples,
                          int32_t* out);
    // The logits [V] of a sampled row of the step that was just run, which kept them.
    const float* kept_logits(int sample) const;

    // Stages computed and bytes of weights read, ever: grows while a step runs or waits for a disk that is only
    // slow, and any thread may look.
    uint64_t progress() const {
        return stages_done_.load(std::memory_order_relaxed) +
               (stream_ ? static_cast<uint64_t>(stream_->bytes_read()) : 0) +
               (plan_->neurons ? static_cast<uint64_t>(plan_->neurons->bytes_read()) : 0);
    }
    // The number of the newest walk, from 1 on, in the upper 32 bits, and in the lower ones how many of the
    // plan's kv_writes it has done. Any thread may look; one that sees a number sees what was written as well.
    uint64_t kv_written() const { return kv_written_.load(std::memory_order_acquire); }

    // Times each stage of the steps from now on, from zero.
    void profile(bool on);
    const std::map<std::string, StageTime>& profiled() const { return profiled_; }

    const Plan& plan() const { return *plan_; }
    ThreadPool& pool() const { return pool_; }
    const KernelTable& kernels() const { return *plan_->kernels; }
    // Rows of a step from which on threads may share its rows instead of outputs.
    int rows_of_blocks() const { return pool_.num_threads() * plan_->least_rows; }
    Adapters& adapters() { return adapters_; }
    const Adapters& adapters() const { return adapters_; }
    // Rows of the h of adapters.
    int adapter_rows() const { return std::max(plan_->options.max_tokens, kSampleChunk); }

    // -- what stages ask of the running step --
    float* arena(Axis axis) const {
        return reinterpret_cast<float*>(arenas_[static_cast<int>(axis)]->data());
    }
    int64_t row_floats(Axis axis) const { return row_floats_[static_cast<int>(axis)]; }
    const Rows& rows(const PreparedRows& prepared) const { return rows_[prepared.index]; }
    const RopeAngles& angles(int index) const { return angles_[index]; }
    const AttentionPlan& attention_plan(int index) const { return attention_plans_[index]; }
    SelectedKeys& selected(int index) const { return *selected_[index]; }
    ExpertPlan& expert_plan(int index) const { return *expert_plans_[index]; }
    float* partials() const { return reinterpret_cast<float*>(partials_->data()); }
    // The step's rows with adapters: all, or those of a chunk of samples.
    const AdapterRows& adapted(bool samples, int first_sample) const {
        return samples ? adapted_samples_[first_sample / kSampleChunk] : adapted_;
    }
    // Whether thresholds hold for each row of the step, or for each sampled one.
    const uint8_t* sparse_rows(bool samples) const {
        return samples ? sparse_samples_.data() : sparse_rows_.data();
    }
    // The best logit of a sampled row, where its logits were not written.
    Best best(int sample) const;
    // The number that a collective has in the running step; `index`: among those of the body or the head.
    uint32_t collective(int index, const View& view) const;
    // The number that an exchange of experts' rows has in the running step.
    uint32_t expert_exchange(int index, const View& view) const {
        return plan_->options.engines ? first_engine_exchange_ + static_cast<uint32_t>(index)
                                      : collective(index, view);
    }

  private:
    friend struct Walk;

    void take_memory();
    void place_rows();
    void size_thread_states();
    void order_chunks();
    void check_places(int first, int end) const;
    void check(const Batch& batch, const KvMemory& kv) const;
    void check_tables(const AttentionPlan& plan, const Batch& batch, const KvMemory& kv) const;
    void mark_sparse(const Batch& batch);
    void sort_adapters(const Batch& batch);
    void make_plans(const Batch& batch, const KvMemory& kv);
    void begin_spill(const Batch& batch, const KvMemory& kv);
    void end_reads(const KvMemory& kv);
    // Returns how many collectives a step has.
    int count_collectives(const Batch& batch) const;
    void draw_rows(const Batch& batch, const KvMemory& kv, const std::vector<int32_t>& samples);
    void record(const Stage& stage, const View& view, double seconds);

    ThreadPool& pool_;
    const std::shared_ptr<const Plan> plan_;
    const std::shared_ptr<WeightStream> stream_;  // null where all weights are in memory
    const bool share_prefixes_;
    std::vector<int> released_;  // by stage of the body: the streamed chunks that are done with after it

    // -- memory --
    int64_t row_floats_[kNumAxes] = {};
    std::unique_ptr<Memory> arenas_[kNumAxes], areas_[kNumRowAreas], partials_;
    std::vector<Rows> rows_;  // by the plan's PreparedRows
    std::vector<ThreadState> threads_;
    size_t attention_scratch_ = 0;

    // -- state of the running step --
    std::vector<RopeAngles> angles_;
    std::vector<AttentionPlan> attention_plans_;
    std::vector<std::unique_ptr<SelectedKeys>> selected_;
    std::set<int> chosen_groups_;  // those of which rows choose keys
    std::vector<std::unique_ptr<ExpertPlan>> expert_plans_;
    Adapters adapters_;
    AdapterRows adapted_;
    std::vector<AdapterRows> adapted_samples_;
    std::vector<uint8_t> sparse_rows_, sparse_samples_;
    uint32_t first_collective_ = 0, first_engine_exchange_ = 0;  // numbers of the step's first ones
    int num_kept_ = 0;  // sampled rows of the last step, where it kept their logits
    std::atomic<uint64_t> stages_done_{0}, kv_written_{0};
    bool profiling_ = false;
    std::map<std::string, StageTime> profiled_;
};

}  // namespace octavo
