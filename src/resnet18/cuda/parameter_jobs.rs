//! Job lists of the kernels that process all ResNet-18 parameters in one launch. Each parameter
//! kernel reads a list of jobs, structures of `kernels/resnet18/fused_step.cu` with 64 bits a
//! field, and a list of the job index of each block.

use std::collections::BTreeMap;

use super::fused::name_of_currents_gradient_region;
use super::kernel_weights::{
    name_of_tiled_weight_region, name_of_weight_region, packed_weight_columns, stem_operand_columns,
};
use super::per_op::{name_of_block_input_region, name_of_layer_spikes_region};
use super::tiles::{GEMM_TILE_SIDE, THREADS_PER_TILE_GROUP};
use crate::collective::InPlaceAllReduce;
use crate::resnet18::definition::ResNetParameters;
use crate::resnet18::network::{
    CLASSIFIER_CLASS_COUNT, ConvolutionLayer, FeatureMapExtents, ResNet18Layers, ResNetBlock,
};
use kernelgate::backend::program::{
    LaunchProgram, MemoryPurpose, RegionPointer, TableNumberOrAddress,
};
use kernelgate::workload::Dtype;

/// Number of packets of four elements that a thread of an elementwise parameter job processes.
pub const PACKETS_PER_JOB_THREAD: usize = 4;
/// Number of elements that a block of an elementwise parameter job processes.
const ELEMENTS_PER_JOB_BLOCK: usize = THREADS_PER_TILE_GROUP * PACKETS_PER_JOB_THREAD * 4;
/// Minimum number of tiles of GEMM rows over which one part of a weight gradient sums, if the
/// gradient has so many tiles.
const MIN_ROW_TILES_PER_GRADIENT_PART: usize = 16;
/// Maximum number of blocks that compute the gradient of one weight, which limits the number of
/// parts of the gradient.
const MAX_BLOCKS_PER_WEIGHT_GRADIENT: usize = 256;

/// Job list of a parameter kernel: the fields of the jobs, and the job index of each block.
#[derive(Default)]
struct ParameterJobList {
    job_fields: Vec<TableNumberOrAddress>,
    job_index_by_block: Vec<i32>,
    job_count: i32,
}

impl ParameterJobList {
    fn append_job_for_blocks(
        &mut self,
        blocks: usize,
        fields: impl IntoIterator<Item = TableNumberOrAddress>,
    ) {
        self.job_fields.push(TableNumberOrAddress::Number(self.job_index_by_block.len() as i64));
        self.job_fields.extend(fields);
        self.job_index_by_block.extend(std::iter::repeat_n(self.job_count, blocks));
        self.job_count += 1;
    }
}

/// Number of gradient buckets that GPUs all-reduce: one for each of the last two stages, then one
/// for all other gradients.
pub const GRADIENT_BUCKET_COUNT: usize = 3;

/// Buckets of gradients that GPUs sum by all-reduce, in the order in which the backward pass
/// computes them. A gradient bucket is one region of device memory.
pub struct GradientBucketLayout {
    /// Size of each gradient bucket in bytes, padded for the all-reduce.
    bucket_bytes: Vec<usize>,
    /// Bucket number and byte offset of each parameter's gradient, keyed by the index of the
    /// weight's first element.
    bucket_and_offset_of_gradient: BTreeMap<usize, (usize, usize)>,
}

impl GradientBucketLayout {
    /// Divides the gradients of a network into buckets, whose sizes are padded for this number of
    /// GPUs.
    pub fn divide_network_gradients_into_buckets(
        network: &ResNet18Layers,
        blocks_a_stage: usize,
        gpus: usize,
    ) -> Self {
        let mut all = Self {
            bucket_bytes: vec![0; GRADIENT_BUCKET_COUNT],
            bucket_and_offset_of_gradient: BTreeMap::new(),
        };
        all.append_gradient_to_bucket(
            0,
            network.first_classifier_weight_index,
            CLASSIFIER_CLASS_COUNT * (network.last_feature_map().channels + 1),
        );
        let stages = network.blocks.chunks(blocks_a_stage).rev().enumerate();
        for (after, blocks) in stages {
            let bucket = after.min(GRADIENT_BUCKET_COUNT - 1);
            for conv in blocks.iter().flat_map(ResNetBlock::convolutions_of_block) {
                let filters = conv.window.output_extents.channels;
                all.append_gradient_to_bucket(
                    bucket,
                    conv.first_weight_index,
                    filters * (packed_weight_columns(network, conv) + 1),
                );
            }
        }
        let filters = network.stem.window.output_extents.channels;
        let elements = filters * (packed_weight_columns(network, &network.stem) + 1);
        all.append_gradient_to_bucket(
            GRADIENT_BUCKET_COUNT - 1,
            network.stem.first_weight_index,
            elements,
        );
        all.bucket_bytes.iter_mut().for_each(|bytes| {
            *bytes = InPlaceAllReduce::message_bytes_in_whole_packets(gpus, *bytes)
        });
        all
    }

    fn append_gradient_to_bucket(
        &mut self,
        bucket: usize,
        first_weight_index: usize,
        elements: usize,
    ) {
        let end = &mut self.bucket_bytes[bucket];
        self.bucket_and_offset_of_gradient.insert(first_weight_index, (bucket, *end));
        *end += elements.next_multiple_of(4) * Dtype::F32.bytes_per_element();
    }

    /// Size of each gradient bucket in bytes, padded for the all-reduce.
    pub fn bytes_of_each_bucket(&self) -> &[usize] {
        &self.bucket_bytes
    }

    /// Name of the memory region of the gradient bucket with this number.
    pub fn name_of_bucket_region(bucket: usize) -> String {
        format!("exchanged{bucket}")
    }

    /// Adds the memory regions of all gradient buckets to the program.
    pub fn declare_memory_regions_of_buckets(&self, program: &mut LaunchProgram) {
        for (bucket, bytes) in self.bucket_bytes.iter().enumerate() {
            program.add_scratch(
                Self::name_of_bucket_region(bucket),
                MemoryPurpose::Gradients,
                *bytes,
            );
        }
    }

    /// Bucket number and device address of the gradient of the weight whose first element has this
    /// index.
    pub fn bucket_and_gradient_address(
        &self,
        program: &LaunchProgram,
        element: usize,
    ) -> (usize, RegionPointer) {
        let (bucket, offset) = self.bucket_and_offset_of_gradient[&element];
        (bucket, program.pointer_to(&Self::name_of_bucket_region(bucket)).offset_by(offset))
    }
}

/// Job lists of all parameter kernels of a training step. The weight gradients have one job list
/// for each bucket, or a single list in training on one GPU.
#[derive(Default)]
pub struct ParameterJobLists {
    packing_jobs: ParameterJobList,
    gradient_jobs_by_bucket: Vec<ParameterJobList>,
    /// Jobs that sum the parts of each gradient; these jobs exist only in data-parallel training.
    gradient_sum_jobs: Vec<ParameterJobList>,
    /// SGD update jobs for the gradients of all buckets but the last one, and SGD update jobs for
    /// the gradients of the last bucket.
    sgd: [ParameterJobList; 2],
}

impl ParameterJobLists {
    /// Creates the job lists of a network whose memory regions the program already has. The pack
    /// jobs write each weight in row-major layout and, if the program has a tiled region for the
    /// weight, in tiles too. The factor `mean` is the fraction of all images that this GPU
    /// processes, because the loss is the mean over all images.
    pub fn create_jobs_for_training_step(
        shape: &ResNetParameters,
        network: &ResNet18Layers,
        program: &LaunchProgram,
        buckets: Option<&GradientBucketLayout>,
        mean: f32,
    ) -> Self {
        let lists = || {
            (0..buckets.map_or(1, |_| GRADIENT_BUCKET_COUNT))
                .map(|_| ParameterJobList::default())
                .collect()
        };
        let mut all = Self {
            gradient_jobs_by_bucket: lists(),
            gradient_sum_jobs: lists(),
            ..Self::default()
        };
        for (conv, reads) in convolutions_with_gradient_frames(shape, network) {
            all.add_jobs_of_convolution(shape, network, conv, reads, program, (buckets, mean));
        }
        let weights = CLASSIFIER_CLASS_COUNT * network.last_feature_map().channels;
        let behind =
            network.padded_parameter_count - network.first_classifier_weight_index - weights;
        let share =
            shape.time_steps_fed_with_image() as f32 / shape.time_steps_to_spread_image() as f32;
        let [weight, bias] = addresses_of_classifier_gradients(network, program, buckets);
        all.add_sgd_update_job(
            0,
            network.first_classifier_weight_index,
            weight,
            1,
            [1, weights, 0, weights],
            mean,
        );
        let at = network.first_classifier_weight_index + weights;
        all.add_sgd_update_job(
            0,
            at,
            bias,
            1,
            [1, behind, 0, CLASSIFIER_CLASS_COUNT],
            share * mean,
        );
        all
    }

    /// Adds the job that copies a convolution's f32 parameters into the packed rows of its weight
    /// region and, if it exists, of its tiled weight region. Each row of the packed region has
    /// `columns` elements, which begin at element `first` of a filter.
    fn add_job_that_packs_convolution_weights(
        &mut self,
        conv: &ConvolutionLayer,
        program: &LaunchProgram,
        (first, columns): (usize, usize),
    ) {
        let elements = conv.window.output_extents.channels * columns;
        let from = program
            .pointer_to("parameters")
            .offset_by(conv.first_weight_index * Dtype::F32.bytes_per_element());
        let tiles = program
            .pointer_if_declared(&name_of_tiled_weight_region(conv))
            .map_or(TableNumberOrAddress::Number(0), TableNumberOrAddress::Pointer);
        let packed = [from.into(), program.pointer_to(&name_of_weight_region(conv)).into(), tiles];
        let fields = sizes_as_job_words([elements, conv.elements_per_filter(), first, columns]);
        self.packing_jobs.append_job_for_blocks(
            elements.div_ceil(ELEMENTS_PER_JOB_BLOCK),
            packed.into_iter().chain(fields),
        );
    }

    fn add_jobs_of_convolution(
        &mut self,
        shape: &ResNetParameters,
        network: &ResNet18Layers,
        conv: &ConvolutionLayer,
        reads: WeightGradientFrames,
        program: &LaunchProgram,
        (buckets, mean): (Option<&GradientBucketLayout>, f32),
    ) {
        let filters = conv.window.output_extents.channels;
        let columns = packed_weight_columns(network, conv);
        let first =
            conv.window.range_of_taps_that_read_pixels().start * conv.window.input_extents.channels;
        let elements = filters * columns;
        self.add_job_that_packs_convolution_weights(conv, program, (first, columns));

        let parts = partial_sums_per_weight_gradient(shape, network, conv);
        let first_weight = conv.first_weight_index;
        let (bucket, whole) =
            match buckets.map(|all| all.bucket_and_gradient_address(program, first_weight)) {
                Some((bucket, whole)) => (bucket, Some(whole)),
                None => (0, None),
            };
        // A weight gradient with a single part is computed directly in its bucket.
        let sums = whole
            .filter(|_| parts == 1)
            .unwrap_or_else(|| program.pointer_to(&name_of_gradient_parts_region(conv)));
        let (layer, map) = (reads.output_neuron_layer, reads.frame_extents);
        let out_side = conv.window.output_extents.side_pixels;
        let fields = sizes_as_job_words([
            parts,
            reads.time_steps,
            shape.batch_size,
            reads.time_steps_that_get_bias,
            map.side_pixels,
            map.channels,
            out_side,
            filters,
            reads.filter_side,
            reads.stride_pixels,
            reads.first_filter_tap,
            columns,
        ]);
        let pointers = [
            program.pointer_to(&name_of_currents_gradient_region(layer)),
            program.pointer_to(&reads.input_frames_region_name),
            sums,
        ]
        .map(TableNumberOrAddress::Pointer);
        let blocks = (columns / GEMM_TILE_SIDE + 1) * (filters / GEMM_TILE_SIDE) * parts;
        let words = pointers.into_iter().chain(fields);
        self.gradient_jobs_by_bucket[bucket].append_job_for_blocks(blocks, words);

        let spread = 1.0 / shape.time_steps_to_spread_image() as f32;
        let stem = conv.first_weight_index == network.stem.first_weight_index;
        let factor =
            mean * if stem { spread } else { shape.neuron_parameters().firing_threshold as f32 };
        let biases = |from: RegionPointer, parts: usize| {
            from.offset_by(parts * elements * Dtype::F32.bytes_per_element())
        };
        let (from, left) = match whole.filter(|_| parts > 1) {
            Some(whole) => {
                self.add_job_that_sums_gradient_parts(bucket, sums, whole, parts, elements);
                self.add_job_that_sums_gradient_parts(
                    bucket,
                    biases(sums, parts),
                    biases(whole, 1),
                    parts,
                    filters,
                );
                (whole, 1)
            }
            None => (sums, parts),
        };
        self.add_sgd_update_job(
            bucket,
            conv.first_weight_index,
            from,
            left,
            [filters, conv.elements_per_filter(), first, columns],
            factor,
        );
        let sizes = [1, filters, 0, filters];
        self.add_sgd_update_job(
            bucket,
            conv.index_of_first_bias(),
            biases(from, left),
            left,
            sizes,
            mean * spread,
        );
    }

    /// Adds the job that sums the parts of a gradient into the gradient bucket.
    fn add_job_that_sums_gradient_parts(
        &mut self,
        bucket: usize,
        parts: RegionPointer,
        to: RegionPointer,
        count: usize,
        elements: usize,
    ) {
        let fields = [parts, to].map(TableNumberOrAddress::Pointer).into_iter();
        let fields = fields.chain(sizes_as_job_words([count, elements, elements]));
        self.gradient_sum_jobs[bucket]
            .append_job_for_blocks(elements.div_ceil(ELEMENTS_PER_JOB_BLOCK), fields);
    }

    /// Adds the SGD job of a parameter `[rows, depth]` whose gradient has only the columns of
    /// filter taps that read a pixel.
    fn add_sgd_update_job(
        &mut self,
        bucket: usize,
        element: usize,
        gradient: RegionPointer,
        parts: usize,
        [rows, depth, first, columns]: [usize; 4],
        factor: f32,
    ) {
        let elements = rows * depth;
        let fields = sizes_as_job_words([element, elements])
            .chain([gradient.into()])
            .chain(sizes_as_job_words([parts, rows * columns, depth, first, columns]))
            .chain([TableNumberOrAddress::Number(i64::from(factor.to_bits()))]);
        let last = usize::from(bucket + 1 == GRADIENT_BUCKET_COUNT);
        self.sgd[last].append_job_for_blocks(elements.div_ceil(ELEMENTS_PER_JOB_BLOCK), fields);
    }

    /// Returns all job lists that are not empty, with their names.
    fn nonempty_lists_with_names(&self) -> impl Iterator<Item = (String, &ParameterJobList)> {
        let by_bucket = |name: &'static str, lists: &'_ [ParameterJobList]| -> Vec<String> {
            (0..lists.len()).map(|bucket| format!("{name}{bucket}")).collect()
        };
        let gradients = by_bucket("gradients", &self.gradient_jobs_by_bucket)
            .into_iter()
            .zip(&self.gradient_jobs_by_bucket);
        let sums =
            by_bucket("sums", &self.gradient_sum_jobs).into_iter().zip(&self.gradient_sum_jobs);
        let sgd = by_bucket("sgd", &self.sgd).into_iter().zip(&self.sgd);
        std::iter::once(("pack".to_owned(), &self.packing_jobs))
            .chain(sgd)
            .chain(gradients)
            .chain(sums)
            .filter(|(_, list)| list.job_count > 0)
    }

    /// Number of blocks of the launch over the named job list; 0 if the list is empty.
    pub fn block_count_of_job_list(&self, name: &str) -> usize {
        self.nonempty_lists_with_names()
            .find(|(known, _)| known == name)
            .map_or(0, |(_, list)| list.job_index_by_block.len())
    }

    /// Names of the two memory regions of a job list: the jobs, and the job index of each block.
    pub fn names_of_job_list_regions(name: &str) -> [String; 2] {
        [format!("{name}_jobs"), format!("{name}_owners")]
    }

    /// Adds the memory regions of all job lists to the program.
    pub fn declare_job_list_regions(&self, program: &mut LaunchProgram) {
        for (name, list) in self.nonempty_lists_with_names() {
            let [jobs, owners] = Self::names_of_job_list_regions(&name);
            program.add_table_of_numbers_and_addresses(
                jobs,
                MemoryPurpose::Workspace,
                list.job_fields.clone(),
            );
            let bytes = bytemuck::cast_slice(&list.job_index_by_block).to_vec();
            program.add_packed_from_inputs(
                owners,
                MemoryPurpose::Workspace,
                bytes.len(),
                move |_| bytes.clone(),
            );
        }
    }
}

/// Device addresses of the gradients of the classifier's weight and bias.
pub fn addresses_of_classifier_gradients(
    network: &ResNet18Layers,
    program: &LaunchProgram,
    buckets: Option<&GradientBucketLayout>,
) -> [RegionPointer; 2] {
    let Some(buckets) = buckets else {
        return ["fc.weight_gradient", "fc.bias_gradient"].map(|name| program.pointer_to(name));
    };
    let (_, weight) =
        buckets.bucket_and_gradient_address(program, network.first_classifier_weight_index);
    [
        weight,
        weight.offset_by(
            CLASSIFIER_CLASS_COUNT
                * network.last_feature_map().channels
                * Dtype::F32.bytes_per_element(),
        ),
    ]
}

/// Adds memory regions for the parts of all convolution gradients; with buckets, a gradient with a
/// single part needs no region.
pub fn declare_gradient_part_regions(
    program: &mut LaunchProgram,
    shape: &ResNetParameters,
    network: &ResNet18Layers,
    buckets: Option<&GradientBucketLayout>,
) {
    for conv in network.all_convolutions() {
        let filter = packed_weight_columns(network, conv) + 1;
        let parts = partial_sums_per_weight_gradient(shape, network, conv);
        if buckets.is_some() && parts == 1 {
            continue;
        }
        let elements = parts * conv.window.output_extents.channels * filter;
        program.add_scratch(
            name_of_gradient_parts_region(conv),
            MemoryPurpose::Gradients,
            elements * Dtype::F32.bytes_per_element(),
        );
    }
}

/// Converts sizes to the 64-bit words of a job.
fn sizes_as_job_words<const N: usize>(
    sizes: [usize; N],
) -> impl Iterator<Item = TableNumberOrAddress> {
    sizes.into_iter().map(|size| TableNumberOrAddress::Number(size as i64))
}

fn name_of_gradient_parts_region(conv: &ConvolutionLayer) -> String {
    format!("{}.parts", conv.layer_name)
}

/// Number of partial sums in which a convolution's weight gradient is computed, to occupy more
/// blocks.
fn partial_sums_per_weight_gradient(
    shape: &ResNetParameters,
    network: &ResNet18Layers,
    conv: &ConvolutionLayer,
) -> usize {
    let blocks = packed_weight_columns(network, conv) / GEMM_TILE_SIDE
        * (conv.window.output_extents.channels / GEMM_TILE_SIDE);
    // The rows of the GEMM for a weight gradient are all time steps of an image at a pixel; for the
    // stem they are a single step.
    let steps = if conv.first_weight_index == network.stem.first_weight_index {
        1
    } else {
        shape.time_steps
    };
    let tiles = conv.window.output_extents.pixels_per_frame()
        * (shape.batch_size * steps).div_ceil(GEMM_TILE_SIDE);
    (tiles / MIN_ROW_TILES_PER_GRADIENT_PART)
        .clamp(1, MAX_BLOCKS_PER_WEIGHT_GRADIENT.div_ceil(blocks))
}

/// Frames over which a convolution's weight gradient is summed, with the geometry of the
/// convolution.
struct WeightGradientFrames {
    /// Name of the memory region of the frames that the convolution reads, over which its weight
    /// gradient is summed.
    input_frames_region_name: String,
    /// Index of the neuron layer that receives the convolution's output.
    output_neuron_layer: usize,
    /// Extents of one frame that the convolution reads.
    frame_extents: FeatureMapExtents,
    time_steps: usize,
    time_steps_that_get_bias: usize,
    filter_side: usize,
    stride_pixels: usize,
    first_filter_tap: usize,
}

/// Returns every convolution with the frames over which its weight gradient is summed. The stem's
/// operand was gathered before, once for all time steps, so the gradient kernel treats the stem as
/// a convolution of one pixel and one time step.
fn convolutions_with_gradient_frames<'a>(
    shape: &ResNetParameters,
    network: &'a ResNet18Layers,
) -> Vec<(&'a ConvolutionLayer, WeightGradientFrames)> {
    let stem = &network.stem;
    let gathered = FeatureMapExtents {
        side_pixels: stem.window.output_extents.side_pixels,
        channels: stem_operand_columns(network),
    };
    let operand = WeightGradientFrames {
        input_frames_region_name: "operand".to_owned(),
        output_neuron_layer: 0,
        frame_extents: gathered,
        time_steps: 1,
        time_steps_that_get_bias: 1,
        filter_side: 1,
        stride_pixels: 1,
        first_filter_tap: 0,
    };
    let spikes = |conv: &ConvolutionLayer, frames: String, layer: usize| WeightGradientFrames {
        input_frames_region_name: frames,
        output_neuron_layer: layer,
        frame_extents: conv.window.input_extents,
        time_steps: shape.time_steps,
        time_steps_that_get_bias: shape.time_steps_fed_with_image(),
        filter_side: conv.window.window_side,
        stride_pixels: conv.window.stride_pixels,
        first_filter_tap: conv.window.range_of_taps_that_read_pixels().start,
    };
    let mut all = vec![(stem, operand)];
    for (number, block) in network.blocks.iter().enumerate() {
        let input = name_of_block_input_region(network, number);
        let (hidden, output) = (2 * number + 1, 2 * number + 2);
        all.push((&block.first, spikes(&block.first, input.clone(), hidden)));
        all.push((
            &block.second,
            spikes(&block.second, name_of_layer_spikes_region(hidden), output),
        ));
        let shortcut = block.shortcut.as_ref();
        all.extend(shortcut.map(|conv| (conv, spikes(conv, input, output))));
    }
    all
}
