// Blocks its stream until the host releases the stream, so that all launches queued behind this
// kernel have reached the device before the first of them starts.
//
//   spin while *flag != ticket and less than timeout_ns has passed
//   *outcome = 1 if released, 2 if timed out
//
// Threads: one. `flag` and `outcome` are mapped (or pinned) host memory; `flag` may also be set
// before the launch. Each launch passes a new ticket, so that a late store for an earlier launch
// does not release the stream. The timeout runs on the device-wide timer: if the host does not
// release the stream in time, the kernel ends with outcome 2, which marks the timed sample as
// invalid.
#include "common/device_clock.cuh"

constexpr unsigned int kBlockerReleased = 1;
constexpr unsigned int kBlockerTimedOut = 2;

extern "C" __global__ void measure_blocker(const unsigned int* flag, unsigned int ticket,
                                           unsigned long long timeout_ns, unsigned int* outcome) {
  const unsigned long long start_ns = global_timer_ns();
  while (load_word_written_by_host(flag) != ticket) {
    if (global_timer_ns() - start_ns > timeout_ns) {
      store_to_host(outcome, kBlockerTimedOut);
      return;
    }
  }
  store_to_host(outcome, kBlockerReleased);
}
