//! `poseidon bench busy`: threads that compute while something else is measured.
//!
//! Every contender of a benchmark starts this same program, so all of them are measured beside the
//! same load. [`Busy`] starts it for a worker of `bench exchange`.

use crate::launch::at_least_1;
use anyhow::Context;
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::hint::black_box;
use std::process::{Child, Command, ExitCode, Stdio};
use std::{io, thread};

/// Compute on some threads until standard input closes.
///
/// At most one of these programs computes on a machine at a time, and the others wait for their
/// turn: every rank of a job can start one, and the machine is loaded once.
#[derive(clap::Args, Clone, Copy, Debug)]
pub(crate) struct Args {
    /// Threads that compute.
    #[arg(long, value_name = "T", value_parser = at_least_1)]
    threads: u16,
}

/// Computes until standard input closes.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let lock = lock_file()?;
    // The process ends with the main thread, whatever the other threads do then.
    thread::spawn(move || {
        if let Err(error) = flock(&lock, FlockOperation::LockExclusive) {
            tracing::error!("no lock, so no load: {error}");
            return;
        }
        let threads: Vec<_> = (0..args.threads).map(|_| thread::spawn(compute)).collect();
        threads.into_iter().for_each(|thread| drop(thread.join()));
    });
    io::copy(&mut io::stdin(), &mut io::sink()).context("waiting for standard input to close")?;
    Ok(ExitCode::SUCCESS)
}

/// The program, as a child of this process. It ends when this value is dropped, and when this
/// process ends.
#[derive(Debug)]
pub(crate) struct Busy(Child);

impl Busy {
    /// Starts `per_core` threads on each core of this machine; none for 0.
    pub(crate) fn start(per_core: u16) -> anyhow::Result<Option<Self>> {
        if per_core == 0 {
            return Ok(None);
        }
        let threads = usize::from(per_core) * thread::available_parallelism()?.get();
        let program = std::env::current_exe().context("cannot find the poseidon command itself")?;
        let child = Command::new(program)
            .args(["bench", "busy", "--threads", &threads.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .context("starting 'poseidon bench busy'")?;
        Ok(Some(Self(child)))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // A child that cannot be waited for is over.
        let _ = self.0.wait();
    }
}

/// What the programs of one user on one machine lock. Network namespaces share it.
fn lock_file() -> anyhow::Result<File> {
    let user = rustix::process::getuid().as_raw();
    let path = std::env::temp_dir().join(format!("poseidon-bench-busy-{user}.lock"));
    let file = File::options().create(true).write(true).truncate(false).open(&path);
    file.with_context(|| format!("opening {}", path.display()))
}

/// Plain arithmetic on 16 KiB, which stay in a core's first cache.
fn compute() {
    let mut values = [1.0_f32; 4096];
    loop {
        values.iter_mut().for_each(|value| *value = *value * 0.999 + 0.001);
        black_box(&mut values);
    }
}
