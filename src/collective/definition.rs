//! Exchanges between GPUs: sums and copies of messages. This module does not decide how messages
//! are transported.

use crate::draw::draw_tensor;
use crate::parallel;
use kernelgate::workload::{
    Axis, AxisError, Dtype, Expected, GpuLinkWork, Point, Problem, Symmetry, Tensors, Tolerance,
    Work, Workload,
};

/// Maximum number of GPUs in a problem.
pub const MAX_EXCHANGE_GPUS: usize = 8;
/// Names of the input tensors, by rank.
pub static INPUT_NAMES: [&str; MAX_EXCHANGE_GPUS] =
    ["x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7"];
/// Names of the output tensors, by rank.
pub static OUTPUT_NAMES: [&str; MAX_EXCHANGE_GPUS] =
    ["y0", "y1", "y2", "y3", "y4", "y5", "y6", "y7"];

const AXES: &[Axis] = &[
    Axis::one_of("g", &["2", "4", "8"], "GPUs"),
    Axis::number("bytes", "bytes of the message, as nccl-tests count them"),
    Axis::one_of("dtype", &["f32", "bf16"], "dtype of the elements"),
];

const DEFAULT_SELECTION: &[&str] = &["g=2 bytes=1048576 dtype=f32"];
const ACCELERATOR_SELECTION: &[&str] =
    &["g=2 bytes=8192,65536,262144,1048576,16777216,134217728 dtype=bf16"];
const THOROUGH_SELECTION: &[&str] =
    &["g=2,4,8 bytes=8192,32768,131072,524288,4194304,67108864 dtype=f32,bf16"];

macro_rules! workload {
    ($collective:ident, $name:literal, $about:literal) => {
        Workload {
            name: concat!("collective/", $name),
            about: $about,
            revision: 1,
            axes: AXES,
            default: DEFAULT_SELECTION,
            accelerator: ACCELERATOR_SELECTION,
            thorough: THOROUGH_SELECTION,
            bind: |point| ExchangeProblem::bind(ExchangeKind::$collective, point),
        }
    };
}

/// Workload of an all-reduce: every GPU gets the sum of all messages.
pub const ALL_REDUCE: Workload<ExchangeProblem> =
    workload!(AllReduce, "all_reduce", "every GPU gets the sum of the messages of all");
/// Workload of an all-gather: every GPU gets the messages of all GPUs, one after the other.
pub const ALL_GATHER: Workload<ExchangeProblem> =
    workload!(AllGather, "all_gather", "every GPU gets the parts of all GPUs");
/// Workload of a reduce-scatter: every GPU gets its part of the sum.
pub const REDUCE_SCATTER: Workload<ExchangeProblem> = workload!(
    ReduceScatter,
    "reduce_scatter",
    "every GPU gets its part of the sum of all messages"
);
/// Workload of a broadcast: every GPU gets the message of the first GPU.
pub const BROADCAST: Workload<ExchangeProblem> =
    workload!(Broadcast, "broadcast", "every GPU gets the message of the first");
/// Workload of a send: the second GPU gets the message of the first GPU.
pub const SEND: Workload<ExchangeProblem> = Workload {
    thorough: &["g=2 bytes=8192,32768,131072,524288,4194304,67108864 dtype=f32,bf16"],
    ..workload!(Send, "send", "the second GPU gets the message of the first")
};

/// Kind of an exchange between GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExchangeKind {
    /// All-reduce: `y_r = Σ x_p`.
    AllReduce,
    /// All-gather: `y_r = x_0 … x_(g-1)`.
    AllGather,
    /// Reduce-scatter: `y_r` is part r of `Σ x_p`.
    ReduceScatter,
    /// Broadcast: `y_r = x_0`.
    Broadcast,
    /// Send: `y_1 = x_0`.
    Send,
}

/// Problem of an exchange, with input messages `x0 …` and output messages `y0 …` on the GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExchangeProblem {
    pub kind: ExchangeKind,
    /// Number of GPUs.
    pub gpus: usize,
    /// Number of elements of a message: of the longer one of input and output.
    pub elements: usize,
    /// Type of the elements.
    pub dtype: Dtype,
}

impl ExchangeProblem {
    fn bind(kind: ExchangeKind, point: &Point) -> Result<Self, AxisError> {
        let gpus = point.word("g")?.parse().expect("the axis lists numbers");
        let (bytes, dtype) = (point.number("bytes")?, point.word("dtype")?);
        let dtype = Dtype::parse(dtype).expect("the axis lists dtypes");
        let wrong = |why: String| Err(AxisError::Combination(why));
        if !bytes.is_multiple_of(gpus * dtype.bytes()) {
            return wrong(format!("{bytes} bytes are not whole elements on each of {gpus} GPUs"));
        }
        if bytes > 4 << 30 {
            return wrong("a message has more than 4 GiB".to_owned());
        }
        if kind == ExchangeKind::Send && gpus != 2 {
            return wrong("a message is sent between two GPUs".to_owned());
        }
        Ok(Self { kind, gpus, elements: bytes / dtype.bytes(), dtype })
    }

    /// Number of bytes of a message.
    pub const fn message_bytes(&self) -> usize {
        self.elements * self.dtype.bytes()
    }

    /// Number of elements of a GPU's input message; `None` for a GPU without an input.
    pub const fn input_elements(&self, rank: usize) -> Option<usize> {
        match self.kind {
            ExchangeKind::AllGather => Some(self.elements / self.gpus),
            ExchangeKind::Broadcast | ExchangeKind::Send if rank > 0 => None,
            _ => Some(self.elements),
        }
    }

    /// Number of elements of a GPU's output message; `None` for a GPU without an output.
    pub const fn output_elements(&self, rank: usize) -> Option<usize> {
        match self.kind {
            ExchangeKind::ReduceScatter => Some(self.elements / self.gpus),
            ExchangeKind::Send if rank == 0 => None,
            _ => Some(self.elements),
        }
    }

    /// Names of the input messages that exist.
    fn input_names(&self) -> &'static [&'static str] {
        &INPUT_NAMES[..(0..self.gpus).filter(|&rank| self.input_elements(rank).is_some()).count()]
    }

    /// Computes the elementwise sum of all input messages.
    fn sum_messages(&self, inputs: &Tensors) -> Vec<f64> {
        const ELEMENTS_PER_CHUNK: usize = 1 << 16;
        let mut sum = vec![0.0; self.elements];
        parallel::for_each_chunk(&mut sum, ELEMENTS_PER_CHUNK, &|number, sum| {
            for name in self.input_names() {
                let values = inputs.tensor(name).to_f64(number * ELEMENTS_PER_CHUNK, sum.len());
                sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
            }
        });
        sum
    }

    /// Values of which every output message is a part.
    fn undivided_output(&self, inputs: &Tensors) -> Vec<f64> {
        match self.kind {
            ExchangeKind::AllReduce | ExchangeKind::ReduceScatter => self.sum_messages(inputs),
            ExchangeKind::AllGather | ExchangeKind::Broadcast | ExchangeKind::Send => {
                let values = |name: &&str| {
                    let tensor = inputs.tensor(name);
                    tensor.to_f64(0, tensor.len())
                };
                self.input_names().iter().flat_map(values).collect()
            }
        }
    }
}

impl Problem for ExchangeProblem {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        for (rank, name) in INPUT_NAMES.iter().enumerate().take(self.gpus) {
            if let Some(len) = self.input_elements(rank) {
                inputs.insert(name, draw_tensor(seed, name, [len], self.dtype, |x| x));
            }
        }
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let whole = self.undivided_output(inputs);
        let mut expected = Vec::new();
        for (rank, name) in OUTPUT_NAMES.iter().enumerate().take(self.gpus) {
            let Some(len) = self.output_elements(rank) else { continue };
            let from = if self.kind == ExchangeKind::ReduceScatter { rank * len } else { 0 };
            expected.push(Expected::all(name, [len], whole[from..from + len].to_vec()));
        }
        expected
    }

    /// Sums and copies are linear functions of the messages.
    fn symmetries(&self) -> Vec<Symmetry> {
        let outputs = &OUTPUT_NAMES[..self.gpus];
        vec![Symmetry::Negate { inputs: self.input_names(), outputs }]
    }

    /// Declared work: memory bytes on the GPU with the most, and bytes on the links.
    fn work(&self) -> Work {
        let (bytes, gpus) = (self.message_bytes() as u64, self.gpus as u64);
        let (read, written, received) = match self.kind {
            ExchangeKind::AllReduce => (bytes, bytes, 2 * bytes / gpus * (gpus - 1)),
            ExchangeKind::AllGather => (bytes / gpus, bytes, bytes / gpus * (gpus - 1)),
            ExchangeKind::ReduceScatter => (bytes, bytes / gpus, bytes / gpus * (gpus - 1)),
            ExchangeKind::Broadcast | ExchangeKind::Send => (bytes, bytes, bytes),
        };
        let both_ways = !matches!(self.kind, ExchangeKind::Broadcast | ExchangeKind::Send);
        let link = GpuLinkWork { bytes: received, both_ways, gpus: self.gpus };
        Work::bytes(read, written).with_link(link)
    }

    fn gpus(&self) -> usize {
        self.gpus
    }

    /// Copies are exact. In a sum, each addition of a GPU rounds once; in bf16 a rounding error is
    /// at most 2^-9 of the value.
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

    fn host_bytes(&self) -> u64 {
        let gpus = self.gpus as u64;
        // Bytes of inputs, outputs, the reference of each output, and the sum.
        gpus * 2 * self.message_bytes() as u64 + (gpus + 2) * 8 * self.elements as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::workload::{DefaultScale, Effort, TensorData, symmetry};

    const EXCHANGE_WORKLOADS: [Workload<ExchangeProblem>; 5] =
        [ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, SEND];

    fn small_problem(kind: ExchangeKind, gpus: usize) -> ExchangeProblem {
        ExchangeProblem { kind, gpus, elements: 24, dtype: Dtype::F32 }
    }

    #[test]
    fn every_exchange_binds_and_negated_messages_give_negated_results() {
        for workload in EXCHANGE_WORKLOADS {
            for point in workload.points(Effort::Thorough, DefaultScale::Accelerator, &[]).unwrap()
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
                symmetry::check_symmetries(&small_problem(kind, 4), 1, 0.0),
                Ok(1),
                "{kind:?}"
            );
        }
        assert_eq!(
            symmetry::check_symmetries(&small_problem(ExchangeKind::Send, 2), 1, 0.0),
            Ok(1)
        );
    }

    #[test]
    fn bytes_on_the_links_follow_the_bus_bandwidth_of_nccl_tests() {
        let received = |kind, gpus| small_problem(kind, gpus).work().link.unwrap().bytes;
        assert_eq!([2, 4].map(|gpus| received(ExchangeKind::AllReduce, gpus)), [96, 144]);
        assert_eq!([2, 4].map(|gpus| received(ExchangeKind::AllGather, gpus)), [48, 72]);
        assert_eq!([2, 4].map(|gpus| received(ExchangeKind::ReduceScatter, gpus)), [48, 72]);
        assert_eq!([2, 4].map(|gpus| received(ExchangeKind::Broadcast, gpus)), [96, 96]);
    }

    #[test]
    fn the_parts_of_a_reduce_scatter_join_to_the_sum() {
        let inputs = small_problem(ExchangeKind::AllReduce, 2).inputs(3);
        let whole = small_problem(ExchangeKind::AllReduce, 2).reference(&inputs);
        let parts = small_problem(ExchangeKind::ReduceScatter, 2).reference(&inputs);
        let values = |expected: &Expected| match &expected.values {
            TensorData::F64(values) => values.clone(),
            _ => panic!("f64"),
        };
        let together: Vec<f64> = parts.iter().flat_map(values).collect();
        assert_eq!(values(&whole[0]), together);
        assert_eq!(values(&whole[0]), values(&whole[1]));
        let first = f64::from(inputs.f32("x0")[5]) + f64::from(inputs.f32("x1")[5]);
        assert_eq!(together[5], first);
    }
}
