//! Hardware and setup of a machine: facts that a runner's label promises.
//!
//! Two machines of one kind have equal facts, which exclude serial numbers and host names. This
//! module does not judge times that were measured on a machine ([`Environment`] does).

use serde::{Deserialize, Serialize};

use super::environment::Environment;
use crate::measure::plausibility;
use crate::record::files::file::{RecordType, hash_of_all};
use kernelgate_cuda::observe::telemetry::{GpuCard, list_cards};

/// Bytes to which memory is rounded: the system keeps a varying part for itself.
const GIB: u64 = 1 << 30;
/// Maximum number of GPUs of one machine in a record.
const MAX_GPUS_PER_MACHINE: usize = 1024;

/// A machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineFacts {
    /// Model of the processor.
    pub processor: String,
    /// Number of processor sockets; absent if the system does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sockets: Option<usize>,
    /// Logical cores.
    pub cores: usize,
    /// Memory, GiB.
    pub memory_gib: u64,
    /// The GPUs that NVML lists on the machine.
    pub gpus: Vec<GpuCard>,
}

/// A fact in which a machine is not as expected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DifferentMachineFact {
    /// Name of the fact: `gpus[0].driver`.
    pub field: String,
    /// Value in the file.
    pub expected: String,
    /// Value here.
    pub found: String,
}

impl MachineFacts {
    /// Describes the machine on which the process runs.
    #[expect(clippy::disallowed_methods, reason = "a file of the system")]
    pub fn from_this_machine() -> MachineFacts {
        let host = Environment::cpu();
        Self {
            processor: host.device_name,
            sockets: processor_sockets(
                &std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default(),
            ),
            cores: host.cores,
            memory_gib: (host.memory_bytes + GIB / 2) / GIB,
            gpus: list_cards(),
        }
    }

    /// Hash of all facts.
    pub fn digest(&self) -> String {
        let facts = self.machine_facts();
        hash_of_all(facts.iter().flat_map(|(field, value)| [&**field, &**value]))
    }

    /// Returns the facts in which this machine differs from an expected machine.
    pub fn mismatches(&self, expected: &Self) -> Vec<DifferentMachineFact> {
        let (found, expected) = (self.machine_facts(), expected.machine_facts());
        let absent = || "absent".to_owned();
        let value = |of: &[(String, String)], field: &str| {
            of.iter()
                .find(|(name, _)| name == field)
                .map_or_else(absent, |(_, value)| value.clone())
        };
        let mut fields: Vec<&String> =
            expected.iter().chain(&found).map(|(field, _)| field).collect();
        fields.dedup();
        let mut mismatches: Vec<DifferentMachineFact> = Vec::new();
        for field in fields {
            let (expected, found) = (value(&expected, field), value(&found, field));
            if expected != found && mismatches.iter().all(|it| it.field != *field) {
                mismatches.push(DifferentMachineFact { field: field.clone(), expected, found });
            }
        }
        mismatches
    }

    fn machine_facts(&self) -> Vec<(String, String)> {
        let Self { processor, sockets, cores, memory_gib, gpus } = self;
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
            let memory = card.memory_bytes.map_or_else(unknown, |bytes| (bytes / GIB).to_string());
            for (field, value) in [
                ("model", card.model.clone()),
                ("memory_gib", memory),
                ("driver", card.driver.clone().unwrap_or_else(unknown)),
                ("max_sm_clock_mhz", number(card.max_sm_clock_mhz)),
                ("max_memory_clock_mhz", number(card.max_memory_clock_mhz)),
                ("power_limit_mw", number(card.power_limit_mw)),
                ("pcie_generation", number(card.pcie_generation)),
                ("pcie_width", number(card.pcie_width)),
                ("nvlinks", card.nvlinks.to_string()),
                ("ecc", is(card.ecc)),
                ("mig", is(card.mig)),
            ] {
                facts.push((format!("gpus[{index}].{field}"), value));
            }
        }
        facts
    }
}

/// Processors that /proc/cpuinfo lists.
fn processor_sockets(cpuinfo: &str) -> Option<usize> {
    let ids = cpuinfo.lines().filter(|line| line.starts_with("physical id"));
    let ids: std::collections::BTreeSet<&str> =
        ids.filter_map(|line| line.split(':').nth(1)).collect();
    (!ids.is_empty()).then_some(ids.len())
}

impl RecordType for MachineFacts {
    const SCHEMA: &'static str = "kernelgate-machine";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "machine";

    fn validate(&self) -> Result<(), String> {
        plausibility::check_count("cores", self.cores as u64)?;
        plausibility::check_count("sockets", self.sockets.unwrap_or(1) as u64)?;
        plausibility::check_bytes("memory_gib", self.memory_gib.saturating_mul(GIB))?;
        if self.gpus.len() > MAX_GPUS_PER_MACHINE {
            return Err(format!("{} GPUs, more than {MAX_GPUS_PER_MACHINE}", self.gpus.len()));
        }
        let mut bytes = self.gpus.iter().filter_map(|card| card.memory_bytes);
        bytes.try_for_each(|bytes| plausibility::check_bytes("memory_bytes of a GPU", bytes))?;
        if self.cores == 0 { Err("0 cores".to_owned()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn h200_card(driver: &str) -> GpuCard {
        GpuCard {
            model: "NVIDIA H200".to_owned(),
            memory_bytes: Some(150_754_820_096),
            driver: Some(driver.to_owned()),
            max_sm_clock_mhz: Some(1980),
            max_memory_clock_mhz: Some(3201),
            power_limit_mw: Some(700_000),
            pcie_generation: Some(5),
            pcie_width: Some(16),
            nvlinks: 18,
            ecc: Some(true),
            mig: Some(false),
        }
    }

    fn machine_with_gpus(gpus: Vec<GpuCard>) -> MachineFacts {
        let processor = "Intel Xeon".to_owned();
        MachineFacts { processor, sockets: Some(2), cores: 64, memory_gib: 512, gpus }
    }

    #[test]
    fn each_differing_fact_of_two_machines_is_named() {
        let expected = machine_with_gpus(vec![h200_card("580.82")]);
        assert_eq!(expected.mismatches(&expected), []);
        let capped = GpuCard { power_limit_mw: Some(500_000), ..h200_card("590.1") };
        let found = machine_with_gpus(vec![capped]).mismatches(&expected);
        let fields: Vec<&str> = found.iter().map(|it| &*it.field).collect();
        assert_eq!(fields, ["gpus[0].driver", "gpus[0].power_limit_mw"]);
        assert_eq!((&*found[0].expected, &*found[0].found), ("580.82", "590.1"));
        let without = machine_with_gpus(Vec::new());
        assert!(without.mismatches(&expected).iter().any(|it| it.found == "absent"));
        assert_ne!(without.digest(), expected.digest());
        let many = machine_with_gpus(vec![h200_card("580.82"); MAX_GPUS_PER_MACHINE + 1]);
        assert_eq!(many.validate().unwrap_err(), "1025 GPUs, more than 1024");
    }

    #[test]
    fn processor_sockets_are_counted_by_their_physical_ids() {
        let cpuinfo = "processor : 0\nphysical id\t: 0\nprocessor : 1\nphysical id\t: 1\n\
                       processor : 2\nphysical id\t: 0\n";
        assert_eq!((processor_sockets(cpuinfo), processor_sockets("")), (Some(2), None));
        assert_eq!(MachineFacts::from_this_machine(), MachineFacts::from_this_machine());
    }
}
