//! Which cases of which bench executables a verb is about, and asking them.

use std::time::Duration;

use kernelgate::harness::filter::Filter;
use kernelgate::protocol::{Action, ResponseBody};
use kernelgate::record::Store;

use super::interrupt;
use super::settings::Settings;
use crate::benches::ask::{self, Asking};
use crate::benches::find;
use crate::compare::progress::parse_duration;

#[derive(Debug, clap::Args)]
pub struct Choice {
    /// Only cases whose id matches this regular expression
    pub filter: Option<String>,
    #[command(flatten)]
    settings: Settings,
    #[command(flatten)]
    benches: find::BenchChoice,
    /// Time after which a bench that has given no response is ended
    #[arg(long, value_name = "TIME", default_value = "30m", value_parser = parse_duration)]
    wait: Duration,
}

impl Choice {
    /// What every bench executable of the package answers.
    ///
    /// # Errors
    /// When none can be built or asked, or none has a case that was asked for.
    pub fn ask(
        &self,
        store: &Store,
        action: &Action,
    ) -> anyhow::Result<Vec<(String, ResponseBody)>> {
        Filter::parse(self.filter.as_deref(), false)?;
        let running = interrupt::watched()?;
        let asking = Asking {
            settings: self.settings.variables(),
            filter: self.filter.as_deref(),
            timeout: self.wait,
            running: &running,
        };
        ask::all(&self.benches.find(&store.root, &running)?, &asking, action)
    }
}

/// An executable that answers something else than it was asked is broken, or of a foreign protocol.
pub fn unexpected(bench: &str) -> anyhow::Error {
    anyhow::anyhow!("bench `{bench}` answered something else than it was asked")
}
