//! `kernelgate check`: the performance gate of a pull request, for any CI. The verb chooses how to
//! judge, judges, checks the kernels' resources, and writes a comment, JUnit XML and JSON.
//!
//! Each part is a separate call of this program or of cargo, whose command is printed to standard
//! error, so that each part can be repeated alone.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use clap::builder::FalseyValueParser;

use super::resources::{self, check_architecture_name};
use crate::benches::cargo;
use crate::benches::child_process::{ChildProcess, ProcessEnd};
use crate::commands;
use crate::compare::sides::git::{self, GitRepository, git};
use crate::compare::sides::leftover_files;
use crate::fleet::job_commands::shell_quoted;
use crate::report::bisection::markdown as fenced;
use crate::verbs::shared::interrupt;
use crate::verbs::shared::nvrtc::NvrtcMajor;
use kernelgate::display::harmless_text::MarkdownText;
use kernelgate::exit::ExitReason;
use kernelgate::record::{BaselineStore, file};
use kernelgate_cuda::library;

/// Time after which a part is treated as hung.
const CHECK_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// Output files of the previous check, which are removed before this one.
const CHECK_OUTPUT_FILES: [&str; 8] = [
    "comment.md",
    "report.html",
    "change.svg",
    "junit.xml",
    "result.json",
    "bmf.json",
    "smaller-is-better.json",
    "resources.txt",
];
/// Smallest exit code of a part that was ended by a signal from outside.
const MIN_SIGNAL_EXIT_CODE: i32 = 128;
/// Largest comment of a part that is read, in bytes; a comment has at most 60,000.
const MAX_COMMENT_FILE_BYTES: u64 = 1 << 20;
/// Largest number of lines of `resources.txt` in the comment.
const MAX_SHOWN_OUTPUT_LINES: usize = 30;
/// Largest number of kernels that got worse and are visible in the comment.
const MAX_SHOWN_WORSE_KERNELS: usize = 10;

/// The method by which a pull request is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum JudgingMode {
    /// Compare if git has the base and both sides build with such benches, else gate if this device
    /// has a baseline
    #[default]
    Auto,
    /// Build base and head here and interleave their processes: sees the smallest differences
    Compare,
    /// Time the head and compare it with the committed baseline of this device
    Gate,
}

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes, the first that applies to a part: 2 usage or broken input, so \
                        that nothing was judged; 4 refused, not comparable; 1 regressed, or wrong; \
                        3 inconclusive, which is no pass unless --allow-inconclusive is given; 0 \
                        fine. Another code of a part (130: interrupted) ends the check at once."
)]
pub struct CheckArguments {
    /// Revision to compare with, at its merge base with HEAD: changes that were merged later do not
    /// count [default: origin/main where git has it, else main]
    #[arg(long, env = "PERF_BASE", value_name = "REV")]
    base: Option<String>,
    /// How to judge
    #[arg(long, env = "PERF_MODE", value_enum, default_value = "auto")]
    mode: JudgingMode,
    /// Use only cases whose id matches this regular expression
    #[arg(long, env = "PERF_FILTER", value_name = "REGEX")]
    filter: Option<String>,
    /// Use only this bench binary (repeatable)
    #[arg(long, value_name = "NAME")]
    bench: Vec<String>,
    /// Time limit of a comparison; the confirmation of slower cases may take as long again
    #[arg(long, env = "PERF_BUDGET", value_name = "TIME", default_value = "10m")]
    budget: String,
    /// How long a process of a comparison times a case [default: 0.4s, on a GPU 0.15s]
    #[arg(long, env = "PERF_CASE_TIME", value_name = "TIME")]
    case_time: Option<String>,
    /// Baseline of the gate
    #[arg(long, env = "PERF_BASELINE", value_name = "NAME", default_value = "main")]
    baseline: String,
    /// Runs of `cargo bench -- --quick` that the gate judges
    #[arg(
        long,
        env = "PERF_RUNS",
        value_name = "COUNT",
        default_value_t = 3,
        value_parser = clap::value_parser!(u16).range(1..=100)
    )]
    runs: u16,
    /// Folder of the results: comment.md, report.html, change.svg, junit.xml, result.json,
    /// bmf.json, smaller-is-better.json, resources.txt, and report/ of the gate [default:
    /// perf-check/ of the target folder]
    #[arg(long, env = "PERF_OUT", value_name = "DIR")]
    out: Option<PathBuf>,
    /// Architecture for which the recorded resources of kernels are checked, with the NVRTC of this
    /// machine or, if python3 is there, one that pip fetches
    #[arg(long, env = "PERF_ARCH", value_name = "ARCH", default_value = "sm_90a")]
    arch: String,
    /// Exit with 0 in place of 3, on runners that are too noisy for a verdict
    #[arg(long, env = "PERF_ALLOW_INCONCLUSIVE", value_parser = FalseyValueParser::new())]
    allow_inconclusive: bool,
    /// Print the commands and run none
    #[arg(long)]
    dry_run: bool,
}

struct CheckRun<'a> {
    arguments: &'a CheckArguments,
    store: &'a BaselineStore,
    out: PathBuf,
    program: PathBuf,
    running: ChildProcess,
}

/// Outcome of a method.
struct CompareOrGateExit {
    method: &'static str,
    exit: ExitReason,
    /// The exit of `cargo bench`, if a bench died.
    died: Option<String>,
}

/// Outcome of the check of the kernels' resources.
struct CheckedResources {
    exit: ExitReason,
    /// Text that the comment shows unfolded; empty if no kernel got worse.
    seen: String,
    /// Folded text.
    text: String,
}

pub fn run(arguments: &CheckArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    check_architecture_name("--arch", &arguments.arch)?;
    let target = store.work.parent().map(PathBuf::from).unwrap_or_default();
    let check = CheckRun {
        arguments,
        store,
        out: arguments.out.clone().unwrap_or_else(|| target.join("perf-check")),
        program: std::env::current_exe().context("failed to find this program")?,
        running: interrupt::forward_interrupts()?,
    };
    if !arguments.dry_run {
        std::fs::create_dir_all(&check.out)
            .with_context(|| format!("--out: failed to make {}", check.out.display()))?;
        for name in CHECK_OUTPUT_FILES {
            leftover_files::remove_path(&check.out.join(name))
                .with_context(|| format!("--out: failed to remove {name} of the last check"))?;
        }
    }
    let judged = check.judge()?;
    let checked = check.resources(&target)?;
    if arguments.dry_run {
        return Ok(ExitReason::Fine);
    }
    check.write_comment(&judged, &checked)?;
    let exit = judged.exit.more_severe(checked.exit);
    if exit == ExitReason::Inconclusive && arguments.allow_inconclusive {
        say("inconclusive, and allowed");
        return Ok(ExitReason::Fine);
    }
    Ok(exit)
}

fn say(text: &str) {
    eprintln!("check: {text}");
}

impl CheckRun<'_> {
    /// Prints a command for a shell before it runs, unless `--verbose` prints it as it is started.
    fn announce(&self, command: &str) {
        if self.arguments.dry_run || !commands::are_commands_shown() {
            say(command);
        }
    }

    /// Judges the head with the first method that is possible.
    fn judge(&self) -> anyhow::Result<CompareOrGateExit> {
        let mode = self.arguments.mode;
        let base = match mode {
            JudgingMode::Gate => Err(String::new()),
            JudgingMode::Auto | JudgingMode::Compare => self.commit_to_compare_with(),
        };
        let why_not = match (base, mode) {
            (Ok(base), _) => {
                let exit = self.compare(&base)?;
                // If the comparison wrote no result file, nothing was compared.
                let failed = exit == ExitReason::Usage && !self.out.join("result.json").is_file();
                let gate =
                    mode == JudgingMode::Auto && failed && self.has_baseline_for_device()?.is_ok();
                if !gate {
                    return Ok(CompareOrGateExit { method: "compare", exit, died: None });
                }
                say("compare was not possible (above): the committed baseline is the second best");
                return self.gate();
            }
            (Err(why), JudgingMode::Compare) => anyhow::bail!("compare is not possible: {why}"),
            (Err(why), _) => why,
        };
        if let Err(missing) = self.has_baseline_for_device()? {
            let why_not = match why_not.is_empty() {
                true => String::new(),
                false => format!(" No comparison: {why_not}."),
            };
            anyhow::bail!(
                "nothing to judge by.{why_not} No gate: {missing}; record a baseline on this \
                 machine (kernelgate baseline save {} --runs 5) and commit baselines/, or fetch \
                 the whole history",
                self.arguments.baseline
            );
        }
        self.gate()
    }

    /// The commit with which the head of the pull request is compared.
    fn commit_to_compare_with(&self) -> Result<String, String> {
        let repository = GitRepository::around(&self.store.root)
            .map_err(|_| "this is no git checkout".to_owned())?;
        let resolve = |name: &str| repository.resolve(name).map_err(|error| error.to_string());
        let base = match &self.arguments.base {
            Some(name) => resolve(name)?,
            None => resolve("origin/main").or_else(|_| resolve("main"))?,
        };
        let mut merge_base = git(&repository.top);
        merge_base.args(["merge-base", &base.commit, "HEAD"]);
        git::run_git(&mut merge_base, "find the merge base").map_err(|_| {
            format!(
                "`{}` and HEAD have no common commit here (a shallow clone: fetch the whole \
                 history)",
                base.name
            )
        })
    }

    fn compare(&self, base: &str) -> anyhow::Result<ExitReason> {
        let short = |commit: &str| commit.get(..12).unwrap_or(commit).to_owned();
        let CheckArguments { budget, case_time, filter, .. } = self.arguments;
        let mut line = vec!["compare".to_owned(), "--base".to_owned(), short(base)];
        line.extend(["--budget".to_owned(), budget.clone()]);
        line.extend(["--out".to_owned(), self.out.display().to_string()]);
        line.extend(self.bench_arguments());
        // A clean checkout is compared as its commit; otherwise its working tree is compared, with
        // its changes.
        let ask = |arguments: &[&str]| git::run_git(git(&self.store.root).args(arguments), "ask");
        if ask(&["status", "--porcelain"]).is_ok_and(|changes| changes.is_empty())
            && let Ok(head) = ask(&["rev-parse", "HEAD"])
        {
            line.extend(["--head".to_owned(), short(&head)]);
        }
        line.extend(case_time.iter().flat_map(|time| ["--case-time".to_owned(), time.clone()]));
        line.extend(filter.clone());
        self.call_own_verb(&line)
    }

    /// Returns whether a baseline exists for this device, or the reason why it does not.
    fn has_baseline_for_device(&self) -> anyhow::Result<Result<(), String>> {
        let name = &self.arguments.baseline;
        self.announce(&format!("kernelgate baseline find {}", shell_quoted(name)));
        if self.arguments.dry_run {
            return Ok(Ok(()));
        }
        let mut command = Command::new(&self.program);
        command.args(["baseline", "find", name]);
        commands::print_command(&command);
        let found =
            command.stdin(Stdio::null()).output().context("failed to start this program again")?;
        let why = String::from_utf8_lossy(&found.stderr).trim().to_owned();
        Ok(if found.status.success() { Ok(()) } else { Err(why) })
    }

    /// Times the head in several sessions and judges them together.
    fn gate(&self) -> anyhow::Result<CompareOrGateExit> {
        let CheckArguments { runs, filter, baseline, dry_run, .. } = self.arguments;
        let started = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string();
        let (mut sessions, mut died) = (Vec::new(), None);
        for number in 1..=*runs {
            let mut line = vec!["bench".to_owned(), "--no-fail-fast".to_owned()];
            line.extend(self.bench_arguments());
            line.extend(["--", "--quick", "--noplot"].map(str::to_owned));
            line.extend(filter.clone());
            self.announce(&format!("cargo {} (run {number} of {runs})", typed_arguments(&line)));
            let session = format!("check-{started}-{}-{number}", std::process::id());
            let folder = self.store.runs.join(&session);
            sessions.extend(["--session".to_owned(), folder.display().to_string()]);
            if *dry_run {
                continue;
            }
            let mut bench = Command::new(cargo::cargo_program());
            bench.args(&line).env("KERNELGATE_SESSION", &session);
            let code = self.exit_code_of_command(&mut bench)?;
            if code >= MIN_SIGNAL_EXIT_CODE {
                std::process::exit(code);
            }
            if code != 0 {
                died = Some(format!("`cargo bench` ended with {code} (run {number} of {runs})"));
                died.iter().for_each(|died| say(died));
                if !folder.is_dir() {
                    return Ok(CompareOrGateExit { method: "gate", exit: ExitReason::Usage, died });
                }
            }
        }
        // If a page cannot be drawn, the verdict does not change.
        let page = self.out.join("report").display().to_string();
        let report = [&["report".to_owned()], &sessions[..], &["--out".to_owned(), page]].concat();
        self.announce(&format!("kernelgate {}", typed_arguments(&report)));
        if !dry_run && self.exit_code_of_command(Command::new(&self.program).args(&report))? != 0 {
            say("no page was drawn");
        }
        let out = ["--out".to_owned(), self.out.display().to_string()];
        let gate = ["gate".to_owned(), "--baseline".to_owned(), baseline.clone()];
        let exit = self.call_own_verb(&[&gate[..], &sessions, &out].concat())?;
        // A wrong case ends cargo like a bench that died, and its record fails the gate.
        let fails = ![ExitReason::Fine, ExitReason::Inconclusive].contains(&exit);
        let exit = if died.is_some() && !fails { ExitReason::Usage } else { exit };
        Ok(CompareOrGateExit { method: "gate", exit, died })
    }

    fn bench_arguments(&self) -> impl Iterator<Item = String> {
        self.arguments.bench.iter().flat_map(|name| ["--bench".to_owned(), name.clone()])
    }

    /// Calls this program again; its results go to standard error.
    fn call_own_verb(&self, line: &[String]) -> anyhow::Result<ExitReason> {
        self.announce(&format!("kernelgate {}", typed_arguments(line)));
        if self.arguments.dry_run {
            return Ok(ExitReason::Fine);
        }
        let code = self.exit_code_of_command(Command::new(&self.program).args(line))?;
        Ok(exit_of_code(code))
    }

    /// Runs a command and returns its exit code.
    fn exit_code_of_command(&self, command: &mut Command) -> anyhow::Result<i32> {
        let program = command.get_program().to_string_lossy().into_owned();
        command.stdin(Stdio::null()).stdout(std::io::stderr());
        // Parts of the check that need much memory limit it themselves.
        let ended = self.running.start_process(command);
        let ended = ended.and_then(|_| self.running.finish_within(CHECK_TIMEOUT, u64::MAX));
        let ended = ended.with_context(|| format!("failed to start {program}"))?;
        match ended {
            // If a signal from outside ended the part, the whole check ends.
            ProcessEnd::Exited(status) => {
                Ok(status.code().unwrap_or(ExitReason::INTERRUPTED_EXIT_CODE))
            }
            ProcessEnd::TimedOut | ProcessEnd::OverMemory(_) => {
                anyhow::bail!("{program} was ended")
            }
        }
    }

    /// Checks the kernels' resources against their record, if there is a record and NVRTC.
    fn resources(&self, target: &Path) -> anyhow::Result<CheckedResources> {
        let arch = &self.arguments.arch;
        let unchecked = |why: String| CheckedResources {
            exit: ExitReason::Fine,
            seen: String::new(),
            text: format!("not checked: {why}"),
        };
        let line = ["resources", "--arch", arch, "--check"].map(str::to_owned);
        if self.arguments.dry_run {
            say(&format!("kernelgate {} (where resources are recorded)", typed_arguments(&line)));
            return Ok(unchecked(String::new()));
        }
        let record = resources::path(self.store, arch);
        if !record.is_file() {
            return Ok(unchecked(format!("nothing is recorded for {arch}")));
        }
        let mut command = Command::new(&self.program);
        if library::choose_nvrtc().is_none() {
            match NvrtcMajor::Cuda13.fetch(target) {
                Ok(folder) => drop(command.env("KERNELGATE_CUDA_LIBS", folder)),
                Err(error) => return Ok(unchecked(format!("no NVRTC here, and {error:#}"))),
            }
        }
        self.announce(&format!("kernelgate {}", typed_arguments(&line)));
        command.args(&line);
        commands::print_command(&command);
        let output =
            command.stdin(Stdio::null()).output().context("failed to start this program again")?;
        let exit = exit_of_code(output.status.code().unwrap_or(ExitReason::INTERRUPTED_EXIT_CODE));
        let text = [&output.stdout[..], &output.stderr[..]].concat();
        let path = self.out.join("resources.txt");
        let text = String::from_utf8_lossy(&text);
        write(&path, &text)?;
        Ok(resources_for_comment(exit, &text))
    }

    /// Adds the kernel resources and the commands to the method's comment, and prints it.
    fn write_comment(
        &self,
        judged: &CompareOrGateExit,
        checked: &CheckedResources,
    ) -> anyhow::Result<()> {
        let path = self.out.join("comment.md");
        let mut text =
            file::read_untrusted_text(&path, MAX_COMMENT_FILE_BYTES).unwrap_or_else(|_| {
                format!(
                    "**check: nothing was judged** (exit {} of `{}`): the log says why.\n",
                    judged.exit as u8, judged.method
                )
            });
        if let Some(died) = &judged.died {
            let _ =
                write!(text, "\n**{died}**: a bench that died is not judged; the log has more.\n");
        }
        if !checked.seen.is_empty() {
            let _ = write!(text, "\n{}\n", checked.seen);
        }
        let _ = write!(
            text,
            "\n<details><summary>Kernel resources ({})</summary>\n\n{}\n\n</details>\n",
            self.arguments.arch,
            fenced(&checked.text)
        );
        write(&path, &text)?;
        print!("{text}");
        Ok(())
    }
}

/// Replaces a file of the set; on an error the file keeps its contents.
fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    file::write_text(path, text).context("--out")
}

/// Returns the exit code of a part; a code that this program does not define ends the check.
fn exit_of_code(code: i32) -> ExitReason {
    ExitReason::from_code(code).unwrap_or_else(|| {
        say(&format!("ended with {code}"));
        std::process::exit(code)
    })
}

/// The arguments of a part as typed in a shell.
fn typed_arguments(line: &[String]) -> String {
    line.iter().map(|word| shell_quoted(word)).collect::<Vec<_>>().join(" ")
}

/// Makes kernels that got worse visible in the comment, and folds the rest.
fn resources_for_comment(exit: ExitReason, text: &str) -> CheckedResources {
    let first = text.lines().next().unwrap_or_default();
    let seen = match exit {
        ExitReason::Fine => String::new(),
        ExitReason::Regression => {
            say("kernel resources got worse");
            let worse = text.lines().filter_map(|line| line.strip_prefix("WORSE "));
            let worse: Vec<String> = worse
                .take(MAX_SHOWN_WORSE_KERNELS)
                .map(|line| format!("- {}", MarkdownText(line)))
                .collect();
            format!(
                "**Kernel resources got worse** ({}):\n\n{}",
                MarkdownText(first),
                worse.join("\n")
            )
        }
        ExitReason::Usage | ExitReason::Inconclusive | ExitReason::Refused => {
            say("kernel resources were not compared");
            format!("**Kernel resources were not compared**: {}", MarkdownText(first))
        }
    };
    let mut lines: Vec<&str> = text.lines().take(MAX_SHOWN_OUTPUT_LINES).collect();
    if text.lines().count() > MAX_SHOWN_OUTPUT_LINES {
        lines.push("…");
    }
    CheckedResources { exit, seen, text: lines.join("\n") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_of_this_program_are_kept_and_others_end_the_check() {
        assert_eq!(
            [0, 1, 2, 3, 4].map(|code| ExitReason::from_code(code).map(|exit| exit as i32)),
            [0, 1, 2, 3, 4].map(Some)
        );
        assert_eq!([101, 130, 141].map(ExitReason::from_code), [None; 3]);
    }

    #[test]
    fn worsened_kernels_stay_visible_when_long_lists_are_cut() {
        let lines: Vec<String> = (0..40).map(|i| format!("WORSE k{i}: registers")).collect();
        let text = format!("sm_90a: 40 kernels\n{}\n", lines.join("\n"));
        let worse = resources_for_comment(ExitReason::Regression, &text);
        let heading = "**Kernel resources got worse** (sm_90a: 40 kernels):";
        assert_eq!(worse.seen.lines().next(), Some(heading));
        assert_eq!(worse.seen.lines().count(), 2 + MAX_SHOWN_WORSE_KERNELS);
        assert_eq!(worse.text.lines().count(), MAX_SHOWN_OUTPUT_LINES + 1);
        let fine = resources_for_comment(ExitReason::Fine, "sm_90a: nothing changed");
        assert_eq!((fine.seen.as_str(), fine.text.as_str()), ("", "sm_90a: nothing changed"));
        let refused =
            resources_for_comment(ExitReason::Refused, "refused: compiler is `a` and `b`");
        insta::assert_snapshot!(refused.seen, @"**Kernel resources were not compared**: refused: compiler is `a` and `b`");
    }
}
