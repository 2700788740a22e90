// A barrier kernel: it ends on all GPUs of a set at about the same time, so that the kernels queued
// behind it begin together.
//
//   of every GPU p: flags_p[rank] = epoch ; then spin until flags_rank[p] >= epoch
//
// Threads: one warp, with a thread for each of the `gpus`. `flags` is a table of the flag arrays of
// all GPUs, each in the memory of its GPU and accessible from all GPUs. Each launch of the barrier
// passes the next epoch number. A timeout ends the wait if a GPU never launches the barrier.
#include "common/device_clock.cuh"

extern "C" __global__ void measure_barrier(unsigned int* const* flags, unsigned int rank,
                                           unsigned int gpus, unsigned int epoch,
                                           unsigned long long timeout_ns) {
  const unsigned int peer_rank = threadIdx.x;
  if (peer_rank >= gpus) return;
  store_to_host(flags[peer_rank] + rank, epoch);
  const unsigned long long start_ns = global_timer_ns();
  while (static_cast<int>(load_word_written_by_host(flags[rank] + peer_rank) - epoch) < 0) {
    if (global_timer_ns() - start_ns > timeout_ns) return;
  }
}
