// Spins for a given time by the device-wide timer: a kernel of known duration, with which timing by
// CUDA events is checked.
//
//   spin while less than duration_ns has passed
//   out[0] = ns spent by the timer ; out[1] = SM cycles spent      (out may be null)
//
// Threads: one. The time between two events around this kernel is duration_ns plus the cost of an
// empty launch, which a launch with duration_ns = 0 measures.
#include "common/device_clock.cuh"

extern "C" __global__ void measure_spin(unsigned long long duration_ns, unsigned long long* out) {
  const unsigned long long start_cycles = sm_cycles();
  const unsigned long long start_ns = global_timer_ns();
  unsigned long long spent = 0;
  while (spent < duration_ns) spent = global_timer_ns() - start_ns;
  if (out != nullptr) {
    out[0] = spent;
    out[1] = sm_cycles() - start_cycles;
  }
}
