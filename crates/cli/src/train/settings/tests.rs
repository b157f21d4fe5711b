use super::*;
use std::io::Write;

fn saved() -> Settings {
    let (checkpoint, keep_for) = (Some("/a/b".into()), Some("36h".parse().unwrap()));
    Settings { checkpoint, keep_for, every: Some(5), keep: Some(3), ..Settings::default() }
}

#[test]
fn what_is_printed_can_be_read_back() {
    let (chunk, placement) = (ChunkSize::at_most(2 << 20), Placement::PerTensor);
    let settings = Settings { steps: Some(7), lanes: Some(2), chunk, placement, ..saved() };
    let text = settings.to_toml().unwrap();
    let read: Settings = toml::from_str(&text).unwrap();
    assert_eq!(format!("{read:?}"), format!("{settings:?}"), "{text}");
    assert!(text.contains("chunk = \"2m\"\nplacement = \"per-tensor\""), "{text}");
}

#[test]
fn flags_win_over_the_file() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"batch = 7\nlr = 0.5\nsteps = 3\n").unwrap();
    let config = Some(file.path().to_owned());
    let flags = Flags { config, lr: Some(0.25), epochs: Some(2), ..Flags::default() };
    let settings = Settings::from_flags(&flags).unwrap();
    assert_eq!((settings.batch, settings.lr), (7, 0.25));
    assert_eq!((settings.epochs, settings.steps), (2, None));
    assert_eq!(settings.workers, 4);
}

#[test]
fn nonsense_is_named() {
    let says = |flags: Flags, words: &str| {
        let error = format!("{:#}", Settings::from_flags(&flags).unwrap_err());
        assert!(error.contains(words), "'{words}' is not in: {error}");
    };
    says(Flags { lr: Some(-1.0), ..Flags::default() }, "learning rate -1");
    says(Flags { optimizer: Some("mean".parse().unwrap()), ..Flags::default() }, "updates nothing");
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"batch = 32\nbathc = 7\n").unwrap();
    says(Flags { config: Some(file.path().to_owned()), ..Flags::default() }, "bathc");
    for (line, words) in [("chunk = \"3\"", "from 1024 to"), ("placement = \"even\"", "per-tensor")]
    {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(line.as_bytes()).unwrap();
        says(Flags { config: Some(file.path().to_owned()), ..Flags::default() }, words);
    }
    let unknown = Settings { model: "resnet-9000".into(), ..Settings::default() };
    let error = unknown.model().unwrap_err().to_string();
    assert!(error.contains("resnet-9000") && error.contains("cifar10-quick"), "{error}");
    assert!(!error.contains("did you mean"), "{error}");
    let mistyped = Settings { model: "lenett".into(), ..Settings::default() };
    let error = mistyped.model().unwrap_err().to_string();
    assert!(error.contains("no model 'lenett' (did you mean 'lenet'?)"), "{error}");
    let mismatch = Settings { model: "cifar10-quick".into(), ..Settings::default() };
    let error = mismatch.check().unwrap_err().to_string();
    assert!(error.contains("3x32x32") && error.contains("1x28x28"), "{error}");
}
