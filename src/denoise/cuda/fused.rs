//! Rung of five kernels a layer, `kernels/denoise/fused_*`. The styles of all steps are computed
//! before the first step.

use super::pack::{
    DOWN_K_SPLIT, GATE_UP_K_SPLIT, LINEAR_K_SPLIT, OUT_K_SPLIT, PackedMatrix, QKV_K_SPLIT,
    TILE_COLUMNS, packings_of_model,
};
use super::per_op::{ANGLES_KERNEL, EMBED_KERNEL, embed_blocks_per_row};
use super::row::{
    LaunchItems, THREADS, a_row_a_block, kernel_compiled_per_model, model_macros_and,
};
use super::run::ExpertRun;
use super::writer::{ExpertWriter, NamedRegion};
use crate::denoise::model::ExpertModel;
use kernelgate::backend::program::{
    KeptL2Lines, MemoryPurpose, NULL, Operand, Pointer, Program, int, int_operands,
};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::{KernelSpec, RequiredArchitecture};

/// Kernels of the fused rung.
pub const KERNELS: &[KernelSpec<LaunchItems>] = &[
    QKV_PROJECTION,
    OUTPUT_PROJECTION,
    GATE_UP_PROJECTION,
    DOWN_PROJECTION,
    TIME_EMBEDDING_KERNELS,
    STYLE_PROJECTION,
    ATTENTION_KERNEL,
    BEGIN_KERNEL,
    END_KERNEL,
];

/// Number of rows in a tile of a GEMM.
const TILE_ROWS: usize = 64;

/// GEMM kernel: each cluster computes a tile of 64 rows by 64 columns, with k split among its
/// blocks.
const QKV_PROJECTION: KernelSpec<LaunchItems> = KernelSpec {
    constants: projection_macros,
    shared_bytes: |items| gemm_shared_bytes(items.model.width, QKV_K_SPLIT),
    cluster: Some(QKV_K_SPLIT),
    requires: RequiredArchitecture::Exactly("sm_90a"),
    ..kernel_compiled_per_model("denoise/fused_project", "denoise_fused_project_qkv", |items| {
        output_tile_grid(items, (items.model.heads + 2) * items.model.head_dim, QKV_K_SPLIT)
    })
};
const OUTPUT_PROJECTION: KernelSpec<LaunchItems> = KernelSpec {
    symbol: "denoise_fused_project_out",
    blocks: |items| output_tile_grid(items, items.model.width, OUT_K_SPLIT),
    shared_bytes: |items| gemm_shared_bytes(items.model.heads * items.model.head_dim, OUT_K_SPLIT),
    cluster: Some(OUT_K_SPLIT),
    ..QKV_PROJECTION
};
const GATE_UP_PROJECTION: KernelSpec<LaunchItems> = KernelSpec {
    symbol: "denoise_fused_project_gate_up",
    blocks: |items| output_tile_grid(items, 2 * items.model.mlp, GATE_UP_K_SPLIT),
    shared_bytes: |items| gemm_shared_bytes(items.model.width, GATE_UP_K_SPLIT),
    cluster: Some(GATE_UP_K_SPLIT),
    ..QKV_PROJECTION
};
const DOWN_PROJECTION: KernelSpec<LaunchItems> = KernelSpec {
    symbol: "denoise_fused_project_down",
    blocks: |items| output_tile_grid(items, items.model.width, DOWN_K_SPLIT),
    shared_bytes: |items| gemm_shared_bytes(items.model.mlp, DOWN_K_SPLIT),
    cluster: Some(DOWN_K_SPLIT),
    ..QKV_PROJECTION
};

/// Launches before the loop, which do not depend on the actions.
const TIME_EMBEDDING_KERNELS: KernelSpec<LaunchItems> = KernelSpec {
    symbol: "denoise_fused_project_time",
    blocks: |items| output_tile_grid(items, items.model.width, LINEAR_K_SPLIT),
    shared_bytes: |items| gemm_shared_bytes(items.model.width, LINEAR_K_SPLIT),
    cluster: Some(LINEAR_K_SPLIT),
    ..QKV_PROJECTION
};
const STYLE_PROJECTION: KernelSpec<LaunchItems> = KernelSpec {
    symbol: "denoise_fused_project_style",
    blocks: |items| output_tile_grid(items, 3 * items.model.width, LINEAR_K_SPLIT),
    ..TIME_EMBEDDING_KERNELS
};

fn projection_macros(items: &LaunchItems) -> Vec<(&'static str, usize)> {
    let ExpertModel { width, mlp, heads, head_dim, .. } = items.model;
    let own = [
        ("THREADS", THREADS),
        ("TILE_ROWS", TILE_ROWS),
        ("TILE_COLUMNS", TILE_COLUMNS),
        ("QKV_SPLIT", QKV_K_SPLIT),
        ("OUT_SPLIT", OUT_K_SPLIT),
        ("GATE_UP_SPLIT", GATE_UP_K_SPLIT),
        ("DOWN_SPLIT", DOWN_K_SPLIT),
        ("LINEAR_SPLIT", LINEAR_K_SPLIT),
        ("QKV_SHARED_BYTES", gemm_shared_bytes(width, QKV_K_SPLIT)),
        ("OUT_SHARED_BYTES", gemm_shared_bytes(heads * head_dim, OUT_K_SPLIT)),
        ("GATE_UP_SHARED_BYTES", gemm_shared_bytes(width, GATE_UP_K_SPLIT)),
        ("DOWN_SHARED_BYTES", gemm_shared_bytes(mlp, DOWN_K_SPLIT)),
        ("LINEAR_SHARED_BYTES", gemm_shared_bytes(width, LINEAR_K_SPLIT)),
    ];
    model_macros_and(items, &own)
}

fn output_tile_grid(items: &LaunchItems, columns: usize, split: usize) -> [usize; 3] {
    [columns / TILE_COLUMNS * split, items.items.div_ceil(TILE_ROWS), items.layers]
}

/// Shared memory of a GEMM block: up to four panels of x, the block's slice of the weights, and the
/// parts that the cluster sends.
const fn gemm_shared_bytes(depth: usize, split: usize) -> usize {
    let slice = (depth / 16).div_ceil(split) * 16;
    let group = if slice < TILE_COLUMNS { slice } else { TILE_COLUMNS };
    let panels = if slice / group < 4 { slice / group } else { 4 };
    panels * TILE_ROWS * TILE_COLUMNS * 2 + slice * TILE_COLUMNS * 2 + TILE_ROWS * TILE_COLUMNS * 4
}

/// Number of blocks in an attention cluster, which share [`QUERY_ROWS_PER_CLUSTER`] query rows.
const BLOCKS_PER_ATTENTION_CLUSTER: usize = 8;
const QUERY_ROWS_PER_CLUSTER: usize = 32;
const ATTENTION_KERNEL: KernelSpec<LaunchItems> = KernelSpec {
    constants: |items| {
        let shared = ("SHARED_BYTES", attention_shared_bytes(items));
        model_macros_and(
            items,
            &[
                ("THREADS", THREADS),
                ("SPLIT", BLOCKS_PER_ATTENTION_CLUSTER),
                ("TILE_ROWS", QUERY_ROWS_PER_CLUSTER),
                shared,
            ],
        )
    },
    shared_bytes: attention_shared_bytes,
    cluster: Some(BLOCKS_PER_ATTENTION_CLUSTER),
    requires: RequiredArchitecture::AtLeast(90),
    ..kernel_compiled_per_model("denoise/fused_attention", "denoise_fused_attention", |items| {
        [
            items.items.div_ceil(QUERY_ROWS_PER_CLUSTER) * BLOCKS_PER_ATTENTION_CLUSTER,
            1,
            items.layers,
        ]
    })
};

/// Shared memory of attention: rows of q, of 128 keys and values, each of at least 128 bytes; the
/// probabilities.
fn attention_shared_bytes(items: &LaunchItems) -> usize {
    let row_bytes = (2 * items.model.head_dim).max(128);
    (QUERY_ROWS_PER_CLUSTER + 2 * 128) * row_bytes + QUERY_ROWS_PER_CLUSTER * 128 * 2
}

const BEGIN_KERNEL: KernelSpec<LaunchItems> =
    kernel_compiled_per_model("denoise/fused_rows", "denoise_fused_rows_begin", a_row_a_block);
const END_KERNEL: KernelSpec<LaunchItems> =
    KernelSpec { symbol: "denoise_fused_rows_end", ..BEGIN_KERNEL };

/// Inputs that are stored with space for the suffix after each layer's prefix.
pub const CACHE_INPUTS: [&str; 2] = ["k_cache", "v_cache"];

/// Creates a program with the inputs that keep their layout, and with the given packed inputs.
pub fn program_with_regions(run: &ExpertRun, packings: Vec<PackedMatrix>) -> ExpertWriter<'_> {
    let names: Vec<&str> = packings.iter().flat_map(|packing| packing.inputs).copied().collect();
    let mut writer = ExpertWriter::new(run, &[&CACHE_INPUTS[..], &names].concat());
    for packing in packings {
        let (name, bytes) = packing.region_of_packing();
        let pack = move |inputs: &Tensors| packing.pack_tensors(inputs);
        writer.program.add_packed(name, MemoryPurpose::Weights, bytes, pack);
    }
    writer
}

/// Regions of scratch memory: everything but inputs, keys, values and output.
pub fn scratch_regions(run: &ExpertRun) -> Vec<NamedRegion> {
    let ExpertModel { width, depth, mlp, heads, head_dim, .. } = run.shape.model;
    let (s, steps) = (run.shape.s, run.steps);
    let (bf16, f32) = (Dtype::Bf16.bytes(), Dtype::F32.bytes());
    // Activations between two GEMMs have whole panels of 64 rows and columns.
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
struct KeyValueCaches {
    keys: Pointer,
    values: Pointer,
    layer_bytes: usize,
}

impl KeyValueCaches {
    fn declare_cache_regions(writer: &mut ExpertWriter) -> Self {
        let ExpertModel { depth, head_dim, .. } = writer.run.shape.model;
        let row_bytes = head_dim * Dtype::Bf16.bytes();
        let tail_bytes = writer.run.shape.s * row_bytes;
        let layer_bytes = writer.run.shape.visible_tokens() * row_bytes;
        let bytes = depth * layer_bytes;
        let keys =
            writer.program.add_packed("caches", MemoryPurpose::Inputs, 2 * bytes, move |inputs| {
                CACHE_INPUTS
                    .map(|name| rows_with_tails(inputs.tensor(name).as_bytes(), depth, tail_bytes))
                    .concat()
            });
        Self { keys, values: keys.offset_by(bytes), layer_bytes }
    }

    fn keys_and_values_of_layer(&self, layer: usize) -> [Pointer; 2] {
        [self.keys, self.values].map(|all| all.offset_by(layer * self.layer_bytes))
    }
}

/// Copies the rows of each layer, with `tail_bytes` zeros after each layer.
fn rows_with_tails(bytes: &[u8], depth: usize, tail_bytes: usize) -> Vec<u8> {
    let layer_bytes = bytes.len() / depth;
    let mut spread = Vec::with_capacity(bytes.len() + depth * tail_bytes);
    for layer in 0..depth {
        spread.extend_from_slice(&bytes[layer * layer_bytes..(layer + 1) * layer_bytes]);
        spread.resize(spread.len() + tail_bytes, 0);
    }
    spread
}

/// Program whose launches begin when the previous one has ended.
pub fn serial_launch_program(run: &ExpertRun) -> Program {
    write_fused_program(run, false, false)
}

/// Program whose launches all use programmatic dependent launch (PDL).
pub fn programmatic_launches(run: &ExpertRun) -> Program {
    write_fused_program(run, true, false)
}

/// Program with PDL that keeps keys and values in L2 from the first step to the last. The last step
/// releases the kept lines, so that the next launch finds L2 in its usual state, whether L2 is
/// flushed between launches or not.
pub fn launches_keeping_l2(run: &ExpertRun) -> Program {
    write_fused_program(run, true, true)
}

fn write_fused_program(run: &ExpertRun, programmatic: bool, keep: bool) -> Program {
    let mut writer = program_with_regions(run, packings_of_model(&run.shape.model));
    writer.programmatic = programmatic;
    writer.declare_scratch_regions(MemoryPurpose::Activations, scratch_regions(run));
    let caches = KeyValueCaches::declare_cache_regions(&mut writer);
    if keep {
        let bytes = writer.program.bytes("caches");
        writer.program.keep_range_in_l2(caches.keys, bytes);
    }
    writer.program.begin_range("Prepare");
    write_step_independent_launches(&mut writer);
    writer.program.end_range();
    for step in 0..run.steps {
        writer.program.begin_range(format!("Denoise_Step_{step}"));
        write_denoising_step(&mut writer, caches, step, keep);
        writer.program.end_range();
    }
    writer.program
}

/// Writes the launches that do not depend on the actions (styles of all steps and angles) and the
/// launch that computes the first residual stream.
fn write_step_independent_launches(writer: &mut ExpertWriter) {
    let steps = writer.run.steps;
    write_time_conditioning(writer);
    let depth = writer.run.shape.model.depth;
    for (weights, bias, out, layers) in [
        ("style1", "style1_bias", "styles1", depth),
        ("style2", "style2_bias", "styles2", depth),
        ("final_style", "final_style_bias", "final_styles", 1),
    ] {
        let arguments = ("cond", weights, bias, out, int(steps));
        let launch = writer.kernel_launch(&STYLE_PROJECTION, [steps, layers], arguments);
        writer.program.add(launch);
    }
    write_initial_residual_launch(writer);
}

/// Writes the launches of the time embeddings, of `cond` and of the angles.
pub fn write_time_conditioning(writer: &mut ExpertWriter) {
    let run = writer.run;
    let ExpertModel { width, head_dim, .. } = run.shape.model;
    let (s, steps) = (run.shape.s, run.steps);
    let times = match run.looped {
        true => [NULL, writer.at("times")],
        false => [writer.at("t"), NULL],
    };
    let sizes = int_operands([width, embed_blocks_per_row(&run.shape.model), 1]);
    writer.add_launch(&EMBED_KERNEL, steps, (times, "embedding", sizes));
    writer.add_launch(
        &ANGLES_KERNEL,
        s * head_dim / 2,
        ("angles", int_operands([run.shape.p, s, head_dim])),
    );
    for regions in [
        ["embedding", "time_in", "time_in_bias", "time_hidden"],
        ["time_hidden", "time_out", "time_out_bias", "cond"],
    ] {
        writer.add_launch(&TIME_EMBEDDING_KERNELS, steps, (regions, int(steps)));
    }
}

/// Writes the launch that computes the first residual stream.
pub fn write_initial_residual_launch(writer: &mut ExpertWriter) {
    let state = if writer.run.looped { writer.velocity_output() } else { NULL };
    let arguments = ("x", "action_in", "action_in_bias", state, "h", "squares");
    writer.add_launch(&BEGIN_KERNEL, writer.run.shape.s, arguments);
}

/// Writes the launches of one denoising step.
fn write_denoising_step(
    writer: &mut ExpertWriter,
    caches: KeyValueCaches,
    step: usize,
    keep: bool,
) {
    let run = writer.run;
    let ExpertModel { width, depth, heads, .. } = run.shape.model;
    let (s, rows) = (run.shape.s, int(run.shape.s));
    let style_bytes = 3 * width * Dtype::F32.bytes();
    let more = step + 1 < run.steps;
    let lines = keep.then_some(if more { KeptL2Lines::Keep } else { KeptL2Lines::Release });
    let [context, prefix] = int_operands([run.shape.visible_tokens(), run.shape.p]);
    for layer in 0..depth {
        let [first, second] = ["styles1", "styles2"]
            .map(|name| writer.layer_pointer(name, layer).offset_by(step * style_bytes));
        let [qkv_proj, o_proj, gate_up_proj, down_proj] =
            ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
                .map(|name| writer.layer_pointer(name, layer));
        let caches = caches.keys_and_values_of_layer(layer);
        writer.program.begin_range(format!("Layer_{layer}"));
        writer.program.begin_range("QKV_Proj");
        let streams = ("h", "squares", first, qkv_proj, "angles", "q");
        writer.add_launch(&QKV_PROJECTION, s, (streams, caches, rows, prefix));
        writer.program.end_range();
        writer.program.begin_range("Attn");
        let arguments = ("q", caches, "attended", int(s * heads), context, prefix);
        let attention = writer.kernel_launch(&ATTENTION_KERNEL, [s * heads, 1], arguments);
        writer.program.add(match lines {
            Some(lines) => attention.with_kept_lines(lines),
            None => attention,
        });
        writer.program.end_range();
        writer.program.begin_range("O_Proj");
        writer.add_launch(&OUTPUT_PROJECTION, s, ("attended", o_proj, first, "h", "squares", rows));
        writer.program.end_range();
        writer.program.begin_range("MLP");
        writer.add_launch(
            &GATE_UP_PROJECTION,
            s,
            ("h", "squares", second, gate_up_proj, "hidden", rows),
        );
        writer.add_launch(&DOWN_PROJECTION, s, ("hidden", down_proj, second, "h", "squares", rows));
        writer.program.end_range();
        writer.program.end_range();
    }
    let style = writer.program.at("final_styles").offset_by(step * style_bytes);
    let matrices = ["action_out", "action_out_bias", "action_in", "action_in_bias"];
    let result = velocity_state_and_dt(writer);
    let arguments = ("h", "squares", style, matrices, result, int(usize::from(more)));
    writer.program.begin_range("Action_Proj_Out");
    writer.add_launch(&END_KERNEL, s, arguments);
    writer.program.end_range();
}

/// Addresses of the velocity and of the state, one of them null, and the length dt of a step.
pub fn velocity_state_and_dt(writer: &ExpertWriter) -> [Operand; 3] {
    let dt = (-1.0 / writer.run.steps as f64) as f32;
    match writer.run.looped {
        true => [NULL, writer.velocity_output(), dt.into()],
        false => [writer.velocity_output(), NULL, dt.into()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::denoise::model::{PI05_MODEL, TINY_MODEL};

    #[test]
    fn the_grids_of_denoising_kernels_follow_from_model_and_rows() {
        let blocks = |kernel: KernelSpec<LaunchItems>, model, items| {
            (kernel.blocks)(&LaunchItems { model, items, layers: 1 })
        };
        assert_eq!(blocks(QKV_PROJECTION, PI05_MODEL, 50), [160, 1, 1]);
        assert_eq!(blocks(OUTPUT_PROJECTION, PI05_MODEL, 50), [128, 1, 1]);
        assert_eq!(blocks(GATE_UP_PROJECTION, PI05_MODEL, 50), [256, 1, 1]);
        assert_eq!(blocks(DOWN_PROJECTION, PI05_MODEL, 65), [128, 2, 1]);
        assert_eq!(blocks(ATTENTION_KERNEL, PI05_MODEL, 400), [104, 1, 1]);
        assert_eq!(blocks(EMBED_KERNEL, PI05_MODEL, 10), [20, 1, 1]);
        assert_eq!(blocks(QKV_PROJECTION, TINY_MODEL, 7), [4, 1, 1]);
    }

    #[test]
    fn zero_rows_are_appended_to_each_layers_tail() {
        assert_eq!(rows_with_tails(&[1, 2, 3, 4], 2, 1), [1, 2, 0, 3, 4, 0]);
        assert_eq!(rows_with_tails(&[], 2, 2), [0; 4]);
    }
}
