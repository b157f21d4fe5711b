//! Checkpoints that are not what was written: each is refused with the file, the layer and the
//! difference.

mod trial;

use poseidon_checkpoint::{
    Checkpoint, ExpectedLayer, Manifest, PartFacts, Piece, Storage, What, commit, write_part,
};
use proptest::prelude::*;
use std::sync::Arc;
use trial::{Memory, latest, layers, load, manifest, pieces, write};
use xxhash_rust::xxh3::xxh3_64;

const MANIFEST: &str = "step-000000000200/manifest.json";
const PART: &str = "step-000000000200/part-00001.safetensors";

fn whole() -> (Arc<Memory>, Arc<dyn Storage>) {
    let memory = Arc::new(Memory::default());
    write(&*memory, 200, 2).unwrap();
    (memory.clone(), memory)
}

/// The words with which step 200 is refused.
fn refusal(storage: &Arc<dyn Storage>) -> String {
    load(storage, 200).unwrap_err().to_string()
}

fn assert_says(words: &str, facts: &[&str]) {
    for fact in facts {
        assert!(words.contains(fact), "'{fact}' is not in: {words}");
    }
}

#[test]
fn every_byte_of_every_file_counts() {
    let (memory, storage) = whole();
    for name in memory.names() {
        let right = memory.object(&name);
        for (at, &byte) in right.iter().enumerate() {
            for flipped in [byte ^ (1 << (at % 8)), !byte] {
                let mut wrong = right.clone();
                wrong[at] = flipped;
                memory.set(&name, wrong);
                assert!(load(&storage, 200).is_err(), "byte {at} of {name}: {flipped}");
            }
        }
        memory.set(&name, right);
    }
    assert_eq!(latest(&storage), Some(200));
}

#[test]
fn every_length_but_the_right_one_is_refused() {
    let (memory, storage) = whole();
    for name in memory.names() {
        let right = memory.object(&name);
        for len in (0..right.len()).chain(right.len() + 1..right.len() + 9) {
            let mut wrong = right.clone();
            wrong.resize(len, b' ');
            memory.set(&name, wrong);
            assert!(load(&storage, 200).is_err(), "{len} bytes of {name}");
        }
        memory.set(&name, right);
    }
    assert_eq!(latest(&storage), Some(200));
}

#[test]
fn a_truncated_part_is_refused() {
    let (memory, storage) = whole();
    let mut bytes = memory.object(PART);
    let whole = bytes.len();
    bytes.truncate(100);
    memory.set(PART, bytes);
    let expected = format!("its size: expected {whole} bytes, found 100 bytes");
    assert_says(&refusal(&storage), &[PART, "memory", "damaged", &expected]);
}

#[test]
fn a_flipped_bit_of_a_number_is_refused_with_its_layer() {
    let (memory, storage) = whole();
    let mut bytes = memory.object(PART);
    *bytes.last_mut().unwrap() ^= 1;
    memory.set(PART, bytes);
    // The header is right, so what does not touch the number can be read.
    let checkpoint = Checkpoint::open(&storage, 200).unwrap();
    checkpoint.read("fc", &What::State(1), 0..3).unwrap();
    checkpoint.read("fc", &What::State(0), 0..7).unwrap();
    let words = checkpoint.read("fc", &What::State(1), 3..4).unwrap_err().to_string();
    assert_says(&words, &[PART, "memory", "damaged", "checksum of fc[3..7].state.1", "expected"]);
    assert_eq!(refusal(&storage), words);
}

#[test]
fn a_flipped_bit_of_a_header_is_refused() {
    let (memory, storage) = whole();
    let mut bytes = memory.object(PART);
    bytes[20] ^= 1;
    memory.set(PART, bytes);
    assert_says(&refusal(&storage), &[PART, "memory", "the checksum of its header: expected"]);
}

#[test]
fn a_changed_manifest_is_refused() {
    let (memory, storage) = whole();
    let text = String::from_utf8(memory.object(MANIFEST)).unwrap();
    memory.set(MANIFEST, text.replace("\"steps\": 200", "\"steps\": 300").into());
    assert_says(&refusal(&storage), &[MANIFEST, "memory", "its checksum: expected"]);
}

#[test]
fn a_newer_version_is_refused_and_not_passed_over() {
    let (memory, storage) = whole();
    write(&*storage, 100, 2).unwrap();
    let text = String::from_utf8(memory.object(MANIFEST)).unwrap();
    memory.set(MANIFEST, text.replace("\"version\": 1", "\"version\": 2").into());
    let facts = [MANIFEST, "memory", "newer version", "version 2", "up to 1", "upgrade poseidon"];
    assert_says(&refusal(&storage), &facts);
    assert_says(&Checkpoint::latest(&storage).unwrap_err().to_string(), &facts);
}

#[test]
fn another_programs_file_is_refused() {
    let (memory, storage) = whole();
    for (text, words) in [
        (r#"{"format": "other", "version": 1}"#, "expected poseidon-checkpoint, found other"),
        (r#"{"format": "poseidon-checkpoint", "version": 0}"#, "its version: expected 1, found 0"),
        (r#"{"format": "poseidon-checkpoint", "version": 1}"#, "its checksum"),
        (r#"{"format": 1}"#, "its JSON"),
        ("[]", "its JSON"),
        ("\u{0}", "its JSON"),
    ] {
        memory.set(MANIFEST, text.into());
        assert_says(&refusal(&storage), &[MANIFEST, "memory", words]);
    }
}

#[test]
fn a_manifest_in_the_wrong_folder_is_refused() {
    let (memory, storage) = whole();
    memory.set("step-000000000300/manifest.json", memory.object(MANIFEST));
    let words = load(&storage, 300).unwrap_err().to_string();
    assert_says(&words, &["step-000000000300/manifest.json", "its step: expected 300, found 200"]);
}

#[test]
fn a_missing_part_is_refused() {
    let (memory, storage) = whole();
    let bytes = memory.object(PART).len();
    memory.remove(PART);
    let expected = format!("that it has {bytes} bytes");
    assert_says(&refusal(&storage), &[PART, "memory", "is missing", &expected]);
}

#[test]
fn a_part_of_another_attempt_is_refused() {
    let (memory, storage) = whole();
    let other = Memory::default();
    // The same layers and ranges, and other numbers.
    write_part(&other, 200, 1, &pieces(300, 1, 2)).unwrap();
    memory.set(PART, other.object(PART));
    assert_says(&refusal(&storage), &[PART, "the checksum of its header"]);
}

/// Commits parts with `change`d pieces, and returns the words with which they are refused.
fn changed(change: impl Fn(&mut Vec<Piece<Vec<f32>>>)) -> String {
    let storage: Arc<dyn Storage> = Arc::new(Memory::default());
    let mut pieces = pieces(200, 1, 2);
    change(&mut pieces);
    let first = write_part(&*storage, 200, 0, &self::pieces(200, 0, 2)).unwrap();
    let second = write_part(&*storage, 200, 1, &pieces).unwrap();
    commit(&*storage, &manifest(200, vec![first, second])).unwrap();
    refusal(&storage)
}

#[test]
fn a_layer_with_a_gap_is_refused() {
    let words = changed(|pieces| {
        pieces[0].start = 6;
        pieces[0].values.pop();
    });
    assert_says(&words, &["'conv'", PART, "parameters: expected elements from 5 on, found 6..10"]);
}

#[test]
fn a_layer_without_its_end_is_refused() {
    let words = changed(|pieces| pieces[0].values.truncate(4));
    assert_says(
        &words,
        &["'conv'", MANIFEST, "parameters: expected elements of 0..10, found 0..9"],
    );
    let words = changed(|pieces| drop(pieces.remove(1)));
    assert_says(&words, &["'conv'", MANIFEST, "state.0: expected elements of 0..10, found 0..5"]);
}

#[test]
fn elements_that_are_there_twice_are_refused() {
    let words = changed(|pieces| {
        pieces[0].start = 4;
        pieces[0].values.push(0.0);
    });
    assert_says(&words, &["'conv'", "parameters: expected elements from 5 on, found 4..10"]);
}

#[test]
fn elements_past_the_layers_end_are_refused() {
    let words = changed(|pieces| pieces[0].values.push(0.0));
    assert_says(&words, &["'conv'", PART, "expected elements of 0..10, found 5..11"]);
}

#[test]
fn numbers_of_nothing_in_the_manifest_are_refused() {
    let words = changed(|pieces| pieces[0].layer = "pool".into());
    assert_says(&words, &["'pool'", PART, "parameters: expected no such layer"]);
    let words = changed(|pieces| pieces[0].what = What::State(1));
    assert_says(&words, &["'conv'", PART, "state.1: expected 1 vectors"]);
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let (_, storage) = whole();
    let checkpoint = Checkpoint::open(&storage, 200).unwrap();
    let conv = ExpectedLayer { name: "conv", len: 10, rule: "momentum", vectors: 1 };
    let fc = ExpectedLayer { name: "fc", len: 7, rule: "adam", vectors: 2 };
    let pool = ExpectedLayer { name: "pool", ..conv };
    checkpoint.check_layers(&[fc, conv]).unwrap();
    for (expected, layer, difference) in [
        (vec![conv, fc, pool], "'pool'", "the job has this layer, the checkpoint does not"),
        (vec![conv], "'fc'", "the checkpoint has this layer, the job does not"),
        (
            vec![conv, ExpectedLayer { len: 8, ..fc }],
            "'fc'",
            "the job expects 8 elements, the checkpoint has 7",
        ),
        (
            vec![ExpectedLayer { rule: "sgd", ..conv }, fc],
            "'conv'",
            "the job's update rule is 'sgd', the checkpoint's is 'momentum'",
        ),
        (
            vec![ExpectedLayer { vectors: 0, ..conv }, fc],
            "'conv'",
            "the job's update rule remembers 0 vectors, the checkpoint has 1",
        ),
    ] {
        let words = checkpoint.check_layers(&expected).unwrap_err().to_string();
        assert_says(&words, &[MANIFEST, "memory", layer, difference]);
    }
}

/// Puts a part with this header there, whose checksum is right.
fn forge(memory: &Memory, header: &[u8], numbers: usize) -> PartFacts {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    let header_checksum = format!("{:016x}", xxh3_64(&bytes));
    let header_bytes = bytes.len() as u64;
    bytes.resize(bytes.len() + numbers, 0);
    let facts =
        PartFacts { part: 1, bytes: bytes.len() as u64, header_bytes, header_checksum, pieces: 1 };
    memory.set(PART, bytes);
    facts
}

/// The words with which a checkpoint with a forged part is refused, if it is.
fn with_header(header: &[u8], numbers: usize) -> Option<String> {
    let memory = Arc::new(Memory::default());
    let facts = forge(&memory, header, numbers);
    let manifest = Manifest { layers: vec![], ..manifest(200, vec![facts]) };
    commit(&*memory, &manifest).unwrap();
    let storage: Arc<dyn Storage> = memory;
    load(&storage, 200).err().map(|error| error.to_string())
}

#[test]
fn headers_that_nobody_has_written_are_refused() {
    let with = |name: &str, info: &str| {
        format!(r#"{{"__metadata__":{{"a[0..2].parameters":"0"}},"{name}":{info}}}"#)
    };
    let good = r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let name = "a[0..2].parameters";
    let deep = "[".repeat(1_000_000);
    for (header, words) in [
        ("".into(), "its header"),
        ("{}".into(), "the size of its numbers: expected 8, found 0"),
        (deep, "its header"),
        (with(name, good).replace("\"0\"", "0"), "its header"),
        (with("a", good), "the name of a piece: expected LAYER[START..END].WHAT, found a"),
        (with("a[1..3].parameters", good), "checksum of a[1..3].parameters: expected one"),
        (with(name, &good.replace("F32", "F4").replace("[2]", "[16]")), "found F4 [16]"),
        (with(name, &good.replace("F32", "F33")), "its header"),
        (
            with(name, &good.replace("[2]", "[1,2]")),
            "expected [2] of whole bytes, found F32 [1, 2]",
        ),
        (with(name, &good.replace("[2]", "[3]")), "its header"),
        (with(name, &good.replace("[0,8]", "[8,0]")), "its header"),
        (with(name, &good.replace("[0,8]", "[4,12]")), "its header"),
        (with(name, &good.replace("[2]", "[4611686018427387904,4]")), "its header"),
        (with(name, good), "layer 'a'"),
    ] {
        let refused = with_header(header.as_bytes(), 8).unwrap();
        assert_says(&refused, &[PART, "memory", words]);
    }
    let refused = with_header(with(name, good).as_bytes(), 12).unwrap();
    assert_says(&refused, &[PART, "the size of its numbers: expected 12, found 8"]);
}

#[test]
fn a_header_of_another_length_than_it_says_is_refused() {
    let memory = Arc::new(Memory::default());
    let mut facts = forge(&memory, b"{}", 8);
    facts.header_bytes += 4;
    facts.header_checksum = format!("{:016x}", xxh3_64(&memory.object(PART)[..14]));
    let manifest = Manifest { layers: vec![], ..manifest(200, vec![facts]) };
    commit(&*memory, &manifest).unwrap();
    let storage: Arc<dyn Storage> = memory;
    assert_says(&refusal(&storage), &[PART, "the length of its header: expected 6, found 2"]);
}

/// Puts a manifest with this text there, whose checksum is right.
fn seal(memory: &Memory, text: &str) {
    let beginning = "{\n  \"checksum\": \"";
    let mut bytes = text.as_bytes().to_vec();
    let digits = beginning.len()..beginning.len() + 16;
    bytes[digits.clone()].copy_from_slice(b"0000000000000000");
    let checksum = format!("{:016x}", xxh3_64(&bytes));
    bytes[digits].copy_from_slice(checksum.as_bytes());
    memory.set(MANIFEST, bytes);
}

#[test]
fn manifests_that_nobody_has_written_are_refused() {
    let (memory, storage) = whole();
    let text = String::from_utf8(memory.object(MANIFEST)).unwrap();
    seal(&memory, &text);
    assert_eq!(load(&storage, 200).map_err(|error| error.to_string()), Ok(()));
    for (from, to, words) in [
        ("\"len\": 7", "\"len\": 18446744073709551615", "layer 'fc'"),
        ("\"len\": 7", "\"len\": 18446744073709551616", "its JSON"),
        ("\"len\": 7", "\"len\": -1", "its JSON"),
        (
            "\"len\": 10",
            "\"len\": 11",
            "the tensors of layer 'conv': expected 11 elements, found 10",
        ),
        ("\"vectors\": 2", "\"vectors\": 18446744073709551615", "vectors of layer 'fc'"),
        ("\"vectors\": 2", "\"vectors\": 3", "layer 'fc'"),
        ("\"name\": \"fc\"", "\"name\": \"conv\"", "the name of layer 'conv'"),
        ("\"part\": 1", "\"part\": 0", "the number of part 0"),
        ("\"part\": 1", "\"part\": 7", "part-00007.safetensors of memory is missing"),
        ("\"pieces\": 5", "\"pieces\": 4", "the number of its pieces: expected 4, found 5"),
        ("\"header_bytes\": ", "\"header_bytes\": 99999", "the header of part 0"),
        ("\"created\": \"2", "\"created\": \"x", "its JSON"),
        ("\n            4\n", "\n            4611686018427387904\n", "the tensors of layer 'conv'"),
    ] {
        assert!(text.contains(from), "{from}: {text}");
        seal(&memory, &text.replacen(from, to, 1));
        assert_says(&refusal(&storage), &[MANIFEST.split_at(17).0, "memory", words]);
    }
}

#[test]
fn a_manifest_too_large_to_be_one_is_not_read() {
    let (memory, storage) = whole();
    memory.set(MANIFEST, vec![b'['; (32 << 20) + 1]);
    memory.take_reads();
    let words = "its size: expected at most 33554432 bytes, found 33554433";
    assert_says(&refusal(&storage), &[MANIFEST, words]);
    assert_eq!(memory.take_reads(), []);
}

proptest! {
    /// The checksum is right, so what is tried is the reader of headers.
    #[test]
    fn no_header_makes_it_panic(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        cuts in any::<bool>(),
    ) {
        let (memory, _) = whole();
        let part = memory.object(PART);
        let len = u64::from_le_bytes(part[..8].try_into().unwrap()) as usize;
        let mut header = part[8..8 + len].to_vec();
        for (at, byte) in changes {
            let at = at.index(header.len());
            header[at] = byte;
        }
        if cuts {
            header.truncate(cut.index(len));
        }
        with_header(&header, part.len() - 8 - len);
    }

    #[test]
    fn no_manifest_makes_it_panic(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), "[0-9\"{}\\[\\],:a-z]"), 1..6),
    ) {
        let (memory, storage) = whole();
        let mut text = memory.object(MANIFEST);
        for (at, byte) in changes {
            // After the checksum.
            let at = 40 + at.index(text.len() - 40);
            text[at] = byte.as_bytes()[0];
        }
        seal(&memory, std::str::from_utf8(&text).unwrap());
        if let Ok(checkpoint) = Checkpoint::open(&storage, 200) {
            let _ = checkpoint.verify(&mut |_, _| {});
            for layer in layers() {
                let _ = checkpoint.read(&layer.name, &What::Parameters, 0..layer.len);
            }
        }
    }
}
