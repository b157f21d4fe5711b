//! Checkpoints that are written, found, read, exported and deleted, with nothing going wrong.

mod trial;

use poseidon_checkpoint::{
    Checkpoint, Directory, Dtype, Error, Keep, LayerFacts, Manifest, Piece, State, Storage,
    TensorFacts, Typed, What, commit, discard, list, open, prune, write_part,
};
use std::fs;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use trial::{Memory, assert_whole, latest, layers, manifest, numbers, pieces, write};

fn memory() -> (Arc<Memory>, Arc<dyn Storage>) {
    let memory = Arc::new(Memory::default());
    (memory.clone(), memory)
}

#[test]
fn what_any_number_of_nodes_has_written_is_read_as_one() {
    for nodes in [1, 2, 3, 5, 16] {
        let folder = tempfile::tempdir().unwrap();
        let storage = open(folder.path().to_str().unwrap()).unwrap();
        write(&*storage, 200, nodes).unwrap();
        let checkpoint = Checkpoint::open(&storage, 200).unwrap();
        assert_whole(&checkpoint);
        let parameters = numbers(200, "conv", &What::Parameters);
        for start in 0..=10 {
            for end in start..=10 {
                let read = checkpoint.read("conv", &What::Parameters, start..end).unwrap();
                assert_eq!(read, parameters[start..end]);
            }
        }
        assert_eq!(checkpoint.manifest().program["seed"], 7);
        assert_eq!(checkpoint.layer_bytes("conv"), 10 * 2 * 4);
        assert_eq!(checkpoint.contents("fc"), [What::Parameters, What::State(0), What::State(1)]);
    }
}

#[test]
fn reading_some_elements_reads_only_their_pieces() {
    let (memory, storage) = memory();
    write(&*storage, 200, 5).unwrap();
    let checkpoint = Checkpoint::open(&storage, 200).unwrap();
    memory.take_reads();
    // Nodes have two elements each. These are of nodes 1 and 2.
    checkpoint.read("conv", &What::State(0), 3..5).unwrap();
    let reads = memory.take_reads();
    let names: Vec<_> = reads.iter().map(|(name, _)| &name[18..]).collect();
    assert_eq!(names, ["part-00001.safetensors", "part-00002.safetensors"]);
    assert!(reads.iter().all(|(_, range)| range.end - range.start == 8), "{reads:?}");
}

#[test]
fn what_is_not_there_cannot_be_read() {
    let (_, storage) = memory();
    write(&*storage, 200, 2).unwrap();
    let checkpoint = Checkpoint::open(&storage, 200).unwrap();
    let residual = What::other("residual.0").unwrap();
    for (layer, what, range, words) in [
        ("pool", What::Parameters, 0..1, "found no such layer"),
        ("fc", What::State(2), 0..1, "state.2: expected elements 0..1, found none of element 0"),
        ("fc", residual, 0..1, "residual.0: expected elements 0..1"),
        ("fc", What::Parameters, 0..8, "expected elements of 0..7, found 0..8"),
        ("fc", What::Parameters, usize::MAX..usize::MAX, "expected elements of 0..7"),
    ] {
        let error = checkpoint.read(layer, &what, range).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains(&format!("'{layer}'")), "{error}");
    }
}

#[test]
fn other_things_of_a_layer_may_have_gaps() {
    let (_, storage) = memory();
    let residual = What::other("residual.0").unwrap();
    let mut all = pieces(200, 0, 1);
    for start in [0, 5] {
        let values = vec![start as f32; 2];
        all.push(Piece { layer: "conv".into(), what: residual.clone(), start, values });
    }
    let part = write_part(&*storage, 200, 0, &all).unwrap();
    commit(&*storage, &manifest(200, vec![part])).unwrap();
    let checkpoint = Checkpoint::open(&storage, 200).unwrap();
    assert_eq!(checkpoint.read("conv", &residual, 5..7).unwrap(), [5.0, 5.0]);
    checkpoint.read("conv", &residual, 1..3).unwrap_err();
    assert_eq!(checkpoint.contents("conv").len(), 3);
}

#[test]
fn a_file_has_the_bytes_that_the_documentation_says() {
    let (memory, storage) = memory();
    let values = [1.0_f32, -2.0];
    let piece = Piece { layer: "a".into(), what: What::Parameters, start: 3, values };
    let facts = write_part(&*storage, 20, 1, &[piece]).unwrap();
    let header = r#"{"__metadata__":{"a[3..5].parameters":"28a0ba9c345d3723","#.to_owned()
        + r#""format":"poseidon-checkpoint-part","part":"1","step":"20"},"#
        + r#""a[3..5].parameters":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let bytes = memory.object("step-000000000020/part-00001.safetensors");
    let padded = header.len().next_multiple_of(8);
    assert_eq!(bytes[..8], (padded as u64).to_le_bytes());
    assert_eq!(String::from_utf8_lossy(&bytes[8..8 + padded]), format!("{header:padded$}"));
    assert_eq!(bytes[8 + padded..], [0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0]);
    assert_eq!((facts.bytes, facts.header_bytes), (bytes.len() as u64, 8 + padded as u64));

    let mut manifest = manifest(20, vec![facts]);
    manifest.layers.truncate(1);
    commit(&*storage, &manifest).unwrap();
    let text = String::from_utf8(memory.object("step-000000000020/manifest.json")).unwrap();
    let expected = r#"{
  "checksum": "ad5f427dbeec8eb0",
  "format": "poseidon-checkpoint",
  "version": 1,
  "step": 20,
  "created": "2023-11-14T22:13:40Z",
  "poseidon": "0.1.0",
  "workers": 1,
  "layers": [
    {
      "name": "conv",
      "len": 10,
      "rule": "momentum",
      "steps": 200,
      "vectors": 1,
      "tensors": [
        {
          "name": "conv.weight",
          "shape": [
            2,
            4
          ]
        },
        {
          "name": "conv.bias",
          "shape": [
            2
          ]
        }
      ]
    }
  ],
  "parts": [
    {
      "part": 1,
      "bytes": 208,
      "header_bytes": 200,
      "header_checksum": "0a090c34f57d630e",
      "pieces": 1
    }
  ],
  "program": {
    "seed": 7
  }
}
"#;
    assert_eq!(text, expected);
}

#[test]
fn an_export_is_a_plain_safetensors_file() {
    let (_, storage) = memory();
    write(&*storage, 200, 3).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    fs::write(&path, "an older file").unwrap();
    let mut told = Vec::new();
    let checkpoint = Checkpoint::open(&storage, 200).unwrap();
    checkpoint.export(&path, &mut |done, total| told.push((done, total))).unwrap();
    assert_eq!(told.first(), Some(&(0, 17 * 4)));
    assert_eq!(told.last(), Some(&(17 * 4, 17 * 4)));

    let bytes = fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let numbers_of = |name: &str| -> Vec<f32> {
        let data = file.tensor(name).unwrap().data();
        data.chunks_exact(4).map(|n| f32::from_le_bytes(n.try_into().unwrap())).collect()
    };
    let conv = numbers(200, "conv", &What::Parameters);
    assert_eq!(file.tensor("conv.weight").unwrap().shape(), [2, 4]);
    assert_eq!(numbers_of("conv.weight"), conv[..8]);
    assert_eq!(numbers_of("conv.bias"), conv[8..]);
    assert_eq!(file.tensor("fc").unwrap().shape(), [7]);
    assert_eq!(numbers_of("fc"), numbers(200, "fc", &What::Parameters));
    assert_eq!(file.len(), 3);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
}

/// A layer of one tensor.
fn typed(name: &str, shape: &[usize], private: bool) -> LayerFacts {
    LayerFacts {
        name: name.into(),
        len: shape.iter().product(),
        rule: "none".into(),
        steps: 0,
        vectors: 0,
        tensors: vec![TensorFacts { name: name.into(), shape: shape.into() }],
        private,
    }
}

/// Three bytes come before wider numbers, which would not be aligned in this order.
fn of_several_types(storage: &dyn Storage) {
    let piece = |layer: &str, start, dtype, bytes| {
        let values = Typed { dtype, bytes };
        Piece { layer: layer.into(), what: What::Parameters, start, values }
    };
    let pieces = [
        piece("flags", 0, Dtype::BOOL, &[1, 0, 1]),
        piece("own", 0, Dtype::U8, b"notes"),
        piece("count", 0, Dtype::I64, &[7, 0, 0, 0, 0, 0, 0, 1]),
        piece("half", 1, Dtype::BF16, &[0x80, 0x3f]),
        piece("half", 0, Dtype::BF16, &[0x81, 0x3f]),
    ];
    let part = write_part(storage, 200, 0, &pieces).unwrap();
    let layers = vec![
        typed("flags", &[3], false),
        typed("own", &[5], true),
        typed("count", &[], false),
        typed("half", &[1, 2], false),
        typed("nothing", &[0, 4], false),
    ];
    commit(storage, &Manifest { layers, ..manifest(200, vec![part]) }).unwrap();
}

#[test]
fn numbers_of_every_type_come_back_as_they_were() {
    let (memory, storage) = memory();
    of_several_types(&*storage);
    let part = memory.object("step-000000000200/part-00000.safetensors");
    safetensors::SafeTensors::deserialize(&part).unwrap();
    let checkpoint = Checkpoint::open(&storage, 200).unwrap();
    checkpoint.verify(&mut |_, _| {}).unwrap();
    let read = |layer: &str, range| checkpoint.read_bytes(layer, &What::Parameters, range).unwrap();
    assert_eq!(read("flags", 1..3), (Dtype::BOOL, vec![0, 1]));
    assert_eq!(read("count", 0..1), (Dtype::I64, vec![7, 0, 0, 0, 0, 0, 0, 1]));
    assert_eq!(read("half", 0..2), (Dtype::BF16, vec![0x81, 0x3f, 0x80, 0x3f]));
    assert_eq!(read("half", 1..2), (Dtype::BF16, vec![0x80, 0x3f]));
    assert_eq!(read("nothing", 0..0), (Dtype::F32, Vec::new()));
    let words = checkpoint.read("half", &What::Parameters, 0..2).unwrap_err().to_string();
    assert!(words.contains("'half'") && words.contains("type F32, found BF16"), "{words}");
}

#[test]
fn an_export_has_the_models_own_types_and_nothing_private() {
    let (_, storage) = memory();
    of_several_types(&*storage);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    Checkpoint::open(&storage, 200).unwrap().export(&path, &mut |_, _| {}).unwrap();
    let bytes = fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    for (name, dtype, shape, data) in [
        ("flags", Dtype::BOOL, &[3][..], &[1, 0, 1][..]),
        ("count", Dtype::I64, &[], &[7, 0, 0, 0, 0, 0, 0, 1]),
        ("half", Dtype::BF16, &[1, 2], &[0x81, 0x3f, 0x80, 0x3f]),
        ("nothing", Dtype::F32, &[0, 4], &[]),
    ] {
        let tensor = file.tensor(name).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape(), tensor.data()), (dtype, shape, data));
        let offset = tensor.data().as_ptr().addr() - bytes.as_ptr().addr();
        assert_eq!(offset % (dtype.bitsize() / 8), 0, "{name} is not aligned");
    }
    assert_eq!(file.len(), 4);
}

#[test]
fn one_thing_of_a_layer_has_one_type() {
    let (_, storage) = memory();
    let piece = |start, dtype, bytes: &'static [u8]| Piece {
        layer: "half".into(),
        what: What::Parameters,
        start,
        values: Typed { dtype, bytes },
    };
    let pieces = [piece(0, Dtype::BF16, &[0; 2]), piece(1, Dtype::F16, &[0; 2])];
    let part = write_part(&*storage, 200, 0, &pieces).unwrap();
    let layers = vec![typed("half", &[2], false)];
    commit(&*storage, &Manifest { layers, ..manifest(200, vec![part]) }).unwrap();
    let words = Checkpoint::open(&storage, 200).unwrap_err().to_string();
    assert!(words.contains("'half'") && words.contains("numbers of one type"), "{words}");
    for (dtype, bytes) in [(Dtype::BF16, &[0_u8; 3][..]), (Dtype::F4, &[0; 2])] {
        let piece = Piece { values: Typed { dtype, bytes }, ..piece(0, dtype, &[]) };
        let words = write_part(&*storage, 300, 0, &[piece]).unwrap_err().to_string();
        assert!(words.contains("expected whole ones"), "{words}");
    }
}

#[test]
fn an_export_replaces_nothing_but_files() {
    let (_, storage) = memory();
    write(&*storage, 200, 1).unwrap();
    let checkpoint = Checkpoint::open(&storage, 200).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (target, link) = (folder.path().join("target"), folder.path().join("link"));
    fs::write(&target, "mine").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    for path in [&link, &folder.path().to_path_buf()] {
        let error = checkpoint.export(path, &mut |_, _| {}).unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
        assert!(error.contains(&path.display().to_string()), "{error}");
    }
    assert_eq!(fs::read_to_string(&target).unwrap(), "mine");
    let nowhere = folder.path().join("no/such/folder");
    checkpoint.export(&nowhere, &mut |_, _| {}).unwrap_err();
}

#[test]
fn a_complete_checkpoint_is_not_written_again() {
    let (_, storage) = memory();
    write(&*storage, 200, 2).unwrap();
    let error = write(&*storage, 200, 2).unwrap_err();
    assert!(matches!(error, Error::Complete { step: 200, .. }), "{error}");
    let error = commit(&*storage, &manifest(200, Vec::new())).unwrap_err();
    assert!(matches!(error, Error::Complete { step: 200, .. }), "{error}");
    assert_eq!(latest(&storage), Some(200));
    discard(&*storage, 200).unwrap();
    assert_eq!(latest(&storage), None);
    write(&*storage, 200, 3).unwrap();
    assert_eq!(latest(&storage), Some(200));
}

#[test]
fn a_part_that_was_written_elsewhere_makes_no_checkpoint() {
    let ((_, storage), (_, elsewhere)) = (memory(), memory());
    let here = write_part(&*storage, 200, 0, &pieces(200, 0, 2)).unwrap();
    let there = write_part(&*elsewhere, 200, 1, &pieces(200, 1, 2)).unwrap();
    let error = commit(&*storage, &manifest(200, vec![here, there])).unwrap_err();
    let words = error.to_string();
    assert!(words.contains("step-000000000200/part-00001.safetensors of memory"), "{words}");
    assert_eq!(latest(&storage), None);
}

#[test]
fn a_place_lists_what_it_has() {
    let (memory, storage) = memory();
    assert_eq!(list(&*storage).unwrap().len(), 0);
    write(&*storage, 100, 2).unwrap();
    write(&*storage, 200, 2).unwrap();
    write(&*storage, 300, 2).unwrap();
    write_part(&*storage, 400, 1, &pieces(400, 1, 2)).unwrap();
    memory.remove("step-000000000200/part-00001.safetensors");
    let mut shorter = memory.object("step-000000000300/part-00000.safetensors");
    shorter.pop();
    memory.set("step-000000000300/part-00000.safetensors", shorter);
    let found = list(&*storage).unwrap();
    assert_eq!(found.iter().map(|one| one.step).collect::<Vec<_>>(), [100, 200, 300, 400]);
    assert_eq!(found.iter().map(|one| one.parts).collect::<Vec<_>>(), [2, 1, 2, 1]);
    assert_eq!(found[0].state, State::Complete);
    assert_eq!(found[0].created, Some(manifest(100, Vec::new()).created));
    let words = |i: usize| match &found[i].state {
        State::Unreadable(why) => why.clone(),
        other => panic!("{other:?}"),
    };
    assert!(words(1).contains("step-000000000200/part-00001.safetensors of memory is missing"));
    assert!(words(2).contains("part-00000.safetensors in memory is damaged: its size"));
    assert_eq!(found[3].state, State::Unfinished);
    assert_eq!(found[3].created, None);

    let found = Checkpoint::latest(&storage).unwrap();
    assert_eq!(found.checkpoint.unwrap().manifest().step, 100);
    assert_eq!(found.damaged.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [300, 200]);
}

#[test]
fn a_step_that_is_not_there_hears_which_ones_are() {
    let (_, storage) = memory();
    let words = || Checkpoint::open(&storage, 150).unwrap_err().to_string();
    assert!(words().contains("there is no complete checkpoint at all"), "{}", words());
    write(&*storage, 100, 1).unwrap();
    write(&*storage, 200, 1).unwrap();
    assert!(words().contains("complete are 100, 200"), "{}", words());
}

#[test]
fn old_checkpoints_are_deleted_and_the_newest_never() {
    let folder = tempfile::tempdir().unwrap();
    let storage: Arc<dyn Storage> = Arc::new(Directory::new(folder.path()));
    for step in [100, 200, 300] {
        write(&*storage, step, 2).unwrap();
    }
    // Attempts that got no manifest. The one after the newest may still be written.
    write_part(&*storage, 150, 0, &pieces(150, 0, 2)).unwrap();
    write_part(&*storage, 400, 0, &pieces(400, 0, 2)).unwrap();
    fs::write(folder.path().join("notes.txt"), "mine").unwrap();

    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_001_000);
    let prune = |count, age| prune(&storage, &Keep { count, age }, now).unwrap();
    assert_eq!(prune(Some(2), None), [100, 150]);
    assert_eq!(prune(Some(2), None), [0; 0]);
    let steps = || list(&*storage).unwrap().iter().map(|one| one.step).collect::<Vec<_>>();
    assert_eq!(steps(), [200, 300, 400]);
    assert_eq!(prune(None, Some(Duration::from_secs(1))), [200]);
    assert_eq!(prune(Some(0), Some(Duration::ZERO)), [0; 0]);
    assert_eq!(latest(&storage), Some(300));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "300, 400 and the notes");
}

#[test]
fn pruning_keeps_the_newest_one_that_can_be_read() {
    let (memory, storage) = memory();
    write(&*storage, 100, 2).unwrap();
    write(&*storage, 200, 2).unwrap();
    memory.remove("step-000000000200/part-00000.safetensors");
    let keep = Keep { count: Some(1), age: None };
    assert_eq!(prune(&storage, &keep, SystemTime::now()).unwrap(), [0; 0]);
    assert_eq!(latest(&storage), Some(100));
}

#[test]
fn nonsense_is_not_written() {
    let (memory, storage) = memory();
    let piece = |start, values: &[f32]| Piece {
        layer: "conv".into(),
        what: What::Parameters,
        start,
        values: values.to_vec(),
    };
    let twice = write_part(&*storage, 1, 0, &[piece(0, &[1.0]), piece(0, &[1.0])]).unwrap_err();
    assert!(twice.to_string().contains("expected conv[0..1].parameters once"), "{twice}");
    let past = write_part(&*storage, 1, 0, &[piece(usize::MAX, &[1.0])]).unwrap_err();
    assert!(past.to_string().contains("layer 'conv'"), "{past}");

    let refused = |change: &dyn Fn(&mut Manifest)| {
        let mut manifest = manifest(1, Vec::new());
        change(&mut manifest);
        commit(&*storage, &manifest).unwrap_err().to_string()
    };
    let words = refused(&|manifest| manifest.layers[0].tensors[0].shape[0] = 3);
    assert!(words.contains("tensors of layer 'conv': expected 10 elements, found 14"), "{words}");
    let words = refused(&|manifest| manifest.layers.push(layers()[1].clone()));
    assert!(words.contains("name of layer 'fc'"), "{words}");
    let words = refused(&|manifest| manifest.layers[0].tensors[0].name = "fc".into());
    assert!(words.contains("tensor 'fc' of layer 'fc'"), "{words}");
    let words =
        refused(&|manifest| manifest.created = SystemTime::UNIX_EPOCH - Duration::from_secs(9));
    assert!(words.contains("between 1970 and 9999"), "{words}");
    let words = refused(&|manifest| manifest.program = "x".repeat(40 << 20).into());
    assert!(words.contains("its size: expected at most 33554432 bytes"), "{words}");
    assert_eq!(memory.names(), [""; 0]);
}
