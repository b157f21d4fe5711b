//! A bounded, seeded run of every fuzz target: random inputs, and mutations of whole ones.
//! The same inputs every time, so a failure can be repeated.

use poseidon::fuzzing::{CHANNEL, COUNT};
use poseidon_checkpoint::{LayerFacts, Manifest, Piece, TensorFacts, What, commit, write_part};
use poseidon_core::book::BOOK_VERSION;
use poseidon_core::plan::Placement;
use poseidon_core::wire::{
    Challenge, Header, Hello, Kind, NOBODY, Place, Purpose, Signature, Status, VERSION, Verdict,
};
use poseidon_core::{
    Book, ChannelId, Checkpoints, ChunkKey, ChunkSize, Clock, Cluster, Consistency, Dtype, Epoch,
    Job, JobId, LaneId, Layer, LayerId, LayerKind, NodeFacts, NodeId, Optimizer, Policy, ReduceOp,
    Servers,
};
use poseidon_fuzz::{CLUSTER, Outcome, book, checkpoint, control, handshake, header, join, router};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::SystemTime;

/// A second of work unoptimised.
const INPUTS: usize = 200_000;
/// The same, of targets that do more with an input.
const HEAVY: usize = 10_000;

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
    let job = job();
    let nodes = cluster.node_ids().map(facts).collect();
    let identity = JobId([4; 16]);
    let whole = Book { version: BOOK_VERSION, identity, epoch: Epoch(1), cluster, nodes, job };
    let mut other = serde_json::to_value(&whole).expect("a book can be written");
    let whole = serde_json::to_vec(&whole).expect("a book can be written");
    other["cluster"]["lanes"] = 0.into();
    run(book, &[whole], &[other.to_string().into_bytes()]);
}

#[test]
fn control_survives() {
    let join = |node: u16| {
        json!({
            "type": "join", "request": 1, "facts": facts(NodeId(node)), "workers": 2,
            "servers": Servers::Colocated, "lanes": 2, "book": BOOK_VERSION, "job": job(),
        })
    };
    let gather = |node: u16| {
        json!({
            "type": "gather", "request": 2, "node": node, "topic": "t", "value": [1, "x"],
            "patience_ms": 1000, "servers": [],
        })
    };
    let open = |node: u16| {
        json!({
            "type": "open", "request": 3, "node": node, "name": "n", "members": [0, 1],
            "job": null, "patience_ms": 1000,
        })
    };
    let lines = |lines: &[serde_json::Value]| {
        let lines: Vec<_> = lines.iter().map(|line| line.to_string()).collect();
        lines.join("\n").into_bytes()
    };
    let leave = json!({ "type": "leave", "reason": "enough" });
    let query = json!({ "type": "query", "key": "book" });
    let job = lines(&[join(0), join(1), query, gather(0), gather(1), leave.clone()]);
    let opened = lines(&[join(0), join(1), json!({ "type": "stopping" }), open(0), open(1), leave]);
    run_some(HEAVY, control, &[job, opened], &[lines(&[json!({ "type": "join" })])]);
}

#[test]
fn router_survives() {
    let frame = |rank: u16, header: Header| {
        let header = Header { channel: ChannelId(CHANNEL), ..header };
        [&[rank as u8 - 1][..], &header.encode(), &[0; 4 * COUNT]].concat()
    };
    let collective = |operation: u8, op: ReduceOp, count: u32, ranks: &[u16]| {
        let signature = Signature { operation, dtype: Dtype::F32, op, root: 0, count };
        let place = Place { sequence: 0, step: 0, slice: 0, piece: 0 };
        let length = 4 * COUNT as u32;
        let frame = |rank: &u16| frame(*rank, signature.header(NodeId(*rank), place, length));
        ranks.iter().flat_map(frame).collect::<Vec<u8>>()
    };
    let (count, bytes) = (COUNT as u32, 4 * COUNT as u32);
    let all_reduce = [&[0][..], &collective(1, ReduceOp::Sum, count, &[1, 2])].concat();
    let reduce_scatter = [&[1][..], &collective(5, ReduceOp::Sum, bytes, &[1, 2])].concat();
    let reduce = [&[4][..], &collective(3, ReduceOp::Sum, count, &[1, 2])].concat();
    let gather = [&[5][..], &collective(6, ReduceOp::Sum, bytes, &[1, 2])].concat();
    let place = Place { sequence: 1, step: 0, slice: 0, piece: 0 };
    let message = place.message(NodeId(2), 5, bytes, bytes);
    let receive = [&[6][..], &frame(2, message)].concat();
    // The ranks do not agree.
    let other = [&[0][..], &collective(1, ReduceOp::Max, count, &[1, 2])].concat();
    let accepted = [all_reduce, reduce_scatter, reduce, gather, receive];
    run_some(HEAVY, router, &accepted, &[other]);
}

#[test]
fn checkpoint_survives() {
    let folder = std::env::temp_dir().join(format!("poseidon-fuzz-{}", std::process::id()));
    let storage = poseidon_checkpoint::open(folder.to_str().expect("a name")).expect("a folder");
    let values: Vec<f32> = (0..12).map(|i| i as f32).collect();
    let piece = |what: What| Piece { layer: "fc".into(), what, start: 0, values: &values[..] };
    let pieces = [piece(What::Parameters), piece(What::State(0))];
    let part = write_part(&*storage, 200, 0, &pieces).expect("a part");
    let layer = LayerFacts {
        name: "fc".into(),
        len: 12,
        rule: "sgd".into(),
        steps: 200,
        vectors: 1,
        tensors: vec![TensorFacts { name: "fc.weight".into(), shape: vec![3, 4] }],
        private: false,
    };
    let manifest = Manifest {
        step: 200,
        created: SystemTime::UNIX_EPOCH,
        poseidon: "0.1.0".into(),
        workers: 1,
        layers: vec![layer],
        parts: vec![part],
        program: json!({ "torch": { "seed": 1 } }),
    };
    commit(&*storage, &manifest).expect("a manifest");
    let folders = storage.folders().expect("a list");
    let entries = storage.list(&folders[0]).expect("a list");
    let read = |like: &str| {
        let file = &entries.iter().find(|entry| entry.file.contains(like)).expect("a file").file;
        storage.get(&format!("{}/{file}", folders[0])).expect("its bytes")
    };
    let (manifest, part) = (read("manifest"), read("part"));
    std::fs::remove_dir_all(&folder).expect("it was made here");
    let cut = join(&manifest, &part[..part.len() - 1]);
    run_some(HEAVY, checkpoint, &[join(&manifest, &part)], &[cut]);
}

fn facts(node: NodeId) -> NodeFacts {
    NodeFacts {
        node,
        host: "a".to_owned(),
        rack: Some("b".to_owned()),
        tcp: "127.0.0.1:4000".to_owned(),
        other_tcp: Vec::new(),
        unix: None,
        version: "0.1.0".to_owned(),
        tiles: false,
        queue: Some(2 << 20),
    }
}

fn job() -> Job {
    let kind = LayerKind::Fc { m: 10, n: 20 };
    let wide = Layer { kind, rows: Some(4), ..Layer::new("wide", 210) };
    Job {
        layers: vec![Layer::new("conv1", 10), wide],
        optimizer: Optimizer::default(),
        chunk: ChunkSize::default(),
        placement: Placement::Balanced,
        deterministic: false,
        consistency: Consistency::Bsp,
        scheme: Policy::Auto,
        batch: Some(8),
        checkpoints: Checkpoints::default(),
    }
}

/// A decoder that refused everything would survive as well, so every outcome has to be seen.
fn run(target: fn(&[u8]) -> Outcome, accepted: &[Vec<u8>], refused: &[Vec<u8>]) {
    run_some(INPUTS, target, accepted, refused);
}

fn run_some(
    inputs: usize,
    target: fn(&[u8]) -> Outcome,
    accepted: &[Vec<u8>],
    refused: &[Vec<u8>],
) {
    for input in accepted {
        assert_eq!(target(input), Outcome::Accepted, "{input:02x?}");
    }
    for input in refused {
        assert_eq!(target(input), Outcome::Refused, "{input:02x?}");
    }
    let whole = [accepted, refused].concat();
    let mut seen = BTreeMap::new();
    let mut random = Random(0x5eed);
    for _ in 0..inputs {
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
