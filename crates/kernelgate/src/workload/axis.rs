//! Axes as plain data: what can vary in a workload, and the points of a sweep.
//!
//! A workload lists its [`Axis`]es and writes its selections as lines such as `"s=512,1024 d=64
//! mask=full dtype=f32"`. A line is the Cartesian product of its values; each [`Point`] has one
//! value for each axis and names a problem (`s512_d64_full_f32`). The workload's `bind` function
//! interprets the values of the axes.

use std::collections::BTreeSet;
use std::fmt;

/// An axis: a named quantity that varies among the problems of a workload.
#[derive(Debug, Clone, Copy)]
pub struct Axis {
    /// Short name of the axis, unique in the workload: `s`, `d`, `dtype`.
    pub name: &'static str,
    /// Which values are valid.
    pub values: AxisValues,
    /// Description of the axis in one line of `kernelgate list`, with its unit.
    pub about: &'static str,
}

/// The valid values of an axis: numbers or words.
#[derive(Debug, Clone, Copy)]
pub enum AxisValues {
    /// The axis accepts any whole number from 1.
    Number,
    /// The axis accepts these words or numbers.
    OneOf(&'static [&'static str]),
    /// The axis accepts the words that the lines of [`expand_points`] contain.
    InLines(&'static [&'static str]),
}

impl Axis {
    /// Makes an axis that accepts whole numbers from 1.
    pub const fn number(name: &'static str, about: &'static str) -> Axis {
        Self { name, values: AxisValues::Number, about }
    }

    /// Makes an axis whose values are words.
    pub const fn one_of(
        name: &'static str,
        values: &'static [&'static str],
        about: &'static str,
    ) -> Axis {
        Self { name, values: AxisValues::OneOf(values), about }
    }

    /// The names of the axes in lines of [`expand_points`], in their order. An axis whose values
    /// are all numbers accepts any number; another axis accepts only the words of the lines.
    pub fn axes_in_lines(lines: &'static [&'static str]) -> Vec<Self> {
        let mut axes: Vec<Self> = Vec::new();
        for (name, _) in line_items(lines) {
            if axes.iter().any(|axis| axis.name == name) {
                continue;
            }
            let axis = Self { name, values: AxisValues::InLines(lines), about: "" };
            let numbers = axis.words().iter().flatten().all(|word| word.parse::<u64>().is_ok());
            axes.push(if numbers { Self::number(name, "") } else { axis });
        }
        axes
    }

    /// Valid words of the axis; `None` if it takes any number.
    pub fn words(&self) -> Option<Vec<&'static str>> {
        match self.values {
            AxisValues::Number => None,
            AxisValues::OneOf(words) => Some(words.to_vec()),
            AxisValues::InLines(lines) => {
                let own = line_items(lines).filter(|(name, _)| *name == self.name);
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

    fn check(&self, value: &str) -> Result<(), AxisError> {
        let words = self.words();
        let valid = match &words {
            // `u64` and no sign or leading zero: one spelling a value, so that ids are unique.
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
        Err(AxisError::Value {
            axis: self.name.to_owned(),
            value: value.to_owned(),
            expected: match words {
                None => "a whole number from 1".to_owned(),
                Some(words) => format!("one of {}", words.join(", ")),
            },
        })
    }
}

/// Splits selection lines into items of the form `axis=values`, before they are parsed.
fn line_items(
    lines: &'static [&'static str],
) -> impl Iterator<Item = (&'static str, &'static str)> {
    let parts = lines.iter().flat_map(|line| line.split_whitespace());
    parts.map(|part| part.split_once('=').unwrap_or((part, "")))
}

/// The reason why a point of the axes is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AxisError {
    /// The axis does not accept the value.
    #[error("axis `{axis}` takes {expected}, not `{value}`")]
    Value {
        /// The axis.
        axis: String,
        /// Given text.
        value: String,
        /// Valid values.
        expected: String,
    },
    /// The workload has no axis of that name.
    #[error("no axis `{axis}` here; axes are {known}")]
    Unknown {
        /// Given name.
        axis: String,
        /// The axes there are.
        known: String,
    },
    /// The problem needs an axis that the point does not give.
    #[error("axis `{axis}` is missing")]
    Missing {
        /// The axis.
        axis: &'static str,
    },
    /// An item does not have the form `axis=value[,value]`.
    #[error("`{item}` is not of the form axis=value[,value]")]
    Syntax {
        /// Given text.
        item: String,
    },
    /// The values are valid one by one but not together.
    #[error("{0}")]
    Combination(String),
}

/// A point: one value for each axis that the problem uses, in the workload's axis order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point(Vec<(&'static str, String)>);

impl Point {
    /// The value of an axis whose values are numbers.
    ///
    /// # Errors
    /// Fails if the point lacks the axis or its value is not a number.
    pub fn number(&self, axis: &'static str) -> Result<usize, AxisError> {
        let value = self.word(axis)?;
        value.parse().map_err(|_| AxisError::Value {
            axis: axis.to_owned(),
            value: value.to_owned(),
            expected: format!("a whole number up to {}", usize::MAX),
        })
    }

    /// The value of any axis, as written.
    ///
    /// # Errors
    /// Fails if the point lacks the axis.
    pub fn word(&self, axis: &'static str) -> Result<&str, AxisError> {
        self.get(axis).ok_or(AxisError::Missing { axis })
    }

    /// The value of an axis, if the point has this axis.
    pub fn get(&self, axis: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| *name == axis).map(|(_, value)| value.as_str())
    }

    /// `(axis, value)` pairs in the workload's order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (*name, value.as_str()))
    }
}

/// The id of the problem: numbers carry their axis' name (`s512`), words stand alone (`causal`).
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

/// Values from `--axis name=value[,value]` that replace those of selection lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AxisOverride {
    /// Name of the axis whose values are replaced.
    pub axis: String,
    /// The new values of the axis, at least one.
    pub values: Vec<String>,
}

impl std::str::FromStr for AxisOverride {
    type Err = AxisError;

    fn from_str(item: &str) -> Result<Self, AxisError> {
        let syntax = || AxisError::Syntax { item: item.to_owned() };
        let (axis, values) = item.split_once('=').ok_or_else(syntax)?;
        let values: Vec<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
        if axis.trim().is_empty() || values.iter().any(String::is_empty) {
            return Err(syntax());
        }
        Ok(Self { axis: axis.trim().to_owned(), values })
    }
}

/// Returns every point of the selection lines, in order, without repeats.
///
/// Overrides replace the values of their axis; overrides of one axis are combined, and selection
/// lines without that axis are skipped.
///
/// # Errors
/// Fails if an axis is unknown, a value invalid or a line malformed.
pub fn expand_points(
    axes: &[Axis],
    lines: &[&str],
    overrides: &[AxisOverride],
) -> Result<Vec<Point>, AxisError> {
    for wanted in overrides {
        let axis = find_axis(axes, &wanted.axis)?;
        wanted.values.iter().try_for_each(|value| axis.check(value))?;
    }
    let overrides = merge_overrides(overrides);
    let mut seen = BTreeSet::new();
    let mut points = Vec::new();
    for line in lines {
        for point in expand_line(axes, line, &overrides)? {
            if seen.insert(point.clone()) {
                points.push(point);
            }
        }
    }
    Ok(points)
}

/// Combines overrides, so that each axis has one override with all its given values.
fn merge_overrides(overrides: &[AxisOverride]) -> Vec<AxisOverride> {
    let mut united: Vec<AxisOverride> = Vec::new();
    for wanted in overrides {
        match united.iter_mut().find(|earlier| earlier.axis == wanted.axis) {
            Some(earlier) => earlier.values.extend(wanted.values.iter().cloned()),
            None => united.push(wanted.clone()),
        }
    }
    united
}

fn expand_line(
    axes: &[Axis],
    line: &str,
    overrides: &[AxisOverride],
) -> Result<Vec<Point>, AxisError> {
    let items =
        line.split_whitespace().map(str::parse).collect::<Result<Vec<AxisOverride>, _>>()?;
    for item in &items {
        let axis = find_axis(axes, &item.axis)?;
        item.values.iter().try_for_each(|value| axis.check(value))?;
    }
    if overrides.iter().any(|wanted| items.iter().all(|item| item.axis != wanted.axis)) {
        return Ok(Vec::new());
    }
    let mut points = vec![Vec::new()];
    for axis in axes {
        let Some(item) = overrides.iter().chain(&items).find(|item| item.axis == axis.name) else {
            continue;
        };
        points = points
            .iter()
            .flat_map(|point: &Vec<(&'static str, String)>| {
                item.values.iter().map(move |value| {
                    let mut longer = point.clone();
                    longer.push((axis.name, value.clone()));
                    longer
                })
            })
            .collect();
    }
    Ok(points.into_iter().map(Point).collect())
}

fn find_axis<'a>(axes: &'a [Axis], name: &str) -> Result<&'a Axis, AxisError> {
    axes.iter().find(|axis| axis.name == name).ok_or_else(|| AxisError::Unknown {
        axis: name.to_owned(),
        known: axes.iter().map(|axis| axis.name).collect::<Vec<_>>().join(", "),
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

    fn ids(lines: &[&str], overrides: &[&str]) -> Result<Vec<String>, AxisError> {
        let overrides = overrides.iter().map(|item| item.parse()).collect::<Result<Vec<_>, _>>()?;
        Ok(expand_points(EXAMPLE_AXES, lines, &overrides)?
            .iter()
            .map(ToString::to_string)
            .collect())
    }

    #[test]
    fn a_selection_line_expands_to_all_combinations_in_axis_order() {
        assert_eq!(
            ids(&["mask=full,causal s=128,256 d=64"], &[]).unwrap(),
            ["s128_d64_full", "s128_d64_causal", "s256_d64_full", "s256_d64_causal"]
        );
    }

    #[test]
    fn points_repeated_in_several_selection_lines_are_dropped() {
        assert_eq!(ids(&["s=128 d=64", "d=64 s=128"], &[]).unwrap(), ["s128_d64"]);
    }

    #[test]
    fn an_axis_override_replaces_values_and_drops_lines_without_the_axis() {
        assert_eq!(ids(&["s=128 d=64", "d=128"], &["s=777"]).unwrap(), ["s777_d64"]);
        assert_eq!(ids(&["s=128,256 d=64"], &["s=1"]).unwrap(), ["s1_d64"]);
        // Several overrides of one axis select all of their values, once each.
        let several = ids(&["s=128 d=64"], &["s=777", "d=128", "s=3,777"]).unwrap();
        assert_eq!(several, ["s777_d128", "s3_d128"]);
    }

    #[test]
    fn an_invalid_axis_value_is_reported_with_the_valid_ones() {
        let message = |overrides: &[&str]| ids(&["s=1 d=64"], overrides).unwrap_err().to_string();
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
