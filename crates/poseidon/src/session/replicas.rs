//! Whether all workers have the same.
//!
//! All workers receive the same bytes for a layer, or rebuild the same numbers from factors. A fault
//! of memory, processors that round differently, or a bug would make their replicas differ, and
//! nothing else would tell. So every so many clocks each worker digests a piece of what it has
//! received, in turn through all layers. A thread beside the program gathers the digests through the
//! coordinator and compares them. Programs that step parameters themselves add digests of these.

use crate::job::line::ControlLine;
use crate::job::patience::Patience;
use crate::job::rounds::BESIDE;
use crate::lane::board::Board;
use crate::{Buffer, Difference, Error, Session};
use poseidon_core::{ChannelId, Clock, LayerId};
use serde_json::{Value, json};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// What compares the replicas of a session.
pub(super) struct Replicas {
    /// Every so many clocks something is compared.
    every: u64,
    /// What is compared, in turn: pieces of layers.
    pieces: Vec<(LayerId, Range<usize>)>,
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
    found: Arc<Found>,
}

/// What comparisons have found. Written by the thread.
#[derive(Default)]
struct Found {
    /// How many there were without a difference.
    equal: AtomicU64,
    /// The first difference in what is only watched.
    difference: OnceLock<Difference>,
    /// Whether the program has it.
    is_told: AtomicBool,
}

enum Order {
    Compare(Sample),
    /// Answers when all comparisons that were asked for before are done.
    Answer(SyncSender<()>),
}

/// Digests of things that are the same on all workers, each with what it is of.
struct Sample {
    clock: Clock,
    pieces: Vec<(String, u64)>,
    /// Whether a difference is noted for the program, instead of stopping the job.
    is_watched: bool,
}

/// What the thread knows.
struct Comparer {
    line: Arc<ControlLine>,
    board: Arc<Board>,
    channel: ChannelId,
    /// How long others may take.
    patience: Duration,
    found: Arc<Found>,
}

/// Bytes that are digested at a time. A comparison of so many costs about 0.5 ms (ADR 0027).
const PIECE: usize = 1 << 20;

impl Replicas {
    /// Starts the thread, if the workers of `session` can be compared.
    pub(super) fn start(session: &Session) -> Result<Option<Self>, Error> {
        let (every, book) = (session.node.config.compare_every, &session.parts.book);
        let bsp = session.parts.plan.consistency().is_bsp();
        if every == 0 || !bsp || book.cluster.workers() < 2 || book.job.layers.is_empty() {
            return Ok(None);
        }
        let pieces = session.layers.ids().flat_map(|layer| {
            let (len, down) =
                (book.job.layers[layer.index()].len, session.parts.plan.encodings(layer).down);
            let most = PIECE / down.width();
            (0..len).step_by(most).map(move |from| (layer, from..len.min(from + most)))
        });
        let found = Arc::<Found>::default();
        let comparer = Comparer {
            line: session.node.line.clone(),
            board: session.parts.board.clone(),
            channel: session.parts.id,
            patience: session.timeout,
            found: found.clone(),
        };
        let (orders, taken) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("poseidon-replicas".into())
            .spawn(move || comparer.run(&taken))
            .map_err(Error::io("starting a thread that compares replicas"))?;
        let (orders, thread) = (Some(orders), Some(thread));
        Ok(Some(Self { every, pieces: pieces.collect(), orders, thread, found }))
    }

    fn order(&self, order: Order) {
        if let Some(orders) = &self.orders {
            // A thread that has stopped comparing has said why.
            let _ = orders.send(order);
        }
    }

    /// What is compared of `layer` at `clock`, if anything is.
    fn piece(&self, layer: LayerId, clock: Clock) -> Option<&Range<usize>> {
        if clock.0 == 0 || !clock.0.is_multiple_of(self.every) {
            return None;
        }
        let turn = (clock.0 / self.every - 1) % self.pieces.len() as u64;
        let (of, range) = &self.pieces[turn as usize];
        (*of == layer).then_some(range)
    }
}

impl Drop for Replicas {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // A panic is a bug; its message is on standard error already.
            let _ = thread.join();
        }
    }
}

impl Session {
    /// Compares `digest` with those of all other workers, beside the program. Every worker says the
    /// same `what` at the same `clock`, once. For what a program holds itself and is the same on all
    /// workers, such as parameters that it steps with the gradients it receives. If digests differ,
    /// the job stops with an error that names `what` and the workers.
    pub fn compare_replicas(&self, what: &str, clock: Clock, digest: u64) -> Result<(), Error> {
        self.check_running()?;
        if let Some(replicas) = &self.replicas {
            let pieces = vec![(what.into(), digest)];
            replicas.order(Order::Compare(Sample { clock, pieces, is_watched: false }));
        }
        Ok(())
    }

    /// As [`compare_replicas`](Session::compare_replicas), of several things at once. If digests
    /// differ, the job goes on, and [`take_difference`](Session::take_difference) tells the first that
    /// does. It is for what a program may also change on purpose.
    pub fn watch_replicas(&self, clock: Clock, pieces: Vec<(String, u64)>) -> Result<(), Error> {
        self.check_running()?;
        if let Some(replicas) = self.replicas.as_ref().filter(|_| !pieces.is_empty()) {
            replicas.order(Order::Compare(Sample { clock, pieces, is_watched: true }));
        }
        Ok(())
    }

    /// The first difference that [`watch_replicas`](Session::watch_replicas) has found. It is told once:
    /// replicas that differ in one place soon differ in others. All workers find the same one, each a
    /// little sooner or later.
    pub fn take_difference(&self) -> Option<Difference> {
        let found = &self.replicas.as_ref()?.found;
        let difference = found.difference.get()?;
        (!found.is_told.swap(true, Ordering::Relaxed)).then(|| difference.clone())
    }

    /// How many clocks are between two comparisons of what workers have received. `None` if nothing
    /// is compared.
    pub fn compares_every(&self) -> Option<u64> {
        self.replicas.as_ref().map(|replicas| replicas.every)
    }

    /// How many comparisons between workers there were that found no difference.
    pub fn compared(&self) -> u64 {
        self.replicas.as_ref().map_or(0, |replicas| replicas.found.equal.load(Ordering::Relaxed))
    }

    /// `result` has come back. If it is this layer's turn, a piece of it is compared.
    pub(super) fn note_replica(&self, layer: LayerId, clock: Clock, result: &Buffer) {
        let Some(replicas) = &self.replicas else { return };
        let Some(range) = replicas.piece(layer, clock) else { return };
        let width = result.encoding().width();
        // What is on a device is not here.
        let Some(bytes) = result.bytes().get(range.start * width..range.end * width) else {
            return;
        };
        let (name, from, to) = (self.name(layer), range.start, range.end);
        let what = format!("layer '{name}' (elements {from} to {})", to - 1);
        let pieces = vec![(what, xxh3_64(bytes))];
        replicas.order(Order::Compare(Sample { clock, pieces, is_watched: false }));
    }

    /// Waits until everything that was to be compared has been.
    pub(super) fn settle_replicas(&self) -> Result<(), Error> {
        let Some(replicas) = &self.replicas else { return Ok(()) };
        let (reply, answer) = sync_channel(1);
        replicas.order(Order::Answer(reply));
        let mut left = Patience::new(self.timeout);
        loop {
            let stretch = left.stretch();
            match answer.recv_timeout(stretch) {
                Err(RecvTimeoutError::Timeout) if !stretch.is_zero() => self.check_running()?,
                // It is done, or the thread has stopped comparing. A wait that has been too long is
                // the others' to explain: their goodbyes will not come.
                _ => return self.check_running(),
            }
        }
    }
}

impl Comparer {
    fn run(&self, orders: &Receiver<Order>) {
        let mut stopped = false;
        for order in orders {
            match order {
                Order::Answer(reply) => {
                    let _ = reply.try_send(());
                }
                Order::Compare(_) if stopped => {}
                Order::Compare(sample) => stopped = !self.compare(&sample),
            }
        }
    }

    /// Whether it goes on.
    fn compare(&self, Sample { clock, pieces, is_watched }: &Sample) -> bool {
        let (first, more) = (&pieces[0].0, pieces.len() - 1);
        let topic = format!(
            "{BESIDE}replicas of channel {}: {first} and {more} more, clock {clock}",
            self.channel
        );
        let digests: Vec<u64> = pieces.iter().map(|(_, digest)| *digest).collect();
        let watch = || self.board.state();
        let all = match self.line.gather(&topic, &json!(digests), self.patience, &watch) {
            Ok(all) => all,
            // The job has failed, or ends, or others compare something else.
            Err(error) => {
                tracing::debug!(%topic, %error, "replicas are not compared any more");
                return false;
            }
        };
        let Some(difference) = difference(pieces, *clock, &all) else {
            self.found.equal.fetch_add(1, Ordering::Relaxed);
            return true;
        };
        if *is_watched {
            // Only the first counts.
            let _ = self.found.difference.set(difference);
            return true;
        }
        self.board.fail(Error::Replicas(difference));
        false
    }
}

/// The first of `pieces` of which not all workers have the same digest. `all` has each worker's.
fn difference(pieces: &[(String, u64)], clock: Clock, all: &[Value]) -> Option<Difference> {
    pieces.iter().enumerate().find_map(|(i, (what, _))| {
        let digests: Vec<&Value> = all.iter().map(|digests| &digests[i]).collect();
        let groups = groups(&digests, |rank| format!("worker {rank}"))?;
        Some(Difference { what: what.clone(), clock, groups })
    })
}

/// Who has the same value as whom, in words, the most common value first. None if all have the same.
fn groups(digests: &[&Value], name: impl Fn(usize) -> String) -> Option<Vec<String>> {
    let mut groups: Vec<(&Value, Vec<usize>)> = Vec::new();
    for (rank, &digest) in digests.iter().enumerate() {
        match groups.iter_mut().find(|(of, _)| *of == digest) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((digest, vec![rank])),
        }
    }
    groups.sort_by_key(|(_, ranks)| std::cmp::Reverse(ranks.len()));
    let words = |ranks: &[usize]| {
        let names: Vec<String> = ranks.iter().map(|&rank| name(rank)).collect();
        names.join(", ")
    };
    (groups.len() > 1).then(|| groups.iter().map(|(_, ranks)| words(ranks)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_differs_is_named_after_those_who_agree() {
        let pieces = [("a".to_owned(), 0), ("b".to_owned(), 0)];
        let told = |all: &[Value]| {
            difference(&pieces, Clock(3), all).map(|difference| difference.to_string())
        };
        assert_eq!(told(&[json!([7, 8]), json!([7, 8])]), None);
        let of_b = [8, 7, 7, u64::MAX, 7].map(|digest| json!([1, digest]));
        let expected = "b differs after clock 3: worker 1, worker 2, worker 4 have one value, \
                        worker 0 another, worker 3 another";
        assert_eq!(told(&of_b).unwrap(), expected);
        // Whoever compares less, or nonsense, has something else.
        let expected = "b differs after clock 3: worker 0 has one value, worker 1 another";
        assert_eq!(told(&[json!([7, 8]), json!([7])]).unwrap(), expected);
    }

    #[test]
    fn every_piece_has_its_turn_and_the_other_clocks_have_none() {
        let pieces = vec![(LayerId(0), 0..5), (LayerId(1), 0..9), (LayerId(1), 9..12)];
        let (orders, thread, found) = (None, None, Arc::default());
        let replicas = Replicas { every: 10, pieces, orders, thread, found };
        let turns = |layer: u32| {
            let piece = |clock| Some((clock, replicas.piece(LayerId(layer), Clock(clock))?.start));
            (0..=60).filter_map(piece).collect::<Vec<_>>()
        };
        assert_eq!(turns(0), [(10, 0), (40, 0)]);
        assert_eq!(turns(1), [(20, 0), (30, 9), (50, 0), (60, 9)]);
    }
}
