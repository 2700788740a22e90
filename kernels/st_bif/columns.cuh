// Columns (neurons) of a time-major [T, N] tensor that one thread owns, and their copies between
// memory and registers.
//
// A thread owns kCount consecutive neurons and copies its columns of a row (time step) with one
// instruction. For these wide copies, rows must start on a packet boundary, which holds if N is a
// multiple of kCount. For any other N the kernels copy single columns. With single columns a thread
// block keeps its blockDim.x · kCount neurons, and each thread walks over kCount neurons that are
// blockDim.x apart, so that a warp stays coalesced.
#pragma once

#include "common/element.cuh"
#include "common/math.cuh"

template <int kCount_>
struct ThreadColumns {
  static constexpr int kCount = kCount_;
  static constexpr int kPacketBytes = kCount * kElementBytes;
  typedef Packet<kPacketBytes> Raw;

  long long first;

  __device__ __forceinline__ explicit ThreadColumns(long long first_) : first(first_) {}

  __device__ __forceinline__ Raw load(const Element* row) const {
    return load_read_only_packet<kPacketBytes>(row + first);
  }
  __device__ __forceinline__ void store(Element* row, const float (&value)[kCount]) const {
    store_packet_evict_first<kPacketBytes>(row + first, pack_floats_to_elements<kCount>(value));
  }

  /// Stores kElementBytes raw bytes for each column; the same thread loads them again later.
  __device__ __forceinline__ void store_raw_bits(Element* row,
                                             const unsigned int (&bits)[kCount]) const {
    Raw raw;
    if constexpr (kElementBytes == 4 || kCount == 1) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) raw.word[i] = bits[i];
    } else {
#pragma unroll
      for (int i = 0; i < kCount; i += 2) raw.word[i / 2] = join_low_halves(bits[i], bits[i + 1]);
    }
    store_packet_evict_first<kPacketBytes>(row + first, raw);
  }
  __device__ __forceinline__ void load_raw_bits(const Element* row,
                                            unsigned int (&bits)[kCount]) const {
    const Raw raw = load_coherent_packet<kPacketBytes>(row + first);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      bits[i] = kElementBytes == 4 ? raw.word[i]
                : i % 2 == 0       ? raw.word[i / 2] & 0xffffu
                                   : raw.word[i / 2] >> 16;
    }
  }
};

/// Returns the index of the first neuron of this thread block, where each thread block has
/// blockDim.x · kNeuronsPerThread neurons. The grid has ceil(N / (blockDim.x · kNeuronsPerThread))
/// blocks.
template <int kNeuronsPerThread>
__device__ __forceinline__ long long first_neuron_of_block() {
  return static_cast<long long>(blockIdx.x) * (blockDim.x * kNeuronsPerThread);
}
