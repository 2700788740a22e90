//! Lists the kernels that differ between the builds, with or without a GPU: every bench of both
//! sides compiles its kernels for a stated architecture, by NVRTC.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::preparation::VERIFY_TIMEOUT;
use super::{ComparisonEngine, index};
use crate::compare::session::{ComparisonSession, SessionTools};
use crate::compare::sides::copy_benches::BenchDriver;
use crate::compare::trials::by_protocol;
use crate::compare::{CompareError, ComparisonRequest};
use crate::gate::kernels::code::ComparedKernels;
use crate::gate::paired::Arm;
use kernelgate::protocol::{BenchResponseBody, RequestedAction, ResourcesReport};
use kernelgate::record::{ComparisonTrials, TrialRequest, TrialSampling};

/// Builds both sides and compares their kernels, compiled for each requested architecture. No case
/// is verified or timed.
///
/// # Errors
/// Fails if a side cannot be made ready.
pub fn list_kernels(
    request: &ComparisonRequest,
    architectures: &[String],
) -> Result<Vec<ComparedKernels>, CompareError> {
    let session = ComparisonSession::open_session(request, false, SessionTools::interruptible()?)?;
    let engine = ComparisonEngine::new(request, &session, ComparisonTrials::default());
    let compared = |arch: &String| engine.kernels(arch);
    let kernels = architectures.iter().map(compared).collect();
    session.progress.end_progress_line();
    Ok(kernels)
}

impl ComparisonEngine<'_> {
    fn kernels(&self, arch: &str) -> ComparedKernels {
        let mut all = ComparedKernels { arch: arch.to_owned(), ..ComparedKernels::default() };
        let driven = self.session.sides.iter().flat_map(|side| side.executables.driven.keys());
        for bench in driven.collect::<BTreeSet<_>>() {
            match [Arm::Base, Arm::Head].map(|arm| self.compiled(arm, bench, arch)) {
                [Ok(base), Ok(head)] => all.add(&base, &head),
                [Err(why), _] | [_, Err(why)] => {
                    all.not_compared.insert(bench.clone(), why);
                }
            }
        }
        all
    }

    fn compiled(&self, arm: Arm, bench: &str, arch: &str) -> Result<ResourcesReport, String> {
        let executable = self.session.sides[index(arm)].executables.driven.get(bench);
        if executable.is_none_or(|it| it.driver == BenchDriver::Criterion) {
            return Err(format!("in the {arm} no bench of this harness has that name"));
        }
        self.progress.show_step(&format!("compiling the kernels of {bench} for {arch}"));
        let request =
            TrialRequest::new("kernels", PathBuf::new(), TrialSampling::VERIFICATION_SAMPLING);
        let timeout = self.request.wait.unwrap_or(VERIFY_TIMEOUT);
        let trial = self.describe_trial(arm, bench, &request, timeout)?;
        let action = RequestedAction::Resources { arch: arch.to_owned(), filter: None };
        match by_protocol::ask_executable(&self.setup(), &trial, action)? {
            BenchResponseBody::Resources(report) => Ok(report),
            _ => Err("it answered something else than it was asked".to_owned()),
        }
    }
}
