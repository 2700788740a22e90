// Barrier between the streams of all GPUs of a ring. The barrier at the start ensures that the keys
// and values of all GPUs are ready, the one at the end that no GPU still reads them.
//
// On each GPU: for every GPU p set flags_p[which][rank] = n, then wait until flags_rank[which][p]
// >= n.
//
// Threads: a warp, one thread for each GPU. Each GPU counts its launches; n is the number of the
// current one.
// Bound: latency of a store to another GPU.
#include "common/peers.cuh"
#include "common/types.cuh"

constexpr int kGpus = GPUS;
static_assert(kGpus >= 2 && kGpus <= static_cast<int>(kWarpSize), "a thread for each of several");

extern "C" __global__ void attention_ring_barrier(u32* const* flags, u32* epochs, int rank,
                                                 int which) {
  const u32 epoch = epochs[which] + 1;
  wait_for_peers<kGpus>(flags, rank, which, epoch);
  if (threadIdx.x == 0) epochs[which] = epoch;
}
