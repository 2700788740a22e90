//! Flags that divide a submission into shards, and the kernelgate verb that each shard runs.

use anyhow::Context as _;
use kernelgate::display::words_without_flags;

use crate::gate::rules::rules_file::MAX_RATIO_IN_RULES;
use crate::verbs::shared::settings::{check_flag_in_range, parse_fraction_or_percentage};

/// Flags of `kernelgate compare` that name base and head; a job gets folders with both builds in
/// their place.
const COMPARED_SIDE_FLAGS: [&str; 5] =
    ["--base", "--head", "--base-dir", "--head-dir", "--leave-out"];

/// Command-line flags that divide the work of a submission into shards.
#[derive(Debug, clap::Args)]
pub struct ShardDivisionFlags {
    /// Number of shards
    #[arg(id = "shards", long = "shards", value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub shard_count: u32,
    /// Number of further attempts of a shard after it failed
    #[arg(long = "retries", value_name = "COUNT", default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub max_retries_per_shard: u32,
    /// Largest relative difference between the anchors (rates of fixed work) of two shards that are
    /// merged
    #[arg(id = "anchor_tolerance", long = "anchor-tolerance", value_name = "FRACTION", value_parser = parse_fraction_or_percentage)]
    pub max_relative_anchor_difference: Option<f64>,
    /// Command that each shard runs, which is `bench`, `compare` or `calibrate` with its flags,
    /// without --shard
    #[arg(id = "command", last = true, required = true, value_name = "VERB FLAGS")]
    pub shard_command: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VerbOfShards {
    /// `cargo bench`.
    CargoBench,
    /// `kernelgate compare`.
    CompareBuilds,
    /// `kernelgate calibrate`.
    CalibrateThresholds,
}

impl ShardDivisionFlags {
    /// Splits the command for the shards into its verb and its flags.
    ///
    /// # Errors
    /// Fails if kernelgate cannot divide the verb into shards.
    pub fn split_into_verb_and_flags(&self) -> anyhow::Result<(VerbOfShards, &[String])> {
        let (verb, flags) = self.shard_command.split_first().context("no verb")?;
        let verb = match verb.as_str() {
            "bench" => VerbOfShards::CargoBench,
            "compare" => VerbOfShards::CompareBuilds,
            "calibrate" => VerbOfShards::CalibrateThresholds,
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
        check_flag_in_range(
            "--anchor-tolerance",
            self.max_relative_anchor_difference,
            0.0..=MAX_RATIO_IN_RULES,
        )?;
        Ok((verb, flags))
    }
}

/// The flags of `kernelgate compare` except those that name base and head.
pub fn without_base_and_head_flags(flags: &[String]) -> Vec<String> {
    words_without_flags(flags.iter().cloned(), &COMPARED_SIDE_FLAGS, &[])
}
