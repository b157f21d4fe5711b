//! Values of a run's steps, of which there are at most so many: a run of weeks has as many as one of
//! minutes.

/// All values at first, then every second, every fourth, and so on; and the last one.
#[derive(Debug)]
pub(super) struct Thinned<T> {
    kept: Vec<T>,
    /// One of so many is kept.
    stride: u64,
    seen: u64,
    last: Option<T>,
}

impl<T: Clone> Thinned<T> {
    pub(super) fn new() -> Self {
        Self { kept: Vec::new(), stride: 1, seen: 0, last: None }
    }

    pub(super) fn push(&mut self, value: T) {
        if self.seen.is_multiple_of(self.stride) {
            self.kept.push(value.clone());
            if self.kept.len() > MOST {
                let mut keep = false;
                self.kept.retain(|_| {
                    keep = !keep;
                    keep
                });
                self.stride *= 2;
            }
        }
        self.seen += 1;
        self.last = Some(value);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.seen == 0
    }

    pub(super) fn last(&self) -> Option<&T> {
        self.last.as_ref()
    }

    /// The values that are kept, in order. The last one is always among them.
    pub(super) fn values(&self) -> Vec<T> {
        let is_kept = self.seen > 0 && (self.seen - 1).is_multiple_of(self.stride);
        let last = self.last.iter().filter(|_| !is_kept);
        self.kept.iter().chain(last).cloned().collect()
    }
}

/// More than a figure has columns.
const MOST: usize = 1 << 12;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_values_are_all_kept() {
        let mut few = Thinned::new();
        assert!(few.is_empty() && few.values().is_empty());
        (0..1000).for_each(|value| few.push(value));
        assert_eq!(few.values(), (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn many_values_are_spread_evenly_and_end_with_the_last() {
        for count in [MOST as u64, MOST as u64 + 1, 1_000_003] {
            let mut many = Thinned::new();
            (0..count).for_each(|value| many.push(value));
            let values = many.values();
            assert!(values.len() <= MOST + 1 && values.len() > MOST / 3, "{}", values.len());
            assert_eq!((values.first(), values.last()), (Some(&0), Some(&(count - 1))));
            assert_eq!(many.last(), values.last());
            let gaps: Vec<u64> = values.windows(2).map(|pair| pair[1] - pair[0]).collect();
            let all_but_last = &gaps[..gaps.len() - 1];
            assert!(all_but_last.iter().all(|gap| *gap == gaps[0]), "{count}");
            assert!(gaps.last() <= Some(&gaps[0]), "{count}");
        }
    }
}
