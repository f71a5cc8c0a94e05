//! Deletes objects: one request each, concurrently, because the JSON API has no bulk delete.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream;
use tokio::time::sleep;
use torchobj_core::error::{Error, ErrorKind, Operation, Result, Retry};
use torchobj_core::types::{Payload, Version};

use super::request::Bucket;

/// Number of concurrent deletes of one call, which holds one permit.
const CONCURRENT: usize = 16;

/// Pauses between attempts to delete parts; `None`: the last attempt.
const DELETE_PAUSES: [Option<Duration>; 4] =
    [Some(Duration::from_millis(200)), Some(Duration::from_secs(1)), Some(Duration::from_secs(3)), None];

impl Bucket {
    /// Deletes objects. Returns those that could not be deleted.
    pub(super) async fn delete_each(&self, keys: &[String]) -> Vec<(String, Error)> {
        let delete = |key: String| async move {
            let error = self.delete_one(&key, None).await.err()?;
            Some((key, error))
        };
        stream::iter(keys.iter().cloned().map(delete))
            .buffer_unordered(CONCURRENT)
            .filter_map(std::future::ready)
            .collect()
            .await
    }

    /// Deletes generations of objects: versioning does not keep them as noncurrent. Retries, because the caller makes no other
    /// attempt. Returns the names of those that could not be deleted, and the errors.
    pub(super) async fn delete_generations(&self, mut objects: Vec<(String, Version)>) -> Vec<(String, Error)> {
        let delete = |(name, generation): (String, Version)| async move {
            let error = self.delete_by(&name, Some(("generation", generation.as_str()))).await.err()?;
            Some(((name, generation), error))
        };
        let mut given_up = Vec::new();
        for pause in DELETE_PAUSES {
            let deletes = stream::iter(std::mem::take(&mut objects).into_iter().map(delete));
            let failed: Vec<_> = deletes.buffer_unordered(CONCURRENT).filter_map(std::future::ready).collect().await;
            for ((name, generation), error) in failed {
                match pause {
                    Some(_) if error.retry() != Retry::Never => objects.push((name, generation)),
                    _ => given_up.push((name, error)),
                }
            }
            match pause {
                Some(pause) if !objects.is_empty() => sleep(pause).await,
                _ => break,
            }
        }
        given_up
    }

    /// Deletes an object, if it has this version. Succeeds if it does not exist.
    pub(super) async fn delete_one(&self, key: &str, version: Option<&Version>) -> Result<()> {
        self.delete_by(key, version.map(|version| ("ifGenerationMatch", version.as_str()))).await
    }

    async fn delete_by(&self, key: &str, version: Option<(&str, &str)>) -> Result<()> {
        let payload = Payload::default();
        let query: Vec<_> = version.into_iter().collect();
        let path = self.path("/o/", key);
        let request = self.request(Operation::Delete, "DELETE", Some(key), path, &query, Vec::new(), &payload);
        match self.send(&request).await {
            Ok(response) if response.is_html() => {
                let message = "the response is a page, and not one of Google Cloud Storage";
                Err(response.refuse(self.error(ErrorKind::OtherServer, Operation::Delete, Some(key), message)))
            }
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}
