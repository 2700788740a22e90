//! Code, build, inputs and environment of a process run, which decide with which other runs it may
//! be combined.

pub mod comparable_environments;
pub mod environment;
pub mod gpus;
pub mod machine;
pub mod package;
pub mod process;
pub mod provenance;

use self::environment::{IncomparableEnvironmentField, RunEnvironment};
use self::provenance::CommitAndChanges;

/// Code, executable, seed and environment of a process run, from its run record or from a baseline.
#[derive(Debug, Clone, Copy)]
pub struct CodeAndEnvironmentOfRun<'a> {
    /// Commit of the measured code, with the mark whether files were changed.
    pub provenance: &'a CommitAndChanges,
    /// Hash of the executable's content; `None` if it could not be read.
    pub executable_hash: Option<&'a str>,
    /// Seed of the inputs.
    pub seed: u64,
    /// Environment of the run: machine, device and build.
    pub environment: &'a RunEnvironment,
}

impl CodeAndEnvironmentOfRun<'_> {
    /// Returns whether the run has a commit and no tracked file differed from it, so that the
    /// commit identifies the code.
    pub const fn has_commit_without_changes(self) -> bool {
        self.provenance.commit.is_some() && !self.provenance.dirty
    }

    /// Returns whether two runs used the same executable, built from the same commit without
    /// changes.
    pub fn is_same_executable_of_clean_commit(self, other: Self) -> bool {
        self.has_commit_without_changes()
            && self.provenance == other.provenance
            && self.executable_hash.is_some()
            && self.executable_hash == other.executable_hash
    }

    /// Returns whether two runs had the same seed and comparable environments.
    pub fn has_same_seed_and_comparable_environment(self, other: Self) -> bool {
        self.seed == other.seed
            && other.environment.incomparable_facts_with_base(self.environment).is_empty()
    }

    /// Returns the fact which shows that the other run measured different code: the commit, or the
    /// executable if the commit does not identify the code.
    pub fn fact_showing_different_code(self, other: Self) -> Option<IncomparableEnvironmentField> {
        let mismatch = |field, base: String, head: String| {
            Some(IncomparableEnvironmentField {
                field_name: field,
                base_value: base,
                head_value: head,
            })
        };
        if self.provenance != other.provenance {
            return mismatch(
                "commit",
                self.provenance.short_commit_with_changes_mark(),
                other.provenance.short_commit_with_changes_mark(),
            );
        }
        match (self.executable_hash, other.executable_hash) {
            (Some(base), Some(head)) if !self.has_commit_without_changes() && base != head => {
                mismatch("executable", base.to_owned(), head.to_owned())
            }
            _ => None,
        }
    }

    /// Returns both executables' hashes if they differ although both runs should have used the same
    /// executable. Two machines may each build their own executable of a clean commit, as machines
    /// that share a bench's cases do (`sharded`). If the two machines cannot be distinguished, a
    /// different executable counts as different code.
    pub fn executables_that_should_be_equal(
        self,
        other: Self,
        sharded: bool,
    ) -> Option<IncomparableEnvironmentField> {
        let clean = self.has_commit_without_changes();
        let is_identified = |it: &Self| it.environment.has_device_id();
        let two_machines = is_identified(&self)
            && is_identified(&other)
            && !other.environment.has_same_gpus_or_host_as(self.environment);
        if clean && (sharded || two_machines) {
            return None;
        }
        if clean && (self.executable_hash.is_none() || other.executable_hash.is_none()) {
            return None;
        }
        let [base, head] =
            [self, other].map(|it| it.executable_hash.unwrap_or("unknown").to_owned());
        (base != head).then_some(IncomparableEnvironmentField {
            field_name: "executable",
            base_value: base,
            head_value: head,
        })
    }
}
