//! A ResNet-18 training step over several GPUs: each GPU has a part of the images and a copy of all
//! parameters. Weight gradients are summed over all GPUs (all-reduce), and then every GPU updates
//! its copy of the parameters.
//!
//! The outputs of a data-parallel step equal those of the workload `resnet18/train_step` for the
//! images of all GPUs together. The tensors of GPU r are:
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
//! In data-parallel training, every GPU has a copy of all parameters and all momentum values.

use super::breakdown::{self, weights_multiplied_with_a_pixel};
use super::definition::{ResNetTrainingStep, TRAINING_STEP_WORKLOAD};
use super::gradient::mean_cross_entropy_and_logit_gradient;
use super::network::CLASSIFIER_CLASS_COUNT;
use super::shape::ResNetParameters;
use kernelgate::workload::{
    Axis, AxisError, DeclaredGpuLinkWork, Dtype, Expected, Point, Problem, ProblemPartsForProfile,
    Tensor, TensorData, Tensors, Tolerance, Work, Workload,
};

/// Maximum number of GPUs of a data-parallel training step.
pub const MAX_DATA_PARALLEL_GPUS: usize = 8;

/// Expands to an array of the names of one tensor on all ranks.
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

/// Tensors of a training step that differ between the GPUs, with their names on all ranks.
const NAMES_OF_PER_GPU_TENSORS: [(&str, [&str; MAX_DATA_PARALLEL_GPUS]); 6] = [
    ("images", ranks!("images")),
    ("labels", ranks!("labels")),
    ("logits", ranks!("logits")),
    ("loss", ranks!("loss")),
    ("new_parameters", ranks!("new_parameters")),
    ("new_momentum", ranks!("new_momentum")),
];
/// Names of the inputs of which every GPU has an equal copy.
const INPUTS_COPIED_TO_EVERY_GPU: [&str; 2] = ["parameters", "momentum"];

/// Name of a training step's tensor on the GPU of this rank; copied inputs have the same name on
/// all GPUs.
pub fn tensor_name_on_rank(tensor: &str, rank: usize) -> &'static str {
    let own = NAMES_OF_PER_GPU_TENSORS
        .iter()
        .find(|(name, _)| *name == tensor)
        .map(|(_, names)| names[rank]);
    let copied = || INPUTS_COPIED_TO_EVERY_GPU.into_iter().find(|name| *name == tensor);
    own.or_else(copied).expect("a tensor of a training step")
}

/// Axes of data-parallel training: the number of GPUs, then the axes of a training step; `b` counts
/// the images of all GPUs together.
const DATA_PARALLEL_AXES: &[Axis] = &{
    const AXES_OF_TRAINING_STEP: &[Axis] = TRAINING_STEP_WORKLOAD.axes;
    [
        Axis::one_of("g", &["2", "4", "8"], "GPUs"),
        AXES_OF_TRAINING_STEP[0],
        AXES_OF_TRAINING_STEP[1],
        AXES_OF_TRAINING_STEP[2],
        AXES_OF_TRAINING_STEP[3],
        AXES_OF_TRAINING_STEP[4],
        AXES_OF_TRAINING_STEP[5],
        AXES_OF_TRAINING_STEP[6],
    ]
};

/// Workload of one SGD training step over several GPUs with data parallelism.
pub const DATA_PARALLEL_WORKLOAD: Workload<DataParallelTrainingStep> = Workload {
    name: "resnet18/data_parallel",
    about: "a training step over GPUs: images in parts, gradients summed under the backward pass",
    revision: 1,
    axes: DATA_PARALLEL_AXES,
    default_selection_lines: &["g=2 stem=imagenet w=64 b=8 t=4 level=8 weights=dyadic dtype=f32"],
    accelerator_selection_lines: &[
        "g=2 stem=imagenet w=64 b=64 t=8 level=8 weights=dyadic dtype=bf16",
    ],
    thorough_selection_lines: &[
        "g=2,4,8 stem=imagenet w=64 b=64 t=8 level=8 weights=dyadic dtype=bf16",
    ],
    bind: DataParallelTrainingStep::bind_data_parallel_axes,
};

/// Problem `resnet18/data_parallel`: a training step over several GPUs, each with a part of the
/// images.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DataParallelTrainingStep {
    /// Number of GPUs.
    pub gpus: usize,
    /// The equivalent training step on one GPU for the images of all GPUs.
    pub step_on_one_gpu: ResNetTrainingStep,
}

impl DataParallelTrainingStep {
    fn bind_data_parallel_axes(point: &Point) -> Result<Self, AxisError> {
        let gpus: usize = point.word("g")?.parse().expect("the axis lists numbers");
        let whole = ResNetTrainingStep { shape: ResNetParameters::bind_resnet_axes(point)? };
        if !whole.shape.batch_size.is_multiple_of(gpus) {
            let why = format!("b={}: a multiple of g={gpus}", whole.shape.batch_size);
            return Err(AxisError::InvalidCombinationOfValues(why));
        }
        Ok(Self { gpus, step_on_one_gpu: whole })
    }

    /// The training step that one GPU runs for its part of the images.
    pub const fn training_step_per_gpu(&self) -> ResNetTrainingStep {
        let shape = self.step_on_one_gpu.shape;
        ResNetTrainingStep {
            shape: ResNetParameters { batch_size: shape.batch_size / self.gpus, ..shape },
        }
    }

    /// Inputs of the GPU of this rank, under the tensor names of a training step on one GPU.
    pub fn inputs_of_rank(&self, inputs: &Tensors, rank: usize) -> Tensors {
        let mut own = inputs.select_tensors_by_name(&INPUTS_COPIED_TO_EVERY_GPU);
        for tensor in ["images", "labels"] {
            own.insert(tensor, inputs.tensor(tensor_name_on_rank(tensor, rank)).clone());
        }
        own
    }

    /// Concatenates the images and labels of all GPUs to the inputs of one training step.
    fn join_inputs_of_all_gpus(&self, inputs: &Tensors) -> Tensors {
        let mut all = inputs.select_tensors_by_name(&INPUTS_COPIED_TO_EVERY_GPU);
        for tensor in ["images", "labels"] {
            let parts = (0..self.gpus).map(|rank| inputs.tensor(tensor_name_on_rank(tensor, rank)));
            let mut shape = inputs.tensor(tensor_name_on_rank(tensor, 0)).shape().to_vec();
            shape[0] = self.step_on_one_gpu.shape.batch_size;
            let data = match tensor {
                "images" => TensorData::F32(parts.flat_map(copy_f32_elements).collect()),
                _ => TensorData::I8(parts.flat_map(copy_i8_elements).collect()),
            };
            all.insert(tensor, Tensor::new(shape, data));
        }
        all
    }
}

fn copy_f32_elements(tensor: &Tensor) -> Vec<f32> {
    bytemuck::cast_slice(tensor.as_bytes()).to_vec()
}

fn copy_i8_elements(tensor: &Tensor) -> Vec<i8> {
    bytemuck::cast_slice(tensor.as_bytes()).to_vec()
}

impl Problem for DataParallelTrainingStep {
    fn check_can_be_computed(&self) -> Result<(), String> {
        self.step_on_one_gpu.check_can_be_computed()
    }

    fn inputs(&self, seed: u64) -> Tensors {
        let all = self.step_on_one_gpu.inputs(seed);
        let mut inputs = all.select_tensors_by_name(&INPUTS_COPIED_TO_EVERY_GPU);
        let b = self.training_step_per_gpu().shape.batch_size;
        for rank in 0..self.gpus {
            let [images, labels] = ["images", "labels"].map(|name| all.tensor(name));
            let mut shape = images.shape().to_vec();
            shape[0] = b;
            let pixels = images.len() / self.step_on_one_gpu.shape.batch_size;
            let own = copy_f32_elements(images)[rank * b * pixels..][..b * pixels].to_vec();
            inputs.insert(tensor_name_on_rank("images", rank), Tensor::new(shape, own.into()));
            let own = copy_i8_elements(labels)[rank * b..][..b].to_vec();
            inputs.insert(tensor_name_on_rank("labels", rank), Tensor::new([b], own.into()));
        }
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let all = self.join_inputs_of_all_gpus(inputs);
        let labels = all.tensor("labels").elements_to_f64(0, self.step_on_one_gpu.shape.batch_size);
        let b = self.training_step_per_gpu().shape.batch_size;
        let mut expected = Vec::new();
        for step in self.step_on_one_gpu.reference(&all) {
            for rank in 0..self.gpus {
                let named = |values| Expected {
                    output_name: tensor_name_on_rank(&step.output_name, rank).to_owned(),
                    ..values
                };
                match (step.output_name.as_str(), &step.expected_values) {
                    ("loss", _) => {}
                    ("logits", TensorData::F64(logits)) => {
                        let own = &logits[rank * b * CLASSIFIER_CLASS_COUNT..]
                            [..b * CLASSIFIER_CLASS_COUNT];
                        let (loss, _) =
                            mean_cross_entropy_and_logit_gradient(own, &labels[rank * b..][..b]);
                        expected.push(named(Expected::all(
                            "",
                            [b, CLASSIFIER_CLASS_COUNT],
                            own.to_vec(),
                        )));
                        expected.push(Expected::all(
                            tensor_name_on_rank("loss", rank),
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

    /// Work of one GPU, and the gradient bytes that its links carry; gradients that are always 0,
    /// because their weights meet only padding, do not count.
    fn work(&self) -> Work {
        let network = self.step_on_one_gpu.shape.sizes.build_resnet18_layers();
        let convolutions = network.all_convolutions();
        let elements = convolutions
            .map(|c| weights_multiplied_with_a_pixel(c) + c.window.output_extents.channels);
        let classifier = CLASSIFIER_CLASS_COUNT * (network.last_feature_map().channels + 1);
        let gradients =
            ((elements.sum::<usize>() + classifier) * Dtype::F32.bytes_per_element()) as u64;
        let gpus = self.gpus as u64;
        let bytes = 2 * gradients / gpus * (gpus - 1);
        let link = DeclaredGpuLinkWork {
            min_received_bytes: bytes,
            both_ways: true,
            gpu_count: self.gpus,
        };
        self.training_step_per_gpu().work().with_link(link)
    }

    fn gpus(&self) -> usize {
        self.gpus
    }

    fn remark(&self) -> Option<String> {
        self.step_on_one_gpu.remark()
    }

    fn breakdown(&self) -> ProblemPartsForProfile {
        let samples = Some(self.step_on_one_gpu.shape.batch_size as u64);
        ProblemPartsForProfile {
            data_items_per_execution: samples,
            ..breakdown::breakdown_of_training_step(&self.training_step_per_gpu().shape)
        }
    }

    fn tolerance(&self) -> Tolerance {
        self.step_on_one_gpu.tolerance()
    }

    fn host_memory_bytes(&self) -> u64 {
        let network = self.step_on_one_gpu.shape.sizes.build_resnet18_layers();
        self.step_on_one_gpu.host_memory_bytes()
            + (2 * 8 * self.gpus * network.padded_parameter_count) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::workload::{BenchEffort, SizeOfDefaultProblems};

    fn small_data_parallel_problem(gpus: usize) -> DataParallelTrainingStep {
        let axes = format!("g={gpus} stem=cifar w=8 b=8 t=2 level=8 weights=dyadic dtype=f32");
        let overridden: Vec<_> = axes.split(' ').map(|axis| axis.parse().unwrap()).collect();
        let points = DATA_PARALLEL_WORKLOAD
            .points_selected_by_effort(
                BenchEffort::Default,
                SizeOfDefaultProblems::HostCpuSizes,
                &overridden,
            )
            .unwrap();
        (DATA_PARALLEL_WORKLOAD.bind)(&points[0]).unwrap()
    }

    fn f64_values_of_named_output(all: &[Expected], name: &str) -> Vec<f64> {
        let found = all.iter().find(|expected| expected.output_name == name).unwrap();
        match &found.expected_values {
            TensorData::F64(values) => values.clone(),
            _ => panic!("f64"),
        }
    }

    #[test]
    fn every_gpu_ends_with_the_parameters_of_one_step_over_all_images() {
        for gpus in [2, 4, 8] {
            let problem = small_data_parallel_problem(gpus);
            let inputs = problem.inputs(1);
            let whole_inputs = problem.step_on_one_gpu.inputs(1);
            assert_eq!(problem.join_inputs_of_all_gpus(&inputs), whole_inputs);
            let (expected, whole) =
                (problem.reference(&inputs), problem.step_on_one_gpu.reference(&whole_inputs));
            for tensor in ["new_parameters", "new_momentum"] {
                for rank in 0..gpus {
                    assert_eq!(
                        f64_values_of_named_output(&expected, tensor_name_on_rank(tensor, rank)),
                        f64_values_of_named_output(&whole, tensor)
                    );
                }
            }
            let of_each = |tensor: &str| -> Vec<f64> {
                (0..gpus)
                    .flat_map(|rank| {
                        f64_values_of_named_output(&expected, tensor_name_on_rank(tensor, rank))
                    })
                    .collect()
            };
            assert_eq!(of_each("logits"), f64_values_of_named_output(&whole, "logits"));
            let mean = of_each("loss").iter().sum::<f64>() / gpus as f64;
            assert!((mean - f64_values_of_named_output(&whole, "loss")[0]).abs() < 1e-12);
        }
    }
}
