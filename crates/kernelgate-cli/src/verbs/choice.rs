//! Which cases of which bench executables a verb is about, and asking them.

use std::collections::BTreeMap;
use std::time::Duration;

use kernelgate::harness::filter::Filter;
use kernelgate::protocol::{Action, ResponseBody};
use kernelgate::record::Store;

use super::interrupt;
use super::settings::Settings;
use crate::benches::ask::{self, Asking};
use crate::benches::find::{self, FoundBenches};
use crate::compare::progress::parse_duration;

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
    /// Time after which a bench that has given no response is ended
    #[arg(long, value_name = "TIME", default_value = "30m", value_parser = parse_duration)]
    wait: Duration,
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

    /// What every bench executable of the package answers.
    ///
    /// # Errors
    /// When none can be built or asked, or none has a case that was asked for.
    pub fn ask(
        &self,
        store: &Store,
        action: &Action,
    ) -> anyhow::Result<Vec<(String, ResponseBody)>> {
        self.ask_each(store, std::slice::from_ref(action), 1, |_, _, mut answers| {
            Ok(answers.pop().unwrap_or_default())
        })
    }

    /// The same for several actions and seeds: `done` gets the executables, the seeds, and for each
    /// seed after the other the answers to each action.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn ask_each<T>(
        &self,
        store: &Store,
        actions: &[Action],
        seeds: u64,
        done: impl FnOnce(&FoundBenches, &[u64], Vec<Answers>) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        Filter::parse(self.filter.as_deref(), false)?;
        let running = interrupt::watched()?;
        let mut asking = Asking {
            settings: self.variables(),
            filter: self.filter.as_deref(),
            timeout: self.benches.wait,
            running: &running,
        };
        let found = self.benches.benches.find(&store.root, &running)?;
        let first = self.benches.settings.seed();
        let seeds: Vec<u64> = (0..seeds).map(|more| first.wrapping_add(more)).collect();
        let mut answers = Vec::new();
        for seed in &seeds {
            if seeds.len() > 1 {
                eprintln!("seed {seed}, {} in all", seeds.len());
                asking.settings.insert("KERNELGATE_SEED".to_owned(), seed.to_string());
            }
            for action in actions {
                answers.push(ask::all(&found, &asking, action)?);
            }
        }
        done(&found, &seeds, answers)
    }
}

/// An executable that answers something else than it was asked is broken, or of a foreign protocol.
pub fn unexpected(bench: &str) -> anyhow::Error {
    anyhow::anyhow!("bench `{bench}` answered something else than it was asked")
}
