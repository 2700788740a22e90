//! Convolutions of the fp64 reference, forward and backward: one GEMM for each tap of the window,
//! over the pixels that the tap reads.

use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, matmul_f64_on_calling_thread};

use super::network::{ConvolutionLayer, SlidingWindow};
use crate::parallel;

/// Approximate number of output pixels that one parallel CPU task of the reference convolution
/// computes.
const OUTPUT_PIXELS_PER_TASK: usize = 512;

/// Number of frames (one image at one time step) that one parallel CPU task of the reference
/// convolution computes.
fn reference_frames_per_task(window: &SlidingWindow) -> usize {
    (OUTPUT_PIXELS_PER_TASK / window.output_extents.pixels_per_frame()).max(1)
}

/// Copies the input channels that one filter tap reads: a row for each output pixel of each frame,
/// with zeros in the padding. Returns `None` if the filter tap reads only padding.
fn gather_channels_read_by_tap<T: Copy + Into<f64>>(
    window: &SlidingWindow,
    input: &[T],
    tap: usize,
) -> Option<Vec<f64>> {
    let sources: Vec<_> = (0..window.output_extents.pixels_per_frame())
        .map(|pixel| window.input_pixel_read_by_tap(pixel, tap))
        .collect();
    if sources.iter().all(Option::is_none) {
        return None;
    }
    let channels = window.input_extents.channels;
    let frames = input.len() / window.input_extents.elements_per_frame();
    let mut rows = Vec::with_capacity(frames * sources.len() * channels);
    for frame in input.chunks(window.input_extents.elements_per_frame()) {
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

/// Returns the weights of one filter tap of a convolution as a matrix `[out, in]`.
fn weight_matrix_of_tap<'a>(
    conv: &ConvolutionLayer,
    weight: &'a [f64],
    tap: usize,
) -> MatRef<'a, f64> {
    let (out, channels) = (conv.window.output_extents.channels, conv.window.input_extents.channels);
    MatRef::from_row_major_slice(weight, out, conv.elements_per_filter())
        .subcols(tap * channels, channels)
}

/// Views a slice as a row-major matrix with `columns` columns, without a copy.
fn view_f64_rows(values: &[f64], columns: usize) -> MatRef<'_, f64> {
    MatRef::from_row_major_slice(values, values.len() / columns, columns)
}

/// Adds the matrix product `factor·a·b` to `out`, on the calling thread.
fn add_matrix_product_single_threaded(
    out: &mut [f64],
    a: MatRef<f64>,
    b: MatRef<f64>,
    factor: f64,
) {
    let out = MatMut::from_row_major_slice_mut(out, a.nrows(), b.ncols());
    matmul_f64_on_calling_thread(out, Accum::Add, a, b, factor);
}

/// Computes the fp64 convolution `factor·conv(input)` of frames `[frames, side, side, in]` with a
/// weight `[out, taps, in]`, without the bias.
pub fn convolve_frames_in_f64<T: Copy + Into<f64> + Sync>(
    conv: &ConvolutionLayer,
    weight: &[f64],
    input: &[T],
    factor: f64,
) -> Vec<f64> {
    let window = &conv.window;
    let frames = input.len() / window.input_extents.elements_per_frame();
    let mut output = vec![0.0; frames * window.output_extents.elements_per_frame()];
    let task = reference_frames_per_task(window);
    parallel::process_chunks_in_parallel(
        &mut output,
        task * window.output_extents.elements_per_frame(),
        &|number, output| {
            let frames = output.len() / window.output_extents.elements_per_frame();
            let input = &input[number * task * window.input_extents.elements_per_frame()..];
            let input = &input[..frames * window.input_extents.elements_per_frame()];
            for tap in 0..window.tap_count() {
                if let Some(x) = gather_channels_read_by_tap(window, input, tap) {
                    let w = weight_matrix_of_tap(conv, weight, tap).transpose();
                    add_matrix_product_single_threaded(
                        output,
                        view_f64_rows(&x, window.input_extents.channels),
                        w,
                        factor,
                    );
                }
            }
        },
    );
    output
}

/// Computes the fp64 gradient of a convolution's input from the gradient of its output,
/// `factor·conv(input)`.
pub fn convolution_input_gradient_in_f64(
    conv: &ConvolutionLayer,
    weight: &[f64],
    output: &[f64],
    factor: f64,
) -> Vec<f64> {
    let window = &conv.window;
    let channels = window.input_extents.channels;
    let frames = output.len() / window.output_extents.elements_per_frame();
    let mut input = vec![0.0; frames * window.input_extents.elements_per_frame()];
    let task = reference_frames_per_task(window);
    parallel::process_chunks_in_parallel(
        &mut input,
        task * window.input_extents.elements_per_frame(),
        &|number, input| {
            let frames = input.len() / window.input_extents.elements_per_frame();
            let output = &output[number * task * window.output_extents.elements_per_frame()..];
            let output = &output[..frames * window.output_extents.elements_per_frame()];
            let g = view_f64_rows(output, window.output_extents.channels);
            let mut of_tap = vec![0.0; g.nrows() * channels];
            for tap in 0..window.tap_count() {
                let pixels = window.output_extents.pixels_per_frame();
                let sources: Vec<_> =
                    (0..pixels).map(|pixel| window.input_pixel_read_by_tap(pixel, tap)).collect();
                if sources.iter().all(Option::is_none) {
                    continue;
                }
                of_tap.fill(0.0);
                add_matrix_product_single_threaded(
                    &mut of_tap,
                    g,
                    weight_matrix_of_tap(conv, weight, tap),
                    factor,
                );
                let frames = of_tap
                    .chunks(pixels * channels)
                    .zip(input.chunks_mut(window.input_extents.elements_per_frame()));
                for (of_tap, input) in frames {
                    for (row, source) in of_tap.chunks(channels).zip(&sources) {
                        let Some(at) = source else { continue };
                        let to = &mut input[at * channels..][..channels];
                        to.iter_mut().zip(row).for_each(|(to, x)| *to += x);
                    }
                }
            }
        },
    );
    input
}

/// Computes the fp64 gradient of a convolution's weight `[out, taps, in]` from the gradient of its
/// output, `factor·conv(input)`.
pub fn convolution_weight_gradient_in_f64<T: Copy + Into<f64> + Sync>(
    conv: &ConvolutionLayer,
    input: &[T],
    output: &[f64],
    factor: f64,
) -> Vec<f64> {
    let window = &conv.window;
    let (rows, channels) = (window.output_extents.channels, window.input_extents.channels);
    let task = reference_frames_per_task(window);
    let of_tap = |tap: usize| {
        let mut gradient = vec![0.0; rows * channels];
        let outputs = output.chunks(task * window.output_extents.elements_per_frame());
        for (input, output) in
            input.chunks(task * window.input_extents.elements_per_frame()).zip(outputs)
        {
            let Some(x) = gather_channels_read_by_tap(window, input, tap) else { break };
            let g = view_f64_rows(output, rows).transpose();
            add_matrix_product_single_threaded(
                &mut gradient,
                g,
                view_f64_rows(&x, channels),
                factor,
            );
        }
        gradient
    };
    let taps = parallel::map_numbers_in_parallel(window.tap_count(), &of_tap);
    let mut gradient = Vec::with_capacity(conv.elements_of_weight());
    for row in 0..rows {
        taps.iter().for_each(|tap| gradient.extend(&tap[row * channels..][..channels]));
    }
    gradient
}
