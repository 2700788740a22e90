//! Turns blocks into pairs of logarithmic times, and runs the statistical tests on them.

use super::{Arm, CaseTiming, TestPlan, TrialBlock};
use kernelgate::stats::signed_rank::signed_rank_p_greater;
use kernelgate::stats::{mean, median};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeDirection {
    Slower,
    Faster,
}

impl ChangeDirection {
    /// Factor that makes a change in this direction positive: 1 or -1.
    const fn sign(self) -> f64 {
        match self {
            Self::Slower => 1.0,
            Self::Faster => -1.0,
        }
    }
}

/// A case's blocks, pair by pair in time order; all of the same length.
#[derive(Debug, Clone, Default)]
pub struct PairDifferences {
    /// Logarithmic time ratio ln(head / base) of neighbouring processes.
    pub time: Vec<f64>,
    /// Logarithmic ratio ln(head / base) of clock cycles of neighbouring processes, if all
    /// processes record cycles.
    pub cycles: Option<Vec<f64>>,
    /// Two processes of one build, as a logarithm: second over first of the base, first over second
    /// of the head. Even drift gives (3, -1) in a block that the base leads and (1, -3) in one that
    /// the head leads, which is symmetric when the leader alternates. An after-effect that the
    /// head's processes leave for the next process gives (0, -1) and (-1, 0), as much as it shifts
    /// the pairs that are judged.
    pub null: Vec<f64>,
    /// Contention beside the head minus contention beside the base; `None` if only one is known, 0
    /// if neither is known.
    contention: Vec<Option<f64>>,
    /// Times of the base's processes, nanoseconds.
    pub base_ns: Vec<f64>,
    /// Times of the head's processes, nanoseconds.
    pub head_ns: Vec<f64>,
    /// Whether a time is a mean over many iterations, to which [`TestPlan::absolute_ns`] does not
    /// apply.
    averaged: bool,
    /// Number of processes that ran at the power cap.
    capped: usize,
    /// Blocks with a throttled process, whose clock was lowered by heat or the hardware.
    throttled: usize,
}

/// Smallest share of the pairs that must remain when pairs of unequal contention are excluded.
const MIN_KEPT_PAIR_SHARE: f64 = 0.25;

fn is_usable_timing(observation: &CaseTiming) -> bool {
    observation.time_ns.is_finite() && observation.time_ns > 0.0 && !observation.throttled
}

impl PairDifferences {
    /// Makes pairs of the blocks, in time order. A block with a time that is not positive, or of a
    /// throttled GPU, is excluded.
    pub fn from_blocks(blocks: &[TrialBlock]) -> PairDifferences {
        let slowed =
            |block: &&TrialBlock| block.base.iter().chain(&block.head).any(|it| it.throttled);
        let throttled = blocks.iter().filter(slowed).count();
        let mut pairs = Self { cycles: Some(Vec::new()), throttled, ..Self::default() };
        let has_contention = blocks.iter().any(|block| {
            block.base.iter().chain(&block.head).any(|timing| timing.contention.is_some())
        });
        let usable = blocks
            .iter()
            .filter(|block| block.base.iter().chain(&block.head).all(is_usable_timing));
        for TrialBlock { base, head, leader: _ } in usable {
            pairs.averaged |= base.iter().chain(head).any(|timing| timing.averaged);
            pairs.capped += base.iter().chain(head).filter(|timing| timing.at_cap).count();
            for (base, head) in base.iter().zip(head) {
                pairs.time.push((head.time_ns / base.time_ns).ln());
                let difference =
                    head.contention.zip(base.contention).map(|(head, base)| head - base);
                pairs.contention.push(if has_contention { difference } else { Some(0.0) });
                pairs.base_ns.push(base.time_ns);
                pairs.head_ns.push(head.time_ns);
                let cycles = head
                    .cycles
                    .zip(base.cycles)
                    .map(|(head, base)| (head / base).ln())
                    .filter(|ratio| ratio.is_finite());
                pairs.cycles = pairs.cycles.take().zip(cycles).map(|(mut all, ratio)| {
                    all.push(ratio);
                    all
                });
            }
            pairs.null.push((base[1].time_ns / base[0].time_ns).ln());
            pairs.null.push((head[0].time_ns / head[1].time_ns).ln());
        }
        pairs
    }

    /// Number of pairs.
    pub fn len(&self) -> usize {
        self.time.len()
    }

    /// Logarithm of the smallest relevant ratio, slower over faster build, for the times of the
    /// first `n` pairs.
    pub fn relevant_log_ratio(&self, n: usize, plan: &TestPlan) -> f64 {
        if n == 0 {
            return plan.relative.ln_1p();
        }
        let faster = median(&self.base_ns[..n]).min(median(&self.head_ns[..n]));
        let absolute_ns = if self.averaged { 0.0 } else { plan.absolute_ns };
        plan.relative.max(absolute_ns / faster).ln_1p()
    }

    /// p value of "not by more than the threshold in that direction", by the times of the first `n`
    /// pairs.
    pub fn p_beyond_threshold(&self, n: usize, direction: ChangeDirection, plan: &TestPlan) -> f64 {
        p_of_shifted(&self.time[..n], direction.sign(), -self.relevant_log_ratio(n, plan))
    }

    /// Returns whether blocks were excluded because the GPU was throttled.
    pub const fn excludes_throttled_blocks(&self) -> bool {
        self.throttled > 0
    }

    /// Returns whether most processes ran at the power cap, in which case cycles do not decide.
    pub fn is_mostly_power_capped(&self) -> bool {
        self.capped > self.time.len()
    }

    /// Returns whether cycles were read in every process and count for the decision.
    pub fn cycles_can_decide(&self) -> bool {
        self.cycles_that_decide().is_some()
    }

    /// Returns the clock cycles, if they count for the decision.
    fn cycles_that_decide(&self) -> Option<&Vec<f64>> {
        self.cycles.as_ref().filter(|_| !self.is_mostly_power_capped())
    }

    /// p value of "not by more than the threshold in that direction" by the cycles; 0 if cycles do
    /// not decide, so that they cause no doubt.
    pub fn beyond_threshold_in_cycles(
        &self,
        n: usize,
        direction: ChangeDirection,
        plan: &TestPlan,
    ) -> f64 {
        self.cycles_that_decide().map_or(0.0, |cycles| {
            p_of_shifted(&cycles[..n], direction.sign(), -self.relevant_log_ratio(n, plan))
        })
    }

    /// p value of a change by the times without what contention may have cost: pairs with too
    /// different or unknown contention are excluded, and each other pair is moved against the
    /// direction by what its difference in contention can explain. Contention on the other side is
    /// never credited. The result is 1 if few pairs remain, because their selection is then not by
    /// chance.
    pub fn p_beyond_without_contention(
        &self,
        n: usize,
        direction: ChangeDirection,
        plan: &TestPlan,
    ) -> f64 {
        let threshold = self.relevant_log_ratio(n, plan);
        let pairs = self.time[..n].iter().zip(&self.contention);
        let kept: Vec<f64> = pairs
            .filter_map(|(time, contention)| {
                Some((direction.sign() * time, direction.sign() * (*contention)?))
            })
            .filter(|(_, excess)| *excess <= plan.contention)
            .map(|(time, excess)| time - plan.contention_weight * excess.max(0.0) - threshold)
            .collect();
        if (kept.len() as f64) < MIN_KEPT_PAIR_SHARE * n as f64 {
            1.0
        } else {
            signed_rank_p_greater(&kept)
        }
    }

    /// p value of "by at least the threshold in that direction".
    pub fn p_value_of_change(&self, n: usize, direction: ChangeDirection, plan: &TestPlan) -> f64 {
        p_of_shifted(&self.time[..n], -direction.sign(), self.relevant_log_ratio(n, plan))
    }

    /// Returns the p value of "by at least the threshold in that direction" by clock cycles; 1 if
    /// they do not decide.
    pub fn p_within_in_cycles(&self, n: usize, direction: ChangeDirection, plan: &TestPlan) -> f64 {
        self.cycles_that_decide().map_or(1.0, |cycles| {
            p_of_shifted(&cycles[..n], -direction.sign(), self.relevant_log_ratio(n, plan))
        })
    }

    /// p value of "the null pairs differ by at most the threshold in that direction".
    pub fn p_null_beyond_threshold(
        &self,
        n: usize,
        direction: ChangeDirection,
        plan: &TestPlan,
    ) -> f64 {
        p_of_shifted(&self.null[..n], direction.sign(), -self.relevant_log_ratio(n, plan))
    }

    /// Mean of a block's null pairs, in which an after-effect of the base's processes has one sign
    /// and one of the head's processes the other sign; `None` beyond the last block.
    pub fn null_pair_mean(&self, block: usize) -> Option<f64> {
        let pairs = self.null.get(2 * block..2 * block + 2)?;
        Some(0.5 * pairs.iter().sum::<f64>())
    }

    /// Returns the p value of "the base had no more contention than the head": contention beside
    /// the base hides a slow-down.
    pub fn p_base_not_more_contended(&self, n: usize, plan: &TestPlan) -> f64 {
        let differences: Vec<f64> = self.contention[..n].iter().copied().flatten().collect();
        p_of_shifted(&differences, -1.0, -plan.contention)
    }
}

fn p_of_shifted(values: &[f64], sign: f64, by: f64) -> f64 {
    signed_rank_p_greater(&values.iter().map(|value| sign * value + by).collect::<Vec<_>>())
}

/// Mean contention share beside one build, over the processes that record it.
pub fn mean_arm_contention(blocks: &[TrialBlock], arm: Arm) -> Option<f64> {
    let observations = blocks.iter().flat_map(|block| match arm {
        Arm::Base => block.base,
        Arm::Head => block.head,
    });
    let shares: Vec<f64> = observations.filter_map(|observation| observation.contention).collect();
    (!shares.is_empty()).then(|| mean(&shares))
}
