//! The quantity, scale and ticks of an axis.

use super::quantity::PlottedUnit;
use super::scale::{ChartScale, ScaleKind};

/// An axis with its quantity and scale.
#[derive(Debug, Clone, PartialEq)]
pub struct ChartAxis {
    /// Name of the axis, such as "time of a launch".
    pub label: String,
    /// Quantity on the axis, which decides the unit of its labels.
    pub quantity: PlottedUnit,
    /// Spacing of the axis's values: linear or logarithmic.
    pub kind: ScaleKind,
    /// Ticks of the axis with their texts; empty for round values.
    pub ticks: Vec<(f64, String)>,
    /// Values that the axis must show in addition to the data.
    pub shows: Vec<f64>,
}

impl ChartAxis {
    /// Makes an axis whose ticks are at round numbers.
    pub fn new(label: &str, quantity: PlottedUnit, kind: ScaleKind) -> Self {
        Self { label: label.to_owned(), quantity, kind, ticks: Vec::new(), shows: Vec::new() }
    }

    /// An axis with ticks at these values.
    pub fn with_ticks(self, values: impl IntoIterator<Item = f64>) -> Self {
        let ticks = values.into_iter().map(|value| (value, self.quantity.text(value))).collect();
        Self { ticks, ..self }
    }

    /// The scale that maps these values, and those that the axis must show, to the pixels between
    /// two ends.
    pub fn scale(&self, values: impl Iterator<Item = f64>, pixels: (f64, f64)) -> ChartScale {
        ChartScale::scale_around(self.kind, values.chain(self.shows.iter().copied()), pixels)
    }

    /// The ticks of this axis with their texts. An axis without ticks of its own gets round values,
    /// about as many as requested.
    pub fn ticks_on(&self, scale: &ChartScale, about: usize) -> Vec<(f64, String)> {
        if !self.ticks.is_empty() {
            return self.ticks.clone();
        }
        let named = |value| (value, self.quantity.exact_text(value));
        scale.axis_ticks(about).into_iter().map(named).collect()
    }
}
