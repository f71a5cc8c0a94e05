//! One upload in parts. Every session ends by a commit after which nothing failed, or by an abort; nothing else makes
//! an object, and no part stays behind a failure. The exception is a commit that the store may still be running when its
//! time is over: the upload is left to it, and the log names the upload.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::commit::{Commit, CommitFailure};
use crate::client::Client;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::runtime::clean_up;
use crate::transfer::{idle, within};
use crate::types::{Condition, PartReceipt, Payload, PutOptions, Upload, Version};

/// How long a failed upload may keep its caller waiting to be cleaned up.
const ABORT_TIMEOUT: Duration = Duration::from_secs(15);

/// A store may be done so much later with a part that it has, but for its answer.
const LATE_PART: Duration = Duration::from_millis(100);

/// A part that has arrived, and how much memory was held for it.
type Sent = (PartReceipt, u64);

/// An upload that has begun, with its parts on the way.
#[derive(Debug)]
pub(super) struct Session {
    client: Arc<Client>,
    upload: Arc<Upload>,
    sending: JoinSet<Result<Sent>>,
    held_bytes: u64,
    receipts: Vec<PartReceipt>,
    /// Committed, aborted, or left to a commit that may be running: nothing is left to clean up.
    ended: bool,
}

impl Session {
    /// Begins an upload.
    pub(super) async fn begin(client: Arc<Client>, key: &str, options: &PutOptions) -> Result<Self> {
        let limit = client.policy().first_byte_timeout;
        let upload = {
            let mut attempts = client.attempts();
            loop {
                let permit = client.permit().await;
                let error = match within(limit, client.store().begin_upload(key, options)).await {
                    Some(Ok(upload)) => {
                        attempts.succeeded();
                        break Arc::new(upload);
                    }
                    Some(Err(error)) => error,
                    None => client.silence(Operation::BeginUpload, key, "no answer in time"),
                };
                drop(permit);
                attempts.failed(error).await?;
            }
        };
        Ok(Self { client, upload, sending: JoinSet::new(), held_bytes: 0, receipts: Vec::new(), ended: false })
    }

    /// Starts to send a part, for which `held_bytes` of memory are held that are not the caller's own.
    pub(super) fn send(&mut self, number: u32, offset: u64, payload: Payload, held_bytes: u64) -> Result<()> {
        let most_parts = self.client.part_sizes().most_parts;
        if number > most_parts {
            let message = format!("more than {most_parts} parts: set a larger part_bytes");
            return Err(self.error(ErrorKind::InvalidRequest, &message));
        }
        self.held_bytes += held_bytes;
        let (client, upload) = (self.client.clone(), self.upload.clone());
        self.sending.spawn(async move {
            let receipt = send_part(&client, &upload, number, offset, &payload).await?;
            Ok((receipt, held_bytes))
        });
        Ok(())
    }

    /// Waits until `held_bytes` more, and a part more, may be on the way: uploads leave others half of the permits.
    pub(super) async fn room(&mut self, held_bytes: u64, most_bytes: u64) -> Result<()> {
        let most = (self.client.permits().ahead() / 2).max(2);
        while !self.sending.is_empty()
            && (self.sending.len() >= most || self.held_bytes > 0 && self.held_bytes + held_bytes > most_bytes)
        {
            self.part_done().await?;
        }
        Ok(())
    }

    /// Waits for the next part that has arrived, or the first that has not.
    async fn part_done(&mut self) -> Result<()> {
        match self.sending.join_next().await {
            None => Ok(()),
            Some(Ok(receipt)) => {
                let (receipt, held_bytes) = receipt?;
                self.held_bytes -= held_bytes;
                self.receipts.push(receipt);
                Ok(())
            }
            Some(Err(panic)) => Err(self.error(ErrorKind::Cancelled, "a part was lost").with_source(panic)),
        }
    }

    fn error(&self, kind: ErrorKind, message: &str) -> Error {
        self.client.store().error(kind, Operation::PutPart, &self.upload.key, message)
    }

    /// Waits for all parts and makes them the object. A failed upload is aborted, unless the store may still be
    /// committing it: an abort could delete the parts of a commit in progress.
    pub(super) async fn commit(mut self, condition: &Condition) -> Result<Version> {
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
        while !self.sending.is_empty() {
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
        commit.run(client.attempts()).await
    }

    /// Stops what is on the way and forgets the upload. What cannot be forgotten is said in the log.
    pub(super) async fn abort(&mut self) {
        self.ended = true;
        abort(&self.client, &self.upload, &mut self.sending).await;
    }
}

/// A session that is dropped before its end was cancelled: it is aborted in the background.
impl Drop for Session {
    fn drop(&mut self) {
        if !self.ended {
            let (client, upload) = (self.client.clone(), self.upload.clone());
            let mut sending = std::mem::take(&mut self.sending);
            clean_up(async move { abort(&client, &upload, &mut sending).await });
        }
    }
}

async fn abort(client: &Client, upload: &Upload, sending: &mut JoinSet<Result<Sent>>) {
    // First the sockets: a part that arrives after the abort would stay.
    sending.shutdown().await;
    let url = client.store().url(&upload.key);
    if let Err(problem) = try_abort(client, upload).await {
        log::warn!("upload {} of {url} could not be aborted and stays in the bucket: {problem}", upload.id);
        return;
    }
    // "It might be necessary to abort a given multipart upload multiple times" (API reference of S3). In versitygw a part
    // that is late makes the upload anew.
    sleep(LATE_PART).await;
    if let Err(problem) = try_abort(client, upload).await {
        log::warn!("upload {} of {url} is aborted; a part that was late may stay in the bucket: {problem}", upload.id);
    }
}

async fn try_abort(client: &Client, upload: &Upload) -> std::result::Result<(), String> {
    match within(ABORT_TIMEOUT, client.abort(upload)).await {
        Some(aborted) => aborted.map_err(|error| error.to_string()),
        None => Err("no answer in time".to_owned()),
    }
}

/// A payload that is refused because its memory was changed is not sent again.
pub(crate) fn of_changed_memory(error: Error, payload: &Payload) -> Result<Error> {
    if error.kind() == ErrorKind::Integrity && payload.has_changed() {
        return Err(error.with_hint("the memory that is sent was changed meanwhile"));
    }
    Ok(error)
}

async fn send_part(
    client: &Client,
    upload: &Upload,
    number: u32,
    offset: u64,
    payload: &Payload,
) -> Result<PartReceipt> {
    let limit = client.policy().first_byte_timeout.max(client.policy().idle_timeout);
    let mut attempts = client.attempts();
    loop {
        client.pace(payload).await;
        let mut permit = client.permit().await;
        let error = match idle(limit, client.store().put_part(upload, number, offset, payload)).await {
            Some(Ok(receipt)) => {
                permit.moved(payload.len() as u64, Instant::now());
                attempts.succeeded();
                return Ok(receipt);
            }
            Some(Err(error)) => error,
            None => {
                let message = format!("part {number} stood still for {} s", limit.as_secs_f64());
                client.silence(Operation::PutPart, &upload.key, &message)
            }
        };
        drop(permit);
        attempts.failed(of_changed_memory(error, payload)?).await?;
    }
}
