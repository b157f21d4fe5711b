//! Programs started by torchrun, Open MPI and Slurm find each other with nothing but the variables
//! those set, and a home folder.

use crate::cluster::{builder, job, step};
use poseidon::Config;
use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

type Variables = BTreeMap<String, String>;

fn variables(pairs: &[(&str, &str)]) -> Variables {
    pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

/// Not a test of its own: the program that is launched. Leaves what became of it in its home, and
/// does nothing when it has not been launched.
#[test]
fn a_worker_program() {
    if std::env::var_os("LAUNCHED").is_none() {
        return;
    }
    let work = || {
        let session = builder(Config::from_env()?, &job()).start()?;
        let workers = session.workers() as u16;
        for clock in 1..=5 {
            step(&session, clock, 0..workers)?;
        }
        let rank = session.rank();
        session.finish()?;
        Ok::<_, poseidon::Error>(format!("rank {rank} of {workers} is exact"))
    };
    let words = work().unwrap_or_else(|error| format!("failed: {error}"));
    let home = std::env::var_os("HOME").unwrap();
    let name = format!("process-{}", std::process::id());
    fs::write(Path::new(&home).join(name), words).unwrap();
}

/// Starts one process per set of variables, all at once, and returns what became of each.
fn launch(home: &Path, processes: &[Variables]) -> Vec<String> {
    let children: Vec<Child> = processes
        .iter()
        .map(|variables| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "launchers::a_worker_program"])
                .env_clear()
                .env("HOME", home)
                .env("LAUNCHED", "1")
                .envs(variables)
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    let deadline = Instant::now() + Duration::from_secs(90);
    let report = |mut child: Child| {
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > deadline {
                child.kill().unwrap();
                child.wait().unwrap();
                return "hangs".into();
            }
            thread::sleep(Duration::from_millis(10));
        }
        let file = home.join(format!("process-{}", child.id()));
        fs::read_to_string(file).unwrap_or_else(|_| "left without a word".into())
    };
    children.into_iter().map(report).collect()
}

/// Launches the processes in a fresh home and checks that every rank was exact and that they made
/// one secret, which is nobody else's to read.
fn check(processes: &[Variables]) {
    let home = tempfile::tempdir().unwrap();
    let expected: Vec<String> =
        (0..processes.len()).map(|r| format!("rank {r} of {} is exact", processes.len())).collect();
    assert_eq!(launch(home.path(), processes), expected);
    let folder = home.path().join(".config/poseidon");
    let files: Vec<_> = fs::read_dir(&folder).unwrap().map(|f| f.unwrap().file_name()).collect();
    assert_eq!(files, ["secret"], "attempts at a secret are left over");
    let mode = fs::metadata(folder.join("secret")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

/// What torchrun sets for each process, with a store of its own on `MASTER_PORT`.
fn torchrun(ranks: usize) -> (TcpListener, Vec<Variables>) {
    // Below the ports the system hands out by itself, so that the next one stays free.
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", port + 1)).is_ok();
    let start = 10_000 + (std::process::id() % 5_000) as u16;
    let bind = |port: u16| Some((port, TcpListener::bind(("127.0.0.1", port)).ok()?));
    let (port, store) = (start..20_000).step_by(2).filter(free).find_map(bind).unwrap();
    let process = |rank: usize| {
        let (rank, size, port) = (rank.to_string(), ranks.to_string(), port.to_string());
        variables(&[
            ("RANK", &rank),
            ("LOCAL_RANK", &rank),
            ("GROUP_RANK", "0"),
            ("ROLE_RANK", &rank),
            ("ROLE_NAME", "default"),
            ("WORLD_SIZE", &size),
            ("LOCAL_WORLD_SIZE", &size),
            ("GROUP_WORLD_SIZE", "1"),
            ("ROLE_WORLD_SIZE", &size),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_MAX_RESTARTS", "0"),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("OMP_NUM_THREADS", "1"),
        ])
    };
    (store, (0..ranks).map(process).collect())
}

#[test]
fn torchrun_with_three_ranks() {
    let (_store, processes) = torchrun(3);
    check(&processes);
}

/// Processes whose meeting point is derived from the job's name, with a name whose port is free.
fn with_a_free_port(processes: impl Fn(u32) -> Vec<Variables>) -> Vec<Variables> {
    let free = |processes: &Vec<Variables>| {
        let secret = ("POSEIDON_SECRET".to_string(), "known to all of us".to_string());
        let known: Variables = processes[0].clone().into_iter().chain([secret]).collect();
        let config = Config::from_variables(&|name| known.get(name).cloned()).unwrap();
        TcpListener::bind(config.coordinator).is_ok()
    };
    let start = std::process::id() * 8;
    (start..start + 8).map(processes).find(free).unwrap()
}

/// What mpirun 4.1 sets, less what is about its own plumbing.
#[test]
fn open_mpi_with_two_ranks_on_one_host() {
    check(&with_a_free_port(|job| {
        let process = |rank: u16| {
            let (rank, job) = (rank.to_string(), (job << 16 | 1).to_string());
            variables(&[
                ("OMPI_COMM_WORLD_RANK", &rank),
                ("OMPI_COMM_WORLD_LOCAL_RANK", &rank),
                ("OMPI_COMM_WORLD_NODE_RANK", &rank),
                ("OMPI_COMM_WORLD_SIZE", "2"),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
                ("OMPI_UNIVERSE_SIZE", "2"),
                ("OMPI_APP_CTX_NUM_PROCS", "2"),
                ("OMPI_FIRST_RANKS", "0"),
                ("OMPI_MCA_orte_num_nodes", "1"),
                ("OMPI_MCA_orte_hnp_uri", "2885681152.0;tcp://127.0.0.1:40123"),
                ("OMPI_MCA_ess_base_jobid", &job),
                ("OMPI_MCA_ess_base_vpid", &rank),
                ("PMIX_NAMESPACE", &job),
                ("PMIX_RANK", &rank),
            ])
        };
        (0..2).map(process).collect()
    }));
}

/// What srun sets for the tasks of a step.
#[test]
fn slurm_with_two_tasks_on_one_host() {
    check(&with_a_free_port(|job| {
        let process = |rank: u16| {
            let (rank, job) = (rank.to_string(), job.to_string());
            variables(&[
                ("SLURM_JOB_ID", &job),
                ("SLURM_JOBID", &job),
                ("SLURM_STEP_ID", "0"),
                ("SLURM_STEPID", "0"),
                ("SLURM_PROCID", &rank),
                ("SLURM_LOCALID", &rank),
                ("SLURM_NODEID", "0"),
                ("SLURM_NTASKS", "2"),
                ("SLURM_NPROCS", "2"),
                ("SLURM_STEP_NUM_TASKS", "2"),
                ("SLURM_STEP_NUM_NODES", "1"),
                ("SLURM_STEP_TASKS_PER_NODE", "2"),
                ("SLURM_STEP_NODELIST", "localhost"),
                ("SLURM_JOB_NODELIST", "localhost"),
                ("SLURM_NNODES", "1"),
            ])
        };
        (0..2).map(process).collect()
    }));
}

/// The process that serves the coordinator ends with an error like the others: its last words must
/// have reached them before.
#[test]
fn a_rank_that_is_never_started_is_named_by_every_process() {
    let (_store, mut processes) = torchrun(3);
    processes.remove(1);
    for process in &mut processes {
        process.insert("POSEIDON_CONNECT_TIMEOUT".into(), "2".into());
    }
    let home = tempfile::tempdir().unwrap();
    for words in launch(home.path(), &processes) {
        assert!(words.contains("worker 1 did not join within 2s"), "{words}");
    }
}
