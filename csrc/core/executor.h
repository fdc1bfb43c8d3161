// The native executor: a Program as an array of stages that the thread pool walks, one call a step.
//
// Row-local ops that follow one another (norms, rope, KV writes, adds, a product's conversion of its rows)
// form one stage that takes each row through all of them; a product, an attention, a draw is a stage of its
// own. A barrier stands between stages and nowhere else. With many rows there is none between the stages from
// one attention to the next either: each thread takes a block of rows through all of them, in its own cache.
// Stages over `samples` rows form the head, which runs in chunks of at most kSampleChunk rows, so that logits
// never need more memory than that. Where each row draws the best of its logits as a product makes them, they
// are not written at all: the threads keep the best that each of them has made.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../kernels/table.h"
#include "attention_plan.h"
#include "packing.h"
#include "step.h"
#include "thread_pool.h"

namespace octavo {

constexpr int kSampleChunk = 64;
constexpr int kFewRows =
    4;  // up to so many rows, each thread converts a product's rows for itself: cheaper than a barrier
constexpr int kRowBlock =
    256;  // rows that one piece of a product takes together where threads share a product's outputs

// What a Value has rows for. `block`: tokens, where nobody needs it after the stages that a block of rows
// goes through without a barrier.
enum class Axis : int32_t { tokens, block, samples };
constexpr int kNumAxes = 3;

// Where a Value lies, in floats: at `offset` of each row of its axis. A row holds all its Values, so that
// threads may be at different stages with different rows.
struct Place {
    Axis axis = Axis::tokens;
    int64_t offset = 0;
    int width = 0;
    bool on_samples() const { return axis == Axis::samples; }
};

class Executor;

// What a stage sees of the step that is running.
struct View {
    const Executor& executor;
    const Batch& batch;
    const KvMemory& kv;
    int first_sample = 0, num_samples = 0;  // of this chunk
    bool best_only = false;  // of its logits a row keeps the best, and none is written
    int shift = 0;  // row r of a block lies where row r - shift of `Axis::block` does

    int rows(bool samples) const { return samples ? num_samples : batch.num_tokens; }
    float* at(const Place& place, int64_t row) const;
    int64_t stride(const Place& place) const;  // floats from one row of it to the next
};

struct Stage;

// Memory of one compute thread.
struct ThreadState {
    std::vector<float> acc[2], group,
        attention;  // sums of two tiles, a group of 32 columns before its conversion
    std::unique_ptr<Memory> product, rows,
        sampling;  // scratch of products, rows converted for oneself, scratch of draws
    int prepared_stage = -1;  // the stage whose rows lie in `rows`
    const Stage* asked_stage = nullptr;  // the stage and the piece that has been asked for last
    int asked_piece = -1;
    std::vector<Best> best;  // of each sampled row, among the logits that this thread has made
    std::vector<double> seconds;  // by stage, of the range that is walked; while profiling
};

// What a stage moves and computes in one step: bytes of weights or of K and V, multiplications and additions.
struct Cost {
    double bytes = 0, operations = 0;
};

// Sums over steps, by what kind of stage it was. `code`: of a product's weights, else "".
struct StageTime {
    const char* code = "";
    int64_t calls = 0;
    double seconds = 0;
    Cost cost;
};

struct Stage {
    virtual ~Stage() = default;
    virtual std::string name() const = 0;
    virtual const char* code() const { return ""; }
    virtual Cost cost(const View&) const { return {}; }
    virtual bool on_samples() const = 0;
    virtual int pieces(const View& view) const = 0;
    virtual void run(const View& view, int piece, ThreadState& thread, int stage) const = 0;
    // Asks for what a piece reads first, for the thread that waits to compute it.
    virtual void ask(const View&, int /*piece*/, ThreadState&) const {}
    // Where no row needs what another computes in this stage: all of it for rows row0 .. row1 - 1 (whole
    // blocks of 16, but for the last).
    virtual bool row_local() const { return false; }
    virtual void run_rows(const View&, int /*row0*/, int /*row1*/, ThreadState&) const {}
    // The weights that this thread will read first, to be fetched while it waits for the stage to begin.
    virtual Span reads_first(const View&, int /*thread*/) const { return {}; }
};

// Stages first .. last - 1, which a block of rows goes through without a barrier.
struct StageRange {
    int first, last;
};

struct RowOp {
    virtual ~RowOp() = default;
    virtual void run(const View& view, int64_t row) const = 0;
    // False where this step needs it not (rows that the product converts for itself).
    virtual bool needed(int rows) const { return rows > 0; }
};

// A cosine and sine table that grows with the positions seen.
class RopeAngles {
  public:
    RopeAngles(std::vector<double> inv_freq, double mscale)
        : inv_freq_(std::move(inv_freq)), mscale_(mscale) {}
    void ensure(int positions);
    const float* cos(int position) const { return table_.data() + (size_t)position * 2 * inv_freq_.size(); }
    const float* sin(int position) const { return cos(position) + inv_freq_.size(); }

  private:
    std::vector<double> inv_freq_;
    double mscale_;
    std::vector<float> table_;  // [positions][2][n]
};

// Where rows of a product lie: those that the stage before writes in an area of their own, since that stage
// may be reading the other; those that an attention writes in one for all tokens, the others in one for
// blocks of them.
enum class RowArea { prepared, converted, attended };
constexpr int kNumRowAreas = 3;
struct PreparedRows {
    RowArea area = RowArea::prepared;
    Rows rows{};
    int64_t at(const View& view, int64_t row) const {
        return area == RowArea::attended ? row : row - view.shift;
    }
};

struct LinearPart {
    Tiles tiles;
    std::shared_ptr<void> owner;  // keeps the tiles' memory
    Place out;
    const float* bias = nullptr;
    bool has_residual = false;
    Place residual{};
};

struct LinearSpec {
    Place x;
    Norm norm{};
    std::vector<LinearPart> parts;  // gated: gate, then up, into parts[0].out
    bool converted = false;  // the stage before writes x as this product reads it, and no other reads it
    const PreparedRows* converts = nullptr;  // the next product's rows, in place of the out
    bool gated = false;
    bool makes_logits = false;  // which are drawn from as they are
    int activation = -1;
    float clamp = 0, alpha = 1, up_offset = 0;
};

struct AttentionSpec {
    Place q, out;
    int group, layer, num_heads, window;
    float scale, softcap;
    const float* sinks;
    const PreparedRows* converts = nullptr;  // the next product's rows, in place of the out
};

class Executor {
  public:
    Executor(ThreadPool& pool, const KernelTable& kernels, int max_tokens, int vocab);
    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;

    // -- building, in the Program's order --
    void add_row_op(bool samples, std::unique_ptr<RowOp> op);
    void add_linear(LinearSpec spec);
    void add_attention(const AttentionSpec& spec);
    void add_sampling(const Place& logits);
    // Whether requests that begin with the same blocks read them together; true unless said otherwise.
    void share_prefixes(bool share) { share_prefixes_ = share; }
    RopeAngles* add_angles(std::vector<double> inv_freq, double mscale);
    const float* keep(std::vector<float> values);  // parameters that live as long as the executor
    void finish(int64_t token_floats, int64_t block_floats,
                int64_t sample_floats);  // floats of a row of each axis

    // -- running --
    void run(const Batch& batch, const KvMemory& kv);

    // Stages computed, ever: grows while a step runs, and any thread may look.
    uint64_t stages_done() const { return stages_done_.load(std::memory_order_relaxed); }

    // Times each stage of the steps from now on, from zero.
    void profile(bool on);
    const std::map<std::string, StageTime>& profiled() const { return profiled_; }

    ThreadPool& pool() const { return pool_; }
    const KernelTable& kernels() const { return kernels_; }
    float* arena(Axis axis) const { return (float*)arenas_[(int)axis]->data(); }
    int64_t row_floats(Axis axis) const { return row_floats_[(int)axis]; }
    const AttentionPlan& plan(int index) const { return plans_[index]; }
    Best best(int sample) const;  // of a sampled row, where its logits were not written
    float* partials() const { return (float*)partials_->data(); }

  private:
    friend struct Walk;
    void record(const Stage& stage, const View& view, double seconds);
    PreparedRows* new_rows(const Tiles& w);
    void convert_in_last_stage(std::vector<std::unique_ptr<Stage>>& list, PreparedRows* rows);
    void group_stages();
    void size_thread_states();
    void check(const Batch& batch, const KvMemory& kv) const;
    void make_plans(const Batch& batch, const KvMemory& kv);

    ThreadPool& pool_;
    const KernelTable& kernels_;
    const int max_tokens_, vocab_;
    std::vector<std::unique_ptr<Stage>> body_, head_;
    std::vector<StageRange> each_,
        ranges_;  // of the body: every stage alone, and row-local neighbours together
    int64_t row_floats_[kNumAxes] = {};
    int least_rows_ = 0;  // of a thread, from which it goes by ranges
    std::vector<std::unique_ptr<RopeAngles>> angles_;
    std::vector<std::unique_ptr<std::vector<float>>> kept_;
    std::vector<AttentionPlan> plans_;
    std::vector<std::unique_ptr<PreparedRows>> rows_;
    std::unique_ptr<Memory> arenas_[kNumAxes], areas_[kNumRowAreas], partials_;
    std::vector<ThreadState> threads_;
    std::atomic<uint64_t> stages_done_{0};
    bool profiling_ = false, share_prefixes_ = true, logits_from_product_ = false;
    std::map<std::string, StageTime> profiled_;
    size_t row_bytes_ = 0, groups_ = 0, product_scratch_ = 0,
           attention_scratch_ = 0;  // largest over the stages
};

// Row ops, made by the bindings' builder.
std::unique_ptr<RowOp> make_embedding(const Tiles& table, std::shared_ptr<void> owner, Place out, float scale,
                                      bool by_position, int offset);
std::unique_ptr<RowOp> make_norm(Place x, Place out, Norm norm, int group_width);
std::unique_ptr<RowOp> make_rope(Place x, Place out, int heads, int head_width, int rotary, int start,
                                 bool interleaved, const RopeAngles* angles);
std::unique_ptr<RowOp> make_kv_write(Place k, Place v, int group, int layer);
enum class Elementwise { add, mul, scale, activate, softcap, gate };
std::unique_ptr<RowOp> make_elementwise(Elementwise kind, Place a, Place b, Place out, float factor,
                                        const Epilogue& gate);
std::unique_ptr<RowOp> make_gather(Place x, Place out);
std::unique_ptr<RowOp> make_logits_out(Place logits);

}  // namespace octavo
