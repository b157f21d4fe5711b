//! `poseidon lab`, the real command, in network namespaces. Where there can be none, every test says
//! so and passes.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn nodes_see_each_other_and_no_more_bytes_than_their_links_carry() {
    if !can_make_namespaces() {
        return;
    }
    let poseidon = env!("CARGO_BIN_EXE_poseidon");
    // Ports are not measured: what that takes would be counted.
    let size = ["--bytes", "2MB", "--iters", "2", "--link-rate", "unknown", "--json"];
    let exchange = [&["bench", "exchange", "--in-cluster"][..], &size].concat();
    let start = Instant::now();
    let run = lab(&["-n", "3", "--rate", "50mbit", "--bytes"], poseidon, &exchange);
    let seconds = start.elapsed().as_secs_f64();
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(run.stdout.contains(r#"[0] {"workers":3"#), "{run:?}");
    // Two thirds of the gradients to the others, and two thirds of the sums, in two iterations and
    // the three before them. TCP's headers are some more.
    let payload = 5.0 * 2.0 * (2.0 / 3.0) * f64::from(2 << 20);
    // The rate, and what may pass at once: a link that has been idle lets 128 KiB through.
    let carried = 50e6 / 8.0 * seconds + 131_072.0;
    let mut ranks = BTreeSet::new();
    for line in run.stdout.lines().filter(|line| !line.starts_with('[')) {
        let numbers: Vec<f64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
        let [rank, sent, received] = numbers[..] else { panic!("{line}") };
        ranks.insert(rank as u16);
        for bytes in [sent, received] {
            assert!(bytes > payload && bytes < 1.2 * payload, "{bytes} of {payload}: {run:?}");
            assert!(bytes < carried, "{bytes} bytes in {seconds} s: {run:?}");
        }
    }
    assert_eq!(ranks, BTreeSet::from([0, 1, 2]));
}

/// All of it: the coordinator, ports that are measured, lanes.
#[test]
fn nodes_encrypt_if_the_lab_says_so() {
    if !can_make_namespaces() {
        return;
    }
    let script = "echo encrypt=$POSEIDON_ENCRYPT; \
                  exec $0 bench exchange --in-cluster --bytes 2MB --iters 2 --lanes 2 --json";
    let poseidon = env!("CARGO_BIN_EXE_poseidon");
    let options = ["-n", "2", "--ranks", "2", "--rate", "1gbit", "--encrypt"];
    let run = lab(&options, "sh", &["-c", script, poseidon]);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(run.stdout.contains(r#"[0] {"workers":4"#), "{run:?}");
    assert_eq!(run.stdout.matches("encrypt=1").count(), 4, "{run:?}");
}

/// Nobody has told the nodes what their ports carry. The shards of four nodes are on three of them.
#[test]
fn a_slow_port_is_measured_and_holds_no_shard() {
    if !can_make_namespaces() {
        return;
    }
    let script = "if [ $RANK = 2 ]; then \
                    tc qdisc replace dev eth0 root tbf rate 100mbit burst 128kb limit 2mb || exit 9; \
                  fi; \
                  exec $0 bench exchange --in-cluster --bytes 2MB --iters 2 --json";
    let poseidon = env!("CARGO_BIN_EXE_poseidon");
    let run = lab(&["-n", "4", "--rate", "1gbit"], "sh", &["-c", script, poseidon]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let told = run.stderr.lines().find(|line| line.contains("ports differ"));
    let told = told.unwrap_or_else(|| panic!("{run:?}"));
    assert!(
        told.contains("worker 2 carries ") && told.contains(" Mbit/s and holds 0.0%"),
        "{told}"
    );
    // One lane is enough for such ports.
    assert!(run.stdout.contains(r#""lanes":1,"#), "{run:?}");
}

#[test]
fn every_node_is_told_who_it_is_and_has_one_link() {
    if !can_make_namespaces() {
        return;
    }
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $MASTER_PORT ${#POSEIDON_SECRET} \
                  $(grep -c eth0: /proc/net/dev) ${OMP_NUM_THREADS:-unset}";
    let run = lab(&["--nodes", "2"], "sh", &["-c", script]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let mut lines: Vec<_> = run.stdout.lines().collect();
    lines.sort_unstable();
    let threads = (thread::available_parallelism().unwrap().get() / 2).max(1);
    let expected = [0, 1].map(|rank| format!("[{rank}] {rank} 2 0 10.77.0.1 29500 64 1 {threads}"));
    assert_eq!(lines, expected, "{run:?}");
    assert!(run.stderr.contains("OMP_NUM_THREADS is not set, each worker gets"), "{run:?}");
    assert!(run.stderr.contains("each node sent"), "{run:?}");
}

/// One stream leaves a host: what its ranks contribute is added up inside it.
#[test]
fn ranks_of_a_node_share_its_link_and_what_leaves_it_does_not_grow_with_them() {
    if !can_make_namespaces() {
        return;
    }
    let poseidon = env!("CARGO_BIN_EXE_poseidon");
    let script = "echo rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE; \
                  exec $0 bench exchange --in-cluster --bytes 2MB --iters 2 --link-rate unknown --json";
    let flags = ["-n", "2", "--ranks", "3,1", "--rate", "200mbit", "--bytes"];
    let run = lab(&flags, "sh", &["-c", script, poseidon]);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(run.stdout.contains(r#"[0] {"workers":4"#), "{run:?}");
    let told: BTreeSet<_> = run.stdout.lines().filter(|line| line.contains("rank ")).collect();
    let expected = [
        "[0] rank 0 of 4, 0 of 3",
        "[1] rank 1 of 4, 1 of 3",
        "[2] rank 2 of 4, 2 of 3",
        "[3] rank 3 of 4, 0 of 1",
    ];
    assert_eq!(told, BTreeSet::from(expected), "{run:?}");
    let counts = run.stdout.lines().filter(|line| !line.starts_with('['));
    let sent: Vec<f64> =
        counts.map(|line| line.split(' ').nth(1).unwrap().parse().unwrap()).collect();
    // Of every chunk, one contribution crosses the links one way and one result the other way, in
    // two iterations and the three before them. Without sums inside the node it would be half as
    // much again.
    let payload = 5.0 * f64::from(2 << 20);
    assert_eq!(sent.len(), 2, "{run:?}");
    assert!(sent.iter().all(|sent| *sent < 1.2 * payload), "{sent:?} of {payload}: {run:?}");
}

#[test]
fn links_are_as_long_and_as_bad_as_asked_for_and_sums_are_right() {
    if !can_make_namespaces() || !can_make_taps() {
        return;
    }
    let poseidon = env!("CARGO_BIN_EXE_poseidon");
    let exchange =
        ["bench", "exchange", "--in-cluster", "--bytes", "1MB", "--iters", "2", "--json"];
    let flags = ["-n", "3", "--rate", "200mbit", "--delay", "5ms", "--queue", "256kb", "--bytes"];
    let faults = ["--loss", "1%", "--corrupt", "1%", "--reorder", "1%", "--seed", "7"];
    // The exchange checks its sums. A damaged packet that got through would make a wrong one.
    let run = lab(&[&flags[..], &faults].concat(), poseidon, &exchange);
    assert_eq!(run.code, Some(0), "{run:?}");
    let report = run.stdout.lines().find_map(|line| line.strip_prefix("[0] {")).unwrap();
    let report: serde_json::Value = serde_json::from_str(&format!("{{{report}")).unwrap();
    // A gradient goes one way and its sum the other: no machine is faster than that.
    assert!(report["seconds"]["p10"].as_f64().unwrap() > 0.010, "{run:?}");

    let line = run.stderr.lines().find_map(|line| line.split_once("the switch carried "));
    let (_, line) = line.unwrap_or_else(|| panic!("{run:?}"));
    let numbers: Vec<f64> =
        line.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect();
    let [carried, lost, _overflowed, corrupted, ..] = numbers[..] else { panic!("{line}") };
    // In five iterations, 4/3 MB to each of three nodes, in packets of 1448 bytes.
    assert!(carried > 5.0 * 3.0 * 4.0 / 3.0 * 1_048_576.0 / 1448.0, "{line}");
    // One in a hundred of at least 14,000: five standard deviations either way.
    for chosen in [lost, corrupted] {
        assert!((0.006..0.014).contains(&(chosen / carried)), "{line}");
    }
    let counted = run.stdout.lines().filter(|line| !line.starts_with('['));
    let received: f64 =
        counted.map(|line| line.split(' ').nth(2).unwrap().parse::<f64>().unwrap()).sum();
    assert!(received > 5.0 * 4.0 * 1_048_576.0, "{run:?}");
}

/// Its process lives, and nothing of it arrives: the error says what TCP knows.
#[test]
fn a_port_that_goes_dead_is_told_from_a_process_that_hangs() {
    if !can_make_namespaces() {
        return;
    }
    let script = "if [ $RANK = 1 ]; then (sleep 2; ip link set eth0 down) & fi; \
                  export POSEIDON_SILENCE=3; exec $0 bench exchange --in-cluster --bytes 2MB \
                  --iters 1000000 --link-rate unknown";
    let poseidon = env!("CARGO_BIN_EXE_poseidon");
    let run = lab(&["-n", "2", "--rate", "1gbit"], "sh", &["-c", script, poseidon]);
    assert_eq!(run.code, Some(1), "{run:?}");
    let facts = ["the last acknowledgement came", "is the network losing packets, or its host"];
    let told = |line: &str| facts.iter().all(|fact| line.contains(fact));
    assert!(run.stderr.lines().any(told), "{run:?}");
}

#[test]
fn the_first_failure_ends_the_lab_and_is_named() {
    if !can_make_namespaces() {
        return;
    }
    let script = "test $RANK != 1 || { echo no luck >&2; exit 7; }; exec sleep 600";
    let run = lab(&["-n", "3"], "sh", &["-c", script]);
    assert_eq!(run.code, Some(7), "{run:?}");
    assert!(run.stderr.contains("error: node 1 exited with status 7"), "{run:?}");
    assert!(run.stderr.contains("    no luck"), "{run:?}");
}

#[test]
fn a_killed_lab_leaves_nothing_behind() {
    if !can_make_namespaces() {
        return;
    }
    let before = entries(INTERFACES);
    let mut lab = Command::new(env!("CARGO_BIN_EXE_poseidon"));
    lab.args(["lab", "-n", "2", "--", "sh", "-c"]);
    lab.arg("echo $(readlink /proc/self/ns/net); exec sleep 600");
    let mut lab = lab.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(lab.stdout.take().unwrap()).lines().take(2);
    let nodes: BTreeSet<String> =
        lines.map(|line| line.unwrap().split(' ').next_back().unwrap().to_owned()).collect();
    let (mine, used) = (fs::read_link("/proc/self/ns/net").unwrap(), namespaces_in_use());
    assert_eq!(nodes.len(), 2, "{nodes:?}");
    assert!(nodes.iter().all(|node| used.contains(node)), "{nodes:?} of {used:?}");
    assert!(!nodes.contains(mine.to_str().unwrap()));

    lab.kill().unwrap();
    lab.wait().unwrap();
    let end = Instant::now() + PATIENCE;
    while namespaces_in_use().iter().any(|used| nodes.contains(used)) {
        assert!(Instant::now() < end, "somebody still lives in {nodes:?}");
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(entries(INTERFACES), before);
}

#[test]
fn users_need_no_root_where_they_may_have_namespaces() {
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let may = |words: &[&str]| succeeds("setpriv", &[&user[..], words].concat());
    if !can_make_namespaces() || !may(&[&["unshare"][..], &AS_USER, &LOOPBACK].concat()) {
        skipped("a user without root, and user namespaces for that user");
        return;
    }
    // Where the command was built, that user may have no business.
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let poseidon = folder.path().join("poseidon");
    fs::copy(env!("CARGO_BIN_EXE_poseidon"), &poseidon).unwrap();
    let mut command = Command::new("setpriv");
    command.args(user).arg(&poseidon).args(["lab", "-n", "2", "--bytes", "--"]);
    let exchange = ["bench", "exchange", "--in-cluster", "--bytes", "64KB", "--iters", "1"];
    let run = Run::of(command.arg(&poseidon).args(exchange).current_dir("/").output().unwrap());
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(run.stdout.contains("[0] workers         2"), "{run:?}");
}

#[test]
fn pretended_training_moves_the_bytes_the_simulator_predicts() {
    if !can_make_namespaces() {
        return;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_poseidon"));
    command.args(["bench", "scale", "--model", "cifar10-quick", "--nodes", "1,3", "--steps", "4"]);
    command.args(["--scheme", "ps,sfb", "--bandwidth", "1gbit", "--dilate", "10", "--json"]);
    let run = Run::of(command.output().unwrap());
    assert_eq!(run.code, Some(0), "{run:?}");
    let report: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let told: Vec<_> =
        rows.iter().map(|row| (row["nodes"].as_u64(), row["scheme"].as_str())).collect();
    let runs = [(1, "ps"), (3, "ps"), (1, "sfb"), (3, "sfb")];
    assert_eq!(told, runs.map(|(nodes, scheme)| (Some(nodes), Some(scheme))));
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row}"));
        assert!(number("bytes_deviation").abs() < 0.02, "{row}");
        assert_eq!(number("bytes_per_node") == 0.0, row["nodes"] == 1, "{row}");
    }
}

#[test]
fn what_no_cluster_has_is_refused() {
    let cases = [
        (["--nodes", "0", "--rate", "1gbit"], "0 is not in 1..=1000"),
        (["--nodes", "2000", "--rate", "1gbit"], "2000 is not in"),
        (["--nodes", "2", "--rate", "0gbit"], "no network has 0gbit"),
        (["--nodes", "2", "--rate", "fast"], "does not begin with a number"),
        (["--nodes", "2", "--delay", "soon"], "expected a time"),
        (["--nodes", "2", "--loss", "0.1"], "expected a percentage"),
        (["--nodes", "2", "--queue", "1kb"], "expected a size"),
        (["--nodes", "2", "--ranks", "1,0"], "0 is not in 1..=64"),
    ];
    for (flags, words) in cases {
        let run = lab(&flags, "true", &[]);
        assert_eq!(run.code, Some(2), "{run:?}");
        assert!(run.stderr.contains(words), "{words}: {run:?}");
    }
}

#[derive(Debug)]
struct Run {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Run {
    fn of(Output { status, stdout, stderr }: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Self { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
    }
}

fn lab(flags: &[&str], program: &str, args: &[&str]) -> Run {
    let mut command = Command::new(env!("CARGO_BIN_EXE_poseidon"));
    command.arg("lab").args(flags).arg("--").arg(program).args(args).env_remove("OMP_NUM_THREADS");
    Run::of(command.output().unwrap())
}

/// Asks others than the command under test.
fn can_make_namespaces() -> bool {
    let tools = succeeds("ip", &["-V"]) && succeeds("tc", &["-V"]);
    let unshare = unshare();
    let possible = tools && succeeds(unshare[0], &[&unshare[1..], &LOOPBACK].concat());
    if !possible {
        skipped("ip and tc (package iproute2), unshare (util-linux), and root or user namespaces");
    }
    possible
}

/// Where the lab's own switch gets its interfaces from.
fn can_make_taps() -> bool {
    let possible = fs::File::options().read(true).write(true).open("/dev/net/tun").is_ok();
    if !possible {
        skipped("/dev/net/tun, and the right to open it");
    }
    possible
}

/// How a shell would run something in a network of its own: as root, if that is possible.
fn unshare() -> Vec<&'static str> {
    let root = succeeds("unshare", &[&["--net"][..], &LOOPBACK].concat());
    if root { vec!["unshare", "--net"] } else { [&["unshare"][..], &AS_USER].concat() }
}

/// Past the test harness, which swallows what passing tests print.
fn skipped(needs: &str) {
    use std::io::Write;
    let name = thread::current().name().unwrap_or_default().to_owned();
    let _ = writeln!(std::io::stderr(), "SKIPPED {name}: NOT TESTED, it needs {needs}");
}

fn succeeds(program: &str, args: &[&str]) -> bool {
    let quiet = |command: &mut Command| {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()
    };
    quiet(Command::new(program).args(args)).is_ok_and(|status| status.success())
}

fn entries(folder: impl AsRef<Path>) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// The network namespaces of all processes.
fn namespaces_in_use() -> BTreeSet<String> {
    let links = entries("/proc").into_iter().map(|pid| format!("/proc/{pid}/ns/net"));
    let links = links.filter_map(|link| fs::read_link(link).ok());
    links.map(|link| link.to_string_lossy().into_owned()).collect()
}

const AS_USER: [&str; 3] = ["--user", "--map-root-user", "--net"];
const LOOPBACK: [&str; 5] = ["ip", "link", "set", "lo", "up"];
/// Of this machine.
const INTERFACES: &str = "/sys/class/net";
const PATIENCE: Duration = Duration::from_secs(60);
