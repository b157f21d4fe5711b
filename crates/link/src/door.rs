//! The thread behind a listener's door: it hears all callers until they have proved that they know
//! the secret.
//!
//! Strangers may come in any number and say anything. So they get no thread, little memory, and a
//! place that the next one may take. Their number in a second is limited, and so is what is logged of
//! them. A caller whose hello was made with the secret is no stranger: it has a place of its own.

use crate::Credentials;
use crate::descriptors::{self, Need};
use crate::handshake::{HandshakeError, Heard, Proven, Reception};
use crate::stream::{NO_SIGNAL, Stream, peer_name};
use crate::window;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Registry, Token};
use poseidon_core::wire::{Hello, Status};
use rustix::net::RecvFlags;
use socket2::{SockAddr, Socket};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::io::{self, ErrorKind, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// What a listener serves with.
pub(crate) struct Door {
    /// The listening sockets.
    pub(crate) sockets: Vec<Socket>,
    /// What the job needs, for the words of a process that runs out of descriptors.
    pub(crate) need: Option<Need>,
    pub(crate) credentials: Credentials,
    /// How long each message of a caller may take.
    pub(crate) message_limit: Duration,
    /// Set once, from outside, before the waker is woken.
    pub(crate) stop: Arc<AtomicBool>,
}

impl Door {
    /// The token of the waker that ends the service.
    pub(crate) const WAKE: Token = Token(0);
    const CALLERS: Token = Token(1);

    /// Serves until it is told to stop. `admit` and `deliver` are called from several threads at
    /// once, one for each caller that has proved that it knows the secret. Returns when all of them
    /// have ended.
    pub(crate) fn serve<A, D>(self, poll: Poll, admit: &A, deliver: &D)
    where
        A: Fn(&Hello) -> Result<(), Status> + Sync,
        D: Fn(Hello, Stream) + Sync,
    {
        let door = &self;
        thread::scope(|scope| {
            let start = move |proven: Proven, stream: Stream, log: Refusals| {
                thread::Builder::new()
                    .name("poseidon-hello".to_owned())
                    .spawn_scoped(scope, move || {
                        door.finish(proven, stream, admit, deliver, log);
                    })
                    .map(drop)
            };
            Callers::new(door, start).run(poll);
        });
    }

    /// The rest of a handshake, with a caller that knows the secret.
    fn finish<A, D>(
        &self,
        proven: Proven,
        mut stream: Stream,
        admit: &A,
        deliver: &D,
        mut log: Refusals,
    ) where
        A: Fn(&Hello) -> Result<(), Status>,
        D: Fn(Hello, Stream),
    {
        let hello = proven.hello;
        let judged = admit(&hello);
        stream.set_deadline(Some(Instant::now() + self.message_limit));
        let (verdict, protection) = proven.judge(&self.credentials, judged);
        let said = stream.write_all(&verdict).map_err(HandshakeError::Io);
        let error = match said.and(protection) {
            Ok(protection) => {
                stream.set_deadline(None);
                stream.protect(protection);
                return deliver(hello, stream);
            }
            Err(error) => error,
        };
        log.note(stream.peer(), &error, Instant::now());
        if let HandshakeError::Refused(_) = error {
            stream.close_gently();
        }
    }
}

/// The callers of one listener, on its thread.
struct Callers<'a, S> {
    door: &'a Door,
    /// Starts the thread of a caller that knows the secret.
    start: S,
    /// Those that have not shown that they know the secret, oldest first.
    strangers: BTreeMap<usize, Caller>,
    /// Those whose hello was made with the secret, and whose proof is awaited.
    challenged: BTreeMap<usize, Caller>,
    next_token: usize,
    allowance: Allowance,
    log: Refusals,
    /// There may be callers that were not accepted yet: readiness is told once.
    waiting: bool,
    /// When accepting is tried again after it has failed.
    pause: Option<Instant>,
}

/// A caller in its handshake.
struct Caller {
    socket: Socket,
    address: SockAddr,
    since: Instant,
    /// `None`: it was refused. Its last bytes are read, so that the refusal reaches it.
    reception: Option<Reception>,
    /// Bytes of a refused caller that were read.
    scrap: usize,
}

/// What becomes of a caller that has said something.
enum Fate {
    Stays,
    Challenged,
    Proven(Box<Proven>),
    Ends,
}

impl<'a, S> Callers<'a, S>
where
    S: Fn(Proven, Stream, Refusals) -> io::Result<()>,
{
    fn new(door: &'a Door, start: S) -> Self {
        Self {
            door,
            start,
            strangers: BTreeMap::new(),
            challenged: BTreeMap::new(),
            next_token: Door::CALLERS.0 + 1,
            allowance: Allowance::new(Instant::now()),
            log: Refusals::default(),
            waiting: true,
            pause: None,
        }
    }

    fn run(&mut self, mut poll: Poll) {
        let mut events = Events::with_capacity(256);
        let registered = self.door.sockets.iter().try_for_each(|listening| {
            let mut source = SourceFd(&listening.as_raw_fd());
            poll.registry().register(&mut source, Door::CALLERS, Interest::READABLE)
        });
        if let Err(error) = registered {
            return tracing::error!(%error, "cannot accept connections");
        }
        while !self.door.stop.load(Ordering::Acquire) {
            let now = Instant::now();
            self.hang_up_on_late_ones(now);
            self.accept_some(poll.registry(), now);
            let wake = self.wake(Instant::now());
            match poll.poll(&mut events, wake) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    return tracing::error!(%error, "no longer accepting connections");
                }
            }
            for event in &events {
                match event.token() {
                    Door::WAKE => {}
                    Door::CALLERS => self.waiting = true,
                    Token(token) => self.hear(token),
                }
            }
        }
    }

    /// How long there is nothing to do unless somebody says something.
    fn wake(&mut self, now: Instant) -> Option<Duration> {
        let oldest = self.strangers.first_key_value().map(|(_, caller)| caller.since);
        let oldest = oldest.into_iter().chain(self.challenged.values().map(|c| c.since)).min();
        let late = oldest.map(|since| since + self.door.message_limit);
        let accept = self.waiting.then(|| self.pause.unwrap_or_else(|| self.allowance.next(now)));
        let next = late.into_iter().chain(accept).min()?;
        Some(next.saturating_duration_since(now))
    }

    /// Accepts callers, as many as may come at once, and hears what each has said already.
    fn accept_some(&mut self, registry: &Registry, now: Instant) {
        if !self.waiting || self.pause.is_some_and(|pause| now < pause) {
            return;
        }
        self.pause = None;
        for _ in 0..AT_ONCE {
            let mut idle = true;
            for listening in &self.door.sockets {
                if !self.allowance.take(now) {
                    return;
                }
                match listening.accept() {
                    Ok((socket, address)) => {
                        idle = false;
                        if address.as_socket().is_some_and(|from| !from.ip().is_loopback())
                            && let Err(error) = window::keep_small(&socket)
                        {
                            tracing::debug!(%error, "a caller's window may grow");
                        }
                        if self.strangers.len() >= MOST_STRANGERS {
                            self.evict();
                        }
                        let token = self.next_token;
                        self.next_token += 1;
                        let fd = socket.as_raw_fd();
                        let added =
                            registry.register(&mut SourceFd(&fd), Token(token), Interest::READABLE);
                        if let Err(error) = added {
                            self.log.warn(now, |more| {
                                tracing::warn!(%error, more, "dropped a caller");
                            });
                            continue;
                        }
                        let reception = Some(Reception::default());
                        let caller = Caller { socket, address, since: now, reception, scrap: 0 };
                        self.strangers.insert(token, caller);
                        // Readiness would be told too, but what has come already may make room.
                        self.hear(token);
                    }
                    Err(e) => {
                        self.allowance.give_back();
                        match e.kind() {
                            ErrorKind::WouldBlock => {}
                            // This caller failed, which says nothing about the next caller.
                            ErrorKind::Interrupted
                            | ErrorKind::ConnectionAborted
                            | ErrorKind::ConnectionReset => idle = false,
                            // A stranger makes room.
                            _ if descriptors::is_shortage(&e) && self.evict() => idle = false,
                            _ => {
                                let error = descriptors::explain(e, self.door.need);
                                self.log.warn(now, |more| {
                                    tracing::warn!(%error, more, "cannot accept a caller just now");
                                });
                                self.pause = Some(now + SHORTAGE_PAUSE);
                                return;
                            }
                        }
                    }
                }
            }
            if idle {
                self.waiting = false;
                return;
            }
        }
    }

    /// The stranger that has been here longest makes room. One that knows the secret says so with its
    /// first packet.
    fn evict(&mut self) -> bool {
        let Some((_, caller)) = self.strangers.pop_first() else { return false };
        if let Some(reception) = &caller.reception {
            self.log.note(&peer_name(&caller.address), &reception.cut(true), Instant::now());
        }
        true
    }

    fn hang_up_on_late_ones(&mut self, now: Instant) {
        let limit = self.door.message_limit;
        let is_late = |caller: &Caller| now.saturating_duration_since(caller.since) >= limit;
        while self.strangers.first_key_value().is_some_and(|(_, caller)| is_late(caller)) {
            self.evict();
        }
        for (_, caller) in self.challenged.extract_if(.., |_, caller| is_late(caller)) {
            if let Some(reception) = &caller.reception {
                self.log.note(&peer_name(&caller.address), &reception.cut(true), now);
            }
        }
    }

    /// A caller has said something, or has hung up.
    fn hear(&mut self, token: usize) {
        let stranger = self.strangers.contains_key(&token);
        let callers = if stranger { &mut self.strangers } else { &mut self.challenged };
        let Some(caller) = callers.get_mut(&token) else { return };
        let fate = caller.hear(&self.door.credentials, &mut self.log);
        match fate {
            Fate::Stays => {}
            Fate::Challenged => {
                if let Some(mut caller) = self.strangers.remove(&token) {
                    self.allowance.give_back();
                    caller.since = Instant::now();
                    if self.challenged.len() >= MOST_CHALLENGED {
                        self.challenged.pop_first();
                    }
                    self.challenged.insert(token, caller);
                    // Its proof may have come too, if it is one that repeats what it has overheard.
                    self.hear(token);
                }
            }
            Fate::Proven(proven) => {
                let Some(Caller { socket, address, .. }) = self.challenged.remove(&token) else {
                    return;
                };
                let started = Stream::new(socket, &address)
                    .and_then(|stream| (self.start)(*proven, stream, Refusals::default()));
                if let Err(error) = started {
                    tracing::warn!(%error, "dropped a caller");
                }
            }
            Fate::Ends => {
                self.strangers.remove(&token);
                self.challenged.remove(&token);
            }
        }
    }
}

impl Caller {
    /// Takes what has come, until the caller has to be answered or there is nothing more.
    fn hear(&mut self, credentials: &Credentials, log: &mut Refusals) -> Fate {
        loop {
            let Some(reception) = &mut self.reception else { return self.read_out() };
            let was_challenged = reception.is_challenged();
            let count = match rustix::net::recv(&self.socket, reception.room(), RecvFlags::DONTWAIT)
            {
                Ok((0, _)) => {
                    let error = reception.cut(false);
                    log.note(&peer_name(&self.address), &error, Instant::now());
                    return Fate::Ends;
                }
                Ok((count, _)) => count,
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::AGAIN) => return Fate::Stays,
                Err(_) => return Fate::Ends,
            };
            let said = match reception.handle_read(count, credentials) {
                Ok(Heard::Nothing) => continue,
                Ok(Heard::Challenge(bytes)) => self.say(&bytes),
                Ok(Heard::Proven(proven)) => return Fate::Proven(Box::new(proven)),
                Ok(Heard::Refused(bytes, error)) => {
                    log.note(&peer_name(&self.address), &error, Instant::now());
                    self.reception = None;
                    self.say(&bytes) && self.socket.shutdown(Shutdown::Write).is_ok()
                }
                Err(error) => {
                    log.note(&peer_name(&self.address), &error.into(), Instant::now());
                    false
                }
            };
            match &self.reception {
                _ if !said => return Fate::Ends,
                Some(reception) if reception.is_challenged() && !was_challenged => {
                    return Fate::Challenged;
                }
                _ => {}
            }
        }
    }

    /// Answers are shorter than what a new connection takes at once.
    fn say(&self, bytes: &[u8]) -> bool {
        let flags = NO_SIGNAL | rustix::net::SendFlags::DONTWAIT.bits() as c_int;
        self.socket.send_with_flags(bytes, flags).is_ok_and(|count| count == bytes.len())
    }

    /// Reads what a refused caller still says. If its connection were closed with something unread,
    /// the refusal might not arrive.
    fn read_out(&mut self) -> Fate {
        let mut scrap = [0u8; 4096];
        while self.scrap < MOST_SCRAP {
            match rustix::net::recv(&self.socket, &mut scrap, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Fate::Ends,
                Ok((count, _)) => self.scrap += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Fate::Stays,
                Err(_) => return Fate::Ends,
            }
        }
        Fate::Ends
    }
}

/// How many strangers may come. A caller that knows the secret costs nothing.
struct Allowance {
    left: u32,
    /// When it was last filled up.
    filled: Instant,
}

impl Allowance {
    fn new(now: Instant) -> Self {
        Self { left: BURST, filled: now }
    }

    /// Whether one more may come now.
    fn take(&mut self, now: Instant) -> bool {
        if self.left == 0 {
            let ripe = now.saturating_duration_since(self.filled).as_micros() / FILL.as_micros();
            if ripe > 0 {
                self.left =
                    u32::try_from(ripe).map_or(BURST, |n| n.saturating_mul(PER_FILL).min(BURST));
                self.filled = now;
            }
        }
        let one = self.left > 0;
        self.left = self.left.saturating_sub(1);
        one
    }

    fn give_back(&mut self) {
        self.left = (self.left + 1).min(BURST);
    }

    /// When one more may come.
    fn next(&self, now: Instant) -> Instant {
        if self.left > 0 { now } else { self.filled + FILL }
    }
}

/// Tells of refused callers, at a limited rate.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    /// Lines of the current period.
    lines: u32,
    began: Option<Instant>,
    /// Lines that were left out since the last one.
    more: u64,
}

impl Refusals {
    /// A handshake has ended with `error`.
    fn note(&mut self, peer: &str, error: &HandshakeError, now: Instant) {
        match error {
            // Scanners and health checks: they asked for nothing, and nothing was refused.
            HandshakeError::Cut { message: "Hello", got: 0, .. } => {
                tracing::debug!(peer, "a caller left without a word");
            }
            // It will call again.
            HandshakeError::Refused(Status::NoBook) => {
                tracing::debug!(peer, reason = %error, "put off a connection");
            }
            error => self.warn(now, |more| match more {
                0 => tracing::warn!(peer, reason = %error, "refused a connection"),
                _ => tracing::warn!(peer, reason = %error, more, "refused a connection, and more"),
            }),
        }
    }

    /// Has `tell` write a line, with the number of those that were left out before it, unless there
    /// were many just now.
    fn warn(&mut self, now: Instant, tell: impl FnOnce(u64)) {
        if self.began.is_none_or(|began| now.saturating_duration_since(began) >= PERIOD) {
            (self.began, self.lines) = (Some(now), 0);
        }
        if self.lines == LINES {
            self.more += 1;
            return;
        }
        self.lines += 1;
        tell(std::mem::take(&mut self.more));
    }
}

/// The most strangers at a time. Each takes a descriptor, of which a process has few, and 400 bytes.
pub(crate) const MOST_STRANGERS: usize = 128;
/// The most callers whose proof is awaited. Only who knows the secret, or has overheard somebody who
/// does, gets there.
const MOST_CHALLENGED: usize = 256;
/// Callers that are accepted before those that are there already are heard again.
const AT_ONCE: usize = 32;
/// How many strangers may come at once, and how many more in each period after that: 1,000 a second.
/// 3,000 a second took 11% of a core of a busy machine. Every lane of every node of a large job may call
/// in the same instant, and does not count once its hello has come.
const BURST: u32 = 4096;
const PER_FILL: u32 = 10;
const FILL: Duration = Duration::from_millis(10);
/// How much of a refused caller is read: more than a request of any protocol has.
const MOST_SCRAP: usize = 64 << 10;
/// How long to wait when the system is out of descriptors or memory.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(100);
/// So many refusals are told in each period.
const LINES: u32 = 10;
const PERIOD: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_come_at_a_limited_rate_and_members_do_not_count() {
        let start = Instant::now();
        let mut allowance = Allowance::new(start);
        let taken = |allowance: &mut Allowance, at: Duration| {
            (0..100_000).take_while(|_| allowance.take(start + at)).count()
        };
        assert_eq!(taken(&mut allowance, Duration::ZERO), BURST as usize);
        assert_eq!(taken(&mut allowance, FILL / 2), 0);
        assert_eq!(allowance.next(start), start + FILL);
        assert_eq!(taken(&mut allowance, FILL), PER_FILL as usize);
        allowance.give_back();
        assert_eq!(taken(&mut allowance, FILL), 1);
        assert_eq!(taken(&mut allowance, 11 * FILL), 10 * PER_FILL as usize);
    }

    #[test]
    fn refusals_are_told_at_a_limited_rate_and_none_is_forgotten() {
        let start = Instant::now();
        let (mut log, mut told, mut left_out) = (Refusals::default(), 0, 0);
        for at in [Duration::ZERO, PERIOD] {
            for _ in 0..1000 {
                log.warn(start + at, |more| (told, left_out) = (told + 1, left_out + more));
            }
        }
        assert_eq!((told, left_out), (2 * LINES, 1000 - u64::from(LINES)));
    }
}
