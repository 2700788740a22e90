//! Quantisation of attention tensors to e4m3 with one scale for each head.
//!
//! The module quantises attention tensors with one e4m3 scale for each head only. The e4m3
//! quantisation of attention deliberately has no blocks other than a head, and no scales that do
//! not depend on the tensor.

use crate::e4m3::{LARGEST_E4M3_VALUE, encode_f32_as_e4m3};
use crate::parallel;

/// Quantises each run of `run_length` consecutive values to e4m3 codes of x / scale; returns the
/// codes and one scale for each run. The scale maps the largest magnitude of a run of values to the
/// largest e4m3 number; the scale of an all-zero run is 1.
pub fn quantise_runs_to_e4m3(values: &[half::bf16], run_length: usize) -> (Vec<i8>, Vec<f32>) {
    let parts = parallel::map_numbers_in_parallel(values.len().div_ceil(run_length), &|number| {
        let values = &values[number * run_length..];
        let values = &values[..run_length.min(values.len())];
        let largest = values.iter().fold(0f32, |most, x| most.max(x.to_f32().abs()));
        let scale = if largest > 0.0 { largest / LARGEST_E4M3_VALUE } else { 1.0 };
        (values.iter().map(|x| encode_f32_as_e4m3(x.to_f32() / scale) as i8).collect(), scale)
    });
    let (values, scales): (Vec<Vec<i8>>, Vec<_>) = parts.into_iter().unzip();
    (values.concat(), scales)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::e4m3::decode_e4m3_to_f32;

    #[test]
    fn the_largest_magnitude_of_each_run_maps_to_the_largest_e4m3_number() {
        let values = [0.5, -1.0, 0.0, 0.0, 30.0, 60.0].map(half::bf16::from_f32);
        let (found, scales) = quantise_runs_to_e4m3(&values, 2);
        assert_eq!(
            found.iter().map(|&x| decode_e4m3_to_f32(x as u8)).collect::<Vec<_>>(),
            [224.0, -448.0, 0.0, 0.0, 224.0, 448.0]
        );
        assert_eq!(scales, [1.0 / 448.0, 1.0, 60.0 / 448.0]);
    }
}
