//! The GPUs of an environment: a set, empty on the CPU.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use kernelgate_cuda::library;
use kernelgate_cuda::observe::telemetry;

/// A GPU: the facts that give a time its meaning.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gpu {
    /// UUID of the card: "GPU-…".
    pub uuid: String,
    /// GPU architecture for which kernels are compiled: "sm_90a".
    pub arch: String,
    /// Version of the NVIDIA driver: "580.82.07"; "unknown" if NVML is missing.
    pub driver: String,
    /// Latest CUDA version that the driver supports: "13.0".
    pub driver_cuda: String,
    /// Version of NVRTC: "13.0".
    pub nvrtc: String,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// L2 cache, bytes.
    pub l2_bytes: u64,
    /// Device memory, bytes.
    pub memory_bytes: u64,
    /// Highest SM clock, MHz.
    pub max_clock_mhz: u32,
    /// Versions of NVIDIA's other libraries that the process had opened: "cublaslt", "cudnn",
    /// "cupti".
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub libraries: BTreeMap<String, String>,
}

impl Gpu {
    /// Records the libraries that the process has opened by now; some are opened when needed.
    pub fn note_libraries(&mut self) {
        // The driver and NVRTC have fields of their own, so their versions are excluded from
        // the libraries.
        let others = library::loaded_library_versions()
            .filter(|(name, _)| !["driver", "nvrtc"].contains(name));
        self.libraries = others.map(|(name, version)| (name.to_owned(), version)).collect();
    }
}

/// The GPUs of an environment, each once, ordered by UUID.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Gpu>", into = "Vec<Gpu>")]
pub struct RecordedGpus(Vec<Gpu>);

impl RecordedGpus {
    /// The only GPU of an environment, for code that can use exactly one.
    pub fn one(&self) -> Option<&Gpu> {
        match &self.0[..] {
            [only] => Some(only),
            _ => None,
        }
    }

    /// Number of GPUs.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the environment has no GPU.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The GPUs in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Gpu> {
        self.0.iter()
    }

    /// The values of a fact, each once, joined by commas: one value for GPUs of one model.
    pub fn values(&self, value: impl Fn(&Gpu) -> String) -> String {
        let mut values: Vec<String> = Vec::new();
        for next in self.iter().map(value) {
            if !values.contains(&next) {
                values.push(next);
            }
        }
        values.join(", ")
    }

    /// Returns whether both sets are known to be the same cards; two empty sets are not.
    pub fn are_same_cards(&self, other: &Self) -> bool {
        !self.is_empty() && self.iter().map(|gpu| &gpu.uuid).eq(other.iter().map(|gpu| &gpu.uuid))
    }

    /// Returns the UUID of a GPU that NVML does not list on this machine.
    pub fn unlisted_gpu_uuid(&self) -> Option<&str> {
        self.iter()
            .map(|gpu| &*gpu.uuid)
            .find(|uuid| telemetry::is_card_listed(uuid) == Some(false))
    }

    /// Records the libraries that the process has opened by now.
    pub fn note_libraries(&mut self) {
        self.0.iter_mut().for_each(Gpu::note_libraries);
    }

    /// Copy without the libraries that a process had opened.
    pub fn without_opened_libraries(&self) -> Self {
        self.iter().map(|gpu| Gpu { libraries: BTreeMap::new(), ..gpu.clone() }).collect()
    }
}

impl FromIterator<Gpu> for RecordedGpus {
    fn from_iter<I: IntoIterator<Item = Gpu>>(gpus: I) -> Self {
        let mut gpus: Vec<Gpu> = gpus.into_iter().collect();
        gpus.sort_by(|left, right| left.uuid.cmp(&right.uuid));
        gpus.dedup_by(|left, right| left.uuid == right.uuid);
        Self(gpus)
    }
}

impl TryFrom<Vec<Gpu>> for RecordedGpus {
    type Error = &'static str;

    fn try_from(list: Vec<Gpu>) -> Result<Self, Self::Error> {
        let count = list.len();
        let gpus: Self = list.into_iter().collect();
        if gpus.len() < count { Err("a GPU that is listed twice") } else { Ok(gpus) }
    }
}

impl From<RecordedGpus> for Vec<Gpu> {
    fn from(gpus: RecordedGpus) -> Self {
        gpus.0
    }
}

impl From<Gpu> for RecordedGpus {
    fn from(gpu: Gpu) -> Self {
        Self(vec![gpu])
    }
}

#[cfg(test)]
impl Gpu {
    /// A test GPU: an H200 with this UUID and driver.
    pub(crate) fn h200_with_driver(uuid: &str, driver: &str) -> Self {
        Self {
            uuid: uuid.to_owned(),
            arch: "sm_90a".to_owned(),
            driver: driver.to_owned(),
            driver_cuda: "13.0".to_owned(),
            nvrtc: "13.0".to_owned(),
            multiprocessors: 132,
            l2_bytes: 1,
            memory_bytes: 1,
            max_clock_mhz: 1980,
            libraries: BTreeMap::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus_of_uuids(uuids: &[&str]) -> RecordedGpus {
        uuids.iter().map(|uuid| Gpu::h200_with_driver(uuid, "580.82")).collect()
    }

    #[test]
    fn a_set_of_gpus_is_sorted_by_uuid_without_repeats() {
        assert_eq!(gpus_of_uuids(&["GPU-2", "GPU-1", "GPU-2"]), gpus_of_uuids(&["GPU-1", "GPU-2"]));
        assert!(
            gpus_of_uuids(&["GPU-2", "GPU-1"]).are_same_cards(&gpus_of_uuids(&["GPU-1", "GPU-2"]))
        );
        assert!(!gpus_of_uuids(&["GPU-1", "GPU-2"]).are_same_cards(&gpus_of_uuids(&["GPU-1"])));
        assert!(!gpus_of_uuids(&[]).are_same_cards(&gpus_of_uuids(&[])));
    }

    #[test]
    fn one_returns_the_only_card_of_a_set_of_one() {
        assert_eq!(gpus_of_uuids(&["GPU-1"]).one().map(|gpu| &*gpu.uuid), Some("GPU-1"));
        assert_eq!(
            [gpus_of_uuids(&[]).one(), gpus_of_uuids(&["GPU-1", "GPU-2"]).one()],
            [None, None]
        );
    }

    #[test]
    fn a_value_shared_by_all_cards_is_written_once() {
        let mixed: RecordedGpus =
            [Gpu::h200_with_driver("GPU-1", "580"), Gpu::h200_with_driver("GPU-2", "590")]
                .into_iter()
                .collect();
        assert_eq!(mixed.values(|gpu| gpu.arch.clone()), "sm_90a");
        assert_eq!(mixed.values(|gpu| gpu.driver.clone()), "580, 590");
    }
}
