// Measures the highest matmul rate of the tensor cores: warpgroup MMAs (wgmma) whose operands stay
// in shared memory.
//
//   d[64][256] += a[64][k] b[256][k]^T, round after round; d begins anew every eight rounds
//
// A GEMM also moves its operands, which draws power: at the power cap, a GEMM runs at a lower clock
// than this kernel. The sum of d is written only if it equals the number `improbable`, so that the
// compiler cannot remove the instructions.
//
// Threads: two warpgroups of a block, each with its own 64 rows of a, and both with the same b.
// Shared memory: b, 256 rows of 128 bytes, then a of each warpgroup, 64 rows of 128 bytes.
// Grid: one thread block for each multiprocessor.
// Bound: tensor cores, with 2 * 2 * 64 * 256 * 128 / (bytes of an element) operations per block and
// round.
//
// The macro TYPE is the PTX name of the operands' type, and STEP the number of elements in 32
// bytes.
#include "common/wgmma/tile.cuh"

#if STEP == 16
#define TRANSPOSES ", 0, 0"
#else
#define TRANSPOSES ""
#endif

constexpr int kTileWords = (256 + 2 * 64) * 128 / 4;
constexpr int kInstructions = 4;  // of 32 bytes along k
constexpr int kStepBytes = 32;

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define ACCUMULATORS                                                                             \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63," \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// One wgmma instruction: d += a b^T if `continues` is not 0, else d = a b^T.
__device__ __forceinline__ void multiply(float (&d)[128], u64 a_descriptor, u64 b_descriptor,
                                         int continues) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k" TEXT(STEP) ".f32." TEXT(TYPE) "." TEXT(TYPE)
      " {" ACCUMULATORS "}, %128, %129, p, 1, 1" TRANSPOSES ";\n}"
      : ACCUMULATORS_32(d, 0), ACCUMULATORS_32(d, 32), ACCUMULATORS_32(d, 64),
        ACCUMULATORS_32(d, 96)
      : "l"(a_descriptor), "l"(b_descriptor), "r"(continues));
}

extern "C" __global__ void __launch_bounds__(256, 1)
    measure_resident_matmul(const u32* __restrict__ operands, int rounds, float improbable,
                            float* guard) {
  __shared__ __align__(1024) u32 tiles[kTileWords];
  for (int i = threadIdx.x; i < kTileWords; i += blockDim.x) tiles[i] = operands[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();

  const u32 tiles_address = static_cast<u32>(__cvta_generic_to_shared(tiles));
  const u64 b_descriptor = wgmma_operand_descriptor(tiles_address);
  const u64 a_descriptor =
      wgmma_operand_descriptor(tiles_address + 256 * 128 + threadIdx.x / 128 * 64 * 128);
  float d[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) d[i] = 0.0f;
  for (int round = 0; round < rounds; ++round) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kInstructions; ++i) {
      multiply(d, advance_operand_descriptor(a_descriptor, i * kStepBytes),
               advance_operand_descriptor(b_descriptor, i * kStepBytes), i > 0 || round % 8 != 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 128; ++i) sum += d[i];
  if (sum == improbable) *guard = sum;
}
