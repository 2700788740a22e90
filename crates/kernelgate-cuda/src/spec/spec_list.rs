//! Lists kernels of any parameter type, in order to compile all of them: `kernelgate resources` and
//! the tests.

use super::kernel_spec::{KernelSpec, unmet_requirement};
use super::required_architecture::RequiredArchitecture;
use crate::architecture::shared_bytes_a_block;
use crate::compiler::source::{KernelBuild, KernelFile};

/// A kernel of a build: the row without its parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedKernel {
    /// Source file and macros, from which the kernels of a file are compiled together.
    pub build: KernelBuild,
    /// The `extern "C"` symbol of the kernel.
    pub symbol: &'static str,
    /// Threads a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: u32,
    /// Blocks of a cluster.
    pub cluster: Option<u32>,
    /// The least architecture.
    pub requires: RequiredArchitecture,
    /// The build with clocks of its stages, if its row names stages.
    pub with_clocks: Option<KernelBuild>,
}

impl ListedKernel {
    /// Name in records: the build, followed by the symbol if that differs from the file's name.
    pub fn name(&self) -> String {
        self.build.kernel_name(self.symbol)
    }

    /// The kernel with the files of an executable, as [`KernelBuild::with_files`].
    #[must_use]
    pub fn with_files(self, files: &'static [KernelFile]) -> Self {
        let with_clocks = self.with_clocks.map(|build| build.with_files(files));
        Self { build: self.build.with_files(files), with_clocks, ..self }
    }

    /// Reason why an architecture cannot run the kernel, a fragment: "needs sm_90 or later".
    pub fn unmet_by(&self, arch: &str) -> Option<String> {
        unmet_requirement(self.requires, self.shared_bytes, arch, shared_bytes_a_block(arch))
    }
}

/// Returns every kernel of every build in this list, in order.
pub fn list_kernel_rows<P>(rows: &[KernelSpec<P>]) -> Vec<ListedKernel> {
    let listed = |row: &KernelSpec<P>, p: &P| ListedKernel {
        build: row.build_for_parameters(p),
        symbol: row.symbol,
        threads: row.threads as u32,
        shared_bytes: (row.shared_bytes)(p) as u32,
        cluster: row.cluster.map(|blocks| blocks as u32),
        requires: row.requires,
        with_clocks: (!row.stages.is_empty()).then(|| row.build_with_stage_clocks(p, 1)),
    };
    rows.iter()
        .flat_map(|row| (row.variants)().iter().map(|p| listed(row, p)).collect::<Vec<_>>())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Source;

    const TEST_FILE_KERNEL: KernelSpec<usize> = KernelSpec {
        defines: |width| vec![format!("WIDTH={width}")],
        shared_bytes: |width| 16 * width,
        variants: || vec![1, 2],
        ..KernelSpec::new(Source::new("mine/sums", ""), "mine_sums", 64, |_| [1, 1, 1])
    };

    #[test]
    fn each_build_of_each_kernel_is_listed_by_name() {
        let listed = list_kernel_rows(&[
            TEST_FILE_KERNEL,
            KernelSpec { symbol: "mine_sums_finish", ..TEST_FILE_KERNEL },
        ]);
        let names: Vec<_> = listed.iter().map(ListedKernel::name).collect();
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
            list_kernel_rows(&[KernelSpec { stages: &["one", "two"], ..TEST_FILE_KERNEL }]);
        let clocked = clocked[1].with_clocks.as_ref().unwrap().name();
        assert_eq!(clocked, "mine/sums WIDTH=2 STAGES=2 STAGE_BLOCKS=1");
    }

    #[test]
    fn unmet_requirements_are_reported_by_architecture_name() {
        let row = KernelSpec { shared_bytes: |_| 150 << 10, ..TEST_FILE_KERNEL };
        let large = &list_kernel_rows(&[row])[0];
        assert_eq!((large.unmet_by("sm_80"), large.unmet_by("sm_100a")), (None, None));
        assert_eq!(
            large.unmet_by("sm_120a").unwrap(),
            "needs 153600 bytes of shared memory a block, sm_120a has 101376"
        );
        // If a limit is unknown, the launch on the card decides.
        assert_eq!(large.unmet_by("sm_88"), None);
        let newer =
            &list_kernel_rows(&[KernelSpec { requires: RequiredArchitecture::AtLeast(90), ..row }])
                [0];
        assert_eq!(newer.unmet_by("sm_89").unwrap(), "needs sm_90 or later");
    }
}
