use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The id as an index into a table.
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// A process of the cluster. Workers come first: a worker's node id is its rank.
    NodeId(u16)
}
id! {
    /// A layer's position in the forward order.
    LayerId(u32)
}
id! {
    /// One thread of a node, connected to the same lane of every other node.
    LaneId(u16)
}
id! {
    /// The iteration number of a layer. 0 is the initial value; the first step is 1.
    Clock(u64)
}

id! {
    /// One session or group of a job, told apart from the others on the links they share.
    ChannelId(u32)
}
id! {
    /// Which arrangement of the job a message belongs to. Grows when the plan is replaced.
    Epoch(u32)
}

impl ChannelId {
    /// The link itself: heartbeats, and the last words of a node.
    pub const LINK: Self = Self(0);
    /// The session a job begins with.
    pub const FIRST: Self = Self(1);
}

impl Epoch {
    /// The arrangement a job begins with.
    pub const FIRST: Self = Self(1);

    /// The epoch after this one.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl Clock {
    /// The clock after this one.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// Tells a job from every other one, now and later: 16 random bytes, as text 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct JobId([u8; 16]);

impl JobId {
    /// The identity that `bytes` are. They must be random: nothing else makes it unique.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes it is.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JobId({self})")
    }
}

impl FromStr for JobId {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let is_hex = s.len() == 32 && s.bytes().all(|b| b.is_ascii_hexdigit());
        let number = if is_hex { u128::from_str_radix(s, 16).ok() } else { None };
        let number = number
            .ok_or_else(|| format!("a job's identity is 32 hexadecimal digits, got '{s}'"))?;
        Ok(Self(number.to_be_bytes()))
    }
}

impl From<JobId> for String {
    fn from(id: JobId) -> Self {
        id.to_string()
    }
}

impl TryFrom<String> for JobId {
    type Error = String;

    fn try_from(s: String) -> Result<Self, String> {
        s.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_32_digits_either_way() {
        let id = JobId::from_bytes(std::array::from_fn(|i| 16 * i as u8 + 1));
        assert_eq!(id.to_string(), "01112131415161718191a1b1c1d1e1f1");
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(serde_json::to_string(&id).unwrap(), format!("\"{id}\""));
        for wrong in
            ["0111", "", "+1112131415161718191a1b1c1d1e1f1", "g1112131415161718191a1b1c1d1e1f1"]
        {
            let error = wrong.parse::<JobId>().unwrap_err();
            assert!(error.contains("32 hexadecimal digits"), "{error}");
        }
    }
}
