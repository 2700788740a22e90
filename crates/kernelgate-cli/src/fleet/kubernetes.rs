//! Writes Kubernetes manifests: an Indexed Job that runs the shards, and a second Job that merges
//! their records. kernelgate only prints the manifests: the user applies them with `kubectl apply`.

use std::fmt::Write as _;

use super::job_commands::{ClusterSubmissionPaths, WorkDividedIntoShards};

/// Options of the Kubernetes Jobs that run and merge the shards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubernetesJobOptions {
    /// Name of the Kubernetes Jobs.
    pub job_name: String,
    /// Number of shards.
    pub shard_count: u32,
    /// Number of shards (pods) that may run at the same time.
    pub max_parallel_shards: u32,
    /// Container image that contains the package, the bench executables and the program kernelgate.
    pub container_image: String,
    /// Name of the Kubernetes resource of a GPU, of which each shard gets one: "nvidia.com/gpu";
    /// `None` for shards on the CPU.
    pub kubernetes_gpu_resource: Option<String>,
    /// Labels that a Kubernetes node must have to run the shards.
    pub node_selector: Vec<(String, String)>,
    /// Name of the PersistentVolumeClaim that all pods mount at the submission's folder.
    pub persistent_volume_claim: String,
    /// Number of repetitions of a shard that failed.
    pub max_retries_per_shard: u32,
    /// Seconds after which Kubernetes ends the shards' Job; `None` for no limit.
    pub job_deadline_s: Option<u64>,
}

impl KubernetesJobOptions {
    /// Returns the manifests of both Jobs as one YAML stream of two documents.
    pub fn manifests_of_shard_and_merge_jobs(
        &self,
        work: &WorkDividedIntoShards,
        places: &ClusterSubmissionPaths,
        tolerance: Option<f64>,
    ) -> String {
        format!(
            "{}---\n{}",
            self.shard_job_manifest(work, places),
            self.merge_job_manifest(work, places, tolerance)
        )
    }

    fn shard_job_manifest(
        &self,
        work: &WorkDividedIntoShards,
        places: &ClusterSubmissionPaths,
    ) -> String {
        let Self {
            job_name: name,
            shard_count: shards,
            max_parallel_shards: parallelism,
            max_retries_per_shard: retries,
            ..
        } = self;
        let mut script = String::from(
            "export KERNELGATE_SHARD=$((JOB_COMPLETION_INDEX + 1))/$KERNELGATE_SHARD_COUNT\n",
        );
        script += &work.shell_lines_of_shard(places, "$HOSTNAME");
        script += "exit $code\n";
        let deadline = self
            .job_deadline_s
            .map_or(String::new(), |s| format!("  activeDeadlineSeconds: {s}\n"));
        // The shards' Job does not repeat exit code 1, which means that a case is wrong: another
        // attempt would give the same result. A pod that is lost because its node fails does not
        // count as one of the shard's attempts.
        format!(
            "apiVersion: batch/v1\nkind: Job\nmetadata:\n  name: {name}\nspec:\n  \
             completionMode: Indexed\n  completions: {shards}\n  parallelism: {parallelism}\n  \
             backoffLimitPerIndex: {retries}\n  maxFailedIndexes: {shards}\n{deadline}  \
             podFailurePolicy:\n    rules:\n      - action: Ignore\n        onPodConditions:\n          \
             - type: DisruptionTarget\n            status: \"True\"\n      - action: FailIndex\n        onExitCodes:\n          \
             operator: In\n          values: [1]\n  template:\n    spec:\n      \
             restartPolicy: Never\n{}{}",
            self.node_selector_yaml(),
            self.container_yaml("shard", &script, places, true)
        )
    }

    // The user applies the merge Job after the shards' Job has ended, because no Kubernetes Job can
    // depend on another.
    fn merge_job_manifest(
        &self,
        work: &WorkDividedIntoShards,
        places: &ClusterSubmissionPaths,
        tolerance: Option<f64>,
    ) -> String {
        let Self { job_name: name, .. } = self;
        let script = work.shell_lines_of_merge(places, tolerance) + "exit $code\n";
        format!(
            "# Apply it when job/{name} has ended: `kubectl wait --for=condition=complete \
             job/{name}`, or\n# `--for=condition=failed` where a shard failed.\n\
             apiVersion: batch/v1\nkind: Job\nmetadata:\n  name: {name}-merge\nspec:\n  \
             backoffLimit: 0\n  template:\n    spec:\n      restartPolicy: Never\n{}",
            self.container_yaml("merge", &script, places, false)
        )
    }

    fn node_selector_yaml(&self) -> String {
        if self.node_selector.is_empty() {
            return String::new();
        }
        let labels = self.node_selector.iter();
        labels.fold("      nodeSelector:\n".to_owned(), |text, (label, value)| {
            format!("{text}        {}: {}\n", yaml_quoted(label), yaml_quoted(value))
        })
    }

    fn container_yaml(
        &self,
        name: &str,
        script: &str,
        places: &ClusterSubmissionPaths,
        measures: bool,
    ) -> String {
        let Self {
            container_image: image,
            persistent_volume_claim: claim,
            shard_count: shards,
            ..
        } = self;
        let mut text = format!(
            "      containers:\n        - name: {name}\n          image: {}\n",
            yaml_quoted(image)
        );
        text += "          command: [\"bash\", \"-c\"]\n          args:\n            - |\n";
        for line in script.lines() {
            let _ = writeln!(text, "              {line}");
        }
        if measures {
            let _ = write!(
                text,
                "          env:\n            - name: KERNELGATE_SHARD_COUNT\n              \
                 value: \"{shards}\"\n"
            );
            if let Some(resource) = &self.kubernetes_gpu_resource {
                let _ = write!(
                    text,
                    "          resources:\n            limits:\n              {}: 1\n",
                    yaml_quoted(resource)
                );
            }
        }
        let folder = yaml_quoted(&places.submission_folder.display().to_string());
        let _ = write!(
            text,
            "          volumeMounts:\n            - name: submission\n              mountPath: \
             {folder}\n      volumes:\n        - name: submission\n          \
             persistentVolumeClaim:\n            claimName: {}\n",
            yaml_quoted(claim)
        );
        text
    }
}

/// Quotes a text as a JSON string, which YAML accepts as a scalar.
fn yaml_quoted(text: &str) -> String {
    format!("{text:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifests_are_an_indexed_job_and_a_merge_job() {
        let places = ClusterSubmissionPaths {
            kernelgate_program: "kernelgate".into(),
            package_folder: "/src".into(),
            submission_folder: "/shared".into(),
        };
        let options = KubernetesJobOptions {
            job_name: "kernelgate".to_owned(),
            shard_count: 8,
            max_parallel_shards: 4,
            container_image: "registry.example.com/kernels:1".to_owned(),
            kubernetes_gpu_resource: Some("nvidia.com/gpu".to_owned()),
            node_selector: vec![(
                "nvidia.com/gpu.product".to_owned(),
                "NVIDIA-H100-80GB-HBM3".to_owned(),
            )],
            persistent_volume_claim: "results".to_owned(),
            max_retries_per_shard: 2,
            job_deadline_s: Some(3600),
        };
        let executables = vec![("/src/bin/spin".into(), "/src".into())];
        let work = WorkDividedIntoShards::RunBenches {
            executables_with_package_folders: executables,
            bench_flags: vec!["--quick".to_owned()],
        };
        insta::assert_snapshot!(options.manifests_of_shard_and_merge_jobs(&work, &places, None));
    }
}
