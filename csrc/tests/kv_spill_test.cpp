// KvSpill: every layer finds the data of the blocks that it requests, whatever stays in memory and however
// the disk behaves, and no more records than allowed stay in memory.
#include "../runtime/kv_spill.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <set>

#include "check.h"

namespace octavo::test {

namespace {

constexpr int kBlocks = 40, kKept = 6, kGroupLayers = 4;
constexpr size_t kRecord = 2 * kRecordAlign, kUsed = kRecord - 100;
const std::vector<int> kLayers = {1, 3};

std::atomic<int> reads_until_error{-1}, writes_until_error{-1};

ssize_t read_at(int file, void* to, size_t bytes, off_t offset) {
    if (reads_until_error >= 0 && reads_until_error-- == 0) return errno = EIO, -1;
    return pread(file, to, std::min(bytes, kRecordAlign), offset);  // short reads are continued
}

ssize_t write_at(int file, const void* from, size_t bytes, off_t offset) {
    if (writes_until_error >= 0 && writes_until_error-- == 0) return errno = EIO, -1;
    return pwrite(file, from, bytes, offset);
}

// Memory of a group, and the expected contents of each record of its layers: 16 tokens whose bytes identify
// their writer.
struct Group {
    Memory memory{kGroupLayers * kBlocks * kRecord, true};
    std::map<std::pair<int, int>, std::vector<uint8_t>> wanted;  // by layer and block
    std::unique_ptr<KvSpill> spill;

    explicit Group(const std::string& directory) {
        std::string path = directory + "/spill-" + std::string(6, 'X');  // replaced by mkstemp
        const int file = mkstemp(path.data());
        CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(kLayers.size() * kBlocks * kRecord)) == 0);
        unlink(path.c_str());
        spill = std::make_unique<KvSpill>(KvSpill::Source{file, 3, kKept, read_at, write_at},
                                          KvSpill::Shape{kBlocks, kRecord, kUsed, kLayers}, memory);
        close(file);
    }
    uint8_t* at(int layer, int block) const {
        return memory.data() + (static_cast<size_t>(layer) * kBlocks + block) * kRecord;
    }
    // Writes tokens of a block from `first` on, as a step does before its attention.
    void write(int layer, int block, int first, uint8_t value) {
        const size_t from = kUsed / 16 * static_cast<size_t>(first);
        auto& bytes = wanted.try_emplace({layer, block}, kUsed).first->second;
        std::fill(bytes.begin() + static_cast<ptrdiff_t>(from), bytes.end(), value);
        std::memset(at(layer, block) + from, value, kUsed - from);
    }
    void check_in_memory(int layer, int block) const {
        const auto found = wanted.find({layer, block});
        if (found == wanted.end()) return;
        CHECK(!std::memcmp(at(layer, block), found->second.data(), kUsed), "layer %d, block %d", layer,
              block);
    }
    void check_read(int layer, int block) const {
        const auto found = wanted.find({layer, block});
        if (found == wanted.end()) return;
        std::vector<uint8_t> bytes(kUsed);
        spill->read_record(layer, block, bytes.data());
        CHECK(bytes == found->second, "layer %d, block %d", layer, block);
    }
};

// Prefetches some blocks of the last layer.
void prefetch(const Group& group, std::mt19937& generator) {
    std::vector<int32_t> blocks(generator() % 8);
    for (int32_t& block : blocks) block = static_cast<int32_t>(generator() % kBlocks);
    group.spill->prefetch(kLayers[1], blocks);
}

// A step that continues some blocks, starts others, and reads any of those that were written. Returns false
// if it failed; its rows then have to be computed again.
bool step(Group& group, std::mt19937& generator, uint8_t value) {
    const bool may_fail = reads_until_error >= 0 || writes_until_error >= 0;
    std::set<int> blocks, continued;
    for (int i = 0; i < 3; i++) blocks.insert(static_cast<int>(generator() % kBlocks));
    for (const int block : blocks)
        if (generator() % 2 && group.wanted.contains({kLayers[0], block})) continued.insert(block);
    const size_t num_read = generator() % 4 ? generator() % 5 : kBlocks;
    try {
        group.spill->begin_step({blocks.begin(), blocks.end()}, {continued.begin(), continued.end()});
    } catch (const KvSpillError&) {
        return false;
    }
    for (const int layer : kLayers) {
        std::vector<int32_t> requested(blocks.begin(), blocks.end());
        for (const int block : blocks)
            group.write(layer, block, continued.contains(block) ? 7 : 0, static_cast<uint8_t>(value + layer));
        for (size_t i = 0; i < num_read; i++)
            requested.push_back(static_cast<int32_t>(generator() % kBlocks));
        group.spill->request(layer, requested);
        if (layer == kLayers[0]) prefetch(group, generator);
        if (!may_fail)
            for (const int block : requested) group.check_in_memory(layer, block);
    }
    try {
        group.spill->end_step();
    } catch (const KvSpillError& error) {
        CHECK(std::string(error.what()).find("kv_spill_dir at byte") != std::string::npos, "%s",
              error.what());
        return false;
    }
    return true;
}

void check_all(const Group& group) {
    for (const int layer : kLayers)
        for (int block = 0; block < kBlocks; block++) group.check_read(layer, block);
}

void test_steps(const std::string& directory) {
    Group group(directory);
    std::mt19937 generator(7);
    for (int i = 0; i < 400; i++) {
        CHECK(step(group, generator, static_cast<uint8_t>(3 * i)));
        CHECK(group.spill->num_in_memory() <= static_cast<int64_t>(kLayers.size()) * kKept, "%d records",
              static_cast<int>(group.spill->num_in_memory()));
        if (i % 10 == 0) check_all(group);
        if (i % 3) continue;  // a block arrives from elsewhere
        const int block = static_cast<int>(generator() % kBlocks);
        for (const int layer : kLayers) {
            auto& bytes = group.wanted[{layer, block}];
            bytes.assign(kUsed, static_cast<uint8_t>(5 * i + layer));
            group.spill->write_record(layer, block, bytes.data());
        }
    }
    CHECK(group.spill->num_found() > 0 && group.spill->num_read() > 0);
    CHECK(group.spill->num_prefetched() > 0);
    CHECK(group.spill->num_prefetched_used() > 0);
    CHECK(group.spill->num_prefetched_used() <= group.spill->num_prefetched());
    CHECK(group.spill->bytes_read() > 0 && group.spill->bytes_written() > 0);
    CHECK(!group.spill->spills(0) && group.spill->spills(1) && !group.spill->spills(2));
}

// Failed reads and writes are errors of the step. No record is lost, and later steps find theirs.
void test_faults(const std::string& directory) {
    Group group(directory);
    std::mt19937 generator(11);
    int failed = 0;
    for (int i = 0; i < 300; i++) {
        reads_until_error = i % 5 == 1 ? static_cast<int>(generator() % 6) : -1;
        writes_until_error = i % 5 == 3 ? static_cast<int>(generator() % 4) : -1;
        failed += !step(group, generator, static_cast<uint8_t>(i));
        reads_until_error = writes_until_error = -1;
        check_all(group);
        CHECK(step(group, generator, static_cast<uint8_t>(i + 1)));
    }
    CHECK(failed > 20, "%d steps failed", failed);
}

}  // namespace

void test_kv_spill(const std::string& directory) {
    test_steps(directory);
    test_faults(directory);
}

}  // namespace octavo::test
