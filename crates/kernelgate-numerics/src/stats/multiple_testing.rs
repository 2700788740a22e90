//! Adjusts the p values of many statistical tests that are made at once.

/// Returns the adjusted p values of Benjamini and Hochberg (1995) in input order; rejecting
/// adjusted values of at most q is their step-up procedure at q. The expected share of false
/// rejections among all rejections is then at most q, for independent or positively dependent
/// tests; if no effect is real, q bounds any rejection's probability.
///
/// A p value that is NaN is treated as 1.
pub fn benjamini_hochberg_adjusted(p: &[f64]) -> Vec<f64> {
    let valid = |index: usize| if p[index].is_nan() { 1.0 } else { p[index].clamp(0.0, 1.0) };
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| valid(b).total_cmp(&valid(a)));
    let mut adjusted = vec![1.0; p.len()];
    let mut least: f64 = 1.0;
    for (larger, &index) in order.iter().enumerate() {
        let rank = (p.len() - larger) as f64;
        least = least.min(valid(index) * p.len() as f64 / rank);
        adjusted[index] = least;
    }
    adjusted
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The 15 p values of Benjamini and Hochberg's article (page 295): their procedure rejects four
    /// at 0.05, Bonferroni's three.
    #[test]
    fn adjusted_p_values_equal_the_example_of_benjamini_and_hochberg() {
        let p = [
            0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262,
            0.5719, 0.6528, 0.7590, 1.0,
        ];
        let adjusted = benjamini_hochberg_adjusted(&p);
        assert_eq!(adjusted.iter().filter(|&&p| p <= 0.05).count(), 4);
        assert!(
            (adjusted[0] - 0.0015).abs() < 1e-12
                && (adjusted[3] - 0.0095 * 15.0 / 4.0).abs() < 1e-12
        );
        assert_eq!(benjamini_hochberg_adjusted(&[]), [0.0; 0]);
        assert_eq!(benjamini_hochberg_adjusted(&[f64::NAN, 0.01]), [1.0, 0.02]);
    }

    proptest! {
        #[test]
        fn adjusted_p_values_keep_their_order_and_are_not_smaller(
            p in prop::collection::vec(0.0f64..1.0, 1..30),
        ) {
            let adjusted = benjamini_hochberg_adjusted(&p);
            for (i, (&raw, &out)) in p.iter().zip(&adjusted).enumerate() {
                prop_assert!(
                    out >= raw - 1e-12 && out <= 1.0 && out <= raw * p.len() as f64 + 1e-12
                );
                for (&other, &out_other) in p.iter().zip(&adjusted).skip(i) {
                    prop_assert!(raw > other || out <= out_other);
                }
            }
        }

        #[test]
        fn adjusted_p_values_reject_as_many_as_the_step_up_rule(
            p in prop::collection::vec(0.0f64..0.2, 1..30),
            q in 0.01f64..0.2,
        ) {
            let mut sorted = p.clone();
            sorted.sort_by(f64::total_cmp);
            let m = p.len() as f64;
            let cut = sorted
                .iter()
                .enumerate()
                .filter(|(i, p)| **p * m / (*i as f64 + 1.0) <= q)
                .map(|(_, p)| *p)
                .next_back();
            let rejected = p.iter().filter(|p| cut.is_some_and(|cut| **p <= cut)).count();
            prop_assert_eq!(benjamini_hochberg_adjusted(&p).iter().filter(|p| **p <= q).count(), rejected);
        }
    }
}
