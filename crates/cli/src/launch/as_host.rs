//! `poseidon launch --as-host`: the processes of one host, as the launcher on another one orders.
//!
//! Everything comes by standard input, the job's secret included, so that no command line and no
//! environment but the workers' own has it. When standard input ends, or is silent for long, the
//! launcher or ssh is gone, and the processes are ended.

use super::protocol::{
    Assignment, Described, Greeting, HEARTBEAT, Heard, MARK, News, Order, PROTOCOL, SILENCE,
    read_line, write_line,
};
use crate::supervise::{Control, End, Options, Process, Role, Sink, Stream, Supervisor};
use crate::threads::{self, Threads};
use anyhow::{Context, bail};
use rustix::process::Signal;
use std::ffi::{OsStr, OsString};
use std::io::{self, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

/// Greets, waits for the processes it is to run, and runs them to their end.
pub(super) fn run() -> anyhow::Result<ExitCode> {
    let own_program = std::env::current_exe().context("cannot find the poseidon command itself")?;
    greet(&own_program.to_string_lossy())?;
    let mut orders = BufReader::new(io::stdin());
    let assignment = match read_line(&mut orders, "", |_| {}).context("reading the first order")? {
        // The launcher has given up and said why, or ssh was told to read nothing.
        None => bail!("standard input ended before the first order: is ssh started with -n?"),
        Some(Order::Start(assignment)) => assignment,
        Some(_) => bail!("the first order is not to start processes"),
    };

    let launcher = Arc::new(Launcher { colours: assignment.colours });
    let supervisor = Supervisor::new();
    let heard =
        Arc::new(Heartbeat { last: Mutex::new(Instant::now()), lost: AtomicBool::new(false) });
    let (control, from) = (supervisor.control(), heard.clone());
    spawn("orders", move || {
        obey(&mut orders, &control, &from);
        from.lose(&control);
    })?;
    let (control, sender, from) = (supervisor.control(), launcher.clone(), heard.clone());
    spawn("heartbeat", move || {
        beat(&sender, &from);
        from.lose(&control);
    })?;

    let options = Options {
        sink: Some(launcher.clone()),
        first_colour: assignment.first,
        ..Options::default()
    };
    let outcome = processes(*assignment, own_program.as_os_str())
        .and_then(|processes| Ok(supervisor.run(processes, options)?));
    match outcome {
        Ok(outcome) => {
            let report = outcome.report().map(|r| String::from_utf8_lossy(&r).into_owned());
            let (status, report) = match outcome.status() {
                // ssh may have died in a way that still lets the launcher hear this.
                0 if heard.lost.load(Ordering::Acquire) => {
                    (1, Some("the connection to the launcher ended".to_owned()))
                }
                status => (status, report),
            };
            // If nobody hears it, the exit status may still arrive.
            let _ = launcher.tell(News::Over { status, report });
            Ok(status.into())
        }
        Err(error) => {
            let _ = launcher.tell(News::Refused { words: format!("{error:#}") });
            Ok(ExitCode::FAILURE)
        }
    }
}

/// When the launcher was last heard.
struct Heartbeat {
    /// Written by the thread that reads orders.
    last: Mutex<Instant>,
    /// Whether processes were ended because the launcher is gone. Written before they are.
    lost: AtomicBool,
}

impl Heartbeat {
    fn lose(&self, control: &Control) {
        self.lost.store(true, Ordering::Release);
        control.end();
    }
}

/// Where output and news go: the launcher, by our standard output.
#[derive(Debug)]
struct Launcher {
    colours: (bool, bool),
}

impl Launcher {
    fn tell(&self, news: News) -> io::Result<()> {
        Heard::News(news).write(&mut io::stdout().lock())
    }
}

impl Sink for Launcher {
    fn lines(&self, stream: Stream, lines: Vec<u8>) -> io::Result<()> {
        let frame = match stream {
            Stream::Stdout => Heard::Stdout(lines),
            Stream::Stderr => Heard::Stderr(lines),
        };
        frame.write(&mut io::stdout().lock())
    }

    fn wants_colour(&self, stream: Stream) -> bool {
        match stream {
            Stream::Stdout => self.colours.0,
            Stream::Stderr => self.colours.1,
        }
    }

    fn failed(&self, name: &str, end: End) {
        let _ = self.tell(News::Failed { words: format!("{name} {end}"), status: end.status() });
    }

    fn workers_ended(&self) {
        let _ = self.tell(News::WorkersEnded);
    }
}

fn greet(program: &str) -> anyhow::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).context("no free port")?;
    let greeting = Greeting {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").into(),
        program: program.into(),
        connection: std::env::var("SSH_CONNECTION").ok(),
        free_port: listener.local_addr()?.port(),
    };
    let mut out = io::stdout().lock();
    // A login script may have begun a line.
    out.write_all(b"\n")?;
    write_line(&mut out, MARK, &greeting).context("cannot greet the launcher")
}

/// Does what the launcher says until it says nothing more.
fn obey(orders: &mut BufReader<io::Stdin>, control: &Control, heard: &Heartbeat) {
    while let Ok(Some(order)) = read_line(orders, "", |_| {}) {
        *heard.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        match order {
            Order::Signal(signal) => {
                if let Some(signal) = Signal::from_named_raw(signal) {
                    control.signal(signal);
                }
            }
            Order::End => control.end(),
            Order::Leave => control.leave(),
            Order::Alive | Order::Start(_) => {}
        }
    }
}

/// Says that this process is there, until the launcher does not say so any more.
fn beat(launcher: &Launcher, heard: &Heartbeat) {
    loop {
        thread::sleep(HEARTBEAT);
        let silent = heard.last.lock().unwrap_or_else(PoisonError::into_inner).elapsed();
        if silent > SILENCE || launcher.tell(News::Alive).is_err() {
            return;
        }
    }
}

/// What was ordered, as processes of this host.
fn processes(assignment: Assignment, own_program: &OsStr) -> anyhow::Result<Vec<Process>> {
    let Assignment { folder, environment, processes, .. } = assignment;
    if !folder.is_dir() {
        let shown = folder.display();
        bail!("there is no folder {shown}: give one that all hosts have with --workdir");
    }
    let workers = processes.iter().filter(|process| !process.server).count();
    let told = environment.iter().any(|(name, _)| name == threads::VARIABLE);
    // Worker numbers are 16 bits wide.
    let threads = (!told && workers > 0).then(|| Threads::shared_by(workers as u16));
    let process = |described: Described| {
        let Described { name, label, server, program, arguments, variables } = described;
        let program: OsString = if server { own_program.to_owned() } else { program };
        let mut command = Command::new(program);
        command.args(arguments).current_dir(&folder).envs(environment.iter().cloned());
        if let Some(threads) = threads.filter(|_| !server) {
            threads.describe(&mut command);
        }
        for (name, value) in variables {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let role = if server { Role::Server } else { Role::Worker };
        Process { name, label, command, role, draws: false }
    };
    Ok(processes.into_iter().map(process).collect())
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> anyhow::Result<()> {
    thread::Builder::new().name(name.into()).spawn(body).context("no thread")?;
    Ok(())
}
