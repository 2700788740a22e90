//! Lists the prebuilt bench executables of a folder, for which kernelgate runs no cargo build.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kernelgate::record::text;

/// Returns the executables in a folder and in its subfolder `deps/`, by file name without the hash
/// that cargo appends. If the folder holds several executables of one bench, the most recently
/// modified one is returned.
pub fn prebuilt_benches_in_folder(folder: &Path) -> std::io::Result<BTreeMap<String, PathBuf>> {
    let mut newest: BTreeMap<String, (std::time::SystemTime, PathBuf)> = BTreeMap::new();
    let entries = std::fs::read_dir(folder)?;
    let below = std::fs::read_dir(folder.join("deps")).into_iter().flatten();
    for entry in entries.chain(below).flatten() {
        let path = entry.path();
        // The metadata describe the file to which a symbolic link leads, not the link.
        let Ok(facts) = std::fs::metadata(&path) else { continue };
        if let (Some(name), Ok(modified)) =
            (bench_name_of_executable_file(&path, &facts), facts.modified())
            && newest.get(&name).is_none_or(|(earlier, _)| *earlier < modified)
        {
            newest.insert(name, (modified, path));
        }
    }
    Ok(newest.into_iter().map(|(name, (_, path))| (name, path)).collect())
}

fn bench_name_of_executable_file(path: &Path, facts: &std::fs::Metadata) -> Option<String> {
    let name = path.file_name()?.to_str().filter(|name| text::check_is_plain_name(name).is_ok())?;
    let runs = std::os::unix::fs::PermissionsExt::mode(&facts.permissions()) & 0o111 != 0
        && !name.contains('.');
    if !runs || !facts.is_file() {
        return None;
    }
    let hashed = name
        .rsplit_once('-')
        .filter(|(_, hash)| hash.len() == 16 && hash.chars().all(|c| c.is_ascii_hexdigit()));
    Some(hashed.map_or(name, |(stem, _)| stem).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prebuilt_executables_are_listed_without_the_hash_in_their_names() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("deps")).unwrap();
        for (name, mode) in [
            ("attention-0123456789abcdef", 0o755),
            ("deps/two", 0o755),
            ("three.d", 0o755),
            ("four", 0o644),
        ] {
            let path = folder.path().join(name);
            std::fs::write(&path, "x").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        std::os::unix::fs::symlink(folder.path().join("deps/two"), folder.path().join("linked"))
            .unwrap();
        std::os::unix::fs::symlink("circle", folder.path().join("circle")).unwrap();
        assert_eq!(
            prebuilt_benches_in_folder(folder.path()).unwrap().into_keys().collect::<Vec<_>>(),
            ["attention", "linked", "two"]
        );
    }
}
