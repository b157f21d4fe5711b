use super::*;

const OURS: RunFacts =
    RunFacts { identity: JobId([3; 16]), epoch: Epoch(1), lanes: 2, draft: false };

fn hello(identity: JobId, epoch: Epoch, lane: u16) -> Hello {
    let (purpose, node, lane) = (Purpose::Lane, NodeId(1), LaneId(lane));
    let (encrypt, cluster, nonce) = (false, [0; 16], [0; 32]);
    Hello { purpose, node, lane, encrypt, cluster, identity, epoch, nonce }
}

#[test]
fn a_caller_of_another_run_or_epoch_is_refused_and_so_is_a_lane_that_is_not_there() {
    let run = Run::default();
    run.set(RunState::Opening(OURS));
    let judge = |identity, epoch, lane| run.admit(&hello(identity, Epoch(epoch), lane));
    assert_eq!(judge(OURS.identity, 1, 1), Ok(()));
    assert_eq!(judge(JobId([4; 16]), 1, 1), Err(Status::Run));
    assert_eq!(judge(JobId::default(), 1, 1), Err(Status::Run));
    assert_eq!(judge(OURS.identity, 2, 1), Err(Status::Run));
    assert_eq!(judge(OURS.identity, 1, 2), Err(Status::Lane));
    run.connected();
    assert_eq!(judge(OURS.identity, 1, 1), Err(Status::Node));
    assert_eq!(judge(OURS.identity, 2, 1), Err(Status::Run));
}

#[test]
fn callers_of_a_lane_that_may_be_in_the_complete_book_wait_for_it() {
    let draft = RunFacts { lanes: 1, draft: true, ..OURS };
    for (outcome, verdicts) in [
        (Some(OURS), [Ok(()), Err(Status::Lane)]),
        (None, [Err(Status::NoBook), Err(Status::NoBook)]),
    ] {
        let run = Arc::new(Run::default());
        let closing = Closing(run.clone());
        run.set(RunState::Opening(draft));
        assert_eq!(run.admit(&hello(OURS.identity, OURS.epoch, 0)), Ok(()));
        let callers = [1, 2].map(|lane| {
            let run = run.clone();
            std::thread::spawn(move || run.admit(&hello(OURS.identity, OURS.epoch, lane)))
        });
        if let Some(facts) = outcome {
            run.set(RunState::Opening(facts));
        }
        drop(closing);
        assert_eq!(callers.map(|caller| caller.join().unwrap()), verdicts);
    }
}

#[test]
fn callers_wait_for_the_book_and_not_for_one_that_will_not_come() {
    for (outcome, verdict) in [(Some(OURS), Ok(())), (None, Err(Status::NoBook))] {
        let run = Arc::new(Run::default());
        let closing = Closing(run.clone());
        let callers = [0, 1].map(|lane| {
            let run = run.clone();
            std::thread::spawn(move || run.admit(&hello(OURS.identity, OURS.epoch, lane)))
        });
        if let Some(facts) = outcome {
            run.set(RunState::Opening(facts));
        }
        drop(closing);
        for caller in callers {
            assert_eq!(caller.join().unwrap(), verdict);
        }
    }
}
