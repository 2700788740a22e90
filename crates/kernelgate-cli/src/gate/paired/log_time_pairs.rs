//! Converts blocks of processes into pairs of logarithmic times, and runs the statistical tests on
//! these pairs.

use super::{CaseTimeInTrial, ComparedArm, ComparisonTestPlan, TimedTrialBlock};
use kernelgate::stats::signed_rank::signed_rank_p_value_for_upward_shift;
use kernelgate::stats::{mean, median};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirectionOfChange {
    HeadSlower,
    HeadFaster,
}

impl DirectionOfChange {
    /// Factor that makes a logarithmic change in this direction positive: 1 for slower, -1 for
    /// faster.
    const fn sign_of_direction(self) -> f64 {
        match self {
            Self::HeadSlower => 1.0,
            Self::HeadFaster => -1.0,
        }
    }
}

/// The pairs of one case in time order: parallel lists with one entry for each pair of neighbouring
/// processes.
#[derive(Debug, Clone, Default)]
pub struct LogTimePairsOfCase {
    /// Logarithmic time ratio ln(head / base) of each pair of neighbouring processes.
    pub log_time_ratios: Vec<f64>,
    /// Logarithmic ratio ln(head / base) of the clock cycles of each pair; `None` unless all
    /// processes recorded cycles.
    pub log_cycle_ratios: Option<Vec<f64>>,
    /// Null pairs, two processes of one build in each block, as logarithmic ratios: second over
    /// first for the base, first over second for the head. A steady drift shifts the null pairs of
    /// a base-first block by (3, -1) and those of a head-first block by (1, -3), which cancels as
    /// the leaders alternate. An after-effect of the head's processes shifts the null pairs of the
    /// two block orders by (0, -1) and (-1, 0), as much as it shifts the judged pairs.
    pub log_ratios_of_one_build: Vec<f64>,
    /// Contention beside the head minus contention beside the base, for each pair; `None` if only
    /// one is known, 0 if neither is.
    cpu_contention_differences: Vec<Option<f64>>,
    /// Times of the base's processes, nanoseconds per launch, one for each pair.
    pub base_launch_ns: Vec<f64>,
    /// Times of the head's processes, nanoseconds per launch, one for each pair.
    pub head_launch_ns: Vec<f64>,
    /// Whether any time of the case is a mean over many iterations (Criterion), to which
    /// [`ComparisonTestPlan::absolute_time_change_threshold_ns`] does not apply.
    has_iteration_mean_times: bool,
    /// Number of processes that ran at the GPU's power cap.
    processes_at_power_cap: usize,
    /// Number of blocks with a throttled process, whose clock was lowered by heat or the hardware.
    throttled_trial_blocks: usize,
}

/// Smallest share of the pairs that must remain after pairs of unequal contention are excluded.
const MIN_SHARE_OF_PAIRS_WITH_EQUAL_CONTENTION: f64 = 0.25;

fn is_positive_and_unthrottled(observation: &CaseTimeInTrial) -> bool {
    observation.median_time_ns.is_finite()
        && observation.median_time_ns > 0.0
        && !observation.slowed_by_heat_or_hardware
}

impl LogTimePairsOfCase {
    /// Converts the blocks of a case into pairs of neighbouring base and head processes, in time
    /// order. A block is excluded if one of its times is not positive or the GPU was throttled in
    /// one of its processes.
    pub fn from_trial_blocks(blocks: &[TimedTrialBlock]) -> LogTimePairsOfCase {
        let slowed = |block: &&TimedTrialBlock| {
            block.base.iter().chain(&block.head).any(|it| it.slowed_by_heat_or_hardware)
        };
        let throttled = blocks.iter().filter(slowed).count();
        let mut pairs = Self {
            log_cycle_ratios: Some(Vec::new()),
            throttled_trial_blocks: throttled,
            ..Self::default()
        };
        let has_contention = blocks.iter().any(|block| {
            block.base.iter().chain(&block.head).any(|timing| timing.contention_share.is_some())
        });
        let usable = blocks
            .iter()
            .filter(|block| block.base.iter().chain(&block.head).all(is_positive_and_unthrottled));
        for TimedTrialBlock { base, head, first_and_last_arm: _ } in usable {
            pairs.has_iteration_mean_times |=
                base.iter().chain(head).any(|timing| timing.time_is_mean);
            pairs.processes_at_power_cap +=
                base.iter().chain(head).filter(|timing| timing.at_power_cap).count();
            for (base, head) in base.iter().zip(head) {
                pairs.log_time_ratios.push((head.median_time_ns / base.median_time_ns).ln());
                let difference = head
                    .contention_share
                    .zip(base.contention_share)
                    .map(|(head, base)| head - base);
                pairs.cpu_contention_differences.push(if has_contention {
                    difference
                } else {
                    Some(0.0)
                });
                pairs.base_launch_ns.push(base.median_time_ns);
                pairs.head_launch_ns.push(head.median_time_ns);
                let cycles = head
                    .median_cycles_per_launch
                    .zip(base.median_cycles_per_launch)
                    .map(|(head, base)| (head / base).ln())
                    .filter(|ratio| ratio.is_finite());
                pairs.log_cycle_ratios =
                    pairs.log_cycle_ratios.take().zip(cycles).map(|(mut all, ratio)| {
                        all.push(ratio);
                        all
                    });
            }
            pairs
                .log_ratios_of_one_build
                .push((base[1].median_time_ns / base[0].median_time_ns).ln());
            pairs
                .log_ratios_of_one_build
                .push((head[0].median_time_ns / head[1].median_time_ns).ln());
        }
        pairs
    }

    /// Number of pairs.
    pub fn pair_count(&self) -> usize {
        self.log_time_ratios.len()
    }

    /// Returns the logarithm of the smallest time ratio, slower over faster build, that exceeds the
    /// plan's thresholds, for the times of the first `n` pairs.
    pub fn log_of_threshold_ratio(&self, n: usize, plan: &ComparisonTestPlan) -> f64 {
        if n == 0 {
            return plan.relative_time_change_threshold.ln_1p();
        }
        let faster = median(&self.base_launch_ns[..n]).min(median(&self.head_launch_ns[..n]));
        let absolute_ns = if self.has_iteration_mean_times {
            0.0
        } else {
            plan.absolute_time_change_threshold_ns
        };
        plan.relative_time_change_threshold.max(absolute_ns / faster).ln_1p()
    }

    /// Returns the p value of "these logarithms of time ratios, of the first pairs, are centred at
    /// most at the threshold in this direction".
    fn p_of_values_within_threshold(
        &self,
        values: &[f64],
        direction: DirectionOfChange,
        plan: &ComparisonTestPlan,
    ) -> f64 {
        let threshold = self.log_of_threshold_ratio(values.len(), plan);
        signed_rank_p_of_shifted_values(values, direction.sign_of_direction(), -threshold)
    }

    /// Returns the p value of "the head changed by at most the threshold in this direction", by the
    /// times of the first `n` pairs.
    pub fn p_of_no_change_beyond_threshold(
        &self,
        n: usize,
        direction: DirectionOfChange,
        plan: &ComparisonTestPlan,
    ) -> f64 {
        self.p_of_values_within_threshold(&self.log_time_ratios[..n], direction, plan)
    }

    /// Returns whether blocks of this case were excluded because the GPU was throttled.
    pub const fn excludes_throttled_blocks(&self) -> bool {
        self.throttled_trial_blocks > 0
    }

    /// Returns whether most processes ran at the GPU's power cap, in which case clock cycles are
    /// not used for the decision.
    pub fn is_mostly_power_capped(&self) -> bool {
        self.processes_at_power_cap > self.log_time_ratios.len()
    }

    /// Returns whether every process recorded its clock cycles and these are used for the decision.
    pub fn are_cycles_used(&self) -> bool {
        self.log_cycle_ratios_if_used().is_some()
    }

    /// Returns the logarithmic ratios of clock cycles if they are used for the decision; `None`
    /// otherwise.
    fn log_cycle_ratios_if_used(&self) -> Option<&Vec<f64>> {
        self.log_cycle_ratios.as_ref().filter(|_| !self.is_mostly_power_capped())
    }

    /// Returns the p value of "the head changed by at most the threshold in this direction" by
    /// clock cycles; 0 if cycles are not used.
    pub fn p_of_no_change_beyond_threshold_in_cycles(
        &self,
        n: usize,
        direction: DirectionOfChange,
        plan: &ComparisonTestPlan,
    ) -> f64 {
        self.log_cycle_ratios_if_used().map_or(0.0, |cycles| {
            signed_rank_p_of_shifted_values(
                &cycles[..n],
                direction.sign_of_direction(),
                -self.log_of_threshold_ratio(n, plan),
            )
        })
    }

    /// Returns the p value of the change in time after each pair is corrected by the most that
    /// contention can explain; pairs with unknown or large differences in contention are excluded.
    /// Contention beside the build that would become faster by the correction is not corrected, so
    /// that it never supports a change. The p value is 1 if few pairs remain, because the remaining
    /// pairs are then no random selection.
    pub fn p_within_threshold_despite_contention(
        &self,
        n: usize,
        direction: DirectionOfChange,
        plan: &ComparisonTestPlan,
    ) -> f64 {
        let threshold = self.log_of_threshold_ratio(n, plan);
        let pairs = self.log_time_ratios[..n].iter().zip(&self.cpu_contention_differences);
        let kept: Vec<f64> = pairs
            .filter_map(|(time, contention)| {
                Some((
                    direction.sign_of_direction() * time,
                    direction.sign_of_direction() * (*contention)?,
                ))
            })
            .filter(|(_, excess)| *excess <= plan.max_contention_difference_of_pair)
            .map(|(time, excess)| time - plan.slowdown_per_contention * excess.max(0.0) - threshold)
            .collect();
        if (kept.len() as f64) < MIN_SHARE_OF_PAIRS_WITH_EQUAL_CONTENTION * n as f64 {
            1.0
        } else {
            signed_rank_p_value_for_upward_shift(&kept)
        }
    }

    /// Returns the p value of "the head changed by at least the threshold in this direction", by
    /// the times of the first `n` pairs.
    pub fn p_of_change_by_threshold(
        &self,
        n: usize,
        direction: DirectionOfChange,
        plan: &ComparisonTestPlan,
    ) -> f64 {
        signed_rank_p_of_shifted_values(
            &self.log_time_ratios[..n],
            -direction.sign_of_direction(),
            self.log_of_threshold_ratio(n, plan),
        )
    }

    /// Returns the p value of "the head changed by at least the threshold in this direction" by
    /// clock cycles; 1 if cycles are not used.
    pub fn p_of_change_by_threshold_in_cycles(
        &self,
        n: usize,
        direction: DirectionOfChange,
        plan: &ComparisonTestPlan,
    ) -> f64 {
        self.log_cycle_ratios_if_used().map_or(1.0, |cycles| {
            signed_rank_p_of_shifted_values(
                &cycles[..n],
                -direction.sign_of_direction(),
                self.log_of_threshold_ratio(n, plan),
            )
        })
    }

    /// Returns the p value of "processes of one build (null pairs) differ by at most the threshold
    /// in this direction".
    pub fn p_of_equal_null_pairs(
        &self,
        n: usize,
        direction: DirectionOfChange,
        plan: &ComparisonTestPlan,
    ) -> f64 {
        self.p_of_values_within_threshold(&self.log_ratios_of_one_build[..n], direction, plan)
    }

    /// Returns the mean of a block's two null pairs, whose sign shows whose processes leave an
    /// after-effect; `None` beyond the last block.
    pub fn mean_of_null_pairs_in_block(&self, block: usize) -> Option<f64> {
        let pairs = self.log_ratios_of_one_build.get(2 * block..2 * block + 2)?;
        Some(0.5 * pairs.iter().sum::<f64>())
    }

    /// Returns the p value of "the base had no more contention than the head"; contention beside
    /// the base can hide a slow-down of the head.
    pub fn p_of_base_not_more_contended(&self, n: usize, plan: &ComparisonTestPlan) -> f64 {
        let differences: Vec<f64> =
            self.cpu_contention_differences[..n].iter().copied().flatten().collect();
        signed_rank_p_of_shifted_values(&differences, -1.0, -plan.max_contention_difference_of_pair)
    }
}

fn signed_rank_p_of_shifted_values(values: &[f64], sign: f64, by: f64) -> f64 {
    signed_rank_p_value_for_upward_shift(
        &values.iter().map(|value| sign * value + by).collect::<Vec<_>>(),
    )
}

/// Returns the mean contention share beside the processes of one build, over the processes that
/// recorded it.
pub fn mean_contention_beside_build(blocks: &[TimedTrialBlock], arm: ComparedArm) -> Option<f64> {
    let observations = blocks.iter().flat_map(|block| match arm {
        ComparedArm::BaseBuild => block.base,
        ComparedArm::HeadBuild => block.head,
    });
    let shares: Vec<f64> =
        observations.filter_map(|observation| observation.contention_share).collect();
    (!shares.is_empty()).then(|| mean(&shares))
}
