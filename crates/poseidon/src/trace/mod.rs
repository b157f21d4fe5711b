//! What a node notes of itself while it works: which layer was sent, awaited and rebuilt when, and
//! what its lanes did meanwhile (ADR 0028).
//!
//! No event is noted before somebody [switches it on](Recorder::switch_on). Then each event takes one
//! slot of a ring that was made before: no lock, no memory. Rings keep the last events, so a job of
//! weeks takes no more memory than one of a minute.
//!
//! A few totals are always counted, because people look at jobs that nobody has prepared for that
//! (ADR 0029): steps, waits by layer, and twice a second what the links of a lane have moved.
//!
//! * `ring`: the last records. `session`, `group`: what is noted of one session, of one group.
//!   `chrome`: records as a file that trace viewers open.

mod chrome;
mod group;
mod ring;
#[cfg(test)]
mod ring_model;
#[cfg(test)]
mod ring_tests;
mod session;

pub(crate) use chrome::{Facts, Names, write};
pub(crate) use group::{BegunOperation, GroupTrace};
use ring::Ring;
use ring_parts::WORDS;
pub(crate) use session::SessionTrace;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// What a ring is made of. Its model has loom's atomics in their place.
mod ring_parts {
    pub(super) use std::sync::atomic::{AtomicU64, Ordering, fence};

    /// How many words a record has.
    pub(super) const WORDS: usize = 7;
}

/// What one node notes.
pub(crate) struct Recorder {
    /// Times are nanoseconds since then.
    epoch: Instant,
    /// The same moment by the machine's clock, since 1970.
    wall: Duration,
    /// By lane: what is counted always.
    totals: Box<[LaneTotals]>,
    /// Collective operations that programs have begun.
    operations: AtomicU64,
    /// By the number of their kind: operations that are over, while they were noted.
    kinds: [KindTotals; KINDS],
    /// Why an operation failed first, while they were noted.
    failure: OnceLock<String>,
    rings: OnceLock<Rings>,
}

/// Operations of one kind.
#[derive(Default)]
pub(crate) struct KindTotals {
    pub(crate) count: AtomicU64,
    /// From the beginning to the end, added up.
    pub(crate) nanos: AtomicU64,
}

/// What a node notes into, once it does.
pub(crate) struct Rings {
    epoch: Instant,
    /// What threads of the program do, and those beside it.
    events: Ring,
    /// By lane: layers that are done on it.
    parts: Vec<Ring>,
    /// By lane: when it was busy. Apart, because these are the most.
    busy: Vec<Ring>,
}

/// What a lane has done. Written by the thread that drives it, twice a second or less often than that
/// thread sleeps. On cache lines of its own, two of which processors fetch together.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct LaneTotals {
    /// Since the recorder was switched on.
    busy_nanos: AtomicU64,
    /// Both ways, since the recorder was switched on.
    bytes: AtomicU64,
    /// Messages that links have not taken.
    pub(crate) queued: AtomicU64,
    /// Segments that TCP sent again, on the links that are open now.
    pub(crate) retransmitted: AtomicU64,
    /// Bytes that links to other hosts took, and gave.
    pub(crate) outside: [AtomicU64; 2],
    /// The same of links within the host.
    pub(crate) inside: [AtomicU64; 2],
}

/// Something that happened, from `begin` to `end` in nanoseconds since the recorder's epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) what: What,
    /// The session's or group's channel.
    pub(crate) channel: u32,
    /// The layer; of an operation of a group, the number of its kind.
    pub(crate) layer: u32,
    /// The layer's clock; of an operation, its number in the group.
    pub(crate) clock: u64,
    pub(crate) begin: u64,
    pub(crate) end: u64,
    /// The thread, by the system's number; of a lane's record, the lane.
    pub(crate) thread: u32,
    /// Of [`What::Busy`]: bytes that links took and gave. Of [`What::Part`]: when the last chunk had
    /// left, or 0 if none did.
    pub(crate) more: u64,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A thread of the program gave a layer away.
    Send,
    /// A thread of the program waited for a layer.
    Wait,
    /// A gradient was rebuilt from factors.
    Rebuild,
    /// A layer was in flight, from when it was sent until its last part was back.
    Flight,
    /// The last piece of a layer had left a device.
    LeftDevice,
    /// The last result of a layer was on its device.
    OnDevice,
    /// A layer was in flight on one lane.
    Part,
    /// A lane was at work.
    Busy,
    /// A collective operation was under way.
    Operation,
}

/// Records of threads that are kept: for 160 layers, which make three each a step, 68 steps.
const EVENTS: usize = 1 << 15;
/// Records of a lane that are kept: for 160 layers 51 steps.
const OF_A_LANE: usize = 1 << 13;
/// Kinds of operations, with room for more. Those of higher numbers are not counted.
const KINDS: usize = 16;

impl Recorder {
    /// Notes nothing yet. `epoch` is what times of the node are since.
    pub(crate) fn new(epoch: Instant, lanes: usize) -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let wall = now.saturating_sub(epoch.elapsed());
        let totals = (0..lanes).map(|_| LaneTotals::default()).collect();
        let (operations, kinds) = (AtomicU64::new(0), Default::default());
        let (failure, rings) = (OnceLock::new(), OnceLock::new());
        Self { epoch, wall, totals, operations, kinds, failure, rings }
    }

    /// Takes the memory for the records, and notes from now on.
    pub(crate) fn switch_on(&self) {
        self.rings.get_or_init(|| Rings {
            epoch: self.epoch,
            events: Ring::new(EVENTS),
            parts: self.totals.iter().map(|_| Ring::new(OF_A_LANE)).collect(),
            busy: self.totals.iter().map(|_| Ring::new(OF_A_LANE)).collect(),
        });
    }

    /// Where to note something; nowhere if nothing is noted.
    pub(crate) fn on(&self) -> Option<&Rings> {
        self.rings.get()
    }

    /// The time, if it is needed because something is noted.
    pub(crate) fn now(&self) -> Option<u64> {
        self.on().map(Rings::now)
    }

    /// Nanoseconds since the epoch, whether anything is noted or not.
    pub(crate) fn nanos(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    /// By lane: what is counted always.
    pub(crate) fn totals(&self) -> &[LaneTotals] {
        &self.totals
    }

    /// Collective operations that programs have begun.
    pub(crate) fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    /// Kinds of operations that were done, by their numbers.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = (u32, &KindTotals)> {
        let done = |(_, kind): &(u32, &KindTotals)| kind.count.load(Ordering::Relaxed) > 0;
        (0..).zip(&self.kinds).filter(done)
    }

    /// Why an operation failed first.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Microseconds since 1970, of a time that was noted. Rounded down, so that what lay within
    /// something else still does.
    fn wall_micros(&self, nanos: u64) -> u64 {
        ((self.wall + Duration::from_nanos(nanos)).as_nanos() / 1000) as u64
    }
}

impl Rings {
    pub(crate) fn now(&self) -> u64 {
        self.at(Instant::now())
    }

    pub(crate) fn at(&self, instant: Instant) -> u64 {
        instant.saturating_duration_since(self.epoch).as_nanos() as u64
    }

    pub(crate) fn note(&self, record: Record) {
        let lane = record.thread as usize;
        let ring = match record.what {
            What::Part => self.parts.get(lane),
            What::Busy => self.busy.get(lane),
            _ => Some(&self.events),
        };
        if let Some(ring) = ring {
            ring.push(record.words());
        }
    }

    /// All records that are here, in the order in which they ended on each ring.
    pub(crate) fn read(&self) -> Vec<Record> {
        let rings = std::iter::once(&self.events).chain(&self.parts).chain(&self.busy);
        rings.flat_map(Ring::read).filter_map(Record::of_words).collect()
    }
}

impl LaneTotals {
    /// Nanoseconds that the lane was at work.
    pub(crate) fn busy(&self) -> u64 {
        self.busy_nanos.load(Ordering::Relaxed)
    }

    /// Bytes that links took and gave.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The lane was at work for `nanos`, in which links took and gave `bytes`; now so many messages are
    /// `queued`.
    pub(crate) fn add(&self, nanos: u64, bytes: u64, queued: u64) {
        self.busy_nanos.fetch_add(nanos, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.queued.store(queued, Ordering::Relaxed);
    }
}

impl Record {
    fn words(self) -> [u64; WORDS] {
        let Self { what, channel, layer, clock, begin, end, thread, more } = self;
        let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        [pair(what as u32, thread), pair(channel, layer), clock, begin, end, more, 0]
    }

    fn of_words([first, second, clock, begin, end, more, _]: [u64; WORDS]) -> Option<Self> {
        let halves = |word: u64| ((word >> 32) as u32, word as u32);
        let ((what, thread), (channel, layer)) = (halves(first), halves(second));
        let what = ALL.into_iter().find(|known| *known as u32 == what)?;
        Some(Self { what, channel, layer, clock, begin, end, thread, more })
    }
}

const ALL: [What; 9] = [
    What::Send,
    What::Wait,
    What::Rebuild,
    What::Flight,
    What::LeftDevice,
    What::OnDevice,
    What::Part,
    What::Busy,
    What::Operation,
];

/// The system's number of the thread that calls.
pub(crate) fn this_thread() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_noted_before_it_is_switched_on_and_records_come_back_as_they_were() {
        let recorder = Recorder::new(Instant::now(), 2);
        assert!(recorder.on().is_none() && recorder.now().is_none());
        recorder.switch_on();
        let rings = recorder.on().unwrap();
        let mut expected = Vec::new();
        for (i, what) in (1..).zip(ALL) {
            let record = Record {
                what,
                channel: i,
                layer: u32::MAX - i,
                clock: u64::MAX - 1,
                begin: 3,
                end: 5,
                thread: 1,
                more: 7,
            };
            rings.note(record);
            expected.push(record);
        }
        // Of a lane that is not there.
        rings.note(Record { what: What::Busy, thread: 2, ..expected[0] });
        let mut read = rings.read();
        read.sort_by_key(|record| record.channel);
        assert_eq!(read, expected);
    }
}
