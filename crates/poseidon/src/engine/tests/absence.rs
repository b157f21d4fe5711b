//! Nodes that are silent, nodes that talk and do not read, and a node that was away itself.

use super::*;
use poseidon_link::Carrier;

const SECOND: Duration = Duration::from_secs(1);

/// Turns ten times a second, with both links ready, from one time to another.
fn drive(engine: &mut Engine, clock: &VirtualClock, until: Duration) {
    while clock.now() < until {
        clock.advance(SECOND / 10);
        for _ in 0..20 {
            [1, 2].iter().for_each(|&node| engine.handle_ready(NodeId(node), true, true, false));
            engine.turn(clock.now());
        }
    }
}

/// As [`engine`], with the clock of its links.
fn engine_with_clock() -> (Engine, [MemoryLink; 2], VirtualClock) {
    let clock = VirtualClock::new();
    let (one, far_one) = pair(clock.clone(), Shape::default());
    let (two, far_two) = pair(clock.clone(), Shape { seed: 7, ..Shape::default() });
    let links: Links = vec![(NodeId(1), Box::new(one)), (NodeId(2), Box::new(two))];
    let engine =
        Engine::new(NodeId(0), 3, links, SILENCE, Duration::ZERO).called("worker 0".into());
    (engine, [far_one, far_two], clock)
}

fn beat(far: &mut MemoryLink, from: u16) {
    let frame = frame(far, Header::bare(Kind::Heartbeat, NodeId(from), 0), &[]);
    let mut left = &frame[..];
    while !left.is_empty() {
        left = &left[far.write(&[IoSlice::new(left)]).unwrap()..];
    }
}

#[test]
fn a_node_that_was_away_does_not_take_others_for_dead() {
    let (mut engine, [mut one, mut two], clock) = engine_with_clock();
    let notes = Notes::default();
    engine.attach(Scribe::boxed(1, &[1, 2], true, &notes), Duration::ZERO);
    drive(&mut engine, &clock, SECOND);
    // Nothing has come meanwhile, because all were away. A turn comes before any event.
    clock.advance(10 * SILENCE);
    engine.turn(clock.now());
    assert_eq!(notes.read(), [""; 0]);
    // The others hear at once that it is there.
    let mut room = [0; 1000];
    let heard = one.read(&mut [IoSliceMut::new(&mut room)]).unwrap();
    assert!(heard > 0);
    // They are slow to come back, and in time.
    let now = clock.now();
    drive(&mut engine, &clock, now + SILENCE / 2);
    beat(&mut one, 1);
    beat(&mut two, 2);
    let now = clock.now();
    drive(&mut engine, &clock, now + SILENCE - SECOND);
    assert_eq!(notes.read(), [""; 0]);
    // Who does not come back is found all the same.
    drive(&mut engine, &clock, now + SILENCE + SECOND);
    let words = notes.read().join("; ");
    assert!(words.contains("node 1") && words.contains("not heard for 15s"), "{words}");
    assert!(!words.contains("away"), "{words}");
}

/// The others have closed their connections because they did not hear this node.
#[test]
fn a_node_that_was_given_up_while_it_was_away_says_so() {
    let (mut engine, [mut one, _two], clock) = engine_with_clock();
    let notes = Notes::default();
    engine.attach(Scribe::boxed(1, &[1, 2], true, &notes), Duration::ZERO);
    drive(&mut engine, &clock, SECOND);
    clock.advance(20 * SECOND);
    one.finish().unwrap();
    drive(&mut engine, &clock, 23 * SECOND);
    let words = notes.read().join("; ");
    for fact in ["worker 0 was away for 19.", "silent for 15s", "node 1", "closed the connection"] {
        assert!(words.contains(fact), "'{fact}' is not in: {words}");
    }
}

/// Long ago, or for a short time only: that has nothing to do with a connection that ends now.
#[test]
fn an_absence_that_explains_nothing_is_not_told() {
    for (away, after) in [(20 * SECOND, SILENCE + SECOND), (5 * SECOND, SECOND)] {
        let (mut engine, [mut one, mut two], clock) = engine_with_clock();
        let notes = Notes::default();
        engine.attach(Scribe::boxed(1, &[1, 2], true, &notes), Duration::ZERO);
        drive(&mut engine, &clock, SECOND);
        clock.advance(away);
        for _ in 0..4 {
            beat(&mut one, 1);
            beat(&mut two, 2);
            let now = clock.now();
            drive(&mut engine, &clock, now + after / 4);
        }
        assert_eq!(notes.read(), [""; 0]);
        one.finish().unwrap();
        let now = clock.now();
        drive(&mut engine, &clock, now + SECOND);
        let words = notes.read().join("; ");
        assert!(words.contains("closed the connection") && !words.contains("away"), "{words}");
    }
}

/// A link whose other end does not read and never stops talking.
struct Talker {
    /// What is left of the frame that is being read, back to front.
    left: Vec<u8>,
}

impl Link for Talker {
    fn read(&mut self, bufs: &mut [IoSliceMut<'_>]) -> std::io::Result<usize> {
        if self.left.is_empty() {
            self.left = Header::bare(Kind::Heartbeat, NodeId(1), 0).encode().to_vec();
            self.left.reverse();
            return Err(ErrorKind::WouldBlock.into());
        }
        let mut count = 0;
        for byte in bufs.iter_mut().flat_map(|buf| buf.iter_mut()) {
            let Some(next) = self.left.pop() else { break };
            *byte = next;
            count += 1;
        }
        Ok(count)
    }

    fn write(&mut self, _: &[IoSlice<'_>]) -> std::io::Result<usize> {
        Err(ErrorKind::BrokenPipe.into())
    }

    fn finish(&mut self) -> std::io::Result<()> {
        Ok(())
    }

    fn register(&mut self, _: &mio::Registry, _: mio::Token) -> std::io::Result<()> {
        Ok(())
    }

    fn carrier(&self) -> Carrier {
        Carrier::Tcp
    }
}

#[test]
fn a_node_that_talks_on_and_does_not_read_is_not_heard_for_ever() {
    let clock = VirtualClock::new();
    let (two, mut far_two) = pair(clock.clone(), Shape::default());
    let talker = Box::new(Talker { left: Vec::new() });
    let links: Links = vec![(NodeId(1), talker), (NodeId(2), Box::new(two))];
    let mut engine = Engine::new(NodeId(0), 3, links, SILENCE, Duration::ZERO);
    let notes = Notes::default();
    engine.attach(Scribe::boxed(1, &[1, 2], true, &notes), Duration::ZERO);
    for second in 1..=30 {
        beat(&mut far_two, 2);
        drive(&mut engine, &clock, second * SECOND);
    }
    let words = notes.read().join("; ");
    assert!(words.contains("node 1") && words.contains("reads no more"), "{words}");
    // At the end, too.
    engine.close(clock.now());
    let now = clock.now();
    drive(&mut engine, &clock, now + LINGER + SECOND);
    assert_eq!(engine.turn(clock.now()), Next::Stop);
}

/// What the system knows about a connection is in the error.
#[test]
fn an_error_says_what_tcp_knows() {
    struct Lossy;
    impl Link for Lossy {
        fn read(&mut self, _: &mut [IoSliceMut<'_>]) -> std::io::Result<usize> {
            Err(ErrorKind::WouldBlock.into())
        }
        fn write(&mut self, _: &[IoSlice<'_>]) -> std::io::Result<usize> {
            Err(ErrorKind::WouldBlock.into())
        }
        fn finish(&mut self) -> std::io::Result<()> {
            Ok(())
        }
        fn register(&mut self, _: &mio::Registry, _: mio::Token) -> std::io::Result<()> {
            Ok(())
        }
        fn carrier(&self) -> Carrier {
            Carrier::Tcp
        }
        fn delivery(&self) -> Option<poseidon_link::Delivery> {
            let since_acknowledged = 12 * SECOND;
            Some(poseidon_link::Delivery {
                unacknowledged: 5,
                resent: 7,
                since_acknowledged,
                ..Default::default()
            })
        }
    }
    let links: Links = vec![(NodeId(1), Box::new(Lossy))];
    let mut engine = Engine::new(NodeId(0), 2, links, SILENCE, Duration::ZERO);
    let notes = Notes::default();
    engine.attach(Scribe::boxed(1, &[1], true, &notes), Duration::ZERO);
    drive(&mut engine, &VirtualClock::new(), SILENCE + SECOND);
    let words = notes.read().join("; ");
    for fact in ["node 1", "not heard for 15s", "5 segments are unacknowledged", "losing packets"] {
        assert!(words.contains(fact), "'{fact}' is not in: {words}");
    }
}
