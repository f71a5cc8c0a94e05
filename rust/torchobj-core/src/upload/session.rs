//! One upload in parts. A session ends with a successful commit, which makes the object, or with an abort, which deletes
//! the parts. The exception is a commit that may still be running in the store after its timeout: the upload is not aborted,
//! and a warning names it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::time::{Instant, sleep};

use super::commit::{Commit, CommitFailure};
use crate::client::Client;
use crate::engine::{Batch, BatchRequest};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::policy::{InFlight, within};
use crate::runtime::clean_up;
use crate::types::{Condition, PartReceipt, Payload, PutOptions, Upload, Version};

/// Timeout of an abort, which delays the error of a failed upload.
const ABORT_TIMEOUT: Duration = Duration::from_secs(15);

/// Time limit for the response to a cancelled request that begins an upload.
const LATE_BEGIN: Duration = Duration::from_secs(15);

/// Time that a store may take to process a part that it has received.
const LATE_PART: Duration = Duration::from_millis(100);

/// A part that the store has received, and the bytes of memory that were held for it.
type SentPart = (PartReceipt, u64);

/// An upload that has begun, and its parts in flight.
#[derive(Debug)]
pub(crate) struct Session {
    client: Arc<Client>,
    upload: Arc<Upload>,
    sending: Arc<Batch<SendPart>>,
    /// Number of parts that were passed to `send`, and their bytes.
    sent: u32,
    offset: u64,
    held_bytes: u64,
    receipts: Vec<PartReceipt>,
    /// Whether the upload needs no abort: it was committed or aborted, or its commit may still be running.
    ended: bool,
    _in_flight: InFlight,
}

impl Session {
    /// Begins an upload.
    pub(crate) async fn begin(client: Arc<Client>, key: &str, options: &PutOptions) -> Result<Self> {
        let upload = Arc::new(begin(&client, key, options).await?);
        // Uploads use at most half of the permits.
        let permits = client.permits().clone();
        let sequential = upload.sequential;
        let limit = move || if sequential { 1 } else { (permits.read_ahead_limit() / 2).max(2) };
        let sending = Arc::new(Batch::new(limit, true));
        Ok(Self {
            _in_flight: InFlight::upload(client.metrics()),
            client,
            upload,
            sending,
            sent: 0,
            offset: 0,
            held_bytes: 0,
            receipts: Vec::new(),
            ended: false,
        })
    }

    /// Number of the next part, from 1.
    pub(crate) fn next_number(&self) -> u32 {
        self.sent + 1
    }

    /// Starts to send the next part. `held_bytes` is the memory held for it besides the caller's own.
    pub(crate) fn send(&mut self, payload: Payload, held_bytes: u64) -> Result<()> {
        let max_parts = self.client.part_sizes().max_parts;
        if self.sent >= max_parts {
            let message = format!("more than {max_parts} parts: set a larger part_bytes");
            return Err(self.error(ErrorKind::InvalidRequest, &message));
        }
        let (client, upload) = (self.client.clone(), self.upload.clone());
        let (number, offset) = (self.next_number(), self.offset);
        self.sent = number;
        self.offset += payload.len() as u64;
        self.held_bytes += held_bytes;
        let in_flight = InFlight::part(client.metrics(), payload.len() as u64);
        self.sending.push(SendPart { client, upload, number, offset, payload, held_bytes, _in_flight: in_flight });
        Ok(())
    }

    /// Waits until another part with `held_bytes` of memory may be sent.
    pub(crate) async fn wait_for_capacity(&mut self, held_bytes: u64, max_bytes: u64) -> Result<()> {
        while self.sending.pending() > 0
            && (self.sending.pending() >= self.sending.limit()
                || self.held_bytes > 0 && self.held_bytes + held_bytes > max_bytes)
        {
            self.part_done().await?;
        }
        Ok(())
    }

    /// Waits until a part is received by the store. Returns the error of a part that was not.
    async fn part_done(&mut self) -> Result<()> {
        if let Some((_, sent)) = self.sending.next().await {
            let (receipt, held_bytes) = sent?;
            self.held_bytes -= held_bytes;
            self.receipts.push(receipt);
        }
        Ok(())
    }

    fn error(&self, kind: ErrorKind, message: &str) -> Error {
        self.client.store().error(kind, Operation::PutPart, &self.upload.key, message)
    }

    /// Waits for all parts and makes them the object. A failed upload is aborted, unless its commit may still be running: an
    /// abort could delete the parts of a commit in progress.
    pub(crate) async fn commit(mut self, condition: &Condition) -> Result<Version> {
        let failure = match self.try_commit(condition).await {
            Ok(version) => {
                self.ended = true;
                return Ok(version);
            }
            Err(failure) => failure,
        };
        if failure.may_be_running {
            self.ended = true;
            log::warn!(
                "upload {} of {} is not aborted, because its commit may still be running; if the object does not appear, \
                 abort it: see Store.unfinished_uploads",
                self.upload.id,
                self.client.store().url(&self.upload.key),
            );
        } else {
            self.abort().await;
        }
        Err(failure.error)
    }

    async fn try_commit(&mut self, condition: &Condition) -> Result<Version, CommitFailure> {
        while self.sending.pending() > 0 {
            self.part_done().await?;
        }
        self.receipts.sort_by_key(|receipt| receipt.number);
        let client = &*self.client;
        let commit = Commit {
            store: client.store(),
            policy: client.policy(),
            permits: Some(client.permits()),
            upload: &self.upload,
            parts: &self.receipts,
            condition,
        };
        let began = Instant::now();
        let committed = commit.run(client.attempts()).await;
        committed.inspect(|_| client.metrics().succeeded(Operation::Commit, 0, began.elapsed()))
    }

    /// Cancels the parts in flight and aborts the upload. Logs a warning if the abort fails.
    pub(crate) async fn abort(&mut self) {
        self.ended = true;
        stop(&self.client, &self.upload, &self.sending).await;
    }
}

/// A session that is dropped before its end was cancelled. It is aborted in the background.
impl Drop for Session {
    fn drop(&mut self) {
        if !self.ended {
            let (client, upload, sending) = (self.client.clone(), self.upload.clone(), self.sending.clone());
            clean_up(async move { stop(&client, &upload, &sending).await });
        }
    }
}

/// Begins an upload in parts, with the retries of `client`. If the future is dropped, an upload that the store begins
/// nevertheless is aborted in the background.
///
/// # Errors
/// `AccessDenied`, `NoBucket`, and errors that persist after the retries.
pub async fn begin(client: &Arc<Client>, key: &str, options: &PutOptions) -> Result<Upload> {
    // A request that waits for its permit has not begun.
    let begin = || async { Beginning::new(client.clone(), key, options).await };
    client.retry(|| client.attempt(Operation::BeginUpload, key, begin())).await
}

/// A request that begins an upload. If it is cancelled, its response is awaited in the background, and the upload aborted:
/// without the response its id would be unknown.
struct Beginning {
    client: Arc<Client>,
    /// `None` once it has completed.
    request: Option<BoxFuture<'static, Result<Upload>>>,
}

impl Beginning {
    fn new(client: Arc<Client>, key: &str, options: &PutOptions) -> Self {
        let (own, key, options) = (client.clone(), key.to_owned(), options.clone());
        let request = async move { own.store().begin_upload(&key, &options).await }.boxed();
        Self { client, request: Some(request) }
    }
}

impl Future for Beginning {
    type Output = Result<Upload>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let request = self.request.as_mut().expect("it is not polled after its completion");
        let begun = ready!(request.poll_unpin(context));
        self.request = None;
        Poll::Ready(begun)
    }
}

impl Drop for Beginning {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            let client = self.client.clone();
            clean_up(async move {
                if let Some(Ok(upload)) = within(LATE_BEGIN, request).await {
                    abort(&client, &upload).await;
                }
            });
        }
    }
}

async fn stop(client: &Client, upload: &Upload, sending: &Batch<SendPart>) {
    // The sockets are closed first: a part that arrives after the abort would not be deleted.
    sending.shutdown().await;
    abort(client, upload).await;
}

/// Aborts an upload whose parts are no longer sent. Logs a warning if that fails.
pub async fn abort(client: &Client, upload: &Upload) {
    let url = client.store().url(&upload.key);
    if let Err(problem) = try_abort(client, upload).await {
        log::warn!("upload {} of {url} could not be aborted, its parts stay in the bucket: {problem}", upload.id);
        return;
    }
    // "It might be necessary to abort a given multipart upload multiple times" (API reference of S3). In versitygw a part
    // that arrives late creates the upload again.
    sleep(LATE_PART).await;
    if let Err(problem) = try_abort(client, upload).await {
        log::warn!("upload {} of {url} is aborted, but a late part may stay in the bucket: {problem}", upload.id);
    }
}

async fn try_abort(client: &Client, upload: &Upload) -> std::result::Result<(), String> {
    match within(ABORT_TIMEOUT, client.abort(upload)).await {
        Some(aborted) => aborted.map_err(|error| error.to_string()),
        None => Err(format!("no response within {} s", ABORT_TIMEOUT.as_secs())),
    }
}

impl Client {
    /// Whether an upload failed because the store has lost its session, so that it can begin again. A store whose uploads are
    /// sessions that it lists has lost none: somebody aborted the upload.
    pub(crate) fn lost_session(&self, uploaded: &Result<Version>) -> bool {
        let Err(error) = uploaded else { return false };
        let lost = error.kind() == ErrorKind::UploadGone && !self.store().capabilities().upload_sessions;
        if lost {
            log::warn!("{error}: the upload begins again");
        }
        lost
    }
}

/// Returns `error` as an `Err`, not to be retried, if the payload was refused because its memory was changed.
pub(crate) fn check_unchanged(error: Error, payload: &Payload) -> Result<Error> {
    if error.kind() == ErrorKind::Integrity && payload.has_changed() {
        return Err(error.with_hint("the memory was changed while it was sent"));
    }
    Ok(error)
}

/// A part in flight.
#[derive(Debug)]
struct SendPart {
    client: Arc<Client>,
    upload: Arc<Upload>,
    number: u32,
    offset: u64,
    payload: Payload,
    held_bytes: u64,
    _in_flight: InFlight,
}

impl BatchRequest for SendPart {
    type Output = SentPart;

    async fn run(self) -> Result<SentPart> {
        let Self { client, upload, number, offset, payload, held_bytes, _in_flight } = self;
        let mut attempts = client.attempts();
        loop {
            client.wait_for_rate(&payload).await;
            let (bytes, call) = (payload.len(), client.store().put_part(&upload, number, offset, &payload));
            match client.attempt_while_active(Operation::PutPart, &upload.key, bytes, Some(number), call).await {
                Ok(receipt) => {
                    attempts.succeeded();
                    return Ok((receipt, held_bytes));
                }
                Err(error) => attempts.failed(check_unchanged(error, &payload)?).await?,
            }
        }
    }
}
