// Collectives of the ranks of one engine on one machine: sums, columns and bytes through memory that all of
// their processes map.
//
// Every collective has a number, which counts up and is the same on all ranks. A rank puts its part into its
// own slot, says that it has come to that number, and waits until all others have; then it reads their slots.
// There are two slots a rank, used in turns: who comes to a number has read everything of the one before, so
// that a slot is written again only once all have read it. Waiting spins for a moment, then sleeps in a futex
// on the shared word. `abort` ends every wait for good, on all ranks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace octavo {

// A collective that another rank's end has cut off: the ranks are of no use any more.
struct RanksAborted : std::runtime_error {
    RanksAborted() : std::runtime_error("another rank has ended within a collective") {}
};

class SharedRanks {
  public:
    // file: a descriptor of a file in memory, empty at first, that all ranks have. It may be closed later.
    // num_tensor: neighbouring ranks that share out heads and widths, a divisor of num_ranks; those at the same
    // place among theirs share out the experts.
    SharedRanks(int file, int rank, int num_ranks, int num_tensor);
    ~SharedRanks();
    SharedRanks(const SharedRanks&) = delete;
    SharedRanks& operator=(const SharedRanks&) = delete;

    int rank() const { return rank_; }
    int num_ranks() const { return num_ranks_; }
    int num_tensor() const { return num_tensor_; }
    int num_experts() const { return num_ranks_ / num_tensor_; }
    int tensor_place() const { return rank_ % num_tensor_; }
    int expert_place() const { return rank_ / num_tensor_; }
    // The rank at a place among those that share out heads and widths with this one.
    int tensor_rank(int place) const { return rank_ - tensor_place() + place; }
    // The rank at a place among those that share out the experts with this one.
    int expert_rank(int place) const { return place * num_tensor_ + tensor_place(); }

    // -- whole collectives, called by one thread of each rank at a time --

    // Lets a slot have at least this many bytes; all ranks ask for the same.
    void reserve(size_t slot_bytes);
    // out = the sum of the x of this one's tensor ranks, added in rank order in fp32. `out` may be `x`.
    void all_reduce(const float* x, float* out, size_t count);
    // Joins rows: x [rows][widths[place]] of each of its tensor ranks to out [rows][sum of widths].
    void all_gather(const float* x, float* out, size_t rows, const std::vector<int>& widths);
    // Takes each row of x [rows][width] as the one of its expert ranks has it whose place owners[row] is.
    void collect(const float* x, const int32_t* owners, float* out, size_t rows, size_t width);
    // Replaces the bytes of all other ranks by the first rank's.
    void from_first(uint8_t* bytes, size_t count);
    // Ends all ranks' collectives, now and later, with RanksAborted. May be called from any thread.
    void abort();
    bool aborted() const { return control_->aborted.load(std::memory_order_acquire) != 0; }

    // -- the steps of a collective, for stages whose pieces many threads compute --

    // The number of the next collective. After `count` of them, `advance` is called.
    uint32_t next() const { return next_; }
    void advance(int count) { next_ += static_cast<uint32_t>(count); }
    uint8_t* slot(int rank, uint32_t number) const {
        return memory_ + header_bytes_ +
               ((number & 1) * static_cast<size_t>(num_ranks_) + static_cast<size_t>(rank)) * slot_bytes_;
    }
    uint8_t* own_slot(uint32_t number) const { return slot(rank_, number); }
    // Says that this rank's slot of a number is written, and waits until those of all others are; false where
    // the ranks are aborted. Called from any thread, by several too.
    bool exchange(uint32_t number);

  private:
    struct alignas(64) Line {
        std::atomic<uint32_t> arrived;  // the number of the last collective whose slot is written
        std::atomic<uint32_t> waiting;  // threads that sleep until it changes
    };
    struct alignas(64) Control {
        std::atomic<uint32_t> aborted;
    };

    void map(size_t slot_bytes);
    void unmap();
    void announce(uint32_t number);
    bool wait_for(Line& line, uint32_t number);
    void require_exchange(uint32_t number);

    int file_;
    const int rank_, num_ranks_, num_tensor_;
    const size_t header_bytes_;
    uint8_t* memory_ = nullptr;
    size_t mapped_bytes_ = 0, slot_bytes_ = 0;
    Control* control_ = nullptr;  // mapped apart, since it stays where it is
    Line* lines_ = nullptr;  // [num_ranks]
    uint32_t next_ = 1;
};

}  // namespace octavo
