//! Defines symmetries of a workload: changes of its inputs whose effect on the outputs is known.
//! After the known effect is undone, the outputs for the changed inputs equal those for the
//! original inputs.
//!
//! Deliberately absent: approximate symmetries. All symmetries hold exactly only without rounding.

use rayon::prelude::*;

use super::{Dtype, Expected, Problem, Tensor, TensorData, Tensors};

/// A change of a problem's inputs together with its effect on the outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputSymmetry {
    /// The named inputs are rotated along an axis, and the named outputs rotate in the same way,
    /// for example along heads of attention or neurons of a layer. All axes along which inputs and
    /// outputs are rotated have the same extent. Tensor and axis.
    RotateAlongAxis {
        /// Inputs that the symmetry changes.
        inputs_with_axes: &'static [(&'static str, usize)],
        /// Outputs that the symmetry changes.
        outputs_with_axes: &'static [(&'static str, usize)],
    },
    /// The named inputs are negated, and the named outputs change sign, because gradients are
    /// linear in the incoming gradient.
    NegateInputsAndOutputs {
        /// Inputs that the symmetry changes.
        inputs: &'static [&'static str],
        /// Outputs that the symmetry changes.
        outputs: &'static [&'static str],
    },
}

impl InputSymmetry {
    /// Returns the names of the inputs that the symmetry changes.
    pub fn names_of_changed_inputs(self) -> Vec<&'static str> {
        match self {
            Self::RotateAlongAxis { inputs_with_axes: inputs, .. } => {
                inputs.iter().map(|(name, _)| *name).collect()
            }
            Self::NegateInputsAndOutputs { inputs, .. } => inputs.to_vec(),
        }
    }

    /// Returns the changed inputs; `None` if the change has no effect because the axis has an
    /// extent of one, or if a tensor or axis does not exist.
    pub fn apply_to_inputs(self, inputs: &Tensors) -> Option<Tensors> {
        let mut changed = Tensors::new();
        match self {
            Self::RotateAlongAxis { inputs_with_axes: rolled, .. } => {
                let extent = |&(name, axis)| inputs.get(name)?.shape().get(axis).copied();
                let by = rotation_distance_of_axis(extent(rolled.first()?)?)?;
                for &(name, axis) in rolled {
                    let tensor = inputs.get(name)?;
                    changed.insert(name, rotate_tensor_along_axis(tensor, axis, by)?);
                }
            }
            Self::NegateInputsAndOutputs { inputs: negated, .. } => {
                for name in negated {
                    changed.insert(name, negate_all_elements(inputs.get(name)?));
                }
            }
        }
        Some(changed)
    }

    /// Undoes, in outputs for changed inputs, the effect of the change; `None` if the symmetry does
    /// not describe an output.
    pub fn undo_effect_on_outputs(self, outputs: &Tensors) -> Option<Tensors> {
        let mut undone = Tensors::new();
        for (name, output) in outputs.iter() {
            let restored = match self {
                Self::RotateAlongAxis { outputs_with_axes: outputs, .. } => {
                    let &(_, axis) = outputs.iter().find(|(known, _)| *known == name)?;
                    let extent = *output.shape().get(axis)?;
                    rotate_tensor_along_axis(
                        output,
                        axis,
                        extent - rotation_distance_of_axis(extent)?,
                    )?
                }
                Self::NegateInputsAndOutputs { outputs, .. } => {
                    outputs.iter().find(|known| **known == name)?;
                    negate_all_elements(output)
                }
            };
            undone.insert(name, restored);
        }
        Some(undone)
    }
}

/// Checks that all symmetries of a problem hold for its reference. Tests of a workload call this
/// function with a small problem whose reference contains every row. Returns the number of
/// symmetries that were checked.
///
/// # Errors
/// The error names the first output that differs by more than `tolerated`, relative to its largest
/// value.
pub fn check_symmetries_of_reference(
    problem: &dyn Problem,
    seed: u64,
    tolerated: f64,
) -> Result<usize, String> {
    let inputs = problem.inputs(seed);
    let expected = problem.reference(&inputs);
    let mut checked = 0;
    for symmetry in problem.symmetries() {
        let Some(changed) = symmetry.apply_to_inputs(&inputs) else { continue };
        let outputs = assemble_whole_expected_outputs(
            &problem.reference(&inputs.with_tensors_replaced_by(&changed)),
        )?;
        let undone = symmetry.undo_effect_on_outputs(&outputs);
        let undone = undone.ok_or_else(|| format!("{symmetry:?} does not know every output"))?;
        for (name, old) in assemble_whole_expected_outputs(&expected)?.iter() {
            let old = old.elements_to_f64(0, old.len());
            let new = undone.tensor(name).elements_to_f64(0, old.len());
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

/// Assembles whole output tensors from the expected values of their rows; fails if a row is
/// missing.
fn assemble_whole_expected_outputs(expected: &[Expected]) -> Result<Tensors, String> {
    let mut outputs = Tensors::new();
    for one in expected {
        let dtype =
            if matches!(one.expected_values, TensorData::I8(_)) { Dtype::I8 } else { Dtype::F64 };
        if outputs.get(&one.output_name).is_none() {
            outputs.insert(
                &one.output_name,
                Tensor::filled_with_poison(one.output_shape.clone(), dtype),
            );
        }
        let held = Tensor::new([one.expected_values.len()], one.expected_values.clone());
        let row = one.row_elements() * dtype.bytes_per_element();
        let rows = one
            .row_indices
            .clone()
            .unwrap_or_else(|| (0..held.size_in_bytes() / row.max(1)).collect());
        let to = outputs.tensor_mut(&one.output_name).as_bytes_mut();
        for (from, row_number) in held.as_bytes().chunks(row.max(1)).zip(rows) {
            to[row_number * row..][..row].copy_from_slice(from);
        }
    }
    for (name, output) in outputs.iter() {
        let poison = |&x: &f64| x.is_nan() || x == f64::from(i8::MIN);
        if output.elements_to_f64(0, output.len()).iter().any(poison) {
            return Err(format!("the reference of `{name}` does not hold every row"));
        }
    }
    Ok(outputs)
}

/// Returns by how many elements an axis is rotated: about a third of its extent, which no power of
/// two divides as well.
fn rotation_distance_of_axis(extent: usize) -> Option<usize> {
    (extent > 1).then_some((extent / 3).max(1))
}

/// Rotates a tensor along an axis: element `i` moves to `i + by`, continuing at the start after the
/// end.
fn rotate_tensor_along_axis(tensor: &Tensor, axis: usize, by: usize) -> Option<Tensor> {
    let shape = tensor.shape();
    let inner =
        shape.get(axis + 1..)?.iter().product::<usize>() * tensor.dtype().bytes_per_element();
    let row = shape.get(axis)? * inner;
    // The new tensor consists of untouched zero pages, so that the copying cores also map its
    // pages.
    let mut rolled = Tensor::filled_with_zeros(shape, tensor.dtype());
    if row > 0 {
        let (by, from) = (by * inner, tensor.as_bytes());
        let rows = rolled.as_bytes_mut().par_chunks_mut(row).zip(from.par_chunks(row));
        rows.for_each(|(to, from)| {
            let (around, straight) = to.split_at_mut(by);
            rayon::join(
                || copy_bytes_on_all_cores(straight, &from[..row - by]),
                || copy_bytes_on_all_cores(around, &from[row - by..]),
            );
        });
    }
    Some(rolled)
}

/// Copies bytes between slices of equal length on all cores, because a tensor may have a single
/// long row.
fn copy_bytes_on_all_cores(to: &mut [u8], from: &[u8]) {
    const COPIED_BYTES_PER_TASK: usize = 1 << 19;
    let pieces =
        to.par_chunks_mut(COPIED_BYTES_PER_TASK).zip(from.par_chunks(COPIED_BYTES_PER_TASK));
    pieces.for_each(|(to, from)| to.copy_from_slice(from));
}

fn negate_all_elements(tensor: &Tensor) -> Tensor {
    let mut negated = Tensor::filled_with_zeros(tensor.shape(), tensor.dtype());
    match (negated.tensor_data_mut(), tensor.tensor_data()) {
        (TensorData::F64(to), TensorData::F64(from)) => map_elements_on_all_cores(to, from, |x| -x),
        (TensorData::F32(to), TensorData::F32(from)) => map_elements_on_all_cores(to, from, |x| -x),
        (TensorData::F16(to), TensorData::F16(from)) => map_elements_on_all_cores(to, from, |x| -x),
        (TensorData::Bf16(to), TensorData::Bf16(from)) => {
            map_elements_on_all_cores(to, from, |x| -x)
        }
        (TensorData::I8(to), TensorData::I8(from)) => {
            map_elements_on_all_cores(to, from, i8::wrapping_neg)
        }
        _ => unreachable!("both have the dtype of the tensor"),
    }
    negated
}

/// Writes `f` of each element of a slice to another slice of equal length, on all cores.
fn map_elements_on_all_cores<T: Copy + Send + Sync>(
    to: &mut [T],
    from: &[T],
    f: impl Fn(T) -> T + Sync,
) {
    const MAPPED_ELEMENTS_PER_TASK: usize = 1 << 16;
    let pieces =
        to.par_chunks_mut(MAPPED_ELEMENTS_PER_TASK).zip(from.par_chunks(MAPPED_ELEMENTS_PER_TASK));
    pieces.for_each(|(to, from)| to.iter_mut().zip(from).for_each(|(to, &from)| *to = f(from)));
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROTATION_ALONG_HEADS: InputSymmetry = InputSymmetry::RotateAlongAxis {
        inputs_with_axes: &[("x", 1)],
        outputs_with_axes: &[("y", 1)],
    };

    fn tensor_of_consecutive_numbers(shape: [usize; 3]) -> Tensor {
        let len = shape.iter().product::<usize>();
        Tensor::new(shape, TensorData::F64((0..len).map(|i| i as f64).collect()))
    }

    fn tensor_values_as_f64(tensor: &Tensor) -> Vec<f64> {
        tensor.elements_to_f64(0, tensor.len())
    }

    #[test]
    fn rotation_moves_whole_slices_around_the_end_of_the_axis() {
        let mut inputs = Tensors::new();
        inputs.insert("x", tensor_of_consecutive_numbers([2, 4, 1]));
        let changed = ROTATION_ALONG_HEADS.apply_to_inputs(&inputs).unwrap();
        assert_eq!(
            tensor_values_as_f64(changed.tensor("x")),
            [3.0, 0.0, 1.0, 2.0, 7.0, 4.0, 5.0, 6.0]
        );
    }

    #[test]
    fn a_long_row_copied_by_many_tasks_is_rotated_completely() {
        let (extent, inner) = (5, 1 << 18);
        let element = |i: usize| (i % 113) as i8;
        let len = extent * inner;
        let mut inputs = Tensors::new();
        inputs.insert(
            "x",
            Tensor::new([1, extent, inner], TensorData::I8((0..len).map(element).collect())),
        );
        let changed = ROTATION_ALONG_HEADS.apply_to_inputs(&inputs).unwrap();
        let TensorData::I8(rolled) = changed.tensor("x").tensor_data() else {
            panic!("another dtype")
        };
        assert!((0..len).all(|i| rolled[(i + inner) % len] == element(i)));
    }

    #[test]
    fn a_rotation_along_any_axis_can_be_undone() {
        let outputs =
            Tensors::new().with_tensor("y", [2, 5, 3], (0..30).map(f64::from).collect::<Vec<_>>());
        let along = [
            InputSymmetry::RotateAlongAxis {
                inputs_with_axes: &[("y", 0)],
                outputs_with_axes: &[("y", 0)],
            },
            InputSymmetry::RotateAlongAxis {
                inputs_with_axes: &[("y", 1)],
                outputs_with_axes: &[("y", 1)],
            },
            InputSymmetry::RotateAlongAxis {
                inputs_with_axes: &[("y", 2)],
                outputs_with_axes: &[("y", 2)],
            },
        ];
        for symmetry in along {
            let rolled = symmetry.apply_to_inputs(&outputs).unwrap();
            assert_ne!(rolled, outputs, "{symmetry:?}");
            assert_eq!(symmetry.undo_effect_on_outputs(&rolled).unwrap(), outputs, "{symmetry:?}");
        }
    }

    #[test]
    fn inputs_whose_axes_cannot_be_rotated_are_refused() {
        let mut inputs = Tensors::new();
        inputs.insert("x", tensor_of_consecutive_numbers([4, 1, 2]));
        assert_eq!(ROTATION_ALONG_HEADS.apply_to_inputs(&inputs), None);
        assert_eq!(ROTATION_ALONG_HEADS.apply_to_inputs(&Tensors::new()), None);
        let unknown = Tensors::new().with_tensor("z", [2, 2, 1], vec![0.0; 4]);
        assert_eq!(ROTATION_ALONG_HEADS.undo_effect_on_outputs(&unknown), None);
    }

    #[test]
    fn floats_and_integers_are_negated_exactly() {
        let negation = InputSymmetry::NegateInputsAndOutputs { inputs: &["g"], outputs: &["y"] };
        let inputs = Tensors::new().with_tensor("g", [3], vec![1.0f32, -2.0, 0.5]);
        let changed = negation.apply_to_inputs(&inputs).unwrap();
        assert_eq!(changed.f32_elements("g"), [-1.0, 2.0, -0.5]);
        let outputs = Tensors::new().with_tensor("y", [2], vec![3i8, -1]);
        assert_eq!(
            negation.undo_effect_on_outputs(&outputs).unwrap().tensor("y").tensor_data(),
            &TensorData::I8(vec![-3, 1])
        );
    }
}
