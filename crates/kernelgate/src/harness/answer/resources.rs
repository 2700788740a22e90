//! Compiles the bench executable's kernels and reports their registers, spills and shared memory.
//! Needs no GPU.

use std::collections::BTreeSet;

use kernelgate_cuda::spec::ListedKernelBuild;

use crate::harness::selection::filter::CaseIdFilter;
use crate::protocol::{KernelResourcesReport, ResponseToBenchAction};
use crate::record::resources::{KernelResourcesAndHashes, compile_kernels_and_read_resources};

/// Compiles kernels for an architecture and reports their resources: all kernels of each build in
/// which a kernel name matches the filter.
pub fn compile_and_report_resources(
    kernels: &[ListedKernelBuild],
    arch: &str,
    filter: &CaseIdFilter,
) -> ResponseToBenchAction {
    if kernels.is_empty() {
        return ResponseToBenchAction::NoMatchingCase {
            no_match_reason: "no bench lists a kernel (`Harness::kernels`)".to_owned(),
            similar_case_ids: Vec::new(),
        };
    }
    match compile_kernels_and_read_resources(&kernels_of_matching_builds(kernels, filter), arch) {
        Ok(KernelResourcesAndHashes { resources, machine_code_hashes, source_hashes }) => {
            let describe = |(build, lack): (&String, &String)| format!("{build} {lack}");
            let left_out = resources.unsupported_kernels.iter().map(describe).collect();
            ResponseToBenchAction::Resources(KernelResourcesReport {
                resources,
                builds_unfit_for_architecture: left_out,
                machine_code_hashes,
                source_hashes,
            })
        }
        Err(error) => ResponseToBenchAction::ActionImpossible(error.to_string()),
    }
}

/// Selects all kernels of each build that contains a kernel with a matching name, because a build
/// is compiled as a whole.
fn kernels_of_matching_builds(
    kernels: &[ListedKernelBuild],
    filter: &CaseIdFilter,
) -> Vec<ListedKernelBuild> {
    let matching =
        |kernel: &&ListedKernelBuild| filter.selects_case_id(&kernel.kernel_name_in_records());
    let builds: BTreeSet<_> = kernels.iter().filter(matching).map(|it| &it.build).collect();
    kernels.iter().filter(|kernel| builds.contains(&kernel.build)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate_cuda::Source;
    use kernelgate_cuda::spec::{KernelSpec, list_kernel_rows};

    #[test]
    fn all_kernels_of_a_matching_build_are_kept() {
        const KERNEL_IN_TWO_BUILDS: KernelSpec<usize> = KernelSpec {
            macro_definitions: |width| vec![format!("WIDTH={width}")],
            listed_build_parameters: || vec![1, 2],
            ..KernelSpec::new(Source::new("mine/sums", ""), "mine_sums", 64, |_| [1, 1, 1])
        };
        let listed = list_kernel_rows(&[
            KERNEL_IN_TWO_BUILDS,
            KernelSpec { kernel_symbol: "mine_sums_finish", ..KERNEL_IN_TWO_BUILDS },
        ]);
        let names = |filter: &str| {
            let filter = CaseIdFilter::parse_exact_id_or_regex(Some(filter), false).unwrap();
            let kept = kernels_of_matching_builds(&listed, &filter);
            kept.iter().map(ListedKernelBuild::kernel_name_in_records).collect::<Vec<_>>()
        };
        assert_eq!(
            names("WIDTH=2: .*finish"),
            ["mine/sums WIDTH=2", "mine/sums WIDTH=2: mine_sums_finish"]
        );
        assert_eq!(names("sums").len(), 4);
        assert!(names("other").is_empty());
    }
}
