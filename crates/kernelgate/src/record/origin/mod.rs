//! Code, build, inputs and environment of a process run: the facts that decide which other runs it
//! may be combined with.

pub mod comparable;
pub mod environment;
pub mod gpus;
pub mod machine;
pub mod package;
pub mod process;
pub mod provenance;

use self::environment::{Environment, Mismatch};
use self::provenance::Provenance;

/// Facts of a process run, whether its record or a baseline holds it.
#[derive(Debug, Clone, Copy)]
pub struct Origin<'a> {
    /// Code that was measured.
    pub provenance: &'a Provenance,
    /// Content hash of the executable.
    pub executable: Option<&'a str>,
    /// Seed of the inputs.
    pub seed: u64,
    /// Machine, device and build.
    pub environment: &'a Environment,
}

impl Origin<'_> {
    /// Whether the commit alone identifies the code.
    pub const fn is_clean_commit(self) -> bool {
        self.provenance.commit.is_some() && !self.provenance.dirty
    }

    /// Whether both ran one executable of one clean commit.
    pub fn same_build(self, other: Self) -> bool {
        self.is_clean_commit()
            && self.provenance == other.provenance
            && self.executable.is_some()
            && self.executable == other.executable
    }

    /// Whether two runs had equal inputs in comparable environments.
    pub fn same_setting(self, other: Self) -> bool {
        self.seed == other.seed && other.environment.mismatches(self.environment).is_empty()
    }

    /// The fact that shows the other run to be of other code: the commit, or the executable where
    /// the commit does not identify the code.
    pub fn other_code(self, other: Self) -> Option<Mismatch> {
        let mismatch = |field, base: String, head: String| Some(Mismatch { field, base, head });
        if self.provenance != other.provenance {
            return mismatch("commit", self.provenance.short(), other.provenance.short());
        }
        match (self.executable, other.executable) {
            (Some(base), Some(head)) if !self.is_clean_commit() && base != head => {
                mismatch("executable", base.to_owned(), head.to_owned())
            }
            _ => None,
        }
    }

    /// The executables, if they differ although they should be identical. Two machines may each
    /// build a clean commit, as machines that share the cases do (`sharded`). If the machines
    /// cannot be distinguished, another executable is other code.
    pub fn other_build(self, other: Self, sharded: bool) -> Option<Mismatch> {
        let clean = self.is_clean_commit();
        let is_identified = |it: &Self| it.environment.is_identified();
        let two_machines = is_identified(&self)
            && is_identified(&other)
            && !other.environment.same_device(self.environment);
        if clean && (sharded || two_machines) {
            return None;
        }
        if clean && (self.executable.is_none() || other.executable.is_none()) {
            return None;
        }
        let [base, head] = [self, other].map(|it| it.executable.unwrap_or("unknown").to_owned());
        (base != head).then_some(Mismatch { field: "executable", base, head })
    }
}
