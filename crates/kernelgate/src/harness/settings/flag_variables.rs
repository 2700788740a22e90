//! Splits a command line into Criterion's arguments and environment variables for kernelgate's own
//! flags.

use std::ffi::OsString;

use clap::CommandFactory;

use super::args::BenchProcessFlags;

/// Names and values of environment variables that replace kernelgate's flags.
pub type VariablesForFlags = Vec<(String, String)>;

/// Splits a command line into Criterion's arguments and environment variables for kernelgate's own
/// flags; `None` if there are no own flags.
///
/// Values of a repeated flag are joined by spaces, and delays by commas. A flag that lacks its
/// value stays among the arguments, so that the parser reports it. Criterion's flag `--quick`
/// becomes kernelgate's quick effort: Criterion's own quick mode takes at least 0.1 s per case, and
/// doubles the launches until two measurements agree.
pub fn split_criterion_and_kernelgate_flags(
    arguments: &[OsString],
) -> Option<(Vec<OsString>, VariablesForFlags)> {
    let command = BenchProcessFlags::command();
    let (mut rest, mut own) = (Vec::new(), VariablesForFlags::new());
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
        // cargo appends `--bench`, so a word that begins with `--` is never the value of a flag.
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
    fn a_flag_without_value_does_not_take_the_next_argument() {
        let arguments = ["--energy", "x"].map(OsString::from);
        let (rest, own) = split_criterion_and_kernelgate_flags(&arguments).unwrap();
        assert_eq!(
            (rest, own),
            (vec!["x".into()], vec![("KERNELGATE_ENERGY".into(), "true".into())])
        );
    }

    #[test]
    fn kernelgate_flags_become_environment_variables() {
        let arguments: Vec<OsString> = "x --axis s=1,2 --quick --axis=d=64 --effort thorough \
                                        --bench"
            .split(' ')
            .map(Into::into)
            .collect();
        let (rest, own) = split_criterion_and_kernelgate_flags(&arguments).unwrap();
        assert_eq!(rest, ["x", "--bench"]);
        assert_eq!(
            own,
            [
                ("KERNELGATE_AXIS".to_owned(), "s=1,2 d=64".to_owned()),
                ("KERNELGATE_EFFORT".to_owned(), "thorough".to_owned())
            ]
        );
        assert_eq!(split_criterion_and_kernelgate_flags(&rest), None);
        let (rest, own) =
            split_criterion_and_kernelgate_flags(&["x".into(), "--quick".into()]).unwrap();
        assert_eq!(
            (rest, own),
            (vec!["x".into()], vec![("KERNELGATE_EFFORT".into(), "quick".into())])
        );
        assert_eq!(split_criterion_and_kernelgate_flags(&["--axis".into()]), None);
        assert_eq!(
            split_criterion_and_kernelgate_flags(&["--effort".into(), "--bench".into()]),
            None
        );
    }
}
