// Busy for a given time by the device-wide timer: a kernel of known length, against which event
// timing is checked.
//
//   spin while less than duration_ns has passed
//   out[0] = ns spent by the timer ; out[1] = SM cycles spent      (out may be null)
//
// Threads: one. The time between two events around it is duration_ns plus the cost of an empty
// launch (measure with duration_ns = 0).
#include "common/device_clock.cuh"

extern "C" __global__ void measure_spin(unsigned long long duration_ns, unsigned long long* out) {
  const unsigned long long cycles = sm_cycles();
  const unsigned long long start = global_timer_ns();
  unsigned long long spent = 0;
  while (spent < duration_ns) spent = global_timer_ns() - start;
  if (out != nullptr) {
    out[0] = spent;
    out[1] = sm_cycles() - cycles;
  }
}
