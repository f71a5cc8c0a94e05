//! Writes an object that is gathered from memory of the caller's, as `writev` gathers: parts are cut from it without a
//! copy, and may be sent again from it. What is small is packed, so that a part is few pieces.
//!
//! Zip files, and what torch saves in them, have the CRC-32 of a record behind it: it is taken once, as the record goes by,
//! and is the checksum of the part too. The object appears by [`Gather::close`], if nothing failed, and by nothing else.

use std::mem;
use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use super::session::Session;
use crate::client::Client;
use crate::crc32::Crc32;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::types::{ChecksumAlgorithm, Payload, PutOptions, Version};

/// Below this a piece is copied: the kernel takes few pieces by one call.
const PACKED_BYTES: usize = 4 << 10;

/// What an object is gathered from.
#[derive(Clone, Debug)]
pub enum Piece {
    /// Bytes as they are.
    Literal(Bytes),
    /// Bytes whose checksum is asked for later. Records are counted from 0.
    Record(Bytes),
    /// The CRC-32 of these records, one behind the other, little-endian; all were written before.
    Crc32(Range<usize>),
}

/// An object that is being gathered.
#[derive(Debug)]
pub struct Gather {
    client: Arc<Client>,
    key: String,
    options: PutOptions,
    /// What may be held for it at once that is not the caller's own memory; with `lent`, so is all that is written.
    most_bytes: u64,
    lent: bool,
    records: Vec<Crc32>,
    part: Part,
    /// Full parts of an object that may still become one request.
    full: Vec<Part>,
    /// Bytes in full parts, and their checksum.
    offset: u64,
    crc32: Crc32,
    /// Parts given to the session.
    number: u32,
    session: Option<Session>,
}

/// A part that is being gathered.
#[derive(Debug, Default)]
struct Part {
    pieces: Vec<Bytes>,
    /// What is to follow the pieces, and was copied.
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

    /// All of `parts`, to be sent.
    fn payload(parts: Vec<Self>) -> Payload {
        let (mut pieces, mut crc32) = (Vec::new(), Crc32::default());
        for mut part in parts {
            part.seal();
            pieces.append(&mut part.pieces);
            crc32 = crc32.then(part.crc32);
        }
        Payload::summed(pieces, crc32.value())
    }
}

impl Gather {
    /// An object `key` to be gathered. Nothing is sent before there is more than one request's worth.
    ///
    /// What is written is memory that stays as it is until the object is closed; with `lent_bytes` it is borrowed for the
    /// object only, and no more than so much of it is on the way at once.
    ///
    /// # Errors
    /// `InvalidKey`, or `Unsupported` when the store keeps no such condition.
    pub fn new(client: Arc<Client>, key: &str, options: PutOptions, lent_bytes: Option<u64>) -> Result<Self> {
        client.store().check_key(Operation::Put, key)?;
        client.check_condition(Operation::Put, key, &options.condition)?;
        let most_bytes =
            lent_bytes.unwrap_or(client.policy().write_buffer_bytes).max(2 * client.part_sizes().first_bytes);
        let checksums = client.store().capabilities().checksums;
        let checksum = Some(ChecksumAlgorithm::Crc32).filter(|crc32| checksums.contains(crc32));
        Ok(Self {
            client,
            key: key.to_owned(),
            options: PutOptions { checksum, ..options },
            most_bytes,
            lent: lent_bytes.is_some(),
            records: Vec::new(),
            part: Part::default(),
            full: Vec::new(),
            offset: 0,
            crc32: Crc32::default(),
            number: 0,
            session: None,
        })
    }

    /// The checksum of records that were written, one behind the other; `None` where there are not so many.
    fn crc32(&self, records: Range<usize>) -> Option<u32> {
        let sums = self.records.get(records)?;
        Some(sums.iter().fold(Crc32::default(), |whole, sum| whole.then(*sum)).value())
    }

    /// Writes pieces, waiting where too much is on the way.
    ///
    /// # Errors
    /// `Config` for a checksum of records that were not written; and what kept a part from arriving, after its retries.
    /// The upload is aborted then.
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
                    let value = self.crc32(records.clone()).ok_or_else(|| self.unwritten(&records))?;
                    self.add(Bytes::copy_from_slice(&value.to_le_bytes()), None).await?;
                }
            }
        }
        Ok(())
    }

    fn unwritten(&self, records: &Range<usize>) -> Error {
        let message = format!("the checksum of records {records:?} is asked for, {} were written", self.records.len());
        self.client.store().error(ErrorKind::Config, Operation::Put, &self.key, &message)
    }

    async fn add(&mut self, mut bytes: Bytes, record: Option<usize>) -> Result<()> {
        loop {
            let number = self.number + u32::try_from(self.full.len()).unwrap_or(u32::MAX) + 1;
            let room = self.client.part_sizes().growing(number) - self.part.len;
            let bytes_now = bytes.split_to(bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX)));
            match record {
                Some(record) => Crc32::add(&bytes_now, [&mut self.part.crc32, &mut self.records[record]]),
                None => Crc32::add(&bytes_now, [&mut self.part.crc32]),
            }
            self.part.add(bytes_now);
            if bytes.is_empty() {
                return Ok(());
            }
            self.send_part().await?;
            // Summing a part takes a millisecond: others share this thread.
            tokio::task::yield_now().await;
        }
    }

    /// The part is full: it is sent, unless all that there is may still be one request.
    async fn send_part(&mut self) -> Result<()> {
        self.fill();
        let whole_below = self.client.policy().whole_below_bytes.min(self.client.store().capabilities().max_put_bytes);
        if self.session.is_none() && self.offset < whole_below {
            return Ok(());
        }
        let mut session = match self.session.take() {
            Some(session) => session,
            None => Session::begin(self.client.clone(), &self.key, &self.options).await?,
        };
        let sent = self.send_full(&mut session).await;
        self.session = Some(session);
        sent
    }

    /// The part ends here.
    fn fill(&mut self) {
        let part = mem::take(&mut self.part);
        self.offset += part.len;
        self.crc32 = self.crc32.then(part.crc32);
        self.full.push(part);
    }

    async fn send_full(&mut self, session: &mut Session) -> Result<()> {
        let mut offset = self.offset - self.full.iter().map(|part| part.len).sum::<u64>();
        for part in mem::take(&mut self.full) {
            let (len, held_bytes) = (part.len, if self.lent { part.len } else { part.packed_bytes });
            session.room(held_bytes, self.most_bytes).await?;
            self.number += 1;
            session.send(self.number, offset, Part::payload(vec![part]), held_bytes)?;
            offset += len;
        }
        Ok(())
    }

    /// Sends what is left and makes the object, in one request if it is small. Says its version, size and CRC-32.
    ///
    /// # Errors
    /// What kept a part, or the commit, from succeeding, after its retries. The object is what it was before.
    pub async fn close(&mut self) -> Result<(Version, u64, u32)> {
        self.fill();
        let (size, crc32) = (self.offset, self.crc32.value());
        let mut session = match self.session.take() {
            Some(session) => session,
            None if size <= self.client.store().capabilities().max_put_bytes => {
                let payload = Part::payload(mem::take(&mut self.full));
                return Ok((self.client.put_whole(&self.key, &payload, &self.options).await?, size, crc32));
            }
            None => Session::begin(self.client.clone(), &self.key, &self.options).await?,
        };
        if let Err(error) = self.send_full(&mut session).await {
            session.abort().await;
            return Err(error);
        }
        Ok((session.commit(&self.options.condition).await?, size, crc32))
    }

    /// Forgets everything. The object is what it was before.
    pub async fn abort(&mut self) {
        (self.part, self.full) = (Part::default(), Vec::new());
        if let Some(mut session) = self.session.take() {
            session.abort().await;
        }
    }
}
