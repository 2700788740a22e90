//! `kernelgate submit slurm`: builds and submits work, follows it, and resumes it until the merge
//! has decided.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use kernelgate::exit::ExitReason;
use kernelgate::record::text::{printable_on_terminal, printable_path};
use kernelgate::record::{BaselineStore, current_timestamp, file};

use super::work_division::{ShardDivision, ShardVerb, without_side_flags};
use crate::benches::child_process::ChildProcess;
use crate::commands;
use crate::fleet::counted_shards::AnchorTolerance;
use crate::fleet::job_commands::{DividedWork, SubmissionPlaces};
use crate::fleet::slurm::{self, SlurmJobState, SlurmJobs, SlurmOptions};
use crate::fleet::submission::{JobSubmission, SUBMISSION_FILE, shard_retries};
use crate::verbs::shared::bench_flags::BenchFlags;
use crate::verbs::shared::interrupt;

/// Pause between two calls of Slurm's `squeue`.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Time for a file that a job wrote to appear on this machine.
const RESULT_FILE_TIMEOUT: Duration = Duration::from_secs(60);
/// Last lines of a failed task's log that are shown.
const SHOWN_LOG_LINES: usize = 8;
/// Scripts in the folder of a submission.
const SHARD_SCRIPT: &str = "shards.sh";
const MERGE_SCRIPT: &str = "merge.sh";

#[derive(Debug, clap::Args)]
pub struct SlurmArguments {
    #[command(flatten)]
    division: ShardDivision,
    /// Partition of the jobs
    #[arg(long, value_name = "NAME")]
    partition: Option<String>,
    /// Generic resources of a task, for example gpu:h200:1: the GPU is the task's alone
    #[arg(long, value_name = "LIST")]
    gres: Option<String>,
    /// Time limit of a task, as sbatch takes it
    #[arg(long, value_name = "TIME")]
    time: Option<String>,
    /// Another option of sbatch for the array, for example --sbatch=--constraint=nvlink
    /// (repeatable)
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    sbatch: Vec<String>,
    /// Folder of the submission, which every node sees under the same path [default:
    /// kernelgate/submit/ of the target folder]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Follow the submission in the folder; when it has ended, submit missing shards again
    #[arg(long)]
    resume: bool,
    /// Print both job scripts, and submit nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    benches: BenchFlags,
}

/// A submission to Slurm whose jobs the program follows.
struct FollowedSubmission<'a> {
    arguments: &'a SlurmArguments,
    places: SubmissionPlaces,
    options: SlurmOptions,
    submission: JobSubmission,
    running: ChildProcess,
}

/// States of those tasks that were already printed.
#[derive(Default)]
struct PrintedTaskStates {
    counts: String,
    failed: BTreeSet<(u32, String)>,
}

/// Submits the work and follows it, or prints the scripts.
///
/// # Errors
/// Fails if nothing can be built, Slurm refuses, or the jobs end without a result.
pub fn run(arguments: &SlurmArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    let division = &arguments.division;
    let (verb, flags) = division.split_verb_and_flags()?;
    let folder = arguments.folder.clone().unwrap_or_else(|| store.work.join("submit"));
    let here = std::env::current_dir().context("failed to find the working folder")?;
    let folder = here.join(folder);
    let places = SubmissionPlaces {
        program: folder.join("kernelgate"),
        package: here.join(&store.root),
        folder: folder.clone(),
    };
    let options = SlurmOptions {
        shards: division.shards,
        partition: arguments.partition.clone(),
        gres: arguments.gres.clone(),
        time: arguments.time.clone(),
        retries: division.retries,
        options: arguments.sbatch.clone(),
    };
    let running = interrupt::watch_interrupts_printing(|| {
        ": jobs that were submitted go on; --resume follows them".to_owned()
    })?;
    if arguments.dry_run {
        let work = build_for_jobs(arguments, &places, verb, flags, (false, &running))?;
        print!("{}", options.shard_script(&work, &places));
        print!("\n# The merge, when every task has ended.\n");
        print!("{}", options.merge_script(&work, &places, division.anchor_tolerance));
        return Ok(ExitReason::Fine);
    }
    let submission = JobSubmission {
        made: current_timestamp(),
        command: division.command.clone(),
        shards: division.shards,
        arrays: Vec::new(),
        merge: None,
    };
    let submission = match arguments.resume {
        true => submission.resume_in_folder(&folder)?,
        false => submission.claim_folder(&folder)?,
    };
    let mut followed = FollowedSubmission { arguments, places, options, submission, running };
    if arguments.resume {
        followed.adopt_unrecorded_jobs()?;
    }
    if !followed.submission.arrays.is_empty() {
        followed.submit_missing_shards()?;
    } else if let Err(error) = followed.start(verb, flags) {
        // If nothing was submitted, the folder is released. A failed `sbatch` may still have
        // submitted its job.
        let _ = followed.adopt_unrecorded_jobs();
        if followed.submission.arrays.is_empty() {
            let _ = std::fs::remove_file(folder.join(SUBMISSION_FILE));
        }
        return Err(error);
    }
    followed.follow_merge()
}

/// Builds executables in a folder that every node can read, and describes the work of the jobs.
/// Sides of a comparison are built only for a submission.
fn build_for_jobs(
    arguments: &SlurmArguments,
    places: &SubmissionPlaces,
    verb: ShardVerb,
    flags: &[String],
    (submits, running): (bool, &ChildProcess),
) -> anyhow::Result<DividedWork> {
    if verb == ShardVerb::Compare {
        let builds = places.folder.join("builds");
        if submits {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("compare").args(flags).arg("--build-only").arg(&builds);
            commands::print_command(&command);
            let status = command.status().context("failed to start the build")?;
            anyhow::ensure!(status.success(), "the sides were not built: nothing was submitted");
        }
        let sides = [builds.join("base"), builds.join("head")];
        return Ok(DividedWork::Compare { sides, flags: without_side_flags(flags) });
    }
    let found = arguments.benches.find(&places.package, running)?;
    let bin = places.folder.join("bin");
    let mut executables = Vec::new();
    for executable in found.executables {
        let copy = bin.join(&executable.bench);
        if submits {
            std::fs::create_dir_all(&bin)
                .and_then(|()| std::fs::copy(&executable.path, &copy).map(drop))
                .with_context(|| format!("failed to copy {}", executable.path.display()))?;
        }
        executables.push((copy, executable.root));
    }
    let flags = flags.to_vec();
    Ok(match verb {
        ShardVerb::Calibrate => DividedWork::Calibrate { executables: bin, flags },
        _ => DividedWork::Bench { executables, flags },
    })
}

impl FollowedSubmission<'_> {
    /// Writes the scripts and submits all shards.
    fn start(&mut self, verb: ShardVerb, flags: &[String]) -> anyhow::Result<()> {
        let folder = &self.places.folder;
        for name in ["records", "logs", "attempts"] {
            let path = folder.join(name);
            std::fs::create_dir_all(&path)
                .with_context(|| format!("failed to make {}", path.display()))?;
        }
        let program = std::env::current_exe()?;
        std::fs::copy(&program, &self.places.program)
            .with_context(|| format!("failed to copy {}", program.display()))?;
        let work =
            build_for_jobs(self.arguments, &self.places, verb, flags, (true, &self.running))?;
        let tolerance = self.arguments.division.anchor_tolerance;
        for (name, script) in [
            (SHARD_SCRIPT, self.options.shard_script(&work, &self.places)),
            (MERGE_SCRIPT, self.options.merge_script(&work, &self.places, tolerance)),
        ] {
            file::write_text(&folder.join(name), &script)?;
        }
        self.submit_shards(&(1..=self.options.shards).collect())
    }

    /// Finds jobs that an interrupted program submitted without recording their numbers.
    fn adopt_unrecorded_jobs(&mut self) -> anyhow::Result<()> {
        let Some(printed) = run_squeue(&["--me"])? else { return Ok(()) };
        let comment = self.submission.comment(&self.places.folder);
        let [arrays, merges] = slurm::jobs_with_comment(&printed, &comment);
        let last = self.submission.arrays.iter().max().copied();
        let new: Vec<u64> = arrays.into_iter().filter(|id| Some(*id) > last).collect();
        // A merge job that was submitted before the newest array does not wait for that array.
        let newest = new.last().copied().or(last);
        let merge = merges.last().copied().filter(|id| Some(*id) > newest);
        if new.is_empty() && (merge.is_none() || merge <= self.submission.merge) {
            return Ok(());
        }
        self.submission.arrays.extend(new);
        self.submission.merge = merge;
        self.save()
    }

    /// Submits the shards that ended without a record that counts, and a missing merge.
    fn submit_missing_shards(&mut self) -> anyhow::Result<()> {
        let jobs = loop {
            match self.jobs()? {
                Some(jobs) => break jobs,
                None => std::thread::sleep(POLL_INTERVAL),
            }
        };
        let tasks_run = jobs.tasks.values().any(SlurmJobState::is_active);
        let merge_waits = jobs.merge.as_ref().is_some_and(SlurmJobState::is_active);
        if tasks_run {
            // The tasks are still running; the merge may have been cancelled, or never submitted.
            return if merge_waits { Ok(()) } else { self.submit_merge_job() };
        }
        if merge_waits {
            return Ok(());
        }
        let tolerance = AnchorTolerance(self.arguments.division.anchor_tolerance);
        match self.submission.missing_shards(&self.places, tolerance) {
            Ok(lacking) if !lacking.is_empty() => self.submit_shards(&lacking),
            Ok(_) if self.merge_exit_code().is_some() => Ok(()),
            Ok(_) => self.submit_merge_job(),
            Err(error) => {
                // The merge reports the error too, and decides the exit code.
                say(&format!("no shard is submitted again: {error}"));
                if self.merge_exit_code().is_some() { Ok(()) } else { self.submit_merge_job() }
            }
        }
    }

    /// Submits a job array for these shards, and a merge job that depends on the array.
    fn submit_shards(&mut self, shards: &BTreeSet<u32>) -> anyhow::Result<()> {
        let folder = self.places.folder.clone();
        let _ = std::fs::remove_file(self.places.exit_code_file());
        let array = slurm::array_option(shards.iter().copied());
        let id = self.run_sbatch(SHARD_SCRIPT, format!("--array={array}"))?;
        self.submission.arrays.push(id);
        self.submission.merge = None;
        self.save()?;
        self.submit_merge_job()?;
        say(&format!(
            "shards {array} of {} are job array {id}, merged by job {}; logs in {}",
            self.options.shards,
            self.submission.merge.unwrap_or_default(),
            printable_path(&folder.join("logs"))
        ));
        Ok(())
    }

    /// Submits the Slurm job that merges the shards' records. It starts when the last submitted job
    /// array has ended.
    fn submit_merge_job(&mut self) -> anyhow::Result<()> {
        let _ = std::fs::remove_file(self.places.exit_code_file());
        let Some(array) = self.submission.arrays.last() else { return Ok(()) };
        let merge = self.run_sbatch(MERGE_SCRIPT, format!("--dependency=afterany:{array}"));
        let merge = merge.with_context(|| {
            format!(
                "job array {array} goes on; when it has ended, `kernelgate merge {}` merges it",
                self.places.records_folder().display()
            )
        })?;
        self.submission.merge = Some(merge);
        self.save()
    }

    /// Submits a script of the folder, and returns the number of the job.
    fn run_sbatch(&self, script: &str, option: String) -> anyhow::Result<u64> {
        let mut command = Command::new("sbatch");
        command.arg("--parsable").arg(option);
        command.arg(format!("--comment={}", self.submission.comment(&self.places.folder)));
        command.arg(self.places.folder.join(script));
        commands::print_command(&command);
        let output = command.output().map_err(|cause| {
            anyhow::anyhow!("sbatch: {cause}: submit from a machine with Slurm's client programs")
        })?;
        let message = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(
            output.status.success(),
            "sbatch refused {script} ({}): {}",
            output.status,
            printable_on_terminal(message.trim())
        );
        let printed = String::from_utf8_lossy(&output.stdout);
        // With several clusters, sbatch prints "12;cluster".
        let id = printed.trim().split(';').next().and_then(|id| id.parse().ok());
        id.with_context(|| format!("sbatch printed `{}`, not a job", printed.trim()))
    }

    fn save(&self) -> anyhow::Result<()> {
        Ok(self.submission.save(&self.places.folder)?)
    }

    /// Exit code of the merge job, once it has ended.
    fn merge_exit_code(&self) -> Option<i32> {
        std::fs::read_to_string(self.places.exit_code_file()).ok()?.trim().parse().ok()
    }

    /// Waits for the merge, prints changes of state meanwhile, and then the result.
    fn follow_merge(&self) -> anyhow::Result<ExitReason> {
        let mut shown = PrintedTaskStates::default();
        let mut ended: Option<Instant> = None;
        loop {
            // Job states are read first, so that the states of the last tasks are printed before
            // the result.
            let (jobs, exit) = (self.jobs()?, self.merge_exit_code());
            if let Some(jobs) = &jobs {
                self.print_task_states(jobs, &mut shown);
            }
            if let Some(code) = exit {
                return self.print_merged_result(code);
            }
            if let Some(jobs) = jobs {
                ended = match jobs.any_active() {
                    true => None,
                    false => ended.or_else(|| Some(Instant::now())),
                };
                let failed = jobs.merge.as_ref().filter(|merge| merge.has_failed());
                if ended
                    .is_some_and(|ended| failed.is_some() || ended.elapsed() > RESULT_FILE_TIMEOUT)
                    && self.merge_exit_code().is_none()
                {
                    return Err(self.missing_result_error(failed));
                }
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Prints the states of tasks where they changed, and each task that failed.
    fn print_task_states(&self, jobs: &SlurmJobs, shown: &mut PrintedTaskStates) {
        let counts = jobs.counts_by_state();
        if !counts.is_empty() && counts != shown.counts {
            say(&counts);
            shown.counts = counts;
        }
        for (task, state) in jobs.tasks.iter().filter(|(_, state)| state.has_failed()) {
            if shown.failed.insert((*task, state.state.clone())) {
                self.print_failed_task(*task, state);
            }
        }
    }

    /// The reason why the jobs have ended without an exit code of the merge.
    fn missing_result_error(&self, merge: Option<&SlurmJobState>) -> anyhow::Error {
        let log = self.places.log("merge");
        print_log_end(&log);
        let (log, exit) = (log.display(), self.places.exit_code_file());
        match merge {
            Some(merge) => anyhow::anyhow!(
                "the merge, job {}, is {} ({}) and has no result: see {log}; the same command with \
                 --resume submits what is missing",
                self.submission.merge.unwrap_or_default(),
                merge.state,
                merge.reason
            ),
            None => anyhow::anyhow!(
                "the jobs have left the queue and {} is not there: see {log}; is the folder on a \
                 file system that all nodes share, with room left? --resume submits what is missing",
                exit.display()
            ),
        }
    }

    /// Prints the result of the merge job.
    fn print_merged_result(&self, code: i32) -> anyhow::Result<ExitReason> {
        for (shard, used) in shard_retries(&self.places, self.options.shards) {
            say(&format!("shard {shard}: {used} of {} further attempts", self.options.retries));
        }
        let result = self.places.result_folder().with_extension("txt");
        let text = std::fs::read_to_string(&result).unwrap_or_default();
        print!("{}", printable_on_terminal(&text));
        let exit = ExitReason::from_code(code).with_context(|| {
            format!("the merge ended with code {code}: see {}", self.places.log("merge").display())
        })?;
        if exit == ExitReason::Usage {
            print_log_end(&self.places.log("merge"));
        }
        if ["missing: ", "interrupted: "].iter().any(|word| text.contains(word)) {
            say("the same command with --resume submits these shards again");
        }
        Ok(exit)
    }

    /// States of the current jobs; absent while Slurm does not answer.
    fn jobs(&self) -> anyhow::Result<Option<SlurmJobs>> {
        let Some(array) = self.submission.arrays.last().copied() else {
            return Ok(Some(SlurmJobs::default()));
        };
        let merge = self.submission.merge;
        let ids = merge.map_or_else(|| array.to_string(), |merge| format!("{array},{merge}"));
        let printed = run_squeue(&["--array", &format!("--jobs={ids}")])?;
        Ok(printed.map(|printed| SlurmJobs::parse(&printed, array, merge)))
    }

    fn print_failed_task(&self, task: u32, state: &SlurmJobState) {
        let log = self.places.log(&task.to_string());
        let on = if state.node.is_empty() { String::new() } else { format!(" on {}", state.node) };
        say(&format!("task {task}: {}{on} ({})", state.state, state.reason));
        match log.exists() {
            true => print_log_end(&log),
            false => say(&format!(
                "task {task}: no log {}: it did not start, or its node does not see this folder",
                log.display()
            )),
        }
    }
}

/// Prints the last lines of a job's log.
fn print_log_end(log: &Path) {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    for line in &lines[lines.len().saturating_sub(SHOWN_LOG_LINES)..] {
        say(&format!("  {line}"));
    }
}

fn say(text: &str) {
    eprintln!("submit: {}", printable_on_terminal(text));
}

/// Lists Slurm jobs, including jobs that ended recently; absent while Slurm does not answer.
fn run_squeue(arguments: &[&str]) -> anyhow::Result<Option<String>> {
    let mut command = Command::new("squeue");
    command.args(["--noheader", "--states=all"]).args(arguments);
    command.arg(format!("--format={}", slurm::SQUEUE_LINE_FORMAT));
    commands::print_command(&command);
    let output = command.output().map_err(|cause| {
        anyhow::anyhow!("squeue: {cause}: submit from a machine with Slurm's client programs")
    })?;
    let message = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() && !message.contains("Invalid job id") {
        say(&format!("squeue: {}", message.trim()));
        return Ok(None);
    }
    Ok(Some(String::from_utf8_lossy(&output.stdout).into_owned()))
}
