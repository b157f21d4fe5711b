//! Links through shared memory, for two processes of one machine.
//!
//! Both processes map memory with two rings, one for each direction. The sender copies bytes into a
//! ring and the receiver copies them out; the bytes never enter the kernel. The unix socket that the
//! two processes met on stays open. A byte on this socket is the *bell*: it wakes the other process.
//! The socket's end is the link's end, so a process that dies is noticed as on any other link.
//!
//! A side that finds nothing to read (or no room to write) sets a flag in the ring's control block,
//! looks at the ring once more, and only then reports `WouldBlock`. The other side moves bytes, then
//! looks at the flag, and rings the bell if it is set. Flags and counters are sequentially
//! consistent, so either the first side sees the bytes or the other side sees the flag.

use crate::{Carrier, Link, past_cache};
use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use socket2::Socket;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Which end of the connection this is; each end writes to the ring the other reads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Caller,
    Listener,
}

/// Bytes in each ring: one chunk of the default size. Of the sizes from 32 KiB to 512 KiB this one
/// took the least CPU time for 100 MB between 2 and between 8 processes. A larger ring falls out of
/// the cache between the two copies; a smaller one wakes the other side more often.
const RING: usize = 256 << 10;
/// Where the rings begin in the mapping. The control blocks of both rings lie before them.
const DATA: usize = 4096;
const TOTAL: usize = DATA + 2 * RING;

/// After the handshake on a unix socket the caller sends one of these bytes: it stays on the socket.
const PLAIN: u8 = 0;
/// The caller offers rings, and sends the file of their memory along with the byte.
const RINGS: u8 = 1;

/// The caller's side: offers rings to the listener. If rings cannot be made, or `wanted` is false,
/// the link stays on the socket, which is returned.
pub(crate) fn offer(socket: Socket, wanted: bool) -> io::Result<Result<SharedLink, Socket>> {
    let memory = if wanted { create() } else { Err(ErrorKind::Unsupported.into()) };
    let Ok((file, mapping)) = memory else {
        socket.send(&[PLAIN])?;
        return Ok(Err(socket));
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = SendAncillaryBuffer::new(&mut space);
    let files = [file.as_fd()];
    message.push(SendAncillaryMessage::ScmRights(&files));
    sendmsg(&socket, &[IoSlice::new(&[RINGS])], &mut message, SendFlags::NOSIGNAL)?;
    Ok(Ok(SharedLink::new(socket, mapping, End::Caller)))
}

/// The listener's side: takes the rings that the caller offers, or returns the socket.
pub(crate) fn accept(socket: Socket) -> io::Result<Result<SharedLink, Socket>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let received =
        recvmsg(&socket, &mut [IoSliceMut::new(&mut byte)], &mut message, RecvFlags::CMSG_CLOEXEC)?;
    let file = message.drain().find_map(|part| match part {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    let whole = received.bytes == 1 && !received.flags.contains(ReturnFlags::CTRUNC);
    match (whole, byte[0], file) {
        (true, PLAIN, None) => Ok(Err(socket)),
        (true, RINGS, Some(file)) => {
            let mapping = Mapping::new(&checked(file)?)?;
            Ok(Ok(SharedLink::new(socket, mapping, End::Listener)))
        }
        (_, byte, file) => {
            let with = if file.is_some() { "with" } else { "without" };
            let why = format!("expected an offer of rings, got byte {byte} {with} a file");
            Err(io::Error::new(ErrorKind::InvalidData, why))
        }
    }
}

/// A link through two rings.
pub(crate) struct SharedLink {
    bell: Socket,
    mapping: Mapping,
    end: End,
    /// Bytes written and read so far. The shared counters are copies for the other side.
    written: u64,
    read: u64,
    ended: bool,
}

/// What the two sides tell each other about one ring. Each field is on its own cache line. Each
/// counter has one writer. A flag has two: the waiting side sets it, the other side clears it.
#[repr(C)]
struct Control {
    written: Line<AtomicU64>,
    read: Line<AtomicU64>,
    reader_waits: Line<AtomicU32>,
    writer_waits: Line<AtomicU32>,
}

#[repr(C, align(64))]
struct Line<T>(T);

/// Copies bytes from the first to the second.
// SAFETY: for whoever calls it: both are valid for so many bytes, and they do not overlap.
type CopyBytes = unsafe fn(*const u8, *mut u8, usize);

impl SharedLink {
    fn new(bell: Socket, mapping: Mapping, end: End) -> Self {
        Self { bell, mapping, end, written: 0, read: 0, ended: false }
    }

    pub(crate) fn set_nonblocking(&self) -> io::Result<()> {
        self.bell.set_nonblocking(true)
    }

    fn outgoing(&self) -> Ring<'_> {
        self.mapping.ring(usize::from(self.end == End::Listener))
    }

    fn incoming(&self) -> Ring<'_> {
        self.mapping.ring(usize::from(self.end == End::Caller))
    }

    fn read_with(&mut self, bufs: &mut [IoSliceMut<'_>], copy: CopyBytes) -> io::Result<usize> {
        let room: usize = bufs.iter().map(|b| b.len()).sum();
        let mut total = 0;
        loop {
            let ring = self.incoming();
            let ready = ring.ready(self.read)?.min(room - total);
            if ready > 0 {
                let mut skip = total;
                let mut position = self.read;
                for buf in bufs.iter_mut() {
                    let (len, start) = (buf.len(), skip.min(buf.len()));
                    let rest = &mut buf[start..];
                    skip = skip.saturating_sub(len);
                    let n = rest.len().min(ready - (position - self.read) as usize);
                    ring.copy_out(position, &mut rest[..n], copy);
                    position += n as u64;
                }
                self.advance(position)?;
                total += ready;
            }
            if total == room {
                return Ok(total);
            }
            let ring = self.incoming();
            ring.control.reader_waits.0.store(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if ring.ready(self.read)? > 0 {
                ring.control.reader_waits.0.store(0, Ordering::SeqCst);
                continue;
            }
            if total > 0 {
                return Ok(total);
            }
            // Bytes that were written before the end have all been read here.
            return if self.ended { Ok(0) } else { Err(ErrorKind::WouldBlock.into()) };
        }
    }

    /// Everything before `position` has been read.
    fn advance(&mut self, position: u64) -> io::Result<()> {
        self.read = position;
        let ring = self.incoming();
        ring.control.read.0.store(position, Ordering::SeqCst);
        // A writer is not woken for every few bytes: it should find room for a large piece.
        let left = ring.ready(position)?;
        if left <= RING / 2 && ring.control.writer_waits.0.swap(0, Ordering::SeqCst) == 1 {
            self.ring_bell();
        }
        Ok(())
    }

    /// Wakes the other side. If the socket is full, bells that the other side has not read will wake
    /// it. If the socket is broken, the next read finds that out.
    fn ring_bell(&self) {
        let _ = rustix::net::send(&self.bell, &[1], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }
}

impl Link for SharedLink {
    fn read(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.read_with(bufs, std::ptr::copy_nonoverlapping)
    }

    fn land(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.read_with(bufs, past_cache::copy)
    }

    fn peek(&mut self) -> io::Result<&[u8]> {
        let ring = self.incoming();
        Ok(ring.lend(self.read, ring.ready(self.read)?))
    }

    fn consume(&mut self, bytes: usize) -> io::Result<()> {
        let ready = self.incoming().ready(self.read)?;
        if bytes > ready {
            let why = format!("{bytes} bytes consumed of {ready}");
            return Err(io::Error::new(ErrorKind::InvalidInput, why));
        }
        self.advance(self.read + bytes as u64)
    }

    fn write(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let wanted: usize = bufs.iter().map(|b| b.len()).sum();
        let mut total = 0;
        loop {
            let ring = self.outgoing();
            let room = ring.room(self.written)?.min(wanted - total);
            if room > 0 {
                let mut skip = total;
                let mut position = self.written;
                for buf in bufs {
                    let rest = &buf[skip.min(buf.len())..];
                    skip = skip.saturating_sub(buf.len());
                    let n = rest.len().min(room - (position - self.written) as usize);
                    ring.copy_in(position, &rest[..n]);
                    position += n as u64;
                }
                ring.control.written.0.store(position, Ordering::SeqCst);
                if ring.control.reader_waits.0.swap(0, Ordering::SeqCst) == 1 {
                    self.ring_bell();
                }
                self.written = position;
                total += room;
            }
            if total == wanted {
                return Ok(total);
            }
            let ring = self.outgoing();
            ring.control.writer_waits.0.store(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if ring.room(self.written)? > RING / 2 {
                ring.control.writer_waits.0.store(0, Ordering::SeqCst);
                continue;
            }
            return if total > 0 { Ok(total) } else { Err(ErrorKind::WouldBlock.into()) };
        }
    }

    /// Reads all bells. Nothing else reads them: a bell may be for either direction, and after this
    /// call the lane looks at both directions.
    fn handle_ready(&mut self) -> io::Result<()> {
        let mut bells = [0; 64];
        loop {
            match (&self.bell).read(&mut bells) {
                Ok(0) => self.ended = true,
                Ok(n) if n == bells.len() => continue,
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
            return Ok(());
        }
    }

    fn finish(&mut self) -> io::Result<()> {
        self.bell.shutdown(Shutdown::Write)
    }

    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        registry.register(&mut SourceFd(&self.bell.as_raw_fd()), token, Interest::READABLE)
    }

    fn carrier(&self) -> Carrier {
        Carrier::Shared
    }
}

/// One ring of a mapping. Positions count bytes since the beginning and wrap around the ring.
struct Ring<'a> {
    control: &'a Control,
    data: NonNull<u8>,
}

impl<'a> Ring<'a> {
    /// Bytes the reader at `position` may take.
    fn ready(&self, position: u64) -> io::Result<usize> {
        self.distance(self.control.written.0.load(Ordering::SeqCst), position)
    }

    /// Bytes the writer at `position` may add.
    fn room(&self, position: u64) -> io::Result<usize> {
        Ok(RING - self.distance(position, self.control.read.0.load(Ordering::SeqCst))?)
    }

    /// Bytes in the ring. The other side wrote one of the two counters, so its value may be anything
    /// and is checked.
    fn distance(&self, written: u64, read: u64) -> io::Result<usize> {
        let distance = written.wrapping_sub(read);
        if distance > RING as u64 {
            let why = format!(
                "a ring of {RING} bytes cannot hold {distance}: written {written}, read {read}"
            );
            return Err(io::Error::new(ErrorKind::InvalidData, why));
        }
        Ok(distance as usize)
    }

    fn copy_in(&self, position: u64, bytes: &[u8]) {
        let at = position as usize % RING;
        let (first, second) = bytes.split_at(bytes.len().min(RING - at));
        // SAFETY: both parts lie within the ring: at + first ≤ RING, and second ≤ room - first. The
        // reader does not touch them until `written` says so; if it does all the same, the bytes
        // are garbage, which is what its owner then reads.
        unsafe {
            self.data.add(at).copy_from_nonoverlapping(NonNull::from(first).cast(), first.len());
            self.data.copy_from_nonoverlapping(NonNull::from(second).cast(), second.len());
        }
    }

    /// The next `ready` bytes at `position`, as far as they lie in one piece.
    fn lend(&self, position: u64, ready: usize) -> &'a [u8] {
        let at = position as usize % RING;
        // SAFETY: within the ring. The writer does not touch what is ready until `read` says so; if
        // it does all the same, the bytes are garbage, as they would be in a copy.
        unsafe { std::slice::from_raw_parts(self.data.add(at).as_ptr(), ready.min(RING - at)) }
    }

    fn copy_out(&self, position: u64, bytes: &mut [u8], copy: CopyBytes) {
        let at = position as usize % RING;
        let split = bytes.len().min(RING - at);
        let (first, second) = bytes.split_at_mut(split);
        // SAFETY: as for `copy_in`, with the roles exchanged.
        unsafe {
            copy(self.data.add(at).as_ptr(), first.as_mut_ptr(), first.len());
            copy(self.data.as_ptr(), second.as_mut_ptr(), second.len());
        }
    }
}

/// The memory of both rings, mapped.
struct Mapping(NonNull<u8>);

// SAFETY: a mapping is memory like any other; all shared access goes through atomics or is ordered
// by them.
unsafe impl Send for Mapping {}

impl Mapping {
    fn new(file: &OwnedFd) -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address the kernel chooses; the file is sealed against
        // shrinking, so every page of it stays.
        let start = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            mmap(std::ptr::null_mut(), TOTAL, protection, MapFlags::SHARED, file, 0)?
        };
        NonNull::new(start.cast()).map(Self).ok_or_else(|| io::Error::other("mapped at zero"))
    }

    fn ring(&self, index: usize) -> Ring<'_> {
        let control = index * size_of::<Control>();
        // SAFETY: both control blocks lie within the first DATA bytes of the mapping, aligned like
        // it; atomics are valid for any bytes. The data of ring `index` lies within TOTAL.
        unsafe {
            let control = self.0.add(control).cast::<Control>().as_ref();
            Ring { control, data: self.0.add(DATA + index * RING) }
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, and no ring outlives the borrow it came from.
        // A failure leaves it mapped, which harms nobody.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), TOTAL) };
    }
}

fn create() -> io::Result<(OwnedFd, Mapping)> {
    let file = memfd_create("poseidon-link", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, TOTAL as u64)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let mapping = Mapping::new(&file)?;
    Ok((file, mapping))
}

/// Checks a file that the caller sent. A file of another size, or one that can shrink, would make an
/// access to its mapping end this process with a signal.
fn checked(file: OwnedFd) -> io::Result<OwnedFd> {
    let sealed = fcntl_get_seals(&file)?.contains(SealFlags::SHRINK);
    let size = fstat(&file)?.st_size;
    if !sealed || size != TOTAL as i64 {
        let why =
            format!("expected a sealed file of {TOTAL} bytes, got one of {size}, sealed: {sealed}");
        return Err(io::Error::new(ErrorKind::InvalidData, why));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use socket2::{Domain, Type};

    fn pair() -> (SharedLink, SharedLink) {
        let (a, b) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        let caller = offer(a, true).unwrap().unwrap_or_else(|_| panic!("no rings"));
        let listener = accept(b).unwrap().unwrap_or_else(|_| panic!("no rings"));
        caller.bell.set_nonblocking(true).unwrap();
        listener.bell.set_nonblocking(true).unwrap();
        (caller, listener)
    }

    fn would_block<T: std::fmt::Debug>(result: io::Result<T>) -> bool {
        result.unwrap_err().kind() == ErrorKind::WouldBlock
    }

    proptest! {
        #[test]
        fn bytes_come_out_as_they_went_in(
            writes in proptest::collection::vec(9_999usize..300_000, 1..12),
            reads in proptest::collection::vec((9_999usize..200_000, 0usize..100), 1..12),
        ) {
            let (mut a, mut b) = pair();
            let total: usize = writes.iter().sum();
            let sent: Vec<u8> = (0..total).map(|i| (i * 7 % 251) as u8).collect();
            let mut got = Vec::new();
            let (mut done, mut writes, mut reads) = (0, writes.iter().cycle(), reads.iter().cycle());
            while got.len() < total {
                let piece = &sent[done..(done + writes.next().unwrap()).min(total)];
                let (head, tail) = piece.split_at(piece.len() / 3);
                match a.write(&[IoSlice::new(head), IoSlice::new(tail)]) {
                    Ok(n) => done += n,
                    Err(e) => prop_assert_eq!(e.kind(), ErrorKind::WouldBlock),
                }
                let &(first, second) = reads.next().unwrap();
                // Some of it is used where it is.
                let shown = b.peek().unwrap();
                let used = shown.len().min(second);
                got.extend_from_slice(&shown[..used]);
                b.consume(used).unwrap();
                let (mut x, mut y) = (vec![0; first], vec![0; second]);
                let bufs = &mut [IoSliceMut::new(&mut x), IoSliceMut::new(&mut y)];
                match if first % 2 == 0 { b.read(bufs) } else { b.land(bufs) } {
                    Ok(n) => {
                        got.extend_from_slice(&x[..n.min(first)]);
                        got.extend_from_slice(&y[..n - n.min(first)]);
                    }
                    Err(e) => prop_assert_eq!(e.kind(), ErrorKind::WouldBlock),
                }
            }
            prop_assert!(got == sent);
        }
    }

    #[test]
    fn a_reader_that_found_nothing_is_rung_for_once() {
        let (mut a, mut b) = pair();
        let mut buf = [0; 8];
        assert!(would_block(b.read(&mut [IoSliceMut::new(&mut buf)])));
        a.write(&[IoSlice::new(b"one")]).unwrap();
        a.write(&[IoSlice::new(b"two")]).unwrap();
        let mut bells = [0; 8];
        assert_eq!((&b.bell).read(&mut bells).unwrap(), 1);
        assert_eq!(b.read(&mut [IoSliceMut::new(&mut buf)]).unwrap(), 6);
        assert_eq!(&buf[..6], b"onetwo");
    }

    #[test]
    fn a_writer_that_found_no_room_is_rung_for() {
        let (mut a, mut b) = pair();
        let bytes = vec![7; RING + 10];
        assert_eq!(a.write(&[IoSlice::new(&bytes)]).unwrap(), RING);
        assert!(would_block(a.write(&[IoSlice::new(&bytes)])));
        let mut buf = vec![0; RING];
        assert_eq!(b.read(&mut [IoSliceMut::new(&mut buf)]).unwrap(), RING);
        let mut bells = [0; 8];
        assert_eq!((&a.bell).read(&mut bells).unwrap(), 1);
        assert_eq!(a.write(&[IoSlice::new(&bytes[..10])]).unwrap(), 10);
    }

    #[test]
    fn a_writer_that_found_no_room_is_rung_for_when_bytes_are_used_where_they_are() {
        let (mut a, mut b) = pair();
        let bytes = vec![7; RING + 10];
        assert_eq!(a.write(&[IoSlice::new(&bytes)]).unwrap(), RING);
        assert!(would_block(a.write(&[IoSlice::new(&bytes)])));
        assert_eq!(b.peek().unwrap(), &bytes[..RING]);
        assert_eq!(b.peek().unwrap().len(), RING, "looking takes nothing");
        b.consume(RING).unwrap();
        assert_eq!(b.peek().unwrap(), []);
        let mut bells = [0; 8];
        assert_eq!((&a.bell).read(&mut bells).unwrap(), 1);
        assert!(b.consume(1).is_err(), "nothing is left");
        assert_eq!(a.write(&[IoSlice::new(&bytes[..10])]).unwrap(), 10);
        assert_eq!(b.peek().unwrap(), &bytes[..10]);
    }

    #[test]
    fn what_was_written_is_read_before_the_end() {
        let (mut a, mut b) = pair();
        a.write(&[IoSlice::new(b"last words")]).unwrap();
        drop(a);
        b.handle_ready().unwrap();
        let mut buf = [0; 32];
        assert_eq!(b.read(&mut [IoSliceMut::new(&mut buf)]).unwrap(), 10);
        assert_eq!(b.read(&mut [IoSliceMut::new(&mut buf)]).unwrap(), 0);
        assert_eq!(b.read(&mut [IoSliceMut::new(&mut buf)]).unwrap(), 0);
    }

    #[test]
    fn a_side_that_writes_nonsense_into_the_ring_is_found_out() {
        let (a, mut b) = pair();
        a.outgoing().control.written.0.store(u64::MAX, Ordering::SeqCst);
        let mut buf = [0; 8];
        assert_eq!(b.peek().unwrap_err().kind(), ErrorKind::InvalidData);
        let error = b.read(&mut [IoSliceMut::new(&mut buf)]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        assert!(error.to_string().contains("cannot hold"), "{error}");
    }

    #[test]
    fn an_offer_of_anything_else_is_refused() {
        let (a, b) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        a.send(&[RINGS]).unwrap();
        assert!(accept(b).err().unwrap().to_string().contains("without a file"));

        let (a, b) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        assert!(offer(a, false).unwrap().is_err(), "stays on the socket");
        assert!(accept(b).unwrap().is_err());

        let small = memfd_create("small", MemfdFlags::ALLOW_SEALING).unwrap();
        assert!(checked(small).unwrap_err().to_string().contains("expected a sealed file"));
    }
}
