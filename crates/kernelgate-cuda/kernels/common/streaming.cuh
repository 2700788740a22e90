// Global-memory accesses for data that is touched once: one wrapper an instruction, 1 to 16 bytes
// wide.
//
// A Packet<bytes> holds the bytes that one thread moves with one instruction. Loads take the
// read-only path; they are volatile so that the compiler keeps their order, many in flight before
// the first use. The loads do allocate in L1: with L1::no_allocate the same kernels run up to 6 %
// slower, or equally fast, depending on the work before them.
#pragma once

template <int kBytes>
struct Packet {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16,
                "a packet is 1, 2, 4, 8 or 16 bytes: one load or store instruction");
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  unsigned int word[kWords];
};

// Overridable so that policies can be compared; the defaults are the measured best.
#ifndef STREAM_LOAD
#define STREAM_LOAD "ld.global.nc"
#endif
#ifndef STREAM_STORE
#define STREAM_STORE "st.global.cs"
#endif

/// Loads one packet that no one writes during the kernel. `address` must be a multiple of kBytes.
template <int kBytes>
__device__ __forceinline__ Packet<kBytes> load_stream(const void* address) {
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

/// Loads one packet coherently, so that the thread sees its own earlier stores.
template <int kBytes>
__device__ __forceinline__ Packet<kBytes> load_coherent(const void* address) {
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

/// Stores one packet that this kernel does not read again. `address` must be a multiple of kBytes.
template <int kBytes>
__device__ __forceinline__ void store_stream(void* address, const Packet<kBytes>& packet) {
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

/// Stores 16 bytes with the default cache policy.
template <int kBytes>
__device__ __forceinline__ void store_coherent(void* address, const Packet<kBytes>& packet) {
  static_assert(kBytes == 16, "only whole 16-byte packets are stored this way");
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(packet.word[0]),
               "r"(packet.word[1]), "r"(packet.word[2]), "r"(packet.word[3])
               : "memory");
}

/// Fetches the cache line of an address into L2.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}
