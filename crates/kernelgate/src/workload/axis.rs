//! Defines the axes of a workload as plain data: which quantities can vary, and the points of a
//! sweep.
//!
//! A workload lists its [`Axis`]es, and selects problems by lines such as `"s=512,1024 d=64
//! mask=full dtype=f32"`. A selection line stands for all combinations of its values; each
//! combination is a [`Point`] with one value per axis and names a problem (`s512_d64_full_f32`).
//! The workload's `bind` function turns the axis values of a point into a problem.

use std::collections::BTreeSet;
use std::fmt;

/// An axis is a named quantity (such as a size or a dtype) that varies among the problems of a
/// workload.
#[derive(Debug, Clone, Copy)]
pub struct Axis {
    /// Short name of the axis, unique in the workload: `s`, `d`, `dtype`.
    pub axis_name: &'static str,
    /// Values that the axis accepts.
    pub values: AcceptedAxisValues,
    /// Description of the axis with its unit, for one line of `kernelgate list`.
    pub about: &'static str,
}

/// The values that an axis accepts: numbers or words.
#[derive(Debug, Clone, Copy)]
pub enum AcceptedAxisValues {
    /// The axis accepts any whole number of at least 1.
    AnyWholeNumber,
    /// The axis accepts only these words or numbers.
    OneOfWords(&'static [&'static str]),
    /// The axis accepts the words that selection lines for [`points_of_selection_lines`] contain.
    WordsInSelectionLines(&'static [&'static str]),
}

impl Axis {
    /// Makes an axis that accepts any whole number of at least 1.
    pub const fn number(name: &'static str, about: &'static str) -> Axis {
        Self { axis_name: name, values: AcceptedAxisValues::AnyWholeNumber, about }
    }

    /// The axes that occur in selection lines for [`points_of_selection_lines`], in the order of
    /// their first occurrence.
    pub const fn one_of(
        name: &'static str,
        values: &'static [&'static str],
        about: &'static str,
    ) -> Axis {
        Self { axis_name: name, values: AcceptedAxisValues::OneOfWords(values), about }
    }

    /// The names of the axes in lines of [`points_of_selection_lines`], in their order. An axis
    /// whose values in the lines are all numbers accepts any number; any other axis accepts only
    /// the words in the lines.
    pub fn axes_that_occur_in_lines(lines: &'static [&'static str]) -> Vec<Self> {
        let mut axes: Vec<Self> = Vec::new();
        for (name, _) in axis_and_values_in_lines(lines) {
            if axes.iter().any(|axis| axis.axis_name == name) {
                continue;
            }
            let axis = Self {
                axis_name: name,
                values: AcceptedAxisValues::WordsInSelectionLines(lines),
                about: "",
            };
            let numbers =
                axis.accepted_words().iter().flatten().all(|word| word.parse::<u64>().is_ok());
            axes.push(if numbers { Self::number(name, "") } else { axis });
        }
        axes
    }

    /// Returns the words that the axis accepts; `None` if it accepts any whole number of at least
    /// 1.
    pub fn accepted_words(&self) -> Option<Vec<&'static str>> {
        match self.values {
            AcceptedAxisValues::AnyWholeNumber => None,
            AcceptedAxisValues::OneOfWords(words) => Some(words.to_vec()),
            AcceptedAxisValues::WordsInSelectionLines(lines) => {
                let own =
                    axis_and_values_in_lines(lines).filter(|(name, _)| *name == self.axis_name);
                let mut words = Vec::new();
                for word in own.flat_map(|(_, values)| values.split(',')) {
                    if !words.contains(&word) {
                        words.push(word);
                    }
                }
                Some(words)
            }
        }
    }

    fn check_axis_value(&self, value: &str) -> Result<(), AxisError> {
        let words = self.accepted_words();
        let valid = match &words {
            // A number must have no sign and no leading zero, so that each number has one spelling
            // and case ids are unique.
            None => {
                value.parse::<u64>().is_ok_and(|n| n >= 1)
                    && value.bytes().all(|b| b.is_ascii_digit())
                    && !value.starts_with('0')
            }
            Some(words) => words.contains(&value),
        };
        if valid {
            return Ok(());
        }
        Err(AxisError::InvalidAxisValue {
            axis: self.axis_name.to_owned(),
            rejected_value: value.to_owned(),
            accepted_values: match words {
                None => "a whole number from 1".to_owned(),
                Some(words) => format!("one of {}", words.join(", ")),
            },
        })
    }
}

/// Splits selection lines into their items `axis=values`, as pairs of texts.
fn axis_and_values_in_lines(
    lines: &'static [&'static str],
) -> impl Iterator<Item = (&'static str, &'static str)> {
    let parts = lines.iter().flat_map(|line| line.split_whitespace());
    parts.map(|part| part.split_once('=').unwrap_or((part, "")))
}

/// The reason why a value, a point or a selection line does not fit the axes of a workload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AxisError {
    /// The axis of the workload does not accept the given value.
    #[error("axis `{axis}` takes {accepted_values}, not `{rejected_value}`")]
    InvalidAxisValue {
        /// Name of the axis that caused the error.
        axis: String,
        /// Text that the user gave.
        rejected_value: String,
        /// Values that the axis accepts.
        accepted_values: String,
    },
    /// The workload has no axis of the given name.
    #[error("no axis `{axis}` here; axes are {known_axes}")]
    UnknownAxis {
        /// Name that the user gave.
        axis: String,
        /// Names of the axes that exist.
        known_axes: String,
    },
    /// The problem needs an axis that the point does not contain.
    #[error("axis `{axis}` is missing")]
    MissingAxis {
        /// Name of the axis that caused the error.
        axis: &'static str,
    },
    /// An item of a selection line does not have the form `axis=value[,value]`.
    #[error("`{malformed_item}` is not of the form axis=value[,value]")]
    MalformedSelectionItem {
        /// Text that the user gave.
        malformed_item: String,
    },
    /// Each value is valid alone, but the workload does not accept their combination.
    #[error("{0}")]
    InvalidCombinationOfValues(String),
}

/// A point: one value for each axis that the problem uses, in the order of the workload's axes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point(Vec<(&'static str, String)>);

impl Point {
    /// Returns the value of an axis as a number.
    ///
    /// # Errors
    /// Fails if the point lacks the axis or its value is not a number.
    pub fn number(&self, axis: &'static str) -> Result<usize, AxisError> {
        let value = self.word(axis)?;
        value.parse().map_err(|_| AxisError::InvalidAxisValue {
            axis: axis.to_owned(),
            rejected_value: value.to_owned(),
            accepted_values: format!("a whole number up to {}", usize::MAX),
        })
    }

    /// Returns the value of an axis as text, as it was written.
    ///
    /// # Errors
    /// Fails if the point lacks the axis.
    pub fn word(&self, axis: &'static str) -> Result<&str, AxisError> {
        self.get(axis).ok_or(AxisError::MissingAxis { axis })
    }

    /// Returns the value of an axis as text; `None` if the point lacks the axis.
    pub fn get(&self, axis: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| *name == axis).map(|(_, value)| value.as_str())
    }

    /// Returns the pairs of axis and value, in the order of the workload's axes.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (*name, value.as_str()))
    }
}

/// Prints the id of the problem: a number follows the name of its axis (`s512`), a word stands
/// alone (`causal`).
impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (name, value)) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("_")?;
            }
            if value.starts_with(|c: char| c.is_ascii_digit()) {
                f.write_str(name)?;
            }
            f.write_str(value)?;
        }
        Ok(())
    }
}

/// Values that the user gives by `--axis name=value[,value]`, which replace the values of this axis
/// in selection lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AxisValuesFromCommandLine {
    /// Name of the axis whose values the user replaces.
    pub axis: String,
    /// The values by which the axis's values in selection lines are replaced; at least one.
    pub replacement_values: Vec<String>,
}

impl std::str::FromStr for AxisValuesFromCommandLine {
    type Err = AxisError;

    fn from_str(item: &str) -> Result<Self, AxisError> {
        let syntax = || AxisError::MalformedSelectionItem { malformed_item: item.to_owned() };
        let (axis, values) = item.split_once('=').ok_or_else(syntax)?;
        let values: Vec<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
        if axis.trim().is_empty() || values.iter().any(String::is_empty) {
            return Err(syntax());
        }
        Ok(Self { axis: axis.trim().to_owned(), replacement_values: values })
    }
}

/// Returns every point of the selection lines, in order and without repeats.
///
/// Overrides replace the values of their axis, overrides of one axis are combined, and a selection
/// line without an overridden axis is skipped.
///
/// # Errors
/// Fails if an axis is unknown, a value invalid or a line malformed.
pub fn points_of_selection_lines(
    axes: &[Axis],
    lines: &[&str],
    overrides: &[AxisValuesFromCommandLine],
) -> Result<Vec<Point>, AxisError> {
    for wanted in overrides {
        let axis = axis_with_name(axes, &wanted.axis)?;
        wanted.replacement_values.iter().try_for_each(|value| axis.check_axis_value(value))?;
    }
    let overrides = combine_overrides_of_each_axis(overrides);
    let mut seen = BTreeSet::new();
    let mut points = Vec::new();
    for line in lines {
        for point in points_of_one_selection_line(axes, line, &overrides)? {
            if seen.insert(point.clone()) {
                points.push(point);
            }
        }
    }
    Ok(points)
}

/// Combines the overrides of each axis into one override with all their values.
fn combine_overrides_of_each_axis(
    overrides: &[AxisValuesFromCommandLine],
) -> Vec<AxisValuesFromCommandLine> {
    let mut united: Vec<AxisValuesFromCommandLine> = Vec::new();
    for wanted in overrides {
        match united.iter_mut().find(|earlier| earlier.axis == wanted.axis) {
            Some(earlier) => {
                earlier.replacement_values.extend(wanted.replacement_values.iter().cloned())
            }
            None => united.push(wanted.clone()),
        }
    }
    united
}

fn points_of_one_selection_line(
    axes: &[Axis],
    line: &str,
    overrides: &[AxisValuesFromCommandLine],
) -> Result<Vec<Point>, AxisError> {
    let items = line
        .split_whitespace()
        .map(str::parse)
        .collect::<Result<Vec<AxisValuesFromCommandLine>, _>>()?;
    for item in &items {
        let axis = axis_with_name(axes, &item.axis)?;
        item.replacement_values.iter().try_for_each(|value| axis.check_axis_value(value))?;
    }
    if overrides.iter().any(|wanted| items.iter().all(|item| item.axis != wanted.axis)) {
        return Ok(Vec::new());
    }
    let mut points = vec![Vec::new()];
    for axis in axes {
        let Some(item) = overrides.iter().chain(&items).find(|item| item.axis == axis.axis_name)
        else {
            continue;
        };
        points = points
            .iter()
            .flat_map(|point: &Vec<(&'static str, String)>| {
                item.replacement_values.iter().map(move |value| {
                    let mut longer = point.clone();
                    longer.push((axis.axis_name, value.clone()));
                    longer
                })
            })
            .collect();
    }
    Ok(points.into_iter().map(Point).collect())
}

fn axis_with_name<'a>(axes: &'a [Axis], name: &str) -> Result<&'a Axis, AxisError> {
    axes.iter().find(|axis| axis.axis_name == name).ok_or_else(|| AxisError::UnknownAxis {
        axis: name.to_owned(),
        known_axes: axes.iter().map(|axis| axis.axis_name).collect::<Vec<_>>().join(", "),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE_AXES: &[Axis] = &[
        Axis::number("s", "sequence length"),
        Axis::one_of("d", &["64", "128"], "head dimension"),
        Axis::one_of("mask", &["full", "causal"], "mask"),
    ];

    fn ids_of_points(lines: &[&str], overrides: &[&str]) -> Result<Vec<String>, AxisError> {
        let overrides = overrides.iter().map(|item| item.parse()).collect::<Result<Vec<_>, _>>()?;
        Ok(points_of_selection_lines(EXAMPLE_AXES, lines, &overrides)?
            .iter()
            .map(ToString::to_string)
            .collect())
    }

    #[test]
    fn a_selection_line_gives_all_combinations_in_axis_order() {
        assert_eq!(
            ids_of_points(&["mask=full,causal s=128,256 d=64"], &[]).unwrap(),
            ["s128_d64_full", "s128_d64_causal", "s256_d64_full", "s256_d64_causal"]
        );
    }

    #[test]
    fn points_repeated_in_selection_lines_are_dropped() {
        assert_eq!(ids_of_points(&["s=128 d=64", "d=64 s=128"], &[]).unwrap(), ["s128_d64"]);
    }

    #[test]
    fn an_override_replaces_values_and_drops_lines_without_axis() {
        assert_eq!(ids_of_points(&["s=128 d=64", "d=128"], &["s=777"]).unwrap(), ["s777_d64"]);
        assert_eq!(ids_of_points(&["s=128,256 d=64"], &["s=1"]).unwrap(), ["s1_d64"]);
        // Several overrides of one axis select all of their values, each once.
        let several = ids_of_points(&["s=128 d=64"], &["s=777", "d=128", "s=3,777"]).unwrap();
        assert_eq!(several, ["s777_d128", "s3_d128"]);
    }

    #[test]
    fn an_invalid_axis_value_is_reported_with_valid_ones() {
        let message =
            |overrides: &[&str]| ids_of_points(&["s=1 d=64"], overrides).unwrap_err().to_string();
        assert_eq!(message(&["d=65"]), "axis `d` takes one of 64, 128, not `65`");
        assert_eq!(message(&["s=0"]), "axis `s` takes a whole number from 1, not `0`");
        assert_eq!(message(&["s=+4"]), "axis `s` takes a whole number from 1, not `+4`");
        assert_eq!(
            message(&["s=99999999999999999999"]),
            "axis `s` takes a whole number from 1, not `99999999999999999999`"
        );
        assert_eq!(message(&["q=1"]), "no axis `q` here; axes are s, d, mask");
        assert_eq!(message(&["s"]), "`s` is not of the form axis=value[,value]");
        assert_eq!(message(&["s=1,"]), "`s=1,` is not of the form axis=value[,value]");
    }
}
