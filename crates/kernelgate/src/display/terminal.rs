//! Determines the width of the terminal, and breaks lines to this width. If standard output is a
//! pipe or a file, lines are not broken.

/// Width in columns that is assumed for narrower terminals.
const MIN_TERMINAL_COLUMNS: usize = 40;

/// Number of columns of the terminal on standard output; `None` if standard output is not a
/// terminal.
pub fn terminal_columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    // A terminal that reports no size, such as a serial line, is treated like a file.
    (size.ws_col > 0).then_some(usize::from(size.ws_col).max(MIN_TERMINAL_COLUMNS))
}

/// Prints a text to standard output; on a terminal, lines are broken to its width.
pub fn print_broken_to_terminal_width(text: &str) {
    match terminal_columns() {
        Some(columns) => println!("{}", break_lines_to_columns(text, columns)),
        None => println!("{text}"),
    }
}

/// Breaks the lines of a text to a width; continuation lines are indented by four columns.
pub fn break_lines_to_columns(text: &str, columns: usize) -> String {
    text.split('\n')
        .map(|line| break_line_to_columns(line, 4, columns))
        .collect::<Vec<_>>()
        .join("\n")
}

/// Breaks one line between words, else after `/`, else anywhere; continuation lines are indented.
pub fn break_line_to_columns(text: &str, indent: usize, columns: usize) -> String {
    let indent = indent.min(columns / 2);
    let mut rest = text.to_owned();
    let mut lines = Vec::new();
    let mut from = 0;
    while let Some((end, _)) = rest.char_indices().nth(columns) {
        let head = &rest[..end];
        // A space at the line break is dropped.
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
    fn long_lines_break_between_words_else_after_slashes() {
        let text = break_line_to_columns(
            &format!("    axis n  a number: {}", "words of it ".repeat(20)),
            12,
            100,
        );
        assert!(text.lines().count() > 2 && text.lines().all(|line| line.len() <= 100));
        let indented =
            |line: &str| line.starts_with(&" ".repeat(12)) && !line[12..].starts_with(' ');
        assert!(text.lines().skip(1).all(indented), "{text}");
        assert_eq!(break_line_to_columns("aaaa/bbbb/cccc", 2, 10), "aaaa/bbbb/\n  cccc");
        assert_eq!(break_line_to_columns("ééééééé", 1, 4), "éééé\n ééé");
        assert_eq!(break_line_to_columns("one two", 4, 7), "one two");
        assert_eq!(break_line_to_columns("one two", 4, 3), "one\n tw\n o");
        assert_eq!(break_lines_to_columns("a b\n\nc", 40), "a b\n\nc");
    }
}
