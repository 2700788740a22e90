//! `kernelgate doctor`: checks this machine, and names what is missing.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use super::shared::nvrtc::NvrtcMajor;
use super::shared::output::{OutputFormat, print_json};
use crate::benches::package::has_manifest;
use kernelgate::display::{self, terminal};
use kernelgate::exit::ExitReason;
use kernelgate::harness::args;
use kernelgate::record::environment::available_host_memory;
use kernelgate::record::machine::DifferentMachineFact;
use kernelgate::record::text::{
    printable_on_terminal, printable_path, shortened_message, start_of_quotation,
};
use kernelgate::record::{BaselineStore, Environment, MachineFacts, Provenance, file};
use kernelgate_cuda::DeviceOptions;
use kernelgate_cuda::architecture;
use kernelgate_cuda::compiler::cache;
use kernelgate_cuda::driver::device::{self, Device, DeviceFacts};
use kernelgate_cuda::libraries::{cudnn, nccl};
use kernelgate_cuda::library::{self, LoadedLibrary, OLDEST_SUPPORTED_DRIVER, RequiredLibrary};
use kernelgate_cuda::observe::telemetry::CardTelemetry;

#[derive(Debug, clap::Args)]
pub struct DoctorArguments {
    /// Print a folder with NVRTC of this CUDA version, for KERNELGATE_CUDA_LIBS; pip installs it
    /// into the target folder on the first call
    #[arg(long, value_enum, value_name = "VERSION", num_args = 0..=1, default_missing_value = "13")]
    fetch_nvrtc: Option<NvrtcMajor>,
    /// Record the machine: processor, memory, GPUs with driver, clocks, power limit and links
    #[arg(long, value_name = "FILE", conflicts_with = "expect")]
    save: Option<PathBuf>,
    /// Compare the machine with a recorded one; exit with 4 and print the facts that differ
    #[arg(long, value_name = "FILE")]
    expect: Option<PathBuf>,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

#[derive(Debug, Serialize)]
struct MachineCheck {
    what: &'static str,
    finding: String,
    /// Advice on what to do, if the check found a problem.
    advice: Option<String>,
}

pub fn run(arguments: &DoctorArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    if let Some(nvrtc) = arguments.fetch_nvrtc {
        let target = store.work.parent().unwrap_or(Path::new("."));
        println!("{}", nvrtc.fetch(target)?.display());
        return Ok(ExitReason::Fine);
    }
    if let Some(path) = &arguments.save {
        let machine = MachineFacts::from_this_machine();
        file::write(path, &machine)?;
        println!("machine {} in {}", machine.digest(), printable_path(path));
        return Ok(ExitReason::Fine);
    }
    if let Some(path) = &arguments.expect {
        return Ok(expect_machine(&file::read(path)?));
    }
    let mut checks = all_checks(&Environment::cpu(), store);
    for check in &mut checks {
        // The report does not trust names of folders and files.
        check.finding = printable_on_terminal(&check.finding).into_owned();
    }
    match arguments.format {
        OutputFormat::Json => print_json(&checks)?,
        OutputFormat::Text => {
            for check in &checks {
                let line = |text: String, indent| match terminal::terminal_columns() {
                    Some(columns) => {
                        println!("{}", terminal::wrap_terminal_line(&text, indent, columns))
                    }
                    None => println!("{text}"),
                };
                line(format!("{:<10} {}", check.what, check.finding), 11);
                if let Some(advice) = &check.advice {
                    line(format!("{:<10} -> {advice}", ""), 14);
                }
            }
        }
        OutputFormat::Markdown => {
            let mut table = display::table::TextTable::new(&["what", "finding", "advice"]);
            for check in checks {
                table.row(vec![
                    check.what.to_owned(),
                    check.finding,
                    check.advice.unwrap_or_default(),
                ]);
            }
            println!("{}", table.to_markdown());
        }
    }
    Ok(ExitReason::Fine)
}

/// Compares this machine with a recorded machine.
fn expect_machine(expected: &MachineFacts) -> ExitReason {
    let here = MachineFacts::from_this_machine();
    let differing = here.mismatches(expected);
    for DifferentMachineFact { field, expected, found } in &differing {
        let line = format!("refused: {field} is `{found}`, not `{expected}`");
        println!("{}", printable_on_terminal(&line));
    }
    if differing.is_empty() {
        println!("machine {} as expected", here.digest());
        return ExitReason::Fine;
    }
    ExitReason::Refused
}

fn all_checks(environment: &Environment, store: &BaselineStore) -> Vec<MachineCheck> {
    let check = |what, finding, advice: Option<&str>| MachineCheck {
        what,
        finding,
        advice: advice.map(ToOwned::to_owned),
    };
    let simd = environment.simd.join(" ");
    let mut checks = vec![
        check(
            "cpu",
            format!(
                "{}, {} cores, {} threads in use",
                environment.device_name, environment.cores, environment.threads
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
                display::byte_text(available_host_memory()),
                display::byte_text(environment.memory_bytes)
            ),
            None,
        ),
        check_machine_load(environment.cores),
        cpu_governor_check(),
        check(
            "build",
            if environment.optimised { "optimised".to_owned() } else { "not optimised".to_owned() },
            (!environment.optimised).then_some(
                "times of this build mean nothing: use cargo bench, or cargo run --release",
            ),
        ),
        package_folder_check("baselines", "--baselines", &store.baselines, store),
        package_folder_check("runs", "--records", &store.runs, store),
    ];
    // GPUs are listed before other libraries are opened.
    let gpus = check_gpus();
    checks.extend(RequiredLibrary::ALL_LIBRARIES.into_iter().flat_map(check_library));
    checks.extend(library::ignored_path_settings().into_iter().map(|setting| {
        check("setting", setting, Some("name folders from the root on, in variables too"))
    }));
    checks.extend(setting_checks());
    checks.extend(architecture_setting_check());
    checks.extend(compiled_kernel_folder_check());
    checks.extend(gpus);
    checks.push(profiler_check("nsys", "timelines (Nsight Systems)"));
    checks.push(profiler_check("ncu", "counters of a kernel (Nsight Compute)"));
    checks.extend(check_counters());
    checks
}

/// Checks variables that would make a bench stop: variables that stand for flags, and the commit.
fn setting_checks() -> Vec<MachineCheck> {
    let commit = Provenance::detect_for_process(Path::new(".")).err().map(|it| it.to_string());
    let number = std::env::var("KERNELGATE_DEVICE").ok().and_then(|it| it.parse::<usize>().ok());
    let missing = number.zip(device::gpu_count().ok()).filter(|(number, count)| number >= count);
    let device = missing.map(|(number, count)| {
        format!("KERNELGATE_DEVICE={number}: there are {count} GPUs, counted from 0")
    });
    let check = |finding: String| MachineCheck {
        what: "setting",
        finding: shortened_message(finding),
        advice: Some("correct the variable, or unset it: benches end with this error".to_owned()),
    };
    args::wrong_flag_variables().into_iter().chain(commit).chain(device).map(check).collect()
}

/// Checks whether `KERNELGATE_ARCH` is an architecture; the check of the GPU uses it.
fn architecture_setting_check() -> Option<MachineCheck> {
    let named = architecture::requested_architecture()?;
    let advice = "name one as NVIDIA does: sm_80, sm_90a; until then no case runs on a GPU";
    architecture::capability_number(&named).is_none().then(|| MachineCheck {
        what: "setting",
        finding: format!(
            "{}: `{}` is not an architecture",
            architecture::ARCHITECTURE_VARIABLE,
            start_of_quotation(&named)
        ),
        advice: Some(advice.to_owned()),
    })
}

/// Place of a library and whether it fits the driver, or how to get it; and other copies that were
/// found and are not used.
fn check_library(library: RequiredLibrary) -> Vec<MachineCheck> {
    let check = |finding, advice| MachineCheck { what: "library", finding, advice };
    let shown = |loaded: &LoadedLibrary| {
        let version = loaded.version.as_ref().map(|version| format!(" {version}"));
        format!("{}{}", library.name(), version.unwrap_or_default())
    };
    let used = match library::load_once(library) {
        Some(loaded) => {
            check(format!("{}: {}", shown(loaded), loaded.file.display()), library_problem(library))
        }
        None => check(format!("{} is missing", library.name()), Some(library.install_advice())),
    };
    let unusable = library::unusable_library_files(library).into_iter().map(|(file, why)| {
        let (name, file) = (library.name(), file.display());
        let advice = "put a whole one there, or remove it".to_owned();
        check(format!("{name}: found {file}, which cannot be loaded: {why}"), Some(advice))
    });
    let others = library::unused_library_files(library).into_iter().map(|other| {
        check(format!("{} is not used: {}", shown(&other), other.file.display()), None)
    });
    std::iter::once(used).chain(others).chain(unusable).collect()
}

/// The reason why a library that was found cannot be used.
fn library_problem(library: RequiredLibrary) -> Option<String> {
    if library == RequiredLibrary::Nccl {
        return nccl::check_nccl().err().map(|reason| reason.to_string());
    }
    let driver = library::driver_cuda_version()?;
    match library {
        RequiredLibrary::Driver if driver < OLDEST_SUPPORTED_DRIVER => Some(format!(
            "CUDA {OLDEST_SUPPORTED_DRIVER} is needed: update the driver; until then no case runs on a GPU"
        )),
        RequiredLibrary::Nvrtc => library::choose_nvrtc().filter(|nvrtc| !nvrtc.fits).map(|_| {
            format!(
                "the driver (CUDA {driver}) does not take what it generates, so no case runs on a \
                 GPU; `kernelgate resources` works: {}",
                device::older_nvrtc_hint(driver)
            )
        }),
        RequiredLibrary::Cudnn => cudnn::api::cudnn_version().err().map(|refusal| refusal.0),
        _ => None,
    }
}

/// Folder of the compiled kernels, and whether it is used.
fn compiled_kernel_folder_check() -> Option<MachineCheck> {
    let (folder, used) = cache::cache_place()?;
    let advice = "others can write to it, or it is not yours: kernels are compiled in every \
                  process; remove it, or name another folder in KERNELGATE_CACHE";
    Some(MachineCheck {
        what: "kernels",
        finding: folder.display().to_string(),
        advice: (!used).then(|| advice.to_owned()),
    })
}

/// The GPUs, or the reason why no GPU was found.
fn check_gpus() -> Vec<MachineCheck> {
    let check = |finding, advice| MachineCheck { what: "gpu", finding, advice };
    let count = match device::gpu_count() {
        Ok(count) => count,
        Err(error) => {
            return vec![check(format!("none: {error}"), Some("cases run on the CPU".to_owned()))];
        }
    };
    let timeout = Duration::from_secs(1);
    let options = DeviceOptions { timeout, ..DeviceOptions::from_environment() };
    (0..count)
        .flat_map(|ordinal| match Device::open(ordinal, &options) {
            Ok(device) => {
                let facts = device.facts();
                let memory = device.free_and_total().map_or_else(
                    |error| error.to_string(),
                    |(free, total)| {
                        format!(
                            "{} free of {}",
                            display::byte_text(free),
                            display::byte_text(total)
                        )
                    },
                );
                let card = check(
                    format!(
                        "{ordinal}: {}, {}{}, CUDA {}.{}, {} multiprocessors up to {} MHz, L2 {}, \
                         {memory}, {}",
                        facts.name,
                        facts.arch,
                        if facts.code == facts.arch { "" } else { " by PTX" },
                        facts.driver_cuda / 1000,
                        facts.driver_cuda % 1000 / 10,
                        facts.multiprocessors,
                        facts.max_clock_mhz,
                        display::byte_text(facts.l2_bytes),
                        facts.uuid
                    ),
                    rows_without_compiler(&facts.arch),
                );
                vec![card, check_clocks(facts)]
            }
            Err(error) => {
                vec![check(format!("{ordinal}: {error}"), Some("cases run on the CPU".to_owned()))]
            }
        })
        .collect()
}

/// Checks whether the clocks of a card could be locked, and how that would change times. Nothing is
/// changed.
fn check_clocks(facts: &DeviceFacts) -> MachineCheck {
    let check = |finding, advice: Option<&str>| MachineCheck {
        what: "clocks",
        finding,
        advice: advice.map(str::to_owned),
    };
    let highest = format!("{}: up to {} MHz", facts.ordinal, facts.max_clock_mhz);
    let Some(telemetry) = CardTelemetry::open_card(&facts.uuid) else {
        let finding = format!("{highest}; NVML is missing, or does not know this device");
        return check(finding, Some("times have no power state (n/a)"));
    };
    let watts = |milliwatts: u32| f64::from(milliwatts) / 1e3;
    let power = telemetry.power_limit_range_mw().map_or(String::new(), |(default, limit)| {
        format!(", power limit {:.0} W (default {:.0} W)", watts(limit), watts(default))
    });
    let permission = match telemetry.clocks_need_root() {
        None => "this device does not let anybody lock them",
        Some(true) => "root may lock them",
        Some(false) => "this user may set them",
    };
    let advice = telemetry.clocks_need_root().map(|_| {
        "locked below the power cap (nvidia-smi --lock-gpu-clocks), all cases have one clock: times \
         are longer, and repeat better at the cap; kernelgate never changes clocks"
    });
    check(format!("{highest}{power}; {permission}"), advice)
}

/// Notes that some rows do not run on an architecture; every row runs on at least one card.
fn rows_without_compiler(arch: &str) -> Option<String> {
    (arch != "sm_90a").then(|| {
        format!(
            "rows that need another architecture or more shared memory are skipped: `kernelgate \
             resources --arch {arch}` lists their kernels"
        )
    })
}

/// A check for a profiler of NVIDIA's, which is optional.
fn profiler_check(name: &'static str, what: &str) -> MachineCheck {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&folders)
        .map(|folder| folder.join(format!("{name}{}", std::env::consts::EXE_SUFFIX)))
        .find(|path| path.is_file());
    MachineCheck {
        what: "tool",
        finding: match &found {
            Some(path) => format!("{name}, {what}: {}", path.display()),
            None => format!("{name}, {what}: not on PATH"),
        },
        advice: found.is_none().then(|| {
            format!("optional: the CUDA toolkit or https://developer.nvidia.com has {name}")
        }),
    }
}

/// Checks whether the driver lets users other than root read the GPU's counters; `None` without the
/// driver.
fn check_counters() -> Option<MachineCheck> {
    let parameters = std::fs::read_to_string("/proc/driver/nvidia/params").ok()?;
    Some(counters_check(&parameters))
}

fn counters_check(parameters: &str) -> MachineCheck {
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
    MachineCheck {
        what: "counters",
        finding: finding.to_owned(),
        advice: advice.map(str::to_owned),
    }
}

/// Checks for other load on the machine, the most frequent cause of false alarms.
fn check_machine_load(cores: usize) -> MachineCheck {
    let Ok(load) = sysinfo::System::load_average().map(|load| load.one) else {
        return MachineCheck { what: "load", finding: "not visible".to_owned(), advice: None };
    };
    let busy = load > 0.3 * cores as f64;
    MachineCheck {
        what: "load",
        finding: format!("{load:.2} over the last minute, on {cores} cores"),
        advice: busy.then(|| "other processes are busy: times will be noisy".to_owned()),
    }
}

fn cpu_governor_check() -> MachineCheck {
    let governor =
        std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").ok();
    let governor = governor.as_deref().map(str::trim);
    MachineCheck {
        what: "governor",
        finding: governor.unwrap_or("not visible (a virtual machine, or not Linux)").to_owned(),
        advice: governor.filter(|governor| *governor != "performance").map(|_| {
            "the clock follows the load: `cpupower frequency-set -g performance` steadies times"
                .to_owned()
        }),
    }
}

/// A folder of the package; outside of one it has to exist already.
fn package_folder_check(
    what: &'static str,
    flag: &str,
    path: &Path,
    store: &BaselineStore,
) -> MachineCheck {
    if path.is_dir() || has_manifest(&store.root) {
        return check_folder(what, path);
    }
    MachineCheck {
        what,
        finding: "no package here".to_owned(),
        advice: Some(format!("call the program in a package, or name the folder with {flag}")),
    }
}

fn check_folder(what: &'static str, path: &Path) -> MachineCheck {
    // The nearest existing parent folder decides whether the path can be created.
    let existing = path.ancestors().find(|folder| folder.is_dir());
    let writable = existing.is_some_and(|folder| tempfile::tempfile_in(folder).is_ok());
    MachineCheck {
        what,
        finding: format!(
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
    fn the_permission_for_gpu_counters_is_read_from_the_driver() {
        let check_of = |line: &str| counters_check(&format!("ResmanDebugLevel: 1\n{line}\nX: 2\n"));
        assert!(check_of("RmProfilingAdminOnly: 0").advice.is_none());
        let check = check_of("RmProfilingAdminOnly: 1");
        insta::assert_snapshot!(check.finding, @"only root may read the GPU's performance counters (RmProfilingAdminOnly)");
        assert!(check.advice.unwrap().contains("NVreg_RestrictProfilingToAdminUsers=0"));
        insta::assert_snapshot!(check_of("Y: 1").finding, @"the driver does not say who may read the GPU's performance counters");
    }
}
