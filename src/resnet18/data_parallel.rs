//! A training step over several GPUs: each GPU has a part of the images and all parameters.
//! Gradients are summed over the GPUs, and every GPU updates its parameters.
//!
//! The outputs are those of the training step `resnet18/train_step` for the images of all GPUs
//! together. The tensors of GPU r are:
//!
//! | input | shape | |
//! |---|---|---|
//! | `images`r, `labels`r | as in a training step, of B / g images | |
//! | `parameters`, `momentum` | as in a training step | on each GPU |
//!
//! | output | shape | |
//! |---|---|---|
//! | `logits`r | [B / g, 10], f32 | |
//! | `loss`r | \[1\], f32 | of its images |
//! | `new_parameters`r, `new_momentum`r | as in a training step | of all images |
//!
//! Parameters and momentum are not divided among the GPUs.

use super::breakdown::{self, weight_elements_read};
use super::definition::{TRAIN_STEP, TrainStep};
use super::gradient::cross_entropy;
use super::network::CLASS_COUNT;
use super::shape::NetworkShape;
use kernelgate::workload::{
    Axis, AxisError, Breakdown, Dtype, Expected, GpuLinkWork, Point, Problem, Tensor, TensorData,
    Tensors, Tolerance, Work, Workload,
};

/// Maximum number of GPUs in a problem.
pub const MAX_GPUS_PER_STEP: usize = 8;

/// Makes an array of the names of a tensor on each rank.
macro_rules! ranks {
    ($name:literal) => {
        [
            concat!($name, 0),
            concat!($name, 1),
            concat!($name, 2),
            concat!($name, 3),
            concat!($name, 4),
            concat!($name, 5),
            concat!($name, 6),
            concat!($name, 7),
        ]
    };
}

/// Tensors of a training step that differ between GPUs, with their names by rank.
const TENSORS_PER_GPU: [(&str, [&str; MAX_GPUS_PER_STEP]); 6] = [
    ("images", ranks!("images")),
    ("labels", ranks!("labels")),
    ("logits", ranks!("logits")),
    ("loss", ranks!("loss")),
    ("new_parameters", ranks!("new_parameters")),
    ("new_momentum", ranks!("new_momentum")),
];
/// Inputs of which every GPU has a copy.
const REPLICATED_INPUTS: [&str; 2] = ["parameters", "momentum"];

/// Name of a training step's tensor on one GPU.
pub fn rank_tensor_name(tensor: &str, rank: usize) -> &'static str {
    let own =
        TENSORS_PER_GPU.iter().find(|(name, _)| *name == tensor).map(|(_, names)| names[rank]);
    let copied = || REPLICATED_INPUTS.into_iter().find(|name| *name == tensor);
    own.or_else(copied).expect("a tensor of a training step")
}

/// The axis of the number of GPUs, then the axes of a training step; `b` counts the images of all
/// GPUs together.
const AXES: &[Axis] = &{
    const TRAIN_STEP_AXES: &[Axis] = TRAIN_STEP.axes;
    [
        Axis::one_of("g", &["2", "4", "8"], "GPUs"),
        TRAIN_STEP_AXES[0],
        TRAIN_STEP_AXES[1],
        TRAIN_STEP_AXES[2],
        TRAIN_STEP_AXES[3],
        TRAIN_STEP_AXES[4],
        TRAIN_STEP_AXES[5],
        TRAIN_STEP_AXES[6],
    ]
};

/// Workload of one SGD step over several GPUs.
pub const DATA_PARALLEL: Workload<DataParallel> = Workload {
    name: "resnet18/data_parallel",
    about: "a training step over GPUs: images in parts, gradients summed under the backward pass",
    revision: 1,
    axes: AXES,
    default: &["g=2 stem=imagenet w=64 b=8 t=4 level=8 weights=dyadic dtype=f32"],
    accelerator: &["g=2 stem=imagenet w=64 b=64 t=8 level=8 weights=dyadic dtype=bf16"],
    thorough: &["g=2,4,8 stem=imagenet w=64 b=64 t=8 level=8 weights=dyadic dtype=bf16"],
    bind: DataParallel::bind,
};

/// Problem `resnet18/data_parallel`: a training step over several GPUs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DataParallel {
    /// Number of GPUs.
    pub gpus: usize,
    /// The training step for the images of all GPUs.
    pub whole: TrainStep,
}

impl DataParallel {
    fn bind(point: &Point) -> Result<Self, AxisError> {
        let gpus: usize = point.word("g")?.parse().expect("the axis lists numbers");
        let whole = TrainStep { shape: NetworkShape::bind(point)? };
        if !whole.shape.b.is_multiple_of(gpus) {
            let why = format!("b={}: a multiple of g={gpus}", whole.shape.b);
            return Err(AxisError::Combination(why));
        }
        Ok(Self { gpus, whole })
    }

    /// The training step for the images of one GPU.
    pub const fn step_of_one_gpu(&self) -> TrainStep {
        let shape = self.whole.shape;
        TrainStep { shape: NetworkShape { b: shape.b / self.gpus, ..shape } }
    }

    /// Inputs of one GPU under the names of a training step.
    pub fn inputs_of_gpu(&self, inputs: &Tensors, rank: usize) -> Tensors {
        let mut own = inputs.select_named(&REPLICATED_INPUTS);
        for tensor in ["images", "labels"] {
            own.insert(tensor, inputs.tensor(rank_tensor_name(tensor, rank)).clone());
        }
        own
    }

    /// Inputs of the training step for all images.
    fn inputs_of_all_images(&self, inputs: &Tensors) -> Tensors {
        let mut all = inputs.select_named(&REPLICATED_INPUTS);
        for tensor in ["images", "labels"] {
            let parts = (0..self.gpus).map(|rank| inputs.tensor(rank_tensor_name(tensor, rank)));
            let mut shape = inputs.tensor(rank_tensor_name(tensor, 0)).shape().to_vec();
            shape[0] = self.whole.shape.b;
            let data = match tensor {
                "images" => TensorData::F32(parts.flat_map(f32_elements).collect()),
                _ => TensorData::I8(parts.flat_map(i8_values).collect()),
            };
            all.insert(tensor, Tensor::new(shape, data));
        }
        all
    }
}

fn f32_elements(tensor: &Tensor) -> Vec<f32> {
    bytemuck::cast_slice(tensor.as_bytes()).to_vec()
}

fn i8_values(tensor: &Tensor) -> Vec<i8> {
    bytemuck::cast_slice(tensor.as_bytes()).to_vec()
}

impl Problem for DataParallel {
    fn check(&self) -> Result<(), String> {
        self.whole.check()
    }

    fn inputs(&self, seed: u64) -> Tensors {
        let all = self.whole.inputs(seed);
        let mut inputs = all.select_named(&REPLICATED_INPUTS);
        let b = self.step_of_one_gpu().shape.b;
        for rank in 0..self.gpus {
            let [images, labels] = ["images", "labels"].map(|name| all.tensor(name));
            let mut shape = images.shape().to_vec();
            shape[0] = b;
            let pixels = images.len() / self.whole.shape.b;
            let own = f32_elements(images)[rank * b * pixels..][..b * pixels].to_vec();
            inputs.insert(rank_tensor_name("images", rank), Tensor::new(shape, own.into()));
            let own = i8_values(labels)[rank * b..][..b].to_vec();
            inputs.insert(rank_tensor_name("labels", rank), Tensor::new([b], own.into()));
        }
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let all = self.inputs_of_all_images(inputs);
        let labels = all.tensor("labels").to_f64(0, self.whole.shape.b);
        let b = self.step_of_one_gpu().shape.b;
        let mut expected = Vec::new();
        for step in self.whole.reference(&all) {
            for rank in 0..self.gpus {
                let named = |values| Expected {
                    name: rank_tensor_name(&step.name, rank).to_owned(),
                    ..values
                };
                match (step.name.as_str(), &step.values) {
                    ("loss", _) => {}
                    ("logits", TensorData::F64(logits)) => {
                        let own = &logits[rank * b * CLASS_COUNT..][..b * CLASS_COUNT];
                        let (loss, _) = cross_entropy(own, &labels[rank * b..][..b]);
                        expected.push(named(Expected::all("", [b, CLASS_COUNT], own.to_vec())));
                        expected.push(Expected::all(
                            rank_tensor_name("loss", rank),
                            [1],
                            vec![loss],
                        ));
                    }
                    _ => expected.push(named(step.clone())),
                }
            }
        }
        expected
    }

    /// Work of one GPU, and the gradients that the link carries, without gradients that are 0
    /// because their weights meet only padding.
    fn work(&self) -> Work {
        let network = self.whole.shape.sizes.build_network();
        let convolutions = network.block_convolutions();
        let elements = convolutions.map(|c| weight_elements_read(c) + c.window.output.channels);
        let classifier = CLASS_COUNT * (network.last_map().channels + 1);
        let gradients = ((elements.sum::<usize>() + classifier) * Dtype::F32.bytes()) as u64;
        let gpus = self.gpus as u64;
        let bytes = 2 * gradients / gpus * (gpus - 1);
        let link = GpuLinkWork { bytes, both_ways: true, gpus: self.gpus };
        self.step_of_one_gpu().work().with_link(link)
    }

    fn gpus(&self) -> usize {
        self.gpus
    }

    fn remark(&self) -> Option<String> {
        self.whole.remark()
    }

    fn breakdown(&self) -> Breakdown {
        let samples = Some(self.whole.shape.b as u64);
        Breakdown { samples, ..breakdown::train_step_parts(&self.step_of_one_gpu().shape) }
    }

    fn tolerance(&self) -> Tolerance {
        self.whole.tolerance()
    }

    fn host_bytes(&self) -> u64 {
        let network = self.whole.shape.sizes.build_network();
        self.whole.host_bytes() + (2 * 8 * self.gpus * network.parameters) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::workload::{DefaultScale, Effort};

    fn small_problem(gpus: usize) -> DataParallel {
        let axes = format!("g={gpus} stem=cifar w=8 b=8 t=2 level=8 weights=dyadic dtype=f32");
        let overridden: Vec<_> = axes.split(' ').map(|axis| axis.parse().unwrap()).collect();
        let points =
            DATA_PARALLEL.points(Effort::Default, DefaultScale::Host, &overridden).unwrap();
        (DATA_PARALLEL.bind)(&points[0]).unwrap()
    }

    fn f64_values_of_output(all: &[Expected], name: &str) -> Vec<f64> {
        let found = all.iter().find(|expected| expected.name == name).unwrap();
        match &found.values {
            TensorData::F64(values) => values.clone(),
            _ => panic!("f64"),
        }
    }

    #[test]
    fn every_gpu_ends_with_the_parameters_of_a_step_over_all_images() {
        for gpus in [2, 4, 8] {
            let problem = small_problem(gpus);
            let inputs = problem.inputs(1);
            let whole_inputs = problem.whole.inputs(1);
            assert_eq!(problem.inputs_of_all_images(&inputs), whole_inputs);
            let (expected, whole) =
                (problem.reference(&inputs), problem.whole.reference(&whole_inputs));
            for tensor in ["new_parameters", "new_momentum"] {
                for rank in 0..gpus {
                    assert_eq!(
                        f64_values_of_output(&expected, rank_tensor_name(tensor, rank)),
                        f64_values_of_output(&whole, tensor)
                    );
                }
            }
            let of_each = |tensor: &str| -> Vec<f64> {
                (0..gpus)
                    .flat_map(|rank| {
                        f64_values_of_output(&expected, rank_tensor_name(tensor, rank))
                    })
                    .collect()
            };
            assert_eq!(of_each("logits"), f64_values_of_output(&whole, "logits"));
            let mean = of_each("loss").iter().sum::<f64>() / gpus as f64;
            assert!((mean - f64_values_of_output(&whole, "loss")[0]).abs() < 1e-12);
        }
    }
}
