//! Operations of all ranks, without engines: every frame is carried by hand, in any order that links
//! allow, and what crosses between hosts is counted.

use super::super::flow::{Mode, piece_of, pieces};
use super::super::members::Members;
use super::super::operation::{Operation, Start};
use super::super::work::Completion;
use super::super::{Request, Tensor};
use crate::engine::outbox::{Message, Payload};
use crate::memory::region::Region;
use poseidon_core::reduce::{divide, reduce};
use poseidon_core::wire::Place;
use poseidon_core::{Cluster, Dtype, NodeId, ReduceOp, Servers};
use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// Memory of a tensor, aligned for any type.
#[derive(Clone, PartialEq, Debug)]
struct Memory {
    words: Vec<u64>,
    len: usize,
    dtype: Dtype,
}

impl Memory {
    fn of(bytes: &[u8], dtype: Dtype) -> Self {
        let mut words = vec![0; bytes.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Self { words, len: bytes.len(), dtype }
    }

    /// Something that an operation overwrites.
    fn blank(count: usize, dtype: Dtype) -> Self {
        Self::of(&vec![0xa5; count * dtype.size()], dtype)
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }

    fn tensor(&mut self) -> Tensor {
        let start = NonNull::from(&mut self.words[..]).cast();
        // SAFETY: tests keep the memory until the operations are over, and look at it afterwards.
        unsafe { Tensor::from_raw(start, self.len / self.dtype.size(), self.dtype) }
    }
}

/// What `rank` contributes as its tensor number `which`: small numbers, so that floating-point sums
/// are exact in any order.
fn values(rank: usize, which: usize, count: usize, dtype: Dtype) -> Memory {
    // 0, 1, 2 and 3 in all types.
    let numbers: [[u8; 8]; 4] = [0u8, 1, 2, 3].map(|n| match dtype {
        Dtype::F32 => u64::from(f32::from(n).to_bits()).to_le_bytes(),
        Dtype::F64 => f64::from(n).to_le_bytes(),
        Dtype::F16 => [0u64, 0x3c00, 0x4000, 0x4200][usize::from(n)].to_le_bytes(),
        Dtype::Bf16 => u64::from(f32::from(n).to_bits() >> 16).to_le_bytes(),
        Dtype::Bool => u64::from(n % 2).to_le_bytes(),
        _ => u64::from(n).to_le_bytes(),
    });
    let mut bytes = Vec::with_capacity(count * dtype.size());
    for index in 0..count {
        let number = (rank * 5 + which * 3 + index * 7 + index / 11) % 4;
        bytes.extend_from_slice(&numbers[number][..dtype.size()]);
    }
    Memory::of(&bytes, dtype)
}

/// The reduction of every rank's tensor number `which`.
fn reduction(size: usize, which: usize, count: usize, dtype: Dtype, op: ReduceOp) -> Memory {
    let mut sum = values(0, which, count, dtype);
    let len = sum.len;
    let into = &mut bytemuck::cast_slice_mut(&mut sum.words)[..len];
    for rank in 1..size {
        reduce(dtype, op, into, values(rank, which, count, dtype).bytes());
    }
    if op == ReduceOp::Mean {
        divide(dtype, into, size);
    }
    sum
}

/// What goes over the ports of hosts, by host.
#[derive(Debug, PartialEq, Eq)]
struct Ports {
    sent: Vec<usize>,
    received: Vec<usize>,
}

/// Ranks by host.
fn by_rank(hosts: &[usize]) -> Vec<u16> {
    hosts.iter().zip(0..).flat_map(|(ranks, host)| vec![host; *ranks]).collect()
}

/// Carries the frames of one operation, which every rank begins with its own request, until all are
/// done. The dice say which link is next.
fn carry(hosts: &[usize], racks: &[u16], requests: Vec<Request>, dice: &mut Dice) -> Ports {
    let host_of = by_rank(hosts);
    let size = host_of.len();
    let cluster = Cluster::new(size as u16, Servers::Colocated, 1).unwrap();
    let cluster = cluster.with_hosts(host_of.clone(), racks.to_vec()).unwrap().in_a_ring();
    let mut links = Links::default();
    let mut operations = Vec::new();
    for (rank, request) in requests.into_iter().enumerate() {
        let nodes = (0..size as u16).map(NodeId).collect();
        let members = Members::new(&cluster, rank as u16, nodes, Vec::new()).unwrap();
        let start = Start {
            ticket: 0,
            sequence: 3,
            signature: None,
            begun: Duration::ZERO,
            deadline: Duration::MAX,
            completion: Arc::new(Completion::new(Box::new(()))),
        };
        let send = |to, message| links.queue(rank, to, message);
        operations.push(Operation::begin(request, start, &members.ways, send));
    }
    let mut ports = Ports { sent: vec![0; hosts.len()], received: vec![0; hosts.len()] };
    while let Some((from, to, Frame { place, payload, is_last })) = links.next(dice) {
        let (a, b) = (usize::from(host_of[from]), usize::from(host_of[to]));
        if a != b {
            ports.sent[a] += payload.len();
            ports.received[b] += payload.len();
        }
        let (region, mode) = operations[to].open(from, place, payload.len(), None).unwrap();
        // SAFETY: the memory of all ranks is there, and this thread alone touches it.
        let (place_bytes, bytes) = unsafe { (region.bytes_mut(), payload.bytes()) };
        match mode {
            Mode::Assign => place_bytes.copy_from_slice(bytes),
            Mode::Reduce(dtype, op) => reduce(dtype, op, place_bytes, bytes),
        }
        if is_last {
            operations[from].sent();
        }
        operations[to].landed(from, place, |next, message| links.queue(to, next, message));
    }
    assert!(operations.iter().all(Operation::is_complete), "stuck");
    operations.iter_mut().for_each(Operation::conclude);
    ports
}

/// Frames on their way, by sender and receiver.
#[derive(Default)]
struct Links {
    frames: BTreeMap<(usize, usize), VecDeque<Frame>>,
    /// The links that have frames.
    busy: Vec<(usize, usize)>,
}

struct Frame {
    place: Place,
    payload: Region,
    is_last: bool,
}

impl Links {
    fn queue(&mut self, from: usize, to: usize, message: Message) {
        let Payload::Region(region) = message.payload else { panic!("it has no region") };
        let first = Place::read(&message.header);
        let count = pieces(region.len());
        let link = self.frames.entry((from, to)).or_default();
        if link.is_empty() {
            self.busy.push((from, to));
        }
        for index in 0..count {
            let place = Place { piece: first.piece + index, ..first };
            let payload = piece_of(&region, index);
            link.push_back(Frame { place, payload, is_last: index + 1 == count });
        }
    }

    /// The next frame of some link.
    fn next(&mut self, dice: &mut Dice) -> Option<(usize, usize, Frame)> {
        let turn = dice.below(self.busy.len().max(1));
        let (from, to) = *self.busy.get(turn)?;
        let link = self.frames.get_mut(&(from, to))?;
        let frame = link.pop_front()?;
        if link.is_empty() {
            self.busy.swap_remove(turn);
        }
        Some((from, to, frame))
    }
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

/// One tensor for each rank, or one row of tensors for each rank.
fn rows(size: usize, make: impl Fn(usize, usize) -> Memory) -> Vec<Vec<Memory>> {
    (0..size).map(|rank| (0..size).map(|which| make(rank, which)).collect()).collect()
}

fn tensors(row: &mut [Memory]) -> Vec<Tensor> {
    row.iter_mut().map(Memory::tensor).collect()
}

/// Every operation among ranks on these hosts gives what it should on every rank, leaves what it
/// should not change, and crosses ports as often as it should. Tensors have `count` numbers, and
/// `each` where there is one for every rank.
fn all_operations(
    (hosts, racks): (&[usize], &[u16]),
    (count, each, dtype): (usize, usize, Dtype),
    reductions: &[ReduceOp],
    dice: &mut Dice,
) {
    let size: usize = hosts.iter().sum();
    let host_of = by_rank(hosts);
    let (len, each_len) = (count * dtype.size(), each * dtype.size());
    let root = dice.below(size);
    let own = |rank: usize| values(rank, 0, count, dtype);
    let mut run = |requests: Vec<Request>| carry(hosts, racks, requests, dice);
    for &op in reductions.iter().filter(|op| op.applies_to(dtype)) {
        let expected = reduction(size, 0, count, dtype, op);
        let mut all: Vec<_> = (0..size).map(own).collect();
        run(all.iter_mut().map(|x| Request::AllReduce { tensor: x.tensor(), op }).collect());
        assert!(all.iter().all(|x| *x == expected), "all_reduce({op}) of {count} {dtype}");

        let mut all: Vec<_> = (0..size).map(own).collect();
        let to = root as u16;
        let request = |x: &mut Memory| Request::Reduce { tensor: x.tensor(), root: to, op };
        let ports = run(all.iter_mut().map(request).collect());
        for (rank, x) in all.into_iter().enumerate() {
            let expected = if rank == root { expected.clone() } else { own(rank) };
            assert_eq!(x, expected, "reduce({op}) of {count} {dtype} to {root} at {rank}");
        }
        if racks.is_empty() {
            let to = usize::from(host_of[root]);
            for (host, sent) in ports.sent.iter().enumerate() {
                assert_eq!(*sent, if host == to { 0 } else { len }, "reduce from host {host}");
            }
        }

        let mut inputs = rows(size, |rank, which| values(rank, which, each, dtype));
        let mut outputs = vec![Memory::blank(each, dtype); size];
        let ports = run(inputs
            .iter_mut()
            .zip(&mut outputs)
            .map(|(row, x)| Request::ReduceScatter { inputs: tensors(row), output: x.tensor(), op })
            .collect());
        for (rank, x) in outputs.iter().enumerate() {
            assert_eq!(*x, reduction(size, rank, each, dtype, op), "reduce_scatter at {rank}");
        }
        assert_eq!(inputs, rows(size, |rank, which| values(rank, which, each, dtype)));
        if racks.is_empty() {
            for (host, sent) in ports.sent.iter().enumerate() {
                assert_eq!(
                    *sent,
                    (size - hosts[host]) * each_len,
                    "reduce_scatter from host {host}"
                );
            }
        }
    }

    let mut all: Vec<_> = (0..size).map(own).collect();
    let from = root as u16;
    let request = |x: &mut Memory| Request::Broadcast { tensor: x.tensor(), root: from };
    let ports = run(all.iter_mut().map(request).collect());
    assert!(all.iter().all(|x| *x == own(root)), "broadcast of {count} {dtype} from {root}");
    for (host, received) in ports.received.iter().enumerate() {
        let expected = if host == usize::from(host_of[root]) { 0 } else { len };
        assert_eq!(*received, expected, "broadcast to host {host}");
    }

    let mut inputs: Vec<_> = (0..size).map(|rank| values(rank, 0, each, dtype)).collect();
    let mut outputs = rows(size, |_, _| Memory::blank(each, dtype));
    let both = inputs.iter_mut().zip(&mut outputs);
    let request = |(x, row): (&mut Memory, &mut Vec<Memory>)| Request::AllGather {
        input: x.tensor(),
        outputs: tensors(row),
    };
    let ports = run(both.map(request).collect());
    assert_eq!(outputs, rows(size, |_, which| values(which, 0, each, dtype)));
    for (host, received) in ports.received.iter().enumerate() {
        assert_eq!(*received, (size - hosts[host]) * each_len, "all_gather to host {host}");
    }

    let mut inputs = rows(size, |rank, which| values(rank, which, each, dtype));
    let mut outputs = rows(size, |_, _| Memory::blank(each, dtype));
    let both = inputs.iter_mut().zip(&mut outputs);
    let request = |(x, y): (&mut Vec<Memory>, &mut Vec<Memory>)| Request::AllToAll {
        inputs: tensors(x),
        outputs: tensors(y),
    };
    run(both.map(request).collect());
    assert_eq!(outputs, rows(size, |rank, from| values(from, rank, each, dtype)));

    // Gathered from everybody, and scattered again.
    let mut inputs: Vec<_> = (0..size).map(|rank| values(rank, 0, each, dtype)).collect();
    let mut row: Vec<_> = (0..size).map(|_| Memory::blank(each, dtype)).collect();
    let request = |(rank, x): (usize, &mut Memory)| {
        let outputs = if rank == root { tensors(&mut row) } else { Vec::new() };
        Request::Gather { input: x.tensor(), outputs, root: from }
    };
    run(inputs.iter_mut().enumerate().map(request).collect());
    assert_eq!(row, inputs);
    let mut outputs: Vec<_> = (0..size).map(|_| Memory::blank(each, dtype)).collect();
    let request = |(rank, x): (usize, &mut Memory)| {
        let inputs = if rank == root { tensors(&mut row) } else { Vec::new() };
        Request::Scatter { inputs, output: x.tensor(), root: from }
    };
    run(outputs.iter_mut().enumerate().map(request).collect());
    assert_eq!(outputs, inputs);

    run((0..size).map(|_| Request::Barrier).collect());
}

#[test]
fn every_operation_of_every_type_on_several_hosts() {
    let shapes: [&[usize]; 5] = [&[16], &[4, 4, 4, 4], &[8, 8], &[3, 1, 4], &[1, 1, 1]];
    let mut dice = Dice(7);
    for hosts in shapes {
        for dtype in Dtype::ALL {
            // Nothing; less than a number for each rank; more.
            for count in [0, 5, 1001] {
                let tensors = (count, count / 8, dtype);
                all_operations((hosts, &[]), tensors, &ReduceOp::ALL, &mut dice);
            }
        }
        // A slice for each rank.
        for dtype in [Dtype::F32, Dtype::I16] {
            let tensors = (66_000 / dtype.size(), 100, dtype);
            all_operations((hosts, &[]), tensors, &[ReduceOp::Sum, ReduceOp::Mean], &mut dice);
        }
    }
}

/// Several pieces a slice, on hosts and racks of any shape.
#[test]
fn slices_of_several_pieces() {
    let mut dice = Dice(11);
    for (hosts, racks) in [
        (&[2usize, 1][..], &[][..]),
        (&[1, 3, 2], &[]),
        (&[2, 1, 2], &[0, 0, 1]),
        (&[1, 1, 1, 1], &[0, 0, 1, 1]),
    ] {
        let tensors = (500_001, 70_001, Dtype::F32);
        all_operations((hosts, racks), tensors, &[ReduceOp::Mean], &mut dice);
    }
}

/// Tensors on both sides of the length from which slices go round the ring: all ranks take one way.
#[test]
fn ranks_with_tensors_of_different_lengths_take_the_same_way() {
    let counts = [12_000, 1_000, 12_000];
    let tensors = |seed| counts.map(|count| values(seed, 0, count, Dtype::F32));
    let mut inputs = counts.map(|count| values(1, 0, count, Dtype::F32));
    let mut outputs = [0, 1, 2].map(tensors);
    let requests = inputs.iter_mut().zip(&mut outputs).map(|(input, outputs)| {
        let outputs = outputs.iter_mut().map(Memory::tensor).collect();
        Request::AllGather { input: input.tensor(), outputs }
    });
    let requests = requests.collect();
    carry(&[1; 3], &[], requests, &mut Dice(7));
}

/// What an all-reduce crosses ports with is what one rank a host crosses them with.
#[test]
fn a_large_all_reduce_crosses_a_port_as_if_each_host_had_one_rank() {
    let ports = |hosts: &[usize]| {
        let size = hosts.iter().sum();
        let mut all: Vec<_> = (0..size).map(|rank| values(rank, 0, 96_000, Dtype::F32)).collect();
        let op = ReduceOp::Sum;
        let request = |x: &mut Memory| Request::AllReduce { tensor: x.tensor(), op };
        let requests: Vec<_> = all.iter_mut().map(request).collect();
        carry(hosts, &[], requests, &mut Dice(5))
    };
    assert_eq!(ports(&[4; 4]), ports(&[1; 4]));
    assert_eq!(ports(&[8; 2]), ports(&[1; 2]));
    let quarter = 96_000 * 4 / 4;
    assert_eq!(ports(&[4; 4]).sent, [2 * 3 * quarter; 4]);
    assert_eq!(ports(&[16]).sent, [0]);
    // Uneven hosts have equal parts, but for a number or two.
    let third = 96_000 * 4 / 3;
    for sent in ports(&[3, 1, 4]).sent {
        assert!(sent.abs_diff(2 * 2 * third) <= 8, "{sent} bytes");
    }
}

/// Frames that do not follow from the tree are refused, in words.
#[test]
fn a_frame_that_takes_another_way_is_refused() {
    // Ranks 0 and 1 are on one host, 2 and 3 on another. Rank 2 collects for the slice of rank 0.
    let cluster = Cluster::new(4, Servers::Colocated, 1).unwrap();
    let cluster = cluster.with_hosts(vec![0, 0, 1, 1], Vec::new()).unwrap();
    let begin = |rank: u16, x: &mut Memory| {
        let nodes = (0..4).map(NodeId).collect();
        let members = Members::new(&cluster, rank, nodes, Vec::new()).unwrap();
        let start = Start {
            ticket: 0,
            sequence: 0,
            signature: None,
            begun: Duration::ZERO,
            deadline: Duration::MAX,
            completion: Arc::new(Completion::new(Box::new(()))),
        };
        let request = Request::AllReduce { tensor: x.tensor(), op: ReduceOp::Sum };
        Operation::begin(request, start, &members.ways, |_, _| {})
    };
    let mut x = values(2, 0, 40_000, Dtype::F32);
    let mut operation = begin(2, &mut x);
    let place = |step, slice, piece| Place { sequence: 0, step, slice, piece };
    let said = |operation: &Operation, rank, place| match operation.open(rank, place, 40_000, None)
    {
        Ok(_) => "taken".into(),
        Err(why) => why,
    };
    // Contributions to slice 0 come from rank 3, and from nobody else.
    assert_eq!(said(&operation, 3, place(0, 0, 0)), "taken");
    let refused = "nothing of step 0 of slice 0 is awaited from it";
    assert_eq!(said(&operation, 1, place(0, 0, 0)), refused);
    assert_eq!(said(&operation, 0, place(0, 0, 0)), refused);
    // Its result comes from rank 0, after the contribution of rank 3.
    let early = "the result of piece 0 before 1 contributions to it";
    assert_eq!(said(&operation, 0, place(1, 0, 0)), early);
    assert_eq!(said(&operation, 3, place(0, 0, 1)), "piece 1 of step 0 before piece 0");
    let mut passed_on = Vec::new();
    operation.landed(3, place(0, 0, 0), |to, message| {
        passed_on.push((to, Place::read(&message.header)));
    });
    assert_eq!(passed_on, [(0, place(0, 0, 0))]);
    assert_eq!(said(&operation, 0, place(1, 0, 0)), "taken");
    assert_eq!(said(&operation, 3, place(0, 0, 0)), refused);
    // Steps and slices that there are not.
    for (step, slice) in [(2, 0), (255, 0), (0, 4), (1, u16::MAX)] {
        let why = said(&operation, 3, place(step, slice, 0));
        assert!(why.contains("is awaited from it"), "{why}");
    }
    // The slice of rank 0 is awaited from rank 2 here, and from nobody else.
    let mut y = values(3, 0, 40_000, Dtype::F32);
    let mut leaf = begin(3, &mut y);
    assert_eq!(said(&leaf, 2, place(1, 0, 0)), "taken");
    assert!(said(&leaf, 0, place(1, 0, 0)).contains("is awaited from it"));
    // Rank 2 sends its own contributions to slice 3, and to slice 1, for which rank 3 collects. Apart
    // from these it sends what comes from others.
    leaf.landed(2, place(0, 3, 0), |_, _| {});
    assert!(leaf.awaits(2) && !leaf.awaits_others_through(2));
    leaf.landed(2, place(0, 1, 0), |_, _| {});
    assert!(leaf.awaits(2) && leaf.awaits_others_through(2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Hosts of any sizes, tensors of any length, frames in any order.
    #[test]
    fn any_hosts_any_order(
        hosts in proptest::collection::vec(1usize..5, 1..5),
        count in 0usize..20_000,
        dtype in 0usize..Dtype::ALL.len(),
        seed: u64,
    ) {
        let tensors = (count, count / 16, Dtype::ALL[dtype]);
        all_operations((&hosts, &[]), tensors, &ReduceOp::ALL, &mut Dice(seed));
    }
}
