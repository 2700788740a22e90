//! Starts first builds from crates that are compiled already, so that dependencies are compiled
//! once: the base's with the registry's crates from the user's target folder, the head's with the
//! base's target folder. Cargo decides by its own fingerprints which of the copied files it uses.
//! Deliberately absent: crates of the workspace, which are compiled from the sides' own sources.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::SystemTime;

use serde::Deserialize;

use super::leftover_files;
use super::neighbour_links::SIDE_SOURCES_FOLDER;

/// The content of a `Cargo.lock` file.
#[derive(Deserialize)]
struct LockFile {
    #[serde(default)]
    package: Vec<LockedPackage>,
}

#[derive(Deserialize)]
struct LockedPackage {
    name: String,
    source: Option<String>,
}

/// Names of the registry crates in a lock file, without names that a local package shares.
fn registry_crates(lock: &str) -> BTreeSet<String> {
    let Ok(LockFile { package }) = toml::from_str(lock) else { return BTreeSet::new() };
    let from_registry = |it: &LockedPackage| {
        it.source
            .as_ref()
            .is_some_and(|source| source.starts_with("registry+") || source.starts_with("sparse+"))
    };
    let (registry, local): (Vec<_>, Vec<_>) = package.into_iter().partition(from_registry);
    let local: BTreeSet<String> = local.into_iter().map(|it| it.name).collect();
    registry.into_iter().map(|it| it.name).filter(|name| !local.contains(name)).collect()
}

/// The 16 digits by which cargo distinguishes the builds of a crate, in the name of one of its
/// files or folders: "serde-0123456789abcdef", "libserde-0123456789abcdef.rlib".
fn split_build_hash(name: &str) -> Option<(&str, &str)> {
    let stem = name.split('.').next().unwrap_or(name);
    let (name, digits) = stem.rsplit_once('-')?;
    let hexadecimal = digits.len() == 16 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    hexadecimal.then_some((name, digits))
}

/// Copies compiled registry crates of a profile, such as `release`, from the target folder `from`
/// into a side's empty target folder. `lock` is the text of `Cargo.lock`. Returns the number of
/// copied crate builds.
pub fn seed_registry(
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
    let crates = registry_crates(lock);
    let names = |folder: &Path| -> std::io::Result<Vec<String>> {
        let entries = std::fs::read_dir(folder)?.flatten();
        Ok(entries.filter_map(|entry| entry.file_name().into_string().ok()).collect())
    };
    // Cargo writes the fingerprint of a build after its files.
    let builds: BTreeSet<String> = names(&fingerprints)?
        .iter()
        .filter_map(|name| split_build_hash(name))
        .filter(|(name, _)| crates.contains(*name))
        .map(|(_, digits)| digits.to_owned())
        .collect();
    let partial = side.join("target.partial");
    leftover_files::remove_path(&partial)?;
    for folder in [".fingerprint", "deps", "build"] {
        let (source, target) = (from.join(folder), partial.join(profile).join(folder));
        std::fs::create_dir_all(&target)?;
        for name in names(&source).unwrap_or_default() {
            if split_build_hash(&name).is_some_and(|(_, digits)| builds.contains(digits)) {
                copy_entry(&source.join(&name), &target.join(&name))?;
            }
        }
    }
    std::fs::rename(partial, fresh)?;
    Ok(builds.len())
}

/// Copies `from/target` to `to/target`, times of change kept, unless it exists; the sources of `to`
/// then count as changed just now, because the copy was built from other sources.
pub fn copy_target_folder(from: &Path, to: &Path) -> std::io::Result<()> {
    let (built, fresh) = (from.join("target"), to.join("target"));
    if fresh.exists() || !built.is_dir() {
        return Ok(());
    }
    // Until it is complete, the copied folder has a temporary name.
    let partial = to.join("target.partial");
    leftover_files::remove_path(&partial)?;
    copy_with_times(&built, &partial)?;
    touch_sources(&to.join(SIDE_SOURCES_FOLDER), SystemTime::now())?;
    std::fs::rename(partial, fresh)
}

fn copy_with_times(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        copy_entry(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

/// Copies a file with its time of change, or a folder; links and other files are skipped.
fn copy_entry(from: &Path, to: &Path) -> std::io::Result<()> {
    let facts = std::fs::symlink_metadata(from)?;
    if facts.is_dir() {
        copy_with_times(from, to)?;
    } else if facts.is_file() {
        std::fs::copy(from, to)?;
        std::fs::File::open(to)?.set_modified(facts.modified()?)?;
    }
    Ok(())
}

fn touch_sources(folder: &Path, now: SystemTime) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        if kind.is_dir() && entry.file_name() != ".git" {
            touch_sources(&path, now)?;
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
    fn compiled_registry_crates_are_copied_and_workspace_crates_are_not() {
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
        assert_eq!(seed_registry(&user, "release", &side, lock).unwrap(), 1);
        let there = |file: String| to.join(file).exists();
        assert!(
            there(format!("deps/libserde-{serde}.rlib")) && there(format!("deps/serde-{serde}.d"))
        );
        assert!(there(format!("build/serde-{serde}/out/x")));
        assert!(there(format!(".fingerprint/serde-{serde}/lib-serde")));
        assert!(!there(format!("deps/libown-{own}.rlib")) && !there("own".to_owned()));
        assert!(!there(format!("deps/libserde-{other}.rlib")), "its fingerprint is missing");
        assert_eq!(
            seed_registry(&user, "release", &side, lock).unwrap(),
            0,
            "a folder that is there stays"
        );
        assert_eq!(registry_crates("no lock file"), BTreeSet::new());
    }

    #[test]
    fn a_target_folder_is_copied_once_with_its_times_and_sources_are_newer() {
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
        copy_target_folder(&from, &to).unwrap();
        let modified = |path: &Path| std::fs::metadata(path).unwrap().modified().unwrap();
        assert_eq!(modified(&to.join("target/release/x")), old);
        assert!(modified(&source) > old);
        std::fs::write(&built, "2").unwrap();
        copy_target_folder(&from, &to).unwrap();
        assert_eq!(
            std::fs::read_to_string(to.join("target/release/x")).unwrap(),
            "1",
            "a target folder that is there stays"
        );
    }
}
