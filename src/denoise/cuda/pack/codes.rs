//! Quantised weights as the persistent kernel takes them: panels as those of bf16, units of eight
//! columns and 64 of k, in each `[k / 16][8 columns][16 codes]` and for each column a bf16 that its
//! decoded codes are multiplied by.
//!
//! The kernel reads a code's bits as a bf16 with the same exponent field, which is 2^-120 of its
//! value: the factor makes up for that. Of four codes the bytes are those of k + 2, k, k + 3, k + 1,
//! so that shifts alone bring neighbours of k into the two halves of a word.

use half::bf16;
use rayon::prelude::*;

use super::{CHUNK, Packing, TILE};
use crate::denoise::fp8::{Fp8, quantize};
use kernelgate::workload::{Dtype, Tensors};

/// Codes of a thread's 16-byte access.
const GROUP: usize = 16;
/// Where the code of k is among four.
const PLACES: [usize; 4] = [1, 3, 0, 2];
const FACTORS_AT: usize = CHUNK * TILE;
/// Bytes of a unit.
pub const UNIT_BYTES: usize = FACTORS_AT + CHUNK * Dtype::Bf16.bytes();

/// Panels of codes.
pub fn pack(packing: &Packing, tensors: &Tensors) -> Vec<u8> {
    let inputs: Vec<Fp8> =
        packing.inputs.iter().map(|name| quantize(tensors.tensor(name))).collect();
    let panels = packing.depth / TILE;
    let mut packed = vec![0; packing.layers * packing.layer_bytes()];
    packed.par_chunks_exact_mut(packing.layer_bytes() / panels).enumerate().for_each(
        |(index, to)| {
            let (layer, panel) = (index / panels, index % panels);
            for (unit, to) in to.chunks_exact_mut(UNIT_BYTES).enumerate() {
                let (input, first) = packing.source(unit);
                let (Fp8 { codes, exponents }, columns) = (&inputs[input], packing.columns[input]);
                let exponents = &exponents[layer * columns + first..][..CHUNK];
                let (places, factors) = to.split_at_mut(FACTORS_AT);
                for k in 0..TILE {
                    let row = layer * packing.depth + panel * TILE + k;
                    let codes = &codes[row * columns + first..][..CHUNK];
                    for (column, &code) in codes.iter().enumerate() {
                        places[place(k, column)] = code;
                    }
                }
                for (&exponent, factor) in exponents.iter().zip(factors.chunks_exact_mut(2)) {
                    let power = bf16::from_f32(2f32.powi(i32::from(exponent) + 120));
                    factor.copy_from_slice(&power.to_le_bytes());
                }
            }
        },
    );
    packed
}

/// Where a code is in its unit.
const fn place(k: usize, column: usize) -> usize {
    (k / GROUP * CHUNK + column) * GROUP + k % GROUP / 4 * 4 + PLACES[k % 4]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::denoise::fp8::dequantized;
    use crate::denoise::model::{Model, TINY};
    use crate::denoise::shape::WeightFormat;

    /// As `decode` of `kernels/denoise/persistent.cuh`: two words of two bf16 from four codes.
    fn decoded(word: u32, factor: f32) -> [f32; 4] {
        let words = [
            word >> 4 & 0x07f0_07f0 | word & 0x8000_8000,
            word << 4 & 0x07f0_07f0 | word << 8 & 0x8000_8000,
        ];
        let half = |bits: u32| bf16::from_bits(bits as u16).to_f32() * factor;
        [half(words[0]), half(words[0] >> 16), half(words[1]), half(words[1] >> 16)]
    }

    #[test]
    fn every_code_decodes_to_its_value_where_the_kernel_looks_for_it() {
        // Every k is whole panels.
        let model = Model { head_dim: 32, ..TINY };
        let mut tensors = Tensors::new();
        for spec in model.tensors(1, 1, Dtype::Bf16) {
            tensors.insert(spec.name, spec.draw(3));
        }
        for packing in super::super::persistent_packings(&model, WeightFormat::Fp8) {
            if packing.layout != super::super::PackedLayout::Codes {
                continue;
            }
            let packed = packing.pack(&tensors);
            assert_eq!(packed.len(), packing.region().1);
            let exact: Vec<_> =
                packing.inputs.iter().map(|name| dequantized(tensors.tensor(name))).collect();
            let (panels, units) = (packing.depth / TILE, packing.columns.iter().sum::<usize>() / 8);
            for (index, unit) in packed.chunks_exact(UNIT_BYTES).enumerate() {
                let (layer, panel) = (index / units / panels, index / units % panels);
                let (input, first) = packing.source(index % units);
                // Lane by lane, four words each.
                for (lane, codes) in unit[..FACTORS_AT].chunks_exact(GROUP).enumerate() {
                    let (column, k) = (lane % 8, panel * TILE + lane / 8 * GROUP);
                    let factor = FACTORS_AT + column * 2;
                    let factor = bf16::from_le_bytes([unit[factor], unit[factor + 1]]).to_f32();
                    let got = codes.chunks_exact(4).flat_map(|word| {
                        decoded(u32::from_le_bytes(word.try_into().unwrap()), factor)
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

    #[test]
    fn places_of_a_unit_are_all_different() {
        let mut places: Vec<_> = (0..FACTORS_AT).map(|i| place(i / 8, i % 8)).collect();
        assert_eq!([0, 1, 2, 3, 16].map(|k| place(k, 0)), [1, 3, 0, 2, 129]);
        places.sort_unstable();
        assert_eq!(places, (0..FACTORS_AT).collect::<Vec<_>>());
    }
}
