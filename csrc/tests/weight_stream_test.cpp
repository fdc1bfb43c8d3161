// WeightStream: every op finds the data of its chunk, however the disk behaves. Failed and short reads are
// errors of the step or of the start, slow ones are awaited, and nothing hangs.
#include "../runtime/weight_stream.h"

#include <fcntl.h>

#include <cerrno>
#include <chrono>
#include <optional>
#include <thread>

#include "../runtime/thread_pool.h"
#include "check.h"

namespace octavo::test {

namespace {

constexpr size_t kPage = static_cast<size_t>(kDirectAlign);

// Simulated disk faults: `fails_at` counts reads down to the one that fails with `error` (0: end of file);
// with `erratic`, reads are slow, interrupted or short.
std::atomic<int> fails_at{-1}, error{0};
std::atomic<bool> erratic{false};
std::atomic<uint32_t> reads{0};

ssize_t read_at(int file, void* to, size_t bytes, off_t offset) {
    if (fails_at >= 0 && fails_at-- == 0) {
        if (error == 0) return 0;
        errno = error;
        return -1;
    }
    if (erratic) {
        const uint32_t kind = std::minstd_rand(reads++ + 1)() % 8;
        if (kind == 0) {
            errno = EINTR;
            return -1;
        }
        if (kind < 3) bytes = std::min(bytes, kPage);
        std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return pread(file, to, bytes, offset);
}

uint32_t word_at(size_t offset) { return static_cast<uint32_t>(offset / 4 * 2654435761u); }

// A file whose words identify their offsets.
struct WordFile {
    std::string path;
    WordFile(const std::string& directory, size_t bytes) : path(directory + "/words-XXXXXX") {
        const int file = mkstemp(path.data());
        CHECK(file >= 0, "%s: %s", path.c_str(), std::strerror(errno));
        std::vector<uint32_t> words(bytes / 4);
        for (size_t i = 0; i < words.size(); i++) words[i] = word_at(4 * i);
        CHECK(write(file, words.data(), bytes) == static_cast<ssize_t>(bytes));
        close(file);
    }
    ~WordFile() { unlink(path.c_str()); }
    void truncate_to(size_t bytes) const { CHECK(truncate(path.c_str(), static_cast<off_t>(bytes)) == 0); }
};

// Chunks of some pages in a ring, followed by a resident chunk, as in the offload pass.
struct Layout {
    std::vector<WeightChunk> resident, streamed;
    size_t memory_bytes = 0;
    size_t file_bytes = 0;
};

Layout get_layout(int count, size_t ring_pages, uint32_t seed) {
    std::mt19937 generator(seed);
    Layout layout;
    size_t at = 0, file = 0;
    for (int i = 0; i < count; i++) {
        const size_t pages = 1 + generator() % (ring_pages / 2);
        if (at + pages > ring_pages) at = 0;
        layout.streamed.push_back({static_cast<int64_t>(file * kPage), pages * kPage, at * kPage});
        at += pages, file += pages;
    }
    layout.resident.push_back({static_cast<int64_t>(file * kPage), 2 * kPage, ring_pages * kPage});
    layout.memory_bytes = (ring_pages + 2) * kPage;
    layout.file_bytes = (file + 2) * kPage;
    return layout;
}

void check_words(const WeightStream& stream, const WeightChunk& chunk) {
    const auto* words = reinterpret_cast<const uint32_t*>(stream.memory() + chunk.memory_offset);
    for (size_t i = 0; i < chunk.bytes / 4; i++)
        CHECK(words[i] == word_at(static_cast<size_t>(chunk.file_offset) + 4 * i),
              "word %zu of the chunk at %lld", i, static_cast<long long>(chunk.file_offset));
}

// A step like that of a StepRunner: each phase waits for its chunk, reads it on several threads, and
// releases it.
struct Step : ThreadPool::Task {
    WeightStream& stream;
    const int num_requested;  // chunks that a phase uses; the others are a head's without sampled rows
    const int items_per_phase;
    Step(WeightStream& s, int requested, int items)
        : stream(s), num_requested(requested), items_per_phase(items) {}
    int num_phases() const override { return num_requested; }
    int num_items(int) const override { return items_per_phase; }
    void run(int phase, int, int) override {
        if (stream.await(phase) && !stream.failed()) check_words(stream, stream.streamed()[phase]);
    }
    void on_phase_done(int phase) override { stream.release(phase + 1); }
};

struct Bench {
    Layout layout;
    WordFile file;
    ThreadPool pool{2};
    Bench(const std::string& directory, int count, size_t ring_pages, uint32_t seed)
        : layout(get_layout(count, ring_pages, seed)), file(directory, layout.file_bytes) {}

    std::unique_ptr<WeightStream> open(int num_threads = 3) const {
        return std::make_unique<WeightStream>(
            WeightStream::Source{file.path, num_threads, 2 * kPage, read_at}, layout.resident,
            layout.streamed, layout.memory_bytes);
    }
    int count() const { return static_cast<int>(layout.streamed.size()); }
    // Runs one step. Returns its error message, or nothing.
    std::string step(WeightStream& stream, int requested = -1) {
        Step work(stream, requested < 0 ? count() : requested, 2);
        pool.run(work);
        try {
            stream.end_step();
        } catch (const WeightFileTruncated& thrown) {
            return std::string("truncated: ") + thrown.what();
        } catch (const WeightReadError& thrown) {
            return std::string("failed: ") + thrown.what();
        }
        return "";
    }
};

template <class Thrown>
std::string thrown_by(const Bench& bench) {
    try {
        bench.open();
    } catch (const Thrown& thrown) {
        return thrown.what();
    }
    return "";
}

bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

void test_bytes(const std::string& directory) {
    for (uint32_t seed = 0; seed < 12; seed++) {
        Bench bench(directory, 1 + static_cast<int>(seed), 4 + seed % 5 * 4, seed);
        erratic = seed % 3 == 2;
        const auto stream = bench.open(1 + static_cast<int>(seed) % 4);
        size_t step_bytes = 0;
        for (const WeightChunk& chunk : bench.layout.streamed) step_bytes += chunk.bytes;
        check_words(*stream, bench.layout.resident[0]);
        constexpr int kSteps = 6;
        for (int i = 0; i < kSteps; i++) CHECK(bench.step(*stream).empty());
        check_words(*stream, bench.layout.resident[0]);
        CHECK(stream->num_found() + stream->num_waited() == kSteps * bench.count());
        CHECK(stream->bytes_read() >= static_cast<int64_t>(kSteps * step_bytes));
        CHECK(stream->bytes_read() <= static_cast<int64_t>((kSteps + 1) * step_bytes),
              "more than one step ahead");
    }
    erratic = false;
}

void test_unrequested_chunks(const std::string& directory) {
    Bench bench(directory, 6, 16, 1);
    const auto stream = bench.open();
    // The last chunk stands for the head.
    for (int i = 0; i < 8; i++) CHECK(bench.step(*stream, i % 2 ? 6 : 5).empty());
    CHECK(stream->num_found() + stream->num_waited() == 4 * 6 + 4 * 5);
}

// Each read of two steps fails in turn: that step fails, and the steps after it find their weights.
void test_read_errors(const std::string& directory) {
    Bench bench(directory, 5, 10, 3);
    int num_failed = 0;
    for (int read = 0; read < 24; read++) {
        const auto stream = bench.open();
        CHECK(bench.step(*stream).empty());
        error = EIO;
        fails_at = read;
        std::string thrown;
        for (int i = 0; i < 4 && thrown.empty(); i++) thrown = bench.step(*stream);
        fails_at = -1;
        num_failed += !thrown.empty();
        if (!thrown.empty())
            CHECK(
                contains(thrown, "failed: weights could not be read from " + bench.file.path + " at byte ") &&
                    contains(thrown, "Input/output error"),
                "%s", thrown.c_str());
        for (int i = 0; i < 3; i++) CHECK(bench.step(*stream).empty());
    }
    CHECK(num_failed == 24, "%d of 24", num_failed);
}

// A file that is truncated between steps, and one that was too short from the start.
void test_short_files(const std::string& directory) {
    Bench bench(directory, 5, 10, 5);
    const auto stream = bench.open();
    CHECK(bench.step(*stream).empty());
    const size_t whole = bench.layout.file_bytes;
    bench.file.truncate_to(static_cast<size_t>(bench.layout.streamed[2].file_offset) + 100);
    const std::string expected = "the file of weights ends too early: " + bench.file.path + " at byte ";
    for (int i = 0; i < 3; i++) {
        const std::string thrown = bench.step(*stream);
        CHECK(i == 0 || contains(thrown, "truncated: " + expected), "%s", thrown.c_str());
    }
    for (const size_t bytes : {whole - kPage, whole - kPage - 5, kPage, static_cast<size_t>(0)}) {
        if (bytes < whole) bench.file.truncate_to(bytes);
        const std::string thrown = thrown_by<WeightFileTruncated>(bench);
        CHECK(contains(thrown, expected), "%zu: %s", bytes, thrown.c_str());
    }
}

void test_failing_starts(const std::string& directory) {
    Bench bench(directory, 3, 8, 7);
    error = EIO;
    // Read 0 only tests O_DIRECT.
    for (int read = 1; read < 2; read++) {
        fails_at = read;
        CHECK(contains(thrown_by<WeightReadError>(bench), "could not be read from " + bench.file.path));
        fails_at = -1;
    }
    unlink(bench.file.path.c_str());
    CHECK(contains(thrown_by<WeightReadError>(bench), "No such file"));
}

void test_layouts_that_cannot_be(const std::string& directory) {
    Bench bench(directory, 3, 8, 9);
    const Layout good = bench.layout;
    CHECK(thrown_by<std::logic_error>(bench).empty());
    bench.layout.streamed[1].bytes = 0;
    CHECK(!thrown_by<std::logic_error>(bench).empty());
    bench.layout = good;
    bench.layout.streamed[1].memory_offset += 512;
    CHECK(!thrown_by<std::logic_error>(bench).empty());
    bench.layout = good;
    bench.layout.memory_bytes -= kPage;
    CHECK(!thrown_by<std::logic_error>(bench).empty());
}

// An op waits for a slow disk and counts the time; a stream can be destroyed while reads are in flight.
void test_slow_disk(const std::string& directory) {
    Bench bench(directory, 8, 8, 11);
    erratic = true;
    for (int steps = 0; steps < 4; steps++) {
        const auto stream = bench.open(1);
        for (int i = 0; i < steps; i++) CHECK(bench.step(*stream).empty());
        if (steps) CHECK(stream->num_waited() > 0 && stream->wait_seconds() > 0);
    }
    erratic = false;
    const auto stream = bench.open();
    while (stream->bytes_read() <
           static_cast<int64_t>(bench.layout.streamed[0].bytes) + static_cast<int64_t>(kPage))
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(stream->await(0));
    CHECK(stream->num_found() == 1 && stream->num_waited() == 0 && stream->wait_seconds() == 0);
}

}  // namespace

void test_weight_stream(const std::string& directory) {
    test_bytes(directory);
    test_unrequested_chunks(directory);
    test_read_errors(directory);
    test_short_files(directory);
    test_failing_starts(directory);
    test_layouts_that_cannot_be(directory);
    test_slow_disk(directory);
}

}  // namespace octavo::test
