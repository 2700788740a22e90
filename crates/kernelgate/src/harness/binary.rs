//! The bench binary: flags, selection, and what each mode does with it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use super::error::HarnessError;
use super::peers::Peers;
use super::recording::stored;
use super::running::deadline::Deadline;
use super::running::execution::{Execution, Timer, new_criterion, open_group, run_cases};
use super::running::progress::BenchProgress;
use super::running::{bench_run, terse, trial, trial_run};
use super::selection::cases::Selection;
use super::selection::filter::Filter;
use super::selection::place::{BackendName, Place};
use super::selection::{cases, names};
use super::settings::args::{Flags, Mode};
use super::settings::{args, own_flags, variables};
use super::{answer, guard};
use crate::backend::Target;
use crate::exit::Exit;
use crate::measure::criterion::Elapsed;
use crate::protocol::{self, Action, Part, Request, Response, ResponseBody};
use crate::record::text::printable;
use crate::record::{Environment, ProcessRun, Shard, Store, TrialRequest, file, trial_request};
use crate::suite::Suite;
use crate::workload::Effort;
use kernelgate_cuda::observe::range::Range;
use kernelgate_cuda::spec::ListedKernel;

/// A bench binary's workloads.
pub struct Harness {
    name: &'static str,
    suites: Vec<Box<dyn Suite>>,
    siblings: Vec<Box<dyn Suite>>,
    peers: &'static [Peers],
    kernels: Vec<ListedKernel>,
}

impl Harness {
    /// A bench binary called `name` (as in `[[bench]]`), with the workloads it times.
    pub fn new(name: &'static str, suites: Vec<Box<dyn Suite>>) -> Self {
        Self { name, suites, siblings: Vec::new(), peers: &[], kernels: Vec::new() }
    }

    /// Workloads of the package's other bench binaries: `cargo bench -- FILTER` runs every binary,
    /// and a filter for another one's cases is then no mistake in this one.
    pub fn siblings(mut self, siblings: Vec<Box<dyn Suite>>) -> Self {
        self.siblings = siblings;
        self
    }

    /// Programs that time other people's kernels for the same problems, for `kernelgate peers`.
    pub fn peers(mut self, peers: &'static [Peers]) -> Self {
        self.peers = peers;
        self
    }

    /// Its CUDA kernels, as [`kernelgate_cuda::spec::list`] lists rows: what `kernelgate resources`
    /// compiles.
    pub fn kernels(mut self, kernels: Vec<ListedKernel>) -> Self {
        self.kernels = kernels;
        self
    }

    /// Runs the binary on the process' arguments.
    pub fn main(self) -> ExitCode {
        trial_request::leave_mark();
        if std::env::var_os(protocol::VARIABLE).is_some_and(|value| value == protocol::QUESTION) {
            println!("{}\n{}", protocol::answer(), trial_request::answer());
            return Exit::Fine.into();
        }
        if std::env::var_os("KERNELGATE_TRIAL")
            .is_some_and(|value| value == trial_request::QUESTION)
        {
            println!("{}", trial_request::answer());
            return Exit::Fine.into();
        }
        let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
        let flags = match args::parse(&arguments) {
            Ok(flags) => flags,
            Err(error) if error.use_stderr() => {
                let text = variables::explain(&error, &args::command(), &arguments);
                eprint!("{}", printable(&text));
                return Exit::Usage.into();
            }
            Err(help) => help.exit(),
        };
        let own = own_flags::take_own_flags(&arguments);
        let terse = terse::is_wanted(&flags, &arguments);
        let large_pages = large_pages(&flags);
        if own.is_some() || terse || large_pages.is_some() {
            let (mut rest, mut own) = own.unwrap_or((arguments, Vec::new()));
            own.extend(large_pages);
            if terse {
                rest.splice(0..0, terse::FLAG.map(OsString::from));
                own.push((terse::VARIABLE, "yes".to_owned()));
            }
            return replace_process(&rest, &own);
        }
        if flags.request.is_none() && flags.trial.is_none() {
            variables::warnings().iter().for_each(|warning| eprintln!("{}", printable(warning)));
        }
        guard::keep_panics();
        let outcome = guard::catch(|| self.run(&flags)).unwrap_or_else(|panic| {
            Err(HarnessError::Usage(format!("internal error, please report it: {panic}")))
        });
        match outcome {
            Ok(exit) => exit.into(),
            Err(error) => {
                eprintln!("error: {}", printable(&error.to_string()));
                Exit::Usage.into()
            }
        }
    }

    /// Workloads of the other bench binaries; the siblings may name this one's too.
    fn others(&self) -> impl Iterator<Item = &dyn Suite> {
        let own = |name| self.suites.iter().any(|suite| suite.name() == name);
        self.siblings.iter().map(AsRef::as_ref).filter(move |suite: &&dyn Suite| !own(suite.name()))
    }

    fn everything(&self) -> impl Iterator<Item = &dyn Suite> {
        self.suites.iter().map(AsRef::as_ref).chain(self.others())
    }

    fn run(&self, flags: &Flags) -> Result<Exit, HarnessError> {
        names::check(self.name, self.everything())?;
        let _session = Range::new(self.name);
        flags.check()?;
        kernelgate_cuda::layout::pad_heap();
        if let Some(path) = &flags.request {
            return self.respond(flags, file::read(path)?);
        }
        if let Some(path) = &flags.trial {
            return self.trial(flags, trial::read_request(path)?);
        }
        cases::check_overrides(self.everything(), &flags.axis)?;
        let place = flags.wanted().place(self.suites.iter().map(AsRef::as_ref))?;
        let Some((selection, effort)) =
            self.select(flags, &place, (&flags.filter()?, flags.shard))?
        else {
            return Ok(Exit::Fine);
        };
        let store = Store::discover();
        match flags.mode() {
            Mode::Bench => {
                stored::check(&store, &selection, flags.baseline.as_deref(), true)?;
                stored::check(&store, &selection, flags.baseline_lenient.as_deref(), false)?;
                let selected = (&selection, effort);
                let (exit, run) = bench_run::bench(self.name, flags, &place, selected, &store)?;
                self.check_anything_ran(flags, &place, &run).map(|()| exit)
            }
            Mode::List | Mode::Load => {
                stored::check(&store, &selection, flags.load_baseline.as_deref(), true)?;
                stored::check(&store, &selection, flags.baseline.as_deref(), true)?;
                stored::check(&store, &selection, flags.baseline_lenient.as_deref(), false)?;
                let mut criterion = new_criterion(&store, flags.effort(), Elapsed::default());
                for group in &selection.groups {
                    let mut criterion_group = open_group(&mut criterion, group);
                    for case in &group.cases {
                        criterion_group.bench_function(case.function(), |_| {});
                    }
                }
                Ok(Exit::Fine)
            }
            Mode::Test | Mode::Profile => {
                let target = flags.wanted().open(&place)?;
                let execution = Execution {
                    flags,
                    effort,
                    timer: Timer::new(&target)?,
                    target,
                    limits: None,
                    recorder: None,
                    progress: BenchProgress::new(flags, selection.count()),
                    lost: None,
                    references: None,
                    trial: None,
                    deadline: flags.budget.map(|budget| Deadline::after(budget, Duration::ZERO)),
                };
                run_cases(execution, &selection, &store)
            }
        }
    }

    /// Does what the program asks, and writes the response.
    fn respond(&self, flags: &Flags, request: Request) -> Result<Exit, HarnessError> {
        let mut exit = Exit::Fine;
        let answer = match request.action {
            Action::Trial(request) => {
                exit = self.trial(flags, *request)?;
                ResponseBody::Trial
            }
            action => self
                .answer(flags, &action)
                .unwrap_or_else(|error| ResponseBody::Refused(error.to_string())),
        };
        file::write(&request.response, &Response { bench: self.name.to_owned(), answer })?;
        Ok(exit)
    }

    /// Carries out a trial request; nothing where no case that was asked for is here.
    fn trial(&self, flags: &Flags, request: TrialRequest) -> Result<Exit, HarnessError> {
        cases::check_overrides(self.everything(), &flags.axis)?;
        let place = flags.wanted().place(self.suites.iter().map(AsRef::as_ref))?;
        let filter = trial::filter(&request, flags)?;
        // A comparison says itself which cases it wants.
        let Some((mut selection, effort)) = self.select(flags, &place, (&filter, None))? else {
            return Ok(Exit::Fine);
        };
        selection.bring_first(&request.first);
        trial_run::carry_out(
            self.name,
            flags,
            request,
            &place,
            (&selection, effort),
            &Store::discover(),
        )
    }

    fn answer(&self, flags: &Flags, action: &Action) -> Result<ResponseBody, HarnessError> {
        let own = || self.suites.iter().map(AsRef::as_ref);
        if let Action::Resources { arch, filter } = action {
            let filter = Filter::parse(filter.as_deref(), false)?;
            return Ok(answer::resources::resources(&self.kernels, arch, &filter));
        }
        let place = flags.wanted().place(own())?;
        match action {
            Action::Peers => {
                return Ok(ResponseBody::Peers(self.peers.iter().map(Peers::program).collect()));
            }
            Action::Environment => {
                let target = flags.wanted().open(&place)?;
                return Ok(ResponseBody::Environment(Box::new(Environment::of(&target))));
            }
            Action::Timing { part } if *part != Some(Part::Cases) => {
                return match flags.wanted().open(&place)? {
                    Target::Cuda(devices) => {
                        Ok(ResponseBody::Timing(Box::new(answer::timing::timing(&devices, *part)?)))
                    }
                    Target::Cpu => {
                        Ok(ResponseBody::Refused(format!("no GPU to time: {}", place.otherwise)))
                    }
                };
            }
            _ => {}
        }
        let nothing = |reason: String, close| Ok(ResponseBody::NoMatch { reason, close });
        let filter =
            cases::check_overrides(self.everything(), &flags.axis).and_then(|()| flags.filter());
        let filter = match filter {
            Ok(filter) => filter,
            Err(error) => return nothing(error.to_string(), Vec::new()),
        };
        let selection = match (self.select(flags, &place, (&filter, flags.shard)), filter.text()) {
            (Ok(Some((selection, _))), _) => selection,
            (Ok(None), _) => {
                return nothing("another bench has what was asked for".to_owned(), Vec::new());
            }
            (Err(_), Some(text)) => {
                if let Some(error) = self.refused_axes(flags, &place) {
                    return nothing(error.to_string(), Vec::new());
                }
                // What is close to it is put together from all benches.
                return nothing(
                    format!("no case matches `{}`", cases::in_short(text)),
                    cases::suggestions(&filter, &cases::all_ids(own())),
                );
            }
            (Err(error), None) => return nothing(error.to_string(), Vec::new()),
        };
        Ok(match action {
            Action::Verify { dump } => {
                let target = flags.wanted().open(&place)?;
                ResponseBody::Verify(answer::verify::verify(
                    &selection,
                    flags.seed,
                    target,
                    dump.as_deref(),
                ))
            }
            Action::Timing { .. } => match flags.wanted().open(&place)? {
                Target::Cuda(devices) => ResponseBody::Timing(Box::new(answer::timing::cases(
                    &selection, flags.seed, &devices,
                )?)),
                Target::Cpu => {
                    ResponseBody::Refused(format!("no GPU to time: {}", place.otherwise))
                }
            },
            Action::Profile | Action::Record(_) => {
                let target = flags.wanted().open(&place)?;
                answer::profile::profile(&selection, flags.seed, &target, action.recorded())?
            }
            _ => ResponseBody::List(answer::list::list(own(), &selection, &place)),
        })
    }

    /// The selected cases; `None` when there are none here and that is no mistake (it has then been
    /// said).
    ///
    /// A filter that matches no case of the effort is tried on the whole sweep: who names a case
    /// wants that case.
    fn select(
        &self,
        flags: &Flags,
        place: &Place,
        (filter, shard): (&Filter, Option<Shard>),
    ) -> Result<Option<(Selection<'_>, Effort)>, HarnessError> {
        let own = || self.suites.iter().map(AsRef::as_ref);
        let effort = flags.effort();
        let mut of = effort;
        let mut selection = cases::select(own(), effort, place, &flags.axis, filter)?;
        if selection.matched_nothing() && effort < Effort::Thorough {
            of = Effort::Thorough;
            selection = cases::select(own(), Effort::Thorough, place, &flags.axis, filter)?;
            if !selection.matched_nothing() && flags.mode() != Mode::List {
                eprintln!(
                    "{}: not among the default cases; {} of the whole sweep match",
                    self.name,
                    selection.count()
                );
            }
        }
        if !selection.matched_nothing() {
            if shard.is_some() {
                let (all, wanted) = (selection.count(), (&flags.axis[..], filter));
                selection = cases::select_part(own(), of, place, wanted, shard)?;
                selection.say_part(self.name, flags, all);
            }
            return Ok(Some((selection, effort)));
        }
        if self.elsewhere(flags, place, filter).is_ok_and(|elsewhere| !elsewhere.matched_nothing())
        {
            return Ok(None);
        }
        match filter.text() {
            Some(_) => Err(self
                .refused_axes(flags, place)
                .unwrap_or_else(|| cases::nothing_matches(filter, self.everything()))),
            None if !flags.axis.is_empty() && !matches!(filter, Filter::None) => {
                Err(cases::nothing_has(own(), &flags.axis))
            }
            None => Ok(None),
        }
    }

    /// Why no case has the axes, whatever is named besides; `None` where some have them.
    fn refused_axes(&self, flags: &Flags, place: &Place) -> Option<HarnessError> {
        let own = || self.suites.iter().map(AsRef::as_ref);
        if flags.axis.is_empty() {
            return None;
        }
        match cases::select(own(), Effort::Thorough, place, &flags.axis, &Filter::All) {
            Err(error) => Some(error),
            Ok(selection) => {
                selection.matched_nothing().then(|| cases::nothing_has(own(), &flags.axis))
            }
        }
    }

    /// Refuses a run without any result where cases were named that only this binary has.
    fn check_anything_ran(
        &self,
        flags: &Flags,
        place: &Place,
        run: &ProcessRun,
    ) -> Result<(), HarnessError> {
        let asked = flags.filter.is_some() || !flags.axis.is_empty();
        // Another shard may have it, and a budget may end before the first case.
        let in_part = flags.shard.is_some() || flags.budget.is_some();
        if !asked
            || in_part
            || !run.cases.is_empty()
            || !run.failed.is_empty()
            || self.elsewhere(flags, place, &flags.filter()?)?.count() > 0
        {
            return Ok(());
        }
        let (id, reason) = run
            .skipped
            .first_key_value()
            .map(|(id, reason)| (id.as_str(), reason.as_str()))
            .unwrap_or_default();
        Err(HarnessError::Usage(format!(
            "nothing of what was asked for can run here: {id}: {reason}"
        )))
    }

    /// What the package's other bench binaries have of what was asked for.
    fn elsewhere(
        &self,
        flags: &Flags,
        place: &Place,
        filter: &Filter,
    ) -> Result<Selection<'_>, HarnessError> {
        cases::select(self.others(), Effort::Thorough, place, &flags.axis, filter)
    }
}

/// What lets the process have memory in pages of 2 MiB, where it is for a GPU: hundreds of megabytes
/// of inputs and outputs come and go with every case, and 4 KiB at a time the system takes longer to
/// hand them out than the GPU to fill them. Rows on the host are timed as they would run elsewhere.
fn large_pages(flags: &Flags) -> Option<(&'static str, String)> {
    const VARIABLE: &str = "GLIBC_TUNABLES";
    let driver = ["/dev/nvidiactl", "/dev/dxg"].iter().any(|path| Path::new(path).exists());
    let wanted = driver && flags.backend != BackendName::Cpu && flags.mode() == Mode::Bench;
    let asked = flags.trial.is_some() || flags.request.is_some();
    let free = std::env::var_os(VARIABLE).is_none() && !asked;
    (wanted && free).then(|| (VARIABLE, "glibc.malloc.hugetlb=1".to_owned()))
}

/// Starts this program anew with Criterion's flags alone and ours in the environment.
fn replace_process(arguments: &[OsString], own: &own_flags::OwnFlags) -> ExitCode {
    let program = std::env::current_exe()
        .unwrap_or_else(|_| PathBuf::from(std::env::args_os().next().unwrap_or_default()));
    let mut command = std::process::Command::new(&program);
    command.args(arguments).envs(own.iter().map(|(name, value)| (*name, value)));
    #[cfg(unix)]
    let error = {
        use std::os::unix::process::CommandExt;
        command.exec()
    };
    #[cfg(not(unix))]
    // Without exec the program's parent would be this process, not cargo: the session is settled
    // here.
    let error = match command
        .env(
            super::recording::invocation::VARIABLE,
            super::recording::invocation::Invocation::of_process()
                .map(|it| it.session)
                .unwrap_or_default(),
        )
        .status()
    {
        Ok(status) => return ExitCode::from(u8::try_from(status.code().unwrap_or(2)).unwrap_or(2)),
        Err(error) => error,
    };
    eprintln!("error: failed to start {}: {error}", program.display());
    Exit::Usage.into()
}

#[cfg(test)]
mod tests {
    use super::super::selection::sample::{all, own};
    use super::*;
    use crate::backend::BackendKind;
    use clap::Parser;

    #[test]
    fn a_mistyped_filter_gets_suggestions_where_siblings_name_the_own_workloads_too() {
        let harness = Harness::new("spike", own()).siblings(all());
        assert_eq!(harness.everything().count(), all().len());
        let filter = Filter::parse(Some("atention/sofmax"), false).unwrap();
        let message = cases::nothing_matches(&filter, harness.everything()).to_string();
        assert!(message.contains("did you mean attention/softmax"), "{message}");
    }

    #[test]
    fn a_name_that_is_none_is_refused_before_anything_else() {
        let refused = |name, line: &str| {
            let flags = Flags::try_parse_from(line.split_whitespace()).unwrap();
            Harness::new(name, own()).run(&flags).unwrap_err().to_string()
        };
        for line in ["--list", "--bench", "--test no_such_case"] {
            let message = refused("st\nbif", line);
            assert!(
                message.starts_with("the bench's name `st\\nbif` holds a control character"),
                "{message}"
            );
        }
        assert!(refused("../st_bif", "--list").contains("holds `/`"));
    }

    #[test]
    fn what_another_binary_has_is_no_mistake_and_what_none_has_is() {
        let harness = Harness::new("spike", own()).siblings(all());
        let place =
            Place { kind: BackendKind::Cpu, otherwise: "elsewhere".to_owned(), l2_bytes: 0 };
        let select = |arguments: &[&str]| {
            let flags = Flags::try_parse_from(arguments).unwrap();
            let selected = harness.select(&flags, &place, (&flags.filter()?, flags.shard))?;
            Ok::<_, HarnessError>(selected.map(|(selection, _)| selection.count()))
        };
        assert_eq!(select(&["attention/softmax"]).unwrap(), None);
        assert_eq!(select(&["--axis", "d=64"]).unwrap(), None);
        assert_eq!(select(&["--axis", "n=7", "--axis", "t=4", "forward"]).unwrap(), Some(1));
        let message = select(&["--axis", "n=7", "--axis", "d=64"]).unwrap_err().to_string();
        assert!(message.starts_with("no case has the axes n=7 d=64 together"), "{message}");
        assert!(select(&["spike/sideways"]).is_err());
        // The axes are the mistake, not the filter that goes with them.
        for filter in ["forward", "spike/sideways"] {
            let message = select(&["--axis", "n=7", "--axis", "d=64", filter]).unwrap_err();
            let message = message.to_string();
            assert!(message.starts_with("no case has the axes n=7 d=64 together"), "{message}");
        }
        let message = select(&["--axis", "n=7", "spike/sideways"]).unwrap_err().to_string();
        assert!(message.starts_with("no case matches `spike/sideways`"), "{message}");
    }
}
