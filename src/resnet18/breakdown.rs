//! The parts of a pass through the network: the named ranges that the guides open, and the work
//! that the mathematics needs in each.
//!
//! The work of a layer is that of its convolutions, of a shortcut with the second convolution of
//! its block, and of its neurons. Bytes count only parameters that are multiplied with a pixel
//! somewhere: of a 3×3 filter over one pixel, one tap of nine is read. Spikes are not counted,
//! because they can stay on the chip. In the backward pass, a layer is the gradient of its
//! convolution's input and of the neurons that wrote that input.
//!
//! The guides' ranges around a launch (session, loading, warm-up runs, memory and layer profiling)
//! are excluded on purpose, because one launch is recorded. The CPU row opens the named ranges of
//! its forward pass, of the stages, of the backward pass and of the optimiser, for a profiler that
//! listens to NVTX. Rows do not open the ranges Model_Reset and Output_Processing, and only rows
//! with one launch for each operation open Time_Encoding: the other rows launch nothing in these
//! ranges. `cuda/best` opens no stage's range, because its layers are one launch; the kernel's
//! stages show their times.

use super::network::{CLASS_COUNT, ConvolutionLayer, FeatureMap, ResidualBlock};
use super::shape::NetworkShape;
use kernelgate::workload::{Breakdown, BreakdownPart, Dtype, FlopUnit, Work};

const LAYER_TABLE: &str = "layer";
const BACKWARD_LAYER_TABLE: &str = "layer backward";

/// Breakdown of inference into its parts, from images to logits.
pub(super) fn inference_breakdown(shape: &NetworkShape) -> Breakdown {
    let parts = [forward_components(shape), NetworkParts::new(shape).forward_parts()].concat();
    Breakdown { samples: Some(shape.b as u64), parts, ..Breakdown::default() }
}

/// Breakdown of a training step into its parts.
pub(super) fn train_step_parts(shape: &NetworkShape) -> Breakdown {
    let costs = NetworkParts::new(shape);
    let backward = costs.backward_parts();
    let parameters = costs.network.parameters as u64;
    let f32s = parameters * Dtype::F32.bytes() as u64;
    let rounded: usize = costs.network.block_convolutions().map(weight_elements_read).sum();
    let [read, write] = [Dtype::F32, Dtype::Bf16].map(|dtype| (rounded * dtype.bytes()) as u64);
    let rounding = Work::bytes(read, write);
    let optimizer =
        Work::bytes(2 * f32s, 2 * f32s).with_flops(FlopUnit::Vector, Dtype::F32, 4 * parameters);
    let gradients = costs.weight_gradients();
    let own = backward.iter().filter(|part| !part.range.ends_with("_ResBlocks"));
    let all = sum_works(own.map(|part| &part.work).chain([&gradients]));
    let parts = [
        vec![component_part("Weight_Rounding", rounding)],
        forward_components(shape),
        vec![
            component_part("Backward", all),
            component_part("Weight_Gradients", gradients),
            component_part("Optimizer", optimizer),
        ],
        costs.forward_parts(),
        backward,
    ];
    Breakdown { samples: Some(shape.b as u64), parts: parts.concat(), ..Breakdown::default() }
}

/// Number of a convolution's weights that are multiplied with a pixel somewhere.
pub(super) fn weight_elements_read(conv: &ConvolutionLayer) -> usize {
    conv.window.output.channels * conv.window.count_of_reading_taps() * conv.window.input.channels
}

/// Parts of the forward pass, as the guides name them.
fn forward_components(shape: &NetworkShape) -> Vec<BreakdownPart> {
    let forward = shape.forward_work(&shape.sizes.build_network());
    vec![
        component_part("Model_Reset", Work::default()),
        component_part("Time_Encoding", Work::default()),
        component_part("Input_Reshaping", Work::default()),
        component_part("Model_Forward_Pass", forward),
        component_part("Output_Processing", Work::default()),
    ]
}

fn component_part(range: &str, work: Work) -> BreakdownPart {
    BreakdownPart { table: "component", label: range.to_owned(), range: range.to_owned(), work }
}

/// Sum of several works.
fn sum_works<'a>(works: impl IntoIterator<Item = &'a Work>) -> Work {
    let mut sum = Work::default();
    for work in works {
        sum.read_bytes += work.read_bytes;
        sum.write_bytes += work.write_bytes;
        for flops in &work.flops {
            let alike = |of: &&mut kernelgate::workload::work::Flops| {
                (of.unit, of.dtype) == (flops.unit, flops.dtype)
            };
            match sum.flops.iter_mut().find(alike) {
                Some(known) => known.count += flops.count,
                None => sum.flops.push(*flops),
            }
        }
    }
    sum
}

/// Layers of the network as rows of a table of parts.
struct LayerTable {
    table: &'static str,
    /// Name of the range that contains the ranges of the layers.
    within: &'static str,
}

impl LayerTable {
    fn part(&self, range: &str, work: Work) -> BreakdownPart {
        let &Self { table, within } = self;
        BreakdownPart { table, label: range.to_owned(), range: format!("{within}/{range}"), work }
    }

    /// Parts of a stage: the stage as a whole, then its convolutions.
    fn parts_of_stage(
        &self,
        stage: &str,
        convs: Vec<(&ConvolutionLayer, Work)>,
    ) -> Vec<BreakdownPart> {
        let whole = self.part(stage, sum_works(convs.iter().map(|(_, work)| work)));
        let conv = |(conv, work): (&ConvolutionLayer, Work)| BreakdownPart {
            label: format!("· {}", conv.name),
            ..self.part(&format!("{stage}/{}", conv.name), work)
        };
        std::iter::once(whole).chain(convs.into_iter().map(conv)).collect()
    }
}

/// Network and shape from which the layers' work is computed.
struct NetworkParts<'a> {
    shape: &'a NetworkShape,
    network: super::network::ResNet18,
}

impl<'a> NetworkParts<'a> {
    fn new(shape: &'a NetworkShape) -> Self {
        Self { shape, network: shape.sizes.build_network() }
    }

    /// Numbers of operations of GEMMs and of the vector unit.
    fn gemm_and_vector_work(&self, work: Work, matmul: u64, vector: u64) -> Work {
        work.with_flops(FlopUnit::Matmul, self.shape.dtype, matmul).with_flops(
            FlopUnit::Vector,
            Dtype::F32,
            vector,
        )
    }

    /// Floating-point operations of convolutions over all frames.
    fn convolution_flops<'c>(&self, convs: impl IntoIterator<Item = &'c ConvolutionLayer>) -> u64 {
        let multiply_adds: u64 = convs.into_iter().map(ConvolutionLayer::multiply_adds).sum();
        2 * self.shape.frame_count() as u64 * multiply_adds
    }

    fn neuron_time_steps(&self, map: FeatureMap) -> u64 {
        (self.shape.frame_count() * map.elements()) as u64
    }

    /// Work of a layer: its convolutions and its neurons.
    fn forward_layer_part<'c>(
        &self,
        convs: impl IntoIterator<Item = &'c ConvolutionLayer> + Clone,
    ) -> Work {
        let elements =
            |conv: &ConvolutionLayer| weight_elements_read(conv) + conv.window.output.channels;
        let read: usize = convs.clone().into_iter().map(elements).sum();
        let map = convs.clone().into_iter().next().map(|conv| conv.window.output);
        let neurons = map.map_or(0, |map| self.neuron_time_steps(map));
        let read = Work::bytes((read * self.shape.dtype.bytes()) as u64, 0);
        self.gemm_and_vector_work(read, self.convolution_flops(convs), 5 * neurons)
    }

    fn forward_parts(&self) -> Vec<BreakdownPart> {
        let Self { shape, network, .. } = self;
        let images = shape.b * shape.sizes.image().elements() * shape.dtype.bytes();
        let layers = LayerTable { table: LAYER_TABLE, within: "Model_Compute_All_Layers" };
        let mut stem = self.forward_layer_part([&network.stem]);
        stem.read_bytes += images as u64;
        // The input of the stem's convolution is the same in every time step.
        stem.flops[0].count /= shape.t as u64;
        let mut parts = vec![layers.part("Conv1_Block", stem)];
        if network.pool.is_some() {
            parts.push(layers.part("MaxPool", Work::default()));
        }
        for (number, blocks) in network.blocks.chunks(shape.sizes.blocks).enumerate() {
            let stage = stage_range_name(number);
            let convs = blocks.iter().flat_map(|block| {
                let second = [Some(&block.second), block.shortcut.as_ref()];
                [
                    (&block.first, self.forward_layer_part([&block.first])),
                    (&block.second, self.forward_layer_part(second.into_iter().flatten())),
                ]
            });
            parts.extend(layers.parts_of_stage(&stage, convs.collect()));
        }
        let classifier = (network.parameters - network.classifier) * shape.dtype.bytes();
        let logits = shape.b * CLASS_COUNT * Dtype::F32.bytes();
        let last = Work::bytes(classifier as u64, logits as u64);
        parts.push(
            layers
                .part("Final_Layers", self.gemm_and_vector_work(last, self.classifier_flops(), 0)),
        );
        parts
    }

    fn classifier_flops(&self) -> u64 {
        2 * (self.shape.b * CLASS_COUNT * self.network.last_map().channels) as u64
    }

    /// Operations of the backward pass of neurons, as `st_bif/backward` counts them.
    fn neurons_backward_work(&self, map: FeatureMap) -> u64 {
        20 * self.neuron_time_steps(map)
    }

    fn backward_parts(&self) -> Vec<BreakdownPart> {
        let Self { shape, network, .. } = self;
        let layers = LayerTable { table: BACKWARD_LAYER_TABLE, within: "Backward" };
        let maps = network.neuron_layer_extents();
        let last = self.neurons_backward_work(network.last_map());
        let last = self.gemm_and_vector_work(Work::default(), self.classifier_flops(), last);
        let mut parts = vec![layers.part("Final_Layers", last)];
        let stages = network.blocks.chunks(shape.sizes.blocks).enumerate();
        for (number, blocks) in stages.rev() {
            let (stage, before) = (stage_range_name(number), number * shape.sizes.blocks);
            let convs = blocks.iter().enumerate().rev().flat_map(|(i, block)| {
                let ResidualBlock { first, second, shortcut } = block;
                // The neurons whose spikes the block reads; the stem's neurons are a separate part.
                let read = 2 * (before + i);
                let read = if read > 0 { self.neurons_backward_work(maps[read]) } else { 0 };
                let hidden = self.neurons_backward_work(first.window.output);
                let input =
                    self.convolution_flops([Some(first), shortcut.as_ref()].into_iter().flatten());
                [
                    (
                        second,
                        self.gemm_and_vector_work(
                            Work::default(),
                            self.convolution_flops([second]),
                            hidden,
                        ),
                    ),
                    (first, self.gemm_and_vector_work(Work::default(), input, read)),
                ]
            });
            parts.extend(layers.parts_of_stage(&stage, convs.collect()));
        }
        let stem = self.neurons_backward_work(maps[0]);
        parts.push(layers.part("Conv1_Block", self.gemm_and_vector_work(Work::default(), 0, stem)));
        parts
    }

    fn weight_gradients(&self) -> Work {
        let stem = 2 * self.shape.b as u64 * self.network.stem.multiply_adds();
        let hidden = self.convolution_flops(self.network.block_convolutions().skip(1));
        self.gemm_and_vector_work(Work::default(), stem + hidden, 0)
    }
}

/// Name of the range of a stage; stages are numbered from 0.
pub(super) fn stage_range_name(number: usize) -> String {
    format!("Layer{}_ResBlocks", number + 1)
}

#[cfg(test)]
mod tests {
    use super::super::definition::{INFERENCE, TRAIN_STEP};
    use super::super::network::NetworkStem;
    use super::*;
    use kernelgate::workload::{DefaultScale, Effort, Problem};

    fn matmul_and_vector<'a>(parts: impl IntoIterator<Item = &'a BreakdownPart>) -> [u64; 2] {
        let all = sum_works(parts.into_iter().map(|part| &part.work));
        [FlopUnit::Matmul, FlopUnit::Vector]
            .map(|unit| all.flops.iter().filter(|of| of.unit == unit).map(|of| of.count).sum())
    }

    /// Parts of these tables that contain no other parts.
    fn innermost_parts<'a>(
        of: &'a Breakdown,
        tables: &'a [&str],
    ) -> impl Iterator<Item = &'a BreakdownPart> {
        let own = |part: &&BreakdownPart| !part.range.ends_with("_ResBlocks");
        of.parts.iter().filter(|part| tables.contains(&part.table)).filter(own)
    }

    #[test]
    fn the_works_of_all_layers_add_up_to_the_declared_work() {
        for point in INFERENCE.points(Effort::Thorough, DefaultScale::Host, &[]).unwrap() {
            let problem = (INFERENCE.bind)(&point).unwrap();
            let (of, work) = (problem.breakdown(), problem.work());
            let layers = sum_works(innermost_parts(&of, &[LAYER_TABLE]).map(|part| &part.work));
            // The declared work contains the bytes of all parameters.
            assert!(layers.read_bytes <= work.read_bytes, "{point:?}");
            let every_tap = problem.shape.sizes.stem == NetworkStem::Cifar;
            assert_eq!(layers.read_bytes == work.read_bytes, every_tap, "{point:?}");
            assert_eq!(Work { read_bytes: work.read_bytes, ..layers }, work, "{point:?}");
        }
        for point in TRAIN_STEP.points(Effort::Default, DefaultScale::Accelerator, &[]).unwrap() {
            let problem = (TRAIN_STEP.bind)(&point).unwrap();
            let breakdown = problem.breakdown();
            let others = ["Weight_Gradients", "Optimizer"];
            let others =
                breakdown.parts.iter().filter(|part| others.contains(&part.range.as_str()));
            let layers =
                innermost_parts(&breakdown, &[LAYER_TABLE, BACKWARD_LAYER_TABLE]).chain(others);
            let work = BreakdownPart { work: problem.work(), ..breakdown.parts[0].clone() };
            assert_eq!(matmul_and_vector(layers), matmul_and_vector([&work]), "{point:?}");
        }
    }

    #[test]
    fn the_parts_of_the_breakdown_have_distinct_ranges() {
        let point = &TRAIN_STEP.points(Effort::Default, DefaultScale::Accelerator, &[]).unwrap()[0];
        let breakdown = (TRAIN_STEP.bind)(point).unwrap().breakdown();
        for (i, part) in breakdown.parts.iter().enumerate() {
            let same = |other: &BreakdownPart| other.range.ends_with(&format!("/{}", part.range));
            assert!(!breakdown.parts.iter().any(same), "{}", part.range);
            assert!(
                breakdown.parts[..i].iter().all(|other| other.range != part.range),
                "{}",
                part.range
            );
        }
        assert_eq!(breakdown.samples, Some(32));
    }
}
