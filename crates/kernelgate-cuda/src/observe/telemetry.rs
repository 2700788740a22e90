//! Readings of the card while it works: clocks, power, temperature, throttle reasons, and other
//! processes.

use std::collections::BTreeSet;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Api, Clock, GpuVirtualizationMode, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use serde::{Deserialize, Serialize};

/// One reading of a GPU's sensors and settings. A quantity that the card does not report is absent
/// from the reading.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CardReading {
    /// SM clock, MHz.
    pub sm_clock_mhz: Option<u32>,
    /// Memory clock, MHz.
    pub memory_clock_mhz: Option<u32>,
    /// Power drawn, milliwatts.
    pub power_mw: Option<u32>,
    /// Power that the card may draw, milliwatts.
    pub power_limit_mw: Option<u32>,
    /// Temperature of the GPU, °C.
    pub temperature_c: Option<u32>,
    /// Reasons that hold the clock down, by NVML's names: "sw_power_cap".
    pub throttle: Vec<String>,
    /// Number of other processes that compute on the GPU.
    pub other_processes: Option<u32>,
}

impl CardReading {
    /// Whether heat or a slow-down of the hardware limits the clock.
    pub fn is_slowed_by_hardware(&self) -> bool {
        names_slowdown(&self.throttle)
    }
}

/// Returns whether throttle reasons name heat or a slow-down of the hardware.
pub fn names_slowdown(throttle: &[String]) -> bool {
    let slowing = reason_names(SLOWDOWN_REASONS);
    throttle.iter().any(|reason| slowing.contains(reason))
}

/// Hardware and settings of a GPU card. A quantity that the card does not report is absent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuCard {
    /// Model: "NVIDIA H200".
    pub model: String,
    /// Device memory, bytes.
    pub memory_bytes: Option<u64>,
    /// Version of the NVIDIA driver, such as "580.82.07".
    pub driver: Option<String>,
    /// Highest SM clock, MHz.
    pub max_sm_clock_mhz: Option<u32>,
    /// Highest memory clock, MHz.
    pub max_memory_clock_mhz: Option<u32>,
    /// Power that the card may draw, milliwatts.
    pub power_limit_mw: Option<u32>,
    /// Highest PCIe generation that the card and its slot support together.
    pub pcie_generation: Option<u32>,
    /// PCIe lanes in use.
    pub pcie_width: Option<u32>,
    /// NVLinks that are up.
    pub nvlinks: u32,
    /// Whether the GPU corrects memory errors (ECC).
    pub ecc: Option<bool>,
    /// Whether the card is divided into instances.
    pub mig: Option<bool>,
}

/// NVLinks that a card can have at most.
const MAX_NVLINKS_PER_GPU: u32 = 18;

/// Every card that NVML lists, in NVML's order; empty without NVML. Lists the GPU cards, which
/// takes some milliseconds for each card.
pub fn list_cards() -> Vec<GpuCard> {
    let Some(nvml) = nvml_library() else { return Vec::new() };
    let devices = (0..nvml.device_count().unwrap_or(0)).map(|index| nvml.device_by_index(index));
    let card = |device: Device<'_>| GpuCard {
        model: device.name().unwrap_or_default(),
        memory_bytes: device.memory_info().ok().map(|memory| memory.total),
        driver: nvml.sys_driver_version().ok(),
        max_sm_clock_mhz: device.max_clock_info(Clock::SM).ok(),
        max_memory_clock_mhz: device.max_clock_info(Clock::Memory).ok(),
        power_limit_mw: device.enforced_power_limit().ok(),
        pcie_generation: device.max_pcie_link_gen().ok(),
        pcie_width: device.current_pcie_link_width().ok(),
        nvlinks: (0..MAX_NVLINKS_PER_GPU)
            .filter(|link| device.link_wrapper_for(*link).is_active().unwrap_or(false))
            .count() as u32,
        ecc: device.is_ecc_enabled().ok().map(|ecc| ecc.currently_enabled),
        mig: device.mig_mode().ok().map(|mig| mig.current != 0),
    };
    devices.flatten().map(card).collect()
}

/// Whether NVML lists a card with that UUID; `None` if NVML cannot answer, or if a card is divided
/// into instances, which have UUIDs of their own.
pub fn is_card_listed(uuid: &str) -> Option<bool> {
    let nvml = nvml_library()?;
    match nvml.device_by_uuid(uuid) {
        Ok(_) => Some(true),
        Err(NvmlError::NotFound | NvmlError::InvalidArg) => {
            let cards = (0..nvml.device_count().ok()?).map(|index| nvml.device_by_index(index));
            let is_divided = |card: Device<'_>| card.mig_mode().is_ok_and(|mig| mig.current != 0);
            (!cards.flatten().any(is_divided)).then_some(false)
        }
        Err(_) => None,
    }
}

/// NVML and a card.
pub struct CardTelemetry {
    nvml: &'static Nvml,
    uuid: String,
}

/// NVML, begun once a process, which takes it some 20 ms, and kept until the process ends.
fn nvml_library() -> Option<&'static Nvml> {
    static NVML_LIBRARY: OnceLock<Option<Nvml>> = OnceLock::new();
    let begun = || Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init().ok();
    NVML_LIBRARY.get_or_init(begun).as_ref()
}

impl CardTelemetry {
    /// Opens the GPU card with the given UUID; `None` if NVML is missing or does not list the card.
    pub fn open_card(uuid: &str) -> Option<CardTelemetry> {
        let telemetry = Self { nvml: nvml_library()?, uuid: uuid.to_owned() };
        telemetry.nvml_device().ok()?;
        Some(telemetry)
    }

    /// Version of the driver: "580.82.07".
    pub fn driver_version(&self) -> Option<String> {
        self.nvml.sys_driver_version().ok()
    }

    /// Asks the card. Takes a few milliseconds: never while a sample is taken.
    pub fn read_card(&self) -> CardReading {
        let Ok(device) = self.nvml_device() else { return CardReading::default() };
        CardReading {
            sm_clock_mhz: device.clock_info(Clock::SM).ok(),
            memory_clock_mhz: device.clock_info(Clock::Memory).ok(),
            power_mw: device.power_usage().ok(),
            power_limit_mw: device.enforced_power_limit().ok(),
            temperature_c: device.temperature(TemperatureSensor::Gpu).ok(),
            throttle: device.current_throttle_reasons().map(reason_names).unwrap_or_default(),
            other_processes: computing_processes(&device).map(|listed| listed.others),
        }
    }

    /// Returns whether heat or a slow-down of the hardware limits the clock now; the power cap and
    /// clocks that were set do not count. The result is `None` if the card does not report reasons.
    pub fn is_slowed_by_hardware(&self) -> Option<bool> {
        let reasons = self.nvml_device().and_then(|device| device.current_throttle_reasons());
        reasons.ok().map(slows_hardware)
    }

    /// Returns whether the power cap limits the clock now; `None` if the card does not report
    /// reasons. This function makes one NVML call, while [`Self::read_card`] makes many.
    pub fn is_power_capped(&self) -> Option<bool> {
        let reasons = self.nvml_device().and_then(|device| device.current_throttle_reasons());
        reasons.ok().map(|reasons| reasons.contains(ThrottleReasons::SW_POWER_CAP))
    }

    /// Temperature of the GPU, °C.
    pub fn temperature_c(&self) -> Option<u32> {
        self.nvml_device().and_then(|device| device.temperature(TemperatureSensor::Gpu)).ok()
    }

    /// Returns whether the card is a virtual one, whose clock and power a hypervisor divides.
    pub fn is_virtual(&self) -> bool {
        let mode = self.nvml_device().and_then(|device| device.virtualization_mode());
        mode.is_ok_and(|mode| mode == GpuVirtualizationMode::Vgpu)
    }

    /// Whether only root may set clocks; `None` if the card does not report it, for example a
    /// virtual GPU.
    pub fn clocks_need_root(&self) -> Option<bool> {
        self.nvml_device().and_then(|device| device.is_api_restricted(Api::ApplicationClocks)).ok()
    }

    /// Highest power that the card draws by default, and that it may draw now, milliwatts.
    pub fn power_limit_range_mw(&self) -> Option<(u32, u32)> {
        let device = self.nvml_device().ok()?;
        let default = device.power_management_limit_default().ok()?;
        Some((default, device.enforced_power_limit().ok()?))
    }

    /// Energy that the card has used since its driver was loaded, millijoules; `None` if the card
    /// has no counter. The counter steps: each 100 ms on an H100.
    pub fn energy_mj(&self) -> Option<u64> {
        self.nvml_device().and_then(|device| device.total_energy_consumption()).ok()
    }

    /// Number of other processes that compute on the GPU, if the card reports them.
    pub fn other_computing_processes(&self) -> Option<u32> {
        Some(computing_processes(&self.nvml_device().ok()?)?.others)
    }

    /// Number of other processes that computed on the card since then, by the share of its time
    /// that NVML samples for each process, about every tenth of a second. A process that only holds
    /// memory does not count, nor does one that uses the card too briefly for a sample. `None` if
    /// NVML has no such samples, not even of this process, which computes: with MIG, in a container
    /// whose process numbers are not NVML's, and after a short time. Takes some milliseconds.
    pub fn others_computing_since(&self, then: SystemTime) -> Option<u32> {
        let device = self.nvml_device().ok()?;
        if !computing_processes(&device)?.own {
            return None;
        }
        let then_us = u64::try_from(then.duration_since(UNIX_EPOCH).ok()?.as_micros()).ok()?;
        let samples = device.process_utilization_stats(then_us).ok()?;
        let busy = samples.iter().filter(|it| it.sm_util > 0).map(|it| it.pid);
        other_process_count(busy.collect(), std::process::id())
    }

    fn nvml_device(&self) -> Result<Device<'_>, NvmlError> {
        self.nvml.device_by_uuid(&*self.uuid)
    }
}

/// Number of other processes that computed; `None` if the list lacks this process and has no
/// others, because then it is incomplete.
fn other_process_count(computed: BTreeSet<u32>, own: u32) -> Option<u32> {
    let others = computed.iter().filter(|&&pid| pid != own).count() as u32;
    (others > 0 || computed.contains(&own)).then_some(others)
}

/// Returns the processes that have a context on a card.
struct ComputingProcesses {
    /// Returns whether NVML lists this process.
    own: bool,
    /// Number of other processes.
    others: u32,
}

/// Lists the processes with a context on a GPU; `None` if the card does not report them.
fn computing_processes(device: &Device<'_>) -> Option<ComputingProcesses> {
    let processes = device.running_compute_processes().ok()?;
    let others = processes.iter().filter(|process| process.pid != std::process::id()).count();
    Some(ComputingProcesses { own: others < processes.len(), others: others as u32 })
}

/// The reasons that slow a working card, without the idle state.
fn reason_names(reasons: ThrottleReasons) -> Vec<String> {
    let slowing = reasons - ThrottleReasons::GPU_IDLE;
    slowing.iter_names().map(|(name, _)| name.to_lowercase()).collect()
}

/// Throttle reasons that are heat or a hardware slow-down.
const SLOWDOWN_REASONS: ThrottleReasons = ThrottleReasons::HW_SLOWDOWN
    .union(ThrottleReasons::SW_THERMAL_SLOWDOWN)
    .union(ThrottleReasons::HW_THERMAL_SLOWDOWN)
    .union(ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN);

fn slows_hardware(reasons: ThrottleReasons) -> bool {
    reasons.intersects(SLOWDOWN_REASONS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_processes_are_unknown_if_nvml_does_not_sample_this_process() {
        let others = |computed: &[u32]| other_process_count(computed.iter().copied().collect(), 7);
        assert_eq!(others(&[]), None);
        assert_eq!(others(&[7]), Some(0));
        assert_eq!(others(&[7, 8, 9]), Some(2));
        assert_eq!(others(&[8]), Some(1));
    }

    #[test]
    fn throttle_reasons_have_nvmls_names_and_exclude_idling() {
        assert_eq!(
            reason_names(ThrottleReasons::GPU_IDLE | ThrottleReasons::SW_POWER_CAP),
            ["sw_power_cap"]
        );
        assert_eq!(reason_names(ThrottleReasons::GPU_IDLE), [""; 0]);
    }

    #[test]
    fn only_the_card_in_use_is_listed() {
        let Some((device, _alone)) = crate::testing::lock_first_gpu() else { return };
        let listed = is_card_listed(&device.facts().uuid);
        eprintln!("{}: listed: {listed:?}", device.facts().uuid);
        assert_ne!(listed, Some(false));
        assert_eq!(is_card_listed("GPU-feed"), listed.map(|_| false));
    }

    #[test]
    fn heat_counts_as_slowing_a_card_and_its_power_limit_does_not() {
        for reason in [
            ThrottleReasons::GPU_IDLE,
            ThrottleReasons::SW_POWER_CAP,
            ThrottleReasons::APPLICATIONS_CLOCKS_SETTING,
            ThrottleReasons::NONE,
        ] {
            assert!(!slows_hardware(reason), "{reason:?}");
            assert!(slows_hardware(reason | ThrottleReasons::SW_THERMAL_SLOWDOWN), "{reason:?}");
        }
        assert!(slows_hardware(ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN));
        assert!(slows_hardware(ThrottleReasons::HW_SLOWDOWN | ThrottleReasons::SW_POWER_CAP));
        let reading =
            |reasons| CardReading { throttle: reason_names(reasons), ..CardReading::default() };
        assert!(reading(ThrottleReasons::SW_THERMAL_SLOWDOWN).is_slowed_by_hardware());
        assert!(!reading(ThrottleReasons::SW_POWER_CAP).is_slowed_by_hardware());
    }
}
