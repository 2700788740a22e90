//! The bench binary: flags, selection, and what each mode does with it.

use super::names;
use crate::record::text::printable;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;

use super::args::{Flags, Mode};
use super::cases::Selection;
use super::error::HarnessError;
use super::execution::{Execution, Timer, new_criterion, open_group, run_cases};
use super::filter::Filter;
use super::place::Place;
use super::progress::BenchProgress;
use super::recorder::Recorder;
use super::references::References;
use super::{answer, args, cases, guard, recorder, trial, trial_run};
use crate::backend::{BackendKind, Target};
use crate::display;
use crate::exit::Exit;
use crate::measure::criterion::Elapsed;
use crate::measure::limits::Limits;
use crate::protocol::{self, Action, PeerProgram, Request, Response, ResponseBody};
use crate::record::{Baseline, Environment, FileError, Lock, Provenance, Run, Store, file};
use crate::record::{TrialRequest, trial_request};
use crate::suite::Suite;
use crate::workload::{Effort, Work};
use kernelgate_cuda::observe::range::Range;
use kernelgate_cuda::observe::telemetry::Telemetry;
use kernelgate_cuda::spec::ListedKernel;

/// A bench binary's workloads.
pub struct Harness {
    name: &'static str,
    suites: Vec<Box<dyn Suite>>,
    siblings: Vec<Box<dyn Suite>>,
    peers: &'static [Peers],
    kernels: Vec<ListedKernel>,
}

/// A Python program that times other people's kernels for the problems of a family. It reads a JSON
/// list of problems and prints a line of JSON a result.
#[derive(Debug, Clone, Copy)]
pub struct Peers {
    /// First part of the workloads' names.
    pub family: &'static str,
    /// The file that is run.
    pub main: &'static str,
    /// Its files: name and text.
    pub files: &'static [(&'static str, &'static str)],
}

impl Peers {
    fn program(&self) -> PeerProgram {
        let files = self
            .files
            .iter()
            .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
            .collect();
        PeerProgram { family: self.family.to_owned(), main: self.main.to_owned(), files }
    }
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
        if let Some((rest, own)) = args::take_own_flags(&arguments) {
            return replace_process(&rest, &own);
        }
        let flags = match Flags::try_parse_from(&arguments) {
            Ok(flags) => flags,
            Err(error) => error.exit(),
        };
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
        if let Some(path) = &flags.request {
            return self.respond(flags, file::read(path)?);
        }
        if let Some(path) = &flags.trial {
            return self.trial(flags, trial::read_request(path)?);
        }
        cases::check_overrides(self.everything(), &flags.axis)?;
        let place = flags.wanted().place(self.suites.iter().map(AsRef::as_ref))?;
        let Some((selection, effort)) = self.select(flags, &place, &flags.filter()?)? else {
            return Ok(Exit::Fine);
        };
        let store = Store::discover();
        match flags.mode() {
            Mode::Bench => self.bench(flags, &place, selection, effort, &store),
            Mode::List | Mode::Load => {
                check_stored(&store, &selection, flags.load_baseline.as_deref())?;
                check_stored(&store, &selection, flags.baseline.as_deref())?;
                let mut criterion = new_criterion(&store, Elapsed::default());
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
                };
                Ok(run_cases(execution, &selection, &store)?.0)
            }
        }
    }

    /// Does what the program asks, and writes the response.
    fn respond(&self, flags: &Flags, request: Request) -> Result<Exit, HarnessError> {
        let mut exit = Exit::Fine;
        let answer = match request.action {
            Action::Trial(request) => {
                exit = self.trial(flags, request)?;
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
        let Some((selection, effort)) = self.select(flags, &place, &filter)? else {
            return Ok(Exit::Fine);
        };
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
        if let Action::Resources { arch } = action {
            return Ok(answer::resources::resources(&self.kernels, arch));
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
            Action::Timing { part } => {
                return match flags.wanted().open(&place)? {
                    Target::Cuda(device) => {
                        Ok(ResponseBody::Timing(Box::new(answer::timing::timing(&device, *part)?)))
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
        let selection = match (self.select(flags, &place, &filter), filter.text()) {
            (Ok(Some((selection, _))), _) => selection,
            (Ok(None), _) => {
                return nothing("another bench has what was asked for".to_owned(), Vec::new());
            }
            // What is close to it is put together from all benches.
            (Err(_), Some(text)) => {
                return nothing(
                    format!("no case matches `{text}`"),
                    cases::suggestions(text, &cases::all_ids(own())),
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
            Action::Profile => {
                answer::profile::profile(&selection, flags.seed, &flags.wanted().open(&place)?)?
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
        filter: &Filter,
    ) -> Result<Option<(Selection<'_>, Effort)>, HarnessError> {
        let own = || self.suites.iter().map(AsRef::as_ref);
        let effort = flags.effort();
        let mut selection = cases::select(own(), effort, place, &flags.axis, filter)?;
        if selection.matched_nothing() && effort < Effort::Thorough {
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
            return Ok(Some((selection, effort)));
        }
        if self.elsewhere(flags, place, filter).is_ok_and(|elsewhere| !elsewhere.matched_nothing())
        {
            return Ok(None);
        }
        match filter.text() {
            Some(text) => Err(cases::nothing_matches(text, self.everything())),
            None if !flags.axis.is_empty() && !matches!(filter, Filter::None) => {
                Err(cases::nothing_has(&flags.axis))
            }
            None => Ok(None),
        }
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

    fn bench(
        &self,
        flags: &Flags,
        place: &Place,
        selection: Selection<'_>,
        effort: Effort,
        store: &Store,
    ) -> Result<Exit, HarnessError> {
        check_stored(store, &selection, flags.baseline.as_deref())?;
        let target = flags.wanted().open(place)?;
        let environment = Environment::of(&target);
        let baseline = flags
            .save_baseline
            .as_deref()
            .map(|name| open_baseline(store, &environment, name))
            .transpose()?;
        let progress = BenchProgress::new(flags, selection.count());
        let not_elsewhere = (place.kind == BackendKind::Cpu).then_some(place.otherwise.as_str());
        progress.start(self.name, &environment, effort, selection.count(), not_elsewhere);
        let session_id = recorder::session_id()?;
        let path = store.run_path(&session_id, self.name);
        let mut run = Run {
            effort: effort.name().to_owned(),
            seed: flags.seed,
            delays: trial::delays(flags, &selection),
            skipped: selection.skipped.iter().cloned().collect(),
            unsupported: selection.unsupported.clone(),
            ..Run::start(self.name, &session_id, environment, Provenance::of(&store.root))
        };
        // Before the limits: a folder that cannot be written should not cost two seconds.
        file::write(&path, &run)?;
        let works: Vec<Work> =
            selection.groups.iter().map(|group| group.bound.problem().work()).collect();
        let mut timer = Timer::new(&target)?;
        run.limits = match &mut timer {
            Timer::Wall(_) => Limits::measure_cpu(&works),
            Timer::Events(events) => Limits::measure_cuda(events, &works)?,
        };
        progress.limits(&run.limits);
        trial::warn_of_delays(&run);
        // After the limits: a card that has just worked shows the clock it works at.
        let telemetry = target.telemetry();
        run.telemetry.extend(telemetry.as_ref().map(Telemetry::read));
        progress.telemetry(&run.telemetry);
        let limits = run.limits.clone();
        let recorder = Recorder::start(run, path, flags.save_baseline.clone())?;
        recorder.exit_on_interrupt()?;
        let execution = Execution {
            flags,
            effort,
            target,
            timer,
            limits: Some(limits),
            recorder: Some(recorder.clone()),
            progress,
            lost: None,
            references: Some(References::at(store.references.clone())),
            trial: None,
        };
        let (exit, _) = run_cases(execution, &selection, store)?;
        recorder.finish(telemetry.as_ref().map(Telemetry::read))?;
        let saved = flags.save_baseline.as_deref().filter(|_| !recorder.run().cases.is_empty());
        if let Some((path, name)) = baseline.zip(saved) {
            // Waited for outside of the recorder: an interrupt need not wait.
            let _lock = Lock::of(&path)?;
            recorder.save_baseline(|run| save_baseline(&path, name, run))?;
        }
        if flags.output_format == "criterion" {
            println!("{}", display::runs::text(&[recorder.run()]));
        }
        BenchProgress::new(flags, 0).end(&recorder.path(), saved);
        let run = recorder.run();
        let asked = flags.filter.is_some() || !flags.axis.is_empty();
        if run.cases.is_empty()
            && run.failed.is_empty()
            && asked
            && self.elsewhere(flags, place, &flags.filter()?)?.count() == 0
        {
            let (id, reason) = run
                .skipped
                .first_key_value()
                .map(|(id, reason)| (id.as_str(), reason.as_str()))
                .unwrap_or_default();
            return Err(HarnessError::Usage(format!(
                "nothing of what was asked for can run here: {id}: {reason}"
            )));
        }
        Ok(exit)
    }
}

/// Starts this program anew with Criterion's flags alone and ours in the environment.
fn replace_process(arguments: &[OsString], own: &args::OwnFlags) -> ExitCode {
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
        .env("KERNELGATE_SESSION", recorder::session_id().unwrap_or_default())
        .status()
    {
        Ok(status) => return ExitCode::from(u8::try_from(status.code().unwrap_or(2)).unwrap_or(2)),
        Err(error) => error,
    };
    eprintln!("error: failed to start {}: {error}", program.display());
    Exit::Usage.into()
}

/// Criterion panics on a stored result that is not there.
fn check_stored(
    store: &Store,
    selection: &Selection<'_>,
    name: Option<&str>,
) -> Result<(), HarnessError> {
    let Some(name) = name else { return Ok(()) };
    let safe = |text: &str| text.replace('/', "_").chars().take(64).collect::<String>();
    for group in &selection.groups {
        for case in &group.cases {
            let folder =
                store.criterion.join(safe(&group.id())).join(safe(&case.function())).join(name);
            if !folder.join("sample.json").is_file() {
                return Err(HarnessError::Usage(format!(
                    "Criterion has no baseline `{name}` of {}: save one with --save-baseline \
                     {name}, or narrow the filter",
                    case.id
                )));
            }
        }
    }
    Ok(())
}

/// The file a baseline will be merged into, checked now: an unreadable one, or a folder that cannot
/// be written, is found before anything is measured.
fn open_baseline(
    store: &Store,
    environment: &Environment,
    name: &str,
) -> Result<PathBuf, HarnessError> {
    let path = store.baseline_path(&environment.slug(), name)?;
    Baseline::open(&path, name)?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let probe = std::fs::create_dir_all(folder).and_then(|()| tempfile::tempfile_in(folder));
    probe.map_err(|cause| FileError::Io { action: "write", path: path.clone(), cause })?;
    Ok(path)
}

/// The caller holds the file's lock.
fn save_baseline(path: &Path, name: &str, run: &Run) -> Result<(), FileError> {
    let mut baseline = Baseline::open(path, name)?;
    baseline.merge(run);
    file::write(path, &baseline)
}

#[cfg(test)]
mod tests {
    use super::super::sample::{all, own};
    use super::*;

    #[test]
    fn a_mistyped_filter_gets_suggestions_where_siblings_name_the_own_workloads_too() {
        let harness = Harness::new("spike", own()).siblings(all());
        assert_eq!(harness.everything().count(), all().len());
        let message = cases::nothing_matches("atention/sofmax", harness.everything()).to_string();
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
            let selected = harness.select(&flags, &place, &flags.filter()?)?;
            Ok::<_, HarnessError>(selected.map(|(selection, _)| selection.count()))
        };
        assert_eq!(select(&["attention/softmax"]).unwrap(), None);
        assert_eq!(select(&["--axis", "d=64"]).unwrap(), None);
        assert_eq!(select(&["--axis", "n=7", "--axis", "t=4", "forward"]).unwrap(), Some(1));
        let message = select(&["--axis", "n=7", "--axis", "d=64"]).unwrap_err().to_string();
        assert!(message.starts_with("no case has the axes n=7 d=64 together"), "{message}");
        assert!(select(&["spike/sideways"]).is_err());
    }
}
