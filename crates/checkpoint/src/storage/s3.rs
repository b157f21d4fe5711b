//! A store that speaks S3: Amazon's, or one of the many that do the same.

use super::{Entry, Storage, StorageError, total};
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStore, ObjectStoreExt, RetryConfig};
use reqwest::Url;
use std::ops::Range;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// Keeps objects in a bucket, below a prefix.
///
/// Every wait ends after three minutes at the latest. The calls block, and may not be made from
/// inside an asynchronous program.
#[derive(Debug)]
pub struct S3 {
    store: AmazonS3,
    prefix: Path,
    place: String,
    /// Drives requests while somebody waits for them.
    runtime: Runtime,
}

impl S3 {
    /// The bucket, with credentials, region and endpoint from the environment's `AWS_` variables. An
    /// error says in words what is wrong.
    pub fn from_env(bucket: &str, prefix: &str) -> Result<Self, String> {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self::new(bucket, prefix, std::env::vars_os().filter_map(text))
    }

    /// The same, from other variables than the environment's.
    pub fn new(
        bucket: &str,
        prefix: &str,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, String> {
        let of_bucket = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        if bucket.is_empty() || !bucket.chars().all(of_bucket) {
            return Err(
                "expected a bucket of letters, digits, '.', '-' and '_' after 's3://'".into()
            );
        }
        let prefix =
            Path::parse(prefix.trim_end_matches('/')).map_err(|error| error.to_string())?;
        let mut builder = AmazonS3Builder::new().with_bucket_name(bucket);
        for (name, value) in variables {
            let known = name.starts_with("AWS_").then(|| name.to_ascii_lowercase().parse().ok());
            if let Some(key) = known.flatten() {
                builder = builder.with_config(key, value);
            }
        }
        let plain = plain_endpoint(&builder)?;
        let client = ClientOptions::new()
            .with_allow_http(plain)
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_timeout(REQUEST_TIMEOUT);
        let retry =
            RetryConfig { retry_timeout: DEADLINE - REQUEST_TIMEOUT, ..RetryConfig::default() };
        // Another crate of this program may have installed one: it serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let store = builder.with_client_options(client).with_retry(retry).build();
        let runtime = Builder::new_current_thread().enable_all().build();
        Ok(Self {
            store: store.map_err(|error| error.to_string())?,
            place: format!("s3://{bucket}/{prefix}").trim_end_matches('/').to_owned(),
            prefix,
            runtime: runtime.map_err(|error| error.to_string())?,
        })
    }

    fn path(&self, name: &str) -> Path {
        name.split('/').fold(self.prefix.clone(), |path, part| path.join(part))
    }

    /// Uploads in pieces that the store makes one object of at the end.
    async fn put_large(&self, path: &Path, slices: &[&[u8]]) -> Result<(), StorageError> {
        let mut upload = in_time(self.store.put_multipart(path)).await?;
        let chunk = CHUNK.max(usize::try_from(total(slices) / MOST_CHUNKS).unwrap_or(usize::MAX));
        let sent = stream::iter(Chunks { slices, taken: 0, chunk })
            .map(|chunk| in_time(upload.put_part(chunk.into())))
            .buffer_unordered(AT_ONCE)
            .try_collect::<()>()
            .await;
        let done = match sent {
            Ok(()) => in_time(upload.complete()).await.map(drop),
            Err(error) => Err(error),
        };
        if done.is_err() {
            // The store may charge for what it has. It is not an object, so nothing else depends
            // on it.
            let _ = in_time(upload.abort()).await;
        }
        done
    }
}

impl Storage for S3 {
    fn describe(&self) -> String {
        self.place.clone()
    }

    fn put(&self, name: &str, slices: &[&[u8]]) -> Result<(), StorageError> {
        let path = self.path(name);
        let put = async {
            if total(slices) > CHUNK as u64 {
                return self.put_large(&path, slices).await;
            }
            in_time(self.store.put(&path, slices.concat().into())).await.map(drop)
        };
        self.runtime.block_on(put).map_err(|error| match error {
            // No object has to be there, so it can only be the bucket.
            StorageError::Missing => StorageError::Failed("there is no such bucket".into()),
            error => error,
        })
    }

    fn get_range(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>, StorageError> {
        let path = self.path(name);
        let wanted = range.end.saturating_sub(range.start);
        let starts = (range.start..range.end).step_by(CHUNK);
        let get = stream::iter(starts)
            .map(|start| start..range.end.min(start + CHUNK as u64))
            .map(|chunk| in_time(self.store.get_range(&path, chunk)))
            .buffered(AT_ONCE)
            .try_fold(Vec::new(), |mut bytes, chunk| async move {
                bytes.extend_from_slice(&chunk);
                Ok(bytes)
            });
        let bytes = self.runtime.block_on(get)?;
        match bytes.len() as u64 {
            found if found < wanted => Err(StorageError::Short { range, found }),
            _ => Ok(bytes),
        }
    }

    fn size(&self, name: &str) -> Result<u64, StorageError> {
        let path = self.path(name);
        Ok(self.runtime.block_on(in_time(self.store.head(&path)))?.size)
    }

    fn folders(&self) -> Result<Vec<String>, StorageError> {
        let list = in_time(self.store.list_with_delimiter(Some(&self.prefix)));
        let there = self.runtime.block_on(list)?;
        Ok(there.common_prefixes.iter().filter_map(Path::filename).map(String::from).collect())
    }

    fn list(&self, folder: &str) -> Result<Vec<Entry>, StorageError> {
        let path = self.path(folder);
        let list = in_time(self.store.list_with_delimiter(Some(&path)));
        let there = self.runtime.block_on(list)?;
        let entry = |object: object_store::ObjectMeta| {
            Some(Entry { file: object.location.filename()?.to_owned(), bytes: object.size })
        };
        Ok(there.objects.into_iter().filter_map(entry).collect())
    }

    fn delete(&self, name: &str) -> Result<(), StorageError> {
        let path = self.path(name);
        match self.runtime.block_on(in_time(self.store.delete(&path))) {
            Err(StorageError::Missing) => Ok(()),
            deleted => deleted,
        }
    }
}

/// Whether the endpoint that the user has named is to be spoken to without encryption. Refuses
/// values that no request can be made of.
fn plain_endpoint(builder: &AmazonS3Builder) -> Result<bool, String> {
    for (key, name) in [
        (AmazonS3ConfigKey::AccessKeyId, "AWS_ACCESS_KEY_ID"),
        (AmazonS3ConfigKey::Token, "AWS_SESSION_TOKEN"),
        (AmazonS3ConfigKey::Region, "AWS_REGION"),
    ] {
        let value = builder.get_config_value(&key).unwrap_or_default();
        // The value may be a secret, so it is not shown.
        if let Some(odd) = value.chars().find(|c| !c.is_ascii_graphic()) {
            return Err(format!("{name} has a character that it cannot have: {odd:?}"));
        }
    }
    let keys = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint];
    let Some(endpoint) = keys.iter().find_map(|key| builder.get_config_value(key)) else {
        return Ok(false);
    };
    match Url::parse(&endpoint) {
        Ok(url) if url.has_host() && url.scheme() == "https" => Ok(false),
        Ok(url) if url.has_host() && url.scheme() == "http" => Ok(true),
        _ => Err(format!(
            "expected https://HOST or http://HOST as AWS_ENDPOINT_URL, got '{endpoint}'"
        )),
    }
}

/// Waits for an answer, and not for ever.
async fn in_time<T>(
    answer: impl Future<Output = object_store::Result<T>>,
) -> Result<T, StorageError> {
    match tokio::time::timeout(DEADLINE, answer).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(object_store::Error::NotFound { .. })) => Err(StorageError::Missing),
        Ok(Err(error)) => Err(StorageError::Failed(error.into())),
        Err(_) => Err(StorageError::Late { waited: DEADLINE }),
    }
}

/// Bytes of many slices in chunks of one size. The chunks are made when they are asked for, so
/// there are only as many as are being sent.
struct Chunks<'a> {
    /// Those that have not been taken, the first of them from `taken` on.
    slices: &'a [&'a [u8]],
    taken: usize,
    chunk: usize,
}

impl Iterator for Chunks<'_> {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        while let [first, rest @ ..] = self.slices {
            let more = &first[self.taken..];
            let now = more.len().min(self.chunk - bytes.len());
            bytes.extend_from_slice(&more[..now]);
            if now < more.len() {
                self.taken += now;
                break;
            }
            (self.slices, self.taken) = (rest, 0);
        }
        (!bytes.is_empty()).then_some(bytes)
    }
}

/// Bytes of one request. Amazon advises 8 to 16 MiB for requests that run side by side.
const CHUNK: usize = 16 << 20;
/// Amazon makes at most 10,000 of them into an object.
const MOST_CHUNKS: u64 = 9_000;
/// Requests at the same time. They need this many chunks of memory.
const AT_ONCE: usize = 4;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// One try of one request: a chunk at 2.2 Mbit/s.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// One request with all its repetitions.
const DEADLINE: Duration = Duration::from_secs(180);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_have_all_bytes_once() {
        let slices: [&[u8]; 5] = [b"abc", b"", b"defgh", b"i", b""];
        let chunks = |chunk| {
            let chunks = Chunks { slices: &slices, taken: 0, chunk };
            chunks.map(|chunk| String::from_utf8(chunk).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(chunks(2), ["ab", "cd", "ef", "gh", "i"]);
        assert_eq!(chunks(3), ["abc", "def", "ghi"]);
        assert_eq!(chunks(100), ["abcdefghi"]);
    }

    #[test]
    fn what_no_request_can_be_made_of_is_refused() {
        for bucket in ["", "a b", "a?b"] {
            let error = S3::new(bucket, "a", []).unwrap_err();
            assert!(error.contains("expected a bucket"), "{error}");
        }
        for (name, value) in [
            ("AWS_ENDPOINT_URL", "127.0.0.1:9"),
            ("AWS_ENDPOINT_URL", "store"),
            ("AWS_ENDPOINT_URL", ""),
            ("AWS_ENDPOINT_URL", "ftp://store"),
            ("AWS_ENDPOINT_URL", "http://"),
            ("AWS_ACCESS_KEY_ID", "key\n"),
            ("AWS_SESSION_TOKEN", "\u{e9}"),
            ("AWS_REGION", "us east"),
        ] {
            let error = S3::new("bucket", "a", [(name.into(), value.into())]).unwrap_err();
            assert!(error.contains(name), "{name}={value}: {error}");
        }
    }

    #[test]
    fn only_an_endpoint_that_says_so_is_plain() {
        let plain = |endpoint: &str| {
            plain_endpoint(&AmazonS3Builder::new().with_endpoint(endpoint)).unwrap()
        };
        assert!(plain("http://store:9000"));
        assert!(plain("HTTP://store:9000"));
        assert!(!plain("https://store:9000"));
        assert!(!plain_endpoint(&AmazonS3Builder::new()).unwrap());
    }

    #[test]
    fn a_place_is_described_by_its_bucket_and_prefix() {
        let describe = |prefix| S3::new("bucket", prefix, []).unwrap().describe();
        assert_eq!(describe("some/where/"), "s3://bucket/some/where");
        assert_eq!(describe(""), "s3://bucket");
    }
}
