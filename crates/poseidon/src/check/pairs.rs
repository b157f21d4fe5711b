//! Rounds in which every node meets another one, and over all of which all pairs meet: the circle
//! method of tournaments.

/// The numbers of the rounds of `nodes` nodes. Of very many rounds, some that are evenly spread.
pub(super) fn rounds(nodes: usize) -> impl Iterator<Item = usize> {
    let all = places(nodes) - 1;
    let step = all.div_ceil(MOST_ROUNDS).max(1);
    (0..if nodes > 1 { all } else { 0 }).step_by(step)
}

/// Whom `node` meets in `round`. Nobody, in one round of an odd number of nodes.
pub(super) fn partner(node: usize, round: usize, nodes: usize) -> Option<usize> {
    let circle = places(nodes) - 1;
    // The one in the middle of the circle meets who would meet itself.
    let other = if node == circle {
        (0..circle).find(|other| 2 * other % circle == round)?
    } else {
        match (round + circle - node % circle) % circle {
            other if other == node => circle,
            other => other,
        }
    };
    (other < nodes && other != node).then_some(other)
}

/// Nodes, and an empty place if their number is odd.
fn places(nodes: usize) -> usize {
    nodes.next_multiple_of(2).max(2)
}

/// A round takes about half a second.
const MOST_ROUNDS: usize = 127;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn all_pairs_meet_once_and_nobody_is_in_two_pairs_of_a_round() {
        for nodes in 1..=33 {
            let mut met = BTreeSet::new();
            for round in rounds(nodes) {
                for node in 0..nodes {
                    let Some(other) = partner(node, round, nodes) else { continue };
                    assert_eq!(partner(other, round, nodes), Some(node), "{nodes} nodes");
                    let fresh = node > other || met.insert((node, other));
                    assert!(fresh, "{node} and {other} of {nodes} meet twice");
                }
            }
            assert_eq!(met.len(), nodes * (nodes - 1) / 2, "{nodes} nodes");
        }
    }

    #[test]
    fn of_many_rounds_some_are_taken() {
        assert_eq!(rounds(128).count(), 127);
        assert!((64..=127).contains(&rounds(1000).count()));
    }
}
