//! The forward pass, a kernel a layer: `kernels/resnet18/fused.cu`. The stem is computed once an
//! image, by the library's GEMM, and the classifier reads the sum over time.

use std::sync::Arc;

use super::per_op::{
    SOURCES, STAGES, Saved, gather_images, i32s, input_name, layer_name, stem_gemm, total,
};
use super::sequence::{Memory, Region, Sequence};
use super::tiles::{Grid, THREADS, TILE, faster, tiled, wide};
use super::weights::{bias_name, live_columns, packed, regions, stem_columns, weight_name};
use crate::kernel_files::kernel_file;
use crate::resnet18::definition::NetworkShape;
use crate::resnet18::network::{Block, CLASSES, Conv, Network};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::Output;
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::{Argument, Device, KernelSpec};

/// The kernels.
pub const KERNELS: &[KernelSpec<Grid>] = &[BLOCK, BLOCK_WIDE, STEM, POOL, TAIL];

const BLOCK: KernelSpec<Grid> = tiled(
    kernel_file("resnet18/fused", include_str!("../../../kernels/resnet18/fused.cu")),
    "resnet18_fused_block",
);
const BLOCK_WIDE: KernelSpec<Grid> = wide(BLOCK);
const STEM: KernelSpec<Grid> =
    KernelSpec { symbol: "resnet18_fused_stem", shared_bytes: |_| 0, ..BLOCK };
const POOL: KernelSpec<Grid> = KernelSpec { symbol: "resnet18_fused_pool", ..STEM };
const TAIL: KernelSpec<Grid> = KernelSpec { symbol: "resnet18_fused_tail", ..BLOCK };

/// What a forward pass writes; with what the backward one needs.
pub fn activations(shape: &NetworkShape, network: &Network, training: bool) -> Vec<Region> {
    let rows = shape.b * network.stem.window.output.pixels();
    let maps = network.neurons();
    let bf16s = |name: String, count: usize| (name, count * Dtype::Bf16.bytes());
    let f32s = |name: String, count: usize| (name, count * Dtype::F32.bytes());
    let mut regions = vec![
        bf16s("operand".to_owned(), rows * stem_columns(network)),
        f32s(currents_name(0), shape.b * maps[0].elements()),
    ];
    for (layer, map) in maps.iter().enumerate() {
        let elements = shape.frames() * map.elements();
        regions.push(bf16s(layer_name(layer), elements));
        if training && layer > 0 {
            regions.push(f32s(currents_name(layer), elements));
        }
    }
    if let Some(pool) = &network.pool {
        let elements = shape.frames() * pool.output.elements();
        regions.push(bf16s("pooled".to_owned(), elements));
        if training {
            regions.push((SOURCES.to_owned(), elements));
        }
    }
    regions
}

/// Region of the currents of a layer; of the stem's without bias, once an image.
pub fn currents_name(layer: usize) -> String {
    Saved::Currents.currents(layer)
}

/// Region of the gradient of a layer's currents, bf16; of the stem's summed over the steps.
pub fn gradient_name(layer: usize) -> String {
    format!("gradient{layer}")
}

/// Parameters, images, activations, the library's workspace and the output.
pub fn device_bytes(shape: &NetworkShape) -> u64 {
    let network = shape.sizes.network();
    total(shape, [regions(&network), activations(shape, &network, false)].concat())
}

/// Writes the launches of inference.
///
/// # Errors
/// When a kernel does not compile, the library declines, or device memory is short.
pub fn sequence(
    shape: &NetworkShape,
    inputs: &Tensors,
    device: &Arc<Device>,
    output: &Output,
) -> Result<Sequence, BackendError> {
    let network = shape.sizes.network();
    let mut contents = packed(shape, &network, inputs);
    contents.push(("images".to_owned(), inputs.tensor("images").as_bytes().to_vec()));
    let memory = Memory::new(device, activations(shape, &network, false), contents)?;
    let sequence = Sequence::new(device, memory)?;
    let mut writer =
        Forward { shape, network: &network, training: false, together: None, sequence };
    writer.whole(output.argument())?;
    Ok(writer.sequence)
}

/// No address.
pub const NULL: Argument = Argument::Address(0);

/// Launches in place of those here.
pub struct Together {
    /// The stem's neurons with the pooling, in training.
    pub stem: fn(&mut Forward) -> Result<(), BackendError>,
    /// All layers behind the pooling; with the stem where nothing is kept for training, and with the
    /// classifier where there is an address for logits.
    pub layers: fn(&mut Forward, Argument) -> Result<(), BackendError>,
}

/// Writes the forward pass.
pub struct Forward<'a> {
    /// Sizes of the problem.
    pub shape: &'a NetworkShape,
    /// Its layers.
    pub network: &'a Network,
    /// Whether a backward pass follows, and biases are those of the parameters.
    pub training: bool,
    /// What computes most of it in fewer launches.
    pub together: Option<&'static Together>,
    /// What is written.
    pub sequence: Sequence,
}

impl Forward<'_> {
    /// A region as an argument.
    pub fn at(&self, name: &str) -> Argument {
        self.sequence.memory().at(name)
    }

    /// A region that only a training step has, else null.
    pub fn trained(&self, name: &str) -> Argument {
        if self.training { self.at(name) } else { NULL }
    }

    /// A parameter, where it lies among all.
    pub fn parameter(&self, index: usize) -> Argument {
        self.sequence.memory().behind("parameters", index * Dtype::F32.bytes())
    }

    /// A convolution's bias. Those that are packed are divided by the steps, but the stem's.
    pub fn bias(&self, conv: &Conv) -> Argument {
        if self.training { self.parameter(conv.bias()) } else { self.at(&bias_name(conv)) }
    }

    /// A convolution's weight, from tap 0 on, of which those before the first live one are not
    /// held: nothing is read there.
    pub fn weight(&self, conv: &Conv) -> Argument {
        let before = conv.window.live_taps().start * conv.window.input.channels;
        let address = self.sequence.memory().address(&weight_name(conv));
        Argument::Address(address - (before * Dtype::Bf16.bytes()) as u64)
    }

    /// The grid over a map's tiles.
    pub fn tiles(&self, pixels: usize, channels: usize) -> Grid {
        let groups = self.shape.b.div_ceil(TILE / self.shape.t);
        Grid { steps: self.shape.t, blocks: [pixels * groups, channels / TILE] }
    }

    /// The grid over so many elements, two a thread.
    fn pairs(&self, elements: usize) -> Grid {
        Grid { steps: self.shape.t, blocks: [elements.div_ceil(2 * THREADS), 1] }
    }

    /// Images to logits.
    ///
    /// # Errors
    /// When a kernel does not compile, or the library declines.
    pub fn whole(&mut self, logits: Argument) -> Result<(), BackendError> {
        let (network, images) = (self.network, self.shape.b);
        let stem = self.training || self.together.is_none();
        self.sequence.begin("Main_Inference_Timing_Run");
        self.sequence.begin("Input_Reshaping");
        if stem {
            let columns = stem_columns(network);
            gather_images(&mut self.sequence, &network.stem, images, columns, "images")?;
        }
        self.sequence.end();
        self.sequence.begin("Model_Forward_Pass");
        self.sequence.begin("Model_Compute_All_Layers");
        self.sequence.begin("Conv1_Block");
        if stem {
            self.stem()?;
        }
        self.sequence.end();
        if let Some(together) = self.together {
            (together.layers)(self, if self.training { NULL } else { logits })?;
        } else {
            self.pool()?;
            self.stages()?;
        }
        self.sequence.begin("Final_Layers");
        if self.training || self.together.is_none() {
            self.tail(logits)?;
        }
        (0..4).for_each(|_| self.sequence.end());
        Ok(())
    }

    /// Every block, a launch a layer.
    fn stages(&mut self) -> Result<(), BackendError> {
        for (stage, blocks) in self.network.blocks.chunks(self.shape.sizes.blocks).enumerate() {
            self.sequence.begin(STAGES[stage]);
            for (number, block) in blocks.iter().enumerate() {
                self.block(stage * self.shape.sizes.blocks + number, block)?;
            }
            self.sequence.end();
        }
        Ok(())
    }

    fn stem(&mut self) -> Result<(), BackendError> {
        let (shape, network) = (self.shape, self.network);
        let (conv, columns) = (&network.stem, stem_columns(network));
        stem_gemm(&mut self.sequence, conv, shape.b, columns, &currents_name(0))?;
        if let Some(together) = self.together {
            return (together.stem)(self);
        }
        let map = conv.window.output;
        let neurons = shape.b * map.elements();
        let mut arguments = vec![self.at(&currents_name(0)), self.bias(conv)];
        arguments.extend([self.at(&layer_name(0)), Argument::I64(neurons as i64)]);
        arguments.extend(i32s(&[map.channels, shape.fed()]));
        arguments.push(Argument::F32(shape.steps() as f32));
        arguments.extend(neuron_arguments(shape));
        self.sequence.launch_early(&STEM, &self.pairs(neurons), &arguments)
    }

    fn pool(&mut self) -> Result<(), BackendError> {
        let Some(pool) = &self.network.pool else { return Ok(()) };
        let outputs = self.shape.b * pool.output.elements();
        let inputs = self.shape.b * pool.input.elements();
        let mut arguments = vec![self.at(&layer_name(0)), self.at("pooled"), self.trained(SOURCES)];
        arguments.extend([Argument::I64(outputs as i64), Argument::I64(inputs as i64)]);
        arguments.extend(i32s(&[pool.input.side, pool.input.channels, pool.output.side]));
        self.sequence.begin("MaxPool");
        self.sequence.launch_early(&POOL, &self.pairs(outputs), &arguments)?;
        self.sequence.end();
        Ok(())
    }

    fn block(&mut self, number: usize, block: &Block) -> Result<(), BackendError> {
        let input = input_name(self.network, number);
        let (hidden, output) = (2 * number + 1, 2 * number + 2);
        self.layer(&block.first, &input, None, hidden)?;
        self.layer(&block.second, &layer_name(hidden), Some((block, &input)), output)
    }

    /// A convolution with its neurons; at the end of a block, which reads `input`, with the
    /// residual.
    fn layer(
        &mut self,
        conv: &Conv,
        from: &str,
        end: Option<(&Block, &str)>,
        to: usize,
    ) -> Result<(), BackendError> {
        let (shape, window) = (self.shape, conv.window);
        let mut arguments = vec![self.at(from), self.weight(conv)];
        arguments.extend(i32s(&[
            live_columns(conv),
            window.input.side,
            window.input.channels,
            window.kernel,
            window.stride,
        ]));
        let shortcut = end.and_then(|(block, input)| Some((block.shortcut.as_ref()?, input)));
        match shortcut {
            Some((conv, input)) => {
                let Conv { window, .. } = conv;
                arguments.extend([self.at(input), self.weight(conv)]);
                arguments.extend(i32s(&[window.input.side, window.input.channels, window.stride]));
            }
            None => {
                arguments.extend([NULL, NULL]);
                arguments.extend(i32s(&[0, 0, 0]));
            }
        }
        let identity = end.filter(|(block, _)| block.shortcut.is_none());
        arguments.push(identity.map_or(NULL, |(_, input)| self.at(input)));
        arguments.push(self.bias(conv));
        arguments.push(shortcut.map_or(NULL, |(conv, _)| self.bias(conv)));
        arguments.extend([self.at(&layer_name(to)), self.trained(&currents_name(to))]);
        arguments.extend(i32s(&[shape.b, window.output.side, window.output.channels, shape.fed()]));
        arguments.push(Argument::F32(if self.training { shape.steps() as f32 } else { 1.0 }));
        arguments.extend(neuron_arguments(shape));
        let grid = self.tiles(window.output.pixels(), window.output.channels);
        self.sequence.begin(conv.name.as_str());
        let kernel = faster(self.sequence.device(), &grid, [&BLOCK, &BLOCK_WIDE])?;
        self.sequence.launch_early(kernel, &grid, &arguments)?;
        self.sequence.end();
        Ok(())
    }

    /// The classifier; in training with the gradient of the last currents.
    fn tail(&mut self, logits: Argument) -> Result<(), BackendError> {
        let (shape, network) = (self.shape, self.network);
        let map = network.last();
        let last = 2 * network.blocks.len();
        let bias = network.classifier + CLASSES * map.channels;
        let (weight, bias, share) = if self.training {
            let share = shape.fed() as f32 / shape.steps() as f32;
            (self.parameter(network.classifier), self.parameter(bias), share)
        } else {
            (self.at("fc.weight"), self.at("fc.bias"), shape.fed() as f32)
        };
        let mut arguments = vec![self.at(&layer_name(last)), weight, bias, logits];
        arguments.extend([
            self.trained("labels"),
            self.trained("features"),
            self.trained(&currents_name(last)),
            self.trained(&gradient_name(last)),
        ]);
        arguments.extend(i32s(&[shape.b, CLASSES, map.pixels(), map.channels]));
        let scale = (shape.neuron().threshold / map.pixels() as f64) as f32;
        arguments.extend([Argument::F32(scale), Argument::F32(share)]);
        arguments.extend(neuron_arguments(shape));
        let grid = Grid { steps: shape.t, blocks: [shape.b, 1] };
        self.sequence.launch_early(&TAIL, &grid, &arguments)
    }
}

/// θ and Tmax.
pub fn neuron_arguments(shape: &NetworkShape) -> [Argument; 2] {
    let neuron = shape.neuron();
    [Argument::F32(neuron.threshold as f32), Argument::I32(neuron.tracer_max)]
}
