//! Named ranges for a profiler that listens (NVTX): session, case, warm-up, sample; the phases of a
//! computation. Without one a range costs some nanoseconds.

/// A range from its making to its drop; ranges nest.
#[must_use = "a range ends where it is dropped"]
pub struct Range(());

impl Range {
    /// Begins a range on this thread.
    pub fn new(name: &str) -> Self {
        nvtx::range_push!("{name}");
        Self(())
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        nvtx::range_pop!();
    }
}
