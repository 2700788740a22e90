//! Formats and parses durations for people, such as `90s` or `1 h 5 min`.

use std::time::Duration;

/// Formats a duration as "1 h 5 min", "3 min" or "40 s".
pub fn duration_text(duration: Duration) -> String {
    match duration.as_secs() {
        seconds if seconds < 100 => format!("{seconds} s"),
        seconds if seconds < 5400 => format!("{} min", seconds.div_ceil(60)),
        seconds => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

/// Parses a duration such as "500ms", "90s", "5m", "1h", or a number of seconds.
///
/// # Errors
/// Fails if the text has another form, or the duration is below 10 ms.
pub fn parse(text: &str) -> Result<Duration, String> {
    // `ms` is tried before `s`, because a text in milliseconds also ends with `s`.
    let units = [("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
    let with_unit =
        units.into_iter().find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, scale)));
    let (number, scale) = with_unit.unwrap_or((text, 1.0));
    let seconds = number
        .parse::<f64>()
        .ok()
        .map(|number| number * scale)
        .filter(|seconds| (0.01..1e7).contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| format!("`{text}`: a time is 500ms, 90s, 5m or 1h"))
}

#[cfg(test)]
mod tests {
    use super::duration_text as shown_as;
    use super::*;

    #[test]
    fn durations_are_parsed_and_formatted() {
        for (text, seconds) in
            [("90s", 90.0), ("5m", 300.0), ("1.5h", 5400.0), ("20", 20.0), ("50ms", 0.05)]
        {
            assert_eq!(parse(text), Ok(Duration::from_secs_f64(seconds)));
        }
        for bad in ["", "m", "ms", "1ms", "-5m", "0", "5d", "nan", "1e99"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        let shown = [59, 150, 4000, 8000].map(|seconds| shown_as(Duration::from_secs(seconds)));
        assert_eq!(shown, ["59 s", "3 min", "67 min", "2 h 13 min"]);
    }
}
