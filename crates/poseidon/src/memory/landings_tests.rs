//! Landings, by one thread.

use super::landings::Landings;

#[test]
fn what_is_noted_is_taken_once_and_in_order() {
    let landings = Landings::new(130);
    [129, 0, 64, 63].into_iter().for_each(|index| landings.note(index));
    let mut taken = Vec::new();
    landings.take(|index| taken.push(index));
    landings.take(|index| taken.push(index));
    assert_eq!(taken, [0, 63, 64, 129]);
}
