//! Prints the progress messages of a bench binary. All progress lines go to standard error, none to
//! standard output.

use crate::record::text::printable_on_terminal;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use crate::display;
use crate::measure::limits::DeviceLimits;
use crate::record::Environment;
use crate::record::VerificationExtent;
use crate::record::run::{AfterTiming, VerificationRecord};
use crate::workload::{Effort, Tensors};
use kernelgate_cuda::observe::telemetry::CardReading;

/// Prints progress messages, unless the bench is quiet.
pub struct BenchProgress {
    quiet: bool,
    cases: usize,
    started: Cell<usize>,
}

impl BenchProgress {
    /// Reports progress over this number of cases.
    pub fn new(quiet: bool, cases: usize) -> Self {
        Self { quiet, cases, started: Cell::new(0) }
    }

    /// Prints the process, its work and its device; on the CPU also the reason why it is not the
    /// GPU.
    pub fn print_start(
        &self,
        bench: &str,
        environment: &Environment,
        effort: Effort,
        cases: usize,
        not_elsewhere: Option<&str>,
    ) {
        let Environment { device_name, threads, gpus, .. } = environment;
        let device = match gpus.is_empty() {
            true => format!("{device_name}, {threads} threads"),
            false => {
                let arch = gpus.values(|gpu| gpu.arch.clone());
                format!(
                    "{device_name}, {arch}, CUDA {}",
                    gpus.values(|gpu| gpu.driver_cuda.clone())
                )
            }
        };
        self.say(&format!(
            "{bench}: {}, {} effort, on {} ({device})",
            display::counted_noun(cases, "case"),
            effort.name(),
            environment.device_kind
        ));
        if let Some(reason) = not_elsewhere {
            self.say(reason);
        }
        if !environment.optimised {
            self.say("warning: built without optimisation; times mean nothing");
        }
    }

    /// The measured ceilings.
    pub fn print_ceilings(&self, limits: &DeviceLimits) {
        let summary = limits.summary();
        if !summary.is_empty() {
            self.say(&format!("measured ceilings, which `of limit` refers to: {summary}"));
        }
    }

    /// Prints the GPU's clock, power and temperature, and a warning if something disturbs
    /// measurements.
    pub fn report_gpu_state(&self, readings: &[CardReading]) {
        let Some(reading) = readings.last() else { return };
        let clock = reading.sm_clock_mhz.map(|mhz| format!("SM clock {mhz} MHz"));
        let watts = |milliwatts: u32| f64::from(milliwatts) / 1e3;
        let power = reading.power_mw.zip(reading.power_limit_mw);
        let power =
            power.map(|(drawn, limit)| format!("{:.0} of {:.0} W", watts(drawn), watts(limit)));
        let temperature = reading.temperature_c.map(|celsius| format!("{celsius} °C"));
        let parts: Vec<String> = [clock, power, temperature].into_iter().flatten().collect();
        if !parts.is_empty() {
            self.say(&format!("gpu: {}", parts.join(", ")));
        }
        if !reading.throttle.is_empty() {
            self.say(&format!(
                "warning: the GPU holds its clock back: {}",
                reading.throttle.join(", ")
            ));
        }
    }

    /// A warning for each GPU on which other processes compute.
    pub fn warn_of_other_processes(&self, by_gpu: &[(usize, u32)]) {
        by_gpu.iter().for_each(|busy| self.say(&other_processes_warning(*busy)));
    }

    /// Prints that the inputs and the reference of a problem are ready.
    pub fn print_prepared(&self, inputs: &Tensors, elapsed: Duration) {
        self.say(&format!(
            "      inputs of {} and reference in {:.1} s",
            display::byte_text(inputs.bytes() as u64),
            elapsed.as_secs_f64()
        ));
    }

    /// Prints a remark about the times of a problem.
    pub fn remark(&self, problem: &str, remark: &str) {
        self.say(&format!("note: {problem}: {remark}"));
    }

    /// A case begins.
    pub fn print_case(&self, id: &str) {
        self.started.set(self.started.get() + 1);
        self.say(&format!("[{}/{}] {id}", self.started.get(), self.cases));
    }

    /// Warns that no commit is recorded for the executable.
    pub fn warn_of_missing_commit(&self) {
        self.say(
            "no commit is recorded: there is no git checkout, or this executable neither was \
             started by cargo nor lies where cargo built it; KERNELGATE_COMMIT=HEX states one",
        );
    }

    /// Prints how many cases do not run, and why.
    pub fn report_skipped(&self, cases: usize, why: &str) {
        self.say(&format!("{} {why}", display::counted_noun(cases, "case")));
    }

    /// Prints the estimate of the time that the run takes at least.
    pub fn print_time_estimate(&self, text: &str) {
        self.say(text);
    }

    /// Prints that a case passed verification.
    pub fn print_verified(&self, comparison: &VerificationRecord, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64();
        let (checked, total) = (comparison.checked, comparison.total);
        let share = match comparison.value() {
            VerificationExtent::Unverified => {
                let what = "unverified: compared with nothing, every element is finite";
                return self.say(&format!("      {what}; {seconds:.1} s"));
            }
            VerificationExtent::ComparedWithBase { .. } => "with the base's outputs".to_owned(),
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
        self.say(&format!("      verified in {seconds:.1} s: {share}; {error}"));
    }

    /// Prints that the timed launch computes correct outputs from changed inputs too.
    pub fn print_changed_inputs_passed(&self, after: &AfterTiming, elapsed: Duration) {
        let (seconds, how) = (elapsed.as_secs_f64(), after.inputs.words());
        self.say(&format!("      checked after timing in {seconds:.2} s, {how}"));
    }

    /// Prints the seconds that each activity took, longest first, including the checks after
    /// timing.
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
        self.say(&format!(
            "took {whole:.1} s, of which settling {settling:.1} ({:.0} %), checks after timing \
             {checks:.1} ({:.0} %): {}",
            share(settling),
            share(checks),
            parts.join(", ")
        ));
    }

    /// Prints the path of the results and of their page.
    pub fn print_end(&self, path: &Path, page: &Path, baseline: Option<&str>) {
        self.say(&format!("recorded in {}", path.display()));
        self.say(&format!("`kernelgate report` draws it in {}", page.display()));
        if let Some(name) = baseline {
            self.say(&format!("saved as baseline `{name}`"));
        }
    }

    fn say(&self, line: &str) {
        if !self.quiet {
            eprintln!("{}", printable_on_terminal(line));
        }
    }
}

/// Returns the warning that `others` other processes compute on GPU number `gpu`.
fn other_processes_warning((gpu, others): (usize, u32)) -> String {
    format!("warning: {others} other processes compute on GPU {gpu}; times will be noisy")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_warning_names_which_gpu_of_a_set_is_busy() {
        let words = "warning: 2 other processes compute on GPU 1; times will be noisy";
        assert_eq!(other_processes_warning((1, 2)), words);
    }
}
