//! Tables of recorded networks, with a row for each case.

use kernelgate::display::table::TextTable;
use kernelgate::display::time_text;
use kernelgate_trace::diagnose::network::{
    AttentionOperation, KernelUsePerPass, MIN_LISTED_TIME_SHARE, TrainingPhase,
    time_share_by_class, total_kernel_ns,
};
use kernelgate_trace::diagnose::{KernelClass, readable_name};
use kernelgate_trace::stats::shorten;

use super::RecordedNetwork;

/// Longest name of a kernel in a table, columns.
const MAX_NAME: usize = 40;
/// Largest number of kernels of a case that are listed.
const MAX_LISTED_KERNELS: usize = 6;
/// Largest number of kinds of kernels with columns of their own.
const MAX_KERNEL_CLASSES: usize = 6;

fn share_percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

fn dash_cell() -> String {
    "-".to_owned()
}

fn count_text(count: f64) -> String {
    if count.fract() == 0.0 { format!("{count:.0}") } else { format!("{count:.1}") }
}

/// Text of all tables, with sentences that explain their columns.
pub fn text(cases: &[RecordedNetwork], shown: &dyn Fn(&TextTable) -> String) -> String {
    let sections = [
        ("utilization of the matrix units", utilization_table(cases), published_peaks_note(cases)),
        (
            "(a) host against device, a launch",
            host_and_device(cases),
            "wall: the host's timer with a wait at its end; launching: the same without a wait;\n\
             ends: before the first kernel and after the last one\n"
                .to_owned(),
        ),
        ("(b) the kernel with the largest total time", largest_kernels(cases), String::new()),
        (
            "(c) kernels of the forward pass besides matmul, from 1% on",
            other_kernels(cases),
            String::new(),
        ),
        ("(d) share of the kernels' time by kind", kinds_table(cases), String::new()),
        (
            "(e) softmax against matmul inside attention, a forward pass",
            attention_table(cases),
            "FLOPs: those of both products over those of softmax;\n\
             gain: attention of the unfused row over this one\n"
                .to_owned(),
        ),
    ];
    let mut text = String::new();
    for (heading, table, note) in sections.iter().filter(|(_, table, _)| !table.is_empty()) {
        text += &format!("{heading}\n{}\n{note}\n", shown(table));
    }
    text
}

/// Adds rows of each case below a heading of its problem.
fn add_rows_by_problem(
    table: &mut TextTable,
    cases: &[RecordedNetwork],
    rows: impl Fn(&RecordedNetwork) -> Vec<Vec<String>>,
) {
    for of_problem in cases.chunk_by(|a, b| a.problem == b.problem) {
        let rows: Vec<Vec<String>> = of_problem.iter().flat_map(&rows).collect();
        if !rows.is_empty() {
            table.add_heading(of_problem[0].problem.clone());
            rows.into_iter().for_each(|row| table.row(row));
        }
    }
}

fn utilization_table(cases: &[RecordedNetwork]) -> TextTable {
    let mut table = TextTable::new(&[
        "row",
        "a launch",
        "throughput",
        "of published",
        "of measured",
        "forward",
        "backward",
        "optimizer",
    ]);
    add_rows_by_problem(&mut table, cases, |case| {
        let share = |share: Option<f64>| share.map_or_else(dash_cell, share_percent);
        let phase = |phase| share(case.phase_share(phase));
        vec![vec![
            case.row.clone(),
            time_text(case.launch_ns),
            case.samples_per_s.map_or_else(dash_cell, |rate| case.sample_unit.per_second(rate)),
            share(case.utilization.of_published),
            share(case.utilization.of_measured),
            phase(TrainingPhase::Forward),
            phase(TrainingPhase::Backward),
            phase(TrainingPhase::Optimizer),
        ]]
    });
    table
}

fn published_peaks_note(cases: &[RecordedNetwork]) -> String {
    let mut peaks: Vec<&str> = cases.iter().filter_map(|case| case.published.as_deref()).collect();
    peaks.sort_unstable();
    peaks.dedup();
    let published = match peaks.is_empty() {
        true => "published: the device has no published peak here".to_owned(),
        false => format!("published: dense peak of {}", peaks.join(", ")),
    };
    format!("{published};\nmeasured: the matmul ceiling here; masked attention does not count\n")
}

fn host_and_device(cases: &[RecordedNetwork]) -> TextTable {
    let mut table =
        TextTable::new(&["row", "wall", "launching", "busy", "idle", "ends", "idle mostly"]);
    add_rows_by_problem(&mut table, cases, |case| {
        let cause = case.idle.first().map_or_else(dash_cell, |(cause, ns)| {
            format!("{} {}", shorten(cause, 34), time_text(*ns))
        });
        vec![vec![
            case.row.clone(),
            time_text(case.wall_ns),
            time_text(case.launching_ns),
            time_text(case.busy_ns),
            time_text(case.device_ns - case.busy_ns),
            time_text((case.wall_ns - case.device_ns).max(0.0)),
            cause,
        ]]
    });
    table
}

fn largest_kernels(cases: &[RecordedNetwork]) -> TextTable {
    let mut table =
        TextTable::new(&["row", "kernel", "launches", "time", "share", "the other pass"]);
    add_rows_by_problem(&mut table, cases, |case| {
        let step = case.network.step_kernels();
        let Some(first) = step.first() else { return Vec::new() };
        let inference = case.inference(cases).first();
        let other = match case.network.trains() {
            true => inference.map(|of| (of.name.clone(), "inference")),
            false => {
                let trains = |of: &&RecordedNetwork| {
                    of.network.trains() && of.differs_in_operation_only(case)
                };
                let step = cases.iter().find(trains).map(|of| of.network.step_kernels());
                step.and_then(|step| Some((step.first()?.name.clone(), "training")))
            }
        };
        let same = other.map_or_else(dash_cell, |(name, pass)| match name == first.name {
            true => format!("the same in {pass}"),
            false => format!("another in {pass}"),
        });
        vec![vec![
            case.row.clone(),
            shorten(&readable_name(&first.name), MAX_NAME),
            count_text(first.launches),
            time_text(first.kernel_ns),
            share_percent(first.kernel_ns / total_kernel_ns(&step).max(1.0)),
            same,
        ]]
    });
    table
}

fn other_kernels(cases: &[RecordedNetwork]) -> TextTable {
    let mut table = TextTable::new(&["kernel", "kind", "launches", "time", "share"]);
    for case in cases {
        let forward = case.forward();
        let all = total_kernel_ns(forward).max(1.0);
        let other = |of: &&KernelUsePerPass| {
            of.class != KernelClass::Matmul && of.kernel_ns >= MIN_LISTED_TIME_SHARE * all
        };
        let listed: Vec<&KernelUsePerPass> =
            forward.iter().filter(other).take(MAX_LISTED_KERNELS).collect();
        if listed.is_empty() || case.network.trains() {
            continue;
        }
        table.add_heading(case.case.clone());
        for of in listed {
            table.row(vec![
                shorten(&readable_name(&of.name), MAX_NAME),
                of.class.label().to_owned(),
                count_text(of.launches),
                time_text(of.kernel_ns),
                share_percent(of.kernel_ns / all),
            ]);
        }
    }
    table
}

/// A case's kernels, with the pass to which they belong: inference, or training.
pub(super) fn kernels_by_pass<'a>(
    case: &'a RecordedNetwork,
    all: &'a [RecordedNetwork],
) -> Vec<(&'static str, Vec<KernelUsePerPass>)> {
    let mut passes = Vec::new();
    let trains = case.network.trains();
    let paired = |of: &&RecordedNetwork| of.network.trains() && of.differs_in_operation_only(case);
    // A forward pass is shown beside its training step.
    if trains || !all.iter().any(|of| paired(&of)) {
        passes.push(("inference", case.inference(all).to_vec()));
    }
    if trains {
        passes.push(("training", case.network.step_kernels()));
    }
    passes
}

/// Kinds of kernels with most time over all cases.
pub(super) fn classes_with_most_time(cases: &[RecordedNetwork]) -> Vec<KernelClass> {
    let mut sums: Vec<(KernelClass, f64)> = Vec::new();
    for (class, share) in
        cases.iter().flat_map(|case| time_share_by_class(&case.network.step_kernels()))
    {
        match sums.iter_mut().find(|(known, _)| *known == class) {
            Some((_, sum)) => *sum += share,
            None => sums.push((class, share)),
        }
    }
    sums.retain(|(class, _)| *class != KernelClass::Other);
    sums.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    sums.into_iter().map(|(class, _)| class).take(MAX_KERNEL_CLASSES).collect()
}

fn kinds_table(cases: &[RecordedNetwork]) -> TextTable {
    let columns = classes_with_most_time(cases);
    let labels: Vec<&str> = columns.iter().map(|class| class.label()).collect();
    let mut table = TextTable::new(&[&["row"], &labels[..], &["other kinds"]].concat());
    add_rows_by_problem(&mut table, cases, |case| {
        let row = |(pass, kernels): (&str, Vec<KernelUsePerPass>)| {
            let shares = time_share_by_class(&kernels);
            let share = |class: &KernelClass| {
                shares.iter().find(|(of, _)| of == class).map_or(0.0, |(_, share)| *share)
            };
            let others: f64 = 1.0 - columns.iter().map(share).sum::<f64>();
            let cells = columns.iter().map(share).chain([others.max(0.0)]).map(share_percent);
            std::iter::once(format!("{}, {pass}", case.row)).chain(cells).collect()
        };
        kernels_by_pass(case, cases).into_iter().map(row).collect()
    });
    table
}

fn attention_table(cases: &[RecordedNetwork]) -> TextTable {
    let mut table = TextTable::new(&[
        "row",
        "scores",
        "softmax",
        "values",
        "softmax/matmul",
        "FLOPs",
        "all",
        "gain",
    ]);
    add_rows_by_problem(&mut table, cases, |case| {
        let Some(all_ns) = case.attention_time_ns() else { return Vec::new() };
        let passes = case.network.passes.max(1) as f64;
        let unfused = case.network.attention.as_ref();
        let operation = |operation| {
            unfused.map_or_else(dash_cell, |of| {
                time_text(of.use_of_operation(operation).kernel_ns as f64 / passes)
            })
        };
        let ratio =
            |ratio: Option<f64>, form: fn(f64) -> String| ratio.map_or_else(dash_cell, form);
        let gain =
            case.unfused(cases).and_then(RecordedNetwork::attention_time_ns).map(|ns| ns / all_ns);
        vec![vec![
            case.row.clone(),
            operation(AttentionOperation::Scores),
            operation(AttentionOperation::Softmax),
            operation(AttentionOperation::Values),
            ratio(unfused.and_then(|of| of.softmax_over_products_time()), |ratio| {
                format!("{ratio:.2}")
            }),
            ratio(unfused.and_then(|of| of.matmul_over_softmax_flops()), |ratio| {
                format!("{ratio:.1} : 1")
            }),
            time_text(all_ns),
            ratio(gain, |gain| format!("{gain:.2}x")),
        ]]
    });
    table
}
