//! Rung that computes the whole loop in one kernel, `kernels/denoise/persistent.cu`. The launches
//! before that kernel do not depend on the actions: the time embeddings as in `fused`, then two
//! GEMMs with one row for each step.

use super::fused::{self, CACHE_INPUTS};
use super::pack::{MAX_PERSISTENT_KEYS, pack_cache, persistent_packings};
use super::row::{LaunchItems, fused_model_macro, kernel_compiled_per_model, model_macros_and};
use super::run::ExpertRun;
use super::writer::{ExpertWriter, NamedRegion};
use crate::denoise::definition::WeightFormat;
use crate::denoise::model::{ExpertModel, PI05_MODEL};
use kernelgate::backend::program::{MemoryPurpose, Program, int_operands};
use kernelgate::workload::Dtype;
use kernelgate_cuda::{KernelSpec, RequiredArchitecture};

/// Number of rows that a tile of the kernel can hold.
const MAX_TILE_ROWS: usize = 56;

/// Kernels of the persistent rung.
pub const KERNELS: &[KernelSpec<LaunchItems>] = &[
    PERSISTENT_KERNEL,
    STYLES_KERNEL,
    SHIFTS_KERNEL,
    PERSISTENT_FP8_KERNEL,
    SHIFTS_FP8_KERNEL,
    PERSISTENT_INT4_KERNEL,
    SHIFTS_INT4_KERNEL,
];

/// Number of clusters in the grid, each of [`BLOCKS_PER_CLUSTER`] blocks.
const CLUSTER_COUNT: usize = 15;
const BLOCKS_PER_CLUSTER: usize = 8;
const THREADS: usize = 384;
const SHARED_BYTES: usize = 231_424;

const PERSISTENT_KERNEL: KernelSpec<LaunchItems> = KernelSpec {
    constants: |items| persistent_kernel_macros(items, THREADS, 16),
    threads: THREADS,
    shared_bytes: |_| SHARED_BYTES,
    cluster: Some(BLOCKS_PER_CLUSTER),
    co_resident: true,
    requires: RequiredArchitecture::Exactly("sm_90a"),
    variants: || vec![LaunchItems { model: PI05_MODEL, items: 1, layers: 1 }],
    stages: TIMER_STAGES,
    ..kernel_compiled_per_model("denoise/persistent", "denoise_persistent", |_| {
        [CLUSTER_COUNT * BLOCKS_PER_CLUSTER, 1, 1]
    })
};

/// Names of the stages of the kernel's timer, in the order of the kernel's enum `Stage`.
const TIMER_STAGES: &[&str] = &[
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

/// Build for quantised weights in fp8, which a fourth warpgroup decodes.
const PERSISTENT_FP8_KERNEL: KernelSpec<LaunchItems> = KernelSpec {
    defines: defines_with_fp8_weights,
    constants: |items| persistent_kernel_macros(items, THREADS_WITH_DECODERS, 8),
    threads: THREADS_WITH_DECODERS,
    ..PERSISTENT_KERNEL
};
const PERSISTENT_INT4_KERNEL: KernelSpec<LaunchItems> = KernelSpec {
    defines: defines_with_int4_weights,
    constants: |items| persistent_kernel_macros(items, THREADS_WITH_DECODERS, 4),
    ..PERSISTENT_FP8_KERNEL
};
const THREADS_WITH_DECODERS: usize = THREADS + 128;

/// Kernel that computes the styles of all steps, in `kernels/denoise/streamed_rows.cu`.
const STYLES_KERNEL: KernelSpec<LaunchItems> = KernelSpec {
    symbol: "denoise_streamed_styles",
    shared_bytes: |_| STYLES_SHARED_BYTES,
    ..SHIFTS_KERNEL
};
/// Kernel that computes the terms which the norms' shifts add to the columns of later GEMMs.
const SHIFTS_KERNEL: KernelSpec<LaunchItems> = KernelSpec {
    constants: |items| streamed_kernel_macros(items, 16),
    threads: STREAMED_THREADS,
    shared_bytes: |_| shifts_shared_bytes(16),
    requires: RequiredArchitecture::AtLeast(90),
    variants: PERSISTENT_KERNEL.variants,
    ..kernel_compiled_per_model("denoise/streamed_rows", "denoise_streamed_shifts", |_| {
        [STREAMED_BLOCKS, 1, 1]
    })
};
const SHIFTS_FP8_KERNEL: KernelSpec<LaunchItems> = KernelSpec {
    defines: defines_with_fp8_weights,
    constants: |items| streamed_kernel_macros(items, 8),
    shared_bytes: |_| shifts_shared_bytes(8),
    ..SHIFTS_KERNEL
};
const SHIFTS_INT4_KERNEL: KernelSpec<LaunchItems> = KernelSpec {
    defines: defines_with_int4_weights,
    constants: |items| streamed_kernel_macros(items, 4),
    shared_bytes: |_| shifts_shared_bytes(4),
    ..SHIFTS_KERNEL
};

/// Threads of a block: eight warps that multiply and one that copies. An H100 or H200 runs two such
/// blocks on each multiprocessor.
const STREAMED_THREADS: usize = 288;
const STREAMED_BLOCKS: usize = 264;
/// Bytes of the input x of streamed GEMMs for sixteen steps in bf16.
const STREAMED_X_BYTES: usize = 16 * 2 * PI05_MODEL.width;
const STYLES_SHARED_BYTES: usize = STREAMED_X_BYTES + 5 * weight_piece_bytes(16);

/// Bytes of a piece of 16 units of weights with this number of bits.
const fn weight_piece_bytes(weight_bits: usize) -> usize {
    16 * match weight_bits {
        16 => 1024,
        bits => 64 * bits + 16,
    }
}

/// Number of slots in the ring of the shifts' weights: as many as fit into shared memory besides
/// the two parts of x.
const fn shift_weight_slots(weight_bits: usize) -> usize {
    match weight_bits {
        16 => 3,
        8 => 5,
        _ => 10,
    }
}

const fn shifts_shared_bytes(weight_bits: usize) -> usize {
    2 * STREAMED_X_BYTES + shift_weight_slots(weight_bits) * weight_piece_bytes(weight_bits)
}

fn streamed_kernel_macros(items: &LaunchItems, weight_bits: usize) -> Vec<(&'static str, usize)> {
    let own = [
        ("THREADS", STREAMED_THREADS),
        ("WEIGHT_BITS", weight_bits),
        ("STYLES_SHARED_BYTES", STYLES_SHARED_BYTES),
        ("SHIFTS_SLOTS", shift_weight_slots(weight_bits)),
        ("SHIFTS_SHARED_BYTES", shifts_shared_bytes(weight_bits)),
    ];
    model_macros_and(items, &own)
}

fn defines_with_fp8_weights(items: &LaunchItems) -> Vec<String> {
    [(PERSISTENT_KERNEL.defines)(items), vec!["WEIGHTS=Fp8".to_owned()]].concat()
}

fn defines_with_int4_weights(items: &LaunchItems) -> Vec<String> {
    [(PERSISTENT_KERNEL.defines)(items), vec!["WEIGHTS=Int4".to_owned()]].concat()
}

fn persistent_kernel_macros(
    items: &LaunchItems,
    threads: usize,
    weight_bits: usize,
) -> Vec<(&'static str, usize)> {
    let own = [
        ("THREADS", threads),
        ("WEIGHT_BITS", weight_bits),
        ("CLUSTERS", CLUSTER_COUNT),
        ("RANKS", BLOCKS_PER_CLUSTER),
        ("MAX_ROWS", MAX_TILE_ROWS),
        ("MAX_KEYS", MAX_PERSISTENT_KEYS),
        ("SHARED_BYTES", SHARED_BYTES),
    ];
    model_macros_and(items, &own)
}

/// Checks that the kernel is compiled for the model and has space for the rows and keys. Whether
/// all blocks are resident on a device at once is checked when the kernel is loaded.
pub fn check_model_and_space(run: &ExpertRun) -> Result<(), String> {
    let shape = &run.shape;
    if fused_model_macro(&shape.model) != fused_model_macro(&PI05_MODEL) {
        return Err("not compiled for this model".to_owned());
    }
    if shape.s > MAX_TILE_ROWS {
        return Err(format!("has room for {MAX_TILE_ROWS} actions"));
    }
    if shape.visible_tokens() > MAX_PERSISTENT_KEYS {
        return Err(format!(
            "has room for {MAX_PERSISTENT_KEYS} keys, prefix and actions together"
        ));
    }
    Ok(())
}

/// Regions of scratch memory: everything but inputs and output.
fn scratch_regions(run: &ExpertRun) -> Vec<NamedRegion> {
    let ExpertModel { width, depth, mlp, heads, head_dim, .. } = run.shape.model;
    let (bf16, f32) = (Dtype::Bf16.bytes(), Dtype::F32.bytes());
    let rows = |columns: usize| MAX_TILE_ROWS * columns * bf16;
    let queries = heads * head_dim;
    let mut regions = fused::scratch_regions(run);
    regions.retain(|(name, _)| !["squares", "q", "attended", "hidden"].contains(name));
    regions.extend([
        ("shift_qkv", depth * run.steps * (queries + 2 * head_dim) * f32),
        ("shift_gate_up", depth * run.steps * 2 * mlp * f32),
        ("scaled", rows(width)),
        ("q", rows(queries)),
        ("attended", rows(queries)),
        ("hidden", rows(mlp)),
        // The squares of two norms have sixteen parts for each row.
        ("squares", 2 * MAX_TILE_ROWS * 16 * f32),
        ("arrived", size_of::<u32>()),
    ]);
    regions
}

/// Creates a program with every memory region of this run.
fn program_with_regions(run: &ExpertRun) -> ExpertWriter<'_> {
    let ExpertModel { depth, head_dim, .. } = run.shape.model;
    let mut writer =
        fused::program_with_regions(run, persistent_packings(&run.shape.model, run.shape.weights));
    let bytes = depth * MAX_PERSISTENT_KEYS * head_dim * Dtype::Bf16.bytes();
    for (name, input) in ["keys", "values"].into_iter().zip(CACHE_INPUTS) {
        writer.program.add_packed(name, MemoryPurpose::Inputs, bytes, move |inputs| {
            let cache = inputs.tensor(input).as_bytes();
            pack_cache(cache, depth, head_dim, name == "values")
        });
    }
    writer.declare_scratch_regions(MemoryPurpose::Activations, scratch_regions(run));
    writer
}

/// Program whose launches all use programmatic dependent launch (PDL).
pub fn programmatic_launch_program(run: &ExpertRun) -> Program {
    let (kernel, shifts_kernel) = match run.shape.weights {
        WeightFormat::Same => (&PERSISTENT_KERNEL, &SHIFTS_KERNEL),
        WeightFormat::Fp8 => (&PERSISTENT_FP8_KERNEL, &SHIFTS_FP8_KERNEL),
        WeightFormat::Int4 => (&PERSISTENT_INT4_KERNEL, &SHIFTS_INT4_KERNEL),
    };
    let mut writer = program_with_regions(run);
    writer.programmatic = true;
    let sizes = int_operands([run.shape.model.depth, run.steps]);
    writer.program.begin_range("Prepare");
    fused::write_time_conditioning(&mut writer);
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
    writer.add_launch(&STYLES_KERNEL, 1, (styles, sizes));
    fused::write_initial_residual_launch(&mut writer);
    let shifts =
        ["styles1", "styles2", "qkv_proj", "gate_up_proj", "shift_qkv", "shift_gate_up", "arrived"];
    writer.add_launch(shifts_kernel, 1, (shifts, sizes));
    writer.program.end_range();
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
    let result = fused::velocity_state_and_dt(&writer);
    let extents = int_operands([run.shape.s, run.shape.p]);
    let arguments = (layers, activations, actions, result, extents, sizes);
    writer.program.begin_range("Denoise_Full_Loop");
    writer.add_launch(kernel, run.shape.s, arguments);
    writer.program.end_range();
    writer.program
}
