//! Writes Slurm job scripts as a person would write them, and reads the states of Slurm's tasks.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::job_commands::{DividedWork, SubmissionPlaces, shell_quoted};

/// Options of the array.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlurmOptions {
    /// Number of shards.
    pub shards: u32,
    /// Partition of both jobs.
    pub partition: Option<String>,
    /// Generic resources (GRES) of a Slurm task: "gpu:h200:1".
    pub gres: Option<String>,
    /// Time limit of a Slurm task, in Slurm's format.
    pub time: Option<String>,
    /// Number of further attempts of a shard that failed.
    pub retries: u32,
    /// Further `sbatch` options for the job array: "--constraint=nvlink".
    pub options: Vec<String>,
}

impl SlurmOptions {
    fn directives(&self, name: &str, log: &str) -> String {
        let mut lines = format!("#SBATCH --job-name={name}\n");
        if let Some(partition) = &self.partition {
            let _ = writeln!(lines, "#SBATCH --partition={partition}");
        }
        let _ = writeln!(lines, "#SBATCH --ntasks=1\n#SBATCH --output={log}");
        lines
    }

    /// The script of the array: a task measures one shard.
    pub fn shard_script(&self, work: &DividedWork, places: &SubmissionPlaces) -> String {
        let Self { shards, retries, .. } = self;
        let folder = shell_quoted(&places.folder.display().to_string());
        let log = places.log("%a").display().to_string();
        let mut script = format!(
            "#!/bin/bash\n{}#SBATCH --array=1-{shards}\n#SBATCH --requeue\n\
             #SBATCH --open-mode=append\n",
            self.directives("kernelgate", &log)
        );
        // Slurm gives a GPU that is requested as a resource to one task at a time.
        let gres = self.gres.iter().map(|gres| format!("#SBATCH --gres={gres}\n"));
        let time = self.time.iter().map(|time| format!("#SBATCH --time={time}\n"));
        let options = self.options.iter().map(|option| format!("#SBATCH {option}\n"));
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
        script += &work.shard_script_lines(places, "job-$SLURM_ARRAY_JOB_ID-attempt-$attempt");
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

    /// The script of the merge, which runs when every task has ended.
    pub fn merge_script(
        &self,
        work: &DividedWork,
        places: &SubmissionPlaces,
        tolerance: Option<f64>,
    ) -> String {
        let log = places.log("merge").display().to_string();
        let directives = self.directives("kernelgate-merge", &log);
        format!("#!/bin/bash\n{directives}\n{}", work.merge_script_lines(places, tolerance))
    }
}

/// Format of `squeue` that [`SlurmJobs::parse`] and [`jobs_with_comment`] read: job, task, state,
/// node, reason and comment.
pub const SQUEUE_LINE_FORMAT: &str = "%F|%K|%T|%N|%r|%k";

/// States of the jobs of a submission, as far as Slurm remembers them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlurmJobs {
    /// States of the tasks of the job array, by task number.
    pub tasks: BTreeMap<u32, SlurmJobState>,
    pub merge: Option<SlurmJobState>,
}

impl SlurmJobs {
    /// Parses the output of `squeue` for an array and the job that merges.
    pub fn parse(printed: &str, array: u64, merge: Option<u64>) -> SlurmJobs {
        let mut jobs = Self::default();
        for (job, task, state) in printed.lines().filter_map(parse_squeue_line) {
            match task.parse() {
                Ok(task) if job == array => drop(jobs.tasks.insert(task, state)),
                _ if Some(job) == merge => jobs.merge = Some(state),
                _ => {}
            }
        }
        jobs
    }

    /// Returns whether any job of the submission runs or is queued.
    pub fn any_active(&self) -> bool {
        self.tasks.values().chain(&self.merge).any(SlurmJobState::is_active)
    }

    /// The states in words: "3 running, 5 pending (Priority)"; empty once Slurm has forgotten the
    /// tasks.
    pub fn counts_by_state(&self) -> String {
        let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for SlurmJobState { state, reason, .. } in self.tasks.values() {
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

fn parse_squeue_line(line: &str) -> Option<(u64, &str, SlurmJobState)> {
    let mut fields = line.trim().splitn(6, '|');
    let (job, task) = (fields.next()?.parse().ok()?, fields.next()?);
    let [state, node, reason] = [fields.next()?, fields.next()?, fields.next()?];
    let [state, node, reason] = [state, node, reason].map(str::to_owned);
    Some((job, task, SlurmJobState { state, node, reason }))
}

/// Job arrays and other jobs that `squeue` lists with a comment, each once, in order.
pub fn jobs_with_comment(printed: &str, comment: &str) -> [Vec<u64>; 2] {
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

/// Formats task numbers for the `--array` option of sbatch: "1-3,7".
pub fn array_option(numbers: impl IntoIterator<Item = u32>) -> String {
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

/// State of a task, or of a job without tasks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlurmJobState {
    /// Name of the job state in Slurm: "RUNNING".
    pub state: String,
    /// Node on which the job runs, if it has one.
    pub node: String,
    pub reason: String,
}

impl SlurmJobState {
    /// Returns whether the job runs or is queued.
    pub fn is_active(&self) -> bool {
        self.state != "COMPLETED" && !self.has_failed()
    }

    /// Returns whether the job ended without success.
    pub fn has_failed(&self) -> bool {
        let failed = ["FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"];
        failed.contains(&&*self.state)
            || ["PREEMPTED", "DEADLINE", "REVOKED"].contains(&&*self.state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slurm_job_script_has_the_expected_text() {
        let places = SubmissionPlaces {
            program: "/opt/kernelgate".into(),
            package: "/home/me/kernels".into(),
            folder: "/shared/run".into(),
        };
        let options = SlurmOptions {
            shards: 8,
            partition: Some("gpu".to_owned()),
            gres: Some("gpu:h200:1".to_owned()),
            time: Some("30".to_owned()),
            retries: 2,
            options: vec!["--constraint=nvlink".to_owned()],
        };
        let flags = vec!["forward".to_owned()];
        let work = DividedWork::Calibrate { executables: "/shared/run/bin".into(), flags };
        let scripts = options.shard_script(&work, &places)
            + "-- merge\n"
            + &options.merge_script(&work, &places, None);
        insta::assert_snapshot!(scripts);
    }

    const SQUEUE_OUTPUT: &str = "7|3|RUNNING|n1|None|one\n\
                           7|4|PENDING||Resources|one\n\
                           7|5|FAILED|n2|NonZeroExitCode|one\n\
                           8|N/A|PENDING||Dependency|one\n\
                           9|3|RUNNING|n1|None|two\n\nx|y\n";

    #[test]
    fn states_of_an_array_job_are_parsed_by_task() {
        let jobs = SlurmJobs::parse(SQUEUE_OUTPUT, 7, Some(8));
        assert_eq!(jobs.tasks.keys().copied().collect::<Vec<_>>(), [3, 4, 5]);
        assert!(jobs.tasks[&5].has_failed() && !jobs.tasks[&3].has_failed());
        assert_eq!((&*jobs.tasks[&5].node, &*jobs.tasks[&4].reason), ("n2", "Resources"));
        assert_eq!(jobs.counts_by_state(), "1 failed, 1 pending (Resources), 1 running");
        assert_eq!(jobs.merge.as_ref().map(|merge| &*merge.state), Some("PENDING"));
        assert!(jobs.any_active());
    }

    #[test]
    fn jobs_whose_tasks_and_merge_have_ended_are_inactive() {
        let ended = SQUEUE_OUTPUT.replace("RUNNING", "CANCELLED").replace("PENDING", "COMPLETED");
        assert!(!SlurmJobs::parse(&ended, 7, Some(8)).any_active());
        // A task that Slurm requeued counts as waiting.
        let requeued = ended.replace("FAILED", "REQUEUED");
        assert!(SlurmJobs::parse(&requeued, 7, Some(8)).any_active());
        assert!(!SlurmJobs::parse("", 7, None).any_active());
    }

    #[test]
    fn slurm_jobs_of_a_submission_are_found_by_their_comment() {
        assert_eq!(jobs_with_comment(SQUEUE_OUTPUT, "one"), [vec![7], vec![8]]);
        assert_eq!(jobs_with_comment(SQUEUE_OUTPUT, "two"), [vec![9], vec![]]);
        assert!(jobs_with_comment(SQUEUE_OUTPUT, "on").iter().all(Vec::is_empty));
    }

    #[test]
    fn task_numbers_are_formatted_as_ranges() {
        assert_eq!(array_option([1, 2, 3, 7, 9, 10]), "1-3,7,9-10");
        assert_eq!(array_option([]), "");
    }
}
