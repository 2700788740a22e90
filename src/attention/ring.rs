//! Workload `attention/ring`: attention forward of one long sequence whose positions are
//! distributed over several GPUs.
//!
//! In ring attention over g GPUs, each GPU has the queries, keys, values and outputs of s / g
//! positions, tensors `[1, h, s / g, d]`. Without a mask, the positions that a GPU has in ring
//! attention are one contiguous range of the sequence. With a causal mask, the sequence has 2 g
//! parts; GPU r has the r-th part from the start and the r-th from the end, for equal work. The
//! reference of `attention/ring` is the fp64 reference of `attention/forward` for the whole
//! sequence.
//!
//! The ring workload does not prescribe how keys and values reach the GPUs that need them.

use std::ops::Range;

use super::definition::{
    ATTENTION_DTYPE_AXIS_WITHOUT_FP8, AttentionForward, AttentionParameters,
    attention_output_tolerance,
};
use crate::draw::draw_tensor_of_mapped_normals;
use kernelgate::workload::{
    Axis, AxisError, DeclaredGpuLinkWork, Dtype, Expected, InputSymmetry, Point, Problem, Tensor,
    TensorData, Tensors, Tolerance, Work, Workload,
};

/// Maximum number of GPUs of a ring attention problem.
const MAX_RING_GPUS: usize = 8;
/// Names of the query tensors of the GPUs; the index is the GPU's rank.
pub static QUERY_NAMES_BY_RANK: [&str; MAX_RING_GPUS] =
    ["q0", "q1", "q2", "q3", "q4", "q5", "q6", "q7"];
/// Names of the key tensors of the GPUs; the index is the GPU's rank.
pub static KEY_NAMES_BY_RANK: [&str; MAX_RING_GPUS] =
    ["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7"];
/// Names of the value tensors of the GPUs; the index is the GPU's rank.
pub static VALUE_NAMES_BY_RANK: [&str; MAX_RING_GPUS] =
    ["v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7"];
/// Names of the output tensors of the GPUs; the index is the GPU's rank.
pub static OUTPUT_NAMES_BY_RANK: [&str; MAX_RING_GPUS] =
    ["out0", "out1", "out2", "out3", "out4", "out5", "out6", "out7"];

/// Index of the head dimension in each input tensor of each GPU, for the symmetry that permutes
/// heads.
static INPUT_HEAD_AXES: [(&str, usize); 3 * MAX_RING_GPUS] = {
    let mut all = [("", 1); 3 * MAX_RING_GPUS];
    let mut rank = 0;
    while rank < MAX_RING_GPUS {
        all[3 * rank].0 = QUERY_NAMES_BY_RANK[rank];
        all[3 * rank + 1].0 = KEY_NAMES_BY_RANK[rank];
        all[3 * rank + 2].0 = VALUE_NAMES_BY_RANK[rank];
        rank += 1;
    }
    all
};
static OUTPUT_HEAD_AXES: [(&str, usize); MAX_RING_GPUS] = {
    let mut all = [("", 1); MAX_RING_GPUS];
    let mut rank = 0;
    while rank < MAX_RING_GPUS {
        all[rank].0 = OUTPUT_NAMES_BY_RANK[rank];
        rank += 1;
    }
    all
};

const RING_ATTENTION_AXES: &[Axis] = &[
    Axis::one_of("g", &["1", "2", "4", "8"], "GPUs; 1 for comparison"),
    Axis::number("s", "length of the sequence"),
    Axis::one_of("d", &["64", "128"], "elements of a head; there are 2048 / d heads"),
    Axis::one_of("mask", &["full", "causal"], "which keys a query sees"),
    ATTENTION_DTYPE_AXIS_WITHOUT_FP8,
];

/// Workload of attention forward, `softmax(q kᵀ / sqrt(d)) v`, of one sequence distributed over
/// several GPUs.
pub const RING_WORKLOAD: Workload<RingAttentionProblem> = Workload {
    name: "attention/ring",
    about: "attention/forward of one sequence over several GPUs; hidden 2048",
    revision: 1,
    axes: RING_ATTENTION_AXES,
    default_selection_lines: &["g=2 s=1024 d=64 mask=full,causal dtype=f32"],
    accelerator_selection_lines: &[
        "g=2 s=16384 d=64,128 mask=causal dtype=bf16",
        "g=2 s=65536 d=128 mask=full,causal dtype=bf16",
    ],
    thorough_selection_lines: &[
        "g=1,2,4,8 s=4096,16384,65536 d=64,128 mask=full,causal dtype=bf16",
        "g=2,4,8 s=1040,2000 d=64,128 mask=full,causal dtype=f32,bf16,f16",
    ],
    bind: RingAttentionProblem::bind_ring_attention_axes,
};

/// Problem of attention forward of one sequence distributed over several GPUs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RingAttentionProblem {
    /// Number of GPUs.
    pub gpus: usize,
    /// Attention parameters of the whole sequence, over all GPUs.
    pub attention: AttentionParameters,
}

/// One step of ring attention on a GPU: a range of its queries attends to a range of the keys of
/// one GPU; both ranges index the GPUs' own tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingAttentionStep {
    /// Rank of the GPU that owns the keys of this ring step.
    pub rank_of_keys: usize,
    /// Range of this GPU's queries that attend to at least one key of GPU `rank_of_keys`.
    pub query_range: Range<usize>,
    /// Range of the keys of GPU `rank_of_keys` to which the queries of this ring step attend.
    pub key_range: Range<usize>,
    /// Whether each query of this ring step attends only to keys up to its own position.
    pub causal: bool,
}

impl RingAttentionProblem {
    /// Ring attention problem of one sequence of `s` positions with `h` heads, over `gpus` GPUs.
    pub const fn ring_problem_of_one_sequence(
        gpus: usize,
        h: usize,
        s: usize,
        d: usize,
        causal: bool,
        dtype: Dtype,
    ) -> Self {
        let (h_kv, keys) = (h, s);
        let attention = AttentionParameters {
            batch_size: 1,
            query_heads: h,
            key_value_heads: h_kv,
            queries_per_head: s,
            keys_per_head: keys,
            head_dim: d,
            causal,
            dtype,
            adds_input_outliers: false,
        };
        Self { gpus, attention }
    }

    fn bind_ring_attention_axes(point: &Point) -> Result<Self, AxisError> {
        let gpus: usize = point.word("g")?.parse().expect("the axis lists numbers");
        let attention = AttentionParameters {
            batch_size: 1,
            ..AttentionParameters::bind_attention_axes(point)?
        };
        let ring = Self { gpus, attention };
        let unit = gpus * ring.sequence_ranges_per_gpu();
        if !attention.queries_per_head.is_multiple_of(unit) {
            let s = format!(
                "s={} is no multiple of {unit}: stretches of {gpus} GPUs",
                attention.queries_per_head
            );
            return Err(AxisError::InvalidCombinationOfValues(s));
        }
        Ok(ring)
    }

    /// Number of positions of the sequence that each GPU has.
    pub const fn positions_per_gpu(&self) -> usize {
        self.attention.queries_per_head / self.gpus
    }

    /// Number of contiguous ranges of the sequence that each GPU has: two under the causal mask,
    /// else one.
    const fn sequence_ranges_per_gpu(&self) -> usize {
        if self.attention.causal && self.gpus > 1 { 2 } else { 1 }
    }

    /// Shape of the query tensor on one GPU; its key, value and output tensors have the same shape.
    pub const fn tensor_shape_per_gpu(&self) -> [usize; 4] {
        [1, self.attention.query_heads, self.positions_per_gpu(), self.attention.head_dim]
    }

    /// Ranges of sequence positions that GPU `rank` has, in the order in which its tensors store
    /// them.
    fn token_ranges_held_by_gpu(&self, rank: usize) -> impl Iterator<Item = Range<usize>> {
        let length = self.positions_per_gpu() / self.sequence_ranges_per_gpu();
        let last = self.gpus * self.sequence_ranges_per_gpu() - 1;
        let numbers = [rank, last - rank].into_iter().take(self.sequence_ranges_per_gpu());
        numbers.map(move |number| number * length..(number + 1) * length)
    }

    /// Ring attention steps of GPU `rank`: first with its own keys, then with those of rank - 1,
    /// and so on round the ring. Under the ring's order of steps, a GPU attends to the keys of all
    /// lower ranks before those of higher ranks.
    pub fn ring_steps_of_gpu(&self, rank: usize) -> Vec<RingAttentionStep> {
        let (all, half) = (self.positions_per_gpu(), self.positions_per_gpu() / 2);
        let step = |back: usize| {
            let keys_of = (rank + self.gpus - back) % self.gpus;
            let whole = RingAttentionStep {
                rank_of_keys: keys_of,
                query_range: 0..all,
                key_range: 0..all,
                causal: false,
            };
            match (self.attention.causal, keys_of) {
                (false, _) => whole,
                (true, of) if of == rank => RingAttentionStep { causal: true, ..whole },
                // In ring attention, the first half of a lower rank's keys precedes all queries of
                // this GPU; the second half of those keys follows the queries, so it is masked.
                (true, of) if of < rank => RingAttentionStep { key_range: 0..half, ..whole },
                // Both halves of a higher rank's keys lie between the two halves of this GPU's
                // queries, so only the second half of the queries attends to them.
                (true, _) => RingAttentionStep { query_range: half..all, ..whole },
            }
        };
        (0..self.gpus).map(step).collect()
    }

    /// Number of leading ring steps of GPU `rank` in which the first half of its queries takes
    /// part.
    pub const fn ring_steps_with_first_query_half(&self, rank: usize) -> usize {
        if self.attention.causal { rank + 1 } else { self.gpus }
    }

    /// Concatenates one named tensor of each GPU, in sequence order, to the tensor of the whole
    /// sequence.
    pub(super) fn join_gpu_tensors_to_sequence(&self, inputs: &Tensors, names: &[&str]) -> Tensor {
        let AttentionParameters { query_heads: h, queries_per_head: s, head_dim: d, .. } =
            self.attention;
        let row = d * self.attention.dtype.bytes_per_element();
        let mut whole = Tensor::filled_with_zeros([1, h, s, d], self.attention.dtype);
        let bytes = whole.as_bytes_mut();
        for (rank, name) in names.iter().enumerate().take(self.gpus) {
            let mut from = inputs.tensor(name).as_bytes();
            for head in 0..h {
                for stretch in self.token_ranges_held_by_gpu(rank) {
                    let (these, rest) = from.split_at(stretch.len() * row);
                    bytes[(head * s + stretch.start) * row..][..these.len()].copy_from_slice(these);
                    from = rest;
                }
            }
        }
        whole
    }

    /// Concatenates q, k and v of all GPUs to the attention inputs of the whole sequence.
    pub(super) fn join_gpu_inputs_to_sequence(&self, inputs: &Tensors) -> Tensors {
        let mut whole = Tensors::new();
        for (name, names) in
            [("q", QUERY_NAMES_BY_RANK), ("k", KEY_NAMES_BY_RANK), ("v", VALUE_NAMES_BY_RANK)]
        {
            whole.insert(name, self.join_gpu_tensors_to_sequence(inputs, &names));
        }
        whole
    }

    /// Converts a row of the whole sequence's `[h, s]` rows to the rank of the GPU that has the row
    /// and the row's index in that GPU's tensors.
    fn rank_and_row_in_gpu_tensor(&self, row: usize) -> (usize, usize) {
        let (s, length) = (
            self.attention.queries_per_head,
            self.positions_per_gpu() / self.sequence_ranges_per_gpu(),
        );
        let (head, position) = (row / s, row % s);
        let (number, within) = (position / length, position % length);
        let (rank, stretch) = match number < self.gpus {
            true => (number, 0),
            false => (2 * self.gpus - 1 - number, 1),
        };
        (rank, head * self.positions_per_gpu() + stretch * length + within)
    }

    /// Expected output rows of one GPU, selected from those of the whole sequence; none if the
    /// reference drew no row of this GPU.
    fn expected_rows_on_gpu(&self, whole: &Expected, rank: usize) -> Option<Expected> {
        let d = self.attention.head_dim;
        let TensorData::F64(values) = &whole.expected_values else { return None };
        let rows: Vec<usize> = match &whole.row_indices {
            Some(rows) => rows.clone(),
            None => (0..values.len() / d).collect(),
        };
        let placed =
            rows.iter().map(|&row| self.rank_and_row_in_gpu_tensor(row)).zip(values.chunks(d));
        let mut mine: Vec<(usize, &[f64])> = placed
            .filter_map(|((on, row), values)| (on == rank).then_some((row, values)))
            .collect();
        mine.sort_by_key(|(row, _)| *row);
        let (rows, values): (Vec<usize>, Vec<&[f64]>) = mine.into_iter().unzip();
        let (name, values) = (OUTPUT_NAMES_BY_RANK[rank], values.concat());
        match rows.len() {
            0 => None,
            all if all == self.attention.query_heads * self.positions_per_gpu() => {
                Some(Expected::all(name, self.tensor_shape_per_gpu(), values))
            }
            _ => Some(Expected::sampled_rows(name, self.tensor_shape_per_gpu(), rows, values)),
        }
    }
}

impl Problem for RingAttentionProblem {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        for rank in 0..self.gpus {
            for name in
                [QUERY_NAMES_BY_RANK[rank], KEY_NAMES_BY_RANK[rank], VALUE_NAMES_BY_RANK[rank]]
            {
                let drawn = draw_tensor_of_mapped_normals(
                    seed,
                    name,
                    self.tensor_shape_per_gpu(),
                    self.attention.dtype,
                    |x| x,
                );
                inputs.insert(name, drawn);
            }
        }
        inputs
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let attention = self.attention;
        let whole =
            AttentionForward { attention }.reference(&self.join_gpu_inputs_to_sequence(inputs));
        let ranks = 0..self.gpus;
        ranks
            .flat_map(|rank| {
                whole.iter().filter_map(move |rows| self.expected_rows_on_gpu(rows, rank))
            })
            .collect()
    }

    /// Permuting the heads of the inputs on all GPUs permutes the heads of the outputs in the same
    /// way.
    fn symmetries(&self) -> Vec<InputSymmetry> {
        let (inputs, outputs) = (&INPUT_HEAD_AXES[..3 * self.gpus], &OUTPUT_HEAD_AXES[..self.gpus]);
        vec![InputSymmetry::RotateAlongAxis {
            inputs_with_axes: inputs,
            outputs_with_axes: outputs,
        }]
    }

    /// Work of ring attention on one GPU. The first GPU receives the keys and values of all other
    /// GPUs over its links.
    fn work(&self) -> Work {
        let whole = AttentionForward { attention: self.attention }.work();
        let gpus = self.gpus as u64;
        let mut work = Work::bytes(whole.min_read_bytes / gpus, whole.min_write_bytes / gpus);
        for flops in whole.flops {
            work = work.with_flops(flops.unit, flops.dtype, flops.operations / gpus);
        }
        match self.gpus {
            1 => work,
            gpus => {
                let received = self.attention.bytes_of_tensors_like_queries_and_keys(
                    self.attention.dtype,
                    0,
                    2,
                );
                let bytes = received / gpus as u64 * (gpus as u64 - 1);
                work.with_link(DeclaredGpuLinkWork {
                    min_received_bytes: bytes,
                    both_ways: true,
                    gpu_count: gpus,
                })
            }
        }
    }

    fn gpus(&self) -> usize {
        self.gpus
    }

    fn tolerance(&self) -> Tolerance {
        attention_output_tolerance(self.attention.dtype)
    }

    /// Bytes of host memory: the tensors of all GPUs and, for the reference, the concatenated
    /// tensors of the whole sequence.
    fn host_memory_bytes(&self) -> u64 {
        let gathered =
            self.attention.bytes_of_tensors_like_queries_and_keys(self.attention.dtype, 1, 2);
        gathered + AttentionForward { attention: self.attention }.host_memory_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::workload::{BenchEffort, SizeOfDefaultProblems, symmetry};

    fn small_ring_problem(gpus: usize, causal: bool) -> RingAttentionProblem {
        RingAttentionProblem::ring_problem_of_one_sequence(gpus, 3, 96, 64, causal, Dtype::F32)
    }

    #[test]
    fn every_ring_point_binds_and_permuted_heads_permute_outputs() {
        for point in RING_WORKLOAD
            .points_selected_by_effort(
                BenchEffort::Thorough,
                SizeOfDefaultProblems::HostAndAcceleratorSizes,
                &[],
            )
            .unwrap()
        {
            let ring = (RING_WORKLOAD.bind)(&point).unwrap();
            assert_eq!(
                (ring.attention.batch_size, ring.attention.query_heads),
                (1, 2048 / ring.attention.head_dim)
            );
        }
        for causal in [false, true] {
            assert_eq!(
                symmetry::check_symmetries_of_reference(&small_ring_problem(4, causal), 1, 0.0),
                Ok(1),
                "{causal}"
            );
        }
    }

    #[test]
    fn a_sequence_that_the_gpus_cannot_share_equally_is_declined() {
        let point = |text: &str| {
            let overrides: Vec<_> = text.split(' ').map(|one| one.parse().unwrap()).collect();
            RING_WORKLOAD
                .points_selected_by_effort(
                    BenchEffort::Default,
                    SizeOfDefaultProblems::HostCpuSizes,
                    &overrides,
                )
                .unwrap()
                .remove(0)
        };
        let error =
            RingAttentionProblem::bind_ring_attention_axes(&point("g=4 s=1004 mask=causal"))
                .unwrap_err();
        let why = "s=1004 is no multiple of 8: stretches of 4 GPUs";
        assert!(
            matches!(&error, AxisError::InvalidCombinationOfValues(it) if it == why),
            "{error}"
        );
        assert!(
            RingAttentionProblem::bind_ring_attention_axes(&point("g=4 s=1004 mask=full")).is_ok()
        );
    }

    /// Converts a position in the tensors of GPU `rank` to the position in the whole sequence.
    fn position_in_whole_sequence(ring: &RingAttentionProblem, rank: usize, local: usize) -> usize {
        ring.token_ranges_held_by_gpu(rank).flatten().nth(local).unwrap()
    }

    #[test]
    fn ring_steps_cover_each_unmasked_query_key_pair_once_with_equal_work() {
        for (gpus, causal) in [1, 2, 4, 8].into_iter().flat_map(|g| [(g, false), (g, true)]) {
            let ring = small_ring_problem(gpus, causal);
            let s = ring.attention.queries_per_head;
            let mut seen = vec![0; s * s];
            let mut pairs = Vec::new();
            for rank in 0..gpus {
                let before = seen.iter().sum::<usize>();
                let steps = ring.ring_steps_of_gpu(rank);
                let keys_of: Vec<usize> = steps.iter().map(|step| step.rank_of_keys).collect();
                let round: Vec<usize> = (0..gpus).map(|back| (rank + gpus - back) % gpus).collect();
                assert_eq!(keys_of, round);
                for (number, step) in steps.iter().enumerate() {
                    let first_half = step.query_range.start == 0;
                    assert_eq!(first_half, number < ring.ring_steps_with_first_query_half(rank));
                    for query in step.query_range.clone() {
                        let visible = |key: &usize| !step.causal || *key <= query;
                        for key in step.key_range.clone().filter(visible) {
                            let from = position_in_whole_sequence(&ring, rank, query) * s;
                            seen[from
                                + position_in_whole_sequence(&ring, step.rank_of_keys, key)] += 1;
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
    fn each_gpu_expects_its_own_rows_of_the_whole_sequences_reference() {
        for (gpus, causal) in [(2, false), (4, true)] {
            let ring = small_ring_problem(gpus, causal);
            let inputs = ring.inputs(7);
            let attention = ring.attention;
            let whole = AttentionForward { attention }
                .reference(&ring.join_gpu_inputs_to_sequence(&inputs));
            let total: usize = whole.iter().map(|of| of.expected_values.len()).sum();
            let parts = ring.reference(&inputs);
            assert_eq!(parts.iter().map(|of| of.expected_values.len()).sum::<usize>(), total);
            for (rank, name) in QUERY_NAMES_BY_RANK.iter().enumerate().take(gpus) {
                for local in [0, ring.positions_per_gpu() - 1] {
                    let (head, at) = (2, position_in_whole_sequence(&ring, rank, local));
                    assert_eq!(
                        ring.rank_and_row_in_gpu_tensor(head * attention.queries_per_head + at),
                        (rank, head * ring.positions_per_gpu() + local)
                    );
                    let own = inputs
                        .tensor(name)
                        .elements_to_f64((head * ring.positions_per_gpu() + local) * 64, 64);
                    let all = ring.join_gpu_inputs_to_sequence(&inputs);
                    assert_eq!(
                        all.tensor("q")
                            .elements_to_f64((head * attention.queries_per_head + at) * 64, 64),
                        own
                    );
                }
            }
        }
    }
}
