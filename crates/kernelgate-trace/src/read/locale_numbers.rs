//! Parses numbers that `ncu` printed in the user's locale: `1,234.5`, `1.234,5`, `1 234,5`.

/// Decimal and thousands separators of the numbers in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum DecimalSeparatorFormat {
    /// `1,234.5`.
    #[default]
    DecimalPoint,
    /// Decimal comma, as in `1.234,5`; thousands may also be separated by spaces or apostrophes.
    DecimalComma,
}

/// Units whose quantities are whole numbers, so that a separator before three digits separates
/// thousands.
const UNITS_OF_WHOLE_NUMBERS: &[&str] = &[
    "ns",
    "nsecond",
    "cycle",
    "inst",
    "thread",
    "block",
    "warp",
    "byte",
    "byte/block",
    "sector",
    "request",
    "register/thread",
    "register",
    "kbyte",
    "Kbyte",
];

impl DecimalSeparatorFormat {
    /// Detects whether a file uses decimal points or commas, by majority of the values that are
    /// valid in only one format.
    pub fn detect_from_values_and_units<'a>(
        values: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> DecimalSeparatorFormat {
        let (mut point, mut comma) = (0usize, 0usize);
        for (value, unit) in values {
            match Self::from_unambiguous_value(value, unit) {
                Some(Self::DecimalPoint) => point += 1,
                Some(Self::DecimalComma) => comma += 1,
                None => {}
            }
        }
        if comma > point { Self::DecimalComma } else { Self::DecimalPoint }
    }

    /// Returns the only format in which the value is a valid number; `None` if both formats fit, or
    /// neither.
    fn from_unambiguous_value(value: &str, unit: &str) -> Option<DecimalSeparatorFormat> {
        let value = without_space_and_apostrophe_separators(value);
        let [point, comma] = [Self::DecimalPoint, Self::DecimalComma]
            .map(|format| format.parse_without_spaces(&value));
        match (point, comma) {
            (Some(_), None) => Some(Self::DecimalPoint),
            (None, Some(_)) => Some(Self::DecimalComma),
            // For example, `152.192` nanoseconds means 152 192 nanoseconds, because no profiler
            // prints thousandths of a nanosecond.
            (Some(point), Some(comma))
                if point != comma && UNITS_OF_WHOLE_NUMBERS.contains(&unit) =>
            {
                Some(if point.fract() == 0.0 { Self::DecimalPoint } else { Self::DecimalComma })
            }
            // For example, `0,123` is a fraction, because no number with thousands separators
            // starts with a zero.
            (Some(point), Some(comma)) if point != comma => {
                let leading = value.trim_start_matches('-').strip_prefix('0')?;
                let format =
                    if leading.starts_with('.') { Self::DecimalPoint } else { Self::DecimalComma };
                leading.starts_with(['.', ',']).then_some(format)
            }
            _ => None,
        }
    }

    pub fn parse_number_with_separators(self, text: &str) -> Option<f64> {
        self.parse_without_spaces(&without_space_and_apostrophe_separators(text))
    }

    fn parse_without_spaces(self, text: &str) -> Option<f64> {
        let (thousands, decimal) = match self {
            Self::DecimalPoint => (',', '.'),
            Self::DecimalComma => ('.', ','),
        };
        let (whole, fraction) = text.split_once(decimal).unwrap_or((text, ""));
        if fraction.contains(thousands) {
            return None;
        }
        if whole.contains(thousands) {
            let groups: Vec<&str> = whole.trim_start_matches('-').split(thousands).collect();
            let [first, between @ .., last] = &groups[..] else { return None };
            // In Indian locales, groups above the thousands have two digits.
            let equal = |length: usize| between.iter().all(|group| group.len() == length);
            let fits = (1..=3).contains(&first.len()) && last.len() == 3;
            if !fits || !(equal(3) || equal(2) && first.len() < 3) {
                return None;
            }
        }
        let value: f64 = text.replace(thousands, "").replace(decimal, ".").parse().ok()?;
        value.is_finite().then_some(value)
    }
}

/// Whether a text consists of digits, signs, separators and exponents, in any locale.
pub(super) fn looks_like_number_in_any_format(text: &str) -> bool {
    let text = without_space_and_apostrophe_separators(text);
    text.contains(|c: char| c.is_ascii_digit())
        && text.chars().all(|c| c.is_ascii_digit() || "+-.,eE".contains(c))
}

/// Removes spaces and apostrophes between digits, which separate thousands.
fn without_space_and_apostrophe_separators(text: &str) -> String {
    let text = text.trim();
    let digit = |c: Option<char>| c.is_some_and(|c| c.is_ascii_digit());
    let mut plain = String::with_capacity(text.len());
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        let separates = matches!(c, ' ' | '\u{a0}' | '\u{202f}' | '\'' | '\u{2019}')
            && digit(plain.chars().last())
            && digit(rest.peek().copied());
        if !separates {
            plain.push(c);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detected_separator_format(values: &[(&str, &str)]) -> DecimalSeparatorFormat {
        DecimalSeparatorFormat::detect_from_values_and_units(values.iter().copied())
    }

    #[test]
    fn a_number_is_parsed_with_the_separators_of_its_format() {
        let (point, comma) =
            (DecimalSeparatorFormat::DecimalPoint, DecimalSeparatorFormat::DecimalComma);
        assert_eq!(point.parse_number_with_separators("1,234,567.5"), Some(1_234_567.5));
        assert_eq!(comma.parse_number_with_separators("1.234.567,5"), Some(1_234_567.5));
        assert_eq!(comma.parse_number_with_separators("1\u{202f}234,5"), Some(1234.5));
        assert_eq!(point.parse_number_with_separators("1'234.5"), Some(1234.5));
        assert_eq!(point.parse_number_with_separators("11,52,192.5"), Some(1_152_192.5));
        assert_eq!(point.parse_number_with_separators("-0.25"), Some(-0.25));
        assert_eq!(point.parse_number_with_separators("1e3"), Some(1000.0));
        for (format, text) in [
            (point, "1,5"),
            (point, "1,52,19"),
            (point, "111,52,192"),
            (comma, "1.5"),
            (point, "nan"),
            (point, ""),
            (point, "PolicySpread"),
        ] {
            assert_eq!(format.parse_number_with_separators(text), None, "{text}");
        }
    }

    #[test]
    fn other_rows_and_units_decide_an_ambiguous_separator() {
        assert_eq!(
            detected_separator_format(&[("117.344", "us"), ("97,94", "%")]),
            DecimalSeparatorFormat::DecimalComma
        );
        assert_eq!(
            detected_separator_format(&[("117.344", "us"), ("97.94", "%")]),
            DecimalSeparatorFormat::DecimalPoint
        );
        assert_eq!(
            detected_separator_format(&[("152.192", "ns")]),
            DecimalSeparatorFormat::DecimalComma
        );
        assert_eq!(
            detected_separator_format(&[("152,192", "nsecond")]),
            DecimalSeparatorFormat::DecimalPoint
        );
        assert_eq!(
            detected_separator_format(&[("0,123", "")]),
            DecimalSeparatorFormat::DecimalComma
        );
        assert_eq!(
            detected_separator_format(&[("0.123", ""), ("Spread", "")]),
            DecimalSeparatorFormat::DecimalPoint
        );
        assert_eq!(
            detected_separator_format(&[("152.192", "us")]),
            DecimalSeparatorFormat::DecimalPoint,
            "nothing decides"
        );
    }

    #[test]
    fn text_without_digits_does_not_look_like_a_number() {
        assert!(
            looks_like_number_in_any_format("1.2,3")
                && looks_like_number_in_any_format("12")
                && looks_like_number_in_any_format("1 234")
        );
        assert!(
            !looks_like_number_in_any_format("n/a")
                && !looks_like_number_in_any_format("")
                && !looks_like_number_in_any_format("12 warps")
        );
    }
}
