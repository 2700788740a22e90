// All-reduce (sum over GPUs) in two steps over peer memory.
//
//   part r of y_q = part r of sum over p of x_p, for every q        (on GPU r)
//
// A GPU loads its part of every message, sums in rank order, and stores the sum into the output of
// every GPU. A block first waits until the same block of every GPU has begun: then all messages are
// ready. At its end the block waits until the same blocks of all GPUs have stored. After that wait
// its parts of the output are complete, and no GPU still reads its message.
//
// Threads: each thread strides over the packets of the part, kAtOnce packets at a time. A block
// counts its own launches, so all launches must have the same grid. All thread blocks must be
// resident at once, because they wait for their peers. Bound: the link; each step moves (g - 1) / g
// of the message in each direction.
// Against all_reduce_one_shot: plain packets instead of words with flags, half of the bytes on the
// link, and two waits.
#include "collective/sum.cuh"
#include "common/peers.cuh"

constexpr int kThreads = THREADS;
constexpr int kAtOnce = AT_ONCE;
constexpr int kGpus = GPUS;
static_assert(kGpus >= 2, "a message has a receiver");

__device__ __forceinline__ uint4 load_packet(const uint4* from) {
  uint4 packet;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(packet.x), "=r"(packet.y), "=r"(packet.z), "=r"(packet.w)
               : "l"(from)
               : "memory");
  return packet;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    collective_all_reduce_two_shot(const uint4* const* x, uint4* const* y, u32* const* flags,
                                   u32* epochs, int rank, i64 packets) {
  const u32 epoch = epochs[blockIdx.x] + 1;
  wait_for_peers<kGpus>(flags, rank, 0, epoch);
  const i64 part = rank * packets;
  const i64 stride = static_cast<i64>(gridDim.x) * kThreads;
  const i64 begin = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  for (i64 i = begin; i < packets; i += kAtOnce * stride) {
    uint4 packet[kAtOnce][kGpus];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (i + k * stride >= packets) continue;
#pragma unroll
      for (int p = 0; p < kGpus; ++p) packet[k][p] = load_packet(x[p] + part + i + k * stride);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (i + k * stride >= packets) continue;
      uint4 sum = packet[k][0];
#pragma unroll
      for (int p = 1; p < kGpus; ++p) {
        sum.x = add(sum.x, packet[k][p].x);
        sum.y = add(sum.y, packet[k][p].y);
        sum.z = add(sum.z, packet[k][p].z);
        sum.w = add(sum.w, packet[k][p].w);
      }
#pragma unroll
      for (int q = 0; q < kGpus; ++q) y[q][part + i + k * stride] = sum;
    }
  }
  wait_for_peers<kGpus>(flags, rank, 1, epoch);
  if (threadIdx.x == 0) epochs[blockIdx.x] = epoch;
}
