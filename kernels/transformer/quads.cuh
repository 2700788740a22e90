// Access to four adjacent elements by each thread: 16 bytes in fp32, 8 or 16 bytes in the row's
// element type. A warp that reads fp32 and 16-bit tensors together, four elements a thread, touches
// whole sectors of both.
//
// The loads of quads.cuh are coherent, because an output may overwrite an input: a thread reads its
// elements before it writes them, and no other thread reads them.
#pragma once
#include "common/element.cuh"

using Quad = float[4];  // four adjacent elements of a row

__device__ __forceinline__ void unpack_f32_quad(const Packet<16>& packet, Quad& values) {
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = __uint_as_float(packet.word[i]);
}

__device__ __forceinline__ void load_f32_quad(const float* from, Quad& values) {
  unpack_f32_quad(load_coherent_packet<16>(from), values);
}

// Loads four elements without converting them: a conversion right after the load would wait for the
// load before the next load is issued.
__device__ __forceinline__ ElementPacket<4> load_packed_quad(const Element* from) {
  return load_coherent_packet<4 * kElementBytes>(from);
}

__device__ __forceinline__ void load_element_quad(const Element* from, Quad& values) {
  unpack_elements_to_floats<4>(load_packed_quad(from), values);
}

__device__ __forceinline__ void store_f32_quad(float* to, const Quad& values) {
  Packet<16> packet;
#pragma unroll
  for (int i = 0; i < 4; ++i) packet.word[i] = __float_as_uint(values[i]);
  store_packet_evict_first<16>(to, packet);
}

__device__ __forceinline__ void store_element_quad(Element* to, const Quad& values) {
  store_packet_evict_first<4 * kElementBytes>(to, pack_floats_to_elements<4>(values));
}
