//! Tensors in a file: a line that says what is there, then the elements as they lie in memory. For
//! one machine and a short time, between processes of this project; `kernelgate verify --dump`
//! makes safetensors of it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;

use super::file;
use crate::workload::{Dtype, Tensor, Tensors};

/// Begins the first line.
const MARK: &str = "kernelgate inputs 1";

/// What is in a file; none where there is nothing usable.
pub fn read(path: &Path) -> Option<Tensors> {
    let mut file = BufReader::new(File::open(path).ok()?);
    let mut line = String::new();
    file.read_line(&mut line).ok()?;
    let mut tensors = Tensors::new();
    for entry in line.trim_end().strip_prefix(MARK)?.split('|').skip(1) {
        let [name, dtype, shape] = entry.split(' ').collect::<Vec<_>>().try_into().ok()?;
        let shape =
            shape.split(',').map(|extent| extent.parse().ok()).collect::<Option<Vec<usize>>>()?;
        let mut tensor = Tensor::zeroed(shape, Dtype::parse(dtype)?);
        file.read_exact(tensor.as_bytes_mut()).ok()?;
        tensors.insert(name, tensor);
    }
    file.read(&mut [0]).is_ok_and(|more| more == 0).then_some(tensors)
}

/// Writes a file, whole or not at all. Names hold neither spaces nor `|`.
///
/// # Errors
/// When it cannot be written.
pub fn write(path: &Path, tensors: &Tensors) -> std::io::Result<()> {
    let mut line = MARK.to_owned();
    for (name, tensor) in tensors.iter() {
        let shape: Vec<String> = tensor.shape().iter().map(ToString::to_string).collect();
        line += &format!("|{name} {} {}", tensor.dtype().name(), shape.join(","));
    }
    let mut file = file::temporary_beside(path)?;
    writeln!(file, "{line}")?;
    tensors.iter().try_for_each(|(_, tensor)| file.write_all(tensor.as_bytes()))?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_come_back_bit_by_bit_and_broken_files_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.tensors");
        let tensors = Tensors::new()
            .with("a/b", [2, 2], vec![1.0f32, -0.0, f32::MIN_POSITIVE, 3.0])
            .with("s", [1, 3], vec![0i8, 1, -1]);
        write(&path, &tensors).unwrap();
        assert_eq!(read(&path), Some(tensors));
        let whole = std::fs::read(&path).unwrap();
        for broken in [&whole[..whole.len() - 1], &whole[1..], &[&whole[..], b"x"].concat()] {
            std::fs::write(&path, broken).unwrap();
            assert_eq!(read(&path), None);
        }
    }
}
