//! What `poseidon launch` and the process that it starts on another host say to each other.
//!
//! The host's process is `poseidon launch --as-host`, started by ssh. On its standard output it
//! writes one line, [`MARK`] and a [`Greeting`], and then frames: a byte of kind, the length as
//! four bytes, least first, and as many bytes. On its standard input it reads [`Order`]s, one on
//! each line. The first one is [`Order::Start`]. Greetings, orders and [`News`] are JSON.
//!
//! Whoever closes its end is gone: the launcher then ends the job, and the host its processes.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::path::PathBuf;
use std::time::Duration;

/// What the host's process says about itself, before it is told anything.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(super) struct Greeting {
    /// [`PROTOCOL`], as that process knows it.
    pub(super) protocol: u32,
    /// Of its Poseidon.
    pub(super) version: String,
    /// Where its program is.
    pub(super) program: String,
    /// sshd's `SSH_CONNECTION`: the launcher's address and port, the host's address and port.
    pub(super) connection: Option<String>,
    /// A port of the host at which nobody listens now.
    pub(super) free_port: u16,
}

/// What the launcher tells a host.
#[derive(Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    /// Start these processes. It comes first, and once.
    Start(Box<Assignment>),
    /// Pass this signal on.
    Signal(i32),
    /// End everything.
    End,
    /// All workers of all hosts have ended: servers may leave.
    Leave,
    /// The launcher is still there.
    Alive,
}

/// The processes of one host. There is a secret in their environments: this is never printed.
#[derive(Deserialize, Serialize)]
pub(super) struct Assignment {
    /// Where they run.
    pub(super) folder: PathBuf,
    /// What they find in their environment beside what each of them is told.
    pub(super) environment: Vec<(OsString, OsString)>,
    pub(super) processes: Vec<Described>,
    /// Whether the launcher's stdout and stderr are read by a person who likes colours.
    pub(super) colours: (bool, bool),
    /// The place of the first process among those of all hosts, which gives it its colour.
    pub(super) first: usize,
}

/// A process, as it can be told to another machine.
#[derive(Deserialize, Serialize)]
pub(super) struct Described {
    pub(super) name: String,
    pub(super) label: String,
    /// Whether it is a server: it then runs the host's own `poseidon`, not `program`.
    pub(super) server: bool,
    pub(super) program: OsString,
    pub(super) arguments: Vec<OsString>,
    /// What is set, and what is removed.
    pub(super) variables: Vec<(OsString, Option<OsString>)>,
}

/// What a host tells the launcher.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// Whole lines that processes wrote to stdout, with their ranks.
    Stdout(Vec<u8>),
    /// The same of stderr.
    Stderr(Vec<u8>),
    News(News),
}

#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum News {
    /// A process failed first: "worker 3 on b exited with status 1".
    Failed { words: String, status: u8 },
    /// All workers of this host have ended well.
    WorkersEnded,
    /// All processes are over. `report` says what went wrong, with the last lines on stderr.
    Over { status: u8, report: Option<String> },
    /// The processes could not be started.
    Refused { words: String },
    /// The host's process is still there.
    Alive,
}

/// What a greeting begins with. Lines before it are a login script's.
pub(super) const MARK: &str = "poseidon-host ";
/// Changes with this file.
pub(super) const PROTOCOL: u32 = 1;
/// How often both ends say that they are there.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(5);
/// After so long without a word the other end counts as gone. Networks recover from most faults
/// sooner.
pub(super) const SILENCE: Duration = Duration::from_secs(60);

/// Writes an order or a greeting: one line of JSON.
pub(super) fn write_line(to: &mut impl Write, mark: &str, what: &impl Serialize) -> io::Result<()> {
    let mut line = mark.as_bytes().to_vec();
    serde_json::to_writer(&mut line, what)?;
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()
}

/// Reads one line of JSON after `mark`. Lines without the mark are given to `other`. `None` at the
/// end of the stream.
pub(super) fn read_line<T: DeserializeOwned>(
    from: &mut impl BufRead,
    mark: &str,
    mut other: impl FnMut(&[u8]),
) -> io::Result<Option<T>> {
    loop {
        let mut line = Vec::new();
        if from.by_ref().take(LONGEST).read_until(b'\n', &mut line)? == 0 {
            return Ok(None);
        }
        match line.strip_prefix(mark.as_bytes()) {
            Some(json) => return serde_json::from_slice(json).map(Some).map_err(nonsense),
            None => other(&line),
        }
    }
}

impl Heard {
    pub(super) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        match self {
            Self::Stdout(bytes) => write_frame(to, STDOUT, bytes),
            Self::Stderr(bytes) => write_frame(to, STDERR, bytes),
            Self::News(news) => write_frame(to, NEWS, &serde_json::to_vec(news)?),
        }
    }

    /// The next frame, or `None` at the end of the stream.
    pub(super) fn read(from: &mut impl Read) -> io::Result<Option<Self>> {
        let mut kind = [0];
        loop {
            match from.read(&mut kind) {
                Ok(0) => return Ok(None),
                Ok(_) => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        let mut length = [0; 4];
        from.read_exact(&mut length)?;
        let length = u64::from(u32::from_le_bytes(length));
        if length > LONGEST {
            return Err(nonsense(format!("a frame of {length} bytes")));
        }
        let mut bytes = vec![0; length as usize];
        from.read_exact(&mut bytes)?;
        match kind[0] {
            STDOUT => Ok(Some(Self::Stdout(bytes))),
            STDERR => Ok(Some(Self::Stderr(bytes))),
            NEWS => serde_json::from_slice(&bytes).map(|n| Some(Self::News(n))).map_err(nonsense),
            kind => Err(nonsense(format!("a frame of kind {kind}"))),
        }
    }
}

fn write_frame(to: &mut impl Write, kind: u8, bytes: &[u8]) -> io::Result<()> {
    for piece in bytes.chunks(LONGEST as usize).chain(bytes.is_empty().then_some(bytes)) {
        to.write_all(&[kind])?;
        // A piece is no longer than LONGEST.
        to.write_all(&(piece.len() as u32).to_le_bytes())?;
        to.write_all(piece)?;
    }
    to.flush()
}

fn nonsense(what: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const NEWS: u8 = 3;
/// Bounds the memory the other end can make us use. Lines are cut at a mebibyte, arguments of a
/// program are shorter than two.
const LONGEST: u64 = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_as_they_were() {
        let frames = [
            Heard::Stdout(b"[0] \xff\n".to_vec()),
            Heard::Stderr(Vec::new()),
            Heard::News(News::Failed { words: "worker 1 on b".into(), status: 3 }),
            Heard::News(News::Over { status: 0, report: None }),
        ];
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.write(&mut bytes).unwrap());
        let mut from = bytes.as_slice();
        for frame in frames {
            assert_eq!(Heard::read(&mut from).unwrap(), Some(frame));
        }
        assert_eq!(Heard::read(&mut from).unwrap(), None);
    }

    #[test]
    fn what_is_no_frame_is_an_error() {
        for bytes in
            [&b"\x07\0\0\0\0"[..], b"\x01\xff\xff\xff\xff", b"\x03\x02\0\0\0{}", b"\x01\x05"]
        {
            assert!(Heard::read(&mut &*bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn a_greeting_is_found_behind_what_a_login_script_prints() {
        let greeting = Greeting {
            protocol: PROTOCOL,
            version: "1.2.3".into(),
            program: "/bin/poseidon".into(),
            connection: None,
            free_port: 4000,
        };
        let mut bytes = b"Welcome!\nposeidon is the god of\n\n".to_vec();
        write_line(&mut bytes, MARK, &greeting).unwrap();
        let mut before = Vec::new();
        let heard = read_line(&mut bytes.as_slice(), MARK, |line| before.push(line.to_vec()));
        assert_eq!(heard.unwrap(), Some(greeting));
        assert_eq!(before.len(), 3);
        let nobody = read_line::<Greeting>(&mut &b"Welcome!\n"[..], MARK, |_| {});
        assert_eq!(nobody.unwrap(), None);
        let garbled = read_line::<Greeting>(&mut &b"poseidon-host {}\n"[..], MARK, |_| {});
        assert!(garbled.is_err());
    }
}
