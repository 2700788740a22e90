//! A table of the costs of launches besides the device's time, and of the errors of their outputs.

use kernelgate::display::table::TextTable;
use kernelgate::display::{byte_text, joules_text, time_text};
use kernelgate::record::{LaunchCosts, ProcessRun};

/// A row for each case, within the terminal's width if there is a terminal; "-" for unknown values.
/// Device memory is measured, or else declared by the row, which is marked.
pub fn costs_text(runs: &[ProcessRun], columns: Option<usize>) -> String {
    let mut table = TextTable::new(&[
        "case",
        "device memory",
        "commands",
        "host time",
        "energy",
        "max error",
        "relative L2",
    ]);
    let shown = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    for (id, case) in runs.iter().flat_map(|run| &run.cases) {
        let costs = case.samples.costs_with_energy();
        let LaunchCosts { measured_device_bytes, commands, host_launch_ns, launch_j, .. } = costs;
        let declared = costs.device_bytes.map(|it| format!("{} (declared)", byte_text(it)));
        table.row(vec![
            id.clone(),
            shown(measured_device_bytes.map(byte_text).or(declared)),
            shown(commands.map(|commands| commands.to_string())),
            shown(host_launch_ns.map(time_text)),
            shown(launch_j.map(joules_text)),
            format!("{:.1e}", case.verification.max_error),
            format!("{:.1e}", case.verification.relative_l2),
        ]);
    }
    table.text_within(columns)
}
