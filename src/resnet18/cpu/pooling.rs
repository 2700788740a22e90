//! Max pooling of spikes summed over time, forward and backward on the CPU; each parallel task
//! pools one image.

use crate::parallel;
use crate::resnet18::network::SlidingWindow;

/// Pooled spikes `pool(Σ_t s) - pool(Σ_{t-1} s)` of one image, and, for each of them, the first
/// input element with the maximum sum.
pub struct PooledSpikesOfImage {
    /// Spikes of one image after the max pooling, `[T, output]`.
    pub pooled_spikes: Vec<i8>,
    /// Index of the input element with the maximum sum, for each pooled spike, `[T, output]`.
    pub maximum_input_indices: Vec<u32>,
}

/// Max-pools the spike sums of every image from spikes `[T, B, input]`; each task computes one
/// image.
pub fn max_pool_spike_sums(
    window: &SlidingWindow,
    spikes: &[i8],
    t: usize,
) -> Vec<PooledSpikesOfImage> {
    let size = window.input_extents.elements_per_frame();
    let b = spikes.len() / t / size;
    let image = |image: usize| {
        let mut sums = vec![0i8; size];
        let mut before = vec![0i8; window.output_extents.elements_per_frame()];
        let len = t * window.output_extents.elements_per_frame();
        let mut pooled = PooledSpikesOfImage {
            pooled_spikes: Vec::with_capacity(len),
            maximum_input_indices: Vec::with_capacity(len),
        };
        for step in 0..t {
            let frame = &spikes[(step * b + image) * size..][..size];
            sums.iter_mut().zip(frame).for_each(|(sum, s)| *sum += s);
            for (at, before) in before.iter_mut().enumerate() {
                let source = first_input_with_largest_sum(window, &sums, at);
                pooled.pooled_spikes.push(sums[source] - *before);
                pooled.maximum_input_indices.push(source as u32);
                *before = sums[source];
            }
        }
        pooled
    };
    parallel::map_numbers_in_parallel(b, &image)
}

fn first_input_with_largest_sum(window: &SlidingWindow, sums: &[i8], at: usize) -> usize {
    let (pixel, channel) =
        (at / window.output_extents.channels, at % window.output_extents.channels);
    let sources =
        (0..window.tap_count()).filter_map(|tap| window.input_pixel_read_by_tap(pixel, tap));
    sources
        .map(|pixel| pixel * window.input_extents.channels + channel)
        .reduce(|best, at| if sums[at] > sums[best] { at } else { best })
        .expect("a window reads its centre")
}

/// Computes the gradient of the spikes before max pooling `[T, B, input]` from the gradient of the
/// spikes after pooling `[T, B, output]`.
pub fn max_pool_spike_gradient(
    window: &SlidingWindow,
    pooled: &[PooledSpikesOfImage],
    output: &[f32],
    gradient: &mut [f32],
) {
    let (from, to) =
        (window.output_extents.elements_per_frame(), window.input_extents.elements_per_frame());
    let b = pooled.len();
    let t = output.len() / b / from;
    let image = |image: usize| {
        let pooled = &pooled[image];
        let mut steps = vec![0.0; t * to];
        let mut after = vec![0.0; to];
        for step in (0..t).rev() {
            let now = &output[(step * b + image) * from..][..from];
            let sources = &pooled.maximum_input_indices[step * from..][..from];
            for (at, (&source, now)) in sources.iter().zip(now).enumerate() {
                let next =
                    if step + 1 < t { output[((step + 1) * b + image) * from + at] } else { 0.0 };
                after[source as usize] += now - next;
            }
            steps[step * to..][..to].copy_from_slice(&after);
        }
        steps
    };
    let images = parallel::map_numbers_in_parallel(b, &image);
    for (frame, to_frame) in gradient.chunks_mut(to).enumerate() {
        to_frame.copy_from_slice(&images[frame % b][frame / b * to..][..to]);
    }
}
