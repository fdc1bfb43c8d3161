#include "neuron_cache.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace octavo {

namespace {

constexpr size_t kSlack = 64;  // read behind the last record by kernels that take 64 outputs at a time
constexpr size_t kGroupInputs = 64;  // inputs of a product by columns are padded to a multiple of it

size_t landing_bytes(const std::vector<NeuronCache::Layer>& layers) {
    size_t most = 0;
    for (const auto& layer : layers) most = std::max(most, layer.num_neurons * layer.record_bytes);
    return most;
}

size_t largest_record(const std::vector<NeuronCache::Layer>& layers) {
    size_t most = 0;
    for (const auto& layer : layers) most = std::max(most, layer.record_bytes);
    return most;
}

size_t total_bytes(const std::vector<NeuronCache::Layer>& layers) {
    size_t sum = landing_bytes(layers) + largest_record(layers) + kSlack;
    for (const auto& layer : layers)
        sum += ((size_t)layer.num_slots + layer.pinned.size()) * layer.record_bytes;
    return sum;
}

int64_t aligned_down(int64_t offset) { return offset / kDirectAlign * kDirectAlign; }
int64_t aligned_up(int64_t offset) { return (offset + kDirectAlign - 1) / kDirectAlign * kDirectAlign; }

}  // namespace

NeuronCache::NeuronCache(Source source, std::vector<Layer> layers)
    : source_(std::move(source)),
      buffer_bytes_(source_.most_bytes + 2 * kDirectAlign),
      memory_(total_bytes(layers)),
      buffers_(source_.num_threads * buffer_bytes_),
      file_(source_.path, source_.read_at, buffers_.data()) {
    if (source_.num_threads < 1 || source_.most_bytes % kDirectAlign || layers.empty())
        throw std::logic_error("a cache of no neurons");
    for (const Layer& each : layers)
        if (each.num_neurons < 1 || each.record_bytes % kSlack || each.up_bytes % kSlack ||
            each.up_bytes >= each.record_bytes || each.record_bytes > source_.most_bytes ||
            each.file_offset % kDirectAlign || each.num_slots < 1)
            throw std::logic_error("neurons that lie wrong");
    for (Layer& each : layers) layers_.push_back({.shape = std::move(each)});
    lay_out();
    read_pinned();
    bytes_read_ = 0;
    try {
        for (int t = 0; t < source_.num_threads; t++) threads_.emplace_back([this, t] { serve(t); });
    } catch (...) {
        stop();
        throw;
    }
}

NeuronCache::~NeuronCache() { stop(); }

void NeuronCache::stop() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    may_read_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
}

// Zeros, the landing place, then each layer's slots, the pinned ones behind the others.
void NeuronCache::lay_out() {
    std::vector<Layer> shapes;
    for (const LayerState& state : layers_) shapes.push_back(state.shape);
    uint8_t* at = memory_.data();
    zeros_ = std::exchange(at, at + largest_record(shapes));
    landing_ = std::exchange(at, at + landing_bytes(shapes));
    size_t most = 0;
    for (LayerState& state : layers_) {
        const size_t slots = state.shape.num_slots + state.shape.pinned.size();
        state.slots = std::exchange(at, at + slots * state.shape.record_bytes);
        state.slot_of.assign(state.shape.num_neurons, -1);
        state.neuron_in.assign(slots, -1);
        state.used_at.assign(slots, -1);
        for (size_t i = 0; i < state.shape.pinned.size(); i++) {
            const int neuron = state.shape.pinned[i], slot = state.shape.num_slots + (int)i;
            if (neuron < 0 || neuron >= state.shape.num_neurons || state.slot_of[neuron] >= 0)
                throw std::logic_error("a pinned neuron that is none, or twice");
            state.slot_of[neuron] = slot;
            state.neuron_in[slot] = neuron;
            state.used_at[slot] = kPinned;
        }
        const size_t inputs = (state.shape.num_neurons + kGroupInputs - 1) / kGroupInputs * kGroupInputs;
        most = std::max(most, inputs);
    }
    columns_.assign(most, zeros_);
    marks_ = std::make_unique<std::atomic<uint8_t>[]>(most);
    for (size_t i = 0; i < most; i++) marks_[i].store(0, std::memory_order_relaxed);
}

void NeuronCache::read_pinned() {
    for (LayerState& state : layers_) {
        missing_ = state.shape.pinned;
        std::sort(missing_.begin(), missing_.end());
        reads_.clear();
        for (const int neuron : missing_)
            reads_.push_back({state.shape.file_offset + (int64_t)neuron * (int64_t)state.shape.record_bytes,
                              state.slots + state.slot_of[neuron] * state.shape.record_bytes});
        make_jobs(state);
        for (const Job& job : jobs_) {
            const auto failure = file_.read(job.offset, job.bytes, buffer(0), bytes_read_);
            if (failure) file_.raise(failure);
            fetch(job, state, buffer(0));
        }
    }
    reads_.clear();
    jobs_.clear();
}

void NeuronCache::request(int layer) {
    if (running_)
        for (const int neuron : running_->requested) columns_[neuron] = zeros_;
    LayerState& state = layers_[layer];
    running_ = &state;
    drop_old(state);
    take_marks(state);
    const size_t record = state.shape.record_bytes, column = state.shape.up_bytes;
    for (const int neuron : state.requested)
        columns_[neuron] = state.slots + state.slot_of[neuron] * record + column;
    state.num_found = (int)state.requested.size();
    num_found_.fetch_add(state.num_found, std::memory_order_relaxed);
    num_read_.fetch_add((int64_t)missing_.size(), std::memory_order_relaxed);
    const std::vector<int32_t> slots = free_slots(state, missing_.size());
    reads_.clear();
    for (size_t i = 0; i < missing_.size(); i++) {
        const int neuron = missing_[i];
        uint8_t* to = landing_ + neuron * record;
        if (!slots.empty()) {
            to = state.slots + slots[i] * record;
            state.slot_of[neuron] = slots[i];
            state.neuron_in[slots[i]] = neuron;
            state.used_at[slots[i]] = now_;
        }
        columns_[neuron] = to + column;
        reads_.push_back({state.shape.file_offset + neuron * (int64_t)record, to});
        state.requested.push_back(neuron);
    }
    const std::lock_guard lock(mutex_);
    make_jobs(state);
    next_ = done_ = 0;
    is_done_.assign(jobs_.size(), 0);
    arrived_.store(0, std::memory_order_release);
    may_read_.notify_all();
}

// Sorts the marked neurons into those in memory and those that are missing, and takes the marks away.
void NeuronCache::take_marks(LayerState& state) {
    state.requested.clear();
    missing_.clear();
    for (int neuron = 0; neuron < state.shape.num_neurons; neuron++) {
        if (!marks_[neuron].load(std::memory_order_relaxed)) continue;
        marks_[neuron].store(0, std::memory_order_relaxed);
        const int slot = state.slot_of[neuron];
        if (slot < 0) {
            missing_.push_back(neuron);
            continue;
        }
        if (state.used_at[slot] != kPinned) state.used_at[slot] = now_;
        state.requested.push_back(neuron);
    }
}

// Gives up the slots of neurons that none of the window's steps has used.
void NeuronCache::drop_old(LayerState& state) const {
    if (!source_.window) return;
    for (int slot = 0; slot < state.shape.num_slots; slot++)
        if (state.neuron_in[slot] >= 0 && state.used_at[slot] < now_ - source_.window) clear(state, slot);
}

void NeuronCache::clear(LayerState& state, int slot) {
    state.slot_of[state.neuron_in[slot]] = -1;
    state.neuron_in[slot] = -1;
    state.used_at[slot] = -1;
}

// Empty slots first, then those that were used the longest ago.
std::vector<int32_t> NeuronCache::free_slots(LayerState& state, size_t count) const {
    std::vector<int32_t> found;
    for (int slot = 0; slot < state.shape.num_slots; slot++)
        if (state.used_at[slot] < now_) found.push_back(slot);
    if (found.size() < count) return {};
    const auto end = found.begin() + (ptrdiff_t)count;
    std::nth_element(found.begin(), end, found.end(), [&](int32_t a, int32_t b) {
        return std::pair(state.used_at[a], a) < std::pair(state.used_at[b], b);
    });
    found.erase(end, found.end());
    for (const int32_t slot : found)
        if (state.neuron_in[slot] >= 0) clear(state, slot);
    return found;
}

// Puts neighbouring records into one read, as long as what lies between them costs less than another one.
void NeuronCache::make_jobs(const LayerState& state) {
    const auto record = (int64_t)state.shape.record_bytes;
    jobs_.clear();
    for (int i = 0; i < (int)reads_.size(); i++) {
        const int64_t end = reads_[i].offset + record;
        if (!jobs_.empty()) {
            Job& last = jobs_.back();
            const int64_t gap = reads_[i].offset - (reads_[i - 1].offset + record);
            if (gap <= (int64_t)source_.gap_bytes &&
                end - reads_[last.first].offset <= (int64_t)source_.most_bytes) {
                last.end = i + 1;
                last.bytes = (size_t)(aligned_up(end) - last.offset);
                continue;
            }
        }
        const int64_t offset = aligned_down(reads_[i].offset);
        jobs_.push_back({offset, (size_t)(aligned_up(end) - offset), i, i + 1});
    }
}

// Copies a read's records to their places.
void NeuronCache::fetch(const Job& job, const LayerState& state, const uint8_t* buffer) const {
    for (int i = job.first; i < job.end; i++)
        std::memcpy(reads_[i].to, buffer + (reads_[i].offset - job.offset), state.shape.record_bytes);
}

void NeuronCache::serve(int thread) {
    std::unique_lock lock(mutex_);
    while (true) {
        may_read_.wait(lock, [&] { return stopping_ || (next_ < jobs_.size() && !failed_); });
        if (stopping_) return;
        const size_t index = next_++;
        const Job job = jobs_[index];
        const LayerState& state = *running_;
        in_flight_++;
        lock.unlock();
        const auto failure = file_.read(job.offset, job.bytes, buffer(thread), bytes_read_);
        if (!failure) fetch(job, state, buffer(thread));
        lock.lock();
        in_flight_--;
        is_done_[index] = !failure;
        if (failure && !failed_) {
            failure_ = failure;
            failed_.store(true, std::memory_order_release);
        }
        while (done_ < jobs_.size() && is_done_[done_]) done_++;
        arrived_.store(done_ < jobs_.size() ? jobs_[done_].first : (int)reads_.size(),
                       std::memory_order_release);
        has_arrived_.notify_all();
    }
}

bool NeuronCache::await(int layer, int count) {
    const int needed = count - layers_[layer].num_found;
    if (needed <= 0) return !failed();
    if (arrived_.load(std::memory_order_acquire) >= needed) return !failed();
    const auto start = std::chrono::steady_clock::now();
    std::unique_lock lock(mutex_);
    has_arrived_.wait(lock, [&] { return failed_ || arrived_.load(std::memory_order_relaxed) >= needed; });
    const auto waited = std::chrono::steady_clock::now() - start;
    wait_ns_.fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count(),
                       std::memory_order_relaxed);
    return !failed_;
}

// Slots of a layer that were to be filled when a read failed hold nothing.
void NeuronCache::end_step() {
    std::unique_lock lock(mutex_);
    has_arrived_.wait(lock, [&] { return in_flight_ == 0 && (failed_ || done_ == jobs_.size()); });
    if (!failed_) return;
    const WeightFile::Failure failure = std::exchange(failure_, {});
    failed_.store(false, std::memory_order_release);
    jobs_.clear();
    next_ = done_ = 0;
    for (int slot = 0; slot < running_->shape.num_slots; slot++)
        if (running_->used_at[slot] == now_) clear(*running_, slot);
    lock.unlock();
    file_.raise(failure);
}

}  // namespace octavo
