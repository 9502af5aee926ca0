// What the kernels ask of the machine. No header of the CUDA toolkit is included, so that NVRTC can compile them on
// machines without one. The tests define BATCHJOB_HOST and bring the same few names for a CPU.
#pragma once

#ifdef BATCHJOB_HOST
#include "shim.h"
#else

#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

// Copies 16 bytes from global to shared memory past the first-level cache, or writes 16 zero bytes where `live` is
// false. What it writes may be read by this thread after `async_wait`, by others after a barrier that follows it.
__device__ __forceinline__ void async_copy_16(void* shared, const void* global, bool live) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    const int bytes = live ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
}

// Ends a group of copies of this thread; a group may be empty.
__device__ __forceinline__ void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `newest` of this thread's groups, the newest ones, are still on their way.
template <int newest>
__device__ __forceinline__ void async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(newest) : "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
    return result;
}

__device__ __forceinline__ unsigned short float_to_half(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

#endif
