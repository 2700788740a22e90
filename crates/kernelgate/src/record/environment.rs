//! Where a run was measured: the facts that make two results comparable.

use super::text::one_line;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sysinfo::System;

use crate::backend::{BackendKind, Target};
use kernelgate_cuda::compiler::nvrtc;
use kernelgate_cuda::driver::device::DeviceFacts;
use kernelgate_cuda::library;
use kernelgate_cuda::observe::telemetry::Telemetry;

/// The machine and the build, as far as they decide what a time means.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// "cpu" or "cuda".
    pub device_kind: String,
    /// As the device names itself.
    pub device_name: String,
    /// Instruction set of the host: "x86_64".
    pub arch: String,
    /// Logical cores of the host.
    pub cores: usize,
    /// Threads that the CPU backend used.
    pub threads: usize,
    /// SIMD features found at run time, widest last.
    pub simd: Vec<String>,
    /// Memory of the host, bytes.
    pub memory_bytes: u64,
    /// Operating system and kernel version.
    pub os: String,
    /// Whether the library was built with optimisation.
    pub optimised: bool,
    /// Version of kernelgate.
    pub kernelgate: String,
    /// Tells this host from others: a hash of its name and machine id; absent where it has no name
    /// of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// The GPU, where the run was on one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
}

/// A GPU, as far as it decides what a time means.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gpu {
    /// "GPU-…", unique to the card.
    pub uuid: String,
    /// Architecture that kernels are compiled for: "sm_90a".
    pub arch: String,
    /// Version of the driver: "580.82.07"; "unknown" where NVML does not tell.
    pub driver: String,
    /// Latest CUDA that the driver supports: "13.0".
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
    /// Takes down which libraries the process has opened by now: some are when they are needed.
    pub fn note_libraries(&mut self) {
        // Those have fields of their own.
        let others = library::loaded().filter(|(name, _)| !["driver", "nvrtc"].contains(name));
        self.libraries = others.map(|(name, version)| (name.to_owned(), version)).collect();
    }
}

/// A field in which two environments are not comparable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// Name of the field, as in the file.
    pub field: &'static str,
    /// Value of the baseline.
    pub base: String,
    /// Value of the run.
    pub head: String,
}

impl Environment {
    /// The environment of this process on a target.
    pub fn of(target: &Target) -> Self {
        match target {
            Target::Cpu => Self::cpu(),
            Target::Cuda(devices) => Self::of_gpu(devices.one().facts()),
        }
    }

    /// The environment of this process on a GPU, whoever opened it.
    pub fn of_gpu(facts: &DeviceFacts) -> Self {
        let version = |(major, minor): (i32, i32)| format!("{major}.{minor}");
        Self {
            device_kind: BackendKind::Cuda.name().to_owned(),
            device_name: one_line(&facts.name),
            gpu: Some(Gpu {
                uuid: facts.uuid.clone(),
                arch: facts.arch.clone(),
                driver: Telemetry::open(&facts.uuid)
                    .and_then(|telemetry| telemetry.driver())
                    .unwrap_or_else(|| "unknown".to_owned()),
                driver_cuda: version((facts.driver_cuda / 1000, facts.driver_cuda % 1000 / 10)),
                nvrtc: nvrtc::version().map_or_else(|_| "unknown".to_owned(), version),
                multiprocessors: facts.multiprocessors,
                l2_bytes: facts.l2_bytes,
                memory_bytes: facts.memory_bytes,
                max_clock_mhz: facts.max_clock_mhz,
                libraries: BTreeMap::new(),
            }),
            ..Self::cpu()
        }
    }

    /// The environment of this process on the CPU backend.
    pub fn cpu() -> Self {
        let system = System::new().ok().map(|mut system| {
            system.refresh_memory();
            system.refresh_cpu_list(sysinfo::CpuRefreshKind::nothing());
            system
        });
        let first_core = system.as_ref().and_then(|system| system.cpus().first());
        let brand = first_core.map(|cpu| one_line(cpu.brand())).filter(|brand| !brand.is_empty());
        Self {
            device_kind: BackendKind::Cpu.name().to_owned(),
            device_name: brand
                .unwrap_or_else(|| format!("unknown {} processor", std::env::consts::ARCH)),
            arch: std::env::consts::ARCH.to_owned(),
            cores: std::thread::available_parallelism().map_or(1, Into::into),
            threads: crate::backend::cpu::threads(),
            simd: simd_features(),
            memory_bytes: system.as_ref().map_or(0, System::total_memory),
            os: one_line(&format!(
                "{} {}",
                std::env::consts::OS,
                System::kernel_version().unwrap_or_default()
            )),
            optimised: !cfg!(debug_assertions),
            kernelgate: env!("CARGO_PKG_VERSION").to_owned(),
            machine: machine(),
            gpu: None,
        }
    }

    /// Whether the host's own cores were measured.
    pub fn on_host(&self) -> bool {
        self.device_kind == BackendKind::Cpu.name()
    }

    /// Whether the card, on the CPU the host, can be told from others of its model.
    pub const fn is_identified(&self) -> bool {
        self.gpu.is_some() || self.machine.is_some()
    }

    /// Whether this and a baseline's environment, which are comparable, are known to be the same
    /// card, on the CPU the same host. Two of the same model need not run alike.
    pub fn same_device(&self, base: &Self) -> bool {
        match (&self.gpu, &base.gpu) {
            (Some(head), Some(base)) => head.uuid == base.uuid,
            _ => self.machine.is_some() && self.machine == base.machine,
        }
    }

    /// Whether a process here can take over what one found there. Libraries are left out: what a
    /// process has opened is known at its end, and what it computed by them shows in its outputs.
    pub fn same_place(&self, other: &Self) -> bool {
        let without_libraries = |environment: &Self| {
            let mut environment = environment.clone();
            environment.gpu.iter_mut().for_each(|gpu| gpu.libraries.clear());
            environment
        };
        without_libraries(self) == without_libraries(other)
    }

    /// What tells the device from others of its model: "GPU-1a2b…" or the host's hash.
    pub fn device_id(&self) -> String {
        let id = self
            .gpu
            .as_ref()
            .map(|gpu| gpu.uuid.clone())
            .or_else(|| self.machine.as_ref().map(|hash| format!("host {hash}")));
        id.unwrap_or_else(|| "a host without a name".to_owned())
    }

    /// "NVIDIA H200, driver 580.159.04, CUDA 13.0, SM clock up to 1980 MHz", or the processor with
    /// its threads.
    pub fn describe(&self) -> String {
        match &self.gpu {
            Some(Gpu { driver, driver_cuda, max_clock_mhz, .. }) => {
                format!(
                    "{}, driver {driver}, CUDA {driver_cuda}, SM clock up to {max_clock_mhz} MHz",
                    self.device_name
                )
            }
            None => format!("{}, {} cores, {} threads", self.device_name, self.cores, self.threads),
        }
    }

    /// The device's name as a folder: lower case, words joined by `-`.
    pub fn slug(&self) -> String {
        slug(&self.device_name)
    }
}

/// Names alone repeat ("localhost") and machine ids are copied with images: both together.
fn machine() -> Option<String> {
    let name = System::host_name().ok().filter(|name| !name.is_empty());
    let id = std::fs::read_to_string("/etc/machine-id")
        .map(|id| id.trim().to_owned())
        .ok()
        .filter(|id| !id.is_empty());
    if id.is_none() && name.as_ref().is_none_or(|name| name.starts_with("localhost")) {
        return None;
    }
    let text = format!("kernelgate {} {}", name.unwrap_or_default(), id.unwrap_or_default());
    Some(super::file::text_hash(&text)[..16].to_owned())
}

/// "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz" to "intel-xeon-platinum-8481c".
fn slug(name: &str) -> String {
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
fn simd_features() -> Vec<String> {
    let features = [
        ("avx2", std::arch::is_x86_feature_detected!("avx2")),
        ("fma", std::arch::is_x86_feature_detected!("fma")),
        ("f16c", std::arch::is_x86_feature_detected!("f16c")),
        ("avx512f", std::arch::is_x86_feature_detected!("avx512f")),
    ];
    features.into_iter().filter(|(_, found)| *found).map(|(name, _)| name.to_owned()).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn simd_features() -> Vec<String> {
    Vec::new()
}

/// Free memory for a case: what the system says is available, within the container's limit where
/// there is one. Bytes; no bound where the system does not say.
pub fn available_memory() -> u64 {
    let Ok(mut system) = System::new() else { return u64::MAX };
    system.refresh_memory();
    let limit = system.cgroup_limits().map_or(u64::MAX, |limits| limits.free_memory);
    system.available_memory().min(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slugs_are_folder_names() {
        assert_eq!(
            slug("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"),
            "intel-xeon-platinum-8481c"
        );
        assert_eq!(slug("AMD EPYC 9554 64-Core Processor"), "amd-epyc-9554-64-core");
        assert_eq!(slug("NVIDIA H200"), "nvidia-h200");
        assert_eq!(slug("../../etc"), "etc");
        assert_eq!(slug("(R)"), "unknown");
    }

    #[test]
    fn a_different_device_or_thread_count_is_a_mismatch_and_a_new_kernel_version_is_not() {
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

    #[test]
    fn a_card_a_model_and_a_driver_are_told_apart() {
        let on = |uuid: &str, driver: &str| Environment {
            device_kind: "cuda".to_owned(),
            device_name: "NVIDIA H200".to_owned(),
            gpu: Some(Gpu {
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
            }),
            ..Environment::cpu()
        };
        let base = on("GPU-1", "580.82.07");
        let other = on("GPU-2", "580.159.04");
        assert!(base.same_device(&base) && !other.same_device(&base));
        // A process that verified has opened CUPTI by its end.
        let mut verified = base.clone();
        let gpu = verified.gpu.as_mut().unwrap();
        gpu.libraries.insert("cupti".to_owned(), "API 26".to_owned());
        assert!(base != verified && base.same_place(&verified) && verified.same_place(&base));
        assert!(!other.same_place(&base) && !on("GPU-1", "590.1").same_place(&base));
        assert_eq!(other.mismatches(&base), []);
        let newer = on("GPU-1", "590.1");
        let mismatch = Mismatch {
            field: "gpu.driver",
            base: "580.82.07".to_owned(),
            head: "590.1".to_owned(),
        };
        assert_eq!(newer.mismatches(&base), [mismatch]);
        assert_eq!(
            other.describe(),
            "NVIDIA H200, driver 580.159.04, CUDA 13.0, SM clock up to 1980 MHz"
        );
        let nameless = Environment { machine: None, ..Environment::cpu() };
        assert!(!nameless.same_device(&nameless));
    }
}
