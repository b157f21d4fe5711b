//! What moves a group's operations: links, operations, deadlines. One thread at a time, no waiting.

use super::course::{Course, Start};
use super::desk::Desk;
use super::peer::Peer;
use super::request::Request;
use super::work::Progress;
use crate::Error;
use poseidon_core::NodeId;
use poseidon_core::wire::{Header, Kind, MAX_ABORT};
use poseidon_link::{Carrier, Link};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

pub(super) struct Engine {
    desk: Desk,
    peers: Vec<Option<Peer>>,
    /// Contributions are read here and added from here, while they are in cache.
    scratch: Vec<u64>,
    tickets: u64,
    /// By rank: messages sent to it.
    messages: Vec<u64>,
    silence: Duration,
    next_tick: Duration,
    /// The peer that is written to first, next time.
    turn: usize,
    failure: Option<Error>,
    /// Names of followed operations that are done, for whoever asks next.
    pub(super) completed: Vec<u64>,
    /// Operations are done that nobody has been told of.
    pub(super) progressed: bool,
    /// Nothing more is begun; from then on nobody is waited for.
    leaving: Option<Duration>,
}

/// What the thread at the wheel should do after a turn.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// There is more to do right now.
    Again,
    /// Nothing to do until a link is ready, something is begun, or this time is reached.
    Sleep(Duration),
    /// All said and done.
    Stop,
}

/// As for a session's lane.
const SCRATCH: usize = (128 << 10) / size_of::<u64>();
const BURST: usize = 256 << 10;
const TICK: Duration = Duration::from_millis(500);
const HEARTBEAT: Duration = Duration::from_secs(2);
/// How long a group that has failed goes on telling the others why.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long a rank that has left keeps its connections open for those who have not read all of them.
const LINGER: Duration = Duration::from_secs(10);

impl Engine {
    pub(super) fn new(
        me: u16,
        names: Vec<String>,
        links: Vec<(NodeId, Box<dyn Link>)>,
        silence: Duration,
        now: Duration,
    ) -> Self {
        let size = names.len();
        let mut peers: Vec<Option<Peer>> = (0..size).map(|_| None).collect();
        for (node, link) in links {
            peers[node.index()] = Some(Peer::new(node.index(), link, now));
        }
        let (courses, outgoing) = (VecDeque::new(), Vec::new());
        Self {
            desk: Desk { me, names, courses, sequence: 0, outgoing },
            peers,
            scratch: vec![0; SCRATCH],
            tickets: 0,
            messages: vec![0; size],
            silence,
            next_tick: now + TICK,
            turn: usize::from(me) + 1,
            failure: None,
            completed: Vec::new(),
            progressed: false,
            leaving: None,
        }
    }

    pub(super) fn peers(&mut self) -> impl Iterator<Item = &mut Peer> {
        self.peers.iter_mut().flatten()
    }

    pub(super) fn peer(&mut self, rank: usize) -> Option<&mut Peer> {
        self.peers.get_mut(rank).and_then(Option::as_mut)
    }

    /// Whether nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.desk.courses.is_empty() && self.leaving.is_none()
    }

    /// Begins an operation, which was checked.
    pub(super) fn begin(
        &mut self,
        request: &Request,
        timeout: Duration,
        progress: Arc<Progress>,
        now: Duration,
    ) {
        if let Some(failure) = self.failure.clone().or_else(|| self.leaving.map(|_| left(self))) {
            self.report(&progress, Err(failure));
            return;
        }
        self.tickets += 1;
        let sequence = match request {
            Request::Send { to, .. } => {
                let sent = &mut self.messages[usize::from(*to)];
                *sent += 1;
                *sent
            }
            Request::Receive { .. } => 0,
            _ => {
                self.desk.sequence += 1;
                self.desk.sequence - 1
            }
        };
        let start = Start {
            ticket: self.tickets,
            sequence,
            me: self.desk.me,
            size: self.desk.names.len() as u16,
            begun: now,
            deadline: now.saturating_add(timeout),
            progress,
        };
        let outgoing = &mut self.desk.outgoing;
        let course = Course::begin(request, start, |rank, run| outgoing.push((rank, run)));
        self.desk.courses.push_back(course);
        self.post();
        let mut found = Ok(());
        for peer in self.peers.iter_mut().flatten() {
            found = found.and_then(|()| peer.reconsider(&mut self.desk));
        }
        if let Err(error) = found {
            self.die(error, now);
        }
    }

    /// Does all that can be done now.
    pub(super) fn turn(&mut self, now: Duration) -> Next {
        if let Some(end) = self.leaving {
            return self.take_leave(now, end);
        }
        if let Err(error) = self.serve(now) {
            self.die(error, now);
            return Next::Again;
        }
        let busy = self
            .peers
            .iter()
            .flatten()
            .any(|p| p.may_read() || (p.writable && p.has_unsent() && p.gone.is_none()));
        let deadlines = self.desk.courses.iter().map(|course| course.deadline);
        let sleep = deadlines.min().map_or(self.next_tick, |first| first.min(self.next_tick));
        if busy { Next::Again } else { Next::Sleep(sleep) }
    }

    fn serve(&mut self, now: Duration) -> Result<(), Error> {
        // A peer that stops the group does not undo what the others have sent before.
        let mut heard = Ok(());
        for peer in self.peers.iter_mut().flatten() {
            if peer.may_read() {
                heard = heard.and(peer.read(&mut self.desk, &mut self.scratch, now));
            }
        }
        if let Err(error) = heard {
            self.sweep();
            return Err(error);
        }
        self.post();
        self.write_burst(now);
        self.sweep();
        if self.peers.iter().flatten().any(|peer| peer.gone.is_some()) {
            self.check_gone()?;
        }
        let late = self.desk.courses.iter().find(|course| course.deadline <= now);
        if let Some(course) = late {
            return Err(self.overdue(course, now));
        }
        if now >= self.next_tick {
            self.next_tick = now + TICK.min(self.silence / 4);
            self.tick(now)?;
        }
        Ok(())
    }

    /// Hands what became ready to the peers it goes to.
    fn post(&mut self) {
        for (rank, run) in self.desk.outgoing.drain(..) {
            if let Some(peer) = &mut self.peers[rank] {
                peer.send(run);
            }
        }
    }

    /// As a session's lane: to the peers in turn, until a burst is out.
    fn write_burst(&mut self, now: Duration) {
        let ranks = self.peers.len();
        let mut left = BURST;
        let first = self.turn;
        for rank in (0..ranks).map(|i| (first + i) % ranks) {
            let Some(peer) = &mut self.peers[rank] else { continue };
            left = left.saturating_sub(peer.write(&mut self.desk, now));
            if left == 0 {
                self.turn = rank + 1;
                break;
            }
        }
    }

    /// Reports operations that are complete.
    fn sweep(&mut self) {
        let mut index = 0;
        while let Some(course) = self.desk.courses.get_mut(index) {
            if !course.is_complete() {
                index += 1;
                continue;
            }
            course.conclude();
            let progress = course.progress.clone();
            // Gone before it is reported: the program takes its tensors back.
            self.desk.courses.remove(index);
            self.report(&progress, Ok(()));
        }
    }

    fn report(&mut self, progress: &Progress, outcome: Result<(), Error>) {
        self.completed.extend(progress.finish(outcome));
        self.progressed = true;
    }

    /// A peer that is gone matters once something is expected of it.
    fn check_gone(&self) -> Result<(), Error> {
        let gone = |peer: &&Peer| peer.gone.is_some();
        let others = || self.peers.iter().flatten();
        for peer in others().filter(gone) {
            // A message from anybody may still come from somebody else.
            let alone = others().all(|p| p.gone.is_some());
            let mut courses = self.desk.courses.iter().filter(|c| c.awaits(peer.rank));
            let awaiting = courses.find(|course| alone || !is_from_any(course));
            if awaiting.is_none() && !peer.has_unsent() {
                continue;
            }
            return Err(Error::Lost {
                node: self.desk.names[peer.rank].clone(),
                how: peer.gone.clone().unwrap_or_default(),
                awaited: awaiting.map(Course::words),
            });
        }
        Ok(())
    }

    fn overdue(&self, course: &Course, now: Duration) -> Error {
        let names = &self.desk.names;
        let missing = (0..names.len()).filter(|&rank| course.awaits(rank));
        Error::Overdue {
            operation: course.words(),
            waited: now.saturating_sub(course.begun),
            missing: missing.map(|rank| names[rank].clone()).collect(),
        }
    }

    fn tick(&mut self, now: Duration) -> Result<(), Error> {
        let silence = self.silence;
        for peer in self.peers.iter_mut().flatten() {
            // A peer whose frames wait here is not listened to: what it says is behind them.
            if peer.gone.is_none() && !peer.is_parked() && now.saturating_sub(peer.heard) > silence
            {
                let how = format!("not heard for {silence:?}, though the connection is open");
                peer.gone = Some(how);
            }
            let idle = peer.gone.is_none() && !peer.has_unsent();
            if idle && now.saturating_sub(peer.spoke) > HEARTBEAT.min(silence / 4) {
                peer.say(&Header::bare(Kind::Heartbeat, NodeId(self.desk.me), 0), &[]);
            }
        }
        self.check_gone()
    }

    /// Stops the group: tells the program, then everybody else.
    fn die(&mut self, error: Error, now: Duration) {
        // What another rank said is passed on as its words, not as this rank's.
        let (speaker, mut reason) = match &error {
            Error::Aborted { node, reason } => {
                let speaker = self.desk.names.iter().position(|name| name == node);
                (speaker.unwrap_or(self.desk.me.into()), reason.clone())
            }
            other => (self.desk.me.into(), other.to_string()),
        };
        reason.truncate(reason.floor_char_boundary(MAX_ABORT));
        tracing::debug!(rank = self.desk.me, %reason, "group stops");
        self.failure = Some(error.clone());
        for course in std::mem::take(&mut self.desk.courses) {
            let progress = course.progress.clone();
            drop(course);
            self.report(&progress, Err(error.clone()));
        }
        self.desk.outgoing.clear();
        let mut header = Header::bare(Kind::Abort, NodeId(self.desk.me), reason.len() as u32);
        header.chunk.index = speaker as u32;
        for peer in self.peers.iter_mut().flatten() {
            peer.drop_unsent();
            peer.say(&header, reason.as_bytes());
        }
        self.leaving = Some(now + LAST_WORDS);
    }

    /// Stops the group because the program says so.
    pub(super) fn abort(&mut self, reason: &str, now: Duration) {
        if self.leaving.is_none() {
            let node = self.desk.names[usize::from(self.desk.me)].clone();
            self.die(Error::Aborted { node, reason: reason.into() }, now);
        }
    }

    /// Leaves the group. What is under way fails.
    pub(super) fn leave(&mut self, now: Duration) {
        if self.leaving.is_some() {
            return;
        }
        if !self.desk.courses.is_empty() {
            let reason = "it left the group while operations were under way";
            return self.abort(reason, now);
        }
        let bye = Header::bare(Kind::Bye, NodeId(self.desk.me), 0);
        for peer in self.peers.iter_mut().flatten() {
            peer.say(&bye, &[]);
        }
        self.leaving = Some(now + LINGER);
    }

    /// Writes the last word to everybody, then waits for them to close: a connection that is dropped
    /// with something unread in it may take with it what it has still to deliver. Shared memory
    /// keeps it.
    fn take_leave(&mut self, now: Duration, end: Duration) -> Next {
        for slot in &mut self.peers {
            let Some(peer) = slot else { continue };
            let left = peer.gone.is_some();
            peer.write(&mut self.desk, now);
            let said = !peer.has_unsent() || peer.gone.is_some();
            let kept = peer.link.carrier() == Carrier::Shared;
            if said && (peer.drain(&mut self.scratch) || kept || left) {
                *slot = None;
            }
        }
        let waiting = self.peers.iter().any(Option::is_some);
        if waiting && now < end {
            return Next::Sleep(end.min(now + TICK));
        }
        self.peers.iter_mut().for_each(|slot| *slot = None);
        Next::Stop
    }
}

fn is_from_any(course: &Course) -> bool {
    matches!(course.key, super::course::Key::Receive { from: None, bound: None, .. })
}

fn left(engine: &Engine) -> Error {
    let node = engine.desk.names[usize::from(engine.desk.me)].clone();
    Error::Aborted { node, reason: "it has left the group".into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poseidon_link::memory::{Shape, VirtualClock, pair};

    /// Engines with a link between any two.
    fn engines(size: usize) -> Vec<Engine> {
        let mut links: Vec<Vec<(NodeId, Box<dyn Link>)>> = (0..size).map(|_| Vec::new()).collect();
        // This seed cuts none of the first six reads and writes of an end.
        let shape = Shape { seed: 1430, ..Shape::default() };
        for b in 0..size {
            for a in 0..b {
                let (one, other) = pair(VirtualClock::new(), shape);
                links[a].push((NodeId(b as u16), Box::new(one)));
                links[b].push((NodeId(a as u16), Box::new(other)));
            }
        }
        let names = (0..size).map(|rank| format!("rank {rank}")).collect::<Vec<_>>();
        let engine = |(rank, links)| {
            Engine::new(rank as u16, names.clone(), links, Duration::from_secs(9), Duration::ZERO)
        };
        links.into_iter().enumerate().map(engine).collect()
    }

    #[test]
    fn an_abort_does_not_undo_what_others_have_sent_before() {
        let mut engines = engines(3);
        let now = Duration::ZERO;
        let begun = engines.iter_mut().map(|engine| {
            let progress = Arc::new(Progress::new(Box::new(())));
            engine.begin(&Request::Barrier, Duration::from_secs(1), progress.clone(), now);
            progress
        });
        let begun: Vec<_> = begun.collect();
        for rank in [0, 1, 2, 1] {
            engines[rank].peers().for_each(|peer| peer.handle_ready(true, true, false));
            engines[rank].turn(now);
        }
        assert!(begun[1].is_done() && begun[2].is_done() && !begun[0].is_done());
        engines[1].abort("enough", now);
        engines[1].turn(now);
        engines[0].peers().for_each(|peer| peer.handle_ready(true, true, false));
        engines[0].turn(now);
        assert!(begun[0].is_done() && begun[0].failure().is_none());
        let failure = engines[0].failure.as_ref().map(Error::to_string);
        assert_eq!(failure.as_deref(), Some("rank 1 stopped the job: enough"));
    }
}
