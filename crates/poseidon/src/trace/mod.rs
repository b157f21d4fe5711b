//! What a node notes of itself while it works: which layer was sent, awaited and rebuilt when, and
//! what its lanes did meanwhile (ADR 0028).
//!
//! No event is noted before somebody [switches it on](Recorder::switch_on). Then each event takes
//! one slot of a ring that was made before: no lock, no memory, no system call. Rings keep the last
//! events, so a job of weeks takes no more memory than one of a minute.
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
pub use session::Pass;
pub(crate) use session::SessionTrace;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// What a ring is made of. Its model has loom's atomics in their place.
mod ring_parts {
    pub(super) use std::sync::atomic::{AtomicU64, Ordering, fence};
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
    /// What threads of the program do, and those beside it. A thread writes into the first ring
    /// that no other one is just writing into. Mostly that is the first of all.
    events: [Ring<5>; 3],
    lanes: Vec<LaneRings>,
}

/// What is noted of a lane, by the thread that drives it.
struct LaneRings {
    /// Layers that are done on it.
    parts: Ring<5>,
    /// When it was busy. Apart, because these are the most.
    busy: Ring<3>,
}

/// What a lane has done. Only the thread that drives it writes, twice a second or when it goes to
/// sleep, so it adds without a locked instruction. On cache lines of its own, two of which
/// processors fetch together.
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
    /// The layer, or [`NO_LAYER`]; of an operation of a group, the number of its kind.
    pub(crate) layer: u32,
    /// The layer's clock; of an operation, its number in the group.
    pub(crate) clock: u64,
    pub(crate) begin: u64,
    pub(crate) end: u64,
    /// The thread, by the system's number; of a lane's record, the lane.
    pub(crate) thread: u32,
    /// Of [`What::Busy`]: bytes that links took and gave. Of [`What::Part`]: when the last chunk
    /// had left, or 0 if none did.
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
    /// The program computed in a forward pass.
    Forward,
    /// The program computed in a backward pass.
    Backward,
    /// A layer was in flight, from when it was sent until its last part was back.
    Flight,
    /// A layer left its device, from when it was sent until its last piece was in host memory.
    LeftDevice,
    /// Results of a layer were copied to its device, from the first copy to the end of the last.
    OnDevice,
    /// A layer was in flight on one lane.
    Part,
    /// A lane was at work.
    Busy,
    /// A collective operation was under way.
    Operation,
}

/// Of a record that is about no single layer.
pub(crate) const NO_LAYER: u32 = u32::MAX;
/// Records of threads that are kept: for 160 layers, which make four each a step, 51 steps.
const EVENTS: usize = 1 << 15;
/// The same of threads that wrote while another one did.
const SPARE_EVENTS: usize = 1 << 12;
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
            events: [EVENTS, SPARE_EVENTS, SPARE_EVENTS].map(Ring::new),
            lanes: self.totals.iter().map(|_| LaneRings::new()).collect(),
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

    /// Notes what a thread of the program did, or one beside it. It is lost if as many other
    /// threads as there are rings were stopped while they wrote.
    pub(crate) fn note(&self, record: Record) {
        let words = record.event_words();
        let _ = self.events.iter().any(|ring| ring.push(words));
    }

    /// Notes a [`What::Part`] or [`What::Busy`]. Only the thread that drives the lane calls this.
    pub(crate) fn note_on_lane(&self, record: Record) {
        let Some(lane) = self.lanes.get(record.thread as usize) else { return };
        match record.what {
            What::Busy => lane.busy.push(record.busy_words()),
            _ => lane.parts.push(record.part_words()),
        };
    }

    /// All records that are here, in the order in which they ended on each ring.
    pub(crate) fn read(&self) -> Vec<Record> {
        let events = self.events.iter().flat_map(Ring::read).filter_map(Record::of_event);
        let lanes = || (0..).zip(&self.lanes);
        let part = |(lane, of): (u32, &LaneRings)| {
            of.parts.read().into_iter().map(move |words| Record::of_part(lane, words))
        };
        let busy = |(lane, of): (u32, &LaneRings)| {
            of.busy.read().into_iter().map(move |words| Record::of_busy(lane, words))
        };
        events.chain(lanes().flat_map(part)).chain(lanes().flat_map(busy)).collect()
    }
}

impl LaneRings {
    fn new() -> Self {
        Self { parts: Ring::new(OF_A_LANE), busy: Ring::new(OF_A_LANE) }
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

    /// The lane was at work for `nanos`, in which links took and gave `bytes`.
    pub(crate) fn add(&self, nanos: u64, bytes: u64) {
        let add =
            |to: &AtomicU64, more| to.store(to.load(Ordering::Relaxed) + more, Ordering::Relaxed);
        add(&self.busy_nanos, nanos);
        add(&self.bytes, bytes);
    }
}

impl Record {
    fn event_words(self) -> [u64; 5] {
        let Self { what, channel, layer, clock, begin, end, thread, .. } = self;
        [pair(what as u32, thread), pair(channel, layer), clock, begin, end]
    }

    fn of_event([first, second, clock, begin, end]: [u64; 5]) -> Option<Self> {
        let ((what, thread), (channel, layer)) = (halves(first), halves(second));
        let what = ALL.into_iter().find(|known| *known as u32 == what)?;
        Some(Self { what, channel, layer, clock, begin, end, thread, more: 0 })
    }

    fn part_words(self) -> [u64; 5] {
        let Self { channel, layer, clock, begin, end, more, .. } = self;
        [pair(channel, layer), clock, begin, end, more]
    }

    fn of_part(lane: u32, [first, clock, begin, end, more]: [u64; 5]) -> Self {
        let ((channel, layer), what) = (halves(first), What::Part);
        Self { what, channel, layer, clock, begin, end, thread: lane, more }
    }

    fn busy_words(self) -> [u64; 3] {
        [self.begin, self.end, self.more]
    }

    fn of_busy(lane: u32, [begin, end, more]: [u64; 3]) -> Self {
        let what = What::Busy;
        Self { what, channel: 0, layer: 0, clock: 0, begin, end, thread: lane, more }
    }
}

fn pair(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

fn halves(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

const ALL: [What; 11] = [
    What::Send,
    What::Wait,
    What::Rebuild,
    What::Forward,
    What::Backward,
    What::Flight,
    What::LeftDevice,
    What::OnDevice,
    What::Part,
    What::Busy,
    What::Operation,
];

thread_local! {
    /// Asked for once in a thread, because the answer takes a system call.
    static THIS_THREAD: u32 = rustix::thread::gettid().as_raw_nonzero().get() as u32;
}

/// The system's number of the thread that calls.
pub(crate) fn this_thread() -> u32 {
    THIS_THREAD.with(|number| *number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(what: What, channel: u32) -> Record {
        let (layer, clock) = (u32::MAX - channel, u64::MAX - 1);
        Record { what, channel, layer, clock, begin: 3, end: 5, thread: 1, more: 0 }
    }

    #[test]
    fn nothing_is_noted_before_it_is_switched_on_and_records_come_back_as_they_were() {
        let recorder = Recorder::new(Instant::now(), 2);
        assert!(recorder.on().is_none() && recorder.now().is_none());
        recorder.switch_on();
        let rings = recorder.on().unwrap();
        let is_of_lane = |what: &What| matches!(what, What::Part | What::Busy);
        let mut expected: Vec<_> = (1..)
            .zip(ALL.into_iter().filter(|what| !is_of_lane(what)))
            .map(|(channel, what)| record(what, channel))
            .collect();
        expected.iter().for_each(|record| rings.note(*record));
        let part = Record { more: 7, ..record(What::Part, 20) };
        let busy = Record { layer: 0, clock: 0, more: 8, ..record(What::Busy, 0) };
        [part, busy].into_iter().for_each(|record| rings.note_on_lane(record));
        // Of a lane that is not there.
        rings.note_on_lane(Record { thread: 2, ..part });
        expected.extend([part, busy]);
        assert_eq!(rings.read(), expected);
    }

    #[test]
    fn threads_that_write_at_once_lose_nothing() {
        let recorder = Recorder::new(Instant::now(), 0);
        recorder.switch_on();
        let rings = recorder.on().unwrap();
        std::thread::scope(|scope| {
            for channel in 0..3 {
                scope
                    .spawn(move || (0..1000).for_each(|_| rings.note(record(What::Send, channel))));
            }
        });
        for channel in 0..3 {
            let of = |record: &&Record| record.channel == channel;
            assert_eq!(rings.read().iter().filter(of).count(), 1000);
        }
    }
}
