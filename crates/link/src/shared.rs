//! Links through shared memory, for two processes of one machine.
//!
//! Both processes map memory with two rings, one for each direction. The sender copies bytes into a
//! ring and the receiver copies them out; the bytes never enter the kernel. The unix socket that
//! the two processes met on stays open. A byte on this socket is the *bell*: it wakes the other
//! process. The socket's end is the link's end, so a process that dies is noticed as on any other
//! link.
//!
//! * `ring`: who may touch which bytes of a ring, and who has to be woken. A side that may wait
//!   reports `WouldBlock`.
//! * `access`: the memory itself. Another process may write it at any time.

mod access;
#[cfg(test)]
mod model;
mod ring;

use crate::{Carrier, Link, past_cache};
use access::{CopyBytes, RingBytes};
use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use ring::{Control, Ring};
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
use std::sync::Once;

/// Which end of the connection this is; each end writes to the ring the other reads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Caller,
    Listener,
}

/// Bytes in each ring.
const RING: usize = RingBytes::LEN;
/// Bytes that are copied out of a ring at a time, to be combined. The copy is in the nearest cache
/// when they are.
const BLOCK: usize = 16 << 10;
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
    let memory = wanted.then(create).and_then(|memory| memory.inspect_err(warn).ok());
    let Some((file, mapping)) = memory else {
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

/// Says once why nodes of this host do not share memory.
fn warn(error: &io::Error) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        tracing::warn!(
            "no memory can be shared with other nodes of this host ({error}): bytes go through sockets \
             instead, which takes more CPU time. A container has to allow memfd_create"
        );
    });
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

    /// # Safety
    /// `copy` copies, and does nothing else.
    unsafe fn read_with(
        &mut self,
        bufs: &mut [IoSliceMut<'_>],
        copy: CopyBytes,
    ) -> io::Result<usize> {
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
                    // SAFETY: by the caller.
                    unsafe { ring.copy_out(position, &mut rest[..n], copy) };
                    position += n as u64;
                }
                self.advance(position)?;
                total += ready;
            }
            if total == room {
                return Ok(total);
            }
            if !self.incoming().may_reader_wait(self.read)? {
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
        if self.incoming().release(position)? {
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
        // SAFETY: it copies.
        unsafe { self.read_with(bufs, std::ptr::copy_nonoverlapping) }
    }

    fn land(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        // SAFETY: it copies.
        unsafe { self.read_with(bufs, past_cache::copy) }
    }

    fn pass(
        &mut self,
        most: usize,
        unit: usize,
        scratch: &mut [u8],
        each: &mut dyn FnMut(&[u8]),
    ) -> io::Result<usize> {
        let block = scratch.len().min(BLOCK) / unit * unit;
        let ring = self.incoming();
        let ready = ring.ready(self.read)?.min(most) / unit * unit;
        if block == 0 || ready == 0 {
            return Ok(0);
        }
        let end = self.read + ready as u64;
        let mut position = self.read;
        while position < end {
            let piece = &mut scratch[..block.min((end - position) as usize)];
            // SAFETY: it copies.
            unsafe { ring.copy_out(position, piece, std::ptr::copy_nonoverlapping) };
            each(piece);
            position += piece.len() as u64;
        }
        self.advance(end)?;
        Ok(ready)
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
                if ring.publish(position) {
                    self.ring_bell();
                }
                self.written = position;
                total += room;
            }
            if total == wanted {
                return Ok(total);
            }
            if !self.outgoing().may_writer_wait(self.written)? {
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
        // it; atomics are valid for any bytes. The bytes of ring `index` lie within TOTAL, behind
        // the control blocks, and are mapped as long as `self` lives.
        unsafe {
            let control = self.0.add(control).cast::<Control>().as_ref();
            Ring { control, bytes: RingBytes::new(self.0.add(DATA + index * RING)) }
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
                // Some of it is passed in blocks.
                let (before, mut block) = (got.len(), vec![0; first]);
                let each = &mut |piece: &[u8]| got.extend_from_slice(piece);
                let passed = b.pass(9 * second, 3, &mut block, each).unwrap();
                prop_assert!(passed % 3 == 0 && passed <= 9 * second);
                prop_assert_eq!(got.len() - before, passed);
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
    fn a_writer_that_found_no_room_is_rung_for_when_bytes_are_passed_in_blocks() {
        let (mut a, mut b) = pair();
        let bytes = vec![7; RING + 10];
        assert_eq!(a.write(&[IoSlice::new(&bytes)]).unwrap(), RING);
        assert!(would_block(a.write(&[IoSlice::new(&bytes)])));
        let (mut scratch, mut blocks) = (vec![0; 3 * BLOCK], Vec::new());
        let passed = b.pass(usize::MAX, 8, &mut scratch, &mut |block| blocks.push(block.to_vec()));
        assert_eq!(passed.unwrap(), RING);
        assert_eq!(blocks, vec![vec![7; BLOCK]; RING / BLOCK]);
        assert_eq!(b.pass(usize::MAX, 8, &mut scratch, &mut |_| panic!("none left")).unwrap(), 0);
        let mut bells = [0; 8];
        assert_eq!((&a.bell).read(&mut bells).unwrap(), 1);
        assert_eq!(a.write(&[IoSlice::new(&bytes[..10])]).unwrap(), 10);
        let passed = b.pass(usize::MAX, 8, &mut scratch, &mut |block| assert_eq!(block, [7; 8]));
        assert_eq!(passed.unwrap(), 8, "half a number waits for its other half");
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
        a.outgoing().claim(u64::MAX);
        let mut buf = [0; 8];
        let passed = b.pass(8, 1, &mut buf, &mut |_| panic!("nothing was sent"));
        assert_eq!(passed.unwrap_err().kind(), ErrorKind::InvalidData);
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
