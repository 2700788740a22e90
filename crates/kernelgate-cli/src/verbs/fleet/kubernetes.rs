//! Prints the manifests of `kernelgate submit kubernetes`.

use std::path::PathBuf;

use anyhow::Context as _;
use kernelgate::display::value_of_flag;

use super::work_division::{ShardDivision, ShardVerb, without_side_flags};
use crate::fleet::job_commands::{DividedWork, SubmissionPlaces};
use crate::fleet::kubernetes::KubernetesOptions;

#[derive(Debug, clap::Args)]
pub struct KubernetesArguments {
    #[command(flatten)]
    division: ShardDivision,
    /// Print the manifests; this verb never applies them
    #[arg(long, required = true)]
    dry_run: bool,
    /// Name of the Jobs
    #[arg(long, value_name = "NAME", default_value = "kernelgate")]
    name: String,
    /// Image with the package, the bench executables and kernelgate
    #[arg(long)]
    image: String,
    /// Folder of the package in the image
    #[arg(long, value_name = "DIR", default_value = "/kernels")]
    package_dir: PathBuf,
    /// Bench executable in the image (repeatable), for `bench`
    #[arg(long, value_name = "FILE")]
    executable: Vec<PathBuf>,
    /// Folder where the claim is mounted
    #[arg(long, value_name = "DIR", default_value = "/submission")]
    folder: PathBuf,
    /// Claim of a volume that all pods can write
    #[arg(long, value_name = "NAME", default_value = "kernelgate")]
    claim: String,
    /// Resource of a GPU, one a pod; empty for hosts
    #[arg(long, value_name = "NAME", default_value = "nvidia.com/gpu")]
    gpu_resource: String,
    /// Label that a node must have (repeatable)
    #[arg(long, value_name = "LABEL=VALUE", value_parser = parse_node_label)]
    node_selector: Vec<(String, String)>,
    /// Number of pods that run at the same time [default: all shards]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    parallelism: Option<u32>,
    /// Seconds after which the Job is ended
    #[arg(long, value_name = "SECONDS")]
    deadline: Option<u64>,
}

fn parse_node_label(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').filter(|(label, _)| !label.is_empty());
    let (label, value) = parts.ok_or_else(|| format!("`{text}`: a label is NAME=VALUE"))?;
    Ok((label.to_owned(), value.to_owned()))
}

/// Prints both manifests.
///
/// # Errors
/// Fails if the command cannot be divided.
pub fn run(arguments: &KubernetesArguments) -> anyhow::Result<()> {
    let division = &arguments.division;
    let (verb, flags) = division.split_verb_and_flags()?;
    let places = SubmissionPlaces {
        program: "kernelgate".into(),
        package: arguments.package_dir.clone(),
        folder: arguments.folder.clone(),
    };
    let work = match verb {
        ShardVerb::Bench => {
            anyhow::ensure!(
                !arguments.executable.is_empty(),
                "--executable names each bench executable in the image"
            );
            let package = &arguments.package_dir;
            let executables =
                arguments.executable.iter().map(|path| (path.clone(), package.clone()));
            DividedWork::Bench { executables: executables.collect(), flags: flags.to_vec() }
        }
        ShardVerb::Compare => {
            let both = value_of_flag(flags, "--base-dir").zip(value_of_flag(flags, "--head-dir"));
            let (base, head) = both.context(
                "compare needs --base-dir and --head-dir: folders of executables in the image",
            )?;
            DividedWork::Compare {
                sides: [base.into(), head.into()],
                flags: without_side_flags(flags),
            }
        }
        ShardVerb::Calibrate => {
            let executables = arguments.executable.first().and_then(|path| path.parent());
            let executables = executables.context("--executable names a bench in the image")?;
            DividedWork::Calibrate { executables: executables.to_owned(), flags: flags.to_vec() }
        }
    };
    let options = KubernetesOptions {
        name: arguments.name.clone(),
        shards: division.shards,
        parallelism: arguments.parallelism.unwrap_or(division.shards),
        image: arguments.image.clone(),
        gpu_resource: Some(arguments.gpu_resource.clone()).filter(|name| !name.is_empty()),
        node_selector: arguments.node_selector.clone(),
        claim: arguments.claim.clone(),
        retries: division.retries,
        deadline_s: arguments.deadline,
    };
    print!("{}", options.job_manifests(&work, &places, division.anchor_tolerance));
    Ok(())
}
