// The specs of ops as plain structs: input of PlanBuilder, and parameters of ops.
//
// Each struct lists the fields that Python sets: the bindings read them as keyword arguments, and the
// builder finds the ValueSlices among them. Fields after the list are set by the builder and its fusions.
// Formulas: octavo/program/ops.py, mixers.py and expert_ops.py.
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

// The rows of a Value. `block`: tokens too, for a Value that is read only in the range that computes it; it
// needs as many rows as the threads compute at once. `experts`: the rows of an ExpertPlan.
enum class Axis : int32_t { tokens, block, samples, experts };
constexpr int kNumAxes = 4;

// Columns offset .. offset + width - 1 of the rows of an axis, where a Value is stored. A row holds all its
// Values, so that threads may run different ops on different rows. Width 0: no Value.
struct ValueSlice {
    Axis axis = Axis::tokens;
    int64_t offset = 0;
    int width = 0;
    bool on_samples() const { return axis == Axis::samples; }
    bool operator==(const ValueSlice&) const = default;
};

// Parameters, shared by the specs that use them; null if there are none.
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

// Caller's memory that steps write to; null: none.
struct FloatBuffer {
    float* data = nullptr;
    int64_t size = 0;
    std::shared_ptr<void> owner{};
};

// OCTAVO_FIELDS(Type, field, ...) lists the fields that Python sets. `Type::fields(visit)` calls
// visit(name, &Type::field) for each.
#define OCTAVO_RESCAN(...) OCTAVO_RESCAN_3(OCTAVO_RESCAN_3(OCTAVO_RESCAN_3(__VA_ARGS__)))
#define OCTAVO_RESCAN_3(...) OCTAVO_RESCAN_2(OCTAVO_RESCAN_2(OCTAVO_RESCAN_2(__VA_ARGS__)))
#define OCTAVO_RESCAN_2(...) OCTAVO_RESCAN_1(OCTAVO_RESCAN_1(OCTAVO_RESCAN_1(__VA_ARGS__)))
#define OCTAVO_RESCAN_1(...) __VA_ARGS__
#define OCTAVO_NEXT_FIELD() OCTAVO_TAKE_FIELD
#define OCTAVO_NOTHING()
#define OCTAVO_TAKE_FIELD(name, ...) \
    visit(#name, &Self::name);       \
    __VA_OPT__(OCTAVO_NEXT_FIELD OCTAVO_NOTHING()()(__VA_ARGS__))
#define OCTAVO_FIELDS(Type, ...)                      \
    static void fields(auto&& visit) {                \
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

// An activation, and the other parameters of a gate.
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

// Memory of a matmul's quantized input. `prepared`: quantized by a row op. `converted`: written by the
// matmul before, which may read `prepared` at the same time. `attended`: written by attention or routing,
// which have rows for all tokens instead of a block. `experts`: the rows of an ExpertPlan.
enum class RowArea { prepared, converted, attended, experts };
constexpr int kNumRowAreas = 4;

// A Value as a matmul reads it; its memory is StepRunner::quantized_rows.
struct QuantizedInput {
    int index = 0;
    ValueSlice x{};
    NormSpec norm{};
    RowArea area = RowArea::prepared;
    RowType type{};
    int num_groups = 0;
    bool skips_zeros = false;
    std::vector<int32_t> permutation{};  // order of the inputs; empty: unchanged
    // After the norm, values of smaller magnitude become 0 in sparse rows; 0: none.
    float threshold = 0;
    FloatBuffer observed{};  // receives each token's input after the norm

    // Converts a row of x to row `index` of `to`. The weights of the norm have the order of the
    // permutation.
    void convert(const View& view, int64_t row, const QuantizedRows& to, int64_t index) const;
    int64_t at(const View& view, int64_t row) const;
    size_t row_bytes() const { return row_elements(type, num_groups) * element_bytes(type); }
};

// -- row ops --

struct EmbeddingSpec {
    PackedTiles table;
    ValueSlice out;
    float scale = 1;
    bool by_position = false;  // reads row `position + offset` of the table instead of the token's
    int offset = 0;
    int axis = 0;  // of the positions
    int first_row = -1;  // token of the table's first row, other ranks have the rest; -1: it has all tokens
    int site = -1;  // adapter site; -1: none
    OCTAVO_FIELDS(EmbeddingSpec, table, out, scale, by_position, offset, axis, first_row, site)
};

// Replaces rows of `base` by input rows of the batch (input embeddings).
struct InputRowsSpec {
    ValueSlice base, out;  // no base: zeros
    OCTAVO_FIELDS(InputRowsSpec, base, out)
};

struct RowNormSpec {
    ValueSlice x, out;
    NormSpec norm;
    int group_width = 0;  // columns per norm group; 0: the whole row
    bool each_group = false;  // whether the weights cover the whole row instead of one group
    OCTAVO_FIELDS(RowNormSpec, x, out, norm, group_width, each_group)
};

// Rotary frequencies, and the factor on cosines and sines. Positions from long_start on use the long
// frequencies, if there are any, with p - long_start as position.
struct AnglesSpec {
    std::vector<double> inv_freq;
    double mscale = 1;
    int long_start = 0;
    std::vector<double> long_inv_freq{};
    double long_mscale = 1;
    OCTAVO_FIELDS(AnglesSpec, inv_freq, mscale, long_start, long_inv_freq, long_mscale)
};

struct RopeSpec {
    ValueSlice x, out;
    int num_heads = 0, head_width = 0;
    int rotary_dim = 0, rotary_start = 0;  // part of each head that is rotated
    bool interleaved = false;
    int angles = 0;  // index of its AnglesSpec
    std::vector<int> axes = {};  // axis of positions for each frequency; empty: the first
    OCTAVO_FIELDS(RopeSpec, x, out, num_heads, head_width, rotary_dim, rotary_start, interleaved, angles,
                  axes)
};

struct KvWriteSpec {
    std::vector<ValueSlice> k_parts;
    ValueSlice v;  // none: the group stores no values
    int group = 0, layer = 0;
    OCTAVO_FIELDS(KvWriteSpec, k_parts, v, group, layer)
};

enum class Elementwise { add, mul, scale, activate, softcap, gate, clip, match, largest };
// `add` and `mul`: each column of b applies to out.width / b.width neighbouring columns of a.
struct ElementwiseSpec {
    Elementwise kind{};
    ValueSlice a, b, out;
    float factor = 1;
    GateSpec gate{};
    OCTAVO_FIELDS(ElementwiseSpec, kind, a, b, out, factor, gate)
};

struct XieluSpec {
    ValueSlice x, out;
    float positive = 0, negative = 0, beta = 0, eps = 0;
    OCTAVO_FIELDS(XieluSpec, x, out, positive, negative, beta, eps)
};

// outs[i] = bases[i] + sum over k of (coefs[i * xs + k] + offset) * xs[k].
struct MixSpec {
    std::vector<ValueSlice> xs, bases, outs;
    ValueSlice coefs;
    float offset = 0;
    OCTAVO_FIELDS(MixSpec, xs, bases, outs, coefs, offset)
};

struct GatherSpec {
    ValueSlice x, out;
    OCTAVO_FIELDS(GatherSpec, x, out)
};

enum class Pooling { last, cls, mean };
struct PoolSpec {
    ValueSlice x, out;
    Pooling mode{};
    OCTAVO_FIELDS(PoolSpec, x, out, mode)
};

// Sum of each token's expert rows, times the weights of its choices.
struct CombineSpec {
    ValueSlice x, weights, out;
    int route = 0;
    OCTAVO_FIELDS(CombineSpec, x, weights, out, route)
};

// Reads the hidden rows from the previous pipeline stage.
struct HiddenInSpec {
    ValueSlice out;
    OCTAVO_FIELDS(HiddenInSpec, out)
};

// Copies token rows to the step's output.
struct HiddenOutSpec {
    ValueSlice x;
    OCTAVO_FIELDS(HiddenOutSpec, x)
};

// Copies the head's rows to the step's output.
struct OutputSpec {
    ValueSlice x;
    OCTAVO_FIELDS(OutputSpec, x)
};

// -- matmuls --

// Computes h of adapters for the next linear op: its input x, with the norm if there is one, at each of its
// sites.
struct ShrinkSpec {
    ValueSlice x;
    NormSpec norm;
    std::vector<int> sites;
    OCTAVO_FIELDS(ShrinkSpec, x, norm, sites)
};

struct LinearPart {
    PackedTiles weight;
    ValueSlice out;
    FloatArray bias{};
    ValueSlice residual{};
    int site = -1;  // adapter site; -1: none
    OCTAVO_FIELDS(LinearPart, weight, out, bias, residual, site)
    const Tiles& tiles() const { return weight.tiles; }
};

struct LinearSpec {
    ValueSlice x;
    std::vector<LinearPart> parts;  // gated: gate, then up, into parts[0].out
    NormSpec norm{};  // of x
    std::vector<int32_t> permutation{};
    float threshold = 0;
    FloatBuffer observed{};
    // Whether the op before quantizes x and no other op reads it; else a row op does.
    bool fuses_input = false;
    bool skips_zeros = false;  // whether most values of x are zeros
    bool gated = false;
    GateSpec gate{};
    int chunk = -1;  // chunk of streamed weights to wait for; -1: none
    OCTAVO_FIELDS(LinearSpec, x, parts, norm, permutation, threshold, observed, fuses_input, skips_zeros,
                  gated, gate, chunk)

    QuantizedInput* input = nullptr;  // x as the matmul reads it
    QuantizedInput* next_input = nullptr;  // input of the next matmul, written instead of `out`
    bool keeps_out = false;  // whether rows with an adapter are written to `out` too
    std::vector<int> next_sites{};  // adapter sites of the next linear op, which this op prefetches
};

// Multiplies each head's columns by its own matrix: out[h] = weights[h] x[h], followed by tail[h].
struct HeadsSpec {
    ValueSlice x, out, tail;
    std::vector<PackedTiles> weights;
    int chunk = -1;
    OCTAVO_FIELDS(HeadsSpec, x, out, tail, weights, chunk)

    QuantizedInput* input = nullptr;  // type and layout of the rows that each item quantizes
};

// -- attention --

// Selection of the key blocks that sparse rows read: those with the largest attention weight, estimated
// from a part of the queries' dimensions, `q`, and the same part of the keys, which a separate group
// stores.
struct KeySelection {
    ValueSlice q{};
    int group = 0, layer = 0;
    double budget = 0;  // share of the blocks to read; 0: all
    OCTAVO_FIELDS(KeySelection, q, group, layer, budget)
};

struct AttentionSpec {
    ValueSlice q, out;
    int group = 0, layer = 0, num_heads = 0;
    int window = 0;
    bool chunks = false;
    float scale = 1, softcap = 0;
    FloatArray sinks{}, slopes{}, distances{};  // distances: [num_heads][2 * reach + 1]
    int latent_width = 0;  // width of values that are stored in the keys
    // Position scores (PositionBuckets in octavo/program/ops.py): products of each row with the rows of two
    // tables, [num_heads][table rows], and the table row to use by query index minus key index, from -reach
    // on. Empty: none.
    ValueSlice of_queries{}, of_keys{};
    std::vector<int32_t> buckets{};
    KeySelection selection{};
    KeySelection ahead{};  // selection of the group's next attention; budget 0: not known yet
    int ahead_layer = 0;
    OCTAVO_FIELDS(AttentionSpec, q, out, group, layer, num_heads, window, chunks, scale, softcap, sinks,
                  slopes, distances, latent_width, of_queries, of_keys, buckets, selection, ahead,
                  ahead_layer)
    Mask mask() const { return {window, chunks}; }
    int reach() const {
        return static_cast<int>(buckets.empty() ? distances.size() / num_heads : std::ssize(buckets)) / 2;
    }

    QuantizedInput* next_input = nullptr;  // input of the next matmul, written instead of `out`
    bool keeps_out = false;  // whether `out` is written too in steps with adapters
};

// -- mixers --

// Previous rows are stored as the values of a group without keys.
struct ShortConvSpec {
    ValueSlice x, out;
    int group = 0, layer = 0;
    FloatArray weight, bias;  // [taps][width], the oldest first; [width] or null
    int activation = -1;  // -1: none
    bool fills = false;  // whether the program writes the group itself; rows without a slot are then skipped
    OCTAVO_FIELDS(ShortConvSpec, x, out, group, layer, weight, bias, activation, fills)
    int taps() const { return static_cast<int>(weight.size() / x.width); }
};

// Columns are computed in blocks of 16 lanes: of one head, or of 16 heads with one column each. A head of
// the cache group is a part: as many blocks as its states have room for.
struct ScanSpec {
    ValueSlice x, dt, b, c, out, beta;
    int group = 0, layer = 0, state_size = 0, head_width = 0;
    FloatArray decay, skip;  // [blocks][state_size or 1][16], [blocks][16]
    FloatArray bias;  // as skip; [heads][state_size] with dt_by_state; or null
    float low = 0, high = 0;
    OCTAVO_FIELDS(ScanSpec, x, dt, b, c, out, beta, group, layer, state_size, head_width, decay, skip, bias,
                  low, high)
    int num_heads() const { return x.width / head_width; }
    bool dt_by_state() const { return dt.width != num_heads(); }
    int num_blocks() const { return static_cast<int>(skip.size() / kTile); }
    bool by_state() const { return decay.size() > skip.size(); }
    int blocks_per_head() const { return (head_width + kTile - 1) / kTile; }
};

// -- experts --

// Routing: how the experts of each row are chosen.
struct RouteSpec {
    enum class Score { softmax, sigmoid, softmax_top_k, sigmoid_top_k, sparsemixer };
    enum class GroupRank { two_best, best };
    ValueSlice logits, weights;
    int top_k = 0;
    Score score{};
    FloatArray bias{}, factors{};  // [E] or null
    int num_groups = 1, top_groups = 1;
    GroupRank group_rank{};
    bool normalize = false, scales_rows = false;
    float scale = 1, jitter = 0;
    OCTAVO_FIELDS(RouteSpec, logits, weights, top_k, score, bias, num_groups, top_groups, group_rank,
                  normalize, scales_rows, scale, jitter, factors)
    int num_experts() const { return logits.width; }

    int route = 0;  // index of the choice
    QuantizedInput* next_input = nullptr;  // input of the experts' first matmul
};

// The experts that this rank computes. With x and weights, sends the tokens of this engine to all engines
// that share the experts; expert rows from here on are those of all engines' tokens.
struct DispatchSpec {
    int route = 0, first = 0, last = 0;
    ValueSlice x, weights;
    OCTAVO_FIELDS(DispatchSpec, route, first, last, x, weights)

    QuantizedInput* next_input = nullptr;  // input of the experts' first matmul
};

struct ExpertsSpec {
    int route = 0;
    ValueSlice x, out;  // x: expert rows, or the rows of the tokens that chose them
    ValueSlice scaled_by;  // weights of choices that token rows are multiplied by before the matmul
    // Whether the op before quantizes x: routing, a dispatch, or a matmul of the same experts.
    bool fuses_input = false;
    std::vector<PackedTiles> weights,
        ups;  // by expert; gated: gates, and their up projections in `ups`, else `ups` is empty
    FloatArray bias{}, up_bias{};  // [E][N] or null
    GateSpec gate{};
    int chunk = -1;
    OCTAVO_FIELDS(ExpertsSpec, route, x, out, scaled_by, fuses_input, weights, ups, bias, up_bias, gate,
                  chunk)

    QuantizedInput* input = nullptr;  // `attended`: token rows, which each block gathers
    QuantizedInput* next_input = nullptr;  // input of the next matmul, written instead of `out`
};

// Brings the expert rows of the other ranks to this rank.
struct CollectSpec {
    ValueSlice x, out;
    int route = 0;
    std::vector<int> firsts;  // first expert of each rank
    OCTAVO_FIELDS(CollectSpec, x, out, route, firsts)
};

// -- neurons --

// A feed-forward layer whose weights are read neuron by neuron, up to its down projection.
struct NeuronsSpec {
    std::shared_ptr<NeuronCache> cache;
    int layer = 0;  // layer of the cache
    // f(gate), or the input of the down projection if there is no up projection. If gates are computed
    // here: scores; a sparse row uses the neurons with scores >= 0.
    ValueSlice opened;
    float threshold = 0;  // in sparse rows, f(gate) of smaller magnitude becomes 0 in `opened`; 0: none
    ValueSlice out{};  // f(gate) * (up + offset); none: there is no up projection
    ValueSlice
        x{};  // input of the up projection after the norm; in sparse rows without values below x_threshold
    NormSpec norm{};
    float x_threshold = 0;
    // By neuron; a bias may be null.
    FloatArray up_scales{}, up_bias{}, gate_scales{}, gate_bias{};
    GateSpec gate{};  // of gates that are computed here; otherwise only its up_offset is used
    OCTAVO_FIELDS(NeuronsSpec, cache, layer, opened, threshold, out, x, norm, x_threshold, up_scales, up_bias,
                  gate_scales, gate_bias, gate)
    bool computes_gate() const { return gate_scales != nullptr; }
    // Matrix rows before the column of a record.
    int num_rows() const { return out.width ? computes_gate() ? 2 : 1 : 0; }

    QuantizedInput* input = nullptr;  // input of the up projection; null: there is none
};

// Prefetches neurons of a later layer by predicted scores.
struct PrefetchNeuronsSpec {
    std::shared_ptr<NeuronCache> cache;
    int layer = 0;
    ValueSlice scores;
    OCTAVO_FIELDS(PrefetchNeuronsSpec, cache, layer, scores)
};

// -- ranks --

// A collective over the tensor-parallel ranks: the sum of their x, or with `widths`, the width of each
// rank's x, the concatenation of their columns. `route`: of expert rows; -1: the rows are tokens or samples.
struct CollectiveSpec {
    ValueSlice x, out;
    std::vector<int> widths{};
    int route = -1;
    OCTAVO_FIELDS(CollectiveSpec, x, out, widths, route)
};

// -- sampling --

// Samples from the logits, or copies them to the step's output.
struct SampleSpec {
    ValueSlice logits;
    OCTAVO_FIELDS(SampleSpec, logits)

    // Whether the linear op before keeps the best logit of each row, which is used if all rows are greedy.
    bool fuses_argmax = false;
};

// -- fields --

template <typename T>
concept Spec = requires { T::fields([](const char*, auto) {}); };

// Calls `visit` for each ValueSlice among a spec's fields, nested specs included.
template <typename Visit>
void for_each_slice(const ValueSlice& slice, Visit&& visit) {
    visit(slice);
}
template <typename T, typename Visit>
void for_each_slice(const T& value, Visit&& visit) {
    if constexpr (Spec<T>)
        T::fields([&](const char*, auto member) { for_each_slice(value.*member, visit); });
    else if constexpr (requires { value.begin(); })
        for (const auto& one : value) for_each_slice(one, visit);
}

}  // namespace octavo
