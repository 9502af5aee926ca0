// Stores the keys and values of new tokens in a paged cache. One thread moves eight neighbouring numbers.
#include "numbers.cuh"

constexpr int kWriteThreads = 256;

struct WriteParams {
    const void* kv;          // [num_tokens, 2, num_kv_heads, head_dim], tokens kv_stride apart
    void* cache;             // [num_blocks, 2, num_kv_heads, block_size, head_dim]
    const long long* slots;  // [num_tokens]: block * block_size + offset
    long long kv_stride;     // in numbers
    int num_tokens, num_kv_heads, head_dim, block_shift;  // block_size is 1 << block_shift
};

template <typename In, typename Cache>
__device__ __forceinline__ void write_kv(const WriteParams& p) {
    const int per_part = p.head_dim / 8, num_parts = 2 * p.num_kv_heads, per_token = num_parts * per_part;
    const long long index = static_cast<long long>(blockIdx.x) * kWriteThreads + threadIdx.x;
    const long long token = index / per_token;
    if (token >= p.num_tokens) return;
    const int within = static_cast<int>(index - token * per_token);
    const int part = within / per_part, dim = within % per_part * 8;
    const In* from = static_cast<const In*>(p.kv) + token * p.kv_stride + part * p.head_dim + dim;
    float numbers[8];
    load8(from, numbers);
#pragma unroll
    for (int i = 0; i < 8; ++i) numbers[i] = is_finite(numbers[i]) ? numbers[i] : 0.0f;
    const long long slot = p.slots[token], block = slot >> p.block_shift;
    const long long offset = slot - (block << p.block_shift);
    const long long row = ((block * num_parts + part) << p.block_shift) + offset;
    store8(static_cast<Cache*>(p.cache) + row * p.head_dim + dim, numbers);
}

#ifndef BATCHJOB_HOST
extern "C" __global__ void __launch_bounds__(kWriteThreads) batchjob_write_kv(const __grid_constant__ WriteParams p) {
    write_kv<BATCHJOB_IN, BATCHJOB_CACHE>(p);
}
#endif
