//! `kernelgate compare`: two builds, their processes interleaved until every case is decided.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum as _;

use super::verdict::Output;
use crate::compare::progress::parse_duration;
use crate::compare::{self, CompareError, Request, Source};
use crate::exit::Exit;
use crate::gate::paired::Plan;
use crate::harness::args::{BackendName, EffortName, Filter};
use crate::record::Store;
use crate::report::{comparison, metrics};
use crate::workload::Override;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Only cases whose id matches this regular expression
    filter: Option<String>,
    /// What to compare with: any revision that git knows
    #[arg(long, value_name = "REV", required_unless_present = "base_dir")]
    base: Option<String>,
    /// What to judge [default: the working tree with uncommitted changes]
    #[arg(long, value_name = "REV")]
    head: Option<String>,
    /// Folder with the bench executables of the base, in place of a build
    #[arg(long, value_name = "DIR", conflicts_with = "base")]
    base_dir: Option<PathBuf>,
    /// Folder with the bench executables of the head, in place of a build
    #[arg(long, value_name = "DIR", conflicts_with = "head")]
    head_dir: Option<PathBuf>,
    /// Only this bench binary (repeatable)
    #[arg(long, value_name = "NAME")]
    bench: Vec<String>,
    /// Time for measuring, after which undecided cases are inconclusive; as much again where slower cases must be confirmed
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    budget: Duration,
    /// Most blocks of four processes
    #[arg(long, value_name = "COUNT", default_value_t = Plan::default().max_blocks)]
    max_blocks: usize,
    /// Smallest change that matters, as a fraction of the time
    #[arg(long, value_name = "FRACTION", default_value_t = Plan::default().relative)]
    relative: f64,
    /// Smallest change that matters, in nanoseconds
    #[arg(long, value_name = "NS", default_value_t = Plan::default().absolute_ns)]
    absolute: f64,
    /// At the end, a case without a visible change is unchanged if none above this fraction is possible
    #[arg(long, value_name = "FRACTION", default_value_t = Plan::default().tolerated)]
    tolerated: f64,
    /// Go on where the last comparison was interrupted
    #[arg(long)]
    resume: bool,
    /// Cargo profile of the builds
    #[arg(long, value_name = "NAME", default_value = "bench")]
    profile: String,
    /// Which cases, as of `cargo bench`
    #[arg(long, env = "KERNELGATE_EFFORT", value_enum)]
    effort: Option<EffortName>,
    /// Replace an axis' values, for example --axis s=512,777 (repeatable)
    #[arg(long, env = "KERNELGATE_AXIS", value_name = "AXIS=VALUE[,VALUE]", value_delimiter = ' ')]
    axis: Vec<Override>,
    /// Where to run: auto is the GPU if there is one, else the CPU
    #[arg(long, env = "KERNELGATE_BACKEND", value_enum)]
    backend: Option<BackendName>,
    /// Which GPU, counted from 0
    #[arg(long, env = "KERNELGATE_DEVICE", value_name = "NUMBER")]
    device: Option<usize>,
    /// Seed of the random inputs
    #[arg(long, env = "KERNELGATE_SEED", value_name = "NUMBER")]
    seed: Option<u64>,
    /// Seconds after which a kernel on the GPU is taken for hung
    #[arg(long, env = "KERNELGATE_TIMEOUT", value_name = "SECONDS")]
    timeout: Option<u64>,
    #[command(flatten)]
    output: Output,
}

pub fn run(arguments: &Arguments, store: &Store) -> anyhow::Result<Exit> {
    for (flag, value) in
        [("--relative", arguments.relative), ("--absolute", arguments.absolute), ("--tolerated", arguments.tolerated)]
    {
        anyhow::ensure!(value >= 0.0 && value.is_finite(), "{flag} takes a number from 0");
    }
    anyhow::ensure!((1..=10_000).contains(&arguments.max_blocks), "--max-blocks takes a number from 1 to 10000");
    anyhow::ensure!(
        std::env::var_os("KERNELGATE_DELAY").is_none(),
        "KERNELGATE_DELAY is set: it would slow both sides down; unset it"
    );
    Filter::parse(arguments.filter.as_deref(), false)?;
    let kept = store.runs.parent().map(PathBuf::from).unwrap_or_default();
    let source = |folder: &Option<PathBuf>, revision: &Option<String>| match (folder, revision) {
        (Some(folder), _) => Source::Folder(folder.clone()),
        (_, Some(revision)) => Source::Revision(revision.clone()),
        _ => Source::WorkTree,
    };
    let request = Request {
        base: source(&arguments.base_dir, &arguments.base),
        head: source(&arguments.head_dir, &arguments.head),
        benches: arguments.bench.clone(),
        filter: arguments.filter.clone(),
        settings: settings(arguments),
        head_delays: None,
        plan: Plan {
            relative: arguments.relative,
            absolute_ns: arguments.absolute,
            tolerated: arguments.tolerated.max(arguments.relative),
            max_blocks: arguments.max_blocks,
            ..Plan::default()
        },
        budget: arguments.budget,
        profile: arguments.profile.clone(),
        resume: arguments.resume,
        package: store.root.clone(),
        target: kept.parent().map(PathBuf::from).unwrap_or_default(),
        folder: kept.join("compare"),
    };
    let outcome = match compare::run(&request) {
        Ok(outcome) => outcome,
        Err(refused @ CompareError::Refused { .. }) => {
            eprintln!("{refused}");
            return Ok(Exit::Refused);
        }
        Err(error) => return Err(error.into()),
    };
    let summary = comparison::summary(&outcome, &again(arguments));
    arguments.output.tell(&comparison::text(&outcome), &summary, &outcome, &metrics::of_comparison(&outcome))?;
    Ok(outcome.exit())
}

/// The command that compares the same.
fn again(arguments: &Arguments) -> String {
    let mut words = vec!["kernelgate compare".to_owned()];
    let quoted = |text: &str| match text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-~^:@".contains(c)) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    };
    words.extend(arguments.filter.as_deref().map(quoted));
    let folder = |folder: &Option<PathBuf>| folder.as_ref().map(|folder| folder.display().to_string());
    for (flag, value) in [
        ("--base", arguments.base.clone()),
        ("--head", arguments.head.clone()),
        ("--base-dir", folder(&arguments.base_dir)),
        ("--head-dir", folder(&arguments.head_dir)),
    ] {
        words.extend(value.map(|value| format!("{flag} {}", quoted(&value))));
    }
    words.extend(arguments.bench.iter().map(|bench| format!("--bench {}", quoted(bench))));
    words.push(format!("--budget {}s", arguments.budget.as_secs_f64()));
    words.join(" ")
}

/// The flags that bench binaries take too, as the variables that stand for them.
fn settings(arguments: &Arguments) -> BTreeMap<String, String> {
    let word = |value: &dyn Fn() -> Option<clap::builder::PossibleValue>| value().map(|value| value.get_name().to_owned());
    let axes: Vec<String> = arguments.axis.iter().map(|wanted| format!("{}={}", wanted.axis, wanted.values.join(","))).collect();
    let settings = [
        ("KERNELGATE_EFFORT", arguments.effort.and_then(|effort| word(&|| effort.to_possible_value()))),
        ("KERNELGATE_BACKEND", arguments.backend.and_then(|backend| word(&|| backend.to_possible_value()))),
        ("KERNELGATE_AXIS", (!axes.is_empty()).then(|| axes.join(" "))),
        ("KERNELGATE_DEVICE", arguments.device.map(|device| device.to_string())),
        ("KERNELGATE_SEED", arguments.seed.map(|seed| seed.to_string())),
        ("KERNELGATE_TIMEOUT", arguments.timeout.map(|seconds| seconds.to_string())),
    ];
    settings.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}
