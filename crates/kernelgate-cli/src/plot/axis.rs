//! The quantity, scale and ticks of a chart's axis.

use super::quantity::PlottedUnit;
use super::scale::{AxisScale, AxisScaleKind};

/// An axis of a chart with its name, quantity and scale.
#[derive(Debug, Clone, PartialEq)]
pub struct ChartAxis {
    /// Name of the axis for the reader, such as "time of a launch".
    pub axis_name: String,
    /// Quantity on the axis, which decides the unit of the tick texts.
    pub quantity: PlottedUnit,
    /// Spacing of the axis's values: linear or logarithmic.
    pub kind: AxisScaleKind,
    /// Fixed ticks of the axis with their texts; if empty, ticks are at round values.
    pub fixed_ticks: Vec<(f64, String)>,
    /// Values that the axis must include even if no data point has them.
    pub values_to_cover: Vec<f64>,
}

impl ChartAxis {
    /// Makes an axis whose ticks are at round values.
    pub fn with_round_ticks(label: &str, quantity: PlottedUnit, kind: AxisScaleKind) -> Self {
        Self {
            axis_name: label.to_owned(),
            quantity,
            kind,
            fixed_ticks: Vec::new(),
            values_to_cover: Vec::new(),
        }
    }

    /// Returns this axis with fixed ticks at these values.
    pub fn with_ticks_at(self, values: impl IntoIterator<Item = f64>) -> Self {
        let ticks = values
            .into_iter()
            .map(|value| (value, self.quantity.short_text_with_unit(value)))
            .collect();
        Self { fixed_ticks: ticks, ..self }
    }

    /// Returns the scale that maps the given values, and those that the axis must include, to the
    /// pixels between two ends.
    pub fn scale_covering_values(
        &self,
        values: impl Iterator<Item = f64>,
        pixels: (f64, f64),
    ) -> AxisScale {
        AxisScale::axis_scale_covering(
            self.kind,
            values.chain(self.values_to_cover.iter().copied()),
            pixels,
        )
    }

    /// Returns the ticks of this axis on a scale, as values with texts. If the axis has no fixed
    /// ticks, it gets about `about` ticks at round values.
    pub fn ticks_with_texts(&self, scale: &AxisScale, about: usize) -> Vec<(f64, String)> {
        if !self.fixed_ticks.is_empty() {
            return self.fixed_ticks.clone();
        }
        let named = |value| (value, self.quantity.text_with_seven_digits(value));
        scale.round_tick_values(about).into_iter().map(named).collect()
    }
}
