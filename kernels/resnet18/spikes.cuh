// Conversion of spikes that are bytes in memory to bf16 operands of tensor cores: bf16 holds -1, 0
// and 1 exactly.
#pragma once
#include "common/types.cuh"

// Converts two spikes, in the low bytes of a word's halves, to two bf16.
__device__ __forceinline__ u32 bf16x2_of_spikes(u32 pair) {
  return (pair & 0x00010001u) * 0x3f80u | (pair & 0x00800080u) << 8;
}

// Converts eight byte spikes to bf16 in the same order.
__device__ __forceinline__ uint4 bf16x8_of_spikes(u32 low, u32 high) {
  return make_uint4(bf16x2_of_spikes(__byte_perm(low, 0, 0x4140)),
                    bf16x2_of_spikes(__byte_perm(low, 0, 0x4342)),
                    bf16x2_of_spikes(__byte_perm(high, 0, 0x4140)),
                    bf16x2_of_spikes(__byte_perm(high, 0, 0x4342)));
}
