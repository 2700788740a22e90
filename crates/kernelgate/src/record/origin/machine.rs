//! Describes the hardware of a machine, so that `kernelgate doctor` can check that a CI runner is
//! as its label promises.
//!
//! Machines of one kind have equal facts, because serial numbers and host names are not among the
//! facts. This module does not decide whether times from two machines are comparable
//! ([`RunEnvironment`] does).

use serde::{Deserialize, Serialize};

use super::environment::RunEnvironment;
use crate::measure::plausibility;
use crate::record::files::file::{RecordFileType, hash_of_texts_hex};
use kernelgate_cuda::observe::telemetry::{GpuCard, list_gpu_cards};

/// Unit to which the amount of memory is rounded, because the system keeps a varying part for
/// itself.
const BYTES_PER_GIB: u64 = 1 << 30;
/// Largest number of GPUs of one machine that a record may contain.
const MAX_GPUS_PER_MACHINE: usize = 1024;

/// A machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineHardware {
    /// Model of the processor.
    #[serde(rename = "processor")]
    pub processor_model: String,
    /// Number of processor sockets; absent if the system does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "sockets")]
    pub processor_sockets: Option<usize>,
    /// Logical cores.
    #[serde(rename = "cores")]
    pub logical_cores: usize,
    /// Memory, GiB.
    #[serde(rename = "memory_gib")]
    pub host_memory_gib: u64,
    /// The GPUs of the machine that NVML lists.
    pub gpus: Vec<GpuCard>,
}

/// A hardware fact in which a machine differs from the expected machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnexpectedHardwareFact {
    /// Name of the fact: `gpus[0].driver`.
    pub fact_name: String,
    /// Value of the fact in the expected machine's file.
    pub expected_value: String,
    /// Value of the fact on this machine.
    pub actual_value: String,
}

impl MachineHardware {
    /// Describes the hardware of the machine on which this process runs.
    #[expect(clippy::disallowed_methods, reason = "a file of the system")]
    pub fn hardware_of_this_machine() -> MachineHardware {
        let host = RunEnvironment::environment_of_process_on_cpu();
        Self {
            processor_model: host.device_name,
            processor_sockets: count_processor_sockets(
                &std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default(),
            ),
            logical_cores: host.usable_logical_cores,
            host_memory_gib: (host.host_memory_bytes + BYTES_PER_GIB / 2) / BYTES_PER_GIB,
            gpus: list_gpu_cards(),
        }
    }

    /// Returns a hash of all hardware facts of the machine.
    pub fn hash_of_hardware_facts(&self) -> String {
        let facts = self.names_and_values_of_hardware_facts();
        hash_of_texts_hex(facts.iter().flat_map(|(field, value)| [&**field, &**value]))
    }

    /// Returns the hardware facts in which this machine differs from an expected machine.
    pub fn differences_from_expected_machine(
        &self,
        expected: &Self,
    ) -> Vec<UnexpectedHardwareFact> {
        let (found, expected) = (
            self.names_and_values_of_hardware_facts(),
            expected.names_and_values_of_hardware_facts(),
        );
        let absent = || "absent".to_owned();
        let value = |of: &[(String, String)], field: &str| {
            of.iter()
                .find(|(name, _)| name == field)
                .map_or_else(absent, |(_, value)| value.clone())
        };
        let mut fields: Vec<&String> =
            expected.iter().chain(&found).map(|(field, _)| field).collect();
        fields.dedup();
        let mut mismatches: Vec<UnexpectedHardwareFact> = Vec::new();
        for field in fields {
            let (expected, found) = (value(&expected, field), value(&found, field));
            if expected != found && mismatches.iter().all(|it| it.fact_name != *field) {
                mismatches.push(UnexpectedHardwareFact {
                    fact_name: field.clone(),
                    expected_value: expected,
                    actual_value: found,
                });
            }
        }
        mismatches
    }

    fn names_and_values_of_hardware_facts(&self) -> Vec<(String, String)> {
        let Self {
            processor_model: processor,
            processor_sockets: sockets,
            logical_cores: cores,
            host_memory_gib: memory_gib,
            gpus,
        } = self;
        let unknown = || "unknown".to_owned();
        let sockets = sockets.map_or_else(unknown, |sockets| sockets.to_string());
        let mut facts = vec![
            ("processor".to_owned(), processor.clone()),
            ("sockets".to_owned(), sockets),
            ("cores".to_owned(), cores.to_string()),
            ("memory_gib".to_owned(), memory_gib.to_string()),
            ("number of GPUs".to_owned(), gpus.len().to_string()),
        ];
        for (index, card) in gpus.iter().enumerate() {
            let number = |value: Option<u32>| value.map_or_else(unknown, |it| it.to_string());
            let is = |value: Option<bool>| value.map_or_else(unknown, |it| it.to_string());
            let memory = card
                .device_memory_bytes
                .map_or_else(unknown, |bytes| (bytes / BYTES_PER_GIB).to_string());
            for (field, value) in [
                ("model", card.gpu_model.clone()),
                ("memory_gib", memory),
                ("driver", card.driver_version.clone().unwrap_or_else(unknown)),
                ("max_sm_clock_mhz", number(card.max_sm_clock_mhz)),
                ("max_memory_clock_mhz", number(card.max_memory_clock_mhz)),
                ("power_limit_mw", number(card.power_limit_mw)),
                ("pcie_generation", number(card.max_pcie_generation)),
                ("pcie_width", number(card.pcie_lanes_in_use)),
                ("nvlinks", card.active_nvlink_count.to_string()),
                ("ecc", is(card.ecc_enabled)),
                ("mig", is(card.divided_into_mig)),
            ] {
                facts.push((format!("gpus[{index}].{field}"), value));
            }
        }
        facts
    }
}

/// Processors that /proc/cpuinfo lists.
fn count_processor_sockets(cpuinfo: &str) -> Option<usize> {
    let ids = cpuinfo.lines().filter(|line| line.starts_with("physical id"));
    let ids: std::collections::BTreeSet<&str> =
        ids.filter_map(|line| line.split(':').nth(1)).collect();
    (!ids.is_empty()).then_some(ids.len())
}

impl RecordFileType for MachineHardware {
    const SCHEMA: &'static str = "kernelgate-machine";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "machine";

    fn check_record_plausible(&self) -> Result<(), String> {
        plausibility::check_count_plausible("cores", self.logical_cores as u64)?;
        plausibility::check_count_plausible("sockets", self.processor_sockets.unwrap_or(1) as u64)?;
        plausibility::check_bytes_plausible(
            "memory_gib",
            self.host_memory_gib.saturating_mul(BYTES_PER_GIB),
        )?;
        if self.gpus.len() > MAX_GPUS_PER_MACHINE {
            return Err(format!("{} GPUs, more than {MAX_GPUS_PER_MACHINE}", self.gpus.len()));
        }
        let mut bytes = self.gpus.iter().filter_map(|card| card.device_memory_bytes);
        bytes.try_for_each(|bytes| {
            plausibility::check_bytes_plausible("memory_bytes of a GPU", bytes)
        })?;
        if self.logical_cores == 0 { Err("0 cores".to_owned()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example_h200_card(driver: &str) -> GpuCard {
        GpuCard {
            gpu_model: "NVIDIA H200".to_owned(),
            device_memory_bytes: Some(150_754_820_096),
            driver_version: Some(driver.to_owned()),
            max_sm_clock_mhz: Some(1980),
            max_memory_clock_mhz: Some(3201),
            power_limit_mw: Some(700_000),
            max_pcie_generation: Some(5),
            pcie_lanes_in_use: Some(16),
            active_nvlink_count: 18,
            ecc_enabled: Some(true),
            divided_into_mig: Some(false),
        }
    }

    fn example_machine_with_gpus(gpus: Vec<GpuCard>) -> MachineHardware {
        let processor = "Intel Xeon".to_owned();
        MachineHardware {
            processor_model: processor,
            processor_sockets: Some(2),
            logical_cores: 64,
            host_memory_gib: 512,
            gpus,
        }
    }

    #[test]
    fn each_differing_hardware_fact_of_two_machines_is_named() {
        let expected = example_machine_with_gpus(vec![example_h200_card("580.82")]);
        assert_eq!(expected.differences_from_expected_machine(&expected), []);
        let capped = GpuCard { power_limit_mw: Some(500_000), ..example_h200_card("590.1") };
        let found =
            example_machine_with_gpus(vec![capped]).differences_from_expected_machine(&expected);
        let fields: Vec<&str> = found.iter().map(|it| &*it.fact_name).collect();
        assert_eq!(fields, ["gpus[0].driver", "gpus[0].power_limit_mw"]);
        assert_eq!((&*found[0].expected_value, &*found[0].actual_value), ("580.82", "590.1"));
        let without = example_machine_with_gpus(Vec::new());
        assert!(
            without
                .differences_from_expected_machine(&expected)
                .iter()
                .any(|it| it.actual_value == "absent")
        );
        assert_ne!(without.hash_of_hardware_facts(), expected.hash_of_hardware_facts());
        let many =
            example_machine_with_gpus(vec![example_h200_card("580.82"); MAX_GPUS_PER_MACHINE + 1]);
        assert_eq!(many.check_record_plausible().unwrap_err(), "1025 GPUs, more than 1024");
    }

    #[test]
    fn processor_sockets_are_counted_by_their_physical_ids() {
        let cpuinfo = "processor : 0\nphysical id\t: 0\nprocessor : 1\nphysical id\t: 1\n\
                       processor : 2\nphysical id\t: 0\n";
        assert_eq!(
            (count_processor_sockets(cpuinfo), count_processor_sockets("")),
            (Some(2), None)
        );
        assert_eq!(
            MachineHardware::hardware_of_this_machine(),
            MachineHardware::hardware_of_this_machine()
        );
    }
}
