// Copies of boxes of a tensor, whose shape, strides, box and swizzle a map holds that the host
// encoded; and registers moved between warpgroups, as kernels do that have one of them copy. Each
// function wraps one instruction, which needs sm_90 or later.
#pragma once
#include "common/types.cuh"

// A tensor map in the encoding of the driver. Kernels take a tensor map by value, as `const
// __grid_constant__`.
struct __align__(64) TensorMap {
  u64 words[16];
};

// The first element of a box in a tensor of batches of matrices.
struct BoxOrigin {
  int column, row, matrix, batch;
};

// Starts the tensor copy (TMA) of a box from device to shared memory. Elements outside the tensor
// become zeros, and count in the barrier's bytes too.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, const BoxOrigin& at,
                                         u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(at.column), "r"(at.row), "r"(at.matrix), "r"(at.batch), "r"(barrier)
      : "memory");
}

// Starts the tensor copy (TMA) of a box from shared to device memory. Elements of the box that lie
// outside the tensor are not written.
__device__ __forceinline__ void store_box(const TensorMap& map, const BoxOrigin& at, u32 from) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::
          "l"(&map),
      "r"(at.column), "r"(at.row), "r"(at.matrix), "r"(at.batch), "r"(from)
      : "memory");
}

// Closes a group of this thread's tensor stores.
__device__ __forceinline__ void store_box_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all groups of this thread's tensor stores have read their shared memory.
__device__ __forceinline__ void store_box_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Changes the number of registers of each thread in the warpgroup to kRegisters.
template <int kRegisters>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
