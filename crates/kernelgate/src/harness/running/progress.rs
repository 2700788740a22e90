//! Prints the progress messages of a bench executable. Progress messages go to standard error,
//! never to standard output.

use crate::record::text::clean_message_for_terminal;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use crate::display;
use crate::measure::limits::MeasuredDeviceLimits;
use crate::record::OutputVerificationExtent;
use crate::record::RunEnvironment;
use crate::record::run::{OutputVerificationRecord, VerificationAfterTiming};
use crate::workload::{BenchEffort, Tensors};
use kernelgate_cuda::observe::telemetry::GpuCardReading;

/// Prints progress messages to standard error, unless the bench is quiet.
pub struct BenchProgressPrinter {
    quiet: bool,
    case_count: usize,
    started_cases: Cell<usize>,
}

impl BenchProgressPrinter {
    /// Creates a printer of progress messages about this number of cases.
    pub fn new(quiet: bool, cases: usize) -> Self {
        Self { quiet, case_count: cases, started_cases: Cell::new(0) }
    }

    /// Prints bench name, number of cases, effort and device; on the CPU, also why no GPU is used.
    pub fn print_bench_and_device(
        &self,
        bench: &str,
        environment: &RunEnvironment,
        effort: BenchEffort,
        cases: usize,
        not_elsewhere: Option<&str>,
    ) {
        let RunEnvironment { device_name, cpu_backend_threads: threads, gpus, .. } = environment;
        let device = match gpus.is_empty() {
            true => format!("{device_name}, {threads} threads"),
            false => {
                let arch = gpus.join_distinct_values_of_gpus(|gpu| gpu.arch.clone());
                format!(
                    "{device_name}, {arch}, CUDA {}",
                    gpus.join_distinct_values_of_gpus(|gpu| gpu.latest_cuda_of_driver.clone())
                )
            }
        };
        self.print_line_unless_quiet(&format!(
            "{bench}: {}, {} effort, on {} ({device})",
            display::counted_noun(cases, "case"),
            effort.effort_name(),
            environment.device_kind
        ));
        if let Some(reason) = not_elsewhere {
            self.print_line_unless_quiet(reason);
        }
        if !environment.built_with_optimisation {
            self.print_line_unless_quiet("warning: built without optimisation; times mean nothing");
        }
    }

    /// The measured ceilings.
    pub fn print_ceilings(&self, limits: &MeasuredDeviceLimits) {
        let summary = limits.one_line_summary();
        if !summary.is_empty() {
            self.print_line_unless_quiet(&format!(
                "measured ceilings, which `of limit` refers to: {summary}"
            ));
        }
    }

    /// Prints the GPU's clock, power and temperature, and a warning if the GPU is throttled.
    pub fn print_gpu_state(&self, readings: &[GpuCardReading]) {
        let Some(reading) = readings.last() else { return };
        let clock = reading.sm_clock_mhz.map(|mhz| format!("SM clock {mhz} MHz"));
        let watts = |milliwatts: u32| f64::from(milliwatts) / 1e3;
        let power = reading.power_mw.zip(reading.power_limit_mw);
        let power =
            power.map(|(drawn, limit)| format!("{:.0} of {:.0} W", watts(drawn), watts(limit)));
        let temperature = reading.temperature_c.map(|celsius| format!("{celsius} °C"));
        let parts: Vec<String> = [clock, power, temperature].into_iter().flatten().collect();
        if !parts.is_empty() {
            self.print_line_unless_quiet(&format!("gpu: {}", parts.join(", ")));
        }
        if !reading.throttle_reasons.is_empty() {
            self.print_line_unless_quiet(&format!(
                "warning: the GPU holds its clock back: {}",
                reading.throttle_reasons.join(", ")
            ));
        }
    }

    /// Warns of each GPU on which other processes compute.
    pub fn print_warning_of_busy_gpus(&self, by_gpu: &[(usize, u32)]) {
        by_gpu
            .iter()
            .for_each(|busy| self.print_line_unless_quiet(&other_processes_warning(*busy)));
    }

    /// Prints that a problem's inputs and reference are ready, with their size and the elapsed
    /// time.
    pub fn print_inputs_and_reference_ready(&self, inputs: &Tensors, elapsed: Duration) {
        self.print_line_unless_quiet(&format!(
            "      inputs of {} and reference in {:.1} s",
            display::decimal_byte_size_text(inputs.size_in_bytes() as u64),
            elapsed.as_secs_f64()
        ));
    }

    /// Prints a workload's remark about the times of a problem.
    pub fn print_remark_about_problem(&self, problem: &str, remark: &str) {
        self.print_line_unless_quiet(&format!("note: {problem}: {remark}"));
    }

    /// A case begins.
    pub fn print_case_begins(&self, id: &str) {
        self.started_cases.set(self.started_cases.get() + 1);
        self.print_line_unless_quiet(&format!(
            "[{}/{}] {id}",
            self.started_cases.get(),
            self.case_count
        ));
    }

    /// Warns that the record contains no commit of the executable.
    pub fn warn_of_missing_commit(&self) {
        self.print_line_unless_quiet(
            "no commit is recorded: there is no git checkout, or this executable neither was \
             started by cargo nor lies where cargo built it; KERNELGATE_COMMIT=HEX states one",
        );
    }

    /// Prints how many cases are skipped, and why.
    pub fn print_skipped_cases(&self, cases: usize, why: &str) {
        self.print_line_unless_quiet(&format!("{} {why}", display::counted_noun(cases, "case")));
    }

    /// Prints the estimated minimum duration of the run.
    pub fn print_time_estimate(&self, text: &str) {
        self.print_line_unless_quiet(text);
    }

    /// Prints that a case passed verification, with the share of compared elements and the errors.
    pub fn print_verified(&self, comparison: &OutputVerificationRecord, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        let (checked, total) = (comparison.compared_elements, comparison.total_elements);
        let share = match comparison.verification_extent() {
            OutputVerificationExtent::Unverified => {
                let what = "unverified: compared with nothing, every element is finite";
                return self.print_line_unless_quiet(&format!("      {what}; {seconds:.1} s"));
            }
            OutputVerificationExtent::ComparedWithBase { .. } => {
                "with the base's outputs".to_owned()
            }
            _ if checked == total => "every element".to_owned(),
            _ => format!("{checked} of {total} elements, all finite"),
        };
        let error = if comparison.max_error == 0.0 {
            "exact".to_owned()
        } else {
            format!(
                "max error {:.1e}, relative L2 {:.1e}",
                comparison.max_error, comparison.relative_l2
            )
        };
        self.print_line_unless_quiet(&format!(
            "      verified in {seconds:.1} s: {share}; {error}"
        ));
    }

    /// Prints that the timed launch also computes correct outputs for changed inputs.
    pub fn print_changed_inputs_passed(&self, after: &VerificationAfterTiming, elapsed: Duration) {
        let (seconds, how) = (elapsed.as_secs_f64(), after.inputs.description_for_messages());
        self.print_line_unless_quiet(&format!(
            "      checked after timing in {seconds:.2} s, {how}"
        ));
    }

    /// Prints the seconds of each activity, longest first, and of all checks after timing.
    pub fn print_time_by_activity(
        &self,
        spent_s: &BTreeMap<&'static str, f64>,
        checks: Duration,
        whole: Duration,
    ) {
        let mut longest: Vec<_> = spent_s.iter().filter(|(_, seconds)| **seconds >= 0.1).collect();
        longest.sort_by(|a, b| b.1.total_cmp(a.1));
        let parts: Vec<String> =
            longest.iter().map(|(activity, seconds)| format!("{activity} {seconds:.1}")).collect();
        let (whole, checks) = (whole.as_secs_f64(), checks.as_secs_f64());
        let settling = spent_s.get("settling").copied().unwrap_or(0.0);
        let share = |seconds: f64| 100.0 * seconds / whole;
        self.print_line_unless_quiet(&format!(
            "took {whole:.1} s, of which settling {settling:.1} ({:.0} %), checks after timing \
             {checks:.1} ({:.0} %): {}",
            share(settling),
            share(checks),
            parts.join(", ")
        ));
    }

    /// Prints the path of the record and of its report page, and the baseline's name.
    pub fn print_record_and_report_paths(&self, path: &Path, page: &Path, baseline: Option<&str>) {
        self.print_line_unless_quiet(&format!("recorded in {}", path.display()));
        self.print_line_unless_quiet(&format!(
            "`kernelgate report` draws it in {}",
            page.display()
        ));
        if let Some(name) = baseline {
            self.print_line_unless_quiet(&format!("saved as baseline `{name}`"));
        }
    }

    fn print_line_unless_quiet(&self, line: &str) {
        if !self.quiet {
            eprintln!("{}", clean_message_for_terminal(line));
        }
    }
}

/// Returns the warning that `others` other processes compute on the GPU with ordinal `gpu`.
fn other_processes_warning((gpu, others): (usize, u32)) -> String {
    format!("warning: {others} other processes compute on GPU {gpu}; times will be noisy")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_warning_names_the_busy_gpu() {
        let words = "warning: 2 other processes compute on GPU 1; times will be noisy";
        assert_eq!(other_processes_warning((1, 2)), words);
    }
}
