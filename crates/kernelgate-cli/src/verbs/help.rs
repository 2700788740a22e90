//! Help of the program: verbs grouped by the question that they answer, examples of each verb,
//! lines of at most 100 columns.

use std::fmt::Write as _;

use clap::Command;

/// Longest line of the help text, in columns.
const MAX_HELP_LINE_COLUMNS: usize = 100;

/// A question in the program's help, with the verbs that answer it.
struct HelpQuestion {
    help_question: &'static str,
    verbs: &'static [VerbExamples],
}

/// A verb of kernelgate with example command lines for its help.
struct VerbExamples(&'static str, &'static [&'static str]);

/// Examples for the help of verbs that are nested below another verb.
const EXAMPLES_OF_NESTED_VERBS: &[VerbExamples] = &[
    VerbExamples(
        "history import",
        &[
            "kernelgate history import baselines",
            "kernelgate history import ci-artefacts/ main.json",
        ],
    ),
    VerbExamples("history merge", &["kernelgate history merge /shared/kernelgate"]),
    VerbExamples(
        "history prune",
        &["kernelgate history prune --keep 200 --dry-run", "kernelgate history prune --keep 200"],
    ),
    VerbExamples(
        "baseline save",
        &[
            "kernelgate baseline save main",
            "kernelgate baseline save main --runs 3 -- --bench attention -- --quick",
        ],
    ),
    VerbExamples("baseline list", &["kernelgate baseline list"]),
    VerbExamples("baseline find", &["kernelgate baseline find main"]),
    VerbExamples("baseline show", &["kernelgate baseline show main --device nvidia-h200"]),
    VerbExamples("baseline add", &["kernelgate baseline add main --last 3"]),
    VerbExamples("baseline import", &["kernelgate baseline import main.json --name main"]),
    VerbExamples("baseline seal", &["kernelgate baseline seal baselines/nvidia-h200/main.json"]),
    VerbExamples("baseline export", &["kernelgate baseline export main main.csv"]),
    VerbExamples(
        "submit slurm",
        &[
            "kernelgate submit slurm --shards 8 --gres gpu:1 -- bench --quick",
            "kernelgate submit slurm --shards 4 -- compare --base main --budget 30m",
        ],
    ),
    VerbExamples(
        "submit kubernetes",
        &["kernelgate submit kubernetes --dry-run --image registry/kernels:1 -- bench --quick"],
    ),
];

const QUESTIONS_WITH_VERBS: &[HelpQuestion] = &[
    HelpQuestion {
        help_question: "Is it right?",
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
    HelpQuestion {
        help_question: "How fast?",
        verbs: &[
            VerbExamples(
                "runs",
                &["kernelgate runs", "kernelgate runs --costs", "kernelgate runs --format bmf"],
            ),
            VerbExamples(
                "diff",
                &["kernelgate diff before after", "kernelgate diff DIR DIR --format json"],
            ),
            VerbExamples("report", &["kernelgate report", "kernelgate report '^attention/'"]),
            VerbExamples("history", &["kernelgate history", "kernelgate history CASE"]),
            VerbExamples("peers", &["kernelgate peers attention"]),
            VerbExamples("timing", &["kernelgate timing", "kernelgate timing --part spins"]),
        ],
    },
    HelpQuestion {
        help_question: "Did it get slower?",
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
    HelpQuestion {
        help_question: "Why?",
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
    HelpQuestion {
        help_question: "Several machines",
        verbs: &[
            VerbExamples("submit", &["kernelgate submit slurm --shards 8 -- bench --quick"]),
            VerbExamples("merge", &["kernelgate merge target/kernelgate/runs"]),
        ],
    },
    HelpQuestion {
        help_question: "Setup",
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

/// Adds to the help of the command line: verbs grouped by the question they answer, and examples
/// for each verb.
pub fn add_questions_and_examples_to_help(command: Command) -> Command {
    let by_question = help_text_of_verbs_by_question(&command);
    let template = format!(
        "{{about}}\n\n{{usage-heading}} {{usage}}\n\n{by_question}Options:\n{{options}}{{after-help}}"
    );
    let command = command.help_template(template).max_term_width(MAX_HELP_LINE_COLUMNS);
    verbs_with_examples().fold(command, |command, VerbExamples(path, lines)| {
        let examples = format!("Examples:\n  {}", lines.join("\n  "));
        match path.split_once(' ') {
            None => command.mut_subcommand(path, |verb| verb.after_help(examples)),
            Some((verb, subverb)) => command.mut_subcommand(verb, |verb| {
                verb.mut_subcommand(subverb, |subverb| subverb.after_help(examples))
            }),
        }
    })
}

/// Every verb of the program with the example commands in its help.
fn verbs_with_examples() -> impl Iterator<Item = &'static VerbExamples> {
    QUESTIONS_WITH_VERBS.iter().flat_map(|question| question.verbs).chain(EXAMPLES_OF_NESTED_VERBS)
}

/// The first page of the help: each question, followed by the verbs that answer it with the first
/// line of their help.
fn help_text_of_verbs_by_question(command: &Command) -> String {
    let about = |name: &str| {
        let verb = command.find_subcommand(name).and_then(Command::get_about);
        verb.map(ToString::to_string).unwrap_or_default()
    };
    let mut text = String::new();
    for question in QUESTIONS_WITH_VERBS {
        let _ = writeln!(text, "{}", question.help_question);
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
    use crate::verbs::command_line_definition;

    #[test]
    fn every_verb_belongs_to_one_question_of_the_help() {
        let mut grouped: Vec<&str> =
            QUESTIONS_WITH_VERBS.iter().flat_map(|it| it.verbs.iter().map(|verb| verb.0)).collect();
        grouped.sort_unstable();
        let command = command_line_definition();
        let mut verbs: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
        verbs.sort_unstable();
        assert_eq!(grouped, verbs);
    }

    #[test]
    fn every_example_of_the_help_is_parsed() {
        for line in verbs_with_examples().flat_map(|verb| verb.1) {
            let words = line.split(" > ").next().unwrap_or(line).split_whitespace();
            let parsed = crate::verbs::KernelgateCommandLine::try_parse_from(words);
            assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
        }
    }

    /// Calls `check` for each subcommand, at any depth, with its full name.
    fn check_each_subcommand(command: &Command, name: &str, check: &dyn Fn(&Command, &str)) {
        check(command, name);
        for verb in command.get_subcommands() {
            check_each_subcommand(verb, &format!("{name} {}", verb.get_name()), check);
        }
    }

    #[test]
    fn the_help_of_every_verb_has_an_example_and_begins_with_its_action() {
        const HELP_FIRST_WORDS_THAT_ARE_NO_VERBS: [&str; 9] =
            ["A", "An", "All", "Each", "Every", "The", "This", "Verb", "What"];
        check_each_subcommand(&command_line_definition(), "kernelgate", &|verb, name| {
            let about = verb.get_about().expect(name).to_string();
            let first = about.split_whitespace().next().unwrap_or_default();
            assert!(
                !HELP_FIRST_WORDS_THAT_ARE_NO_VERBS.contains(&first) && !first.ends_with("ing"),
                "{name}: {about}"
            );
            assert!(about.chars().count() <= 85, "{name}: {about}");
            let help = verb.get_after_help().expect(name).to_string();
            assert!(name == "kernelgate" || help.starts_with("Examples:\n"), "{name}: {help}");
        });
    }

    #[test]
    fn help_is_at_most_100_columns_wide() {
        fn check_help_width(mut command: Command, name: &str) {
            let help = command.render_long_help().to_string();
            let wide = help.lines().find(|line| line.chars().count() > MAX_HELP_LINE_COLUMNS);
            assert_eq!(wide, None, "{name}");
            for verb in command.get_subcommands().cloned().collect::<Vec<_>>() {
                let name = format!("{name} {}", verb.get_name());
                check_help_width(verb.max_term_width(MAX_HELP_LINE_COLUMNS), &name);
            }
        }
        check_help_width(command_line_definition().term_width(MAX_HELP_LINE_COLUMNS), "kernelgate");
    }
}
