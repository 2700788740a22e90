//! `kernelgate check`: judges the performance of a pull request in any CI system. `kernelgate
//! check` chooses between compare and gate, judges the head, checks the compiled kernels'
//! resources, and writes a comment, JUnit XML and JSON.
//!
//! Each step of `kernelgate check` is a call of this program or of cargo, whose command line is
//! printed on standard error, so that a user can repeat the step alone.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use clap::builder::FalseyValueParser;

use super::resources::{self, require_architecture_name};
use crate::benches::cargo;
use crate::benches::child_process::{ChildProcessEnd, SharedChildProcess};
use crate::commands;
use crate::compare::sides::git::{self, GitRepository, isolated_git};
use crate::compare::sides::leftover_files;
use crate::fleet::job_commands::shell_quoted_if_necessary;
use crate::report::bisection::report_as_markdown_code_block as fenced;
use crate::verbs::shared::interrupt;
use crate::verbs::shared::nvrtc::InstallableNvrtc;
use kernelgate::display::harmless_text::EscapedForMarkdown;
use kernelgate::exit::ProcessExitReason;
use kernelgate::record::{RecordFoldersOfPackage, file};
use kernelgate_cuda::library;

/// Time after which a step of `kernelgate check` is treated as hung.
const CHECK_STEP_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// Output files of the previous `kernelgate check`, which are removed before the next check starts.
const CHECK_OUTPUT_FILE_NAMES: [&str; 8] = [
    "comment.md",
    "report.html",
    "change.svg",
    "junit.xml",
    "result.json",
    "bmf.json",
    "smaller-is-better.json",
    "resources.txt",
];
/// Smallest exit code that a step has if a signal ended it.
const MIN_EXIT_CODE_OF_SIGNAL: i32 = 128;
/// Largest accepted size in bytes of the comment file that compare or gate wrote; a comment has at
/// most 60,000 bytes.
const MAX_COMMENT_FILE_BYTES: u64 = 1 << 20;
/// Largest number of lines of `resources.txt` that the pull-request comment shows.
const MAX_RESOURCE_LINES_IN_COMMENT: usize = 30;
/// Largest number of kernels with worse resources that the pull-request comment shows unfolded.
const MAX_UNFOLDED_WORSE_KERNELS: usize = 10;

/// How a pull request is judged: against a build of its base, or against a committed baseline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum CompareOrGate {
    /// Compare if git has the base and both sides build with kernelgate benches, else gate if this
    /// device has a baseline
    #[default]
    #[value(name = "auto")]
    CompareElseGate,
    /// Build base and head here and interleave their processes: sees the smallest differences
    #[value(name = "compare")]
    CompareBuilds,
    /// Time the head with `cargo bench` and compare it with the committed baseline of this device
    #[value(name = "gate")]
    GateAgainstBaseline,
}

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes, the first that applies to a part: 2 usage or broken input, so \
                        that nothing was judged; 4 refused, not comparable; 1 regressed, or wrong; \
                        3 inconclusive, which is no pass unless --allow-inconclusive is given; 0 \
                        fine. Another code of a part (130: interrupted) ends the check at once."
)]
pub struct CheckCommandArguments {
    /// Revision to compare with; the base is its merge base with HEAD, so that changes merged later
    /// do not count [default: origin/main where git has it, else main]
    #[arg(id = "base", long = "base", env = "PERF_BASE", value_name = "REV")]
    base_revision: Option<String>,
    /// How to judge
    #[arg(
        value_name = "MODE",
        long = "mode",
        env = "PERF_MODE",
        value_enum,
        default_value = "auto"
    )]
    judging_method: CompareOrGate,
    /// Use only cases whose id matches this regular expression
    #[arg(id = "filter", long = "filter", env = "PERF_FILTER", value_name = "REGEX")]
    case_id_regex: Option<String>,
    /// Use only this bench binary (repeatable)
    #[arg(id = "bench", long = "bench", value_name = "NAME")]
    bench_names: Vec<String>,
    /// Time limit of the comparison's measurement; the confirmation of slower cases may take as
    /// long again
    #[arg(
        id = "budget",
        long = "budget",
        env = "PERF_BUDGET",
        value_name = "TIME",
        default_value = "10m"
    )]
    comparison_time_limit: String,
    /// Time that a process of the comparison spends on a case [default: 0.4s, on a GPU 0.15s]
    #[arg(long = "case-time", env = "PERF_CASE_TIME", value_name = "TIME")]
    process_time_per_case: Option<String>,
    /// Baseline of the gate
    #[arg(
        id = "baseline",
        long = "baseline",
        env = "PERF_BASELINE",
        value_name = "NAME",
        default_value = "main"
    )]
    gate_baseline_name: String,
    /// Number of runs of `cargo bench -- --quick` that the gate judges
    #[arg(id = "runs", 
        long = "runs",
        env = "PERF_RUNS",
        value_name = "COUNT",
        default_value_t = 3,
        value_parser = clap::value_parser!(u16).range(1..=100)
    )]
    gate_run_count: u16,
    /// Folder of the results: comment.md, report.html, change.svg, junit.xml, result.json,
    /// bmf.json, smaller-is-better.json, resources.txt, and report/ of the gate [default:
    /// perf-check/ of the target folder]
    #[arg(id = "out", long = "out", env = "PERF_OUT", value_name = "DIR")]
    results_folder: Option<PathBuf>,
    /// Architecture for which the recorded resources of kernels are checked, with the NVRTC of this
    /// machine or, if python3 is there, one that pip fetches
    #[arg(
        id = "arch",
        long = "arch",
        env = "PERF_ARCH",
        value_name = "ARCH",
        default_value = "sm_90a"
    )]
    resource_check_arch: String,
    /// Exit with 0 in place of 3 (inconclusive), on runners that are too noisy for a verdict
    #[arg(long, env = "PERF_ALLOW_INCONCLUSIVE", value_parser = FalseyValueParser::new())]
    allow_inconclusive: bool,
    /// Print the commands of the check's steps and run none
    #[arg(long)]
    dry_run: bool,
}

struct CheckInProgress<'a> {
    arguments: &'a CheckCommandArguments,
    store: &'a RecordFoldersOfPackage,
    output_folder: PathBuf,
    kernelgate_program: PathBuf,
    running_child: SharedChildProcess,
}

/// Outcome of the method, compare or gate, by which the pull request was judged.
struct CompareOrGateOutcome {
    judging_verb: &'static str,
    exit: ProcessExitReason,
    /// The message that `cargo bench` ended with an error; `None` if all its runs ended well.
    bench_failure_message: Option<String>,
}

/// Outcome of the check of the compiled kernels' resources (registers, spills) against their
/// record.
struct KernelResourcesOutcome {
    exit: ProcessExitReason,
    /// Markdown that the pull-request comment shows unfolded; empty if no kernel got worse.
    markdown_shown_unfolded: String,
    /// Folded text.
    folded_markdown: String,
}

pub fn run_check_command(
    arguments: &CheckCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    require_architecture_name("--arch", &arguments.resource_check_arch)?;
    let target = store.generated_files_folder.parent().map(PathBuf::from).unwrap_or_default();
    let check = CheckInProgress {
        arguments,
        store,
        output_folder: arguments
            .results_folder
            .clone()
            .unwrap_or_else(|| target.join("perf-check")),
        kernelgate_program: std::env::current_exe().context("failed to find this program")?,
        running_child: interrupt::forward_interrupts_to_child()?,
    };
    if !arguments.dry_run {
        std::fs::create_dir_all(&check.output_folder)
            .with_context(|| format!("--out: failed to make {}", check.output_folder.display()))?;
        for name in CHECK_OUTPUT_FILE_NAMES {
            leftover_files::remove_file_or_folder_if_present(&check.output_folder.join(name))
                .with_context(|| format!("--out: failed to remove {name} of the last check"))?;
        }
    }
    let judged = check.compare_or_gate()?;
    let checked = check.check_kernel_resources(&target)?;
    if arguments.dry_run {
        return Ok(ProcessExitReason::Success);
    }
    check.complete_and_print_comment(&judged, &checked)?;
    let exit = judged.exit.more_severe(checked.exit);
    if exit == ProcessExitReason::Inconclusive && arguments.allow_inconclusive {
        print_check_message("inconclusive, and allowed");
        return Ok(ProcessExitReason::Success);
    }
    Ok(exit)
}

fn print_check_message(text: &str) {
    eprintln!("check: {text}");
}

impl CheckInProgress<'_> {
    /// Prints a step's command line before the step runs, unless `--verbose` prints every command
    /// anyway.
    fn print_step_command(&self, command: &str) {
        if self.arguments.dry_run || !commands::is_command_printing_enabled() {
            print_check_message(command);
        }
    }

    /// Judges the head of the pull request by compare if that is possible, else by gate.
    fn compare_or_gate(&self) -> anyhow::Result<CompareOrGateOutcome> {
        let mode = self.arguments.judging_method;
        let base = match mode {
            CompareOrGate::GateAgainstBaseline => Err(String::new()),
            CompareOrGate::CompareElseGate | CompareOrGate::CompareBuilds => {
                self.merge_base_commit()
            }
        };
        let why_not = match (base, mode) {
            (Ok(base), _) => {
                let exit = self.run_compare_verb(&base)?;
                // If `kernelgate compare` wrote no result file, it compared nothing, and the gate
                // may judge in its place.
                let failed = exit == ProcessExitReason::InvalidUsageOrInput
                    && !self.output_folder.join("result.json").is_file();
                let gate = mode == CompareOrGate::CompareElseGate
                    && failed
                    && self.find_baseline_for_device()?.is_ok();
                if !gate {
                    return Ok(CompareOrGateOutcome {
                        judging_verb: "compare",
                        exit,
                        bench_failure_message: None,
                    });
                }
                print_check_message(
                    "compare was not possible (above): the committed baseline is the second best",
                );
                return self.run_benches_and_gate_verb();
            }
            (Err(why), CompareOrGate::CompareBuilds) => {
                anyhow::bail!("compare is not possible: {why}")
            }
            (Err(why), _) => why,
        };
        if let Err(missing) = self.find_baseline_for_device()? {
            let why_not = match why_not.is_empty() {
                true => String::new(),
                false => format!(" No comparison: {why_not}."),
            };
            anyhow::bail!(
                "nothing to judge by.{why_not} No gate: {missing}; record a baseline on this \
                 machine (kernelgate baseline save {} --runs 5) and commit baselines/, or fetch \
                 the whole history",
                self.arguments.gate_baseline_name
            );
        }
        self.run_benches_and_gate_verb()
    }

    /// The base commit of the pull request: the merge base of `--base` and HEAD. The error states
    /// why kernelgate found no merge base.
    fn merge_base_commit(&self) -> Result<String, String> {
        let repository = GitRepository::open_around_folder(&self.store.package_root)
            .map_err(|_| "this is no git checkout".to_owned())?;
        let resolve =
            |name: &str| repository.resolve_revision(name).map_err(|error| error.to_string());
        let base = match &self.arguments.base_revision {
            Some(name) => resolve(name)?,
            None => resolve("origin/main").or_else(|_| resolve("main"))?,
        };
        let mut merge_base = isolated_git(&repository.work_tree_root);
        merge_base.args(["merge-base", &base.full_commit_id, "HEAD"]);
        git::run_git_or_fail(&mut merge_base, "find the merge base").map_err(|_| {
            format!(
                "`{}` and HEAD have no common commit here (a shallow clone: fetch the whole \
                 history)",
                base.revision_name
            )
        })
    }

    fn run_compare_verb(&self, base: &str) -> anyhow::Result<ProcessExitReason> {
        let short = |commit: &str| commit.get(..12).unwrap_or(commit).to_owned();
        let CheckCommandArguments {
            comparison_time_limit: budget,
            process_time_per_case: case_time,
            case_id_regex: filter,
            ..
        } = self.arguments;
        let mut line = vec!["compare".to_owned(), "--base".to_owned(), short(base)];
        line.extend(["--budget".to_owned(), budget.clone()]);
        line.extend(["--out".to_owned(), self.output_folder.display().to_string()]);
        line.extend(self.bench_flags_for_steps());
        // If the checkout is clean, its commit is the head of the comparison; otherwise the head is
        // the working tree with its changes.
        let ask = |arguments: &[&str]| {
            git::run_git_or_fail(isolated_git(&self.store.package_root).args(arguments), "ask")
        };
        if ask(&["status", "--porcelain"]).is_ok_and(|changes| changes.is_empty())
            && let Ok(head) = ask(&["rev-parse", "HEAD"])
        {
            line.extend(["--head".to_owned(), short(&head)]);
        }
        line.extend(case_time.iter().flat_map(|time| ["--case-time".to_owned(), time.clone()]));
        line.extend(filter.clone());
        self.run_own_verb_as_child(&line)
    }

    /// Runs `kernelgate baseline find`, and returns `Ok` if a baseline exists for this device, else
    /// the reason why no baseline was found.
    fn find_baseline_for_device(&self) -> anyhow::Result<Result<(), String>> {
        let name = &self.arguments.gate_baseline_name;
        self.print_step_command(&format!(
            "kernelgate baseline find {}",
            shell_quoted_if_necessary(name)
        ));
        if self.arguments.dry_run {
            return Ok(Ok(()));
        }
        let mut command = Command::new(&self.kernelgate_program);
        command.args(["baseline", "find", name]);
        commands::print_command_if_verbose(&command);
        let found =
            command.stdin(Stdio::null()).output().context("failed to start this program again")?;
        let why = String::from_utf8_lossy(&found.stderr).trim().to_owned();
        Ok(if found.status.success() { Ok(()) } else { Err(why) })
    }

    /// Times the head in several runs of `cargo bench`, and judges all runs together with
    /// `kernelgate gate`.
    fn run_benches_and_gate_verb(&self) -> anyhow::Result<CompareOrGateOutcome> {
        let CheckCommandArguments {
            gate_run_count: runs,
            case_id_regex: filter,
            gate_baseline_name: baseline,
            dry_run,
            ..
        } = self.arguments;
        let started = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string();
        let (mut sessions, mut died) = (Vec::new(), None);
        for number in 1..=*runs {
            let mut line = vec!["bench".to_owned(), "--no-fail-fast".to_owned()];
            line.extend(self.bench_flags_for_steps());
            line.extend(["--", "--quick", "--noplot"].map(str::to_owned));
            line.extend(filter.clone());
            self.print_step_command(&format!(
                "cargo {} (run {number} of {runs})",
                shell_quoted_arguments(&line)
            ));
            let session = format!("check-{started}-{}-{number}", std::process::id());
            let folder = self.store.runs_folder.join(&session);
            sessions.extend(["--session".to_owned(), folder.display().to_string()]);
            if *dry_run {
                continue;
            }
            let mut bench = Command::new(cargo::cargo_program_path());
            bench.args(&line).env("KERNELGATE_SESSION", &session);
            let code = self.run_step_and_return_exit_code(&mut bench)?;
            if code >= MIN_EXIT_CODE_OF_SIGNAL {
                std::process::exit(code);
            }
            if code != 0 {
                died = Some(format!("`cargo bench` ended with {code} (run {number} of {runs})"));
                died.iter().for_each(|died| print_check_message(died));
                if !folder.is_dir() {
                    return Ok(CompareOrGateOutcome {
                        judging_verb: "gate",
                        exit: ProcessExitReason::InvalidUsageOrInput,
                        bench_failure_message: died,
                    });
                }
            }
        }
        // If the report page cannot be drawn, the verdict stays the same.
        let page = self.output_folder.join("report").display().to_string();
        let report = [&["report".to_owned()], &sessions[..], &["--out".to_owned(), page]].concat();
        self.print_step_command(&format!("kernelgate {}", shell_quoted_arguments(&report)));
        if !dry_run
            && self.run_step_and_return_exit_code(
                Command::new(&self.kernelgate_program).args(&report),
            )? != 0
        {
            print_check_message("no page was drawn");
        }
        let out = ["--out".to_owned(), self.output_folder.display().to_string()];
        let gate = ["gate".to_owned(), "--baseline".to_owned(), baseline.clone()];
        let exit = self.run_own_verb_as_child(&[&gate[..], &sessions, &out].concat())?;
        // If an output is wrong, `cargo bench` fails and so does the gate; an error of `cargo
        // bench` therefore counts only if the gate would pass.
        let fails = ![ProcessExitReason::Success, ProcessExitReason::Inconclusive].contains(&exit);
        let exit =
            if died.is_some() && !fails { ProcessExitReason::InvalidUsageOrInput } else { exit };
        Ok(CompareOrGateOutcome { judging_verb: "gate", exit, bench_failure_message: died })
    }

    fn bench_flags_for_steps(&self) -> impl Iterator<Item = String> {
        self.arguments.bench_names.iter().flat_map(|name| ["--bench".to_owned(), name.clone()])
    }

    /// Runs another verb of this program in a child process, with standard output redirected to
    /// standard error.
    fn run_own_verb_as_child(&self, line: &[String]) -> anyhow::Result<ProcessExitReason> {
        self.print_step_command(&format!("kernelgate {}", shell_quoted_arguments(line)));
        if self.arguments.dry_run {
            return Ok(ProcessExitReason::Success);
        }
        let code =
            self.run_step_and_return_exit_code(Command::new(&self.kernelgate_program).args(line))?;
        Ok(exit_reason_or_end_check(code))
    }

    /// Runs a step's command with standard output redirected to standard error, and returns its
    /// exit code.
    fn run_step_and_return_exit_code(&self, command: &mut Command) -> anyhow::Result<i32> {
        let program = command.get_program().to_string_lossy().into_owned();
        command.stdin(Stdio::null()).stdout(std::io::stderr());
        // No memory limit applies to a step of the check, because a step that needs much memory
        // limits its own bench processes.
        let ended = self.running_child.start_child_process(command);
        let ended = ended
            .and_then(|_| self.running_child.wait_or_kill_at_limits(CHECK_STEP_TIMEOUT, u64::MAX));
        let ended = ended.with_context(|| format!("failed to start {program}"))?;
        match ended {
            // A step that a signal ended counts as interrupted (130), which ends the whole check.
            ChildProcessEnd::Exited(status) => {
                Ok(status.code().unwrap_or(ProcessExitReason::INTERRUPTED_EXIT_CODE))
            }
            ChildProcessEnd::KilledAtTimeout | ChildProcessEnd::KilledAboveMemoryBytes(_) => {
                anyhow::bail!("{program} was ended")
            }
        }
    }

    /// Compiles the kernels and compares their resources with the record, if there is a record and
    /// NVRTC is found or can be installed.
    fn check_kernel_resources(&self, target: &Path) -> anyhow::Result<KernelResourcesOutcome> {
        let arch = &self.arguments.resource_check_arch;
        let unchecked = |why: String| KernelResourcesOutcome {
            exit: ProcessExitReason::Success,
            markdown_shown_unfolded: String::new(),
            folded_markdown: format!("not checked: {why}"),
        };
        let line = ["resources", "--arch", arch, "--check"].map(str::to_owned);
        if self.arguments.dry_run {
            print_check_message(&format!(
                "kernelgate {} (where resources are recorded)",
                shell_quoted_arguments(&line)
            ));
            return Ok(unchecked(String::new()));
        }
        let record = resources::resources_record_path(self.store, arch);
        if !record.is_file() {
            return Ok(unchecked(format!("nothing is recorded for {arch}")));
        }
        let mut command = Command::new(&self.kernelgate_program);
        if library::choose_nvrtc_library().is_none() {
            match InstallableNvrtc::NvrtcOfCuda13.install_nvrtc_if_missing(target) {
                Ok(folder) => drop(command.env("KERNELGATE_CUDA_LIBS", folder)),
                Err(error) => return Ok(unchecked(format!("no NVRTC here, and {error:#}"))),
            }
        }
        self.print_step_command(&format!("kernelgate {}", shell_quoted_arguments(&line)));
        command.args(&line);
        commands::print_command_if_verbose(&command);
        let output =
            command.stdin(Stdio::null()).output().context("failed to start this program again")?;
        let exit = exit_reason_or_end_check(
            output.status.code().unwrap_or(ProcessExitReason::INTERRUPTED_EXIT_CODE),
        );
        let text = [&output.stdout[..], &output.stderr[..]].concat();
        let path = self.output_folder.join("resources.txt");
        let text = String::from_utf8_lossy(&text);
        replace_output_file(&path, &text)?;
        Ok(resources_part_of_comment(exit, &text))
    }

    /// Adds the kernel resources and the commands of the steps to the comment of compare or gate,
    /// and prints the comment.
    fn complete_and_print_comment(
        &self,
        judged: &CompareOrGateOutcome,
        checked: &KernelResourcesOutcome,
    ) -> anyhow::Result<()> {
        let path = self.output_folder.join("comment.md");
        let mut text = file::read_untrusted_text_up_to(&path, MAX_COMMENT_FILE_BYTES)
            .unwrap_or_else(|_| {
                format!(
                    "**check: nothing was judged** (exit {} of `{}`): the log says why.\n",
                    judged.exit as u8, judged.judging_verb
                )
            });
        if let Some(died) = &judged.bench_failure_message {
            let _ =
                write!(text, "\n**{died}**: a bench that died is not judged; the log has more.\n");
        }
        if !checked.markdown_shown_unfolded.is_empty() {
            let _ = write!(text, "\n{}\n", checked.markdown_shown_unfolded);
        }
        let _ = write!(
            text,
            "\n<details><summary>Kernel resources ({})</summary>\n\n{}\n\n</details>\n",
            self.arguments.resource_check_arch,
            fenced(&checked.folded_markdown)
        );
        replace_output_file(&path, &text)?;
        print!("{text}");
        Ok(())
    }
}

/// Replaces an output file of the check; if the write fails, the file keeps its old contents.
fn replace_output_file(path: &Path, text: &str) -> anyhow::Result<()> {
    file::write_text_atomically(path, text).context("--out")
}

/// The exit reason that the exit code of a step means; a code that kernelgate does not define ends
/// the whole check.
fn exit_reason_or_end_check(code: i32) -> ProcessExitReason {
    ProcessExitReason::from_exit_code(code).unwrap_or_else(|| {
        print_check_message(&format!("ended with {code}"));
        std::process::exit(code)
    })
}

/// Command-line arguments of a step, quoted as in a shell.
fn shell_quoted_arguments(line: &[String]) -> String {
    line.iter().map(|word| shell_quoted_if_necessary(word)).collect::<Vec<_>>().join(" ")
}

/// Makes the comment's part on kernel resources: kernels that got worse are visible, the rest is
/// folded.
fn resources_part_of_comment(exit: ProcessExitReason, text: &str) -> KernelResourcesOutcome {
    let first = text.lines().next().unwrap_or_default();
    let seen = match exit {
        ProcessExitReason::Success => String::new(),
        ProcessExitReason::Regression => {
            print_check_message("kernel resources got worse");
            let worse = text.lines().filter_map(|line| line.strip_prefix("WORSE "));
            let worse: Vec<String> = worse
                .take(MAX_UNFOLDED_WORSE_KERNELS)
                .map(|line| format!("- {}", EscapedForMarkdown(line)))
                .collect();
            format!(
                "**Kernel resources got worse** ({}):\n\n{}",
                EscapedForMarkdown(first),
                worse.join("\n")
            )
        }
        ProcessExitReason::InvalidUsageOrInput
        | ProcessExitReason::Inconclusive
        | ProcessExitReason::ResultsNotComparable => {
            print_check_message("kernel resources were not compared");
            format!("**Kernel resources were not compared**: {}", EscapedForMarkdown(first))
        }
    };
    let mut lines: Vec<&str> = text.lines().take(MAX_RESOURCE_LINES_IN_COMMENT).collect();
    if text.lines().count() > MAX_RESOURCE_LINES_IN_COMMENT {
        lines.push("…");
    }
    KernelResourcesOutcome {
        exit,
        markdown_shown_unfolded: seen,
        folded_markdown: lines.join("\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_of_this_program_are_kept_and_others_end_the_check() {
        assert_eq!(
            [0, 1, 2, 3, 4]
                .map(|code| ProcessExitReason::from_exit_code(code).map(|exit| exit as i32)),
            [0, 1, 2, 3, 4].map(Some)
        );
        assert_eq!([101, 130, 141].map(ProcessExitReason::from_exit_code), [None; 3]);
    }

    #[test]
    fn kernels_that_got_worse_stay_visible_in_a_shortened_comment() {
        let lines: Vec<String> = (0..40).map(|i| format!("WORSE k{i}: registers")).collect();
        let text = format!("sm_90a: 40 kernels\n{}\n", lines.join("\n"));
        let worse = resources_part_of_comment(ProcessExitReason::Regression, &text);
        let heading = "**Kernel resources got worse** (sm_90a: 40 kernels):";
        assert_eq!(worse.markdown_shown_unfolded.lines().next(), Some(heading));
        assert_eq!(worse.markdown_shown_unfolded.lines().count(), 2 + MAX_UNFOLDED_WORSE_KERNELS);
        assert_eq!(worse.folded_markdown.lines().count(), MAX_RESOURCE_LINES_IN_COMMENT + 1);
        let fine = resources_part_of_comment(ProcessExitReason::Success, "sm_90a: nothing changed");
        assert_eq!(
            (fine.markdown_shown_unfolded.as_str(), fine.folded_markdown.as_str()),
            ("", "sm_90a: nothing changed")
        );
        let refused = resources_part_of_comment(
            ProcessExitReason::ResultsNotComparable,
            "refused: compiler is `a` and `b`",
        );
        insta::assert_snapshot!(refused.markdown_shown_unfolded, @"**Kernel resources were not compared**: refused: compiler is `a` and `b`");
    }
}
