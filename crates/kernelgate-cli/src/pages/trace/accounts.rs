//! The time of each device as a chart: a stacked bar for the whole time, for start-up and for each
//! iteration.

use maud::{Markup, html};

use crate::pages::charts::ChartFigure;
use crate::pages::page_frame;
use crate::plot::{
    ChartAxis, ChartBody, ChartRowMark, ChartWithTitle, LabelledRow, LabelledRows, PlottedUnit,
    ScaleKind,
};
use kernelgate::display::time_text;
use kernelgate_trace::analyze::timeline::BusyTimeLine;
use kernelgate_trace::diagnose::{DeviceTimeAccount, TimeAccount, TraceDiagnosis, TransferSum};

/// Largest number of iterations with a bar; the first ones are drawn.
const MAX_DRAWN_ITERATIONS: usize = 24;

/// Parts of a bar: name and lines of busy time. Idle time follows them.
const BUSY_TIME_PARTS: &[(&str, &[BusyTimeLine])] = &[
    ("compute", &[BusyTimeLine::Compute, BusyTimeLine::Graph]),
    ("compute beside communication", &[BusyTimeLine::ComputeAndCommunication]),
    ("compute beside copies", &[BusyTimeLine::ComputeAndCopy, BusyTimeLine::ComputeAndMigration]),
    ("exposed communication", &[BusyTimeLine::Communication]),
    ("exposed copies", &[BusyTimeLine::Copy, BusyTimeLine::Migration, BusyTimeLine::Set]),
];

/// One stacked chart of the time account for each device.
pub fn stacked(diagnosis: &TraceDiagnosis) -> Vec<ChartFigure> {
    diagnosis.devices.iter().map(|device| account_chart(&device.account)).collect()
}

fn account_chart(account: &DeviceTimeAccount) -> ChartFigure {
    let mut rows = Vec::new();
    let mut subtitle = "lines add up to the span".to_owned();
    match &account.iterations {
        None => rows.push(row("all".to_owned(), &account.total)),
        Some(iterations) => {
            if iterations.before.total_ns() > 0 {
                rows.push(row("start-up".to_owned(), &iterations.before));
            }
            for (index, of) in iterations.each.iter().take(MAX_DRAWN_ITERATIONS).enumerate() {
                rows.push(row(format!("iteration {}", index + 1), &of.account));
            }
            let more = iterations.lengths.len().saturating_sub(MAX_DRAWN_ITERATIONS);
            let more = if more > 0 { format!("; {more} more follow") } else { String::new() };
            subtitle = format!("by iteration, found by {}{more}", iterations.sign.label());
        }
    }
    let names = BUSY_TIME_PARTS.iter().map(|(name, _)| (*name).to_owned());
    let chart = ChartWithTitle {
        title: format!("Time of process {}, device {}", account.pid, account.device),
        subtitle,
        body: ChartBody::Rows(LabelledRows {
            axis: ChartAxis::new("time", PlottedUnit::Time, ScaleKind::FromZero),
            legend: names.chain(["idle".to_owned()]).collect(),
            rows,
            origin: None,
        }),
    };
    ChartFigure::new(&["account", &account.pid.to_string(), &account.device.to_string()], chart)
}

/// A chart row of consecutive time spans.
fn row(label: String, account: &TimeAccount) -> LabelledRow {
    let mut at = 0;
    let mut marks = Vec::new();
    let busy = BUSY_TIME_PARTS
        .iter()
        .map(|(_, lines)| lines.iter().map(|&line| account.busy_ns_of_line(line)).sum());
    for (colour, ns) in busy.chain([account.total_idle_ns()]).enumerate() {
        if ns > 0 {
            marks.push(ChartRowMark::Span(at as f64, (at + ns) as f64, colour));
            at += ns;
        }
    }
    LabelledRow { label, value: time_text(account.total_ns() as f64), marks }
}

/// Tables of the whole time of each device, and of its transfers.
pub fn tables(diagnosis: &TraceDiagnosis) -> Markup {
    let lines: Vec<Vec<String>> = diagnosis
        .devices
        .iter()
        .flat_map(|device| {
            let total = device.account.total.total_ns().max(1) as f64;
            let place = format!("process {}, device {}", device.pid, device.device);
            device.account.total.labelled_times().into_iter().map(move |(label, ns)| {
                let share = format!("{:.1}%", 100.0 * ns as f64 / total);
                vec![label, place.clone(), time_text(ns as f64), share]
            })
        })
        .collect();
    let transfer = |of: &TransferSum| {
        vec![
            format!("{} {}", of.class.label(), of.label),
            of.count.to_string(),
            time_text(of.total_ns as f64),
            time_text(of.exposed_ns as f64),
            of.bus.map_or_else(|| "-".to_owned(), |bus| format!("{bus:.1} GB/s")),
        ]
    };
    let transfers: Vec<Vec<String>> =
        diagnosis.devices.iter().flat_map(|of| of.account.transfers.iter().map(transfer)).collect();
    let path = &diagnosis.critical_path;
    let gains: Vec<Vec<String>> = path
        .gains
        .iter()
        .map(|gain| {
            let share = 100.0 * gain.gain_ns as f64 / path.total_ns.max(1) as f64;
            vec![gain.change.label(), time_text(gain.gain_ns as f64), format!("{share:.1}%")]
        })
        .collect();
    html! {
        @if !lines.is_empty() {
            (page_frame::table(&["line", "where", "time", "share"], &lines, |_| false))
        }
        @if !transfers.is_empty() {
            h3 { "Communication and copies" }
            (page_frame::table(&["kind", "count", "time", "exposed", "bus bandwidth"], &transfers, |_| false))
        }
        @if !gains.is_empty() {
            h3 { "Gains, from the replay of the recorded dependencies" }
            (page_frame::table(&["change", "gain", "share"], &gains, |_| false))
        }
    }
}
