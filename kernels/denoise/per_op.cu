// All operations of the action expert except its GEMMs, one kernel for each operation, as a
// framework launches them in eager mode.
//
// These kernels store activations as bf16 and compute in fp32. Styles, norms, scores and the state
// of the Euler method are stored in fp32. Threads: the kernels norm, softmax and action_out use one
// thread block for each row. The other kernels use one thread for each packet of eight adjacent
// elements, or one thread for each element. Every extent of the action expert except that of the
// actions is a multiple of eight. Shared memory: only for reductions over a thread block. Bound:
// launch latency. Launch latency dominates: a tensor of 50 rows moves in less time than a kernel
// takes to start.
#include "common/cluster.cuh"
#include "common/element16.cuh"
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "denoise/panel.cuh"

constexpr int kThreads = THREADS;

__device__ __forceinline__ i64 thread_index() {
  return static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
}

constexpr int kPacket = PACKET;  // bf16 elements of a packet
static_assert(kPacket == 8, "a packet is one 16-byte access");

// Waits for the previous kernel's results; every kernel of this file begins with this call. Under
// programmatic dependent launch (PDL) the thread blocks of a kernel start before the previous
// kernel has ended. Pointers to results of earlier kernels are not __restrict__, because the
// compiler could otherwise move their loads above the wait.
__device__ __forceinline__ void wait_for_previous_kernel() {
  allow_next_kernel();
  wait_for_previous_kernels();
}

__device__ __forceinline__ void unpack_bf16_packet(const uint4 packet, float (&x)[kPacket]) {
  const u32 pairs[] = {packet.x, packet.y, packet.z, packet.w};
#pragma unroll
  for (int i = 0; i < kPacket / 2; ++i) {
    x[2 * i] = Bf16::low(pairs[i]);
    x[2 * i + 1] = Bf16::high(pairs[i]);
  }
}

__device__ __forceinline__ uint4 pack_bf16_packet(const float (&x)[kPacket]) {
  return make_uint4(Bf16::pack(x[0], x[1]), Bf16::pack(x[2], x[3]), Bf16::pack(x[4], x[5]),
                    Bf16::pack(x[6], x[7]));
}

__device__ __forceinline__ void load_packet(const float* from, float (&x)[kPacket]) {
  const float4 low = reinterpret_cast<const float4*>(from)[0],
               high = reinterpret_cast<const float4*>(from)[1];
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

__device__ __forceinline__ void store_packet(float* to, const float (&x)[kPacket]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// Loads style + bias for the packet of columns that begins at `column`; both arrays have the same
// layout.
__device__ __forceinline__ void load_style_plus_bias(const float* style, const float* bias,
                                                     int column,
                                           float (&x)[kPacket]) {
  float more[kPacket];
  load_packet(style + column, x);
  load_packet(bias + column, more);
#pragma unroll
  for (int i = 0; i < kPacket; ++i) x[i] += more[i];
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + exp2_approx(-x * kLog2E)); }

// Computes the sinusoidal embedding of the denoising time, out[row] = [sin(2 pi t / period), cos(2
// pi t / period)], in fp64. The width / 2 periods of the time embedding go from 4e-3 to 4 in
// geometric steps. The time t of a row is times[row], or *time if times is null. With `panels`, out
// has the panel layout of a GEMM operand of the fused kernels; otherwise it is row-major.
// row_blocks thread blocks compute each row.
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_per_op_embed(const float* __restrict__ time, const double* __restrict__ times, u16* out,
                         int width, int row_blocks, int panels) {
  wait_for_previous_kernel();
  const int half = width / 2, row = blockIdx.x / row_blocks,
            i = (blockIdx.x % row_blocks) * kThreads + threadIdx.x;
  if (i >= half) return;
  const double t = times != nullptr ? times[row] : static_cast<double>(*time);
  const double fraction = half > 1 ? static_cast<double>(i) / (half - 1) : 0.0;
  const double period = 4e-3 * pow(4.0 / 4e-3, fraction);
  double sine, cosine;
  sincospi(2.0 * t / period, &sine, &cosine);
  const i64 first = static_cast<i64>(row) * width;
  out[panels != 0 ? panel_element_offset(row, i, width) : first + i] =
      Bf16::from_f32(static_cast<float>(sine));
  out[panels != 0 ? panel_element_offset(row, half + i, width) : first + half + i] =
      Bf16::from_f32(static_cast<float>(cosine));
}

// Adds `bias` to the GEMM result x in place; with `silu`, x then becomes x sigmoid(x). Each thread
// handles one packet of eight elements.
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_per_op_bias(uint4* x, const float* __restrict__ bias, int columns, int packets,
                        int silu) {
  wait_for_previous_kernel();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= packets) return;
  float y[kPacket], more[kPacket];
  unpack_bf16_packet(x[i], y);
  load_packet(bias + i % (columns / kPacket) * kPacket, more);
#pragma unroll
  for (int j = 0; j < kPacket; ++j) {
    y[j] += more[j];
    if (silu != 0) y[j] *= sigmoid(y[j]);
  }
  x[i] = pack_bf16_packet(y);
}

// Converts x to bf16: out = bf16(x).
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_per_op_cast(const float* x, u16* out, i64 elements) {
  wait_for_previous_kernel();
  const i64 i = thread_index();
  if (i < elements) out[i] = Bf16::from_f32(x[i]);
}

// Copies x to out.
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_per_op_copy(const float* x, float* out, i64 elements) {
  wait_for_previous_kernel();
  const i64 i = thread_index();
  if (i < elements) out[i] = x[i];
}

// Computes the rotary angles[row][i] = (cos, sin)(position / 1e4^(2 i / head_dim)) of the rows'
// positions, counted from `first`. Each rotary angle is reduced to one period in fp64 before its
// sine and cosine are computed.
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_per_op_angles(float2* angles, int first, int rows, int head_dim) {
  wait_for_previous_kernel();
  const i64 index = thread_index();
  const int half = head_dim / 2, row = static_cast<int>(index / half),
            i = static_cast<int>(index % half);
  if (row >= rows) return;
  double sine, cosine;
  sincos((first + row) * pow(1e4, -2.0 * i / head_dim), &sine, &cosine);
  angles[index] = make_float2(static_cast<float>(cosine), static_cast<float>(sine));
}

// Computes RMSNorm without gain, out = h / sqrt(mean h^2 + 1e-6), with one thread block for each
// row. A thread keeps its four adjacent elements in registers if the row has no more than four for
// each thread.
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_per_op_norm(const uint2* h, float4* out, int width) {
  wait_for_previous_kernel();
  __shared__ float scratch[kThreads / 32];
  const int packets_of_four = width / 4;
  const i64 row = static_cast<i64>(blockIdx.x) * packets_of_four;
  const auto load = [&](int i) {
    const uint2 pairs = h[row + i];
    return make_float4(Bf16::low(pairs.x), Bf16::high(pairs.x), Bf16::low(pairs.y),
                       Bf16::high(pairs.y));
  };
  float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
  float sum = 0.f;
  for (int i = threadIdx.x; i < packets_of_four; i += kThreads) {
    x = load(i);
    sum += x.x * x.x + x.y * x.y + (x.z * x.z + x.w * x.w);
  }
  const float inverse = rsqrtf(block_sum<kThreads>(sum, scratch) / width + 1e-6f);
  for (int i = threadIdx.x; i < packets_of_four; i += kThreads) {
    if (packets_of_four > kThreads) x = load(i);
    out[row + i] = make_float4(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse);
  }
}

// Applies an adaRMS style, y = x (1 + scale) + shift, where scale and shift are the first two
// thirds of style + bias. The result goes to `y` in bf16 or to `exact` in fp32; the other pointer
// is null. Each thread handles one packet of eight elements.
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_per_op_modulate(const float* x, const float* style, const float* __restrict__ bias,
                            uint4* y, float* exact, int width, int packets) {
  wait_for_previous_kernel();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= packets) return;
  const int column = i % (width / kPacket) * kPacket;
  float value[kPacket], scale[kPacket], shift[kPacket];
  load_packet(x + static_cast<i64>(i) * kPacket, value);
  load_style_plus_bias(style, bias, column, scale);
  load_style_plus_bias(style, bias, width + column, shift);
#pragma unroll
  for (int j = 0; j < kPacket; ++j) value[j] = value[j] * (1.f + scale[j]) + shift[j];
  if (exact != nullptr)
    store_packet(exact + static_cast<i64>(i) * kPacket, value);
  else
    y[i] = pack_bf16_packet(value);
}

// Adds gate * branch to the residual stream h, where gate is the last third of style + bias. Each
// thread handles one packet of eight elements.
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_per_op_residual(uint4* h, const uint4* branch, const float* style,
                            const float* __restrict__ bias, int width, int packets) {
  wait_for_previous_kernel();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= packets) return;
  float x[kPacket], more[kPacket], gate[kPacket];
  unpack_bf16_packet(h[i], x);
  unpack_bf16_packet(branch[i], more);
  load_style_plus_bias(style, bias, 2 * width + i % (width / kPacket) * kPacket, gate);
#pragma unroll
  for (int j = 0; j < kPacket; ++j) x[j] += gate[j] * more[j];
  h[i] = pack_bf16_packet(x);
}

// Rotates (RoPE) the pairs (i, i + head_dim / 2) of every head of q [rows, heads, head_dim] and of
// k [rows, head_dim] in place. Each thread rotates one packet of pairs.
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_per_op_rope(uint4* q, uint4* k, const float* angles, int rows, int heads,
                        int head_dim) {
  wait_for_previous_kernel();
  const int index = blockIdx.x * kThreads + threadIdx.x;
  const int half = head_dim / (2 * kPacket), packets_of_row = (heads + 1) * half;
  const int row = index / packets_of_row, rest = index % packets_of_row, head = rest / half,
      i = rest % half;
  if (row >= rows) return;
  uint4* x = head < heads ? q + (static_cast<i64>(row) * heads + head) * 2 * half
                          : k + static_cast<i64>(row) * 2 * half;
  const float* turn = angles + (static_cast<i64>(row) * half + i) * 2 * kPacket;
  float a[kPacket], b[kPacket], turns[2][kPacket];
  unpack_bf16_packet(x[i], a);
  unpack_bf16_packet(x[i + half], b);
  load_packet(turn, turns[0]);
  load_packet(turn + kPacket, turns[1]);
#pragma unroll
  for (int j = 0; j < kPacket; ++j) {
    // The cosine and sine of a pair are adjacent in `angles`.
    const float cosine = turns[2 * j / kPacket][2 * j % kPacket],
                sine = turns[2 * j / kPacket][2 * j % kPacket + 1];
    const float rotated_value = a[j] * cosine - b[j] * sine;
    b[j] = b[j] * cosine + a[j] * sine;
    a[j] = rotated_value;
  }
  x[i] = pack_bf16_packet(a);
  x[i + half] = pack_bf16_packet(b);
}

// Concatenates keys = [k_cache; k; zeros] and values = [v_cache; v; zeros] into `padded` rows of
// head_dim, in packets of 8 elements.
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_per_op_concat(const uint4* __restrict__ k_cache, const uint4* __restrict__ v_cache,
                          const uint4* k, const uint4* v, uint4* keys, uint4* values, int prefix,
                          int rows, int padded, int packets) {
  wait_for_previous_kernel();
  const i64 i = thread_index();
  const i64 cached_packets = static_cast<i64>(prefix) * packets,
            seen = cached_packets + static_cast<i64>(rows) * packets;
  if (i >= static_cast<i64>(padded) * packets) return;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  keys[i] = i < cached_packets ? k_cache[i] : i < seen ? k[i - cached_packets] : zero;
  values[i] = i < cached_packets ? v_cache[i] : i < seen ? v[i - cached_packets] : zero;
}

// Computes p = softmax(scores * scale) over the first `context` of the `padded` columns of each row
// and zeroes the remaining columns. Each thread block handles one row of scores; a thread keeps its
// four adjacent scores in registers if the row has no more than four for each thread.
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_per_op_softmax(const float4* scores, uint2* p, int context, int padded, float scale) {
  wait_for_previous_kernel();
  __shared__ float scratch[2][kThreads / 32];
  const int packets_of_four = padded / 4;
  const i64 row = static_cast<i64>(blockIdx.x) * packets_of_four;
  const float scale_in_base_2 = scale * kLog2E;
  const auto load = [&](int i) {
    const float4 x = scores[row + i];
    const int columns_left = context - 4 * i;
    return make_float4(columns_left > 0 ? x.x * scale_in_base_2 : negative_infinity(),
                       columns_left > 1 ? x.y * scale_in_base_2 : negative_infinity(),
                       columns_left > 2 ? x.z * scale_in_base_2 : negative_infinity(),
                       columns_left > 3 ? x.w * scale_in_base_2 : negative_infinity());
  };
  float top = negative_infinity();
  const auto power = [&](const float4 x) {
    return make_float4(exp2_approx(x.x - top), exp2_approx(x.y - top), exp2_approx(x.z - top),
                       exp2_approx(x.w - top));
  };
  float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int i = threadIdx.x; i < packets_of_four; i += kThreads) {
    x = load(i);
    top = max_f32(top, max_f32(max_f32(x.x, x.y), max_f32(x.z, x.w)));
  }
  top = block_max<kThreads>(top, scratch[0]);
  float sum = 0.f;
  for (int i = threadIdx.x; i < packets_of_four; i += kThreads) {
    x = power(packets_of_four > kThreads ? load(i) : x);
    sum += (x.x + x.y) + (x.z + x.w);
  }
  const float inverse = 1.f / block_sum<kThreads>(sum, scratch[1]);
  for (int i = threadIdx.x; i < packets_of_four; i += kThreads) {
    if (packets_of_four > kThreads) x = power(load(i));
    p[row + i] = make_uint2(Bf16::pack(x.x * inverse, x.y * inverse),
                            Bf16::pack(x.z * inverse, x.w * inverse));
  }
}

// Computes the gated activation gate = gelu_tanh(gate) * up in place. Each thread handles one
// packet of eight elements.
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_per_op_gelu(uint4* gate, const uint4* up, int packets) {
  wait_for_previous_kernel();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= packets) return;
  float x[kPacket], y[kPacket];
  unpack_bf16_packet(gate[i], x);
  unpack_bf16_packet(up[i], y);
#pragma unroll
  for (int j = 0; j < kPacket; ++j) {
    // The formula x/2 (1 + tanh(u)) equals x sigmoid(2 u).
    x[j] = x[j] * sigmoid(1.5957691216057308f * (x[j] + 0.044715f * x[j] * x[j] * x[j])) * y[j];
  }
  gate[i] = pack_bf16_packet(x);
}

// Computes velocity [rows, 32] = y [rows, width] out [width, 32] + bias, with one thread block for
// each row of y. A warp reads eight adjacent rows of the weight `out` at once, one packet by each
// lane; the sums of lanes and warps are added at the end.
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_per_op_action_out(const float* y, const uint4* out, const float* __restrict__ bias,
                              float* velocity, int width) {
  wait_for_previous_kernel();
  constexpr int kColumns = ACTION, kPackets = kColumns / kPacket, kRows = kThreads / kPackets;
  static_assert(kColumns == 32, "a lane finishes a column");
  __shared__ __align__(16) float parts[kThreads / 32][kColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, packet = threadIdx.x % kPackets;
  float sum[kPacket] = {};
#pragma unroll 8
  for (int i = threadIdx.x / kPackets; i < width; i += kRows) {
    const float x = y[static_cast<i64>(blockIdx.x) * width + i];
    float w[kPacket];
    unpack_bf16_packet(out[i * kPackets + packet], w);
#pragma unroll
    for (int j = 0; j < kPacket; ++j) sum[j] += x * w[j];
  }
#pragma unroll
  for (int j = 0; j < kPacket; ++j) {
#pragma unroll
    for (int mask = kPackets; mask < 32; mask *= 2)
      sum[j] += __shfl_xor_sync(kFullWarp, sum[j], mask);
  }
  if (lane < kPackets) store_packet(&parts[warp][packet * kPacket], sum);
  __syncthreads();
  if (warp > 0) return;
  float total = bias[lane];
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) total += parts[i][lane];
  velocity[static_cast<i64>(blockIdx.x) * kColumns + lane] = total;
}

// Euler step of the denoised actions: x += dt velocity.
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_per_op_euler(float* x, const float* velocity, float dt, i64 elements) {
  wait_for_previous_kernel();
  const i64 i = thread_index();
  if (i < elements) x[i] += dt * velocity[i];
}

// Decodes one layer [k][columns] of an fp8 weight to bf16: each e4m3 code is multiplied by two to
// the exponent of its column, which is exact.
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_per_op_dequantize(const uint2* codes, const signed char* exponents, uint4* values,
                              int columns, int packets) {
  wait_for_previous_kernel();
  const i64 i = thread_index();
  if (i >= packets) return;
  const signed char* exponent = exponents + i * kPacket % columns;
  const uint2 packet = codes[i];
  float x[kPacket];
#pragma unroll
  for (int j = 0; j < kPacket; ++j) {
    const u32 code = (j < 4 ? packet.x : packet.y) >> j % 4 * 8;
    // An e4m3 code whose bits are placed in the fields of an f16 has, as an f16, 2^-8 of the code's
    // value.
    const u16 f16 = static_cast<u16>((code & 0x80) << 8 | (code & 0x7f) << 7);
    x[j] = F16::to_f32(f16) * bits_to_f32(static_cast<u32>(exponent[j] + 8 + 127) << 23);
  }
  values[i] = pack_bf16_packet(x);
}

// Decodes one layer of an int4 weight to bf16: each four-bit number, stored plus 8, is multiplied
// by the scale of its column and group of k, which is exact. The int4 scales have the layout [k /
// INT4_GROUP][columns]; the last group may have fewer k.
extern "C" __global__ void __launch_bounds__(kThreads)
    denoise_per_op_dequantize_int4(const u32* codes, const uint4* scales, uint4* values,
                                   int columns, int packets) {
  wait_for_previous_kernel();
  const i64 i = thread_index();
  if (i >= packets) return;
  const i64 row = i * kPacket / columns, column = i * kPacket % columns;
  const uint4 packed = scales[(row / INT4_GROUP * columns + column) / kPacket];
  const u32 pairs[4] = {packed.x, packed.y, packed.z, packed.w}, packet = codes[i];
  float x[kPacket];
#pragma unroll
  for (int j = 0; j < kPacket; ++j) {
    const float scale = j % 2 == 0 ? Bf16::low(pairs[j / 2]) : Bf16::high(pairs[j / 2]);
    x[j] = static_cast<float>(static_cast<int>(packet >> j * 4 & 15) - 8) * scale;
  }
  values[i] = pack_bf16_packet(x);
}
