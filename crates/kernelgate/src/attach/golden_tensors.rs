//! Reads golden tensors (expected outputs, and optionally inputs) from a safetensors file.

use std::path::Path;

use super::definition::TensorSpec;
use super::safetensors::SafeTensorsFile;
use crate::workload::{Dtype, Tensors};

/// Reads the tensors that a problem definition declares: all of its outputs, and those inputs that
/// the file contains. Outputs may have another float dtype than declared; inputs must have the
/// declared dtype.
///
/// # Errors
/// The error is a fragment of a message that names the file, and the tensor that is missing or of
/// another shape or dtype.
pub(super) fn read_golden_inputs_and_outputs(
    path: &Path,
    inputs: &[TensorSpec],
    outputs: &[TensorSpec],
) -> Result<(Tensors, Tensors), String> {
    let of_file = |what: String| format!("golden tensors {}: {what}", path.display());
    let file = SafeTensorsFile::read_and_check(path).map_err(of_file)?;
    let (mut found_inputs, mut found_outputs) = (Tensors::new(), Tensors::new());
    for (declared, is_input) in
        inputs.iter().map(|it| (it, true)).chain(outputs.iter().map(|it| (it, false)))
    {
        let name = declared.name;
        let entry = match file.entries.get(name) {
            Some(entry) => entry,
            None if is_input => continue,
            None => {
                let names = file.tensor_names().collect::<Vec<_>>().join("`, `");
                return Err(of_file(format!("no output `{name}`; it has `{names}`")));
            }
        };
        if entry.shape != declared.shape {
            return Err(of_file(format!(
                "`{name}` has the shape {:?}, the definition {:?}",
                entry.shape, declared.shape
            )));
        }
        let of_tensor = |why: String| of_file(format!("`{name}` {why}"));
        let tensor = file.decode_entry(entry).map_err(of_tensor)?;
        let integer = |dtype| dtype == Dtype::I8;
        let (given, wanted) = (tensor.dtype(), declared.dtype);
        let fits = if is_input { given == wanted } else { integer(given) == integer(wanted) };
        if !fits {
            let (given, wanted) = (given.dtype_name(), wanted.dtype_name());
            return Err(of_file(format!("`{name}` is {given}, the definition {wanted}")));
        }
        let found = if is_input { &mut found_inputs } else { &mut found_outputs };
        found.insert(name, tensor);
    }
    Ok((found_inputs, found_outputs))
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;

    fn tensor_spec_without_values(name: &'static str, shape: &[usize], dtype: Dtype) -> TensorSpec {
        TensorSpec { name, shape: shape.to_vec(), dtype }
    }

    #[test]
    fn golden_tensors_with_wrong_shape_or_dtype_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("golden.safetensors");
        let x: Vec<u8> = [1.0f32, 2.0].into_iter().flat_map(f32::to_le_bytes).collect();
        let y: Vec<u8> = [3.0f64, 6.0].into_iter().flat_map(f64::to_le_bytes).collect();
        let view = |dtype, bytes| TensorView::new(dtype, vec![2], bytes).unwrap();
        let tensors = [
            ("x", view(safetensors::Dtype::F32, &x)),
            ("y", view(safetensors::Dtype::F64, &y)),
            ("n", TensorView::new(safetensors::Dtype::U8, vec![2], &[1, 2]).unwrap()),
        ];
        safetensors::serialize_to_file(tensors, None, &path).unwrap();
        let input = [
            tensor_spec_without_values("x", &[2], Dtype::F32),
            tensor_spec_without_values("w", &[9], Dtype::F32),
        ];
        let output = [tensor_spec_without_values("y", &[2], Dtype::F32)];
        let (inputs, outputs) = read_golden_inputs_and_outputs(&path, &input, &output).unwrap();
        assert_eq!(inputs.f32_elements("x"), [1.0, 2.0]);
        assert!(inputs.get("w").is_none(), "drawn, because it is not there");
        assert_eq!(outputs.tensor("y").elements_to_f64(0, 2), [3.0, 6.0]);
        for (outputs, words) in [
            (
                tensor_spec_without_values("y", &[4], Dtype::F32),
                "`y` has the shape [2], the definition [4]",
            ),
            (
                tensor_spec_without_values("z", &[2], Dtype::F32),
                "no output `z`; it has `n`, `x`, `y`",
            ),
            (tensor_spec_without_values("y", &[2], Dtype::I8), "`y` is f64, the definition i8"),
            (tensor_spec_without_values("n", &[2], Dtype::I8), "`n` is U8, which no row computes"),
        ] {
            let error = read_golden_inputs_and_outputs(&path, &[], &[outputs]).unwrap_err();
            assert_eq!(error, format!("golden tensors {}: {words}", path.display()));
        }
        let wrong = read_golden_inputs_and_outputs(
            &path,
            &[tensor_spec_without_values("x", &[2], Dtype::F16)],
            &[],
        )
        .unwrap_err();
        let reason = "`x` is f32, the definition f16";
        assert_eq!(wrong, format!("golden tensors {}: {reason}", path.display()));
        // Reading a file that is truncated at any byte returns an error and does not panic.
        let whole = std::fs::read(&path).unwrap();
        for end in 0..whole.len() {
            std::fs::write(&path, &whole[..end]).unwrap();
            assert!(
                read_golden_inputs_and_outputs(&path, &input, &output).is_err(),
                "{end} of {}",
                whole.len()
            );
        }
        let shifted = String::from_utf8_lossy(&whole).replace("\"shape\":[2]", "\"shape\":[1]");
        std::fs::write(&path, shifted.as_bytes()).unwrap();
        let one = [tensor_spec_without_values("y", &[1], Dtype::F32)];
        assert!(read_golden_inputs_and_outputs(&path, &[], &one).is_err());
        std::fs::write(&path, "nothing of the kind").unwrap();
        let other = read_golden_inputs_and_outputs(&path, &input, &output).unwrap_err();
        let reason = "no safetensors file (its header is longer than the file)";
        assert_eq!(other, format!("golden tensors {}: {reason}", path.display()));
        assert!(
            read_golden_inputs_and_outputs(&folder.path().join("none"), &[], &[])
                .unwrap_err()
                .contains("none: ")
        );
    }
}
