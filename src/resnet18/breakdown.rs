//! Breakdown of a ResNet-18 pass into parts: the NVTX ranges that kernelgate's guides name, and the
//! work that the mathematics needs in each range.
//!
//! The work of a layer is that of its neurons, its convolution, and, for the second convolution of
//! a block, the shortcut convolution. Parameter bytes count only weights that are multiplied with a
//! pixel: over an image of one pixel, one tap of a 3×3 filter is read. The breakdown counts no
//! bytes of spikes, because spikes can stay on the chip. In the backward breakdown, the part of a
//! layer is the gradient of its convolution's input and of the neurons that produced that input.
//!
//! The breakdown excludes the guides' ranges around a launch, such as warm-up and memory
//! profiling, because only one launch is recorded. The CPU implementation opens the NVTX ranges of
//! its forward pass, stages, backward pass and optimiser, for a profiler that listens to NVTX. No
//! implementation opens the ranges Model_Reset and Output_Processing; only rungs with one launch
//! for each operation open Time_Encoding, because others launch nothing there. The rung `cuda/best`
//! opens no range of a stage, because all its layers are one launch; the kernel's timer stages show
//! their times.

use super::network::{CLASSIFIER_CLASS_COUNT, ConvolutionLayer, FeatureMapExtents, ResNetBlock};
use super::shape::ResNetParameters;
use kernelgate::workload::{Dtype, FlopUnit, ProblemPartForProfile, ProblemPartsForProfile, Work};

const FORWARD_LAYER_TABLE_TITLE: &str = "layer";
const BACKWARD_LAYER_TABLE_TITLE: &str = "layer backward";

/// Breakdown of ResNet-18 inference into parts with their work, from images to logits.
pub(super) fn breakdown_of_inference(shape: &ResNetParameters) -> ProblemPartsForProfile {
    let parts = [
        top_level_forward_parts(shape),
        LayerWorkCalculator::for_network_shape(shape).forward_parts_by_layer(),
    ]
    .concat();
    ProblemPartsForProfile {
        data_items_per_execution: Some(shape.batch_size as u64),
        parts,
        ..ProblemPartsForProfile::default()
    }
}

/// Breakdown of a ResNet-18 training step into parts with their work.
pub(super) fn breakdown_of_training_step(shape: &ResNetParameters) -> ProblemPartsForProfile {
    let costs = LayerWorkCalculator::for_network_shape(shape);
    let backward = costs.backward_parts_by_layer();
    let parameters = costs.network.padded_parameter_count as u64;
    let f32s = parameters * Dtype::F32.bytes_per_element() as u64;
    let rounded: usize =
        costs.network.all_convolutions().map(weights_multiplied_with_a_pixel).sum();
    let [read, write] =
        [Dtype::F32, Dtype::Bf16].map(|dtype| (rounded * dtype.bytes_per_element()) as u64);
    let rounding = Work::bytes(read, write);
    let optimizer = Work::bytes(2 * f32s, 2 * f32s).with_flops(
        FlopUnit::VectorArithmetic,
        Dtype::F32,
        4 * parameters,
    );
    let gradients = costs.work_of_all_weight_gradients();
    let own = backward.iter().filter(|part| !part.range_path.ends_with("_ResBlocks"));
    let all = sum_of_works(own.map(|part| &part.work).chain([&gradients]));
    let parts = [
        vec![top_level_part_of_nvtx_range("Weight_Rounding", rounding)],
        top_level_forward_parts(shape),
        vec![
            top_level_part_of_nvtx_range("Backward", all),
            top_level_part_of_nvtx_range("Weight_Gradients", gradients),
            top_level_part_of_nvtx_range("Optimizer", optimizer),
        ],
        costs.forward_parts_by_layer(),
        backward,
    ];
    ProblemPartsForProfile {
        data_items_per_execution: Some(shape.batch_size as u64),
        parts: parts.concat(),
        ..ProblemPartsForProfile::default()
    }
}

/// Number of a convolution's weights that are multiplied with at least one pixel inside the image.
pub(super) fn weights_multiplied_with_a_pixel(conv: &ConvolutionLayer) -> usize {
    conv.window.output_extents.channels
        * conv.window.count_of_taps_that_read_pixels()
        * conv.window.input_extents.channels
}

/// Top-level parts of the forward pass, with the range names of kernelgate's guides.
fn top_level_forward_parts(shape: &ResNetParameters) -> Vec<ProblemPartForProfile> {
    let forward = shape.work_of_forward_pass(&shape.sizes.build_resnet18_layers());
    vec![
        top_level_part_of_nvtx_range("Model_Reset", Work::default()),
        top_level_part_of_nvtx_range("Time_Encoding", Work::default()),
        top_level_part_of_nvtx_range("Input_Reshaping", Work::default()),
        top_level_part_of_nvtx_range("Model_Forward_Pass", forward),
        top_level_part_of_nvtx_range("Output_Processing", Work::default()),
    ]
}

fn top_level_part_of_nvtx_range(range: &str, work: Work) -> ProblemPartForProfile {
    ProblemPartForProfile {
        profile_table: "component",
        label: range.to_owned(),
        range_path: range.to_owned(),
        work,
    }
}

/// Sum of several works.
fn sum_of_works<'a>(works: impl IntoIterator<Item = &'a Work>) -> Work {
    let mut sum = Work::default();
    for work in works {
        sum.min_read_bytes += work.min_read_bytes;
        sum.min_write_bytes += work.min_write_bytes;
        for flops in &work.flops {
            let alike = |of: &&mut kernelgate::workload::work::FlopsOfUnitAndDtype| {
                (of.unit, of.dtype) == (flops.unit, flops.dtype)
            };
            match sum.flops.iter_mut().find(alike) {
                Some(known) => known.operations += flops.operations,
                None => sum.flops.push(*flops),
            }
        }
    }
    sum
}

/// Table of a breakdown whose rows are the layers of the network.
struct LayerBreakdownTable {
    table_title: &'static str,
    /// Name of the NVTX range that contains the ranges of the layers.
    enclosing_nvtx_range: &'static str,
}

impl LayerBreakdownTable {
    fn part_of_nvtx_range(&self, range: &str, work: Work) -> ProblemPartForProfile {
        let &Self { table_title: table, enclosing_nvtx_range: within } = self;
        ProblemPartForProfile {
            profile_table: table,
            label: range.to_owned(),
            range_path: format!("{within}/{range}"),
            work,
        }
    }

    /// Rows of a stage in a layer table: the stage as a whole, then each of its convolutions.
    fn stage_part_and_its_convolution_parts(
        &self,
        stage: &str,
        convs: Vec<(&ConvolutionLayer, Work)>,
    ) -> Vec<ProblemPartForProfile> {
        let whole =
            self.part_of_nvtx_range(stage, sum_of_works(convs.iter().map(|(_, work)| work)));
        let conv = |(conv, work): (&ConvolutionLayer, Work)| ProblemPartForProfile {
            label: format!("· {}", conv.layer_name),
            ..self.part_of_nvtx_range(&format!("{stage}/{}", conv.layer_name), work)
        };
        std::iter::once(whole).chain(convs.into_iter().map(conv)).collect()
    }
}

/// Network and shape from which the work of each layer is computed.
struct LayerWorkCalculator<'a> {
    shape: &'a ResNetParameters,
    network: super::network::ResNet18Layers,
}

impl<'a> LayerWorkCalculator<'a> {
    fn for_network_shape(shape: &'a ResNetParameters) -> Self {
        Self { shape, network: shape.sizes.build_resnet18_layers() }
    }

    /// Adds GEMM FLOPs and vector FLOPs to a work.
    fn add_gemm_and_vector_flops(&self, work: Work, matmul: u64, vector: u64) -> Work {
        work.with_flops(FlopUnit::Matmul, self.shape.dtype, matmul).with_flops(
            FlopUnit::VectorArithmetic,
            Dtype::F32,
            vector,
        )
    }

    /// FLOPs of some convolutions over all frames (images times time steps).
    fn convolution_flops_over_all_frames<'c>(
        &self,
        convs: impl IntoIterator<Item = &'c ConvolutionLayer>,
    ) -> u64 {
        let multiply_adds: u64 =
            convs.into_iter().map(ConvolutionLayer::multiply_adds_per_frame).sum();
        2 * self.shape.frames_over_all_time_steps() as u64 * multiply_adds
    }

    fn neuron_updates_over_all_frames(&self, map: FeatureMapExtents) -> u64 {
        (self.shape.frames_over_all_time_steps() * map.elements_per_frame()) as u64
    }

    /// Forward work of a layer: its convolutions, which add up to the same currents, and its
    /// neurons.
    fn forward_work_of_layer<'c>(
        &self,
        convs: impl IntoIterator<Item = &'c ConvolutionLayer> + Clone,
    ) -> Work {
        let elements = |conv: &ConvolutionLayer| {
            weights_multiplied_with_a_pixel(conv) + conv.window.output_extents.channels
        };
        let read: usize = convs.clone().into_iter().map(elements).sum();
        let map = convs.clone().into_iter().next().map(|conv| conv.window.output_extents);
        let neurons = map.map_or(0, |map| self.neuron_updates_over_all_frames(map));
        let read = Work::bytes((read * self.shape.dtype.bytes_per_element()) as u64, 0);
        self.add_gemm_and_vector_flops(
            read,
            self.convolution_flops_over_all_frames(convs),
            5 * neurons,
        )
    }

    fn forward_parts_by_layer(&self) -> Vec<ProblemPartForProfile> {
        let Self { shape, network, .. } = self;
        let images = shape.batch_size
            * shape.sizes.image_extents().elements_per_frame()
            * shape.dtype.bytes_per_element();
        let layers = LayerBreakdownTable {
            table_title: FORWARD_LAYER_TABLE_TITLE,
            enclosing_nvtx_range: "Model_Compute_All_Layers",
        };
        let mut stem = self.forward_work_of_layer([&network.stem]);
        stem.min_read_bytes += images as u64;
        // The stem's convolution reads the same image in every time step, so its work counts once
        // for each image.
        stem.flops[0].operations /= shape.time_steps as u64;
        let mut parts = vec![layers.part_of_nvtx_range("Conv1_Block", stem)];
        if network.pool.is_some() {
            parts.push(layers.part_of_nvtx_range("MaxPool", Work::default()));
        }
        for (number, blocks) in network.blocks.chunks(shape.sizes.blocks_per_stage).enumerate() {
            let stage = nvtx_range_of_stage(number);
            let convs = blocks.iter().flat_map(|block| {
                let second = [Some(&block.second), block.shortcut.as_ref()];
                [
                    (&block.first, self.forward_work_of_layer([&block.first])),
                    (&block.second, self.forward_work_of_layer(second.into_iter().flatten())),
                ]
            });
            parts.extend(layers.stage_part_and_its_convolution_parts(&stage, convs.collect()));
        }
        let classifier = (network.padded_parameter_count - network.first_classifier_weight_index)
            * shape.dtype.bytes_per_element();
        let logits = shape.batch_size * CLASSIFIER_CLASS_COUNT * Dtype::F32.bytes_per_element();
        let last = Work::bytes(classifier as u64, logits as u64);
        parts.push(layers.part_of_nvtx_range(
            "Final_Layers",
            self.add_gemm_and_vector_flops(last, self.classifier_gemm_flops(), 0),
        ));
        parts
    }

    fn classifier_gemm_flops(&self) -> u64 {
        2 * (self.shape.batch_size
            * CLASSIFIER_CLASS_COUNT
            * self.network.last_feature_map().channels) as u64
    }

    /// Vector FLOPs of the backward pass of a feature map's neurons, as the workload
    /// `st_bif/backward` counts them.
    fn neuron_backward_flops(&self, map: FeatureMapExtents) -> u64 {
        20 * self.neuron_updates_over_all_frames(map)
    }

    fn backward_parts_by_layer(&self) -> Vec<ProblemPartForProfile> {
        let Self { shape, network, .. } = self;
        let layers = LayerBreakdownTable {
            table_title: BACKWARD_LAYER_TABLE_TITLE,
            enclosing_nvtx_range: "Backward",
        };
        let maps = network.extents_of_neuron_layers();
        let last = self.neuron_backward_flops(network.last_feature_map());
        let last =
            self.add_gemm_and_vector_flops(Work::default(), self.classifier_gemm_flops(), last);
        let mut parts = vec![layers.part_of_nvtx_range("Final_Layers", last)];
        let stages = network.blocks.chunks(shape.sizes.blocks_per_stage).enumerate();
        for (number, blocks) in stages.rev() {
            let (stage, before) =
                (nvtx_range_of_stage(number), number * shape.sizes.blocks_per_stage);
            let convs = blocks.iter().enumerate().rev().flat_map(|(i, block)| {
                let ResNetBlock { first, second, shortcut } = block;
                // The work of a block includes the neurons whose spikes the block reads; the stem's
                // neurons are a separate part.
                let read = 2 * (before + i);
                let read = if read > 0 { self.neuron_backward_flops(maps[read]) } else { 0 };
                let hidden = self.neuron_backward_flops(first.window.output_extents);
                let input = self.convolution_flops_over_all_frames(
                    [Some(first), shortcut.as_ref()].into_iter().flatten(),
                );
                [
                    (
                        second,
                        self.add_gemm_and_vector_flops(
                            Work::default(),
                            self.convolution_flops_over_all_frames([second]),
                            hidden,
                        ),
                    ),
                    (first, self.add_gemm_and_vector_flops(Work::default(), input, read)),
                ]
            });
            parts.extend(layers.stage_part_and_its_convolution_parts(&stage, convs.collect()));
        }
        let stem = self.neuron_backward_flops(maps[0]);
        parts.push(layers.part_of_nvtx_range(
            "Conv1_Block",
            self.add_gemm_and_vector_flops(Work::default(), 0, stem),
        ));
        parts
    }

    fn work_of_all_weight_gradients(&self) -> Work {
        let stem = 2 * self.shape.batch_size as u64 * self.network.stem.multiply_adds_per_frame();
        let hidden =
            self.convolution_flops_over_all_frames(self.network.all_convolutions().skip(1));
        self.add_gemm_and_vector_flops(Work::default(), stem + hidden, 0)
    }
}

/// NVTX range name of a ResNet stage; stages are numbered from 0.
pub(super) fn nvtx_range_of_stage(number: usize) -> String {
    format!("Layer{}_ResBlocks", number + 1)
}

#[cfg(test)]
mod tests {
    use super::super::definition::{INFERENCE_WORKLOAD, TRAINING_STEP_WORKLOAD};
    use super::super::network::ResNetStem;
    use super::*;
    use kernelgate::workload::{BenchEffort, Problem, SizeOfDefaultProblems};

    fn matmul_and_vector_flops_of_parts<'a>(
        parts: impl IntoIterator<Item = &'a ProblemPartForProfile>,
    ) -> [u64; 2] {
        let all = sum_of_works(parts.into_iter().map(|part| &part.work));
        [FlopUnit::Matmul, FlopUnit::VectorArithmetic]
            .map(|unit| all.flops.iter().filter(|of| of.unit == unit).map(|of| of.operations).sum())
    }

    /// Parts of the given breakdown tables that contain no other parts: all but the stages.
    fn parts_without_stages<'a>(
        of: &'a ProblemPartsForProfile,
        tables: &'a [&str],
    ) -> impl Iterator<Item = &'a ProblemPartForProfile> {
        let own = |part: &&ProblemPartForProfile| !part.range_path.ends_with("_ResBlocks");
        of.parts.iter().filter(|part| tables.contains(&part.profile_table)).filter(own)
    }

    #[test]
    fn the_work_of_all_layers_adds_up_to_the_declared_work() {
        for point in INFERENCE_WORKLOAD
            .points_selected_by_effort(
                BenchEffort::Thorough,
                SizeOfDefaultProblems::HostCpuSizes,
                &[],
            )
            .unwrap()
        {
            let problem = (INFERENCE_WORKLOAD.bind)(&point).unwrap();
            let (of, work) = (problem.breakdown(), problem.work());
            let layers = sum_of_works(
                parts_without_stages(&of, &[FORWARD_LAYER_TABLE_TITLE]).map(|part| &part.work),
            );
            // The declared work counts the bytes of all parameters, whereas the layers of the
            // breakdown count only those of weights that are multiplied with a pixel.
            assert!(layers.min_read_bytes <= work.min_read_bytes, "{point:?}");
            let every_tap = problem.shape.sizes.stem == ResNetStem::CifarStem;
            assert_eq!(layers.min_read_bytes == work.min_read_bytes, every_tap, "{point:?}");
            assert_eq!(Work { min_read_bytes: work.min_read_bytes, ..layers }, work, "{point:?}");
        }
        for point in TRAINING_STEP_WORKLOAD
            .points_selected_by_effort(
                BenchEffort::Default,
                SizeOfDefaultProblems::HostAndAcceleratorSizes,
                &[],
            )
            .unwrap()
        {
            let problem = (TRAINING_STEP_WORKLOAD.bind)(&point).unwrap();
            let breakdown = problem.breakdown();
            let others = ["Weight_Gradients", "Optimizer"];
            let others =
                breakdown.parts.iter().filter(|part| others.contains(&part.range_path.as_str()));
            let layers = parts_without_stages(
                &breakdown,
                &[FORWARD_LAYER_TABLE_TITLE, BACKWARD_LAYER_TABLE_TITLE],
            )
            .chain(others);
            let work = ProblemPartForProfile { work: problem.work(), ..breakdown.parts[0].clone() };
            assert_eq!(
                matmul_and_vector_flops_of_parts(layers),
                matmul_and_vector_flops_of_parts([&work]),
                "{point:?}"
            );
        }
    }

    #[test]
    fn the_parts_of_a_breakdown_have_distinct_nvtx_ranges() {
        let point = &TRAINING_STEP_WORKLOAD
            .points_selected_by_effort(
                BenchEffort::Default,
                SizeOfDefaultProblems::HostAndAcceleratorSizes,
                &[],
            )
            .unwrap()[0];
        let breakdown = (TRAINING_STEP_WORKLOAD.bind)(point).unwrap().breakdown();
        for (i, part) in breakdown.parts.iter().enumerate() {
            let same = |other: &ProblemPartForProfile| {
                other.range_path.ends_with(&format!("/{}", part.range_path))
            };
            assert!(!breakdown.parts.iter().any(same), "{}", part.range_path);
            assert!(
                breakdown.parts[..i].iter().all(|other| other.range_path != part.range_path),
                "{}",
                part.range_path
            );
        }
        assert_eq!(breakdown.data_items_per_execution, Some(32));
    }
}
