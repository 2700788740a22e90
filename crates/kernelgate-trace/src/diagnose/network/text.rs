//! The phases of a network as text of at most 100 columns.

use std::fmt::Write as _;

use super::{
    AttentionOperation, AttentionOperationUse, AttentionUse, KernelUsePerPass,
    MIN_LISTED_TIME_SHARE, NetworkPhases, TrainingPhase, time_share_by_class, total_kernel_ns,
};
use crate::analyze::work::kernel_kinds::KernelClass;
use crate::diagnose::labels::readable_name;
use crate::diagnose::text::{time, wrap_line};
use crate::stats::shorten;

/// Kernels that are listed.
const MAX_PHASE_KERNELS: usize = 8;
/// Width of a kernel's name in the table.
const KERNEL_NAME_WIDTH: usize = 56;

#[allow(clippy::cast_possible_truncation)]
fn ns(value: f64) -> String {
    time(value.round() as i64)
}

fn number_text(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

impl NetworkPhases {
    pub(in crate::diagnose) fn write_network(&self, text: &mut String) {
        let _ =
            writeln!(text, "\nNetwork: times of one pass, on average over {}", self.passes_text());
        self.write_host_and_device_times(text);
        if let Some(forward) = self.use_in_phase(TrainingPhase::Forward) {
            let step = self.trains().then(|| self.step_kernels());
            largest_kernels_text(text, &forward.kernels, step.as_deref());
            other_kernels_text(text, &forward.kernels);
            write_class_shares(text, &forward.kernels, step.as_deref());
        }
        match &self.attention {
            Some(attention) => attention.write_phase(text, self.passes.max(1)),
            None => wrap_line(
                text,
                "softmax against matmul: no ranges computing_attention_scores, computing_softmax and \
                 final_matmul",
                "  ",
                "    ",
            ),
        }
    }

    fn passes_text(&self) -> String {
        let passes = self.phases.iter().map(|of| format!("{} {}", of.passes, of.phase.label()));
        let passes: Vec<String> = passes.collect();
        if passes.is_empty() { "all".to_owned() } else { passes.join(", ") }
    }

    fn write_host_and_device_times(&self, text: &mut String) {
        if self.phases.is_empty() {
            return;
        }
        let _ = writeln!(
            text,
            "  {:<12}{:>14}{:>14}{:>14}{:>14}{:>10}",
            "phase", "host range", "device", "device busy", "idle", "kernels"
        );
        for of in &self.phases {
            let kernels: f64 = of.kernels.iter().map(|kernel| kernel.launches).sum();
            let _ = writeln!(
                text,
                "  {:<12}{:>14}{:>14}{:>14}{:>14}{:>10}",
                of.phase.label(),
                of.host_ns.map_or("-".to_owned(), ns),
                ns(of.busy_ns + of.idle_ns),
                ns(of.busy_ns),
                ns(of.idle_ns),
                number_text(kernels)
            );
        }
        for of in &self.phases {
            wrap_line(
                text,
                &format!("{}: {}", of.phase.label(), of.host_time_difference()),
                "  ",
                "    ",
            );
        }
        if self.outside >= MIN_LISTED_TIME_SHARE {
            let line = format!(
                "{:.1} % of the time of all kernels is outside of these phases: before and after \
                 them, or launched by a thread without their ranges",
                100.0 * self.outside
            );
            wrap_line(text, &line, "  ", "    ");
        }
    }
}

impl super::PhaseUsePerPass {
    /// Why a timer of the host has another time than the device.
    pub fn host_time_difference(&self) -> String {
        let device_ns = self.busy_ns + self.idle_ns;
        let causes =
            self.idle.iter().filter(|(_, idle)| *idle >= MIN_LISTED_TIME_SHARE * device_ns).take(3);
        let causes: Vec<String> =
            causes.map(|(cause, idle)| format!("{} {}", cause.label(), ns(*idle))).collect();
        let idle = match causes.is_empty() {
            true => "the device is busy".to_owned(),
            false => format!("the device is idle {}: {}", ns(self.idle_ns), causes.join(", ")),
        };
        match self.host_ns {
            Some(host_ns) if host_ns < device_ns => format!(
                "the host's range is {} shorter than the device's time, because launches return \
                 early: a timer around it needs a wait at its end; {idle}",
                ns(device_ns - host_ns)
            ),
            Some(host_ns) => format!(
                "the host's range is {} longer than the device's time: the host prepares launches \
                 and waits; {idle}",
                ns(host_ns - device_ns)
            ),
            None => idle,
        }
    }
}

fn largest_kernels_text(
    text: &mut String,
    forward: &[KernelUsePerPass],
    step: Option<&[KernelUsePerPass]>,
) {
    let line = |kernels: &[KernelUsePerPass]| {
        let first = kernels.first()?;
        Some(format!(
            "{}: {} launches, {}, {:.1} % of the kernels' time",
            shorten(&readable_name(&first.name), 60),
            number_text(first.launches),
            ns(first.kernel_ns),
            100.0 * first.kernel_ns / total_kernel_ns(kernels).max(1.0)
        ))
    };
    let Some(of_forward) = line(forward) else { return };
    wrap_line(text, &format!("largest kernel of the forward pass: {of_forward}"), "  ", "    ");
    if let Some(step) = step
        && let Some(of_step) = line(step)
    {
        let same = forward.first().map(|of| &of.name) == step.first().map(|of| &of.name);
        let same = if same { "the same" } else { "another" };
        wrap_line(text, &format!("of the training step, {same}: {of_step}"), "  ", "    ");
    }
}

fn other_kernels_text(text: &mut String, forward: &[KernelUsePerPass]) {
    let all = total_kernel_ns(forward).max(1.0);
    let matters = |of: &&KernelUsePerPass| of.kernel_ns >= MIN_LISTED_TIME_SHARE * all;
    let other = |of: &&KernelUsePerPass| of.class != KernelClass::Matmul;
    let listed: Vec<_> =
        forward.iter().filter(other).filter(matters).take(MAX_PHASE_KERNELS).collect();
    if listed.is_empty() {
        return;
    }
    let _ = writeln!(text, "  other kernels of the forward pass, from 1 % on");
    for of in listed {
        let _ = writeln!(
            text,
            "    {:<57}{:<15}{:>5}{:>11}{:>6.1} %",
            shorten(&readable_name(&of.name), KERNEL_NAME_WIDTH),
            of.class.label(),
            number_text(of.launches),
            ns(of.kernel_ns),
            100.0 * of.kernel_ns / all
        );
    }
}

fn write_class_shares(
    text: &mut String,
    forward: &[KernelUsePerPass],
    step: Option<&[KernelUsePerPass]>,
) {
    let [inference, training] = [Some(forward), step].map(|of| of.map(time_share_by_class));
    let inference = inference.unwrap_or_default();
    let heading = if training.is_some() { "   training step" } else { "" };
    let _ = writeln!(text, "  {:<20}{:>12}{heading}", "kind of kernel", "inference");
    let mut classes: Vec<KernelClass> =
        training.iter().flatten().chain(&inference).map(|(class, _)| *class).collect();
    let mut seen = std::collections::BTreeSet::new();
    classes.retain(|class| seen.insert(*class));
    let share = |of: &[(KernelClass, f64)], class: KernelClass| {
        let found = of.iter().find(|(known, _)| *known == class);
        format!("{:.1} %", found.map_or(0.0, |(_, share)| 100.0 * share))
    };
    for class in classes {
        let training =
            training.as_ref().map_or(String::new(), |of| format!("{:>16}", share(of, class)));
        let label = class.label();
        let _ = writeln!(text, "  {label:<20}{:>12}{training}", share(&inference, class));
    }
}

impl AttentionUse {
    #[allow(clippy::cast_precision_loss)]
    fn write_phase(&self, text: &mut String, passes: usize) {
        let _ = writeln!(
            text,
            "  {:<20}{:>12}{:>16}{:>14}{:>12}",
            "attention", "kernels", "time", "GFLOP", "TFLOP/s"
        );
        for operation in
            [AttentionOperation::Scores, AttentionOperation::Softmax, AttentionOperation::Values]
        {
            let AttentionOperationUse { kernels, kernel_ns, flops } =
                *self.use_of_operation(operation);
            let scaled =
                |scale: f64| flops.map_or("-".to_owned(), |flops| format!("{:.2}", flops * scale));
            let _ = writeln!(
                text,
                "  {:<20}{:>12}{:>16}{:>14}{:>12}",
                operation.label(),
                number_text(kernels as f64 / passes as f64),
                ns(kernel_ns as f64 / passes as f64),
                scaled(1e-9 / passes as f64),
                scaled(1e-3 / kernel_ns.max(1) as f64)
            );
        }
        if let Some(sentence) = self.attention_sentence() {
            wrap_line(text, &sentence, "  ", "    ");
        }
    }

    /// Sentence that compares softmax with the two matrix products.
    pub fn attention_sentence(&self) -> Option<String> {
        let time = self.softmax_over_products_time()?;
        let flops = self.matmul_over_softmax_flops().map_or(String::new(), |ratio| {
            format!(
                ", with {ratio:.1} times fewer FLOPs ({:.1} times fewer than each)",
                ratio / 2.0
            )
        });
        Some(format!("softmax takes {time:.2} times as long as both products{flops}"))
    }
}
