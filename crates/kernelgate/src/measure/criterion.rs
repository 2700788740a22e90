//! Implements Criterion's `Measurement` for kernelgate's samples in nanoseconds; Criterion then
//! shows the throughput with its share of the limit.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Instant;

use criterion::Throughput;
use criterion::measurement::{Measurement, ValueFormatter};

use super::limits::ShortestLaunchTime;

/// Data about the timed case that Criterion's value formatter displays.
#[derive(Debug, Clone, Default)]
pub struct CaseShownByCriterion {
    /// Shortest possible time of the case by the device's measured limits.
    pub limit: Option<ShortestLaunchTime>,
}

/// Elapsed nanoseconds. kernelgate's samples come through Criterion's `iter_custom`; `start` and
/// `end` only serve Criterion's own timing loops.
#[derive(Debug, Clone, Default)]
pub struct ElapsedTimeMeasurement {
    formatter: ElapsedTimeFormatter,
}

impl ElapsedTimeMeasurement {
    /// Returns the shared data of the timed case, which the caller sets before each case and the
    /// formatter reads.
    pub fn case_shown_by_formatter(&self) -> Rc<RefCell<CaseShownByCriterion>> {
        Rc::clone(&self.formatter.case)
    }
}

impl Measurement for ElapsedTimeMeasurement {
    type Intermediate = Instant;
    type Value = f64;

    fn start(&self) -> Instant {
        Instant::now()
    }

    fn end(&self, start: Instant) -> f64 {
        start.elapsed().as_nanos() as f64
    }

    fn add(&self, a: &f64, b: &f64) -> f64 {
        a + b
    }

    fn zero(&self) -> f64 {
        0.0
    }

    fn to_f64(&self, value: &f64) -> f64 {
        *value
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        &self.formatter
    }
}

/// In Criterion's throughput, elements mean floating-point operations and bytes mean bytes;
/// prefixes such as M are decimal.
#[derive(Debug, Clone, Default)]
struct ElapsedTimeFormatter {
    case: Rc<RefCell<CaseShownByCriterion>>,
}

impl ValueFormatter for ElapsedTimeFormatter {
    fn format_throughput(&self, throughput: &Throughput, elapsed_ns: f64) -> String {
        let mut rate = [elapsed_ns];
        let unit = self.scale_throughputs(elapsed_ns, throughput, &mut rate);
        let share = self
            .case
            .borrow()
            .limit
            .as_ref()
            .map(|limit| 100.0 * limit.share_of_limit_reached(elapsed_ns));
        match share {
            Some(share) => format!("{:.2} {unit} ({share:.1}%)", rate[0]),
            None => format!("{:.2} {unit}", rate[0]),
        }
    }

    fn scale_values(&self, typical_ns: f64, values: &mut [f64]) -> &'static str {
        let (factor, unit) = match typical_ns {
            ns if ns < 1e3 => (1.0, "ns"),
            ns if ns < 1e6 => (1e-3, "µs"),
            ns if ns < 1e9 => (1e-6, "ms"),
            _ => (1e-9, "s"),
        };
        values.iter_mut().for_each(|value| *value *= factor);
        unit
    }

    fn scale_throughputs(
        &self,
        typical_ns: f64,
        throughput: &Throughput,
        values: &mut [f64],
    ) -> &'static str {
        let (amount, units) = match *throughput {
            Throughput::Elements(flops) => {
                (flops as f64, ["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s"])
            }
            Throughput::Bytes(bytes) | Throughput::BytesDecimal(bytes) => {
                (bytes as f64, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"])
            }
            Throughput::ElementsAndBytes { elements, .. } => {
                (elements as f64, ["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s"])
            }
            Throughput::Bits(bits) => (bits as f64, ["b/s", "kb/s", "Mb/s", "Gb/s", "Tb/s"]),
        };
        let typical = amount / typical_ns * 1e9;
        let step = ((typical.max(1.0).log10() / 3.0) as usize).min(units.len() - 1);
        let scale = 1e9 / 1e3f64.powi(step as i32);
        values.iter_mut().for_each(|value| *value = amount / *value * scale);
        units[step]
    }

    fn scale_for_machines(&self, _values: &mut [f64]) -> &'static str {
        "ns"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn criterion_shows_throughput_with_share_of_limit() {
        let elapsed = ElapsedTimeMeasurement::default();
        let format = |throughput| elapsed.formatter().format_throughput(&throughput, 2e6);
        assert_eq!(format(Throughput::Elements(3_000_000_000)), "1.50 TFLOP/s");
        elapsed.case_shown_by_formatter().borrow_mut().limit = Some(ShortestLaunchTime {
            shortest_launch_ns: 1e6,
            deciding_ceiling: "memory".to_owned(),
        });
        assert_eq!(format(Throughput::Bytes(4_000_000)), "2.00 GB/s (50.0%)");
        assert_eq!(format(Throughput::Bytes(4)), "2.00 kB/s (50.0%)");
    }

    #[test]
    fn times_are_shown_in_the_unit_of_the_typical_time() {
        let elapsed = ElapsedTimeMeasurement::default();
        let mut values = [1.5e6, 2.5e6];
        assert_eq!(elapsed.formatter().scale_values(2e6, &mut values), "ms");
        assert_eq!(values, [1.5, 2.5]);
    }
}
