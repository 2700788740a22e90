//! Stores the drawn inputs of problems on disk between the trials of a comparison, because reading
//! is faster than drawing them again.
//!
//! Each problem has one input file, in a folder that the comparison creates for one executable and
//! deletes afterwards. A damaged input file cannot make wrong outputs pass, because the reference
//! is computed from the same inputs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::harness::selection::cases::SelectedProblem;
use crate::record::{file, tensors};
use crate::workload::Tensors;

/// Maximum size in bytes of one problem's inputs that are stored on disk.
const MAX_STORED_INPUT_BYTES: usize = 2 << 30;
/// Inputs that took less time to draw are not stored.
const MIN_DRAWING_TIME_TO_SAVE: Duration = Duration::from_millis(10);

/// Path of the file that stores a problem's drawn inputs.
pub fn stored_inputs_path(folder: &Path, group: &SelectedProblem<'_>) -> PathBuf {
    // The file name is a hash, because ids may be too long, and `a/b_c` must differ from `a_b/c`.
    folder.join(format!("{}.inputs", file::text_hash_hex(&group.workload_and_problem_id())))
}

/// Stores a problem's inputs on disk, if drawing took long enough and no file exists. If writing
/// fails, the next process only draws the inputs again.
pub fn store_inputs_that_were_slow_to_draw(path: &Path, inputs: &Tensors, drawn_in: Duration) {
    if drawn_in >= MIN_DRAWING_TIME_TO_SAVE
        && inputs.size_in_bytes() <= MAX_STORED_INPUT_BYTES
        && !path.exists()
    {
        let _ = tensors::write_tensor_file_atomically(path, inputs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_that_are_fast_to_draw_are_not_stored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.inputs");
        let inputs = Tensors::new().with_tensor("a", [1], vec![1.0f32]);
        store_inputs_that_were_slow_to_draw(&path, &inputs, Duration::ZERO);
        assert!(!path.exists());
        store_inputs_that_were_slow_to_draw(&path, &inputs, MIN_DRAWING_TIME_TO_SAVE);
        assert_eq!(tensors::read_tensor_file(&path), Some(inputs));
    }
}
