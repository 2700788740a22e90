//! Installs NVRTC, which compiles kernels without a GPU, with pip: in a Python environment in the
//! target folder.

use crate::commands;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context as _;

/// A version of NVRTC that pip can install.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum NvrtcMajor {
    /// CUDA 13.0, which the resources of this repository were recorded with
    #[value(name = "13")]
    Cuda13,
    /// CUDA 12.4, that of the oldest supported driver
    #[value(name = "12")]
    Cuda12,
}

impl NvrtcMajor {
    const fn environment_folder(self) -> &'static str {
        match self {
            Self::Cuda13 => "cuda-compiler-venv",
            Self::Cuda12 => "cuda-compiler-12-venv",
        }
    }

    const fn nvrtc_pip_packages(self) -> &'static [&'static str] {
        match self {
            Self::Cuda13 => &["nvidia-cuda-nvrtc==13.0.*", "nvidia-cuda-runtime==13.0.*"],
            Self::Cuda12 => &["nvidia-cuda-nvrtc-cu12==12.4.*"],
        }
    }

    /// Path of the library below the folder `nvidia` of the environment.
    const fn library(self) -> &'static str {
        match self {
            Self::Cuda13 => "cu13/lib/libnvrtc.so.13",
            Self::Cuda12 => "cuda_nvrtc/lib/libnvrtc.so.12",
        }
    }

    /// The library's folder, for `KERNELGATE_CUDA_LIBS`; pip installs it on the first call.
    pub fn fetch(self, target: &Path) -> anyhow::Result<PathBuf> {
        let environment = target.join(self.environment_folder());
        if let Some(folder) = self.installed(&environment) {
            return Ok(folder);
        }
        let packages = self.nvrtc_pip_packages().join(" ");
        eprintln!("fetching {packages} with pip into {}", environment.display());
        if !environment.join("bin/python").exists() {
            run(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
        }
        let mut pip = Command::new(environment.join("bin/pip"));
        run(pip.args(["install", "--quiet"]).args(self.nvrtc_pip_packages()))?;
        self.installed(&environment)
            .with_context(|| format!("{} has no {}", environment.display(), self.library()))
    }

    fn installed(self, environment: &Path) -> Option<PathBuf> {
        let pythons = std::fs::read_dir(environment.join("lib")).ok()?;
        let libraries = pythons
            .flatten()
            .map(|python| python.path().join("site-packages/nvidia").join(self.library()));
        let library = libraries.into_iter().find(|library| library.is_file())?;
        library.parent()?.canonicalize().ok()
    }
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    commands::print_command(command);
    let status = command
        .stdin(Stdio::null())
        .stdout(std::io::stderr())
        .status()
        .with_context(|| format!("failed to run {program}"))?;
    anyhow::ensure!(status.success(), "{program} ended with {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_installed_compiler_is_not_downloaded_again() {
        let target = tempfile::tempdir().unwrap();
        for nvrtc in [NvrtcMajor::Cuda13, NvrtcMajor::Cuda12] {
            let nvidia =
                format!("{}/lib/python3.12/site-packages/nvidia", nvrtc.environment_folder());
            let library = target.path().join(nvidia).join(nvrtc.library());
            assert_eq!(nvrtc.installed(&target.path().join(nvrtc.environment_folder())), None);
            std::fs::create_dir_all(library.parent().unwrap()).unwrap();
            std::fs::write(&library, "").unwrap();
            let folder = library.parent().unwrap().canonicalize().unwrap();
            assert_eq!(nvrtc.fetch(target.path()).unwrap(), folder);
        }
    }
}
