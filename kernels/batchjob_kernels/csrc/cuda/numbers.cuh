// Number formats as plain bits, eight at a time to and from float32.
#pragma once
#include "device.cuh"

struct Half { unsigned short bits; };
struct Bf16 { unsigned short bits; };
struct Fp8 { unsigned char bits; };  // e4m3, the form without infinities: 1 sign, 4 exponent (bias 7), 3 mantissa bits

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kFp8Max = 448.0f;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(Half x) { return half_to_float(x.bits); }
__device__ __forceinline__ float to_float(Bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

__device__ __forceinline__ float to_float(Fp8 x) {
    // The same bits read as float16 have an exponent bias that is 8 larger; numbers below the normal range fit too.
    const unsigned magnitude = x.bits & 0x7fu, sign = static_cast<unsigned>(x.bits & 0x80u) << 24;
    const float scaled = half_to_float(static_cast<unsigned short>(magnitude << 7)) * 256.0f;
    return __uint_as_float(__float_as_uint(magnitude == 0x7fu ? __uint_as_float(0x7fc00000u) : scaled) | sign);
}

__device__ __forceinline__ void from_float(float x, float& out) { out = x; }
__device__ __forceinline__ void from_float(float x, Half& out) { out.bits = float_to_half(x); }

__device__ __forceinline__ void from_float(float x, Bf16& out) {  // to nearest, ties to even
    const unsigned bits = __float_as_uint(x);
    out.bits = x != x ? 0x7fc0u : static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

__device__ __forceinline__ void from_float(float x, Fp8& out) {  // as above, clamped to the largest number; no NaN
    const float size = fminf(fabsf(x), kFp8Max);
    const unsigned sign = (__float_as_uint(x) >> 24) & 0x80u;
    unsigned code;
    if (size < 0.015625f) {  // below 2^-6 the spacing is 2^-9
        code = static_cast<unsigned>(rintf(size * 512.0f));
    } else {
        unsigned bits = __float_as_uint(size);
        bits += 0x7ffffu + ((bits >> 20) & 1u);
        code = (bits >> 20) - ((127u - 7u) << 3);
    }
    out.bits = static_cast<unsigned char>(sign | code);
}

// Eight numbers, by loads of 16 bytes (8 for FP8). The address must be a multiple of their size.
__device__ __forceinline__ void load8(const float* from, float (&to)[8]) {
    const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

template <typename T>
__device__ __forceinline__ void unpack2(unsigned pair, float& low, float& high) {
    low = to_float(T{static_cast<unsigned short>(pair & 0xffffu)});
    high = to_float(T{static_cast<unsigned short>(pair >> 16)});
}

template <typename T>  // Half, Bf16
__device__ __forceinline__ void load8(const T* from, float (&to)[8]) {
    const uint4 packed = *reinterpret_cast<const uint4*>(from);
    unpack2<T>(packed.x, to[0], to[1]);
    unpack2<T>(packed.y, to[2], to[3]);
    unpack2<T>(packed.z, to[4], to[5]);
    unpack2<T>(packed.w, to[6], to[7]);
}

__device__ __forceinline__ void load8(const Fp8* from, float (&to)[8]) {
    const uint2 packed = *reinterpret_cast<const uint2*>(from);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    const unsigned words[2] = {packed.x, packed.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned short pair = static_cast<unsigned short>(words[i / 2] >> (16 * (i % 2)));
        unsigned halves;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
        unpack2<Half>(halves, to[2 * i], to[2 * i + 1]);
    }
#else
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const unsigned word = i < 4 ? packed.x : packed.y;
        to[i] = to_float(Fp8{static_cast<unsigned char>(word >> (8 * (i % 4)))});
    }
#endif
}

template <typename T>
struct alignas(8 * sizeof(T) < 16 ? 8 * sizeof(T) : 16) Eight {
    T values[8];
};

template <typename T>
__device__ __forceinline__ void store8(T* to, const float (&from)[8]) {
    Eight<T> packed;
#pragma unroll
    for (int i = 0; i < 8; ++i) from_float(from[i], packed.values[i]);
    *reinterpret_cast<Eight<T>*>(to) = packed;
}
