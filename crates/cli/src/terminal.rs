//! Lines of text for a terminal: weight, width, short tables, and the plan as a table.

pub(crate) mod columns;
pub(crate) mod table;

use std::io;

/// Makes text bold or dim, if `on`. It uses weight and no colour: weight is legible on any
/// background, and red stays free for errors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paint {
    pub(crate) on: bool,
}

impl Paint {
    pub(crate) fn bold(self, text: &str) -> String {
        self.wrap("1", text)
    }

    pub(crate) fn dim(self, text: &str) -> String {
        self.wrap("2", text)
    }

    fn wrap(self, code: &str, text: &str) -> String {
        if self.on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.into() }
    }
}

/// Text that a user or a file gave, with control characters replaced: they would command the
/// terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// Columns of the terminal. The variable `COLUMNS` comes first, so that a user can overrule the
/// terminal.
pub(crate) fn terminal_width() -> usize {
    let told = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    let asked = || {
        let size = rustix::termios::tcgetwinsize(io::stderr()).ok()?;
        Some(usize::from(size.ws_col))
    };
    told.or_else(asked).filter(|&columns| columns > 0).unwrap_or(WIDTH)
}

/// Columns if neither `COLUMNS` nor the terminal says how many there are.
const WIDTH: usize = 100;
