//! A job on several hosts: calls them, tells each its part, and sees all of it to its end.

use super::connection::{Connection, Event};
use super::host_list::Host;
use super::meeting::{self, ThisMachine};
use super::protocol::{Assignment, Described, Greeting, Order};
use super::refusal::Called;
use super::watch::Run;
use crate::dashboard::{Dashboard, PageAddress};
use crate::job::{Job, Share, Size};
use crate::supervise::{End, Process, Role, SignalListener, SignalName};
use crate::{threads, wants_colour};
use anyhow::{Context, bail};
use poseidon_link::address;
use rustix::process::Signal;
use std::ffi::OsString;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// What is to run, and where.
pub(super) struct Plan {
    pub(super) hosts: Vec<Host>,
    /// The program that calls a host, and its flags.
    pub(super) ssh: Vec<String>,
    /// The `poseidon` of the hosts, if the user has named it.
    pub(super) program: Option<String>,
    /// Where workers run.
    pub(super) folder: PathBuf,
    /// What workers find in their environment, beside what each is told.
    pub(super) environment: Vec<(OsString, OsString)>,
    /// What each worker runs.
    pub(super) command: Vec<OsString>,
    /// Where the coordinator is to listen, if the user has said it.
    pub(super) address: Option<IpAddr>,
    /// Where the job is shown as a page.
    pub(super) dashboard: Option<PageAddress>,
}

/// Runs the job. `size` has no address yet.
pub(super) fn run(plan: Plan, size: Size) -> anyhow::Result<ExitCode> {
    let (events, inbox) = mpsc::channel();
    let signals = events.clone();
    let _listener =
        SignalListener::start(move |signal| signals.send(Event::Signal(signal)).is_ok())
            .context("no signal handler")?;
    let script = script(plan.program.as_deref(), &std::env::current_exe().unwrap_or_default());
    let mut connections = Vec::new();
    for (index, host) in plan.hosts.iter().enumerate() {
        connections.push(Connection::start(index, host.clone(), &plan.ssh, &script, &events)?);
    }
    let greetings = match await_greetings(&plan, &mut connections, &inbox)? {
        Ok(greetings) => greetings,
        Err(signal) => {
            tracing::error!("stopped by {} before the job began", SignalName(signal.as_raw()));
            return Ok(End::Signal(signal.as_raw()).status().into());
        }
    };

    let greeted: Vec<_> = plan.hosts.iter().zip(&greetings).collect();
    let place = coordinator_address(&plan, &greeted)?;
    let size = Size { address: place.ip, ..size };
    let master = meeting::master(greeted[0], place.ip);
    let job = Job::start_on_hosts(size, master)?;
    tracing::info!("the coordinator is at {}: {}", job.coordinator(), place.reason);
    let _dashboard = Dashboard::of_job(plan.dashboard, &job)?;
    let mut first = 0;
    for (connection, share) in connections.iter().zip(shares(&plan.hosts, size.servers.extra())) {
        let assignment = assignment(&plan, &job, &connection.host, &share, first);
        first += assignment.processes.len();
        connection.order(Order::Start(Box::new(assignment)));
    }
    let mut run = Run::new(connections);
    run.watch(&inbox);
    Ok(run.tell())
}

/// What the shell of a host is asked to do: run this very program if the host has it at the same
/// place, as with a home that is shared, and otherwise the one on its path.
fn script(named: Option<&str>, own: &std::path::Path) -> String {
    let script = match named {
        Some(program) => format!("exec {} launch --as-host", quoted(program)),
        None => {
            let own = quoted(&own.to_string_lossy());
            format!(
                "if [ -x {own} ]; then exec {own} launch --as-host; fi; \
                 exec poseidon launch --as-host"
            )
        }
    };
    // The user's shell may be any. All of them understand this.
    format!("exec sh -c {}", quoted(&script))
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Waits until every host has greeted. The inner error is a signal that asked for the end.
fn await_greetings(
    plan: &Plan,
    connections: &mut [Connection],
    inbox: &Receiver<Event>,
) -> anyhow::Result<Result<Vec<Greeting>, Signal>> {
    let mut greetings: Vec<Option<Greeting>> = vec![None; connections.len()];
    let mut refusals: Vec<Option<String>> = vec![None; connections.len()];
    let mut deadline = Instant::now() + GREETING;
    while greetings.iter().zip(&refusals).any(|(g, r)| g.is_none() && r.is_none()) {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok(event) = inbox.recv_timeout(left) else { break };
        let called = |index: usize| Called {
            host: &plan.hosts[index].name,
            ssh: &plan.ssh,
            program: plan.program.as_deref(),
        };
        match event {
            Event::Greeted(index, greeting) => match called(index).greeted(&greeting) {
                Ok(()) => greetings[index] = Some(greeting),
                Err(words) => refusals[index] = Some(words),
            },
            Event::Ended(index, end) => {
                connections[index].reap();
                let words = called(index).ended(end, &connections[index].tail());
                greetings[index] = None;
                refusals[index].get_or_insert(words);
            }
            Event::Garbled(index, error) => {
                let words = format!("host {} says nonsense: {error}", plan.hosts[index].name);
                refusals[index].get_or_insert(words);
            }
            Event::Signal(signal) => return Ok(Err(signal)),
            Event::News(..) | Event::Unwritten(_) => {}
        }
        if refusals.iter().any(Option::is_some) {
            // The job is lost. Others that cannot take part are told of as well, if they hurry.
            deadline = deadline.min(Instant::now() + OTHERS);
        }
    }
    let lost = refusals.iter().any(Option::is_some);
    let silent = greetings.iter().zip(&mut refusals).zip(&plan.hosts);
    for ((_, refusal), host) in silent.filter(|((g, r), _)| g.is_none() && r.is_none() && !lost) {
        *refusal = Some(format!(
            "host {} did not answer within {} s; see whether '{} {} true' works",
            host.name,
            GREETING.as_secs(),
            plan.ssh.join(" "),
            host.name
        ));
    }
    let refusals: Vec<_> = refusals.into_iter().flatten().collect();
    if refusals.is_empty() {
        return Ok(Ok(greetings.into_iter().flatten().collect()));
    }
    bail!("{}; nothing was started", refusals.join("\n       "))
}

fn coordinator_address(
    plan: &Plan,
    greeted: &[(&Host, &Greeting)],
) -> anyhow::Result<meeting::Meeting> {
    let asked = plan.address.map(|ip| (ip.to_string(), "as --coordinator-address says"));
    let wanted = std::env::var("POSEIDON_ADDRESS").ok().filter(|address| !address.is_empty());
    let asked = asked.or(wanted.map(|address| (address, "as POSEIDON_ADDRESS says")));
    if let Some((wanted, reason)) = asked {
        let near = format!("{}:22", plan.hosts[0].machine());
        let choices =
            address::choose_each(Some(&wanted), &near, Instant::now() + meeting::LOOK_UP)?;
        let ip = choices.first().context("no address")?.ip;
        return Ok(meeting::Meeting { ip, reason: reason.into() });
    }
    meeting::coordinator(greeted, &ThisMachine).context(
        "cannot tell at which address of this machine the hosts can reach it: give it with \
         --coordinator-address",
    )
}

/// Which workers and servers each host has: workers host by host, servers in turn.
fn shares(hosts: &[Host], servers: u16) -> Vec<Share> {
    let mut first = 0;
    let share = |(index, host): (usize, &Host)| {
        let share = Share {
            host: host.name.clone(),
            first,
            workers: host.ranks,
            servers: (0..servers).filter(|s| usize::from(*s) % hosts.len() == index).collect(),
        };
        first += host.ranks;
        share
    };
    hosts.iter().enumerate().map(share).collect()
}

fn assignment(plan: &Plan, job: &Job, host: &Host, share: &Share, first: usize) -> Assignment {
    debug_assert_eq!(host.name, share.host);
    let command = || {
        let mut command = Command::new(&plan.command[0]);
        command.args(&plan.command[1..]);
        command
    };
    Assignment {
        folder: plan.folder.clone(),
        environment: plan.environment.clone(),
        processes: job.processes_of(share, command).into_iter().map(described).collect(),
        colours: (wants_colour(&io::stdout()), wants_colour(&io::stderr())),
        first,
    }
}

fn described(process: Process) -> Described {
    let Process { name, label, command, role, .. } = process;
    let variable = |(name, value): (&std::ffi::OsStr, Option<&std::ffi::OsStr>)| {
        (name.into(), value.map(Into::into))
    };
    Described {
        name,
        label,
        server: role == Role::Server,
        program: command.get_program().into(),
        arguments: command.get_args().map(Into::into).collect(),
        variables: command.get_envs().map(variable).collect(),
    }
}

/// The variables of this process that workers on other hosts get too: what concerns Poseidon and is
/// neither the job's own nor one host's, the number of threads, and what the user names.
pub(super) fn environment(
    named: &[String],
    own: impl Iterator<Item = (OsString, OsString)>,
) -> anyhow::Result<Vec<(OsString, OsString)>> {
    let own: Vec<_> = own.collect();
    let passed = |name: &OsString| {
        let name = name.to_string_lossy();
        name == threads::VARIABLE
            || name.strip_prefix("POSEIDON_").is_some_and(|rest| !NOT_PASSED.contains(&rest))
    };
    let mut passed: Vec<_> = own.iter().filter(|(name, _)| passed(name)).cloned().collect();
    for word in named {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, value.into()),
            None => {
                let value = own.iter().find(|(name, _)| name == word.as_str());
                let value = value.with_context(|| format!("--env {word}: it is not set here"))?;
                (word.as_str(), value.1.clone())
            }
        };
        if name.is_empty() || name.contains('\0') {
            bail!("--env {word}: expected NAME or NAME=VALUE");
        }
        passed.push((name.into(), value));
    }
    Ok(passed)
}

/// How long hosts may take to answer. ssh itself has no limit, and the kernel's is two minutes.
const GREETING: Duration = Duration::from_secs(60);
/// After the first host that cannot take part, how long others have to say that they cannot either.
const OTHERS: Duration = Duration::from_secs(3);
/// Variables that are the job's own, or that one machine's.
const NOT_PASSED: [&str; 10] = [
    "ADDRESS",
    "CLUSTER",
    "COORDINATOR",
    "COORDINATOR_SERVED",
    "HOST",
    "RACK",
    "SECRET",
    "SECRET_FILE",
    "SERVER",
    "SERVERS",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_survives_any_shell_and_any_path() {
        let script = script(None, std::path::Path::new("/it's here/poseidon"));
        let output = Command::new("sh")
            .args(["-c", &script.replace("exec poseidon launch", "echo poseidon")])
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "poseidon --as-host\n");
        let named = super::script(Some("echo"), std::path::Path::new(""));
        let output = Command::new("sh").args(["-c", &named]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "launch --as-host\n");
    }

    #[test]
    fn servers_are_dealt_out_to_the_hosts() {
        let hosts = [("a", 2), ("b", 1)].map(|(name, ranks)| Host { name: name.into(), ranks });
        let shares = shares(&hosts, 3);
        let told: Vec<_> = shares.iter().map(|s| (s.first, s.workers, s.servers.clone())).collect();
        assert_eq!(told, [(0, 2, vec![0, 2]), (2, 1, vec![1])]);
    }

    #[test]
    fn secrets_and_what_concerns_one_machine_stay_here() {
        let own = [
            ("POSEIDON_SECRET", "x"),
            ("POSEIDON_SECRET_FILE", "x"),
            ("POSEIDON_HOST", "x"),
            ("POSEIDON_LINK", "tcp"),
            ("OMP_NUM_THREADS", "3"),
            ("HOME", "/home/me"),
            ("WANDB_MODE", "offline"),
        ];
        let own = || own.into_iter().map(|(name, value)| (name.into(), value.into()));
        let named = ["WANDB_MODE".to_owned(), "LR=0.1=x".to_owned()];
        let passed = environment(&named, own()).unwrap();
        let expected = [
            ("POSEIDON_LINK", "tcp"),
            ("OMP_NUM_THREADS", "3"),
            ("WANDB_MODE", "offline"),
            ("LR", "0.1=x"),
        ];
        assert_eq!(passed, expected.map(|(n, v)| (OsString::from(n), OsString::from(v))));
        let words = environment(&["NONE".to_owned()], own()).unwrap_err().to_string();
        assert!(words.contains("NONE") && words.contains("not set here"), "{words}");
        assert!(environment(&["=x".to_owned()], own()).is_err());
    }
}
