// An Executor as Python builds and runs it: one method for each kind of op, with plain tuples and arrays.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "arrays.h"
#include "executor.h"
#include "levels.h"
#include "read_batch.h"

namespace octavo {

namespace nb = nanobind;

// One instruction set's kernels with the threads that run them.
struct Device {
    ThreadPool pool;
    const KernelTable& kernels;
    WeightMemory weights;
    Device(int threads, const std::string& directory, const std::string& level)
        : pool(threads), kernels(load_level(directory, level)) {}
};

using PlaceTuple = std::tuple<std::string, int64_t, int>;  // (axis, offset, width)
using GateTuple = std::tuple<int, float, float, float>;  // (activation or -1, clamp or 0, alpha, up_offset)

struct Builder {
    std::shared_ptr<Device> device;
    Executor executor;

    Builder(std::shared_ptr<Device> d, int max_tokens, int vocab)
        : device(std::move(d)), executor(device->pool, device->kernels, max_tokens, vocab) {}

    void begin_stage(const std::string& axis, int range) { executor.begin_stage(axis == "samples", range); }

    void embedding(const std::shared_ptr<PackedTiles>& table, const PlaceTuple& out, float scale,
                   bool by_position, int offset, int axis) {
        if (by_position) executor.read_axis(axis);
        executor.add_row_op(make_embedding(EmbeddingSpec{.table = table->tiles,
                                                         .owner = table->memory,
                                                         .out = place_of(out),
                                                         .scale = scale,
                                                         .by_position = by_position,
                                                         .offset = offset,
                                                         .axis = axis}));
    }
    void norm(const PlaceTuple& x, const PlaceTuple& out, const nb::object& norm, int group_width) {
        executor.add_row_op(make_norm(place_of(x), place_of(out), norm_of(norm), group_width));
    }
    // Returns the index that `rope` takes.
    int angles(const std::vector<double>& inv_freq, double mscale) {
        tables_.push_back(executor.add_angles(inv_freq, mscale));
        return (int)tables_.size() - 1;
    }
    void rope(const PlaceTuple& x, const PlaceTuple& out, int num_heads, int head_width, int rotary_dim,
              int rotary_start, bool interleaved, int angles) {
        executor.add_row_op(make_rope(RopeSpec{.x = place_of(x),
                                               .out = place_of(out),
                                               .num_heads = num_heads,
                                               .head_width = head_width,
                                               .rotary_dim = rotary_dim,
                                               .rotary_start = rotary_start,
                                               .interleaved = interleaved,
                                               .angles = tables_.at(angles)}));
    }
    // v: None where the group stores no values.
    void kv_write(const std::vector<PlaceTuple>& k_parts, const nb::object& v, int group, int layer) {
        std::vector<Place> parts;
        for (const PlaceTuple& part : k_parts) parts.push_back(place_of(part));
        const Place values = v.is_none() ? Place{} : place_of(nb::cast<PlaceTuple>(v));
        executor.add_row_op(make_kv_write(std::move(parts), values, group, layer));
    }
    void elementwise(const std::string& kind, const PlaceTuple& a, const PlaceTuple& b, const PlaceTuple& out,
                     float factor, const GateTuple& gate) {
        executor.add_row_op(make_elementwise(ElementwiseSpec{.kind = elementwise_of(kind),
                                                             .a = place_of(a),
                                                             .b = place_of(b),
                                                             .out = place_of(out),
                                                             .factor = factor,
                                                             .gate = epilogue_of(gate, true)}));
    }
    void gather(const PlaceTuple& x, const PlaceTuple& out) {
        executor.add_row_op(make_gather(place_of(x), place_of(out)));
    }

    void pool(const PlaceTuple& x, const PlaceTuple& out, const std::string& mode) {
        executor.add_row_op(make_pool(place_of(x), place_of(out), pooling_of(mode)));
    }

    // A row op: converts x for the product of `tiles` in the next stage. Returns the index that `linear`
    // takes.
    int conversion(const PlaceTuple& x, const nb::object& norm, const PackedTiles& tiles) {
        rows_.push_back(executor.add_conversion(place_of(x), norm_of(norm), tiles.tiles));
        return (int)rows_.size() - 1;
    }
    // Lets the last stage write x, its out, as the product of `tiles` reads it.
    int convert_in_last_stage(const PlaceTuple& x, const PackedTiles& tiles) {
        rows_.push_back(executor.convert_in_last_stage(place_of(x), tiles.tiles));
        return (int)rows_.size() - 1;
    }
    // parts: (tiles, out, bias or None, residual or None) each.
    void linear(int rows, const nb::list& parts, bool gated, const GateTuple& gate) {
        LinearSpec spec{.rows = rows_.at(rows), .epilogue = epilogue_of(gate, gated)};
        for (const auto& item : parts) spec.parts.push_back(part_of(nb::cast<nb::tuple>(item)));
        executor.add_linear(std::move(spec));
    }
    // Returns the index that the methods of experts take.
    int route(const PlaceTuple& logits, const PlaceTuple& weights, int top_k, const std::string& score,
              const nb::object& bias, int num_groups, int top_groups, bool normalize, float scale) {
        const char* scores[] = {"softmax", "sigmoid", "softmax_top_k"};
        return executor.add_route(
            RouteSpec{.logits = place_of(logits),
                      .weights = place_of(weights),
                      .top_k = top_k,
                      .score = (RouteSpec::Score)index_of(score, scores, "score of experts"),
                      .bias = keep(bias),
                      .num_groups = num_groups,
                      .top_groups = top_groups,
                      .normalize = normalize,
                      .scale = scale});
    }
    // Lets the last stage, a choice of experts, write x as their product of `tiles` reads it.
    int convert_in_route(const PlaceTuple& x, const PackedTiles& tiles) {
        rows_.push_back(executor.convert_in_route(place_of(x), tiles.tiles));
        return (int)rows_.size() - 1;
    }
    int expert_conversion(const PlaceTuple& x, int route, const PackedTiles& tiles) {
        rows_.push_back(executor.add_expert_conversion(place_of(x), route, tiles.tiles));
        return (int)rows_.size() - 1;
    }
    // tiles, ups: PackedTiles of each expert; `ups` is empty but where gated.
    void experts(int route, int rows, const nb::list& tiles, const nb::list& ups, const PlaceTuple& out,
                 const nb::object& bias, const nb::object& up_bias, const GateTuple& gate) {
        ExpertsSpec spec{.rows = rows_.at(rows),
                         .plan = executor.expert_plan(route),
                         .out = place_of(out),
                         .bias = keep(bias),
                         .up_bias = keep(up_bias),
                         .epilogue = epilogue_of(gate, ups.size() > 0)};
        const auto take = [&](const nb::list& list, std::vector<Tiles>& to) {
            for (const auto& item : list) {
                const auto packed = nb::cast<std::shared_ptr<PackedTiles>>(item);
                to.push_back(packed->tiles);
                spec.owners.push_back(packed->memory);
            }
        };
        take(tiles, spec.weights);
        take(ups, spec.ups);
        executor.add_experts(std::move(spec));
    }
    void combine(const PlaceTuple& x, const PlaceTuple& weights, const PlaceTuple& out, int route) {
        executor.add_row_op(
            make_combine(place_of(x), place_of(weights), place_of(out), *executor.expert_plan(route)));
    }
    // tiles: PackedTiles of each head; tail: None, or columns put behind each head's result.
    void heads(const PlaceTuple& x, const PlaceTuple& out, const nb::object& tail, const nb::list& tiles) {
        HeadsSpec spec{.x = place_of(x), .out = place_of(out)};
        if (!tail.is_none()) spec.tail = place_of(nb::cast<PlaceTuple>(tail));
        for (const auto& item : tiles) {
            const auto packed = nb::cast<std::shared_ptr<PackedTiles>>(item);
            spec.weights.push_back(packed->tiles);
            spec.owners.push_back(packed->memory);
        }
        executor.add_heads(std::move(spec));
    }
    void attention(const PlaceTuple& q, const PlaceTuple& out, int group, int layer, int num_heads,
                   int window, float scale, float softcap, const nb::object& sinks, const nb::object& slopes,
                   const nb::object& distances, int reach, int latent_width) {
        executor.add_attention(AttentionSpec{.q = place_of(q),
                                             .out = place_of(out),
                                             .group = group,
                                             .layer = layer,
                                             .num_heads = num_heads,
                                             .window = window,
                                             .scale = scale,
                                             .softcap = softcap,
                                             .sinks = keep(sinks),
                                             .slopes = keep(slopes),
                                             .distances = keep(distances),
                                             .reach = reach,
                                             .latent_width = latent_width});
    }
    void sampling(const PlaceTuple& logits) { executor.add_sampling(place_of(logits)); }
    void output(const PlaceTuple& rows) { executor.add_output(place_of(rows)); }
    void finish(int64_t token_floats, int64_t block_floats, int64_t sample_floats, int64_t expert_floats) {
        const int64_t floats[kNumAxes] = {token_floats, block_floats, sample_floats, expert_floats};
        for (int axis = 0; axis < kNumAxes; axis++)
            if (ends_[axis] > floats[axis]) throw std::logic_error("a Value behind the end of its row");
        executor.finish(token_floats, block_floats, sample_floats, expert_floats);
    }

    // batch: StepBatch; output: StepOutput, whose arrays are filled in; check: None, or a function that is
    // given the step's index once it is drawn, and returns None or a Redraw.
    void run(const nb::object& batch, const nb::object& output, const std::shared_ptr<KvMemory>& kv,
             const nb::object& check) {
        const Batch step = read_batch(batch, output);
        {
            nb::gil_scoped_release release;
            executor.run(step, *kv);
        }
        check_draws(step, *kv, check, 0);
    }

    void check_draws(const Batch& step, const KvMemory& kv, const nb::object& check, int index) {
        const nb::object found = check.is_none() ? nb::none() : check(index);
        if (found.is_none()) return;
        const auto samples = array_of<Array<int32_t, nb::ndim<1>>>(found, "samples");
        const auto masks = array_of<Array<uint32_t, nb::ndim<2>>>(found, "masks");
        if (masks.shape(0) != samples.size() || (int)masks.shape(1) != (executor.vocab() + 31) / 32)
            throw std::invalid_argument("masks: not one for each row that is drawn again");
        const std::vector<int32_t> rows(samples.data(), samples.data() + samples.size());
        nb::gil_scoped_release release;
        executor.redraw(step, kv, rows, masks.data());
    }

    // Returns how many steps were computed. An exception in any but the first ends them instead: the caller
    // meets it again when it computes that step next.
    int decode(const nb::object& batch, const nb::object& output, const std::shared_ptr<KvMemory>& kv,
               const nb::object& steps, const nb::callable& goes_on, const nb::object& check) {
        const int num_steps = nb::cast<int>(steps.attr("num_steps"));
        const Batch first = read_batch(batch, output, num_steps);
        DecodeBatch decoding(first, kv->num_groups(), num_steps, read_end_tokens(steps, first.num_requests));
        for (int done = 0;; done++) {
            try {
                nb::gil_scoped_release release;
                executor.run(decoding.batch(), *kv);
            } catch (const std::exception&) {
                if (done == 0) throw;
                return done;
            }
            check_draws(decoding.batch(), *kv, check, done);
            const bool is_last = done + 1 == num_steps || !decoding.advance();
            if (is_last || !nb::cast<bool>(goes_on(done))) return done + 1;
        }
    }

    nb::list profiled() const {
        nb::list rows;
        for (const auto& [name, time] : executor.profiled())
            rows.append(nb::make_tuple(name, time.code, time.calls, time.seconds, time.cost.bytes,
                                       time.cost.operations));
        return rows;
    }

  private:
    Place place_of(const PlaceTuple& t) {
        const auto& [name, offset, width] = t;
        const char* names[] = {"tokens", "block", "samples", "expert_rows"};
        const auto axis = (Axis)index_of(name, names, "axis");
        ends_[(int)axis] = std::max(ends_[(int)axis], offset + width);
        return Place{axis, offset, width};
    }
    const float* keep(const nb::object& array) {
        if (array.is_none()) return nullptr;
        const auto floats = nb::cast<Array<float>>(array);
        return executor.keep({floats.data(), floats.data() + floats.size()});
    }
    // None, or (weight, bias or None, eps, weight_offset, is_layer_norm).
    Norm norm_of(const nb::object& norm) {
        if (norm.is_none()) return {};
        const auto t = nb::cast<nb::tuple>(norm);
        return Norm{.weight = keep(t[0]),
                    .bias = keep(t[1]),
                    .eps = nb::cast<float>(t[2]),
                    .weight_offset = nb::cast<float>(t[3]),
                    .is_layer_norm = nb::cast<bool>(t[4])};
    }
    LinearPart part_of(const nb::tuple& t) {
        const auto tiles = nb::cast<std::shared_ptr<PackedTiles>>(t[0]);
        LinearPart part{.tiles = tiles->tiles,
                        .owner = tiles->memory,
                        .out = place_of(nb::cast<PlaceTuple>(t[1])),
                        .bias = keep(t[2])};
        part.has_residual = !t[3].is_none();
        if (part.has_residual) part.residual = place_of(nb::cast<PlaceTuple>(t[3]));
        return part;
    }
    static Epilogue epilogue_of(const GateTuple& gate, bool gated) {
        const auto& [activation, clamp, alpha, up_offset] = gate;
        return Epilogue{
            .activation = activation, .gated = gated, .clamp = clamp, .alpha = alpha, .up_offset = up_offset};
    }
    static Elementwise elementwise_of(const std::string& kind) {
        const char* names[] = {"add", "mul", "scale", "activate", "softcap", "gate"};
        return (Elementwise)index_of(kind, names, "elementwise op");
    }
    static Pooling pooling_of(const std::string& mode) {
        const char* names[] = {"last", "cls", "mean"};
        return (Pooling)index_of(mode, names, "way of pooling");
    }
    template <size_t N>
    static int index_of(const std::string& name, const char* const (&names)[N], const char* what) {
        const auto found = std::find(std::begin(names), std::end(names), name);
        if (found == std::end(names))
            throw std::invalid_argument(std::string("unknown ") + what + " " + name);
        return (int)(found - std::begin(names));
    }

    std::vector<RopeAngles*> tables_;
    std::vector<const PreparedRows*> rows_;
    int64_t ends_[kNumAxes] = {};  // behind the last float that any Value has in a row
};

}  // namespace octavo
