//! `poseidon figures` from the outside: which files it writes, and that the numbers in them are the
//! papers' and the simulator's.

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

fn figures(out: &Path, only: &str) -> Output {
    let mut poseidon = Command::new(env!("CARGO_BIN_EXE_poseidon"));
    poseidon.args(["figures", "--only", only, "--out"]).arg(out);
    poseidon.env_remove("POSEIDON_LOG").output().unwrap()
}

/// The records of `only`, in their order.
fn summary(only: &str) -> Vec<Value> {
    let folder = TempDir::new().unwrap();
    let output = figures(folder.path(), only);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = fs::read_to_string(folder.path().join("summary.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn find<'a>(records: &'a [Value], series: &str, x: f64) -> &'a Value {
    let found = records.iter().find(|record| record["series"] == series && record["x"] == x);
    found.unwrap_or_else(|| panic!("no '{series}' at {x} in {records:#?}"))
}

fn off(record: &Value) -> f64 {
    record["simulated"].as_f64().unwrap() / record["paper"].as_f64().unwrap() - 1.0
}

/// Poseidon 2017, Table 1: what simulated nodes move is what the formulas say, up to headers and
/// biases.
#[test]
fn table_1_is_what_nodes_move() {
    let records = summary("table1");
    assert_eq!(records.len(), 7 * 4);
    for record in &records {
        for key in ["figure", "series"] {
            assert!(record[key].is_string(), "{record}");
        }
        assert!(record["measured"].is_null(), "{record}");
        assert!((0.0..0.001).contains(&off(record)), "{record}");
    }
    let ps = find(&records, "every node both worker and server, parameter server", 8.0);
    assert_eq!(ps["paper"], 359.6616); // as in core's own test of the formula
}

/// Poseidon 2015 §4.3: 134.2M, 18.9M and 75.5M parameters on 4 nodes with batches of 256. By factors
/// the paper counts one worker too few.
#[test]
fn parameters_of_2015_figure_5() {
    let records = summary("2015-fig5");
    let by = |series| find(&records, &format!("batches of 256, {series}"), 4.0);
    let cases = [
        ("full matrices", 134.2, 1.0),
        ("factors, from worker to worker", 18.9, 4.0 / 3.0),
        ("factors to the server, matrices back", 75.5, 1.0),
    ];
    for (series, stated, ratio) in cases {
        let record = by(series);
        assert!((record["paper"].as_f64().unwrap() - stated).abs() < 0.05, "{record}");
        assert!(((off(record) + 1.0) / ratio - 1.0).abs() < 0.01, "{record}");
    }
}

/// Poseidon 2017 §5.3: one node has several times the traffic of the others by Adam's way, and by no
/// other (crates/sim/tests/paper.rs has the same of the simulator itself).
#[test]
fn traffic_by_node() {
    let records = summary("fig9");
    assert_eq!(records.len(), 3 * 8);
    let spread = |system: &str| {
        let mut traffic: Vec<f64> = (0..8)
            .map(|node| find(&records, &format!("{system}, VGG19"), f64::from(node)))
            .map(|record| record["simulated"].as_f64().unwrap())
            .collect();
        traffic.sort_by(f64::total_cmp);
        traffic[7] / traffic[3]
    };
    assert!(spread("Adam's way, wait-free") > 3.0);
    assert!(spread("parameter server, wait-free") < 1.05);
    assert!(spread("hybrid, wait-free") < 1.05);
}

/// A drawing and its numbers for each figure, a page that shows them, and the same again the next time.
#[test]
fn the_same_files_every_time() {
    let folder = TempDir::new().unwrap();
    let (first, second) = (folder.path().join("a/b"), folder.path().join("second"));
    for out in [&first, &second] {
        let output = figures(out, "table1,2015-fig5");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let mut names: Vec<_> =
        fs::read_dir(&first).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    let files = [
        "2015-fig5.csv",
        "2015-fig5.svg",
        "index.html",
        "summary.json",
        "table1.csv",
        "table1.svg",
    ];
    assert_eq!(names, files);
    for file in files {
        let [a, b] = [&first, &second].map(|out| fs::read_to_string(out.join(file)).unwrap());
        assert_eq!(a, b, "{file}");
    }
    let page = fs::read_to_string(first.join("index.html")).unwrap();
    assert!(page.contains("table1.svg") && page.contains("2015-fig5.svg"));
    let csv = fs::read_to_string(first.join("table1.csv")).unwrap();
    assert_eq!(csv.lines().next(), Some("series,x,paper,simulated,measured"));
    assert_eq!(csv.lines().count(), 1 + 7 * 4);
    let svg = fs::read_to_string(first.join("table1.svg")).unwrap();
    assert!(svg.starts_with("<svg ") && !svg.contains("NaN"), "{svg}");
}

/// Poseidon 2017, §5.1: 31x with ResNet-152 on 32 nodes. §5.3: 70% after 1000 iterations. 2015, Table 5.
#[test]
fn figures_of_training_have_what_the_papers_say() {
    let records = summary("fig7,fig10,2015-table5");
    let find = |figure: &str, series: &str, x: f64| {
        let is = |record: &&Value| {
            record["figure"] == figure && record["series"] == series && record["x"] == x
        };
        records.iter().find(is).unwrap_or_else(|| panic!("{figure}, {series}, {x}: {records:?}"))
    };
    let net = find("fig7", "ResNet-152, hybrid, wait-free", 32.0);
    assert_eq!(net["paper"], 31.0);
    assert!((net["simulated"].as_f64().unwrap() / 31.0 - 1.0).abs() < 0.05, "{net}");
    let curve = find("fig10", "CIFAR-10 quick, Poseidon, 4 workers", 1000.0);
    assert_eq!((&curve["paper"], &curve["measured"]), (&70.0.into(), &60.48.into()));
    assert_eq!(
        find("fig10", "CIFAR-10 quick, 1-bit quantization, 4 workers", 3000.0)["measured"],
        Value::Null
    );
    assert_eq!(find("2015-table5", "CIFAR-10 quick, hybrid, wait-free", 8.0)["paper"], 4.0);
}

#[test]
fn a_figure_that_does_not_exist() {
    let folder = TempDir::new().unwrap();
    let output = figures(&folder.path().join("none"), "fig3");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("'fig3'") && stderr.contains("2015-fig7"), "{stderr}");
    assert!(!folder.path().join("none").exists());
}
