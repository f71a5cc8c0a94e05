//! Writes an object from pieces of the caller's memory, as `writev` does. Parts are sliced from it without a copy, and
//! retries send the same memory. Small pieces are copied into one, so that a part has few pieces.
//!
//! In zip files, and in what `torch.save` writes, the CRC-32 of a record follows the record. It is computed once, while
//! the record is written, and is used for the checksum of the part as well. Only a successful [`Gather::close`] makes the
//! object.

use std::mem;
use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use super::session::Session;
use crate::client::Client;
use crate::crc32::Crc32;
use crate::error::{ErrorKind, Operation, Result};
use crate::types::{ChecksumAlgorithm, Payload, PutOptions, Version};

/// Smaller pieces are copied: one `writev` call takes few pieces.
const PACKED_BYTES: usize = 4 << 10;

/// A piece of an object.
#[derive(Clone, Debug)]
pub enum Piece {
    /// Bytes without a checksum.
    Literal(Bytes),
    /// Bytes with a checksum, for a later [`Piece::Crc32`]. Records are numbered from 0.
    Record(Bytes),
    /// The CRC-32 of the concatenation of these records, little-endian. All of them must be written before.
    Crc32(Range<usize>),
}

/// An object that is being gathered.
#[derive(Debug)]
pub struct Gather {
    client: Arc<Client>,
    key: String,
    options: PutOptions,
    /// Maximum memory held for parts in flight, besides the caller's own. With `borrowed` the caller's memory counts as well.
    max_bytes: u64,
    borrowed: bool,
    records: Vec<Crc32>,
    part: Part,
    /// Full parts that are not sent yet, because the object may still fit into one request.
    full: Vec<Part>,
    /// Bytes in full parts, and their checksum.
    offset: u64,
    crc32: Crc32,
    session: Option<Session>,
}

/// A part that is being gathered.
#[derive(Debug, Default)]
struct Part {
    pieces: Vec<Bytes>,
    /// Copies of small pieces that follow `pieces`.
    packed: BytesMut,
    packed_bytes: u64,
    crc32: Crc32,
    len: u64,
}

impl Part {
    fn add(&mut self, bytes: Bytes) {
        self.len += bytes.len() as u64;
        if bytes.len() < PACKED_BYTES {
            self.packed_bytes += bytes.len() as u64;
            self.packed.extend_from_slice(&bytes);
        } else {
            self.seal();
            self.pieces.push(bytes);
        }
    }

    fn seal(&mut self) {
        if !self.packed.is_empty() {
            self.pieces.push(mem::take(&mut self.packed).freeze());
        }
    }

    /// The payload of `parts`.
    fn payload(parts: Vec<Self>) -> Payload {
        let (mut pieces, mut crc32) = (Vec::new(), Crc32::default());
        for mut part in parts {
            part.seal();
            pieces.append(&mut part.pieces);
            crc32 = crc32.then(part.crc32);
        }
        Payload::with_crc32(pieces, crc32.value())
    }
}

impl Gather {
    /// A writer to `key`. Nothing is sent while the bytes fit into one request.
    ///
    /// The memory of the pieces must not change until the object is closed. With `borrowed_bytes` the memory is borrowed from its
    /// owner, and at most `borrowed_bytes` of it are in flight at once.
    ///
    /// # Errors
    /// `InvalidKey`, or `Unsupported` if the store does not support the condition.
    pub fn new(client: Arc<Client>, key: &str, options: PutOptions, borrowed_bytes: Option<u64>) -> Result<Self> {
        client.store().check_key(Operation::Put, key)?;
        client.check_condition(Operation::Put, key, &options.condition)?;
        let max_bytes =
            borrowed_bytes.unwrap_or(client.policy().write_buffer_bytes).max(2 * client.part_sizes().first_bytes);
        let checksums = client.store().capabilities().checksums;
        let checksum = Some(ChecksumAlgorithm::Crc32).filter(|crc32| checksums.contains(crc32));
        Ok(Self {
            client,
            key: key.to_owned(),
            options: PutOptions { checksum, ..options },
            max_bytes,
            borrowed: borrowed_bytes.is_some(),
            records: Vec::new(),
            part: Part::default(),
            full: Vec::new(),
            offset: 0,
            crc32: Crc32::default(),
            session: None,
        })
    }

    /// Returns the checksum of the concatenation of `records`, all of which must be written.
    fn crc32(&self, records: Range<usize>) -> Result<u32> {
        let sums = self.records.get(records.clone()).ok_or_else(|| {
            let message = format!("checksum of records {records:?}: only {} records are written", self.records.len());
            self.client.store().error(ErrorKind::Config, Operation::Put, &self.key, &message)
        })?;
        Ok(sums.iter().fold(Crc32::default(), |whole, sum| whole.then(*sum)).value())
    }

    /// Writes pieces. Waits while too many bytes are in flight.
    ///
    /// # Errors
    /// `Config` for the checksum of a record that is not written; the error of a part, after its retries. The upload is
    /// aborted.
    pub async fn write(&mut self, pieces: Vec<Piece>) -> Result<()> {
        match self.try_write(pieces).await {
            Ok(()) => Ok(()),
            Err(error) => {
                self.abort().await;
                Err(error)
            }
        }
    }

    async fn try_write(&mut self, pieces: Vec<Piece>) -> Result<()> {
        for piece in pieces {
            match piece {
                Piece::Literal(bytes) => self.add(bytes, None).await?,
                Piece::Record(bytes) => {
                    self.records.push(Crc32::default());
                    self.add(bytes, Some(self.records.len() - 1)).await?;
                }
                Piece::Crc32(records) => {
                    let value = self.crc32(records)?;
                    self.add(Bytes::copy_from_slice(&value.to_le_bytes()), None).await?;
                }
            }
        }
        Ok(())
    }

    async fn add(&mut self, mut bytes: Bytes, record: Option<usize>) -> Result<()> {
        loop {
            let next = self.session.as_ref().map_or(1, Session::next_number);
            let number = next.saturating_add(u32::try_from(self.full.len()).unwrap_or(u32::MAX));
            let free_bytes = self.client.part_sizes().growing(number) - self.part.len;
            let bytes_now = bytes.split_to(bytes.len().min(usize::try_from(free_bytes).unwrap_or(usize::MAX)));
            match record {
                Some(record) => Crc32::add(&bytes_now, [&mut self.part.crc32, &mut self.records[record]]),
                None => Crc32::add(&bytes_now, [&mut self.part.crc32]),
            }
            self.part.add(bytes_now);
            if bytes.is_empty() {
                return Ok(());
            }
            self.send_part().await?;
            // The checksum of a part takes a millisecond: other tasks share this thread.
            tokio::task::yield_now().await;
        }
    }

    /// Ends the current part, and sends it unless the object may still fit into one request.
    async fn send_part(&mut self) -> Result<()> {
        self.end_part();
        if self.session.is_none() && self.offset < self.client.whole_below_bytes() {
            return Ok(());
        }
        self.send_full().await
    }

    /// Ends the current part.
    fn end_part(&mut self) {
        let part = mem::take(&mut self.part);
        self.offset += part.len;
        self.crc32 = self.crc32.then(part.crc32);
        self.full.push(part);
    }

    /// Sends the full parts, after the beginning of the upload.
    async fn send_full(&mut self) -> Result<()> {
        let session = match &mut self.session {
            Some(session) => session,
            None => self.session.insert(Session::begin(self.client.clone(), &self.key, &self.options).await?),
        };
        for part in mem::take(&mut self.full) {
            let held_bytes = if self.borrowed { part.len } else { part.packed_bytes };
            session.wait_for_capacity(held_bytes, self.max_bytes).await?;
            session.send(Part::payload(vec![part]), held_bytes)?;
        }
        Ok(())
    }

    /// Sends the remaining bytes and makes the object, in one request if it is small. Returns its version, size and CRC-32.
    ///
    /// # Errors
    /// The error of a part or of the commit, after its retries. An earlier object under this key is unchanged.
    pub async fn close(&mut self) -> Result<(Version, u64, u32)> {
        self.end_part();
        let (size, crc32) = (self.offset, self.crc32.value());
        if self.session.is_none() && size <= self.client.store().capabilities().max_put_bytes {
            let payload = Part::payload(mem::take(&mut self.full));
            return Ok((self.client.put_whole(&self.key, &payload, &self.options).await?, size, crc32));
        }
        if let Err(error) = self.send_full().await {
            self.abort().await;
            return Err(error);
        }
        let session = self.session.take().expect("send_full begins it");
        Ok((session.commit(&self.options.condition).await?, size, crc32))
    }

    /// Discards all bytes and aborts the upload. An earlier object under this key is unchanged.
    pub async fn abort(&mut self) {
        (self.part, self.full) = (Part::default(), Vec::new());
        if let Some(mut session) = self.session.take() {
            session.abort().await;
        }
    }
}
