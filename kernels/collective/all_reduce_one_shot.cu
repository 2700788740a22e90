// All-reduce (sum over GPUs) for short messages, in one step over peer memory.
//
// y_r = sum over p of x_p       (summed in rank order, so that y is bitwise equal on all GPUs)
//
// Every GPU stores its message into a buffer of every other GPU, as packets of 16 bytes. A packet
// of 16 bytes has two words of the message, each beside a flag, which is the number of the launch.
// The eight bytes of a word and its flag arrive together, so a word has arrived if its flag equals
// the launch number. The receiving GPU needs no synchronisation besides the flags in the packets.
//
// Launches alternate between the two halves of a GPU's receive buffer. A GPU stores packets of
// launch n only after it has received the peer's message of launch n - 1. The peer sent its message
// of launch n - 1 after it had read all packets of launch n - 2, so that half of the buffer is
// free.
//
// Threads: the threads of the grid stride over the packets of the message. Each thread block counts
// its own launches, so all launches that use the same receive buffer must have the same grid. A
// thread block waits for the thread block of the same index on each peer, so all thread blocks must
// be resident at once. Bound: the latency of a store to the peer and of a load from local memory.
// Because of the flags, twice as many bytes as the message pass over the link between the GPUs.
#include "collective/sum.cuh"

constexpr int kThreads = THREADS;
constexpr int kGpus = GPUS;
static_assert(kGpus >= 2, "a message has a receiver");

__device__ __forceinline__ void store_packet(uint4* to, u32 first, u32 second, u32 flag) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(first), "r"(flag),
               "r"(second), "r"(flag)
               : "memory");
}

__device__ __forceinline__ void wait_for_flagged_packet(const uint4* from, u32& first, u32& second,
                                                        u32 flag) {
  u32 first_flag, second_flag;
  do {
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(first), "=r"(first_flag), "=r"(second), "=r"(second_flag)
                 : "l"(from)
                 : "memory");
  } while (first_flag != flag || second_flag != flag);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    collective_all_reduce_one_shot(const uint2* x, uint2* y, uint4* const* staging, u32* epochs,
                                   int rank, int packets) {
  const u32 flag = epochs[blockIdx.x] + 1;
  const i64 offset_of_buffer_half = static_cast<i64>(flag & 1u) * kGpus * packets;
  const int threads_of_grid = static_cast<int>(gridDim.x) * kThreads;
  const int first_packet_of_thread =
      static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  for (int i = first_packet_of_thread; i < packets; i += threads_of_grid) {
    const uint2 own = x[i];
#pragma unroll
    for (int step = 1; step < kGpus; ++step) {
      const int peer = (rank + step) % kGpus;
      uint4* to = staging[peer] + offset_of_buffer_half + static_cast<i64>(rank) * packets;
      store_packet(to + i, own.x, own.y, flag);
    }
  }
  const uint4* received = staging[rank] + offset_of_buffer_half;
  for (int i = first_packet_of_thread; i < packets; i += threads_of_grid) {
    const uint2 own = x[i];
    u32 first = 0, second = 0;
#pragma unroll
    for (int p = 0; p < kGpus; ++p) {
      u32 a = own.x, b = own.y;
      if (p != rank) wait_for_flagged_packet(received + static_cast<i64>(p) * packets + i, a, b,
          flag);
      first = p == 0 ? a : add_packed_elements(first, a);
      second = p == 0 ? b : add_packed_elements(second, b);
    }
    y[i] = make_uint2(first, second);
  }
  __syncthreads();
  if (threadIdx.x == 0) epochs[blockIdx.x] = flag;
}
