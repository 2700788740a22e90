//! Lists the kernels of rows with any parameter type, so that all of them can be compiled:
//! `kernelgate resources` and tests use the list.

use super::kernel_spec::{KernelSpec, reason_architecture_cannot_run_kernel};
use super::required_architecture::RequiredArchitecture;
use crate::architecture::max_shared_bytes_per_block;
use crate::compiler::source::{KernelBuild, NamedKernelFile};

/// One kernel of one build: a row of [`KernelSpec`] with its parameter filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedKernelBuild {
    /// CUDA source file and macros; kernels with an equal build are compiled together.
    pub build: KernelBuild,
    /// Name of the kernel's `extern "C"` function in the source file.
    pub symbol: &'static str,
    /// Threads a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: u32,
    /// Blocks of a cluster.
    pub cluster: Option<u32>,
    /// The least architecture.
    pub requires: RequiredArchitecture,
    /// The build that measures the time of each stage of the kernel, if its row names stages.
    pub with_clocks: Option<KernelBuild>,
}

impl ListedKernelBuild {
    /// Name of the kernel in records: the build's name, followed by the symbol if the symbol
    /// differs from the file's name.
    pub fn kernel_name_in_records(&self) -> String {
        self.build.record_name_of_kernel(self.symbol)
    }

    /// Returns the kernel with the CUDA source files that an executable embeds, as
    /// [`KernelBuild::with_default_files`].
    #[must_use]
    pub fn with_embedded_files(self, files: &'static [NamedKernelFile]) -> Self {
        let with_clocks = self.with_clocks.map(|build| build.with_default_files(files));
        Self { build: self.build.with_default_files(files), with_clocks, ..self }
    }

    /// Returns the reason why an architecture cannot run the kernel, a sentence fragment: "needs
    /// sm_90 or later".
    pub fn reason_architecture_cannot_run(&self, arch: &str) -> Option<String> {
        reason_architecture_cannot_run_kernel(
            self.requires,
            self.shared_bytes,
            arch,
            max_shared_bytes_per_block(arch),
        )
    }
}

/// Returns every kernel of every recorded build of these rows, in order.
pub fn list_kernel_rows<P>(rows: &[KernelSpec<P>]) -> Vec<ListedKernelBuild> {
    let listed = |row: &KernelSpec<P>, p: &P| ListedKernelBuild {
        build: row.build_for_parameters(p),
        symbol: row.symbol,
        threads: row.threads as u32,
        shared_bytes: (row.shared_bytes)(p) as u32,
        cluster: row.cluster.map(|blocks| blocks as u32),
        requires: row.requires,
        with_clocks: (!row.stages.is_empty()).then(|| row.build_with_stage_clocks(p, 1)),
    };
    rows.iter()
        .flat_map(|row| {
            (row.listed_build_parameters)().iter().map(|p| listed(row, p)).collect::<Vec<_>>()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Source;

    const TWO_WIDTHS_KERNEL: KernelSpec<usize> = KernelSpec {
        macro_definitions: |width| vec![format!("WIDTH={width}")],
        shared_bytes: |width| 16 * width,
        listed_build_parameters: || vec![1, 2],
        ..KernelSpec::new(Source::new("mine/sums", ""), "mine_sums", 64, |_| [1, 1, 1])
    };

    #[test]
    fn each_recorded_build_of_each_kernel_is_listed_by_name() {
        let listed = list_kernel_rows(&[
            TWO_WIDTHS_KERNEL,
            KernelSpec { symbol: "mine_sums_finish", ..TWO_WIDTHS_KERNEL },
        ]);
        let names: Vec<_> = listed.iter().map(ListedKernelBuild::kernel_name_in_records).collect();
        assert_eq!(
            names,
            [
                "mine/sums WIDTH=1",
                "mine/sums WIDTH=2",
                "mine/sums WIDTH=1: mine_sums_finish",
                "mine/sums WIDTH=2: mine_sums_finish"
            ]
        );
        assert_eq!((listed[1].threads, listed[1].shared_bytes), (64, 32));
        assert_eq!(listed[1].build, listed[3].build);
        assert_eq!(listed[1].with_clocks, None);
        let clocked =
            list_kernel_rows(&[KernelSpec { stages: &["one", "two"], ..TWO_WIDTHS_KERNEL }]);
        let clocked = clocked[1].with_clocks.as_ref().unwrap().file_and_macros();
        assert_eq!(clocked, "mine/sums WIDTH=2 STAGES=2 STAGE_BLOCKS=1");
    }

    #[test]
    fn a_kernel_that_an_architecture_cannot_run_has_a_reason() {
        let row = KernelSpec { shared_bytes: |_| 150 << 10, ..TWO_WIDTHS_KERNEL };
        let large = &list_kernel_rows(&[row])[0];
        assert_eq!(
            (
                large.reason_architecture_cannot_run("sm_80"),
                large.reason_architecture_cannot_run("sm_100a")
            ),
            (None, None)
        );
        assert_eq!(
            large.reason_architecture_cannot_run("sm_120a").unwrap(),
            "needs 153600 bytes of shared memory a block, sm_120a has 101376"
        );
        // If the architecture's limit of shared memory is unknown, no reason is given, and the
        // launch on the GPU decides.
        assert_eq!(large.reason_architecture_cannot_run("sm_88"), None);
        let newer =
            &list_kernel_rows(&[KernelSpec { requires: RequiredArchitecture::AtLeast(90), ..row }])
                [0];
        assert_eq!(newer.reason_architecture_cannot_run("sm_89").unwrap(), "needs sm_90 or later");
    }
}
