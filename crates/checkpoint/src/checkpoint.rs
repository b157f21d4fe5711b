//! A checkpoint that was found whole: reading its numbers.

mod export;

use crate::error::{Difference, Error, Flaw, Result};
use crate::manifest::{LayerFacts, Manifest};
use crate::part::{Located, read_header};
use crate::piece::{What, width};
use crate::place::{has_manifest, manifest_name, part_name, steps};
use crate::storage::Storage;
use safetensors::Dtype;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// A checkpoint whose manifest and headers were read and found to fit together.
///
/// Its numbers are read when they are asked for, and checked when they are read.
#[derive(Debug)]
pub struct Checkpoint {
    storage: Arc<dyn Storage>,
    manifest: Manifest,
    /// By layer, in the manifest's order: its pieces, in the order of their elements.
    pieces: Vec<BTreeMap<What, Vec<Located>>>,
    /// Positions of layers in the manifest.
    positions: HashMap<String, usize>,
}

/// The newest checkpoint of a place that is whole.
#[derive(Debug)]
pub struct Latest {
    /// The checkpoint. `None`: the place has none.
    pub checkpoint: Option<Checkpoint>,
    /// Newer ones that have a manifest and are damaged, the newest first: their steps, and why they
    /// were passed over.
    pub damaged: Vec<(u64, Error)>,
}

/// A layer as a job that wants to go on from a checkpoint has it.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedLayer<'a> {
    /// Its name.
    pub name: &'a str,
    /// The number of its elements.
    pub len: usize,
    /// Its update rule.
    pub rule: &'a str,
    /// How many vectors the update rule remembers.
    pub vectors: usize,
}

impl Checkpoint {
    /// Opens the newest checkpoint that is whole. The newest is the one with the highest step.
    ///
    /// Damaged checkpoints are passed over and named in the answer. A storage that does not answer
    /// is an error, and so is a checkpoint of a newer version: an older one is not what its owner
    /// wants.
    pub fn latest(storage: &Arc<dyn Storage>) -> Result<Latest> {
        let mut damaged = Vec::new();
        for step in steps(&**storage)?.into_iter().rev() {
            match Self::open_if_complete(storage, step) {
                Ok(None) => {}
                Ok(checkpoint) => return Ok(Latest { checkpoint, damaged }),
                Err(error @ (Error::Storage { .. } | Error::Newer { .. })) => return Err(error),
                Err(error) => damaged.push((step, error)),
            }
        }
        Ok(Latest { checkpoint: None, damaged })
    }

    /// Opens the checkpoint of `step`.
    ///
    /// Reads the manifest and the header of every part. Checks that every part is there with its
    /// size, and that every layer has each of its elements once.
    pub fn open(storage: &Arc<dyn Storage>, step: u64) -> Result<Self> {
        if let Some(checkpoint) = Self::open_if_complete(storage, step)? {
            return Ok(checkpoint);
        }
        let mut complete = Vec::new();
        for step in steps(&**storage)? {
            if has_manifest(&**storage, step)? {
                complete.push(step);
            }
        }
        let (place, file) = (storage.describe(), manifest_name(step));
        Err(Error::NoStep { place, file, step, complete })
    }

    /// The same; `None` if there is no manifest.
    fn open_if_complete(storage: &Arc<dyn Storage>, step: u64) -> Result<Option<Self>> {
        let Some(manifest) = Manifest::read(&**storage, step)? else { return Ok(None) };
        let names = manifest.layers.iter().map(|layer| layer.name.clone());
        let positions: HashMap<_, _> = names.zip(0..).collect();
        let mut pieces: Vec<BTreeMap<What, Vec<Located>>> = Vec::new();
        pieces.resize_with(manifest.layers.len(), BTreeMap::new);
        for facts in &manifest.parts {
            for piece in read_header(&**storage, step, facts)? {
                let Some(&layer) = positions.get(&piece.layer) else {
                    let flaw = Flaw::new(&*piece.what.to_string(), "no such layer", "a piece");
                    let file = part_name(step, facts.part);
                    return Err(flaw.of_layer(storage.describe(), &file, &piece.layer));
                };
                pieces[layer].entry(piece.what.clone()).or_default().push(piece);
            }
        }
        for (layer, pieces) in manifest.layers.iter().zip(&mut pieces) {
            if let Err((part, flaw)) = check_coverage(layer, pieces) {
                let file = part.map_or(manifest_name(step), |part| part_name(step, part));
                return Err(flaw.of_layer(storage.describe(), &file, &layer.name));
            }
        }
        Ok(Some(Self { storage: storage.clone(), manifest, pieces, positions }))
    }

    /// What the checkpoint consists of.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Bytes of all its parts.
    pub fn bytes(&self) -> u64 {
        self.manifest.parts.iter().map(|part| part.bytes).fold(0, u64::saturating_add)
    }

    /// Bytes of one layer's numbers, of all kinds.
    pub fn layer_bytes(&self, layer: &str) -> u64 {
        let pieces = self.positions.get(layer).map(|&layer| &self.pieces[layer]);
        let all = pieces.into_iter().flat_map(|pieces| pieces.values().flatten());
        all.map(|piece| piece.bytes.end - piece.bytes.start).sum()
    }

    /// What the checkpoint has of one layer: parameters, vectors of the update rule, and whatever
    /// else was written.
    pub fn contents(&self, layer: &str) -> Vec<What> {
        let pieces = self.positions.get(layer).map(|&layer| &self.pieces[layer]);
        pieces.into_iter().flat_map(|pieces| pieces.keys().cloned()).collect()
    }

    /// How the elements of something of a layer were written, in order. A read of a part of one of
    /// these ranges reads all of it: what is read is checked.
    pub fn pieces(&self, layer: &str, what: &What) -> Vec<Range<usize>> {
        let pieces = self.positions.get(layer).and_then(|&layer| self.pieces[layer].get(what));
        pieces.into_iter().flatten().map(|piece| piece.range.clone()).collect()
    }

    /// The type of the numbers of something of a layer. `None`: there are none.
    pub fn dtype(&self, layer: &str, what: &What) -> Option<Dtype> {
        let pieces = self.positions.get(layer).and_then(|&layer| self.pieces[layer].get(what));
        pieces.and_then(|pieces| pieces.first()).map(|piece| piece.dtype)
    }

    /// Reads elements `range` of a layer, which are `F32`. Only pieces that have some of them are
    /// read, and what is read is checked.
    pub fn read(&self, layer: &str, what: &What, range: Range<usize>) -> Result<Vec<f32>> {
        let (dtype, bytes) = self.read_bytes(layer, what, range)?;
        if dtype != Dtype::F32 {
            return Err(self.refuse(layer, what, "numbers of type F32", dtype));
        }
        let number = |bytes: &[u8; 4]| f32::from_le_bytes(*bytes);
        Ok(bytes.as_chunks().0.iter().map(number).collect())
    }

    /// Reads elements `range` of a layer, whatever their type is. No elements are `F32`.
    pub fn read_bytes(
        &self,
        layer: &str,
        what: &What,
        range: Range<usize>,
    ) -> Result<(Dtype, Vec<u8>)> {
        let refuse = |expected: String, found: String| self.refuse(layer, what, expected, found);
        let Some(&position) = self.positions.get(layer) else {
            return Err(refuse("a layer of the checkpoint".into(), "no such layer".into()));
        };
        let len = self.manifest.layers[position].len;
        if range.start > range.end || range.end > len {
            return Err(refuse(format!("elements of 0..{len}"), format!("{range:?}")));
        }
        let pieces = self.pieces[position].get(what).map_or(&[][..], |pieces| pieces);
        let first = pieces.partition_point(|piece| piece.range.end <= range.start);
        let dtype = pieces.first().map_or(Dtype::F32, |piece| piece.dtype);
        // Opening has shown that they have whole bytes.
        let width = width(dtype).unwrap_or(1);
        let (mut values, mut done) = (Vec::new(), 0);
        for piece in &pieces[first..] {
            if done == range.len() || piece.range.start > range.start + done {
                break;
            }
            let bytes = piece.read(&*self.storage, self.manifest.step)?;
            let from = range.start.max(piece.range.start) - piece.range.start;
            let to = range.end.min(piece.range.end) - piece.range.start;
            // The elements are in files of this size, so there is a reason to have room for them.
            values.reserve(if done == 0 { range.len() * width } else { 0 });
            values.extend_from_slice(&bytes[from * width..to * width]);
            done += to - from;
        }
        if done < range.len() {
            let found = format!("none of element {}", range.start + done);
            return Err(refuse(format!("elements {range:?}"), found));
        }
        Ok((dtype, values))
    }

    /// The error for numbers that the checkpoint does not have.
    fn refuse(
        &self,
        layer: &str,
        what: &What,
        expected: impl ToString,
        found: impl ToString,
    ) -> Error {
        let flaw = Flaw::new(what.to_string(), expected, found);
        flaw.of_layer(self.storage.describe(), &manifest_name(self.manifest.step), layer)
    }

    /// Reads everything and checks it. Tells `progress` how many bytes are read, and of how many.
    pub fn verify(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
        let pieces = || self.pieces.iter().flat_map(|layer| layer.values().flatten());
        let size = |piece: &Located| piece.bytes.end - piece.bytes.start;
        let (mut done, total) = (0, pieces().map(size).sum());
        progress(done, total);
        for piece in pieces() {
            piece.read(&*self.storage, self.manifest.step)?;
            done += size(piece);
            progress(done, total);
        }
        Ok(())
    }

    /// Checks that the checkpoint is of a job with these layers. Their order does not matter.
    pub fn check_layers(&self, expected: &[ExpectedLayer<'_>]) -> Result<()> {
        let differs = |layer: &str, difference| {
            let (place, file) = (self.storage.describe(), manifest_name(self.manifest.step));
            Err(Error::Differs { place, file, layer: layer.into(), difference })
        };
        for &ExpectedLayer { name, len, rule, vectors } in expected {
            let Some(&position) = self.positions.get(name) else {
                return differs(name, Difference::Missing);
            };
            let found = &self.manifest.layers[position];
            if found.len != len {
                return differs(name, Difference::Len { expected: len, found: found.len });
            }
            if found.rule != rule {
                let (expected, found) = (rule.into(), found.rule.clone());
                return differs(name, Difference::Rule { expected, found });
            }
            if found.vectors != vectors {
                let (expected, found) = (vectors, found.vectors);
                return differs(name, Difference::Vectors { expected, found });
            }
        }
        let known: HashSet<_> = expected.iter().map(|layer| layer.name).collect();
        let extra = |layer: &&LayerFacts| !known.contains(&*layer.name);
        match self.manifest.layers.iter().find(extra) {
            Some(layer) => differs(&layer.name, Difference::Extra),
            None => Ok(()),
        }
    }
}

/// Puts a layer's pieces in order. Parameters and the update rule's vectors have every element once;
/// other things have no element twice. An error names the part at fault, if there is one.
fn check_coverage(
    layer: &LayerFacts,
    pieces: &mut BTreeMap<What, Vec<Located>>,
) -> Result<(), (Option<u32>, Flaw)> {
    for (what, pieces) in &mut *pieces {
        let dtype = pieces[0].dtype;
        let flaw = |expected: String, piece: &Located| {
            Err((
                Some(piece.part),
                Flaw::new(what.to_string(), expected, format!("{:?}", piece.range)),
            ))
        };
        let required = match what {
            What::Parameters => true,
            What::State(vector) if *vector < layer.vectors => true,
            What::State(_) => {
                return flaw(format!("{} vectors", layer.vectors), &pieces[0]);
            }
            What::Other(_) => false,
        };
        if let Some(other) = pieces.iter().find(|piece| piece.dtype != dtype) {
            let found = format!("{} in {:?}", other.dtype, other.range);
            let expected = format!("numbers of one type, {dtype}");
            return Err((Some(other.part), Flaw::new(what.to_string(), expected, found)));
        }
        pieces.sort_by_key(|piece| piece.range.start);
        let mut end = 0;
        for piece in &*pieces {
            let start = piece.range.start;
            if piece.range.end > layer.len {
                return flaw(format!("elements of 0..{}", layer.len), piece);
            }
            if start < end || (required && start > end) {
                return flaw(format!("elements from {end} on"), piece);
            }
            end = piece.range.end;
        }
    }
    for what in layer.required() {
        let end = pieces.get(&what).and_then(|pieces| pieces.last()).map_or(0, |p| p.range.end);
        if end != layer.len {
            let expected = format!("elements of 0..{}", layer.len);
            return Err((None, Flaw::new(what.to_string(), expected, format!("0..{end}"))));
        }
    }
    Ok(())
}
