//! `kernelgate doctor`: checks whether this machine can run GPU benchmarks, and names what is
//! missing.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use super::shared::nvrtc::InstallableNvrtc;
use super::shared::output::{OutputFormat, print_as_json};
use crate::benches::package::is_in_a_cargo_package;
use kernelgate::display::{self, terminal};
use kernelgate::exit::ProcessExitReason;
use kernelgate::harness::args;
use kernelgate::record::environment::available_host_memory_bytes;
use kernelgate::record::machine::UnexpectedHardwareFact;
use kernelgate::record::text::{
    clean_message_for_terminal, cut_middle_of_long_message, path_for_terminal, shortened_quotation,
};
use kernelgate::record::{
    CommitAndChanges, MachineHardware, RecordFoldersOfPackage, RunEnvironment, file,
};
use kernelgate_cuda::DeviceOptions;
use kernelgate_cuda::architecture;
use kernelgate_cuda::compiler::cache;
use kernelgate_cuda::driver::device::{self, Device, GpuProperties};
use kernelgate_cuda::libraries::{cudnn, nccl};
use kernelgate_cuda::library::{self, NvidiaLibrary, OLDEST_SUPPORTED_DRIVER, OpenedLibraryFacts};
use kernelgate_cuda::observe::telemetry::CardTelemetryByNvml;

#[derive(Debug, clap::Args)]
pub struct DoctorCommandArguments {
    /// Print a folder with NVRTC of this CUDA version, for KERNELGATE_CUDA_LIBS; pip installs it
    /// into the target folder on the first call
    #[arg(long, value_enum, value_name = "VERSION", num_args = 0..=1, default_missing_value = "13")]
    fetch_nvrtc: Option<InstallableNvrtc>,
    /// Record the machine: processor, memory, GPUs with driver, clocks, power limit and links
    #[arg(long = "save", value_name = "FILE", conflicts_with = "expect")]
    machine_output_file: Option<PathBuf>,
    /// Compare this machine with the machine recorded in a file; exit with 4 and print the facts
    /// that differ
    #[arg(id = "expect", long = "expect", value_name = "FILE")]
    expected_machine_file: Option<PathBuf>,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

#[derive(Debug, Serialize)]
struct MachineCheckResult {
    #[serde(rename = "what")]
    checked_subject: &'static str,
    #[serde(rename = "finding")]
    check_finding: String,
    /// Advice on what the user should do; `None` if the check found no problem.
    advice: Option<String>,
}

pub fn run_doctor_command(
    arguments: &DoctorCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    if let Some(nvrtc) = arguments.fetch_nvrtc {
        let target = store.generated_files_folder.parent().unwrap_or(Path::new("."));
        println!("{}", nvrtc.install_nvrtc_if_missing(target)?.display());
        return Ok(ProcessExitReason::Success);
    }
    if let Some(path) = &arguments.machine_output_file {
        let machine = MachineHardware::hardware_of_this_machine();
        file::write_record_atomically(path, &machine)?;
        println!("machine {} in {}", machine.hash_of_hardware_facts(), path_for_terminal(path));
        return Ok(ProcessExitReason::Success);
    }
    if let Some(path) = &arguments.expected_machine_file {
        return Ok(compare_with_recorded_machine(&file::read_record(path)?));
    }
    let mut checks =
        run_all_machine_checks(&RunEnvironment::environment_of_process_on_cpu(), store);
    for check in &mut checks {
        // Names of folders and files may come from others, so characters that control the terminal
        // are escaped.
        check.check_finding = clean_message_for_terminal(&check.check_finding).into_owned();
    }
    match arguments.format {
        OutputFormat::Json => print_as_json(&checks)?,
        OutputFormat::Text => {
            for check in &checks {
                let line = |text: String, indent| match terminal::terminal_columns() {
                    Some(columns) => {
                        println!("{}", terminal::break_line_to_columns(&text, indent, columns))
                    }
                    None => println!("{text}"),
                };
                line(format!("{:<10} {}", check.checked_subject, check.check_finding), 11);
                if let Some(advice) = &check.advice {
                    line(format!("{:<10} -> {advice}", ""), 14);
                }
            }
        }
        OutputFormat::Markdown => {
            let mut table = display::table::AlignedTextTable::new(&["what", "finding", "advice"]);
            for check in checks {
                table.add_row(vec![
                    check.checked_subject.to_owned(),
                    check.check_finding,
                    check.advice.unwrap_or_default(),
                ]);
            }
            println!("{}", table.to_markdown());
        }
    }
    Ok(ProcessExitReason::Success)
}

/// Compares the facts of this machine with recorded facts, and prints each fact that differs.
fn compare_with_recorded_machine(expected: &MachineHardware) -> ProcessExitReason {
    let here = MachineHardware::hardware_of_this_machine();
    let differing = here.differences_from_expected_machine(expected);
    for UnexpectedHardwareFact {
        fact_name: field,
        expected_value: expected,
        actual_value: found,
    } in &differing
    {
        let line = format!("refused: {field} is `{found}`, not `{expected}`");
        println!("{}", clean_message_for_terminal(&line));
    }
    if differing.is_empty() {
        println!("machine {} as expected", here.hash_of_hardware_facts());
        return ProcessExitReason::Success;
    }
    ProcessExitReason::ResultsNotComparable
}

fn run_all_machine_checks(
    environment: &RunEnvironment,
    store: &RecordFoldersOfPackage,
) -> Vec<MachineCheckResult> {
    let check = |what, finding, advice: Option<&str>| MachineCheckResult {
        checked_subject: what,
        check_finding: finding,
        advice: advice.map(ToOwned::to_owned),
    };
    let simd = environment.simd.join(" ");
    let mut checks = vec![
        check(
            "cpu",
            format!(
                "{}, {} cores, {} threads in use",
                environment.device_name,
                environment.usable_logical_cores,
                environment.cpu_backend_threads
            ),
            None,
        ),
        check(
            "simd",
            if simd.is_empty() { "baseline only".to_owned() } else { simd.clone() },
            (environment.arch == "x86_64" && !simd.contains("avx2")).then_some(
                "without AVX2 the CPU backend is slow; times stay comparable on this machine",
            ),
        ),
        check(
            "memory",
            format!(
                "{} free of {}",
                display::decimal_byte_size_text(available_host_memory_bytes()),
                display::decimal_byte_size_text(environment.host_memory_bytes)
            ),
            None,
        ),
        check_cpu_load(environment.usable_logical_cores),
        check_cpu_frequency_governor(),
        check(
            "build",
            if environment.built_with_optimisation {
                "optimised".to_owned()
            } else {
                "not optimised".to_owned()
            },
            (!environment.built_with_optimisation).then_some(
                "times of this build mean nothing: use cargo bench, or cargo run --release",
            ),
        ),
        check_package_folder("baselines", "--baselines", &store.baselines_folder, store),
        check_package_folder("runs", "--records", &store.runs_folder, store),
    ];
    // GPUs are listed before libraries other than the driver are opened.
    let gpus = check_every_gpu();
    checks.extend(
        NvidiaLibrary::ALL_NVIDIA_LIBRARIES.into_iter().flat_map(check_library_and_other_copies),
    );
    checks.extend(library::ignored_folders_in_variables().into_iter().map(|setting| {
        check("setting", setting, Some("name folders from the root on, in variables too"))
    }));
    checks.extend(check_environment_variables());
    checks.extend(check_architecture_variable());
    checks.extend(check_compiled_kernel_cache());
    checks.extend(gpus);
    checks.push(check_optional_profiler("nsys", "timelines (Nsight Systems)"));
    checks.push(check_optional_profiler("ncu", "counters of a kernel (Nsight Compute)"));
    checks.extend(check_counter_permission());
    checks
}

/// Checks environment variables whose wrong values would stop a bench: those that stand for flags,
/// and the commit.
fn check_environment_variables() -> Vec<MachineCheckResult> {
    let commit = CommitAndChanges::commit_and_changes_of_started_process(Path::new("."))
        .err()
        .map(|it| it.to_string());
    let number = std::env::var("KERNELGATE_DEVICE").ok().and_then(|it| it.parse::<usize>().ok());
    let missing = number.zip(device::count_gpus().ok()).filter(|(number, count)| number >= count);
    let device = missing.map(|(number, count)| {
        format!("KERNELGATE_DEVICE={number}: there are {count} GPUs, counted from 0")
    });
    let check = |finding: String| MachineCheckResult {
        checked_subject: "setting",
        check_finding: cut_middle_of_long_message(finding),
        advice: Some("correct the variable, or unset it: benches end with this error".to_owned()),
    };
    args::problems_of_flag_variables().into_iter().chain(commit).chain(device).map(check).collect()
}

/// Checks whether the variable `KERNELGATE_ARCH` names a GPU architecture, such as sm_90a.
fn check_architecture_variable() -> Option<MachineCheckResult> {
    let named = architecture::architecture_from_environment()?;
    let advice = "name one as NVIDIA does: sm_80, sm_90a; until then no case runs on a GPU";
    architecture::compute_capability_number(&named).is_none().then(|| MachineCheckResult {
        checked_subject: "setting",
        check_finding: format!(
            "{}: `{}` is not an architecture",
            architecture::ARCHITECTURE_ENVIRONMENT_VARIABLE,
            shortened_quotation(&named)
        ),
        advice: Some(advice.to_owned()),
    })
}

/// Shows where a library was found and whether it fits the driver, or how to get the library; also
/// lists found copies that are not used.
fn check_library_and_other_copies(library: NvidiaLibrary) -> Vec<MachineCheckResult> {
    let check = |finding, advice| MachineCheckResult {
        checked_subject: "library",
        check_finding: finding,
        advice,
    };
    let shown = |loaded: &OpenedLibraryFacts| {
        let version = loaded.library_version.as_ref().map(|version| format!(" {version}"));
        format!("{}{}", library.library_name_in_messages(), version.unwrap_or_default())
    };
    let used = match library::open_library_once(library) {
        Some(loaded) => check(
            format!("{}: {}", shown(loaded), loaded.path_or_library_name.display()),
            problem_of_found_library(library),
        ),
        None => check(
            format!("{} is missing", library.library_name_in_messages()),
            Some(library.advice_to_install_library()),
        ),
    };
    let unusable =
        library::library_files_that_cannot_be_loaded(library).into_iter().map(|(file, why)| {
            let (name, file) = (library.library_name_in_messages(), file.display());
            let advice = "put a whole one there, or remove it".to_owned();
            check(format!("{name}: found {file}, which cannot be loaded: {why}"), Some(advice))
        });
    let others = library::found_but_unused_library_files(library).into_iter().map(|other| {
        check(
            format!("{} is not used: {}", shown(&other), other.path_or_library_name.display()),
            None,
        )
    });
    std::iter::once(used).chain(others).chain(unusable).collect()
}

/// The reason why a library that was found cannot be used; `None` if it can be used.
fn problem_of_found_library(library: NvidiaLibrary) -> Option<String> {
    if library == NvidiaLibrary::Nccl {
        return nccl::check_nccl_is_available().err().map(|reason| reason.to_string());
    }
    let driver = library::newest_cuda_version_of_driver()?;
    match library {
        NvidiaLibrary::CudaDriver if driver < OLDEST_SUPPORTED_DRIVER => Some(format!(
            "CUDA {OLDEST_SUPPORTED_DRIVER} is needed: update the driver; until then no case runs on a GPU"
        )),
        NvidiaLibrary::Nvrtc => library::choose_nvrtc_library().filter(|nvrtc| !nvrtc.driver_can_load_generated_code).map(|_| {
            format!(
                "the driver (CUDA {driver}) does not take what it generates, so no case runs on a \
                 GPU; `kernelgate resources` works: {}",
                device::advice_on_fitting_nvrtc(driver)
            )
        }),
        NvidiaLibrary::Cudnn => cudnn::api::found_cudnn_version().err().map(|refusal| refusal.0),
        _ => None,
    }
}

/// Names the cache folder of compiled kernels, and whether kernelgate uses it.
fn check_compiled_kernel_cache() -> Option<MachineCheckResult> {
    let (folder, used) = cache::cache_folder_and_whether_used()?;
    let advice = "others can write to it, or it is not yours: kernels are compiled in every \
                  process; remove it, or name another folder in KERNELGATE_CACHE";
    Some(MachineCheckResult {
        checked_subject: "kernels",
        check_finding: folder.display().to_string(),
        advice: (!used).then(|| advice.to_owned()),
    })
}

/// Describes each GPU, or gives the reason why no GPU was found.
fn check_every_gpu() -> Vec<MachineCheckResult> {
    let check = |finding, advice| MachineCheckResult {
        checked_subject: "gpu",
        check_finding: finding,
        advice,
    };
    let count = match device::count_gpus() {
        Ok(count) => count,
        Err(error) => {
            return vec![check(format!("none: {error}"), Some("cases run on the CPU".to_owned()))];
        }
    };
    let timeout = Duration::from_secs(1);
    let options =
        DeviceOptions { hung_kernel_timeout: timeout, ..DeviceOptions::from_environment() };
    (0..count)
        .flat_map(|ordinal| match Device::open(ordinal, &options) {
            Ok(device) => {
                let facts = device.gpu_properties();
                let memory = device.free_and_total_bytes().map_or_else(
                    |error| error.to_string(),
                    |(free, total)| {
                        format!(
                            "{} free of {}",
                            display::decimal_byte_size_text(free),
                            display::decimal_byte_size_text(total)
                        )
                    },
                );
                let card = check(
                    format!(
                        "{ordinal}: {}, {}{}, CUDA {}.{}, {} multiprocessors up to {} MHz, L2 {}, \
                         {memory}, {}",
                        facts.gpu_name,
                        facts.kernel_architecture,
                        if facts.nvrtc_target == facts.kernel_architecture {
                            ""
                        } else {
                            " by PTX"
                        },
                        facts.driver_cuda_version / 1000,
                        facts.driver_cuda_version % 1000 / 10,
                        facts.multiprocessor_count,
                        facts.max_sm_clock_mhz,
                        display::decimal_byte_size_text(facts.l2_cache_bytes),
                        facts.gpu_uuid
                    ),
                    note_on_skipped_implementations(&facts.kernel_architecture),
                );
                vec![card, check_gpu_clock_locking(facts)]
            }
            Err(error) => {
                vec![check(format!("{ordinal}: {error}"), Some("cases run on the CPU".to_owned()))]
            }
        })
        .collect()
}

/// Checks, without changing anything, whether the GPU clocks could be locked and what locked clocks
/// would do to times. Nothing is changed.
fn check_gpu_clock_locking(facts: &GpuProperties) -> MachineCheckResult {
    let check = |finding, advice: Option<&str>| MachineCheckResult {
        checked_subject: "clocks",
        check_finding: finding,
        advice: advice.map(str::to_owned),
    };
    let highest = format!("{}: up to {} MHz", facts.gpu_ordinal, facts.max_sm_clock_mhz);
    let Some(telemetry) = CardTelemetryByNvml::open_card_by_uuid(&facts.gpu_uuid) else {
        let finding = format!("{highest}; NVML is missing, or does not know this device");
        return check(finding, Some("times have no power state (n/a)"));
    };
    let watts = |milliwatts: u32| f64::from(milliwatts) / 1e3;
    let power =
        telemetry.default_and_current_power_limit_mw().map_or(String::new(), |(default, limit)| {
            format!(", power limit {:.0} W (default {:.0} W)", watts(limit), watts(default))
        });
    let permission = match telemetry.does_setting_clocks_need_root() {
        None => "this device does not let anybody lock them",
        Some(true) => "root may lock them",
        Some(false) => "this user may set them",
    };
    let advice = telemetry.does_setting_clocks_need_root().map(|_| {
        "locked below the power cap (nvidia-smi --lock-gpu-clocks), all cases have one clock: times \
         are longer, and repeat better at the cap; kernelgate never changes clocks"
    });
    check(format!("{highest}{power}; {permission}"), advice)
}

/// Note for an architecture other than sm_90a that implementations for sm_90a are skipped.
fn note_on_skipped_implementations(arch: &str) -> Option<String> {
    (arch != "sm_90a").then(|| {
        format!(
            "rows that need another architecture or more shared memory are skipped: `kernelgate \
             resources --arch {arch}` lists their kernels"
        )
    })
}

/// Checks whether a profiler of NVIDIA, such as `nsys`, is on PATH; profilers are optional.
fn check_optional_profiler(name: &'static str, what: &str) -> MachineCheckResult {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&folders)
        .map(|folder| folder.join(format!("{name}{}", std::env::consts::EXE_SUFFIX)))
        .find(|path| path.is_file());
    MachineCheckResult {
        checked_subject: "tool",
        check_finding: match &found {
            Some(path) => format!("{name}, {what}: {}", path.display()),
            None => format!("{name}, {what}: not on PATH"),
        },
        advice: found.is_none().then(|| {
            format!("optional: the CUDA toolkit or https://developer.nvidia.com has {name}")
        }),
    }
}

/// Checks whether the driver lets users other than root read the GPU's performance counters; `None`
/// without the driver.
fn check_counter_permission() -> Option<MachineCheckResult> {
    let parameters = std::fs::read_to_string("/proc/driver/nvidia/params").ok()?;
    Some(counter_permission_from_parameters(&parameters))
}

fn counter_permission_from_parameters(parameters: &str) -> MachineCheckResult {
    let setting = parameters.lines().find_map(|line| line.strip_prefix("RmProfilingAdminOnly:"));
    let (finding, advice) = match setting.map(str::trim) {
        Some("0") => ("every user may read the GPU's performance counters", None),
        Some(_) => (
            "only root may read the GPU's performance counters (RmProfilingAdminOnly)",
            Some(
                "for ncu: `options nvidia NVreg_RestrictProfilingToAdminUsers=0` in \
                 /etc/modprobe.d, and load the driver anew, or run ncu as root; timing and \
                 `kernelgate profile` need no counters",
            ),
        ),
        None => ("the driver does not say who may read the GPU's performance counters", None),
    };
    MachineCheckResult {
        checked_subject: "counters",
        check_finding: finding.to_owned(),
        advice: advice.map(str::to_owned),
    }
}

/// Checks the CPU load of the machine; other load is the most frequent cause of false alarms.
fn check_cpu_load(cores: usize) -> MachineCheckResult {
    let Ok(load) = sysinfo::System::load_average().map(|load| load.one) else {
        return MachineCheckResult {
            checked_subject: "load",
            check_finding: "not visible".to_owned(),
            advice: None,
        };
    };
    let busy = load > 0.3 * cores as f64;
    MachineCheckResult {
        checked_subject: "load",
        check_finding: format!("{load:.2} over the last minute, on {cores} cores"),
        advice: busy.then(|| "other processes are busy: times will be noisy".to_owned()),
    }
}

fn check_cpu_frequency_governor() -> MachineCheckResult {
    let governor =
        std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").ok();
    let governor = governor.as_deref().map(str::trim);
    MachineCheckResult {
        checked_subject: "governor",
        check_finding: governor
            .unwrap_or("not visible (a virtual machine, or not Linux)")
            .to_owned(),
        advice: governor.filter(|governor| *governor != "performance").map(|_| {
            "the clock follows the load: `cpupower frequency-set -g performance` steadies times"
                .to_owned()
        }),
    }
}

/// Checks that a folder of the package can be written; outside a package the folder must already
/// exist.
fn check_package_folder(
    what: &'static str,
    flag: &str,
    path: &Path,
    store: &RecordFoldersOfPackage,
) -> MachineCheckResult {
    if path.is_dir() || is_in_a_cargo_package(&store.package_root) {
        return check_folder_is_writable(what, path);
    }
    MachineCheckResult {
        checked_subject: what,
        check_finding: "no package here".to_owned(),
        advice: Some(format!("call the program in a package, or name the folder with {flag}")),
    }
}

fn check_folder_is_writable(what: &'static str, path: &Path) -> MachineCheckResult {
    // If the nearest existing parent folder is writable, the folder can be created.
    let existing = path.ancestors().find(|folder| folder.is_dir());
    let writable = existing.is_some_and(|folder| tempfile::tempfile_in(folder).is_ok());
    MachineCheckResult {
        checked_subject: what,
        check_finding: format!(
            "{}{}",
            path.display(),
            if path.is_dir() { "" } else { " (made when needed)" }
        ),
        advice: (!writable).then(|| "cannot be written: results will not be kept".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_permission_for_gpu_counters_comes_from_driver_parameters() {
        let check_of = |line: &str| {
            counter_permission_from_parameters(&format!("ResmanDebugLevel: 1\n{line}\nX: 2\n"))
        };
        assert!(check_of("RmProfilingAdminOnly: 0").advice.is_none());
        let check = check_of("RmProfilingAdminOnly: 1");
        insta::assert_snapshot!(check.check_finding, @"only root may read the GPU's performance counters (RmProfilingAdminOnly)");
        assert!(check.advice.unwrap().contains("NVreg_RestrictProfilingToAdminUsers=0"));
        insta::assert_snapshot!(check_of("Y: 1").check_finding, @"the driver does not say who may read the GPU's performance counters");
    }
}
