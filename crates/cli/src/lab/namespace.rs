//! Network namespaces without names: the kernel takes them away with the last process that has them.

use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread;

/// A network of its own, in which programs can be started. It is gone when this and they are.
#[derive(Debug)]
pub(super) struct Namespace(OwnedFd);

/// Makes this process one that may have namespaces: root's may, others become root in a user
/// namespace. Must be called while the process has one thread.
///
/// Afterwards this thread is in a network namespace of its own, which reaches nobody.
pub(super) fn prepare() -> io::Result<()> {
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    match unshare(UnshareFlags::NEWNET) {
        Err(Errno::PERM) => {}
        other => return Ok(other?),
    }
    unshare(UnshareFlags::NEWUSER | UnshareFlags::NEWNET)?;
    // The kernel lets nobody map groups who could still give some up.
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("0 {} 1", user.as_raw()))?;
    fs::write("/proc/self/gid_map", format!("0 {} 1", group.as_raw()))
}

impl Namespace {
    /// An empty one.
    pub(super) fn new() -> io::Result<Self> {
        // Threads have namespaces, not processes: one that lives just long enough to make it.
        let made = thread::Builder::new().name("namespace".into()).spawn(|| {
            unshare(UnshareFlags::NEWNET)?;
            // The rate is the nodes' alone if nobody announces neighbours. Where there is no IPv6,
            // nobody does.
            for scope in ["all", "default"] {
                let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{scope}/disable_ipv6"), "1");
            }
            File::open("/proc/thread-self/ns/net").map(OwnedFd::from)
        })?;
        let made = made.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        made.map(Self)
    }

    /// Where another program finds it, for as long as this process has it.
    pub(super) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// Does `work` in here, on a thread that lives as long as the work.
    pub(super) fn within<T: Send>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send,
    ) -> io::Result<T> {
        let enter = || {
            move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network))?;
            work()
        };
        thread::scope(|scope| {
            let thread = thread::Builder::new().name("within".into()).spawn_scoped(scope, enter)?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Has `command` start in here.
    pub(super) fn host(&self, command: &mut Command) -> io::Result<()> {
        let namespace = self.0.try_clone()?;
        let enter = move || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(())
        };
        // SAFETY: between fork and exec only async-signal-safe things may happen. The closure makes
        // one plain system call on a descriptor it owns, allocates nothing and takes no lock: an
        // `io::Error` made from an errno is a plain number.
        unsafe { command.pre_exec(enter) };
        Ok(())
    }
}

fn unshare(flags: UnshareFlags) -> Result<(), Errno> {
    // SAFETY: what makes `unshare` unsafe is FILES, which leaves threads with descriptors that are
    // not theirs; it is never among the flags here.
    unsafe { unshare_unsafe(flags) }
}
