//! Fills in the checklist of the attention guide: diagnosis rules mark each line as holding or
//! failing, or the line names what would measure it.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::finding::{QuestionWithAnswer, RuleAnswer, TraceDiagnosis};
use super::text::append_wrapped_line;

/// State of a line of the checklist: holds, fails or not measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChecklistLineState {
    /// The condition of the line holds: the rules that could contradict it found nothing.
    Holds,
    /// The condition of the line does not hold: a rule found a problem.
    ConditionFails,
    /// The trace lacks the data that would decide this line.
    NotMeasured,
}

impl ChecklistLineState {
    /// Returns the label of this value in printed output.
    pub fn printed_state_label(self) -> &'static str {
        match self {
            Self::Holds => "holds",
            Self::ConditionFails => "fails",
            Self::NotMeasured => "not measured",
        }
    }

    fn checkbox_of_state(self) -> &'static str {
        match self {
            Self::Holds => "[x]",
            Self::ConditionFails => "[!]",
            Self::NotMeasured => "[ ]",
        }
    }
}

/// A line of the attention guide's checklist, with its state for one trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilledChecklistLine {
    /// Heading above the line.
    pub section_heading: &'static str,
    /// The condition.
    pub condition: &'static str,
    /// Whether the condition holds.
    pub line_state: ChecklistLineState,
    /// The finding that decides the line, or the command that would measure it.
    pub deciding_text: String,
}

/// The diagnosis rules that decide a line of the checklist, or the tool that can.
enum ChecklistLineBasis {
    /// Any of these rules.
    Rules(&'static [&'static str]),
    /// All these rules must find nothing, except rules that had nothing to inspect.
    All(&'static [&'static str]),
    /// No rule on a trace can decide the line; the text names a tool that can.
    Other(&'static str),
}

/// The checklist's lines: heading, condition, and what decides the line.
const CHECKLIST_LINES_AND_DECIDING_RULES: &[(&str, &str, ChecklistLineBasis)] = &[
    ("Memory", "Memory accesses are coalesced", ChecklistLineBasis::Rules(&["coalescing"])),
    (
        "Memory",
        "Using shared memory for frequently accessed data",
        ChecklistLineBasis::Other(
            "kernelgate resources: column shared, and the class load_shared of the mix",
        ),
    ),
    (
        "Memory",
        "No bank conflicts in shared memory",
        ChecklistLineBasis::Rules(&["bank-conflicts"]),
    ),
    (
        "Memory",
        "Memory transactions are efficient",
        ChecklistLineBasis::All(&[
            "coalescing",
            "page-migration",
            "pageable-copy",
            "synchronous-copy",
        ]),
    ),
    (
        "Compute",
        "Good occupancy (50-75%)",
        ChecklistLineBasis::Rules(&["occupancy", "achieved-occupancy"]),
    ),
    (
        "Compute",
        "Using warp-level primitives where possible",
        ChecklistLineBasis::Other("kernelgate resources --format json: the class warp of the mix"),
    ),
    ("Compute", "Minimal branch divergence", ChecklistLineBasis::Rules(&["divergence"])),
    (
        "Compute",
        "Unrolled critical loops",
        ChecklistLineBasis::Other(
            "kernelgate resources: instructions and the class control of the mix",
        ),
    ),
    ("Algorithm", "Kernel fusion applied where beneficial", ChecklistLineBasis::Rules(&["fusion"])),
    ("Algorithm", "Optimal work distribution", ChecklistLineBasis::All(&["small-grid", "tail"])),
    ("Algorithm", "Minimal synchronization points", ChecklistLineBasis::Rules(&["sync-in-loop"])),
    (
        "Algorithm",
        "Data reuse maximized",
        ChecklistLineBasis::Other("cargo bench: the column `of limit`"),
    ),
    ("Launch", "Block size is multiple of warp size", ChecklistLineBasis::Rules(&["block-size"])),
    ("Launch", "Grid size saturates GPU", ChecklistLineBasis::Rules(&["small-grid"])),
    ("Launch", "Register/SMEM usage balanced", ChecklistLineBasis::Rules(&["occupancy"])),
    (
        "Launch",
        "Correct compile flags enabled",
        ChecklistLineBasis::Other(
            "kernelgate resources names the compiler; a trace does not hold its flags",
        ),
    ),
];

/// Fills in the checklist from the findings and unanswered questions of a diagnosis.
pub fn fill_in_checklist(diagnosis: &TraceDiagnosis) -> Vec<FilledChecklistLine> {
    CHECKLIST_LINES_AND_DECIDING_RULES
        .iter()
        .map(|(group, text, by)| {
            let (tick, why) = match by {
                ChecklistLineBasis::Other(what) => {
                    (ChecklistLineState::NotMeasured, (*what).to_owned())
                }
                ChecklistLineBasis::Rules(rules) => {
                    decide_state_of_checklist_line(diagnosis, rules, false)
                }
                ChecklistLineBasis::All(rules) => {
                    decide_state_of_checklist_line(diagnosis, rules, true)
                }
            };
            FilledChecklistLine {
                section_heading: group,
                condition: text,
                line_state: tick,
                deciding_text: why,
            }
        })
        .collect()
}

/// A line fails if one of its deciding rules has a finding. A line holds if a deciding rule
/// inspected enough and found nothing, and, where all rules must decide, no rule lacks data.
fn decide_state_of_checklist_line(
    diagnosis: &TraceDiagnosis,
    rules: &[&str],
    all: bool,
) -> (ChecklistLineState, String) {
    let found: Vec<&str> = diagnosis
        .findings
        .iter()
        .filter(|finding| rules.contains(&finding.id))
        .map(|finding| finding.finding_title.as_str())
        .collect();
    if let Some(first) = found.first() {
        let more =
            if found.len() > 1 { format!("; {} more", found.len() - 1) } else { String::new() };
        return (ChecklistLineState::ConditionFails, format!("{first}{more}"));
    }
    let questions = || rules.iter().filter_map(|rule| diagnosis.question_of_rule(rule));
    let passed = questions().filter_map(|question| match &question.answer {
        RuleAnswer::No { inspected } => Some(format!("{} in {inspected}", question.id)),
        _ => None,
    });
    let passed: Vec<String> = passed.collect();
    let found_nothing = format!("nothing found by {}", passed.join(", "));
    let lacks = questions().find(|question| {
        matches!(&question.answer, RuleAnswer::CannotAnswer { record, .. } if !record.is_empty())
    });
    let lacking = lacks.and_then(|of| Some((of.id, of.reason_without_answer()?)));
    match lacking {
        Some((id, why)) if all && !passed.is_empty() => {
            (ChecklistLineState::NotMeasured, format!("{found_nothing}; not measured: {id}: {why}"))
        }
        _ if !passed.is_empty() => (ChecklistLineState::Holds, found_nothing),
        Some((_, why)) => (ChecklistLineState::NotMeasured, why),
        None => {
            let why = questions().find_map(QuestionWithAnswer::reason_without_answer);
            (
                ChecklistLineState::NotMeasured,
                why.unwrap_or_else(|| "no rule decides it".to_owned()),
            )
        }
    }
}

/// Formats the filled-in checklist as text of at most 100 columns.
pub fn checklist_to_text(lines: &[FilledChecklistLine]) -> String {
    let mut text = String::from("Checklist ([x] holds, [!] fails, [ ] not measured)\n");
    for same in lines.chunk_by(|a, b| a.section_heading == b.section_heading) {
        let _ = writeln!(text, "  {}", same[0].section_heading);
        for line in same {
            append_wrapped_line(
                &mut text,
                &format!("{} {}", line.line_state.checkbox_of_state(), line.condition),
                "    ",
                "        ",
            );
            append_wrapped_line(&mut text, &line.deciding_text, "        ", "        ");
        }
    }
    text
}

pub fn checklist_to_json(lines: &[FilledChecklistLine]) -> Value {
    let line = |line: &FilledChecklistLine| {
        json!({
            "group": line.section_heading,
            "text": line.condition,
            "state": line.line_state.printed_state_label(),
            "why": line.deciding_text,
        })
    };
    lines.iter().map(line).collect()
}
