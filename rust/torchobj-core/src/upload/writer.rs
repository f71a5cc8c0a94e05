//! Writes an object whose bytes arrive over time: full parts are sent while the next one is filled, in bounded memory.
//!
//! Only a successful [`Writer::close`] makes the object.

use std::sync::Arc;

use bytes::Bytes;

use super::session::Session;
use crate::buffer::{Dest, Memory, PendingBuffer};
use crate::client::Client;
use crate::error::{ErrorKind, Operation, Result};
use crate::types::{Payload, PutOptions, Version};

/// An object that is being written.
#[derive(Debug)]
pub struct Writer {
    client: Arc<Client>,
    key: String,
    options: PutOptions,
    /// The part that is being filled.
    part: Option<(PendingBuffer, Dest)>,
    /// Number of bytes written so far.
    position: u64,
    session: Option<Session>,
}

impl Writer {
    /// A writer to `key`. Nothing is sent before the first part is full.
    ///
    /// # Errors
    /// `InvalidKey`, or `Unsupported` if the store does not support the condition.
    pub fn new(client: Arc<Client>, key: &str, options: PutOptions) -> Result<Self> {
        client.store().check_key(Operation::Put, key)?;
        client.check_condition(Operation::Put, key, &options.condition)?;
        Ok(Self { client, key: key.to_owned(), options, part: None, position: 0, session: None })
    }

    /// Number of bytes written so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Copies as many bytes as fit into the current part. Returns their number. If it is less than `bytes.len()`, the part
    /// is full: the caller calls [`send_part`](Self::send_part) next.
    ///
    /// # Errors
    /// `Io` if the memory for another part cannot be allocated.
    pub fn fill(&mut self, bytes: &[u8]) -> Result<usize> {
        if self.part.is_none() {
            let number = self.session.as_ref().map_or(1, Session::next_number);
            let part_bytes = self.client.part_sizes().growing(number);
            let part_bytes = usize::try_from(part_bytes).expect("a part fits the address space");
            let memory = Memory::allocate(part_bytes).map_err(|source| {
                let message = format!("cannot allocate {part_bytes} bytes for a part");
                self.client.store().error(ErrorKind::Io, Operation::PutPart, &self.key, &message).with_source(source)
            })?;
            self.part = Some(PendingBuffer::new(memory));
        }
        let (_, dest) = self.part.as_mut().expect("filled in just above");
        let filled = dest.fill(bytes);
        self.position += filled as u64;
        Ok(filled)
    }

    /// Starts to send the current part, and waits until the parts in flight leave enough memory for the next one.
    ///
    /// # Errors
    /// The error of an earlier part, after its retries. The upload is aborted.
    pub async fn send_part(&mut self) -> Result<()> {
        match self.try_send_part().await {
            Ok(()) => Ok(()),
            Err(error) => {
                self.abort().await;
                Err(error)
            }
        }
    }

    async fn try_send_part(&mut self) -> Result<()> {
        let Some(payload) = self.take_part() else { return Ok(()) };
        let session = match &mut self.session {
            Some(session) => session,
            None => self.session.insert(Session::begin(self.client.clone(), &self.key, &self.options).await?),
        };
        let size = payload.len() as u64;
        session.send(payload, size)?;
        let next = self.client.part_sizes().growing(session.next_number());
        session.wait_for_capacity(next, self.client.policy().write_buffer_bytes.max(2 * next)).await
    }

    /// Takes the bytes of the current part.
    fn take_part(&mut self) -> Option<Payload> {
        let (pending, dest) = self.part.take()?;
        Some(Bytes::from_owner(pending.close(dest)).into())
    }

    /// Sends the remaining bytes and makes the object, in one request if it is smaller than a part.
    ///
    /// # Errors
    /// The error of a part or of the commit, after its retries. An earlier object under this key is unchanged.
    pub async fn close(&mut self) -> Result<Version> {
        if self.session.is_none() {
            let payload = self.take_part().unwrap_or_default();
            return self.client.put_whole(&self.key, &payload, &self.options).await;
        }
        self.send_part().await?;
        let session = self.session.take().expect("send_part keeps the session unless it failed");
        session.commit(&self.options.condition).await
    }

    /// Discards all bytes and aborts the upload. An earlier object under this key is unchanged.
    pub async fn abort(&mut self) {
        self.part = None;
        if let Some(mut session) = self.session.take() {
            session.abort().await;
        }
    }
}
