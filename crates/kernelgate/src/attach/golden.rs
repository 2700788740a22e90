//! Golden tensors: outputs, and perhaps inputs, in a safetensors file.
//!
//! The format is read here, because its crate would bring four others to every outside package: the
//! length of a header in eight bytes, the header as JSON with dtype, shape and offsets of each
//! tensor, then the elements.

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use serde::Deserialize;
use serde_json::Value;

use super::definition::Declared;
use crate::workload::{Data, Dtype, Tensor, Tensors};

/// The tensors of a file that a definition names: all of its outputs, and of its inputs those that
/// are there. Outputs may be of a wider float than the row's, inputs are as they are declared.
///
/// # Errors
/// A fragment that names the file, and the tensor that is missing or of another shape or dtype.
pub(super) fn read(
    path: &Path,
    inputs: &[Declared],
    outputs: &[Declared],
) -> Result<(Tensors, Tensors), String> {
    let of_file = |what: String| format!("golden tensors {}: {what}", path.display());
    let bytes = std::fs::read(path).map_err(|cause| of_file(cause.to_string()))?;
    let file =
        File::parse(&bytes).map_err(|why| of_file(format!("no safetensors file ({why})")))?;
    let (mut found_inputs, mut found_outputs) = (Tensors::new(), Tensors::new());
    for (declared, is_input) in
        inputs.iter().map(|it| (it, true)).chain(outputs.iter().map(|it| (it, false)))
    {
        let name = declared.name;
        let entry = match file.entries.get(name) {
            Some(entry) => entry,
            None if is_input => continue,
            None => {
                let names: Vec<&str> = file.entries.keys().map(String::as_str).collect();
                let names = names.join("`, `");
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
        let tensor = file.tensor(entry).map_err(of_tensor)?;
        let integer = |dtype| dtype == Dtype::I8;
        let (given, wanted) = (tensor.dtype(), declared.dtype);
        let fits = if is_input { given == wanted } else { integer(given) == integer(wanted) };
        if !fits {
            let (given, wanted) = (given.name(), wanted.name());
            return Err(of_file(format!("`{name}` is {given}, the definition {wanted}")));
        }
        let found = if is_input { &mut found_inputs } else { &mut found_outputs };
        found.insert(name, tensor);
    }
    Ok((found_inputs, found_outputs))
}

/// A tensor's place in a file.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

struct File<'a> {
    entries: BTreeMap<String, Entry>,
    elements: &'a [u8],
}

impl<'a> File<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self, String> {
        let (length, rest) = bytes.split_first_chunk().ok_or("it is too short")?;
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        let (header, elements) =
            rest.split_at_checked(length).ok_or("its header is longer than the file")?;
        let mut header: BTreeMap<String, Value> =
            serde_json::from_slice(header).map_err(|cause| cause.to_string())?;
        header.remove("__metadata__");
        let entry = |(name, value)| Ok((name, serde_json::from_value(value)?));
        let entries: Result<_, serde_json::Error> = header.into_iter().map(entry).collect();
        let entries: BTreeMap<String, Entry> = entries.map_err(|cause| cause.to_string())?;
        let end = entries.values().map(|entry| entry.data_offsets[1]).max().unwrap_or_default();
        if end != elements.len() {
            return Err(format!("its elements are {} bytes, and not {end}", elements.len()));
        }
        Ok(Self { entries, elements })
    }

    /// A tensor, where its dtype is known here.
    fn tensor(&self, entry: &Entry) -> Result<Tensor, String> {
        fn all<const N: usize, T>(bytes: &[u8], of: fn([u8; N]) -> T) -> Vec<T> {
            bytes.as_chunks::<N>().0.iter().map(|bytes| of(*bytes)).collect()
        }
        let [from, to] = entry.data_offsets;
        let bytes = self.elements.get(from..to).ok_or("lies beyond the end of the file")?;
        let data = match &*entry.dtype {
            "F64" => Data::F64(all(bytes, f64::from_le_bytes)),
            "F32" => Data::F32(all(bytes, f32::from_le_bytes)),
            "F16" => Data::F16(all(bytes, f16::from_le_bytes)),
            "BF16" => Data::Bf16(all(bytes, bf16::from_le_bytes)),
            "I8" => Data::I8(all(bytes, i8::from_le_bytes)),
            other => return Err(format!("is {other}, which no row computes")),
        };
        let elements = entry.shape.iter().try_fold(1, |all: usize, &of| all.checked_mul(of));
        if elements != Some(data.len()) {
            return Err(format!("has {} elements, and the shape {:?}", data.len(), entry.shape));
        }
        Ok(Tensor::new(entry.shape.clone(), data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;

    fn declared(name: &'static str, shape: &[usize], dtype: Dtype) -> Declared {
        Declared { name, shape: shape.to_vec(), dtype }
    }

    #[test]
    fn tensors_are_read_by_name_and_others_are_refused_by_name() {
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
        let input = [declared("x", &[2], Dtype::F32), declared("w", &[9], Dtype::F32)];
        let output = [declared("y", &[2], Dtype::F32)];
        let (inputs, outputs) = read(&path, &input, &output).unwrap();
        assert_eq!(inputs.f32("x"), [1.0, 2.0]);
        assert!(inputs.get("w").is_none(), "drawn, because it is not there");
        assert_eq!(outputs.tensor("y").to_f64(0, 2), [3.0, 6.0]);
        for (outputs, words) in [
            (declared("y", &[4], Dtype::F32), "`y` has the shape [2], the definition [4]"),
            (declared("z", &[2], Dtype::F32), "no output `z`; it has `n`, `x`, `y`"),
            (declared("y", &[2], Dtype::I8), "`y` is f64, the definition i8"),
            (declared("n", &[2], Dtype::I8), "`n` is U8, which no row computes"),
        ] {
            let error = read(&path, &[], &[outputs]).unwrap_err();
            assert!(error.contains("golden.safetensors: ") && error.contains(words), "{error}");
        }
        let wrong = read(&path, &[declared("x", &[2], Dtype::F16)], &[]).unwrap_err();
        assert!(wrong.contains("`x` is f32, the definition f16"), "{wrong}");
        // Cut anywhere, it is an error and no panic.
        let whole = std::fs::read(&path).unwrap();
        for end in 0..whole.len() {
            std::fs::write(&path, &whole[..end]).unwrap();
            assert!(read(&path, &input, &output).is_err(), "{end} of {}", whole.len());
        }
        let shifted = String::from_utf8_lossy(&whole).replace("\"shape\":[2]", "\"shape\":[1]");
        std::fs::write(&path, shifted.as_bytes()).unwrap();
        let one = [declared("y", &[1], Dtype::F32)];
        assert!(read(&path, &[], &one).is_err());
        std::fs::write(&path, "nothing of the kind").unwrap();
        assert!(read(&path, &input, &output).unwrap_err().contains("no safetensors file"));
        assert!(read(&folder.path().join("none"), &[], &[]).unwrap_err().contains("none: "));
    }
}
