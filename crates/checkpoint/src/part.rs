//! One node's file: a safetensors file whose tensors are pieces of layers.

use crate::error::{Error, Flaw, Result};
use crate::manifest::{MOST_HEADER_BYTES, PartFacts, hex};
use crate::piece::{Numbers, Piece, What, key, parse_key, width};
use crate::place::{failure, has_manifest, manifest_name, part_name};
use crate::storage::{Storage, StorageError};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

/// Writes one node's part of the checkpoint of `step`.
///
/// The numbers are written from where they are. Every part of a job has a number of its own. Two
/// parts may not have the same elements, but no part sees the others: [`Checkpoint::open`] checks
/// it. A piece without numbers is left out.
///
/// [`Checkpoint::open`]: crate::Checkpoint::open
pub fn write_part<V: Numbers>(
    storage: &dyn Storage,
    step: u64,
    part: u32,
    pieces: &[Piece<V>],
) -> Result<PartFacts> {
    let file = part_name(step, part);
    if has_manifest(storage, step)? {
        let (place, file) = (storage.describe(), manifest_name(step));
        return Err(Error::Complete { place, file, step });
    }
    let (header, mut slices) =
        header(step, part, pieces).map_err(|flaw| flaw.unwritable(storage.describe(), &file))?;
    let pieces = slices.len();
    slices.insert(0, &header);
    storage.put(&file, &slices).map_err(|cause| failure(storage, "write", &file, cause))?;
    Ok(PartFacts {
        part,
        bytes: slices.iter().map(|slice| slice.len() as u64).sum(),
        header_bytes: header.len() as u64,
        header_checksum: hex(xxh3_64(&header)),
        pieces,
    })
}

/// The bytes before the numbers, and the numbers.
fn header<V: Numbers>(
    step: u64,
    part: u32,
    pieces: &[Piece<V>],
) -> Result<(Vec<u8>, Vec<&[u8]>), Flaw> {
    let mut entries = BTreeMap::new();
    let mut checksums = BTreeMap::from([
        ("format".to_owned(), PART_FORMAT.to_owned()),
        ("part".to_owned(), part.to_string()),
        ("step".to_owned(), step.to_string()),
    ]);
    let mut slices: Vec<&[u8]> = Vec::new();
    let mut offset = 0;
    let mut pieces: Vec<&Piece<V>> = pieces.iter().collect();
    // Wide numbers first, so that all of them are aligned in the file.
    pieces.sort_by_key(|piece| Reverse(piece.values.dtype().bitsize()));
    for piece in pieces {
        let (dtype, bytes) = (piece.values.dtype(), piece.values.bytes());
        if bytes.is_empty() {
            continue;
        }
        let of_layer = |what: &str| format!("{what} of layer '{}'", piece.layer);
        let whole = width(dtype).filter(|width| bytes.len().is_multiple_of(*width));
        let Some(width) = whole else {
            let found = format!("{} bytes of {dtype}", bytes.len());
            return Err(Flaw::new(of_layer("the numbers"), "whole ones", found));
        };
        let len = bytes.len() / width;
        let Some(end) = piece.start.checked_add(len) else {
            return Err(Flaw::new(of_layer("the elements"), "a range", piece.start));
        };
        let name = key(&piece.layer, &piece.what, &(piece.start..end));
        checksums.insert(name.clone(), hex(xxh3_64(bytes)));
        let info =
            TensorInfo { dtype, shape: vec![len], data_offsets: (offset, offset + bytes.len()) };
        if entries.insert(name.clone(), HeaderEntry::Tensor(info)).is_some() {
            return Err(Flaw::new(of_layer("a piece"), format!("{name} once"), "it twice"));
        }
        offset += bytes.len();
        slices.push(bytes);
    }
    entries.insert("__metadata__".into(), HeaderEntry::Metadata(checksums));
    Ok((encode_header(&entries)?, slices))
}

/// One entry of the header of a safetensors file.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum HeaderEntry {
    Metadata(BTreeMap<String, String>),
    Tensor(TensorInfo),
}

/// The bytes before the numbers of a safetensors file. They end at a multiple of eight.
pub(crate) fn encode_header(entries: &BTreeMap<String, HeaderEntry>) -> Result<Vec<u8>, Flaw> {
    let json =
        serde_json::to_vec(entries).map_err(|error| Flaw::new("its header", "JSON", error))?;
    let len = json.len().next_multiple_of(8);
    let mut header = Vec::with_capacity(8 + len);
    header.extend((len as u64).to_le_bytes());
    header.extend(json);
    header.resize(8 + len, b' ');
    if header.len() as u64 > MOST_HEADER_BYTES {
        let expected = format!("at most {MOST_HEADER_BYTES} bytes");
        return Err(Flaw::new("its header", expected, header.len()));
    }
    Ok(header)
}

/// A piece, as the header of a part describes it.
#[derive(Clone, Debug)]
pub(crate) struct Located {
    pub(crate) layer: String,
    pub(crate) what: What,
    /// Elements of the layer.
    pub(crate) range: Range<usize>,
    pub(crate) dtype: Dtype,
    /// The number of the part.
    pub(crate) part: u32,
    /// Bytes of the part's file.
    pub(crate) bytes: Range<u64>,
    checksum: String,
}

impl Located {
    /// Reads the piece's numbers and checks that they are what was written.
    pub(crate) fn read(&self, storage: &dyn Storage, step: u64) -> Result<Vec<u8>> {
        let file = part_name(step, self.part);
        let bytes = storage.get_range(&file, self.bytes.clone());
        let bytes = bytes.map_err(|cause| failure(storage, "read", &file, cause))?;
        let found = hex(xxh3_64(&bytes));
        if found == self.checksum {
            return Ok(bytes);
        }
        let what = format!("the checksum of {}", key(&self.layer, &self.what, &self.range));
        Err(Flaw::new(what, &self.checksum, found).damaged(storage.describe(), &file))
    }
}

/// Reads the header of a part. Checks the file's size and the header against what the manifest says.
pub(crate) fn read_header(
    storage: &dyn Storage,
    step: u64,
    facts: &PartFacts,
) -> Result<Vec<Located>> {
    check_size(storage, step, facts)?;
    let file = part_name(step, facts.part);
    let damaged = |flaw: Flaw| flaw.damaged(storage.describe(), &file);
    let header = storage.get_range(&file, 0..facts.header_bytes);
    let header = header.map_err(|cause| failure(storage, "read", &file, cause))?;
    let found = hex(xxh3_64(&header));
    if found != facts.header_checksum {
        let what = "the checksum of its header";
        return Err(damaged(Flaw::new(what, &facts.header_checksum, found)));
    }
    pieces_of(&header, facts).map_err(damaged)
}

/// Checks that a part is there, with the size that the manifest says.
pub(crate) fn check_size(storage: &dyn Storage, step: u64, facts: &PartFacts) -> Result<()> {
    let file = part_name(step, facts.part);
    match storage.size(&file) {
        Ok(size) if size == facts.bytes => Ok(()),
        Ok(size) => Err(wrong_size(facts.bytes, size).damaged(storage.describe(), &file)),
        Err(StorageError::Missing) => {
            Err(Error::MissingPart { place: storage.describe(), file, bytes: facts.bytes })
        }
        Err(cause) => Err(failure(storage, "read", &file, cause)),
    }
}

/// A file of another size than the manifest says.
pub(crate) fn wrong_size(expected: u64, found: u64) -> Flaw {
    Flaw::new("its size", format!("{expected} bytes"), format!("{found} bytes"))
}

/// The pieces that a header describes.
fn pieces_of(header: &[u8], facts: &PartFacts) -> Result<Vec<Located>, Flaw> {
    let (len, json) = header.split_at_checked(8).unwrap_or_default();
    let len = <[u8; 8]>::try_from(len).map(u64::from_le_bytes).unwrap_or(0);
    if len != json.len() as u64 {
        return Err(Flaw::new("the length of its header", json.len(), len));
    }
    let parsed: Metadata = serde_json::from_slice(json)
        .map_err(|error| Flaw::new("its header", "one of a safetensors file", error))?;
    let numbers = facts.bytes - facts.header_bytes;
    if parsed.data_len() as u64 != numbers {
        return Err(Flaw::new("the size of its numbers", numbers, parsed.data_len()));
    }
    let checksums = parsed.metadata().as_ref();
    let mut pieces = Vec::new();
    for (name, info) in parsed.tensors() {
        let Some((layer, what, range)) = parse_key(&name) else {
            let expected = "LAYER[START..END].WHAT";
            return Err(Flaw::new("the name of a piece", expected, name));
        };
        let Some(checksum) = checksums.and_then(|checksums| checksums.get(&name)) else {
            return Err(Flaw::new(format!("the checksum of {name}"), "one", "none"));
        };
        if width(info.dtype).is_none() || info.shape != [range.len()] {
            let expected = format!("[{}] of whole bytes", range.len());
            let found = format!("{:?} {:?}", info.dtype, info.shape);
            return Err(Flaw::new(format!("the shape of {name}"), expected, found));
        }
        let (start, end) = info.data_offsets;
        let at = |offset| facts.header_bytes + offset as u64;
        let bytes = at(start)..at(end);
        let (layer, checksum) = (layer.to_owned(), checksum.clone());
        let (part, dtype) = (facts.part, info.dtype);
        pieces.push(Located { layer, what, range, dtype, part, bytes, checksum });
    }
    if pieces.len() != facts.pieces {
        return Err(Flaw::new("the number of its pieces", facts.pieces, pieces.len()));
    }
    Ok(pieces)
}

const PART_FORMAT: &str = "poseidon-checkpoint-part";
