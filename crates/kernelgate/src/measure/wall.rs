//! Host wall time: the clock of the CPU backend.

use std::time::Instant;

use super::{Replay, Sample, Stopwatch, Technique};
use crate::backend::{BackendError, Executable};

/// From before the first launch to after the last has finished.
pub struct Wall;

impl Stopwatch for Wall {
    fn time(
        &mut self,
        executable: &mut dyn Executable,
        launches: u64,
    ) -> Result<Sample, BackendError> {
        let start = Instant::now();
        for _ in 0..launches {
            executable.launch()?;
        }
        executable.synchronize()?;
        // The clock's resolution: a sample of exactly zero would lose Criterion's whole case.
        let elapsed_ns = (start.elapsed().as_nanos() as f64).max(1.0);
        Ok(Sample { launches, elapsed_ns, clock_mhz: None, discarded: 0, throttled: false })
    }

    fn replay(&mut self, executable: &mut dyn Executable) -> Result<Option<Replay>, BackendError> {
        executable.launch()?;
        executable.synchronize()?;
        Ok(None)
    }

    fn technique(&self) -> Technique {
        Technique::default()
    }
}
