//! `poseidon dashboard`, and `--dashboard` of jobs: a running job as a page.

mod web;

use crate::job::Job;
use crate::running_job::{Coordinator, RunningJob};
use crate::supervise::SignalListener;
use anyhow::Context;
use poseidon::{Config, LiveJob};
use serde_json::Value;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, SystemTime};
use tokio::sync::watch;

/// Show a running job as a page, to be opened in a browser.
///
/// The page has what 'poseidon top' shows, and is brought up to date once a second: nodes, what they
/// send and wait for, the use of their ports, the slowest node and layer, the plan and its changes,
/// faults. At /metrics are the same numbers as Prometheus reads them, and at /live as JSON.
///
/// 'poseidon train' and 'poseidon launch' do the same with --dashboard, and end it with the job. This
/// command is for jobs that were started otherwise, such as by torchrun or srun. It goes on when the
/// job ends, and the page says since when there has been no news.
///
/// Without a host in the address, only this machine can see the page. With one, everybody can who
/// reaches that address: there is no password, and the page has the names of layers and hosts. From
/// another machine, 'ssh -L 8080:127.0.0.1:8080 HOST' is the safer way.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Where to show it: ':8080' or '8080' for this machine only, '0.0.0.0:8080' for all. Port 0 is
    /// any free one.
    #[arg(value_name = "[HOST]:PORT", default_value = ":8080", env = "POSEIDON_DASHBOARD")]
    address: PageAddress,

    #[command(flatten)]
    job: RunningJob,
}

/// Shows the job until a signal comes.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let coordinator = args.job.find()?;
    // What is wrong with the address or the secret is better said here than on the page.
    coordinator.live()?;
    let (told, signals) = mpsc::channel();
    let _listener = SignalListener::start(move |signal| told.send(signal).is_ok())
        .context("no signal handler")?;
    let _dashboard = Dashboard::start(args.address, coordinator)?;
    // The listener lives, so this ends with a signal.
    let _ = signals.recv();
    Ok(ExitCode::SUCCESS)
}

/// Where a page is shown, as people write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageAddress(SocketAddr);

impl FromStr for PageAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(port) = text.strip_prefix(':').unwrap_or(text).parse() {
            return Ok(Self(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)));
        }
        let expected =
            "expected a port such as :8080, or an address and a port such as 0.0.0.0:8080";
        text.replace("localhost:", "127.0.0.1:").parse().map(Self).map_err(|_| expected.into())
    }
}

/// What the page shows.
#[derive(Clone, Debug, Default)]
struct Shown {
    /// What was heard last.
    job: Option<Arc<LiveJob>>,
    /// When that was, in milliseconds since 1970.
    heard_ms: u64,
    /// Why nothing was heard since.
    error: Option<String>,
    /// The plan, layer by layer.
    plan: Arc<Value>,
}

/// Shows a job as a page, as long as it lives.
pub(crate) struct Dashboard {
    /// Dropped to end the thread that asks, and with it the one that serves.
    _stop: Sender<()>,
}

impl Dashboard {
    /// Shows `job`, if there is an address to do so.
    pub(crate) fn of_job(at: Option<PageAddress>, job: &Job) -> anyhow::Result<Option<Self>> {
        at.map(|at| Self::start(at, job.to_ask()?)).transpose()
    }

    /// Shows the job that `config` describes, whose coordinator will be in this process.
    pub(crate) fn beside(at: Option<PageAddress>, config: &Config) -> anyhow::Result<Option<Self>> {
        let coordinator = || Coordinator { config: config.clone(), patience: ANSWER };
        at.map(|at| Self::start(at, coordinator())).transpose()
    }

    fn start(PageAddress(address): PageAddress, coordinator: Coordinator) -> anyhow::Result<Self> {
        let about =
            || format!("cannot show the job at {address}; --dashboard :0 takes any free port");
        let listener = TcpListener::bind(address).with_context(about)?;
        listener.set_nonblocking(true).with_context(about)?;
        let address = listener.local_addr().with_context(about)?;
        let (show, shown) = watch::channel(Shown::default());
        let (stop, stopped) = mpsc::channel();
        let asking = move || {
            let mut last = Shown::default();
            loop {
                last.look(&coordinator);
                // The sender is held here, and the page is gone when this thread is.
                if show.send(last.clone()).is_err() {
                    return;
                }
                match stopped.recv_timeout(PERIOD) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        };
        let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.into()).spawn(body).with_context(about)
        };
        spawn("dashboard-asks", Box::new(asking))?;
        spawn("dashboard-serves", Box::new(move || web::serve(listener, shown)))?;
        tracing::info!("the job is shown at http://{address}/");
        if !address.ip().is_loopback() {
            tracing::warn!(
                "everybody who can reach {address} can see this job's layers, hosts and errors"
            );
        }
        Ok(Self { _stop: stop })
    }
}

impl Shown {
    /// Asks the coordinator.
    fn look(&mut self, coordinator: &Coordinator) {
        match coordinator.live() {
            Ok(job) => {
                let before = self.job.as_ref().map(|job| job.plan.epoch);
                if self.plan.is_null() || before != Some(job.plan.epoch) {
                    self.plan =
                        Arc::new(coordinator.ask("plan").ok().flatten().unwrap_or_default());
                }
                let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                self.heard_ms = since_1970.unwrap_or_default().as_millis() as u64;
                (self.job, self.error) = (Some(Arc::new(job)), None);
            }
            Err(error) => self.error = Some(crate::terminal::printable(&format!("{error:#}"))),
        }
    }
}

/// How often the coordinator is asked: nodes tell it something as often.
const PERIOD: Duration = Duration::from_secs(1);
/// How long an answer of the coordinator may take.
const ANSWER: Duration = Duration::from_secs(5);

const EXAMPLES: &str = "\
Examples:
  The job that you run on this machine, at http://127.0.0.1:8080:
    poseidon dashboard

  At another port, of a job whose coordinator is elsewhere; POSEIDON_SECRET is the job's:
    poseidon dashboard :9000 --coordinator node1:29501 --cluster train

  For colleagues, in a network that you trust:
    poseidon dashboard 0.0.0.0:8080

  For Prometheus, with 127.0.0.1:8080 as a target:
    curl http://127.0.0.1:8080/metrics";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_without_a_host_is_this_machine_alone() {
        let at = |text: &str| text.parse::<PageAddress>().map(|PageAddress(at)| at.to_string());
        for text in [":8080", "8080", "localhost:8080", "127.0.0.1:8080"] {
            assert_eq!(at(text).as_deref(), Ok("127.0.0.1:8080"), "{text}");
        }
        assert_eq!(at("0.0.0.0:80").as_deref(), Ok("0.0.0.0:80"));
        assert_eq!(at("[::]:80").as_deref(), Ok("[::]:80"));
        assert!(at("here").unwrap_err().contains(":8080"));
        assert!(at(":65536").unwrap_err().contains(":8080"));
    }
}
