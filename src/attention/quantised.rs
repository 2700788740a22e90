//! Rounding of tensors to e4m3 with one scale for each head.
//!
//! Scales of other blocks, and scales that do not depend on the tensor, are excluded on purpose.

use crate::e4m3::{MAX_E4M3, encode_e4m3};
use crate::parallel;

/// Quantises each part of `part` elements to the bits of x / scale. The scale maps the part's
/// largest magnitude to the largest e4m3 number; it is 1 for zeros.
pub fn quantise_to_e4m3(values: &[half::bf16], part: usize) -> (Vec<i8>, Vec<f32>) {
    let parts = parallel::parallel_map(values.len().div_ceil(part), &|number| {
        let values = &values[number * part..];
        let values = &values[..part.min(values.len())];
        let largest = values.iter().fold(0f32, |most, x| most.max(x.to_f32().abs()));
        let scale = if largest > 0.0 { largest / MAX_E4M3 } else { 1.0 };
        (values.iter().map(|x| encode_e4m3(x.to_f32() / scale) as i8).collect(), scale)
    });
    let (values, scales): (Vec<Vec<i8>>, Vec<_>) = parts.into_iter().unzip();
    (values.concat(), scales)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::e4m3::decode_e4m3;

    #[test]
    fn quantising_a_part_uses_the_whole_range_of_e4m3() {
        let values = [0.5, -1.0, 0.0, 0.0, 30.0, 60.0].map(half::bf16::from_f32);
        let (found, scales) = quantise_to_e4m3(&values, 2);
        assert_eq!(
            found.iter().map(|&x| decode_e4m3(x as u8)).collect::<Vec<_>>(),
            [224.0, -448.0, 0.0, 0.0, 224.0, 448.0]
        );
        assert_eq!(scales, [1.0 / 448.0, 1.0, 60.0 / 448.0]);
    }
}
