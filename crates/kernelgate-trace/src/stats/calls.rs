//! Makes the `nsys stats` tables of CUDA API calls.

use super::shared_cells::{count_cell, sort_groups_by_descending_total, table_of_group_summaries};
use super::summary::{ValueSummary, ValuesByGroup};
use super::table::{StatsTable, TableCell};
use crate::analyze::launches::{LaunchCallOfOperations, NO_LAUNCH_CALL};
use crate::model::{DistinctValues as Interner, Trace};

/// Returns an API function's name without a suffix of `_v` and four digits. A version suffix of
/// more than four digits is kept, as in `nsys stats`.
pub fn without_four_digit_version_suffix(name: &str) -> &str {
    let digits = |text: &str| text.len() == 4 && text.bytes().all(|digit| digit.is_ascii_digit());
    match name.rsplit_once("_v") {
        Some((function, version)) if digits(version) => function,
        _ => name,
    }
}

pub(super) fn cuda_api_call_table(trace: &Trace) -> StatsTable {
    let mut names = Interner::default();
    let mut samples = ValuesByGroup::with_capacity_for_values(trace.calls.call_count());
    // The suffix is removed once per distinct name, because a trace has few distinct function
    // names.
    let mut functions: Interner<&str> = Interner::default();
    let mut function_of: Vec<u32> = Vec::new();
    for (row, &name) in trace.calls.function_name.iter().enumerate() {
        let index = names.index_of_value(name) as usize;
        if index == function_of.len() {
            function_of.push(
                functions.index_of_value(without_four_digit_version_suffix(
                    trace.names.text_of_name(name),
                )),
            );
        }
        samples.push_value_of_group(
            function_of[index],
            trace.calls.end_ns[row] - trace.calls.start_ns[row],
        );
    }
    let summaries = samples.summaries_of_groups(functions.values.len());
    let rows = sort_groups_by_descending_total(functions.values, summaries);
    table_of_group_summaries("cuda_api_sum", "Num Calls", &["Name"], rows, |name| {
        vec![TableCell::Text(name.to_owned())]
    })
}

/// Column titles of the table of kernel launches and executions.
const KERNEL_LAUNCH_AND_EXECUTION_COLUMNS: [&str; 27] = [
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

/// Makes a table of kernel launches, grouped by thread, device, API call and kernel. Times per
/// launch: total from call entry to the end of call and kernel, API call, queue from call return to
/// kernel start if positive, and kernel.
pub(super) fn kernel_launch_and_execution_table(trace: &Trace) -> StatsTable {
    let launches = LaunchCallOfOperations::join_operations_with_host_calls(trace);
    let (calls, kernels) = (&trace.calls, &trace.kernels.on_gpu);
    let mut groups = Interner::default();
    let mut times: [ValuesByGroup; 4] = Default::default();
    for row in 0..kernels.operation_count() {
        let call = launches.call_index_of_operation[row];
        if call == NO_LAUNCH_CALL {
            continue;
        }
        let call = call as usize;
        let function =
            trace.functions[trace.kernels.function_index.at(row) as usize].demangled_name;
        let device = trace.places[kernels.place.at(row).0 as usize].device;
        let group = groups.index_of_value((
            calls.thread_index[call],
            device,
            calls.function_name[call],
            function,
        ));
        let (start, end) = (kernels.start_ns.at(row), kernels.operation_end_ns(row));
        let [total, api, queue, kernel] = &mut times;
        total.push_value_of_group(group, end.max(calls.end_ns[call]) - calls.start_ns[call]);
        api.push_value_of_group(group, calls.end_ns[call] - calls.start_ns[call]);
        kernel.push_value_of_group(group, end - start);
        if start >= calls.end_ns[call] {
            queue.push_value_of_group(group, start - calls.end_ns[call]);
        }
    }
    let groups = groups.values;
    let [total, api, queue, kernel] =
        times.map(|samples| samples.summaries_of_groups(groups.len()));
    let mut order: Vec<usize> = (0..groups.len()).collect();
    order.sort_by(|&a, &b| total[b].mean.total_cmp(&total[a].mean));
    let five = |summary: &ValueSummary| {
        if summary.value_count == 0 {
            return vec![TableCell::EmptyCell; 5];
        }
        vec![
            TableCell::DecimalWithPlaces(summary.mean, 1),
            TableCell::DecimalWithPlaces(summary.median, 1),
            TableCell::Integer(summary.min),
            TableCell::Integer(summary.max),
            TableCell::DecimalWithPlaces(summary.standard_deviation, 1),
        ]
    };
    let row = |index: usize| {
        let (thread, device, call, function) = groups[index];
        let thread = &trace.threads[thread as usize];
        let mut cells = vec![
            TableCell::Integer(trace.processes[thread.process_index as usize].pid),
            TableCell::Integer(thread.tid),
            TableCell::Integer(i64::from(device)),
            count_cell(total[index].value_count),
            count_cell(queue[index].value_count),
        ];
        for summary in [&total[index], &api[index], &queue[index], &kernel[index]] {
            cells.extend(five(summary));
        }
        cells.push(TableCell::Text(
            without_four_digit_version_suffix(trace.names.text_of_name(call)).to_owned(),
        ));
        cells.push(TableCell::Text(trace.names.text_of_name(function).to_owned()));
        cells
    };
    StatsTable {
        report_name: "cuda_kern_exec_sum",
        column_titles: KERNEL_LAUNCH_AND_EXECUTION_COLUMNS.to_vec(),
        rows: order.into_iter().map(row).collect(),
        filtered_column_index: 26,
    }
}

#[cfg(test)]
mod tests {
    use super::without_four_digit_version_suffix;

    #[test]
    fn only_four_digit_version_suffixes_are_removed() {
        assert_eq!(without_four_digit_version_suffix("cudaLaunchKernel_v7000"), "cudaLaunchKernel");
        assert_eq!(
            without_four_digit_version_suffix("cudaGraphLaunch_v10000"),
            "cudaGraphLaunch_v10000"
        );
        assert_eq!(
            without_four_digit_version_suffix("cudaStreamGetCaptureInfo_v2"),
            "cudaStreamGetCaptureInfo_v2"
        );
        assert_eq!(without_four_digit_version_suffix("cuLaunchKernel"), "cuLaunchKernel");
    }
}
