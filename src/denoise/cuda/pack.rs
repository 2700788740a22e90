//! Packs denoising weights, keys and values into the memory layouts of the kernels, once on the
//! host while a case is prepared.
//!
//! Weights of the fused GEMMs (`kernels/denoise/skinny_gemm.cuh`) are `[layer][tile of 64
//! columns][k / group][group rows of k][64]`, with 16-byte chunks of eight columns XOR-swizzled by
//! row. A group of a packed tile is up to 64 rows of the slice of k that one block of the GEMM's
//! cluster handles. Weights of the persistent kernel (`kernels/denoise/units.cuh`) are `[layer][k /
//! 64][columns / 8][8 columns][64 of k]`, with 16-byte chunks of eight k XOR-swizzled by column.
//! The cached keys and values of the persistent kernel are packed as 16 x 16 fragments of
//! tensor-core operands.

mod codes;

use super::writer::RegionNameAndBytes;
use crate::denoise::definition::LayerWeightFormat;
use crate::denoise::fp8::{Fp8MatrixStack, quantise_stack_to_fp8};
use crate::denoise::int4::{self, Int4MatrixStack};
use crate::denoise::model::ExpertDimensions;
use crate::parallel;
use kernelgate::workload::{Dtype, Tensors};

/// Number of blocks in a cluster among which a fused GEMM splits its inner dimension k. The five k
/// splits are, in order, for q, k and v together, the attention output projection, gate and up, the
/// down projection, and the time and style GEMMs.
pub const QKV_PROJECTION_K_SPLIT: usize = 4;
pub const OUTPUT_PROJECTION_K_SPLIT: usize = 8;
pub const GATE_UP_PROJECTION_K_SPLIT: usize = 2;
pub const DOWN_PROJECTION_K_SPLIT: usize = 8;
pub const TIME_AND_STYLE_PROJECTION_K_SPLIT: usize = 4;

/// Number of columns in a tile of packed weights.
pub const PACKED_TILE_COLUMNS: usize = 64;
const COLUMNS_PER_PACKED_CHUNK: usize = 8;
const BYTES_PER_PACKED_CHUNK: usize = 16;

/// Order of the columns of a weight matrix in the packed memory region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PackedColumnOrder {
    /// Packed columns keep their original order.
    OriginalColumnOrder,
    /// Heads of q, k and v with this number of columns, ordered for RoPE. Each eight columns are
    /// followed by the eight columns half a head further, with which RoPE rotates them.
    RopePairsInHeadsOfColumns(usize),
    /// Each eight columns of the gate matrix are followed by the same eight columns of the up
    /// matrix.
    InterleavedGateAndUp,
}

/// Describes how one or several weight inputs are packed into one memory region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightPacking {
    /// Name of the memory region that holds the packed weights.
    pub packed_region_name: &'static str,
    /// Names of the weight inputs that the packed region contains, each `[layers][k][columns]`.
    pub weight_input_names: &'static [&'static str],
    /// Number of columns of each weight input in this packing.
    columns_per_weight_input: Vec<usize>,
    /// Number of rows of each weight input: the inner dimension k of its GEMM.
    rows_per_weight_input: usize,
    layers: usize,
    column_order: PackedColumnOrder,
    layout: PackedWeightLayout,
}

/// Memory layout of packed weights, as a kernel reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PackedWeightLayout {
    /// Tiles of 64 bf16 columns, with k split among this number of blocks.
    Bf16TilesWithKSplit(usize),
    /// Panels of 64 rows of k in bf16, in units of eight columns.
    Bf16Panels,
    /// Panels of weights quantised to fp8, in units of eight columns.
    Fp8Panels,
    /// Panels of weights quantised to int4, in units of eight columns.
    Int4Panels,
}

/// Weight packings of a model for the persistent kernel: layer and style matrices as panels (layer
/// matrices in the format `weights`), the time matrices as tiles.
pub fn weight_packings_for_persistent_kernel(
    model: &ExpertDimensions,
    weights: LayerWeightFormat,
) -> Vec<WeightPacking> {
    let mut packings = weight_packings_for_fused_kernels(model);
    for packing in &mut packings {
        if LAYER_WEIGHT_NAMES.contains(&packing.packed_region_name) {
            packing.layout = match weights {
                LayerWeightFormat::SameDtypeAsActivations => PackedWeightLayout::Bf16Panels,
                LayerWeightFormat::Fp8 => PackedWeightLayout::Fp8Panels,
                LayerWeightFormat::Int4 => PackedWeightLayout::Int4Panels,
            };
        } else if STYLE_WEIGHT_NAMES.contains(&packing.packed_region_name) {
            packing.layout = PackedWeightLayout::Bf16Panels;
        }
    }
    packings
}

const STYLE_WEIGHT_NAMES: [&str; 3] = ["style1", "style2", "final_style"];
const LAYER_WEIGHT_NAMES: [&str; 4] = ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"];

/// Weight packings of a model for the fused kernels: every matrix as bf16 tiles.
pub fn weight_packings_for_fused_kernels(model: &ExpertDimensions) -> Vec<WeightPacking> {
    let ExpertDimensions {
        model_width: width,
        layer_count: layers,
        feed_forward_width: mlp,
        query_heads: heads,
        head_dim,
        ..
    } = *model;
    let queries = heads * head_dim;
    let plain = |name, inputs, depth, columns, split, layers| WeightPacking {
        packed_region_name: name,
        weight_input_names: inputs,
        columns_per_weight_input: vec![columns],
        rows_per_weight_input: depth,
        layers,
        column_order: PackedColumnOrder::OriginalColumnOrder,
        layout: PackedWeightLayout::Bf16TilesWithKSplit(split),
    };
    vec![
        WeightPacking {
            packed_region_name: "qkv_proj",
            weight_input_names: &["q_proj", "k_proj", "v_proj"],
            columns_per_weight_input: vec![queries, head_dim, head_dim],
            rows_per_weight_input: width,
            layers,
            column_order: PackedColumnOrder::RopePairsInHeadsOfColumns(head_dim),
            layout: PackedWeightLayout::Bf16TilesWithKSplit(QKV_PROJECTION_K_SPLIT),
        },
        WeightPacking {
            packed_region_name: "gate_up_proj",
            weight_input_names: &["gate_proj", "up_proj"],
            columns_per_weight_input: vec![mlp, mlp],
            rows_per_weight_input: width,
            layers,
            column_order: PackedColumnOrder::InterleavedGateAndUp,
            layout: PackedWeightLayout::Bf16TilesWithKSplit(GATE_UP_PROJECTION_K_SPLIT),
        },
        plain("o_proj", &["o_proj"], queries, width, OUTPUT_PROJECTION_K_SPLIT, layers),
        plain("down_proj", &["down_proj"], mlp, width, DOWN_PROJECTION_K_SPLIT, layers),
        plain("time_in", &["time_in"], width, width, TIME_AND_STYLE_PROJECTION_K_SPLIT, 1),
        plain("time_out", &["time_out"], width, width, TIME_AND_STYLE_PROJECTION_K_SPLIT, 1),
        plain("style1", &["style1"], width, 3 * width, TIME_AND_STYLE_PROJECTION_K_SPLIT, layers),
        plain("style2", &["style2"], width, 3 * width, TIME_AND_STYLE_PROJECTION_K_SPLIT, layers),
        plain(
            "final_style",
            &["final_style"],
            width,
            3 * width,
            TIME_AND_STYLE_PROJECTION_K_SPLIT,
            1,
        ),
    ]
}

impl WeightPacking {
    /// Name and size in bytes of the memory region that holds these packed weights.
    pub fn name_and_bytes_of_packed_region(&self) -> RegionNameAndBytes {
        (self.packed_region_name, self.layers * self.packed_bytes_per_layer())
    }

    fn packed_bytes_per_layer(&self) -> usize {
        let elements =
            self.rows_per_weight_input * self.columns_per_weight_input.iter().sum::<usize>();
        match self.layout {
            PackedWeightLayout::Fp8Panels => {
                elements / (COLUMNS_PER_PACKED_CHUNK * PACKED_TILE_COLUMNS) * codes::FP8_UNIT_BYTES
            }
            PackedWeightLayout::Int4Panels => {
                elements / (COLUMNS_PER_PACKED_CHUNK * PACKED_TILE_COLUMNS) * codes::INT4_UNIT_BYTES
            }
            _ => elements * Dtype::Bf16.bytes_per_element(),
        }
    }

    /// Index of the weight input and its first column from which packed chunk `chunk` of eight
    /// columns is copied.
    fn input_and_column_of_packed_chunk(&self, chunk: usize) -> (usize, usize) {
        match self.column_order {
            PackedColumnOrder::OriginalColumnOrder => (0, chunk * COLUMNS_PER_PACKED_CHUNK),
            PackedColumnOrder::InterleavedGateAndUp => {
                (chunk % 2, chunk / 2 * COLUMNS_PER_PACKED_CHUNK)
            }
            PackedColumnOrder::RopePairsInHeadsOfColumns(head) => {
                let (of_head, in_head) = (
                    chunk / (head / COLUMNS_PER_PACKED_CHUNK),
                    chunk % (head / COLUMNS_PER_PACKED_CHUNK),
                );
                let first = of_head * head
                    + in_head % 2 * (head / 2)
                    + in_head / 2 * COLUMNS_PER_PACKED_CHUNK;
                match first.checked_sub(self.columns_per_weight_input[0]) {
                    None => (0, first),
                    Some(first) if first < head => (1, first),
                    Some(first) => (2, first - head),
                }
            }
        }
    }

    /// Packs the weight inputs into this packing's layout and returns the packed bytes.
    pub fn pack_weight_inputs(&self, tensors: &Tensors) -> Vec<u8> {
        let inputs: Vec<&[u8]> =
            self.weight_input_names.iter().map(|name| tensors.tensor(name).as_bytes()).collect();
        match self.layout {
            // Each group of rows that are packed together has up to 64 rows of the slice of k that
            // one block multiplies.
            PackedWeightLayout::Bf16TilesWithKSplit(split) => self.pack_bf16_tiles(
                &inputs,
                ((self.rows_per_weight_input / 16).div_ceil(split) * 16).min(PACKED_TILE_COLUMNS),
            ),
            PackedWeightLayout::Bf16Panels => self.pack_bf16_panels(&inputs),
            PackedWeightLayout::Fp8Panels => self.quantise_and_pack_fp8_panels(tensors),
            PackedWeightLayout::Int4Panels => self.quantise_and_pack_int4_panels(tensors),
        }
    }

    /// Returns the 16 bytes of packed chunk `chunk` (eight bf16 columns) at row `k` of a layer's
    /// weights.
    fn source_bytes_of_packed_chunk<'a>(
        &self,
        inputs: &[&'a [u8]],
        layer: usize,
        k: usize,
        chunk: usize,
    ) -> &'a [u8] {
        let (input, column) = self.input_and_column_of_packed_chunk(chunk);
        let from = ((layer * self.rows_per_weight_input + k)
            * self.columns_per_weight_input[input]
            + column)
            * Dtype::Bf16.bytes_per_element();
        &inputs[input][from..from + BYTES_PER_PACKED_CHUNK]
    }

    fn pack_bf16_tiles(&self, inputs: &[&[u8]], rows_of_k_per_group: usize) -> Vec<u8> {
        let row_bytes = PACKED_TILE_COLUMNS * Dtype::Bf16.bytes_per_element();
        let mut packed = vec![0; self.layers * self.packed_bytes_per_layer()];
        let tiles = self.packed_bytes_per_layer() / (self.rows_per_weight_input * row_bytes);
        // Each parallel CPU task packs one tile of 64 columns, with all rows of k.
        parallel::process_chunks_in_parallel(
            &mut packed,
            self.rows_per_weight_input * row_bytes,
            &|index, to| {
                let (layer, tile) = (index / tiles, index % tiles);
                for (k, to) in to.chunks_exact_mut(row_bytes).enumerate() {
                    for chunk in 0..PACKED_TILE_COLUMNS / COLUMNS_PER_PACKED_CHUNK {
                        let at = (chunk ^ (k % rows_of_k_per_group % 8)) * BYTES_PER_PACKED_CHUNK;
                        to[at..at + BYTES_PER_PACKED_CHUNK].copy_from_slice(
                            self.source_bytes_of_packed_chunk(
                                inputs,
                                layer,
                                k,
                                tile * (PACKED_TILE_COLUMNS / COLUMNS_PER_PACKED_CHUNK) + chunk,
                            ),
                        );
                    }
                }
            },
        );
        packed
    }

    fn pack_bf16_panels(&self, inputs: &[&[u8]]) -> Vec<u8> {
        let element = Dtype::Bf16.bytes_per_element();
        let panels = self.rows_per_weight_input / PACKED_TILE_COLUMNS;
        let mut packed = vec![0; self.layers * self.packed_bytes_per_layer()];
        parallel::process_chunks_in_parallel(
            &mut packed,
            self.packed_bytes_per_layer() / panels,
            &|index, to| {
                let (layer, panel) = (index / panels, index % panels);
                for (unit, to) in to
                    .chunks_exact_mut(COLUMNS_PER_PACKED_CHUNK * PACKED_TILE_COLUMNS * element)
                    .enumerate()
                {
                    for k in 0..PACKED_TILE_COLUMNS {
                        let from = self.source_bytes_of_packed_chunk(
                            inputs,
                            layer,
                            panel * PACKED_TILE_COLUMNS + k,
                            unit,
                        );
                        for (column, from) in from.chunks_exact(element).enumerate() {
                            let at = (column * PACKED_TILE_COLUMNS
                                + ((k / COLUMNS_PER_PACKED_CHUNK) ^ column)
                                    * COLUMNS_PER_PACKED_CHUNK
                                + k % COLUMNS_PER_PACKED_CHUNK)
                                * element;
                            to[at..at + element].copy_from_slice(from);
                        }
                    }
                }
            },
        );
        packed
    }

    fn quantise_and_pack_fp8_panels(&self, tensors: &Tensors) -> Vec<u8> {
        const {
            assert!(
                codes::COLUMNS_PER_QUANTISED_UNIT == COLUMNS_PER_PACKED_CHUNK
                    && codes::K_ROWS_PER_QUANTISED_UNIT == PACKED_TILE_COLUMNS
            )
        };
        let inputs: Vec<Fp8MatrixStack> = self
            .weight_input_names
            .iter()
            .map(|name| quantise_stack_to_fp8(tensors.tensor(name)))
            .collect();
        self.pack_panels_of_units(codes::FP8_UNIT_BYTES, |layer, row, input, first, to| {
            let (Fp8MatrixStack { e4m3_codes: codes, column_exponents: exponents }, columns) =
                (&inputs[input], self.columns_per_weight_input[input]);
            let row = layer * self.rows_per_weight_input + row;
            let of_k = |k| &codes[(row + k) * columns + first..][..COLUMNS_PER_PACKED_CHUNK];
            codes::write_packed_fp8_unit(
                to,
                of_k,
                &exponents[layer * columns + first..][..COLUMNS_PER_PACKED_CHUNK],
            );
        })
    }

    fn quantise_and_pack_int4_panels(&self, tensors: &Tensors) -> Vec<u8> {
        const { assert!(int4::INT4_SCALE_GROUP_ELEMENTS.is_multiple_of(PACKED_TILE_COLUMNS)) };
        let inputs: Vec<Int4MatrixStack> = self
            .weight_input_names
            .iter()
            .map(|name| int4::quantise_stack_to_int4(tensors.tensor(name)))
            .collect();
        self.pack_panels_of_units(codes::INT4_UNIT_BYTES, |layer, row, input, first, to| {
            let (Int4MatrixStack { int4_codes: codes, group_scales: scales }, columns) =
                (&inputs[input], self.columns_per_weight_input[input]);
            let group = layer * int4::int4_groups_per_column(self.rows_per_weight_input)
                + row / int4::INT4_SCALE_GROUP_ELEMENTS;
            let row = layer * self.rows_per_weight_input + row;
            let of_k = |k| &codes[(row + k) * columns + first..][..COLUMNS_PER_PACKED_CHUNK];
            codes::write_packed_int4_unit(
                to,
                of_k,
                &scales[group * columns + first..][..COLUMNS_PER_PACKED_CHUNK],
            );
        })
    }

    /// Packs panels of 64 rows of k as units of `bytes` bytes, each with eight columns. The
    /// function `write` fills one unit; it gets the layer, the first row of k, the index of the
    /// weight input, the first column, and the unit's bytes.
    fn pack_panels_of_units(
        &self,
        bytes: usize,
        write: impl Fn(usize, usize, usize, usize, &mut [u8]) + Sync,
    ) -> Vec<u8> {
        let panels = self.rows_per_weight_input / PACKED_TILE_COLUMNS;
        let mut packed = vec![0; self.layers * self.packed_bytes_per_layer()];
        parallel::process_chunks_in_parallel(
            &mut packed,
            self.packed_bytes_per_layer() / panels,
            &|index, to| {
                let (layer, panel) = (index / panels, index % panels);
                for (unit, to) in to.chunks_exact_mut(bytes).enumerate() {
                    let (input, first) = self.input_and_column_of_packed_chunk(unit);
                    write(layer, panel * PACKED_TILE_COLUMNS, input, first, to);
                }
            },
        );
        packed
    }
}

/// Maximum number of keys (prefix and action tokens) of the persistent kernel; each layer's
/// fragments have space for so many keys.
pub const MAX_PERSISTENT_KEYS: usize = 1024;

/// Packs cached keys or values `[layers][prefix][head_dim]` as `[layers][1024 / 16][head_dim /
/// 16][16 x 16 as a fragment]`, with zeros after the prefix. The rows of a packed fragment are keys
/// or, if `transposed` is set as for cached values, columns of head_dim.
pub fn pack_cache_as_tensor_core_fragments(
    cache: &[u8],
    layers: usize,
    head_dim: usize,
    transposed: bool,
) -> Vec<u8> {
    const FRAGMENT_ROWS_AND_COLUMNS: usize = 16;
    let element = Dtype::Bf16.bytes_per_element();
    let layer_bytes = MAX_PERSISTENT_KEYS * head_dim * element;
    let prefix = cache.len() / (layers * head_dim * element);
    let mut packed = vec![0; layers * layer_bytes];
    parallel::process_chunks_in_parallel(&mut packed, layer_bytes, &|layer, to| {
        for key in 0..prefix {
            for column in 0..head_dim {
                let (row, k) = if transposed { (column, key) } else { (key, column) };
                let block = key / FRAGMENT_ROWS_AND_COLUMNS
                    * (head_dim / FRAGMENT_ROWS_AND_COLUMNS)
                    + column / FRAGMENT_ROWS_AND_COLUMNS;
                let at = (block * FRAGMENT_ROWS_AND_COLUMNS * FRAGMENT_ROWS_AND_COLUMNS
                    + element_offset_in_fragment(
                        row % FRAGMENT_ROWS_AND_COLUMNS,
                        k % FRAGMENT_ROWS_AND_COLUMNS,
                    ))
                    * element;
                let from = ((layer * prefix + key) * head_dim + column) * element;
                to[at..at + element].copy_from_slice(&cache[from..from + element]);
            }
        }
    });
    packed
}

/// Offset in elements, within a packed 16 x 16 tensor-core fragment, of the element at a row and a
/// k. A lane's eight elements are consecutive: two neighbours along k in a row, the same k eight
/// rows further, and both rows again eight k further.
const fn element_offset_in_fragment(row: usize, k: usize) -> usize {
    (row % 8 * 4 + k % 8 / 2) * 8 + (row / 8 + k / 8 * 2) * 2 + k % 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::denoise::fp8::round_tensor_through_fp8;
    use crate::denoise::model::{PI05_EXPERT_MODEL, TINY_TEST_MODEL};
    use half::bf16;

    #[test]
    fn every_weight_column_is_packed_exactly_once() {
        for model in [PI05_EXPERT_MODEL, TINY_TEST_MODEL] {
            for packing in weight_packings_for_fused_kernels(&model) {
                let columns: usize = packing.columns_per_weight_input.iter().sum();
                let mut chunks: Vec<_> = (0..columns / COLUMNS_PER_PACKED_CHUNK)
                    .map(|chunk| packing.input_and_column_of_packed_chunk(chunk))
                    .collect();
                chunks.sort_unstable();
                let all: Vec<_> = packing
                    .columns_per_weight_input
                    .iter()
                    .enumerate()
                    .flat_map(|(input, &columns)| {
                        (0..columns)
                            .step_by(COLUMNS_PER_PACKED_CHUNK)
                            .map(move |column| (input, column))
                    })
                    .collect();
                assert_eq!(chunks, all, "{} of {}", packing.packed_region_name, model.model_name);
                assert_eq!(columns % PACKED_TILE_COLUMNS, 0, "{}", packing.packed_region_name);
            }
        }
    }

    #[test]
    fn columns_that_rotate_or_multiply_together_are_packed_as_neighbours() {
        let packings = weight_packings_for_fused_kernels(&PI05_EXPERT_MODEL);
        let source = |name: &str, chunk| {
            packings
                .iter()
                .find(|packing| packing.packed_region_name == name)
                .unwrap()
                .input_and_column_of_packed_chunk(chunk)
        };
        // The packed chunks in this test are those of the second head of q, then those of k and v
        // after the eight heads of q.
        assert_eq!(
            [32, 33, 34].map(|chunk| source("qkv_proj", chunk)),
            [(0, 256), (0, 256 + 128), (0, 256 + 8)]
        );
        assert_eq!(
            [256, 257, 288, 319].map(|chunk| source("qkv_proj", chunk)),
            [(1, 0), (1, 128), (2, 0), (2, 248)]
        );
        assert_eq!([0, 1, 2].map(|chunk| source("gate_up_proj", chunk)), [(0, 0), (1, 0), (0, 8)]);
    }

    #[test]
    fn panels_hold_64_values_of_k_of_each_column_together() {
        let packing = WeightPacking {
            packed_region_name: "o_proj",
            weight_input_names: &["o_proj"],
            columns_per_weight_input: vec![16],
            rows_per_weight_input: 128,
            layers: 2,
            column_order: PackedColumnOrder::OriginalColumnOrder,
            layout: PackedWeightLayout::Bf16Panels,
        };
        let number =
            |layer: usize, k: usize, column: usize| ((layer * 128 + k) * 16 + column) as u16;
        let input: Vec<u8> = (0..2 * 128 * 16u16).flat_map(u16::to_le_bytes).collect();
        let packed: Vec<u16> = packing
            .pack_bf16_panels(&[&input])
            .chunks_exact(2)
            .map(|x| u16::from_le_bytes([x[0], x[1]]))
            .collect();
        for (layer, k, column) in [(0, 0, 0), (0, 9, 3), (1, 127, 15), (1, 70, 8)] {
            let unit = (layer * 2 + k / 64) * 2 + column / 8;
            let chunk = (k % 64 / 8) ^ (column % 8);
            assert_eq!(
                packed[unit * 512 + column % 8 * 64 + chunk * 8 + k % 8],
                number(layer, k, column)
            );
        }
    }

    #[test]
    fn packed_fragments_hold_the_elements_of_each_warp_lane_together() {
        let mut places: Vec<_> =
            (0..256).map(|i| element_offset_in_fragment(i / 16, i % 16)).collect();
        // In a packed fragment, lane 5 of a warp has k 2, 3, 10 and 11 of rows 1 and 9.
        assert_eq!(
            [(1, 2), (1, 3), (9, 2), (1, 10), (9, 11)]
                .map(|(row, k)| element_offset_in_fragment(row, k)),
            [40, 41, 42, 44, 47]
        );
        places.sort_unstable();
        assert_eq!(places, (0..256).collect::<Vec<_>>());
        // The test cache has two layers of 17 keys with 16 columns each.
        let cache: Vec<u8> = (1..=2 * 17 * 16u16).flat_map(u16::to_le_bytes).collect();
        let read = |transposed| -> Vec<u16> {
            pack_cache_as_tensor_core_fragments(&cache, 2, 16, transposed)
                .chunks_exact(2)
                .map(|x| u16::from_le_bytes([x[0], x[1]]))
                .collect()
        };
        let (keys, values) = (read(false), read(true));
        assert_eq!(keys.len(), 2 * MAX_PERSISTENT_KEYS * 16);
        let last = 2 * 17 * 16;
        assert_eq!(keys[MAX_PERSISTENT_KEYS * 16 + 256 + element_offset_in_fragment(0, 15)], last);
        assert_eq!(
            values[MAX_PERSISTENT_KEYS * 16 + 256 + element_offset_in_fragment(15, 0)],
            last
        );
        assert_eq!(keys[256 + element_offset_in_fragment(1, 0)], 0);
    }

    /// Decodes four fp8 codes as the function `decode` of `kernels/denoise/units.cuh` does: one
    /// 32-bit word becomes two words of two bf16.
    fn decode_fp8_codes_like_kernel(word: u32, factor: f32) -> [f32; 4] {
        let words = [
            word >> 4 & 0x07f0_07f0 | word & 0x8000_8000,
            word << 4 & 0x07f0_07f0 | word << 8 & 0x8000_8000,
        ];
        let half = |bits: u32| bf16::from_bits(bits as u16).to_f32() * factor;
        [half(words[0]), half(words[0] >> 16), half(words[1]), half(words[1] >> 16)]
    }

    #[test]
    fn every_packed_int4_code_decodes_to_its_value_at_the_kernels_position() {
        // In this test model, a scale group of 128 rows of k covers two panels, and the width of
        // 192 ends with half a group.
        let model = ExpertDimensions {
            head_dim: 32,
            model_width: 192,
            feed_forward_width: 256,
            ..TINY_TEST_MODEL
        };
        let mut tensors = Tensors::new();
        for spec in model.input_tensor_specs(1, 1, Dtype::Bf16) {
            tensors.insert(spec.input_name, spec.draw_tensor_from_seed(4));
        }
        let packings = weight_packings_for_persistent_kernel(&model, LayerWeightFormat::Int4);
        let coded = |packing: &&WeightPacking| packing.layout == PackedWeightLayout::Int4Panels;
        assert_eq!(packings.iter().filter(coded).count(), LAYER_WEIGHT_NAMES.len());
        for packing in packings.iter().filter(coded) {
            let packed = packing.pack_weight_inputs(&tensors);
            assert_eq!(packed.len(), packing.name_and_bytes_of_packed_region().1);
            let exact = |name: &&str| int4::round_tensor_through_int4(tensors.tensor(name));
            let exact: Vec<_> = packing.weight_input_names.iter().map(exact).collect();
            let (panels, units) = (
                packing.rows_per_weight_input / PACKED_TILE_COLUMNS,
                packing.columns_per_weight_input.iter().sum::<usize>() / 8,
            );
            for (index, unit) in packed.chunks_exact(codes::INT4_UNIT_BYTES).enumerate() {
                let (layer, panel) = (index / units / panels, index / units % panels);
                let (input, first) = packing.input_and_column_of_packed_chunk(index % units);
                // The test decodes int4 like the function `decode_int4` of
                // `kernels/denoise/units.cuh`, with eight codes a word.
                for (number, word) in
                    unit[..codes::INT4_FACTORS_BYTE_OFFSET_IN_UNIT].chunks_exact(4).enumerate()
                {
                    let (lane, word) = (number / 2, u32::from_le_bytes(word.try_into().unwrap()));
                    let (column, k) = (
                        lane % 8,
                        panel * PACKED_TILE_COLUMNS
                            + lane / 8 * codes::FP8_CODES_PER_16_BYTE_LOAD
                            + number % 2 * 8,
                    );
                    let factor = codes::INT4_FACTORS_BYTE_OFFSET_IN_UNIT + column * 2;
                    let factor = bf16::from_le_bytes([unit[factor], unit[factor + 1]]).to_f32();
                    for i in 0..8 {
                        let pair = word >> (i / 2 * 4) & 0x000f_000f | 0x4300_4300;
                        let raised = bf16::from_bits((pair >> (i % 2 * 16)) as u16).to_f32();
                        let at = (layer * packing.rows_per_weight_input + k + i)
                            * packing.columns_per_weight_input[input];
                        let expected = exact[input].elements_to_f64(at + first + column, 1)[0];
                        let got = f64::from((raised - 136.0) * factor);
                        assert_eq!(
                            got, expected,
                            "{} {index} {lane} {i}",
                            packing.packed_region_name
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn every_packed_fp8_code_decodes_to_its_value_at_the_kernels_position() {
        // In this test model, every inner dimension k is a multiple of the 64 rows of a panel.
        let model = ExpertDimensions { head_dim: 32, ..TINY_TEST_MODEL };
        let mut tensors = Tensors::new();
        for spec in model.input_tensor_specs(1, 1, Dtype::Bf16) {
            tensors.insert(spec.input_name, spec.draw_tensor_from_seed(3));
        }
        let coded = |packing: &WeightPacking| packing.layout == PackedWeightLayout::Fp8Panels;
        for packing in weight_packings_for_persistent_kernel(&model, LayerWeightFormat::Fp8)
            .into_iter()
            .filter(coded)
        {
            let packed = packing.pack_weight_inputs(&tensors);
            assert_eq!(packed.len(), packing.name_and_bytes_of_packed_region().1);
            let exact = |name: &&str| round_tensor_through_fp8(tensors.tensor(name));
            let exact: Vec<_> = packing.weight_input_names.iter().map(exact).collect();
            let (panels, units) = (
                packing.rows_per_weight_input / PACKED_TILE_COLUMNS,
                packing.columns_per_weight_input.iter().sum::<usize>() / 8,
            );
            for (index, unit) in packed.chunks_exact(codes::FP8_UNIT_BYTES).enumerate() {
                let (layer, panel) = (index / units / panels, index / units % panels);
                let (input, first) = packing.input_and_column_of_packed_chunk(index % units);
                // The fp8 codes of a unit are stored lane by lane, with four 32-bit words for each
                // lane.
                for (lane, codes) in unit[..codes::FP8_FACTORS_BYTE_OFFSET_IN_UNIT]
                    .chunks_exact(codes::FP8_CODES_PER_16_BYTE_LOAD)
                    .enumerate()
                {
                    let (column, k) = (
                        lane % 8,
                        panel * PACKED_TILE_COLUMNS + lane / 8 * codes::FP8_CODES_PER_16_BYTE_LOAD,
                    );
                    let factor = codes::FP8_FACTORS_BYTE_OFFSET_IN_UNIT + column * 2;
                    let factor = bf16::from_le_bytes([unit[factor], unit[factor + 1]]).to_f32();
                    let got = codes.chunks_exact(4).flat_map(|word| {
                        decode_fp8_codes_like_kernel(
                            u32::from_le_bytes(word.try_into().unwrap()),
                            factor,
                        )
                    });
                    for (i, got) in got.enumerate() {
                        let at = (layer * packing.rows_per_weight_input + k + i)
                            * packing.columns_per_weight_input[input];
                        let expected = exact[input].elements_to_f64(at + first + column, 1)[0];
                        assert_eq!(
                            f64::from(got),
                            expected,
                            "{} {index} {lane}",
                            packing.packed_region_name
                        );
                    }
                }
            }
        }
    }
}
