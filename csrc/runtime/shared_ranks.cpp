#include "shared_ranks.h"

#include <sys/mman.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <system_error>
#include <thread>

namespace octavo {

namespace {

static_assert(std::atomic<uint32_t>::is_always_lock_free, "words shared by processes");

constexpr size_t kPage = 4096, kFirstSlot = 64 << 10;
// Time that a rank spins before it sleeps; the same as in thread_pool.cpp.
constexpr auto kSpin = std::chrono::microseconds(50);
#ifdef __linux__
// Upper bound on one sleep: a waiter that misses the wake-up of an abort continues after it.
constexpr long kSleepNs = 50'000'000;
#endif

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

void* map_file(int file, size_t bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (p == MAP_FAILED) fail("the memory of the ranks cannot be mapped");
    return p;
}

// Sleeps while the word has this value, at most kSleepNs. Other processes share the word.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#ifdef __linux__
    const timespec timeout{0, kSleepNs};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &timeout, nullptr, 0);
#else
    if (word.load(std::memory_order_acquire) == value)
        std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#ifdef __linux__
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
    static_cast<void>(word);
#endif
}

// Whether a counter has reached a number; both wrap around.
bool has_reached(uint32_t count, uint32_t number) { return static_cast<int32_t>(count - number) >= 0; }

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

SharedRanks::SharedRanks(int file, int rank, int num_ranks, int num_tensor)
    : file_(-1),
      rank_(rank),
      num_ranks_(num_ranks),
      num_tensor_(num_tensor),
      header_bytes_(
          whole_pages(sizeof(Control) + sizeof(Line) * static_cast<size_t>(std::max(num_ranks, 0)))) {
    if (num_ranks < 1 || rank < 0 || rank >= num_ranks)
        throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(num_ranks));
    if (num_tensor < 1 || num_ranks % num_tensor)
        throw std::invalid_argument(std::to_string(num_ranks) + " ranks in groups of " +
                                    std::to_string(num_tensor));
    file_ = dup(file);
    if (file_ < 0) fail("no file of the ranks");
    try {
        map(kFirstSlot);
    } catch (...) {
        close(file_);
        throw;
    }
}

SharedRanks::~SharedRanks() {
    unmap();
    munmap(control_, header_bytes_);
    close(file_);
}

// The file only grows, and its new bytes are zeros, so ranks may call this in any order.
void SharedRanks::map(size_t slot_bytes) {
    const size_t bytes = header_bytes_ + 2 * static_cast<size_t>(num_ranks_) * slot_bytes;
    const off_t have = lseek(file_, 0, SEEK_END);
    if (have < 0 || (static_cast<size_t>(have) < bytes && ftruncate(file_, static_cast<off_t>(bytes))))
        fail("the memory of the ranks cannot be made larger");
    if (!control_) {
        control_ = static_cast<Control*>(map_file(file_, header_bytes_));
        lines_ = reinterpret_cast<Line*>(control_ + 1);
    }
    memory_ = static_cast<uint8_t*>(map_file(file_, bytes));
    mapped_bytes_ = bytes;
    slot_bytes_ = slot_bytes;
}

void SharedRanks::unmap() {
    if (memory_) munmap(memory_, mapped_bytes_);
    memory_ = nullptr;
}

void SharedRanks::reserve(size_t slot_bytes) {
    slot_bytes = whole_pages(slot_bytes);
    require_exchange(next_++);  // all ranks have read the slots
    if (slot_bytes <= slot_bytes_) return;
    unmap();
    map(slot_bytes);
}

void SharedRanks::all_reduce(const float* x, float* out, size_t count) {
    const size_t capacity = slot_bytes_ / sizeof(float);
    for (size_t first = 0; first < count; first += capacity) {
        const size_t n = std::min(capacity, count - first);
        const uint32_t number = next_++;
        std::memcpy(own_slot(number), x + first, n * sizeof(float));
        require_exchange(number);
        std::memcpy(out + first, slot(tensor_rank(0), number), n * sizeof(float));
        for (int r = 1; r < num_tensor_; r++) {
            const float* part = reinterpret_cast<const float*>(slot(tensor_rank(r), number));
            for (size_t i = 0; i < n; i++) out[first + i] += part[i];
        }
    }
}

void SharedRanks::all_gather(const float* x, float* out, size_t rows, const std::vector<int>& widths) {
    if (static_cast<int>(widths.size()) != num_tensor_)
        throw std::invalid_argument("widths of " + std::to_string(widths.size()) + " ranks, there are " +
                                    std::to_string(num_tensor_));
    const int widest = *std::max_element(widths.begin(), widths.end());
    if (*std::min_element(widths.begin(), widths.end()) < 0) throw std::invalid_argument("a width below 0");
    size_t width = 0;
    for (const int w : widths) width += static_cast<size_t>(w);
    const size_t row_bytes = std::max(static_cast<size_t>(widest), static_cast<size_t>(1)) * sizeof(float);
    if (row_bytes > slot_bytes_) reserve(row_bytes);
    const size_t capacity = slot_bytes_ / row_bytes;
    for (size_t first = 0; first < rows; first += capacity) {
        const size_t n = std::min(capacity, rows - first), own = static_cast<size_t>(widths[tensor_index()]);
        const uint32_t number = next_++;
        std::memcpy(own_slot(number), x + first * own, n * own * sizeof(float));
        require_exchange(number);
        float* to = out + first * width;
        for (int r = 0; r < num_tensor_; r++) {
            const auto* part = reinterpret_cast<const float*>(slot(tensor_rank(r), number));
            for (size_t row = 0; row < n; row++)
                std::memcpy(to + row * width, part + row * static_cast<size_t>(widths[r]),
                            static_cast<size_t>(widths[r]) * sizeof(float));
            to += widths[r];
        }
    }
}

void SharedRanks::collect(const float* x, const int32_t* owners, float* out, size_t rows, size_t width) {
    const size_t row_bytes = std::max(width, static_cast<size_t>(1)) * sizeof(float);
    if (row_bytes > slot_bytes_) reserve(row_bytes);
    const size_t capacity = slot_bytes_ / row_bytes;
    for (size_t first = 0; first < rows; first += capacity) {
        const size_t end = std::min(rows, first + capacity);
        const uint32_t number = next_++;
        std::memcpy(own_slot(number), x + first * width, (end - first) * width * sizeof(float));
        require_exchange(number);
        for (size_t row = first; row < end; row++)
            std::memcpy(out + row * width,
                        reinterpret_cast<const float*>(slot(expert_rank(owners[row]), number)) +
                            (row - first) * width,
                        width * sizeof(float));
    }
}

void SharedRanks::from_first(uint8_t* bytes, size_t count) {
    for (size_t first = 0; first < count; first += slot_bytes_) {
        const size_t n = std::min(slot_bytes_, count - first);
        const uint32_t number = next_++;
        if (rank_ == 0) std::memcpy(own_slot(number), bytes + first, n);
        require_exchange(number);
        if (rank_ != 0) std::memcpy(bytes + first, slot(0, number), n);
    }
}

void SharedRanks::abort() {
    control_->aborted.store(1, std::memory_order_seq_cst);
    for (int r = 0; r < num_ranks_; r++) wake_all(lines_[r].arrived);
}

void SharedRanks::require_exchange(uint32_t number) {
    if (!exchange(number)) throw RanksAborted();
}

bool SharedRanks::exchange(uint32_t number) {
    announce(number);
    for (int r = 0; r < num_ranks_; r++)
        if (r != rank_ && !wait_for(lines_[r], number)) return false;
    return !aborted();
}

// The first thread to call it announces for all threads of the rank.
void SharedRanks::announce(uint32_t number) {
    Line& own = lines_[rank_];
    uint32_t seen = own.arrived.load(std::memory_order_acquire);
    while (!has_reached(seen, number)) {
        if (!own.arrived.compare_exchange_weak(seen, number, std::memory_order_seq_cst)) continue;
        if (own.waiting.load(std::memory_order_seq_cst)) wake_all(own.arrived);
        return;
    }
}

bool SharedRanks::wait_for(Line& line, uint32_t number) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 1; !has_reached(line.arrived.load(std::memory_order_acquire), number); i++) {
        if (i % 64 == 0) {
            if (aborted()) return false;
            if (std::chrono::steady_clock::now() - start > kSpin) break;
        }
        relax();
    }
    for (;;) {
        const uint32_t seen = line.arrived.load(std::memory_order_acquire);
        if (has_reached(seen, number)) return true;
        if (aborted()) return false;
        line.waiting.fetch_add(1, std::memory_order_seq_cst);
        if (line.arrived.load(std::memory_order_seq_cst) == seen) sleep_while(line.arrived, seen);
        line.waiting.fetch_sub(1, std::memory_order_seq_cst);
    }
}

}  // namespace octavo
