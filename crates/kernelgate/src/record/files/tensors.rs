//! Stores tensors in a file: a first line that describes all tensors, then their elements as in
//! memory. kernelgate processes on one machine exchange such files for a short time; `kernelgate
//! verify --dump` converts them to safetensors.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;

use super::file;
use crate::workload::{Dtype, Tensor, Tensors};
use kernelgate_cuda::regular_file;

/// Text with which the first line of a tensor file begins.
const FIRST_LINE_MARK_OF_TENSOR_FILE: &str = "kernelgate inputs 1";

/// Length of the longest first line of a tensor file that is read, bytes.
const MAX_FIRST_LINE_BYTES_OF_TENSOR_FILE: u64 = 1 << 20;

/// Reads the tensors in a tensor file; returns `None` if the content is not valid. Another program
/// may have written the tensor file, so no memory allocation is larger than the file.
pub fn read_tensor_file(path: &Path) -> Option<Tensors> {
    let file = regular_file::open_file_unless_device_or_pipe(path).ok()?;
    let mut left = usize::try_from(file.metadata().ok()?.len()).ok()?;
    let mut file = BufReader::new(file);
    let mut line = String::new();
    file.by_ref().take(MAX_FIRST_LINE_BYTES_OF_TENSOR_FILE).read_line(&mut line).ok()?;
    let mut tensors = Tensors::new();
    for entry in line.trim_end().strip_prefix(FIRST_LINE_MARK_OF_TENSOR_FILE)?.split('|').skip(1) {
        let [name, dtype, shape] = entry.split(' ').collect::<Vec<_>>().try_into().ok()?;
        let shape =
            shape.split(',').map(|extent| extent.parse().ok()).collect::<Option<Vec<usize>>>()?;
        let dtype = Dtype::parse_dtype_name(dtype)?;
        let bytes = shape
            .iter()
            .try_fold(dtype.bytes_per_element(), |bytes, extent| bytes.checked_mul(*extent))?;
        left = left.checked_sub(bytes)?;
        let mut tensor = Tensor::filled_with_zeros(shape, dtype);
        file.read_exact(tensor.as_bytes_mut()).ok()?;
        tensors.insert(name, tensor);
    }
    file.read(&mut [0]).is_ok_and(|more| more == 0).then_some(tensors)
}

/// Writes a tensor file atomically: the file exists completely or not at all. Tensor names in the
/// file must contain neither spaces nor `|`.
pub fn write_tensor_file_atomically(path: &Path, tensors: &Tensors) -> std::io::Result<()> {
    let mut line = FIRST_LINE_MARK_OF_TENSOR_FILE.to_owned();
    for (name, tensor) in tensors.iter() {
        let shape: Vec<String> = tensor.shape().iter().map(ToString::to_string).collect();
        line += &format!("|{name} {} {}", tensor.dtype().dtype_name(), shape.join(","));
    }
    let mut file = file::create_temporary_file_beside(path)?;
    writeln!(file, "{line}")?;
    tensors.iter().try_for_each(|(_, tensor)| file.write_all(tensor.as_bytes()))?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_read_back_bit_by_bit_and_broken_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.tensors");
        let tensors = Tensors::new()
            .with_tensor("a/b", [2, 2], vec![1.0f32, -0.0, f32::MIN_POSITIVE, 3.0])
            .with_tensor("s", [1, 3], vec![0i8, 1, -1]);
        write_tensor_file_atomically(&path, &tensors).unwrap();
        assert_eq!(read_tensor_file(&path), Some(tensors));
        let whole = std::fs::read(&path).unwrap();
        for broken in [&whole[..whole.len() - 1], &whole[1..], &[&whole[..], b"x"].concat()] {
            std::fs::write(&path, broken).unwrap();
            assert_eq!(read_tensor_file(&path), None);
        }
        // These shapes have more elements than fit in memory or in an integer.
        let huge = ["1099511627776", "4294967296,4294967296", "3,3,6148914691236517205"];
        for shape in huge {
            std::fs::write(
                &path,
                format!("{FIRST_LINE_MARK_OF_TENSOR_FILE}|x f64 {shape}\n12345678"),
            )
            .unwrap();
            assert_eq!(read_tensor_file(&path), None, "{shape}");
        }
    }
}
