//! Convolutions of the CPU implementation in f32, as GEMMs of gathered rows; each parallel task
//! computes a block of frames or of filters.
//!
//! The CPU convolutions skip filter taps that read only padding: eight of nine taps if a frame is
//! one pixel.

use std::ops::Range;

use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, matmul_f32_on_calling_thread};

use crate::parallel;
use crate::resnet18::network::{ConvolutionLayer, SlidingWindow};
use kernelgate::backend::cpu::cpu_backend_thread_count;

/// Maximum number of output pixels that one parallel CPU task computes, so that their gathered
/// inputs stay in the L2 cache.
const MAX_OUTPUT_PIXELS_PER_TASK: usize = 256;
/// Minimum number of operand columns that a parallel CPU task gathers for the weight gradient of a
/// convolution.
const MIN_GATHERED_COLUMNS_PER_TASK: usize = 64;
/// Number of filters for which one parallel CPU task computes the weight gradient of a convolution.
const WEIGHT_GRADIENT_FILTERS_PER_TASK: usize = 128;

/// Element type of a convolution's input: a spike (i8) or the value of a pixel (f32).
pub trait SpikeOrPixel: Copy + Sync {
    /// Value of the element as f32; for a spike its count, still to be multiplied by the threshold.
    fn value_as_f32(self) -> f32;
}

impl SpikeOrPixel for i8 {
    fn value_as_f32(self) -> f32 {
        f32::from(self)
    }
}

impl SpikeOrPixel for f32 {
    fn value_as_f32(self) -> f32 {
        self
    }
}

/// Number of frames that one parallel CPU task convolves: few enough that the gathered rows stay in
/// L2 and every thread gets a task.
fn frames_per_convolution_task(window: &SlidingWindow, frames: usize) -> usize {
    let fit = (MAX_OUTPUT_PIXELS_PER_TASK / window.output_extents.pixels_per_frame()).max(1);
    fit.min(frames.div_ceil(2 * cpu_backend_thread_count())).max(1)
}

/// Gathers one row for each output pixel: the input channels that each of the taps reads, with
/// zeros in the padding.
fn gather_input_rows_of_taps<T: SpikeOrPixel>(
    window: &SlidingWindow,
    input: &[T],
    taps: Range<usize>,
    rows: &mut Vec<f32>,
) {
    rows.clear();
    let channels = window.input_extents.channels;
    for frame in input.chunks(window.input_extents.elements_per_frame()) {
        for pixel in 0..window.output_extents.pixels_per_frame() {
            for tap in taps.clone() {
                match window.input_pixel_read_by_tap(pixel, tap) {
                    Some(at) => rows.extend(
                        frame[at * channels..][..channels]
                            .iter()
                            .map(|&element| element.value_as_f32()),
                    ),
                    None => rows.resize(rows.len() + channels, 0.0),
                }
            }
        }
    }
}

fn view_f32_rows(values: &[f32], columns: usize) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(values, values.len() / columns, columns)
}

/// Returns the weight columns that belong to the given filter taps, as a matrix `[out, taps·in]`.
fn weight_columns_of_taps<'a>(
    conv: &ConvolutionLayer,
    weight: &'a [f32],
    taps: &Range<usize>,
) -> MatRef<'a, f32> {
    let channels = conv.window.input_extents.channels;
    view_f32_rows(weight, conv.elements_per_filter())
        .subcols(taps.start * channels, taps.len() * channels)
}

fn multiply_into_f32(
    out: &mut [f32],
    accumulate: Accum,
    a: MatRef<f32>,
    b: MatRef<f32>,
    factor: f32,
) {
    let out = MatMut::from_row_major_slice_mut(out, a.nrows(), b.ncols());
    matmul_f32_on_calling_thread(out, accumulate, a, b, factor);
}

/// Computes the f32 convolution `factor·conv(input)` and writes it to the output frames `[frames,
/// side, side, out]`, or adds it to them.
pub fn convolve_frames_in_f32<T: SpikeOrPixel>(
    conv: &ConvolutionLayer,
    weight: &[f32],
    input: &[T],
    factor: f32,
    accumulate: Accum,
    output: &mut [f32],
) {
    let window = &conv.window;
    let taps = window.range_of_taps_that_read_pixels();
    let task = frames_per_convolution_task(
        window,
        input.len() / window.input_extents.elements_per_frame(),
    );
    let parts = input.chunks(task * window.input_extents.elements_per_frame());
    let tasks =
        output.chunks_mut(task * window.output_extents.elements_per_frame()).zip(parts).collect();
    parallel::run_tasks_in_parallel_with_scratch(tasks, &|rows, _, (output, input)| {
        gather_input_rows_of_taps(window, input, taps.clone(), rows);
        let x = view_f32_rows(rows, taps.len() * window.input_extents.channels);
        multiply_into_f32(
            output,
            accumulate,
            x,
            weight_columns_of_taps(conv, weight, &taps).transpose(),
            factor,
        );
    });
}

/// Computes the gradient of a convolution's input from the gradient of its output,
/// `factor·conv(input)`, and adds it to `input`.
pub fn add_convolution_input_gradient(
    conv: &ConvolutionLayer,
    weight: &[f32],
    output: &[f32],
    factor: f32,
    input: &mut [f32],
) {
    let window = &conv.window;
    let (taps, channels) = (window.range_of_taps_that_read_pixels(), window.input_extents.channels);
    let task = frames_per_convolution_task(
        window,
        output.len() / window.output_extents.elements_per_frame(),
    );
    let width = taps.len() * channels;
    let parts = output.chunks(task * window.output_extents.elements_per_frame());
    let tasks =
        input.chunks_mut(task * window.input_extents.elements_per_frame()).zip(parts).collect();
    parallel::run_tasks_in_parallel_with_scratch(tasks, &|rows,
                                                          _,
                                                          (input, output): (
        &mut [f32],
        &[f32],
    )| {
        let g = view_f32_rows(output, window.output_extents.channels);
        rows.resize(g.nrows() * width, 0.0);
        multiply_into_f32(
            rows,
            Accum::Replace,
            g,
            weight_columns_of_taps(conv, weight, &taps),
            factor,
        );
        let frames = rows.chunks(window.output_extents.pixels_per_frame() * width);
        for (rows, input) in frames.zip(input.chunks_mut(window.input_extents.elements_per_frame()))
        {
            for (pixel, row) in rows.chunks(width).enumerate() {
                for (tap, part) in taps.clone().zip(row.chunks(channels)) {
                    let Some(at) = window.input_pixel_read_by_tap(pixel, tap) else { continue };
                    let to = &mut input[at * channels..][..channels];
                    to.iter_mut().zip(part).for_each(|(to, g)| *to += g);
                }
            }
        }
    });
}

/// Computes the f32 gradient of a convolution's weight `[out, taps, in]` from the gradient of its
/// output, `factor·conv(input)`.
pub fn convolution_weight_gradient_in_f32<T: SpikeOrPixel>(
    conv: &ConvolutionLayer,
    input: &[T],
    output: &[f32],
    factor: f32,
    gradient: &mut [f32],
) {
    let window = &conv.window;
    let (filters, channels) = (window.output_extents.channels, window.input_extents.channels);
    let taps = window.range_of_taps_that_read_pixels();
    let group = MIN_GATHERED_COLUMNS_PER_TASK.div_ceil(channels);
    let of_group = |first: usize| first..(first + group).min(taps.end);
    let mut tasks: Vec<(Range<usize>, usize, Vec<f32>)> = taps
        .clone()
        .step_by(group)
        .flat_map(|first| {
            (0..filters)
                .step_by(WEIGHT_GRADIENT_FILTERS_PER_TASK)
                .map(move |filter| (of_group(first), filter, vec![]))
        })
        .collect();
    let frames = (MAX_OUTPUT_PIXELS_PER_TASK / window.output_extents.pixels_per_frame()).max(1);
    parallel::run_tasks_in_parallel_with_scratch(tasks.iter_mut().collect(), &|rows,
                                                                               _,
                                                                               (
        taps,
        filter,
        part,
    )| {
        let filter = *filter;
        let (height, width) =
            (WEIGHT_GRADIENT_FILTERS_PER_TASK.min(filters - filter), taps.len() * channels);
        part.resize(height * width, 0.0);
        let outputs = output.chunks(frames * window.output_extents.elements_per_frame());
        for (input, output) in
            input.chunks(frames * window.input_extents.elements_per_frame()).zip(outputs)
        {
            gather_input_rows_of_taps(window, input, taps.clone(), rows);
            let g = view_f32_rows(output, filters).subcols(filter, height).transpose();
            multiply_into_f32(part, Accum::Add, g, view_f32_rows(rows, width), factor);
        }
    });
    gradient.fill(0.0);
    for (taps, filter, part) in tasks {
        for (row, part) in part.chunks(taps.len() * channels).enumerate() {
            let at = (filter + row) * conv.elements_per_filter() + taps.start * channels;
            gradient[at..][..part.len()].copy_from_slice(part);
        }
    }
}
