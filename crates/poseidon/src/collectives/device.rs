//! Operations on tensors of a device.
//!
//! What goes in is copied to pinned host memory, the operation runs there when it has come, and what
//! comes out is copied back.

use super::request::{Request, Words};
use super::shared::HOME;
use super::start_order::{Departure, Start, StartOrder};
use super::tensor::Tensor;
use super::work::{Arrival, Completion};
use super::{Group, Terms, Work};
use crate::Error;
use poseidon_core::Dtype;
use poseidon_device::{Cargo, Collected, Copier, Copy, Fault, Lease, ProgramStream, Stream};
use std::any::Any;
use std::sync::Arc;

/// A contiguous tensor on a device: where it is, how many elements it has, and of what.
#[derive(Clone, Copy, Debug)]
pub struct DeviceTensor {
    /// Where it is.
    pub address: u64,
    /// How many elements it has.
    pub count: usize,
    /// What they are.
    pub dtype: Dtype,
}

/// Elements of all types begin at multiples of this in host memory.
const ALIGNMENT: usize = 64;

impl Group {
    /// As [`begin`](Group::begin), with tensors of the device of `copier`, once the work that
    /// stream `program` has now is done. `request` is made from the same tensors in host memory.
    /// The program's streams see results after [`Work::make_wait`].
    ///
    /// # Safety
    /// The tensors are valid until `keep_alive` is dropped. Until the operation is done, they are
    /// touched only by work that the program's stream has before it, and after it has been made to
    /// wait. `request` uses the tensors that it gets for the request that it returns, and drops the
    /// others.
    pub unsafe fn begin_on_device(
        &self,
        (copier, program): (&Arc<Copier>, ProgramStream),
        inputs: &[DeviceTensor],
        outputs: &[DeviceTensor],
        request: impl FnOnce(Vec<Tensor>, Vec<Tensor>) -> Result<Request, Error>,
        terms: Terms,
        keep_alive: Box<dyn Any + Send + Sync>,
    ) -> Result<Work, Error> {
        self.driver.check_owner()?;
        let bytes = |tensor: &DeviceTensor| tensor.count * tensor.dtype.size();
        let room = |tensor: &DeviceTensor| bytes(tensor).next_multiple_of(ALIGNMENT);
        let lease = copier.pins().lend(inputs.iter().chain(outputs).map(room).sum());
        let mut at = lease.start();
        let mut place = |tensor: &DeviceTensor| {
            let host = at;
            // SAFETY: there is room for all tensors, one after the other.
            at = unsafe { at.add(room(tensor)) };
            // SAFETY: aligned, within the lease, which the cargo keeps until the operation is done.
            let staged = unsafe { Tensor::from_raw(host, tensor.count, tensor.dtype) };
            (staged, Copy::whole(tensor.address, host, bytes(tensor)))
        };
        let (inputs, out): (Vec<_>, Vec<_>) = inputs.iter().map(&mut place).unzip();
        let (outputs, written): (Vec<_>, Vec<_>) = outputs.iter().map(&mut place).unzip();
        let request = request(inputs, outputs)?;
        request.check(self.rank, self.size())?;
        let (out, back) = match &request {
            Request::AllReduce { .. } => (out.clone(), out),
            Request::Broadcast { root, .. } if *root == self.rank => (out, Vec::new()),
            Request::Broadcast { .. } => (Vec::new(), out),
            Request::Reduce { root, .. } if *root == self.rank => (out.clone(), out),
            _ => (out, written),
        };
        let some = |copies: Vec<Copy>| -> Vec<Copy> {
            copies.into_iter().filter(|copy| copy.bytes() > 0).collect()
        };
        let (out, back) = (some(out), some(back));
        let operation = Words(request.signature());
        let operation = format!("{operation} on rank {} of {}", self.rank, self.size());
        let event = copier.create_event().map_err(|fault| {
            let (what, why) = (operation.clone(), fault.to_string());
            Error::Device { what, why }
        })?;
        let arrival = Arrival::new(operation, copier.clone(), event);
        let noted = self.trace.begun(request.number().into());
        let completion = Arc::new(Completion::new(keep_alive).noted(noted));
        let inner = Arc::new(Completion::new(Box::new(())));
        let (timeout, leaving) = (terms.timeout, out.len().max(1));
        let departure = self.start_order.reserve(&inner);
        let start = Start { request, timeout, completion: inner.clone() };
        let cargo = OperationCargo {
            start_order: self.start_order.clone(),
            waiting: Some((departure, start)),
            leaving,
            inner,
            back,
            completion: completion.clone(),
            arrival: arrival.clone(),
            is_given_up: false,
            _lease: lease,
        };
        // SAFETY: the cargo keeps the host's memory, and by its completion the device's.
        let ordered = unsafe {
            copier.order(Box::new(cargo), out, Stream::Program(program), arrival.event())
        };
        ordered.map_err(|fault| arrival.fault(&fault))?;
        let (driver, arrival) = (self.driver.clone(), Some(arrival));
        Ok(Work { completion, driver, arrival, queued: None })
    }
}

/// Does not hold the group: the copier's thread would close the links if it dropped the group last.
struct OperationCargo {
    start_order: Arc<StartOrder>,
    /// Until the tensors have left.
    waiting: Option<(Departure, Start)>,
    leaving: usize,
    /// Of the operation in host memory.
    inner: Arc<Completion>,
    back: Vec<Copy>,
    completion: Arc<Completion>,
    arrival: Arrival,
    is_given_up: bool,
    _lease: Lease,
}

impl OperationCargo {
    fn finish(&self, outcome: Result<(), Error>) {
        self.start_order.shared.report(HOME, &self.completion, outcome);
        self.arrival.wake();
    }
}

impl Drop for OperationCargo {
    fn drop(&mut self) {
        drop(self.completion.take_keep());
    }
}

impl Cargo for OperationCargo {
    fn left(&mut self, _: usize) {
        self.leaving -= 1;
        if self.leaving == 0
            && let Some((departure, start)) = self.waiting.take()
        {
            departure.left(start);
        }
    }

    fn collect(&mut self, copy: &mut dyn FnMut(Copy)) -> Collected {
        if !self.inner.is_done() {
            return Collected::More;
        }
        if let Some(error) = self.inner.failure() {
            self.is_given_up = true;
            self.finish(Err(error));
            return Collected::GivenUp;
        }
        self.completion.copy_source(&self.inner);
        self.back.drain(..).for_each(copy);
        Collected::All
    }

    fn landed(&mut self) {
        if !self.is_given_up {
            self.finish(Ok(()));
        }
    }

    fn failed(&mut self, fault: &Fault) {
        self.waiting = None;
        let error = self.arrival.fault(fault);
        self.start_order.abort(error.to_string());
        self.finish(Err(error));
    }
}
