#include "kv_spill.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "direct_file.h"

namespace octavo {

KvSpill::KvSpill(const Source& source, Shape shape, Memory& memory)
    : source_(source),
      file_(fcntl(source.file, F_DUPFD_CLOEXEC, 0)),
      shape_(std::move(shape)),
      pages_(memory),
      scratch_(shape_.record_bytes) {
    if (source_.num_threads < 1 || source_.num_kept < 1 || shape_.layers.empty() || !bytes() ||
        bytes() % kRecordAlign || shape_.used_bytes > bytes())
        throw std::logic_error("invalid KV records");
    if (file_ < 0) raise(false, errno, 0);
    direct_ = set_direct(file_);  // not every file system supports it
    const auto blocks = static_cast<size_t>(shape_.num_blocks);
    for (const int layer : shape_.layers) {
        if (layer >= static_cast<int>(layer_index_.size()))
            layer_index_.resize(static_cast<size_t>(layer) + 1, -1);
        const size_t end = (static_cast<size_t>(layer) + 1) * blocks * bytes();
        if (layer < 0 || layer_index_[layer] >= 0 || end > memory.size())
            throw std::logic_error("a layer with invalid records");
        layer_index_[layer] = static_cast<int>(layers_.size());
        layers_.push_back({.memory = memory.data() + end - blocks * bytes(),
                           .file_offset = static_cast<int64_t>(layers_.size() * blocks * bytes()),
                           .locations = std::vector<Location>(blocks, Location::none),
                           .used_at = std::vector<int64_t>(blocks, 0),
                           .in_memory = {},
                           .is_prefetched = std::vector<uint8_t>(blocks, 0)});
    }
    try {
        for (int t = 0; t < source_.num_threads; t++) threads_.emplace_back([this] { serve(); });
    } catch (...) {
        stop();
        throw;
    }
}

KvSpill::~KvSpill() { stop(); }

void KvSpill::stop() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    has_jobs_.notify_all();
    for (auto& thread : threads_) thread.join();
    close(file_);
}

int64_t KvSpill::num_in_memory() const {
    int64_t count = 0;
    for (const Layer& layer : layers_) count += static_cast<int64_t>(layer.in_memory.size());
    return count;
}

void KvSpill::begin_step(std::vector<int32_t> written, const std::vector<int32_t>& continued) {
    written_ = std::move(written);
    failure_.clear();
    running_ = nullptr;
    now_++;
    std::vector<int32_t> missing;
    for (Layer& layer : layers_) {
        missing.clear();
        mark_used(layer, continued, missing);
        make_room(layer, missing.size());
        add_jobs(layer, missing, false);
    }
    run_jobs();
    throw_failure();
}

// Evicts the previous layer's excess first, so that at most one layer exceeds its share.
void KvSpill::request(int layer, const std::vector<int32_t>& blocks) {
    Layer& requested = get_layer(layer);
    run_jobs();  // of a prefetch
    now_++;
    if (running_ && running_ != &requested) make_room(*running_, 0);
    running_ = &requested;
    std::vector<int32_t> missing;
    for (const int32_t block : written_) {
        add_to_memory(requested, block);
        requested.locations[block] = Location::memory;
        requested.used_at[block] = 2 * now_ + 1;
    }
    num_found_ += mark_used(requested, blocks, missing);
    count_prefetched_used(requested);
    num_read_ += static_cast<int64_t>(missing.size());
    make_room(requested, missing.size());
    add_jobs(requested, missing, false);
    run_jobs();
}

// Blocks that the step writes are skipped: their bytes change during the read.
void KvSpill::prefetch(int layer, const std::vector<int32_t>& blocks) {
    Layer& target = get_layer(layer);
    for (const int32_t block : written_) target.used_at[block] = 2 * now_ + 1;
    std::vector<int32_t> missing;
    mark_used(target, blocks, missing);
    const auto is_used = [&](int32_t block) { return is_used_now(target, block); };
    const auto in_use = std::count_if(target.in_memory.begin(), target.in_memory.end(), is_used);
    const auto room = std::max<int64_t>(0, source_.num_kept - in_use);
    missing.resize(std::min(missing.size(), static_cast<size_t>(room)));
    make_room(target, missing.size());
    add_jobs(target, std::move(missing), false, true);
    has_jobs_.notify_all();
}

void KvSpill::count_prefetched_used(Layer& layer) {
    for (size_t block = 0; block < layer.is_prefetched.size(); block++)
        num_prefetched_used_ += layer.is_prefetched[block] && is_used_now(layer, static_cast<int32_t>(block));
    std::fill(layer.is_prefetched.begin(), layer.is_prefetched.end(), 0);
}

void KvSpill::end_step() {
    run_jobs();  // of a prefetch that no layer has requested
    written_.clear();
    now_++;
    if (running_) make_room(*std::exchange(running_, nullptr), 0);
    run_jobs();
    throw_failure();
}

void KvSpill::throw_failure() {
    if (!failure_.empty()) throw KvSpillError(std::exchange(failure_, {}));
}

// Adds a record to the list of those in memory.
void KvSpill::add_to_memory(Layer& layer, int32_t block) {
    const Location location = layer.locations[block];
    if (location == Location::none || location == Location::file) layer.in_memory.push_back(block);
}

// Marks blocks as used now, collects those that are only in the file in `missing`, and returns the number
// of the others. Blocks that were never written have no data to read; no row reads their keys.
int64_t KvSpill::mark_used(Layer& layer, const std::vector<int32_t>& blocks, std::vector<int32_t>& missing) {
    int64_t found = 0;
    for (const int32_t block : blocks) {
        if (is_used_now(layer, block)) continue;
        layer.used_at[block] = 2 * now_;
        if (layer.locations[block] == Location::file)
            missing.push_back(block);
        else
            found++;
    }
    return found;
}

// Evicts the least recently used records until the layer, with `missing` more, has at most its share.
void KvSpill::make_room(Layer& layer, size_t missing) {
    const size_t wanted = layer.in_memory.size() + missing, kept = static_cast<size_t>(source_.num_kept);
    if (wanted <= kept) return;
    std::vector<int32_t> old;
    for (const int32_t block : layer.in_memory)
        if (!is_used_now(layer, block)) old.push_back(block);
    const size_t count = std::min(old.size(), wanted - kept);
    const auto end = old.begin() + static_cast<ptrdiff_t>(count);
    const auto is_older = [&](int32_t a, int32_t b) {
        return std::pair(layer.used_at[a], a) < std::pair(layer.used_at[b], b);
    };
    if (end != old.end()) std::nth_element(old.begin(), end, old.end(), is_older);
    old.erase(end, old.end());
    const auto changed = std::partition(
        old.begin(), old.end(), [&](int32_t block) { return layer.locations[block] == Location::both; });
    for (auto block = old.begin(); block != changed; ++block) evict(layer, *block);
    old.erase(old.begin(), changed);
    add_jobs(layer, std::move(old), true);
}

// Releases the pages of a record whose data is in the file.
void KvSpill::evict(Layer& layer, int32_t block) {
    layer.locations[block] = Location::file;
    layer.is_prefetched[block] = 0;
    auto& list = layer.in_memory;
    list.erase(std::find(list.begin(), list.end(), block));
    pages_.release(static_cast<size_t>(layer.memory - pages_.data()) + static_cast<size_t>(block) * bytes(),
                   bytes());
}

void KvSpill::add_jobs(Layer& layer, std::vector<int32_t> blocks, bool writes, bool is_prefetch) {
    std::sort(blocks.begin(), blocks.end());
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < blocks.size(); i++) {
        const bool follows = i && blocks[i] == blocks[i - 1] + 1;
        if (follows && static_cast<size_t>(jobs_.back().count + 1) * bytes() <= kMaxJobBytes)
            jobs_.back().count++;
        else
            jobs_.push_back({.layer = &layer,
                             .first = blocks[i],
                             .count = 1,
                             .writes = writes,
                             .is_prefetch = is_prefetch});
    }
}

// Waits until all jobs are done and updates the locations of their records.
void KvSpill::run_jobs() {
    std::unique_lock lock(mutex_);
    if (jobs_.empty()) return;
    const auto start = std::chrono::steady_clock::now();
    has_jobs_.notify_all();
    are_done_.wait(lock, [&] { return done_ == jobs_.size(); });
    wait_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const std::vector<Job> jobs = std::exchange(jobs_, {});
    next_ = done_ = 0;
    lock.unlock();
    for (const Job& job : jobs) finish(job);
}

// A record that could not be written stays in memory; one that could not be read stays in the file.
void KvSpill::finish(const Job& job) {
    if (job.code && job.is_prefetch) return;  // read again if it is requested
    if (job.code) {
        try {
            raise(job.writes, job.code, job.failed_at);
        } catch (const KvSpillError& error) {
            if (failure_.empty()) failure_ = error.what();
        }
        return;
    }
    (job.writes ? bytes_written_ : bytes_read_) +=
        static_cast<int64_t>(static_cast<size_t>(job.count) * bytes());
    for (int32_t block = job.first; block < job.first + job.count; block++) {
        if (job.writes) {
            evict(*job.layer, block);
        } else {
            add_to_memory(*job.layer, block);
            job.layer->locations[block] = Location::both;
            job.layer->is_prefetched[block] = job.is_prefetch;
            num_prefetched_ += job.is_prefetch;
        }
    }
}

void KvSpill::serve() {
    std::unique_lock lock(mutex_);
    while (true) {
        has_jobs_.wait(lock, [&] { return stopping_ || next_ < jobs_.size(); });
        if (stopping_) return;
        const size_t index = next_++;
        Job job = jobs_[index];
        lock.unlock();
        do_job(job);
        lock.lock();
        jobs_[index] = job;
        if (++done_ == jobs_.size()) are_done_.notify_all();
    }
}

void KvSpill::do_job(Job& job) const {
    const size_t at = static_cast<size_t>(job.first) * bytes();
    job.failed_at = job.layer->file_offset + static_cast<int64_t>(at);
    job.code =
        transfer(job.writes, job.layer->memory + at, static_cast<size_t>(job.count) * bytes(), job.failed_at);
}

// Reads or writes all bytes. Returns 0, or the error code of the failure at `offset`.
int KvSpill::transfer(bool writes, uint8_t* at, size_t bytes, int64_t& offset) const {
    while (bytes) {
        const ssize_t done =
            writes ? source_.write_at(file_, at, bytes, offset) : source_.read_at(file_, at, bytes, offset);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return errno;
        if (done == 0 || (direct_ && done % static_cast<ssize_t>(kRecordAlign))) return kEnded;
        at += done, offset += done, bytes -= static_cast<size_t>(done);
    }
    return 0;
}

void KvSpill::raise(bool writes, int code, int64_t offset) {
    throw KvSpillError("keys and values could not be " + std::string(writes ? "written to" : "read from") +
                       " their file in kv_spill_dir at byte " + std::to_string(offset) + ": " +
                       (code == kEnded ? "it ends too early" : std::strerror(code)));
}

void KvSpill::read_record(int layer, int block, uint8_t* to) {
    const Layer& state = get_layer(layer);
    const uint8_t* from = state.memory + static_cast<size_t>(block) * bytes();
    if (state.locations[block] == Location::file) {
        int64_t offset = state.file_offset + static_cast<int64_t>(static_cast<size_t>(block) * bytes());
        if (const int code = transfer(false, scratch_.data(), bytes(), offset)) raise(false, code, offset);
        bytes_read_ += static_cast<int64_t>(bytes());
        from = scratch_.data();
    }
    std::memcpy(to, from, shape_.used_bytes);
}

// Writes to memory if the layer has room, else to the file.
void KvSpill::write_record(int layer, int block, const uint8_t* from) {
    Layer& state = get_layer(layer);
    const Location location = state.locations[block];
    const bool is_there = location == Location::both || location == Location::memory;
    if (is_there || state.in_memory.size() < static_cast<size_t>(source_.num_kept)) {
        add_to_memory(state, block);
        state.locations[block] = Location::memory;
        state.used_at[block] = 2 * now_;
        std::memcpy(state.memory + static_cast<size_t>(block) * bytes(), from, shape_.used_bytes);
        return;
    }
    std::memcpy(scratch_.data(), from, shape_.used_bytes);
    int64_t offset = state.file_offset + static_cast<int64_t>(static_cast<size_t>(block) * bytes());
    if (const int code = transfer(true, scratch_.data(), bytes(), offset)) raise(true, code, offset);
    bytes_written_ += static_cast<int64_t>(bytes());
    state.locations[block] = Location::file;
}

}  // namespace octavo
