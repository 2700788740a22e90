//! Help of the program: verbs by the four questions, examples of each, lines of at most 100
//! columns.

use std::fmt::Write as _;

use clap::Command;

/// Longest line of the help.
const MAX_COLUMNS: usize = 100;

/// Verbs that answer one question.
struct Question {
    heading: &'static str,
    verbs: &'static [VerbExamples],
}

/// A verb with command lines that show its use.
struct VerbExamples(&'static str, &'static [&'static str]);

const QUESTIONS: &[Question] = &[
    Question {
        heading: "Is it right?",
        verbs: &[
            VerbExamples("list", &["kernelgate list", "kernelgate list --axis n=1000 saxpy"]),
            VerbExamples(
                "verify",
                &[
                    "kernelgate verify",
                    "kernelgate verify --axis n=1,1000,65537",
                    "kernelgate verify --seeds 16",
                ],
            ),
        ],
    },
    Question {
        heading: "How fast?",
        verbs: &[
            VerbExamples(
                "runs",
                &["kernelgate runs", "kernelgate runs --costs", "kernelgate runs --format bmf"],
            ),
            VerbExamples(
                "diff",
                &["kernelgate diff before after", "kernelgate diff DIR DIR --format json"],
            ),
            VerbExamples("report", &["kernelgate report"]),
            VerbExamples("history", &["kernelgate history", "kernelgate history CASE"]),
            VerbExamples("peers", &["kernelgate peers attention"]),
            VerbExamples("timing", &["kernelgate timing", "kernelgate timing --part spins"]),
        ],
    },
    Question {
        heading: "Did it get slower?",
        verbs: &[
            VerbExamples(
                "compare",
                &[
                    "kernelgate compare --base main",
                    "kernelgate compare --base v1 --head v2 --bench attention forward --budget 20m",
                ],
            ),
            VerbExamples("check", &["kernelgate check", "kernelgate check --dry-run"]),
            VerbExamples(
                "gate",
                &["kernelgate gate --baseline main", "kernelgate gate --baseline main --last 3"],
            ),
            VerbExamples(
                "baseline",
                &["kernelgate baseline save main --runs 5", "kernelgate baseline list"],
            ),
            VerbExamples(
                "calibrate",
                &["kernelgate calibrate", "kernelgate calibrate --total-time 2h"],
            ),
            VerbExamples("bisect", &["kernelgate bisect --good v1 --bad main CASE"]),
            VerbExamples(
                "resources",
                &["kernelgate resources --arch sm_90a", "kernelgate resources --check"],
            ),
        ],
    },
    Question {
        heading: "Why?",
        verbs: &[
            VerbExamples("profile", &["kernelgate profile attention"]),
            VerbExamples(
                "diagnose",
                &["kernelgate diagnose trace.sqlite", "kernelgate diagnose CASE"],
            ),
            VerbExamples("stats", &["kernelgate stats trace.sqlite"]),
            VerbExamples("export", &["kernelgate export trace.sqlite --out timeline.json"]),
        ],
    },
    Question {
        heading: "Several machines",
        verbs: &[
            VerbExamples("submit", &[]),
            VerbExamples("merge", &["kernelgate merge target/kernelgate/runs"]),
        ],
    },
    Question {
        heading: "Setup",
        verbs: &[
            VerbExamples(
                "init",
                &["kernelgate init --dry-run", "kernelgate init --package my-kernels"],
            ),
            VerbExamples("doctor", &["kernelgate doctor", "kernelgate doctor --fetch-nvrtc"]),
            VerbExamples(
                "completions",
                &[
                    "kernelgate completions bash > ~/.local/share/bash-completion/completions/kernelgate",
                ],
            ),
        ],
    },
];

/// A command line with its verbs by question and with examples.
pub fn arrange(command: Command) -> Command {
    let by_question = verbs_by_question(&command);
    let template = format!(
        "{{about}}\n\n{{usage-heading}} {{usage}}\n\n{by_question}Options:\n{{options}}{{after-help}}"
    );
    let command = command.help_template(template).max_term_width(MAX_COLUMNS);
    let verbs = QUESTIONS.iter().flat_map(|question| question.verbs);
    verbs.filter(|verb| !verb.1.is_empty()).fold(command, |command, VerbExamples(name, lines)| {
        let examples = format!("Examples:\n  {}", lines.join("\n  "));
        command.mut_subcommand(name, |verb| verb.after_help(examples))
    })
}

/// The verbs with the first line of their help, below the question that they answer.
fn verbs_by_question(command: &Command) -> String {
    let about = |name: &str| {
        let verb = command.find_subcommand(name).and_then(Command::get_about);
        verb.map(ToString::to_string).unwrap_or_default()
    };
    let mut text = String::new();
    for question in QUESTIONS {
        let _ = writeln!(text, "{}", question.heading);
        for VerbExamples(name, _) in question.verbs {
            let _ = writeln!(text, "  {name:<11} {}", about(name));
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::verbs::command;

    #[test]
    fn every_verb_answers_one_question() {
        let mut grouped: Vec<&str> =
            QUESTIONS.iter().flat_map(|it| it.verbs.iter().map(|verb| verb.0)).collect();
        grouped.sort_unstable();
        let command = command();
        let mut verbs: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
        verbs.sort_unstable();
        assert_eq!(grouped, verbs);
    }

    #[test]
    fn every_example_parses() {
        for line in QUESTIONS.iter().flat_map(|it| it.verbs).flat_map(|verb| verb.1) {
            let words = line.split(" > ").next().unwrap_or(line).split_whitespace();
            let parsed = crate::verbs::Cli::try_parse_from(words);
            assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
        }
    }

    #[test]
    fn help_is_at_most_100_columns_wide() {
        fn check(mut command: Command, name: &str) {
            let help = command.render_long_help().to_string();
            let wide = help.lines().find(|line| line.chars().count() > MAX_COLUMNS);
            assert_eq!(wide, None, "{name}");
            for verb in command.get_subcommands().cloned().collect::<Vec<_>>() {
                let name = format!("{name} {}", verb.get_name());
                check(verb.max_term_width(MAX_COLUMNS), &name);
            }
        }
        check(command().term_width(MAX_COLUMNS), "kernelgate");
    }
}
