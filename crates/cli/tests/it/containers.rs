//! Jobs in what containers have: little shared memory, or none.

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};
use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// What ranks of one host do here. It fails if a sum is wrong.
const EXCHANGE: &str = "bench exchange --in-cluster --bytes 100000000 --iters 2";

/// Docker gives a container 64 MB of shared memory in `/dev/shm`. Four ranks exchange 100 MB there.
#[test]
fn a_small_dev_shm_is_enough() {
    let unshare = || {
        let mut command = Command::new("unshare");
        command.arg("--mount");
        command
    };
    if !unshare().arg("true").status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: this needs a mount namespace of its own");
        return;
    }
    for size in ["64m", "4k"] {
        let script = format!("mount -t tmpfs -o size={size} none /dev/shm && exec \"$@\"");
        let mut command = unshare();
        command.args(["sh", "-c", &script, "sh", POSEIDON]);
        let said = run(job(&mut command));
        assert!(!said.contains(THROUGH_SOCKETS), "{said}");
    }
}

/// Where nothing can be shared, bytes go through sockets, and it is said.
#[test]
fn without_shared_memory_bytes_go_through_sockets() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "containers::in_a_container_without_memfd", "--nocapture"])
        .env(ROLE, "1");
    let said = run(&mut command);
    assert!(said.contains(THROUGH_SOCKETS), "{said}");
}

const POSEIDON: &str = env!("CARGO_BIN_EXE_poseidon");
const THROUGH_SOCKETS: &str = "no memory can be shared with other nodes of this host";
/// Says that this process is a part of another test.
const ROLE: &str = "POSEIDON_TEST_WITHOUT_MEMFD";

/// Not a test of its own: it becomes the job, which may not make files in memory.
#[test]
fn in_a_container_without_memfd() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let refused = SeccompFilter::new(
        BTreeMap::from([(libc::SYS_memfd_create, Vec::new())]),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM as u32),
        std::env::consts::ARCH.try_into().unwrap(),
    );
    let program: BpfProgram = refused.unwrap().try_into().unwrap();
    apply_filter(&program).unwrap();
    panic!("the job does not start: {}", job(&mut Command::new(POSEIDON)).exec());
}

/// `command` is `poseidon`, and gets the arguments of a job of four ranks.
fn job(command: &mut Command) -> &mut Command {
    command.args(["launch", "-n", "4", "--", POSEIDON]).args(EXCHANGE.split(' '))
}

/// Runs it to its end, which has to be a good one. Returns what it said beside its results.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let [printed, said] = [&output.stdout, &output.stderr].map(|b| String::from_utf8_lossy(b));
    assert!(output.status.success(), "{printed}\n{said}");
    said.into_owned()
}
