//! Saves compiling dependencies: before a side's first build, copies compiled crates into its
//! target folder, for the base from the user's target folder, for the head from the base's. Cargo
//! decides by its own fingerprints which of the copied build files it uses. Crates of the user's
//! workspace are not copied from the user's target folder, because each side compiles them from its
//! own sources.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::SystemTime;

use serde::Deserialize;

use super::leftover_files;
use super::neighbour_links::SIDE_SOURCES_FOLDER;

/// The parsed packages of a `Cargo.lock` file.
#[derive(Deserialize)]
struct CargoLockFile {
    #[serde(default)]
    package: Vec<CargoLockPackage>,
}

#[derive(Deserialize)]
struct CargoLockPackage {
    #[serde(rename = "name")]
    package_name: String,
    #[serde(rename = "source")]
    package_source: Option<String>,
}

/// Returns the names of the registry crates in the text of a `Cargo.lock`, without names that a
/// local package also has.
fn registry_crate_names(lock: &str) -> BTreeSet<String> {
    let Ok(CargoLockFile { package }) = toml::from_str(lock) else { return BTreeSet::new() };
    let from_registry = |it: &CargoLockPackage| {
        it.package_source
            .as_ref()
            .is_some_and(|source| source.starts_with("registry+") || source.starts_with("sparse+"))
    };
    let (registry, local): (Vec<_>, Vec<_>) = package.into_iter().partition(from_registry);
    let local: BTreeSet<String> = local.into_iter().map(|it| it.package_name).collect();
    registry.into_iter().map(|it| it.package_name).filter(|name| !local.contains(name)).collect()
}

/// Splits a file name of cargo's target folder into crate name and 16-digit build hash:
/// "serde-0123456789abcdef", "libserde-0123456789abcdef.rlib".
fn split_crate_name_and_build_hash(name: &str) -> Option<(&str, &str)> {
    let stem = name.split('.').next().unwrap_or(name);
    let (name, digits) = stem.rsplit_once('-')?;
    let hexadecimal = digits.len() == 16 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    hexadecimal.then_some((name, digits))
}

/// Copies the compiled registry crates of a Cargo profile, such as `release`, from the target
/// folder `from` into a side's target folder, if the side has none yet. The argument `lock` is the
/// text of the user's `Cargo.lock`. Returns the number of crate builds that were copied.
pub fn copy_compiled_registry_crates(
    from: &Path,
    profile: &str,
    side: &Path,
    lock: &str,
) -> std::io::Result<usize> {
    let (from, fresh) = (from.join(profile), side.join("target"));
    let fingerprints = from.join(".fingerprint");
    if fresh.exists() || !fingerprints.is_dir() {
        return Ok(0);
    }
    let crates = registry_crate_names(lock);
    let names = |folder: &Path| -> std::io::Result<Vec<String>> {
        let entries = std::fs::read_dir(folder)?.flatten();
        Ok(entries.filter_map(|entry| entry.file_name().into_string().ok()).collect())
    };
    // A crate build with a fingerprint is complete, because cargo writes the fingerprint after the
    // build's files.
    let builds: BTreeSet<String> = names(&fingerprints)?
        .iter()
        .filter_map(|name| split_crate_name_and_build_hash(name))
        .filter(|(name, _)| crates.contains(*name))
        .map(|(_, digits)| digits.to_owned())
        .collect();
    let partial = side.join("target.partial");
    leftover_files::remove_file_or_folder_if_present(&partial)?;
    for folder in [".fingerprint", "deps", "build"] {
        let (source, target) = (from.join(folder), partial.join(profile).join(folder));
        std::fs::create_dir_all(&target)?;
        for name in names(&source).unwrap_or_default() {
            if split_crate_name_and_build_hash(&name)
                .is_some_and(|(_, digits)| builds.contains(digits))
            {
                copy_entry_with_file_times(&source.join(&name), &target.join(&name))?;
            }
        }
    }
    std::fs::rename(partial, fresh)?;
    Ok(builds.len())
}

/// Copies `from/target` with its modification times to `to/target`, unless that exists; sets the
/// times of `to`'s sources to now, so that cargo compiles them.
pub fn copy_target_folder_of_other_side(from: &Path, to: &Path) -> std::io::Result<()> {
    let (built, fresh) = (from.join("target"), to.join("target"));
    if fresh.exists() || !built.is_dir() {
        return Ok(());
    }
    // The copied folder has a temporary name until the copy is complete.
    let partial = to.join("target.partial");
    leftover_files::remove_file_or_folder_if_present(&partial)?;
    copy_folder_with_file_times(&built, &partial)?;
    set_source_file_times(&to.join(SIDE_SOURCES_FOLDER), SystemTime::now())?;
    std::fs::rename(partial, fresh)
}

fn copy_folder_with_file_times(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        copy_entry_with_file_times(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

/// Copies a regular file with its modification time, or a folder with its contents; symbolic links
/// and other special files are skipped.
fn copy_entry_with_file_times(from: &Path, to: &Path) -> std::io::Result<()> {
    let facts = std::fs::symlink_metadata(from)?;
    if facts.is_dir() {
        copy_folder_with_file_times(from, to)?;
    } else if facts.is_file() {
        std::fs::copy(from, to)?;
        std::fs::File::open(to)?.set_modified(facts.modified()?)?;
    }
    Ok(())
}

fn set_source_file_times(folder: &Path, now: SystemTime) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        if kind.is_dir() && entry.file_name() != ".git" {
            set_source_file_times(&path, now)?;
        } else if kind.is_file() {
            std::fs::File::open(&path)?.set_modified(now)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn compiled_registry_crates_are_copied_but_workspace_crates_are_not() {
        let root = tempfile::tempdir().unwrap();
        let (user, side) = (root.path().join("user"), root.path().join("base"));
        let (from, to) = (user.join("release"), side.join("target/release"));
        let digits = ["0123456789abcdef", "1123456789abcdef", "2123456789abcdef"];
        let [serde, own, other] = digits;
        for file in [
            format!(".fingerprint/serde-{serde}/lib-serde"),
            format!("deps/libserde-{serde}.rlib"),
            format!("deps/serde-{serde}.d"),
            format!("build/serde-{serde}/out/x"),
            format!(".fingerprint/own-{own}/lib-own"),
            format!("deps/libown-{own}.rlib"),
            format!("deps/libserde-{other}.rlib"),
            "own".to_owned(),
        ] {
            let path = from.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "x").unwrap();
        }
        std::fs::create_dir_all(&side).unwrap();
        let lock = r#"version = 4
            [[package]]
            name = "own"
            version = "0.1.0"
            [[package]]
            name = "serde"
            version = "1.0.0"
            source = "registry+https://example.org/index""#;
        assert_eq!(copy_compiled_registry_crates(&user, "release", &side, lock).unwrap(), 1);
        let there = |file: String| to.join(file).exists();
        assert!(
            there(format!("deps/libserde-{serde}.rlib")) && there(format!("deps/serde-{serde}.d"))
        );
        assert!(there(format!("build/serde-{serde}/out/x")));
        assert!(there(format!(".fingerprint/serde-{serde}/lib-serde")));
        assert!(!there(format!("deps/libown-{own}.rlib")) && !there("own".to_owned()));
        assert!(!there(format!("deps/libserde-{other}.rlib")), "its fingerprint is missing");
        assert_eq!(
            copy_compiled_registry_crates(&user, "release", &side, lock).unwrap(),
            0,
            "a folder that is there stays"
        );
        assert_eq!(registry_crate_names("no lock file"), BTreeSet::new());
    }

    #[test]
    fn a_target_folder_is_copied_once_with_its_file_times() {
        let root = tempfile::tempdir().unwrap();
        let (from, to) = (root.path().join("base"), root.path().join("head"));
        std::fs::create_dir_all(from.join("target/release")).unwrap();
        std::fs::create_dir_all(to.join(SIDE_SOURCES_FOLDER)).unwrap();
        let (built, source) =
            (from.join("target/release/x"), to.join(SIDE_SOURCES_FOLDER).join("lib.rs"));
        let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        for path in [&built, &source] {
            std::fs::write(path, "1").unwrap();
            std::fs::File::options().write(true).open(path).unwrap().set_modified(old).unwrap();
        }
        copy_target_folder_of_other_side(&from, &to).unwrap();
        let modified = |path: &Path| std::fs::metadata(path).unwrap().modified().unwrap();
        assert_eq!(modified(&to.join("target/release/x")), old);
        assert!(modified(&source) > old);
        std::fs::write(&built, "2").unwrap();
        copy_target_folder_of_other_side(&from, &to).unwrap();
        assert_eq!(
            std::fs::read_to_string(to.join("target/release/x")).unwrap(),
            "1",
            "a target folder that is there stays"
        );
    }
}
