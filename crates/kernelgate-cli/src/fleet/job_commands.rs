//! Writes the shell commands of one shard and of the merge for a job script of Slurm or Kubernetes.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkDividedIntoShards {
    /// Each shard runs every bench executable with these flags.
    RunBenches {
        /// Paths of the bench executables, each with the folder of its package.
        executables_with_package_folders: Vec<(PathBuf, PathBuf)>,
        /// Command-line flags of the bench executables.
        bench_flags: Vec<String>,
    },
    /// Each shard runs `kernelgate compare` on two folders of prebuilt executables, with these
    /// flags.
    RunCompare {
        /// Folders of the prebuilt executables of base (first) and head (second).
        sides: [PathBuf; 2],
        /// Flags of `kernelgate compare`, without those that name base and head.
        compare_flags: Vec<String>,
    },
    /// Each shard runs `kernelgate calibrate` on a folder of prebuilt executables, with these
    /// flags.
    RunCalibrate {
        /// Folder of executables.
        executables_folder: PathBuf,
        calibrate_flags: Vec<String>,
    },
}

/// Paths that a submission of shards to a cluster uses; all machines of the cluster must see these
/// folders under equal paths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterSubmissionPaths {
    pub kernelgate_program: PathBuf,
    /// Folder of the package, in which the commands of all shards run.
    pub package_folder: PathBuf,
    pub submission_folder: PathBuf,
}

impl ClusterSubmissionPaths {
    /// Returns the folder in which all shards write their records.
    pub fn shard_records_folder(&self) -> PathBuf {
        self.submission_folder.join("records")
    }

    /// Returns the folder into which the merged result is written.
    pub fn merged_result_folder(&self) -> PathBuf {
        self.submission_folder.join("result")
    }

    /// Returns the path of the file with the exit code of the merge; the merge writes this file
    /// last.
    pub fn merge_exit_code_file(&self) -> PathBuf {
        self.submission_folder.join("exit")
    }

    /// Returns the path of the log file to which all attempts of a shard append.
    pub fn shard_log_file(&self, shard: &str) -> PathBuf {
        self.submission_folder.join("logs").join(format!("{shard}.log"))
    }
}

/// Quotes a word for a POSIX shell if it has characters that need quotes.
pub fn shell_quoted_if_necessary(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-~^:@=,+%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

fn shell_quoted_path(path: &Path) -> String {
    shell_quoted_if_necessary(&path.display().to_string())
}

fn shell_quoted_flags(flags: &[String]) -> String {
    flags
        .iter()
        .fold(String::new(), |line, flag| format!("{line} {}", shell_quoted_if_necessary(flag)))
}

impl WorkDividedIntoShards {
    /// Returns shell lines that run the shard that `KERNELGATE_SHARD` names, and store the exit
    /// code of the last failed command in `code`. The argument `attempt` is a shell expression
    /// whose value differs between the attempts of a shard.
    pub fn shell_lines_of_shard(&self, places: &ClusterSubmissionPaths, attempt: &str) -> String {
        let (records, program) = (
            shell_quoted_path(&places.shard_records_folder()),
            shell_quoted_path(&places.kernelgate_program),
        );
        let label = "${KERNELGATE_SHARD%/*}-of-${KERNELGATE_SHARD#*/}";
        let mut lines = format!("cd {}\ncode=0\n", shell_quoted_path(&places.package_folder));
        match self {
            Self::RunBenches {
                executables_with_package_folders: executables,
                bench_flags: flags,
            } => {
                let _ = write!(
                    lines,
                    "export KERNELGATE_HISTORY={records}\n\
                     export KERNELGATE_SESSION=\"shard-{label}-{attempt}\"\n"
                );
                for (executable, package) in executables {
                    let _ = writeln!(
                        lines,
                        "(cd {} && CARGO_MANIFEST_DIR=$PWD {} --bench{}) || code=$?",
                        shell_quoted_path(package),
                        shell_quoted_path(executable),
                        shell_quoted_flags(flags)
                    );
                }
            }
            Self::RunCompare { sides: [base, head], compare_flags: flags } => {
                let _ = writeln!(
                    lines,
                    "# Copies of both builds and their work lie on a disk of the machine.\n\
                     CARGO_TARGET_DIR=$(mktemp -d)\nexport CARGO_TARGET_DIR\n\
                     trap 'rm -rf \"$CARGO_TARGET_DIR\"' EXIT\n\
                     {program} compare --base-dir {} --head-dir {} --shard \"$KERNELGATE_SHARD\" \
                     \\\n  --shard-output {records}/\"{label}.json\"{} || code=$?",
                    shell_quoted_path(base),
                    shell_quoted_path(head),
                    shell_quoted_flags(flags)
                );
            }
            Self::RunCalibrate { executables_folder: executables, calibrate_flags: flags } => {
                let _ = writeln!(
                    lines,
                    "# Another attempt goes on after the comparisons of the one before.\n\
                     export CARGO_TARGET_DIR={}/work/\"{label}\"\n\
                     {program} calibrate --dir {} --shard \"$KERNELGATE_SHARD\" --resume \\\n  \
                     --output {records}/\"{label}.json\"{} || code=$?",
                    shell_quoted_path(&places.submission_folder),
                    shell_quoted_path(executables),
                    shell_quoted_flags(flags)
                );
            }
        }
        lines
    }

    /// Returns shell lines that merge all shards' records, and then write the merge's exit code to
    /// a file.
    pub fn shell_lines_of_merge(
        &self,
        places: &ClusterSubmissionPaths,
        tolerance: Option<f64>,
    ) -> String {
        let tolerance = tolerance
            .map(|tolerance| format!(" --anchor-tolerance {tolerance}"))
            .unwrap_or_default();
        let result = places.merged_result_folder();
        let output = match self {
            Self::RunBenches { .. } => format!("--output {}", shell_quoted_path(&result)),
            Self::RunCompare { .. } => format!("--out {}", shell_quoted_path(&result)),
            Self::RunCalibrate { .. } => {
                format!("--output {}", shell_quoted_path(&result.with_extension("json")))
            }
        };
        // The merged runs of an earlier merge are removed, because they may lack shards.
        let earlier = match self {
            Self::RunBenches { .. } => format!("rm -rf {}\n", shell_quoted_path(&result)),
            Self::RunCompare { .. } | Self::RunCalibrate { .. } => String::new(),
        };
        let (exit, text) = (places.merge_exit_code_file(), result.with_extension("txt"));
        format!(
            "cd {}\ncode=0\n{earlier}{} merge {} {output}{tolerance} > {} || code=$?\n\
             echo \"$code\" > {exit}.new && mv {exit}.new {exit}\n",
            shell_quoted_path(&places.package_folder),
            shell_quoted_path(&places.kernelgate_program),
            shell_quoted_path(&places.shard_records_folder()),
            shell_quoted_path(&text),
            exit = shell_quoted_path(&exit),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_submission_paths() -> ClusterSubmissionPaths {
        ClusterSubmissionPaths {
            kernelgate_program: "/opt/kernelgate".into(),
            package_folder: "/home/me/my kernels".into(),
            submission_folder: "/shared/run".into(),
        }
    }

    #[test]
    fn a_shard_of_a_bench_runs_each_executable_in_its_package_folder() {
        let executables = vec![("/shared/run/bin/spin".into(), "/home/me/my kernels".into())];
        let flags = vec!["--effort".to_owned(), "thorough".to_owned(), "a(b|c)".to_owned()];
        let work = WorkDividedIntoShards::RunBenches {
            executables_with_package_folders: executables,
            bench_flags: flags,
        };
        insta::assert_snapshot!(work.shell_lines_of_shard(&test_submission_paths(), "attempt-$attempt"), @r#"
        cd '/home/me/my kernels'
        code=0
        export KERNELGATE_HISTORY=/shared/run/records
        export KERNELGATE_SESSION="shard-${KERNELGATE_SHARD%/*}-of-${KERNELGATE_SHARD#*/}-attempt-$attempt"
        (cd '/home/me/my kernels' && CARGO_MANIFEST_DIR=$PWD /shared/run/bin/spin --bench --effort thorough 'a(b|c)') || code=$?
        "#);
    }

    #[test]
    fn a_shard_of_a_comparison_runs_both_builds_and_the_merge_gives_verdicts() {
        let sides = ["/shared/run/base".into(), "/shared/run/head".into()];
        let work =
            WorkDividedIntoShards::RunCompare { sides, compare_flags: vec!["forward".to_owned()] };
        let both = work.shell_lines_of_shard(&test_submission_paths(), "")
            + "--\n"
            + &work.shell_lines_of_merge(&test_submission_paths(), Some(0.05));
        insta::assert_snapshot!(both, @r#"
        cd '/home/me/my kernels'
        code=0
        # Copies of both builds and their work lie on a disk of the machine.
        CARGO_TARGET_DIR=$(mktemp -d)
        export CARGO_TARGET_DIR
        trap 'rm -rf "$CARGO_TARGET_DIR"' EXIT
        /opt/kernelgate compare --base-dir /shared/run/base --head-dir /shared/run/head --shard "$KERNELGATE_SHARD" \
          --shard-output /shared/run/records/"${KERNELGATE_SHARD%/*}-of-${KERNELGATE_SHARD#*/}.json" forward || code=$?
        --
        cd '/home/me/my kernels'
        code=0
        /opt/kernelgate merge /shared/run/records --out /shared/run/result --anchor-tolerance 0.05 > /shared/run/result.txt || code=$?
        echo "$code" > /shared/run/exit.new && mv /shared/run/exit.new /shared/run/exit
        "#);
    }
}
