//! The run of a bench that uses Criterion with GPU time: ids and samples of Criterion's store, as
//! far as they were taken by this measurement.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::samples::{Origin, SampleLog};
use crate::display::{self, terminal};
use crate::exit::Exit;
use crate::harness::recording::invocation::Invocation;
use crate::harness::recording::saving;
use crate::harness::running::bench_run;
use crate::harness::settings::args;
use crate::measure::audit::{Subject, duration};
use crate::measure::power::PowerRecord;
use crate::record::criterion_store::{self, Stored, StoredCase};
use crate::record::text::{check_plain, one_line, printable, printable_path};
use crate::record::{CaseRecord, Environment, Lock, ProcessRun, Provenance, Samples, Store, file};
use crate::stats;
use kernelgate_cuda::BackendError;
use kernelgate_cuda::driver::device::DeviceFacts;
use kernelgate_cuda::observe::telemetry::Reading;

/// Variable that names the file of the record, in place of the session's: for `kernelgate`, which
/// reads it.
pub const RECORD: &str = "KERNELGATE_RECORD";

/// Makes the executable one that `kernelgate` drives by Criterion's flags, told without running it.
pub const MARK: &str = "\0kernelgate GPU time in Criterion's main\0";

/// How the process came to its end.
pub enum Ended {
    /// After all targets of the group.
    Complete,
    /// By a panic of the bench.
    Interrupted,
    /// By this measurement.
    Refused {
        /// The case that was measured.
        case: String,
        /// Why it has no time.
        error: String,
    },
}

/// What a case is called whose samples are being taken: Criterion tells its id when they are done.
pub fn case_after(log: &SampleLog) -> String {
    let stored = criterion_store::read(&Store::discover().criterion).unwrap_or_default();
    let here = stored.cases.iter().filter(|(_, case)| taken_here(log, case));
    let last = here.max_by_key(|(_, case)| case.written);
    last.map_or("the first case".to_owned(), |(id, _)| format!("the case after `{}`", one_line(id)))
}

fn taken_here(log: &SampleLog, case: &StoredCase) -> bool {
    matches!(log.origin(case), Origin::Here { .. })
}

/// Records what was taken; how the process is to end.
///
/// # Errors
/// What failed, as a sentence's end.
pub fn record(
    log: &SampleLog,
    (facts, telemetry): (&DeviceFacts, Vec<Reading>),
    least_ns: f64,
    ended: Ended,
) -> Result<Exit, String> {
    let store = Store::discover();
    let failed_to = |error: &dyn std::fmt::Display| format!("failed to {error}");
    let stored = criterion_store::read(&store.criterion).map_err(|error| failed_to(&error))?;
    let complete = matches!(ended, Ended::Complete);
    let mut run = of_stored(&stored, log, least_ns, Environment::on_gpus([facts]));
    if let Ended::Refused { case, error } = ended {
        run.failed.insert(case, error);
    }
    if run.cases.is_empty() && run.failed.is_empty() && run.skipped.is_empty() {
        return Ok(Exit::Fine);
    }
    let invocation = Invocation::of_process().map_err(|error| error.to_string())?;
    let bench = bench_name();
    let asked_for = std::env::var_os(RECORD).filter(|path| !path.is_empty()).map(PathBuf::from);
    // Where the program asked for the record, it gets one of all groups.
    if let Some(earlier) = asked_for.as_ref().and_then(|path| file::read::<ProcessRun>(path).ok()) {
        run.cases.extend(earlier.cases);
        run.skipped.extend(earlier.skipped);
        run.failed.extend(earlier.failed);
    }
    let run = ProcessRun {
        session: invocation.session.clone(),
        package: store.package.clone(),
        invocation: Some(invocation.id.clone()),
        complete,
        provenance: Provenance::of(&store.root),
        executable: bench_run::executable_hash(),
        telemetry,
        ..run
    };
    // Two groups of a bench, each with a measurement of its own, are two runs.
    let stem = |path: &Path| path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let named =
        |path: &Path| ProcessRun { bench: stem(path).unwrap_or(bench.clone()), ..run.clone() };
    let path = match asked_for {
        Some(path) => file::write(&path, &named(&path)).map(|()| path).map_err(|it| failed_to(&it)),
        None => invocation.record(&store, &bench, named).map_err(|error| error.to_string()),
    }?;
    let run = named(&path);
    tell(&run, &path, &store.page());
    save_baseline(&store, &run)?;
    Ok(if run.failed.is_empty() { Exit::Fine } else { Exit::Regression })
}

/// The cases that were measured here. Others of the store are of other benches, or of earlier.
fn of_stored(
    stored: &Stored,
    log: &SampleLog,
    least_ns: f64,
    environment: Environment,
) -> ProcessRun {
    let mut run = ProcessRun::start("", "", environment, Provenance::default());
    for (id, case) in &stored.cases {
        match log.origin(case) {
            Origin::Elsewhere => {}
            Origin::ByRoutine => {
                let why = "its routine tells the times itself (iter_custom): nothing is known of \
                           them";
                run.skipped.insert(one_line(id), why.to_owned());
            }
            Origin::Here { samples, host_bound } => {
                let record = of_case(case, samples, host_bound);
                let launch_ns = stats::median(&record.samples.per_launch_ns());
                if let Err(why) = duration::check(Subject::Routine, launch_ns, least_ns) {
                    run.failed.insert(one_line(id), BackendError::from(why).to_string());
                } else if let Err(why) = check_plain(id) {
                    run.skipped.insert(one_line(id), why);
                } else {
                    run.cases.insert(id.clone(), record);
                }
            }
        }
    }
    run
}

fn of_case(case: &StoredCase, samples: usize, host_bound: bool) -> CaseRecord {
    case.record(Samples {
        launches: case.iterations[..samples].to_vec(),
        elapsed_ns: case.times[..samples].to_vec(),
        host_bound,
        power: Some(PowerRecord::not_applicable("Criterion plans the samples of this bench")),
        ..Samples::default()
    })
}

/// Name of the bench target: cargo puts a hash behind it.
fn bench_name() -> String {
    let program = std::env::current_exe().unwrap_or_default();
    let stem = program.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let hash = |end: &str| end.len() == 16 && end.bytes().all(|byte| byte.is_ascii_hexdigit());
    match stem.rsplit_once('-') {
        Some((name, end)) if hash(end) && !name.is_empty() => name.to_owned(),
        _ => stem,
    }
}

fn tell(run: &ProcessRun, path: &Path, page: &Path) {
    if std::env::var_os(RECORD).is_some() {
        return;
    }
    println!("{}", display::runs::text(std::slice::from_ref(run), terminal::columns()));
    let (path, page) = (path.display().to_string(), page.display().to_string());
    eprintln!("run recorded in {}", printable(&path));
    eprintln!("`kernelgate report` draws it in {}", printable(&page));
}

/// Where Criterion was told to save a baseline, the run becomes part of ours of that name too.
fn save_baseline(store: &Store, run: &ProcessRun) -> Result<(), String> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let flags = args::parse(&arguments).ok();
    let Some(name) = flags.and_then(|flags| flags.save_baseline) else { return Ok(()) };
    if run.cases.is_empty() {
        return Ok(());
    }
    let unsaved = |error: &dyn std::fmt::Display| format!("baseline `{name}`: failed to {error}");
    // Criterion takes any name.
    let path = store
        .baseline_path(&run.environment.slug(), &name)
        .map_err(|error| format!("baseline `{name}` is Criterion's alone: {error}"))?;
    let _lock = Lock::of(&path).map_err(|error| unsaved(&error))?;
    saving::save(&path, &name, run).map_err(|error| unsaved(&error))?;
    eprintln!("baseline `{name}` saved in {}", printable_path(&path));
    Ok(())
}
