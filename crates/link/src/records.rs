//! Records: how bytes travel on an encrypted connection (`docs/wire.md` §2,
//! [ADR 0030](../../../docs/adr/0030-encryption-on-request.md)).
//!
//! A record is a head and a body, and each of them is encrypted and has a tag: AEGIS-128X4. The head
//! says how long the body is. Each direction of a connection has a key of its own, which comes out of
//! the handshake, and counts what it encrypts from 0. The count is the nonce. So a record that is
//! changed, repeated, left out or moved has a wrong tag.
//!
//! Frames lie in records as they lie in any stream: a record may hold several frames, or a piece of
//! one. Nobody sees a byte of a record before its tag was right.
//!
//! [`RecordWriter`] and [`RecordReader`] know no socket: plain bytes in, encrypted bytes out, and back.

use crate::tags::{Changed, KEY_SIZE, TAG_SIZE, Tag};
use aegis::aegis128x4::Aegis128X4;
use std::fmt;
use std::io::{self, ErrorKind};

/// Both directions of one end of an encrypted connection.
#[derive(Debug)]
pub struct Records {
    /// Encrypts what this end writes.
    pub(crate) writer: RecordWriter,
    /// Decrypts what this end reads.
    pub(crate) reader: RecordReader,
}

/// Encrypts one direction. It holds encrypted bytes until the connection has taken them.
#[derive(Debug)]
pub(crate) struct RecordWriter {
    cipher: Cipher,
    /// Encrypted records. The vector grows to what is written at a time and is used again.
    held: Vec<u8>,
    /// Bytes of them that the connection has taken.
    sent: usize,
    /// Plain bytes in them that a [blocking](RecordWriter::write_with) writer was not told of.
    untold: usize,
}

/// Decrypts one direction, in place.
#[derive(Debug)]
pub(crate) struct RecordReader {
    cipher: Cipher,
    buffer: Vec<u8>,
    /// Bytes that the buffer has once it is used.
    size: usize,
    /// Bytes that have come and were not consumed: `buffer[start..end]`.
    start: usize,
    end: usize,
    /// Plain bytes from `start` on, whose tag was right. Their tag follows.
    plain: usize,
    /// The length of the body that comes next, once its head was opened.
    body: Option<usize>,
}

impl Records {
    /// The records of a connection whose ends write with these keys.
    pub(crate) fn new(writing: [u8; KEY_SIZE], reading: [u8; KEY_SIZE]) -> Self {
        let writer =
            RecordWriter { cipher: Cipher::new(writing), held: Vec::new(), sent: 0, untold: 0 };
        let reader = RecordReader {
            cipher: Cipher::new(reading),
            buffer: Vec::new(),
            size: 2 * LONGEST_RECORD,
            start: 0,
            end: 0,
            plain: 0,
            body: None,
        };
        Self { writer, reader }
    }
}

impl RecordWriter {
    /// Encrypts a prefix of what the slices hold together, at most [`AT_ONCE`] bytes, and holds it.
    /// Returns the prefix's length. Nothing may be held yet.
    pub(crate) fn seal<'a>(&mut self, slices: impl IntoIterator<Item = &'a [u8]>) -> usize {
        debug_assert!(self.held().is_empty());
        self.held.clear();
        self.sent = 0;
        let mut room = AT_ONCE;
        let mut open = None;
        for mut bytes in slices {
            while !bytes.is_empty() && room > 0 {
                let body = *open.get_or_insert_with(|| {
                    self.held.resize(self.held.len() + HEAD, 0);
                    self.held.len()
                });
                let count = bytes.len().min(room).min(BODY - (self.held.len() - body));
                self.held.extend_from_slice(&bytes[..count]);
                bytes = &bytes[count..];
                room -= count;
                if self.held.len() - body == BODY {
                    self.close(body);
                    open = None;
                }
            }
        }
        if let Some(body) = open {
            self.close(body);
        }
        AT_ONCE - room
    }

    /// Encrypted bytes that the connection has not taken.
    pub(crate) fn held(&self) -> &[u8] {
        &self.held[self.sent..]
    }

    /// The connection has taken so many of them.
    pub(crate) fn handle_sent(&mut self, bytes: usize) {
        self.sent += bytes;
    }

    /// Writes some of `bytes` by `write`, which may fail half-way. Whoever then tries again has to
    /// come with the same bytes: some of them are encrypted already.
    pub(crate) fn write_with(
        &mut self,
        bytes: &[u8],
        mut write: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        if self.held().is_empty() {
            self.untold = self.seal([bytes]);
        }
        while !self.held().is_empty() {
            match write(self.held())? {
                0 => return Err(ErrorKind::WriteZero.into()),
                count => self.handle_sent(count),
            }
        }
        Ok(std::mem::take(&mut self.untold))
    }

    /// Encrypts the record whose body begins at `body` and is the last of what is held.
    fn close(&mut self, body: usize) {
        let length = (self.held.len() - body) as u64;
        let (heads, body) = self.held.split_at_mut(body);
        let head = heads.len() - HEAD;
        let (encrypted, tag) = heads[head..].split_at_mut(LENGTH);
        encrypted.copy_from_slice(&length.to_le_bytes());
        tag.copy_from_slice(&self.cipher.seal(encrypted));
        let tag = self.cipher.seal(body);
        self.held.extend(tag);
    }
}

impl RecordReader {
    /// From now on as much is read at a time as a lane wants.
    pub(crate) fn read_ahead(&mut self) {
        self.size = READ_AHEAD;
    }

    /// Where the next bytes from the connection go. Never empty. Asked for when
    /// [`poll`](Self::poll) has nothing.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        if self.buffer.len() < self.size {
            self.buffer.resize(self.size, 0);
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start >= self.buffer.len() / 2 {
            // Elements stay aligned.
            let to = self.start % align_of::<u64>();
            self.buffer.copy_within(self.start..self.end, to);
            (self.start, self.end) = (to, to + self.end - self.start);
        }
        // A record that begins in the first half has room to its end.
        &mut self.buffer[self.end..]
    }

    /// The next `bytes` bytes are in the [room](Self::room).
    pub(crate) fn handle_read(&mut self, bytes: usize) {
        self.end += bytes;
    }

    /// The plain bytes that come next, of one record. Empty if no record is all there.
    pub(crate) fn poll(&mut self) -> io::Result<&[u8]> {
        let changed = |error: Changed| io::Error::new(ErrorKind::InvalidData, error);
        if self.plain == 0 && self.body.is_none() && self.end - self.start >= HEAD {
            let head = &mut self.buffer[self.start..self.start + HEAD];
            let length = self.cipher.open(head).map_err(changed)?;
            let length =
                u64::from_le_bytes(length.try_into().expect("a head's length has 8 bytes"));
            if length == 0 || length > BODY as u64 {
                let why = format!("a record of {length} bytes, expected 1 to {BODY}");
                return Err(io::Error::new(ErrorKind::InvalidData, why));
            }
            self.body = Some(length as usize);
            self.start += HEAD;
        }
        if let Some(length) = self.body
            && self.end - self.start >= length + TAG_SIZE
        {
            let body = &mut self.buffer[self.start..self.start + length + TAG_SIZE];
            self.cipher.open(body).map_err(changed)?;
            (self.plain, self.body) = (length, None);
        }
        Ok(self.plain())
    }

    /// The plain bytes that come next, as far as they were decrypted.
    pub(crate) fn plain(&self) -> &[u8] {
        &self.buffer[self.start..self.start + self.plain]
    }

    /// Bytes that have come of a record that is not all there.
    pub(crate) fn incoming(&self) -> usize {
        if self.plain == 0 { self.end - self.start } else { 0 }
    }

    /// Takes so many of the plain bytes.
    pub(crate) fn consume(&mut self, bytes: usize) {
        let bytes = bytes.min(self.plain);
        self.start += bytes;
        self.plain -= bytes;
        if bytes > 0 && self.plain == 0 {
            self.start += TAG_SIZE;
        }
    }

    /// Copies plain bytes into `buf`. None if no record is all there.
    pub(crate) fn copy_to(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let plain = self.poll()?;
        let count = plain.len().min(buf.len());
        buf[..count].copy_from_slice(&plain[..count]);
        self.consume(count);
        Ok(count)
    }

    /// Reads into `buf`, and has `read` read encrypted bytes until a record is all there.
    pub(crate) fn read_with(
        &mut self,
        buf: &mut [u8],
        mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            let count = self.copy_to(buf)?;
            if count > 0 || buf.is_empty() {
                return Ok(count);
            }
            match read(self.room())? {
                0 => return Ok(0),
                count => self.handle_read(count),
            }
        }
    }
}

/// A key, and how often it was used.
struct Cipher {
    key: [u8; KEY_SIZE],
    next: u64,
}

impl Cipher {
    fn new(key: [u8; KEY_SIZE]) -> Self {
        Self { key, next: 0 }
    }

    /// Encrypts `bytes` in place and returns their tag.
    fn seal(&mut self, bytes: &mut [u8]) -> Tag {
        self.turn().encrypt_in_place(bytes, &[])
    }

    /// Decrypts bytes that end with their tag, in place, and returns them without it. Those that were
    /// changed are erased.
    fn open<'a>(&mut self, bytes: &'a mut [u8]) -> Result<&'a [u8], Changed> {
        let (bytes, tag) = bytes.split_last_chunk_mut().ok_or(Changed)?;
        self.turn().decrypt_in_place(bytes, tag, &[]).map_err(|_| Changed)?;
        Ok(bytes)
    }

    fn turn(&mut self) -> Aegis128X4<TAG_SIZE> {
        let mut nonce = [0; 16];
        nonce[..8].copy_from_slice(&self.next.to_le_bytes());
        self.next += 1;
        Aegis128X4::new(&self.key, &nonce)
    }
}

impl fmt::Debug for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cipher(..)")
    }
}

/// Bytes of a record's body at most. Copied and then encrypted in place, records of 16 KiB took 35 GB/s
/// on one core, those of 4 KiB 26, those of 64 KiB 23: two copies of a body fit into the first-level
/// cache (ADR 0030).
const BODY: usize = 16 << 10;
/// Bytes of a length, of a head with its tag, and of a whole record at most. All are multiples of 8, so
/// that elements are aligned where they lie.
const LENGTH: usize = 8;
const HEAD: usize = LENGTH + TAG_SIZE;
const LONGEST_RECORD: usize = HEAD + BODY + TAG_SIZE;
/// Plain bytes that are encrypted before the connection is offered any: a batch of a lane.
const AT_ONCE: usize = 128 << 10;
/// What a lane reads from a connection at a time, at most.
const READ_AHEAD: usize = 8 * LONGEST_RECORD;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ends() -> (Records, Records) {
        (Records::new([1; 16], [2; 16]), Records::new([2; 16], [1; 16]))
    }

    /// What `bytes` are on the wire, if they are written at once.
    fn sealed(writer: &mut RecordWriter, bytes: &[u8]) -> Vec<u8> {
        let mut wire = Vec::new();
        let mut left = bytes;
        while !left.is_empty() {
            let count = writer.write_with(left, |held| {
                wire.extend_from_slice(held);
                Ok(held.len())
            });
            left = &left[count.unwrap()..];
        }
        wire
    }

    /// What the reader makes of `wire`, which comes in steps.
    fn opened(reader: &mut RecordReader, mut wire: &[u8], step: usize) -> io::Result<Vec<u8>> {
        let mut plain = Vec::new();
        let mut buf = [0; 1000];
        loop {
            let read = |room: &mut [u8]| {
                let count = room.len().min(step).min(wire.len());
                room[..count].copy_from_slice(&wire[..count]);
                wire = &wire[count..];
                Ok(count)
            };
            match reader.read_with(&mut buf, read)? {
                0 => return Ok(plain),
                count => plain.extend_from_slice(&buf[..count]),
            }
        }
    }

    #[test]
    fn the_layout_is_what_the_specification_says() {
        let (mut near, _) = ends();
        let wire = sealed(&mut near.writer, b"frame");
        assert_eq!(wire.len(), 8 + 16 + 5 + 16);
        let decrypt = |number: u8, bytes: &[u8]| {
            let mut nonce = [0; 16];
            nonce[0] = number;
            let (bytes, tag) = bytes.split_last_chunk().unwrap();
            Aegis128X4::<16>::new(&[1; 16], &nonce).decrypt(bytes, tag, &[]).unwrap()
        };
        assert_eq!(decrypt(0, &wire[..24]), 5u64.to_le_bytes());
        assert_eq!(decrypt(1, &wire[24..]), b"frame");
    }

    #[test]
    fn nothing_repeated_left_out_moved_or_sent_back_is_taken() {
        let (mut near, _) = ends();
        let [first, second] = [b"first", b"secon"].map(|bytes| sealed(&mut near.writer, bytes));
        let hear = |wire: &[&[u8]]| opened(&mut ends().1.reader, &wire.concat(), usize::MAX);
        assert_eq!(hear(&[&first, &second]).unwrap(), b"firstsecon");
        for wire in [[&first, &first], [&second, &first]] {
            let error = hear(&wire.map(|w| &w[..])).unwrap_err();
            assert!(error.to_string().contains("changed on its way"), "{error}");
        }
        hear(&[&second]).unwrap_err();
        opened(&mut near.reader, &first, usize::MAX).unwrap_err();
    }

    /// Somebody who knows the keys and is broken.
    #[test]
    fn a_record_of_no_length_or_too_long_is_refused() {
        for length in [0, BODY as u64 + 1, u64::MAX] {
            let mut head = length.to_le_bytes();
            let tag = Cipher::new([1; 16]).seal(&mut head);
            let wire = [&head[..], &tag].concat();
            let error = opened(&mut ends().1.reader, &wire, usize::MAX).unwrap_err();
            assert!(error.to_string().contains(&length.to_string()), "{error}");
        }
    }

    /// A write that fails half-way is tried again with the same bytes, and nothing is encrypted twice.
    #[test]
    fn a_write_that_was_cut_short_goes_on() {
        let (mut near, mut far) = ends();
        let text: Vec<u8> = (0..40_000u32).map(|i| i as u8).collect();
        let (mut wire, mut left, mut turn) = (Vec::new(), &text[..], 0);
        while !left.is_empty() {
            let wrote = near.writer.write_with(left, |held| {
                turn += 1;
                if turn % 3 == 0 {
                    return Err(ErrorKind::TimedOut.into());
                }
                let count = held.len().min(777);
                wire.extend_from_slice(&held[..count]);
                Ok(count)
            });
            left = &left[wrote.unwrap_or(0)..];
        }
        assert_eq!(opened(&mut far.reader, &wire, 1448).unwrap(), text);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_however_it_comes(
            lengths in proptest::collection::vec(1usize..60_000, 1..6), step in 1usize..200_000,
            ahead: bool,
        ) {
            let (mut near, mut far) = ends();
            if ahead {
                far.reader.read_ahead();
            }
            let mut expected = Vec::new();
            let mut wire = Vec::new();
            for (i, length) in lengths.into_iter().enumerate() {
                let text: Vec<u8> = (0..length).map(|at| (at * (i + 3)) as u8).collect();
                wire.extend(sealed(&mut near.writer, &text));
                expected.extend(text);
            }
            prop_assert_eq!(opened(&mut far.reader, &wire, step.max(50)).unwrap(), expected);
        }

        /// In a length, a body or a tag.
        #[test]
        fn one_flipped_bit_is_noticed_and_nothing_of_its_record_is_shown(
            length in 1usize..40_000, bit in any::<proptest::sample::Index>(), step in 50usize..50_000,
        ) {
            let (mut near, mut far) = ends();
            let text = vec![0x55; length];
            let mut wire = sealed(&mut near.writer, &text);
            let bit = bit.index(8 * wire.len());
            wire[bit / 8] ^= 1 << (bit % 8);
            let mut shown = 0;
            let mut left = &wire[..];
            let error = loop {
                match far.reader.poll() {
                    Err(error) => break error,
                    Ok([]) => {
                        prop_assert!(!left.is_empty(), "bit {} was not noticed", bit);
                        let room = far.reader.room();
                        let count = room.len().min(step).min(left.len());
                        room[..count].copy_from_slice(&left[..count]);
                        left = &left[count..];
                        far.reader.handle_read(count);
                    }
                    Ok(plain) => {
                        prop_assert!(plain.iter().all(|byte| *byte == 0x55));
                        let count = plain.len();
                        shown += count;
                        far.reader.consume(count);
                    }
                }
            };
            prop_assert!(error.get_ref().is_some_and(|inner| inner.is::<Changed>()));
            // All records before it are shown, and none behind it.
            prop_assert_eq!(shown, bit / 8 / LONGEST_RECORD * BODY);
        }
    }
}
