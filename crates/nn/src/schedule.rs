//! Learning rates over time.
//!
//! | text | rate at step t, for the base rate b |
//! | --- | --- |
//! | `fixed` | b |
//! | `step:size=1000,gamma=0.1` | b gamma^⌊t / size⌋ |
//! | `multistep:at=4000/5000,gamma=0.1` | b times gamma for every point t has reached |
//! | `poly:power=1,steps=5000` | b (1 - t / steps)^power, 0 from `steps` on |
//! | `cosine:steps=500,floor=0.001` | half a cosine wave from b to `floor` (default 0), which then stays |
//!
//! Each takes `warmup=n`: during the first n steps the rate is multiplied with (t + 1) / n.

use std::f64::consts::PI;
use std::fmt;
use std::str::FromStr;

/// The learning rate as a function of the step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Schedule {
    /// The curve.
    pub policy: Policy,
    /// Steps over which the rate rises linearly to the curve.
    pub warmup: u64,
}

/// The curve of a [`Schedule`], as the module's table defines it.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Policy {
    /// Always the base rate.
    #[default]
    Fixed,
    /// Falls at regular intervals.
    Step {
        /// Steps from one fall to the next.
        size: u64,
        /// What the rate is multiplied with.
        gamma: f32,
    },
    /// Falls at given steps.
    Multistep {
        /// The steps, ascending.
        at: Vec<u64>,
        /// What the rate is multiplied with at each.
        gamma: f32,
    },
    /// Falls to zero as a power of the steps that are left.
    Poly {
        /// The exponent.
        power: f32,
        /// When it has reached zero.
        steps: u64,
    },
    /// Falls as half a cosine wave.
    Cosine {
        /// When it has reached the floor.
        steps: u64,
        /// The rate at the end.
        floor: f32,
    },
}

/// Why a text is not a [`Schedule`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseScheduleError {
    /// There is no such policy.
    #[error("unknown schedule '{got}': expected fixed, step, multistep, poly or cosine")]
    Policy {
        /// What came before the colon.
        got: String,
    },
    /// Not of the form `key=value`.
    #[error("'{got}' in a schedule: expected key=value")]
    Setting {
        /// What came between two commas.
        got: String,
    },
    /// The policy has no such key, or it came twice.
    #[error("'{key}' of schedule '{policy}' is unknown or given twice")]
    Key {
        /// The policy.
        policy: String,
        /// The key.
        key: String,
    },
    /// A key without a default is missing.
    #[error("schedule '{policy}' needs '{key}='")]
    Missing {
        /// The policy.
        policy: String,
        /// The key.
        key: &'static str,
    },
    /// A value cannot be used.
    #[error("'{key}={got}' in a schedule: expected {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// What would do.
        expected: &'static str,
        /// What is there.
        got: String,
    },
}

impl Schedule {
    /// The rate at `step`, counted from 0.
    pub fn at(&self, base: f32, step: u64) -> f32 {
        let rate = f64::from(base);
        let progress = |steps: u64| step.min(steps) as f64 / steps.max(1) as f64;
        let rate = match &self.policy {
            Policy::Fixed => rate,
            Policy::Step { size, gamma } => {
                rate * f64::from(*gamma).powf((step / size.max(&1)) as f64)
            }
            Policy::Multistep { at, gamma } => {
                let reached = at.iter().filter(|at| **at <= step).count();
                rate * f64::from(*gamma).powf(reached as f64)
            }
            Policy::Poly { power, steps } => rate * (1.0 - progress(*steps)).powf((*power).into()),
            Policy::Cosine { steps, floor } => {
                let floor = f64::from(*floor);
                floor + (rate - floor) * 0.5 * (1.0 + (PI * progress(*steps)).cos())
            }
        };
        let warm = (step as f64 + 1.0) / self.warmup.max(1) as f64;
        (rate * warm.min(1.0)) as f32
    }
}

impl FromStr for Schedule {
    type Err = ParseScheduleError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (policy, settings) = text.split_once(':').unwrap_or((text, ""));
        let mut settings = Settings::new(policy, settings)?;
        let positive = "a whole number of at least 1";
        let non_negative = "a number of at least 0";
        let finite = |value: &f32| value.is_finite() && *value >= 0.0;
        let gamma = |settings: &mut Settings<'_>| settings.take("gamma", non_negative, finite);
        let steps =
            |settings: &mut Settings<'_>| settings.take("steps", positive, |n: &u64| *n > 0);
        let policy = match policy {
            "fixed" => Policy::Fixed,
            "step" => Policy::Step {
                size: settings.take("size", positive, |n| *n > 0)?,
                gamma: gamma(&mut settings)?,
            },
            "multistep" => {
                let ascending = |at: &Steps| at.0.is_sorted_by(|a, b| a < b);
                let expected = "ascending steps with '/' between them";
                let Steps(at) = settings.take("at", expected, ascending)?;
                Policy::Multistep { at, gamma: gamma(&mut settings)? }
            }
            "poly" => Policy::Poly {
                power: settings.take("power", non_negative, finite)?,
                steps: steps(&mut settings)?,
            },
            "cosine" => Policy::Cosine {
                steps: steps(&mut settings)?,
                floor: settings.take_or("floor", 0.0, non_negative, finite)?,
            },
            _ => return Err(ParseScheduleError::Policy { got: policy.into() }),
        };
        let warmup = settings.take_or("warmup", 0, "a whole number", |_| true)?;
        settings.finish()?;
        Ok(Self { policy, warmup })
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.policy {
            Policy::Fixed => f.write_str("fixed")?,
            Policy::Step { size, gamma } => write!(f, "step:size={size},gamma={gamma}")?,
            Policy::Multistep { at, gamma } => {
                write!(f, "multistep:at={},gamma={gamma}", Steps(at.clone()))?;
            }
            Policy::Poly { power, steps } => write!(f, "poly:power={power},steps={steps}")?,
            Policy::Cosine { steps, floor } => {
                write!(f, "cosine:steps={steps}")?;
                if *floor != 0.0 {
                    write!(f, ",floor={floor}")?;
                }
            }
        }
        if self.warmup > 0 {
            let first = if self.policy == Policy::Fixed { ':' } else { ',' };
            write!(f, "{first}warmup={}", self.warmup)?;
        }
        Ok(())
    }
}

/// The `key=value` pairs that have not been taken yet.
struct Settings<'a> {
    policy: &'a str,
    pairs: Vec<(&'a str, &'a str)>,
}

impl<'a> Settings<'a> {
    fn new(policy: &'a str, text: &'a str) -> Result<Self, ParseScheduleError> {
        let pair = |pair: &'a str| {
            pair.split_once('=').ok_or_else(|| ParseScheduleError::Setting { got: pair.into() })
        };
        let pairs = match text {
            "" => Vec::new(),
            _ => text.split(',').map(pair).collect::<Result<_, _>>()?,
        };
        Ok(Self { policy, pairs })
    }

    fn take<T: FromStr>(
        &mut self,
        key: &'static str,
        expected: &'static str,
        fits: impl Fn(&T) -> bool,
    ) -> Result<T, ParseScheduleError> {
        let Some(index) = self.pairs.iter().position(|(k, _)| *k == key) else {
            return Err(ParseScheduleError::Missing { policy: self.policy.into(), key });
        };
        let (_, value) = self.pairs.remove(index);
        let parsed = value.parse().ok().filter(fits);
        parsed.ok_or_else(|| ParseScheduleError::Value { key, expected, got: value.into() })
    }

    fn take_or<T: FromStr>(
        &mut self,
        key: &'static str,
        default: T,
        expected: &'static str,
        fits: impl Fn(&T) -> bool,
    ) -> Result<T, ParseScheduleError> {
        match self.take(key, expected, fits) {
            Err(ParseScheduleError::Missing { .. }) => Ok(default),
            taken => taken,
        }
    }

    fn finish(self) -> Result<(), ParseScheduleError> {
        match self.pairs.first() {
            None => Ok(()),
            Some((key, _)) => {
                let (policy, key) = (self.policy.into(), (*key).into());
                Err(ParseScheduleError::Key { policy, key })
            }
        }
    }
}

/// Steps as text: `4000/5000`.
struct Steps(Vec<u64>);

impl FromStr for Steps {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.split('/').map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, step) in self.0.iter().enumerate() {
            let separator = if i > 0 { "/" } else { "" };
            write!(f, "{separator}{step}")?;
        }
        Ok(())
    }
}
