// Clocks of the device and flags in host memory, as wrappers of one PTX instruction each; they are
// volatile, so the compiler neither moves nor merges them.
#pragma once

/// The device-wide timer (%globaltimer), in nanoseconds. The resolution of the device-wide timer
/// differs between devices and must be measured; the timer is independent of the SM clock.
__device__ __forceinline__ unsigned long long global_timer_ns() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

/// Cycle counter (%clock64) of the multiprocessor on which this thread runs. Only differences
/// between two cycle counts of the same multiprocessor are meaningful.
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

/// Reads a word of memory that the host may change while the kernel runs.
__device__ __forceinline__ unsigned int load_word_written_by_host(const unsigned int* address) {
  unsigned int value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

/// Writes a word of memory that the host polls while the kernel runs.
__device__ __forceinline__ void store_to_host(unsigned int* address, unsigned int value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
