// The whole denoising loop in one persistent kernel: clusters of eight blocks, and a grid barrier
// between two GEMMs.
//
//  a layer   qkv       q, k, v = r (h (1 + scale)) W + shift W, r = 1 / rms; q and k rotated;
//                      k and v written behind the cached prefix
//            attend    softmax(q k^T) v; the blocks of a cluster split the keys
//            out       h += gate (attended W), the sums of squares, h (1 + scale) for the next GEMM
//            gate_up   hidden = gelu_tanh(r x W_gate + shift W_gate) (r x W_up + shift W_up)
//            down      h += gate (hidden W), as out
//  a step    rows      velocity = final norm(h) action_out + b;  x += dt velocity;
//                      h = x action_in + b
//
// The norm has no separate pass over h. The phase that writes h also writes h times the next norm's
// (1 + scale), the input of the next GEMM. The factor 1 / rms and the shift (times W, computed
// before the loop) are applied after the GEMM. persistent.cuh describes the split of the work and
// the movement of data.
//
// Threads: a thread block has 384 threads, of which 256 compute; one other thread requests weights
// and one other warp copies activations. With weights of eight or four bits a thread block has 512
// threads, of which 128 decode the weights. Shared memory: the weights of a GEMM, its input x, and
// the data that the other thread blocks of the cluster send; see persistent.cuh. Bound: latency.
// Two fifths of a layer's time are five exchanges through L2, 1.7 to 2.2 us each, from a thread
// block's last store to the first copy of its data elsewhere. In each layer the GEMMs take 5.5
// us, attention 2.5 us, exchanges within the cluster and the work after them 3.5 us. Reading a
// layer's weights takes 8 us, concurrently with the GEMMs, attention and exchanges. Weights of
// eight or four bits therefore gain nothing by themselves: decoding takes longer than reading the
// saved bytes would (docs/results).
#include "denoise/actions.cuh"
#include "denoise/persistent.cuh"
#include "denoise/persistent_attention.cuh"

// Phase between two denoising steps, one thread block for each row of actions: computes the
// velocity, the new actions and their input projection.
__device__ __forceinline__ void velocity_and_next_actions_phase(const PersistentArguments& a,
                                                                const BlockContext& b, int step,
                                           float* scratch) {
  float *x = scratch, *parts = x + kActionColumns,
        *y = parts + 8 * kActionColumns;  // [32], [8 warps][32], [width]
  const int row = blockIdx.x, warp = b.group * 4 + b.warp;
  const float* style = a.final_styles + step * i64{3} * kWidth;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kClusters; ++i) sum += load_bypassing_l1(a.squares + row * 16 + i);
  const float inverse = rsqrtf(sum / kWidth + kNormEpsilon);
  for (int i = threadIdx.x * 2; i < kWidth; i += kWorkers * 2) {
    const u32 pair = load_bypassing_l1(reinterpret_cast<const u32*>(a.h + row * kWidth + i));
    y[i] = Bf16::low(pair) * inverse * (1.f + style[i]) + style[kWidth + i];
    y[i + 1] = Bf16::high(pair) * inverse * (1.f + style[i + 1]) + style[kWidth + i + 1];
  }
  named_barrier_sync(kWorkersBarrier, kWorkers);
  float sums[8] = {};
  partial_projection_to_actions<kWorkers>(y, a.action_out, sums);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) sums[j] += __shfl_xor_sync(kFullWarp, sums[j], mask);
    if (b.lane < 4) parts[warp * kActionColumns + b.lane * 8 + j] = sums[j];
  }
  named_barrier_sync(kWorkersBarrier, kWorkers);
  if (warp == 0) {
    float v = a.out_bias[b.lane];
#pragma unroll
    for (int i = 0; i < 8; ++i) v += parts[i * kActionColumns + b.lane];
    if (a.velocity != nullptr) {
      a.velocity[row * kActionColumns + b.lane] = v;
    } else {
      x[b.lane] = a.state[row * kActionColumns + b.lane] + a.dt * v;
      a.state[row * kActionColumns + b.lane] = x[b.lane];
    }
  }
  if (step + 1 == a.steps) return;
  named_barrier_sync(kWorkersBarrier, kWorkers);
  const int column = threadIdx.x * 4;
  float z[4];
  project_actions_to_four_columns(x, a.action_in, a.in_bias, column, z);
  const uint2 rounded = make_uint2(Bf16::pack(z[0], z[1]), Bf16::pack(z[2], z[3]));
  *reinterpret_cast<uint2*>(a.h + row * kWidth + column) = rounded;
  const float h[4] = {Bf16::low(rounded.x), Bf16::high(rounded.x), Bf16::low(rounded.y),
                      Bf16::high(rounded.y)};
  const float4 s =
      *reinterpret_cast<const float4*>(a.styles1 + (step + 1) * i64{3} * kWidth + column);
  *reinterpret_cast<uint2*>(a.x + activation_offset(row, column)) =
      make_uint2(Bf16::pack(h[0] * (1.f + s.x), h[1] * (1.f + s.y)),
                 Bf16::pack(h[2] * (1.f + s.z), h[3] * (1.f + s.w)));
  sum = sum_across_lane_group<32>(h[0] * h[0] + h[1] * h[1] + h[2] * h[2] + h[3] * h[3]);
  if (b.lane == 0) a.squares[row * 16 + warp] = sum, a.squares[row * 16 + 8 + warp] = 0.f;
}

// The phases of one layer, as the 256 compute threads of a thread block execute them.
struct LayerPhases {
  const PersistentArguments& a;
  int layer, step;
  u32 parity;  // of what comes once a layer
  const float *style1, *style2;
  u16 *keys, *values;

  __device__ __forceinline__ LayerPhases(const PersistentArguments& a, int layer, int step,
      u32 parity)
      : a(a), layer(layer), step(step), parity(parity) {
    const i64 style = (layer * static_cast<i64>(a.steps) + step) * 3 * kWidth;
    style1 = a.styles1 + style, style2 = a.styles2 + style;
    keys = a.keys + layer * i64{kMaxKeys} * kHeadDim,
    values = a.values + layer * i64{kMaxKeys} * kHeadDim;
  }
  __device__ __forceinline__ bool last() const { return layer + 1 == a.layers; }

  __device__ __forceinline__ void run_qkv_phase(BlockContext& b, FourColumnValues& h,
                                                float* inverse) const {
    const UnitRange units = b.qkv();
    const int slice = b.slice(), row = b.row(slice);
    float4 turns[kMaxQkvUnits] = {};
    float2 shifts[kMaxQkvUnits][2] = {};
    u16* to[kMaxQkvUnits] = {};  // where a thread's columns go
    if (b.group == 0) {
      const float* shift = a.shift_qkv +
                           (static_cast<i64>(layer) * a.steps + step) * (kQkvUnits * 16) +
                           units.first * 16 + b.lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kMaxQkvUnits; ++i) {
        const int unit = units.first + i;
        to[i] = address_of_qkv_column_pair(unit, row, b.lane % 4 * 2);
        turns[i] = make_float4(1.f, 0.f, 1.f, 0.f);
        if (i >= units.count) continue;
        if (row < a.rows && unit / 16 <= kHeads)
          turns[i] = *reinterpret_cast<const float4*>(a.angles + row * kHalfHead + unit % 16 * 8 +
                                                      b.lane % 4 * 2);
        shifts[i][0] = *reinterpret_cast<const float2*>(shift + i * 16),
        shifts[i][1] = *reinterpret_cast<const float2*>(shift + i * 16 + 8);
      }
    }
    if (threadIdx.x == 0) mbarrier_arrive_expect_bytes(b.parts_full, kQkvPartsBytes);
    mbarrier_wait(b.x_full, b.x_parity);
    if (layer == 0 && step > 0) h = load_owned_h(a, OwnedElementsOfH(a, b));
    if (b.group == 1) {
      InverseRmsOfRows norm;
      norm.request(a.squares, b.thread);
      norm.store_inverse_rms(inverse, b.thread);
      named_barrier_arrive(kNormed, kWorkers);
      wait_for_x_without_reading(b);
    } else {
      float acc[24];
      multiply_slice_of_k<48, 8, kQkvPanel>(b, acc, b.base + kQkvAt, b.qkv_full, parity, kQkv);
      if (b.lane == 0) mbarrier_arrive(b.qkv_free);
      stop_weight_requests(b);
      // Sends half of the rows' sums to the thread block of the cluster that has the other slice of
      // k.
      const u32 parts = cluster_address(b.base + kPartsAt + b.thread * 16, b.rank ^ 4),
                barrier = cluster_address(b.parts_full, b.rank ^ 4);
      float4 mine[kMaxQkvUnits];
#pragma unroll
      for (int i = 0; i < kMaxQkvUnits; ++i) {
        const float4 sums_of_upper_rows =
            make_float4(acc[8 * i], acc[8 * i + 1], acc[8 * i + 4], acc[8 * i + 5]);
        const float4 sums_of_lower_rows =
            make_float4(acc[8 * i + 2], acc[8 * i + 3], acc[8 * i + 6], acc[8 * i + 7]);
        const float4 half_sent_to_peer = slice == 0 ? sums_of_lower_rows : sums_of_upper_rows;
        mine[i] = slice == 0 ? sums_of_upper_rows : sums_of_lower_rows;
        st_async_b128(parts + i * 2048, __float_as_uint(half_sent_to_peer.x),
                      __float_as_uint(half_sent_to_peer.y), __float_as_uint(half_sent_to_peer.z),
                      __float_as_uint(half_sent_to_peer.w), barrier);
      }
      named_barrier_sync(kNormed, kWorkers);
      mbarrier_wait(b.parts_full, b.parts_parity);
      if (row < a.rows) {
        const float r = inverse[row];
#pragma unroll
        for (int i = 0; i < kMaxQkvUnits; ++i) {
          if (i >= units.count) continue;
          const float4 other = load_shared_f32x4(b.base + kPartsAt + i * 2048 + b.thread * 16),
                       turn = turns[i];
          // Two adjacent columns of q or k, and the two columns half a head further with which they
          // rotate.
          const float l0 = r * (mine[i].x + other.x) + shifts[i][0].x,
                      l1 = r * (mine[i].y + other.y) + shifts[i][0].y;
          const float r0 = r * (mine[i].z + other.z) + shifts[i][1].x,
                      r1 = r * (mine[i].w + other.w) + shifts[i][1].y;
          write(to[i], units.first + i,
                Bf16::pack(l0 * turn.x - r0 * turn.y, l1 * turn.z - r1 * turn.w),
                Bf16::pack(r0 * turn.x + l0 * turn.y, r1 * turn.z + l1 * turn.w));
        }
      }
    }
    b.parts_parity ^= 1, b.x_parity ^= 1;
  }

  // Loads the cached keys and values of the prefix into registers. These loads are issued before
  // the GEMM qkv, so that they complete while qkv waits for its input x.
  __device__ __forceinline__ KeyValueFragments load_prefix_keys_and_values(
      const BlockContext& b) const {
    const AttentionShare share(a, b);
    KeyValueFragments fragments;
    if (share.active) fragments.load(a, b, share, keys, values, false);
    return fragments;
  }

  __device__ __forceinline__ void run_attention_phase(BlockContext& b,
                                                      KeyValueFragments& fragments) const {
    const AttentionShare share(a, b);
    mbarrier_wait(b.keys_full, parity);
    if (share.active) fragments.load(a, b, share, keys, values, true);
    mbarrier_wait(b.queries_full, parity);  // all blocks: none arrives twice in a row
    end_timed_stage(kAttention);
    if (!share.active) return;
    attend_to_share_of_keys(a, b, share, fragments);
  }

  __device__ __forceinline__ void run_out_phase(BlockContext& b, FourColumnValues& h) const {
    const OwnedElementsOfH at(a, b);
    const FourColumnValues gate = load_four_column_values(at, style1 + 2 * kWidth), scale =
        load_four_column_values(at, style2);
    multiply_rows_by_slice<4, kOutPanel>(b, kOutAt, b.out_full, 0, kOut);
    if (!b.owns_rows(a)) return;
    add_gated_sum_to_h(b, at, gate, h);
    publish_scaled_h_and_squares(a, b, at, h, scale, a.squares + kMaxRows * 16);
  }

  __device__ __forceinline__ void run_down_phase(BlockContext& b, FourColumnValues& h) const {
    const OwnedElementsOfH at(a, b);
    const FourColumnValues gate = load_four_column_values(at, style2 + 2 * kWidth),
               scale = last() ? FourColumnValues{} : load_four_column_values(at, style1 +
                   a.steps * i64{3} * kWidth);
    multiply_rows_by_slice<8, kDownPanel>(b, kDownAt, b.down_full, b.down_free, kDown);
    if (!b.owns_rows(a)) return;
    add_gated_sum_to_h(b, at, gate, h);
    if (last())
      publish_h_and_squares(a, b, at, h);
    else
      publish_scaled_h_and_squares(a, b, at, h, scale, a.squares);
  }

  __device__ __forceinline__ void run_gate_up_phase(BlockContext& b, float* inverse) const {
    // Each warpgroup computes its own columns of qkv, because the two warpgroups use wgmma
    // instructions of different width.
    if (b.group == 0)
      run_gate_up_unit_group<kFirstGroupUnits>(b, inverse);
    else
      run_gate_up_unit_group<kMaxGateUpUnits - kFirstGroupUnits>(b, inverse);
    b.parts_parity ^= 1, b.x_parity ^= 1;
  }

 private:
  // Returns the address of a pair of columns of q, k or v in the unit number `unit`. The function
  // `write` finds the rotation partners of the pair half a head further on.
  __device__ __forceinline__ u16* address_of_qkv_column_pair(u32 unit, u32 row, u32 pair) const {
    const u32 head = unit / 16, column = unit % 16 * 8 + pair, key = a.prefix + row;
    if (head < kHeads) return a.q + query_offset(row * kHeads + head, column);
    return head == kHeads ? keys + key_offset(key, column) : values + value_offset(key, column);
  }
  __device__ __forceinline__ void write(u16* to, u32 unit, u32 left, u32 right) const {
    constexpr u32 kRightOffsetInQueries = kHalfHead / 64 * kQueryRows * 64,
                  kFurther = kHalfHead / 16 * 256, kNextValue = 32;
    const u32 head = unit / 16;
    if (head <= kHeads) {
      *reinterpret_cast<u32*>(to) = left;
      *reinterpret_cast<u32*>(to + (head < kHeads ? kRightOffsetInQueries : kFurther)) = right;
    } else {
      to[0] = static_cast<u16>(left), to[kNextValue] = static_cast<u16>(left >> 16);
      to[kFurther] = static_cast<u16>(right),
      to[kFurther + kNextValue] = static_cast<u16>(right >> 16);
    }
  }

  // Multiplies the thread block's slice of k for all columns of the cluster; only the first
  // warpgroup executes the function. If `read` is not 0, the warpgroup arrives at the named barrier
  // `read` once it has read the weights.
  template <int kPanels, u32 kPanel>
  __device__ __forceinline__ void multiply_rows_by_slice(BlockContext& b, u32 weights, u32 full,
                                                         u32 read, TimerStage stage) const {
    if (threadIdx.x == 0 && b.owns_rows(a))
      mbarrier_arrive_expect_bytes(b.parts_full, kRowPartsBytes);
    if (b.group == 0) {
      float acc[36];
      multiply_slice_of_k<72, kPanels, kPanel>(b, acc, b.base + weights, full, parity, stage);
      if (b.lane == 0 && read != 0) mbarrier_arrive(read);
      stop_weight_requests(b);
      send_row_sums_to_owners(a, b, acc);
    } else {
      wait_for_x_without_reading(b);
    }
    b.x_parity ^= 1;
  }

  template <int kUnits>
  __device__ __forceinline__ void run_gate_up_unit_group(BlockContext& b, float* inverse) const {
    constexpr u32 kUnitsOfOtherWarpgroup =
        kUnits == kFirstGroupUnits ? 0 : kFirstGroupUnits;  // units of the other warpgroup
    const UnitRange units = b.gate_up();
    const int count = min_of(kUnits, units.count - static_cast<int>(kUnitsOfOtherWarpgroup)),
              slice = b.slice(), row = b.row(slice);
    const float* shift = a.shift_gate_up +
                         (static_cast<i64>(layer) * a.steps + step) * (kGateUpUnits * 16) +
                         (units.first + kUnitsOfOtherWarpgroup) * 16 + b.lane % 4 * 2;
    float2 shifts[kUnits][2] = {};
    u32 to[kUnits] = {};  // where a thread's columns go
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      to[i] =
          activation_offset(row, (units.first + kUnitsOfOtherWarpgroup + i) * 8 + b.lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      if (i < count)
        shifts[i][0] = *reinterpret_cast<const float2*>(shift + i * 16),
        shifts[i][1] = *reinterpret_cast<const float2*>(shift + i * 16 + 8);
    // Each warpgroup exchanges the sums of its own columns, so that the first warpgroup exchanges
    // while the second one still multiplies.
    const u32 parts_full = kUnitsOfOtherWarpgroup == 0 ? b.parts_full : b.second_parts_full,
              parts_parity = kUnitsOfOtherWarpgroup == 0 ? b.parts_parity : parity;
    if (b.thread == 0) mbarrier_arrive_expect_bytes(parts_full, kUnits * kGateUpPartBytes);
    mbarrier_wait(b.x_full + 2 * 8, b.x_parity);
    if (kUnitsOfOtherWarpgroup != 0) {
      // The second warpgroup computes the norm's 1 / rms while the first warpgroup uses the tensor
      // cores.
      InverseRmsOfRows norm;
      norm.request(a.squares + kMaxRows * 16, b.thread);
      norm.store_inverse_rms(inverse, b.thread);
      named_barrier_arrive(kNormed, kWorkers);
      named_barrier_sync(kNormedHere, 128);
    }
    float acc[kUnits * 8];
    multiply_slice_of_k<kUnits * 16, 8, kGateUpPanel, 2, 2>(
        b, acc, b.base + kGateUpAt + kUnitsOfOtherWarpgroup * 2048, b.gate_up_full + b.group * 8,
        parity, kGateUp);
    if (b.lane == 0) mbarrier_arrive(b.gate_up_free);
    if (kUnitsOfOtherWarpgroup == 0)
      named_barrier_sync(kNormed, kWorkers);
    else
      stop_weight_requests(b);

    // Sends half of the rows' sums to the thread block that has the other slice of k, two units of
    // columns at a time.
    const u32 parts = b.base + kPartsAt + kUnitsOfOtherWarpgroup * 1024;
    const u32 peer = cluster_address(parts, b.rank ^ 4),
              barrier = cluster_address(parts_full, b.rank ^ 4);
    float4 mine[kUnits];  // two columns of gate, two of up
    uint2 half_sent_to_peer[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const float4 sums_of_upper_rows =
          make_float4(acc[8 * i], acc[8 * i + 1], acc[8 * i + 4], acc[8 * i + 5]);
      const float4 sums_of_lower_rows =
          make_float4(acc[8 * i + 2], acc[8 * i + 3], acc[8 * i + 6], acc[8 * i + 7]);
      const float4 other = slice == 0 ? sums_of_lower_rows : sums_of_upper_rows;
      mine[i] = slice == 0 ? sums_of_upper_rows : sums_of_lower_rows,
      half_sent_to_peer[i] = make_uint2(Bf16::pack(other.x, other.y), Bf16::pack(other.z, other.w));
    }
#pragma unroll
    for (int i = 0; i + 1 < kUnits; i += 2)
      st_async_b128(peer + i * 1024 + b.thread * 16, half_sent_to_peer[i].x, half_sent_to_peer[i].y,
                    half_sent_to_peer[i + 1].x, half_sent_to_peer[i + 1].y, barrier);
    if (kUnits % 2 == 1)
      st_async_b64(peer + (kUnits - 1) * 1024 + b.thread * 8, half_sent_to_peer[kUnits - 1].x,
                   half_sent_to_peer[kUnits - 1].y, barrier);
    mbarrier_wait(parts_full, parts_parity);
    if (row >= a.rows) return;
    const float r = inverse[row];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (i >= count) continue;
      const u32 from = parts + i / 2 * 2048 +
                       (i % 2 == 0 && i + 1 == kUnits ? b.thread * 8 : b.thread * 16 + i % 2 * 8);
      const u32 gates = load_shared_b32(from), ups = load_shared_b32(from + 4);
      const float g0 = r * (mine[i].x + Bf16::low(gates)) + shifts[i][0].x,
                  g1 = r * (mine[i].y + Bf16::high(gates)) + shifts[i][0].y;
      const float u0 = r * (mine[i].z + Bf16::low(ups)) + shifts[i][1].x,
                  u1 = r * (mine[i].w + Bf16::high(ups)) + shifts[i][1].y;
      *reinterpret_cast<u32*>(a.hidden + to[i]) =
          Bf16::pack(gelu_tanh(g0) * u0, gelu_tanh(g1) * u1);
    }
  }
};

// All thread blocks must be resident at once, and no second launch of the persistent kernel may run
// on the GPU at the same time. One of the output pointers `velocity` and `state` is null, and the
// kernel writes only the other. Before each launch the kernel of the shifts must run, which also
// resets `counter` to 0.
extern "C" __global__ void __cluster_dims__(kRanks, 1, 1) __launch_bounds__(kThreads, 1)
    denoise_persistent(u16* h, const u16* qkv, const u16* out, const u16* gate_up, const u16* down,
                       const float* styles1, const float* styles2, const float* final_styles,
                       const float* shift_qkv, const float* shift_gate_up, const float2* angles,
                       u16* keys, u16* values, u16* x, u16* q, u16* attended, u16* hidden,
                       float* squares, u32* counter, const u16* action_out, const float* out_bias,
                       const u16* action_in, const float* in_bias, float* velocity, float* state,
                       float dt, int rows, int prefix, int layers, int steps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ float inverse[64];
  __shared__ __align__(8) u64 barriers[BlockContext::kWords];
  const PersistentArguments a{h,        qkv,       out,          gate_up,   down,
                    styles1,  styles2,   final_styles, shift_qkv, shift_gate_up,
                    angles,   keys,      values,       x,         q,
                    attended, hidden,    squares,      counter,   action_out,
                    out_bias, action_in, in_bias,      velocity,  state,
                    dt,       rows,      prefix,       layers,    steps};
  BlockContext b(shared_address(shared), shared_address(barriers));
  begin_stage_clocks();
  if (threadIdx.x == 0) b.initialise_barriers();
  __syncthreads();
  cluster_arrive();
  cluster_wait();
  allow_next_kernel();

  if (b.group >= 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (kCoded && b.group == 3) {
      Decoder(a, b).decode_all_weights();
    } else {
      if (b.warp == 0 && b.lane == 0) WeightProducer(a, b).request_all_weights();
      if (b.warp == 1) ActivationProducer(a, b).copy_all_activations();
    }
    __syncwarp();
    cluster_arrive_relaxed();  // none leaves while another may still send
    cluster_wait();
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCoded ? 216 : 232));
  wait_for_previous_kernels();
  FourColumnValues residual;
  {
    const OwnedElementsOfH at(a, b);
    residual = load_owned_h(a, at);
    publish_scaled_h_and_squares(a, b, at, residual, load_four_column_values(at, a.styles1),
        a.squares);
  }
  arrive();
  end_timed_stage(kStart);
  u32 parity = 0;
#pragma unroll 1
  for (int step = 0; step < a.steps; ++step) {
#pragma unroll 1
    for (int i = 0; i < a.layers; ++i, parity ^= 1) {
      const LayerPhases layer(a, i, step, parity);
      b.rematerialize();
      KeyValueFragments fragments = layer.load_prefix_keys_and_values(b);
      layer.run_qkv_phase(b, residual, inverse);
      end_timed_stage(kQkv + 2);
      arrive();
      b.rematerialize();
      layer.run_attention_phase(b, fragments);
      end_timed_stage(kAttention + 2);
      arrive();
      b.rematerialize();
      layer.run_out_phase(b, residual);
      end_timed_stage(kOut + 2);
      arrive();
      b.rematerialize();
      layer.run_gate_up_phase(b, inverse);
      end_timed_stage(kGateUp + 2);
      arrive();
      b.rematerialize();
      layer.run_down_phase(b, residual);
      end_timed_stage(kDown + 2);
      arrive();
    }
    mbarrier_wait(b.rows_full, step & 1);
    if (static_cast<int>(blockIdx.x) < a.rows)
      velocity_and_next_actions_phase(a, b, step, reinterpret_cast<float*>(shared + kXAt));
    if (step + 1 < a.steps) arrive();
    end_timed_stage(kRows);
  }
  store_stage_clocks();
  cluster_arrive_relaxed();
  cluster_wait();
}
