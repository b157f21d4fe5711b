//! Numbers of bytes, as people write them.

use std::str::FromStr;

/// So many bytes: `4096`, `256k`, `500 MiB`, `4GB`. Units are powers of 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub usize);

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("expected a number of bytes such as 262144, 256k, 500MiB or 4GB, got '{text}'")
        };
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let unit = text[digits.len()..].trim().to_ascii_lowercase();
        let shift = match unit.as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(wrong()),
        };
        let number: usize = digits.parse().map_err(|_| wrong())?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("17b", 17),
            ("256k", 256 << 10),
            ("2MB", 2 << 20),
            ("500 MiB", 500 << 20),
            ("4G", 4 << 30),
            ("4GB", 4 << 30),
            ("4GiB", 4 << 30),
            ("1t", 1 << 40),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for nonsense in ["", "GiB", "4 Gigs", "-1", "1.5G", "99999999999999GiB"] {
            let words = nonsense.parse::<ByteSize>().unwrap_err();
            assert!(words.contains(&format!("got '{nonsense}'")), "{words}");
        }
    }
}
