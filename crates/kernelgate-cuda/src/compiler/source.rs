//! What is compiled: a source file with the headers of its package, and the macros of one build of
//! it.

use std::borrow::Cow;

use crate::layout;

/// Headers that every kernel may include, by the name it includes them under. They lie in this
/// crate, so that kernels of other packages reach them too.
pub const HEADERS: &[(&str, &str)] = &[
    ("common/bulk.cuh", include_str!("../../kernels/common/bulk.cuh")),
    ("common/cluster.cuh", include_str!("../../kernels/common/cluster.cuh")),
    ("common/device_clock.cuh", include_str!("../../kernels/common/device_clock.cuh")),
    ("common/element.cuh", include_str!("../../kernels/common/element.cuh")),
    ("common/element16.cuh", include_str!("../../kernels/common/element16.cuh")),
    ("common/float_ops.cuh", include_str!("../../kernels/common/float_ops.cuh")),
    ("common/fragments.cuh", include_str!("../../kernels/common/fragments.cuh")),
    ("common/math.cuh", include_str!("../../kernels/common/math.cuh")),
    ("common/memory.cuh", include_str!("../../kernels/common/memory.cuh")),
    ("common/reduce.cuh", include_str!("../../kernels/common/reduce.cuh")),
    ("common/stages.cuh", include_str!("../../kernels/common/stages.cuh")),
    ("common/streaming.cuh", include_str!("../../kernels/common/streaming.cuh")),
    ("common/tensor_copy.cuh", include_str!("../../kernels/common/tensor_copy.cuh")),
    ("common/types.cuh", include_str!("../../kernels/common/types.cuh")),
    ("common/warp_gemm.cuh", include_str!("../../kernels/common/warp_gemm.cuh")),
    ("common/wgmma.cuh", include_str!("../../kernels/common/wgmma.cuh")),
];

/// A kernel file, embedded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Source {
    /// What it goes by in messages and records: `family/implementation`, without `.cu`.
    pub file: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Headers of its package, by the name it includes them under, besides [`HEADERS`].
    pub headers: &'static [(&'static str, &'static str)],
}

impl Source {
    /// A file without headers of its own: `Source::new("saxpy", include_str!("saxpy.cu"))`.
    pub const fn new(file: &'static str, text: &'static str) -> Self {
        Self { file, text, headers: &[] }
    }

    /// The same with headers of its package.
    pub const fn with_headers(self, headers: &'static [(&'static str, &'static str)]) -> Self {
        Self { headers, ..self }
    }

    /// The file with macros, each `NAME` or `NAME=VALUE`.
    pub fn build(self, defines: &[&str]) -> Build {
        Build {
            source: self,
            defines: defines.iter().map(ToString::to_string).collect(),
            constants: Vec::new(),
        }
    }
}

/// A kernel file with its macros.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Build {
    /// The file.
    pub source: Source,
    /// Macros that are part of its name: `NAME` or `NAME=VALUE`.
    pub defines: Vec<String>,
    /// Macros that are not, because they follow from those: name and value.
    pub constants: Vec<(&'static str, usize)>,
}

impl Build {
    /// File and macros, for messages and records: `st_bif/backward_replay ELEMENT_F32 STEPS=8`.
    pub fn name(&self) -> String {
        std::iter::once(self.source.file)
            .chain(self.defines.iter().map(String::as_str))
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// What is compiled: the file, after further functions where another layout is asked for.
    pub fn text(&self) -> Cow<'static, str> {
        match layout::asked() {
            Some(layout) => (layout::padding_functions(layout) + self.source.text).into(),
            None => self.source.text.into(),
        }
    }

    /// What a kernel of it goes by in records: the build, and the symbol where that is not the
    /// file's name.
    pub fn kernel_name(&self, symbol: &str) -> String {
        let name = self.name();
        if self.source.file.replace('/', "_") == symbol {
            name
        } else {
            format!("{name}: {symbol}")
        }
    }

    /// The compiler's options for an architecture: a real one such as `sm_90a`, or a virtual one
    /// such as `compute_80`, for PTX. With `KERNELGATE_LINE_INFO` set, machine code names its source
    /// lines, for profilers and compute-sanitizer; without, an edit of a comment changes no machine
    /// code.
    pub fn options(&self, arch: &str) -> Vec<String> {
        let fixed = [
            format!("--gpu-architecture={arch}"),
            "--std=c++17".to_owned(),
            "--ptxas-options=-v".to_owned(),
        ];
        let defines = self.defines.iter().map(|define| format!("-D{define}"));
        let constants = self.constants.iter().map(|(name, value)| format!("-D{name}={value}"));
        let line_info = std::env::var_os("KERNELGATE_LINE_INFO").filter(|value| !value.is_empty());
        let line_info = line_info.map(|_| "--generate-line-info".to_owned());
        let layout = layout::asked().map(|layout| format!("-D{}={layout}", layout::VARIABLE));
        fixed.into_iter().chain(line_info).chain(layout).chain(defines).chain(constants).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn every_common_header_is_embedded() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels").join("common");
        let entries = std::fs::read_dir(folder).unwrap();
        let mut files: Vec<_> = entries
            .map(|entry| format!("common/{}", entry.unwrap().file_name().to_string_lossy()))
            .collect();
        let mut embedded: Vec<_> = HEADERS.iter().map(|(name, _)| (*name).to_owned()).collect();
        files.sort();
        embedded.sort();
        assert_eq!(files, embedded);
    }

    #[test]
    fn a_build_is_named_by_its_file_and_macros() {
        assert_eq!(Source::new("a/b", "").build(&["X", "Y=2"]).name(), "a/b X Y=2");
    }
}
