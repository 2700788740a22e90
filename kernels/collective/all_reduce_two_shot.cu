// All-reduce (sum over GPUs) in two steps over peer memory.
//
//   part r of y_q = part r of sum over p of x_p, for every q        (on GPU r)
//
// A GPU loads its part of every message, sums in rank order, and stores the sum into the output of
// every GPU. A thread block first waits until the thread block of the same index has begun on every
// GPU; all messages are then ready. At its end a thread block waits until the thread blocks of the
// same index on all GPUs have stored their sums. After the wait at its end, the block's parts of
// this GPU's output are complete, and no GPU still reads these parts of its message.
//
// Threads: the threads stride over the packets of this GPU's part, kPacketsAtOnce packets at a
// time. Each thread block counts its own launches, so all launches must have the same grid. All
// thread blocks must be resident at once, because they wait for the thread blocks of other GPUs.
// Bound: the link between the GPUs; with g GPUs, each of the two steps moves (g - 1) / g of the
// message in each direction. Against all_reduce_one_shot: plain packets instead of words with
// flags, half of the bytes on the link, and two waits for the peers.
#include "collective/sum.cuh"
#include "common/peers.cuh"

constexpr int kThreads = THREADS;
constexpr int kPacketsAtOnce = AT_ONCE;
constexpr int kGpus = GPUS;
static_assert(kGpus >= 2, "a message has a receiver");

__device__ __forceinline__ uint4 load_packet_of_peer(const uint4* from) {
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
  const u32 launch_number = epochs[blockIdx.x] + 1;
  wait_for_peers<kGpus>(flags, rank, 0, launch_number);
  const i64 first_packet_of_part = rank * packets;
  const i64 threads_of_grid = static_cast<i64>(gridDim.x) * kThreads;
  const i64 first_packet_of_thread = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  for (i64 i = first_packet_of_thread; i < packets; i += kPacketsAtOnce * threads_of_grid) {
    uint4 packet[kPacketsAtOnce][kGpus];
#pragma unroll
    for (int k = 0; k < kPacketsAtOnce; ++k) {
      if (i + k * threads_of_grid >= packets) continue;
#pragma unroll
      for (int p = 0; p < kGpus; ++p)
        packet[k][p] = load_packet_of_peer(x[p] + first_packet_of_part + i +
           k * threads_of_grid);
    }
#pragma unroll
    for (int k = 0; k < kPacketsAtOnce; ++k) {
      if (i + k * threads_of_grid >= packets) continue;
      uint4 sum = packet[k][0];
#pragma unroll
      for (int p = 1; p < kGpus; ++p) {
        sum.x = add_packed_elements(sum.x, packet[k][p].x);
        sum.y = add_packed_elements(sum.y, packet[k][p].y);
        sum.z = add_packed_elements(sum.z, packet[k][p].z);
        sum.w = add_packed_elements(sum.w, packet[k][p].w);
      }
#pragma unroll
      for (int q = 0; q < kGpus; ++q) y[q][first_packet_of_part + i + k * threads_of_grid] = sum;
    }
  }
  wait_for_peers<kGpus>(flags, rank, 1, launch_number);
  if (threadIdx.x == 0) epochs[blockIdx.x] = launch_number;
}
