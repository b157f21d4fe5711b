//! A process that is forked from a worker has the worker's sessions in its memory, and none of its
//! threads. It must not act as the worker.

use poseidon::{Buffer, Config, Error, Layer, LayerKind, Secret, Session};
use serde_json::json;
use std::time::{Duration, Instant};

/// A job of one worker. With factors there is also a thread that rebuilds.
fn session() -> Session {
    let fc = Layer { kind: LayerKind::Fc { m: 8, n: 8 }, rows: Some(2), ..Layer::new("fc", 64) };
    let config = Config::alone(Secret::random().unwrap());
    Session::builder(config).layer(Layer::new("a", 10)).layer(fc).start().unwrap()
}

/// Runs `child` in a fork of this process and returns whether it said true in time.
fn in_a_fork(child: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `child` only, and leaves without running what is left for the end of a
    // process. glibc keeps its allocator usable in a child of a process with threads.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "no process could be forked");
    if pid == 0 {
        let said = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
        // SAFETY: ends this process at once.
        unsafe { libc::_exit(i32::from(!said)) };
    }
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut status = 0;
    loop {
        // SAFETY: `status` is an integer of ours, and the process is our child.
        match unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) } {
            0 if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            0 => {
                // SAFETY: our own child, which has not been waited for.
                unsafe { libc::kill(pid, libc::SIGKILL) };
                panic!("the child hangs");
            }
            _ => return libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
        }
    }
}

fn is_fork<T>(result: Result<T, Error>) -> bool {
    result.err().is_some_and(|error| {
        let (words, parent) = (error.to_string(), std::os::unix::process::parent_id());
        matches!(error, Error::Forked { owner } if owner == parent)
            && words.contains(&format!("belongs to process {parent}"))
    })
}

/// The parent's session works as if nothing had happened.
fn goes_on(session: Session) {
    let a = session.layer("a").unwrap();
    session.send(a, Buffer::from(vec![3.0; 10])).unwrap();
    assert_eq!(session.receive(a).unwrap().result.to_vec(), [3.0; 10]);
    session.finish().unwrap();
}

#[test]
fn calls_in_a_fork_are_errors() {
    let session = session();
    let a = session.layer("a").unwrap();
    assert!(in_a_fork(|| {
        is_fork(session.send(a, Buffer::from(vec![1.0; 10])))
            && is_fork(session.broadcast(a, Buffer::from(vec![1.0; 10])))
            && is_fork(session.receive(a))
            && is_fork(session.is_ready(a))
            && is_fork(session.gather("topic", &json!(1)))
            && is_fork(session.group("group"))
            && is_fork(session.sibling("sibling", |builder| builder))
            && is_fork(session.say_goodbye())
    }));
    goes_on(session);
}

/// What gives the session away, in a fork: it is gone there, and nowhere else.
#[test]
fn ends_in_a_fork_end_nothing() {
    type End = fn(Session) -> bool;
    let ends: [End; 4] = [
        |session| is_fork(session.finish()),
        |session| {
            session.abort("enough");
            true
        },
        |session| {
            session.cancel("enough");
            drop(session);
            true
        },
        |session| {
            drop(session);
            true
        },
    ];
    for end in ends {
        let mut kept = Some(session());
        assert!(in_a_fork(|| end(kept.take().unwrap())));
        goes_on(kept.unwrap());
    }
}
