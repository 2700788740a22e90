// Barrier between the streams of all GPUs of a ring attention. A barrier before ring attention
// ensures that the keys and values of all GPUs are ready, and one after it that no GPU still reads
// them.
//
// On each GPU: for every GPU p set flags_p[which][rank] = n, then wait until flags_rank[which][p]
// >= n.
//
// Threads: one warp on each GPU, whose thread p signals to GPU p and waits for GPU p. Each GPU
// counts its launches of the barrier; n is the number of the current launch. Bound: the latency of
// a store to the memory of another GPU.
#include "common/peers.cuh"
#include "common/types.cuh"

constexpr int kGpus = GPUS;
static_assert(kGpus >= 2 && kGpus <= static_cast<int>(kWarpSize), "a thread for each of several");

extern "C" __global__ void attention_ring_barrier(u32* const* flags, u32* epochs, int rank,
                                                 int which) {
  const u32 launch_number = epochs[which] + 1;
  wait_for_peers<kGpus>(flags, rank, which, launch_number);
  if (threadIdx.x == 0) epochs[which] = launch_number;
}
