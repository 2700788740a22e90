//! Code, build, inputs and environment of a process run: the facts that decide which other runs it
//! may be combined with.

pub mod comparable_environments;
pub mod environment;
pub mod gpus;
pub mod machine;
pub mod package;
pub mod process;
pub mod provenance;

use self::environment::{Environment, EnvironmentMismatch};
use self::provenance::Provenance;

/// Code, build and environment of a process run, whether a run record or a baseline holds them.
#[derive(Debug, Clone, Copy)]
pub struct RunOrigin<'a> {
    /// Code that was measured.
    pub provenance: &'a Provenance,
    /// Hash of the executable's content.
    pub executable: Option<&'a str>,
    /// Seed of the inputs.
    pub seed: u64,
    /// Machine, device and build.
    pub environment: &'a Environment,
}

impl RunOrigin<'_> {
    /// Returns whether the commit alone identifies the code, because nothing was changed.
    pub const fn is_clean_commit(self) -> bool {
        self.provenance.commit.is_some() && !self.provenance.dirty
    }

    /// Returns whether both runs used the same executable, built from the same clean commit.
    pub fn is_same_build(self, other: Self) -> bool {
        self.is_clean_commit()
            && self.provenance == other.provenance
            && self.executable.is_some()
            && self.executable == other.executable
    }

    /// Whether two runs had equal inputs in comparable environments.
    pub fn has_same_inputs_and_environment(self, other: Self) -> bool {
        self.seed == other.seed && other.environment.mismatches(self.environment).is_empty()
    }

    /// The fact that shows the other run to be of other code: the commit, or the executable where
    /// the commit does not identify the code.
    pub fn differing_code(self, other: Self) -> Option<EnvironmentMismatch> {
        let mismatch =
            |field, base: String, head: String| Some(EnvironmentMismatch { field, base, head });
        if self.provenance != other.provenance {
            return mismatch(
                "commit",
                self.provenance.short_commit(),
                other.provenance.short_commit(),
            );
        }
        match (self.executable, other.executable) {
            (Some(base), Some(head)) if !self.is_clean_commit() && base != head => {
                mismatch("executable", base.to_owned(), head.to_owned())
            }
            _ => None,
        }
    }

    /// Returns both executables, if they differ although they should be identical. Two machines may
    /// each build a clean commit, as machines that share the cases do (`sharded`). If the machines
    /// cannot be distinguished, another executable is other code.
    pub fn differing_build(self, other: Self, sharded: bool) -> Option<EnvironmentMismatch> {
        let clean = self.is_clean_commit();
        let is_identified = |it: &Self| it.environment.is_device_identified();
        let two_machines = is_identified(&self)
            && is_identified(&other)
            && !other.environment.is_same_device(self.environment);
        if clean && (sharded || two_machines) {
            return None;
        }
        if clean && (self.executable.is_none() || other.executable.is_none()) {
            return None;
        }
        let [base, head] = [self, other].map(|it| it.executable.unwrap_or("unknown").to_owned());
        (base != head).then_some(EnvironmentMismatch { field: "executable", base, head })
    }
}
