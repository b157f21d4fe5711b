//! Layers and tensors on a device: one made of host memory, whose copies finish late. Every worker
//! has its own.

use crate::cluster::{Layout, without_hanging};
use poseidon::checkpoint::{Checkpoint, Keep, open};
use poseidon::collectives::{DeviceTensor, Request, Tensor, Terms, Work};
use poseidon::device::late::Late;
use poseidon::device::{Copier, ProgramStream, Stream};
use poseidon::session::{Builder, Description};
use poseidon::{
    Checkpoints, ChunkSize, Dtype, Encoding, Error, Factors, Group, Layer, LayerKind, OnDevice,
    Optimizer, Policy, ReduceOp, Reduction, Session,
};
use std::sync::{Arc, Mutex};
use std::time::Duration;

// SAFETY: the device of these tests takes any number for a stream.
const STREAM: ProgramStream = unsafe { ProgramStream::from_raw(7) };
const M: usize = 6;
const N: usize = 10;
const BATCH: usize = 8;
/// A layer that leaves in several pieces.
const LARGE: usize = 1_300_000;

/// A worker's device.
struct Gpu {
    device: Arc<Late>,
    copier: Arc<Copier>,
}

/// Memory on it.
#[derive(Clone)]
struct Values(Arc<Mutex<Vec<f32>>>);

impl Gpu {
    fn new(seed: u64) -> Self {
        let gpu = Self::idle(seed);
        gpu.device.work_beside();
        gpu
    }

    /// It does nothing before it is told to.
    fn idle(seed: u64) -> Self {
        let device = Arc::new(Late::new(seed));
        let copier = Arc::new(Copier::start(device.clone(), usize::MAX).unwrap());
        Self { device, copier }
    }

    fn memory(&self, len: usize) -> Values {
        Values(Arc::new(Mutex::new(vec![0.0; len])))
    }

    /// The program computes, some time later.
    fn compute(&self, into: &Values, value: impl Fn(usize) -> f32 + Send + 'static) {
        let into = into.clone();
        let work = move || {
            let mut memory = into.0.lock().unwrap();
            memory.iter_mut().enumerate().for_each(|(i, x)| *x = value(i));
        };
        self.device.compute(Stream::Program(STREAM), work);
    }

    fn lend(&self, values: &Values) -> OnDevice {
        let (address, len) = values.place();
        let keep = Box::new(values.clone());
        // SAFETY: the values are kept, and touched by work of one stream only.
        unsafe { OnDevice::from_raw(self.copier.clone(), address, len, Encoding::F32, keep) }
    }

    /// `len` numbers of two bytes each.
    fn lend_halves(&self, len: usize) -> OnDevice {
        let values = self.memory(len.div_ceil(2));
        let (address, _) = values.place();
        // SAFETY: as above.
        unsafe {
            let keep = Box::new(values);
            OnDevice::from_raw(self.copier.clone(), address, len, Encoding::Bf16, keep)
        }
    }

    /// What the program's stream finds there, when it comes to it.
    fn read(&self, values: &Values) -> Vec<f32> {
        let (from, seen) = (values.clone(), Arc::new(Mutex::new(None)));
        let into = seen.clone();
        let work = move || *into.lock().unwrap() = Some(from.0.lock().unwrap().clone());
        self.device.compute(Stream::Program(STREAM), work);
        loop {
            if let Some(values) = seen.lock().unwrap().take() {
                return values;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

impl Values {
    fn place(&self) -> (u64, usize) {
        let memory = self.0.lock().unwrap();
        (memory.as_ptr() as u64, memory.len())
    }
}

fn receive(session: &Session, layer: poseidon::LayerId) -> Result<Vec<f32>, Error> {
    Ok(session.receive_on_device(layer, STREAM, || false)?.expect("nobody interrupts"))
}

fn value(rank: u16, clock: u64, i: usize) -> f32 {
    (usize::from(rank) * 3 + clock as usize * 5 + i % 89) as f32
}

#[test]
fn sums_come_back_to_the_device() {
    let sizes = [5, 300, LARGE, 0];
    let describe = move |builder: Builder| {
        let layers = sizes.iter().enumerate().map(|(i, len)| Layer::new(format!("{i}"), *len));
        builder.layers(layers).optimizer(Optimizer::Reduce(Reduction::Sum))
    };
    let work = move |session: &Session| {
        let (rank, workers) = (session.rank(), session.workers() as u16);
        let gpu = Gpu::new(rank.into());
        let layers: Vec<_> =
            (0..sizes.len()).map(|i| session.layer(&i.to_string()).unwrap()).collect();
        let memory: Vec<_> = sizes.iter().map(|len| gpu.memory(*len)).collect();
        for clock in 1..4 {
            // Everything is ordered before the device has computed anything.
            for (layer, memory) in layers.iter().zip(&memory).rev() {
                gpu.compute(memory, move |i| value(rank, clock, i));
                session.send_on_device(*layer, gpu.lend(memory), None, STREAM)?;
            }
            for (layer, memory) in layers.iter().zip(&memory) {
                receive(session, *layer)?;
                for (i, got) in gpu.read(memory).into_iter().enumerate() {
                    let expected: f32 = (0..workers).map(|rank| value(rank, clock, i)).sum();
                    assert_eq!(got, expected, "{layer} of worker {rank}, element {i}");
                }
            }
        }
        Ok(())
    };
    without_hanging(move || {
        for layout in
            [Layout::workers(1), Layout { lanes: 2, ..Layout::workers(3) }, Layout::hosts(&[2, 1])]
        {
            layout.run(describe, work).into_iter().for_each(|result| result.unwrap());
        }
    });
}

#[test]
fn parameters_on_a_device_take_the_steps_they_take_in_host_memory() {
    const LEN: usize = 700;
    let train = |on_device: bool| {
        let describe = |builder: Builder| {
            let rule: Optimizer = "sgd:momentum=0.5".parse().unwrap();
            let builder = builder.layer(Layer::new("w", LEN)).optimizer(rule).learning_rate(0.25);
            builder.chunk_size(ChunkSize::at_most(256)).deterministic(true)
        };
        let work = move |session: &Session| {
            let (rank, w) = (session.rank(), session.layer("w")?);
            let start = if rank == 0 { 1.0 } else { -1.0 };
            if on_device {
                let gpu = Gpu::new(rank.into());
                let (values, gradient) = (gpu.memory(LEN), gpu.memory(LEN));
                gpu.compute(&values, move |_| start);
                session.broadcast_on_device(w, gpu.lend(&values), STREAM)?;
                receive(session, w)?;
                for clock in 1..5 {
                    gpu.compute(&gradient, move |i| value(rank, clock, i));
                    let into = Some(gpu.lend(&values));
                    session.send_on_device(w, gpu.lend(&gradient), into, STREAM)?;
                    receive(session, w)?;
                }
                Ok(gpu.read(&values))
            } else {
                session.broadcast(w, vec![start; LEN].into())?;
                let mut values = session.receive(w)?.result;
                for clock in 1..5 {
                    let gradient: Vec<_> = (0..LEN).map(|i| value(rank, clock, i)).collect();
                    session.send_into(w, gradient.into(), values)?;
                    values = session.receive(w)?.result;
                }
                Ok(values.to_vec())
            }
        };
        let results = Layout::workers(3).run(describe, work);
        results.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    let (host, device) = without_hanging(move || (train(false), train(true)));
    assert_eq!(host, device);
}

fn factor(rank: u16, clock: u64, row: usize, column: usize) -> f32 {
    ((usize::from(rank) * 5 + row * 3 + column * 7 + clock as usize * 11) % 9) as f32 - 4.0
}

fn rows(rank: u16, clock: u64) -> usize {
    match clock {
        2 => usize::from(rank) * 3 % (BATCH + 1),
        3 => BATCH + usize::from(rank) % 2 * 5,
        _ => BATCH,
    }
}

#[test]
fn factors_of_all_workers_meet_on_the_device() {
    let describe = |builder: Builder| {
        let kind = LayerKind::Fc { m: M, n: N };
        let layer = Layer { kind, ..Layer::new("fc", M * N + M) };
        let size = ChunkSize { min: 64, max: 200 };
        builder.layer(layer).chunk_size(size).scheme(Policy::Sfb).batch(BATCH)
    };
    let work = |session: &Session| {
        let (rank, workers, fc) = (session.rank(), session.workers(), session.layer("fc")?);
        let gpu = Gpu::new(rank.into());
        let all = gpu.memory(workers * BATCH * (M + N));
        // The same layer's values go another way first.
        let values = gpu.memory(M * N + M);
        gpu.compute(&values, move |_| f32::from(rank));
        session.broadcast_on_device(fc, gpu.lend(&values), STREAM)?;
        receive(session, fc)?;
        assert_eq!(gpu.read(&values), vec![0.0; M * N + M]);
        for clock in 1..5 {
            let mine = rows(rank, clock);
            if mine <= BATCH {
                // In two parts, as a layer that is called twice has them.
                let parts: Vec<_> = [0..mine / 2, mine / 2..mine]
                    .map(|part| {
                        let memory = gpu.memory(part.len() * (M + N));
                        gpu.compute(&memory, move |i| {
                            factor(rank, clock, part.start + i / (M + N), i % (M + N))
                        });
                        gpu.lend(&memory)
                    })
                    .into();
                session.gather_on_device(fc, parts, gpu.lend(&all), STREAM)?;
            } else {
                let matrix = |columns: std::ops::Range<usize>| -> Vec<f32> {
                    let row = |row| columns.clone().map(move |c| factor(rank, clock, row, c));
                    (0..mine).flat_map(row).collect()
                };
                let (u, v) = (matrix(0..M), matrix(M..M + N));
                let parts = [Factors { u: &u, v: &v }];
                session.gather_from_host(fc, &parts, gpu.lend(&all), STREAM)?;
            }
            let beyond = receive(session, fc)?;
            let seen = gpu.read(&all);
            let mut beyond = beyond.chunks(M + N);
            for other in 0..workers as u16 {
                let first = usize::from(other) * BATCH;
                for row in 0..rows(other, clock).max(BATCH) {
                    let got = match row {
                        row if row < BATCH => &seen[(first + row) * (M + N)..][..M + N],
                        _ => beyond.next().expect("a row that has no place in the matrix"),
                    };
                    let is_there = row < rows(other, clock);
                    let expected = |c| if is_there { factor(other, clock, row, c) } else { 0.0 };
                    let expected: Vec<_> = (0..M + N).map(expected).collect();
                    assert_eq!(got, expected, "worker {other}, row {row}, clock {clock}");
                }
            }
            assert_eq!(beyond.next(), None);
        }
        Ok(())
    };
    without_hanging(move || {
        for layout in [Layout { lanes: 2, ..Layout::workers(3) }, Layout::hosts(&[2, 2])] {
            layout.run(describe, work).into_iter().for_each(|result| result.unwrap());
        }
    });
}

/// Every worker hands over its share of a layer that the program rebuilds itself.
#[test]
fn layers_that_the_program_rebuilds_are_kept_in_checkpoints() {
    let number =
        |clock: u64, vector: usize, i: usize| (clock as usize * 1000 + vector * 100 + i) as f32;
    let work = move |session: &Session| {
        let (rank, workers, fc) = (session.rank(), session.workers(), session.layer("fc")?);
        let gpu = Gpu::new(rank.into());
        let all = gpu.memory(workers * BATCH * (M + N));
        let values = gpu.memory(M * N + M);
        session.broadcast_on_device(fc, gpu.lend(&values), STREAM)?;
        receive(session, fc)?;
        let mut saving = None;
        for clock in 1..5 {
            if clock == 3 {
                saving = Some(session.begin_checkpoint(clock, Keep::default())?);
            }
            let rows = gpu.memory(BATCH * (M + N));
            session.gather_on_device(fc, vec![gpu.lend(&rows)], gpu.lend(&all), STREAM)?;
            assert_eq!(session.asked_to_keep(fc)?, None, "the step is not taken");
            receive(session, fc)?;
            let asked = session.asked_to_keep(fc)?;
            assert_eq!(asked.is_some(), clock == 3);
            let of = |range: std::ops::Range<usize>, vector| -> Vec<f32> {
                range.map(|i| number(clock, vector, i)).collect()
            };
            let Some(range) = asked else {
                let kept = session.keep_rebuilt(fc, of(0..1, 0), vec![of(0..1, 1)]);
                assert!(kept.unwrap_err().to_string().contains("was not asked to keep"));
                continue;
            };
            let kept = session.keep_rebuilt(fc, of(range.clone(), 0), Vec::new());
            assert!(kept.unwrap_err().to_string().contains("remembers 1 vectors, got 0"));
            let kept = session.keep_rebuilt(fc, of(0..1, 0), vec![of(range.clone(), 1)]);
            assert!(kept.unwrap_err().to_string().contains("elements to keep, got 1"));
            session.keep_rebuilt(fc, of(range.clone(), 0), vec![of(range, 1)])?;
            saving.as_ref().expect("it was begun").describe(Description::default());
        }
        assert_eq!(saving.expect("it was begun").wait()?.step, 3);
        Ok(())
    };
    without_hanging(move || {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().to_str().unwrap().to_owned();
        let to = place.clone();
        let describe = move |builder: Builder| {
            let kind = LayerKind::Fc { m: M, n: N };
            let layer = Layer { kind, ..Layer::new("fc", M * N + M) };
            let builder = builder.layer(layer).scheme(Policy::Sfb).batch(BATCH);
            builder
                .optimizer("sgd:momentum=0.9".parse::<Optimizer>().unwrap())
                .learning_rate(0.5)
                .checkpoints(Checkpoints { to: Some(to.clone()), from: None })
        };
        Layout::workers(3).run(describe, work).into_iter().for_each(|result| result.unwrap());
        let checkpoint = Checkpoint::open(&open(&place).unwrap(), 3).unwrap();
        for (what, vector) in [("parameters", 0), ("state.0", 1)] {
            let expected: Vec<f32> = (0..M * N + M).map(|i| number(3, vector, i)).collect();
            let found = checkpoint.read("fc", &what.parse().unwrap(), 0..M * N + M).unwrap();
            assert_eq!(found, expected, "{what}");
        }
        assert_eq!(checkpoint.manifest().layers[0].steps, 3);
    });
}

#[test]
fn a_device_that_fails_ends_the_job_with_its_words() {
    let describe = |builder: Builder| builder.layer(Layer::new("w", 1000));
    let work = |session: &Session| {
        let (rank, w) = (session.rank(), session.layer("w")?);
        let gpu = Gpu::new(rank.into());
        let memory = gpu.memory(1000);
        session.send_on_device(w, gpu.lend(&memory), None, STREAM)?;
        receive(session, w)?;
        if rank == 1 {
            gpu.device.fail("an illegal memory access");
        }
        session.send_on_device(w, gpu.lend(&memory), None, STREAM)?;
        receive(session, w)?;
        Ok(())
    };
    let ended = without_hanging(move || Layout::workers(3).run(describe, work));
    for (rank, result) in ended.into_iter().enumerate() {
        let words = result.expect_err("no worker can go on").to_string();
        let expected = if rank == 1 { "an illegal memory access" } else { "worker 1" };
        assert!(words.contains(expected), "worker {rank}: {words}");
    }
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let describe = |builder: Builder| {
        let fc = Layer { kind: LayerKind::Fc { m: M, n: N }, ..Layer::new("fc", M * N) };
        builder.layers([Layer::new("w", 10), fc]).scheme(Policy::Sfb).batch(BATCH)
    };
    let work = |session: &Session| {
        let (w, fc) = (session.layer("w")?, session.layer("fc")?);
        let (gpu, other) = (Gpu::new(1), Gpu::new(2));
        let (memory, short) = (gpu.memory(10), gpu.memory(9));
        let says = |result: Result<(), Error>, words: &str| {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(words), "'{words}' is not in: {error}");
        };
        says(session.send_on_device(w, gpu.lend(&short), None, STREAM), "has 10 parameters");
        let elsewhere = Some(other.lend(&other.memory(10)));
        let sent = session.send_on_device(w, gpu.lend(&memory), elsewhere, STREAM);
        says(sent, "different devices");
        let gathered = session.gather_on_device(w, Vec::new(), gpu.lend(&memory), STREAM);
        says(gathered, "'w' goes by ps");
        says(session.send_on_device(w, gpu.lend_halves(10), None, STREAM), "are f32 here");
        let into = Some(gpu.lend_halves(10));
        says(session.send_on_device(w, gpu.lend(&memory), into, STREAM), "are f32 here");
        says(session.broadcast_on_device(w, gpu.lend_halves(10), STREAM), "are f32 here");
        let all = || gpu.lend(&gpu.memory(2 * BATCH * (M + N)));
        let row = |gpu: &Gpu| gpu.lend(&gpu.memory(M + N));
        let gathered = session.gather_on_device(fc, vec![row(&gpu), row(&other)], all(), STREAM);
        says(gathered, "different devices");
        let gathered = session.gather_on_device(fc, vec![gpu.lend_halves(M + N)], all(), STREAM);
        says(gathered, "are f32 here");
        let into = gpu.lend_halves(2 * BATCH * (M + N));
        says(session.gather_on_device(fc, Vec::new(), into, STREAM), "are f32 here");
        says(session.receive_on_device(w, STREAM, || false).map(|_| ()), "not in flight");
        gpu.device.capture(true);
        says(session.send_on_device(w, gpu.lend(&memory), None, STREAM), "CUDA graph");
        gpu.device.capture(false);
        session.send_on_device(w, gpu.lend(&memory), None, STREAM)?;
        says(session.send_on_device(w, gpu.lend(&memory), None, STREAM), "in flight");
        says(session.receive(w).map(|_| ()), "use receive_on_device");
        receive(session, w)?;
        session.gather_on_device(fc, vec![row(&gpu)], all(), STREAM)?;
        says(session.receive(fc).map(|_| ()), "use receive_on_device");
        receive(session, fc)?;
        session.send(w, vec![1.0; 10].into())?;
        says(receive(session, w).map(|_| ()), "it was sent from host memory");
        assert_eq!(session.receive(w)?.result.to_vec(), [1.0; 10]);
        Ok(())
    };
    for result in without_hanging(move || Layout::workers(2).run(describe, work)) {
        result.unwrap();
    }
}

const PATIENCE: Duration = Duration::from_secs(30);
const TERMS: Terms = Terms { timeout: PATIENCE, waits: true };

/// Has `values` added up over all ranks, on the device.
fn all_reduce(group: &Group, gpu: &Gpu, values: &Values) -> Result<Work, Error> {
    let (address, count) = values.place();
    let tensor = DeviceTensor { address, count, dtype: Dtype::F32 };
    let request = |mut inputs: Vec<Tensor>, _: Vec<Tensor>| {
        Ok(Request::AllReduce { tensor: inputs.remove(0), op: ReduceOp::Sum })
    };
    let keep = Box::new(values.clone());
    // SAFETY: the values are kept, and touched by work of one stream only.
    unsafe { group.begin_on_device((&gpu.copier, STREAM), &[tensor], &[], request, TERMS, keep) }
}

/// The largest of all ranks' numbers becomes everybody's, in host memory.
fn all_max(group: &Group, number: &Values) -> Result<Work, Error> {
    let (address, count) = number.place();
    let start = std::ptr::NonNull::new(address as *mut u8).unwrap();
    // SAFETY: the operation keeps the number.
    let tensor = unsafe { Tensor::from_raw(start, count, Dtype::F32) };
    let request = Request::AllReduce { tensor, op: ReduceOp::Max };
    group.begin(request, TERMS, Box::new(number.clone()))
}

/// Runs `work` on three ranks.
fn with_group(
    work: impl Fn(&Session, &Group) -> Result<(), Error> + Clone + Send + Sync + 'static,
) {
    let describe = |builder: Builder| builder.layer(Layer::new("w", 1));
    let work = move |session: &Session| {
        let group = session.group("device")?;
        work(session, &group)?;
        group.leave();
        group.wait_left(Duration::from_secs(5));
        Ok(())
    };
    for result in without_hanging(move || Layout::workers(3).run(describe, work)) {
        result.unwrap();
    }
}

#[test]
fn collectives_on_devices_and_in_host_memory_begin_as_they_were_asked_for() {
    with_group(|session, group| {
        let (rank, workers) = (session.rank(), session.workers() as u16);
        for round in 0..4u64 {
            let gpus = [20, 40].map(|seed| Gpu::idle(round + seed + u64::from(rank)));
            let values = [3000, 500].map(|len| gpus[0].memory(len));
            let mut works = Vec::new();
            for (gpu, values) in gpus.iter().zip(&values) {
                gpu.compute(values, move |i| value(rank, round, i));
                works.push(all_reduce(group, gpu, values)?);
            }
            let number = Values(Arc::new(Mutex::new(vec![f32::from(rank)])));
            let last = all_max(group, &number)?;
            // No device has done anything yet: whoever asks does not wait. On some ranks the tensors
            // of the second operation leave before those of the first.
            let first = usize::from(rank % 2);
            gpus[first].device.work_beside();
            while gpus[first].device.copies() == 0 {
                std::thread::yield_now();
            }
            gpus[1 - first].device.work_beside();
            assert!(last.wait(PATIENCE)?);
            assert_eq!(*number.0.lock().unwrap(), [f32::from(workers - 1)]);
            for ((gpu, values), work) in gpus.iter().zip(&values).zip(works) {
                assert!(work.wait(PATIENCE)?);
                work.make_wait(STREAM)?;
                for (i, got) in gpu.read(values).into_iter().enumerate() {
                    let expected: f32 = (0..workers).map(|rank| value(rank, round, i)).sum();
                    assert_eq!(got, expected);
                }
            }
        }
        Ok(())
    });
}

#[test]
fn an_operation_that_a_device_refuses_holds_up_no_other() {
    with_group(|session, group| {
        let gpu = Gpu::new(1);
        let values = gpu.memory(100);
        gpu.device.capture(true);
        let refused = all_reduce(group, &gpu, &values).unwrap_err().to_string();
        assert!(refused.contains("all_reduce(sum) of 100 float32 on rank"), "{refused}");
        assert!(refused.contains("CUDA graph"), "{refused}");
        let number = Values(Arc::new(Mutex::new(vec![f32::from(session.rank())])));
        assert!(all_max(group, &number)?.wait(PATIENCE)?);
        Ok(())
    });
}

#[test]
fn what_waits_for_a_device_ends_with_its_group() {
    let describe = |builder: Builder| builder.layer(Layer::new("w", 1));
    let work = |session: &Session| {
        let group = session.group("device")?;
        let gpu = Gpu::idle(1);
        let (values, number) = (gpu.memory(100), gpu.memory(1));
        let _leaving = all_reduce(&group, &gpu, &values)?;
        let waiting = all_max(&group, &number)?;
        // No device ever works.
        assert!(!waiting.wait(Duration::ZERO)?);
        session.gather("all are waiting", &serde_json::Value::Null)?;
        if session.rank() == 1 {
            group.abort("enough");
        }
        let words = waiting.wait(PATIENCE).unwrap_err().to_string();
        assert!(words.contains("enough"), "{words}");
        Ok(())
    };
    for result in without_hanging(move || Layout::workers(3).run(describe, work)) {
        result.unwrap();
    }
}

/// A device that is asked for is there, or the words say why not.
#[test]
fn a_machine_without_cuda_says_so() {
    match poseidon::device::cuda_copier(0, 0) {
        Ok(copier) => assert!(!copier.device().name().is_empty()),
        Err(fault) => assert!(fault.to_string().contains("CUDA"), "{fault}"),
    }
}
