//! Symmetries of a workload: changes of its inputs whose effect on its outputs is known. Once the
//! effect of the symmetry is undone, outputs of the changed inputs equal those of the original
//! inputs.
//!
//! Deliberately absent: approximate symmetries. Every symmetry here holds in exact arithmetic.

use rayon::prelude::*;

use super::{Dtype, Expected, Problem, Tensor, TensorData, Tensors};

/// A change of inputs with its effect on the outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Symmetry {
    /// Symmetry: the named inputs are rolled along an axis, and the named outputs roll alike, such
    /// as heads of attention or neurons of a layer. All rolled axes have the same extent. Tensor
    /// and axis.
    Roll {
        /// Inputs.
        inputs: &'static [(&'static str, usize)],
        /// Outputs.
        outputs: &'static [(&'static str, usize)],
    },
    /// Symmetry: the named inputs are negated, and the named outputs change sign: gradients are
    /// linear in the gradient that they are computed from.
    Negate {
        /// Inputs.
        inputs: &'static [&'static str],
        /// Outputs.
        outputs: &'static [&'static str],
    },
}

impl Symmetry {
    /// Names of the inputs that the symmetry changes.
    pub fn inputs(self) -> Vec<&'static str> {
        match self {
            Self::Roll { inputs, .. } => inputs.iter().map(|(name, _)| *name).collect(),
            Self::Negate { inputs, .. } => inputs.to_vec(),
        }
    }

    /// The changed inputs; `None` if the change has no effect, because the axis has an extent of
    /// one, or if a tensor or axis does not exist.
    pub fn changed_inputs(self, inputs: &Tensors) -> Option<Tensors> {
        let mut changed = Tensors::new();
        match self {
            Self::Roll { inputs: rolled, .. } => {
                let extent = |&(name, axis)| inputs.get(name)?.shape().get(axis).copied();
                let by = roll_distance(extent(rolled.first()?)?)?;
                for &(name, axis) in rolled {
                    let tensor = inputs.get(name)?;
                    changed.insert(name, roll_axis(tensor, axis, by)?);
                }
            }
            Self::Negate { inputs: negated, .. } => {
                for name in negated {
                    changed.insert(name, negate_tensor(inputs.get(name)?));
                }
            }
        }
        Some(changed)
    }

    /// Undoes the effect of the changed inputs on the outputs; `None` if the symmetry does not
    /// cover an output.
    pub fn undo_on_outputs(self, outputs: &Tensors) -> Option<Tensors> {
        let mut undone = Tensors::new();
        for (name, output) in outputs.iter() {
            let restored = match self {
                Self::Roll { outputs, .. } => {
                    let &(_, axis) = outputs.iter().find(|(known, _)| *known == name)?;
                    let extent = *output.shape().get(axis)?;
                    roll_axis(output, axis, extent - roll_distance(extent)?)?
                }
                Self::Negate { outputs, .. } => {
                    outputs.iter().find(|known| **known == name)?;
                    negate_tensor(output)
                }
            };
            undone.insert(name, restored);
        }
        Some(undone)
    }
}

/// Checks that the symmetries of a problem hold. Tests of a workload call this function, at a small
/// shape whose reference holds every row. Returns how many symmetries there were to check.
///
/// # Errors
/// The error names the first output that differs by more than `tolerated`, relative to its largest
/// value.
pub fn check_symmetries(problem: &dyn Problem, seed: u64, tolerated: f64) -> Result<usize, String> {
    let inputs = problem.inputs(seed);
    let expected = problem.reference(&inputs);
    let mut checked = 0;
    for symmetry in problem.symmetries() {
        let Some(changed) = symmetry.changed_inputs(&inputs) else { continue };
        let outputs = whole_outputs(&problem.reference(&inputs.replaced_by(&changed)))?;
        let undone = symmetry.undo_on_outputs(&outputs);
        let undone = undone.ok_or_else(|| format!("{symmetry:?} does not know every output"))?;
        for (name, old) in whole_outputs(&expected)?.iter() {
            let old = old.to_f64(0, old.len());
            let new = undone.tensor(name).to_f64(0, old.len());
            let largest = old.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            let apart = old.iter().zip(&new).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            if apart > tolerated * largest {
                return Err(format!("{symmetry:?}: output `{name}` differs by {apart:e}"));
            }
        }
        checked += 1;
    }
    Ok(checked)
}

/// Joins the rows of expected outputs into whole tensors.
fn whole_outputs(expected: &[Expected]) -> Result<Tensors, String> {
    let mut outputs = Tensors::new();
    for one in expected {
        let dtype = if matches!(one.values, TensorData::I8(_)) { Dtype::I8 } else { Dtype::F64 };
        if outputs.get(&one.name).is_none() {
            outputs.insert(&one.name, Tensor::poisoned(one.shape.clone(), dtype));
        }
        let held = Tensor::new([one.values.len()], one.values.clone());
        let row = one.row_elements() * dtype.bytes();
        let rows = one.rows.clone().unwrap_or_else(|| (0..held.bytes() / row.max(1)).collect());
        let to = outputs.tensor_mut(&one.name).as_bytes_mut();
        for (from, row_number) in held.as_bytes().chunks(row.max(1)).zip(rows) {
            to[row_number * row..][..row].copy_from_slice(from);
        }
    }
    for (name, output) in outputs.iter() {
        let poison = |&x: &f64| x.is_nan() || x == f64::from(i8::MIN);
        if output.to_f64(0, output.len()).iter().any(poison) {
            return Err(format!("the reference of `{name}` does not hold every row"));
        }
    }
    Ok(outputs)
}

/// Distance by which an axis is rolled: about a third of it, so that no power of two divides both.
fn roll_distance(extent: usize) -> Option<usize> {
    (extent > 1).then_some((extent / 3).max(1))
}

/// Element `i` of the axis goes to `i + by`, around the end.
fn roll_axis(tensor: &Tensor, axis: usize, by: usize) -> Option<Tensor> {
    let shape = tensor.shape();
    let inner = shape.get(axis + 1..)?.iter().product::<usize>() * tensor.dtype().bytes();
    let row = shape.get(axis)? * inner;
    // The tensor begins as zeroed pages, so the cores that copy also map the pages.
    let mut rolled = Tensor::zeroed(shape, tensor.dtype());
    if row > 0 {
        let (by, from) = (by * inner, tensor.as_bytes());
        let rows = rolled.as_bytes_mut().par_chunks_mut(row).zip(from.par_chunks(row));
        rows.for_each(|(to, from)| {
            let (around, straight) = to.split_at_mut(by);
            rayon::join(
                || copy_in_parallel(straight, &from[..row - by]),
                || copy_in_parallel(around, &from[row - by..]),
            );
        });
    }
    Some(rolled)
}

/// Copies a slice to another slice of the same length on all cores, because a tensor may have a
/// single long row.
fn copy_in_parallel(to: &mut [u8], from: &[u8]) {
    const PIECE_BYTES: usize = 1 << 19;
    let pieces = to.par_chunks_mut(PIECE_BYTES).zip(from.par_chunks(PIECE_BYTES));
    pieces.for_each(|(to, from)| to.copy_from_slice(from));
}

fn negate_tensor(tensor: &Tensor) -> Tensor {
    let mut negated = Tensor::zeroed(tensor.shape(), tensor.dtype());
    match (negated.tensor_data_mut(), tensor.tensor_data()) {
        (TensorData::F64(to), TensorData::F64(from)) => map_in_parallel(to, from, |x| -x),
        (TensorData::F32(to), TensorData::F32(from)) => map_in_parallel(to, from, |x| -x),
        (TensorData::F16(to), TensorData::F16(from)) => map_in_parallel(to, from, |x| -x),
        (TensorData::Bf16(to), TensorData::Bf16(from)) => map_in_parallel(to, from, |x| -x),
        (TensorData::I8(to), TensorData::I8(from)) => map_in_parallel(to, from, i8::wrapping_neg),
        _ => unreachable!("both have the dtype of the tensor"),
    }
    negated
}

/// Fills one slice from another of the same length, on all cores.
fn map_in_parallel<T: Copy + Send + Sync>(to: &mut [T], from: &[T], f: impl Fn(T) -> T + Sync) {
    const ELEMENTS_PER_TASK: usize = 1 << 16;
    let pieces = to.par_chunks_mut(ELEMENTS_PER_TASK).zip(from.par_chunks(ELEMENTS_PER_TASK));
    pieces.for_each(|(to, from)| to.iter_mut().zip(from).for_each(|(to, &from)| *to = f(from)));
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROLL_HEADS: Symmetry = Symmetry::Roll { inputs: &[("x", 1)], outputs: &[("y", 1)] };

    fn counted_tensor(shape: [usize; 3]) -> Tensor {
        let len = shape.iter().product::<usize>();
        Tensor::new(shape, TensorData::F64((0..len).map(|i| i as f64).collect()))
    }

    fn tensor_values(tensor: &Tensor) -> Vec<f64> {
        tensor.to_f64(0, tensor.len())
    }

    #[test]
    fn rolling_moves_whole_slices_around_the_end_of_the_axis() {
        let mut inputs = Tensors::new();
        inputs.insert("x", counted_tensor([2, 4, 1]));
        let changed = ROLL_HEADS.changed_inputs(&inputs).unwrap();
        assert_eq!(tensor_values(changed.tensor("x")), [3.0, 0.0, 1.0, 2.0, 7.0, 4.0, 5.0, 6.0]);
    }

    #[test]
    fn a_long_row_copied_by_many_tasks_is_rolled_completely() {
        let (extent, inner) = (5, 1 << 18);
        let element = |i: usize| (i % 113) as i8;
        let len = extent * inner;
        let mut inputs = Tensors::new();
        inputs.insert(
            "x",
            Tensor::new([1, extent, inner], TensorData::I8((0..len).map(element).collect())),
        );
        let changed = ROLL_HEADS.changed_inputs(&inputs).unwrap();
        let TensorData::I8(rolled) = changed.tensor("x").tensor_data() else {
            panic!("another dtype")
        };
        assert!((0..len).all(|i| rolled[(i + inner) % len] == element(i)));
    }

    #[test]
    fn a_roll_along_any_axis_can_be_undone() {
        let outputs =
            Tensors::new().with("y", [2, 5, 3], (0..30).map(f64::from).collect::<Vec<_>>());
        let along = [
            Symmetry::Roll { inputs: &[("y", 0)], outputs: &[("y", 0)] },
            Symmetry::Roll { inputs: &[("y", 1)], outputs: &[("y", 1)] },
            Symmetry::Roll { inputs: &[("y", 2)], outputs: &[("y", 2)] },
        ];
        for symmetry in along {
            let rolled = symmetry.changed_inputs(&outputs).unwrap();
            assert_ne!(rolled, outputs, "{symmetry:?}");
            assert_eq!(symmetry.undo_on_outputs(&rolled).unwrap(), outputs, "{symmetry:?}");
        }
    }

    #[test]
    fn inputs_whose_axes_cannot_be_rolled_are_rejected() {
        let mut inputs = Tensors::new();
        inputs.insert("x", counted_tensor([4, 1, 2]));
        assert_eq!(ROLL_HEADS.changed_inputs(&inputs), None);
        assert_eq!(ROLL_HEADS.changed_inputs(&Tensors::new()), None);
        let unknown = Tensors::new().with("z", [2, 2, 1], vec![0.0; 4]);
        assert_eq!(ROLL_HEADS.undo_on_outputs(&unknown), None);
    }

    #[test]
    fn floats_and_integers_are_negated_exactly() {
        let negation = Symmetry::Negate { inputs: &["g"], outputs: &["y"] };
        let inputs = Tensors::new().with("g", [3], vec![1.0f32, -2.0, 0.5]);
        let changed = negation.changed_inputs(&inputs).unwrap();
        assert_eq!(changed.f32("g"), [-1.0, 2.0, -0.5]);
        let outputs = Tensors::new().with("y", [2], vec![3i8, -1]);
        assert_eq!(
            negation.undo_on_outputs(&outputs).unwrap().tensor("y").tensor_data(),
            &TensorData::I8(vec![-3, 1])
        );
    }
}
