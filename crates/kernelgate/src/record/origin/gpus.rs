//! Defines the GPUs of a run's environment: a set without repeats, empty on the CPU backend.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use kernelgate_cuda::library;
use kernelgate_cuda::observe::telemetry;

/// One GPU of the environment, with the facts that a measured time depends on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuInEnvironment {
    /// UUID of the GPU as NVML reports it, such as "GPU-…".
    pub uuid: String,
    /// GPU architecture for which kernels are compiled, such as "sm_90a".
    pub arch: String,
    /// Version of the NVIDIA driver, such as "580.82.07"; "unknown" if NVML is missing.
    #[serde(rename = "driver")]
    pub driver_version: String,
    /// Latest CUDA version that the driver supports, such as "13.0".
    #[serde(rename = "driver_cuda")]
    pub latest_cuda_of_driver: String,
    /// Version of NVRTC: "13.0".
    #[serde(rename = "nvrtc")]
    pub nvrtc_version: String,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// L2 cache, bytes.
    pub l2_bytes: u64,
    /// Device memory, bytes.
    pub memory_bytes: u64,
    /// Highest SM clock, MHz.
    pub max_clock_mhz: u32,
    /// Versions of the other NVIDIA libraries that the process opened ("cublaslt", "cudnn",
    /// "cupti"), by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[serde(rename = "libraries")]
    pub library_versions: BTreeMap<String, String>,
}

impl GpuInEnvironment {
    /// Records the NVIDIA libraries that the process has opened so far; some are opened only when
    /// they are needed.
    pub fn record_opened_libraries(&mut self) {
        // Driver and NVRTC are not among these libraries, because their versions have fields of
        // their own.
        let others = library::opened_library_names_and_versions()
            .filter(|(name, _)| !["driver", "nvrtc"].contains(name));
        self.library_versions = others.map(|(name, version)| (name.to_owned(), version)).collect();
    }
}

/// The GPUs of an environment, without repeats, ordered by UUID.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<GpuInEnvironment>", into = "Vec<GpuInEnvironment>")]
pub struct GpusInEnvironment(Vec<GpuInEnvironment>);

impl GpusInEnvironment {
    /// Returns the only GPU of an environment; `None` if it has no GPU or several.
    pub fn only_gpu(&self) -> Option<&GpuInEnvironment> {
        match &self.0[..] {
            [only] => Some(only),
            _ => None,
        }
    }

    /// Number of GPUs.
    pub const fn number_of_gpus(&self) -> usize {
        self.0.len()
    }

    /// Returns whether the environment has no GPU.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the GPUs in ascending order of their UUIDs.
    pub fn gpus_by_uuid(&self) -> std::slice::Iter<'_, GpuInEnvironment> {
        self.0.iter()
    }

    /// Returns the distinct values of a fact over all GPUs, joined by commas; GPUs of one model
    /// give a single value.
    pub fn join_distinct_values_of_gpus(
        &self,
        value: impl Fn(&GpuInEnvironment) -> String,
    ) -> String {
        let mut values: Vec<String> = Vec::new();
        for next in self.gpus_by_uuid().map(value) {
            if !values.contains(&next) {
                values.push(next);
            }
        }
        values.join(", ")
    }

    /// Returns whether two environments have the same GPUs, by UUID; false if both have none.
    pub fn are_same_gpus_by_uuid(&self, other: &Self) -> bool {
        !self.is_empty()
            && self
                .gpus_by_uuid()
                .map(|gpu| &gpu.uuid)
                .eq(other.gpus_by_uuid().map(|gpu| &gpu.uuid))
    }

    /// Returns the UUID of a GPU of the environment that NVML does not list on this machine; `None`
    /// if it lists all.
    pub fn uuid_missing_on_this_machine(&self) -> Option<&str> {
        self.gpus_by_uuid()
            .map(|gpu| &*gpu.uuid)
            .find(|uuid| telemetry::is_card_uuid_listed_by_nvml(uuid) == Some(false))
    }

    /// Records, for each GPU, the NVIDIA libraries that the process has opened so far.
    pub fn record_opened_libraries_of_each_gpu(&mut self) {
        self.0.iter_mut().for_each(GpuInEnvironment::record_opened_libraries);
    }

    /// Returns a copy of the GPUs without their lists of opened libraries.
    pub fn without_opened_libraries(&self) -> Self {
        self.gpus_by_uuid()
            .map(|gpu| GpuInEnvironment { library_versions: BTreeMap::new(), ..gpu.clone() })
            .collect()
    }
}

impl FromIterator<GpuInEnvironment> for GpusInEnvironment {
    fn from_iter<I: IntoIterator<Item = GpuInEnvironment>>(gpus: I) -> Self {
        let mut gpus: Vec<GpuInEnvironment> = gpus.into_iter().collect();
        gpus.sort_by(|left, right| left.uuid.cmp(&right.uuid));
        gpus.dedup_by(|left, right| left.uuid == right.uuid);
        Self(gpus)
    }
}

impl TryFrom<Vec<GpuInEnvironment>> for GpusInEnvironment {
    type Error = &'static str;

    fn try_from(list: Vec<GpuInEnvironment>) -> Result<Self, Self::Error> {
        let count = list.len();
        let gpus: Self = list.into_iter().collect();
        if gpus.number_of_gpus() < count { Err("a GPU that is listed twice") } else { Ok(gpus) }
    }
}

impl From<GpusInEnvironment> for Vec<GpuInEnvironment> {
    fn from(gpus: GpusInEnvironment) -> Self {
        gpus.0
    }
}

impl From<GpuInEnvironment> for GpusInEnvironment {
    fn from(gpu: GpuInEnvironment) -> Self {
        Self(vec![gpu])
    }
}

#[cfg(test)]
impl GpuInEnvironment {
    /// Makes, for tests, an H200 with this UUID and driver version.
    pub(crate) fn example_h200_with_driver(uuid: &str, driver: &str) -> Self {
        Self {
            uuid: uuid.to_owned(),
            arch: "sm_90a".to_owned(),
            driver_version: driver.to_owned(),
            latest_cuda_of_driver: "13.0".to_owned(),
            nvrtc_version: "13.0".to_owned(),
            multiprocessors: 132,
            l2_bytes: 1,
            memory_bytes: 1,
            max_clock_mhz: 1980,
            library_versions: BTreeMap::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example_gpus_with_uuids(uuids: &[&str]) -> GpusInEnvironment {
        uuids
            .iter()
            .map(|uuid| GpuInEnvironment::example_h200_with_driver(uuid, "580.82"))
            .collect()
    }

    #[test]
    fn gpus_are_sorted_by_uuid_without_repeats() {
        assert_eq!(
            example_gpus_with_uuids(&["GPU-2", "GPU-1", "GPU-2"]),
            example_gpus_with_uuids(&["GPU-1", "GPU-2"])
        );
        assert!(
            example_gpus_with_uuids(&["GPU-2", "GPU-1"])
                .are_same_gpus_by_uuid(&example_gpus_with_uuids(&["GPU-1", "GPU-2"]))
        );
        assert!(
            !example_gpus_with_uuids(&["GPU-1", "GPU-2"])
                .are_same_gpus_by_uuid(&example_gpus_with_uuids(&["GPU-1"]))
        );
        assert!(!example_gpus_with_uuids(&[]).are_same_gpus_by_uuid(&example_gpus_with_uuids(&[])));
    }

    #[test]
    fn only_gpu_returns_the_single_gpu_of_an_environment() {
        assert_eq!(
            example_gpus_with_uuids(&["GPU-1"]).only_gpu().map(|gpu| &*gpu.uuid),
            Some("GPU-1")
        );
        assert_eq!(
            [
                example_gpus_with_uuids(&[]).only_gpu(),
                example_gpus_with_uuids(&["GPU-1", "GPU-2"]).only_gpu()
            ],
            [None, None]
        );
    }

    #[test]
    fn a_value_shared_by_all_gpus_is_written_once() {
        let mixed: GpusInEnvironment = [
            GpuInEnvironment::example_h200_with_driver("GPU-1", "580"),
            GpuInEnvironment::example_h200_with_driver("GPU-2", "590"),
        ]
        .into_iter()
        .collect();
        assert_eq!(mixed.join_distinct_values_of_gpus(|gpu| gpu.arch.clone()), "sm_90a");
        assert_eq!(
            mixed.join_distinct_values_of_gpus(|gpu| gpu.driver_version.clone()),
            "580, 590"
        );
    }
}
