use super::*;
use poseidon_core::wire::Purpose;
use poseidon_core::{Epoch, JobId, LaneId, NodeId};
use proptest::prelude::*;

/// Reads a script, keeps what is written.
struct Scripted<'a> {
    input: &'a [u8],
    output: Vec<u8>,
}

impl<'a> Scripted<'a> {
    fn new(input: &'a [u8]) -> Self {
        Self { input, output: Vec::new() }
    }
}

impl Read for Scripted<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.input.read(buf)
    }
}

impl Write for Scripted<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.output.write(buf)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

const SECRET: &str = "of at least 16 bytes";

fn credentials() -> Credentials {
    Credentials { cluster: [9; 16], secret: SECRET.parse().unwrap(), encrypt: false }
}

fn hello() -> Hello {
    Hello {
        purpose: Purpose::Lane,
        node: NodeId(1),
        lane: LaneId(2),
        encrypt: false,
        cluster: [9; 16],
        identity: JobId([4; 16]),
        epoch: Epoch(1),
        nonce: [7; 32],
    }
}

/// HMAC-SHA256 written out from RFC 2104, so that the proofs are checked against the
/// specification and not against the code that makes them.
fn rfc2104(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    use sha2::Digest;
    let pad = |x: u8| {
        let mut block = [x; 64];
        block.iter_mut().zip(key).for_each(|(b, k)| *b ^= k);
        block
    };
    let mut inner = Sha256::new_with_prefix(pad(0x36));
    parts.iter().for_each(|part| inner.update(part));
    Sha256::new_with_prefix(pad(0x5c)).chain_update(inner.finalize()).finalize().into()
}

#[test]
fn proofs_and_keys_are_what_the_specification_says() {
    let challenge = Challenge { status: Status::Welcome, version: VERSION, nonce: [3; 32] };
    let hello = hello();
    let token = rfc2104(SECRET.as_bytes(), &[b"poseidon hello", &hello.encode()]);
    let covered = [&hello.encode()[..], &token, &challenge.encode()].concat();
    let listener = rfc2104(SECRET.as_bytes(), &[b"poseidon listener", &covered, &[0; 8]]);
    let verdict = Verdict { status: Status::Welcome, proof: listener };
    let script = [&challenge.encode()[..], &verdict.encode()].concat();
    let mut stream = Scripted::new(&script);
    let mut tags = tags(call(&mut stream, &hello, None, &credentials().secret).unwrap());
    let caller = rfc2104(SECRET.as_bytes(), &[b"poseidon caller", &covered]);
    assert_eq!(stream.output, [&hello.encode()[..], &token, &caller].concat());
    let keys = rfc2104(SECRET.as_bytes(), &[b"poseidon keys", &covered]);
    let (ours, theirs) = (keys[..16].try_into().unwrap(), keys[16..].try_into().unwrap());
    let mut expected = Tags::new(ours, theirs);
    assert_eq!(tags.sealer.seal(b"frame"), expected.sealer.seal(b"frame"));
    let tag = Tags::new(theirs, ours).sealer.seal(b"frame");
    assert_eq!(tags.opener.open(b"frame", &tag), Ok(()));
}

fn tags(protection: Protection) -> Tags {
    match protection {
        Protection::Tags(tags) => tags,
        Protection::Records(_) => panic!("nobody asked for encryption"),
    }
}

/// What one end tags, the other takes.
#[test]
fn both_ends_have_the_same_keys() {
    let (ours, theirs) = shake_hands(Ok(())).unwrap();
    let (mut ours, mut theirs) = (tags(ours), tags(theirs));
    let tag = ours.sealer.seal(b"from the caller");
    assert_eq!(theirs.opener.open(b"from the caller", &tag), Ok(()));
    let tag = theirs.sealer.seal(b"from the listener");
    assert_eq!(ours.opener.open(b"from the listener", &tag), Ok(()));
}

/// Both sides over a pipe.
fn shake_hands(judged: Result<(), Status>) -> Result<(Protection, Protection), HandshakeError> {
    let (called, answered) = meet([false, false], judged, |opening| opening);
    called.map(|ours| (ours, answered.unwrap().1))
}

/// Both sides over pipes, of which the caller encrypts, the listener does, or both do. Somebody in
/// between may change what the caller says first.
fn meet(
    [caller, listener]: [bool; 2],
    judged: Result<(), Status>,
    change: impl FnOnce(Vec<u8>) -> Vec<u8>,
) -> (Result<Protection, HandshakeError>, Result<(Hello, Protection), HandshakeError>) {
    use std::os::unix::net::UnixStream;
    let [(mut near, mut between), (mut beyond, mut far)] =
        [UnixStream::pair().unwrap(), UnixStream::pair().unwrap()];
    let credentials = |encrypt| Credentials { encrypt, ..credentials() };
    let answering =
        std::thread::spawn(move || answer(&mut far, &credentials(listener), |_| judged));
    let calling = std::thread::spawn(move || {
        let (private, nonce) = Private::draw().unwrap();
        let hello = Hello { encrypt: caller, nonce, ..hello() };
        call(&mut near, &hello, caller.then_some(&private), &credentials(caller).secret)
    });
    let mut opening = vec![0; Hello::SIZE + TOKEN_SIZE];
    between.read_exact(&mut opening).unwrap();
    beyond.write_all(&change(opening)).unwrap();
    let (mut from_near, mut to_far) = (between.try_clone().unwrap(), beyond.try_clone().unwrap());
    let up = std::thread::spawn(move || io::copy(&mut from_near, &mut to_far).map(drop));
    let _ = io::copy(&mut beyond, &mut between);
    let _ = between.shutdown(std::net::Shutdown::Both);
    let called = calling.join().unwrap();
    let _ = up.join().unwrap();
    (called, answering.join().unwrap())
}

fn records(protection: Protection) -> Records {
    match protection {
        Protection::Records(records) => *records,
        Protection::Tags(_) => panic!("it is not encrypted"),
    }
}

/// What `writer` encrypts, `reader` decrypts.
fn passes(writer: &mut Records, reader: &mut Records) -> bool {
    let mut wire = Vec::new();
    let write = |held: &[u8]| {
        wire.extend_from_slice(held);
        Ok(held.len())
    };
    assert_eq!(writer.writer.write_with(b"frame", write).unwrap(), 5);
    let mut wire = &wire[..];
    let mut plain = [0; 8];
    let read = reader.reader.read_with(&mut plain, |room| wire.read(room));
    read.is_ok_and(|count| &plain[..count] == b"frame")
}

#[test]
fn ends_that_encrypt_have_the_same_keys_and_no_two_connections_do() {
    let connect = || {
        let (called, answered) = meet([true, true], Ok(()), |opening| opening);
        (records(called.unwrap()), records(answered.unwrap().1))
    };
    let ((mut near, mut far), (mut other, _)) = (connect(), connect());
    assert!(passes(&mut near, &mut far));
    assert!(passes(&mut far, &mut near));
    assert!(!passes(&mut other, &mut far));
}

/// Written out from the specification, with X25519's own function.
#[test]
fn the_keys_of_an_encrypted_connection_are_what_the_specification_says() {
    let (private, nonce) = Private::draw().unwrap();
    let listener_private = [9; 32];
    let public = x25519_dalek::x25519(listener_private, x25519_dalek::X25519_BASEPOINT_BYTES);
    let challenge = Challenge { status: Status::Welcome, version: VERSION, nonce: public };
    let hello = Hello { encrypt: true, nonce, ..hello() };
    let token = rfc2104(SECRET.as_bytes(), &[b"poseidon hello", &hello.encode()]);
    let covered = [&hello.encode()[..], &token, &challenge.encode()].concat();
    let proof = rfc2104(SECRET.as_bytes(), &[b"poseidon listener", &covered, &[0; 8]]);
    let verdict = Verdict { status: Status::Welcome, proof };
    let script = [&challenge.encode()[..], &verdict.encode()].concat();
    let called =
        call(&mut Scripted::new(&script), &hello, Some(&private), &credentials().secret).unwrap();
    let shared = x25519_dalek::x25519(listener_private, nonce);
    let keys = rfc2104(SECRET.as_bytes(), &[b"poseidon encryption", &covered, &shared]);
    let (ours, theirs) = (keys[..16].try_into().unwrap(), keys[16..].try_into().unwrap());
    let (mut near, mut far) = (records(called), Records::new(theirs, ours));
    assert!(passes(&mut near, &mut far) && passes(&mut far, &mut near));
}

/// Both sides say the same, and what it is about.
#[test]
fn ends_of_which_one_encrypts_refuse_each_other() {
    for (ends, status) in [([false, true], Status::Plain), ([true, false], Status::Encrypted)] {
        let (called, answered) = meet(ends, Ok(()), |opening| opening);
        for error in [called.unwrap_err(), answered.unwrap_err()] {
            assert!(matches!(error, HandshakeError::Refused(said) if said == status), "{error}");
            assert!(error.to_string().contains("POSEIDON_ENCRYPT=1"), "{error}");
        }
    }
}

/// Somebody in between who takes the wish for encryption away, or adds it, gets nobody to agree.
#[test]
fn nobody_in_between_can_take_encryption_away() {
    for ends in [[true, true], [true, false], [false, true]] {
        let (called, answered) = meet(ends, Ok(()), |mut opening| {
            opening[11] ^= 1;
            opening
        });
        let error = answered.unwrap_err();
        assert!(matches!(error, HandshakeError::Refused(Status::Secret)), "{error}");
        assert!(called.is_err());
    }
}

#[test]
fn a_refusal_is_proved_to_those_who_know_the_secret() {
    for status in [Status::Node, Status::Lane, Status::Run, Status::NoBook] {
        let error = shake_hands(Err(status)).err().unwrap();
        assert!(matches!(error, HandshakeError::Refused(said) if said == status), "{error}");
    }
    // A hello of another cluster whose nodes have the same secret.
    let (mut near, mut far) = std::os::unix::net::UnixStream::pair().unwrap();
    let listener = std::thread::spawn(move || answer(&mut far, &credentials(), |_| Ok(())));
    let other = Hello { cluster: [1; 16], ..hello() };
    let error = call(&mut near, &other, None, &credentials().secret).unwrap_err();
    assert!(matches!(error, HandshakeError::Refused(Status::Cluster)), "{error}");
    listener.join().unwrap().unwrap_err();
}

/// Somebody in between, or at the address, can say no, but not in the cluster's name.
#[test]
fn a_strangers_refusal_is_told_apart() {
    for status in [Status::Secret, Status::Node, Status::Run] {
        let refusal = Challenge { status, version: VERSION, nonce: [5; 32] }.encode();
        let error = call(&mut Scripted::new(&refusal), &hello(), None, &credentials().secret);
        let error = error.unwrap_err();
        assert!(matches!(error, HandshakeError::Unproved(said) if said == status), "{error}");
        let welcome = Challenge { status: Status::Welcome, version: VERSION, nonce: [5; 32] };
        let verdict = Verdict { status, proof: [6; 32] };
        let script = [&welcome.encode()[..], &verdict.encode()].concat();
        let error = call(&mut Scripted::new(&script), &hello(), None, &credentials().secret);
        let error = error.unwrap_err();
        assert!(matches!(error, HandshakeError::Unproved(said) if said == status), "{error}");
        assert!(error.to_string().contains("does not prove"), "{error}");
    }
}

/// A proof that a refusal had is not one for another refusal.
#[test]
fn a_refusal_cannot_be_made_another_one() {
    let mut reception = Reception::default();
    let other = open(&Hello { cluster: [1; 16], ..hello() }, &credentials().secret);
    let mut bytes = &other[..];
    let refusal = loop {
        let count = bytes.read(reception.room()).unwrap();
        if let Heard::Refused(refusal, _) = reception.handle_read(count, &credentials()).unwrap() {
            break refusal;
        }
    };
    let mut changed: [u8; Challenge::SIZE] = refusal[..].try_into().unwrap();
    changed[10] = Status::Secret as u8;
    let other = Hello { cluster: [1; 16], ..hello() };
    for (script, proved) in [(&refusal[..], true), (&changed[..], false)] {
        let error = call(&mut Scripted::new(script), &other, None, &credentials().secret);
        let error = error.unwrap_err();
        assert_eq!(matches!(error, HandshakeError::Refused(_)), proved, "{error}");
    }
}

#[test]
fn a_caller_is_challenged_afresh_each_time() {
    let mut nonces = [[0; 32]; 2];
    for nonce in &mut nonces {
        let script = open(&hello(), &credentials().secret);
        let mut stream = Scripted::new(&script);
        receive(&mut stream).unwrap_err();
        *nonce = Challenge::decode(stream.output[..].try_into().unwrap()).unwrap().nonce;
    }
    assert_ne!(nonces[0], nonces[1]);
    assert_ne!(nonces[0], [0; 32]);
}

#[test]
fn a_stranger_is_not_waited_for() {
    let mut stream = Scripted::new(b"GET / HTTP/1.1\r\n");
    let error = receive(&mut stream).unwrap_err();
    assert!(matches!(error, HandshakeError::Refused(Status::Garbage)), "{error}");
    let answer = Challenge::decode(stream.output[..].try_into().unwrap()).unwrap();
    assert_eq!((answer.status, answer.nonce), (Status::Garbage, [0; 32]));

    let mut stream = Scripted::new(b"HTTP/1.1 400 Bad Request");
    let error = call(&mut stream, &hello(), None, &credentials().secret).unwrap_err();
    assert!(matches!(error, HandshakeError::NotPoseidon), "{error}");
}

#[test]
fn a_listener_of_another_version_says_which() {
    let challenge = Challenge { status: Status::Version, version: VERSION + 1, nonce: [0; 32] };
    let script = challenge.encode();
    let error =
        call(&mut Scripted::new(&script), &hello(), None, &credentials().secret).unwrap_err();
    assert!(
        matches!(error, HandshakeError::Version { theirs } if theirs == VERSION + 1),
        "{error}"
    );
}

#[test]
fn a_caller_of_another_version_is_told_ours_and_the_log_names_both() {
    // As long as version 4's was: nothing but its beginning is awaited.
    let mut script = hello().encode()[..64].to_vec();
    script[8..10].copy_from_slice(&4u16.to_le_bytes());
    let mut stream = Scripted::new(&script);
    let error = receive(&mut stream).unwrap_err().to_string();
    assert!(error.contains("version 4") && error.contains(&format!("speaks {VERSION}")), "{error}");
    let answer = Challenge::decode(stream.output[..].try_into().unwrap()).unwrap();
    assert_eq!((answer.status, answer.version), (Status::Version, VERSION));
}

#[test]
fn a_cut_message_says_how_much_came() {
    let script = hello().encode();
    let error = receive(&mut Scripted::new(&script[..20])).unwrap_err();
    let words = "the connection ended after 20 of the 120 bytes of its Hello";
    assert_eq!(error.to_string(), words);
}

/// The listener's side of a handshake with a stranger.
fn receive(stream: &mut Scripted<'_>) -> Result<(Hello, Protection), HandshakeError> {
    let admit = |_: &Hello| -> Result<(), Status> { panic!("asked about a stranger") };
    answer(stream, &credentials(), admit)
}

/// It gets no challenge: its hello is the last thing that is read of it.
#[test]
fn one_that_does_not_know_the_secret_gets_no_further_than_its_hello() {
    let wrong = "another of 16 bytes".parse().unwrap();
    let script = open(&hello(), &wrong);
    let mut stream = Scripted::new(&script);
    let error = receive(&mut stream).unwrap_err();
    assert!(matches!(error, HandshakeError::Refused(Status::Secret)), "{error}");
    let refusal = Challenge::decode(stream.output[..].try_into().unwrap()).unwrap();
    assert_eq!((refusal.status, refusal.nonce), (Status::Secret, [0; 32]));
}

/// Somebody who repeats a hello that it has overheard.
#[test]
fn a_repeated_hello_gets_nobody_in() {
    let script = [&open(&hello(), &credentials().secret)[..], &[0; PROOF_SIZE]].concat();
    let mut stream = Scripted::new(&script);
    let error = receive(&mut stream).unwrap_err();
    assert!(matches!(error, HandshakeError::Refused(Status::Secret)), "{error}");
    let verdict = Verdict::decode(stream.output[Challenge::SIZE..].try_into().unwrap());
    assert_eq!(verdict, Verdict { status: Status::Secret, proof: [0; 32] });
}

proptest! {
    #[test]
    fn no_bytes_get_a_stranger_in(start in 0usize..=120, bytes: Vec<u8>) {
        let opening = open(&hello(), &credentials().secret);
        let script = [&opening[..start], &bytes].concat();
        prop_assert!(receive(&mut Scripted::new(&script)).is_err());
    }

    #[test]
    fn no_bytes_pass_for_a_listener(start in 0usize..=48, bytes: Vec<u8>) {
        let welcome = Challenge { status: Status::Welcome, version: VERSION, nonce: [1; 32] };
        let script = [&welcome.encode()[..start], &bytes].concat();
        prop_assert!(
            call(&mut Scripted::new(&script), &hello(), None, &credentials().secret).is_err()
        );
    }
}
