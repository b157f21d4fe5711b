//! A whole cluster in one process: every node its own threads, real sockets between them.
#![allow(dead_code, reason = "each test file uses a part of it")]

pub(crate) mod between;
pub(crate) mod fake;

use poseidon::config::{Carriers, Config, Member, credentials};
use poseidon::session::Builder;
use poseidon::{
    ChunkSize, Clock, Consistency, Coordinator, Error, Job, Layer, Optimizer, Placement, Policy,
    Reduction, Secret, Servers, Session, serve,
};
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Runs `test` and returns what it returns, or panics if that takes longer than any test should:
/// a hang is a failure with a name.
pub(crate) fn without_hanging<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, outcome) = mpsc::channel();
    let thread = thread::spawn(move || {
        let _ = done.send(test());
    });
    match outcome.recv_timeout(Duration::from_secs(90)) {
        Ok(value) => value,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => unreachable!("a thread that ends well has sent its value"),
        },
    }
}

/// A small job of two layers, of which every node of a small cluster holds chunks.
pub(crate) fn job() -> Job {
    Job {
        layers: vec![Layer::new("a", 100), Layer::new("b", 300)],
        optimizer: Optimizer::Reduce(Reduction::Sum),
        chunk: ChunkSize::at_most(256),
        placement: Placement::Balanced,
        deterministic: false,
        consistency: Consistency::Bsp,
        scheme: Policy::Auto,
        batch: None,
        checkpoints: poseidon::Checkpoints::default(),
    }
}

/// Begins a worker of `job`.
pub(crate) fn builder(config: Config, job: &Job) -> Builder {
    let builder = Session::builder(config)
        .layers(job.layers.clone())
        .optimizer(job.optimizer.clone())
        .chunk_size(job.chunk)
        .placement(job.placement)
        .deterministic(job.deterministic)
        .scheme(job.scheme);
    match job.batch {
        Some(batch) => builder.batch(batch),
        None => builder,
    }
}

/// One clock of [`job`]: sends every layer, receives every layer, and checks each element of the
/// sum. Only `ranks` contribute anything but zeros.
pub(crate) fn step(session: &Session, clock: u64, ranks: Range<u16>) -> Result<(), Error> {
    // Sums exactly in f32, whatever the order.
    let value = |rank: u16, layer: usize, i: usize| {
        (usize::from(rank) * 7 + layer * 3 + i % 101 + clock as usize) as f32
    };
    let layers = session.book().job.layers.iter().enumerate();
    for (position, layer) in layers.clone().rev() {
        let gradient = (0..layer.len).map(|i| value(session.rank(), position, i));
        session.send(session.layer(&layer.name)?, gradient.collect::<Vec<_>>().into())?;
    }
    for (position, layer) in layers {
        let received = session.receive(session.layer(&layer.name)?)?;
        assert_eq!(received.clock, Clock(clock));
        for (i, got) in received.result.iter().enumerate() {
            let expected: f32 = ranks.clone().map(|rank| value(rank, position, i)).sum();
            assert_eq!(*got, expected, "layer '{}' element {i} clock {clock}", layer.name);
        }
    }
    Ok(())
}

/// How a test cluster is laid out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) workers: u16,
    pub(crate) servers: Servers,
    pub(crate) lanes: u16,
    pub(crate) carrier: Carriers,
    /// Nodes on each host, in order. None: all nodes are on one host.
    pub(crate) hosts: &'static [u16],
    /// By host: its rack. None: all hosts are in one rack.
    pub(crate) racks: &'static [u16],
    /// Whether connections between hosts are encrypted.
    pub(crate) encrypt: bool,
}

impl Layout {
    pub(crate) const fn workers(workers: u16) -> Self {
        let (servers, carrier) = (Servers::Colocated, Carriers::Auto);
        Self { workers, servers, lanes: 1, carrier, hosts: &[], racks: &[], encrypt: false }
    }

    /// Workers on hosts of these sizes.
    pub(crate) fn hosts(hosts: &'static [u16]) -> Self {
        Self { hosts, ..Self::workers(hosts.iter().sum()) }
    }

    /// The configuration of one node.
    pub(crate) fn member(&self, config: &Config, member: Member) -> Config {
        let mut config = Config { member, ..config.clone() };
        if !self.hosts.is_empty() {
            let ends = self.hosts.iter().scan(0, |end, size| {
                *end += size;
                Some(*end)
            });
            let host = ends.take_while(|end| *end <= config.node().0).count();
            config.host = Some(format!("host {host}"));
            config.rack = self.racks.get(host).map(|rack| format!("rack {rack}"));
        }
        config
    }

    /// The coordinator of such a cluster, and the configuration of its worker 0.
    pub(crate) fn coordinator(&self) -> (Coordinator, Config) {
        // A machine that builds something else at the same time may take long to start a thread.
        self.coordinator_within(Duration::from_secs(60))
    }

    /// As [`coordinator`](Self::coordinator), with a limit on how long nodes wait for each other.
    pub(crate) fn coordinator_within(&self, patience: Duration) -> (Coordinator, Config) {
        let secret = Secret::random().unwrap();
        let mut config = Config::alone(secret.clone());
        config.workers = self.workers;
        config.servers = self.servers;
        config.lanes = self.lanes;
        config.carrier = self.carrier;
        config.cluster = "test".into();
        config.encrypt = self.encrypt;
        config.serves_coordinator = false;
        config.connect_timeout = patience;
        let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let door = credentials("test", secret, self.encrypt);
        let coordinator = Coordinator::bind(ip, 0, door, config.connect_timeout).unwrap();
        config.coordinator = coordinator.address().to_string();
        (coordinator, config)
    }

    /// Runs `describe` and `work` on every worker, and the dedicated servers beside them. Returns
    /// what each worker returned; the sessions are finished here.
    pub(crate) fn run<T: Send>(
        &self,
        describe: impl Fn(Builder) -> Builder + Sync,
        work: impl Fn(&Session) -> Result<T, Error> + Sync,
    ) -> Vec<Result<T, Error>> {
        let (_coordinator, config) = self.coordinator();
        self.run_with(&config, describe, |session| {
            let value = work(&session)?;
            session.finish()?;
            Ok(value)
        })
    }

    pub(crate) fn run_with<T: Send>(
        &self,
        config: &Config,
        describe: impl Fn(Builder) -> Builder + Sync,
        work: impl Fn(Session) -> Result<T, Error> + Sync,
    ) -> Vec<Result<T, Error>> {
        thread::scope(|scope| {
            for index in 0..self.servers.extra() {
                let config = self.member(config, Member::Server(index));
                // Workers see what goes wrong; a server's own error is only the echo of it.
                scope.spawn(move || serve(&config));
            }
            let threads: Vec<_> = (0..self.workers)
                .map(|rank| {
                    let config = self.member(config, Member::Worker(rank));
                    let (describe, work) = (&describe, &work);
                    scope.spawn(move || work(describe(Session::builder(config)).start()?))
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }
}
