//! Maps values to positions along an axis, and chooses ticks.

/// How values are spaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleKind {
    /// Linear spacing from 0.
    FromZero,
    /// Values are spaced linearly on the axis.
    Linear,
    /// Logarithmic spacing; values of 0 or less have no position.
    Log,
}

/// An axis with its ends as values and in pixels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChartScale {
    kind: ScaleKind,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl ChartScale {
    /// An axis from pixel `from` to pixel `to` that holds these values; a unit interval without
    /// values.
    pub fn scale_around(
        kind: ScaleKind,
        values: impl Iterator<Item = f64>,
        (from, to): (f64, f64),
    ) -> ChartScale {
        let fits = |value: &f64| value.is_finite() && (kind != ScaleKind::Log || *value > 0.0);
        let (low, high) =
            values.filter(fits).fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
                (low.min(value), high.max(value))
            });
        let (low, high) = match kind {
            _ if low > high => (if kind == ScaleKind::Log { 0.1 } else { 0.0 }, 1.0),
            ScaleKind::Log => {
                let room = ((high / low).ln() * 0.06).max(0.15).exp();
                (low / room, high * room)
            }
            ScaleKind::FromZero => (low.min(0.0), if high > 0.0 { high * 1.06 } else { 1.0 }),
            ScaleKind::Linear => {
                let room = ((high - low) * 0.06).max(high.abs() * 1e-3).max(1e-9);
                (low - room, high + room)
            }
        };
        Self { kind, low, high, from, to }
    }

    /// The pixel of a value on the axis; `None` if the axis cannot show the value.
    pub fn at(&self, value: f64) -> Option<f64> {
        if !value.is_finite() || (self.kind == ScaleKind::Log && value <= 0.0) {
            return None;
        }
        let along = |value: f64| if self.kind == ScaleKind::Log { value.ln() } else { value };
        let share = (along(value) - along(self.low)) / (along(self.high) - along(self.low));
        Some(self.from + share.clamp(-1.0, 2.0) * (self.to - self.from))
    }

    /// The position of a value that is clamped to the axis' ends.
    pub fn within(&self, value: f64) -> Option<f64> {
        let end = |value: f64| value.clamp(self.low, self.high);
        self.at(end(value))
    }

    /// Round values, about as many as asked for.
    pub fn axis_ticks(&self, about: usize) -> Vec<f64> {
        let ticks = match self.kind {
            ScaleKind::Log => self.log_ticks(about),
            _ => self.even_ticks(about),
        };
        ticks.into_iter().filter(|value| (self.low..=self.high).contains(value)).collect()
    }

    fn even_ticks(&self, about: usize) -> Vec<f64> {
        let raw = (self.high - self.low) / about.max(1) as f64;
        let power = 10f64.powf(raw.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0]
            .map(|step| step * power)
            .into_iter()
            .find(|step| *step >= raw * 0.999)
            .unwrap_or(10.0 * power);
        let (first, last) = ((self.low / step).ceil() as i64, (self.high / step).floor() as i64);
        (first..=last).map(|number| number as f64 * step).collect()
    }

    /// Powers of ten: only some if there are many, with 2 and 5 between if there are few.
    fn log_ticks(&self, about: usize) -> Vec<f64> {
        let (first, last) = (self.low.log10().floor() as i32, self.high.log10().ceil() as i32);
        let decades = self.high.log10() - self.low.log10();
        if decades < 0.7 {
            return self.even_ticks(about.min(4));
        }
        let between: &[f64] = if decades < 2.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let each = ((decades / about.max(1) as f64).ceil() as usize).max(1);
        (first..=last)
            .step_by(each)
            .flat_map(|power| between.iter().map(move |digit| digit * 10f64.powi(power)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scale_of_values(kind: ScaleKind, values: &[f64]) -> ChartScale {
        ChartScale::scale_around(kind, values.iter().copied(), (100.0, 500.0))
    }

    #[test]
    fn ticks_are_at_round_numbers() {
        let ticks = |kind, values: &[f64], about| scale_of_values(kind, values).axis_ticks(about);
        assert_eq!(ticks(ScaleKind::FromZero, &[0.9], 5), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8]);
        assert_eq!(ticks(ScaleKind::Log, &[2e3, 5e6], 6), [1e4, 1e5, 1e6]);
        assert_eq!(ticks(ScaleKind::Log, &[1.0, 9.0], 6), [1.0, 2.0, 5.0, 10.0]);
        assert!(ticks(ScaleKind::Log, &[1.0, 1e30], 5).len() <= 6);
        assert!(!ticks(ScaleKind::Log, &[1.0, 1.1], 5).is_empty());
    }

    #[test]
    fn values_that_a_scale_cannot_show_are_skipped() {
        let log = scale_of_values(ScaleKind::Log, &[0.0, -1.0, f64::NAN, 1.0, 10.0]);
        assert!(log.at(0.0).is_none() && log.at(f64::INFINITY).is_none());
        assert!(log.at(1.0).is_some());
        assert!(scale_of_values(ScaleKind::Linear, &[]).at(0.5).is_some());
        assert!(scale_of_values(ScaleKind::Log, &[3.0]).at(3.0).is_some());
    }

    proptest! {
        #[test]
        fn a_scale_keeps_the_order_of_values_between_its_ends(
            mut values in prop::collection::vec(1e-3f64..1e12, 2..20),
            kind in prop::sample::select(vec![ScaleKind::FromZero, ScaleKind::Linear, ScaleKind::Log]),
        ) {
            let scale = scale_of_values(kind, &values);
            values.sort_by(f64::total_cmp);
            let pixels: Vec<f64> = values.iter().filter_map(|value| scale.at(*value)).collect();
            prop_assert_eq!(pixels.len(), values.len());
            prop_assert!(pixels.is_sorted());
            prop_assert!(pixels.iter().all(|pixel| (100.0..=500.0).contains(pixel)));
        }
    }
}
