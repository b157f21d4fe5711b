//! The thread that carries layers out of a device, and results into it.
//!
//! An [order](Copier::order) is one layer, or one operation: copies out, then whatever its
//! [`Cargo`] does with the bytes in host memory, then copies in, piece by piece as they come. The
//! orders' copies out follow each other in the order they were given, which is the order in which the
//! device computes. Everything is asked by polling: events on one side, the cargo on the other.

use crate::pinned::Pins;
use crate::{Copy, Device, Event, Fault, Stream};
use std::collections::VecDeque;
use std::fmt;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// How long the copier sleeps when nothing has changed: a small part of what a layer's exchange
/// takes on any network.
const PAUSE: Duration = Duration::from_micros(30);

/// What is carried between a device and the network.
pub trait Cargo: Send {
    /// Copy number `index` of the order is in host memory. Of an order without copies: the program's
    /// work before it is done (`index` is 0).
    fn left(&mut self, index: usize);

    /// Gives `copy` what has come for the device since the last call. Called over and over, after
    /// something of the order has left.
    fn collect(&mut self, copy: &mut dyn FnMut(Copy)) -> Collected;

    /// All copies to the device are ordered, and the order's event is recorded after them. The cargo
    /// itself, with the memory it keeps, is dropped when they are done.
    fn landed(&mut self);

    /// The device has failed. The cargo is never dropped then: copies may still be under way.
    fn failed(&mut self, fault: &Fault);
}

/// What a cargo knows of what is still to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collected {
    /// There is more to come.
    More,
    /// Everything has come.
    All,
    /// Nothing will come any more: the exchange has failed.
    GivenUp,
}

/// The copier of one device.
pub struct Copier {
    device: Arc<dyn Device>,
    orders: Sender<Order>,
    pool: Arc<Pool>,
    pins: Arc<Pins>,
    fault: Arc<OnceLock<Fault>>,
}

/// An event that is given with orders, one at a time, and passed by the copies of their results to
/// the device. The copier holds it as long as it asks about it. When the last holder lets go, the
/// event serves others.
#[derive(Clone, Debug)]
pub struct SharedEvent(Arc<Held>);

#[derive(Debug)]
struct Held {
    event: Event,
    pool: Arc<Pool>,
}

/// Events that nobody uses now.
#[derive(Debug, Default)]
struct Pool(Mutex<Vec<Event>>);

struct Order {
    cargo: Box<dyn Cargo>,
    /// The program's work that makes what is copied.
    after: Event,
    out: Vec<Copy>,
    arrived: SharedEvent,
}

impl Copier {
    /// Starts the copier of `device`, which may pin up to `limit` bytes of host memory.
    pub fn start(device: Arc<dyn Device>, limit: usize) -> std::io::Result<Self> {
        let (orders, taken) = mpsc::channel();
        let (pool, fault) = (Arc::new(Pool::default()), Arc::new(OnceLock::new()));
        let moves = Moves::new(device.clone(), pool.clone(), fault.clone());
        let name = "poseidon-copier".into();
        std::thread::Builder::new().name(name).spawn(move || run(&taken, moves))?;
        let pins = Arc::new(Pins::new(device.clone(), limit));
        Ok(Self { device, orders, pool, pins, fault })
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// The host memory that is pinned for it.
    pub fn pins(&self) -> &Arc<Pins> {
        &self.pins
    }

    /// An event to give with orders, one at a time.
    pub fn create_event(&self) -> Result<SharedEvent, Fault> {
        SharedEvent::new(&self.pool, &*self.device)
    }

    /// Copies `out` to host memory, once the work that stream `program` has now is done, and carries
    /// on with `cargo`. `arrived` is recorded after the last copy to the device; copies out begin
    /// after its last record. Returns at once.
    ///
    /// # Safety
    /// Both ends of every copy, those that the cargo orders included, are valid until the cargo is
    /// dropped. Until a copy has [`left`](Cargo::left) nobody touches its end in host memory.
    pub unsafe fn order(
        &self,
        cargo: Box<dyn Cargo>,
        out: Vec<Copy>,
        program: Stream,
        arrived: &SharedEvent,
    ) -> Result<(), Fault> {
        self.fault.get().cloned().map_or(Ok(()), Err)?;
        if self.device.is_capturing(program)? {
            let words = "gradients cannot leave a device while a CUDA graph is captured: capture \
                         forward and backward apart from synchronisation, or do not capture";
            return Err(Fault(words.into()));
        }
        let after = self.pool.take(&*self.device)?;
        self.device.record(after, program)?;
        let order = Order { cargo, after, out, arrived: arrived.clone() };
        self.orders.send(order).map_err(|_| Fault("the copier has stopped".into()))
    }

    /// Has `program` wait until the last order that was given with `arrived` has copied everything
    /// to the device. To be called when its cargo has [`landed`](Cargo::landed).
    pub fn make_wait(&self, program: Stream, arrived: &SharedEvent) -> Result<(), Fault> {
        self.device.make_wait(program, arrived.0.event)
    }
}

impl fmt::Debug for Copier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Copier({})", self.device.name())
    }
}

impl SharedEvent {
    fn new(pool: &Arc<Pool>, device: &dyn Device) -> Result<Self, Fault> {
        let event = pool.take(device)?;
        Ok(Self(Arc::new(Held { event, pool: pool.clone() })))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.pool.put(self.event);
    }
}

impl Pool {
    fn take(&self, device: &dyn Device) -> Result<Event, Fault> {
        let event = self.events().pop();
        event.map_or_else(|| device.create_event(), Ok)
    }

    fn put(&self, event: Event) {
        self.events().push(event);
    }

    fn events(&self) -> MutexGuard<'_, Vec<Event>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Everything that is under way. No thread, no clock: tests drive it step by step.
struct Moves {
    device: Arc<dyn Device>,
    pool: Arc<Pool>,
    fault: Arc<OnceLock<Fault>>,
    /// Copies out that have not passed, in the order they were made.
    leaving: VecDeque<Leaving>,
    /// Orders whose results have not all come, by number.
    orders: Vec<Moving>,
    /// Cargo whose last copies to the device may still be under way.
    landing: Vec<(SharedEvent, Box<dyn Cargo>)>,
    next: u64,
}

struct Leaving {
    order: u64,
    index: usize,
    event: Event,
}

struct Moving {
    number: u64,
    cargo: Box<dyn Cargo>,
    arrived: SharedEvent,
    has_left: bool,
}

impl Moves {
    fn new(device: Arc<dyn Device>, pool: Arc<Pool>, fault: Arc<OnceLock<Fault>>) -> Self {
        let (leaving, orders, landing) = (VecDeque::new(), Vec::new(), Vec::new());
        Self { device, pool, fault, leaving, orders, landing, next: 0 }
    }

    fn is_idle(&self) -> bool {
        self.leaving.is_empty() && self.orders.is_empty() && self.landing.is_empty()
    }

    fn take(&mut self, order: Order) {
        let Order { cargo, after, out, arrived } = order;
        let number = self.next;
        self.next += 1;
        let waits_for = arrived.0.event;
        self.orders.push(Moving { number, cargo, arrived, has_left: false });
        let begun = if self.fault.get().is_none() {
            self.begin(number, after, &out, waits_for)
        } else {
            Ok(())
        };
        self.pool.put(after);
        self.fail_if(begun);
    }

    fn begin(
        &mut self,
        order: u64,
        after: Event,
        out: &[Copy],
        arrived: Event,
    ) -> Result<(), Fault> {
        self.device.make_wait(Stream::Out, after)?;
        // The last results have left the host memory that this copies to.
        self.device.make_wait(Stream::Out, arrived)?;
        for index in 0..out.len().max(1) {
            if let Some(copy) = out.get(index) {
                // SAFETY: the promise of whoever gave the order.
                unsafe { self.device.copy_out(copy)? };
            }
            let event = self.pool.take(&*self.device)?;
            self.device.record(event, Stream::Out)?;
            self.leaving.push_back(Leaving { order, index, event });
        }
        Ok(())
    }

    /// Goes as far as it can. False if nothing has changed.
    fn poll(&mut self) -> bool {
        if let Some(fault) = self.fault.get().cloned() {
            // Orders that were on their way when it happened.
            self.fail_if(Err(fault));
            return true;
        }
        let polled = self.try_poll();
        let changed = *polled.as_ref().unwrap_or(&true);
        self.fail_if(polled.map(|_| ()));
        changed
    }

    fn try_poll(&mut self) -> Result<bool, Fault> {
        let mut changed = false;
        // One queue: if the first has not passed, none behind it has.
        while let Some(first) = self.leaving.front()
            && self.device.has_passed(first.event)?
        {
            let Leaving { order, index, event } = *first;
            self.leaving.pop_front();
            self.pool.put(event);
            changed = true;
            if let Some(moving) = self.orders.iter_mut().find(|moving| moving.number == order) {
                moving.cargo.left(index);
                moving.has_left = true;
            }
        }
        let mut at = 0;
        while let Some(moving) = self.orders.get_mut(at) {
            if !moving.has_left {
                break; // Those behind it have not left either.
            }
            let mut copied = Ok(());
            let collected = moving.cargo.collect(&mut |copy| {
                changed = true;
                if copied.is_ok() {
                    // SAFETY: the promise of whoever gave the order.
                    copied = unsafe { self.device.copy_in(&copy) };
                }
            });
            copied?;
            if collected == Collected::More {
                at += 1;
                continue;
            }
            changed = true;
            // The order stays in the list until the device has taken all of this. If the device
            // fails here, the cargo is told as all others are.
            let arrived = moving.arrived.0.event;
            if collected == Collected::GivenUp {
                // Its copies out may be under way.
                self.device.record(arrived, Stream::Out)?;
                self.device.make_wait(Stream::In, arrived)?;
            }
            self.device.record(arrived, Stream::In)?;
            let Moving { mut cargo, arrived, .. } = self.orders.remove(at);
            cargo.landed();
            self.landing.push((arrived, cargo));
        }
        let mut failed = None;
        self.landing.retain(|(arrived, _)| match self.device.has_passed(arrived.0.event) {
            Ok(passed) => !passed,
            Err(fault) => {
                failed = Some(fault);
                true
            }
        });
        failed.map_or(Ok(changed), Err)
    }

    /// If the device has failed: everybody is told, and nothing is given back.
    fn fail_if(&mut self, result: Result<(), Fault>) {
        let Err(fault) = result else { return };
        let fault = self.fault.get_or_init(|| fault);
        for Moving { mut cargo, .. } in self.orders.drain(..) {
            cargo.failed(fault);
            std::mem::forget(cargo);
        }
        self.landing.drain(..).for_each(std::mem::forget);
        self.leaving.clear();
    }
}

fn run(orders: &Receiver<Order>, mut moves: Moves) {
    let entered = moves.device.enter_thread();
    moves.fail_if(entered);
    loop {
        if moves.is_idle() {
            let Ok(order) = orders.recv() else { return };
            moves.take(order);
        }
        while let Ok(order) = orders.try_recv() {
            moves.take(order);
        }
        if !moves.poll() {
            std::thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
#[path = "copier/tests.rs"]
mod tests;
