//! Seeded random inputs of benchmark cases: the same seed and name give the same values on every
//! machine and for any thread count. Inputs are never all zero, because zero inputs would hide
//! outputs that were not written, and can run faster than real data.

use bytemuck::Zeroable;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use rayon::prelude::*;

/// Number of consecutive elements of a tensor that are drawn from one stream of the random
/// generator. The chunk size defines the inputs: another size would change every input of every
/// case.
const ELEMENTS_PER_RANDOM_STREAM: usize = 1 << 16;

/// Returns `len` f32 values from the normal distribution N(0, 1), which depend only on the seed and
/// the tensor's name.
pub fn normal_values(seed: u64, name: &str, len: usize) -> Vec<f32> {
    map_standard_normal_values(seed, name, len, |x| x)
}

/// Returns `f(x)` for `len` random x from N(0, 1), which depend only on the seed and the tensor's
/// name.
pub fn map_standard_normal_values<T: Copy + Zeroable + Send>(
    seed: u64,
    name: &str,
    len: usize,
    f: impl Fn(f32) -> T + Sync,
) -> Vec<T> {
    // The vector is allocated as zero pages, so that the threads that draw values also touch its
    // pages first.
    let mut values = bytemuck::allocation::zeroed_vec::<T>(len);
    values.par_chunks_mut(ELEMENTS_PER_RANDOM_STREAM).enumerate().for_each(|(chunk, values)| {
        let (mut rng, mut drawn) =
            (random_generator_of_chunk(seed, name, chunk as u64), [0.0; DRAWN_VALUES_PER_BUFFER]);
        for values in values.chunks_mut(DRAWN_VALUES_PER_BUFFER) {
            let drawn = &mut drawn[..values.len()];
            drawn.fill_with(|| rng.sample(StandardNormal));
            values.iter_mut().zip(drawn).for_each(|(value, x)| *value = f(*x));
        }
    });
    values
}

/// Number of values that are drawn from a random stream into a buffer before `f` converts them.
const DRAWN_VALUES_PER_BUFFER: usize = 1024;

/// Returns `count` distinct random indices below `len`, ascending; all indices below `len` if
/// `count >= len`.
pub fn distinct_random_indices(seed: u64, name: &str, len: usize, count: usize) -> Vec<usize> {
    if count >= len {
        return (0..len).collect();
    }
    let mut rng = random_generator_of_chunk(seed, name, 0);
    let mut drawn = std::collections::BTreeSet::new();
    while drawn.len() < count {
        drawn.insert(rng.random_range(0..len as u64) as usize);
    }
    drawn.into_iter().collect()
}

fn random_generator_of_chunk(seed: u64, name: &str, chunk: u64) -> ChaCha8Rng {
    let mut key = [0u8; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    for (i, byte) in name.bytes().enumerate() {
        let slot = &mut key[8 + i % 24];
        *slot = slot.rotate_left(1) ^ byte;
    }
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(chunk);
    rng
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_values_depend_only_on_seed_and_name() {
        let a = normal_values(1, "x", ELEMENTS_PER_RANDOM_STREAM + 10);
        assert_eq!(a, normal_values(1, "x", ELEMENTS_PER_RANDOM_STREAM + 10));
        assert_eq!(
            a[..ELEMENTS_PER_RANDOM_STREAM + 3],
            normal_values(1, "x", ELEMENTS_PER_RANDOM_STREAM + 3)
        );
        assert_ne!(a[..8], normal_values(2, "x", 8));
        assert_ne!(a[..8], normal_values(1, "y", 8));
        assert_ne!(a[..8], a[ELEMENTS_PER_RANDOM_STREAM..ELEMENTS_PER_RANDOM_STREAM + 8]);
        let mean = a.iter().sum::<f32>() / a.len() as f32;
        let variance = a.iter().map(|x| x * x).sum::<f32>() / a.len() as f32;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
    }

    #[test]
    fn random_indices_are_distinct_ascending_and_below_the_length() {
        let drawn = distinct_random_indices(3, "rows", 1000, 50);
        assert_eq!(drawn.len(), 50);
        assert!(drawn.is_sorted_by(|a, b| a < b) && *drawn.last().unwrap() < 1000);
        assert_eq!(distinct_random_indices(3, "rows", 4, 9), [0, 1, 2, 3]);
    }
}
