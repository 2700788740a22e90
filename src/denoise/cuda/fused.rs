//! Five kernels a layer: `kernels/denoise/fused_*`. Styles of all steps are computed before the
//! first.

use std::sync::Arc;

use super::buffers::{self, Buffers, Region};
use super::pack::{
    DOWN_SPLIT, GATE_UP_SPLIT, LINEAR_SPLIT, OUT_SPLIT, Packing, QKV_SPLIT, TILE, packings,
};
use super::per_op::{ANGLES, EMBED, embed_blocks};
use super::program::{LaunchPlan, LaunchSequence};
use super::row::{Items, THREADS, a_row_a_block, model_kernel, with_model};
use super::run::ExpertRun;
use crate::denoise::model::Model;
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::Output;
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::driver::persistence::SetAside;
use kernelgate_cuda::driver::window::Window;
use kernelgate_cuda::{Argument, Device, KernelSpec, Requires};

/// The kernels.
pub const KERNELS: &[KernelSpec<Items>] =
    &[QKV, OUT, GATE_UP, DOWN, TIME, STYLE, ATTENTION, BEGIN, END];

/// Rows of a tile of a GEMM.
const TILE_ROWS: usize = 64;

/// The GEMMs: a cluster a tile of 64 columns, k split among its blocks, and 64 rows.
const QKV: KernelSpec<Items> = KernelSpec {
    constants: project_constants,
    shared_bytes: |items| gemm_shared(items.model.width, QKV_SPLIT),
    cluster: Some(QKV_SPLIT),
    requires: Requires::Exactly("sm_90a"),
    ..model_kernel(
        "denoise/fused_project",
        include_str!("../../../kernels/denoise/fused_project.cu"),
        "denoise_fused_project_qkv",
        |items| tiles(items, (items.model.heads + 2) * items.model.head_dim, QKV_SPLIT),
    )
};
const OUT: KernelSpec<Items> = KernelSpec {
    symbol: "denoise_fused_project_out",
    blocks: |items| tiles(items, items.model.width, OUT_SPLIT),
    shared_bytes: |items| gemm_shared(items.model.heads * items.model.head_dim, OUT_SPLIT),
    cluster: Some(OUT_SPLIT),
    ..QKV
};
const GATE_UP: KernelSpec<Items> = KernelSpec {
    symbol: "denoise_fused_project_gate_up",
    blocks: |items| tiles(items, 2 * items.model.mlp, GATE_UP_SPLIT),
    shared_bytes: |items| gemm_shared(items.model.width, GATE_UP_SPLIT),
    cluster: Some(GATE_UP_SPLIT),
    ..QKV
};
const DOWN: KernelSpec<Items> = KernelSpec {
    symbol: "denoise_fused_project_down",
    blocks: |items| tiles(items, items.model.width, DOWN_SPLIT),
    shared_bytes: |items| gemm_shared(items.model.mlp, DOWN_SPLIT),
    cluster: Some(DOWN_SPLIT),
    ..QKV
};

/// What does not depend on the actions, computed before the loop.
const TIME: KernelSpec<Items> = KernelSpec {
    symbol: "denoise_fused_project_time",
    blocks: |items| tiles(items, items.model.width, LINEAR_SPLIT),
    shared_bytes: |items| gemm_shared(items.model.width, LINEAR_SPLIT),
    cluster: Some(LINEAR_SPLIT),
    ..QKV
};
const STYLE: KernelSpec<Items> = KernelSpec {
    symbol: "denoise_fused_project_style",
    blocks: |items| tiles(items, 3 * items.model.width, LINEAR_SPLIT),
    ..TIME
};

fn project_constants(items: &Items) -> Vec<(&'static str, usize)> {
    let Model { width, mlp, heads, head_dim, .. } = items.model;
    let own = [
        ("THREADS", THREADS),
        ("TILE_ROWS", TILE_ROWS),
        ("TILE_COLUMNS", TILE),
        ("QKV_SPLIT", QKV_SPLIT),
        ("OUT_SPLIT", OUT_SPLIT),
        ("GATE_UP_SPLIT", GATE_UP_SPLIT),
        ("DOWN_SPLIT", DOWN_SPLIT),
        ("LINEAR_SPLIT", LINEAR_SPLIT),
        ("QKV_SHARED_BYTES", gemm_shared(width, QKV_SPLIT)),
        ("OUT_SHARED_BYTES", gemm_shared(heads * head_dim, OUT_SPLIT)),
        ("GATE_UP_SHARED_BYTES", gemm_shared(width, GATE_UP_SPLIT)),
        ("DOWN_SHARED_BYTES", gemm_shared(mlp, DOWN_SPLIT)),
        ("LINEAR_SHARED_BYTES", gemm_shared(width, LINEAR_SPLIT)),
    ];
    with_model(items, &own)
}

fn tiles(items: &Items, columns: usize, split: usize) -> [usize; 3] {
    [columns / TILE * split, items.items.div_ceil(TILE_ROWS), items.layers]
}

/// Up to four panels of x, the block's slice of the weights, and the parts that the cluster sends.
const fn gemm_shared(depth: usize, split: usize) -> usize {
    let slice = (depth / 16).div_ceil(split) * 16;
    let group = if slice < TILE { slice } else { TILE };
    let panels = if slice / group < 4 { slice / group } else { 4 };
    panels * TILE_ROWS * TILE * 2 + slice * TILE * 2 + TILE_ROWS * TILE * 4
}

/// Blocks of a cluster of attention, and the rows of queries that it shares.
const ATTENTION_SPLIT: usize = 8;
const ATTENTION_ROWS: usize = 32;
const ATTENTION: KernelSpec<Items> = KernelSpec {
    constants: |items| {
        let shared = ("SHARED_BYTES", attention_shared(items));
        with_model(
            items,
            &[
                ("THREADS", THREADS),
                ("SPLIT", ATTENTION_SPLIT),
                ("TILE_ROWS", ATTENTION_ROWS),
                shared,
            ],
        )
    },
    shared_bytes: attention_shared,
    cluster: Some(ATTENTION_SPLIT),
    requires: Requires::AtLeast(90),
    ..model_kernel(
        "denoise/fused_attention",
        include_str!("../../../kernels/denoise/fused_attention.cu"),
        "denoise_fused_attention",
        |items| [items.items.div_ceil(ATTENTION_ROWS) * ATTENTION_SPLIT, 1, items.layers],
    )
};

/// Rows of q and of 128 keys and values, 128 bytes at least; the probabilities.
fn attention_shared(items: &Items) -> usize {
    let row_bytes = (2 * items.model.head_dim).max(128);
    (ATTENTION_ROWS + 2 * 128) * row_bytes + ATTENTION_ROWS * 128 * 2
}

const BEGIN: KernelSpec<Items> = model_kernel(
    "denoise/fused_rows",
    include_str!("../../../kernels/denoise/fused_rows.cu"),
    "denoise_fused_rows_begin",
    a_row_a_block,
);
const END: KernelSpec<Items> = KernelSpec { symbol: "denoise_fused_rows_end", ..BEGIN };

pub const NULL: Argument = Argument::Address(0);
/// Held with room for the suffix behind each layer's prefix, not as the inputs lie.
pub const CACHES: [&str; 2] = ["k_cache", "v_cache"];

/// Inputs that are held as they lie.
pub fn inputs(run: &ExpertRun) -> Vec<Region> {
    let packed: Vec<&str> =
        packings(&run.shape.model).iter().flat_map(|packing| packing.inputs).copied().collect();
    buffers::inputs(run, &[&CACHES[..], &packed].concat())
}

/// Packed inputs.
pub fn packed(run: &ExpertRun) -> Vec<Region> {
    packings(&run.shape.model).iter().map(Packing::region).collect()
}

/// Everything but inputs, keys, values and output.
pub fn scratch(run: &ExpertRun) -> Vec<Region> {
    let Model { width, depth, mlp, heads, head_dim, .. } = run.shape.model;
    let (s, steps) = (run.shape.s, run.steps);
    let (bf16, f32) = (Dtype::Bf16.bytes(), Dtype::F32.bytes());
    // Between two GEMMs: rows and columns in whole panels of 64.
    let panels = |rows: usize, columns: usize| {
        rows.next_multiple_of(64) * columns.next_multiple_of(64) * bf16
    };
    vec![
        ("embedding", panels(steps, width)),
        ("time_hidden", panels(steps, width)),
        ("cond", panels(steps, width)),
        ("styles1", depth * steps * 3 * width * f32),
        ("styles2", depth * steps * 3 * width * f32),
        ("final_styles", steps * 3 * width * f32),
        ("angles", s * head_dim * f32),
        ("h", s * width * bf16),
        ("squares", s * (width / 64) * f32),
        ("q", s * heads * head_dim * bf16),
        ("attended", panels(s, heads * head_dim)),
        ("hidden", panels(s, mlp)),
    ]
}

/// Keys and values of all layers, prefix and suffix.
pub fn caches(run: &ExpertRun) -> [Region; 2] {
    let Model { depth, head_dim, .. } = run.shape.model;
    let bytes = depth * run.shape.context() * head_dim * Dtype::Bf16.bytes();
    [("keys", bytes), ("values", bytes)]
}

/// Inputs, the suffix' room in the caches, styles, activations and the output.
pub fn device_bytes(run: &ExpertRun) -> u64 {
    buffers::device_bytes(run, &[&inputs(run), &packed(run), &caches(run), &scratch(run)])
}

/// Writes the launches, each to begin when the one before it has ended.
///
/// # Errors
/// When a kernel does not compile or device memory is short.
pub fn program(
    run: &ExpertRun,
    inputs: &Tensors,
    device: &Arc<Device>,
    output: &Output,
) -> Result<LaunchSequence, BackendError> {
    write(run, inputs, device, output, false, None)
}

/// Writes the launches, each with programmatic dependent launch (PDL).
///
/// # Errors
/// As [`program`].
pub fn programmatic(
    run: &ExpertRun,
    inputs: &Tensors,
    device: &Arc<Device>,
    output: &Output,
) -> Result<LaunchSequence, BackendError> {
    write(run, inputs, device, output, true, None)
}

/// The same as [`programmatic`], keys and values kept in L2 from the first step to the last. The
/// last step releases them: what a launch of the program leaves behind is the same as without, and
/// so is what the next one finds, whether L2 is flushed between the two or not.
///
/// # Errors
/// As [`program`]; [`BackendError::Unsupported`] where the device keeps nothing.
pub fn keeping(
    run: &ExpertRun,
    inputs: &Tensors,
    device: &Arc<Device>,
    output: &Output,
) -> Result<LaunchSequence, BackendError> {
    let bytes = caches(run).iter().map(|(_, bytes)| bytes).sum();
    write(run, inputs, device, output, true, Some(SetAside::new(device, bytes)?))
}

fn write(
    run: &ExpertRun,
    inputs: &Tensors,
    device: &Arc<Device>,
    output: &Output,
    programmatic: bool,
    set_aside: Option<SetAside>,
) -> Result<LaunchSequence, BackendError> {
    let tail_bytes = run.shape.s * run.shape.model.head_dim * Dtype::Bf16.bytes();
    let tailed = [("keys", CACHES[0], tail_bytes), ("values", CACHES[1], tail_bytes)];
    let packings = packings(&run.shape.model);
    let packed = packings.iter().map(|packing| (packing.name, packing.pack(inputs)));
    let memory =
        Buffers::new(run, inputs, device, &self::inputs(run), packed, &scratch(run), &tailed)?;
    let (address, bytes) = memory.span("keys", "values");
    let kept = set_aside.as_ref().map(|set_aside| set_aside.window(address, bytes));
    plan(run, &memory, output.argument(), kept).finish(
        device,
        &run.shape.model,
        None,
        programmatic,
        memory,
        set_aside,
    )
}

/// The launches, for memory that has every region; `kept` is what attention keeps of keys and
/// values for the next step.
pub fn plan(
    run: &ExpertRun,
    memory: &Buffers,
    output: Argument,
    kept: Option<Window>,
) -> LaunchPlan {
    let mut plan = LaunchPlan::default();
    plan.begin("Prepare");
    prepare(&mut plan, run, memory, output);
    plan.end();
    let pass = FusedWriter { run, memory, output, kept };
    for step in 0..run.steps {
        plan.begin(format!("Denoise_Step_{step}"));
        pass.step(&mut plan, step);
        plan.end();
    }
    plan
}

struct FusedWriter<'a> {
    run: &'a ExpertRun,
    memory: &'a Buffers,
    output: Argument,
    kept: Option<Window>,
}

/// An extent as an argument.
pub fn i32_of(extent: usize) -> Argument {
    Argument::I32(extent as i32)
}

/// What does not depend on the actions: styles of all steps, angles; and the first residual stream.
fn prepare(plan: &mut LaunchPlan, run: &ExpertRun, memory: &Buffers, output: Argument) {
    let (steps, rows) = (run.steps, i32_of(run.steps));
    let at = |name: &str| memory.at(name);
    condition(plan, run, memory);
    let depth = run.shape.model.depth;
    for (weights, bias, out, layers) in [
        ("style1", "style1_bias", "styles1", depth),
        ("style2", "style2_bias", "styles2", depth),
        ("final_style", "final_style_bias", "final_styles", 1),
    ] {
        let arguments = [at("cond"), at(weights), at(bias), at(out), rows];
        plan.launch_stack(&STYLE, steps, layers, &arguments);
    }
    begin(plan, run, memory, output);
}

/// Writes the launches of the embedded times, `cond`, and of the angles.
pub fn condition(plan: &mut LaunchPlan, run: &ExpertRun, memory: &Buffers) {
    let Model { width, head_dim, .. } = run.shape.model;
    let (s, steps, rows) = (run.shape.s, run.steps, i32_of(run.steps));
    let at = |name: &str| memory.at(name);
    let (time, times) = if run.looped { (NULL, at("times")) } else { (at("t"), NULL) };
    let sizes = [i32_of(width), i32_of(embed_blocks(&run.shape.model)), i32_of(1)];
    plan.launch(&EMBED, steps, &[&[time, times, at("embedding")][..], &sizes].concat());
    let angles = [at("angles"), i32_of(run.shape.p), i32_of(s), i32_of(head_dim)];
    plan.launch(&ANGLES, s * head_dim / 2, &angles);
    for [x, weights, bias, out] in [
        ["embedding", "time_in", "time_in_bias", "time_hidden"],
        ["time_hidden", "time_out", "time_out_bias", "cond"],
    ] {
        plan.launch(&TIME, steps, &[at(x), at(weights), at(bias), at(out), rows]);
    }
}

/// Writes the launch of the first residual stream.
pub fn begin(plan: &mut LaunchPlan, run: &ExpertRun, memory: &Buffers, output: Argument) {
    let at = |name: &str| memory.at(name);
    let state = if run.looped { output } else { NULL };
    let actions = [at("x"), at("action_in"), at("action_in_bias"), state, at("h"), at("squares")];
    plan.launch(&BEGIN, run.shape.s, &actions);
}

impl FusedWriter<'_> {
    fn step(&self, plan: &mut LaunchPlan, step: usize) {
        let (memory, run) = (self.memory, self.run);
        let Model { width, depth, heads, .. } = run.shape.model;
        let (s, rows) = (run.shape.s, i32_of(run.shape.s));
        let style_bytes = (3 * width * Dtype::F32.bytes()) as u64;
        let at = |name: &str| memory.at(name);
        let more = step + 1 < run.steps;
        let window = self.kept.map(|kept| if more { kept } else { kept.released() });
        let [h, squares, q, attended, hidden] = ["h", "squares", "q", "attended", "hidden"].map(at);
        for layer in 0..depth {
            let of = |name: &str| Argument::Address(memory.layer(name, layer));
            let style = |name: &str| {
                Argument::Address(memory.layer(name, layer) + step as u64 * style_bytes)
            };
            let (first, second) = (style("styles1"), style("styles2"));
            let [keys, values] = ["keys", "values"].map(of);
            let prefix = i32_of(run.shape.p);
            let qkv =
                [h, squares, first, of("qkv_proj"), at("angles"), q, keys, values, rows, prefix];
            let attention =
                [q, keys, values, attended, i32_of(s * heads), i32_of(run.shape.context()), prefix];
            plan.begin(format!("Layer_{layer}"));
            plan.begin("QKV_Proj");
            plan.launch(&QKV, s, &qkv);
            plan.end();
            plan.begin("Attn");
            plan.launch_within(&ATTENTION, s * heads, &attention, window);
            plan.end();
            plan.begin("O_Proj");
            plan.launch(&OUT, s, &[attended, of("o_proj"), first, h, squares, rows]);
            plan.end();
            plan.begin("MLP");
            let gate_up = [h, squares, second, of("gate_up_proj"), hidden, rows];
            plan.launch(&GATE_UP, s, &gate_up);
            plan.launch(&DOWN, s, &[hidden, of("down_proj"), second, h, squares, rows]);
            plan.end();
            plan.end();
        }
        let style = Argument::Address(memory.address("final_styles") + step as u64 * style_bytes);
        let (velocity, state) = if run.looped { (NULL, self.output) } else { (self.output, NULL) };
        let dt = Argument::F32((-1.0 / run.steps as f64) as f32);
        let matrices = ["action_out", "action_out_bias", "action_in", "action_in_bias"].map(at);
        let arguments = [
            &[h, squares, style][..],
            &matrices,
            &[velocity, state, dt, Argument::I32(i32::from(more))],
        ]
        .concat();
        plan.begin("Action_Proj_Out");
        plan.launch(&END, s, &arguments);
        plan.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::denoise::model::{PI05, TINY};

    #[test]
    fn gemms_fill_the_multiprocessors() {
        let blocks = |kernel: KernelSpec<Items>, model, items| {
            (kernel.blocks)(&Items { model, items, layers: 1 })
        };
        assert_eq!(blocks(QKV, PI05, 50), [160, 1, 1]);
        assert_eq!(blocks(OUT, PI05, 50), [128, 1, 1]);
        assert_eq!(blocks(GATE_UP, PI05, 50), [256, 1, 1]);
        assert_eq!(blocks(DOWN, PI05, 65), [128, 2, 1]);
        assert_eq!(blocks(ATTENTION, PI05, 400), [104, 1, 1]);
        assert_eq!(blocks(EMBED, PI05, 10), [20, 1, 1]);
        assert_eq!(blocks(QKV, TINY, 7), [4, 1, 1]);
    }
}
