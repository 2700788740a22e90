//! Convolutions of the reference in fp64, forward and backward: one GEMM for each tap of the
//! window, over the pixels that the tap reads.

use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, multiply_f64};

use super::network::{ConvolutionLayer, ConvolutionWindow};
use crate::parallel;

/// Approximate number of output pixels that each CPU task computes.
const ROWS_PER_TASK: usize = 512;

/// Number of frames that each CPU task computes.
fn frames_a_task(window: &ConvolutionWindow) -> usize {
    (ROWS_PER_TASK / window.output.pixel_count()).max(1)
}

/// Copies the inputs of a tap for some frames: a row of channels for each output pixel, with zeros
/// in the padding. Returns `None` if the tap reads only padding.
fn gather_inputs_of_tap<T: Copy + Into<f64>>(
    window: &ConvolutionWindow,
    input: &[T],
    tap: usize,
) -> Option<Vec<f64>> {
    let sources: Vec<_> =
        (0..window.output.pixel_count()).map(|pixel| window.source_pixel(pixel, tap)).collect();
    if sources.iter().all(Option::is_none) {
        return None;
    }
    let channels = window.input.channels;
    let frames = input.len() / window.input.elements();
    let mut rows = Vec::with_capacity(frames * sources.len() * channels);
    for frame in input.chunks(window.input.elements()) {
        for source in &sources {
            match source {
                Some(at) => {
                    rows.extend(frame[at * channels..][..channels].iter().map(|&x| x.into()))
                }
                None => rows.resize(rows.len() + channels, 0.0),
            }
        }
    }
    Some(rows)
}

/// The weights of one tap of the convolution, `[out, in]`.
fn tap_weight<'a>(conv: &ConvolutionLayer, weight: &'a [f64], tap: usize) -> MatRef<'a, f64> {
    let (out, channels) = (conv.window.output.channels, conv.window.input.channels);
    MatRef::from_row_major_slice(weight, out, conv.filter_elements())
        .subcols(tap * channels, channels)
}

/// Views a slice as a matrix with rows of `columns` elements.
fn view(values: &[f64], columns: usize) -> MatRef<'_, f64> {
    MatRef::from_row_major_slice(values, values.len() / columns, columns)
}

/// Adds the product `factor·a·b` to `out`, on this thread.
fn add_gemm_on_thread(out: &mut [f64], a: MatRef<f64>, b: MatRef<f64>, factor: f64) {
    let out = MatMut::from_row_major_slice_mut(out, a.nrows(), b.ncols());
    multiply_f64(out, Accum::Add, a, b, factor);
}

/// Computes `factor·conv(input)` of frames `[frames, side, side, in]` with a weight `[out, taps,
/// in]`, without the bias.
pub fn convolve<T: Copy + Into<f64> + Sync>(
    conv: &ConvolutionLayer,
    weight: &[f64],
    input: &[T],
    factor: f64,
) -> Vec<f64> {
    let window = &conv.window;
    let frames = input.len() / window.input.elements();
    let mut output = vec![0.0; frames * window.output.elements()];
    let task = frames_a_task(window);
    parallel::for_each_chunk(&mut output, task * window.output.elements(), &|number, output| {
        let frames = output.len() / window.output.elements();
        let input = &input[number * task * window.input.elements()..];
        let input = &input[..frames * window.input.elements()];
        for tap in 0..window.window_taps() {
            if let Some(x) = gather_inputs_of_tap(window, input, tap) {
                let w = tap_weight(conv, weight, tap).transpose();
                add_gemm_on_thread(output, view(&x, window.input.channels), w, factor);
            }
        }
    });
    output
}

/// Computes the gradient of a convolution's input from the gradient of its output
/// (`factor·conv(input)`).
pub fn input_gradient(
    conv: &ConvolutionLayer,
    weight: &[f64],
    output: &[f64],
    factor: f64,
) -> Vec<f64> {
    let window = &conv.window;
    let channels = window.input.channels;
    let frames = output.len() / window.output.elements();
    let mut input = vec![0.0; frames * window.input.elements()];
    let task = frames_a_task(window);
    parallel::for_each_chunk(&mut input, task * window.input.elements(), &|number, input| {
        let frames = input.len() / window.input.elements();
        let output = &output[number * task * window.output.elements()..];
        let output = &output[..frames * window.output.elements()];
        let g = view(output, window.output.channels);
        let mut of_tap = vec![0.0; g.nrows() * channels];
        for tap in 0..window.window_taps() {
            let pixels = window.output.pixel_count();
            let sources: Vec<_> =
                (0..pixels).map(|pixel| window.source_pixel(pixel, tap)).collect();
            if sources.iter().all(Option::is_none) {
                continue;
            }
            of_tap.fill(0.0);
            add_gemm_on_thread(&mut of_tap, g, tap_weight(conv, weight, tap), factor);
            let frames =
                of_tap.chunks(pixels * channels).zip(input.chunks_mut(window.input.elements()));
            for (of_tap, input) in frames {
                for (row, source) in of_tap.chunks(channels).zip(&sources) {
                    let Some(at) = source else { continue };
                    let to = &mut input[at * channels..][..channels];
                    to.iter_mut().zip(row).for_each(|(to, x)| *to += x);
                }
            }
        }
    });
    input
}

/// Computes the gradient of a convolution's weight `[out, taps, in]` from the gradient of its
/// output (`factor·conv(input)`).
pub fn weight_gradient<T: Copy + Into<f64> + Sync>(
    conv: &ConvolutionLayer,
    input: &[T],
    output: &[f64],
    factor: f64,
) -> Vec<f64> {
    let window = &conv.window;
    let (rows, channels) = (window.output.channels, window.input.channels);
    let task = frames_a_task(window);
    let of_tap = |tap: usize| {
        let mut gradient = vec![0.0; rows * channels];
        let outputs = output.chunks(task * window.output.elements());
        for (input, output) in input.chunks(task * window.input.elements()).zip(outputs) {
            let Some(x) = gather_inputs_of_tap(window, input, tap) else { break };
            let g = view(output, rows).transpose();
            add_gemm_on_thread(&mut gradient, g, view(&x, channels), factor);
        }
        gradient
    };
    let taps = parallel::parallel_map(window.window_taps(), &of_tap);
    let mut gradient = Vec::with_capacity(conv.weight_elements());
    for row in 0..rows {
        taps.iter().for_each(|tap| gradient.extend(&tap[row * channels..][..channels]));
    }
    gradient
}
