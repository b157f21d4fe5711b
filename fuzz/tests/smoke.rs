//! A bounded, seeded run of every fuzz target: random inputs, and mutations of whole ones.
//! The same inputs every time, so a failure can be repeated.

use poseidon_core::book::BOOK_VERSION;
use poseidon_core::plan::Placement;
use poseidon_core::wire::{
    Challenge, Header, Hello, Kind, NOBODY, Purpose, Status, VERSION, Verdict,
};
use poseidon_core::{
    Book, Checkpoints, ChunkKey, ChunkSize, Clock, Cluster, Consistency, Epoch, Job, JobId, LaneId,
    Layer, LayerId, LayerKind, NodeFacts, NodeId, Optimizer, Policy, Servers,
};
use poseidon_fuzz::{CLUSTER, Outcome, book, handshake, header};
use std::collections::BTreeMap;

/// A second of work unoptimised.
const INPUTS: usize = 200_000;

#[test]
fn header_survives() {
    let chunk = ChunkKey { layer: LayerId(3), index: 7 };
    let push =
        Header { chunk, value: 0.1, clock: Clock(9), ..Header::bare(Kind::Push, NodeId(1), 4096) };
    let abort = Header::bare(Kind::Abort, NodeId(2), 12);
    run(header, &[push.encode().to_vec(), abort.encode().to_vec()], &[]);
}

#[test]
fn handshake_survives() {
    let hello = Hello {
        purpose: Purpose::Control,
        node: NOBODY,
        lane: LaneId(0),
        encrypt: false,
        cluster: CLUSTER,
        identity: JobId([6; 16]),
        epoch: Epoch(3),
        nonce: [2; 32],
    };
    let challenge = Challenge { status: Status::Welcome, version: VERSION, nonce: [3; 32] };
    let verdict = Verdict { status: Status::Welcome, proof: [0; 32] };
    run(
        handshake,
        &[
            [&[0][..], &hello.encode()].concat(),
            [&[1][..], &challenge.encode()].concat(),
            [&[2][..], &verdict.encode()].concat(),
        ],
        // A caller and a listener that do everything right but do not know the secret.
        &[
            [&[3][..], &hello.encode(), &[4; 32]].concat(),
            [&[4][..], &challenge.encode(), &verdict.encode()].concat(),
        ],
    );
}

#[test]
fn book_survives() {
    let cluster = Cluster::new(2, Servers::Mixed(1), 2).expect("a cluster of three nodes");
    let facts = |node| NodeFacts {
        node,
        host: "a".to_owned(),
        rack: Some("b".to_owned()),
        tcp: "127.0.0.1:4000".to_owned(),
        other_tcp: Vec::new(),
        unix: None,
        version: "0.1.0".to_owned(),
        tiles: false,
    };
    let kind = LayerKind::Fc { m: 10, n: 20 };
    let wide = Layer { kind, rows: Some(4), ..Layer::new("wide", 210) };
    let job = Job {
        layers: vec![Layer::new("conv1", 10), wide],
        optimizer: Optimizer::default(),
        chunk: ChunkSize::default(),
        placement: Placement::Balanced,
        deterministic: false,
        consistency: Consistency::Bsp,
        scheme: Policy::Auto,
        batch: Some(8),
        checkpoints: Checkpoints::default(),
    };
    let nodes = cluster.node_ids().map(facts).collect();
    let identity = JobId([4; 16]);
    let whole = Book { version: BOOK_VERSION, identity, epoch: Epoch(1), cluster, nodes, job };
    let mut other = serde_json::to_value(&whole).expect("a book can be written");
    let whole = serde_json::to_vec(&whole).expect("a book can be written");
    other["cluster"]["lanes"] = 0.into();
    run(book, &[whole], &[other.to_string().into_bytes()]);
}

/// A decoder that refused everything would survive as well, so every outcome has to be seen.
fn run(target: fn(&[u8]) -> Outcome, accepted: &[Vec<u8>], refused: &[Vec<u8>]) {
    for input in accepted {
        assert_eq!(target(input), Outcome::Accepted, "{input:02x?}");
    }
    for input in refused {
        assert_eq!(target(input), Outcome::Refused, "{input:02x?}");
    }
    let whole = [accepted, refused].concat();
    let mut seen = BTreeMap::new();
    let mut random = Random(0x5eed);
    for _ in 0..INPUTS {
        let input = match random.below(4) {
            0 => (0..random.below(128)).map(|_| random.next() as u8).collect(),
            _ => mutated(whole[random.below(whole.len())].clone(), &mut random),
        };
        *seen.entry(target(&input)).or_insert(0) += 1;
    }
    for outcome in [Outcome::Short, Outcome::Refused, Outcome::Accepted] {
        assert!(seen.contains_key(&outcome), "{outcome:?} never happened: {seen:?}");
    }
}

fn mutated(mut input: Vec<u8>, random: &mut Random) -> Vec<u8> {
    for _ in 0..=random.below(4) {
        let at = random.below(input.len().max(1));
        match random.below(5) {
            0 => input.truncate(at),
            1 => input.insert(at.min(input.len()), random.next() as u8),
            _ if input.is_empty() => {}
            2 => input[at] ^= 1 << random.below(8),
            3 => input[at] = [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
            _ => input[at..].rotate_left(1),
        }
    }
    input
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}
