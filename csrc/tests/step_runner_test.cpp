// A small llama, built by hand, on a StepRunner: its logits are those of plain loops in double, and bitwise
// the same alone or in a batch, in chunks or whole, on any number of threads, in copied blocks.

#include <algorithm>

#include "../plan/builder.h"
#include "../runtime/decode_batch.h"
#include "../runtime/step_runner.h"
#include "matrices.h"

namespace octavo::test {

namespace {

constexpr int kVocab = 50, kHidden = 48, kHeads = 4, kKvHeads = 2, kWidth = 32, kInner = 70, kLayers = 2,
              kBlocks = 64;
constexpr int kQ = kHeads * kWidth, kKv = kKvHeads * kWidth;

struct Layer {
    TestMatrix q, k, v, o, gate, up, down;
    Floats norm, inner_norm;
};

struct Model {
    TestMatrix table, head;
    Floats final_norm;
    std::vector<double> inv_freq;
    std::vector<Layer> layers;

    Model(Format f, ThreadPool& pool)
        : table(kVocab, kHidden, 1, Format::fp32, pool),
          head(kVocab, kHidden, 2, f, pool),
          final_norm(gains(3)) {
        for (int i = 0; i < kWidth / 2; i++) inv_freq.push_back(std::pow(100.0, -2.0 * i / kWidth));
        for (uint32_t l = 0; l < kLayers; l++) {
            const uint32_t s = 100 * (l + 1);
            layers.push_back(Layer{{kQ, kHidden, s, f, pool},
                                   {kKv, kHidden, s + 1, f, pool},
                                   {kKv, kHidden, s + 2, f, pool},
                                   {kHidden, kQ, s + 3, f, pool},
                                   {kInner, kHidden, s + 4, f, pool},
                                   {kInner, kHidden, s + 5, f, pool},
                                   {kHidden, kInner, s + 6, f, pool},
                                   gains(s + 7),
                                   gains(s + 8)});
        }
    }
    static Floats gains(uint32_t seed) {
        Floats values = normal(kHidden, seed, 0.2f);
        for (float& value : values) value += 1;
        return values;
    }
};

// -- plain loops --

Row normed(const Row& x, const Floats& weight) {
    double squares = 0;
    for (const double value : x) squares += value * value;
    Row y(x.size());
    for (size_t i = 0; i < x.size(); i++)
        y[i] = x[i] / std::sqrt(squares / static_cast<double>(x.size()) + 1e-5) * weight[i];
    return y;
}

void rotate(Row& x, int heads, int position, const std::vector<double>& inv_freq) {
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < kWidth / 2; i++) {
            double &a = x[h * kWidth + i], &b = x[h * kWidth + kWidth / 2 + i];
            const double c = std::cos(position * inv_freq[i]), s = std::sin(position * inv_freq[i]),
                         first = a;
            a = a * c - b * s;
            b = b * c + first * s;
        }
}

Row attended(const Row& q, const std::vector<Row>& keys, const std::vector<Row>& values) {
    Row out(kQ, 0);
    for (int h = 0; h < kHeads; h++) {
        const int kv = h / (kHeads / kKvHeads) * kWidth;
        Row scores;
        for (const Row& key : keys) {
            double score = 0;
            for (int d = 0; d < kWidth; d++) score += q[h * kWidth + d] * key[kv + d];
            scores.push_back(std::exp(score * 0.3));
        }
        double total = 0;
        for (const double score : scores) total += score;
        for (size_t j = 0; j < keys.size(); j++)
            for (int d = 0; d < kWidth; d++) out[h * kWidth + d] += scores[j] / total * values[j][kv + d];
    }
    return out;
}

void add(Row& x, const Row& y) {
    for (size_t i = 0; i < x.size(); i++) x[i] += y[i];
}

std::vector<Row> plain_logits(const Model& model, const std::vector<int>& tokens) {
    std::vector<std::vector<Row>> keys(kLayers), values(kLayers);
    std::vector<Row> logits;
    for (size_t t = 0; t < tokens.size(); t++) {
        const float* first = model.table.values.data() + static_cast<size_t>(tokens[t]) * kHidden;
        Row x(first, first + kHidden);
        for (int l = 0; l < kLayers; l++) {
            const Layer& layer = model.layers[l];
            const Row h = normed(x, layer.norm);
            Row q = layer.q.times(h), k = layer.k.times(h);
            rotate(q, kHeads, static_cast<int>(t), model.inv_freq);
            rotate(k, kKvHeads, static_cast<int>(t), model.inv_freq);
            keys[l].push_back(k);
            values[l].push_back(layer.v.times(h));
            add(x, layer.o.times(attended(q, keys[l], values[l])));
            const Row m = normed(x, layer.inner_norm), up = layer.up.times(m);
            Row inner = layer.gate.times(m);
            for (int i = 0; i < kInner; i++) inner[i] = inner[i] / (1 + std::exp(-inner[i])) * up[i];
            add(x, layer.down.times(inner));
        }
        logits.push_back(model.head.times(normed(x, model.final_norm)));
    }
    return logits;
}

// -- the plan --

Place columns(const Place& whole, int first, int width) {
    return Place{whole.axis, whole.offset + first, width};
}

NormSpec norm_of(const Floats& weight) { return {.weight = FloatArray(weight), .eps = 1e-5f}; }

// Places of a layer's Values in the arenas.
struct LayerPlaces {
    Place x, q, k, v, attended, inner;

    LayerPlaces(Arena& tokens, Arena& block) : x(tokens.place(kHidden)) {
        const Place qkv = tokens.place(kQ + 2 * kKv);
        q = columns(qkv, 0, kQ);
        k = columns(qkv, kQ, kKv);
        v = columns(qkv, kQ + kKv, kKv);
        attended = tokens.place(kQ);
        inner = block.place(kInner);
    }
};

void add_layer(PlanBuilder& builder, const Layer& layer, int index, int angles, const LayerPlaces& places) {
    const auto& [x, q, k, v, attended, inner] = places;
    const auto rope = [&](const Place& heads, int num_heads) {
        builder.add(RopeSpec{.x = heads,
                             .out = heads,
                             .num_heads = num_heads,
                             .head_width = kWidth,
                             .rotary_dim = kWidth,
                             .angles = angles});
    };
    builder.add(LinearSpec{.x = x,
                           .parts = {part(layer.q, q), part(layer.k, k), part(layer.v, v)},
                           .norm = norm_of(layer.norm)});
    rope(q, kHeads);
    rope(k, kKvHeads);
    builder.add(KvWriteSpec{.k_parts = {k}, .v = v, .layer = index});
    builder.add(AttentionSpec{.q = q, .out = attended, .layer = index, .num_heads = kHeads, .scale = 0.3f});
    builder.add(LinearSpec{.x = attended, .parts = {part(layer.o, x, &x)}, .fuses_input = true});
    builder.add(LinearSpec{.x = x,
                           .parts = {part(layer.gate, inner), part(layer.up, inner)},
                           .norm = norm_of(layer.inner_norm),
                           .gated = true,
                           .gate = {.activation = 0}});
    builder.add(LinearSpec{.x = inner, .parts = {part(layer.down, x, &x)}, .fuses_input = true});
}

std::shared_ptr<const Plan> plan_of(const KernelTable& kernels, const Model& model) {
    Arena tokens{Axis::tokens}, block{Axis::block}, samples{Axis::samples};
    const LayerPlaces places(tokens, block);
    const Place sampled = samples.place(kHidden), logits = samples.place(kVocab);
    PlanBuilder builder(kernels, {.max_tokens = 600, .vocab = kVocab});
    const int angles = builder.add(AnglesSpec{.inv_freq = model.inv_freq});
    builder.add(EmbeddingSpec{.table = model.table.packed, .out = places.x});
    for (int l = 0; l < kLayers; l++) add_layer(builder, model.layers[l], l, angles, places);
    builder.add(GatherSpec{places.x, sampled});
    builder.add(
        LinearSpec{.x = sampled, .parts = {part(model.head, logits)}, .norm = norm_of(model.final_norm)});
    builder.add(SampleSpec{logits});
    return builder.build();
}

struct Request {
    std::vector<int> tokens;
    std::vector<int> blocks;
};

struct Span {
    const Request* request;
    int start, stop;
};

// How far a token's position is ahead of its place: code that confuses the two computes other numbers.
constexpr int kAhead = 3;

// A model on a pool of its own, with KV memory; `run` computes spans of requests and returns all their
// logits.
struct Engine {
    ThreadPool pool;
    StepRunner runner;
    KvMemory kv;

    Engine(const KernelTable& kernels, const Model& model, int threads, KvType cache)
        : pool(threads),
          runner(pool, plan_of(kernels, model)),
          kv({KvGroup{kLayers, kKvHeads, kWidth, kWidth, cache, kBlocks}}) {}

    Floats run(const std::vector<Span>& spans, int padding = 0) {
        std::vector<int32_t> ids, places, positions, slots, starts = {0}, contexts, rows;
        size_t width = 0;
        for (const Span& s : spans) width = std::max(width, s.request->blocks.size());
        std::vector<int32_t> tables(spans.size() * width, -1);
        for (size_t r = 0; r < spans.size(); r++) {
            const Span& s = spans[r];
            for (int t = s.start; t < s.stop; t++) {
                rows.push_back(static_cast<int>(ids.size()));
                ids.push_back(s.request->tokens[t]);
                places.push_back(t);
                positions.push_back(t + kAhead);
                slots.push_back(s.request->blocks[t / 16] * 16 + t % 16);
            }
            starts.push_back(static_cast<int>(ids.size()));
            contexts.push_back(s.stop);
            std::copy(s.request->blocks.begin(), s.request->blocks.end(),
                      tables.begin() + static_cast<int64_t>(r * width));
        }
        for (int i = 0; i < padding; i++) {
            ids.push_back(1 << 30);
            places.push_back(-7);
            positions.push_back(-7);
            slots.push_back(-1);
        }
        Floats logits(rows.size() * kVocab);
        Batch b{};
        b.num_tokens = static_cast<int>(ids.size());
        b.num_requests = static_cast<int>(spans.size());
        b.num_samples = static_cast<int>(rows.size());
        b.table_width = static_cast<int>(width);
        b.num_axes = 1;
        b.token_ids = ids.data();
        b.places = places.data();
        b.positions = positions.data();
        b.query_starts = starts.data();
        b.context_lens = contexts.data();
        b.slots = slots.data();
        b.block_tables = tables.data();
        b.sample_rows = rows.data();
        b.out_rows = logits.data();
        runner.run(b, kv);
        return logits;
    }
};

std::vector<Request> make_requests() {
    std::vector<int> blocks(kBlocks);
    for (int i = 0; i < kBlocks; i++) blocks[i] = i * 37 % kBlocks;
    std::vector<Request> requests;
    std::mt19937 generator(8);
    size_t next = 0;
    for (const int length : {300, 1, 16, 45}) {
        Request r;
        for (int t = 0; t < length; t++) r.tokens.push_back(static_cast<int>(generator() % kVocab));
        for (int b = 0; b < (length + 15) / 16; b++) r.blocks.push_back(blocks[next++]);
        requests.push_back(r);
    }
    return requests;
}

Floats alone(Engine& engine, const Request& r, int chunk) {
    Floats logits;
    for (int start = 0, length = static_cast<int>(r.tokens.size()); start < length; start += chunk) {
        const Floats part = engine.run({{&r, start, std::min(length, start + chunk)}});
        logits.insert(logits.end(), part.begin(), part.end());
    }
    return logits;
}

// -- tests --

void check_against_plain(const Floats& found, const Model& model, const Request& r, Format format,
                         KvType cache) {
    const auto wanted = plain_logits(model, r.tokens);
    double error = 0, size = 0;
    for (size_t t = 0; t < wanted.size(); t++)
        for (int i = 0; i < kVocab; i++) {
            error += std::pow(found[t * kVocab + i] - wanted[t][i], 2);
            size += std::pow(wanted[t][i], 2);
        }
    const double bounds[] = {1e-5, 0.02, 0.03, 0.04},
                 bound = bounds[static_cast<int>(format)] + (cache == KvType::int8 ? 0.02 : 0);
    CHECK(std::sqrt(error / size) < bound, "%s: off by %g of the logits' size",
          kFormatNames[static_cast<int>(format)], std::sqrt(error / size));
}

void test_format(const KernelTable& kernels, Format format, KvType cache) {
    ThreadPool packers(2);
    const Model model(format, packers);
    const auto requests = make_requests();
    Engine reference(kernels, model, 1, cache);
    std::vector<Floats> wanted;
    for (const Request& r : requests) wanted.push_back(alone(reference, r, 600));
    check_against_plain(wanted[0], model, requests[0], format, cache);
    for (const int threads : {1, 2, 3, 5, 8}) {
        Engine engine(kernels, model, threads, cache);
        Floats together;
        for (const Floats& logits : wanted) together.insert(together.end(), logits.begin(), logits.end());
        std::vector<Span> all;
        for (const Request& r : requests) all.push_back({&r, 0, static_cast<int>(r.tokens.size())});
        CHECK(same_bits(engine.run(all, threads % 3), together), "%s in a batch on %d threads",
              kFormatNames[static_cast<int>(format)], threads);
        CHECK(same_bits(alone(engine, requests[3], threads), wanted[3]), "%s in chunks of %d",
              kFormatNames[static_cast<int>(format)], threads);
    }
    Engine engine(kernels, model, 3, cache);
    CHECK(same_bits(alone(engine, requests[0], 1), wanted[0]), "%s token by token, split over the context",
          kFormatNames[static_cast<int>(format)]);
}

void test_copied_blocks(const KernelTable& kernels, KvType cache) {
    ThreadPool packers(1);
    const Model model(Format::fp32, packers);
    Request r = make_requests()[3];
    Engine engine(kernels, model, 2, cache);
    const Floats wanted = alone(engine, r, 600);
    for (int& block : r.blocks) {
        const int target = kBlocks - 1 - static_cast<int>(&block - r.blocks.data());
        engine.kv.copy_block(0, block, target);
        block = target;
    }
    const Floats last = engine.run({{&r, 44, 45}});
    CHECK(same_bits(last, Floats(wanted.end() - kVocab, wanted.end())));
}

// Requests that begin with the same blocks, whose last rows one step computes together.
void test_shared_prefix(const KernelTable& kernels, KvType cache) {
    ThreadPool packers(2);
    const Model model(Format::fp32, packers);
    std::vector<Request> requests(5);
    for (int r = 0; r < 5; r++) {
        const int tail = 3 + 5 * r;
        for (int t = 0; t < 256 + tail; t++)
            requests[r].tokens.push_back((t < 256 ? t * 7 : t * 5 + r) % kVocab);
        for (int b = 0; b < 16; b++) requests[r].blocks.push_back(kBlocks - 1 - b);
        for (int b = 0; b < (tail + 15) / 16; b++) requests[r].blocks.push_back(2 * r + b);
    }
    for (const int threads : {1, 2, 8}) {
        Engine engine(kernels, model, threads, cache);
        Floats wanted;
        std::vector<Span> last;
        for (const Request& r : requests) {
            const int length = static_cast<int>(r.tokens.size());
            const Floats all = alone(engine, r, 100);
            wanted.insert(wanted.end(), all.end() - 2 * kVocab, all.end());
            last.push_back({&r, length - 2, length});
        }
        CHECK(same_bits(engine.run(last, 1), wanted), "a prefix in common on %d threads", threads);
    }
}

// Arrays of a draw for `count` rows, greedy or at random.
struct Draws {
    std::vector<SamplingRecord> records;
    std::vector<float> logprobs, top_logprobs;
    std::vector<int32_t> starts, ids, ranks, top_ids;
    std::vector<uint8_t> failed;

    explicit Draws(int n)
        : records(n),
          logprobs(n),
          top_logprobs(n * 3),
          starts(n + 1),
          ids(n),
          ranks(n),
          top_ids(n * 3),
          failed(n) {
        for (int i = 0; i < n; i++) {
            SamplingRecord& r = records[i];
            r.seed = 1000 + i;
            r.top_p = r.typical_p = r.repetition_penalty = 1;
            r.target_id = r.allowed_mask = -1;
            r.num_logprobs = 3;
            if (i % 2) r.temperature = 0.8f;
            if (i % 4 == 1) r.top_k = 5;
            if (i % 4 == 3) r.top_p = 0.7f, r.min_p = 0.01f;
        }
    }
    SampleArgs args() {
        SampleArgs a{};
        a.records = records.data();
        a.history_starts = a.bias_starts = starts.data();
        a.out_ids = ids.data();
        a.out_ranks = ranks.data();
        a.out_top_ids = top_ids.data();
        a.out_failed = failed.data();
        a.out_logprobs = logprobs.data();
        a.out_top_logprobs = top_logprobs.data();
        a.max_top = 3;
        return a;
    }
};

void test_draws(const KernelTable& kernels) {
    constexpr int kRows = 150;  // over three chunks of sampled rows
    ThreadPool pool(4);
    const TestMatrix table(kRows, kVocab, 77, Format::fp32, pool);
    Arena tokens{Axis::tokens}, samples{Axis::samples};
    const Place x = tokens.place(kVocab), logits = samples.place(kVocab);
    PlanBuilder builder(kernels, {.max_tokens = 200, .vocab = kVocab});
    builder.add(EmbeddingSpec{.table = table.packed, .out = x});
    builder.add(GatherSpec{x, logits});
    builder.add(SampleSpec{logits});
    StepRunner runner(pool, builder.build());
    std::vector<int32_t> ids(kRows), slots(kRows, -1), starts = {0, kRows}, context = {0}, block = {0};
    for (int i = 0; i < kRows; i++) ids[i] = i;
    KvMemory kv({KvGroup{1, 1, 2, 2, KvType::bf16, 1}});
    Draws draws(kRows);
    Batch b{};
    b.num_tokens = b.num_samples = kRows;
    b.num_requests = 1;
    b.table_width = b.num_axes = 1;
    b.token_ids = b.places = b.positions = b.sample_rows = ids.data();
    b.query_starts = starts.data();
    b.context_lens = context.data();
    b.slots = slots.data();
    b.block_tables = block.data();
    b.draws = true;
    b.sampling = draws.args();
    runner.run(b, kv);
    for (int i = 0; i < kRows; i++) {
        const float* row = table.values.data() + static_cast<size_t>(i) * kVocab;
        const int best = static_cast<int>(std::max_element(row, row + kVocab) - row);
        CHECK(!draws.failed[i] && draws.ids[i] >= 0 && draws.ids[i] < kVocab);
        CHECK(draws.top_ids[3 * i] == best && draws.top_logprobs[3 * i] <= 0);
        if (i % 2 == 0) CHECK(draws.ids[i] == best && draws.ranks[i] == 1);
        if (i % 4 == 1) CHECK(draws.ranks[i] <= 5);
    }
}

// The draws of each step for all requests: tokens, their logprobs, the best three.
struct Drawn {
    std::vector<int32_t> ids, top_ids;
    Floats logprobs;

    void take(const Draws& draws, size_t from, size_t count) {
        ids.insert(ids.end(), draws.ids.begin() + from, draws.ids.begin() + from + count);
        logprobs.insert(logprobs.end(), draws.logprobs.begin() + from, draws.logprobs.begin() + from + count);
        top_ids.insert(top_ids.end(), draws.top_ids.begin() + 3 * from,
                       draws.top_ids.begin() + 3 * (from + count));
    }
    bool operator==(const Drawn& other) const {
        return ids == other.ids && top_ids == other.top_ids && same_bits(logprobs, other.logprobs);
    }
};

// One decode step's arrays, as Python makes them: each request's last token. The second request has a penalty
// on what it has generated.
struct DecodeArrays {
    std::vector<int32_t> ids, places, positions, starts = {0}, contexts, slots, rows, tables,
                                                 history_starts = {0}, history_ids, history_counts;
    size_t width = 0;

    DecodeArrays(const std::vector<Request>& requests, const std::vector<size_t>& prompts) {
        for (const Request& r : requests) width = std::max(width, r.blocks.size());
        for (size_t i = 0; i < requests.size(); i++) {
            const Request& r = requests[i];
            const int last = static_cast<int>(r.tokens.size()) - 1;
            ids.push_back(r.tokens[last]);
            places.push_back(last);
            positions.push_back(last + kAhead);
            contexts.push_back(last + 1);
            rows.push_back(static_cast<int>(i));
            starts.push_back(static_cast<int>(i) + 1);
            slots.push_back(r.blocks[last / 16] * 16 + last % 16);
            tables.insert(tables.end(), r.blocks.begin(), r.blocks.end());
            tables.resize((i + 1) * width, -1);
            for (size_t t = prompts[i]; i == 1 && t < r.tokens.size(); t++) {
                const auto at = std::find(history_ids.begin(), history_ids.end(), r.tokens[t]);
                if (at == history_ids.end()) {
                    history_ids.push_back(r.tokens[t]);
                    history_counts.push_back(1);
                } else
                    history_counts[at - history_ids.begin()]++;
            }
            history_starts.push_back(static_cast<int>(history_ids.size()));
        }
    }
    Batch batch(Draws& draws) const {
        Batch b{};
        b.num_tokens = b.num_requests = b.num_samples = static_cast<int>(ids.size());
        b.table_width = static_cast<int>(width);
        b.num_axes = 1;
        b.token_ids = ids.data();
        b.places = places.data();
        b.positions = positions.data();
        b.query_starts = starts.data();
        b.context_lens = contexts.data();
        b.slots = slots.data();
        b.block_tables = tables.data();
        b.sample_rows = rows.data();
        b.draws = true;
        for (size_t i = 0; i < ids.size(); i++)
            draws.records[i].position = static_cast<uint32_t>(places[i]) + 1;
        b.sampling = draws.args();
        b.sampling.history_starts = history_starts.data();
        b.sampling.history_ids = history_ids.data();
        b.sampling.history_counts = history_counts.data();
        return b;
    }
};

Draws draws_of(size_t rows) {
    Draws draws(static_cast<int>(rows));
    SamplingRecord& second = draws.records[1];
    second.repetition_penalty = 1.7f;
    second.presence_penalty = second.frequency_penalty = 0.4f;
    return draws;
}

// A batch that advances itself computes the steps of batches made one by one, also with penalties, and stops
// at a token that ends a request.
void test_decode_batch(const KernelTable& kernels, int threads) {
    constexpr int kSteps = 9;
    ThreadPool packers(1);
    const Model model(Format::int8, packers);
    std::vector<Request> requests = make_requests();
    std::vector<size_t> prompts;
    int next = 24;  // blocks that make_requests has given away
    for (Request& r : requests) {
        prompts.push_back(r.tokens.size() - 1);
        r.blocks.push_back(next++ * 37 % kBlocks);
    }
    const size_t num = requests.size();
    Engine engine(kernels, model, threads, KvType::bf16);
    for (const Request& r : requests)
        if (r.tokens.size() > 1) engine.run({{&r, 0, static_cast<int>(r.tokens.size()) - 1}});
    const std::vector<Request> before = requests;
    Drawn wanted;
    for (int step = 0; step < kSteps; step++) {
        const DecodeArrays arrays(requests, prompts);
        Draws draws = draws_of(num);
        engine.runner.run(arrays.batch(draws), engine.kv);
        wanted.take(draws, 0, num);
        for (size_t r = 0; r < num; r++) requests[r].tokens.push_back(draws.ids[r]);
    }
    const int32_t end = wanted.ids[5 * num + 2];
    const auto until_end = [&](const std::vector<int32_t>& ends, const std::vector<int32_t>& end_starts) {
        const DecodeArrays arrays(before, prompts);
        Draws draws = draws_of(num * kSteps);
        DecodeBatch steps(arrays.batch(draws), 1, kSteps, EndTokens{end_starts.data(), ends.data()});
        Drawn found;
        for (int step = 0; step < kSteps; step++) {
            engine.runner.run(steps.batch(), engine.kv);
            found.take(draws, step * num, num);
            if (!steps.advance()) break;
        }
        return found;
    };
    CHECK(until_end({}, {0, 0, 0, 0, 0}) == wanted, "nine steps on %d threads", threads);
    int first = 0;
    while (wanted.ids[first * num + 2] != end) first++;
    CHECK(until_end({end}, {0, 0, 0, 1, 1}).ids.size() == (first + 1) * num,
          "a token that ends the third request");
    try {
        const DecodeArrays arrays(before, prompts);
        Draws draws = draws_of(num * 40);
        const std::vector<int32_t> none(num + 1);
        DecodeBatch(arrays.batch(draws), 1, 40, EndTokens{none.data(), none.data()});
        CHECK(false, "block tables end before the last step");
    } catch (const std::invalid_argument&) {
    }
}

// The output product keeps the best logit of rows that want nothing else: the same as of logits in memory.
void test_greedy(const KernelTable& kernels, int threads) {
    ThreadPool packers(1);
    const Model model(Format::int8, packers);
    const std::vector<Request> requests = make_requests();
    Engine engine(kernels, model, threads, KvType::bf16);
    std::vector<size_t> prompts;
    std::vector<Floats> logits;
    for (const Request& r : requests) {
        prompts.push_back(r.tokens.size());
        logits.push_back(alone(engine, r, 600));
    }
    const DecodeArrays arrays(requests, prompts);
    Draws draws(static_cast<int>(requests.size()));
    for (SamplingRecord& r : draws.records) r.temperature = 0, r.num_logprobs = -1;
    const Batch batch = arrays.batch(draws);
    CHECK(batch.draws_best());
    engine.runner.run(batch, engine.kv);
    for (size_t r = 0; r < requests.size(); r++)
        CHECK(
            !draws.failed[r] && draws.ids[r] == std::max_element(logits[r].end() - kVocab, logits[r].end()) -
                                                    (logits[r].end() - kVocab),
            "request %zu on %d threads", r, threads);
}

}  // namespace

void test_step_runner(const KernelTable& kernels) {
    test_format(kernels, Format::fp32, KvType::fp32);
    for (const Format format : {Format::bf16, Format::int8, Format::int4})
        test_format(kernels, format, KvType::bf16);
    for (const Format format : {Format::fp32, Format::int8}) test_format(kernels, format, KvType::int8);
    for (const KvType cache : {KvType::fp32, KvType::bf16, KvType::int8})
        test_copied_blocks(kernels, cache), test_shared_prefix(kernels, cache);
    test_draws(kernels);
    for (const int threads : {1, 3}) test_decode_batch(kernels, threads), test_greedy(kernels, threads);
}

}  // namespace octavo::test
