//! `poseidon launch --hosts`, the real command. ssh is a script that runs what it is given on this
//! machine, in a session of its own, as sshd does. With OpenSSH installed there is a real sshd,
//! too.

use crate::hosts_fixture::{
    FakeSsh, Launcher, POSEIDON, TELL_PIDS, eventually, is_over, kill_the_launcher, last_number,
    skipped, succeeds,
};
use rustix::process::{Signal, kill_process_group};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;

#[test]
fn workers_of_all_hosts_are_told_who_they_are_and_their_lines_have_ranks() {
    let ssh = FakeSsh::new();
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR \
                  ${POSEIDON_COORDINATOR%:*} ${#POSEIDON_SECRET} $EXTRA $(pwd); echo err $RANK >&2";
    let folder = fs::canonicalize(ssh.folder()).unwrap();
    let mut command =
        ssh.launch(&["--hosts", "127.0.0.2:2,127.0.0.1", "--env", "EXTRA=x y"], script);
    command.current_dir(&folder);
    let run = Launcher::start(command).finish();
    assert_eq!(run.status.code(), Some(0), "{run:?}");
    let shown = folder.display();
    let expected = [
        format!("[0] 0 3 0 2 127.0.0.2 127.0.0.1 64 x y {shown}"),
        format!("[1] 1 3 1 2 127.0.0.2 127.0.0.1 64 x y {shown}"),
        format!("[2] 2 3 0 1 127.0.0.2 127.0.0.1 64 x y {shown}"),
    ];
    assert_eq!(run.sorted_stdout(), expected);
    let errors: BTreeSet<_> = run.stderr.lines().filter(|line| line.contains("] err ")).collect();
    assert_eq!(errors, BTreeSet::from(["[0] err 0", "[1] err 1", "[2] err 2"]));
    assert!(run.stderr.contains("the coordinator is at 127.0.0.1:"), "{}", run.stderr);
    assert_eq!(ssh.calls(), ["127.0.0.2", "127.0.0.1"].map(String::from).into());
}

/// The secret reaches workers, and nobody else can see it: neither ssh's arguments and environment
/// have it, nor those of what it starts.
#[test]
fn the_secret_is_on_no_command_line_and_in_no_environment_but_the_workers() {
    let ssh = FakeSsh::new();
    // The parent of a worker is the host's own poseidon.
    let script = "echo secret $POSEIDON_SECRET; \
                  tr '\\0' ' ' < /proc/$PPID/cmdline; echo; tr '\\0' '\\n' < /proc/$PPID/environ";
    let mut command = ssh.launch(&["--hosts", "127.0.0.2"], script);
    command.env("POSEIDON_SECRET", "the user's own secret, which stays here");
    let run = Launcher::start(command).finish();
    assert_eq!(run.status.code(), Some(0), "{run:?}");
    let secret = run.stdout.lines().find_map(|line| line.strip_prefix("[0] secret ")).unwrap();
    assert_eq!(secret.len(), 64);
    assert!(run.stdout.contains("launch --as-host"), "{}", run.stdout);
    assert_eq!(run.stdout.matches(secret).count(), 1, "{}", run.stdout);
    let seen = ssh.seen();
    assert!(seen.contains("launch --as-host") && seen.contains("PATH="), "{seen}");
    assert!(!seen.contains(secret), "ssh's arguments and environment: {seen}");
    for text in [&seen, &run.stdout] {
        assert!(!text.contains("which stays here"), "{text}");
    }
}

#[test]
fn a_worker_that_fails_is_named_with_its_host_and_ends_all_others() {
    let ssh = FakeSsh::new();
    let script = "echo pid $$; if [ $RANK = 2 ]; then echo cannot find the data >&2; exit 3; fi; \
                  trap 'echo asked to end; exit 0' TERM; while :; do sleep 0.05; done";
    let run = Launcher::start(ssh.launch(&["--hosts", "127.0.0.2:2,127.0.0.1"], script)).finish();
    assert_eq!(run.status.code(), Some(3), "{run:?}");
    let error = "error: worker 2 on 127.0.0.1 exited with status 3; its last lines on stderr:\n    \
                 cannot find the data\n";
    assert!(run.stderr.ends_with(error), "{}", run.stderr);
    for line in run.stdout.lines().filter(|line| line.contains("] pid ")) {
        let pid = last_number(line);
        eventually("workers are over", || is_over(pid));
    }
}

#[test]
fn a_worker_that_ignores_the_end_is_killed() {
    let ssh = FakeSsh::new();
    let script = "echo pid $$; [ $RANK = 1 ] && kill -9 $$; trap '' TERM; \
                  while :; do sleep 0.05; done";
    let run = Launcher::start(ssh.launch(&["--hosts", "127.0.0.2,127.0.0.1"], script)).finish();
    assert_eq!(run.status.code(), Some(128 + 9), "{run:?}");
    let named = "error: worker 1 on 127.0.0.1 was killed by signal 9 (SIGKILL)\n";
    assert!(run.stderr.ends_with(named), "{}", run.stderr);
    for line in run.stdout.lines() {
        let pid = last_number(line);
        eventually("workers are over", || is_over(pid));
    }
}

#[test]
fn a_ctrl_c_reaches_workers_of_all_hosts_and_the_second_one_kills() {
    let ssh = FakeSsh::new();
    let script =
        "n=0; trap 'n=$((n+1)); echo got $n' INT; echo ready; while :; do sleep 0.05; done";
    let mut launcher = Launcher::start(ssh.launch(&["--hosts", "127.0.0.2,127.0.0.1"], script));
    let lines = launcher.lines();
    lines.wait_for(2, "ready");
    // What a terminal does: the signal goes to the foreground process group.
    kill_process_group(launcher.pid(), Signal::INT).unwrap();
    lines.wait_for(2, "got 1");
    kill_process_group(launcher.pid(), Signal::INT).unwrap();
    let run = launcher.finish();
    assert_eq!(run.status.code(), Some(128 + 2), "{run:?}");
    assert_eq!(lines.rest(), Vec::<String>::new());
    assert!(run.stderr.ends_with("error: stopped by signal 2 (SIGINT)\n"), "{}", run.stderr);
}

#[test]
fn a_real_job_runs_with_workers_and_a_server_on_two_hosts() {
    let ssh = FakeSsh::new();
    let mut command = ssh.command(&["--hosts", "127.0.0.2:2,127.0.0.1:1", "--servers", "1"]);
    let size = ["--servers", "1", "--bytes", "1MB", "--iters", "2", "--json"];
    command.args([POSEIDON, "bench", "exchange", "--in-cluster"]).args(size);
    let run = Launcher::start(command).finish();
    assert_eq!(run.status.code(), Some(0), "{run:?}");
    assert!(run.stdout.contains(r#"[0] {"workers":3"#), "{run:?}");
}

#[test]
fn nothing_is_left_on_a_host_when_ssh_dies() {
    let ssh = FakeSsh::new();
    let script = "echo pid $$; exec sleep 600";
    let mut launcher = Launcher::start(ssh.launch(&["--hosts", "127.0.0.2,127.0.0.1"], script));
    let lines = launcher.lines();
    let workers: Vec<_> = lines.take(2).iter().map(|line| last_number(line)).collect();
    let dead = ssh.process_of("127.0.0.1");
    // The host's side is in another session and goes on, as it would on another machine.
    kill_process_group(dead, Signal::KILL).unwrap();
    let run = launcher.finish();
    assert_eq!(run.status.code(), Some(1), "{run:?}");
    assert!(run.stderr.contains("host 127.0.0.1"), "{}", run.stderr);
    assert!(run.stderr.contains("the connection to the launcher ended"), "{}", run.stderr);
    for pid in workers {
        eventually("the workers are over", || is_over(pid));
    }
}

#[test]
fn nothing_is_left_when_the_launcher_is_killed() {
    let ssh = FakeSsh::new();
    kill_the_launcher(ssh.launch(&["--hosts", "127.0.0.2,127.0.0.1"], TELL_PIDS));
}

#[test]
fn refusals_name_the_host_and_what_to_do() {
    let cases = [
        // What ssh says, its status, and what is to be read.
        ("ssh: Could not resolve hostname bad: Name or service not known", 255, "check its name"),
        ("me@bad: Permission denied (publickey,password).", 255, "'ssh-copy-id bad'"),
        ("Host key verification failed.", 255, "known_hosts"),
        ("sh: 1: exec: poseidon: not found", 127, "--remote-program"),
        ("error: unexpected argument '--as-host' found", 2, "does not know 'launch --as-host'"),
    ];
    for (words, status, advice) in cases {
        let ssh = FakeSsh::new();
        ssh.refuse("bad", &format!("echo \"{words}\" >&2; exit {status}"));
        let marker = ssh.folder().join("started");
        let script = format!("touch '{}'", marker.display());
        let run = Launcher::start(ssh.launch(&["--hosts", "127.0.0.2,bad"], &script)).finish();
        assert_eq!(run.status.code(), Some(1), "{run:?}");
        let error = run.stderr.split("error: ").last().unwrap_or_default();
        for part in ["bad", words, advice, "nothing was started"] {
            assert!(run.stderr.contains(part), "{part}: {error}");
        }
        assert!(!marker.exists(), "a worker was started");
    }
}

#[test]
fn another_version_on_a_host_is_told_with_both() {
    let ssh = FakeSsh::new();
    let greeting =
        r#"{"protocol":1,"version":"0.0.9","program":"/old","connection":null,"free_port":1}"#;
    ssh.refuse("old", &format!("echo; echo 'poseidon-host {greeting}'; cat > /dev/null"));
    let run = Launcher::start(ssh.launch(&["--hosts", "127.0.0.2,old"], "true")).finish();
    assert_eq!(run.status.code(), Some(1), "{run:?}");
    let own = env!("CARGO_PKG_VERSION");
    for part in ["host old has poseidon 0.0.9", own, "install the same on every host"] {
        assert!(run.stderr.contains(part), "{part}: {}", run.stderr);
    }
}

#[test]
fn what_a_host_lacks_is_told() {
    let ssh = FakeSsh::new();
    let mut command = ssh.command(&["--hosts", "127.0.0.2"]);
    command.arg("no-such-program");
    let run = Launcher::start(command).finish();
    assert_eq!(run.status.code(), Some(1), "{run:?}");
    let words = "cannot start worker 0 on 127.0.0.2: command 'no-such-program' not found";
    assert!(run.stderr.contains(words), "{}", run.stderr);

    let options = ["--hosts", "127.0.0.2", "--workdir", "/no/such/folder"];
    let run = Launcher::start(ssh.launch(&options, "true")).finish();
    assert_eq!(run.status.code(), Some(1), "{run:?}");
    for part in ["host 127.0.0.2: there is no folder /no/such/folder", "--workdir"] {
        assert!(run.stderr.contains(part), "{}", run.stderr);
    }

    let options = ["--hosts", "127.0.0.2", "--remote-program", "/no/poseidon"];
    let run = Launcher::start(ssh.launch(&options, "true")).finish();
    assert_eq!(run.status.code(), Some(1), "{run:?}");
    assert!(run.stderr.contains("host 127.0.0.2 has no command '/no/poseidon'"), "{}", run.stderr);

    let mut command = std::process::Command::new(POSEIDON);
    command.args(["launch", "--hosts", "a", "--ssh", "no-such-ssh", "--", "true"]);
    let run = Launcher::start(command).finish();
    assert_eq!(run.status.code(), Some(1), "{run:?}");
    assert!(run.stderr.contains("cannot run 'no-such-ssh'"), "{}", run.stderr);
}

#[test]
fn what_a_login_script_prints_does_no_harm() {
    let ssh = FakeSsh::new();
    ssh.greet("printf 'Welcome to this machine, '");
    let run = Launcher::start(ssh.launch(&["--hosts", "127.0.0.2"], "echo $RANK")).finish();
    assert_eq!(run.status.code(), Some(0), "{run:?}");
    assert_eq!(run.stdout, "[0] 0\n");
    assert!(run.stderr.contains("[127.0.0.2] Welcome to this machine,"), "{}", run.stderr);
}

#[test]
fn a_hostfile_names_the_hosts() {
    let ssh = FakeSsh::new();
    let file = ssh.folder().join("hosts.txt");
    fs::write(&file, "# two of them\n127.0.0.2 slots=2\n127.0.0.1\n").unwrap();
    let options = ["--hostfile", file.to_str().unwrap()];
    let run = Launcher::start(ssh.launch(&options, "echo $RANK of $WORLD_SIZE")).finish();
    assert_eq!(run.status.code(), Some(0), "{run:?}");
    assert_eq!(run.sorted_stdout(), ["[0] 0 of 3", "[1] 1 of 3", "[2] 2 of 3"]);
    let run = Launcher::start(ssh.launch(&["--hosts", "a,b,a"], "true")).finish();
    assert_eq!(run.status.code(), Some(1), "{run:?}");
    assert!(run.stderr.contains("host a is named twice"), "{}", run.stderr);
}

/// Two hosts with a network of their own each: the launcher and worker 0 are on one, worker 1 on
/// the other. The coordinator is where both can reach it.
#[test]
fn hosts_in_networks_of_their_own_meet_at_an_address_that_both_reach() {
    let tools = succeeds("ip", &["-V"]) && succeeds("tc", &["-V"]) && succeeds("nsenter", &["-V"]);
    if !tools || !succeeds("unshare", &["--net", "ip", "link", "set", "lo", "up"]) {
        return skipped("ip and tc (package iproute2), nsenter and unshare (util-linux), and root");
    }
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (pid, done) = (at("pid"), at("done"));
    let enter = format!(
        "#!/bin/sh\n[ $1 = 10.77.0.2 ] || exec sh -c \"$2\"\n\
         exec nsenter --net=/proc/$(cat {pid})/ns/net sh -c \"$2\"\n"
    );
    fs::write(at("ssh"), enter).unwrap();
    fs::set_permissions(at("ssh"), fs::Permissions::from_mode(0o755)).unwrap();
    let exchange = "\"$0\" bench exchange --in-cluster --bytes 1MB --iters 2 --json";
    let script = format!(
        "if [ $RANK = 1 ]; then echo $$ > {pid}.new; mv {pid}.new {pid}; \
           while [ ! -e {done} ]; do sleep 0.05; done; exit; fi; \
         while [ ! -e {pid} ]; do sleep 0.05; done; trap 'touch {done}' EXIT; \
         \"$0\" launch --hosts 10.77.0.1,10.77.0.2 --ssh {} -- {exchange}",
        at("ssh")
    );
    let mut command = std::process::Command::new(POSEIDON);
    command.args(["lab", "-n", "2", "--", "sh", "-c", &script, POSEIDON]);
    let run = Launcher::start(command).finish();
    assert_eq!(run.status.code(), Some(0), "{run:?}");
    assert!(run.stdout.contains(r#"[0] [0] {"workers":2"#), "{run:?}");
    let place = "the coordinator is at 10.77.0.1:";
    assert!(run.stderr.lines().any(|line| line.contains(place)), "{}", run.stderr);
    assert!(run.stderr.contains("on the route to 10.77.0."), "{}", run.stderr);
}
