//! Several sessions in one job.

mod cluster;

use cluster::Layout;
use poseidon::{Error, Layer, Optimizer, Reduction, Session};

#[test]
fn siblings_work_side_by_side() {
    for workers in [1, 3] {
        let work = |session: &Session| {
            let sum = session.sibling("sums", |builder| {
                let sum = Optimizer::Reduce(Reduction::Sum);
                builder.layer(Layer::new("a", 1000)).optimizer(sum)
            })?;
            let mean = session.sibling("means", |builder| builder.layer(Layer::new("a", 7)))?;
            let (a, b) = (sum.layer("a")?, mean.layer("a")?);
            let value = f32::from(session.rank() + 1);
            for _ in 0..3 {
                sum.send(a, vec![value; 1000].into())?;
                mean.send(b, vec![value; 7].into())?;
                let total: f32 = (1..=session.workers()).map(|w| w as f32).sum();
                assert_eq!(mean.receive(b)?.result[..], [total / session.workers() as f32; 7]);
                assert_eq!(sum.receive(a)?.result[..], [total; 1000]);
            }
            sum.finish()?;
            mean.finish()
        };
        // The first session has no layers of its own: it is there for the others.
        for result in Layout::workers(workers).run(|builder| builder, work) {
            result.unwrap();
        }
    }
}

#[test]
fn a_sibling_that_is_described_differently_does_not_start() {
    let work = |session: &Session| -> Result<(), Error> {
        let len = 10 + usize::from(session.rank());
        let started = session.sibling("odd", |builder| builder.layer(Layer::new("a", len)));
        let words = started.err().expect("layers differ").to_string();
        assert!(words.contains("'a' of 10") && words.contains("'a' of 11"), "{words}");
        Ok(())
    };
    for result in Layout::workers(2).run(|builder| builder, work) {
        result.unwrap();
    }
}
