// One reading of both clocks: two probes around a sample give the SM clock during it,
// Δcycles / Δns.
//
//   out[0] = device-wide timer in ns ; out[1] = cycles of this multiprocessor ; out[2] = its index
//
// Threads: one. The kernel waits for the timer to step before reading, so that both values belong
// to one instant for any resolution of the timer. Cycles of different multiprocessors are unrelated:
// compare two probes only when out[2] agrees (block 0 of an idle device lands on the same one each
// time).
#include "common/device_clock.cuh"

extern "C" __global__ void measure_clock_probe(unsigned long long* out) {
  const unsigned long long before = global_timer_ns();
  unsigned long long now = before;
  while (now == before) now = global_timer_ns();
  out[1] = sm_cycles();
  out[0] = now;
  out[2] = sm_index();
}
