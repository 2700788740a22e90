// GEMM that computes the gradient dh of the hidden layer, with SwiGLU's gradient in its epilogue:
//
//   dh = x w^T;  dup = dh silu(gate),  dgate = dh up s(gate) (1 + gate (1 - s(gate)))
//
// Layout: x [tokens, k], w [ff, k]; gate_up and grad_gate_up [tokens, 2, ff], the gate first.
// Threads, shared memory and order of tiles: transformer/wide_gemm.cuh. The gates and ups of an
// output tile are prefetched to L2 before the tile's GEMM. A warp writes the rounded dh of a slice
// to shared memory, so that each thread then has eight adjacent elements of a row, as it has of
// gates and ups. A thread loads the gates and ups of the next slice of columns before it stores the
// current slice. Bound: tensor cores. Against a separate swiglu_backward kernel after the GEMM: dh
// does not pass through device memory.
#define STREAM_STORE "st.global"
#include "transformer/wide_gemm.cuh"

struct SwigluBackwardEpilogue {
  static constexpr int kTileColumns = kColumns;
  static __device__ __forceinline__ TmaBoxOrigin box(int k, int tile, int half) {
    return {k, tile * kColumns + half * kHalf, 0, 0};
  }

  struct EpilogueInputs {};
  // Gates and ups that a lane holds of one slice of columns of the output tile.
  static constexpr int kPacketsPerLane = kSliceColumns / 16, kSlices = kColumns / kSliceColumns;
  struct GatesAndUpsOfLane {
    Packet<16> gate[kPacketsPerLane], up[kPacketsPerLane];
  };

  const Element* gate_up;
  Element* grad_gate_up;
  int tokens, ff;

  __device__ __forceinline__ void load(EpilogueInputs&, int row, int tile) const {
    constexpr int kLineElements = 64, kLines = ceil_div(kColumns, kLineElements);
    static_assert(kLines <= 4, "a row's lines of both matrices have eight lanes");
    const int lane = threadIdx.x % kWarpSize;
    const int column = tile * kColumns + lane % 4 * kLineElements;
    if (lane % 4 >= kLines || column >= ff) return;
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const int token = row + i + lane / 8;
      if (token < tokens) prefetch_l2(gate_up + offset(token, column) + lane / 4 % 2 * ff);
    }
  }

  // Returns the offset in elements of the gate in `row` and `column`; the matching up lies ff
  // elements further.
  __device__ __forceinline__ i64 offset(int row, int column) const {
    return static_cast<i64>(row) * 2 * ff + column;
  }

  // Calls `f` for each packet of eight elements that this lane holds of a slice, with the packet's
  // number and its row and column in the slice.
  template <typename F>
  __device__ __forceinline__ void for_each_packet(int row, int column, const F& f) const {
    constexpr int kPackets = kSliceColumns / 8;
#pragma unroll
    for (int i = 0; i < kPacketsPerLane; ++i) {
      const int at = i * static_cast<int>(kWarpSize) + threadIdx.x % kWarpSize;
      const int row_in_slice = at / kPackets, column_in_slice = at % kPackets * 8;
      if (row + row_in_slice < tokens && column + column_in_slice < ff)
        f(i, row_in_slice, column_in_slice);
    }
  }

  __device__ __forceinline__ void read(GatesAndUpsOfLane& inputs, int row, int column) const {
    for_each_packet(row, column, [&](int i, int row_in_slice, int column_in_slice) {
      const Element* from = gate_up + offset(row + row_in_slice, column + column_in_slice);
      inputs.gate[i] = load_read_only_packet<16>(from);
      inputs.up[i] = load_read_only_packet<16>(from + ff);
    });
  }

  __device__ __forceinline__ void write(const GatesAndUpsOfLane& inputs, u32 slice, int row,
                                        int column) const {
    for_each_packet(row, column, [&](int i, int row_in_slice, int column_in_slice) {
      const uint4 x = load_shared_b128(slice + row_in_slice * kSliceRowBytes + column_in_slice * 2);
      const Packet<16> packet = {{x.x, x.y, x.z, x.w}};
      float slope[8], gate[8], up[8];
      unpack_elements_to_floats<8>(packet, slope);
      unpack_elements_to_floats<8>(inputs.gate[i], gate);
      unpack_elements_to_floats<8>(inputs.up[i], up);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float s = reciprocal_approx(1.f + exp2_approx(-kLog2E * gate[j]));
        const float silu = gate[j] * s;
        gate[j] = slope[j] * up[j] * (s + silu * (1.f - s));
        up[j] = slope[j] * silu;
      }
      Element* to = grad_gate_up + offset(row + row_in_slice, column + column_in_slice);
      store_packet_evict_first<16>(to, pack_floats_to_elements<8>(gate));
      store_packet_evict_first<16>(to + ff, pack_floats_to_elements<8>(up));
    });
  }

  __device__ __forceinline__ void store(const Accumulator& d, const EpilogueInputs&, u32 slice,
                                        int row, int tile) const {
    const int column = tile * kColumns;
    GatesAndUpsOfLane inputs[2];
    read(inputs[0], row, column);
    u32 words[kColumns / 4];
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i)
      words[i] = pack_floats_to_element_pair(d[2 * i], d[2 * i + 1]);
#pragma unroll
    for (int at = 0; at < kSlices; ++at) {
      if (at + 1 < kSlices) read(inputs[(at + 1) % 2], row, column + (at + 1) * kSliceColumns);
      write_rows_to_slice(slice, words, at * kSliceColumns / 4);
      __syncwarp();
      write(inputs[at % 2], slice, row, column + at * kSliceColumns);
      __syncwarp();
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    transformer_gemm_swiglu_backward(const __grid_constant__ TensorMap x,
                                     const __grid_constant__ TensorMap w, const Element* gate_up,
                                     Element* grad_gate_up, int tokens, int ff, int k) {
  run_wide_gemm(x, w, GemmShape{tokens, ff, k},
                SwigluBackwardEpilogue{gate_up, grad_gate_up, tokens, ff});
}
