//! Divides the problems of a bench among shards.
//!
//! Problems are divided instead of cases, because the cases of a problem share its inputs and its
//! reference. Every shard computes the whole division itself, from the same problems and recorded
//! times; equal digests in the [`DivisionAmongShardsSummary`] show that all shards agree. This
//! module receives the recorded times from its caller and reads no files.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::shard::ShardOfWork;
use crate::record::files::file::{hash_of_texts_hex, text_hash_hex};
use crate::stats::median;

/// Rule by which the problems of a bench are divided among shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardDivisionRule {
    /// Problems are divided by their recorded wall times, so that all shards take about the same
    /// time.
    #[serde(rename = "slice")]
    ByRecordedTime,
    /// Problems are divided by a hash of their ids, so that a new problem does not move others to
    /// another shard.
    #[serde(rename = "hash")]
    ByHashOfId,
}

impl ShardDivisionRule {
    /// "slice" or "hash".
    pub const fn name_in_records(self) -> &'static str {
        match self {
            Self::ByRecordedTime => "slice",
            Self::ByHashOfId => "hash",
        }
    }
}

/// Summary of the division of a bench's problems among all shards, recorded in each shard's run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DivisionAmongShardsSummary {
    /// Hash of all cases with their shards, which is equal in all shards of one division.
    #[serde(rename = "digest")]
    pub hash_of_cases_and_shards: String,
    /// Number of cases in all shards together.
    #[serde(rename = "cases")]
    pub case_count: usize,
    /// Number of problems that the bench has in all shards together.
    #[serde(rename = "problems")]
    pub problem_count: usize,
    /// Rule by which the problems were divided.
    pub split: ShardDivisionRule,
}

/// Problems of one shard.
#[derive(Debug, Clone, PartialEq)]
pub struct ProblemsDividedAmongShards {
    /// The shard of the work that this record covers.
    pub shard: ShardOfWork,
    /// Index of the shard of each problem, if problems are divided by recorded times.
    shard_index_by_problem: Option<BTreeMap<String, u32>>,
}

impl ProblemsDividedAmongShards {
    /// Divides problems among shards by a hash of their ids.
    pub const fn by_hash_of_problem_ids(shard: ShardOfWork) -> Self {
        Self { shard, shard_index_by_problem: None }
    }

    /// Divides problems among shards by recorded wall times: the longest first, each to the shard
    /// with the least work so far. A problem without a recorded time counts as the median of the
    /// recorded times; without any recorded time, problems are divided by a hash.
    pub fn divide_by_recorded_times<'a>(
        shard: ShardOfWork,
        problems: impl IntoIterator<Item = &'a str>,
        recorded_s: &BTreeMap<String, f64>,
    ) -> Self {
        let problems: Vec<&str> = problems.into_iter().collect();
        let times: Vec<f64> =
            problems.iter().filter_map(|it| recorded_s.get(*it)).copied().collect();
        if times.is_empty() {
            return Self::by_hash_of_problem_ids(shard);
        }
        let usual = median(&times);
        let time = |problem: &str| recorded_s.get(problem).copied().unwrap_or(usual);
        let mut longest_first = problems;
        longest_first.sort_by(|one, other| time(other).total_cmp(&time(one)).then(one.cmp(other)));
        let mut work_s = vec![0.0f64; shard.shard_count as usize];
        let mut by_time = BTreeMap::new();
        for problem in longest_first {
            let indices = 0..work_s.len();
            let least = indices.min_by(|&one, &other| work_s[one].total_cmp(&work_s[other]));
            let Some(least) = least else { break };
            work_s[least] += time(problem);
            by_time.insert(problem.to_owned(), least as u32 + 1);
        }
        Self { shard, shard_index_by_problem: Some(by_time) }
    }

    /// Returns whether the problem with the id `workload/problem` belongs to this shard.
    pub fn contains_problem(&self, problem: &str) -> bool {
        self.index_of_shard_with_problem(problem) == self.shard.index_from_one
    }

    fn index_of_shard_with_problem(&self, problem: &str) -> u32 {
        let by_time = self.shard_index_by_problem.as_ref().and_then(|by_time| by_time.get(problem));
        by_time.copied().unwrap_or_else(|| {
            let hash = text_hash_hex(problem);
            let number = u64::from_str_radix(hash.get(..15).unwrap_or_default(), 16);
            let number = number.unwrap_or_default() % u64::from(self.shard.shard_count.max(1));
            number as u32 + 1
        })
    }

    /// Summarises the division of a bench's problems among shards: digest, number of cases, number
    /// of problems.
    pub fn summarize_division_into_shards<'a>(
        &self,
        bench: &str,
        problems: impl IntoIterator<Item = (String, Vec<&'a str>)>,
    ) -> DivisionAmongShardsSummary {
        let mut problems: Vec<(String, Vec<&str>)> = problems.into_iter().collect();
        problems.sort();
        let split = if self.shard_index_by_problem.is_some() {
            ShardDivisionRule::ByRecordedTime
        } else {
            ShardDivisionRule::ByHashOfId
        };
        let mut facts = vec![
            bench.to_owned(),
            self.shard.shard_count.to_string(),
            split.name_in_records().to_owned(),
        ];
        for (problem, cases) in &problems {
            facts.push(self.index_of_shard_with_problem(problem).to_string());
            facts.extend(cases.iter().map(|case| (*case).to_owned()));
        }
        DivisionAmongShardsSummary {
            hash_of_cases_and_shards: hash_of_texts_hex(facts.iter().map(String::as_str)),
            case_count: problems.iter().map(|(_, cases)| cases.len()).sum(),
            problem_count: problems.len(),
            split,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_shards_of_count(count: u32) -> impl Iterator<Item = ShardOfWork> {
        (1..=count).map(move |index| ShardOfWork { index_from_one: index, shard_count: count })
    }

    #[test]
    fn division_among_shards_by_hash_is_reproducible() {
        let owners = |problem: &str| -> Vec<u32> {
            let has = |shard: &ShardOfWork| {
                ProblemsDividedAmongShards::by_hash_of_problem_ids(*shard).contains_problem(problem)
            };
            all_shards_of_count(4).filter(has).map(|shard| shard.index_from_one).collect()
        };
        let problems: Vec<String> = (0..200).map(|n| format!("w/f/n{n}_f32")).collect();
        let mut sizes = [0; 4];
        for problem in &problems {
            let [only] = owners(problem)[..] else { panic!("{problem}: {:?}", owners(problem)) };
            sizes[only as usize - 1] += 1;
        }
        assert!(sizes.iter().all(|size| (25..=75).contains(size)), "{sizes:?}");
        // Shards that ran on several machines, or with several kernelgate versions, must belong to
        // one division.
        let pinned = ["w/f/n0_f32", "w/f/n1_f32", "w/f/n2_f32"].map(|it| owners(it)[0]);
        assert_eq!(pinned, [3, 1, 3]);
    }

    #[test]
    fn division_by_recorded_times_balances_the_shards() {
        // Simulated problems of a sweep: few long ones, many short ones, and one without a recorded
        // time.
        let times: BTreeMap<String, f64> = (0..100)
            .map(|n| (format!("w/f/n{n}"), 5.0 + f64::from(n % 17) * f64::from(n % 5)))
            .collect();
        let names: Vec<&str> = times.keys().map(String::as_str).chain(["w/f/new"]).collect();
        let work = |shard| -> f64 {
            let partition = ProblemsDividedAmongShards::divide_by_recorded_times(
                shard,
                names.iter().copied(),
                &times,
            );
            times
                .iter()
                .filter(|(name, _)| partition.contains_problem(name))
                .map(|(_, time)| time)
                .sum()
        };
        let works: Vec<f64> = all_shards_of_count(5).map(work).collect();
        let (least, most) = works
            .iter()
            .fold((f64::MAX, 0.0f64), |(least, most), work| (least.min(*work), most.max(*work)));
        assert!(most <= 1.1 * least, "{works:?}");
        let all = names.iter().all(|name| {
            let partition = |shard| {
                ProblemsDividedAmongShards::divide_by_recorded_times(
                    shard,
                    names.iter().copied(),
                    &times,
                )
            };
            all_shards_of_count(5).filter(|shard| partition(*shard).contains_problem(name)).count()
                == 1
        });
        assert!(all);
    }

    /// Recorded wall times of each problem, seconds: two runs on one card, a run on another card,
    /// and runs in shards.
    fn recorded_seconds_of_problems() -> Vec<(String, [f64; 4])> {
        let rows = include_str!("shard_partition/problem_times.tsv").lines();
        let row = |line: &str| {
            let (problem, times) = line.split_once('\t').unwrap();
            let times: Vec<f64> = times.split('\t').map(|it| it.parse().unwrap()).collect();
            (problem.to_owned(), times.try_into().unwrap())
        };
        rows.filter(|line| !line.starts_with('#')).map(row).collect()
    }

    /// Returns by how much the longest of `count` shards exceeds the shortest, relative to the
    /// shortest. Each problem has an id, a recorded time by which the problems are divided, and the
    /// time that it takes in a later run.
    fn relative_excess_of_longest_shard(problems: &[(String, f64, f64)], count: u32) -> f64 {
        let before = problems.iter().map(|(problem, time, _)| (problem.clone(), *time)).collect();
        let names = problems.iter().map(|(problem, ..)| problem.as_str());
        let partition = ProblemsDividedAmongShards::divide_by_recorded_times(
            ShardOfWork { index_from_one: 1, shard_count: count },
            names,
            &before,
        );
        let mut works = vec![0.0; count as usize];
        for (problem, _, taken) in problems {
            works[partition.index_of_shard_with_problem(problem) as usize - 1] += taken;
        }
        let longest = works.iter().copied().fold(0.0, f64::max);
        longest / works.iter().copied().fold(f64::MAX, f64::min) - 1.0
    }

    #[test]
    fn recorded_times_of_two_cards_balance_the_shards() {
        let recorded = recorded_seconds_of_problems();
        assert_eq!(recorded.len(), 44);
        // Problems are divided by the median of two runs on one card, as a baseline would provide
        // it.
        for (taken, run) in [(1, "again"), (2, "on another card"), (3, "in shards")] {
            let problems = recorded.iter().map(|(problem, times)| {
                (problem.clone(), median(&[times[0], times[1]]), times[taken])
            });
            let uneven = relative_excess_of_longest_shard(&problems.collect::<Vec<_>>(), 2);
            println!("2 shards of 22 problems, {run}: {:.1} %", 100.0 * uneven);
            assert!(uneven <= 0.10, "{run}: {uneven}");
        }
    }

    #[test]
    fn random_sweeps_of_recorded_problems_are_balanced() {
        let recorded = recorded_seconds_of_problems();
        for (count, sweeps) in [(4u32, 20), (16, 20), (50, 20), (1000, 1)] {
            let mut uneven: Vec<f64> = (0..sweeps)
                .map(|sweep| {
                    let draw = |number: usize| {
                        // A simulated sweep passes over the 44 recorded problems repeatedly; each
                        // pass takes every problem once and begins at a different one.
                        let row = (number * 13 + sweep * 7 + number / recorded.len() * 5) % 44;
                        let times = recorded[row].1;
                        (format!("{number}"), median(&[times[0], times[1]]), times[2])
                    };
                    let problems: Vec<_> = (0..20 * count as usize).map(draw).collect();
                    relative_excess_of_longest_shard(&problems, count)
                })
                .collect();
            uneven.sort_by(f64::total_cmp);
            let (typical, worst) = (median(&uneven), uneven[uneven.len() - 1]);
            let percent = [typical, worst].map(|share| format!("{:.1} %", 100.0 * share));
            println!(
                "{count} shards of 20 problems: {} at the median, {} at most",
                percent[0], percent[1]
            );
            assert!(worst <= 0.10, "{count} shards: {uneven:?}");
        }
    }

    #[test]
    fn shards_have_equal_digests_only_within_one_division() {
        let digest = |partition: &ProblemsDividedAmongShards, cases: &[&'static str]| {
            let problems = cases.iter().map(|case| (format!("p{case}"), vec![*case]));
            partition.summarize_division_into_shards("b", problems).hash_of_cases_and_shards
        };
        let [one, two] = [1, 2].map(|index| {
            ProblemsDividedAmongShards::by_hash_of_problem_ids(ShardOfWork {
                index_from_one: index,
                shard_count: 2,
            })
        });
        assert_eq!(digest(&one, &["a", "b"]), digest(&two, &["b", "a"]));
        assert_ne!(digest(&one, &["a", "b"]), digest(&one, &["a"]));
        let third = ProblemsDividedAmongShards::by_hash_of_problem_ids(ShardOfWork {
            index_from_one: 1,
            shard_count: 3,
        });
        assert_ne!(digest(&one, &["a", "b"]), digest(&third, &["a", "b"]));
        let times = [("pa".to_owned(), 1.0), ("pb".to_owned(), 9.0)].into();
        let timed =
            ProblemsDividedAmongShards::divide_by_recorded_times(one.shard, ["pa", "pb"], &times);
        assert_ne!(digest(&one, &["a", "b"]), digest(&timed, &["a", "b"]));
    }
}
