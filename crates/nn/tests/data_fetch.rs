//! Downloads, against a small HTTP server on this machine that misbehaves on request.

use flate2::Compression;
use flate2::write::GzEncoder;
use md5::{Digest, Md5};
use poseidon_nn::data::fetch::{
    FetchError, FetchEvent, Format, Packed, Remote, WELL_KNOWN, WellKnown, fetch,
};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use tempfile::TempDir;

/// What the server has, and how it fails to give it.
#[derive(Clone, Default)]
struct Site {
    path: &'static str,
    contents: Vec<u8>,
    /// Gives the whole file whatever is asked for.
    ignores_ranges: bool,
    /// Answers a request for a range with one that begins a byte later.
    shifts_ranges: bool,
    /// Closes the connection after so many bytes of a whole file.
    cut: Option<usize>,
}

struct Server {
    address: SocketAddr,
    /// The `Range` of each request, empty without one.
    ranges: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(site: Site) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let ranges = Arc::<Mutex<Vec<String>>>::default();
        let seen = ranges.clone();
        let serve = move || {
            for stream in listener.incoming() {
                // A connection without a request: the test is over.
                let Some(range) = answer(&site, stream.unwrap()) else { return };
                seen.lock().unwrap().push(range);
            }
        };
        Self { address, ranges, thread: Some(thread::spawn(serve)) }
    }

    fn url(&self) -> String {
        format!("http://{}/sets/", self.address)
    }

    fn ranges(&self) -> Vec<String> {
        self.ranges.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn answer(site: &Site, mut stream: TcpStream) -> Option<String> {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let request = lines.next()?;
    let headers: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
    let range = headers.iter().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        name.eq_ignore_ascii_case("range").then(|| value.to_owned())
    });
    let path = request.split(' ').nth(1).unwrap();
    let whole = &site.contents;
    let start = range.as_deref().filter(|_| !site.ignores_ranges).map(|range| {
        range.strip_prefix("bytes=").unwrap().trim_end_matches('-').parse::<usize>().unwrap()
    });
    let (head, body) = match start {
        _ if path != format!("/sets/{}", site.path) => ("404 Not Found".to_owned(), &[][..]),
        Some(start) if start >= whole.len() => ("416 Range Not Satisfiable".to_owned(), &[][..]),
        Some(start) => {
            let start = start + usize::from(site.shifts_ranges);
            let range = format!("bytes {start}-{}/{}", whole.len() - 1, whole.len());
            (format!("206 Partial Content\r\nContent-Range: {range}"), &whole[start..])
        }
        None => ("200 OK".to_owned(), &whole[..]),
    };
    let len = body.len();
    let head = format!("HTTP/1.1 {head}\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n");
    let sent = if start.is_none() { site.cut.unwrap_or(len).min(len) } else { len };
    // The client may have gone.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body[..sent]));
    Some(range.unwrap_or_default())
}

fn contents() -> Vec<u8> {
    (0..100_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn hex_md5(bytes: &[u8]) -> String {
    Md5::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Fetches a set of one file, `digits.gz`, and gives the names in the folder afterwards.
fn fetch_one(
    base: &str,
    md5: &str,
    packed: &[Packed<'_>],
    folder: &Path,
    mirror: Option<&str>,
) -> (Result<Vec<String>, FetchError>, Vec<String>) {
    let files = [Remote { name: "digits.gz", md5, contents: packed }];
    let set = WellKnown { name: "digits", about: "", base, files: &files, format: Format::Idx };
    let mut events = Vec::new();
    let mut note = |progress: FetchEvent<'_>| {
        events.push(match progress {
            FetchEvent::Present { file } => format!("present {file}"),
            FetchEvent::Downloading { done, total, .. } => format!("{done} of {}", total.unwrap()),
            FetchEvent::Downloaded { file } => format!("downloaded {file}"),
            FetchEvent::Unpacking { file } => format!("unpacking {file}"),
            other => panic!("{other:?}"),
        });
    };
    let result = fetch(&set, folder, mirror, &mut note);
    (result.map(|()| events), names(folder))
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn digits(contents: Vec<u8>) -> Site {
    Site { path: "digits.gz", contents, ..Site::default() }
}

#[test]
fn a_whole_file_comes_once() {
    let server = Server::start(digits(contents()));
    let parent = TempDir::new().unwrap();
    let folder = parent.path().join("made/for/it");
    let md5 = hex_md5(&contents());
    let (result, names) = fetch_one(&server.url(), &md5, &[], &folder, None);
    let events = result.unwrap();
    assert_eq!(events[0], "0 of 100000");
    assert_eq!(events[events.len() - 2..], ["100000 of 100000", "downloaded digits.gz"]);
    assert_eq!(names, ["digits.gz"]);
    assert_eq!(fs::read(folder.join("digits.gz")).unwrap(), contents());

    let (result, _) = fetch_one(&server.url(), &md5, &[], &folder, None);
    assert_eq!(result.unwrap(), ["present digits.gz"]);
    assert_eq!(server.ranges(), [""]);

    fs::write(folder.join("digits.gz"), "damaged").unwrap();
    let (result, _) = fetch_one(&server.url(), &md5, &[], &folder, None);
    assert_eq!(result.unwrap().last().unwrap(), "downloaded digits.gz");
    assert_eq!(fs::read(folder.join("digits.gz")).unwrap(), contents());
}

#[test]
fn a_download_that_was_cut_goes_on() {
    let server = Server::start(Site { cut: Some(40_000), ..digits(contents()) });
    let folder = TempDir::new().unwrap();
    let md5 = hex_md5(&contents());
    let (result, names) = fetch_one(&server.url(), &md5, &[], folder.path(), None);
    let error = result.unwrap_err();
    assert!(matches!(error, FetchError::Cut { got: 40_000, total: Some(100_000), .. }), "{error}");
    assert_eq!(names, ["digits.gz.part"]);

    let (result, names) = fetch_one(&server.url(), &md5, &[], folder.path(), None);
    assert_eq!(result.unwrap()[0], "40000 of 100000");
    assert_eq!(names, ["digits.gz"]);
    assert_eq!(fs::read(folder.path().join("digits.gz")).unwrap(), contents());
    assert_eq!(server.ranges(), ["", "bytes=40000-"]);
}

#[test]
fn a_server_without_ranges_sends_all_of_it_again() {
    let server = Server::start(Site { ignores_ranges: true, ..digits(contents()) });
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("digits.gz.part"), "something else").unwrap();
    let (result, names) = fetch_one(&server.url(), &hex_md5(&contents()), &[], folder.path(), None);
    assert_eq!(result.unwrap()[0], "0 of 100000");
    assert_eq!(names, ["digits.gz"]);
    assert_eq!(server.ranges(), ["bytes=14-"]);
}

#[test]
fn a_part_that_is_all_of_it_is_put_in_place() {
    let server = Server::start(digits(contents()));
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("digits.gz.part"), contents()).unwrap();
    let (result, names) = fetch_one(&server.url(), &hex_md5(&contents()), &[], folder.path(), None);
    assert_eq!(result.unwrap(), ["downloaded digits.gz"]);
    assert_eq!(names, ["digits.gz"]);
}

#[test]
fn a_range_that_was_not_asked_for_is_refused() {
    let server = Server::start(Site { shifts_ranges: true, ..digits(contents()) });
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("digits.gz.part"), &contents()[..10]).unwrap();
    let (result, names) = fetch_one(&server.url(), &hex_md5(&contents()), &[], folder.path(), None);
    let error = result.unwrap_err();
    assert!(
        matches!(&error, FetchError::Range { expected: 10, got, .. } if got == "bytes 11-99999/100000"),
        "{error}"
    );
    assert_eq!(names, [""; 0]);
}

#[test]
fn a_file_with_another_checksum_is_deleted() {
    let server = Server::start(digits(contents()));
    let folder = TempDir::new().unwrap();
    let expected = hex_md5(b"what was published");
    let (result, names) = fetch_one(&server.url(), &expected, &[], folder.path(), None);
    assert_eq!(
        result.unwrap_err().to_string(),
        format!(
            "{}digits.gz: expected a file with MD5 {expected}, got {}; it was deleted",
            server.url(),
            hex_md5(&contents()),
        )
    );
    assert_eq!(names, [""; 0]);
}

#[test]
fn a_file_that_the_server_does_not_have_is_named() {
    let server = Server::start(Site { path: "letters.gz", ..digits(contents()) });
    let folder = TempDir::new().unwrap();
    let (result, names) = fetch_one(&server.url(), &hex_md5(&contents()), &[], folder.path(), None);
    assert_eq!(
        result.unwrap_err().to_string(),
        format!("{}digits.gz: the server answered 404 Not Found", server.url())
    );
    assert_eq!(names, [""; 0]);
}

#[test]
fn a_mirror_is_asked_instead() {
    let server = Server::start(digits(contents()));
    let folder = TempDir::new().unwrap();
    // A port that was free a moment ago.
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let base = format!("http://{nobody}");
    let md5 = hex_md5(&contents());
    let (result, _) = fetch_one(&base, &md5, &[], folder.path(), None);
    let error = result.unwrap_err();
    assert!(matches!(&error, FetchError::Request { url, .. } if url.starts_with(&base)), "{error}");
    let (result, names) = fetch_one(&base, &md5, &[], folder.path(), Some(&server.url()));
    result.unwrap();
    assert_eq!(names, ["digits.gz"]);
}

#[test]
fn two_do_not_fetch_into_one_folder() {
    let folder = TempDir::new().unwrap();
    let lock = fs::File::open(folder.path()).unwrap();
    lock.lock().unwrap();
    let (result, _) = fetch_one("http://127.0.0.1:9", "", &[], folder.path(), None);
    assert!(matches!(result, Err(FetchError::Busy(path)) if path == folder.path()));
}

fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
    for (name, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, format!("some-folder/{name}"), *bytes).unwrap();
    }
    builder.into_inner().unwrap().finish().unwrap()
}

const PACKED: [Packed<'_>; 3] = [
    Packed { name: "a.bin", len: Some(5) },
    Packed { name: "b.bin", len: Some(3) },
    Packed { name: "names.txt", len: None },
];

#[test]
fn an_archive_is_unpacked_and_deleted() {
    let packed = archive(&[("readme", b"?"), ("b.bin", b"bbb"), ("a.bin", b"aaaaa")]);
    let md5 = hex_md5(&packed);
    let server = Server::start(digits(packed));
    let folder = TempDir::new().unwrap();
    let (result, names) = fetch_one(&server.url(), &md5, &PACKED, folder.path(), None);
    let events = result.unwrap();
    assert_eq!(events[events.len() - 2..], ["downloaded digits.gz", "unpacking digits.gz"]);
    assert_eq!(names, ["a.bin", "b.bin"]);
    assert_eq!(fs::read(folder.path().join("b.bin")).unwrap(), b"bbb");

    let (result, _) = fetch_one(&server.url(), &md5, &PACKED, folder.path(), None);
    assert_eq!(result.unwrap(), ["present digits.gz"]);
    assert_eq!(server.ranges(), [""]);

    fs::write(folder.path().join("a.bin"), "cut").unwrap();
    let (result, _) = fetch_one(&server.url(), &md5, &PACKED, folder.path(), None);
    result.unwrap();
    assert_eq!(fs::read(folder.path().join("a.bin")).unwrap(), b"aaaaa");
}

#[test]
fn an_archive_that_lacks_something_leaves_nothing_unpacked() {
    let whole = archive(&[("a.bin", b"aaaaa"), ("b.bin", b"bbb")]);
    for (packed, wrong) in [
        (archive(&[("a.bin", b"aaaaa")]), "expected b.bin, got an archive without it"),
        (archive(&[("a.bin", b"aaaaa"), ("b.bin", b"bb")]), "expected b.bin of 3 bytes, got 2"),
        (whole[..whole.len() / 2].to_vec(), "digits.gz: "),
    ] {
        let md5 = hex_md5(&packed);
        let server = Server::start(digits(packed));
        let folder = TempDir::new().unwrap();
        let (result, names) = fetch_one(&server.url(), &md5, &PACKED, folder.path(), None);
        let error = result.unwrap_err().to_string();
        assert!(error.contains("digits.gz") && error.contains(wrong), "{error}");
        assert_eq!(names, ["digits.gz"]);
    }
}

#[test]
fn the_table_of_well_known_sets_is_well_formed() {
    for set in WELL_KNOWN {
        assert!(set.base.starts_with("http") && !set.base.ends_with('/'), "{}", set.base);
        for file in set.files {
            assert_eq!(file.md5.len(), 32);
            assert!(file.md5.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f')), "{}", file.md5);
        }
        assert!(set.source(Path::new("here")).to_string().ends_with(":here"));
    }
}
