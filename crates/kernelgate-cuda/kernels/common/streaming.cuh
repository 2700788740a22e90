// Loads and stores of device memory for data that a kernel touches once: each function wraps one
// PTX instruction of 1 to 16 bytes.
//
// A Packet<kBytes> holds the bytes that one thread loads or stores with one instruction.
// load_read_only_packet uses the read-only path (ld.global.nc); the assembly is volatile so that
// the compiler keeps many loads in flight before the first use. The loads of load_read_only_packet
// allocate lines in L1: with L1::no_allocate, the same kernels were up to 6 % slower or equally
// fast, depending on the kernel before.
#pragma once

template <int kBytes>
struct Packet {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16,
                "a packet is 1, 2, 4, 8 or 16 bytes: one load or store instruction");
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  unsigned int word[kWords];
};

// The macros STREAM_LOAD and STREAM_STORE select cache policies and can be overridden to compare
// them; the defaults were the fastest in measurements.
#ifndef STREAM_LOAD
#define STREAM_LOAD "ld.global.nc"
#endif
#ifndef STREAM_STORE
#define STREAM_STORE "st.global.cs"
#endif

/// Loads one packet of device memory that no thread writes while the kernel runs. The load address
/// must be a multiple of kBytes.
template <int kBytes>
__device__ __forceinline__ Packet<kBytes> load_read_only_packet(const void* address) {
  Packet<kBytes> packet;
  if constexpr (kBytes == 16) {
    asm volatile(STREAM_LOAD ".v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(packet.word[0]), "=r"(packet.word[1]), "=r"(packet.word[2]),
                   "=r"(packet.word[3])
                 : "l"(address));
  } else if constexpr (kBytes == 8) {
    asm volatile(STREAM_LOAD ".v2.u32 {%0, %1}, [%2];"
                 : "=r"(packet.word[0]), "=r"(packet.word[1])
                 : "l"(address));
  } else if constexpr (kBytes == 4) {
    asm volatile(STREAM_LOAD ".u32 %0, [%1];" : "=r"(packet.word[0]) : "l"(address));
  } else if constexpr (kBytes == 2) {
    unsigned short half;
    asm volatile(STREAM_LOAD ".u16 %0, [%1];" : "=h"(half) : "l"(address));
    packet.word[0] = half;
  } else {
    asm volatile(STREAM_LOAD ".u8 %0, [%1];" : "=r"(packet.word[0]) : "l"(address));
  }
  return packet;
}

/// Loads one packet of device memory coherently, so that the thread sees its own earlier stores.
template <int kBytes>
__device__ __forceinline__ Packet<kBytes> load_coherent_packet(const void* address) {
  Packet<kBytes> packet;
  if constexpr (kBytes == 16) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(packet.word[0]), "=r"(packet.word[1]), "=r"(packet.word[2]),
                   "=r"(packet.word[3])
                 : "l"(address)
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(packet.word[0]), "=r"(packet.word[1])
                 : "l"(address)
                 : "memory");
  } else if constexpr (kBytes == 4) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(packet.word[0]) : "l"(address) : "memory");
  } else if constexpr (kBytes == 2) {
    unsigned short half;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(half) : "l"(address) : "memory");
    packet.word[0] = half;
  } else {
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(packet.word[0]) : "l"(address) : "memory");
  }
  return packet;
}

/// Stores one packet to device memory that this kernel does not read again (evict-first cache
/// policy). The store address must be a multiple of kBytes.
template <int kBytes>
__device__ __forceinline__ void store_packet_evict_first(void* address,
                                                         const Packet<kBytes>& packet) {
  if constexpr (kBytes == 16) {
    asm volatile(STREAM_STORE ".v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(packet.word[0]),
                 "r"(packet.word[1]), "r"(packet.word[2]), "r"(packet.word[3])
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile(STREAM_STORE ".v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(packet.word[0]),
                 "r"(packet.word[1])
                 : "memory");
  } else if constexpr (kBytes == 4) {
    asm volatile(STREAM_STORE ".u32 [%0], %1;" ::"l"(address), "r"(packet.word[0]) : "memory");
  } else if constexpr (kBytes == 2) {
    asm volatile(STREAM_STORE ".u16 [%0], %1;" ::"l"(address),
                 "h"(static_cast<unsigned short>(packet.word[0]))
                 : "memory");
  } else {
    asm volatile(STREAM_STORE ".u8 [%0], %1;" ::"l"(address), "r"(packet.word[0]) : "memory");
  }
}

/// Stores 16 bytes to device memory with the default cache policy, for data that is read again
/// soon.
template <int kBytes>
__device__ __forceinline__ void store_packet_default_policy(void* address,
                                                            const Packet<kBytes>& packet) {
  static_assert(kBytes == 16, "only whole 16-byte packets are stored this way");
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(packet.word[0]),
               "r"(packet.word[1]), "r"(packet.word[2]), "r"(packet.word[3])
               : "memory");
}

/// Fetches the cache line of a device-memory address into L2, without waiting.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}
