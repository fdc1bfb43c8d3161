// A small llama on a StepRunner: its logits are those of plain loops over doubles, and bitwise the same
// alone or in a batch, in chunks or whole, on any number of threads, and in copied blocks.

#include <algorithm>

#include "../runtime/decode_batch.h"
#include "tiny_llama.h"

namespace octavo::test {

namespace {

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
    const double formats[] = {1e-5, 0.02, 0.03, 0.04}, caches[kNumKvTypes] = {0, 0, 0.02, 0.2, 0.3},
                 bound = formats[static_cast<int>(format)] + caches[static_cast<int>(cache)];
    CHECK(std::sqrt(error / size) < bound, "%s, %s cache: off by %g of the logits' size",
          kFormatNames[static_cast<int>(format)], kKvTypeNames[static_cast<int>(cache)],
          std::sqrt(error / size));
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

// Requests that start with the same blocks, whose last rows one step computes together.
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

// Sampling arrays for `count` rows, greedy or random.
struct SamplingArrays {
    std::vector<SamplingRecord> records;
    std::vector<float> logprobs, top_logprobs;
    std::vector<int32_t> starts, ids, ranks, top_ids;
    std::vector<uint8_t> failed;

    explicit SamplingArrays(int n)
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

void test_sampling(const KernelTable& kernels) {
    constexpr int kRows = 150;  // in three chunks of sampled rows
    ThreadPool pool(4);
    const TestMatrix table(kRows, kVocab, 77, Format::fp32, pool);
    Arena tokens{Axis::tokens}, samples{Axis::samples};
    const ValueSlice x = tokens.add(kVocab), logits = samples.add(kVocab);
    PlanBuilder builder(kernels, {.max_tokens = 200, .vocab = kVocab});
    builder.add(EmbeddingSpec{.table = table.packed, .out = x});
    builder.add(GatherSpec{x, logits});
    builder.add(SampleSpec{logits});
    StepRunner runner(pool, builder.build());
    std::vector<int32_t> ids(kRows), slots(kRows, -1), starts = {0, kRows}, context = {0}, block = {0};
    for (int i = 0; i < kRows; i++) ids[i] = i;
    KvMemory kv({KvGroup{1, 1, 2, 2, KvType::bf16, 1}});
    SamplingArrays sampling(kRows);
    Batch b{};
    b.num_tokens = b.num_samples = kRows;
    b.num_requests = 1;
    b.table_width = b.num_axes = 1;
    b.token_ids = b.key_indices = b.positions = b.sample_rows = ids.data();
    b.query_starts = starts.data();
    b.context_lens = context.data();
    b.slots = slots.data();
    b.block_tables = block.data();
    b.has_sampling = true;
    b.sampling = sampling.args();
    runner.run(b, kv);
    for (int i = 0; i < kRows; i++) {
        const float* row = table.values.data() + static_cast<size_t>(i) * kVocab;
        const int best = static_cast<int>(std::max_element(row, row + kVocab) - row);
        CHECK(!sampling.failed[i] && sampling.ids[i] >= 0 && sampling.ids[i] < kVocab);
        CHECK(sampling.top_ids[3 * i] == best && sampling.top_logprobs[3 * i] <= 0);
        if (i % 2 == 0) CHECK(sampling.ids[i] == best && sampling.ranks[i] == 1);
        if (i % 4 == 1) CHECK(sampling.ranks[i] <= 5);
    }
}

// Samples of each step for all requests: tokens, their logprobs, the top three.
struct SampledTokens {
    std::vector<int32_t> ids, top_ids;
    Floats logprobs;

    void append(const SamplingArrays& sampling, size_t from, size_t count) {
        ids.insert(ids.end(), sampling.ids.begin() + from, sampling.ids.begin() + from + count);
        logprobs.insert(logprobs.end(), sampling.logprobs.begin() + from,
                        sampling.logprobs.begin() + from + count);
        top_ids.insert(top_ids.end(), sampling.top_ids.begin() + 3 * from,
                       sampling.top_ids.begin() + 3 * (from + count));
    }
    bool operator==(const SampledTokens& other) const {
        return ids == other.ids && top_ids == other.top_ids && same_bits(logprobs, other.logprobs);
    }
};

// The arrays of one decode step, as Python makes them: each request's last token. The second request has
// penalties on its generated tokens.
struct DecodeArrays {
    std::vector<int32_t> ids, key_indices, positions, starts = {0}, contexts, slots, rows, tables,
                                                      history_starts = {0}, history_ids, history_counts;
    size_t width = 0;

    DecodeArrays(const std::vector<Request>& requests, const std::vector<size_t>& prompts) {
        for (const Request& r : requests) width = std::max(width, r.blocks.size());
        for (size_t i = 0; i < requests.size(); i++) {
            const Request& r = requests[i];
            const int last = static_cast<int>(r.tokens.size()) - 1;
            ids.push_back(r.tokens[last]);
            key_indices.push_back(last);
            positions.push_back(last + kPositionOffset);
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
    Batch batch(SamplingArrays& sampling) const {
        Batch b{};
        b.num_tokens = b.num_requests = b.num_samples = static_cast<int>(ids.size());
        b.table_width = static_cast<int>(width);
        b.num_axes = 1;
        b.token_ids = ids.data();
        b.key_indices = key_indices.data();
        b.positions = positions.data();
        b.query_starts = starts.data();
        b.context_lens = contexts.data();
        b.slots = slots.data();
        b.block_tables = tables.data();
        b.sample_rows = rows.data();
        b.has_sampling = true;
        for (size_t i = 0; i < ids.size(); i++)
            sampling.records[i].position = static_cast<uint32_t>(key_indices[i]) + 1;
        b.sampling = sampling.args();
        b.sampling.history_starts = history_starts.data();
        b.sampling.history_ids = history_ids.data();
        b.sampling.history_counts = history_counts.data();
        return b;
    }
};

SamplingArrays make_sampling(size_t rows) {
    SamplingArrays sampling(static_cast<int>(rows));
    SamplingRecord& second = sampling.records[1];
    second.repetition_penalty = 1.7f;
    second.presence_penalty = second.frequency_penalty = 0.4f;
    return sampling;
}

// A batch that advances itself computes the same steps as batches made one by one, also with penalties, and
// stops at a stop token.
void test_decode_batch(const KernelTable& kernels, int threads) {
    constexpr int kSteps = 9;
    ThreadPool packers(1);
    const Model model(Format::int8, packers);
    std::vector<Request> requests = make_requests();
    std::vector<size_t> prompts;
    int next = 24;  // after the blocks that make_requests uses
    for (Request& r : requests) {
        prompts.push_back(r.tokens.size() - 1);
        r.blocks.push_back(next++ * 37 % kBlocks);
    }
    const size_t num = requests.size();
    Engine engine(kernels, model, threads, KvType::bf16);
    for (const Request& r : requests)
        if (r.tokens.size() > 1) engine.run({{&r, 0, static_cast<int>(r.tokens.size()) - 1}});
    const std::vector<Request> before = requests;
    SampledTokens wanted;
    for (int step = 0; step < kSteps; step++) {
        const DecodeArrays arrays(requests, prompts);
        SamplingArrays sampling = make_sampling(num);
        engine.runner.run(arrays.batch(sampling), engine.kv);
        wanted.append(sampling, 0, num);
        for (size_t r = 0; r < num; r++) requests[r].tokens.push_back(sampling.ids[r]);
    }
    const int32_t end = wanted.ids[5 * num + 2];
    const auto until_end = [&](const std::vector<int32_t>& ends, const std::vector<int32_t>& end_starts) {
        const DecodeArrays arrays(before, prompts);
        SamplingArrays sampling = make_sampling(num * kSteps);
        DecodeBatch steps(arrays.batch(sampling), 1, kSteps, EndTokens{end_starts.data(), ends.data()});
        SampledTokens found;
        for (int step = 0; step < kSteps; step++) {
            engine.runner.run(steps.batch(), engine.kv);
            found.append(sampling, step * num, num);
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
        SamplingArrays sampling = make_sampling(num * 40);
        const std::vector<int32_t> none(num + 1);
        DecodeBatch(arrays.batch(sampling), 1, 40, EndTokens{none.data(), none.data()});
        CHECK(false, "block tables end before the last step");
    } catch (const std::invalid_argument&) {
    }
}

// The logits' linear op keeps the best logit of greedy rows: the same as that of logits in memory.
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
    SamplingArrays sampling(static_cast<int>(requests.size()));
    for (SamplingRecord& r : sampling.records) r.temperature = 0, r.num_logprobs = -1;
    const Batch batch = arrays.batch(sampling);
    CHECK(batch.is_greedy());
    engine.runner.run(batch, engine.kv);
    for (size_t r = 0; r < requests.size(); r++)
        CHECK(!sampling.failed[r] &&
                  sampling.ids[r] == std::max_element(logits[r].end() - kVocab, logits[r].end()) -
                                         (logits[r].end() - kVocab),
              "request %zu on %d threads", r, threads);
}

}  // namespace

void test_step_runner(const KernelTable& kernels) {
    test_format(kernels, Format::fp32, KvType::fp32);
    for (const Format format : {Format::bf16, Format::int8, Format::int4})
        test_format(kernels, format, KvType::bf16);
    for (const KvType cache : {KvType::int8, KvType::k8v4, KvType::int4})
        for (const Format format : {Format::fp32, Format::int8}) test_format(kernels, format, cache);
    for (const KvType cache : {KvType::fp32, KvType::bf16, KvType::int8, KvType::k8v4, KvType::int4})
        test_copied_blocks(kernels, cache), test_shared_prefix(kernels, cache);
    test_sampling(kernels);
    for (const int threads : {1, 3}) test_decode_batch(kernels, threads), test_greedy(kernels, threads);
}

}  // namespace octavo::test
