//! One worker of `bench exchange`.

use super::busy::Busy;
use super::payload::{Barrier, Payload, RATE, What};
use super::report::Report;
use super::servers::ServerProcesses;
use anyhow::Context;
use poseidon::{ChunkSize, Config, Optimizer, Session};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// What is measured, all sizes of it.
#[derive(Clone, Debug)]
pub(crate) struct Exchange {
    pub(crate) what: What,
    pub(crate) sizes: Vec<usize>,
    pub(crate) optimizer: Optimizer,
    pub(crate) chunk: ChunkSize,
    /// Threads per core that compute meanwhile.
    pub(crate) busy: u16,
}

/// Some iterations of one size, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Turn {
    pub(crate) bytes: usize,
    pub(crate) iters: u32,
    /// Iterations before the first measured one: pages are touched, windows opened, pools filled.
    pub(crate) warm_up: u32,
}

/// A worker that has joined its job.
pub(crate) struct Worker {
    session: Session,
    servers: ServerProcesses,
    busy: u16,
    barrier: Barrier,
    sizes: Vec<Size>,
    counts_traffic: bool,
}

/// What is exchanged of one size.
struct Size {
    bytes: usize,
    payload: Box<dyn Payload>,
    /// Iterations so far, of all turns.
    iterations: u32,
}

impl Worker {
    /// Joins the job. All workers call it with the same exchange. `servers` are the dedicated
    /// servers whose CPU time this worker counts as its own.
    pub(crate) fn join(
        exchange: &Exchange,
        config: &Config,
        servers: impl FnOnce() -> anyhow::Result<ServerProcesses>,
    ) -> anyhow::Result<Self> {
        let Exchange { what, sizes, optimizer, chunk, busy } = exchange;
        let builder = Session::builder(config.clone())
            .optimizer(optimizer.clone())
            .learning_rate(RATE)
            .chunk_size(*chunk);
        let session = what.describe(builder, sizes).start()?;
        // Every server has joined by now.
        let servers = servers()?;
        let (barrier, payloads) = what.prepare(&session, sizes, optimizer)?;
        let size = |(&bytes, payload)| Size { bytes, payload, iterations: 0 };
        let sizes = sizes.iter().zip(payloads).map(size).collect();
        // A group's bytes are not among the session's.
        let counts_traffic = *what != What::AllReduce;
        Ok(Self { session, servers, busy: *busy, barrier, sizes, counts_traffic })
    }

    /// This worker's rank.
    pub(crate) fn rank(&self) -> u16 {
        self.session.rank()
    }

    /// Takes part in a turn and reports what this worker saw.
    pub(crate) fn measure(&mut self, turn: Turn) -> anyhow::Result<Report> {
        let Turn { bytes, iters, warm_up } = turn;
        let (session, servers) = (&self.session, &self.servers);
        let size = self.sizes.iter_mut().find(|size| size.bytes == bytes);
        let size = size.with_context(|| format!("{bytes} bytes are not among the sizes"))?;
        let _busy = Busy::start(self.busy)?;
        let mut seconds = Vec::with_capacity(iters as usize);
        let mut outside = Duration::ZERO;
        let (mut cpu, mut traffic) = (Duration::ZERO, session.traffic());
        for iteration in 0..warm_up + iters {
            if iteration == warm_up {
                outside = Duration::ZERO;
                (cpu, traffic) = (process_cpu() + servers.cpu()?, session.traffic());
            }
            let number = size.iterations;
            size.iterations += 1;
            let preparing = thread_cpu();
            size.payload.fill(number);
            outside += thread_cpu() - preparing;

            self.barrier.pass(session)?;

            let begin = Instant::now();
            size.payload.exchange(session)?;
            let took = begin.elapsed();

            let checking = thread_cpu();
            size.payload.check(number)?;
            outside += thread_cpu() - checking;
            if iteration >= warm_up {
                seconds.push(took.as_secs_f64());
            }
        }
        // Everything this process did for the exchange: lanes that serve others while this worker is
        // already done count too, filling and checking do not.
        let cpu = process_cpu() + servers.cpu()? - cpu - outside;
        let sent = session.traffic().bytes_sent - traffic.bytes_sent;
        Ok(Report {
            seconds,
            cpu_seconds_per_iter: cpu.as_secs_f64() / f64::from(iters),
            bytes_sent: self.counts_traffic.then(|| sent as f64 / f64::from(iters)),
            peak_rss_bytes: peak_rss()?,
            lanes: session.book().cluster.lanes(),
        })
    }

    /// All workers' reports of the same turn, in rank order.
    pub(crate) fn gather(&self, report: &Report) -> anyhow::Result<Vec<Report>> {
        Ok(self.session.gather("report", report)?)
    }

    /// The turn that worker 0 asks for; `None` at the end. Only what worker 0 says counts.
    pub(crate) fn agree(&self, turn: Option<Turn>) -> anyhow::Result<Option<Turn>> {
        let asked = self.session.gather("turn", &turn)?;
        asked.into_iter().next().context("worker 0 said nothing")
    }

    /// Leaves the job.
    pub(crate) fn finish(self) -> anyhow::Result<()> {
        // A group leaves when its tensors and its barrier are gone.
        drop((self.sizes, self.barrier));
        Ok(self.session.finish()?)
    }
}

/// What this process has used of the processors so far.
pub(crate) fn process_cpu() -> Duration {
    cpu_clock(ClockId::ProcessCPUTime)
}

/// What this thread has used of the processors so far.
pub(crate) fn thread_cpu() -> Duration {
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
