// The ops of a plan as plain structs: what PlanBuilder takes, and what stages compute.
//
// Each struct lists the fields that Python fills in: the bindings read them as keyword arguments, and the builder
// finds the Places among them. What stands below the list is set by the builder and its fusions.
// octavo/program/ops.py, mixers.py and expert_ops.py have the formulas.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "../kernels/table.h"
#include "packing.h"

namespace octavo {

class NeuronCache;
struct View;

// The rows of a Value. `block` is tokens as well, for a Value that is read only in the range that makes it;
// it needs only as many rows as the threads compute at once. `experts`: the rows of an ExpertPlan.
enum class Axis : int32_t { tokens, block, samples, experts };
constexpr int kNumAxes = 4;

// The place of a Value, in floats: at `offset` of each row of its axis. A row holds all its Values, so that
// threads may be at different stages with different rows. Of width 0: no Value.
struct Place {
    Axis axis = Axis::tokens;
    int64_t offset = 0;
    int width = 0;
    bool on_samples() const { return axis == Axis::samples; }
    bool operator==(const Place&) const = default;
};

// Numbers of a parameter, shared by the specs that read them; null without any.
class FloatArray {
  public:
    FloatArray() = default;
    explicit FloatArray(std::vector<float> values)
        : values_(std::make_shared<const std::vector<float>>(std::move(values))) {}
    operator const float*() const { return values_ ? values_->data() : nullptr; }
    int64_t size() const { return values_ ? static_cast<int64_t>(values_->size()) : 0; }

  private:
    std::shared_ptr<const std::vector<float>> values_;
};

// Memory of the caller that steps write; null: none.
struct FloatBuffer {
    float* data = nullptr;
    int64_t size = 0;
    std::shared_ptr<void> owner{};
};

// OCTAVO_FIELDS(Type, field, ...): lists the fields that Python fills in. `Type::fields(take)` calls
// take(name, &Type::field) for each.
#define OCTAVO_RESCAN(...) OCTAVO_RESCAN_3(OCTAVO_RESCAN_3(OCTAVO_RESCAN_3(__VA_ARGS__)))
#define OCTAVO_RESCAN_3(...) OCTAVO_RESCAN_2(OCTAVO_RESCAN_2(OCTAVO_RESCAN_2(__VA_ARGS__)))
#define OCTAVO_RESCAN_2(...) OCTAVO_RESCAN_1(OCTAVO_RESCAN_1(OCTAVO_RESCAN_1(__VA_ARGS__)))
#define OCTAVO_RESCAN_1(...) __VA_ARGS__
#define OCTAVO_NEXT_FIELD() OCTAVO_TAKE_FIELD
#define OCTAVO_NOTHING()
#define OCTAVO_TAKE_FIELD(name, ...) \
    take(#name, &Self::name);        \
    __VA_OPT__(OCTAVO_NEXT_FIELD OCTAVO_NOTHING()()(__VA_ARGS__))
#define OCTAVO_FIELDS(Type, ...)                      \
    static void fields(auto&& take) {                 \
        using Self = Type;                            \
        OCTAVO_RESCAN(OCTAVO_TAKE_FIELD(__VA_ARGS__)) \
    }

struct NormSpec {
    FloatArray weight, bias;  // no weight: no norm
    float eps = 0, weight_offset = 0;
    bool is_layer_norm = false;
    OCTAVO_FIELDS(NormSpec, weight, bias, eps, weight_offset, is_layer_norm)
    Norm args() const {
        return {.weight = weight,
                .bias = bias,
                .eps = eps,
                .weight_offset = weight_offset,
                .is_layer_norm = is_layer_norm};
    }
};

// An activation, and with `gated` products the rest of a gate.
struct GateSpec {
    int activation = -1;  // -1: none
    float clamp = 0;  // 0: none
    float alpha = 1, up_offset = 0, threshold = 0;
    OCTAVO_FIELDS(GateSpec, activation, clamp, alpha, up_offset, threshold)
    Epilogue epilogue(bool gated) const {
        return {.activation = activation,
                .gated = gated,
                .clamp = clamp,
                .alpha = alpha,
                .up_offset = up_offset,
                .threshold = threshold};
    }
};

// The memory that a product's converted rows lie in. `prepared`: those that a row op converts. `converted`:
// those that the product before writes, which may be reading `prepared` while it does. `attended`: those that
// an attention or a choice of experts writes, which has no block of rows but all tokens. `experts`: the rows
// of an ExpertPlan.
enum class RowArea { prepared, converted, attended, experts };
constexpr int kNumRowAreas = 4;

// A Value as a product reads it; its memory is StepRunner::rows.
struct PreparedRows {
    int index = 0;
    Place x{};
    NormSpec norm{};
    RowArea area = RowArea::prepared;
    RowType type{};
    int num_groups = 0;
    bool skips_zeros = false;
    std::vector<int32_t> permutation{};  // the input of x for each that the product reads; empty: its own
    // Numbers of smaller magnitude become zeros in sparse rows, after the norm; 0: none.
    float threshold = 0;
    FloatBuffer observed{};  // where each token's numbers are copied to, after the norm alone

    // Converts a row of x to row `index` of `to`. The norm's numbers lie in the order of the permutation.
    void convert(const View& view, int64_t row, const Rows& to, int64_t index) const;
    int64_t at(const View& view, int64_t row) const;
    size_t row_bytes() const { return row_elements(type, num_groups) * element_bytes(type); }
};

// -- row ops --

struct EmbeddingSpec {
    PackedTiles table;
    Place out;
    float scale = 1;
    bool by_position = false;  // row `position + offset` of the table, not the token's
    int offset = 0;
    int axis = 0;  // of the positions
    int first_row = -1;  // the token of the table's first row, others have zeros; -1: it has all
    int site = -1;  // where adapters update it; -1: nowhere
    OCTAVO_FIELDS(EmbeddingSpec, table, out, scale, by_position, offset, axis, first_row, site)
};

// The step's given row, where it has one, in place of base.
struct GivenSpec {
    Place base, out;  // no base: zeros
    OCTAVO_FIELDS(GivenSpec, base, out)
};

struct RowNormSpec {
    Place x, out;
    NormSpec norm;
    int group_width = 0;  // columns that are normed together; 0: the whole row
    bool each_group = false;  // whether the weights are those of a whole row, not of each group of columns
    OCTAVO_FIELDS(RowNormSpec, x, out, norm, group_width, each_group)
};

// Angles by position, and the factor on their cosines and sines. Positions from long_start on turn by the long
// numbers, where there are any: p as p - long_start.
struct AnglesSpec {
    std::vector<double> inv_freq;
    double mscale = 1;
    int long_start = 0;
    std::vector<double> long_inv_freq{};
    double long_mscale = 1;
    OCTAVO_FIELDS(AnglesSpec, inv_freq, mscale, long_start, long_inv_freq, long_mscale)
};

struct RopeSpec {
    Place x, out;
    int num_heads = 0, head_width = 0;
    int rotary_dim = 0, rotary_start = 0;  // the part of each head that is rotated
    bool interleaved = false;
    int angles = 0;  // the index of its AnglesSpec
    std::vector<int> axes = {};  // of positions that each frequency reads; empty: the first
    OCTAVO_FIELDS(RopeSpec, x, out, num_heads, head_width, rotary_dim, rotary_start, interleaved, angles,
                  axes)
};

struct KvWriteSpec {
    std::vector<Place> k_parts;
    Place v;  // none: the group stores no values
    int group = 0, layer = 0;
    OCTAVO_FIELDS(KvWriteSpec, k_parts, v, group, layer)
};

enum class Elementwise { add, mul, scale, activate, softcap, gate, clip, match, largest };
struct ElementwiseSpec {
    Elementwise kind{};
    Place a, b, out;
    float factor = 1;
    GateSpec gate{};
    OCTAVO_FIELDS(ElementwiseSpec, kind, a, b, out, factor, gate)
};

// outs[i] = bases[i] + sum over k of (coefs[i * xs + k] + offset) * xs[k].
struct MixSpec {
    std::vector<Place> xs, bases, outs;
    Place coefs;
    float offset = 0;
    OCTAVO_FIELDS(MixSpec, xs, bases, outs, coefs, offset)
};

struct GatherSpec {
    Place x, out;
    OCTAVO_FIELDS(GatherSpec, x, out)
};

enum class Pooling { last, cls, mean };
struct PoolSpec {
    Place x, out;
    Pooling mode{};
    OCTAVO_FIELDS(PoolSpec, x, out, mode)
};

// The sum of each token's rows of experts, times the weights of its choice.
struct CombineSpec {
    Place x, weights, out;
    int route = 0;
    OCTAVO_FIELDS(CombineSpec, x, weights, out, route)
};

// Takes the rows that the stage of the model before has made.
struct HiddenInSpec {
    Place out;
    OCTAVO_FIELDS(HiddenInSpec, out)
};

// Copies rows of tokens to the step's output.
struct HiddenOutSpec {
    Place x;
    OCTAVO_FIELDS(HiddenOutSpec, x)
};

// Copies the head's rows to the step's output.
struct OutputSpec {
    Place x;
    OCTAVO_FIELDS(OutputSpec, x)
};

// -- products --

// What adapters make of the rows of the next product, x with the norm where there is one, at each of its sites.
struct ShrinkSpec {
    Place x;
    NormSpec norm;
    std::vector<int> sites;
    OCTAVO_FIELDS(ShrinkSpec, x, norm, sites)
};

struct LinearPart {
    PackedTiles weight;
    Place out;
    FloatArray bias{};
    Place residual{};
    int site = -1;  // where adapters update it; -1: nowhere
    OCTAVO_FIELDS(LinearPart, weight, out, bias, residual, site)
    const Tiles& tiles() const { return weight.tiles; }
};

struct LinearSpec {
    Place x;
    std::vector<LinearPart> parts;  // gated: gate, then up, into parts[0].out
    NormSpec norm{};  // of x
    std::vector<int32_t> permutation{};
    float threshold = 0;
    FloatBuffer observed{};
    // Whether the op before converts x, its out that no other op reads; else a row op does.
    bool fuses_input = false;
    bool skips_zeros = false;  // whether most numbers of x are zeros
    bool gated = false;
    GateSpec gate{};
    int chunk = -1;  // of streamed weights, which it waits for; -1: none
    OCTAVO_FIELDS(LinearSpec, x, parts, norm, permutation, threshold, observed, fuses_input, skips_zeros,
                  gated, gate, chunk)

    PreparedRows* rows = nullptr;  // x as the product reads it
    PreparedRows* converts = nullptr;  // the next product's rows, written in place of the out
    bool keeps_out = false;  // whether rows with an adapter are written there too
    std::vector<int> next_sites{};  // sites of the next product, whose adapters are prefetched
};

// Products of each head's columns with a matrix of its own: out[h] = weights[h] x[h], then tail[h].
struct HeadsSpec {
    Place x, out, tail;
    std::vector<PackedTiles> weights;
    int chunk = -1;
    OCTAVO_FIELDS(HeadsSpec, x, out, tail, weights, chunk)

    PreparedRows* rows = nullptr;  // their form; each piece converts its own
};

// -- attention --

// A choice of the blocks of keys that sparse rows read: those to which most of the attention of `q` goes, a part
// of the columns of queries, by the same part of the keys, which another group keeps.
struct KeySelection {
    Place q{};
    int group = 0, layer = 0;
    double budget = 0;  // share of the blocks that are read; 0: all
    OCTAVO_FIELDS(KeySelection, q, group, layer, budget)
};

struct AttentionSpec {
    Place q, out;
    int group = 0, layer = 0, num_heads = 0;
    int window = 0;
    bool chunks = false;
    float scale = 1, softcap = 0;
    FloatArray sinks{}, slopes{}, distances{};  // distances: [num_heads][2 * reach + 1]
    int latent_width = 0;  // where values lie in the keys
    // Scores by places (PlaceBuckets in octavo/program/ops.py): each row's products with the rows of two
    // tables, [num_heads][rows of a table]; and which of these is read, by the query's place less the key's,
    // from -reach on. None: empty.
    Place of_queries{}, of_keys{};
    std::vector<int32_t> buckets{};
    KeySelection selection{};
    KeySelection ahead{};  // what the next attention of the group chooses by; no budget: not known yet
    int ahead_layer = 0;
    OCTAVO_FIELDS(AttentionSpec, q, out, group, layer, num_heads, window, chunks, scale, softcap, sinks,
                  slopes, distances, latent_width, of_queries, of_keys, buckets, selection, ahead,
                  ahead_layer)
    Mask mask() const { return {window, chunks}; }
    int reach() const {
        return static_cast<int>(buckets.empty() ? distances.size() / num_heads : std::ssize(buckets)) / 2;
    }

    PreparedRows* converts = nullptr;  // the next product's rows, written in place of the out
    bool keeps_out = false;  // whether the out is written too in steps with adapters
};

// -- mixers --

// The rows lie where a group without keys has its values.
struct ShortConvSpec {
    Place x, out;
    int group = 0, layer = 0;
    FloatArray weight, bias;  // [taps][width], the oldest first; [width] or null
    int activation = -1;  // -1: none
    bool fills = false;  // whether the program fills the group itself, so that a row without a slot is none
    OCTAVO_FIELDS(ShortConvSpec, x, out, group, layer, weight, bias, activation, fills)
    int taps() const { return static_cast<int>(weight.size() / x.width); }
};

// Columns are taken in blocks of 16 lanes: of one head, or, where heads have one column, of as many heads. A
// head of the group is a part: as many blocks as its states have room for.
struct ScanSpec {
    Place x, dt, b, c, out, beta;
    int group = 0, layer = 0, state_size = 0, head_width = 0;
    FloatArray decay, skip, bias;  // [blocks][state_size or 1][16], [blocks][16], the same or null
    float low = 0, high = 0;
    OCTAVO_FIELDS(ScanSpec, x, dt, b, c, out, beta, group, layer, state_size, head_width, decay, skip, bias,
                  low, high)
    int num_heads() const { return dt.width; }
    int num_blocks() const { return static_cast<int>(skip.size() / kTile); }
    bool by_state() const { return decay.size() > skip.size(); }
    int blocks_a_head() const { return (head_width + kTile - 1) / kTile; }
};

// -- experts --

// How the experts of each row are chosen.
struct RouteSpec {
    enum class Score { softmax, sigmoid, softmax_top_k, sigmoid_top_k, sparsemixer };
    enum class GroupRank { two_best, best };
    Place logits, weights;
    int top_k = 0;
    Score score{};
    FloatArray bias{};  // [E] or null
    int num_groups = 1, top_groups = 1;
    GroupRank group_rank{};
    bool normalize = false, scales_rows = false;
    float scale = 1, jitter = 0;
    OCTAVO_FIELDS(RouteSpec, logits, weights, top_k, score, bias, num_groups, top_groups, group_rank,
                  normalize, scales_rows, scale, jitter)
    int num_experts() const { return logits.width; }

    int route = 0;  // its index
    PreparedRows* converts = nullptr;  // the rows that the experts' first product reads
};

// Which experts' rows this rank computes. With x and weights, gives every engine that shares the experts the rows
// of all engines' tokens: the experts' rows from here on are those.
struct DispatchSpec {
    int route = 0, first = 0, last = 0;
    Place x, weights;
    OCTAVO_FIELDS(DispatchSpec, route, first, last, x, weights)

    PreparedRows* converts = nullptr;  // the rows that the experts' first product reads
};

struct ExpertsSpec {
    int route = 0;
    Place x, out;  // x: the experts' rows, or those of the tokens that chose them
    Place scaled_by;  // weights of a choice, by which tokens' rows are multiplied before the product
    // Whether the op before converts x: a choice of experts, a dispatch, or the product of the same experts.
    bool fuses_input = false;
    std::vector<PackedTiles> weights,
        ups;  // by expert; gated: gates, and their up projections, else `ups` is empty
    FloatArray bias{}, up_bias{};  // [E][N] or null
    GateSpec gate{};
    int chunk = -1;
    OCTAVO_FIELDS(ExpertsSpec, route, x, out, scaled_by, fuses_input, weights, ups, bias, up_bias, gate,
                  chunk)

    PreparedRows* rows = nullptr;  // `attended`: tokens' rows, which each block puts together
    PreparedRows* converts = nullptr;  // the next product's rows, written in place of the out
};

// Brings the experts' rows of the other ranks to their places among this one's.
struct CollectSpec {
    Place x, out;
    int route = 0;
    std::vector<int> firsts;  // the first expert of each rank
    OCTAVO_FIELDS(CollectSpec, x, out, route, firsts)
};

// -- neurons --

// A feed-forward layer whose weights are read neuron by neuron, up to its last product.
struct NeuronsSpec {
    std::shared_ptr<NeuronCache> cache;
    int layer = 0;  // of the cache
    // f(gate), or without an up projection what the last product reads. Where gates are computed here: scores,
    // of which a sparse row uses the neurons that are not negative.
    Place opened;
    float threshold =
        0;  // f(gate) of smaller magnitude becomes zero in sparse rows, where `opened` is; 0: none
    Place out{};  // f(gate) * (up + offset); none: there is no up projection
    Place
        x{};  // what the up projection reads after the norm, in sparse rows without numbers below x_threshold
    NormSpec norm{};
    float x_threshold = 0;
    // Numbers by neuron; a bias may be null.
    FloatArray up_scales{}, up_bias{}, gate_scales{}, gate_bias{};
    GateSpec gate{};  // of gates that are computed here; else its offset alone counts
    OCTAVO_FIELDS(NeuronsSpec, cache, layer, opened, threshold, out, x, norm, x_threshold, up_scales, up_bias,
                  gate_scales, gate_bias, gate)
    bool computes_gate() const { return gate_scales != nullptr; }
    // Rows of matrices in front of a record's column.
    int num_rows() const { return out.width ? computes_gate() ? 2 : 1 : 0; }

    PreparedRows* rows = nullptr;  // what the up projection reads; null: there is none
};

// Has neurons of a layer of the cache read that comes later, by guessed scores.
struct ForeseeSpec {
    std::shared_ptr<NeuronCache> cache;
    int layer = 0;
    Place scores;
    OCTAVO_FIELDS(ForeseeSpec, cache, layer, scores)
};

// -- ranks --

// A collective over the ranks: the sum of their x, or with the width of each rank's x their columns side by
// side.
struct CollectiveSpec {
    Place x, out;
    std::vector<int> widths{};
    OCTAVO_FIELDS(CollectiveSpec, x, out, widths)
};

// -- draws --

// Draws from the logits, or copies them to the step's output.
struct SampleSpec {
    Place logits;
    OCTAVO_FIELDS(SampleSpec, logits)

    // Whether the product before keeps the best logit of each row as it makes them, where no row wants more.
    bool fuses_best = false;
};

// -- fields --

template <typename T>
concept Spec = requires { T::fields([](const char*, auto) {}); };

// Calls `take` for each Place among a spec's fields, those of its parts included.
template <typename Take>
void each_place(const Place& place, Take&& take) {
    take(place);
}
template <typename T, typename Take>
void each_place(const T& value, Take&& take) {
    if constexpr (Spec<T>)
        T::fields([&](const char*, auto member) { each_place(value.*member, take); });
    else if constexpr (requires { value.begin(); })
        for (const auto& one : value) each_place(one, take);
}

}  // namespace octavo
