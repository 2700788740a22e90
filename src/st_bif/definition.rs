//! The ST-BIF neuron over many time steps: workloads with ternary spikes, a bounded tracer, and the
//! Gaussian surrogate gradient.
//!
//! The ST-BIF equations follow SpikeZIP-TF (arXiv 2406.03470) and its public multi-step operator.
//! Currents and threshold are dyadic (multiples of a power of two), so the forward pass is exact in
//! fp32 and spikes are compared bit for bit.
//!
//! The final membrane, and the membranes `H` and tracers `C` saved for the backward pass, are no
//! outputs of the workloads. The outputs of the ST-BIF workloads are the spikes for the next layer
//! and the gradient for the previous layer; the state saved in between is an implementation's
//! choice.

use super::neuron::{self, NeuronSimulation, StBifNeuronParameters};
use crate::draw::draw_tensor_of_mapped_normals;
use crate::parallel;
use kernelgate::suite::ProblemsAlongEachAxis;
use kernelgate::workload::tensor::split_rows_into_column_blocks;
use kernelgate::workload::{
    Axis, AxisError, Dtype, Expected, FlopUnit, InputSymmetry, Point, Problem, Tensor, Tensors,
    Tolerance, Work, Workload,
};

/// Number of neurons of one image in each neuron layer of ResNet-18 on 32x32 images, with the
/// ImageNet stem (7x7 and max pooling) and the CIFAR stem (3x3).
const NEURONS_PER_IMAGE_BY_RESNET18_LAYER: &[(&str, usize)] = &[
    ("conv1", 64 * 16 * 16),
    ("layer1", 64 * 8 * 8),
    ("layer2", 128 * 4 * 4),
    ("layer3", 256 * 2 * 2),
    ("layer4", 512),
    ("cifar_conv1", 64 * 32 * 32),
    ("cifar_layer2", 128 * 16 * 16),
    ("cifar_layer3", 256 * 8 * 8),
    ("cifar_layer4", 512 * 4 * 4),
];

const N: Axis = Axis::number("n", "neurons, flat");
const RESNET18_LAYER_AXIS: Axis = Axis::one_of(
    "layer",
    &[
        "conv1",
        "layer1",
        "layer2",
        "layer3",
        "layer4",
        "cifar_conv1",
        "cifar_layer2",
        "cifar_layer3",
        "cifar_layer4",
    ],
    "neuron layer of ResNet-18 on 32x32 images, in place of n",
);
const B: Axis = Axis::number("b", "batch, with layer");
const T: Axis = Axis::number("t", "time steps");
const NEURON_QUANTISATION_LEVEL_AXIS: Axis =
    Axis::number("level", "quantisation level, even: the tracer ends at level/2 - 1");
/// Maximum quantisation level of a neuron: the tracer is counted in 32 bits.
const MAX_QUANTISATION_LEVEL: usize = 1 << 20;
const ST_BIF_DTYPE_AXIS: Axis = Axis::one_of(
    "dtype",
    &["f32", "f16", "bf16"],
    "dtype of inputs and gradients; the state is always f32",
);

/// Scan of the ST-BIF forward pass over batch, time steps and level, one at a time, around conv1 of
/// ResNet-18 at b=32, t=8, level=8.
pub const ST_BIF_FORWARD_SCAN: ProblemsAlongEachAxis = ProblemsAlongEachAxis {
    selection_lines: &[
        "layer=conv1 b=8,16,32 t=8 level=8 dtype=f32 spikes=int8",
        "layer=conv1 b=32 t=4,8,16 level=8 dtype=f32 spikes=int8",
        "layer=conv1 b=32 t=8 level=4,8,16 dtype=f32 spikes=int8",
    ],
    default_implementations: &["cuda/fused", "cuda/vectorized"],
};

/// Scan of the ST-BIF backward pass over one axis at a time.
pub const ST_BIF_BACKWARD_SCAN: ProblemsAlongEachAxis = ProblemsAlongEachAxis {
    selection_lines: &[
        "layer=conv1 b=8,16,32 t=8 level=8 dtype=f32",
        "layer=conv1 b=32 t=4,8,16 level=8 dtype=f32",
        "layer=conv1 b=32 t=8 level=4,8,16 dtype=f32",
    ],
    default_implementations: &["cuda/saved", "cuda/replay"],
};

/// Workload of the ST-BIF forward pass: spikes of a neuron layer over all time steps.
pub const ST_BIF_FORWARD_WORKLOAD: Workload<StBifForward> = Workload {
    name: "st_bif/forward",
    about: "ST-BIF neurons over T steps: input current to ternary spikes",
    revision: 1,
    axes: &[
        N,
        RESNET18_LAYER_AXIS,
        B,
        T,
        NEURON_QUANTISATION_LEVEL_AXIS,
        ST_BIF_DTYPE_AXIS,
        Axis::one_of("spikes", &["int8", "packed"], "one byte a spike, or four spikes a byte"),
    ],
    default_selection_lines: &[
        "n=4194304 t=8 level=8 dtype=f32 spikes=int8",
        "n=4194304 t=4,16 level=8 dtype=f32 spikes=int8",
        "layer=conv1 b=32 t=8 level=8 dtype=f32 spikes=int8",
    ],
    accelerator_selection_lines: &[
        "n=33554432 t=8 level=8 dtype=f32 spikes=int8,packed",
        "n=33554432 t=8 level=8 dtype=f16 spikes=int8",
        "layer=conv1 b=32 t=8 level=8 dtype=f32 spikes=int8",
    ],
    thorough_selection_lines: &[
        "layer=conv1,layer1,layer2,layer3,layer4 b=32 t=4,8,16 level=4,8,16 dtype=f32 spikes=int8",
        "layer=conv1,cifar_conv1 b=8,128 t=8 level=8 dtype=f32,f16,bf16 spikes=int8",
        "n=4194304,33554432 t=4,8,16 level=4,8,16 dtype=f32,f16,bf16 spikes=int8",
        "n=4194304,33554432 t=8 level=8 dtype=f32,f16,bf16 spikes=packed",
    ],
    bind: |point| {
        let packed = point.word("spikes")? == "packed";
        Ok(StBifForward {
            neurons: NeuronLayerParameters::bind_neuron_layer_axes(point)?,
            packs_spikes_in_two_bits: packed,
        })
    },
};

/// Workload of the ST-BIF backward pass: gradient of the input currents from the gradient of the
/// spikes.
pub const ST_BIF_BACKWARD_WORKLOAD: Workload<StBifBackward> = Workload {
    name: "st_bif/backward",
    about: "ST-BIF neurons backward over T steps: spike gradient to input gradient, Gaussian \
            surrogate",
    revision: 1,
    axes: &[N, RESNET18_LAYER_AXIS, B, T, NEURON_QUANTISATION_LEVEL_AXIS, ST_BIF_DTYPE_AXIS],
    default_selection_lines: &[
        "n=4194304 t=8 level=8 dtype=f32",
        "layer=conv1 b=32 t=8 level=8 dtype=f32",
    ],
    accelerator_selection_lines: &[
        "n=33554432 t=8 level=8 dtype=f32,f16",
        "layer=conv1 b=32 t=8 level=8 dtype=f32",
    ],
    thorough_selection_lines: &[
        "layer=conv1,layer1,layer2,layer3,layer4 b=32 t=4,8,16 level=4,8,16 dtype=f32",
        "layer=conv1,cifar_conv1 b=8,128 t=8 level=8 dtype=f32,f16,bf16",
        "n=4194304,33554432 t=4,8,16 level=4,8,16 dtype=f32,f16,bf16",
    ],
    bind: |point| {
        Ok(StBifBackward { neurons: NeuronLayerParameters::bind_neuron_layer_axes(point)? })
    },
};

/// Parameters that the ST-BIF forward and backward problems share: number of neurons, time steps,
/// dtype and neuron parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NeuronLayerParameters {
    pub neuron_count: usize,
    /// Number of time steps.
    pub time_steps: usize,
    /// Dtype of the input currents and of their gradients.
    pub dtype: Dtype,
    /// Parameters of every ST-BIF neuron: firing threshold, tracer bounds and prefire.
    pub neuron_parameters: StBifNeuronParameters,
}

impl NeuronLayerParameters {
    fn bind_neuron_layer_axes(point: &Point) -> Result<Self, AxisError> {
        let too_large = || {
            AxisError::InvalidCombinationOfValues(
                "more neuron-steps than a 64-bit index holds".to_owned(),
            )
        };
        let n = match (point.get("n"), point.get("layer")) {
            (Some(_), None) => point.number("n")?,
            (None, Some(layer)) => {
                let per_sample = NEURONS_PER_IMAGE_BY_RESNET18_LAYER
                    .iter()
                    .find(|(name, _)| *name == layer)
                    .map_or(0, |(_, neurons)| *neurons);
                per_sample.checked_mul(point.number("b")?).ok_or_else(too_large)?
            }
            _ => {
                return Err(AxisError::InvalidCombinationOfValues(
                    "give either axis `n`, or `layer` and `b`".to_owned(),
                ));
            }
        };
        let t = point.number("t")?;
        n.checked_mul(t).filter(|&elements| elements < 1 << 60).ok_or_else(too_large)?;
        let dtype = Dtype::parse_dtype_name(point.word("dtype")?).expect("the axis lists dtypes");
        let level = point.number("level")?;
        if level % 2 != 0 || level > MAX_QUANTISATION_LEVEL {
            return Err(AxisError::InvalidCombinationOfValues(format!(
                "level={level}: even numbers up to {MAX_QUANTISATION_LEVEL}"
            )));
        }
        let tracer_max = level as i32 / 2 - 1;
        let parameters = StBifNeuronParameters {
            firing_threshold: 0.5,
            tracer_min: 0,
            tracer_max,
            prefire_fraction_of_threshold: 0.0,
        };
        Ok(Self { neuron_count: n, time_steps: t, dtype, neuron_parameters: parameters })
    }

    fn neurons_times_steps(&self) -> usize {
        self.time_steps * self.neuron_count
    }

    /// Draws dyadic currents from N(0, 0.5²), clamped below 2 in magnitude, on the finest grid that
    /// the dtype represents exactly.
    fn draw_dyadic_currents(&self, seed: u64) -> Tensor {
        let grid: f32 = match self.dtype {
            Dtype::Bf16 => 64.0,
            Dtype::F16 => 512.0,
            _ => 1024.0,
        };
        let dyadic = move |x: f32| {
            (0.5 * x * grid).round().clamp(-2.0 * grid + 1.0, 2.0 * grid - 1.0) / grid
        };
        self.draw_mapped_normal_tensor(seed, "x", dyadic)
    }

    fn draw_mapped_normal_tensor(
        &self,
        seed: u64,
        name: &str,
        f: impl Fn(f32) -> f32 + Sync,
    ) -> Tensor {
        draw_tensor_of_mapped_normals(
            seed,
            name,
            [self.time_steps, self.neuron_count],
            self.dtype,
            f,
        )
    }
}

/// Number of neurons that one parallel CPU task of the reference computes, which limits the task's
/// fp64 scratch memory.
const NEURONS_PER_REFERENCE_TASK: usize = 4096;

/// Computes a tensor `[T, N]` by calling a function on each neuron's inputs over time, in parallel
/// over neurons.
///
/// In a call `f(inputs, trace, out)`, `inputs[i][t]` is input tensor `i` at time step `t`, `trace`
/// is scratch memory, and `out[t]` is the neuron's output.
fn compute_tensor_neuron_by_neuron<T: Send + Copy + Default>(
    neurons: &NeuronLayerParameters,
    inputs: &[&Tensor],
    f: impl Fn(&[Vec<f64>], &mut NeuronSimulation, &mut [T]) + Sync,
) -> Vec<T> {
    let (t, n) = (neurons.time_steps, neurons.neuron_count);
    let mut out = vec![T::default(); t * n];
    parallel::run_tasks_in_parallel(
        split_rows_into_column_blocks(&mut out, n, NEURONS_PER_REFERENCE_TASK),
        &|task, mut rows| {
            let (from, width) = (task * NEURONS_PER_REFERENCE_TASK, rows[0].len());
            let blocks: Vec<Vec<Vec<f64>>> = inputs
                .iter()
                .map(|input| {
                    (0..t).map(|step| input.elements_to_f64(step * n + from, width)).collect()
                })
                .collect();
            let mut series = vec![vec![0.0; t]; inputs.len()];
            let (mut trace, mut result) = (NeuronSimulation::default(), vec![T::default(); t]);
            for neuron in 0..width {
                for (series, block) in series.iter_mut().zip(&blocks) {
                    series.iter_mut().zip(block).for_each(|(x, row)| *x = row[neuron]);
                }
                f(&series, &mut trace, &mut result);
                rows.iter_mut().zip(&result).for_each(|(row, &value)| row[neuron] = value);
            }
        },
    );
    out
}

/// Problem `st_bif/forward`: computes `spikes [T, N]` in {-1, 0, 1} from `x [T, N]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StBifForward {
    /// Shape and parameters.
    pub neurons: NeuronLayerParameters,
    /// Whether an implementation writes spikes packed into two bits each. For verification, packed
    /// spikes are unpacked to a tensor with a byte for each spike.
    pub packs_spikes_in_two_bits: bool,
}

impl Problem for StBifForward {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        inputs.insert("x", self.neurons.draw_dyadic_currents(seed));
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let spikes = compute_tensor_neuron_by_neuron(
            &self.neurons,
            &[inputs.tensor("x")],
            |series, trace, out: &mut [i8]| {
                neuron::simulate_neuron_into(&self.neurons.neuron_parameters, &series[0], trace);
                out.iter_mut().zip(&trace.steps).for_each(|(s, step)| *s = step.spike);
            },
        );
        vec![Expected::all("spikes", [self.neurons.time_steps, self.neurons.neuron_count], spikes)]
    }

    /// The neurons are independent of each other, so permuting the neurons of x permutes the
    /// neurons of the spikes.
    fn symmetries(&self) -> Vec<InputSymmetry> {
        vec![InputSymmetry::RotateAlongAxis {
            inputs_with_axes: &[("x", 1)],
            outputs_with_axes: &[("spikes", 1)],
        }]
    }

    fn work(&self) -> Work {
        let elements = self.neurons.neurons_times_steps() as u64;
        let spikes = if self.packs_spikes_in_two_bits {
            self.neurons.time_steps as u64 * (self.neurons.neuron_count as u64).div_ceil(4)
        } else {
            elements
        };
        // The declared work of the ST-BIF forward pass counts four operations for each neuron and
        // time step: v += x, θ·s, v -= θ·s, c += s.
        Work::bytes(elements * self.neurons.dtype.bytes_per_element() as u64, spikes).with_flops(
            FlopUnit::VectorArithmetic,
            Dtype::F32,
            4 * elements,
        )
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance { max_error: 0.0, relative_l2: 0.0 }
    }

    fn host_memory_bytes(&self) -> u64 {
        // Host memory of the ST-BIF forward pass holds x, the spikes of the reference, and the
        // spikes of the output.
        self.neurons.neurons_times_steps() as u64
            * (self.neurons.dtype.bytes_per_element() as u64 + 2)
    }
}

/// Problem `st_bif/backward`: computes `gx [T, N]` from `x [T, N]` and `gy [T, N]`; the gradient of
/// the final membrane is zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StBifBackward {
    /// Shape and parameters.
    pub neurons: NeuronLayerParameters,
}

impl Problem for StBifBackward {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        inputs.insert("x", self.neurons.draw_dyadic_currents(seed));
        inputs.insert("gy", self.neurons.draw_mapped_normal_tensor(seed, "gy", |x| x));
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let parameters = &self.neurons.neuron_parameters;
        let gx = compute_tensor_neuron_by_neuron(
            &self.neurons,
            &[inputs.tensor("x"), inputs.tensor("gy")],
            |series, trace, out: &mut [f64]| {
                neuron::simulate_neuron_into(parameters, &series[0], trace);
                neuron::write_gradient_of_input_current(parameters, trace, &series[1], 0.0, out);
            },
        );
        vec![Expected::all("gx", [self.neurons.time_steps, self.neurons.neuron_count], gx)]
    }

    /// The neurons are independent of each other, and the current gradients are linear in the
    /// gradient of the spikes.
    fn symmetries(&self) -> Vec<InputSymmetry> {
        vec![
            InputSymmetry::RotateAlongAxis {
                inputs_with_axes: &[("x", 1), ("gy", 1)],
                outputs_with_axes: &[("gx", 1)],
            },
            InputSymmetry::NegateInputsAndOutputs { inputs: &["gy"], outputs: &["gx"] },
        ]
    }

    fn work(&self) -> Work {
        let elements = self.neurons.neurons_times_steps() as u64;
        let bytes = self.neurons.dtype.bytes_per_element() as u64 * elements;
        // The work counts twenty operations for each neuron and time step: two Gaussians of 5 each,
        // their sum, b of 2, m of 3, gx and gT of 2 each. The declared work of the ST-BIF backward
        // pass excludes the replay of the forward pass.
        Work::bytes(2 * bytes, bytes).with_flops(
            FlopUnit::VectorArithmetic,
            Dtype::F32,
            20 * elements,
        )
    }

    fn tolerance(&self) -> Tolerance {
        // The tolerance is that of fp32 arithmetic over T time steps; 16-bit outputs are rounded
        // once more.
        match self.neurons.dtype {
            Dtype::Bf16 => Tolerance { max_error: 4e-3, relative_l2: 3e-3 },
            Dtype::F16 => Tolerance { max_error: 5e-4, relative_l2: 4e-4 },
            _ => Tolerance { max_error: 2e-6, relative_l2: 1e-6 },
        }
    }

    fn host_memory_bytes(&self) -> u64 {
        // Host memory holds x, gy and the output in the dtype, and the reference in f64.
        self.neurons.neurons_times_steps() as u64
            * (3 * self.neurons.dtype.bytes_per_element() as u64 + 8)
    }
}
