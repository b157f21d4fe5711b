//! A small checkpoint, and a storage whose writes can be made to fail.

// Every test file uses its own part of this.
#![allow(dead_code, reason = "each test file uses a part of it")]

use poseidon_checkpoint::{
    Checkpoint, Entry, LayerFacts, Manifest, PartFacts, Piece, Result, Storage, StorageError,
    TensorFacts, What, commit, write_part,
};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

/// Two layers: one is cut into tensors, one is not.
pub(crate) fn layers() -> Vec<LayerFacts> {
    let tensor =
        |name: &str, shape: &[usize]| TensorFacts { name: name.into(), shape: shape.into() };
    let conv = LayerFacts {
        name: "conv".into(),
        len: 10,
        rule: "momentum".into(),
        steps: 200,
        vectors: 1,
        tensors: vec![tensor("conv.weight", &[2, 4]), tensor("conv.bias", &[2])],
        private: false,
    };
    let fc = LayerFacts {
        name: "fc".into(),
        len: 7,
        rule: "adam".into(),
        steps: 200,
        vectors: 2,
        tensors: Vec::new(),
        private: false,
    };
    vec![conv, fc]
}

/// What is kept of a layer.
pub(crate) fn contents(layer: &LayerFacts) -> Vec<What> {
    [What::Parameters].into_iter().chain((0..layer.vectors).map(What::State)).collect()
}

/// The numbers of a layer at a step. No two are equal.
pub(crate) fn numbers(step: u64, layer: &str, what: &What) -> Vec<f32> {
    let kind = match what {
        What::State(vector) => 1 + vector,
        _ => 0,
    };
    let first = step as f32 * 1000.0 + kind as f32 * 100.0 + if layer == "fc" { 50.0 } else { 0.0 };
    let len = layers().iter().find(|facts| facts.name == layer).unwrap().len;
    (0..len).map(|i| first + i as f32).collect()
}

/// The manifest of a checkpoint with these parts.
pub(crate) fn manifest(step: u64, parts: Vec<PartFacts>) -> Manifest {
    Manifest {
        step,
        created: SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + step),
        poseidon: "0.1.0".into(),
        workers: parts.len(),
        layers: layers(),
        parts,
        program: json!({ "seed": 7 }),
    }
}

/// What one of `nodes` nodes writes: its share of the elements of every layer.
pub(crate) fn pieces(step: u64, node: u32, nodes: u32) -> Vec<Piece<Vec<f32>>> {
    let mut pieces = Vec::new();
    for layer in layers() {
        let cut = |node: u32| layer.len * node as usize / nodes as usize;
        let range = cut(node)..cut(node + 1);
        for what in contents(&layer) {
            let values = numbers(step, &layer.name, &what)[range.clone()].to_vec();
            pieces.push(Piece { layer: layer.name.clone(), what, start: range.start, values });
        }
    }
    pieces
}

/// Writes a whole checkpoint as `nodes` nodes.
pub(crate) fn write(storage: &dyn Storage, step: u64, nodes: u32) -> Result<()> {
    let part = |node| write_part(storage, step, node, &pieces(step, node, nodes));
    let parts = (0..nodes).map(part).collect::<Result<_>>()?;
    commit(storage, &manifest(step, parts))
}

/// Reads everything and compares it with what was written.
pub(crate) fn assert_whole(checkpoint: &Checkpoint) {
    let step = checkpoint.manifest().step;
    checkpoint.verify(&mut |_, _| {}).unwrap();
    for layer in layers() {
        for what in contents(&layer) {
            let read = checkpoint.read(&layer.name, &what, 0..layer.len).unwrap();
            assert_eq!(read, numbers(step, &layer.name, &what), "{} {what}", layer.name);
        }
    }
}

/// Opens a checkpoint and reads everything.
pub(crate) fn load(storage: &Arc<dyn Storage>, step: u64) -> Result<()> {
    Checkpoint::open(storage, step)?.verify(&mut |_, _| {})
}

/// The step of the newest checkpoint that is whole, if there is one.
pub(crate) fn latest(storage: &Arc<dyn Storage>) -> Option<u64> {
    let checkpoint = Checkpoint::latest(storage).unwrap().checkpoint?;
    assert_whole(&checkpoint);
    Some(checkpoint.manifest().step)
}

/// What a write that fails leaves behind.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Left {
    /// Nothing.
    Nothing,
    /// So many bytes under a temporary name. A crash of a directory's writer does this.
    Temporary(usize),
    /// So many bytes under the object's own name. A storage that keeps its promise never does this.
    InPlace(usize),
    /// Everything: only the answer was lost.
    Everything,
}

/// A storage in memory.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<String, Vec<u8>>,
    puts: usize,
    fails_at: Option<(usize, Left)>,
    /// Bytes that fit.
    room: Option<u64>,
    /// Names and ranges that were read.
    reads: Vec<(String, Range<u64>)>,
}

impl Memory {
    /// The `put` with this number fails, and so do all later ones: the writer has died.
    pub(crate) fn fail_at(&self, put: usize, left: Left) {
        let mut state = self.state.lock().unwrap();
        (state.puts, state.fails_at) = (0, Some((put, left)));
    }

    /// Works again.
    pub(crate) fn mend(&self) {
        let mut state = self.state.lock().unwrap();
        (state.fails_at, state.room) = (None, None);
    }

    /// How many bytes fit from now on.
    pub(crate) fn set_room(&self, room: u64) {
        self.state.lock().unwrap().room = Some(room);
    }

    /// How many objects were written since the last `fail_at`.
    pub(crate) fn puts(&self) -> usize {
        self.state.lock().unwrap().puts
    }

    /// What was read since the last time.
    pub(crate) fn take_reads(&self) -> Vec<(String, Range<u64>)> {
        std::mem::take(&mut self.state.lock().unwrap().reads)
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.state.lock().unwrap().objects.keys().cloned().collect()
    }

    pub(crate) fn object(&self, name: &str) -> Vec<u8> {
        self.state.lock().unwrap().objects[name].clone()
    }

    /// Puts bytes there behind everybody's back.
    pub(crate) fn set(&self, name: &str, bytes: Vec<u8>) {
        self.state.lock().unwrap().objects.insert(name.into(), bytes);
    }

    pub(crate) fn remove(&self, name: &str) {
        self.state.lock().unwrap().objects.remove(name).unwrap();
    }
}

impl Storage for Memory {
    fn describe(&self) -> String {
        "memory".into()
    }

    fn put(&self, name: &str, slices: &[&[u8]]) -> Result<(), StorageError> {
        let mut state = self.state.lock().unwrap();
        let bytes = slices.concat();
        let number = state.puts;
        state.puts += 1;
        if let Some(room) = state.room {
            let needed = bytes.len() as u64;
            let free = room.checked_sub(needed).ok_or(StorageError::Full { needed, free: room })?;
            state.room = Some(free);
        }
        match state.fails_at {
            Some((at, left)) if number >= at => {
                let (name, kept) = match left {
                    _ if number > at => return Err(StorageError::Failed("it is dead".into())),
                    Left::Nothing => return Err(StorageError::Failed("it fails".into())),
                    Left::Temporary(kept) => {
                        let (folder, file) = name.split_once('/').unwrap();
                        (format!("{folder}/.writing-{file}"), kept)
                    }
                    Left::InPlace(kept) => (name.to_owned(), kept),
                    Left::Everything => (name.to_owned(), bytes.len()),
                };
                state.objects.insert(name, bytes[..kept.min(bytes.len())].to_vec());
                Err(StorageError::Failed("it was cut".into()))
            }
            _ => {
                state.objects.insert(name.into(), bytes);
                Ok(())
            }
        }
    }

    fn get_range(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>, StorageError> {
        let mut state = self.state.lock().unwrap();
        state.reads.push((name.into(), range.clone()));
        let object = state.objects.get(name).ok_or(StorageError::Missing)?;
        let bytes = object.get(range.start as usize..range.end as usize);
        bytes.map(<[u8]>::to_vec).ok_or(StorageError::Short { range, found: 0 })
    }

    fn size(&self, name: &str) -> Result<u64, StorageError> {
        let state = self.state.lock().unwrap();
        state.objects.get(name).map(|object| object.len() as u64).ok_or(StorageError::Missing)
    }

    fn folders(&self) -> Result<Vec<String>, StorageError> {
        let names = self.names();
        let folders = names.iter().map(|name| name.split_once('/').unwrap().0.to_owned());
        Ok(folders.collect::<BTreeSet<_>>().into_iter().collect())
    }

    fn list(&self, folder: &str) -> Result<Vec<Entry>, StorageError> {
        let state = self.state.lock().unwrap();
        let entry = |(name, bytes): (&String, &Vec<u8>)| {
            let (in_folder, file) = name.split_once('/').unwrap();
            let bytes = bytes.len() as u64;
            (in_folder == folder).then(|| Entry { file: file.into(), bytes })
        };
        Ok(state.objects.iter().filter_map(entry).collect())
    }

    fn delete(&self, name: &str) -> Result<(), StorageError> {
        self.state.lock().unwrap().objects.remove(name);
        Ok(())
    }
}
