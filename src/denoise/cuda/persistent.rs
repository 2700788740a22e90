//! The whole loop in one kernel, `kernels/denoise/persistent.cu`; before it what does not depend on
//! the actions: the embedded times as `fused` computes them, then two GEMMs of a row a step.

use std::sync::Arc;

use super::buffers::{self, Buffers, Region};
use super::fused::{self, CACHES, NULL, i32_of};
use super::pack::{MAX_KEYS, Packing, pack_cache, persistent_packings};
use super::program::{LaunchPlan, LaunchSequence};
use super::row::{Items, compiled_for, model_kernel, with_model};
use super::run::ExpertRun;
use crate::denoise::definition::WeightFormat;
use crate::denoise::model::{Model, PI05};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::Output;
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::{Argument, Device, KernelSpec, Requires};

/// Rows that a tile of the kernel has room for.
const MAX_ROWS: usize = 56;

/// The kernels.
pub const KERNELS: &[KernelSpec<Items>] =
    &[PERSISTENT, STYLES, SHIFTS, PERSISTENT_FP8, SHIFTS_FP8, PERSISTENT_INT4, SHIFTS_INT4];

/// Blocks: so many clusters of so many.
const CLUSTERS: usize = 15;
const RANKS: usize = 8;
const THREADS: usize = 384;
const SHARED_BYTES: usize = 231_424;

const PERSISTENT: KernelSpec<Items> = KernelSpec {
    constants: |items| own_constants(items, THREADS, 16),
    threads: THREADS,
    shared_bytes: |_| SHARED_BYTES,
    cluster: Some(RANKS),
    co_resident: true,
    requires: Requires::Exactly("sm_90a"),
    variants: || vec![Items { model: PI05, items: 1, layers: 1 }],
    stages: STAGES,
    ..model_kernel(
        "denoise/persistent",
        include_str!("../../../kernels/denoise/persistent.cu"),
        "denoise_persistent",
        |_| [CLUSTERS * RANKS, 1, 1],
    )
};

/// What the kernel ends as stages, by their numbers there.
const STAGES: &[&str] = &[
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

/// The same with quantised weights, which a fourth warpgroup decodes.
const PERSISTENT_FP8: KernelSpec<Items> = KernelSpec {
    defines: with_fp8,
    constants: |items| own_constants(items, CODED_THREADS, 8),
    threads: CODED_THREADS,
    ..PERSISTENT
};
const PERSISTENT_INT4: KernelSpec<Items> = KernelSpec {
    defines: with_int4,
    constants: |items| own_constants(items, CODED_THREADS, 4),
    ..PERSISTENT_FP8
};
const CODED_THREADS: usize = THREADS + 128;

/// What the kernel finds in memory when it starts, by `kernels/denoise/streamed_rows.cu`: styles,
/// and what shifts add to the columns of the GEMMs after them.
const STYLES: KernelSpec<Items> = KernelSpec {
    symbol: "denoise_streamed_styles",
    shared_bytes: |_| STYLES_SHARED_BYTES,
    ..SHIFTS
};
const SHIFTS: KernelSpec<Items> = KernelSpec {
    constants: |items| streamed_constants(items, 16),
    threads: STREAMED_THREADS,
    shared_bytes: |_| shifts_shared(16),
    requires: Requires::AtLeast(90),
    variants: PERSISTENT.variants,
    ..model_kernel(
        "denoise/streamed_rows",
        include_str!("../../../kernels/denoise/streamed_rows.cu"),
        "denoise_streamed_shifts",
        |_| [STREAMED_BLOCKS, 1, 1],
    )
};
const SHIFTS_FP8: KernelSpec<Items> = KernelSpec {
    defines: with_fp8,
    constants: |items| streamed_constants(items, 8),
    shared_bytes: |_| shifts_shared(8),
    ..SHIFTS
};
const SHIFTS_INT4: KernelSpec<Items> = KernelSpec {
    defines: with_int4,
    constants: |items| streamed_constants(items, 4),
    shared_bytes: |_| shifts_shared(4),
    ..SHIFTS
};

/// Eight warps that multiply and one that copies; two blocks a multiprocessor of an H100 or H200.
const STREAMED_THREADS: usize = 288;
const STREAMED_BLOCKS: usize = 264;
/// Bytes of x for sixteen steps in bf16; of 16 units of weights.
const STREAMED_X_BYTES: usize = 16 * 2 * PI05.width;
const STYLES_SHARED_BYTES: usize = STREAMED_X_BYTES + 5 * piece_bytes(16);

const fn piece_bytes(weight_bits: usize) -> usize {
    16 * match weight_bits {
        16 => 1024,
        bits => 64 * bits + 16,
    }
}

/// Pieces in the ring of the shifts' weights: as many as fit beside x, of which there are two parts.
const fn shifts_slots(weight_bits: usize) -> usize {
    match weight_bits {
        16 => 3,
        8 => 5,
        _ => 10,
    }
}

const fn shifts_shared(weight_bits: usize) -> usize {
    2 * STREAMED_X_BYTES + shifts_slots(weight_bits) * piece_bytes(weight_bits)
}

fn streamed_constants(items: &Items, weight_bits: usize) -> Vec<(&'static str, usize)> {
    let own = [
        ("THREADS", STREAMED_THREADS),
        ("WEIGHT_BITS", weight_bits),
        ("STYLES_SHARED_BYTES", STYLES_SHARED_BYTES),
        ("SHIFTS_SLOTS", shifts_slots(weight_bits)),
        ("SHIFTS_SHARED_BYTES", shifts_shared(weight_bits)),
    ];
    with_model(items, &own)
}

fn with_fp8(items: &Items) -> Vec<String> {
    [(PERSISTENT.defines)(items), vec!["WEIGHTS=Fp8".to_owned()]].concat()
}

fn with_int4(items: &Items) -> Vec<String> {
    [(PERSISTENT.defines)(items), vec!["WEIGHTS=Int4".to_owned()]].concat()
}

fn own_constants(items: &Items, threads: usize, weight_bits: usize) -> Vec<(&'static str, usize)> {
    let own = [
        ("THREADS", threads),
        ("WEIGHT_BITS", weight_bits),
        ("CLUSTERS", CLUSTERS),
        ("RANKS", RANKS),
        ("MAX_ROWS", MAX_ROWS),
        ("MAX_KEYS", MAX_KEYS),
        ("SHARED_BYTES", SHARED_BYTES),
    ];
    with_model(items, &own)
}

/// Whether the kernel is made for the model and has room for the rows and the keys. Whether all
/// blocks are resident on a device at once is checked when it is loaded.
///
/// # Errors
/// The reason.
pub fn supported(run: &ExpertRun) -> Result<(), String> {
    let shape = &run.shape;
    if compiled_for(&shape.model) != compiled_for(&PI05) {
        return Err("not compiled for this model".to_owned());
    }
    if shape.s > MAX_ROWS {
        return Err(format!("has room for {MAX_ROWS} actions"));
    }
    if shape.context() > MAX_KEYS {
        return Err(format!("has room for {MAX_KEYS} keys, prefix and actions together"));
    }
    Ok(())
}

/// Packed inputs: weights, keys and values.
pub fn packed(run: &ExpertRun) -> Vec<Region> {
    let Model { depth, head_dim, .. } = run.shape.model;
    let cache = depth * MAX_KEYS * head_dim * Dtype::Bf16.bytes();
    let packings = persistent_packings(&run.shape.model, run.shape.weights);
    let weights = packings.iter().map(Packing::region).collect::<Vec<_>>();
    [weights, vec![("keys", cache), ("values", cache)]].concat()
}

/// Everything but inputs and output.
pub fn scratch(run: &ExpertRun) -> Vec<Region> {
    let Model { width, depth, mlp, heads, head_dim, .. } = run.shape.model;
    let (bf16, f32) = (Dtype::Bf16.bytes(), Dtype::F32.bytes());
    let rows = |columns: usize| MAX_ROWS * columns * bf16;
    let queries = heads * head_dim;
    let mut regions = fused::scratch(run);
    regions.retain(|(name, _)| !["squares", "q", "attended", "hidden"].contains(name));
    regions.extend([
        ("shift_qkv", depth * run.steps * (queries + 2 * head_dim) * f32),
        ("shift_gate_up", depth * run.steps * 2 * mlp * f32),
        ("scaled", rows(width)),
        ("q", rows(queries)),
        ("attended", rows(queries)),
        ("hidden", rows(mlp)),
        // Two norms, sixteen parts a row.
        ("squares", 2 * MAX_ROWS * 16 * f32),
        ("arrived", size_of::<u32>()),
    ]);
    regions
}

/// Inputs, styles and what they add, activations and the output.
pub fn device_bytes(run: &ExpertRun) -> u64 {
    buffers::device_bytes(run, &[&fused::inputs(run), &packed(run), &scratch(run)])
}

/// Writes the launches, each to begin while the one before it ends.
///
/// # Errors
/// When a kernel does not compile or device memory is short; [`BackendError::Unsupported`] where
/// the device does not hold all blocks at once.
pub fn program(
    run: &ExpertRun,
    inputs: &Tensors,
    device: &Arc<Device>,
    output: &Output,
) -> Result<LaunchSequence, BackendError> {
    let Model { depth, head_dim, .. } = run.shape.model;
    let packings = persistent_packings(&run.shape.model, run.shape.weights);
    let weights = packings.iter().map(|packing| (packing.name, packing.pack(inputs)));
    let caches = ["keys", "values"].into_iter().zip(CACHES).map(|(name, input)| {
        let cache = inputs.tensor(input).as_bytes();
        (name, pack_cache(cache, depth, head_dim, name == "values"))
    });
    let memory = Buffers::new(
        run,
        inputs,
        device,
        &fused::inputs(run),
        weights.chain(caches),
        &scratch(run),
        &[],
    )?;
    plan(run, &memory, output.argument()).finish(device, &run.shape.model, None, true, memory, None)
}

/// The launches, for memory that has every region.
pub fn plan(run: &ExpertRun, memory: &Buffers, output: Argument) -> LaunchPlan {
    let Model { depth, .. } = run.shape.model;
    let (kernel, shifts_kernel) = match run.shape.weights {
        WeightFormat::Same => (&PERSISTENT, &SHIFTS),
        WeightFormat::Fp8 => (&PERSISTENT_FP8, &SHIFTS_FP8),
        WeightFormat::Int4 => (&PERSISTENT_INT4, &SHIFTS_INT4),
    };
    let mut plan = LaunchPlan::default();
    plan.begin("Prepare");
    let steps = i32_of(run.steps);
    fused::condition(&mut plan, run, memory);
    let regions = |names: &[&str]| names.iter().map(|name| memory.at(name)).collect::<Vec<_>>();
    let styles = regions(&[
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
    ]);
    plan.launch(&STYLES, 1, &[styles, vec![i32_of(depth), steps]].concat());
    fused::begin(&mut plan, run, memory, output);
    let (velocity, state) = if run.looped { (NULL, output) } else { (output, NULL) };
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
    let dt = Argument::F32((-1.0 / run.steps as f64) as f32);
    let sizes =
        [velocity, state, dt, i32_of(run.shape.s), i32_of(run.shape.p), i32_of(depth), steps];
    let shifts = regions(&[
        "styles1",
        "styles2",
        "qkv_proj",
        "gate_up_proj",
        "shift_qkv",
        "shift_gate_up",
        "arrived",
    ]);
    plan.launch(shifts_kernel, 1, &[shifts, vec![i32_of(depth), steps]].concat());
    plan.end();
    let regions = regions(&[&layers[..], &activations, &actions].concat());
    plan.begin("Denoise_Full_Loop");
    plan.launch(kernel, run.shape.s, &[&regions[..], &sizes].concat());
    plan.end();
    plan
}
