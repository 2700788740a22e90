//! Test workloads that compute nothing: two of one bench executable, and one of another executable
//! of the package.

use std::sync::Arc;

use crate::backend::cpu::CpuTask;
use crate::backend::{Implementation, PrepareFunction};
use crate::suite::{WorkloadSuite, join_workload_with_implementations};
use crate::workload::{
    Axis, AxisError, Dtype, Expected, Problem, Tensors, Tolerance, Work, Workload,
};

/// Computes nothing.
pub struct ProblemThatComputesNothing {
    read_bytes: u64,
}

impl Problem for ProblemThatComputesNothing {
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

    fn host_memory_bytes(&self) -> u64 {
        0
    }
}

const N: Axis = Axis::number("n", "elements");
const T: Axis = Axis::number("t", "time steps");
const D: Axis = Axis::one_of("d", &["64", "128"], "elements of a row");
const LEVELS_AXIS: Axis = Axis::one_of("level", &["4", "8", "16"], "levels");

const fn test_workload_with_axes(
    name: &'static str,
    axes: &'static [Axis],
    default: &'static [&'static str],
) -> Workload<ProblemThatComputesNothing> {
    let (about, accelerator, thorough) = ("nothing", &[] as &[&str], &[] as &[&str]);
    Workload {
        name,
        about,
        revision: 1,
        axes,
        default_selection_lines: default,
        accelerator_selection_lines: accelerator,
        thorough_selection_lines: thorough,
        bind: |_| Ok(ProblemThatComputesNothing { read_bytes: 8 }),
    }
}

static FORWARD_WORKLOAD: Workload<ProblemThatComputesNothing> =
    test_workload_with_axes("spike/forward", &[N, T, LEVELS_AXIS], &["n=8,16 t=4 level=8"]);
static BACKWARD_WORKLOAD: Workload<ProblemThatComputesNothing> = Workload {
    bind: |point| match point.word("level")? {
        "16" => Err(AxisError::InvalidCombinationOfValues("no gradients at level 16".to_owned())),
        _ => Ok(ProblemThatComputesNothing { read_bytes: 8 }),
    },
    ..test_workload_with_axes("spike/backward", &[N, T, LEVELS_AXIS], &["n=8 t=4 level=8"])
};
static SOFTMAX_WORKLOAD: Workload<ProblemThatComputesNothing> =
    test_workload_with_axes("attention/softmax", &[D], &["d=64"]);

static OVERFLOWING_WORKLOAD: Workload<ProblemThatComputesNothing> = Workload {
    bind: |_| Ok(ProblemThatComputesNothing { read_bytes: u64::MAX }),
    ..test_workload_with_axes("spike/huge", &[N], &["n=8"])
};

static TEST_IMPLEMENTATIONS: [Implementation<ProblemThatComputesNothing>; 1] =
    [implementation_that_computes_nothing()];

/// An implementation that computes nothing, for tests.
pub const fn implementation_that_computes_nothing() -> Implementation<ProblemThatComputesNothing> {
    Implementation {
        implementation_name: "cpu",
        description: "nothing",
        supports: |_| Ok(()),
        prepare: PrepareFunction::Cpu(|_, _: Arc<Tensors>| {
            let outputs = Tensors::new().with_output("y", [1], Dtype::F32);
            CpuTask::new(Arc::default(), outputs, |_, _| {})
        }),
    }
}

/// The binary's own.
pub fn suites_of_first_test_bench() -> Vec<WorkloadSuite> {
    vec![
        join_workload_with_implementations(&FORWARD_WORKLOAD, &TEST_IMPLEMENTATIONS),
        join_workload_with_implementations(&BACKWARD_WORKLOAD, &TEST_IMPLEMENTATIONS),
    ]
}

/// Suites of both test bench executables of the package.
pub fn suites_of_both_test_benches() -> Vec<WorkloadSuite> {
    vec![
        join_workload_with_implementations(&FORWARD_WORKLOAD, &TEST_IMPLEMENTATIONS),
        join_workload_with_implementations(&BACKWARD_WORKLOAD, &TEST_IMPLEMENTATIONS),
        join_workload_with_implementations(&SOFTMAX_WORKLOAD, &TEST_IMPLEMENTATIONS),
    ]
}

/// Suites whose declared work exceeds a 64-bit byte count.
pub fn suites_with_overflowing_work() -> Vec<WorkloadSuite> {
    vec![join_workload_with_implementations(&OVERFLOWING_WORKLOAD, &TEST_IMPLEMENTATIONS)]
}
