//! A command line split in two: what Criterion may see, and our flags as environment variables.

use std::ffi::OsString;

use clap::CommandFactory;

use super::args::BenchProcessFlags;

/// Flags of kernelgate as environment variables: pairs of name and value.
pub type FlagVariables = Vec<(String, String)>;

/// Splits a command line into Criterion's arguments and the environment variables that carry our
/// flags; `None` without any of our flags.
///
/// Values of a repeated flag are joined by spaces, delays by commas. A flag without a value stays,
/// for the parser to complain about. `--quick` becomes our effort: Criterion's own quick mode takes
/// at least 0.1 s for a case, and doubles the launches until two measurements agree.
pub fn split_own_flags(arguments: &[OsString]) -> Option<(Vec<OsString>, FlagVariables)> {
    let command = BenchProcessFlags::command();
    let (mut rest, mut own) = (Vec::new(), FlagVariables::new());
    let mut quick = false;
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let text = argument.to_string_lossy();
        if text == "--quick" {
            quick = true;
            continue;
        }
        let (flag, value) = match text.split_once('=') {
            Some((flag, value)) => (flag, Some(value.to_owned())),
            None => (text.as_ref(), None),
        };
        let ours = command.get_arguments().find(|ours| ours.get_long() == flag.strip_prefix("--"));
        let Some((ours, variable)) = ours.and_then(|ours| Some((ours, ours.get_env()?))) else {
            rest.push(argument.clone());
            continue;
        };
        let variable = variable.to_string_lossy();
        if !ours.get_action().takes_values() {
            own.push((variable.into_owned(), "true".to_owned()));
            continue;
        }
        // cargo appends `--bench`, so a flag never serves as a value.
        let next = || {
            arguments
                .clone()
                .next()
                .map(|value| value.to_string_lossy().into_owned())
                .filter(|next| !next.starts_with("--"))
        };
        let Some(value) = value.clone().or_else(next) else {
            rest.push(argument.clone());
            continue;
        };
        if !text.contains('=') {
            arguments.next();
        }
        match own.iter_mut().find(|(name, _)| *name == variable) {
            Some((_, values)) => {
                let between = ours.get_value_delimiter().unwrap_or(' ');
                *values = format!("{values}{between}{value}");
            }
            None => own.push((variable.into_owned(), value)),
        }
    }
    const EFFORT_VARIABLE: &str = "KERNELGATE_EFFORT";
    if quick && own.iter().all(|(name, _)| *name != EFFORT_VARIABLE) {
        own.push((EFFORT_VARIABLE.to_owned(), "quick".to_owned()));
    }
    (quick || !own.is_empty()).then_some((rest, own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_without_a_value_does_not_take_the_next_argument() {
        let arguments = ["--energy", "x"].map(OsString::from);
        let (rest, own) = split_own_flags(&arguments).unwrap();
        assert_eq!(
            (rest, own),
            (vec!["x".into()], vec![("KERNELGATE_ENERGY".into(), "true".into())])
        );
    }

    #[test]
    fn flags_of_kernelgate_move_from_the_command_line_to_the_environment() {
        let arguments: Vec<OsString> = "x --axis s=1,2 --quick --axis=d=64 --effort thorough \
                                        --bench"
            .split(' ')
            .map(Into::into)
            .collect();
        let (rest, own) = split_own_flags(&arguments).unwrap();
        assert_eq!(rest, ["x", "--bench"]);
        assert_eq!(
            own,
            [
                ("KERNELGATE_AXIS".to_owned(), "s=1,2 d=64".to_owned()),
                ("KERNELGATE_EFFORT".to_owned(), "thorough".to_owned())
            ]
        );
        assert_eq!(split_own_flags(&rest), None);
        let (rest, own) = split_own_flags(&["x".into(), "--quick".into()]).unwrap();
        assert_eq!(
            (rest, own),
            (vec!["x".into()], vec![("KERNELGATE_EFFORT".into(), "quick".into())])
        );
        assert_eq!(split_own_flags(&["--axis".into()]), None);
        assert_eq!(split_own_flags(&["--effort".into(), "--bench".into()]), None);
    }
}
