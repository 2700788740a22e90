//! Statistical functions on slices of numbers, without side effects. This module knows nothing of
//! files, benchmark cases or verdicts.

pub mod binomial;
pub mod change_points;
pub mod multiple_testing;
pub mod normal;
pub mod power;
pub mod quantile;
pub mod signed_rank;
pub mod walsh;

pub use change_points::{DetectedLevelChange, detect_level_changes};
pub use multiple_testing::benjamini_hochberg_adjusted;
pub use quantile::{
    MedianAndQuartiles, half_range_by_median, mean, median, quantile_by_interpolation,
    weighted_median,
};
pub use walsh::WalshAverages;
