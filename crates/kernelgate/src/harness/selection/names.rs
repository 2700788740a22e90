//! Checks the names that a bench executable declares for itself, workloads, axes and
//! implementations. Names are checked first, because they become parts of case ids, file names and
//! terminal output.

use crate::harness::error::HarnessError;
use crate::record::text::{check_is_plain_name, check_parts_of_id};
use crate::suite::WorkloadSuite;

/// Checks the names of a bench executable and of its workloads, axes and implementations.
///
/// # Errors
/// The error quotes the first name that is empty, contains a control character, or contains `/` in
/// a wrong place.
pub fn check_names_of_bench_and_workloads<'a>(
    bench: &str,
    suites: impl Iterator<Item = &'a WorkloadSuite>,
) -> Result<(), HarnessError> {
    let refused = |of: String| {
        move |problem: String| HarnessError::InvalidDeclaredName {
            named_thing: of.clone(),
            name_fault: problem,
        }
    };
    check_is_plain_name(bench).map_err(refused("the bench's name".to_owned()))?;
    for suite in suites {
        let workload = suite.workload_name();
        check_parts_of_id(workload).map_err(refused("the workload's name".to_owned()))?;
        for axis in suite.axes_of_workload() {
            check_is_plain_name(axis.axis_name)
                .map_err(refused(format!("{workload}: the axis")))?;
            let values = axis.accepted_words().unwrap_or_default();
            let of_axis = || format!("{workload}: a value of axis `{}`:", axis.axis_name);
            values
                .iter()
                .try_for_each(|value| check_is_plain_name(value).map_err(refused(of_axis())))?;
        }
        for row in suite.implementations_of_workload() {
            check_parts_of_id(row.name)
                .map_err(refused(format!("{workload}: the implementation")))?;
        }
    }
    Ok(())
}

/// Checks the names of inputs or outputs, which are known only after the tensors were made. A
/// tensor name may consist of several parts separated by `/`.
///
/// # Errors
/// The error quotes the first name that is empty or contains a control character.
pub fn check_characters_of_tensor_names<'a>(
    what: &str,
    mut names: impl Iterator<Item = &'a str>,
) -> Result<(), String> {
    names.try_for_each(|name| {
        check_parts_of_id(name).map_err(|problem| format!("the {what} {problem}"))
    })
}

#[cfg(test)]
mod tests {
    use super::super::sample::{implementation_that_computes_nothing, suites_of_both_test_benches};
    use super::*;
    use crate::backend::Implementation;
    use crate::suite::{ProblemsAlongEachAxis, WorkloadNameAxesAndSelections};
    use crate::workload::{Axis, AxisError, SelectionLinesByEffort};

    struct DeclaredTestNames {
        workload_name: &'static str,
        axes: &'static [Axis],
        implementation_name: &'static str,
    }

    const VALID_TEST_NAMES: DeclaredTestNames = DeclaredTestNames {
        workload_name: "a/b",
        axes: &[Axis::one_of("mode", &["on"], "")],
        implementation_name: "cpu/c",
    };

    impl From<&DeclaredTestNames> for WorkloadSuite {
        fn from(named: &DeclaredTestNames) -> Self {
            let facts = WorkloadNameAxesAndSelections {
                name: named.workload_name,
                about: "",
                workload_revision: None,
                axes: named.axes.into(),
                selection_lines: SelectionLinesByEffort::default(),
                scan_along_axes: ProblemsAlongEachAxis::default(),
            };
            let row = Implementation {
                implementation_name: named.implementation_name,
                ..implementation_that_computes_nothing()
            };
            Self::new(facts, vec![row], |_| Err(AxisError::MissingAxis { axis: "none" }))
        }
    }

    #[test]
    fn invalid_declared_names_are_errors() {
        let suites = suites_of_both_test_benches();
        assert!(check_names_of_bench_and_workloads("all", suites.iter()).is_ok());
        let check_suite = |suite: &DeclaredTestNames| {
            check_names_of_bench_and_workloads("b", [&suite.into()].into_iter())
                .map_err(|error| error.to_string())
        };
        assert_eq!(check_suite(&VALID_TEST_NAMES), Ok(()));
        for (wrong, wanted) in [
            (
                DeclaredTestNames { workload_name: "a\n/b", ..VALID_TEST_NAMES },
                "the workload's name `a\\n/b`: its part `a\\n` holds a control character",
            ),
            (
                DeclaredTestNames { workload_name: "a/", ..VALID_TEST_NAMES },
                "the workload's name `a/`: its part `` is empty",
            ),
            (
                DeclaredTestNames { implementation_name: "", ..VALID_TEST_NAMES },
                "a/b: the implementation `` is empty",
            ),
            (
                DeclaredTestNames {
                    axes: const { &[Axis::number("n/m", "")] },
                    ..VALID_TEST_NAMES
                },
                "a/b: the axis `n/m` holds `/`, which separates the parts of an id",
            ),
            (
                DeclaredTestNames {
                    axes: const { &[Axis::one_of("m", &["on", "\u{1b}"], "")] },
                    ..VALID_TEST_NAMES
                },
                "a/b: a value of axis `m`: `\\u{1b}` holds a control character",
            ),
        ] {
            let message = check_suite(&wrong).unwrap_err();
            assert_eq!(message, wanted);
        }
        assert!(check_names_of_bench_and_workloads("a/b", std::iter::empty()).is_err());
        assert_eq!(
            check_characters_of_tensor_names("input", ["x", "layer/0/w"].into_iter()),
            Ok(())
        );
        let message = check_characters_of_tensor_names("input", ["x\r"].into_iter()).unwrap_err();
        assert_eq!(message, "the input `x\\r` holds a control character");
    }
}
