//! A trial request: what a comparison asks of a bench process, the trial. Files call it an order.
//! The version of this format is the version of the protocol.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::record::files::file::Record;

/// Value of KERNELGATE_TRIAL that asks only for [`answer`].
pub const QUESTION: &str = "protocol";

/// In the file of every bench executable, so that one is told from other programs without running
/// it. The NUL bytes keep it out of scripts and other text.
pub const MARK: &str = "\0kernelgate bench executable\0";

/// Makes sure that the compiler and the linker leave [`MARK`] in the executable.
pub fn leave_mark() {
    // Whoever may read it through this pointer must find it: it cannot be optimised away.
    std::hint::black_box(MARK.as_ptr());
}

/// What a bench binary that knows trials says when asked: the newest version of [`TrialRequest`]
/// that it takes.
pub fn answer() -> String {
    format!("kernelgate trial protocol {}", TrialRequest::VERSION)
}

/// The version in an answer; none where it is not one.
pub fn parse_answer(text: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix("kernelgate trial protocol "))?
        .trim()
        .parse()
        .ok()
}

/// One trial: which cases, how long, and where the run goes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrialRequest {
    /// The comparison: session of the run.
    pub session: String,
    /// Where the run is recorded.
    pub record: PathBuf,
    /// The cases to run, none of which the flags would leave out; absent where the flags alone
    /// choose.
    pub cases: Option<BTreeSet<String>>,
    /// Of these, the ones to run before the others, since their code changed. Both sides of a
    /// comparison have to heed it, or neither is asked.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub first: BTreeSet<String>,
    /// Run of an earlier process of the same executable: a case whose outputs have the bits that
    /// were verified there is verified.
    pub verified: Option<PathBuf>,
    /// Folder of this executable's inputs, drawn once and then read; absent where each process
    /// draws its own.
    pub inputs: Option<PathBuf>,
    /// Folder where outputs are left that no reference verifies, for the head's to be compared
    /// with; in the base's first process of an executable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_outputs: Option<PathBuf>,
    /// Whether outputs of verified cases are left there too, for a head that cannot verify them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_verified: bool,
    /// That folder of the base: what outputs without a reference are compared with, in the head's
    /// first process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_outputs: Option<PathBuf>,
    /// How long to time a case.
    pub pace: TrialSampling,
}

/// How long a trial times a case.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TrialSampling {
    /// Warm-up, seconds; none where the launch that verifies already took longer than all of this.
    pub warm_up_s: f64,
    /// Measurement, seconds; longer where the fewest samples take longer.
    pub measurement_s: f64,
    /// Fewest samples.
    pub fewest: usize,
    /// Most samples.
    pub most: usize,
}

impl TrialSampling {
    /// Checks the times and the counts.
    ///
    /// # Errors
    /// A fragment that names them.
    pub fn validate(&self) -> Result<(), String> {
        let Self { warm_up_s, measurement_s, fewest, most } = *self;
        if ![warm_up_s, measurement_s].iter().all(|seconds| (0.0..1e6).contains(seconds)) {
            return Err(format!("warm-up of {warm_up_s} s, measurement of {measurement_s} s"));
        }
        if fewest == 0 || most < fewest {
            return Err(format!("{fewest} to {most} samples"));
        }
        Ok(())
    }

    /// The verification pass of a process: one sample, so that every case is seen to run.
    pub const VERIFICATION_PASS: Self =
        Self { warm_up_s: 0.0, measurement_s: 0.0, fewest: 1, most: 1 };
    /// Of a process whose median counts, on a GPU: there the samples of a process differ less than
    /// processes do.
    pub const MEASURED_ON_GPU: Self =
        Self { warm_up_s: 0.05, measurement_s: 0.2, fewest: 2, most: 50 };
    /// Of a process that is there to keep the device busy until it is ended.
    pub const ENDLESS: Self =
        Self { warm_up_s: 0.0, measurement_s: 600.0, fewest: 1, most: 1_000_000 };
    /// As [`Self::MEASURED_ON_GPU`], on the host.
    pub const MEASURED: Self = Self { warm_up_s: 0.1, measurement_s: 0.3, fewest: 2, most: 20 };
}

impl Record for TrialRequest {
    const SCHEMA: &'static str = "kernelgate.order";
    const VERSION: u64 = 1;
    const KIND: &'static str = "order";
    const FREE_TEXT: &'static [&'static str] =
        &["base_outputs", "inputs", "keep_outputs", "record", "verified"];

    fn validate(&self) -> Result<(), String> {
        self.pace.validate()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_understood_and_a_list_of_cases_is_none() {
        assert_eq!(parse_answer(&answer()), Some(TrialRequest::VERSION));
        assert_eq!(parse_answer("st_bif/forward/n4/cpu/hot: benchmark\n"), None);
    }
}
