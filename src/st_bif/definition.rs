//! The ST-BIF neuron over many time steps: ternary spikes, a bounded tracer, and the
//! Gaussian-surrogate gradient.
//!
//! The source is SpikeZIP-TF (arXiv 2406.03470) and its public multi-step operator. Inputs are
//! dyadic (multiples of a power of two, as is the threshold), so that the forward pass is exact in
//! fp32 and spikes are compared bit for bit.
//!
//! The final membrane and the saved `H` and `C` are excluded on purpose. A problem has the spikes,
//! which are the next layer's input, and the gradient for the previous layer; the saved state
//! between forward and backward is an implementation's choice.

use super::neuron::{self, NeuronForwardTrace, NeuronParameters};
use crate::draw::draw_tensor;
use crate::parallel;
use kernelgate::suite::ScanAlongAxes;
use kernelgate::workload::tensor::split_columns;
use kernelgate::workload::{
    Axis, AxisError, Dtype, Expected, FlopUnit, Point, Problem, Symmetry, Tensor, Tensors,
    Tolerance, Work, Workload,
};

/// Number of neurons of one image in each neuron layer of ResNet-18 on 32x32 images, with the
/// ImageNet stem (7x7 and max pooling) and with the CIFAR stem (3x3).
const RESNET18_LAYERS: &[(&str, usize)] = &[
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
const LAYER_AXIS: Axis = Axis::one_of(
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
const LEVEL_AXIS: Axis =
    Axis::number("level", "quantisation level, even: the tracer ends at level/2 - 1");
/// Maximum quantisation level: the tracer is counted in 32 bits.
const MAX_QUANTISATION_LEVEL: usize = 1 << 20;
const DTYPE_AXIS: Axis = Axis::one_of(
    "dtype",
    &["f32", "f16", "bf16"],
    "dtype of inputs and gradients; the state is always f32",
);

/// Scan over batch, time steps and level, one at a time, around conv1 of ResNet-18 at b=32, t=8,
/// level=8.
pub const FORWARD_SCAN: ScanAlongAxes = ScanAlongAxes {
    lines: &[
        "layer=conv1 b=8,16,32 t=8 level=8 dtype=f32 spikes=int8",
        "layer=conv1 b=32 t=4,8,16 level=8 dtype=f32 spikes=int8",
        "layer=conv1 b=32 t=8 level=4,8,16 dtype=f32 spikes=int8",
    ],
    rows: &["cuda/fused", "cuda/vectorized"],
};

/// Axis scan of the ST-BIF backward pass.
pub const BACKWARD_SCAN: ScanAlongAxes = ScanAlongAxes {
    lines: &[
        "layer=conv1 b=8,16,32 t=8 level=8 dtype=f32",
        "layer=conv1 b=32 t=4,8,16 level=8 dtype=f32",
        "layer=conv1 b=32 t=8 level=4,8,16 dtype=f32",
    ],
    rows: &["cuda/saved", "cuda/replay"],
};

/// Workload of the forward pass: spikes of a layer over time.
pub const FORWARD: Workload<StBifForward> = Workload {
    name: "st_bif/forward",
    about: "ST-BIF neurons over T steps: input current to ternary spikes",
    revision: 1,
    axes: &[
        N,
        LAYER_AXIS,
        B,
        T,
        LEVEL_AXIS,
        DTYPE_AXIS,
        Axis::one_of("spikes", &["int8", "packed"], "one byte a spike, or four spikes a byte"),
    ],
    default: &[
        "n=4194304 t=8 level=8 dtype=f32 spikes=int8",
        "n=4194304 t=4,16 level=8 dtype=f32 spikes=int8",
        "layer=conv1 b=32 t=8 level=8 dtype=f32 spikes=int8",
    ],
    accelerator: &[
        "n=33554432 t=8 level=8 dtype=f32 spikes=int8,packed",
        "n=33554432 t=8 level=8 dtype=f16 spikes=int8",
        "layer=conv1 b=32 t=8 level=8 dtype=f32 spikes=int8",
    ],
    thorough: &[
        "layer=conv1,layer1,layer2,layer3,layer4 b=32 t=4,8,16 level=4,8,16 dtype=f32 spikes=int8",
        "layer=conv1,cifar_conv1 b=8,128 t=8 level=8 dtype=f32,f16,bf16 spikes=int8",
        "n=4194304,33554432 t=4,8,16 level=4,8,16 dtype=f32,f16,bf16 spikes=int8",
        "n=4194304,33554432 t=8 level=8 dtype=f32,f16,bf16 spikes=packed",
    ],
    bind: |point| {
        let packed = point.word("spikes")? == "packed";
        Ok(StBifForward { neurons: NeuronShape::bind(point)?, packed })
    },
};

/// Workload of the backward pass: gradient of the input from the gradient of the spikes.
pub const BACKWARD: Workload<StBifBackward> = Workload {
    name: "st_bif/backward",
    about: "ST-BIF neurons backward over T steps: spike gradient to input gradient, Gaussian \
            surrogate",
    revision: 1,
    axes: &[N, LAYER_AXIS, B, T, LEVEL_AXIS, DTYPE_AXIS],
    default: &["n=4194304 t=8 level=8 dtype=f32", "layer=conv1 b=32 t=8 level=8 dtype=f32"],
    accelerator: &[
        "n=33554432 t=8 level=8 dtype=f32,f16",
        "layer=conv1 b=32 t=8 level=8 dtype=f32",
    ],
    thorough: &[
        "layer=conv1,layer1,layer2,layer3,layer4 b=32 t=4,8,16 level=4,8,16 dtype=f32",
        "layer=conv1,cifar_conv1 b=8,128 t=8 level=8 dtype=f32,f16,bf16",
        "n=4194304,33554432 t=4,8,16 level=4,8,16 dtype=f32,f16,bf16",
    ],
    bind: |point| Ok(StBifBackward { neurons: NeuronShape::bind(point)? }),
};

/// Parameters that both directions share: number of neurons, time steps, dtype.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NeuronShape {
    pub n: usize,
    /// Time steps.
    pub t: usize,
    /// Dtype of the input currents and of the gradients.
    pub dtype: Dtype,
    /// Threshold and tracer bounds.
    pub parameters: NeuronParameters,
}

impl NeuronShape {
    fn bind(point: &Point) -> Result<Self, AxisError> {
        let too_large =
            || AxisError::Combination("more neuron-steps than a 64-bit index holds".to_owned());
        let n = match (point.get("n"), point.get("layer")) {
            (Some(_), None) => point.number("n")?,
            (None, Some(layer)) => {
                let per_sample = RESNET18_LAYERS
                    .iter()
                    .find(|(name, _)| *name == layer)
                    .map_or(0, |(_, neurons)| *neurons);
                per_sample.checked_mul(point.number("b")?).ok_or_else(too_large)?
            }
            _ => {
                return Err(AxisError::Combination(
                    "give either axis `n`, or `layer` and `b`".to_owned(),
                ));
            }
        };
        let t = point.number("t")?;
        n.checked_mul(t).filter(|&elements| elements < 1 << 60).ok_or_else(too_large)?;
        let dtype = Dtype::parse(point.word("dtype")?).expect("the axis lists dtypes");
        let level = point.number("level")?;
        if level % 2 != 0 || level > MAX_QUANTISATION_LEVEL {
            return Err(AxisError::Combination(format!(
                "level={level}: even numbers up to {MAX_QUANTISATION_LEVEL}"
            )));
        }
        let tracer_max = level as i32 / 2 - 1;
        let parameters =
            NeuronParameters { threshold: 0.5, tracer_min: 0, tracer_max, prefire: 0.0 };
        Ok(Self { n, t, dtype, parameters })
    }

    fn input_elements(&self) -> usize {
        self.t * self.n
    }

    /// Draws dyadic currents from N(0, 0.5²), clamped below 2, on the finest grid that the dtype
    /// represents exactly.
    fn draw_currents(&self, seed: u64) -> Tensor {
        let grid: f32 = match self.dtype {
            Dtype::Bf16 => 64.0,
            Dtype::F16 => 512.0,
            _ => 1024.0,
        };
        let dyadic = move |x: f32| {
            (0.5 * x * grid).round().clamp(-2.0 * grid + 1.0, 2.0 * grid - 1.0) / grid
        };
        self.drawn_tensor(seed, "x", dyadic)
    }

    fn drawn_tensor(&self, seed: u64, name: &str, f: impl Fn(f32) -> f32 + Sync) -> Tensor {
        draw_tensor(seed, name, [self.t, self.n], self.dtype, f)
    }
}

/// Number of neurons that one task of the reference computes; limits its fp64 scratch memory.
const NEURONS_PER_TASK: usize = 4096;

/// Computes `[T, N]` from a function of one neuron's inputs over time, in parallel over neurons.
///
/// In `f(inputs, trace, out)`, `inputs[i][t]` is input `i` at step `t`, `trace` is scratch memory,
/// and `out[t]` is the neuron's output.
fn fill_per_neuron<T: Send + Copy + Default>(
    neurons: &NeuronShape,
    inputs: &[&Tensor],
    f: impl Fn(&[Vec<f64>], &mut NeuronForwardTrace, &mut [T]) + Sync,
) -> Vec<T> {
    let (t, n) = (neurons.t, neurons.n);
    let mut out = vec![T::default(); t * n];
    parallel::for_each_task(split_columns(&mut out, n, NEURONS_PER_TASK), &|task, mut rows| {
        let (from, width) = (task * NEURONS_PER_TASK, rows[0].len());
        let blocks: Vec<Vec<Vec<f64>>> = inputs
            .iter()
            .map(|input| (0..t).map(|step| input.to_f64(step * n + from, width)).collect())
            .collect();
        let mut series = vec![vec![0.0; t]; inputs.len()];
        let (mut trace, mut result) = (NeuronForwardTrace::default(), vec![T::default(); t]);
        for neuron in 0..width {
            for (series, block) in series.iter_mut().zip(&blocks) {
                series.iter_mut().zip(block).for_each(|(x, row)| *x = row[neuron]);
            }
            f(&series, &mut trace, &mut result);
            rows.iter_mut().zip(&result).for_each(|(row, &value)| row[neuron] = value);
        }
    });
    out
}

/// Problem `st_bif/forward`: computes `spikes [T, N]` in {-1, 0, 1} from `x [T, N]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StBifForward {
    /// Shape and parameters.
    pub neurons: NeuronShape,
    /// Whether an implementation writes two bits a spike. The verified tensor always has a byte for
    /// each spike.
    pub packed: bool,
}

impl Problem for StBifForward {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        inputs.insert("x", self.neurons.draw_currents(seed));
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let spikes = fill_per_neuron(
            &self.neurons,
            &[inputs.tensor("x")],
            |series, trace, out: &mut [i8]| {
                neuron::run_neuron_into(&self.neurons.parameters, &series[0], trace);
                out.iter_mut().zip(&trace.steps).for_each(|(s, step)| *s = step.spike);
            },
        );
        vec![Expected::all("spikes", [self.neurons.t, self.neurons.n], spikes)]
    }

    /// The neurons are independent of each other.
    fn symmetries(&self) -> Vec<Symmetry> {
        vec![Symmetry::Roll { inputs: &[("x", 1)], outputs: &[("spikes", 1)] }]
    }

    fn work(&self) -> Work {
        let elements = self.neurons.input_elements() as u64;
        let spikes = if self.packed {
            self.neurons.t as u64 * (self.neurons.n as u64).div_ceil(4)
        } else {
            elements
        };
        // Operations of a step: v += x, θ·s, v -= θ·s, c += s.
        Work::bytes(elements * self.neurons.dtype.bytes() as u64, spikes).with_flops(
            FlopUnit::Vector,
            Dtype::F32,
            4 * elements,
        )
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance { max_error: 0.0, relative_l2: 0.0 }
    }

    fn host_bytes(&self) -> u64 {
        // Host memory counts x, the spikes of the reference, and the spikes of the output.
        self.neurons.input_elements() as u64 * (self.neurons.dtype.bytes() as u64 + 2)
    }
}

/// Problem `st_bif/backward`: computes `gx [T, N]` from `x [T, N]` and `gy [T, N]`; the gradient of
/// the final membrane is zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StBifBackward {
    /// Shape and parameters.
    pub neurons: NeuronShape,
}

impl Problem for StBifBackward {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        inputs.insert("x", self.neurons.draw_currents(seed));
        inputs.insert("gy", self.neurons.drawn_tensor(seed, "gy", |x| x));
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let parameters = &self.neurons.parameters;
        let gx = fill_per_neuron(
            &self.neurons,
            &[inputs.tensor("x"), inputs.tensor("gy")],
            |series, trace, out: &mut [f64]| {
                neuron::run_neuron_into(parameters, &series[0], trace);
                neuron::input_gradient_into(parameters, trace, &series[1], 0.0, out);
            },
        );
        vec![Expected::all("gx", [self.neurons.t, self.neurons.n], gx)]
    }

    /// The neurons are independent of each other, and the gradients are linear in the gradient of
    /// the spikes.
    fn symmetries(&self) -> Vec<Symmetry> {
        vec![
            Symmetry::Roll { inputs: &[("x", 1), ("gy", 1)], outputs: &[("gx", 1)] },
            Symmetry::Negate { inputs: &["gy"], outputs: &["gx"] },
        ]
    }

    fn work(&self) -> Work {
        let elements = self.neurons.input_elements() as u64;
        let bytes = self.neurons.dtype.bytes() as u64 * elements;
        // Operations of a step: two Gaussians of 5 each, their sum, b of 2, m of 3, gx and gT of 2
        // each. The declared work excludes the replay of the forward pass.
        Work::bytes(2 * bytes, bytes).with_flops(FlopUnit::Vector, Dtype::F32, 20 * elements)
    }

    fn tolerance(&self) -> Tolerance {
        // The error is that of fp32 arithmetic over T steps; 16-bit outputs round once more.
        match self.neurons.dtype {
            Dtype::Bf16 => Tolerance { max_error: 4e-3, relative_l2: 3e-3 },
            Dtype::F16 => Tolerance { max_error: 5e-4, relative_l2: 4e-4 },
            _ => Tolerance { max_error: 2e-6, relative_l2: 1e-6 },
        }
    }

    fn host_bytes(&self) -> u64 {
        // Bytes of x, gy and the output in the dtype, and of the reference in f64.
        self.neurons.input_elements() as u64 * (3 * self.neurons.dtype.bytes() as u64 + 8)
    }
}
