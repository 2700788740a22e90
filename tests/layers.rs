//! The import rules of ARCHITECTURE.md, checked on the source text: which module may use which, and where external crates may appear.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Module of `src/` and the modules it may import from.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("exit", &[]),
    ("simd", &[]),
    ("stats", &[]),
    ("workload", &["simd"]),
    ("backend", &["simd", "workload"]),
    ("suite", &["workload", "backend"]),
    ("verify", &["workload", "backend"]),
    ("trace", &["backend"]),
    ("measure", &["simd", "stats", "workload", "backend", "trace"]),
    ("record", &["workload", "backend", "verify", "measure"]),
    ("gate", &["exit", "stats", "record"]),
    ("report", &["stats", "record", "gate"]),
    ("harness", &["exit", "workload", "backend", "suite", "verify", "measure", "record", "report"]),
    ("builtin", &["workload", "backend", "suite", "harness"]),
    ("compare", &["exit", "stats", "record", "gate"]),
    (
        "cli",
        &[
            "exit", "stats", "workload", "backend", "suite", "verify", "trace", "measure", "record", "gate", "report", "harness",
            "builtin", "compare",
        ],
    ),
];

/// External crates that stay in their place: (crate, path prefixes).
const CONFINED: &[(&str, &[&str])] = &[
    ("criterion", &["harness/", "measure/criterion.rs"]),
    ("clap", &["harness/args.rs", "harness/mod.rs", "cli/", "main.rs"]),
    ("cudarc", &["backend/cuda/", "trace/cupti.rs"]),
    ("nvml_wrapper", &["backend/cuda/telemetry.rs"]),
    ("nvtx", &["backend/cuda/range.rs"]),
    ("libloading", &["backend/cuda/library.rs"]),
    ("object", &["backend/cuda/cubin.rs"]),
    ("faer", &["backend/cpu/", "measure/limits/cpu.rs", "workload/"]),
    ("pulp", &["simd.rs", "backend/cpu/", "measure/limits/cpu.rs"]),
    ("safetensors", &["cli/verify.rs"]),
    ("quick_junit", &["report/junit.rs"]),
    ("sysinfo", &["record/environment.rs", "harness/session.rs", "cli/doctor.rs"]),
    ("serde_json", &["record/file.rs", "compare/build.rs", "cli/"]),
    ("ctrlc", &["harness/session.rs", "compare/session.rs"]),
    ("indicatif", &["compare/progress.rs"]),
    ("xxhash_rust", &["record/file.rs", "verify/"]),
    ("anyhow", &["main.rs", "cli/"]),
];

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("tests.rs") {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// Code of a file up to its tests, without comments.
fn code(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default().to_owned();
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

fn words_after<'a>(text: &'a str, prefix: &'a str) -> impl Iterator<Item = &'a str> {
    text.match_indices(prefix).filter_map(move |(at, _)| {
        let boundary = text[..at].chars().next_back().is_none_or(|c| !c.is_alphanumeric() && c != '_' && c != ':');
        let rest = &text[at + prefix.len()..];
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        boundary.then_some(&rest[..end])
    })
}

fn each_source(mut check: impl FnMut(&str, &str)) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for path in sources(&root) {
        let name = path.strip_prefix(&root).unwrap().to_string_lossy().replace('\\', "/");
        check(&name, &code(&path));
    }
}

#[test]
fn modules_import_only_from_below() {
    let known: BTreeSet<&str> = MAY_IMPORT.iter().map(|(module, _)| *module).collect();
    let mut wrong = Vec::new();
    each_source(|name, code| {
        let module = name.split('/').next().unwrap().trim_end_matches(".rs");
        if ["lib", "main"].contains(&module) {
            return;
        }
        let allowed = MAY_IMPORT.iter().find(|(known, _)| *known == module).map(|(_, allowed)| *allowed);
        let allowed = allowed.unwrap_or_else(|| panic!("src/{name}: module `{module}` has no rule here"));
        for used in words_after(code, "crate::").filter(|used| known.contains(used) && *used != module) {
            if !allowed.contains(&used) {
                wrong.push(format!("src/{name} imports crate::{used}"));
            }
        }
    });
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn external_crates_stay_in_their_place() {
    let mut wrong = Vec::new();
    let mut seen = BTreeSet::new();
    each_source(|name, code| {
        for (external, places) in CONFINED {
            let used = words_after(code, &format!("{external}::")).next().is_some();
            if used && !places.iter().any(|place| name.starts_with(place)) {
                wrong.push(format!("src/{name} uses {external}"));
            }
            if used {
                seen.insert(*external);
            }
        }
    });
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(seen.len(), CONFINED.len(), "a rule for a crate that nobody uses");
}

#[test]
fn unsafe_code_stays_with_the_devices() {
    each_source(|name, code| {
        let allowed = name.starts_with("backend/cuda/") || name.starts_with("trace/cupti");
        let used = code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe");
        assert!(allowed || !used, "src/{name} has unsafe code");
    });
}

#[test]
fn no_file_is_a_god_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for folder in ["src", "benches", "examples", "tests"] {
        for path in sources(&root.join(folder)) {
            let lines = std::fs::read_to_string(&path).unwrap().lines().count();
            assert!(lines <= 500, "{} has {lines} lines", path.display());
        }
    }
}
