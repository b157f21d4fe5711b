//! Several sessions in one job.

use crate::cluster::Layout;
use poseidon::collectives::{Request, Terms};
use poseidon::config::Carriers;
use poseidon::{Error, Layer, Optimizer, Reduction, Session};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;
use std::{io, thread};

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

/// What leaves a host does not grow with its workers, in a sibling as in a job's first session: PyTorch
/// trains in siblings.
#[test]
fn siblings_know_hosts_and_the_ring() {
    const LEN: usize = 200_000;
    let work = |session: &Session| {
        let open = |name: &str, deterministic: bool| {
            session.sibling(name, |builder| {
                builder.layer(Layer::new("a", LEN)).deterministic(deterministic)
            })
        };
        let (ring, straight) = (open("ring", false)?, open("straight", true)?);
        for sibling in [&ring, &straight] {
            let layer = sibling.layer("a")?;
            for step in 0..3 {
                let value = f32::from(session.rank() + step);
                sibling.send(layer, vec![value; LEN].into())?;
                let mean = 1.5 + f32::from(step);
                assert!(sibling.receive(layer)?.result.iter().all(|number| *number == mean));
            }
        }
        let seen = [&ring, &straight].map(|sibling| {
            let cluster = &sibling.book().cluster;
            (cluster.hosts().to_vec(), cluster.is_ring())
        });
        ring.finish()?;
        straight.finish()?;
        Ok(seen)
    };
    for seen in Layout::hosts(&[2, 1, 1]).run(|builder| builder, work) {
        let hosts = vec![0, 0, 1, 2];
        assert_eq!(seen.unwrap(), [(hosts.clone(), true), (hosts, false)]);
    }
}

/// The coordinator is served on a host that has none of the workers, and nobody can call it any more:
/// the workers' first connections to it are all they need.
#[test]
fn siblings_and_groups_need_no_way_to_a_coordinator_elsewhere() {
    let layout = Layout { carrier: Carriers::Tcp, ..Layout::workers(2) };
    let (coordinator, mut config) = layout.coordinator();
    // Every address of 127.0.0.0/8 is this machine's, and no two are the same listener's.
    let elsewhere = TcpListener::bind("127.0.0.3:0").unwrap();
    config.coordinator = elsewhere.local_addr().unwrap().to_string();
    let to = coordinator.address();
    let served = thread::spawn(move || {
        for _ in 0..2 {
            let (near, far) = (elsewhere.accept().unwrap().0, TcpStream::connect(to).unwrap());
            for (from, to) in [(&near, &far), (&far, &near)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                thread::spawn(move || io::copy(&mut from, &mut to));
            }
        }
    });
    let work = |session: Session| {
        // Every worker is connected: the door is closed.
        session.gather("connected", &serde_json::Value::Null)?;
        let sibling = session.sibling("later", |builder| builder.layer(Layer::new("a", 7)))?;
        let a = sibling.layer("a")?;
        sibling.send(a, vec![1.0; 7].into())?;
        assert_eq!(sibling.receive(a)?.result[..], [1.0; 7]);
        let group = session.group("talk")?;
        let terms = Terms { timeout: Duration::from_secs(20), waits: true };
        group.begin(Request::Barrier, terms, Box::new(()))?.wait(terms.timeout)?;
        group.leave();
        sibling.finish()?;
        session.finish()
    };
    for result in layout.run_with(&config, |builder| builder, work) {
        result.unwrap();
    }
    served.join().unwrap();
    assert!(TcpStream::connect(&config.coordinator).is_err(), "the door is still open");
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

#[test]
fn the_same_workers_as_a_group() {
    let work = |session: &Session| {
        let group = session.group("talk")?;
        let terms = Terms { timeout: Duration::from_secs(20), waits: true };
        group.begin(Request::Barrier, terms, Box::new(()))?.wait(terms.timeout)?;
        group.leave();
        Ok((group.rank(), group.size()))
    };
    for (rank, result) in Layout::workers(3).run(|builder| builder, work).into_iter().enumerate() {
        assert_eq!(result.unwrap(), (rank as u16, 3));
    }
}

/// Worker 0 leaves while worker 1 waits for it on a sibling that worker 0 would finish last.
#[test]
fn goodbyes_on_all_sessions_come_before_any_wait() {
    let work = |session: &Session| -> Result<(), Error> {
        let open = |name| session.sibling(name, |builder| builder.layer(Layer::new("a", 10)));
        let (first, second) = (open("first")?, open("second")?);
        if session.rank() == 0 {
            first.say_goodbye()?;
            second.say_goodbye()?;
            let outcome = first.finish();
            assert!(matches!(outcome, Err(Error::Aborted { .. })), "{outcome:?}");
            second.finish().expect_err("worker 1 has lost its patience");
            return Ok(());
        }
        let a = second.layer("a")?;
        second.send(a, vec![1.0; 10].into())?;
        let words = second.receive(a).expect_err("worker 0 sends nothing").to_string();
        assert!(words.contains("worker 0") && words.contains("finished"), "{words}");
        first.abort("worker 0 is gone");
        Ok(())
    };
    for result in Layout::workers(2).run(|builder| builder, work) {
        result.unwrap();
    }
}

#[test]
fn a_wait_that_is_interrupted_can_be_taken_up_again() {
    let work = |session: &Session| -> Result<(), Error> {
        let sibling = session.sibling("one", |builder| builder.layer(Layer::new("a", 10)))?;
        let a = sibling.layer("a")?;
        if session.rank() == 0 {
            sibling.send(a, vec![1.0; 10].into())?;
            assert!(sibling.receive_unless(a, || true)?.is_none());
        }
        session.gather("interrupted", &())?;
        if session.rank() == 1 {
            sibling.send(a, vec![3.0; 10].into())?;
        }
        assert_eq!(sibling.receive(a)?.result[..], [2.0; 10]);
        sibling.finish()
    };
    for result in Layout::workers(2).run(|builder| builder, work) {
        result.unwrap();
    }
}
