// Clocks and flags seen from a kernel: one wrapper an instruction, volatile so that none is moved
// or merged.
#pragma once

/// Nanoseconds of the device-wide timer. The step of the device-wide timer differs between devices
/// and must be measured; the timer does not follow the SM clock.
__device__ __forceinline__ unsigned long long global_timer_ns() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

/// Returns the cycle counter of this multiprocessor's clock. Only differences between counter
/// values of one multiprocessor are meaningful.
__device__ __forceinline__ unsigned long long sm_cycles() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
  return now;
}

__device__ __forceinline__ unsigned int sm_index() {
  unsigned int index;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(index));
  return index;
}

/// Reads a word that the host may change at any time.
__device__ __forceinline__ unsigned int load_from_host(const unsigned int* address) {
  unsigned int value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

/// Writes a word that the host polls.
__device__ __forceinline__ void store_to_host(unsigned int* address, unsigned int value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
