#include "weight_stream.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace octavo {

WeightStream::WeightStream(Source source, const std::vector<WeightChunk>& resident,
                           std::vector<WeightChunk> streamed, size_t memory_bytes)
    : source_(std::move(source)),
      chunks_(std::move(streamed)),
      memory_(memory_bytes),
      file_(source_.path, source_.read_at, memory_.data()) {
    if (source_.num_threads < 1 || !source_.block_bytes || source_.block_bytes % kDirectAlign)
        throw std::logic_error("an invalid number of threads or block size");
    for (const std::vector<WeightChunk>* list : {&resident, &std::as_const(chunks_)})
        for (const WeightChunk& c : *list)
            if (!c.bytes || c.memory_offset + c.bytes > memory_bytes || c.bytes % kDirectAlign ||
                c.file_offset % kDirectAlign || c.memory_offset % kDirectAlign)
                throw std::logic_error("an invalid chunk of weights");
    for (int i = 0; i < count(); i++) {
        int back = 1;
        while (!chunks_[i].overlaps(chunks_[((i - back) % count() + count()) % count()])) back++;
        back_.push_back(back);
    }
    left_.resize(count());
    try {
        for (const WeightChunk& c : resident) {
            const auto failure =
                file_.read(c.file_offset, c.bytes, memory_.data() + c.memory_offset, bytes_read_);
            if (failure) file_.raise(failure);
        }
        bytes_read_ = 0;
        if (count())
            for (int t = 0; t < source_.num_threads; t++) threads_.emplace_back([this] { serve(); });
    } catch (...) {
        stop();
        throw;
    }
}

WeightStream::~WeightStream() { stop(); }

void WeightStream::stop() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    may_read_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
}

bool WeightStream::may_read() const {
    return !failed_.load(std::memory_order_relaxed) && released_ > reading_ - back_[reading_ % count()];
}

void WeightStream::serve() {
    std::unique_lock lock(mutex_);
    while (true) {
        may_read_.wait(lock, [&] { return stopping_ || may_read(); });
        if (stopping_) return;
        const int index = static_cast<int>(reading_ % count());
        const WeightChunk& chunk = chunks_[index];
        const size_t at = block_ * source_.block_bytes,
                     bytes = std::min(source_.block_bytes, chunk.bytes - at);
        if (block_++ == 0) left_[index] = (chunk.bytes + source_.block_bytes - 1) / source_.block_bytes;
        if (at + bytes == chunk.bytes) reading_++, block_ = 0;
        in_flight_++;
        lock.unlock();
        const auto failure = file_.read(chunk.file_offset + static_cast<int64_t>(at), bytes,
                                        memory_.data() + chunk.memory_offset + at, bytes_read_);
        lock.lock();
        in_flight_--;
        left_[index]--;
        if (failure && !failed_) {
            failure_ = failure;
            failed_.store(true, std::memory_order_release);
        }
        int64_t arrived = arrived_.load(std::memory_order_relaxed);
        while (!failed_ && arrived < reading_ && left_[arrived % count()] == 0) arrived++;
        if (arrived != arrived_.load(std::memory_order_relaxed) || failed_) {
            arrived_.store(arrived, std::memory_order_release);
            has_arrived_.notify_all();
        }
    }
}

// Counts the chunks up to a position, each once. Returns true on the thread that counts it first.
bool WeightStream::count_requested(int64_t position) {
    int64_t requested = requested_.load(std::memory_order_relaxed);
    while (requested <= position)
        if (requested_.compare_exchange_weak(requested, position + 1, std::memory_order_relaxed)) {
            const int64_t arrived =
                std::clamp(arrived_.load(std::memory_order_relaxed), requested, position + 1);
            num_found_.fetch_add(arrived - requested, std::memory_order_relaxed);
            num_waited_.fetch_add(position + 1 - arrived, std::memory_order_relaxed);
            return true;
        }
    return false;
}

bool WeightStream::await(int chunk) {
    const int64_t position = first_ + chunk;
    const bool is_first = count_requested(position);
    if (arrived_.load(std::memory_order_acquire) > position) return true;
    const auto start = std::chrono::steady_clock::now();
    std::unique_lock lock(mutex_);
    has_arrived_.wait(lock, [&] { return failed_ || arrived_.load(std::memory_order_relaxed) > position; });
    const auto waited = std::chrono::steady_clock::now() - start;
    if (is_first)
        wait_ns_.fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count(),
                           std::memory_order_relaxed);
    return arrived_.load(std::memory_order_relaxed) > position;
}

void WeightStream::release(int end) {
    const std::lock_guard lock(mutex_);
    if (first_ + end <= released_) return;
    released_ = first_ + end;
    may_read_.notify_all();
}

// Also waits for chunks that the step did not use, such as the head's without sampled rows: later chunks
// are read to the same memory.
void WeightStream::end_step() {
    if (!count()) return;
    std::unique_lock lock(mutex_);
    has_arrived_.wait(lock, [&] {
        return failed_ ? in_flight_ == 0 : arrived_.load(std::memory_order_relaxed) >= first_ + count();
    });
    const WeightFile::Failure failure = failure_;
    const int64_t next = (first_ / count() + 1) * count();
    if (failed_) {  // prefetched chunks are read again
        reading_ = next;
        arrived_.store(next, std::memory_order_release);
        block_ = 0;
        failure_ = {};
        failed_.store(false, std::memory_order_release);
    }
    first_ = released_ = next;
    requested_.store(next, std::memory_order_relaxed);  // chunks that no op has requested are not counted
    may_read_.notify_all();
    lock.unlock();
    if (failure) file_.raise(failure);
}

}  // namespace octavo
