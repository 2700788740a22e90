// Wrappers of wgmma for bf16 and wide tiles of 144 to 256 columns: one function for each width.
// Both operands are stored like x in common/wgmma/tile.cuh: each row holds 64 elements of k.
//
// d[64][n] = x[64][16] w[n][16]^T, or d += if `accumulate` is not 0; n is twice the length of d.
// In a thread, d[4 j + 2 h + i] is the element at row (warp % 4) 16 + lane / 4 + 8 h and column
// 8 j + lane % 4 * 2 + i.
#pragma once
#include "common/wgmma/tile.cuh"

// Assembly operands that are the accumulators d.
#define D_72                                                                                      \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"            \
  "%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"          \
  "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,"          \
  "%65,%66,%67,%68,%69,%70,%71"
#define D_80                                                                                      \
  D_72 ","                                                                                        \
  "%72,%73,%74,%75,%76,%77,%78,%79"
#define D_96                                                                                      \
  D_80 ","                                                                                        \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define D_128                                                                                     \
  D_96 ","                                                                                        \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,"             \
  "%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// WGMMA_WIDE defines one wrapper of wgmma, where `n` is twice the length of d; x_at, w_at and
// accumulate_at are the numbers of the assembly operands after those of d.
#define WGMMA_WIDE(length, n, x_at, w_at, accumulate_at, ...)                                     \
  __device__ __forceinline__ void wgmma_wide(float (&d)[length], u64 x, u64 w, int accumulate) {  \
    asm volatile(                                                                                 \
        "{\n.reg .pred added;\nsetp.ne.b32 added, %" #accumulate_at ", 0;\n"                      \
        "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" D_##length "}, "             \
        "%" #x_at ", %" #w_at ", added, 1, 1, 0, 0;\n}\n"                                         \
        : __VA_ARGS__                                                                             \
        : "l"(x), "l"(w), "r"(accumulate));                                                       \
  }
WGMMA_WIDE(72, 144, 72, 73, 74, ACCUMULATORS_32(d, 0), ACCUMULATORS_32(d, 32),
           ACCUMULATORS_8(d, 64))
WGMMA_WIDE(80, 160, 80, 81, 82, ACCUMULATORS_32(d, 0), ACCUMULATORS_32(d, 32),
           ACCUMULATORS_16(d, 64))
WGMMA_WIDE(96, 192, 96, 97, 98, ACCUMULATORS_32(d, 0), ACCUMULATORS_32(d, 32),
           ACCUMULATORS_32(d, 64))
WGMMA_WIDE(128, 256, 128, 129, 130, ACCUMULATORS_32(d, 0), ACCUMULATORS_32(d, 32),
           ACCUMULATORS_32(d, 64), ACCUMULATORS_32(d, 96))
