//! GPU architectures for which a kernel compiles.

use std::fmt;

use crate::architecture::compute_capability_number;

/// GPU architectures for which a kernel compiles and on which it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequiredArchitecture {
    /// A compute capability, with major and minor digits together, and all later ones: 80 means
    /// sm_80 or later.
    AtLeastCapability(u32),
    /// Compute capabilities from the first number to below the second; from the second on, another
    /// build of the kernel is used.
    CapabilityRange(u32, u32),
    /// One architecture only, because of instructions that no other architecture has: "sm_90a" has
    /// `wgmma`.
    ExactArchitecture(&'static str),
}

impl RequiredArchitecture {
    /// Returns whether a GPU of the given architecture ("sm_90a") can run the kernel.
    pub fn is_met_by_architecture(self, arch: &str) -> bool {
        let matches =
            |holds: &dyn Fn(u32) -> bool| compute_capability_number(arch).is_some_and(holds);
        match self {
            Self::ExactArchitecture(wanted) => arch == wanted,
            Self::AtLeastCapability(least) => matches(&|number| number >= least),
            Self::CapabilityRange(least, end) => matches(&|number| (least..end).contains(&number)),
        }
    }
}

impl fmt::Display for RequiredArchitecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtLeastCapability(least) => write!(f, "sm_{least} or later"),
            Self::CapabilityRange(least, end) => {
                write!(f, "sm_{least} or later, but none from sm_{end} on")
            }
            Self::ExactArchitecture(arch) => f.write_str(arch),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_kernels_with_a_minimum_architecture_run_on_later_ones() {
        let least = RequiredArchitecture::AtLeastCapability(90);
        assert_eq!(
            ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_120a"]
                .map(|arch| least.is_met_by_architecture(arch)),
            [false, false, true, true, true]
        );
        let exactly = RequiredArchitecture::ExactArchitecture("sm_90a");
        assert_eq!(
            ["sm_80", "sm_90", "sm_90a", "sm_100a"]
                .map(|arch| exactly.is_met_by_architecture(arch)),
            [false, false, true, false]
        );
        let between = RequiredArchitecture::CapabilityRange(80, 90);
        assert_eq!(
            ["sm_75", "sm_80", "sm_89", "sm_90", "sm_90a", "sm_120a"]
                .map(|arch| between.is_met_by_architecture(arch)),
            [false, true, true, false, false, false]
        );
        assert_eq!(between.to_string(), "sm_80 or later, but none from sm_90 on");
        assert!(!least.is_met_by_architecture("gfx942"));
        assert_eq!([least.to_string(), exactly.to_string()], ["sm_90 or later", "sm_90a"]);
    }
}
