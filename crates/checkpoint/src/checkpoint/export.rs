//! The model in one plain safetensors file, for other programs.

use super::Checkpoint;
use crate::error::{Error, Result};
use crate::manifest::LayerFacts;
use crate::part::{HeaderEntry, Located, encode_header};
use crate::piece::What;
use crate::place::manifest_name;
use crate::storage::{parent, persist, temporary};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

impl Checkpoint {
    /// Writes the parameters to one safetensors file: the tensors that the manifest names, in their
    /// own types. Private layers are left out.
    ///
    /// The file gets its name when it is complete. An older file of this name is replaced; anything
    /// else of this name is left alone. Tells `progress` how many bytes are written, and of how
    /// many.
    pub fn export(&self, path: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
        let refuse = |reason: String| Error::Export {
            place: self.storage.describe(),
            file: manifest_name(self.manifest.step),
            path: path.into(),
            reason,
        };
        match fs::symlink_metadata(path) {
            Ok(there) if !there.is_file() => {
                return Err(refuse("there is something that is not a regular file".into()));
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(refuse(error.to_string()));
            }
            _ => {}
        }
        let layers = self.exported();
        let (header, total) = export_header(&layers, self.manifest.step).map_err(refuse)?;
        let failed = |error: io::Error| refuse(error.to_string());
        let mut file = temporary(parent(path)).map_err(failed)?;
        file.write_all(&header).map_err(failed)?;
        let mut done = 0;
        progress(done, total);
        for piece in layers.iter().flat_map(|(_, pieces)| *pieces) {
            let bytes = piece.read(&*self.storage, self.manifest.step)?;
            file.write_all(&bytes).map_err(failed)?;
            done += bytes.len() as u64;
            progress(done, total);
        }
        persist(file, path).map_err(failed)
    }

    /// The model's layers with their parameters. Wide numbers come first, so that all of them are
    /// aligned in the file: some readers need that.
    fn exported(&self) -> Vec<(&LayerFacts, &[Located])> {
        let layers = self.manifest.layers.iter().zip(&self.pieces);
        let mut layers: Vec<(_, &[Located])> = layers
            .filter(|(layer, _)| !layer.private)
            .map(|(layer, pieces)| (layer, pieces.get(&What::Parameters).map_or(&[][..], |p| p)))
            .collect();
        layers.sort_by_key(|(_, pieces)| Reverse(dtype(pieces).bitsize()));
        layers
    }
}

/// The header of the exported file, and how many bytes of numbers follow.
fn export_header(
    layers: &[(&LayerFacts, &[Located])],
    step: u64,
) -> Result<(Vec<u8>, u64), String> {
    let mut entries = BTreeMap::new();
    let mut offset = 0_usize;
    for (layer, pieces) in layers {
        let dtype = dtype(pieces);
        for tensor in layer.named_tensors() {
            // Opening has shown that the elements are in files, so their bytes can be counted.
            let bits = tensor.elements().and_then(|elements| elements.checked_mul(dtype.bitsize()));
            let end = bits.and_then(|bits| offset.checked_add(bits / 8));
            let end = end.ok_or_else(|| format!("tensor '{}' is too large", tensor.name))?;
            let info = TensorInfo { dtype, shape: tensor.shape, data_offsets: (offset, end) };
            entries.insert(tensor.name, HeaderEntry::Tensor(info));
            offset = end;
        }
    }
    // As torch's own files say it. Some programs refuse files that do not.
    let metadata = BTreeMap::from([
        ("format".to_owned(), "pt".to_owned()),
        ("step".to_owned(), step.to_string()),
    ]);
    let metadata = HeaderEntry::Metadata(metadata);
    if entries.insert("__metadata__".into(), metadata).is_some() {
        return Err("a tensor is named '__metadata__', which safetensors files reserve".into());
    }
    let header = encode_header(&entries).map_err(|flaw| flaw.to_string())?;
    Ok((header, offset as u64))
}

/// The type of a layer's parameters. A layer without elements has none.
fn dtype(pieces: &[Located]) -> Dtype {
    pieces.first().map_or(Dtype::F32, |piece| piece.dtype)
}
