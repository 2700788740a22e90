// Holds the stream of a GPU until all GPUs have come here: first, so that the keys and values of
// all are there, and last, so that nobody reads them any more.
//
//   of every GPU p: flags_p[which][rank] = n ; then wait until flags_rank[which][p] >= n
//
// Threads: a warp, one thread for each GPU. n is the number of the launch, which each GPU counts.
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
