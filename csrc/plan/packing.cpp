#include "packing.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "packing_readers.h"

namespace octavo {

namespace {

// Layout of a group of 32 inputs in a tile.
struct GroupLayout {
    size_t codes_bytes;  // of all 16 outputs
    size_t scale_bytes = 0;  // one scale for each of the 16 outputs
    int parts = 0;  // scales per output
    size_t zero_point_bytes = 0;  // mins or zero points of all 16 outputs
    size_t factor_bytes = 0;  // before each `span` groups
    int span = kSmallSpan;
    size_t bytes() const { return codes_bytes + scale_bytes * parts + zero_point_bytes; }
};

GroupLayout make_group_layout(const Tiles& t) {
    constexpr size_t kCodes = kGroup * kTile;
    switch (t.code) {
        case Code::i8: return {kCodes};
        case Code::bf16:
        case Code::fp16: return {2 * kCodes};
        case Code::fp32: return {4 * kCodes};
        case Code::f4: return {kCodes / 2, 0, 0, 0, kTile * sizeof(float), t.span};
        case Code::e4m3: return {kCodes, 0, 0, 0, kTile * sizeof(float), t.span};
        default: {
            const bool small = t.scale_type == ScaleType::small;
            const size_t scale = kTile * (small ? 1 : t.scale_type == ScaleType::fp16 ? 2 : 4);
            const bool has_no_zero_point = t.zero_point_kind == ZeroPointKind::none || shares_levels(t.code);
            const size_t low = has_no_zero_point                          ? 0
                               : t.zero_point_kind == ZeroPointKind::zero ? static_cast<size_t>(kTile)
                                                                          : scale;
            const int parts = t.half_groups ? 2 : 1;
            const size_t factor = kTile * (t.half_factors ? sizeof(uint16_t) : sizeof(float));
            const size_t factors = small ? factor * (t.zero_point_kind == ZeroPointKind::min ? 2 : 1) : 0;
            return {codes_bytes(t.code), scale, parts, low * parts, factors};
        }
    }
}

// Swaps the inner two of four bytes.
uint32_t swap_inner_bytes(uint32_t four) {
    return (four & 0xff0000ff) | (four >> 8 & 0x0000ff00) | (four << 8 & 0x00ff0000);
}

// Whether scales, and mins if any, are single-level fp16, which tiles store unchanged.
bool keeps_fp16(const QuantizedSource& s) {
    return s.scales.kind == Matrix::Kind::fp16 && !s.super_scales.data &&
           (!s.mins.data || (s.mins.kind == Matrix::Kind::fp16 && !s.super_mins.data));
}

// Returns the code of a source's tiles. 4-bit codes in groups of 16 are indices into a table too, that of the
// numbers 0 to 15.
Code code_for(const QuantizedSource& s) {
    const int bits = s.codes.bits();
    const bool small_halves = s.small_levels && s.group == 16;
    const bool shares_bytes = s.scales.kind == Matrix::Kind::scales4 && s.mins.kind == Matrix::Kind::mins4;
    if (bits <= 2 && small_halves && s.mins.data && shares_bytes) return Code::u2;
    if (bits == 3 && small_halves && !s.mins.data) return Code::u3;
    if (bits <= 4) return s.table || s.group == 16 ? Code::l4 : Code::u4;
    if (s.zeros.data) return Code::u8;
    if (bits == 5 && s.group != 16 && (s.small_levels || keeps_fp16(s))) return Code::u5;
    return bits == 6 && small_halves && !s.mins.data ? Code::u6 : Code::u8;
}

// Writes one output's codes of a group: the low bits of each, then the high bits (weights.h).
void write_codes(Code code, const Bytes (&codes)[2], uint8_t* to) {
    uint32_t quads[8];
    std::memcpy(quads, codes, sizeof quads);
    if (code == Code::e4m3)
        for (uint32_t& quad : quads) quad = swap_inner_bytes(quad);
    // Writes `bits` bits of each code, from bit `first` on, with as many quads per vector as fit into a
    // byte.
    const auto put = [&](int first, int bits, uint8_t* at) {
        const uint32_t mask = 0x01010101u * ((1u << bits) - 1);
        const int shared = 8 / bits;
        for (int v = 0; v < 8; v += shared, at += 64) {
            uint32_t all = 0;
            for (int i = 0; i < shared; i++) all |= (quads[v + i] >> first & mask) << bits * i;
            std::memcpy(at, &all, 4);
        }
    };
    const int low = low_bits(code), high = high_bits(code);
    put(0, low, to);
    if (high) put(low, high, to + 64 * low);
}

// Packs groups `begin` to `end` of a tile: write(row, lane, group, bytes) adds a row's part of a group to
// zeroed bytes. A few groups at a time are assembled in the first-level cache and then copied, since
// writing whole lines in order is several times as fast as scattered words.
template <typename Write>
void pack_groups(const Tiles& t, size_t group_bytes, int tile, uint8_t* to, const Write& write, int begin,
                 int end) {
    constexpr size_t kNear = 8 << 10;
    alignas(64) uint8_t groups[kNear];
    const int run = static_cast<int>(kNear / group_bytes), lanes = std::min(kTile, t.num_rows - tile * kTile);
    for (int first = begin; first < end; first += run) {
        const int count = std::min(run, end - first);
        std::memset(groups, 0, count * group_bytes);
        for (int lane = 0; lane < lanes; lane++)
            for (int i = 0; i < count; i++)
                write(static_cast<int64_t>(tile) * kTile + lane, lane, first + i, groups + i * group_bytes);
        std::memcpy(to + (first - begin) * group_bytes, groups, count * group_bytes);
    }
}
template <typename Write>
void pack_groups(const Tiles& t, size_t group_bytes, int tile, uint8_t* to, const Write& write) {
    pack_groups(t, group_bytes, tile, to, write, 0, t.num_groups);
}

void check(const QuantizedSource& s) {
    const bool half_groups = s.group == 16;
    if (!half_groups && s.group % kGroup != 0)
        throw std::invalid_argument("weights are packed in groups of 16 or a multiple of 32, got " +
                                    std::to_string(s.group));
    if (s.table && (s.codes.bits() != 4 || s.zero_point || s.zeros.data))
        throw std::invalid_argument("codes of a table have 4 bits, no zero point and no zeros");
    if (s.mins.data && s.zero_point && s.codes.bits() < 8)
        throw std::invalid_argument("codes of fewer than 8 bits have mins or a zero point, got both");
    if (half_groups && s.zeros.data)
        throw std::invalid_argument("weights in groups of 16 are packed without zeros");
    const int per_factor = kSmallSpan * kGroup / std::min(s.group, kGroup);
    const auto is_small = [&](const Matrix& values, const Matrix& supers) {
        return !values.data || (supers.data && values.numbers() == supers.numbers() * per_factor);
    };
    if (s.small_levels &&
        (s.group > kGroup || s.num_inputs % (kSmallSpan * kGroup) || s.zeros.data || !s.super_scales.data ||
         !is_small(s.scales, s.super_scales) || !is_small(s.mins, s.super_mins)))
        throw std::invalid_argument("small scales are of 16 or 32 inputs, with factors for each 256");
    if (s.zeros.data && (s.mins.data || s.zeros.kind != Matrix::Kind::i8))
        throw std::invalid_argument("zeros of groups are signed bytes, without mins beside them");
}

// Calls to(i, value) for each of `count` adjacent numbers.
template <typename To>
void read_floats(Matrix::Kind kind, const uint8_t* from, int count, const To& to) {
    const auto each = [&]<Matrix::Kind K>() {
        for (int i = 0; i < count; i++) to(i, number_at(K, from, i));
    };
    switch (kind) {
        case Matrix::Kind::fp16: return each.template operator()<Matrix::Kind::fp16>();
        case Matrix::Kind::bf16: return each.template operator()<Matrix::Kind::bf16>();
        default: return each.template operator()<Matrix::Kind::fp32>();
    }
}

// Reads `count` floats of a group for one output, followed by zeros, in the tile's type of 2 or 4 bytes.
void read_values(Matrix::Kind kind, Code code, const uint8_t* from, int count, uint32_t (&words)[kGroup]) {
    if (code == Code::fp32) {
        std::fill(words + count, words + kGroup, 0);
        return read_floats(kind, from, count,
                           [&](int i, float value) { words[i] = std::bit_cast<uint32_t>(value); });
    }
    uint16_t halves[kGroup];
    std::fill(halves + count, halves + kGroup, 0);
    if (code == Code::fp16 || kind == Matrix::Kind::bf16) {
        std::memcpy(halves, from, 2 * static_cast<size_t>(count));
    } else {
        read_floats(kind, from, count, [&](int i, float value) { halves[i] = float_to_bf16_bits(value); });
    }
    std::memcpy(words, halves, sizeof halves);
}

}  // namespace

Tiles make_tiles(const TileFormat& format, int64_t num_rows, int num_inputs) {
    Tiles t{};
    t.code = format.code;
    t.scale_type = format.scale_type;
    t.zero_point_kind = format.zero_point_kind;
    t.half_groups = format.half_groups;
    t.half_factors = format.half_factors;
    if (is_float_code(format.code)) t.span = std::max(format.span, 1);
    t.num_rows = static_cast<int32_t>(num_rows);
    t.num_inputs = num_inputs;
    t.num_groups = (num_inputs + kGroup - 1) / kGroup;
    const bool whole_rows = format.code == Code::i8;  // pairs of groups, and one scale per output
    if (whole_rows) t.num_groups = (t.num_groups + 1) / 2 * 2;
    const GroupLayout group = make_group_layout(t);
    t.tile_bytes = group.bytes() * t.num_groups + (whole_rows ? kTile * sizeof(float) : 0) +
                   group.factor_bytes * ((t.num_groups + group.span - 1) / group.span);
    return t;
}

int CodeRows::bits() const {
    int sum = 0;
    for (const Plane& plane : planes) sum += plane.bits;
    return sum;
}

CodeRows CodeRows::plain(const uint8_t* data, int64_t rows, int num_inputs, int bits, bool is_signed,
                         int half) {
    const int64_t row_bytes = static_cast<int64_t>(num_inputs) * bits / 8;
    const int inputs = bits == 4 ? std::max(2 * half, kGroup) : kGroup;
    return {data,
            rows,
            row_bytes,
            row_bytes,
            inputs,
            inputs * bits / 8,
            {bits == 4 ? Plane{0, 4, half} : Plane{0, 8, kGroup}},
            is_signed};
}

PackedTiles Packer::add(const Tiles& tiles, PackTile pack) {
    PackedTiles packed{tiles, nullptr};
    packed.memory = memory_.allocate(packed.num_bytes());
    packed.tiles.data = packed.memory.get();
    packed.tiles.tile_stride = tiles.column_stride ? kTile : tiles.tile_bytes;
    jobs_.push_back({packed, std::move(pack)});
    num_waiting_bytes_ += packed.num_bytes();
    return packed;
}

bool Packer::interleave(PackedTiles& first, PackedTiles& second) {
    const bool waiting = jobs_.size() >= 2 && jobs_[jobs_.size() - 2].packed.memory == first.memory &&
                         jobs_.back().packed.memory == second.memory;
    const size_t bytes = first.tiles.tile_bytes;
    if (!waiting || first.tiles.tile_stride != bytes || !first.tiles.is_laid_out_as(second.tiles) ||
        first.tiles.num_rows != second.tiles.num_rows)
        return false;
    // Adjacent weights stay where they are. Both get new memory if a memory block ends between them, or if
    // padding to a cache line separates them.
    const bool one_block =
        !first.memory.owner_before(second.memory) && !second.memory.owner_before(first.memory);
    const bool side_by_side = one_block && first.tiles.data + first.num_bytes() == second.tiles.data;
    const std::shared_ptr<uint8_t> memory =
        side_by_side ? first.memory : memory_.allocate(first.num_bytes() + second.num_bytes());
    const auto move = [&](PackedTiles& packed, Job& job, size_t from) {
        packed.memory = {memory, memory.get() + from};
        packed.tiles.data = packed.memory.get();
        packed.tiles.tile_stride = 2 * bytes;
        job.packed = packed;
    };
    move(first, jobs_[jobs_.size() - 2], 0);
    move(second, jobs_.back(), bytes);
    return true;
}

// A matrix is packed by the threads that read it in a matmul, so that Linux places its pages near them.
void Packer::run(ThreadPool& pool) {
    struct Packing : ThreadPool::Task {
        const std::vector<Job>& jobs;
        explicit Packing(const std::vector<Job>& j) : jobs(j) {}
        int num_phases() const override { return static_cast<int>(jobs.size()); }
        int num_items(int phase) const override { return jobs[phase].packed.tiles.num_tiles(); }
        void run(int phase, int tile, int) override {
            const auto& [packed, pack] = jobs[phase];
            pack(tile, packed.memory.get() + tile * packed.tiles.tile_stride);
        }
    } packing(jobs_);
    pool.run(packing);
    jobs_.clear();
    num_waiting_bytes_ = 0;
}

// Adds codes with one scale per output.
PackedTiles Packer::add_whole_rows(const QuantizedSource& s) {
    if (s.codes.bits() != 8 || !s.codes.is_signed || s.zero_point || s.mins.data || s.super_scales.data)
        throw std::invalid_argument(
            "weights with one scale an output have signed codes of 8 bits, no zero point and no mins");
    Tiles t = make_tiles({Code::i8}, s.codes.rows, s.num_inputs);
    const size_t codes_bytes = t.tile_bytes - kTile * sizeof(float);
    const auto pack_tile = [t, codes_bytes, codes = CodeReader(s.codes, s.num_inputs, 0), scales = s.scales](
                               int tile, uint8_t* data) {
        pack_groups(t, kGroup * kTile, tile, data, [&](int64_t row, int lane, int g, uint8_t* to) {
            Bytes found[2];
            codes.read(row, g, found);
            write_codes(t.code, found, to + 4 * lane);
        });
        for (int lane = 0; lane < std::min(kTile, t.num_rows - tile * kTile); lane++)
            (reinterpret_cast<float*>(data + codes_bytes))[lane] =
                number_at(scales.kind,
                          scales.data + (static_cast<int64_t>(tile) * kTile + lane) * scales.row_stride, 0);
    };
    if (!s.by_columns) return add(t, pack_tile);
    t.column_stride = t.num_tiles() * kTile;
    return add(t, [t, codes_bytes, pack_tile](int tile, uint8_t* to) {
        std::vector<uint8_t> packed(t.tile_bytes);
        pack_tile(tile, packed.data());
        for (size_t at = 0; at < codes_bytes; at++) {  // quads [16 outputs][4 inputs]
            const size_t output = at / 4 % kTile, input = at / (4 * kTile) * 4 + at % 4;
            to[input * t.column_stride + output] = packed[at];
        }
        uint8_t* const all_scales =
            to - static_cast<size_t>(tile) * kTile + codes_bytes / kTile * t.column_stride;
        std::memcpy(all_scales + tile * kTile * sizeof(float), packed.data() + codes_bytes,
                    kTile * sizeof(float));
    });
}

// Returns the number of groups of 32 inputs that share a scale, at most kMaxSpan.
int get_scale_span(const QuantizedSource& s) {
    if (s.group >= s.num_inputs) return kMaxSpan;
    for (int span = kMaxSpan; span > 1; span /= 2)
        if (s.group % (span * kGroup) == 0) return span;
    return 1;
}

// Adds float codes.
PackedTiles Packer::add_floats(const QuantizedSource& s) {
    const Code code = *s.floats;
    if (!is_float_code(code) || s.codes.bits() != (code == Code::f4 ? 4 : 8) || s.codes.is_signed ||
        (code == Code::f4) != (s.numbers != nullptr))
        throw std::invalid_argument("codes of floats are f4, with sixteen numbers, or e4m3");
    if (s.zero_point || s.mins.data || s.zeros.data || s.super_scales.data ||
        (s.group % kGroup && s.group < s.num_inputs))
        throw std::invalid_argument("codes of floats have one scale for a multiple of 32 inputs, or for all");
    Tiles t = make_tiles({.code = code, .span = get_scale_span(s)}, s.codes.rows, s.num_inputs);
    if (s.numbers) std::copy_n(s.numbers, 16, t.numbers);
    const GroupLayout group = make_group_layout(t);
    const LevelReader scales(s.scales, {}, ScaleType::fp32, t.span * kGroup, s.group, s.num_inputs);
    return add(t, [t, group, scales, codes = CodeReader(s.codes, s.num_inputs, 0)](int tile, uint8_t* data) {
        for (int g = 0; g < t.num_groups; g += t.span) {
            std::memset(data, 0, group.factor_bytes);
            for (int lane = 0; lane < std::min(kTile, t.num_rows - tile * kTile); lane++)
                scales.write(static_cast<int64_t>(tile) * kTile + lane, g / t.span, data + 4 * lane);
            data += group.factor_bytes;
            const int end = std::min(g + t.span, static_cast<int>(t.num_groups));
            const auto write = [&](int64_t row, int lane, int at, uint8_t* to) {
                Bytes found[2];
                codes.read(row, at, found);
                write_codes(t.code, found, to + 4 * lane);
            };
            pack_groups(t, group.bytes(), tile, data, write, g, end);
            data += (end - g) * group.bytes();
        }
    });
}

// Stores two tiles of 4-bit codes by columns, from `tile` on. `to`: start of the weight.
void put_columns(const Tiles& t, const GroupLayout& layout, int tile, const std::vector<uint8_t> (&packed)[2],
                 uint8_t* to) {
    const auto code = [&](const uint8_t* group, int output, int input) {
        const uint8_t byte = group[64 * (input / 8) + 4 * output + input % 4];
        return input % 8 < 4 ? byte & 15 : byte >> 4;
    };
    for (int g = 0; g < t.num_groups; g++) {
        uint8_t* const group = to + g * t.num_tiles() * layout.bytes();
        uint8_t* const scales = group + static_cast<size_t>(kGroup) * t.column_stride;
        uint8_t* const lows = scales + t.num_tiles() * layout.scale_bytes;
        const uint8_t* from[2];
        for (int i = 0; i < 2; i++) from[i] = packed[i].data() + g * layout.bytes();
        for (int input = 0; input < kGroup; input++)
            for (int output = 0; output < kTile; output++)
                group[input * t.column_stride + tile * (kTile / 2) + output] =
                    static_cast<uint8_t>(code(from[0], output, input) | code(from[1], output, input) << 4);
        for (int i = 0; i < 2; i++) {
            const uint8_t* levels = from[i] + layout.codes_bytes;
            std::memcpy(scales + (tile + i) * layout.scale_bytes, levels, layout.scale_bytes);
            std::memcpy(lows + (tile + i) * layout.zero_point_bytes, levels + layout.scale_bytes,
                        layout.zero_point_bytes);
        }
    }
}

PackedTiles Packer::add(const QuantizedSource& s) {
    if (s.whole_rows) return add_whole_rows(s);
    if (s.floats) return add_floats(s);
    check(s);
    const bool fp16 = keeps_fp16(s);
    const bool has_half_factors = s.small_levels && s.super_scales.kind == Matrix::Kind::fp16 &&
                                  (!s.mins.data || s.super_mins.kind == Matrix::Kind::fp16);
    const TileFormat format{.code = code_for(s),
                            .scale_type = s.small_levels ? ScaleType::small
                                          : fp16         ? ScaleType::fp16
                                                         : ScaleType::fp32,
                            .zero_point_kind = s.zeros.data  ? ZeroPointKind::zero
                                               : s.mins.data ? ZeroPointKind::min
                                                             : ZeroPointKind::none,
                            .half_groups = s.group == 16,
                            .half_factors = has_half_factors};
    Tiles t = make_tiles(format, s.codes.rows, s.num_inputs);
    t.zero_point = s.zero_point + (s.codes.is_signed || s.table ? 128 : 0);
    for (int i = 0; i < 16; i++) t.table[i] = static_cast<uint8_t>(s.table ? s.table[i] + 128 : i);
    const GroupLayout group = make_group_layout(t);
    const uint64_t flipped =
        s.codes.is_signed ? 0x8080808080808080 : 0;  // converts signed to unsigned codes, plus 128
    const auto levels = [&](const Matrix& values, const Matrix& supers) {
        return LevelReader(values, supers, format.scale_type, kGroup / group.parts, s.group, s.num_inputs);
    };
    const auto pack_tile = [t, group, flipped, codes = CodeReader(s.codes, s.num_inputs, s.zero_point),
                            scales = levels(s.scales, s.super_scales), mins = levels(s.mins, s.super_mins),
                            zeros = s.zeros, per = s.group / kGroup](int tile, uint8_t* data) {
        const auto write = [&](int64_t row, int lane, int g, uint8_t* to) {
            Bytes found[2];
            codes.read(row, g, found);
            for (Bytes& half : found) half ^= flipped;
            write_codes(t.code, found, to + 4 * lane);
            for (int part = 0; part < group.parts; part++) {
                uint8_t* level =
                    to + group.codes_bytes + part * group.scale_bytes + lane * (group.scale_bytes / kTile);
                const int number = g * group.parts + part;
                scales.write(row, number, level);
                if (shares_levels(t.code)) {
                    uint8_t min[4] = {};
                    mins.write(row, number, min);
                    *level |= static_cast<uint8_t>(-min[0] << 4);
                } else {
                    mins.write(row, number, level + group.parts * group.scale_bytes);
                }
            }
            if (zeros.data)
                to[group.codes_bytes + group.scale_bytes + lane] =
                    zeros.data[row * zeros.row_stride + g / per * zeros.column_stride];
        };
        if (!group.factor_bytes) return pack_groups(t, group.bytes(), tile, data, write);
        for (int g = 0; g < t.num_groups; g += kSmallSpan) {
            std::memset(data, 0, group.factor_bytes);
            const size_t each = t.half_factors ? sizeof(uint16_t) : sizeof(float);
            for (int lane = 0; lane < std::min(kTile, t.num_rows - tile * kTile); lane++) {
                const int64_t row = static_cast<int64_t>(tile) * kTile + lane;
                scales.write_factor(row, g * group.parts, t.half_factors, data + lane * each);
                mins.write_factor(row, g * group.parts, t.half_factors, data + (kTile + lane) * each);
            }
            data += group.factor_bytes;
            const int end = std::min(g + kSmallSpan, static_cast<int>(t.num_groups));
            pack_groups(t, group.bytes(), tile, data, write, g, end);
            data += (end - g) * group.bytes();
        }
    };
    const bool in_pairs = t.code == Code::u4 && !group.factor_bytes && t.num_tiles() % 2 == 0;
    if (!s.by_columns || !in_pairs) return add(t, pack_tile);
    t.column_stride = t.num_tiles() * kTile / 2;
    return add(t, [t, group, pack_tile](int tile, uint8_t* to) {
        if (tile % 2) return;  // two tiles share bytes
        std::vector<uint8_t> packed[2];
        for (int i = 0; i < 2; i++) {
            packed[i].resize(t.tile_bytes);
            pack_tile(tile + i, packed[i].data());
        }
        put_columns(t, group, tile, packed, to - static_cast<size_t>(tile) * kTile);
    });
}

PackedTiles Packer::add(const Matrix& values, Code code) {
    const Tiles t = make_tiles({code}, values.rows, static_cast<int>(values.columns));
    const size_t group_bytes = make_group_layout(t).bytes();
    return add(t, [t, values, group_bytes](int tile, uint8_t* data) {
        pack_groups(t, group_bytes, tile, data, [&](int64_t row, int lane, int g, uint8_t* to) {
            const uint8_t* from = values.data + row * values.row_stride + g * kGroup * values.column_stride;
            uint32_t words[kGroup];
            read_values(values.kind, t.code, from, std::min(kGroup, t.num_inputs - g * kGroup), words);
            if (t.code == Code::fp16) {
                for (int i = 0; i < kGroup; i++)
                    std::memcpy(to + 2 * (i * kTile + lane), reinterpret_cast<const uint8_t*>(words) + 2 * i,
                                2);
            } else {
                for (int i = 0; i < static_cast<int>(group_bytes / kTile / 4); i++)
                    std::memcpy(to + 4 * (i * kTile + lane), words + i, 4);
            }
        });
    });
}

}  // namespace octavo
