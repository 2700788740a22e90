//! Choice of NVIDIA's libraries, tested with stand-ins for them: two versions on the loader's path,
//! drivers that are older or newer, folders that the user names, relative paths.

#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::Command;

use regex::Regex;

use crate::package::outcome::redact_varying_parts;
use crate::package::{ProcessOutcome, fixture_path};

/// A folder of stand-ins for NVIDIA's libraries, with a subfolder for each CUDA version and for the
/// driver.
struct StubLibraries {
    folder: tempfile::TempDir,
}

impl StubLibraries {
    /// The folder's path without links.
    fn folder_path_without_links(&self) -> String {
        self.folder.path().canonicalize().unwrap().display().to_string()
    }

    /// Makes stand-ins for the CUDA libraries of versions 12.4, 12.8 and 13.0 and for a driver,
    /// each in a folder of its own.
    fn new() -> Self {
        let stubs = Self { folder: tempfile::tempdir().unwrap() };
        for (cuda, nvrtc, newest, major) in
            [("12.4", 1204, 90, 12), ("12.8", 1208, 120, 12), ("13.0", 1300, 121, 13)]
        {
            let defines = [format!("NVRTC={nvrtc}"), format!("NEWEST={newest}")];
            stubs.compile_stub_library(cuda, &format!("libnvrtc.so.{major}"), &defines);
            let version = [format!("CUBLASLT={}", nvrtc * 100)];
            stubs.compile_stub_library(cuda, &format!("libcublasLt.so.{major}"), &version);
        }
        stubs.compile_stub_library("13.0", "libcudnn.so.9", &["CUDNN=13000".to_owned()]);
        stubs.compile_stub_library("driver", "libcuda.so.1", &["DRIVER".to_owned()]);
        stubs
    }

    fn path_in_folder(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn compile_stub_library(&self, folder: &str, file: &str, defines: &[String]) {
        std::fs::create_dir_all(self.path_in_folder(folder)).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixture/cuda_stubs.c");
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let mut command = Command::new(compiler);
        command.args(["-shared", "-fPIC", "-w", &format!("-Wl,-soname,{file}"), "-o"]);
        command.arg(self.path_in_folder(folder).join(file)).arg(source);
        command.args(defines.iter().map(|define| format!("-D{define}")));
        assert!(command.status().unwrap().success());
    }

    /// Runs `kernelgate doctor` with these environment variables and a library search path of these
    /// folders.
    fn run_doctor(&self, on_loader_path: &[&str], variables: &[(&str, &str)]) -> DoctorChecks {
        let path =
            std::env::join_paths(on_loader_path.iter().map(|name| self.path_in_folder(name)))
                .unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kernelgate"));
        command.args(["doctor", "--format", "json"]).current_dir(self.folder.path());
        for variable in ["KERNELGATE_CUDA_LIBS", "KERNELGATE_ARCH", "CUDA_HOME", "CUDA_PATH"] {
            command.env_remove(variable);
        }
        // Without a Python environment, kernelgate finds no NVIDIA libraries in Python wheels.
        command.env("VIRTUAL_ENV", self.path_in_folder("nothing")).env("LD_LIBRARY_PATH", path);
        command.envs(variables.iter().copied());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        DoctorChecks(serde_json::from_slice(&output.stdout).unwrap())
    }

    /// The paths of these folders joined as in a PATH variable.
    fn joined_folder_paths(&self, names: &[&str]) -> String {
        let path =
            std::env::join_paths(names.iter().map(|name| self.path_in_folder(name))).unwrap();
        path.into_string().unwrap()
    }
}

/// The checks that `kernelgate doctor` printed as JSON.
struct DoctorChecks(Vec<serde_json::Value>);

impl DoctorChecks {
    /// Findings and advice of the checks of one kind whose finding begins with a text.
    fn findings_and_advice(&self, what: &str, begins: &str) -> Vec<String> {
        let text = |check: &serde_json::Value, field: &str| {
            check[field].as_str().unwrap_or_default().to_owned()
        };
        let found = self.0.iter().filter(|check| {
            text(check, "what") == what && text(check, "finding").starts_with(begins)
        });
        found
            .map(|check| format!("{} | {}", text(check, "finding"), text(check, "advice")))
            .collect()
    }

    /// Whether doctor reports that NVRTC and cuBLASLt come from the folder of this CUDA version,
    /// and from no other folder.
    fn uses_only_libraries_of(&self, stubs: &StubLibraries, cuda: &str) -> bool {
        ["NVRTC (libnvrtc) ", "cuBLASLt (libcublasLt) "].into_iter().all(|name| {
            let folder = stubs.path_in_folder(cuda).canonicalize().unwrap().display().to_string();
            let lines = self.findings_and_advice("library", name);
            let used: Vec<_> = lines.iter().filter(|line| !line.contains("not used")).collect();
            used.len() == 1 && used[0].contains(&format!(": {folder}/"))
        })
    }
}

#[test]
fn the_newest_cuda_that_the_driver_supports_is_used_alone() {
    let stubs = StubLibraries::new();
    let all = ["12.8", "12.4", "13.0"];
    // Without a driver, kernelgate uses the library of the newest CUDA version and lists the
    // others.
    let checks = stubs.run_doctor(&all, &[]);
    assert!(checks.uses_only_libraries_of(&stubs, "13.0"), "{:?}", checks.0);
    let others = checks.findings_and_advice("library", "NVRTC (libnvrtc) 12.8 is not used");
    assert_eq!(others.len(), 1, "{:?}", checks.0);
    // With a driver, kernelgate uses the newest library of the driver's CUDA major version or of an
    // older one.
    for (driver, cuda) in
        [("13000", "13.0"), ("14010", "13.0"), ("12040", "12.8"), ("12090", "12.8")]
    {
        let checks =
            stubs.run_doctor(&[&all[..], &["driver"]].concat(), &[("STUB_DRIVER", driver)]);
        assert!(checks.uses_only_libraries_of(&stubs, cuda), "driver {driver}: {:?}", checks.0);
    }
    // Folders in `KERNELGATE_CUDA_LIBS` come before the loader's path; of these folders, the one
    // with the newest version is used.
    for (named, cuda) in [(&["12.4"][..], "12.4"), (&["12.4", "12.8"], "12.8")] {
        let variables = [("KERNELGATE_CUDA_LIBS", &*stubs.joined_folder_paths(named))];
        let checks = stubs.run_doctor(&["13.0"], &variables);
        assert!(checks.uses_only_libraries_of(&stubs, cuda), "{named:?}: {:?}", checks.0);
    }
    // Libraries of a CUDA toolkit are used if the loader's path has no version that fits.
    std::fs::create_dir(stubs.path_in_folder("toolkit")).unwrap();
    std::os::unix::fs::symlink(stubs.path_in_folder("12.4"), stubs.path_in_folder("toolkit/lib64"))
        .unwrap();
    let variables =
        [("STUB_DRIVER", "12040"), ("CUDA_HOME", &*stubs.joined_folder_paths(&["toolkit"]))];
    let checks = stubs.run_doctor(&["13.0", "driver"], &variables);
    assert!(checks.uses_only_libraries_of(&stubs, "12.4"), "{:?}", checks.0);
    // The file name of cuDNN's library does not contain the CUDA version.
    let cudnn = checks.findings_and_advice("library", "cuDNN");
    insta::assert_snapshot!(cudnn[0].replace(&stubs.folder_path_without_links(), "FOLDER"), @"cuDNN (libcudnn) 9.14.0: FOLDER/13.0/libcudnn.so.9 | needs a cuDNN for CUDA 12, FOLDER/13.0/libcudnn.so.9 is for 13");
}

#[test]
fn a_library_that_does_not_fit_is_named_with_advice() {
    let stubs = StubLibraries::new();
    let gpu = |on_path: &[&str], variables: &[(&str, &str)]| {
        let variables = [&[("STUB_CAPABILITY", "90")], variables].concat();
        let checks = stubs.run_doctor(&[on_path, &["driver"]].concat(), &variables);
        checks.findings_and_advice("gpu", "").concat()
    };
    // For a GPU architecture older than the GPU, NVRTC generates PTX, which the driver only
    // compiles if NVRTC is not newer than the driver.
    let as_ptx = [("STUB_DRIVER", "12040"), ("KERNELGATE_ARCH", "sm_86")];
    let mut findings = String::new();
    for (cuda, variables) in [
        ("13.0", &[("STUB_DRIVER", "12040")][..]),
        ("13.0", &[("STUB_DRIVER", "12020")]),
        ("12.4", &[("STUB_CAPABILITY", "120")]),
        ("13.0", &[("STUB_CAPABILITY", "75")]),
        ("13.0", &[("KERNELGATE_ARCH", "sm_100a")]),
        ("12.8", &as_ptx),
    ] {
        findings.push_str(&format!("CUDA {cuda}, {variables:?}:\n  {}\n", gpu(&[cuda], variables)));
    }
    // The dynamic loader finds the toolkit's stub of the driver library before the real driver.
    stubs.compile_stub_library("stubs", "libcuda.so", &["DRIVER", "TO_LINK"].map(str::to_owned));
    findings.push_str(&format!("a stub before it:\n  {}\n", gpu(&["13.0", "stubs"], &[])));
    insta::assert_snapshot!(
        "libraries",
        findings.replace(&stubs.folder_path_without_links(), "FOLDER")
    );
}

#[test]
fn an_nccl_that_is_missing_old_or_not_whole_is_named() {
    let stubs = StubLibraries::new();
    let name = "NCCL (libnccl)";
    let missing = stubs.run_doctor(&["13.0"], &[]).findings_and_advice("library", name);
    insta::assert_debug_snapshot!(missing, @r#"
    [
        "NCCL (libnccl) is missing | pip install nvidia-nccl-cu13 (only rows that call it need it)",
    ]
    "#);
    let unusable = [("old", 21_003), ("parts", 22_809)].map(|(folder, number)| {
        stubs.compile_stub_library(folder, "libnccl.so.2", &[format!("NCCL={number}")]);
        stubs.run_doctor(&["13.0", folder], &[]).findings_and_advice("library", name).join("\n")
    });
    insta::assert_snapshot!(redact_varying_parts(&unusable.join("\n")), @r"
    NCCL (libnccl) 2.10.3: FOLDER/old/libnccl.so.2 | needs NCCL 2.18 or later, here is 2.10
    NCCL (libnccl) 2.28.9: FOLDER/parts/libnccl.so.2 | this NCCL has no ncclGetErrorString
    ");
}

/// The dynamic loader would map the missing bytes of a truncated library file, and the process
/// would end by a signal.
#[test]
fn a_file_that_cannot_be_loaded_is_named_with_the_reason() {
    let stubs = StubLibraries::new();
    let name = "libnvrtc.so.13";
    let file = stubs.path_in_folder("odd").join(name);
    std::fs::create_dir(stubs.path_in_folder("odd")).unwrap();
    let named = [("KERNELGATE_CUDA_LIBS", &*stubs.joined_folder_paths(&["odd"]))];
    let found = format!("NVRTC (libnvrtc): found {}, which cannot be loaded", file.display());
    let reason = |on_loader_path: &[&str], variables: &[(&str, &str)]| {
        let checks = stubs.run_doctor(on_loader_path, variables);
        let found = checks.findings_and_advice("library", &found);
        let [line] = &found[..] else { panic!("{:?}", checks.0) };
        (redact_varying_parts(line), checks)
    };
    let mut reasons = String::new();
    let whole = std::fs::read(stubs.path_in_folder("13.0").join(name)).unwrap();
    std::fs::write(&file, &whole[..5000]).unwrap();
    let (cut, checks) = reason(&[], &named);
    assert_eq!(checks.findings_and_advice("library", "NVRTC (libnvrtc) is missing").len(), 1);
    reasons += &format!("{}\n", Regex::new("least \\d+").unwrap().replace(&cut, "least SIZE"));
    // `KERNELGATE_CUDA_LIBS` names the damaged library, and the intact one on the loader's path is
    // used.
    let (same, checks) = reason(&["13.0"], &named);
    assert!(same == cut && checks.uses_only_libraries_of(&stubs, "13.0"), "{same}");
    // The dynamic loader finds the damaged library without the variable `KERNELGATE_CUDA_LIBS`.
    assert_eq!(reason(&["odd"], &[]).0, cut);
    std::fs::write(&file, "garbage").unwrap();
    // This reason for an unusable library is a text of the dynamic loader.
    reason(&[], &named);
    std::fs::copy(stubs.path_in_folder("13.0/libcublasLt.so.13"), &file).unwrap();
    reasons += &format!("{}\n", reason(&[], &named).0);
    std::fs::remove_file(&file).unwrap();
    assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
    reasons += &format!("{}\n", reason(&[], &named).0);
    std::fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink("nothing", &file).unwrap();
    reasons += &format!("{}\n", reason(&[], &named).0);
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    reasons += &format!("{}\n", reason(&[], &named).0);
    insta::assert_snapshot!(reasons, @r"
    NVRTC (libnvrtc): found FOLDER/odd/libnvrtc.so.13, which cannot be loaded: it is cut: it ends after 5000 bytes of at least SIZE | put a whole one there, or remove it
    NVRTC (libnvrtc): found FOLDER/odd/libnvrtc.so.13, which cannot be loaded: it is another library, without nvrtcVersion | put a whole one there, or remove it
    NVRTC (libnvrtc): found FOLDER/odd/libnvrtc.so.13, which cannot be loaded: it is no file but a device, a pipe or a socket | put a whole one there, or remove it
    NVRTC (libnvrtc): found FOLDER/odd/libnvrtc.so.13, which cannot be loaded: it is a link that leads nowhere | put a whole one there, or remove it
    NVRTC (libnvrtc): found FOLDER/odd/libnvrtc.so.13, which cannot be loaded: it is a folder | put a whole one there, or remove it
    ");
    let escape = [("KERNELGATE_CUDA_LIBS", "/no\u{1b}[2Jwhere")];
    let lines =
        stubs.run_doctor(&[], &escape).findings_and_advice("setting", "KERNELGATE_CUDA_LIBS");
    insta::assert_debug_snapshot!(lines, @r#"
    [
        "KERNELGATE_CUDA_LIBS: the folder /nowhere does not exist | name folders from the root on, in variables too",
    ]
    "#);
}

#[test]
fn a_verb_that_needs_a_gpu_fails_before_it_builds_and_a_wrong_architecture_is_named() {
    let stubs = StubLibraries::new();
    let lines = stubs
        .run_doctor(&["13.0"], &[("KERNELGATE_ARCH", "x")])
        .findings_and_advice("setting", "KERNELGATE_ARCH");
    insta::assert_debug_snapshot!(lines, @r#"
    [
        "KERNELGATE_ARCH: `x` is not an architecture | name one as NVIDIA does: sm_80, sm_90a; until then no case runs on a GPU",
    ]
    "#);
    let wrong = [
        ("KERNELGATE_BACKEND", "gpu"),
        ("KERNELGATE_TIMEOUT", "soon"),
        ("KERNELGATE_DEVICE", "-1"),
        ("KERNELGATE_SHARD", "5/4"),
        ("KERNELGATE_AXIS", "n"),
        ("KERNELGATE_COMMIT", "main"),
    ];
    let settings = stubs.run_doctor(&["13.0"], &wrong).findings_and_advice("setting", "");
    insta::assert_snapshot!(settings.join("\n"), @r"
    invalid value 'n' in the variable KERNELGATE_AXIS: `n` is not of the form axis=value[,value] | correct the variable, or unset it: benches end with this error
    invalid value 'gpu' in the variable KERNELGATE_BACKEND [possible values: auto, cpu, cuda] | correct the variable, or unset it: benches end with this error
    invalid value '-1' in the variable KERNELGATE_DEVICE: invalid digit found in string | correct the variable, or unset it: benches end with this error
    invalid value 'soon' in the variable KERNELGATE_TIMEOUT: invalid digit found in string | correct the variable, or unset it: benches end with this error
    invalid value '5/4' in the variable KERNELGATE_SHARD: `5/4`: a shard is 1/4 to 4/4; shards are counted from 1 | correct the variable, or unset it: benches end with this error
    KERNELGATE_COMMIT=`main` is no commit: 7 to 64 hexadecimal digits, and +changes where tracked files differed from it | correct the variable, or unset it: benches end with this error
    ");
    let right = [
        ("KERNELGATE_BACKEND", "cpu"),
        ("KERNELGATE_TIMEOUT", "9"),
        ("KERNELGATE_DEVICE", ""),
        ("KERNELGATE_SHARD", "1/4"),
        ("KERNELGATE_AXIS", "n=1,2 b=3"),
        ("KERNELGATE_COMMIT", "1a2b3c4d+changes"),
    ];
    assert_eq!(
        stubs.run_doctor(&["13.0"], &right).findings_and_advice("setting", ""),
        Vec::<String>::new()
    );
    // If the GPU cannot be used, a bench fails and does not fall back to the CPU.
    let faults = fixture_path().with_file_name("faults");
    let bench = Command::new(faults)
        .args(["--bench", "--quick"])
        .env("KERNELGATE_ARCH", "sm_75")
        .current_dir(stubs.folder.path())
        .output()
        .unwrap();
    insta::assert_snapshot!(ProcessOutcome::from(bench).error_message(2), @"error: no GPU to run on: KERNELGATE_ARCH: kernels are compiled for sm_80 or later, not for sm_75");
    let mut timing = Command::new(env!("CARGO_BIN_EXE_kernelgate"));
    timing.args(["timing", "--part", "cases"]).current_dir(stubs.folder.path());
    // The test's stand-in NVIDIA driver has no GPU, and the current folder has no Cargo package.
    let timing = ProcessOutcome::from(
        timing.env("LD_LIBRARY_PATH", stubs.path_in_folder("driver")).output().unwrap(),
    );
    insta::assert_snapshot!(timing.refusal_message(2), @"error: timing needs a GPU: the NVIDIA driver finds no GPU");
}

#[test]
fn relative_folders_are_not_searched() {
    let stubs = StubLibraries::new();
    std::fs::create_dir(stubs.path_in_folder("toolkit")).unwrap();
    std::os::unix::fs::symlink(stubs.path_in_folder("13.0"), stubs.path_in_folder("toolkit/lib64"))
        .unwrap();
    std::os::unix::fs::symlink(stubs.path_in_folder("13.0"), stubs.path_in_folder("lib64"))
        .unwrap();
    for variables in [
        [("CUDA_HOME", ""), ("CUDA_PATH", "")],
        [("CUDA_HOME", "toolkit"), ("KERNELGATE_CUDA_LIBS", "13.0")],
        [("CUDA_PATH", "."), ("KERNELGATE_CUDA_LIBS", ":.")],
    ] {
        let checks = stubs.run_doctor(&[], &variables);
        let found = checks.findings_and_advice("library", "NVRTC (libnvrtc) is missing");
        assert_eq!(found.len(), 1, "{variables:?}: {:?}", checks.0);
        let set = variables.iter().filter(|(_, value)| !value.is_empty()).count();
        assert_eq!(
            checks.findings_and_advice("setting", "").len(),
            set,
            "{variables:?}: {:?}",
            checks.0
        );
    }
}
