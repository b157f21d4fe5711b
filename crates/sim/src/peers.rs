//! A set of nodes.

/// Nodes as bits: a thousand of them are two cache lines.
#[derive(Clone, Debug)]
pub(crate) struct Peers {
    words: Box<[u64]>,
}

impl Peers {
    /// None of `nodes` nodes.
    pub(crate) fn none(nodes: usize) -> Self {
        Self { words: vec![0; nodes.div_ceil(64)].into() }
    }

    pub(crate) fn contains(&self, peer: usize) -> bool {
        self.words[peer / 64] >> (peer % 64) & 1 == 1
    }

    pub(crate) fn insert(&mut self, peer: usize) {
        self.words[peer / 64] |= 1 << (peer % 64);
    }

    pub(crate) fn remove(&mut self, peer: usize) {
        self.words[peer / 64] &= !(1 << (peer % 64));
    }

    /// Takes out those that are in `others` too, and returns them.
    pub(crate) fn take(&mut self, others: &Self) -> Self {
        let pairs = self.words.iter_mut().zip(&others.words);
        let taken = pairs.map(|(word, other)| {
            let both = *word & other;
            *word &= !other;
            both
        });
        Self { words: taken.collect() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    pub(crate) fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.words.iter().enumerate().flat_map(|(at, &word)| {
            let mut left = word;
            std::iter::from_fn(move || {
                let bit = left.trailing_zeros() as usize;
                left &= left.wrapping_sub(1);
                (bit < 64).then_some(at * 64 + bit)
            })
        })
    }

    /// The first member at or after `from`, beginning again at 0.
    pub(crate) fn next_from(&self, from: usize) -> Option<usize> {
        let first = from / 64;
        let masked = self.words[first] & (u64::MAX << (from % 64));
        let rest = self.words[first + 1..].iter().copied().zip(first + 1..);
        // What is before `from` in its word comes last.
        let again = self.words[..=first].iter().copied().zip(0..);
        std::iter::once((masked, first))
            .chain(rest)
            .chain(again)
            .find(|(word, _)| *word != 0)
            .map(|(word, at)| at * 64 + word.trailing_zeros() as usize)
    }
}
