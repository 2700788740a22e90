//! Jobs of the kernels that process all parameters at once. Each kernel has a list of jobs, in the
//! structures of `kernels/resnet18/fused_step.cu` with 64 bits a field, and a list of the job of
//! each of its blocks.

use std::collections::BTreeMap;

use super::fused::currents_gradient_name;
use super::kernel_weights::{
    padded_stem_columns, tiled_weight_region_name, weight_columns, weight_region_name,
};
use super::per_op::{block_input_name, layer_spikes_name};
use super::tiles::{THREADS_PER_GROUP, TILE_SIDE};
use crate::collective::InPlaceSum;
use crate::resnet18::definition::NetworkShape;
use crate::resnet18::network::{
    CLASS_COUNT, ConvolutionLayer, FeatureMap, ResNet18, ResidualBlock,
};
use kernelgate::backend::program::{MemoryPurpose, Pointer, Program, TableWord};
use kernelgate::workload::Dtype;

/// Number of packets of four elements that a thread handles, if its block is not a tile.
pub const PACKETS_PER_THREAD: usize = 4;
/// Number of elements that a block handles, if it is not a tile.
const ELEMENTS_PER_BLOCK: usize = THREADS_PER_GROUP * PACKETS_PER_THREAD * 4;
/// Minimum number of row tiles that a part of a weight's gradient sums, if the gradient has as
/// many.
const MIN_ROW_TILES_PER_PART: usize = 16;
/// Maximum number of blocks for one weight, which limits its number of parts.
const MAX_BLOCKS_PER_WEIGHT: usize = 256;

/// A job list: the jobs, and the job of each block.
#[derive(Default)]
struct JobList {
    jobs: Vec<TableWord>,
    owners: Vec<i32>,
    count: i32,
}

impl JobList {
    fn push_job(&mut self, blocks: usize, fields: impl IntoIterator<Item = TableWord>) {
        self.jobs.push(TableWord::Value(self.owners.len() as i64));
        self.jobs.extend(fields);
        self.owners.extend(std::iter::repeat_n(self.count, blocks));
        self.count += 1;
    }
}

/// Number of gradient buckets that GPUs exchange: one for each of the last stages, then one for all
/// other gradients.
pub const GRADIENT_BUCKETS: usize = 3;

/// Buckets of gradients that GPUs sum, in the order in which the backward pass computes them. A
/// bucket is one region of device memory.
pub struct GradientBuckets {
    /// Size of each gradient bucket in bytes.
    bytes: Vec<usize>,
    /// Bucket of a weight and its bias, and the offset in bytes of each, by the index of the
    /// weight's first element.
    places: BTreeMap<usize, (usize, usize)>,
}

impl GradientBuckets {
    /// Divides the gradients of a network into buckets, padded for this number of GPUs.
    pub fn new(network: &ResNet18, blocks_a_stage: usize, gpus: usize) -> Self {
        let mut all = Self { bytes: vec![0; GRADIENT_BUCKETS], places: BTreeMap::new() };
        all.add(0, network.classifier, CLASS_COUNT * (network.last_map().channels + 1));
        let stages = network.blocks.chunks(blocks_a_stage).rev().enumerate();
        for (after, blocks) in stages {
            let bucket = after.min(GRADIENT_BUCKETS - 1);
            for conv in blocks.iter().flat_map(ResidualBlock::block_convolutions) {
                let filters = conv.window.output.channels;
                all.add(bucket, conv.weight, filters * (weight_columns(network, conv) + 1));
            }
        }
        let filters = network.stem.window.output.channels;
        let elements = filters * (weight_columns(network, &network.stem) + 1);
        all.add(GRADIENT_BUCKETS - 1, network.stem.weight, elements);
        all.bytes.iter_mut().for_each(|bytes| *bytes = InPlaceSum::buffer_bytes(gpus, *bytes));
        all
    }

    fn add(&mut self, bucket: usize, element: usize, elements: usize) {
        let end = &mut self.bytes[bucket];
        self.places.insert(element, (bucket, *end));
        *end += elements.next_multiple_of(4) * Dtype::F32.bytes();
    }

    /// Size of each gradient bucket in bytes.
    pub fn bucket_bytes(&self) -> &[usize] {
        &self.bytes
    }

    /// Name of the memory region of a gradient bucket.
    pub fn region_name(bucket: usize) -> String {
        format!("exchanged{bucket}")
    }

    /// Declares the memory regions of all gradient buckets.
    pub fn declare_bucket_regions(&self, program: &mut Program) {
        for (bucket, bytes) in self.bytes.iter().enumerate() {
            program.add_scratch(Self::region_name(bucket), MemoryPurpose::Gradients, *bytes);
        }
    }

    /// Bucket of a weight's gradient and its address, by the index of the weight's first element.
    pub fn bucket_and_address(&self, program: &Program, element: usize) -> (usize, Pointer) {
        let (bucket, offset) = self.places[&element];
        (bucket, program.at(&Self::region_name(bucket)).offset_by(offset))
    }
}

/// Job lists of the weight kernels. The gradients have one list for each bucket, or a single list
/// without buckets.
#[derive(Default)]
pub struct JobLists {
    pack: JobList,
    gradients: Vec<JobList>,
    /// Jobs that sum the parts of gradients; these jobs exist only with buckets.
    sums: Vec<JobList>,
    /// SGD updates after all buckets but the last one, and after the last one.
    sgd: [JobList; 2],
}

impl JobLists {
    /// Creates the jobs of a network whose regions are declared. Weights that have regions in the
    /// tile layout are also packed in that layout. `mean` is the fraction of all images that this
    /// GPU has, for the mean over images.
    pub fn new(
        shape: &NetworkShape,
        network: &ResNet18,
        program: &Program,
        buckets: Option<&GradientBuckets>,
        mean: f32,
    ) -> Self {
        let lists =
            || (0..buckets.map_or(1, |_| GRADIENT_BUCKETS)).map(|_| JobList::default()).collect();
        let mut all = Self { gradients: lists(), sums: lists(), ..Self::default() };
        for (conv, reads) in convolutions_with_frames(shape, network) {
            all.add_convolution_jobs(shape, network, conv, reads, program, (buckets, mean));
        }
        let weights = CLASS_COUNT * network.last_map().channels;
        let behind = network.parameters - network.classifier - weights;
        let share = shape.fed_time_steps() as f32 / shape.spread_steps() as f32;
        let [weight, bias] = classifier_gradient_pointers(network, program, buckets);
        all.add_sgd_job(0, network.classifier, weight, 1, [1, weights, 0, weights], mean);
        let at = network.classifier + weights;
        all.add_sgd_job(0, at, bias, 1, [1, behind, 0, CLASS_COUNT], share * mean);
        all
    }

    fn add_convolution_jobs(
        &mut self,
        shape: &NetworkShape,
        network: &ResNet18,
        conv: &ConvolutionLayer,
        reads: SummedFrames,
        program: &Program,
        (buckets, mean): (Option<&GradientBuckets>, f32),
    ) {
        let filters = conv.window.output.channels;
        let (first_tap, columns) =
            (conv.window.taps_that_read_pixels().start, weight_columns(network, conv));
        let first = first_tap * conv.window.input.channels;
        let elements = filters * columns;
        let from = program.at("parameters").offset_by(conv.weight * Dtype::F32.bytes());
        let tiles = program
            .find(&tiled_weight_region_name(conv))
            .map_or(TableWord::Value(0), TableWord::Pointer);
        let packed = [from.into(), program.at(&weight_region_name(conv)).into(), tiles];
        let fields = extents_as_words([elements, conv.filter_elements(), first, columns]);
        self.pack.push_job(elements.div_ceil(ELEMENTS_PER_BLOCK), packed.into_iter().chain(fields));

        let parts = parts_of_weight_gradient(shape, network, conv);
        let (bucket, whole) = match buckets.map(|all| all.bucket_and_address(program, conv.weight))
        {
            Some((bucket, whole)) => (bucket, Some(whole)),
            None => (0, None),
        };
        // A gradient with a single part is computed directly in its bucket.
        let sums =
            whole.filter(|_| parts == 1).unwrap_or_else(|| program.at(&gradient_parts_name(conv)));
        let SummedFrames { frames, layer, map, steps, fed, kernel, stride, first_tap } = reads;
        let out_side = conv.window.output.side;
        let fields = extents_as_words([
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
        let pointers = [program.at(&currents_gradient_name(layer)), program.at(&frames), sums]
            .map(TableWord::Pointer);
        let blocks = (columns / TILE_SIDE + 1) * (filters / TILE_SIDE) * parts;
        self.gradients[bucket].push_job(blocks, pointers.into_iter().chain(fields));

        let spread = 1.0 / shape.spread_steps() as f32;
        let stem = conv.weight == network.stem.weight;
        let factor = mean * if stem { spread } else { shape.neuron().threshold as f32 };
        let biases =
            |from: Pointer, parts: usize| from.offset_by(parts * elements * Dtype::F32.bytes());
        let (from, left) = match whole.filter(|_| parts > 1) {
            Some(whole) => {
                self.add_sum_job(bucket, sums, whole, parts, elements);
                self.add_sum_job(bucket, biases(sums, parts), biases(whole, 1), parts, filters);
                (whole, 1)
            }
            None => (sums, parts),
        };
        self.add_sgd_job(
            bucket,
            conv.weight,
            from,
            left,
            [filters, conv.filter_elements(), first, columns],
            factor,
        );
        let sizes = [1, filters, 0, filters];
        self.add_sgd_job(
            bucket,
            conv.first_bias_element(),
            biases(from, left),
            left,
            sizes,
            mean * spread,
        );
    }

    /// Adds the job that sums the parts of a gradient.
    fn add_sum_job(
        &mut self,
        bucket: usize,
        parts: Pointer,
        to: Pointer,
        count: usize,
        elements: usize,
    ) {
        let fields = [parts, to].map(TableWord::Pointer).into_iter();
        let fields = fields.chain(extents_as_words([count, elements, elements]));
        self.sums[bucket].push_job(elements.div_ceil(ELEMENTS_PER_BLOCK), fields);
    }

    /// Adds the SGD job of a parameter `[rows, depth]` whose gradient has only a range of columns.
    fn add_sgd_job(
        &mut self,
        bucket: usize,
        element: usize,
        gradient: Pointer,
        parts: usize,
        [rows, depth, first, columns]: [usize; 4],
        factor: f32,
    ) {
        let elements = rows * depth;
        let fields = extents_as_words([element, elements])
            .chain([gradient.into()])
            .chain(extents_as_words([parts, rows * columns, depth, first, columns]))
            .chain([TableWord::Value(i64::from(factor.to_bits()))]);
        let last = usize::from(bucket + 1 == GRADIENT_BUCKETS);
        self.sgd[last].push_job(elements.div_ceil(ELEMENTS_PER_BLOCK), fields);
    }

    /// Job lists that are not empty, with their names.
    fn lists_by_name(&self) -> impl Iterator<Item = (String, &JobList)> {
        let by_bucket = |name: &'static str, lists: &'_ [JobList]| -> Vec<String> {
            (0..lists.len()).map(|bucket| format!("{name}{bucket}")).collect()
        };
        let gradients = by_bucket("gradients", &self.gradients).into_iter().zip(&self.gradients);
        let sums = by_bucket("sums", &self.sums).into_iter().zip(&self.sums);
        let sgd = by_bucket("sgd", &self.sgd).into_iter().zip(&self.sgd);
        std::iter::once(("pack".to_owned(), &self.pack))
            .chain(sgd)
            .chain(gradients)
            .chain(sums)
            .filter(|(_, list)| list.count > 0)
    }

    /// Number of blocks of a kernel; 0 without jobs.
    pub fn block_count(&self, name: &str) -> usize {
        self.lists_by_name()
            .find(|(known, _)| known == name)
            .map_or(0, |(_, list)| list.owners.len())
    }

    /// Names of the two regions of a list: the jobs, and the job of each block.
    pub fn job_list_region_names(name: &str) -> [String; 2] {
        [format!("{name}_jobs"), format!("{name}_owners")]
    }

    /// Declares the regions of all job lists in the program.
    pub fn declare_job_regions(&self, program: &mut Program) {
        for (name, list) in self.lists_by_name() {
            let [jobs, owners] = Self::job_list_region_names(&name);
            program.add_table(jobs, MemoryPurpose::Workspace, list.jobs.clone());
            let bytes = bytemuck::cast_slice(&list.owners).to_vec();
            program
                .add_packed(owners, MemoryPurpose::Workspace, bytes.len(), move |_| bytes.clone());
        }
    }
}

/// Addresses of the gradients of the classifier's weight and bias.
pub fn classifier_gradient_pointers(
    network: &ResNet18,
    program: &Program,
    buckets: Option<&GradientBuckets>,
) -> [Pointer; 2] {
    let Some(buckets) = buckets else {
        return ["fc.weight_gradient", "fc.bias_gradient"].map(|name| program.at(name));
    };
    let (_, weight) = buckets.bucket_and_address(program, network.classifier);
    [weight, weight.offset_by(CLASS_COUNT * network.last_map().channels * Dtype::F32.bytes())]
}

/// Declares the regions for the parts of all gradients; with buckets, only of gradients with
/// several parts.
pub fn declare_gradient_parts(
    program: &mut Program,
    shape: &NetworkShape,
    network: &ResNet18,
    buckets: Option<&GradientBuckets>,
) {
    for conv in network.block_convolutions() {
        let filter = weight_columns(network, conv) + 1;
        let parts = parts_of_weight_gradient(shape, network, conv);
        if buckets.is_some() && parts == 1 {
            continue;
        }
        let elements = parts * conv.window.output.channels * filter;
        program.add_scratch(
            gradient_parts_name(conv),
            MemoryPurpose::Gradients,
            elements * Dtype::F32.bytes(),
        );
    }
}

/// Converts extents to 64-bit words of a job.
fn extents_as_words<const N: usize>(sizes: [usize; N]) -> impl Iterator<Item = TableWord> {
    sizes.into_iter().map(|size| TableWord::Value(size as i64))
}

fn gradient_parts_name(conv: &ConvolutionLayer) -> String {
    format!("{}.parts", conv.name)
}

/// Number of parts in which the gradient of a weight is summed.
fn parts_of_weight_gradient(
    shape: &NetworkShape,
    network: &ResNet18,
    conv: &ConvolutionLayer,
) -> usize {
    let blocks =
        weight_columns(network, conv) / TILE_SIDE * (conv.window.output.channels / TILE_SIDE);
    // Rows of the GEMM are all time steps of an image at a pixel; for the stem a single step.
    let steps = if conv.weight == network.stem.weight { 1 } else { shape.t };
    let tiles = conv.window.output.pixel_count() * (shape.b * steps).div_ceil(TILE_SIDE);
    (tiles / MIN_ROW_TILES_PER_PART).clamp(1, MAX_BLOCKS_PER_WEIGHT.div_ceil(blocks))
}

/// Frames over which the gradient of a weight is summed.
struct SummedFrames {
    /// Name of the region of the frames that the convolution reads.
    frames: String,
    /// Index of the layer of neurons that receives the convolution's output.
    layer: usize,
    /// Extents of one frame.
    map: FeatureMap,
    steps: usize,
    fed: usize,
    kernel: usize,
    stride: usize,
    first_tap: usize,
}

/// Every convolution with the frames over which its gradient is summed. The stem's operand is the
/// same in every time step and was gathered before: for this kernel the stem is a convolution of
/// one pixel and one time step.
fn convolutions_with_frames<'a>(
    shape: &NetworkShape,
    network: &'a ResNet18,
) -> Vec<(&'a ConvolutionLayer, SummedFrames)> {
    let stem = &network.stem;
    let gathered =
        FeatureMap { side: stem.window.output.side, channels: padded_stem_columns(network) };
    let operand = SummedFrames {
        frames: "operand".to_owned(),
        layer: 0,
        map: gathered,
        steps: 1,
        fed: 1,
        kernel: 1,
        stride: 1,
        first_tap: 0,
    };
    let spikes = |conv: &ConvolutionLayer, frames: String, layer: usize| SummedFrames {
        frames,
        layer,
        map: conv.window.input,
        steps: shape.t,
        fed: shape.fed_time_steps(),
        kernel: conv.window.kernel,
        stride: conv.window.stride,
        first_tap: conv.window.taps_that_read_pixels().start,
    };
    let mut all = vec![(stem, operand)];
    for (number, block) in network.blocks.iter().enumerate() {
        let input = block_input_name(network, number);
        let (hidden, output) = (2 * number + 1, 2 * number + 2);
        all.push((&block.first, spikes(&block.first, input.clone(), hidden)));
        all.push((&block.second, spikes(&block.second, layer_spikes_name(hidden), output)));
        let shortcut = block.shortcut.as_ref();
        all.extend(shortcut.map(|conv| (conv, spikes(conv, input, output))));
    }
    all
}
