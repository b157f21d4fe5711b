//! What a job shows of itself: a trace that viewers open, and metrics.

use crate::cluster::{Layout, job, step};
use poseidon::collectives::{Request, Terms};
use poseidon::config::{Config, Observation};
use poseidon::session::Builder;
use poseidon::{Error, Factors, Layer, LayerKind, Pass, Policy, Servers, Session};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

const STEPS: u64 = 4;

fn read(path: &Path) -> Value {
    let text = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn events(trace: &Value) -> &[Value] {
    trace["traceEvents"].as_array().unwrap()
}

/// The layers and steps of all slices, or beginnings of asynchronous events, of a category.
fn of_category(trace: &Value, category: &str) -> BTreeSet<(String, u64)> {
    let begins = |event: &&Value| event["cat"] == category && event["ph"] != "e";
    let found = events(trace).iter().filter(begins).map(|event| {
        let args = &event["args"];
        (args["layer"].as_str().unwrap().to_owned(), args["step"].as_u64().unwrap())
    });
    found.collect()
}

/// What viewers rely on: every event has a time, slices of a thread lie within each other or apart, and
/// what begins asynchronously ends.
fn check_form(trace: &Value) {
    let mut threads: BTreeMap<_, Vec<(u64, u64)>> = BTreeMap::new();
    let mut under_way: BTreeMap<(u64, String, String), u64> = BTreeMap::new();
    let mut named = BTreeSet::new();
    for event in events(trace) {
        let pid = event["pid"].as_u64().unwrap();
        let tid = event["tid"].as_u64().unwrap();
        let time = || event["ts"].as_u64().unwrap();
        let text = |key: &str| event[key].as_str().unwrap().to_owned();
        // Of its process: Perfetto would not put the rows of other ids below the process.
        let id = || (pid, text("cat"), event["id2"]["local"].as_str().unwrap().to_owned());
        match event["ph"].as_str().unwrap() {
            "M" => {
                if event["name"] == "thread_name" {
                    named.insert((pid, tid));
                }
            }
            "X" => {
                let slice = (time(), time() + event["dur"].as_u64().unwrap());
                threads.entry((pid, tid)).or_default().push(slice);
            }
            "i" => drop((time(), text("s"))),
            "b" => {
                let before = under_way.insert(id(), time());
                assert!(before.is_none(), "begins twice: {event}");
            }
            "e" => {
                let begin = under_way.remove(&id());
                assert!(begin.is_some_and(|begin| begin <= time()), "ends early: {event}");
            }
            other => panic!("an event of kind {other}"),
        }
    }
    assert!(under_way.is_empty(), "never end: {under_way:?}");
    assert!(!threads.is_empty());
    for (thread, slices) in threads {
        assert!(named.contains(&thread), "thread {thread:?} has no name");
        let mut open: Vec<u64> = Vec::new();
        for (begin, end) in slices {
            open.retain(|around| *around > begin);
            let within = open.last().is_none_or(|around| end <= *around);
            assert!(within, "slices of {thread:?} overlap at {begin}");
            open.push(end);
        }
    }
}

/// A job of two layers, one of which may go by factors.
fn describe(builder: Builder) -> Builder {
    let fc = Layer { kind: LayerKind::Fc { m: 6, n: 5 }, rows: Some(2), ..Layer::new("fc", 30) };
    builder.layers([Layer::new("conv \"1\"\n", 500), fc]).scheme(Policy::Sfb)
}

fn train(session: &Session) -> Result<(), Error> {
    let (conv, fc) = (session.layer("conv \"1\"\n")?, session.layer("fc")?);
    for _ in 0..STEPS {
        session.begin_pass(Pass::Forward);
        compute();
        session.computed(conv);
        compute();
        session.computed(fc);
        session.begin_pass(Pass::Backward);
        compute();
        let (u, v) = (vec![1.0; 12], vec![2.0; 10]);
        session.send_factors(fc, &[Factors { u: &u, v: &v }], vec![0.0; 30].into())?;
        session.rebuild(fc)?;
        compute();
        session.send(conv, vec![1.0; 500].into())?;
        session.end_pass();
        session.receive(conv)?;
        session.receive(fc)?;
    }
    Ok(())
}

/// Takes some microseconds, which can be seen in a trace.
fn compute() {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_micros(50) {
        std::hint::spin_loop();
    }
}

fn observed(layout: &Layout, observation: Observation) -> (poseidon::Coordinator, Config) {
    let (coordinator, mut config) = layout.coordinator();
    config.observation = observation;
    (coordinator, config)
}

#[test]
fn a_trace_has_every_layer_of_every_step_of_every_rank_on_one_axis() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout { lanes: 2, ..Layout::workers(2) };
    let trace = Some(folder.path().join("deep/t.json"));
    let (_coordinator, config) = observed(&layout, Observation { trace, ..Default::default() });
    let before = std::time::SystemTime::now();
    let results = layout.run_with(&config, describe, |session| {
        train(&session)?;
        session.finish()
    });
    results.into_iter().for_each(|result| result.unwrap());
    let micros = |time: std::time::SystemTime| {
        time.duration_since(std::time::UNIX_EPOCH).unwrap().as_micros() as u64
    };
    let run = micros(before)..=micros(std::time::SystemTime::now());
    let layers = |names: &[&str]| -> BTreeSet<(String, u64)> {
        let steps = |name: &&str| (1..=STEPS).map(|step| (name.to_string(), step)).collect();
        names.iter().flat_map(|name| -> Vec<_> { steps(name) }).collect()
    };
    let all = layers(&["conv \"1\"\n", "fc"]);
    for rank in 0..2u64 {
        let trace = read(&folder.path().join(format!("deep/t.rank{rank}.json")));
        check_form(&trace);
        assert_eq!(of_category(&trace, "send"), all);
        assert_eq!(of_category(&trace, "wait"), all);
        // What is of no single layer has no name.
        assert!(of_category(&trace, "forward").is_superset(&all));
        assert!(of_category(&trace, "backward").is_superset(&all));
        assert_eq!(of_category(&trace, "layer"), all);
        assert_eq!(of_category(&trace, "rebuild"), layers(&["fc"]));
        // The layers are done on some lane each, and chunks of each leave.
        assert_eq!(of_category(&trace, "chunks"), all);
        for event in events(&trace).iter().filter(|event| event["ph"] != "M") {
            assert_eq!(event["pid"], rank);
            assert!(run.contains(&event["ts"].as_u64().unwrap()), "{event}");
        }
        let names = |event: &Value| event["args"]["name"].as_str().map(str::to_owned);
        let named: BTreeSet<_> = events(&trace).iter().filter_map(names).collect();
        for thread in ["program", "lane 0", "lane 1"] {
            assert!(named.contains(thread), "{named:?}");
        }
        let summary = &trace["otherData"]["poseidon"];
        assert_eq!(summary["node"], rank);
        assert_eq!(summary["failure"], Value::Null);
        let session = &summary["sessions"][0];
        assert_eq!(session["steps"], STEPS);
        // Four times in every step.
        assert!(session["compute_seconds"].as_f64().unwrap() >= STEPS as f64 * 200e-6, "{session}");
        assert!(session["layers"][0]["bytes_sent"].as_u64().unwrap() > 0);
        assert!(summary["lanes"][0]["bytes"].as_u64().unwrap() > 0);
    }
}

#[test]
fn a_job_that_fails_leaves_a_trace_with_what_was_in_flight_and_why() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout { servers: Servers::Dedicated(1), ..Layout::workers(2) };
    let report = Some(folder.path().to_owned());
    let (_coordinator, config) = observed(&layout, Observation { report, ..Default::default() });
    let results = layout.run_with(&config, two_layers, |session| {
        step(&session, 1, 0..2)?;
        let layers = [(session.layer("a")?, 100), (session.layer("b")?, 300)];
        if session.rank() == 0 {
            for (layer, len) in layers.into_iter().rev() {
                session.send(layer, vec![1.0; len].into())?;
            }
        }
        session.gather("sent", &Value::Null)?;
        if session.rank() == 1 {
            session.abort("enough of it");
            return Ok(());
        }
        let error = session.receive(layers[0].0).unwrap_err().to_string();
        assert!(error.contains("enough of it"), "{error}");
        // The program has not given up its session, and may never do so.
        let trace = read(&folder.path().join("trace.rank0.json"));
        check_form(&trace);
        let summary = &trace["otherData"]["poseidon"];
        assert!(summary["failure"].as_str().unwrap().contains("enough of it"), "{summary}");
        let unfinished: Vec<_> = events(&trace)
            .iter()
            .filter(|event| event["ph"] == "b" && event["args"]["unfinished"] == true)
            .map(|event| event["name"].as_str().unwrap())
            .collect();
        assert_eq!(unfinished, ["b", "a"]);
        Ok(())
    });
    results.into_iter().for_each(|result| result.unwrap());
    // The one that gave up, and the server, say what they know.
    for node in ["rank1", "server0"] {
        let trace = read(&folder.path().join(format!("trace.{node}.json")));
        check_form(&trace);
        let failure = &trace["otherData"]["poseidon"]["failure"];
        assert!(failure.as_str().is_some_and(|why| why.contains("enough of it")), "{failure}");
    }
}

/// The job of `step`.
fn two_layers(builder: Builder) -> Builder {
    let job = job();
    builder.layers(job.layers).optimizer(job.optimizer).chunk_size(job.chunk)
}

#[test]
fn a_program_may_begin_to_record_at_any_time() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::workers(2);
    let results = layout.run(two_layers, |session| {
        step(session, 1, 0..2)?;
        let refused = session.write_trace(folder.path()).unwrap_err().to_string();
        assert!(refused.contains("POSEIDON_REPORT"), "{refused}");
        session.record();
        step(session, 2, 0..2)?;
        step(session, 3, 0..2)?;
        let trace = read(&session.write_trace(folder.path())?);
        check_form(&trace);
        let steps = of_category(&trace, "wait").into_iter().map(|(_, step)| step);
        assert_eq!(steps.collect::<BTreeSet<_>>(), BTreeSet::from([2, 3]));
        Ok(())
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn operations_of_a_group_are_in_the_trace() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::workers(2);
    let results = layout.run(two_layers, |session| {
        session.record();
        let group = session.group("everybody")?;
        let terms = Terms { timeout: session.timeout(), waits: true };
        for _ in 0..3 {
            let work = group.begin(Request::Barrier, terms, Box::new(()))?;
            assert!(work.wait(session.timeout())?);
        }
        let trace = read(&session.write_trace(folder.path())?);
        check_form(&trace);
        let barrier = |number| ("barrier".to_owned(), number);
        assert_eq!(of_category(&trace, "collective"), (1..=3).map(barrier).collect());
        Ok(())
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn a_trace_that_cannot_be_written_is_refused_before_the_job_begins() {
    let mut config = Config::alone(poseidon::Secret::random().unwrap());
    config.observation.trace = Some("/dev/null/t.json".into());
    let error = Session::builder(config).start().map(drop).unwrap_err().to_string();
    assert!(error.contains("/dev/null/t.rank0.json"), "{error}");
}

fn scrape(address: SocketAddr) -> BTreeMap<String, f64> {
    let mut caller = TcpStream::connect(address).unwrap();
    caller.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    caller.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("200 OK") && head.contains("text/plain; version=0.0.4"), "{head}");
    let lines = body.lines().filter(|line| !line.starts_with('#'));
    let samples = lines.map(|line| {
        let (name, value) = line.rsplit_once(' ').unwrap();
        (name.to_owned(), value.parse().unwrap())
    });
    samples.collect()
}

#[test]
fn metrics_are_what_the_session_counts() {
    let layout = Layout { lanes: 2, ..Layout::workers(2) };
    let metrics = Some("127.0.0.1:0".parse().unwrap());
    let (_coordinator, config) = observed(&layout, Observation { metrics, ..Default::default() });
    let results = layout.run_with(&config, describe, |session| {
        train(&session)?;
        // Nothing moves from here on until everybody has asked.
        session.gather("trained", &Value::Null)?;
        let (before, rank) = (session.traffic(), session.rank());
        let found = scrape(session.metrics_address().unwrap());
        let after = session.traffic();
        let of = |name: &str, labels: &str| {
            let key = format!("poseidon_{name}{{node=\"worker {rank}\"{labels}}}");
            *found.get(&key).unwrap_or_else(|| panic!("{key} in {found:#?}"))
        };
        // Heartbeats are not the session's; what it counts stands still.
        assert_eq!(before, after);
        let in_session = ",session=\"1\"";
        assert_eq!(of("sent_bytes_total", in_session), after.bytes_sent as f64);
        assert_eq!(of("received_bytes_total", in_session), after.bytes_received as f64);
        assert_eq!(of("sent_frames_total", in_session), after.frames_sent as f64);
        assert_eq!(of("received_frames_total", in_session), after.frames_received as f64);
        assert_eq!(of("steps_total", in_session), STEPS as f64);
        assert_eq!(of("info", &format!(",version=\"{}\"", env!("CARGO_PKG_VERSION"))), 1.0);
        let layers = [("conv \\\"1\\\"\u{fffd}", "conv \"1\"\n"), ("fc", "fc")];
        let mut waited = 0.0;
        for (label, name) in layers {
            let labels = format!(",session=\"1\",layer=\"{label}\"");
            let sent = session.sent(session.layer(name)?);
            assert_eq!(of("layer_sent_bytes_total", &labels), sent as f64);
            waited += of("layer_wait_seconds_total", &labels);
        }
        assert!(waited > 0.0);
        // A lane says what it did when it goes to sleep, which may be after the program has its layers.
        let lane_sums = || {
            let found = scrape(session.metrics_address().unwrap());
            ["bytes_total", "queued_messages", "retransmitted_segments_total"].map(|name| {
                let key = |lane| {
                    format!("poseidon_lane_{name}{{node=\"worker {rank}\",lane=\"{lane}\"}}")
                };
                found[&key(0)] + found[&key(1)]
            })
        };
        // Both lanes' links carried the session and a little more, and nothing is left to send.
        let moved = (after.bytes_sent + after.bytes_received) as f64;
        let settled = |sums: &[f64; 3]| sums[0] >= moved && sums[1] == 0.0 && sums[2] == 0.0;
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut sums = lane_sums();
        while !settled(&sums) {
            assert!(Instant::now() < deadline, "{sums:?}, moved {moved}");
            std::thread::sleep(Duration::from_millis(20));
            sums = lane_sums();
        }
        let found = scrape(session.metrics_address().unwrap());
        let busy = format!("poseidon_lane_busy_seconds_total{{node=\"worker {rank}\",lane=\"0\"}}");
        assert!(found[&busy] > 0.0);
        session.gather("asked", &Value::Null)?;
        session.finish()
    });
    results.into_iter().for_each(|result| result.unwrap());
}
