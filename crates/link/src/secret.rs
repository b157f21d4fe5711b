use std::fmt;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// What a node must know to be let into a cluster. Printing it prints nothing.
#[derive(Clone)]
pub struct Secret(String);

/// Which cluster a node belongs to, and the secret that proves it.
#[derive(Clone, Debug)]
pub struct Credentials {
    /// Tells apart jobs that use the same addresses.
    pub cluster: [u8; 16],
    /// Known to every node of the cluster and to nobody else.
    pub secret: Secret,
    /// Whether connections between hosts are encrypted. Both ends must say the same.
    pub encrypt: bool,
}

/// A text that is too short to be a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the secret has {length} bytes, and must have at least {SHORTEST}: an impostor could guess a \
     short one (docs/security.md); `openssl rand -hex 32` makes a good one"
)]
pub struct ShortSecret {
    /// Bytes it has.
    pub length: usize,
}

/// Why there is no secret in a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecretFileError {
    /// The system does not give the file, or would not make it.
    #[error("{path}: {why}")]
    Io {
        /// The file, or the folder it is to be in.
        path: PathBuf,
        /// What the system said.
        why: io::Error,
    },
    /// Somebody else may know what is in the file.
    #[error(
        "others can read or write {path} (its mode is {mode:03o}): run `chmod 600 {path}`; make a \
         new secret if others may have seen this one"
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// What is in the file is no secret.
    #[error("{path}: {why}")]
    Short {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: ShortSecret,
    },
    /// The file is too long, or is no text.
    #[error("{path} holds no secret: expected one line of text, at most {LONGEST} bytes")]
    NoText {
        /// The file.
        path: PathBuf,
    },
}

/// Bytes of the shortest secret. Whoever answers a node's call gets a proof made with the secret, and
/// can try guesses on it in peace. 16 random bytes are out of reach for that.
const SHORTEST: usize = 16;

/// Bytes of the longest secret that a file may hold.
const LONGEST: usize = 4096;

impl Secret {
    /// 32 random bytes, as hexadecimal digits.
    pub fn random() -> io::Result<Self> {
        let [high, low] = [random_number()?, random_number()?];
        Ok(Self(format!("{high:032x}{low:032x}")))
    }

    /// The secret in the file `path`, which must be nobody else's to read.
    pub fn read(path: &Path) -> Result<Self, SecretFileError> {
        let error = |why| SecretFileError::Io { path: path.into(), why };
        let file = fs::File::open(path).map_err(error)?;
        let mode = file.metadata().map_err(error)?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(SecretFileError::Exposed { path: path.into(), mode });
        }
        let mut bytes = Vec::new();
        file.take(LONGEST as u64 + 1).read_to_end(&mut bytes).map_err(error)?;
        let text = String::from_utf8(bytes).ok().filter(|text| text.len() <= LONGEST);
        let text = text.ok_or_else(|| SecretFileError::NoText { path: path.into() })?;
        text.trim().parse().map_err(|why| SecretFileError::Short { path: path.into(), why })
    }

    /// The secret in the file `path`. If there is no such file, one is made that only this user can
    /// read, in a folder that only this user can enter.
    ///
    /// Several processes may get here at once, also in containers that share a home and count
    /// processes alike. Each writes a file of its own; the first to link it into place wins, and all
    /// read that one.
    pub fn read_or_make(path: &Path) -> Result<Self, SecretFileError> {
        match Self::read(path) {
            Err(SecretFileError::Io { why, .. }) if why.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        let folder = path.parent().unwrap_or(Path::new("."));
        let in_folder = |why| SecretFileError::Io { path: folder.into(), why };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(in_folder)?;
        let fresh = folder.join(format!(".secret.{:032x}", random_number().map_err(in_folder)?));
        let made = Self::write_new(&fresh).and_then(|()| fs::hard_link(&fresh, path));
        let removed = fs::remove_file(&fresh);
        match made {
            Err(why) if why.kind() != io::ErrorKind::AlreadyExists => {
                return Err(SecretFileError::Io { path: path.into(), why });
            }
            _ => removed.map_err(in_folder)?,
        }
        Self::read(path)
    }

    /// A fresh secret in a new file.
    fn write_new(path: &Path) -> io::Result<()> {
        let mut file =
            fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        file.write_all(Self::random()?.0.as_bytes())?;
        file.sync_all()
    }

    /// The secret itself, to be handed to a process that is to join the cluster. Not for logs.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl FromStr for Secret {
    type Err = ShortSecret;

    fn from_str(s: &str) -> Result<Self, ShortSecret> {
        if s.len() < SHORTEST {
            return Err(ShortSecret { length: s.len() });
        }
        Ok(Self(s.to_owned()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// 16 bytes nobody can guess.
pub fn random_bytes() -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

/// 128 bits nobody can guess.
pub(crate) fn random_number() -> io::Result<u128> {
    random_bytes().map(u128::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_does_not_print() {
        let secret = "known to all of us".parse().unwrap();
        let credentials = Credentials { cluster: [0; 16], secret, encrypt: false };
        assert!(!format!("{credentials:?}").contains("known"));
        assert_eq!(credentials.secret.expose(), "known to all of us");
    }

    #[test]
    fn random_secrets_are_long_and_differ() {
        let [a, b] = [Secret::random().unwrap(), Secret::random().unwrap()];
        assert_eq!(a.expose().len(), 64);
        assert!(a.expose().chars().all(|c| c.is_ascii_hexdigit()));
        assert_ne!(a.expose(), b.expose());
    }

    #[test]
    fn a_short_secret_is_refused() {
        for short in ["", "swordfish", "123456789012345"] {
            let error = short.parse::<Secret>().unwrap_err();
            assert_eq!(error, ShortSecret { length: short.len() });
            assert!(error.to_string().contains("at least 16"), "{error}");
        }
        assert!("1234567890123456".parse::<Secret>().is_ok());
    }

    #[test]
    fn a_file_is_made_once_and_is_nobody_elses() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("config/poseidon/secret");
        let made = Secret::read_or_make(&path).unwrap();
        assert_eq!(made.expose().len(), 64);
        assert_eq!(Secret::read_or_make(&path).unwrap().expose(), made.expose());
        assert_eq!(Secret::read(&path).unwrap().expose(), made.expose());
        let folder = path.parent().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(folder)), (0o600, 0o700));
        let files: Vec<_> = fs::read_dir(folder).unwrap().map(|f| f.unwrap().file_name()).collect();
        assert_eq!(files, ["secret"], "attempts at a secret are left over");
    }

    /// Threads of one process have one process id, as processes of two containers may have.
    #[test]
    fn all_who_make_a_file_at_once_have_one_secret() {
        for _ in 0..20 {
            let home = tempfile::tempdir().unwrap();
            let path = home.path().join("poseidon/secret");
            let start = std::sync::Barrier::new(8);
            let secrets: Vec<String> = std::thread::scope(|scope| {
                let make = || {
                    start.wait();
                    Secret::read_or_make(&path).unwrap().expose().to_owned()
                };
                let threads: Vec<_> = (0..8).map(|_| scope.spawn(make)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert!(secrets.iter().all(|secret| *secret == secrets[0]));
        }
    }

    #[test]
    fn a_file_that_others_can_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        fs::write(&path, "known to all of us\n").unwrap();
        for mode in [0o644, 0o640, 0o604, 0o620] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            for read in [Secret::read, Secret::read_or_make] {
                let error = read(&path).unwrap_err().to_string();
                let fix = format!("chmod 600 {}", path.display());
                assert!(error.contains(&fix) && error.contains(&format!("{mode:o}")), "{error}");
            }
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        assert_eq!(Secret::read(&path).unwrap().expose(), "known to all of us");
    }

    #[test]
    fn a_file_that_holds_no_secret_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let words = |content: &[u8]| {
            let _ = fs::remove_file(&path);
            let mut options = fs::OpenOptions::new();
            options.write(true).create_new(true).mode(0o600);
            options.open(&path).unwrap().write_all(content).unwrap();
            Secret::read(&path).unwrap_err().to_string()
        };
        for (content, why) in
            [(&b"short\n"[..], "has 5 bytes"), (&[0xFF; 32], "text"), (&[b'x'; 5000], "4096")]
        {
            let error = words(content);
            assert!(error.contains(why) && error.contains("secret"), "{error}");
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
    }
}
