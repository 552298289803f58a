#include "thread_pool.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "scratch.hpp"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace penstock {
namespace {

// How long a waiting thread spins before it sleeps: longer than the gap between two loops of a step,
// and much shorter than a step.
constexpr auto kSpinTime = std::chrono::microseconds(150);
constexpr int kSpinsPerClockRead = 64;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// The loop in progress, in one word: number of the loop (24 bits) | next index (20) | count (20).
// A piece is claimed by compare-and-swap of the whole word, so a claim is valid only for the loop
// that the thread saw. A loop does not end before its claimed pieces are done.
constexpr int kIndexBits = 20;
constexpr int64_t kMaxCount = (int64_t{1} << kIndexBits) - 1;

inline int64_t next_index(uint64_t word) { return (word >> kIndexBits) & kMaxCount; }
inline int64_t loop_count(uint64_t word) { return word & kMaxCount; }

class Pool {
  public:
    int resize(int count) {
        if (count == size_) return count;
        stop();
        stopping_.store(false);
        try {
            for (int thread = 1; thread < count; ++thread) {
                threads_.emplace_back([this, thread] { work(thread); });
            }
        } catch (const std::exception&) {
            // The system allows no more threads. The caller learns the number: an exception must
            // not cross the C interface.
        }
        return size_ = static_cast<int>(threads_.size()) + 1;
    }

    int size() const { return size_; }

    void run(int64_t count, int64_t scratch_bytes, LoopBody body, void* context) {
        const bool is_shared = size_ > 1 && count > 1;
        take_scratch(scratch_bytes, is_shared ? size_.load() : 1);
        if (!is_shared) {
            for (int64_t index = 0; index < count; ++index) body(context, index, slices_);
            return;
        }
        for (int64_t first = 0; first < count; first += kMaxCount) {
            const int64_t part = count - first < kMaxCount ? count - first : kMaxCount;
            run_part(first, part, body, context);
        }
    }

    std::mutex turn_mutex;

  private:
    // One slice per thread, at the same address in every loop.
    void take_scratch(int64_t bytes, int threads) {
        slices_ = nullptr;
        slice_bytes_ = 0;
        if (bytes == 0) return;
        const int64_t largest = std::max(largest_slice_, align(bytes));
        slices_ = scratch_.get(largest * threads);
        slice_bytes_ = largest_slice_ = largest;
    }

    void run_part(int64_t first, int64_t count, LoopBody body, void* context) {
        body_ = body;
        context_ = context;
        first_ = first;
        done_.store(0, std::memory_order_relaxed);
        ++number_;
        const uint64_t word = (static_cast<uint64_t>(number_) << (2 * kIndexBits)) |
                              static_cast<uint64_t>(count);
        word_.store(word, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) {
            { std::lock_guard<std::mutex> lock(sleep_mutex_); }
            wake_.notify_all();
        }
        take_pieces(0);
        int spins = 0;
        while (done_.load(std::memory_order_acquire) != count) {
            // More threads than cores: yield to the thread with the last piece.
            if (++spins > 4000) std::this_thread::yield(); else pause();
        }
    }

    bool take_pieces(int thread) {
        bool took = false;
        uint64_t word = word_.load(std::memory_order_acquire);
        while (next_index(word) < loop_count(word)) {
            if (word_.compare_exchange_weak(word, word + (uint64_t{1} << kIndexBits),
                                            std::memory_order_acq_rel)) {
                body_(context_, first_ + next_index(word), slices_ + thread * slice_bytes_);
                done_.fetch_add(1, std::memory_order_release);
                took = true;
                word = word_.load(std::memory_order_acquire);
            }
        }
        return took;
    }

    bool has_work() const {
        const uint64_t word = word_.load(std::memory_order_seq_cst);
        return next_index(word) < loop_count(word) || stopping_.load(std::memory_order_relaxed);
    }

    void work(int thread) {
        while (!stopping_.load(std::memory_order_relaxed)) {
            const auto until = std::chrono::steady_clock::now() + kSpinTime;
            bool found = false;
            while (!found && std::chrono::steady_clock::now() < until) {
                for (int spin = 0; spin < kSpinsPerClockRead && !found; ++spin) {
                    found = has_work();
                    if (!found) pause();
                }
            }
            if (found) {
                take_pieces(thread);
                continue;
            }
            std::unique_lock<std::mutex> lock(sleep_mutex_);
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [this] { return has_work(); });
            sleepers_.fetch_sub(1, std::memory_order_relaxed);
        }
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(sleep_mutex_);
            stopping_.store(true);
        }
        wake_.notify_all();
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
    }

    std::vector<std::thread> threads_;
    std::atomic<int> size_{1};  // read by other threads while it changes

    LoopBody body_ = nullptr;
    void* context_ = nullptr;
    int64_t first_ = 0;
    Scratch scratch_;
    int64_t largest_slice_ = 0;
    uint8_t* slices_ = nullptr;  // of the loop in progress
    int64_t slice_bytes_ = 0;
    uint32_t number_ = 0;
    alignas(64) std::atomic<uint64_t> word_{0};
    alignas(64) std::atomic<int64_t> done_{0};

    std::mutex sleep_mutex_;
    std::condition_variable wake_;
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
};

// Never destroyed: at exit, the threads may be gone before destructors run. Not on the heap, so that
// creating it cannot fail.
Pool& pool() {
    alignas(Pool) static unsigned char memory[sizeof(Pool)];
    static Pool* instance = new (memory) Pool;
    return *instance;
}

}  // namespace

std::mutex& turn_mutex() { return pool().turn_mutex; }
int set_num_threads(int count) { return pool().resize(count); }
int num_threads() { return pool().size(); }
void parallel_for(int64_t count, int64_t scratch_bytes, LoopBody body, void* context) {
    pool().run(count, scratch_bytes, body, context);
}

}  // namespace penstock
