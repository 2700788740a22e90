//! The least architecture that a kernel compiles for.

use std::fmt;

/// Architectures that a kernel compiles for and runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requires {
    /// That compute capability, major and minor digits together, and every later one: 80 is sm_80.
    AtLeast(u32),
    /// That one only, for instructions that no other has: "sm_90a" has `wgmma`.
    Exactly(&'static str),
}

impl Requires {
    /// Whether a GPU of that architecture ("sm_90a") runs it.
    pub fn met_by(self, arch: &str) -> bool {
        match self {
            Self::Exactly(wanted) => arch == wanted,
            Self::AtLeast(least) => {
                let number = arch
                    .trim_start_matches("sm_")
                    .trim_end_matches(|c: char| c.is_ascii_alphabetic());
                number.parse().is_ok_and(|number: u32| number >= least)
            }
        }
    }
}

impl fmt::Display for Requires {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtLeast(least) => write!(f, "sm_{least} or later"),
            Self::Exactly(arch) => f.write_str(arch),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_architectures_run_what_asks_for_a_least_one_only() {
        let least = Requires::AtLeast(90);
        assert_eq!(
            ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_120a"].map(|arch| least.met_by(arch)),
            [false, false, true, true, true]
        );
        let exactly = Requires::Exactly("sm_90a");
        assert_eq!(
            ["sm_80", "sm_90", "sm_90a", "sm_100a"].map(|arch| exactly.met_by(arch)),
            [false, false, true, false]
        );
        assert!(!least.met_by("gfx942"));
        assert_eq!([least.to_string(), exactly.to_string()], ["sm_90 or later", "sm_90a"]);
    }
}
