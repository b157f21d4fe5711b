//! Links without a network, for tests: in virtual time, with faults, and deterministic.
//!
//! Bytes become readable when the virtual clock reaches their arrival, never sooner. Reads and
//! writes are cut short at arbitrary points, so code that relies on one call to move a whole header
//! or a whole float fails its tests. Nothing waits: a test polls its links and, when no link makes
//! progress, advances the clock to the next [`Faults::next_event`].

use crate::encrypted::EncryptedLink;
use crate::{Carrier, Link, Records, Tags};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// A clock that moves only when it is told to. Clones show the same time.
#[derive(Clone, Debug, Default)]
pub struct VirtualClock(Arc<AtomicU64>);

impl VirtualClock {
    /// A clock at zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// The time since the clock began.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Acquire))
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_nanos() as u64, Ordering::AcqRel);
    }
}

/// How a link behaves, the same in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Time on the way, after the last byte of a piece has been sent.
    pub delay: Duration,
    /// How fast bytes are sent; `None` sends them in no time.
    pub bytes_per_second: Option<u64>,
    /// Bytes written and not yet read that the link holds before it takes no more.
    pub capacity: usize,
    /// Decides where reads and writes are cut short.
    pub seed: u64,
}

impl Default for Shape {
    /// No delay, no limit on the rate, 256 KiB.
    fn default() -> Self {
        Self { delay: Duration::ZERO, bytes_per_second: None, capacity: 256 << 10, seed: 0 }
    }
}

/// Two ends of a new link.
pub fn pair(clock: VirtualClock, shape: Shape) -> (MemoryLink, MemoryLink) {
    let pipe = Arc::new(Pipe { clock, shape, state: Mutex::default() });
    let end = |side: usize| MemoryLink {
        pipe: pipe.clone(),
        side,
        tags: None,
        cuts: Cuts(shape.seed.wrapping_add((side as u64) << 32)),
    };
    (end(0), end(1))
}

/// As [`pair`], of links whose frames have tags.
pub fn tagged_pair(clock: VirtualClock, shape: Shape) -> (MemoryLink, MemoryLink) {
    let (mut near, mut far) = pair(clock, shape);
    [near.tags, far.tags] = tags().map(Some);
    (near, far)
}

/// As [`pair`], of links that are encrypted. Also the handle by which a test breaks them.
pub fn encrypted_pair(clock: VirtualClock, shape: Shape) -> (impl Link, impl Link, Faults) {
    let (near, far) = pair(clock, shape);
    let (keys, faults) = (([0x5a; 16], [0xa5; 16]), near.faults());
    let near = EncryptedLink::new(near, Records::new(keys.0, keys.1));
    (near, EncryptedLink::new(far, Records::new(keys.1, keys.0)), faults)
}

/// What two ends of a connection tag with, for tests.
pub fn tags() -> [Tags; 2] {
    let keys = ([0x5a; 16], [0xa5; 16]);
    [Tags::new(keys.0, keys.1), Tags::new(keys.1, keys.0)]
}

/// One end of an in-memory link. Dropping it ends the stream for the other end.
#[derive(Debug)]
pub struct MemoryLink {
    pipe: Arc<Pipe>,
    side: usize,
    cuts: Cuts,
    tags: Option<Tags>,
}

impl MemoryLink {
    /// The handle by which a test breaks this link.
    pub fn faults(&self) -> Faults {
        Faults(self.pipe.clone())
    }
}

impl Link for MemoryLink {
    fn read(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut state = self.pipe.state()?;
        let now = self.pipe.clock.now();
        if state.stalled {
            return Err(ErrorKind::WouldBlock.into());
        }
        let incoming = &mut state.directions[1 - self.side];
        let ready = incoming.ready(now);
        if ready == 0 {
            let ended = incoming.bytes.is_empty() && incoming.end.is_some_and(|at| at <= now);
            return if ended { Ok(0) } else { Err(ErrorKind::WouldBlock.into()) };
        }
        let room = bufs.iter().map(|buf| buf.len()).sum::<usize>();
        let count = self.cuts.cut(ready.min(room));
        let mut left = count;
        for buf in bufs {
            let part = buf.len().min(left);
            incoming.bytes.read_exact(&mut buf[..part])?;
            left -= part;
        }
        incoming.arrived -= count;
        state.moved += count as u64;
        Ok(count)
    }

    fn write(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut state = self.pipe.state()?;
        let now = self.pipe.clock.now();
        let peer_gone = state.dropped[1 - self.side]
            && state.directions[1 - self.side].end.is_some_and(|at| at <= now);
        let outgoing = &mut state.directions[self.side];
        if peer_gone || outgoing.end.is_some() {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let offered = bufs.iter().map(|buf| buf.len()).sum::<usize>();
        let room = self.pipe.shape.capacity.saturating_sub(outgoing.bytes.len());
        if offered > 0 && room == 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        let count = self.cuts.cut(offered.min(room));
        let mut left = count;
        for buf in bufs {
            let part = buf.len().min(left);
            outgoing.bytes.extend(&buf[..part]);
            left -= part;
        }
        outgoing.dispatch(count, now, &self.pipe.shape);
        state.moved += count as u64;
        Ok(count)
    }

    fn finish(&mut self) -> io::Result<()> {
        let mut state = self.pipe.state()?;
        state.directions[self.side].close(self.pipe.clock.now(), &self.pipe.shape);
        Ok(())
    }

    /// Does nothing: there is no descriptor, and whoever moves the clock knows when to look.
    fn register(&mut self, _: &mio::Registry, _: mio::Token) -> io::Result<()> {
        Ok(())
    }

    fn carrier(&self) -> Carrier {
        Carrier::Memory
    }

    fn tags(&mut self) -> Option<&mut Tags> {
        self.tags.as_mut()
    }
}

impl Drop for MemoryLink {
    fn drop(&mut self) {
        let mut state = self.pipe.lock();
        state.dropped[self.side] = true;
        state.directions[self.side].close(self.pipe.clock.now(), &self.pipe.shape);
    }
}

/// Breaks a link: both of its ends, from any thread, whoever holds them.
#[derive(Clone, Debug)]
pub struct Faults(Arc<Pipe>);

impl Faults {
    /// From now on both ends fail with `ConnectionReset`; bytes on their way are lost.
    pub fn reset(&self) {
        self.0.lock().reset = true;
    }

    /// Nothing is delivered until [`resume`](Self::resume), in either direction. Writes are taken
    /// until the link is full.
    pub fn stall(&self) {
        self.0.lock().stalled = true;
    }

    /// Ends a stall. Bytes that became due during the stall are readable at once.
    pub fn resume(&self) {
        self.0.lock().stalled = false;
    }

    /// Bytes that the link's ends have written and read so far.
    pub fn moved(&self) -> u64 {
        self.0.lock().moved
    }

    /// The time when more bytes, or the end, become readable at either end. `None` if that takes
    /// more than time to pass.
    pub fn next_event(&self) -> Option<Duration> {
        let state = self.0.lock();
        let now = self.0.clock.now();
        if state.stalled || state.reset {
            return None;
        }
        let arrivals = state
            .directions
            .iter()
            .flat_map(|direction| &direction.pieces)
            .map(|piece| piece.arrives);
        let ends = state.directions.iter().filter_map(|direction| direction.end);
        arrivals.chain(ends).filter(|at| *at > now).min()
    }
}

#[derive(Debug)]
struct Pipe {
    clock: VirtualClock,
    shape: Shape,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The bytes that side 0 sends, and the bytes that side 1 sends.
    directions: [Direction; 2],
    dropped: [bool; 2],
    stalled: bool,
    reset: bool,
    /// Bytes that were written or read.
    moved: u64,
}

/// One direction of a link.
#[derive(Debug, Default)]
struct Direction {
    /// Bytes that were written and not yet read.
    bytes: VecDeque<u8>,
    /// How many of `bytes`, from the front, are known to have arrived.
    arrived: usize,
    /// The rest of `bytes`, in order of arrival.
    pieces: VecDeque<Piece>,
    /// When the last byte so far has left the sender.
    sent: Duration,
    /// When the end of the stream arrives.
    end: Option<Duration>,
}

#[derive(Debug)]
struct Piece {
    arrives: Duration,
    size: usize,
}

impl Direction {
    /// How many bytes can be read at `now`.
    fn ready(&mut self, now: Duration) -> usize {
        while let Some(piece) = self.pieces.pop_front_if(|piece| piece.arrives <= now) {
            self.arrived += piece.size;
        }
        self.arrived
    }

    /// Decides when the last `count` bytes arrive.
    fn dispatch(&mut self, mut count: usize, now: Duration, shape: &Shape) {
        self.sent = self.sent.max(now);
        while count > 0 {
            let size = count.min(PIECE);
            if let Some(rate) = shape.bytes_per_second {
                let nanos = size as u128 * 1_000_000_000 / u128::from(rate.max(1));
                self.sent += Duration::from_nanos(nanos as u64);
            }
            self.pieces.push_back(Piece { arrives: self.sent + shape.delay, size });
            count -= size;
        }
    }

    fn close(&mut self, now: Duration, shape: &Shape) {
        self.end.get_or_insert(self.sent.max(now) + shape.delay);
    }
}

impl Pipe {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics while it holds this lock")
    }

    fn state(&self) -> io::Result<MutexGuard<'_, State>> {
        let state = self.lock();
        if state.reset { Err(ErrorKind::ConnectionReset.into()) } else { Ok(state) }
    }
}

/// Where calls are cut short: a splitmix64 sequence.
#[derive(Debug)]
struct Cuts(u64);

impl Cuts {
    /// How many of `count` bytes a call moves: half the time all of them, otherwise at least one.
    fn cut(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        if count < 2 || z & 1 == 0 { count } else { 1 + (z >> 1) as usize % (count - 1) }
    }
}

/// The most bytes that arrive at once: a long write arrives piece by piece, as from a network.
const PIECE: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    fn read(link: &mut MemoryLink, room: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; room];
        let (front, back) = bytes.split_at_mut(room / 2);
        let count = link.read(&mut [IoSliceMut::new(front), IoSliceMut::new(back)])?;
        bytes.truncate(count);
        Ok(bytes)
    }

    /// Everything that can be read without moving the clock.
    fn drain(link: &mut MemoryLink) -> Vec<u8> {
        let mut all = Vec::new();
        while let Ok(bytes) = read(link, 4096) {
            if bytes.is_empty() {
                break;
            }
            all.extend(bytes);
        }
        all
    }

    fn write_all(link: &mut MemoryLink, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let count = link.write(&[IoSlice::new(bytes)]).unwrap();
            bytes = &bytes[count..];
        }
    }

    fn kind<T: std::fmt::Debug>(result: io::Result<T>) -> ErrorKind {
        result.unwrap_err().kind()
    }

    #[test]
    fn bytes_arrive_after_the_delay_and_not_before() {
        let clock = VirtualClock::new();
        let (mut a, mut b) = pair(clock.clone(), Shape { delay: 5 * MS, ..Shape::default() });
        write_all(&mut a, b"early");
        clock.advance(2 * MS);
        write_all(&mut a, b"late");
        assert_eq!(kind(read(&mut b, 9)), ErrorKind::WouldBlock);
        assert_eq!(a.faults().next_event(), Some(5 * MS));
        clock.advance(3 * MS - Duration::from_nanos(1));
        assert_eq!(kind(read(&mut b, 9)), ErrorKind::WouldBlock);
        clock.advance(Duration::from_nanos(1));
        assert_eq!(drain(&mut b), b"early");
        assert_eq!(a.faults().next_event(), Some(7 * MS));
        clock.advance(2 * MS);
        assert_eq!(drain(&mut b), b"late");
        assert_eq!(a.faults().next_event(), None);
    }

    #[test]
    fn a_slow_line_sends_one_byte_after_another() {
        let clock = VirtualClock::new();
        let shape = Shape { delay: MS, bytes_per_second: Some(1000), ..Shape::default() };
        let (mut a, mut b) = pair(clock.clone(), shape);
        write_all(&mut a, b"ab");
        write_all(&mut a, b"cd");
        clock.advance(3 * MS);
        assert_eq!(drain(&mut b), b"ab");
        clock.advance(2 * MS);
        assert_eq!(drain(&mut b), b"cd");
        assert_eq!(b.faults().next_event(), None);
        // An idle line does not save up time.
        clock.advance(100 * MS);
        write_all(&mut a, b"e");
        assert_eq!(b.faults().next_event(), Some(107 * MS));
    }

    #[test]
    fn a_full_link_takes_no_more_until_it_is_read() {
        let clock = VirtualClock::new();
        let (mut a, mut b) = pair(clock, Shape { capacity: 4, ..Shape::default() });
        write_all(&mut a, b"1234");
        assert_eq!(kind(a.write(&[IoSlice::new(b"5")])), ErrorKind::WouldBlock);
        let freed = read(&mut b, 4).unwrap().len();
        write_all(&mut a, &b"5678"[..freed]);
        assert_eq!(kind(a.write(&[IoSlice::new(b"9")])), ErrorKind::WouldBlock);
    }

    #[test]
    fn a_reset_is_seen_by_both_ends_and_loses_what_was_on_its_way() {
        let (mut a, mut b) = pair(VirtualClock::new(), Shape::default());
        write_all(&mut a, b"lost");
        a.faults().reset();
        for link in [&mut a, &mut b] {
            assert_eq!(kind(read(link, 4)), ErrorKind::ConnectionReset);
            assert_eq!(kind(link.write(&[IoSlice::new(b"x")])), ErrorKind::ConnectionReset);
        }
        assert_eq!(a.faults().next_event(), None);
    }

    #[test]
    fn a_stalled_link_delivers_when_it_resumes() {
        let clock = VirtualClock::new();
        let (mut a, mut b) = pair(clock.clone(), Shape { delay: MS, ..Shape::default() });
        let faults = a.faults();
        faults.stall();
        write_all(&mut a, b"held");
        drop(a);
        clock.advance(10 * MS);
        assert_eq!(kind(read(&mut b, 4)), ErrorKind::WouldBlock);
        assert_eq!(faults.next_event(), None);
        faults.resume();
        assert_eq!(drain(&mut b), b"held");
        assert_eq!(read(&mut b, 4).unwrap(), b"");
    }

    #[test]
    fn the_end_of_the_stream_comes_last_and_in_time() {
        let clock = VirtualClock::new();
        let (mut a, mut b) = pair(clock.clone(), Shape { delay: MS, ..Shape::default() });
        write_all(&mut a, b"bye");
        a.finish().unwrap();
        assert_eq!(kind(a.write(&[IoSlice::new(b"x")])), ErrorKind::BrokenPipe);
        assert_eq!(kind(read(&mut b, 3)), ErrorKind::WouldBlock);
        clock.advance(MS);
        assert_eq!(drain(&mut b), b"bye");
        assert_eq!(read(&mut b, 3).unwrap(), b"");
        // Only one direction has ended.
        write_all(&mut b, b"ok");
        clock.advance(MS);
        assert_eq!(drain(&mut a), b"ok");
        drop(a);
        assert_eq!(kind(b.write(&[IoSlice::new(b"x")])), ErrorKind::BrokenPipe);
    }

    #[test]
    fn calls_are_cut_within_floats() {
        let (mut a, mut b) = pair(VirtualClock::new(), Shape::default());
        let mut cuts = [0; 4];
        for _ in 0..100 {
            let sent = a.write(&[IoSlice::new(&[0; 64])]).unwrap();
            cuts[sent % 4] += 1;
            cuts[drain(&mut b).len() % 4] += 1;
        }
        assert!(cuts.iter().all(|count| *count > 0), "{cuts:?}");
    }

    proptest! {
        #[test]
        fn every_byte_arrives_once_and_in_order(
            seed: u64,
            capacity in 1usize..300,
            delay_us in 0u64..50,
            rate in proptest::option::of(1_000u64..1_000_000_000),
            steps in proptest::collection::vec((0usize..200, 1usize..200, 0u64..100), 1..60),
        ) {
            let clock = VirtualClock::new();
            let delay = Duration::from_micros(delay_us);
            let (mut a, mut b) =
                pair(clock.clone(), Shape { delay, bytes_per_second: rate, capacity, seed });
            let (mut sent, mut received) = (Vec::new(), Vec::new());
            for (offer, room, us) in steps {
                let bytes: Vec<u8> = (0..offer).map(|i| (sent.len() + i) as u8).collect();
                let (front, back) = bytes.split_at(offer / 3);
                match a.write(&[IoSlice::new(front), IoSlice::new(back)]) {
                    Ok(count) => sent.extend(&bytes[..count]),
                    Err(e) => {
                        prop_assert_eq!(e.kind(), ErrorKind::WouldBlock);
                        prop_assert_eq!(sent.len() - received.len(), capacity);
                    }
                }
                if let Ok(bytes) = read(&mut b, room) {
                    prop_assert!(!bytes.is_empty() && bytes.len() <= room);
                    received.extend(bytes);
                }
                prop_assert!(sent.len() - received.len() <= capacity);
                clock.advance(Duration::from_micros(us));
            }
            drop(a);
            while let Some(at) = b.faults().next_event() {
                clock.advance(at - clock.now());
            }
            received.extend(drain(&mut b));
            prop_assert_eq!(received, sent);
            prop_assert_eq!(read(&mut b, 1).unwrap(), b"");
        }
    }
}
