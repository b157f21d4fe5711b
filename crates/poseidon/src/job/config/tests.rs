use super::*;

fn config(variables: &[(&str, &str)]) -> Result<Config, Error> {
    let find = |name: &str| {
        let known = variables.iter().chain([&("POSEIDON_SECRET", "known to all of us")]);
        known.rev().find(|(n, _)| *n == name).map(|(_, v)| v.to_string())
    };
    Config::from_variables(&find)
}

#[test]
fn deadlines_are_times_that_come() {
    let timeout = |value| config(&[("POSEIDON_TIMEOUT", value)]);
    assert_eq!(timeout("2.5").unwrap().timeout, Duration::from_millis(2500));
    assert_eq!(timeout("").unwrap().timeout, Duration::from_secs(300));
    for value in ["0", "-1", "nan", "inf", "1e300"] {
        let error = timeout(value).unwrap_err().to_string();
        assert!(error.contains("POSEIDON_TIMEOUT") && error.contains("a year"), "{error}");
    }
}

#[test]
fn a_bare_program_is_a_job_of_one() {
    let c = config(&[]).unwrap();
    assert_eq!((c.member, c.workers, c.serves_coordinator), (Member::Worker(0), 1, true));
    assert_eq!(c.pinned_memory, None);
    let address = |text| config(&[("POSEIDON_ADDRESS", text)]).unwrap().address;
    assert_eq!((address(""), address("eth1")), (None, Some("eth1".into())));
    let limited = config(&[("POSEIDON_PINNED_MEMORY", "4G")]).unwrap();
    assert_eq!(limited.pinned_memory, Some(4 << 30));
}

#[test]
fn torchrun_is_understood_and_its_port_left_alone() {
    let env =
        [("RANK", "3"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "node7"), ("MASTER_PORT", "29500")];
    let c = config(&env).unwrap();
    assert_eq!((c.member, c.workers), (Member::Worker(3), 4));
    assert_eq!(c.coordinator, "node7:29501");
    assert!(!c.serves_coordinator);
}

#[test]
fn open_mpi_is_understood() {
    let mut env = vec![
        ("OMPI_COMM_WORLD_RANK", "0"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ("PMIX_NAMESPACE", "123"),
    ];
    let local = config(&env).unwrap();
    assert!(local.coordinator.starts_with("127.0.0.1:2"), "{}", local.coordinator);
    env[2].1 = "2";
    let lost = config(&env).unwrap_err().to_string();
    assert!(lost.contains("MASTER_ADDR"), "{lost}");
    env.push(("OMPI_MCA_orte_hnp_uri", "99.0;tcp://192.0.2.7,192.0.2.8:41000"));
    let remote = config(&env).unwrap();
    assert!(remote.coordinator.starts_with("192.0.2.7:2"), "{}", remote.coordinator);
}

#[test]
fn slurm_is_understood() {
    let env = [
        ("SLURM_PROCID", "5"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_STEP_NUM_NODES", "4"),
        ("SLURM_JOB_ID", "77"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NODELIST", "gpu[03-06]"),
    ];
    let c = config(&env).unwrap();
    assert_eq!((c.member, c.workers), (Member::Worker(5), 8));
    assert!(c.coordinator.starts_with("gpu03:2"), "{}", c.coordinator);
}

#[test]
fn slurm_host_lists() {
    assert_eq!(first_host("gpu[03-05,09],login1"), "gpu03");
    assert_eq!(first_host("a,b[1-2]"), "a");
    assert_eq!(first_host("one"), "one");
    assert_eq!(first_host("r[1,3]-ib"), "r1-ib");
}

#[test]
fn nonsense_is_named_with_its_variable() {
    let torch = |rank, world| {
        config(&[("RANK", rank), ("WORLD_SIZE", world), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")])
    };
    let words = |c: Result<Config, Error>| c.unwrap_err().to_string();
    assert!(words(torch("x", "4")).contains("RANK=x"));
    assert!(words(torch("4", "4")).contains("rank 4 of 4"));
    assert!(words(torch("0", "0")).contains("at least 1 worker"));
    assert!(words(config(&[("RANK", "0")])).contains("WORLD_SIZE is not"));
    assert!(words(config(&[("POSEIDON_LINK", "pigeon")])).contains("'pigeon'"));
    let rate = words(config(&[("POSEIDON_LINK_RATE", "fast")]));
    assert!(rate.contains("POSEIDON_LINK_RATE=fast") && rate.contains("'auto'"), "{rate}");
    assert!(words(config(&[("POSEIDON_TIMEOUT", "-1")])).contains("POSEIDON_TIMEOUT"));
    let pinned = words(config(&[("POSEIDON_PINNED_MEMORY", "much")]));
    assert!(pinned.contains("POSEIDON_PINNED_MEMORY=much") && pinned.contains("4GB"), "{pinned}");
}

/// The configuration of a job of one whose environment is these variables only.
fn bare(variables: &[(&str, &str)]) -> Result<Config, Error> {
    let find = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
    Config::from_variables(&find)
}

#[test]
fn a_secret_is_made_where_configuration_is_kept() {
    let home = tempfile::tempdir().unwrap();
    let name = home.path().to_str().unwrap();
    let made = bare(&[("HOME", name)]).unwrap().secret;
    let path = home.path().join(".config/poseidon/secret");
    let named = bare(&[("POSEIDON_SECRET_FILE", path.to_str().unwrap())]).unwrap().secret;
    assert_eq!(made.expose(), named.expose());
}

#[test]
fn a_secret_file_that_does_not_exist_is_not_made() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("mistyped");
    let variables =
        [("POSEIDON_SECRET_FILE", path.to_str().unwrap()), ("HOME", home.path().to_str().unwrap())];
    let error = bare(&variables).unwrap_err().to_string();
    assert!(error.contains("POSEIDON_SECRET_FILE") && error.contains("mistyped"), "{error}");
    assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
}

#[test]
fn encryption_is_asked_for_by_one_and_nothing_else() {
    let secret = ("POSEIDON_SECRET", "of at least 16 bytes");
    assert!(!bare(&[secret]).unwrap().encrypt);
    for (value, encrypt) in [("1", true), ("0", false), ("", false)] {
        let config = bare(&[secret, ("POSEIDON_ENCRYPT", value)]).unwrap();
        assert_eq!((config.encrypt, config.credentials().encrypt), (encrypt, encrypt));
    }
    let error = bare(&[secret, ("POSEIDON_ENCRYPT", "yes")]).unwrap_err().to_string();
    assert!(error.contains("POSEIDON_ENCRYPT=yes"), "{error}");
}

#[test]
fn a_short_secret_is_refused_with_its_variable() {
    for short in ["", "swordfish"] {
        let error = bare(&[("POSEIDON_SECRET", short)]).unwrap_err().to_string();
        assert!(error.contains("POSEIDON_SECRET") && error.contains("at least 16"), "{error}");
    }
}
