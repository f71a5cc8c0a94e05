//! An upload from the request that begins it to its end. It ends with a commit or with an abort, which deletes its parts;
//! dropping it before starts the abort in the background. Until then the upload is listed in [`unfinished`], so that a process
//! that ends can name what it leaves in the store. Sends no parts and commits nothing.

use std::collections::BTreeMap;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::Mutex;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout_at};

use super::commit::CommitFailure;
use crate::client::Client;
use crate::error::{Operation, Result};
use crate::fork::{self, Local};
use crate::policy::within;
use crate::runtime::clean_up;
use crate::types::{PutOptions, Upload, Version};
use crate::url::shell_quoted;

/// Timeout of an abort, which delays the error of a failed upload, and the end of an interrupted process.
const ABORT_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for the response to a cancelled request that begins an upload.
const LATE_BEGIN: Duration = Duration::from_secs(10);

/// Time that a store may take to process a part that it has received.
const LATE_PART: Duration = Duration::from_millis(100);

/// An upload that this process has begun, or may have begun, and that was neither committed nor aborted.
#[derive(Clone, Debug)]
pub struct Unfinished {
    /// URL of the object.
    pub url: String,
    /// `None`: the store has not responded to the request that begins it.
    pub id: Option<String>,
    /// Whether a warning has named it.
    pub warned: bool,
}

static UNFINISHED: Mutex<Option<Local<BTreeMap<u64, Unfinished>>>> = Mutex::new(None);

/// Calls `with` with the unfinished uploads of this process.
fn with_unfinished<T>(with: impl FnOnce(&mut BTreeMap<u64, Unfinished>) -> T) -> T {
    let _inside = fork::enter();
    let mut unfinished = UNFINISHED.lock().expect("no holder of this lock panics");
    with(Local::in_slot(&mut unfinished, BTreeMap::new))
}

/// The unfinished uploads of this process, in the order in which they began.
pub fn unfinished() -> Vec<Unfinished> {
    with_unfinished(|all| all.values().cloned().collect())
}

/// An entry of [`unfinished`], until it is dropped.
#[derive(Debug)]
struct Listed(u64);

impl Listed {
    fn new(url: String) -> Self {
        with_unfinished(|all| {
            let number = all.last_key_value().map_or(0, |(last, _)| last + 1);
            all.insert(number, Unfinished { url, id: None, warned: false });
            Self(number)
        })
    }

    fn update(&self, update: impl FnOnce(&mut Unfinished)) {
        with_unfinished(|all| all.get_mut(&self.0).map(update));
    }

    /// Logs that the upload stays in the store, for `problem`, and how to find it. It stays listed.
    fn warn(self, client: &Client, key: &str, problem: &str) {
        self.update(|unfinished| unfinished.warned = true);
        std::mem::forget(self);
        log::warn!("{problem}; {}", how_to_find(client, key));
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        with_unfinished(|all| all.remove(&self.0));
    }
}

/// The next step for an upload that stays in the store.
fn how_to_find(client: &Client, key: &str) -> String {
    format!("`torchobj uploads list {}` lists it", shell_quoted(&client.store().url(key)))
}

/// Begins an upload in parts, with the retries of `client`. If the future is dropped, an upload that the store begins
/// nevertheless is aborted in the background.
///
/// # Errors
/// `AccessDenied`, `NoBucket`, and errors that persist after the retries.
pub async fn begin(client: &Arc<Client>, key: &str, options: &PutOptions) -> Result<BegunUpload> {
    // A request that waits for its permit has not begun.
    let begin = || async { Beginning::new(client.clone(), key, options).await };
    client.retry(|| client.attempt(Operation::BeginUpload, key, begin())).await
}

/// A request that begins an upload. If it is cancelled, its response is awaited in the background, and the upload aborted:
/// without the response its id would be unknown.
struct Beginning {
    client: Arc<Client>,
    key: String,
    /// `None` once it has completed.
    request: Option<(BoxFuture<'static, Result<Upload>>, Listed)>,
}

impl Beginning {
    fn new(client: Arc<Client>, key: &str, options: &PutOptions) -> Self {
        let (own, key, options) = (client.clone(), key.to_owned(), options.clone());
        let listed = Listed::new(client.store().url(&key));
        let name = key.clone();
        let request = async move { own.store().begin_upload(&name, &options).await }.boxed();
        Self { client, key, request: Some((request, listed)) }
    }
}

impl Future for Beginning {
    type Output = Result<BegunUpload>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let (request, _) = self.request.as_mut().expect("it is not polled after its completion");
        let begun = ready!(request.poll_unpin(context));
        let listed = self.request.take().map(|(_, listed)| listed);
        Poll::Ready(begun.map(|upload| BegunUpload::new(self.client.clone(), upload, listed)))
    }
}

impl Drop for Beginning {
    fn drop(&mut self) {
        let Some((request, listed)) = self.request.take() else { return };
        let (client, key) = (self.client.clone(), self.key.clone());
        clean_up(async move {
            match within(LATE_BEGIN, request).await {
                Some(Ok(upload)) => BegunUpload::new(client, upload, Some(listed)).abort().await,
                Some(Err(_)) => {}
                None => {
                    let (url, limit_s) = (client.store().url(&key), LATE_BEGIN.as_secs());
                    let problem = format!("no response within {limit_s} s to the beginning of an upload of {url}");
                    listed.warn(&client, &key, &problem);
                }
            }
        });
    }
}

/// An upload that has begun.
#[derive(Debug)]
pub struct BegunUpload {
    client: Arc<Client>,
    upload: Arc<Upload>,
    /// `None`: the upload has ended, or its abort has begun.
    listed: Option<Listed>,
}

impl BegunUpload {
    fn new(client: Arc<Client>, upload: Upload, listed: Option<Listed>) -> Self {
        if let Some(listed) = &listed {
            listed.update(|unfinished| unfinished.id = Some(upload.id.clone()));
        }
        Self { client, upload: Arc::new(upload), listed }
    }

    /// The upload.
    pub fn upload(&self) -> &Arc<Upload> {
        &self.upload
    }

    /// Ends the upload with the result of its commit. A failed one is aborted once `stopped` has completed, unless its commit
    /// may still be running: an abort could delete the parts of a commit in progress.
    ///
    /// # Errors
    /// That of the commit.
    pub async fn end(
        &mut self,
        committed: Result<Version, CommitFailure>,
        stopped: impl Future<Output = ()> + Send + 'static,
    ) -> Result<Version> {
        match committed {
            Ok(version) => {
                self.listed = None;
                Ok(version)
            }
            Err(failure) if failure.may_be_running => {
                self.listed = None;
                log::warn!(
                    "upload {} of {} is not aborted, because its commit may still be running; if the object does not \
                     appear, abort it: {}, and Store.abort_upload aborts it",
                    self.upload.id,
                    self.client.store().url(&self.upload.key),
                    how_to_find(&self.client, &self.upload.key),
                );
                Err(failure.error)
            }
            Err(failure) => {
                let _ = self.abort_after(stopped).await;
                Err(failure.error)
            }
        }
    }

    /// Aborts the upload, whose parts are no longer sent.
    pub async fn abort(&mut self) {
        let _ = self.abort_after(ready(())).await;
    }

    /// Starts the abort in the background, once `stopped` has completed. The returned receiver ends with it; dropping that
    /// changes nothing. Logs a warning if the abort fails.
    pub(super) fn abort_after(&mut self, stopped: impl Future<Output = ()> + Send + 'static) -> oneshot::Receiver<()> {
        let (running, aborted) = oneshot::channel::<()>();
        if let Some(listed) = self.listed.take() {
            let (client, upload) = (self.client.clone(), self.upload.clone());
            clean_up(async move {
                stopped.await;
                abort(&client, &upload, listed).await;
                drop(running);
            });
        }
        aborted
    }
}

impl Drop for BegunUpload {
    fn drop(&mut self) {
        drop(self.abort_after(ready(())));
    }
}

async fn abort(client: &Client, upload: &Upload, listed: Listed) {
    let deadline = Instant::now() + ABORT_TIMEOUT;
    let url = client.store().url(&upload.key);
    if let Err(problem) = try_abort(client, upload, deadline).await {
        let problem =
            format!("upload {} of {url} could not be aborted, its parts stay in the bucket: {problem}", upload.id);
        listed.warn(client, &upload.key, &problem);
        return;
    }
    drop(listed);
    // "It might be necessary to abort a given multipart upload multiple times" (API reference of S3). In versitygw a part
    // that arrives late creates the upload again.
    sleep(LATE_PART).await;
    if let Err(problem) = try_abort(client, upload, deadline).await {
        log::warn!(
            "upload {} of {url} is aborted, but a late part may stay in the bucket: {problem}; {}",
            upload.id,
            how_to_find(client, &upload.key)
        );
    }
}

async fn try_abort(client: &Client, upload: &Upload, deadline: Instant) -> std::result::Result<(), String> {
    match timeout_at(deadline, client.abort(upload)).await {
        Ok(aborted) => aborted.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no response within {} s", ABORT_TIMEOUT.as_secs())),
    }
}
