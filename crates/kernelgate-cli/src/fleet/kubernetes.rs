//! Kubernetes manifests as text: an Indexed Job for the shards and a second Job that merges. The
//! manifests are only printed: the user runs `kubectl apply`.

use std::fmt::Write as _;

use super::job_commands::{DividedWork, SubmissionPlaces};

/// Options of the manifests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubernetesOptions {
    /// Name of the Jobs.
    pub name: String,
    /// Number of shards.
    pub shards: u32,
    /// Number of shards that may run at the same time.
    pub parallelism: u32,
    /// Container image with the package, its executables and the program.
    pub image: String,
    /// Name of the GPU resource in Kubernetes: "nvidia.com/gpu"; absent for the CPU.
    pub gpu_resource: Option<String>,
    /// Labels that a Kubernetes node must have.
    pub node_selector: Vec<(String, String)>,
    /// Claim of the volume that all pods mount at the folder of the submission.
    pub claim: String,
    /// Number of further attempts for a shard that failed.
    pub retries: u32,
    /// Seconds after which Kubernetes ends the Jobs.
    pub deadline_s: Option<u64>,
}

impl KubernetesOptions {
    /// The manifests of both Jobs as one stream of documents.
    pub fn job_manifests(
        &self,
        work: &DividedWork,
        places: &SubmissionPlaces,
        tolerance: Option<f64>,
    ) -> String {
        format!("{}---\n{}", self.shards(work, places), self.merge_job(work, places, tolerance))
    }

    fn shards(&self, work: &DividedWork, places: &SubmissionPlaces) -> String {
        let Self { name, shards, parallelism, retries, .. } = self;
        let mut script = String::from(
            "export KERNELGATE_SHARD=$((JOB_COMPLETION_INDEX + 1))/$KERNELGATE_SHARD_COUNT\n",
        );
        script += &work.shard_script_lines(places, "$HOSTNAME");
        script += "exit $code\n";
        let deadline =
            self.deadline_s.map_or(String::new(), |s| format!("  activeDeadlineSeconds: {s}\n"));
        // Exit code 1 means that a case is wrong, which another attempt would not change. A pod
        // that is lost with its node does not count as an attempt.
        format!(
            "apiVersion: batch/v1\nkind: Job\nmetadata:\n  name: {name}\nspec:\n  \
             completionMode: Indexed\n  completions: {shards}\n  parallelism: {parallelism}\n  \
             backoffLimitPerIndex: {retries}\n  maxFailedIndexes: {shards}\n{deadline}  \
             podFailurePolicy:\n    rules:\n      - action: Ignore\n        onPodConditions:\n          \
             - type: DisruptionTarget\n            status: \"True\"\n      - action: FailIndex\n        onExitCodes:\n          \
             operator: In\n          values: [1]\n  template:\n    spec:\n      \
             restartPolicy: Never\n{}{}",
            self.node_selector(),
            self.container_manifest("shard", &script, places, true)
        )
    }

    // The merge polls until every shard has ended, because no Job of Kubernetes depends on another.
    fn merge_job(
        &self,
        work: &DividedWork,
        places: &SubmissionPlaces,
        tolerance: Option<f64>,
    ) -> String {
        let Self { name, .. } = self;
        let script = work.merge_script_lines(places, tolerance) + "exit $code\n";
        format!(
            "# Apply it when job/{name} has ended: `kubectl wait --for=condition=complete \
             job/{name}`, or\n# `--for=condition=failed` where a shard failed.\n\
             apiVersion: batch/v1\nkind: Job\nmetadata:\n  name: {name}-merge\nspec:\n  \
             backoffLimit: 0\n  template:\n    spec:\n      restartPolicy: Never\n{}",
            self.container_manifest("merge", &script, places, false)
        )
    }

    fn node_selector(&self) -> String {
        if self.node_selector.is_empty() {
            return String::new();
        }
        let labels = self.node_selector.iter();
        labels.fold("      nodeSelector:\n".to_owned(), |text, (label, value)| {
            format!("{text}        {}: {}\n", yaml_scalar(label), yaml_scalar(value))
        })
    }

    fn container_manifest(
        &self,
        name: &str,
        script: &str,
        places: &SubmissionPlaces,
        measures: bool,
    ) -> String {
        let Self { image, claim, shards, .. } = self;
        let mut text = format!(
            "      containers:\n        - name: {name}\n          image: {}\n",
            yaml_scalar(image)
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
            if let Some(resource) = &self.gpu_resource {
                let _ = write!(
                    text,
                    "          resources:\n            limits:\n              {}: 1\n",
                    yaml_scalar(resource)
                );
            }
        }
        let folder = yaml_scalar(&places.folder.display().to_string());
        let _ = write!(
            text,
            "          volumeMounts:\n            - name: submission\n              mountPath: \
             {folder}\n      volumes:\n        - name: submission\n          \
             persistentVolumeClaim:\n            claimName: {}\n",
            yaml_scalar(claim)
        );
        text
    }
}

/// Quotes a text for YAML, which reads strings of JSON.
fn yaml_scalar(text: &str) -> String {
    format!("{text:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifests_are_an_indexed_job_and_a_merge_job() {
        let places = SubmissionPlaces {
            program: "kernelgate".into(),
            package: "/src".into(),
            folder: "/shared".into(),
        };
        let options = KubernetesOptions {
            name: "kernelgate".to_owned(),
            shards: 8,
            parallelism: 4,
            image: "registry.example.com/kernels:1".to_owned(),
            gpu_resource: Some("nvidia.com/gpu".to_owned()),
            node_selector: vec![(
                "nvidia.com/gpu.product".to_owned(),
                "NVIDIA-H100-80GB-HBM3".to_owned(),
            )],
            claim: "results".to_owned(),
            retries: 2,
            deadline_s: Some(3600),
        };
        let executables = vec![("/src/bin/spin".into(), "/src".into())];
        let work = DividedWork::Bench { executables, flags: vec!["--quick".to_owned()] };
        insta::assert_snapshot!(options.job_manifests(&work, &places, None));
    }
}
