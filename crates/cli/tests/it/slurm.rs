//! Jobs under a real Slurm on this machine: a controller and two nodes, one of which can be lost.
//! Where Slurm is not installed, every test says so and passes.

use crate::hosts_fixture::{POSEIDON, eventually_within, skipped, succeeds};
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use tempfile::TempDir;

#[test]
fn srun_tells_tasks_who_they_are() {
    let Some(slurm) = Slurm::start() else { return };
    let exchange =
        ["bench", "exchange", "--in-cluster", "--bytes", "1MB", "--iters", "2", "--json"];
    let mut srun = slurm.tool("srun");
    srun.args(["--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1", POSEIDON])
        .args(exchange);
    // The nodes' names are not in any DNS.
    srun.env("MASTER_ADDR", "127.0.0.1").env("POSEIDON_SECRET", SECRET);
    let output = srun.output().unwrap();
    assert!(output.status.success(), "{output:?} {}", slurm.logs());
    assert!(text(&output).contains(r#"{"workers":4"#), "{output:?}");

    // Doctor finds the other tasks in the same way.
    let mut srun = slurm.tool("srun");
    srun.args(["--nodes=2", "--ntasks-per-node=1", POSEIDON, "doctor"]);
    srun.env("MASTER_ADDR", "127.0.0.1").env("POSEIDON_SECRET", SECRET);
    let output = srun.output().unwrap();
    assert!(output.status.success(), "{output:?} {}", slurm.logs());
    for words in ["worker 1", "What is carried", "Nothing is wrong."] {
        assert!(text(&output).contains(words), "{words}: {output:?}");
    }
}

/// The batch script of the examples saves its state, notices that a node is lost, goes back to the
/// queue and goes on.
#[test]
fn a_batch_job_goes_on_after_a_node_was_lost() {
    let Some(mut slurm) = Slurm::start() else { return };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/slurm/train.sbatch");
    let mut sbatch = slurm.tool("sbatch");
    sbatch.args(["--parsable", "--output=job.out"]).arg(script);
    // Steps that pretend to take long, so that the job can be disturbed.
    sbatch.args(["--epochs", "3", "--compute", "100ms"]);
    sbatch
        .env("MASTER_ADDR", "127.0.0.1")
        .env("POSEIDON", POSEIDON)
        .env("RUN_FOLDER", slurm.at("run"));
    let output = sbatch.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let job = text(&output).trim().to_owned();

    let file = slurm.at("job.out");
    let printed = || fs::read_to_string(&file).unwrap_or_default();
    let saved = || succeeds(POSEIDON, &["checkpoint", "inspect", &slurm.at("run/checkpoints")]);
    eventually_within(LONG, "a checkpoint", saved);
    slurm.lose_node();
    let state = |slurm: &Slurm| {
        let output = slurm.tool("scontrol").args(["show", "job", &job]).output().unwrap();
        text(&output)
    };
    eventually_within(LONG, "the job is back in the queue", || {
        state(&slurm).contains("Restarts=1")
    });
    slurm.start_node(1);
    eventually_within(LONG, "the job is done", || {
        let state = state(&slurm);
        assert!(!state.contains("JobState=FAILED"), "{state} {}", printed());
        // Slurm lets a job that comes back wait for two minutes. This cannot hurt one that runs.
        let now = [format!("jobid={job}"), "starttime=now".to_owned()];
        let _ = slurm.tool("scontrol").arg("update").args(now).output();
        state.contains("JobState=COMPLETED")
    });
    let printed = printed();
    assert!(printed.contains("lost worker"), "{printed}");
    assert!(printed.contains("goes on after step"), "{printed}");
    assert!(Path::new(&slurm.at("run/report/report.html")).is_file(), "{printed}");
}

/// A controller and two nodes, n0 and n1.
struct Slurm {
    folder: TempDir,
    munged: Option<Child>,
    controller: Option<Child>,
    nodes: [Option<Child>; 2],
}

impl Slurm {
    fn start() -> Option<Self> {
        let tools = ["slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo", "munged"];
        // Most of them do not even tell their version without settings.
        let there = |tool: &&str| succeeds("sh", &["-c", &format!("command -v {tool}")]);
        let there = tools.iter().all(there);
        let root = rustix::process::getuid().is_root();
        // A node that is lost takes its processes with it: they are in a process namespace.
        let namespaces = succeeds("unshare", &["--pid", "--fork", "--kill-child", "true"]);
        if !there || !root || !namespaces {
            skipped("Slurm (packages slurm-wlm and munge), unshare, and root");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        // munged trusts no folder that others can write to.
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        let mut slurm = Self { folder, munged: None, controller: None, nodes: [None, None] };
        fs::write(slurm.at("munge.key"), [7; 64]).unwrap();
        fs::set_permissions(slurm.at("munge.key"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::create_dir(slurm.at("state")).unwrap();
        fs::write(slurm.at("slurm.conf"), slurm.settings()).unwrap();
        let file = |flag: &str, name: &str| format!("--{flag}={}", slurm.at(name));
        let mut munged = Command::new("munged");
        munged.args(["--foreground", "--force"]).args([
            file("key-file", "munge.key"),
            file("socket", "munge.sock"),
            file("pid-file", "munge.pid"),
            file("seed-file", "munge.seed"),
            file("log-file", "munge.log"),
        ]);
        slurm.munged = Some(slurm.spawn(munged, "munged"));
        eventually_within(LONG, "munged listens", || Path::new(&slurm.at("munge.sock")).exists());
        let mut controller = slurm.tool("slurmctld");
        controller.args(["-D", "-i"]);
        slurm.controller = Some(slurm.spawn(controller, "slurmctld"));
        slurm.start_node(0);
        slurm.start_node(1);
        eventually_within(LONG, "both nodes are idle", || {
            let output = slurm.tool("sinfo").args(["-h", "-t", "idle", "-o", "%D"]).output();
            output.is_ok_and(|output| text(&output).trim() == "2")
        });
        Some(slurm)
    }

    fn settings(&self) -> String {
        let ports: Vec<_> = (0..3).map(|_| TcpListener::bind(("127.0.0.1", 0)).unwrap()).collect();
        let port = |i: usize| ports[i].local_addr().unwrap().port();
        let name = rustix::system::uname();
        let (host, at) = (name.nodename().to_str().unwrap(), |name| self.at(name));
        format!(
            "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={}\nFirstJobId={}\n\
             AuthType=auth/munge\nAuthInfo=socket={}\nCredType=cred/munge\n\
             SlurmUser=root\nSlurmdUser=root\nStateSaveLocation={}\nSlurmdSpoolDir={}\n\
             SlurmctldPidFile={}\nSlurmdPidFile={}\nSlurmctldLogFile={}\nSlurmdLogFile={}\n\
             ProctrackType=proctrack/pgid\nTaskPlugin=task/none\nMpiDefault=none\n\
             ReturnToService=2\nSlurmdTimeout=10\nKillWait=2\nSlurmdParameters=config_overrides\n\
             SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\n\
             JobAcctGatherType=jobacct_gather/none\nAccountingStorageType=accounting_storage/none\n\
             NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={} CPUs=2\n\
             NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={} CPUs=2\n\
             PartitionName=all Nodes=n0,n1 Default=YES MaxTime=10 State=UP\n",
            port(0),
            // A coordinator's port follows from the job's number, and two controllers are on one machine.
            port(0),
            at("munge.sock"),
            at("state"),
            at("spool-%n"),
            at("slurmctld.pid"),
            at("slurmd-%n.pid"),
            at("slurmctld.log"),
            at("slurmd-%n.log"),
            port(1),
            port(2)
        )
    }

    /// Everything on node 1 ends at once, as when its machine loses power.
    fn lose_node(&mut self) {
        end(&mut self.nodes[1]);
    }

    fn start_node(&mut self, number: usize) {
        let name = format!("n{number}");
        // Only the node that gets lost: Slurm finds no end of steps in a namespace that goes on.
        let mut node = match number {
            0 => self.tool("slurmd"),
            _ => {
                let mut node = self.tool("unshare");
                node.args(["--pid", "--fork", "--kill-child", "--mount-proc", "slurmd"]);
                node
            }
        };
        node.args(["-D", "-N", &name]);
        self.nodes[number] = Some(self.spawn(node, &name));
    }

    fn spawn(&self, mut command: Command, name: &str) -> Child {
        let log = fs::File::options().create(true).append(true).open(self.at(name)).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        command.spawn().unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    fn tool(&self, name: &str) -> Command {
        let mut command = Command::new(name);
        command.env("SLURM_CONF", self.at("slurm.conf")).current_dir(&self.folder);
        for (name, _) in std::env::vars_os() {
            let own = name.to_string_lossy();
            if own.starts_with("POSEIDON_") || ["RANK", "WORLD_SIZE"].contains(&own.as_ref()) {
                command.env_remove(&name);
            }
        }
        command
    }

    fn at(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn logs(&self) -> String {
        let logs = ["slurmctld.log", "slurmd-n0.log", "slurmd-n1.log", "job.out"];
        logs.map(|log| fs::read_to_string(PathBuf::from(self.at(log))).unwrap_or_default()).concat()
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        self.nodes.iter_mut().for_each(end);
        end(&mut self.controller);
        end(&mut self.munged);
    }
}

fn end(process: &mut Option<Child>) {
    if let Some(mut process) = process.take() {
        let _ = process.kill();
        let _ = process.wait();
    }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Slurm takes half a minute to give up a node.
const LONG: Duration = Duration::from_secs(240);
const SECRET: &str = "0123456789abcdef0123456789abcdef";
