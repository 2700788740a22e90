//! `kernelgate submit kubernetes`: prints the manifests of a Job that runs the shards and of a Job
//! that merges their records.

use std::path::PathBuf;

use anyhow::Context as _;
use kernelgate::display::value_of_flag;

use super::work_division::{ShardDivisionFlags, VerbOfShards, without_base_and_head_flags};
use crate::fleet::job_commands::{SubmissionPaths, WorkDividedIntoShards};
use crate::fleet::kubernetes::KubernetesJobOptions;

#[derive(Debug, clap::Args)]
pub struct KubernetesSubmitArguments {
    #[command(flatten)]
    division: ShardDivisionFlags,
    /// Print the manifests of the Kubernetes Jobs; this verb never applies them
    #[arg(long, required = true)]
    dry_run: bool,
    /// Name of the Jobs
    #[arg(long, value_name = "NAME", default_value = "kernelgate")]
    name: String,
    /// Container image with the package, the bench executables and kernelgate
    #[arg(long)]
    image: String,
    /// Folder of the package in the container image
    #[arg(long, value_name = "DIR", default_value = "/kernels")]
    package_dir: PathBuf,
    /// Bench executable in the image (repeatable), for the verb `bench`
    #[arg(long, value_name = "FILE")]
    executable: Vec<PathBuf>,
    /// Folder where the volume claim is mounted
    #[arg(long, value_name = "DIR", default_value = "/submission")]
    folder: PathBuf,
    /// PersistentVolumeClaim of a volume that all pods can write
    #[arg(long, value_name = "NAME", default_value = "kernelgate")]
    claim: String,
    /// Name of the GPU resource of which each pod gets one; empty for hosts without GPUs
    #[arg(long, value_name = "NAME", default_value = "nvidia.com/gpu")]
    gpu_resource: String,
    /// Node label that a pod's node must have, as KEY=VALUE (repeatable)
    #[arg(long, value_name = "LABEL=VALUE", value_parser = parse_node_label_flag)]
    node_selector: Vec<(String, String)>,
    /// Number of pods of the Job that run at the same time [default: all shards]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    parallelism: Option<u32>,
    /// Seconds after which the Kubernetes Job is ended
    #[arg(long, value_name = "SECONDS")]
    deadline: Option<u64>,
}

fn parse_node_label_flag(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').filter(|(label, _)| !label.is_empty());
    let (label, value) = parts.ok_or_else(|| format!("`{text}`: a label is NAME=VALUE"))?;
    Ok((label.to_owned(), value.to_owned()))
}

/// Prints the manifests of the shards' Job and of the merge Job.
///
/// # Errors
/// Fails if the shards' command cannot be split into a verb and its flags.
pub fn print_manifests(arguments: &KubernetesSubmitArguments) -> anyhow::Result<()> {
    let division = &arguments.division;
    let (verb, flags) = division.split_into_verb_and_flags()?;
    let places = SubmissionPaths {
        program: "kernelgate".into(),
        package: arguments.package_dir.clone(),
        folder: arguments.folder.clone(),
    };
    let work = match verb {
        VerbOfShards::Bench => {
            anyhow::ensure!(
                !arguments.executable.is_empty(),
                "--executable names each bench executable in the image"
            );
            let package = &arguments.package_dir;
            let executables =
                arguments.executable.iter().map(|path| (path.clone(), package.clone()));
            WorkDividedIntoShards::Bench {
                executables: executables.collect(),
                flags: flags.to_vec(),
            }
        }
        VerbOfShards::Compare => {
            let both = value_of_flag(flags, "--base-dir").zip(value_of_flag(flags, "--head-dir"));
            let (base, head) = both.context(
                "compare needs --base-dir and --head-dir: folders of executables in the image",
            )?;
            WorkDividedIntoShards::Compare {
                sides: [base.into(), head.into()],
                flags: without_base_and_head_flags(flags),
            }
        }
        VerbOfShards::Calibrate => {
            let executables = arguments.executable.first().and_then(|path| path.parent());
            let executables = executables.context("--executable names a bench in the image")?;
            WorkDividedIntoShards::Calibrate {
                executables: executables.to_owned(),
                flags: flags.to_vec(),
            }
        }
    };
    let options = KubernetesJobOptions {
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
    print!(
        "{}",
        options.manifests_of_shard_and_merge_jobs(&work, &places, division.anchor_tolerance)
    );
    Ok(())
}
