//! One engine, links whose other ends the tests write by hand, and channels that write down what
//! happens to them.

mod absence;

use super::channel::Gone;
use super::*;
use crate::engine::traffic::LaneCounters;
use poseidon_core::encoding::Block;
use poseidon_core::{Clock, Epoch};
use poseidon_link::memory::{MemoryLink, Shape, VirtualClock, pair, tagged_pair};
use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

const SILENCE: Duration = Duration::from_secs(15);

/// Takes every frame, or none as long as it is told to.
struct Scribe {
    id: ChannelId,
    members: Vec<NodeId>,
    awaits: bool,
    counters: LaneCounters,
    notes: Notes,
    /// The clock of the frame that comes from each node.
    arriving: [u64; 3],
}

/// What a scribe and its test share.
#[derive(Clone, Default)]
struct Notes {
    written: Arc<Mutex<Vec<String>>>,
    /// It has no place for frames yet.
    reluctant: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
}

impl Notes {
    fn reluctant() -> Self {
        Self { reluctant: Arc::new(true.into()), ..Self::default() }
    }

    fn write(&self, words: String) {
        self.written.lock().unwrap().push(words);
    }

    fn read(&self) -> Vec<String> {
        self.written.lock().unwrap().clone()
    }
}

impl Scribe {
    fn boxed(id: u32, members: &[u16], awaits: bool, notes: &Notes) -> Box<Self> {
        let members = members.iter().map(|&node| NodeId(node)).collect();
        let (counters, notes) = (LaneCounters::default(), notes.clone());
        Box::new(Self { id: ChannelId(id), members, awaits, counters, notes, arriving: [0; 3] })
    }
}

// SAFETY: its messages and landings have no regions.
unsafe impl Channel for Scribe {
    fn id(&self) -> ChannelId {
        self.id
    }

    fn epoch(&self) -> Epoch {
        Epoch::FIRST
    }

    fn members(&self) -> &[NodeId] {
        &self.members
    }

    fn counters(&self) -> &LaneCounters {
        &self.counters
    }

    fn open(&mut self, header: &Header, _: Duration) -> Result<Landing, Error> {
        if self.notes.reluctant.load(Ordering::Relaxed) {
            return Ok(Landing::Later);
        }
        self.arriving[header.sender.index()] = header.clock.0;
        Ok(Landing::Combine { width: 1 })
    }

    fn combine(&mut self, _: NodeId, _: &[u8]) {}

    fn landed(&mut self, from: NodeId) {
        self.notes.write(format!("frame {} of {from}", self.arriving[from.index()]));
    }

    fn sent(&mut self, _: Sent) -> bool {
        false
    }

    fn handle_goodbye(&mut self, from: NodeId) {
        self.notes.write(format!("goodbye of {from}"));
    }

    fn handle_gone(&mut self, node: NodeId, why: &Gone, _: bool) -> Result<(), Error> {
        let (node, how) = (format!("node {node}"), format!("{why:?}"));
        Err(Error::Lost { node, how, awaited: None })
    }

    fn aborted(&self, from: NodeId, _: u32, reason: String) -> Error {
        Error::Aborted { node: format!("node {from}"), reason }
    }

    fn awaits(&self, node: NodeId) -> bool {
        self.awaits && self.members.contains(&node)
    }

    fn needs_driver(&self) -> bool {
        true
    }

    fn is_awaited(&self) -> bool {
        false
    }

    fn poll(&mut self, _: Duration, _: &mut Outgoing<'_>) -> Result<Polled, Error> {
        Ok(Polled { over: self.notes.over.load(Ordering::Relaxed), ..Polled::default() })
    }

    fn tick(&mut self, _: Duration) -> Result<(), Error> {
        Ok(())
    }

    fn fail(&mut self, error: Error) -> LastWords {
        self.notes.write(error.to_string());
        LastWords { reason: error.to_string(), speaker: 0 }
    }
}

/// The engine of node 0 of three, and the other ends of its links. Frames on the second have tags.
fn engine() -> (Engine, [MemoryLink; 2]) {
    let clock = VirtualClock::new();
    let (one, far_one) = pair(clock.clone(), Shape::default());
    let (two, far_two) = tagged_pair(clock, Shape { seed: 7, ..Shape::default() });
    let links: Links = vec![(NodeId(1), Box::new(one)), (NodeId(2), Box::new(two))];
    (Engine::new(NodeId(0), 3, links, SILENCE, Duration::ZERO), [far_one, far_two])
}

/// Turns until nothing more happens.
fn settle(engine: &mut Engine) {
    let mut quiet = 0;
    while quiet < 10 {
        // An in-memory read may be short though more is there.
        [1, 2].iter().for_each(|&node| engine.handle_ready(NodeId(node), true, true, false));
        let before = engine.moved();
        let again = engine.turn(Duration::ZERO) == Next::Again;
        quiet = if again || engine.moved() > before { 0 } else { quiet + 1 };
    }
}

/// Writes a frame of node `from` to the engine, which reads meanwhile.
fn say(engine: &mut Engine, far: &mut MemoryLink, header: Header, payload: &[u8]) {
    let frame = frame(far, header, payload);
    write(engine, far, &frame);
}

/// The bytes of a frame, with tags where the link has them.
fn frame(far: &mut MemoryLink, header: Header, payload: &[u8]) -> Vec<u8> {
    let head = header.encode();
    let Some(tags) = far.tags() else { return [&head[..], payload].concat() };
    let mut frame = [&head[..], &tags.sealer.seal(&head)].concat();
    if !payload.is_empty() {
        frame.extend_from_slice(payload);
        frame.extend(tags.sealer.seal(payload));
    }
    frame
}

/// Writes bytes to the engine, which reads meanwhile.
fn write(engine: &mut Engine, far: &mut MemoryLink, bytes: &[u8]) {
    let mut left = bytes;
    while !left.is_empty() {
        match far.write(&[IoSlice::new(left)]) {
            Ok(taken) => left = &left[taken..],
            // A link that is parked may stay full, and then the rest is nobody's business.
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                let before = engine.moved();
                settle(engine);
                assert!(engine.moved() > before, "the engine does not read");
            }
            Err(e) => panic!("{e}"),
        }
    }
    settle(engine);
}

fn header(kind: Kind, from: u16, channel: u32, length: usize) -> Header {
    let (channel, epoch) = (ChannelId(channel), Epoch::FIRST);
    Header { channel, epoch, ..Header::bare(kind, NodeId(from), length as u32) }
}

fn data(from: u16, channel: u32, clock: u64, length: usize) -> Header {
    Header { clock: Clock(clock), ..header(Kind::Message, from, channel, length) }
}

#[test]
fn frames_wait_for_the_channel_they_belong_to() {
    for awaits in [false, true] {
        let (mut engine, [mut one, _two]) = engine();
        let (first, second) = (Notes::default(), Notes::default());
        engine.attach(Scribe::boxed(1, &[1, 2], awaits, &first), Duration::ZERO);
        say(&mut engine, &mut one, data(1, 2, 5, 3), b"abc");
        say(&mut engine, &mut one, header(Kind::Bye, 1, 2, 0), &[]);
        say(&mut engine, &mut one, data(1, 1, 6, 3), b"abc");
        // Nobody waits behind a frame of another channel if somebody awaits something.
        assert_eq!(first.read().len(), usize::from(awaits));
        engine.attach(Scribe::boxed(2, &[1, 2], awaits, &second), Duration::ZERO);
        settle(&mut engine);
        assert_eq!(first.read(), ["frame 6 of 1"]);
        assert_eq!(second.read(), ["frame 5 of 1", "goodbye of 1"]);
    }
}

#[test]
fn frames_of_a_channel_that_is_closed_are_thrown_away() {
    let (mut engine, [mut one, _two]) = engine();
    let (first, second) = (Notes::default(), Notes::default());
    engine.attach(Scribe::boxed(1, &[1, 2], false, &first), Duration::ZERO);
    engine.attach(Scribe::boxed(2, &[1, 2], false, &second), Duration::ZERO);
    second.over.store(true, Ordering::Relaxed);
    settle(&mut engine);
    say(&mut engine, &mut one, data(1, 2, 5, 3), b"abc");
    say(&mut engine, &mut one, header(Kind::Abort, 1, 2, 3), b"why");
    say(&mut engine, &mut one, data(1, 1, 6, 0), &[]);
    assert_eq!(first.read(), ["frame 6 of 1"]);
    assert!(second.read().is_empty());
}

/// Its last words came before the channel was opened here, and its departure too.
#[test]
fn the_reason_of_a_node_that_has_left_since_is_heard() {
    let (mut engine, [mut one, _two]) = engine();
    say(&mut engine, &mut one, header(Kind::Abort, 1, 2, 3), b"why");
    say(&mut engine, &mut one, Header::bare(Kind::Bye, NodeId(1), 0), &[]);
    let notes = Notes::default();
    engine.attach(Scribe::boxed(2, &[1, 2], true, &notes), Duration::ZERO);
    settle(&mut engine);
    assert_eq!(notes.read(), ["node 1 stopped the job: why"]);
}

#[test]
fn a_channel_that_comes_after_the_end_fails_at_once() {
    let (mut engine, _far) = engine();
    engine.close(Duration::ZERO);
    engine.turn(Duration::ZERO);
    let notes = Notes::default();
    engine.attach(Scribe::boxed(2, &[1, 2], true, &notes), Duration::ZERO);
    engine.turn(Duration::ZERO);
    let words = notes.read().join("; ");
    assert!(words.contains("has left the job"), "{words}");
}

/// A node that is not in a channel can neither end it nor speak for its members.
#[test]
fn strangers_to_a_channel_lose_their_connection_and_nobody_else_does() {
    let frames = [header(Kind::Bye, 2, 1, 0), header(Kind::Abort, 2, 1, 3), data(2, 1, 5, 3)];
    for header in frames {
        for early in [false, true] {
            let (mut engine, [mut one, mut two]) = engine();
            let (pair, all) = (Notes::default(), Notes::default());
            engine.attach(Scribe::boxed(2, &[1, 2], true, &all), Duration::ZERO);
            let channel = Scribe::boxed(1, &[1], true, &pair);
            if early {
                say(&mut engine, &mut two, header, &b"why"[..header.length as usize]);
                engine.attach(channel, Duration::ZERO);
                settle(&mut engine);
            } else {
                engine.attach(channel, Duration::ZERO);
                say(&mut engine, &mut two, header, &b"why"[..header.length as usize]);
            }
            say(&mut engine, &mut one, data(1, 1, 9, 0), &[]);
            assert_eq!(pair.read(), ["frame 9 of 1"], "{header:?}");
            let words = all.read().join("; ");
            assert!(words.contains("node 2") && words.contains("Garbage"), "{header:?}: {words}");
        }
    }
}

/// What was kept aside is forgotten with its channel; then there is room for what is behind it.
#[test]
fn a_link_that_is_full_of_frames_of_a_closed_channel_goes_on() {
    let (mut engine, [mut one, _two]) = engine();
    let (first, second, third) = (Notes::default(), Notes::reluctant(), Notes::reluctant());
    engine.attach(Scribe::boxed(1, &[1, 2], true, &first), Duration::ZERO);
    engine.attach(Scribe::boxed(2, &[1, 2], false, &second), Duration::ZERO);
    engine.attach(Scribe::boxed(3, &[1, 2], false, &third), Duration::ZERO);
    let large = vec![0; 48 << 20];
    say(&mut engine, &mut one, data(1, 2, 4, large.len()), &large);
    // There is no room for this one: it stays in the link, and so does what follows.
    let parked = data(1, 3, 5, 17 << 20).encode();
    let mut left = &parked[..];
    while !left.is_empty() {
        left = &left[one.write(&[IoSlice::new(left)]).unwrap()..];
    }
    settle(&mut engine);
    let before = engine.moved();
    assert!(one.write(&[IoSlice::new(&[0; 1000])]).unwrap() > 0);
    settle(&mut engine);
    assert_eq!(engine.moved(), before, "the link is parked");
    second.over.store(true, Ordering::Relaxed);
    settle(&mut engine);
    assert!(engine.moved() > before, "the link is read again");
}

/// It would wait for heartbeats, and then say that this node is the dead one.
#[test]
fn a_node_that_is_given_up_hears_the_end_of_the_connection() {
    let (mut engine, [mut one, _two]) = engine();
    let notes = Notes::default();
    engine.attach(Scribe::boxed(1, &[1, 2], true, &notes), Duration::ZERO);
    say(&mut engine, &mut one, header(Kind::Control, 1, 1, 0), &[]);
    assert!(notes.read().join("; ").contains("Garbage"));
    let read = one.read(&mut [IoSliceMut::new(&mut [0; 1000])]);
    assert_eq!(read.map_err(|e| e.kind()), Ok(0));
}

/// A node with much to send to two others.
struct Flood {
    engine: Engine,
    clock: VirtualClock,
    far: [MemoryLink; 2],
    /// What has come out: when, at which end, and how many bytes.
    seen: Vec<(Duration, usize, usize)>,
}

impl Flood {
    fn new(budget: &Arc<Budget>) -> Self {
        let clock = VirtualClock::new();
        let (one, far_one) = pair(clock.clone(), Shape::default());
        let (two, far_two) = pair(clock.clone(), Shape { seed: 7, ..Shape::default() });
        let links: Links = vec![(NodeId(1), Box::new(one)), (NodeId(2), Box::new(two))];
        let mut engine =
            Engine::new(NodeId(0), 3, links, SILENCE, Duration::ZERO).within(budget.clone());
        let payload: Arc<[f32]> = vec![0.0; 16 << 10].into();
        for peer in engine.peers.iter_mut().flatten() {
            for _ in 0..200 {
                let header = data(0, 1, 1, size_of_val(&*payload));
                peer.send(message(header, Payload::Shared(Block::Whole(payload.clone()))));
            }
        }
        Self { engine, clock, far: [far_one, far_two], seen: Vec::new() }
    }

    fn run(&mut self, until: Duration) {
        let mut room = vec![0; 1 << 20];
        while self.clock.now() < until {
            let now = self.clock.now();
            let mut wake = now;
            for turns in 0.. {
                assert!(turns < 1000, "the engine spins");
                [1, 2].iter().for_each(|&n| self.engine.handle_ready(NodeId(n), true, true, false));
                let before = self.engine.moved();
                match self.engine.turn(now) {
                    Next::Sleep(at) if self.engine.moved() == before => {
                        wake = at;
                        break;
                    }
                    next => assert_ne!(next, Next::Stop),
                }
                for (end, far) in self.far.iter_mut().enumerate() {
                    while let Ok(bytes) = far.read(&mut [IoSliceMut::new(&mut room)]) {
                        self.seen.push((now, end, bytes));
                    }
                }
            }
            assert!(wake > now, "an engine that has nothing to do until now spins");
            self.clock.advance(wake - now);
        }
    }

    /// Bytes that came out at either end in a time.
    fn sent(&self, times: std::ops::Range<Duration>) -> [f64; 2] {
        let of = |end: usize| {
            let seen = self.seen.iter().filter(|(at, of, _)| *of == end && times.contains(at));
            seen.map(|(_, _, bytes)| *bytes as f64).sum()
        };
        [of(0), of(1)]
    }
}

#[test]
fn a_budget_is_kept_over_any_second_and_peers_have_equal_parts() {
    let second = Duration::from_secs(1);
    let (wide, narrow) = ("40mbit".parse().ok(), "8mbit".parse().ok());
    let budget = Arc::new(Budget::new(wide, 1));
    let mut flood = Flood::new(&budget);
    flood.run(2 * second);
    let changed = flood.clock.now();
    budget.set_rate(narrow, changed);
    flood.run(4 * second);
    for (rate, begin, end) in [(5e6, Duration::ZERO, changed), (1e6, changed, flood.clock.now())] {
        // Payload of full packets.
        let share = rate * 1448.0 / 1514.0;
        let begins = flood.seen.iter().map(|(at, ..)| *at);
        let mut seconds = 0;
        for begin in begins.filter(|at| (begin..=end - second).contains(at)) {
            let [one, two] = flood.sent(begin..begin + second);
            let part = (one + two) / share;
            assert!((0.97..=1.03).contains(&part), "{part} of the budget from {begin:?} on");
            assert!((0.9..1.1).contains(&(one / two)), "{one} bytes and {two} bytes");
            seconds += 1;
        }
        assert!(seconds > 10);
    }
    // Nothing waits for a budget that is lifted.
    budget.set_rate(None, flood.clock.now());
    let now = flood.clock.now();
    flood.run(now + Duration::from_nanos(1));
    assert!(!flood.engine.peers.iter().flatten().any(Peer::has_unsent));
}

/// Others would take it for dead.
#[test]
fn a_heartbeat_goes_out_though_the_budget_is_spent() {
    let budget = Arc::new(Budget::new("10kbit".parse().ok(), 1));
    let mut flood = Flood::new(&budget);
    flood.engine.peers[2].as_mut().unwrap().discard(|_, _, _| {});
    flood.run(Duration::from_secs(10));
    let [_, beats] = flood.sent(Duration::ZERO..Duration::from_secs(10));
    assert!(beats >= 3.0 * Header::SIZE as f64, "{beats} bytes of heartbeats");
}

/// It may not know that there is room for the rest.
#[test]
fn a_peer_that_stops_in_the_middle_of_a_frame_is_given_signs() {
    let (mut engine, [mut far, _two]) = engine();
    let notes = Notes::default();
    engine.attach(Scribe::boxed(1, &[1], true, &notes), Duration::ZERO);
    let whole = frame(&mut far, data(1, 1, 3, 100), &[7; 100]);
    let (begin, rest) = whole.split_at(60);
    write(&mut engine, &mut far, begin);
    let (mut signs, mut heard) = (Vec::new(), Vec::new());
    for now in (1..=200).map(Duration::from_millis) {
        // In-memory links take and give a few bytes at a time.
        for _ in 0..20 {
            engine.handle_ready(NodeId(1), true, true, false);
            while engine.turn(now) == Next::Again {}
            let mut bytes = [0; Header::SIZE];
            let count = far.read(&mut [IoSliceMut::new(&mut bytes)]).unwrap_or(0);
            heard.extend_from_slice(&bytes[..count]);
        }
        if let Ok(sign) = <[u8; Header::SIZE]>::try_from(&heard[..]) {
            assert_eq!(Header::decode(&sign).unwrap().kind, Kind::Heartbeat);
            signs.push(now.as_millis());
            heard.clear();
        }
    }
    assert_eq!(signs, [20, 40, 80, 160]);
    write(&mut engine, &mut far, rest);
    assert_eq!(notes.read(), ["frame 3 of 1"]);
}

/// Whatever is done to frames on their way, nothing comes of them, and the link is given up.
#[test]
fn a_frame_that_was_changed_repeated_moved_or_left_out_is_noticed() {
    // Two frames of 8 bytes, each of them a header, a tag, a payload and a tag.
    const FRAME: usize = 40 + 16 + 8 + 16;
    type Attack = fn(&mut Vec<u8>);
    let attacks: [(&str, usize, Attack); 9] = [
        ("a bit of the header", 1, |bytes| bytes[FRAME + 24] ^= 4),
        ("another header that has a checksum", 1, |bytes| {
            let head = bytes[FRAME..].first_chunk().unwrap();
            let other = Header { clock: Clock(3), ..Header::decode(head).unwrap() };
            bytes[FRAME..FRAME + 40].copy_from_slice(&other.encode());
        }),
        ("the header's tag", 1, |bytes| bytes[FRAME + 40] ^= 1),
        ("a bit of the payload", 1, |bytes| bytes[FRAME + 57] ^= 0x80),
        // TCP's checksum is the same.
        ("two words of the payload", 1, |bytes| {
            let words: [u8; 4] = bytes[FRAME + 56..][..4].try_into().unwrap();
            bytes[FRAME + 56..][..4].copy_from_slice(&[words[2], words[3], words[0], words[1]]);
        }),
        ("the payload's tag", 1, |bytes| *bytes.last_mut().unwrap() ^= 1),
        ("twice the same", 2, |bytes| bytes.extend_from_within(FRAME..)),
        ("one left out", 0, |bytes| drop(bytes.drain(..FRAME))),
        ("in another order", 0, |bytes| bytes.rotate_left(FRAME)),
    ];
    for (what, whole, attack) in attacks {
        let (mut engine, [_one, mut two]) = engine();
        let notes = Notes::default();
        engine.attach(Scribe::boxed(1, &[1, 2], true, &notes), Duration::ZERO);
        let mut bytes = frame(&mut two, data(2, 1, 1, 8), b"12345678");
        bytes.extend(frame(&mut two, data(2, 1, 2, 8), b"abcdefgh"));
        attack(&mut bytes);
        write(&mut engine, &mut two, &bytes);
        let read = notes.read();
        let (frames, rest) = read.split_at(whole);
        assert!(frames.iter().zip(1..).all(|(f, n)| f == &format!("frame {n} of 2")), "{read:?}");
        assert!(rest.len() == 1 && rest[0].contains("Changed"), "{what}: {read:?}");
    }
}
