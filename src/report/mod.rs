//! Text, Markdown and JSON for people and programs. No decisions here.

pub mod calibration;
pub mod comparison;
pub mod runs;
pub mod table;
pub mod verdicts;

/// "134 MB": decimal units.
pub fn bytes(bytes: u64) -> String {
    let (scale, unit) = match bytes {
        0..1_000 => return format!("{bytes} B"),
        1_000..1_000_000 => (1e3, "kB"),
        1_000_000..1_000_000_000 => (1e6, "MB"),
        _ => (1e9, "GB"),
    };
    format!("{:.3} {unit}", Significant(bytes as f64 / scale))
}

/// "1.234 ms", four significant digits.
pub fn time(elapsed_ns: f64) -> String {
    let (scale, unit) = match elapsed_ns.abs() {
        ns if ns < 1e3 => (1.0, "ns"),
        ns if ns < 1e6 => (1e3, "µs"),
        ns if ns < 1e9 => (1e6, "ms"),
        _ => (1e9, "s"),
    };
    format!("{:.4} {unit}", Significant(elapsed_ns / scale))
}

/// "151.2 GFLOP/s" or "22.1 GB/s", for an amount done in that time.
pub fn rate(amount: u64, unit: &str, elapsed_ns: f64) -> String {
    let per_second = amount as f64 / elapsed_ns * 1e9;
    let (scale, prefix) = match per_second {
        rate if rate < 1e9 => (1e6, "M"),
        rate if rate < 1e12 => (1e9, "G"),
        _ => (1e12, "T"),
    };
    format!("{:.4} {prefix}{unit}/s", Significant(per_second / scale))
}

/// Formats with as many significant digits as the precision says, without an exponent.
struct Significant(f64);

impl std::fmt::Display for Significant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let digits = f.precision().unwrap_or(3);
        let before = if self.0 == 0.0 { 1 } else { self.0.abs().log10().floor() as i32 + 1 };
        write!(f, "{:.*}", (digits as i32 - before.max(1)).max(0) as usize, self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_read_well() {
        assert_eq!(bytes(12), "12 B");
        assert_eq!(bytes(134_217_728), "134 MB");
        assert_eq!(bytes(1_720_000_000), "1.72 GB");
        assert_eq!(time(1_234_567.0), "1.235 ms");
        assert_eq!(time(12.0), "12.00 ns");
        assert_eq!(time(2.5e9), "2.500 s");
        assert_eq!(rate(137_438_953_472, "FLOP", 0.9e9), "152.7 GFLOP/s");
        assert_eq!(rate(1000, "B", 1000.0), "1.000 GB/s");
    }
}
