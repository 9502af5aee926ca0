// A machine for the kernels' own source on a CPU, made to be unkind: blocks run in random order, and in a block the
// threads, each on a stack of its own, take turns in random order between barriers and shuffles. Shared memory starts
// as NaN. An asynchronous copy turns its destination into NaN at once and lands when its thread waits for it. What a
// GPU would let pass or hang on (threads at different barriers, copies that nobody waits for, addresses outside of what
// belongs to the launch) is an error with a name.
#pragma once
#include <math.h>
#include <string.h>

#define __device__
#define __forceinline__ inline

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };

namespace shim {

struct Index { int x, y, z; };
struct Entry { const char* name; void (*kernel)(const void*); };

extern const Entry entries[];  // ends with a null name
const Index& thread_index();
const Index& block_index();
unsigned char* shared_memory();
void barrier(int line);
int lane();
void exchange(unsigned mask, const void* mine, void* others, int bytes, int from_lane);
void async_copy(void* to, const void* from, bool live);
void commit();
void wait(int newest);

template <typename T>
T shuffle(unsigned mask, T value, int from_lane) {
    T other;
    exchange(mask, &value, &other, sizeof(T), from_lane);
    return other;
}

}  // namespace shim

#define threadIdx shim::thread_index()
#define blockIdx shim::block_index()
#define __syncthreads() shim::barrier(__LINE__)
#define __shfl_sync(mask, value, from_lane) shim::shuffle(mask, value, from_lane)
#define __shfl_xor_sync(mask, value, far) shim::shuffle(mask, value, shim::lane() ^ (far))
#define DYNAMIC_SHARED(name) unsigned char* const name = shim::shared_memory()

inline int min(int a, int b) { return a < b ? a : b; }

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}

inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline float half_to_float(unsigned short bits) {
    const unsigned size = bits & 0x7fffu, sign = (bits & 0x8000u) << 16;
    if (size >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (size << 13));
    return __uint_as_float(sign | __float_as_uint(ldexpf(__uint_as_float(size << 13), 127 - 15)));
}

inline unsigned short float_to_half(float x) {  // to nearest, ties to even
    const unsigned sign = (__float_as_uint(x) >> 16) & 0x8000u;
    const float size = fabsf(x);
    if (x != x) return 0x7e00u;
    if (size >= 65520.0f) return static_cast<unsigned short>(sign | 0x7c00u);
    if (size < 0x1p-14f) return static_cast<unsigned short>(sign | static_cast<unsigned>(rintf(size * 0x1p24f)));
    unsigned bits = __float_as_uint(size);
    bits += 0xfffu + ((bits >> 13) & 1u);
    return static_cast<unsigned short>(sign | ((bits >> 13) - ((127u - 15u) << 10)));
}

inline float exp2_fast(float x) { return exp2f(x); }
inline float reciprocal_fast(float x) { return 1.0f / x; }
inline void async_copy_16(void* to, const void* from, bool live) { shim::async_copy(to, from, live); }
inline void async_commit() { shim::commit(); }
template <int newest>
void async_wait() { shim::wait(newest); }
