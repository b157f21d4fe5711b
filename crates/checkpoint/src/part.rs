//! One node's file: a safetensors file whose tensors are pieces of layers.

use crate::error::{Error, Flaw, Result};
use crate::manifest::{MOST_HEADER_BYTES, PartFacts, hex};
use crate::piece::{Piece, What, key, parse_key};
use crate::place::{failure, has_manifest, manifest_name, part_name};
use crate::storage::{Storage, StorageError};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Serialize;
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
pub fn write_part<V: AsRef<[f32]>>(
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
fn header<V: AsRef<[f32]>>(
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
    for piece in pieces {
        let values = piece.values.as_ref();
        if values.is_empty() {
            continue;
        }
        let of_layer = |what: &str| format!("{what} of layer '{}'", piece.layer);
        let Some(end) = piece.start.checked_add(values.len()) else {
            return Err(Flaw::new(of_layer("the elements"), "a range", piece.start));
        };
        let name = key(&piece.layer, &piece.what, &(piece.start..end));
        let bytes: &[u8] = bytemuck::cast_slice(values);
        checksums.insert(name.clone(), hex(xxh3_64(bytes)));
        let info = TensorInfo {
            dtype: Dtype::F32,
            shape: vec![values.len()],
            data_offsets: (offset, offset + bytes.len()),
        };
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
    let file = part_name(step, facts.part);
    let size = match storage.size(&file) {
        Err(StorageError::Missing) => {
            return Err(Error::MissingPart { place: storage.describe(), file, bytes: facts.bytes });
        }
        size => size.map_err(|cause| failure(storage, "read", &file, cause))?,
    };
    let damaged = |flaw: Flaw| flaw.damaged(storage.describe(), &file);
    if size != facts.bytes {
        return Err(damaged(wrong_size(facts.bytes, size)));
    }
    let header = storage.get_range(&file, 0..facts.header_bytes);
    let header = header.map_err(|cause| failure(storage, "read", &file, cause))?;
    let found = hex(xxh3_64(&header));
    if found != facts.header_checksum {
        let what = "the checksum of its header";
        return Err(damaged(Flaw::new(what, &facts.header_checksum, found)));
    }
    pieces_of(&header, facts).map_err(damaged)
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
        if info.dtype != Dtype::F32 || info.shape != [range.len()] {
            let expected = format!("F32 [{}]", range.len());
            let found = format!("{:?} {:?}", info.dtype, info.shape);
            return Err(Flaw::new(format!("the shape of {name}"), expected, found));
        }
        let (start, end) = info.data_offsets;
        let at = |offset| facts.header_bytes + offset as u64;
        let bytes = at(start)..at(end);
        let (layer, checksum) = (layer.to_owned(), checksum.clone());
        pieces.push(Located { layer, what, range, part: facts.part, bytes, checksum });
    }
    if pieces.len() != facts.pieces {
        return Err(Flaw::new("the number of its pieces", facts.pieces, pieces.len()));
    }
    Ok(pieces)
}

const PART_FORMAT: &str = "poseidon-checkpoint-part";
