//! Max pooling of sums of spikes over time, forward and backward; each task pools one image.

use crate::parallel;
use crate::resnet18::network::ConvolutionWindow;

/// Pooled spikes `pool(Σ_t s) - pool(Σ_{t-1} s)` of one image, and for each of them the input
/// element with the first maximum.
pub struct PooledSpikes {
    /// Pooled spikes, `[T, output]`.
    pub spikes: Vec<i8>,
    /// Index of the input element of each pooled spike, `[T, output]`.
    pub sources: Vec<u32>,
}

/// Pools the spikes `[T, B, input]` of every image.
pub fn pool_spikes(window: &ConvolutionWindow, spikes: &[i8], t: usize) -> Vec<PooledSpikes> {
    let size = window.input.elements();
    let b = spikes.len() / t / size;
    let image = |image: usize| {
        let mut sums = vec![0i8; size];
        let mut before = vec![0i8; window.output.elements()];
        let len = t * window.output.elements();
        let mut pooled =
            PooledSpikes { spikes: Vec::with_capacity(len), sources: Vec::with_capacity(len) };
        for step in 0..t {
            let frame = &spikes[(step * b + image) * size..][..size];
            sums.iter_mut().zip(frame).for_each(|(sum, s)| *sum += s);
            for (at, before) in before.iter_mut().enumerate() {
                let source = first_maximum(window, &sums, at);
                pooled.spikes.push(sums[source] - *before);
                pooled.sources.push(source as u32);
                *before = sums[source];
            }
        }
        pooled
    };
    parallel::parallel_map(b, &image)
}

fn first_maximum(window: &ConvolutionWindow, sums: &[i8], at: usize) -> usize {
    let (pixel, channel) = (at / window.output.channels, at % window.output.channels);
    let sources = (0..window.window_taps()).filter_map(|tap| window.source_pixel(pixel, tap));
    sources
        .map(|pixel| pixel * window.input.channels + channel)
        .reduce(|best, at| if sums[at] > sums[best] { at } else { best })
        .expect("a window reads its centre")
}

/// Computes the gradient of the spikes before pooling `[T, B, input]` from the gradient of the
/// spikes after pooling `[T, B, output]`.
pub fn pool_gradient(
    window: &ConvolutionWindow,
    pooled: &[PooledSpikes],
    output: &[f32],
    gradient: &mut [f32],
) {
    let (from, to) = (window.output.elements(), window.input.elements());
    let b = pooled.len();
    let t = output.len() / b / from;
    let image = |image: usize| {
        let pooled = &pooled[image];
        let mut steps = vec![0.0; t * to];
        let mut after = vec![0.0; to];
        for step in (0..t).rev() {
            let now = &output[(step * b + image) * from..][..from];
            let sources = &pooled.sources[step * from..][..from];
            for (at, (&source, now)) in sources.iter().zip(now).enumerate() {
                let next =
                    if step + 1 < t { output[((step + 1) * b + image) * from + at] } else { 0.0 };
                after[source as usize] += now - next;
            }
            steps[step * to..][..to].copy_from_slice(&after);
        }
        steps
    };
    let images = parallel::parallel_map(b, &image);
    for (frame, to_frame) in gradient.chunks_mut(to).enumerate() {
        to_frame.copy_from_slice(&images[frame % b][frame / b * to..][..to]);
    }
}
