// The 16-bit element types bf16 and f16 as classes with the same functions: conversion to and from
// fp32, and the tensor-core instruction. A kernel is compiled for one of the two 16-bit element
// types by -DDTYPE=Bf16 or -DDTYPE=F16.
#pragma once
#include "common/math.cuh"
#include "common/types.cuh"

struct Bf16 {
  // Packs two floats into a word as bf16, rounded to nearest even, `low` in bits 0-15.
  static __device__ __forceinline__ u32 pack(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
  }
  // Multiplies the two bf16 pairs of the words `a` and `b` and rounds the products; needs sm_90 or
  // later.
  static __device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  static __device__ __forceinline__ float low(u32 pair) { return bits_to_f32(pair << 16); }
  static __device__ __forceinline__ float high(u32 pair) { return bits_to_f32(pair & 0xffff0000u); }
  static __device__ __forceinline__ float to_f32(u16 x) {
    return bits_to_f32(static_cast<u32>(x) << 16);
  }
  static __device__ __forceinline__ u16 from_f32(float x) {
    u16 d;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(x));
    return d;
  }
  // The tensor-core instruction d[16x8] += a[16x16] b[16x8], with a row-major and b column-major.
  static __device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

struct F16 {
  static __device__ __forceinline__ u32 pack(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
  }
  static __device__ __forceinline__ float to_f32(u16 x) {
    float d;
    asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(x));
    return d;
  }
  static __device__ __forceinline__ float low(u32 pair) {
    return to_f32(static_cast<u16>(pair & 0xffffu));
  }
  static __device__ __forceinline__ float high(u32 pair) {
    return to_f32(static_cast<u16>(pair >> 16));
  }
  static __device__ __forceinline__ u16 from_f32(float x) {
    u16 d;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(x));
    return d;
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};
