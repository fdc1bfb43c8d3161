// The native executor: a Program as an array of stages that the thread pool walks, one call a step.
//
// The lowering (octavo/executor/native/lower.py) decides the stages: row-local ops that follow one
// another (norms, rope, KV writes, a product's conversion of its rows) share one, which takes each row
// through all of them; a product, an attention, a draw is a stage of its own. A barrier stands between stages
// and nowhere else. The stages are grouped in ranges: with many rows there is no barrier within a range
// either, and each thread takes a block of rows through all of its stages, in its own cache.
//
// Stages over tokens are the body, stages over sampled rows the head, which runs in chunks of at most
// kSampleChunk rows, so that logits never need more memory than that. Where each row draws the best of its
// logits as a product makes them, they are not written at all: each thread keeps the best that it has made.
#pragma once

#include <atomic>
#include <climits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../kernels/table.h"
#include "adapters.h"
#include "attention_plan.h"
#include "key_selection.h"
#include "neuron_cache.h"
#include "packing.h"
#include "shared_ranks.h"
#include "step.h"
#include "thread_pool.h"
#include "weight_stream.h"

namespace octavo {

constexpr int kSampleChunk = 64;
// Number of rows up to which each thread converts a product's rows for itself: cheaper than a barrier.
constexpr int kFewRows = 4;
// Rows that one piece of a product takes together where threads share the product's outputs.
constexpr int kRowBlock = 256;

// Rows of one expert that a piece of its product takes together.
constexpr int kExpertRows = 128;

// The rows of a Value. `block` is tokens as well, for a Value that is read only in the range that makes it;
// it needs only as many rows as the threads compute at once. `experts`: the rows of an ExpertPlan.
enum class Axis : int32_t { tokens, block, samples, experts };
constexpr int kNumAxes = 4;

// The place of a Value, in floats: at `offset` of each row of its axis. A row holds all its Values, so that
// threads may be at different stages with different rows.
struct Place {
    Axis axis = Axis::tokens;
    int64_t offset = 0;
    int width = 0;
    bool on_samples() const { return axis == Axis::samples; }
};

class Executor;
struct Stage;

// A stage's view of the running step.
struct View {
    const Executor& executor;
    const Batch& batch;
    const KvMemory& kv;
    // Row r of a block of rows lies where row r - shift of `Axis::block` does.
    int shift = 0;
    // First row and number of rows of the chunk of sampled rows that is computed.
    int first_sample = 0, num_samples = 0;
    // The product of which each row keeps the best logit instead of writing all; null: none.
    const Stage* best_only = nullptr;

    int rows(bool samples) const { return samples ? num_samples : batch.num_tokens; }
    // The slot of a row's adapter; -1: none.
    int adapter(bool samples, int64_t row) const {
        if (!batch.adapters) return -1;
        return batch.adapters[samples ? batch.sample_rows[first_sample + row] : row];
    }
    // Whether thresholds hold for each row, from this chunk's first one on.
    const uint8_t* sparse_rows(bool samples) const;
    float* at(const Place& place, int64_t row) const;
    // Floats from one row of a Value to the next.
    int64_t stride(const Place& place) const;
};

// Memory of one compute thread.
struct ThreadState {
    std::vector<float> acc[2];  // sums of two tiles
    std::vector<float> columns[2];  // sums of a run of tiles that lies by columns, and of its up projection
    std::vector<float> group;  // a group of 32 columns before its conversion
    std::vector<float> attention;  // scratch of an attention
    std::unique_ptr<Memory> product;  // scratch of products
    std::unique_ptr<Memory> rows;  // rows that this thread has converted or put together for itself
    std::vector<float> scores;  // scratch of a choice of experts
    std::unique_ptr<Memory> sampling;  // scratch of draws
    int prepared_stage = -1;  // the stage whose rows lie in `rows`
    int prepared_block = -1;  // and which of its blocks of an expert's rows
    const Stage* prefetched_stage = nullptr;  // the stage and the piece that were prefetched last
    int prefetched_piece = -1;
    std::vector<Best> best;  // for each sampled row, the best logit that this thread has made
    std::unique_ptr<Memory> adapted;  // rows of a product that adapters read
    AdapterRows block_rows;  // those with adapters of the block of rows that the thread takes
    std::vector<ExpandedRows> expanded[2];  // by run of rows: of a product's site, and of its up projection
    std::vector<ReadSoon::Part> next_reads, reads;  // of the adapters of the next product, and of a tile's
    std::unique_ptr<Memory> gathered;  // tiles that are put together from neurons' rows
    std::vector<double> seconds;  // by stage of the range that is walked, while profiling
    std::vector<float> biases;  // of one row's scores, [heads][2 * reach + 1]
};

// The work of a stage in one step: bytes of weights or of K and V, multiplications and additions.
struct Cost {
    double bytes = 0, operations = 0;
};

// Sums over steps, for each kind of stage. `code`: that of a product's weights, else "".
struct StageTime {
    const char* code = "";
    int64_t calls = 0;
    double seconds = 0;
    Cost cost;
};

struct Stage {
    int chunk = -1;  // of streamed weights, which it waits for; -1: none
    virtual ~Stage() = default;
    virtual std::string name() const = 0;
    virtual const char* code() const { return ""; }
    virtual Cost cost(const View&) const { return {}; }
    virtual bool on_samples() const = 0;
    virtual int pieces(const View& view) const = 0;
    virtual void run(const View& view, int piece, ThreadState& thread, int stage) const = 0;
    // Prefetches what a piece reads first, for the thread that waits to compute it.
    virtual void prefetch(const View&, int /*piece*/, ThreadState&) const {}
    // Whether the number of pieces is known only once the stage before is done.
    virtual bool depends_on_data() const { return false; }
    // Whether no row needs what another one computes in this stage, so that run_rows may do all of it for
    // rows row0 .. row1 - 1 (whole blocks of 16, but for the last).
    virtual bool row_local() const { return false; }
    // Whether a step without adapters goes without it.
    virtual bool only_adapters() const { return false; }
    // Throws invalid_argument where the batch lets the stage read outside the KV memory.
    virtual void check(const Batch&, const KvMemory&) const {}
    virtual void run_rows(const View&, int /*row0*/, int /*row1*/, ThreadState&) const {}
    // The weights that this thread will read first, to be fetched while it waits for the stage to begin.
    virtual Span reads_first(const View&, int /*thread*/) const { return {}; }
};

// Stages first .. last - 1, which a block of rows goes through without a barrier.
struct StageRange {
    int first, last;
};

// A stage of the body that writes the keys and values of a group's layer.
struct KvWrite {
    int stage, group, layer;
};

struct RowOp {
    virtual ~RowOp() = default;
    virtual void run(const View& view, int64_t row) const = 0;
    // False where a step of so few rows does without it, since the product converts them for itself.
    virtual bool needed(int rows) const { return rows > 0; }
};

// Angles a position, and the factor on their cosines and sines.
struct Frequencies {
    std::vector<double> inv_freq;
    double mscale;
};

// A cosine and sine table that grows with the positions seen.
class RopeAngles {
  public:
    explicit RopeAngles(Frequencies all) : all_(std::move(all)) {}
    // Gives positions from `start` on other frequencies, of the same number: p turns as p - start does.
    void turn_from(int start, Frequencies others);
    void ensure(int positions);
    const float* cos(int position) const {
        return table_.data() + static_cast<size_t>(position) * 2 * size();
    }
    const float* sin(int position) const { return cos(position) + size(); }

  private:
    size_t size() const { return all_.inv_freq.size(); }

    Frequencies all_, long_;
    int long_start_ = INT_MAX;
    std::vector<float> table_;  // [positions][2][n]
};

// The memory that a product's converted rows lie in. `prepared`: those that a row op converts. `converted`:
// those that the product before writes, which may be reading `prepared` while it does. `attended`: those that
// an attention or a choice of experts writes, which has no block of rows but all tokens. `experts`: the rows
// of an ExpertPlan.
enum class RowArea { prepared, converted, attended, experts };
constexpr int kNumRowAreas = 4;
// A Value as a product reads it.
struct PreparedRows {
    Place x;
    Norm norm{};
    RowArea area = RowArea::prepared;
    Rows rows{};
    std::vector<int32_t> permutation{};  // the input of x for each that the product reads; empty: its own
    // Numbers of smaller magnitude become zeros in sparse rows, after the norm; 0: none.
    float threshold = 0;
    float* observed = nullptr;  // where each token's numbers are copied to, after the norm alone; or null

    // Converts a row of x to row `index` of `to`. The norm's numbers lie in the order of the permutation.
    void convert(const View& view, int64_t row, const Rows& to, int64_t index) const;
    int64_t at(const View& view, int64_t row) const {
        return area == RowArea::prepared || area == RowArea::converted ? row - view.shift : row;
    }
};

// Returns the bytes of `count` converted rows of a type, `count` a multiple of 16; see place_rows_at.
size_t bytes_of_rows(const Rows& rows, size_t count);
// Lets rows whose type and strides are set lie in a piece of memory, of bytes_of_rows.
void place_rows_at(uint8_t* memory, size_t count, Rows& rows);

struct LinearPart {
    Tiles tiles;
    std::shared_ptr<void> owner;  // keeps the tiles' memory
    Place out;
    const float* bias = nullptr;
    bool has_residual = false;
    Place residual{};
    int site = -1;  // where adapters update it; -1: nowhere
};

struct LinearSpec {
    const PreparedRows* rows = nullptr;
    std::vector<LinearPart> parts;  // gated: gate, then up, into parts[0].out
    const PreparedRows* converts = nullptr;  // the next product's rows, written in place of the out
    bool keeps_out = false;  // whether rows with an adapter are written there too
    Epilogue epilogue{};  // without what differs from part to part: biases and the residual
};

// A choice of the blocks of keys that sparse rows read: those to which most of the attention of `q` goes, a part
// of the columns of queries, by the same part of the keys, which another group keeps.
struct KeySelection {
    Place q{};
    int group = 0, layer = 0;
    double budget = 0;  // share of the blocks that are read; 0: all
};

struct AttentionSpec {
    Place q, out;
    int group, layer, num_heads;
    Mask mask;
    float scale, softcap;
    const float *sinks, *slopes, *distances;
    int reach;
    int latent_width = 0;  // where values lie in the keys
    // Scores by places (PlaceBuckets in octavo/program/ops.py): each row's products with the rows of two
    // tables, [num_heads][rows of a table]; and which of these is read, by the query's place less the key's,
    // from -reach on. None: empty.
    Place of_queries{}, of_keys{};
    std::vector<int32_t> buckets = {};
    KeySelection selection = {};
    KeySelection ahead =
        {};  // what the next attention of the group chooses by, made already; no budget: none is
    int ahead_layer = 0;
    const PreparedRows* converts = nullptr;  // the next product's rows, written in place of the out
    bool keeps_out = false;  // whether the out is written too in steps with adapters
};

// Products of each head's columns with a matrix of its own: out[h] = weights[h] x[h], then tail[h].
struct HeadsSpec {
    Place x, out, tail;  // `tail` of width 0: none
    std::vector<Tiles> weights;
    std::vector<std::shared_ptr<void>> owners;  // keep the tiles' memory
    const PreparedRows* rows = nullptr;  // their form; each piece converts its own
};

// How the experts of each row are chosen: octavo/program/ops.py says what the fields mean.
struct RouteSpec {
    enum class Score { softmax, sigmoid, softmax_top_k, sigmoid_top_k, sparsemixer };
    enum class GroupRank { two_best, best };
    Place logits, weights;
    int top_k;
    Score score;
    const float* bias;  // [E] or null
    int num_groups, top_groups;
    GroupRank group_rank;
    bool normalize, scales_rows;
    float scale, jitter;
    int num_experts() const { return logits.width; }
};

// The rows of each expert in one step: those of expert e lie side by side from a multiple of 16 on. Each
// choice of experts has a plan of its own, which stays as it is to the step's end: a thread that is late asks
// for a stage's pieces when other threads are stages ahead.
struct ExpertPlan {
    // Rows of one expert that a piece takes, at most kExpertRows.
    struct Block {
        int expert, row0, num_rows;
    };
    int num_experts, top_k;
    // The experts whose rows this rank computes: `blocks` has those of no other, and counts experts from the
    // first of these.
    int first_expert = 0, last_expert;
    bool scales_rows = false;  // whether the weights are in the rows, and none in their sum
    // Whether its tokens are those of all engines that share the experts, side by side in the engines' order;
    // this engine's own begin at `first_token`. Set by a dispatch of rows, which fills in what follows.
    bool gathers = false;
    int num_tokens = 0, first_token = 0;
    std::vector<float> weights{};  // [T * k], of all engines' choices
    std::vector<const float*> token_rows{};  // [T]: each token's x, until the rows are collected
    std::vector<int32_t> ids;  // [T * k]: the expert of choice t * k + j
    std::vector<int32_t> rows;  // [T * k]: the row that the choice has
    std::vector<int32_t> tokens;  // by row: the token that chose it
    std::vector<int32_t> next;  // [E]: the row that an expert's next choice gets, while rows are given out
    std::vector<Block> blocks;

    ExpertPlan(int num_experts, int top_k, int max_tokens);
    // Gives each choice of the first `count` tokens its row.
    void order(int count);
    // Returns the rows of choices of one of this engine's own tokens, [k].
    const int32_t* rows_of(int64_t token) const { return rows.data() + (first_token + token) * top_k; }
    // Returns the blocks of a step with this number of own tokens.
    int num_blocks(int own_tokens) const {
        return gathers || own_tokens ? static_cast<int>(blocks.size()) : 0;
    }
    // Returns the rows that any choices of `max_tokens` tokens need.
    static size_t most_rows(int num_experts, int top_k, int max_tokens);
};

struct ExpertsSpec {
    const PreparedRows* rows = nullptr;  // `attended`: tokens' rows, which each block puts together
    const ExpertPlan* plan = nullptr;
    std::vector<Tiles> weights,
        ups;  // by expert; gated: gates, and their up projections, else `ups` is empty
    std::vector<std::shared_ptr<void>> owners;  // keep the tiles' memory
    Place out;
    const float *bias = nullptr, *up_bias = nullptr;  // [E][N] or null
    const PreparedRows* converts = nullptr;  // the next product's rows, written in place of the out
    Epilogue epilogue{};
};

// A feed-forward layer whose weights are read neuron by neuron, up to its last product.
struct NeuronsSpec {
    std::shared_ptr<NeuronCache> cache;
    int layer;  // of the cache
    // f(gate), or without an up projection what the last product reads. Where gates are computed here: scores,
    // of which a sparse row uses the neurons that are not negative.
    Place opened;
    float threshold;  // f(gate) of smaller magnitude becomes zero in sparse rows, where `opened` is; 0: none
    Place out{};  // f(gate) * (up + offset); of width 0: there is no up projection
    const PreparedRows* rows = nullptr;  // what the up projection reads; null: there is none
    // Numbers by neuron; a bias may be null.
    const float *up_scales = nullptr, *up_bias = nullptr, *gate_scales = nullptr, *gate_bias = nullptr;
    Epilogue gate{};  // of gates that are computed here; else its offset alone counts
    bool computes_gate() const { return gate_scales != nullptr; }
    // Rows of matrices in front of a record's column.
    int num_rows() const { return out.width ? computes_gate() ? 2 : 1 : 0; }
};

// A collective over the ranks: the sum of their x, or with the width of each rank's x their columns side by
// side.
struct CollectiveSpec {
    Place x, out;
    std::vector<int> widths{};
};

// Gives every engine that shares the experts the rows of all engines' tokens.
struct DispatchSpec {
    Place x, weights;  // of this engine's tokens
    ExpertPlan* plan = nullptr;
};

// Brings the experts' rows of the other ranks to their places among this one's.
struct CollectSpec {
    Place x, out;
    const ExpertPlan* plan = nullptr;
    std::vector<int> firsts{};  // the first expert of each rank
};

class Executor {
  public:
    Executor(ThreadPool& pool, const KernelTable& kernels, int max_tokens, int vocab);
    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;

    // -- building, in the Program's order --
    // Every method throws logic_error where what it is told contradicts what it was told before.

    // Opens the next stage; what is added until the next one is opened belongs to it: row ops, one product,
    // one attention or one draw. `range` counts up; an attention stands alone in its own.
    void begin_stage(bool samples, int range);
    void add_row_op(std::unique_ptr<RowOp> op);
    // A row op: converts x, with the norm where there is one, for the product of `w` in the next stage.
    PreparedRows* add_conversion(const Place& x, const Norm& norm, const Tiles& w,
                                 std::vector<int32_t> permutation = {}, float threshold = 0);
    // Has what a product multiplies, before a threshold, copied to [max_tokens][width of x] in each step;
    // where the rows are the sampled ones, there are no more of them.
    void observe(PreparedRows& rows, float* copies);
    // Lets the product or the attention of the last stage write the rows of the product of `w` in place of x,
    // its out, which nothing else may read.
    // With `keeps_out`, rows with an adapter are written there too.
    PreparedRows* convert_in_last_stage(const Place& x, const Tiles& w, bool keeps_out = false);
    // A stage: computes what adapters make of the rows of the next product, x with the norm where there is
    // one. `sites`: those of the product.
    void add_shrink(const Place& x, const Norm& norm, std::vector<int> sites);
    void add_linear(LinearSpec spec);
    Adapters& adapters() { return adapters_; }
    const Adapters& adapters() const { return adapters_; }
    // Rows of the h of adapters.
    int adapter_rows() const { return std::max(max_tokens_, kSampleChunk); }
    void add_heads(HeadsSpec spec);
    void add_attention(const AttentionSpec& spec);
    // Adds a stage over tokens that shares its range with no other.
    void add_stage(std::unique_ptr<Stage> stage) { push(std::move(stage)); }
    // Lets this executor be one of several ranks', before the first collective.
    void meet(std::shared_ptr<SharedRanks> ranks) { ranks_ = std::move(ranks); }
    // Lets it be one of several engines' that share their experts and have tokens of their own, before the
    // first choice of experts. `ranks`: those of all engines, engine by engine. From now on experts' rows are
    // exchanged there.
    void meet_engines(std::shared_ptr<SharedRanks> ranks, int num_engines);
    // Two stages, which have a range of their own.
    void add_collective(const CollectiveSpec& spec);
    void add_collect(CollectSpec spec);
    // Three stages: the experts' rows from here on are those of all engines' tokens.
    void add_dispatch(const Place& x, const Place& weights, int route);
    // Lets this rank compute the rows of some neighbouring experts alone.
    void own_experts(int route, int first, int last);
    // Chooses experts; two stages. Returns the index of the choice.
    int add_route(const RouteSpec& spec);
    // Lets the last stage, a choice of experts or a dispatch of its rows, write the tokens' rows x for the
    // experts' product of `w`.
    PreparedRows* convert_in_route(const Place& x, const Tiles& w);
    // A stage: converts experts' rows for their next product, which reads them as `w` does. With `by`, the
    // weights of a choice that scales rows, x is the tokens', and each choice's row its product with a weight.
    PreparedRows* add_expert_conversion(const Place& x, int route, const Tiles& w, const Place* by = nullptr);
    void add_experts(ExpertsSpec spec);
    const ExpertPlan* expert_plan(int route) const { return expert_plans_.at(route).get(); }
    // Three stages; with an `out`, `rows` are made here: x after the norm, in sparse rows without numbers below
    // `threshold`.
    void add_neurons(NeuronsSpec spec, const Place& x, const Norm& norm, float threshold);
    // A stage: has neurons of a layer of the cache read that comes later, by guessed scores.
    void add_foresee(std::shared_ptr<NeuronCache> cache, int layer, const Place& scores);
    // Draws from the logits of the stage before, or copies them to where the batch wants them.
    void add_sampling(const Place& logits);
    // Notes that a step needs positions on this axis.
    void read_axis(int axis) { num_axes_ = std::max(num_axes_, axis + 1); }
    // A row op: takes the rows that the stage of the model before has made.
    void add_hidden_input(const Place& out);
    // Copies the head's rows to where the batch wants them.
    void add_output(const Place& rows);
    // Lets weights be read from a file while steps run; the next stage that is added waits for a chunk of it.
    void stream(std::shared_ptr<WeightStream> weights) { stream_ = std::move(weights); }
    void await_chunk(int chunk) { open_.chunk = chunk; }
    // Whether requests that begin with the same blocks read them together; true unless said otherwise.
    void share_prefixes(bool share) { share_prefixes_ = share; }
    RopeAngles* add_angles(Frequencies all);
    // Copies parameters, to live as long as the executor.
    const float* keep(std::vector<float> values);
    // Notes that the row op added last writes a layer's keys and values.
    void note_kv_write(int group, int layer);
    // Notes that rows of this width may be given.
    void take_given(int width) { given_width_ = width; }

    // Takes the memory; the arguments are the floats of a row of each axis.
    void finish(int64_t token_floats, int64_t block_floats, int64_t sample_floats, int64_t expert_floats = 0);

    // -- running --
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
               (neurons_ ? static_cast<uint64_t>(neurons_->bytes_read()) : 0);
    }

    // The writes of keys and values in the order of a step.
    const std::vector<KvWrite>& kv_writes() const { return kv_writes_; }
    // The number of the newest walk, from 1 on, in the upper 32 bits, and in the lower ones how many of
    // kv_writes it has done. Any thread may look; one that sees a number sees what was written as well.
    uint64_t kv_written() const { return kv_written_.load(std::memory_order_acquire); }

    // Times each stage of the steps from now on, from zero.
    void profile(bool on);
    const std::map<std::string, StageTime>& profiled() const { return profiled_; }

    ThreadPool& pool() const { return pool_; }
    int vocab() const { return vocab_; }
    int max_tokens() const { return max_tokens_; }
    // Rows of a step from which on threads may share its rows instead of outputs.
    int rows_of_blocks() const { return pool_.num_threads() * least_rows_; }
    const KernelTable& kernels() const { return kernels_; }
    float* arena(Axis axis) const {
        return reinterpret_cast<float*>(arenas_[static_cast<int>(axis)]->data());
    }
    int64_t row_floats(Axis axis) const { return row_floats_[static_cast<int>(axis)]; }
    const AttentionPlan& plan(int index) const { return plans_[index]; }
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
        return engines_ ? first_engine_exchange_ + static_cast<uint32_t>(index) : collective(index, view);
    }
    float* partials() const { return reinterpret_cast<float*>(partials_->data()); }

  private:
    friend struct Walk;
    struct OpenStage {
        bool samples = false;
        int range = -1;
        bool is_empty = true;
        int chunk = -1;
    };
    using Stages = std::vector<std::unique_ptr<Stage>>;

    void record(const Stage& stage, const View& view, double seconds);
    Stages& open_list() { return open_.samples ? head_ : body_; }
    void push(std::unique_ptr<Stage> stage);
    PreparedRows* new_rows(const Tiles& w, const Place& x, RowArea area);
    int plan_of(const AttentionSpec& spec);
    int most_expert_tokens() const { return max_tokens_ * num_engines_; }
    void count_expert_exchange(size_t slot_bytes);
    using Selections = std::vector<std::unique_ptr<SelectedKeys>>;
    SelectedKeys& keys_of(Selections& selections, int plan, double budget);
    void place_rows();
    void group_stages();
    void size_thread_states();
    void link_shrinks();
    void order_chunks();
    void begin_spill(const Batch& batch, const KvMemory& kv);
    void end_reads(const KvMemory& kv);
    // Returns how many collectives a step has.
    int count_collectives(const Batch& batch) const;
    void check_places(int first, int end) const;
    void draw_rows(const Batch& batch, const KvMemory& kv, const std::vector<int32_t>& samples);
    void check(const Batch& batch, const KvMemory& kv) const;
    void check_tables(const AttentionPlan& plan, const Batch& batch, const KvMemory& kv) const;
    void make_plans(const Batch& batch, const KvMemory& kv);
    void sort_adapters(const Batch& batch);
    void mark_sparse(const Batch& batch);

    ThreadPool& pool_;
    const KernelTable& kernels_;
    const int max_tokens_, vocab_;
    OpenStage open_;
    Stages body_, head_;
    std::vector<int> body_ranges_;  // the range of each stage of the body, as it was told
    std::vector<StageRange> each_;  // every stage of the body alone
    std::vector<StageRange> plain_;  // and without those that only adapters need
    Adapters adapters_;
    AdapterRows adapted_;
    std::vector<AdapterRows> adapted_samples_;
    std::vector<uint8_t> sparse_rows_, sparse_samples_;
    std::shared_ptr<WeightStream> stream_;  // null where all weights are in memory
    std::shared_ptr<NeuronCache> neurons_;  // null where no weights are read neuron by neuron
    size_t gathered_bytes_ = 0;  // of the tiles that a thread puts together from neurons' rows
    std::vector<int> released_;  // by stage of the body: the streamed chunks that are done with after it
    std::shared_ptr<SharedRanks> ranks_;  // null where this is the only one
    std::shared_ptr<SharedRanks> engines_;  // null where the experts are this engine's alone
    int num_engines_ = 1, num_engine_exchanges_ = 0;
    size_t engine_slot_bytes_ = 0;  // that the largest exchange among engines needs
    uint32_t first_engine_exchange_ = 0;  // the number of the step's first one
    int num_collectives_[2] = {};  // of the body and the head
    size_t slot_bytes_ = 0;  // that the largest collective needs
    uint32_t first_collective_ = 0;  // the number of the step's first one
    int adapted_width_ = 0;  // numbers of the widest row that adapters read
    std::vector<StageRange> ranges_;  // the stages of a range together
    const Stage* sampling_ = nullptr;  // the stage of draws
    Place logits_{};  // what it draws from
    int num_kept_ = 0;  // sampled rows of the last step, where it kept their logits
    int hidden_width_ = 0;  // of the rows that the batch has to bring; 0: none
    int num_axes_ = 1;  // axes of positions that the program reads
    int given_width_ = 0;  // width of the rows that may be given; 0: none
    const Stage* logits_product_ = nullptr;  // the product that writes just the logits, if one does
    int64_t row_floats_[kNumAxes] = {};
    int least_rows_ = 0;  // for each thread, from which on the threads go by ranges
    std::vector<std::unique_ptr<RopeAngles>> angles_;
    std::vector<std::unique_ptr<std::vector<float>>> kept_;
    std::vector<AttentionPlan> plans_;
    Selections selected_;  // by plan; null where all keys are read
    Selections guessed_;  // by plan; null where none are guessed a layer ahead
    std::vector<std::unique_ptr<ExpertPlan>> expert_plans_;
    std::vector<std::unique_ptr<PreparedRows>> rows_;
    std::unique_ptr<Memory> arenas_[kNumAxes], areas_[kNumRowAreas], partials_;
    std::vector<ThreadState> threads_;
    std::atomic<uint64_t> stages_done_{0}, kv_written_{0};
    std::vector<KvWrite> kv_writes_;
    bool profiling_ = false, share_prefixes_ = true;
    std::map<std::string, StageTime> profiled_;
    bool has_row_blocks_ = false;  // whether threads put up to kExpertRows rows together
    size_t expert_rows_ = 0;  // rows of the largest ExpertPlan
    // The largest that any stage needs, of rows in each area.
    size_t row_bytes_[kNumRowAreas] = {}, groups_[kNumRowAreas] = {};
    size_t product_scratch_ = 0, attention_scratch_ = 0, num_scores_ = 0;
};

// -- row ops --

struct EmbeddingSpec {
    Tiles table;
    std::shared_ptr<void> owner;  // keeps the tiles' memory
    Place out;
    float scale = 1;
    bool by_position = false;  // row `position + offset` of the table, not the token's
    int offset = 0;
    int axis = 0;  // of the positions
    int first_row = -1;  // the token of the table's first row, others have zeros; -1: it has all
    int site = -1;  // where adapters update it; -1: nowhere
};
std::unique_ptr<RowOp> make_embedding(EmbeddingSpec spec);

// `base`: what a row is where none is given, zeros where its width is 0.
std::unique_ptr<RowOp> make_given(Place base, Place out);

// each_group: whether the weights are those of a whole row, not of each group of columns.
std::unique_ptr<RowOp> make_norm(Place x, Place out, Norm norm, int group_width, bool each_group = false);

struct RopeSpec {
    Place x, out;
    int num_heads, head_width;
    int rotary_dim, rotary_start;  // the part of each head that is rotated
    bool interleaved;
    const RopeAngles* angles;
    std::vector<int> axes = {};  // of positions that each frequency reads; empty: the first
};
std::unique_ptr<RowOp> make_rope(const RopeSpec& spec);

// `v` of width 0: the group stores no values.
std::unique_ptr<RowOp> make_kv_write(std::vector<Place> k_parts, Place v, int group, int layer);

enum class Pooling { last, cls, mean };

enum class Elementwise { add, mul, scale, activate, softcap, gate, clip, match, largest };
struct ElementwiseSpec {
    Elementwise kind;
    Place a, b, out;
    float factor = 1;
    Epilogue gate{};
};
std::unique_ptr<RowOp> make_elementwise(const ElementwiseSpec& spec);

// outs[i] = bases[i] + sum over k of (coefs[i * xs + k] + offset) * xs[k].
struct MixSpec {
    std::vector<Place> xs, bases, outs;
    Place coefs;
    float offset;
};
std::unique_ptr<RowOp> make_mix(MixSpec spec);

std::unique_ptr<RowOp> make_gather(Place x, Place out);
std::unique_ptr<RowOp> make_combine(Place x, Place weights, Place out, const ExpertPlan& plan);
std::unique_ptr<RowOp> make_pool(Place x, Place out, Pooling mode);
std::unique_ptr<RowOp> make_rows_out(Place rows);
std::unique_ptr<RowOp> make_hidden_in(Place out);
std::unique_ptr<RowOp> make_hidden_out(Place x);

}  // namespace octavo
