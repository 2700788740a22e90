//! Tests of ARCHITECTURE.md's import rules on the source text of every crate: allowed uses between
//! modules, no import circles of files, and files that may use external crates. Cargo itself checks
//! which crate of the workspace may use which.

#![allow(clippy::unwrap_used)]

mod imports;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use imports::{
    code_without_tests_and_comments, module_path_of_file, modules_used_by_code,
    rust_files_without_tests_below, words_after_path_prefix,
};

/// Import rules of the modules of one crate.
struct CrateImportRules {
    /// Folder of the Rust sources of the crate.
    source_folder: &'static str,
    /// Each top-level module with a rule, and the modules of the same crate that it may use.
    usable_modules_by_module: &'static [(&'static str, &'static [&'static str])],
    /// Modules of the same crate that a module without a rule may use; with `None`, every module
    /// must have a rule.
    usable_modules_without_rule: Option<&'static [&'static str]>,
    /// External crates that only some files may use: (crate, path prefixes of the files).
    file_prefixes_by_confined_crate: &'static [(&'static str, &'static [&'static str])],
}

const IMPORT_RULES_OF_ALL_CRATES: &[CrateImportRules] = &[
    CrateImportRules {
        source_folder: "crates/kernelgate-cuda/src",
        usable_modules_by_module: &[
            ("case_failure", &[]),
            ("error", &["case_failure"]),
            ("architecture", &[]),
            ("layout", &[]),
            ("regular_file", &[]),
            ("library", &["architecture", "regular_file"]),
            ("compiler", &["architecture", "layout", "library"]),
            ("driver", &["error", "architecture", "layout", "regular_file", "library", "compiler"]),
            ("libraries", &["error", "library", "driver"]),
            ("spec", &["error", "architecture", "compiler", "driver"]),
            ("instruments", &["error", "driver", "spec"]),
            ("observe", &["error", "library", "driver"]),
            ("testing", &["error", "driver"]),
        ],
        usable_modules_without_rule: None,
        file_prefixes_by_confined_crate: &[
            ("nvml_wrapper", &["observe/telemetry.rs"]),
            ("nvtx", &["observe/range.rs"]),
            ("libloading", &["library/opened_library.rs", "testing/c_library.rs"]),
            ("object", &["compiler/cubin.rs", "compiler/code.rs", "library/complete_file.rs"]),
            ("xxhash_rust", &["compiler/code.rs"]),
            ("rayon", &["driver/memory/staged_copies.rs"]),
        ],
    },
    CrateImportRules {
        source_folder: "crates/kernelgate-numerics/src",
        usable_modules_by_module: &[
            ("simd", &[]),
            ("gemm", &["simd"]),
            ("random", &[]),
            ("stats", &[]),
            ("tensor", &[]),
        ],
        usable_modules_without_rule: None,
        file_prefixes_by_confined_crate: &[
            ("faer", &["gemm.rs"]),
            ("pulp", &["simd.rs"]),
            ("half", &["tensor.rs"]),
        ],
    },
    CrateImportRules {
        source_folder: "crates/kernelgate/src",
        usable_modules_by_module: &[
            ("exit", &[]),
            ("trace", &[]),
            ("workload", &[]),
            ("backend", &["workload"]),
            ("suite", &["workload", "backend"]),
            ("attach", &["workload", "backend", "suite"]),
            ("verify", &["workload", "backend"]),
            ("measure", &["workload", "backend"]),
            ("record", &["workload", "backend", "verify", "measure"]),
            ("display", &["measure", "record"]),
            ("protocol", &["trace", "verify", "measure", "record"]),
            (
                "harness",
                &[
                    "exit", "trace", "workload", "backend", "suite", "attach", "verify", "measure",
                    "record", "display", "protocol",
                ],
            ),
        ],
        usable_modules_without_rule: None,
        file_prefixes_by_confined_crate: &[
            ("criterion", &["harness/", "measure/criterion.rs"]),
            ("clap", &["harness/settings/"]),
            ("pulp", &["measure/limits/"]),
            ("sysinfo", &["record/origin/environment.rs", "harness/recording/invocation.rs"]),
            (
                "serde_json",
                &[
                    "attach/safetensors.rs",
                    "backend/failure_facts.rs",
                    "record/criterion_store.rs",
                    "record/files/json_columns.rs",
                    "record/files/file.rs",
                    "record/files/file/",
                    "harness/recording/criterion_results.rs",
                ],
            ),
            ("ctrlc", &["harness/recording/recorder.rs"]),
            ("xxhash_rust", &["record/files/file.rs", "record/files/file/", "verify/"]),
        ],
    },
    CrateImportRules {
        source_folder: "crates/kernelgate-trace/src",
        usable_modules_by_module: &[
            ("error", &[]),
            ("model", &[]),
            ("read", &["error", "model"]),
            ("analyze", &["error", "model", "read"]),
            ("stats", &["error", "model", "read", "analyze"]),
            ("diagnose", &["error", "model", "read", "analyze", "stats"]),
            ("export", &["model", "analyze"]),
        ],
        usable_modules_without_rule: None,
        file_prefixes_by_confined_crate: &[
            ("parquet", &["read/nsys/database/"]),
            ("rusqlite", &["read/nsys/database/"]),
            ("flate2", &["read/json_source.rs"]),
            ("csv", &["read/ncu.rs", "stats/table.rs"]),
            ("cpp_demangle", &["read/demangle.rs"]),
            ("gimli", &["read/ncu_report/source_lines.rs"]),
            ("object", &["read/ncu_report/source_lines.rs"]),
            ("regex", &["analyze/ranges/restricted_trace.rs", "stats/table.rs"]),
            ("tempfile", &["read/convert.rs", "read/nsys/database/"]),
        ],
    },
    CrateImportRules {
        source_folder: "crates/kernelgate-cli/src",
        usable_modules_by_module: &[
            ("gate", &[]),
            ("commands", &[]),
            ("benches", &["commands"]),
            ("compare", &["gate", "commands", "benches"]),
            ("fleet", &["gate", "benches", "compare"]),
            ("bisect", &["gate", "compare"]),
            ("history", &["compare"]),
            ("report", &["gate", "bisect", "history"]),
            ("plot", &[]),
            ("pages", &["gate", "history", "report", "plot"]),
            (
                "verbs",
                &[
                    "gate", "commands", "benches", "compare", "fleet", "bisect", "history",
                    "report", "plot", "pages",
                ],
            ),
        ],
        usable_modules_without_rule: None,
        file_prefixes_by_confined_crate: &[
            ("clap", &["lib.rs", "verbs/"]),
            ("safetensors", &["verbs/correct/verify.rs"]),
            ("quick_junit", &["report/formats/junit.rs"]),
            ("plotters", &["plot/render.rs"]),
            ("ttf_noto_sans", &["plot/font.rs"]),
            ("ab_glyph", &["plot/font.rs"]),
            ("png", &["plot/render.rs"]),
            ("maud", &["pages/"]),
            ("csv", &["pages/tables.rs"]),
            (
                "toml",
                &["gate/rules/rules_file.rs", "compare/sides/seeded_builds.rs", "verbs/init.rs"],
            ),
            ("sysinfo", &["verbs/doctor.rs"]),
            ("rayon", &["fleet/merge.rs", "gate/comparison_shard.rs", "gate/paired/tests/"]),
            ("rustix", &["benches/child_process.rs"]),
            (
                "serde_json",
                &["benches/", "gate/calibration/mod.rs", "history/case_index.rs", "verbs/"],
            ),
            ("ctrlc", &["compare/error.rs", "compare/session.rs", "verbs/shared/interrupt.rs"]),
            ("indicatif", &["compare/progress.rs"]),
            ("anyhow", &["lib.rs", "benches/", "verbs/"]),
        ],
    },
    CrateImportRules {
        source_folder: "src",
        usable_modules_by_module: &[
            ("math", &[]),
            ("parallel", &[]),
            ("e4m3", &[]),
            ("draw", &[]),
            ("family", &[]),
            ("kernel_files", &[]),
            ("resnet18", &["collective", "family", "kernel_files", "math", "parallel", "st_bif"]),
            ("transformer", &["attention", "draw", "family", "kernel_files", "math", "parallel"]),
        ],
        // Families.
        usable_modules_without_rule: Some(&[
            "draw",
            "e4m3",
            "family",
            "kernel_files",
            "math",
            "parallel",
        ]),
        file_prefixes_by_confined_crate: &[],
    },
];

fn workspace_root_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Path of each source file of a crate, with its code without tests and comments.
fn source_files_and_code_of_crate(rules: &CrateImportRules) -> Vec<(String, String)> {
    let folder = workspace_root_folder().join(rules.source_folder);
    let name =
        |path: &PathBuf| path.strip_prefix(&folder).unwrap().to_string_lossy().replace('\\', "/");
    rust_files_without_tests_below(&folder)
        .iter()
        .map(|path| (name(path), code_without_tests_and_comments(path)))
        .collect()
}

#[test]
fn modules_use_only_the_modules_that_their_rule_allows() {
    let mut wrong = Vec::new();
    for rules in IMPORT_RULES_OF_ALL_CRATES {
        let sources = source_files_and_code_of_crate(rules);
        let top = |name: &str| name.split('/').next().unwrap().trim_end_matches(".rs").to_owned();
        let modules: BTreeSet<String> = sources.iter().map(|(name, _)| top(name)).collect();
        for (name, code) in sources {
            let module = top(&name);
            if ["lib", "main", "bin"].contains(&&*module) {
                continue;
            }
            let rule = rules.usable_modules_by_module.iter().find(|(ruled, _)| *ruled == module);
            let allowed = rule.map(|(_, allowed)| *allowed).or(rules.usable_modules_without_rule);
            let allowed = allowed.unwrap_or_else(|| {
                panic!("{}/{name}: module `{module}` has no rule here", rules.source_folder)
            });
            for used in
                words_after_path_prefix(&code, "crate::").filter(|used| modules.contains(*used))
            {
                if used != module && !allowed.contains(&used) {
                    wrong.push(format!("{}/{name} imports crate::{used}", rules.source_folder));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    for rules in IMPORT_RULES_OF_ALL_CRATES {
        let sources = source_files_and_code_of_crate(rules);
        let modules: BTreeSet<String> =
            sources.iter().map(|(name, _)| module_path_of_file(name)).collect();
        let mut graph: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (name, code) in &sources {
            graph.insert(
                module_path_of_file(name),
                modules_used_by_code(&module_path_of_file(name), code, &modules),
            );
        }
        // A file that uses no remaining file, or that no remaining file uses, is in no circle of
        // imports.
        loop {
            let left: BTreeSet<String> = graph.keys().cloned().collect();
            graph.values_mut().for_each(|used| used.retain(|module| left.contains(module)));
            let used: BTreeSet<String> = graph.values().flatten().cloned().collect();
            graph.retain(|module, uses| !uses.is_empty() && used.contains(module));
            if graph.len() == left.len() {
                break;
            }
        }
        assert!(graph.is_empty(), "{}: a circle is among {graph:?}", rules.source_folder);
    }
}

#[test]
fn external_crates_are_used_only_in_the_files_of_their_rule() {
    let mut wrong = Vec::new();
    for rules in IMPORT_RULES_OF_ALL_CRATES {
        let mut seen = BTreeSet::new();
        for (name, code) in source_files_and_code_of_crate(rules) {
            for (external, places) in rules.file_prefixes_by_confined_crate {
                if words_after_path_prefix(&code, &format!("{external}::")).next().is_none() {
                    continue;
                }
                seen.insert(*external);
                if !places.iter().any(|place| name.starts_with(place)) {
                    wrong.push(format!("{}/{name} uses {external}", rules.source_folder));
                }
            }
        }
        assert_eq!(
            seen.len(),
            rules.file_prefixes_by_confined_crate.len(),
            "{}: a rule for a crate that nobody uses",
            rules.source_folder
        );
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Checks the number of crates that a package which uses `kernelgate` compiles.
#[test]
fn an_outside_package_compiles_at_most_106_crates() {
    let mut tree = std::process::Command::new(env!("CARGO"));
    tree.args(["tree", "--package", "kernelgate", "--edges", "normal,build", "--prefix", "none"]);
    let output =
        tree.args(["--locked", "--offline"]).current_dir(workspace_root_folder()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let crates: BTreeSet<&str> = text.lines().map(|line| line.trim_end_matches(" (*)")).collect();
    assert!((50..=106).contains(&crates.len()), "{} crates: {crates:#?}", crates.len());
}
