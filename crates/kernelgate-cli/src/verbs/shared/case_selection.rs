//! Selects the cases and bench executables of a verb, and asks the executables.

use std::collections::BTreeMap;
use std::time::Duration;

use kernelgate::harness::filter::CaseFilter;
use kernelgate::protocol::{BenchResponseBody, RequestedAction};
use kernelgate::record::{BaselineStore, Shard};

use super::bench_flags::BenchFlags;
use super::interrupt;
use super::settings::{BenchProcessSettings, SHARD_VARIABLE};
use crate::benches::bench_requests::{self, RequestSettings};
use crate::benches::child_process::ChildProcess;
use crate::benches::find::FoundBenches;
use crate::benches::versions;
use crate::compare::progress::parse_duration;

/// Timeout of a bench without a timeout of its own.
const ANSWER_TIMEOUT_DEFAULT: Duration = Duration::from_secs(1800);

/// Answers of the bench executables, by name.
pub type BenchAnswers = Vec<(String, BenchResponseBody)>;

#[derive(Debug, clap::Args)]
pub struct CaseSelection {
    /// Use only cases whose id matches this regular expression
    pub filter: Option<String>,
    #[command(flatten)]
    benches: ChosenBenches,
}

/// Selects bench executables, with their settings and timeout.
#[derive(Debug, Clone, clap::Args)]
pub struct ChosenBenches {
    #[command(flatten)]
    settings: BenchProcessSettings,
    #[command(flatten)]
    benches: BenchFlags,
    /// Time after which a bench that has given no response is ended [default: 30m, and 20s where it
    /// is asked for its version]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    wait: Option<Duration>,
}

impl CaseSelection {
    /// Selects the cases of some executables that match a regular expression.
    pub fn matching(filter: &str, benches: &ChosenBenches) -> CaseSelection {
        Self { filter: Some(filter.to_owned()), benches: benches.clone() }
    }

    /// Returns the settings as environment variables for the executables.
    pub fn variables(&self) -> BTreeMap<String, String> {
        self.benches.settings.variables()
    }

    /// Returns the shard of the cases that was requested.
    pub const fn shard(&self) -> Option<Shard> {
        self.benches.settings.shard()
    }

    /// Text of the shard that follows a number of cases; empty if no shard was requested.
    pub fn shard_words(&self) -> String {
        self.benches.settings.shard_text()
    }

    /// Returns the answers of every bench executable of the package.
    pub fn ask_package(
        &self,
        store: &BaselineStore,
        action: &RequestedAction,
    ) -> anyhow::Result<BenchAnswers> {
        self.bench_client(store)?.ask(action)
    }

    /// Finds the executables, which can then be asked several times. The function must be called
    /// once only, because it watches for Ctrl-C.
    pub fn bench_client(&self, store: &BaselineStore) -> anyhow::Result<BenchClient<'_>> {
        CaseFilter::parse(self.filter.as_deref(), false)?;
        let running = interrupt::watched_processes()?;
        let timeout = self.benches.wait.unwrap_or(versions::VERSION_TIMEOUT);
        let found = self.benches.benches.choice().find_benches(&store.root, timeout, &running)?;
        Ok(BenchClient { choice: self, found, running })
    }
}

/// Client of the executables that were found.
pub struct BenchClient<'a> {
    choice: &'a CaseSelection,
    /// The executables.
    pub found: FoundBenches,
    running: ChildProcess,
}

impl BenchClient<'_> {
    /// `count` seeds for verification, from the chosen seed upwards.
    pub fn verification_seeds(&self, count: u64) -> Vec<u64> {
        let first = self.choice.benches.settings.input_seed();
        (0..count).map(|more| first.wrapping_add(more)).collect()
    }

    /// Sends the request to all executables and collects their responses.
    pub fn ask(&self, action: &RequestedAction) -> anyhow::Result<BenchAnswers> {
        bench_requests::ask_all_benches(&self.found, &self.request_settings(None), action)
    }

    /// Asks every bench with a seed, and passes on each answer when it arrives.
    pub fn ask_each(
        &self,
        seed: u64,
        action: &RequestedAction,
        answered: impl FnMut(&str, BenchResponseBody) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        bench_requests::ask_each_bench(
            &self.found,
            &self.request_settings(Some(seed)),
            action,
            answered,
        )
    }

    /// Returns the answers for all shards, whichever one was requested.
    pub fn each_of_all_shards(
        &self,
        action: &RequestedAction,
        answered: impl FnMut(&str, BenchResponseBody) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut request_settings = self.request_settings(None);
        // An empty variable counts as unset, also if this process has the variable.
        request_settings.settings.insert(SHARD_VARIABLE.to_owned(), String::new());
        bench_requests::ask_each_bench(&self.found, &request_settings, action, answered)
    }

    fn request_settings(&self, seed: Option<u64>) -> RequestSettings<'_> {
        let mut settings = self.choice.variables();
        settings.extend(seed.map(|seed| ("KERNELGATE_SEED".to_owned(), seed.to_string())));
        RequestSettings {
            settings,
            filter: self.choice.filter.as_deref(),
            timeout: self.choice.benches.wait.unwrap_or(ANSWER_TIMEOUT_DEFAULT),
            running: &self.running,
        }
    }
}

/// The error for an executable whose answer does not fit the request: it is broken, or has a
/// foreign protocol.
pub fn unexpected_response(bench: &str) -> anyhow::Error {
    anyhow::anyhow!("bench `{bench}` answered something else than it was asked")
}
