//! `poseidon plan` and `poseidon profile` from the outside: what they print, and what they say when
//! there is nothing to plan.

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

fn poseidon(folder: &Path, command: &str, args: &[&str]) -> Output {
    let mut poseidon = Command::new(env!("CARGO_BIN_EXE_poseidon"));
    poseidon.arg(command).args(args).current_dir(folder).env("COLUMNS", "120");
    poseidon.env_remove("POSEIDON_LOG").output().unwrap()
}

fn plan(folder: &Path, args: &str) -> Output {
    poseidon(folder, "plan", &args.split_whitespace().collect::<Vec<_>>())
}

fn json(args: &str) -> Value {
    let folder = TempDir::new().unwrap();
    let output = plan(folder.path(), &format!("{args} --json"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Fails with one message that has all of `words`, and prints nothing else.
#[track_caller]
fn refused(folder: &Path, args: &str, words: &[&str]) {
    let output = plan(folder, args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code().is_some_and(|code| code == 1 || code == 2), "{args}: {output:?}");
    for word in words {
        assert!(stderr.contains(word), "{args}: '{word}' is not in:\n{stderr}");
    }
    assert_eq!(stderr.matches("error: ").count(), 1, "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    assert_eq!(output.stdout, b"", "{args}");
}

/// Poseidon 2017 §5.2, on the network and the device of the paper: 15.5 with 16 nodes and 10GbE.
#[test]
fn the_contract() {
    let answer = json(
        "--model vgg19-22k --workers 16 --servers 16 --batch 32 --bandwidth 10gbit --profile titan-x \
         --network paper-2017 --scheme auto",
    );
    let number = |key: &str| answer[key].as_f64().unwrap_or_else(|| panic!("{key}: {answer}"));
    assert_eq!(
        (&answer["model"], &answer["parameters"]),
        (&"vgg19-22k".into(), &229_052_817.into())
    );
    assert!((number("speedup") / 15.5 - 1.0).abs() < 0.1, "{}", number("speedup"));
    assert!((number("compute_seconds") - 32.0 / 34.6).abs() < 1e-6);
    assert!(number("iteration_seconds") >= number("compute_seconds"));
    assert!((number("efficiency") - number("speedup") / 16.0).abs() < 1e-9);
    assert!((0.0..1.0).contains(&number("stall_fraction")));
    assert!(answer.as_object().unwrap().contains_key("min_bandwidth_95"));
    assert!(answer["bottleneck"].is_string());
    assert_eq!((&answer["servers"], &answer["overlap"]), (&"colocated".into(), &"backward".into()));
    let layers = answer["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 19);
    for layer in layers {
        for key in ["name", "kind", "scheme", "reason"] {
            assert!(layer[key].is_string(), "{key} in {layer}");
        }
        assert!(layer["parameters"].as_u64().unwrap() > 0);
        assert!(layer["bytes_per_node"].as_u64().unwrap() > 0);
    }
    assert_eq!((&layers[0]["scheme"], &layers[16]["scheme"]), (&"ps".into(), &"sfb".into()));
}

/// Poseidon 2017 §5.2: at 16 nodes VGG19 is near linear with 10GbE, "while an optimized PS would
/// otherwise need 30GbE or even higher".
#[test]
fn enough_bandwidth_for_vgg19() {
    let enough = |scheme: &str| {
        let answer = json(&format!(
            "--model vgg19 --workers 16 --network paper-2017 --profile titan-x --scheme {scheme}"
        ));
        answer["min_bandwidth_95"].as_f64().unwrap() / 1e9
    };
    let (auto, ps) = (enough("auto"), enough("ps"));
    assert!((25.0..35.0).contains(&ps), "{ps}");
    assert!(auto <= 10.0, "{auto}");
}

/// Poseidon 2017 §5.2: "Poseidon reduces to PS when training GoogLeNet on 16 nodes".
#[test]
fn googlenet_falls_back_to_the_parameter_server() {
    let answer = json("--model googlenet --workers 16 --batch 128 --network paper-2017");
    let layers = answer["layers"].as_array().unwrap();
    assert!(layers.iter().all(|layer| layer["scheme"] == "ps"));
    let last = layers.last().unwrap()["reason"].as_str().unwrap();
    assert!(last.starts_with("factors ") && last.contains('>'), "{last}");
}

#[test]
fn faster_networks_and_better_schemes_help_where_the_network_is_the_limit() {
    let answer = json("--model vgg19 --workers 8 --bandwidth 1gbit --scheme ps");
    assert_eq!(answer["bottleneck"], "egress");
    let advice = answer["advice"].as_array().unwrap();
    let gains: Vec<f64> = advice.iter().map(|a| a["gain"].as_f64().unwrap()).collect();
    assert!(gains.windows(2).all(|pair| pair[0] >= pair[1]), "{gains:?}");
    let gain = |change: &str| {
        let found = advice.iter().find(|a| a["change"].as_str().unwrap().contains(change));
        found.unwrap_or_else(|| panic!("no '{change}' in {advice:?}"))["gain"].as_f64().unwrap()
    };
    assert!(gain("--scheme auto") > 1.0 && gain("2.5 Gbit/s") > 1.0);
    let points = answer["by_workers"].as_array().unwrap();
    let workers: Vec<f64> = points.iter().map(|p| p["x"].as_f64().unwrap()).collect();
    assert_eq!(workers, [1.0, 2.0, 4.0, 8.0]);
}

/// With 2 hosts per rack and narrow links between racks, sums are made inside racks; ports carry as
/// much as without.
#[test]
fn racks_with_narrow_links_add_up_inside() {
    let job = "--model alexnet --workers 8 --ranks-per-host 2 --bandwidth 1gbit --scheme ps";
    let answer = json(&format!("{job} --racks 2 --oversubscription 8"));
    let racks = &answer["racks"];
    assert_eq!(racks["adds_up_inside"], true, "{racks}");
    assert_eq!(racks["hosts_per_rack"], 2);
    let number = |value: &Value| value.as_f64().unwrap();
    assert_eq!(racks["iteration_seconds_inside"], answer["iteration_seconds"]);
    assert!(
        number(&racks["iteration_seconds_flat"]) > 1.2 * number(&answer["iteration_seconds"]),
        "{racks}"
    );
    let fewer =
        number(&racks["link_flat"]["bytes_sent"]) / number(&racks["link_inside"]["bytes_sent"]);
    // A ring of four hosts carries 2 · 3 / 4 of the model on every link, two racks 2 · 1 / 2.
    assert!((1.4..1.6).contains(&fewer), "{fewer}");
    let reason = racks["reason"].as_str().unwrap();
    assert!(reason.contains("1.5 times fewer bytes"), "{reason}");
    assert_eq!((&answer["hosts"], &answer["ranks_per_host"]), (&4.into(), &2.into()));
    for link in ["port", "memory", "rack_link"] {
        assert!(number(&answer[link]["seconds"]) > 0.0, "{link}: {answer}");
    }
    // As wide as the ports, they are not what anybody waits for.
    let wide = json(&format!("{job} --racks 2"));
    assert_eq!(wide["racks"]["adds_up_inside"], false, "{}", wide["racks"]);
    assert_eq!(wide["racks"]["iteration_seconds_flat"], wide["iteration_seconds"]);
    assert!(wide["racks"]["reason"].as_str().unwrap().contains("another hop"));
    // And without racks nothing is said of them.
    let none = json("--model cifar10-quick --workers 4 --ranks-per-host 2");
    assert!(none["racks"].is_null() && none["rack_link"].is_null());
}

#[test]
fn text_shows_what_passes_ports_memory_and_racks() {
    let folder = TempDir::new().unwrap();
    let job = "--model cifar10-quick --workers 8 --ranks-per-host 2 --batch 4 --bandwidth 100mbit";
    let output =
        plan(folder.path(), &format!("{job} --racks 2 --oversubscription 4 --report plan.html"));
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    for words in [
        "8 workers that are servers too on 4 hosts",
        "out of a host",
        "out of a worker",
        "out of a rack",
    ] {
        assert!(text.contains(words), "'{words}' is not in:\n{text}");
    }
    assert!(text.contains("adding up inside racks pays"), "{text}");
    let page = fs::read_to_string(folder.path().join("plan.html")).unwrap();
    assert!(page.contains("adding up inside racks pays"), "the page does not say it");
}

#[test]
fn racks_that_hosts_do_not_fill_are_refused() {
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    refused(folder, "--workers 16 --ranks-per-host 4 --racks 3", &["4 hosts", "3 racks"]);
    refused(folder, "--oversubscription 4", &["--racks"]);
    refused(folder, "--racks 2 --oversubscription 0.5", &["--oversubscription", "from 1", "0.5"]);
    refused(folder, "--racks 2 --oversubscription NaN", &["--oversubscription", "NaN"]);
    refused(folder, "--ranks-per-host 0", &["--ranks-per-host", "at least 1"]);
    refused(folder, "--ranks-per-host 2 --scheme adam", &["adam", "inside hosts"]);
}

/// The profile says how fast the device copies, the flag says otherwise, and the answer says what
/// waits for it.
#[test]
fn copies_are_told() {
    let job = "--model alexnet --workers 4 --bandwidth 100gbit --scheme ps --profile h200";
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{value}"));
    let answer = json(job);
    let copies = &answer["copies"];
    let gradient = 4 * 60_965_224;
    for key in ["bytes_to_host", "bytes_to_device"] {
        assert_eq!(copies[key], gradient, "{key}");
    }
    assert_eq!(
        (number(&copies["speed_to_host"]), number(&copies["speed_to_device"])),
        (4.7e10, 5.6e10)
    );
    assert!((number(&copies["seconds"]) / (f64::from(gradient) / 4.7e10) - 1.0).abs() < 1e-9);
    let slow = json(&format!("{job} --copy-speed 1GB/s"));
    assert_eq!(slow["bottleneck"], "copies");
    assert!(number(&slow["iteration_seconds"]) >= f64::from(gradient) / 1e9);
    assert!(number(&slow["copies"]["waiting_fraction"]) > 0.5, "{}", slow["copies"]);
    let none = json(&format!("{job} --copy-speed none"));
    assert!(none["copies"].is_null());
    assert_eq!(slow["copies"]["iteration_seconds_without"], none["iteration_seconds"]);
    assert!(json("--model cifar10-quick --workers 2")["copies"].is_null());
    let folder = TempDir::new().unwrap();
    refused(folder.path(), "--copy-speed 25gbit", &["--copy-speed", "25GB/s"]);
    refused(folder.path(), "--copy-speed -1GB/s", &["--copy-speed", "25GB/s"]);
}

/// Wherever a profile of published figures is shown, it is said that nothing was measured.
#[test]
fn published_figures_are_marked() {
    let folder = TempDir::new().unwrap();
    let output = plan(folder.path(), "--model alexnet --workers 2 --profile t4 --report plan.html");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let page = fs::read_to_string(folder.path().join("plan.html")).unwrap();
    for shown in [&text, &page] {
        assert!(shown.contains("from published figures, not measured"), "{shown}");
        assert!(shown.contains("to the host") && shown.contains("12 GB/s"), "{shown}");
    }
    let answer = json("--model alexnet --workers 2 --profile t4");
    assert!(answer["profile_basis"].as_str().unwrap().contains("not measured"), "{answer}");
    let help = String::from_utf8(plan(folder.path(), "--help").stdout).unwrap();
    let marked = "Profiles from published figures, not measured: a100, h100, l4, rtx-4090, t4";
    assert!(help.contains(marked), "{help}");
}

#[test]
fn a_search_says_what_it_gains() {
    let answer = json("--model vgg19 --workers 4 --bandwidth 1gbit --scheme ps --search");
    let search = &answer["search"];
    let (before, after) =
        (search["formula_seconds"].as_f64(), search["iteration_seconds"].as_f64());
    assert!(after < before, "{search}");
    assert!(search["changes"].to_string().contains("classifier.0 by sfb"), "{search}");
    assert_eq!(answer["iteration_seconds"], search["iteration_seconds"]);
}

#[test]
fn text_shows_the_table_the_facts_and_a_chart() {
    let folder = TempDir::new().unwrap();
    let output = plan(folder.path(), "--model bert-base --workers 4 --batch 8 --report plan.html");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    for words in [
        "12 × layers.*.up",
        "101 layers",
        "iteration ",
        "bottleneck ",
        "What would help",
        "█",
        "plan.html",
    ] {
        assert!(text.contains(words), "'{words}' is not in:\n{text}");
    }
    assert!(text.lines().count() < 60, "{text}");
    let page = fs::read_to_string(folder.path().join("plan.html")).unwrap();
    for words in
        ["bert-base", "Speed-up by workers", "What would help", "layers.11.down", "</html>"]
    {
        assert!(page.contains(words), "'{words}' is not in the page");
    }
    assert!(!page.contains("NaN") && !page.contains("http://"), "the page asks for something");
}

#[test]
fn a_model_of_ones_own_is_planned() {
    let folder = TempDir::new().unwrap();
    let printed = plan(folder.path(), "--model cifar10-quick --print-model");
    fs::write(folder.path().join("net.json"), &printed.stdout).unwrap();
    let output = plan(folder.path(), "--model net.json --workers 2 --json");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["parameters"], 145_578);
}

#[test]
fn sizes_that_are_none_are_refused() {
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    for flag in ["--workers", "--batch", "--lanes"] {
        for size in ["0", "-3", "many"] {
            refused(folder, &format!("{flag}={size}"), &[flag, "at least 1"]);
        }
    }
    refused(folder, "--workers 70000", &["--workers", "at most 1024", "70000"]);
    refused(folder, "--workers 5000", &["--workers", "at most 1024", "5000"]);
    refused(folder, "--lanes 65535", &["--lanes", "at most 64", "65535"]);
    refused(folder, "--profile /dev/zero", &["/dev/zero", "more than 16 MiB"]);
    refused(folder, "--model /dev/zero", &["/dev/zero", "more than 16 MiB"]);
    refused(folder, "--servers 0", &["at least 1"]);
    refused(folder, "--servers dedicated:some", &["--servers", "'some'"]);
    refused(folder, "--chunk 0", &["a chunk has from 1024"]);
    refused(folder, "--latency -5us", &["such as 50us"]);
    refused(folder, "--latency 1h", &["such as 50us"]);
}

#[test]
fn bandwidths_that_no_network_has_are_refused() {
    let folder = TempDir::new().unwrap();
    for (bandwidth, words) in [
        ("0gbit", "no network has 0gbit"),
        ("-10gbit", "no network has -10gbit"),
        ("10", "has no unit"),
        ("10parsec", "'parsec' is not a unit"),
        ("1000000tbit", "no network has"),
    ] {
        refused(folder.path(), &format!("--bandwidth {bandwidth}"), &[words, "10gbit"]);
    }
}

#[test]
fn names_that_are_not_known_are_refused_with_the_nearest() {
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    refused(folder, "--model vgg91", &["'vgg91'", "did you mean 'vgg19'?", "gpt2-small"]);
    refused(folder, "--profile titan", &["did you mean 'titan-x'?"]);
    refused(folder, "--network infiniband", &["'infiniband'", "ethernet", "paper-2017"]);
    refused(folder, "--scheme best", &["'best'", "'adam'"]);
    refused(folder, "--overlap some", &["'some'"]);
}

#[test]
fn more_servers_than_chunks_are_refused() {
    let folder = TempDir::new().unwrap();
    let words = ["500 servers", "chunks", "--chunk"];
    refused(folder.path(), "--model cifar10-quick --workers 4 --servers 500", &words);
    // However they were asked for: a chunk of 100 numbers is the least there is.
    let layer = r#"{"name": "l", "kind": "other", "parameters": 100, "forward_flops": 1e9}"#;
    let model = format!(r#"{{"name": "tiny", "layers": [{layer}]}}"#);
    fs::write(folder.path().join("tiny.json"), model).unwrap();
    let tiny = "--model tiny.json --workers 4";
    for (servers, count) in
        [("colocated", 4), ("4", 4), ("2", 2), ("dedicated:4", 4), ("colocated+1", 5)]
    {
        let count = format!("{count} servers");
        let words = [count.as_str(), "chunks is 1", "fewer servers", "--servers", "--chunk"];
        refused(folder.path(), &format!("{tiny} --servers {servers}"), &words);
    }
    // Not asked for, they are only there because the workers are.
    let output = plan(folder.path(), tiny);
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn malformed_files_are_refused_with_file_line_and_field() {
    let folder = TempDir::new().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("net.json", "{\"name\": \"net\", \"layers\": [\n{\"name\": \"a\", \"kind\": \"conv\"}]}");
    refused(folder.path(), "--model net.json", &["net.json:2: missing field `parameters`"]);
    write("fast.toml", "device = \"d\"\n[rates]\nconv = 0.0\nfc = 1.0\nother = 1.0\n");
    refused(folder.path(), "--profile fast.toml", &["fast.toml:3: expected a number above 0"]);
    refused(folder.path(), "--model no.json", &["no.json"]);
    refused(folder.path(), "--profile no/such.toml", &["no/such.toml"]);
    refused(
        folder.path(),
        "--report no/such/plan.html --model cifar10-quick",
        &["no/such/plan.html"],
    );
}

#[test]
fn a_python_that_cannot_help_is_named() {
    let folder = TempDir::new().unwrap();
    refused(
        folder.path(),
        "--torch nets:make --python no-such-python",
        &["no-such-python", "--python"],
    );
    let output = poseidon(folder.path(), "profile", &["vgg19", "--python", "no-such-python"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("no-such-python"), "{stderr}");
    let output = poseidon(folder.path(), "profile", &["vgg20"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("did you mean 'vgg"), "{output:?}");
}

/// Nobody has said on what, so nobody is told of one device only.
#[test]
fn without_a_profile_two_devices_stand_side_by_side() {
    let folder = TempDir::new().unwrap();
    let small = "--model cifar10-quick --workers 2 --bandwidth 1gbit";
    let output = plan(folder.path(), small);
    let text = String::from_utf8(output.stdout).unwrap();
    if String::from_utf8_lossy(&output.stderr).contains("this machine has an") {
        assert!(!text.contains("two devices"), "{text}");
        return;
    }
    assert!(text.contains("No --profile was given, so here are two devices"), "{text}");
    assert!(text.lines().any(|line| line.starts_with("titan-x ")), "{text}");
    assert!(text.lines().any(|line| line.starts_with("h200 ")), "{text}");
    let named = plan(folder.path(), &format!("{small} --profile h200"));
    assert!(!String::from_utf8(named.stdout).unwrap().contains("two devices"));
}

#[test]
fn workers_that_are_slower_than_one_are_told_so_in_the_first_line() {
    let folder = TempDir::new().unwrap();
    let args = "--model cifar10-quick --workers 4 --bandwidth 10mbit --profile h200";
    let output = plan(folder.path(), args);
    let text = String::from_utf8(output.stdout).unwrap();
    let first = text.lines().next().unwrap();
    assert!(first.starts_with("One worker alone is "), "{first}");
    assert!(first.ends_with(" times as fast as these 4 workers."), "{first}");
    let helps = text.split("What would help").nth(1).unwrap();
    let helps = helps.split("\n\n").next().unwrap();
    let gains: Vec<&str> = helps.lines().map(str::trim).filter(|l| l.contains(" %")).collect();
    assert!(!gains.is_empty() && gains.iter().all(|line| line.starts_with('+')), "{helps}");
    assert!(!text.contains("No use"), "{text}");
}

#[test]
fn it_is_said_why_no_bandwidth_is_enough() {
    let args = "--model cifar10-quick --workers 2 --latency 1s --profile h200";
    let answer = json(args);
    assert!(answer["min_bandwidth_95"].is_null(), "{answer}");
    let why = answer["never_enough"].as_str().unwrap();
    assert!(why.contains("10 Tbit/s") && why.contains("messages, which take 1"), "{why}");
}

#[test]
fn a_cluster_that_was_not_saved_by_doctor_is_refused() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("other.json"), "{}").unwrap();
    refused(folder.path(), "--cluster other.json", &["other.json", "poseidon doctor --save"]);
    refused(folder.path(), "--cluster no-such.json", &["no-such.json"]);
}
