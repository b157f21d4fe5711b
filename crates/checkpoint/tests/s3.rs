//! The whole cycle through a real S3 server on this machine.

mod trial;

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use poseidon_checkpoint::{
    Checkpoint, Error, Keep, Piece, S3, State, Storage, StorageError, What, commit, discard, list,
    prune, write_part,
};
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::thread;
use std::time::SystemTime;
use tempfile::TempDir;
use tokio::net::TcpListener;
use trial::{assert_whole, latest, manifest, pieces, write};

/// A server whose objects are files of a folder. It ends with the test's process.
struct Server {
    address: SocketAddr,
    folder: TempDir,
}

impl Server {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("bucket")).unwrap();
        let mut service = S3ServiceBuilder::new(FileSystem::new(folder.path()).unwrap());
        service.set_auth(SimpleAuth::from_single("key", "secret"));
        let service = service.build();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            runtime.block_on(async move {
                loop {
                    let (socket, _) = listener.accept().await.unwrap();
                    let service = service.clone();
                    tokio::spawn(async move {
                        let server = auto::Builder::new(TokioExecutor::new());
                        // A client that goes away is none of the server's business.
                        let _ = server.serve_connection(TokioIo::new(socket), service).await;
                    });
                }
            });
        });
        Self { address, folder }
    }

    fn open(&self, bucket: &str, secret: &str) -> Arc<dyn Storage> {
        let endpoint = format!("http://{}", self.address);
        let variables = [
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", secret),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ENDPOINT_URL", &endpoint),
            // Not said by the endpoint, so without effect.
            ("AWS_ALLOW_HTTP", "false"),
        ];
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
        Arc::new(S3::new(bucket, "runs/one", variables).unwrap())
    }
}

#[test]
fn checkpoints_are_written_listed_read_and_pruned() {
    let server = Server::start();
    let storage = server.open("bucket", "secret");
    assert_eq!(list(&*storage).unwrap().len(), 0);
    assert_eq!(latest(&storage), None);
    for step in [100, 200, 300] {
        write(&*storage, step, 3).unwrap();
    }
    write_part(&*storage, 250, 0, &pieces(250, 0, 3)).unwrap();
    let on_disk = "bucket/runs/one/step-000000000300/part-00002.safetensors";
    assert!(server.folder.path().join(on_disk).is_file());

    let found = list(&*storage).unwrap();
    let states: Vec<_> = found.iter().map(|one| (one.step, one.state.clone())).collect();
    let [done, open] = [State::Complete, State::Unfinished];
    assert_eq!(states, [(100, done.clone()), (200, done.clone()), (250, open), (300, done)]);
    let latest = Checkpoint::latest(&storage).unwrap().checkpoint.unwrap();
    assert_eq!(latest.manifest().step, 300);
    assert_whole(&latest);

    let error = write(&*storage, 300, 3).unwrap_err();
    assert!(matches!(error, Error::Complete { .. }), "{error}");
    let keep = Keep { count: Some(2), age: None };
    assert_eq!(prune(&storage, &keep, SystemTime::now()).unwrap(), [100, 250]);
    assert_eq!(list(&*storage).unwrap().len(), 2);
    discard(&*storage, 300).unwrap();
    discard(&*storage, 300).unwrap();
    assert_eq!(trial::latest(&storage), Some(200));
    let error = Checkpoint::open(&storage, 300).unwrap_err().to_string();
    assert!(
        error.contains("s3://bucket/runs/one") && error.contains("complete are 200"),
        "{error}"
    );
}

#[test]
fn a_large_part_goes_in_several_requests() {
    let server = Server::start();
    let storage = server.open("bucket", "secret");
    // More than two requests of 16 MiB, and an end that fills none.
    let values: Vec<f32> = (0..9_000_001).map(|i| i as f32).collect();
    let piece = Piece { layer: "fc".into(), what: What::Parameters, start: 0, values: &values[..] };
    let part = write_part(&*storage, 1, 0, &[piece]).unwrap();
    let mut manifest = manifest(1, vec![part]);
    manifest.layers.remove(0);
    (manifest.layers[0].len, manifest.layers[0].vectors) = (values.len(), 0);
    commit(&*storage, &manifest).unwrap();
    let checkpoint = Checkpoint::open(&storage, 1).unwrap();
    let read = checkpoint.read("fc", &What::Parameters, 0..values.len()).unwrap();
    assert!(read == values, "the numbers that were written");
}

#[test]
fn objects_that_are_not_there_are_told_from_servers_that_refuse() {
    let server = Server::start();
    let storage = server.open("bucket", "secret");
    assert!(matches!(storage.size("step/none"), Err(StorageError::Missing)));
    assert!(matches!(storage.get_range("step/none", 0..1), Err(StorageError::Missing)));
    storage.put("step/some", &[b"hello"]).unwrap();
    assert_eq!(storage.get("step/some").unwrap(), b"hello");
    assert_eq!(storage.get_range("step/some", 1..3).unwrap(), b"el");
    assert_eq!(storage.get_range("step/some", 3..3).unwrap(), b"");
    let short = storage.get_range("step/some", 3..9).unwrap_err();
    assert!(matches!(short, StorageError::Short { found: 2, .. }), "{short}");
    storage.put("step/none", &[]).unwrap();
    assert_eq!(storage.get("step/none").unwrap(), b"");

    let stranger = server.open("bucket", "guess");
    let error = write(&*stranger, 100, 1).unwrap_err().to_string();
    assert!(error.contains("s3://bucket/runs/one"), "{error}");
    assert!(matches!(stranger.put("step/some", &[b"x"]), Err(StorageError::Failed(_))));
    assert_eq!(storage.get("step/some").unwrap(), b"hello");

    let elsewhere = server.open("nobodys", "secret");
    let error = list(&*elsewhere).unwrap_err().to_string();
    assert!(error.contains("s3://nobodys/runs/one") && error.contains("NoSuchBucket"), "{error}");
}
