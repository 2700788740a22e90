//! Denoising rung with one launch for each operation: The launches use `kernels/denoise/per_op.cu`
//! and cuBLASLt GEMMs, in the order in which a framework such as PyTorch runs the model. In a
//! captured CUDA graph of the per-operation rung, independent GEMMs run on parallel graph branches
//! (lanes). Quantised weights are dequantised to bf16 before each GEMM, because cuBLASLt has no
//! GEMM of bf16 by fp8.

mod memory;

use super::row::{
    DENOISE_BLOCK_THREADS, DenoiseLaunchSizes, grid_with_one_block_per_row,
    kernel_compiled_for_all_models,
};
use super::run::DenoiseStepOrLoop;
use super::writer::DenoiseProgramBuilder;
use crate::denoise::definition::LayerWeightFormat;
use crate::denoise::int4;
use crate::denoise::model::{ExpertDimensions, VALUES_PER_ACTION};
use kernelgate::backend::program::{
    LaunchArgument, LaunchArgumentList, LaunchProgram, NULL, ProgramLane, RegionPointer,
    int_operand, int_operands, long_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;
use kernelgate_cuda::libraries::gemm::{GemmMatrixDtype, GemmSpec};

use memory::{
    create_per_op_program_with_regions, keys_padded_to_eight, matrices_stored_quantised,
    matrix_extents_of_one_layer, pointers_to_layer_codes_and_scales,
};

/// Number of neighbouring elements that a thread of most per-operation kernels handles; every size
/// of a model is a multiple of it.
const ELEMENTS_PER_THREAD: usize = 8;

/// Kernels of the denoising rung `per_op`, besides cuBLASLt's GEMMs.
pub const PER_OP_DENOISE_KERNELS: &[KernelSpec<DenoiseLaunchSizes>] = &[
    TIME_EMBEDDING_KERNEL,
    BIAS_AND_SILU_KERNEL,
    CAST_TO_BF16_KERNEL,
    COPY_F32_KERNEL,
    ROPE_ANGLES_KERNEL,
    RMS_NORM_KERNEL,
    SCALE_AND_SHIFT_KERNEL,
    ADD_GATED_BRANCH_KERNEL,
    ROTATE_Q_AND_K_KERNEL,
    CONCAT_CACHE_AND_NEW_KEYS_KERNEL,
    ATTENTION_SOFTMAX_KERNEL,
    GELU_GATE_TIMES_UP_KERNEL,
    ACTION_OUTPUT_PROJECTION_KERNEL,
    EULER_STEP_KERNEL,
    DEQUANTIZE_FP8_KERNEL,
    DEQUANTIZE_INT4_KERNEL,
];

/// Kernel of the sinusoidal time embedding, which the rung `fused` launches too.
pub const TIME_EMBEDDING_KERNEL: KernelSpec<DenoiseLaunchSizes> = KernelSpec {
    constant_macros: |_| {
        vec![
            ("THREADS", DENOISE_BLOCK_THREADS),
            ("PACKET", ELEMENTS_PER_THREAD),
            ("ACTION", VALUES_PER_ACTION),
            ("INT4_GROUP", int4::INT4_SCALE_GROUP_ELEMENTS),
        ]
    },
    ..kernel_compiled_for_all_models("denoise/per_op", "denoise_per_op_embed", |items| {
        [
            time_embedding_blocks_per_row(&items.model) * items.rows_or_elements,
            1,
            items.layers_per_launch,
        ]
    })
};

/// Kernel that adds a bias to rows and optionally applies SiLU, with one thread for each packet of
/// eight elements.
const BIAS_AND_SILU_KERNEL: KernelSpec<DenoiseLaunchSizes> = KernelSpec {
    kernel_symbol: "denoise_per_op_bias",
    blocks: |items| {
        [items.rows_or_elements.div_ceil(DENOISE_BLOCK_THREADS), 1, items.layers_per_launch]
    },
    ..TIME_EMBEDDING_KERNEL
};
const CAST_TO_BF16_KERNEL: KernelSpec<DenoiseLaunchSizes> =
    KernelSpec { kernel_symbol: "denoise_per_op_cast", ..BIAS_AND_SILU_KERNEL };
const COPY_F32_KERNEL: KernelSpec<DenoiseLaunchSizes> =
    KernelSpec { kernel_symbol: "denoise_per_op_copy", ..BIAS_AND_SILU_KERNEL };
/// Kernel that computes cosines and sines of the RoPE angles, which the rung `fused` launches too.
pub const ROPE_ANGLES_KERNEL: KernelSpec<DenoiseLaunchSizes> =
    KernelSpec { kernel_symbol: "denoise_per_op_angles", ..BIAS_AND_SILU_KERNEL };
const SCALE_AND_SHIFT_KERNEL: KernelSpec<DenoiseLaunchSizes> =
    KernelSpec { kernel_symbol: "denoise_per_op_modulate", ..BIAS_AND_SILU_KERNEL };
const ADD_GATED_BRANCH_KERNEL: KernelSpec<DenoiseLaunchSizes> =
    KernelSpec { kernel_symbol: "denoise_per_op_residual", ..BIAS_AND_SILU_KERNEL };
const ROTATE_Q_AND_K_KERNEL: KernelSpec<DenoiseLaunchSizes> =
    KernelSpec { kernel_symbol: "denoise_per_op_rope", ..BIAS_AND_SILU_KERNEL };
const CONCAT_CACHE_AND_NEW_KEYS_KERNEL: KernelSpec<DenoiseLaunchSizes> =
    KernelSpec { kernel_symbol: "denoise_per_op_concat", ..BIAS_AND_SILU_KERNEL };
const GELU_GATE_TIMES_UP_KERNEL: KernelSpec<DenoiseLaunchSizes> =
    KernelSpec { kernel_symbol: "denoise_per_op_gelu", ..BIAS_AND_SILU_KERNEL };
const EULER_STEP_KERNEL: KernelSpec<DenoiseLaunchSizes> =
    KernelSpec { kernel_symbol: "denoise_per_op_euler", ..BIAS_AND_SILU_KERNEL };

const DEQUANTIZE_FP8_KERNEL: KernelSpec<DenoiseLaunchSizes> =
    KernelSpec { kernel_symbol: "denoise_per_op_dequantize", ..BIAS_AND_SILU_KERNEL };
const DEQUANTIZE_INT4_KERNEL: KernelSpec<DenoiseLaunchSizes> =
    KernelSpec { kernel_symbol: "denoise_per_op_dequantize_int4", ..BIAS_AND_SILU_KERNEL };

const RMS_NORM_KERNEL: KernelSpec<DenoiseLaunchSizes> = KernelSpec {
    kernel_symbol: "denoise_per_op_norm",
    blocks: grid_with_one_block_per_row,
    ..TIME_EMBEDDING_KERNEL
};
const ATTENTION_SOFTMAX_KERNEL: KernelSpec<DenoiseLaunchSizes> =
    KernelSpec { kernel_symbol: "denoise_per_op_softmax", ..RMS_NORM_KERNEL };
const ACTION_OUTPUT_PROJECTION_KERNEL: KernelSpec<DenoiseLaunchSizes> =
    KernelSpec { kernel_symbol: "denoise_per_op_action_out", ..RMS_NORM_KERNEL };

/// Number of thread blocks of the kernel `denoise_per_op_embed` for each row of the time embedding.
pub const fn time_embedding_blocks_per_row(model: &ExpertDimensions) -> usize {
    (model.model_width / 2).div_ceil(DENOISE_BLOCK_THREADS)
}

/// Program of the rung `per_op`, which launches all operations one after the other.
pub fn serial_per_op_program(run: &DenoiseStepOrLoop) -> LaunchProgram {
    write_whole_per_op_program(PerOpProgramWriter {
        writer: create_per_op_program_with_regions(run),
        side_lanes: None,
    })
}

/// Program of the per-operation rung in which independent GEMMs run on parallel graph branches, and
/// every kernel launch uses PDL.
pub fn per_op_program_with_parallel_gemms_and_pdl(run: &DenoiseStepOrLoop) -> LaunchProgram {
    let mut writer = create_per_op_program_with_regions(run);
    writer.uses_programmatic_launch = true;
    let [styles, one, two] = [(); 3].map(|()| writer.program.add_lane());
    let side = Some(ParallelGemmLanes { style_gemm_lane: styles, gemms: [one, two] });
    write_whole_per_op_program(PerOpProgramWriter { writer, side_lanes: side })
}

fn write_whole_per_op_program(mut pass: PerOpProgramWriter) -> LaunchProgram {
    pass.write_whole_loop_or_single_step();
    pass.writer.program
}

/// Lanes (parallel branches of the captured graph) for GEMMs that run concurrently with the main
/// lane.
#[derive(Clone, Copy)]
struct ParallelGemmLanes {
    /// Lane of the GEMM that computes the adaptive style (scale, shift, gate) of the next norm.
    style_gemm_lane: ProgramLane,
    /// Lanes for GEMMs that have the same input x as a GEMM in the main lane, such as k and v
    /// beside q.
    gemms: [ProgramLane; 2],
}

struct PerOpProgramWriter<'a> {
    writer: DenoiseProgramBuilder<'a>,
    /// Side lanes for concurrent GEMMs; with `None`, all GEMMs run one after the other.
    side_lanes: Option<ParallelGemmLanes>,
}

impl PerOpProgramWriter<'_> {
    fn pointer_to(&self, name: &str) -> LaunchArgument {
        self.writer.pointer_to(name)
    }

    fn add_kernel_launch_over_items(
        &mut self,
        kernel: &KernelSpec<DenoiseLaunchSizes>,
        items: usize,
        arguments: impl LaunchArgumentList,
    ) {
        self.writer.add_single_layer_launch(kernel, items, arguments);
    }

    fn begin_nvtx_range(&mut self, name: String) {
        self.writer.program.begin_named_range(name);
    }

    fn end_nvtx_range(&mut self) {
        self.writer.program.end_innermost_range();
    }

    fn write_whole_loop_or_single_step(&mut self) {
        let (x, output) = (self.pointer_to("x"), self.writer.output_operand());
        if !self.writer.run.is_whole_loop {
            return self.write_launches_of_per_op_step(0, x, output);
        }
        let actions = self.writer.run.shape.action_tokens * VALUES_PER_ACTION;
        self.begin_nvtx_range("Denoise_Full_Loop".to_owned());
        self.add_kernel_launch_over_items(
            &COPY_F32_KERNEL,
            actions,
            (x, output, long_operand(actions)),
        );
        let dt = (-1.0 / self.writer.run.denoising_steps as f64) as f32;
        let velocities = self.pointer_to("velocities");
        for step in 0..self.writer.run.denoising_steps {
            self.write_launches_of_per_op_step(step, output, velocities);
            self.add_kernel_launch_over_items(
                &EULER_STEP_KERNEL,
                actions,
                (output, velocities, dt, long_operand(actions)),
            );
        }
        self.end_nvtx_range();
    }

    /// Writes the launches of one denoising step, which compute the velocity of the actions `x`.
    fn write_launches_of_per_op_step(
        &mut self,
        step: usize,
        x: LaunchArgument,
        velocity: LaunchArgument,
    ) {
        let shape = self.writer.run.shape;
        let ExpertDimensions { model_width: width, layer_count: depth, head_dim, .. } = shape.model;
        let s = shape.action_tokens;
        self.begin_nvtx_range(format!("Denoise_Step_{step}"));

        self.begin_nvtx_range(format!("Step_{step}/Time_Embed"));
        let times = match self.writer.run.is_whole_loop {
            true => {
                let times = self.writer.program.pointer_to("times");
                [NULL, times.offset_by(step * Dtype::F64.bytes_per_element()).into()]
            }
            false => [self.pointer_to("t"), NULL],
        };
        let sizes = int_operands([width, time_embedding_blocks_per_row(&shape.model), 0]);
        self.add_kernel_launch_over_items(&TIME_EMBEDDING_KERNEL, 1, (times, "embedding", sizes));
        let [time_in, time_out] =
            ["time_in", "time_out"].map(|name| self.writer.program.pointer_to(name));
        self.add_gemm_in_main_lane([1, width, width], "embedding", time_in, "time_hidden");
        self.add_bias_launch("time_hidden", "time_in_bias", 1, true);
        self.add_gemm_in_main_lane([1, width, width], "time_hidden", time_out, "cond");
        self.add_bias_launch("cond", "time_out_bias", 1, true);
        if let Some(ParallelGemmLanes { style_gemm_lane: styles, .. }) = self.side_lanes {
            self.writer.program.make_lane_wait_for_lane(styles, ProgramLane::MAIN_LANE);
            self.add_style_gemm_in_lane(styles, 0);
        }
        self.end_nvtx_range();

        self.begin_nvtx_range(format!("Step_{step}/Action_Proj_In"));
        self.add_kernel_launch_over_items(
            &CAST_TO_BF16_KERNEL,
            s * VALUES_PER_ACTION,
            (x, "x16", long_operand(s * VALUES_PER_ACTION)),
        );
        let action_in = self.writer.program.pointer_to("action_in");
        self.add_gemm_in_main_lane([s, width, VALUES_PER_ACTION], "x16", action_in, "h");
        self.add_bias_launch("h", "action_in_bias", s, false);
        self.end_nvtx_range();

        // The action tokens (suffix) attend to every key, so no mask is prepared, only the RoPE
        // angles of the positions.
        self.begin_nvtx_range(format!("Step_{step}/Mask_Prep"));
        self.add_kernel_launch_over_items(
            &ROPE_ANGLES_KERNEL,
            s * head_dim / 2,
            ("angles", int_operands([shape.prefix_tokens, s, head_dim])),
        );
        self.end_nvtx_range();

        for layer in 0..depth {
            self.write_launches_of_layer(step, layer);
        }

        self.begin_nvtx_range(format!("Step_{step}/Final_Norm"));
        self.add_ada_rms_norm_launches(
            2 * depth,
            self.writer.program.pointer_to("final_style_bias"),
            true,
        );
        self.end_nvtx_range();
        self.begin_nvtx_range(format!("Step_{step}/Action_Proj_Out"));
        let arguments = ("exact", "action_out", "action_out_bias", velocity, int_operand(width));
        self.add_kernel_launch_over_items(&ACTION_OUTPUT_PROJECTION_KERNEL, s, arguments);
        self.end_nvtx_range();
        self.end_nvtx_range();
    }

    /// Adds the launches that compute `attended` from `q` and the rows of `keys` and `values`: the
    /// scores, their softmax and the weighted sum of values. The argument `keys` is the number of
    /// keys, padded to a multiple of eight.
    fn add_attention_launches(&mut self, keys: usize) {
        let shape = self.writer.run.shape;
        let ExpertDimensions { query_heads: heads, head_dim, .. } = shape.model;
        let (s, context) = (shape.action_tokens, shape.prefix_and_horizon_tokens());
        let spec = GemmSpec {
            b_transposed: true,
            ..GemmSpec::new(s * heads, keys, head_dim, GemmMatrixDtype::Bf16, GemmMatrixDtype::F32)
        };
        let [all_keys, values] =
            ["keys", "values"].map(|name| self.writer.program.pointer_to(name));
        self.add_gemm_of_named_regions(ProgramLane::MAIN_LANE, spec, "q", all_keys, "scores");
        let scale = (1.0 / (head_dim as f64).sqrt()) as f32;
        let arguments = ("scores", "probabilities", int_operands([context, keys]), scale);
        self.add_kernel_launch_over_items(&ATTENTION_SOFTMAX_KERNEL, s * heads, arguments);
        self.add_gemm_in_main_lane(
            [s * heads, head_dim, keys],
            "probabilities",
            values,
            "attended",
        );
    }

    fn write_launches_of_layer(&mut self, step: usize, layer: usize) {
        let shape = self.writer.run.shape;
        let ExpertDimensions {
            model_width: width,
            feed_forward_width: mlp,
            query_heads: heads,
            head_dim,
            ..
        } = shape.model;
        let (s, keys) =
            (shape.action_tokens, keys_padded_to_eight(shape.prefix_and_horizon_tokens()));
        let phase = |name: &str| format!("Step_{step}/Layer_{layer}/{name}");
        let [style1_bias, style2_bias] = ["style1_bias", "style2_bias"]
            .map(|name| self.writer.pointer_to_layer_part(name, layer));
        self.begin_nvtx_range(format!("Step_{step}/Layer_{layer}"));

        self.begin_nvtx_range(phase("LN"));
        self.add_ada_rms_norm_launches(2 * layer, style1_bias, false);
        self.end_nvtx_range();

        self.begin_nvtx_range(phase("QKV_Proj"));
        let [q, k, v] =
            ["q_proj", "k_proj", "v_proj"].map(|name| self.dequantised_matrix_pointer(name, layer));
        self.add_gemms_in_side_lanes([s, head_dim, width], "y", &[(k, "k"), (v, "v")]);
        self.add_gemm_in_main_lane([s, heads * head_dim, width], "y", q, "q");
        self.join_gemms_of_side_lanes(2);
        self.end_nvtx_range();

        self.begin_nvtx_range(phase("RoPE"));
        let pairs = s * (heads + 1) * head_dim / 2;
        self.add_kernel_launch_over_items(
            &ROTATE_Q_AND_K_KERNEL,
            pairs / ELEMENTS_PER_THREAD,
            ("q", "k", "angles", int_operands([s, heads, head_dim])),
        );
        self.end_nvtx_range();

        self.begin_nvtx_range(phase("KV_Concat"));
        let packets = head_dim / ELEMENTS_PER_THREAD;
        let caches =
            ["k_cache", "v_cache"].map(|name| self.writer.pointer_to_layer_part(name, layer));
        let rows = ("k", "v", "keys", "values");
        let sizes = int_operands([shape.prefix_tokens, s, keys, packets]);
        self.add_kernel_launch_over_items(
            &CONCAT_CACHE_AND_NEW_KEYS_KERNEL,
            keys * packets,
            (caches, rows, sizes),
        );
        self.end_nvtx_range();

        self.begin_nvtx_range(phase("Attn"));
        self.add_attention_launches(keys);
        self.end_nvtx_range();

        self.begin_nvtx_range(phase("O_Proj"));
        let o = self.dequantised_matrix_pointer("o_proj", layer);
        self.add_gemm_in_main_lane([s, width, heads * head_dim], "attended", o, "branch");
        self.end_nvtx_range();
        self.begin_nvtx_range(phase("Res1"));
        self.add_gated_branch_launch(2 * layer, style1_bias);
        self.end_nvtx_range();

        self.begin_nvtx_range(phase("PostLN"));
        self.add_ada_rms_norm_launches(2 * layer + 1, style2_bias, false);
        self.end_nvtx_range();
        self.begin_nvtx_range(phase("MLP"));
        let [gate, up, down] = ["gate_proj", "up_proj", "down_proj"]
            .map(|name| self.dequantised_matrix_pointer(name, layer));
        self.add_gemms_in_side_lanes([s, mlp, width], "y", &[(up, "ups")]);
        self.add_gemm_in_main_lane([s, mlp, width], "y", gate, "gates");
        self.join_gemms_of_side_lanes(1);
        let packets = s * mlp / ELEMENTS_PER_THREAD;
        self.add_kernel_launch_over_items(
            &GELU_GATE_TIMES_UP_KERNEL,
            packets,
            ("gates", "ups", int_operand(packets)),
        );
        self.add_gemm_in_main_lane([s, width, mlp], "gates", down, "branch");
        self.end_nvtx_range();
        self.begin_nvtx_range(phase("Res2"));
        self.add_gated_branch_launch(2 * layer + 1, style2_bias);
        self.end_nvtx_range();

        self.end_nvtx_range();
    }

    /// Pointer to a layer's weight matrix in bf16; if the matrix is stored as fp8 or int4 codes,
    /// adds a launch that dequantises it.
    fn dequantised_matrix_pointer(&mut self, name: &'static str, layer: usize) -> RegionPointer {
        let Some(matrix) = matrices_stored_quantised(self.writer.run)
            .iter()
            .find(|matrix| matrix.weight_and_code_region_name == name)
        else {
            return self.writer.pointer_to_layer_part(name, layer);
        };
        let [rows, columns] = matrix_extents_of_one_layer(self.writer.run, name);
        let packets = rows * columns / ELEMENTS_PER_THREAD;
        let encoded = pointers_to_layer_codes_and_scales(&self.writer, matrix, layer);
        let values = self.writer.program.pointer_to(matrix.dequantised_region_name);
        let int4 = self.writer.run.shape.weights == LayerWeightFormat::Int4;
        let kernel = if int4 { &DEQUANTIZE_INT4_KERNEL } else { &DEQUANTIZE_FP8_KERNEL };
        self.add_kernel_launch_over_items(
            kernel,
            packets,
            (encoded, values, int_operands([columns, packets])),
        );
        values
    }

    /// Pointer to the style of norm number `index` of a denoising step.
    fn pointer_to_style_of_norm(&self, index: usize) -> RegionPointer {
        let style_bytes =
            3 * self.writer.run.shape.model.model_width * Dtype::F32.bytes_per_element();
        self.writer.program.pointer_to("styles").offset_by(index * style_bytes)
    }

    /// Adds the GEMM that computes the style of norm number `index` to a lane, if the model has a
    /// norm with this number.
    fn add_style_gemm_in_lane(&mut self, lane: ProgramLane, index: usize) {
        let ExpertDimensions { model_width: width, layer_count: depth, .. } =
            self.writer.run.shape.model;
        let weights = match index {
            index if index > 2 * depth => return,
            index if index == 2 * depth => self.writer.program.pointer_to("final_style"),
            index => {
                let name = if index.is_multiple_of(2) { "style1" } else { "style2" };
                self.writer.pointer_to_layer_part(name, index / 2)
            }
        };
        let spec = GemmSpec::new(1, 3 * width, width, GemmMatrixDtype::Bf16, GemmMatrixDtype::F32);
        let operands =
            [self.writer.program.pointer_to("cond"), weights, self.pointer_to_style_of_norm(index)];
        self.writer.program.add_gemm(lane, spec, operands);
    }

    /// Writes the launches of the adaptive RMS norm of h: its style, the norm, and scale and shift.
    /// The result of the adaptive norm goes to the region `y` in bf16, or with `exact` to the
    /// region `exact` in fp32.
    fn add_ada_rms_norm_launches(&mut self, index: usize, bias: RegionPointer, exact: bool) {
        let ExpertDimensions { model_width: width, .. } = self.writer.run.shape.model;
        let s = self.writer.run.shape.action_tokens;
        if self.side_lanes.is_none() {
            self.add_style_gemm_in_lane(ProgramLane::MAIN_LANE, index);
        }
        self.add_kernel_launch_over_items(&RMS_NORM_KERNEL, s, ("h", "normed", int_operand(width)));
        if let Some(ParallelGemmLanes { style_gemm_lane: styles, .. }) = self.side_lanes {
            // The main lane waits for the style of the current norm; the style of the next norm is
            // computed concurrently with the launches that follow.
            self.writer.program.make_lane_wait_for_lane(ProgramLane::MAIN_LANE, styles);
            self.add_style_gemm_in_lane(styles, index + 1);
        }
        let packets = s * width / ELEMENTS_PER_THREAD;
        let result = match exact {
            true => [NULL, self.pointer_to("exact")],
            false => [self.pointer_to("y"), NULL],
        };
        let style = self.pointer_to_style_of_norm(index);
        let arguments = ("normed", style, bias, result, int_operands([width, packets]));
        self.add_kernel_launch_over_items(&SCALE_AND_SHIFT_KERNEL, packets, arguments);
    }

    /// Adds the launch of h += gate·branch, with the gate from the style of norm number `index`.
    fn add_gated_branch_launch(&mut self, index: usize, bias: RegionPointer) {
        let (width, s) =
            (self.writer.run.shape.model.model_width, self.writer.run.shape.action_tokens);
        let packets = s * width / ELEMENTS_PER_THREAD;
        let arguments = (
            "h",
            "branch",
            self.pointer_to_style_of_norm(index),
            bias,
            int_operands([width, packets]),
        );
        self.add_kernel_launch_over_items(&ADD_GATED_BRANCH_KERNEL, packets, arguments);
    }

    /// Adds the launch of x += bias over rows of the model's width, followed by SiLU if `silu`.
    fn add_bias_launch(&mut self, x: &str, bias: &str, rows: usize, silu: bool) {
        let width = self.writer.run.shape.model.model_width;
        let packets = rows * width / ELEMENTS_PER_THREAD;
        let sizes = int_operands([width, packets, usize::from(silu)]);
        self.add_kernel_launch_over_items(&BIAS_AND_SILU_KERNEL, packets, (x, bias, sizes));
    }

    /// Adds a bf16 GEMM in the main lane: y `[rows, columns]` = x `[rows, depth]` · w `[depth,
    /// columns]`.
    fn add_gemm_in_main_lane(
        &mut self,
        [rows, columns, depth]: [usize; 3],
        x: &str,
        w: RegionPointer,
        y: &str,
    ) {
        let spec =
            GemmSpec::new(rows, columns, depth, GemmMatrixDtype::Bf16, GemmMatrixDtype::Bf16);
        self.add_gemm_of_named_regions(ProgramLane::MAIN_LANE, spec, x, w, y);
    }

    /// Adds one GEMM for each (w, y) pair, all with the same input x. The GEMMs that share the
    /// input x run in side lanes, concurrently with the next launches of the main lane; without
    /// side lanes they run before those launches.
    fn add_gemms_in_side_lanes(
        &mut self,
        [rows, columns, depth]: [usize; 3],
        x: &str,
        gemms: &[(RegionPointer, &str)],
    ) {
        let spec =
            GemmSpec::new(rows, columns, depth, GemmMatrixDtype::Bf16, GemmMatrixDtype::Bf16);
        for (number, (w, y)) in gemms.iter().enumerate() {
            let lane = self.side_lanes.map_or(ProgramLane::MAIN_LANE, |side| side.gemms[number]);
            if lane != ProgramLane::MAIN_LANE {
                self.writer.program.make_lane_wait_for_lane(lane, ProgramLane::MAIN_LANE);
            }
            self.add_gemm_of_named_regions(lane, spec, x, *w, y);
        }
    }

    /// Makes the main lane wait for the GEMMs in the first `side_lane_count` side lanes.
    fn join_gemms_of_side_lanes(&mut self, side_lane_count: usize) {
        let Some(ParallelGemmLanes { gemms: lanes, .. }) = self.side_lanes else { return };
        lanes[..side_lane_count].iter().for_each(|lane| {
            self.writer.program.make_lane_wait_for_lane(ProgramLane::MAIN_LANE, *lane)
        });
    }

    fn add_gemm_of_named_regions(
        &mut self,
        lane: ProgramLane,
        spec: GemmSpec,
        x: &str,
        w: RegionPointer,
        y: &str,
    ) {
        let [x, y] = [x, y].map(|name| self.writer.program.pointer_to(name));
        self.writer.program.add_gemm(lane, spec, [x, w, y]);
    }
}
