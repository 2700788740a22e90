//! Chooses one of several installed NVRTC libraries by origin, driver and version.
//!
//! A driver loads machine code if its CUDA major version is at least the compiler's; it loads PTX
//! only if it is as new as the compiler.

use super::search::LibraryOrigin;
use super::version::CudaVersion;

/// Returns whether a driver can load the machine code or PTX that this NVRTC version generates.
pub fn can_driver_load_nvrtc_code(
    nvrtc: CudaVersion,
    driver: Option<CudaVersion>,
    as_ptx: bool,
) -> bool {
    driver.is_none_or(|driver| if as_ptx { nvrtc <= driver } else { nvrtc.major <= driver.major })
}

/// Index of the best NVRTC: first one in a folder that the user names, then one that fits the
/// driver, then the newest; the first of equals.
pub fn index_of_best_nvrtc(
    offered: &[(LibraryOrigin, CudaVersion)],
    fits: impl Fn(CudaVersion) -> bool,
) -> Option<usize> {
    let rank = |index: usize| {
        let (origin, version) = offered[index];
        let fits = fits(version);
        let installed = fits && origin == LibraryOrigin::LoaderOrToolkitFolder;
        (
            origin == LibraryOrigin::UserNamedFolder,
            fits,
            installed,
            version,
            std::cmp::Reverse(index),
        )
    };
    (0..offered.len()).max_by_key(|&index| rank(index))
}

/// Returns the installed libraries, followed by the libraries that `others` finds in Python wheels
/// if no installed one is sufficient. If an installed library is sufficient, `others`, which may
/// start Python, is not called.
pub fn add_wheel_libraries_if_needed<T, O: Iterator<Item = T>>(
    installed: impl Iterator<Item = T>,
    enough: impl Fn(&T) -> bool,
    others: impl FnOnce() -> O,
) -> Vec<T> {
    let mut found: Vec<T> = installed.collect();
    if !found.iter().any(enough) {
        found.extend(others());
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_is_not_started_if_an_installed_nvrtc_suffices() {
        let mut asked = 0;
        let mut found = |installed: &[u32]| {
            let wheels = || {
                asked += 1;
                [9].into_iter()
            };
            add_wheel_libraries_if_needed(installed.iter().copied(), |&version| version > 5, wheels)
        };
        assert_eq!(found(&[3, 6]), [3, 6]);
        assert_eq!(found(&[3]), [3, 9]);
        assert_eq!(found(&[]), [9]);
        assert_eq!(asked, 2);
    }
    use LibraryOrigin::{LoaderOrToolkitFolder, PythonWheel, UserNamedFolder};

    const fn cuda_version(major: u32, minor: u32) -> CudaVersion {
        CudaVersion { major, minor }
    }

    #[test]
    fn a_driver_loads_older_ptx_and_machine_code_of_its_major() {
        let on = |nvrtc, driver| {
            [false, true].map(|as_ptx| can_driver_load_nvrtc_code(nvrtc, Some(driver), as_ptx))
        };
        assert_eq!(on(cuda_version(12, 8), cuda_version(12, 4)), [true, false]);
        assert_eq!(on(cuda_version(12, 4), cuda_version(12, 4)), [true, true]);
        assert_eq!(on(cuda_version(12, 8), cuda_version(13, 0)), [true, true]);
        assert_eq!(on(cuda_version(13, 0), cuda_version(12, 9)), [false, false]);
        assert_eq!(on(cuda_version(13, 2), cuda_version(13, 0)), [true, false]);
        assert!(can_driver_load_nvrtc_code(cuda_version(13, 2), None, true));
    }

    #[test]
    fn nvrtc_is_chosen_by_user_then_driver_fit_then_version() {
        let chosen = |offered: &[(LibraryOrigin, CudaVersion)], driver: CudaVersion| {
            index_of_best_nvrtc(offered, |version| {
                can_driver_load_nvrtc_code(version, Some(driver), false)
            })
            .map(|at| offered[at])
        };
        let both = [
            (LoaderOrToolkitFolder, cuda_version(13, 0)),
            (LoaderOrToolkitFolder, cuda_version(12, 4)),
            (LoaderOrToolkitFolder, cuda_version(12, 8)),
        ];
        assert_eq!(chosen(&both, cuda_version(13, 1)), Some(both[0]));
        assert_eq!(chosen(&both, cuda_version(12, 4)), Some(both[2]));
        // An NVRTC in a folder that the user named wins although it is older or does not fit the
        // driver; opening the device reports the misfit.
        let named = (UserNamedFolder, cuda_version(12, 4));
        assert_eq!(chosen(&[both[0], named], cuda_version(13, 0)), Some(named));
        let unfit = (UserNamedFolder, cuda_version(13, 0));
        assert_eq!(chosen(&[both[1], unfit], cuda_version(12, 4)), Some(unfit));
        assert_eq!(chosen(&[unfit, named], cuda_version(12, 4)), Some(named));
        // An NVRTC in a Python wheel that fits the driver wins over installed ones that do not fit;
        // if none fits, an installed one wins.
        let wheel = (PythonWheel, cuda_version(12, 8));
        assert_eq!(chosen(&[both[0], wheel], cuda_version(12, 4)), Some(wheel));
        assert_eq!(chosen(&[both[1], wheel], cuda_version(12, 4)), Some(both[1]));
        assert_eq!(chosen(&[both[0]], cuda_version(12, 4)), Some(both[0]));
        assert_eq!(chosen(&[], cuda_version(12, 4)), None);
    }
}
