//! One event of a Chrome trace, with its fields as raw JSON.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::model::quality::is_plausible_time_ns;

/// The fields of a Chrome trace event that kernelgate reads. Times stay decimal text of
/// microseconds, because a 64-bit float resolves microseconds since 1970 only to a quarter of a
/// microsecond.
#[derive(Debug, Deserialize)]
pub(super) struct ChromeTraceEvent<'a> {
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

/// The arguments of a Chrome trace event that kernelgate reads, each as raw JSON.
#[derive(Debug, Default, Deserialize)]
pub(super) struct ChromeEventArguments<'a> {
    /// Process id of the process that launched the operation; only files written by
    /// [`crate::export`] have this argument.
    #[serde(borrow)]
    #[serde(rename = "process")]
    pub launching_process_id: Option<&'a RawValue>,
    /// The graph, likewise.
    #[serde(borrow)]
    #[serde(rename = "graph")]
    pub graph_id: Option<&'a RawValue>,
    #[serde(borrow)]
    correlation: Option<&'a RawValue>,
    /// Correlation id in events that XLA's profiler writes.
    #[serde(borrow)]
    correlation_id: Option<&'a RawValue>,
    /// Correlation id that PyTorch for ROCm writes in launch calls and in the GPU operations that
    /// they launched.
    #[serde(borrow, rename = "External id")]
    external_id: Option<&'a RawValue>,
    #[serde(borrow)]
    pub kernel_details: Option<&'a RawValue>,
    #[serde(borrow, rename = "memcpy_details")]
    pub memcpy_details: Option<&'a RawValue>,
    #[serde(borrow, rename = "memset_details")]
    pub memset_details: Option<&'a RawValue>,
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
    pub registers_per_thread: Option<&'a RawValue>,
    #[serde(borrow, rename = "shared memory")]
    pub shared_memory: Option<&'a RawValue>,
    #[serde(borrow, rename = "graph node id")]
    pub graph_node: Option<&'a RawValue>,
    #[serde(borrow)]
    pub name: Option<&'a RawValue>,
    /// Sizes of each input tensor of an operator, as a JSON list of lists.
    #[serde(borrow, rename = "Input Dims")]
    pub input_dims: Option<&'a RawValue>,
    #[serde(borrow, rename = "Input type")]
    pub input_types: Option<&'a RawValue>,
    #[serde(borrow, rename = "Concrete Inputs")]
    pub concrete_inputs: Option<&'a RawValue>,
    /// PyTorch's name of the collective.
    #[serde(borrow, rename = "Collective name")]
    pub collective_name: Option<&'a RawValue>,
    #[serde(borrow, rename = "In msg nelems")]
    pub elements_in: Option<&'a RawValue>,
    #[serde(borrow, rename = "Out msg nelems")]
    pub elements_out: Option<&'a RawValue>,
    #[serde(borrow, rename = "dtype")]
    pub element_type: Option<&'a RawValue>,
    #[serde(borrow, rename = "Group size")]
    pub group_size: Option<&'a RawValue>,
    #[serde(borrow, rename = "Process Group Name")]
    pub group_name: Option<&'a RawValue>,
    #[serde(borrow, rename = "Process Group Ranks")]
    pub group_ranks: Option<&'a RawValue>,
    /// PyTorch's device-type number of an allocation: 1 is a GPU.
    #[serde(borrow, rename = "Device Type")]
    pub device_type: Option<&'a RawValue>,
    #[serde(borrow, rename = "Device Id")]
    pub memory_device_id: Option<&'a RawValue>,
    #[serde(borrow, rename = "Addr")]
    pub address: Option<&'a RawValue>,
    /// Number of allocated bytes; negative if the event frees memory.
    #[serde(borrow, rename = "Bytes")]
    pub memory_bytes: Option<&'a RawValue>,
}

impl<'a> ChromeEventArguments<'a> {
    /// Parses the arguments of an event; all arguments are `None` if parsing fails.
    pub fn parse_arguments_of_event(event: &ChromeTraceEvent<'a>) -> Self {
        event.args.and_then(|args| serde_json::from_str(args.get()).ok()).unwrap_or_default()
    }

    /// Returns the correlation id that connects a launch call with its GPU operations.
    pub fn correlation_id(&self) -> Option<i64> {
        json_value_as_integer(self.correlation.or(self.correlation_id).or(self.external_id))
    }
}

/// Returns a JSON string without quotation marks and escapes; returns any other JSON value as
/// written.
pub(super) fn json_value_as_text(value: &RawValue) -> Cow<'_, str> {
    let written = value.get();
    // Most values are numbers and most strings have no escapes, so these cases avoid an allocation.
    let plain = written.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    match plain {
        None => Cow::Borrowed(written),
        Some(plain) if !plain.contains('\\') => Cow::Borrowed(plain),
        Some(_) => serde_json::from_str(written).unwrap_or(Cow::Borrowed(written)),
    }
}

/// Parses a JSON number, or a JSON string that contains a number, as an integer.
pub(super) fn json_value_as_integer(value: Option<&RawValue>) -> Option<i64> {
    let text = json_value_as_text(value?);
    let text = text.trim();
    #[allow(clippy::cast_possible_truncation)]
    text.parse().ok().or_else(|| text.parse::<f64>().ok().map(|value| value as i64))
}

/// `[1, 2, 3]`.
pub(super) fn json_list_as_three_dimensions(value: Option<&RawValue>) -> [u32; 3] {
    let numbers: Vec<u32> =
        value.and_then(|value| serde_json::from_str(value.get()).ok()).unwrap_or_default();
    std::array::from_fn(|i| numbers.get(i).copied().unwrap_or(0))
}

/// Converts decimal microseconds to nanoseconds without float rounding; `None` if the time is too
/// large for differences without overflow.
pub(super) fn decimal_microseconds_as_nanoseconds(value: Option<&RawValue>) -> Option<i64> {
    let text = json_value_as_text(value?);
    let text = text.trim();
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let exact = || {
        if fraction.len() > 18 || !fraction.bytes().all(|digit| digit.is_ascii_digit()) {
            return None;
        }
        // The integer part of "-0.5" parses as 0, so the sign is read from the text.
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
    exact().or_else(rounded).filter(is_plausible_time_ns)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn decimal_microseconds_become_exact_nanoseconds() {
        let time = |text: &str| {
            decimal_microseconds_as_nanoseconds(Some(
                &RawValue::from_string(text.to_owned()).unwrap(),
            ))
        };
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
