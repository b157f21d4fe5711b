//! A storage that fails or is cut at every single write of a checkpoint: the previous one always
//! loads, and the half-written one is never taken for complete.

mod trial;

use poseidon_checkpoint::{
    Checkpoint, Directory, Error, Keep, State, Storage, StorageError, discard, list, prune,
    write_part,
};
use std::fs;
use std::sync::Arc;
use std::time::SystemTime;
use trial::{Left, Memory, assert_whole, latest, pieces, write};

const NODES: u32 = 3;

/// A storage with a whole checkpoint of step 100.
fn with_one() -> (Arc<Memory>, Arc<dyn Storage>) {
    let memory = Arc::new(Memory::default());
    write(&*memory, 100, NODES).unwrap();
    (memory.clone(), memory)
}

/// Writes a second checkpoint whose write `at` fails, and looks at what is there then.
fn fail(at: usize, left: Left) {
    let (memory, storage) = with_one();
    memory.fail_at(at, left);
    let error = write(&*storage, 200, NODES).unwrap_err();
    let Error::Storage { file, .. } = &error else { panic!("{error}") };
    assert!(file.starts_with("step-000000000200/"), "{error}");

    let context = format!("write {at}, left {left:?}");
    assert_whole(&Checkpoint::open(&storage, 100).unwrap());
    assert!(Checkpoint::open(&storage, 200).is_err(), "{context}");
    assert_eq!(latest(&storage), Some(100), "{context}");
    let found = list(&*storage).unwrap();
    assert_eq!(found[0].state, State::Complete, "{context}");
    let others = &found[1..];
    assert!(others.iter().all(|other| other.state != State::Complete), "{context}");
    let keep = Keep { count: Some(1), age: None };
    assert_eq!(prune(&storage, &keep, SystemTime::now()).unwrap(), [0; 0], "{context}");
    assert_eq!(latest(&storage), Some(100), "{context}");

    // The job tries again, as it is or after it has tidied up.
    memory.mend();
    if others.iter().any(|other| matches!(other.state, State::Unreadable(_))) {
        discard(&*storage, 200).unwrap();
    }
    write(&*storage, 200, NODES).unwrap();
    assert_eq!(latest(&storage), Some(200), "{context}");
    assert_eq!(prune(&storage, &keep, SystemTime::now()).unwrap(), [100], "{context}");
    assert_eq!(latest(&storage), Some(200), "{context}");
}

/// The writes of a checkpoint, and the size of each.
fn writes() -> Vec<usize> {
    let (memory, storage) = with_one();
    memory.fail_at(usize::MAX, Left::Nothing);
    write(&*storage, 200, NODES).unwrap();
    assert_eq!(memory.puts(), NODES as usize + 1, "one for each part, and the manifest");
    let mut names: Vec<_> = memory.names();
    names.retain(|name| name.starts_with("step-000000000200/"));
    // The manifest is written last, and its name is the first.
    names.rotate_left(1);
    names.iter().map(|name| memory.object(name).len()).collect()
}

/// Where a file of `bytes` bytes is cut: around its first numbers, in many places, before its end.
/// That no length but the right one is accepted is another test's.
fn cuts(bytes: usize) -> impl Iterator<Item = usize> {
    [0, 1, 7, 8, 9].into_iter().chain((16..bytes).step_by(61)).chain([bytes - 1])
}

#[test]
fn a_write_that_fails_leaves_the_previous_checkpoint() {
    for at in 0..writes().len() {
        fail(at, Left::Nothing);
    }
}

#[test]
fn a_write_that_is_cut_anywhere_leaves_the_previous_checkpoint() {
    for (at, bytes) in writes().into_iter().enumerate() {
        for kept in cuts(bytes).chain([bytes]) {
            fail(at, Left::Temporary(kept));
        }
    }
}

#[test]
fn even_a_storage_that_breaks_its_promise_fools_nobody() {
    for (at, bytes) in writes().into_iter().enumerate() {
        for kept in cuts(bytes) {
            fail(at, Left::InPlace(kept));
        }
    }
}

#[test]
fn a_part_whose_answer_is_lost_is_no_checkpoint() {
    for at in 0..NODES as usize {
        fail(at, Left::Everything);
    }
}

#[test]
fn a_manifest_whose_answer_is_lost_is_a_whole_checkpoint() {
    let (memory, storage) = with_one();
    memory.fail_at(NODES as usize, Left::Everything);
    write(&*storage, 200, NODES).unwrap_err();
    assert_eq!(latest(&storage), Some(200));
    // Who does not know that it was written discards it.
    discard(&*storage, 200).unwrap();
    assert_eq!(latest(&storage), Some(100));
}

#[test]
fn a_full_storage_says_how_much_is_missing() {
    let sizes = writes();
    for at in 0..sizes.len() {
        let (memory, storage) = with_one();
        let room = sizes[..at].iter().sum::<usize>() as u64 + 11;
        memory.set_room(room);
        let error = write(&*storage, 200, NODES).unwrap_err();
        let needed = sizes[at];
        let words = format!("no space left: {needed} bytes are needed, 11 bytes can be had");
        assert!(error.to_string().contains(&words), "{error}");
        assert!(
            matches!(&error, Error::Storage { cause: StorageError::Full { free: 11, .. }, .. }),
            "{error}"
        );
        assert_eq!(latest(&storage), Some(100));
        discard(&*storage, 200).unwrap();
        memory.mend();
        write(&*storage, 200, NODES).unwrap();
        assert_eq!(latest(&storage), Some(200));
    }
}

#[test]
fn what_a_crash_leaves_in_a_directory_is_passed_over_and_deleted_later() {
    let folder = tempfile::tempdir().unwrap();
    let storage: Arc<dyn Storage> = Arc::new(Directory::new(folder.path()));
    write(&*storage, 100, NODES).unwrap();
    write(&*storage, 300, NODES).unwrap();
    let step = |step: u64| folder.path().join(format!("step-{step:012}"));

    // All parts are there, and the manifest has not got its name.
    fs::rename(step(300).join("manifest.json"), step(300).join(".writing-a1b2c3")).unwrap();
    // A part has not got its name.
    write_part(&*storage, 200, 0, &pieces(200, 0, NODES)).unwrap();
    fs::write(step(200).join(".writing-d4e5f6"), "half a par").unwrap();
    // A folder was made and nothing in it.
    fs::create_dir(step(400)).unwrap();
    assert_eq!(latest(&storage), Some(100));
    let found = list(&*storage).unwrap();
    let unfinished = |one: &&poseidon_checkpoint::Summary| one.state == State::Unfinished;
    assert_eq!(found.iter().filter(unfinished).count(), 3);

    // The job resumes from step 100 and gets to step 300 again, with another number of nodes.
    write(&*storage, 300, 2).unwrap();
    assert_eq!(latest(&storage), Some(300));
    let keep = Keep { count: Some(2), age: None };
    assert_eq!(prune(&storage, &keep, SystemTime::now()).unwrap(), [200]);
    assert!(!step(200).exists());
    assert_eq!(latest(&storage), Some(300));
    discard(&*storage, 300).unwrap();
    assert!(!step(300).exists(), "with what the crash has left in it");
    assert_eq!(latest(&storage), Some(100));
}

#[test]
fn a_manifest_that_lost_its_content_in_a_crash_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let storage: Arc<dyn Storage> = Arc::new(Directory::new(folder.path()));
    write(&*storage, 100, NODES).unwrap();
    write(&*storage, 200, NODES).unwrap();
    // Some file systems leave an empty file, or zeros, where a rename came before the data.
    let manifest = folder.path().join("step-000000000200/manifest.json");
    let bytes = fs::read(&manifest).unwrap().len();
    for content in [vec![], vec![0; bytes]] {
        fs::write(&manifest, content).unwrap();
        assert_eq!(latest(&storage), Some(100));
        let damaged = Checkpoint::latest(&storage).unwrap().damaged;
        assert_eq!(damaged.len(), 1);
        assert!(damaged[0].1.to_string().contains("manifest.json"), "{}", damaged[0].1);
    }
}
