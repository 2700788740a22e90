//! Caches compiled kernels on disk, so that later processes need not compile them again.
//!
//! The name of a cache file is a hash of all inputs of the compilation: source, headers, options
//! and the identity of the compiler. If a cache file cannot be read or written, the kernel is
//! compiled again.
//!
//! The GPU executes machine code from the cache, so the cache folder must be writable by this user
//! only; any other folder is neither read nor written.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use super::nvrtc::{self, KernelCompileError};
use super::source::KernelBuild;

/// Returns the machine code of a kernel build from the cache, or compiles the build with NVRTC.
pub fn cached_or_compiled_cubin(
    build: &KernelBuild,
    arch: &str,
) -> Result<Vec<u8>, KernelCompileError> {
    let path = path_of_cached_cubin(build, arch)?;
    // A cache file must end with a fixed seal of eight bytes, which a file that a full disk cut
    // short lacks.
    if let Some(cubin) =
        path.as_ref().and_then(|path| std::fs::read(path).ok()).and_then(without_cache_file_seal)
    {
        return Ok(cubin);
    }
    compile_and_replace_cached(build, arch)
}

/// Compiles a kernel build even if its machine code is in the cache, and replaces the cache file.
pub fn compile_and_replace_cached(
    build: &KernelBuild,
    arch: &str,
) -> Result<Vec<u8>, KernelCompileError> {
    let compiled = nvrtc::compile_to_cubin_or_ptx(build, arch)?;
    if let Some(path) = path_of_cached_cubin(build, arch)? {
        store_cubin_in_cache(&path, &compiled.cubin_or_ptx);
    }
    Ok(compiled.cubin_or_ptx)
}

/// Path of the cache file for a kernel build; `None` if there is no usable cache folder.
fn path_of_cached_cubin(
    build: &KernelBuild,
    arch: &str,
) -> Result<Option<PathBuf>, KernelCompileError> {
    let name = format!("{}.cubin", hash_of_compilation_inputs(build, arch)?);
    Ok(kernel_cache_folder()
        .filter(|folder| !folder.exists() || is_writable_by_owner_only(folder))
        .map(|it| it.join(name)))
}

/// A hexadecimal hash of all inputs that decide the machine code of a kernel build. Machine code
/// from equal inputs may still differ by an instruction between two compilations.
///
/// # Errors
/// Fails if NVRTC is not installed.
pub fn hash_of_compilation_inputs(
    build: &KernelBuild,
    arch: &str,
) -> Result<String, KernelCompileError> {
    Ok(format!("{:016x}", compilation_cache_key(build, arch, nvrtc::nvrtc_version_and_file()?)))
}

fn compilation_cache_key(build: &KernelBuild, arch: &str, compiler: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    let KernelBuild {
        source,
        macros_in_build_name: defines,
        macros_outside_build_name: constants,
        ..
    } = build;
    (source.kernel_file_name, build.source_text_with_padding(), build.included_headers())
        .hash(&mut hasher);
    (defines, constants, build.nvrtc_options(arch), compiler).hash(&mut hasher);
    hasher.finish()
}

/// Folder of cached kernels, from `KERNELGATE_CACHE` or the user's cache folder, and whether it is
/// safe to use; `None` if the user has no home folder.
pub fn cache_folder_and_whether_used() -> Option<(PathBuf, bool)> {
    kernel_cache_folder().map(|folder| {
        let used = !folder.exists() || is_writable_by_owner_only(&folder);
        (folder, used)
    })
}

#[allow(clippy::disallowed_methods, reason = "the user's cache folder is not a setting")]
fn kernel_cache_folder() -> Option<PathBuf> {
    // A relative path is ignored, because it would depend on the working folder of the process.
    let variable =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|folder| folder.is_absolute());
    let base = variable("KERNELGATE_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|cache| cache.join("kernelgate")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache").join("kernelgate")))?;
    Some(base.join("kernels"))
}

/// Whether a cache folder belongs to this user and no other user may write to the folder.
fn is_writable_by_owner_only(folder: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    // A symbolic link is rejected, because whoever can change the link could replace the folder.
    std::fs::symlink_metadata(folder).is_ok_and(|facts| {
        let own = facts.uid() == rustix::process::geteuid().as_raw();
        facts.is_dir() && own && facts.mode() & 0o022 == 0
    })
}

/// Creates a folder that only this user can read and write.
fn create_private_folder(folder: &Path) -> std::io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

const END_MARK_OF_COMPLETE_CACHE_FILE: &[u8; 8] = b"kgcubin1";

fn without_cache_file_seal(mut file: Vec<u8>) -> Option<Vec<u8>> {
    let content = file.strip_suffix(END_MARK_OF_COMPLETE_CACHE_FILE)?.len();
    file.truncate(content);
    Some(file)
}

/// Writes the cubin to a temporary file in the cache folder and renames the file, so that another
/// process never reads half a file.
fn store_cubin_in_cache(path: &Path, cubin: &[u8]) {
    let Some(folder) = path.parent() else { return };
    let write = || -> std::io::Result<()> {
        use std::io::Write;
        create_private_folder(folder)?;
        if !is_writable_by_owner_only(folder) {
            return Ok(());
        }
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(cubin)?;
        file.write_all(END_MARK_OF_COMPLETE_CACHE_FILE)?;
        file.persist(path)?;
        Ok(())
    };
    // An error is ignored: if the cache cannot be written, every process compiles its kernels.
    let _ = write();
}

#[cfg(test)]
mod tests {
    use super::super::source::Source;
    use super::*;

    #[test]
    fn a_cache_key_depends_on_everything_that_affects_the_machine_code() {
        let build = |define: &str| Source::new("a", "text").with_macros(&[define]);
        let base = compilation_cache_key(&build("A"), "sm_90a", "13.0");
        assert_eq!(base, compilation_cache_key(&build("A"), "sm_90a", "13.0"));
        assert_ne!(base, compilation_cache_key(&build("B"), "sm_90a", "13.0"));
        assert_ne!(base, compilation_cache_key(&build("A"), "sm_80", "13.0"));
        assert_ne!(base, compilation_cache_key(&build("A"), "sm_90a", "13.1"));
        assert_ne!(
            base,
            compilation_cache_key(&Source::new("b", "text").with_macros(&["A"]), "sm_90a", "13.0")
        );
        assert_ne!(
            base,
            compilation_cache_key(&Source::new("a", "other").with_macros(&["A"]), "sm_90a", "13.0")
        );
        // The constants of a kernel build change its machine code, but are not part of its name.
        let with_constant =
            KernelBuild { macros_outside_build_name: vec![("TILE", 8)], ..build("A") };
        assert_ne!(base, compilation_cache_key(&with_constant, "sm_90a", "13.0"));
    }

    #[test]
    fn a_cache_key_depends_only_on_included_headers() {
        let hash = |headers| {
            let source = Source::new("k", "#include \"a.cuh\"").with_headers(headers);
            compilation_cache_key(&source.with_macros(&[]), "sm_90a", "13.0")
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
    fn a_truncated_cached_cubin_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep").join("x.cubin");
        store_cubin_in_cache(&path, b"machine code");
        let whole = std::fs::read(&path).unwrap();
        assert_eq!(without_cache_file_seal(whole.clone()).unwrap(), b"machine code");
        assert_eq!(without_cache_file_seal(whole[..whole.len() - 1].to_vec()), None);
    }
    #[test]
    fn a_cache_folder_that_others_can_write_is_not_used() {
        use std::os::unix::fs::PermissionsExt;
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("deep").join("kernels");
        store_cubin_in_cache(&folder.join("x.cubin"), b"machine code");
        assert!(is_writable_by_owner_only(&folder) && folder.join("x.cubin").is_file());
        let open =
            |mode| std::fs::set_permissions(&folder, PermissionsExt::from_mode(mode)).unwrap();
        for (mode, private) in [(0o770, false), (0o702, false), (0o755, true), (0o700, true)] {
            open(mode);
            assert_eq!(is_writable_by_owner_only(&folder), private, "{mode:o}");
            let path = folder.join(format!("{mode:o}.cubin"));
            store_cubin_in_cache(&path, b"machine code");
            assert_eq!(path.is_file(), private, "{mode:o}");
        }
        let link = home.path().join("link");
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        assert!(
            !is_writable_by_owner_only(&link)
                && !is_writable_by_owner_only(&home.path().join("nothing"))
        );
        // The cache folder of root belongs to another user, unless the test runs as root.
        let root = std::fs::metadata("/").map(|facts| std::os::unix::fs::MetadataExt::uid(&facts));
        let mine = rustix::process::geteuid().as_raw();
        assert!(root.is_ok_and(|root| root == mine) || !is_writable_by_owner_only(Path::new("/")));
    }
}
