//! Tests of the rows of all kernels together: every file has a row, and the rows of one file agree.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::kernels;
use kernelgate::backend::program::{Operand, PlannedKernel, Program, ProgramStep};
use kernelgate_cuda::{KernelSpec, RequiredArchitecture};

/// Parameters of a kernel, types and names, from its source.
pub fn kernel_parameters<T>(kernel: &KernelSpec<T>) -> Vec<String> {
    kernel_parameters_in(kernel.source.source_text(), kernel.symbol)
}

fn kernel_parameters_in(source: &str, symbol: &str) -> Vec<String> {
    let from = source.find(&format!("{symbol}(")).unwrap() + symbol.len() + 1;
    let list = &source[from..from + source[from..].find(')').unwrap()];
    list.split(',')
        .map(|parameter| parameter.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect()
}

/// Checks that every launch of a program has a grid, and an argument of the right type for each
/// parameter.
pub fn check_program_launches(program: &Program) {
    for step in program.steps() {
        let ProgramStep::Launch(launch) = step else { continue };
        let PlannedKernel { symbol, build, shape, .. } = launch.kernel();
        assert!(shape.is_ok(), "{symbol}");
        let parameters = kernel_parameters_in(build.source.source_text(), symbol);
        assert_eq!(parameters.len(), launch.arguments().len(), "{symbol}");
        for (parameter, operand) in parameters.iter().zip(launch.arguments()) {
            let fits = match operand {
                Operand::Pointer(_) | Operand::Null => parameter.contains('*'),
                Operand::Boxes(..) => parameter.contains("TensorMap "),
                Operand::I32(_) => parameter.starts_with("int "),
                Operand::I64(_) => {
                    parameter.starts_with("i64 ") || parameter.starts_with("long long ")
                }
                Operand::F32(_) => parameter.starts_with("float ") && !parameter.contains('*'),
            };
            assert!(fits, "{symbol}: {operand:?} for {parameter}");
        }
    }
}

#[test]
fn every_kernel_file_has_a_row_and_every_header_a_user() {
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
    for kernel in
        kernels().iter().filter(|kernel| !kernel.build.source.file.starts_with("measure/"))
    {
        embedded.insert(format!("{}.cu", kernel.build.source.file));
        let own = kernel.build.source.files;
        let included =
            kernel.build.headers_of_build().into_iter().filter(|header| own.contains(header));
        embedded.extend(included.map(|(name, _)| name.to_owned()));
    }
    assert_eq!(files, embedded);
}

#[test]
fn rows_of_a_file_agree_and_names_are_unique() {
    let (mut names, mut builds) = (BTreeSet::new(), BTreeMap::new());
    for kernel in kernels() {
        let (name, build) = (kernel.name(), kernel.build);
        assert!(names.insert(name.clone()), "{name}");
        assert!(
            build.source.source_text().contains(&format!("{}(", kernel.symbol)),
            "{name}: no such kernel in the file"
        );
        assert!(kernel.threads % 32 == 0 || kernel.threads == 1, "{name}");
        let clusters =
            kernel.cluster.is_none() || kernel.requires != RequiredArchitecture::AtLeast(80);
        assert!(clusters, "{name}: clusters are of sm_90");
        let Entry::Vacant(new) = builds.entry(build.name()) else {
            assert_eq!(builds[&build.name()], build, "{name}: another build of that name");
            continue;
        };
        let headers = build.headers_of_build();
        for (constant, _) in &build.constants {
            let used = |text: &str| text.contains(constant);
            let in_headers = headers.iter().any(|(_, text)| used(text));
            assert!(
                in_headers || used(build.source.source_text()),
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
fn every_family_has_a_fast_row_from_ampere_on() {
    let unmet = |name: &str, arch: &str| {
        let kernel = kernels().into_iter().find(|kernel| kernel.name() == name);
        kernel.unwrap_or_else(|| panic!("no kernel {name}")).unmet_by(arch)
    };
    // Packets of 16 bytes; mma.sync; tensor cores through the library's GEMMs.
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
    // Gradient kernels need more shared memory than some architectures have, so only one of the two
    // builds runs there.
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
