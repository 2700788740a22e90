//! One event of a Chrome trace, with its fields as they are written.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::model::quality::is_plausible_time;

/// The fields of an event that this reader uses. Times are read as text of microseconds with
/// decimals: a 64-bit float holds microseconds since 1970 only to a quarter of a microsecond.
#[derive(Debug, Deserialize)]
pub(super) struct ChromeEvent<'a> {
    #[serde(borrow, default)]
    pub ph: Cow<'a, str>,
    #[serde(borrow, default)]
    pub cat: Cow<'a, str>,
    #[serde(borrow, default)]
    pub name: Cow<'a, str>,
    #[serde(borrow)]
    pub ts: Option<&'a RawValue>,
    #[serde(borrow)]
    pub dur: Option<&'a RawValue>,
    #[serde(borrow)]
    pub pid: Option<&'a RawValue>,
    #[serde(borrow)]
    pub tid: Option<&'a RawValue>,
    #[serde(borrow)]
    pub id: Option<&'a RawValue>,
    #[serde(borrow)]
    pub args: Option<&'a RawValue>,
}

/// The arguments of an event that are used, each as written.
#[derive(Debug, Default, Deserialize)]
pub(super) struct EventArguments<'a> {
    /// Process that launched the operation; only files written by [`crate::export`] have this
    /// field.
    #[serde(borrow)]
    pub process: Option<&'a RawValue>,
    /// The graph, likewise.
    #[serde(borrow)]
    pub graph: Option<&'a RawValue>,
    #[serde(borrow)]
    correlation: Option<&'a RawValue>,
    /// Correlation id in events that XLA writes.
    #[serde(borrow)]
    correlation_id: Option<&'a RawValue>,
    /// Correlation id of PyTorch for ROCm, in calls and in the operations that they launched.
    #[serde(borrow, rename = "External id")]
    external_id: Option<&'a RawValue>,
    #[serde(borrow)]
    pub kernel_details: Option<&'a RawValue>,
    #[serde(borrow, rename = "memcpy_details")]
    pub copy_details: Option<&'a RawValue>,
    #[serde(borrow, rename = "memset_details")]
    pub set_details: Option<&'a RawValue>,
    #[serde(borrow)]
    pub device: Option<&'a RawValue>,
    #[serde(borrow)]
    pub context: Option<&'a RawValue>,
    #[serde(borrow)]
    pub stream: Option<&'a RawValue>,
    #[serde(borrow)]
    pub bytes: Option<&'a RawValue>,
    #[serde(borrow)]
    pub grid: Option<&'a RawValue>,
    #[serde(borrow)]
    pub block: Option<&'a RawValue>,
    #[serde(borrow, rename = "registers per thread")]
    pub registers: Option<&'a RawValue>,
    #[serde(borrow, rename = "shared memory")]
    pub shared: Option<&'a RawValue>,
    #[serde(borrow, rename = "graph node id")]
    pub graph_node: Option<&'a RawValue>,
    #[serde(borrow)]
    pub name: Option<&'a RawValue>,
    /// Sizes of an operator's input tensors.
    #[serde(borrow, rename = "Input Dims")]
    pub dims: Option<&'a RawValue>,
    #[serde(borrow, rename = "Input type")]
    pub types: Option<&'a RawValue>,
    #[serde(borrow, rename = "Concrete Inputs")]
    pub values: Option<&'a RawValue>,
    /// Name of the collective, as PyTorch writes it.
    #[serde(borrow, rename = "Collective name")]
    pub collective: Option<&'a RawValue>,
    #[serde(borrow, rename = "In msg nelems")]
    pub elements_in: Option<&'a RawValue>,
    #[serde(borrow, rename = "Out msg nelems")]
    pub elements_out: Option<&'a RawValue>,
    #[serde(borrow, rename = "dtype")]
    pub element: Option<&'a RawValue>,
    #[serde(borrow, rename = "Group size")]
    pub group_size: Option<&'a RawValue>,
    #[serde(borrow, rename = "Process Group Name")]
    pub group_name: Option<&'a RawValue>,
    #[serde(borrow, rename = "Process Group Ranks")]
    pub group_ranks: Option<&'a RawValue>,
    /// The kind of device of an allocation: 1 is a GPU.
    #[serde(borrow, rename = "Device Type")]
    pub device_type: Option<&'a RawValue>,
    #[serde(borrow, rename = "Device Id")]
    pub memory_device: Option<&'a RawValue>,
    #[serde(borrow, rename = "Addr")]
    pub address: Option<&'a RawValue>,
    /// Number of allocated bytes; negative if memory is freed.
    #[serde(borrow, rename = "Bytes")]
    pub memory_bytes: Option<&'a RawValue>,
}

impl<'a> EventArguments<'a> {
    /// The arguments of an event; empty if the field has another type.
    pub fn new(event: &ChromeEvent<'a>) -> Self {
        event.args.and_then(|args| serde_json::from_str(args.get()).ok()).unwrap_or_default()
    }

    /// Returns the id that joins a call with the operations that it launched.
    pub fn correlation(&self) -> Option<i64> {
        as_integer(self.correlation.or(self.correlation_id).or(self.external_id))
    }
}

/// The text of a value: a string without its quotation marks, anything else as written.
pub(super) fn text(value: &RawValue) -> Cow<'_, str> {
    let written = value.get();
    // Most values are numbers, and most texts have no escapes.
    let plain = written.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    match plain {
        None => Cow::Borrowed(written),
        Some(plain) if !plain.contains('\\') => Cow::Borrowed(plain),
        Some(_) => serde_json::from_str(written).unwrap_or(Cow::Borrowed(written)),
    }
}

/// A whole number, which may be written as a string.
pub(super) fn as_integer(value: Option<&RawValue>) -> Option<i64> {
    let text = text(value?);
    let text = text.trim();
    #[allow(clippy::cast_possible_truncation)]
    text.parse().ok().or_else(|| text.parse::<f64>().ok().map(|value| value as i64))
}

/// `[1, 2, 3]`.
pub(super) fn dimensions(value: Option<&RawValue>) -> [u32; 3] {
    let numbers: Vec<u32> =
        value.and_then(|value| serde_json::from_str(value.get()).ok()).unwrap_or_default();
    std::array::from_fn(|i| numbers.get(i).copied().unwrap_or(0))
}

/// Converts microseconds with decimals to nanoseconds, exactly; `None` if they are so large that a
/// difference may overflow.
pub(super) fn exact_nanoseconds(value: Option<&RawValue>) -> Option<i64> {
    let text = text(value?);
    let text = text.trim();
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let exact = || {
        if fraction.len() > 18 || !fraction.bytes().all(|digit| digit.is_ascii_digit()) {
            return None;
        }
        // The sign of -0.5 is in the text only.
        let negative = whole.starts_with('-');
        let whole: i64 = whole.parse().ok()?;
        let digit = |at: usize| fraction.as_bytes().get(at).map_or(0, |digit| digit - b'0');
        let digits = (0..3).fold(0, |digits, at| digits * 10 + i64::from(digit(at)));
        let round = i64::from(fraction.as_bytes().get(3).is_some_and(|&digit| digit >= b'5'));
        let part = digits + round;
        whole.checked_mul(1000)?.checked_add(if negative { -part } else { part })
    };
    #[allow(clippy::cast_possible_truncation)]
    let rounded = || {
        let value: f64 = text.parse().ok()?;
        (value.is_finite() && value.abs() < 9e15).then_some((value * 1000.0).round() as i64)
    };
    exact().or_else(rounded).filter(is_plausible_time)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn json_times_are_exact_to_the_nanosecond() {
        let time =
            |text: &str| exact_nanoseconds(Some(&RawValue::from_string(text.to_owned()).unwrap()));
        assert_eq!(time("1712195495505543.2"), Some(1_712_195_495_505_543_200));
        assert_eq!(time("1712195495505543.217"), Some(1_712_195_495_505_543_217));
        assert_eq!(time("63.8134"), Some(63_813));
        assert_eq!(time("63.8135"), Some(63_814));
        assert_eq!(time("5"), Some(5000));
        assert_eq!(time("-1.5"), Some(-1500));
        assert_eq!(time("-0.005"), Some(-5));
        assert_eq!(time("\"7.25\""), Some(7250));
        assert_eq!(time("1.5e3"), Some(1_500_000));
        assert_eq!(time("1e300"), None);
        assert_eq!(time("null"), None);
        assert_eq!(time("[1]"), None);
    }
}
