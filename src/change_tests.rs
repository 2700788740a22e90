//! What the check after timing stands on: the symmetries of the workloads hold, and the sources
//! that a workload names are all that its reference follows from.

use std::path::{Path, PathBuf};

use kernelgate::workload::symmetry::check;
use kernelgate::workload::{Effort, Scale};

use super::all;

/// Small problems, of which every row is in the reference, and how many symmetries change them.
const SMALL: &[(&str, &str, usize)] = &[
    ("st_bif/forward", "n=1000 t=5 level=8 dtype=f32 spikes=int8", 1),
    ("st_bif/backward", "n=1000 t=5 level=8 dtype=f32", 2),
    ("st_bif/rate", "n=1000 t=5", 1),
    ("attention/forward", "s=33 d=64 mask=causal dtype=bf16 tokens=66", 1),
    ("attention/backward", "s=33 d=64 mask=full dtype=f32 tokens=66", 2),
    ("attention/scores", "b=2 h=3 s=20 d=64 dtype=f32", 1),
    ("attention/softmax", "b=2 h=3 s=20 dtype=f32", 1),
    ("attention/values", "b=2 h=3 s=20 d=64 dtype=f32", 2),
    ("resnet18/inference", "stem=imagenet w=8 b=3 t=4 level=8 weights=dyadic dtype=f32", 1),
];

#[test]
fn symmetries_hold() {
    let suites = all();
    for (name, axes, wanted) in SMALL {
        let suite = suites.iter().find(|suite| suite.name() == *name).expect("a workload");
        let overrides: Vec<_> = axes.split(' ').map(|axis| axis.parse().unwrap()).collect();
        let points = suite.points(Effort::Thorough, Scale::Host, &overrides).unwrap();
        let bound = suite.bind(&points[0]).unwrap();
        let checked =
            check(bound.problem(), 3, 1e-12).unwrap_or_else(|why| panic!("{name}: {why}"));
        assert_eq!(checked, *wanted, "{name}");
    }
}

/// Those of the folders' files that a definition imports are in its list.
#[test]
fn a_definition_names_every_source_that_it_imports() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).canonicalize().unwrap().join("src");
    let text = |path: &Path| std::fs::read_to_string(path).unwrap();
    let mut definitions = 0;
    for file in [
        "attention/definition.rs",
        "attention/components.rs",
        "st_bif/definition.rs",
        "st_bif/rate/definition.rs",
        "denoise/definition.rs",
        "resnet18/definition.rs",
    ] {
        let path = folder.join(file);
        let source = text(&path);
        let list = source.split_once("const DEFINITION").expect("a list").1;
        let list = list.split_once("];").expect("an end").0;
        let named: Vec<PathBuf> = list
            .split("include_str!(\"")
            .skip(1)
            .map(|rest| path.with_file_name(rest.split_once('"').unwrap().0))
            .map(|path| path.canonicalize().unwrap())
            .collect();
        assert!(named.contains(&path), "{file} names itself");
        for named_path in &named {
            let whole = text(named_path);
            let code = whole.split("#[cfg(test)]").next().unwrap();
            for line in code.lines() {
                let import = line.trim_start_matches("pub ").strip_prefix("use ");
                // What work runs on, which no value follows from.
                let apart = ["kernelgate", "crate::parallel;"];
                let Some(import) =
                    import.filter(|import| !apart.iter().any(|a| import.starts_with(a)))
                else {
                    continue;
                };
                let imported = if let Some(module) = import.strip_prefix("super::") {
                    let module = module.split(|c: char| !c.is_alphanumeric() && c != '_').next();
                    named_path.with_file_name(format!("{}.rs", module.unwrap()))
                } else if let Some(item) = import.strip_prefix("crate::") {
                    let module = item.split("::{").next().unwrap();
                    let module =
                        if module == item { item.rsplit_once("::").unwrap().0 } else { module };
                    folder.join(module.replace("::", "/")).with_extension("rs")
                } else {
                    continue;
                };
                assert!(named.contains(&imported), "{file} does not name {}", imported.display());
            }
        }
        definitions += 1;
    }
    assert_eq!(definitions, 6);
}
