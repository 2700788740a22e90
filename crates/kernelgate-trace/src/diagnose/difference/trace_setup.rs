//! Machine, recorder and options of a trace, and the differences between two traces.

use std::collections::BTreeSet;

use crate::model::Trace;

/// A property of a trace's setup, such as its driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SetupProperty {
    /// Names of the devices.
    Device,
    /// Compute capabilities.
    Capability,
    /// Multiprocessors of the devices: a part of a device has fewer.
    Multiprocessors,
    /// Ranks of the job.
    Ranks,
    /// Version of the driver.
    Driver,
    /// Recorder and its version.
    Recorder,
    /// An option with which the recorder ran.
    Option,
}

impl SetupProperty {
    /// Label in printed output, and key in JSON.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Capability => "compute capability",
            Self::Multiprocessors => "multiprocessors",
            Self::Ranks => "ranks",
            Self::Driver => "driver",
            Self::Recorder => "recorder",
            Self::Option => "option",
        }
    }
}

/// A property that two traces do not share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetupPropertyChange {
    /// Which.
    pub property: SetupProperty,
    /// Name of the recorder option; empty for other properties.
    pub name: String,
    /// Values of both traces; `None` if a trace does not record the property.
    pub values: [Option<String>; 2],
}

/// Machine, recorder and options of a trace, as far as the trace contains them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TraceSetup {
    values: Vec<(SetupProperty, String, Option<String>)>,
}

/// Options that change what a recorder records, or what recording costs.
const RECORDING_OPTIONS: &[&str] = &[
    "CUDA_GRAPH_TRACE_OPTIONS:MODE",
    "PROCESS_0:CUDA_GRAPH_TRACE_OPTIONS:MODE",
    "PROCESS_0:COLLECT_NVTX_TRACE",
    "profile_memory",
    "record_shapes",
    "with_flops",
    "with_modules",
    "with_stack",
];
/// Names under which recorders store the driver's version.
const DRIVER_VERSION_NAMES: &[&str] =
    &["NvDriverVersion", "CudaDriverVersion", "cuda_driver_version", "hip_driver_version"];

impl TraceSetup {
    /// Reads the setup from devices and metadata.
    pub(super) fn new(trace: &Trace, recorder: &str) -> Self {
        let used: BTreeSet<u32> = trace.places.iter().map(|place| place.device).collect();
        // If a trace has no operations, all its devices count as used.
        let devices =
            || trace.devices.iter().filter(|device| used.is_empty() || used.contains(&device.id));
        let joined = |values: BTreeSet<String>| {
            let values: Vec<String> = values.into_iter().filter(|text| !text.is_empty()).collect();
            (!values.is_empty()).then(|| values.join(", "))
        };
        let profiled = || trace.profiled.iter().map(|launch| launch.device.clone());
        let names = devices().map(|device| device.name.clone()).chain(profiled()).collect();
        let capability = |(major, minor): (u32, u32)| format!("{major}.{minor}");
        let capabilities = devices().filter_map(|device| device.compute).map(capability).collect();
        let multiprocessors = devices().filter_map(|of| of.multiprocessors);
        let multiprocessors = multiprocessors.map(|count| count.to_string()).collect();
        let metadata = |name: &str| trace.metadata.get(name).cloned();
        let driver = DRIVER_VERSION_NAMES.iter().find_map(|name| metadata(name));
        let mut values = vec![
            (SetupProperty::Device, String::new(), joined(names)),
            (SetupProperty::Capability, String::new(), joined(capabilities)),
            (SetupProperty::Multiprocessors, String::new(), joined(multiprocessors)),
            (SetupProperty::Ranks, String::new(), job_size(trace)),
            (SetupProperty::Driver, String::new(), driver),
            (SetupProperty::Recorder, String::new(), Some(recorder.to_owned())),
        ];
        let options = RECORDING_OPTIONS.iter().map(|name| {
            let short = name.strip_prefix("PROCESS_0:").unwrap_or(name);
            (SetupProperty::Option, short.to_owned(), metadata(name))
        });
        // Two versions of a profiler have different names for the same option.
        for (property, name, value) in options {
            match values.iter_mut().find(|(_, known, _)| *known == name && !name.is_empty()) {
                Some((_, _, known)) => *known = known.take().or(value),
                None => values.push((property, name, value)),
            }
        }
        Self { values }
    }
}

/// The size of the job, or the processes that used a device.
fn job_size(trace: &Trace) -> Option<String> {
    let world = trace.metadata.get("distributedInfo").and_then(|text| {
        let info: serde_json::Value = serde_json::from_str(text).ok()?;
        Some(info.get("world_size")?.to_string())
    });
    let processes: BTreeSet<u32> = trace.places.iter().map(|place| place.process).collect();
    world.or_else(|| (!processes.is_empty()).then(|| processes.len().to_string()))
}

/// How two setups differ. A recorder option is compared only if both traces contain the option.
pub(super) fn setup_changes(base: &TraceSetup, head: &TraceSetup) -> Vec<SetupPropertyChange> {
    let both = base.values.iter().zip(&head.values);
    let differs = both.filter(|((property, _, base), (_, _, head))| {
        let recorded = base.is_some() && head.is_some();
        base != head && (recorded || *property == SetupProperty::Device)
    });
    differs
        .map(|((property, name, base), (_, _, head))| SetupPropertyChange {
            property: *property,
            name: name.clone(),
            values: [base.clone(), head.clone()],
        })
        .collect()
}

impl std::fmt::Display for SetupPropertyChange {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [base, head] =
            self.values.each_ref().map(|value| value.as_deref().unwrap_or("not recorded"));
        let label = self.property.label();
        match self.property {
            SetupProperty::Option => write!(formatter, "{label} {}: A {base}, B {head}", self.name),
            _ => write!(formatter, "{label}: A {base}, B {head}"),
        }
    }
}
