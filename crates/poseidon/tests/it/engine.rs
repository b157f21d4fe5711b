//! Sessions and groups of one job that share its links.

use crate::cluster::{Layout, job, step, without_hanging};
use poseidon::collectives::{Request, Tensor, Terms};
use poseidon::session::Builder;
use poseidon::{ChunkSize, Dtype, Error, Group, Layer, Policy, ReduceOp, Rules, Servers, Session};
use std::ptr::NonNull;
use std::thread;
use std::time::Duration;

const TERMS: Terms = Terms { timeout: Duration::from_secs(60), waits: true };

fn describe(builder: Builder) -> Builder {
    let job = job();
    builder.layers(job.layers).optimizer(job.optimizer).chunk_size(job.chunk)
}

fn tensor(values: &mut [i64]) -> Tensor {
    let start = NonNull::from(&mut *values).cast();
    // SAFETY: the slice is valid and aligned; tests wait for the operation before they look at it.
    unsafe { Tensor::from_raw(start, values.len(), Dtype::I64) }
}

fn act(group: &Group, request: Request) -> Result<(), Error> {
    let work = group.begin(request, TERMS, Box::new(()))?;
    assert!(work.wait(2 * TERMS.timeout)?, "done within its own timeout");
    Ok(())
}

fn run<T: Send + 'static>(
    layout: Layout,
    work: impl Fn(&Session) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    let results = without_hanging(move || layout.run(describe, work));
    results.into_iter().map(Result::unwrap).collect()
}

#[test]
fn sessions_and_a_group_work_at_the_same_time_over_one_lane() {
    for servers in [Servers::Colocated, Servers::Dedicated(1)] {
        run(Layout { servers, ..Layout::workers(3) }, |session| {
            let sibling = session.sibling("sibling", describe)?;
            let group = session.group("group")?;
            let steps = |session| (1..=20).try_for_each(|clock| step(session, clock, 0..3));
            thread::scope(|scope| {
                let one = scope.spawn(|| steps(session));
                let other = scope.spawn(|| steps(&sibling));
                for _ in 0..20 {
                    let mut values = vec![i64::from(group.rank()); 50_000];
                    let (tensor, op) = (tensor(&mut values), ReduceOp::Sum);
                    act(&group, Request::AllReduce { tensor, op })?;
                    assert!(values.iter().all(|&value| value == 3));
                }
                one.join().unwrap()?;
                other.join().unwrap()
            })?;
            sibling.finish()
        });
    }
}

#[test]
fn a_sibling_that_fails_harms_neither_the_first_session_nor_a_group() {
    run(Layout::workers(3), |session| {
        let sibling = session.sibling("sibling", describe)?;
        let group = session.group("group")?;
        step(session, 1, 0..3)?;
        let a = sibling.layer("a")?;
        if session.rank() == 0 {
            sibling.abort("enough");
        } else {
            let sent = sibling.send(a, vec![1.0; 100].into());
            let outcome = sent.and_then(|()| sibling.receive(a));
            let words = outcome.expect_err("worker 0 stopped it").to_string();
            // Worker 0's own words, or another worker's word of them.
            assert!(words.contains("worker 0 stopped the job: enough"), "{words}");
            drop(sibling);
        }
        for clock in 2..10 {
            step(session, clock, 0..3)?;
            act(&group, Request::Barrier)?;
        }
        Ok(())
    });
}

/// Frames of operations that a worker has not begun are kept aside, because its session needs what
/// is behind them.
#[test]
fn a_group_that_runs_ahead_does_not_hold_up_a_session() {
    const AHEAD: usize = 40;
    run(Layout::workers(2), |session| {
        let group = session.group("group")?;
        let mut values = vec![vec![7 * i64::from(group.rank() == 0); 10_000]; AHEAD];
        let broadcast =
            |values: &mut Vec<i64>| Request::Broadcast { tensor: tensor(values), root: 0 };
        let mut begun = Vec::new();
        if session.rank() == 0 {
            for values in &mut values {
                begun.push(group.begin(broadcast(values), TERMS, Box::new(()))?);
            }
        }
        (1..=3).try_for_each(|clock| step(session, clock, 0..2))?;
        if session.rank() == 1 {
            values.iter_mut().try_for_each(|values| act(&group, broadcast(values)))?;
        }
        for work in begun {
            assert!(work.wait(2 * TERMS.timeout)?);
        }
        assert!(values.iter().flatten().all(|&value| value == 7));
        act(&group, Request::Barrier)?;
        step(session, 4, 0..2)
    });
}

/// The sessions' agreements are not taken for each other's.
#[test]
fn two_sessions_get_new_plans_at_the_same_time() {
    run(Layout::workers(2), |session| {
        let open = |name, len| {
            session.sibling(name, |builder: Builder| {
                let momentum = "sgd:momentum=0.9".parse().unwrap();
                let builder = builder.layer(Layer::new("a", len)).optimizer(momentum);
                builder.learning_rate(0.1).chunk_size(ChunkSize { min: 16, max: 64 })
            })
        };
        let (mut one, mut other) = (open("one", 400)?, open("other", 600)?);
        let values = [vec![1.0f32; 400], vec![1.0; 600]];
        for (session, values) in [&one, &other].into_iter().zip(&values) {
            let a = session.layer("a")?;
            session.broadcast(a, values.clone().into())?;
            session.receive(a)?;
        }
        for round in 0..5 {
            let chunk = ChunkSize { min: 16, max: 100 + 4 * round };
            let rules = Rules { chunk, policy: Policy::Ps, ..Rules::default() };
            if session.rank() == 0 {
                thread::scope(|scope| {
                    let second = scope.spawn(|| other.replan(rules, |_| &values[1]));
                    one.replan(rules, |_| &values[0])?;
                    second.join().unwrap()
                })?;
            } else {
                other.replan(rules, |_| &values[1])?;
                one.replan(rules, |_| &values[0])?;
            }
        }
        one.say_goodbye()?;
        other.say_goodbye()?;
        one.finish()?;
        other.finish()
    });
}
