//! Measures the way between two nodes over a connection of their own: round trips and clocks, the
//! largest packet, bytes per second both ways.
//!
//! Both ends take the same steps in turn, the one that has called first. Every wait has a deadline.
//! What is sent is of no value, so it has no tags: who changes it on its way changes a measurement.

use super::{Way, WayFailure};
use poseidon_core::Rate;
use poseidon_link::path::{Token, largest_packet};
use poseidon_link::{SOCKET_BUFFER, Stream};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// What is measured, and by whom.
pub(super) struct Measurement {
    /// Whether this end has called.
    pub(super) calls: bool,
    pub(super) token: Token,
    pub(super) from: IpAddr,
    /// Where the other node answers packets. `None`: packets are not probed.
    pub(super) echo: Option<SocketAddr>,
    /// The largest packet that both interfaces take.
    pub(super) packet: Option<u32>,
    /// Whether bytes per second are measured.
    pub(super) bytes: bool,
}

/// Takes this end's part and fills in `way`, as far as it gets.
pub(super) fn measure(mut stream: Stream, what: &Measurement, way: &mut Way) {
    if let Err(failure) = steps(&mut stream, what, way) {
        way.failure = Some(failure);
    }
    if let Some(facts) = stream.path_facts() {
        (way.segments, way.resent) = (Some(facts.sent), Some(facts.resent));
    }
}

fn steps(stream: &mut Stream, what: &Measurement, way: &mut Way) -> Result<(), WayFailure> {
    let broken = |e: io::Error| WayFailure::Broken { why: e.to_string() };
    stream.widen(SOCKET_BUFFER).map_err(broken)?;
    stream.set_deadline(Some(Instant::now() + PINGS_LIMIT));
    let round_trip = match what.calls {
        true => {
            let pinged = ping(stream).map_err(broken)?;
            way.clock_ahead_us = Some(pinged.clock_ahead_us);
            pinged.round_trip
        }
        false => answer_pings(stream).map_err(broken)?,
    };
    way.round_trip_us = Some(round_trip.as_secs_f64() * 1e6);

    if let (Some(echo), Some(expected)) = (what.echo, what.packet) {
        way.packet_expected = Some(expected);
        let patience = PACKET + 4 * round_trip;
        for turn in [true, false] {
            if turn == what.calls {
                let found =
                    largest_packet(what.from, echo, what.token, expected as usize, patience);
                // Without a socket for datagrams nothing is known of packets.
                way.packet = found.ok().flatten().map(|size| size as u32);
                stream.set_deadline(Some(Instant::now() + PINGS_LIMIT));
                stream.write_all(&[0]).map_err(broken)?;
            } else {
                stream.set_deadline(Some(Instant::now() + PACKETS_LIMIT));
                stream.read_exact(&mut [0]).map_err(broken)?;
            }
        }
    }
    if what.bytes {
        for turn in [true, false] {
            if turn == what.calls {
                way.bits_per_second = Some(send_trains(stream, round_trip)?);
            } else {
                receive_trains(stream).map_err(broken)?;
            }
        }
    }
    Ok(())
}

struct Pinged {
    round_trip: Duration,
    clock_ahead_us: f64,
}

/// The clock of the other end is read in the middle of the shortest round trip. Then the other end is
/// told how long that was.
fn ping(stream: &mut Stream) -> io::Result<Pinged> {
    let mut best: Option<Pinged> = None;
    for number in 0..PINGS {
        let (clock, began) = (unix_us(), Instant::now());
        stream.write_all(&[number; PING])?;
        let mut answer = [0; PING];
        stream.read_exact(&mut answer)?;
        let round_trip = began.elapsed();
        let theirs = f64::from_le_bytes(answer);
        let clock_ahead_us = theirs - (clock + round_trip.as_secs_f64() * 1e6 / 2.0);
        if best.as_ref().is_none_or(|best| round_trip < best.round_trip) {
            best = Some(Pinged { round_trip, clock_ahead_us });
        }
    }
    let best = best.expect("there is at least one ping");
    stream.write_all(&best.round_trip.as_secs_f64().to_le_bytes())?;
    Ok(best)
}

fn answer_pings(stream: &mut Stream) -> io::Result<Duration> {
    let mut ping = [0; PING];
    for _ in 0..PINGS {
        stream.read_exact(&mut ping)?;
        stream.write_all(&unix_us().to_le_bytes())?;
    }
    stream.read_exact(&mut ping)?;
    Duration::try_from_secs_f64(f64::from_le_bytes(ping))
        .map_err(|e| io::Error::new(ErrorKind::InvalidData, e))
}

fn unix_us() -> f64 {
    // A clock before 1970 is as wrong as one that says 1970.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_secs_f64() * 1e6
}

/// Sends trains of bytes until one can be judged. Returns bits per second.
fn send_trains(stream: &mut Stream, round_trip: Duration) -> Result<u64, WayFailure> {
    let piece = vec![0; PIECE];
    let enough = LONG_ENOUGH + (round_trip * 10).min(LONGEST_WAIT);
    let (bytes, fastest) = judged_train(enough, |bytes| send_train(stream, &piece, bytes))?;
    let end = stream.write_all(&0u64.to_le_bytes());
    end.map_err(|e| WayFailure::Broken { why: e.to_string() })?;
    let seconds = fastest.saturating_sub(round_trip).as_secs_f64();
    Ok(Rate::of(bytes as u64, seconds).bits())
}

/// Sends trains, each length twice the one before, until the fastest of a length takes `enough`. Returns
/// the length and that time.
///
/// The fastest counts: what else a machine does can slow a train, and nothing makes one faster than the
/// way. A single slow train says nothing about its length. On a machine that stands still for a moment it
/// may be a short one, and shapers let short trains pass at any speed.
fn judged_train<E>(
    enough: Duration,
    mut send: impl FnMut(usize) -> Result<Duration, E>,
) -> Result<(usize, Duration), E> {
    let mut bytes = SHORTEST;
    loop {
        let mut fastest = send(bytes)?;
        for _ in 1..TRAINS {
            if fastest < enough && bytes < LONGEST {
                break;
            }
            fastest = fastest.min(send(bytes)?);
        }
        if fastest >= enough || bytes >= LONGEST {
            return Ok((bytes, fastest));
        }
        bytes *= 2;
    }
}

/// Sends one train. Returns how long it took until its acknowledgement came.
fn send_train(stream: &mut Stream, piece: &[u8], bytes: usize) -> Result<Duration, WayFailure> {
    let began = Instant::now();
    stream.set_deadline(Some(began + TRAIN_LIMIT));
    match write_train(stream, piece, bytes) {
        Ok(()) => Ok(began.elapsed()),
        Err(e) if e.kind() == ErrorKind::TimedOut => Err(WayFailure::Stalled { bytes }),
        Err(e) => Err(WayFailure::Broken { why: e.to_string() }),
    }
}

fn write_train(stream: &mut Stream, piece: &[u8], bytes: usize) -> io::Result<()> {
    stream.write_all(&(bytes as u64).to_le_bytes())?;
    let mut left = bytes;
    while left > 0 {
        let some = left.min(piece.len());
        stream.write_all(&piece[..some])?;
        left -= some;
    }
    stream.read_exact(&mut [0])
}

fn receive_trains(stream: &mut Stream) -> io::Result<()> {
    let mut scrap = vec![0; PIECE];
    loop {
        // The sender gives up first, and hangs up.
        stream.set_deadline(Some(Instant::now() + TRAIN_LIMIT + PINGS_LIMIT));
        let mut head = [0; 8];
        stream.read_exact(&mut head)?;
        let mut left = u64::from_le_bytes(head);
        if left > LONGEST as u64 {
            let why = format!("a train of {left} bytes, at most {LONGEST}");
            return Err(io::Error::new(ErrorKind::InvalidData, why));
        }
        if left == 0 {
            return Ok(());
        }
        while left > 0 {
            let some = (left as usize).min(scrap.len());
            left -= stream.read(&mut scrap[..some]).and_then(|count| match count {
                0 => Err(ErrorKind::UnexpectedEof.into()),
                count => Ok(count as u64),
            })?;
        }
        stream.write_all(&[0])?;
    }
}

const PINGS: u8 = 20;
/// Bytes of a ping, and of its answer, which is a time.
const PING: usize = 8;
/// How long small messages may take.
const PINGS_LIMIT: Duration = Duration::from_secs(5);
/// How long a packet's answer is awaited, beside four round trips.
const PACKET: Duration = Duration::from_millis(200);
/// How long the other end may probe packets: 17 sizes, three times each.
const PACKETS_LIMIT: Duration = Duration::from_secs(30);
const PIECE: usize = 256 << 10;
const SHORTEST: usize = 32 << 10;
/// No train is longer: 27 ms at 10 Gbit/s.
const LONGEST: usize = 32 << 20;
/// A train that takes this long, and ten round trips, is judged. At 1 Gbit/s it is of 8 MiB.
const LONG_ENOUGH: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_millis(500);
/// Trains of a length that is judged.
const TRAINS: usize = 4;
/// A train that takes longer has stalled: it was the first one, and slower than 44 kbit/s.
const TRAIN_LIMIT: Duration = Duration::from_secs(6);

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    /// A shaper of 100 Mbit/s that lets 100 kB pass at once, on a machine that stands still in every third
    /// train.
    #[test]
    fn a_moment_of_standing_still_does_not_make_a_short_train_count() {
        let mut trains = 0;
        let send = |bytes: usize| {
            trains += 1;
            let stood_still = if trains % 3 == 1 { 0.06 } else { 0.0 };
            let seconds = bytes.saturating_sub(100_000) as f64 * 8.0 / 100e6 + stood_still;
            Ok::<_, Infallible>(Duration::from_secs_f64(seconds))
        };
        let (bytes, took) = judged_train(LONG_ENOUGH, send).unwrap();
        let mbit = bytes as f64 * 8.0 / took.as_secs_f64() / 1e6;
        assert!((100.0..120.0).contains(&mbit), "{mbit} Mbit/s by {bytes} bytes");
    }

    #[test]
    fn no_train_is_longer_than_the_longest() {
        let at_once = |_| Ok::<_, Infallible>(Duration::ZERO);
        assert_eq!(judged_train(LONG_ENOUGH, at_once), Ok((LONGEST, Duration::ZERO)));
    }
}
