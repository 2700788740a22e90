//! Writes the Slurm job scripts for shards and merge, and parses job states from `squeue`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::job_commands::{
    ClusterSubmissionPaths, WorkDividedIntoShards, shell_quoted_if_necessary,
};

/// Options of the Slurm job array that runs the shards, and of its merge job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlurmJobOptions {
    /// Number of shards.
    pub shard_count: u32,
    /// Slurm partition for the job array of the shards and for the merge job.
    pub slurm_partition: Option<String>,
    /// Generic resources (GRES) that each task of the Slurm job array requests: "gpu:h200:1";
    /// `None` for the CPU.
    pub slurm_gres: Option<String>,
    /// Time limit of each task of the Slurm job array, in Slurm's format.
    pub slurm_time_limit: Option<String>,
    /// Number of times that the cluster's scheduler repeats a shard that failed.
    pub max_retries_per_shard: u32,
    /// Further `sbatch` options for the job array of the shards: "--constraint=nvlink".
    pub extra_sbatch_options: Vec<String>,
}

impl SlurmJobOptions {
    fn sbatch_directives(&self, name: &str, log: &str) -> String {
        let mut lines = format!("#SBATCH --job-name={name}\n");
        if let Some(partition) = &self.slurm_partition {
            let _ = writeln!(lines, "#SBATCH --partition={partition}");
        }
        let _ = writeln!(lines, "#SBATCH --ntasks=1\n#SBATCH --output={log}");
        lines
    }

    /// Returns the script of the Slurm job array, in which each task measures one shard.
    pub fn job_array_script(
        &self,
        work: &WorkDividedIntoShards,
        places: &ClusterSubmissionPaths,
    ) -> String {
        let Self { shard_count: shards, max_retries_per_shard: retries, .. } = self;
        let folder = shell_quoted_if_necessary(&places.submission_folder.display().to_string());
        let log = places.shard_log_file("%a").display().to_string();
        let mut script = format!(
            "#!/bin/bash\n{}#SBATCH --array=1-{shards}\n#SBATCH --requeue\n\
             #SBATCH --open-mode=append\n",
            self.sbatch_directives("kernelgate", &log)
        );
        // With `--gres`, Slurm gives each requested GPU to only one task at a time.
        let gres = self.slurm_gres.iter().map(|gres| format!("#SBATCH --gres={gres}\n"));
        let time = self.slurm_time_limit.iter().map(|time| format!("#SBATCH --time={time}\n"));
        let options = self.extra_sbatch_options.iter().map(|option| format!("#SBATCH {option}\n"));
        script.extend(gres.chain(time).chain(options));
        let _ = write!(
            script,
            "\nattempt=${{SLURM_RESTART_COUNT:-0}}\n\
             export KERNELGATE_SHARD=$SLURM_ARRAY_TASK_ID/{shards}\n\
             echo \"shard $KERNELGATE_SHARD, attempt $attempt on $(hostname) at $(date -Is)\"\n\
             if [ ! -d {folder}/records ]; then\n\
             \x20 echo \"error: {folder} is not visible here: choose --folder on a shared file system\" >&2\n\
             \x20 exit 2\n\
             fi\n\
             echo \"$attempt $(hostname)\" >> {folder}/attempts/$SLURM_ARRAY_TASK_ID\n\n"
        );
        script += &work.shell_lines_of_shard(places, "job-$SLURM_ARRAY_JOB_ID-attempt-$attempt");
        let _ = write!(
            script,
            "\n# 0: measured. 1: a case is wrong, which another attempt does not change.\n\
             if [ $code -gt 1 ] && [ $attempt -lt {retries} ]; then\n\
             \x20 echo \"exit code $code: again, {retries} attempts after the first\"\n\
             \x20 scontrol requeue ${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID && sleep 60\n\
             fi\n\
             exit $code\n"
        );
        script
    }

    /// Returns the script of the Slurm job that merges the shards' records after all tasks of the
    /// array have ended.
    pub fn merge_job_script(
        &self,
        work: &WorkDividedIntoShards,
        places: &ClusterSubmissionPaths,
        tolerance: Option<f64>,
    ) -> String {
        let log = places.shard_log_file("merge").display().to_string();
        let directives = self.sbatch_directives("kernelgate-merge", &log);
        format!("#!/bin/bash\n{directives}\n{}", work.shell_lines_of_merge(places, tolerance))
    }
}

/// Format of `squeue` that [`SlurmJobStates::parse_squeue_output`] and [`job_ids_with_comment`]
/// parse: job, task, state, node, reason and comment.
pub const SQUEUE_LINE_FORMAT: &str = "%F|%K|%T|%N|%r|%k";

/// States of the Slurm jobs of one submission; jobs that Slurm no longer lists are absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlurmJobStates {
    /// States of the tasks of the Slurm job array, by task number.
    pub states_of_shards: BTreeMap<u32, SlurmTaskState>,
    pub state_of_merge_job: Option<SlurmTaskState>,
}

impl SlurmJobStates {
    /// Parses the output of `squeue` for the states of one job array and of its merge job.
    pub fn parse_squeue_output(printed: &str, array: u64, merge: Option<u64>) -> SlurmJobStates {
        let mut jobs = Self::default();
        for (job, task, state) in printed.lines().filter_map(parse_squeue_line) {
            match task.parse() {
                Ok(task) if job == array => drop(jobs.states_of_shards.insert(task, state)),
                _ if Some(job) == merge => jobs.state_of_merge_job = Some(state),
                _ => {}
            }
        }
        jobs
    }

    /// Returns whether any Slurm job of the submission is running or queued.
    pub fn has_active_job(&self) -> bool {
        self.states_of_shards
            .values()
            .chain(&self.state_of_merge_job)
            .any(SlurmTaskState::is_running_or_queued)
    }

    /// Counts the array's tasks by state: "3 running, 5 pending (Priority)"; empty if Slurm no
    /// longer lists the tasks.
    pub fn task_counts_by_state(&self) -> String {
        let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for SlurmTaskState { slurm_state: state, slurm_state_reason: reason, .. } in
            self.states_of_shards.values()
        {
            let reason = if reason == "None" || state != "PENDING" { "" } else { reason };
            *counts.entry((state, reason)).or_default() += 1;
        }
        let text = |((state, reason), count): ((&str, &str), usize)| {
            let why = if reason.is_empty() { String::new() } else { format!(" ({reason})") };
            format!("{count} {}{why}", state.to_lowercase())
        };
        counts.into_iter().map(text).collect::<Vec<_>>().join(", ")
    }
}

fn parse_squeue_line(line: &str) -> Option<(u64, &str, SlurmTaskState)> {
    let mut fields = line.trim().splitn(6, '|');
    let (job, task) = (fields.next()?.parse().ok()?, fields.next()?);
    let [state, node, reason] = [fields.next()?, fields.next()?, fields.next()?];
    let [state, node, reason] = [state, node, reason].map(str::to_owned);
    Some((
        job,
        task,
        SlurmTaskState { slurm_state: state, slurm_node: node, slurm_state_reason: reason },
    ))
}

/// Returns the ids of the job arrays (first) and other jobs (second) that `squeue` lists with this
/// comment, sorted.
pub fn job_ids_with_comment(printed: &str, comment: &str) -> [Vec<u64>; 2] {
    let mut found = [BTreeSet::new(), BTreeSet::new()];
    for line in printed.lines() {
        let fields: Vec<&str> = line.trim().splitn(6, '|').collect();
        if let [job, task, .., own] = fields[..]
            && let Ok(job) = job.parse()
            && own == comment
        {
            found[usize::from(task == "N/A")].insert(job);
        }
    }
    found.map(|jobs| jobs.into_iter().collect())
}

/// Formats task numbers for the option `--array` of `sbatch`: "1-3,7".
pub fn sbatch_array_ranges(numbers: impl IntoIterator<Item = u32>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let text = |(first, last): &(u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    ranges.iter().map(text).collect::<Vec<_>>().join(",")
}

/// State of one task of a Slurm job array, or of a Slurm job without tasks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlurmTaskState {
    /// Slurm's name of the state: "RUNNING".
    pub slurm_state: String,
    /// Node on which the task or job runs; empty if it has no node.
    pub slurm_node: String,
    pub slurm_state_reason: String,
}

impl SlurmTaskState {
    /// Returns whether the Slurm task or job is running or queued.
    pub fn is_running_or_queued(&self) -> bool {
        self.slurm_state != "COMPLETED" && !self.ended_without_success()
    }

    /// Returns whether the Slurm task or job ended without success.
    pub fn ended_without_success(&self) -> bool {
        let failed = ["FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"];
        failed.contains(&&*self.slurm_state)
            || ["PREEMPTED", "DEADLINE", "REVOKED"].contains(&&*self.slurm_state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slurm_job_scripts_have_the_expected_text() {
        let places = ClusterSubmissionPaths {
            kernelgate_program: "/opt/kernelgate".into(),
            package_folder: "/home/me/kernels".into(),
            submission_folder: "/shared/run".into(),
        };
        let options = SlurmJobOptions {
            shard_count: 8,
            slurm_partition: Some("gpu".to_owned()),
            slurm_gres: Some("gpu:h200:1".to_owned()),
            slurm_time_limit: Some("30".to_owned()),
            max_retries_per_shard: 2,
            extra_sbatch_options: vec!["--constraint=nvlink".to_owned()],
        };
        let flags = vec!["forward".to_owned()];
        let work = WorkDividedIntoShards::RunCalibrate {
            executables_folder: "/shared/run/bin".into(),
            calibrate_flags: flags,
        };
        let scripts = options.job_array_script(&work, &places)
            + "-- merge\n"
            + &options.merge_job_script(&work, &places, None);
        insta::assert_snapshot!(scripts);
    }

    const TEST_SQUEUE_OUTPUT: &str = "7|3|RUNNING|n1|None|one\n\
                           7|4|PENDING||Resources|one\n\
                           7|5|FAILED|n2|NonZeroExitCode|one\n\
                           8|N/A|PENDING||Dependency|one\n\
                           9|3|RUNNING|n1|None|two\n\nx|y\n";

    #[test]
    fn states_of_a_job_array_are_parsed_by_task() {
        let jobs = SlurmJobStates::parse_squeue_output(TEST_SQUEUE_OUTPUT, 7, Some(8));
        assert_eq!(jobs.states_of_shards.keys().copied().collect::<Vec<_>>(), [3, 4, 5]);
        assert!(
            jobs.states_of_shards[&5].ended_without_success()
                && !jobs.states_of_shards[&3].ended_without_success()
        );
        assert_eq!(
            (
                &*jobs.states_of_shards[&5].slurm_node,
                &*jobs.states_of_shards[&4].slurm_state_reason
            ),
            ("n2", "Resources")
        );
        assert_eq!(jobs.task_counts_by_state(), "1 failed, 1 pending (Resources), 1 running");
        assert_eq!(
            jobs.state_of_merge_job.as_ref().map(|merge| &*merge.slurm_state),
            Some("PENDING")
        );
        assert!(jobs.has_active_job());
    }

    #[test]
    fn jobs_whose_tasks_and_merge_have_ended_are_inactive() {
        let ended =
            TEST_SQUEUE_OUTPUT.replace("RUNNING", "CANCELLED").replace("PENDING", "COMPLETED");
        assert!(!SlurmJobStates::parse_squeue_output(&ended, 7, Some(8)).has_active_job());
        // In this test, a task that Slurm requeued counts as waiting, so the submission is still
        // active.
        let requeued = ended.replace("FAILED", "REQUEUED");
        assert!(SlurmJobStates::parse_squeue_output(&requeued, 7, Some(8)).has_active_job());
        assert!(!SlurmJobStates::parse_squeue_output("", 7, None).has_active_job());
    }

    #[test]
    fn slurm_jobs_of_a_submission_are_found_by_their_comment() {
        assert_eq!(job_ids_with_comment(TEST_SQUEUE_OUTPUT, "one"), [vec![7], vec![8]]);
        assert_eq!(job_ids_with_comment(TEST_SQUEUE_OUTPUT, "two"), [vec![9], vec![]]);
        assert!(job_ids_with_comment(TEST_SQUEUE_OUTPUT, "on").iter().all(Vec::is_empty));
    }

    #[test]
    fn task_numbers_are_formatted_as_ranges_for_sbatch() {
        assert_eq!(sbatch_array_ranges([1, 2, 3, 7, 9, 10]), "1-3,7,9-10");
        assert_eq!(sbatch_array_ranges([]), "");
    }
}
