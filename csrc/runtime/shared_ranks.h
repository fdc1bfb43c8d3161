// Collectives between ranks on one machine: sums, columns and bytes through memory that all their processes
// map.
//
// Every collective has a number, which counts up and is the same on all ranks. A rank writes its part to
// its own slot, announces the number, and waits until all others have; then it reads their slots. Each rank
// has two slots, used alternately: a rank that has reached a number has read everything of the previous
// one, so a slot is overwritten only after all ranks have read it. A waiter spins for kSpin, then sleeps in
// a futex on the shared word. `abort` permanently ends every wait, on all ranks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace octavo {

// Thrown by collectives after another rank has ended or aborted; the ranks cannot be used any more.
struct RanksAborted : std::runtime_error {
    RanksAborted() : std::runtime_error("another rank has ended within a collective") {}
};

class SharedRanks {
  public:
    // file: descriptor of a file in memory, empty at first, that all ranks have. It may be closed
    // afterwards.
    // num_tensor: size of a tensor-parallel group of neighbouring ranks, a divisor of num_ranks. Ranks with
    // the same index in their groups share the experts.
    SharedRanks(int file, int rank, int num_ranks, int num_tensor);
    ~SharedRanks();
    SharedRanks(const SharedRanks&) = delete;
    SharedRanks& operator=(const SharedRanks&) = delete;

    int rank() const { return rank_; }
    int num_ranks() const { return num_ranks_; }
    int num_tensor() const { return num_tensor_; }
    int num_experts() const { return num_ranks_ / num_tensor_; }
    int tensor_index() const { return rank_ % num_tensor_; }
    int expert_index() const { return rank_ / num_tensor_; }
    // Returns the rank at an index in this rank's tensor-parallel group.
    int tensor_rank(int index) const { return rank_ - tensor_index() + index; }
    // Returns the rank at an index among the ranks that share the experts with this one.
    int expert_rank(int index) const { return index * num_tensor_ + tensor_index(); }

    // -- whole collectives, called by one thread of each rank at a time --

    // Grows the slots to at least this many bytes; all ranks must pass the same number.
    void reserve(size_t slot_bytes);
    // out = sum of x over the tensor-parallel group, added in rank order in fp32. `out` may be `x`.
    void all_reduce(const float* x, float* out, size_t count);
    // Concatenates columns: x [rows][widths[index]] of each tensor rank to out [rows][sum of widths].
    void all_gather(const float* x, float* out, size_t rows, const std::vector<int>& widths);
    // Takes each row of x [rows][width] from the expert rank with index owners[row].
    void collect(const float* x, const int32_t* owners, float* out, size_t rows, size_t width);
    // Replaces the bytes on all other ranks by the first rank's.
    void from_first(uint8_t* bytes, size_t count);
    // Ends all ranks' collectives, now and later, with RanksAborted. Thread-safe.
    void abort();
    bool aborted() const { return control_->aborted.load(std::memory_order_acquire) != 0; }

    // -- the steps of a collective, for ops with work items on many threads --

    // Number of the next collective. Call `advance` after `count` of them.
    uint32_t next() const { return next_; }
    void advance(int count) { next_ += static_cast<uint32_t>(count); }
    uint8_t* slot(int rank, uint32_t number) const {
        return memory_ + header_bytes_ +
               ((number & 1) * static_cast<size_t>(num_ranks_) + static_cast<size_t>(rank)) * slot_bytes_;
    }
    uint8_t* own_slot(uint32_t number) const { return slot(rank_, number); }
    // Announces that this rank's slot of a number is written, and waits for those of all other ranks.
    // Returns false if the ranks are aborted. Thread-safe; several threads may call it for the same number.
    bool exchange(uint32_t number);

  private:
    struct alignas(64) Line {
        std::atomic<uint32_t> arrived;  // number of the last collective whose slot is written
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
    Control* control_ = nullptr;  // mapped separately, since it is not remapped
    Line* lines_ = nullptr;  // [num_ranks]
    uint32_t next_ = 1;
};

}  // namespace octavo
