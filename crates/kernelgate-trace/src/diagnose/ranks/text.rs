//! A job for a terminal of 100 columns.

use std::fmt::Write as _;

use super::clock::median_rank_value;
use super::join_ranks::{JobProblem, JoinedJob, RankCollectiveSum};
use crate::diagnose::text::{format_bytes, percent, time, wrap_line};
use crate::stats::{shorten, with_thousands_separators};

/// Maximum number of kinds of collectives that are listed.
const MAX_LISTED_COLLECTIVE_KINDS: usize = 12;
/// Segments of the critical path that are listed.
const MAX_LISTED_SEGMENTS: usize = 8;
/// Number of clocks that have lines of their own.
const MAX_LISTED_CLOCKS: usize = 4;
/// Maximum number of pairs of ranks that are listed.
const MAX_LISTED_PAIRS: usize = 8;

impl JoinedJob {
    /// The job as text of at most 100 columns.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        let head = format!(
            "{} ranks, {} collectives joined over {}; clocks aligned to ± {}",
            self.ranks.len(),
            with_thousands_separators(self.joined),
            time(self.span_ns),
            time(self.precision_ns)
        );
        wrap_line(&mut text, &head, "", "  ");
        self.write_problems(&mut text);
        if self.joined == 0 {
            wrap_line(
                &mut text,
                "no collective could be joined: waiting cannot be separated from transfer; give the \
                 traces of several ranks of one job",
                "  ",
                "  ",
            );
            return text;
        }
        self.write_stragglers(&mut text);
        if let Some((least, most)) = self.exposed_share_range() {
            let (least, most) = (least * 100.0, most * 100.0);
            let line =
                format!("exposed communication: {least:.1} to {most:.1} % of the time of a rank");
            wrap_line(&mut text, &line, "  ", "    ");
        }
        self.write_ranks(&mut text);
        self.write_rank_pairs(&mut text);
        self.write_critical_path(&mut text);
        self.write_collectives(&mut text);
        text
    }

    /// If there are many ranks, their clocks are summarised on one line.
    fn write_problems(&self, text: &mut String) {
        let ahead = |problem: &JobProblem| match problem {
            JobProblem::Clock { ahead_ns, .. } => Some(*ahead_ns),
            _ => None,
        };
        let clocks: Vec<i64> = self.problems.iter().filter_map(ahead).collect();
        let many = clocks.len() > MAX_LISTED_CLOCKS;
        for problem in self.problems.iter().filter(|of| !many || ahead(of).is_none()) {
            wrap_line(text, &problem.problem_text(), "  ! ", "    ");
        }
        if let (true, Some(least), Some(most)) = (many, clocks.iter().min(), clocks.iter().max()) {
            let apart = time(most.max(&0) - least.min(&0));
            let line = format!(
                "the clocks of {} ranks differ, by up to {apart}; aligned by the ends of collectives",
                clocks.len() + 1
            );
            wrap_line(text, &line, "  ! ", "    ");
        }
    }

    fn write_stragglers(&self, text: &mut String) {
        let stragglers = self.straggler_ranks();
        if stragglers.is_empty() {
            let line = "no straggler: no rank delays the others by 5 % of the time where no compute \
                        hides it, and by more than the clocks may differ";
            wrap_line(text, line, "  ", "    ");
        }
        for rank in stragglers {
            wrap_line(text, &format!("straggler: {}", self.straggler_sentence(rank)), "  ", "    ");
        }
    }

    /// How late a straggler is, why, and the gain without its delay, as a sentence.
    pub fn straggler_sentence(&self, rank: &RankCollectiveSum) -> String {
        format!(
            "{} came last to {} of {} collectives and delayed them by {} ({:.1} % of the time); {}. \
             As fast as the median rank, the job gains {} (replayed)",
            rank.name,
            with_thousands_separators(rank.last),
            with_thousands_separators(self.joined),
            time(rank.delayed_ns),
            percent(rank.delayed_ns, self.span_ns),
            self.cause_of_lateness(rank),
            time(rank.gain_ns)
        )
    }

    /// The kind of time in which a straggler exceeds the other ranks most.
    fn cause_of_lateness(&self, rank: &RankCollectiveSum) -> String {
        let excess = |verb: &str, value: fn(&RankCollectiveSum) -> i64| {
            let (own, others) = (value(rank), median_rank_value(self.ranks.iter().map(value)));
            (own - others, verb.to_owned(), own, others)
        };
        let parts = [
            excess("computes", |of| of.times.compute_ns),
            excess("is idle for", |of| of.times.idle_ns),
        ];
        let (more, verb, own, others) = parts.into_iter().max().expect("there are two parts");
        if more <= 0 {
            return "neither its compute nor its idle time exceeds the median".to_owned();
        }
        format!("it {verb} {}, the median rank {}", time(own), time(others))
    }

    fn write_ranks(&self, text: &mut String) {
        let _ = writeln!(
            text,
            "  {:<26}{:>12}{:>13}{:>11}{:>12}{:>12}{:>8}",
            "rank", "compute", "exposed comm", "idle", "waits", "delays", "last"
        );
        for rank in &self.ranks {
            let _ = writeln!(
                text,
                "  {:<26}{:>12}{:>13}{:>11}{:>12}{:>12}{:>8}",
                shorten(&rank.name, 25),
                time(rank.times.compute_ns),
                time(rank.times.exposed_ns),
                time(rank.times.idle_ns),
                time(rank.waited_ns),
                time(rank.delayed_ns),
                with_thousands_separators(rank.last)
            );
        }
    }

    fn write_rank_pairs(&self, text: &mut String) {
        let mut pairs: Vec<(i64, usize, usize)> = Vec::new();
        for (rank, waits) in self.waits.iter().enumerate() {
            pairs.extend(waits.iter().enumerate().map(|(last, &ns)| (ns, rank, last)));
        }
        pairs.retain(|&(ns, ..)| ns * 100 >= self.span_ns);
        pairs.sort_by_key(|&(ns, rank, last)| (std::cmp::Reverse(ns), rank, last));
        if pairs.is_empty() {
            return;
        }
        let _ = writeln!(text, "  waiting (1 % of the time or more)");
        for (ns, rank, last) in pairs.into_iter().take(MAX_LISTED_PAIRS) {
            let line = format!(
                "{} waits {} for {}",
                self.ranks[rank].name,
                time(ns),
                self.ranks[last].name
            );
            wrap_line(text, &line, "    ", "      ");
        }
    }

    fn write_critical_path(&self, text: &mut String) {
        let path = &self.path;
        if path.total_ns == 0 {
            return;
        }
        let _ = writeln!(text, "  critical path through the ranks ({})", time(path.total_ns));
        let line = |text: &mut String, ns: i64, what: &str| {
            let share = percent(ns, path.total_ns);
            let _ = writeln!(text, "    {share:>5.1} %{:>12}  {}", time(ns), shorten(what, 74));
        };
        for (rank, what, ns) in path.segments.iter().take(MAX_LISTED_SEGMENTS) {
            line(text, *ns, &format!("{}: {what}", self.ranks[*rank].name));
        }
        let rest: i64 = path.segments.iter().skip(MAX_LISTED_SEGMENTS).map(|of| of.2).sum();
        if rest > 0 {
            line(text, rest, "other");
        }
        let _ = writeln!(text, "    gains, from the replay of all ranks");
        path.gains.iter().for_each(|of| line(text, of.gain_ns, &of.change));
    }

    fn write_collectives(&self, text: &mut String) {
        let _ = writeln!(
            text,
            "  {:<22}{:>11}{:>7}{:>9}{:>12}{:>12}{:>20}",
            "collective", "bytes", "ranks", "count", "transfer", "skew", "bus bandwidth"
        );
        for of in self.collectives.iter().take(MAX_LISTED_COLLECTIVE_KINDS) {
            let size = if of.bytes > 0 { format_bytes(of.bytes) } else { "unknown".to_owned() };
            let bus = match (of.bus, self.link) {
                (Some(bus), Some((link, _))) => {
                    format!("{bus:.1} GB/s ({:.0} %)", bus / link * 100.0)
                }
                (Some(bus), None) => format!("{bus:.1} GB/s"),
                (None, _) => "size not recorded".to_owned(),
            };
            let _ = writeln!(
                text,
                "  {:<22}{:>11}{:>7}{:>9}{:>12}{:>12}{bus:>20}",
                of.collective.label(),
                size,
                of.ranks,
                with_thousands_separators(of.count),
                time(of.transfer_ns),
                time(of.skew_ns),
            );
        }
        let more = self.collectives.len().saturating_sub(MAX_LISTED_COLLECTIVE_KINDS);
        if more > 0 {
            let _ = writeln!(text, "    {more} more kinds and sizes are in the JSON");
        }
        if let Some((speed, name)) = self.link {
            let _ = writeln!(text, "  bus bandwidth in % of {name}, {speed:.0} GB/s each way");
        }
    }
}
