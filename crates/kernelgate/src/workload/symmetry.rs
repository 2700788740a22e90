//! Symmetries of a workload: changes of its inputs whose effect on its outputs is known, so that
//! the reference of the changed inputs follows from the reference of the old ones.
//!
//! Deliberately absent: approximate symmetries. What is known here is exact in exact arithmetic.

use rayon::prelude::*;

use super::{Data, Expected, Problem, Tensor, Tensors};

/// A change of inputs and what it does to the outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Symmetry {
    /// Each of these inputs rolled along an axis, and each of these outputs rolled alike: heads of
    /// attention, neurons of a layer. All axes have the same extent. Tensor and axis.
    Roll {
        /// Inputs.
        inputs: &'static [(&'static str, usize)],
        /// Outputs.
        outputs: &'static [(&'static str, usize)],
    },
    /// Each of these inputs negated, and each of these outputs negated: gradients are linear in the
    /// gradient that they are made of.
    Negate {
        /// Inputs.
        inputs: &'static [&'static str],
        /// Outputs.
        outputs: &'static [&'static str],
    },
}

impl Symmetry {
    /// The inputs that it changes.
    pub fn inputs(self) -> Vec<&'static str> {
        match self {
            Self::Roll { inputs, .. } => inputs.iter().map(|(name, _)| *name).collect(),
            Self::Negate { inputs, .. } => inputs.to_vec(),
        }
    }

    /// The inputs that it changes, changed; `None` where that changes nothing, because the axis has
    /// an extent of one, or where a tensor or axis is not there.
    pub fn changed(self, inputs: &Tensors) -> Option<Tensors> {
        let mut changed = Tensors::new();
        match self {
            Self::Roll { inputs: rolled, .. } => {
                let extent = |&(name, axis)| inputs.get(name)?.shape().get(axis).copied();
                let by = shift(extent(rolled.first()?)?)?;
                for &(name, axis) in rolled {
                    let tensor = inputs.get(name)?;
                    changed.insert(name, roll(tensor, axis, by)?);
                }
            }
            Self::Negate { inputs: negated, .. } => {
                for name in negated {
                    changed.insert(name, negate(inputs.get(name)?));
                }
            }
        }
        Some(changed)
    }

    /// The reference of the changed inputs; `None` where it does not follow, because an output is
    /// not among those that the symmetry knows.
    pub fn expected(self, expected: &[Expected]) -> Option<Vec<Expected>> {
        expected.iter().map(|one| self.expected_of(one)).collect()
    }

    fn expected_of(self, expected: &Expected) -> Option<Expected> {
        match self {
            Self::Roll { outputs, .. } => {
                let &(_, axis) = outputs.iter().find(|(name, _)| *name == expected.name)?;
                let by = shift(*expected.shape.get(axis)?)?;
                roll_expected(expected, axis, by)
            }
            Self::Negate { outputs, .. } => {
                outputs.iter().find(|name| **name == expected.name)?;
                let whole = Tensor::new([expected.values.len()], expected.values.clone());
                Some(Expected { values: negate(&whole).into_data(), ..expected.clone() })
            }
        }
    }
}

/// Checks that the symmetries of a problem hold: that each reference that is said to follow is the
/// reference of the changed inputs. For the tests of a workload, at a small shape whose reference
/// holds every row. Returns how many symmetries there were to check.
///
/// # Errors
/// The first output that is further away than `tolerated`, relative to its largest value.
pub fn check(problem: &dyn Problem, seed: u64, tolerated: f64) -> Result<usize, String> {
    let inputs = problem.inputs(seed);
    let expected = problem.reference(&inputs);
    let mut checked = 0;
    for symmetry in problem.symmetries() {
        let Some(changed) = symmetry.changed(&inputs) else { continue };
        let follows = symmetry
            .expected(&expected)
            .ok_or_else(|| format!("{symmetry:?} does not know every output"))?;
        let mut all = inputs.clone();
        changed.iter().for_each(|(name, tensor)| all.insert(name, tensor.clone()));
        for (one, other) in problem.reference(&all).iter().zip(&follows) {
            let values = |data: &Data| {
                let tensor = Tensor::new([data.len()], data.clone());
                tensor.to_f64(0, data.len())
            };
            let (one_values, other_values) = (values(&one.values), values(&other.values));
            let largest = one_values.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            let pairs = one_values.iter().zip(&other_values);
            let apart = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            if one.rows != other.rows || apart > tolerated * largest || one.name != other.name {
                let name = &one.name;
                return Err(format!("{symmetry:?}: output `{name}` differs by {apart:e}"));
            }
        }
        checked += 1;
    }
    Ok(checked)
}

/// By how much an axis is rolled: about a third of it, so that no power of two divides both.
fn shift(extent: usize) -> Option<usize> {
    (extent > 1).then_some((extent / 3).max(1))
}

/// Element `i` of the axis goes to `i + by`, around the end.
fn roll(tensor: &Tensor, axis: usize, by: usize) -> Option<Tensor> {
    let shape = tensor.shape();
    let inner = shape.get(axis + 1..)?.iter().product::<usize>() * tensor.dtype().bytes();
    let row = shape.get(axis)? * inner;
    let mut rolled = tensor.clone();
    if row > 0 {
        let (by, from) = (by * inner, tensor.as_bytes());
        let rows = rolled.as_bytes_mut().par_chunks_mut(row).zip(from.par_chunks(row));
        rows.for_each(|(to, from)| {
            to[by..].copy_from_slice(&from[..row - by]);
            to[..by].copy_from_slice(&from[row - by..]);
        });
    }
    Some(rolled)
}

fn roll_expected(expected: &Expected, axis: usize, by: usize) -> Option<Expected> {
    let (shape, row_len) = (&expected.shape, expected.row_len());
    let Some(rows) = &expected.rows else {
        let whole = Tensor::new(shape.clone(), expected.values.clone());
        return Some(Expected { values: roll(&whole, axis, by)?.into_data(), ..expected.clone() });
    };
    let held = Tensor::new([rows.len(), row_len], expected.values.clone());
    if axis + 1 == shape.len() {
        return Some(Expected { values: roll(&held, 1, by)?.into_data(), ..expected.clone() });
    }
    // Rows are counted over all axes but the last.
    let inner: usize = shape[axis + 1..shape.len() - 1].iter().product();
    let extent = shape[axis];
    let moved = |row: usize| {
        let (outer, position, rest) = (row / (inner * extent), row / inner % extent, row % inner);
        (outer * extent + (position + by) % extent) * inner + rest
    };
    let mut order: Vec<(usize, usize)> =
        rows.iter().enumerate().map(|(i, &row)| (moved(row), i)).collect();
    order.sort_unstable();
    let bytes = row_len * held.dtype().bytes();
    let mut values = held.clone();
    for (to, &(_, from)) in values.as_bytes_mut().chunks_mut(bytes.max(1)).zip(&order) {
        to.copy_from_slice(&held.as_bytes()[from * bytes..][..bytes]);
    }
    Some(Expected {
        rows: Some(order.into_iter().map(|(row, _)| row).collect()),
        values: values.into_data(),
        ..expected.clone()
    })
}

fn negate(tensor: &Tensor) -> Tensor {
    let mut negated = tensor.clone();
    match negated.data_mut() {
        Data::F64(values) => values.par_iter_mut().for_each(|x| *x = -*x),
        Data::F32(values) => values.par_iter_mut().for_each(|x| *x = -*x),
        Data::F16(values) => values.par_iter_mut().for_each(|x| *x = -*x),
        Data::Bf16(values) => values.par_iter_mut().for_each(|x| *x = -*x),
        Data::I8(values) => values.par_iter_mut().for_each(|x| *x = x.wrapping_neg()),
    }
    negated
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: Symmetry = Symmetry::Roll { inputs: &[("x", 1)], outputs: &[("y", 1)] };

    fn counted(shape: [usize; 3]) -> Tensor {
        let len = shape.iter().product::<usize>();
        Tensor::new(shape, Data::F64((0..len).map(|i| i as f64).collect()))
    }

    fn values(tensor: &Tensor) -> Vec<f64> {
        tensor.to_f64(0, tensor.len())
    }

    #[test]
    fn a_roll_moves_whole_slices_around_the_end() {
        let mut inputs = Tensors::new();
        inputs.insert("x", counted([2, 4, 1]));
        let changed = HEADS.changed(&inputs).unwrap();
        assert_eq!(values(changed.tensor("x")), [3.0, 0.0, 1.0, 2.0, 7.0, 4.0, 5.0, 6.0]);
    }

    /// Sampled rows of a rolled reference are those of the rolled whole, for every axis.
    #[test]
    fn sampled_rows_roll_with_their_output() {
        let shape = [2, 5, 3];
        let whole = counted(shape);
        for axis in 0..3 {
            let by = shift(shape[axis]).unwrap();
            let rolled = roll(&whole, axis, by).unwrap();
            let rows = vec![0, 3, 4, 9];
            let held = rows.iter().flat_map(|row| whole.to_f64(row * 3, 3)).collect::<Vec<_>>();
            let sampled =
                roll_expected(&Expected::sampled("y", shape, rows, held), axis, by).unwrap();
            let rows = sampled.rows.unwrap();
            assert!(rows.is_sorted(), "axis {axis}: {rows:?}");
            let wanted = rows.iter().flat_map(|row| rolled.to_f64(row * 3, 3)).collect::<Vec<_>>();
            assert_eq!(sampled.values, Data::F64(wanted), "axis {axis}");
        }
    }

    #[test]
    fn what_changes_nothing_or_is_not_known_is_none() {
        let mut inputs = Tensors::new();
        inputs.insert("x", counted([4, 1, 2]));
        assert_eq!(HEADS.changed(&inputs), None);
        assert_eq!(HEADS.changed(&Tensors::new()), None);
        let unknown = Expected::all("z", [2, 2, 1], vec![0.0; 4]);
        assert_eq!(HEADS.expected(&[unknown]), None);
    }

    #[test]
    fn negation_is_exact_in_every_dtype() {
        let negation = Symmetry::Negate { inputs: &["g"], outputs: &["y"] };
        let inputs = Tensors::new().with("g", [3], vec![1.0f32, -2.0, 0.5]);
        let changed = negation.changed(&inputs).unwrap();
        assert_eq!(changed.f32("g"), [-1.0, 2.0, -0.5]);
        let expected = negation.expected(&[Expected::all("y", [2], vec![3i8, -1])]).unwrap();
        assert_eq!(expected[0].values, Data::I8(vec![-3, 1]));
    }
}
