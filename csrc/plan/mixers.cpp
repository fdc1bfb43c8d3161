#include "mixers.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "../runtime/step_runner.h"

namespace octavo {

namespace {

// Returns the slot of a row in a group; -1: padding.
int32_t get_slot(const Batch& batch, int group, int row) {
    return batch.slots[static_cast<int64_t>(group) * batch.num_tokens + row];
}

struct ShortConvOp : Op {
    static constexpr int kRowsPerItem = 4;
    static constexpr int kMaxTaps = 64;
    ShortConvSpec spec;
    const int taps;

    explicit ShortConvOp(const ShortConvSpec& s) : spec(s), taps(s.taps()) {
        if (taps < 1 || taps > kMaxTaps)
            throw std::invalid_argument("a convolution of " + std::to_string(taps) + " taps");
    }
    std::string name() const override { return "convolution"; }
    Cost cost(const View& view) const override {
        const double numbers = static_cast<double>(view.batch.num_tokens) * taps * spec.x.width;
        return {numbers * sizeof(float), 2 * numbers};
    }
    int num_items(const View& view) const override {
        return (view.batch.num_tokens + kRowsPerItem - 1) / kRowsPerItem;
    }
    void check(const Batch& batch, const KvMemory& kv) const override {
        for (int request = 0; request < batch.num_requests; request++)
            for (int row = batch.query_starts[request]; row < batch.query_starts[request + 1]; row++) {
                if (is_none(batch, row)) continue;
                const int last = batch.key_indices[row];
                if (last / kTile >= batch.table_width)
                    throw std::invalid_argument("place " + std::to_string(last) +
                                                " is outside the block table");
                for (int b = std::max(0, last - taps + 1) / kTile; b <= last / kTile; b++)
                    if (!kv.has_block(spec.group, table(batch, request)[b]))
                        throw std::invalid_argument("block " + std::to_string(table(batch, request)[b]) +
                                                    " is outside the KV memory");
            }
    }
    void run(const View& view, int item, ThreadState&, int) const override {
        const Batch& batch = view.batch;
        const int end = std::min(batch.num_tokens, (item + 1) * kRowsPerItem);
        const ShortConvArgs args{taps, spec.x.width, spec.weight, spec.bias, spec.activation};
        for (int row = item * kRowsPerItem; row < end; row++) {
            if (is_none(batch, row)) continue;
            const float* rows[kMaxTaps];
            find_rows(view, row, rows);
            view.runner.kernels().short_conv(args, rows, view.at(spec.out, row));
        }
    }
    bool is_none(const Batch& batch, int row) const {
        return spec.fills && get_slot(batch, spec.group, row) < 0;
    }
    // Finds the rows of all taps; null before the start of the request.
    void find_rows(const View& view, int row, const float** rows) const {
        const Batch& batch = view.batch;
        const int32_t* starts = batch.query_starts;
        const int request =
            static_cast<int>(std::upper_bound(starts, starts + batch.num_requests + 1, row) - starts) - 1;
        const KvLayer kv = view.kv.layer(spec.group, spec.layer);
        const int own = taps - 1, key_index = batch.key_indices[row];
        for (int tap = 0; tap < own; tap++) {
            const int at = key_index - own + tap;
            const auto block = [&] { return table(batch, request)[at / kTile]; };
            rows[tap] =
                at < 0 ? nullptr
                       : reinterpret_cast<const float*>(kv.base + block() * kv.block_stride + kv.v_offset) +
                             static_cast<int64_t>(at % kTile) * kv.v_padded;
        }
        rows[own] = view.at(spec.x, row);
    }
    const int32_t* table(const Batch& batch, int request) const {
        return batch.block_tables +
               (static_cast<int64_t>(spec.group) * batch.num_requests + request) * batch.table_width;
    }
};

struct ScanOp : Op {
    ScanSpec spec;

    explicit ScanOp(const ScanSpec& s) : spec(s) {
        if (spec.num_heads() % num_runs() || (spec.head_width == 1 && num_runs() > 1))
            throw std::invalid_argument("the number of heads is not a multiple of the number of b and c");
        if (spec.beta.width && (spec.by_state() || spec.head_width == 1))
            throw std::invalid_argument("the delta rule with decays by state, or heads of one column");
        if (spec.dt_by_state() && (!spec.beta.width || spec.dt.width != spec.num_heads() * spec.state_size))
            throw std::invalid_argument(std::to_string(spec.dt.width) + " step sizes of " +
                                        std::to_string(spec.num_heads()) + " heads");
    }
    std::string name() const override { return "scan"; }
    int num_runs() const { return spec.b.width / spec.state_size; }
    int blocks_per_part(const View& view) const {
        return view.kv.group(spec.group).k_width / (spec.state_size * kTile);
    }
    int num_parts(const View& view) const { return view.kv.group(spec.group).num_heads; }
    Cost cost(const View& view) const override {
        const double numbers = static_cast<double>(spec.num_blocks()) * kTile * spec.state_size;
        return {2 * numbers * sizeof(float) * view.batch.num_requests, 5 * numbers * view.batch.num_tokens};
    }
    int num_items(const View& view) const override { return view.batch.num_requests * num_parts(view); }
    void check(const Batch& batch, const KvMemory& kv) const override {
        const KvGroup& group = kv.group(spec.group);
        const int64_t room =
            static_cast<int64_t>(group.num_heads) * (group.k_width / (spec.state_size * kTile));
        if (!group.holds_states || room < spec.num_blocks())
            throw std::invalid_argument("a group of " + std::to_string(room) +
                                        " blocks of states, needed are " + std::to_string(spec.num_blocks()));
        for (int r = 0; r < batch.num_requests; r++) {
            const int row = batch.query_starts[r];
            if (row < batch.query_starts[r + 1] && batch.key_indices[row] < 0)
                throw std::invalid_argument("a request that begins at place " +
                                            std::to_string(batch.key_indices[row]));
        }
    }
    void run(const View& view, int item, ThreadState&, int) const override {
        const int request = item / num_parts(view), part = item % num_parts(view);
        const int row0 = view.batch.query_starts[request], row1 = view.batch.query_starts[request + 1];
        if (row0 == row1) return;
        const int32_t slot = get_slot(view.batch, spec.group, row0);
        if (slot < 0) return;
        const KvLayer kv = view.kv.layer(spec.group, spec.layer);
        uint8_t* memory = kv.base + part * kv.head_stride + slot / kTile * kv.block_stride;
        auto* counts = reinterpret_cast<int32_t*>(memory + kv.v_offset);
        auto* states = reinterpret_cast<float*>(memory);
        const int begin = view.batch.key_indices[row0];
        // The state before the step is kept, so that the step can be recomputed.
        const int to = begin && counts[0] == begin ? 1 : 0;
        const bool is_kept = begin == 0 || counts[1 - to] == begin;
        if (begin == 0) counts[1] = -1;  // left over from an earlier request
        float* written = states + static_cast<int64_t>(to) * kv.k_width;
        const float* read = begin ? states + static_cast<int64_t>(1 - to) * kv.k_width : nullptr;
        if (!is_kept) {
            std::fill_n(written, kv.k_width, NAN);
            read = written;
        }
        advance(view, part, row0, row1 - row0, read, written);
        counts[to] = begin + row1 - row0;
    }
    void advance(const View& view, int part, int row0, int num_rows, const float* from, float* to) const {
        const ScanArgs args{.x = view.at(spec.x, row0),
                            .dt = view.at(spec.dt, row0),
                            .b = view.at(spec.b, row0),
                            .c = view.at(spec.c, row0),
                            .beta = spec.beta.width ? view.at(spec.beta, row0) : nullptr,
                            .out = view.at(spec.out, row0),
                            .x_stride = view.stride(spec.x),
                            .dt_stride = view.stride(spec.dt),
                            .b_stride = view.stride(spec.b),
                            .c_stride = view.stride(spec.c),
                            .beta_stride = spec.beta.width ? view.stride(spec.beta) : 0,
                            .out_stride = view.stride(spec.out),
                            .num_rows = num_rows,
                            .state_size = spec.state_size,
                            .by_state = spec.by_state(),
                            .by_lane = spec.head_width == 1,
                            .dt_by_state = spec.dt_by_state(),
                            .low = spec.low,
                            .high = spec.high};
        const int each = blocks_per_part(view), end = std::min(spec.num_blocks(), (part + 1) * each);
        const int64_t floats = static_cast<int64_t>(spec.state_size) * kTile;
        for (int block = part * each; block < end; block++, to += floats) {
            view.runner.kernels().scan_lanes(args, make_lanes(args, block, from, to));
            if (from) from += floats;
        }
    }
    ScanLanes make_lanes(const ScanArgs& args, int block, const float* from, float* to) const {
        const bool by_lane = spec.head_width == 1;
        const int head = by_lane ? 0 : block / spec.blocks_per_head();
        const int first = by_lane ? block * kTile : block % spec.blocks_per_head() * kTile;
        const int count = std::min(kTile, (by_lane ? spec.num_heads() : spec.head_width) - first);
        const int64_t run = static_cast<int64_t>(head) / (spec.num_heads() / num_runs()) * spec.state_size;
        return ScanLanes{
            .column = head * spec.head_width + first,
            .count = count,
            .head = head,
            .decay =
                spec.decay + static_cast<int64_t>(block) * (spec.by_state() ? spec.state_size : 1) * kTile,
            .skip = spec.skip + static_cast<int64_t>(block) * kTile,
            .bias = spec.bias ? spec.bias + (spec.dt_by_state() ? static_cast<int64_t>(head) * spec.state_size
                                                                : static_cast<int64_t>(block) * kTile)
                              : nullptr,
            .b = args.b + run,
            .c = args.c + run,
            .from = from,
            .to = to};
    }
};

}  // namespace

std::unique_ptr<Op> make_op(const ShortConvSpec& spec) { return std::make_unique<ShortConvOp>(spec); }

std::unique_ptr<Op> make_op(const ScanSpec& spec) { return std::make_unique<ScanOp>(spec); }

}  // namespace octavo
