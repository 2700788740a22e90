//! A table of each case's costs besides its time on the GPU (memory, commands, host time, energy)
//! and of the errors of its output.

use kernelgate::display::table::AlignedTextTable;
use kernelgate::display::{decimal_byte_size_text, energy_text, time_text};
use kernelgate::record::{BenchProcessRun, LaunchCostsBesidesDeviceTime};

/// A table of launch costs with a row for each case, as wide as the terminal if there is one; "-"
/// stands for unknown values. The device memory of a launch is measured, or else the number that
/// its bench declares, which the table marks as declared.
pub fn launch_costs_table_text(runs: &[BenchProcessRun], columns: Option<usize>) -> String {
    let mut table = AlignedTextTable::new(&[
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
        let costs = case.samples.launch_costs_with_energy();
        let LaunchCostsBesidesDeviceTime {
            measured_device_bytes,
            gpu_commands: commands,
            host_launch_ns,
            launch_energy_j: launch_j,
            ..
        } = costs;
        let declared = costs
            .declared_device_bytes
            .map(|it| format!("{} (declared)", decimal_byte_size_text(it)));
        table.add_row(vec![
            id.clone(),
            shown(measured_device_bytes.map(decimal_byte_size_text).or(declared)),
            shown(commands.map(|commands| commands.to_string())),
            shown(host_launch_ns.map(time_text)),
            shown(launch_j.map(energy_text)),
            format!("{:.1e}", case.verification.max_error),
            format!("{:.1e}", case.verification.relative_l2),
        ]);
    }
    table.aligned_text_for_terminal(columns)
}
