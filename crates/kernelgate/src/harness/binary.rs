//! The main function of a bench executable: it parses flags, selects cases, and does what the mode
//! requires.

use std::process::ExitCode;

use super::error::{HarnessError, shorten_for_message};
use super::peers::EmbeddedPeerProgram;
use super::recording::criterion_results;
use super::running::sampling::{
    criterion_with_kernelgate_measurement, open_criterion_group_of_problem,
};
use super::running::{bench_run, estimate, test_run, trial, trial_run};
use super::selection::backend_choice::ChosenBackend;
use super::selection::cases::{CaseSelectionCriteria, SelectedAndSkippedCases, SelectedProblem};
use super::selection::filter::CaseIdFilter;
use super::selection::{cases, names};
use super::settings::args::BenchProcessTask;
use super::settings::{BenchSettings, process};
use super::{answer, panic_guard};
use crate::backend::BenchDevices;
use crate::exit::ProcessExitReason;
use crate::measure::criterion::ElapsedTimeMeasurement;
use crate::protocol::{
    self, BenchRequestFile, BenchResponseFile, RequestedBenchAction, ResponseToBenchAction,
    TimingAccuracyReportPart,
};
use crate::record::text::clean_message_for_terminal;
use crate::record::{
    BenchProcessRun, ProblemsDividedAmongShards, RecordFoldersOfPackage, RunEnvironment,
    TrialRequestToBench, file,
};
use crate::suite::WorkloadSuite;
use crate::workload::BenchEffort;
use kernelgate_cuda::compiler::source::NamedKernelFile;
use kernelgate_cuda::observe::range::NamedRangeGuard;
use kernelgate_cuda::spec::ListedKernelBuild;

/// The workloads and implementations of a bench executable.
///
/// ```no_run
/// # use kernelgate::prelude::*;
/// # struct Double { n: usize }
/// # impl Problem for Double {
/// #     fn inputs(&self, seed: u64) -> Tensors {
/// #         Tensors::new().with_tensor("x", [self.n], random::normal_values(seed, "x", self.n))
/// #     }
/// #     fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
/// #         let out: Vec<f64> = inputs.f32_elements("x").iter().map(|&x| 2.0 * f64::from(x)).collect();
/// #         vec![Expected::all("out", [self.n], out)]
/// #     }
/// #     fn work(&self) -> Work { Work::bytes(4 * self.n as u64, 4 * self.n as u64) }
/// #     fn tolerance(&self) -> Tolerance { Tolerance { max_error: 1e-6, relative_l2: 1e-6 } }
/// #     fn host_memory_bytes(&self) -> u64 { 16 * self.n as u64 }
/// # }
/// # const DOUBLE: Workload<Double> = Workload {
/// #     name: "double",
/// #     about: "out = 2 x",
/// #     revision: 1,
/// #     axes: &[Axis::number("n", "elements")],
/// #     default_selection_lines: &["n=1048576"],
/// #     accelerator_selection_lines: &["n=67108864"],
/// #     thorough_selection_lines: &["n=1000,65536"],
/// #     bind: |point| Ok(Double { n: point.number("n")? }),
/// # };
/// # const ROWS: &[Implementation<Double>] = &[Implementation {
/// #     implementation_name: "cpu",
/// #     description: "one thread",
/// #     supports: |_| Ok(()),
/// #     prepare: PrepareFunction::Cpu(|problem, inputs| {
/// #         let outputs = Tensors::new().with_output("out", [problem.n], Dtype::F32);
/// #         CpuTask::new(inputs, outputs, |inputs, outputs| {
/// #             let pairs = outputs.f32_mut("out").iter_mut().zip(inputs.f32_elements("x"));
/// #             pairs.for_each(|(out, x)| *out = 2.0 * x);
/// #         })
/// #     }),
/// # }];
/// fn main() -> std::process::ExitCode {
///     Harness::new("double", vec![join_workload_with_implementations(&DOUBLE, ROWS)]).main()
/// }
/// ```
pub struct Harness {
    bench_name: &'static str,
    suites: Vec<WorkloadSuite>,
    suites_of_sibling_benches: Vec<WorkloadSuite>,
    peers: Vec<EmbeddedPeerProgram>,
    kernels: Vec<ListedKernelBuild>,
    kernel_files: &'static [NamedKernelFile],
}

impl Harness {
    /// Creates a bench executable with the name of its `[[bench]]` target and the workloads that it
    /// times.
    pub fn new(name: &'static str, suites: impl IntoIterator<Item: Into<WorkloadSuite>>) -> Self {
        let suites = suites.into_iter().map(Into::into).collect();
        Self {
            bench_name: name,
            suites,
            suites_of_sibling_benches: Vec::new(),
            peers: Vec::new(),
            kernels: Vec::new(),
            kernel_files: &[],
        }
    }

    /// Sets the workloads of the package's other bench executables, so that a filter that matches
    /// no case in any of them is an error. Without siblings, a filter that matches no case is an
    /// error only in a package with a single bench.
    pub fn suites_of_sibling_benches(mut self, siblings: Vec<WorkloadSuite>) -> Self {
        self.suites_of_sibling_benches = siblings;
        self
    }

    /// Sets the peer programs, which time kernels of other projects for the same problems, for
    /// `kernelgate peers`.
    pub fn peers(mut self, peers: Vec<EmbeddedPeerProgram>) -> Self {
        self.peers = peers;
        self
    }

    /// Sets the CUDA kernels of the bench executable, as listed by
    /// [`kernelgate_cuda::spec::list_kernel_rows`]: `kernelgate resources` compiles them.
    pub fn kernels(mut self, kernels: Vec<ListedKernelBuild>) -> Self {
        self.kernels = kernels;
        self
    }

    /// Sets the embedded source files of the CUDA kernels, from
    /// [`kernelgate_cuda::embedded_files!`], for sources made by
    /// [`Source::from_package_files`](kernelgate_cuda::Source::from_package_files). If the bench
    /// executable embeds the kernel files instead of the library with the rows, editing a kernel
    /// does not recompile the library.
    pub fn kernel_files(mut self, files: &'static [NamedKernelFile]) -> Self {
        self.kernel_files = files;
        self
    }

    /// Runs the bench executable with the arguments of the process, and returns the exit code.
    pub fn main(self) -> ExitCode {
        protocol::keep_bench_mark_in_executable();
        let mut settings = match process::settings_of_this_process_or_restart() {
            Ok(settings) => settings,
            Err(exit) => return exit,
        };
        settings.requested_backend_and_gpus.options.embedded_kernel_files = self.kernel_files;
        let outcome = panic_guard::catch_panic(|| self.run_requested_mode(&settings))
            .unwrap_or_else(|panic| Err(HarnessError::Panic(panic)));
        outcome.map_or_else(|error| process::print_error_and_return_exit_code(&error), Into::into)
    }

    /// Workloads of the package's other bench executables, without this executable's workloads,
    /// which the siblings may include.
    fn suites_of_other_benches(&self) -> impl Iterator<Item = &WorkloadSuite> {
        let own = |name| self.suites.iter().any(|suite| suite.workload_name() == name);
        self.suites_of_sibling_benches.iter().filter(move |suite| !own(suite.workload_name()))
    }

    fn suites_of_all_benches(&self) -> impl Iterator<Item = &WorkloadSuite> {
        self.suites.iter().chain(self.suites_of_other_benches())
    }

    fn suites_of_this_bench(&self) -> impl Iterator<Item = &WorkloadSuite> {
        self.suites.iter()
    }

    fn run_requested_mode(
        &self,
        settings: &BenchSettings,
    ) -> Result<ProcessExitReason, HarnessError> {
        names::check_names_of_bench_and_workloads(self.bench_name, self.suites_of_all_benches())?;
        let _session = NamedRangeGuard::open_named_range(self.bench_name);
        kernelgate_cuda::layout::pad_host_heap_for_layout(
            settings.requested_backend_and_gpus.options.variant.layout_number,
        );
        if let BenchProcessTask::RespondToRequestFile(path) = &settings.mode {
            return self.carry_out_request_and_write_response(settings, file::read_record(path)?);
        }
        cases::check_overrides_are_accepted_by_a_workload(
            self.suites_of_all_benches(),
            &settings.axes,
        )?;
        let place =
            settings.requested_backend_and_gpus.choose_backend(self.suites_of_this_bench())?;
        let divide =
            |all: &SelectedAndSkippedCases<'_>| divide_into_shards_by_recorded_times(settings, all);
        let selected = match self.select_cases_in_shard(settings, &place, &settings.filter, divide)
        {
            // `cargo bench -- FILTER` runs every bench of the package, so a bench without a
            // matching case ends without an error.
            Err(error @ HarnessError::FilterMatchesNoCase { .. })
                if self.suites_of_sibling_benches.is_empty()
                    && settings.process.has_other_benches =>
            {
                eprintln!(
                    "{}: {}",
                    self.bench_name,
                    clean_message_for_terminal(&error.to_string())
                );
                None
            }
            selected => selected?,
        };
        let Some(selection) = selected else { return Ok(ProcessExitReason::Success) };
        let store = RecordFoldersOfPackage::record_folders_of_running_package();
        let baselines = &settings.baselines;
        if !matches!(settings.mode, BenchProcessTask::TestCases | BenchProcessTask::ProfileCases) {
            for (name, required) in [
                (&baselines.name_of_shown_results, true),
                (&baselines.compared_baseline, true),
                (&baselines.compared_baseline_if_stored, false),
            ] {
                let name = name.as_deref();
                criterion_results::check_stored_criterion_baseline(
                    &store, &selection, name, required,
                )?;
            }
        }
        match settings.mode {
            BenchProcessTask::TestCases | BenchProcessTask::ProfileCases => {
                test_run::run_test_or_profile_mode(settings, &place, &selection, &store)
            }
            BenchProcessTask::ListCases | BenchProcessTask::ShowStoredResults => {
                let mut criterion = criterion_with_kernelgate_measurement(
                    &store,
                    settings.effort,
                    ElapsedTimeMeasurement::default(),
                );
                for group in &selection.problems_with_cases {
                    let mut criterion_group =
                        open_criterion_group_of_problem(&mut criterion, group);
                    for case in &group.cases {
                        criterion_group.bench_function(case.criterion_function_name(), |_| {});
                    }
                }
                Ok(ProcessExitReason::Success)
            }
            _ => {
                let (exit, run) = bench_run::verify_time_and_record_selected_cases(
                    self.bench_name,
                    settings,
                    &place,
                    &selection,
                    &store,
                )?;
                self.check_that_a_named_case_ran(settings, &place, &run).map(|()| exit)
            }
        }
    }

    /// Carries out the request of the program `kernelgate`, and writes the response to a file.
    fn carry_out_request_and_write_response(
        &self,
        settings: &BenchSettings,
        request: BenchRequestFile,
    ) -> Result<ProcessExitReason, HarnessError> {
        let mut exit = ProcessExitReason::Success;
        let answer = match request.action {
            RequestedBenchAction::RunTrial(request) => {
                exit = self.run_requested_trial(settings, *request)?;
                ResponseToBenchAction::TrialEnded
            }
            action => self
                .answer_for_action(settings, &action)
                .unwrap_or_else(|error| ResponseToBenchAction::ActionImpossible(error.to_string())),
        };
        let response = BenchResponseFile { bench_name: self.bench_name.to_owned(), answer };
        file::write_record_without_sync(&request.response_path, &response)?;
        Ok(exit)
    }

    /// Runs the trial that a request describes; does nothing if this bench has none of the
    /// requested cases.
    fn run_requested_trial(
        &self,
        settings: &BenchSettings,
        request: TrialRequestToBench,
    ) -> Result<ProcessExitReason, HarnessError> {
        cases::check_overrides_are_accepted_by_a_workload(
            self.suites_of_all_benches(),
            &settings.axes,
        )?;
        let place =
            settings.requested_backend_and_gpus.choose_backend(self.suites_of_this_bench())?;
        let filter = trial::case_filter_of_trial_request(&request, settings);
        // Base and head of a comparison divide their cases into equal shards by hash, even if their
        // baselines contain different times. If the request names cases, they already belong to one
        // shard.
        let shard = settings.shard.filter(|_| request.case_ids_to_run.is_none());
        let divide = |_: &SelectedAndSkippedCases<'_>| {
            shard.map(ProblemsDividedAmongShards::by_hash_of_problem_ids)
        };
        let Some(mut selection) = self.select_cases_in_shard(settings, &place, &filter, divide)?
        else {
            return Ok(ProcessExitReason::Success);
        };
        selection.move_cases_to_front(&request.case_ids_to_run_first);
        let store = RecordFoldersOfPackage::record_folders_of_running_package();
        trial_run::run_trial_and_write_record(
            self.bench_name,
            settings,
            request,
            &place,
            &selection,
            &store,
        )
    }

    fn answer_for_action(
        &self,
        settings: &BenchSettings,
        action: &RequestedBenchAction,
    ) -> Result<ResponseToBenchAction, HarnessError> {
        use RequestedBenchAction::ReportKernelResources as ReportResources;
        if let ReportResources { gpu_architecture: arch, kernel_name_regex: filter } = action {
            let filter = CaseIdFilter::parse_exact_id_or_regex(filter.as_deref(), false)?;
            let with_files =
                |kernel: &ListedKernelBuild| kernel.clone().with_embedded_files(self.kernel_files);
            let kernels: Vec<_> = self.kernels.iter().map(with_files).collect();
            return Ok(answer::resources::compile_and_report_resources(&kernels, arch, &filter));
        }
        let backend = &settings.requested_backend_and_gpus;
        let place = backend.choose_backend(self.suites_of_this_bench())?;
        let no_gpu = || {
            let reason = &place.reason_against_other_backend;
            ResponseToBenchAction::ActionImpossible(format!("no GPU to time: {reason}"))
        };
        match action {
            RequestedBenchAction::ReturnPeerPrograms => {
                return Ok(ResponseToBenchAction::Peers(
                    self.peers.iter().map(EmbeddedPeerProgram::peer_program_response).collect(),
                ));
            }
            RequestedBenchAction::ReportEnvironment => {
                let target = backend.open_target(&place)?;
                let environment = RunEnvironment::environment_of_target(&target);
                return Ok(ResponseToBenchAction::Environment(Box::new(environment)));
            }
            RequestedBenchAction::MeasureTimingAccuracy { part }
                if *part != Some(TimingAccuracyReportPart::CasesAgainstCupti) =>
            {
                let BenchDevices::Cuda(devices) = backend.open_target(&place)? else {
                    return Ok(no_gpu());
                };
                let report = answer::timing::measure_timing_accuracy_report(&devices, *part)?;
                return Ok(ResponseToBenchAction::Timing(Box::new(report)));
            }
            _ => {}
        }
        let selection = match self.select_cases_for_request(settings, &place) {
            Ok(selection) => selection,
            Err(none) => return Ok(*none),
        };
        let seed = settings.input_seed;
        Ok(match action {
            RequestedBenchAction::VerifyCases { dump_folder: dump } => {
                let target = backend.open_target(&place)?;
                let verified = answer::verify::verify_one_case_per_implementation(
                    &selection,
                    seed,
                    target,
                    dump.as_deref(),
                );
                ResponseToBenchAction::Verify(verified)
            }
            RequestedBenchAction::MeasureTimingAccuracy { .. } => match backend
                .open_target(&place)?
            {
                BenchDevices::Cuda(devices) => {
                    let report =
                        answer::timing::time_cases_by_events_and_cupti(&selection, seed, &devices)?;
                    ResponseToBenchAction::Timing(Box::new(report))
                }
                BenchDevices::Cpu => no_gpu(),
            },
            RequestedBenchAction::ProfileCases | RequestedBenchAction::RecordCuptiActivity(_) => {
                let target = backend.open_target(&place)?;
                answer::profile::profile_one_case_per_implementation(
                    &selection,
                    seed,
                    &target,
                    action.launches_to_record(),
                )?
            }
            _ => {
                ResponseToBenchAction::List(answer::list_cases::list_workloads_and_selected_cases(
                    self.suites_of_this_bench(),
                    &selection,
                    &place,
                ))
            }
        })
    }

    /// Selects the cases of a request, or returns the response that nothing matches.
    fn select_cases_for_request(
        &self,
        settings: &BenchSettings,
        place: &ChosenBackend,
    ) -> Result<SelectedAndSkippedCases<'_>, Box<ResponseToBenchAction>> {
        let nothing = |reason: String, close| {
            Box::new(ResponseToBenchAction::NoMatchingCase {
                no_match_reason: reason,
                similar_case_ids: close,
            })
        };
        let refused = |error: HarnessError| nothing(error.to_string(), Vec::new());
        cases::check_overrides_are_accepted_by_a_workload(
            self.suites_of_all_benches(),
            &settings.axes,
        )
        .map_err(refused)?;
        let filter = &settings.filter;
        let divide =
            |all: &SelectedAndSkippedCases<'_>| divide_into_shards_by_recorded_times(settings, all);
        match (
            self.select_cases_in_shard(settings, place, filter, divide),
            filter.user_filter_text(),
        ) {
            (Ok(Some(selection)), _) => Ok(selection),
            (Ok(None), _) => {
                Err(nothing("another bench has what was asked for".to_owned(), Vec::new()))
            }
            (Err(_), Some(text)) => Err(match self.unmatched_axis_values_error(settings, place) {
                Some(error) => refused(error),
                // The program `kernelgate` merges similar ids from all benches and suggests them.
                None => nothing(
                    format!("no case matches `{}`", shorten_for_message(text)),
                    cases::case_ids_similar_to_filter(
                        filter,
                        &cases::case_ids_of_all_efforts(self.suites_of_this_bench()),
                    ),
                ),
            }),
            (Err(error), None) => Err(refused(error)),
        }
    }

    /// Selects the cases of this process's shard; `None` if the filter matches only cases of
    /// another bench.
    ///
    /// If the filter matches no case of the chosen effort, the thorough sweep is searched, because
    /// a user who names a case expects it to run.
    fn select_cases_in_shard(
        &self,
        settings: &BenchSettings,
        place: &ChosenBackend,
        filter: &CaseIdFilter,
        divide: impl FnOnce(&SelectedAndSkippedCases<'_>) -> Option<ProblemsDividedAmongShards>,
    ) -> Result<Option<SelectedAndSkippedCases<'_>>, HarnessError> {
        let mut choice = CaseSelectionCriteria {
            effort: settings.effort,
            chosen_backend: place,
            axes: &settings.axes,
            filter,
            division_among_shards: None,
        };
        let mut selection = choice.select_cases_of_suites(self.suites_of_this_bench())?;
        if selection.is_without_any_case() && choice.effort < BenchEffort::Thorough {
            choice.effort = BenchEffort::Thorough;
            selection = choice.select_cases_of_suites(self.suites_of_this_bench())?;
            if !selection.is_without_any_case() && settings.mode != BenchProcessTask::ListCases {
                eprintln!(
                    "{}: not among the default cases; {} of the whole sweep match",
                    self.bench_name,
                    selection.runnable_case_count()
                );
            }
        }
        if !selection.is_without_any_case() {
            if let Some(partition) = divide(&selection) {
                let plan = selection.summarize_shard_division(self.bench_name, &partition);
                let shard = partition.shard;
                selection =
                    CaseSelectionCriteria { division_among_shards: Some(&partition), ..choice }
                        .select_cases_of_suites(self.suites_of_this_bench())?;
                // A bench run prints its shard in the first line of its output, and its record
                // contains the shard.
                if settings.mode != BenchProcessTask::TimeCases {
                    let (part, all) = (selection.runnable_case_count(), plan.case_count);
                    eprintln!("{}: shard {shard}: {part} of {all} cases", self.bench_name);
                }
                if shard.shard_count as usize > plan.problem_count {
                    eprintln!(
                        "{}: {} shards for {} problems: some shards have no case",
                        self.bench_name, shard.shard_count, plan.problem_count
                    );
                }
                selection.division_among_shards = Some(plan);
            }
            if settings.reverses_case_order {
                selection.reverse_cases();
            }
            return Ok(Some(selection));
        }
        let elsewhere = self.select_cases_in_other_benches(settings, place, filter);
        if elsewhere.is_ok_and(|elsewhere| !elsewhere.is_without_any_case()) {
            return Ok(None);
        }
        match filter.user_filter_text() {
            Some(_) => {
                Err(self.unmatched_axis_values_error(settings, place).unwrap_or_else(|| {
                    cases::filter_matches_nothing_error(filter, self.suites_of_all_benches())
                }))
            }
            None if !settings.axes.is_empty() && !matches!(filter, CaseIdFilter::NoCase) => {
                Err(cases::overridden_axis_values_match_nothing_error(
                    self.suites_of_this_bench(),
                    &settings.axes,
                ))
            }
            None => Ok(None),
        }
    }

    /// The error that no case has the requested axis values; `None` if a case has them.
    fn unmatched_axis_values_error(
        &self,
        settings: &BenchSettings,
        place: &ChosenBackend,
    ) -> Option<HarnessError> {
        let axes = &settings.axes;
        if axes.is_empty() {
            return None;
        }
        let filter = &CaseIdFilter::AllCases;
        let choice = CaseSelectionCriteria {
            effort: BenchEffort::Thorough,
            chosen_backend: place,
            axes,
            filter,
            division_among_shards: None,
        };
        match choice.select_cases_of_suites(self.suites_of_this_bench()) {
            Err(error) => Some(error),
            Ok(selection) => selection.is_without_any_case().then(|| {
                cases::overridden_axis_values_match_nothing_error(self.suites_of_this_bench(), axes)
            }),
        }
    }

    /// Fails if no case ran although the user named cases that only this bench has.
    fn check_that_a_named_case_ran(
        &self,
        settings: &BenchSettings,
        place: &ChosenBackend,
        run: &BenchProcessRun,
    ) -> Result<(), HarnessError> {
        let named = settings.filter.user_filter_text().is_some() || !settings.axes.is_empty();
        // A shard without cases does not fail, because another shard may have them; nor does a run
        // with a time budget, which may end before the first case.
        let in_part = settings.shard.is_some() || settings.time_budget.is_some();
        if !named
            || in_part
            || !run.cases.is_empty()
            || !run.failed.is_empty()
            || self
                .select_cases_in_other_benches(settings, place, &settings.filter)?
                .runnable_case_count()
                > 0
        {
            return Ok(());
        }
        let first = run.skipped.first_key_value();
        let (case, reason) =
            first.map(|(id, reason)| (id.clone(), reason.clone())).unwrap_or_default();
        Err(HarnessError::NoNamedCaseCanRun { first_case_id: case, skip_reason: reason })
    }

    /// Selects the matching cases of the package's other bench executables.
    fn select_cases_in_other_benches(
        &self,
        settings: &BenchSettings,
        place: &ChosenBackend,
        filter: &CaseIdFilter,
    ) -> Result<SelectedAndSkippedCases<'_>, HarnessError> {
        let axes = &settings.axes;
        let choice = CaseSelectionCriteria {
            effort: BenchEffort::Thorough,
            chosen_backend: place,
            axes,
            filter,
            division_among_shards: None,
        };
        choice.select_cases_of_suites(self.suites_of_other_benches())
    }
}

/// Divides the selected cases into shards, if this process must run one shard.
fn divide_into_shards_by_recorded_times(
    settings: &BenchSettings,
    all: &SelectedAndSkippedCases<'_>,
) -> Option<ProblemsDividedAmongShards> {
    let shard = settings.shard?;
    let problems: Vec<String> =
        all.problems_with_cases.iter().map(SelectedProblem::workload_and_problem_id).collect();
    let times = estimate::median_seconds_per_problem_from_baselines(
        &RecordFoldersOfPackage::record_folders_of_running_package(),
    );
    Some(ProblemsDividedAmongShards::divide_by_recorded_times(
        shard,
        problems.iter().map(String::as_str),
        &times,
    ))
}

#[cfg(test)]
mod tests {
    use super::super::selection::sample::{
        suites_of_both_test_benches, suites_of_first_test_bench,
    };
    use super::*;
    use crate::backend::BackendKind;

    #[test]
    fn a_mistyped_filter_suggests_each_workload_once() {
        let harness = Harness::new("spike", suites_of_first_test_bench())
            .suites_of_sibling_benches(suites_of_both_test_benches());
        assert_eq!(harness.suites_of_all_benches().count(), suites_of_both_test_benches().len());
        let filter = CaseIdFilter::parse_exact_id_or_regex(Some("atention/sofmax"), false).unwrap();
        let error = cases::filter_matches_nothing_error(&filter, harness.suites_of_all_benches());
        let HarnessError::FilterMatchesNoCase { similar_case_ids: suggestions, .. } = error else {
            panic!("{error:?}")
        };
        assert_eq!(suggestions[0], "attention/softmax");
    }

    #[test]
    fn invalid_declared_names_are_reported_first() {
        let refused = |name, line: &str| {
            let settings = BenchSettings::parse_command_line(line).unwrap();
            let error = Harness::new(name, suites_of_first_test_bench())
                .run_requested_mode(&settings)
                .unwrap_err();
            assert!(matches!(error, HarnessError::InvalidDeclaredName { .. }), "{error:?}");
        };
        for line in ["--list", "--bench", "--test no_such_case"] {
            refused("st\nbif", line);
        }
        refused("../st_bif", "--list");
    }

    #[test]
    fn a_filter_may_match_a_sibling_bench_but_not_nothing() {
        let harness = Harness::new("spike", suites_of_first_test_bench())
            .suites_of_sibling_benches(suites_of_both_test_benches());
        let place = ChosenBackend {
            kind: BackendKind::Cpu,
            reason_against_other_backend: "elsewhere".to_owned(),
            l2_bytes: 0,
            gpu_count: 1,
        };
        let select = |arguments: &[&str]| {
            let settings = BenchSettings::parse_command_line(&arguments.join(" "))?;
            let selected =
                harness.select_cases_in_shard(&settings, &place, &settings.filter, |_| None)?;
            Ok::<_, HarnessError>(selected.map(|selection| selection.runnable_case_count()))
        };
        assert_eq!(select(&["attention/softmax"]).unwrap(), None);
        assert_eq!(select(&["--axis", "d=64"]).unwrap(), None);
        assert_eq!(select(&["--axis", "n=7", "--axis", "t=4", "forward"]).unwrap(), Some(1));
        let no_combination = |error| match error {
            HarnessError::NoCaseWithAxisValues { axis_assignments: axes } => {
                assert_eq!(axes, ["n=7", "d=64"])
            }
            other => panic!("{other:?}"),
        };
        no_combination(select(&["--axis", "n=7", "--axis", "d=64"]).unwrap_err());
        assert!(select(&["spike/sideways"]).is_err());
        // The error names the axes that match no case, not the filter.
        for filter in ["forward", "spike/sideways"] {
            no_combination(select(&["--axis", "n=7", "--axis", "d=64", filter]).unwrap_err());
        }
        let error = select(&["--axis", "n=7", "spike/sideways"]).unwrap_err();
        let is_filter = |filter: &str| filter == "spike/sideways";
        assert!(
            matches!(error, HarnessError::FilterMatchesNoCase { case_filter, .. } if is_filter(&case_filter))
        );
    }
}
