//! Numbers of one layer, and how they are named in a file.

use safetensors::Dtype;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// A run of one layer's numbers, as one node has them.
///
/// `V` is anything that lends its numbers: `&[f32]`, `Vec<f32>`, `Arc<[f32]>`, or [`Typed`].
#[derive(Clone, Debug)]
pub struct Piece<V> {
    /// The layer's name.
    pub layer: String,
    /// What the numbers are.
    pub what: What,
    /// The first element's index in the layer.
    pub start: usize,
    /// The numbers.
    pub values: V,
}

/// Numbers as a file has them.
pub trait Numbers {
    /// Their type.
    fn dtype(&self) -> Dtype;
    /// Their bytes, little-endian.
    fn bytes(&self) -> &[u8];
}

impl<V: AsRef<[f32]>> Numbers for V {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self.as_ref())
    }
}

/// Numbers of any type that has whole bytes.
#[derive(Clone, Copy, Debug)]
pub struct Typed<'a> {
    /// Their type.
    pub dtype: Dtype,
    /// Their bytes, little-endian.
    pub bytes: &'a [u8],
}

impl Numbers for Typed<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn bytes(&self) -> &[u8] {
        self.bytes
    }
}

/// Bytes of one number. `None` for types that share bytes.
pub(crate) fn width(dtype: Dtype) -> Option<usize> {
    let bits = dtype.bitsize();
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// What a piece's numbers are. There is one number for each element of the layer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum What {
    /// The layer's parameters: `parameters`.
    Parameters,
    /// A vector that the update rule remembers, by its number: `state.0`.
    State(usize),
    /// Anything else, by a name that [`What::other`] has checked.
    Other(OtherName),
}

/// A checked name of something that is neither parameters nor the update rule's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OtherName(String);

impl What {
    /// Something that is neither parameters nor an update rule's vector, such as `residual.3`.
    ///
    /// `None` if the name is empty, has other characters than letters and digits of ASCII, `.`, `-`
    /// and `_`, or is a name of the other two.
    pub fn other(name: &str) -> Option<Self> {
        match name.parse() {
            Ok(other @ Self::Other(_)) => Some(other),
            _ => None,
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Parameters => f.write_str("parameters"),
            Self::State(vector) => write!(f, "state.{vector}"),
            Self::Other(name) => f.write_str(&name.0),
        }
    }
}

impl FromStr for What {
    type Err = UnknownWhat;

    fn from_str(text: &str) -> Result<Self, UnknownWhat> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        let unknown = || UnknownWhat(text.into());
        if text == "parameters" {
            return Ok(Self::Parameters);
        }
        if let Some(vector) = text.strip_prefix("state.") {
            return number(vector).map(Self::State).ok_or_else(unknown);
        }
        if text.is_empty() || !text.chars().all(allowed) {
            return Err(unknown());
        }
        Ok(Self::Other(OtherName(text.into())))
    }
}

/// A text that names nothing a piece can be.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "expected 'parameters', 'state.NUMBER' or a name of letters, digits, '.', '-' and '_', got '{0}'"
)]
pub struct UnknownWhat(String);

/// The name of a piece in a file: `conv1[0..4096].parameters`.
///
/// It can be read from the right, whatever the layer's name is: the last `]` ends the range,
/// because [`What`] has none in its name.
pub(crate) fn key(layer: &str, what: &What, range: &Range<usize>) -> String {
    format!("{layer}[{}..{}].{what}", range.start, range.end)
}

/// Reads a name that [`key`] has made.
pub(crate) fn parse_key(key: &str) -> Option<(&str, What, Range<usize>)> {
    let (before, what) = key.rsplit_once("].")?;
    let (layer, range) = before.rsplit_once('[')?;
    let (start, end) = range.split_once("..")?;
    let range = number(start)?..number(end)?;
    (range.start < range.end).then_some((layer, what.parse().ok()?, range))
}

/// A number in its only spelling: no sign, no leading zeros.
fn number(text: &str) -> Option<usize> {
    let number: usize = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_name_is_one_that_a_person_can_read() {
        assert_eq!(key("conv1", &What::Parameters, &(0..4096)), "conv1[0..4096].parameters");
        assert_eq!(key("a.b", &What::State(1), &(5..7)), "a.b[5..7].state.1");
        let residual = What::other("residual.3").unwrap();
        assert_eq!(key("x", &residual, &(0..1)), "x[0..1].residual.3");
    }

    #[test]
    fn names_that_nobody_has_made_are_refused() {
        for bad in [
            "",
            "conv1",
            "conv1.parameters",
            "conv1[0..4]",
            "conv1[0..4].",
            "conv1[0..4]parameters",
            "conv1[4..4].parameters",
            "conv1[5..4].parameters",
            "conv1[00..4].parameters",
            "conv1[+0..4].parameters",
            "conv1[0..99999999999999999999].parameters",
            "conv1[0..4].state.x",
            "conv1[0..4].state.01",
            "conv1[0..4].a b",
        ] {
            assert_eq!(parse_key(bad), None, "{bad}");
        }
        for taken in ["parameters", "state.1", "state.x", "", "a[b", "ü"] {
            assert_eq!(What::other(taken), None, "{taken}");
        }
    }

    proptest! {
        #[test]
        fn every_name_is_read_as_it_was_written(
            layer in r"[\[\]\.a-z0-9 é]{0,12}",
            what in r"parameters|state\.[1-9][0-9]?|[a-z.\-_]{1,8}",
            start in 0usize..1_000_000,
            len in 1usize..1_000_000,
        ) {
            prop_assume!(!what.starts_with("state.") || what.parse::<What>().is_ok());
            let what: What = what.parse().unwrap();
            let range = start..start + len;
            let name = key(&layer, &what, &range);
            prop_assert_eq!(parse_key(&name), Some((&layer[..], what, range)));
        }

        #[test]
        fn no_name_makes_it_panic(name in r"\PC*|[\[\].0-9a-z]*") {
            if let Some((layer, what, range)) = parse_key(&name) {
                prop_assert_eq!(key(layer, &what, &range), name);
            }
        }
    }
}
