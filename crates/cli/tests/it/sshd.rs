//! `poseidon launch --hosts` over a real sshd of this machine, with keys of its own. Where OpenSSH
//! is not installed, every test says so and passes.

use crate::hosts_fixture::{
    Launcher, POSEIDON, TELL_PIDS, eventually, is_over, kill_the_launcher, last_number, skipped,
    succeeds,
};
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

#[test]
fn a_job_runs_over_ssh_and_its_secret_stays_hidden() {
    let Some(sshd) = Sshd::start() else { return };
    // The shell looks by itself: a program would have what it looks for on its own command line.
    let script = "echo $RANK $LOCAL_RANK ${#POSEIDON_SECRET} $MASTER_ADDR \
                  ${POSEIDON_COORDINATOR%:*}; \
                  for file in /proc/[0-9]*/cmdline; do \
                    case \"$(tr '\\0' ' ' < $file 2> /dev/null)\" in \
                      *\"$POSEIDON_SECRET\"*) echo seen in $file;; esac; \
                  done 2> /dev/null; true";
    let run = Launcher::start(sshd.launch(&["--hosts", "localhost:2,127.0.0.1"], script)).finish();
    assert_eq!(run.status.code(), Some(0), "{run:?}");
    // Both names are this machine's loopback, from which ssh comes.
    let expected = ["[0] 0 0 64", "[1] 1 1 64", "[2] 2 0 64"];
    let ends = |ip: &str| expected.map(|line| format!("{line} {ip} {ip}"));
    let lines = run.sorted_stdout();
    assert!(lines == ends("127.0.0.1") || lines == ends("::1"), "{run:?}");
    assert!(run.stderr.contains("ssh reaches localhost from there"), "{}", run.stderr);
}

#[test]
fn workers_on_two_names_exchange_over_ssh() {
    let Some(sshd) = Sshd::start() else { return };
    let mut command = sshd.command(&["--hosts", "localhost:2,127.0.0.1"]);
    let exchange =
        ["bench", "exchange", "--in-cluster", "--bytes", "1MB", "--iters", "2", "--json"];
    command.arg(POSEIDON).args(exchange);
    let run = Launcher::start(command).finish();
    assert_eq!(run.status.code(), Some(0), "{run:?}");
    assert!(run.stdout.contains(r#"[0] {"workers":3"#), "{run:?}");
}

#[test]
fn a_failure_on_one_host_ends_the_other() {
    let Some(sshd) = Sshd::start() else { return };
    let script = "echo pid $$; [ $RANK = 1 ] && exit 5; exec sleep 600";
    let run = Launcher::start(sshd.launch(&["--hosts", "localhost,127.0.0.1"], script)).finish();
    assert_eq!(run.status.code(), Some(5), "{run:?}");
    let words = "error: worker 1 on 127.0.0.1 exited with status 5";
    assert!(run.stderr.contains(words), "{}", run.stderr);
    for line in run.stdout.lines() {
        let pid = last_number(line);
        eventually("workers are over", || is_over(pid));
    }
}

/// sshd sends nothing to what it has started when its client is gone: the host's side notices by
/// itself.
#[test]
fn nothing_is_left_when_the_launcher_is_killed() {
    let Some(sshd) = Sshd::start() else { return };
    kill_the_launcher(sshd.launch(&["--hosts", "localhost,127.0.0.1"], TELL_PIDS));
}

#[test]
fn refusals_of_the_real_ssh_are_understood() {
    let Some(sshd) = Sshd::start() else { return };
    let refusals = [
        ("nosuchhost.invalid", "", "host nosuchhost.invalid is not known"),
        ("127.0.0.1", "-o IdentitiesOnly=yes -i stranger", "host 127.0.0.1 refused the login"),
        ("127.0.0.1", "-o UserKnownHostsFile=/dev/null", "host 127.0.0.1 could not prove"),
        ("127.0.0.1", "-p 1", "host 127.0.0.1 cannot be reached"),
    ];
    for (host, flags, words) in refusals {
        let flags = flags.replace("stranger", sshd.path("stranger").to_str().unwrap());
        let mut command = Command::new(POSEIDON);
        // ssh takes the first value it is given.
        let ssh = sshd.ssh(&flags);
        command.args(["launch", "--ssh", &ssh, "--hosts", host, "--", "true"]);
        let run = Launcher::start(command).finish();
        assert_eq!(run.status.code(), Some(1), "{run:?}");
        assert!(run.stderr.contains(words), "{words}: {}", run.stderr);
    }
}

/// An sshd on a free port of loopback, which ends with this.
struct Sshd {
    folder: TempDir,
    port: u16,
    daemon: Child,
}

impl Sshd {
    fn start() -> Option<Self> {
        let Some(program) = find_sshd() else {
            skipped("sshd, ssh and ssh-keygen (packages openssh-server and openssh-client)");
            return None;
        };
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        for key in ["host", "user", "stranger"] {
            let flags = ["-q", "-t", "ed25519", "-N", "", "-f"];
            assert!(succeeds("ssh-keygen", &[&flags[..], &[&at(key)]].concat()));
        }
        fs::copy(at("user.pub"), at("authorized")).unwrap();
        // As root, sshd wants a folder for its unprivileged part.
        let _ = fs::create_dir_all("/run/sshd");
        let free = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let settings = format!(
            "ListenAddress 127.0.0.1\nPort {port}\nHostKey {}\nAuthorizedKeysFile {}\n\
             StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n\
             PasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxStartups 100\n",
            at("host"),
            at("authorized")
        );
        fs::write(at("settings"), settings).unwrap();
        let host_key = fs::read_to_string(at("host.pub")).unwrap();
        let known: String =
            ["localhost", "127.0.0.1"].map(|name| format!("[{name}]:{port} {host_key}")).concat();
        fs::write(at("known"), known).unwrap();
        let daemon = Command::new(program)
            .args(["-D", "-e", "-f", &at("settings")])
            .stdin(Stdio::null())
            .stderr(fs::File::create(at("log")).unwrap())
            .spawn()
            .unwrap();
        let mut sshd = Self { folder, port, daemon };
        eventually("sshd listens", || {
            let ended = sshd.daemon.try_wait().unwrap();
            let log = || fs::read_to_string(sshd.path("log"));
            assert!(ended.is_none(), "sshd has ended: {:?}", log());
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        Some(sshd)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// ssh with `flags`, which win, and what it takes to reach this sshd.
    fn ssh(&self, flags: &str) -> String {
        let (known, key) = (self.path("known"), self.path("user"));
        let key =
            if flags.contains(" -i ") { String::new() } else { format!("-i {}", key.display()) };
        format!(
            "ssh -F none {flags} -o BatchMode=yes -o StrictHostKeyChecking=yes \
             -o AddressFamily=inet -o GlobalKnownHostsFile=none -o UserKnownHostsFile={} \
             -o IdentitiesOnly=yes {key} -p {}",
            known.display(),
            self.port
        )
    }

    fn command(&self, options: &[&str]) -> Command {
        let mut command = Command::new(POSEIDON);
        command.args(["launch", "--ssh", &self.ssh("")]).args(options).arg("--");
        command
    }

    fn launch(&self, options: &[&str], script: &str) -> Command {
        let mut command = self.command(options);
        command.args(["sh", "-c", script]);
        command
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// sshd is run by its whole path, and is often not on users'.
fn find_sshd() -> Option<PathBuf> {
    let places = ["/usr/sbin/sshd", "/usr/bin/sshd", "/usr/local/sbin/sshd"];
    let found = places.map(Path::new).into_iter().find(|path| path.is_file())?;
    let tools = ["ssh", "ssh-keygen"];
    let there = |tool: &&str| Command::new(tool).arg("-?").stderr(Stdio::null()).status().is_ok();
    tools.iter().all(there).then(|| found.to_owned())
}
