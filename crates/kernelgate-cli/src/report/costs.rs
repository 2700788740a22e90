//! What launches take besides the device's time, and how close their outputs are: a table.

use kernelgate::display::table::Table;
use kernelgate::display::{bytes, joules, time};
use kernelgate::record::{LaunchCosts, ProcessRun};

/// A row a case, within a terminal's width where there is one; "-" where something is unknown.
/// Device memory is what was measured, else what the row declares, which is marked.
pub fn text(runs: &[ProcessRun], columns: Option<usize>) -> String {
    let mut table = Table::new(&[
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
        let costs = LaunchCosts::from(case);
        let LaunchCosts { measured_device_bytes, commands, host_launch_ns, launch_j, .. } = costs;
        let declared = costs.device_bytes.map(|it| format!("{} (declared)", bytes(it)));
        table.row(vec![
            id.clone(),
            shown(measured_device_bytes.map(bytes).or(declared)),
            shown(commands.map(|commands| commands.to_string())),
            shown(host_launch_ns.map(time)),
            shown(launch_j.map(joules)),
            format!("{:.1e}", case.verification.max_error),
            format!("{:.1e}", case.verification.relative_l2),
        ]);
    }
    table.text_within(columns)
}
