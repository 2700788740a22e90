//! The commands that launches leave in a capture of the stream.

use crate::backend::BackendError;

/// The error for a launch that enqueues nothing on the stream.
pub fn nothing() -> BackendError {
    BackendError::NotTimed("a launch enqueues nothing on the stream that is timed".to_owned())
}

/// Checks that launches that were captured together have the commands of each.
///
/// # Errors
/// [`BackendError::NotTimed`] if they have fewer.
pub fn check_alike(captured: usize, launches: u64, commands: usize) -> Result<(), BackendError> {
    if captured as u64 >= launches * commands as u64 {
        return Ok(());
    }
    Err(BackendError::NotTimed(format!(
        "launches differ in their commands: {commands} in one, {captured} in {launches} together"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_that_are_captured_together_have_the_commands_of_each() {
        check_alike(64, 64, 1).unwrap();
        check_alike(130, 64, 2).unwrap();
        let fewer = check_alike(22, 33, 1).unwrap_err().to_string();
        let words = "launches differ in their commands: 1 in one, 22 in 33 together";
        assert!(fewer.contains(words), "{fewer}");
    }
}
