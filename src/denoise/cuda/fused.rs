//! Denoising rung with five kernels for each layer, from `kernels/denoise/fused_*`. In the fused
//! denoising rung, the norm styles of all denoising steps are computed before the first step.

use super::pack::{
    DOWN_PROJECTION_K_SPLIT, GATE_UP_PROJECTION_K_SPLIT, OUTPUT_PROJECTION_K_SPLIT,
    PACKED_TILE_COLUMNS, QKV_PROJECTION_K_SPLIT, TIME_AND_STYLE_PROJECTION_K_SPLIT, WeightPacking,
    weight_packings_for_fused_kernels,
};
use super::per_op::{ROPE_ANGLES_KERNEL, TIME_EMBEDDING_KERNEL, time_embedding_blocks_per_row};
use super::row::{
    DENOISE_BLOCK_THREADS, DenoiseLaunchSizes, grid_with_one_block_per_row,
    kernel_compiled_per_model, model_dimension_macros_and,
};
use super::run::DenoiseStepOrLoop;
use super::writer::{DenoiseProgramBuilder, RegionNameAndBytes};
use crate::denoise::model::ExpertDimensions;
use kernelgate::backend::program::{
    KeepOrReleaseL2Lines, LaunchArgument, LaunchProgram, MemoryPurpose, NULL, RegionPointer,
    int_operand, int_operands,
};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::{KernelSpec, RequiredArchitecture};

/// Kernels of the fused denoising rung.
pub const FUSED_DENOISE_KERNELS: &[KernelSpec<DenoiseLaunchSizes>] = &[
    QKV_PROJECTION_KERNEL,
    OUTPUT_PROJECTION_KERNEL,
    GATE_UP_PROJECTION_KERNEL,
    DOWN_PROJECTION_KERNEL,
    TIME_PROJECTION_KERNEL,
    STYLE_PROJECTION_KERNEL,
    FUSED_ATTENTION_KERNEL,
    INITIAL_RESIDUAL_KERNEL,
    VELOCITY_AND_NEXT_RESIDUAL_KERNEL,
];

/// Number of output rows in a tile of the fused GEMM kernels.
const GEMM_TILE_ROWS: usize = 64;

/// GEMM kernel of the q, k and v projections: each cluster of blocks computes an output tile of 64
/// rows by 64 columns, with k split among its blocks.
const QKV_PROJECTION_KERNEL: KernelSpec<DenoiseLaunchSizes> = KernelSpec {
    constant_macros: projection_kernel_macros,
    dynamic_shared_bytes: |items| {
        gemm_block_shared_bytes(items.model.model_width, QKV_PROJECTION_K_SPLIT)
    },
    cluster_blocks: Some(QKV_PROJECTION_K_SPLIT),
    required_architecture: RequiredArchitecture::ExactArchitecture("sm_90a"),
    ..kernel_compiled_per_model("denoise/fused_project", "denoise_fused_project_qkv", |items| {
        grid_of_output_tiles_and_k_splits(
            items,
            (items.model.query_heads + 2) * items.model.head_dim,
            QKV_PROJECTION_K_SPLIT,
        )
    })
};
const OUTPUT_PROJECTION_KERNEL: KernelSpec<DenoiseLaunchSizes> = KernelSpec {
    kernel_symbol: "denoise_fused_project_out",
    blocks: |items| {
        grid_of_output_tiles_and_k_splits(items, items.model.model_width, OUTPUT_PROJECTION_K_SPLIT)
    },
    dynamic_shared_bytes: |items| {
        gemm_block_shared_bytes(
            items.model.query_heads * items.model.head_dim,
            OUTPUT_PROJECTION_K_SPLIT,
        )
    },
    cluster_blocks: Some(OUTPUT_PROJECTION_K_SPLIT),
    ..QKV_PROJECTION_KERNEL
};
const GATE_UP_PROJECTION_KERNEL: KernelSpec<DenoiseLaunchSizes> = KernelSpec {
    kernel_symbol: "denoise_fused_project_gate_up",
    blocks: |items| {
        grid_of_output_tiles_and_k_splits(
            items,
            2 * items.model.feed_forward_width,
            GATE_UP_PROJECTION_K_SPLIT,
        )
    },
    dynamic_shared_bytes: |items| {
        gemm_block_shared_bytes(items.model.model_width, GATE_UP_PROJECTION_K_SPLIT)
    },
    cluster_blocks: Some(GATE_UP_PROJECTION_K_SPLIT),
    ..QKV_PROJECTION_KERNEL
};
const DOWN_PROJECTION_KERNEL: KernelSpec<DenoiseLaunchSizes> = KernelSpec {
    kernel_symbol: "denoise_fused_project_down",
    blocks: |items| {
        grid_of_output_tiles_and_k_splits(items, items.model.model_width, DOWN_PROJECTION_K_SPLIT)
    },
    dynamic_shared_bytes: |items| {
        gemm_block_shared_bytes(items.model.feed_forward_width, DOWN_PROJECTION_K_SPLIT)
    },
    cluster_blocks: Some(DOWN_PROJECTION_K_SPLIT),
    ..QKV_PROJECTION_KERNEL
};

/// GEMM kernel of the time embedding layers, launched before the denoising loop, because it does
/// not depend on the actions.
const TIME_PROJECTION_KERNEL: KernelSpec<DenoiseLaunchSizes> = KernelSpec {
    kernel_symbol: "denoise_fused_project_time",
    blocks: |items| {
        grid_of_output_tiles_and_k_splits(
            items,
            items.model.model_width,
            TIME_AND_STYLE_PROJECTION_K_SPLIT,
        )
    },
    dynamic_shared_bytes: |items| {
        gemm_block_shared_bytes(items.model.model_width, TIME_AND_STYLE_PROJECTION_K_SPLIT)
    },
    cluster_blocks: Some(TIME_AND_STYLE_PROJECTION_K_SPLIT),
    ..QKV_PROJECTION_KERNEL
};
const STYLE_PROJECTION_KERNEL: KernelSpec<DenoiseLaunchSizes> = KernelSpec {
    kernel_symbol: "denoise_fused_project_style",
    blocks: |items| {
        grid_of_output_tiles_and_k_splits(
            items,
            3 * items.model.model_width,
            TIME_AND_STYLE_PROJECTION_K_SPLIT,
        )
    },
    ..TIME_PROJECTION_KERNEL
};

fn projection_kernel_macros(items: &DenoiseLaunchSizes) -> Vec<(&'static str, usize)> {
    let ExpertDimensions {
        model_width: width,
        feed_forward_width: mlp,
        query_heads: heads,
        head_dim,
        ..
    } = items.model;
    let own = [
        ("THREADS", DENOISE_BLOCK_THREADS),
        ("TILE_ROWS", GEMM_TILE_ROWS),
        ("TILE_COLUMNS", PACKED_TILE_COLUMNS),
        ("QKV_SPLIT", QKV_PROJECTION_K_SPLIT),
        ("OUT_SPLIT", OUTPUT_PROJECTION_K_SPLIT),
        ("GATE_UP_SPLIT", GATE_UP_PROJECTION_K_SPLIT),
        ("DOWN_SPLIT", DOWN_PROJECTION_K_SPLIT),
        ("LINEAR_SPLIT", TIME_AND_STYLE_PROJECTION_K_SPLIT),
        ("QKV_SHARED_BYTES", gemm_block_shared_bytes(width, QKV_PROJECTION_K_SPLIT)),
        ("OUT_SHARED_BYTES", gemm_block_shared_bytes(heads * head_dim, OUTPUT_PROJECTION_K_SPLIT)),
        ("GATE_UP_SHARED_BYTES", gemm_block_shared_bytes(width, GATE_UP_PROJECTION_K_SPLIT)),
        ("DOWN_SHARED_BYTES", gemm_block_shared_bytes(mlp, DOWN_PROJECTION_K_SPLIT)),
        ("LINEAR_SHARED_BYTES", gemm_block_shared_bytes(width, TIME_AND_STYLE_PROJECTION_K_SPLIT)),
    ];
    model_dimension_macros_and(items, &own)
}

fn grid_of_output_tiles_and_k_splits(
    items: &DenoiseLaunchSizes,
    columns: usize,
    split: usize,
) -> [usize; 3] {
    [
        columns / PACKED_TILE_COLUMNS * split,
        items.rows_or_elements.div_ceil(GEMM_TILE_ROWS),
        items.layers_per_launch,
    ]
}

/// Bytes of shared memory of a fused GEMM block: up to four panels of x, the block's slice of the
/// weights, and partial sums from the cluster.
const fn gemm_block_shared_bytes(depth: usize, split: usize) -> usize {
    let slice = (depth / 16).div_ceil(split) * 16;
    let group = if slice < PACKED_TILE_COLUMNS { slice } else { PACKED_TILE_COLUMNS };
    let panels = if slice / group < 4 { slice / group } else { 4 };
    panels * GEMM_TILE_ROWS * PACKED_TILE_COLUMNS * 2
        + slice * PACKED_TILE_COLUMNS * 2
        + GEMM_TILE_ROWS * PACKED_TILE_COLUMNS * 4
}

/// Number of thread blocks in a cluster of the attention kernel, which divide the keys of
/// [`QUERY_ROWS_PER_ATTENTION_CLUSTER`] query rows.
const BLOCKS_PER_ATTENTION_CLUSTER: usize = 8;
const QUERY_ROWS_PER_ATTENTION_CLUSTER: usize = 32;
const FUSED_ATTENTION_KERNEL: KernelSpec<DenoiseLaunchSizes> = KernelSpec {
    constant_macros: |items| {
        let shared = ("SHARED_BYTES", attention_block_shared_bytes(items));
        model_dimension_macros_and(
            items,
            &[
                ("THREADS", DENOISE_BLOCK_THREADS),
                ("SPLIT", BLOCKS_PER_ATTENTION_CLUSTER),
                ("TILE_ROWS", QUERY_ROWS_PER_ATTENTION_CLUSTER),
                shared,
            ],
        )
    },
    dynamic_shared_bytes: attention_block_shared_bytes,
    cluster_blocks: Some(BLOCKS_PER_ATTENTION_CLUSTER),
    required_architecture: RequiredArchitecture::AtLeastCapability(90),
    ..kernel_compiled_per_model("denoise/fused_attention", "denoise_fused_attention", |items| {
        [
            items.rows_or_elements.div_ceil(QUERY_ROWS_PER_ATTENTION_CLUSTER)
                * BLOCKS_PER_ATTENTION_CLUSTER,
            1,
            items.layers_per_launch,
        ]
    })
};

/// Bytes of shared memory of an attention block: its q rows, 128 keys and 128 values, in rows of at
/// least 128 bytes each, and the probabilities.
fn attention_block_shared_bytes(items: &DenoiseLaunchSizes) -> usize {
    let row_bytes = (2 * items.model.head_dim).max(128);
    (QUERY_ROWS_PER_ATTENTION_CLUSTER + 2 * 128) * row_bytes
        + QUERY_ROWS_PER_ATTENTION_CLUSTER * 128 * 2
}

const INITIAL_RESIDUAL_KERNEL: KernelSpec<DenoiseLaunchSizes> = kernel_compiled_per_model(
    "denoise/fused_rows",
    "denoise_fused_rows_begin",
    grid_with_one_block_per_row,
);
const VELOCITY_AND_NEXT_RESIDUAL_KERNEL: KernelSpec<DenoiseLaunchSizes> =
    KernelSpec { kernel_symbol: "denoise_fused_rows_end", ..INITIAL_RESIDUAL_KERNEL };

/// Names of the cached key and value inputs; the device copy has space for the action tokens
/// (suffix) after each layer's prefix.
pub const KEY_VALUE_CACHE_INPUTS: [&str; 2] = ["k_cache", "v_cache"];

/// Creates a program with memory regions for the inputs that keep their layout and for the weights
/// to pack.
pub fn create_program_with_packed_weights(
    run: &DenoiseStepOrLoop,
    packings: Vec<WeightPacking>,
) -> DenoiseProgramBuilder<'_> {
    let names: Vec<&str> =
        packings.iter().flat_map(|packing| packing.weight_input_names).copied().collect();
    let mut writer = DenoiseProgramBuilder::create_with_unpacked_inputs(
        run,
        &[&KEY_VALUE_CACHE_INPUTS[..], &names].concat(),
    );
    for packing in packings {
        let (name, bytes) = packing.name_and_bytes_of_packed_region();
        let pack = move |inputs: &Tensors| packing.pack_weight_inputs(inputs);
        writer.program.add_packed_from_inputs(name, MemoryPurpose::Weights, bytes, pack);
    }
    writer
}

/// Scratch memory regions of the fused denoising program: everything but inputs, keys, values and
/// output.
pub fn fused_scratch_regions(run: &DenoiseStepOrLoop) -> Vec<RegionNameAndBytes> {
    let ExpertDimensions {
        model_width: width,
        layer_count: depth,
        feed_forward_width: mlp,
        query_heads: heads,
        head_dim,
        ..
    } = run.shape.model;
    let (s, steps) = (run.shape.action_tokens, run.denoising_steps);
    let (bf16, f32) = (Dtype::Bf16.bytes_per_element(), Dtype::F32.bytes_per_element());
    // The activations between two GEMMs are stored in whole panels of 64 rows and 64 columns.
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

/// Device memory region with the keys and values of all layers: the cached prefix and space for the
/// action tokens (suffix).
#[derive(Clone, Copy)]
struct KeyValueCacheRegion {
    keys_of_all_layers: RegionPointer,
    values_of_all_layers: RegionPointer,
    key_bytes_per_layer: usize,
}

impl KeyValueCacheRegion {
    fn declare_key_value_region(writer: &mut DenoiseProgramBuilder) -> Self {
        let ExpertDimensions { layer_count: depth, head_dim, .. } = writer.run.shape.model;
        let row_bytes = head_dim * Dtype::Bf16.bytes_per_element();
        let tail_bytes = writer.run.shape.action_tokens * row_bytes;
        let layer_bytes = writer.run.shape.prefix_and_horizon_tokens() * row_bytes;
        let bytes = depth * layer_bytes;
        let keys = writer.program.add_packed_from_inputs(
            "caches",
            MemoryPurpose::Inputs,
            2 * bytes,
            move |inputs| {
                KEY_VALUE_CACHE_INPUTS
                    .map(|name| {
                        copy_layers_with_zero_tails(
                            inputs.tensor(name).as_bytes(),
                            depth,
                            tail_bytes,
                        )
                    })
                    .concat()
            },
        );
        Self {
            keys_of_all_layers: keys,
            values_of_all_layers: keys.offset_by(bytes),
            key_bytes_per_layer: layer_bytes,
        }
    }

    fn key_and_value_pointers_of_layer(&self, layer: usize) -> [RegionPointer; 2] {
        [self.keys_of_all_layers, self.values_of_all_layers]
            .map(|all| all.offset_by(layer * self.key_bytes_per_layer))
    }
}

/// Copies the cached rows of each layer and appends `tail_bytes` zero bytes after each layer.
fn copy_layers_with_zero_tails(bytes: &[u8], depth: usize, tail_bytes: usize) -> Vec<u8> {
    let layer_bytes = bytes.len() / depth;
    let mut spread = Vec::with_capacity(bytes.len() + depth * tail_bytes);
    for layer in 0..depth {
        spread.extend_from_slice(&bytes[layer * layer_bytes..(layer + 1) * layer_bytes]);
        spread.resize(spread.len() + tail_bytes, 0);
    }
    spread
}

/// Fused denoising program in which each kernel begins when the previous one has ended.
pub fn fused_program_without_pdl(run: &DenoiseStepOrLoop) -> LaunchProgram {
    build_fused_denoise_program(run, false, false)
}

/// Fused denoising program in which all launches use programmatic dependent launch (PDL).
pub fn fused_program_with_pdl(run: &DenoiseStepOrLoop) -> LaunchProgram {
    build_fused_denoise_program(run, true, false)
}

/// Fused denoising program with PDL that keeps keys and values in L2 from the first denoising step
/// to the last. The last denoising step releases the kept L2 lines, so that the next launch of the
/// loop finds L2 in its usual state, flushed or not.
pub fn fused_program_with_pdl_and_kept_l2(run: &DenoiseStepOrLoop) -> LaunchProgram {
    build_fused_denoise_program(run, true, true)
}

fn build_fused_denoise_program(
    run: &DenoiseStepOrLoop,
    with_programmatic_launch: bool,
    keeps_caches_in_l2: bool,
) -> LaunchProgram {
    let mut writer = create_program_with_packed_weights(
        run,
        weight_packings_for_fused_kernels(&run.shape.model),
    );
    writer.uses_programmatic_launch = with_programmatic_launch;
    writer.add_scratch_regions(MemoryPurpose::Activations, fused_scratch_regions(run));
    let caches = KeyValueCacheRegion::declare_key_value_region(&mut writer);
    if keeps_caches_in_l2 {
        let bytes = writer.program.bytes_of_region("caches");
        writer.program.keep_range_in_l2(caches.keys_of_all_layers, bytes);
    }
    writer.program.begin_named_range("Prepare");
    write_launches_before_first_step(&mut writer);
    writer.program.end_innermost_range();
    for step in 0..run.denoising_steps {
        writer.program.begin_named_range(format!("Denoise_Step_{step}"));
        write_launches_of_fused_step(&mut writer, caches, step, keeps_caches_in_l2);
        writer.program.end_innermost_range();
    }
    writer.program
}

/// Writes the launches that run once before the denoising steps: the styles of all steps, the RoPE
/// angles, and the first residual stream.
fn write_launches_before_first_step(writer: &mut DenoiseProgramBuilder) {
    let steps = writer.run.denoising_steps;
    write_time_condition_and_angles(writer);
    let depth = writer.run.shape.model.layer_count;
    for (weights, bias, out, layers) in [
        ("style1", "style1_bias", "styles1", depth),
        ("style2", "style2_bias", "styles2", depth),
        ("final_style", "final_style_bias", "final_styles", 1),
    ] {
        let arguments = ("cond", weights, bias, out, int_operand(steps));
        let launch =
            writer.create_kernel_launch(&STYLE_PROJECTION_KERNEL, [steps, layers], arguments);
        writer.program.add_prepared_launch(launch);
    }
    write_initial_residual_launch(writer);
}

/// Writes the launches that compute the time embeddings, the condition vectors `cond` and the RoPE
/// angles.
pub fn write_time_condition_and_angles(writer: &mut DenoiseProgramBuilder) {
    let run = writer.run;
    let ExpertDimensions { model_width: width, head_dim, .. } = run.shape.model;
    let (s, steps) = (run.shape.action_tokens, run.denoising_steps);
    let times = match run.is_whole_loop {
        true => [NULL, writer.pointer_to("times")],
        false => [writer.pointer_to("t"), NULL],
    };
    let sizes = int_operands([width, time_embedding_blocks_per_row(&run.shape.model), 1]);
    writer.add_single_layer_launch(&TIME_EMBEDDING_KERNEL, steps, (times, "embedding", sizes));
    writer.add_single_layer_launch(
        &ROPE_ANGLES_KERNEL,
        s * head_dim / 2,
        ("angles", int_operands([run.shape.prefix_tokens, s, head_dim])),
    );
    for regions in [
        ["embedding", "time_in", "time_in_bias", "time_hidden"],
        ["time_hidden", "time_out", "time_out_bias", "cond"],
    ] {
        writer.add_single_layer_launch(
            &TIME_PROJECTION_KERNEL,
            steps,
            (regions, int_operand(steps)),
        );
    }
}

/// Writes the launch that projects the noisy actions to the first residual stream.
pub fn write_initial_residual_launch(writer: &mut DenoiseProgramBuilder) {
    let state = if writer.run.is_whole_loop { writer.output_operand() } else { NULL };
    let arguments = ("x", "action_in", "action_in_bias", state, "h", "squares");
    writer.add_single_layer_launch(
        &INITIAL_RESIDUAL_KERNEL,
        writer.run.shape.action_tokens,
        arguments,
    );
}

/// Writes the fused launches of one denoising step into the program.
fn write_launches_of_fused_step(
    writer: &mut DenoiseProgramBuilder,
    caches: KeyValueCacheRegion,
    step: usize,
    keep: bool,
) {
    let run = writer.run;
    let ExpertDimensions { model_width: width, layer_count: depth, query_heads: heads, .. } =
        run.shape.model;
    let (s, rows) = (run.shape.action_tokens, int_operand(run.shape.action_tokens));
    let style_bytes = 3 * width * Dtype::F32.bytes_per_element();
    let more = step + 1 < run.denoising_steps;
    let lines = keep.then_some(if more {
        KeepOrReleaseL2Lines::MarkL2LinesPersisting
    } else {
        KeepOrReleaseL2Lines::MarkL2LinesNormal
    });
    let [context, prefix] =
        int_operands([run.shape.prefix_and_horizon_tokens(), run.shape.prefix_tokens]);
    for layer in 0..depth {
        let [first, second] = ["styles1", "styles2"]
            .map(|name| writer.pointer_to_layer_part(name, layer).offset_by(step * style_bytes));
        let [qkv_proj, o_proj, gate_up_proj, down_proj] =
            ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
                .map(|name| writer.pointer_to_layer_part(name, layer));
        let caches = caches.key_and_value_pointers_of_layer(layer);
        writer.program.begin_named_range(format!("Layer_{layer}"));
        writer.program.begin_named_range("QKV_Proj");
        let streams = ("h", "squares", first, qkv_proj, "angles", "q");
        writer.add_single_layer_launch(&QKV_PROJECTION_KERNEL, s, (streams, caches, rows, prefix));
        writer.program.end_innermost_range();
        writer.program.begin_named_range("Attn");
        let arguments = ("q", caches, "attended", int_operand(s * heads), context, prefix);
        let attention =
            writer.create_kernel_launch(&FUSED_ATTENTION_KERNEL, [s * heads, 1], arguments);
        writer.program.add_prepared_launch(match lines {
            Some(lines) => attention.with_kept_or_released_l2_lines(lines),
            None => attention,
        });
        writer.program.end_innermost_range();
        writer.program.begin_named_range("O_Proj");
        writer.add_single_layer_launch(
            &OUTPUT_PROJECTION_KERNEL,
            s,
            ("attended", o_proj, first, "h", "squares", rows),
        );
        writer.program.end_innermost_range();
        writer.program.begin_named_range("MLP");
        writer.add_single_layer_launch(
            &GATE_UP_PROJECTION_KERNEL,
            s,
            ("h", "squares", second, gate_up_proj, "hidden", rows),
        );
        writer.add_single_layer_launch(
            &DOWN_PROJECTION_KERNEL,
            s,
            ("hidden", down_proj, second, "h", "squares", rows),
        );
        writer.program.end_innermost_range();
        writer.program.end_innermost_range();
    }
    let style = writer.program.pointer_to("final_styles").offset_by(step * style_bytes);
    let matrices = ["action_out", "action_out_bias", "action_in", "action_in_bias"];
    let result = velocity_state_and_dt_operands(writer);
    let arguments = ("h", "squares", style, matrices, result, int_operand(usize::from(more)));
    writer.program.begin_named_range("Action_Proj_Out");
    writer.add_single_layer_launch(&VELOCITY_AND_NEXT_RESIDUAL_KERNEL, s, arguments);
    writer.program.end_innermost_range();
}

/// Kernel operands: the address of the velocity output or of the loop's state (the other is null),
/// and the length dt of a denoising step.
pub fn velocity_state_and_dt_operands(writer: &DenoiseProgramBuilder) -> [LaunchArgument; 3] {
    let dt = (-1.0 / writer.run.denoising_steps as f64) as f32;
    match writer.run.is_whole_loop {
        true => [NULL, writer.output_operand(), dt.into()],
        false => [writer.output_operand(), NULL, dt.into()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::denoise::model::{PI05_EXPERT_MODEL, TINY_TEST_MODEL};

    #[test]
    fn the_grids_of_fused_kernels_follow_from_model_and_row_count() {
        let blocks = |kernel: KernelSpec<DenoiseLaunchSizes>, model, items| {
            (kernel.blocks)(&DenoiseLaunchSizes {
                model,
                rows_or_elements: items,
                layers_per_launch: 1,
            })
        };
        assert_eq!(blocks(QKV_PROJECTION_KERNEL, PI05_EXPERT_MODEL, 50), [160, 1, 1]);
        assert_eq!(blocks(OUTPUT_PROJECTION_KERNEL, PI05_EXPERT_MODEL, 50), [128, 1, 1]);
        assert_eq!(blocks(GATE_UP_PROJECTION_KERNEL, PI05_EXPERT_MODEL, 50), [256, 1, 1]);
        assert_eq!(blocks(DOWN_PROJECTION_KERNEL, PI05_EXPERT_MODEL, 65), [128, 2, 1]);
        assert_eq!(blocks(FUSED_ATTENTION_KERNEL, PI05_EXPERT_MODEL, 400), [104, 1, 1]);
        assert_eq!(blocks(TIME_EMBEDDING_KERNEL, PI05_EXPERT_MODEL, 10), [20, 1, 1]);
        assert_eq!(blocks(QKV_PROJECTION_KERNEL, TINY_TEST_MODEL, 7), [4, 1, 1]);
    }

    #[test]
    fn zero_rows_are_appended_to_the_cache_of_each_layer() {
        assert_eq!(copy_layers_with_zero_tails(&[1, 2, 3, 4], 2, 1), [1, 2, 0, 3, 4, 0]);
        assert_eq!(copy_layers_with_zero_tails(&[], 2, 2), [0; 4]);
    }
}
