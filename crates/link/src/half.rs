use crate::handshake::Protection;
use crate::records::{RecordReader, RecordWriter};
use crate::stream::{NO_SIGNAL, Stream, until};
use crate::tags::{Opener, Sealer, Tags};
use socket2::Socket;
use std::ffi::c_int;
use std::io::{self, ErrorKind, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Instant;

/// One of two holds on a connection: one thread reads by the first, others write by the second.
/// Each has a deadline of its own. The connection closes with the last of them, or when one [hangs
/// up](Half::hang_up).
#[derive(Debug)]
pub struct Half {
    socket: Arc<Socket>,
    deadline: Option<Instant>,
    /// Of the half that is read by, its opener is used; of the other one, its sealer.
    tags: Option<Tags>,
    /// Of an encrypted connection, the half that is read by has the first, the other one the second.
    reader: Option<RecordReader>,
    writer: Option<RecordWriter>,
}

impl Stream {
    /// The connection as two threads want it, one of which reads. Made to last: a peer whose
    /// machine is gone is noticed although nobody writes.
    pub fn split(self) -> io::Result<(Half, Half)> {
        let (socket, protection) = self.into_lasting_socket()?;
        Ok(Half::pair(socket, protection))
    }
}

impl Half {
    fn pair(socket: Socket, protection: Option<Protection>) -> (Self, Self) {
        let socket = Arc::new(socket);
        let (tags, reader, writer) = match protection {
            Some(Protection::Tags(tags)) => (Some(tags), None, None),
            Some(Protection::Records(records)) => {
                (None, Some(records.reader), Some(records.writer))
            }
            None => (None, None, None),
        };
        let (near, deadline) = (socket.clone(), None);
        (
            Self { socket: near, deadline, tags: tags.clone(), reader, writer: None },
            Self { socket, deadline, tags, reader: None, writer },
        )
    }

    /// Whether a write was given up half-way, so that nothing else can follow on this connection.
    pub fn has_unsent(&self) -> bool {
        self.writer.as_ref().is_some_and(|writer| !writer.held().is_empty())
    }

    /// From now on, reads and writes that are not done by `deadline` fail with
    /// [`ErrorKind::TimedOut`]. Without one they wait for as long as it takes.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// Ends the connection, also for a thread that reads by the other half. What was written before
    /// still arrives.
    pub fn hang_up(&self) {
        // An error means that it has ended already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Whether the other end has closed the connection, and everything it sent has been read.
    pub fn is_hung_up(&self) -> bool {
        match self.socket.recv_with_flags(&mut [MaybeUninit::uninit()], PEEK) {
            Ok(bytes) => bytes == 0,
            Err(e) => !matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }
}

/// A connection whose frames may have tags.
pub trait Tagged {
    /// Makes the tags of what is written, if frames have any.
    fn sealer(&mut self) -> Option<&mut Sealer>;

    /// Checks the tags of what is read, if frames have any.
    fn opener(&mut self) -> Option<&mut Opener>;
}

impl Tagged for Half {
    fn sealer(&mut self) -> Option<&mut Sealer> {
        self.tags.as_mut().map(|tags| &mut tags.sealer)
    }

    fn opener(&mut self) -> Option<&mut Opener> {
        self.tags.as_mut().map(|tags| &mut tags.opener)
    }
}

impl Tagged for Stream {
    fn sealer(&mut self) -> Option<&mut Sealer> {
        self.tags().map(|tags| &mut tags.sealer)
    }

    fn opener(&mut self) -> Option<&mut Opener> {
        self.tags().map(|tags| &mut tags.opener)
    }
}

impl Read for Half {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let Self { socket, deadline, reader, .. } = self;
        let read = |buf: &mut [u8]| {
            until(*deadline, |left| {
                socket.set_read_timeout(left)?;
                (&**socket).read(buf)
            })
        };
        match reader {
            Some(reader) => reader.read_with(buf, read),
            None => read(buf),
        }
    }
}

impl Write for Half {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let Self { socket, deadline, writer, .. } = self;
        let write = |buf: &[u8]| {
            until(*deadline, |left| {
                socket.set_write_timeout(left)?;
                socket.send_with_flags(buf, NO_SIGNAL)
            })
        };
        match writer {
            Some(writer) => writer.write_with(buf, write),
            None => write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Looks without waiting and without taking.
const PEEK: c_int =
    rustix::net::RecvFlags::PEEK.union(rustix::net::RecvFlags::DONTWAIT).bits() as c_int;

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Type};

    #[test]
    fn one_half_reads_while_the_other_writes_and_either_ends_both() {
        let (near, far) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        let (mut reader, mut writer) = Half::pair(near, None);
        let (mut theirs, _) = Half::pair(far, None);
        let reading = std::thread::spawn(move || {
            let mut word = [0; 4];
            reader.read_exact(&mut word).unwrap();
            (word, reader.read(&mut word).unwrap())
        });
        assert!(!theirs.is_hung_up());
        writer.write_all(b"ping").unwrap();
        theirs.write_all(b"pong").unwrap();
        let mut word = [0; 4];
        theirs.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"ping");
        writer.hang_up();
        assert_eq!(reading.join().unwrap(), (*b"pong", 0));
        assert!(theirs.is_hung_up());
    }
}
