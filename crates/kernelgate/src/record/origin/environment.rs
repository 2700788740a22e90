//! Environment of a run: the facts that make two results comparable.

use std::collections::BTreeMap;

use super::gpus::{Gpu, RecordedGpus};
use crate::record::files::text::on_one_line;

use serde::{Deserialize, Serialize};
use sysinfo::System;

use crate::backend::{BackendKind, BenchTarget};
use crate::measure::plausibility;
use kernelgate_cuda::compiler::nvrtc;
use kernelgate_cuda::driver::device::DeviceFacts;
use kernelgate_cuda::driver::peers::PeerLink;
use kernelgate_cuda::observe::telemetry::CardTelemetry;

/// Machine and build: the facts that give a time its meaning.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// "cpu" or "cuda".
    pub device_kind: String,
    /// Name of the GPU or processor, as the system reports it.
    pub device_name: String,
    /// Instruction set of the host, such as "x86_64".
    pub arch: String,
    /// Number of logical cores of the host.
    pub cores: usize,
    /// Number of threads that the CPU backend used.
    pub threads: usize,
    /// SIMD features found at run time, widest last.
    pub simd: Vec<String>,
    /// Main memory of the host, bytes.
    pub memory_bytes: u64,
    /// Operating system of the host, with its kernel version.
    pub os: String,
    /// Whether the library was built with optimisation.
    pub optimised: bool,
    /// Version of kernelgate.
    pub kernelgate: String,
    /// Identity of the host: a hash of its name and machine id; absent if it has no name of its
    /// own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// The GPUs that the run used; empty on the CPU.
    #[serde(default, skip_serializing_if = "RecordedGpus::is_empty")]
    pub gpus: RecordedGpus,
    /// How the GPUs reach each other's memory: the weakest of all pairs; absent for one GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<PeerLink>,
}

/// A field whose values make two environments incomparable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvironmentMismatch {
    /// Name of the field, as in the file.
    pub field: &'static str,
    /// Value of the baseline.
    pub base: String,
    /// Value of the run.
    pub head: String,
}

impl Environment {
    /// Checks that the numbers of an environment are plausible.
    pub fn validate(&self) -> Result<(), String> {
        for (field, count) in [("cores", self.cores), ("threads", self.threads)] {
            plausibility::check_count(field, count as u64)?;
            if count == 0 {
                return Err(format!("0 {field}"));
            }
        }
        plausibility::check_bytes("memory_bytes", self.memory_bytes)?;
        self.gpus.iter().try_for_each(|gpu| {
            plausibility::check_bytes("l2_bytes of a GPU", gpu.l2_bytes)?;
            plausibility::check_bytes("memory_bytes of a GPU", gpu.memory_bytes)
        })
    }

    /// Describes the machine of this process for a run on `target`.
    pub fn on(target: &BenchTarget) -> Environment {
        match target {
            BenchTarget::Cpu => Self::cpu(),
            BenchTarget::Cuda(devices) => Self {
                link: devices.peer_link(),
                ..Self::on_gpus(devices.iter().map(|device| device.facts()))
            },
        }
    }

    /// Describes the environment of this process on these GPUs, whichever library opened them.
    pub fn on_gpus<'a>(facts: impl IntoIterator<Item = &'a DeviceFacts>) -> Environment {
        let facts: Vec<&DeviceFacts> = facts.into_iter().collect();
        let mut names: Vec<String> = facts.iter().map(|facts| on_one_line(&facts.name)).collect();
        names.sort();
        names.dedup();
        Self {
            device_kind: BackendKind::Cuda.name().to_owned(),
            device_name: names.join(", "),
            gpus: facts.into_iter().map(gpu).collect(),
            ..Self::cpu()
        }
    }

    /// The environment of this process on the CPU backend.
    pub fn cpu() -> Environment {
        let system = System::new().ok().map(|mut system| {
            system.refresh_memory();
            system.refresh_cpu_list(sysinfo::CpuRefreshKind::nothing());
            system
        });
        let first_core = system.as_ref().and_then(|system| system.cpus().first());
        let brand =
            first_core.map(|cpu| on_one_line(cpu.brand())).filter(|brand| !brand.is_empty());
        Self {
            device_kind: BackendKind::Cpu.name().to_owned(),
            device_name: brand
                .unwrap_or_else(|| format!("unknown {} processor", std::env::consts::ARCH)),
            arch: std::env::consts::ARCH.to_owned(),
            cores: std::thread::available_parallelism().map_or(1, Into::into),
            threads: crate::backend::cpu::available_threads(),
            simd: cpu_simd_features(),
            memory_bytes: system.as_ref().map_or(0, System::total_memory),
            os: on_one_line(&format!(
                "{} {}",
                std::env::consts::OS,
                System::kernel_version().unwrap_or_default()
            )),
            optimised: !cfg!(debug_assertions),
            kernelgate: env!("CARGO_PKG_VERSION").to_owned(),
            machine: machine_identity(),
            gpus: RecordedGpus::default(),
            link: None,
        }
    }

    /// Whether the cases ran on the CPU and not on a GPU.
    pub fn is_on_host(&self) -> bool {
        self.device_kind == BackendKind::Cpu.name()
    }

    /// Returns whether the card (on the CPU, the host) can be distinguished from others of its
    /// model.
    pub const fn is_device_identified(&self) -> bool {
        !self.gpus.is_empty() || self.machine.is_some()
    }

    /// Returns whether two comparable environments are known to be on the same cards, or on the CPU
    /// on the same host. Two cards of one model need not be equally fast.
    pub fn is_same_device(&self, base: &Self) -> bool {
        match self.gpus.is_empty() || base.gpus.is_empty() {
            true => self.machine.is_some() && self.machine == base.machine,
            false => self.gpus.are_same_cards(&base.gpus),
        }
    }

    /// Returns whether a process in this environment can reuse results from the other environment.
    /// Libraries are ignored: the list of a process is complete only at its end, and their effect
    /// shows in its outputs.
    pub fn can_reuse_results_of(&self, other: &Self) -> bool {
        let without_libraries = |environment: &Self| Self {
            gpus: environment.gpus.without_opened_libraries(),
            ..environment.clone()
        };
        without_libraries(self) == without_libraries(other)
    }

    /// Identifies the device among others of its model: "GPU-1a2b…" or the host's hash.
    pub fn device_identifier(&self) -> String {
        match &self.machine {
            _ if !self.gpus.is_empty() => self.gpus.values(|gpu| gpu.uuid.clone()),
            Some(hash) => format!("host {hash}"),
            None => "a host without a name".to_owned(),
        }
    }

    /// "NVIDIA H200, driver 580.159.04, CUDA 13.0, SM clock up to 1980 MHz", or the processor with
    /// its threads.
    pub fn device_description(&self) -> String {
        if self.gpus.is_empty() {
            return format!("{}, {} cores, {} threads", self.device_name, self.cores, self.threads);
        }
        let count = match self.gpus.len() {
            1 => String::new(),
            count => format!("{count} × "),
        };
        format!(
            "{count}{}, driver {}, CUDA {}, SM clock up to {} MHz",
            self.device_name,
            self.gpus.values(|gpu| gpu.driver.clone()),
            self.gpus.values(|gpu| gpu.driver_cuda.clone()),
            self.gpus.values(|gpu| gpu.max_clock_mhz.to_string()),
        )
    }

    /// Folder of the device's baselines: its name in lower case, words joined by `-`, followed by
    /// the number of GPUs if there are several.
    pub fn baseline_folder_name(&self) -> String {
        let name = baseline_folder_name(&self.device_name);
        if self.gpus.len() > 1 { format!("{name}-x{}", self.gpus.len()) } else { name }
    }
}

/// A GPU with the versions of its driver and of NVRTC.
fn gpu(facts: &DeviceFacts) -> Gpu {
    let version = |(major, minor): (i32, i32)| format!("{major}.{minor}");
    let telemetry = CardTelemetry::open_card(&facts.uuid);
    Gpu {
        uuid: facts.uuid.clone(),
        arch: facts.arch.clone(),
        driver: telemetry
            .and_then(|it| it.driver_version())
            .unwrap_or_else(|| "unknown".to_owned()),
        driver_cuda: version((facts.driver_cuda / 1000, facts.driver_cuda % 1000 / 10)),
        nvrtc: nvrtc::installed_nvrtc_version().map_or_else(|_| "unknown".to_owned(), version),
        multiprocessors: facts.multiprocessors,
        l2_bytes: facts.l2_bytes,
        memory_bytes: facts.memory_bytes,
        max_clock_mhz: facts.max_clock_mhz,
        libraries: BTreeMap::new(),
    }
}

/// Names alone repeat ("localhost") and machine ids are copied with images: both together.
#[expect(clippy::disallowed_methods, reason = "a file of the system")]
fn machine_identity() -> Option<String> {
    let name = System::host_name().ok().filter(|name| !name.is_empty());
    let id = std::fs::read_to_string("/etc/machine-id")
        .map(|id| id.trim().to_owned())
        .ok()
        .filter(|id| !id.is_empty());
    if id.is_none() && name.as_ref().is_none_or(|name| name.starts_with("localhost")) {
        return None;
    }
    let text = format!("kernelgate {} {}", name.unwrap_or_default(), id.unwrap_or_default());
    Some(crate::record::files::file::text_hash(&text)[..16].to_owned())
}

/// Turns a processor name into a folder name: "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"
/// becomes "intel-xeon-platinum-8481c".
fn baseline_folder_name(name: &str) -> String {
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
fn cpu_simd_features() -> Vec<String> {
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

/// Returns the host memory that a case may use, bytes: what the system reports as available, within
/// the container's limit if there is one. Returns the largest number if the system does not report
/// its free memory.
pub fn available_host_memory() -> u64 {
    let Ok(mut system) = System::new() else { return u64::MAX };
    system.refresh_memory();
    let limit = system.cgroup_limits().map_or(u64::MAX, |limits| limits.free_memory);
    system.available_memory().min(limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{ProcessRun, Provenance};

    #[test]
    fn a_device_name_becomes_a_valid_folder_name() {
        assert_eq!(
            baseline_folder_name("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"),
            "intel-xeon-platinum-8481c"
        );
        assert_eq!(
            baseline_folder_name("AMD EPYC 9554 64-Core Processor"),
            "amd-epyc-9554-64-core"
        );
        assert_eq!(baseline_folder_name("NVIDIA H200"), "nvidia-h200");
        assert_eq!(baseline_folder_name("../../etc"), "etc");
        assert_eq!(baseline_folder_name("(R)"), "unknown");
    }

    #[test]
    fn another_device_or_thread_count_is_a_mismatch_and_a_new_kernel_version_is_not() {
        let base = Environment::cpu();
        let same = Environment {
            os: "linux 99".to_owned(),
            memory_bytes: 1,
            kernelgate: "9".to_owned(),
            ..base.clone()
        };
        assert_eq!(same.mismatches(&base), []);
        let other = Environment {
            device_name: "other".to_owned(),
            threads: base.threads + 1,
            ..base.clone()
        };
        let fields: Vec<_> =
            other.mismatches(&base).iter().map(|mismatch| mismatch.field).collect();
        assert_eq!(fields, ["device_name", "threads"]);
    }

    fn environment_with_gpus<const N: usize>(gpus: [Gpu; N]) -> Environment {
        Environment {
            device_kind: "cuda".to_owned(),
            device_name: "NVIDIA H200".to_owned(),
            gpus: gpus.into_iter().collect(),
            ..Environment::cpu()
        }
    }

    #[test]
    fn a_set_of_gpus_is_another_device_than_one_of_its_gpus() {
        let gpu = |uuid: &str| Gpu::h200_with_driver(uuid, "580.82");
        let pair = environment_with_gpus([gpu("GPU-2"), gpu("GPU-1")]);
        let one = environment_with_gpus([gpu("GPU-1")]);
        assert!(pair.is_same_device(&environment_with_gpus([gpu("GPU-1"), gpu("GPU-2")])));
        assert!(!pair.is_same_device(&one));
        let counts =
            |it: Vec<EnvironmentMismatch>| it.into_iter().map(|it| (it.field, it.base, it.head));
        let found: Vec<_> = counts(pair.mismatches(&one)).collect();
        assert_eq!(found, [("gpu.count", "1".to_owned(), "2".to_owned())]);
        assert_ne!(pair.environment_fingerprint(), one.environment_fingerprint());
        let over = |link| Environment { link: Some(link), ..pair.clone() };
        let (nvlink, pcie) = (over(PeerLink::PeerAtomic), over(PeerLink::Peer));
        let found: Vec<_> = counts(pcie.mismatches(&nvlink)).collect();
        assert_eq!(found, [("gpu.link", "peer_atomic".to_owned(), "peer".to_owned())]);
        assert_ne!(nvlink.environment_fingerprint(), pcie.environment_fingerprint());
        assert_eq!(
            (pair.baseline_folder_name(), one.baseline_folder_name()),
            ("nvidia-h200-x2".into(), "nvidia-h200".into())
        );
        assert_eq!(pair.device_identifier(), "GPU-1, GPU-2");
        assert!(
            pair.device_description().starts_with("2 × NVIDIA H200, driver 580.82, CUDA 13.0, ")
        );
    }

    #[test]
    fn a_record_has_the_field_gpu_for_one_card_and_gpus_for_several() {
        use crate::record::file;
        let gpu = |uuid: &str| Gpu::h200_with_driver(uuid, "580.82");
        let text = |environment: Environment| {
            let run = ProcessRun::start_now("b", "s", environment, Provenance::default());
            file::record_text(&run)
        };
        let written_and_read = |environment: Environment| {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("run.json");
            std::fs::write(&path, text(environment)).unwrap();
            file::read::<ProcessRun>(&path).map(|run| run.environment)
        };
        for gpus in [
            environment_with_gpus([]),
            environment_with_gpus([gpu("GPU-1")]),
            environment_with_gpus([gpu("GPU-1"), gpu("GPU-2")]),
        ] {
            assert_eq!(written_and_read(gpus.clone()).unwrap(), gpus);
        }
        assert!(text(environment_with_gpus([gpu("GPU-1")])).contains("\"gpus\": ["));
        assert!(!text(environment_with_gpus([])).contains("\"gpu"));
        let pair = text(environment_with_gpus([gpu("GPU-1"), gpu("GPU-2")]));
        assert!(pair.contains("\"gpus\": ["), "{pair}");
        let twice = pair.replace("GPU-2", "GPU-1");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.json");
        std::fs::write(&path, twice).unwrap();
        let error = file::read::<ProcessRun>(&path).unwrap_err().to_string();
        let reason = "invalid run: a GPU that is listed twice at line 34 column 6";
        assert_eq!(error, format!("failed to read {}: {reason}", path.display()));
    }

    #[test]
    fn a_card_a_model_and_a_driver_are_distinguished() {
        let on =
            |uuid: &str, driver: &str| environment_with_gpus([Gpu::h200_with_driver(uuid, driver)]);
        let base = on("GPU-1", "580.82.07");
        let other = on("GPU-2", "580.159.04");
        assert!(base.is_same_device(&base) && !other.is_same_device(&base));
        // A process that verified has opened CUPTI by its end.
        let mut verified = base.clone();
        let mut gpu = verified.gpus.one().unwrap().clone();
        gpu.libraries.insert("cupti".to_owned(), "API 26".to_owned());
        verified.gpus = gpu.into();
        assert!(
            base != verified
                && base.can_reuse_results_of(&verified)
                && verified.can_reuse_results_of(&base)
        );
        assert!(
            !other.can_reuse_results_of(&base) && !on("GPU-1", "590.1").can_reuse_results_of(&base)
        );
        assert_eq!(other.mismatches(&base), []);
        let newer = on("GPU-1", "590.1");
        let mismatch = EnvironmentMismatch {
            field: "gpu.driver",
            base: "580.82.07".to_owned(),
            head: "590.1".to_owned(),
        };
        assert_eq!(newer.mismatches(&base), [mismatch]);
        assert_eq!(
            other.device_description(),
            "NVIDIA H200, driver 580.159.04, CUDA 13.0, SM clock up to 1980 MHz"
        );
        let nameless = Environment { machine: None, ..Environment::cpu() };
        assert!(!nameless.is_same_device(&nameless));
    }
}
