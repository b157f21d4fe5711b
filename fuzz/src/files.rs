//! Checkpoints, whose files anybody may have changed.

use crate::Outcome;
use poseidon_checkpoint::{Checkpoint, Entry, Storage, StorageError};
use serde_json::Value;
use std::ops::Range;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// The step of the fuzzed checkpoint.
const STEP: u64 = 200;
/// What stands in the place of a checksum while it is made.
const NO_CHECKSUM: &str = "0000000000000000";
/// Between the manifest and the part.
const CUT: &[u8] = b"\n---\n";

/// An input of the target [`checkpoint`]: a manifest of step 200 and its only part.
pub fn join(manifest: &[u8], part: &[u8]) -> Vec<u8> {
    [manifest, CUT, part].concat()
}

/// A checkpoint of one part, as PyTorch programs and others write them. What opens is read in full.
/// Changed files hardly ever have the right checksums, so the files are tried again with the
/// checksums that they should have.
pub fn checkpoint(input: &[u8]) -> Outcome {
    let Some(at) = input.windows(CUT.len()).position(|window| window == CUT) else {
        return Outcome::Short;
    };
    let (manifest, part) = (&input[..at], &input[at + CUT.len()..]);
    let as_it_is = open(manifest.to_vec(), part);
    match with_checksums(manifest, part) {
        Some(repaired) => as_it_is.max(open(repaired, part)),
        None => as_it_is,
    }
}

fn open(manifest: Vec<u8>, part: &[u8]) -> Outcome {
    let storage: Arc<dyn Storage> = Arc::new(Files { manifest, part: part.to_vec() });
    let Ok(checkpoint) = Checkpoint::open(&storage, STEP) else { return Outcome::Refused };
    let mut read = checkpoint.verify(&mut |_, _| {}).is_ok();
    for layer in &checkpoint.manifest().layers {
        for what in checkpoint.contents(&layer.name) {
            match checkpoint.read_bytes(&layer.name, &what, 0..layer.len) {
                Ok((dtype, bytes)) => assert_eq!(bytes.len() * 8, layer.len * dtype.bitsize()),
                Err(_) => read = false,
            }
        }
    }
    if read { Outcome::Accepted } else { Outcome::Refused }
}

/// The manifest with the checksum of the part's header, and its own.
fn with_checksums(manifest: &[u8], part: &[u8]) -> Option<Vec<u8>> {
    let mut value: Value = serde_json::from_slice(manifest).ok()?;
    for facts in value.get_mut("parts")?.as_array_mut()? {
        let header = usize::try_from(facts.get("header_bytes")?.as_u64()?).ok()?;
        if let (Some(header), Some(facts)) = (part.get(..header), facts.as_object_mut()) {
            facts.insert("header_checksum".into(), hex(xxh3_64(header)).into());
        }
    }
    value.as_object_mut()?.insert("checksum".into(), NO_CHECKSUM.into());
    // Fields are sorted, so the checksum comes first, as it has to.
    let text = serde_json::to_string_pretty(&value).ok()? + "\n";
    let checksum = hex(xxh3_64(text.as_bytes()));
    Some(text.replacen(NO_CHECKSUM, &checksum, 1).into_bytes())
}

fn hex(checksum: u64) -> String {
    format!("{checksum:016x}")
}

/// The files of one checkpoint. All parts are the same.
#[derive(Debug)]
struct Files {
    manifest: Vec<u8>,
    part: Vec<u8>,
}

impl Files {
    fn file(&self, name: &str) -> &[u8] {
        if name.contains("manifest") { &self.manifest } else { &self.part }
    }
}

impl Storage for Files {
    fn describe(&self) -> String {
        "memory".into()
    }

    fn put(&self, _: &str, _: &[&[u8]]) -> Result<(), StorageError> {
        unreachable!("reading a checkpoint writes nothing")
    }

    fn get_range(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>, StorageError> {
        let file = self.file(name);
        let wanted = usize::try_from(range.start).ok().zip(usize::try_from(range.end).ok());
        let found = wanted.and_then(|(start, end)| file.get(start..end));
        let there = (file.len() as u64).saturating_sub(range.start);
        let short = || StorageError::Short { found: there, range: range.clone() };
        found.map(<[u8]>::to_vec).ok_or_else(short)
    }

    fn size(&self, name: &str) -> Result<u64, StorageError> {
        Ok(self.file(name).len() as u64)
    }

    fn folders(&self) -> Result<Vec<String>, StorageError> {
        Ok(Vec::new())
    }

    fn list(&self, _: &str) -> Result<Vec<Entry>, StorageError> {
        Ok(Vec::new())
    }

    fn delete(&self, _: &str) -> Result<(), StorageError> {
        unreachable!("reading a checkpoint deletes nothing")
    }
}
