//! Inputs kept on disk between the trials of a comparison: what is drawn from a seed takes longer to draw than to read.
//!
//! One file a problem, in a folder that the engine makes for one executable and deletes afterwards. What is read is used for the
//! reference too, so that a damaged file could not make a wrong output right.

use std::path::{Path, PathBuf};
use std::time::Duration;

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use super::cases::Group;
use crate::record::file;
use crate::workload::{Dtype, Tensor, Tensors};

/// Largest inputs that are kept.
const MOST_BYTES: usize = 256 << 20;
/// Inputs that are drawn faster are not worth a file.
const WORTHWHILE: Duration = Duration::from_millis(100);

/// Where the inputs of a problem are kept.
pub fn path(folder: &Path, group: &Group<'_>) -> PathBuf {
    folder.join(format!("{}.safetensors", group.id().replace('/', "_")))
}

/// What is kept there; none where there is nothing usable.
pub fn read(path: &Path) -> Option<Tensors> {
    let bytes = std::fs::read(path).ok()?;
    let stored = SafeTensors::deserialize(&bytes).ok()?;
    let mut tensors = Tensors::new();
    for (name, view) in stored.tensors() {
        let dtype = ALL.into_iter().find(|&dtype| safetensors_dtype(dtype) == view.dtype())?;
        let mut tensor = Tensor::zeroed(view.shape(), dtype);
        tensor.as_bytes_mut().copy_from_slice(view.data());
        tensors.insert(&name, tensor);
    }
    Some(tensors)
}

/// Keeps them, where that is worth it. That it fails costs time, nothing else.
pub fn keep(path: &Path, inputs: &Tensors, drawn_in: Duration) {
    if drawn_in < WORTHWHILE || inputs.bytes() > MOST_BYTES || path.exists() {
        return;
    }
    let write = || {
        let temporary = file::temporary_beside(path).ok()?.into_temp_path();
        let views = inputs.iter().map(|(name, tensor)| {
            let view = TensorView::new(safetensors_dtype(tensor.dtype()), tensor.shape().to_vec(), tensor.as_bytes()).ok()?;
            Some((name.to_owned(), view))
        });
        safetensors::serialize_to_file(views.collect::<Option<Vec<_>>>()?, None, &temporary).ok()?;
        temporary.persist(path).ok()
    };
    let _ = write();
}

const ALL: [Dtype; 5] = [Dtype::F64, Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8];

/// The name of a dtype in that format.
pub fn safetensors_dtype(dtype: Dtype) -> safetensors::Dtype {
    match dtype {
        Dtype::F64 => safetensors::Dtype::F64,
        Dtype::F32 => safetensors::Dtype::F32,
        Dtype::F16 => safetensors::Dtype::F16,
        Dtype::Bf16 => safetensors::Dtype::BF16,
        Dtype::I8 => safetensors::Dtype::I8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_come_back_bit_by_bit_and_broken_files_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let inputs =
            Tensors::new().with("a", [2, 2], vec![1.0f32, -0.0, f32::MIN_POSITIVE, 3.0]).with("s", [1, 3], vec![0i8, 1, -1]);
        keep(&path, &inputs, Duration::ZERO);
        assert!(!path.exists());
        keep(&path, &inputs, WORTHWHILE);
        assert_eq!(read(&path), Some(inputs));
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert_eq!(read(&path), None);
    }
}
