// Holds the stream until the host lets it go, so that everything queued behind it is already on the
// device when it starts.
//
//   spin while *flag != ticket and less than timeout_ns has passed
//   *outcome = 1 if released, 2 if timed out
//
// Threads: one. `flag` and `outcome` are mapped (or pinned) host memory; `flag` may also be set
// before the launch. Each use takes a new ticket, so that a late store for an earlier use does not
// release the stream. The dead-man timeout runs on the device-wide timer: if the host dies or
// forgets to release it, the stream goes on and the sample is marked.
#include "common/device_clock.cuh"

constexpr unsigned int kReleased = 1;
constexpr unsigned int kTimedOut = 2;

extern "C" __global__ void measure_blocker(const unsigned int* flag, unsigned int ticket,
                                           unsigned long long timeout_ns, unsigned int* outcome) {
  const unsigned long long start = global_timer_ns();
  while (load_from_host(flag) != ticket) {
    if (global_timer_ns() - start > timeout_ns) {
      store_to_host(outcome, kTimedOut);
      return;
    }
  }
  store_to_host(outcome, kReleased);
}
