//! Which environments can be compared, and what names those that can.

use super::environment::{Environment, Gpu, Mismatch};
use super::file::hash_of_all;

/// Facts of which only the first number of a version counts.
const BY_MAJOR: [&str; 2] = ["gpu.driver", "gpu.driver_cuda"];
/// Digits of a hash in a fingerprint.
const DIGITS: usize = 8;

impl Environment {
    /// The fields in which a baseline's environment makes it incomparable with this one.
    pub fn mismatches(&self, base: &Self) -> Vec<Mismatch> {
        let on_gpu = self.gpu.is_some() && base.gpu.is_some();
        let both = base.facts(on_gpu).into_iter().zip(self.facts(on_gpu));
        both.filter(|((field, base), (_, head))| decisive(field, base) != decisive(field, head))
            .map(|((field, base), (_, head))| Mismatch { field, base, head })
            .collect()
    }

    /// Names the environments that are comparable with this one: the device's name as a folder,
    /// and a hash of the rest.
    pub fn fingerprint(&self) -> String {
        let facts = self.facts(self.gpu.is_some());
        let texts = facts.iter().flat_map(|(field, value)| [*field, decisive(field, value)]);
        format!("{}-{}", self.slug(), &hash_of_all(texts)[..DIGITS])
    }

    /// What decides whether times can be compared, of a GPU or of the host.
    fn facts(&self, on_gpu: bool) -> Vec<(&'static str, String)> {
        let mut facts = vec![
            ("device_kind", self.device_kind.clone()),
            ("device_name", self.device_name.clone()),
            ("optimised", self.optimised.to_string()),
        ];
        match &self.gpu {
            // The host only launches: what it is does not change a kernel's time.
            Some(Gpu { arch, driver, driver_cuda, nvrtc, multiprocessors, .. }) if on_gpu => facts
                .extend([
                    ("gpu.arch", arch.clone()),
                    ("gpu.driver", driver.clone()),
                    ("gpu.driver_cuda", driver_cuda.clone()),
                    ("gpu.nvrtc", nvrtc.clone()),
                    ("gpu.multiprocessors", multiprocessors.to_string()),
                ]),
            _ => facts.extend([
                ("arch", self.arch.clone()),
                ("cores", self.cores.to_string()),
                ("threads", self.threads.to_string()),
                ("simd", self.simd.join(" ")),
            ]),
        }
        facts
    }
}

/// The part of a fact that decides.
fn decisive<'a>(field: &str, value: &'a str) -> &'a str {
    if BY_MAJOR.contains(&field) { value.split('.').next().unwrap_or_default() } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_is_that_of_what_is_comparable() {
        let host = Environment { cores: 2, ..Environment::cpu() };
        let same = Environment { memory_bytes: 1, machine: None, ..host.clone() };
        let other = Environment { cores: 4, ..host.clone() };
        assert_eq!(host.fingerprint(), same.fingerprint());
        assert!(host.mismatches(&same).is_empty());
        assert_ne!(host.fingerprint(), other.fingerprint());
        assert_eq!(host.mismatches(&other)[0].field, "cores");
    }
}
