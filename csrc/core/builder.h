// An Executor as Python builds and runs it: one method for each kind of op, with plain tuples and arrays.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "arrays.h"
#include "executor.h"
#include "levels.h"
#include "mixers.h"
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
// (activation or -1, clamp or 0, alpha, up_offset, threshold)
using GateTuple = std::tuple<int, float, float, float, float>;

struct Builder {
    std::shared_ptr<Device> device;
    Executor executor;

    Builder(std::shared_ptr<Device> d, int max_tokens, int vocab)
        : device(std::move(d)), executor(device->pool, device->kernels, max_tokens, vocab) {}

    void begin_stage(const std::string& axis, int range) { executor.begin_stage(axis == "samples", range); }

    // The next product waits for a chunk of `stream`; set before the first one.
    void stream(std::shared_ptr<WeightStream> weights) { executor.stream(std::move(weights)); }
    void await_chunk(int chunk) { executor.await_chunk(chunk); }

    // Lets this executor be one of several ranks'.
    void meet(std::shared_ptr<SharedRanks> ranks) { executor.meet(std::move(ranks)); }
    void all_reduce(const PlaceTuple& x, const PlaceTuple& out) {
        executor.add_collective(CollectiveSpec{place_of(x), place_of(out)});
    }
    // widths: of each rank's x.
    void all_gather(const PlaceTuple& x, const PlaceTuple& out, const std::vector<int>& widths) {
        executor.add_collective(CollectiveSpec{place_of(x), place_of(out), widths});
    }
    void dispatch(int route, int first, int last) { executor.own_experts(route, first, last); }
    // Lets this executor be one of several engines' that share their experts. ranks: those of all engines.
    void meet_engines(std::shared_ptr<SharedRanks> ranks, int num_engines) {
        executor.meet_engines(std::move(ranks), num_engines);
    }
    void dispatch_rows(const PlaceTuple& x, const PlaceTuple& weights, int route) {
        executor.add_dispatch(place_of(x), place_of(weights), route);
    }
    // firsts: the first expert of each rank.
    void collect(const PlaceTuple& x, const PlaceTuple& out, int route, const std::vector<int>& firsts) {
        executor.add_collect(CollectSpec{place_of(x), place_of(out), executor.expert_plan(route), firsts});
    }

    // first_row: the token of the table's first row, where it is a part; else -1.
    // site: where adapters update the table; -1: nowhere.
    void embedding(const std::shared_ptr<PackedTiles>& table, const PlaceTuple& out, float scale,
                   bool by_position, int offset, int axis, int first_row, int site) {
        if (by_position) executor.read_axis(axis);
        executor.add_row_op(make_embedding(EmbeddingSpec{.table = table->tiles,
                                                         .owner = table->memory,
                                                         .out = place_of(out),
                                                         .scale = scale,
                                                         .by_position = by_position,
                                                         .offset = offset,
                                                         .axis = axis,
                                                         .first_row = first_row,
                                                         .site = site}));
    }
    // base: what a row is where none is given; None: zeros.
    void given(const std::optional<PlaceTuple>& base, const PlaceTuple& out) {
        executor.take_given(place_of(out).width);
        executor.add_row_op(make_given(base ? place_of(*base) : Place{}, place_of(out)));
    }
    // each_group: whether every group of columns has weights of its own.
    void norm(const PlaceTuple& x, const PlaceTuple& out, const nb::object& norm, int group_width,
              bool each_group) {
        executor.add_row_op(make_norm(place_of(x), place_of(out), norm_of(norm), group_width, each_group));
    }
    // Returns the index that `rope` takes. Positions from long_start on have the long numbers, where there
    // are any.
    int angles(const std::vector<double>& inv_freq, double mscale, int long_start,
               const std::vector<double>& long_inv_freq, double long_mscale) {
        tables_.push_back(executor.add_angles({inv_freq, mscale}));
        if (!long_inv_freq.empty()) tables_.back()->turn_from(long_start, {long_inv_freq, long_mscale});
        return static_cast<int>(tables_.size()) - 1;
    }
    void rope(const PlaceTuple& x, const PlaceTuple& out, int num_heads, int head_width, int rotary_dim,
              int rotary_start, bool interleaved, int angles, const std::vector<int>& axes) {
        for (const int axis : axes) executor.read_axis(axis);
        executor.add_row_op(make_rope(RopeSpec{.x = place_of(x),
                                               .out = place_of(out),
                                               .num_heads = num_heads,
                                               .head_width = head_width,
                                               .rotary_dim = rotary_dim,
                                               .rotary_start = rotary_start,
                                               .interleaved = interleaved,
                                               .angles = tables_.at(angles),
                                               .axes = axes}));
    }
    // v: None where the group stores no values.
    void kv_write(const std::vector<PlaceTuple>& k_parts, const nb::object& v, int group, int layer) {
        std::vector<Place> parts = places_of(k_parts);
        const Place values = v.is_none() ? Place{} : place_of(nb::cast<PlaceTuple>(v));
        executor.add_row_op(make_kv_write(std::move(parts), values, group, layer));
        executor.note_kv_write(group, layer);
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
    // takes. With a permutation of its inputs, the norm's numbers are permuted too.
    int conversion(const PlaceTuple& x, const nb::object& norm, const PackedTiles& tiles,
                   std::vector<int32_t> permutation, float threshold) {
        rows_.push_back(executor.add_conversion(place_of(x), norm_of(norm), tiles.tiles,
                                                std::move(permutation), threshold));
        return static_cast<int>(rows_.size()) - 1;
    }
    // Has the numbers of converted rows copied to `copies` [max_tokens][width] in each step.
    void observe(int rows, const Out<float>& copies) {
        PreparedRows& of = *rows_.at(rows);
        if (static_cast<int64_t>(copies.size()) < static_cast<int64_t>(executor.max_tokens()) * of.x.width)
            throw nb::value_error("an array smaller than the rows that are copied to it");
        executor.observe(of, copies.data());
        observed_.push_back(copies);
    }
    // Lets the last stage write x, its out, as the product of `tiles` reads it.
    int convert_in_last_stage(const PlaceTuple& x, const PackedTiles& tiles, bool keeps_out) {
        rows_.push_back(executor.convert_in_last_stage(place_of(x), tiles.tiles, keeps_out));
        return static_cast<int>(rows_.size()) - 1;
    }
    // Returns a new site of a table.
    int table_site() { return executor.adapters().add_site(-1); }
    // A stage that computes what adapters make of the rows of the next product. Returns its sites.
    std::vector<int> shrink(const PlaceTuple& x, const nb::object& norm, int num_sites) {
        Adapters& adapters = executor.adapters();
        const int group = adapters.add_group();
        std::vector<int> sites;
        for (int i = 0; i < num_sites; i++) sites.push_back(adapters.add_site(group));
        executor.add_shrink(place_of(x), norm_of(norm), sites);
        return sites;
    }
    // updates: by site None, or (A, B, scales, gain or None, bias or None), whose arrays are kept.
    void put_adapter(int slot, const nb::list& updates) {
        std::vector<SiteUpdate> sites;
        for (const auto& item : updates) sites.push_back(update_of(nb::borrow(item)));
        executor.adapters().put(slot, std::move(sites), executor.adapter_rows());
        if (slot >= static_cast<int>(adapter_arrays_.size())) adapter_arrays_.resize(slot + 1);
        adapter_arrays_[slot] = updates;
    }
    void drop_adapter(int slot) {
        executor.adapters().drop(slot);
        if (slot >= 0 && slot < static_cast<int>(adapter_arrays_.size())) adapter_arrays_[slot] = nb::none();
    }
    // parts: (tiles, out, bias or None, residual or None, site or -1) each.
    // skips_zeros: whether most of the rows' numbers are zeros.
    void linear(int rows, const nb::list& parts, bool gated, const GateTuple& gate, bool skips_zeros) {
        rows_.at(rows)->rows.skips_zeros = skips_zeros;
        LinearSpec spec{.rows = rows_.at(rows), .epilogue = epilogue_of(gate, gated)};
        for (const auto& item : parts) spec.parts.push_back(part_of(nb::cast<nb::tuple>(item)));
        executor.add_linear(std::move(spec));
    }
    // weight [taps][width], the oldest first.
    void short_conv(const PlaceTuple& x, const PlaceTuple& out, int group, int layer,
                    const nb::object& weight, const nb::object& bias, int activation, bool fills) {
        const Place row = place_of(x);
        executor.add_stage(make_short_conv(ShortConvSpec{
            .x = row,
            .out = place_of(out),
            .group = group,
            .layer = layer,
            .taps = static_cast<int>(nb::cast<Array<float>>(weight).size() / static_cast<size_t>(row.width)),
            .weight = keep(weight),
            .bias = keep(bias),
            .activation = activation,
            .fills = fills}));
    }
    // Arrays in blocks of lanes: decay [blocks][state_size or 1][16], skip and bias [blocks][16].
    void selective_scan(const PlaceTuple& x, const PlaceTuple& dt, const PlaceTuple& b, const PlaceTuple& c,
                        const PlaceTuple& out, const nb::object& beta, int group, int layer, int state_size,
                        int head_width, const nb::object& decay, const nb::object& skip,
                        const nb::object& bias, float low, float high) {
        const size_t lanes = nb::cast<Array<float>>(skip).size();
        executor.add_stage(make_selective_scan(ScanSpec{
            .x = place_of(x),
            .dt = place_of(dt),
            .b = place_of(b),
            .c = place_of(c),
            .out = place_of(out),
            .beta = beta.is_none() ? std::nullopt : std::optional(place_of(nb::cast<PlaceTuple>(beta))),
            .group = group,
            .layer = layer,
            .state_size = state_size,
            .head_width = head_width,
            .num_blocks = static_cast<int>(lanes / kTile),
            .by_state = nb::cast<Array<float>>(decay).size() > lanes,
            .decay = keep(decay),
            .skip = keep(skip),
            .bias = keep(bias),
            .low = low,
            .high = high}));
    }
    // Returns the index that the methods of experts take.
    int route(const PlaceTuple& logits, const PlaceTuple& weights, int top_k, const std::string& score,
              const nb::object& bias, int num_groups, int top_groups, const std::string& group_rank,
              bool normalize, float scale, bool scales_rows, float jitter) {
        const char* scores[] = {"softmax", "sigmoid", "softmax_top_k", "sigmoid_top_k", "sparsemixer"};
        const char* ranks[] = {"two_best", "best"};
        return executor.add_route(RouteSpec{
            .logits = place_of(logits),
            .weights = place_of(weights),
            .top_k = top_k,
            .score = static_cast<RouteSpec::Score>(index_of(score, scores, "score of experts")),
            .bias = keep(bias),
            .num_groups = num_groups,
            .top_groups = top_groups,
            .group_rank = static_cast<RouteSpec::GroupRank>(index_of(group_rank, ranks, "rank of groups")),
            .normalize = normalize,
            .scales_rows = scales_rows,
            .scale = scale,
            .jitter = jitter});
    }
    // Lets the last stage, a choice of experts, write x as their product of `tiles` reads it.
    int convert_in_route(const PlaceTuple& x, const PackedTiles& tiles) {
        rows_.push_back(executor.convert_in_route(place_of(x), tiles.tiles));
        return static_cast<int>(rows_.size()) - 1;
    }
    // by: None, or the weights with which the tokens' rows x are multiplied.
    int expert_conversion(const PlaceTuple& x, int route, const PackedTiles& tiles, const nb::object& by) {
        Place weights;
        if (!by.is_none()) weights = place_of(nb::cast<PlaceTuple>(by));
        rows_.push_back(executor.add_expert_conversion(place_of(x), route, tiles.tiles,
                                                       by.is_none() ? nullptr : &weights));
        return static_cast<int>(rows_.size()) - 1;
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
    // opened: f(gate), of which sparse rows lose what is below the threshold. With an out, f(gate) * (up +
    // offset of the gate), up the product of x, after the norm, with the neurons' rows. With computes_gate,
    // opened are scores and gates are products, too. scales: of the rows of each matrix.
    void neurons(const std::shared_ptr<NeuronCache>& cache, int layer, const PlaceTuple& opened,
                 float threshold, const std::optional<PlaceTuple>& out, const PlaceTuple& x,
                 const nb::object& norm, float x_threshold, const nb::list& scales, const nb::object& up_bias,
                 const nb::object& gate_bias, const GateTuple& gate, bool computes_gate) {
        NeuronsSpec spec{.cache = cache,
                         .layer = layer,
                         .opened = place_of(opened),
                         .threshold = threshold,
                         .out = out ? place_of(*out) : Place{},
                         .up_bias = keep(up_bias),
                         .gate_bias = keep(gate_bias),
                         .gate = epilogue_of(gate, true)};
        if (scales.size() != static_cast<size_t>(out ? computes_gate ? 2 : 1 : 0))
            throw std::invalid_argument("neurons: not the scales of each matrix");
        if (computes_gate) spec.gate_scales = keep(scales[0]);
        if (out) spec.up_scales = keep(scales[computes_gate]);
        executor.add_neurons(std::move(spec), place_of(x), norm_of(norm), x_threshold);
    }
    // scores: guessed ones of a layer that comes later.
    void foresee(const std::shared_ptr<NeuronCache>& cache, int layer, const PlaceTuple& scores) {
        executor.add_foresee(cache, layer, place_of(scores));
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
    void mix(const std::vector<PlaceTuple>& xs, const std::vector<PlaceTuple>& bases, const PlaceTuple& coefs,
             const std::vector<PlaceTuple>& outs, float offset) {
        executor.add_row_op(make_mix(MixSpec{.xs = places_of(xs),
                                             .bases = places_of(bases),
                                             .outs = places_of(outs),
                                             .coefs = place_of(coefs),
                                             .offset = offset}));
    }
    KeySelection selection_of(const nb::object& tuple) {
        const auto [partial, group, layer, budget] =
            nb::cast<std::tuple<PlaceTuple, int, int, double>>(tuple);
        return {place_of(partial), group, layer, budget};
    }
    // by_places: None, or (products of queries, products of keys, bucket by distance), as in AttentionSpec.
    // selection: None, or (partial queries, group and layer of partial keys, budget), as in KeySelection; ahead: the
    // same of the next attention, with its layer.
    void attention(const PlaceTuple& q, const PlaceTuple& out, int group, int layer, int num_heads,
                   int window, bool chunks, float scale, float softcap, const nb::object& sinks,
                   const nb::object& slopes, const nb::object& distances, int reach, int latent_width,
                   const nb::object& by_places, const nb::object& selection, const nb::object& ahead) {
        AttentionSpec spec{.q = place_of(q),
                           .out = place_of(out),
                           .group = group,
                           .layer = layer,
                           .num_heads = num_heads,
                           .mask = {window, chunks},
                           .scale = scale,
                           .softcap = softcap,
                           .sinks = keep(sinks),
                           .slopes = keep(slopes),
                           .distances = keep(distances),
                           .reach = reach,
                           .latent_width = latent_width};
        if (!by_places.is_none()) {
            const auto [queries, keys, buckets] =
                nb::cast<std::tuple<PlaceTuple, PlaceTuple, std::vector<int32_t>>>(by_places);
            spec.of_queries = place_of(queries), spec.of_keys = place_of(keys);
            spec.buckets = buckets;
            spec.reach = static_cast<int>(buckets.size()) / 2;
        }
        if (!selection.is_none()) spec.selection = selection_of(selection);
        if (!ahead.is_none()) {
            const auto [next, next_layer] = nb::cast<std::tuple<nb::object, int>>(ahead);
            spec.ahead = selection_of(next);
            spec.ahead_layer = next_layer;
        }
        executor.add_attention(spec);
    }
    void sampling(const PlaceTuple& logits) { executor.add_sampling(place_of(logits)); }
    // Row ops: take the rows of the stage of the model before, and hand over those for the one behind.
    void hidden_in(const PlaceTuple& out) { executor.add_hidden_input(place_of(out)); }
    void hidden_out(const PlaceTuple& x) { executor.add_row_op(make_hidden_out(place_of(x))); }
    void output(const PlaceTuple& rows) { executor.add_output(place_of(rows)); }
    void finish(int64_t token_floats, int64_t block_floats, int64_t sample_floats, int64_t expert_floats) {
        const int64_t floats[kNumAxes] = {token_floats, block_floats, sample_floats, expert_floats};
        for (int axis = 0; axis < kNumAxes; axis++)
            if (ends_[axis] > floats[axis]) throw std::logic_error("a Value behind the end of its row");
        executor.finish(token_floats, block_floats, sample_floats, expert_floats);
    }

    // batch: StepBatch; output: StepOutput, whose arrays are filled in; check: None, or a function that is
    // given the step's index once it is drawn, and returns None or a Redraw; it is asked again behind one that
    // is not the last.
    void run(const nb::object& batch, const nb::object& output, const std::shared_ptr<KvMemory>& kv,
             const nb::object& check) {
        run_and_check(read_batch(batch, output), *kv, check, 0);
    }

    void run_and_check(const Batch& step, const KvMemory& kv, const nb::object& check, int index) {
        {
            nb::gil_scoped_release release;
            executor.run(step, kv);
        }
        check_draws(step, kv, check, index);
    }

    void check_draws(const Batch& step, const KvMemory& kv, const nb::object& check, int index) {
        if (check.is_none()) return;
        const Checking checking(*this, step, kv);
        std::vector<SamplingRecord> records(step.sampling.records, step.sampling.records + step.num_samples);
        for (nb::object found = check(index); !found.is_none();) {
            draw_again(step, kv, found, records);
            if (nb::cast<bool>(found.attr("is_last"))) return;
            found = check(index);
        }
    }

    // Changes the records of a Redraw's rows, and draws from them again.
    void draw_again(const Batch& step, const KvMemory& kv, const nb::object& found,
                    std::vector<SamplingRecord>& records) {
        const auto samples = array_of<Array<int32_t, nb::ndim<1>>>(found, "samples");
        const auto masks = array_of<Array<uint32_t, nb::ndim<2>>>(found, "masks");
        if (masks.shape(0) != samples.size() ||
            static_cast<int>(masks.shape(1)) != (executor.vocab() + 31) / 32)
            throw std::invalid_argument("masks: not one for each row that is drawn again");
        const std::vector<int32_t> rows(samples.data(), samples.data() + samples.size());
        if (!found.attr("mirostat_mus").is_none()) {
            const auto mus = array_of<Array<float, nb::ndim<1>>>(found, "mirostat_mus");
            if (mus.size() != samples.size())
                throw std::invalid_argument("mirostat_mus: not one for each row that is drawn again");
            for (size_t i = 0; i < rows.size(); i++)
                if (rows[i] >= 0 && rows[i] < step.num_samples && !std::isnan(mus.data()[i]))
                    records[rows[i]].mirostat_mu = mus.data()[i];
        }
        const auto replaced = replaced_logits(found, rows.size());
        nb::gil_scoped_release release;
        executor.redraw(step, kv, rows, records, masks.data(), replaced);
    }

    // Returns the logits that each of a Redraw's rows is drawn from, null where these are its own.
    std::vector<const float*> replaced_logits(const nb::object& redraw, size_t num_rows) const {
        std::vector<const float*> found(num_rows);
        if (redraw.attr("logits").is_none()) return found;
        const auto logits = array_of<Array<float, nb::ndim<2>>>(redraw, "logits");
        const auto places = array_of<Array<int32_t, nb::ndim<1>>>(redraw, "places");
        if (places.size() != num_rows || static_cast<int>(logits.shape(1)) != executor.vocab())
            throw std::invalid_argument("logits: not a row of the vocabulary for each that is drawn again");
        for (size_t i = 0; i < num_rows; i++) {
            if (places.data()[i] >= static_cast<int>(logits.shape(0)))
                throw std::invalid_argument("places: behind the logits");
            if (places.data()[i] >= 0) found[i] = logits.data() + places.data()[i] * logits.shape(1);
        }
        return found;
    }

    // Copies the logits of a sampled row of the last step, which kept them, to `out` [V].
    void copy_logits(int sample, const Out<float>& out) const {
        if (static_cast<int>(out.size()) != executor.vocab())
            throw std::invalid_argument("logits: not the vocabulary");
        std::memcpy(out.data(), executor.kept_logits(sample), sizeof(float) * executor.vocab());
    }

    // Writes the candidates of sampled rows of the step whose draws are being checked to `out` [N][8].
    void candidates(const Array<int32_t, nb::ndim<1>>& samples, const Out<int32_t, nb::ndim<2>>& out) {
        if (!checked_step_) throw std::invalid_argument("candidates: no draws are being checked");
        if (out.shape(0) != samples.size() || out.shape(1) != kMostCandidates)
            throw std::invalid_argument("candidates: not 8 of each row");
        const std::vector<int32_t> rows(samples.data(), samples.data() + samples.size());
        nb::gil_scoped_release release;
        executor.write_candidates(*checked_step_, *checked_kv_, rows, out.data());
    }

    nb::list profiled() const {
        nb::list rows;
        for (const auto& [name, time] : executor.profiled())
            rows.append(nb::make_tuple(name, time.code, time.calls, time.seconds, time.cost.bytes,
                                       time.cost.operations));
        return rows;
    }

  private:
    // Says for as long as it lives which step's draws are being checked.
    struct Checking {
        Builder& builder;
        Checking(Builder& b, const Batch& step, const KvMemory& kv) : builder(b) {
            builder.checked_step_ = &step;
            builder.checked_kv_ = &kv;
        }
        Checking(const Checking&) = delete;
        ~Checking() { builder.checked_step_ = nullptr; }
    };

    const Batch* checked_step_ = nullptr;
    const KvMemory* checked_kv_ = nullptr;

    Place place_of(const PlaceTuple& t) {
        const auto& [name, offset, width] = t;
        const char* names[] = {"tokens", "block", "samples", "expert_rows"};
        const auto axis = static_cast<Axis>(index_of(name, names, "axis"));
        ends_[static_cast<int>(axis)] = std::max(ends_[static_cast<int>(axis)], offset + width);
        return Place{axis, offset, width};
    }
    std::vector<Place> places_of(const std::vector<PlaceTuple>& each) {
        std::vector<Place> places;
        for (const PlaceTuple& one : each) places.push_back(place_of(one));
        return places;
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
        part.site = nb::cast<int>(t[4]);
        return part;
    }
    static SiteUpdate update_of(const nb::object& item) {
        if (item.is_none()) return {};
        const auto t = nb::cast<nb::tuple>(item);
        const auto b = nb::cast<nb::ndarray<nb::ro, nb::ndim<3>, nb::c_contig, nb::device::cpu>>(t[1]);
        const auto a = nb::cast<nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>>(t[0]);
        const auto scales = nb::cast<Array<float>>(t[2]);
        const int rank = static_cast<int>(scales.size());
        SiteUpdate update{
            .a = {a.data(), static_cast<AdapterNumber>(a.itemsize()), rank, static_cast<int32_t>(a.shape(1))},
            .b = {b.data(), static_cast<AdapterNumber>(b.itemsize()), rank, 0},
            .scales = scales.data(),
            .is_set = true};
        if (!t[3].is_none()) update.gain = nb::cast<Array<float>>(t[3]).data();
        if (!t[4].is_none()) update.bias = nb::cast<Array<float>>(t[4]).data();
        return update;
    }
    static Epilogue epilogue_of(const GateTuple& gate, bool gated) {
        const auto& [activation, clamp, alpha, up_offset, threshold] = gate;
        return Epilogue{.activation = activation,
                        .gated = gated,
                        .clamp = clamp,
                        .alpha = alpha,
                        .up_offset = up_offset,
                        .threshold = threshold};
    }
    static Elementwise elementwise_of(const std::string& kind) {
        const char* names[] = {"add",  "mul",  "scale", "activate", "softcap",
                               "gate", "clip", "match", "largest"};
        return static_cast<Elementwise>(index_of(kind, names, "elementwise op"));
    }
    static Pooling pooling_of(const std::string& mode) {
        const char* names[] = {"last", "cls", "mean"};
        return static_cast<Pooling>(index_of(mode, names, "way of pooling"));
    }
    template <size_t N>
    static int index_of(const std::string& name, const char* const (&names)[N], const char* what) {
        const auto found = std::find(std::begin(names), std::end(names), name);
        if (found == std::end(names))
            throw std::invalid_argument(std::string("unknown ") + what + " " + name);
        return static_cast<int>(found - std::begin(names));
    }

    std::vector<nb::object> adapter_arrays_;  // by slot: what its adapter's matrices lie in
    std::vector<RopeAngles*> tables_;
    std::vector<PreparedRows*> rows_;
    std::vector<Out<float>> observed_;  // arrays that steps write, kept alive
    int64_t ends_[kNumAxes] = {};  // behind the last float that any Value has in a row
};

}  // namespace octavo
