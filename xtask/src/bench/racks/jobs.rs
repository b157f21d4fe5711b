//! Jobs that take turns on one cluster. Each does the same exchange in its own way.

use super::Bench;
use super::rounds::{Rounds, Seen};
use crate::bench::cluster::{Beside, Cluster};
use crate::bench::size::Size;
use crate::bench::turns::{Ask, Contender, WARM_UP, grown};
use crate::command::{drain, end, tail, wait_until};
use anyhow::{Context, Result};
use std::process::{Child, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A way to do an exchange.
#[derive(Clone, Debug)]
pub(super) struct Way {
    /// Its name in tables.
    pub(super) name: &'static str,
    /// What every node runs.
    pub(super) words: Vec<String>,
    /// The interfaces of the box that a dedicated server uses, as POSEIDON_ADDRESS has them. None
    /// if there is no server but those of the workers.
    pub(super) interfaces: Option<String>,
}

/// A cluster, and the jobs on it. One that has failed is started again when it is needed.
pub(super) struct Stage {
    cluster: Cluster,
    beside: Beside,
    ways: Vec<Way>,
    jobs: Vec<Option<Job>>,
}

/// A job that waits for its next turn. Its server goes after its workers.
struct Job {
    contender: Contender,
    _server: Option<Server>,
}

/// A dedicated server on the box. It ends by itself when its workers are done.
struct Server {
    child: Child,
    said: Option<JoinHandle<String>>,
}

/// Seconds of iterations in a turn: as short as tells one exchange from the next.
const TURN: f64 = 0.4;
const MOST_ITERATIONS: u64 = 20;
/// Where the first job meets. Each next one has a port this much higher.
const FIRST_PORT: usize = 29500;
const NEXT_PORT: usize = 100;
/// How long a server may stay after its workers.
const GOODBYE: Duration = Duration::from_secs(20);

impl Stage {
    /// A cluster for jobs of all these ways.
    pub(super) fn up(bench: &Bench<'_>, beside: Beside, ways: Vec<Way>) -> Result<Self> {
        let args = bench.args;
        let cluster = Cluster::with_beside(args.nodes, args.mbit, &args.queue, beside)?;
        let jobs = ways.iter().map(|_| None).collect();
        Ok(Self { cluster, beside, ways, jobs })
    }

    /// All rounds of exchanges of `size`. `seconds` is what the slowest way should take for one.
    pub(super) fn measure(
        &mut self,
        bench: &Bench<'_>,
        size: Size,
        seconds: f64,
    ) -> Result<Rounds> {
        for number in 0..self.ways.len() {
            self.start(bench, number)?;
        }
        let ask = |iters| Ask { size, iters, port_seconds: seconds };
        // A rehearsal says how long an exchange takes.
        let mut slowest: f64 = 0.0;
        for number in 0..self.ways.len() {
            slowest = slowest.max(self.turn(number, ask(1))?.turn.seconds());
        }
        let enough = ((TURN / slowest).ceil() as u64).clamp(1, MOST_ITERATIONS);
        let iters = bench.args.iters.unwrap_or(enough);
        let names = self.ways.iter().map(|way| way.name).collect();
        let mut rounds = Rounds { iters, names, seen: Vec::new() };
        let count = self.ways.len();
        for round in 0..bench.args.rounds as usize {
            let mut seen: Vec<Option<Seen>> = self.ways.iter().map(|_| None).collect();
            for place in 0..count {
                let number = (round + place) % count;
                seen[number] = Some(self.turn(number, ask(iters))?);
            }
            rounds.seen.push(seen.into_iter().flatten().collect());
        }
        Ok(rounds)
    }

    fn start(&mut self, bench: &Bench<'_>, number: usize) -> Result<()> {
        if self.jobs[number].is_none() {
            let way = &self.ways[number];
            let port = FIRST_PORT + number * NEXT_PORT;
            let job = Job::start(&self.cluster, way, &bench.poseidon, port);
            self.jobs[number] = Some(job.with_context(|| format!("starting {}", way.name))?);
        }
        Ok(())
    }

    fn turn(&mut self, number: usize, ask: Ask) -> Result<Seen> {
        let job = self.jobs[number].as_mut().context("it was not started")?;
        let before = self.cluster.carried_beside(self.beside)?;
        let turn = match job.contender.turn(&self.cluster, ask) {
            Ok(turn) => turn,
            Err(error) => {
                self.jobs[number] = None;
                return Err(error.context(self.ways[number].name));
            }
        };
        let after = self.cluster.carried_beside(self.beside)?;
        let most = grown(&before, &after).max().unwrap_or(0);
        Ok(Seen { turn, link: most as f64 / (ask.iters + WARM_UP) as f64 })
    }
}

impl Job {
    fn start(cluster: &Cluster, way: &Way, poseidon: &str, port: usize) -> Result<Self> {
        let port = port.to_string();
        let mut workers = cluster.on_every_node();
        // What this process was told is for no job of the benchmark.
        for name in ["POSEIDON_RACK", "POSEIDON_ADDRESS", "SLURM_TOPOLOGY_ADDR"] {
            workers.env_remove(name);
        }
        workers.args(&way.words).env("MASTER_PORT", &port);
        let mut server = None;
        if let Some(interfaces) = &way.interfaces {
            workers.env("POSEIDON_SERVERS", "1");
            let mut serve = cluster.at_box();
            serve.args([poseidon, "serve"]).env("MASTER_PORT", &port);
            serve.env("POSEIDON_SERVERS", "1").env("POSEIDON_SERVER", "0");
            serve.env("POSEIDON_ADDRESS", interfaces);
            serve.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
            let mut child = serve.spawn().context("starting a server")?;
            let said = Some(drain(child.stderr.take()));
            server = Some(Server { child, said });
        }
        match Contender::start(&mut workers) {
            Ok(contender) => Ok(Self { contender, _server: server }),
            Err(error) => Err(match server {
                Some(server) => error.context(server.story()),
                None => error,
            }),
        }
    }
}

impl Server {
    /// What it has said, for a job that did not start.
    fn story(mut self) -> String {
        // Standard error ends with the process.
        let _ = end(&mut self.child);
        let said = self.said.take().and_then(|said| said.join().ok()).unwrap_or_default();
        format!("its server said: {}", tail(&said))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let over = wait_until(&mut self.child, Instant::now() + GOODBYE);
        if !matches!(over, Ok(Some(_))) && end(&mut self.child).is_err() {
            eprintln!("process {} is left, and does not end", self.child.id());
        }
    }
}
