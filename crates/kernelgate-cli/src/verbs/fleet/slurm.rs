//! `kernelgate submit slurm`: builds the benches, submits shards as Slurm jobs, waits for them, and
//! resumes an interrupted submission.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use kernelgate::exit::ProcessExitReason;
use kernelgate::record::text::{clean_message_for_terminal, path_for_terminal};
use kernelgate::record::{RecordFoldersOfPackage, current_time_for_records, file};

use super::work_division::{ShardDivisionFlags, VerbOfShards, without_base_and_head_flags};
use crate::benches::child_process::SharedChildProcess;
use crate::commands;
use crate::fleet::counted_shards::MaxAnchorRateDifference;
use crate::fleet::job_commands::{ClusterSubmissionPaths, WorkDividedIntoShards};
use crate::fleet::slurm::{self, SlurmJobOptions, SlurmJobStates, SlurmTaskState};
use crate::fleet::submission::{ClusterSubmission, SUBMISSION_FILE_NAME, repetitions_of_shards};
use crate::verbs::shared::bench_flags::BenchExecutableFlags;
use crate::verbs::shared::interrupt;

/// Pause between two calls of Slurm's `squeue`.
const SQUEUE_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Longest wait until a file that a Slurm job wrote on another node appears on this machine.
const MERGE_RESULT_FILE_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of lines at the end of a failed Slurm task's log that are printed.
const PRINTED_LAST_LOG_LINES: usize = 8;
/// Name of the script that runs a shard, in the folder of a Slurm submission.
const SHARD_SCRIPT_FILE: &str = "shards.sh";
const MERGE_SCRIPT_FILE: &str = "merge.sh";

#[derive(Debug, clap::Args)]
pub struct SlurmSubmitArguments {
    #[command(flatten)]
    division: ShardDivisionFlags,
    /// Partition of the jobs
    #[arg(long = "partition", value_name = "NAME")]
    slurm_partition: Option<String>,
    /// Generic resources of a Slurm task, for example gpu:h200:1; no other task uses the GPU
    #[arg(long = "gres", value_name = "LIST")]
    slurm_generic_resources: Option<String>,
    /// Time limit of a Slurm task, in the notation of sbatch
    #[arg(id = "time", long = "time", value_name = "TIME")]
    task_time_limit: Option<String>,
    /// Another option of sbatch for the job array, for example --sbatch=--constraint=nvlink
    /// (repeatable)
    #[arg(long = "sbatch", value_name = "OPTION", allow_hyphen_values = true)]
    sbatch_options: Vec<String>,
    /// Folder of the submission, which every node sees under the same path [default:
    /// kernelgate/submit/ of the target folder]
    #[arg(id = "folder", long = "folder", value_name = "DIR")]
    submission_folder: Option<PathBuf>,
    /// Follow the Slurm submission in the folder; when its jobs have ended, submit missing shards
    /// again
    #[arg(id = "resume", long = "resume")]
    resumes_submission: bool,
    /// Print the scripts of both Slurm jobs, and submit nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    benches: BenchExecutableFlags,
}

/// A Slurm submission whose jobs this process waits for.
struct FollowedSlurmSubmission<'a> {
    arguments: &'a SlurmSubmitArguments,
    places: ClusterSubmissionPaths,
    options: SlurmJobOptions,
    submission: ClusterSubmission,
    running: SharedChildProcess,
}

/// States of Slurm tasks that this process has already printed, so that only changes are printed.
#[derive(Default)]
struct PrintedSlurmTaskStates {
    printed_state_counts: String,
    printed_failed_tasks: BTreeSet<(u32, String)>,
}

/// Submits the work to Slurm and waits for its result, or prints the job scripts.
///
/// # Errors
/// Fails if the benches cannot be built, Slurm refuses a job, or the jobs end without a result.
pub fn submit_to_slurm(
    arguments: &SlurmSubmitArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    let division = &arguments.division;
    let (verb, flags) = division.split_into_verb_and_flags()?;
    let folder = arguments
        .submission_folder
        .clone()
        .unwrap_or_else(|| store.generated_files_folder.join("submit"));
    let here = std::env::current_dir().context("failed to find the working folder")?;
    let folder = here.join(folder);
    let places = ClusterSubmissionPaths {
        kernelgate_program: folder.join("kernelgate"),
        package_folder: here.join(&store.package_root),
        submission_folder: folder.clone(),
    };
    let options = SlurmJobOptions {
        shard_count: division.shard_count,
        slurm_partition: arguments.slurm_partition.clone(),
        slurm_gres: arguments.slurm_generic_resources.clone(),
        slurm_time_limit: arguments.task_time_limit.clone(),
        max_retries_per_shard: division.max_retries_per_shard,
        extra_sbatch_options: arguments.sbatch_options.clone(),
    };
    let running = interrupt::print_and_exit_on_interrupt(|| {
        ": jobs that were submitted go on; --resume follows them".to_owned()
    })?;
    if arguments.dry_run {
        let work = build_executables_for_jobs(arguments, &places, verb, flags, (false, &running))?;
        print!("{}", options.job_array_script(&work, &places));
        print!("\n# The merge, when every task has ended.\n");
        print!(
            "{}",
            options.merge_job_script(&work, &places, division.max_relative_anchor_difference)
        );
        return Ok(ProcessExitReason::Success);
    }
    let submission = ClusterSubmission {
        submission_time: current_time_for_records(),
        shard_command_words: division.shard_command.clone(),
        shard_count: division.shard_count,
        slurm_job_array_ids: Vec::new(),
        slurm_merge_job_id: None,
    };
    let submission = match arguments.resumes_submission {
        true => submission.resume_from_folder(&folder)?,
        false => submission.claim_submission_folder(&folder)?,
    };
    let mut followed = FollowedSlurmSubmission { arguments, places, options, submission, running };
    if arguments.resumes_submission {
        followed.adopt_slurm_jobs_without_record()?;
    }
    if !followed.submission.slurm_job_array_ids.is_empty() {
        followed.resubmit_missing_shards_or_merge()?;
    } else if let Err(error) = followed.write_scripts_and_submit_all_shards(verb, flags) {
        // If no Slurm job was submitted, the submission file, which claims the folder, is removed.
        // Slurm may have accepted a job even if `sbatch` failed.
        let _ = followed.adopt_slurm_jobs_without_record();
        if followed.submission.slurm_job_array_ids.is_empty() {
            let _ = std::fs::remove_file(folder.join(SUBMISSION_FILE_NAME));
        }
        return Err(error);
    }
    followed.wait_for_merge_and_print_result()
}

/// Copies the bench executables into the submission folder, which every node can read, and
/// describes the work of the jobs. For `kernelgate compare`, base and head are built only if jobs
/// are submitted, not if scripts are only printed.
fn build_executables_for_jobs(
    arguments: &SlurmSubmitArguments,
    places: &ClusterSubmissionPaths,
    verb: VerbOfShards,
    flags: &[String],
    (submits, running): (bool, &SharedChildProcess),
) -> anyhow::Result<WorkDividedIntoShards> {
    if verb == VerbOfShards::CompareBuilds {
        let builds = places.submission_folder.join("builds");
        if submits {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("compare").args(flags).arg("--build-only").arg(&builds);
            commands::print_command_if_verbose(&command);
            let status = command.status().context("failed to start the build")?;
            anyhow::ensure!(status.success(), "the sides were not built: nothing was submitted");
        }
        let sides = [builds.join("base"), builds.join("head")];
        return Ok(WorkDividedIntoShards::RunCompare {
            sides,
            compare_flags: without_base_and_head_flags(flags),
        });
    }
    let found = arguments.benches.find_selected_benches(&places.package_folder, running)?;
    let bin = places.submission_folder.join("bin");
    let mut executables = Vec::new();
    for executable in found.usable_executables {
        let copy = bin.join(&executable.bench_name);
        if submits {
            std::fs::create_dir_all(&bin)
                .and_then(|()| std::fs::copy(&executable.executable_path, &copy).map(drop))
                .with_context(|| {
                    format!("failed to copy {}", executable.executable_path.display())
                })?;
        }
        executables.push((copy, executable.package_root));
    }
    let flags = flags.to_vec();
    Ok(match verb {
        VerbOfShards::CalibrateThresholds => {
            WorkDividedIntoShards::RunCalibrate { executables_folder: bin, calibrate_flags: flags }
        }
        _ => WorkDividedIntoShards::RunBenches {
            executables_with_package_folders: executables,
            bench_flags: flags,
        },
    })
}

impl FollowedSlurmSubmission<'_> {
    /// Writes the job scripts and submits a Slurm array with all shards.
    fn write_scripts_and_submit_all_shards(
        &mut self,
        verb: VerbOfShards,
        flags: &[String],
    ) -> anyhow::Result<()> {
        let folder = &self.places.submission_folder;
        for name in ["records", "logs", "attempts"] {
            let path = folder.join(name);
            std::fs::create_dir_all(&path)
                .with_context(|| format!("failed to make {}", path.display()))?;
        }
        let program = std::env::current_exe()?;
        std::fs::copy(&program, &self.places.kernelgate_program)
            .with_context(|| format!("failed to copy {}", program.display()))?;
        let work = build_executables_for_jobs(
            self.arguments,
            &self.places,
            verb,
            flags,
            (true, &self.running),
        )?;
        let tolerance = self.arguments.division.max_relative_anchor_difference;
        for (name, script) in [
            (SHARD_SCRIPT_FILE, self.options.job_array_script(&work, &self.places)),
            (MERGE_SCRIPT_FILE, self.options.merge_job_script(&work, &self.places, tolerance)),
        ] {
            file::write_text_atomically(&folder.join(name), &script)?;
        }
        self.submit_shard_array_and_merge_job(&(1..=self.options.shard_count).collect())
    }

    /// Finds Slurm jobs that an interrupted kernelgate process submitted without recording their
    /// job ids.
    fn adopt_slurm_jobs_without_record(&mut self) -> anyhow::Result<()> {
        let Some(printed) = run_squeue_if_it_answers(&["--me"])? else { return Ok(()) };
        let comment = self.submission.slurm_job_comment(&self.places.submission_folder);
        let [arrays, merges] = slurm::job_ids_with_comment(&printed, &comment);
        let last = self.submission.slurm_job_array_ids.iter().max().copied();
        let new: Vec<u64> = arrays.into_iter().filter(|id| Some(*id) > last).collect();
        // A merge job that was submitted before the newest Slurm array does not wait for that
        // array.
        let newest = new.last().copied().or(last);
        let merge = merges.last().copied().filter(|id| Some(*id) > newest);
        if new.is_empty() && (merge.is_none() || merge <= self.submission.slurm_merge_job_id) {
            return Ok(());
        }
        self.submission.slurm_job_array_ids.extend(new);
        self.submission.slurm_merge_job_id = merge;
        self.save_submission_file()
    }

    /// Submits the shards whose tasks ended without a usable record, and a merge job if there is
    /// none.
    fn resubmit_missing_shards_or_merge(&mut self) -> anyhow::Result<()> {
        let jobs = loop {
            match self.job_states()? {
                Some(jobs) => break jobs,
                None => std::thread::sleep(SQUEUE_POLL_INTERVAL),
            }
        };
        let tasks_run = jobs.states_of_shards.values().any(SlurmTaskState::is_running_or_queued);
        let merge_waits =
            jobs.state_of_merge_job.as_ref().is_some_and(SlurmTaskState::is_running_or_queued);
        if tasks_run {
            // Slurm tasks of the shards are still running; their merge job may have been cancelled,
            // or never submitted.
            return if merge_waits { Ok(()) } else { self.submit_merge_job_after_array() };
        }
        if merge_waits {
            return Ok(());
        }
        let tolerance =
            MaxAnchorRateDifference(self.arguments.division.max_relative_anchor_difference);
        match self.submission.shards_to_repeat(&self.places, tolerance) {
            Ok(lacking) if !lacking.is_empty() => self.submit_shard_array_and_merge_job(&lacking),
            Ok(_) if self.merge_exit_code().is_some() => Ok(()),
            Ok(_) => self.submit_merge_job_after_array(),
            Err(error) => {
                // The merge job prints the same error, and its exit code becomes the exit code of
                // the submission.
                print_to_stderr(&format!("no shard is submitted again: {error}"));
                if self.merge_exit_code().is_some() {
                    Ok(())
                } else {
                    self.submit_merge_job_after_array()
                }
            }
        }
    }

    /// Submits a Slurm job array for these shards, and a merge job that starts after the array.
    fn submit_shard_array_and_merge_job(&mut self, shards: &BTreeSet<u32>) -> anyhow::Result<()> {
        let folder = self.places.submission_folder.clone();
        let _ = std::fs::remove_file(self.places.merge_exit_code_file());
        let array = slurm::sbatch_array_ranges(shards.iter().copied());
        let id = self.submit_script_with_sbatch(SHARD_SCRIPT_FILE, format!("--array={array}"))?;
        self.submission.slurm_job_array_ids.push(id);
        self.submission.slurm_merge_job_id = None;
        self.save_submission_file()?;
        self.submit_merge_job_after_array()?;
        print_to_stderr(&format!(
            "shards {array} of {} are job array {id}, merged by job {}; logs in {}",
            self.options.shard_count,
            self.submission.slurm_merge_job_id.unwrap_or_default(),
            path_for_terminal(&folder.join("logs"))
        ));
        Ok(())
    }

    /// Submits the Slurm job that merges the records of the shards. The merge job starts when all
    /// tasks of the last submitted job array have ended.
    fn submit_merge_job_after_array(&mut self) -> anyhow::Result<()> {
        let _ = std::fs::remove_file(self.places.merge_exit_code_file());
        let Some(array) = self.submission.slurm_job_array_ids.last() else { return Ok(()) };
        let merge = self
            .submit_script_with_sbatch(MERGE_SCRIPT_FILE, format!("--dependency=afterany:{array}"));
        let merge = merge.with_context(|| {
            format!(
                "job array {array} goes on; when it has ended, `kernelgate merge {}` merges it",
                self.places.shard_records_folder().display()
            )
        })?;
        self.submission.slurm_merge_job_id = Some(merge);
        self.save_submission_file()
    }

    /// Submits a script of the submission folder with `sbatch`, and returns the id of the Slurm
    /// job.
    fn submit_script_with_sbatch(&self, script: &str, option: String) -> anyhow::Result<u64> {
        let mut command = Command::new("sbatch");
        command.arg("--parsable").arg(option);
        command.arg(format!(
            "--comment={}",
            self.submission.slurm_job_comment(&self.places.submission_folder)
        ));
        command.arg(self.places.submission_folder.join(script));
        commands::print_command_if_verbose(&command);
        let output = command.output().map_err(|cause| {
            anyhow::anyhow!("sbatch: {cause}: submit from a machine with Slurm's client programs")
        })?;
        let message = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(
            output.status.success(),
            "sbatch refused {script} ({}): {}",
            output.status,
            clean_message_for_terminal(message.trim())
        );
        let printed = String::from_utf8_lossy(&output.stdout);
        // With several clusters, sbatch prints the job id and the cluster: "12;cluster".
        let id = printed.trim().split(';').next().and_then(|id| id.parse().ok());
        id.with_context(|| format!("sbatch printed `{}`, not a job", printed.trim()))
    }

    fn save_submission_file(&self) -> anyhow::Result<()> {
        Ok(self.submission.save_in_folder(&self.places.submission_folder)?)
    }

    /// Exit code that the merge job wrote; `None` until the merge job has ended.
    fn merge_exit_code(&self) -> Option<i32> {
        std::fs::read_to_string(self.places.merge_exit_code_file()).ok()?.trim().parse().ok()
    }

    /// Waits until the merge job has ended, printing changes of the tasks' states, and then prints
    /// the merged result.
    fn wait_for_merge_and_print_result(&self) -> anyhow::Result<ProcessExitReason> {
        let mut shown = PrintedSlurmTaskStates::default();
        let mut ended: Option<Instant> = None;
        loop {
            // The states of the jobs are read before the merge's exit code, so that the last states
            // are printed before the result.
            let (jobs, exit) = (self.job_states()?, self.merge_exit_code());
            if let Some(jobs) = &jobs {
                self.print_changed_task_states(jobs, &mut shown);
            }
            if let Some(code) = exit {
                return self.print_result_of_merge_job(code);
            }
            if let Some(jobs) = jobs {
                ended = match jobs.has_active_job() {
                    true => None,
                    false => ended.or_else(|| Some(Instant::now())),
                };
                let failed =
                    jobs.state_of_merge_job.as_ref().filter(|merge| merge.ended_without_success());
                if ended.is_some_and(|ended| {
                    failed.is_some() || ended.elapsed() > MERGE_RESULT_FILE_TIMEOUT
                }) && self.merge_exit_code().is_none()
                {
                    return Err(self.error_without_merge_result(failed));
                }
            }
            std::thread::sleep(SQUEUE_POLL_INTERVAL);
        }
    }

    /// Prints the number of tasks in each state if it changed, and each Slurm task that failed
    /// since the last call.
    fn print_changed_task_states(&self, jobs: &SlurmJobStates, shown: &mut PrintedSlurmTaskStates) {
        let counts = jobs.task_counts_by_state();
        if !counts.is_empty() && counts != shown.printed_state_counts {
            print_to_stderr(&counts);
            shown.printed_state_counts = counts;
        }
        for (task, state) in
            jobs.states_of_shards.iter().filter(|(_, state)| state.ended_without_success())
        {
            if shown.printed_failed_tasks.insert((*task, state.slurm_state.clone())) {
                self.print_failed_task_with_log(*task, state);
            }
        }
    }

    /// The error for Slurm jobs that have ended although the merge job wrote no exit code.
    fn error_without_merge_result(&self, merge: Option<&SlurmTaskState>) -> anyhow::Error {
        let log = self.places.shard_log_file("merge");
        print_last_log_lines(&log);
        let (log, exit) = (log.display(), self.places.merge_exit_code_file());
        match merge {
            Some(merge) => anyhow::anyhow!(
                "the merge, job {}, is {} ({}) and has no result: see {log}; the same command with \
                 --resume submits what is missing",
                self.submission.slurm_merge_job_id.unwrap_or_default(),
                merge.slurm_state,
                merge.slurm_state_reason
            ),
            None => anyhow::anyhow!(
                "the jobs have left the queue and {} is not there: see {log}; is the folder on a \
                 file system that all nodes share, with room left? --resume submits what is missing",
                exit.display()
            ),
        }
    }

    /// Prints the result of the merge job, and returns its exit code.
    fn print_result_of_merge_job(&self, code: i32) -> anyhow::Result<ProcessExitReason> {
        for (shard, used) in repetitions_of_shards(&self.places, self.options.shard_count) {
            print_to_stderr(&format!(
                "shard {shard}: {used} of {} further attempts",
                self.options.max_retries_per_shard
            ));
        }
        let result = self.places.merged_result_folder().with_extension("txt");
        let text = std::fs::read_to_string(&result).unwrap_or_default();
        print!("{}", clean_message_for_terminal(&text));
        let exit = ProcessExitReason::from_exit_code(code).with_context(|| {
            format!(
                "the merge ended with code {code}: see {}",
                self.places.shard_log_file("merge").display()
            )
        })?;
        if exit == ProcessExitReason::InvalidUsageOrInput {
            print_last_log_lines(&self.places.shard_log_file("merge"));
        }
        if ["missing: ", "interrupted: "].iter().any(|word| text.contains(word)) {
            print_to_stderr("the same command with --resume submits these shards again");
        }
        Ok(exit)
    }

    /// States of this submission's Slurm jobs; `None` while Slurm does not answer.
    fn job_states(&self) -> anyhow::Result<Option<SlurmJobStates>> {
        let Some(array) = self.submission.slurm_job_array_ids.last().copied() else {
            return Ok(Some(SlurmJobStates::default()));
        };
        let merge = self.submission.slurm_merge_job_id;
        let ids = merge.map_or_else(|| array.to_string(), |merge| format!("{array},{merge}"));
        let printed = run_squeue_if_it_answers(&["--array", &format!("--jobs={ids}")])?;
        Ok(printed.map(|printed| SlurmJobStates::parse_squeue_output(&printed, array, merge)))
    }

    fn print_failed_task_with_log(&self, task: u32, state: &SlurmTaskState) {
        let log = self.places.shard_log_file(&task.to_string());
        let on = if state.slurm_node.is_empty() {
            String::new()
        } else {
            format!(" on {}", state.slurm_node)
        };
        print_to_stderr(&format!(
            "task {task}: {}{on} ({})",
            state.slurm_state, state.slurm_state_reason
        ));
        match log.exists() {
            true => print_last_log_lines(&log),
            false => print_to_stderr(&format!(
                "task {task}: no log {}: it did not start, or its node does not see this folder",
                log.display()
            )),
        }
    }
}

/// Prints the last lines of the log of a failed Slurm task.
fn print_last_log_lines(log: &Path) {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    for line in &lines[lines.len().saturating_sub(PRINTED_LAST_LOG_LINES)..] {
        print_to_stderr(&format!("  {line}"));
    }
}

fn print_to_stderr(text: &str) {
    eprintln!("submit: {}", clean_message_for_terminal(text));
}

/// Lists Slurm jobs with `squeue`, including jobs that ended recently; `None` while Slurm does not
/// answer.
fn run_squeue_if_it_answers(arguments: &[&str]) -> anyhow::Result<Option<String>> {
    let mut command = Command::new("squeue");
    command.args(["--noheader", "--states=all"]).args(arguments);
    command.arg(format!("--format={}", slurm::SQUEUE_LINE_FORMAT));
    commands::print_command_if_verbose(&command);
    let output = command.output().map_err(|cause| {
        anyhow::anyhow!("squeue: {cause}: submit from a machine with Slurm's client programs")
    })?;
    let message = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() && !message.contains("Invalid job id") {
        print_to_stderr(&format!("squeue: {}", message.trim()));
        return Ok(None);
    }
    Ok(Some(String::from_utf8_lossy(&output.stdout).into_owned()))
}
