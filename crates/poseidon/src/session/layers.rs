//! What a session knows of its layers, and the thread that rebuilds their gradients beside the
//! training program.

use crate::lane::board::Board;
use crate::memory::buffer::Buffer;
use crate::memory::exchange::Exchange;
use crate::memory::factors::FactorMatrices;
use crate::memory::kept::KeptPiece;
use crate::session::device::Stage;
use crate::session::rebuild::{Rebuilder, Rule};
use crate::trace::SessionTrace;
use crate::{Error, LayerId};
use poseidon_core::wire::{Marks, Terms};
use poseidon_core::{Clock, NodeId, Optimizer};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The layers of one session. Each has a lock of its own.
#[derive(Debug)]
pub(crate) struct Layers {
    states: Vec<Mutex<LayerState>>,
    /// By layer: the clock that was sent last. Written by whoever sends, who holds the layer's state.
    /// Read without that lock, which the rebuild thread may hold for a large part of a step.
    sent: Vec<AtomicU64>,
    /// By layer: the matrices of those that go by factors.
    matrices: Vec<Option<Arc<FactorMatrices>>>,
    /// By layer.
    rules: Vec<Optimizer>,
    /// How many threads a product may use.
    threads: usize,
    /// Whether a product may use tiles.
    tiles: bool,
    me: NodeId,
    /// Where this worker's share of what is to be kept goes.
    keeper: Sender<KeptPiece>,
    /// What is noted of the session.
    trace: Option<Arc<SessionTrace>>,
}

#[derive(Debug, Default)]
pub(crate) struct LayerState {
    pub(crate) clock: Clock,
    /// Steps the update rule took before this session: its state came from a checkpoint.
    pub(crate) steps_before: u64,
    pub(crate) initialised: bool,
    pub(crate) in_flight: Option<InFlight>,
    pub(crate) rebuilder: Rebuilder,
    /// If the layer is on a device: what it passes through.
    pub(crate) stage: Option<Stage>,
    /// If the layer goes by factors: clocks that were sent and whose steps are not taken, in order.
    pub(crate) untaken: VecDeque<(Clock, Terms)>,
    /// If the program rebuilds the layer itself: the clock whose state it has to hand over for a
    /// checkpoint.
    pub(crate) owed: Option<Clock>,
    /// Everybody's factors as `f32`s, if they travel as something else. Kept for the next step.
    decoded: Vec<f32>,
}

/// What the lanes are working on.
#[derive(Debug)]
pub(crate) enum InFlight {
    /// Chunks, through the shards.
    Chunks(Arc<Exchange>),
    /// Factors, from worker to worker; `values` waits for what they become.
    Factors { clock: Clock, values: Buffer, rebuilt: Option<Range<Instant>> },
    /// Factors, which the program rebuilds itself.
    Gathered(Clock),
}

impl InFlight {
    pub(crate) fn clock(&self) -> Clock {
        match self {
            Self::Chunks(exchange) => exchange.clock,
            Self::Factors { clock, .. } | Self::Gathered(clock) => *clock,
        }
    }
}

impl Layers {
    pub(crate) fn new(
        matrices: Vec<Option<Arc<FactorMatrices>>>,
        rules: Vec<Optimizer>,
        threads: usize,
        tiles: bool,
        (me, keeper): (NodeId, Sender<KeptPiece>),
    ) -> Self {
        let states = matrices.iter().map(|_| Mutex::default()).collect();
        let sent = matrices.iter().map(|_| AtomicU64::new(0)).collect();
        Self { states, sent, matrices, rules, threads, tiles, me, keeper, trace: None }
    }

    /// When layers are rebuilt is noted in `trace`.
    pub(crate) fn recorded(self, trace: Arc<SessionTrace>) -> Self {
        Self { trace: Some(trace), ..self }
    }

    /// One layer's state, or nothing if there is no such layer. Waits while the layer is being
    /// rebuilt.
    ///
    /// # Panics
    /// If another thread panicked while it held the state: half a step may have been taken.
    pub(crate) fn state(&self, layer: LayerId) -> Option<MutexGuard<'_, LayerState>> {
        let state = self.states.get(layer.index())?.lock();
        Some(state.expect("a thread panicked in the middle of a layer; its message says why"))
    }

    /// As [`state`](Self::state), but nothing also while another thread holds the state.
    pub(crate) fn try_state(&self, layer: LayerId) -> Option<MutexGuard<'_, LayerState>> {
        self.states.get(layer.index())?.try_lock().ok()
    }

    /// The clock of `layer` that was sent last; 0 before the first. Waits for nobody.
    pub(crate) fn sent(&self, layer: LayerId) -> Clock {
        self.sent.get(layer.index()).map_or(Clock(0), |sent| Clock(sent.load(Ordering::Relaxed)))
    }

    /// `clock` is the one of `layer` that was sent last.
    pub(crate) fn note_sent(&self, layer: LayerId, clock: Clock) {
        self.sent[layer.index()].store(clock.0, Ordering::Relaxed);
    }

    /// How many threads a product may use.
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Hands a piece to the thread that writes a checkpoint.
    pub(crate) fn keep(&self, piece: KeptPiece) {
        // A program that has stopped writing its checkpoint needs it no more.
        let _ = self.keeper.send(piece);
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = LayerId> + use<> {
        (0..self.states.len() as u32).map(LayerId)
    }

    /// Where the factors of `layer` meet, if it goes by factors.
    pub(crate) fn matrices(&self, layer: LayerId) -> Option<&Arc<FactorMatrices>> {
        self.matrices.get(layer.index())?.as_ref()
    }

    /// Turns a layer's factors into what the program gets back: those of all clocks that have come
    /// whole, one clock after the other. Does nothing if that is done already, or if the layer is not in
    /// flight by factors at clock `at`.
    pub(crate) fn rebuild(&self, layer: LayerId, at: Clock, state: &mut LayerState) {
        let Some(InFlight::Factors { values, rebuilt: rebuilt @ None, .. }) =
            state.in_flight.as_mut().filter(|sent| sent.clock() == at)
        else {
            return;
        };
        let matrices = self.matrices(layer).expect("only a layer with matrices is sent by factors");
        let (begun, gathered) = (Instant::now(), matrices.gathered());
        let begin = self.trace.as_ref().and_then(|trace| trace.now());
        let due = |(clock, _): &mut (Clock, Terms)| *clock <= gathered;
        while let Some((clock, terms)) = state.untaken.pop_front_if(due) {
            let rule = Rule {
                optimizer: &self.rules[layer.index()],
                rate: terms.rate,
                clock: Clock(clock.0 + state.steps_before),
                threads: self.threads,
                tiles: self.tiles,
            };
            // SAFETY: the lanes have reported everybody's rows of this clock, and touch them again
            // only after a clock has been sent that this step comes before; the layer's state, which
            // is locked, is in between.
            let rows = unsafe { matrices.rows(clock, &mut state.decoded) };
            state.rebuilder.apply(rows, &matrices.layout, &rule, values);
            if terms.marks.contains(Marks::KEEP) {
                // Every worker has the whole layer. Each keeps a share of it.
                let range = share(values.len(), self.me, matrices.layout.workers);
                let part = |vector: &[f32]| vector[range.clone()].into();
                let piece = KeptPiece {
                    layer,
                    clock,
                    steps: rule.clock.0,
                    parameters: part(values),
                    vectors: state.rebuilder.state.iter().map(|vector| part(vector)).collect(),
                    range,
                };
                self.keep(piece);
            }
        }
        *rebuilt = Some(begun..Instant::now());
        if let Some(trace) = &self.trace {
            trace.rebuilt(layer.index(), at.0, begin);
        }
    }
}

/// The elements that `worker` keeps, of a layer of `len` that all `workers` have.
pub(crate) fn share(len: usize, worker: NodeId, workers: usize) -> Range<usize> {
    let bound = |worker: usize| (len as u128 * worker as u128 / workers as u128) as usize;
    bound(worker.index())..bound(worker.index() + 1)
}

/// A thread that rebuilds layers as soon as their factors are there, in the order they are asked for.
///
/// The thread holds a layer's state while it works on the layer, so another thread that needs the
/// layer waits. A layer that this thread has not begun is rebuilt by the thread that receives it.
pub(crate) struct RebuildThread {
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

type Order = (LayerId, Clock);

impl RebuildThread {
    /// `patience` is how long factors may take.
    pub(crate) fn start(
        layers: Arc<Layers>,
        board: Arc<Board>,
        patience: Duration,
    ) -> Result<Self, Error> {
        let (orders, taken) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("poseidon-rebuild".into())
            .spawn(move || work(&taken, &layers, &board, patience))
            .map_err(Error::io("starting a thread that rebuilds gradients"))?;
        Ok(Self { orders: Some(orders), thread: Some(thread) })
    }

    pub(crate) fn order(&self, layer: LayerId, clock: Clock) {
        if let Some(orders) = &self.orders {
            // If the rebuild thread has panicked, the thread that receives the layer learns of it.
            let _ = orders.send((layer, clock));
        }
    }
}

impl Drop for RebuildThread {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // A panic is a bug; its message is on standard error already.
            let _ = thread.join();
        }
    }
}

fn work(orders: &Receiver<Order>, layers: &Layers, board: &Board, patience: Duration) {
    for (layer, clock) in orders {
        // The thread that receives may have been faster, and the layer may be in flight again, at a
        // later clock.
        let is_due = || {
            let state = layers.state(layer);
            state.is_some_and(|state| state.in_flight.as_ref().is_some_and(|f| f.clock() == clock))
        };
        // A failure, or a deadline that passes, is told to the thread that receives the layer.
        if is_due()
            && board.wait_beside(layer, Instant::now() + patience)
            && let Some(mut state) = layers.state(layer)
        {
            layers.rebuild(layer, clock, &mut state);
        }
    }
}
