use super::*;
use crate::late::Late;
use crate::{Pinned, ProgramStream, Registered};
use proptest::prelude::*;
use std::ptr::NonNull;

// SAFETY: the device of these tests takes any number for a stream.
const PROGRAM: Stream = Stream::Program(unsafe { ProgramStream::from_raw(7) });

/// Doubles what has come to host memory, piece by piece, some time later.
struct Doubling {
    copies: Vec<Copy>,
    /// Which copies have left and are not doubled yet, and how many are still to be copied back.
    here: Vec<usize>,
    missing: usize,
    /// Asks of the copier that pass before a piece is ready.
    delay: usize,
    report: Arc<Mutex<Report>>,
}

#[derive(Debug, Default)]
struct Report {
    landed: bool,
    dropped: bool,
    failed: Option<String>,
}

impl Cargo for Doubling {
    fn left(&mut self, index: usize) {
        self.here.push(index);
    }

    fn collect(&mut self, copy: &mut dyn FnMut(Copy)) -> Collected {
        if self.delay > 0 {
            self.delay -= 1;
            return Collected::More;
        }
        for index in self.here.drain(..) {
            let piece = self.copies[index];
            for byte in 0..piece.width {
                // SAFETY: the copy has left, so the memory is this cargo's.
                unsafe { *piece.host.as_ptr().add(byte) *= 2 };
            }
            copy(piece);
            self.missing -= 1;
        }
        if self.missing == 0 { Collected::All } else { Collected::More }
    }

    fn landed(&mut self) {
        self.report.lock().unwrap().landed = true;
    }

    fn failed(&mut self, fault: &Fault) {
        self.report.lock().unwrap().failed = Some(fault.to_string());
    }
}

impl Drop for Doubling {
    fn drop(&mut self) {
        self.report.lock().unwrap().dropped = true;
    }
}

/// Device memory of some layers, host memory for them, and the copier's state.
struct World {
    device: Arc<Late>,
    moves: Moves,
    layers: Vec<Layer>,
}

struct Layer {
    device: Arc<Mutex<Vec<u8>>>,
    host: Vec<u8>,
    arrived: SharedEvent,
    report: Arc<Mutex<Report>>,
}

impl World {
    fn new(seed: u64, sizes: &[usize]) -> Self {
        let device = Arc::new(Late::new(seed));
        let moves = Moves::new(device.clone(), Arc::default(), Arc::default());
        let layer = |size: &usize| Layer {
            device: Arc::new(Mutex::new(vec![0; *size])),
            host: vec![0; *size],
            arrived: SharedEvent::new(&moves.pool, &*device).unwrap(),
            report: Arc::default(),
        };
        let layers = sizes.iter().map(layer).collect();
        Self { device, moves, layers }
    }

    /// The program computes `value` into a layer, later, and orders it.
    fn send(&mut self, at: usize, value: u8, piece: usize, delay: usize) {
        let order = self.order(at, value, piece, delay);
        self.moves.take(order);
    }

    fn order(&mut self, at: usize, value: u8, piece: usize, delay: usize) -> Order {
        let layer = &mut self.layers[at];
        let memory = layer.device.clone();
        self.device.compute(PROGRAM, move || memory.lock().unwrap().fill(value));
        let after = self.device.create_event().unwrap();
        self.device.record(after, PROGRAM).unwrap();
        let from = layer.device.lock().unwrap().as_ptr() as u64;
        let len = layer.host.len();
        let host = NonNull::from(&mut layer.host[..]).cast::<u8>();
        let copies: Vec<_> = (0..len)
            .step_by(piece)
            .map(|at| {
                // SAFETY: within the layer.
                let start = unsafe { host.add(at) };
                Copy::whole(from + at as u64, start, piece.min(len - at))
            })
            .collect();
        *layer.report.lock().unwrap() = Report::default();
        let (here, missing, report) = (Vec::new(), copies.len(), layer.report.clone());
        let cargo = Doubling { copies: copies.clone(), here, missing, delay, report };
        let arrived = layer.arrived.clone();
        Order { cargo: Box::new(cargo), after, out: copies, arrived }
    }

    /// The device and the copier take turns until nothing changes any more.
    fn run(&mut self) {
        for _ in 0..100_000 {
            let worked = self.device.step();
            if !self.moves.poll() && !worked && self.moves.is_idle() {
                return;
            }
        }
        panic!("the copier does not come to rest");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever order copies finish in, results are of what the program computed, and the program's
    /// next work sees them.
    #[test]
    fn results_come_back_to_the_device(
        seed in any::<u64>(),
        sizes in prop::collection::vec(1usize..40, 1..6),
        piece in 1usize..20,
        delay in 0usize..5,
    ) {
        let mut world = World::new(seed, &sizes);
        for step in 1..4u8 {
            for at in 0..sizes.len() {
                world.send(at, step, piece, delay);
            }
            // The copier works while the device has not computed everything.
            for _ in 0..seed % 50 {
                world.device.step();
                world.moves.poll();
            }
            world.run();
            for layer in &world.layers {
                prop_assert!(layer.report.lock().unwrap().landed);
                prop_assert!(layer.report.lock().unwrap().dropped);
                let memory = layer.device.lock().unwrap();
                prop_assert!(memory.iter().all(|byte| *byte == 2 * step), "{memory:?}");
            }
        }
    }

    /// The program's stream waits for the results, not its thread: it may order work at once.
    #[test]
    fn the_programs_next_work_comes_after_the_results(seed in any::<u64>()) {
        let mut world = World::new(seed, &[16]);
        world.send(0, 3, 4, 0);
        let report = world.layers[0].report.clone();
        while !report.lock().unwrap().landed {
            world.device.step();
            world.moves.poll();
        }
        let seen = Arc::new(Mutex::new(0));
        let (memory, into) = (world.layers[0].device.clone(), seen.clone());
        world.device.make_wait(PROGRAM, world.layers[0].arrived.0.event).unwrap();
        world.device.compute(PROGRAM, move || *into.lock().unwrap() = memory.lock().unwrap()[15]);
        world.run();
        world.device.drain();
        prop_assert_eq!(*seen.lock().unwrap(), 6);
    }
}

#[test]
fn a_cargo_is_kept_until_its_copies_are_done() {
    let mut world = World::new(1, &[8]);
    world.send(0, 1, 8, 0);
    let report = world.layers[0].report.clone();
    while !report.lock().unwrap().landed {
        world.device.step();
        world.moves.poll();
    }
    // The device does nothing meanwhile: the copy is ordered and not done.
    for _ in 0..10 {
        world.moves.poll();
    }
    assert!(!report.lock().unwrap().dropped);
    world.run();
    assert!(report.lock().unwrap().dropped);
}

#[test]
fn an_event_serves_others_only_when_the_copier_asks_about_it_no_more() {
    let mut world = World::new(1, &[8]);
    world.send(0, 1, 8, 0);
    let Layer { arrived, report, host, device } = world.layers.remove(0);
    let event = arrived.0.event;
    // As a session does that replaces the layer's stage.
    drop(arrived);
    let is_spare = |world: &World| world.moves.pool.events().contains(&event);
    while !report.lock().unwrap().landed {
        world.device.step();
        world.moves.poll();
    }
    assert!(!is_spare(&world), "the copy to the device is not done");
    world.run();
    assert!(is_spare(&world));
    drop((host, device));
}

/// A cargo whose exchange fails at once.
struct Hopeless(Arc<Mutex<Report>>);

impl Cargo for Hopeless {
    fn left(&mut self, _: usize) {}
    fn collect(&mut self, _: &mut dyn FnMut(Copy)) -> Collected {
        Collected::GivenUp
    }
    fn landed(&mut self) {
        self.0.lock().unwrap().landed = true;
    }
    fn failed(&mut self, fault: &Fault) {
        self.0.lock().unwrap().failed = Some(fault.to_string());
    }
}

impl Drop for Hopeless {
    fn drop(&mut self) {
        self.0.lock().unwrap().dropped = true;
    }
}

#[test]
fn an_exchange_that_is_given_up_keeps_its_memory_until_copies_out_are_done() {
    let mut world = World::new(1, &[8]);
    let report = Arc::new(Mutex::new(Report::default()));
    let after = world.device.create_event().unwrap();
    let (mut from, mut to) = ([1u8; 8], [0u8; 8]);
    let device = from.as_mut_ptr() as u64;
    let host = NonNull::from(&mut to[..]).cast();
    // SAFETY: within the array.
    let second = Copy::whole(device + 4, unsafe { host.add(4) }, 4);
    let out = vec![Copy::whole(device, host, 4), second];
    let arrived = world.layers[0].arrived.clone();
    let cargo = Box::new(Hopeless(report.clone()));
    world.moves.take(Order { cargo, after, out, arrived });
    while !world.moves.poll() {
        world.device.step();
    }
    assert!(!report.lock().unwrap().dropped, "its second copy is under way");
    world.run();
    assert!(report.lock().unwrap().dropped);
    assert_eq!(to, from);
}

#[test]
fn a_device_that_fails_fails_everything_under_way_and_everything_after() {
    let mut world = World::new(1, &[8, 8]);
    let late = world.order(1, 1, 8, 0);
    world.send(0, 1, 8, 0);
    world.device.fail("an illegal memory access");
    world.moves.poll();
    world.moves.take(late);
    world.moves.poll();
    for layer in &world.layers {
        let report = layer.report.lock().unwrap();
        assert_eq!(report.failed.as_deref(), Some("an illegal memory access"));
        assert!(!report.dropped, "copies may be under way");
    }
    assert!(world.moves.is_idle());
}

/// A device can fail at any call. Whoever has an order then either has its results or is told.
#[test]
fn no_order_is_lost_whatever_call_the_device_fails_at() {
    for calls in 0..80 {
        let mut world = World::new(calls as u64, &[8, 8]);
        let hopeless = Arc::new(Mutex::new(Report::default()));
        let after = world.device.create_event().unwrap();
        let arrived = SharedEvent::new(&world.moves.pool, &*world.device).unwrap();
        world.send(0, 1, 4, 2);
        let cargo = Box::new(Hopeless(hopeless.clone()));
        world.moves.take(Order { cargo, after, out: Vec::new(), arrived });
        world.send(1, 1, 8, 0);
        world.device.fail_after(calls, "an illegal memory access");
        for _ in 0..200 {
            world.device.step();
            world.moves.poll();
        }
        let reports = world.layers.iter().map(|layer| &layer.report).chain([&hopeless]);
        for (at, report) in reports.enumerate() {
            let Report { landed, dropped, failed } = &*report.lock().unwrap();
            assert_ne!(*landed, failed.is_some(), "order {at}, call {calls}");
            // What has failed is never dropped, and what has landed only when its copies are done.
            assert!(*landed || !*dropped, "order {at}, call {calls}");
        }
    }
}

#[test]
fn a_captured_stream_is_refused_in_words() {
    let device = Arc::new(Late::new(1));
    let copier = Copier::start(device.clone(), 0).unwrap();
    let arrived = copier.create_event().unwrap();
    device.capture(true);
    let cargo = Box::new(Hopeless(Arc::default()));
    // SAFETY: no copies.
    let refused = unsafe { copier.order(cargo, Vec::new(), PROGRAM, &arrived) };
    assert!(refused.unwrap_err().0.contains("CUDA graph"));
}

#[test]
fn memory_beyond_the_limit_or_the_systems_will_is_not_pinned() {
    let device = Arc::new(Late::new(1));
    let copier = Copier::start(device.clone(), 10_000).unwrap();
    let first = Pinned::new(copier.pins(), 6_000);
    assert_eq!(copier.pins().pinned(), 6_000);
    let second = Pinned::new(copier.pins(), 6_000);
    assert_eq!(copier.pins().pinned(), 6_000, "past the limit");
    drop(first);
    assert_eq!(copier.pins().pinned(), 0);
    device.limit_pinning(100);
    // SAFETY: `second` outlives what is made here.
    let refused = unsafe { Registered::new(copier.pins(), second.start(), 6_000) };
    assert!(refused.is_none());
    assert_eq!(copier.pins().pinned(), 0);
}
