//! Defines the environment of a run: the facts about machine, device and build that make two times
//! comparable.

use std::collections::BTreeMap;

use super::gpus::{GpuInEnvironment, GpusInEnvironment};
use crate::record::files::text::join_lines_with_spaces;

use serde::{Deserialize, Serialize};
use sysinfo::System;

use crate::backend::{BackendKind, BenchDevices};
use crate::measure::plausibility;
use kernelgate_cuda::compiler::nvrtc;
use kernelgate_cuda::driver::device::GpuProperties;
use kernelgate_cuda::driver::peers::PeerLink;
use kernelgate_cuda::observe::telemetry::CardTelemetryByNvml;

/// Facts about machine, devices and build, which a measured time depends on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunEnvironment {
    /// "cpu" or "cuda".
    pub device_kind: String,
    /// Name of the GPU or of the processor, as the system reports it.
    pub device_name: String,
    /// Instruction set of the host, such as "x86_64".
    pub arch: String,
    /// Number of logical cores of the host that this process may use.
    #[serde(rename = "cores")]
    pub usable_logical_cores: usize,
    /// Number of threads that kernelgate's CPU backend used.
    #[serde(rename = "threads")]
    pub cpu_backend_threads: usize,
    /// SIMD instruction sets that the host's processor supports; the widest is last.
    pub simd: Vec<String>,
    /// Main memory of the host, bytes.
    #[serde(rename = "memory_bytes")]
    pub host_memory_bytes: u64,
    /// Operating system of the host, with its kernel version.
    pub os: String,
    /// Whether the kernelgate library was built with optimisation.
    #[serde(rename = "optimised")]
    pub built_with_optimisation: bool,
    /// Version of kernelgate.
    #[serde(rename = "kernelgate")]
    pub kernelgate_version: String,
    /// Hash of host name and machine id; absent if the host has neither.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "machine")]
    pub machine_hash: Option<String>,
    /// The GPUs that the run used; empty on the CPU backend.
    #[serde(default, skip_serializing_if = "GpusInEnvironment::is_empty")]
    pub gpus: GpusInEnvironment,
    /// Type of the connection between the GPUs: of all pairs, the weakest; absent for one GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<PeerLink>,
}

/// A field of the environment whose values in base and head make their times incomparable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IncomparableEnvironmentField {
    /// Name of the field, as in record files.
    pub field_name: &'static str,
    /// Value of the field in the baseline.
    pub base_value: String,
    /// Value of the field in the run.
    pub head_value: String,
}

impl RunEnvironment {
    /// Fails if a number of cores, threads or bytes in this environment is implausible.
    pub fn check_environment_plausible(&self) -> Result<(), String> {
        for (field, count) in
            [("cores", self.usable_logical_cores), ("threads", self.cpu_backend_threads)]
        {
            plausibility::check_count_plausible(field, count as u64)?;
            if count == 0 {
                return Err(format!("0 {field}"));
            }
        }
        plausibility::check_bytes_plausible("memory_bytes", self.host_memory_bytes)?;
        self.gpus.gpus_by_uuid().try_for_each(|gpu| {
            plausibility::check_bytes_plausible("l2_bytes of a GPU", gpu.l2_bytes)?;
            plausibility::check_bytes_plausible("memory_bytes of a GPU", gpu.memory_bytes)
        })
    }

    /// Describes the environment of this process for a run on the devices of `target`.
    pub fn environment_of_target(target: &BenchDevices) -> RunEnvironment {
        match target {
            BenchDevices::Cpu => Self::environment_of_process_on_cpu(),
            BenchDevices::Cuda(devices) => Self {
                link: devices.weakest_peer_link(),
                ..Self::environment_of_process_on_gpus(
                    devices.iter().map(|device| device.gpu_properties()),
                )
            },
        }
    }

    /// Describes the environment of this process for a run on these GPUs, which kernelgate or
    /// another library opened.
    pub fn environment_of_process_on_gpus<'a>(
        facts: impl IntoIterator<Item = &'a GpuProperties>,
    ) -> RunEnvironment {
        let facts: Vec<&GpuProperties> = facts.into_iter().collect();
        let mut names: Vec<String> =
            facts.iter().map(|facts| join_lines_with_spaces(&facts.gpu_name)).collect();
        names.sort();
        names.dedup();
        Self {
            device_kind: BackendKind::Cuda.backend_name().to_owned(),
            device_name: names.join(", "),
            gpus: facts.into_iter().map(gpu_with_driver_and_nvrtc_versions).collect(),
            ..Self::environment_of_process_on_cpu()
        }
    }

    /// Describes the environment of this process for a run on the CPU backend.
    pub fn environment_of_process_on_cpu() -> RunEnvironment {
        let system = System::new().ok().map(|mut system| {
            system.refresh_memory();
            system.refresh_cpu_list(sysinfo::CpuRefreshKind::nothing());
            system
        });
        let first_core = system.as_ref().and_then(|system| system.cpus().first());
        let brand = first_core
            .map(|cpu| join_lines_with_spaces(cpu.brand()))
            .filter(|brand| !brand.is_empty());
        Self {
            device_kind: BackendKind::Cpu.backend_name().to_owned(),
            device_name: brand
                .unwrap_or_else(|| format!("unknown {} processor", std::env::consts::ARCH)),
            arch: std::env::consts::ARCH.to_owned(),
            usable_logical_cores: std::thread::available_parallelism().map_or(1, Into::into),
            cpu_backend_threads: crate::backend::cpu::cpu_backend_thread_count(),
            simd: supported_simd_features(),
            host_memory_bytes: system.as_ref().map_or(0, System::total_memory),
            os: join_lines_with_spaces(&format!(
                "{} {}",
                std::env::consts::OS,
                System::kernel_version().unwrap_or_default()
            )),
            built_with_optimisation: !cfg!(debug_assertions),
            kernelgate_version: env!("CARGO_PKG_VERSION").to_owned(),
            machine_hash: hash_of_host_name_and_machine_id(),
            gpus: GpusInEnvironment::default(),
            link: None,
        }
    }

    /// Returns whether the cases of the run ran on the CPU backend.
    pub fn is_cpu_run(&self) -> bool {
        self.device_kind == BackendKind::Cpu.backend_name()
    }

    /// Returns whether the GPU (for a CPU run, the host) has an id that distinguishes it from
    /// others of its model.
    pub const fn has_device_id(&self) -> bool {
        !self.gpus.is_empty() || self.machine_hash.is_some()
    }

    /// Returns whether two comparable environments certainly have the same GPUs, or for CPU runs
    /// the same host. Two GPUs of one model can differ in speed.
    pub fn has_same_gpus_or_host_as(&self, base: &Self) -> bool {
        match self.gpus.is_empty() || base.gpus.is_empty() {
            true => self.machine_hash.is_some() && self.machine_hash == base.machine_hash,
            false => self.gpus.are_same_gpus_by_uuid(&base.gpus),
        }
    }

    /// Returns whether a process in this environment may reuse verification results from the other
    /// environment. Loaded libraries are not compared, because their list is complete only at the
    /// end of a process; their effect shows in the outputs.
    pub fn can_reuse_verification_of(&self, other: &Self) -> bool {
        let without_libraries = |environment: &Self| Self {
            gpus: environment.gpus.without_opened_libraries(),
            ..environment.clone()
        };
        without_libraries(self) == without_libraries(other)
    }

    /// Returns the UUIDs of the GPUs, such as "GPU-1a2b…", or for a CPU run the hash of the host.
    pub fn id_of_gpus_or_host(&self) -> String {
        match &self.machine_hash {
            _ if !self.gpus.is_empty() => {
                self.gpus.join_distinct_values_of_gpus(|gpu| gpu.uuid.clone())
            }
            Some(hash) => format!("host {hash}"),
            None => "a host without a name".to_owned(),
        }
    }

    /// Returns a description such as "NVIDIA H200, driver 580.159.04, CUDA 13.0, SM clock up to
    /// 1980 MHz", or the processor with its numbers of cores and threads.
    pub fn description_of_device(&self) -> String {
        if self.gpus.is_empty() {
            return format!(
                "{}, {} cores, {} threads",
                self.device_name, self.usable_logical_cores, self.cpu_backend_threads
            );
        }
        let count = match self.gpus.number_of_gpus() {
            1 => String::new(),
            count => format!("{count} × "),
        };
        format!(
            "{count}{}, driver {}, CUDA {}, SM clock up to {} MHz",
            self.device_name,
            self.gpus.join_distinct_values_of_gpus(|gpu| gpu.driver_version.clone()),
            self.gpus.join_distinct_values_of_gpus(|gpu| gpu.latest_cuda_of_driver.clone()),
            self.gpus.join_distinct_values_of_gpus(|gpu| gpu.max_clock_mhz.to_string()),
        )
    }

    /// Returns the name of the folder for the device's baselines: the device name in lower case,
    /// joined by `-`, and the number of GPUs if there are several.
    pub fn baseline_folder_of_device_and_count(&self) -> String {
        let name = folder_name_of_device_name(&self.device_name);
        if self.gpus.number_of_gpus() > 1 {
            format!("{name}-x{}", self.gpus.number_of_gpus())
        } else {
            name
        }
    }
}

/// Makes the record of a GPU, with the versions of its driver and of NVRTC.
fn gpu_with_driver_and_nvrtc_versions(facts: &GpuProperties) -> GpuInEnvironment {
    let version = |(major, minor): (i32, i32)| format!("{major}.{minor}");
    let telemetry = CardTelemetryByNvml::open_card_by_uuid(&facts.gpu_uuid);
    GpuInEnvironment {
        uuid: facts.gpu_uuid.clone(),
        arch: facts.kernel_architecture.clone(),
        driver_version: telemetry
            .and_then(|it| it.nvidia_driver_version())
            .unwrap_or_else(|| "unknown".to_owned()),
        latest_cuda_of_driver: version((
            facts.driver_cuda_version / 1000,
            facts.driver_cuda_version % 1000 / 10,
        )),
        nvrtc_version: nvrtc::found_nvrtc_version().map_or_else(|_| "unknown".to_owned(), version),
        multiprocessors: facts.multiprocessor_count,
        l2_bytes: facts.l2_cache_bytes,
        memory_bytes: facts.device_memory_bytes,
        max_clock_mhz: facts.max_sm_clock_mhz,
        library_versions: BTreeMap::new(),
    }
}

/// Host name and machine id are hashed together, because names repeat ("localhost") and machine ids
/// are copied with disk images.
#[expect(clippy::disallowed_methods, reason = "a file of the system")]
fn hash_of_host_name_and_machine_id() -> Option<String> {
    let name = System::host_name().ok().filter(|name| !name.is_empty());
    let id = std::fs::read_to_string("/etc/machine-id")
        .map(|id| id.trim().to_owned())
        .ok()
        .filter(|id| !id.is_empty());
    if id.is_none() && name.as_ref().is_none_or(|name| name.starts_with("localhost")) {
        return None;
    }
    let text = format!("kernelgate {} {}", name.unwrap_or_default(), id.unwrap_or_default());
    Some(crate::record::files::file::text_hash_hex(&text)[..16].to_owned())
}

/// Makes a folder name of a processor or GPU name: "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"
/// becomes "intel-xeon-platinum-8481c".
fn folder_name_of_device_name(name: &str) -> String {
    let mut text = name.to_lowercase();
    for mark in ["(r)", "(tm)", "(c)"] {
        text = text.replace(mark, " ");
    }
    let text = text.split('@').next().unwrap_or_default();
    let words = text
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty() && !["cpu", "processor"].contains(word));
    let slug = words.collect::<Vec<_>>().join("-");
    if slug.is_empty() { "unknown".to_owned() } else { slug }
}

#[cfg(target_arch = "x86_64")]
fn supported_simd_features() -> Vec<String> {
    let features = [
        ("avx2", std::arch::is_x86_feature_detected!("avx2")),
        ("fma", std::arch::is_x86_feature_detected!("fma")),
        ("f16c", std::arch::is_x86_feature_detected!("f16c")),
        ("avx512f", std::arch::is_x86_feature_detected!("avx512f")),
    ];
    features.into_iter().filter(|(_, found)| *found).map(|(name, _)| name.to_owned()).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn cpu_simd_features() -> Vec<String> {
    Vec::new()
}

/// Returns the host memory that a case may use, bytes: the memory that the system reports as
/// available, at most that of the container's limit. Returns `u64::MAX` if the system does not
/// report its available memory.
pub fn available_host_memory_bytes() -> u64 {
    let Ok(mut system) = System::new() else { return u64::MAX };
    system.refresh_memory();
    let limit = system.cgroup_limits().map_or(u64::MAX, |limits| limits.free_memory);
    system.available_memory().min(limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{BenchProcessRun, CommitAndChanges};

    #[test]
    fn a_device_name_becomes_a_valid_folder_name() {
        assert_eq!(
            folder_name_of_device_name("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"),
            "intel-xeon-platinum-8481c"
        );
        assert_eq!(
            folder_name_of_device_name("AMD EPYC 9554 64-Core Processor"),
            "amd-epyc-9554-64-core"
        );
        assert_eq!(folder_name_of_device_name("NVIDIA H200"), "nvidia-h200");
        assert_eq!(folder_name_of_device_name("../../etc"), "etc");
        assert_eq!(folder_name_of_device_name("(R)"), "unknown");
    }

    #[test]
    fn another_device_is_incomparable_and_another_kernel_is_not() {
        let base = RunEnvironment::environment_of_process_on_cpu();
        let same = RunEnvironment {
            os: "linux 99".to_owned(),
            host_memory_bytes: 1,
            kernelgate_version: "9".to_owned(),
            ..base.clone()
        };
        assert_eq!(same.incomparable_facts_with_base(&base), []);
        let other = RunEnvironment {
            device_name: "other".to_owned(),
            cpu_backend_threads: base.cpu_backend_threads + 1,
            ..base.clone()
        };
        let fields: Vec<_> = other
            .incomparable_facts_with_base(&base)
            .iter()
            .map(|mismatch| mismatch.field_name)
            .collect();
        assert_eq!(fields, ["device_name", "threads"]);
    }

    fn example_environment_with_gpus<const N: usize>(
        gpus: [GpuInEnvironment; N],
    ) -> RunEnvironment {
        RunEnvironment {
            device_kind: "cuda".to_owned(),
            device_name: "NVIDIA H200".to_owned(),
            gpus: gpus.into_iter().collect(),
            ..RunEnvironment::environment_of_process_on_cpu()
        }
    }

    #[test]
    fn several_gpus_are_a_different_device_than_one_gpu() {
        let gpu = |uuid: &str| GpuInEnvironment::example_h200_with_driver(uuid, "580.82");
        let pair = example_environment_with_gpus([gpu("GPU-2"), gpu("GPU-1")]);
        let one = example_environment_with_gpus([gpu("GPU-1")]);
        assert!(pair.has_same_gpus_or_host_as(&example_environment_with_gpus([
            gpu("GPU-1"),
            gpu("GPU-2")
        ])));
        assert!(!pair.has_same_gpus_or_host_as(&one));
        let counts = |it: Vec<IncomparableEnvironmentField>| {
            it.into_iter().map(|it| (it.field_name, it.base_value, it.head_value))
        };
        let found: Vec<_> = counts(pair.incomparable_facts_with_base(&one)).collect();
        assert_eq!(found, [("gpu.count", "1".to_owned(), "2".to_owned())]);
        assert_ne!(pair.name_of_comparable_environments(), one.name_of_comparable_environments());
        let over = |link| RunEnvironment { link: Some(link), ..pair.clone() };
        let (nvlink, pcie) = (over(PeerLink::PeerWithAtomics), over(PeerLink::PeerWithoutAtomics));
        let found: Vec<_> = counts(pcie.incomparable_facts_with_base(&nvlink)).collect();
        assert_eq!(found, [("gpu.link", "peer_atomic".to_owned(), "peer".to_owned())]);
        assert_ne!(
            nvlink.name_of_comparable_environments(),
            pcie.name_of_comparable_environments()
        );
        assert_eq!(
            (pair.baseline_folder_of_device_and_count(), one.baseline_folder_of_device_and_count()),
            ("nvidia-h200-x2".into(), "nvidia-h200".into())
        );
        assert_eq!(pair.id_of_gpus_or_host(), "GPU-1, GPU-2");
        assert!(
            pair.description_of_device().starts_with("2 × NVIDIA H200, driver 580.82, CUDA 13.0, ")
        );
    }

    #[test]
    fn a_record_has_field_gpu_for_one_and_gpus_for_several() {
        use crate::record::file;
        let gpu = |uuid: &str| GpuInEnvironment::example_h200_with_driver(uuid, "580.82");
        let text = |environment: RunEnvironment| {
            let run = BenchProcessRun::empty_run_starting_now(
                "b",
                "s",
                environment,
                CommitAndChanges::default(),
            );
            file::json_text_of_record(&run)
        };
        let written_and_read = |environment: RunEnvironment| {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("run.json");
            std::fs::write(&path, text(environment)).unwrap();
            file::read_record::<BenchProcessRun>(&path).map(|run| run.environment)
        };
        for gpus in [
            example_environment_with_gpus([]),
            example_environment_with_gpus([gpu("GPU-1")]),
            example_environment_with_gpus([gpu("GPU-1"), gpu("GPU-2")]),
        ] {
            assert_eq!(written_and_read(gpus.clone()).unwrap(), gpus);
        }
        assert!(text(example_environment_with_gpus([gpu("GPU-1")])).contains("\"gpus\": ["));
        assert!(!text(example_environment_with_gpus([])).contains("\"gpu"));
        let pair = text(example_environment_with_gpus([gpu("GPU-1"), gpu("GPU-2")]));
        assert!(pair.contains("\"gpus\": ["), "{pair}");
        let twice = pair.replace("GPU-2", "GPU-1");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.json");
        std::fs::write(&path, twice).unwrap();
        let error = file::read_record::<BenchProcessRun>(&path).unwrap_err().to_string();
        let reason = "invalid run: a GPU that is listed twice at line 34 column 6";
        assert_eq!(error, format!("failed to read {}: {reason}", path.display()));
    }

    #[test]
    fn a_gpu_its_model_and_its_driver_are_distinguished() {
        let on = |uuid: &str, driver: &str| {
            example_environment_with_gpus([GpuInEnvironment::example_h200_with_driver(
                uuid, driver,
            )])
        };
        let base = on("GPU-1", "580.82.07");
        let other = on("GPU-2", "580.159.04");
        assert!(base.has_same_gpus_or_host_as(&base) && !other.has_same_gpus_or_host_as(&base));
        // A process that verified a case has opened CUPTI, so the list of opened libraries differs.
        let mut verified = base.clone();
        let mut gpu = verified.gpus.only_gpu().unwrap().clone();
        gpu.library_versions.insert("cupti".to_owned(), "API 26".to_owned());
        verified.gpus = gpu.into();
        assert!(
            base != verified
                && base.can_reuse_verification_of(&verified)
                && verified.can_reuse_verification_of(&base)
        );
        assert!(
            !other.can_reuse_verification_of(&base)
                && !on("GPU-1", "590.1").can_reuse_verification_of(&base)
        );
        assert_eq!(other.incomparable_facts_with_base(&base), []);
        let newer = on("GPU-1", "590.1");
        let mismatch = IncomparableEnvironmentField {
            field_name: "gpu.driver",
            base_value: "580.82.07".to_owned(),
            head_value: "590.1".to_owned(),
        };
        assert_eq!(newer.incomparable_facts_with_base(&base), [mismatch]);
        assert_eq!(
            other.description_of_device(),
            "NVIDIA H200, driver 580.159.04, CUDA 13.0, SM clock up to 1980 MHz"
        );
        let nameless = RunEnvironment {
            machine_hash: None,
            ..RunEnvironment::environment_of_process_on_cpu()
        };
        assert!(!nameless.has_same_gpus_or_host_as(&nameless));
    }
}
