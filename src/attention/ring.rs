//! Workload `attention/ring`: attention forward of one long sequence, distributed over several
//! GPUs.
//!
//! Each GPU has the queries, keys, values and outputs of some positions, `[1, h, s / g, d]` each.
//! Without a mask a GPU's positions are one contiguous part of the sequence. Under the causal mask
//! a GPU's positions are two of 2 g parts, the r-th from the start and the r-th from the end, so
//! that all GPUs have equal work. The reference is that of `attention/forward`.
//!
//! The transport of keys and values to the queries is excluded on purpose.

use std::ops::Range;

use super::definition::{Attention, AttentionForward, DTYPE, tolerance};
use crate::draw::draw_tensor;
use kernelgate::workload::{
    Axis, AxisError, Dtype, Expected, GpuLinkWork, Point, Problem, Symmetry, Tensor, TensorData,
    Tensors, Tolerance, Work, Workload,
};

/// Maximum number of GPUs of a problem.
const MAX_RING_GPUS: usize = 8;
/// Names of the query tensors, by rank.
pub static Q: [&str; MAX_RING_GPUS] = ["q0", "q1", "q2", "q3", "q4", "q5", "q6", "q7"];
/// Names of the key tensors, by rank.
pub static K: [&str; MAX_RING_GPUS] = ["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7"];
/// Names of the value tensors, by rank.
pub static V: [&str; MAX_RING_GPUS] = ["v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7"];
/// Names of the output tensors, by rank.
pub static OUT: [&str; MAX_RING_GPUS] =
    ["out0", "out1", "out2", "out3", "out4", "out5", "out6", "out7"];

/// Axis of heads in each input tensor, by rank.
static INPUT_HEAD_AXES: [(&str, usize); 3 * MAX_RING_GPUS] = {
    let mut all = [("", 1); 3 * MAX_RING_GPUS];
    let mut rank = 0;
    while rank < MAX_RING_GPUS {
        all[3 * rank].0 = Q[rank];
        all[3 * rank + 1].0 = K[rank];
        all[3 * rank + 2].0 = V[rank];
        rank += 1;
    }
    all
};
static OUTPUT_HEAD_AXES: [(&str, usize); MAX_RING_GPUS] = {
    let mut all = [("", 1); MAX_RING_GPUS];
    let mut rank = 0;
    while rank < MAX_RING_GPUS {
        all[rank].0 = OUT[rank];
        rank += 1;
    }
    all
};

const AXES: &[Axis] = &[
    Axis::one_of("g", &["1", "2", "4", "8"], "GPUs; 1 for comparison"),
    Axis::number("s", "length of the sequence"),
    Axis::one_of("d", &["64", "128"], "elements of a head; there are 2048 / d heads"),
    Axis::one_of("mask", &["full", "causal"], "which keys a query sees"),
    DTYPE,
];

/// Workload of attention forward, `softmax(q kᵀ / sqrt(d)) v`, of one sequence over several GPUs.
pub const RING_WORKLOAD: Workload<RingProblem> = Workload {
    name: "attention/ring",
    about: "attention/forward of one sequence over several GPUs; hidden 2048",
    revision: 1,
    axes: AXES,
    default: &["g=2 s=1024 d=64 mask=full,causal dtype=f32"],
    accelerator: &[
        "g=2 s=16384 d=64,128 mask=causal dtype=bf16",
        "g=2 s=65536 d=128 mask=full,causal dtype=bf16",
    ],
    thorough: &[
        "g=1,2,4,8 s=4096,16384,65536 d=64,128 mask=full,causal dtype=bf16",
        "g=2,4,8 s=1040,2000 d=64,128 mask=full,causal dtype=f32,bf16,f16",
    ],
    bind: RingProblem::bind,
};

/// Problem of attention forward of one sequence over several GPUs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RingProblem {
    /// Number of GPUs.
    pub gpus: usize,
    /// Attention parameters of the whole sequence.
    pub attention: Attention,
}

/// Work of one GPU on the keys of one GPU; positions are indices into the tensors of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingStep {
    /// Rank of the GPU that has the keys.
    pub keys_of: usize,
    /// Range of this GPU's queries that attend to some keys of GPU `keys_of`.
    pub queries: Range<usize>,
    /// Range of the keys to which the queries attend.
    pub keys: Range<usize>,
    /// Whether a query attends only to keys up to its own position.
    pub causal: bool,
}

impl RingProblem {
    /// Problem of a sequence of `s` positions with `h` heads.
    pub const fn new(
        gpus: usize,
        h: usize,
        s: usize,
        d: usize,
        causal: bool,
        dtype: Dtype,
    ) -> Self {
        let (h_kv, keys) = (h, s);
        let attention = Attention { b: 1, h, h_kv, s, keys, d, causal, dtype, outliers: false };
        Self { gpus, attention }
    }

    fn bind(point: &Point) -> Result<Self, AxisError> {
        let gpus: usize = point.word("g")?.parse().expect("the axis lists numbers");
        let attention = Attention { b: 1, ..Attention::bind(point)? };
        let ring = Self { gpus, attention };
        let unit = gpus * ring.position_ranges_per_gpu();
        if !attention.s.is_multiple_of(unit) {
            let s = format!("s={} is no multiple of {unit}: stretches of {gpus} GPUs", attention.s);
            return Err(AxisError::Combination(s));
        }
        Ok(ring)
    }

    /// Number of positions of the sequence on one GPU.
    pub const fn gpu_positions(&self) -> usize {
        self.attention.s / self.gpus
    }

    /// Number of contiguous parts of the sequence on one GPU.
    const fn position_ranges_per_gpu(&self) -> usize {
        if self.attention.causal && self.gpus > 1 { 2 } else { 1 }
    }

    /// Shape of a GPU's queries; its keys, values and outputs have the same shape.
    pub const fn shape(&self) -> [usize; 4] {
        [1, self.attention.h, self.gpu_positions(), self.attention.d]
    }

    /// Ranges of the sequence that a GPU has, in the order of its tensors.
    fn position_ranges_of_gpu(&self, rank: usize) -> impl Iterator<Item = Range<usize>> {
        let length = self.gpu_positions() / self.position_ranges_per_gpu();
        let last = self.gpus * self.position_ranges_per_gpu() - 1;
        let numbers = [rank, last - rank].into_iter().take(self.position_ranges_per_gpu());
        numbers.map(move |number| number * length..(number + 1) * length)
    }

    /// Steps of a GPU: first on its own keys, then on those of the previous GPU, and so on round
    /// the ring. The keys of all lower ranks come before those of higher ranks.
    pub fn ring_steps(&self, rank: usize) -> Vec<RingStep> {
        let (all, half) = (self.gpu_positions(), self.gpu_positions() / 2);
        let step = |back: usize| {
            let keys_of = (rank + self.gpus - back) % self.gpus;
            let whole = RingStep { keys_of, queries: 0..all, keys: 0..all, causal: false };
            match (self.attention.causal, keys_of) {
                (false, _) => whole,
                (true, of) if of == rank => RingStep { causal: true, ..whole },
                // The first part of the other GPU's keys precedes both parts of this GPU's queries;
                // the second part follows them.
                (true, of) if of < rank => RingStep { keys: 0..half, ..whole },
                // Both parts of the other GPU's keys lie between the two parts of this GPU's
                // queries.
                (true, _) => RingStep { queries: half..all, ..whole },
            }
        };
        (0..self.gpus).map(step).collect()
    }

    /// Number of steps that involve the first half of a GPU's queries; these steps come first.
    pub const fn steps_of_first_half(&self, rank: usize) -> usize {
        if self.attention.causal { rank + 1 } else { self.gpus }
    }

    /// Concatenates the tensors of the GPUs to the tensor of the whole sequence.
    pub(super) fn join_tensors(&self, inputs: &Tensors, names: &[&str]) -> Tensor {
        let Attention { h, s, d, .. } = self.attention;
        let row = d * self.attention.dtype.bytes();
        let mut whole = Tensor::zeroed([1, h, s, d], self.attention.dtype);
        let bytes = whole.as_bytes_mut();
        for (rank, name) in names.iter().enumerate().take(self.gpus) {
            let mut from = inputs.tensor(name).as_bytes();
            for head in 0..h {
                for stretch in self.position_ranges_of_gpu(rank) {
                    let (these, rest) = from.split_at(stretch.len() * row);
                    bytes[(head * s + stretch.start) * row..][..these.len()].copy_from_slice(these);
                    from = rest;
                }
            }
        }
        whole
    }

    /// Concatenates the inputs of the GPUs to those of the whole sequence.
    pub(super) fn join_inputs(&self, inputs: &Tensors) -> Tensors {
        let mut whole = Tensors::new();
        for (name, names) in [("q", Q), ("k", K), ("v", V)] {
            whole.insert(name, self.join_tensors(inputs, &names));
        }
        whole
    }

    /// Rank of the GPU that has a row of `[h, s]`, and the row's index in its output.
    fn rank_and_row_in_gpu(&self, row: usize) -> (usize, usize) {
        let (s, length) = (self.attention.s, self.gpu_positions() / self.position_ranges_per_gpu());
        let (head, position) = (row / s, row % s);
        let (number, within) = (position / length, position % length);
        let (rank, stretch) = match number < self.gpus {
            true => (number, 0),
            false => (2 * self.gpus - 1 - number, 1),
        };
        (rank, head * self.gpu_positions() + stretch * length + within)
    }

    /// Part of the expected rows that lies on one GPU.
    fn expected_part_of_gpu(&self, whole: &Expected, rank: usize) -> Option<Expected> {
        let d = self.attention.d;
        let TensorData::F64(values) = &whole.values else { return None };
        let rows: Vec<usize> = match &whole.rows {
            Some(rows) => rows.clone(),
            None => (0..values.len() / d).collect(),
        };
        let placed = rows.iter().map(|&row| self.rank_and_row_in_gpu(row)).zip(values.chunks(d));
        let mut mine: Vec<(usize, &[f64])> = placed
            .filter_map(|((on, row), values)| (on == rank).then_some((row, values)))
            .collect();
        mine.sort_by_key(|(row, _)| *row);
        let (rows, values): (Vec<usize>, Vec<&[f64]>) = mine.into_iter().unzip();
        let (name, values) = (OUT[rank], values.concat());
        match rows.len() {
            0 => None,
            all if all == self.attention.h * self.gpu_positions() => {
                Some(Expected::all(name, self.shape(), values))
            }
            _ => Some(Expected::sampled_rows(name, self.shape(), rows, values)),
        }
    }
}

impl Problem for RingProblem {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        for rank in 0..self.gpus {
            for name in [Q[rank], K[rank], V[rank]] {
                let drawn = draw_tensor(seed, name, self.shape(), self.attention.dtype, |x| x);
                inputs.insert(name, drawn);
            }
        }
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let attention = self.attention;
        let whole = AttentionForward { attention }.reference(&self.join_inputs(inputs));
        let ranks = 0..self.gpus;
        ranks
            .flat_map(|rank| {
                whole.iter().filter_map(move |rows| self.expected_part_of_gpu(rows, rank))
            })
            .collect()
    }

    /// The heads are independent of each other.
    fn symmetries(&self) -> Vec<Symmetry> {
        let (inputs, outputs) = (&INPUT_HEAD_AXES[..3 * self.gpus], &OUTPUT_HEAD_AXES[..self.gpus]);
        vec![Symmetry::Roll { inputs, outputs }]
    }

    /// Work of one GPU. The first GPU receives the keys and values of all others.
    fn work(&self) -> Work {
        let whole = AttentionForward { attention: self.attention }.work();
        let gpus = self.gpus as u64;
        let mut work = Work::bytes(whole.read_bytes / gpus, whole.write_bytes / gpus);
        for flops in whole.flops {
            work = work.with_flops(flops.unit, flops.dtype, flops.count / gpus);
        }
        match self.gpus {
            1 => work,
            gpus => {
                let received = self.attention.bytes(self.attention.dtype, 0, 2);
                let bytes = received / gpus as u64 * (gpus as u64 - 1);
                work.with_link(GpuLinkWork { bytes, both_ways: true, gpus })
            }
        }
    }

    fn gpus(&self) -> usize {
        self.gpus
    }

    fn tolerance(&self) -> Tolerance {
        tolerance(self.attention.dtype)
    }

    /// Bytes of the GPUs' tensors and, for the reference, of those of the whole sequence.
    fn host_bytes(&self) -> u64 {
        let gathered = self.attention.bytes(self.attention.dtype, 1, 2);
        gathered + AttentionForward { attention: self.attention }.host_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::workload::{DefaultScale, Effort, symmetry};

    fn small_ring_problem(gpus: usize, causal: bool) -> RingProblem {
        RingProblem::new(gpus, 3, 96, 64, causal, Dtype::F32)
    }

    #[test]
    fn every_ring_selection_binds_and_rolled_heads_give_rolled_outputs() {
        for point in RING_WORKLOAD.points(Effort::Thorough, DefaultScale::Accelerator, &[]).unwrap()
        {
            let ring = (RING_WORKLOAD.bind)(&point).unwrap();
            assert_eq!((ring.attention.b, ring.attention.h), (1, 2048 / ring.attention.d));
        }
        for causal in [false, true] {
            assert_eq!(
                symmetry::check_symmetries(&small_ring_problem(4, causal), 1, 0.0),
                Ok(1),
                "{causal}"
            );
        }
    }

    #[test]
    fn a_sequence_that_cannot_be_divided_into_equal_stretches_is_declined() {
        let point = |text: &str| {
            let overrides: Vec<_> = text.split(' ').map(|one| one.parse().unwrap()).collect();
            RING_WORKLOAD.points(Effort::Default, DefaultScale::Host, &overrides).unwrap().remove(0)
        };
        let error = RingProblem::bind(&point("g=4 s=1004 mask=causal")).unwrap_err();
        let why = "s=1004 is no multiple of 8: stretches of 4 GPUs";
        assert!(matches!(&error, AxisError::Combination(it) if it == why), "{error}");
        assert!(RingProblem::bind(&point("g=4 s=1004 mask=full")).is_ok());
    }

    /// Converts a position on a GPU to the position in the sequence.
    fn sequence_position(ring: &RingProblem, rank: usize, local: usize) -> usize {
        ring.position_ranges_of_gpu(rank).flatten().nth(local).unwrap()
    }

    #[test]
    fn ring_steps_cover_each_visible_pair_once_and_have_equal_sizes() {
        for (gpus, causal) in [1, 2, 4, 8].into_iter().flat_map(|g| [(g, false), (g, true)]) {
            let ring = small_ring_problem(gpus, causal);
            let s = ring.attention.s;
            let mut seen = vec![0; s * s];
            let mut pairs = Vec::new();
            for rank in 0..gpus {
                let before = seen.iter().sum::<usize>();
                let steps = ring.ring_steps(rank);
                let keys_of: Vec<usize> = steps.iter().map(|step| step.keys_of).collect();
                let round: Vec<usize> = (0..gpus).map(|back| (rank + gpus - back) % gpus).collect();
                assert_eq!(keys_of, round);
                for (number, step) in steps.iter().enumerate() {
                    let first_half = step.queries.start == 0;
                    assert_eq!(first_half, number < ring.steps_of_first_half(rank));
                    for query in step.queries.clone() {
                        let visible = |key: &usize| !step.causal || *key <= query;
                        for key in step.keys.clone().filter(visible) {
                            let from = sequence_position(&ring, rank, query) * s;
                            seen[from + sequence_position(&ring, step.keys_of, key)] += 1;
                        }
                    }
                }
                pairs.push(seen.iter().sum::<usize>() - before);
            }
            for (at, count) in seen.into_iter().enumerate() {
                assert_eq!(count, usize::from(!causal || at % s <= at / s), "{gpus} {causal}");
            }
            assert!(pairs.iter().all(|of| *of == pairs[0]), "{pairs:?}");
        }
    }

    #[test]
    fn each_gpu_has_its_own_rows_of_the_whole_sequences_reference() {
        for (gpus, causal) in [(2, false), (4, true)] {
            let ring = small_ring_problem(gpus, causal);
            let inputs = ring.inputs(7);
            let attention = ring.attention;
            let whole = AttentionForward { attention }.reference(&ring.join_inputs(&inputs));
            let total: usize = whole.iter().map(|of| of.values.len()).sum();
            let parts = ring.reference(&inputs);
            assert_eq!(parts.iter().map(|of| of.values.len()).sum::<usize>(), total);
            for (rank, name) in Q.iter().enumerate().take(gpus) {
                for local in [0, ring.gpu_positions() - 1] {
                    let (head, at) = (2, sequence_position(&ring, rank, local));
                    assert_eq!(
                        ring.rank_and_row_in_gpu(head * attention.s + at),
                        (rank, head * ring.gpu_positions() + local)
                    );
                    let own =
                        inputs.tensor(name).to_f64((head * ring.gpu_positions() + local) * 64, 64);
                    let all = ring.join_inputs(&inputs);
                    assert_eq!(all.tensor("q").to_f64((head * attention.s + at) * 64, 64), own);
                }
            }
        }
    }
}
