//! Tags: they prove that the bytes of a frame are the ones its sender wrote, in the order it wrote
//! them (`docs/wire.md` §2, [ADR 0024](../../../docs/adr/0024-frames-carry-tags.md)).
//!
//! A frame on a TCP connection has a tag behind its header, and another one behind its payload if it
//! has one. Each direction of a connection has a key of its own, which comes out of the handshake, and
//! counts its tags from 0. The count is the tag's nonce. So a frame that is changed, repeated, left
//! out or moved has a wrong tag.

use aegis::aegis128x4::Aegis128X4Mac;
use std::fmt;

/// A tag: AEGIS-128X4 used as a MAC, 128 bits.
pub type Tag = [u8; TAG_SIZE];

/// Bytes of a tag.
pub const TAG_SIZE: usize = 16;

/// What one end of a connection tags with, and checks tags with.
#[derive(Clone, Debug)]
pub struct Tags {
    /// For what this end writes.
    pub sealer: Sealer,
    /// For what this end reads.
    pub opener: Opener,
}

/// Makes the tags of one direction.
#[derive(Clone, Debug)]
pub struct Sealer {
    key: Key,
    next: u64,
}

/// Checks the tags of one direction.
#[derive(Clone, Debug)]
pub struct Opener {
    key: Key,
    next: u64,
}

/// A tag that is being computed while its bytes come.
pub struct Tagging(Aegis128X4Mac<TAG_SIZE>);

/// A tag is not the one that its bytes have: they were changed on their way, or they are not the
/// ones whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it was changed on its way: bad memory, a faulty card or switch, or somebody between the hosts"
)]
pub struct Changed;

#[derive(Clone)]
struct Key([u8; KEY_SIZE]);

/// Bytes of one direction's key.
pub(crate) const KEY_SIZE: usize = 16;

impl Tags {
    /// The tags of a connection whose ends write with these keys.
    pub(crate) fn new(writing: [u8; KEY_SIZE], reading: [u8; KEY_SIZE]) -> Self {
        Self {
            sealer: Sealer { key: Key(writing), next: 0 },
            opener: Opener { key: Key(reading), next: 0 },
        }
    }
}

impl Sealer {
    /// The tag that comes after `ahead` others that were not [counted](Self::count) yet.
    pub fn seal_ahead(&self, ahead: u64, bytes: &[u8]) -> Tag {
        let mut tagging = self.key.begin(self.next + ahead);
        tagging.update(bytes);
        tagging.finish()
    }

    /// Begins the next tag and counts it.
    pub fn begin(&mut self) -> Tagging {
        let tagging = self.key.begin(self.next);
        self.next += 1;
        tagging
    }

    /// The next tag.
    pub fn seal(&mut self, bytes: &[u8]) -> Tag {
        let mut tagging = self.begin();
        tagging.update(bytes);
        tagging.finish()
    }

    /// So many tags have left.
    pub fn count(&mut self, tags: u64) {
        self.next += tags;
    }
}

impl Opener {
    /// Begins to check the next tag, and counts it.
    pub fn begin(&mut self) -> Tagging {
        let tagging = self.key.begin(self.next);
        self.next += 1;
        tagging
    }

    /// Checks the next tag.
    pub fn open(&mut self, bytes: &[u8], tag: &Tag) -> Result<(), Changed> {
        let mut tagging = self.begin();
        tagging.update(bytes);
        tagging.verify(tag)
    }
}

impl Tagging {
    /// The next bytes that the tag covers.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The tag.
    pub fn finish(self) -> Tag {
        self.0.finalize()
    }

    /// Compares the tag with one that came, in constant time.
    pub fn verify(self, tag: &Tag) -> Result<(), Changed> {
        self.0.verify(tag).map_err(|_| Changed)
    }
}

impl Key {
    fn begin(&self, number: u64) -> Tagging {
        let mut nonce = [0; 16];
        nonce[..8].copy_from_slice(&number.to_le_bytes());
        Tagging(Aegis128X4Mac::new_with_nonce(&self.0, &nonce))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl fmt::Debug for Tagging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tagging(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ends() -> (Tags, Tags) {
        (Tags::new([1; 16], [2; 16]), Tags::new([2; 16], [1; 16]))
    }

    /// The test vector of AEGISMAC-128X4 in the draft that specifies AEGIS. Its nonce is a number's
    /// bytes, as ours are.
    #[test]
    fn a_tag_is_what_the_specification_says() {
        let mut key = [0; KEY_SIZE];
        key[..2].copy_from_slice(&[0x10, 0x01]);
        let mut tagging = Key(key).begin(0x02_0010);
        tagging.update(&(0..35).collect::<Vec<u8>>());
        let tag = u128::from_be_bytes(tagging.finish());
        assert_eq!(tag, 0xc45a_98fd_9ab8_956c_e616_eb00_8cfe_4e53);
    }

    #[test]
    fn what_one_end_seals_the_other_opens_once_and_in_order() {
        let (mut near, mut far) = ends();
        let first = near.sealer.seal(b"first");
        let second = near.sealer.seal_ahead(0, b"second");
        let third = near.sealer.seal_ahead(1, b"third");
        near.sealer.count(1);
        assert_eq!(near.sealer.seal(b"third"), third);
        let open = |opener: &Opener, bytes: &[u8], tag| opener.clone().open(bytes, tag);
        assert_eq!(open(&far.opener, b"second", &second), Err(Changed), "one is missing");
        assert_eq!(far.opener.open(b"first", &first), Ok(()));
        assert_eq!(open(&far.opener, b"first", &first), Err(Changed), "a repetition");
        assert_eq!(far.opener.open(b"second", &second), Ok(()));
        // The two directions have different keys: nothing can be sent back.
        let (_, mut other) = ends();
        assert_eq!(other.opener.open(b"first", &first), Ok(()));
        let (mut near, _) = ends();
        assert_eq!(near.opener.open(b"first", &first), Err(Changed));
    }

    proptest! {
        #[test]
        fn one_flipped_bit_is_noticed_however_the_bytes_come(
            mut bytes in proptest::collection::vec(any::<u8>(), 1..3000),
            cut in 0usize..3000, bit in 0usize..24_000,
        ) {
            let (mut near, far) = ends();
            let tag = near.sealer.seal(&bytes);
            let cut = cut % bytes.len();
            let verify = |bytes: &[u8]| {
                let mut tagging = far.opener.clone().begin();
                tagging.update(&bytes[..cut]);
                tagging.update(&bytes[cut..]);
                tagging.verify(&tag)
            };
            prop_assert_eq!(verify(&bytes), Ok(()));
            let bit = bit % (8 * bytes.len());
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(verify(&bytes), Err(Changed));
        }
    }
}
