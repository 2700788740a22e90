//! Units of the numbers that a chart shows, and short texts of these numbers with their unit.

/// Unit in which the numbers of a chart are printed, such as nanoseconds or bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlottedUnit {
    /// Time in nanoseconds.
    TimeNs,
    /// A rate: an amount per second; the text names the amount, such as "FLOP" or "B".
    AmountPerSecond(&'static str),
    Bytes,
    /// A fraction of a whole, printed as a percentage: 1 is 100 %.
    ShareAsPercent,
    /// A ratio of a value to an earlier value, printed as a relative change: 1 means unchanged.
    RatioAsRelativeChange,
    /// A count of things.
    Count,
    /// A relative error.
    RelativeError,
}

/// Number of significant digits of a number on a chart in its short form.
const DEFAULT_SIGNIFICANT_DIGITS: i32 = 3;

impl PlottedUnit {
    /// The value with three significant digits and its unit: "1.5 ms", "34 TFLOP/s", "12%".
    pub fn short_text_with_unit(self, value: f64) -> String {
        self.text_with_digits_and_unit(value, DEFAULT_SIGNIFICANT_DIGITS)
    }

    /// The value with seven significant digits and its unit: "1.475 ms".
    pub fn text_with_seven_digits(self, value: f64) -> String {
        self.text_with_digits_and_unit(value, 7)
    }

    fn text_with_digits_and_unit(self, value: f64, digits: i32) -> String {
        let short = |value| number_with_significant_digits(value, digits);
        match self {
            Self::TimeNs => {
                let (scale, unit) = match value.abs() {
                    0.0 => return "0".to_owned(),
                    ns if ns < 999.5 => (1.0, "ns"),
                    ns if ns < 999.5e3 => (1e3, "µs"),
                    ns if ns < 999.5e6 => (1e6, "ms"),
                    _ => (1e9, "s"),
                };
                format!("{} {unit}", short(value / scale))
            }
            Self::AmountPerSecond(unit) => {
                format!("{}{unit}/s", number_with_si_prefix(value, digits))
            }
            Self::Bytes => format!("{}B", number_with_si_prefix(value, digits)),
            Self::ShareAsPercent => format!("{}%", short(100.0 * value)),
            Self::RatioAsRelativeChange if value == 1.0 => "0%".to_owned(),
            Self::RatioAsRelativeChange => {
                let sign = if value > 1.0 { "+" } else { "" };
                format!("{sign}{}%", short(100.0 * (value - 1.0)))
            }
            Self::Count => number_with_si_prefix(value, digits).trim_end().to_owned(),
            Self::RelativeError if value == 0.0 => "exact".to_owned(),
            Self::RelativeError => format!("{value:.1e}").replace(".0e", "e"),
        }
    }
}

/// A number with a decimal SI prefix after a space, without its unit: "34 T", "5 ", "125 k". The
/// prefix "k" begins at 100,000, so that smaller lengths such as 16384 are printed in full.
fn number_with_si_prefix(value: f64, digits: i32) -> String {
    // Each SI prefix: the smallest value that is printed with the prefix, the factor of the prefix,
    // and the prefix.
    const SI_PREFIXES: [(f64, f64, &str); 5] =
        [(1e15, 1e15, "P"), (1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e5, 1e3, "k")];
    let found = SI_PREFIXES.iter().find(|(from, ..)| value.abs() >= *from);
    found.map_or_else(
        || format!("{} ", number_with_significant_digits(value, digits)),
        |(_, one, prefix)| {
            format!("{} {prefix}", number_with_significant_digits(value / one, digits))
        },
    )
}

/// The text of a number with at most `digits` significant digits; whole numbers keep all their
/// digits, and zeros at the end of decimals are dropped.
fn number_with_significant_digits(value: f64, digits: i32) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let decimals = (digits - 1 - value.abs().log10().floor() as i32).clamp(0, digits + 3) as usize;
    let text = format!("{value:.decimals$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_charts_are_short_and_have_units() {
        let texts = |quantity: PlottedUnit, values: &[f64]| -> Vec<String> {
            values.iter().map(|value| quantity.short_text_with_unit(*value)).collect()
        };
        assert_eq!(
            texts(PlottedUnit::TimeNs, &[0.0, 5.0, 1500.0, 2e6, 1.25e9, 999_999.0]),
            ["0", "5 ns", "1.5 µs", "2 ms", "1.25 s", "1 ms"]
        );
        assert_eq!(
            texts(PlottedUnit::AmountPerSecond("FLOP"), &[3.4e13, 5e8, 12.0]),
            ["34 TFLOP/s", "500 MFLOP/s", "12 FLOP/s"]
        );
        assert_eq!(texts(PlottedUnit::Bytes, &[1.5e9, 512.0]), ["1.5 GB", "512 B"]);
        assert_eq!(
            texts(PlottedUnit::ShareAsPercent, &[0.5, 0.123_45, 1.5]),
            ["50%", "12.3%", "150%"]
        );
        assert_eq!(
            texts(PlottedUnit::RatioAsRelativeChange, &[1.0, 1.05, 0.9]),
            ["0%", "+5%", "-10%"]
        );
        assert_eq!(
            texts(PlottedUnit::Count, &[4096.0, 16384.0, 33_554_432.0, 0.25]),
            ["4096", "16384", "33.6 M", "0.25"]
        );
        let exact = [1e6, 1.475e6, 600_000.000_000_1]
            .map(|ns| PlottedUnit::TimeNs.text_with_seven_digits(ns));
        assert_eq!(exact, ["1 ms", "1.475 ms", "600 µs"]);
        assert_eq!(
            texts(PlottedUnit::RelativeError, &[0.0, 1.5e-5, 2e-3]),
            ["exact", "1.5e-5", "2e-3"]
        );
    }
}
