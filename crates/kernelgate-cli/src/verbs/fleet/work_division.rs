//! How submitted work is divided, and the verb that the shards run.

use anyhow::Context as _;
use kernelgate::display::words_without_flags;

use crate::gate::rules::rules_file::MAX_RULE_RATIO;
use crate::verbs::shared::settings::{check_flag_range, parse_fraction};

/// Flags of `compare` that name its sides; the job has the sides as folders.
const COMPARED_SIDE_FLAGS: [&str; 5] =
    ["--base", "--head", "--base-dir", "--head-dir", "--leave-out"];

/// Flags that divide the work into shards.
#[derive(Debug, clap::Args)]
pub struct ShardDivision {
    /// Number of shards
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub shards: u32,
    /// Number of further attempts of a shard that failed
    #[arg(long, value_name = "COUNT", default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub retries: u32,
    /// Largest relative difference of the anchors of two shards that are merged
    #[arg(long, value_name = "FRACTION", value_parser = parse_fraction)]
    pub anchor_tolerance: Option<f64>,
    /// `bench`, `compare` or `calibrate` with their flags, without --shard
    #[arg(last = true, required = true, value_name = "VERB FLAGS")]
    pub command: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardVerb {
    /// `cargo bench`.
    Bench,
    /// `kernelgate compare`.
    Compare,
    /// `kernelgate calibrate`.
    Calibrate,
}

impl ShardDivision {
    /// Splits the command into its verb and its flags.
    ///
    /// # Errors
    /// Fails if the verb cannot be divided.
    pub fn split_verb_and_flags(&self) -> anyhow::Result<(ShardVerb, &[String])> {
        let (verb, flags) = self.command.split_first().context("no verb")?;
        let verb = match verb.as_str() {
            "bench" => ShardVerb::Bench,
            "compare" => ShardVerb::Compare,
            "calibrate" => ShardVerb::Calibrate,
            other => anyhow::bail!("`{other}`: bench, compare and calibrate can be submitted"),
        };
        let own = |flag: &&String| {
            ["--shard", "--shard-output", "--output", "--out", "--dir"]
                .iter()
                .any(|own| *flag == own || flag.starts_with(&format!("{own}=")))
        };
        if let Some(flag) = flags.iter().find(own) {
            anyhow::bail!(
                "{flag}: the job sets it; `submit` takes --dir, --shards and --folder before `--`"
            );
        }
        check_flag_range("--anchor-tolerance", self.anchor_tolerance, 0.0..=MAX_RULE_RATIO)?;
        Ok((verb, flags))
    }
}

/// Flags of `compare` without those that name base and head.
pub fn without_side_flags(flags: &[String]) -> Vec<String> {
    words_without_flags(flags.iter().cloned(), &COMPARED_SIDE_FLAGS, &[])
}
