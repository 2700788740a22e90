//! Copies and communication during which no kernel computes.

use std::collections::BTreeMap;

use super::super::context::Context;
use super::super::finding::{
    Confidence, DeviceUse, Evidence, Finding, Measure, Remedy, Severity, Unit,
};
use super::super::labels::short_name;
use super::super::text::{bytes, time};
use super::launches::no_work;
use super::outcome::{Lack, Outcome, all_of, most_expensive, percent};
use crate::analyze::classes::Class;
use crate::analyze::operations::OperationId;
use crate::analyze::timeline::Line;
use crate::analyze::timeline::cover::Union;
use crate::stats::shorten;

/// Part of the span from which exposed time is a finding, in percent.
const EXPOSED_PERCENT: f64 = 5.0;
/// Columns for a name.
const NAME: usize = 60;

/// Operations of a class on a device.
fn operations_in_class(context: &Context<'_>, used: &DeviceUse, class: Class) -> Vec<OperationId> {
    let own = |id: &OperationId| {
        context.classes.class(*id) == class && context.place_of(*id) == (used.pid, used.device)
    };
    context.all.ids().filter(own).collect()
}

/// Nanoseconds in which kernels compute, or whole graphs run.
fn compute_ns(used: &DeviceUse) -> i64 {
    let lines = [
        Line::Compute,
        Line::ComputeAndCommunication,
        Line::ComputeAndMigration,
        Line::ComputeAndCopy,
        Line::Graph,
    ];
    lines.iter().map(|&line| used.account.total.busy(line)).sum()
}

fn count(context: &Context<'_>, class: Class) -> usize {
    context.all.ids().filter(|&id| context.classes.class(id) == class).count()
}

fn union(context: &Context<'_>, ids: &[OperationId]) -> Union {
    Union::new(ids.iter().map(|&id| (context.all.start(id), context.all.end(id))).collect())
}

/// Operations of one name as a line, the most expensive first.
fn evidence(context: &Context<'_>, ids: &[OperationId], place: (i64, u32)) -> Vec<Evidence> {
    let all = &context.all;
    let mut by_name: BTreeMap<String, (Evidence, u64)> = BTreeMap::new();
    for &id in ids {
        let (start, end) = (all.start(id), all.end(id));
        let name = shorten(&short_name(&all.name(id)), NAME);
        let (line, moved) = by_name.entry(name.clone()).or_insert_with(|| {
            let first = Evidence {
                what: name,
                total_ns: Some(0),
                span: Some((start, end)),
                place: Some(place),
                ..Evidence::default()
            };
            (first, 0)
        });
        line.count += 1;
        line.total_ns = line.total_ns.map(|ns| ns + end - start);
        if line.span.is_some_and(|(from, to)| end - start > to - from) {
            line.span = Some((start, end));
        }
        if let (crate::analyze::operations::Kind::Copy, row) = all.part(id) {
            *moved += context.trace.copies.bytes[row];
        }
    }
    let lines = by_name.into_values().map(|(mut line, moved)| {
        if moved > 0 {
            line.what = format!("{}, {}", line.what, bytes(moved));
        }
        line
    });
    most_expensive(lines.collect())
}

pub(super) fn copies_finds() -> String {
    format!("copies with no kernel beside them take {EXPOSED_PERCENT} % of the span or more")
}

pub(super) fn communication_finds() -> String {
    format!("communication with no compute beside it takes {EXPOSED_PERCENT} % of the span or more")
}

/// Copies beside which no kernel runs.
pub(super) fn copies(context: &Context<'_>, used: &[DeviceUse]) -> Outcome {
    if context.all.is_empty() {
        return no_work(context).into();
    }
    let count = count(context, Class::Copy);
    if count == 0 {
        return Lack::absent("the trace holds no copies").into();
    }
    let found = used.iter().filter_map(|used| {
        let span = used.span.1 - used.span.0;
        let exposed = used.account.total.busy(Line::Copy);
        let share = percent(exposed, span);
        if share < EXPOSED_PERCENT {
            return None;
        }
        let copies = operations_in_class(context, used, Class::Copy);
        let copied = union(context, &copies);
        Some(Finding {
            id: "exposed-copy",
            severity: Severity::from_saving(exposed, span),
            confidence: Confidence::High,
            title: format!(
                "device {} copies for {:.1} % of the time, {share:.1} % with no kernel beside it; \
                 kernels run for {:.1} %",
                used.device,
                percent(copied.length(), span),
                percent(compute_ns(used), span),
            ),
            measured: Measure { value: share, unit: "% of the span" },
            threshold: Measure { value: EXPOSED_PERCENT, unit: "% of the span" },
            recoverable_ns: Some(exposed),
            remedy: Remedy::Without(Class::Copy),
            replayed: None,
            evidence: evidence(context, &copies, (used.pid, used.device)),
            advice: format!(
                "keep data on the device between launches, or copy beside kernels: another stream, \
                 page-locked memory ({}), the next batch while this one is computed",
                context.platform.pinned()
            ),
            false_positive: "a trace that is mostly loading: restrict it with --range",
        })
    });
    Outcome::Checked(found.collect(), all_of(count, Unit::Copies))
}

/// Communication beside which nothing computes.
pub(super) fn communication(context: &Context<'_>, used: &[DeviceUse]) -> Outcome {
    if context.all.is_empty() {
        return no_work(context).into();
    }
    let count = count(context, Class::Communication);
    if count == 0 {
        return Lack::absent("the trace holds no communication kernels").into();
    }
    let found = used.iter().filter_map(|used| {
        let span = used.span.1 - used.span.0;
        let exposed = used.account.total.busy(Line::Communication);
        let share = percent(exposed, span);
        if share < EXPOSED_PERCENT {
            return None;
        }
        let communication = operations_in_class(context, used, Class::Communication);
        let communicated = union(context, &communication);
        let shares_streams = used
            .account
            .transfers
            .iter()
            .any(|of| of.class == Class::Communication && of.beside_compute > 0);
        // Work that overlaps on one stream shows that the trace does not hold the real streams.
        let stream = match shares_streams && exposed == communicated.length() {
            true => "; it is on a stream that computes, so that nothing can overlap there",
            false => "",
        };
        Some(Finding {
            id: "exposed-communication",
            severity: Severity::from_saving(exposed, span),
            confidence: Confidence::High,
            title: format!(
                "device {} communicates for {}, {} of it with no compute beside it: {share:.1} % of \
                 the time{stream}",
                used.device,
                time(communicated.length()),
                time(exposed),
            ),
            measured: Measure { value: share, unit: "% of the span" },
            threshold: Measure { value: EXPOSED_PERCENT, unit: "% of the span" },
            recoverable_ns: Some(exposed),
            remedy: Remedy::Without(Class::Communication),
            replayed: None,
            evidence: evidence(context, &communication, (used.pid, used.device)),
            advice: "communicate beside compute on a stream of its own: overlap with the backward \
                     pass, larger buckets, fewer collectives; a rank that waits for others shows \
                     as communication, too"
                .to_owned(),
            false_positive: "a rank that waits for a slower one: compare the traces of all ranks",
        })
    });
    Outcome::Checked(found.collect(), all_of(count, Unit::Operations))
}
