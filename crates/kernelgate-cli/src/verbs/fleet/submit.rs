//! `kernelgate submit`: shards as jobs of a scheduler, followed until the merge has decided.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use kernelgate::display::without_flags;
use kernelgate::exit::Exit;
use kernelgate::record::text::{printable, printable_path};
use kernelgate::record::{Store, file};

use crate::benches::child::Running;
use crate::benches::find::BenchChoice;
use crate::fleet::kubernetes::KubernetesOptions;
use crate::fleet::pieces::Tolerance;
use crate::fleet::slurm::{self, SlurmOptions, TaskState};
use crate::fleet::submission::{Submission, retries};
use crate::fleet::task::{Places, Work};
use crate::verbs::shared::interrupt;

/// Flags of `compare` that name its sides, which the job has as folders.
const SIDES: [&str; 5] = ["--base", "--head", "--base-dir", "--head-dir", "--leave-out"];
/// Pause between two calls of `squeue`.
const PAUSE: Duration = Duration::from_secs(2);
/// Time in which the result of a job that has left the queue reaches this machine.
const GRACE: Duration = Duration::from_secs(60);
/// Lines of a log that are shown of a task that failed.
const LOG_LINES: usize = 8;

#[derive(Debug, clap::Subcommand)]
pub enum Scheduler {
    /// Submit a job array to Slurm, one shard a task, and follow it to the verdict
    Slurm(SlurmArguments),
    /// Print an Indexed Job and a Job that merges, for `kubectl apply`
    Kubernetes(KubernetesArguments),
}

/// How the work is divided.
#[derive(Debug, clap::Args)]
struct Division {
    /// Number of shards
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    shards: u32,
    /// Attempts of a shard after the first
    #[arg(long, value_name = "COUNT", default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=100))]
    retries: u32,
    /// Largest relative difference of the anchors of two shards that are merged
    #[arg(long, value_name = "FRACTION")]
    anchor_tolerance: Option<f64>,
    /// `bench`, `compare` or `calibrate` with their flags, without --shard
    #[arg(last = true, required = true, value_name = "VERB FLAGS")]
    command: Vec<String>,
}

#[derive(Debug, clap::Args)]
pub struct SlurmArguments {
    #[command(flatten)]
    division: Division,
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
    /// Print both job scripts and submit nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    benches: BenchChoice,
}

#[derive(Debug, clap::Args)]
pub struct KubernetesArguments {
    #[command(flatten)]
    division: Division,
    /// Print the manifests; nothing is ever applied
    #[arg(long, required = true)]
    dry_run: bool,
    /// Name of the Jobs
    #[arg(long, value_name = "NAME", default_value = "kernelgate")]
    name: String,
    /// Image with the package, the bench executables and kernelgate
    #[arg(long)]
    image: String,
    /// Folder of the package in the image
    #[arg(long, value_name = "DIR", default_value = "/kernels")]
    package_dir: PathBuf,
    /// Bench executable in the image (repeatable), for `bench`
    #[arg(long, value_name = "FILE")]
    executable: Vec<PathBuf>,
    /// Folder where the claim is mounted
    #[arg(long, value_name = "DIR", default_value = "/submission")]
    folder: PathBuf,
    /// Claim of a volume that all pods can write
    #[arg(long, value_name = "NAME", default_value = "kernelgate")]
    claim: String,
    /// Resource of a GPU, one a pod; empty for hosts
    #[arg(long, value_name = "NAME", default_value = "nvidia.com/gpu")]
    gpu_resource: String,
    /// Label that a node must have (repeatable)
    #[arg(long, value_name = "LABEL=VALUE", value_parser = parse_label)]
    node_selector: Vec<(String, String)>,
    /// Pods at once [default: all shards]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    parallelism: Option<u32>,
    /// Seconds after which the Job is ended
    #[arg(long, value_name = "SECONDS")]
    deadline: Option<u64>,
}

fn parse_label(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').filter(|(label, _)| !label.is_empty());
    let (label, value) = parts.ok_or_else(|| format!("`{text}`: a label is NAME=VALUE"))?;
    Ok((label.to_owned(), value.to_owned()))
}

/// Verb of the shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    Bench,
    Compare,
    Calibrate,
}

impl Division {
    /// The verb and its flags.
    ///
    /// # Errors
    /// When the verb cannot be divided.
    fn verb(&self) -> anyhow::Result<(Verb, &[String])> {
        let (verb, flags) = self.command.split_first().context("no verb")?;
        let verb = match verb.as_str() {
            "bench" => Verb::Bench,
            "compare" => Verb::Compare,
            "calibrate" => Verb::Calibrate,
            other => anyhow::bail!("`{other}`: bench, compare and calibrate can be submitted"),
        };
        let own = |flag: &&String| {
            ["--shard", "--shard-output", "--output", "--out", "--dir"]
                .iter()
                .any(|own| *flag == own || flag.starts_with(&format!("{own}=")))
        };
        if let Some(flag) = flags.iter().find(own) {
            anyhow::bail!("{flag}: the job sets it; leave it out");
        }
        Ok((verb, flags))
    }
}

/// Submits the work, or prints what would be submitted.
///
/// # Errors
/// When nothing can be built, or the scheduler refuses.
pub fn run(scheduler: &Scheduler, store: &Store) -> anyhow::Result<Exit> {
    match scheduler {
        Scheduler::Slurm(arguments) => slurm(arguments, store),
        Scheduler::Kubernetes(arguments) => {
            kubernetes(arguments)?;
            Ok(Exit::Fine)
        }
    }
}

fn kubernetes(arguments: &KubernetesArguments) -> anyhow::Result<()> {
    let division = &arguments.division;
    let (verb, flags) = division.verb()?;
    let places = Places {
        program: "kernelgate".into(),
        package: arguments.package_dir.clone(),
        folder: arguments.folder.clone(),
    };
    let value = |name: &str| -> Option<PathBuf> {
        let place = flags.iter().position(|flag| flag == name)?;
        flags.get(place + 1).map(PathBuf::from)
    };
    let work = match verb {
        Verb::Bench => {
            anyhow::ensure!(
                !arguments.executable.is_empty(),
                "--executable names each bench executable in the image"
            );
            let package = &arguments.package_dir;
            let executables =
                arguments.executable.iter().map(|path| (path.clone(), package.clone()));
            Work::Bench { executables: executables.collect(), flags: flags.to_vec() }
        }
        Verb::Compare => {
            let both = value("--base-dir").zip(value("--head-dir"));
            let (base, head) = both.context(
                "compare needs --base-dir and --head-dir: folders of executables in the image",
            )?;
            Work::Compare { sides: [base, head], flags: without_sides(flags) }
        }
        Verb::Calibrate => {
            let executables = arguments.executable.first().and_then(|path| path.parent());
            let executables = executables.context("--executable names a bench in the image")?;
            Work::Calibrate { executables: executables.to_owned(), flags: flags.to_vec() }
        }
    };
    let options = KubernetesOptions {
        name: arguments.name.clone(),
        shards: division.shards,
        parallelism: arguments.parallelism.unwrap_or(division.shards),
        image: arguments.image.clone(),
        gpu_resource: Some(arguments.gpu_resource.clone()).filter(|name| !name.is_empty()),
        node_selector: arguments.node_selector.clone(),
        claim: arguments.claim.clone(),
        retries: division.retries,
        deadline_s: arguments.deadline,
    };
    print!("{}", options.manifests(&work, &places, division.anchor_tolerance));
    Ok(())
}

fn without_sides(flags: &[String]) -> Vec<String> {
    without_flags(flags.iter().cloned(), &SIDES, &[])
}

/// A submission to Slurm while it is followed.
struct Followed<'a> {
    arguments: &'a SlurmArguments,
    places: Places,
    options: SlurmOptions,
    submission: Submission,
    running: Running,
}

fn slurm(arguments: &SlurmArguments, store: &Store) -> anyhow::Result<Exit> {
    let division = &arguments.division;
    let (verb, flags) = division.verb()?;
    let folder = arguments.folder.clone().unwrap_or_else(|| store.work.join("submit"));
    let here = std::env::current_dir().context("failed to find the working folder")?;
    let folder = here.join(folder);
    let places = Places {
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
    let tolerance = division.anchor_tolerance;
    let running = interrupt::watched_saying(|| {
        ": jobs that were submitted go on; --resume follows them".to_owned()
    })?;
    if arguments.dry_run {
        let work = build(arguments, &places, verb, flags, (false, &running))?;
        print!("{}", options.shard_script(&work, &places));
        print!("\n# The merge, when every task has ended.\n");
        print!("{}", options.merge_script(&work, &places, tolerance));
        return Ok(Exit::Fine);
    }
    let submission = Submission {
        command: division.command.clone(),
        shards: division.shards,
        arrays: Vec::new(),
        merge: None,
    };
    let submission = match arguments.resume {
        true => submission.resume(&folder)?,
        false => submission.claim(&folder)?,
    };
    let mut followed = Followed { arguments, places, options, submission, running };
    if followed.submission.arrays.is_empty() {
        if let Err(error) = followed.start(verb, flags) {
            if followed.submission.arrays.is_empty() {
                // Nothing was submitted: the folder is free again.
                let _ = std::fs::remove_file(folder.join(crate::fleet::submission::FILE));
            }
            return Err(error);
        }
    } else if followed.exit().is_some() {
        let lacking =
            followed.submission.lacking(&followed.places, Tolerance(tolerance)).unwrap_or_default();
        if !lacking.is_empty() {
            followed.submit(&lacking)?;
        }
    }
    followed.follow()
}

/// Makes executables that every node sees, and the work of the jobs. Sides of a comparison are
/// built only for a submission.
fn build(
    arguments: &SlurmArguments,
    places: &Places,
    verb: Verb,
    flags: &[String],
    (submits, running): (bool, &Running),
) -> anyhow::Result<Work> {
    if verb == Verb::Compare {
        let builds = places.folder.join("builds");
        if submits {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("compare").args(flags).arg("--build-only").arg(&builds);
            let status = command.status().context("failed to start the build")?;
            anyhow::ensure!(status.success(), "the sides were not built: nothing was submitted");
        }
        let sides = [builds.join("base"), builds.join("head")];
        return Ok(Work::Compare { sides, flags: without_sides(flags) });
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
        Verb::Calibrate => Work::Calibrate { executables: bin, flags },
        _ => Work::Bench { executables, flags },
    })
}

impl Followed<'_> {
    /// Writes the scripts and submits all shards.
    fn start(&mut self, verb: Verb, flags: &[String]) -> anyhow::Result<()> {
        let folder = &self.places.folder;
        for name in ["records", "logs", "attempts"] {
            let path = folder.join(name);
            std::fs::create_dir_all(&path)
                .with_context(|| format!("failed to make {}", path.display()))?;
        }
        let program = std::env::current_exe()?;
        std::fs::copy(&program, &self.places.program)
            .with_context(|| format!("failed to copy {}", program.display()))?;
        let work = build(self.arguments, &self.places, verb, flags, (true, &self.running))?;
        let tolerance = self.arguments.division.anchor_tolerance;
        for (name, script) in [
            ("shards.sh", self.options.shard_script(&work, &self.places)),
            ("merge.sh", self.options.merge_script(&work, &self.places, tolerance)),
        ] {
            file::write_text(&folder.join(name), &script)
                .map_err(|error| anyhow::anyhow!("failed to {error}"))?;
        }
        self.submit(&(1..=self.options.shards).collect())
    }

    /// Submits an array of these shards, and the merge behind it.
    fn submit(&mut self, shards: &BTreeSet<u32>) -> anyhow::Result<()> {
        let folder = self.places.folder.clone();
        let _ = std::fs::remove_file(self.places.exit());
        let array = slurm::array_of(shards.iter().copied());
        let id = sbatch(&folder, "shards.sh", &[format!("--array={array}")])?;
        self.submission.arrays.push(id);
        self.submission.merge = None;
        let save = |submission: &Submission| {
            submission.save(&folder).map_err(|error| anyhow::anyhow!("failed to {error}"))
        };
        save(&self.submission)?;
        let merge = sbatch(&folder, "merge.sh", &[format!("--dependency=afterany:{id}")])
            .with_context(|| {
                format!(
                    "job array {id} goes on; when it has ended, `kernelgate merge {}` merges it",
                    self.places.records().display()
                )
            })?;
        self.submission.merge = Some(merge);
        save(&self.submission)?;
        say(&format!(
            "shards {array} of {} are job array {id}, merged by job {merge}; logs in {}",
            self.options.shards,
            printable_path(&folder.join("logs"))
        ));
        Ok(())
    }

    /// Exit code of the merge, once it has ended.
    fn exit(&self) -> Option<i32> {
        std::fs::read_to_string(self.places.exit()).ok()?.trim().parse().ok()
    }

    /// Waits for the merge, prints what happens meanwhile, then the result.
    fn follow(&self) -> anyhow::Result<Exit> {
        let (mut before, mut shown) = (String::new(), BTreeSet::new());
        let mut gone: Option<Instant> = None;
        let code = loop {
            if let Some(code) = self.exit() {
                break code;
            }
            let states = self.states()?;
            let now = counts(&states);
            if !states.is_empty() && now != before {
                say(&now);
                before = now;
            }
            for (task, state) in states.iter().filter(|(_, state)| state.has_failed()) {
                if shown.insert((*task, state.state.clone())) {
                    self.show_failed(*task, state);
                }
            }
            match (states.is_empty() && !self.merge_is_queued()?, gone) {
                (true, None) => gone = Some(Instant::now()),
                (true, Some(since)) if since.elapsed() > GRACE => anyhow::bail!(
                    "the jobs have left the queue and {} is not there: see {}; is the folder on a \
                     file system that all nodes share, with room left?",
                    self.places.exit().display(),
                    self.places.log("merge").display()
                ),
                (true, Some(_)) => {}
                (false, _) => gone = None,
            }
            std::thread::sleep(PAUSE);
        };
        for (shard, used) in retries(&self.places, self.options.shards) {
            say(&format!("shard {shard}: {used} of {} further attempts", self.options.retries));
        }
        let result = self.places.result().with_extension("txt");
        let text = std::fs::read_to_string(&result).unwrap_or_default();
        print!("{}", printable(&text));
        let exit = Exit::from_code(code).with_context(|| {
            format!("the merge ended with code {code}: see {}", self.places.log("merge").display())
        })?;
        if exit == Exit::Usage {
            show_end(&self.places.log("merge"));
        }
        if text.contains("missing: ") {
            say("the same command with --resume submits missing shards again");
        }
        Ok(exit)
    }

    /// States of the tasks of the current array; empty once Slurm has forgotten it.
    fn states(&self) -> anyhow::Result<BTreeMap<u32, TaskState>> {
        let Some(id) = self.submission.arrays.last() else { return Ok(BTreeMap::new()) };
        let format = format!("--format={}", slurm::SQUEUE_FORMAT);
        Ok(slurm::states(&squeue(&["--array", &format, &format!("--jobs={id}")])?))
    }

    fn merge_is_queued(&self) -> anyhow::Result<bool> {
        let Some(id) = self.submission.merge else { return Ok(false) };
        let printed = squeue(&["--format=%T", &format!("--jobs={id}")])?;
        let waits = ["PENDING", "RUNNING", "CONFIGURING", "COMPLETING"];
        Ok(printed.lines().any(|state| waits.contains(&state.trim())))
    }

    fn show_failed(&self, task: u32, state: &TaskState) {
        let log = self.places.log(&task.to_string());
        let on = if state.node.is_empty() { String::new() } else { format!(" on {}", state.node) };
        say(&format!("task {task}: {}{on} ({})", state.state, state.reason));
        match log.exists() {
            true => show_end(&log),
            false => say(&format!(
                "task {task}: no log {}: the node may not see this folder",
                log.display()
            )),
        }
    }
}

/// The last lines of a log.
fn show_end(log: &Path) {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    for line in &lines[lines.len().saturating_sub(LOG_LINES)..] {
        say(&format!("  {line}"));
    }
}

fn say(text: &str) {
    eprintln!("submit: {}", printable(text));
}

/// "3 running, 5 pending".
fn counts(states: &BTreeMap<u32, TaskState>) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for state in states.values() {
        *counts.entry(&state.state).or_default() += 1;
    }
    let each = counts.iter().map(|(state, count)| format!("{count} {}", state.to_lowercase()));
    each.collect::<Vec<_>>().join(", ")
}

/// Submits a script of the folder; the number of the job.
fn sbatch(folder: &Path, script: &str, options: &[String]) -> anyhow::Result<u64> {
    let mut command = Command::new("sbatch");
    command.arg("--parsable").args(options).arg(folder.join(script));
    let output = command.output().map_err(|cause| {
        anyhow::anyhow!("sbatch: {cause}: submit from a machine with Slurm's client programs")
    })?;
    let message = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(
        output.status.success(),
        "sbatch refused {script} ({}): {}",
        output.status,
        printable(message.trim())
    );
    let printed = String::from_utf8_lossy(&output.stdout);
    // "12;cluster" where there are several clusters.
    let id = printed.trim().split(';').next().and_then(|id| id.parse().ok());
    id.with_context(|| format!("sbatch printed `{}`, not a job", printed.trim()))
}

/// Output of `squeue`; empty where it no longer knows the job.
fn squeue(arguments: &[&str]) -> anyhow::Result<String> {
    let mut command = Command::new("squeue");
    command.args(["--noheader", "--states=all"]).args(arguments);
    let output = command.output().context("failed to start squeue")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
