//! Lists the kernels of rows with any parameter type, so that all of them can be compiled.
//! `kernelgate resources` and tests use the list of kernels.

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
    pub kernel_symbol: &'static str,
    /// Threads a block.
    pub threads_per_block: u32,
    /// Dynamic shared memory of a block, bytes.
    pub dynamic_shared_bytes: u32,
    /// Number of thread blocks of a cluster; `None` if the kernel uses no clusters.
    pub cluster_blocks: Option<u32>,
    /// The least architecture.
    pub required_architecture: RequiredArchitecture,
    /// The build that measures the time of each stage of the kernel, if its row names stages.
    pub build_with_stage_clocks: Option<KernelBuild>,
}

impl ListedKernelBuild {
    /// Name of the kernel in records: the build's name, followed by the symbol if the symbol
    /// differs from the file's name.
    pub fn kernel_name_in_records(&self) -> String {
        self.build.record_name_of_kernel(self.kernel_symbol)
    }

    /// Returns the kernel with the CUDA source files that an executable embeds, as
    /// [`KernelBuild::with_default_files`].
    #[must_use]
    pub fn with_embedded_files(self, files: &'static [NamedKernelFile]) -> Self {
        let with_clocks = self.build_with_stage_clocks.map(|build| build.with_default_files(files));
        Self {
            build: self.build.with_default_files(files),
            build_with_stage_clocks: with_clocks,
            ..self
        }
    }

    /// Returns the reason why an architecture cannot run the kernel, a sentence fragment: "needs
    /// sm_90 or later".
    pub fn reason_architecture_cannot_run(&self, arch: &str) -> Option<String> {
        reason_architecture_cannot_run_kernel(
            self.required_architecture,
            self.dynamic_shared_bytes,
            arch,
            max_shared_bytes_per_block(arch),
        )
    }
}

/// Returns every kernel of every recorded build of these rows, in order.
pub fn list_kernel_rows<P>(rows: &[KernelSpec<P>]) -> Vec<ListedKernelBuild> {
    let listed = |row: &KernelSpec<P>, p: &P| ListedKernelBuild {
        build: row.build_for_parameters(p),
        kernel_symbol: row.kernel_symbol,
        threads_per_block: row.threads_per_block as u32,
        dynamic_shared_bytes: (row.dynamic_shared_bytes)(p) as u32,
        cluster_blocks: row.cluster_blocks.map(|blocks| blocks as u32),
        required_architecture: row.required_architecture,
        build_with_stage_clocks: (!row.stage_names.is_empty())
            .then(|| row.build_with_stage_clocks(p, 1)),
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
        dynamic_shared_bytes: |width| 16 * width,
        listed_build_parameters: || vec![1, 2],
        ..KernelSpec::new(Source::new("mine/sums", ""), "mine_sums", 64, |_| [1, 1, 1])
    };

    #[test]
    fn each_recorded_build_of_each_kernel_is_listed_by_name() {
        let listed = list_kernel_rows(&[
            TWO_WIDTHS_KERNEL,
            KernelSpec { kernel_symbol: "mine_sums_finish", ..TWO_WIDTHS_KERNEL },
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
        assert_eq!((listed[1].threads_per_block, listed[1].dynamic_shared_bytes), (64, 32));
        assert_eq!(listed[1].build, listed[3].build);
        assert_eq!(listed[1].build_with_stage_clocks, None);
        let clocked =
            list_kernel_rows(&[KernelSpec { stage_names: &["one", "two"], ..TWO_WIDTHS_KERNEL }]);
        let clocked = clocked[1].build_with_stage_clocks.as_ref().unwrap().kernel_build_name();
        assert_eq!(clocked, "mine/sums WIDTH=2 STAGES=2 STAGE_BLOCKS=1");
    }

    #[test]
    fn a_kernel_that_an_architecture_cannot_run_has_a_reason() {
        let row = KernelSpec { dynamic_shared_bytes: |_| 150 << 10, ..TWO_WIDTHS_KERNEL };
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
        let newer = &list_kernel_rows(&[KernelSpec {
            required_architecture: RequiredArchitecture::AtLeastCapability(90),
            ..row
        }])[0];
        assert_eq!(newer.reason_architecture_cannot_run("sm_89").unwrap(), "needs sm_90 or later");
    }
}
