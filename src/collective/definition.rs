//! Collectives between GPUs: workloads and fp64 references of sums and copies of messages. The
//! definitions of the collectives do not prescribe how messages are transported between GPUs.

use crate::draw::draw_tensor_of_mapped_normals;
use crate::parallel;
use kernelgate::workload::{
    Axis, AxisError, DeclaredGpuLinkWork, Dtype, Expected, InputSymmetry, Point, Problem, Tensors,
    Tolerance, Work, Workload,
};

/// Maximum number of GPUs in a collective problem.
pub const MAX_EXCHANGE_GPUS: usize = 8;
/// Names of the input messages of the GPUs; the index is the GPU's rank.
pub static INPUT_NAMES: [&str; MAX_EXCHANGE_GPUS] =
    ["x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7"];
/// Names of the output messages of the GPUs; the index is the GPU's rank.
pub static OUTPUT_NAMES: [&str; MAX_EXCHANGE_GPUS] =
    ["y0", "y1", "y2", "y3", "y4", "y5", "y6", "y7"];

const EXCHANGE_AXES: &[Axis] = &[
    Axis::one_of("g", &["2", "4", "8"], "GPUs"),
    Axis::number("bytes", "bytes of the message, as nccl-tests count them"),
    Axis::one_of("dtype", &["f32", "bf16"], "dtype of the elements"),
];

const EXCHANGE_DEFAULT_SELECTION: &[&str] = &["g=2 bytes=1048576 dtype=f32"];
const EXCHANGE_ACCELERATOR_SELECTION: &[&str] =
    &["g=2 bytes=8192,65536,262144,1048576,16777216,134217728 dtype=bf16"];
const EXCHANGE_THOROUGH_SELECTION: &[&str] =
    &["g=2,4,8 bytes=8192,32768,131072,524288,4194304,67108864 dtype=f32,bf16"];

macro_rules! workload {
    ($collective:ident, $name:literal, $about:literal) => {
        Workload {
            name: concat!("collective/", $name),
            about: $about,
            revision: 1,
            axes: EXCHANGE_AXES,
            default_selection_lines: EXCHANGE_DEFAULT_SELECTION,
            accelerator_selection_lines: EXCHANGE_ACCELERATOR_SELECTION,
            thorough_selection_lines: EXCHANGE_THOROUGH_SELECTION,
            bind: |point| ExchangeProblem::bind_exchange_axes(ExchangeKind::$collective, point),
        }
    };
}

/// Workload of an all-reduce: every GPU gets the elementwise sum of the messages of all GPUs.
pub const ALL_REDUCE: Workload<ExchangeProblem> =
    workload!(AllReduce, "all_reduce", "every GPU gets the sum of the messages of all");
/// Workload of an all-gather: every GPU gets the concatenated messages of all GPUs, in the order of
/// ranks.
pub const ALL_GATHER: Workload<ExchangeProblem> =
    workload!(AllGather, "all_gather", "every GPU gets the parts of all GPUs");
/// Workload of a reduce-scatter: GPU r gets part r of the elementwise sum of all messages.
pub const REDUCE_SCATTER: Workload<ExchangeProblem> = workload!(
    ReduceScatter,
    "reduce_scatter",
    "every GPU gets its part of the sum of all messages"
);
/// Workload of a broadcast: every GPU gets a copy of the message of the first GPU.
pub const BROADCAST: Workload<ExchangeProblem> =
    workload!(Broadcast, "broadcast", "every GPU gets the message of the first");
/// Workload of a send: the second GPU gets the message of the first GPU.
pub const SEND: Workload<ExchangeProblem> = Workload {
    thorough_selection_lines: &[
        "g=2 bytes=8192,32768,131072,524288,4194304,67108864 dtype=f32,bf16",
    ],
    ..workload!(Send, "send", "the second GPU gets the message of the first")
};

/// Kind of a collective between GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExchangeKind {
    /// All-reduce: every GPU r gets the sum of all inputs, `y_r = Σ x_p`.
    AllReduce,
    /// All-gather: the output of every GPU concatenates the inputs of all g GPUs, `y_r = x_0 …
    /// x_(g-1)`.
    AllGather,
    /// Reduce-scatter: the output `y_r` of GPU r is part r of the sum `Σ x_p` over all GPUs.
    ReduceScatter,
    /// Broadcast: `y_r = x_0`.
    Broadcast,
    /// Send: `y_1 = x_0`.
    Send,
}

/// Problem of a collective over `gpus` GPUs, with input messages `x0 …` and output messages `y0 …`,
/// numbered by rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExchangeProblem {
    pub kind: ExchangeKind,
    /// Number of GPUs.
    pub gpus: usize,
    /// Number of elements of a message, counted as nccl-tests count it: the longer of the input and
    /// the output of a GPU.
    pub message_elements: usize,
    /// Dtype of the message elements.
    pub dtype: Dtype,
}

impl ExchangeProblem {
    fn bind_exchange_axes(kind: ExchangeKind, point: &Point) -> Result<Self, AxisError> {
        let gpus = point.word("g")?.parse().expect("the axis lists numbers");
        let (bytes, dtype) = (point.number("bytes")?, point.word("dtype")?);
        let dtype = Dtype::parse_dtype_name(dtype).expect("the axis lists dtypes");
        let wrong = |why: String| Err(AxisError::InvalidCombinationOfValues(why));
        if !bytes.is_multiple_of(gpus * dtype.bytes_per_element()) {
            return wrong(format!("{bytes} bytes are not whole elements on each of {gpus} GPUs"));
        }
        if bytes > 4 << 30 {
            return wrong("a message has more than 4 GiB".to_owned());
        }
        if kind == ExchangeKind::Send && gpus != 2 {
            return wrong("a message is sent between two GPUs".to_owned());
        }
        Ok(Self { kind, gpus, message_elements: bytes / dtype.bytes_per_element(), dtype })
    }

    /// Number of bytes of a message, as nccl-tests count it: the longer of a GPU's input and
    /// output.
    pub const fn longer_message_bytes(&self) -> usize {
        self.message_elements * self.dtype.bytes_per_element()
    }

    /// Number of elements of the input message of GPU `rank`; `None` for a GPU without an input.
    pub const fn input_elements_of_rank(&self, rank: usize) -> Option<usize> {
        match self.kind {
            ExchangeKind::AllGather => Some(self.message_elements / self.gpus),
            ExchangeKind::Broadcast | ExchangeKind::Send if rank > 0 => None,
            _ => Some(self.message_elements),
        }
    }

    /// Number of elements of the output message of GPU `rank`; `None` for a GPU without an output.
    pub const fn output_elements_of_rank(&self, rank: usize) -> Option<usize> {
        match self.kind {
            ExchangeKind::ReduceScatter => Some(self.message_elements / self.gpus),
            ExchangeKind::Send if rank == 0 => None,
            _ => Some(self.message_elements),
        }
    }

    /// Names of the input messages that exist in this collective; in a broadcast or send, only the
    /// first GPU has an input message.
    fn names_of_input_messages(&self) -> &'static [&'static str] {
        &INPUT_NAMES
            [..(0..self.gpus).filter(|&rank| self.input_elements_of_rank(rank).is_some()).count()]
    }

    /// Computes the elementwise fp64 sum of the input messages of all GPUs.
    fn sum_input_messages(&self, inputs: &Tensors) -> Vec<f64> {
        const ELEMENTS_PER_PARALLEL_CHUNK: usize = 1 << 16;
        let mut sum = vec![0.0; self.message_elements];
        parallel::process_chunks_in_parallel(
            &mut sum,
            ELEMENTS_PER_PARALLEL_CHUNK,
            &|number, sum| {
                for name in self.names_of_input_messages() {
                    let values = inputs
                        .tensor(name)
                        .elements_to_f64(number * ELEMENTS_PER_PARALLEL_CHUNK, sum.len());
                    sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
                }
            },
        );
        sum
    }

    /// Computes the fp64 values of which every GPU's output is a part or the whole: the sum or the
    /// concatenation of the inputs.
    fn sum_or_concatenation_of_inputs(&self, inputs: &Tensors) -> Vec<f64> {
        match self.kind {
            ExchangeKind::AllReduce | ExchangeKind::ReduceScatter => {
                self.sum_input_messages(inputs)
            }
            ExchangeKind::AllGather | ExchangeKind::Broadcast | ExchangeKind::Send => {
                let values = |name: &&str| {
                    let tensor = inputs.tensor(name);
                    tensor.elements_to_f64(0, tensor.len())
                };
                self.names_of_input_messages().iter().flat_map(values).collect()
            }
        }
    }
}

impl Problem for ExchangeProblem {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        for (rank, name) in INPUT_NAMES.iter().enumerate().take(self.gpus) {
            if let Some(len) = self.input_elements_of_rank(rank) {
                inputs.insert(
                    name,
                    draw_tensor_of_mapped_normals(seed, name, [len], self.dtype, |x| x),
                );
            }
        }
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let whole = self.sum_or_concatenation_of_inputs(inputs);
        let mut expected = Vec::new();
        for (rank, name) in OUTPUT_NAMES.iter().enumerate().take(self.gpus) {
            let Some(len) = self.output_elements_of_rank(rank) else { continue };
            let from = if self.kind == ExchangeKind::ReduceScatter { rank * len } else { 0 };
            expected.push(Expected::all(name, [len], whole[from..from + len].to_vec()));
        }
        expected
    }

    /// Sums and copies are linear functions of the messages, so negated input messages give negated
    /// output messages.
    fn symmetries(&self) -> Vec<InputSymmetry> {
        let outputs = &OUTPUT_NAMES[..self.gpus];
        vec![InputSymmetry::NegateInputsAndOutputs {
            inputs: self.names_of_input_messages(),
            outputs,
        }]
    }

    /// Work of one GPU: its memory bytes read and written, and the bytes that it receives over GPU
    /// links.
    fn work(&self) -> Work {
        let (bytes, gpus) = (self.longer_message_bytes() as u64, self.gpus as u64);
        let (read, written, received) = match self.kind {
            ExchangeKind::AllReduce => (bytes, bytes, 2 * bytes / gpus * (gpus - 1)),
            ExchangeKind::AllGather => (bytes / gpus, bytes, bytes / gpus * (gpus - 1)),
            ExchangeKind::ReduceScatter => (bytes, bytes / gpus, bytes / gpus * (gpus - 1)),
            ExchangeKind::Broadcast | ExchangeKind::Send => (bytes, bytes, bytes),
        };
        let both_ways = !matches!(self.kind, ExchangeKind::Broadcast | ExchangeKind::Send);
        let link =
            DeclaredGpuLinkWork { min_received_bytes: received, both_ways, gpu_count: self.gpus };
        Work::bytes(read, written).with_link(link)
    }

    fn gpus(&self) -> usize {
        self.gpus
    }

    /// Copies are exact. Each addition of an all-reduce or reduce-scatter rounds once; in bf16 a
    /// rounding error is at most 2^-9 of the value.
    fn tolerance(&self) -> Tolerance {
        let added = (self.gpus - 1) as f64;
        match (self.kind, self.dtype) {
            (ExchangeKind::AllGather | ExchangeKind::Broadcast | ExchangeKind::Send, _) => {
                Tolerance { max_error: 1e-12, relative_l2: 1e-12 }
            }
            (_, Dtype::Bf16) => Tolerance { max_error: 4e-3 * added, relative_l2: 2.5e-3 * added },
            _ => Tolerance { max_error: 2e-7 * added, relative_l2: 1e-7 * added },
        }
    }

    fn host_memory_bytes(&self) -> u64 {
        let gpus = self.gpus as u64;
        // Host memory of a collective problem: inputs and outputs of all GPUs, the fp64 reference
        // of each output, and the fp64 sum.
        gpus * 2 * self.longer_message_bytes() as u64
            + (gpus + 2) * 8 * self.message_elements as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::workload::{BenchEffort, SizeOfDefaultProblems, TensorData, symmetry};

    const ALL_EXCHANGE_WORKLOADS: [Workload<ExchangeProblem>; 5] =
        [ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, SEND];

    fn small_f32_exchange_problem(kind: ExchangeKind, gpus: usize) -> ExchangeProblem {
        ExchangeProblem { kind, gpus, message_elements: 24, dtype: Dtype::F32 }
    }

    #[test]
    fn every_exchange_binds_and_negated_inputs_give_negated_outputs() {
        for workload in ALL_EXCHANGE_WORKLOADS {
            for point in workload
                .points_selected_by_effort(
                    BenchEffort::Thorough,
                    SizeOfDefaultProblems::HostAndAcceleratorSizes,
                    &[],
                )
                .unwrap()
            {
                assert!((workload.bind)(&point).is_ok(), "{} {point}", workload.name);
            }
        }
        for kind in [
            ExchangeKind::AllReduce,
            ExchangeKind::AllGather,
            ExchangeKind::ReduceScatter,
            ExchangeKind::Broadcast,
        ] {
            assert_eq!(
                symmetry::check_symmetries_of_reference(
                    &small_f32_exchange_problem(kind, 4),
                    1,
                    0.0
                ),
                Ok(1),
                "{kind:?}"
            );
        }
        assert_eq!(
            symmetry::check_symmetries_of_reference(
                &small_f32_exchange_problem(ExchangeKind::Send, 2),
                1,
                0.0
            ),
            Ok(1)
        );
    }

    #[test]
    fn bytes_on_gpu_links_follow_the_bus_bandwidth_of_nccl_tests() {
        let received = |kind, gpus| {
            small_f32_exchange_problem(kind, gpus).work().link.unwrap().min_received_bytes
        };
        assert_eq!([2, 4].map(|gpus| received(ExchangeKind::AllReduce, gpus)), [96, 144]);
        assert_eq!([2, 4].map(|gpus| received(ExchangeKind::AllGather, gpus)), [48, 72]);
        assert_eq!([2, 4].map(|gpus| received(ExchangeKind::ReduceScatter, gpus)), [48, 72]);
        assert_eq!([2, 4].map(|gpus| received(ExchangeKind::Broadcast, gpus)), [96, 96]);
    }

    #[test]
    fn the_outputs_of_a_reduce_scatter_concatenate_to_the_sum() {
        let inputs = small_f32_exchange_problem(ExchangeKind::AllReduce, 2).inputs(3);
        let whole = small_f32_exchange_problem(ExchangeKind::AllReduce, 2).reference(&inputs);
        let parts = small_f32_exchange_problem(ExchangeKind::ReduceScatter, 2).reference(&inputs);
        let values = |expected: &Expected| match &expected.expected_values {
            TensorData::F64(values) => values.clone(),
            _ => panic!("f64"),
        };
        let together: Vec<f64> = parts.iter().flat_map(values).collect();
        assert_eq!(values(&whole[0]), together);
        assert_eq!(values(&whole[0]), values(&whole[1]));
        let first =
            f64::from(inputs.f32_elements("x0")[5]) + f64::from(inputs.f32_elements("x1")[5]);
        assert_eq!(together[5], first);
    }
}
