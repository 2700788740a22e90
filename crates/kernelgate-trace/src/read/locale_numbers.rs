//! Numbers as a program prints them in the locale of its user: `1,234.5`, `1.234,5`, `1 234,5`.

/// Format in which the numbers of a file are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum DecimalFormat {
    /// `1,234.5`.
    #[default]
    Point,
    /// `1.234,5`, also with spaces or apostrophes between thousands.
    Comma,
}

/// Units of what is counted in whole numbers.
const WHOLE_NUMBER_UNITS: &[&str] = &[
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

impl DecimalFormat {
    /// Detects the number format of values with units: the format that most unambiguous values
    /// have.
    pub fn detect_format<'a>(values: impl Iterator<Item = (&'a str, &'a str)>) -> DecimalFormat {
        let (mut point, mut comma) = (0usize, 0usize);
        for (value, unit) in values {
            match Self::from_value(value, unit) {
                Some(Self::Point) => point += 1,
                Some(Self::Comma) => comma += 1,
                None => {}
            }
        }
        if comma > point { Self::Comma } else { Self::Point }
    }

    /// The only format in which a value is a number; `None` where it is one in both, or in neither.
    fn from_value(value: &str, unit: &str) -> Option<DecimalFormat> {
        let value = without_separators(value);
        let [point, comma] = [Self::Point, Self::Comma].map(|format| format.parse(&value));
        match (point, comma) {
            (Some(_), None) => Some(Self::Point),
            (None, Some(_)) => Some(Self::Comma),
            // For example, `152.192` nanoseconds is a whole number with a separator, because no
            // nanosecond has thousandths.
            (Some(point), Some(comma)) if point != comma && WHOLE_NUMBER_UNITS.contains(&unit) => {
                Some(if point.fract() == 0.0 { Self::Point } else { Self::Comma })
            }
            // For example, `0,123` is a fraction, because nobody groups a thousand of zero.
            (Some(point), Some(comma)) if point != comma => {
                let leading = value.trim_start_matches('-').strip_prefix('0')?;
                let format = if leading.starts_with('.') { Self::Point } else { Self::Comma };
                leading.starts_with(['.', ',']).then_some(format)
            }
            _ => None,
        }
    }

    pub fn parse_number(self, text: &str) -> Option<f64> {
        self.parse(&without_separators(text))
    }

    fn parse(self, text: &str) -> Option<f64> {
        let (thousands, decimal) = match self {
            Self::Point => (',', '.'),
            Self::Comma => ('.', ','),
        };
        let (whole, fraction) = text.split_once(decimal).unwrap_or((text, ""));
        if fraction.contains(thousands) {
            return None;
        }
        if whole.contains(thousands) {
            let groups: Vec<&str> = whole.trim_start_matches('-').split(thousands).collect();
            let [first, between @ .., last] = &groups[..] else { return None };
            // Locales of India group by two above a thousand.
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

/// Returns whether a text looks like a number in some format.
pub(super) fn looks_numeric(text: &str) -> bool {
    let text = without_separators(text);
    text.contains(|c: char| c.is_ascii_digit())
        && text.chars().all(|c| c.is_ascii_digit() || "+-.,eE".contains(c))
}

/// Removes spaces and apostrophes inside and around a number.
fn without_separators(text: &str) -> String {
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

    fn detected_format(values: &[(&str, &str)]) -> DecimalFormat {
        DecimalFormat::detect_format(values.iter().copied())
    }

    #[test]
    fn a_number_is_parsed_with_the_separators_of_its_format() {
        let (point, comma) = (DecimalFormat::Point, DecimalFormat::Comma);
        assert_eq!(point.parse_number("1,234,567.5"), Some(1_234_567.5));
        assert_eq!(comma.parse_number("1.234.567,5"), Some(1_234_567.5));
        assert_eq!(comma.parse_number("1\u{202f}234,5"), Some(1234.5));
        assert_eq!(point.parse_number("1'234.5"), Some(1234.5));
        assert_eq!(point.parse_number("11,52,192.5"), Some(1_152_192.5));
        assert_eq!(point.parse_number("-0.25"), Some(-0.25));
        assert_eq!(point.parse_number("1e3"), Some(1000.0));
        for (format, text) in [
            (point, "1,5"),
            (point, "1,52,19"),
            (point, "111,52,192"),
            (comma, "1.5"),
            (point, "nan"),
            (point, ""),
            (point, "PolicySpread"),
        ] {
            assert_eq!(format.parse_number(text), None, "{text}");
        }
    }

    #[test]
    fn an_ambiguous_separator_is_decided_by_other_rows_and_units() {
        assert_eq!(detected_format(&[("117.344", "us"), ("97,94", "%")]), DecimalFormat::Comma);
        assert_eq!(detected_format(&[("117.344", "us"), ("97.94", "%")]), DecimalFormat::Point);
        assert_eq!(detected_format(&[("152.192", "ns")]), DecimalFormat::Comma);
        assert_eq!(detected_format(&[("152,192", "nsecond")]), DecimalFormat::Point);
        assert_eq!(detected_format(&[("0,123", "")]), DecimalFormat::Comma);
        assert_eq!(detected_format(&[("0.123", ""), ("Spread", "")]), DecimalFormat::Point);
        assert_eq!(detected_format(&[("152.192", "us")]), DecimalFormat::Point, "nothing decides");
    }

    #[test]
    fn a_text_without_digits_is_not_parsed_as_a_number() {
        assert!(looks_numeric("1.2,3") && looks_numeric("12") && looks_numeric("1 234"));
        assert!(!looks_numeric("n/a") && !looks_numeric("") && !looks_numeric("12 warps"));
    }
}
