//! Lets no child outlive the launcher, not even when the launcher is SIGKILLed and can do nothing.

use std::process::Command;

/// Has the kernel kill what `command` starts when the thread that starts it ends.
///
/// The *thread*: spawn from one that stays until the child is over. Only Linux offers this;
/// elsewhere a killed launcher leaves its children to notice it themselves.
#[cfg(target_os = "linux")]
pub(crate) fn end_with_launcher(command: &mut Command) {
    use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
    use std::os::unix::process::CommandExt;

    let launcher = getpid();
    let in_child = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // A launcher that died before the line above will not be noticed by it.
        if getppid() != Some(launcher) {
            return Err(rustix::io::Errno::SRCH.into());
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe things may happen. The closure makes
    // two plain system calls, owns nothing but a pid, allocates nothing and takes no lock: an
    // `io::Error` made from an errno is a plain number.
    unsafe { command.pre_exec(in_child) };
}

/// Does nothing: this system has no way to ask for it.
#[cfg(not(target_os = "linux"))]
pub(crate) fn end_with_launcher(_command: &mut Command) {}
