//! Which cases of which bench executables a verb is about, and asking them.

use std::collections::BTreeMap;
use std::time::Duration;

use kernelgate::harness::filter::Filter;
use kernelgate::protocol::{Action, ResponseBody};
use kernelgate::record::{Shard, Store};

use super::interrupt;
use super::settings::{SHARD, Settings};
use crate::benches::ask::{self, Asking};
use crate::benches::child::Running;
use crate::benches::find::{self, FoundBenches};
use crate::benches::versions;
use crate::compare::progress::parse_duration;

/// Time after which a bench has hung, where none was given.
const TIMEOUT: Duration = Duration::from_secs(1800);

/// What each bench executable answered.
pub type Answers = Vec<(String, ResponseBody)>;

#[derive(Debug, clap::Args)]
pub struct Choice {
    /// Only cases whose id matches this regular expression
    pub filter: Option<String>,
    #[command(flatten)]
    benches: ChosenBenches,
}

/// Which bench executables, and how they are asked.
#[derive(Debug, Clone, clap::Args)]
pub struct ChosenBenches {
    #[command(flatten)]
    settings: Settings,
    #[command(flatten)]
    benches: find::BenchChoice,
    /// Time after which a bench that has given no response is ended [default: 30m, and 20s where it
    /// is asked for its version]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    wait: Option<Duration>,
}

impl Choice {
    /// The cases of some executables that match a regular expression.
    pub fn of(filter: &str, benches: &ChosenBenches) -> Self {
        Self { filter: Some(filter.to_owned()), benches: benches.clone() }
    }

    /// What is set for the executables, as variables.
    pub fn variables(&self) -> BTreeMap<String, String> {
        self.benches.settings.variables()
    }

    /// The part of the cases that was asked for.
    pub const fn shard(&self) -> Option<Shard> {
        self.benches.settings.shard()
    }

    /// The shard in words that follow a number of cases; empty without one.
    pub fn shard_words(&self) -> String {
        self.benches.settings.shard_words()
    }

    /// What every bench executable of the package answers.
    pub fn ask(&self, store: &Store, action: &Action) -> anyhow::Result<Answers> {
        self.asker(store)?.ask(action)
    }

    /// The executables, to be asked one thing after the other. To be called once: it watches for
    /// Ctrl-C.
    pub fn asker(&self, store: &Store) -> anyhow::Result<Asker<'_>> {
        Filter::parse(self.filter.as_deref(), false)?;
        let running = interrupt::watched()?;
        let asked = self.benches.wait.unwrap_or(versions::TIMEOUT);
        let found = self.benches.benches.find_within(&store.root, &running, asked)?;
        Ok(Asker { choice: self, found, running })
    }
}

/// Executables that were found, and how they are asked.
pub struct Asker<'a> {
    choice: &'a Choice,
    /// The executables.
    pub found: FoundBenches,
    running: Running,
}

impl Asker<'_> {
    /// So many seeds from the one that was chosen.
    pub fn seeds(&self, count: u64) -> Vec<u64> {
        let first = self.choice.benches.settings.seed();
        (0..count).map(|more| first.wrapping_add(more)).collect()
    }

    /// What every executable answers.
    pub fn ask(&self, action: &Action) -> anyhow::Result<Answers> {
        ask::all(&self.found, &self.asking(None), action)
    }

    /// The same with a seed, each answer as it comes.
    pub fn each(
        &self,
        seed: u64,
        action: &Action,
        answered: impl FnMut(&str, ResponseBody) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        ask::each(&self.found, &self.asking(Some(seed)), action, answered)
    }

    /// The answers of all shards, whichever was asked for.
    pub fn each_of_all_shards(
        &self,
        action: &Action,
        answered: impl FnMut(&str, ResponseBody) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut asking = self.asking(None);
        // An empty variable counts as none, also where this process has one.
        asking.settings.insert(SHARD.to_owned(), String::new());
        ask::each(&self.found, &asking, action, answered)
    }

    fn asking(&self, seed: Option<u64>) -> Asking<'_> {
        let mut settings = self.choice.variables();
        settings.extend(seed.map(|seed| ("KERNELGATE_SEED".to_owned(), seed.to_string())));
        Asking {
            settings,
            filter: self.choice.filter.as_deref(),
            timeout: self.choice.benches.wait.unwrap_or(TIMEOUT),
            running: &self.running,
        }
    }
}

/// An executable that answers something else than it was asked is broken, or of a foreign protocol.
pub fn unexpected(bench: &str) -> anyhow::Error {
    anyhow::anyhow!("bench `{bench}` answered something else than it was asked")
}
