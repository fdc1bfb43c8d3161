// SharedRanks, with threads as ranks that each have a mapping of their own: collectives in slots that grow
// and in several parts, and the end of a wait for a rank that never arrives.
#include "../runtime/shared_ranks.h"

#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "check.h"

namespace octavo::test {

namespace {

// A file that is removed when its last descriptor is closed.
struct MemoryFile {
    int file;
    explicit MemoryFile(const std::string& directory) {
        std::string name = directory + "/ranks-XXXXXX";
        file = mkstemp(name.data());
        CHECK(file >= 0);
        unlink(name.c_str());
    }
    ~MemoryFile() { close(file); }
};

void on_ranks(int file, int num_ranks, const std::function<void(SharedRanks&)>& run, int num_tensor = 0) {
    if (!num_tensor) num_tensor = num_ranks;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < num_ranks; rank++)
        threads.emplace_back([=, &run] {
            SharedRanks ranks(file, rank, num_ranks, num_tensor);
            run(ranks);
        });
    for (auto& thread : threads) thread.join();
}

Floats get_part(int rank, size_t count) {
    return normal(count, 7 + static_cast<uint32_t>(rank), static_cast<float>(1 + rank));
}

// Sums are bitwise those of a loop in rank order, in one slot or several parts.
void test_sums(const std::string& directory, int num_ranks) {
    for (const size_t count : {1, 577, 40'000}) {
        MemoryFile memory(directory);
        Floats wanted(count);
        for (int rank = 0; rank < num_ranks; rank++) {
            const Floats part = get_part(rank, count);
            for (size_t i = 0; i < count; i++) wanted[i] = rank ? wanted[i] + part[i] : part[i];
        }
        on_ranks(memory.file, num_ranks, [&](SharedRanks& ranks) {
            for (int round = 0; round < 20; round++) {
                Floats sum(count);
                const Floats part = get_part(ranks.rank(), count);
                ranks.all_reduce(part.data(), sum.data(), count);
                CHECK(same_bits(sum, wanted));
                if (round == 9) ranks.reserve(count * sizeof(float));
            }
        });
    }
}

// Rank r has 5000 r + 1 columns, whose entries identify rank and index.
void test_columns(const std::string& directory, int num_ranks) {
    MemoryFile memory(directory);
    std::vector<int> widths;
    for (int rank = 0; rank < num_ranks; rank++) widths.push_back(rank * 5'000 + 1);
    on_ranks(memory.file, num_ranks, [&](SharedRanks& ranks) {
        const size_t rows = 9, own = static_cast<size_t>(widths[ranks.rank()]);
        size_t width = 0;
        for (const int w : widths) width += static_cast<size_t>(w);
        Floats x(rows * own), out(rows * width);
        for (size_t i = 0; i < x.size(); i++)
            x[i] = static_cast<float>(ranks.rank() * 1'000'000) + static_cast<float>(i);
        ranks.all_gather(x.data(), out.data(), rows, widths);
        for (size_t row = 0, at = 0; row < rows; row++)
            for (int rank = 0; rank < num_ranks; rank++)
                for (int column = 0; column < widths[rank]; column++)
                    CHECK(out[at++] == static_cast<float>(rank * 1'000'000) +
                                           static_cast<float>(row * widths[rank] + column));
    });
}

// Two tensor-parallel pairs: a sum is that of a pair, and a row comes from the rank with the same index in
// the other pair.
void test_grid(const std::string& directory) {
    MemoryFile memory(directory);
    const size_t rows = 7, width = 5'000;
    const auto run = [&](SharedRanks& ranks) {
        const Floats own = get_part(ranks.rank(), rows * width);
        std::vector<int32_t> owners;
        for (size_t row = 0; row < rows; row++) owners.push_back(static_cast<int>(row) % 2);
        Floats found(own.size());
        ranks.collect(own.data(), owners.data(), found.data(), rows, width);
        for (size_t row = 0; row < rows; row++) {
            const Floats wanted = get_part(owners[row] * 2 + ranks.rank() % 2, rows * width);
            for (size_t i = row * width; i < (row + 1) * width; i++) CHECK(found[i] == wanted[i]);
        }
        ranks.all_reduce(own.data(), found.data(), own.size());
        const int first = ranks.rank() / 2 * 2;
        const Floats a = get_part(first, own.size()), b = get_part(first + 1, own.size());
        for (size_t i = 0; i < own.size(); i++) CHECK(found[i] == a[i] + b[i]);
    };
    on_ranks(memory.file, 4, run, 2);
}

void test_first(const std::string& directory) {
    MemoryFile memory(directory);
    on_ranks(memory.file, 3, [&](SharedRanks& ranks) {
        std::vector<uint8_t> bytes(100'000);
        for (size_t i = 0; i < bytes.size(); i++) bytes[i] = static_cast<uint8_t>(i * (ranks.rank() ? 3 : 1));
        ranks.from_first(bytes.data(), bytes.size());
        for (size_t i = 0; i < bytes.size(); i++) CHECK(bytes[i] == static_cast<uint8_t>(i));
    });
}

// The second of two ranks never reaches the sum, and aborts the first one's wait from its own mapping.
void test_abort(const std::string& directory) {
    using Clock = std::chrono::steady_clock;
    MemoryFile memory(directory);
    SharedRanks first(memory.file, 0, 2, 2), second(memory.file, 1, 2, 2);
    bool was_aborted = false;
    std::thread waiting([&] {
        float x = 1;
        try {
            first.all_reduce(&x, &x, 1);
        } catch (const RanksAborted&) {
            was_aborted = true;
        }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const auto start = Clock::now();
    second.abort();
    waiting.join();
    CHECK(was_aborted && Clock::now() - start < std::chrono::seconds(5));
    bool again = false;
    try {
        second.reserve(1);
    } catch (const RanksAborted&) {
        again = true;
    }
    CHECK(again);
}

}  // namespace

void test_shared_ranks(const std::string& directory) {
    for (const int num_ranks : {1, 2, 3}) {
        test_sums(directory, num_ranks);
        test_columns(directory, num_ranks);
    }
    test_grid(directory);
    test_first(directory);
    test_abort(directory);
}

}  // namespace octavo::test
