//! Fills in the checklist of the attention guide: diagnosis rules mark each line as holding or
//! failing, or the line names what would measure it.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::finding::{DiagnosisRuleAnswer, QuestionWithAnswer, TraceDiagnosis};
use super::text::append_wrapped_line;

/// State of a line of the checklist: holds, fails or not measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChecklistLineState {
    /// The condition of the checklist line holds: the diagnosis rules that could contradict it
    /// found nothing.
    ConditionHolds,
    /// The condition of the checklist line does not hold: a diagnosis rule found a problem.
    ConditionFails,
    /// The trace lacks the data that would decide the checklist line.
    NotMeasured,
}

impl ChecklistLineState {
    /// Returns the label of the checklist line's state in printed output.
    pub fn printed_state_label(self) -> &'static str {
        match self {
            Self::ConditionHolds => "holds",
            Self::ConditionFails => "fails",
            Self::NotMeasured => "not measured",
        }
    }

    fn checkbox_of_state(self) -> &'static str {
        match self {
            Self::ConditionHolds => "[x]",
            Self::ConditionFails => "[!]",
            Self::NotMeasured => "[ ]",
        }
    }
}

/// A line of the attention guide's checklist, with its state for one trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilledChecklistLine {
    /// Heading of the group to which the checklist line belongs.
    pub section_heading: &'static str,
    /// Condition that the checklist line states.
    pub checklist_statement: &'static str,
    /// Whether the condition of the checklist line holds.
    pub line_state: ChecklistLineState,
    /// The finding that decides the checklist line, or the command that would measure it.
    pub finding_or_command_deciding_line: String,
}

/// The diagnosis rules that decide a line of the checklist, or the tool that can.
enum ChecklistLineBasis {
    /// Any one of these diagnosis rules decides the checklist line.
    AnyOfRules(&'static [&'static str]),
    /// All these diagnosis rules must find nothing, except rules that had nothing to inspect, for
    /// the checklist line to hold.
    AllOfRules(&'static [&'static str]),
    /// No diagnosis rule can decide the checklist line from a trace; the text names a tool that
    /// can.
    OtherTool(&'static str),
}

/// The checklist's lines: heading, condition, and what decides the line.
const CHECKLIST_LINES_AND_DECIDING_RULES: &[(&str, &str, ChecklistLineBasis)] = &[
    ("Memory", "Memory accesses are coalesced", ChecklistLineBasis::AnyOfRules(&["coalescing"])),
    (
        "Memory",
        "Using shared memory for frequently accessed data",
        ChecklistLineBasis::OtherTool(
            "kernelgate resources: column shared, and the class load_shared of the mix",
        ),
    ),
    (
        "Memory",
        "No bank conflicts in shared memory",
        ChecklistLineBasis::AnyOfRules(&["bank-conflicts"]),
    ),
    (
        "Memory",
        "Memory transactions are efficient",
        ChecklistLineBasis::AllOfRules(&[
            "coalescing",
            "page-migration",
            "pageable-copy",
            "synchronous-copy",
        ]),
    ),
    (
        "Compute",
        "Good occupancy (50-75%)",
        ChecklistLineBasis::AnyOfRules(&["occupancy", "achieved-occupancy"]),
    ),
    (
        "Compute",
        "Using warp-level primitives where possible",
        ChecklistLineBasis::OtherTool(
            "kernelgate resources --format json: the class warp of the mix",
        ),
    ),
    ("Compute", "Minimal branch divergence", ChecklistLineBasis::AnyOfRules(&["divergence"])),
    (
        "Compute",
        "Unrolled critical loops",
        ChecklistLineBasis::OtherTool(
            "kernelgate resources: instructions and the class control of the mix",
        ),
    ),
    (
        "Algorithm",
        "Kernel fusion applied where beneficial",
        ChecklistLineBasis::AnyOfRules(&["fusion"]),
    ),
    (
        "Algorithm",
        "Optimal work distribution",
        ChecklistLineBasis::AllOfRules(&["small-grid", "tail"]),
    ),
    (
        "Algorithm",
        "Minimal synchronization points",
        ChecklistLineBasis::AnyOfRules(&["sync-in-loop"]),
    ),
    (
        "Algorithm",
        "Data reuse maximized",
        ChecklistLineBasis::OtherTool("cargo bench: the column `of limit`"),
    ),
    (
        "Launch",
        "Block size is multiple of warp size",
        ChecklistLineBasis::AnyOfRules(&["block-size"]),
    ),
    ("Launch", "Grid size saturates GPU", ChecklistLineBasis::AnyOfRules(&["small-grid"])),
    ("Launch", "Register/SMEM usage balanced", ChecklistLineBasis::AnyOfRules(&["occupancy"])),
    (
        "Launch",
        "Correct compile flags enabled",
        ChecklistLineBasis::OtherTool(
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
                ChecklistLineBasis::OtherTool(what) => {
                    (ChecklistLineState::NotMeasured, (*what).to_owned())
                }
                ChecklistLineBasis::AnyOfRules(rules) => {
                    decide_state_of_checklist_line(diagnosis, rules, false)
                }
                ChecklistLineBasis::AllOfRules(rules) => {
                    decide_state_of_checklist_line(diagnosis, rules, true)
                }
            };
            FilledChecklistLine {
                section_heading: group,
                checklist_statement: text,
                line_state: tick,
                finding_or_command_deciding_line: why,
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
        .filter(|finding| rules.contains(&finding.rule_id))
        .map(|finding| finding.finding_title.as_str())
        .collect();
    if let Some(first) = found.first() {
        let more =
            if found.len() > 1 { format!("; {} more", found.len() - 1) } else { String::new() };
        return (ChecklistLineState::ConditionFails, format!("{first}{more}"));
    }
    let questions = || rules.iter().filter_map(|rule| diagnosis.question_of_rule(rule));
    let passed = questions().filter_map(|question| match &question.answer {
        DiagnosisRuleAnswer::No { inspected } => {
            Some(format!("{} in {inspected}", question.rule_id))
        }
        _ => None,
    });
    let passed: Vec<String> = passed.collect();
    let found_nothing = format!("nothing found by {}", passed.join(", "));
    let lacks = questions().find(|question| {
        matches!(&question.answer, DiagnosisRuleAnswer::CannotAnswer { how_to_record, .. } if !how_to_record.is_empty())
    });
    let lacking = lacks.and_then(|of| Some((of.rule_id, of.reason_without_answer()?)));
    match lacking {
        Some((id, why)) if all && !passed.is_empty() => {
            (ChecklistLineState::NotMeasured, format!("{found_nothing}; not measured: {id}: {why}"))
        }
        _ if !passed.is_empty() => (ChecklistLineState::ConditionHolds, found_nothing),
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
                &format!("{} {}", line.line_state.checkbox_of_state(), line.checklist_statement),
                "    ",
                "        ",
            );
            append_wrapped_line(
                &mut text,
                &line.finding_or_command_deciding_line,
                "        ",
                "        ",
            );
        }
    }
    text
}

pub fn checklist_to_json(lines: &[FilledChecklistLine]) -> Value {
    let line = |line: &FilledChecklistLine| {
        json!({
            "group": line.section_heading,
            "text": line.checklist_statement,
            "state": line.line_state.printed_state_label(),
            "why": line.finding_or_command_deciding_line,
        })
    };
    lines.iter().map(line).collect()
}
