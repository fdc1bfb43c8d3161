// Routed experts on a StepRunner: the output of each row equals that of plain loops over doubles, and is
// bitwise the same alone or in a batch, on any number of threads, beside rows with NaN, and if several
// engines with rows of their own share the experts.
#include <algorithm>
#include <cstdio>
#include <thread>

#include "../plan/builder.h"
#include "../runtime/step_runner.h"
#include "matrices.h"

namespace octavo::test {

namespace {

constexpr int kTable = 90, kHidden = 64, kInner = 70, kExperts = 8, kChosen = 3, kMaxRows = 400;
constexpr int kFaulty = kTable - 1;  // a row of NaN

using Score = RouteSpec::Score;
using GroupRank = RouteSpec::GroupRank;

struct Experts {
    Floats table, correction, bias;
    PackedTiles packed;
    TestMatrix router;
    std::vector<TestMatrix> gates, ups, downs;

    Experts(Format f, ThreadPool& pool)
        : table(normal(kTable * kHidden, 1)),
          correction(normal(kExperts, 2, 0.2f)),
          bias(normal(kExperts * kHidden, 3)),
          router(kExperts, kHidden, 4, Format::fp32, pool) {
        std::fill_n(table.end() - kHidden, kHidden, NAN);
        WeightMemory memory;
        packed = pack(pool, memory,
                      Matrix{Matrix::Kind::fp32, reinterpret_cast<const uint8_t*>(table.data()), kTable,
                             kHidden, kHidden * 4, 4},
                      Code::fp32);
        for (uint32_t e = 0; e < kExperts; e++) {
            gates.emplace_back(kInner, kHidden, 10 + e, f, pool);
            ups.emplace_back(kInner, kHidden, 20 + e, f, pool);
            downs.emplace_back(kHidden, kInner, 30 + e, f, pool);
        }
    }
};

RouteSpec make_route(Score score, int groups, GroupRank rank) {
    return RouteSpec{.top_k = kChosen,
                     .score = score,
                     .num_groups = groups,
                     .top_groups = 2,
                     .group_rank = rank,
                     .normalize = score == Score::sigmoid,
                     .scale = 1.5f,
                     .jitter = 0.3f};
}

// -- plain loops --

std::vector<double> compute_scores(const RouteSpec& spec, const Row& logits) {
    Row scores = logits;
    double sum = 0;
    for (const double z : logits) sum += std::exp(z);
    for (double& z : scores) {
        if (spec.score == Score::softmax) z = std::exp(z) / sum;
        if (spec.score == Score::sigmoid) z = 1 / (1 + std::exp(-z));
    }
    return scores;
}

// Returns the experts of the best groups.
std::vector<bool> allowed(const RouteSpec& spec, const Row& choice) {
    const int size = kExperts / spec.num_groups;
    std::vector<std::pair<double, int>> ranks;
    for (int g = 0; g < spec.num_groups; g++) {
        Row group(choice.begin() + g * size, choice.begin() + (g + 1) * size);
        std::sort(group.rbegin(), group.rend());
        const bool two = spec.group_rank == GroupRank::two_best && size > 1;
        ranks.push_back({group[0] + (two ? group[1] : 0), g});
    }
    std::sort(ranks.rbegin(), ranks.rend());
    std::vector<bool> keep(kExperts, spec.num_groups == 1);
    for (int i = 0; i < spec.top_groups && spec.num_groups > 1; i++)
        std::fill_n(keep.begin() + ranks[i].second * size, size, true);
    return keep;
}

Row compute_weights(const RouteSpec& spec, const Row& logits, const Row& scores,
                    const std::vector<int>& ids) {
    Row weights;
    std::vector<bool> taken(kExperts, false);
    double sum = 0, chosen = 0;
    for (const int e : ids) chosen += std::exp(logits[e]);
    for (const int e : ids) {
        double near = 0;
        for (int i = 0; i < kExperts; i++) {
            const double margin =
                2 * static_cast<double>(spec.jitter) * std::max(std::fabs(logits[i]), logits[e]);
            if (!taken[i] && logits[e] - logits[i] <= margin) near += std::exp(logits[i] - logits[e]);
        }
        taken[e] = true;
        weights.push_back(spec.score == Score::sparsemixer     ? 1 / near
                          : spec.score == Score::sigmoid_top_k ? 1 / (1 + std::exp(-logits[e]))
                          : spec.score == Score::softmax_top_k ? std::exp(logits[e]) / chosen
                                                               : scores[e]);
        sum += weights.back();
    }
    for (double& w : weights) w *= spec.scale / (spec.normalize ? sum : 1);
    return weights;
}

Row plain(const Experts& experts, const RouteSpec& spec, int token) {
    const float* first = experts.table.data() + static_cast<size_t>(token) * kHidden;
    const Row x(first, first + kHidden), logits = experts.router.times(x),
                                         scores = compute_scores(spec, logits);
    Row choice = scores;
    for (int e = 0; e < kExperts && spec.bias; e++) choice[e] += spec.bias[e];
    const std::vector<bool> keep = allowed(spec, choice);
    std::vector<int> ids;
    for (int e = 0; e < kExperts; e++)
        if (keep[e]) ids.push_back(e);
    std::sort(ids.begin(), ids.end(), [&](int a, int b) { return choice[a] > choice[b]; });
    ids.resize(kChosen);
    const Row weights = compute_weights(spec, logits, scores, ids);
    Row out(kHidden, 0);
    for (int j = 0; j < kChosen; j++) {
        const int e = ids[j];
        Row read = x;
        for (double& value : read) value *= spec.scales_rows ? weights[j] : 1;
        Row inner = experts.gates[e].times(read);
        const Row up = experts.ups[e].times(read);
        for (int i = 0; i < kInner; i++) inner[i] = inner[i] / (1 + std::exp(-inner[i])) * up[i];
        const Row down = experts.downs[e].times(inner);
        for (int i = 0; i < kHidden; i++)
            out[i] += (spec.scales_rows ? 1 : weights[j]) *
                      (down[i] + experts.bias[static_cast<size_t>(e) * kHidden + i]);
    }
    return out;
}

// -- the plan --

// The engines that share the experts, and this engine's part of them.
struct Sharing {
    std::shared_ptr<SharedRanks> ranks;  // null: this engine has all experts
    std::vector<int> firsts{};  // first expert of each engine
    int first = 0, last = kExperts;
};

std::vector<PackedTiles> own(const std::vector<TestMatrix>& weights, const Sharing& sharing) {
    std::vector<PackedTiles> list;
    for (int expert = sharing.first; expert < sharing.last; expert++) list.push_back(weights[expert].packed);
    return list;
}

std::shared_ptr<const Plan> build_plan(const KernelTable& kernels, const Experts& experts, RouteSpec spec,
                                       const Sharing& sharing) {
    Arena tokens{Axis::tokens}, rows{Axis::experts}, samples{Axis::samples};
    const ValueSlice x = tokens.add(kHidden), out = tokens.add(kHidden), inner = rows.add(kInner),
                     down = rows.add(kHidden), sampled = samples.add(kHidden);
    spec.logits = tokens.add(kExperts);
    spec.weights = tokens.add(kChosen);
    PlanBuilder builder(kernels,
                        {.max_tokens = kMaxRows,
                         .vocab = kHidden,
                         .engines = sharing.ranks,
                         .num_engines = sharing.ranks ? static_cast<int>(sharing.firsts.size()) : 1});
    builder.add(EmbeddingSpec{.table = experts.packed, .out = x});
    builder.add(LinearSpec{.x = x, .parts = {part(experts.router, spec.logits)}});
    const int route = builder.add(spec);
    const bool exchanges = sharing.ranks != nullptr;
    builder.add(DispatchSpec{.route = route,
                             .first = sharing.first,
                             .last = sharing.last,
                             .x = exchanges ? x : ValueSlice{},
                             .weights = exchanges ? spec.weights : ValueSlice{}});
    builder.add(ExpertsSpec{.route = route,
                            .x = x,
                            .out = inner,
                            .scaled_by = spec.scales_rows ? spec.weights : ValueSlice{},
                            .fuses_input = !spec.scales_rows,
                            .weights = own(experts.gates, sharing),
                            .ups = own(experts.ups, sharing),
                            .gate = {.activation = 0}});
    // The first matmul quantizes the input of the second, unless its format requires whole rows, or it
    // reads the memory that this input would have.
    const RowType type = kernels.row_type(experts.downs[0].packed.tiles.code);
    const auto bias = experts.bias.begin() + static_cast<int64_t>(sharing.first) * kHidden;
    builder.add(
        ExpertsSpec{.route = route,
                    .x = inner,
                    .out = down,
                    .fuses_input = !spec.scales_rows && type != RowType::whole && type != RowType::outliers,
                    .weights = own(experts.downs, sharing),
                    .bias = FloatArray({bias, experts.bias.end()})});
    if (exchanges) builder.add(CollectSpec{down, down, route, sharing.firsts});
    builder.add(CombineSpec{down, spec.weights, out, route});
    builder.add(GatherSpec{out, sampled});
    builder.add(OutputSpec{sampled});
    return builder.build();
}

struct Runner {
    ThreadPool pool;
    StepRunner runner;
    KvMemory kv;

    Runner(const KernelTable& kernels, const Experts& experts, const RouteSpec& spec, int threads,
           const Sharing& sharing = {})
        : pool(threads),
          runner(pool, build_plan(kernels, experts, spec, sharing)),
          kv({KvGroup{1, 1, 2, 2, KvType::bf16, 1}}) {}
    Floats run(const std::vector<int32_t>& ids) {
        const int count = static_cast<int>(ids.size());
        std::vector<int32_t> rows(count), slots(count, -1), starts = {0, count}, zero = {0};
        for (int i = 0; i < count; i++) rows[i] = i;
        Floats out(static_cast<size_t>(count) * kHidden);
        Batch b{};
        b.num_tokens = b.num_samples = count;
        b.num_requests = b.table_width = b.num_axes = 1;
        b.token_ids = ids.data();
        b.key_indices = b.positions = b.sample_rows = rows.data();
        b.query_starts = starts.data();
        b.context_lens = b.block_tables = zero.data();
        b.slots = slots.data();
        b.out_rows = out.data();
        runner.run(b, kv);
        return out;
    }
};

// -- tests --

Floats get_row(const Floats& rows, size_t row) {
    return Floats(rows.begin() + static_cast<int64_t>(row) * kHidden,
                  rows.begin() + static_cast<int64_t>(row + 1) * kHidden);
}

std::vector<int32_t> some_tokens(int count) {
    std::mt19937 generator(5);
    std::vector<int32_t> ids(count);
    for (int32_t& id : ids) id = static_cast<int32_t>(generator() % kFaulty);
    return ids;
}

void check_against_plain(const Floats& found, const std::vector<int32_t>& ids, const Experts& experts,
                         const RouteSpec& spec, Format format) {
    double error = 0, size = 0;
    for (size_t t = 0; t < ids.size(); t++) {
        const Row wanted = plain(experts, spec, ids[t]);
        for (int i = 0; i < kHidden; i++) {
            error += std::pow(found[t * kHidden + i] - wanted[i], 2);
            size += std::pow(wanted[i], 2);
        }
    }
    const double bounds[] = {1e-5, 0.01, 0.02, 0.02};
    CHECK(std::sqrt(error / size) < bounds[static_cast<int>(format)],
          "%s, score %d: off by %g of the rows' size", kFormatNames[static_cast<int>(format)],
          static_cast<int>(spec.score), std::sqrt(error / size));
}

void test_format(const KernelTable& kernels, const Experts& experts, const RouteSpec& spec, Format format) {
    const std::vector<int32_t> ids = some_tokens(kMaxRows);
    Runner one(kernels, experts, spec, 1), three(kernels, experts, spec, 3);
    const Floats wanted = one.run(ids);
    check_against_plain(wanted, ids, experts, spec, format);
    CHECK(same_bits(three.run(ids), wanted), "%s on three threads", kFormatNames[static_cast<int>(format)]);
    for (const size_t row : {0, 7, 399})
        CHECK(same_bits(three.run({ids[row]}), get_row(wanted, row)), "%s, row %zu alone",
              kFormatNames[static_cast<int>(format)], row);
    std::vector<int32_t> with_faulty(ids.begin(), ids.begin() + 9);
    with_faulty[4] = kFaulty;
    const Floats found = three.run(with_faulty);
    for (const size_t row : {0, 3, 5, 8})
        CHECK(same_bits(get_row(found, row), get_row(wanted, row)), "%s, row %zu beside one without numbers",
              kFormatNames[static_cast<int>(format)], row);
}

// Three engines share the experts and have rows of their own, some of them none.
void test_sharing(const KernelTable& kernels, const Experts& experts, const RouteSpec& spec, Format format) {
    const std::vector<int32_t> ids = some_tokens(kMaxRows);
    const std::vector<int> firsts = {0, 3, 6}, lasts = {3, 6, kExperts};
    const std::vector<std::vector<int>> steps = {{9, 4, 1}, {0, 0, 5}, {kMaxRows, 1, 0}, {3, 130, 70}};
    Runner whole(kernels, experts, spec, 1);
    const Floats wanted = whole.run(ids);
    FILE* memory = std::tmpfile();
    std::vector<std::thread> engines;
    std::vector<Floats> found[3];
    for (int engine = 0; engine < 3; engine++)
        engines.emplace_back([&, engine] {
            const auto ranks = std::make_shared<SharedRanks>(fileno(memory), engine, 3, 1);
            Runner own(kernels, experts, spec, 2, Sharing{ranks, firsts, firsts[engine], lasts[engine]});
            for (const auto& counts : steps)
                found[engine].push_back(own.run({ids.begin(), ids.begin() + counts[engine]}));
        });
    for (auto& engine : engines) engine.join();
    std::fclose(memory);
    for (int engine = 0; engine < 3; engine++)
        for (size_t step = 0; step < steps.size(); step++) {
            const size_t count = static_cast<size_t>(steps[step][engine]) * kHidden;
            CHECK(same_bits(found[engine][step],
                            Floats(wanted.begin(), wanted.begin() + static_cast<int64_t>(count))),
                  "%s, engine %d in step %zu", kFormatNames[static_cast<int>(format)], engine, step);
        }
}

}  // namespace

void test_experts(const KernelTable& kernels) {
    ThreadPool packers(1);
    for (const Format format : {Format::fp32, Format::bf16, Format::int8, Format::int4}) {
        const Experts experts(format, packers);
        test_format(kernels, experts, make_route(Score::softmax, 1, GroupRank::two_best), format);
        RouteSpec scaled = make_route(Score::sigmoid_top_k, 1, GroupRank::two_best);
        scaled.scales_rows = true;
        test_format(kernels, experts, scaled, format);
        test_sharing(kernels, experts, make_route(Score::softmax, 1, GroupRank::two_best), format);
        test_sharing(kernels, experts, scaled, format);
        if (format != Format::fp32) continue;
        RouteSpec corrected = make_route(Score::sigmoid, 4, GroupRank::two_best);
        corrected.bias = FloatArray(experts.correction);
        for (const RouteSpec& spec : {corrected, make_route(Score::softmax, 4, GroupRank::best),
                                      make_route(Score::softmax_top_k, 1, GroupRank::two_best),
                                      make_route(Score::sparsemixer, 1, GroupRank::two_best)})
            test_format(kernels, experts, spec, format);
    }
}

}  // namespace octavo::test
