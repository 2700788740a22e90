//! Five kernels a layer: `kernels/denoise/fused_*`. Styles of all steps are computed before the
//! first.

use super::pack::{
    DOWN_SPLIT, GATE_UP_SPLIT, LINEAR_SPLIT, OUT_SPLIT, Packing, QKV_SPLIT, TILE, packings,
};
use super::per_op::{ANGLES, EMBED, embed_blocks};
use super::row::{Items, THREADS, a_row_a_block, model_kernel, with_model};
use super::run::ExpertRun;
use super::writer::{ExpertWriter, Region};
use crate::denoise::model::Model;
use kernelgate::backend::program::{
    KeptLines, MemoryUse, NULL, Operand, Pointer, Program, int, ints,
};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::{KernelSpec, RequiredArchitecture};

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
    requires: RequiredArchitecture::Exactly("sm_90a"),
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

/// Launches before the loop, which do not depend on the actions.
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
    requires: RequiredArchitecture::AtLeast(90),
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

/// Inputs that are held with room for the suffix behind each layer's prefix.
pub const CACHES: [&str; 2] = ["k_cache", "v_cache"];

/// A program with the inputs that are held as they lie, and with these packed ones.
pub fn declared(run: &ExpertRun, packings: Vec<Packing>) -> ExpertWriter<'_> {
    let names: Vec<&str> = packings.iter().flat_map(|packing| packing.inputs).copied().collect();
    let mut writer = ExpertWriter::new(run, &[&CACHES[..], &names].concat());
    for packing in packings {
        let (name, bytes) = packing.region();
        let pack = move |inputs: &Tensors| packing.pack(inputs);
        writer.program.packed(name, MemoryUse::Weights, bytes, pack);
    }
    writer
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

/// Keys and values of all layers, prefix and suffix, in one region.
#[derive(Clone, Copy)]
struct Caches {
    keys: Pointer,
    values: Pointer,
    layer_bytes: usize,
}

impl Caches {
    fn declare(writer: &mut ExpertWriter) -> Self {
        let Model { depth, head_dim, .. } = writer.run.shape.model;
        let row_bytes = head_dim * Dtype::Bf16.bytes();
        let tail_bytes = writer.run.shape.s * row_bytes;
        let layer_bytes = writer.run.shape.context() * row_bytes;
        let bytes = depth * layer_bytes;
        let keys = writer.program.packed("caches", MemoryUse::Inputs, 2 * bytes, move |inputs| {
            CACHES
                .map(|name| with_tails(inputs.tensor(name).as_bytes(), depth, tail_bytes))
                .concat()
        });
        Self { keys, values: keys.plus(bytes), layer_bytes }
    }

    /// Keys and values of a layer.
    fn layer(&self, layer: usize) -> [Pointer; 2] {
        [self.keys, self.values].map(|all| all.plus(layer * self.layer_bytes))
    }
}

/// Layers of rows, with room for more rows behind each.
fn with_tails(bytes: &[u8], depth: usize, tail_bytes: usize) -> Vec<u8> {
    let layer_bytes = bytes.len() / depth;
    let mut spread = Vec::with_capacity(bytes.len() + depth * tail_bytes);
    for layer in 0..depth {
        spread.extend_from_slice(&bytes[layer * layer_bytes..(layer + 1) * layer_bytes]);
        spread.resize(spread.len() + tail_bytes, 0);
    }
    spread
}

/// The launches, each beginning when the one before it has ended.
pub fn program(run: &ExpertRun) -> Program {
    write(run, false, false)
}

/// The launches, each with programmatic dependent launch (PDL).
pub fn programmatic(run: &ExpertRun) -> Program {
    write(run, true, false)
}

/// The launches with PDL, keys and values kept in L2 from the first step to the last. The last step
/// releases them, so that the next launch finds L2 as it would find it without them, whether L2 is
/// flushed between the two or not.
pub fn keeping(run: &ExpertRun) -> Program {
    write(run, true, true)
}

fn write(run: &ExpertRun, programmatic: bool, keep: bool) -> Program {
    let mut writer = declared(run, packings(&run.shape.model));
    writer.programmatic = programmatic;
    writer.scratch(MemoryUse::Activations, scratch(run));
    let caches = Caches::declare(&mut writer);
    if keep {
        let bytes = writer.program.bytes("caches");
        writer.program.keep_in_l2(caches.keys, bytes);
    }
    writer.program.begin("Prepare");
    prepare(&mut writer);
    writer.program.end();
    for step in 0..run.steps {
        writer.program.begin(format!("Denoise_Step_{step}"));
        self::step(&mut writer, caches, step, keep);
        writer.program.end();
    }
    writer.program
}

/// Writes the launches that do not depend on the actions, styles of all steps and angles; and that
/// of the first residual stream.
fn prepare(writer: &mut ExpertWriter) {
    let steps = writer.run.steps;
    condition(writer);
    let depth = writer.run.shape.model.depth;
    for (weights, bias, out, layers) in [
        ("style1", "style1_bias", "styles1", depth),
        ("style2", "style2_bias", "styles2", depth),
        ("final_style", "final_style_bias", "final_styles", 1),
    ] {
        let arguments = ("cond", weights, bias, out, int(steps));
        let launch = writer.kernel(&STYLE, [steps, layers], arguments);
        writer.program.add(launch);
    }
    begin(writer);
}

/// Writes the launches of the embedded times, `cond`, and of the angles.
pub fn condition(writer: &mut ExpertWriter) {
    let run = writer.run;
    let Model { width, head_dim, .. } = run.shape.model;
    let (s, steps) = (run.shape.s, run.steps);
    let times = match run.looped {
        true => [NULL, writer.at("times")],
        false => [writer.at("t"), NULL],
    };
    let sizes = ints([width, embed_blocks(&run.shape.model), 1]);
    writer.launch(&EMBED, steps, (times, "embedding", sizes));
    writer.launch(&ANGLES, s * head_dim / 2, ("angles", ints([run.shape.p, s, head_dim])));
    for regions in [
        ["embedding", "time_in", "time_in_bias", "time_hidden"],
        ["time_hidden", "time_out", "time_out_bias", "cond"],
    ] {
        writer.launch(&TIME, steps, (regions, int(steps)));
    }
}

/// Writes the launch of the first residual stream.
pub fn begin(writer: &mut ExpertWriter) {
    let state = if writer.run.looped { writer.output() } else { NULL };
    let arguments = ("x", "action_in", "action_in_bias", state, "h", "squares");
    writer.launch(&BEGIN, writer.run.shape.s, arguments);
}

/// Writes the launches of a step.
fn step(writer: &mut ExpertWriter, caches: Caches, step: usize, keep: bool) {
    let run = writer.run;
    let Model { width, depth, heads, .. } = run.shape.model;
    let (s, rows) = (run.shape.s, int(run.shape.s));
    let style_bytes = 3 * width * Dtype::F32.bytes();
    let more = step + 1 < run.steps;
    let lines = keep.then_some(if more { KeptLines::Keep } else { KeptLines::Release });
    let [context, prefix] = ints([run.shape.context(), run.shape.p]);
    for layer in 0..depth {
        let [first, second] =
            ["styles1", "styles2"].map(|name| writer.layer(name, layer).plus(step * style_bytes));
        let [qkv_proj, o_proj, gate_up_proj, down_proj] =
            ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
                .map(|name| writer.layer(name, layer));
        let caches = caches.layer(layer);
        writer.program.begin(format!("Layer_{layer}"));
        writer.program.begin("QKV_Proj");
        let streams = ("h", "squares", first, qkv_proj, "angles", "q");
        writer.launch(&QKV, s, (streams, caches, rows, prefix));
        writer.program.end();
        writer.program.begin("Attn");
        let arguments = ("q", caches, "attended", int(s * heads), context, prefix);
        let attention = writer.kernel(&ATTENTION, [s * heads, 1], arguments);
        writer.program.add(match lines {
            Some(lines) => attention.with_lines(lines),
            None => attention,
        });
        writer.program.end();
        writer.program.begin("O_Proj");
        writer.launch(&OUT, s, ("attended", o_proj, first, "h", "squares", rows));
        writer.program.end();
        writer.program.begin("MLP");
        writer.launch(&GATE_UP, s, ("h", "squares", second, gate_up_proj, "hidden", rows));
        writer.launch(&DOWN, s, ("hidden", down_proj, second, "h", "squares", rows));
        writer.program.end();
        writer.program.end();
    }
    let style = writer.program.at("final_styles").plus(step * style_bytes);
    let matrices = ["action_out", "action_out_bias", "action_in", "action_in_bias"];
    let result = result(writer);
    let arguments = ("h", "squares", style, matrices, result, int(usize::from(more)));
    writer.program.begin("Action_Proj_Out");
    writer.launch(&END, s, arguments);
    writer.program.end();
}

/// Addresses of the velocity and of the state, one of them null, and the length of a step.
pub fn result(writer: &ExpertWriter) -> [Operand; 3] {
    let dt = (-1.0 / writer.run.steps as f64) as f32;
    match writer.run.looped {
        true => [NULL, writer.output(), dt.into()],
        false => [writer.output(), NULL, dt.into()],
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

    #[test]
    fn tails_lie_behind_each_layer() {
        assert_eq!(with_tails(&[1, 2, 3, 4], 2, 1), [1, 2, 0, 3, 4, 0]);
        assert_eq!(with_tails(&[], 2, 2), [0; 4]);
    }
}
