//! Slurm: job scripts as a person would write them, and the states of their tasks.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::task::{Places, Work, quoted};

/// Options of the array.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlurmOptions {
    /// Number of shards.
    pub shards: u32,
    /// Partition of both jobs.
    pub partition: Option<String>,
    /// Generic resources of a task: "gpu:h200:1".
    pub gres: Option<String>,
    /// Time limit of a task.
    pub time: Option<String>,
    /// Attempts of a shard after the first.
    pub retries: u32,
    /// Further options of `sbatch` for the array: "--constraint=nvlink".
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
    pub fn shard_script(&self, work: &Work, places: &Places) -> String {
        let Self { shards, retries, .. } = self;
        let folder = quoted(&places.folder.display().to_string());
        let log = places.log("%a").display().to_string();
        let mut script = format!(
            "#!/bin/bash\n{}#SBATCH --array=1-{shards}\n#SBATCH --requeue\n\
             #SBATCH --open-mode=append\n",
            self.directives("kernelgate", &log)
        );
        // A GPU that is asked for as a resource belongs to one task at a time.
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
        script += &work.shard_lines(places, "attempt-$attempt");
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
    pub fn merge_script(&self, work: &Work, places: &Places, tolerance: Option<f64>) -> String {
        let log = places.log("merge").display().to_string();
        let directives = self.directives("kernelgate-merge", &log);
        format!("#!/bin/bash\n{directives}\n{}", work.merge_lines(places, tolerance))
    }
}

/// Format of `squeue` that [`states`] reads: task, state, node and reason.
pub const SQUEUE_FORMAT: &str = "%K|%T|%N|%r";

/// State of each task of an array, as `squeue` prints them.
pub fn states(printed: &str) -> BTreeMap<u32, TaskState> {
    let line = |line: &str| {
        let mut fields = line.trim().splitn(4, '|');
        let task = fields.next()?.parse().ok()?;
        let [state, node, reason] = [fields.next()?, fields.next()?, fields.next()?];
        let [state, node, reason] = [state, node, reason].map(str::to_owned);
        Some((task, TaskState { state, node, reason }))
    };
    printed.lines().filter_map(line).collect()
}

/// Numbers as the option `--array` takes them: "1-3,7".
pub fn array_of(numbers: impl IntoIterator<Item = u32>) -> String {
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

/// State of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskState {
    /// Slurm's word: "RUNNING".
    pub state: String,
    /// Node, where it has one.
    pub node: String,
    /// Reason of the state.
    pub reason: String,
}

impl TaskState {
    /// Whether the task has ended and measured nothing.
    pub fn has_failed(&self) -> bool {
        let failed = ["FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"];
        failed.contains(&&*self.state) || ["PREEMPTED", "DEADLINE"].contains(&&*self.state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_script_is_one_that_a_person_could_have_written() {
        let places = Places {
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
        let work = Work::Calibrate { executables: "/shared/run/bin".into(), flags };
        let scripts = options.shard_script(&work, &places)
            + "-- merge\n"
            + &options.merge_script(&work, &places, None);
        insta::assert_snapshot!(scripts);
    }

    #[test]
    fn states_of_an_array_are_read_by_task() {
        let printed =
            "3|RUNNING|n1|None\n4|PENDING||Resources\n5|FAILED|n2|NonZeroExitCode\n\nx|y\n";
        let states = states(printed);
        assert_eq!(states.keys().copied().collect::<Vec<_>>(), [3, 4, 5]);
        assert!(states[&5].has_failed() && !states[&3].has_failed());
        assert_eq!((&*states[&5].node, &*states[&4].reason), ("n2", "Resources"));
    }

    #[test]
    fn numbers_of_tasks_are_written_as_ranges() {
        assert_eq!(array_of([1, 2, 3, 7, 9, 10]), "1-3,7,9-10");
        assert_eq!(array_of([]), "");
    }
}
