//! Lists the kernels whose machine code differs between the two builds, without a GPU: each bench
//! of both sides compiles its kernels with NVRTC for a given architecture.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::preparation::VERIFICATION_TIMEOUT;
use super::{ComparisonEngine, index_of_side};
use crate::compare::session::{ComparisonSession, ProgressAndChildProcesses};
use crate::compare::sides::copy_benches::BenchControlMethod;
use crate::compare::trials::by_protocol;
use crate::compare::{BuildComparisonRequest, CompareError};
use crate::gate::kernels::code::ArchitectureKernelComparison;
use crate::gate::paired::ComparedArm;
use kernelgate::protocol::{KernelResourcesReport, RequestedBenchAction, ResponseToBenchAction};
use kernelgate::record::{ComparisonTrialsFile, TrialRequestToBench, TrialSamplingPlan};

/// Builds base and head, compiles their kernels for each requested architecture, and compares them.
/// The comparison of kernels verifies and times no case.
///
/// # Errors
/// Fails if base or head cannot be built.
pub fn compare_kernels_of_both_builds(
    request: &BuildComparisonRequest,
    architectures: &[String],
) -> Result<Vec<ArchitectureKernelComparison>, CompareError> {
    let session = ComparisonSession::prepare_sides_in_locked_folder(
        request,
        false,
        ProgressAndChildProcesses::with_interrupt_handler()?,
    )?;
    let engine =
        ComparisonEngine::engine_with_trials(request, &session, ComparisonTrialsFile::default());
    let compared = |arch: &String| engine.compare_kernels_for_architecture(arch);
    let kernels = architectures.iter().map(compared).collect();
    session.progress.clear_progress_line();
    Ok(kernels)
}

impl ComparisonEngine<'_> {
    fn compare_kernels_for_architecture(&self, arch: &str) -> ArchitectureKernelComparison {
        let mut all = ArchitectureKernelComparison {
            gpu_architecture: arch.to_owned(),
            ..ArchitectureKernelComparison::default()
        };
        let driven =
            self.session.sides.iter().flat_map(|side| side.executables.runnable_benches.keys());
        for bench in driven.collect::<BTreeSet<_>>() {
            match [ComparedArm::BaseBuild, ComparedArm::HeadBuild]
                .map(|arm| self.compiled_kernel_resources(arm, bench, arch))
            {
                [Ok(base), Ok(head)] => all.add_kernels_of_bench(&base, &head),
                [Err(why), _] | [_, Err(why)] => {
                    all.benches_not_compared.insert(bench.clone(), why);
                }
            }
        }
        all
    }

    fn compiled_kernel_resources(
        &self,
        arm: ComparedArm,
        bench: &str,
        arch: &str,
    ) -> Result<KernelResourcesReport, String> {
        let executable =
            self.session.sides[index_of_side(arm)].executables.runnable_benches.get(bench);
        if executable.is_none_or(|it| it.control_method == BenchControlMethod::CriterionFlags) {
            return Err(format!("in the {arm} no bench of this harness has that name"));
        }
        self.progress.show_current_step(&format!("compiling the kernels of {bench} for {arch}"));
        let request = TrialRequestToBench::for_all_selected_cases(
            "kernels",
            PathBuf::new(),
            TrialSamplingPlan::ONE_SAMPLE_FOR_VERIFICATION,
        );
        let timeout = self.request.process_timeout.unwrap_or(VERIFICATION_TIMEOUT);
        let trial = self.describe_trial_process(arm, bench, &request, timeout)?;
        let action = RequestedBenchAction::ReportKernelResources {
            gpu_architecture: arch.to_owned(),
            kernel_name_regex: None,
        };
        match by_protocol::send_request_other_than_trial(
            &self.shared_trial_setup(),
            &trial,
            action,
        )? {
            ResponseToBenchAction::Resources(report) => Ok(report),
            _ => Err("it answered something else than it was asked".to_owned()),
        }
    }
}
