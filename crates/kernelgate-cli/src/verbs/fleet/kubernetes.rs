//! `kernelgate submit kubernetes`: prints the manifests of a Job that runs the shards and of a Job
//! that merges their records.

use std::path::PathBuf;

use anyhow::Context as _;
use kernelgate::display::value_of_flag;

use super::work_division::{ShardDivisionFlags, VerbOfShards, without_base_and_head_flags};
use crate::fleet::job_commands::{ClusterSubmissionPaths, WorkDividedIntoShards};
use crate::fleet::kubernetes::KubernetesJobOptions;

#[derive(Debug, clap::Args)]
pub struct KubernetesSubmitArguments {
    #[command(flatten)]
    division: ShardDivisionFlags,
    /// Print the manifests of the Kubernetes Jobs; this verb never applies them
    #[arg(long, required = true)]
    dry_run: bool,
    /// Name of the Kubernetes Jobs
    #[arg(id = "name", long = "name", value_name = "NAME", default_value = "kernelgate")]
    kubernetes_job_name: String,
    /// Container image with the package, the bench executables and kernelgate
    #[arg(value_name = "IMAGE", long = "image")]
    container_image: String,
    /// Folder of the package in the container image
    #[arg(long = "package-dir", value_name = "DIR", default_value = "/kernels")]
    package_folder_in_image: PathBuf,
    /// Bench executable in the image (repeatable), for the verb `bench`
    #[arg(long = "executable", value_name = "FILE")]
    bench_executables_in_image: Vec<PathBuf>,
    /// Folder where the volume claim is mounted
    #[arg(long = "folder", value_name = "DIR", default_value = "/submission")]
    volume_mount_folder: PathBuf,
    /// PersistentVolumeClaim of a volume that all pods can write
    #[arg(long = "claim", value_name = "NAME", default_value = "kernelgate")]
    persistent_volume_claim: String,
    /// Name of the GPU resource of which each pod gets one; empty for hosts without GPUs
    #[arg(long = "gpu-resource", value_name = "NAME", default_value = "nvidia.com/gpu")]
    gpu_resource_name: String,
    /// Node label that a pod's node must have, as KEY=VALUE (repeatable)
    #[arg(long, value_name = "LABEL=VALUE", value_parser = parse_node_label_flag)]
    node_selector: Vec<(String, String)>,
    /// Number of pods of the Job that run at the same time [default: all shards]
    #[arg(long = "parallelism", value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    max_parallel_pods: Option<u32>,
    /// Seconds after which the Kubernetes Job is ended
    #[arg(long = "deadline", value_name = "SECONDS")]
    job_time_limit_s: Option<u64>,
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
    let places = ClusterSubmissionPaths {
        kernelgate_program: "kernelgate".into(),
        package_folder: arguments.package_folder_in_image.clone(),
        submission_folder: arguments.volume_mount_folder.clone(),
    };
    let work = match verb {
        VerbOfShards::CargoBench => {
            anyhow::ensure!(
                !arguments.bench_executables_in_image.is_empty(),
                "--executable names each bench executable in the image"
            );
            let package = &arguments.package_folder_in_image;
            let executables = arguments
                .bench_executables_in_image
                .iter()
                .map(|path| (path.clone(), package.clone()));
            WorkDividedIntoShards::RunBenches {
                executables_with_package_folders: executables.collect(),
                bench_flags: flags.to_vec(),
            }
        }
        VerbOfShards::CompareBuilds => {
            let both = value_of_flag(flags, "--base-dir").zip(value_of_flag(flags, "--head-dir"));
            let (base, head) = both.context(
                "compare needs --base-dir and --head-dir: folders of executables in the image",
            )?;
            WorkDividedIntoShards::RunCompare {
                sides: [base.into(), head.into()],
                compare_flags: without_base_and_head_flags(flags),
            }
        }
        VerbOfShards::CalibrateThresholds => {
            let executables =
                arguments.bench_executables_in_image.first().and_then(|path| path.parent());
            let executables = executables.context("--executable names a bench in the image")?;
            WorkDividedIntoShards::RunCalibrate {
                executables_folder: executables.to_owned(),
                calibrate_flags: flags.to_vec(),
            }
        }
    };
    let options = KubernetesJobOptions {
        job_name: arguments.kubernetes_job_name.clone(),
        shard_count: division.shard_count,
        max_parallel_shards: arguments.max_parallel_pods.unwrap_or(division.shard_count),
        container_image: arguments.container_image.clone(),
        kubernetes_gpu_resource: Some(arguments.gpu_resource_name.clone())
            .filter(|name| !name.is_empty()),
        node_selector: arguments.node_selector.clone(),
        persistent_volume_claim: arguments.persistent_volume_claim.clone(),
        max_retries_per_shard: division.max_retries_per_shard,
        job_deadline_s: arguments.job_time_limit_s,
    };
    print!(
        "{}",
        options.manifests_of_shard_and_merge_jobs(
            &work,
            &places,
            division.max_relative_anchor_difference
        )
    );
    Ok(())
}
