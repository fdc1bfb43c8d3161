#include "packing.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <vector>

namespace octavo {

#ifdef __SANITIZE_ADDRESS__
// The sanitizer sees who steps over the end of a heap block, not over that of mapped pages.
Memory::Memory(size_t bytes, bool) : data_((uint8_t*)::operator new(bytes, std::align_val_t(64))), size_(bytes) { std::memset(data_, 0, size_); }
Memory::~Memory() { ::operator delete(data_, std::align_val_t(64)); }
#else
Memory::Memory(size_t bytes, bool small_pages) : size_(bytes < 64 ? 64 : bytes) {
    void* p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    data_ = (uint8_t*)p;
#ifdef MADV_HUGEPAGE
    if (small_pages || size_ >= (4u << 20)) madvise(p, size_, small_pages ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
#endif
}
Memory::~Memory() { munmap(data_, size_); }
#endif

void Memory::give_back(size_t offset, size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const uintptr_t first = ((uintptr_t)data_ + offset + page - 1) / page * page, end = ((uintptr_t)data_ + offset + bytes) / page * page;
    if (first < end && madvise((void*)first, end - first, MADV_DONTNEED)) throw std::runtime_error("the system does not take memory back");
}

std::shared_ptr<uint8_t> WeightMemory::take(size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
    constexpr size_t kPiece = 0;  // each by itself, so that a step over its end is seen
#else
    constexpr size_t kPiece = 32u << 20;
#endif
    bytes = (bytes + 63) / 64 * 64;
    if (!piece_ || used_ + bytes > piece_->size()) piece_ = std::make_shared<Memory>(std::max(bytes, kPiece)), used_ = 0;
    used_ += bytes;
    return {piece_, piece_->data() + used_ - bytes};
}

namespace {

template <typename T>
T load(const uint8_t* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

float half_to_float(uint16_t h) {
    const uint32_t exponent = h >> 10 & 31, mantissa = h & 1023;
    const float value = exponent == 0    ? (float)mantissa * 0x1p-24f
                        : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                         : std::bit_cast<float>(((uint32_t)(h & 0x7fff) << 13) + (112u << 23));
    return h & 0x8000 ? -value : value;
}

uint16_t float_to_bf16_bits(float f) {
    const uint32_t bits = std::bit_cast<uint32_t>(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// Source of the layout: ggml's get_scale_min_k4. Scales and mins 0 to 3 lie in the low six bits of bytes 0-3 and 4-7; of 4 to 7 bytes 8-11 hold four bits each, the
// tops of bytes 0-3 and 4-7 the other two.
int six_bits(const uint8_t* p, int index, bool is_min) {
    const int own = is_min ? 4 : 0;
    if (index < 4) return p[own + index] & 63;
    return (p[4 + index] >> own & 15) | (p[own + index - 4] >> 6 << 4);
}

float number_at(Matrix::Kind kind, const uint8_t* column, int index) {
    switch (kind) {
        case Matrix::Kind::u8: return column[index];
        case Matrix::Kind::i8: return (int8_t)column[index];
        case Matrix::Kind::fp16: return half_to_float(load<uint16_t>(column + 2 * index));
        case Matrix::Kind::bf16: return std::bit_cast<float>((uint32_t)load<uint16_t>(column + 2 * index) << 16);
        case Matrix::Kind::fp32: return load<float>(column + 4 * index);
        case Matrix::Kind::scales6: return (float)six_bits(column, index, false);
        case Matrix::Kind::mins6: return -(float)six_bits(column, index, true);
    }
    return 0;
}

// Codes of groups of 32 inputs out of rows of blocks.
class CodeReader {
  public:
    CodeReader(const CodeRows& rows, int num_inputs, int padding) : rows_(rows), num_inputs_(num_inputs), padding_(padding), groups_per_block_(rows.block_inputs / kGroup) {
        for (const Plane& plane : rows.planes)
            for (int i = 0; i < rows.block_inputs; i += 8) places_.push_back(place_of(plane, i));
    }

    // codes[i]: those of inputs 8i to 8i + 7 of the group, a byte each. What lies past the last input is padding.
    void read(int64_t row, int g, uint64_t (&codes)[4]) const {
        const int block = g / groups_per_block_, left = num_inputs_ - g * kGroup;
        const uint8_t* from = rows_.data + row * rows_.row_stride + (int64_t)block * rows_.block_bytes;
        if (left < kGroup) return read_last(from, rows_.row_bytes - (int64_t)block * rows_.block_bytes, g % groups_per_block_, left, codes);
        read_block(from, g % groups_per_block_, codes);
    }

  private:
    struct Place {
        int at, shift;
    };

    static Place place_of(const Plane& plane, int input) {
        if (plane.run == 1) return {plane.start + input * plane.bits / 8, 0};
        const int span = plane.run * 8 / plane.bits;
        return {plane.start + input / span * plane.run + input % plane.run, input % span / plane.run * plane.bits};
    }

    void read_block(const uint8_t* block, int g, uint64_t (&codes)[4]) const {
        const Place* place = places_.data() + 4 * g;
        int low = 0;  // bits of the planes before
        for (uint64_t& code : codes) code = 0;
        for (const Plane& plane : rows_.planes) {
            const uint64_t mask = kOnes * ((1u << plane.bits) - 1);
            for (int i = 0; i < 4; i++) codes[i] |= (plane.run == 1 ? spread(block + place[i].at, plane.bits) : load<uint64_t>(block + place[i].at) >> place[i].shift & mask) << low;
            place += rows_.block_inputs / 8;
            low += plane.bits;
        }
    }

    // Of a row's last block, of which `bytes` bytes are there, and `left` inputs of the group.
    void read_last(const uint8_t* block, int64_t bytes, int g, int left, uint64_t (&codes)[4]) const {
        std::vector<uint8_t> whole(rows_.block_bytes);
        if (bytes > 0) std::memcpy(whole.data(), block, std::min<size_t>(bytes, whole.size()));
        read_block(whole.data(), g, codes);
        for (int i = std::max(left, 0); i < kGroup; i++) ((uint8_t*)codes)[i] = (uint8_t)padding_;
    }

    // Eight neighbouring codes in as many bytes as each has bits.
    static uint64_t spread(const uint8_t* from, int bits) {
        uint64_t packed = 0, codes = 0;
        std::memcpy(&packed, from, bits);
        for (int i = 0; i < 8; i++) codes |= (packed >> bits * i & ((1u << bits) - 1)) << 8 * i;
        return codes;
    }

    static constexpr uint64_t kOnes = 0x0101010101010101;
    const CodeRows& rows_;
    const int num_inputs_, padding_, groups_per_block_;
    std::vector<Place> places_;  // [planes][inputs of a block / 8]
};

// Scales or mins as a tile holds them: one level of fp16 stays fp16, everything else becomes fp32 (exact for both).
class LevelReader {
  public:
    // For numbers of `unit` inputs each, in the tile; of `group` in the source.
    LevelReader(const Matrix& values, const Matrix& supers, bool fp16, int unit, int group, int num_inputs) : values_(values), supers_(supers), fp16_(fp16) {
        for (int first = 0; values.data && first < num_inputs; first += unit) {
            const int number = first / group;
            const int64_t super = supers.data ? number * supers.numbers() / values.numbers() : 0;
            places_.push_back({number / values.per_column * values.column_stride, super * supers.column_stride, number % values.per_column});
        }
    }

    // Number `index` of a row, if it has so many.
    void write(int64_t row, int index, uint8_t* to) const {
        if (index >= (int)places_.size()) return;
        const Place& place = places_[index];
        const uint8_t* column = values_.data + row * values_.row_stride + place.value;
        if (fp16_) {
            std::memcpy(to, column + 2 * place.number, 2);
            return;
        }
        float value = number_at(values_.kind, column, place.number);
        if (supers_.data) value = number_at(supers_.kind, supers_.data + row * supers_.row_stride + place.super, 0) * value;
        std::memcpy(to, &value, 4);
    }

  private:
    struct Place {
        int64_t value, super;
        int number;
    };
    const Matrix &values_, &supers_;
    const bool fp16_;
    std::vector<Place> places_;
};

// Groups that are packed of one row before the next row's: their bytes, and the tile's, stay in the nearest cache.
constexpr int kRun = 8;

// fn(row, lane, group) for all rows and groups of a tile.
template <typename Fn>
void for_rows(const Tiles& t, int tile, const Fn& fn) {
    const int lanes = std::min(kTile, t.num_rows - tile * kTile);
    for (int first = 0; first < t.num_groups; first += kRun)
        for (int lane = 0; lane < lanes; lane++)
            for (int g = first; g < std::min(first + kRun, t.num_groups); g++) fn((int64_t)tile * kTile + lane, lane, g);
}

// How a group lies in a tile.
struct GroupLayout {
    size_t codes_bytes, scale_bytes;
    int parts;  // scales of one output
    bool has_min;
    size_t bytes() const { return codes_bytes + scale_bytes * parts * (has_min ? 2 : 1); }
};

// One output's codes of a group.
void write_codes(Code code, const uint64_t (&codes)[4], uint8_t* to) {
    for (int i = 0; i < 4; i++) {
        const uint32_t low = (uint32_t)codes[i], high = (uint32_t)(codes[i] >> 32), both = low | high << 4;
        if (code == Code::u4) {
            std::memcpy(to + 64 * i, &both, 4);
        } else {
            std::memcpy(to + 128 * i, &low, 4);
            std::memcpy(to + 128 * i + 64, &high, 4);
        }
    }
}

PackedTiles allocate(const Tiles& tiles, WeightMemory& memory) {
    PackedTiles packed{tiles, nullptr};
    packed.memory = memory.take(packed.num_bytes());
    packed.tiles.data = packed.memory.get();
    return packed;
}

// fill(tile, its bytes) for all tiles.
template <typename Fill>
PackedTiles filled(const Tiles& t, ThreadPool& pool, WeightMemory& memory, const Fill& fill) {
    const PackedTiles packed = allocate(t, memory);
    pool.parallel_for((t.num_rows + kTile - 1) / kTile, [&](int tile, int) { fill(tile, packed.memory.get() + tile * t.tile_bytes); });
    return packed;
}

// Codes with one scale an output.
PackedTiles pack_whole_rows(const QuantisedSource& s, ThreadPool& pool, WeightMemory& memory) {
    if (s.codes.bits() != 8 || !s.codes.is_signed || s.zero_point || s.mins.data || s.super_scales.data)
        throw std::invalid_argument("weights with one scale an output have signed codes of 8 bits, no zero point and no mins");
    Tiles t{};
    t.code = Code::i8;
    t.scale_type = ScaleType::fp32;
    t.num_rows = (int32_t)s.codes.rows;
    t.num_inputs = s.num_inputs;
    t.num_groups = (s.num_inputs + 2 * kGroup - 1) / (2 * kGroup) * 2;
    const size_t codes_bytes = (size_t)t.num_groups * kGroup * kTile;
    t.tile_bytes = codes_bytes + kTile * sizeof(float);
    const CodeReader codes(s.codes, s.num_inputs, 0);
    return filled(t, pool, memory, [&](int tile, uint8_t* data) {
        for_rows(t, tile, [&](int64_t row, int lane, int g) {
            uint64_t found[4];
            codes.read(row, g, found);
            write_codes(t.code, found, data + (size_t)g * kGroup * kTile + 4 * lane);
            if (g == 0) ((float*)(data + codes_bytes))[lane] = number_at(s.scales.kind, s.scales.data + row * s.scales.row_stride, 0);
        });
    });
}

void check(const QuantisedSource& s) {
    const bool half_groups = s.group == 16;
    if (!half_groups && s.group % kGroup != 0) throw std::invalid_argument("weights are packed in groups of 16 or a multiple of 32, got " + std::to_string(s.group));
    if (half_groups && s.codes.bits() == 4) throw std::invalid_argument("4-bit weights are packed in groups of a multiple of 32, got 16");
    if (half_groups && s.mins.data) throw std::invalid_argument("weights in groups of 16 are packed without mins");
}

// 32 neighbouring floats of a row, zeros past its end, from `first` on, in the tile's own type; as many as there are of 4 bytes.
struct FloatReader {
    const Matrix& values;
    Code code;

    int read(int64_t row, int first, uint32_t (&words)[kGroup]) const {
        const int count = (int)std::min<int64_t>(kGroup, values.columns - first);
        const uint8_t* from = values.data + row * values.row_stride + first * values.column_stride;
        if (code == Code::fp32) {
            for (int i = 0; i < kGroup; i++) words[i] = i < count ? std::bit_cast<uint32_t>(number_at(values.kind, from, i)) : 0;
            return kGroup;
        }
        uint16_t halves[kGroup] = {};
        if (code == Code::fp16 || values.kind == Matrix::Kind::bf16) {
            std::memcpy(halves, from, 2 * (size_t)count);
        } else {
            for (int i = 0; i < count; i++) halves[i] = float_to_bf16_bits(number_at(values.kind, from, i));
        }
        std::memcpy(words, halves, sizeof halves);
        return kGroup / 2;
    }
};

}  // namespace

int CodeRows::bits() const {
    int sum = 0;
    for (const Plane& plane : planes) sum += plane.bits;
    return sum;
}

CodeRows CodeRows::plain(const uint8_t* data, int64_t rows, int num_inputs, int bits, bool is_signed, int half) {
    const int64_t row_bytes = (int64_t)num_inputs * bits / 8;
    const int inputs = bits == 4 ? std::max(2 * half, kGroup) : kGroup;
    return {data, rows, row_bytes, row_bytes, inputs, inputs * bits / 8, {bits == 4 ? Plane{0, 4, half} : Plane{0, 8, kGroup}}, is_signed};
}

PackedTiles pack_quantised(const QuantisedSource& s, ThreadPool& pool, WeightMemory& memory) {
    if (s.whole_rows) return pack_whole_rows(s, pool, memory);
    check(s);
    const bool fp16 = s.scales.kind == Matrix::Kind::fp16 && !s.super_scales.data && (!s.mins.data || (s.mins.kind == Matrix::Kind::fp16 && !s.super_mins.data));
    Tiles t{};
    t.code = s.codes.bits() == 4 && !s.wide ? Code::u4 : Code::u8;
    t.scale_type = fp16 ? ScaleType::fp16 : ScaleType::fp32;
    t.has_min = s.mins.data != nullptr;
    t.half_groups = s.group == 16;
    t.zero_point = s.zero_point + (s.codes.is_signed ? 128 : 0);
    t.num_rows = (int32_t)s.codes.rows;
    t.num_inputs = s.num_inputs;
    t.num_groups = (s.num_inputs + kGroup - 1) / kGroup;
    const GroupLayout group{t.code == Code::u4 ? 256u : 512u, fp16 ? 32u : 64u, t.half_groups ? 2 : 1, t.has_min};
    t.tile_bytes = group.bytes() * t.num_groups;
    const CodeReader codes(s.codes, s.num_inputs, s.zero_point);
    const int unit = kGroup / group.parts;
    const LevelReader scales(s.scales, s.super_scales, fp16, unit, s.group, s.num_inputs), mins(s.mins, s.super_mins, fp16, unit, s.group, s.num_inputs);
    const uint64_t flipped = s.codes.is_signed ? 0x8080808080808080 : 0;  // 128 more, as unsigned codes
    return filled(t, pool, memory, [&](int tile, uint8_t* data) {
        for_rows(t, tile, [&](int64_t row, int lane, int g) {
            uint8_t* to = data + g * group.bytes();
            uint64_t found[4];
            codes.read(row, g, found);
            for (uint64_t& eight : found) eight ^= flipped;
            write_codes(t.code, found, to + 4 * lane);
            for (int part = 0; part < group.parts; part++) {
                uint8_t* level = to + group.codes_bytes + part * group.scale_bytes + lane * (group.scale_bytes / kTile);
                scales.write(row, g * group.parts + part, level);
                mins.write(row, g * group.parts + part, level + group.parts * group.scale_bytes);
            }
        });
    });
}

PackedTiles pack_floats(const Matrix& values, Code code, ThreadPool& pool, WeightMemory& memory) {
    Tiles t{};
    t.code = code;
    t.num_rows = (int32_t)values.rows;
    t.num_inputs = (int32_t)values.columns;
    t.num_groups = (t.num_inputs + kGroup - 1) / kGroup;
    const size_t element = code == Code::fp32 ? 4 : 2;
    t.tile_bytes = (size_t)t.num_groups * kGroup * kTile * element;
    const FloatReader floats{values, code};
    return filled(t, pool, memory, [&](int tile, uint8_t* data) {
        for_rows(t, tile, [&](int64_t row, int lane, int g) {
            uint8_t* to = data + (size_t)g * kGroup * kTile * element;
            uint32_t words[kGroup];
            const int count = floats.read(row, g * kGroup, words);
            if (code == Code::fp16) {
                for (int i = 0; i < kGroup; i++) std::memcpy(to + 2 * (i * kTile + lane), (const uint8_t*)words + 2 * i, 2);
            } else {
                for (int i = 0; i < count; i++) std::memcpy(to + 4 * (i * kTile + lane), words + i, 4);
            }
        });
    });
}

}  // namespace octavo
