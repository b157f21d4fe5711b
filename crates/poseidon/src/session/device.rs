//! Layers whose memory is on a device.
//!
//! A layer passes through a stage: pinned host memory as long as the layer. The [copier] fills it
//! piece by piece, hands each piece to the lanes as soon as it is there, and copies results to the
//! device as soon as they come. From the lanes' side a stage is memory like any other.
//!
//! [copier]: poseidon_device::Copier

use crate::memory::exchange::Exchange;
use crate::memory::factors::{FactorBytes, FactorMatrices, Factors};
use crate::memory::landings::Landings;
use crate::memory::on_device::OnDevice;
use crate::node::session_parts::Consignment;
use crate::session::Session;
use crate::session::layers::{InFlight, LayerState};
use crate::trace::What;
use crate::{Buffer, Error, LayerId};
use poseidon_core::wire::{Kind, Terms};
use poseidon_core::{Clock, Encoding, Encodings, Epoch, LaneId, NodeId, copies};
use poseidon_device::{
    Cargo, Collected, Copier, Copy, Fault, Pinned, ProgramStream, Registered, SharedEvent, Stream,
};
use std::ops::Range;
use std::sync::Arc;

/// What a layer on a device passes through.
#[derive(Debug)]
pub(crate) struct Stage {
    copier: Arc<Copier>,
    /// Passed by the copies of the last results to the device.
    arrived: SharedEvent,
    epoch: Epoch,
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    /// For gradients and parameters.
    Whole(Arc<Whole>),
    /// For factors: the matrices where they meet, pinned.
    Matrices(Arc<PinnedMatrices>),
}

#[derive(Debug)]
struct Whole {
    /// The layer, in words.
    name: String,
    pinned: Arc<Pinned>,
    landings: Arc<Landings>,
    chunks: Vec<Range<usize>>,
    /// By copy out.
    pieces: Vec<Piece>,
    encoding: Encoding,
}

/// Neighbouring chunks that leave the device as one.
#[derive(Debug)]
struct Piece {
    /// The elements it has.
    run: Range<usize>,
    /// The lanes that have chunks of it.
    lanes: Vec<LaneId>,
}

#[derive(Debug)]
struct PinnedMatrices {
    /// The layer, in words.
    name: String,
    /// The lanes that have chunks of its factors.
    lanes: Arc<[LaneId]>,
    /// Ends before the matrices do.
    _registered: Vec<Registered>,
    matrices: Arc<FactorMatrices>,
}

impl Session {
    /// The copier of CUDA's device `ordinal`, for memory of this session's layers.
    pub fn cuda_copier(&self, ordinal: usize) -> Result<Arc<Copier>, Error> {
        self.node.cuda_copier(ordinal)
    }

    /// As [`broadcast`](Session::broadcast), for values on a device.
    pub fn broadcast_on_device(
        &self,
        layer: LayerId,
        values: OnDevice,
        stream: ProgramStream,
    ) -> Result<(), Error> {
        let mut state = self.state(layer)?;
        self.check_memory(layer, &values, self.parts.plan.encodings(layer).down)?;
        self.check_broadcast(layer, &state)?;
        self.carry(&mut state, layer, values, None, stream, |gradient, landings| {
            Exchange::of_initial_values(layer, gradient, Some(landings))
        })
    }

    /// As [`send`](Session::send), or [`send_into`](Session::send_into), for memory on a device.
    /// Returns at once: the gradient leaves the device when the work that `stream` has now is done.
    pub fn send_on_device(
        &self,
        layer: LayerId,
        gradient: OnDevice,
        into: Option<OnDevice>,
        stream: ProgramStream,
    ) -> Result<(), Error> {
        let mut state = self.state(layer)?;
        let Encodings { up, down } = self.parts.plan.encodings(layer);
        self.check_memory(layer, &gradient, up)?;
        into.iter().try_for_each(|into| self.check_memory(layer, into, down))?;
        if up != down {
            let why = format!("its gradient travels as {up} and its result as {down}");
            return Err(Error::Device { what: self.named(layer), why });
        }
        let terms = self.check_push(layer, &state)?;
        let (clock, kind, destination) = (state.clock.next(), Kind::Push, None);
        self.carry(&mut state, layer, gradient, into, stream, |gradient, landings| {
            let (gradient, landings) = (gradient.into(), Some(landings));
            Exchange { layer, clock, kind, terms, gradient, destination, landings }
        })
    }

    /// As [`send_factors`](Session::send_factors), for factors on a device, which the program
    /// rebuilds itself. Each of `parts` has rows of u and v side by side. So has `into`, which gets all
    /// workers' rows: as many for each worker as the plan has foreseen, zeros where a worker has
    /// fewer.
    pub fn gather_on_device(
        &self,
        layer: LayerId,
        parts: Vec<OnDevice>,
        into: OnDevice,
        stream: ProgramStream,
    ) -> Result<(), Error> {
        let (begin, mut state) = (self.parts.trace.now(), self.state(layer)?);
        let (matrices, clock, terms) = self.check_gather(layer, &state, &into)?;
        let width = matrices.layout.width();
        let len: usize = parts.iter().map(|part| part.len).sum();
        let (rows, most) = (len / width, matrices.layout.batch);
        if parts.iter().any(|part| part.len % width != 0) || rows > most {
            let why = format!("expected at most {most} rows of {width} numbers, got {len} numbers");
            return Err(Error::Factors { layer: self.name(layer), why });
        }
        let copier = into.copier.clone();
        for part in &parts {
            self.check_encoding(layer, part, matrices.layout.encoding)?;
            self.check_copier(layer, part, &copier)?;
        }
        let (arrived, pinned) = self.pinned_matrices(layer, &mut state, &copier)?;
        // SAFETY: the copier alone writes to the block, and the lanes are told afterwards.
        let mut block = unsafe { matrices.own_block(self.node.me, clock) };
        let mut copies = Vec::with_capacity(parts.len());
        for part in parts.iter().filter(|part| part.len > 0) {
            let bytes = matrices.layout.encoding.bytes(part.len);
            copies.push(Copy::whole(part.address, block, bytes));
            // SAFETY: within the block, or at its end: there are no more rows than it has.
            block = unsafe { block.add(bytes) };
        }
        let step = (clock, rows, terms);
        let cargo = FactorCargo::new(self, layer, &pinned, step, copies.len(), (parts, into));
        // SAFETY: the cargo keeps the parts, `into` and the matrices. The lanes are told of the
        // clock when all copies have left.
        unsafe { self.order(layer, &copier, cargo, copies, stream, &arrived)? };
        self.note_sent(&mut state, layer, InFlight::Gathered(clock), begin);
        Ok(())
    }

    /// As [`gather_on_device`](Session::gather_on_device), for rows in host memory: there may be more
    /// of them than the plan has foreseen.
    pub fn gather_from_host(
        &self,
        layer: LayerId,
        parts: &[Factors<'_>],
        into: OnDevice,
        stream: ProgramStream,
    ) -> Result<(), Error> {
        let (begin, mut state) = (self.parts.trace.now(), self.state(layer)?);
        let (matrices, clock, terms) = self.check_gather(layer, &state, &into)?;
        let parts: Vec<_> = parts.iter().map(|part| FactorBytes::from(*part)).collect();
        let rows = matrices
            .count_rows(&parts)
            .map_err(|why| Error::Factors { layer: self.name(layer), why })?;
        let copier = into.copier.clone();
        let (arrived, pinned) = self.pinned_matrices(layer, &mut state, &copier)?;
        // SAFETY: the layer's state is locked, and the layer is not in flight: `check_gather` has
        // seen it. The lanes hear of the clock from the cargo, later.
        unsafe { matrices.write_own(self.node.me, clock, &parts) };
        let step = (clock, rows, terms);
        let mut cargo = FactorCargo::new(self, layer, &pinned, step, 0, (Vec::new(), into));
        cargo.is_written = true;
        // SAFETY: the cargo keeps `into` and the matrices; nothing is copied out.
        unsafe { self.order(layer, &copier, cargo, Vec::new(), stream, &arrived)? };
        self.note_sent(&mut state, layer, InFlight::Gathered(clock), begin);
        Ok(())
    }

    /// Waits until the layer sent last has come, unless `interrupted` says so; then `stream` waits
    /// for it to be on the device. This thread does not wait for that.
    ///
    /// Of factors, it returns the rows of workers that had more than the plan has foreseen.
    pub fn receive_on_device(
        &self,
        layer: LayerId,
        stream: ProgramStream,
        interrupted: impl FnMut() -> bool,
    ) -> Result<Option<Vec<f32>>, Error> {
        self.check_receiver(layer, true)?;
        let Some(in_flight) = self.await_landed(layer, interrupted)? else { return Ok(None) };
        let state = self.state(layer)?;
        let Some(stage) = &state.stage else {
            return Err(Error::NotInFlight { layer: self.name(layer) });
        };
        let waits = stage.copier.make_wait(Stream::Program(stream), &stage.arrived);
        waits.map_err(|fault| self.device_fault(layer, &fault))?;
        let beyond = match (&in_flight, self.layers.matrices(layer)) {
            (InFlight::Gathered(clock), Some(matrices)) => matrices.take_decoded_beyond(*clock),
            _ => Vec::new(),
        };
        Ok(Some(beyond))
    }

    /// Sends a layer through its stage.
    fn carry(
        &self,
        state: &mut LayerState,
        layer: LayerId,
        from: OnDevice,
        into: Option<OnDevice>,
        stream: ProgramStream,
        exchange: impl FnOnce(Buffer, Arc<Landings>) -> Exchange,
    ) -> Result<(), Error> {
        self.check_running()?;
        let begin = self.parts.trace.now();
        let copier = from.copier.clone();
        into.iter().try_for_each(|into| self.check_copier(layer, into, &copier))?;
        let (arrived, stage) = self.stage(layer, state, &copier)?;
        let (start, encoding) = (stage.pinned.start(), stage.encoding);
        let keep = Box::new(stage.pinned.clone());
        // SAFETY: the stage is as long as the layer, is kept by the buffer, and from the copy of a
        // piece until its result has come nobody else touches it.
        let buffer = unsafe { Buffer::encoded_from_raw(start, from.len, encoding, keep) };
        let exchange = Arc::new(exchange(buffer, stage.landings.clone()));
        let copies = stage.pieces.iter().map(|piece| stage.copy(&piece.run, from.address));
        let copies = copies.collect();
        let cargo = LayerCargo {
            consignment: self.parts.consign(layer),
            exchange: Some(exchange.clone()),
            device: into.as_ref().unwrap_or(&from).address,
            missing: stage.chunks.len(),
            stage,
            returning: None,
            is_given_up: false,
            _lent: (from, into),
        };
        // SAFETY: the cargo keeps the stage and what was lent. Lanes touch the stage only after a
        // piece has left.
        unsafe { self.order(layer, &copier, cargo, copies, stream, &arrived)? };
        self.note_sent(state, layer, InFlight::Chunks(exchange), begin);
        Ok(())
    }

    /// # Safety
    /// As for [`Copier::order`].
    unsafe fn order(
        &self,
        layer: LayerId,
        copier: &Copier,
        cargo: impl Cargo + 'static,
        copies: Vec<Copy>,
        stream: ProgramStream,
        arrived: &SharedEvent,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        let ordered =
            unsafe { copier.order(Box::new(cargo), copies, Stream::Program(stream), arrived) };
        ordered.map_err(|fault| self.device_fault(layer, &fault))
    }

    /// The stage of a layer by gradients, made at its first use and after every change of the plan.
    fn stage(
        &self,
        layer: LayerId,
        state: &mut LayerState,
        copier: &Arc<Copier>,
    ) -> Result<(SharedEvent, Arc<Whole>), Error> {
        let fits = |stage: &&Stage| stage.fits(self.parts.plan.epoch, copier);
        if let Some(Stage { arrived, memory: Memory::Whole(whole), .. }) =
            state.stage.as_ref().filter(fits)
        {
            return Ok((arrived.clone(), whole.clone()));
        }
        let chunks: Vec<_> = match self.parts.plan.chunks(layer) {
            Some(chunks) => (0..).map_while(|index| chunks.range(index)).collect(),
            None => Vec::new(),
        };
        let encoding = self.parts.plan.encodings(layer).down;
        let lanes: Vec<_> =
            self.parts.plan.layer_chunks(layer).map(|(_, shard)| shard.lane).collect();
        let pieces = pieces(&chunks, &lanes, encoding);
        let len = self.parts.book.job.layers[layer.index()].len;
        let pinned = Arc::new(Pinned::new(copier.pins(), encoding.bytes(len)));
        let landings = Arc::new(Landings::new(chunks.len()));
        let name = self.named(layer);
        let whole = Arc::new(Whole { name, pinned, landings, chunks, pieces, encoding });
        let stage = self.new_stage(layer, copier, Memory::Whole(whole.clone()))?;
        Ok((state.stage.insert(stage).arrived.clone(), whole))
    }

    /// The matrices of a layer by factors, pinned.
    fn pinned_matrices(
        &self,
        layer: LayerId,
        state: &mut LayerState,
        copier: &Arc<Copier>,
    ) -> Result<(SharedEvent, Arc<PinnedMatrices>), Error> {
        let fits = |stage: &&Stage| stage.fits(self.parts.plan.epoch, copier);
        if let Some(Stage { arrived, memory: Memory::Matrices(pinned), .. }) =
            state.stage.as_ref().filter(fits)
        {
            return Ok((arrived.clone(), pinned.clone()));
        }
        let matrices = self.layers.matrices(layer).expect("checked by the caller").clone();
        let _registered = matrices
            .memories()
            // SAFETY: the matrices live as long as what is made here, which ends before them.
            .filter_map(|(start, bytes)| unsafe { Registered::new(copier.pins(), start, bytes) })
            .collect();
        let (name, lanes) = (self.named(layer), matrices.layout.lanes().collect());
        let pinned = Arc::new(PinnedMatrices { name, lanes, _registered, matrices });
        let stage = self.new_stage(layer, copier, Memory::Matrices(pinned.clone()))?;
        Ok((state.stage.insert(stage).arrived.clone(), pinned))
    }

    fn new_stage(
        &self,
        layer: LayerId,
        copier: &Arc<Copier>,
        memory: Memory,
    ) -> Result<Stage, Error> {
        let arrived = copier.create_event().map_err(|fault| self.device_fault(layer, &fault))?;
        Ok(Stage { copier: copier.clone(), arrived, epoch: self.parts.plan.epoch, memory })
    }

    pub(super) fn named(&self, layer: LayerId) -> String {
        format!("layer '{}'", self.name(layer))
    }

    fn device_fault(&self, layer: LayerId, fault: &Fault) -> Error {
        Error::Device { what: self.named(layer), why: fault.to_string() }
    }
}

impl Stage {
    fn fits(&self, epoch: Epoch, copier: &Arc<Copier>) -> bool {
        self.epoch == epoch && Arc::ptr_eq(&self.copier, copier)
    }
}

impl Whole {
    /// Between the elements `run` of the stage and of the memory at `device`.
    fn copy(&self, run: &Range<usize>, device: u64) -> Copy {
        let (from, bytes) = (self.encoding.bytes(run.start), self.encoding.bytes(run.len()));
        // SAFETY: within the stage, which is as long as the layer.
        let host = unsafe { self.pinned.start().add(from) };
        Copy::whole(device + from as u64, host, bytes)
    }
}

fn pieces(chunks: &[Range<usize>], lanes: &[LaneId], encoding: Encoding) -> Vec<Piece> {
    let pieces = copies::pieces(chunks.iter().map(|chunk| encoding.bytes(chunk.len())));
    let piece = |piece: copies::Piece| {
        let indices = piece.chunks.start as usize..piece.chunks.end as usize;
        let (first, last) = (&chunks[indices.start], &chunks[indices.end - 1]);
        let mut lanes = lanes[indices].to_vec();
        lanes.sort_unstable();
        lanes.dedup();
        Piece { run: first.start..last.end, lanes }
    };
    pieces.into_iter().map(piece).collect()
}

/// A layer by gradients on its way.
struct LayerCargo {
    consignment: Consignment,
    /// Until the lanes have finished with it.
    exchange: Option<Arc<Exchange>>,
    stage: Arc<Whole>,
    /// Where results go.
    device: u64,
    missing: usize,
    /// When the first result was copied, if that is noted.
    returning: Option<u64>,
    is_given_up: bool,
    _lent: (OnDevice, Option<OnDevice>),
}

impl Cargo for LayerCargo {
    fn left(&mut self, index: usize) {
        if let (Some(exchange), Some(piece)) = (&self.exchange, self.stage.pieces.get(index)) {
            self.consignment.send(exchange, &piece.run, &piece.lanes);
            if index + 1 == self.stage.pieces.len() {
                self.consignment.note_copied(What::LeftDevice, exchange.clock, None);
            }
        }
    }

    fn collect(&mut self, copy: &mut dyn FnMut(Copy)) -> Collected {
        let (stage, device) = (&self.stage, self.device);
        let (consignment, returning) = (&self.consignment, &mut self.returning);
        let mut order = |run: &Range<usize>| {
            *returning = returning.or_else(|| consignment.now());
            copy(stage.copy(run, device));
        };
        // Neighbours that have come together are copied together.
        let mut run: Option<Range<usize>> = None;
        let missing = &mut self.missing;
        stage.landings.take(|index| {
            *missing -= 1;
            let chunk = stage.chunks[index].clone();
            match &mut run {
                Some(run) if run.end == chunk.start => run.end = chunk.end,
                _ => {
                    if let Some(run) = run.replace(chunk) {
                        order(&run);
                    }
                }
            }
        });
        if let Some(run) = run {
            order(&run);
        }
        if self.missing == 0 && self.consignment.is_back() {
            return Collected::All;
        }
        if self.consignment.board.failure().is_some() {
            self.is_given_up = true;
            return Collected::GivenUp;
        }
        Collected::More
    }

    fn landed(&mut self) {
        if !self.is_given_up {
            // The session takes the exchange apart when everybody has let go of it.
            if let Some(exchange) = self.exchange.take() {
                let begin = self.returning;
                self.consignment.note_copied(What::OnDevice, exchange.clock, begin);
            }
            self.consignment.finish();
        }
    }

    fn failed(&mut self, fault: &Fault) {
        let (what, why) = (self.stage.name.clone(), fault.to_string());
        self.consignment.fail(Error::Device { what, why });
    }
}

/// Factors of a layer on their way.
struct FactorCargo {
    consignment: Consignment,
    me: NodeId,
    pinned: Arc<PinnedMatrices>,
    /// Clock, rows of this worker, what goes with them.
    step: (Clock, usize, Terms),
    /// Whether this worker's rows are in the matrix without a copy.
    is_written: bool,
    /// What is still to leave.
    leaving: usize,
    /// When the results were copied, if that is noted.
    returning: Option<u64>,
    is_given_up: bool,
    into: u64,
    _lent: (Vec<OnDevice>, OnDevice),
}

impl FactorCargo {
    fn new(
        session: &Session,
        layer: LayerId,
        pinned: &Arc<PinnedMatrices>,
        step: (Clock, usize, Terms),
        copies: usize,
        lent: (Vec<OnDevice>, OnDevice),
    ) -> Self {
        Self {
            consignment: session.parts.consign_to(layer, pinned.lanes.clone()),
            me: session.node.me,
            pinned: pinned.clone(),
            step,
            is_written: false,
            leaving: copies.max(1),
            returning: None,
            is_given_up: false,
            into: lent.1.address,
            _lent: lent,
        }
    }
}

impl Cargo for FactorCargo {
    fn left(&mut self, _: usize) {
        self.leaving -= 1;
        if self.leaving == 0 {
            let (clock, rows, terms) = self.step;
            if !self.is_written {
                // SAFETY: all copies to the block are done, and the lanes are told only now.
                unsafe { self.pinned.matrices.blank_own(self.me, clock, rows) };
            }
            self.consignment.note_copied(What::LeftDevice, clock, None);
            self.consignment.send_factors(clock, rows, terms);
        }
    }

    fn collect(&mut self, copy: &mut dyn FnMut(Copy)) -> Collected {
        if self.consignment.is_back() {
            let (clock, _, _) = self.step;
            let (start, bytes) = self.pinned.matrices.memory(clock);
            self.returning = self.consignment.now();
            copy(Copy::whole(self.into, start, bytes));
            return Collected::All;
        }
        if self.consignment.board.failure().is_some() {
            self.is_given_up = true;
            return Collected::GivenUp;
        }
        Collected::More
    }

    fn landed(&mut self) {
        if !self.is_given_up {
            self.consignment.note_copied(What::OnDevice, self.step.0, self.returning);
            self.consignment.finish();
        }
    }

    fn failed(&mut self, fault: &Fault) {
        let (what, why) = (self.pinned.name.clone(), fault.to_string());
        self.consignment.fail(Error::Device { what, why });
    }
}
