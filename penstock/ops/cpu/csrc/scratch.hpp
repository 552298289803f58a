// Scratch memory that calls reuse.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace penstock {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t align(int64_t bytes) { return divide_up(bytes, 64) * 64; }

// Belongs to the call in progress (see in_turn) and is valid until it asks for more. Never freed: at
// exit, threads may still compute while destructors run.
class Scratch {
  public:
    // Throws std::bad_alloc. The old contents are then lost, and a smaller request may succeed.
    uint8_t* get(int64_t bytes) {
        if (bytes > size_) {
            std::free(memory_);
            size_ = 0;
            memory_ = static_cast<uint8_t*>(std::aligned_alloc(64, align(bytes)));
            if (memory_ == nullptr) throw std::bad_alloc();
            size_ = align(bytes);
        }
        return memory_;
    }

    float* floats(int64_t count) { return reinterpret_cast<float*>(get(count * sizeof(float))); }

  private:
    uint8_t* memory_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace penstock
