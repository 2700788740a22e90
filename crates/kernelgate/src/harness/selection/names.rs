//! The names that a bench binary declares. Names become ids, file names and lines of a terminal, so
//! they are checked before anything else is done with them.

use crate::harness::error::HarnessError;
use crate::record::text::{check_name, check_names};
use crate::suite::Suite;

/// Checks a bench binary's own name and those of its workloads, axes and implementations.
///
/// # Errors
/// Names the first that is empty, holds a control character, or has a `/` in the wrong place.
pub fn check<'a>(bench: &str, suites: impl Iterator<Item = &'a Suite>) -> Result<(), HarnessError> {
    let refused =
        |of: String| move |problem: String| HarnessError::Name { of: of.clone(), problem };
    check_name(bench).map_err(refused("the bench's name".to_owned()))?;
    for suite in suites {
        let workload = suite.name();
        check_names(workload).map_err(refused("the workload's name".to_owned()))?;
        for axis in suite.axes() {
            check_name(axis.name).map_err(refused(format!("{workload}: the axis")))?;
            let values = axis.words().unwrap_or_default();
            let of_axis = || format!("{workload}: a value of axis `{}`:", axis.name);
            values.iter().try_for_each(|value| check_name(value).map_err(refused(of_axis())))?;
        }
        for row in suite.implementations() {
            check_names(row.name).map_err(refused(format!("{workload}: the implementation")))?;
        }
    }
    Ok(())
}

/// Checks names of tensors, which are known only when they are made. They may have parts.
///
/// # Errors
/// Names the first that is empty or holds a control character.
pub fn check_tensors<'a>(
    what: &str,
    mut names: impl Iterator<Item = &'a str>,
) -> Result<(), String> {
    names.try_for_each(|name| check_names(name).map_err(|problem| format!("the {what} {problem}")))
}

#[cfg(test)]
mod tests {
    use super::super::sample::{all, row};
    use super::*;
    use crate::backend::Implementation;
    use crate::suite::{AxisScan, Facts};
    use crate::workload::{Axis, AxisError, Lines};

    struct Named {
        workload: &'static str,
        axes: &'static [Axis],
        implementation: &'static str,
    }

    const FINE: Named = Named {
        workload: "a/b",
        axes: &[Axis::one_of("mode", &["on"], "")],
        implementation: "cpu/c",
    };

    impl From<&Named> for Suite {
        fn from(named: &Named) -> Self {
            let facts = Facts {
                name: named.workload,
                about: "",
                revision: None,
                axes: named.axes.into(),
                lines: Lines::default(),
                scan: AxisScan::default(),
            };
            let row = Implementation { name: named.implementation, ..row() };
            Self::new(facts, vec![row], |_| Err(AxisError::Missing { axis: "none" }))
        }
    }

    #[test]
    fn rejects_invalid_declared_names() {
        let suites = all();
        assert!(check("all", suites.iter()).is_ok());
        let check_suite = |suite: &Named| {
            check("b", [&suite.into()].into_iter()).map_err(|error| error.to_string())
        };
        assert_eq!(check_suite(&FINE), Ok(()));
        for (wrong, wanted) in [
            (
                Named { workload: "a\n/b", ..FINE },
                "the workload's name `a\\n/b`: its part `a\\n` holds a control character",
            ),
            (Named { workload: "a/", ..FINE }, "the workload's name `a/`: its part `` is empty"),
            (Named { implementation: "", ..FINE }, "a/b: the implementation `` is empty"),
            (
                Named { axes: const { &[Axis::number("n/m", "")] }, ..FINE },
                "a/b: the axis `n/m` holds `/`",
            ),
            (
                Named { axes: const { &[Axis::one_of("m", &["on", "\u{1b}"], "")] }, ..FINE },
                "a/b: a value of axis `m`: `\\u{1b}` holds a control character",
            ),
        ] {
            let message = check_suite(&wrong).unwrap_err();
            assert!(message.starts_with(wanted), "{message}");
        }
        assert!(check("a/b", std::iter::empty()).is_err());
        assert_eq!(check_tensors("input", ["x", "layer/0/w"].into_iter()), Ok(()));
        let message = check_tensors("input", ["x\r"].into_iter()).unwrap_err();
        assert_eq!(message, "the input `x\\r` holds a control character");
    }
}
