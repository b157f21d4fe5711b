//! Collective operations, on real links.

use crate::cluster::without_hanging;
use poseidon::collectives::{Request, Tensor, Terms};
use poseidon::config::{Carriers, Config, credentials};
use poseidon::{Coordinator, Dtype, Error, Group, ReduceOp, Secret};
use std::net::{IpAddr, Ipv4Addr};
use std::ptr::NonNull;
use std::thread;
use std::time::Duration;

const TERMS: Terms = Terms { timeout: Duration::from_secs(30), waits: true };

/// Runs `work` on every rank of a group of `size`, each its own thread.
fn run<T: Send + 'static>(
    size: u16,
    carrier: Carriers,
    work: impl Fn(&Group) -> T + Clone + Send + 'static,
) -> Vec<T> {
    run_on(&[size], carrier, work)
}

/// The same, with this many ranks on each host.
fn run_on<T: Send + 'static>(
    hosts: &[u16],
    carrier: Carriers,
    work: impl Fn(&Group) -> T + Clone + Send + 'static,
) -> Vec<T> {
    run_with(hosts, Links { carrier, ..Links::default() }, work)
}

/// What ranks are connected by.
#[derive(Clone, Copy, Default)]
struct Links {
    carrier: Carriers,
    /// Between hosts.
    encrypt: bool,
    /// As many as the ports need, if nobody says how many.
    lanes: Option<u16>,
}

/// The same, with such links.
fn run_with<T: Send + 'static>(
    hosts: &[u16],
    links: Links,
    work: impl Fn(&Group) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let Links { carrier, encrypt, lanes } = links;
    let size = hosts.iter().sum();
    let host_of = hosts.iter().zip(0..).flat_map(|(ranks, host)| vec![host; usize::from(*ranks)]);
    let host_of: Vec<u16> = host_of.collect();
    without_hanging(move || {
        let secret: Secret = "known to all of us".parse().unwrap();
        let patience = Duration::from_secs(20);
        let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let keys = credentials("group", secret.clone(), encrypt);
        let coordinator = Coordinator::bind(loopback, 0, keys, patience).unwrap();
        let at = coordinator.address().to_string();
        let ranks = (0..size).map(|rank| {
            let mut config = Config::for_group(rank, size, &at, "group", secret.clone()).unwrap();
            config.carrier = carrier;
            config.encrypt = encrypt;
            if let Some(lanes) = lanes {
                (config.lanes, config.lanes_by_rate) = (lanes, false);
            }
            config.host = Some(format!("host {}", host_of[usize::from(rank)]));
            let work = work.clone();
            thread::spawn(move || {
                let names = (0..size).map(|rank| format!("rank {rank}")).collect();
                let group = Group::start(&config, names, None).unwrap();
                let result = work(&group);
                group.leave();
                group.wait_left(Duration::from_secs(5));
                result
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

trait Number: Copy + Send + Sync + 'static {
    const DTYPE: Dtype;
}

impl Number for f32 {
    const DTYPE: Dtype = Dtype::F32;
}

impl Number for i64 {
    const DTYPE: Dtype = Dtype::I64;
}

impl Number for u8 {
    const DTYPE: Dtype = Dtype::U8;
}

/// The tensor of `values`, which outlives its operation: every test waits.
fn tensor<T: Number>(values: &mut [T]) -> Tensor {
    let start = NonNull::from(&mut *values).cast();
    // SAFETY: the slice is valid and aligned; tests wait for the operation before they look at it.
    unsafe { Tensor::from_raw(start, values.len(), T::DTYPE) }
}

fn tensors<T: Number>(rows: &mut [Vec<T>]) -> Vec<Tensor> {
    rows.iter_mut().map(|row| tensor(row)).collect()
}

fn act(group: &Group, request: Request) -> Result<(), Error> {
    let work = group.begin(request, TERMS, Box::new(()))?;
    assert!(work.wait(Duration::from_secs(60))?, "done within its own timeout");
    Ok(())
}

/// What rank `rank` contributes at `index`: small integers, so that sums are exact in any order.
fn value(rank: usize, index: usize) -> i64 {
    (rank * 7 + index * 3 % 11) as i64
}

fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|index| value(rank, index) as f32).collect()
}

/// Empty, less than a rank each, odd, above the limit for small ones, several pieces a slice.
const SIZES: [usize; 6] = [0, 1, 7, 1001, 20_011, 700_001];

fn every_collective(hosts: &[u16], links: Links, sizes: &'static [usize]) {
    let size: u16 = hosts.iter().sum();
    // Every rank is a root where there are few.
    let roots = (0..size).step_by(if size > 5 { usize::from(size / 2) } else { 1 });
    let work = move |group: &Group| {
        let (me, ranks) = (usize::from(group.rank()), usize::from(size));
        for &len in sizes {
            let sum = |index: usize| (0..ranks).map(|r| value(r, index)).sum::<i64>() as f32;
            let mut x = values(me, len);
            act(group, Request::AllReduce { tensor: tensor(&mut x), op: ReduceOp::Sum }).unwrap();
            assert!(x.iter().enumerate().all(|(i, &x)| x == sum(i)), "all_reduce of {len}");

            let mut x = values(me, len);
            act(group, Request::AllReduce { tensor: tensor(&mut x), op: ReduceOp::Mean }).unwrap();
            let mean = |i| sum(i) / ranks as f32;
            assert!(x.iter().enumerate().all(|(i, &x)| x == mean(i)), "mean of {len}");

            let mut x: Vec<i64> = (0..len).map(|i| value(me, i)).collect();
            act(group, Request::AllReduce { tensor: tensor(&mut x), op: ReduceOp::Max }).unwrap();
            assert!(x.iter().enumerate().all(|(i, &x)| x == value(ranks - 1, i)), "max of {len}");

            for root in roots.clone() {
                let mut x = values(me, len);
                act(group, Request::Broadcast { tensor: tensor(&mut x), root }).unwrap();
                assert_eq!(x, values(root.into(), len), "broadcast of {len} from {root}");

                let mut x = values(me, len);
                let op = ReduceOp::Sum;
                act(group, Request::Reduce { tensor: tensor(&mut x), root, op }).unwrap();
                let expected = if usize::from(root) == me {
                    (0..len).map(sum).collect()
                } else {
                    values(me, len)
                };
                assert_eq!(x, expected, "reduce of {len} to {root}");

                let mut input = values(me, len);
                let here = usize::from(root) == me;
                let mut rows = vec![vec![0f32; len]; if here { ranks } else { 0 }];
                let (input_, outputs) = (tensor(&mut input), tensors(&mut rows));
                act(group, Request::Gather { input: input_, outputs, root }).unwrap();
                assert!(rows.iter().enumerate().all(|(r, row)| *row == values(r, len)));

                let mut rows: Vec<_> =
                    (0..if here { ranks } else { 0 }).map(|r| values(r + 1, len)).collect();
                let mut output = vec![0f32; len];
                let (inputs, output_) = (tensors(&mut rows), tensor(&mut output));
                act(group, Request::Scatter { inputs, output: output_, root }).unwrap();
                assert_eq!(output, values(me + 1, len), "scatter of {len} from {root}");
            }

            let mut input = values(me, len);
            let mut rows = vec![vec![0f32; len]; ranks];
            let (input_, outputs) = (tensor(&mut input), tensors(&mut rows));
            act(group, Request::AllGather { input: input_, outputs }).unwrap();
            assert!(rows.iter().enumerate().all(|(r, row)| *row == values(r, len)));

            let mut rows: Vec<_> = (0..ranks).map(|r| values(me + r, len)).collect();
            let mut output = vec![0f32; len];
            let (inputs, output_) = (tensors(&mut rows), tensor(&mut output));
            let op = ReduceOp::Sum;
            act(group, Request::ReduceScatter { inputs, output: output_, op }).unwrap();
            let expected = |i| (0..ranks).map(|r| value(r + me, i)).sum::<i64>() as f32;
            assert!(output.iter().enumerate().all(|(i, &x)| x == expected(i)), "{len}");

            // Rank r sends r + s + len / 7 numbers to rank s.
            let mut rows: Vec<_> = (0..ranks).map(|s| values(me, me + s + len / 7)).collect();
            let mut got: Vec<_> = (0..ranks).map(|r| vec![0f32; r + me + len / 7]).collect();
            let (inputs, outputs) = (tensors(&mut rows), tensors(&mut got));
            act(group, Request::AllToAll { inputs, outputs }).unwrap();
            assert!(got.iter().enumerate().all(|(r, row)| *row == values(r, r + me + len / 7)));
            act(group, Request::Barrier).unwrap();
        }
    };
    run_with(hosts, links, work);
}

const MEMORY: Links = Links { carrier: Carriers::Auto, encrypt: false, lanes: None };
const TCP: Links = Links { carrier: Carriers::Tcp, ..MEMORY };

#[test]
fn every_collective_in_shared_memory() {
    for size in [1, 2, 3, 5] {
        every_collective(&[size], MEMORY, &SIZES);
    }
}

#[test]
fn every_collective_over_tcp() {
    for size in [2, 3, 5] {
        every_collective(&[size], TCP, &SIZES);
    }
}

/// Shared memory inside the hosts, TCP between them. Where many ranks share a port their windows are
/// smaller than a packet of the loopback interface, on which TCP then waits for its timers. So many
/// ranks have small tensors here.
#[test]
fn every_collective_on_several_hosts() {
    every_collective(&[1, 2], MEMORY, &[0, 1, 7, 1001, 20_011, 200_001]);
    every_collective(&[2, 2], MEMORY, &[200_001]);
    every_collective(&[3, 1, 4], MEMORY, &[7, 1001]);
    every_collective(&[4, 4, 4, 4], MEMORY, &[7, 1001]);
}

/// The large ones are cut into parts, one for each lane. The odd one is not cut evenly.
#[test]
fn every_collective_on_several_lanes() {
    let lanes = |lanes| Links { lanes: Some(lanes), ..MEMORY };
    every_collective(&[3], lanes(2), &SIZES);
    every_collective(&[2, 1, 1], lanes(3), &[7, 700_001]);
    every_collective(&[2], Links { carrier: Carriers::Tcp, ..lanes(4) }, &[7, 1_000_000]);
}

#[test]
fn every_collective_on_encrypted_connections() {
    let encrypted = Links { encrypt: true, ..MEMORY };
    every_collective(&[3], Links { encrypt: true, ..TCP }, &SIZES);
    every_collective(&[2, 1, 2], encrypted, &[7, 1001, 20_011]);
}

#[test]
fn operations_overlap_and_everybody_gets_the_same_bits() {
    overlap(&[3], MEMORY);
    overlap(&[2, 1], MEMORY);
    overlap(&[3], Links { lanes: Some(3), ..MEMORY });
}

fn overlap(hosts: &[u16], links: Links) {
    let results = run_with(hosts, links, |group| {
        let me = usize::from(group.rank());
        let lens = [300_001, 5, 70_000, 0, 1_000_003];
        let noise = |len: usize| -> Vec<f32> {
            (0..len).map(|i| 1.0 / (1 + (i * 31 + me * 17) % 1009) as f32).collect()
        };
        let mut all: Vec<Vec<f32>> = lens.iter().map(|&len| noise(len)).collect();
        let works: Vec<_> = all
            .iter_mut()
            .map(|x| {
                let request = Request::AllReduce { tensor: tensor(x), op: ReduceOp::Sum };
                let terms = Terms { waits: false, ..TERMS };
                group.begin(request, terms, Box::new(())).unwrap()
            })
            .collect();
        for work in works.iter().rev() {
            assert!(work.wait(Duration::from_secs(60)).unwrap());
        }
        all.iter().map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>()).collect::<Vec<_>>()
    });
    assert!(results.iter().all(|bits| *bits == results[0]));
}

#[test]
fn messages_are_matched_by_tag_and_order() {
    run(3, Carriers::Auto, |group| {
        let me = group.rank();
        let begin = |request| group.begin(request, TERMS, Box::new(())).unwrap();
        let patience = Duration::from_secs(60);
        if me > 0 {
            // Asked for in another order than sent in; the first is larger than a ring.
            let mut first = vec![f32::from(me); 200_000];
            let mut others = [vec![1u8; 3], vec![2u8; 3], vec![3u8; 0]];
            let tags = [7, 7, 9];
            let mut works =
                vec![begin(Request::Send { tensor: tensor(&mut first), to: 0, tag: 5 })];
            for (values, tag) in others.iter_mut().zip(tags) {
                works.push(begin(Request::Send { tensor: tensor(values), to: 0, tag }));
            }
            assert!(works.iter().all(|work| work.wait(patience).unwrap()));
            return;
        }
        for from in [2, 1] {
            let from = Some(from);
            let mut none = vec![0u8; 0];
            act(group, Request::Receive { tensor: tensor(&mut none), from, tag: 9 }).unwrap();
            for expected in [1, 2] {
                let mut x = vec![0u8; 3];
                act(group, Request::Receive { tensor: tensor(&mut x), from, tag: 7 }).unwrap();
                assert_eq!(x, [expected; 3]);
            }
        }
        let mut sources = Vec::new();
        for _ in 0..2 {
            let mut x = vec![0f32; 200_000];
            let work = begin(Request::Receive { tensor: tensor(&mut x), from: None, tag: 5 });
            assert!(work.wait(patience).unwrap());
            let source = work.source().unwrap();
            assert_eq!(x, vec![f32::from(source); 200_000]);
            sources.push(source);
        }
        sources.sort_unstable();
        assert_eq!(sources, [1, 2]);
    });
}

#[test]
fn ranks_that_do_different_things_are_told_what_each_did() {
    let errors = run(3, Carriers::Auto, |group| {
        let len = if group.rank() == 1 { 120 } else { 100 };
        let mut x = vec![1f32; len];
        act(group, Request::AllReduce { tensor: tensor(&mut x), op: ReduceOp::Sum }).unwrap_err()
    });
    for error in &errors {
        let words = error.to_string();
        assert!(words.contains("all_reduce(sum) of 100 float32 on rank"), "{words}");
        assert!(words.contains("all_reduce(sum) of 120 float32 on rank 1"), "{words}");
    }
    let errors = run(2, Carriers::Tcp, |group| {
        let mut x = vec![1f32; 8];
        let tensor = tensor(&mut x);
        let request = match group.rank() {
            0 => Request::Broadcast { tensor, root: 0 },
            _ => Request::Broadcast { tensor, root: 1 },
        };
        act(group, request).and_then(|()| act(group, Request::Barrier)).unwrap_err()
    });
    for error in &errors {
        let words = error.to_string();
        assert!(words.contains("from rank 0 on rank 0"), "{words}");
        assert!(words.contains("from rank 1 on rank 1"), "{words}");
    }
}

#[test]
fn what_cannot_be_right_is_refused_before_anything_is_sent() {
    run(2, Carriers::Auto, |group| {
        let words = |request| act(group, request).unwrap_err().to_string();
        let mut x = vec![1f32; 4];
        let mut float = || tensor(&mut x);
        let said = words(Request::AllReduce { tensor: float(), op: ReduceOp::BitXor });
        assert!(said.contains("xor of float32"), "{said}");
        let said = words(Request::Broadcast { tensor: float(), root: 2 });
        assert!(said.contains("rank 2 of 2"), "{said}");
        let said = words(Request::AllGather { input: float(), outputs: vec![float()] });
        assert!(said.contains("1 outputs among 2 ranks"), "{said}");
        let said = words(Request::Send { tensor: float(), to: group.rank(), tag: 0 });
        assert!(said.contains("is this one"), "{said}");
        // The group goes on.
        act(group, Request::Barrier).unwrap();
    });
}

#[test]
fn a_rank_that_leaves_is_named_and_one_that_does_not_come_too() {
    let errors = run(3, Carriers::Auto, |group| {
        (group.rank() != 2).then(|| act(group, Request::Barrier).unwrap_err().to_string())
    });
    for words in errors.iter().flatten() {
        assert!(words.contains("rank 2"), "{words}");
    }
    let errors = run(2, Carriers::Tcp, |group| {
        let mut x = vec![0f32; 3];
        let request = match group.rank() {
            0 => Request::Receive { tensor: tensor(&mut x), from: Some(1), tag: 4 },
            _ => Request::Receive { tensor: tensor(&mut x), from: Some(0), tag: 4 },
        };
        let timeout = Duration::from_millis(if group.rank() == 0 { 100 } else { 20_000 });
        let terms = Terms { timeout, waits: true };
        let work = group.begin(request, terms, Box::new(())).unwrap();
        work.wait(Duration::from_secs(60)).unwrap_err().to_string()
    });
    let late = "receive from rank 1 with tag 4: its timeout passed";
    assert!(errors[0].contains(late), "{}", errors[0]);
    assert!(!errors[0].contains("sends through it"), "{}", errors[0]);
    assert!(errors[1].contains("rank 0 stopped the job"), "{}", errors[1]);
}

/// Only some operations go over more lanes than one. Whoever is missing, or has another tensor, is
/// named whichever lane finds out; and operations of all lanes end.
#[test]
fn a_group_of_several_lanes_ends_as_one() {
    let links = Links { lanes: Some(3), ..MEMORY };
    const LARGE: usize = 1_000_000;
    let begin = |group: &Group, x: &mut Vec<f32>| {
        let request = Request::AllReduce { tensor: tensor(x), op: ReduceOp::Sum };
        group.begin(request, Terms { waits: false, ..TERMS }, Box::new(())).unwrap()
    };
    // Rank 2 leaves while the others have three operations under way.
    let errors = run_with(&[3], links, move |group| {
        let mut tensors = [vec![1f32; LARGE], vec![1f32; 10], vec![1f32; LARGE]];
        let works: Vec<_> = match group.rank() {
            2 => Vec::new(),
            _ => tensors.iter_mut().map(|x| begin(group, x)).collect(),
        };
        let wait = |work: &poseidon::collectives::Work| work.wait(Duration::from_secs(60));
        works.iter().map(|work| wait(work).unwrap_err().to_string()).collect::<Vec<_>>()
    });
    assert_eq!(errors.iter().map(Vec::len).collect::<Vec<_>>(), [3, 3, 0]);
    for words in errors.iter().flatten() {
        assert!(words.contains("rank 2"), "{words}");
    }
    // Rank 1 has a tensor that goes over the home lane alone, and goes on with a large one.
    let errors = run_with(&[3], links, move |group| {
        let len = if group.rank() == 1 { 100 } else { LARGE };
        let mut tensors = [vec![1f32; len], vec![1f32; LARGE]];
        let works: Vec<_> = tensors.iter_mut().map(|x| begin(group, x)).collect();
        let wait = |work: &poseidon::collectives::Work| work.wait(Duration::from_secs(60));
        works.iter().map(|work| wait(work).unwrap_err().to_string()).collect::<Vec<_>>()
    });
    for words in errors.iter().flatten() {
        assert!(words.contains("all_reduce(sum) of 1000000 float32 on rank"), "{words}");
        assert!(words.contains("all_reduce(sum) of 100 float32 on rank 1"), "{words}");
    }
    // A part of rank 0's tensors is as long as the whole of rank 1's.
    let links = Links { lanes: Some(2), ..MEMORY };
    let errors = run_with(&[2], links, |group| {
        let len = if group.rank() == 0 { 128 << 10 } else { 64 << 10 };
        let (mut own, mut rows) = (vec![1f32; len], vec![vec![0f32; len]; 2]);
        let (input, outputs) = (tensor(&mut own), tensors(&mut rows));
        act(group, Request::AllGather { input, outputs }).unwrap_err().to_string()
    });
    for words in &errors {
        assert!(
            words.contains("all_gather of float32, long enough for 2 lanes on rank 0"),
            "{words}"
        );
        assert!(words.contains("all_gather of float32 on rank 1"), "{words}");
    }
    // Somebody stops the group while others wait for all of its lanes.
    let errors = run_with(&[3], links, move |group| {
        let mut x = vec![1f32; LARGE];
        if group.rank() == 0 {
            group.abort("enough of it");
            return String::new();
        }
        begin(group, &mut x).wait(Duration::from_secs(60)).unwrap_err().to_string()
    });
    for words in &errors[1..] {
        assert!(words.contains("rank 0 stopped the job: enough of it"), "{words}");
    }
}

/// Ranks 0 and 2 of three talk among themselves, on the links that are there.
#[test]
fn some_ranks_share_the_links_of_all() {
    run(3, Carriers::Auto, |group| {
        let mut x = vec![f32::from(group.rank()); 100_000];
        if group.rank() != 1 {
            let names = vec!["rank 0".into(), "rank 2".into()];
            let pair = group.subgroup("pair", &[0, 2], names, TERMS.timeout).unwrap();
            assert_eq!((pair.rank(), pair.size()), (group.rank() / 2, 2));
            assert_eq!(pair.identity(), group.identity());
            act(&pair, Request::AllReduce { tensor: tensor(&mut x), op: ReduceOp::Sum }).unwrap();
            assert!(x.iter().all(|x| *x == 2.0));
            pair.leave();
        }
        let mut y = vec![1f32; 10];
        act(group, Request::AllReduce { tensor: tensor(&mut y), op: ReduceOp::Sum }).unwrap();
        assert_eq!(y, [3.0; 10]);
        let stranger =
            group.subgroup("odd", &[(group.rank() + 1) % 3], vec!["a".into()], TERMS.timeout);
        assert!(stranger.unwrap_err().to_string().contains("among them"));
    });
}

/// Pieces are cut wherever the budget ends.
#[test]
fn a_sum_within_a_budget_is_exact() {
    let len = 50_011;
    run(3, Carriers::Tcp, move |group| {
        group.set_bandwidth_budget(Some("40mbit".parse().unwrap())).unwrap();
        for _ in 0..3 {
            let mut x = values(group.rank().into(), len);
            act(group, Request::AllReduce { tensor: tensor(&mut x), op: ReduceOp::Sum }).unwrap();
            let sum = |i| (0..3).map(|rank| value(rank, i)).sum::<i64>() as f32;
            assert!(x.iter().enumerate().all(|(i, &x)| x == sum(i)));
        }
    });
}

/// The ranks of a subgroup lie unevenly on the hosts, and in another order than in the group.
#[test]
fn a_subgroup_across_hosts_goes_by_its_own_tree() {
    run_on(&[3, 1, 3], Carriers::Auto, |group| {
        const RANKS: [u16; 5] = [6, 0, 4, 3, 5];
        let mut x = values(group.rank().into(), 100_000);
        if RANKS.contains(&group.rank()) {
            let names = RANKS.iter().map(|rank| format!("rank {rank}")).collect();
            let some = group.subgroup("some", &RANKS, names, TERMS.timeout).unwrap();
            act(&some, Request::AllReduce { tensor: tensor(&mut x), op: ReduceOp::Sum }).unwrap();
            let sum = |i| RANKS.iter().map(|rank| value((*rank).into(), i)).sum::<i64>() as f32;
            assert!(x.iter().enumerate().all(|(i, x)| *x == sum(i)));
            let mut rows = vec![vec![0f32; 1000]; RANKS.len()];
            let mut own = values(group.rank().into(), 1000);
            let (input, outputs) = (tensor(&mut own), tensors(&mut rows));
            act(&some, Request::AllGather { input, outputs }).unwrap();
            let all = rows.iter().zip(RANKS);
            assert!(all.into_iter().all(|(row, rank)| *row == values(rank.into(), 1000)));
            some.leave();
        }
        act(group, Request::Barrier).unwrap();
    });
}

/// Rank 3 sends only to ranks of its own host. Everybody learns that it is the one.
#[test]
fn a_rank_of_a_host_that_leaves_or_does_something_else_is_named_to_all_hosts() {
    let errors = run_on(&[2, 2, 1], Carriers::Auto, |group| {
        let mut x = vec![1f32; 100_000];
        let tensor = tensor(&mut x);
        (group.rank() != 3).then(|| {
            let request = Request::Reduce { tensor, root: 0, op: ReduceOp::Sum };
            // Some ranks have nothing to await: they hear of it in the next operation.
            let next = |()| act(group, Request::Barrier);
            act(group, request).and_then(next).unwrap_err().to_string()
        })
    });
    for words in errors.iter().flatten() {
        assert!(words.contains("rank 3"), "{words}");
    }
    let errors = run_on(&[2, 2, 1], Carriers::Auto, |group| {
        let len = if group.rank() == 3 { 120_000 } else { 100_000 };
        let mut x = vec![1f32; len];
        act(group, Request::AllReduce { tensor: tensor(&mut x), op: ReduceOp::Sum }).unwrap_err()
    });
    for error in &errors {
        let words = error.to_string();
        assert!(words.contains("all_reduce(sum) of 100000 float32 on rank"), "{words}");
        assert!(words.contains("all_reduce(sum) of 120000 float32 on rank 3"), "{words}");
    }
}
