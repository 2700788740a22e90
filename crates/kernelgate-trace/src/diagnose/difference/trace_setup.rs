//! Collects machine, recorder and recording options of a trace, and compares those of two traces.

use std::collections::BTreeSet;

use crate::model::Trace;

/// A property of the machine or recorder of a trace, such as the driver's version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TraceSetupProperty {
    /// Names of the GPUs on which the traced program ran.
    DeviceNames,
    /// Compute capabilities of the GPUs on which the traced program ran.
    ComputeCapability,
    /// Numbers of multiprocessors of the GPUs; a part of a GPU (MIG) has fewer.
    MultiprocessorCounts,
    /// Number of ranks of the traced job.
    RankCount,
    /// Version of the GPU driver with which the traced program ran.
    DriverVersion,
    /// Recorder of the trace, and the recorder's version.
    RecorderAndVersion,
    /// An option with which the recorder of the trace ran.
    RecorderOption,
}

impl TraceSetupProperty {
    /// Label of the property in printed output, and its key in JSON.
    pub const fn label_and_json_key(self) -> &'static str {
        match self {
            Self::DeviceNames => "device",
            Self::ComputeCapability => "compute capability",
            Self::MultiprocessorCounts => "multiprocessors",
            Self::RankCount => "ranks",
            Self::DriverVersion => "driver",
            Self::RecorderAndVersion => "recorder",
            Self::RecorderOption => "option",
        }
    }
}

/// A property of the setup whose values differ between two traces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DifferingSetupProperty {
    /// Which.
    pub property: TraceSetupProperty,
    /// Name of the recorder option that differs; empty if another property differs.
    pub recorder_option_name: String,
    /// Values of the first and second trace; `None` if a trace does not record the property.
    pub values: [Option<String>; 2],
}

/// Machine, recorder and recording options of a trace, as far as the trace contains them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachineAndRecorderOfTrace {
    property_values: Vec<(TraceSetupProperty, String, Option<String>)>,
}

/// Recorder options that change what is recorded, or how much recording slows the program, by their
/// names in traces.
const COMPARED_RECORDING_OPTIONS: &[&str] = &[
    "CUDA_GRAPH_TRACE_OPTIONS:MODE",
    "PROCESS_0:CUDA_GRAPH_TRACE_OPTIONS:MODE",
    "PROCESS_0:COLLECT_NVTX_TRACE",
    "profile_memory",
    "record_shapes",
    "with_flops",
    "with_modules",
    "with_stack",
];
/// Metadata keys under which recorders store the version of the GPU driver.
const DRIVER_VERSION_METADATA_KEYS: &[&str] =
    &["NvDriverVersion", "CudaDriverVersion", "cuda_driver_version", "hip_driver_version"];

impl MachineAndRecorderOfTrace {
    /// Reads machine, recorder and options of a trace from its devices and metadata.
    pub(super) fn read_setup_of_trace(trace: &Trace, recorder: &str) -> Self {
        let used: BTreeSet<u32> = trace.places.iter().map(|place| place.device).collect();
        // If the trace has no operations, all its devices are taken to have been used.
        let devices = || {
            trace
                .devices
                .iter()
                .filter(|device| used.is_empty() || used.contains(&device.device_ordinal))
        };
        let joined = |values: BTreeSet<String>| {
            let values: Vec<String> = values.into_iter().filter(|text| !text.is_empty()).collect();
            (!values.is_empty()).then(|| values.join(", "))
        };
        let profiled =
            || trace.profiled_launches.iter().map(|launch| launch.device_description.clone());
        let names = devices().map(|device| device.device_name.clone()).chain(profiled()).collect();
        let capability = |(major, minor): (u32, u32)| format!("{major}.{minor}");
        let capabilities =
            devices().filter_map(|device| device.compute_capability).map(capability).collect();
        let multiprocessors = devices().filter_map(|of| of.multiprocessors);
        let multiprocessors = multiprocessors.map(|count| count.to_string()).collect();
        let metadata = |name: &str| trace.metadata.get(name).cloned();
        let driver = DRIVER_VERSION_METADATA_KEYS.iter().find_map(|name| metadata(name));
        let mut values = vec![
            (TraceSetupProperty::DeviceNames, String::new(), joined(names)),
            (TraceSetupProperty::ComputeCapability, String::new(), joined(capabilities)),
            (TraceSetupProperty::MultiprocessorCounts, String::new(), joined(multiprocessors)),
            (TraceSetupProperty::RankCount, String::new(), number_of_ranks_or_processes(trace)),
            (TraceSetupProperty::DriverVersion, String::new(), driver),
            (TraceSetupProperty::RecorderAndVersion, String::new(), Some(recorder.to_owned())),
        ];
        let options = COMPARED_RECORDING_OPTIONS.iter().map(|name| {
            let short = name.strip_prefix("PROCESS_0:").unwrap_or(name);
            (TraceSetupProperty::RecorderOption, short.to_owned(), metadata(name))
        });
        // Two versions of a recorder have different names for the same option, so the first value
        // that exists is kept.
        for (property, name, value) in options {
            match values.iter_mut().find(|(_, known, _)| *known == name && !name.is_empty()) {
                Some((_, _, known)) => *known = known.take().or(value),
                None => values.push((property, name, value)),
            }
        }
        Self { property_values: values }
    }
}

/// Returns the number of ranks of the job (`world_size`), or else the number of processes that used
/// a GPU.
fn number_of_ranks_or_processes(trace: &Trace) -> Option<String> {
    let world = trace.metadata.get("distributedInfo").and_then(|text| {
        let info: serde_json::Value = serde_json::from_str(text).ok()?;
        Some(info.get("world_size")?.to_string())
    });
    let processes: BTreeSet<u32> = trace.places.iter().map(|place| place.process_index).collect();
    world.or_else(|| (!processes.is_empty()).then(|| processes.len().to_string()))
}

/// Returns the properties in which the setups of two traces differ. Properties are compared if both
/// traces record them; the GPU model is also compared if one trace lacks it.
pub(super) fn differing_setup_properties(
    base: &MachineAndRecorderOfTrace,
    head: &MachineAndRecorderOfTrace,
) -> Vec<DifferingSetupProperty> {
    let both = base.property_values.iter().zip(&head.property_values);
    let differs = both.filter(|((property, _, base), (_, _, head))| {
        let recorded = base.is_some() && head.is_some();
        base != head && (recorded || *property == TraceSetupProperty::DeviceNames)
    });
    differs
        .map(|((property, name, base), (_, _, head))| DifferingSetupProperty {
            property: *property,
            recorder_option_name: name.clone(),
            values: [base.clone(), head.clone()],
        })
        .collect()
}

impl std::fmt::Display for DifferingSetupProperty {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [base, head] =
            self.values.each_ref().map(|value| value.as_deref().unwrap_or("not recorded"));
        let label = self.property.label_and_json_key();
        match self.property {
            TraceSetupProperty::RecorderOption => {
                write!(formatter, "{label} {}: A {base}, B {head}", self.recorder_option_name)
            }
            _ => write!(formatter, "{label}: A {base}, B {head}"),
        }
    }
}
