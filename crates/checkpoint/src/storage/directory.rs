//! A directory of a file system.

use super::{Entry, Storage, StorageError, total};
use std::fs::{self, File, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Keeps objects as files of a directory. The directory is made with the first object.
#[derive(Debug)]
pub struct Directory {
    root: PathBuf,
}

impl Directory {
    /// The directory `root`. It need not be there yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// What `error` means for an object of `needed` bytes.
    fn write_error(&self, error: io::Error, needed: u64) -> StorageError {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                let free = rustix::fs::statvfs(&self.root);
                let free = free.map_or(0, |fs| fs.f_bavail.saturating_mul(fs.f_frsize));
                StorageError::Full { needed, free }
            }
            // The folder was there a moment ago. `Missing` would blame the object.
            io::ErrorKind::NotFound => StorageError::Failed(error.into()),
            _ => error.into(),
        }
    }
}

impl Storage for Directory {
    fn describe(&self) -> String {
        self.root.display().to_string()
    }

    fn put(&self, name: &str, slices: &[&[u8]]) -> Result<(), StorageError> {
        write_whole(&self.path(name), slices)
            .map_err(|error| self.write_error(error, total(slices)))
    }

    fn get_range(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>, StorageError> {
        let mut file = File::open(self.path(name))?;
        let there = file.metadata()?.len();
        let wanted = range.end.saturating_sub(range.start);
        // Before memory is taken: the range may come from a damaged file.
        if range.end > there {
            let found = there.saturating_sub(range.start).min(wanted);
            return Err(StorageError::Short { range, found });
        }
        file.seek(SeekFrom::Start(range.start))?;
        let mut bytes = Vec::with_capacity(usize::try_from(wanted).map_err(io::Error::other)?);
        file.take(wanted).read_to_end(&mut bytes)?;
        match bytes.len() as u64 {
            found if found < wanted => Err(StorageError::Short { range, found }),
            _ => Ok(bytes),
        }
    }

    fn size(&self, name: &str) -> Result<u64, StorageError> {
        Ok(fs::metadata(self.path(name))?.len())
    }

    fn folders(&self) -> Result<Vec<String>, StorageError> {
        let mut folders = Vec::new();
        for (name, kind) in names(&self.root)? {
            if kind.is_dir() {
                folders.push(name);
            }
        }
        Ok(folders)
    }

    fn list(&self, folder: &str) -> Result<Vec<Entry>, StorageError> {
        let folder = self.path(folder);
        let mut entries = Vec::new();
        for (file, kind) in names(&folder)? {
            if kind.is_dir() {
                continue;
            }
            match fs::metadata(folder.join(&file)) {
                Ok(facts) => entries.push(Entry { file, bytes: facts.len() }),
                // Another node has renamed or deleted it since.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(entries)
    }

    fn delete(&self, name: &str) -> Result<(), StorageError> {
        let path = self.path(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            removed => removed?,
        }
        let folder = parent(&path);
        if folder != self.root && fs::remove_dir(folder).is_ok() {
            return Ok(sync_folder(&self.root)?);
        }
        Ok(sync_folder(folder)?)
    }
}

/// Writes `path` so that it has its old content or the new one, whatever happens, and the new one
/// after this has returned.
fn write_whole(path: &Path, slices: &[&[u8]]) -> io::Result<()> {
    let folder = parent(path);
    make_folders(folder)?;
    let mut file = temporary(folder)?;
    for slice in slices {
        file.write_all(slice)?;
    }
    persist(file, path)
}

/// A file in `folder` with a name that nobody looks for. It is deleted if it is not persisted.
pub(crate) fn temporary(folder: &Path) -> io::Result<tempfile::NamedTempFile> {
    tempfile::Builder::new()
        .prefix(TEMPORARY)
        // As any file of this user: the umask takes away what others may not do.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder)
}

/// Gives a temporary file its name, when its content and then its name are on the disk.
pub(crate) fn persist(file: tempfile::NamedTempFile, path: &Path) -> io::Result<()> {
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    sync_folder(parent(path))
}

/// Makes `folder` and those above it. A new folder is on the disk when its parent is synced.
fn make_folders(folder: &Path) -> io::Result<()> {
    match fs::create_dir(folder) {
        Ok(()) => sync_folder(parent(folder)),
        Err(error) if error.kind() == io::ErrorKind::NotFound && folder.parent().is_some() => {
            make_folders(parent(folder))?;
            make_folders(folder)
        }
        // Another node may have made it.
        Err(_) if folder.is_dir() => Ok(()),
        Err(error) => Err(error),
    }
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// The folder that `path` is in.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder.as_os_str().is_empty() => Path::new("."),
        Some(folder) => folder,
        None => Path::new("/"),
    }
}

/// What is in `folder`. Names that are not text are nobody's here.
fn names(folder: &Path) -> io::Result<Vec<(String, fs::FileType)>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry?;
        if let Ok(name) = entry.file_name().into_string() {
            names.push((name, entry.file_type()?));
        }
    }
    Ok(names)
}

/// How the names of files begin that are being written.
const TEMPORARY: &str = ".writing-";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_written_listed_read_and_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let storage = Directory::new(folder.path().join("a/b"));
        assert_eq!(storage.folders().unwrap(), [""; 0]);
        assert_eq!(storage.list("x").unwrap(), []);
        storage.put("x/one", &[b"he", b"", b"llo"]).unwrap();
        storage.put("x/two", &[]).unwrap();
        storage.put("x/one", &[b"world!"]).unwrap();
        assert_eq!(storage.folders().unwrap(), ["x"]);
        let mut there = storage.list("x").unwrap();
        there.sort();
        let entry = |file: &str, bytes| Entry { file: file.into(), bytes };
        assert_eq!(there, [entry("one", 6), entry("two", 0)]);
        assert_eq!(storage.get("x/one").unwrap(), b"world!");
        assert_eq!(storage.get_range("x/one", 1..4).unwrap(), b"orl");
        storage.delete("x/one").unwrap();
        storage.delete("x/one").unwrap();
        storage.delete("x/two").unwrap();
        assert_eq!(storage.folders().unwrap(), [""; 0], "an empty folder is gone");
        assert!(matches!(storage.size("x/one"), Err(StorageError::Missing)));
    }

    #[test]
    fn a_range_past_the_end_takes_no_memory() {
        let folder = tempfile::tempdir().unwrap();
        let storage = Directory::new(folder.path());
        storage.put("x/one", &[b"hello"]).unwrap();
        let error = storage.get_range("x/one", 2..u64::MAX).unwrap_err();
        assert!(matches!(error, StorageError::Short { found: 3, .. }), "{error}");
    }

    #[test]
    fn a_write_that_fails_leaves_the_old_object_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let storage = Directory::new(folder.path());
        // A rename cannot replace a folder, so the last step of this write fails.
        fs::create_dir_all(folder.path().join("x/one/inside")).unwrap();
        storage.put("x/one", &[b"hello"]).unwrap_err();
        let left: Vec<_> = names(&folder.path().join("x")).unwrap();
        assert_eq!(left.len(), 1, "{left:?}");
    }

    #[test]
    fn a_full_disk_says_what_is_needed_and_what_is_free() {
        let folder = tempfile::tempdir().unwrap();
        let storage = Directory::new(folder.path());
        let error = storage.write_error(io::ErrorKind::StorageFull.into(), 123);
        // This disk has room, as the other tests show.
        assert!(matches!(error, StorageError::Full { needed: 123, free } if free > 0), "{error}");
    }

    #[test]
    fn a_place_that_is_a_file_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let storage = Directory::new(file.path());
        assert!(matches!(storage.put("x/one", &[b"a"]), Err(StorageError::Failed(_))));
    }
}
