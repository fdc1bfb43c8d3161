#include "neuron_cache.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace octavo {

namespace {

constexpr size_t kSlack = 64;  // read after the last record by kernels that load 64 outputs at a time
constexpr float kMaxGain = 1e20F;
// Predictions are used while this share of the neurons that they would read is used.
constexpr double kMinAccuracy = 0.5;
constexpr double kAccuracyWeight = 1.0 / 64;  // of a step in the running mean
constexpr size_t kMaxPredicted = 64;  // neurons of a layer up to which the next layer's are predicted
constexpr size_t kGroupInputs = 64;  // inputs of column matmuls are padded to a multiple of it

size_t landing_bytes(const std::vector<NeuronCache::Layer>& layers) {
    size_t maximum = 0;
    for (const auto& layer : layers) maximum = std::max(maximum, layer.num_neurons * layer.record_bytes);
    return maximum;
}

size_t largest_record(const std::vector<NeuronCache::Layer>& layers) {
    size_t maximum = 0;
    for (const auto& layer : layers) maximum = std::max(maximum, layer.record_bytes);
    return maximum;
}

// A record of zeros, the overflow area (with a file), and the slots.
size_t total_bytes(const std::vector<NeuronCache::Layer>& layers, bool has_file) {
    size_t sum = (has_file ? landing_bytes(layers) : 0) + largest_record(layers) + kSlack;
    for (const auto& layer : layers)
        sum += (static_cast<size_t>(layer.num_slots) + layer.pinned.size()) * layer.record_bytes;
    return sum;
}

// Pins all neurons.
std::vector<NeuronCache::Layer> all_pinned(std::vector<NeuronCache::Layer> layers) {
    for (auto& layer : layers) {
        layer.num_slots = 0;
        layer.pinned.resize(layer.num_neurons);
        std::iota(layer.pinned.begin(), layer.pinned.end(), 0);
    }
    return layers;
}

int64_t aligned_down(int64_t offset) { return offset / kDirectAlign * kDirectAlign; }
int64_t aligned_up(int64_t offset) { return (offset + kDirectAlign - 1) / kDirectAlign * kDirectAlign; }

}  // namespace

NeuronCache::NeuronCache(Source source, std::vector<Layer> layers)
    : source_(std::move(source)),
      buffer_bytes_(source_.max_read_bytes + 2 * kDirectAlign),
      memory_(total_bytes(layers, true)),
      buffers_(source_.num_threads * buffer_bytes_),
      file_(std::make_unique<WeightFile>(source_.path, source_.read_at, buffers_.data())) {
    if (source_.num_threads < 1 || source_.max_read_bytes % kDirectAlign)
        throw std::logic_error("an invalid neuron cache");
    check(layers);
    for (const Layer& each : layers)
        if (each.record_bytes > source_.max_read_bytes || each.file_offset % kDirectAlign ||
            each.num_slots < 1)
            throw std::logic_error("neurons with invalid records");
    lay_out(std::move(layers));
    read_pinned();
    bytes_read_ = 0;
    try {
        for (int t = 0; t < source_.num_threads; t++) threads_.emplace_back([this, t] { serve(t); });
    } catch (...) {
        stop();
        throw;
    }
}

NeuronCache::NeuronCache(std::vector<Layer> layers)
    : source_{}, buffer_bytes_(0), memory_(total_bytes(all_pinned(layers), false)), buffers_(0) {
    check(layers);
    lay_out(all_pinned(std::move(layers)));
}

void NeuronCache::check(const std::vector<Layer>& layers) {
    if (layers.empty()) throw std::logic_error("an invalid neuron cache");
    for (const Layer& each : layers)
        if (each.num_neurons < 1 || each.record_bytes % kSlack || each.up_bytes % kSlack ||
            each.up_bytes >= each.record_bytes)
            throw std::logic_error("neurons with invalid records");
}

void NeuronCache::fill(int layer, const uint8_t* records, size_t bytes) {
    LayerState& state = layers_.at(layer);
    if (file_ || bytes != state.shape.num_neurons * state.shape.record_bytes)
        throw std::logic_error("the size of the records is not that of the layer");
    std::memcpy(state.slots, records, bytes);
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

// A record of zeros, the overflow area, then each layer's slots, pinned ones last.
void NeuronCache::lay_out(std::vector<Layer> layers) {
    uint8_t* at = memory_.data();
    zeros_ = std::exchange(at, at + largest_record(layers));
    if (file_) landing_ = std::exchange(at, at + landing_bytes(layers));
    for (Layer& each : layers) layers_.push_back({.shape = std::move(each)});
    size_t maximum = 0;
    for (LayerState& state : layers_) {
        const size_t slots = state.shape.num_slots + state.shape.pinned.size();
        state.slots = std::exchange(at, at + slots * state.shape.record_bytes);
        state.slot_by_neuron.assign(state.shape.num_neurons, -1);
        state.neuron_by_slot.assign(slots, -1);
        state.used_at.assign(slots, -1);
        state.is_prefetched.assign(state.shape.num_neurons, 0);
        if (source_.half_life > 0) state.uses.assign(state.shape.num_neurons, 0.0F);
        if (source_.predicts && &state != layers_.data())
            state.follows.assign(
                static_cast<size_t>((&state - 1)->shape.num_neurons) * state.shape.num_neurons, 0.0F);
        for (size_t i = 0; i < state.shape.pinned.size(); i++) {
            const int neuron = state.shape.pinned[i], slot = state.shape.num_slots + static_cast<int>(i);
            if (neuron < 0 || neuron >= state.shape.num_neurons || state.slot_by_neuron[neuron] >= 0)
                throw std::logic_error("a pinned neuron that is invalid or repeated");
            state.slot_by_neuron[neuron] = slot;
            state.neuron_by_slot[slot] = neuron;
            state.used_at[slot] = kPinned;
        }
        const size_t inputs = (state.shape.num_neurons + kGroupInputs - 1) / kGroupInputs * kGroupInputs;
        maximum = std::max(maximum, inputs);
    }
    columns_.assign(maximum, zeros_);
    marks_ = std::make_unique<std::atomic<uint8_t>[]>(maximum);
    for (size_t i = 0; i < maximum; i++) marks_[i].store(0, std::memory_order_relaxed);
}

void NeuronCache::read_pinned() {
    for (LayerState& state : layers_) {
        missing_ = state.shape.pinned;
        std::sort(missing_.begin(), missing_.end());
        reads_.clear();
        for (const int neuron : missing_)
            reads_.push_back({file_offset(state, neuron),
                              state.slots + state.slot_by_neuron[neuron] * state.shape.record_bytes});
        for (const Job& job : make_jobs(reads_, state)) {
            const auto failure = file_->read(job.offset, job.bytes, buffer(0), bytes_read_);
            if (failure) file_->raise(failure);
            copy_records(job, reads_, state.shape.record_bytes, buffer(0));
        }
    }
    reads_.clear();
}

int64_t NeuronCache::file_offset(const LayerState& state, int neuron) const {
    return state.shape.file_offset +
           static_cast<int64_t>(neuron) * static_cast<int64_t>(state.shape.record_bytes);
}

// Slots are reserved immediately and hold their neurons when the bytes have arrived.
void NeuronCache::prefetch(int layer, const std::vector<int32_t>& neurons) {
    LayerState& state = layers_[layer];
    finish_prefetch(&state);
    Prefetch prefetch{.state = &state};
    for (const int32_t neuron : neurons)
        if (state.slot_by_neuron[neuron] < 0)
            prefetch.reads.push_back({file_offset(state, neuron), nullptr, neuron});
        else if (state.used_at[state.slot_by_neuron[neuron]] != kPinned)
            state.used_at[state.slot_by_neuron[neuron]] = now_;
    const auto is_free = [&](int64_t used_at) { return used_at < now_; };
    const auto slots_end = state.used_at.begin() + state.shape.num_slots;
    const auto room = static_cast<size_t>(std::count_if(state.used_at.begin(), slots_end, is_free));
    prefetch.reads.resize(std::min(prefetch.reads.size(), room));
    if (!file_ || prefetch.reads.empty()) return;
    const std::vector<int32_t> slots = free_slots(state, prefetch.reads.size());
    for (size_t i = 0; i < slots.size(); i++) {
        prefetch.reads[i].slot = slots[i];
        prefetch.reads[i].to = state.slots + slots[i] * state.shape.record_bytes;
        state.used_at[slots[i]] = now_;
    }
    prefetch.jobs = make_jobs(prefetch.reads, state);
    const std::lock_guard lock(mutex_);
    prefetches_.push_back(std::move(prefetch));
    may_read_.notify_all();
}

// Ends the prefetch of a layer, or of all: drops reads that have not started and waits for the others.
void NeuronCache::finish_prefetch(const LayerState* only) {
    std::unique_lock lock(mutex_);
    for (auto it = prefetches_.begin(); it != prefetches_.end();) {
        if (only && it->state != only) {
            ++it;
            continue;
        }
        for (size_t job = it->next; job < it->jobs.size(); job++)
            for (int i = it->jobs[job].first; i < it->jobs[job].end; i++)
                it->state->used_at[it->reads[i].slot] = -1;
        it->next = it->jobs.size();
        const auto start = std::chrono::steady_clock::now();
        has_arrived_.wait(lock, [&] { return it->in_flight == 0; });
        const auto waited = std::chrono::steady_clock::now() - start;
        wait_ns_.fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count(),
                           std::memory_order_relaxed);
        it = prefetches_.erase(it);
    }
}

void NeuronCache::request(int layer) {
    if (running_)
        for (const int neuron : running_->requested) columns_[neuron] = zeros_;
    LayerState& state = layers_[layer];
    if (!prefetches_.empty()) finish_prefetch(&state);
    const LayerState* const before = std::exchange(running_, &state);
    evict_old(state);
    collect_marks(state);
    const size_t record = state.shape.record_bytes, column = state.shape.up_bytes;
    for (const int neuron : state.requested)
        columns_[neuron] = state.slots + state.slot_by_neuron[neuron] * record + column;
    state.num_found = static_cast<int>(state.requested.size());
    num_found_.fetch_add(state.num_found, std::memory_order_relaxed);
    num_read_.fetch_add(static_cast<int64_t>(missing_.size()), std::memory_order_relaxed);
    count_uses(state);
    const std::vector<int32_t> slots = choose_slots(state);
    reads_.clear();
    for (size_t i = 0; i < missing_.size(); i++) {
        const int neuron = missing_[i];
        uint8_t* to = landing_ + neuron * record;
        if (slots[i] >= 0) {
            to = state.slots + slots[i] * record;
            state.slot_by_neuron[neuron] = slots[i];
            state.neuron_by_slot[slots[i]] = neuron;
            state.used_at[slots[i]] = now_;
        }
        columns_[neuron] = to + column;
        reads_.push_back({file_offset(state, neuron), to});
        state.requested.push_back(neuron);
    }
    {
        const std::lock_guard lock(mutex_);
        jobs_ = make_jobs(reads_, state);
        next_ = done_ = 0;
        is_done_.assign(jobs_.size(), 0);
        arrived_.store(0, std::memory_order_release);
        may_read_.notify_all();
    }
    if (!source_.predicts) return;
    if (layer > 0 && before == &state - 1) learn(*before, state);
    if (layer + 1 < num_layers()) predict_next(layer);
}

// Counts the uses of the requested and the missing neurons. Old counts decay because new ones have a larger
// weight.
void NeuronCache::count_uses(LayerState& state) const {
    if (state.uses.empty()) return;
    state.gain *= static_cast<float>(std::exp2(1 / source_.half_life));
    if (state.gain > kMaxGain) {
        for (float& use : state.uses) use /= state.gain;
        for (float& follow : state.follows) follow /= state.gain;
        state.gain = 1;
    }
    for (const int neuron : state.requested) state.uses[neuron] += state.gain;
    for (const int neuron : missing_) state.uses[neuron] += state.gain;
}

// Returns a slot for each missing neuron, or -1 for neurons that are used less often than those in the
// slots. Without counts: slots for all, or for none if they are too few.
std::vector<int32_t> NeuronCache::choose_slots(LayerState& state) const {
    std::vector<int32_t> chosen(missing_.size(), -1);
    if (state.uses.empty()) {
        const std::vector<int32_t> slots = free_slots(state, missing_.size());
        return slots.empty() ? chosen : slots;
    }
    const auto use = [&](int32_t slot) {
        return state.neuron_by_slot[slot] < 0 ? -1.0F : state.uses[state.neuron_by_slot[slot]];
    };
    std::vector<int32_t> slots, order(missing_.size());
    for (int slot = 0; slot < state.shape.num_slots; slot++)
        if (state.used_at[slot] < now_) slots.push_back(slot);
    std::sort(slots.begin(), slots.end(),
              [&](int32_t a, int32_t b) { return std::pair(use(a), a) < std::pair(use(b), b); });
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return std::pair(-state.uses[missing_[a]], a) < std::pair(-state.uses[missing_[b]], b);
    });
    for (size_t i = 0; i < std::min(slots.size(), order.size()); i++) {
        if (state.uses[missing_[order[i]]] <= use(slots[i])) break;
        if (state.neuron_by_slot[slots[i]] >= 0) clear(state, slots[i]);
        chosen[order[i]] = slots[i];
    }
    return chosen;
}

// Counts which neurons followed those of the layer before, and how many predicted neurons were used.
void NeuronCache::learn(const LayerState& before, LayerState& state) {
    if (before.requested.size() > kMaxPredicted || state.requested.size() > kMaxPredicted) return;
    const auto is_used = [&](int32_t neuron) {
        return std::find(state.requested.begin(), state.requested.end(), neuron) != state.requested.end();
    };
    if (!state.predicted.empty()) {
        const auto used = std::count_if(state.predicted.begin(), state.predicted.end(), is_used);
        const double share = static_cast<double>(used) / static_cast<double>(state.predicted.size());
        accuracy_ += (share - accuracy_) * kAccuracyWeight;
    }
    for (const int32_t a : before.requested)
        for (const int32_t b : state.requested)
            state.follows[static_cast<size_t>(a) * state.shape.num_neurons + b] += state.gain;
}

// Predicts as many neurons of the next layer as this one uses: those that followed them most often.
void NeuronCache::predict_next(int layer) {
    const LayerState& state = layers_[layer];
    LayerState& next = layers_[layer + 1];
    next.predicted.clear();
    const size_t count = state.requested.size();
    if (count > kMaxPredicted || count > static_cast<size_t>(next.shape.num_neurons)) return;
    const size_t width = next.shape.num_neurons;
    scores_.assign(width, 0.0F);
    for (const int32_t neuron : state.requested)
        for (size_t n = 0; n < width; n++) scores_[n] += next.follows[neuron * width + n];
    std::vector<int32_t> best(width);
    std::iota(best.begin(), best.end(), 0);
    std::partial_sort(
        best.begin(), best.begin() + static_cast<ptrdiff_t>(count), best.end(),
        [&](int32_t a, int32_t b) { return std::pair(-scores_[a], a) < std::pair(-scores_[b], b); });
    for (size_t i = 0; i < count; i++)
        if (scores_[best[i]] > 0 && next.slot_by_neuron[best[i]] < 0) next.predicted.push_back(best[i]);
    std::sort(next.predicted.begin(), next.predicted.end());
    if (accuracy_ >= kMinAccuracy) prefetch(layer + 1, next.predicted);
}

// Sorts the marked neurons into those in memory and those that are missing, and clears the marks.
void NeuronCache::collect_marks(LayerState& state) {
    state.requested.clear();
    missing_.clear();
    for (int neuron = 0; neuron < state.shape.num_neurons; neuron++) {
        if (!marks_[neuron].load(std::memory_order_relaxed)) continue;
        marks_[neuron].store(0, std::memory_order_relaxed);
        const int slot = state.slot_by_neuron[neuron];
        if (slot < 0) {
            missing_.push_back(neuron);
            continue;
        }
        if (state.used_at[slot] != kPinned) state.used_at[slot] = now_;
        if (state.is_prefetched[neuron]) num_prefetched_used_.fetch_add(1, std::memory_order_relaxed);
        state.requested.push_back(neuron);
    }
    std::fill(state.is_prefetched.begin(), state.is_prefetched.end(), 0);
}

// Empties slots of neurons that no step of the window has used.
void NeuronCache::evict_old(LayerState& state) const {
    if (!source_.window) return;
    for (int slot = 0; slot < state.shape.num_slots; slot++)
        if (state.neuron_by_slot[slot] >= 0 && state.used_at[slot] < now_ - source_.window)
            clear(state, slot);
}

void NeuronCache::clear(LayerState& state, int slot) {
    state.slot_by_neuron[state.neuron_by_slot[slot]] = -1;
    state.neuron_by_slot[slot] = -1;
    state.used_at[slot] = -1;
}

// Empty slots first, then the least recently or, with counts, the least often used.
std::vector<int32_t> NeuronCache::free_slots(LayerState& state, size_t count) const {
    std::vector<int32_t> found;
    for (int slot = 0; slot < state.shape.num_slots; slot++)
        if (state.used_at[slot] < now_) found.push_back(slot);
    if (found.size() < count) return {};
    const auto end = found.begin() + static_cast<ptrdiff_t>(count);
    const auto last_use = [&](int32_t slot) {
        if (state.uses.empty()) return static_cast<double>(state.used_at[slot]);
        const int neuron = state.neuron_by_slot[slot];
        return neuron < 0 ? -1.0 : state.uses[neuron];
    };
    std::nth_element(found.begin(), end, found.end(), [&](int32_t a, int32_t b) {
        return std::pair(last_use(a), a) < std::pair(last_use(b), b);
    });
    found.erase(end, found.end());
    for (const int32_t slot : found)
        if (state.neuron_by_slot[slot] >= 0) clear(state, slot);
    return found;
}

// Merges neighbouring records into one read if the gap between them costs less than another read.
std::vector<NeuronCache::Job> NeuronCache::make_jobs(const std::vector<Read>& reads,
                                                     const LayerState& state) const {
    const auto record = static_cast<int64_t>(state.shape.record_bytes);
    std::vector<Job> jobs;
    for (int i = 0; i < static_cast<int>(reads.size()); i++) {
        const int64_t end = reads[i].offset + record;
        if (!jobs.empty()) {
            Job& last = jobs.back();
            const int64_t gap = reads[i].offset - (reads[i - 1].offset + record);
            if (gap <= static_cast<int64_t>(source_.gap_bytes) &&
                end - reads[last.first].offset <= static_cast<int64_t>(source_.max_read_bytes)) {
                last.end = i + 1;
                last.bytes = static_cast<size_t>(aligned_up(end) - last.offset);
                continue;
            }
        }
        const int64_t offset = aligned_down(reads[i].offset);
        jobs.push_back({offset, static_cast<size_t>(aligned_up(end) - offset), i, i + 1});
    }
    return jobs;
}

// Copies the records of a read to their slots.
void NeuronCache::copy_records(const Job& job, const std::vector<Read>& reads, size_t record,
                               const uint8_t* buffer) {
    for (int i = job.first; i < job.end; i++)
        std::memcpy(reads[i].to, buffer + (reads[i].offset - job.offset), record);
}

NeuronCache::Prefetch* NeuronCache::next_prefetch() {
    for (Prefetch& prefetch : prefetches_)
        if (prefetch.next < prefetch.jobs.size()) return &prefetch;
    return nullptr;
}

void NeuronCache::serve(int thread) {
    std::unique_lock lock(mutex_);
    const auto has_job = [&] { return next_ < jobs_.size() && !failed_; };
    while (true) {
        may_read_.wait(lock, [&] { return stopping_ || has_job() || next_prefetch(); });
        if (stopping_) return;
        if (has_job())
            read_job(lock, buffer(thread));
        else
            read_prefetch(lock, *next_prefetch(), buffer(thread));
        has_arrived_.notify_all();
    }
}

// Runs the next read that a step has requested.
void NeuronCache::read_job(std::unique_lock<std::mutex>& lock, uint8_t* buffer) {
    const size_t index = next_++;
    const Job job = jobs_[index];
    const size_t record = running_->shape.record_bytes;
    in_flight_++;
    lock.unlock();
    const auto failure = file_->read(job.offset, job.bytes, buffer, bytes_read_);
    if (!failure) copy_records(job, reads_, record, buffer);
    lock.lock();
    in_flight_--;
    is_done_[index] = !failure;
    if (failure && !failed_) {
        failure_ = failure;
        failed_.store(true, std::memory_order_release);
    }
    while (done_ < jobs_.size() && is_done_[done_]) done_++;
    arrived_.store(done_ < jobs_.size() ? jobs_[done_].first : static_cast<int>(reads_.size()),
                   std::memory_order_release);
}

// Runs the next read of a prefetch. Failures are ignored: if its neurons are requested, they are read
// again.
void NeuronCache::read_prefetch(std::unique_lock<std::mutex>& lock, Prefetch& prefetch, uint8_t* buffer) {
    const Job job = prefetch.jobs[prefetch.next++];
    LayerState& state = *prefetch.state;
    prefetch.in_flight++;
    lock.unlock();
    const auto failure = file_->read(job.offset, job.bytes, buffer, bytes_read_);
    if (!failure) copy_records(job, prefetch.reads, state.shape.record_bytes, buffer);
    lock.lock();
    prefetch.in_flight--;
    for (int i = job.first; i < job.end; i++) {
        const auto [offset, to, neuron, slot] = prefetch.reads[i];
        if (failure) {
            state.used_at[slot] = -1;
            continue;
        }
        state.slot_by_neuron[neuron] = slot;
        state.neuron_by_slot[slot] = neuron;
        state.is_prefetched[neuron] = 1;
        num_prefetched_.fetch_add(1, std::memory_order_relaxed);
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

// After a failed read, the slots reserved for the layer are empty.
void NeuronCache::end_step() {
    finish_prefetch(nullptr);
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
    file_->raise(failure);
}

}  // namespace octavo
