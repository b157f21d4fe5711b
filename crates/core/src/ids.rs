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

impl Clock {
    /// The clock after this one.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// Which edition of a job's book holds: the first one's number is 1, and it grows by one whenever the
/// book is replaced. Whatever follows from a book, such as a plan, is of its epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "u32", try_from = "u32")]
pub struct Epoch(u32);

impl Epoch {
    /// The epoch of a job's first book.
    pub const FIRST: Self = Self(1);

    /// The epoch of this number. `None` for 0, which no epoch has.
    pub fn new(number: u32) -> Option<Self> {
        (number > 0).then_some(Self(number))
    }

    /// Its number.
    pub fn get(self) -> u32 {
        self.0
    }

    /// The epoch after this one.
    pub fn next(self) -> Self {
        // Every epoch takes a conversation with all nodes: at 1 ms each, this is 49 days of nothing else.
        Self(self.0.checked_add(1).expect("a job has fewer than 2^32 epochs"))
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<Epoch> for u32 {
    fn from(epoch: Epoch) -> Self {
        epoch.0
    }
}

impl TryFrom<u32> for Epoch {
    type Error = &'static str;

    fn try_from(number: u32) -> Result<Self, Self::Error> {
        Self::new(number).ok_or("epoch 0: the first one is 1")
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
    fn epochs_begin_with_1_and_grow() {
        assert_eq!(Epoch::FIRST.get(), 1);
        assert_eq!(Epoch::FIRST.next(), Epoch::new(2).unwrap());
        assert_eq!(Epoch::new(0), None);
        assert_eq!(serde_json::to_string(&Epoch::FIRST).unwrap(), "1");
        let error = serde_json::from_str::<Epoch>("0").unwrap_err().to_string();
        assert!(error.contains("epoch 0"), "{error}");
    }

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
