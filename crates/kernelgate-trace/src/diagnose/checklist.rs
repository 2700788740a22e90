//! Fills in the checklist of the attention guide: a rule ticks or crosses each line, or the line
//! states what would measure it.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::finding::{DiagnosisQuestion, QuestionAnswer, TraceDiagnosis};
use super::text::wrap_line;

/// Whether a line of the checklist holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChecklistMark {
    /// The line holds: the rules that could contradict it found nothing.
    Holds,
    /// A rule found a problem, so the checklist line is not fulfilled.
    Fails,
    /// The trace lacks the data for this line.
    NotMeasured,
}

impl ChecklistMark {
    /// Label in printed output.
    pub fn label(self) -> &'static str {
        match self {
            Self::Holds => "holds",
            Self::Fails => "fails",
            Self::NotMeasured => "not measured",
        }
    }

    fn checkbox(self) -> &'static str {
        match self {
            Self::Holds => "[x]",
            Self::Fails => "[!]",
            Self::NotMeasured => "[ ]",
        }
    }
}

/// A line of the checklist, filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChecklistLine {
    /// Heading above the line.
    pub group: &'static str,
    /// The condition.
    pub text: &'static str,
    /// Whether the condition holds.
    pub tick: ChecklistMark,
    /// The finding that decides the line, or the command that measures it.
    pub why: String,
}

/// The rule or number that decides a line.
enum By {
    /// Any of these rules.
    Rules(&'static [&'static str]),
    /// All these rules decide the checklist line, except rules that had nothing to inspect.
    All(&'static [&'static str]),
    /// No trace can decide the line; the text names what can.
    Other(&'static str),
}

/// Checklist lines: heading, text, and the rules that decide the line.
const CHECKLIST_LINES: &[(&str, &str, By)] = &[
    ("Memory", "Memory accesses are coalesced", By::Rules(&["coalescing"])),
    (
        "Memory",
        "Using shared memory for frequently accessed data",
        By::Other("kernelgate resources: column shared, and the class load_shared of the mix"),
    ),
    ("Memory", "No bank conflicts in shared memory", By::Rules(&["bank-conflicts"])),
    (
        "Memory",
        "Memory transactions are efficient",
        By::All(&["coalescing", "page-migration", "pageable-copy", "synchronous-copy"]),
    ),
    ("Compute", "Good occupancy (50-75%)", By::Rules(&["occupancy", "achieved-occupancy"])),
    (
        "Compute",
        "Using warp-level primitives where possible",
        By::Other("kernelgate resources --format json: the class warp of the mix"),
    ),
    ("Compute", "Minimal branch divergence", By::Rules(&["divergence"])),
    (
        "Compute",
        "Unrolled critical loops",
        By::Other("kernelgate resources: instructions and the class control of the mix"),
    ),
    ("Algorithm", "Kernel fusion applied where beneficial", By::Rules(&["fusion"])),
    ("Algorithm", "Optimal work distribution", By::All(&["small-grid", "tail"])),
    ("Algorithm", "Minimal synchronization points", By::Rules(&["sync-in-loop"])),
    ("Algorithm", "Data reuse maximized", By::Other("cargo bench: the column `of limit`")),
    ("Launch", "Block size is multiple of warp size", By::Rules(&["block-size"])),
    ("Launch", "Grid size saturates GPU", By::Rules(&["small-grid"])),
    ("Launch", "Register/SMEM usage balanced", By::Rules(&["occupancy"])),
    (
        "Launch",
        "Correct compile flags enabled",
        By::Other("kernelgate resources names the compiler; a trace does not hold its flags"),
    ),
];

/// Fills in the checklist from a diagnosis.
pub fn checklist(diagnosis: &TraceDiagnosis) -> Vec<ChecklistLine> {
    CHECKLIST_LINES
        .iter()
        .map(|(group, text, by)| {
            let (tick, why) = match by {
                By::Other(what) => (ChecklistMark::NotMeasured, (*what).to_owned()),
                By::Rules(rules) => decide_checklist_line(diagnosis, rules, false),
                By::All(rules) => decide_checklist_line(diagnosis, rules, true),
            };
            ChecklistLine { group, text, tick, why }
        })
        .collect()
}

/// A finding of a deciding rule fails the line. A line holds if a deciding rule inspected enough
/// and found nothing, or, if several rules must all decide it, no other rule lacks data.
fn decide_checklist_line(
    diagnosis: &TraceDiagnosis,
    rules: &[&str],
    all: bool,
) -> (ChecklistMark, String) {
    let found: Vec<&str> = diagnosis
        .findings
        .iter()
        .filter(|finding| rules.contains(&finding.id))
        .map(|finding| finding.title.as_str())
        .collect();
    if let Some(first) = found.first() {
        let more =
            if found.len() > 1 { format!("; {} more", found.len() - 1) } else { String::new() };
        return (ChecklistMark::Fails, format!("{first}{more}"));
    }
    let questions = || rules.iter().filter_map(|rule| diagnosis.question(rule));
    let passed = questions().filter_map(|question| match &question.answer {
        QuestionAnswer::No { inspected } => Some(format!("{} in {inspected}", question.id)),
        _ => None,
    });
    let passed: Vec<String> = passed.collect();
    let found_nothing = format!("nothing found by {}", passed.join(", "));
    let lacks = questions().find(|question| {
        matches!(&question.answer, QuestionAnswer::CannotAnswer { record, .. } if !record.is_empty())
    });
    let lacking = lacks.and_then(|of| Some((of.id, of.missing_data_reason()?)));
    match lacking {
        Some((id, why)) if all && !passed.is_empty() => {
            (ChecklistMark::NotMeasured, format!("{found_nothing}; not measured: {id}: {why}"))
        }
        _ if !passed.is_empty() => (ChecklistMark::Holds, found_nothing),
        Some((_, why)) => (ChecklistMark::NotMeasured, why),
        None => {
            let why = questions().find_map(DiagnosisQuestion::missing_data_reason);
            (ChecklistMark::NotMeasured, why.unwrap_or_else(|| "no rule decides it".to_owned()))
        }
    }
}

/// The checklist as text of at most 100 columns.
pub fn to_text(lines: &[ChecklistLine]) -> String {
    let mut text = String::from("Checklist ([x] holds, [!] fails, [ ] not measured)\n");
    for same in lines.chunk_by(|a, b| a.group == b.group) {
        let _ = writeln!(text, "  {}", same[0].group);
        for line in same {
            wrap_line(
                &mut text,
                &format!("{} {}", line.tick.checkbox(), line.text),
                "    ",
                "        ",
            );
            wrap_line(&mut text, &line.why, "        ", "        ");
        }
    }
    text
}

pub fn to_json(lines: &[ChecklistLine]) -> Value {
    let line = |line: &ChecklistLine| {
        json!({
            "group": line.group,
            "text": line.text,
            "state": line.tick.label(),
            "why": line.why,
        })
    };
    lines.iter().map(line).collect()
}
