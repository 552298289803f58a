// A fork/join pool for loops of a few microseconds.
#pragma once

#include <cstdint>

namespace penstock {

// body(context, index, thread): one piece of a loop. `thread` is below num_threads().
using LoopBody = void (*)(void* context, int64_t index, int thread);

// The number of threads that loops run on, the calling one among them. Returns how many they are: less
// than asked for where the system gives no more. Waits for the loop in progress.
int set_num_threads(int count);
int num_threads();

// Runs body for every index below `count` and returns when all are done. Pieces are handed out one
// by one, so a thread that the system does not run holds nobody up.
void parallel_for(int64_t count, LoopBody body, void* context);

// The same for a callable: for_each(count, [&](int64_t index, int thread) { ... }).
template <class Body>
void for_each(int64_t count, const Body& body) {
    parallel_for(
        count,
        [](void* context, int64_t index, int thread) {
            (*static_cast<const Body*>(context))(index, thread);
        },
        const_cast<Body*>(&body));
}

}  // namespace penstock
