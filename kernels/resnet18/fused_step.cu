// Kernels of a ResNet-18 training step that process all parameters at once: rounding weights to
// bf16, gradients of all weights and biases, SGD. Each kernel reads a list of jobs and a list of
// the job of each block, so that one launch replaces one launch for each parameter.
//
//   weight gradient [filters, taps, channels] = Σ over frames and pixels of g · what the tap read
//   m' = momentum · m + factor · Σ over parts of gradient ; p' = p - rate · m'
//
// Gradients of weights are implicit GEMMs on bf16 tensor cores with fp32 sums. The rows of a
// weight-gradient GEMM are split into parts, each with its own copy of the result. SGD adds the
// parts of a gradient in a fixed order, so every run has the same bits. Threads: as in
// resnet18/tiles.cuh in the GEMMs; one thread for four elements in all other kernels. Bound: tensor
// cores and L2 in the GEMMs; memory bandwidth in the other kernels, of which SGD moves 16 bytes a
// parameter. Against train.cu: no gathered or transposed operands, three launches instead of seven
// for each convolution.
#include "common/cluster.cuh"
#include "resnet18/tiles.cuh"

static_assert(kGroups == 1, "many blocks a multiprocessor: nothing to gain from groups");
constexpr int kPacket = 4;         // elements that a thread loads at once
constexpr int kPackets = PACKETS;  // of a thread

__device__ __forceinline__ void wait_for_previous_kernel() {
  allow_next_kernel();
  wait_for_previous_kernels();
}

// Job that rounds a weight to bf16: `packed` [filters, columns] gets the columns from `first` on of
// the weight [filters, depth], followed by zeros. If `tiles` is not null, it gets the same bf16
// weights in tiles of 32 by 64, whose 16-byte chunks are swizzled by row.
struct WeightRoundingJob {
  i64 first_block;
  const float* weight;
  u16* packed;
  u16* tiles;
  i64 elements;
  i64 depth, first, columns;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_fused_pack(const WeightRoundingJob* jobs, const int* job_of) {
  wait_for_previous_kernel();
  const WeightRoundingJob job = jobs[job_of[blockIdx.x]];
  const u32 depth = job.depth, first = job.first, columns = job.columns, elements = job.elements;
  const u32 start = (blockIdx.x - job.first_block) * kThreads * kPackets * kPacket;
#pragma unroll
  for (int n = 0; n < kPackets; ++n) {
    const u32 i = start + (n * kThreads + threadIdx.x) * kPacket;
    if (i >= elements) return;
    const u32 row = i / columns, column = first + i % columns;
    const float* from = job.weight + static_cast<i64>(row) * depth + column;
    float x[kPacket];
    if (depth % kPacket == 0 && first % kPacket == 0) {
      const float4 four = *reinterpret_cast<const float4*>(from);
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
#pragma unroll
      for (int j = 0; j < kPacket; ++j) x[j] = column + j < depth ? from[j] : 0.f;
    }
    const uint2 four = make_uint2(Bf16::pack(x[0], x[1]), Bf16::pack(x[2], x[3]));
    *reinterpret_cast<uint2*>(job.packed + i) = four;
    if (job.tiles == nullptr) continue;
    const u32 at = i % columns, tile = row / 32 * (columns / 64) + at / 64;
    const u32 offset_in_weight_tile =
        swizzled_chunk_offset<128>(row % 32, at % 64 / 8) / 2 + at % 8;
    *reinterpret_cast<uint2*>(job.tiles + tile * 2048 + offset_in_weight_tile) = four;
  }
}

// Job that computes the gradient of a convolution's weight and bias: parts [parts, filters,
// columns] of the weight's gradient, then parts [parts, filters] of the bias's.
struct WeightGradientJob {
  i64 first_block;
  const u16* gradient;  // [steps, B, out_side², filters]
  const u16* frames;    // [steps, B, side², channels]
  float* sums;
  i64 parts;
  i64 steps, images, fed;
  i64 side, channels, out_side, filters, kernel, stride;
  i64 first_tap, columns;
};

// Sums the bias gradients of 64 filters over the rows of some tiles and over the fed time steps.
__device__ __forceinline__ void sum_bias_gradients(const WeightGradientJob& job, float* sums,
                                                   int filter0,
                                         int begin, int end) {
  const int steps = job.steps, images = job.images, pixels = job.out_side * job.out_side;
  const int image_groups = ceil_div(images * steps, kTile);
  // Each thread sums the gradients of eight filters over every 16th row.
  const int chunk = threadIdx.x % 8, first_row = threadIdx.x / 8;
  float sum[8] = {};
  for (int tile = begin; tile < end; ++tile) {
    const int image0 = tile % image_groups * (kTile / steps);
#pragma unroll
    for (int n = 0; n < kCopiesPerThread; ++n) {
      const int row = first_row + n * kRowsBetweenCopies;
      const int t = row % steps, image = image0 + row / steps;
      if (t >= job.fed || image >= images) continue;
      const i64 frame = static_cast<i64>(t) * images + image;
      const uint4 eight_gradients = *reinterpret_cast<const uint4*>(
          job.gradient + (frame * pixels + tile / image_groups) * job.filters + filter0 +
              8 * chunk);
      const u32 pairs[4] = {eight_gradients.x, eight_gradients.y, eight_gradients.z,
          eight_gradients.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum[2 * j] += Bf16::low(pairs[j]);
        sum[2 * j + 1] += Bf16::high(pairs[j]);
      }
    }
  }
  float* all = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int j = 0; j < 8; ++j) all[first_row * kTile + 8 * chunk + j] = sum[j];
  __syncthreads();
  if (threadIdx.x >= kTile) return;
  float total = 0.f;
#pragma unroll
  for (int row = 0; row < kRowsBetweenCopies; ++row) total += all[row * kTile + threadIdx.x];
  sums[filter0 + threadIdx.x] = total;
}

// Each thread block computes one part of a gradient: of 64 filters by 64 columns of a weight, or of
// the biases of 64 filters.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_fused_weight_gradients(const WeightGradientJob* jobs, const int* job_of) {
  wait_for_previous_kernel();
  const WeightGradientJob job = jobs[job_of[blockIdx.x]];
  const int columns = job.columns, filters = job.filters, parts = job.parts;
  const int steps = job.steps, images = job.images;
  // Number of column tiles of the weight gradient, plus one tile for the bias gradient.
  const int column_tiles_with_bias = columns / kTile + 1, filter_tiles = filters / kTile;
  const int block_number_in_job = blockIdx.x - job.first_block;
  const int block_column = block_number_in_job % column_tiles_with_bias,
      filter0 = block_number_in_job / column_tiles_with_bias % filter_tiles * kTile;
  const int part = block_number_in_job / column_tiles_with_bias / filter_tiles;
  const int out_side = job.out_side, pixels = out_side * out_side;
  const int image_groups = ceil_div(images * steps, kTile), tiles = pixels * image_groups;
  const int begin = static_cast<i64>(tiles) * part / parts;
  const int end = static_cast<i64>(tiles) * (part + 1) / parts;
  if (block_column == column_tiles_with_bias - 1) {
    float* biases = job.sums + static_cast<i64>(parts) * filters * columns;
    sum_bias_gradients(job, biases + static_cast<i64>(part) * filters, filter0, begin, end);
    return;
  }
  const int column0 = block_column * kTile, channels = job.channels, side = job.side;
  const int kernel = job.kernel, stride = job.stride;
  const int tap = job.first_tap + column0 / channels, channel = column0 % channels;
  const int from_row = tap / kernel - kernel / 2, from_column = tap % kernel - kernel / 2;
  const int images_a_tile = kTile / steps;
  ImageRowsOfTile rows(images, steps);
  int left = end - begin, group = begin % image_groups;
  int out_row = begin / image_groups / out_side, out_column = begin / image_groups % out_side;
  const auto copy_next_tiles_to_stage = [&](u32 stage) {
    while (left > 0) {
      const int row = out_row * stride + from_row, column = out_column * stride + from_column;
      const bool inside = row >= 0 && row < side && column >= 0 && column < side;
      if (inside) {
        rows.image0 = group * images_a_tile;
        rows.copy(stage, job.gradient, pixels, out_row * out_side + out_column, filters, filter0);
        rows.copy(stage + kTileBytes, job.frames, side * side, row * side + column, channels,
                  channel);
      }
      --left;
      if (++group == image_groups) {
        group = 0;
        if (++out_column == out_side) out_column = 0, ++out_row;
      }
      if (inside) return true;
    }
    return false;
  };
  const u32 lane = threadIdx.x % 32, warp = group_warp();
  const u32 a = ldmatrix_lane_address_columns_by_k<kRowBytes>(0, lane) ^ (warp / 2 * 64);
  const u32 b = ldmatrix_lane_address_rows_by_k<kRowBytes>(0, lane) ^ (warp % 2 * 64);
  Sums sums;
  clear(sums);
  run_gemm_pipeline(copy_next_tiles_to_stage, [&](u32 gradient, u32 frames) {
    multiply_atb<kTile / 16, kRowBytes, kRowBytes>(sums, gradient + a, frames + b);
  });
  float* to = job.sums + (static_cast<i64>(part) * filters + filter0) * columns + column0;
  for_each_pair_of_sums(sums, [&](int row, int column, float2 pair) {
    *reinterpret_cast<float2*>(to + static_cast<i64>(row) * columns + column) = pair;
  });
}

// Job that sums the parts of a gradient, which are `apart` elements apart.
struct SumGradientPartsJob {
  i64 first_block;
  const float* parts;
  float* sum;
  i64 count, apart, elements;
};

// Sums the parts of all gradients before the GPUs exchange gradients, so that SGD reads a single
// part.
extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_fused_sum_parts(const SumGradientPartsJob* jobs, const int* job_of) {
  wait_for_previous_kernel();
  const SumGradientPartsJob job = jobs[job_of[blockIdx.x]];
  const u32 start = (blockIdx.x - job.first_block) * kThreads * kPackets * kPacket;
#pragma unroll 1
  for (int n = 0; n < kPackets; ++n) {
    const u32 i = start + (n * kThreads + threadIdx.x) * kPacket;
    if (i >= job.elements) return;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int part = 0; part < job.count; ++part) {
      const float4 four = *reinterpret_cast<const float4*>(job.parts + part * job.apart + i);
      sum.x += four.x, sum.y += four.y, sum.z += four.z, sum.w += four.w;
    }
    *reinterpret_cast<float4*>(job.sum + i) = sum;
  }
}

// Job that updates one parameter [elements / depth, depth] by SGD. The parameter's gradient has the
// columns from `first` on, in parts that are `apart` elements apart.
struct SgdUpdateJob {
  i64 first_block;
  i64 first_element, elements;
  const float* gradient;
  i64 parts, apart;
  i64 depth, first, columns;
  i64 factor;  // bits of a float
};

extern "C" __global__ void __launch_bounds__(kThreads)
    resnet18_fused_sgd(const SgdUpdateJob* jobs, const int* job_of,
                       const float* __restrict__ parameters, const float* __restrict__ momenta,
                       float* __restrict__ new_parameters, float* __restrict__ new_momenta,
                       float momentum, float rate) {
  wait_for_previous_kernel();
  const SgdUpdateJob job = jobs[job_of[blockIdx.x]];
  const u32 depth = job.depth, first = job.first, columns = job.columns;
  const u32 elements = job.elements;
  const float factor = bits_to_f32(static_cast<u32>(job.factor));
  const u32 start = (blockIdx.x - job.first_block) * kThreads * kPackets * kPacket;
  float4 p[kPackets], m[kPackets];
#pragma unroll
  for (int n = 0; n < kPackets; ++n) {
    const u32 i = start + (n * kThreads + threadIdx.x) * kPacket;
    if (i < elements) {
      p[n] = *reinterpret_cast<const float4*>(parameters + job.first_element + i);
      m[n] = *reinterpret_cast<const float4*>(momenta + job.first_element + i);
    }
  }
#pragma unroll
  for (int n = 0; n < kPackets; ++n) {
    const u32 i = start + (n * kThreads + threadIdx.x) * kPacket;
    if (i >= elements) continue;
    float g[kPacket] = {};
    if (depth % kPacket == 0 && columns % kPacket == 0) {
      const u32 column = i % depth - first;  // beyond all columns where it is before the first
      if (column < columns) {
        const float* from = job.gradient + static_cast<i64>(i / depth) * columns + column;
        for (int part = 0; part < job.parts; ++part) {
          const float4 four = *reinterpret_cast<const float4*>(from + part * job.apart);
          g[0] += four.x, g[1] += four.y, g[2] += four.z, g[3] += four.w;
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kPacket; ++j) {
        const u32 column = (i + j) % depth - first;
        if (column >= columns) continue;
        const float* from = job.gradient + static_cast<i64>((i + j) / depth) * columns + column;
        for (int part = 0; part < job.parts; ++part) g[j] += from[part * job.apart];
      }
    }
    m[n].x = fmaf(momentum, m[n].x, factor * g[0]);
    m[n].y = fmaf(momentum, m[n].y, factor * g[1]);
    m[n].z = fmaf(momentum, m[n].z, factor * g[2]);
    m[n].w = fmaf(momentum, m[n].w, factor * g[3]);
    p[n].x = fmaf(-rate, m[n].x, p[n].x);
    p[n].y = fmaf(-rate, m[n].y, p[n].y);
    p[n].z = fmaf(-rate, m[n].z, p[n].z);
    p[n].w = fmaf(-rate, m[n].w, p[n].w);
    *reinterpret_cast<float4*>(new_momenta + job.first_element + i) = m[n];
    *reinterpret_cast<float4*>(new_parameters + job.first_element + i) = p[n];
  }
}
