//! Denoising rung that computes all steps of the loop in one kernel,
//! `kernels/denoise/persistent.cu`. The launches before the persistent kernel do not depend on the
//! actions: the time embeddings as in the rung `fused`, then two GEMMs with one row a denoising
//! step.

use super::fused::{self, KEY_VALUE_CACHE_INPUTS};
use super::pack::{
    MAX_PERSISTENT_KEYS, pack_cache_as_tensor_core_fragments, weight_packings_for_persistent_kernel,
};
use super::row::{
    DenoiseLaunchSizes, kernel_compiled_per_model, model_dimension_macros_and,
    model_selection_macro,
};
use super::run::DenoiseStepOrLoop;
use super::writer::{DenoiseProgramBuilder, RegionNameAndBytes};
use crate::denoise::definition::LayerWeightFormat;
use crate::denoise::model::{ExpertDimensions, PI05_EXPERT_MODEL};
use kernelgate::backend::program::{LaunchProgram, MemoryPurpose, int_operands};
use kernelgate::workload::Dtype;
use kernelgate_cuda::{KernelSpec, RequiredArchitecture};

/// Maximum number of rows (action tokens) in a tile of the persistent kernel.
const MAX_PERSISTENT_TILE_ROWS: usize = 56;

/// Kernels of the persistent denoising rung, besides those that it shares with `fused`.
pub const PERSISTENT_DENOISE_KERNELS: &[KernelSpec<DenoiseLaunchSizes>] = &[
    PERSISTENT_BF16_KERNEL,
    STREAMED_STYLES_KERNEL,
    NORM_SHIFT_TERMS_BF16_KERNEL,
    PERSISTENT_FP8_KERNEL,
    NORM_SHIFT_TERMS_FP8_KERNEL,
    PERSISTENT_INT4_KERNEL,
    NORM_SHIFT_TERMS_INT4_KERNEL,
];

/// Number of clusters in the persistent kernel's grid, each of [`BLOCKS_PER_PERSISTENT_CLUSTER`]
/// blocks.
const PERSISTENT_CLUSTER_COUNT: usize = 15;
const BLOCKS_PER_PERSISTENT_CLUSTER: usize = 8;
const PERSISTENT_BLOCK_THREADS: usize = 384;
const PERSISTENT_BLOCK_SHARED_BYTES: usize = 231_424;

const PERSISTENT_BF16_KERNEL: KernelSpec<DenoiseLaunchSizes> = KernelSpec {
    constant_macros: |items| persistent_kernel_size_macros(items, PERSISTENT_BLOCK_THREADS, 16),
    threads_per_block: PERSISTENT_BLOCK_THREADS,
    dynamic_shared_bytes: |_| PERSISTENT_BLOCK_SHARED_BYTES,
    cluster_blocks: Some(BLOCKS_PER_PERSISTENT_CLUSTER),
    needs_cooperative_launch: true,
    required_architecture: RequiredArchitecture::ExactArchitecture("sm_90a"),
    listed_build_parameters: || {
        vec![DenoiseLaunchSizes {
            model: PI05_EXPERT_MODEL,
            rows_or_elements: 1,
            layers_per_launch: 1,
        }]
    },
    stage_names: PERSISTENT_TIMER_STAGES,
    ..kernel_compiled_per_model("denoise/persistent", "denoise_persistent", |_| {
        [PERSISTENT_CLUSTER_COUNT * BLOCKS_PER_PERSISTENT_CLUSTER, 1, 1]
    })
};

/// Names of the stages that the persistent kernel times, in the order of the kernel's enum `Stage`.
const PERSISTENT_TIMER_STAGES: &[&str] = &[
    "before the first layer",
    "qkv: waits for x",
    "qkv: multiplies",
    "qkv: exchanges in the cluster, writes",
    "attention: waits for queries",
    "attention: scores, softmax, values",
    "attention: exchanges in the cluster, writes",
    "out: waits for x",
    "out: multiplies",
    "out: exchanges in the cluster, writes",
    "gate, up: waits for x",
    "gate, up: multiplies",
    "gate, up: exchanges in the cluster, writes",
    "down: waits for x",
    "down: multiplies",
    "down: exchanges in the cluster, writes",
    "between steps",
];

/// The persistent kernel built for weights in fp8, which a fourth warpgroup decodes.
const PERSISTENT_FP8_KERNEL: KernelSpec<DenoiseLaunchSizes> = KernelSpec {
    macro_definitions: macros_that_select_fp8_weights,
    constant_macros: |items| {
        persistent_kernel_size_macros(items, PERSISTENT_BLOCK_THREADS_WITH_DECODERS, 8)
    },
    threads_per_block: PERSISTENT_BLOCK_THREADS_WITH_DECODERS,
    ..PERSISTENT_BF16_KERNEL
};
const PERSISTENT_INT4_KERNEL: KernelSpec<DenoiseLaunchSizes> = KernelSpec {
    macro_definitions: macros_that_select_int4_weights,
    constant_macros: |items| {
        persistent_kernel_size_macros(items, PERSISTENT_BLOCK_THREADS_WITH_DECODERS, 4)
    },
    ..PERSISTENT_FP8_KERNEL
};
const PERSISTENT_BLOCK_THREADS_WITH_DECODERS: usize = PERSISTENT_BLOCK_THREADS + 128;

/// Kernel that computes the norm styles of all denoising steps, in
/// `kernels/denoise/streamed_rows.cu`.
const STREAMED_STYLES_KERNEL: KernelSpec<DenoiseLaunchSizes> = KernelSpec {
    kernel_symbol: "denoise_streamed_styles",
    dynamic_shared_bytes: |_| STYLES_KERNEL_SHARED_BYTES,
    ..NORM_SHIFT_TERMS_BF16_KERNEL
};
/// Kernel that multiplies the norms' shifts by weights: the terms that the shifts add to the
/// columns of later GEMMs.
const NORM_SHIFT_TERMS_BF16_KERNEL: KernelSpec<DenoiseLaunchSizes> = KernelSpec {
    constant_macros: |items| streamed_gemm_kernel_macros(items, 16),
    threads_per_block: STREAMED_GEMM_BLOCK_THREADS,
    dynamic_shared_bytes: |_| norm_shift_kernel_shared_bytes(16),
    required_architecture: RequiredArchitecture::AtLeastCapability(90),
    listed_build_parameters: PERSISTENT_BF16_KERNEL.listed_build_parameters,
    ..kernel_compiled_per_model("denoise/streamed_rows", "denoise_streamed_shifts", |_| {
        [STREAMED_GEMM_BLOCKS, 1, 1]
    })
};
const NORM_SHIFT_TERMS_FP8_KERNEL: KernelSpec<DenoiseLaunchSizes> = KernelSpec {
    macro_definitions: macros_that_select_fp8_weights,
    constant_macros: |items| streamed_gemm_kernel_macros(items, 8),
    dynamic_shared_bytes: |_| norm_shift_kernel_shared_bytes(8),
    ..NORM_SHIFT_TERMS_BF16_KERNEL
};
const NORM_SHIFT_TERMS_INT4_KERNEL: KernelSpec<DenoiseLaunchSizes> = KernelSpec {
    macro_definitions: macros_that_select_int4_weights,
    constant_macros: |items| streamed_gemm_kernel_macros(items, 4),
    dynamic_shared_bytes: |_| norm_shift_kernel_shared_bytes(4),
    ..NORM_SHIFT_TERMS_BF16_KERNEL
};

/// Threads of a block of the streamed GEMM kernels: eight warps that multiply and one warp that
/// copies weights to shared memory. An H100 or H200 holds two blocks of the streamed GEMM kernels
/// on each multiprocessor.
const STREAMED_GEMM_BLOCK_THREADS: usize = 288;
const STREAMED_GEMM_BLOCKS: usize = 264;
/// Shared memory bytes of the bf16 input x of a streamed GEMM, for sixteen denoising steps.
const STREAMED_GEMM_INPUT_BYTES: usize = 16 * 2 * PI05_EXPERT_MODEL.model_width;
const STYLES_KERNEL_SHARED_BYTES: usize =
    STREAMED_GEMM_INPUT_BYTES + 5 * packed_weight_piece_bytes(16);

/// Bytes of a piece of 16 units of packed weights with `weight_bits` bits a weight.
const fn packed_weight_piece_bytes(weight_bits: usize) -> usize {
    16 * match weight_bits {
        16 => 1024,
        bits => 64 * bits + 16,
    }
}

/// Number of slots of the norm shift kernel's ring of weight pieces: as many as fit into shared
/// memory besides two parts of x.
const fn norm_shift_kernel_weight_slots(weight_bits: usize) -> usize {
    match weight_bits {
        16 => 3,
        8 => 5,
        _ => 10,
    }
}

const fn norm_shift_kernel_shared_bytes(weight_bits: usize) -> usize {
    2 * STREAMED_GEMM_INPUT_BYTES
        + norm_shift_kernel_weight_slots(weight_bits) * packed_weight_piece_bytes(weight_bits)
}

fn streamed_gemm_kernel_macros(
    items: &DenoiseLaunchSizes,
    weight_bits: usize,
) -> Vec<(&'static str, usize)> {
    let own = [
        ("THREADS", STREAMED_GEMM_BLOCK_THREADS),
        ("WEIGHT_BITS", weight_bits),
        ("STYLES_SHARED_BYTES", STYLES_KERNEL_SHARED_BYTES),
        ("SHIFTS_SLOTS", norm_shift_kernel_weight_slots(weight_bits)),
        ("SHIFTS_SHARED_BYTES", norm_shift_kernel_shared_bytes(weight_bits)),
    ];
    model_dimension_macros_and(items, &own)
}

fn macros_that_select_fp8_weights(items: &DenoiseLaunchSizes) -> Vec<String> {
    [(PERSISTENT_BF16_KERNEL.macro_definitions)(items), vec!["WEIGHTS=Fp8".to_owned()]].concat()
}

fn macros_that_select_int4_weights(items: &DenoiseLaunchSizes) -> Vec<String> {
    [(PERSISTENT_BF16_KERNEL.macro_definitions)(items), vec!["WEIGHTS=Int4".to_owned()]].concat()
}

fn persistent_kernel_size_macros(
    items: &DenoiseLaunchSizes,
    threads: usize,
    weight_bits: usize,
) -> Vec<(&'static str, usize)> {
    let own = [
        ("THREADS", threads),
        ("WEIGHT_BITS", weight_bits),
        ("CLUSTERS", PERSISTENT_CLUSTER_COUNT),
        ("RANKS", BLOCKS_PER_PERSISTENT_CLUSTER),
        ("MAX_ROWS", MAX_PERSISTENT_TILE_ROWS),
        ("MAX_KEYS", MAX_PERSISTENT_KEYS),
        ("SHARED_BYTES", PERSISTENT_BLOCK_SHARED_BYTES),
    ];
    model_dimension_macros_and(items, &own)
}

/// Checks that the persistent kernel is compiled for the run's model and has space for the run's
/// rows and keys. A later check, when the persistent kernel is loaded, finds out whether all its
/// blocks fit on the device at once.
pub fn check_persistent_kernel_supports_run(run: &DenoiseStepOrLoop) -> Result<(), String> {
    let shape = &run.shape;
    if model_selection_macro(&shape.model) != model_selection_macro(&PI05_EXPERT_MODEL) {
        return Err("not compiled for this model".to_owned());
    }
    if shape.action_tokens > MAX_PERSISTENT_TILE_ROWS {
        return Err(format!("has room for {MAX_PERSISTENT_TILE_ROWS} actions"));
    }
    if shape.prefix_and_horizon_tokens() > MAX_PERSISTENT_KEYS {
        return Err(format!(
            "has room for {MAX_PERSISTENT_KEYS} keys, prefix and actions together"
        ));
    }
    Ok(())
}

/// Scratch memory regions of the persistent rung: everything but inputs and output.
fn persistent_scratch_regions(run: &DenoiseStepOrLoop) -> Vec<RegionNameAndBytes> {
    let ExpertDimensions {
        model_width: width,
        layer_count: depth,
        feed_forward_width: mlp,
        query_heads: heads,
        head_dim,
        ..
    } = run.shape.model;
    let (bf16, f32) = (Dtype::Bf16.bytes_per_element(), Dtype::F32.bytes_per_element());
    let rows = |columns: usize| MAX_PERSISTENT_TILE_ROWS * columns * bf16;
    let queries = heads * head_dim;
    let mut regions = fused::fused_scratch_regions(run);
    regions.retain(|(name, _)| !["squares", "q", "attended", "hidden"].contains(name));
    regions.extend([
        ("shift_qkv", depth * run.denoising_steps * (queries + 2 * head_dim) * f32),
        ("shift_gate_up", depth * run.denoising_steps * 2 * mlp * f32),
        ("scaled", rows(width)),
        ("q", rows(queries)),
        ("attended", rows(queries)),
        ("hidden", rows(mlp)),
        // The sums of squares of two norms are stored as sixteen partial sums for each row.
        ("squares", 2 * MAX_PERSISTENT_TILE_ROWS * 16 * f32),
        ("arrived", size_of::<u32>()),
    ]);
    regions
}

/// Creates the persistent rung's program of a run with all its memory regions, but without
/// launches.
fn create_persistent_program_with_regions(run: &DenoiseStepOrLoop) -> DenoiseProgramBuilder<'_> {
    let ExpertDimensions { layer_count: depth, head_dim, .. } = run.shape.model;
    let mut writer = fused::create_program_with_packed_weights(
        run,
        weight_packings_for_persistent_kernel(&run.shape.model, run.shape.weights),
    );
    let bytes = depth * MAX_PERSISTENT_KEYS * head_dim * Dtype::Bf16.bytes_per_element();
    for (name, input) in ["keys", "values"].into_iter().zip(KEY_VALUE_CACHE_INPUTS) {
        writer.program.add_packed_from_inputs(name, MemoryPurpose::Inputs, bytes, move |inputs| {
            let cache = inputs.tensor(input).as_bytes();
            pack_cache_as_tensor_core_fragments(cache, depth, head_dim, name == "values")
        });
    }
    writer.add_scratch_regions(MemoryPurpose::Activations, persistent_scratch_regions(run));
    writer
}

/// Program of the persistent rung, whose launches all use programmatic dependent launch (PDL).
pub fn persistent_program_with_pdl(run: &DenoiseStepOrLoop) -> LaunchProgram {
    let (kernel, shifts_kernel) = match run.shape.weights {
        LayerWeightFormat::SameDtypeAsActivations => {
            (&PERSISTENT_BF16_KERNEL, &NORM_SHIFT_TERMS_BF16_KERNEL)
        }
        LayerWeightFormat::Fp8 => (&PERSISTENT_FP8_KERNEL, &NORM_SHIFT_TERMS_FP8_KERNEL),
        LayerWeightFormat::Int4 => (&PERSISTENT_INT4_KERNEL, &NORM_SHIFT_TERMS_INT4_KERNEL),
    };
    let mut writer = create_persistent_program_with_regions(run);
    writer.uses_programmatic_launch = true;
    let sizes = int_operands([run.shape.model.layer_count, run.denoising_steps]);
    writer.program.begin_named_range("Prepare");
    fused::write_time_condition_and_angles(&mut writer);
    let styles = [
        "cond",
        "style1",
        "style2",
        "final_style",
        "style1_bias",
        "style2_bias",
        "final_style_bias",
        "styles1",
        "styles2",
        "final_styles",
    ];
    writer.add_single_layer_launch(&STREAMED_STYLES_KERNEL, 1, (styles, sizes));
    fused::write_initial_residual_launch(&mut writer);
    let shifts =
        ["styles1", "styles2", "qkv_proj", "gate_up_proj", "shift_qkv", "shift_gate_up", "arrived"];
    writer.add_single_layer_launch(shifts_kernel, 1, (shifts, sizes));
    writer.program.end_innermost_range();
    let layers = [
        "h",
        "qkv_proj",
        "o_proj",
        "gate_up_proj",
        "down_proj",
        "styles1",
        "styles2",
        "final_styles",
        "shift_qkv",
        "shift_gate_up",
    ];
    let activations =
        ["angles", "keys", "values", "scaled", "q", "attended", "hidden", "squares", "arrived"];
    let actions = ["action_out", "action_out_bias", "action_in", "action_in_bias"];
    let result = fused::velocity_state_and_dt_operands(&writer);
    let extents = int_operands([run.shape.action_tokens, run.shape.prefix_tokens]);
    let arguments = (layers, activations, actions, result, extents, sizes);
    writer.program.begin_named_range("Denoise_Full_Loop");
    writer.add_single_layer_launch(kernel, run.shape.action_tokens, arguments);
    writer.program.end_innermost_range();
    writer.program
}
