//! Frames of other processes on their way to operations, for fuzz targets.

use super::channel::GroupChannel;
use super::shared::Shared;
use super::start_order::Start;
use super::work::Completion;
use super::{Members, Request, Tensor};
use crate::engine::{Engine, Links};
use poseidon_core::wire::{Header, HeaderError};
use poseidon_core::{ChannelId, Cluster, Dtype, NodeId, ReduceOp, Servers};
use poseidon_link::Link;
use poseidon_link::memory::{MemoryLink, Shape, VirtualClock, pair};
use std::io::{IoSlice, IoSliceMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// The ranks of the group. The one that hears is rank 0.
pub const RANKS: u16 = 3;
/// The channel of the group.
pub const CHANNEL: u32 = 2;
/// Elements of a tensor, which are of `f32`.
pub const COUNT: usize = 8;

/// Numbers before and behind each tensor, which nobody may touch.
const MARGIN: usize = 4;
const UNTOUCHED: f32 = 12345.0;
/// Bytes of a frame that are sent at most.
const MOST: usize = 4096;

/// Rank 0 begins the operation that the first byte says, and hears frames of the other ranks: a
/// byte that says from whom, a header, and its payload. A header gets the right checksum; what is
/// missing of a payload is zeros. Whether the operation succeeds; nothing if it still waits.
///
/// # Panics
/// If a frame changes memory that was not lent.
pub fn route(input: &[u8]) -> Option<bool> {
    let (which, mut frames) = input.split_first()?;
    let mut memory: Vec<Vec<f32>> = (0..=RANKS).map(|_| margined()).collect();
    let mut list: Vec<Tensor> = memory.iter_mut().map(|values| tensor(values)).collect();
    let (one, op) = (list.remove(0), ReduceOp::Sum);
    let request = match which % 8 {
        0 => Request::AllReduce { tensor: one, op },
        1 => Request::ReduceScatter { inputs: list, output: one, op },
        2 => Request::AllGather { input: one, outputs: list },
        3 => Request::Broadcast { tensor: one, root: 1 },
        4 => Request::Reduce { tensor: one, root: 0, op },
        5 => Request::Gather { input: one, outputs: list, root: 0 },
        6 => Request::Receive { tensor: one, from: None, tag: 5 },
        _ => Request::Barrier,
    };
    let (mut engine, mut far, shared) = rank_0();
    let completion = Arc::new(Completion::new(Box::new(())));
    let (timeout, begun) = (Duration::from_secs(60), completion.clone());
    shared.begin(Start { request, timeout, completion: begun });
    turn(&mut engine, &mut far);
    while let Some((from, rest)) = frames.split_first() {
        let Some((header, rest)) = rest.split_first_chunk() else { break };
        let header = with_checksum(*header);
        let length = Header::decode(&header).map_or(0, |header| header.length as usize).min(MOST);
        let (payload, rest) = rest.split_at(length.min(rest.len()));
        frames = rest;
        let mut frame = [&header[..], payload].concat();
        frame.resize(header.len() + length, 0);
        let mut left = &frame[..];
        // An end that has closed takes nothing, and one that nobody reads takes no more.
        while !left.is_empty()
            && let Ok(taken) = far[usize::from(*from % 2)].write(&[IoSlice::new(left)])
        {
            left = &left[taken..];
            turn(&mut engine, &mut far);
        }
    }
    // The operation lets go of the memory before anybody looks at it.
    drop(engine);
    for values in &memory {
        let (before, behind) = (&values[..MARGIN], &values[MARGIN + COUNT..]);
        assert!(before.iter().chain(behind).all(|value| *value == UNTOUCHED), "{values:?}");
    }
    completion.is_done().then(|| completion.failure().is_none())
}

fn margined() -> Vec<f32> {
    let mut values = vec![UNTOUCHED; COUNT + 2 * MARGIN];
    values[MARGIN..MARGIN + COUNT].fill(1.0);
    values
}

fn tensor(values: &mut [f32]) -> Tensor {
    let start = NonNull::from(&mut *values).cast::<f32>();
    // SAFETY: within the values, which `route` keeps and does not touch until the engine is gone.
    unsafe { Tensor::from_raw(start.add(MARGIN).cast(), COUNT, Dtype::F32) }
}

/// Rank 0, and the far ends of its links to the others.
fn rank_0() -> (Engine, Vec<MemoryLink>, Arc<Shared>) {
    let cluster = Cluster::new(RANKS, Servers::Colocated, 1).expect("a small cluster");
    let names = (0..RANKS).map(|rank| format!("rank {rank}")).collect();
    let nodes = (0..RANKS).map(NodeId).collect();
    let members = Members::new(&cluster, 0, nodes, names).expect("all nodes are in the cluster");
    let shared = Arc::new(Shared::new(RANKS, 1));
    let channel = GroupChannel::new(ChannelId(CHANNEL), 0, members, shared.clone());
    let (mut links, mut far) = (Links::new(), Vec::new());
    for other in 1..RANKS {
        let (near, end) = pair(VirtualClock::new(), Shape::default());
        links.push((NodeId(other), Box::new(near)));
        far.push(end);
    }
    let (silence, now) = (Duration::from_secs(15), Duration::ZERO);
    let mut engine = Engine::new(NodeId(0), usize::from(RANKS), links, silence, now);
    engine.attach(Box::new(channel), now);
    (engine, far, shared)
}

/// Lets the engine work, and takes what it says.
fn turn(engine: &mut Engine, far: &mut [MemoryLink]) {
    for _ in 0..3 {
        (1..RANKS).for_each(|node| engine.handle_ready(NodeId(node), true, true, false));
        engine.turn(Duration::ZERO);
        for link in &mut *far {
            let mut said = [0; 1024];
            while link.read(&mut [IoSliceMut::new(&mut said)]).is_ok_and(|read| read > 0) {}
        }
    }
}

fn with_checksum(mut header: [u8; Header::SIZE]) -> [u8; Header::SIZE] {
    if let Err(HeaderError::Checksum { expected, .. }) = Header::decode(&header) {
        header[Header::SIZE - 4..].copy_from_slice(&expected.to_le_bytes());
    }
    header
}
