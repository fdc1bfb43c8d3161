// NeuronCache: every request finds the data of its neurons, whatever stays in memory and however the disk
// behaves; failed reads are errors of the step, and later steps find their neurons.
#include "../runtime/neuron_cache.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "check.h"

namespace octavo::test {

namespace {

constexpr size_t kPage = static_cast<size_t>(kDirectAlign);

std::atomic<int> reads_until_error{-1}, error_code{0};
std::atomic<uint32_t> num_reads{0};
std::atomic<bool> is_slow{false};

ssize_t read_at(int file, void* to, size_t bytes, off_t offset) {
    if (reads_until_error >= 0 && reads_until_error-- == 0) {
        if (error_code == 0) return 0;
        errno = error_code;
        return -1;
    }
    if (is_slow) std::this_thread::sleep_for(std::chrono::microseconds(50 + 100 * (num_reads++ % 5)));
    return pread(file, to, bytes, offset);
}

uint8_t byte_at(size_t offset) { return static_cast<uint8_t>((offset * 2654435761u) >> 13); }

// Layers of several shapes in a file whose bytes identify their offsets.
struct Records {
    std::string path;
    std::vector<NeuronCache::Layer> layers;

    explicit Records(const std::string& directory) : path(directory + "/records-XXXXXX") {
        size_t at = kPage;
        for (const auto& [neurons, up, record, slots] :
             {std::tuple{96, 128, 192, 24}, {200, 0, 64, 200}, {33, 640, 1280, 1}}) {
            layers.push_back({static_cast<int64_t>(at), neurons, static_cast<size_t>(up),
                              static_cast<size_t>(record), slots});
            at += (neurons * record + kPage - 1) / kPage * kPage;
        }
        std::vector<uint8_t> bytes(at);
        for (size_t i = 0; i < at; i++) bytes[i] = byte_at(i);
        const int file = mkstemp(path.data());
        CHECK(file >= 0 && write(file, bytes.data(), at) == static_cast<ssize_t>(at));
        close(file);
    }
    ~Records() { unlink(path.c_str()); }
    std::unique_ptr<NeuronCache> open(int window = 0, size_t gap = 512) const {
        return std::make_unique<NeuronCache>(NeuronCache::Source{.path = path,
                                                                 .num_threads = 3,
                                                                 .max_read_bytes = kPage,
                                                                 .gap_bytes = gap,
                                                                 .window = window,
                                                                 .read_at = read_at},
                                             layers);
    }
    std::unique_ptr<NeuronCache> open_counting(double half_life, bool predicts) const {
        return std::make_unique<NeuronCache>(NeuronCache::Source{.path = path,
                                                                 .num_threads = 3,
                                                                 .max_read_bytes = kPage,
                                                                 .gap_bytes = 0,
                                                                 .window = 0,
                                                                 .half_life = half_life,
                                                                 .predicts = predicts,
                                                                 .read_at = read_at},
                                             layers);
    }
};

void check_record(const NeuronCache& cache, int layer, int neuron) {
    const NeuronCache::Layer& shape = cache.layer(layer);
    const size_t at = static_cast<size_t>(shape.file_offset) + neuron * shape.record_bytes;
    const uint8_t* row = cache.row(layer, neuron);
    CHECK(row + shape.up_bytes == cache.columns()[neuron]);
    for (size_t i = 0; i < shape.record_bytes; i++)
        CHECK(row[i] == byte_at(at + i), "layer %d, neuron %d, byte %zu", layer, neuron, i);
}

// Requests neurons of a layer and checks all of its records.
bool use(NeuronCache& cache, int layer, const std::set<int>& neurons) {
    for (const int neuron : neurons) cache.mark(neuron);
    cache.request(layer);
    const auto& requested = cache.requested(layer);
    CHECK(std::set<int>(requested.begin(), requested.end()) == neurons);
    for (int i = 0; i < static_cast<int>(requested.size()); i++) {
        if (!cache.await(layer, i + 1)) return false;
        check_record(cache, layer, requested[i]);
    }
    for (int n = 0; n < cache.layer(layer).num_neurons; n++)
        if (!neurons.count(n))
            for (size_t i = 0; i < cache.layer(layer).record_bytes - cache.layer(layer).up_bytes; i++)
                CHECK(cache.columns()[n][i] == 0);
    return true;
}

std::set<int> some(std::mt19937& generator, int num_neurons, double share) {
    std::set<int> found;
    std::bernoulli_distribution is_used(share);
    for (int n = 0; n < num_neurons; n++)
        if (is_used(generator)) found.insert(n);
    return found;
}

std::string ended(NeuronCache& cache) {
    try {
        cache.end_step();
    } catch (const std::runtime_error& thrown) {
        return thrown.what();
    }
    return "";
}

void test_records(const std::string& directory) {
    const Records records(directory);
    std::mt19937 generator(7);
    for (const int window : {0, 1, 3}) {
        is_slow = window == 3;
        const auto cache = records.open(window, window ? 512 : 0);
        for (int step = 0; step < 40; step++) {
            cache->begin_step();
            const double share = step % 7 == 0 ? 1 : step % 5 * 0.1;
            for (int layer = 0; layer < cache->num_layers(); layer++)
                CHECK(use(*cache, layer, some(generator, cache->layer(layer).num_neurons, share)));
            CHECK(ended(*cache).empty());
        }
    }
    is_slow = false;
}

// Neurons of a step are found in the next steps of the window, and in all steps if there is room.
void test_window(const std::string& directory) {
    const Records records(directory);
    for (const int window : {0, 2}) {
        const auto cache = records.open(window);
        const std::vector<std::pair<std::set<int>, int>> steps = {
            {{1, 5, 9}, 3}, {{1, 70}, 1}, {{}, 0}, {{5, 9}, window ? 2 : 0}, {{1, 70}, window ? 2 : 0}};
        for (const auto& [neurons, num_read] : steps) {
            const int64_t before = cache->num_read(), found = cache->num_found();
            cache->begin_step();
            CHECK(use(*cache, 0, neurons) && ended(*cache).empty());
            const bool expected =
                cache->num_read() - before == num_read &&
                cache->num_found() - found == static_cast<int64_t>(neurons.size()) - num_read;
            CHECK(expected, "window %d: %lld read", window,
                  static_cast<long long>(cache->num_read() - before));
        }
    }
}

// The oldest are replaced by new ones, but not by those of a step that needs more than the slots.
void test_room(const std::string& directory) {
    const Records records(directory);
    const auto cache = records.open();
    const auto reads = [&](const std::set<int>& neurons) {
        const int64_t before = cache->num_read();
        cache->begin_step();
        CHECK(use(*cache, 0, neurons) && ended(*cache).empty());
        return cache->num_read() - before;
    };
    std::set<int> first, second, all;
    for (int n = 0; n < 12; n++) first.insert(n), second.insert(40 + n);
    for (int n = 0; n < 96; n++) all.insert(n);
    CHECK(reads(first) == 12 && reads(second) == 12 && reads(first) == 0);
    CHECK(reads({90, 91}) == 2);
    CHECK(reads(first) == 0 && reads(second) == 2);
    CHECK(reads(all) == 96 - 24);
    CHECK(reads(second) == 0);
}

void test_pinned(const std::string& directory) {
    Records records(directory);
    records.layers[0].pinned = {90, 3, 4};
    const auto cache = records.open(1);
    for (int step = 0; step < 4; step++) {
        cache->begin_step();
        CHECK(use(*cache, 0, {step, 3, 4, 90}) && ended(*cache).empty());
        CHECK(use(*cache, 1, {step}) && ended(*cache).empty());
    }
    CHECK(cache->num_found() == 4 * 3, "%lld", static_cast<long long>(cache->num_found()));
    records.layers[0].pinned = {3, 3};
    bool is_rejected = false;
    try {
        records.open();
    } catch (const std::logic_error&) {
        is_rejected = true;
    }
    CHECK(is_rejected);
}

// Prefetched neurons are found, others are read, and a prefetch changes no data.
void test_prefetch(const std::string& directory) {
    const Records records(directory);
    const auto cache = records.open();
    cache->begin_step();
    cache->prefetch(0, {3, 4, 50});
    cache->prefetch(1, {7, 8, 150});
    CHECK(use(*cache, 2, {1}));
    while (cache->num_prefetched() < 6) std::this_thread::yield();
    CHECK(use(*cache, 0, {3, 4, 60}) && use(*cache, 1, {8}) && ended(*cache).empty());
    CHECK(cache->num_prefetched_used() == 3 && cache->num_read() == 2);
    std::mt19937 generator(11);
    for (const bool slow : {false, true}) {
        is_slow = slow;
        for (int step = 0; step < 60; step++) {
            error_code = EIO;
            reads_until_error = step % 6 ? -1 : step / 3;
            cache->begin_step();
            bool is_whole = true;
            for (int layer = 0; is_whole && layer < cache->num_layers(); layer++) {
                for (int later = layer + 1; later < cache->num_layers(); later++) {
                    const std::set<int> prefetched = some(generator, cache->layer(later).num_neurons, 0.2);
                    cache->prefetch(later, {prefetched.begin(), prefetched.end()});
                }
                is_whole = use(*cache, layer, some(generator, cache->layer(layer).num_neurons, 0.2));
            }
            reads_until_error = -1;
            CHECK(is_whole == ended(*cache).empty());
        }
    }
    is_slow = false;
}

// Returns four neurons of layer 0; a skewed choice prefers the first ones.
std::set<int> choose_four(std::mt19937& generator, bool is_skewed) {
    std::set<int> chosen;
    std::uniform_real_distribution<double> uniform(0, 1);
    while (chosen.size() < 4) {
        const double u = uniform(generator);
        chosen.insert(static_cast<int>(96 * (is_skewed ? u * u * u : u)));
    }
    return chosen;
}

// With counts, the neurons used most often stay. That finds more than the most recent ones if the choices
// are skewed, and about as many if they are uniform; after a change, others stay.
void test_counts(const std::string& directory) {
    const Records records(directory);
    for (const bool is_skewed : {false, true}) {
        double found[2];
        for (const bool counts : {false, true}) {
            const auto cache = counts ? records.open_counting(256, false) : records.open();
            std::mt19937 generator(5);
            for (int step = 0; step < 1200; step++) {
                if (step == 200) found[counts] = -static_cast<double>(cache->num_found());
                cache->begin_step();
                CHECK(use(*cache, 0, choose_four(generator, is_skewed)) && ended(*cache).empty());
            }
            found[counts] += static_cast<double>(cache->num_found());
        }
        CHECK(found[1] > (is_skewed ? 1.05 : 0.9) * found[0], "%g found, %g with counts", found[0], found[1]);
    }
    const auto cache = records.open_counting(16, false);
    const auto reads = [&](int first) {
        const int64_t before = cache->num_read();
        for (int step = 0; step < 64; step++) {
            cache->begin_step();
            CHECK(use(*cache, 0, {first, first + 1, first + 2 + step % 20}) && ended(*cache).empty());
        }
        return cache->num_read() - before;
    };
    CHECK(reads(0) <= 24);
    CHECK(reads(60) < 64 + 24 && reads(60) <= 24);
}

// Neurons that always follow those of the layer before are prefetched; if nothing follows, few are.
void test_predictions(const std::string& directory) {
    Records records(directory);
    records.layers[1].num_slots = 16;
    for (const bool follows : {true, false}) {
        const auto cache = records.open_counting(256, true);
        std::mt19937 generator(9);
        for (int step = 0; step < 1500; step++) {
            cache->begin_step();
            const std::set<int> first = choose_four(generator, false);
            std::set<int> second;
            for (const int neuron : first) second.insert(2 * neuron);
            if (!follows) second = some(generator, 200, 0.02);
            CHECK(use(*cache, 0, first) && use(*cache, 1, second) && use(*cache, 2, {*first.begin() % 33}));
            CHECK(ended(*cache).empty());
        }
        CHECK(cache->num_prefetched_used() <= cache->num_prefetched());
        CHECK(!follows || cache->num_prefetched() > 0);
    }
}

void test_failing_reads(const std::string& directory) {
    const Records records(directory);
    std::mt19937 generator(3);
    for (const int code : {EIO, 0, EIO}) {
        const auto cache = generator() % 2 ? records.open() : records.open_counting(16, true);
        for (int step = 0; step < 30; step++) {
            error_code = code;
            reads_until_error = step % 3 ? -1 : step / 3;
            cache->begin_step();
            bool is_whole = true;
            for (int layer = 0; is_whole && layer < cache->num_layers(); layer++)
                is_whole = use(*cache, layer, some(generator, cache->layer(layer).num_neurons, 0.4));
            reads_until_error = -1;
            const std::string thrown = ended(*cache);
            const char* const wanted = code ? "could not be read from " : "ends too early: ";
            CHECK(is_whole == thrown.empty());
            CHECK(is_whole || thrown.find(wanted + records.path + " at byte ") != std::string::npos, "%s",
                  thrown.c_str());
        }
    }
}

}  // namespace

void test_neuron_cache(const std::string& directory) {
    test_records(directory);
    test_window(directory);
    test_room(directory);
    test_pinned(directory);
    test_prefetch(directory);
    test_counts(directory);
    test_predictions(directory);
    test_failing_reads(directory);
}

}  // namespace octavo::test
