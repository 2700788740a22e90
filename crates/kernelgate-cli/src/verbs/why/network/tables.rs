//! Tables of recorded neural networks, with a row for each case.

use kernelgate::display::table::AlignedTextTable;
use kernelgate::display::time_text;
use kernelgate_trace::diagnose::network::{
    AttentionOperation, MIN_TIME_SHARE_TO_LIST, MeanKernelUsePerPass, TrainingPhase,
    kernel_time_share_by_work_class, total_kernel_ns_per_pass,
};
use kernelgate_trace::diagnose::{KernelWorkClass, shortened_kernel_name_for_readers};
use kernelgate_trace::stats::shorten_in_the_middle;

use super::RecordedNetwork;

/// Longest name of a kernel in a table of networks, in columns.
const MAX_NAME_COLUMNS_IN_NETWORK_TABLE: usize = 40;
/// Largest number of kernels that are listed for each network.
const MAX_LISTED_KERNELS_PER_NETWORK: usize = 6;
/// Largest number of kinds of kernels that get a column of their own; the others share one column.
const MAX_KERNEL_CLASS_COLUMNS: usize = 6;

fn share_as_percent_text(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

fn dash_cell() -> String {
    "-".to_owned()
}

fn launch_count_text(count: f64) -> String {
    if count.fract() == 0.0 { format!("{count:.0}") } else { format!("{count:.1}") }
}

/// All tables of the recorded networks as text, with sentences that explain their columns.
pub fn all_network_tables_text(
    cases: &[RecordedNetwork],
    shown: &dyn Fn(&AlignedTextTable) -> String,
) -> String {
    let sections = [
        (
            "utilization of the matrix units",
            matrix_utilization_table(cases),
            note_on_published_peaks(cases),
        ),
        (
            "(a) host against device, a launch",
            host_and_device_times_table(cases),
            "wall: the host's timer with a wait at its end; launching: the same without a wait;\n\
             ends: before the first kernel and after the last one\n"
                .to_owned(),
        ),
        (
            "(b) the kernel with the largest total time",
            largest_kernel_of_each_network_table(cases),
            String::new(),
        ),
        (
            "(c) kernels of the forward pass besides matmul, from 1% on",
            kernels_other_than_matmul_table(cases),
            String::new(),
        ),
        ("(d) share of the kernels' time by kind", kernel_kinds_table(cases), String::new()),
        (
            "(e) softmax against matmul inside attention, a forward pass",
            attention_times_table(cases),
            "FLOPs: those of both products over those of softmax;\n\
             gain: attention of the unfused row over this one\n"
                .to_owned(),
        ),
    ];
    let mut text = String::new();
    for (heading, table, note) in sections.iter().filter(|(_, table, _)| !table.has_no_rows()) {
        text += &format!("{heading}\n{}\n{note}\n", shown(table));
    }
    text
}

/// Adds the table rows of each network, below a heading with the network's problem.
fn add_rows_below_problem_headings(
    table: &mut AlignedTextTable,
    cases: &[RecordedNetwork],
    rows: impl Fn(&RecordedNetwork) -> Vec<Vec<String>>,
) {
    for of_problem in cases.chunk_by(|a, b| a.problem_id == b.problem_id) {
        let rows: Vec<Vec<String>> = of_problem.iter().flat_map(&rows).collect();
        if !rows.is_empty() {
            table.add_heading(of_problem[0].problem_id.clone());
            rows.into_iter().for_each(|row| table.add_row(row));
        }
    }
}

fn matrix_utilization_table(cases: &[RecordedNetwork]) -> AlignedTextTable {
    let mut table = AlignedTextTable::new(&[
        "row",
        "a launch",
        "throughput",
        "of published",
        "of measured",
        "forward",
        "backward",
        "optimizer",
    ]);
    add_rows_below_problem_headings(&mut table, cases, |case| {
        let share = |share: Option<f64>| share.map_or_else(dash_cell, share_as_percent_text);
        let phase = |phase| share(case.share_of_busy_time_in_phase(phase));
        vec![vec![
            case.implementation_and_cache_state.clone(),
            time_text(case.single_launch_gpu_span_ns),
            case.samples_per_s
                .map_or_else(dash_cell, |rate| case.sample_unit.throughput_as_text(rate)),
            share(case.utilization.share_of_published_peak),
            share(case.utilization.share_of_measured_peak),
            phase(TrainingPhase::Forward),
            phase(TrainingPhase::Backward),
            phase(TrainingPhase::Optimizer),
        ]]
    });
    table
}

fn note_on_published_peaks(cases: &[RecordedNetwork]) -> String {
    let mut peaks: Vec<&str> =
        cases.iter().filter_map(|case| case.published_peak_text.as_deref()).collect();
    peaks.sort_unstable();
    peaks.dedup();
    let published = match peaks.is_empty() {
        true => "published: the device has no published peak here".to_owned(),
        false => format!("published: dense peak of {}", peaks.join(", ")),
    };
    format!("{published};\nmeasured: the matmul ceiling here; masked attention does not count\n")
}

fn host_and_device_times_table(cases: &[RecordedNetwork]) -> AlignedTextTable {
    let mut table =
        AlignedTextTable::new(&["row", "wall", "launching", "busy", "idle", "ends", "idle mostly"]);
    add_rows_below_problem_headings(&mut table, cases, |case| {
        let cause = case.idle_ns_by_cause.first().map_or_else(dash_cell, |(cause, ns)| {
            format!("{} {}", shorten_in_the_middle(cause, 34), time_text(*ns))
        });
        vec![vec![
            case.implementation_and_cache_state.clone(),
            time_text(case.host_ns_per_launch),
            time_text(case.host_launch_call_ns),
            time_text(case.gpu_busy_ns_per_launch),
            time_text(case.gpu_span_ns_per_launch - case.gpu_busy_ns_per_launch),
            time_text((case.host_ns_per_launch - case.gpu_span_ns_per_launch).max(0.0)),
            cause,
        ]]
    });
    table
}

fn largest_kernel_of_each_network_table(cases: &[RecordedNetwork]) -> AlignedTextTable {
    let mut table =
        AlignedTextTable::new(&["row", "kernel", "launches", "time", "share", "the other pass"]);
    add_rows_below_problem_headings(&mut table, cases, |case| {
        let step = case.network.kernels_of_training_step();
        let Some(first) = step.first() else { return Vec::new() };
        let inference = case.inference_kernels(cases).first();
        let other = match case.network.has_backward_phase() {
            true => inference.map(|of| (of.kernel_name.clone(), "inference")),
            false => {
                let trains = |of: &&RecordedNetwork| {
                    of.network.has_backward_phase() && of.differs_only_in_operation(case)
                };
                let step =
                    cases.iter().find(trains).map(|of| of.network.kernels_of_training_step());
                step.and_then(|step| Some((step.first()?.kernel_name.clone(), "training")))
            }
        };
        let same = other.map_or_else(dash_cell, |(name, pass)| match name == first.kernel_name {
            true => format!("the same in {pass}"),
            false => format!("another in {pass}"),
        });
        vec![vec![
            case.implementation_and_cache_state.clone(),
            shorten_in_the_middle(
                &shortened_kernel_name_for_readers(&first.kernel_name),
                MAX_NAME_COLUMNS_IN_NETWORK_TABLE,
            ),
            launch_count_text(first.launches_per_pass),
            time_text(first.kernel_ns_per_pass),
            share_as_percent_text(
                first.kernel_ns_per_pass / total_kernel_ns_per_pass(&step).max(1.0),
            ),
            same,
        ]]
    });
    table
}

fn kernels_other_than_matmul_table(cases: &[RecordedNetwork]) -> AlignedTextTable {
    let mut table = AlignedTextTable::new(&["kernel", "kind", "launches", "time", "share"]);
    for case in cases {
        let forward = case.kernels_of_forward_phase();
        let all = total_kernel_ns_per_pass(forward).max(1.0);
        let other = |of: &&MeanKernelUsePerPass| {
            of.class != KernelWorkClass::Matmul
                && of.kernel_ns_per_pass >= MIN_TIME_SHARE_TO_LIST * all
        };
        let listed: Vec<&MeanKernelUsePerPass> =
            forward.iter().filter(other).take(MAX_LISTED_KERNELS_PER_NETWORK).collect();
        if listed.is_empty() || case.network.has_backward_phase() {
            continue;
        }
        table.add_heading(case.case_id.clone());
        for of in listed {
            table.add_row(vec![
                shorten_in_the_middle(
                    &shortened_kernel_name_for_readers(&of.kernel_name),
                    MAX_NAME_COLUMNS_IN_NETWORK_TABLE,
                ),
                of.class.printed_work_class_label().to_owned(),
                launch_count_text(of.launches_per_pass),
                time_text(of.kernel_ns_per_pass),
                share_as_percent_text(of.kernel_ns_per_pass / all),
            ]);
        }
    }
    table
}

/// The kernels of a network for each pass that its row shows: "inference", "training", or both.
pub(super) fn kernels_shown_for_each_pass<'a>(
    case: &'a RecordedNetwork,
    all: &'a [RecordedNetwork],
) -> Vec<(&'static str, Vec<MeanKernelUsePerPass>)> {
    let mut passes = Vec::new();
    let trains = case.network.has_backward_phase();
    let paired = |of: &&RecordedNetwork| {
        of.network.has_backward_phase() && of.differs_only_in_operation(case)
    };
    // An inference case gets no table row of its own if the training case of the same network is
    // recorded, whose rows show both passes.
    if trains || !all.iter().any(|of| paired(&of)) {
        passes.push(("inference", case.inference_kernels(all).to_vec()));
    }
    if trains {
        passes.push(("training", case.network.kernels_of_training_step()));
    }
    passes
}

/// The kinds of kernels that take most time over all networks, without the kind "other".
pub(super) fn kernel_classes_with_most_time(cases: &[RecordedNetwork]) -> Vec<KernelWorkClass> {
    let mut sums: Vec<(KernelWorkClass, f64)> = Vec::new();
    for (class, share) in cases
        .iter()
        .flat_map(|case| kernel_time_share_by_work_class(&case.network.kernels_of_training_step()))
    {
        match sums.iter_mut().find(|(known, _)| *known == class) {
            Some((_, sum)) => *sum += share,
            None => sums.push((class, share)),
        }
    }
    sums.retain(|(class, _)| *class != KernelWorkClass::OtherOrUnknown);
    sums.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    sums.into_iter().map(|(class, _)| class).take(MAX_KERNEL_CLASS_COLUMNS).collect()
}

fn kernel_kinds_table(cases: &[RecordedNetwork]) -> AlignedTextTable {
    let columns = kernel_classes_with_most_time(cases);
    let labels: Vec<&str> = columns.iter().map(|class| class.printed_work_class_label()).collect();
    let mut table = AlignedTextTable::new(&[&["row"], &labels[..], &["other kinds"]].concat());
    add_rows_below_problem_headings(&mut table, cases, |case| {
        let row = |(pass, kernels): (&str, Vec<MeanKernelUsePerPass>)| {
            let shares = kernel_time_share_by_work_class(&kernels);
            let share = |class: &KernelWorkClass| {
                shares.iter().find(|(of, _)| of == class).map_or(0.0, |(_, share)| *share)
            };
            let others: f64 = 1.0 - columns.iter().map(share).sum::<f64>();
            let cells =
                columns.iter().map(share).chain([others.max(0.0)]).map(share_as_percent_text);
            std::iter::once(format!("{}, {pass}", case.implementation_and_cache_state))
                .chain(cells)
                .collect()
        };
        kernels_shown_for_each_pass(case, cases).into_iter().map(row).collect()
    });
    table
}

fn attention_times_table(cases: &[RecordedNetwork]) -> AlignedTextTable {
    let mut table = AlignedTextTable::new(&[
        "row",
        "scores",
        "softmax",
        "values",
        "softmax/matmul",
        "FLOPs",
        "all",
        "gain",
    ]);
    add_rows_below_problem_headings(&mut table, cases, |case| {
        let Some(all_ns) = case.attention_kernel_time_ns() else { return Vec::new() };
        let passes = case.network.forward_passes.max(1) as f64;
        let unfused = case.network.attention.as_ref();
        let operation = |operation| {
            unfused.map_or_else(dash_cell, |of| {
                time_text(
                    of.kernels_of_attention_operation(operation).total_kernel_ns as f64 / passes,
                )
            })
        };
        let ratio =
            |ratio: Option<f64>, form: fn(f64) -> String| ratio.map_or_else(dash_cell, form);
        let gain = case
            .case_with_unfused_attention(cases)
            .and_then(RecordedNetwork::attention_kernel_time_ns)
            .map(|ns| ns / all_ns);
        vec![vec![
            case.implementation_and_cache_state.clone(),
            operation(AttentionOperation::ScoresMatmul),
            operation(AttentionOperation::Softmax),
            operation(AttentionOperation::ValuesMatmul),
            ratio(unfused.and_then(|of| of.softmax_to_matmul_time_ratio()), |ratio| {
                format!("{ratio:.2}")
            }),
            ratio(unfused.and_then(|of| of.matmul_to_softmax_flops_ratio()), |ratio| {
                format!("{ratio:.1} : 1")
            }),
            time_text(all_ns),
            ratio(gain, |gain| format!("{gain:.2}x")),
        ]]
    });
    table
}
