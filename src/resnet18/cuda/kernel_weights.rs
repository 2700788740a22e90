//! ResNet-18 parameters in the layouts of the kernels: weights in bf16, biases in fp32, divided by
//! the number of time steps over which they are fed.

use half::bf16;

use crate::resnet18::definition::ResNetParameters;
use crate::resnet18::network::{CLASSIFIER_CLASS_COUNT, ConvolutionLayer, ResNet18Layers};
use kernelgate::backend::program::{LaunchProgram, MemoryPurpose};
use kernelgate::workload::{Dtype, Tensors};

/// Number of columns of the stem's gathered GEMM operand: the elements of a filter, rounded up to a
/// multiple of 64.
pub fn stem_operand_columns(network: &ResNet18Layers) -> usize {
    network.stem.elements_per_filter().next_multiple_of(64)
}

/// A memory region for packed parameters: its name, its size and its contents.
pub struct PackedParameterRegion {
    pub region_name: String,
    pub region_bytes: usize,
    /// Parameters that the memory region contains, and their form.
    pub region_contents: PackedParameterSubset,
}

/// A subset of the ResNet-18 parameters, and the form in which a memory region stores it.
#[derive(Debug, Clone, Copy)]
pub enum PackedParameterSubset {
    /// A range of the columns of a weight matrix `[filters, depth]`, stored in bf16.
    WeightColumnsInBf16 {
        /// Index of the first element of the convolution's weight among all parameters.
        first_weight_index: usize,
        /// Number of rows (filters) of the convolution's weight matrix.
        filters: usize,
        /// Number of columns of the convolution's whole weight matrix.
        weight_matrix_columns: usize,
        /// Index of the first column of the weight matrix that the memory region stores.
        first_stored_column: usize,
        /// Number of weight columns that the memory region stores; columns past the end of the
        /// weight are zero.
        stored_columns: usize,
    },
    /// Parameters stored in fp32, divided by `parameter_divisor`, such as a bias divided by the
    /// number of time steps.
    DividedParametersInF32 {
        /// Index of the first parameter that the memory region stores, among all parameters.
        first_parameter_index: usize,
        /// Number of parameters that the memory region stores.
        parameter_count: usize,
        parameter_divisor: f32,
    },
}

impl PackedParameterSubset {
    /// Reads the parameters of a packed subset from the input `parameters` and packs them into the
    /// bytes of its memory region.
    pub fn pack_parameter_subset(self, inputs: &Tensors) -> Vec<u8> {
        let parameters = inputs.f32_elements("parameters");
        match self {
            Self::WeightColumnsInBf16 {
                first_weight_index: at,
                filters,
                weight_matrix_columns: depth,
                first_stored_column: first,
                stored_columns: columns,
            } => {
                let mut weight = vec![bf16::ZERO; filters * columns];
                let rows = parameters[at..at + filters * depth].chunks(depth);
                for (to, from) in weight.chunks_mut(columns).zip(rows) {
                    let pairs = to.iter_mut().zip(&from[first..]);
                    pairs.for_each(|(to, from)| *to = bf16::from_f32(*from));
                }
                bytemuck::cast_slice(&weight).to_vec()
            }
            Self::DividedParametersInF32 {
                first_parameter_index: at,
                parameter_count: count,
                parameter_divisor: divisor,
            } => {
                let shares = parameters[at..at + count].iter().map(|value| value / divisor);
                bytemuck::cast_slice(&shares.collect::<Vec<f32>>()).to_vec()
            }
        }
    }
}

/// Memory regions for the packed weights and biases of all convolutions and of the classifier.
pub fn regions_of_packed_parameters(
    shape: &ResNetParameters,
    network: &ResNet18Layers,
) -> Vec<PackedParameterRegion> {
    let steps = shape.time_steps_to_spread_image() as f32;
    let share = |name: String, at: usize, count: usize, divisor: f32| PackedParameterRegion {
        region_name: name,
        region_bytes: count * Dtype::F32.bytes_per_element(),
        region_contents: PackedParameterSubset::DividedParametersInF32 {
            first_parameter_index: at,
            parameter_count: count,
            parameter_divisor: divisor,
        },
    };
    let mut regions = Vec::new();
    for conv in network.all_convolutions() {
        let (filters, columns) =
            (conv.window.output_extents.channels, packed_weight_columns(network, conv));
        let first =
            conv.window.range_of_taps_that_read_pixels().start * conv.window.input_extents.channels;
        let (at, depth) = (conv.first_weight_index, conv.elements_per_filter());
        regions.push(PackedParameterRegion {
            region_name: name_of_weight_region(conv),
            region_bytes: filters * columns * Dtype::Bf16.bytes_per_element(),
            region_contents: PackedParameterSubset::WeightColumnsInBf16 {
                first_weight_index: at,
                filters,
                weight_matrix_columns: depth,
                first_stored_column: first,
                stored_columns: columns,
            },
        });
        let divisor =
            if conv.first_weight_index == network.stem.first_weight_index { 1.0 } else { steps };
        regions.push(share(
            name_of_bias_per_step_region(conv),
            conv.index_of_first_bias(),
            filters,
            divisor,
        ));
    }
    let weights = CLASSIFIER_CLASS_COUNT * network.last_feature_map().channels;
    let at = network.first_classifier_weight_index;
    regions.push(share("fc.weight".to_owned(), at, weights, 1.0));
    regions.push(share("fc.bias".to_owned(), at + weights, CLASSIFIER_CLASS_COUNT, steps));
    regions
}

/// Adds every memory region of packed parameters to the program; the contents are packed when the
/// program is loaded.
pub fn declare_packed_parameter_regions(
    program: &mut LaunchProgram,
    shape: &ResNetParameters,
    network: &ResNet18Layers,
) {
    for PackedParameterRegion { region_name: name, region_bytes: bytes, region_contents: part } in
        regions_of_packed_parameters(shape, network)
    {
        program.add_packed_from_inputs(name, MemoryPurpose::Weights, bytes, move |inputs| {
            part.pack_parameter_subset(inputs)
        });
    }
}

/// Name of the memory region of a convolution's weight: bf16 `[out, taps·in]` of the filter taps
/// that read a pixel. The region of the stem's weight has [`stem_operand_columns`] columns, padded
/// with zeros.
pub fn name_of_weight_region(conv: &ConvolutionLayer) -> String {
    format!("{}.weight", conv.layer_name)
}

/// Name of the memory region that stores a convolution's weight in tiles of 32 filters by 64
/// columns, `[out/32, taps·in/64, 32, 64]`. The 16-byte chunks of the rows of a weight tile are
/// swizzled, so that a tile copied to shared memory has the layout that tensor cores read.
pub fn name_of_tiled_weight_region(conv: &ConvolutionLayer) -> String {
    format!("{}.tiles", conv.layer_name)
}

/// Rearranges a packed bf16 weight into tiles of 32 filters by 64 columns with swizzled rows.
pub fn rearrange_weight_into_swizzled_tiles(weight: &[u8], columns: usize) -> Vec<u8> {
    const FILTERS_PER_TILE: usize = 32;
    const TILE_ROW_BYTES: usize = 128;
    const CHUNK_BYTES: usize = 16;
    let mut tiles = vec![0; weight.len()];
    let row_bytes = columns * Dtype::Bf16.bytes_per_element();
    for (number, chunk) in weight.chunks(CHUNK_BYTES).enumerate() {
        let (filter, at) = (number * CHUNK_BYTES / row_bytes, number * CHUNK_BYTES % row_bytes);
        let tile = filter / FILTERS_PER_TILE * (row_bytes / TILE_ROW_BYTES) + at / TILE_ROW_BYTES;
        let swizzled = (at % TILE_ROW_BYTES / CHUNK_BYTES) ^ (filter % 8);
        let to = (tile * FILTERS_PER_TILE + filter % FILTERS_PER_TILE) * TILE_ROW_BYTES
            + swizzled * CHUNK_BYTES;
        tiles[to..to + CHUNK_BYTES].copy_from_slice(chunk);
    }
    tiles
}

/// Arranges the stem's packed weight as B fragments of `mma.m16n8k16`, in the memory layout
/// `[out/8, 7, lane, 4]` of words with two columns each. In the fragments, a filter of the stem has
/// 7 rows of 8 pixels of 4 channels; the last pixel and the last channel are zero padding. Each
/// filter row has two MMA steps of 16 columns, and a lane's four words belong to both steps.
pub fn arrange_stem_weight_as_mma_fragments(weight: &[u8], columns: usize) -> Vec<u8> {
    const STEM_KERNEL_SIZE: usize = 7;
    const IMAGE_CHANNELS: usize = 3;
    let weight: &[u16] = bytemuck::cast_slice(weight);
    let mut words = Vec::with_capacity(weight.len() / columns * STEM_KERNEL_SIZE * 8 * 4);
    for filters in weight.chunks(8 * columns) {
        for row in 0..STEM_KERNEL_SIZE {
            for lane in 0..32 {
                for column in [0, 8, 16, 24].map(|first| first + lane % 4 * 2) {
                    words.extend([column, column + 1].map(|at| {
                        let (pixel, channel) = (at / 4, at % 4);
                        let tap = (row * STEM_KERNEL_SIZE + pixel) * IMAGE_CHANNELS + channel;
                        let exists = pixel < STEM_KERNEL_SIZE && channel < IMAGE_CHANNELS;
                        if exists { filters[lane / 4 * columns + tap] } else { 0 }
                    }));
                }
            }
        }
    }
    bytemuck::cast_slice(&words).to_vec()
}

/// Name of the memory region of the part of a convolution's bias that each time step adds,
/// `bias/steps`. The stem's region holds the whole bias, because the stem's sum is divided by the
/// number of steps after the bias is added.
pub fn name_of_bias_per_step_region(conv: &ConvolutionLayer) -> String {
    format!("{}.bias", conv.layer_name)
}

/// Number of columns of a convolution's weight in its packed memory region.
pub fn packed_weight_columns(network: &ResNet18Layers, conv: &ConvolutionLayer) -> usize {
    let is_stem = conv.first_weight_index == network.stem.first_weight_index;
    if is_stem { stem_operand_columns(network) } else { weight_columns_that_read_pixels(conv) }
}

/// Number of columns of a convolution's weight that belong to filter taps which read a pixel
/// somewhere in the image.
pub fn weight_columns_that_read_pixels(conv: &ConvolutionLayer) -> usize {
    conv.window.range_of_taps_that_read_pixels().len() * conv.window.input_extents.channels
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Position of an element of operand B of `mma.m16n8k16`, given its column in the MMA step and
    /// its filter: lane, word, half of the word (PTX ISA).
    fn lane_word_and_half_of_b_fragment(column: usize, filter: usize) -> (usize, usize, usize) {
        (filter * 4 + column % 8 / 2, column / 8, column % 2)
    }

    #[test]
    fn stem_fragments_hold_each_weight_at_its_mma_lane() {
        let (filters, columns) = (16, 192);
        let weight: Vec<u16> = (0..filters * columns).map(|i| i as u16 + 1).collect();
        let fragments =
            arrange_stem_weight_as_mma_fragments(bytemuck::cast_slice(&weight), columns);
        let fragments: &[u16] = bytemuck::cast_slice(&fragments);
        assert_eq!(fragments.len(), filters * 224);
        let mut nonzero = 0;
        for filter in 0..filters {
            for (row, pixel, channel) in
                (0..224).map(|column| (column / 32, column / 4 % 8, column % 4))
            {
                let step = pixel / 4;
                let (lane, word, half) =
                    lane_word_and_half_of_b_fragment(pixel % 4 * 4 + channel, filter % 8);
                let at = (((filter / 8 * 7 + row) * 32 + lane) * 4 + step * 2 + word) * 2 + half;
                let tap = (row * 7 + pixel) * 3 + channel;
                let expected =
                    if pixel < 7 && channel < 3 { weight[filter * columns + tap] } else { 0 };
                assert_eq!(fragments[at], expected, "{filter} {row} {pixel} {channel}");
                nonzero += usize::from(expected > 0);
            }
        }
        assert_eq!(nonzero, filters * 147);
    }
}
