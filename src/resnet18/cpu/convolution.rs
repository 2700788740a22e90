//! Convolutions in f32 as GEMMs of gathered rows; each task computes a block of frames or of
//! filters.
//!
//! Taps that read only padding are skipped: eight of nine taps if a frame is one pixel.

use std::ops::Range;

use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, multiply_f32};

use crate::parallel;
use crate::resnet18::network::{ConvolutionLayer, ConvolutionWindow};
use kernelgate::backend::cpu::available_threads;

/// Maximum number of output pixels of a task: their gathered inputs stay in L2.
const MAX_ROWS_PER_TASK: usize = 256;
/// Minimum number of operand columns that a task of the weight gradient gathers.
const MIN_GATHERED_COLUMNS: usize = 64;
/// Number of filters for which a task computes the weight gradient.
const FILTERS_PER_TASK: usize = 128;

/// Input element of a convolution: a spike or the value of a pixel.
pub trait ConvolutionInput: Copy + Sync {
    /// Value of the element as a float; the value of a spike is a multiple of the threshold.
    fn element_value(self) -> f32;
}

impl ConvolutionInput for i8 {
    fn element_value(self) -> f32 {
        f32::from(self)
    }
}

impl ConvolutionInput for f32 {
    fn element_value(self) -> f32 {
        self
    }
}

/// Number of frames of a task: few enough rows, and few enough frames that every thread gets some.
fn frames_per_task(window: &ConvolutionWindow, frames: usize) -> usize {
    let fit = (MAX_ROWS_PER_TASK / window.output.pixel_count()).max(1);
    fit.min(frames.div_ceil(2 * available_threads())).max(1)
}

/// Gathers the operand's rows, one for each output pixel: the input of each tap, with zeros in the
/// padding.
fn gather_rows<T: ConvolutionInput>(
    window: &ConvolutionWindow,
    input: &[T],
    taps: Range<usize>,
    rows: &mut Vec<f32>,
) {
    rows.clear();
    let channels = window.input.channels;
    for frame in input.chunks(window.input.elements()) {
        for pixel in 0..window.output.pixel_count() {
            for tap in taps.clone() {
                match window.source_pixel(pixel, tap) {
                    Some(at) => rows.extend(
                        frame[at * channels..][..channels]
                            .iter()
                            .map(|&element| element.element_value()),
                    ),
                    None => rows.resize(rows.len() + channels, 0.0),
                }
            }
        }
    }
}

fn view(values: &[f32], columns: usize) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(values, values.len() / columns, columns)
}

/// Columns of the weight that belong to the given taps, `[out, taps·in]`.
fn weight_columns_of_taps<'a>(
    conv: &ConvolutionLayer,
    weight: &'a [f32],
    taps: &Range<usize>,
) -> MatRef<'a, f32> {
    let channels = conv.window.input.channels;
    view(weight, conv.filter_elements()).subcols(taps.start * channels, taps.len() * channels)
}

fn multiply(out: &mut [f32], accumulate: Accum, a: MatRef<f32>, b: MatRef<f32>, factor: f32) {
    let out = MatMut::from_row_major_slice_mut(out, a.nrows(), b.ncols());
    multiply_f32(out, accumulate, a, b, factor);
}

/// Computes `factor·conv(input)` and writes it to the output frames `[frames, side, side, out]`, or
/// adds it to them.
pub fn convolve_into<T: ConvolutionInput>(
    conv: &ConvolutionLayer,
    weight: &[f32],
    input: &[T],
    factor: f32,
    accumulate: Accum,
    output: &mut [f32],
) {
    let window = &conv.window;
    let taps = window.taps_that_read_pixels();
    let task = frames_per_task(window, input.len() / window.input.elements());
    let parts = input.chunks(task * window.input.elements());
    let tasks = output.chunks_mut(task * window.output.elements()).zip(parts).collect();
    parallel::for_each_task_with_scratch(tasks, &|rows, _, (output, input)| {
        gather_rows(window, input, taps.clone(), rows);
        let x = view(rows, taps.len() * window.input.channels);
        multiply(
            output,
            accumulate,
            x,
            weight_columns_of_taps(conv, weight, &taps).transpose(),
            factor,
        );
    });
}

/// Adds the gradient of a convolution's input, computed from the gradient of its output
/// (`factor·conv(input)`), to `input`.
pub fn add_input_gradient(
    conv: &ConvolutionLayer,
    weight: &[f32],
    output: &[f32],
    factor: f32,
    input: &mut [f32],
) {
    let window = &conv.window;
    let (taps, channels) = (window.taps_that_read_pixels(), window.input.channels);
    let task = frames_per_task(window, output.len() / window.output.elements());
    let width = taps.len() * channels;
    let parts = output.chunks(task * window.output.elements());
    let tasks = input.chunks_mut(task * window.input.elements()).zip(parts).collect();
    parallel::for_each_task_with_scratch(
        tasks,
        &|rows, _, (input, output): (&mut [f32], &[f32])| {
            let g = view(output, window.output.channels);
            rows.resize(g.nrows() * width, 0.0);
            multiply(rows, Accum::Replace, g, weight_columns_of_taps(conv, weight, &taps), factor);
            let frames = rows.chunks(window.output.pixel_count() * width);
            for (rows, input) in frames.zip(input.chunks_mut(window.input.elements())) {
                for (pixel, row) in rows.chunks(width).enumerate() {
                    for (tap, part) in taps.clone().zip(row.chunks(channels)) {
                        let Some(at) = window.source_pixel(pixel, tap) else { continue };
                        let to = &mut input[at * channels..][..channels];
                        to.iter_mut().zip(part).for_each(|(to, g)| *to += g);
                    }
                }
            }
        },
    );
}

/// Computes the gradient of a convolution's weight `[out, taps, in]` from the gradient of its
/// output (`factor·conv(input)`).
pub fn convolution_weight_gradient<T: ConvolutionInput>(
    conv: &ConvolutionLayer,
    input: &[T],
    output: &[f32],
    factor: f32,
    gradient: &mut [f32],
) {
    let window = &conv.window;
    let (filters, channels) = (window.output.channels, window.input.channels);
    let taps = window.taps_that_read_pixels();
    let group = MIN_GATHERED_COLUMNS.div_ceil(channels);
    let of_group = |first: usize| first..(first + group).min(taps.end);
    let mut tasks: Vec<(Range<usize>, usize, Vec<f32>)> = taps
        .clone()
        .step_by(group)
        .flat_map(|first| {
            (0..filters)
                .step_by(FILTERS_PER_TASK)
                .map(move |filter| (of_group(first), filter, vec![]))
        })
        .collect();
    let frames = (MAX_ROWS_PER_TASK / window.output.pixel_count()).max(1);
    parallel::for_each_task_with_scratch(
        tasks.iter_mut().collect(),
        &|rows, _, (taps, filter, part)| {
            let filter = *filter;
            let (height, width) = (FILTERS_PER_TASK.min(filters - filter), taps.len() * channels);
            part.resize(height * width, 0.0);
            let outputs = output.chunks(frames * window.output.elements());
            for (input, output) in input.chunks(frames * window.input.elements()).zip(outputs) {
                gather_rows(window, input, taps.clone(), rows);
                let g = view(output, filters).subcols(filter, height).transpose();
                multiply(part, Accum::Add, g, view(rows, width), factor);
            }
        },
    );
    gradient.fill(0.0);
    for (taps, filter, part) in tasks {
        for (row, part) in part.chunks(taps.len() * channels).enumerate() {
            let at = (filter + row) * conv.filter_elements() + taps.start * channels;
            gradient[at..][..part.len()].copy_from_slice(part);
        }
    }
}
