// What every attention kernel is compiled for: -DDTYPE=Bf16|F16 -DHEAD_DIM=64|128 -DCAUSAL=0|1.
#pragma once
#include "common/element16.cuh"
#include "common/types.cuh"

#ifndef DTYPE
#error "compile with -DDTYPE=Bf16 or -DDTYPE=F16"
#endif
#ifndef HEAD_DIM
#error "compile with -DHEAD_DIM=64 or -DHEAD_DIM=128"
#endif
#ifndef CAUSAL
#error "compile with -DCAUSAL=0 or -DCAUSAL=1"
#endif

using Element = DTYPE;
constexpr int kHeadDim = HEAD_DIM;
constexpr bool kCausal = CAUSAL != 0;
static_assert(kHeadDim == 64 || kHeadDim == 128,
              "attention kernels support a head dimension of 64 or 128");

// 1/sqrt(d), and the same folded with log2(e) so that exp(scale * (s - m)) is one FMA and one ex2.
constexpr float kScale = kHeadDim == 64 ? 0.125f : 0.08838834764831845f;
constexpr float kScaleLog2 = kScale * kLog2E;
