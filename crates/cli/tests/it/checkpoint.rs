//! `poseidon checkpoint`, the real command, on checkpoints that the test has written.

use poseidon_checkpoint::{
    Directory, LayerFacts, Manifest, Piece, TensorFacts, What, commit, write_part,
};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

const LEN: usize = 6;

/// Writes what two nodes have of one layer at `step`. Its numbers are the step, the step plus one
/// and so on.
fn write(place: &Path, step: u64, layer: &str) {
    let storage = Directory::new(place);
    let values: Vec<f32> = (0..LEN).map(|i| (step + i as u64) as f32).collect();
    let part = |part: u32, range: std::ops::Range<usize>| {
        let piece = |what| Piece {
            layer: layer.to_owned(),
            what,
            start: range.start,
            values: &values[range.clone()],
        };
        let pieces = [piece(What::Parameters), piece(What::State(0))];
        write_part(&storage, step, part, &pieces).unwrap()
    };
    let parts = vec![part(0, 0..4), part(1, 4..LEN)];
    let tensor =
        |name: &str, shape: &[usize]| TensorFacts { name: name.into(), shape: shape.into() };
    let facts = LayerFacts {
        name: layer.into(),
        len: LEN,
        rule: "momentum 0.9".into(),
        steps: step,
        vectors: 1,
        tensors: vec![tensor("fc.weight", &[2, 2]), tensor("fc.bias", &[2])],
        private: false,
    };
    let manifest = Manifest {
        step,
        created: SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + step),
        poseidon: "0.1.0".into(),
        workers: 2,
        layers: vec![facts],
        parts,
        program: json!({ "seed": 7, "epoch": { "number": 3 } }),
    };
    commit(&storage, &manifest).unwrap();
}

fn ask(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_poseidon"));
    command.arg("checkpoint").args(arguments).output().unwrap()
}

fn says(arguments: &[&str]) -> String {
    let output = ask(arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// What is said on stderr by a command that fails with exit status 1.
fn complains(arguments: &[&str]) -> String {
    let output = ask(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {output:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// A folder with checkpoints of steps 100 and 200, and the remains of an attempt at 300.
fn place() -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 100, "fc");
    write(folder.path(), 200, "fc");
    fs::create_dir(folder.path().join("step-000000000300")).unwrap();
    let place = folder.path().to_str().unwrap().to_owned();
    (folder, place)
}

#[test]
fn a_place_is_listed_as_a_table_and_as_json() {
    let (folder, place) = place();
    let part = folder.path().join("step-000000000100/part-00001.safetensors");
    fs::remove_file(part).unwrap();
    let text = says(&["ls", &place]);
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert_eq!(lines[0], "step  created                  size  files  state", "{text}");
    assert!(lines[1].starts_with(" 100  2023-11-14T22:15:00Z"), "{text}");
    assert!(lines[1].contains("part-00001.safetensors") && lines[1].contains("missing"), "{text}");
    assert!(lines[2].starts_with(" 200  2023-11-14T22:16:40Z"), "{text}");
    assert!(lines[2].ends_with(" 2  complete"), "{text}");
    assert!(lines[3].ends_with(" 0 B      0  unfinished: it has no manifest"), "{text}");

    let found: Value = serde_json::from_str(&says(&["ls", &place, "--json"])).unwrap();
    assert_eq!(found.as_array().unwrap().len(), 3);
    assert_eq!(found[0]["state"], "unreadable");
    assert!(found[0]["why"].as_str().unwrap().contains("part-00001.safetensors"));
    assert_eq!(found[1]["step"], 200);
    assert_eq!(found[1]["state"], "complete");
    assert_eq!(found[1]["created"], "2023-11-14T22:16:40Z");
    let empty = folder.path().join("nothing");
    let text = says(&["ls", empty.to_str().unwrap()]);
    assert!(text.starts_with("there are no checkpoints in "), "{text}");
}

#[test]
fn a_checkpoint_is_shown_with_its_layers_and_facts() {
    let (_folder, place) = place();
    let text = says(&["inspect", &format!("file://{place}")]);
    assert!(text.starts_with("step     200\n"), "{text}");
    let expected = "\
layer    parameters  tensors  rule          steps  vectors  bytes
fc                6        2  momentum 0.9    200        1   48 B
1 layer           6                                          48 B
";
    assert!(text.contains(expected), "{text}");
    assert!(text.contains("job      2 workers\n"), "{text}");
    assert!(text.contains("\"number\": 3\n"), "{text}");

    let arguments = ["inspect", &place, "--step", "100", "--json"];
    let manifest: Value = serde_json::from_str(&says(&arguments)).unwrap();
    assert_eq!(manifest["step"], 100);
    assert_eq!(manifest["program"]["epoch"]["number"], 3);
    assert_eq!(manifest["layers"][0]["tensors"][0]["shape"], json!([2, 2]));

    let words = complains(&["inspect", &place, "--step", "150"]);
    assert!(words.contains("step 150") && words.contains("complete are 100, 200"), "{words}");
}

#[test]
fn damage_is_found_and_said() {
    let (folder, place) = place();
    let whole = says(&["verify", &place]);
    assert!(whole.starts_with("step 200 in ") && whole.contains("is whole: 1 layer"), "{whole}");

    let part = folder.path().join("step-000000000200/part-00001.safetensors");
    let mut bytes = fs::read(&part).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&part, &bytes).unwrap();
    let words = complains(&["verify", &place]);
    assert!(words.contains("step-000000000200/part-00001.safetensors"), "{words}");
    assert!(words.contains("the checksum of fc[4..6].state.0"), "{words}");
    assert!(says(&["verify", &place, "--step", "100"]).starts_with("step 100"));

    // Without a file the checkpoint cannot be opened. `verify` says so, others take an older one.
    fs::remove_file(&part).unwrap();
    let words = complains(&["verify", &place]);
    assert!(words.contains("step 200: ") && words.contains("is missing"), "{words}");
    let output = ask(&["inspect", &place]);
    assert!(String::from_utf8(output.stdout).unwrap().starts_with("step     100\n"));
    let words = String::from_utf8(output.stderr).unwrap();
    assert!(words.contains("step 200 is passed over") && words.contains("missing"), "{words}");
}

#[test]
fn an_export_has_the_models_tensors() {
    let (folder, place) = place();
    let file = folder.path().join("model.safetensors");
    let file = file.to_str().unwrap();
    let text = says(&["export", &place, file, "--step", "100"]);
    assert_eq!(text, format!("{file}: 2 tensors of step 100, 6 parameters\n"));
    let bytes = fs::read(file).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    let weight = json!({ "dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16] });
    assert_eq!(header["fc.weight"], weight);
    assert_eq!(header["fc.bias"]["data_offsets"], json!([16, 24]));
    let numbers = bytes[8 + len..].chunks_exact(4);
    let numbers: Vec<_> = numbers.map(|n| f32::from_le_bytes(n.try_into().unwrap())).collect();
    assert_eq!(numbers, [100.0, 101.0, 102.0, 103.0, 104.0, 105.0]);

    let words = complains(&["export", &place, &place]);
    assert!(words.contains("not a regular file"), "{words}");
}

#[test]
fn names_cannot_command_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 1, "f\u{1b}[2Jc");
    let place = folder.path().to_str().unwrap();
    assert!(!says(&["inspect", place]).contains('\u{1b}'));
    let part = folder.path().join("step-000000000001/part-00001.safetensors");
    let mut bytes = fs::read(&part).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&part, &bytes).unwrap();
    let words = complains(&["verify", place]);
    assert!(words.contains("[2Jc[4..6]") && !words.contains('\u{1b}'), "{words}");
}

#[test]
fn places_that_are_none_are_refused() {
    let words = complains(&["ls", "gs://bucket"]);
    assert!(words.contains("expected a path, file:///PATH or s3://BUCKET/PREFIX"), "{words}");
    let words = complains(&["verify", "/dev/null"]);
    assert!(words.contains("/dev/null"), "{words}");
    let folder = tempfile::tempdir().unwrap();
    let words = complains(&["inspect", folder.path().to_str().unwrap()]);
    assert!(words.contains("there is no complete checkpoint in"), "{words}");
}
