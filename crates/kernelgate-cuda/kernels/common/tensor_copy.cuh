// Copies of boxes of a tensor by the Tensor Memory Accelerator (TMA), with tensor maps that the
// host encoded, and register reallocation between warpgroups (setmaxnreg). Each function of this
// file wraps one PTX instruction that needs sm_90 or later.
#pragma once
#include "common/types.cuh"

// A TMA tensor map in the driver's encoding (CUtensorMap). A kernel takes a tensor map by value, as
// a parameter `const __grid_constant__`.
struct __align__(64) TensorMap {
  u64 words[16];
};

// Coordinates of the first element of a TMA box in a four-dimensional tensor: batches of matrices.
struct TmaBoxOrigin {
  int column, row, matrix, batch;
};

// Starts an asynchronous TMA copy of a box of the tensor from device memory to shared memory.
// Elements of the box outside the tensor become zeros in shared memory, and the mbarrier counts
// their bytes too.
__device__ __forceinline__ void tma_load_box(u32 to, const TensorMap& map, const TmaBoxOrigin& at,
                                         u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(at.column), "r"(at.row), "r"(at.matrix), "r"(at.batch), "r"(barrier)
      : "memory");
}

// Starts an asynchronous TMA copy of a box of the tensor from shared memory to device memory.
// Elements of the box that lie outside the tensor are not written to device memory.
__device__ __forceinline__ void tma_store_box(const TensorMap& map, const TmaBoxOrigin& at,
                                              u32 from) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::
          "l"(&map),
      "r"(at.column), "r"(at.row), "r"(at.matrix), "r"(at.batch), "r"(from)
      : "memory");
}

// Commits this thread's earlier TMA stores as a group that can be waited for.
__device__ __forceinline__ void tma_store_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all groups of this thread's TMA stores have read their shared memory, which may then
// be overwritten.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// setmaxnreg_decrease and setmaxnreg_increase change the number of registers of each thread of the
// calling warpgroup to kRegisters.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
