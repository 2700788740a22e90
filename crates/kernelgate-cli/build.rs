//! The commit of an optimised build, for `kernelgate --version`. Builds of other profiles state no
//! commit, so that a new commit does not compile this crate again.

#![allow(clippy::disallowed_methods, reason = "variables of cargo")]

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let optimised = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit =
        optimised.then(build_commit).flatten().unwrap_or_else(|| "unknown commit".to_owned());
    println!("cargo::rustc-env=BUILD_COMMIT={commit}");
}

/// Returns the commit of a packed crate or of a checkout, followed by ` with changes` if tracked
/// files differ from it.
fn build_commit() -> Option<String> {
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
