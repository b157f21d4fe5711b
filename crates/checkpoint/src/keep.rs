//! Which checkpoints a place has, and how long it keeps them.

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::manifest::Manifest;
use crate::part::{check_size, wrong_size};
use crate::place::{
    MANIFEST, failure, has_manifest, manifest_name, part_file, part_name, step_folder, steps,
};
use crate::storage::{Entry, Storage};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Writes the manifest. All parts are written, and the checkpoint exists when this has returned.
///
/// A part that cannot be seen from here is an error: its node writes to another place.
pub fn commit(storage: &dyn Storage, manifest: &Manifest) -> Result<()> {
    let (step, file) = (manifest.step, manifest_name(manifest.step));
    if has_manifest(storage, step)? {
        return Err(Error::Complete { place: storage.describe(), file, step });
    }
    let bytes = manifest.encode(storage)?;
    for facts in &manifest.parts {
        check_size(storage, step, facts)?;
    }
    storage.put(&file, &[&bytes]).map_err(|cause| failure(storage, "write", &file, cause))
}

/// Deletes everything of a step: a failed attempt, or a checkpoint that nobody wants any more. The
/// manifest goes first, so that nobody takes the rest for a checkpoint.
pub fn discard(storage: &dyn Storage, step: u64) -> Result<()> {
    let folder = step_folder(step);
    delete(storage, &manifest_name(step))?;
    for Entry { file, .. } in entries(storage, &folder)? {
        delete(storage, &format!("{folder}/{file}"))?;
    }
    Ok(())
}

/// One checkpoint of a place.
#[derive(Clone, Debug)]
pub struct Summary {
    /// The step.
    pub step: u64,
    /// When the manifest was written, if it can be read.
    pub created: Option<SystemTime>,
    /// Bytes of everything in its folder.
    pub bytes: u64,
    /// How many parts there are.
    pub parts: usize,
    /// Whether it can be used.
    pub state: State,
}

/// Whether a checkpoint can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The manifest is there, and every part has its size. Nothing else was read.
    Complete,
    /// There is no manifest: it is being written, or was never finished.
    Unfinished,
    /// The manifest is there, and something is wrong.
    Unreadable(String),
}

/// All checkpoints of a place, from the first step to the last. Reads their manifests.
pub fn list(storage: &dyn Storage) -> Result<Vec<Summary>> {
    steps(storage)?.into_iter().map(|step| summary(storage, step)).collect()
}

fn summary(storage: &dyn Storage, step: u64) -> Result<Summary> {
    let entries = entries(storage, &step_folder(step))?;
    let bytes = entries.iter().map(|entry| entry.bytes).fold(0, u64::saturating_add);
    let parts = entries.iter().filter(|entry| is_part(&entry.file)).count();
    let unread = |state| Summary { step, created: None, bytes, parts, state };
    if entries.iter().all(|entry| entry.file != MANIFEST) {
        return Ok(unread(State::Unfinished));
    }
    let manifest = match Manifest::read(storage, step) {
        Ok(Some(manifest)) => manifest,
        // It was deleted since.
        Ok(None) => return Ok(unread(State::Unfinished)),
        Err(error @ Error::Storage { .. }) => return Err(error),
        Err(error) => return Ok(unread(State::Unreadable(error.to_string()))),
    };
    let sizes: HashMap<&str, u64> = entries.iter().map(|e| (&*e.file, e.bytes)).collect();
    let mut state = State::Complete;
    for facts in &manifest.parts {
        let (place, file) = (storage.describe(), part_name(step, facts.part));
        let error = match sizes.get(&*part_file(facts.part)) {
            Some(&bytes) if bytes == facts.bytes => continue,
            Some(found) => wrong_size(facts.bytes, *found).damaged(place, &file),
            None => Error::MissingPart { place, file, bytes: facts.bytes },
        };
        state = State::Unreadable(error.to_string());
        break;
    }
    Ok(Summary { step, created: Some(manifest.created), bytes, parts, state })
}

/// Which checkpoints to keep. The newest one that is whole is always kept.
#[derive(Clone, Copy, Debug, Default)]
pub struct Keep {
    /// At most so many complete ones. `None`: any number.
    pub count: Option<usize>,
    /// None that are older. `None`: of any age.
    pub age: Option<Duration>,
}

/// Deletes checkpoints that are not to be kept, and what is left of older attempts that got no
/// manifest. Returns the steps that were deleted, from the first to the last.
///
/// The newest checkpoint that is whole is never deleted, and nothing that is newer: it may be about
/// to be written. Damaged checkpoints do not count. They are deleted when they are older than those
/// that are kept by count. A place without a whole checkpoint is left alone.
pub fn prune(storage: &Arc<dyn Storage>, keep: &Keep, now: SystemTime) -> Result<Vec<u64>> {
    let Some(newest) = Checkpoint::latest(storage)?.checkpoint else { return Ok(Vec::new()) };
    let older = |step: &u64| *step < newest.manifest().step;
    let mut summaries = Vec::new();
    for step in steps(&**storage)?.into_iter().filter(older) {
        summaries.push(summary(&**storage, step)?);
    }
    let doomed = doomed(&summaries, keep, now);
    for &step in &doomed {
        discard(&**storage, step)?;
    }
    Ok(doomed)
}

/// The steps to delete among those before the newest whole checkpoint, which are in order.
fn doomed(older: &[Summary], keep: &Keep, now: SystemTime) -> Vec<u64> {
    // The newest is one of those that are kept.
    let mut room = keep.count.map_or(usize::MAX, |count| count.saturating_sub(1));
    let mut doomed = Vec::new();
    for summary in older.iter().rev() {
        if summary.state == State::Unfinished {
            doomed.push(summary.step);
            continue;
        }
        // A time in the future is not old.
        let age = summary.created.and_then(|created| now.duration_since(created).ok());
        let too_old = keep.age.zip(age).is_some_and(|(most, age)| age > most);
        if room == 0 || too_old {
            doomed.push(summary.step);
        } else if summary.state == State::Complete {
            room -= 1;
        }
    }
    doomed.reverse();
    doomed
}

fn is_part(file: &str) -> bool {
    file.starts_with("part-") && file.ends_with(".safetensors")
}

fn entries(storage: &dyn Storage, folder: &str) -> Result<Vec<Entry>> {
    storage.list(folder).map_err(|cause| failure(storage, "list", folder, cause))
}

fn delete(storage: &dyn Storage, file: &str) -> Result<()> {
    storage.delete(file).map_err(|cause| failure(storage, "delete", file, cause))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(step: u64, age: u64, state: State) -> Summary {
        let created = Some(now() - Duration::from_secs(age));
        Summary { step, created, bytes: 0, parts: 0, state }
    }

    fn now() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000)
    }

    fn steps_deleted(count: Option<usize>, age: Option<u64>) -> Vec<u64> {
        let older = [
            summary(1, 50, State::Complete),
            summary(2, 40, State::Unfinished),
            summary(3, 30, State::Complete),
            summary(4, 20, State::Complete),
        ];
        doomed(&older, &Keep { count, age: age.map(Duration::from_secs) }, now())
    }

    #[test]
    fn count_and_age_decide_and_unfinished_ones_always_go() {
        assert_eq!(steps_deleted(None, None), [2]);
        assert_eq!(steps_deleted(Some(3), None), [1, 2]);
        assert_eq!(steps_deleted(Some(1), None), [1, 2, 3, 4]);
        assert_eq!(steps_deleted(Some(0), None), [1, 2, 3, 4]);
        assert_eq!(steps_deleted(None, Some(30)), [1, 2]);
        assert_eq!(steps_deleted(None, Some(29)), [1, 2, 3]);
        assert_eq!(steps_deleted(Some(2), Some(45)), [1, 2, 3]);
    }

    #[test]
    fn damaged_ones_take_nobodys_place() {
        let damaged = |step| summary(step, 0, State::Unreadable("torn".into()));
        let whole = |step| summary(step, 0, State::Complete);
        let older = [damaged(1), whole(2), damaged(3), whole(4)];
        let keep = |count| Keep { count: Some(count), age: None };
        assert_eq!(doomed(&older, &keep(3), now()), [1]);
        assert_eq!(doomed(&older, &keep(2), now()), [1, 2, 3]);
    }
}
