//! Why a host does not take part, and what to do about it.

use super::protocol::{Greeting, PROTOCOL};
use crate::supervise::End;
use crate::terminal::printable;

/// How a host was called.
#[derive(Clone, Debug)]
pub(super) struct Called<'a> {
    /// The host's name.
    pub(super) host: &'a str,
    /// The program and its flags.
    pub(super) ssh: &'a [String],
    /// The `poseidon` that the user has named.
    pub(super) program: Option<&'a str>,
}

impl Called<'_> {
    /// ssh has ended before the host's `poseidon` said anything. `tail` is what it said on stderr.
    pub(super) fn ended(&self, end: End, tail: &[String]) -> String {
        let Self { host, program, .. } = self;
        let said = said(tail);
        let has = |words: &str| tail.iter().any(|line| line.contains(words));
        let by_hand = format!("{} {host} true", self.ssh.join(" "));
        let program = program.unwrap_or("poseidon");
        match end {
            End::Status(255) if has("resolve") => {
                format!(
                    "host {host} is not known{said}; check its name, or name it in ~/.ssh/config"
                )
            }
            End::Status(255) if has("Permission denied") || has("authentication failures") => {
                format!(
                    "host {host} refused the login{said}; '{by_hand}' must work without a password: \
                 'ssh-copy-id {host}' puts your key there"
                )
            }
            End::Status(255) if has("Host key verification failed") || has("IDENTIFICATION") => {
                format!(
                    "host {host} could not prove who it is{said}; log in once by hand, or put its key into \
                 ~/.ssh/known_hosts"
                )
            }
            End::Status(255) => format!(
                "host {host} cannot be reached{said}; see whether '{by_hand}' works, and whether \
                 sshd runs there"
            ),
            End::Status(126 | 127) => format!(
                "host {host} has no command '{program}'{said}; install poseidon {VERSION} there, or \
                 give its path with --remote-program"
            ),
            End::Status(2) if has("--as-host") => format!(
                "host {host} has a poseidon that does not know 'launch --as-host'{said}; install \
                 poseidon {VERSION} there"
            ),
            end => format!(
                "what was started on host {host} {end} before it said anything{said}; see whether \
                 '{by_hand}' works"
            ),
        }
    }

    /// The host's greeting is of another Poseidon, or all is well.
    pub(super) fn greeted(&self, greeting: &Greeting) -> Result<(), String> {
        let Greeting { protocol, version, program, .. } = greeting;
        if version == VERSION && *protocol == PROTOCOL {
            return Ok(());
        }
        let (host, version, program) = (self.host, printable(version), printable(program));
        Err(format!(
            "host {host} has poseidon {version} (protocol {protocol}, at {program}), and this is \
             poseidon {VERSION} (protocol {PROTOCOL}): install the same on every host, or give the path \
             of the right one with --remote-program"
        ))
    }
}

/// ": it said 'Permission denied'", or nothing.
pub(super) fn said(tail: &[String]) -> String {
    // The last lines are what people look for; banners come before them.
    let last = &tail[tail.len().saturating_sub(3)..];
    if last.is_empty() { String::new() } else { format!(" ({})", last.join("; ")) }
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_names_the_host_and_what_to_do() {
        let ssh = ["ssh".to_owned(), "-o".to_owned(), "BatchMode=yes".to_owned()];
        let called = Called { host: "gpu7", ssh: &ssh, program: None };
        for (status, line, words) in [
            (
                255,
                "ssh: Could not resolve hostname gpu7: Name or service not known",
                "check its name",
            ),
            (255, "me@gpu7: Permission denied (publickey).", "'ssh-copy-id gpu7'"),
            (255, "Host key verification failed.", "log in once by hand"),
            (255, "ssh: connect to host gpu7 port 22: Connection refused", "whether sshd runs"),
            (127, "sh: 1: exec: poseidon: not found", "--remote-program"),
            (2, "error: unexpected argument '--as-host' found", "does not know 'launch --as-host'"),
            (9, "something odd", "'ssh -o BatchMode=yes gpu7 true'"),
        ] {
            let told = called.ended(End::Status(status), &[line.to_owned()]);
            assert!(told.contains("gpu7") && told.contains(words) && told.contains(line), "{told}");
        }
    }

    #[test]
    fn another_version_is_told_with_both() {
        let called = Called { host: "gpu7", ssh: &[], program: None };
        let greeting = |protocol, version: &str| Greeting {
            protocol,
            version: version.into(),
            program: "/opt/poseidon".into(),
            connection: None,
            free_port: 1,
        };
        assert_eq!(called.greeted(&greeting(PROTOCOL, VERSION)), Ok(()));
        for other in [greeting(PROTOCOL, "0.0.9\x1b[2J"), greeting(PROTOCOL + 1, VERSION)] {
            let words = called.greeted(&other).unwrap_err();
            assert!(words.contains("gpu7") && words.contains("/opt/poseidon"), "{words}");
            assert!(words.contains("install the same on every host"), "{words}");
            assert!(!words.contains('\x1b'), "{words}");
        }
    }
}
