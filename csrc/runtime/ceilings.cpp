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

// Inputs of a product: as many as in a model, so that the work after the last one weighs no more than there;
// few enough for the second-level cache.
constexpr int kInputs = 1024;
constexpr int kRepeats = 5;

constexpr size_t kPrefetchedBytes = 16 << 10;  // behind the last tile: more than a product reads ahead

template <typename Fn>
double seconds_of(const Fn& fn) {
    const auto start = std::chrono::steady_clock::now();
    fn();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
template <typename Fn>
double best_seconds(const Fn& fn) {
    double best = 1e30;
    for (int i = 0; i < kRepeats; i++) best = std::min(best, seconds_of(fn));
    return best;
}

// Returns the sum of the words of a multiple of 128 bytes, which it reads in order.
uint64_t read_all(const uint8_t* from, size_t bytes) {
    constexpr size_t kStep = 128, kReadAhead = 4096;
    uint64_t sum[kStep / sizeof(uint64_t)] = {}, all = 0;
    for (const uint8_t* at = from; at + kStep <= from + bytes; at += kStep) {
        for (size_t line = 0; line < kStep; line += kLineBytes) __builtin_prefetch(at + kReadAhead + line);
        for (size_t j = 0; j < kStep / sizeof(uint64_t); j++)
            sum[j] += (reinterpret_cast<const uint64_t*>(at))[j];
    }
    for (const uint64_t each : sum) all += each;
    return all;
}

// Makes tiles of zeros: no instruction here takes longer for other numbers.
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
    // Scales as the formats of these codes most often have them.
    const bool halves = code == Code::u2 || code == Code::u3 || code == Code::u6,
               shared = shares_levels(code);
    const bool has_mins = code == Code::u4 || code == Code::u2;
    const Matrix half = matrix(Matrix::Kind::fp16, kInputs / kGroup, sizeof(uint16_t));
    const auto bytes_of = [&](Matrix::Kind kind) { return matrix(kind, kInputs / (kGroup / 2), 1); };
    const Matrix small = bytes_of(shared ? Matrix::Kind::scales4 : Matrix::Kind::i8);
    const Matrix factors = matrix(Matrix::Kind::fp16, kInputs / (kSmallSpan * kGroup), sizeof(uint16_t));
    const Matrix levels = halves ? small : half, supers = halves ? factors : Matrix{};
    const QuantisedSource source{
        .codes = codes,
        .group = halves ? kGroup / 2 : kGroup,
        .zero_point = 0,
        .num_inputs = kInputs,
        .scales = levels,
        .mins = shared     ? bytes_of(Matrix::Kind::mins4)
                : has_mins ? levels
                           : Matrix{},
        .super_scales = supers,
        .super_mins = has_mins ? supers : Matrix{},
        .table = code == Code::l4 ? reinterpret_cast<const int8_t*>(zeros.data()) : nullptr,
        .small_levels = halves,
        .whole_rows = code == Code::i8};
    return pack(pool, memory, source);
}

// One thread's rows for products with a weight, zeros at first, and the memory for their results.
struct RowOperands {
    static constexpr int kRows = 2 * kTile;
    Memory values, scales, scratch;
    Rows rows;
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
        rows = Rows{.type = type,
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

// One thread's operands, all in its own caches.
struct Bench {
    PackedTiles tiles;
    RowOperands operands;

    Bench(const KernelTable& kernels, PackedTiles t) : tiles(std::move(t)), operands(kernels, tiles.tiles) {}
    void run(const KernelTable& kernels, int num_rows) {
        const TileRef refs[2] = {{&tiles.tiles, 0, operands.acc.data()},
                                 {&tiles.tiles, 1, operands.second()}};
        kernels.tile_products(refs, 2, operands.rows, 0, num_rows, operands.scratch.data());
    }
};

}  // namespace

double read_bandwidth(ThreadPool& pool, size_t bytes) {
    const Memory memory(bytes);
    std::memset(memory.data(), 1, bytes);
    const int threads = pool.num_threads();
    const size_t part = bytes / threads / 128 * 128;
    std::vector<uint64_t> sums(threads);
    const double seconds = best_seconds([&] {
        pool.parallel_for(
            threads, [&](int piece, int) { sums[piece] += read_all(memory.data() + piece * part, part); });
    });
    return static_cast<double>(part * threads) / seconds;
}

std::vector<StreamRound> stream_rounds(ThreadPool& pool, const KernelTable& kernels, const Tiles& layout,
                                       size_t bytes, size_t product_bytes, int rounds) {
    const int threads = pool.num_threads(), inputs = layout.num_inputs;
    const auto tiles_of_a_thread = [&](size_t all) {
        return std::max(static_cast<int>(all / layout.tile_bytes / threads), 2) / 2 * 2;
    };
    const int each = tiles_of_a_thread(bytes), step = product_bytes ? tiles_of_a_thread(product_bytes) : each;
    Tiles tiles = layout;
    tiles.num_rows = each * threads * kTile;
    tiles.tile_stride = layout.tile_bytes;
    const size_t part = static_cast<size_t>(each) * layout.tile_bytes;
    const Memory memory(part * threads + kPrefetchedBytes);
    std::memset(memory.data(), 0x3b, memory.size());  // no scale is a subnormal
    tiles.data = memory.data();
    std::vector<float> x(inputs);
    for (int k = 0; k < inputs; k++) x[k] = static_cast<float>(k * 37 % 255 - 127) / 64;
    std::vector<std::unique_ptr<RowOperands>> rows;
    for (int t = 0; t < threads; t++) rows.push_back(std::make_unique<RowOperands>(kernels, tiles));
    std::vector<uint64_t> sums(threads);
    const auto read = [&](int piece, int) { sums[piece] += read_all(memory.data() + piece * part, part); };
    int first = 0;  // of a thread's tiles, in the product that is next
    const auto multiply = [&](int piece, int) {
        RowOperands& own = *rows[piece];
        kernels.begin_step();
        kernels.prepare_row(x.data(), inputs, Norm{}, own.rows, 0);
        const int begin = piece * each + first, end = piece * each + std::min(first + step, each);
        for (int i = begin; i < end; i += 2) {
            const TileRef refs[2] = {{&tiles, i, own.acc.data()}, {&tiles, i + 1, own.second()}};
            kernels.tile_products(refs, 2, own.rows, 0, 1, own.scratch.data());
        }
    };
    std::vector<StreamRound> found(rounds);
    const double total = static_cast<double>(part) * threads;
    for (StreamRound& round : found) {
        round.read = total / seconds_of([&] { pool.parallel_for(threads, read); });
        round.product = total / seconds_of([&] {
                            for (first = 0; first < each; first += step) pool.parallel_for(threads, multiply);
                        });
    }
    return found;
}

double attention_rate(ThreadPool& pool, const KernelTable& kernels, KvGroup group, int num_query_heads,
                      int context, size_t bytes, int rounds) {
    const int threads = pool.num_threads(), blocks = (context + kTile - 1) / kTile;
    const size_t request = blocks * group.block_bytes();
    const int each = std::max(static_cast<int>(bytes / request / threads), 1);  // requests of a thread
    group.num_layers = 1;
    group.num_blocks = each * threads * blocks;
    KvMemory kv({group});
    const KvLayer layer = kv.layer(0, 0);
    std::memset(layer.base, 0x3b, group.memory_bytes());  // no number is a subnormal
    std::vector<int32_t> table(group.num_blocks);
    std::iota(table.begin(), table.end(), 0);
    const std::vector<float> q(static_cast<size_t>(num_query_heads) * group.k_width, 0.5f);
    const int32_t place = context - 1;
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
        AttentionPiece piece{};
        piece.places = &place;
        piece.context_len = context;
        piece.last_split = (context + kSplitKeys - 1) / kSplitKeys;
        piece.num_rows = 1;
        for (int r = thread * each; r < (thread + 1) * each; r++)
            for (piece.kv_head = 0; piece.kv_head < group.num_heads; piece.kv_head++) {
                piece.block_table = table.data() + static_cast<size_t>(r) * blocks;
                kernels.attention(args, piece,
                                  reinterpret_cast<float*>(scratch.data()) + thread * scratch_floats);
            }
    };
    std::vector<double> seconds(rounds);
    for (double& round : seconds) round = seconds_of([&] { pool.parallel_for(threads, attend); });
    std::nth_element(seconds.begin(), seconds.begin() + rounds / 2, seconds.end());
    return static_cast<double>(each) * threads * request / seconds[rounds / 2];
}

double hop_seconds(ThreadPool& pool) {
    if (pool.num_threads() < 2) return 0;
    constexpr int kHops = 2000;
    const double seconds = best_seconds([&] {
        std::atomic<int> ball{0};
        pool.parallel_for(2, [&](int piece, int) {
            for (int hop = piece; hop < kHops; hop += 2) {
                for (int tries = 1; ball.load(std::memory_order_acquire) != hop; tries++)
                    if (tries % 256 == 0)
                        std::this_thread::yield();  // the other thread may need this very processor
                ball.store(hop + 1, std::memory_order_release);
            }
        });
    });
    return seconds / kHops;
}

double product_rate(ThreadPool& pool, const KernelTable& kernels, Code code, int rows) {
    std::vector<std::unique_ptr<Bench>> benches;
    for (int t = 0; t < pool.num_threads(); t++)
        benches.push_back(std::make_unique<Bench>(kernels, zero_tiles(code, pool)));
    constexpr int kCalls = 500;
    const double seconds = best_seconds([&] {
        pool.parallel_for(pool.num_threads(), [&](int piece, int) {
            kernels.begin_step();
            for (int i = 0; i < kCalls; i++) benches[piece]->run(kernels, rows);
        });
    });
    return 2.0 * rows * 2 * kTile * kInputs * kCalls * pool.num_threads() / seconds;
}

}  // namespace octavo
