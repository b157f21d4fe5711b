use std::fmt;
use std::io;
use std::str::FromStr;

/// What a node must know to be let into a cluster. Printing it prints nothing.
#[derive(Clone)]
pub struct Secret(String);

/// Which cluster a node belongs to, and the secret that proves it.
#[derive(Clone, Debug)]
pub struct Credentials {
    /// Tells jobs apart that use the same addresses.
    pub cluster: [u8; 16],
    /// Known to every node of the cluster and to nobody else.
    pub secret: Secret,
}

/// An empty string was given for a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the cluster secret is empty: any other string will do")]
pub struct EmptySecret;

impl Secret {
    /// 32 random bytes, as hexadecimal digits.
    pub fn random() -> io::Result<Self> {
        let [high, low] = [random_number()?, random_number()?];
        Ok(Self(format!("{high:032x}{low:032x}")))
    }

    /// The secret itself, to be handed to a process that is to join the cluster. Not for logs.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl FromStr for Secret {
    type Err = EmptySecret;

    fn from_str(s: &str) -> Result<Self, EmptySecret> {
        if s.is_empty() { Err(EmptySecret) } else { Ok(Self(s.to_owned())) }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// 128 bits nobody can guess.
pub fn random_number() -> io::Result<u128> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    Ok(u128::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_does_not_print() {
        let credentials = Credentials { cluster: [0; 16], secret: "swordfish".parse().unwrap() };
        assert!(!format!("{credentials:?}").contains("swordfish"));
        assert_eq!(credentials.secret.expose(), "swordfish");
    }

    #[test]
    fn random_secrets_are_long_and_differ() {
        let [a, b] = [Secret::random().unwrap(), Secret::random().unwrap()];
        assert_eq!(a.expose().len(), 64);
        assert!(a.expose().chars().all(|c| c.is_ascii_hexdigit()));
        assert_ne!(a.expose(), b.expose());
    }

    #[test]
    fn an_empty_secret_is_refused() {
        assert_eq!("".parse::<Secret>().unwrap_err(), EmptySecret);
    }
}
