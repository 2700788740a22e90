//! Finds the width of the terminal and breaks lines to fit. Output into a pipe or a file has no
//! width.

/// Columns that are assumed for narrower terminals.
const MIN_TERMINAL_COLUMNS: usize = 40;

/// Columns of the terminal on standard output; `None` if standard output is not a terminal.
pub fn terminal_columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    // A terminal without a size, such as a serial line, counts as no terminal.
    (size.ws_col > 0).then_some(usize::from(size.ws_col).max(MIN_TERMINAL_COLUMNS))
}

/// Prints a text to standard output; if that is a terminal, lines are broken to its width.
pub fn print_wrapped(text: &str) {
    match terminal_columns() {
        Some(columns) => println!("{}", wrap_terminal_text(text, columns)),
        None => println!("{text}"),
    }
}

/// Breaks every line of a text to a width; continued lines are indented by four columns.
pub fn wrap_terminal_text(text: &str, columns: usize) -> String {
    text.split('\n').map(|line| wrap_terminal_line(line, 4, columns)).collect::<Vec<_>>().join("\n")
}

/// Breaks one line between words, else after a `/`, else anywhere; continued lines are indented.
pub fn wrap_terminal_line(text: &str, indent: usize, columns: usize) -> String {
    let indent = indent.min(columns / 2);
    let mut rest = text.to_owned();
    let mut lines = Vec::new();
    let mut from = 0;
    while let Some((end, _)) = rest.char_indices().nth(columns) {
        let head = &rest[..end];
        // A space may coincide with the end of the line.
        let space = if rest[end..].starts_with(' ') { Some(end) } else { head.rfind(' ') };
        let space = space.filter(|at| *at > from);
        let slash = || head.rfind('/').map(|at| at + 1).filter(|at| *at > from);
        let at = space.or_else(slash).unwrap_or(end);
        lines.push(rest[..at].trim_end().to_owned());
        let tail = rest[at..].trim_start();
        rest = format!("{:indent$}{tail}", "");
        from = indent;
    }
    lines.push(rest);
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_broken_between_words_else_after_slashes() {
        let text = wrap_terminal_line(
            &format!("    axis n  a number: {}", "words of it ".repeat(20)),
            12,
            100,
        );
        assert!(text.lines().count() > 2 && text.lines().all(|line| line.len() <= 100));
        let indented =
            |line: &str| line.starts_with(&" ".repeat(12)) && !line[12..].starts_with(' ');
        assert!(text.lines().skip(1).all(indented), "{text}");
        assert_eq!(wrap_terminal_line("aaaa/bbbb/cccc", 2, 10), "aaaa/bbbb/\n  cccc");
        assert_eq!(wrap_terminal_line("ééééééé", 1, 4), "éééé\n ééé");
        assert_eq!(wrap_terminal_line("one two", 4, 7), "one two");
        assert_eq!(wrap_terminal_line("one two", 4, 3), "one\n tw\n o");
        assert_eq!(wrap_terminal_text("a b\n\nc", 40), "a b\n\nc");
    }
}
