//! Maps the values of a chart axis to pixels, and chooses the values of the axis ticks.

/// Spacing of the values along a chart axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AxisScaleKind {
    /// Values of the axis are spaced linearly, starting from 0.
    LinearFromZero,
    /// Values are spaced linearly on the chart axis.
    Linear,
    /// Values are spaced logarithmically on the chart axis; values of 0 or less have no position.
    Logarithmic,
}

/// The scale of a chart axis: its lowest and highest value, and the pixels at which these two
/// values lie.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AxisScale {
    kind: AxisScaleKind,
    lowest_axis_value: f64,
    highest_axis_value: f64,
    pixel_of_lowest_value: f64,
    pixel_of_highest_value: f64,
}

impl AxisScale {
    /// Chooses a scale that covers these values between the pixels `from` and `to`; without finite
    /// values the scale ends at 1.
    pub fn axis_scale_covering(
        kind: AxisScaleKind,
        values: impl Iterator<Item = f64>,
        (from, to): (f64, f64),
    ) -> AxisScale {
        let fits =
            |value: &f64| value.is_finite() && (kind != AxisScaleKind::Logarithmic || *value > 0.0);
        let (low, high) =
            values.filter(fits).fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
                (low.min(value), high.max(value))
            });
        let (low, high) = match kind {
            _ if low > high => (if kind == AxisScaleKind::Logarithmic { 0.1 } else { 0.0 }, 1.0),
            AxisScaleKind::Logarithmic => {
                let room = ((high / low).ln() * 0.06).max(0.15).exp();
                (low / room, high * room)
            }
            AxisScaleKind::LinearFromZero => {
                (low.min(0.0), if high > 0.0 { high * 1.06 } else { 1.0 })
            }
            AxisScaleKind::Linear => {
                let room = ((high - low) * 0.06).max(high.abs() * 1e-3).max(1e-9);
                (low - room, high + room)
            }
        };
        Self {
            kind,
            lowest_axis_value: low,
            highest_axis_value: high,
            pixel_of_lowest_value: from,
            pixel_of_highest_value: to,
        }
    }

    /// The pixel of a value along the chart axis; `None` if the axis cannot show the value.
    pub fn pixel_of_value(&self, value: f64) -> Option<f64> {
        if !value.is_finite() || (self.kind == AxisScaleKind::Logarithmic && value <= 0.0) {
            return None;
        }
        let along =
            |value: f64| if self.kind == AxisScaleKind::Logarithmic { value.ln() } else { value };
        let share = (along(value) - along(self.lowest_axis_value))
            / (along(self.highest_axis_value) - along(self.lowest_axis_value));
        Some(
            self.pixel_of_lowest_value
                + share.clamp(-1.0, 2.0)
                    * (self.pixel_of_highest_value - self.pixel_of_lowest_value),
        )
    }

    /// The pixel of a value on the axis; a value outside the axis gets the pixel of the nearer end.
    pub fn clamped_pixel_of_value(&self, value: f64) -> Option<f64> {
        let end = |value: f64| value.clamp(self.lowest_axis_value, self.highest_axis_value);
        self.pixel_of_value(end(value))
    }

    /// Round values for the ticks of the axis, roughly `about` in number.
    pub fn round_tick_values(&self, about: usize) -> Vec<f64> {
        let ticks = match self.kind {
            AxisScaleKind::Logarithmic => self.logarithmic_tick_values(about),
            _ => self.linear_tick_values(about),
        };
        ticks
            .into_iter()
            .filter(|value| (self.lowest_axis_value..=self.highest_axis_value).contains(value))
            .collect()
    }

    fn linear_tick_values(&self, about: usize) -> Vec<f64> {
        let raw = (self.highest_axis_value - self.lowest_axis_value) / about.max(1) as f64;
        let power = 10f64.powf(raw.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0]
            .map(|step| step * power)
            .into_iter()
            .find(|step| *step >= raw * 0.999)
            .unwrap_or(10.0 * power);
        let (first, last) = (
            (self.lowest_axis_value / step).ceil() as i64,
            (self.highest_axis_value / step).floor() as i64,
        );
        (first..=last).map(|number| number as f64 * step).collect()
    }

    /// Tick values of a logarithmic axis: powers of ten, or only some of them if there are many;
    /// also 2 and 5 times a power of ten below two decades.
    fn logarithmic_tick_values(&self, about: usize) -> Vec<f64> {
        let (first, last) = (
            self.lowest_axis_value.log10().floor() as i32,
            self.highest_axis_value.log10().ceil() as i32,
        );
        let decades = self.highest_axis_value.log10() - self.lowest_axis_value.log10();
        if decades < 0.7 {
            return self.linear_tick_values(about.min(4));
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

    fn axis_scale_of_values(kind: AxisScaleKind, values: &[f64]) -> AxisScale {
        AxisScale::axis_scale_covering(kind, values.iter().copied(), (100.0, 500.0))
    }

    #[test]
    fn ticks_are_at_round_numbers() {
        let ticks = |kind, values: &[f64], about| {
            axis_scale_of_values(kind, values).round_tick_values(about)
        };
        assert_eq!(
            ticks(AxisScaleKind::LinearFromZero, &[0.9], 5),
            [0.0, 0.2, 0.4, 0.6000000000000001, 0.8]
        );
        assert_eq!(ticks(AxisScaleKind::Logarithmic, &[2e3, 5e6], 6), [1e4, 1e5, 1e6]);
        assert_eq!(ticks(AxisScaleKind::Logarithmic, &[1.0, 9.0], 6), [1.0, 2.0, 5.0, 10.0]);
        assert!(ticks(AxisScaleKind::Logarithmic, &[1.0, 1e30], 5).len() <= 6);
        assert!(!ticks(AxisScaleKind::Logarithmic, &[1.0, 1.1], 5).is_empty());
    }

    #[test]
    fn values_without_position_on_an_axis_scale_are_skipped() {
        let log =
            axis_scale_of_values(AxisScaleKind::Logarithmic, &[0.0, -1.0, f64::NAN, 1.0, 10.0]);
        assert!(log.pixel_of_value(0.0).is_none() && log.pixel_of_value(f64::INFINITY).is_none());
        assert!(log.pixel_of_value(1.0).is_some());
        assert!(axis_scale_of_values(AxisScaleKind::Linear, &[]).pixel_of_value(0.5).is_some());
        assert!(
            axis_scale_of_values(AxisScaleKind::Logarithmic, &[3.0]).pixel_of_value(3.0).is_some()
        );
    }

    proptest! {
        #[test]
        fn an_axis_scale_keeps_the_order_of_values(
            mut values in prop::collection::vec(1e-3f64..1e12, 2..20),
            kind in prop::sample::select(vec![AxisScaleKind::LinearFromZero, AxisScaleKind::Linear, AxisScaleKind::Logarithmic]),
        ) {
            let scale = axis_scale_of_values(kind, &values);
            values.sort_by(f64::total_cmp);
            let pixels: Vec<f64> = values.iter().filter_map(|value| scale.pixel_of_value(*value)).collect();
            prop_assert_eq!(pixels.len(), values.len());
            prop_assert!(pixels.is_sorted());
            prop_assert!(pixels.iter().all(|pixel| (100.0..=500.0).contains(pixel)));
        }
    }
}
