//! Chooses one of several installed NVRTC libraries.
//!
//! Machine code runs on a driver of its compiler's major version or a later one (NVIDIA's minor
//! version compatibility); PTX only on a driver that is as new as the compiler.

use super::search::LibraryOrigin;
use super::version::CudaVersion;

/// Returns whether a driver can load the code that this NVRTC version generates.
pub fn driver_loads_code(nvrtc: CudaVersion, driver: Option<CudaVersion>, as_ptx: bool) -> bool {
    driver.is_none_or(|driver| if as_ptx { nvrtc <= driver } else { nvrtc.major <= driver.major })
}

/// Index of the best candidate library: a candidate that the user names, then one that fits the
/// driver, then the newest; the first of equal candidates.
pub fn best_candidate(
    offered: &[(LibraryOrigin, CudaVersion)],
    fits: impl Fn(CudaVersion) -> bool,
) -> Option<usize> {
    let rank = |index: usize| {
        let (origin, version) = offered[index];
        let fits = fits(version);
        let installed = fits && origin == LibraryOrigin::Installed;
        (origin == LibraryOrigin::Named, fits, installed, version, std::cmp::Reverse(index))
    };
    (0..offered.len()).max_by_key(|&index| rank(index))
}

/// The installed candidate libraries, followed by the candidates of `others` if the driver supports
/// no installed one. If an installed candidate suffices, `others`, which may start a process, is
/// not called.
pub fn with_others_unless_enough<T, O: Iterator<Item = T>>(
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
            with_others_unless_enough(installed.iter().copied(), |&version| version > 5, wheels)
        };
        assert_eq!(found(&[3, 6]), [3, 6]);
        assert_eq!(found(&[3]), [3, 9]);
        assert_eq!(found(&[]), [9]);
        assert_eq!(asked, 2);
    }
    use LibraryOrigin::{Installed, Named, Wheel};

    const fn cuda_version(major: u32, minor: u32) -> CudaVersion {
        CudaVersion { major, minor }
    }

    #[test]
    fn nvrtc_machine_code_needs_a_driver_of_its_major_version_and_ptx_an_equally_new_one() {
        let on = |nvrtc, driver| {
            [false, true].map(|as_ptx| driver_loads_code(nvrtc, Some(driver), as_ptx))
        };
        assert_eq!(on(cuda_version(12, 8), cuda_version(12, 4)), [true, false]);
        assert_eq!(on(cuda_version(12, 4), cuda_version(12, 4)), [true, true]);
        assert_eq!(on(cuda_version(12, 8), cuda_version(13, 0)), [true, true]);
        assert_eq!(on(cuda_version(13, 0), cuda_version(12, 9)), [false, false]);
        assert_eq!(on(cuda_version(13, 2), cuda_version(13, 0)), [true, false]);
        assert!(driver_loads_code(cuda_version(13, 2), None, true));
    }

    #[test]
    fn nvrtc_is_chosen_by_name_then_by_driver_then_by_age() {
        let chosen = |offered: &[(LibraryOrigin, CudaVersion)], driver: CudaVersion| {
            best_candidate(offered, |version| driver_loads_code(version, Some(driver), false))
                .map(|at| offered[at])
        };
        let both = [
            (Installed, cuda_version(13, 0)),
            (Installed, cuda_version(12, 4)),
            (Installed, cuda_version(12, 8)),
        ];
        assert_eq!(chosen(&both, cuda_version(13, 1)), Some(both[0]));
        assert_eq!(chosen(&both, cuda_version(12, 4)), Some(both[2]));
        // An NVRTC that the user named wins although it is older and does not fit the driver;
        // opening the device reports that.
        let named = (Named, cuda_version(12, 4));
        assert_eq!(chosen(&[both[0], named], cuda_version(13, 0)), Some(named));
        let unfit = (Named, cuda_version(13, 0));
        assert_eq!(chosen(&[both[1], unfit], cuda_version(12, 4)), Some(unfit));
        assert_eq!(chosen(&[unfit, named], cuda_version(12, 4)), Some(named));
        // A fitting wheel wins over installed candidates that do not fit; if none fits, the newest
        // wins.
        let wheel = (Wheel, cuda_version(12, 8));
        assert_eq!(chosen(&[both[0], wheel], cuda_version(12, 4)), Some(wheel));
        assert_eq!(chosen(&[both[1], wheel], cuda_version(12, 4)), Some(both[1]));
        assert_eq!(chosen(&[both[0]], cuda_version(12, 4)), Some(both[0]));
        assert_eq!(chosen(&[], cuda_version(12, 4)), None);
    }
}
