//! What would help most: the same job with one thing changed, simulated.

use super::forecast::{images_per_second, simulate_all};
use super::{Bandwidth, Question};
use crate::report::units;
use poseidon_core::{Cluster, LayerId, Scheme, Servers};
use poseidon_sim::{Error, Outcome, Overlap, Places, Racks, SchemeRule, Setup};
use serde::Serialize;

/// One change and what it is predicted to bring.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Advice {
    /// What to change, for people.
    pub(crate) change: String,
    /// Samples per second over those of the plan, less one.
    pub(crate) gain: f64,
    pub(crate) images_per_second: f64,
    pub(crate) iteration_seconds: f64,
    /// What else it means.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) but: Option<&'static str>,
}

/// All changes that are worth simulating, the best first. Some may make it worse: that is worth
/// knowing too.
pub(super) fn advice(
    question: &Question,
    setup: &Setup,
    outcome: &Outcome,
) -> Result<Vec<Advice>, Error> {
    let changes = changes(question, setup);
    let setups: Vec<Setup> = changes.iter().map(|change| change.setup.clone()).collect();
    let now = images_per_second(setup, outcome);
    let outcomes = simulate_all(&setups, || {})?;
    let mut advice: Vec<Advice> = changes
        .into_iter()
        .zip(outcomes)
        .map(|(Change { text, but, setup }, outcome)| {
            let then = images_per_second(&setup, &outcome);
            let gain = then / now - 1.0;
            let iteration_seconds = outcome.iteration_seconds;
            Advice { change: text, gain, images_per_second: then, iteration_seconds, but }
        })
        .collect();
    advice.sort_by(|a, b| b.gain.total_cmp(&a.gain));
    Ok(advice)
}

struct Change {
    text: String,
    but: Option<&'static str>,
    setup: Setup,
}

fn changes(question: &Question, setup: &Setup) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut add = |text: String, but, setup| changes.push(Change { text, but, setup });

    if let Some(faster) = Bandwidth::from_bytes(setup.network.bandwidth).next_faster() {
        let mut other = setup.clone();
        other.network.bandwidth = faster.bytes();
        add(
            format!("{faster} instead of {}", Bandwidth::from_bytes(setup.network.bandwidth)),
            None,
            other,
        );
    }
    if let Some((text, servers)) = more_servers(&setup.cluster) {
        let (workers, lanes) = (setup.cluster.workers() as u16, setup.cluster.lanes());
        if let Ok(cluster) = Cluster::new(workers, servers, lanes) {
            let cluster = Places::of(&setup.cluster).place(cluster);
            let other = Setup { cluster, ..setup.clone() };
            if other.check().is_ok() {
                add(text, Some("more machines"), other);
            }
        }
    }
    let batches = [(setup.batch * 2, "twice"), (setup.batch / 2, "half")];
    for (batch, how) in batches.into_iter().filter(|(batch, _)| *batch > 0) {
        if let Ok(times) = question.times(batch) {
            let other = Setup { batch, times, ..setup.clone() };
            let but = Some("another batch size trains differently");
            add(format!("{how} the batch: {}", units::plural(batch as u64, "sample")), but, other);
        }
    }
    for rule in [SchemeRule::Auto, SchemeRule::Ps, SchemeRule::Sfb] {
        let other = Setup { scheme: rule, overrides: Vec::new(), ..setup.clone() };
        // Not if it comes to the same.
        if schemes(&other) != schemes(setup) || setup.scheme == SchemeRule::Adam {
            add(format!("--scheme {rule}"), None, other);
        }
    }
    if let Some(racks) = setup.network.racks.filter(|racks| racks.oversubscription > 1.0) {
        let mut other = setup.clone();
        other.network.racks =
            Some(Racks { oversubscription: racks.oversubscription / 2.0, ..racks });
        let text = format!(
            "links of racks twice as wide as --oversubscription {} says",
            racks.oversubscription
        );
        add(text, None, other);
    }
    if setup.overlap != Overlap::Full {
        add("--overlap full".into(), None, Setup { overlap: Overlap::Full, ..setup.clone() });
    }
    changes
}

fn schemes(setup: &Setup) -> Vec<Option<Scheme>> {
    let plan = setup.plan();
    let ids = (0..setup.layers.len() as u32).map(LayerId);
    ids.map(|layer| plan.choice(layer).map(|choice| choice.scheme)).collect()
}

/// Twice the servers; where the workers are the servers, as many dedicated ones beside them.
fn more_servers(cluster: &Cluster) -> Option<(String, Servers)> {
    let workers = cluster.workers();
    if workers == 1 {
        return None;
    }
    let beside = |extra: u16| {
        let text =
            format!("{} beside the workers", units::plural(extra.into(), "dedicated server"));
        (text, Servers::Mixed(extra))
    };
    Some(match cluster.servers() {
        Servers::Colocated => beside(u16::try_from(workers).ok()?),
        Servers::Mixed(extra) => beside(extra.checked_mul(2)?.max(1)),
        Servers::Dedicated(extra) => {
            let twice = extra.checked_mul(2)?;
            (format!("{twice} dedicated servers instead of {extra}"), Servers::Dedicated(twice))
        }
    })
}
