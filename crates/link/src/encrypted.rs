//! A link whose bytes travel in encrypted [records](crate::records).

use crate::records::Records;
use crate::{Carrier, Delivery, Link};
use mio::{Registry, Token};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::time::Duration;

/// Encrypts what goes over another link, and decrypts what comes.
pub(crate) struct EncryptedLink<L> {
    inner: L,
    records: Records,
    /// The inner link has given less than there was room for: it has nothing more just now.
    drained: bool,
}

impl<L: Link> EncryptedLink<L> {
    pub(crate) fn new(inner: L, mut records: Records) -> Self {
        records.reader.read_ahead();
        Self { inner, records, drained: false }
    }

    /// Reads encrypted bytes. False at the end of the stream.
    fn fill(&mut self) -> io::Result<bool> {
        let room = self.records.reader.room();
        let size = room.len();
        let count = self.inner.read(&mut [IoSliceMut::new(room)])?;
        self.drained = count < size;
        self.records.reader.handle_read(count);
        Ok(count > 0)
    }
}

impl<L: Link> Link for EncryptedLink<L> {
    /// Fills all of `bufs`, unless the inner link has nothing more: whoever reads takes a short read
    /// for that.
    fn read(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut total = 0;
        for buf in bufs {
            let mut done = 0;
            while done < buf.len() {
                let count = self.records.reader.copy_to(&mut buf[done..])?;
                done += count;
                total += count;
                if count > 0 {
                    continue;
                }
                if total > 0 && self.drained {
                    return Ok(total);
                }
                match self.fill() {
                    Ok(true) => {}
                    Ok(false) => return Ok(total),
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    // What has come is given first. An error that lasts comes again.
                    Err(_) if total > 0 => return Ok(total),
                    Err(e) => return Err(e),
                }
            }
        }
        Ok(total)
    }

    /// The bytes are this link's own. They are used where they are if they lie as whole units do.
    fn pass(
        &mut self,
        most: usize,
        unit: usize,
        scratch: &mut [u8],
        each: &mut dyn FnMut(&[u8]),
    ) -> io::Result<usize> {
        if self.records.reader.poll()?.is_empty() {
            match self.fill() {
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                filled => drop(filled?),
            }
            self.records.reader.poll()?;
        }
        let plain = self.records.reader.plain();
        let whole = plain.len().min(most) / unit * unit;
        let block = scratch.len() / unit * unit;
        if whole == 0 || block == 0 {
            return Ok(0);
        }
        if plain.as_ptr().addr().is_multiple_of(unit) {
            each(&plain[..whole]);
        } else {
            for piece in plain[..whole].chunks(block) {
                let place = &mut scratch[..piece.len()];
                place.copy_from_slice(piece);
                each(place);
            }
        }
        self.records.reader.consume(whole);
        Ok(whole)
    }

    /// Takes all of `bufs`, unless the inner link takes no more.
    fn write(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        self.flush()?;
        let (mut total, mut skip) = (0, 0);
        let offered = bufs.iter().map(|buf| buf.len()).sum();
        while total < offered && self.unsent() == 0 {
            let rest = bufs.iter().map(|buf| {
                let rest = &buf[skip.min(buf.len())..];
                skip -= buf.len() - rest.len();
                rest
            });
            total += self.records.writer.seal(rest);
            skip = total;
            match self.flush() {
                // They are encrypted: they count as taken, and are sent when there is room.
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                flushed => flushed?,
            }
        }
        Ok(total)
    }

    fn incoming(&self) -> usize {
        self.records.reader.incoming()
    }

    fn unsent(&self) -> usize {
        self.records.writer.held().len()
    }

    fn flush(&mut self) -> io::Result<()> {
        let writer = &mut self.records.writer;
        while !writer.held().is_empty() {
            match self.inner.write(&[IoSlice::new(writer.held())]) {
                Ok(count) => writer.handle_sent(count),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn handle_ready(&mut self) -> io::Result<()> {
        self.inner.handle_ready()
    }

    fn finish(&mut self) -> io::Result<()> {
        self.inner.finish()
    }

    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        self.inner.register(registry, token)
    }

    fn carrier(&self) -> Carrier {
        self.inner.carrier()
    }

    fn widen(&mut self, bytes: Option<usize>) -> io::Result<()> {
        self.inner.widen(bytes)
    }

    fn expect_answers(&mut self, resend_soon: bool) -> bool {
        self.inner.expect_answers(resend_soon)
    }

    fn round_trip(&self) -> Option<Duration> {
        self.inner.round_trip()
    }

    fn delivery(&self) -> Option<Delivery> {
        self.inner.delivery()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Shape, VirtualClock, pair};

    fn ends(capacity: usize) -> [EncryptedLink<crate::memory::MemoryLink>; 2] {
        let shape = Shape { capacity, seed: 7, ..Shape::default() };
        let (near, far) = pair(VirtualClock::new(), shape);
        let keys = ([1; 16], [2; 16]);
        let [near_records, far_records] =
            [Records::new(keys.0, keys.1), Records::new(keys.1, keys.0)];
        [EncryptedLink::new(near, near_records), EncryptedLink::new(far, far_records)]
    }

    /// Bytes pass a link that takes and gives them in pieces, and read short only when it is empty.
    #[test]
    fn what_is_written_is_read_through_a_narrow_link() {
        let [mut near, mut far] = ends(5000);
        let text: Vec<u8> = (0..500_000u32).map(|i| (i / 7) as u8).collect();
        let (mut written, mut got) = (0, Vec::new());
        let mut turns = 0;
        while got.len() < text.len() {
            turns += 1;
            assert!(turns < 100_000, "{written} written, {} read", got.len());
            let parts = [
                IoSlice::new(&text[written..][..(text.len() - written).min(10)]),
                IoSlice::new(&text[(written + 10).min(text.len())..]),
            ];
            match if written < text.len() { near.write(&parts) } else { near.flush().map(|()| 0) } {
                Ok(count) => written += count,
                Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
            }
            let (mut a, mut b) = ([0; 33], [0; 999]);
            match far.read(&mut [IoSliceMut::new(&mut a), IoSliceMut::new(&mut b)]) {
                Ok(count) => got.extend_from_slice(&[&a[..], &b].concat()[..count]),
                Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
            }
            let mut scratch = [0; 32];
            far.pass(100, 2, &mut scratch, &mut |block| got.extend_from_slice(block)).unwrap();
        }
        assert_eq!((got == text, near.unsent()), (true, 0));
        near.finish().unwrap();
        assert_eq!(far.read(&mut [IoSliceMut::new(&mut [0])]).unwrap(), 0);
    }
}
