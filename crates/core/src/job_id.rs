use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// One run of a job: 16 random bytes, so that no two runs share it. Zero is a run that is not known
/// yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub [u8; 16]);

/// A text that is not a job's identity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a job's identity has 32 hexadecimal digits, got '{0}'")]
pub struct NotAJobId(String);

impl JobId {
    /// Whether it stands for a run that is not known yet.
    pub fn is_unknown(self) -> bool {
        self == Self::default()
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for JobId {
    type Err = NotAJobId;

    fn from_str(text: &str) -> Result<Self, NotAJobId> {
        let digits = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let number = u128::from_str_radix(text, 16).ok().filter(|_| digits);
        number.map(|n| Self(n.to_be_bytes())).ok_or_else(|| NotAJobId(text.into()))
    }
}

impl Serialize for JobId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for JobId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_written_and_read_as_32_digits() {
        let mut id = JobId::default();
        assert!(id.is_unknown());
        (id.0[0], id.0[15]) = (0x0a, 0xf1);
        assert_eq!(id.to_string(), "0a0000000000000000000000000000f1");
        assert_eq!(id.to_string().parse(), Ok(id));
        assert!(!id.is_unknown());
    }

    #[test]
    fn anything_else_is_not_an_identity() {
        for text in
            ["", "0a", "+a0000000000000000000000000000f1", "zz0000000000000000000000000000f1"]
        {
            assert!(text.parse::<JobId>().unwrap_err().to_string().contains("32 hexadecimal"));
        }
    }
}
