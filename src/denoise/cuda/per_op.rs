//! A launch an operation: `kernels/denoise/per_op.cu` and the library's GEMMs, in the order in
//! which a framework runs the model; or, for a capture, independent GEMMs in lanes of their own.
//! Quantised weights are dequantised before each GEMM, which the library has none of bf16 by fp8.

mod memory;

use std::sync::Arc;

pub use memory::{inputs, packed, scratch};

use super::buffers::{self, Buffers};
use super::program::{LaunchPlan, LaunchSequence};
use super::row::{Items, THREADS, a_row_a_block, kernel};
use super::run::ExpertRun;
use crate::denoise::definition::WeightFormat;
use crate::denoise::int4;
use crate::denoise::model::{ACTION, Model};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::Output;
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::libraries::gemm::{Blas, GemmSpec, MatrixDtype, WORKSPACE_BYTES};
use kernelgate_cuda::{Argument, Device, KernelSpec};

use memory::{coded, encoded, extents, padded};

const NULL: Argument = Argument::Address(0);

/// Neighbours that a thread of most kernels takes: every extent of a model is a multiple of as
/// many.
const PACKET: usize = 8;

/// The kernels.
pub const KERNELS: &[KernelSpec<Items>] = &[
    EMBED,
    BIAS,
    CAST,
    COPY,
    ANGLES,
    NORM,
    MODULATE,
    RESIDUAL,
    ROPE,
    CONCAT,
    SOFTMAX,
    GELU,
    ACTION_OUT,
    EULER,
    DEQUANTIZE,
    DEQUANTIZE_INT4,
];

/// Also what `fused` begins with.
pub const EMBED: KernelSpec<Items> = KernelSpec {
    constants: |_| {
        vec![
            ("THREADS", THREADS),
            ("PACKET", PACKET),
            ("ACTION", ACTION),
            ("INT4_GROUP", int4::GROUP),
        ]
    },
    ..kernel(
        "denoise/per_op",
        include_str!("../../../kernels/denoise/per_op.cu"),
        "denoise_per_op_embed",
        |items| [embed_blocks(&items.model) * items.items, 1, items.layers],
    )
};

/// An item a thread.
const BIAS: KernelSpec<Items> = KernelSpec {
    symbol: "denoise_per_op_bias",
    blocks: |items| [items.items.div_ceil(THREADS), 1, items.layers],
    ..EMBED
};
const CAST: KernelSpec<Items> = KernelSpec { symbol: "denoise_per_op_cast", ..BIAS };
const COPY: KernelSpec<Items> = KernelSpec { symbol: "denoise_per_op_copy", ..BIAS };
/// Also of `fused`.
pub const ANGLES: KernelSpec<Items> = KernelSpec { symbol: "denoise_per_op_angles", ..BIAS };
const MODULATE: KernelSpec<Items> = KernelSpec { symbol: "denoise_per_op_modulate", ..BIAS };
const RESIDUAL: KernelSpec<Items> = KernelSpec { symbol: "denoise_per_op_residual", ..BIAS };
const ROPE: KernelSpec<Items> = KernelSpec { symbol: "denoise_per_op_rope", ..BIAS };
const CONCAT: KernelSpec<Items> = KernelSpec { symbol: "denoise_per_op_concat", ..BIAS };
const GELU: KernelSpec<Items> = KernelSpec { symbol: "denoise_per_op_gelu", ..BIAS };
const EULER: KernelSpec<Items> = KernelSpec { symbol: "denoise_per_op_euler", ..BIAS };

const DEQUANTIZE: KernelSpec<Items> = KernelSpec { symbol: "denoise_per_op_dequantize", ..BIAS };
const DEQUANTIZE_INT4: KernelSpec<Items> =
    KernelSpec { symbol: "denoise_per_op_dequantize_int4", ..BIAS };

const NORM: KernelSpec<Items> =
    KernelSpec { symbol: "denoise_per_op_norm", blocks: a_row_a_block, ..EMBED };
const SOFTMAX: KernelSpec<Items> = KernelSpec { symbol: "denoise_per_op_softmax", ..NORM };
const ACTION_OUT: KernelSpec<Items> = KernelSpec { symbol: "denoise_per_op_action_out", ..NORM };

/// Blocks of `denoise_per_op_embed` a row.
pub const fn embed_blocks(model: &Model) -> usize {
    (model.width / 2).div_ceil(THREADS)
}

/// Lanes of GEMMs: the layer's first, the styles, and two more for what is concurrent with a GEMM
/// of the first.
const LANES: usize = 4;
const STYLES: usize = 1;

/// Inputs, activations, the library's workspaces and the output.
pub fn device_bytes(run: &ExpertRun, concurrent: bool) -> u64 {
    let workspaces = WORKSPACE_BYTES * if concurrent { LANES } else { 1 };
    buffers::device_bytes(run, &[&inputs(run), &packed(run), &scratch(run)]) + workspaces as u64
}

/// Writes the launches, one after the other.
///
/// # Errors
/// When a kernel does not compile, the library declines, or device memory is short.
pub fn program(
    run: &ExpertRun,
    inputs: &Tensors,
    device: &Arc<Device>,
    output: &Output,
) -> Result<LaunchSequence, BackendError> {
    write(run, inputs, device, output, false)
}

/// Writes the launches: independent GEMMs concurrently, on parallel graph branches; every other
/// kernel with PDL.
///
/// # Errors
/// As [`program`].
pub fn concurrent(
    run: &ExpertRun,
    inputs: &Tensors,
    device: &Arc<Device>,
    output: &Output,
) -> Result<LaunchSequence, BackendError> {
    write(run, inputs, device, output, true)
}

fn write(
    run: &ExpertRun,
    inputs: &Tensors,
    device: &Arc<Device>,
    output: &Output,
    concurrent: bool,
) -> Result<LaunchSequence, BackendError> {
    let blas = Blas::open(device, if concurrent { LANES } else { 1 })?;
    let memory = Buffers::new(
        run,
        inputs,
        device,
        &self::inputs(run),
        coded(run).iter().flat_map(|matrix| {
            let [codes, scales] = encoded(run, inputs, matrix);
            [(matrix.name, codes), (matrix.scales, scales)]
        }),
        &scratch(run),
        &[],
    )?;
    let plan = plan(run, &memory, output.argument(), concurrent);
    plan.finish(device, &run.shape.model, Some(&blas), concurrent, memory, None)
}

/// The launches, for memory that has every region.
pub fn plan(run: &ExpertRun, memory: &Buffers, output: Argument, concurrent: bool) -> LaunchPlan {
    let mut pass = PerOpWriter { run, memory, concurrent, plan: LaunchPlan::default() };
    pass.whole(output);
    pass.plan
}

struct PerOpWriter<'a> {
    run: &'a ExpertRun,
    memory: &'a Buffers,
    concurrent: bool,
    plan: LaunchPlan,
}

impl PerOpWriter<'_> {
    fn whole(&mut self, output: Argument) {
        let actions = self.run.shape.s * ACTION;
        if !self.run.looped {
            return self.step(0, self.memory.at("x"), output);
        }
        self.plan.begin("Denoise_Full_Loop");
        self.plan.launch(
            &COPY,
            actions,
            &[self.memory.at("x"), output, Argument::I64(actions as i64)],
        );
        let dt = (-1.0 / self.run.steps as f64) as f32;
        for step in 0..self.run.steps {
            self.step(step, output, self.memory.at("velocities"));
            let arguments = [
                output,
                self.memory.at("velocities"),
                Argument::F32(dt),
                Argument::I64(actions as i64),
            ];
            self.plan.launch(&EULER, actions, &arguments);
        }
        self.plan.end();
    }

    /// The velocity of the actions `x`.
    fn step(&mut self, step: usize, x: Argument, velocity: Argument) {
        let (memory, shape) = (self.memory, self.run.shape);
        let Model { width, depth, head_dim, .. } = shape.model;
        let s = shape.s;
        self.plan.begin(format!("Denoise_Step_{step}"));

        self.plan.begin(format!("Step_{step}/Time_Embed"));
        let time = if self.run.looped {
            [NULL, Argument::Address(memory.address("times") + 8 * step as u64)]
        } else {
            [memory.at("t"), NULL]
        };
        let sizes = [width, embed_blocks(&shape.model), 0].map(|size| Argument::I32(size as i32));
        self.plan.launch(
            &EMBED,
            1,
            &[&[time[0], time[1], memory.at("embedding")][..], &sizes].concat(),
        );
        self.gemm(1, width, width, "embedding", memory.address("time_in"), "time_hidden");
        self.bias("time_hidden", "time_in_bias", 1, true);
        self.gemm(1, width, width, "time_hidden", memory.address("time_out"), "cond");
        self.bias("cond", "time_out_bias", 1, true);
        if self.concurrent {
            self.plan.cross(0, STYLES);
            self.style(STYLES, 0);
        }
        self.plan.end();

        self.plan.begin(format!("Step_{step}/Action_Proj_In"));
        self.plan.launch(
            &CAST,
            s * ACTION,
            &[x, memory.at("x16"), Argument::I64((s * ACTION) as i64)],
        );
        self.gemm(s, width, ACTION, "x16", memory.address("action_in"), "h");
        self.bias("h", "action_in_bias", s, false);
        self.plan.end();

        // The suffix sees everything: what is prepared are the positions, as angles.
        self.plan.begin(format!("Step_{step}/Mask_Prep"));
        let extents = [shape.p, s, head_dim].map(|extent| Argument::I32(extent as i32));
        self.plan.launch(
            &ANGLES,
            s * head_dim / 2,
            &[memory.at("angles"), extents[0], extents[1], extents[2]],
        );
        self.plan.end();

        for layer in 0..depth {
            self.layer(step, layer);
        }

        self.plan.begin(format!("Step_{step}/Final_Norm"));
        self.norm(2 * depth, memory.address("final_style_bias"), true);
        self.plan.end();
        self.plan.begin(format!("Step_{step}/Action_Proj_Out"));
        let matrices = [memory.at("exact"), memory.at("action_out"), memory.at("action_out_bias")];
        self.plan.launch(
            &ACTION_OUT,
            s,
            &[matrices[0], matrices[1], matrices[2], velocity, Argument::I32(width as i32)],
        );
        self.plan.end();
        self.plan.end();
    }

    fn layer(&mut self, step: usize, layer: usize) {
        let (memory, shape) = (self.memory, self.run.shape);
        let Model { width, mlp, heads, head_dim, .. } = shape.model;
        let (s, context, keys) = (shape.s, shape.context(), padded(shape.context()));
        let weights = |name: &str| memory.layer(name, layer);
        let phase = |name: &str| format!("Step_{step}/Layer_{layer}/{name}");
        let i32s = |sizes: &[usize]| {
            sizes.iter().map(|&size| Argument::I32(size as i32)).collect::<Vec<_>>()
        };
        self.plan.begin(format!("Step_{step}/Layer_{layer}"));

        self.plan.begin(phase("LN"));
        self.norm(2 * layer, weights("style1_bias"), false);
        self.plan.end();

        self.plan.begin(phase("QKV_Proj"));
        let [q, k, v] = ["q_proj", "k_proj", "v_proj"].map(|name| self.matrix(name, layer));
        self.concurrent_gemms(s, [head_dim, width], "y", [(k, "k"), (v, "v")]);
        self.gemm(s, heads * head_dim, width, "y", q, "q");
        self.wait_for_concurrent(2);
        self.plan.end();

        self.plan.begin(phase("RoPE"));
        let arguments = [
            vec![memory.at("q"), memory.at("k"), memory.at("angles")],
            i32s(&[s, heads, head_dim]),
        ]
        .concat();
        self.plan.launch(&ROPE, s * (heads + 1) * head_dim / 2 / PACKET, &arguments);
        self.plan.end();

        self.plan.begin(phase("KV_Concat"));
        let packets = head_dim / PACKET;
        let caches = ["k_cache", "v_cache"].map(|name| Argument::Address(weights(name)));
        let rows = ["k", "v", "keys", "values"].map(|name| memory.at(name));
        let arguments = [&caches[..], &rows, &i32s(&[shape.p, s, keys, packets])].concat();
        self.plan.launch(&CONCAT, keys * packets, &arguments);
        self.plan.end();

        self.plan.begin(phase("Attn"));
        let spec = GemmSpec {
            b_transposed: true,
            ..GemmSpec::new(s * heads, keys, head_dim, MatrixDtype::Bf16, MatrixDtype::F32)
        };
        self.gemm_of(spec, "q", memory.address("keys"), "scores");
        let scale = Argument::F32((1.0 / (head_dim as f64).sqrt()) as f32);
        let sizes = i32s(&[context, keys]);
        self.plan.launch(
            &SOFTMAX,
            s * heads,
            &[memory.at("scores"), memory.at("probabilities"), sizes[0], sizes[1], scale],
        );
        self.gemm(s * heads, head_dim, keys, "probabilities", memory.address("values"), "attended");
        self.plan.end();

        self.plan.begin(phase("O_Proj"));
        let o = self.matrix("o_proj", layer);
        self.gemm(s, width, heads * head_dim, "attended", o, "branch");
        self.plan.end();
        self.plan.begin(phase("Res1"));
        self.residual(2 * layer, weights("style1_bias"));
        self.plan.end();

        self.plan.begin(phase("PostLN"));
        self.norm(2 * layer + 1, weights("style2_bias"), false);
        self.plan.end();
        self.plan.begin(phase("MLP"));
        let [gate, up, down] =
            ["gate_proj", "up_proj", "down_proj"].map(|name| self.matrix(name, layer));
        self.concurrent_gemms(s, [mlp, width], "y", [(up, "ups")]);
        self.gemm(s, mlp, width, "y", gate, "gates");
        self.wait_for_concurrent(1);
        let packets = s * mlp / PACKET;
        self.plan.launch(
            &GELU,
            packets,
            &[memory.at("gates"), memory.at("ups"), Argument::I32(packets as i32)],
        );
        self.gemm(s, width, mlp, "gates", down, "branch");
        self.plan.end();
        self.plan.begin(phase("Res2"));
        self.residual(2 * layer + 1, weights("style2_bias"));
        self.plan.end();

        self.plan.end();
    }

    /// A layer's matrix in bf16, dequantised here if it is held as codes.
    fn matrix(&mut self, name: &'static str, layer: usize) -> u64 {
        let memory = self.memory;
        let Some(matrix) = coded(self.run).iter().find(|matrix| matrix.name == name) else {
            return memory.layer(name, layer);
        };
        let [rows, columns] = extents(self.run, name);
        let packets = rows * columns / PACKET;
        let [codes, scales] =
            [name, matrix.scales].map(|name| Argument::Address(memory.layer(name, layer)));
        let sizes = [columns, packets].map(|size| Argument::I32(size as i32));
        let arguments = [codes, scales, memory.at(matrix.values), sizes[0], sizes[1]];
        let int4 = self.run.shape.weights == WeightFormat::Int4;
        let kernel = if int4 { &DEQUANTIZE_INT4 } else { &DEQUANTIZE };
        self.plan.launch(kernel, packets, &arguments);
        memory.address(matrix.values)
    }

    /// The style of the `index`-th norm of a step.
    fn style_address(&self, index: usize) -> u64 {
        let style_bytes = 3 * self.run.shape.model.width * Dtype::F32.bytes();
        self.memory.address("styles") + (index * style_bytes) as u64
    }

    /// Computes that style in a lane, if there is such a norm.
    fn style(&mut self, lane: usize, index: usize) {
        let (memory, Model { width, depth, .. }) = (self.memory, self.run.shape.model);
        let weights = match index {
            index if index > 2 * depth => return,
            index if index == 2 * depth => memory.address("final_style"),
            index => memory.layer(if index % 2 == 0 { "style1" } else { "style2" }, index / 2),
        };
        let spec = GemmSpec::new(1, 3 * width, width, MatrixDtype::Bf16, MatrixDtype::F32);
        self.plan.gemm(lane, spec, memory.address("cond"), weights, self.style_address(index))
    }

    /// adaRMS of h: its style, the norm, the modulation; to `y`, or in fp32 to `exact`.
    fn norm(&mut self, index: usize, bias: u64, exact: bool) {
        let (memory, width, s) = (self.memory, self.run.shape.model.width, self.run.shape.s);
        if !self.concurrent {
            self.style(0, index);
        }
        let width_i32 = Argument::I32(width as i32);
        self.plan.launch(&NORM, s, &[memory.at("h"), memory.at("normed"), width_i32]);
        if self.concurrent {
            // This one is waited for, and the next one runs concurrently with what follows.
            self.plan.cross(STYLES, 0);
            self.style(STYLES, index + 1);
        }
        let (y, exact) = if exact { (NULL, memory.at("exact")) } else { (memory.at("y"), NULL) };
        let packets = s * width / PACKET;
        let style = [
            memory.at("normed"),
            Argument::Address(self.style_address(index)),
            Argument::Address(bias),
        ];
        self.plan.launch(
            &MODULATE,
            packets,
            &[style[0], style[1], style[2], y, exact, width_i32, Argument::I32(packets as i32)],
        )
    }

    /// h += gate·branch, with the gate of that norm's style.
    fn residual(&mut self, index: usize, bias: u64) {
        let (memory, width, s) = (self.memory, self.run.shape.model.width, self.run.shape.s);
        let packets = s * width / PACKET;
        let sizes = [width, packets].map(|size| Argument::I32(size as i32));
        let style = [Argument::Address(self.style_address(index)), Argument::Address(bias)];
        self.plan.launch(
            &RESIDUAL,
            packets,
            &[memory.at("h"), memory.at("branch"), style[0], style[1], sizes[0], sizes[1]],
        )
    }

    /// x += bias on rows of the width, and SiLU if wanted.
    fn bias(&mut self, x: &str, bias: &str, rows: usize, silu: bool) {
        let (memory, width) = (self.memory, self.run.shape.model.width);
        let packets = rows * width / PACKET;
        let sizes = [width, packets, usize::from(silu)].map(|size| Argument::I32(size as i32));
        self.plan.launch(
            &BIAS,
            packets,
            &[memory.at(x), memory.at(bias), sizes[0], sizes[1], sizes[2]],
        )
    }

    /// A GEMM in bf16: y `[rows, columns]` = x `[rows, depth]` · w `[depth, columns]`.
    fn gemm(&mut self, rows: usize, columns: usize, depth: usize, x: &str, w: u64, y: &str) {
        self.gemm_of(
            GemmSpec::new(rows, columns, depth, MatrixDtype::Bf16, MatrixDtype::Bf16),
            x,
            w,
            y,
        )
    }

    /// The same of several (w, y), concurrently with what comes next in the first lane, or before
    /// it.
    fn concurrent_gemms<const N: usize>(
        &mut self,
        rows: usize,
        [columns, depth]: [usize; 2],
        x: &str,
        gemms: [(u64, &str); N],
    ) {
        let spec = GemmSpec::new(rows, columns, depth, MatrixDtype::Bf16, MatrixDtype::Bf16);
        for (number, (w, y)) in gemms.into_iter().enumerate() {
            let lane = if self.concurrent { STYLES + 1 + number } else { 0 };
            if lane > 0 {
                self.plan.cross(0, lane);
            }
            let (x, y) = (self.memory.address(x), self.memory.address(y));
            self.plan.gemm(lane, spec, x, w, y)
        }
    }

    /// Waits for so many concurrent GEMMs.
    fn wait_for_concurrent(&mut self, gemms: usize) {
        if self.concurrent {
            (0..gemms).for_each(|number| self.plan.cross(STYLES + 1 + number, 0));
        }
    }

    fn gemm_of(&mut self, spec: GemmSpec, x: &str, w: u64, y: &str) {
        let (x, y) = (self.memory.address(x), self.memory.address(y));
        self.plan.gemm(0, spec, x, w, y)
    }
}
