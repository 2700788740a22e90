// GEMM that computes the gradient dh of the hidden layer, with SwiGLU's gradient in its epilogue:
//
//   dh = x w^T;  dup = dh silu(gate),  dgate = dh up s(gate) (1 + gate (1 - s(gate)))
//
// Layout: x [tokens, k], w [ff, k]; gate_up and grad_gate_up [tokens, 2, ff], the gate first.
// Threads, shared memory and order of tiles: transformer/wide_gemm.cuh. Gates and ups of a tile are
// prefetched to L2 before its GEMM. A warp writes the rounded dh of a slice to shared memory, so
// that each thread then has eight neighbouring elements of a row, as its loads of gates and ups
// have. Gates and ups of the next slice are loaded before the current slice is stored.
// Bound: tensor cores.
// Against the kernel swiglu_backward after a GEMM: dh does not pass through device memory.
#define STREAM_STORE "st.global"
#include "transformer/wide_gemm.cuh"

struct SwigluBackward {
  static constexpr int kTileColumns = kColumns;
  static __device__ __forceinline__ BoxOrigin box(int k, int tile, int half) {
    return {k, tile * kColumns + half * kHalf, 0, 0};
  }

  struct Loaded {};
  // Gates and ups that a lane holds of one slice of columns.
  static constexpr int kOwn = kSlice / 16, kSlices = kColumns / kSlice;
  struct Inputs {
    Packet<16> gate[kOwn], up[kOwn];
  };

  const Element* gate_up;
  Element* grad_gate_up;
  int tokens, ff;

  __device__ __forceinline__ void load(Loaded&, int row, int tile) const {
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

  // Offset in elements of the gate in `row` and `column`; its up lies ff elements further.
  __device__ __forceinline__ i64 offset(int row, int column) const {
    return static_cast<i64>(row) * 2 * ff + column;
  }

  // Calls `f` for each packet that this lane holds of a slice, with the packet's number and its row
  // and column in the slice.
  template <typename F>
  __device__ __forceinline__ void each_packet(int row, int column, const F& f) const {
    constexpr int kPackets = kSlice / 8;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = i * static_cast<int>(kWarpSize) + threadIdx.x % kWarpSize;
      const int of_row = at / kPackets, of_column = at % kPackets * 8;
      if (row + of_row < tokens && column + of_column < ff) f(i, of_row, of_column);
    }
  }

  __device__ __forceinline__ void read(Inputs& inputs, int row, int column) const {
    each_packet(row, column, [&](int i, int of_row, int of_column) {
      const Element* from = gate_up + offset(row + of_row, column + of_column);
      inputs.gate[i] = load_stream<16>(from);
      inputs.up[i] = load_stream<16>(from + ff);
    });
  }

  __device__ __forceinline__ void write(const Inputs& inputs, u32 slice, int row,
                                        int column) const {
    each_packet(row, column, [&](int i, int of_row, int of_column) {
      const uint4 x = load_shared_b128(slice + of_row * kSliceRowBytes + of_column * 2);
      const Packet<16> packet = {{x.x, x.y, x.z, x.w}};
      float slope[8], gate[8], up[8];
      unpack<8>(packet, slope);
      unpack<8>(inputs.gate[i], gate);
      unpack<8>(inputs.up[i], up);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float s = reciprocal_approx(1.f + exp2_approx(-kLog2E * gate[j]));
        const float silu = gate[j] * s;
        gate[j] = slope[j] * up[j] * (s + silu * (1.f - s));
        up[j] = slope[j] * silu;
      }
      Element* to = grad_gate_up + offset(row + of_row, column + of_column);
      store_stream<16>(to, pack<8>(gate));
      store_stream<16>(to + ff, pack<8>(up));
    });
  }

  __device__ __forceinline__ void store(const Accumulator& d, const Loaded&, u32 slice, int row,
                                        int tile) const {
    const int column = tile * kColumns;
    Inputs inputs[2];
    read(inputs[0], row, column);
    u32 words[kColumns / 4];
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) words[i] = floats_to_pair(d[2 * i], d[2 * i + 1]);
#pragma unroll
    for (int at = 0; at < kSlices; ++at) {
      if (at + 1 < kSlices) read(inputs[(at + 1) % 2], row, column + (at + 1) * kSlice);
      write_slice(slice, words, at * kSlice / 4);
      __syncwarp();
      write(inputs[at % 2], slice, row, column + at * kSlice);
      __syncwarp();
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    transformer_gemm_swiglu_backward(const __grid_constant__ TensorMap x,
                                     const __grid_constant__ TensorMap w, const Element* gate_up,
                                     Element* grad_gate_up, int tokens, int ff, int k) {
  wide_gemm(x, w, GemmShape{tokens, ff, k}, SwigluBackward{gate_up, grad_gate_up, tokens, ff});
}
