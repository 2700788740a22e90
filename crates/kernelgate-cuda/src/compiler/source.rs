//! Sources: a kernel file, the headers that it includes, and the macros of one build.

use std::borrow::Cow;

use crate::layout;

/// A kernel file or a header: its name, by which kernels include the header, and its text.
pub type KernelFile = (&'static str, &'static str);

/// Makes a table of embedded files from a folder, relative to the calling file, and the names of
/// files in it: `embedded_files!("../kernels", "mine/tile.cuh", "mine/sum.cu")`.
#[macro_export]
macro_rules! embedded_files {
    ($folder:literal, $($name:literal),+ $(,)?) => {
        &[$(($name, include_str!(concat!($folder, "/", $name)))),+]
    };
}

/// Headers that every kernel may include, in any package.
pub const COMMON_HEADERS: &[KernelFile] = embedded_files!(
    "../../kernels",
    "common/bulk.cuh",
    "common/cluster.cuh",
    "common/device_clock.cuh",
    "common/element.cuh",
    "common/element16.cuh",
    "common/fragments.cuh",
    "common/math.cuh",
    "common/memory.cuh",
    "common/peers.cuh",
    "common/reduce.cuh",
    "common/stages.cuh",
    "common/streaming.cuh",
    "common/tensor_copy.cuh",
    "common/types.cuh",
    "common/warp_gemm.cuh",
    "common/wgmma/ring.cuh",
    "common/wgmma/tile.cuh",
    "common/wgmma/wide_tile.cuh",
);

/// Headers of [`COMMON_HEADERS`] and of a package's files that a text includes, directly or through
/// other headers. A header counts as included if its name occurs anywhere in the source text, even
/// in a comment or a macro; NVRTC gets these headers and no others.
pub fn included_headers(text: &str, package: &[KernelFile]) -> Vec<KernelFile> {
    let headers = package.iter().filter(|(name, _)| !name.ends_with(KERNEL_SUFFIX));
    let (mut found, mut rest): (Vec<KernelFile>, Vec<KernelFile>) =
        COMMON_HEADERS.iter().chain(headers).copied().partition(|(name, _)| text.contains(name));
    let mut read = 0;
    while let Some((_, text)) = found.get(read).copied() {
        let (named, others) = rest.into_iter().partition(|(name, _)| text.contains(name));
        found.extend::<Vec<KernelFile>>(named);
        rest = others;
        read += 1;
    }
    found
}

/// End of the names of kernel files, which the name of a [`Source`] lacks.
const KERNEL_SUFFIX: &str = ".cu";

/// A kernel file and the headers that it may include.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Source {
    /// Name of the kernel source file in messages and records: `family/implementation`, without
    /// `.cu`.
    pub file: &'static str,
    /// Text of the source; `None` if it is in the files.
    own_text: Option<&'static str>,
    /// Files of the source's package: the headers besides [`COMMON_HEADERS`], and kernel files.
    pub files: &'static [KernelFile],
}

impl Source {
    /// A kernel source file that includes only the common headers: `Source::new("saxpy",
    /// include_str!("saxpy.cu"))`.
    pub const fn new(file: &'static str, text: &'static str) -> Self {
        Self { file, own_text: Some(text), files: &[] }
    }

    /// A kernel source file whose text is in the package's files as `{file}.cu`. A source without
    /// files of its own takes the files that the executable gives to the device
    /// ([`DeviceOptions::files`](crate::DeviceOptions::files)).
    pub const fn in_files(file: &'static str, files: &'static [KernelFile]) -> Source {
        Self { file, own_text: None, files }
    }

    /// Lets the source include the headers of its package: one table for all kernels of the
    /// package, made by [`embedded_files!`](crate::embedded_files).
    pub const fn with_headers(self, headers: &'static [KernelFile]) -> Self {
        Self { files: headers, ..self }
    }

    /// Text of the source; `None` if the files lack it.
    pub fn find_text(&self) -> Option<&'static str> {
        let is_own = |name: &str| name.strip_suffix(KERNEL_SUFFIX) == Some(self.file);
        let in_files = || self.files.iter().find(|(name, _)| is_own(name));
        self.own_text.or_else(|| in_files().map(|(_, text)| *text))
    }

    /// Text of the source; empty if the files lack it, which the compiler refuses.
    pub fn source_text(&self) -> &'static str {
        self.find_text().unwrap_or_default()
    }

    /// Makes a build of the source file with macros, each written `NAME` or `NAME=VALUE`.
    pub fn build(self, defines: &[&str]) -> KernelBuild {
        KernelBuild {
            source: self,
            defines: defines.iter().map(ToString::to_string).collect(),
            constants: Vec::new(),
            variant: KernelVariant::default(),
        }
    }
}

/// A variant of the same code: another layout, or line numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelVariant {
    /// Number of the code and memory layout, as in [`layout`].
    pub layout: Option<u32>,
    /// Whether the machine code names its source lines, for profilers and compute-sanitizer;
    /// otherwise editing a comment leaves the machine code unchanged.
    pub line_info: bool,
}

/// A kernel source file with the macros to compile it with.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelBuild {
    /// The file.
    pub source: Source,
    /// Macros that are part of the name of the build: `NAME` or `NAME=VALUE`.
    pub defines: Vec<String>,
    /// Macros that are not part of the build's name, because they follow from named macros: name
    /// and value.
    pub constants: Vec<(&'static str, usize)>,
    /// Variant in which the code is compiled; the name of the build does not include the variant.
    pub variant: KernelVariant,
}

impl KernelBuild {
    /// Name of the build in messages and records, from source file and macros:
    /// `st_bif/backward_replay ELEMENT_F32 STEPS=8`.
    pub fn name(&self) -> String {
        std::iter::once(self.source.file)
            .chain(self.defines.iter().map(String::as_str))
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// Text that is compiled: the file, after the further functions of a layout.
    pub fn compiled_text(&self) -> Cow<'static, str> {
        match self.variant.layout {
            Some(layout) => (layout::padding_functions(layout) + self.source.source_text()).into(),
            None => self.source.source_text().into(),
        }
    }

    /// The headers that the source includes, directly or through other headers.
    pub fn headers_of_build(&self) -> Vec<KernelFile> {
        included_headers(
            &[&self.compiled_text(), self.defines.join(" ").as_str()].join(" "),
            self.source.files,
        )
    }

    /// The build with the files of an executable, unless its source names files of its own.
    #[must_use]
    pub fn with_files(mut self, files: &'static [KernelFile]) -> Self {
        if self.source.files.is_empty() {
            self.source.files = files;
        }
        self
    }

    /// Name of one of its kernels in records: the build, followed by the symbol if that differs
    /// from the file's name.
    pub fn kernel_name(&self, symbol: &str) -> String {
        let name = self.name();
        if self.source.file.replace('/', "_") == symbol {
            name
        } else {
            format!("{name}: {symbol}")
        }
    }

    /// Returns the compiler options for an architecture: a real one such as `sm_90a`, or a virtual
    /// one such as `compute_80`, for PTX.
    pub fn compiler_options(&self, arch: &str) -> Vec<String> {
        let fixed = [
            format!("--gpu-architecture={arch}"),
            "--std=c++17".to_owned(),
            "--ptxas-options=-v".to_owned(),
        ];
        let defines = self.defines.iter().map(|define| format!("-D{define}"));
        let constants = self.constants.iter().map(|(name, value)| format!("-D{name}={value}"));
        let line_info = self.variant.line_info.then(|| "--generate-line-info".to_owned());
        let layout =
            self.variant.layout.map(|layout| format!("-D{}={layout}", layout::LAYOUT_VARIABLE));
        fixed.into_iter().chain(line_info).chain(layout).chain(defines).chain(constants).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// Names of the files in a folder and in the folders below it, relative to `kernels`.
    fn collect_files_below(kernels: &Path, folder: &str, files: &mut Vec<String>) {
        for entry in std::fs::read_dir(kernels.join(folder)).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() {
                collect_files_below(kernels, &name, files);
            } else {
                files.push(name);
            }
        }
    }

    #[test]
    fn every_common_header_is_embedded() {
        let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let mut files = Vec::new();
        collect_files_below(&kernels, "common", &mut files);
        let mut embedded: Vec<_> =
            COMMON_HEADERS.iter().map(|(name, _)| (*name).to_owned()).collect();
        files.sort();
        embedded.sort();
        assert_eq!(files, embedded);
    }

    #[test]
    fn included_headers_are_found_through_headers_and_macros() {
        const TEST_HEADERS: &[KernelFile] = &[
            ("mine/a.cuh", "#include <mine/b.cuh>"),
            ("mine/b.cuh", "#include \"common/math.cuh\""),
            ("mine/c.cuh", ""),
        ];
        let names = |text: &'static str, defines: &[&str]| {
            let build = Source::new("k", text).with_headers(TEST_HEADERS).build(defines);
            build.headers_of_build().iter().map(|(name, _)| *name).collect::<Vec<_>>()
        };
        assert!(names("", &[]).is_empty());
        assert_eq!(
            names("#include \"mine/a.cuh\"", &[]),
            ["mine/a.cuh", "mine/b.cuh", "common/math.cuh"]
        );
        assert_eq!(names("#include OTHER", &["OTHER=<mine/c.cuh>"]), ["mine/c.cuh"]);
    }

    #[test]
    fn a_source_without_own_files_takes_those_of_the_executable() {
        const FILES: &[KernelFile] = &[
            ("mine/other.cu", ""),
            ("mine/sum.cu", "#include \"mine/sum.cuh\" // and not mine/other.cu"),
            ("mine/sum.cuh", ""),
        ];
        let build = Source::in_files("mine/sum", &[]).build(&[]);
        assert_eq!(build.source.find_text(), None);
        let build = build.with_files(FILES);
        assert_eq!(build.source.source_text(), FILES[1].1);
        assert_eq!(build.headers_of_build(), FILES[2..]);
        let own = Source::new("mine/sum", "own").build(&[]).with_files(FILES);
        assert_eq!(own.compiled_text(), "own");
    }

    #[test]
    fn a_build_is_named_by_its_file_and_macros() {
        assert_eq!(Source::new("a/b", "").build(&["X", "Y=2"]).name(), "a/b X Y=2");
    }
}
