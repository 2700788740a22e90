//! Stores compiled kernels on disk, so that later processes do not compile them again.
//!
//! A file is named by a hash of everything that decides its content: source, headers, options and
//! the compiler's own file. A file that cannot be read or written only costs a compilation.
//!
//! Machine code that is loaded from here runs on the GPU, so the files lie in a folder that only
//! this user can write; any other folder is neither read nor written.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use super::nvrtc::{self, CompileError};
use super::source::KernelBuild;

/// The machine code of a build, from the cache or the compiler.
pub fn cached_or_compiled(build: &KernelBuild, arch: &str) -> Result<Vec<u8>, CompileError> {
    let path = cached_code_path(build, arch)?;
    // A cubin file in the cache that was cut short by a full disk would not load: its ELF magic and
    // a stored length at its end are checked against that.
    if let Some(cubin) =
        path.as_ref().and_then(|path| std::fs::read(path).ok()).and_then(remove_seal)
    {
        return Ok(cubin);
    }
    compile_without_cache(build, arch)
}

/// Compiles a build whatever the cache holds, and replaces the cached file.
pub fn compile_without_cache(build: &KernelBuild, arch: &str) -> Result<Vec<u8>, CompileError> {
    let compiled = nvrtc::compile_to_cubin(build, arch)?;
    if let Some(path) = cached_code_path(build, arch)? {
        store_cubin(&path, &compiled.cubin);
    }
    Ok(compiled.cubin)
}

/// Path of the machine code of a build; `None` without a cache.
fn cached_code_path(build: &KernelBuild, arch: &str) -> Result<Option<PathBuf>, CompileError> {
    let name = format!("{}.cubin", content_hash(build, arch)?);
    Ok(cache_folder()
        .filter(|folder| !folder.exists() || is_private_folder(folder))
        .map(|it| it.join(name)))
}

/// A hash of everything that decides a build's machine code, in hexadecimal. The compiler itself
/// decides some of it anew each time: the same source may differ by an instruction.
///
/// # Errors
/// Fails if no compiler is installed.
pub fn content_hash(build: &KernelBuild, arch: &str) -> Result<String, CompileError> {
    Ok(format!("{:016x}", cache_key(build, arch, nvrtc::nvrtc_identity()?)))
}

fn cache_key(build: &KernelBuild, arch: &str, compiler: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    let KernelBuild { source, defines, constants, .. } = build;
    (source.file, build.compiled_text(), build.headers_of_build()).hash(&mut hasher);
    (defines, constants, build.compiler_options(arch), compiler).hash(&mut hasher);
    hasher.finish()
}

/// Folder of compiled kernels, from `KERNELGATE_CACHE` or the user's cache folder, and whether it
/// is used; `None` if the user has no home.
pub fn cache_place() -> Option<(PathBuf, bool)> {
    cache_folder().map(|folder| {
        let used = !folder.exists() || is_private_folder(&folder);
        (folder, used)
    })
}

#[allow(clippy::disallowed_methods, reason = "the user's cache folder is not a setting")]
fn cache_folder() -> Option<PathBuf> {
    // A relative path would depend on the working folder of the process.
    let variable =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|folder| folder.is_absolute());
    let base = variable("KERNELGATE_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|cache| cache.join("kernelgate")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache").join("kernelgate")))?;
    Some(base.join("kernels"))
}

/// Whether a cache folder belongs to this user and no other user may write to it.
fn is_private_folder(folder: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    // A link is rejected, because whoever can change the link could change the folder.
    std::fs::symlink_metadata(folder).is_ok_and(|facts| {
        let own = facts.uid() == rustix::process::geteuid().as_raw();
        facts.is_dir() && own && facts.mode() & 0o022 == 0
    })
}

/// Makes a folder that only this user can write.
fn make_folder_private(folder: &Path) -> std::io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

const CACHE_FILE_SEAL: &[u8; 8] = b"kgcubin1";

fn remove_seal(mut file: Vec<u8>) -> Option<Vec<u8>> {
    let content = file.strip_suffix(CACHE_FILE_SEAL)?.len();
    file.truncate(content);
    Some(file)
}

/// The cubin is written to a temporary file in the cache folder and then renamed, so that another
/// process never reads half a file.
fn store_cubin(path: &Path, cubin: &[u8]) {
    let Some(folder) = path.parent() else { return };
    let write = || -> std::io::Result<()> {
        use std::io::Write;
        make_folder_private(folder)?;
        if !is_private_folder(folder) {
            return Ok(());
        }
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(cubin)?;
        file.write_all(CACHE_FILE_SEAL)?;
        file.persist(path)?;
        Ok(())
    };
    // If the cache cannot be written, kernels are compiled in every process.
    let _ = write();
}

#[cfg(test)]
mod tests {
    use super::super::source::Source;
    use super::*;

    #[test]
    fn a_cache_key_depends_on_everything_that_affects_the_machine_code() {
        let build = |define: &str| Source::new("a", "text").build(&[define]);
        let base = cache_key(&build("A"), "sm_90a", "13.0");
        assert_eq!(base, cache_key(&build("A"), "sm_90a", "13.0"));
        assert_ne!(base, cache_key(&build("B"), "sm_90a", "13.0"));
        assert_ne!(base, cache_key(&build("A"), "sm_80", "13.0"));
        assert_ne!(base, cache_key(&build("A"), "sm_90a", "13.1"));
        assert_ne!(base, cache_key(&Source::new("b", "text").build(&["A"]), "sm_90a", "13.0"));
        assert_ne!(base, cache_key(&Source::new("a", "other").build(&["A"]), "sm_90a", "13.0"));
        // Constants decide the code but are not in the build's name.
        let with_constant = KernelBuild { constants: vec![("TILE", 8)], ..build("A") };
        assert_ne!(base, cache_key(&with_constant, "sm_90a", "13.0"));
    }

    #[test]
    fn a_cache_key_depends_only_on_included_headers() {
        let hash = |headers| {
            let source = Source::new("k", "#include \"a.cuh\"").with_headers(headers);
            cache_key(&source.build(&[]), "sm_90a", "13.0")
        };
        let base = hash(&[("a.cuh", "#include \"b.cuh\""), ("b.cuh", "1"), ("c.cuh", "1")]);
        let other = hash(&[("a.cuh", "#include \"b.cuh\""), ("b.cuh", "1"), ("c.cuh", "2")]);
        let through = hash(&[("a.cuh", "#include \"b.cuh\""), ("b.cuh", "2"), ("c.cuh", "1")]);
        let direct = hash(&[("a.cuh", " #include \"b.cuh\""), ("b.cuh", "1"), ("c.cuh", "1")]);
        assert_eq!(base, other);
        assert_ne!(base, through);
        assert_ne!(base, direct);
    }

    #[test]
    fn a_truncated_cache_file_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep").join("x.cubin");
        store_cubin(&path, b"machine code");
        let whole = std::fs::read(&path).unwrap();
        assert_eq!(remove_seal(whole.clone()).unwrap(), b"machine code");
        assert_eq!(remove_seal(whole[..whole.len() - 1].to_vec()), None);
    }
    #[test]
    fn a_cache_folder_that_others_can_write_is_not_used() {
        use std::os::unix::fs::PermissionsExt;
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("deep").join("kernels");
        store_cubin(&folder.join("x.cubin"), b"machine code");
        assert!(is_private_folder(&folder) && folder.join("x.cubin").is_file());
        let open =
            |mode| std::fs::set_permissions(&folder, PermissionsExt::from_mode(mode)).unwrap();
        for (mode, private) in [(0o770, false), (0o702, false), (0o755, true), (0o700, true)] {
            open(mode);
            assert_eq!(is_private_folder(&folder), private, "{mode:o}");
            let path = folder.join(format!("{mode:o}.cubin"));
            store_cubin(&path, b"machine code");
            assert_eq!(path.is_file(), private, "{mode:o}");
        }
        let link = home.path().join("link");
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        assert!(!is_private_folder(&link) && !is_private_folder(&home.path().join("nothing")));
        // Root's folder belongs to another user, unless the test runs as root.
        let root = std::fs::metadata("/").map(|facts| std::os::unix::fs::MetadataExt::uid(&facts));
        let mine = rustix::process::geteuid().as_raw();
        assert!(root.is_ok_and(|root| root == mine) || !is_private_folder(Path::new("/")));
    }
}
