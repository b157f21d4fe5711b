//! Byte counts as people write them.

use std::fmt;
use std::str::FromStr;

/// A number of bytes. `KB`, `MB` and `GB` are powers of 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size(pub(crate) u64);

impl Size {
    /// So many KB.
    pub(crate) const fn kb(count: u64) -> Self {
        Self(count << 10)
    }

    /// So many MB.
    pub(crate) const fn mb(count: u64) -> Self {
        Self(count << 20)
    }
}

const UNITS: [(&str, u64); 3] = [("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)];

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let upper = text.to_ascii_uppercase();
        let without = |(name, factor): &(&str, u64)| Some((upper.strip_suffix(name)?, *factor));
        let (digits, factor) = UNITS.iter().find_map(without).unwrap_or((&upper, 1));
        let count: u64 = digits
            .parse()
            .map_err(|_| format!("`{text}` is not a size such as 64KB, 100MB or 4096"))?;
        match count.checked_mul(factor) {
            Some(bytes) if bytes > 0 && bytes.is_multiple_of(4) => Ok(Self(bytes)),
            _ => Err(format!("`{text}` is not a positive multiple of 4 bytes")),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit =
            UNITS.iter().find(|(_, factor)| self.0 >= *factor && self.0.is_multiple_of(*factor));
        match unit {
            Some((name, factor)) => write!(f, "{}{name}", self.0 / factor),
            None => write!(f, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written_alike() {
        for (text, bytes) in [("64KB", 65536), ("100MB", 104_857_600), ("4", 4), ("1GB", 1 << 30)] {
            assert_eq!(text.parse(), Ok(Size(bytes)));
            assert_eq!(Size(bytes).to_string(), text);
            assert_eq!(text.to_lowercase().parse(), Ok(Size(bytes)));
        }
        assert_eq!("1024KB".parse::<Size>().unwrap().to_string(), "1MB");
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in ["", "MB", "-4", "1.5MB", "64 KB", "3", "0", "99999999999999GB"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }
}
