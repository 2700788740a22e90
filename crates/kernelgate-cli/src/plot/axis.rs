//! What an axis measures, and how.

use super::quantity::Quantity;
use super::scale::{Scale, ScaleKind};

/// What an axis measures.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    /// Its name: "time of a launch".
    pub label: String,
    /// How its values are written.
    pub quantity: Quantity,
    /// How they are spaced.
    pub kind: ScaleKind,
    /// Its ticks with their texts; empty for round values.
    pub ticks: Vec<(f64, String)>,
    /// Values that it shows besides those of the data.
    pub shows: Vec<f64>,
}

impl Axis {
    /// An axis with round ticks.
    pub fn new(label: &str, quantity: Quantity, kind: ScaleKind) -> Self {
        Self { label: label.to_owned(), quantity, kind, ticks: Vec::new(), shows: Vec::new() }
    }

    /// The same with ticks at these values.
    pub fn with_ticks(self, values: impl IntoIterator<Item = f64>) -> Self {
        let ticks = values.into_iter().map(|value| (value, self.quantity.text(value))).collect();
        Self { ticks, ..self }
    }

    /// Where these values and what it shows lie between two pixels.
    pub fn scale(&self, values: impl Iterator<Item = f64>, pixels: (f64, f64)) -> Scale {
        Scale::around(self.kind, values.chain(self.shows.iter().copied()), pixels)
    }

    /// Its ticks with their texts, of round ones about as many as asked for.
    pub fn ticks_on(&self, scale: &Scale, about: usize) -> Vec<(f64, String)> {
        if !self.ticks.is_empty() {
            return self.ticks.clone();
        }
        let named = |value| (value, self.quantity.exact_text(value));
        scale.ticks(about).into_iter().map(named).collect()
    }
}
