//! Small facts of all workers, gathered through the coordinator.

use crate::cluster::{Layout, fake, without_hanging};
use poseidon::config::{Config, Member};
use poseidon::session::Builder;
use poseidon::{Error, GatherError, Layer, NodeId, Secret, Servers, Session};
use serde_json::{Value, json};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::Duration;

/// A job that only gathers still has something to exchange.
fn describe(builder: Builder) -> Builder {
    builder.layer(Layer::new("w", 10))
}

/// Runs `play` on every worker of `layout`, whose coordinator stays until the last one is done.
fn perform<T: Send + 'static>(
    layout: Layout,
    limit: impl Fn(&mut Config) + Send + 'static,
    play: impl Fn(Session) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<Result<T, Error>> {
    without_hanging(move || {
        let (_coordinator, mut config) = layout.coordinator();
        limit(&mut config);
        layout.run_with(&config, describe, play)
    })
}

/// As [`perform`], of a job that goes well.
fn succeed<T: Send + 'static>(
    layout: Layout,
    work: impl Fn(&Session) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    let play = move |session: Session| {
        let value = work(&session)?;
        session.finish()?;
        Ok(value)
    };
    perform(layout, |_| {}, play).into_iter().map(Result::unwrap).collect()
}

#[track_caller]
fn says(error: &Error, words: &[&str]) {
    let error = error.to_string();
    for word in words {
        assert!(error.contains(word), "'{word}' is not in: {error}");
    }
}

/// Does nothing until the job has failed.
fn look_on(session: &Session) -> Error {
    let layer = session.layer("w").unwrap();
    loop {
        if let Err(error) = session.is_ready(layer) {
            return error;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn every_worker_gets_all_values_in_rank_order() {
    for workers in [1, 2, 5] {
        for servers in [Servers::Colocated, Servers::Dedicated(1)] {
            let layout = Layout { servers, ..Layout::workers(workers) };
            let value =
                |rank: u16| json!({ "rank": rank, "accuracy": 0.1 + f64::from(rank) / 3.0 });
            let expected: Vec<_> = (0..workers).map(value).collect();
            let gathered =
                succeed(layout, move |session| session.gather("epoch 1", &value(session.rank())));
            for values in gathered {
                assert_eq!(values, expected);
            }
        }
    }
}

/// Those who are fast post the next round while the slow still wait for this one's answer.
#[test]
fn a_topic_can_be_gathered_again() {
    succeed(Layout::workers(5), |session| {
        for round in 0..40u16 {
            let values = session.gather("loss", &json!([session.rank(), round]))?;
            let expected: Vec<_> = (0..5u16).map(|rank| json!([rank, round])).collect();
            assert_eq!(values, expected);
        }
        Ok(())
    });
}

#[test]
fn threads_gather_different_topics_at_the_same_time() {
    succeed(Layout::workers(3), |session| {
        let topics = ["a", "b", "c", "d"];
        thread::scope(|scope| {
            for (position, _) in topics.iter().enumerate() {
                // Each worker begins elsewhere; all rounds are open at once.
                let topic = topics[(position + usize::from(session.rank())) % topics.len()];
                scope.spawn(move || {
                    for round in 0..10 {
                        let value = format!("{topic}{round} of {}", session.rank());
                        let values = session.gather(topic, &json!(value)).unwrap();
                        let expected =
                            (0..3).map(|rank| json!(format!("{topic}{round} of {rank}")));
                        assert_eq!(values, expected.collect::<Vec<_>>());
                    }
                });
            }
        });
        Ok(())
    });
}

#[test]
fn a_megabyte_is_gathered_while_layers_are_in_flight() {
    succeed(Layout::workers(3), |session| {
        let layer = session.layer("w")?;
        session.send(layer, vec![1.0; 10].into())?;
        let value = |rank: u16| json!(char::from(b'a' + rank as u8).to_string().repeat(1 << 20));
        let values = session.gather("log", &value(session.rank()))?;
        assert!(values.iter().zip(0..).all(|(got, rank)| *got == value(rank)));
        assert_eq!(session.receive(layer)?.result[..], [1.0; 10]);
        Ok(())
    });
}

#[test]
fn a_value_too_large_is_refused_and_the_job_goes_on() {
    succeed(Layout::workers(2), |session| {
        let error = session.gather("all", &json!("x".repeat(64 << 20))).unwrap_err();
        says(&error, &["gathering 'all': a control message of 671", "at most 67108864"]);
        assert!(matches!(error, Error::Gather { why: GatherError::TooLarge { .. }, .. }));
        assert_eq!(session.gather("all", &json!(1))?, [json!(1), json!(1)]);
        Ok(())
    });
}

#[test]
fn a_worker_that_never_posts_is_named_and_the_job_stops() {
    let begun = Barrier::new(4);
    // The sessions live until all have heard: another reason must not overtake this one.
    let results = perform(
        Layout::workers(4),
        |config| config.timeout = Duration::from_secs(2),
        move |session| {
            begun.wait();
            let error = match session.rank() {
                1 | 3 => look_on(&session),
                _ => session.gather("accuracy", &json!(0.5)).unwrap_err(),
            };
            Ok((session, error))
        },
    );
    let errors: Vec<_> = results.into_iter().map(|result| result.unwrap().1).collect();
    for error in &errors {
        says(error, &["gathering 'accuracy': nothing from worker 1, worker 3 within 2s"]);
    }
    let missing = |error: &Error| {
        matches!(error, Error::Gather { topic, why: GatherError::Missing { missing, .. } }
        if topic == "accuracy" && *missing == ["worker 1", "worker 3"])
    };
    assert!(errors.iter().any(missing), "{errors:?}");
}

#[test]
fn after_a_failure_gather_returns_it() {
    let results = perform(
        Layout::workers(2),
        |_| {},
        |session| {
            if session.rank() == 1 {
                return Ok(());
            }
            let first = session.gather("a", &json!(0)).unwrap_err();
            let second = session.gather("b", &json!(0)).unwrap_err();
            assert_eq!(first.to_string(), second.to_string());
            Err(first)
        },
    );
    let error = results[0].as_ref().unwrap_err();
    says(error, &["worker 1 dropped its session before it was finished"]);
}

#[test]
fn a_worker_that_posts_a_topic_twice_is_refused_and_the_job_goes_on() {
    let (post, may_post) = channel::<()>();
    let (post, may_post) = (Mutex::new(Some(post)), Mutex::new(may_post));
    succeed(Layout::workers(2), move |session| {
        if session.rank() == 1 {
            // When its sender is gone, worker 0 has been refused.
            let _ = may_post.lock().unwrap().recv();
            return session.gather("a", &json!(1)).map(|values| assert_eq!(values.len(), 2));
        }
        let outcomes = thread::scope(|scope| {
            let twice = [(); 2].map(|()| {
                scope.spawn(|| {
                    let outcome = session.gather("a", &json!(0));
                    post.lock().unwrap().take();
                    outcome
                })
            });
            twice.map(|thread| thread.join().unwrap())
        });
        let refused = outcomes.iter().filter_map(|outcome| outcome.as_ref().err());
        let refused: Vec<_> = refused.collect();
        assert_eq!(refused.len(), 1, "{outcomes:?}");
        says(refused[0], &["gathering 'a'", "refused", "worker 0 has posted it already"]);
        Ok(())
    });
}

#[test]
fn what_no_worker_would_say_is_refused() {
    let refusal = |config: &Config, node: u16| {
        let mut stream = fake::control(config, NodeId(0));
        let post = json!({
            "type": "gather", "node": node, "topic": "a", "value": 0, "patience_ms": u64::MAX,
        });
        let answer = fake::ask(&mut stream, NodeId(0), &post);
        assert_eq!(answer["type"], "refused", "{answer}");
        answer["reason"].as_str().unwrap().to_string()
    };
    without_hanging(move || {
        let layout = Layout { servers: Servers::Dedicated(1), ..Layout::workers(2) };
        let (_coordinator, config) = layout.coordinator();
        assert_eq!(refusal(&config, 0), "the job has not started");
        let results = layout.run_with(&config, describe, |session| {
            assert_eq!(refusal(&config, 2), "server 0 (node 2) is not a worker of this job");
            assert!(refusal(&config, 7).contains("is not a worker of this job"));
            let values = session.gather("a", &json!(session.rank()))?;
            assert_eq!(values, [json!(0), json!(1)]);
            session.finish()
        });
        results.into_iter().for_each(Result::unwrap);
    });
}

/// The first answer is the sign that there are answers for all: they are written before the
/// coordinator goes.
#[test]
fn a_coordinator_that_stops_gives_the_answers_it_owes() {
    without_hanging(|| {
        let layout = Layout::workers(5);
        let (coordinator, config) = layout.coordinator();
        let coordinator = Mutex::new(Some(coordinator));
        let results = layout.run_with(&config, describe, |session| {
            let values = session.gather("end", &json!("x".repeat(100_000)))?;
            drop(coordinator.lock().unwrap().take());
            session.finish()?;
            Ok(values.len())
        });
        for result in results {
            assert_eq!(result.unwrap(), 5);
        }
    });
}

#[test]
fn a_coordinator_that_is_gone_is_an_error_that_says_so() {
    let (address, errors) = without_hanging(|| {
        let layout = Layout::workers(2);
        let (coordinator, mut config) = layout.coordinator();
        config.timeout = Duration::from_secs(2);
        let address = config.coordinator.clone();
        let coordinator = Mutex::new(Some(coordinator));
        let results = layout.run_with(&config, describe, |session| {
            session.gather("a", &json!(0))?;
            drop(coordinator.lock().unwrap().take());
            let error = session.gather("b", &json!(0)).unwrap_err();
            Ok((session, error))
        });
        let errors = results.into_iter().map(|result| result.unwrap().1.to_string());
        (address, errors.collect::<Vec<_>>())
    });
    for error in errors {
        assert!(error.contains("gathering 'b'") && error.contains(&address), "{error}");
    }
}

/// A worker in a process of its own, to be killed.
struct Process(Child);

impl Process {
    /// Starts this test program again, as the worker of this rank.
    fn start(config: &Config, rank: u16) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "gather::another_process", "--nocapture"])
            .env("GATHER_ROLE", "worker")
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", config.workers.to_string())
            .env("POSEIDON_COORDINATOR", &config.coordinator)
            .env("POSEIDON_COORDINATOR_SERVED", if rank == 0 { "0" } else { "1" })
            .env("POSEIDON_SECRET", config.secret.expose())
            .env("POSEIDON_CLUSTER", &config.cluster)
            .env("POSEIDON_SERVERS", config.servers.to_string())
            .env("POSEIDON_LANES", config.lanes.to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not a test of its own: what [`Process`] runs. Without a role there is nothing to do.
#[test]
fn another_process() {
    if std::env::var("GATHER_ROLE").is_ok() {
        let session = describe(Session::builder(Config::from_env().unwrap())).start().unwrap();
        session.gather("begun", &Value::Null).unwrap();
        look_on(&session);
    }
}

/// Three workers have gathered once; while two of them gather again, the one of `rank` is killed.
/// Returns the others' errors.
fn strike(config: &Config, rank: u16) -> Vec<Error> {
    let process = Process::start(config, rank);
    let begun = Barrier::new(3);
    thread::scope(|scope| {
        let others = (0..3).filter(|&other| other != rank).map(|other| {
            let config = Config { member: Member::Worker(other), ..config.clone() };
            let begun = &begun;
            scope.spawn(move || {
                let session = describe(Session::builder(config)).start().unwrap();
                session.gather("begun", &Value::Null).unwrap();
                begun.wait();
                session.gather("never", &Value::Null).unwrap_err()
            })
        });
        let others: Vec<_> = others.collect();
        begun.wait();
        // Most likely they wait for their answers by now; it must not matter.
        thread::sleep(Duration::from_millis(200));
        drop(process);
        others.into_iter().map(|other| other.join().unwrap()).collect()
    })
}

#[test]
fn a_worker_that_is_killed_is_named() {
    let errors = without_hanging(|| {
        let (_coordinator, config) = Layout::workers(3).coordinator();
        strike(&config, 1)
    });
    for error in errors {
        says(&error, &["lost worker 1"]);
    }
}

/// The coordinator dies with it, and yet it is the worker that is named.
#[test]
fn a_worker_that_is_killed_with_the_coordinator_in_it_is_named() {
    let errors = without_hanging(|| {
        let mut config = Config::alone(Secret::random().unwrap());
        (config.workers, config.lanes) = (3, 1);
        config.serves_coordinator = false;
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        config.coordinator = free.to_string();
        strike(&config, 0)
    });
    for error in errors {
        says(&error, &["lost worker 0"]);
    }
}

#[test]
fn nobody_waits_for_a_worker_that_has_finished() {
    let play = |session: Session| match session.rank() {
        0 => Err(session.gather("epoch 1", &json!(1)).expect_err("worker 1 is gone")),
        _ => session.finish(),
    };
    let results = perform(Layout::workers(2), |_| {}, play);
    let Err(Error::Gather { why: GatherError::Departed { node }, .. }) = &results[0] else {
        panic!("{:?}", results[0]);
    };
    assert_eq!(node, "worker 1");
    says(results[1].as_ref().unwrap_err(), &["worker 0", "epoch 1", "worker 1 finished"]);
}
