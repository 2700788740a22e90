// Reads the device-wide timer and the SM's cycle counter at one instant: two launches around a
// timed sample give the SM clock frequency during the sample, Δcycles / Δns.
//
//   out[0] = device-wide timer in ns ; out[1] = cycles of this multiprocessor ; out[2] = its index
//
// Threads: one. The kernel waits until the timer steps before it reads the cycles, so that both
// values belong to one instant for any resolution of the timer. Cycle counts of different
// multiprocessors are unrelated: two probes may be compared only if out[2] is equal (block 0 of an
// idle device usually runs on the same multiprocessor).
#include "common/device_clock.cuh"

extern "C" __global__ void measure_clock_probe(unsigned long long* out) {
  const unsigned long long timer_before_step = global_timer_ns();
  unsigned long long now = timer_before_step;
  while (now == timer_before_step) now = global_timer_ns();
  out[1] = sm_cycles();
  out[0] = now;
  out[2] = sm_index();
}
