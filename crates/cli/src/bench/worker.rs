//! One worker of `bench exchange`.

use super::report::Report;
use anyhow::{Context, ensure};
use poseidon::{Buffer, ChunkSize, Clock, Config, Layer, LayerId, Optimizer, Session};
use poseidon_core::optim::{Step, state_of};
use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// What is measured.
#[derive(Clone, Debug)]
pub(crate) struct Exchange {
    pub(crate) bytes: usize,
    pub(crate) iters: u32,
    pub(crate) optimizer: Optimizer,
    pub(crate) chunk: ChunkSize,
}

/// Iterations before the first measured one: pages are touched, windows opened, pools filled.
pub(super) const WARM_UP: u32 = 3;
const RATE: f32 = 0.01;
/// Values repeat with this period, so that results can be checked against a small reference.
const PERIOD: usize = 64;

/// Takes part in the exchange and reports what this worker saw.
pub(crate) fn run(exchange: &Exchange, config: &Config) -> anyhow::Result<Report> {
    let session = start(exchange, config, None)?;
    let report = measure(&session, exchange)?;
    session.finish()?;
    Ok(report)
}

/// As [`run`], then gathers all workers' reports. `Some` on rank 0.
pub(crate) fn run_and_gather(
    exchange: &Exchange,
    config: &Config,
) -> anyhow::Result<Option<Vec<Report>>> {
    let width = Report::width(exchange.iters);
    let workers = usize::from(config.workers);
    let session = start(exchange, config, Some(width * workers))?;
    let report = measure(&session, exchange)?;
    // Every worker fills its own row of a table of zeros; the sum is the table.
    let rank = usize::from(session.rank());
    let mut table = Buffer::zeroed(width * workers);
    table[rank * width..][..width].copy_from_slice(&report.to_row());
    let layer = session.layer("reports")?;
    session.send(layer, table)?;
    let table = session.receive(layer)?.result;
    session.finish()?;
    let scale = 1.0 / exchange.optimizer.reduction().scale(workers);
    let rows = table.chunks(width).map(|row| Report::from_row(row, scale, report.lanes));
    Ok((rank == 0).then(|| rows.collect()))
}

fn start(exchange: &Exchange, config: &Config, table: Option<usize>) -> anyhow::Result<Session> {
    let session = Session::builder(config.clone())
        .layer(Layer::new("model", exchange.bytes / size_of::<f32>()))
        .layer(Layer::new("barrier", 1))
        .layers(table.map(|len| Layer::new("reports", len)))
        .optimizer(exchange.optimizer.clone())
        .learning_rate(RATE)
        .chunk_size(exchange.chunk)
        .start()?;
    Ok(session)
}

fn measure(session: &Session, exchange: &Exchange) -> anyhow::Result<Report> {
    let len = exchange.bytes / size_of::<f32>();
    let (model, barrier) = (session.layer("model")?, session.layer("barrier")?);
    let mut reference = Reference::new(session, &exchange.optimizer);
    let mut gradient = Buffer::zeroed(len);
    let mut parameters = None;
    if !exchange.optimizer.is_stateless() {
        parameters = Some(initialise(session, model, Buffer::zeroed(len))?);
        initialise(session, barrier, Buffer::zeroed(1))?;
    }
    let mut beat = Buffer::zeroed(1);
    let mut seconds = Vec::with_capacity(exchange.iters as usize);
    let mut outside = Duration::ZERO;
    let (mut cpu, mut traffic) = (Duration::ZERO, session.traffic());
    for iteration in 0..WARM_UP + exchange.iters {
        if iteration == WARM_UP {
            (cpu, outside, traffic) = (process_cpu(), Duration::ZERO, session.traffic());
        }
        let preparing = thread_cpu();
        fill(&mut gradient, session.rank(), iteration);
        outside += thread_cpu() - preparing;

        session.send(barrier, beat)?;
        beat = session.receive(barrier)?.result;

        let begin = Instant::now();
        match parameters.take() {
            Some(old) => session.send_into(model, gradient, old)?,
            None => session.send(model, gradient)?,
        }
        let received = session.receive(model)?;
        let took = begin.elapsed();

        let checking = thread_cpu();
        reference.check(&received.result, iteration)?;
        outside += thread_cpu() - checking;
        if iteration >= WARM_UP {
            seconds.push(took.as_secs_f64());
        }
        gradient = match received.gradient {
            Some(gradient) => {
                parameters = Some(received.result);
                gradient
            }
            None => received.result,
        };
    }
    // Everything this process did for the exchange: lanes that serve others while this worker is
    // already done count too, filling and checking do not.
    let cpu = process_cpu() - cpu - outside;
    let iters = f64::from(exchange.iters);
    Ok(Report {
        seconds,
        cpu_seconds_per_iter: cpu.as_secs_f64() / iters,
        bytes_sent: (session.traffic().bytes_sent - traffic.bytes_sent) as f64 / iters,
        peak_rss_bytes: peak_rss()?,
        lanes: session.book().cluster.lanes(),
    })
}

fn initialise(session: &Session, layer: LayerId, values: Buffer) -> anyhow::Result<Buffer> {
    session.broadcast(layer, values)?;
    Ok(session.receive(layer)?.result)
}

fn fill(gradient: &mut [f32], rank: u16, iteration: u32) {
    let shift = shift(rank, iteration);
    for (i, value) in gradient.iter_mut().enumerate() {
        *value = ((i + shift) % PERIOD) as f32;
    }
}

fn shift(rank: u16, iteration: u32) -> usize {
    usize::from(rank) * 13 + iteration as usize * 7
}

/// The same exchange done by one process on one period of the values.
struct Reference {
    workers: usize,
    optimizer: Optimizer,
    parameters: Vec<f32>,
    state: Vec<Vec<f32>>,
}

impl Reference {
    fn new(session: &Session, optimizer: &Optimizer) -> Self {
        Self {
            workers: session.workers(),
            optimizer: optimizer.clone(),
            parameters: vec![0.0; PERIOD],
            state: vec![vec![0.0; PERIOD]; optimizer.state_vectors()],
        }
    }

    fn check(&mut self, result: &[f32], iteration: u32) -> anyhow::Result<()> {
        let mut sum = vec![0.0; PERIOD];
        for rank in 0..self.workers as u16 {
            let mut contribution = [0.0; PERIOD];
            fill(&mut contribution, rank, iteration);
            sum.iter_mut().zip(contribution).for_each(|(s, c)| *s += c);
        }
        let scale = self.optimizer.reduction().scale(self.workers);
        if self.optimizer.is_stateless() {
            self.parameters = sum.iter().map(|s| s * scale).collect();
        } else {
            self.optimizer.step(Step {
                parameters: &mut self.parameters,
                sum: &sum,
                scale,
                rate: RATE,
                clock: Clock(u64::from(iteration) + 1),
                state: state_of(&mut self.state),
            });
        }
        // Integers sum exactly in any order, so there is nothing to round.
        let wrong = result.chunks(PERIOD).position(|got| *got != self.parameters[..got.len()]);
        ensure!(
            wrong.is_none(),
            "iteration {iteration}: elements from {} on are {:?}, expected {:?}",
            wrong.unwrap_or(0) * PERIOD,
            result.chunks(PERIOD).nth(wrong.unwrap_or(0)),
            self.parameters,
        );
        Ok(())
    }
}

/// What this process has used of the processors so far.
pub(crate) fn process_cpu() -> Duration {
    cpu_clock(ClockId::ProcessCPUTime)
}

fn thread_cpu() -> Duration {
    cpu_clock(ClockId::ThreadCPUTime)
}

fn cpu_clock(id: ClockId) -> Duration {
    let now = clock_gettime(id);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn peak_rss() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("reading memory use")?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).context("no VmHWM")?;
    let kilobytes: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kilobytes << 10)
}
