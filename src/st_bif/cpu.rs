//! The ST-BIF neuron on the CPU: blocks of neurons with their state in L1, the loop over time
//! inside, one pass over memory.
//!
//! The backward pass replays the forward pass of a block and then runs in reverse time. H and c of
//! every step stay in L1, so that x and gy are read once and gx is written once.

use half::slice::HalfFloatSliceExt;
use pulp::{Arch, NullaryFnOnce};

use crate::math::{exp2, max_ignoring_nan};
use crate::parallel;
use crate::st_bif::definition::{StBifBackward, StBifForward};
use crate::st_bif::neuron::NeuronParameters;
use kernelgate::backend::cpu::{CpuTask, available_threads};
use kernelgate::backend::{Implementation, Prepare};
use kernelgate::workload::tensor::split_columns;
use kernelgate::workload::{Dtype, Tensor, TensorData, Tensors};

/// Number of neurons whose state is kept in L1 at a time.
const NEURONS_PER_BLOCK: usize = 256;

/// CPU implementations of the ST-BIF forward pass.
pub const FORWARD: &[Implementation<StBifForward>] = &[Implementation {
    name: "cpu",
    about: "one pass, membrane and tracer of 256 neurons in L1, SIMD over neurons",
    supports: |problem| {
        if problem.packed { Err("writes one byte a spike".to_owned()) } else { Ok(()) }
    },
    prepare: Prepare::Cpu(|problem, inputs| {
        let neurons = problem.neurons;
        let outputs = Tensors::new().with_output("spikes", [neurons.t, neurons.n], Dtype::I8);
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            let TensorData::I8(spikes) = outputs.tensor_mut("spikes").tensor_data_mut() else {
                unreachable!("spikes are i8")
            };
            compute_spikes(neurons.parameters, inputs.tensor("x"), spikes);
        })
    }),
}];

/// CPU implementations of the ST-BIF backward pass.
pub const BACKWARD: &[Implementation<StBifBackward>] = &[Implementation {
    name: "cpu",
    about: "replays the forward of 256 neurons in L1, then reverses; one pass over memory",
    supports: |_| Ok(()),
    prepare: Prepare::Cpu(|problem, inputs| {
        let neurons = problem.neurons;
        let outputs = Tensors::new().with_output("gx", [neurons.t, neurons.n], neurons.dtype);
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            let (x, gy) = (inputs.tensor("x"), inputs.tensor("gy"));
            current_gradient(neurons.parameters, x, gy, outputs.tensor_mut("gx").tensor_data_mut());
        })
    }),
}];

/// Computes the spikes `[T, N]` of currents `x [T, N]`.
pub fn compute_spikes(parameters: NeuronParameters, x: &Tensor, spikes: &mut [i8]) {
    let parameters = NeuronScalars32::from(parameters);
    let n = neuron_count_of(x);
    let width = columns_per_task(n);
    parallel::for_each_task(split_columns(spikes, n, width), &|task, mut rows| {
        Arch::new().dispatch(ForwardTask {
            parameters: &parameters,
            x,
            n,
            from: task * width,
            rows: &mut rows,
        });
    });
}

/// Computes the gradient `gx [T, N]` of the currents `x [T, N]` from the gradient `gy [T, N]` of
/// the spikes. The tensors x, gy and gx have the same dtype.
pub fn current_gradient(
    parameters: NeuronParameters,
    x: &Tensor,
    gy: &Tensor,
    gx: &mut TensorData,
) {
    let parameters = NeuronScalars32::from(parameters);
    match gx {
        TensorData::F32(gx) => backward_columns(&parameters, x, gy, gx, |to: &mut [f32], from| {
            to.copy_from_slice(from)
        }),
        TensorData::F16(gx) => {
            backward_columns(&parameters, x, gy, gx, |to, from| to.convert_from_f32_slice(from))
        }
        TensorData::Bf16(gx) => {
            backward_columns(&parameters, x, gy, gx, |to, from| to.convert_from_f32_slice(from))
        }
        _ => unreachable!("gx has the dtype of x"),
    }
}

/// Number of neurons N of a tensor `[T, N]`.
fn neuron_count_of(x: &Tensor) -> usize {
    x.shape()[1]
}

/// Number of columns of a task: each thread gets several tasks, and a task has whole blocks of
/// lanes.
fn columns_per_task(n: usize) -> usize {
    n.div_ceil(8 * available_threads()).next_multiple_of(NEURONS_PER_BLOCK)
}

/// Constants of the neuron in fp32.
#[derive(Clone, Copy)]
struct NeuronScalars32 {
    threshold: f32,
    tracer_min: i32,
    tracer_max: i32,
    prefire: f32,
}

impl From<NeuronParameters> for NeuronScalars32 {
    fn from(parameters: NeuronParameters) -> Self {
        Self {
            threshold: parameters.threshold as f32,
            tracer_min: parameters.tracer_min,
            tracer_max: parameters.tracer_max,
            prefire: parameters.prefire as f32,
        }
    }
}

impl NeuronScalars32 {
    fn initial_membrane(&self) -> f32 {
        (0.5 + self.prefire) * self.threshold
    }

    /// Repayment that is added to the membrane after time step `t`.
    fn membrane_repayment(&self, t: usize) -> f32 {
        if self.prefire != 0.0 && (t as i64) < i64::from(self.tracer_max) {
            self.prefire * self.threshold / self.tracer_max as f32
        } else {
            0.0
        }
    }

    /// Computes one time step of a neuron: returns the spike and updates membrane and tracer.
    #[inline(always)]
    fn advance_neuron(&self, membrane: &mut f32, tracer: &mut i32, repayment: f32) -> i32 {
        let h = *membrane;
        let up = (h >= self.threshold) & (*tracer < self.tracer_max);
        let down = (h < 0.0) & (*tracer > self.tracer_min);
        let spike = i32::from(up) - i32::from(down);
        *membrane = h - self.threshold * spike as f32 - repayment;
        *tracer += spike;
        spike
    }
}

/// A block of neurons. Lane blocks always have this whole length, and the rest of the last block is
/// idle: a loop whose length the compiler does not know would end in scalar code.
type NeuronLaneBlock<T> = [T; NEURONS_PER_BLOCK];

/// Elements `from..from + lanes` as f32: a slice of the tensor, or converted into the buffer.
#[inline(always)]
fn elements_as_f32<'a>(
    tensor: &'a Tensor,
    from: usize,
    lanes: usize,
    buffer: &'a mut NeuronLaneBlock<f32>,
) -> &'a NeuronLaneBlock<f32> {
    let range = from..from + lanes;
    match tensor.tensor_data() {
        TensorData::F32(values) => match values[range].first_chunk() {
            Some(block) => return block,
            None => buffer[..lanes].copy_from_slice(&values[from..from + lanes]),
        },
        TensorData::F16(values) => values[range].convert_to_f32_slice(&mut buffer[..lanes]),
        TensorData::Bf16(values) => values[range].convert_to_f32_slice(&mut buffer[..lanes]),
        TensorData::F64(_) | TensorData::I8(_) => unreachable!("inputs are f32, f16 or bf16"),
    }
    buffer
}

/// Task that computes the forward pass of the columns `from..`. The task is a type, not a closure,
/// because `dispatch` compiles for the widest SIMD only code that it can inline, and a closure of
/// this size is not inlined.
struct ForwardTask<'a, 'b> {
    parameters: &'a NeuronScalars32,
    x: &'a Tensor,
    n: usize,
    from: usize,
    rows: &'a mut [&'b mut [i8]],
}

impl NullaryFnOnce for ForwardTask<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { parameters, x, n, from, rows } = self;
        let width = rows[0].len();
        for block in (0..width).step_by(NEURONS_PER_BLOCK) {
            let lanes = NEURONS_PER_BLOCK.min(width - block);
            let mut membrane = [parameters.initial_membrane(); NEURONS_PER_BLOCK];
            let mut tracer = [0i32; NEURONS_PER_BLOCK];
            let (mut buffer, mut spikes) = ([0f32; NEURONS_PER_BLOCK], [0i8; NEURONS_PER_BLOCK]);
            for (t, row) in rows.iter_mut().enumerate() {
                let current = elements_as_f32(x, t * n + from + block, lanes, &mut buffer);
                let repayment = parameters.membrane_repayment(t);
                for lane in 0..NEURONS_PER_BLOCK {
                    membrane[lane] += current[lane];
                    spikes[lane] = parameters.advance_neuron(
                        &mut membrane[lane],
                        &mut tracer[lane],
                        repayment,
                    ) as i8;
                }
                row[block..block + lanes].copy_from_slice(&spikes[..lanes]);
            }
        }
    }
}

fn backward_columns<T: Send>(
    parameters: &NeuronScalars32,
    x: &Tensor,
    gy: &Tensor,
    gx: &mut [T],
    store: impl Fn(&mut [T], &[f32]) + Sync,
) {
    let n = neuron_count_of(x);
    let width = columns_per_task(n);
    parallel::for_each_task(split_columns(gx, n, width), &|task, mut rows| {
        Arch::new().dispatch(BackwardTask {
            parameters,
            x,
            gy,
            n,
            from: task * width,
            rows: &mut rows,
            store: &store,
        });
    });
}

/// Task that computes the backward pass of the columns `from..`; see [`ForwardTask`].
struct BackwardTask<'a, 'b, T, S> {
    parameters: &'a NeuronScalars32,
    x: &'a Tensor,
    gy: &'a Tensor,
    n: usize,
    from: usize,
    rows: &'a mut [&'b mut [T]],
    store: &'a S,
}

impl<T, S: Fn(&mut [T], &[f32])> NullaryFnOnce for BackwardTask<'_, '_, T, S> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { parameters, x, gy, n, from, rows, store } = self;
        let (steps, width) = (rows.len(), rows[0].len());
        let surrogate = SurrogateConstants::new(parameters);
        // H and c before each time step, for every lane of a block.
        let mut history = vec![([0f32; NEURONS_PER_BLOCK], [0i32; NEURONS_PER_BLOCK]); steps];
        let mut buffer = [0f32; NEURONS_PER_BLOCK];
        for block in (0..width).step_by(NEURONS_PER_BLOCK) {
            let lanes = NEURONS_PER_BLOCK.min(width - block);
            let mut membrane = [parameters.initial_membrane(); NEURONS_PER_BLOCK];
            let mut tracer = [0i32; NEURONS_PER_BLOCK];
            for (t, (h, c)) in history.iter_mut().enumerate() {
                let current = elements_as_f32(x, t * n + from + block, lanes, &mut buffer);
                let repayment = parameters.membrane_repayment(t);
                for lane in 0..NEURONS_PER_BLOCK {
                    membrane[lane] += current[lane];
                    h[lane] = membrane[lane];
                    c[lane] = tracer[lane];
                    parameters.advance_neuron(&mut membrane[lane], &mut tracer[lane], repayment);
                }
            }
            let mut grad_v = [0f32; NEURONS_PER_BLOCK];
            let mut grad_tracer = [0f32; NEURONS_PER_BLOCK];
            for (t, (h, c)) in history.iter().enumerate().rev() {
                let gy = elements_as_f32(gy, t * n + from + block, lanes, &mut buffer);
                for lane in 0..NEURONS_PER_BLOCK {
                    let (a, b) = surrogate.at(h[lane], c[lane]);
                    let m = gy[lane] - parameters.threshold * grad_v[lane] + grad_tracer[lane];
                    grad_v[lane] += m * a;
                    grad_tracer[lane] += m * b;
                }
                store(&mut rows[t][block..block + lanes], &grad_v[..lanes]);
            }
        }
    }
}

/// Minimum exponent of the surrogate: below it the surrogate stays at 2^-64, which f32 gradients
/// cannot resolve. Smaller values would make products denormal, and each denormal number costs a
/// hundred cycles.
const MIN_SURROGATE_EXPONENT: f32 = -64.0;

/// Constants of the Gaussian surrogate in fp32.
struct SurrogateConstants {
    parameters: NeuronScalars32,
    /// Exponent factor `-log2(e) / (2·(0.405·θ)²)`, with which the Gaussian is a power of two.
    exponent: f32,
    /// Scale of the Gaussian, `1 / θ`.
    scale: f32,
    /// Surrogate `g(d, 1)` for d = 1 and 2; it is 1 at d = 0 and negligible beyond 2 (g(3, 1) =
    /// 1e-12).
    bounds: [f32; 2],
}

impl SurrogateConstants {
    fn new(parameters: &NeuronScalars32) -> Self {
        let sigma = 0.405 * f64::from(parameters.threshold);
        let bound = |d: f64| (-d * d / (2.0 * 0.405 * 0.405)).exp() as f32;
        Self {
            parameters: *parameters,
            exponent: (-0.5 * std::f64::consts::LOG2_E / (sigma * sigma)) as f32,
            scale: 1.0 / parameters.threshold,
            bounds: [bound(1.0), bound(2.0)],
        }
    }

    /// Surrogate gradients (a, b) of a time step, from its membrane and its tracer before the
    /// spike.
    #[inline(always)]
    fn at(&self, h: f32, c: i32) -> (f32, f32) {
        let NeuronScalars32 { threshold, tracer_min, tracer_max, .. } = self.parameters;
        let above = h - threshold;
        let up = exp2(max_ignoring_nan(above * above * self.exponent, MIN_SURROGATE_EXPONENT));
        let down = exp2(max_ignoring_nan(h * h * self.exponent, MIN_SURROGATE_EXPONENT));
        let a = (if c < tracer_max { up } else { 0.0 } + if c > tracer_min { down } else { 0.0 })
            * self.scale;
        // Since θ > 0, at most one of the two bounds matters.
        let distance = if h >= threshold { tracer_max - c } else { c - tracer_min };
        let near = if distance == 1 { self.bounds[0] } else { 0.0 }
            + if distance == 2 { self.bounds[1] } else { 0.0 };
        let bound = if distance == 0 { 1.0 } else { near };
        let b = if (h >= threshold) | (h < 0.0) { -bound } else { 0.0 };
        (a, b)
    }
}
