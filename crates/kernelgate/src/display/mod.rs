//! Formats numbers, names and tables for people. No decisions here.

pub mod duration;
pub mod harmless_text;
pub mod runs;
pub mod table;
pub mod terminal;

/// Formats a number of bytes in decimal units, such as "134 MB".
pub fn decimal_byte_size_text(bytes: u64) -> String {
    let (scale, unit) = match bytes {
        0..1_000 => return format!("{bytes} B"),
        1_000..1_000_000 => (1e3, "kB"),
        1_000_000..1_000_000_000 => (1e6, "MB"),
        _ => (1e9, "GB"),
    };
    format!("{:.3} {unit}", NumberWithSignificantDigits(bytes as f64 / scale))
}

/// Formats a count with its noun, such as "1 case" or "2 cases"; the plural gets an "s".
pub fn counted_noun(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// Formats a time with four significant digits and its unit, such as "1.234 ms".
pub fn time_text(elapsed_ns: f64) -> String {
    let (scale, unit) = match elapsed_ns.abs() {
        ns if ns < 1e3 => (1.0, "ns"),
        ns if ns < 1e6 => (1e3, "µs"),
        ns if ns < 1e9 => (1e6, "ms"),
        _ => (1e9, "s"),
    };
    format!("{:.4} {unit}", NumberWithSignificantDigits(elapsed_ns / scale))
}

/// Formats an energy with four significant digits and its unit, such as "1.234 mJ".
pub fn energy_text(joules: f64) -> String {
    let (scale, unit) = match joules.abs() {
        joules if joules < 1e-3 => (1e-6, "µJ"),
        joules if joules < 1.0 => (1e-3, "mJ"),
        _ => (1.0, "J"),
    };
    format!("{:.4} {unit}", NumberWithSignificantDigits(joules / scale))
}

/// Formats an amount per time as a rate, such as "151.2 GFLOP/s" or "22.1 GB/s".
pub fn amount_rate_text(amount: u64, unit: &str, elapsed_ns: f64) -> String {
    let per_second = amount as f64 / elapsed_ns * 1e9;
    let (scale, prefix) = match per_second {
        rate if rate < 1e9 => (1e6, "M"),
        rate if rate < 1e12 => (1e9, "G"),
        _ => (1e12, "T"),
    };
    format!("{:.4} {prefix}{unit}/s", NumberWithSignificantDigits(per_second / scale))
}

/// Sort key for case ids that compares the numbers inside ids by value: `s512` before `s1024`.
pub fn natural_sort_key(id: &str) -> Vec<(String, u64)> {
    let mut parts = Vec::new();
    let mut rest = id;
    while !rest.is_empty() {
        let words = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (word, after) = rest.split_at(words);
        let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        let (number, after) = after.split_at(digits);
        parts.push((word.to_owned(), number.parse().unwrap_or(u64::MAX)));
        rest = after;
    }
    parts
}

/// Finds the value of a flag in the words of a command line, after "=" or as the next word.
pub fn value_of_flag<'a>(words: &'a [String], flag: &str) -> Option<&'a str> {
    words.iter().enumerate().find_map(|(place, word)| match word.strip_prefix(flag)? {
        "" => words.get(place + 1).map(String::as_str),
        rest => rest.strip_prefix('='),
    })
}

/// Removes the given flags from the words of a command line; flags in `valued` have a value after
/// "=" or as the next word.
pub fn words_without_flags(
    mut words: impl Iterator<Item = String>,
    valued: &[&str],
    bare: &[&str],
) -> Vec<String> {
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        let (flag, value) =
            word.split_once('=').map_or((word.as_str(), None), |(flag, value)| (flag, Some(value)));
        if valued.contains(&flag) {
            if value.is_none() {
                words.next();
            }
        } else if !bare.contains(&word.as_str()) {
            kept.push(word);
        }
    }
    kept
}

/// Formats a number without an exponent; the format precision is the number of significant digits.
struct NumberWithSignificantDigits(f64);

impl std::fmt::Display for NumberWithSignificantDigits {
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
    fn a_flag_value_follows_an_equals_sign_or_a_space() {
        let words =
            ["--base-directory=x", "--base=a=b", "--head", "c", "--last"].map(str::to_owned);
        let value = |flag| value_of_flag(&words, flag);
        assert_eq!([value("--base"), value("--head")], [Some("a=b"), Some("c")]);
        assert_eq!([value("--last"), value("--none")], [None, None]);
    }

    #[test]
    fn ids_are_sorted_by_the_values_of_their_numbers() {
        let mut ids = ["s1024_d8", "s512_d64", "s512_d8", "x", "s99999999999999999999", ""];
        ids.sort_by_key(|id| natural_sort_key(id));
        assert_eq!(ids, ["", "s512_d8", "s512_d64", "s1024_d8", "s99999999999999999999", "x"]);
    }
}
