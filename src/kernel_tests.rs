//! Tests of the kernel specifications of all families: every kernel file has one, and the
//! specifications of one file agree.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::list_kernels_of_all_families;
use kernelgate::backend::program::{
    KernelWithParameters, LaunchArgument, LaunchProgram, ProgramStep,
};
use kernelgate_cuda::{KernelSpec, RequiredArchitecture};

/// Types and names of a kernel's parameters, read from its CUDA source.
pub fn parameters_in_kernel_source<T>(kernel: &KernelSpec<T>) -> Vec<String> {
    parameters_of_symbol_in_source(kernel.source.source_text_or_empty(), kernel.kernel_symbol)
}

fn parameters_of_symbol_in_source(source: &str, symbol: &str) -> Vec<String> {
    let from = source.find(&format!("{symbol}(")).unwrap() + symbol.len() + 1;
    let list = &source[from..from + source[from..].find(')').unwrap()];
    list.split(',')
        .map(|parameter| parameter.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect()
}

/// Asserts that every launch of a program has a nonempty grid, and an argument of the right type
/// for each kernel parameter.
pub fn assert_launches_match_kernel_parameters(program: &LaunchProgram) {
    for step in program.steps() {
        let ProgramStep::Launch(launch) = step else { continue };
        let KernelWithParameters { kernel_symbol: symbol, build, launch_shape: shape, .. } =
            launch.default_kernel();
        assert!(shape.is_ok(), "{symbol}");
        let parameters =
            parameters_of_symbol_in_source(build.source.source_text_or_empty(), symbol);
        assert_eq!(parameters.len(), launch.arguments().len(), "{symbol}");
        for (parameter, operand) in parameters.iter().zip(launch.arguments()) {
            let fits = match operand {
                LaunchArgument::Pointer(_) | LaunchArgument::Null => parameter.contains('*'),
                LaunchArgument::TmaTensorMap(..) => parameter.contains("TensorMap "),
                LaunchArgument::I32(_) => parameter.starts_with("int "),
                LaunchArgument::I64(_) => {
                    parameter.starts_with("i64 ") || parameter.starts_with("long long ")
                }
                LaunchArgument::F32(_) => {
                    parameter.starts_with("float ") && !parameter.contains('*')
                }
            };
            assert!(fits, "{symbol}: {operand:?} for {parameter}");
        }
    }
}

#[test]
fn every_kernel_file_has_a_kernel_and_every_header_is_included() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let (mut files, mut folders) = (BTreeSet::new(), vec![root.clone()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.insert(path.strip_prefix(&root).unwrap().to_string_lossy().into_owned());
            }
        }
    }
    let mut embedded = BTreeSet::new();
    for kernel in list_kernels_of_all_families()
        .iter()
        .filter(|kernel| !kernel.build.source.kernel_file_name.starts_with("measure/"))
    {
        embedded.insert(format!("{}.cu", kernel.build.source.kernel_file_name));
        let own = kernel.build.source.embedded_package_files;
        let included =
            kernel.build.included_headers().into_iter().filter(|header| own.contains(header));
        embedded.extend(included.map(|(name, _)| name.to_owned()));
    }
    assert_eq!(files, embedded);
}

#[test]
fn kernels_of_one_file_agree_and_kernel_names_are_unique() {
    let (mut names, mut builds) = (BTreeSet::new(), BTreeMap::new());
    for kernel in list_kernels_of_all_families() {
        let (name, build) = (kernel.kernel_name_in_records(), kernel.build);
        assert!(names.insert(name.clone()), "{name}");
        assert!(
            build.source.source_text_or_empty().contains(&format!("{}(", kernel.kernel_symbol)),
            "{name}: no such kernel in the file"
        );
        assert!(kernel.threads_per_block % 32 == 0 || kernel.threads_per_block == 1, "{name}");
        let clusters = kernel.cluster_blocks.is_none()
            || kernel.required_architecture != RequiredArchitecture::AtLeastCapability(80);
        assert!(clusters, "{name}: clusters are of sm_90");
        let Entry::Vacant(new) = builds.entry(build.kernel_build_name()) else {
            assert_eq!(
                builds[&build.kernel_build_name()],
                build,
                "{name}: another build of that name"
            );
            continue;
        };
        let headers = build.included_headers();
        for (constant, _) in &build.macros_outside_build_name {
            let used = |text: &str| text.contains(constant);
            let in_headers = headers.iter().any(|(_, text)| used(text));
            assert!(
                in_headers || used(build.source.source_text_or_empty()),
                "{name}: nothing takes {constant}"
            );
        }
        new.insert(build);
    }
    assert!(names.contains("st_bif/backward_replay ELEMENT_F16 STEPS=8"));
    assert_eq!(
        names.iter().filter(|name| name.starts_with("attention/forward_flash_mma ")).count(),
        9
    );
}

#[test]
fn every_family_has_a_fast_implementation_from_ampere_on() {
    let unmet = |name: &str, arch: &str| {
        let kernel = list_kernels_of_all_families()
            .into_iter()
            .find(|kernel| kernel.kernel_name_in_records() == name);
        kernel.unwrap_or_else(|| panic!("no kernel {name}")).reason_architecture_cannot_run(arch)
    };
    // The fast implementations are those with 16-byte memory accesses, with mma.sync, or with
    // cuBLASLt GEMMs on tensor cores.
    for name in [
        "st_bif/forward_vectorized ELEMENT_F32",
        "st_bif/backward_replay ELEMENT_F32 STEPS=8",
        "attention/forward_flash_mma DTYPE=Bf16 HEAD_DIM=128 CAUSAL=1",
        "denoise/per_op: denoise_per_op_norm",
        "resnet18/fused STEPS=8: resnet18_fused_block",
    ] {
        for arch in ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"] {
            assert_eq!(unmet(name, arch), None, "{name} on {arch}");
        }
    }
    // Gradient kernels need more shared memory than some architectures have, so only one of their
    // two builds runs on such a GPU.
    let backward = "attention/backward_flash_mma DTYPE=Bf16 HEAD_DIM=128 CAUSAL=1";
    let runs = |arch: &str| {
        [backward.to_owned(), format!("{backward} STAGES=1")]
            .map(|name| unmet(&name, arch).is_none())
    };
    assert_eq!(
        ["sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120a"].map(runs),
        [[false, true], [false, false], [true, false], [true, false], [false, false]]
    );
}
