//! Kernel sources: a kernel file, the headers that it may include, and the macros of one build.

use std::borrow::Cow;

use crate::layout;

/// A kernel file or a header as a pair: the name by which it is included, and its text.
pub type NamedKernelFile = (&'static str, &'static str);

/// Makes a table of embedded files from a folder, relative to the calling file, and the names of
/// files in the folder, as in `embedded_files!("../kernels", "mine/tile.cuh", "mine/sum.cu")`.
#[macro_export]
macro_rules! embedded_files {
    ($folder:literal, $($name:literal),+ $(,)?) => {
        &[$(($name, include_str!(concat!($folder, "/", $name)))),+]
    };
}

/// Headers of kernelgate that every kernel may include, in any package.
pub const COMMON_KERNEL_HEADERS: &[NamedKernelFile] = embedded_files!(
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

/// The headers that a source text includes, directly or through other headers, out of
/// [`COMMON_KERNEL_HEADERS`] and the package's files. A header counts as included if its name
/// occurs anywhere in the text, even in a comment or a macro; NVRTC gets only these headers.
pub fn headers_named_in_text(text: &str, package: &[NamedKernelFile]) -> Vec<NamedKernelFile> {
    let headers = package.iter().filter(|(name, _)| !name.ends_with(KERNEL_FILE_EXTENSION));
    let (mut found, mut rest): (Vec<NamedKernelFile>, Vec<NamedKernelFile>) = COMMON_KERNEL_HEADERS
        .iter()
        .chain(headers)
        .copied()
        .partition(|(name, _)| text.contains(name));
    let mut read = 0;
    while let Some((_, text)) = found.get(read).copied() {
        let (named, others) = rest.into_iter().partition(|(name, _)| text.contains(name));
        found.extend::<Vec<NamedKernelFile>>(named);
        rest = others;
        read += 1;
    }
    found
}

/// File extension of kernel files, which is not part of a [`Source`]'s name.
const KERNEL_FILE_EXTENSION: &str = ".cu";

/// A kernel file and the files of its package that it may include.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Source {
    /// Name of the kernel file in messages and records, such as `family/implementation`, without
    /// `.cu`.
    pub kernel_file_name: &'static str,
    /// Text of the kernel file; `None` if the text is the one in `files`.
    directly_given_source_text: Option<&'static str>,
    /// Embedded files of the kernel's package: headers besides [`COMMON_KERNEL_HEADERS`], and
    /// kernel files.
    pub embedded_package_files: &'static [NamedKernelFile],
}

impl Source {
    /// A kernel source with the given text that includes only the common headers, as in
    /// `Source::new("saxpy", include_str!("saxpy.cu"))`.
    pub const fn new(file: &'static str, text: &'static str) -> Self {
        Self {
            kernel_file_name: file,
            directly_given_source_text: Some(text),
            embedded_package_files: &[],
        }
    }

    /// A kernel source whose text is the file `{file}.cu` among the package's embedded files. If
    /// `files` is empty, the kernel source uses the files that the executable gave to the device
    /// ([`DeviceOptions::embedded_kernel_files`](crate::DeviceOptions::embedded_kernel_files)).
    pub const fn from_package_files(
        file: &'static str,
        files: &'static [NamedKernelFile],
    ) -> Source {
        Self {
            kernel_file_name: file,
            directly_given_source_text: None,
            embedded_package_files: files,
        }
    }

    /// Lets the kernel source include the headers in `headers`: one table for all kernels of a
    /// package, made by [`embedded_files!`](crate::embedded_files).
    pub const fn with_headers(self, headers: &'static [NamedKernelFile]) -> Self {
        Self { embedded_package_files: headers, ..self }
    }

    /// Text of the kernel source; `None` if the package's files lack it.
    pub fn find_source_text(&self) -> Option<&'static str> {
        let is_own =
            |name: &str| name.strip_suffix(KERNEL_FILE_EXTENSION) == Some(self.kernel_file_name);
        let in_files = || self.embedded_package_files.iter().find(|(name, _)| is_own(name));
        self.directly_given_source_text.or_else(|| in_files().map(|(_, text)| *text))
    }

    /// Text of the kernel source; empty if the package's files lack it, which is then an error of
    /// the compilation.
    pub fn source_text_or_empty(&self) -> &'static str {
        self.find_source_text().unwrap_or_default()
    }

    /// Combines the kernel source with macros, each written `NAME` or `NAME=VALUE`; nothing is
    /// compiled yet.
    pub fn with_macros(self, defines: &[&str]) -> KernelBuild {
        KernelBuild {
            source: self,
            macros_in_build_name: defines.iter().map(ToString::to_string).collect(),
            macros_outside_build_name: Vec::new(),
            variant: KernelBuildVariant::default(),
        }
    }
}

/// Variant in which a kernel build is compiled: with another code and memory layout, or with source
/// line numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelBuildVariant {
    /// Number of the code and memory layout of the variant, as described in [`layout`].
    pub layout_number: Option<u32>,
    /// Whether the machine code refers to source lines, for profilers and compute-sanitizer;
    /// without them, editing a comment leaves the machine code unchanged.
    pub has_line_info: bool,
}

/// A kernel source with the macros with which it is compiled.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelBuild {
    /// CUDA source file of the build.
    pub source: Source,
    /// Macros that are part of the build's name, each `NAME` or `NAME=VALUE`.
    pub macros_in_build_name: Vec<String>,
    /// Macros that are not part of the build's name, because their values follow from the named
    /// macros: name and value.
    pub macros_outside_build_name: Vec<(&'static str, usize)>,
    /// Variant in which the source is compiled; the name of the build does not contain the variant.
    pub variant: KernelBuildVariant,
}

impl KernelBuild {
    /// Name of the kernel build in messages and records, made of the source file and the macros,
    /// such as `st_bif/backward_replay ELEMENT_F32 STEPS=8`.
    pub fn kernel_build_name(&self) -> String {
        std::iter::once(self.source.kernel_file_name)
            .chain(self.macros_in_build_name.iter().map(String::as_str))
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// The text that NVRTC compiles: the kernel file, with padding functions before it if another
    /// code layout was requested.
    pub fn source_text_with_padding(&self) -> Cow<'static, str> {
        match self.variant.layout_number {
            Some(layout) => (layout::padding_functions_source(layout)
                + self.source.source_text_or_empty())
            .into(),
            None => self.source.source_text_or_empty().into(),
        }
    }

    /// The headers that the kernel build includes, directly or through other headers.
    pub fn included_headers(&self) -> Vec<NamedKernelFile> {
        headers_named_in_text(
            &[&self.source_text_with_padding(), self.macros_in_build_name.join(" ").as_str()]
                .join(" "),
            self.source.embedded_package_files,
        )
    }

    /// The kernel build with the embedded files of the executable, unless its source already has
    /// files of its own.
    #[must_use]
    pub fn with_default_files(mut self, files: &'static [NamedKernelFile]) -> Self {
        if self.source.embedded_package_files.is_empty() {
            self.source.embedded_package_files = files;
        }
        self
    }

    /// Name in records of one kernel of the build: the name of the build, followed by the symbol if
    /// the symbol differs from the file's name.
    pub fn record_name_of_kernel(&self, symbol: &str) -> String {
        let name = self.kernel_build_name();
        if self.source.kernel_file_name.replace('/', "_") == symbol {
            name
        } else {
            format!("{name}: {symbol}")
        }
    }

    /// NVRTC's options for a real architecture such as `sm_90a`, or for a virtual one such as
    /// `compute_80`, which gives PTX.
    pub fn nvrtc_options(&self, arch: &str) -> Vec<String> {
        let fixed = [
            format!("--gpu-architecture={arch}"),
            "--std=c++17".to_owned(),
            "--ptxas-options=-v".to_owned(),
        ];
        let defines = self.macros_in_build_name.iter().map(|define| format!("-D{define}"));
        let constants =
            self.macros_outside_build_name.iter().map(|(name, value)| format!("-D{name}={value}"));
        let line_info = self.variant.has_line_info.then(|| "--generate-line-info".to_owned());
        let layout = self
            .variant
            .layout_number
            .map(|layout| format!("-D{}={layout}", layout::LAYOUT_NUMBER_VARIABLE));
        fixed.into_iter().chain(line_info).chain(layout).chain(defines).chain(constants).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// Collects the names, relative to `kernels`, of all files in a folder and its subfolders.
    fn collect_file_names_below(kernels: &Path, folder: &str, files: &mut Vec<String>) {
        for entry in std::fs::read_dir(kernels.join(folder)).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() {
                collect_file_names_below(kernels, &name, files);
            } else {
                files.push(name);
            }
        }
    }

    #[test]
    fn every_common_header_is_embedded() {
        let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let mut files = Vec::new();
        collect_file_names_below(&kernels, "common", &mut files);
        let mut embedded: Vec<_> =
            COMMON_KERNEL_HEADERS.iter().map(|(name, _)| (*name).to_owned()).collect();
        files.sort();
        embedded.sort();
        assert_eq!(files, embedded);
    }

    #[test]
    fn included_headers_are_found_through_headers_and_macros() {
        const TEST_HEADER_FILES: &[NamedKernelFile] = &[
            ("mine/a.cuh", "#include <mine/b.cuh>"),
            ("mine/b.cuh", "#include \"common/math.cuh\""),
            ("mine/c.cuh", ""),
        ];
        let names = |text: &'static str, defines: &[&str]| {
            let build = Source::new("k", text).with_headers(TEST_HEADER_FILES).with_macros(defines);
            build.included_headers().iter().map(|(name, _)| *name).collect::<Vec<_>>()
        };
        assert!(names("", &[]).is_empty());
        assert_eq!(
            names("#include \"mine/a.cuh\"", &[]),
            ["mine/a.cuh", "mine/b.cuh", "common/math.cuh"]
        );
        assert_eq!(names("#include OTHER", &["OTHER=<mine/c.cuh>"]), ["mine/c.cuh"]);
    }

    #[test]
    fn a_source_without_files_of_its_own_takes_those_of_the_executable() {
        const TEST_EXECUTABLE_FILES: &[NamedKernelFile] = &[
            ("mine/other.cu", ""),
            ("mine/sum.cu", "#include \"mine/sum.cuh\" // and not mine/other.cu"),
            ("mine/sum.cuh", ""),
        ];
        let build = Source::from_package_files("mine/sum", &[]).with_macros(&[]);
        assert_eq!(build.source.find_source_text(), None);
        let build = build.with_default_files(TEST_EXECUTABLE_FILES);
        assert_eq!(build.source.source_text_or_empty(), TEST_EXECUTABLE_FILES[1].1);
        assert_eq!(build.included_headers(), TEST_EXECUTABLE_FILES[2..]);
        let own = Source::new("mine/sum", "own")
            .with_macros(&[])
            .with_default_files(TEST_EXECUTABLE_FILES);
        assert_eq!(own.source_text_with_padding(), "own");
    }

    #[test]
    fn a_build_is_named_by_its_file_and_macros() {
        assert_eq!(
            Source::new("a/b", "").with_macros(&["X", "Y=2"]).kernel_build_name(),
            "a/b X Y=2"
        );
    }
}
