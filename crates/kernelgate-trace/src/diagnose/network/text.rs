//! Formats the phases of a network as text of at most 100 columns.

use std::fmt::Write as _;

use super::{
    AttentionKernels, AttentionOperation, KernelsOfAttentionOperation, MIN_TIME_SHARE_TO_LIST,
    MeanKernelUsePerPass, PhasesOfNetwork, TrainingPhase, kernel_time_share_by_work_class,
    total_kernel_ns_per_pass,
};
use crate::analyze::work::kernel_kinds::KernelWorkClass;
use crate::diagnose::labels::shortened_kernel_name_for_readers;
use crate::diagnose::text::{append_wrapped_line, format_nanoseconds};
use crate::stats::shorten_in_the_middle;

/// Largest number of kernels that the report lists for a phase.
const MAX_LISTED_KERNELS_OF_PHASE: usize = 8;
/// Number of columns that a kernel's name has in the table.
const KERNEL_NAME_COLUMN_WIDTH: usize = 56;

#[allow(clippy::cast_possible_truncation)]
fn nanoseconds_text(value: f64) -> String {
    format_nanoseconds(value.round() as i64)
}

fn text_with_at_most_one_decimal(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

impl PhasesOfNetwork {
    pub(in crate::diagnose) fn write_network_section(&self, text: &mut String) {
        let _ = writeln!(
            text,
            "\nNetwork: times of one pass, on average over {}",
            self.passes_of_each_phase_text()
        );
        self.write_host_and_gpu_times_of_phases(text);
        if let Some(forward) = self.times_of_phase(TrainingPhase::Forward) {
            let step = self.has_backward_phase().then(|| self.kernels_of_training_step());
            write_kernel_with_most_time(text, &forward.kernels, step.as_deref());
            write_kernels_other_than_matmul(text, &forward.kernels);
            write_time_shares_of_work_classes(text, &forward.kernels, step.as_deref());
        }
        match &self.attention {
            Some(attention) => attention.write_attention_table(text, self.forward_passes.max(1)),
            None => append_wrapped_line(
                text,
                "softmax against matmul: no ranges computing_attention_scores, computing_softmax and \
                 final_matmul",
                "  ",
                "    ",
            ),
        }
    }

    fn passes_of_each_phase_text(&self) -> String {
        let passes = self
            .phases
            .iter()
            .map(|of| format!("{} {}", of.passes, of.phase.printed_phase_label()));
        let passes: Vec<String> = passes.collect();
        if passes.is_empty() { "all".to_owned() } else { passes.join(", ") }
    }

    fn write_host_and_gpu_times_of_phases(&self, text: &mut String) {
        if self.phases.is_empty() {
            return;
        }
        let _ = writeln!(
            text,
            "  {:<12}{:>14}{:>14}{:>14}{:>14}{:>10}",
            "phase", "host range", "device", "device busy", "idle", "kernels"
        );
        for of in &self.phases {
            let kernels: f64 = of.kernels.iter().map(|kernel| kernel.launches_per_pass).sum();
            let _ = writeln!(
                text,
                "  {:<12}{:>14}{:>14}{:>14}{:>14}{:>10}",
                of.phase.printed_phase_label(),
                of.host_ns_per_pass.map_or("-".to_owned(), nanoseconds_text),
                nanoseconds_text(of.busy_ns_per_pass + of.idle_ns_per_pass),
                nanoseconds_text(of.busy_ns_per_pass),
                nanoseconds_text(of.idle_ns_per_pass),
                text_with_at_most_one_decimal(kernels)
            );
        }
        for of in &self.phases {
            append_wrapped_line(
                text,
                &format!(
                    "{}: {}",
                    of.phase.printed_phase_label(),
                    of.explain_host_against_gpu_time()
                ),
                "  ",
                "    ",
            );
        }
        if self.kernel_time_share_outside_phases >= MIN_TIME_SHARE_TO_LIST {
            let line = format!(
                "{:.1} % of the time of all kernels is outside of these phases: before and after \
                 them, or launched by a thread without their ranges",
                100.0 * self.kernel_time_share_outside_phases
            );
            append_wrapped_line(text, &line, "  ", "    ");
        }
    }
}

impl super::MeanPhaseTimesPerPass {
    /// Explains why the range of a phase on the host lasts longer or shorter than its time on the
    /// GPU.
    pub fn explain_host_against_gpu_time(&self) -> String {
        let device_ns = self.busy_ns_per_pass + self.idle_ns_per_pass;
        let causes = self
            .idle_ns_by_cause
            .iter()
            .filter(|(_, idle)| *idle >= MIN_TIME_SHARE_TO_LIST * device_ns)
            .take(3);
        let causes: Vec<String> = causes
            .map(|(cause, idle)| {
                format!("{} {}", cause.printed_idle_cause(), nanoseconds_text(*idle))
            })
            .collect();
        let idle = match causes.is_empty() {
            true => "the device is busy".to_owned(),
            false => format!(
                "the device is idle {}: {}",
                nanoseconds_text(self.idle_ns_per_pass),
                causes.join(", ")
            ),
        };
        match self.host_ns_per_pass {
            Some(host_ns) if host_ns < device_ns => format!(
                "the host's range is {} shorter than the device's time, because launches return \
                 early: a timer around it needs a wait at its end; {idle}",
                nanoseconds_text(device_ns - host_ns)
            ),
            Some(host_ns) => format!(
                "the host's range is {} longer than the device's time: the host prepares launches \
                 and waits; {idle}",
                nanoseconds_text(host_ns - device_ns)
            ),
            None => idle,
        }
    }
}

fn write_kernel_with_most_time(
    text: &mut String,
    forward: &[MeanKernelUsePerPass],
    step: Option<&[MeanKernelUsePerPass]>,
) {
    let line = |kernels: &[MeanKernelUsePerPass]| {
        let first = kernels.first()?;
        Some(format!(
            "{}: {} launches, {}, {:.1} % of the kernels' time",
            shorten_in_the_middle(&shortened_kernel_name_for_readers(&first.kernel_name), 60),
            text_with_at_most_one_decimal(first.launches_per_pass),
            nanoseconds_text(first.kernel_ns_per_pass),
            100.0 * first.kernel_ns_per_pass / total_kernel_ns_per_pass(kernels).max(1.0)
        ))
    };
    let Some(of_forward) = line(forward) else { return };
    append_wrapped_line(
        text,
        &format!("largest kernel of the forward pass: {of_forward}"),
        "  ",
        "    ",
    );
    if let Some(step) = step
        && let Some(of_step) = line(step)
    {
        let same =
            forward.first().map(|of| &of.kernel_name) == step.first().map(|of| &of.kernel_name);
        let same = if same { "the same" } else { "another" };
        append_wrapped_line(
            text,
            &format!("of the training step, {same}: {of_step}"),
            "  ",
            "    ",
        );
    }
}

fn write_kernels_other_than_matmul(text: &mut String, forward: &[MeanKernelUsePerPass]) {
    let all = total_kernel_ns_per_pass(forward).max(1.0);
    let matters =
        |of: &&MeanKernelUsePerPass| of.kernel_ns_per_pass >= MIN_TIME_SHARE_TO_LIST * all;
    let other = |of: &&MeanKernelUsePerPass| of.class != KernelWorkClass::Matmul;
    let listed: Vec<_> =
        forward.iter().filter(other).filter(matters).take(MAX_LISTED_KERNELS_OF_PHASE).collect();
    if listed.is_empty() {
        return;
    }
    let _ = writeln!(text, "  other kernels of the forward pass, from 1 % on");
    for of in listed {
        let _ = writeln!(
            text,
            "    {:<57}{:<15}{:>5}{:>11}{:>6.1} %",
            shorten_in_the_middle(
                &shortened_kernel_name_for_readers(&of.kernel_name),
                KERNEL_NAME_COLUMN_WIDTH
            ),
            of.class.printed_work_class_label(),
            text_with_at_most_one_decimal(of.launches_per_pass),
            nanoseconds_text(of.kernel_ns_per_pass),
            100.0 * of.kernel_ns_per_pass / all
        );
    }
}

fn write_time_shares_of_work_classes(
    text: &mut String,
    forward: &[MeanKernelUsePerPass],
    step: Option<&[MeanKernelUsePerPass]>,
) {
    let [inference, training] =
        [Some(forward), step].map(|of| of.map(kernel_time_share_by_work_class));
    let inference = inference.unwrap_or_default();
    let heading = if training.is_some() { "   training step" } else { "" };
    let _ = writeln!(text, "  {:<20}{:>12}{heading}", "kind of kernel", "inference");
    let mut classes: Vec<KernelWorkClass> =
        training.iter().flatten().chain(&inference).map(|(class, _)| *class).collect();
    let mut seen = std::collections::BTreeSet::new();
    classes.retain(|class| seen.insert(*class));
    let share = |of: &[(KernelWorkClass, f64)], class: KernelWorkClass| {
        let found = of.iter().find(|(known, _)| *known == class);
        format!("{:.1} %", found.map_or(0.0, |(_, share)| 100.0 * share))
    };
    for class in classes {
        let training =
            training.as_ref().map_or(String::new(), |of| format!("{:>16}", share(of, class)));
        let label = class.printed_work_class_label();
        let _ = writeln!(text, "  {label:<20}{:>12}{training}", share(&inference, class));
    }
}

impl AttentionKernels {
    #[allow(clippy::cast_precision_loss)]
    fn write_attention_table(&self, text: &mut String, passes: usize) {
        let _ = writeln!(
            text,
            "  {:<20}{:>12}{:>16}{:>14}{:>12}",
            "attention", "kernels", "time", "GFLOP", "TFLOP/s"
        );
        for operation in [
            AttentionOperation::ScoresMatmul,
            AttentionOperation::Softmax,
            AttentionOperation::ValuesMatmul,
        ] {
            let KernelsOfAttentionOperation { kernels, total_kernel_ns: kernel_ns, flops } =
                *self.kernels_of_attention_operation(operation);
            let scaled =
                |scale: f64| flops.map_or("-".to_owned(), |flops| format!("{:.2}", flops * scale));
            let _ = writeln!(
                text,
                "  {:<20}{:>12}{:>16}{:>14}{:>12}",
                operation.printed_attention_operation(),
                text_with_at_most_one_decimal(kernels as f64 / passes as f64),
                nanoseconds_text(kernel_ns as f64 / passes as f64),
                scaled(1e-9 / passes as f64),
                scaled(1e-3 / kernel_ns.max(1) as f64)
            );
        }
        if let Some(sentence) = self.softmax_versus_matmul_sentence() {
            append_wrapped_line(text, &sentence, "  ", "    ");
        }
    }

    /// Returns a sentence that compares time and FLOPs of softmax with those of attention's two
    /// matrix products.
    pub fn softmax_versus_matmul_sentence(&self) -> Option<String> {
        let time = self.softmax_to_matmul_time_ratio()?;
        let flops = self.matmul_to_softmax_flops_ratio().map_or(String::new(), |ratio| {
            format!(
                ", with {ratio:.1} times fewer FLOPs ({:.1} times fewer than each)",
                ratio / 2.0
            )
        });
        Some(format!("softmax takes {time:.2} times as long as both products{flops}"))
    }
}
