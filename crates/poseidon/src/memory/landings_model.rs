//! Landings in every order that lanes and the thread that takes them may run in, as far as loom tells
//! them apart.

mod atomics {
    pub(super) use loom::sync::atomic::{AtomicU64, Ordering};
}

#[expect(clippy::duplicate_mod, reason = "the same code, with other atomics")]
#[path = "landings.rs"]
mod landings;

use landings::Landings;
use loom::cell::UnsafeCell;
use loom::thread;
use std::rc::Rc;

/// Chunks, and whether they have landed.
struct Layer {
    landings: Landings,
    chunks: [UnsafeCell<u32>; 2],
}

impl Layer {
    /// Takes what has landed. Loom ends the test if a chunk is read that is not ordered after its
    /// lane's write.
    fn take(&self, sum: &mut u32) {
        // SAFETY: loom ends the test if another thread writes meanwhile.
        self.landings.take(|index| *sum += self.chunks[index].with(|chunk| unsafe { *chunk }));
    }
}

/// Two lanes land a chunk each, in one word of bits.
#[test]
fn every_chunk_is_taken_once_and_after_it_was_written() {
    loom::model(|| {
        let chunks = [UnsafeCell::new(0), UnsafeCell::new(0)];
        let layer = Rc::new(Layer { landings: Landings::new(2), chunks });
        let lanes = [0, 1].map(|index: u32| {
            let layer = layer.clone();
            thread::spawn(move || {
                // SAFETY: as in `take`.
                layer.chunks[index as usize].with_mut(|chunk| unsafe { *chunk = 1 + index });
                layer.landings.note(index);
            })
        });
        let mut sum = 0;
        layer.take(&mut sum);
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
        layer.take(&mut sum);
        assert_eq!(sum, 3);
    });
}
