//! What keeps a switch's ports from overflowing.

/// The bytes that a node sends to one peer before the next one has its turn, where its link is the
/// limit. Turns are short and go round in an order that starts at another place on every node, so
/// long runs of several senders do not meet at one port.
pub const SLOT: u64 = 32 << 10;
