#include "ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "../plan/packing.h"

namespace octavo {

namespace {

// Inputs of a matmul: as many as in a model, so that the work after the last input has the same share; few
// enough for the second-level cache.
constexpr int kInputs = 1024;
constexpr int kRepeats = 5;

constexpr size_t kPrefetchSlack = 16 << 10;  // after the last tile: more than a matmul prefetches

template <typename Fn>
double measure_seconds(const Fn& fn) {
    const auto start = std::chrono::steady_clock::now();
    fn();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
template <typename Fn>
double best_seconds(const Fn& fn) {
    double best = 1e30;
    for (int i = 0; i < kRepeats; i++) best = std::min(best, measure_seconds(fn));
    return best;
}

// Reads `bytes`, a multiple of 128, in order, and returns the sum of their words.
uint64_t read_all(const uint8_t* from, size_t bytes) {
    constexpr size_t kStep = 128, kPrefetchDistance = 4096;
    uint64_t sum[kStep / sizeof(uint64_t)] = {}, all = 0;
    for (const uint8_t* at = from; at + kStep <= from + bytes; at += kStep) {
        for (size_t line = 0; line < kStep; line += kLineBytes)
            __builtin_prefetch(at + kPrefetchDistance + line);
        for (size_t j = 0; j < kStep / sizeof(uint64_t); j++)
            sum[j] += (reinterpret_cast<const uint64_t*>(at))[j];
    }
    for (const uint64_t each : sum) all += each;
    return all;
}

// Each thread writes its own part first, so that the system places it near the thread.
void fill(ThreadPool& pool, const Memory& memory, size_t part, int value) {
    pool.parallel_for(pool.num_threads(),
                      [&](int item, int) { std::memset(memory.data() + item * part, value, part); });
    const size_t filled = pool.num_threads() * part;
    std::memset(memory.data() + filled, value, memory.size() - filled);
}

// Makes tiles of zeros: no instruction here is slower for other values.
PackedTiles zero_tiles(Code code, ThreadPool& pool) {
    WeightMemory memory;
    const std::vector<float> zeros(static_cast<size_t>(2) * kTile * kInputs);
    const auto matrix = [&](Matrix::Kind kind, int columns, int bytes) {
        Matrix m{};
        m.kind = kind;
        m.data = reinterpret_cast<const uint8_t*>(zeros.data());
        m.rows = 2 * kTile;
        m.columns = columns;
        m.row_stride = static_cast<int64_t>(columns) * bytes;
        m.column_stride = bytes;
        return m;
    };
    if (code == Code::bf16 || code == Code::fp16 || code == Code::fp32 || is_float_code(code))
        return pack(pool, memory, matrix(Matrix::Kind::fp32, kInputs, sizeof(float)), code);
    const int low = low_bits(code), high = high_bits(code), block = kGroup * (low + high) / 8;
    const int64_t row_bytes = static_cast<int64_t>(kInputs) / kGroup * block;
    CodeRows codes{reinterpret_cast<const uint8_t*>(zeros.data()),
                   2 * kTile,
                   row_bytes,
                   row_bytes,
                   kGroup,
                   block,
                   {{0, low, 1}}};
    if (high) codes.planes.push_back({kGroup * low / 8, high, 1});
    codes.is_signed = low == 8;
    // Scale formats that are most common with these codes.
    const bool halves = code == Code::u2 || code == Code::u3 || code == Code::u6,
               shared = shares_levels(code);
    const bool has_mins = code == Code::u4 || code == Code::u2;
    const Matrix half = matrix(Matrix::Kind::fp16, kInputs / kGroup, sizeof(uint16_t));
    const auto byte_matrix = [&](Matrix::Kind kind) { return matrix(kind, kInputs / (kGroup / 2), 1); };
    const Matrix small = byte_matrix(shared ? Matrix::Kind::scales4 : Matrix::Kind::i8);
    const Matrix factors = matrix(Matrix::Kind::fp16, kInputs / (kSmallSpan * kGroup), sizeof(uint16_t));
    const Matrix levels = halves ? small : half, supers = halves ? factors : Matrix{};
    const QuantizedSource source{
        .codes = codes,
        .group = halves ? kGroup / 2 : kGroup,
        .zero_point = 0,
        .num_inputs = kInputs,
        .scales = levels,
        .mins = shared     ? byte_matrix(Matrix::Kind::mins4)
                : has_mins ? levels
                           : Matrix{},
        .super_scales = supers,
        .super_mins = has_mins ? supers : Matrix{},
        .table = code == Code::l4 ? reinterpret_cast<const int8_t*>(zeros.data()) : nullptr,
        .small_levels = halves,
        .whole_rows = code == Code::i8};
    return pack(pool, memory, source);
}

// One thread's inputs for matmuls with a weight, initially zeros, and memory for the results.
struct RowOperands {
    static constexpr int kRows = 2 * kTile;
    Memory values, scales, scratch;
    QuantizedRows rows;
    std::vector<float> acc;

    RowOperands(const KernelTable& kernels, const Tiles& w)
        : values(static_cast<size_t>(kRows) * w.num_groups * kGroup * sizeof(float) +
                 OutlierList::num_bytes(w.num_inputs)),
          scales(static_cast<size_t>(kRows) * w.num_groups * 16),
          scratch(kernels.scratch_bytes(w)),
          acc(static_cast<size_t>(2) * kRows * kTile) {
        const size_t each = static_cast<size_t>(kRows) * w.num_groups;
        float* at = reinterpret_cast<float*>(scales.data());
        const RowType type = kernels.row_type(w.code);
        rows = QuantizedRows{.type = type,
                             .values = values.data(),
                             .stride = row_elements(type, w.num_groups),
                             .scales = at,
                             .sums = reinterpret_cast<int32_t*>(at + 2 * each),
                             .scaled_sums = at + each,
                             .num_groups = w.num_groups,
                             .group_stride = w.num_groups};
    }
    float* second() { return acc.data() + kRows * kTile; }
};

// One thread's operands, which stay in its own caches.
struct Bench {
    PackedTiles tiles;
    RowOperands operands;

    Bench(const KernelTable& kernels, PackedTiles t) : tiles(std::move(t)), operands(kernels, tiles.tiles) {}
    void run(const KernelTable& kernels, int num_rows) {
        const TileRef refs[2] = {{&tiles.tiles, 0, operands.acc.data()},
                                 {&tiles.tiles, 1, operands.second()}};
        kernels.tile_matmul(refs, 2, operands.rows, 0, num_rows, operands.scratch.data());
    }
};

}  // namespace

double read_bandwidth(ThreadPool& pool, size_t bytes) {
    const Memory memory(bytes);
    const int threads = pool.num_threads();
    const size_t part = bytes / threads / 128 * 128;
    fill(pool, memory, part, 1);
    std::vector<uint64_t> sums(threads);
    const double seconds = best_seconds([&] {
        pool.parallel_for(threads,
                          [&](int item, int) { sums[item] += read_all(memory.data() + item * part, part); });
    });
    return static_cast<double>(part * threads) / seconds;
}

std::vector<StreamRound> stream_rounds(ThreadPool& pool, const KernelTable& kernels, const Tiles& layout,
                                       size_t bytes, size_t matmul_bytes, int rounds) {
    const int threads = pool.num_threads(), inputs = layout.num_inputs;
    const auto tiles_per_thread = [&](size_t all) {
        return std::max(static_cast<int>(all / layout.tile_bytes / threads), 2) / 2 * 2;
    };
    const int each = tiles_per_thread(bytes), step = matmul_bytes ? tiles_per_thread(matmul_bytes) : each;
    Tiles tiles = layout;
    tiles.num_rows = each * threads * kTile;
    tiles.tile_stride = layout.tile_bytes;
    const size_t part = static_cast<size_t>(each) * layout.tile_bytes;
    const Memory memory(part * threads + kPrefetchSlack);
    fill(pool, memory, part, 0x3b);  // avoids subnormal scales
    tiles.data = memory.data();
    std::vector<float> x(inputs);
    for (int k = 0; k < inputs; k++) x[k] = static_cast<float>(k * 37 % 255 - 127) / 64;
    std::vector<std::unique_ptr<RowOperands>> rows;
    for (int t = 0; t < threads; t++) rows.push_back(std::make_unique<RowOperands>(kernels, tiles));
    std::vector<uint64_t> sums(threads);
    const auto read = [&](int item, int) { sums[item] += read_all(memory.data() + item * part, part); };
    int first = 0;  // first tile of the next matmul within a thread's tiles
    const auto multiply = [&](int item, int) {
        RowOperands& own = *rows[item];
        kernels.begin_step();
        kernels.quantize_row(x.data(), inputs, Norm{}, own.rows, 0);
        const int begin = item * each + first, end = item * each + std::min(first + step, each);
        for (int i = begin; i < end; i += 2) {
            const TileRef refs[2] = {{&tiles, i, own.acc.data()}, {&tiles, i + 1, own.second()}};
            kernels.tile_matmul(refs, 2, own.rows, 0, 1, own.scratch.data());
        }
    };
    std::vector<StreamRound> found(rounds);
    const double total = static_cast<double>(part) * threads;
    for (StreamRound& round : found) {
        round.read = total / measure_seconds([&] { pool.parallel_for(threads, read); });
        round.matmul = total / measure_seconds([&] {
                           for (first = 0; first < each; first += step) pool.parallel_for(threads, multiply);
                       });
    }
    return found;
}

double attention_rate(ThreadPool& pool, const KernelTable& kernels, KvGroup group, int num_query_heads,
                      int context, size_t bytes, int rounds) {
    const int threads = pool.num_threads(), blocks = (context + kTile - 1) / kTile;
    const size_t request = blocks * group.block_bytes();
    const int each = std::max(static_cast<int>(bytes / request / threads), 1);  // requests per thread
    group.num_layers = 1;
    group.num_blocks = each * threads * blocks;
    KvMemory kv({group});
    const KvLayer layer = kv.layer(0, 0);
    std::memset(layer.base, 0x3b, group.memory_bytes());  // avoids subnormal numbers
    std::vector<int32_t> table(group.num_blocks);
    std::iota(table.begin(), table.end(), 0);
    const std::vector<float> q(static_cast<size_t>(num_query_heads) * group.k_width, 0.5f);
    const int32_t key_index = context - 1;
    std::vector<std::vector<float>> outs(
        threads, std::vector<float>(static_cast<size_t>(num_query_heads) * group.v_width));
    const size_t scratch_floats = attention_scratch_floats(group.k_width, group.v_padded());
    const Memory scratch(threads * scratch_floats * sizeof(float));
    const auto attend = [&](int thread, int) {
        AttentionArgs args{};
        args.q = q.data();
        args.out = outs[thread].data();
        args.q_stride = static_cast<int64_t>(q.size());
        args.out_stride = static_cast<int64_t>(outs[thread].size());
        args.kv = layer;
        args.num_heads = num_query_heads;
        args.scale = 1;
        AttentionItem item{};
        item.key_indices = &key_index;
        item.context_len = context;
        item.last_split = (context + kSplitKeys - 1) / kSplitKeys;
        item.num_rows = 1;
        for (int r = thread * each; r < (thread + 1) * each; r++)
            for (item.kv_head = 0; item.kv_head < group.num_heads; item.kv_head++) {
                item.block_table = table.data() + static_cast<size_t>(r) * blocks;
                kernels.attention(args, item,
                                  reinterpret_cast<float*>(scratch.data()) + thread * scratch_floats);
            }
    };
    std::vector<double> seconds(rounds);
    for (double& round : seconds) round = measure_seconds([&] { pool.parallel_for(threads, attend); });
    std::nth_element(seconds.begin(), seconds.begin() + rounds / 2, seconds.end());
    return static_cast<double>(each) * threads * request / seconds[rounds / 2];
}

double hop_seconds(ThreadPool& pool) {
    if (pool.num_threads() < 2) return 0;
    constexpr int kHops = 2000;
    const double seconds = best_seconds([&] {
        std::atomic<int> ball{0};
        pool.parallel_for(2, [&](int item, int) {
            for (int hop = item; hop < kHops; hop += 2) {
                for (int tries = 1; ball.load(std::memory_order_acquire) != hop; tries++)
                    if (tries % 256 == 0)
                        std::this_thread::yield();  // the other thread may need this processor
                ball.store(hop + 1, std::memory_order_release);
            }
        });
    });
    return seconds / kHops;
}

double matmul_rate(ThreadPool& pool, const KernelTable& kernels, Code code, int rows) {
    std::vector<std::unique_ptr<Bench>> benches;
    for (int t = 0; t < pool.num_threads(); t++)
        benches.push_back(std::make_unique<Bench>(kernels, zero_tiles(code, pool)));
    constexpr int kCalls = 500;
    const double seconds = best_seconds([&] {
        pool.parallel_for(pool.num_threads(), [&](int item, int) {
            kernels.begin_step();
            for (int i = 0; i < kCalls; i++) benches[item]->run(kernels, rows);
        });
    });
    return 2.0 * rows * 2 * kTile * kInputs * kCalls * pool.num_threads() / seconds;
}

}  // namespace octavo
