//! Formats a job of joined ranks as text for a terminal of 100 columns.

use std::fmt::Write as _;

use super::clock::median_value_of_ranks;
use super::join_ranks::{JobOfJoinedRanks, ProblemOfJobTraces, RankWithCollectiveSums};
use crate::diagnose::text::{
    append_wrapped_line, format_bytes_with_unit, format_nanoseconds, percent_of_whole,
};
use crate::stats::{shorten_in_the_middle, with_thousands_separators};

/// Largest number of kinds of collectives that are printed.
const MAX_PRINTED_COLLECTIVE_KINDS: usize = 12;
/// Largest number of segments of the critical path that are printed.
const MAX_PRINTED_PATH_SEGMENTS: usize = 8;
/// Largest number of clock differences that are printed on lines of their own.
const MAX_PRINTED_CLOCK_DIFFERENCES: usize = 4;
/// Largest number of pairs of ranks whose waiting is printed.
const MAX_PRINTED_RANK_PAIRS: usize = 8;

impl JobOfJoinedRanks {
    /// Formats the joined job as text of at most 100 columns.
    pub fn job_to_text(&self) -> String {
        let mut text = String::new();
        let head = format!(
            "{} ranks, {} collectives joined over {}; clocks aligned to ± {}",
            self.ranks.len(),
            with_thousands_separators(self.joined_collectives),
            format_nanoseconds(self.collectives_span_ns),
            format_nanoseconds(self.clock_alignment_precision_ns)
        );
        append_wrapped_line(&mut text, &head, "", "  ");
        self.write_problems_of_traces(&mut text);
        if self.joined_collectives == 0 {
            append_wrapped_line(
                &mut text,
                "no collective could be joined: waiting cannot be separated from transfer; give the \
                 traces of several ranks of one job",
                "  ",
                "  ",
            );
            return text;
        }
        self.write_straggler_sentences(&mut text);
        if let Some((least, most)) = self.exposed_communication_share_range() {
            let (least, most) = (least * 100.0, most * 100.0);
            let line =
                format!("exposed communication: {least:.1} to {most:.1} % of the time of a rank");
            append_wrapped_line(&mut text, &line, "  ", "    ");
        }
        self.write_times_of_ranks(&mut text);
        self.write_waits_between_rank_pairs(&mut text);
        self.write_critical_path_of_job(&mut text);
        self.write_collectives_by_kind(&mut text);
        text
    }

    /// Writes the problems of the ranks' traces; if too many clocks differ, one line summarises
    /// their differences.
    fn write_problems_of_traces(&self, text: &mut String) {
        let ahead = |problem: &ProblemOfJobTraces| match problem {
            ProblemOfJobTraces::ClockDiffersFromFirstRank { clock_ahead_ns: ahead_ns, .. } => {
                Some(*ahead_ns)
            }
            _ => None,
        };
        let clocks: Vec<i64> = self.problems.iter().filter_map(ahead).collect();
        let many = clocks.len() > MAX_PRINTED_CLOCK_DIFFERENCES;
        for problem in self.problems.iter().filter(|of| !many || ahead(of).is_none()) {
            append_wrapped_line(text, &problem.problem_as_sentence(), "  ! ", "    ");
        }
        if let (true, Some(least), Some(most)) = (many, clocks.iter().min(), clocks.iter().max()) {
            let apart = format_nanoseconds(most.max(&0) - least.min(&0));
            let line = format!(
                "the clocks of {} ranks differ, by up to {apart}; aligned by the ends of collectives",
                clocks.len() + 1
            );
            append_wrapped_line(text, &line, "  ! ", "    ");
        }
    }

    fn write_straggler_sentences(&self, text: &mut String) {
        let stragglers = self.straggler_ranks_slowest_first();
        if stragglers.is_empty() {
            let line = "no straggler: no rank delays the others by 5 % of the time where no compute \
                        hides it, and by more than the clocks may differ";
            append_wrapped_line(text, line, "  ", "    ");
        }
        for rank in stragglers {
            append_wrapped_line(
                text,
                &format!("straggler: {}", self.straggler_delay_sentence(rank)),
                "  ",
                "    ",
            );
        }
    }

    /// Returns a sentence that says by how much a straggler delays the others, why, and what the
    /// job would gain without the delay.
    pub fn straggler_delay_sentence(&self, rank: &RankWithCollectiveSums) -> String {
        format!(
            "{} came last to {} of {} collectives and delayed them by {} ({:.1} % of the time); {}. \
             As fast as the median rank, the job gains {} (replayed)",
            rank.rank_name,
            with_thousands_separators(rank.last_arrivals),
            with_thousands_separators(self.joined_collectives),
            format_nanoseconds(rank.delayed_other_ranks_ns),
            percent_of_whole(rank.delayed_other_ranks_ns, self.collectives_span_ns),
            self.cause_of_straggler_delay(rank),
            format_nanoseconds(rank.gain_at_median_speed_ns)
        )
    }

    /// Names the kind of time (compute, copies, idle) in which a straggler most exceeds the other
    /// ranks.
    fn cause_of_straggler_delay(&self, rank: &RankWithCollectiveSums) -> String {
        let excess = |verb: &str, value: fn(&RankWithCollectiveSums) -> i64| {
            let (own, others) = (value(rank), median_value_of_ranks(self.ranks.iter().map(value)));
            (own - others, verb.to_owned(), own, others)
        };
        let parts = [
            excess("computes", |of| of.times_in_common_span.compute_ns),
            excess("is idle for", |of| of.times_in_common_span.idle_ns),
        ];
        let (more, verb, own, others) = parts.into_iter().max().expect("there are two parts");
        if more <= 0 {
            return "neither its compute nor its idle time exceeds the median".to_owned();
        }
        format!(
            "it {verb} {}, the median rank {}",
            format_nanoseconds(own),
            format_nanoseconds(others)
        )
    }

    fn write_times_of_ranks(&self, text: &mut String) {
        let _ = writeln!(
            text,
            "  {:<26}{:>12}{:>13}{:>11}{:>12}{:>12}{:>8}",
            "rank", "compute", "exposed comm", "idle", "waits", "delays", "last"
        );
        for rank in &self.ranks {
            let _ = writeln!(
                text,
                "  {:<26}{:>12}{:>13}{:>11}{:>12}{:>12}{:>8}",
                shorten_in_the_middle(&rank.rank_name, 25),
                format_nanoseconds(rank.times_in_common_span.compute_ns),
                format_nanoseconds(rank.times_in_common_span.exposed_communication_ns),
                format_nanoseconds(rank.times_in_common_span.idle_ns),
                format_nanoseconds(rank.waited_in_collectives_ns),
                format_nanoseconds(rank.delayed_other_ranks_ns),
                with_thousands_separators(rank.last_arrivals)
            );
        }
    }

    fn write_waits_between_rank_pairs(&self, text: &mut String) {
        let mut pairs: Vec<(i64, usize, usize)> = Vec::new();
        for (rank, waits) in self.wait_ns_between_ranks.iter().enumerate() {
            pairs.extend(waits.iter().enumerate().map(|(last, &ns)| (ns, rank, last)));
        }
        pairs.retain(|&(ns, ..)| ns * 100 >= self.collectives_span_ns);
        pairs.sort_by_key(|&(ns, rank, last)| (std::cmp::Reverse(ns), rank, last));
        if pairs.is_empty() {
            return;
        }
        let _ = writeln!(text, "  waiting (1 % of the time or more)");
        for (ns, rank, last) in pairs.into_iter().take(MAX_PRINTED_RANK_PAIRS) {
            let line = format!(
                "{} waits {} for {}",
                self.ranks[rank].rank_name,
                format_nanoseconds(ns),
                self.ranks[last].rank_name
            );
            append_wrapped_line(text, &line, "    ", "      ");
        }
    }

    fn write_critical_path_of_job(&self, text: &mut String) {
        let path = &self.critical_path;
        if path.path_length_ns == 0 {
            return;
        }
        let _ = writeln!(
            text,
            "  critical path through the ranks ({})",
            format_nanoseconds(path.path_length_ns)
        );
        let line = |text: &mut String, ns: i64, what: &str| {
            let share = percent_of_whole(ns, path.path_length_ns);
            let _ = writeln!(
                text,
                "    {share:>5.1} %{:>12}  {}",
                format_nanoseconds(ns),
                shorten_in_the_middle(what, 74)
            );
        };
        for (rank, what, ns) in
            path.rank_kind_and_ns_of_segments.iter().take(MAX_PRINTED_PATH_SEGMENTS)
        {
            line(text, *ns, &format!("{}: {what}", self.ranks[*rank].rank_name));
        }
        let rest: i64 = path
            .rank_kind_and_ns_of_segments
            .iter()
            .skip(MAX_PRINTED_PATH_SEGMENTS)
            .map(|of| of.2)
            .sum();
        if rest > 0 {
            line(text, rest, "other");
        }
        let _ = writeln!(text, "    gains, from the replay of all ranks");
        path.gains.iter().for_each(|of| line(text, of.gain_ns, &of.change));
    }

    fn write_collectives_by_kind(&self, text: &mut String) {
        let _ = writeln!(
            text,
            "  {:<22}{:>11}{:>7}{:>9}{:>12}{:>12}{:>20}",
            "collective", "bytes", "ranks", "count", "transfer", "skew", "bus bandwidth"
        );
        for of in self.collectives.iter().take(MAX_PRINTED_COLLECTIVE_KINDS) {
            let size = if of.bytes_per_collective > 0 {
                format_bytes_with_unit(of.bytes_per_collective)
            } else {
                "unknown".to_owned()
            };
            let bus = match (of.bus_bandwidth_gb_per_s, self.link_bandwidth_and_name) {
                (Some(bus), Some((link, _))) => {
                    format!("{bus:.1} GB/s ({:.0} %)", bus / link * 100.0)
                }
                (Some(bus), None) => format!("{bus:.1} GB/s"),
                (None, _) => "size not recorded".to_owned(),
            };
            let _ = writeln!(
                text,
                "  {:<22}{:>11}{:>7}{:>9}{:>12}{:>12}{bus:>20}",
                of.collective.collective_label(),
                size,
                of.ranks,
                with_thousands_separators(of.collective_count),
                format_nanoseconds(of.total_transfer_ns),
                format_nanoseconds(of.total_arrival_skew_ns),
            );
        }
        let more = self.collectives.len().saturating_sub(MAX_PRINTED_COLLECTIVE_KINDS);
        if more > 0 {
            let _ = writeln!(text, "    {more} more kinds and sizes are in the JSON");
        }
        if let Some((speed, name)) = self.link_bandwidth_and_name {
            let _ = writeln!(text, "  bus bandwidth in % of {name}, {speed:.0} GB/s each way");
        }
    }
}
