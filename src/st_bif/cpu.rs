//! The ST-BIF neuron on the CPU: blocks of neurons keep their state in L1 while the inner loop runs
//! over time, so memory is read once.
//!
//! The CPU backward pass first replays the forward pass of a block of neurons and then runs in
//! reverse time. The membranes H and tracers c of every time step stay in L1, so x and gy are read
//! from memory once and gx is written once.

use half::slice::HalfFloatSliceExt;
use pulp::{Arch, NullaryFnOnce};

use crate::math::{max_or_second_if_first_is_nan, vectorisable_exp2};
use crate::parallel;
use crate::st_bif::definition::{StBifBackward, StBifForward};
use crate::st_bif::neuron::StBifNeuronParameters;
use kernelgate::backend::cpu::{CpuTask, cpu_backend_thread_count};
use kernelgate::backend::{Implementation, PrepareFunction};
use kernelgate::workload::tensor::split_rows_into_column_blocks;
use kernelgate::workload::{Dtype, Tensor, TensorData, Tensors};

/// Number of neurons in a block, whose state one CPU task keeps in the L1 cache.
const NEURONS_PER_L1_BLOCK: usize = 256;

/// CPU implementations of the ST-BIF forward pass.
pub const CPU_ST_BIF_FORWARD_ROWS: &[Implementation<StBifForward>] = &[Implementation {
    implementation_name: "cpu",
    description: "one pass, membrane and tracer of 256 neurons in L1, SIMD over neurons",
    supports: |problem| {
        if problem.packs_spikes_in_two_bits {
            Err("writes one byte a spike".to_owned())
        } else {
            Ok(())
        }
    },
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let neurons = problem.neurons;
        let outputs = Tensors::new().with_output(
            "spikes",
            [neurons.time_steps, neurons.neuron_count],
            Dtype::I8,
        );
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            let TensorData::I8(spikes) = outputs.tensor_mut("spikes").tensor_data_mut() else {
                unreachable!("spikes are i8")
            };
            compute_spikes_from_currents(neurons.neuron_parameters, inputs.tensor("x"), spikes);
        })
    }),
}];

/// CPU implementations of the ST-BIF backward pass.
pub const CPU_ST_BIF_BACKWARD_ROWS: &[Implementation<StBifBackward>] = &[Implementation {
    implementation_name: "cpu",
    description: "replays the forward of 256 neurons in L1, then reverses; one pass over memory",
    supports: |_| Ok(()),
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let neurons = problem.neurons;
        let outputs = Tensors::new().with_output(
            "gx",
            [neurons.time_steps, neurons.neuron_count],
            neurons.dtype,
        );
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            let (x, gy) = (inputs.tensor("x"), inputs.tensor("gy"));
            compute_current_gradient(
                neurons.neuron_parameters,
                x,
                gy,
                outputs.tensor_mut("gx").tensor_data_mut(),
            );
        })
    }),
}];

/// Computes the ST-BIF spikes `[T, N]` of N neurons over T time steps from the currents `x [T, N]`.
pub fn compute_spikes_from_currents(
    parameters: StBifNeuronParameters,
    x: &Tensor,
    spikes: &mut [i8],
) {
    let parameters = NeuronParametersF32::from(parameters);
    let n = neurons_in_tensor(x);
    let width = neurons_per_cpu_task(n);
    parallel::run_tasks_in_parallel(
        split_rows_into_column_blocks(spikes, n, width),
        &|task, mut rows| {
            Arch::new().dispatch(CpuForwardTask {
                parameters: &parameters,
                input_currents: x,
                neuron_count: n,
                first_neuron: task * width,
                spike_rows_by_time_step: &mut rows,
            });
        },
    );
}

/// Computes the gradient `gx [T, N]` of the currents `x [T, N]` from the gradient `gy [T, N]` of
/// the spikes. The tensors x, gy and gx must have the same dtype.
pub fn compute_current_gradient(
    parameters: StBifNeuronParameters,
    x: &Tensor,
    gy: &Tensor,
    gx: &mut TensorData,
) {
    let parameters = NeuronParametersF32::from(parameters);
    match gx {
        TensorData::F32(gx) => {
            backpropagate_columns_in_parallel(&parameters, x, gy, gx, |to: &mut [f32], from| {
                to.copy_from_slice(from)
            })
        }
        TensorData::F16(gx) => {
            backpropagate_columns_in_parallel(&parameters, x, gy, gx, |to, from| {
                to.convert_from_f32_slice(from)
            })
        }
        TensorData::Bf16(gx) => {
            backpropagate_columns_in_parallel(&parameters, x, gy, gx, |to, from| {
                to.convert_from_f32_slice(from)
            })
        }
        _ => unreachable!("gx has the dtype of x"),
    }
}

/// Number of neurons N of a tensor `[T, N]`.
fn neurons_in_tensor(x: &Tensor) -> usize {
    x.shape()[1]
}

/// Number of neurons (columns) of one parallel CPU task: each thread gets several tasks, and a task
/// has whole blocks of neurons.
fn neurons_per_cpu_task(n: usize) -> usize {
    n.div_ceil(8 * cpu_backend_thread_count()).next_multiple_of(NEURONS_PER_L1_BLOCK)
}

/// Parameters of the ST-BIF neuron in fp32: threshold, tracer bounds and prefire.
#[derive(Clone, Copy)]
struct NeuronParametersF32 {
    firing_threshold: f32,
    tracer_min: i32,
    tracer_max: i32,
    prefire_fraction_of_threshold: f32,
}

impl From<StBifNeuronParameters> for NeuronParametersF32 {
    fn from(parameters: StBifNeuronParameters) -> Self {
        Self {
            firing_threshold: parameters.firing_threshold as f32,
            tracer_min: parameters.tracer_min,
            tracer_max: parameters.tracer_max,
            prefire_fraction_of_threshold: parameters.prefire_fraction_of_threshold as f32,
        }
    }
}

impl NeuronParametersF32 {
    fn membrane_before_first_step(&self) -> f32 {
        (0.5 + self.prefire_fraction_of_threshold) * self.firing_threshold
    }

    /// Prefire repayment that is subtracted from the membrane after time step `t`.
    fn prefire_repayment_after_step(&self, t: usize) -> f32 {
        if self.prefire_fraction_of_threshold != 0.0 && (t as i64) < i64::from(self.tracer_max) {
            self.prefire_fraction_of_threshold * self.firing_threshold / self.tracer_max as f32
        } else {
            0.0
        }
    }

    /// Computes one time step of a neuron: updates its membrane and tracer and returns its spike.
    #[inline(always)]
    fn advance_by_time_step(&self, membrane: &mut f32, tracer: &mut i32, repayment: f32) -> i32 {
        let h = *membrane;
        let up = (h >= self.firing_threshold) & (*tracer < self.tracer_max);
        let down = (h < 0.0) & (*tracer > self.tracer_min);
        let spike = i32::from(up) - i32::from(down);
        *membrane = h - self.firing_threshold * spike as f32 - repayment;
        *tracer += spike;
        spike
    }
}

/// Values of a block of neurons that one SIMD loop processes. A block of neurons always has the
/// full number of lanes, and unused lanes of the last block idle; a loop of unknown length would
/// end in scalar code.
type NeuronBlock<T> = [T; NEURONS_PER_L1_BLOCK];

/// Reads the elements `from..from + lanes` as f32: borrows them from an f32 tensor, else converts
/// them into the buffer.
#[inline(always)]
fn read_elements_as_f32<'a>(
    tensor: &'a Tensor,
    from: usize,
    lanes: usize,
    buffer: &'a mut NeuronBlock<f32>,
) -> &'a NeuronBlock<f32> {
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

/// Task that computes the ST-BIF forward pass of the neurons (columns) from `first_neuron` on. The
/// forward task is a type, not a closure: `pulp`'s `dispatch` needs inlined code to use the widest
/// SIMD, and large closures are not inlined.
struct CpuForwardTask<'a, 'b> {
    parameters: &'a NeuronParametersF32,
    input_currents: &'a Tensor,
    neuron_count: usize,
    first_neuron: usize,
    spike_rows_by_time_step: &'a mut [&'b mut [i8]],
}

impl NullaryFnOnce for CpuForwardTask<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self {
            parameters,
            input_currents: x,
            neuron_count: n,
            first_neuron: from,
            spike_rows_by_time_step: rows,
        } = self;
        let width = rows[0].len();
        for block in (0..width).step_by(NEURONS_PER_L1_BLOCK) {
            let lanes = NEURONS_PER_L1_BLOCK.min(width - block);
            let mut membrane = [parameters.membrane_before_first_step(); NEURONS_PER_L1_BLOCK];
            let mut tracer = [0i32; NEURONS_PER_L1_BLOCK];
            let (mut buffer, mut spikes) =
                ([0f32; NEURONS_PER_L1_BLOCK], [0i8; NEURONS_PER_L1_BLOCK]);
            for (t, row) in rows.iter_mut().enumerate() {
                let current = read_elements_as_f32(x, t * n + from + block, lanes, &mut buffer);
                let repayment = parameters.prefire_repayment_after_step(t);
                for lane in 0..NEURONS_PER_L1_BLOCK {
                    membrane[lane] += current[lane];
                    spikes[lane] = parameters.advance_by_time_step(
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

fn backpropagate_columns_in_parallel<T: Send>(
    parameters: &NeuronParametersF32,
    x: &Tensor,
    gy: &Tensor,
    gx: &mut [T],
    store: impl Fn(&mut [T], &[f32]) + Sync,
) {
    let n = neurons_in_tensor(x);
    let width = neurons_per_cpu_task(n);
    parallel::run_tasks_in_parallel(
        split_rows_into_column_blocks(gx, n, width),
        &|task, mut rows| {
            Arch::new().dispatch(CpuBackwardTask {
                parameters,
                input_currents: x,
                spike_gradients: gy,
                neuron_count: n,
                first_neuron: task * width,
                gradient_rows_by_time_step: &mut rows,
                store_current_gradient: &store,
            });
        },
    );
}

/// Task that computes the ST-BIF backward pass of the neurons (columns) from `first_neuron` on.
struct CpuBackwardTask<'a, 'b, T, S> {
    parameters: &'a NeuronParametersF32,
    input_currents: &'a Tensor,
    spike_gradients: &'a Tensor,
    neuron_count: usize,
    first_neuron: usize,
    gradient_rows_by_time_step: &'a mut [&'b mut [T]],
    store_current_gradient: &'a S,
}

impl<T, S: Fn(&mut [T], &[f32])> NullaryFnOnce for CpuBackwardTask<'_, '_, T, S> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self {
            parameters,
            input_currents: x,
            spike_gradients: gy,
            neuron_count: n,
            first_neuron: from,
            gradient_rows_by_time_step: rows,
            store_current_gradient: store,
        } = self;
        let (steps, width) = (rows.len(), rows[0].len());
        let surrogate = GaussianSurrogateConstants::for_neuron_parameters(parameters);
        // Membrane H and tracer c before the spike of each time step, for every neuron of a block.
        let mut history = vec![([0f32; NEURONS_PER_L1_BLOCK], [0i32; NEURONS_PER_L1_BLOCK]); steps];
        let mut buffer = [0f32; NEURONS_PER_L1_BLOCK];
        for block in (0..width).step_by(NEURONS_PER_L1_BLOCK) {
            let lanes = NEURONS_PER_L1_BLOCK.min(width - block);
            let mut membrane = [parameters.membrane_before_first_step(); NEURONS_PER_L1_BLOCK];
            let mut tracer = [0i32; NEURONS_PER_L1_BLOCK];
            for (t, (h, c)) in history.iter_mut().enumerate() {
                let current = read_elements_as_f32(x, t * n + from + block, lanes, &mut buffer);
                let repayment = parameters.prefire_repayment_after_step(t);
                for lane in 0..NEURONS_PER_L1_BLOCK {
                    membrane[lane] += current[lane];
                    h[lane] = membrane[lane];
                    c[lane] = tracer[lane];
                    parameters.advance_by_time_step(
                        &mut membrane[lane],
                        &mut tracer[lane],
                        repayment,
                    );
                }
            }
            let mut grad_v = [0f32; NEURONS_PER_L1_BLOCK];
            let mut grad_tracer = [0f32; NEURONS_PER_L1_BLOCK];
            for (t, (h, c)) in history.iter().enumerate().rev() {
                let gy = read_elements_as_f32(gy, t * n + from + block, lanes, &mut buffer);
                for lane in 0..NEURONS_PER_L1_BLOCK {
                    let (a, b) = surrogate.surrogate_gradients(h[lane], c[lane]);
                    let m =
                        gy[lane] - parameters.firing_threshold * grad_v[lane] + grad_tracer[lane];
                    grad_v[lane] += m * a;
                    grad_tracer[lane] += m * b;
                }
                store(&mut rows[t][block..block + lanes], &grad_v[..lanes]);
            }
        }
    }
}

/// Minimum exponent of the surrogate gradient; with this bound the surrogate never falls below
/// 2^-64, which f32 gradients cannot resolve. Surrogate values below 2^-64 would make products
/// denormal, and each denormal operation costs a hundred cycles.
const MIN_LOG2_OF_SURROGATE: f32 = -64.0;

/// Constants of the Gaussian surrogate gradient in fp32.
struct GaussianSurrogateConstants {
    parameters: NeuronParametersF32,
    /// Factor `-log2(e) / (2·(0.405·θ)²)` of the squared distance in the exponent, so that the
    /// Gaussian is a power of two.
    exponent_factor: f32,
    /// Scale of the Gaussian surrogate, `1 / θ`.
    gaussian_scale: f32,
    /// Surrogate `g(d, 1)` of the tracer's distance d = 1 and 2 from its bound; it is 1 at d = 0
    /// and negligible beyond 2 (g(3, 1) = 1e-12).
    bounds: [f32; 2],
}

impl GaussianSurrogateConstants {
    fn for_neuron_parameters(parameters: &NeuronParametersF32) -> Self {
        let sigma = 0.405 * f64::from(parameters.firing_threshold);
        let bound = |d: f64| (-d * d / (2.0 * 0.405 * 0.405)).exp() as f32;
        Self {
            parameters: *parameters,
            exponent_factor: (-0.5 * std::f64::consts::LOG2_E / (sigma * sigma)) as f32,
            gaussian_scale: 1.0 / parameters.firing_threshold,
            bounds: [bound(1.0), bound(2.0)],
        }
    }

    /// Surrogate gradients (a, b) of a time step, from the membrane and the tracer before its
    /// spike.
    #[inline(always)]
    fn surrogate_gradients(&self, membrane: f32, tracer: i32) -> (f32, f32) {
        let NeuronParametersF32 { firing_threshold: threshold, tracer_min, tracer_max, .. } =
            self.parameters;
        let above = membrane - threshold;
        let up = vectorisable_exp2(max_or_second_if_first_is_nan(
            above * above * self.exponent_factor,
            MIN_LOG2_OF_SURROGATE,
        ));
        let down = vectorisable_exp2(max_or_second_if_first_is_nan(
            membrane * membrane * self.exponent_factor,
            MIN_LOG2_OF_SURROGATE,
        ));
        let a = (if tracer < tracer_max { up } else { 0.0 }
            + if tracer > tracer_min { down } else { 0.0 })
            * self.gaussian_scale;
        // Since θ > 0, only one of the tracer's two bounds can affect the surrogate gradient b.
        let distance =
            if membrane >= threshold { tracer_max - tracer } else { tracer - tracer_min };
        let near = if distance == 1 { self.bounds[0] } else { 0.0 }
            + if distance == 2 { self.bounds[1] } else { 0.0 };
        let bound = if distance == 0 { 1.0 } else { near };
        let b = if (membrane >= threshold) | (membrane < 0.0) { -bound } else { 0.0 };
        (a, b)
    }
}
