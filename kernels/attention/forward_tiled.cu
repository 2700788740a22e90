// Attention forward in three kernels as in forward_naive, with tiles in shared memory and a 4x4
// tile of results in each thread's registers.
//
//   scores:   S = q k^T / sqrt(d), -inf where j > i if causal
//   softmax:  in place, lse
//   values:   out = P v
//
// Threads: 16x16 threads compute a 64x64 tile; thread (x, y) owns rows 4y..4y+3 and columns
// 4x..4x+3. In the softmax kernel, 256 threads compute a row: one pass finds maximum and sum
// together, a second pass rescales. Shared memory: a 32-deep slice of both GEMM operands as fp32,
// k-major, [32][68] each (17 KiB). A thread loads four rows or columns of an operand with one
// 16-byte load; the padding to 68 keeps these loads aligned. Bound: fp32 FMA; one step along k
// takes two 16-byte loads from shared memory for 16 FMAs. Device memory: the scores kernel writes 4
// b h s^2 bytes, the softmax reads them twice and writes them once, and the values kernel reads
// them. Against forward_naive: each element loaded to shared memory serves 64 results instead of
// one. Against forward_naive, the softmax reads a row of scores twice instead of three times, and
// score tiles above the causal diagonal are not computed. The probabilities P overwrite the scores
// S in fp32.
#include "attention/shape.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"

constexpr int kTile = TILE;  // rows and columns of a square tile of results
constexpr int kSlice = 32;
constexpr int kPitch = kTile + 4;  // floats of a row in shared memory
constexpr int kThreads = THREADS;
static_assert(kTile * kTile == 16 * kThreads, "a thread computes 4x4 results of a tile");
static_assert(kHeadDim % kSlice == 0 && kHeadDim % kTile == 0,
              "the head dimension is a whole number of slices and tiles");

struct OperandSlices {
  float a[kSlice][kPitch];
  float b[kSlice][kPitch];
};

// Adds the product of two operand slices to a thread's 4x4 results: acc += a^T b.
__device__ __forceinline__ void add_gemm_of_slice(float (&acc)[4][4], const OperandSlices& slice,
                                                  int x,
                                               int y) {
#pragma unroll 8
  for (int c = 0; c < kSlice; ++c) {
    const float4 a = *reinterpret_cast<const float4*>(&slice.a[c][y * 4]);
    const float4 b = *reinterpret_cast<const float4*>(&slice.b[c][x * 4]);
    const float four_of_operand_a[4] = {a.x, a.y, a.z, a.w},
        four_of_operand_b[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        acc[i][j] = fma_f32(four_of_operand_a[i], four_of_operand_b[j], acc[i][j]);
  }
}

// Copies rows row0.. and columns c0..c0+31 of a [rows, d] matrix to shared memory as fp32,
// transposed; rows past the end become zero.
__device__ __forceinline__ void load_slice_transposed(float (&to)[kSlice][kPitch], const u16* from,
                                                int row0, int rows, int c0) {
  // The slice has 64 rows of 4 chunks of eight columns; each thread loads one chunk, adjacent
  // threads load from adjacent rows.
  const int row = threadIdx.x % kTile, chunk = threadIdx.x / kTile;
  uint4 x = make_uint4(0u, 0u, 0u, 0u);
  if (row0 + row < rows)
    x = *reinterpret_cast<const uint4*>(from + static_cast<i64>(row0 + row) * kHeadDim + c0 +
                                        chunk * 8);
  const u32 w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[chunk * 8 + 2 * i][row] = Element::low(w[i]);
    to[chunk * 8 + 2 * i + 1][row] = Element::high(w[i]);
  }
}

// Each thread block computes one 64x64 tile of scores; blockIdx.z is the head.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_forward_tiled_scores(const u16* __restrict__ q, const u16* __restrict__ k,
                                   float* __restrict__ scores, int seqlen) {
  __shared__ __align__(16) OperandSlices slice;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;
  const int key0 = blockIdx.x * kTile, first_query_of_tile = blockIdx.y * kTile;
  const i64 head = blockIdx.z;
  q += head * seqlen * kHeadDim;
  k += head * seqlen * kHeadDim;
  float acc[4][4] = {};
  if (!kCausal || key0 <= first_query_of_tile) {
    for (int c0 = 0; c0 < kHeadDim; c0 += kSlice) {
      load_slice_transposed(slice.a, q, first_query_of_tile, seqlen, c0);
      load_slice_transposed(slice.b, k, key0, seqlen, c0);
      __syncthreads();
      add_gemm_of_slice(acc, slice, x, y);
      __syncthreads();
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int query = first_query_of_tile + y * 4 + i;
    if (query >= seqlen) continue;
    float* row = scores + (head * seqlen + query) * seqlen;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int key = key0 + x * 4 + j;
      if (key < seqlen)
        row[key] = kCausal && key > query ? negative_infinity() : acc[i][j] * kScale;
    }
  }
}

// Each thread block computes the softmax of one row of scores in place; lse may be null.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_forward_tiled_softmax(float* __restrict__ scores, float* __restrict__ lse,
                                    int seqlen) {
  __shared__ float scratch[kThreads / 32];
  float* row = scores + static_cast<i64>(blockIdx.x) * seqlen;
  const int keys = kCausal ? static_cast<int>(blockIdx.x % static_cast<u32>(seqlen)) + 1 : seqlen;
  float best = negative_infinity(), sum = 0.f;
  for (int j = threadIdx.x; j < keys; j += kThreads) {
    const float x = row[j];
    if (x > best) {
      sum *= exp2_approx((best - x) * kLog2E);
      best = x;
    }
    sum += exp2_approx((x - best) * kLog2E);
  }
  const float top = block_max<kThreads>(best, scratch);
  sum = best == negative_infinity() ? 0.f : sum * exp2_approx((best - top) * kLog2E);
  sum = block_sum<kThreads>(sum, scratch);
  const float inverse = 1.f / sum;
  for (int j = threadIdx.x; j < seqlen; j += kThreads)
    row[j] = j < keys ? exp2_approx((row[j] - top) * kLog2E) * inverse : 0.f;
  if (lse != nullptr && threadIdx.x == 0) lse[blockIdx.x] = top + log2_approx(sum) * kLn2;
}

// Each thread block computes one 64x64 tile of the attention output: blockIdx.x gives its queries,
// y its columns, z the head.
extern "C" __global__ void __launch_bounds__(kThreads)
    attention_forward_tiled_values(const float* __restrict__ probabilities,
                                   const u16* __restrict__ v, u16* __restrict__ out, int seqlen) {
  __shared__ __align__(16) OperandSlices slice;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;
  const int first_query_of_tile = blockIdx.x * kTile, column0 = blockIdx.y * kTile;
  const i64 head = blockIdx.z;
  const float* p = probabilities + head * seqlen * seqlen;
  v += head * seqlen * kHeadDim;
  const int keys = kCausal ? min_of(seqlen, first_query_of_tile + kTile) : seqlen;
  float acc[4][4] = {};
  for (int key0 = 0; key0 < keys; key0 += kSlice) {
    // Copies a 64 x 32 slice of P to shared memory, transposed: 32 neighbouring lanes read one row.
#pragma unroll
    for (int pass = 0; pass < kTile / 8; ++pass) {
      const int row = pass * 8 + threadIdx.x / 32, column = threadIdx.x % 32;
      const bool valid = first_query_of_tile + row < seqlen && key0 + column < keys;
      slice.a[column][row] =
          valid ? p[static_cast<i64>(first_query_of_tile + row) * seqlen + key0 + column] : 0.f;
    }
    // Copies a 32 x 64 slice of V to shared memory, eight columns a thread.
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    uint4 w = make_uint4(0u, 0u, 0u, 0u);
    if (key0 + row < keys)
      w = *reinterpret_cast<const uint4*>(v + static_cast<i64>(key0 + row) * kHeadDim + column0 +
                                          chunk * 8);
    float4* to = reinterpret_cast<float4*>(&slice.b[row][chunk * 8]);
    to[0] =
        make_float4(Element::low(w.x), Element::high(w.x), Element::low(w.y), Element::high(w.y));
    to[1] =
        make_float4(Element::low(w.z), Element::high(w.z), Element::low(w.w), Element::high(w.w));
    __syncthreads();
    add_gemm_of_slice(acc, slice, x, y);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int query = first_query_of_tile + y * 4 + i;
    if (query >= seqlen) continue;
    u32* to = reinterpret_cast<u32*>(out + (head * seqlen + query) * kHeadDim + column0 + x * 4);
    to[0] = Element::pack(acc[i][0], acc[i][1]);
    to[1] = Element::pack(acc[i][2], acc[i][3]);
  }
}
