// Packs weights into the kernels' tiles, in memory of its own, from a PackedWeight's arrays (quant/packed.py)
// or a file's blocks (quant/blocks.py).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "../kernels/table.h"
#include "../runtime/memory.h"
#include "../runtime/thread_pool.h"

namespace octavo {

// How a weight lies in tiles, whatever its numbers.
struct TileFormat {
    Code code;
    ScaleType scale_type = ScaleType::fp32;
    Low low = Low::none;
    bool half_groups = false;
    int span = 0;  // of float codes: groups of 32 inputs that share a scale
    bool half_factors = false;  // of small scales: whether their factors are fp16
};

// The tiles of a weight of `num_rows` outputs and `num_inputs` inputs, without memory.
Tiles tiles_of(const TileFormat& format, int64_t num_rows, int num_inputs);

// Bytes of all of a weight's tiles.
inline size_t total_bytes(const Tiles& tiles) { return tiles.num_tiles() * tiles.tile_bytes; }

struct PackedTiles {
    Tiles tiles;
    std::shared_ptr<uint8_t> memory;
    size_t num_bytes() const { return total_bytes(tiles); }
};

// Numbers [rows][columns][per_column] of a kind, with strides in bytes; those of a column lie side by side.
//   scales6, mins6   columns of 12 bytes with 8 scales and 8 mins of six bits each, as in ggml's Q4_K and
//                    Q5_K; a number of mins6 stands for its negative
//   scales4, mins4   columns of 16 bytes with a scale in each low nibble and a min in each high one, as in
//                    ggml's Q2_K; a number of mins4 stands for its negative
//   signed6          columns of 12 bytes with 16 numbers of six bits, 32 less than their bits say, as in ggml's
//                    Q3_K
struct Matrix {
    enum class Kind { u8, i8, fp16, bf16, fp32, scales6, mins6, scales4, mins4, signed6 } kind = Kind::u8;
    const uint8_t* data = nullptr;
    int64_t rows = 0, columns = 0;
    int64_t row_stride = 0, column_stride = 0;
    int per_column = 1;
    int64_t numbers() const { return columns * per_column; }
};

// Some bits of each code of a block; the next plane has higher bits. A run of `run` bytes, the first at
// `start`, holds `bits` bits of each of run * 8 / bits neighbouring inputs: those of input i in byte i % run,
// from bit i / run * bits up. The next inputs are in the run behind it.
struct Plane {
    int start, bits, run;
};

// Rows of blocks: `block_bytes` bytes hold the codes of `block_inputs` neighbouring inputs in planes, and
// possibly other data. The last block of a row may be cut short.
struct CodeRows {
    const uint8_t* data = nullptr;
    int64_t rows = 0, row_stride = 0, row_bytes = 0;
    int block_inputs = 0, block_bytes = 0;
    std::vector<Plane> planes;
    bool is_signed = false;  // only codes of 8 bits may be
    int bits() const;
    // Makes rows of codes alone: one in each byte, or two, where byte j of 2 * half inputs holds inputs j and
    // j + half.
    static CodeRows plain(const uint8_t* data, int64_t rows, int num_inputs, int bits, bool is_signed,
                          int half = 1);
};

// Codes of up to 8 bits, with the scales and mins of groups of `group` inputs. Where there is a second level,
// scale i is multiplied by super scale i * (number of super scales) / (number of scales); mins likewise.
struct QuantisedSource {
    CodeRows codes;
    int group, zero_point, num_inputs;
    Matrix scales, mins, super_scales, super_mins;  // `data` null where there is none
    Matrix zeros{};  // i8, of groups, beyond the zero point; never beside mins
    const int8_t* table = nullptr;  // [16], the numbers of 4-bit codes where these are no line
    // The code of a weight of floats: e4m3, or f4, whose codes have `numbers` [16]. Its groups are of a
    // multiple of 32 inputs or of all, with scales alone.
    std::optional<Code> floats{};
    const float* numbers = nullptr;
    bool small_levels = false;  // keeps scales of two levels as bytes with factors
    bool wide = false;  // lays codes of 4 to 6 bits in bytes
    bool whole_rows = false;  // signed codes of 8 bits with one scale for each output, scales [rows][1]
    bool by_columns = false;  // lays whole rows, and codes of 4 bits in an even number of tiles, by columns
};

// Weights to be packed. `add` decides where each will lie, `run` writes their bytes; sources must live until
// then.
class Packer {
  public:
    explicit Packer(WeightMemory& memory) : memory_(memory) {}
    PackedTiles add(const QuantisedSource& source);
    PackedTiles add(const Matrix& values, Code code);
    // Lets two weights that a product reads together, the last two added, lie tile by tile in turns: one
    // stream of memory is faster than two. Returns false, and does nothing, where their tiles are not laid
    // out alike.
    bool interleave(PackedTiles& first, PackedTiles& second);
    // Packs all that was added since the last call. Each thread writes an equal share of neighbouring tiles.
    void run(ThreadPool& pool);
    size_t num_waiting_bytes() const { return num_waiting_bytes_; }

  private:
    // Writes one of a weight's tiles.
    using PackTile = std::function<void(int tile, uint8_t* to)>;
    struct Job {
        PackedTiles packed;
        PackTile pack;
        int first;  // among the tiles of all jobs
    };
    PackedTiles add(const Tiles& tiles, PackTile pack);
    PackedTiles add_whole_rows(const QuantisedSource& source);
    PackedTiles add_floats(const QuantisedSource& source);

    WeightMemory& memory_;
    std::vector<Job> jobs_;
    int num_tiles_ = 0;
    size_t num_waiting_bytes_ = 0;
};

// Packs one weight at once.
template <typename... Source>
PackedTiles pack(ThreadPool& pool, WeightMemory& memory, const Source&... source) {
    Packer packer(memory);
    const PackedTiles packed = packer.add(source...);
    packer.run(pool);
    return packed;
}

}  // namespace octavo
