//! Checks the names that a bench binary declares. Names become parts of case ids, file names and
//! terminal lines, so they are checked before any other use.

use crate::harness::error::HarnessError;
use crate::record::text::{check_id_parts, check_plain_name};
use crate::suite::Suite;

/// Checks the name of a bench binary and the names of its workloads, axes and implementations.
///
/// # Errors
/// The error states the first name that is empty, holds a control character, or has a `/` in the
/// wrong place.
pub fn check_declared_names<'a>(
    bench: &str,
    suites: impl Iterator<Item = &'a Suite>,
) -> Result<(), HarnessError> {
    let refused =
        |of: String| move |problem: String| HarnessError::Name { of: of.clone(), problem };
    check_plain_name(bench).map_err(refused("the bench's name".to_owned()))?;
    for suite in suites {
        let workload = suite.name();
        check_id_parts(workload).map_err(refused("the workload's name".to_owned()))?;
        for axis in suite.axes() {
            check_plain_name(axis.name).map_err(refused(format!("{workload}: the axis")))?;
            let values = axis.words().unwrap_or_default();
            let of_axis = || format!("{workload}: a value of axis `{}`:", axis.name);
            values
                .iter()
                .try_for_each(|value| check_plain_name(value).map_err(refused(of_axis())))?;
        }
        for row in suite.implementations() {
            check_id_parts(row.name).map_err(refused(format!("{workload}: the implementation")))?;
        }
    }
    Ok(())
}

/// Checks the names of tensors, which are known only when the tensors are made. Checks names of
/// tensors, which may consist of parts.
///
/// # Errors
/// The error names the first tensor name that is empty or holds a control character.
pub fn check_tensor_names<'a>(
    what: &str,
    mut names: impl Iterator<Item = &'a str>,
) -> Result<(), String> {
    names.try_for_each(|name| {
        check_id_parts(name).map_err(|problem| format!("the {what} {problem}"))
    })
}

#[cfg(test)]
mod tests {
    use super::super::sample::{row, suites_of_all_binaries};
    use super::*;
    use crate::backend::Implementation;
    use crate::suite::{ScanAlongAxes, WorkloadFacts};
    use crate::workload::{Axis, AxisError, SelectionLines};

    struct NamedDeclarations {
        workload: &'static str,
        axes: &'static [Axis],
        implementation: &'static str,
    }

    const VALID_DECLARATIONS: NamedDeclarations = NamedDeclarations {
        workload: "a/b",
        axes: &[Axis::one_of("mode", &["on"], "")],
        implementation: "cpu/c",
    };

    impl From<&NamedDeclarations> for Suite {
        fn from(named: &NamedDeclarations) -> Self {
            let facts = WorkloadFacts {
                name: named.workload,
                about: "",
                revision: None,
                axes: named.axes.into(),
                lines: SelectionLines::default(),
                scan: ScanAlongAxes::default(),
            };
            let row = Implementation { name: named.implementation, ..row() };
            Self::new(facts, vec![row], |_| Err(AxisError::Missing { axis: "none" }))
        }
    }

    #[test]
    fn invalid_declared_names_are_errors() {
        let suites = suites_of_all_binaries();
        assert!(check_declared_names("all", suites.iter()).is_ok());
        let check_suite = |suite: &NamedDeclarations| {
            check_declared_names("b", [&suite.into()].into_iter())
                .map_err(|error| error.to_string())
        };
        assert_eq!(check_suite(&VALID_DECLARATIONS), Ok(()));
        for (wrong, wanted) in [
            (
                NamedDeclarations { workload: "a\n/b", ..VALID_DECLARATIONS },
                "the workload's name `a\\n/b`: its part `a\\n` holds a control character",
            ),
            (
                NamedDeclarations { workload: "a/", ..VALID_DECLARATIONS },
                "the workload's name `a/`: its part `` is empty",
            ),
            (
                NamedDeclarations { implementation: "", ..VALID_DECLARATIONS },
                "a/b: the implementation `` is empty",
            ),
            (
                NamedDeclarations {
                    axes: const { &[Axis::number("n/m", "")] },
                    ..VALID_DECLARATIONS
                },
                "a/b: the axis `n/m` holds `/`, which separates the parts of an id",
            ),
            (
                NamedDeclarations {
                    axes: const { &[Axis::one_of("m", &["on", "\u{1b}"], "")] },
                    ..VALID_DECLARATIONS
                },
                "a/b: a value of axis `m`: `\\u{1b}` holds a control character",
            ),
        ] {
            let message = check_suite(&wrong).unwrap_err();
            assert_eq!(message, wanted);
        }
        assert!(check_declared_names("a/b", std::iter::empty()).is_err());
        assert_eq!(check_tensor_names("input", ["x", "layer/0/w"].into_iter()), Ok(()));
        let message = check_tensor_names("input", ["x\r"].into_iter()).unwrap_err();
        assert_eq!(message, "the input `x\\r` holds a control character");
    }
}
