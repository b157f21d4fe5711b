//! What a job shows of itself: `POSEIDON_REPORT`, and the page that `poseidon report` makes.

use crate::trial::{Trial, kill, variables};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::process::{Command, Output};

fn report(trial: &Trial, folder: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_poseidon"));
    command.args(["report", folder]).current_dir(trial.path("")).output().unwrap()
}

fn read(trial: &Trial, name: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(trial.path(name)).unwrap()).unwrap()
}

#[test]
fn a_job_that_is_asked_to_leaves_a_page_and_one_trace_of_all_its_processes() {
    let trial = Trial::with_small_net();
    let args =
        "--model small.toml --workers 2 --servers colocated+1 --batch 6 --steps 5 --test never";
    let run = trial.start_with(args, &variables(&[("POSEIDON_REPORT", "seen")])).finish();
    assert!(run.status.success(), "{run:?}");
    assert!(run.stderr.contains("seen/job.html"), "{run:?}");
    let page = fs::read_to_string(trial.path("seen/job.html")).unwrap();
    assert!(page.contains("2 workers took 5 steps"), "{page}");
    // The program of every worker is shown in every step, and the slowest first.
    for rank in 0..2 {
        for step in 1..=5 {
            assert!(page.contains(&format!(">step {step}, worker {rank} (waited ")), "{step}");
        }
    }
    assert_eq!(page.matches(" selected>").count(), 1);
    assert_eq!(page.matches("<div class=\"step\"").count(), 10);
    assert_eq!(page.matches("<div class=\"step\" data-step=\"").count(), 10);
    assert!(page.contains("server 0") && !page.contains(" failed: "));
    // The net says when it computes: nothing else is taken for it.
    for words in [": forward, ", ": backward, ", "between layers: waiting for the step before"] {
        assert!(page.contains(words), "'{words}' is not in: {page}");
    }
    assert!(!page.contains("the program's own: computing"), "{page}");

    // The layers of the net's own report are those of the page.
    let own = read(&trial, "report/report.json");
    for layer in own["layers"].as_array().unwrap() {
        let name = layer["name"].as_str().unwrap();
        assert!(page.contains(&format!("<td class=\"name\">{name}</td>")), "{name}");
    }
    let all = read(&trial, "seen/trace.json");
    let events = all["traceEvents"].as_array().unwrap();
    let processes: BTreeSet<_> =
        events.iter().map(|event| event["pid"].as_u64().unwrap()).collect();
    assert_eq!(processes, BTreeSet::from([0, 1, 2]));

    // Made again, it is the same.
    let again = report(&trial, "seen");
    assert!(again.status.success(), "{again:?}");
    assert_eq!(String::from_utf8_lossy(&again.stdout), "seen/job.html\nseen/trace.json\n");
    assert_eq!(fs::read_to_string(trial.path("seen/job.html")).unwrap(), page);
    assert_eq!(read(&trial, "seen/trace.json"), all);
    // Of one rank alone, the page says what is missing.
    fs::remove_file(trial.path("seen/trace.rank1.json")).unwrap();
    assert!(report(&trial, "seen").status.success());
    let page = fs::read_to_string(trial.path("seen/job.html")).unwrap();
    assert!(page.contains("1 worker are missing") || page.contains("(ranks 1)"), "{page}");
}

#[test]
fn a_job_whose_worker_dies_leaves_what_the_others_saw() {
    let trial = Trial::with_small_net();
    let args = "--model small.toml --workers 2 --batch 6 --steps 1000000 --test never";
    let mut running = trial.start_with(args, &variables(&[("POSEIDON_REPORT", "seen")]));
    running.wait_for("epoch");
    kill(trial.workers()[&1], Signal::KILL);
    let run = running.finish();
    assert!(!run.status.success(), "{run:?}");
    let left = read(&trial, "seen/trace.rank0.json");
    let failure = left["otherData"]["poseidon"]["failure"].as_str().unwrap();
    assert!(failure.contains("worker 1"), "{failure}");
    let page = fs::read_to_string(trial.path("seen/job.html")).unwrap();
    assert!(page.contains("worker 0 failed: "), "{page}");
}

/// As process groups of torch.distributed write them, beside a job's own traces or without any.
#[test]
fn process_groups_get_a_page_of_their_operations() {
    let trial = Trial::with_small_net();
    fs::create_dir_all(trial.path("seen/c10d")).unwrap();
    for rank in 0..2 {
        let about = json!({"poseidon": {
            "version": "0.1.0", "node": rank, "name": format!("worker {rank}"), "role": "worker",
            "host": "h", "workers": 2, "seconds": 2.5, "failure": null, "sessions": [],
            "link_bytes": [4000, 5000],
            "operations": [{"name": "all_reduce", "count": 3, "seconds": 0.006}],
        }});
        let trace = json!({"traceEvents": [], "otherData": about}).to_string();
        fs::write(trial.path(&format!("seen/c10d/trace.rank{rank}.json")), trace).unwrap();
    }
    let made = report(&trial, "seen");
    assert!(made.status.success(), "{made:?}");
    let said = String::from_utf8_lossy(&made.stdout);
    assert_eq!(said, "seen/c10d/job.html\nseen/c10d/trace.json\n");
    let page = fs::read_to_string(trial.path("seen/c10d/job.html")).unwrap();
    for part in [
        "2 workers did about 3 collective operations each in 2.5 s",
        "<tr><td>all_reduce</td><td class=\"num\">6</td><td class=\"num\">2.00 ms</td></tr>",
        "4.00 kB / 5.00 kB",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert!(!page.contains("Single steps") && !page.contains("The plan"), "{page}");
}

#[test]
fn what_is_no_trace_is_refused_with_what_to_do() {
    let trial = Trial::new();
    let refused = |folder: &str, facts: &[&str]| {
        let output = report(&trial, folder);
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{words}");
        facts.iter().for_each(|fact| assert!(words.contains(fact), "{fact}: {words}"));
    };
    refused("nowhere", &["nowhere", "No such file"]);
    trial.write("empty/other.json", "{}");
    refused("empty", &["no traces in empty", "POSEIDON_REPORT=empty"]);
    trial.write("broken/trace.rank0.json", "{\"traceEvents\": [");
    refused("broken", &["broken/trace.rank0.json", "not a trace of a Poseidon job"]);
    trial.write("foreign/trace.rank0.json", "{\"traceEvents\": []}");
    refused("foreign", &["foreign/trace.rank0.json", "says nothing of its node"]);
}
