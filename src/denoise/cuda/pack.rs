//! Packs weights, keys and values into the layouts of the kernels, once on the host while a case is
//! prepared.
//!
//! Weights of the fused GEMMs (`kernels/denoise/skinny_gemm.cuh`) are `[layer][tile of 64
//! columns][k / group][group rows of k][64]`, with 16-byte chunks of eight columns XOR-swizzled by
//! row. A group is up to 64 rows of one block's slice of k. Weights of the persistent kernel
//! (`kernels/denoise/units.cuh`) are `[layer][k / 64][columns / 8][8 columns][64 of k]`, with
//! 16-byte chunks of eight k XOR-swizzled by column. Keys and values of the persistent kernel are
//! fragments of the tensor cores.

mod codes;

use super::writer::NamedRegion;
use crate::denoise::definition::WeightFormat;
use crate::denoise::fp8::{Fp8Matrix, quantize_to_fp8};
use crate::denoise::int4::{self, Int4Matrix};
use crate::denoise::model::ExpertModel;
use crate::parallel;
use kernelgate::workload::{Dtype, Tensors};

/// Number of blocks among which a fused GEMM splits k. The constants below are for q, k and v
/// together, the attended values, the feed-forward's input, its output, and the GEMMs that do not
/// depend on the actions.
pub const QKV_K_SPLIT: usize = 4;
pub const OUT_K_SPLIT: usize = 8;
pub const GATE_UP_K_SPLIT: usize = 2;
pub const DOWN_K_SPLIT: usize = 8;
pub const LINEAR_K_SPLIT: usize = 4;

/// Number of columns in a tile of packed weights.
pub const TILE_COLUMNS: usize = 64;
const CHUNK_COLUMNS: usize = 8;
const CHUNK_BYTES: usize = 16;

/// Order of the columns in packed weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PackedColumnOrder {
    /// The columns stay in their original order.
    PlainExpert,
    /// Heads of q, k and v with this number of columns. Eight columns are next to the eight columns
    /// half a head further, with which they rotate.
    Rotating(usize),
    /// Eight columns of one matrix are next to eight columns of the other.
    Alternating,
}

/// A region of packed weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedMatrix {
    /// Name of the packed region.
    pub name: &'static str,
    /// Inputs that the region contains, each `[layers][k][columns]`.
    pub inputs: &'static [&'static str],
    /// Number of columns of each packed input.
    columns: Vec<usize>,
    /// Number of rows of each input: the depth k of the GEMM.
    depth: usize,
    layers: usize,
    order: PackedColumnOrder,
    layout: PackedMemoryLayout,
}

/// Memory layout of packed weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PackedMemoryLayout {
    /// Tiles of columns, with k split among this number of blocks.
    Tiles(usize),
    /// Panels of 64 k in bf16, eight columns at a time.
    Panels,
    /// Panels of weights in fp8 codes.
    Codes,
    /// Panels of weights in int4 codes.
    Int4Codes,
}

/// Packings of a model for the persistent kernel: the GEMMs of a layer as panels in the format
/// `weights`, all other GEMMs as tiles.
pub fn persistent_packings(model: &ExpertModel, weights: WeightFormat) -> Vec<PackedMatrix> {
    let mut packings = packings_of_model(model);
    for packing in &mut packings {
        if LAYER_GEMMS.contains(&packing.name) {
            packing.layout = match weights {
                WeightFormat::Same => PackedMemoryLayout::Panels,
                WeightFormat::Fp8 => PackedMemoryLayout::Codes,
                WeightFormat::Int4 => PackedMemoryLayout::Int4Codes,
            };
        } else if STYLE_GEMMS.contains(&packing.name) {
            packing.layout = PackedMemoryLayout::Panels;
        }
    }
    packings
}

const STYLE_GEMMS: [&str; 3] = ["style1", "style2", "final_style"];
const LAYER_GEMMS: [&str; 4] = ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"];

/// Packings of all weights of a model for the fused kernels.
pub fn packings_of_model(model: &ExpertModel) -> Vec<PackedMatrix> {
    let ExpertModel { width, depth: layers, mlp, heads, head_dim, .. } = *model;
    let queries = heads * head_dim;
    let plain = |name, inputs, depth, columns, split, layers| PackedMatrix {
        name,
        inputs,
        columns: vec![columns],
        depth,
        layers,
        order: PackedColumnOrder::PlainExpert,
        layout: PackedMemoryLayout::Tiles(split),
    };
    vec![
        PackedMatrix {
            name: "qkv_proj",
            inputs: &["q_proj", "k_proj", "v_proj"],
            columns: vec![queries, head_dim, head_dim],
            depth: width,
            layers,
            order: PackedColumnOrder::Rotating(head_dim),
            layout: PackedMemoryLayout::Tiles(QKV_K_SPLIT),
        },
        PackedMatrix {
            name: "gate_up_proj",
            inputs: &["gate_proj", "up_proj"],
            columns: vec![mlp, mlp],
            depth: width,
            layers,
            order: PackedColumnOrder::Alternating,
            layout: PackedMemoryLayout::Tiles(GATE_UP_K_SPLIT),
        },
        plain("o_proj", &["o_proj"], queries, width, OUT_K_SPLIT, layers),
        plain("down_proj", &["down_proj"], mlp, width, DOWN_K_SPLIT, layers),
        plain("time_in", &["time_in"], width, width, LINEAR_K_SPLIT, 1),
        plain("time_out", &["time_out"], width, width, LINEAR_K_SPLIT, 1),
        plain("style1", &["style1"], width, 3 * width, LINEAR_K_SPLIT, layers),
        plain("style2", &["style2"], width, 3 * width, LINEAR_K_SPLIT, layers),
        plain("final_style", &["final_style"], width, 3 * width, LINEAR_K_SPLIT, 1),
    ]
}

impl PackedMatrix {
    /// Name and size of the packed region.
    pub fn region_of_packing(&self) -> NamedRegion {
        (self.name, self.layers * self.packed_layer_bytes())
    }

    fn packed_layer_bytes(&self) -> usize {
        let elements = self.depth * self.columns.iter().sum::<usize>();
        match self.layout {
            PackedMemoryLayout::Codes => {
                elements / (CHUNK_COLUMNS * TILE_COLUMNS) * codes::FP8_UNIT_BYTES
            }
            PackedMemoryLayout::Int4Codes => {
                elements / (CHUNK_COLUMNS * TILE_COLUMNS) * codes::INT4_UNIT_BYTES
            }
            _ => elements * Dtype::Bf16.bytes(),
        }
    }

    /// Input and first column from which a chunk is copied.
    fn source_of_chunk(&self, chunk: usize) -> (usize, usize) {
        match self.order {
            PackedColumnOrder::PlainExpert => (0, chunk * CHUNK_COLUMNS),
            PackedColumnOrder::Alternating => (chunk % 2, chunk / 2 * CHUNK_COLUMNS),
            PackedColumnOrder::Rotating(head) => {
                let (of_head, in_head) =
                    (chunk / (head / CHUNK_COLUMNS), chunk % (head / CHUNK_COLUMNS));
                let first = of_head * head + in_head % 2 * (head / 2) + in_head / 2 * CHUNK_COLUMNS;
                match first.checked_sub(self.columns[0]) {
                    None => (0, first),
                    Some(first) if first < head => (1, first),
                    Some(first) => (2, first - head),
                }
            }
        }
    }

    /// Packs the tensors and returns the packed bytes.
    pub fn pack_tensors(&self, tensors: &Tensors) -> Vec<u8> {
        let inputs: Vec<&[u8]> =
            self.inputs.iter().map(|name| tensors.tensor(name).as_bytes()).collect();
        match self.layout {
            // Each group has up to 64 rows of one block's slice of k.
            PackedMemoryLayout::Tiles(split) => {
                self.pack_tiles(&inputs, ((self.depth / 16).div_ceil(split) * 16).min(TILE_COLUMNS))
            }
            PackedMemoryLayout::Panels => self.pack_panels(&inputs),
            PackedMemoryLayout::Codes => self.pack_int4_codes(tensors),
            PackedMemoryLayout::Int4Codes => self.pack_int4(tensors),
        }
    }

    /// Returns a chunk of eight columns of one row of an input.
    fn chunk_of_row<'a>(
        &self,
        inputs: &[&'a [u8]],
        layer: usize,
        k: usize,
        chunk: usize,
    ) -> &'a [u8] {
        let (input, column) = self.source_of_chunk(chunk);
        let from = ((layer * self.depth + k) * self.columns[input] + column) * Dtype::Bf16.bytes();
        &inputs[input][from..from + CHUNK_BYTES]
    }

    fn pack_tiles(&self, inputs: &[&[u8]], group: usize) -> Vec<u8> {
        let row_bytes = TILE_COLUMNS * Dtype::Bf16.bytes();
        let mut packed = vec![0; self.layers * self.packed_layer_bytes()];
        let tiles = self.packed_layer_bytes() / (self.depth * row_bytes);
        // Each task packs one tile, with all of k for its columns.
        parallel::for_each_chunk(&mut packed, self.depth * row_bytes, &|index, to| {
            let (layer, tile) = (index / tiles, index % tiles);
            for (k, to) in to.chunks_exact_mut(row_bytes).enumerate() {
                for chunk in 0..TILE_COLUMNS / CHUNK_COLUMNS {
                    let at = (chunk ^ (k % group % 8)) * CHUNK_BYTES;
                    to[at..at + CHUNK_BYTES].copy_from_slice(self.chunk_of_row(
                        inputs,
                        layer,
                        k,
                        tile * (TILE_COLUMNS / CHUNK_COLUMNS) + chunk,
                    ));
                }
            }
        });
        packed
    }

    fn pack_panels(&self, inputs: &[&[u8]]) -> Vec<u8> {
        let element = Dtype::Bf16.bytes();
        let panels = self.depth / TILE_COLUMNS;
        let mut packed = vec![0; self.layers * self.packed_layer_bytes()];
        parallel::for_each_chunk(&mut packed, self.packed_layer_bytes() / panels, &|index, to| {
            let (layer, panel) = (index / panels, index % panels);
            for (unit, to) in
                to.chunks_exact_mut(CHUNK_COLUMNS * TILE_COLUMNS * element).enumerate()
            {
                for k in 0..TILE_COLUMNS {
                    let from = self.chunk_of_row(inputs, layer, panel * TILE_COLUMNS + k, unit);
                    for (column, from) in from.chunks_exact(element).enumerate() {
                        let at = (column * TILE_COLUMNS
                            + ((k / CHUNK_COLUMNS) ^ column) * CHUNK_COLUMNS
                            + k % CHUNK_COLUMNS)
                            * element;
                        to[at..at + element].copy_from_slice(from);
                    }
                }
            }
        });
        packed
    }

    fn pack_int4_codes(&self, tensors: &Tensors) -> Vec<u8> {
        const { assert!(codes::UNIT_COLUMNS == CHUNK_COLUMNS && codes::UNIT_DEPTH == TILE_COLUMNS) };
        let inputs: Vec<Fp8Matrix> =
            self.inputs.iter().map(|name| quantize_to_fp8(tensors.tensor(name))).collect();
        self.pack_units(codes::FP8_UNIT_BYTES, |layer, row, input, first, to| {
            let (Fp8Matrix { codes, exponents }, columns) = (&inputs[input], self.columns[input]);
            let row = layer * self.depth + row;
            let of_k = |k| &codes[(row + k) * columns + first..][..CHUNK_COLUMNS];
            codes::pack_fp8_unit(to, of_k, &exponents[layer * columns + first..][..CHUNK_COLUMNS]);
        })
    }

    fn pack_int4(&self, tensors: &Tensors) -> Vec<u8> {
        const { assert!(int4::SCALE_GROUP.is_multiple_of(TILE_COLUMNS)) };
        let inputs: Vec<Int4Matrix> =
            self.inputs.iter().map(|name| int4::quantize_to_int4(tensors.tensor(name))).collect();
        self.pack_units(codes::INT4_UNIT_BYTES, |layer, row, input, first, to| {
            let (Int4Matrix { codes, scales }, columns) = (&inputs[input], self.columns[input]);
            let group = layer * int4::groups_per_column(self.depth) + row / int4::SCALE_GROUP;
            let row = layer * self.depth + row;
            let of_k = |k| &codes[(row + k) * columns + first..][..CHUNK_COLUMNS];
            codes::pack_int4_unit(to, of_k, &scales[group * columns + first..][..CHUNK_COLUMNS]);
        })
    }

    /// Packs panels of units of `unit_bytes` bytes. `write` receives the layer, the first k, the
    /// input, the first column and the unit's destination.
    fn pack_units(
        &self,
        bytes: usize,
        write: impl Fn(usize, usize, usize, usize, &mut [u8]) + Sync,
    ) -> Vec<u8> {
        let panels = self.depth / TILE_COLUMNS;
        let mut packed = vec![0; self.layers * self.packed_layer_bytes()];
        parallel::for_each_chunk(&mut packed, self.packed_layer_bytes() / panels, &|index, to| {
            let (layer, panel) = (index / panels, index % panels);
            for (unit, to) in to.chunks_exact_mut(bytes).enumerate() {
                let (input, first) = self.source_of_chunk(unit);
                write(layer, panel * TILE_COLUMNS, input, first, to);
            }
        });
        packed
    }
}

/// Maximum number of keys of the persistent kernel, for which each layer's fragments have space.
pub const MAX_PERSISTENT_KEYS: usize = 1024;

/// Packs cached keys or values `[layers][prefix][head_dim]` as `[layers][1024 / 16][head_dim /
/// 16][16 x 16 as a fragment]`, with zeros after the prefix. The rows of a fragment are keys or,
/// with `transposed` for values, columns of head_dim.
pub fn pack_cache(cache: &[u8], layers: usize, head_dim: usize, transposed: bool) -> Vec<u8> {
    const FRAGMENT_SIDE: usize = 16;
    let element = Dtype::Bf16.bytes();
    let layer_bytes = MAX_PERSISTENT_KEYS * head_dim * element;
    let prefix = cache.len() / (layers * head_dim * element);
    let mut packed = vec![0; layers * layer_bytes];
    parallel::for_each_chunk(&mut packed, layer_bytes, &|layer, to| {
        for key in 0..prefix {
            for column in 0..head_dim {
                let (row, k) = if transposed { (column, key) } else { (key, column) };
                let block =
                    key / FRAGMENT_SIDE * (head_dim / FRAGMENT_SIDE) + column / FRAGMENT_SIDE;
                let at = (block * FRAGMENT_SIDE * FRAGMENT_SIDE
                    + offset_in_fragment(row % FRAGMENT_SIDE, k % FRAGMENT_SIDE))
                    * element;
                let from = ((layer * prefix + key) * head_dim + column) * element;
                to[at..at + element].copy_from_slice(&cache[from..from + element]);
            }
        }
    });
    packed
}

/// Offset of an element, by its row and k, in a tensor-core fragment. A lane has two neighbours
/// along k of a row, the same k eight rows further, and both rows eight k further.
const fn offset_in_fragment(row: usize, k: usize) -> usize {
    (row % 8 * 4 + k % 8 / 2) * 8 + (row / 8 + k / 8 * 2) * 2 + k % 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::denoise::fp8::dequantized_tensor;
    use crate::denoise::model::{PI05_MODEL, TINY_MODEL};
    use half::bf16;

    #[test]
    fn every_column_is_packed_once() {
        for model in [PI05_MODEL, TINY_MODEL] {
            for packing in packings_of_model(&model) {
                let columns: usize = packing.columns.iter().sum();
                let mut chunks: Vec<_> = (0..columns / CHUNK_COLUMNS)
                    .map(|chunk| packing.source_of_chunk(chunk))
                    .collect();
                chunks.sort_unstable();
                let all: Vec<_> = packing
                    .columns
                    .iter()
                    .enumerate()
                    .flat_map(|(input, &columns)| {
                        (0..columns).step_by(CHUNK_COLUMNS).map(move |column| (input, column))
                    })
                    .collect();
                assert_eq!(chunks, all, "{} of {}", packing.name, model.name);
                assert_eq!(columns % TILE_COLUMNS, 0, "{}", packing.name);
            }
        }
    }

    #[test]
    fn columns_that_belong_together_are_neighbours() {
        let packings = packings_of_model(&PI05_MODEL);
        let source = |name: &str, chunk| {
            packings.iter().find(|packing| packing.name == name).unwrap().source_of_chunk(chunk)
        };
        // The chunks are those of the second head of q, then those of k and v after the eight heads
        // of q.
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
    fn panels_hold_every_column_of_eight_with_its_k_together() {
        let packing = PackedMatrix {
            name: "o_proj",
            inputs: &["o_proj"],
            columns: vec![16],
            depth: 128,
            layers: 2,
            order: PackedColumnOrder::PlainExpert,
            layout: PackedMemoryLayout::Panels,
        };
        let number =
            |layer: usize, k: usize, column: usize| ((layer * 128 + k) * 16 + column) as u16;
        let input: Vec<u8> = (0..2 * 128 * 16u16).flat_map(u16::to_le_bytes).collect();
        let packed: Vec<u16> = packing
            .pack_panels(&[&input])
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
    fn fragments_are_what_the_lanes_of_a_warp_hold() {
        let mut places: Vec<_> = (0..256).map(|i| offset_in_fragment(i / 16, i % 16)).collect();
        // Lane 5 has row 1, k 2 and 3; row 9; and k 10 and 11 of both rows.
        assert_eq!(
            [(1, 2), (1, 3), (9, 2), (1, 10), (9, 11)].map(|(row, k)| offset_in_fragment(row, k)),
            [40, 41, 42, 44, 47]
        );
        places.sort_unstable();
        assert_eq!(places, (0..256).collect::<Vec<_>>());
        // The cache has two layers of 17 keys with 16 columns.
        let cache: Vec<u8> = (1..=2 * 17 * 16u16).flat_map(u16::to_le_bytes).collect();
        let read = |transposed| -> Vec<u16> {
            pack_cache(&cache, 2, 16, transposed)
                .chunks_exact(2)
                .map(|x| u16::from_le_bytes([x[0], x[1]]))
                .collect()
        };
        let (keys, values) = (read(false), read(true));
        assert_eq!(keys.len(), 2 * MAX_PERSISTENT_KEYS * 16);
        let last = 2 * 17 * 16;
        assert_eq!(keys[MAX_PERSISTENT_KEYS * 16 + 256 + offset_in_fragment(0, 15)], last);
        assert_eq!(values[MAX_PERSISTENT_KEYS * 16 + 256 + offset_in_fragment(15, 0)], last);
        assert_eq!(keys[256 + offset_in_fragment(1, 0)], 0);
    }

    /// Decodes as `decode` of `kernels/denoise/units.cuh` does: four codes become two words of two
    /// bf16.
    fn decode_like_kernel(word: u32, factor: f32) -> [f32; 4] {
        let words = [
            word >> 4 & 0x07f0_07f0 | word & 0x8000_8000,
            word << 4 & 0x07f0_07f0 | word << 8 & 0x8000_8000,
        ];
        let half = |bits: u32| bf16::from_bits(bits as u16).to_f32() * factor;
        [half(words[0]), half(words[0] >> 16), half(words[1]), half(words[1] >> 16)]
    }

    #[test]
    fn every_int4_decodes_to_its_value_where_the_kernel_looks_for_it() {
        // A group of 128 k is two panels, and the width of a layer ends with half a group.
        let model = ExpertModel { head_dim: 32, width: 192, mlp: 256, ..TINY_MODEL };
        let mut tensors = Tensors::new();
        for spec in model.input_tensors(1, 1, Dtype::Bf16) {
            tensors.insert(spec.name, spec.draw_tensor(4));
        }
        let packings = persistent_packings(&model, WeightFormat::Int4);
        let coded = |packing: &&PackedMatrix| packing.layout == PackedMemoryLayout::Int4Codes;
        assert_eq!(packings.iter().filter(coded).count(), LAYER_GEMMS.len());
        for packing in packings.iter().filter(coded) {
            let packed = packing.pack_tensors(&tensors);
            assert_eq!(packed.len(), packing.region_of_packing().1);
            let exact = |name: &&str| int4::dequantized_tensor(tensors.tensor(name));
            let exact: Vec<_> = packing.inputs.iter().map(exact).collect();
            let (panels, units) =
                (packing.depth / TILE_COLUMNS, packing.columns.iter().sum::<usize>() / 8);
            for (index, unit) in packed.chunks_exact(codes::INT4_UNIT_BYTES).enumerate() {
                let (layer, panel) = (index / units / panels, index / units % panels);
                let (input, first) = packing.source_of_chunk(index % units);
                // The decoding follows `decode_int4` of `kernels/denoise/units.cuh`, with eight
                // codes a word.
                for (number, word) in unit[..codes::INT4_FACTORS_OFFSET].chunks_exact(4).enumerate()
                {
                    let (lane, word) = (number / 2, u32::from_le_bytes(word.try_into().unwrap()));
                    let (column, k) = (
                        lane % 8,
                        panel * TILE_COLUMNS + lane / 8 * codes::CODES_PER_ACCESS + number % 2 * 8,
                    );
                    let factor = codes::INT4_FACTORS_OFFSET + column * 2;
                    let factor = bf16::from_le_bytes([unit[factor], unit[factor + 1]]).to_f32();
                    for i in 0..8 {
                        let pair = word >> (i / 2 * 4) & 0x000f_000f | 0x4300_4300;
                        let raised = bf16::from_bits((pair >> (i % 2 * 16)) as u16).to_f32();
                        let at = (layer * packing.depth + k + i) * packing.columns[input];
                        let expected = exact[input].to_f64(at + first + column, 1)[0];
                        let got = f64::from((raised - 136.0) * factor);
                        assert_eq!(got, expected, "{} {index} {lane} {i}", packing.name);
                    }
                }
            }
        }
    }

    #[test]
    fn every_code_decodes_to_its_value_where_the_kernel_looks_for_it() {
        // Every depth k of this model is a multiple of a panel.
        let model = ExpertModel { head_dim: 32, ..TINY_MODEL };
        let mut tensors = Tensors::new();
        for spec in model.input_tensors(1, 1, Dtype::Bf16) {
            tensors.insert(spec.name, spec.draw_tensor(3));
        }
        let coded = |packing: &PackedMatrix| packing.layout == PackedMemoryLayout::Codes;
        for packing in persistent_packings(&model, WeightFormat::Fp8).into_iter().filter(coded) {
            let packed = packing.pack_tensors(&tensors);
            assert_eq!(packed.len(), packing.region_of_packing().1);
            let exact = |name: &&str| dequantized_tensor(tensors.tensor(name));
            let exact: Vec<_> = packing.inputs.iter().map(exact).collect();
            let (panels, units) =
                (packing.depth / TILE_COLUMNS, packing.columns.iter().sum::<usize>() / 8);
            for (index, unit) in packed.chunks_exact(codes::FP8_UNIT_BYTES).enumerate() {
                let (layer, panel) = (index / units / panels, index / units % panels);
                let (input, first) = packing.source_of_chunk(index % units);
                // Units are written lane by lane, with four words each.
                for (lane, codes) in unit[..codes::FP8_FACTORS_OFFSET]
                    .chunks_exact(codes::CODES_PER_ACCESS)
                    .enumerate()
                {
                    let (column, k) =
                        (lane % 8, panel * TILE_COLUMNS + lane / 8 * codes::CODES_PER_ACCESS);
                    let factor = codes::FP8_FACTORS_OFFSET + column * 2;
                    let factor = bf16::from_le_bytes([unit[factor], unit[factor + 1]]).to_f32();
                    let got = codes.chunks_exact(4).flat_map(|word| {
                        decode_like_kernel(u32::from_le_bytes(word.try_into().unwrap()), factor)
                    });
                    for (i, got) in got.enumerate() {
                        let at = (layer * packing.depth + k + i) * packing.columns[input];
                        let expected = exact[input].to_f64(at + first + column, 1)[0];
                        assert_eq!(f64::from(got), expected, "{} {index} {lane}", packing.name);
                    }
                }
            }
        }
    }
}
