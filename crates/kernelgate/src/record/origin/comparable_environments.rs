//! Decides which environments (machine, device, software) can be compared, and gives comparable
//! environments a common group name.

use super::environment::{IncomparableEnvironmentField, RunEnvironment};
use super::gpus::GpuInEnvironment;
use crate::record::files::file::hash_of_texts_hex;
use kernelgate_cuda::driver::peers::PeerLink;

/// Facts of an environment for which only the major version number must agree.
const FACTS_COMPARED_BY_MAJOR_VERSION: [&str; 2] = ["gpu.driver", "gpu.driver_cuda"];
const HASH_DIGITS_IN_ENVIRONMENT_NAME: usize = 8;

impl RunEnvironment {
    /// Returns the facts in which a baseline's environment and this environment differ, so that
    /// times cannot be compared.
    pub fn incomparable_facts_with_base(&self, base: &Self) -> Vec<IncomparableEnvironmentField> {
        let on_gpu = !self.gpus.is_empty() && !base.gpus.is_empty();
        let counted = self.gpus.number_of_gpus() > 1 || base.gpus.number_of_gpus() > 1;
        let both = base
            .facts_that_decide_comparability(on_gpu, counted)
            .into_iter()
            .zip(self.facts_that_decide_comparability(on_gpu, counted));
        both.filter(|((field, base), (_, head))| {
            part_of_fact_that_must_agree(field, base) != part_of_fact_that_must_agree(field, head)
        })
        .map(|((field, base), (_, head))| IncomparableEnvironmentField {
            field_name: field,
            base_value: base,
            head_value: head,
        })
        .collect()
    }

    /// Returns a name that all environments comparable with this one share: the device's folder
    /// name and a hash of the other facts.
    pub fn name_of_comparable_environments(&self) -> String {
        let facts = self
            .facts_that_decide_comparability(!self.gpus.is_empty(), self.gpus.number_of_gpus() > 1);
        let texts = facts
            .iter()
            .flat_map(|(field, value)| [*field, part_of_fact_that_must_agree(field, value)]);
        format!(
            "{}-{}",
            self.baseline_folder_of_device_and_count(),
            &hash_of_texts_hex(texts)[..HASH_DIGITS_IN_ENVIRONMENT_NAME]
        )
    }

    /// Returns the facts, of the GPUs or of the host, that decide whether times are comparable.
    /// Number of GPUs and the link between them are included if `counted` is true, that is, if one
    /// side has several GPUs.
    fn facts_that_decide_comparability(
        &self,
        on_gpu: bool,
        counted: bool,
    ) -> Vec<(&'static str, String)> {
        let mut facts = vec![
            ("device_kind", self.device_kind.clone()),
            ("device_name", self.device_name.clone()),
            ("optimised", self.built_with_optimisation.to_string()),
        ];
        if on_gpu {
            // For a run on a GPU the host's model does not matter, because the host only launches
            // kernels.
            let gpus = |value: fn(&GpuInEnvironment) -> String| {
                self.gpus.join_distinct_values_of_gpus(value)
            };
            facts.extend([
                ("gpu.arch", gpus(|gpu| gpu.arch.clone())),
                ("gpu.driver", gpus(|gpu| gpu.driver_version.clone())),
                ("gpu.driver_cuda", gpus(|gpu| gpu.latest_cuda_of_driver.clone())),
                ("gpu.nvrtc", gpus(|gpu| gpu.nvrtc_version.clone())),
                ("gpu.multiprocessors", gpus(|gpu| gpu.multiprocessors.to_string())),
            ]);
        } else {
            facts.extend([
                ("arch", self.arch.clone()),
                ("cores", self.usable_logical_cores.to_string()),
                ("threads", self.cpu_backend_threads.to_string()),
                ("simd", self.simd.join(" ")),
            ]);
        }
        if counted {
            facts.push(("gpu.count", self.gpus.number_of_gpus().to_string()));
            facts.push((
                "gpu.link",
                self.link.map_or("unknown", PeerLink::name_in_records).to_owned(),
            ));
        }
        facts
    }
}

/// Returns the part of a fact that must agree: of a driver version only the major number.
fn part_of_fact_that_must_agree<'a>(field: &str, value: &'a str) -> &'a str {
    if FACTS_COMPARED_BY_MAJOR_VERSION.contains(&field) {
        value.split('.').next().unwrap_or_default()
    } else {
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_depends_only_on_facts_that_decide_comparability() {
        let host = RunEnvironment {
            usable_logical_cores: 2,
            ..RunEnvironment::environment_of_process_on_cpu()
        };
        let same = RunEnvironment { host_memory_bytes: 1, machine_hash: None, ..host.clone() };
        let other = RunEnvironment { usable_logical_cores: 4, ..host.clone() };
        assert_eq!(host.name_of_comparable_environments(), same.name_of_comparable_environments());
        assert!(host.incomparable_facts_with_base(&same).is_empty());
        assert_ne!(host.name_of_comparable_environments(), other.name_of_comparable_environments());
        assert_eq!(host.incomparable_facts_with_base(&other)[0].field_name, "cores");
    }
}
