//! Parameters in the layouts of the kernels: weights in bf16, biases in fp32, divided by the number
//! of time steps over which they are spread.

use half::bf16;

use crate::resnet18::definition::NetworkShape;
use crate::resnet18::network::{CLASS_COUNT, ConvolutionLayer, ResNet18};
use kernelgate::backend::program::{MemoryPurpose, Program};
use kernelgate::workload::{Dtype, Tensors};

/// Number of columns of the stem's gathered operand: the columns of its filters, rounded up to
/// tiles of 64.
pub fn padded_stem_columns(network: &ResNet18) -> usize {
    network.stem.filter_elements().next_multiple_of(64)
}

/// A region of device memory with packed parameters.
pub struct PackedRegion {
    pub name: String,
    pub bytes: usize,
    /// Contents of the region.
    pub part: ParameterPart,
}

/// A subset of the parameters, and the form in which a region stores it.
#[derive(Debug, Clone, Copy)]
pub enum ParameterPart {
    /// A range of the columns of a weight `[filters, depth]`, in bf16.
    Weight {
        /// Index of the first element of the weight among the parameters.
        at: usize,
        /// Number of rows of the weight.
        filters: usize,
        /// Number of columns of the weight.
        depth: usize,
        /// Index of the first column that the region stores.
        first: usize,
        /// Number of columns that the region stores; those past the end of a row are zero.
        columns: usize,
    },
    /// Parameters in fp32, divided by `divisor`.
    Share {
        /// Index of the first parameter that the region stores.
        at: usize,
        /// Number of parameters in the region.
        count: usize,
        divisor: f32,
    },
}

impl ParameterPart {
    /// Packs the parameters into the bytes of the region.
    pub fn packed_bytes(self, inputs: &Tensors) -> Vec<u8> {
        let parameters = inputs.f32("parameters");
        match self {
            Self::Weight { at, filters, depth, first, columns } => {
                let mut weight = vec![bf16::ZERO; filters * columns];
                let rows = parameters[at..at + filters * depth].chunks(depth);
                for (to, from) in weight.chunks_mut(columns).zip(rows) {
                    let pairs = to.iter_mut().zip(&from[first..]);
                    pairs.for_each(|(to, from)| *to = bf16::from_f32(*from));
                }
                bytemuck::cast_slice(&weight).to_vec()
            }
            Self::Share { at, count, divisor } => {
                let shares = parameters[at..at + count].iter().map(|value| value / divisor);
                bytemuck::cast_slice(&shares.collect::<Vec<f32>>()).to_vec()
            }
        }
    }
}

/// All regions of packed parameters.
pub fn packed_regions(shape: &NetworkShape, network: &ResNet18) -> Vec<PackedRegion> {
    let steps = shape.spread_steps() as f32;
    let share = |name: String, at: usize, count: usize, divisor: f32| PackedRegion {
        name,
        bytes: count * Dtype::F32.bytes(),
        part: ParameterPart::Share { at, count, divisor },
    };
    let mut regions = Vec::new();
    for conv in network.block_convolutions() {
        let (filters, columns) = (conv.window.output.channels, weight_columns(network, conv));
        let first = conv.window.taps_that_read_pixels().start * conv.window.input.channels;
        let (at, depth) = (conv.weight, conv.filter_elements());
        regions.push(PackedRegion {
            name: weight_region_name(conv),
            bytes: filters * columns * Dtype::Bf16.bytes(),
            part: ParameterPart::Weight { at, filters, depth, first, columns },
        });
        let divisor = if conv.weight == network.stem.weight { 1.0 } else { steps };
        regions.push(share(
            bias_share_region_name(conv),
            conv.first_bias_element(),
            filters,
            divisor,
        ));
    }
    let weights = CLASS_COUNT * network.last_map().channels;
    let at = network.classifier;
    regions.push(share("fc.weight".to_owned(), at, weights, 1.0));
    regions.push(share("fc.bias".to_owned(), at + weights, CLASS_COUNT, steps));
    regions
}

/// Declares every region of packed parameters, with their contents.
pub fn declare_packed_parameters(program: &mut Program, shape: &NetworkShape, network: &ResNet18) {
    for PackedRegion { name, bytes, part } in packed_regions(shape, network) {
        program.add_packed(name, MemoryPurpose::Weights, bytes, move |inputs| {
            part.packed_bytes(inputs)
        });
    }
}

/// Name of the region of a convolution's weight: bf16 `[out, taps·in]` of the live taps. The stem's
/// weight is padded to [`padded_stem_columns`].
pub fn weight_region_name(conv: &ConvolutionLayer) -> String {
    format!("{}.weight", conv.name)
}

/// Name of the region that stores a weight in tiles of 32 filters by 64 columns, `[out/32,
/// taps·in/64, 32, 64]`. The 16-byte chunks of a tile's rows are swizzled: a copied tile has the
/// layout that tensor cores read.
pub fn tiled_weight_region_name(conv: &ConvolutionLayer) -> String {
    format!("{}.tiles", conv.name)
}

/// Rearranges a packed weight into tiles.
pub fn tiled_weight(weight: &[u8], columns: usize) -> Vec<u8> {
    const FILTERS_PER_TILE: usize = 32;
    const TILE_ROW_BYTES: usize = 128;
    const CHUNK_BYTES: usize = 16;
    let mut tiles = vec![0; weight.len()];
    let row_bytes = columns * Dtype::Bf16.bytes();
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

/// Arranges the stem's packed weight as B fragments of `mma.m16n8k16`: Layout of the packed weight:
/// `[out/8, 7, lane, 4]` words of two columns each. A filter's columns are 7 rows of 8 pixels of 4
/// channels, of which the last pixel and the last channel are zero. A row is two steps of 16
/// columns, and a lane has the words of both steps.
pub fn stem_weight_fragments(weight: &[u8], columns: usize) -> Vec<u8> {
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

/// Name of the region of the bias that each time step adds, `bias/steps`. For the stem the packed
/// bias is the whole bias, because the stem's sum is divided later.
pub fn bias_share_region_name(conv: &ConvolutionLayer) -> String {
    format!("{}.bias", conv.name)
}

/// Number of columns of a weight's region.
pub fn weight_columns(network: &ResNet18, conv: &ConvolutionLayer) -> usize {
    let is_stem = conv.weight == network.stem.weight;
    if is_stem { padded_stem_columns(network) } else { live_weight_columns(conv) }
}

/// Number of columns of the taps that read a pixel somewhere.
pub fn live_weight_columns(conv: &ConvolutionLayer) -> usize {
    conv.window.taps_that_read_pixels().len() * conv.window.input.channels
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Position of a B element, given its column in the step and its filter, in `mma.m16n8k16`:
    /// lane, word of the step, half of the word (PTX ISA, "Matrix Fragments for mma.m16n8k16").
    fn fragment_position(column: usize, filter: usize) -> (usize, usize, usize) {
        (filter * 4 + column % 8 / 2, column / 8, column % 2)
    }

    #[test]
    fn packed_weight_fragments_hold_each_weight_at_its_lane() {
        let (filters, columns) = (16, 192);
        let weight: Vec<u16> = (0..filters * columns).map(|i| i as u16 + 1).collect();
        let fragments = stem_weight_fragments(bytemuck::cast_slice(&weight), columns);
        let fragments: &[u16] = bytemuck::cast_slice(&fragments);
        assert_eq!(fragments.len(), filters * 224);
        let mut nonzero = 0;
        for filter in 0..filters {
            for (row, pixel, channel) in
                (0..224).map(|column| (column / 32, column / 4 % 8, column % 4))
            {
                let step = pixel / 4;
                let (lane, word, half) = fragment_position(pixel % 4 * 4 + channel, filter % 8);
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
