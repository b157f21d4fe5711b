//! Two workers and a dedicated server: where the chunks live, and what the wire carries.
//!
//! With `--servers 1` all chunks live on a process that computes nothing, with `colocated` (the
//! default) every worker holds its share, with `colocated+1` both do. The program is the same for
//! all of them: only the plan differs, which every node derives from the information book. This
//! one prints the book's facts and checks that the links carried what the plan says.
//!
//! Run: cargo run -q -p poseidon-cli -- launch -n 2 --servers 1 -- cargo run -q -p poseidon --example 03-dedicated-server

use poseidon::{Buffer, Config, Error, Layer, NodeId, Session};

const PARAMETERS: usize = 1_000_000;
const STEPS: u64 = 5;

fn main() -> Result<(), Error> {
    let session = Session::builder(Config::from_env()?)
        .layer(Layer::new("embedding", PARAMETERS / 4))
        .layer(Layer::new("fc", PARAMETERS * 3 / 4))
        .start()?;
    if session.rank() == 0 {
        describe(&session);
    }

    for layer in [session.layer("embedding")?, session.layer("fc")?] {
        let len = session.book().job.layers[layer.index()].len;
        let mut gradient = Buffer::zeroed(len);
        for _ in 0..STEPS {
            gradient.fill(1.0);
            session.send(layer, gradient)?;
            gradient = session.receive(layer)?.result;
        }
        assert!(gradient.iter().all(|&mean| mean == 1.0));
    }

    // Every clock brings this node the results of the chunks that live elsewhere, and for the
    // chunks that live here every other worker's gradient.
    let held = bytes_on(&session, NodeId(session.rank()));
    let all = (PARAMETERS * size_of::<f32>()) as u64;
    let planned = STEPS * ((all - held) + held * (session.workers() as u64 - 1));
    let traffic = session.traffic();
    println!("{planned} bytes to receive by the plan; {traffic:?}");
    assert!(traffic.bytes_received >= planned);
    assert!(traffic.bytes_received <= planned + planned / 100, "headers are below 1%");
    session.finish()
}

/// Prints what the information book knows. `poseidon query` asks the same from outside.
fn describe(session: &Session) {
    let book = session.book();
    for facts in &book.nodes {
        let name = book.cluster.name(facts.node);
        println!("{name} at {} holds {} bytes", facts.tcp, bytes_on(session, facts.node));
    }
    for key in ["cluster.servers", "job.layers.1.name", "job.optimizer", "nobody.knows"] {
        match session.query(key) {
            Some(value) => println!("query {key}: {value}"),
            None => println!("query {key}: not in the book"),
        }
    }
}

/// Bytes of parameters whose shards are on `node`.
fn bytes_on(session: &Session, node: NodeId) -> u64 {
    let plan = session.book().plan();
    let chunks = plan.all_chunks().filter(|(_, shard)| shard.node == node);
    chunks.map(|(chunk, _)| (plan.len(chunk) * size_of::<f32>()) as u64).sum()
}
