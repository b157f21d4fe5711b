//! Text that others wrote, made safe to show.

use std::borrow::Cow;

/// `text` with every character replaced that would command a terminal, end a line, or turn the
/// direction of what follows. What another node, a file or a name says goes through here before it
/// becomes part of an error, a log or a page of text.
pub fn printable(text: &str) -> Cow<'_, str> {
    if text.chars().any(commands) {
        text.chars().map(|c| if commands(c) { char::REPLACEMENT_CHARACTER } else { c }).collect()
    } else {
        text.into()
    }
}

/// Control characters, and those that embed, override or isolate a direction.
fn commands(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_commands_the_terminal() {
        assert_eq!(printable("ein Wörtchen, 日本"), "ein Wörtchen, 日本");
        let harmful = "\x1b[2J a\nb\r\x07 \u{9b}31m \u{7f} \u{202e}txt";
        let safe = printable(harmful);
        assert_eq!(safe, "\u{fffd}[2J a\u{fffd}b\u{fffd}\u{fffd} \u{fffd}31m \u{fffd} \u{fffd}txt");
    }
}
