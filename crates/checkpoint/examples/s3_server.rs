//! A server that speaks S3, for tries and benchmarks: objects are files of a folder.
//!
//! ```sh
//! cargo run --release -p poseidon-checkpoint --example s3_server -- 127.0.0.1:9000 store
//! export AWS_ENDPOINT_URL=http://127.0.0.1:9000 AWS_REGION=us-east-1
//! export AWS_ACCESS_KEY_ID=key AWS_SECRET_ACCESS_KEY=secret
//! poseidon train --checkpoint s3://bucket/run
//! ```
//!
//! It serves until it is stopped, or for as many seconds as a third word says.
//!
//! Run: cargo run -q -p poseidon-checkpoint --example s3_server -- 127.0.0.1:0 target/s3-store 1

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;
use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;
use tokio::net::TcpListener;

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let (Some(address), Some(folder)) = (words.next(), words.next()) else {
        return Err("expected an address to listen at, and a folder".into());
    };
    let seconds = words.next().map(|seconds| seconds.parse()).transpose()?;
    let folder = PathBuf::from(folder);
    std::fs::create_dir_all(folder.join("bucket"))?;
    let files = FileSystem::new(&folder).map_err(|error| format!("{error:?}"))?;
    let mut service = S3ServiceBuilder::new(files);
    service.set_auth(SimpleAuth::from_single("key", "secret"));
    let service = service.build();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let serve = async move {
        let listener = TcpListener::bind(&address).await?;
        println!("s3://bucket at http://{}", listener.local_addr()?);
        loop {
            let (socket, _) = listener.accept().await?;
            let service = service.clone();
            tokio::spawn(async move {
                let server = auto::Builder::new(TokioExecutor::new());
                if let Err(error) = server.serve_connection(TokioIo::new(socket), service).await {
                    eprintln!("a connection ended: {error}");
                }
            });
        }
    };
    runtime.block_on(async {
        match seconds {
            None => serve.await,
            Some(seconds) => {
                let end = tokio::time::timeout(Duration::from_secs(seconds), serve).await;
                end.unwrap_or(Ok(()))
            }
        }
    })
}
