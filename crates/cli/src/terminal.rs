//! Lines of text for a terminal: weight, width, and the plan as a table.

pub(crate) mod table;

use std::io;

/// Weight, not colour: it is legible on any ground, and red stays free for errors.
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

/// Text from elsewhere, without what would command the terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// Columns of the terminal; what `COLUMNS` says comes first, so that it can be overruled.
pub(crate) fn terminal_width() -> usize {
    let told = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    let asked = || {
        let size = rustix::termios::tcgetwinsize(io::stderr()).ok()?;
        Some(usize::from(size.ws_col))
    };
    told.or_else(asked).filter(|&columns| columns > 0).unwrap_or(WIDTH)
}

/// Where nothing says how wide the terminal is.
const WIDTH: usize = 100;
