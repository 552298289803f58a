// A fork/join pool for loops of a few microseconds.
#pragma once

#include <cstdint>
#include <mutex>

namespace penstock {

// body(context, index, scratch): one piece of a loop. `scratch` belongs to the running thread. Must
// not throw.
using LoopBody = void (*)(void* context, int64_t index, uint8_t* scratch);

// Held by callers of the functions below, except num_threads: one call of the library at a time.
std::mutex& turn_mutex();

// Sets the number of threads of loops, including the caller. Returns the actual number, which is
// lower if the system allows no more.
int set_num_threads(int count);
int num_threads();

// Runs body for every index below `count` and returns when all are done. Pieces are claimed one by
// one, so a descheduled thread does not delay the others. Memory, `scratch_bytes` per thread, is
// allocated before the first piece begins, and std::bad_alloc is thrown only then.
void parallel_for(int64_t count, int64_t scratch_bytes, LoopBody body, void* context);

// The same for a callable: for_each(count, bytes, [&](int64_t index, uint8_t* scratch) { ... }).
template <class Body>
void for_each(int64_t count, int64_t scratch_bytes, const Body& body) {
    parallel_for(
        count, scratch_bytes,
        [](void* context, int64_t index, uint8_t* scratch) {
            (*static_cast<const Body*>(context))(index, scratch);
        },
        const_cast<Body*>(&body));
}

}  // namespace penstock
