//! This build script embeds the git commit into release builds of kernelgate, for `kernelgate
//! --version`. Builds of other Cargo profiles embed "unknown commit", so that a new commit does not
//! recompile this crate.

#![allow(clippy::disallowed_methods, reason = "variables of cargo")]

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let optimised = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit = optimised
        .then(commit_of_kernelgate_sources)
        .flatten()
        .unwrap_or_else(|| "unknown commit".to_owned());
    println!("cargo::rustc-env=BUILD_COMMIT={commit}");
}

/// Returns the commit of the crate's sources, from `.cargo_vcs_info.json` of a packed crate or from
/// git, followed by ` with changes` if tracked files are modified.
fn commit_of_kernelgate_sources() -> Option<String> {
    let packed = std::fs::read_to_string(".cargo_vcs_info.json").ok();
    if let Some(commit) = packed.as_deref().and_then(|text| text.split("\"sha1\": \"").nth(1)) {
        return commit.get(..12).map(str::to_owned);
    }
    for watched in ["../../.git/HEAD", "../../.git/index"] {
        println!("cargo::rerun-if-changed={watched}");
    }
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let clean = git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Some(if clean { commit } else { format!("{commit} with changes") })
}
