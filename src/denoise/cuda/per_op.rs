//! Rung with one launch for each operation: `kernels/denoise/per_op.cu` and the library's GEMMs, in
//! the order in which a framework runs the model. In a captured graph, independent GEMMs have their
//! own lanes. Quantised weights are dequantised before each GEMM, because the library has no GEMM
//! of bf16 by fp8.

mod memory;

use super::row::{LaunchItems, THREADS, a_row_a_block, denoise_kernel};
use super::run::ExpertRun;
use super::writer::ExpertWriter;
use crate::denoise::definition::WeightFormat;
use crate::denoise::int4;
use crate::denoise::model::{ACTION_COLUMNS, ExpertModel};
use kernelgate::backend::program::{
    Lane, NULL, Operand, Operands, Pointer, Program, int, int_operands, long_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;
use kernelgate_cuda::libraries::gemm::{GemmSpec, MatrixDtype};

use memory::{
    codes_and_scales_of_layer, layer_rows_and_columns, padded_key_count, program_with_regions,
    quantised_matrix,
};

/// Number of neighbouring elements that a thread of most kernels handles; every extent of a model
/// is a multiple of it.
const PACKET_ELEMENTS: usize = 8;

/// Kernels of the rung `per_op`.
pub const KERNELS: &[KernelSpec<LaunchItems>] = &[
    EMBED_KERNEL,
    BIAS_KERNEL,
    CAST_KERNEL,
    COPY_KERNEL,
    ANGLES_KERNEL,
    NORM_KERNEL,
    MODULATE_KERNEL,
    RESIDUAL_KERNEL,
    ROPE_KERNEL,
    CONCAT_KERNEL,
    SOFTMAX_KERNEL,
    GELU_KERNEL,
    ACTION_OUT_KERNEL,
    EULER_KERNEL,
    DEQUANTIZE_KERNEL,
    DEQUANTIZE_INT4_KERNEL,
];

/// Kernel of the time embedding, which `fused` launches too.
pub const EMBED_KERNEL: KernelSpec<LaunchItems> = KernelSpec {
    constants: |_| {
        vec![
            ("THREADS", THREADS),
            ("PACKET", PACKET_ELEMENTS),
            ("ACTION", ACTION_COLUMNS),
            ("INT4_GROUP", int4::SCALE_GROUP),
        ]
    },
    ..denoise_kernel("denoise/per_op", "denoise_per_op_embed", |items| {
        [embed_blocks_per_row(&items.model) * items.items, 1, items.layers]
    })
};

/// Kernel of the bias, with one thread for each packet.
const BIAS_KERNEL: KernelSpec<LaunchItems> = KernelSpec {
    symbol: "denoise_per_op_bias",
    blocks: |items| [items.items.div_ceil(THREADS), 1, items.layers],
    ..EMBED_KERNEL
};
const CAST_KERNEL: KernelSpec<LaunchItems> =
    KernelSpec { symbol: "denoise_per_op_cast", ..BIAS_KERNEL };
const COPY_KERNEL: KernelSpec<LaunchItems> =
    KernelSpec { symbol: "denoise_per_op_copy", ..BIAS_KERNEL };
/// Kernel of the rotation angles, which `fused` launches too.
pub const ANGLES_KERNEL: KernelSpec<LaunchItems> =
    KernelSpec { symbol: "denoise_per_op_angles", ..BIAS_KERNEL };
const MODULATE_KERNEL: KernelSpec<LaunchItems> =
    KernelSpec { symbol: "denoise_per_op_modulate", ..BIAS_KERNEL };
const RESIDUAL_KERNEL: KernelSpec<LaunchItems> =
    KernelSpec { symbol: "denoise_per_op_residual", ..BIAS_KERNEL };
const ROPE_KERNEL: KernelSpec<LaunchItems> =
    KernelSpec { symbol: "denoise_per_op_rope", ..BIAS_KERNEL };
const CONCAT_KERNEL: KernelSpec<LaunchItems> =
    KernelSpec { symbol: "denoise_per_op_concat", ..BIAS_KERNEL };
const GELU_KERNEL: KernelSpec<LaunchItems> =
    KernelSpec { symbol: "denoise_per_op_gelu", ..BIAS_KERNEL };
const EULER_KERNEL: KernelSpec<LaunchItems> =
    KernelSpec { symbol: "denoise_per_op_euler", ..BIAS_KERNEL };

const DEQUANTIZE_KERNEL: KernelSpec<LaunchItems> =
    KernelSpec { symbol: "denoise_per_op_dequantize", ..BIAS_KERNEL };
const DEQUANTIZE_INT4_KERNEL: KernelSpec<LaunchItems> =
    KernelSpec { symbol: "denoise_per_op_dequantize_int4", ..BIAS_KERNEL };

const NORM_KERNEL: KernelSpec<LaunchItems> =
    KernelSpec { symbol: "denoise_per_op_norm", blocks: a_row_a_block, ..EMBED_KERNEL };
const SOFTMAX_KERNEL: KernelSpec<LaunchItems> =
    KernelSpec { symbol: "denoise_per_op_softmax", ..NORM_KERNEL };
const ACTION_OUT_KERNEL: KernelSpec<LaunchItems> =
    KernelSpec { symbol: "denoise_per_op_action_out", ..NORM_KERNEL };

/// Number of blocks of `denoise_per_op_embed` for each row.
pub const fn embed_blocks_per_row(model: &ExpertModel) -> usize {
    (model.width / 2).div_ceil(THREADS)
}

/// Program that launches all operations one after the other.
pub fn per_op_program(run: &ExpertRun) -> Program {
    write_per_op_program(PerOpWriter { writer: program_with_regions(run), side: None })
}

/// Program in which independent GEMMs run concurrently, on parallel graph branches, and every
/// kernel uses PDL.
pub fn concurrent_launches(run: &ExpertRun) -> Program {
    let mut writer = program_with_regions(run);
    writer.programmatic = true;
    let [styles, one, two] = [(); 3].map(|()| writer.program.lane());
    let side = Some(ConcurrentGemmLanes { styles, gemms: [one, two] });
    write_per_op_program(PerOpWriter { writer, side })
}

fn write_per_op_program(mut pass: PerOpWriter) -> Program {
    pass.write_loop_or_step();
    pass.writer.program
}

/// Lanes of GEMMs that run concurrently with the first lane.
#[derive(Clone, Copy)]
struct ConcurrentGemmLanes {
    /// Lane of the style of the next norm.
    styles: Lane,
    /// Lanes of GEMMs with the same input x as a GEMM in the first lane.
    gemms: [Lane; 2],
}

struct PerOpWriter<'a> {
    writer: ExpertWriter<'a>,
    /// Side lanes; `None` runs one GEMM after the other.
    side: Option<ConcurrentGemmLanes>,
}

impl PerOpWriter<'_> {
    fn at(&self, name: &str) -> Operand {
        self.writer.at(name)
    }

    fn add_launch(
        &mut self,
        kernel: &KernelSpec<LaunchItems>,
        items: usize,
        arguments: impl Operands,
    ) {
        self.writer.add_launch(kernel, items, arguments);
    }

    fn begin_program_range(&mut self, name: String) {
        self.writer.program.begin_range(name);
    }

    fn end_program_range(&mut self) {
        self.writer.program.end_range();
    }

    fn write_loop_or_step(&mut self) {
        let (x, output) = (self.at("x"), self.writer.velocity_output());
        if !self.writer.run.looped {
            return self.write_denoising_step(0, x, output);
        }
        let actions = self.writer.run.shape.s * ACTION_COLUMNS;
        self.begin_program_range("Denoise_Full_Loop".to_owned());
        self.add_launch(&COPY_KERNEL, actions, (x, output, long_operand(actions)));
        let dt = (-1.0 / self.writer.run.steps as f64) as f32;
        let velocities = self.at("velocities");
        for step in 0..self.writer.run.steps {
            self.write_denoising_step(step, output, velocities);
            self.add_launch(
                &EULER_KERNEL,
                actions,
                (output, velocities, dt, long_operand(actions)),
            );
        }
        self.end_program_range();
    }

    /// Writes the launches that compute the velocity of the actions `x`.
    fn write_denoising_step(&mut self, step: usize, x: Operand, velocity: Operand) {
        let shape = self.writer.run.shape;
        let ExpertModel { width, depth, head_dim, .. } = shape.model;
        let s = shape.s;
        self.begin_program_range(format!("Denoise_Step_{step}"));

        self.begin_program_range(format!("Step_{step}/Time_Embed"));
        let times = match self.writer.run.looped {
            true => {
                let times = self.writer.program.at("times");
                [NULL, times.offset_by(step * Dtype::F64.bytes()).into()]
            }
            false => [self.at("t"), NULL],
        };
        let sizes = int_operands([width, embed_blocks_per_row(&shape.model), 0]);
        self.add_launch(&EMBED_KERNEL, 1, (times, "embedding", sizes));
        let [time_in, time_out] = ["time_in", "time_out"].map(|name| self.writer.program.at(name));
        self.write_gemm([1, width, width], "embedding", time_in, "time_hidden");
        self.write_bias_add("time_hidden", "time_in_bias", 1, true);
        self.write_gemm([1, width, width], "time_hidden", time_out, "cond");
        self.write_bias_add("cond", "time_out_bias", 1, true);
        if let Some(ConcurrentGemmLanes { styles, .. }) = self.side {
            self.writer.program.wait(styles, Lane::MAIN_LANE);
            self.compute_style(styles, 0);
        }
        self.end_program_range();

        self.begin_program_range(format!("Step_{step}/Action_Proj_In"));
        self.add_launch(
            &CAST_KERNEL,
            s * ACTION_COLUMNS,
            (x, "x16", long_operand(s * ACTION_COLUMNS)),
        );
        let action_in = self.writer.program.at("action_in");
        self.write_gemm([s, width, ACTION_COLUMNS], "x16", action_in, "h");
        self.write_bias_add("h", "action_in_bias", s, false);
        self.end_program_range();

        // The suffix attends to every key, so only the positions are prepared, as angles.
        self.begin_program_range(format!("Step_{step}/Mask_Prep"));
        self.add_launch(
            &ANGLES_KERNEL,
            s * head_dim / 2,
            ("angles", int_operands([shape.p, s, head_dim])),
        );
        self.end_program_range();

        for layer in 0..depth {
            self.write_layer_launches(step, layer);
        }

        self.begin_program_range(format!("Step_{step}/Final_Norm"));
        self.write_ada_rms_norm(2 * depth, self.writer.program.at("final_style_bias"), true);
        self.end_program_range();
        self.begin_program_range(format!("Step_{step}/Action_Proj_Out"));
        let arguments = ("exact", "action_out", "action_out_bias", velocity, int(width));
        self.add_launch(&ACTION_OUT_KERNEL, s, arguments);
        self.end_program_range();
        self.end_program_range();
    }

    fn write_layer_launches(&mut self, step: usize, layer: usize) {
        let shape = self.writer.run.shape;
        let ExpertModel { width, mlp, heads, head_dim, .. } = shape.model;
        let (s, context, keys) =
            (shape.s, shape.visible_tokens(), padded_key_count(shape.visible_tokens()));
        let phase = |name: &str| format!("Step_{step}/Layer_{layer}/{name}");
        let [style1_bias, style2_bias] =
            ["style1_bias", "style2_bias"].map(|name| self.writer.layer_pointer(name, layer));
        self.begin_program_range(format!("Step_{step}/Layer_{layer}"));

        self.begin_program_range(phase("LN"));
        self.write_ada_rms_norm(2 * layer, style1_bias, false);
        self.end_program_range();

        self.begin_program_range(phase("QKV_Proj"));
        let [q, k, v] =
            ["q_proj", "k_proj", "v_proj"].map(|name| self.bf16_matrix_pointer(name, layer));
        self.concurrent_gemms([s, head_dim, width], "y", &[(k, "k"), (v, "v")]);
        self.write_gemm([s, heads * head_dim, width], "y", q, "q");
        self.wait_for_concurrent(2);
        self.end_program_range();

        self.begin_program_range(phase("RoPE"));
        let pairs = s * (heads + 1) * head_dim / 2;
        self.add_launch(
            &ROPE_KERNEL,
            pairs / PACKET_ELEMENTS,
            ("q", "k", "angles", int_operands([s, heads, head_dim])),
        );
        self.end_program_range();

        self.begin_program_range(phase("KV_Concat"));
        let packets = head_dim / PACKET_ELEMENTS;
        let caches = ["k_cache", "v_cache"].map(|name| self.writer.layer_pointer(name, layer));
        let rows = ("k", "v", "keys", "values");
        let sizes = int_operands([shape.p, s, keys, packets]);
        self.add_launch(&CONCAT_KERNEL, keys * packets, (caches, rows, sizes));
        self.end_program_range();

        self.begin_program_range(phase("Attn"));
        let spec = GemmSpec {
            b_transposed: true,
            ..GemmSpec::new(s * heads, keys, head_dim, MatrixDtype::Bf16, MatrixDtype::F32)
        };
        let [all_keys, values] = ["keys", "values"].map(|name| self.writer.program.at(name));
        self.add_gemm_in_lane(Lane::MAIN_LANE, spec, "q", all_keys, "scores");
        let scale = (1.0 / (head_dim as f64).sqrt()) as f32;
        let arguments = ("scores", "probabilities", int_operands([context, keys]), scale);
        self.add_launch(&SOFTMAX_KERNEL, s * heads, arguments);
        self.write_gemm([s * heads, head_dim, keys], "probabilities", values, "attended");
        self.end_program_range();

        self.begin_program_range(phase("O_Proj"));
        let o = self.bf16_matrix_pointer("o_proj", layer);
        self.write_gemm([s, width, heads * head_dim], "attended", o, "branch");
        self.end_program_range();
        self.begin_program_range(phase("Res1"));
        self.add_gated_residual(2 * layer, style1_bias);
        self.end_program_range();

        self.begin_program_range(phase("PostLN"));
        self.write_ada_rms_norm(2 * layer + 1, style2_bias, false);
        self.end_program_range();
        self.begin_program_range(phase("MLP"));
        let [gate, up, down] =
            ["gate_proj", "up_proj", "down_proj"].map(|name| self.bf16_matrix_pointer(name, layer));
        self.concurrent_gemms([s, mlp, width], "y", &[(up, "ups")]);
        self.write_gemm([s, mlp, width], "y", gate, "gates");
        self.wait_for_concurrent(1);
        let packets = s * mlp / PACKET_ELEMENTS;
        self.add_launch(&GELU_KERNEL, packets, ("gates", "ups", int(packets)));
        self.write_gemm([s, width, mlp], "gates", down, "branch");
        self.end_program_range();
        self.begin_program_range(phase("Res2"));
        self.add_gated_residual(2 * layer + 1, style2_bias);
        self.end_program_range();

        self.end_program_range();
    }

    /// Pointer to a layer's matrix in bf16; if it is stored as codes, a launch dequantises it
    /// first.
    fn bf16_matrix_pointer(&mut self, name: &'static str, layer: usize) -> Pointer {
        let Some(matrix) =
            quantised_matrix(self.writer.run).iter().find(|matrix| matrix.name == name)
        else {
            return self.writer.layer_pointer(name, layer);
        };
        let [rows, columns] = layer_rows_and_columns(self.writer.run, name);
        let packets = rows * columns / PACKET_ELEMENTS;
        let encoded = codes_and_scales_of_layer(&self.writer, matrix, layer);
        let values = self.writer.program.at(matrix.values);
        let int4 = self.writer.run.shape.weights == WeightFormat::Int4;
        let kernel = if int4 { &DEQUANTIZE_INT4_KERNEL } else { &DEQUANTIZE_KERNEL };
        self.add_launch(kernel, packets, (encoded, values, int_operands([columns, packets])));
        values
    }

    /// Pointer to the style of the `index`-th norm of a step.
    fn address_of_style(&self, index: usize) -> Pointer {
        let style_bytes = 3 * self.writer.run.shape.model.width * Dtype::F32.bytes();
        self.writer.program.at("styles").offset_by(index * style_bytes)
    }

    /// Computes the style of norm number `index` in a lane, if the loop has such a norm.
    fn compute_style(&mut self, lane: Lane, index: usize) {
        let ExpertModel { width, depth, .. } = self.writer.run.shape.model;
        let weights = match index {
            index if index > 2 * depth => return,
            index if index == 2 * depth => self.writer.program.at("final_style"),
            index => {
                let name = if index.is_multiple_of(2) { "style1" } else { "style2" };
                self.writer.layer_pointer(name, index / 2)
            }
        };
        let spec = GemmSpec::new(1, 3 * width, width, MatrixDtype::Bf16, MatrixDtype::F32);
        let operands = [self.writer.program.at("cond"), weights, self.address_of_style(index)];
        self.writer.program.gemm(lane, spec, operands);
    }

    /// Writes the launches of adaRMS of h: style, norm and modulation. The result goes to `y`, or
    /// in fp32 to `exact`.
    fn write_ada_rms_norm(&mut self, index: usize, bias: Pointer, exact: bool) {
        let ExpertModel { width, .. } = self.writer.run.shape.model;
        let s = self.writer.run.shape.s;
        if self.side.is_none() {
            self.compute_style(Lane::MAIN_LANE, index);
        }
        self.add_launch(&NORM_KERNEL, s, ("h", "normed", int(width)));
        if let Some(ConcurrentGemmLanes { styles, .. }) = self.side {
            // The first lane waits for this style; the next style is computed concurrently with
            // later steps.
            self.writer.program.wait(Lane::MAIN_LANE, styles);
            self.compute_style(styles, index + 1);
        }
        let packets = s * width / PACKET_ELEMENTS;
        let result = match exact {
            true => [NULL, self.at("exact")],
            false => [self.at("y"), NULL],
        };
        let style = self.address_of_style(index);
        let arguments = ("normed", style, bias, result, int_operands([width, packets]));
        self.add_launch(&MODULATE_KERNEL, packets, arguments);
    }

    /// Adds the gated branch, h += gate·branch, with the gate of the style of norm number `index`.
    fn add_gated_residual(&mut self, index: usize, bias: Pointer) {
        let (width, s) = (self.writer.run.shape.model.width, self.writer.run.shape.s);
        let packets = s * width / PACKET_ELEMENTS;
        let arguments =
            ("h", "branch", self.address_of_style(index), bias, int_operands([width, packets]));
        self.add_launch(&RESIDUAL_KERNEL, packets, arguments);
    }

    /// Adds the bias to rows of the width, x += bias, followed by SiLU if `silu`.
    fn write_bias_add(&mut self, x: &str, bias: &str, rows: usize, silu: bool) {
        let width = self.writer.run.shape.model.width;
        let packets = rows * width / PACKET_ELEMENTS;
        let sizes = int_operands([width, packets, usize::from(silu)]);
        self.add_launch(&BIAS_KERNEL, packets, (x, bias, sizes));
    }

    /// Writes a GEMM in bf16: y `[rows, columns]` = x `[rows, depth]` · w `[depth, columns]`.
    fn write_gemm(&mut self, [rows, columns, depth]: [usize; 3], x: &str, w: Pointer, y: &str) {
        let spec = GemmSpec::new(rows, columns, depth, MatrixDtype::Bf16, MatrixDtype::Bf16);
        self.add_gemm_in_lane(Lane::MAIN_LANE, spec, x, w, y);
    }

    /// Writes GEMMs of one x with several (w, y). These GEMMs run in side lanes, concurrently with
    /// the next launches of the first lane; without side lanes they run before those launches.
    fn concurrent_gemms(
        &mut self,
        [rows, columns, depth]: [usize; 3],
        x: &str,
        gemms: &[(Pointer, &str)],
    ) {
        let spec = GemmSpec::new(rows, columns, depth, MatrixDtype::Bf16, MatrixDtype::Bf16);
        for (number, (w, y)) in gemms.iter().enumerate() {
            let lane = self.side.map_or(Lane::MAIN_LANE, |side| side.gemms[number]);
            if lane != Lane::MAIN_LANE {
                self.writer.program.wait(lane, Lane::MAIN_LANE);
            }
            self.add_gemm_in_lane(lane, spec, x, *w, y);
        }
    }

    /// Waits for `gemms` concurrent GEMMs.
    fn wait_for_concurrent(&mut self, gemms: usize) {
        let Some(ConcurrentGemmLanes { gemms: lanes, .. }) = self.side else { return };
        lanes[..gemms].iter().for_each(|lane| self.writer.program.wait(Lane::MAIN_LANE, *lane));
    }

    fn add_gemm_in_lane(&mut self, lane: Lane, spec: GemmSpec, x: &str, w: Pointer, y: &str) {
        let [x, y] = [x, y].map(|name| self.writer.program.at(name));
        self.writer.program.gemm(lane, spec, [x, w, y]);
    }
}
