//! Pure functions of statistics on slices of numbers. This module does not use files, cases or
//! judgements.

pub mod binomial;
pub mod change_points;
pub mod multiple_testing;
pub mod normal;
pub mod power;
pub mod quantile;
pub mod signed_rank;
pub mod walsh;

pub use change_points::{ChangePoint, change_points};
pub use multiple_testing::benjamini_hochberg_adjusted;
pub use quantile::{QuartileSpread, mean, median, quantile, relative_half_range, weighted_median};
pub use walsh::WalshAverages;
