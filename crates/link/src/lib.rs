//! Poseidon's links: the only place with sockets.
//!
//! * [`Listener`], [`connect()`]: the two ways to get an authenticated [`Stream`], over TCP or, between
//!   processes of one machine, over an abstract unix socket.
//! * [`Link`]: what a lane's event loop reads and writes; a [`Stream`] becomes one.
//! * [`handshake`]: who may speak (`docs/wire.md` §1), over any `Read + Write`.
//! * [`Tags`]: what proves that frames between hosts come as they were sent. Where connections are
//!   encrypted, [`Records`] prove it instead.
//! * [`Half`]: a [`Stream`] that one thread reads and others write.
//! * [`descriptors`]: how many of them a process may open, and what to say when they do not
//!   suffice.
//! * [`TextServer`]: a page of text that anybody may ask for by HTTP.
//! * [`address`]: which local address to listen on, and why.
//! * [`path`]: what the way to another machine is like: packets that pass, ports that answer.
//! * [`memory`]: links without a network, in virtual time and with faults, for tests.

pub mod address;
pub mod descriptors;
pub mod handshake;
pub mod memory;
pub mod path;

mod connect;
mod delivery;
mod door;
mod encrypted;
mod half;
mod listener;
mod names;
mod numa;
mod past_cache;
mod queue;
mod records;
mod secret;
mod shared;
mod stream;
mod tags;
mod text_server;
mod window;

pub use connect::{Address, Caller, ConnectError, connect, connect_unless};
pub use delivery::{Delivery, PathFacts};
pub use half::{Half, Tagged};
pub use handshake::HandshakeError;
pub use listener::{BindError, Listener, Serving};
pub use names::resolve;
pub use numa::NumaNode;
pub use records::Records;
pub use secret::{Credentials, Secret, SecretFileError, ShortSecret, random_bytes};
pub use stream::Stream;
pub use tags::{Changed, Opener, Sealer, TAG_SIZE, Tag, Tagging, Tags};
pub use text_server::TextServer;
pub use window::SOCKET_BUFFER;

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::time::Duration;

/// A connection between two lanes, whatever carries it. Never blocks: a call that would have to
/// wait fails with [`io::ErrorKind::WouldBlock`].
pub trait Link: Send {
    /// Reads into `bufs`, which must have room for at least one byte. `Ok(0)` is the end of the
    /// stream. More than 1024 buffers are not all used.
    fn read(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize>;

    /// As [`read`](Link::read), into memory that nobody reads soon. The link may write such memory
    /// past the cache.
    fn land(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.read(bufs)
    }

    /// Takes bytes that lie in the link's own memory, and gives them to `each` in short blocks that
    /// are copied to `scratch`, so that they are used while they are in the cache. Takes no more
    /// than `most` bytes, in blocks of whole units of `unit` bytes. Returns how many it has taken:
    /// 0 if the link has no such memory, or not a whole unit; then it is to be [read](Link::read).
    fn pass(
        &mut self,
        most: usize,
        unit: usize,
        scratch: &mut [u8],
        each: &mut dyn FnMut(&[u8]),
    ) -> io::Result<usize> {
        let _ = (most, unit, scratch, each);
        Ok(0)
    }

    /// Writes some prefix of `bufs`. More than 1024 buffers are not all used.
    fn write(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Bytes that have come and cannot be read yet, because more has to come first.
    fn incoming(&self) -> usize {
        0
    }

    /// Bytes that the link holds, because it has taken something that it could not send yet.
    fn unsent(&self) -> usize {
        0
    }

    /// Sends what the link holds. Fails with [`io::ErrorKind::WouldBlock`] if it still holds some.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// The registry has reported the link ready. Called before the link is read or written again.
    fn handle_ready(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Says that nothing more will be written. The peer reads what was written before, then the end
    /// of the stream. Call it before dropping a link: dropping one with unread input may destroy
    /// output that is still on its way.
    fn finish(&mut self) -> io::Result<()>;

    /// Asks `registry` to report when the link may be read or written again. Edge-triggered, as
    /// everything in mio: go on until `WouldBlock`.
    fn register(&mut self, registry: &mio::Registry, token: mio::Token) -> io::Result<()>;

    /// What carries the bytes.
    fn carrier(&self) -> Carrier;

    /// What frames on this link are tagged with, if they have tags: those of a TCP connection that is
    /// not encrypted do.
    /// The link does not count them; who writes and reads frames does.
    fn tags(&mut self) -> Option<&mut Tags> {
        None
    }

    /// From now on, up to `bytes` bytes may be under way to this end, or as many as the system thinks best
    /// (`None`). A connection between machines begins with a small window. Fewer bytes than before change nothing: two ends that take back
    /// what they have offered may throw away each other's acknowledgements, and wait for ever.
    fn widen(&mut self, bytes: Option<usize>) -> io::Result<()> {
        let _ = bytes;
        Ok(())
    }

    /// The way to the other end is short: what comes is acknowledged after milliseconds at most and, if
    /// `resend_soon`, what is lost is sent again as soon. Both ends must say that the way is short. False if
    /// the system cannot do it, or if nothing is ever lost.
    fn expect_answers(&mut self, resend_soon: bool) -> bool {
        let _ = resend_soon;
        false
    }

    /// The shortest time that bytes took to the other end and back, where that is known.
    fn round_trip(&self) -> Option<Duration> {
        None
    }

    /// What the system knows about the bytes that were sent: whether they arrive, and whether the
    /// other end reads them. None if there is no network in between.
    fn delivery(&self) -> Option<Delivery> {
        None
    }
}

/// What carries a link's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Carrier {
    /// A TCP connection.
    Tcp,
    /// A unix socket, within one machine.
    Unix,
    /// Memory that two processes of one machine share.
    Shared,
    /// A pipe within the process, for tests.
    Memory,
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Tcp => "tcp",
            Self::Unix => "unix",
            Self::Shared => "shm",
            Self::Memory => "memory",
        })
    }
}
