//! Sends the parts of one upload, and commits it. How it begins, and its abort, are in `begun`.

use std::sync::Arc;

use tokio::time::Instant;

use super::begun::{BegunUpload, begin};
use super::commit::{Commit, CommitFailure};
use crate::client::Client;
use crate::engine::{Batch, BatchRequest};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::policy::InFlight;
use crate::types::{Condition, PartReceipt, Payload, PutOptions, Upload, Version};

/// A part that the store has received, and the bytes of memory that were held for it.
type SentPart = (PartReceipt, u64);

/// An upload that has begun, and its parts in flight.
#[derive(Debug)]
pub(crate) struct Session {
    client: Arc<Client>,
    begun: BegunUpload,
    sending: Arc<Batch<SendPart>>,
    /// Number of parts that were passed to `send`, and their bytes.
    sent: u32,
    offset: u64,
    held_bytes: u64,
    receipts: Vec<PartReceipt>,
    _in_flight: InFlight,
}

impl Session {
    /// Begins an upload.
    pub(crate) async fn begin(client: Arc<Client>, key: &str, options: &PutOptions) -> Result<Self> {
        let begun = begin(&client, key, options).await?;
        // Uploads use at most half of the permits.
        let permits = client.permits().clone();
        let sequential = begun.upload().sequential;
        let limit = move || if sequential { 1 } else { (permits.read_ahead_limit() / 2).max(2) };
        let sending = Arc::new(Batch::new(limit, true));
        Ok(Self {
            _in_flight: InFlight::upload(client.metrics()),
            client,
            begun,
            sending,
            sent: 0,
            offset: 0,
            held_bytes: 0,
            receipts: Vec::new(),
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
        let (client, upload) = (self.client.clone(), self.begun.upload().clone());
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
        self.client.store().error(kind, Operation::PutPart, &self.begun.upload().key, message)
    }

    /// Waits for all parts and makes them the object. A failed upload is aborted, unless its commit may still be running.
    pub(crate) async fn commit(mut self, condition: &Condition) -> Result<Version> {
        let committed = self.try_commit(condition).await;
        self.begun.end(committed, shutdown(self.sending.clone())).await
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
            upload: self.begun.upload(),
            parts: &self.receipts,
            condition,
        };
        let began = Instant::now();
        let committed = commit.run(client.attempts()).await;
        committed.inspect(|_| client.metrics().succeeded(Operation::Commit, 0, began.elapsed()))
    }

    /// Cancels the parts in flight and aborts the upload. Logs a warning if the abort fails. If the future is dropped, the abort
    /// continues in the background.
    pub(crate) async fn abort(&mut self) {
        let _ = self.begun.abort_after(shutdown(self.sending.clone())).await;
    }
}

/// A session that is dropped before its end was cancelled. It is aborted in the background.
impl Drop for Session {
    fn drop(&mut self) {
        drop(self.begun.abort_after(shutdown(self.sending.clone())));
    }
}

/// Cancels the parts in flight. The sockets are closed before the abort: a part that arrives after it would not be deleted.
async fn shutdown(sending: Arc<Batch<SendPart>>) {
    sending.shutdown().await;
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
