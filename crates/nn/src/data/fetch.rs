//! Downloads of the well-known data sets: resumed where they were cut, checked, and put in place whole.

mod well_known;

pub use well_known::{Format, Packed, Remote, WELL_KNOWN, WellKnown};

use flate2::read::GzDecoder;
use md5::{Digest, Md5};
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use ureq::http::StatusCode;
use ureq::http::header::{CONTENT_RANGE, RANGE};

/// What a fetch reports while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FetchEvent<'a> {
    /// The file was there already.
    Present {
        /// The file.
        file: &'a str,
    },
    /// Some more of the file has come.
    Downloading {
        /// The file.
        file: &'a str,
        /// Bytes of it that are here.
        done: u64,
        /// Bytes of it in all, if the server says.
        total: Option<u64>,
    },
    /// All of the file has come and is right.
    Downloaded {
        /// The file.
        file: &'a str,
    },
    /// The file is being unpacked.
    Unpacking {
        /// The file.
        file: &'a str,
    },
}

/// Why a data set could not be fetched.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// A file or folder could not be written or read.
    #[error("{}: {why}", .path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        why: Arc<io::Error>,
    },
    /// Another process is fetching into the same folder.
    #[error("{}: another process is fetching into this folder", .0.display())]
    Busy(PathBuf),
    /// The server could not be asked.
    #[error("{url}: {why}")]
    Request {
        /// What was asked for.
        url: String,
        /// What happened.
        why: String,
    },
    /// The server does not give the file.
    #[error("{url}: the server answered {status}")]
    Status {
        /// What was asked for.
        url: String,
        /// Its answer.
        status: StatusCode,
    },
    /// The server sent another part of the file than was asked for.
    #[error("{url}: asked for the file from byte {expected} on, and got '{got}'; fetch it again")]
    Range {
        /// What was asked for.
        url: String,
        /// Where the part should begin.
        expected: u64,
        /// What the server says that it sent.
        got: String,
    },
    /// The connection broke.
    #[error(
        "{url}: cut off at byte {got}{}: {why}; fetch it again to go on from there",
        .total.map_or(String::new(), |total| format!(" of {total}"))
    )]
    Cut {
        /// What was asked for.
        url: String,
        /// How much is here.
        got: u64,
        /// How much there is, if the server said so.
        total: Option<u64>,
        /// What happened.
        why: String,
    },
    /// The file that came is not the one that was published. It has been deleted.
    #[error("{url}: expected a file with MD5 {expected}, got {got}; it was deleted")]
    Checksum {
        /// What was asked for.
        url: String,
        /// The published file's.
        expected: String,
        /// That of what came.
        got: String,
    },
    /// An archive does not hold what it should.
    #[error("{}: expected {expected}, got {got}", .path.display())]
    Archive {
        /// The archive.
        path: PathBuf,
        /// What it should hold.
        expected: String,
        /// What it does hold.
        got: String,
    },
}

/// How long a server may take to let us in, to answer, or to send the next byte.
const PATIENCE: Duration = Duration::from_secs(60);

/// Fetches what is not there yet of `set` into `folder`, which is made if need be. `mirror` is where
/// to look for the files instead of where they were published.
///
/// A file is downloaded to `NAME.part`, checked, and then renamed: what has its name is whole. A
/// download that was cut goes on where it ended.
pub fn fetch(
    set: &WellKnown<'_>,
    folder: &Path,
    mirror: Option<&str>,
    report: &mut dyn FnMut(FetchEvent<'_>),
) -> Result<(), FetchError> {
    fs::create_dir_all(folder).map_err(|why| io_error(folder, why))?;
    let lock = File::open(folder).map_err(|why| io_error(folder, why))?;
    // Storage that knows no locks is no reason not to fetch.
    if let Err(TryLockError::WouldBlock) = lock.try_lock() {
        return Err(FetchError::Busy(folder.to_owned()));
    }
    let base = mirror.unwrap_or(set.base).trim_end_matches('/');
    for remote in set.files {
        let file = remote.name;
        let path = folder.join(file);
        if remote.is_unpacked(folder) {
            report(FetchEvent::Present { file });
            continue;
        }
        if path.is_file() && md5(&path)? == remote.md5 {
            report(FetchEvent::Present { file });
        } else {
            let download = Download { url: format!("{base}/{file}"), file, path: &path };
            download.run(remote.md5, report)?;
            report(FetchEvent::Downloaded { file });
        }
        if !remote.contents.is_empty() {
            report(FetchEvent::Unpacking { file });
            remote.unpack(&path, folder)?;
        }
    }
    Ok(())
}

struct Download<'a> {
    url: String,
    file: &'a str,
    path: &'a Path,
}

impl Download<'_> {
    fn run(&self, md5: &str, report: &mut dyn FnMut(FetchEvent<'_>)) -> Result<(), FetchError> {
        let part = beside(self.path, ".part");
        self.download(&part, report)?;
        let got = self::md5(&part)?;
        if got != md5 {
            fs::remove_file(&part).map_err(|why| io_error(&part, why))?;
            let (url, expected) = (self.url.clone(), md5.to_owned());
            return Err(FetchError::Checksum { url, expected, got });
        }
        fs::rename(&part, self.path).map_err(|why| io_error(self.path, why))
    }

    /// Completes `part`. Whether it is right is for the checksum to say.
    fn download(
        &self,
        part: &Path,
        report: &mut dyn FnMut(FetchEvent<'_>),
    ) -> Result<(), FetchError> {
        let url = &self.url;
        let failed = |why| io_error(part, why);
        let mut out = OpenOptions::new().create(true).append(true).open(part).map_err(failed)?;
        let mut done = out.metadata().map_err(failed)?.len();

        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(PATIENCE))
            .timeout_recv_response(Some(PATIENCE))
            .timeout_per_read(Some(PATIENCE))
            .build()
            .new_agent();
        let mut request = agent.get(url);
        if done > 0 {
            request = request.header(RANGE, format!("bytes={done}-"));
        }
        let response = request
            .call()
            .map_err(|why| FetchError::Request { url: url.clone(), why: why.to_string() })?;

        let total = match response.status() {
            // All of it, from a server that keeps no account of parts.
            StatusCode::OK => {
                out.set_len(0).map_err(failed)?;
                done = 0;
                response.body().content_length()
            }
            StatusCode::PARTIAL_CONTENT => {
                let range = response.headers().get(CONTENT_RANGE);
                let range = range.and_then(|range| range.to_str().ok()).unwrap_or_default();
                match parse_range(range) {
                    Some((start, total)) if start == done => total,
                    _ => {
                        fs::remove_file(part).map_err(failed)?;
                        let (url, got) = (url.clone(), range.to_owned());
                        return Err(FetchError::Range { url, expected: done, got });
                    }
                }
            }
            // Nothing comes after what is here.
            StatusCode::RANGE_NOT_SATISFIABLE if done > 0 => return Ok(()),
            status => {
                if done == 0 {
                    fs::remove_file(part).map_err(failed)?;
                }
                return Err(FetchError::Status { url: url.clone(), status });
            }
        };

        let cut = |got, why| FetchError::Cut { url: url.clone(), got, total, why };
        let mut body = response.into_body().into_reader();
        let mut buffer = vec![0; 1 << 16];
        loop {
            report(FetchEvent::Downloading { file: self.file, done, total });
            let len = match body.read(&mut buffer) {
                Ok(0) => break,
                Ok(len) => len,
                Err(why) if why.kind() == io::ErrorKind::Interrupted => continue,
                Err(why) => return Err(cut(done, why.to_string())),
            };
            out.write_all(&buffer[..len]).map_err(failed)?;
            done += len as u64;
        }
        if total.is_some_and(|total| done < total) {
            return Err(cut(done, "the server sent no more".to_owned()));
        }
        out.sync_all().map_err(failed)
    }
}

impl Remote<'_> {
    fn is_unpacked(&self, folder: &Path) -> bool {
        let is_there = |file: &Packed<'_>| {
            let len = fs::metadata(folder.join(file.name)).ok().map(|metadata| metadata.len());
            file.len.is_none() || file.len == len
        };
        !self.contents.is_empty() && self.contents.iter().all(is_there)
    }

    /// Unpacks into a folder of its own first, so that what has its name is whole. The archive is
    /// deleted in the end.
    fn unpack(&self, archive: &Path, folder: &Path) -> Result<(), FetchError> {
        let aside = beside(archive, ".unpacked");
        if aside.exists() {
            fs::remove_dir_all(&aside).map_err(|why| io_error(&aside, why))?;
        }
        fs::create_dir(&aside).map_err(|why| io_error(&aside, why))?;
        let unpacked = self.unpack_aside(archive, &aside).and_then(|()| {
            for file in self.contents.iter().filter(|file| aside.join(file.name).exists()) {
                let path = folder.join(file.name);
                fs::rename(aside.join(file.name), &path).map_err(|why| io_error(&path, why))?;
            }
            fs::remove_file(archive).map_err(|why| io_error(archive, why))
        });
        let removed = fs::remove_dir_all(&aside).map_err(|why| io_error(&aside, why));
        unpacked.and(removed)
    }

    fn unpack_aside(&self, archive: &Path, aside: &Path) -> Result<(), FetchError> {
        let failed = |why| io_error(archive, why);
        let malformed =
            |expected, got| FetchError::Archive { path: archive.to_owned(), expected, got };
        let file = File::open(archive).map_err(failed)?;
        let mut archive = tar::Archive::new(GzDecoder::new(BufReader::new(file)));
        for entry in archive.entries().map_err(failed)? {
            let mut entry = entry.map_err(failed)?;
            let path = entry.path().map_err(failed)?.into_owned();
            let wanted = |file: &&Packed<'_>| path.file_name().is_some_and(|n| n == file.name);
            let Some(wanted) = self.contents.iter().find(wanted) else { continue };
            if wanted.len.is_some_and(|len| len != entry.size()) {
                let expected = wanted.len.unwrap_or_default();
                let expected = format!("{} of {expected} bytes", wanted.name);
                return Err(malformed(expected, entry.size().to_string()));
            }
            let path = aside.join(wanted.name);
            let mut out = File::create(&path).map_err(|why| io_error(&path, why))?;
            io::copy(&mut entry, &mut out).map_err(failed)?;
            out.sync_all().map_err(|why| io_error(&path, why))?;
        }
        let missing =
            self.contents.iter().find(|file| file.len.is_some() && !aside.join(file.name).exists());
        match missing {
            Some(file) => Err(malformed(file.name.to_owned(), "an archive without it".to_owned())),
            None => Ok(()),
        }
    }
}

/// `bytes START-END/TOTAL`, where the total may be `*`.
fn parse_range(range: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = range.strip_prefix("bytes ")?.split_once('/')?;
    let (start, _) = range.split_once('-')?;
    Some((start.parse().ok()?, total.parse().ok()))
}

fn md5(path: &Path) -> Result<String, FetchError> {
    let failed = |why| io_error(path, why);
    let mut file = File::open(path).map_err(failed)?;
    let mut digest = Md5::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer).map_err(failed)? {
            0 => break,
            len => digest.update(&buffer[..len]),
        }
    }
    let mut digits = String::new();
    for byte in digest.finalize() {
        let _ = write!(digits, "{byte:02x}");
    }
    Ok(digits)
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

fn io_error(path: &Path, why: io::Error) -> FetchError {
    FetchError::Io { path: path.to_owned(), why: Arc::new(why) }
}
