//! What a training program holds.

pub(crate) mod device;
pub(crate) mod layers;
pub(crate) mod rebuild;
pub(crate) mod rule_state;

mod budget;
mod builder;
mod checkpoint;
mod device_checks;
mod factors;
mod gather;
pub(crate) mod observed;
pub(crate) mod others;
mod rates;
mod replan;
mod replicas;
mod requests;
mod sibling;

use crate::job::book::{self, Book};
use crate::job::patience::Patience;
use crate::lane::Command;
use crate::memory::exchange::Exchange;
use crate::node::Node;
use crate::node::checkpoint::Places;
use crate::node::session_parts::SessionParts;
use crate::session::layers::{InFlight, LayerState, Layers, RebuildThread};
use crate::session::rates::Rates;
use crate::session::replicas::Replicas;
use crate::session::requests::Requests;
pub use crate::session::requests::Turnout;
use crate::{Buffer, Error, Traffic};
pub use builder::Builder;
pub use checkpoint::{Description, Saved, Saving};
use poseidon_core::wire::{Kind, Marks, Terms};
use poseidon_core::{ChannelId, Clock, Encoding, Encodings, LayerId, Plan, Scheme};
use serde_json::Value;
use std::ops::Range;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

/// A worker's part in a job: sends gradients, receives synchronised results.
///
/// Threads may share a session: nearly all methods take `&self`, and layers do not depend on each
/// other. A session that is dropped without [`finish`](Session::finish) takes the job down, so that
/// nobody waits for a worker that is gone.
pub struct Session {
    pub(crate) node: Arc<Node>,
    pub(crate) parts: SessionParts,
    pub(crate) timeout: Duration,
    rates: Rates,
    requests: Requests,
    places: Places,
    pub(crate) layers: Arc<Layers>,
    /// If there are layers that go by factors.
    rebuild_thread: Option<RebuildThread>,
    /// If workers are compared.
    replicas: Option<Replicas>,
    finished: bool,
}

/// What comes back from a layer that was sent.
#[derive(Debug)]
pub struct Received {
    /// The reduced gradient or the new parameters.
    pub result: Buffer,
    /// The memory the gradient was sent from, if the result went elsewhere. Its contents are lost:
    /// sums are made in it.
    pub gradient: Option<Buffer>,
    /// The clock this result belongs to.
    pub clock: Clock,
    /// When the last byte of the result had come, which may be long before the program received it.
    pub landed: Instant,
    /// From when to when the result was rebuilt from factors, if it was.
    pub rebuilt: Option<Range<Instant>>,
}

impl Session {
    /// This worker's rank.
    pub fn rank(&self) -> u16 {
        self.node.me.0
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.parts.book.cluster.workers()
    }

    /// How long the session waits for other workers before it gives up.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The id of the layer called `name`.
    pub fn layer(&self, name: &str) -> Result<LayerId, Error> {
        let layers = &self.parts.book.job.layers;
        let position = layers.iter().position(|l| l.name == name);
        position.map(|p| LayerId(p as u32)).ok_or_else(|| self.unknown(name))
    }

    /// The layer's clock: how many times it has been sent. 0 before the first step.
    pub fn clock(&self, layer: LayerId) -> Result<Clock, Error> {
        Ok(self.state(layer)?.clock)
    }

    /// How each layer is synchronised and where its chunks live.
    pub fn plan(&self) -> &Plan {
        &self.parts.plan
    }

    /// How `layer` is to be sent: by [`send`](Session::send) or by
    /// [`send_factors`](Session::send_factors).
    pub fn scheme(&self, layer: LayerId) -> Result<Scheme, Error> {
        let choice = self.parts.plan.choice(layer);
        choice.map(|c| c.scheme).ok_or_else(|| self.unknown(&format!("#{layer}")))
    }

    /// The information book.
    pub fn book(&self) -> &Book {
        &self.parts.book
    }

    /// Looks up a dotted path in the information book, such as `cluster.workers`. Paths that begin
    /// with `plan` or `chunks` lead into the plan, which follows from the book.
    pub fn query(&self, key: &str) -> Option<Value> {
        book::query(&self.parts.book, key)
    }

    /// What this node has sent and received so far.
    pub fn traffic(&self) -> Traffic {
        self.parts.counters.traffic()
    }

    /// Bytes this node has sent for `layer` so far, headers included.
    pub fn sent(&self, layer: LayerId) -> u64 {
        self.parts.counters.sent(layer.index())
    }

    /// Gives every worker worker 0's values of `layer`, and the shards their initial parameters.
    /// Every worker calls it, once, before the first [`send`](Session::send) of the layer, and
    /// receives the values with [`receive`](Session::receive).
    pub fn broadcast(&self, layer: LayerId, values: Buffer) -> Result<(), Error> {
        let mut state = self.state(layer)?;
        let down = self.parts.plan.encodings(layer).down;
        self.check_buffer(layer, "buffer", &values, down)?;
        self.check_broadcast(layer, &state)?;
        let exchange = Exchange::of_initial_values(layer, values, None);
        self.dispatch(&mut state, exchange)
    }

    fn check_broadcast(&self, layer: LayerId, state: &LayerState) -> Result<(), Error> {
        self.check_landed(layer, state)?;
        if state.initialised || state.clock != Clock(0) {
            let (layer, clock) = (self.name(layer), state.clock);
            return Err(Error::AlreadyInitialised { layer, clock });
        }
        Ok(())
    }

    /// Contributes `gradient` to the layer's next clock. Returns at once; the result replaces the
    /// gradient in the same memory. The gradient is of the layer's [`up`](crate::Layer::up) encoding, and the
    /// result of its `down`.
    pub fn send(&self, layer: LayerId, gradient: Buffer) -> Result<(), Error> {
        self.push(layer, gradient, None)
    }

    /// As [`send`](Session::send), but the result goes to `destination`.
    pub fn send_into(
        &self,
        layer: LayerId,
        gradient: Buffer,
        destination: Buffer,
    ) -> Result<(), Error> {
        self.push(layer, gradient, Some(destination))
    }

    /// Has a layer that was [sent by factors](Session::send_factors) rebuilt as soon as all
    /// workers' factors have come, on a thread beside the program, instead of when the layer is
    /// received. From now on the memory of the layer's values may change.
    pub fn rebuild(&self, layer: LayerId) -> Result<(), Error> {
        let state = self.state(layer)?;
        if self.layers.matrices(layer).is_none() {
            let instead = "receive it: nothing of it is rebuilt";
            let (layer, scheme) = (self.name(layer), Scheme::Ps);
            return Err(Error::Scheme { layer, scheme, instead });
        }
        match (&state.in_flight, &self.rebuild_thread) {
            (Some(InFlight::Factors { clock, .. }), Some(rebuild_thread)) => {
                rebuild_thread.order(layer, *clock);
                Ok(())
            }
            _ => Err(Error::NotInFlight { layer: self.name(layer) }),
        }
    }

    /// Waits for the layer sent last and gives its memory back.
    pub fn receive(&self, layer: LayerId) -> Result<Received, Error> {
        loop {
            if let Some(received) = self.receive_unless(layer, || false)? {
                return Ok(received);
            }
        }
    }

    /// As [`receive`](Session::receive), but asks `interrupted` twice a second whether to stop
    /// waiting. If it says so, there is no result, and the layer stays in flight.
    pub fn receive_unless(
        &self,
        layer: LayerId,
        interrupted: impl FnMut() -> bool,
    ) -> Result<Option<Received>, Error> {
        self.check_receiver(layer, false)?;
        let landed = self.await_landed(layer, interrupted)?;
        Ok(landed.map(|in_flight| self.received(layer, in_flight)))
    }

    /// Waits until what was sent last is all back, unless it is interrupted.
    fn await_landed(
        &self,
        layer: LayerId,
        mut interrupted: impl FnMut() -> bool,
    ) -> Result<Option<InFlight>, Error> {
        let in_flight = self.state(layer)?.in_flight.as_ref().map(InFlight::clock);
        let Some(clock) = in_flight else {
            return Err(Error::NotInFlight { layer: self.name(layer) });
        };
        let begin = self.parts.trace.begin_wait();
        let is_back = self.await_lanes(layer, clock, &mut interrupted);
        self.parts.trace.waited(layer.index(), clock.0, begin);
        if !is_back.inspect_err(|error| self.node.observed.fail(error))? {
            return Ok(None);
        }
        let mut state = self.state(layer)?;
        self.layers.rebuild(layer, clock, &mut state);
        let Some(in_flight) = state.in_flight.take_if(|sent| sent.clock() == clock) else {
            return Err(Error::NotInFlight { layer: self.name(layer) }); // another thread was faster
        };
        state.clock = clock;
        if let InFlight::Chunks(exchange) = &in_flight {
            state.initialised |= exchange.kind == Kind::Init;
            // Later than `clock` if this worker's contribution came too late.
            state.clock = clock.max(self.parts.board.answer(layer));
        }
        self.parts.trace.received(layer.index(), clock.0, self.parts.board.finished(layer));
        Ok(Some(in_flight))
    }

    /// Waits until the lanes have finished with `layer` at `clock`. False if it is interrupted.
    fn await_lanes(
        &self,
        layer: LayerId,
        clock: Clock,
        interrupted: &mut impl FnMut() -> bool,
    ) -> Result<bool, Error> {
        let patience = patience(self.timeout);
        let mut left = Patience::new(patience);
        while !self.parts.board.wait(layer, Instant::now() + left.stretch())? {
            if interrupted() {
                return Ok(false);
            }
            if !left.stretch().is_zero() {
                continue;
            }
            let missing = self.explain(layer);
            let layer = self.name(layer);
            let error = Error::Timeout { layer, clock, waited: patience, missing };
            self.parts.command_all(|| Command::Abort(error.to_string()));
            return Err(error);
        }
        Ok(true)
    }

    fn received(&self, layer: LayerId, in_flight: InFlight) -> Received {
        let (sent, landed) = (in_flight.clock(), self.parts.board.finished(layer));
        let clock = sent.max(self.parts.board.answer(layer));
        let (result, gradient, rebuilt) = match in_flight {
            InFlight::Chunks(exchange) => {
                // Lanes let go of an exchange before they report their part done.
                let exchange =
                    Arc::into_inner(exchange).expect("a lane kept an exchange it reported done");
                let gradient = exchange.gradient.into_buffer();
                match exchange.destination {
                    Some(result) => (result.into_buffer(), Some(gradient), None),
                    None => (gradient, None, None),
                }
            }
            InFlight::Factors { values, rebuilt, .. } => (values, None, rebuilt),
            InFlight::Gathered(_) => (Buffer::default(), None, None),
        };
        self.note_replica(layer, clock, &result);
        Received { result, gradient, clock, landed, rebuilt }
    }

    /// Whether [`receive`](Session::receive) would return without waiting.
    pub fn is_ready(&self, layer: LayerId) -> Result<bool, Error> {
        self.check_running()?;
        if layer.index() >= self.layers.ids().count() {
            return Err(self.unknown(&format!("#{layer}")));
        }
        // While another thread holds the layer's state, the layer is being rebuilt.
        let in_flight = |state: MutexGuard<'_, LayerState>| state.in_flight.is_some();
        Ok(self.layers.try_state(layer).is_some_and(in_flight) && self.parts.board.is_done(layer))
    }

    /// Says goodbye, goes on serving this node's shards until every other worker has said goodbye
    /// too, and returns when the session is over. The others have the job's timeout for that: then
    /// this is an error that names those who have not.
    pub fn finish(mut self) -> Result<(), Error> {
        self.say_goodbye()?;
        self.finished = true;
        self.parts.wait_closed(Some(self.timeout.saturating_add(LANES_TO_END)))
    }

    /// The first half of [`finish`](Session::finish): nothing is sent afterwards. A program with
    /// several sessions says goodbye on all of them before it finishes one, because other workers
    /// may be waiting for its goodbye on any of them.
    pub fn say_goodbye(&self) -> Result<(), Error> {
        self.check_running()?;
        for layer in self.layers.ids() {
            let state = self.state(layer)?;
            self.check_landed(layer, &state)?;
            self.check_together(layer, state.clock)?;
        }
        self.settle_replicas()?;
        self.parts.command_all(|| Command::Finish);
        Ok(())
    }

    /// Takes the job down and tells everybody why. In a process that was forked from this session's it
    /// only logs that the session is not this process's.
    pub fn abort(mut self, reason: &str) {
        self.cancel(reason);
        if std::mem::replace(&mut self.finished, true) || self.node.check_owner().is_err() {
            return;
        }
        // The reason is for the others; this program has it.
        let _ = self.parts.wait_closed(Some(LANES_TO_END));
    }

    /// As [`abort`](Session::abort), for a session that other threads still hold: the waits of
    /// these threads end with the reason as well.
    pub fn cancel(&self, reason: &str) {
        if let Err(error) = self.node.check_owner() {
            return tracing::error!("nothing was stopped: {error}");
        }
        self.parts.command_all(|| Command::Abort(reason.to_owned()));
    }

    fn push(&self, layer: LayerId, gradient: Buffer, into: Option<Buffer>) -> Result<(), Error> {
        let mut state = self.state(layer)?;
        let Encodings { up, down } = self.parts.plan.encodings(layer);
        self.check_buffer(layer, "gradient", &gradient, up)?;
        // Without a destination the result goes where the gradient was.
        let (what, result) = match &into {
            Some(destination) => ("destination", destination),
            None => ("gradient, which the result replaces,", &gradient),
        };
        self.check_buffer(layer, what, result, down)?;
        let terms = self.check_push(layer, &state)?;
        let (clock, kind, landings) = (state.clock.next(), Kind::Push, None);
        let (gradient, destination) = (gradient.into(), into.map(Into::into));
        self.dispatch(
            &mut state,
            Exchange { layer, clock, kind, terms, gradient, destination, landings },
        )
    }

    /// Whether a gradient may be sent now. Returns what goes with it.
    fn check_push(&self, layer: LayerId, state: &LayerState) -> Result<Terms, Error> {
        if self.layers.matrices(layer).is_some() {
            let instead = "send its factors instead of a gradient";
            let (layer, scheme) = (self.name(layer), Scheme::Sfb);
            return Err(Error::Scheme { layer, scheme, instead });
        }
        self.check_landed(layer, state)?;
        self.check_step(layer, state)
    }

    fn dispatch(&self, state: &mut LayerState, exchange: Exchange) -> Result<(), Error> {
        self.check_running()?;
        let (begin, layer) = (self.parts.trace.now(), exchange.layer);
        let exchange = Arc::new(exchange);
        self.parts.dispatch(&exchange);
        self.note_sent(state, layer, InFlight::Chunks(exchange), begin);
        Ok(())
    }

    /// The layer is with the lanes. This thread began to send it at `begin`, if that is noted.
    fn note_sent(
        &self,
        state: &mut LayerState,
        layer: LayerId,
        in_flight: InFlight,
        begin: Option<u64>,
    ) {
        self.parts.trace.sent(layer.index(), in_flight.clock().0, begin);
        self.layers.note_sent(layer, in_flight.clock());
        let is_owed = matches!(in_flight, InFlight::Gathered(_))
            && self.requests.marks(in_flight.clock()).contains(Marks::KEEP);
        if is_owed {
            state.owed = Some(in_flight.clock());
        }
        state.in_flight = Some(in_flight);
    }

    /// Whether the layer may take a step. Returns what goes with its contribution.
    fn check_step(&self, layer: LayerId, state: &LayerState) -> Result<Terms, Error> {
        let optimizer = self.parts.book.job.rule(layer);
        if !state.initialised && !optimizer.is_stateless() {
            let optimizer = optimizer.to_string();
            return Err(Error::NotInitialised { layer: self.name(layer), optimizer });
        }
        let rate = self.rates.get(layer);
        if !rate.is_finite() {
            return Err(Error::Config(format!("learning rate {rate}: expected a number")));
        }
        Ok(Terms { rate, marks: self.requests.marks(state.clock.next()) })
    }

    /// Asks the lanes what they are waiting for.
    fn explain(&self, layer: LayerId) -> String {
        let (reply, answers) = sync_channel(self.parts.lanes());
        self.parts.command_all(|| Command::Explain(layer, reply.clone()));
        drop(reply);
        let deadline = Instant::now() + Duration::from_secs(1);
        let mut words = Vec::new();
        let left = || deadline.saturating_duration_since(Instant::now());
        while let Ok(answer) = answers.recv_timeout(left()) {
            words.extend(answer);
        }
        match words.len() {
            0 if self.state(layer).is_ok_and(|state| state.stage.is_some()) => {
                "its device has not computed it or not copied it".into()
            }
            0 => "the lanes await nothing".into(),
            n if n > 4 => format!("awaiting {} and {} more", words[..4].join(", "), n - 4),
            _ => format!("awaiting {}", words.join(", ")),
        }
    }

    /// Fails in a process that was forked from this session's, and if the session has failed.
    pub(crate) fn check_running(&self) -> Result<(), Error> {
        self.node.check_owner()?;
        let Some(error) = self.parts.board.failure() else { return Ok(()) };
        self.node.observed.fail(&error);
        Err(error)
    }

    pub(crate) fn state(&self, layer: LayerId) -> Result<MutexGuard<'_, LayerState>, Error> {
        // Before the lock: another thread of the parent may have had it when this process was forked.
        self.node.check_owner()?;
        self.layers.state(layer).ok_or_else(|| self.unknown(&format!("#{layer}")))
    }

    /// Whether `buffer` has the layer's length and is of `encoding`.
    fn check_buffer(
        &self,
        layer: LayerId,
        what: &'static str,
        buffer: &Buffer,
        encoding: Encoding,
    ) -> Result<(), Error> {
        self.check_length(layer, what, buffer.len())?;
        if buffer.encoding() != encoding {
            let (layer, expected, got) = (self.name(layer), encoding, buffer.encoding());
            return Err(Error::Encoding { layer, what, expected, got });
        }
        Ok(())
    }

    fn check_length(&self, layer: LayerId, what: &'static str, got: usize) -> Result<(), Error> {
        let expected = self.parts.book.job.layers[layer.index()].len;
        if got == expected {
            return Ok(());
        }
        Err(Error::Length { layer: self.name(layer), what, expected, got })
    }

    pub(crate) fn check_landed(&self, layer: LayerId, state: &LayerState) -> Result<(), Error> {
        let Some(in_flight) = &state.in_flight else { return Ok(()) };
        Err(Error::InFlight { layer: self.name(layer), clock: in_flight.clock() })
    }

    pub(crate) fn name(&self, layer: LayerId) -> String {
        self.parts.book.job.layers[layer.index()].name.clone()
    }

    fn unknown(&self, name: &str) -> Error {
        let layers = &self.parts.book.job.layers;
        let mut known: Vec<_> = layers.iter().take(8).map(|l| format!("'{}'", l.name)).collect();
        if layers.len() > known.len() {
            known.push(format!("{} more", layers.len() - known.len()));
        }
        let known = if known.is_empty() { "none".into() } else { known.join(", ") };
        Error::UnknownLayer { name: name.into(), known }
    }
}

/// How long the lanes of this node may take to let go of a session that is over.
const LANES_TO_END: Duration = Duration::from_secs(10);

/// How long a layer may take. The shards' deadline is earlier, because a shard knows which worker
/// is missing.
pub(crate) fn patience(timeout: Duration) -> Duration {
    timeout + Duration::from_secs(2)
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.node.check_owner().is_err() {
            // The threads are not there to be waited for.
            std::mem::forget((self.rebuild_thread.take(), self.replicas.take()));
            return;
        }
        if !self.finished {
            let how = if std::thread::panicking() { "panicked" } else { "dropped its session" };
            let reason = format!("worker {} {how} before it was finished", self.rank());
            self.parts.command_all(|| Command::Abort(reason.clone()));
            // The reason is for the others; this program knows what it did.
            let _ = self.parts.wait_closed(Some(LANES_TO_END));
        }
        self.node.observed.close(self.parts.id, self.parts.board.failure().as_ref());
    }
}

impl Session {
    /// Opens the session `id` that `book` describes on the links of `node`.
    pub(crate) fn open(
        node: Arc<Node>,
        id: ChannelId,
        book: Arc<Book>,
        rate: f32,
        rebuild_threads: usize,
    ) -> Result<Self, Error> {
        let timeout = node.config.timeout;
        let (rules, tiles) = (book.job.rules().cloned().collect(), book.tiles());
        let rates = Rates::new(book.job.layers.len(), rate);
        let places = Places::open(&book.job)?;
        let parts = SessionParts::attach(&node, id, book, places.from.as_deref())?;
        let by_factors = parts.matrices.iter().any(Option::is_some);
        let keeping = (node.me, parts.keeper.clone());
        let layers = Layers::new(parts.matrices.clone(), rules, rebuild_threads, tiles, keeping);
        let layers = Arc::new(layers.recorded(parts.trace.clone()));
        let (requests, rebuild_thread, finished) = (Requests::default(), None, false);
        let mut session = Self {
            node,
            parts,
            timeout,
            rates,
            requests,
            places,
            layers,
            rebuild_thread,
            replicas: None,
            finished,
        };
        // From here on a failure drops the session, and the drop tells the other workers.
        if by_factors {
            let (layers, board) = (session.layers.clone(), session.parts.board.clone());
            let thread = RebuildThread::start(layers, board, patience(timeout))?;
            session.rebuild_thread = Some(thread);
        }
        session.replicas = Replicas::start(&session)?;
        session.restore_layers()?;
        Ok(session)
    }
}
