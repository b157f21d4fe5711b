//! The manifest: what a checkpoint consists of. It is written last.

use crate::error::{Error, Flaw, Result};
use crate::piece::What;
use crate::place::{failure, manifest_name};
use crate::storage::{Storage, StorageError};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashSet;
use std::time::SystemTime;
use xxhash_rust::xxh3::xxh3_64;

/// What a checkpoint consists of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The step that the job had finished.
    pub step: u64,
    /// When it was written, to the second.
    #[serde(with = "rfc3339")]
    pub created: SystemTime,
    /// The version of poseidon that wrote it.
    pub poseidon: String,
    /// How many workers the job had.
    pub workers: usize,
    /// The layers, in the job's order.
    pub layers: Vec<LayerFacts>,
    /// The files with their numbers.
    pub parts: Vec<PartFacts>,
    /// What the training program wants to find again: data position, seed, schedule, plan.
    pub program: Value,
}

/// What is known of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerFacts {
    /// Its name, which no other layer has.
    pub name: String,
    /// The number of its elements.
    pub len: usize,
    /// Its update rule.
    pub rule: String,
    /// How many steps the update rule has taken.
    pub steps: u64,
    /// How many vectors the update rule remembers.
    pub vectors: usize,
    /// How the flat layer is cut into tensors, one after the other. If there are none, the layer is
    /// one tensor of its own name.
    pub tensors: Vec<TensorFacts>,
    /// Whether it is the program's own and no layer of the model. An export leaves it out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub private: bool,
}

/// One tensor of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorFacts {
    /// Its name, which no other tensor of the checkpoint has.
    pub name: String,
    /// Its dimensions, the last one contiguous.
    pub shape: Vec<usize>,
}

/// What is known of one node's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartFacts {
    /// The file's number: 3 is `part-00003.safetensors`.
    pub part: u32,
    /// The file's size.
    pub bytes: u64,
    /// Where the file's numbers begin: the size of its header with the eight bytes before it.
    pub header_bytes: u64,
    /// The XXH3-64 of these bytes, as 16 hexadecimal digits.
    pub header_checksum: String,
    /// How many pieces are in the file.
    pub pieces: usize,
}

impl LayerFacts {
    /// The layer's tensors. A layer that is not cut is one tensor of its own name.
    pub fn named_tensors(&self) -> Vec<TensorFacts> {
        if self.tensors.is_empty() {
            return vec![TensorFacts { name: self.name.clone(), shape: vec![self.len] }];
        }
        self.tensors.clone()
    }

    /// What a checkpoint must have of this layer, every element once.
    pub(crate) fn required(&self) -> impl Iterator<Item = What> + use<> {
        [What::Parameters].into_iter().chain((0..self.vectors).map(What::State))
    }
}

impl TensorFacts {
    /// The number of elements, if it is a number.
    pub(crate) fn elements(&self) -> Option<usize> {
        self.shape.iter().try_fold(1, |product: usize, dimension| product.checked_mul(*dimension))
    }
}

impl Manifest {
    /// The file, as it is written.
    pub(crate) fn encode(&self, storage: &dyn Storage) -> Result<Vec<u8>> {
        let unwritable =
            |flaw: Flaw| flaw.unwritable(storage.describe(), &manifest_name(self.step));
        self.flaw().map_or(Ok(()), |flaw| Err(unwritable(flaw)))?;
        let document =
            Document { checksum: NO_CHECKSUM, format: FORMAT, version: VERSION, manifest: self };
        // Numbers and texts only, so there is always a JSON for it.
        let mut bytes = serde_json::to_vec_pretty(&document)
            .map_err(|error| unwritable(Flaw::new("its JSON", "text", error)))?;
        bytes.push(b'\n');
        if bytes.len() as u64 > MOST_BYTES {
            return Err(unwritable(too_large(bytes.len() as u64)));
        }
        let checksum = hex(xxh3_64(&bytes));
        bytes[CHECKSUM_AT..CHECKSUM_AT + NO_CHECKSUM.len()].copy_from_slice(checksum.as_bytes());
        Ok(bytes)
    }

    /// Reads the manifest of `step`. `None`: there is none.
    pub(crate) fn read(storage: &dyn Storage, step: u64) -> Result<Option<Self>> {
        let file = manifest_name(step);
        let size = match storage.size(&file) {
            Err(StorageError::Missing) => return Ok(None),
            size => size.map_err(|cause| failure(storage, "read", &file, cause))?,
        };
        let damaged = |flaw: Flaw| flaw.damaged(storage.describe(), &file);
        if size > MOST_BYTES {
            return Err(damaged(too_large(size)));
        }
        let bytes = storage.get_range(&file, 0..size);
        let bytes = bytes.map_err(|cause| failure(storage, "read", &file, cause))?;
        match Self::decode(&bytes) {
            Ok(manifest) if manifest.step == step => Ok(Some(manifest)),
            Ok(other) => Err(damaged(Flaw::new("its step", step, other.step))),
            Err(Refusal::Newer(found)) => {
                Err(Error::Newer { place: storage.describe(), file, found, known: VERSION })
            }
            Err(Refusal::Flaw(flaw)) => Err(damaged(flaw)),
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, Refusal> {
        let not_json = |error| Flaw::new("its JSON", "a manifest", error);
        let kind: Kind = serde_json::from_slice(bytes).map_err(not_json)?;
        if kind.format != FORMAT {
            return Err(Flaw::new("its format", FORMAT, kind.format).into());
        }
        // Before the checksum: a newer version may have another way to make it.
        if kind.version > VERSION {
            return Err(Refusal::Newer(kind.version));
        }
        if kind.version != VERSION {
            return Err(Flaw::new("its version", VERSION, kind.version).into());
        }
        let begins = bytes.starts_with(BEGINNING.as_bytes());
        let Some(written) = bytes.get(CHECKSUM_AT..CHECKSUM_AT + NO_CHECKSUM.len()) else {
            return Err(Flaw::new("its size", "a whole manifest", bytes.len()).into());
        };
        let written = String::from_utf8_lossy(written).into_owned();
        let mut bare = bytes.to_vec();
        bare[CHECKSUM_AT..CHECKSUM_AT + NO_CHECKSUM.len()].copy_from_slice(NO_CHECKSUM.as_bytes());
        let found = hex(xxh3_64(&bare));
        if !begins || found != written {
            return Err(Flaw::new("its checksum", written, found).into());
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(not_json)?;
        manifest.flaw().map_or(Ok(manifest), |flaw| Err(flaw.into()))
    }

    /// What no manifest may say, if this one says it.
    fn flaw(&self) -> Option<Flaw> {
        let (mut layers, mut tensors) = (HashSet::new(), HashSet::new());
        for layer in &self.layers {
            let of_layer = |what: &str| format!("{what} of layer '{}'", layer.name);
            if !layers.insert(&layer.name) {
                return Some(Flaw::new(of_layer("the name"), "a name of its own", "another such"));
            }
            if layer.vectors > MOST_VECTORS {
                let expected = format!("at most {MOST_VECTORS}");
                return Some(Flaw::new(of_layer("the vectors"), expected, layer.vectors));
            }
            let mut elements = Some(0_usize);
            for tensor in layer.named_tensors() {
                elements = elements.and_then(|sum| sum.checked_add(tensor.elements()?));
                if !tensors.insert(tensor.name.clone()) {
                    let what = of_layer(&format!("tensor '{}'", tensor.name));
                    return Some(Flaw::new(what, "a name of its own", "another such"));
                }
            }
            if elements != Some(layer.len) {
                let found = elements.map_or("too many".into(), |elements| elements.to_string());
                let expected = format!("{} elements", layer.len);
                return Some(Flaw::new(of_layer("the tensors"), expected, found));
            }
        }
        let mut parts = HashSet::new();
        for facts in &self.parts {
            let of_part = |what: &str| format!("{what} of part {}", facts.part);
            if !parts.insert(facts.part) {
                return Some(Flaw::new(of_part("the number"), "a number of its own", "another"));
            }
            if !(8..=MOST_HEADER_BYTES).contains(&facts.header_bytes)
                || facts.header_bytes > facts.bytes
            {
                let most = MOST_HEADER_BYTES.min(facts.bytes);
                let (expected, found) = (format!("8 to {most} bytes"), facts.header_bytes);
                return Some(Flaw::new(of_part("the header"), expected, found));
            }
        }
        None
    }
}

enum Refusal {
    Newer(u64),
    Flaw(Flaw),
}

impl From<Flaw> for Refusal {
    fn from(flaw: Flaw) -> Self {
        Self::Flaw(flaw)
    }
}

/// A checksum as text: 16 hexadecimal digits.
pub(crate) fn hex(checksum: u64) -> String {
    format!("{checksum:016x}")
}

/// The file. The checksum comes first, so that everybody finds it.
#[derive(Serialize)]
struct Document<'a> {
    checksum: &'a str,
    format: &'a str,
    version: u64,
    #[serde(flatten)]
    manifest: &'a Manifest,
}

/// What is read of a manifest of any version.
#[derive(Deserialize)]
struct Kind {
    format: String,
    version: u64,
}

fn too_large(bytes: u64) -> Flaw {
    Flaw::new("its size", format!("at most {MOST_BYTES} bytes"), bytes)
}

mod rfc3339 {
    use serde::{Deserialize, Deserializer, Serializer, de, ser};
    use std::time::SystemTime;

    pub(super) fn serialize<S: Serializer>(time: &SystemTime, to: S) -> Result<S::Ok, S::Error> {
        // Years before 1970 and after 9999 have no text.
        let years = SystemTime::UNIX_EPOCH..SystemTime::UNIX_EPOCH + super::LAST_TIME;
        if !years.contains(time) {
            return Err(ser::Error::custom("the time is not between 1970 and 9999"));
        }
        to.collect_str(&humantime::format_rfc3339_seconds(*time))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<SystemTime, D::Error> {
        let text = String::deserialize(from)?;
        humantime::parse_rfc3339(&text).map_err(de::Error::custom)
    }
}

/// The end of the year 9999, after which RFC 3339 has no dates.
const LAST_TIME: std::time::Duration = std::time::Duration::from_secs(253_402_300_799);
const FORMAT: &str = "poseidon-checkpoint";
const VERSION: u64 = 1;
/// How a manifest begins. The digits of the checksum follow.
const BEGINNING: &str = "{\n  \"checksum\": \"";
const CHECKSUM_AT: usize = BEGINNING.len();
/// What stands in the checksum's place while it is made.
const NO_CHECKSUM: &str = "0000000000000000";
/// A model of 50,000 tensors on 1,000 nodes needs a third of this. A damaged or foreign manifest
/// takes at most about 20 times as much memory, for values in its program facts.
const MOST_BYTES: u64 = 32 << 20;
/// Update rules remember one or two. The bound is for manifests that nobody has written.
const MOST_VECTORS: usize = 1000;
/// What readers of safetensors accept, with the eight bytes before the header.
pub(crate) const MOST_HEADER_BYTES: u64 = 100_000_000;
