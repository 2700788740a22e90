//! Sample workloads for the tests of this folder: two of one bench binary, and one of another
//! binary of the package.

use std::sync::Arc;

use crate::backend::cpu::CpuTask;
use crate::backend::{Implementation, Prepare};
use crate::suite::{Suite, join_rows};
use crate::workload::{
    Axis, AxisError, Dtype, Expected, Problem, Tensors, Tolerance, Work, Workload,
};

/// Computes nothing.
pub struct NoComputation {
    read_bytes: u64,
}

impl Problem for NoComputation {
    fn inputs(&self, _: u64) -> Tensors {
        Tensors::new()
    }

    fn reference(&self, _: &Tensors) -> Vec<Expected> {
        Vec::new()
    }

    fn work(&self) -> Work {
        Work::bytes(self.read_bytes, 1)
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance { max_error: 0.0, relative_l2: 0.0 }
    }

    fn host_bytes(&self) -> u64 {
        0
    }
}

const N: Axis = Axis::number("n", "elements");
const T: Axis = Axis::number("t", "time steps");
const D: Axis = Axis::one_of("d", &["64", "128"], "elements of a row");
const LEVELS_AXIS: Axis = Axis::one_of("level", &["4", "8", "16"], "levels");

const fn sample_workload(
    name: &'static str,
    axes: &'static [Axis],
    default: &'static [&'static str],
) -> Workload<NoComputation> {
    let (about, accelerator, thorough) = ("nothing", &[] as &[&str], &[] as &[&str]);
    Workload {
        name,
        about,
        revision: 1,
        axes,
        default,
        accelerator,
        thorough,
        bind: |_| Ok(NoComputation { read_bytes: 8 }),
    }
}

static FORWARD_WORKLOAD: Workload<NoComputation> =
    sample_workload("spike/forward", &[N, T, LEVELS_AXIS], &["n=8,16 t=4 level=8"]);
static BACKWARD_WORKLOAD: Workload<NoComputation> = Workload {
    bind: |point| match point.word("level")? {
        "16" => Err(AxisError::Combination("no gradients at level 16".to_owned())),
        _ => Ok(NoComputation { read_bytes: 8 }),
    },
    ..sample_workload("spike/backward", &[N, T, LEVELS_AXIS], &["n=8 t=4 level=8"])
};
static SOFTMAX_WORKLOAD: Workload<NoComputation> =
    sample_workload("attention/softmax", &[D], &["d=64"]);

static HUGE_WORKLOAD: Workload<NoComputation> = Workload {
    bind: |_| Ok(NoComputation { read_bytes: u64::MAX }),
    ..sample_workload("spike/huge", &[N], &["n=8"])
};

static SAMPLE_ROWS: [Implementation<NoComputation>; 1] = [row()];

/// An implementation that computes nothing, for tests.
pub const fn row() -> Implementation<NoComputation> {
    Implementation {
        name: "cpu",
        about: "nothing",
        supports: |_| Ok(()),
        prepare: Prepare::Cpu(|_, _: Arc<Tensors>| {
            let outputs = Tensors::new().with_output("y", [1], Dtype::F32);
            CpuTask::new(Arc::default(), outputs, |_, _| {})
        }),
    }
}

/// The binary's own.
pub fn own_suites() -> Vec<Suite> {
    vec![join_rows(&FORWARD_WORKLOAD, &SAMPLE_ROWS), join_rows(&BACKWARD_WORKLOAD, &SAMPLE_ROWS)]
}

/// Returns the suites of every bench binary of the package.
pub fn suites_of_all_binaries() -> Vec<Suite> {
    vec![
        join_rows(&FORWARD_WORKLOAD, &SAMPLE_ROWS),
        join_rows(&BACKWARD_WORKLOAD, &SAMPLE_ROWS),
        join_rows(&SOFTMAX_WORKLOAD, &SAMPLE_ROWS),
    ]
}

/// Makes suites that declare more bytes than a u64 can count.
pub fn huge_suites() -> Vec<Suite> {
    vec![join_rows(&HUGE_WORKLOAD, &SAMPLE_ROWS)]
}
