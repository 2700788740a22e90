//! Inputs kept on disk between the trials of a comparison: what is drawn from a seed takes longer to draw than to read.
//!
//! One file a problem, in a folder that the engine makes for one executable and deletes afterwards: a line that says what is there, then
//! the elements as they lie in memory. What is read is used for the reference too, so that a damaged file could not make a wrong output
//! right.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::cases::Group;
use crate::record::file;
use crate::workload::{Dtype, Tensor, Tensors};

/// Largest inputs that are kept.
const MOST_BYTES: usize = 2 << 30;
/// Inputs that are drawn faster are not worth a file.
const WORTHWHILE: Duration = Duration::from_millis(10);
/// Begins the first line.
const MARK: &str = "kernelgate inputs 1";

/// Where the inputs of a problem are kept.
pub fn path(folder: &Path, group: &Group<'_>) -> PathBuf {
    folder.join(format!("{}.inputs", group.id().replace('/', "_")))
}

/// What is kept there; none where there is nothing usable.
pub fn read(path: &Path) -> Option<Tensors> {
    let mut file = BufReader::new(File::open(path).ok()?);
    let mut line = String::new();
    file.read_line(&mut line).ok()?;
    let mut tensors = Tensors::new();
    for entry in line.trim_end().strip_prefix(MARK)?.split('|').skip(1) {
        let [name, dtype, shape] = entry.split(' ').collect::<Vec<_>>().try_into().ok()?;
        let shape = shape.split(',').map(|extent| extent.parse().ok()).collect::<Option<Vec<usize>>>()?;
        let mut tensor = Tensor::zeroed(shape, Dtype::parse(dtype)?);
        file.read_exact(tensor.as_bytes_mut()).ok()?;
        tensors.insert(name, tensor);
    }
    file.read(&mut [0]).is_ok_and(|more| more == 0).then_some(tensors)
}

/// Keeps them, where that is worth it. That it fails costs time, nothing else.
pub fn keep(path: &Path, inputs: &Tensors, drawn_in: Duration) {
    if drawn_in < WORTHWHILE || inputs.bytes() > MOST_BYTES || path.exists() {
        return;
    }
    let mut line = MARK.to_owned();
    for (name, tensor) in inputs.iter() {
        let shape: Vec<String> = tensor.shape().iter().map(ToString::to_string).collect();
        line += &format!("|{name} {} {}", tensor.dtype().name(), shape.join(","));
    }
    let write = || {
        let mut file = file::temporary_beside(path)?;
        writeln!(file, "{line}")?;
        inputs.iter().try_for_each(|(_, tensor)| file.write_all(tensor.as_bytes()))?;
        Ok::<_, std::io::Error>(file.persist(path)?)
    };
    let _ = write();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_come_back_bit_by_bit_and_broken_files_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.inputs");
        let inputs =
            Tensors::new().with("a", [2, 2], vec![1.0f32, -0.0, f32::MIN_POSITIVE, 3.0]).with("s", [1, 3], vec![0i8, 1, -1]);
        keep(&path, &inputs, Duration::ZERO);
        assert!(!path.exists());
        keep(&path, &inputs, WORTHWHILE);
        assert_eq!(read(&path), Some(inputs));
        let whole = std::fs::read(&path).unwrap();
        for broken in [&whole[..whole.len() - 1], &whole[1..], &[&whole[..], b"x"].concat()] {
            std::fs::write(&path, broken).unwrap();
            assert_eq!(read(&path), None);
        }
    }
}
