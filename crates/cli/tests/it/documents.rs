//! Every command that a document shows is run, as it stands or with the replacement that its script
//! names. A command of a document that is in no script and on no list fails, and so does one here
//! that no document has any more.
//!
//! A script is a test. Lines of it that begin with `$ ` are documented commands, which have to end
//! well; `! ` has to end badly, `& ` goes on behind the lines that follow, and `> ` continues a
//! command. `with A => B` replaces A in the commands below it. Everything else is bash; what it may
//! use is in `documents_fixture`.

use crate::{documents_fixture, reader};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

macro_rules! scripts {
    ($($(#[$about:meta])* $name:ident: $script:literal)*) => {
        const SCRIPTS: &[&str] = &[$($script),*];
        $($(#[$about])* #[test] fn $name() { documents_fixture::run($script); })*
    };
}

scripts! {
    one_machine_trains: "
with poseidon train => poseidon train --epochs 1
$ poseidon train
says test accuracy
test -s poseidon-report/report.html || fail 'it left no report'
with train => train --model small.toml
$ poseidon train --workers 8 --drop-slowest 1
says test accuracy
$ poseidon train --bandwidth-budget 400mbit
says test accuracy
"

    two_machines_train_with_one_secret: "
needs openssl
with scp -p poseidon-secret 10.0.0.2: => cp -p poseidon-secret $HOME/
with poseidon train => poseidon train --model small.toml --compute 50ms --epochs 10000
$ install -m 600 /dev/null poseidon-secret && openssl rand -hex 32 > poseidon-secret
$ scp -p poseidon-secret 10.0.0.2:
$ export POSEIDON_SECRET_FILE=$PWD/poseidon-secret
& poseidon train --rank 1 --world 2 --coordinator 10.0.0.1:29600
second=$behind
& poseidon train --rank 0 --world 2 --coordinator 10.0.0.1:29600
first=$behind
says 1/10000
$ poseidon query plan --coordinator 10.0.0.1:29600
says fc1
$ poseidon query ports --coordinator 10.0.0.1:29600
says port
$ poseidon query tree --coordinator 10.0.0.1:29600
says 2 workers on 1 host
kill -TERM $first
wait $first || fail 'the first worker did not end well'
wait $second || fail 'the second worker did not end well'
"

    checkpoints_are_kept_and_looked_into: "
with poseidon train => $TRAIN --steps 30
with --every 500 => --every 5
with @1500 => @15
with --step 2000 => --step 20
$ poseidon train --checkpoint runs/a
rm -r runs/a
$ poseidon train --checkpoint runs/a --every 500 --keep 3
with --steps 30 => --steps 40
$ poseidon train --resume runs/a
says goes on after step 30
with @15 => @30
$ poseidon train --resume runs/a@1500 --checkpoint runs/b
says goes on after step 30
with --steps 40 => --steps 50
$ poseidon train --checkpoint runs/a --resume
says goes on after step 40
$TRAIN --steps 20 --checkpoint runs/vgg19
$ poseidon checkpoint ls runs/vgg19
says 20
$ poseidon checkpoint inspect runs/vgg19 --step 2000
says fc1
$ poseidon checkpoint verify runs/vgg19
$ poseidon checkpoint export runs/vgg19 exported/vgg19.safetensors
test -s exported/vgg19.safetensors || fail 'it wrote nothing'
"

    clusters_are_planned: "
$ poseidon plan --model vgg19 --workers 16 --batch 32 --bandwidth 10gbit --profile titan-x \
    --report plan.html
test -s plan.html || fail 'it wrote no report'
with --workers 16 --batch => --workers 4 --batch
$ poseidon plan --model alexnet --workers 16 --ranks-per-host 4 --racks 2 --oversubscription 4
says adding up inside racks pays
$ poseidon plan --model vgg19 --workers 16 --batch 32 --bandwidth 10gbit
says bottleneck
$ poseidon plan --model vgg19 --workers 8 --batch 32 --bandwidth 10gbit
says bottleneck
$ poseidon plan --model vgg19-22k --workers 16 --batch 32 --scheme ps --lanes 1 --json --network \
    paper-2017 --profile titan-x --bandwidth 40gbit --overlap none
$ poseidon plan --model vgg19-22k --workers 16 --batch 32 --scheme ps --lanes 1 --json --network \
    paper-2017 --profile titan-x --bandwidth 10gbit --overlap none
$ poseidon plan --model vgg19-22k --workers 16 --batch 32 --scheme ps --lanes 1 --json --network \
    paper-2017 --profile titan-x --bandwidth 40gbit --overlap backward
$ poseidon plan --model vgg19-22k --workers 16 --batch 32 --scheme ps --lanes 1 --json --network \
    paper-2017 --profile titan-x --bandwidth 10gbit --overlap backward
says speedup
"

    clusters_are_simulated: "
with --out figures => --out figures --only table1
with --iters 1000 => --iters 20
$ poseidon bench simulate --nodes 8 --bytes 10MB --compute 100ms --slow 3:2 --sync ssp:4
$ poseidon bench simulate --nodes 8 --rate 4gbit --bytes 233MB --compute 960ms --jitter \
    lognormal:0.2 --iters 1000 --sync ssp:1 --json
$ poseidon figures --out figures
"

    /// The variables are those that every launcher sets.
    programs_are_started: "
$ ./program
says test accuracy
$ poseidon launch -n 4 -- ./program
says test accuracy
$ poseidon launch -n 4 --servers 1 -- ./program
says test accuracy
$ poseidon launch -n 2 -- python mnist_cnn.py
says test accuracy
$ python mnist_cnn.py
says test accuracy
& RANK=0 WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=29500 ./program
RANK=1 WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=29500 ./program
says test accuracy
ends
$ poseidon launch -n 4 -- poseidon doctor
says Nothing is wrong.
$ poseidon bench exchange
"

    programs_are_started_by_mpirun: "
needs mpirun '(Open MPI)'
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_oob_tcp_if_include=lo PRTE_MCA_prte_if_include=lo
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
$ mpirun -n 4 ./program
says test accuracy
$ mpirun -n 2 python mnist_cnn.py
says test accuracy
"

    a_network_card_is_chosen: "
for card in eth0 eth1; do
  ip link add $card type veth peer name peer-of-$card
  ip addr add 10.1.${card#eth}.1/24 dev $card
  ip link set peer-of-$card up
  ip link set $card up
done
$ export POSEIDON_ADDRESS=eth1
poseidon launch -n 2 -- poseidon doctor &> $said
says eth1
$ export POSEIDON_ADDRESS=eth0,eth1
poseidon launch -n 2 -- poseidon doctor &> $said
says eth0
says eth1
"

    a_running_job_is_asked_and_told: "
export POSEIDON_SECRET='known to all of this job' TAKES='--compute 50ms --epochs 10000'
for rank in 0 1 2 3; do
  RANK=$rank WORLD_SIZE=4 MASTER_ADDR=node1 MASTER_PORT=29500 ./program > /dev/null 2>&1 &
done
unset POSEIDON_SECRET
until_ok poseidon query plan
$ poseidon query plan
says fc1
$ poseidon query ports
says port
$ poseidon query tree
says 4 workers on 1 host
export POSEIDON_SECRET='known to all of this job'
$ poseidon budget 200mbit --coordinator node1:29501
says nodes 0, 1, 2, 3: 200 Mbit/s
$ poseidon budget none --node 3 --coordinator node1:29501
says nodes 3: none
unset POSEIDON_SECRET
& poseidon dashboard :8080
until_ok page_is_shown
needs jq
$ poseidon query live | jq .steps_per_second
"

    jobs_have_a_page: "
export TAKES='--compute 50ms --epochs 10000'
with poseidon train => $TRAIN $TAKES
& poseidon launch -n 4 --dashboard :8080 -- python train.py
until_ok page_is_shown
kill $behind; wait $behind
& poseidon train --dashboard :8080
until_ok page_is_shown
"

    jobs_tell_what_they_did: "
$ POSEIDON_REPORT=seen poseidon launch -n 4 -- python train.py
test -s seen/job.html || fail 'there is no page'
rm seen/job.html
$ poseidon report seen
test -s seen/job.html || fail 'there is no page'
$ POSEIDON_TENSORBOARD=runs poseidon launch -n 4 -- python train.py
ls runs/rank3/* > $said || fail 'there are no scalars'
"

    clusters_are_made_inside_this_machine: "
needs tc '(iproute2)'
with -- poseidon train => -- $TRAIN --steps 5
with 10MB => 100KB --iters 2
$ poseidon lab --nodes 8 --rate 1gbit -- poseidon train
says test accuracy
$ poseidon lab --nodes 4 --ranks 4 --rate 1gbit -- poseidon bench exchange --in-cluster --bytes 10MB
(: <> /dev/net/tun) 2> $top/asked || lacks /dev/net/tun
$ poseidon lab --nodes 4 --rate 200mbit --delay 5ms --loss 0.1% --queue 256kb -- poseidon train
says test accuracy
"

    clusters_are_looked_at: "
needs tc '(iproute2)'
$ poseidon lab --nodes 4 --rate 1gbit -- poseidon doctor
says 3
! poseidon lab -n 4 -- sh -c '[ $RANK != 2 ] || ip link set dev eth0 mtu 1400; exec poseidon doctor'
says WRONG MTU
! poseidon lab -n 4 -- sh -c '[ $RANK != 1 ] || ip route add blackhole 10.77.0.4; exec poseidon \
    doctor'
says WRONG connection
"

    models_are_measured_at_scale: "
needs tc '(iproute2)'
with --nodes 2,4,8 => --nodes 2 --steps 3
with --scale-model 8 => --scale-model 64
with --dilate 50 => --dilate 2
$ poseidon bench scale --model vgg19 --nodes 2,4,8 --bandwidth 10gbit --dilate 50 --scale-model 8 \
    --scheme ps,auto
$ poseidon bench scale --model vgg19 --nodes 2,4,8 --bandwidth 10gbit --dilate 50 --scale-model 8
"

    racks_and_boxes_are_made: "
needs tc '(iproute2)'
needs sysctl '(procps)'
mount -t tmpfs none /run
with bench/ => $CHECKOUT/bench/
$ bench/vcluster.sh up 8 1gbit --racks 2 --core 1gbit
$ bench/vcluster.sh up 8 1gbit --racks 2 --core 1gbit --in-turn
$ bench/vcluster.sh up 8 1gbit --box 4
"
}

/// Commands that are run by another test: a file, and what it has if it has the test.
const ELSEWHERE: &[(&str, &str, &[&str])] = &[
    (".ci/run", "cargo xtask test --all", &["cargo xtask test"]),
    // The stage `examples` of `cargo xtask test` runs this line; what `train` does is shown above.
    (
        "crates/poseidon/examples/01-two-workers.rs",
        "//! Run: cargo run -q -p poseidon-cli -- launch",
        &["cargo run --release -- train"],
    ),
    // The stage `install` runs them with the profile of the tests. `pip install` of the folder makes the
    // same wheel as `pip wheel`, so the stage installs that one.
    (
        "xtask/src/install.rs",
        "pub(crate) fn stage()",
        &[
            "cargo install --locked --path crates/cli",
            "pip install bindings/python",
            "pip wheel --no-deps --wheel-dir wheels bindings/python",
            "pip install wheels/poseidon-*.whl",
        ],
    ),
    (
        "crates/cli/tests/it/slurm.rs",
        "fn srun_tells_tasks_who_they_are()",
        &[
            "srun --nodes 4 --ntasks-per-node 1 python train.py",
            "srun -n 4 ./program",
            "srun --ntasks-per-node 1 poseidon doctor --save cluster.json",
        ],
    ),
    (
        "crates/cli/tests/it/slurm.rs",
        "fn a_batch_job_goes_on_after_a_node_was_lost()",
        &["sbatch examples/slurm/train.sbatch"],
    ),
    (
        "crates/cli/tests/it/sshd.rs",
        "fn workers_on_two_names_exchange_over_ssh()",
        &["poseidon launch --hosts gpu1:4,gpu2:4 -- ./program"],
    ),
    (
        "crates/cli/tests/it/watching.rs",
        "fn top_answers_to_keys_and_to_its_terminal_and_leaves_it_as_it_was()",
        &["poseidon top"],
    ),
    (
        "bindings/python/tests/test_documents.py",
        "def test_torchrun_starts_what_the_documents_say(",
        &[
            "torchrun --no-python --nproc-per-node 4 ./program",
            "torchrun --nproc-per-node 2 mnist_cnn.py",
            "POSEIDON_BANDWIDTH_BUDGET=400mbit torchrun --no-python --nproc-per-node 4 ./program",
            "POSEIDON_METRICS=0.0.0.0:9400 torchrun --nproc-per-node 4 train.py",
            "POSEIDON_REPORT=seen torchrun --nproc-per-node 4 train.py",
        ],
    ),
    (
        "bindings/python/tests/test_documents.py",
        "def test_torchrun_joins_two_machines_as_the_documents_say(",
        &[
            "torchrun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 \
             train.py",
            "torchrun --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 \
             train.py",
        ],
    ),
    (
        "bindings/python/tests/test_report.py",
        "def test_tensorboard_reads_scalars(",
        &["tensorboard --logdir runs"],
    ),
];

/// Commands that no test runs, and why.
const NOT_RUN: &[(&str, &[&str])] = &[
    ("it changes a setting of the whole machine", &["sysctl -w net.core.rmem_max=4194304"]),
    (
        "it cross-compiles releases for other machines, which takes minutes",
        &["cargo xtask dist", "pip install target/wheels/poseidon-*_x86_64.whl"],
    ),
    (
        "it measures for minutes to hours, on a machine that does nothing else; a test of xtask \
         parses it",
        &[
            "PYTHONPATH=bindings/python/python xtask bench resume --only pytorch --device cuda \
             --python python3",
            "cargo xtask bench links --nodes 2,3,4,8,12,16,24,32 --sizes 1MB,10MB,100MB \
             --mbit 200,1000,10000 --queues 256kb,512kb,2mb --busy 0,1 \
             --what push,factors,all_reduce --minutes 600",
            "cargo xtask bench links --nodes 8 --sizes 100MB --mbit 1000 --queues 2mb --pairs 3",
            "cargo xtask bench hosts --hosts 1x16,4x1,4x4,2x8,3+1+4 --rate 1gbit,10gbit \
             --bytes 64KB,1MB,10MB,100MB",
            "cargo xtask bench hosts --hosts 4x4,2x8 --rate 1gbit --bytes 10MB",
        ],
    ),
];

#[test]
fn every_documented_command_is_run_or_it_is_said_why_not() {
    let mut entered = BTreeSet::new();
    for command in SCRIPTS.iter().flat_map(|script| documents_fixture::commands(script)) {
        entered.insert(one_line(command));
    }
    for (file, test, commands) in ELSEWHERE {
        let text = fs::read_to_string(reader::root().join(file)).unwrap();
        assert!(text.contains(test), "{file} has no '{test}' any more, which runs {commands:?}");
        entered.extend(commands.iter().copied().map(one_line));
    }
    for (why, commands) in NOT_RUN {
        println!("not run, because {why}: {commands:#?}");
        entered.extend(commands.iter().copied().map(one_line));
    }
    let mut documented = BTreeMap::new();
    for path in reader::documents() {
        for (line, command) in reader::commands(&fs::read_to_string(&path).unwrap()) {
            let at = format!("{}:{line}", path.strip_prefix(reader::root()).unwrap().display());
            documented.insert(one_line(&command), at);
        }
    }
    let missing: Vec<_> =
        documented.iter().filter(|(command, _)| !entered.contains(*command)).collect();
    assert!(missing.is_empty(), "no script and no list of this file has these: {missing:#?}");
    let gone: Vec<_> =
        entered.iter().filter(|&command| !documented.contains_key(command)).collect();
    assert!(gone.is_empty(), "no document has these any more: {gone:#?}");
}

/// A command without its comment, and with one space between its words.
fn one_line(command: &str) -> String {
    let words = command.split(" # ").next().unwrap_or_default();
    words.split_whitespace().collect::<Vec<_>>().join(" ")
}
