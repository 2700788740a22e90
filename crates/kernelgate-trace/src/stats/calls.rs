//! Makes tables of CUDA API calls.

use super::shared_cells::{count_cell, groups_by_total, summary_table};
use super::summary::{GroupedSamples, ValueSummary};
use super::table::{StatsTable, TableCell};
use crate::analyze::launches::{NO_CALL, TraceLaunches};
use crate::model::{InternedValues as Interner, Trace};

/// A function's name without the version of its interface, `_v` and four digits. Longer version
/// suffixes are kept, as in `nsys stats`.
pub fn without_interface_version(name: &str) -> &str {
    let digits = |text: &str| text.len() == 4 && text.bytes().all(|digit| digit.is_ascii_digit());
    match name.rsplit_once("_v") {
        Some((function, version)) if digits(version) => function,
        _ => name,
    }
}

pub(super) fn host_call_table(trace: &Trace) -> StatsTable {
    let mut names = Interner::default();
    let mut samples = GroupedSamples::with_value_capacity(trace.calls.len());
    // The number of distinct names is small: each is shortened once.
    let mut functions: Interner<&str> = Interner::default();
    let mut function_of: Vec<u32> = Vec::new();
    for (row, &name) in trace.calls.name.iter().enumerate() {
        let index = names.intern(name) as usize;
        if index == function_of.len() {
            function_of.push(functions.intern(without_interface_version(trace.names.text(name))));
        }
        samples.push(function_of[index], trace.calls.end[row] - trace.calls.start[row]);
    }
    let summaries = samples.group_summaries(functions.values.len());
    let rows = groups_by_total(functions.values, summaries);
    summary_table("cuda_api_sum", "Num Calls", &["Name"], rows, |name| {
        vec![TableCell::Text(name.to_owned())]
    })
}

/// Columns of the table of kernel launches.
const KERNEL_EXECUTION_COLUMNS: [&str; 27] = [
    "PID",
    "TID",
    "DevId",
    "Count",
    "QCount",
    "TAvg (ns)",
    "TMed (ns)",
    "TMin (ns)",
    "TMax (ns)",
    "TStdDev (ns)",
    "AAvg (ns)",
    "AMed (ns)",
    "AMin (ns)",
    "AMax (ns)",
    "AStdDev (ns)",
    "QAvg (ns)",
    "QMed (ns)",
    "QMin (ns)",
    "QMax (ns)",
    "QStdDev (ns)",
    "KAvg (ns)",
    "KMed (ns)",
    "KMin (ns)",
    "KMax (ns)",
    "KStdDev (ns)",
    "API Name",
    "Kernel Name",
];

/// Launches by thread, device, call and kernel. A launch's times: total, from the entry of the call
/// to the end of kernel and call; the call; the queue, from the return of the call to the start of
/// the kernel where that did not start before; the kernel.
pub(super) fn kernel_execution_table(trace: &Trace) -> StatsTable {
    let launches = TraceLaunches::join_operations_with_calls(trace);
    let (calls, kernels) = (&trace.calls, &trace.kernels.on_gpu);
    let mut groups = Interner::default();
    let mut times: [GroupedSamples; 4] = Default::default();
    for row in 0..kernels.len() {
        let call = launches.call_of[row];
        if call == NO_CALL {
            continue;
        }
        let call = call as usize;
        let function = trace.functions[trace.kernels.function.at(row) as usize].demangled;
        let device = trace.places[kernels.place.at(row).0 as usize].device;
        let group = groups.intern((calls.thread[call], device, calls.name[call], function));
        let (start, end) = (kernels.start.at(row), kernels.end(row));
        let [total, api, queue, kernel] = &mut times;
        total.push(group, end.max(calls.end[call]) - calls.start[call]);
        api.push(group, calls.end[call] - calls.start[call]);
        kernel.push(group, end - start);
        if start >= calls.end[call] {
            queue.push(group, start - calls.end[call]);
        }
    }
    let groups = groups.values;
    let [total, api, queue, kernel] = times.map(|samples| samples.group_summaries(groups.len()));
    let mut order: Vec<usize> = (0..groups.len()).collect();
    order.sort_by(|&a, &b| total[b].mean.total_cmp(&total[a].mean));
    let five = |summary: &ValueSummary| {
        if summary.count == 0 {
            return vec![TableCell::Empty; 5];
        }
        vec![
            TableCell::Decimal(summary.mean, 1),
            TableCell::Decimal(summary.median, 1),
            TableCell::Integer(summary.min),
            TableCell::Integer(summary.max),
            TableCell::Decimal(summary.deviation, 1),
        ]
    };
    let row = |index: usize| {
        let (thread, device, call, function) = groups[index];
        let thread = &trace.threads[thread as usize];
        let mut cells = vec![
            TableCell::Integer(trace.processes[thread.process as usize].pid),
            TableCell::Integer(thread.tid),
            TableCell::Integer(i64::from(device)),
            count_cell(total[index].count),
            count_cell(queue[index].count),
        ];
        for summary in [&total[index], &api[index], &queue[index], &kernel[index]] {
            cells.extend(five(summary));
        }
        cells.push(TableCell::Text(without_interface_version(trace.names.text(call)).to_owned()));
        cells.push(TableCell::Text(trace.names.text(function).to_owned()));
        cells
    };
    StatsTable {
        report: "cuda_kern_exec_sum",
        columns: KERNEL_EXECUTION_COLUMNS.to_vec(),
        rows: order.into_iter().map(row).collect(),
        named_by: 26,
    }
}

#[cfg(test)]
mod tests {
    use super::without_interface_version;

    #[test]
    fn a_version_number_of_four_digits_is_parsed() {
        assert_eq!(without_interface_version("cudaLaunchKernel_v7000"), "cudaLaunchKernel");
        assert_eq!(without_interface_version("cudaGraphLaunch_v10000"), "cudaGraphLaunch_v10000");
        assert_eq!(
            without_interface_version("cudaStreamGetCaptureInfo_v2"),
            "cudaStreamGetCaptureInfo_v2"
        );
        assert_eq!(without_interface_version("cuLaunchKernel"), "cuLaunchKernel");
    }
}
