//! The kernels that measuring needs, embedded: how they are used is for `kernelgate` to say.

pub mod bandwidth;
pub mod spin;
pub mod timing;

use crate::Source;

/// The files of `kernels/measure`.
pub const SOURCES: &[Source] = &[
    Source::new("measure/blocker", include_str!("../../kernels/measure/blocker.cu")),
    Source::new("measure/clock_probe", include_str!("../../kernels/measure/clock_probe.cu")),
    Source::new("measure/copy_bandwidth", include_str!("../../kernels/measure/copy_bandwidth.cu")),
    Source::new("measure/empty", include_str!("../../kernels/measure/empty.cu")),
    Source::new("measure/flush_l2", include_str!("../../kernels/measure/flush_l2.cu")),
    Source::new("measure/read_bandwidth", include_str!("../../kernels/measure/read_bandwidth.cu")),
    Source::new("measure/spin", include_str!("../../kernels/measure/spin.cu")),
    Source::new("measure/write_bandwidth", include_str!("../../kernels/measure/write_bandwidth.cu")),
];

/// The file of that stem.
fn source(stem: &str) -> Source {
    let found = SOURCES.iter().find(|source| source.file.strip_prefix("measure/") == Some(stem));
    *found.expect("the file is listed in SOURCES")
}
