//! All parameters in one plain safetensors file, for other programs.

use super::Checkpoint;
use crate::error::{Error, Result};
use crate::part::{HeaderEntry, encode_header};
use crate::piece::What;
use crate::place::manifest_name;
use crate::storage::{parent, persist, temporary};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

impl Checkpoint {
    /// Writes the parameters to one safetensors file: the tensors that the manifest names, as `F32`.
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
        let (header, total) = self.export_header().map_err(refuse)?;
        let failed = |error: io::Error| refuse(error.to_string());
        let mut file = temporary(parent(path)).map_err(failed)?;
        file.write_all(&header).map_err(failed)?;
        let mut done = 0;
        progress(done, total);
        for piece in self.pieces.iter().filter_map(|layer| layer.get(&What::Parameters)).flatten() {
            let bytes = piece.read(&*self.storage, self.manifest.step)?;
            file.write_all(&bytes).map_err(failed)?;
            done += bytes.len() as u64;
            progress(done, total);
        }
        persist(file, path).map_err(failed)
    }

    /// The header of the exported file, and how many bytes of numbers follow.
    fn export_header(&self) -> Result<(Vec<u8>, u64), String> {
        let mut entries = BTreeMap::new();
        let mut offset = 0_usize;
        for tensor in self.manifest.layers.iter().flat_map(|layer| layer.named_tensors()) {
            // Opening has shown that the elements are in files, so their bytes can be counted.
            let bytes = tensor.elements().and_then(|elements| elements.checked_mul(4));
            let end = bytes.and_then(|bytes| offset.checked_add(bytes));
            let end = end.ok_or_else(|| format!("tensor '{}' is too large", tensor.name))?;
            let (dtype, shape) = (Dtype::F32, tensor.shape);
            let info = TensorInfo { dtype, shape, data_offsets: (offset, end) };
            entries.insert(tensor.name, HeaderEntry::Tensor(info));
            offset = end;
        }
        // As torch's own files say it. Some programs refuse files that do not.
        let metadata = BTreeMap::from([
            ("format".to_owned(), "pt".to_owned()),
            ("step".to_owned(), self.manifest.step.to_string()),
        ]);
        let metadata = HeaderEntry::Metadata(metadata);
        if entries.insert("__metadata__".into(), metadata).is_some() {
            return Err("a tensor is named '__metadata__', which safetensors files reserve".into());
        }
        let header = encode_header(&entries).map_err(|flaw| flaw.to_string())?;
        Ok((header, offset as u64))
    }
}
