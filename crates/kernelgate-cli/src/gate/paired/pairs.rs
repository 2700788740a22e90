//! Blocks as pairs of logarithms, and the tests on them.

use super::{Arm, Block, TestPlan, Timing};
use kernelgate::stats::median;
use kernelgate::stats::signed_rank::greater;

/// Direction of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Slower,
    Faster,
}

impl Direction {
    /// Turns what is tested into "positive".
    const fn sign(self) -> f64 {
        match self {
            Self::Slower => 1.0,
            Self::Faster => -1.0,
        }
    }
}

/// A case's blocks, pair by pair in time order; all of the same length.
#[derive(Debug, Clone, Default)]
pub struct Pairs {
    /// ln(head / base) of neighbours.
    pub time: Vec<f64>,
    /// The same in cycles, where all processes have them.
    pub cycles: Option<Vec<f64>>,
    /// Two processes of one build, as a logarithm: second over first of the base, first over
    /// second of the head. What drifts evenly gives (3, -1) in a block that the base leads and
    /// (1, -3) in one that the head leads, which is symmetric when the leader alternates. What
    /// the head's processes leave to whoever follows gives (0, -1) and (-1, 0), as much as it
    /// shifts the pairs that are judged.
    pub null: Vec<f64>,
    /// Contention with the head less that with the base; none where one of the two is unknown
    /// though others are known, 0 where none is.
    contention: Vec<Option<f64>>,
    /// Times of the base, nanoseconds.
    pub base_ns: Vec<f64>,
    /// Times of the head.
    pub head_ns: Vec<f64>,
    /// Whether a time is a mean over many iterations, for which [`TestPlan::absolute_ns`] is not
    /// meant.
    averaged: bool,
    /// Processes that ran at the power cap.
    capped: usize,
    /// Blocks with a process whose clock heat or the hardware held down.
    throttled: usize,
}

/// Share of the pairs that must be left when those of unequal contention are left out.
const MIN_KEPT: f64 = 0.25;

fn usable(observation: &Timing) -> bool {
    observation.time_ns.is_finite() && observation.time_ns > 0.0 && !observation.throttled
}

impl Pairs {
    /// Pairs of blocks in time order. A block with a time that is not positive, or of a throttled
    /// GPU, does not count.
    pub fn of(blocks: &[Block]) -> Self {
        let slowed = |block: &&Block| block.base.iter().chain(&block.head).any(|it| it.throttled);
        let throttled = blocks.iter().filter(slowed).count();
        let mut pairs = Self { cycles: Some(Vec::new()), throttled, ..Self::default() };
        let told = blocks.iter().any(|block| {
            block.base.iter().chain(&block.head).any(|timing| timing.contention.is_some())
        });
        let usable = blocks.iter().filter(|block| block.base.iter().chain(&block.head).all(usable));
        for Block { base, head, leader: _ } in usable {
            pairs.averaged |= base.iter().chain(head).any(|timing| timing.averaged);
            pairs.capped += base.iter().chain(head).filter(|timing| timing.at_cap).count();
            for (base, head) in base.iter().zip(head) {
                pairs.time.push((head.time_ns / base.time_ns).ln());
                let difference =
                    head.contention.zip(base.contention).map(|(head, base)| head - base);
                pairs.contention.push(if told { difference } else { Some(0.0) });
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

    /// Logarithm of the smallest ratio that matters, slower over faster build, as the first `n`
    /// pairs have the times.
    pub fn threshold(&self, n: usize, plan: &TestPlan) -> f64 {
        if n == 0 {
            return plan.relative.ln_1p();
        }
        let faster = median(&self.base_ns[..n]).min(median(&self.head_ns[..n]));
        let absolute_ns = if self.averaged { 0.0 } else { plan.absolute_ns };
        plan.relative.max(absolute_ns / faster).ln_1p()
    }

    /// p value of "not by more than the threshold in that direction", by the times of the first `n`
    /// pairs.
    pub fn beyond(&self, n: usize, direction: Direction, plan: &TestPlan) -> f64 {
        shifted(&self.time[..n], direction.sign(), -self.threshold(n, plan))
    }

    /// Whether blocks do not count because the GPU was throttled.
    pub const fn lacks_throttled(&self) -> bool {
        self.throttled > 0
    }

    /// Whether most processes ran at the power cap, where cycles decide nothing.
    pub fn at_cap(&self) -> bool {
        self.capped > self.time.len()
    }

    /// Whether cycles were read in every process and decide something.
    pub fn has_deciding_cycles(&self) -> bool {
        self.deciding_cycles().is_some()
    }

    /// Cycles as far as they decide.
    fn deciding_cycles(&self) -> Option<&Vec<f64>> {
        self.cycles.as_ref().filter(|_| !self.at_cap())
    }

    /// p value of "not by more than the threshold in that direction" by the cycles; 0 where they
    /// decide nothing, so that they do not object.
    pub fn beyond_in_cycles(&self, n: usize, direction: Direction, plan: &TestPlan) -> f64 {
        self.deciding_cycles()
            .map_or(0.0, |cycles| shifted(&cycles[..n], direction.sign(), -self.threshold(n, plan)))
    }

    /// The same by the times without what contention may have cost: pairs with too different
    /// contention, or of unknown, left out, and each other pair moved against the direction by what
    /// its difference in contention can explain. Contention on the other side is never credited.
    /// Where few pairs are left, it is no chance which: 1.
    pub fn beyond_contention(&self, n: usize, direction: Direction, plan: &TestPlan) -> f64 {
        let threshold = self.threshold(n, plan);
        let pairs = self.time[..n].iter().zip(&self.contention);
        let kept: Vec<f64> = pairs
            .filter_map(|(time, contention)| {
                Some((direction.sign() * time, direction.sign() * (*contention)?))
            })
            .filter(|(_, excess)| *excess <= plan.contention)
            .map(|(time, excess)| time - plan.contention_weight * excess.max(0.0) - threshold)
            .collect();
        if (kept.len() as f64) < MIN_KEPT * n as f64 { 1.0 } else { greater(&kept) }
    }

    /// p value of "by at least the threshold in that direction".
    pub fn within(&self, n: usize, direction: Direction, plan: &TestPlan) -> f64 {
        shifted(&self.time[..n], -direction.sign(), self.threshold(n, plan))
    }

    /// p value of "by at least the threshold in that direction" by the cycles; 1 where they decide
    /// nothing.
    pub fn within_in_cycles(&self, n: usize, direction: Direction, plan: &TestPlan) -> f64 {
        self.deciding_cycles()
            .map_or(1.0, |cycles| shifted(&cycles[..n], -direction.sign(), self.threshold(n, plan)))
    }

    /// p value of "the null pairs are not off by more than the threshold in that direction".
    pub fn null_beyond(&self, n: usize, direction: Direction, plan: &TestPlan) -> f64 {
        shifted(&self.null[..n], direction.sign(), -self.threshold(n, plan))
    }

    /// Mean of the null pairs of a block, in which what the base's processes leave to the next one
    /// has one sign and what the head's leave the other; none beyond the last block.
    pub fn null_of(&self, block: usize) -> Option<f64> {
        let pairs = self.null.get(2 * block..2 * block + 2)?;
        Some(0.5 * pairs.iter().sum::<f64>())
    }

    /// p value of "the base had no more contention than the head": such load hides what became
    /// slower.
    pub fn base_contended(&self, n: usize, plan: &TestPlan) -> f64 {
        let known: Vec<f64> = self.contention[..n].iter().copied().flatten().collect();
        shifted(&known, -1.0, -plan.contention)
    }
}

fn shifted(values: &[f64], sign: f64, by: f64) -> f64 {
    greater(&values.iter().map(|value| sign * value + by).collect::<Vec<_>>())
}

/// Mean contention with one build, of the processes that know theirs.
pub fn mean_contention(blocks: &[Block], arm: Arm) -> Option<f64> {
    let observations = blocks.iter().flat_map(|block| match arm {
        Arm::Base => block.base,
        Arm::Head => block.head,
    });
    let known: Vec<f64> = observations.filter_map(|observation| observation.contention).collect();
    (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
}
