//! Which of NVIDIA's libraries are used, with stand-ins for them: two versions on the loader's
//! path, drivers that are older or newer, folders that the user names, what is relative.

#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::package::fixture_path;

/// Folders with stand-ins, by what is in them.
struct Stubs {
    folder: tempfile::TempDir,
}

impl Stubs {
    /// A CUDA 12.4, a 12.8, a 13.0, and a driver, each in a folder of its own.
    fn new() -> Self {
        let stubs = Self { folder: tempfile::tempdir().unwrap() };
        for (cuda, nvrtc, newest, major) in
            [("12.4", 1204, 90, 12), ("12.8", 1208, 120, 12), ("13.0", 1300, 121, 13)]
        {
            let defines = [format!("NVRTC={nvrtc}"), format!("NEWEST={newest}")];
            stubs.build(cuda, &format!("libnvrtc.so.{major}"), &defines);
            let version = [format!("CUBLASLT={}", nvrtc * 100)];
            stubs.build(cuda, &format!("libcublasLt.so.{major}"), &version);
        }
        stubs.build("13.0", "libcudnn.so.9", &["CUDNN=13000".to_owned()]);
        stubs.build("driver", "libcuda.so.1", &["DRIVER".to_owned()]);
        stubs
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn build(&self, folder: &str, file: &str, defines: &[String]) {
        std::fs::create_dir_all(self.at(folder)).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixture/cuda_stubs.c");
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let mut command = Command::new(compiler);
        command.args(["-shared", "-fPIC", "-w", &format!("-Wl,-soname,{file}"), "-o"]);
        command.arg(self.at(folder).join(file)).arg(source);
        command.args(defines.iter().map(|define| format!("-D{define}")));
        assert!(command.status().unwrap().success());
    }

    /// `kernelgate doctor` in a shell whose loader looks in those folders, with more variables.
    fn doctor(&self, on_loader_path: &[&str], variables: &[(&str, &str)]) -> Told {
        let path = std::env::join_paths(on_loader_path.iter().map(|name| self.at(name))).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kernelgate"));
        command.args(["doctor", "--format", "json"]).current_dir(self.folder.path());
        for variable in ["KERNELGATE_CUDA_LIBS", "KERNELGATE_ARCH", "CUDA_HOME", "CUDA_PATH"] {
            command.env_remove(variable);
        }
        // No Python, hence no wheels.
        command.env("VIRTUAL_ENV", self.at("nothing")).env("LD_LIBRARY_PATH", path);
        command.envs(variables.iter().copied());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Told(serde_json::from_slice(&output.stdout).unwrap())
    }

    /// A list of folders as a variable holds it.
    fn list(&self, names: &[&str]) -> String {
        let path = std::env::join_paths(names.iter().map(|name| self.at(name))).unwrap();
        path.into_string().unwrap()
    }
}

/// What doctor says.
struct Told(Vec<serde_json::Value>);

impl Told {
    /// Findings and advice of the checks of that kind that begin so.
    fn of(&self, what: &str, begins: &str) -> Vec<String> {
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

    /// Whether the NVRTC and the cuBLASLt of that folder are used, and nothing of another.
    fn uses(&self, stubs: &Stubs, cuda: &str) -> bool {
        ["NVRTC (libnvrtc) ", "cuBLASLt (libcublasLt) "].into_iter().all(|name| {
            let folder = stubs.at(cuda).canonicalize().unwrap().display().to_string();
            let told = self.of("library", name);
            let used: Vec<_> = told.iter().filter(|line| !line.contains("is not used")).collect();
            used.len() == 1 && used[0].contains(&format!(": {folder}/"))
        })
    }
}

#[test]
fn the_newest_cuda_that_the_driver_takes_is_used_and_nothing_of_another() {
    let stubs = Stubs::new();
    let all = ["12.8", "12.4", "13.0"];
    // Without a driver the newest; the other is named.
    let told = stubs.doctor(&all, &[]);
    assert!(told.uses(&stubs, "13.0"), "{:?}", told.0);
    let others = told.of("library", "NVRTC (libnvrtc) 12.8 is not used");
    assert_eq!(others.len(), 1, "{:?}", told.0);
    // One of its major version or an older one.
    for (driver, cuda) in
        [("13000", "13.0"), ("14010", "13.0"), ("12040", "12.8"), ("12090", "12.8")]
    {
        let told = stubs.doctor(&[&all[..], &["driver"]].concat(), &[("STUB_DRIVER", driver)]);
        assert!(told.uses(&stubs, cuda), "driver {driver}: {:?}", told.0);
    }
    // What the user names comes before the loader's path; the newest of what is named.
    for (named, cuda) in [(&["12.4"][..], "12.4"), (&["12.4", "12.8"], "12.8")] {
        let variables = [("KERNELGATE_CUDA_LIBS", &*stubs.list(named))];
        let told = stubs.doctor(&["13.0"], &variables);
        assert!(told.uses(&stubs, cuda), "{named:?}: {:?}", told.0);
    }
    // A toolkit where the loader's path has none that fits.
    std::fs::create_dir(stubs.at("toolkit")).unwrap();
    std::os::unix::fs::symlink(stubs.at("12.4"), stubs.at("toolkit/lib64")).unwrap();
    let variables = [("STUB_DRIVER", "12040"), ("CUDA_HOME", &*stubs.list(&["toolkit"]))];
    let told = stubs.doctor(&["13.0", "driver"], &variables);
    assert!(told.uses(&stubs, "12.4"), "{:?}", told.0);
    // cuDNN's name does not say which CUDA it is for.
    let cudnn = told.of("library", "cuDNN");
    assert!(cudnn[0].contains("needs a cuDNN for CUDA 12") && cudnn[0].contains("is for 13"));
}

#[test]
fn what_does_not_fit_is_told_with_the_way_out() {
    let stubs = Stubs::new();
    let gpu = |on_path: &[&str], variables: &[(&str, &str)]| {
        let variables = [&[("STUB_CAPABILITY", "90")], variables].concat();
        let told = stubs.doctor(&[on_path, &["driver"]].concat(), &variables);
        told.of("gpu", "").concat()
    };
    let told = gpu(&["13.0"], &[("STUB_DRIVER", "12040")]);
    assert!(
        told.contains("supports CUDA 12.4 and does not take what NVRTC 13.0 generates")
            && told.contains("pip install 'nvidia-cuda-nvrtc-cu12==12.*'"),
        "{told}"
    );
    let told = gpu(&["13.0"], &[("STUB_DRIVER", "12020")]);
    assert!(told.contains("supports CUDA 12.2, 12.4 is needed: update the driver"), "{told}");
    let told = gpu(&["12.4"], &[("STUB_CAPABILITY", "120")]);
    assert!(told.contains("NVRTC 12.4 does not generate code for sm_120a"), "{told}");
    let told = gpu(&["13.0"], &[("STUB_CAPABILITY", "75")]);
    assert!(told.contains("the GPU is sm_75, sm_80 (Ampere) or later is needed"), "{told}");
    let told = gpu(&["13.0"], &[("KERNELGATE_ARCH", "sm_100a")]);
    assert!(told.contains("this GPU is sm_90a and runs no code of sm_100a"), "{told}");
    // As PTX an older card's code needs a compiler that is no newer than the driver.
    let as_ptx = [("STUB_DRIVER", "12040"), ("KERNELGATE_ARCH", "sm_86")];
    let told = gpu(&["12.8"], &as_ptx);
    assert!(
        told.contains("does not take what NVRTC 12.8 generates")
            && told.contains("nvidia-cuda-nvrtc-cu12==12.4.*"),
        "{told}"
    );
    // A stub of the toolkit before the driver.
    stubs.build("stubs", "libcuda.so", &["DRIVER", "TO_LINK"].map(str::to_owned));
    let told = gpu(&["13.0", "stubs"], &[]);
    assert!(told.contains("finds the stub") && told.contains("stubs/libcuda.so"), "{told}");
}

/// The loader would map what is not there, and the process would end by a signal.
#[test]
fn a_file_that_cannot_be_loaded_is_named_with_the_reason() {
    let stubs = Stubs::new();
    let name = "libnvrtc.so.13";
    let file = stubs.at("odd").join(name);
    std::fs::create_dir(stubs.at("odd")).unwrap();
    let named = [("KERNELGATE_CUDA_LIBS", &*stubs.list(&["odd"]))];
    let found = format!("NVRTC (libnvrtc): found {}, which cannot be loaded", file.display());
    let told = |on_loader_path: &[&str], variables: &[(&str, &str)], why: &str| {
        let told = stubs.doctor(on_loader_path, variables);
        let found = told.of("library", &found);
        assert!(found.len() == 1 && found[0].contains(why), "{why}: {:?}", told.0);
        told
    };
    let whole = std::fs::read(stubs.at("13.0").join(name)).unwrap();
    std::fs::write(&file, &whole[..5000]).unwrap();
    let cut = "cannot be loaded: it is cut: it ends after 5000 bytes of at least ";
    let missing = told(&[], &named, cut).of("library", "NVRTC (libnvrtc) is missing");
    assert_eq!(missing.len(), 1);
    // Another is used.
    assert!(told(&["13.0"], &named, cut).uses(&stubs, "13.0"));
    // Where the loader finds it by itself.
    told(&["odd"], &[], cut);
    std::fs::write(&file, "garbage").unwrap();
    told(&[], &named, "loaded: ");
    std::fs::copy(stubs.at("13.0/libcublasLt.so.13"), &file).unwrap();
    told(&[], &named, "it is another library, without nvrtcVersion");
    std::fs::remove_file(&file).unwrap();
    assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
    told(&[], &named, "it is no file but a device, a pipe or a socket");
    std::fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink("nothing", &file).unwrap();
    told(&[], &named, "it is a link that leads nowhere");
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    told(&[], &named, "it is a folder");
    let escape = [("KERNELGATE_CUDA_LIBS", "/no\u{1b}[2Jwhere")];
    let told = stubs.doctor(&[], &escape).of("setting", "KERNELGATE_CUDA_LIBS");
    assert!(told[0].contains("the folder /nowhere does not exist"), "{told:?}");
}

#[test]
fn what_needs_a_gpu_says_so_before_it_builds_and_a_wrong_architecture_is_named_without_one() {
    let stubs = Stubs::new();
    let told =
        stubs.doctor(&["13.0"], &[("KERNELGATE_ARCH", "x")]).of("setting", "KERNELGATE_ARCH");
    assert!(told.len() == 1 && told[0].contains("`x` is no architecture"), "{told:?}");
    let wrong = [
        ("KERNELGATE_BACKEND", "gpu"),
        ("KERNELGATE_TIMEOUT", "soon"),
        ("KERNELGATE_DEVICE", "-1"),
        ("KERNELGATE_SHARD", "5/4"),
        ("KERNELGATE_AXIS", "n"),
        ("KERNELGATE_COMMIT", "main"),
    ];
    let settings = stubs.doctor(&["13.0"], &wrong).of("setting", "");
    assert_eq!(settings.len(), wrong.len(), "{settings:?}");
    for (name, value) in wrong {
        let named = |line: &&String| line.contains(name) && line.contains(value);
        assert_eq!(settings.iter().filter(named).count(), 1, "{name}: {settings:?}");
    }
    let right = [
        ("KERNELGATE_BACKEND", "cpu"),
        ("KERNELGATE_TIMEOUT", "9"),
        ("KERNELGATE_DEVICE", ""),
        ("KERNELGATE_SHARD", "1/4"),
        ("KERNELGATE_AXIS", "n=1,2 b=3"),
        ("KERNELGATE_COMMIT", "1a2b3c4d+changes"),
    ];
    assert_eq!(stubs.doctor(&["13.0"], &right).of("setting", ""), Vec::<String>::new());
    // A bench does not go on with the CPU.
    let faults = fixture_path().with_file_name("faults");
    let bench = Command::new(faults)
        .args(["--bench", "--quick"])
        .env("KERNELGATE_ARCH", "sm_75")
        .current_dir(stubs.folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&bench.stderr);
    let wanted = "KERNELGATE_ARCH: kernels are compiled for sm_80 or later, not for sm_75";
    assert!(bench.status.code() == Some(2) && said.contains(wanted), "{said}");
    let mut timing = Command::new(env!("CARGO_BIN_EXE_kernelgate"));
    timing.args(["timing", "--part", "cases"]).current_dir(stubs.folder.path());
    // The stand-in has no GPU; there is no package either.
    let output = timing.env("LD_LIBRARY_PATH", stubs.at("driver")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("timing needs a GPU: "), "{said}");
}

#[test]
fn nothing_relative_is_looked_in() {
    let stubs = Stubs::new();
    std::fs::create_dir(stubs.at("toolkit")).unwrap();
    std::os::unix::fs::symlink(stubs.at("13.0"), stubs.at("toolkit/lib64")).unwrap();
    std::os::unix::fs::symlink(stubs.at("13.0"), stubs.at("lib64")).unwrap();
    for variables in [
        [("CUDA_HOME", ""), ("CUDA_PATH", "")],
        [("CUDA_HOME", "toolkit"), ("KERNELGATE_CUDA_LIBS", "13.0")],
        [("CUDA_PATH", "."), ("KERNELGATE_CUDA_LIBS", ":.")],
    ] {
        let told = stubs.doctor(&[], &variables);
        let found = told.of("library", "NVRTC (libnvrtc) is missing");
        assert_eq!(found.len(), 1, "{variables:?}: {:?}", told.0);
        let set = variables.iter().filter(|(_, value)| !value.is_empty()).count();
        assert_eq!(told.of("setting", "").len(), set, "{variables:?}: {:?}", told.0);
    }
}
