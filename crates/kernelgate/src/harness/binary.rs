//! The main function of a bench binary: it reads flags, selects cases and does what the mode asks.

use std::process::ExitCode;

use super::error::{HarnessError, shorten_for_message};
use super::peers::PeerProgramSource;
use super::recording::criterion_results;
use super::running::sampling::{criterion_with_measurement, open_criterion_group};
use super::running::{bench_run, estimate, test_run, trial, trial_run};
use super::selection::backend_choice::BenchPlace;
use super::selection::cases::{CaseSelectionResult, ProblemGroup, SelectionChoice};
use super::selection::filter::CaseFilter;
use super::selection::{cases, names};
use super::settings::args::ProcessMode;
use super::settings::{BenchSettings, process};
use super::{answer, panic_guard};
use crate::backend::BenchTarget;
use crate::exit::ExitReason;
use crate::measure::criterion::ElapsedTimeMethod;
use crate::protocol::{
    self, BenchRequest, BenchResponse, BenchResponseBody, RequestedAction, TimingReportPart,
};
use crate::record::text::printable_on_terminal;
use crate::record::{BaselineStore, Environment, ProcessRun, ShardPartition, TrialRequest, file};
use crate::suite::Suite;
use crate::workload::Effort;
use kernelgate_cuda::compiler::source::KernelFile;
use kernelgate_cuda::observe::range::RangeGuard;
use kernelgate_cuda::spec::ListedKernel;

/// A bench binary's workloads, with their implementations.
///
/// ```no_run
/// # use kernelgate::prelude::*;
/// # struct Double { n: usize }
/// # impl Problem for Double {
/// #     fn inputs(&self, seed: u64) -> Tensors {
/// #         Tensors::new().with("x", [self.n], random::normal_values(seed, "x", self.n))
/// #     }
/// #     fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
/// #         let out: Vec<f64> = inputs.f32("x").iter().map(|&x| 2.0 * f64::from(x)).collect();
/// #         vec![Expected::all("out", [self.n], out)]
/// #     }
/// #     fn work(&self) -> Work { Work::bytes(4 * self.n as u64, 4 * self.n as u64) }
/// #     fn tolerance(&self) -> Tolerance { Tolerance { max_error: 1e-6, relative_l2: 1e-6 } }
/// #     fn host_bytes(&self) -> u64 { 16 * self.n as u64 }
/// # }
/// # const DOUBLE: Workload<Double> = Workload {
/// #     name: "double",
/// #     about: "out = 2 x",
/// #     revision: 1,
/// #     axes: &[Axis::number("n", "elements")],
/// #     default: &["n=1048576"],
/// #     accelerator: &["n=67108864"],
/// #     thorough: &["n=1000,65536"],
/// #     bind: |point| Ok(Double { n: point.number("n")? }),
/// # };
/// # const ROWS: &[Implementation<Double>] = &[Implementation {
/// #     name: "cpu",
/// #     about: "one thread",
/// #     supports: |_| Ok(()),
/// #     prepare: Prepare::Cpu(|problem, inputs| {
/// #         let outputs = Tensors::new().with_output("out", [problem.n], Dtype::F32);
/// #         CpuTask::new(inputs, outputs, |inputs, outputs| {
/// #             let pairs = outputs.f32_mut("out").iter_mut().zip(inputs.f32("x"));
/// #             pairs.for_each(|(out, x)| *out = 2.0 * x);
/// #         })
/// #     }),
/// # }];
/// fn main() -> std::process::ExitCode {
///     Harness::new("double", vec![join_rows(&DOUBLE, ROWS)]).main()
/// }
/// ```
pub struct Harness {
    name: &'static str,
    suites: Vec<Suite>,
    siblings: Vec<Suite>,
    peers: Vec<PeerProgramSource>,
    kernels: Vec<ListedKernel>,
    kernel_files: &'static [KernelFile],
}

impl Harness {
    /// A bench binary called `name` (as in `[[bench]]`), with the workloads it times.
    pub fn new(name: &'static str, suites: impl IntoIterator<Item: Into<Suite>>) -> Self {
        let suites = suites.into_iter().map(Into::into).collect();
        Self {
            name,
            suites,
            siblings: Vec::new(),
            peers: Vec::new(),
            kernels: Vec::new(),
            kernel_files: &[],
        }
    }

    /// Workloads of the package's other bench binaries, so that a filter which matches nothing in
    /// any of them is an error. Without the siblings, a filter without a match is an error only in
    /// a package with one bench.
    pub fn siblings(mut self, siblings: Vec<Suite>) -> Self {
        self.siblings = siblings;
        self
    }

    /// Programs that time other people's kernels for the same problems, for `kernelgate peers`.
    pub fn peers(mut self, peers: Vec<PeerProgramSource>) -> Self {
        self.peers = peers;
        self
    }

    /// CUDA kernels of the bench binary, as [`kernelgate_cuda::spec::list_kernel_rows`] lists rows:
    /// `kernelgate resources` compiles them.
    pub fn kernels(mut self, kernels: Vec<ListedKernel>) -> Self {
        self.kernels = kernels;
        self
    }

    /// Files of its CUDA kernels, from [`kernelgate_cuda::embedded_files!`], for sources made by
    /// [`Source::in_files`](kernelgate_cuda::Source::in_files). If the executable embeds the kernel
    /// files, and not the library with the rows, an edited kernel does not compile that library
    /// anew.
    pub fn kernel_files(mut self, files: &'static [KernelFile]) -> Self {
        self.kernel_files = files;
        self
    }

    /// Runs the binary on the process' arguments.
    pub fn main(self) -> ExitCode {
        protocol::keep_executable_mark();
        let mut settings = match process::process_settings() {
            Ok(settings) => settings,
            Err(exit) => return exit,
        };
        settings.device.options.files = self.kernel_files;
        let outcome = panic_guard::catch_panic(|| self.run(&settings))
            .unwrap_or_else(|panic| Err(HarnessError::Panic(panic)));
        outcome.map_or_else(|error| process::print_failure(&error), Into::into)
    }

    /// Workloads of the package's other bench binaries; they exclude this binary's workloads, which
    /// the list of siblings may contain.
    fn suites_of_other_benches(&self) -> impl Iterator<Item = &Suite> {
        let own = |name| self.suites.iter().any(|suite| suite.name() == name);
        self.siblings.iter().filter(move |suite| !own(suite.name()))
    }

    fn all_suites(&self) -> impl Iterator<Item = &Suite> {
        self.suites.iter().chain(self.suites_of_other_benches())
    }

    fn own_suites(&self) -> impl Iterator<Item = &Suite> {
        self.suites.iter()
    }

    fn run(&self, settings: &BenchSettings) -> Result<ExitReason, HarnessError> {
        names::check_declared_names(self.name, self.all_suites())?;
        let _session = RangeGuard::new(self.name);
        kernelgate_cuda::layout::pad_heap_for_layout(settings.device.options.variant.layout);
        if let ProcessMode::Respond(path) = &settings.mode {
            return self.respond_to_request(settings, file::read(path)?);
        }
        cases::check_axis_overrides(self.all_suites(), &settings.axes)?;
        let place = settings.device.choose_place(self.own_suites())?;
        let divide = |all: &CaseSelectionResult<'_>| partition_by_recorded_times(settings, all);
        let selected = match self.select_in_shard(settings, &place, &settings.filter, divide) {
            // `cargo bench -- FILTER` runs every bench of the package.
            Err(error @ HarnessError::NoMatch { .. })
                if self.siblings.is_empty() && settings.process.has_other_benches =>
            {
                eprintln!("{}: {}", self.name, printable_on_terminal(&error.to_string()));
                None
            }
            selected => selected?,
        };
        let Some(selection) = selected else { return Ok(ExitReason::Fine) };
        let store = BaselineStore::discover();
        let baselines = &settings.baselines;
        if !matches!(settings.mode, ProcessMode::Test | ProcessMode::Profile) {
            for (name, required) in [
                (&baselines.load, true),
                (&baselines.compare, true),
                (&baselines.compare_if_stored, false),
            ] {
                let name = name.as_deref();
                criterion_results::check_stored_baseline(&store, &selection, name, required)?;
            }
        }
        match settings.mode {
            ProcessMode::Test | ProcessMode::Profile => {
                test_run::run_test_mode(settings, &place, &selection, &store)
            }
            ProcessMode::List | ProcessMode::Load => {
                let mut criterion = criterion_with_measurement(
                    &store,
                    settings.effort,
                    ElapsedTimeMethod::default(),
                );
                for group in &selection.groups {
                    let mut criterion_group = open_criterion_group(&mut criterion, group);
                    for case in &group.cases {
                        criterion_group.bench_function(case.criterion_function_name(), |_| {});
                    }
                }
                Ok(ExitReason::Fine)
            }
            _ => {
                let (exit, run) =
                    bench_run::run_bench_cases(self.name, settings, &place, &selection, &store)?;
                self.check_any_case_ran(settings, &place, &run).map(|()| exit)
            }
        }
    }

    /// Carries out the request of the program, and writes the response.
    fn respond_to_request(
        &self,
        settings: &BenchSettings,
        request: BenchRequest,
    ) -> Result<ExitReason, HarnessError> {
        let mut exit = ExitReason::Fine;
        let answer = match request.action {
            RequestedAction::Trial(request) => {
                exit = self.run_trial(settings, *request)?;
                BenchResponseBody::Trial
            }
            action => self
                .answer_request(settings, &action)
                .unwrap_or_else(|error| BenchResponseBody::Refused(error.to_string())),
        };
        let response = BenchResponse { bench: self.name.to_owned(), answer };
        file::write_unsynced(&request.response, &response)?;
        Ok(exit)
    }

    /// Runs the trial that a request describes; does nothing if this binary has none of the
    /// requested cases.
    fn run_trial(
        &self,
        settings: &BenchSettings,
        request: TrialRequest,
    ) -> Result<ExitReason, HarnessError> {
        cases::check_axis_overrides(self.all_suites(), &settings.axes)?;
        let place = settings.device.choose_place(self.own_suites())?;
        let filter = trial::trial_case_filter(&request, settings);
        // Both builds of a comparison divide their cases into equal shards, even if their baselines
        // hold different times. Cases that the request names already belong to one shard.
        let shard = settings.shard.filter(|_| request.cases.is_none());
        let divide = |_: &CaseSelectionResult<'_>| shard.map(ShardPartition::divide_by_hash);
        let Some(mut selection) = self.select_in_shard(settings, &place, &filter, divide)? else {
            return Ok(ExitReason::Fine);
        };
        selection.move_to_front(&request.first);
        let store = BaselineStore::discover();
        trial_run::carry_out_trial(self.name, settings, request, &place, &selection, &store)
    }

    fn answer_request(
        &self,
        settings: &BenchSettings,
        action: &RequestedAction,
    ) -> Result<BenchResponseBody, HarnessError> {
        if let RequestedAction::Resources { arch, filter } = action {
            let filter = CaseFilter::parse(filter.as_deref(), false)?;
            let with_files = |kernel: &ListedKernel| kernel.clone().with_files(self.kernel_files);
            let kernels: Vec<_> = self.kernels.iter().map(with_files).collect();
            return Ok(answer::resources::answer_resources(&kernels, arch, &filter));
        }
        let place = settings.device.choose_place(self.own_suites())?;
        let no_gpu = || BenchResponseBody::Refused(format!("no GPU to time: {}", place.otherwise));
        match action {
            RequestedAction::Peers => {
                return Ok(BenchResponseBody::Peers(
                    self.peers.iter().map(PeerProgramSource::program).collect(),
                ));
            }
            RequestedAction::Environment => {
                let target = settings.device.open(&place)?;
                return Ok(BenchResponseBody::Environment(Box::new(Environment::on(&target))));
            }
            RequestedAction::Timing { part } if *part != Some(TimingReportPart::Cases) => {
                let BenchTarget::Cuda(devices) = settings.device.open(&place)? else {
                    return Ok(no_gpu());
                };
                let report = answer::timing::timing_report(&devices, *part)?;
                return Ok(BenchResponseBody::Timing(Box::new(report)));
            }
            _ => {}
        }
        let selection = match self.select_for_request(settings, &place) {
            Ok(selection) => selection,
            Err(none) => return Ok(*none),
        };
        let seed = settings.seed;
        Ok(match action {
            RequestedAction::Verify { dump } => {
                let target = settings.device.open(&place)?;
                let verified =
                    answer::verify::verify_cases(&selection, seed, target, dump.as_deref());
                BenchResponseBody::Verify(verified)
            }
            RequestedAction::Timing { .. } => match settings.device.open(&place)? {
                BenchTarget::Cuda(devices) => {
                    let report =
                        answer::timing::time_cases_by_events_and_cupti(&selection, seed, &devices)?;
                    BenchResponseBody::Timing(Box::new(report))
                }
                BenchTarget::Cpu => no_gpu(),
            },
            RequestedAction::Profile | RequestedAction::Record(_) => {
                let target = settings.device.open(&place)?;
                answer::profile::profile_cases(&selection, seed, &target, action.recorded())?
            }
            _ => BenchResponseBody::List(answer::list_cases::list_cases(
                self.own_suites(),
                &selection,
                &place,
            )),
        })
    }

    /// The selected cases of a request, or the response if nothing matches.
    fn select_for_request(
        &self,
        settings: &BenchSettings,
        place: &BenchPlace,
    ) -> Result<CaseSelectionResult<'_>, Box<BenchResponseBody>> {
        let nothing =
            |reason: String, close| Box::new(BenchResponseBody::NoMatch { reason, close });
        let refused = |error: HarnessError| nothing(error.to_string(), Vec::new());
        cases::check_axis_overrides(self.all_suites(), &settings.axes).map_err(refused)?;
        let filter = &settings.filter;
        let divide = |all: &CaseSelectionResult<'_>| partition_by_recorded_times(settings, all);
        match (self.select_in_shard(settings, place, filter, divide), filter.text()) {
            (Ok(Some(selection)), _) => Ok(selection),
            (Ok(None), _) => {
                Err(nothing("another bench has what was asked for".to_owned(), Vec::new()))
            }
            (Err(_), Some(text)) => Err(match self.unmatched_axes_error(settings, place) {
                Some(error) => refused(error),
                // The `kernelgate` program merges similar ids of all benches for its suggestion.
                None => nothing(
                    format!("no case matches `{}`", shorten_for_message(text)),
                    cases::closest_ids(filter, &cases::all_case_ids(self.own_suites())),
                ),
            }),
            (Err(error), None) => Err(refused(error)),
        }
    }

    /// The selected cases; `None` if the filter matches only another bench.
    ///
    /// If a filter matches no case of the effort, the whole sweep is tried, because a user who
    /// names a case expects it to run.
    fn select_in_shard(
        &self,
        settings: &BenchSettings,
        place: &BenchPlace,
        filter: &CaseFilter,
        divide: impl FnOnce(&CaseSelectionResult<'_>) -> Option<ShardPartition>,
    ) -> Result<Option<CaseSelectionResult<'_>>, HarnessError> {
        let mut choice = SelectionChoice {
            effort: settings.effort,
            place,
            axes: &settings.axes,
            filter,
            part: None,
        };
        let mut selection = choice.select_suites(self.own_suites())?;
        if selection.matched_nothing() && choice.effort < Effort::Thorough {
            choice.effort = Effort::Thorough;
            selection = choice.select_suites(self.own_suites())?;
            if !selection.matched_nothing() && settings.mode != ProcessMode::List {
                eprintln!(
                    "{}: not among the default cases; {} of the whole sweep match",
                    self.name,
                    selection.case_count()
                );
            }
        }
        if !selection.matched_nothing() {
            if let Some(partition) = divide(&selection) {
                let plan = selection.plan(self.name, &partition);
                let shard = partition.shard;
                selection = SelectionChoice { part: Some(&partition), ..choice }
                    .select_suites(self.own_suites())?;
                // A bench run prints its shard in the first line of its output, and its record
                // holds the shard.
                if settings.mode != ProcessMode::Bench {
                    let (part, all) = (selection.case_count(), plan.cases);
                    eprintln!("{}: shard {shard}: {part} of {all} cases", self.name);
                }
                if shard.count as usize > plan.problems {
                    eprintln!(
                        "{}: {} shards for {} problems: some shards have no case",
                        self.name, shard.count, plan.problems
                    );
                }
                selection.plan = Some(plan);
            }
            if settings.reversed {
                selection.reverse_cases();
            }
            return Ok(Some(selection));
        }
        let elsewhere = self.select_in_other_benches(settings, place, filter);
        if elsewhere.is_ok_and(|elsewhere| !elsewhere.matched_nothing()) {
            return Ok(None);
        }
        match filter.text() {
            Some(_) => Err(self
                .unmatched_axes_error(settings, place)
                .unwrap_or_else(|| cases::unmatched_filter_error(filter, self.all_suites()))),
            None if !settings.axes.is_empty() && !matches!(filter, CaseFilter::None) => {
                Err(cases::unmatched_axis_error(self.own_suites(), &settings.axes))
            }
            None => Ok(None),
        }
    }

    /// Reason why no case of any filter has the requested axis values; `None` if a case has them.
    fn unmatched_axes_error(
        &self,
        settings: &BenchSettings,
        place: &BenchPlace,
    ) -> Option<HarnessError> {
        let axes = &settings.axes;
        if axes.is_empty() {
            return None;
        }
        let filter = &CaseFilter::All;
        let choice = SelectionChoice { effort: Effort::Thorough, place, axes, filter, part: None };
        match choice.select_suites(self.own_suites()) {
            Err(error) => Some(error),
            Ok(selection) => selection
                .matched_nothing()
                .then(|| cases::unmatched_axis_error(self.own_suites(), axes)),
        }
    }

    /// Refuses a run without any result if the user named cases that only this binary has.
    fn check_any_case_ran(
        &self,
        settings: &BenchSettings,
        place: &BenchPlace,
        run: &ProcessRun,
    ) -> Result<(), HarnessError> {
        let named = settings.filter.text().is_some() || !settings.axes.is_empty();
        // A shard does not fail if it has no case, because another shard may have it; nor does a
        // run with a budget, which may end before its first case.
        let in_part = settings.shard.is_some() || settings.budget.is_some();
        if !named
            || in_part
            || !run.cases.is_empty()
            || !run.failed.is_empty()
            || self.select_in_other_benches(settings, place, &settings.filter)?.case_count() > 0
        {
            return Ok(());
        }
        let first = run.skipped.first_key_value();
        let (case, reason) =
            first.map(|(id, reason)| (id.clone(), reason.clone())).unwrap_or_default();
        Err(HarnessError::NothingRuns { case, reason })
    }

    /// Returns the cases of the package's other bench binaries that match.
    fn select_in_other_benches(
        &self,
        settings: &BenchSettings,
        place: &BenchPlace,
        filter: &CaseFilter,
    ) -> Result<CaseSelectionResult<'_>, HarnessError> {
        let axes = &settings.axes;
        let choice = SelectionChoice { effort: Effort::Thorough, place, axes, filter, part: None };
        choice.select_suites(self.suites_of_other_benches())
    }
}

/// The partition of a process that is to measure a shard.
fn partition_by_recorded_times(
    settings: &BenchSettings,
    all: &CaseSelectionResult<'_>,
) -> Option<ShardPartition> {
    let shard = settings.shard?;
    let problems: Vec<String> = all.groups.iter().map(ProblemGroup::id).collect();
    let times = estimate::recorded_problem_times(&BaselineStore::discover());
    Some(ShardPartition::divide_by_time(shard, problems.iter().map(String::as_str), &times))
}

#[cfg(test)]
mod tests {
    use super::super::selection::sample::{own_suites, suites_of_all_binaries};
    use super::*;
    use crate::backend::BackendKind;

    #[test]
    fn suggestions_for_a_mistyped_filter_name_each_workload_once() {
        let harness = Harness::new("spike", own_suites()).siblings(suites_of_all_binaries());
        assert_eq!(harness.all_suites().count(), suites_of_all_binaries().len());
        let filter = CaseFilter::parse(Some("atention/sofmax"), false).unwrap();
        let error = cases::unmatched_filter_error(&filter, harness.all_suites());
        let HarnessError::NoMatch { suggestions, .. } = error else { panic!("{error:?}") };
        assert_eq!(suggestions[0], "attention/softmax");
    }

    #[test]
    fn an_invalid_declared_name_is_refused_before_any_other_error() {
        let refused = |name, line: &str| {
            let settings = BenchSettings::parse(line).unwrap();
            let error = Harness::new(name, own_suites()).run(&settings).unwrap_err();
            assert!(matches!(error, HarnessError::Name { .. }), "{error:?}");
        };
        for line in ["--list", "--bench", "--test no_such_case"] {
            refused("st\nbif", line);
        }
        refused("../st_bif", "--list");
    }

    #[test]
    fn accepts_filters_for_sibling_binaries_and_rejects_unknown_ones() {
        let harness = Harness::new("spike", own_suites()).siblings(suites_of_all_binaries());
        let place = BenchPlace {
            kind: BackendKind::Cpu,
            otherwise: "elsewhere".to_owned(),
            l2_bytes: 0,
            gpus: 1,
        };
        let select = |arguments: &[&str]| {
            let settings = BenchSettings::parse(&arguments.join(" "))?;
            let selected =
                harness.select_in_shard(&settings, &place, &settings.filter, |_| None)?;
            Ok::<_, HarnessError>(selected.map(|selection| selection.case_count()))
        };
        assert_eq!(select(&["attention/softmax"]).unwrap(), None);
        assert_eq!(select(&["--axis", "d=64"]).unwrap(), None);
        assert_eq!(select(&["--axis", "n=7", "--axis", "t=4", "forward"]).unwrap(), Some(1));
        let no_combination = |error| match error {
            HarnessError::NoCombination { axes } => assert_eq!(axes, ["n=7", "d=64"]),
            other => panic!("{other:?}"),
        };
        no_combination(select(&["--axis", "n=7", "--axis", "d=64"]).unwrap_err());
        assert!(select(&["spike/sideways"]).is_err());
        // The error names the unmatched axes and not the filter.
        for filter in ["forward", "spike/sideways"] {
            no_combination(select(&["--axis", "n=7", "--axis", "d=64", filter]).unwrap_err());
        }
        let error = select(&["--axis", "n=7", "spike/sideways"]).unwrap_err();
        let is_filter = |filter: &str| filter == "spike/sideways";
        assert!(matches!(error, HarnessError::NoMatch { filter, .. } if is_filter(&filter)));
    }
}
