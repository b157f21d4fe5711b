//! The pages of an LMDB file: finds where the values of its main database lie.
//!
//! LMDB's own library maps the file and follows what it finds there, so a flipped bit ends the
//! process. Here every number is judged before it is followed, and the file is only read.
//!
//! A file consists of pages. The first two are *meta* pages, of which the one with the later
//! transaction counts; it names the root of the main database, a tree of *branch* and *leaf* pages.
//! Both have an array of offsets to their *nodes*. A node of a branch names a page below; a node of a
//! leaf has a key and a value. A value that is too long for its leaf lies in *overflow* pages, one
//! after the other. Numbers have the order of bytes of the machine that wrote them.

use super::super::DataError;
use super::super::file::DataFile;

/// Where a value lies in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Value {
    pub(super) start: u64,
    pub(super) len: u32,
}

/// Where all values lie, in the order of their keys.
pub(super) fn values(file: &DataFile) -> Result<Vec<Value>, DataError> {
    let meta = Meta::read(file)?;
    let mut tree = Tree { file, meta, values: Vec::new(), visited: 0 };
    if meta.root != NO_PAGE {
        tree.walk(meta.root, meta.depth)?;
    }
    if tree.values.len() as u64 != meta.entries {
        let got = tree.values.len().to_string();
        return Err(malformed(file, format!("{} records", meta.entries), got));
    }
    Ok(tree.values)
}

/// What a meta page says of the main database.
#[derive(Clone, Copy)]
struct Meta {
    page_size: u64,
    /// The number of the last page that is in use.
    last_page: u64,
    transaction: u64,
    root: u64,
    /// Levels of the tree.
    depth: u16,
    entries: u64,
}

impl Meta {
    /// The meta page that counts.
    fn read(file: &DataFile) -> Result<Self, DataError> {
        let truncated = |expected| DataError::Truncated {
            path: file.path().to_owned(),
            expected,
            got: file.len(),
        };
        // LMDB takes a file without its two first pages for one that is not there.
        if file.len() < 2 * SMALLEST_PAGE {
            return Err(truncated(2 * SMALLEST_PAGE));
        }
        let first = Self::at(file, 0);
        // Where the second one is, the first one says. If it is spoilt, the usual size may do.
        let page_size = first.as_ref().map_or(SMALLEST_PAGE, |meta| meta.page_size);
        let second = Self::at(file, page_size);
        let meta = match (first, second) {
            (Ok(a), Ok(b)) => {
                if b.transaction > a.transaction {
                    b
                } else {
                    a
                }
            }
            (Ok(one), Err(_)) | (Err(_), Ok(one)) => one,
            (Err(error), Err(_)) => return Err(error),
        };
        let expected = meta.last_page.checked_add(1).and_then(|n| n.checked_mul(meta.page_size));
        match expected {
            Some(expected) if expected <= file.len() => Ok(meta),
            Some(expected) => Err(truncated(expected)),
            None => {
                let got = format!("page {}", meta.last_page);
                Err(malformed(file, "pages within the file", got))
            }
        }
    }

    fn at(file: &DataFile, start: u64) -> Result<Self, DataError> {
        let mut bytes = [0; META];
        file.read(start, &mut bytes)?;
        let page = Page { file, number: 0, bytes: &bytes };
        let (magic, version) = (page.u32(16)?, page.u32(20)?);
        if (magic, version) != (MAGIC, VERSION) || page.u16(10)? & KIND != META_PAGE {
            let got = format!("{magic:#010x} and {version}");
            let expected = format!("LMDB's magic number {MAGIC:#010x} and version {VERSION}");
            return Err(malformed(file, expected, got));
        }
        let page_size = u64::from(page.u32(40)?);
        if !page_size.is_power_of_two() || !(SMALLEST_PAGE..=LARGEST_PAGE).contains(&page_size) {
            return Err(malformed(file, "pages of 4 to 64 KiB", format!("{page_size} bytes")));
        }
        Ok(Self {
            page_size,
            depth: page.u16(94)?,
            entries: page.u64(120)?,
            root: page.u64(128)?,
            last_page: page.u64(136)?,
            transaction: page.u64(144)?,
        })
    }
}

/// What was found so far.
struct Tree<'a> {
    file: &'a DataFile,
    meta: Meta,
    values: Vec<Value>,
    /// Pages that were read. A tree has no page twice.
    visited: u64,
}

impl Tree<'_> {
    /// Collects the values below page `number`, which is as many levels above the leaves as `depth`
    /// says, itself included.
    fn walk(&mut self, number: u64, depth: u16) -> Result<(), DataError> {
        let file = self.file;
        self.visited += 1;
        if self.visited > self.meta.last_page || depth == 0 || depth > DEEPEST {
            return Err(malformed(file, "a tree of pages", "pages that go round".to_owned()));
        }
        let mut bytes = vec![0; self.meta.page_size as usize];
        file.read(self.place(number, 1)?, &mut bytes)?;
        let page = Page { file, number, bytes: &bytes };
        let expected = if depth == 1 { LEAF } else { BRANCH };
        let flags = page.u16(10)?;
        if page.u64(0)? != number || flags & KIND != expected {
            let got = format!("page {} with flags {flags:#06x}", page.u64(0)?);
            let what = format!("page {number} with {expected:#06x}");
            return Err(malformed(file, what, got));
        }
        let lower = usize::from(page.u16(12)?);
        let nodes = lower.checked_sub(HEADER).filter(|_| lower <= bytes.len()).map(|n| n / 2);
        let nodes = nodes.ok_or_else(|| page.broken("its offsets end", lower))?;
        for node in 0..nodes {
            let at = usize::from(page.u16(HEADER + 2 * node)?);
            let words = [page.u16(at)?, page.u16(at + 2)?, page.u16(at + 4)?, page.u16(at + 6)?];
            let [low, high, flags, key] = words;
            let low = u64::from(low) | u64::from(high) << 16;
            if depth > 1 {
                self.walk(low | u64::from(flags) << 32, depth - 1)?;
                continue;
            }
            let data = at + NODE + usize::from(key);
            let start = match flags {
                0 => {
                    page.slice(data, low as usize)?;
                    number * self.meta.page_size + data as u64
                }
                BIG => {
                    let first = page.u64(data)?;
                    let pages = (HEADER as u64 + low).div_ceil(self.meta.page_size);
                    self.place(first, pages)? + HEADER as u64
                }
                // Caffe's tools write neither.
                _ => {
                    let got = format!("a node with flags {flags:#06x}");
                    return Err(malformed(file, "no databases in it, and a value a key", got));
                }
            };
            self.values.push(Value { start, len: low as u32 });
        }
        Ok(())
    }

    /// Where page `number` begins. The `count` pages from there on are known to be in the file.
    fn place(&self, number: u64, count: u64) -> Result<u64, DataError> {
        let last = number.checked_add(count - 1);
        match last.filter(|last| number > 1 && *last <= self.meta.last_page) {
            Some(_) => Ok(number * self.meta.page_size),
            None => {
                let expected = format!("pages 2 to {}", self.meta.last_page);
                Err(malformed(self.file, expected, format!("{count} from page {number} on")))
            }
        }
    }
}

/// The bytes of one page, of which nothing is trusted.
struct Page<'a> {
    file: &'a DataFile,
    number: u64,
    bytes: &'a [u8],
}

impl Page<'_> {
    fn slice(&self, at: usize, len: usize) -> Result<&[u8], DataError> {
        let end = at.checked_add(len);
        let bytes = end.and_then(|end| self.bytes.get(at..end));
        bytes.ok_or_else(|| self.broken("something lies", at.saturating_add(len)))
    }

    fn u16(&self, at: usize) -> Result<u16, DataError> {
        Ok(self.slice(at, 2)?.try_into().map_or(0, u16::from_ne_bytes))
    }

    fn u32(&self, at: usize) -> Result<u32, DataError> {
        Ok(self.slice(at, 4)?.try_into().map_or(0, u32::from_ne_bytes))
    }

    fn u64(&self, at: usize) -> Result<u64, DataError> {
        Ok(self.slice(at, 8)?.try_into().map_or(0, u64::from_ne_bytes))
    }

    fn broken(&self, what: &str, at: usize) -> DataError {
        let got = format!("page {}, in which {what} at byte {at}", self.number);
        malformed(self.file, format!("{} bytes in a page", self.bytes.len()), got)
    }
}

fn malformed(file: &DataFile, expected: impl Into<String>, got: String) -> DataError {
    let (path, expected) = (file.path().to_owned(), expected.into());
    DataError::Malformed { path, record: None, expected, got }
}

const SMALLEST_PAGE: u64 = 4096;
const LARGEST_PAGE: u64 = 64 << 10;
/// Bytes of a meta page that say something.
const META: usize = 152;
const MAGIC: u32 = 0xbeef_c0de;
const VERSION: u32 = 1;
/// Bytes before a page's offsets, and before a value in overflow pages.
const HEADER: usize = 16;
/// Bytes of a node before its key.
const NODE: usize = 8;
/// Bits of a page's flags that tell its kind, and kinds.
const KIND: u16 = 0x6f;
const BRANCH: u16 = 1;
const LEAF: u16 = 2;
const META_PAGE: u16 = 8;
/// The flag of a node whose value is in overflow pages.
const BIG: u16 = 1;
/// The root of an empty tree.
const NO_PAGE: u64 = u64::MAX;
/// LMDB's own limit.
const DEEPEST: u16 = 32;
