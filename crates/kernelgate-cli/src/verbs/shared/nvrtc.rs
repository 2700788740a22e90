//! Installs NVRTC, NVIDIA's runtime compiler, with pip into a Python environment in the target
//! folder; NVRTC compiles kernels without a GPU.

use crate::commands;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context as _;

/// A CUDA version whose NVRTC pip can install.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum InstallableNvrtc {
    /// NVRTC of CUDA 13.0, with which the recorded resources of this repository's kernels were
    /// compiled
    #[value(name = "13")]
    NvrtcOfCuda13,
    /// NVRTC of CUDA 12.4, the CUDA version of the oldest supported driver
    #[value(name = "12")]
    NvrtcOfCuda12,
}

impl InstallableNvrtc {
    const fn python_environment_folder_name(self) -> &'static str {
        match self {
            Self::NvrtcOfCuda13 => "cuda-compiler-venv",
            Self::NvrtcOfCuda12 => "cuda-compiler-12-venv",
        }
    }

    const fn nvrtc_pip_packages(self) -> &'static [&'static str] {
        match self {
            Self::NvrtcOfCuda13 => &["nvidia-cuda-nvrtc==13.0.*", "nvidia-cuda-runtime==13.0.*"],
            Self::NvrtcOfCuda12 => &["nvidia-cuda-nvrtc-cu12==12.4.*"],
        }
    }

    /// Path of the NVRTC library below the folder `nvidia` of the Python environment.
    const fn nvrtc_library_path(self) -> &'static str {
        match self {
            Self::NvrtcOfCuda13 => "cu13/lib/libnvrtc.so.13",
            Self::NvrtcOfCuda12 => "cuda_nvrtc/lib/libnvrtc.so.12",
        }
    }

    /// Folder of the NVRTC library, for `KERNELGATE_CUDA_LIBS`; pip installs the library on the
    /// first call.
    pub fn install_nvrtc_if_missing(self, target: &Path) -> anyhow::Result<PathBuf> {
        let environment = target.join(self.python_environment_folder_name());
        if let Some(folder) = self.nvrtc_folder_if_installed(&environment) {
            return Ok(folder);
        }
        let packages = self.nvrtc_pip_packages().join(" ");
        eprintln!("fetching {packages} with pip into {}", environment.display());
        if !environment.join("bin/python").exists() {
            run_nvrtc_install_command(
                Command::new("python3").args(["-m", "venv"]).arg(&environment),
            )?;
        }
        let mut pip = Command::new(environment.join("bin/pip"));
        run_nvrtc_install_command(
            pip.args(["install", "--quiet"]).args(self.nvrtc_pip_packages()),
        )?;
        self.nvrtc_folder_if_installed(&environment).with_context(|| {
            format!("{} has no {}", environment.display(), self.nvrtc_library_path())
        })
    }

    fn nvrtc_folder_if_installed(self, environment: &Path) -> Option<PathBuf> {
        let pythons = std::fs::read_dir(environment.join("lib")).ok()?;
        let libraries = pythons.flatten().map(|python| {
            python.path().join("site-packages/nvidia").join(self.nvrtc_library_path())
        });
        let library = libraries.into_iter().find(|library| library.is_file())?;
        library.parent()?.canonicalize().ok()
    }
}

fn run_nvrtc_install_command(command: &mut Command) -> anyhow::Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    commands::print_command_if_verbose(command);
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
    fn an_installed_nvrtc_is_not_downloaded_again() {
        let target = tempfile::tempdir().unwrap();
        for nvrtc in [InstallableNvrtc::NvrtcOfCuda13, InstallableNvrtc::NvrtcOfCuda12] {
            let nvidia = format!(
                "{}/lib/python3.12/site-packages/nvidia",
                nvrtc.python_environment_folder_name()
            );
            let library = target.path().join(nvidia).join(nvrtc.nvrtc_library_path());
            assert_eq!(
                nvrtc.nvrtc_folder_if_installed(
                    &target.path().join(nvrtc.python_environment_folder_name())
                ),
                None
            );
            std::fs::create_dir_all(library.parent().unwrap()).unwrap();
            std::fs::write(&library, "").unwrap();
            let folder = library.parent().unwrap().canonicalize().unwrap();
            assert_eq!(nvrtc.install_nvrtc_if_missing(target.path()).unwrap(), folder);
        }
    }
}
