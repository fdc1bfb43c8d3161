// Where attention reads keys on machines with several NUMA nodes, by counting. Without stealing.
#include "../runtime/attention_plan.h"

#include "check.h"

#ifdef __linux__
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo::test {

namespace {

constexpr int kHeads = 8, kBlocks = 512;  // blocks of a request

// Requests with contexts of random lengths. The last rows of each are computed.
struct RandomBatch {
    std::vector<int32_t> starts{0}, contexts, keys, tables;
    Batch batch{};

    RandomBatch(int num_requests, int num_rows, uint32_t seed) {
        std::mt19937 generator(seed);
        for (int request = 0; request < num_requests; request++) {
            const int context = num_rows + static_cast<int>(generator() % (kBlocks * kTile - num_rows));
            contexts.push_back(context);
            for (int row = 0; row < num_rows; row++) keys.push_back(context - num_rows + row);
            starts.push_back(static_cast<int32_t>(keys.size()));
            for (int block = 0; block < kBlocks; block++) tables.push_back(request * kBlocks + block);
        }
        batch.num_tokens = starts.back(), batch.num_requests = num_requests, batch.table_width = kBlocks;
        batch.query_starts = starts.data(), batch.context_lens = contexts.data();
        batch.key_indices = keys.data(), batch.block_tables = tables.data();
    }
};

// Returns the share of keys that threads read on their own node if each node has the memory of some heads.
double share_near(const KvGroup& kv, const Batch& batch, int num_threads, int num_nodes) {
    AttentionPlan plan(AttentionShape{0, 4 * kHeads, Mask{}});
    plan.make(batch, kv, num_threads, true);
    const int num_items = static_cast<int>(plan.items.size());
    double near = 0, all = 0;
    for (int item = 0; item < num_items; item++) {
        const auto [index, head] = plan.items[item];
        const double blocks = plan.works[index].last_block - plan.works[index].first_block;
        int thread = 0;
        while (static_cast<int64_t>(num_items) * (thread + 1) / num_threads <= item) thread++;
        all += blocks;
        if (thread * num_nodes / num_threads == head * num_nodes / kHeads) near += blocks;
    }
    return near / all;
}

void test_reading_keys(int num_threads, int num_nodes) {
    KvGroup kv{1, kHeads, 128, 128, KvType::bf16, kBlocks};
    double by_request = 0;
    int count = 0;
    for (const int num_rows : {1, 4, 256})
        for (const int num_requests : {1, 2, 7, 32, 64}) {
            if (num_rows * num_requests > 2048) continue;
            const RandomBatch random(num_requests, num_rows, static_cast<uint32_t>(num_requests));
            kv.by_heads = true;
            const double near = share_near(kv, random.batch, num_threads, num_nodes);
            CHECK(near == 1, "%d requests on %d nodes: %g", num_requests, num_nodes, near);
            if (num_requests < 7) continue;  // the heads of few requests are divided in any order
            kv.by_heads = false;
            by_request += share_near(kv, random.batch, num_threads, num_nodes), count++;
        }
    CHECK(by_request / count < 1.5 / num_nodes, "%g by request", by_request / count);
}

// Returns the node on which the system will commit a page; -1 if it has no preference or says nothing.
int preferred_node([[maybe_unused]] const uint8_t* page) {
#ifdef __linux__
    int mode = 0;
    unsigned long nodes[16] = {};
    if (syscall(SYS_get_mempolicy, &mode, nodes, 8 * sizeof(nodes), page, MPOL_F_ADDR) == 0 &&
        mode == MPOL_PREFERRED)
        for (int node = 0; node < 64; node++)
            if (nodes[0] >> node & 1) return node;
#endif
    return -1;
}

void test_placing() {
    constexpr size_t kPart = 1u << 16;
    Memory memory(2 * kPart, true);
    memory.place(kPart, kPart, 0);
    memory.place(0, kPart, 1 << 20);  // no such node
    CHECK(preferred_node(memory.data()) == -1);
    if (preferred_node(memory.data() + kPart) == -1) std::printf("  the system places no memory\n");
    memory.data()[kPart] = 1;
}

}  // namespace

void test_attention_plan() {
    for (const int num_nodes : {2, 4, 8}) {
        test_reading_keys(96, num_nodes);
        test_reading_keys(192, num_nodes);
    }
    test_placing();
}

}  // namespace octavo::test
