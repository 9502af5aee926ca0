// The machine that shim.h describes.
#include "shim.h"

#include <setjmp.h>
#include <stdint.h>
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace shim {
namespace {

enum class State { ready, at_barrier, in_shuffle, done };

struct Copy { unsigned char* to; const unsigned char* from; bool live; };

struct Fiber {
    jmp_buf context;
    ucontext_t start;
    std::unique_ptr<unsigned char[]> stack;
    Index index;
    int number, barrier_line;
    State state;
    bool started;
    unsigned shuffles;                     // how many it began
    std::deque<std::vector<Copy>> groups;  // of copies; oldest first
    std::vector<Copy> open;
};

struct Warp {
    unsigned char slots[2][32][8];  // by the parity of the shuffle: no lane can be two ahead of another
    int arrived[2];
};

struct Range { const unsigned char* first; size_t bytes; };

constexpr size_t kStackBytes = 64 * 1024, kGuardBytes = 16 * 1024, kMaxShared = 256 * 1024;
constexpr unsigned char kGuard = 0xa5;

std::mt19937 random_bits;
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Warp> warps;
std::vector<int> ready;
Fiber* current;
Index block;
int threads, num_done, num_at_barrier, leader;
void (*body)(const void*);
const void* parameters;
jmp_buf scheduler;
std::string error;
Range copy_source;
alignas(128) unsigned char memory[kGuardBytes + kMaxShared + kGuardBytes];
unsigned char* const shared = memory + kGuardBytes;
size_t shared_bytes;

void fail(const std::string& message) {
    if (!error.empty()) return;
    error = message + " (block " + std::to_string(block.x) + ", " + std::to_string(block.y) + ", " +
            std::to_string(block.z) + ", thread " + std::to_string(current ? current->number : -1) + ")";
}

void suspend() {
    if (_setjmp(current->context) == 0) _longjmp(scheduler, 1);
}

void wake(Fiber& fiber) {
    fiber.state = State::ready;
    ready.push_back(fiber.number);
}

bool within(const unsigned char* at, size_t bytes, const Range& range) {
    return at >= range.first && at + bytes <= range.first + range.bytes;
}

void enter() {
    body(parameters);
    for (const auto& group : current->groups) {
        if (!group.empty()) fail("a copy that nobody waits for");
    }
    if (!current->open.empty()) fail("a copy of no group");
    current->state = State::done;
    ++num_done;
    _longjmp(scheduler, 1);
}

// Half of the blocks let one warp after the other run as far as it gets; the others mix all threads.
int pick() {
    size_t at = random_bits() % ready.size();
    if (leader >= 0) {
        for (size_t i = 0; i < ready.size(); ++i) {
            if (ready[i] / 32 == leader) at = i;
        }
        leader = ready[at] / 32;
    }
    std::swap(ready[at], ready.back());
    const int number = ready.back();
    ready.pop_back();
    return number;
}

void prepare_block() {
    memset(memory, kGuard, sizeof memory);
    memset(shared, 0xff, shared_bytes);
    warps.assign(threads / 32, Warp{});
    ready.clear();
    num_done = num_at_barrier = 0;
    leader = random_bits() % 2 ? static_cast<int>(random_bits() % (threads / 32)) : -1;
    while (static_cast<int>(fibers.size()) < threads) {
        fibers.push_back(std::make_unique<Fiber>());
        fibers.back()->stack.reset(new unsigned char[kStackBytes]);
    }
    for (int t = 0; t < threads; ++t) {
        Fiber& fiber = *fibers[t];
        fiber.index = Index{t, 0, 0};
        fiber.number = t;
        fiber.barrier_line = -1;
        fiber.started = false;
        fiber.shuffles = 0;
        fiber.groups.clear();
        fiber.open.clear();
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.get();
        fiber.start.uc_stack.ss_size = kStackBytes;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, enter, 0);
        wake(fiber);
    }
}

void run_block() {
    prepare_block();
    while (num_done < threads && error.empty()) {
        if (ready.empty()) {
            current = nullptr;
            fail("threads wait for each other: " + std::to_string(num_at_barrier) + " at a barrier, " +
                 std::to_string(num_done) + " done, of " + std::to_string(threads));
            return;
        }
        current = fibers[pick()].get();
        if (_setjmp(scheduler) == 0) {
            if (current->started) _longjmp(current->context, 1);
            current->started = true;
            setcontext(&current->start);
        }
    }
    for (size_t i = 0; i < kGuardBytes; ++i) {
        if (memory[i] != kGuard || shared[shared_bytes + i] != kGuard) {
            fail("a write outside of shared memory");
            return;
        }
    }
}

}  // namespace

const Index& thread_index() { return current->index; }
const Index& block_index() { return block; }
unsigned char* shared_memory() { return shared; }

void barrier(int line) {
    current->barrier_line = line;
    for (int t = 0; t < threads; ++t) {
        const Fiber& other = *fibers[t];
        if (other.state == State::at_barrier && other.barrier_line != line) fail("threads at different barriers");
    }
    current->state = State::at_barrier;
    if (++num_at_barrier == threads) {
        num_at_barrier = 0;
        for (int t = 0; t < threads; ++t) wake(*fibers[t]);
    }
    suspend();
}

int lane() { return current->number % 32; }

void exchange(unsigned mask, const void* mine, void* others, int bytes, int from_lane) {
    const int first = current->number - lane();
    if (mask != 0xffffffffu || bytes > 8 || from_lane < 0 || from_lane > 31) {
        fail("a shuffle that the machine cannot do");
        suspend();
    }
    Warp& warp = warps[current->number / 32];
    const int parity = current->shuffles++ % 2;
    memcpy(warp.slots[parity][lane()], mine, bytes);
    current->state = State::in_shuffle;
    if (++warp.arrived[parity] == 32) {
        warp.arrived[parity] = 0;
        for (int t = first; t < first + 32; ++t) wake(*fibers[t]);
    }
    suspend();
    memcpy(others, warp.slots[parity][from_lane], bytes);
}

void async_copy(void* to, const void* from, bool live) {
    const Copy copy{static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), live};
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
        fail("a copy off its 16 bytes");
    } else if (!within(copy.to, 16, Range{shared, shared_bytes})) {
        fail("a copy to outside of shared memory");
    } else if (live && !within(copy.from, 16, copy_source)) {
        fail("a copy from outside of the cache");
    } else {
        memset(copy.to, 0xff, 16);
        current->open.push_back(copy);
    }
}

void commit() {
    current->groups.push_back(std::move(current->open));
    current->open.clear();
}

void wait(int newest) {
    for (; static_cast<int>(current->groups.size()) > newest; current->groups.pop_front()) {
        for (const Copy& copy : current->groups.front()) {
            if (copy.live) {
                memcpy(copy.to, copy.from, 16);
            } else {
                memset(copy.to, 0, 16);
            }
        }
    }
}

}  // namespace shim

// Runs one launch of the kernel `name`. Asynchronous copies may read the cache alone, `cache_bytes` long. Returns what
// went wrong; an empty text if nothing did.
extern "C" const char* shim_launch(const char* name, const int* grid, int threads, int shared_bytes, const void* params,
                                   const void* cache, long cache_bytes, unsigned seed) {
    using namespace shim;
    random_bits.seed(seed);
    error.clear();
    current = nullptr;
    copy_source = Range{static_cast<const unsigned char*>(cache), static_cast<size_t>(cache_bytes)};
    const Entry* entry = entries;
    while (entry->name != nullptr && strcmp(entry->name, name) != 0) ++entry;
    if (entry->name == nullptr) return "no such kernel in the library";
    if (threads % 32 != 0 || static_cast<size_t>(shared_bytes) > kMaxShared) return "a launch that it cannot do";
    body = entry->kernel;
    parameters = params;
    shim::threads = threads;
    shim::shared_bytes = shared_bytes;
    std::vector<long> order(static_cast<long>(grid[0]) * grid[1] * grid[2]);
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<long>(i);
    std::shuffle(order.begin(), order.end(), random_bits);
    for (const long at : order) {
        block = Index{static_cast<int>(at % grid[0]), static_cast<int>(at / grid[0] % grid[1]),
                      static_cast<int>(at / grid[0] / grid[1])};
        run_block();
        if (!error.empty()) break;
    }
    return error.c_str();
}
