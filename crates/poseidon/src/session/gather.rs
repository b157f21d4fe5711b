//! Small facts of all workers, through the coordinator.

use crate::job::line::JobState;
use crate::job::rounds::BESIDE;
use crate::lane::Command;
use crate::lane::board::Board;
use crate::{Error, GatherError, Session};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::{Duration, Instant};

impl Session {
    /// Gives every worker the values of all workers, in rank order. Every worker calls it with the
    /// same `topic`, and it returns when the last one has. A topic may be gathered again
    /// afterwards, and threads may gather different topics at the same time.
    ///
    /// It is for small facts now and then: values go through the coordinator as JSON (so a float
    /// must be finite), all of a topic's together at most 64 MiB. Workers that post something else
    /// under one topic need a type that takes all of it, such as `serde_json::Value`.
    ///
    /// If a worker does not post within the session's time-out, the error names it, and the job
    /// stops. If the job fails meanwhile, the error is why.
    pub fn gather<T: Serialize + DeserializeOwned>(
        &self,
        topic: &str,
        value: &T,
    ) -> Result<Vec<T>, Error> {
        let error = match self.post(topic, value, self.timeout) {
            Ok(values) => return Ok(values),
            Err(error) => error,
        };
        // This program's mistake, or news of the lanes, which all workers have: nothing to tell.
        use GatherError::{Refused, TooLarge, Unlike};
        let (mistake, told) = match &error {
            Error::Gather { why, .. } => {
                let mistake = matches!(why, TooLarge { .. } | Refused { .. } | Unlike { .. });
                (mistake, mistake)
            }
            _ => (false, true),
        };
        if !mistake {
            self.node.observed.fail(&error);
        }
        if told {
            return Err(error);
        }
        // Without this the other workers would wait for this one, in `gather` or in their next
        // step.
        self.parts.command_all(|| Command::Abort(error.to_string()));
        Err(error)
    }

    /// As [`gather`](Self::gather), by a thread beside the training programs, which waits as long as
    /// `patience`. The programs go on meanwhile, and go on if it fails.
    pub fn gather_beside<T: Serialize + DeserializeOwned>(
        &self,
        topic: &str,
        value: &T,
        patience: Duration,
    ) -> Result<Vec<T>, Error> {
        self.post(&format!("{BESIDE}{topic}"), value, patience)
    }

    /// Posts and waits. If the job has failed, the error is why.
    fn post<T: Serialize + DeserializeOwned>(
        &self,
        topic: &str,
        value: &T,
        patience: Duration,
    ) -> Result<Vec<T>, Error> {
        self.check_running()?;
        let board = &*self.parts.board;
        let gathered = self.node.line.gather(topic, value, patience, &|| board.state());
        gathered.map_err(|why| {
            // Most likely the coordinator has died with its node: the lanes know which it was.
            let broken = matches!(why, GatherError::Broken { .. });
            let failure = if broken { await_failure(board) } else { None };
            failure.unwrap_or_else(|| Error::Gather { topic: topic.into(), why })
        })
    }
}

impl Board {
    /// What a thread that waits for the coordinator has to know of the job.
    pub(crate) fn state(&self) -> JobState {
        if self.failure().is_some() {
            return JobState::Failed;
        }
        self.departed().map_or(JobState::Running, JobState::Departed)
    }
}

/// Why the job has failed, if that is known now or soon.
pub(super) fn await_failure(board: &Board) -> Option<Error> {
    let deadline = Instant::now() + ECHO;
    while board.failure().is_none() && Instant::now() < deadline {
        std::thread::sleep(GLANCE);
    }
    board.failure()
}

/// How often a wait looks whether the job has failed.
const GLANCE: Duration = Duration::from_millis(100);
/// How soon a death that cut a control connection is known to every lane: at once where there is a
/// link to the dead node, and through a server elsewhere.
const ECHO: Duration = Duration::from_secs(2);
