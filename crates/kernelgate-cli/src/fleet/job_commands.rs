//! Writes the commands of one shard and of the merge, as a person would type them in a job script.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DividedWork {
    /// The shards run every bench executable with these flags.
    Bench {
        /// Paths of the executables, each with the folder of its package.
        executables: Vec<(PathBuf, PathBuf)>,
        /// Flags of a bench.
        flags: Vec<String>,
    },
    /// The shards run `kernelgate compare` on two folders of executables, with these flags.
    Compare {
        /// Folders with the executables of base and head.
        sides: [PathBuf; 2],
        /// Flags of the command, without those that name base and head.
        flags: Vec<String>,
    },
    /// The shards run `kernelgate calibrate` on a folder of executables, with these flags.
    Calibrate {
        /// Folder of executables.
        executables: PathBuf,
        flags: Vec<String>,
    },
}

/// Places of a submission. All machines of the cluster must see these folders under equal paths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubmissionPlaces {
    pub program: PathBuf,
    /// Folder of the package in which the shards' commands run.
    pub package: PathBuf,
    pub folder: PathBuf,
}

impl SubmissionPlaces {
    /// Returns the folder of the records of all shards.
    pub fn records_folder(&self) -> PathBuf {
        self.folder.join("records")
    }

    /// Returns the folder for the merged result.
    pub fn result_folder(&self) -> PathBuf {
        self.folder.join("result")
    }

    /// File with the exit code of the merge, which is written last.
    pub fn exit_code_file(&self) -> PathBuf {
        self.folder.join("exit")
    }

    /// Returns the path of the log of all attempts of a shard.
    pub fn log(&self, shard: &str) -> PathBuf {
        self.folder.join("logs").join(format!("{shard}.log"))
    }
}

/// Quotes a word for a shell, if necessary.
pub fn shell_quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-~^:@=,+%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

fn shell_path(path: &Path) -> String {
    shell_quoted(&path.display().to_string())
}

fn shell_words(flags: &[String]) -> String {
    flags.iter().fold(String::new(), |line, flag| format!("{line} {}", shell_quoted(flag)))
}

impl DividedWork {
    /// Shell lines that measure the shard in `KERNELGATE_SHARD`, and store the worst exit code in
    /// `code`. `attempt` is a shell expression whose value differs between attempts.
    pub fn shard_script_lines(&self, places: &SubmissionPlaces, attempt: &str) -> String {
        let (records, program) =
            (shell_path(&places.records_folder()), shell_path(&places.program));
        let label = "${KERNELGATE_SHARD%/*}-of-${KERNELGATE_SHARD#*/}";
        let mut lines = format!("cd {}\ncode=0\n", shell_path(&places.package));
        match self {
            Self::Bench { executables, flags } => {
                let _ = write!(
                    lines,
                    "export KERNELGATE_HISTORY={records}\n\
                     export KERNELGATE_SESSION=\"shard-{label}-{attempt}\"\n"
                );
                for (executable, package) in executables {
                    let _ = writeln!(
                        lines,
                        "(cd {} && CARGO_MANIFEST_DIR=$PWD {} --bench{}) || code=$?",
                        shell_path(package),
                        shell_path(executable),
                        shell_words(flags)
                    );
                }
            }
            Self::Compare { sides: [base, head], flags } => {
                let _ = writeln!(
                    lines,
                    "# Copies of both builds and their work lie on a disk of the machine.\n\
                     CARGO_TARGET_DIR=$(mktemp -d)\nexport CARGO_TARGET_DIR\n\
                     trap 'rm -rf \"$CARGO_TARGET_DIR\"' EXIT\n\
                     {program} compare --base-dir {} --head-dir {} --shard \"$KERNELGATE_SHARD\" \
                     \\\n  --shard-output {records}/\"{label}.json\"{} || code=$?",
                    shell_path(base),
                    shell_path(head),
                    shell_words(flags)
                );
            }
            Self::Calibrate { executables, flags } => {
                let _ = writeln!(
                    lines,
                    "# Another attempt goes on after the comparisons of the one before.\n\
                     export CARGO_TARGET_DIR={}/work/\"{label}\"\n\
                     {program} calibrate --dir {} --shard \"$KERNELGATE_SHARD\" --resume \\\n  \
                     --output {records}/\"{label}.json\"{} || code=$?",
                    shell_path(&places.folder),
                    shell_path(executables),
                    shell_words(flags)
                );
            }
        }
        lines
    }

    /// Shell lines that merge all shards, and write the exit code last.
    pub fn merge_script_lines(&self, places: &SubmissionPlaces, tolerance: Option<f64>) -> String {
        let tolerance = tolerance
            .map(|tolerance| format!(" --anchor-tolerance {tolerance}"))
            .unwrap_or_default();
        let result = places.result_folder();
        let output = match self {
            Self::Bench { .. } => format!("--output {}", shell_path(&result)),
            Self::Compare { .. } => format!("--out {}", shell_path(&result)),
            Self::Calibrate { .. } => {
                format!("--output {}", shell_path(&result.with_extension("json")))
            }
        };
        // An earlier merge may have left a result without all shards.
        let earlier = match self {
            Self::Bench { .. } => format!("rm -rf {}\n", shell_path(&result)),
            Self::Compare { .. } | Self::Calibrate { .. } => String::new(),
        };
        let (exit, text) = (places.exit_code_file(), result.with_extension("txt"));
        format!(
            "cd {}\ncode=0\n{earlier}{} merge {} {output}{tolerance} > {} || code=$?\n\
             echo \"$code\" > {exit}.new && mv {exit}.new {exit}\n",
            shell_path(&places.package),
            shell_path(&places.program),
            shell_path(&places.records_folder()),
            shell_path(&text),
            exit = shell_path(&exit),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn submission_places() -> SubmissionPlaces {
        SubmissionPlaces {
            program: "/opt/kernelgate".into(),
            package: "/home/me/my kernels".into(),
            folder: "/shared/run".into(),
        }
    }

    #[test]
    fn a_shard_of_a_bench_runs_each_executable_in_its_package_folder() {
        let executables = vec![("/shared/run/bin/spin".into(), "/home/me/my kernels".into())];
        let flags = vec!["--effort".to_owned(), "thorough".to_owned(), "a(b|c)".to_owned()];
        let work = DividedWork::Bench { executables, flags };
        insta::assert_snapshot!(work.shard_script_lines(&submission_places(), "attempt-$attempt"), @r#"
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
        let work = DividedWork::Compare { sides, flags: vec!["forward".to_owned()] };
        let both = work.shard_script_lines(&submission_places(), "")
            + "--\n"
            + &work.merge_script_lines(&submission_places(), Some(0.05));
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
