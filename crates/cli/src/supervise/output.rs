//! What children print: cut into whole lines, marked with who printed them, passed on as bytes.

use super::{Sink, Stream};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::mem;
use std::sync::{Arc, Mutex};

/// What becomes of one output stream of one child.
pub(super) struct Relay {
    /// Where whole lines go.
    pub(super) to: Destination,
    /// What stands before each line, see [`prefix`].
    pub(super) prefix: Vec<u8>,
    /// What is remembered of the child.
    pub(super) kept: Arc<Mutex<Kept>>,
    /// Who takes lines in place of our own streams.
    pub(super) sink: Option<Arc<dyn Sink>>,
}

/// Where whole lines go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Destination {
    /// To our own stdout.
    Stdout,
    /// To our own stderr, and the last ones into [`Kept::stderr_tail`].
    Stderr,
    /// Nowhere but [`Kept::stdout`].
    Captured,
}

/// What is remembered of a child's output. Written by the child's relays, read when they are done.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// The captured stdout; of a long one, the last [`CAPTURED`] bytes.
    pub(super) stdout: Vec<u8>,
    /// The last lines of stderr, without their ends.
    pub(super) stderr_tail: VecDeque<Vec<u8>>,
    /// Why our own stdout has not taken all lines. If its reader is gone, that is no reason.
    pub(super) unwritten: Option<String>,
    /// The last line of the tail ended in a carriage return: the next one overwrites it.
    overwritten: bool,
}

impl Relay {
    /// Passes on everything until `from` ends, or until nobody listens any more. In the latter case
    /// the child finds out the way it would without us: its next write fails.
    pub(super) fn run(self, mut from: impl Read) {
        let mut buffer = vec![0; READ];
        let mut lines = Lines::default();
        loop {
            let piece = match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => &buffer[..n],
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            if self.to == Destination::Captured {
                self.kept.lock().unwrap().capture(piece);
            } else if let Err(error) = self.pass(lines.push(piece)) {
                return self.note(&error);
            }
        }
        if let Err(error) = self.pass(lines.finish()) {
            self.note(&error);
        }
    }

    /// Remembers that lines were not passed on: the child may take it for a reader who has seen
    /// enough, and end well.
    fn note(&self, error: &io::Error) {
        if self.to == Destination::Stdout && error.kind() != ErrorKind::BrokenPipe {
            self.kept.lock().unwrap().unwritten = Some(error.to_string());
        }
    }

    /// Writes whole lines at once, under the stream's lock, so that lines of two children never mix.
    fn pass(&self, lines: Vec<Line>) -> io::Result<()> {
        let mut batch = Vec::new();
        for line in &lines {
            if !line.continues {
                batch.extend_from_slice(&self.prefix);
            }
            batch.extend_from_slice(&line.bytes);
            if !line.bytes.ends_with(b"\n") && !line.bytes.ends_with(b"\r") {
                batch.push(b'\n');
            }
        }
        if self.to == Destination::Stderr {
            self.kept.lock().unwrap().remember(lines);
        }
        match (self.to, &self.sink) {
            (Destination::Captured, _) => Ok(()),
            (Destination::Stdout, Some(sink)) => sink.lines(Stream::Stdout, batch),
            (Destination::Stderr, Some(sink)) => sink.lines(Stream::Stderr, batch),
            (Destination::Stdout, None) => {
                let mut stdout = io::stdout().lock();
                stdout.write_all(&batch)?;
                stdout.flush()
            }
            (Destination::Stderr, None) => io::stderr().lock().write_all(&batch),
        }
    }
}

impl Kept {
    fn capture(&mut self, piece: &[u8]) {
        self.stdout.extend_from_slice(piece);
        // Cutting only at twice the limit makes the moves cost one copy per byte.
        if self.stdout.len() > 2 * CAPTURED {
            self.stdout.drain(..self.stdout.len() - CAPTURED);
        }
    }

    fn remember(&mut self, lines: Vec<Line>) {
        for Line { bytes, continues } in lines {
            if continues {
                self.overwritten = false;
                continue;
            }
            // What a progress bar overwrote on the screen says nothing about a failure.
            if mem::replace(&mut self.overwritten, bytes.ends_with(b"\r")) {
                self.stderr_tail.pop_back();
            } else if self.stderr_tail.len() == TAIL {
                self.stderr_tail.pop_front();
            }
            let text = bytes.trim_ascii_end();
            self.stderr_tail.push_back(text[..text.len().min(TAIL_LINE)].to_vec());
        }
    }
}

/// The mark before each line of the child called `label`: `[label] `, in its own colour if wanted.
pub(super) fn prefix(label: &str, index: usize, colour: bool) -> Vec<u8> {
    if colour {
        format!("\x1b[{}m[{label}]\x1b[0m ", COLOURS[index % COLOURS.len()]).into_bytes()
    } else {
        format!("[{label}] ").into_bytes()
    }
}

/// A line with its end, if it has one.
#[derive(Debug, PartialEq, Eq)]
struct Line {
    bytes: Vec<u8>,
    /// The rest of the line before it, not a line of its own.
    continues: bool,
}

/// Cuts a stream into lines. A carriage return ends one as well: progress bars have no other end.
#[derive(Debug, Default)]
struct Lines {
    /// The line that has not ended yet.
    held: Vec<u8>,
    /// The last line ended in a carriage return, and nothing has come since.
    after_return: bool,
}

impl Lines {
    fn push(&mut self, mut piece: &[u8]) -> Vec<Line> {
        let mut lines = Vec::new();
        if mem::take(&mut self.after_return)
            && let Some(rest) = piece.strip_prefix(b"\n")
        {
            // The second half of a "\r\n" of which the first half is out already.
            lines.push(Line { bytes: b"\n".to_vec(), continues: true });
            piece = rest;
        }
        while let Some(end) = piece.iter().position(|&b| b == b'\n' || b == b'\r') {
            let end = end + if piece[end..].starts_with(b"\r\n") { 2 } else { 1 };
            let mut bytes = mem::take(&mut self.held);
            bytes.extend_from_slice(&piece[..end]);
            piece = &piece[end..];
            self.after_return = piece.is_empty() && bytes.ends_with(b"\r");
            lines.push(Line { bytes, continues: false });
        }
        self.held.extend_from_slice(piece);
        if self.held.len() > LONGEST_LINE {
            lines.push(Line { bytes: mem::take(&mut self.held), continues: false });
        }
        lines
    }

    fn finish(self) -> Vec<Line> {
        if self.held.is_empty() {
            return Vec::new();
        }
        vec![Line { bytes: self.held, continues: false }]
    }
}

/// A pipe holds 64 KiB: one read empties it.
const READ: usize = 64 << 10;
/// Bounds the memory a child can make us use by never ending its line; longer ones are cut.
const LONGEST_LINE: usize = 1 << 20;
/// At least this much of the end of a captured stdout is kept.
const CAPTURED: usize = 1 << 20;
/// Lines of stderr repeated when a child fails: enough for the useful end of a stack trace.
const TAIL: usize = 20;
/// As much of each of them as a person reads.
const TAIL_LINE: usize = 4 << 10;
/// Readable on light and dark ground: cyan, green, magenta, yellow, blue, and their bright kin. No
/// red: red says error.
const COLOURS: [u8; 10] = [36, 32, 35, 33, 34, 96, 92, 95, 93, 94];

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(pieces: &[&[u8]]) -> Vec<(Vec<u8>, bool)> {
        let mut lines = Lines::default();
        let mut all: Vec<_> = pieces.iter().flat_map(|piece| lines.push(piece)).collect();
        all.extend(lines.finish());
        all.into_iter().map(|line| (line.bytes, line.continues)).collect()
    }

    fn whole(bytes: &[u8]) -> (Vec<u8>, bool) {
        (bytes.to_vec(), false)
    }

    #[test]
    fn lines_are_the_same_however_the_stream_was_cut() {
        let stream = b"one\ntwo \xff\xfe\n\n 10%\r 20%\rthree\r\nfour";
        let expected: Vec<_> =
            [&b"one\n"[..], b"two \xff\xfe\n", b"\n", b" 10%\r", b" 20%\r", b"three\r\n", b"four"]
                .map(whole)
                .to_vec();
        assert_eq!(cut(&[stream]), expected);
        for at in 0..stream.len() {
            let (head, tail) = stream.split_at(at);
            // Between "\r" and "\n" the line is out already, so its end follows by itself.
            if head.ends_with(b"\r") && tail.starts_with(b"\n") {
                continue;
            }
            assert_eq!(cut(&[head, tail]), expected, "cut at {at}");
        }
    }

    #[test]
    fn a_split_line_end_does_not_make_an_empty_line() {
        assert_eq!(
            cut(&[b"a\r", b"\nb\n"]),
            [whole(b"a\r"), (b"\n".to_vec(), true), whole(b"b\n")]
        );
        assert_eq!(cut(&[b"a\r", b"b", b"\n"]), [whole(b"a\r"), whole(b"b\n")]);
    }

    #[test]
    fn a_line_that_never_ends_is_cut() {
        let piece = vec![b'x'; LONGEST_LINE / 2 + 1];
        let mut lines = Lines::default();
        assert_eq!(lines.push(&piece), []);
        assert_eq!(lines.push(&piece)[0].bytes.len(), 2 * piece.len());
        assert_eq!(lines.finish(), []);
    }

    #[test]
    fn the_tail_has_the_last_lines_and_no_stale_progress() {
        let mut kept = Kept::default();
        let mut lines = Lines::default();
        for i in 0..2 * TAIL {
            kept.remember(lines.push(format!("line {i}\n").as_bytes()));
        }
        kept.remember(lines.push(b" 10%\r 20%\r"));
        kept.remember(lines.push(b" 30%\nerror\r"));
        kept.remember(lines.push(b"\nlast\n"));
        let tail: Vec<_> =
            kept.stderr_tail.iter().map(|line| String::from_utf8_lossy(line)).collect();
        assert_eq!(tail.len(), TAIL);
        assert_eq!(tail[TAIL - 4..], ["line 39", " 30%", "error", "last"]);
    }

    #[test]
    fn a_long_capture_keeps_its_end() {
        let mut kept = Kept::default();
        for _ in 0..5 {
            kept.capture(&[b'x'; CAPTURED]);
        }
        kept.capture(b"end");
        assert!(kept.stdout.ends_with(b"xend"));
        assert!(kept.stdout.len() >= CAPTURED && kept.stdout.len() <= 2 * CAPTURED);
    }

    #[test]
    fn prefixes_name_the_child() {
        assert_eq!(prefix("server 0", 3, false), b"[server 0] ");
        assert_eq!(prefix("0", 10, true), b"\x1b[36m[0]\x1b[0m ");
    }
}
