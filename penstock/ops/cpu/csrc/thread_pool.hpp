// A fork/join pool for loops of a few microseconds.
#pragma once

#include <cstdint>
#include <mutex>

namespace penstock {

// body(context, index, scratch): one piece of a loop. `scratch` is the running thread's own. Must not
// throw: a worker has nobody to tell.
using LoopBody = void (*)(void* context, int64_t index, uint8_t* scratch);

// Held by whoever uses what follows, but for num_threads: one call of the library at a time.
std::mutex& turn_mutex();

// The number of threads that loops run on, the calling one among them. Returns how many they are: less
// than asked for where the system gives no more.
int set_num_threads(int count);
int num_threads();

// Runs body for every index below `count` and returns when all are done. Pieces are handed out one
// by one, so a thread that the system does not run holds nobody up. Memory for all threads,
// `scratch_bytes` each, is taken before the first piece begins: std::bad_alloc is thrown then or never.
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
