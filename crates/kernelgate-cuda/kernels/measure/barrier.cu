// Ends on all GPUs of a set at about the same time, so that what follows begins together.
//
//   of every GPU p: flags_p[rank] = epoch ; then spin until flags_rank[p] >= epoch
//
// Threads: a warp, one thread for each of the `gpus`. `flags` is the table of the sets' flag
// arrays, each in the memory of its GPU and accessible to all. Each use of the barrier takes the
// next epoch number. The dead-man timeout ends the wait if a GPU never arrives.
#include "common/device_clock.cuh"

extern "C" __global__ void measure_barrier(unsigned int* const* flags, unsigned int rank,
                                           unsigned int gpus, unsigned int epoch,
                                           unsigned long long timeout_ns) {
  const unsigned int peer = threadIdx.x;
  if (peer >= gpus) return;
  store_to_host(flags[peer] + rank, epoch);
  const unsigned long long start = global_timer_ns();
  while (static_cast<int>(load_from_host(flags[rank] + peer) - epoch) < 0) {
    if (global_timer_ns() - start > timeout_ns) return;
  }
}
