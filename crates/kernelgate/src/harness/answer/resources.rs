//! Registers, spills and shared memory of the binary's kernels, as compiled. Needs no GPU.

use std::collections::BTreeSet;

use kernelgate_cuda::spec::ListedKernel;

use crate::harness::selection::filter::CaseFilter;
use crate::protocol::{BenchResponseBody, ResourcesReport};
use crate::record::resources::{CompiledKernels, compile_resources};

/// Compiles kernels for an architecture: all kernels of each build that has a matching name.
pub fn answer_resources(
    kernels: &[ListedKernel],
    arch: &str,
    filter: &CaseFilter,
) -> BenchResponseBody {
    if kernels.is_empty() {
        return BenchResponseBody::NoMatch {
            reason: "no bench lists a kernel (`Harness::kernels`)".to_owned(),
            close: Vec::new(),
        };
    }
    match compile_resources(&kernels_of_matching_builds(kernels, filter), arch) {
        Ok(CompiledKernels { resources, code, sources }) => {
            let describe = |(build, lack): (&String, &String)| format!("{build} {lack}");
            let left_out = resources.left_out.iter().map(describe).collect();
            BenchResponseBody::Resources(ResourcesReport { resources, left_out, code, sources })
        }
        Err(error) => BenchResponseBody::Refused(error.to_string()),
    }
}

/// The kernels of builds that hold one whose name matches: a file is compiled as a whole.
fn kernels_of_matching_builds(kernels: &[ListedKernel], filter: &CaseFilter) -> Vec<ListedKernel> {
    let matching = |kernel: &&ListedKernel| filter.matches_id(&kernel.name());
    let builds: BTreeSet<_> = kernels.iter().filter(matching).map(|it| &it.build).collect();
    kernels.iter().filter(|kernel| builds.contains(&kernel.build)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate_cuda::Source;
    use kernelgate_cuda::spec::{KernelSpec, list_kernel_rows};

    #[test]
    fn keeps_all_kernels_of_a_matching_build() {
        const ONE: KernelSpec<usize> = KernelSpec {
            defines: |width| vec![format!("WIDTH={width}")],
            variants: || vec![1, 2],
            ..KernelSpec::new(Source::new("mine/sums", ""), "mine_sums", 64, |_| [1, 1, 1])
        };
        let listed = list_kernel_rows(&[ONE, KernelSpec { symbol: "mine_sums_finish", ..ONE }]);
        let names = |filter: &str| {
            let filter = CaseFilter::parse(Some(filter), false).unwrap();
            let kept = kernels_of_matching_builds(&listed, &filter);
            kept.iter().map(ListedKernel::name).collect::<Vec<_>>()
        };
        assert_eq!(
            names("WIDTH=2: .*finish"),
            ["mine/sums WIDTH=2", "mine/sums WIDTH=2: mine_sums_finish"]
        );
        assert_eq!(names("sums").len(), 4);
        assert!(names("other").is_empty());
    }
}
