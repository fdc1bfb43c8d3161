#include "packing.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
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

float half_to_float(uint16_t h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    float value = exponent == 0    ? std::ldexp((float)mantissa, -24)
                  : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                   : std::ldexp((float)(mantissa + 1024), exponent - 25);
    return h & 0x8000 ? -value : value;
}

uint16_t float_to_bf16_bits(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

float value_at(const Matrix& m, int64_t row, int64_t column) {
    const uint8_t* p = m.data + row * m.row_stride + column * m.column_stride;
    uint16_t half;
    float f;
    uint32_t bits;
    switch (m.kind) {
        case Matrix::Kind::u8: return *p;
        case Matrix::Kind::i8: return (int8_t)*p;
        case Matrix::Kind::fp16: std::memcpy(&half, p, 2); return half_to_float(half);
        case Matrix::Kind::bf16:
            std::memcpy(&half, p, 2);
            bits = (uint32_t)half << 16;
            std::memcpy(&f, &bits, 4);
            return f;
        case Matrix::Kind::fp32: std::memcpy(&f, p, 4); return f;
    }
    return 0;
}

// Scales or mins as the tile holds them: one level of fp16 stays fp16, everything else becomes fp32 (exact for both).
struct LevelReader {
    const Matrix &values, &supers;
    bool fp16;
    void write(int64_t row, int64_t group, uint8_t* to) const {
        if (fp16) {
            std::memcpy(to, values.data + row * values.row_stride + group * values.column_stride, 2);
            return;
        }
        float value = value_at(values, row, group);
        if (supers.data) value = value_at(supers, row, group / (values.columns / supers.columns)) * value;
        std::memcpy(to, &value, 4);
    }
};

struct QuantisedPacker {
    const QuantisedSource& source;
    Tiles tiles;
    size_t scale_bytes, codes_bytes, group_bytes;
    int parts;
    LevelReader scales, mins;

    // The codes of one row as unsigned bytes, padded with the zero point. `signed` codes are shifted by 128.
    void read_codes(int64_t row, std::vector<uint8_t>& out) const {
        const uint8_t* p = source.codes.data + row * source.codes.row_stride;
        std::fill(out.begin(), out.end(), (uint8_t)tiles.zero_point);
        if (source.bits != 4) {
            const uint8_t shift = source.codes.kind == Matrix::Kind::i8 ? 128 : 0;
            for (int k = 0; k < source.num_inputs; k++) out[k] = (uint8_t)(p[k * source.codes.column_stride] + shift);
            return;
        }
        const int half = source.group / 2;
        for (int j = 0; j < source.num_inputs / 2; j++) {
            const uint8_t byte = p[j * source.codes.column_stride];
            const int k = source.halves ? j / half * source.group + j % half : 2 * j;
            out[k] = byte & 15;
            out[k + (source.halves ? half : 1)] = byte >> 4;
        }
    }

    void write_codes(const std::vector<uint8_t>& codes, int lane, int g, uint8_t* to) const {
        const uint8_t* from = codes.data() + g * kGroup;
        if (tiles.code == Code::u4) {
            for (int v = 0; v < 4; v++)
                for (int b = 0; b < 4; b++) to[64 * v + 4 * lane + b] = (uint8_t)(from[8 * v + b] | from[8 * v + 4 + b] << 4);
        } else {
            for (int v = 0; v < 8; v++) std::memcpy(to + 64 * v + 4 * lane, from + 4 * v, 4);
        }
    }

    void write_levels(const LevelReader& reader, int64_t row, int lane, int g, uint8_t* to) const {
        for (int part = 0; part < parts; part++) {
            const int first_input = g * kGroup + part * (kGroup / parts);
            if (first_input < source.num_inputs) reader.write(row, first_input / source.group, to + part * scale_bytes + lane * (scale_bytes / kTile));
        }
    }

    void pack_tile(int tile, uint8_t* data) const {
        std::vector<uint8_t> codes((size_t)tiles.num_groups * kGroup);
        for (int lane = 0; lane < kTile; lane++) {
            const int64_t row = (int64_t)tile * kTile + lane;
            if (row >= tiles.num_rows) return;
            read_codes(row, codes);
            for (int g = 0; g < tiles.num_groups; g++) {
                uint8_t* to = data + g * group_bytes;
                write_codes(codes, lane, g, to);
                write_levels(scales, row, lane, g, to + codes_bytes);
                if (tiles.has_min) write_levels(mins, row, lane, g, to + codes_bytes + parts * scale_bytes);
            }
        }
    }
};

PackedTiles allocate(const Tiles& tiles, WeightMemory& memory) {
    PackedTiles packed{tiles, nullptr};
    packed.memory = memory.take(packed.num_bytes());
    packed.tiles.data = packed.memory.get();
    return packed;
}

// Codes with one scale an output.
PackedTiles pack_whole_rows(const QuantisedSource& s, ThreadPool& pool, WeightMemory& memory) {
    if (s.bits != 8 || s.codes.kind != Matrix::Kind::i8 || s.zero_point || s.mins.data || s.super_scales.data)
        throw std::invalid_argument("weights with one scale an output have signed codes of 8 bits, no zero point and no mins");
    Tiles t{};
    t.code = Code::i8;
    t.scale_type = ScaleType::fp32;
    t.num_rows = (int32_t)s.codes.rows;
    t.num_inputs = s.num_inputs;
    t.num_groups = (s.num_inputs + 2 * kGroup - 1) / (2 * kGroup) * 2;
    const size_t codes_bytes = (size_t)t.num_groups * kGroup * kTile;
    t.tile_bytes = codes_bytes + kTile * sizeof(float);
    const PackedTiles packed = allocate(t, memory);
    pool.parallel_for((t.num_rows + kTile - 1) / kTile, [&](int tile, int) {
        uint8_t* data = packed.memory.get() + tile * t.tile_bytes;
        for (int lane = 0; lane < kTile; lane++) {
            const int64_t row = (int64_t)tile * kTile + lane;
            if (row >= t.num_rows) return;
            const uint8_t* codes = s.codes.data + row * s.codes.row_stride;
            for (int k = 0; k < s.num_inputs; k++) data[(size_t)(k / 4) * 64 + 4 * lane + k % 4] = codes[k * s.codes.column_stride];
            ((float*)(data + codes_bytes))[lane] = value_at(s.scales, row, 0);
        }
    });
    return packed;
}

}  // namespace

PackedTiles pack_quantised(const QuantisedSource& s, ThreadPool& pool, WeightMemory& memory) {
    if (s.whole_rows) return pack_whole_rows(s, pool, memory);
    const bool half_groups = s.group == 16;
    if (!half_groups && s.group % kGroup != 0) throw std::invalid_argument("weights are packed in groups of 16 or a multiple of 32, got " + std::to_string(s.group));
    if (half_groups && s.bits == 4) throw std::invalid_argument("4-bit weights are packed in groups of a multiple of 32, got 16");
    if (half_groups && s.mins.data) throw std::invalid_argument("weights in groups of 16 are packed without mins");
    const bool fp16 = s.scales.kind == Matrix::Kind::fp16 && !s.super_scales.data && (!s.mins.data || (s.mins.kind == Matrix::Kind::fp16 && !s.super_mins.data));
    Tiles t{};
    t.code = s.bits == 4 && !s.wide ? Code::u4 : Code::u8;
    t.scale_type = fp16 ? ScaleType::fp16 : ScaleType::fp32;
    t.has_min = s.mins.data != nullptr;
    t.half_groups = half_groups;
    t.zero_point = s.zero_point + (s.bits != 4 && s.codes.kind == Matrix::Kind::i8 ? 128 : 0);
    t.num_rows = (int32_t)s.codes.rows;
    t.num_inputs = s.num_inputs;
    t.num_groups = (s.num_inputs + kGroup - 1) / kGroup;
    const size_t scale_bytes = fp16 ? 32 : 64, codes_bytes = t.code == Code::u4 ? 256 : 512;
    const int parts = half_groups ? 2 : 1;
    const size_t group_bytes = codes_bytes + scale_bytes * parts * (t.has_min ? 2 : 1);
    t.tile_bytes = group_bytes * t.num_groups;
    const PackedTiles packed = allocate(t, memory);
    const QuantisedPacker packer{s, t, scale_bytes, codes_bytes, group_bytes, parts, LevelReader{s.scales, s.super_scales, fp16}, LevelReader{s.mins, s.super_mins, fp16}};
    pool.parallel_for((t.num_rows + kTile - 1) / kTile, [&](int tile, int) { packer.pack_tile(tile, packed.memory.get() + tile * t.tile_bytes); });
    return packed;
}

PackedTiles pack_floats(const Matrix& values, Code code, ThreadPool& pool, WeightMemory& memory) {
    Tiles t{};
    t.code = code;
    t.num_rows = (int32_t)values.rows;
    t.num_inputs = (int32_t)values.columns;
    t.num_groups = (t.num_inputs + kGroup - 1) / kGroup;
    const size_t element = code == Code::fp32 ? 4 : 2;
    t.tile_bytes = (size_t)t.num_groups * kGroup * kTile * element;
    const PackedTiles packed = allocate(t, memory);
    pool.parallel_for((t.num_rows + kTile - 1) / kTile, [&](int tile, int) {
        uint8_t* data = packed.memory.get() + tile * t.tile_bytes;
        for (int lane = 0; lane < kTile; lane++) {
            const int64_t row = (int64_t)tile * kTile + lane;
            if (row >= t.num_rows) return;
            for (int k = 0; k < t.num_inputs; k++) {
                if (code == Code::fp16) {
                    std::memcpy(data + 2 * ((size_t)k * kTile + lane), values.data + row * values.row_stride + k * values.column_stride, 2);
                    continue;
                }
                const float f = value_at(values, row, k);
                if (code == Code::fp32) {
                    ((float*)data)[(size_t)k * kTile + lane] = f;
                } else {
                    ((uint16_t*)data)[(size_t)(k / 2) * 32 + 2 * lane + k % 2] = float_to_bf16_bits(f);
                }
            }
        }
    });
    return packed;
}

}  // namespace octavo
