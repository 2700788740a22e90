//! Decides which environments can be compared, and names groups of comparable environments.

use super::environment::{Environment, EnvironmentMismatch};
use super::gpus::Gpu;
use crate::record::files::file::hash_of_all;
use kernelgate_cuda::driver::peers::PeerLink;

/// Facts of which only the first number of a version counts.
const FACTS_BY_MAJOR_VERSION: [&str; 2] = ["gpu.driver", "gpu.driver_cuda"];
const FINGERPRINT_HASH_DIGITS: usize = 8;

impl Environment {
    /// Returns the facts of a baseline's environment that make it incomparable with this
    /// environment.
    pub fn mismatches(&self, base: &Self) -> Vec<EnvironmentMismatch> {
        let on_gpu = !self.gpus.is_empty() && !base.gpus.is_empty();
        let counted = self.gpus.len() > 1 || base.gpus.len() > 1;
        let both = base.facts(on_gpu, counted).into_iter().zip(self.facts(on_gpu, counted));
        both.filter(|((field, base), (_, head))| {
            comparable_part_of_fact(field, base) != comparable_part_of_fact(field, head)
        })
        .map(|((field, base), (_, head))| EnvironmentMismatch { field, base, head })
        .collect()
    }

    /// Returns a name shared by all environments comparable with this one: a folder for the device,
    /// and a hash of the other facts.
    pub fn environment_fingerprint(&self) -> String {
        let facts = self.facts(!self.gpus.is_empty(), self.gpus.len() > 1);
        let texts =
            facts.iter().flat_map(|(field, value)| [*field, comparable_part_of_fact(field, value)]);
        format!(
            "{}-{}",
            self.baseline_folder_name(),
            &hash_of_all(texts)[..FINGERPRINT_HASH_DIGITS]
        )
    }

    /// The facts, of GPUs or of the host, that decide whether times can be compared. The number of
    /// GPUs and their link are included if `counted`: if either side has several.
    fn facts(&self, on_gpu: bool, counted: bool) -> Vec<(&'static str, String)> {
        let mut facts = vec![
            ("device_kind", self.device_kind.clone()),
            ("device_name", self.device_name.clone()),
            ("optimised", self.optimised.to_string()),
        ];
        if on_gpu {
            // On a GPU the host only launches: its model does not change a kernel's time.
            let gpus = |value: fn(&Gpu) -> String| self.gpus.values(value);
            facts.extend([
                ("gpu.arch", gpus(|gpu| gpu.arch.clone())),
                ("gpu.driver", gpus(|gpu| gpu.driver.clone())),
                ("gpu.driver_cuda", gpus(|gpu| gpu.driver_cuda.clone())),
                ("gpu.nvrtc", gpus(|gpu| gpu.nvrtc.clone())),
                ("gpu.multiprocessors", gpus(|gpu| gpu.multiprocessors.to_string())),
            ]);
        } else {
            facts.extend([
                ("arch", self.arch.clone()),
                ("cores", self.cores.to_string()),
                ("threads", self.threads.to_string()),
                ("simd", self.simd.join(" ")),
            ]);
        }
        if counted {
            facts.push(("gpu.count", self.gpus.len().to_string()));
            facts.push(("gpu.link", self.link.map_or("unknown", PeerLink::name).to_owned()));
        }
        facts
    }
}

/// The part of a fact that decides whether runs are comparable.
fn comparable_part_of_fact<'a>(field: &str, value: &'a str) -> &'a str {
    if FACTS_BY_MAJOR_VERSION.contains(&field) {
        value.split('.').next().unwrap_or_default()
    } else {
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fingerprint_depends_only_on_facts_that_affect_comparability() {
        let host = Environment { cores: 2, ..Environment::cpu() };
        let same = Environment { memory_bytes: 1, machine: None, ..host.clone() };
        let other = Environment { cores: 4, ..host.clone() };
        assert_eq!(host.environment_fingerprint(), same.environment_fingerprint());
        assert!(host.mismatches(&same).is_empty());
        assert_ne!(host.environment_fingerprint(), other.environment_fingerprint());
        assert_eq!(host.mismatches(&other)[0].field, "cores");
    }
}
