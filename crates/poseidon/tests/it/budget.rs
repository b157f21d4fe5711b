//! Nodes that may send only so much, on real links.

use crate::cluster::{Layout, builder, job, step, without_hanging};
use poseidon::config::{Carriers, Config, Member};
use poseidon::coordinator::set_bandwidth_budget;
use poseidon::{Error, Layer, NodeId, Rate, Session};
use std::thread;
use std::time::Duration;

fn rate(text: &str) -> Option<Rate> {
    Some(text.parse().unwrap())
}

/// Sessions of all workers of `layout`, over TCP, in rank order.
fn start(layout: Layout, config: &Config, layers: &[usize]) -> Vec<Session> {
    let named = layers.iter().enumerate().map(|(n, &len)| Layer::new(format!("l{n}"), len));
    let job = poseidon::Job { layers: named.collect(), ..job() };
    let worker = |rank| {
        let config = Config { member: Member::Worker(rank), ..config.clone() };
        let builder = builder(config, &job);
        thread::spawn(move || builder.start().unwrap())
    };
    let workers: Vec<_> = (0..layout.workers).map(worker).collect();
    workers.into_iter().map(|worker| worker.join().unwrap()).collect()
}

/// Every session works on a thread of its own.
fn on_each(sessions: Vec<Session>, work: impl Fn(&Session) -> Result<(), Error> + Sync) {
    thread::scope(|scope| {
        let work = &work;
        for session in sessions {
            scope.spawn(move || work(&session).and_then(|()| session.finish()).unwrap());
        }
    });
}

/// Frames are cut wherever the budget ends, and the budget changes under way.
#[test]
fn an_exchange_within_a_budget_is_exact_and_ends() {
    without_hanging(|| {
        for lanes in [1, 3] {
            let layout = Layout { lanes, carrier: Carriers::Tcp, ..Layout::workers(3) };
            let (_coordinator, mut config) = layout.coordinator();
            config.bandwidth_budget = rate("2mbit");
            let sessions = start(layout, &config, &[10, 3_000, 7_001]);
            on_each(sessions, |session| {
                assert_eq!(session.bandwidth_budget(), rate("2mbit"));
                for clock in 1..=4 {
                    step(session, clock, 0..3)?;
                    let next = if clock == 3 { None } else { rate("8mbit") };
                    session.set_bandwidth_budget(next)?;
                    assert_eq!(session.bandwidth_budget(), next);
                }
                Ok(())
            });
        }
    });
}

/// A layer that would take hours is there when its budget is lifted, by another thread or from
/// outside.
#[test]
fn a_budget_that_is_lifted_lets_go_of_what_waits() {
    without_hanging(|| {
        let layout = Layout { carrier: Carriers::Tcp, ..Layout::workers(2) };
        for outside in [false, true] {
            let (_coordinator, mut config) = layout.coordinator();
            config.bandwidth_budget = rate("10kbit");
            let sessions = start(layout, &config, &[1 << 20]);
            thread::scope(|scope| {
                for session in &sessions {
                    scope.spawn(|| step(session, 1, 0..2).unwrap());
                }
                if outside {
                    let keys = config.credentials();
                    let told = |node| {
                        let patience = Duration::from_secs(60);
                        set_bandwidth_budget(&config.coordinator, &keys, None, node, patience)
                    };
                    assert_eq!(told(Some(NodeId(1))).unwrap(), [NodeId(1)]);
                    assert_eq!(told(None).unwrap(), [NodeId(0), NodeId(1)]);
                    let error = told(Some(NodeId(2))).unwrap_err().to_string();
                    assert!(error.contains("there is no node 2"), "{error}");
                } else {
                    sessions.iter().for_each(|s| s.set_bandwidth_budget(None).unwrap());
                }
            });
            assert!(sessions.iter().all(|session| session.bandwidth_budget().is_none()));
            on_each(sessions, |_| Ok(()));
        }
    });
}

/// Nodes of a job that has not begun cannot be told.
#[test]
fn a_job_that_has_not_started_has_no_budget_to_change() {
    let (_coordinator, config) = Layout::workers(2).coordinator();
    let patience = Duration::from_secs(60);
    let told = set_bandwidth_budget(
        &config.coordinator,
        &config.credentials(),
        rate("1gbit"),
        None,
        patience,
    );
    assert!(told.unwrap_err().to_string().contains("the job has not started"));
}

#[test]
fn a_group_shares_the_budget_of_its_session() {
    without_hanging(|| {
        let layout = Layout { carrier: Carriers::Tcp, ..Layout::workers(2) };
        let (_coordinator, mut config) = layout.coordinator();
        config.bandwidth_budget = rate("100mbit");
        on_each(start(layout, &config, &[10]), |session| {
            let group = session.group("sums")?;
            assert_eq!(group.bandwidth_budget()?, rate("100mbit"));
            group.set_bandwidth_budget(rate("20mbit"))?;
            assert_eq!(session.bandwidth_budget(), rate("20mbit"));
            Ok(())
        });
    });
}

#[test]
fn the_environment_says_a_rate_or_none() {
    let budget = |text: &str| {
        let variables =
            [("POSEIDON_BANDWIDTH_BUDGET", text), ("POSEIDON_SECRET", "known to all of us")];
        let find = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string())
        };
        Config::from_variables(&find).map(|config| config.bandwidth_budget)
    };
    assert_eq!(budget("400mbit").unwrap(), rate("400mbit"));
    assert_eq!([budget("none").unwrap(), budget("").unwrap()], [None, None]);
    let error = budget("10").unwrap_err().to_string();
    assert!(error.contains("POSEIDON_BANDWIDTH_BUDGET=10") && error.contains("no unit"), "{error}");
}
