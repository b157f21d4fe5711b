//! Lines of text for a terminal: weight, width, short tables, and the plan as a table.

pub(crate) mod columns;
pub(crate) mod table;

use anyhow::Context;
use std::io::{self, Write};

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

/// Text that a user, a file or another process gave, with nothing in it that commands the terminal.
pub(crate) fn printable(text: &str) -> String {
    poseidon_core::printable::printable(text).into_owned()
}

/// The same, of text that may have several lines.
pub(crate) fn printable_lines(text: &str) -> String {
    text.split('\n').map(printable).collect::<Vec<_>>().join("\n")
}

/// Writes `text` to standard output, which carries what the user has asked for. A reader that has
/// seen enough and is gone is no error; a disk that is full is one.
pub(crate) fn say(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    said(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// What came of writing to standard output.
pub(crate) fn said(written: io::Result<()>) -> anyhow::Result<()> {
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context("cannot write to standard output"),
    }
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
