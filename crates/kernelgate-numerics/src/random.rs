//! Seeded random inputs: the same seed and name give the same values on every machine, for any
//! thread count. Inputs are never all zero: zero inputs hide unwritten outputs and can run faster
//! than real data.

use bytemuck::Zeroable;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use rayon::prelude::*;

/// Number of elements that share one random stream. The number is part of the definition of the
/// inputs: changing it changes every input.
const RANDOM_CHUNK: usize = 1 << 16;

/// `len` values of N(0, 1) in f32, from the seed and the tensor's name.
pub fn normal_values(seed: u64, name: &str, len: usize) -> Vec<f32> {
    map_normal_values(seed, name, len, |x| x)
}

/// `len` values of `f(N(0, 1))`, from the seed and the tensor's name.
pub fn map_normal_values<T: Copy + Zeroable + Send>(
    seed: u64,
    name: &str,
    len: usize,
    f: impl Fn(f32) -> T + Sync,
) -> Vec<T> {
    // Zeros, so that the cores that draw also make the pages.
    let mut values = bytemuck::allocation::zeroed_vec::<T>(len);
    values.par_chunks_mut(RANDOM_CHUNK).enumerate().for_each(|(chunk, values)| {
        let (mut rng, mut drawn) =
            (chunk_generator(seed, name, chunk as u64), [0.0; VALUES_PER_DRAW]);
        for values in values.chunks_mut(VALUES_PER_DRAW) {
            let drawn = &mut drawn[..values.len()];
            drawn.fill_with(|| rng.sample(StandardNormal));
            values.iter_mut().zip(drawn).for_each(|(value, x)| *value = f(*x));
        }
    });
    values
}

/// Number of values drawn from a random stream at a time.
const VALUES_PER_DRAW: usize = 1024;

/// Indices below `len` drawn without repeats, ascending; all of them when `count >= len`.
pub fn random_indices(seed: u64, name: &str, len: usize, count: usize) -> Vec<usize> {
    if count >= len {
        return (0..len).collect();
    }
    let mut rng = chunk_generator(seed, name, 0);
    let mut drawn = std::collections::BTreeSet::new();
    while drawn.len() < count {
        drawn.insert(rng.random_range(0..len as u64) as usize);
    }
    drawn.into_iter().collect()
}

fn chunk_generator(seed: u64, name: &str, chunk: u64) -> ChaCha8Rng {
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
        let a = normal_values(1, "x", RANDOM_CHUNK + 10);
        assert_eq!(a, normal_values(1, "x", RANDOM_CHUNK + 10));
        assert_eq!(a[..RANDOM_CHUNK + 3], normal_values(1, "x", RANDOM_CHUNK + 3));
        assert_ne!(a[..8], normal_values(2, "x", 8));
        assert_ne!(a[..8], normal_values(1, "y", 8));
        assert_ne!(a[..8], a[RANDOM_CHUNK..RANDOM_CHUNK + 8]);
        let mean = a.iter().sum::<f32>() / a.len() as f32;
        let variance = a.iter().map(|x| x * x).sum::<f32>() / a.len() as f32;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
    }

    #[test]
    fn sampled_indices_are_distinct_ascending_and_below_the_length() {
        let drawn = random_indices(3, "rows", 1000, 50);
        assert_eq!(drawn.len(), 50);
        assert!(drawn.is_sorted_by(|a, b| a < b) && *drawn.last().unwrap() < 1000);
        assert_eq!(random_indices(3, "rows", 4, 9), [0, 1, 2, 3]);
    }
}
