//! Verification of one shard, as a file that can be merged.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::gate::calibration::first_differing_name;
use kernelgate::protocol::VerifiedCase;
use kernelgate::record::file::RecordType;
use kernelgate::record::{Environment, Provenance, Shard, text};

/// Results of verification of the cases of one shard, in a file that can be merged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VerificationShard {
    /// The shard.
    pub shard: Shard,
    /// Hash of all cases of all shards: equal in all shards of one plan.
    pub plan: String,
    /// Whether every bench answered.
    pub complete: bool,
    /// End time of the verification, RFC 3339, UTC.
    pub ended: String,
    /// Device and build.
    pub environment: Environment,
    /// Code of the package.
    pub provenance: Provenance,
    /// Facts that shards of one verification share, by name: settings, filter, seeds, executables.
    pub identity: BTreeMap<String, String>,
    /// The cases.
    pub rows: Vec<VerifiedCase>,
}

impl VerificationShard {
    /// Start of the name of an executable's hash in [`Self::identity`].
    pub const EXECUTABLE_HASH_NAME: &str = "executable of bench ";

    /// The first fact because of which two shards do not belong to one verification: its name and
    /// both values.
    pub fn mismatch(&self, other: &Self) -> Option<(String, [String; 2])> {
        let facts = |shard: &Self| {
            [
                ("number of shards", shard.shard.count.to_string()),
                ("commit", shard.provenance.short_commit()),
                ("plan", shard.plan.clone()),
            ]
        };
        let of_facts = facts(self).into_iter().zip(facts(other)).find(|(one, other)| one != other);
        if let Some(((field, left), (_, right))) = of_facts {
            return Some((field.to_owned(), [left, right]));
        }
        if let Some(mismatch) = other.environment.mismatches(&self.environment).into_iter().next() {
            return Some((mismatch.field.to_owned(), [mismatch.base, mismatch.head]));
        }
        // Two machines may build different executables from one clean commit.
        let one_code = self.provenance.commit.is_some() && !self.provenance.dirty;
        let shared = |of: &Self| -> BTreeMap<String, String> {
            let is_shared =
                |name: &str| !(one_code && name.starts_with(Self::EXECUTABLE_HASH_NAME));
            let facts = of.identity.iter().filter(|(name, _)| is_shared(name));
            facts.map(|(name, value)| (name.clone(), value.clone())).collect()
        };
        let (left, right) = (shared(self), shared(other));
        let name = first_differing_name(&left, &right)?;
        let values = [&left, &right].map(|facts| facts.get(&name).cloned().unwrap_or_default());
        Some((name, values))
    }
}

impl RecordType for VerificationShard {
    const SCHEMA: &'static str = "kernelgate-verification-shard";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "shard of a verification";
    const FREE_TEXT_FIELDS: &'static [&'static str] = &["identity", "rows"];

    fn validate(&self) -> Result<(), String> {
        self.shard.validate()?;
        text::check_rfc3339_time(&self.ended).map_err(|problem| format!("ended: {problem}"))?;
        self.environment.validate()?;
        self.rows.iter().try_for_each(|row| {
            if row.checked > row.total {
                return Err(format!("case {}: {} of {} checked", row.case, row.checked, row.total));
            }
            Ok(())
        })
    }
}
