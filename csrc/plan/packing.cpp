#include "packing.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace octavo {

namespace {

template <typename T>
T load(const uint8_t* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

float half_to_float(uint16_t h) {
    const uint32_t exponent = h >> 10 & 31, mantissa = h & 1023;
    const float value = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-24f
                        : exponent == 31
                            ? (mantissa ? NAN : INFINITY)
                            : std::bit_cast<float>((static_cast<uint32_t>(h & 0x7fff) << 13) + (112u << 23));
    return h & 0x8000 ? -value : value;
}

uint16_t float_to_bf16_bits(float f) {
    const uint32_t bits = std::bit_cast<uint32_t>(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// Sixteen bytes, which shifts take as two words.
typedef uint64_t Bytes __attribute__((vector_size(16)));

// Source of the layout: ggml's get_scale_min_k4. Scales and mins 0 to 3 lie in the low six bits of bytes 0-3
// and 4-7. Bytes 8-11 hold the low four bits of scales and mins 4 to 7, the tops of bytes 0-3 and 4-7 the
// high two.
int six_bits(const uint8_t* p, int index, bool is_min) {
    const int own = is_min ? 4 : 0;
    if (index < 4) return p[own + index] & 63;
    return (p[4 + index] >> own & 15) | (p[own + index - 4] >> 6 << 4);
}

// Source of the layout: ggml's dequantize_row_q3_K. The low four bits of numbers 0 to 7 are the low nibbles of
// bytes 0-7, those of 8 to 15 the high ones; bytes 8-11 hold the top two bits of four numbers each.
int signed_six_bits(const uint8_t* p, int index) {
    return ((p[index % 8] >> index / 8 * 4 & 15) | (p[8 + index % 4] >> index / 4 * 2 & 3) << 4) - 32;
}

float number_at(Matrix::Kind kind, const uint8_t* column, int index) {
    switch (kind) {
        case Matrix::Kind::u8: return column[index];
        case Matrix::Kind::i8: return static_cast<int8_t>(column[index]);
        case Matrix::Kind::fp16: return half_to_float(load<uint16_t>(column + 2 * index));
        case Matrix::Kind::bf16:
            return std::bit_cast<float>(static_cast<uint32_t>(load<uint16_t>(column + 2 * index)) << 16);
        case Matrix::Kind::fp32: return load<float>(column + 4 * index);
        case Matrix::Kind::scales6: return static_cast<float>(six_bits(column, index, false));
        case Matrix::Kind::mins6: return -static_cast<float>(six_bits(column, index, true));
        case Matrix::Kind::scales4: return column[index] & 15;
        case Matrix::Kind::mins4: return -static_cast<float>(column[index] >> 4);
        case Matrix::Kind::signed6: return static_cast<float>(signed_six_bits(column, index));
    }
    return 0;
}

// Reads the codes of groups of 32 inputs out of rows of blocks.
class CodeReader {
  public:
    CodeReader(const CodeRows& rows, int num_inputs, int padding)
        : rows_(rows), num_inputs_(num_inputs), padding_(padding) {
        int low = 0;
        for (const Plane& plane : rows.planes) {
            const uint64_t mask = kOnes * ((1u << plane.bits) - 1);
            parts_.push_back(Part{Bytes{mask, mask}, low, plane.run == 1 ? plane.bits : 0});
            low += plane.bits;
        }
        for (int first = 0; first < num_inputs; first += kGroup)
            for (const Plane& plane : rows.planes)
                for (int half = 0; half < 2; half++) places_.push_back(place_of(plane, first + half * kHalf));
    }

    // Reads a group's 32 codes as bytes; those past the last input are padding.
    void read(int64_t row, int g, Bytes (&codes)[2]) const {
        const uint8_t* from = rows_.data + row * rows_.row_stride;
        if (num_inputs_ - g * kGroup < kGroup) return read_end(from, g, codes);
        read_whole(from, g, codes);
    }

  private:
    // A plane: the mask of its bits in each byte, the number of bits of the planes before, and its own number
    // of bits where neighbouring inputs share a byte, else 0.
    struct Part {
        Bytes mask;
        int low, spread;
    };
    // Half a group in a plane: the index in a row at which its bytes begin, and the shift of its bits.
    struct Place {
        int64_t at;
        int shift;
    };

    Place place_of(const Plane& plane, int input) const {
        const int64_t block =
            static_cast<int64_t>(input / rows_.block_inputs) * rows_.block_bytes + plane.start;
        const int i = input % rows_.block_inputs, span = plane.run * 8 / plane.bits;
        if (plane.run == 1) return {block + i * plane.bits / 8, 0};
        return {block + i / span * plane.run + i % plane.run, i % span / plane.run * plane.bits};
    }

    void read_whole(const uint8_t* row, int g, Bytes (&codes)[2]) const {
        const Place* place = places_.data() + static_cast<size_t>(g) * parts_.size() * 2;
        Bytes first{}, second{};
        for (const Part& part : parts_) {
            first |= bits_of(part, row, place[0]) << part.low;
            second |= bits_of(part, row, place[1]) << part.low;
            place += 2;
        }
        codes[0] = first;
        codes[1] = second;
    }

    // Reads a group that ends past the last input, or begins there.
    [[gnu::noinline]] void read_end(const uint8_t* row, int g, Bytes (&codes)[2]) const {
        const int left = std::max(num_inputs_ - g * kGroup, 0);
        if (left) {
            std::vector<uint8_t> whole(rows_.row_bytes + rows_.block_bytes);
            std::memcpy(whole.data(), row, rows_.row_bytes);
            read_whole(whole.data(), g, codes);
        }
        std::memset(reinterpret_cast<uint8_t*>(codes) + left, padding_, kGroup - left);
    }

    static Bytes bits_of(const Part& part, const uint8_t* row, const Place& place) {
        const uint8_t* from = row + place.at;
        if (part.spread) return Bytes{spread(from, part.spread), spread(from + part.spread, part.spread)};
        return load<Bytes>(from) >> place.shift & part.mask;
    }

    // Spreads eight neighbouring codes, which lie in as many bytes as each has bits, to a byte each.
    [[gnu::noinline]] static uint64_t spread(const uint8_t* from, int bits) {
        uint64_t codes = 0;
        for (int i = 0; i < bits; i++) codes |= static_cast<uint64_t>(from[i]) << 8 * i;
        codes = (codes | codes << (32 - 4 * bits)) & 0x0000000100000001 * ((1ull << 4 * bits) - 1);
        codes = (codes | codes << (16 - 2 * bits)) & 0x0001000100010001 * ((1ull << 2 * bits) - 1);
        return (codes | codes << (8 - bits)) & kOnes * ((1ull << bits) - 1);
    }

    static constexpr int kHalf = kGroup / 2;
    static constexpr uint64_t kOnes = 0x0101010101010101;
    const CodeRows rows_;
    const int num_inputs_, padding_;
    std::vector<Part> parts_;
    std::vector<Place> places_;  // [groups][planes][2]
};

// Writes scales or mins as a tile holds them: one level of fp16 stays fp16, small ones stay bytes and have
// factors, everything else becomes fp32, which is exact.
class LevelReader {
  public:
    // The tile has a number for every `unit` inputs, the source for every `group`.
    LevelReader(const Matrix& values, const Matrix& supers, ScaleType type, int unit, int group,
                int num_inputs)
        : values_(values), supers_(supers), type_(type) {
        for (int first = 0; values.data && first < num_inputs; first += unit) {
            const int number = first / group;
            const int64_t super = supers.data ? number * supers.numbers() / values.numbers() : 0;
            places_.push_back({number / values.per_column * values.column_stride,
                               super * supers.column_stride, number % values.per_column});
        }
    }

    // Writes number `index` of a row, if the row has it.
    void write(int64_t row, int index, uint8_t* to) const {
        if (index >= static_cast<int>(places_.size())) return;
        const Place& place = places_[index];
        const uint8_t* column = values_.data + row * values_.row_stride + place.value;
        if (type_ == ScaleType::fp16) {
            std::memcpy(to, column + 2 * place.number, 2);
            return;
        }
        float value = number_at(values_.kind, column, place.number);
        if (type_ == ScaleType::small) {
            *to = static_cast<uint8_t>(static_cast<int8_t>(value));
            return;
        }
        if (supers_.data) value = super_at(row, place) * value;
        std::memcpy(to, &value, 4);
    }

    // Writes the factor of number `index` of a row, if it has one: fp16 as it is stored, or fp32.
    void write_factor(int64_t row, int index, bool as_stored, uint8_t* to) const {
        if (index >= static_cast<int>(places_.size())) return;
        if (as_stored) {
            std::memcpy(to, super_bytes(row, places_[index]), sizeof(uint16_t));
            return;
        }
        const float value = super_at(row, places_[index]);
        std::memcpy(to, &value, sizeof value);
    }

  private:
    struct Place {
        int64_t value, super;
        int number;
    };
    const uint8_t* super_bytes(int64_t row, const Place& place) const {
        return supers_.data + row * supers_.row_stride + place.super;
    }
    float super_at(int64_t row, const Place& place) const {
        return number_at(supers_.kind, super_bytes(row, place), 0);
    }
    const Matrix values_, supers_;
    const ScaleType type_;
    std::vector<Place> places_;
};

// How a group of 32 inputs lies in a tile.
struct GroupLayout {
    size_t codes_bytes;  // of all 16 outputs
    size_t scale_bytes = 0;  // one scale for each of the 16 outputs
    int parts = 0;  // scales of one output
    size_t low_bytes = 0;  // of the mins or zeros of all 16 outputs
    size_t factor_bytes = 0;  // before each `span` groups
    int span = kSmallSpan;
    size_t bytes() const { return codes_bytes + scale_bytes * parts + low_bytes; }
};

GroupLayout group_of(const Tiles& t) {
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
            const bool has_no_low = t.low == Low::none || shares_levels(t.code);
            const size_t low = has_no_low ? 0 : t.low == Low::zero ? static_cast<size_t>(kTile) : scale;
            const int parts = t.half_groups ? 2 : 1;
            const size_t factor = kTile * (t.half_factors ? sizeof(uint16_t) : sizeof(float));
            const size_t factors = small ? factor * (t.low == Low::min ? 2 : 1) : 0;
            return {codes_bytes(t.code), scale, parts, low * parts, factors};
        }
    }
}

// Returns four bytes with the inner two in each other's place.
uint32_t pairs_apart(uint32_t four) {
    return (four & 0xff0000ff) | (four >> 8 & 0x0000ff00) | (four << 8 & 0x00ff0000);
}

// Whether scales, and mins where there are any, have one level of fp16, as a tile may hold them.
bool keeps_fp16(const QuantisedSource& s) {
    return s.scales.kind == Matrix::Kind::fp16 && !s.super_scales.data &&
           (!s.mins.data || (s.mins.kind == Matrix::Kind::fp16 && !s.super_mins.data));
}

// Returns the code of a source's tiles. `narrow`: whether codes of up to 4 bits take no more.
Code code_for(const QuantisedSource& s, bool narrow) {
    const int bits = s.codes.bits();
    const bool small_halves = s.small_levels && s.group == 16;
    const bool shares_bytes = s.scales.kind == Matrix::Kind::scales4 && s.mins.kind == Matrix::Kind::mins4;
    if (bits <= 2 && small_halves && s.mins.data && shares_bytes) return Code::u2;
    if (bits == 3 && small_halves && !s.mins.data && !s.wide) return Code::u3;
    if (narrow) return s.table || s.group == 16 ? Code::l4 : Code::u4;
    if (s.wide || s.zeros.data) return Code::u8;
    if (bits == 5 && s.group != 16 && (s.small_levels || keeps_fp16(s))) return Code::u5;
    return bits == 6 && small_halves && !s.mins.data ? Code::u6 : Code::u8;
}

// Writes one output's codes of a group: the low bits of each, then the high ones (table.h).
void write_codes(Code code, const Bytes (&codes)[2], uint8_t* to) {
    uint32_t quads[8];
    std::memcpy(quads, codes, sizeof quads);
    if (code == Code::e4m3)
        for (uint32_t& quad : quads) quad = pairs_apart(quad);
    // Writes `bits` bits of each code, from bit `first` on, as many quads in one vector as a byte has room for.
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

// Packs a tile's groups from `begin` to `end`: write(row, lane, group, its bytes) adds a row's part of a group
// to zeros. A few groups at a time are put together in the first-level cache and then copied, since memory
// takes whole lines in their order several times as fast as scattered words.
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

void check(const QuantisedSource& s) {
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

// Calls to(i, value) for each of some numbers that lie side by side.
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

// Reads a group's floats of one output, `count` of them and then zeros, in the tile's own type of 2 or 4
// bytes.
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

Tiles tiles_of(const TileFormat& format, int64_t num_rows, int num_inputs) {
    Tiles t{};
    t.code = format.code;
    t.scale_type = format.scale_type;
    t.low = format.low;
    t.half_groups = format.half_groups;
    t.half_factors = format.half_factors;
    if (is_float_code(format.code)) t.span = std::max(format.span, 1);
    t.num_rows = static_cast<int32_t>(num_rows);
    t.num_inputs = num_inputs;
    t.num_groups = (num_inputs + kGroup - 1) / kGroup;
    const bool whole_rows = format.code == Code::i8;  // pairs of groups, then one scale an output
    if (whole_rows) t.num_groups = (t.num_groups + 1) / 2 * 2;
    const GroupLayout group = group_of(t);
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
    packed.memory = memory_.take(packed.num_bytes());
    packed.tiles.data = packed.memory.get();
    packed.tiles.tile_stride = tiles.column_stride ? kTile : tiles.tile_bytes;
    jobs_.push_back({packed, std::move(pack), num_tiles_});
    num_tiles_ += tiles.num_tiles();
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
    // Weights side by side stay there. Both get new memory where a piece of memory ends between them, or a
    // gap that fills up a line.
    const bool one_piece =
        !first.memory.owner_before(second.memory) && !second.memory.owner_before(first.memory);
    const bool side_by_side = one_piece && first.tiles.data + first.num_bytes() == second.tiles.data;
    const std::shared_ptr<uint8_t> memory =
        side_by_side ? first.memory : memory_.take(first.num_bytes() + second.num_bytes());
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

void Packer::run(ThreadPool& pool) {
    pool.parallel_for(num_tiles_, [&](int index, int) {
        const auto after = std::upper_bound(jobs_.begin(), jobs_.end(), index,
                                            [](int tile, const Job& job) { return tile < job.first; });
        const Job& job = *std::prev(after);
        const int tile = index - job.first;
        job.pack(tile, job.packed.memory.get() + tile * job.packed.tiles.tile_stride);
    });
    jobs_.clear();
    num_tiles_ = 0;
    num_waiting_bytes_ = 0;
}

// Adds codes with one scale for each output.
PackedTiles Packer::add_whole_rows(const QuantisedSource& s) {
    if (s.codes.bits() != 8 || !s.codes.is_signed || s.zero_point || s.mins.data || s.super_scales.data)
        throw std::invalid_argument(
            "weights with one scale an output have signed codes of 8 bits, no zero point and no mins");
    Tiles t = tiles_of({Code::i8}, s.codes.rows, s.num_inputs);
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
        uint8_t* const scales_of_all =
            to - static_cast<size_t>(tile) * kTile + codes_bytes / kTile * t.column_stride;
        std::memcpy(scales_of_all + tile * kTile * sizeof(float), packed.data() + codes_bytes,
                    kTile * sizeof(float));
    });
}

// Returns the groups of 32 inputs that share a scale in tiles, at most four of them.
int span_of(const QuantisedSource& s) {
    if (s.group >= s.num_inputs) return kMostSpan;
    for (int span = kMostSpan; span > 1; span /= 2)
        if (s.group % (span * kGroup) == 0) return span;
    return 1;
}

// Adds codes that stand for floats.
PackedTiles Packer::add_floats(const QuantisedSource& s) {
    const Code code = *s.floats;
    if (!is_float_code(code) || s.codes.bits() != (code == Code::f4 ? 4 : 8) || s.codes.is_signed ||
        (code == Code::f4) != (s.numbers != nullptr))
        throw std::invalid_argument("codes of floats are f4, with sixteen numbers, or e4m3");
    if (s.zero_point || s.mins.data || s.zeros.data || s.super_scales.data ||
        (s.group % kGroup && s.group < s.num_inputs))
        throw std::invalid_argument("codes of floats have one scale for a multiple of 32 inputs, or for all");
    Tiles t = tiles_of({.code = code, .span = span_of(s)}, s.codes.rows, s.num_inputs);
    if (s.numbers) std::copy_n(s.numbers, 16, t.numbers);
    const GroupLayout group = group_of(t);
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

// Lays two tiles of 4-bit codes, from `tile` on, by columns: `to` is where the weight begins.
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
            std::memcpy(lows + (tile + i) * layout.low_bytes, levels + layout.scale_bytes, layout.low_bytes);
        }
    }
}

PackedTiles Packer::add(const QuantisedSource& s) {
    if (s.whole_rows) return add_whole_rows(s);
    if (s.floats) return add_floats(s);
    check(s);
    const bool fp16 = keeps_fp16(s);
    // Codes of 4 bits in groups of 16 are places in a table, too, that of the numbers 0 to 15.
    const bool narrow = s.codes.bits() <= 4 && (s.table || s.group == 16 || !s.wide);
    const bool has_half_factors = s.small_levels && s.super_scales.kind == Matrix::Kind::fp16 &&
                                  (!s.mins.data || s.super_mins.kind == Matrix::Kind::fp16);
    const TileFormat format{.code = code_for(s, narrow),
                            .scale_type = s.small_levels ? ScaleType::small
                                          : fp16         ? ScaleType::fp16
                                                         : ScaleType::fp32,
                            .low = s.zeros.data  ? Low::zero
                                   : s.mins.data ? Low::min
                                                 : Low::none,
                            .half_groups = s.group == 16,
                            .half_factors = has_half_factors};
    Tiles t = tiles_of(format, s.codes.rows, s.num_inputs);
    t.zero_point = s.zero_point + (s.codes.is_signed || s.table ? 128 : 0);
    for (int i = 0; i < 16; i++) t.table[i] = static_cast<uint8_t>(s.table ? s.table[i] + 128 : i);
    const GroupLayout group = group_of(t);
    const uint64_t flipped = s.codes.is_signed ? 0x8080808080808080 : 0;  // 128 more, as unsigned codes
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
    const Tiles t = tiles_of({code}, values.rows, static_cast<int>(values.columns));
    const size_t group_bytes = group_of(t).bytes();
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
