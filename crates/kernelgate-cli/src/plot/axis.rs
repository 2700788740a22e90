//! What an axis measures, and how.

use super::quantity::Quantity;
use super::scale::ScaleKind;

/// What an axis measures.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    /// Its name: "time of a launch".
    pub label: String,
    /// How its values are written.
    pub quantity: Quantity,
    /// How they are spaced.
    pub kind: ScaleKind,
    /// Values that have a tick, in place of round ones; empty for round ones.
    pub ticks: Vec<f64>,
}

impl Axis {
    /// An axis with round ticks.
    pub fn new(label: &str, quantity: Quantity, kind: ScaleKind) -> Self {
        Self { label: label.to_owned(), quantity, kind, ticks: Vec::new() }
    }
}
