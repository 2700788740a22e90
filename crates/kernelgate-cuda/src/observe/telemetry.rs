//! Readings of a GPU card through NVML: clocks, power, temperature, throttle reasons, and other
//! processes.

use std::collections::BTreeSet;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Api, Clock, GpuVirtualizationMode, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use serde::{Deserialize, Serialize};

/// One reading of a GPU card's clocks, power, temperature and settings. A quantity that the card
/// does not report is `None` in the reading.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GpuCardReading {
    /// SM clock, MHz.
    pub sm_clock_mhz: Option<u32>,
    /// Memory clock, MHz.
    pub memory_clock_mhz: Option<u32>,
    /// Power drawn, milliwatts.
    pub power_mw: Option<u32>,
    /// Power that the card may draw now (its enforced limit), milliwatts.
    pub power_limit_mw: Option<u32>,
    /// Temperature of the GPU now, °C.
    pub temperature_c: Option<u32>,
    /// Reasons that limit the GPU's clock now, by NVML's names: "sw_power_cap".
    #[serde(rename = "throttle")]
    pub throttle_reasons: Vec<String>,
    /// Number of other processes that have a compute context on the GPU.
    #[serde(rename = "other_processes")]
    pub other_process_count: Option<u32>,
}

impl GpuCardReading {
    /// Whether the reading's throttle reasons contain heat or a hardware slow-down.
    pub fn was_slowed_by_heat_or_hardware(&self) -> bool {
        throttle_reasons_name_heat_or_hardware(&self.throttle_reasons)
    }
}

/// Returns whether a list of throttle reasons contains heat or a hardware slow-down.
pub fn throttle_reasons_name_heat_or_hardware(throttle: &[String]) -> bool {
    let slowing = throttle_reason_names_except_idle(HEAT_AND_HARDWARE_REASONS);
    throttle.iter().any(|reason| slowing.contains(reason))
}

/// Hardware and settings of one GPU card of this machine, as NVML reports them. A quantity that the
/// card does not report is `None`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuCard {
    /// Model: "NVIDIA H200".
    #[serde(rename = "model")]
    pub gpu_model: String,
    /// Device memory, bytes.
    #[serde(rename = "memory_bytes")]
    pub device_memory_bytes: Option<u64>,
    /// Version of the NVIDIA driver, such as "580.82.07".
    #[serde(rename = "driver")]
    pub driver_version: Option<String>,
    /// Highest SM clock, MHz.
    pub max_sm_clock_mhz: Option<u32>,
    /// Highest memory clock, MHz.
    pub max_memory_clock_mhz: Option<u32>,
    /// Power that the card may draw now (its enforced limit), milliwatts.
    pub power_limit_mw: Option<u32>,
    /// Highest PCIe generation that the card and its slot support together.
    #[serde(rename = "pcie_generation")]
    pub max_pcie_generation: Option<u32>,
    /// Number of PCIe lanes that the card uses.
    #[serde(rename = "pcie_width")]
    pub pcie_lanes_in_use: Option<u32>,
    /// Number of NVLinks of the card that are up.
    #[serde(rename = "nvlinks")]
    pub active_nvlink_count: u32,
    /// Whether the GPU corrects errors of its memory (ECC) now.
    #[serde(rename = "ecc")]
    pub ecc_enabled: Option<bool>,
    /// Whether the card is divided into MIG instances.
    #[serde(rename = "mig")]
    pub divided_into_mig: Option<bool>,
}

/// Largest number of NVLinks of one card that are checked.
const MAX_NVLINKS_PER_GPU: u32 = 18;

/// Returns every GPU card that NVML lists, in NVML's order; empty without NVML. Reading the cards
/// takes some milliseconds for each card.
pub fn list_gpu_cards() -> Vec<GpuCard> {
    let Some(nvml) = open_nvml_once() else { return Vec::new() };
    let devices = (0..nvml.device_count().unwrap_or(0)).map(|index| nvml.device_by_index(index));
    let card = |device: Device<'_>| GpuCard {
        gpu_model: device.name().unwrap_or_default(),
        device_memory_bytes: device.memory_info().ok().map(|memory| memory.total),
        driver_version: nvml.sys_driver_version().ok(),
        max_sm_clock_mhz: device.max_clock_info(Clock::SM).ok(),
        max_memory_clock_mhz: device.max_clock_info(Clock::Memory).ok(),
        power_limit_mw: device.enforced_power_limit().ok(),
        max_pcie_generation: device.max_pcie_link_gen().ok(),
        pcie_lanes_in_use: device.current_pcie_link_width().ok(),
        active_nvlink_count: (0..MAX_NVLINKS_PER_GPU)
            .filter(|link| device.link_wrapper_for(*link).is_active().unwrap_or(false))
            .count() as u32,
        ecc_enabled: device.is_ecc_enabled().ok().map(|ecc| ecc.currently_enabled),
        divided_into_mig: device.mig_mode().ok().map(|mig| mig.current != 0),
    };
    devices.flatten().map(card).collect()
}

/// Returns whether NVML lists a card with this UUID; `None` if NVML cannot answer, or if a card is
/// divided into MIG instances, which have UUIDs of their own.
pub fn is_card_uuid_listed_by_nvml(uuid: &str) -> Option<bool> {
    let nvml = open_nvml_once()?;
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

/// Reads clocks, power, temperature and processes of one GPU card through NVML.
pub struct CardTelemetryByNvml {
    nvml: &'static Nvml,
    gpu_uuid: String,
}

/// Opens NVML once a process, which takes about 20 ms, and keeps it open until the process ends.
fn open_nvml_once() -> Option<&'static Nvml> {
    static NVML_LIBRARY: OnceLock<Option<Nvml>> = OnceLock::new();
    let begun = || Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init().ok();
    NVML_LIBRARY.get_or_init(begun).as_ref()
}

impl CardTelemetryByNvml {
    /// Opens the GPU card with the given UUID; `None` if NVML is missing or does not list the card.
    pub fn open_card_by_uuid(uuid: &str) -> Option<CardTelemetryByNvml> {
        let telemetry = Self { nvml: open_nvml_once()?, gpu_uuid: uuid.to_owned() };
        telemetry.nvml_device_of_card().ok()?;
        Some(telemetry)
    }

    /// Version of the NVIDIA driver, such as "580.82.07".
    pub fn nvidia_driver_version(&self) -> Option<String> {
        self.nvml.sys_driver_version().ok()
    }

    /// Asks the card. Reading the card takes a few milliseconds, so this function is never called
    /// while a sample is taken.
    pub fn read_card_sensors(&self) -> GpuCardReading {
        let Ok(device) = self.nvml_device_of_card() else { return GpuCardReading::default() };
        GpuCardReading {
            sm_clock_mhz: device.clock_info(Clock::SM).ok(),
            memory_clock_mhz: device.clock_info(Clock::Memory).ok(),
            power_mw: device.power_usage().ok(),
            power_limit_mw: device.enforced_power_limit().ok(),
            temperature_c: device.temperature(TemperatureSensor::Gpu).ok(),
            throttle_reasons: device
                .current_throttle_reasons()
                .map(throttle_reason_names_except_idle)
                .unwrap_or_default(),
            other_process_count: count_processes_with_context(&device)
                .map(|listed| listed.other_process_count),
        }
    }

    /// Returns whether heat or a hardware slow-down limits the card's clock now; the power cap and
    /// clocks that the user set do not count. The result is `None` if the card does not report
    /// throttle reasons.
    pub fn is_slowed_by_heat_or_hardware_now(&self) -> Option<bool> {
        let reasons =
            self.nvml_device_of_card().and_then(|device| device.current_throttle_reasons());
        reasons.ok().map(contains_heat_or_hardware_reason)
    }

    /// Returns whether the power cap limits the card's clock now; `None` if the card does not
    /// report throttle reasons. `is_clock_limited_by_power_cap_now` makes one call that queries the
    /// card, while [`Self::read_card_sensors`] makes many.
    pub fn is_clock_limited_by_power_cap_now(&self) -> Option<bool> {
        let reasons =
            self.nvml_device_of_card().and_then(|device| device.current_throttle_reasons());
        reasons.ok().map(|reasons| reasons.contains(ThrottleReasons::SW_POWER_CAP))
    }

    /// Temperature of the GPU, °C.
    pub fn gpu_temperature_c(&self) -> Option<u32> {
        self.nvml_device_of_card()
            .and_then(|device| device.temperature(TemperatureSensor::Gpu))
            .ok()
    }

    /// Returns whether the card is a virtual GPU, which shares clock and power of a card with other
    /// virtual machines.
    pub fn is_virtual_gpu(&self) -> bool {
        let mode = self.nvml_device_of_card().and_then(|device| device.virtualization_mode());
        mode.is_ok_and(|mode| mode == GpuVirtualizationMode::Vgpu)
    }

    /// Returns whether only root may set the card's clocks; `None` if the card does not report it,
    /// for example a virtual GPU.
    pub fn does_setting_clocks_need_root(&self) -> Option<bool> {
        self.nvml_device_of_card()
            .and_then(|device| device.is_api_restricted(Api::ApplicationClocks))
            .ok()
    }

    /// Returns the card's default power limit, and its limit now, in milliwatts.
    pub fn default_and_current_power_limit_mw(&self) -> Option<(u32, u32)> {
        let device = self.nvml_device_of_card().ok()?;
        let default = device.power_management_limit_default().ok()?;
        Some((default, device.enforced_power_limit().ok()?))
    }

    /// Energy that the card has used since its driver was loaded, millijoules; `None` if the card
    /// has no energy counter. The energy counter does not rise continuously: an H100 updates it
    /// each 100 ms.
    pub fn energy_since_driver_load_mj(&self) -> Option<u64> {
        self.nvml_device_of_card().and_then(|device| device.total_energy_consumption()).ok()
    }

    /// Number of other processes that have a compute context on the GPU now, if the card reports
    /// them.
    pub fn other_processes_with_context_count(&self) -> Option<u32> {
        Some(count_processes_with_context(&self.nvml_device_of_card().ok()?)?.other_process_count)
    }

    /// Number of other processes that computed on the card since `then`, by the multiprocessor use
    /// that NVML samples for each process about every tenth of a second. A process that only holds
    /// memory does not count, nor does a process that computes too briefly to be sampled. `None` if
    /// NVML has no samples, not even of this process, which computes: with MIG, in a container with
    /// other process numbers, or too soon. Takes some milliseconds.
    pub fn other_processes_that_computed_since(&self, then: SystemTime) -> Option<u32> {
        let device = self.nvml_device_of_card().ok()?;
        if !count_processes_with_context(&device)?.includes_this_process {
            return None;
        }
        let then_us = u64::try_from(then.duration_since(UNIX_EPOCH).ok()?.as_micros()).ok()?;
        let samples = device.process_utilization_stats(then_us).ok()?;
        let busy = samples.iter().filter(|it| it.sm_util > 0).map(|it| it.pid);
        count_processes_other_than_own(busy.collect(), std::process::id())
    }

    fn nvml_device_of_card(&self) -> Result<Device<'_>, NvmlError> {
        self.nvml.device_by_uuid(&*self.gpu_uuid)
    }
}

/// Number of other processes that computed; `None` if the list is empty, which means that NVML
/// sampled no process.
fn count_processes_other_than_own(computed: BTreeSet<u32>, own: u32) -> Option<u32> {
    let others = computed.iter().filter(|&&pid| pid != own).count() as u32;
    (others > 0 || computed.contains(&own)).then_some(others)
}

/// Processes that have a compute context on a card.
struct ProcessesWithCudaContext {
    /// Whether NVML lists this process among those with a context.
    includes_this_process: bool,
    /// Number of other processes with a compute context on the GPU.
    other_process_count: u32,
}

/// Counts the processes with a compute context on a GPU; `None` if the card does not report them.
fn count_processes_with_context(device: &Device<'_>) -> Option<ProcessesWithCudaContext> {
    let processes = device.running_compute_processes().ok()?;
    let others = processes.iter().filter(|process| process.pid != std::process::id()).count();
    Some(ProcessesWithCudaContext {
        includes_this_process: others < processes.len(),
        other_process_count: others as u32,
    })
}

/// Returns the lower-case names of throttle reasons, without the reason that the GPU is idle.
fn throttle_reason_names_except_idle(reasons: ThrottleReasons) -> Vec<String> {
    let slowing = reasons - ThrottleReasons::GPU_IDLE;
    slowing.iter_names().map(|(name, _)| name.to_lowercase()).collect()
}

/// Throttle reasons that mean heat or a hardware slow-down.
const HEAT_AND_HARDWARE_REASONS: ThrottleReasons = ThrottleReasons::HW_SLOWDOWN
    .union(ThrottleReasons::SW_THERMAL_SLOWDOWN)
    .union(ThrottleReasons::HW_THERMAL_SLOWDOWN)
    .union(ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN);

fn contains_heat_or_hardware_reason(reasons: ThrottleReasons) -> bool {
    reasons.intersects(HEAT_AND_HARDWARE_REASONS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_processes_are_unknown_if_nvml_sampled_no_process() {
        let others = |computed: &[u32]| {
            count_processes_other_than_own(computed.iter().copied().collect(), 7)
        };
        assert_eq!(others(&[]), None);
        assert_eq!(others(&[7]), Some(0));
        assert_eq!(others(&[7, 8, 9]), Some(2));
        assert_eq!(others(&[8]), Some(1));
    }

    #[test]
    fn throttle_reasons_have_nvmls_names_and_omit_idleness() {
        assert_eq!(
            throttle_reason_names_except_idle(
                ThrottleReasons::GPU_IDLE | ThrottleReasons::SW_POWER_CAP
            ),
            ["sw_power_cap"]
        );
        assert_eq!(throttle_reason_names_except_idle(ThrottleReasons::GPU_IDLE), [""; 0]);
    }

    #[test]
    fn nvml_lists_the_gpu_in_use_and_no_unknown_uuid() {
        let Some((device, _alone)) = crate::testing::lock_first_gpu() else { return };
        let listed = is_card_uuid_listed_by_nvml(&device.gpu_properties().gpu_uuid);
        eprintln!("{}: listed: {listed:?}", device.gpu_properties().gpu_uuid);
        assert_ne!(listed, Some(false));
        assert_eq!(is_card_uuid_listed_by_nvml("GPU-feed"), listed.map(|_| false));
    }

    #[test]
    fn heat_slows_a_card_but_its_power_cap_does_not_count() {
        for reason in [
            ThrottleReasons::GPU_IDLE,
            ThrottleReasons::SW_POWER_CAP,
            ThrottleReasons::APPLICATIONS_CLOCKS_SETTING,
            ThrottleReasons::NONE,
        ] {
            assert!(!contains_heat_or_hardware_reason(reason), "{reason:?}");
            assert!(
                contains_heat_or_hardware_reason(reason | ThrottleReasons::SW_THERMAL_SLOWDOWN),
                "{reason:?}"
            );
        }
        assert!(contains_heat_or_hardware_reason(ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN));
        assert!(contains_heat_or_hardware_reason(
            ThrottleReasons::HW_SLOWDOWN | ThrottleReasons::SW_POWER_CAP
        ));
        let reading = |reasons| GpuCardReading {
            throttle_reasons: throttle_reason_names_except_idle(reasons),
            ..GpuCardReading::default()
        };
        assert!(reading(ThrottleReasons::SW_THERMAL_SLOWDOWN).was_slowed_by_heat_or_hardware());
        assert!(!reading(ThrottleReasons::SW_POWER_CAP).was_slowed_by_heat_or_hardware());
    }
}
