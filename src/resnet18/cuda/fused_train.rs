//! A training step with one kernel for each layer: `fused`'s forward pass with its currents kept,
//! `kernels/resnet18/fused_backward.cu`, and the operations on all parameters at once in
//! `kernels/resnet18/fused_step.cu`.

use std::rc::Rc;

use super::best;
use super::fused::{
    Forward, activations, currents_name, declare_activations, declare_operand, gradient_name,
    neuron_arguments, weight,
};
use super::jobs::{BUCKETS, Buckets, Jobs, PACKETS, classifier_gradients, declare_parts};
use super::per_op::{SOURCES, STAGES};
use super::tiles::{
    GROUP, Grid, SHARED_BYTES, THREADS, tile_constants, tiled, wide, wide_is_faster,
};
use super::train::{CLASSIFIER, LOSS, TrainingTensors};
use super::weights::{columns, live_columns, weight_name};
use crate::collective::InPlaceSum;
use crate::kernel_files::kernel_file;
use crate::resnet18::definition::{LEARNING_RATE, MOMENTUM, NetworkShape};
use crate::resnet18::network::{Block, CLASSES, Conv, Network, Window};
use kernelgate::backend::program::{
    Lane, MemoryUse, NULL, Operand, Operands, Program, int, ints, long,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;

/// The kernels of the backward pass.
pub const KERNELS: &[KernelSpec<Grid>] = &[BLOCK, BLOCK_WIDE, STEM];
/// Kernels over all parameters; their parameter is the number of blocks.
pub const STEP_KERNELS: &[KernelSpec<usize>] = &[PACK, WEIGHT_GRADIENTS, SUM_PARTS, SGD];

const BLOCK: KernelSpec<Grid> = tiled(
    kernel_file(
        "resnet18/fused_backward",
        include_str!("../../../kernels/resnet18/fused_backward.cu"),
    ),
    "resnet18_fused_block_backward",
);
const BLOCK_WIDE: KernelSpec<Grid> = wide(BLOCK);
const STEM: KernelSpec<Grid> =
    KernelSpec { symbol: "resnet18_fused_stem_backward", shared_bytes: |_| 0, ..BLOCK };

const WEIGHT_GRADIENTS: KernelSpec<usize> = KernelSpec {
    constants: |_| [tile_constants(GROUP), vec![("PACKETS", PACKETS)]].concat(),
    shared_bytes: |_| SHARED_BYTES,
    variants: || vec![1],
    ..KernelSpec::new(
        kernel_file("resnet18/fused_step", include_str!("../../../kernels/resnet18/fused_step.cu")),
        "resnet18_fused_weight_gradients",
        GROUP,
        |blocks| [*blocks, 1, 1],
    )
};
const PACK: KernelSpec<usize> =
    KernelSpec { symbol: "resnet18_fused_pack", shared_bytes: |_| 0, ..WEIGHT_GRADIENTS };
const SUM_PARTS: KernelSpec<usize> = KernelSpec { symbol: "resnet18_fused_sum_parts", ..PACK };
const SGD: KernelSpec<usize> = KernelSpec { symbol: "resnet18_fused_sgd", ..PACK };

/// Buckets of gradients, and their sums over GPUs beside the backward pass.
struct Exchanged {
    buckets: Buckets,
    /// Lane of the sums.
    lane: Lane,
    /// The sum of each bucket.
    sums: Vec<Rc<InPlaceSum>>,
    /// Share of this GPU's images among all.
    share: f32,
}

/// The sums over GPUs of a training step, one a bucket.
pub fn sums(shape: &NetworkShape, gpus: usize) -> Vec<Rc<InPlaceSum>> {
    let buckets = Buckets::new(&shape.sizes.network(), shape.sizes.blocks, gpus);
    buckets.bytes().iter().map(|bytes| InPlaceSum::new(gpus, *bytes)).collect()
}

/// Declares everything but inputs, outputs and lists.
fn declare(
    program: &mut Program,
    shape: &NetworkShape,
    network: &Network,
    merged: bool,
    buckets: Option<&Buckets>,
) {
    use MemoryUse::{Activations, Gradients, Weights};
    declare_operand(program, shape, network);
    let written = match merged {
        true => best::written(shape, network, true, true),
        false => activations(shape, network, true),
    };
    declare_activations(program, written);
    for conv in network.convolutions() {
        let elements = conv.window.output.channels * columns(network, conv);
        program.scratch(weight_name(conv), Weights, elements * Dtype::Bf16.bytes());
    }
    for (layer, map) in network.neurons().iter().enumerate() {
        let frames = if layer == 0 { shape.b } else { shape.frames() };
        let bytes = frames * map.elements() * Dtype::Bf16.bytes();
        program.scratch(gradient_name(layer), Gradients, bytes);
    }
    let features = network.last().channels;
    let first = network.pool.as_ref().unwrap_or(&network.stem.window).output;
    let mut f32s = |name: &'static str, purpose: MemoryUse, count: usize| {
        program.scratch(name, purpose, count * Dtype::F32.bytes());
    };
    f32s("spikes_gradient", Gradients, shape.frames() * first.elements());
    f32s("logits_gradient", Gradients, shape.b * CLASSES);
    f32s("features", Activations, shape.b * features);
    match buckets {
        Some(buckets) => buckets.declare(program),
        None => {
            f32s("fc.weight_gradient", Gradients, CLASSES * features);
            f32s("fc.bias_gradient", Gradients, CLASSES);
        }
    }
    declare_parts(program, shape, network, buckets);
    if merged {
        best::declare_tiles(program, network);
    }
}

/// The launches, with the forward pass's layers one by one.
pub fn program(shape: &NetworkShape) -> Program {
    write(Program::new(), shape, false, None)
}

/// The launches, with the forward pass's layers in one.
pub fn merged(shape: &NetworkShape) -> Program {
    write(Program::new(), shape, true, None)
}

/// The launches of one GPU, with those sums of gradients in a lane of their own.
pub fn parallel(shape: &NetworkShape, gpus: usize, sums: Vec<Rc<InPlaceSum>>) -> Program {
    let mut program = Program::new();
    let exchanged = Exchanged {
        buckets: Buckets::new(&shape.sizes.network(), shape.sizes.blocks, gpus),
        lane: program.lane(),
        sums,
        share: 1.0 / gpus as f32,
    };
    write(program, shape, true, Some(exchanged))
}

fn write(
    mut program: Program,
    shape: &NetworkShape,
    merged: bool,
    exchanged: Option<Exchanged>,
) -> Program {
    let network = shape.sizes.network();
    let tensors = TrainingTensors::declare(&mut program, shape, &network);
    let buckets = exchanged.as_ref().map(|all| &all.buckets);
    declare(&mut program, shape, &network, merged, buckets);
    let share = exchanged.as_ref().map_or(1.0, |all| all.share);
    let jobs = Jobs::new(shape, &network, &program, buckets, share);
    jobs.declare(&mut program);
    if merged {
        best::declare_lists(&mut program, shape, &network, true);
    }
    let merged = merged.then_some(&best::MERGED);
    let forward = Forward { shape, network: &network, training: true, merged };
    Step { forward, tensors, jobs, exchanged }.whole(&mut program);
    program
}

/// Writes a training step.
struct Step<'a> {
    forward: Forward<'a>,
    tensors: TrainingTensors,
    jobs: Jobs,
    exchanged: Option<Exchanged>,
}

impl Step<'_> {
    fn whole(&self, program: &mut Program) {
        let TrainingTensors { logits, parameters, momentum, new_parameters, new_momentum, .. } =
            self.tensors;
        program.in_range("Weight_Rounding", |program| self.all(program, &PACK, "pack", ()));
        self.forward.whole(program, logits.into());
        program.in_range("Backward", |program| self.backward(program));
        program.in_range("Optimizer", |program| {
            let tensors = [parameters, momentum, new_parameters, new_momentum];
            self.all(program, &SGD, "sgd0", (tensors, MOMENTUM, LEARNING_RATE));
            // The last sum runs beside the update of the parameters before.
            if let Some(exchanged) = &self.exchanged {
                program.wait(Lane::MAIN, exchanged.lane);
                self.all(program, &SGD, "sgd1", (tensors, MOMENTUM, LEARNING_RATE));
            }
        });
    }

    /// A kernel over all parameters, by its list.
    fn all(
        &self,
        program: &mut Program,
        kernel: &KernelSpec<usize>,
        list: &str,
        rest: impl Operands,
    ) {
        let [jobs, owners] = Jobs::regions(list);
        let launch = program.kernel(kernel, &self.jobs.blocks(list), (&jobs, &owners, rest));
        // SGD waits for the other lane too.
        let waits = self.exchanged.is_some() && list.starts_with("sgd");
        program.add(if waits { launch } else { launch.programmatic() });
    }

    /// The gradients of a bucket's weights, and their sum over GPUs under what follows.
    fn weight_gradients(&self, program: &mut Program, bucket: usize) {
        program.in_range("Weight_Gradients", |program| {
            self.all(program, &WEIGHT_GRADIENTS, &format!("gradients{bucket}"), ());
            let sums = format!("sums{bucket}");
            if self.jobs.blocks(&sums) > 0 {
                self.all(program, &SUM_PARTS, &sums, ());
            }
        });
        let Some(exchanged) = &self.exchanged else { return };
        if bucket + 1 == BUCKETS {
            program.wait(Lane::MAIN, exchanged.lane);
        }
        program.wait(exchanged.lane, Lane::MAIN);
        let whole = program.at(&Buckets::name(bucket));
        program.call(exchanged.lane, &[whole], exchanged.sums[bucket].step());
    }

    fn backward(&self, program: &mut Program) {
        program.in_range("Final_Layers", |program| self.classifier(program));
        let network = self.forward.network;
        let in_stage = self.forward.shape.sizes.blocks;
        let stages = network.blocks.chunks(in_stage).enumerate().rev();
        for (after, (stage, blocks)) in stages.enumerate() {
            program.in_range(STAGES[stage], |program| {
                for (i, block) in blocks.iter().enumerate().rev() {
                    let number = stage * in_stage + i;
                    let (hidden, output) = (2 * number + 1, 2 * number + 2);
                    self.layer(program, &block.second, output, None, hidden);
                    let begin = Some((block, output));
                    self.layer(program, &block.first, hidden, begin, 2 * number);
                }
            });
            if self.exchanged.is_some() && after + 1 < BUCKETS {
                self.weight_gradients(program, after);
            }
        }
        program.in_range("Conv1_Block", |program| self.stem(program));
        self.weight_gradients(program, self.exchanged.as_ref().map_or(0, |_| BUCKETS - 1));
    }

    /// The loss and the classifier's gradients; that of the last currents is the tail's.
    fn classifier(&self, program: &mut Program) {
        let (shape, network) = (self.forward.shape, self.forward.network);
        let (b, channels) = (shape.b, network.last().channels);
        let TrainingTensors { logits, labels, loss, .. } = self.tensors;
        let arguments = (logits, labels, loss, "logits_gradient", ints([b, CLASSES]));
        program.launch(&LOSS, &1, arguments);
        let weights = CLASSES * channels;
        let buckets = self.exchanged.as_ref().map(|all| &all.buckets);
        let [weight, bias] = classifier_gradients(network, program, buckets);
        let gradients = (weight, bias, long(weights));
        let arguments = ("logits_gradient", "features", gradients, ints([b, CLASSES, channels]));
        program.launch(&CLASSIFIER, &weights, arguments);
    }

    /// Computes the gradient of the currents of the layer whose spikes a convolution read, from the
    /// gradient of the convolution's currents; at the beginning of a block it adds the input's
    /// gradient from the block's end, layer `.1`.
    fn layer(
        &self,
        program: &mut Program,
        conv: &Conv,
        from: usize,
        begin: Option<(&Block, usize)>,
        to: usize,
    ) {
        let (shape, window) = (self.forward.shape, conv.window);
        let at = |name: &str| Operand::from(program.at(name));
        let outputs = |window: Window| [window.output.side, window.output.channels];
        let end = begin.map(|(_, layer)| at(&gradient_name(layer)));
        let shortcut = begin.and_then(|(block, _)| block.shortcut.as_ref());
        let (second, sizes, identity) = match (shortcut, end) {
            (Some(conv), Some(end)) => {
                let [side, channels] = outputs(conv.window);
                let sizes = [live_columns(conv), side, channels, conv.window.stride];
                ([end, weight(program, conv)], sizes, NULL)
            }
            (_, end) => ([NULL; 2], [0; 4], end.unwrap_or(NULL)),
        };
        let written = match to {
            0 => [NULL, NULL, at("spikes_gradient")],
            to => [at(&currents_name(to)), at(&gradient_name(to)), NULL],
        };
        let arguments = (
            (&gradient_name(from), weight(program, conv), int(live_columns(conv))),
            (ints(outputs(window)), ints([window.kernel, window.stride])),
            (second, ints(sizes), identity),
            written,
            ints([shape.b, window.input.side, window.input.channels]),
            neuron_arguments(shape),
        );
        let grid = self.forward.tiles(window.input.pixels(), window.input.channels);
        let launch = program
            .kernel(&BLOCK, &grid, arguments)
            .or(&BLOCK_WIDE, &grid, wide_is_faster(&BLOCK_WIDE, grid))
            .programmatic();
        program.in_range(&conv.name, |program| program.add(launch));
    }

    /// The pooling's and the stem's neurons.
    fn stem(&self, program: &mut Program) {
        let (shape, network) = (self.forward.shape, self.forward.network);
        let map = network.stem.window.output;
        let neurons = shape.b * map.elements();
        let (sources, pooled) = match &network.pool {
            Some(pool) => (program.at(SOURCES).into(), pool.output),
            None => (NULL, map),
        };
        let outputs = shape.b * pooled.elements();
        let arguments = (
            (&currents_name(0), self.forward.bias(program, &network.stem)),
            ("spikes_gradient", sources, &gradient_name(0)),
            (long(neurons), long(outputs)),
            ints([map.side, map.channels, pooled.side, shape.fed()]),
            shape.steps() as f32,
            neuron_arguments(shape),
        );
        let grid = Grid { steps: shape.t, blocks: [neurons.div_ceil(THREADS), 1] };
        let launch = program.kernel(&STEM, &grid, arguments);
        program.add(launch.programmatic());
    }
}
