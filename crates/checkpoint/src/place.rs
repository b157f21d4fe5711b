//! Places by their names, and the names of objects in a place.

use crate::error::{Error, Result};
use crate::storage::{Directory, Storage, StorageError};
use std::sync::Arc;

/// The storage that `place` names.
///
/// A place is a path of a directory, `file:///path`, or `s3://bucket/prefix`. The credentials, the
/// region and the endpoint of an S3 store come from the usual variables of the environment:
/// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT_URL`.
pub fn open(place: &str) -> Result<Arc<dyn Storage>> {
    let refuse = |reason: &str| Error::Place { place: place.into(), reason: reason.into() };
    let path = match place.split_once("://") {
        None if place.is_empty() => return Err(refuse("it is empty")),
        None => place,
        Some(("file", path)) if path.starts_with('/') => path,
        Some(("file", _)) => return Err(refuse("a path after 'file://' begins with '/'")),
        Some(("s3", rest)) => return open_s3(place, rest),
        Some(_) => return Err(refuse("expected a path, file:///PATH or s3://BUCKET/PREFIX")),
    };
    Ok(Arc::new(Directory::new(path)))
}

#[cfg(feature = "s3")]
fn open_s3(place: &str, rest: &str) -> Result<Arc<dyn Storage>> {
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let storage = crate::storage::S3::from_env(bucket, prefix);
    Ok(Arc::new(storage.map_err(|reason| Error::Place { place: place.into(), reason })?))
}

#[cfg(not(feature = "s3"))]
fn open_s3(place: &str, _: &str) -> Result<Arc<dyn Storage>> {
    let reason = "this program was built without the feature 's3'".into();
    Err(Error::Place { place: place.into(), reason })
}

/// The folder of a step's checkpoint.
pub(crate) fn step_folder(step: u64) -> String {
    format!("step-{step:012}")
}

/// The name of a checkpoint's manifest.
pub(crate) fn manifest_name(step: u64) -> String {
    format!("{}/{MANIFEST}", step_folder(step))
}

/// The name of one node's part.
pub(crate) fn part_name(step: u64, part: u32) -> String {
    format!("{}/{}", step_folder(step), part_file(part))
}

/// The same without the folder.
pub(crate) fn part_file(part: u32) -> String {
    format!("part-{part:05}.safetensors")
}

/// The manifest's name in its folder.
pub(crate) const MANIFEST: &str = "manifest.json";

/// The steps that have a folder, from the first to the last. Other folders are nobody's here.
pub(crate) fn steps(storage: &dyn Storage) -> Result<Vec<u64>> {
    let folders = storage.folders().map_err(|cause| failure(storage, "list", "folders", cause))?;
    let step = |folder: &String| {
        let step = folder.strip_prefix("step-")?.parse().ok()?;
        (step_folder(step) == *folder).then_some(step)
    };
    let mut steps: Vec<u64> = folders.iter().filter_map(step).collect();
    steps.sort_unstable();
    Ok(steps)
}

/// Whether a step has a manifest.
pub fn has_manifest(storage: &dyn Storage, step: u64) -> Result<bool> {
    let file = manifest_name(step);
    match storage.size(&file) {
        Ok(_) => Ok(true),
        Err(StorageError::Missing) => Ok(false),
        Err(cause) => Err(failure(storage, "read", &file, cause)),
    }
}

/// The error of an operation that the storage did not do.
pub(crate) fn failure(
    storage: &dyn Storage,
    action: &'static str,
    file: &str,
    cause: StorageError,
) -> Error {
    Error::Storage { place: storage.describe(), file: file.into(), action, cause }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_path_or_a_url() {
        assert_eq!(open("a/b").unwrap().describe(), "a/b");
        assert_eq!(open("file:///a/b").unwrap().describe(), "/a/b");
        for (place, words) in [
            ("", "it is empty"),
            ("file://a", "begins with '/'"),
            ("gs://bucket", "expected a path, file:///PATH or s3://BUCKET/PREFIX"),
        ] {
            let error = open(place).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn folders_of_steps_are_found_among_others() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["step-000000000200", "step-000000000030", "step-7", "step-x", "other"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        let storage = Directory::new(folder.path());
        assert_eq!(steps(&storage).unwrap(), [30, 200]);
    }
}
