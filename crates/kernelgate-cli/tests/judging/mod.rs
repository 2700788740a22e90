//! Verdicts of baselines, comparisons, rules and calibrations.

mod baselines;
mod bisect;
mod calibrate;
mod code;
mod compare;
mod rules;
mod shards;
mod verification;
