//! Stores the drawn inputs of a problem on disk between the trials of a comparison, because drawing
//! them again takes longer than reading them.
//!
//! Each problem has one file of inputs, in a folder that the comparison makes for one executable
//! and deletes afterwards. The reference is computed from the same inputs as the outputs, so a
//! damaged file cannot make a wrong output pass.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::harness::selection::cases::ProblemGroup;
use crate::record::{file, tensors};
use crate::workload::Tensors;

/// Largest total size of inputs that are kept on disk, bytes.
const MAX_KEPT_BYTES: usize = 2 << 30;
/// Inputs that are drawn faster are not worth a file.
const MIN_DRAWING_TIME_TO_SAVE: Duration = Duration::from_millis(10);

/// Path of the inputs of a problem.
pub fn kept_inputs_path(folder: &Path, group: &ProblemGroup<'_>) -> PathBuf {
    // A hash: ids may be long, and `a/b_c` is not `a_b/c`.
    folder.join(format!("{}.inputs", file::text_hash(&group.id())))
}

/// Writes the inputs of a problem to disk if reading them will be faster than drawing them again.
/// If the file cannot be written, the next process only takes longer.
pub fn save_drawn_inputs(path: &Path, inputs: &Tensors, drawn_in: Duration) {
    if drawn_in >= MIN_DRAWING_TIME_TO_SAVE && inputs.bytes() <= MAX_KEPT_BYTES && !path.exists() {
        let _ = tensors::write(path, inputs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_that_are_fast_to_draw_are_not_stored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.inputs");
        let inputs = Tensors::new().with("a", [1], vec![1.0f32]);
        save_drawn_inputs(&path, &inputs, Duration::ZERO);
        assert!(!path.exists());
        save_drawn_inputs(&path, &inputs, MIN_DRAWING_TIME_TO_SAVE);
        assert_eq!(tensors::read(&path), Some(inputs));
    }
}
