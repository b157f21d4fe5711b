//! Optimizers on a command line: `name` or `name:field=value,flag,...`.

use super::{Optimizer, OptimizerError, Reduction};
use std::{fmt, str::FromStr};

/// A text that names no optimizer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseOptimizerError {
    /// There is no optimizer of that name.
    #[error("no optimizer is called {got:?}, there are: {}", NAMES.join(", "))]
    UnknownName {
        /// The name.
        got: String,
    },
    /// The optimizer has no field of that name.
    #[error("{optimizer} has no field {got:?}, it has: {possible}")]
    UnknownField {
        /// The optimizer.
        optimizer: &'static str,
        /// The names of the fields it has.
        possible: String,
        /// The name.
        got: String,
    },
    /// A field is given twice.
    #[error("{optimizer}: {field} is given more than once")]
    RepeatedField {
        /// The optimizer.
        optimizer: &'static str,
        /// The field.
        field: &'static str,
    },
    /// The text after `=` is not a value of the field, or is missing.
    #[error("{optimizer}: {field} must be {expected}, got {got:?}")]
    BadValue {
        /// The optimizer.
        optimizer: &'static str,
        /// The field.
        field: &'static str,
        /// What the field takes.
        expected: &'static str,
        /// The text.
        got: String,
    },
    /// The values are well-formed, but training cannot work with them.
    #[error(transparent)]
    Invalid(#[from] OptimizerError),
}

/// A text that names no reduction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a reduction is mean or sum, got {got:?}")]
pub struct ParseReductionError {
    /// The text.
    pub got: String,
}

impl FromStr for Optimizer {
    type Err = ParseOptimizerError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, settings) = match text.split_once(':') {
            Some((name, settings)) => (name.trim(), Some(settings)),
            None => (text.trim(), None),
        };
        let mut optimizer = Self::named(name)
            .ok_or_else(|| ParseOptimizerError::UnknownName { got: name.to_owned() })?;
        let name = optimizer.name();
        let mut given = Vec::new();
        for setting in settings.into_iter().flat_map(|s| s.split(',')) {
            let (key, value) = match setting.split_once('=') {
                Some((key, value)) => (key.trim(), Some(value.trim())),
                None => (setting.trim(), None),
            };
            let mut fields = optimizer.fields();
            let Some((field, target)) = fields.iter_mut().find(|(field, _)| *field == key) else {
                let names: Vec<_> = fields.iter().map(|&(field, _)| field).collect();
                let possible = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
                let got = key.to_owned();
                return Err(ParseOptimizerError::UnknownField { optimizer: name, possible, got });
            };
            let field = *field;
            if given.contains(&field) {
                return Err(ParseOptimizerError::RepeatedField { optimizer: name, field });
            }
            given.push(field);
            target.set(value).map_err(|expected| ParseOptimizerError::BadValue {
                optimizer: name,
                field,
                expected,
                got: value.unwrap_or_default().to_owned(),
            })?;
        }
        optimizer.validate()?;
        Ok(optimizer)
    }
}

/// The shortest text that parses to the same optimizer: fields at their defaults are left out.
impl fmt::Display for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name();
        f.write_str(name)?;
        let mut shown = self.clone();
        let mut default = Self::named(name).expect("named knows every name");
        let mut separator = ':';
        for ((field, value), (_, default)) in shown.fields().iter().zip(default.fields()) {
            if *value == default {
                continue;
            }
            write!(f, "{separator}{field}")?;
            separator = ',';
            match value {
                // Debug writes 1e-8 where Display writes 0.00000001; both parse back exactly.
                Field::Single(x) => write!(f, "={x:?}")?,
                Field::Double(x) => write!(f, "={x:?}")?,
                Field::Flag(true) => {}
                Field::Flag(false) => f.write_str("=false")?,
                Field::Reduction(x) => write!(f, "={x}")?,
            }
        }
        Ok(())
    }
}

impl FromStr for Reduction {
    type Err = ParseReductionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "mean" => Ok(Self::Mean),
            "sum" => Ok(Self::Sum),
            _ => Err(ParseReductionError { got: text.to_owned() }),
        }
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Mean => "mean",
            Self::Sum => "sum",
        })
    }
}

impl Optimizer {
    /// The name in the text form; a bare reduction is called by its own name.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Reduce(Reduction::Mean) => "mean",
            Self::Reduce(Reduction::Sum) => "sum",
            Self::Sgd { .. } => "sgd",
            Self::CaffeSgd { .. } => "caffe-sgd",
            Self::Adam { .. } => "adam",
            Self::AdamW { .. } => "adamw",
        }
    }

    /// The optimizer of that name with its defaults.
    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "mean" => Self::Reduce(Reduction::Mean),
            "sum" => Self::Reduce(Reduction::Sum),
            "sgd" => Self::sgd(),
            "caffe-sgd" => Self::caffe_sgd(),
            "adam" => Self::adam(),
            "adamw" => Self::adamw(),
            _ => return None,
        })
    }

    /// The fields by their names in the text form, for reading and writing alike.
    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
        match self {
            Self::Reduce(_) => Vec::new(),
            Self::Sgd { momentum, dampening, weight_decay, nesterov, maximize, reduction } => vec![
                ("momentum", Field::Single(momentum)),
                ("dampening", Field::Single(dampening)),
                ("weight-decay", Field::Single(weight_decay)),
                ("nesterov", Field::Flag(nesterov)),
                ("maximize", Field::Flag(maximize)),
                ("reduction", Field::Reduction(reduction)),
            ],
            Self::CaffeSgd { momentum, weight_decay, nesterov, reduction } => vec![
                ("momentum", Field::Single(momentum)),
                ("weight-decay", Field::Single(weight_decay)),
                ("nesterov", Field::Flag(nesterov)),
                ("reduction", Field::Reduction(reduction)),
            ],
            Self::Adam { beta1, beta2, eps, weight_decay, maximize, reduction }
            | Self::AdamW { beta1, beta2, eps, weight_decay, maximize, reduction } => vec![
                ("beta1", Field::Double(beta1)),
                ("beta2", Field::Double(beta2)),
                ("eps", Field::Single(eps)),
                ("weight-decay", Field::Single(weight_decay)),
                ("maximize", Field::Flag(maximize)),
                ("reduction", Field::Reduction(reduction)),
            ],
        }
    }
}

const NAMES: [&str; 6] = ["mean", "sum", "sgd", "caffe-sgd", "adam", "adamw"];

#[derive(PartialEq)]
enum Field<'a> {
    Single(&'a mut f32),
    Double(&'a mut f64),
    Flag(&'a mut bool),
    Reduction(&'a mut Reduction),
}

impl Field<'_> {
    /// Takes the value from its text, or says what it expected. A flag needs no text.
    fn set(&mut self, text: Option<&str>) -> Result<(), &'static str> {
        fn parse<T: FromStr>(
            text: Option<&str>,
            expected: &'static str,
        ) -> Result<T, &'static str> {
            text.and_then(|text| text.parse().ok()).ok_or(expected)
        }
        match self {
            Self::Single(x) => **x = parse(text, "a number")?,
            Self::Double(x) => **x = parse(text, "a number")?,
            Self::Flag(x) => **x = parse(text.or(Some("true")), "true or false")?,
            Self::Reduction(x) => **x = parse(text, "mean or sum")?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<Optimizer, ParseOptimizerError> {
        text.parse()
    }

    fn refusal(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    #[test]
    fn every_name_is_its_defaults() {
        for name in NAMES {
            let optimizer = parse(name).unwrap();
            assert_eq!(optimizer.name(), name);
            assert_eq!(optimizer.to_string(), name);
        }
        assert_eq!(parse("mean"), Ok(Optimizer::default()));
        assert_eq!(parse("sum"), Ok(Optimizer::Reduce(Reduction::Sum)));
        assert_eq!(parse("adamw"), Ok(Optimizer::adamw()));
    }

    #[test]
    fn fields_are_set() {
        assert_eq!(
            parse("sgd:momentum=0.9,weight-decay=1e-4,nesterov"),
            Ok(Optimizer::Sgd {
                momentum: 0.9,
                dampening: 0.0,
                weight_decay: 1e-4,
                nesterov: true,
                maximize: false,
                reduction: Reduction::Mean,
            })
        );
        assert_eq!(
            parse("caffe-sgd: momentum = 0.5 , nesterov=false, reduction=sum"),
            Ok(Optimizer::CaffeSgd {
                momentum: 0.5,
                weight_decay: 0.0,
                nesterov: false,
                reduction: Reduction::Sum,
            })
        );
        assert_eq!(
            parse("adam:beta1=0.5,beta2=0.25,eps=1e-6,weight-decay=2,maximize,reduction=sum"),
            Ok(Optimizer::Adam {
                beta1: 0.5,
                beta2: 0.25,
                eps: 1e-6,
                weight_decay: 2.0,
                maximize: true,
                reduction: Reduction::Sum,
            })
        );
    }

    #[test]
    fn shown_text_is_short() {
        let text = "sgd:momentum=0.9,weight-decay=0.0001,nesterov,reduction=sum";
        assert_eq!(parse(text).unwrap().to_string(), text);
        assert_eq!(parse("adam:beta1=0.9,eps=1e-8").unwrap().to_string(), "adam");
        assert_eq!(parse("adamw:weight-decay=0").unwrap().to_string(), "adamw:weight-decay=0.0");
        assert_eq!(parse("adam:eps=0.000001").unwrap().to_string(), "adam:eps=1e-6");
    }

    #[test]
    fn refusals_say_what_is_possible() {
        assert_eq!(
            refusal("rmsprop:beta=1"),
            "no optimizer is called \"rmsprop\", there are: mean, sum, sgd, caffe-sgd, adam, adamw"
        );
        assert_eq!(
            refusal("caffe-sgd:dampening=0.1"),
            "caffe-sgd has no field \"dampening\", \
             it has: momentum, weight-decay, nesterov, reduction"
        );
        assert_eq!(refusal("mean:reduction=sum"), "mean has no field \"reduction\", it has: none");
        assert_eq!(refusal("sgd:momentum=high"), "sgd: momentum must be a number, got \"high\"");
        assert_eq!(refusal("adam:beta1"), "adam: beta1 must be a number, got \"\"");
        assert_eq!(
            refusal("sgd:nesterov=maybe"),
            "sgd: nesterov must be true or false, got \"maybe\""
        );
        assert_eq!(refusal("sgd:reduction=max"), "sgd: reduction must be mean or sum, got \"max\"");
        assert_eq!(
            refusal("sgd:momentum=0.9,momentum=0.8"),
            "sgd: momentum is given more than once"
        );
        assert_eq!(refusal("adam:beta2=1"), "adam: beta2 must be at least 0 and below 1, got 1");
        assert!(matches!(parse("sgd:"), Err(ParseOptimizerError::UnknownField { .. })));
        assert!(matches!(parse(""), Err(ParseOptimizerError::UnknownName { .. })));
        assert_eq!("Mean".parse::<Reduction>(), Err(ParseReductionError { got: "Mean".into() }));
    }

    fn reductions() -> impl Strategy<Value = Reduction> {
        prop_oneof![Just(Reduction::Mean), Just(Reduction::Sum)]
    }

    /// Anything that validates, subnormal and huge numbers included.
    fn optimizers() -> impl Strategy<Value = Optimizer> {
        use proptest::num::f32::{NORMAL, POSITIVE, SUBNORMAL, ZERO};
        let positive = || POSITIVE | NORMAL | SUBNORMAL;
        let not_negative = move || positive() | ZERO;
        let numbers = (not_negative(), NORMAL | ZERO, not_negative());
        let sgd = (numbers, any::<bool>(), reductions()).prop_map(
            |((momentum, dampening, weight_decay), maximize, reduction)| Optimizer::Sgd {
                momentum,
                dampening,
                weight_decay,
                nesterov: false,
                maximize,
                reduction,
            },
        );
        let caffe_sgd = (positive(), not_negative(), any::<bool>(), reductions()).prop_map(
            |(momentum, weight_decay, nesterov, reduction)| Optimizer::CaffeSgd {
                momentum,
                weight_decay,
                nesterov,
                reduction,
            },
        );
        let numbers = (0.0..1.0, 0.0..1.0, positive(), not_negative());
        let adam = (numbers, reductions(), any::<bool>(), any::<bool>()).prop_map(
            |((beta1, beta2, eps, weight_decay), reduction, maximize, decoupled)| match decoupled {
                true => Optimizer::AdamW { beta1, beta2, eps, weight_decay, maximize, reduction },
                false => Optimizer::Adam { beta1, beta2, eps, weight_decay, maximize, reduction },
            },
        );
        prop_oneof![reductions().prop_map(Optimizer::Reduce), sgd, caffe_sgd, adam]
    }

    proptest! {
        #[test]
        fn shown_text_parses_back(optimizer in optimizers()) {
            prop_assert_eq!(optimizer.validate(), Ok(()));
            prop_assert_eq!(parse(&optimizer.to_string()), Ok(optimizer));
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in "(sgd|adam|mean)?:?[a-z0-9=,.:-]{0,30}") {
            if let Ok(optimizer) = parse(&text) {
                prop_assert_eq!(parse(&optimizer.to_string()), Ok(optimizer));
            }
        }
    }
}
