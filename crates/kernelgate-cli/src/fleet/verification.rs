//! The verification results of one shard's cases, in a file that `kernelgate merge` can merge.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::gate::calibration::first_differing_name;
use kernelgate::protocol::CaseVerificationResponse;
use kernelgate::record::file::RecordFileType;
use kernelgate::record::{CommitAndChanges, RunEnvironment, ShardOfWork, text};

/// Results of the verification of one shard's cases, in a file that `kernelgate merge` can merge.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VerificationShardRecord {
    /// The shard of the divided work that the record covers.
    pub shard: ShardOfWork,
    /// Hash of the list of all cases; it is equal in all shards of one verification.
    #[serde(rename = "plan")]
    pub plan_hash: String,
    /// Whether every bench of the shard answered the request to verify its cases.
    #[serde(rename = "complete")]
    pub every_bench_answered: bool,
    /// Time at which the verification of the shard ended, RFC 3339, UTC.
    #[serde(rename = "ended")]
    pub verification_end_time: String,
    /// Device and build with which the record was measured.
    pub environment: RunEnvironment,
    /// Commit of the verified package's code, and whether files differed from the commit.
    pub provenance: CommitAndChanges,
    /// Facts that all shards of one verification share, by name: settings, filter, seeds,
    /// executables.
    #[serde(rename = "identity")]
    pub verification_identity_facts: BTreeMap<String, String>,
    /// Result of each verified case.
    pub rows: Vec<CaseVerificationResponse>,
}

impl VerificationShardRecord {
    /// Prefix of the names under which [`Self::verification_identity_facts`] stores the hashes of
    /// bench executables.
    pub const EXECUTABLE_HASH_NAME_PREFIX: &str = "executable of bench ";

    /// Returns the name and both values of the first fact that prevents merging two verification
    /// shards; `None` if they belong together.
    pub fn first_fact_that_prevents_merging(&self, other: &Self) -> Option<(String, [String; 2])> {
        let facts = |shard: &Self| {
            [
                ("number of shards", shard.shard.shard_count.to_string()),
                ("commit", shard.provenance.short_commit_with_changes_mark()),
                ("plan", shard.plan_hash.clone()),
            ]
        };
        let of_facts = facts(self).into_iter().zip(facts(other)).find(|(one, other)| one != other);
        if let Some(((field, left), (_, right))) = of_facts {
            return Some((field.to_owned(), [left, right]));
        }
        if let Some(mismatch) =
            other.environment.incomparable_facts_with_base(&self.environment).into_iter().next()
        {
            return Some((
                mismatch.field_name.to_owned(),
                [mismatch.base_value, mismatch.head_value],
            ));
        }
        // Executable hashes are not compared if both shards have the same clean commit, because two
        // machines may build different executables from it.
        let one_code = self.provenance.commit.is_some() && !self.provenance.dirty;
        let shared = |of: &Self| -> BTreeMap<String, String> {
            let is_shared =
                |name: &str| !(one_code && name.starts_with(Self::EXECUTABLE_HASH_NAME_PREFIX));
            let facts = of.verification_identity_facts.iter().filter(|(name, _)| is_shared(name));
            facts.map(|(name, value)| (name.clone(), value.clone())).collect()
        };
        let (left, right) = (shared(self), shared(other));
        let name = first_differing_name(&left, &right)?;
        let values = [&left, &right].map(|facts| facts.get(&name).cloned().unwrap_or_default());
        Some((name, values))
    }
}

impl RecordFileType for VerificationShardRecord {
    const SCHEMA: &'static str = "kernelgate-verification-shard";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "shard of a verification";
    const FIELDS_WITH_ANY_CHARACTERS: &'static [&'static str] = &["identity", "rows"];

    fn check_record_plausible(&self) -> Result<(), String> {
        self.shard.check_shard_index_and_count()?;
        text::check_is_rfc3339_time(&self.verification_end_time)
            .map_err(|problem| format!("ended: {problem}"))?;
        self.environment.check_environment_plausible()?;
        self.rows.iter().try_for_each(|row| {
            if row.compared_elements > row.output_elements {
                return Err(format!(
                    "case {}: {} of {} checked",
                    row.case_id, row.compared_elements, row.output_elements
                ));
            }
            Ok(())
        })
    }
}
