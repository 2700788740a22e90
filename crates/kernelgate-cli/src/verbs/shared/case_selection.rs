//! Command-line flags that select cases and bench executables, and the requests to these
//! executables.

use std::collections::BTreeMap;
use std::time::Duration;

use kernelgate::harness::filter::CaseIdFilter;
use kernelgate::protocol::{RequestedBenchAction, ResponseToBenchAction};
use kernelgate::record::{RecordFoldersOfPackage, ShardOfWork};

use super::bench_flags::BenchExecutableFlags;
use super::interrupt;
use super::settings::{BenchSettingsFlags, SHARD_ENVIRONMENT_VARIABLE};
use crate::benches::bench_requests::{self, BenchRequestSettings};
use crate::benches::child_process::SharedChildProcess;
use crate::benches::find::UsableAndUnusableBenches;
use crate::benches::versions;
use crate::compare::progress::parse_duration;

/// Time within which a bench must answer if `--wait` is not given.
const DEFAULT_BENCH_ANSWER_TIMEOUT: Duration = Duration::from_secs(1800);

/// The answer of each bench executable, after the name of the bench.
pub type AnswersByBench = Vec<(String, ResponseToBenchAction)>;

#[derive(Debug, clap::Args)]
pub struct CaseSelectionFlags {
    /// Use only cases whose id matches this regular expression
    #[arg(id = "filter", value_name = "FILTER")]
    pub case_id_regex: Option<String>,
    #[command(flatten)]
    benches: BenchSelectionFlags,
}

/// Command-line flags that select bench executables, their settings and their timeout.
#[derive(Debug, Clone, clap::Args)]
pub struct BenchSelectionFlags {
    #[command(flatten)]
    settings: BenchSettingsFlags,
    #[command(flatten)]
    benches: BenchExecutableFlags,
    /// Time after which a bench process that gives no response is killed [default: 30m, and 20s
    /// where it is asked for its version]
    #[arg(id = "wait", long = "wait", value_name = "TIME", value_parser = parse_duration)]
    bench_response_timeout: Option<Duration>,
}

impl CaseSelectionFlags {
    /// Selects the cases whose id matches a regular expression, in the selected bench executables.
    pub fn flags_for_matching_cases(
        filter: &str,
        benches: &BenchSelectionFlags,
    ) -> CaseSelectionFlags {
        Self { case_id_regex: Some(filter.to_owned()), benches: benches.clone() }
    }

    /// The settings of the bench executables as environment variables.
    pub fn bench_environment_variables(&self) -> BTreeMap<String, String> {
        self.benches.settings.bench_environment_variables()
    }

    /// The shard of the cases that `--shard` requests; `None` without the flag.
    pub const fn requested_shard(&self) -> Option<ShardOfWork> {
        self.benches.settings.requested_shard()
    }

    /// Text that names the requested shard after a number of cases, "; of shard 1/4 only"; empty
    /// without `--shard`.
    pub fn shard_note_after_case_count(&self) -> String {
        self.benches.settings.shard_note_after_case_count()
    }

    /// Sends a request to every selected bench executable of the package, and returns all answers.
    pub fn answers_of_package_benches(
        &self,
        store: &RecordFoldersOfPackage,
        action: &RequestedBenchAction,
    ) -> anyhow::Result<AnswersByBench> {
        self.bench_client(store)?.send_request_to_all_benches(action)
    }

    /// Builds or finds the selected bench executables, and returns a client that can send them
    /// several requests. Call this function only once in a process, because it installs a handler
    /// for Ctrl-C.
    pub fn bench_client(&self, store: &RecordFoldersOfPackage) -> anyhow::Result<BenchClient<'_>> {
        CaseIdFilter::parse_exact_id_or_regex(self.case_id_regex.as_deref(), false)?;
        let running = interrupt::kill_child_and_exit_on_interrupt()?;
        let timeout =
            self.benches.bench_response_timeout.unwrap_or(versions::PROTOCOL_VERSION_QUERY_TIMEOUT);
        let found = self.benches.benches.bench_choice().find_kernelgate_benches(
            &store.package_root,
            timeout,
            &running,
        )?;
        Ok(BenchClient { selection_flags: self, found_benches: found, running_child: running })
    }
}

/// Sends requests to the selected bench executables that were found.
pub struct BenchClient<'a> {
    selection_flags: &'a CaseSelectionFlags,
    /// The executables.
    pub found_benches: UsableAndUnusableBenches,
    running_child: SharedChildProcess,
}

impl BenchClient<'_> {
    /// Returns `count` consecutive seeds of input data for verification, starting at the seed of
    /// `--seed`.
    pub fn seeds_for_verification(&self, count: u64) -> Vec<u64> {
        let first = self.selection_flags.benches.settings.input_data_seed();
        (0..count).map(|more| first.wrapping_add(more)).collect()
    }

    /// Sends a request to each of the selected bench executables and collects their answers.
    pub fn send_request_to_all_benches(
        &self,
        action: &RequestedBenchAction,
    ) -> anyhow::Result<AnswersByBench> {
        bench_requests::request_from_all_benches(
            &self.found_benches,
            &self.bench_request_settings(None),
            action,
        )
    }

    /// Sends a request with this seed to each bench executable, and passes each answer to
    /// `answered` when it arrives.
    pub fn send_request_with_seed_to_each_bench(
        &self,
        seed: u64,
        action: &RequestedBenchAction,
        answered: impl FnMut(&str, ResponseToBenchAction) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        bench_requests::request_from_each_bench(
            &self.found_benches,
            &self.bench_request_settings(Some(seed)),
            action,
            answered,
        )
    }

    /// Sends a request to each bench executable for all cases, even if `--shard` requests a shard,
    /// and passes on each answer.
    pub fn send_request_for_all_shards(
        &self,
        action: &RequestedBenchAction,
        answered: impl FnMut(&str, ResponseToBenchAction) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut request_settings = self.bench_request_settings(None);
        // An empty variable counts as unset in the bench process, even if this process has the
        // variable.
        request_settings
            .bench_variables
            .insert(SHARD_ENVIRONMENT_VARIABLE.to_owned(), String::new());
        bench_requests::request_from_each_bench(
            &self.found_benches,
            &request_settings,
            action,
            answered,
        )
    }

    fn bench_request_settings(&self, seed: Option<u64>) -> BenchRequestSettings<'_> {
        let mut settings = self.selection_flags.bench_environment_variables();
        settings.extend(seed.map(|seed| ("KERNELGATE_SEED".to_owned(), seed.to_string())));
        BenchRequestSettings {
            bench_variables: settings,
            criterion_filter: self.selection_flags.case_id_regex.as_deref(),
            response_timeout: self
                .selection_flags
                .benches
                .bench_response_timeout
                .unwrap_or(DEFAULT_BENCH_ANSWER_TIMEOUT),
            running_child: &self.running_child,
        }
    }
}

/// The error for a bench executable whose answer does not fit the request, because the bench is
/// broken or speaks another protocol.
pub fn error_for_unexpected_response(bench: &str) -> anyhow::Error {
    anyhow::anyhow!("bench `{bench}` answered something else than it was asked")
}
