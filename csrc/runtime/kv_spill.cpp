#include "kv_spill.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

namespace octavo {

namespace {

// Not every file system has reads and writes that pass by the cache.
bool set_direct(int file) {
    const int flags = fcntl(file, F_GETFL);
    return flags >= 0 && fcntl(file, F_SETFL, flags | O_DIRECT) == 0;
}

}  // namespace

KvSpill::KvSpill(const Source& source, Shape shape, Memory& memory)
    : source_(source),
      file_(fcntl(source.file, F_DUPFD_CLOEXEC, 0)),
      shape_(std::move(shape)),
      pages_(memory),
      scratch_(shape_.record_bytes) {
    if (source_.num_threads < 1 || source_.num_kept < 1 || shape_.layers.empty() || !bytes() ||
        bytes() % kRecordAlign || shape_.used_bytes > bytes())
        throw std::logic_error("records of keys and values that are none");
    if (file_ < 0) raise(false, errno, 0);
    direct_ = set_direct(file_);
    const auto blocks = static_cast<size_t>(shape_.num_blocks);
    for (const int layer : shape_.layers) {
        if (layer >= static_cast<int>(index_of_.size())) index_of_.resize(static_cast<size_t>(layer) + 1, -1);
        const size_t end = (static_cast<size_t>(layer) + 1) * blocks * bytes();
        if (layer < 0 || index_of_[layer] >= 0 || end > memory.size())
            throw std::logic_error("a layer whose records lie wrong");
        index_of_[layer] = static_cast<int>(layers_.size());
        layers_.push_back({.memory = memory.data() + end - blocks * bytes(),
                           .file_offset = static_cast<int64_t>(layers_.size() * blocks * bytes()),
                           .homes = std::vector<Home>(blocks, Home::none),
                           .used_at = std::vector<int64_t>(blocks, 0),
                           .in_memory = {},
                           .is_foreseen = std::vector<uint8_t>(blocks, 0)});
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
        ask(layer, continued, missing);
        make_room(layer, missing.size());
        add_jobs(layer, missing, false);
    }
    run_jobs();
    throw_failure();
}

// The layer before gives back what is more than its share first, so that at most one layer has more.
void KvSpill::request(int layer, const std::vector<int32_t>& blocks) {
    Layer& asked = layer_of(layer);
    run_jobs();  // those of a guess
    now_++;
    if (running_ && running_ != &asked) make_room(*running_, 0);
    running_ = &asked;
    std::vector<int32_t> missing;
    for (const int32_t block : written_) {
        take_in(asked, block);
        asked.homes[block] = Home::memory;
        asked.used_at[block] = 2 * now_ + 1;
    }
    num_found_ += ask(asked, blocks, missing);
    count_foreseen(asked);
    num_read_ += static_cast<int64_t>(missing.size());
    make_room(asked, missing.size());
    add_jobs(asked, missing, false);
    run_jobs();
}

// Blocks that the step writes are left alone: their bytes change while the guess is read.
void KvSpill::foresee(int layer, const std::vector<int32_t>& blocks) {
    Layer& guessed = layer_of(layer);
    for (const int32_t block : written_) guessed.used_at[block] = 2 * now_ + 1;
    std::vector<int32_t> missing;
    ask(guessed, blocks, missing);
    const auto is_used = [&](int32_t block) { return is_used_now(guessed, block); };
    const auto in_use = std::count_if(guessed.in_memory.begin(), guessed.in_memory.end(), is_used);
    const auto room = std::max<int64_t>(0, source_.num_kept - in_use);
    missing.resize(std::min(missing.size(), static_cast<size_t>(room)));
    make_room(guessed, missing.size());
    add_jobs(guessed, std::move(missing), false, true);
    has_jobs_.notify_all();
}

void KvSpill::count_foreseen(Layer& layer) {
    for (size_t block = 0; block < layer.is_foreseen.size(); block++)
        num_foreseen_used_ += layer.is_foreseen[block] && is_used_now(layer, static_cast<int32_t>(block));
    std::fill(layer.is_foreseen.begin(), layer.is_foreseen.end(), 0);
}

void KvSpill::end_step() {
    run_jobs();  // of a guess that no layer asked for any more
    written_.clear();
    now_++;
    if (running_) make_room(*std::exchange(running_, nullptr), 0);
    run_jobs();
    throw_failure();
}

void KvSpill::throw_failure() {
    if (!failure_.empty()) throw KvSpillError(std::exchange(failure_, {}));
}

// Takes a record's place in memory as its home too.
void KvSpill::take_in(Layer& layer, int32_t block) {
    const Home home = layer.homes[block];
    if (home == Home::none || home == Home::file) layer.in_memory.push_back(block);
}

// Marks blocks as used now, and collects those that are in the file alone; returns the number of the others. What was
// never written has no bytes to bring: it is a place whose keys no row reads.
int64_t KvSpill::ask(Layer& layer, const std::vector<int32_t>& blocks, std::vector<int32_t>& missing) {
    int64_t found = 0;
    for (const int32_t block : blocks) {
        if (is_used_now(layer, block)) continue;
        layer.used_at[block] = 2 * now_;
        if (layer.homes[block] == Home::file)
            missing.push_back(block);
        else
            found++;
    }
    return found;
}

// Has the records leave that were used the longest ago, as far as the layer has more than its share.
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
    const auto changed = std::partition(old.begin(), old.end(),
                                        [&](int32_t block) { return layer.homes[block] == Home::both; });
    for (auto block = old.begin(); block != changed; ++block) drop(layer, *block);
    old.erase(old.begin(), changed);
    add_jobs(layer, std::move(old), true);
}

// Gives a record's pages back, whose bytes are in the file.
void KvSpill::drop(Layer& layer, int32_t block) {
    layer.homes[block] = Home::file;
    layer.is_foreseen[block] = 0;
    auto& list = layer.in_memory;
    list.erase(std::find(list.begin(), list.end(), block));
    pages_.give_back(static_cast<size_t>(layer.memory - pages_.data()) + static_cast<size_t>(block) * bytes(),
                     bytes());
}

void KvSpill::add_jobs(Layer& layer, std::vector<int32_t> blocks, bool writes, bool is_guess) {
    std::sort(blocks.begin(), blocks.end());
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < blocks.size(); i++) {
        const bool follows = i && blocks[i] == blocks[i - 1] + 1;
        if (follows && static_cast<size_t>(jobs_.back().count + 1) * bytes() <= kMostBytes)
            jobs_.back().count++;
        else
            jobs_.push_back(
                {.layer = &layer, .first = blocks[i], .count = 1, .writes = writes, .is_guess = is_guess});
    }
}

// Waits until all jobs are done, and notes where their records are then.
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
    if (job.code && job.is_guess) return;  // it is read again if it is asked for
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
            drop(*job.layer, block);
        } else {
            take_in(*job.layer, block);
            job.layer->homes[block] = Home::both;
            job.layer->is_foreseen[block] = job.is_guess;
            num_foreseen_ += job.is_guess;
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

// Reads or writes all bytes; returns 0, or what failed at `offset`.
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
    const Layer& of = layer_of(layer);
    const uint8_t* from = of.memory + static_cast<size_t>(block) * bytes();
    if (of.homes[block] == Home::file) {
        int64_t offset = of.file_offset + static_cast<int64_t>(static_cast<size_t>(block) * bytes());
        if (const int code = transfer(false, scratch_.data(), bytes(), offset)) raise(false, code, offset);
        bytes_read_ += static_cast<int64_t>(bytes());
        from = scratch_.data();
    }
    std::memcpy(to, from, shape_.used_bytes);
}

// Goes to memory where the layer has room for it.
void KvSpill::write_record(int layer, int block, const uint8_t* from) {
    Layer& of = layer_of(layer);
    const Home home = of.homes[block];
    const bool is_there = home == Home::both || home == Home::memory;
    if (is_there || of.in_memory.size() < static_cast<size_t>(source_.num_kept)) {
        take_in(of, block);
        of.homes[block] = Home::memory;
        of.used_at[block] = 2 * now_;
        std::memcpy(of.memory + static_cast<size_t>(block) * bytes(), from, shape_.used_bytes);
        return;
    }
    std::memcpy(scratch_.data(), from, shape_.used_bytes);
    int64_t offset = of.file_offset + static_cast<int64_t>(static_cast<size_t>(block) * bytes());
    if (const int code = transfer(true, scratch_.data(), bytes(), offset)) raise(true, code, offset);
    bytes_written_ += static_cast<int64_t>(bytes());
    of.homes[block] = Home::file;
}

}  // namespace octavo
