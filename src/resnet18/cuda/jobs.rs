//! Jobs of the kernels over all parameters: for each kernel a list of jobs, with the structures of
//! `kernels/resnet18/fused_step.cu` and 64 bits a field, and the job of each of its blocks.

use super::fused::gradient_name;
use super::per_op::{input_name, layer_name};
use super::tiles::{GROUP, TILE};
use super::weights::{columns, stem_columns, tiles_name, weight_name};
use crate::resnet18::definition::NetworkShape;
use crate::resnet18::network::{CLASSES, Conv, Map, Network};
use kernelgate::backend::program::{MemoryUse, Pointer, Program, Word};
use kernelgate::workload::Dtype;

/// Packets of four elements of a thread, if a block is not a tile.
pub const PACKETS: usize = 4;
/// Elements of a block that is not a tile.
const ELEMENTS: usize = GROUP * PACKETS * 4;
/// Minimum number of tiles of rows that a part of a weight's gradient sums, if there are as many.
const TILES: usize = 16;
/// Limit of the number of blocks of a weight, which limits its parts.
const BLOCKS: usize = 256;

/// A list: the jobs, and the job of each block.
#[derive(Default)]
struct List {
    jobs: Vec<Word>,
    owners: Vec<i32>,
    count: i32,
}

impl List {
    fn push(&mut self, blocks: usize, fields: impl IntoIterator<Item = Word>) {
        self.jobs.push(Word::Value(self.owners.len() as i64));
        self.jobs.extend(fields);
        self.owners.extend(std::iter::repeat_n(self.count, blocks));
        self.count += 1;
    }
}

/// The lists.
#[derive(Default)]
pub struct Jobs {
    pack: List,
    gradients: List,
    sgd: List,
}

impl Jobs {
    /// Jobs of a network whose regions are declared. Weights that have regions for tiles are packed
    /// in tiles too.
    pub fn new(shape: &NetworkShape, network: &Network, program: &Program) -> Self {
        let mut all = Self::default();
        for (conv, reads) in convolutions(shape, network) {
            all.convolution(shape, network, conv, reads, program);
        }
        let weights = CLASSES * network.last().channels;
        let behind = network.parameters - network.classifier - weights;
        let share = shape.fed() as f32 / shape.steps() as f32;
        let weight = program.at("fc.weight_gradient");
        all.update(network.classifier, weight, 1, [1, weights, 0, weights], 1.0);
        let (bias, at) = (program.at("fc.bias_gradient"), network.classifier + weights);
        all.update(at, bias, 1, [1, behind, 0, CLASSES], share);
        all
    }

    fn convolution(
        &mut self,
        shape: &NetworkShape,
        network: &Network,
        conv: &Conv,
        reads: Reads,
        program: &Program,
    ) {
        let filters = conv.window.output.channels;
        let (first_tap, columns) = (conv.window.live_taps().start, columns(network, conv));
        let first = first_tap * conv.window.input.channels;
        let elements = filters * columns;
        let from = program.at("parameters").plus(conv.weight * Dtype::F32.bytes());
        let tiles = program.find(&tiles_name(conv)).map_or(Word::Value(0), Word::Pointer);
        let packed = [from.into(), program.at(&weight_name(conv)).into(), tiles];
        let fields = sizes([elements, conv.depth(), first, columns]);
        self.pack.push(elements.div_ceil(ELEMENTS), packed.into_iter().chain(fields));

        let parts = parts(shape, network, conv);
        let sums = program.at(&parts_name(conv));
        let Reads { frames, layer, map, steps, fed, kernel, stride, first_tap } = reads;
        let out_side = conv.window.output.side;
        let fields = sizes([
            parts,
            steps,
            shape.b,
            fed,
            map.side,
            map.channels,
            out_side,
            filters,
            kernel,
            stride,
            first_tap,
            columns,
        ]);
        let pointers =
            [program.at(&gradient_name(layer)), program.at(&frames), sums].map(Word::Pointer);
        let blocks = (columns / TILE + 1) * (filters / TILE) * parts;
        self.gradients.push(blocks, pointers.into_iter().chain(fields));

        let spread = 1.0 / shape.steps() as f32;
        let stem = conv.weight == network.stem.weight;
        let factor = if stem { spread } else { shape.neuron().threshold as f32 };
        self.update(conv.weight, sums, parts, [filters, conv.depth(), first, columns], factor);
        let biases = sums.plus(parts * elements * Dtype::F32.bytes());
        self.update(conv.bias(), biases, parts, [1, filters, 0, filters], spread);
    }

    /// SGD of a parameter `[rows, depth]` whose gradient holds only a range of columns.
    fn update(
        &mut self,
        element: usize,
        gradient: Pointer,
        parts: usize,
        [rows, depth, first, columns]: [usize; 4],
        factor: f32,
    ) {
        let elements = rows * depth;
        let fields = sizes([element, elements])
            .chain([gradient.into()])
            .chain(sizes([parts, rows * columns, depth, first, columns]))
            .chain([Word::Value(i64::from(factor.to_bits()))]);
        self.sgd.push(elements.div_ceil(ELEMENTS), fields);
    }

    fn lists(&self) -> [(&'static str, &List); 3] {
        [("pack", &self.pack), ("gradients", &self.gradients), ("sgd", &self.sgd)]
    }

    /// Blocks of a kernel.
    pub fn blocks(&self, name: &str) -> usize {
        let list = self.lists().into_iter().find(|(known, _)| *known == name);
        list.map_or(0, |(_, list)| list.owners.len())
    }

    /// Regions of a list: jobs, and the job of each block.
    pub fn regions(name: &str) -> [String; 2] {
        [format!("{name}_jobs"), format!("{name}_owners")]
    }

    /// Declares the regions of all lists.
    pub fn declare(&self, program: &mut Program) {
        for (name, list) in self.lists() {
            let [jobs, owners] = Self::regions(name);
            program.table(jobs, MemoryUse::Workspace, list.jobs.clone());
            let bytes = bytemuck::cast_slice(&list.owners).to_vec();
            program.packed(owners, MemoryUse::Workspace, bytes.len(), move |_| bytes.clone());
        }
    }
}

/// Declares the regions of the parts of all gradients.
pub fn declare_parts(program: &mut Program, shape: &NetworkShape, network: &Network) {
    for conv in network.convolutions() {
        let filter = columns(network, conv) + 1;
        let elements = parts(shape, network, conv) * conv.window.output.channels * filter;
        program.scratch(parts_name(conv), MemoryUse::Gradients, elements * Dtype::F32.bytes());
    }
}

/// Extents as words.
fn sizes<const N: usize>(sizes: [usize; N]) -> impl Iterator<Item = Word> {
    sizes.into_iter().map(|size| Word::Value(size as i64))
}

fn parts_name(conv: &Conv) -> String {
    format!("{}.parts", conv.name)
}

/// Parts that the gradient of a weight is summed in.
fn parts(shape: &NetworkShape, network: &Network, conv: &Conv) -> usize {
    let blocks = columns(network, conv) / TILE * (conv.window.output.channels / TILE);
    // Rows are all steps of an image at a pixel, the stem's one step.
    let steps = if conv.weight == network.stem.weight { 1 } else { shape.t };
    let tiles = conv.window.output.pixels() * (shape.b * steps).div_ceil(TILE);
    (tiles / TILES).clamp(1, BLOCKS.div_ceil(blocks))
}

/// The frames that the gradient of a weight is summed over.
struct Reads {
    /// Region that the convolution reads.
    frames: String,
    /// Layer of the neurons that its output goes to.
    layer: usize,
    /// Extents of a frame.
    map: Map,
    steps: usize,
    fed: usize,
    kernel: usize,
    stride: usize,
    first_tap: usize,
}

/// Every convolution with the frames that its gradient is summed over. The stem's operand, which is
/// the same in every step, has been gathered: to it this is a convolution of one pixel and one
/// step.
fn convolutions<'a>(shape: &NetworkShape, network: &'a Network) -> Vec<(&'a Conv, Reads)> {
    let stem = &network.stem;
    let gathered = Map { side: stem.window.output.side, channels: stem_columns(network) };
    let operand = Reads {
        frames: "operand".to_owned(),
        layer: 0,
        map: gathered,
        steps: 1,
        fed: 1,
        kernel: 1,
        stride: 1,
        first_tap: 0,
    };
    let spikes = |conv: &Conv, frames: String, layer: usize| Reads {
        frames,
        layer,
        map: conv.window.input,
        steps: shape.t,
        fed: shape.fed(),
        kernel: conv.window.kernel,
        stride: conv.window.stride,
        first_tap: conv.window.live_taps().start,
    };
    let mut all = vec![(stem, operand)];
    for (number, block) in network.blocks.iter().enumerate() {
        let input = input_name(network, number);
        let (hidden, output) = (2 * number + 1, 2 * number + 2);
        all.push((&block.first, spikes(&block.first, input.clone(), hidden)));
        all.push((&block.second, spikes(&block.second, layer_name(hidden), output)));
        let shortcut = block.shortcut.as_ref();
        all.extend(shortcut.map(|conv| (conv, spikes(conv, input, output))));
    }
    all
}
