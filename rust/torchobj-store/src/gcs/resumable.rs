//! Resumable uploads: the bytes of an object in order, in chunks that the server acknowledges ("Resumable uploads"). For
//! buckets whose parts would cost extra or could not be deleted.
//!
//! All chunks but the last are multiples of 256 KiB, so the rest of a part is kept and sent with the next one. After a
//! failure, the server is asked how many bytes it has.

use std::borrow::Cow;

use bytes::Bytes;
use tokio::sync::Mutex;
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::types::{Condition, PartReceipt, Payload};

use super::request::{Bucket, BucketDialect};
use super::resource::{FIELDS, Resource, Written, encode, totals};
use crate::http::{Dialect, Request, Response, exchange, redirect};

/// Chunks other than the last are multiples of this size.
const GRANULARITY: u64 = 256 << 10;

/// A resumable upload.
pub(super) struct Resumable {
    /// Path and query of its session. They authorize writes.
    session: Vec<u8>,
    condition: Condition,
    /// The nonce in the metadata of the object.
    nonce: Option<String>,
    /// Held while a chunk is sent.
    state: Mutex<ResumableState>,
}

/// What the server has.
#[derive(Default)]
struct ResumableState {
    /// Number of bytes that the server has stored.
    stored: u64,
    /// The following bytes of the last part.
    rest: Bytes,
    /// Whether a request failed, so that `stored` may be too small.
    uncertain: bool,
}

/// The response to a chunk.
enum ChunkResponse {
    /// The number of bytes that the server has stored.
    Stored(u64),
    /// The object.
    Complete(Box<Resource>),
}

impl Bucket {
    /// Starts a resumable upload.
    pub(super) async fn start_resumable(
        &self,
        key: &str,
        object: &Resource,
        condition: &Condition,
    ) -> Result<Resumable> {
        let operation = Operation::BeginUpload;
        let mut object = object.clone();
        key.clone_into(&mut object.name);
        let payload = Payload::from(Bytes::from(serde_json::to_vec(&object).expect("strings are valid JSON")));
        let mut query = self.write_query(condition);
        query.extend([("uploadType", "resumable"), ("fields", FIELDS)]);
        let headers = vec![("content-type", Cow::Borrowed("application/json; charset=UTF-8"))];
        let request = self.request(operation, "POST", Some(key), self.upload_path(), &query, headers, &payload);
        let response = self.send(&request).await?;
        let location = response.header("location").unwrap_or_default();
        let session = self.session_path(location).map_err(|message| {
            // The message must not contain the location: it authorizes writes.
            self.protocol(operation, key, &message)
        })?;
        let nonce = object.nonce().map(str::to_owned);
        Ok(Resumable { session, condition: condition.clone(), nonce, state: Mutex::default() })
    }

    /// Path and query of a session, which must be on the server of the bucket.
    fn session_path(&self, location: &str) -> std::result::Result<Vec<u8>, String> {
        let origin = &self.account.origin;
        if let Some(()) = redirect::resolve(location, origin.pool.server(), |_| None::<()>)? {
            unreachable!("no other host is accepted");
        }
        let path = match location.split_once("://") {
            Some((_, rest)) => rest.find('/').map_or("", |at| &rest[at..]),
            None => location,
        };
        let below = path.as_bytes().strip_prefix(&*origin.path).unwrap_or_default();
        if below.is_empty() || !below.iter().all(u8::is_ascii_graphic) {
            return Err("the response has no valid Location".to_owned());
        }
        Ok(below.to_vec())
    }

    /// Sends a part at `offset`, and returns its CRC32C. Keeps the end of the part that is not a multiple of 256 KiB.
    pub(super) async fn send_chunk(
        &self,
        key: &str,
        upload: &Resumable,
        offset: u64,
        payload: &Payload,
    ) -> Result<u32> {
        let operation = Operation::PutPart;
        let crc32c = self.crc32c(operation, key, payload)?;
        let mut state = upload.state.lock().await;
        let wrong = |message: &str| self.protocol(operation, key, message);
        let end = offset + payload.len() as u64;
        if state.uncertain {
            match self.chunk(operation, key, upload, &Payload::default(), "bytes */*".to_owned(), None).await? {
                ChunkResponse::Stored(stored) if stored >= state.stored && stored <= end => {
                    // A stored multiple of 256 KiB may lie within `rest` only if it is at its start.
                    if stored > state.stored {
                        if stored < offset {
                            return Err(wrong("the server has stored a part of a chunk that is smaller than 256 KiB"));
                        }
                        (state.stored, state.rest) = (stored, Bytes::new());
                    }
                }
                ChunkResponse::Stored(stored) => {
                    return Err(wrong(&format!("the server has {stored} bytes, but only {end} were sent")));
                }
                ChunkResponse::Complete(_) => return Err(wrong("the server completed the upload before its end")),
            }
            state.uncertain = false;
        }
        let until = end / GRANULARITY * GRANULARITY;
        while state.stored < until {
            let chunk = bytes_from(&state, offset, payload, until);
            let range = format!("bytes {}-{}/*", state.stored, until - 1);
            state.uncertain = true;
            match self.chunk(operation, key, upload, &chunk, range, None).await? {
                ChunkResponse::Stored(stored) if stored > state.stored && stored <= until && stored >= offset => {
                    *state = ResumableState { stored, ..ResumableState::default() };
                }
                ChunkResponse::Stored(stored) => {
                    let message = format!("the server stored no byte of the chunk: it has {stored} bytes");
                    return Err(self.incomplete(operation, key, &message));
                }
                ChunkResponse::Complete(_) => return Err(wrong("the server completed the upload before its end")),
            }
        }
        let rest = bytes_from(&state, offset, payload, end);
        state.rest = rest.pieces().concat().into();
        Ok(crc32c)
    }

    /// Sends the last bytes, which makes the object.
    pub(super) async fn finish_resumable(
        &self,
        key: &str,
        upload: &Resumable,
        receipts: &[PartReceipt],
        condition: &Condition,
    ) -> Result<Resource> {
        let operation = Operation::Commit;
        if *condition != upload.condition {
            let message = "the condition of a resumable upload must be given when it begins";
            return Err(self.error(ErrorKind::Unsupported, operation, Some(key), message));
        }
        let (size, crc32c) = totals(receipts);
        let mut state = upload.state.lock().await;
        let expected = state.stored + state.rest.len() as u64;
        let in_order = receipts
            .iter()
            .try_fold(0, |at, receipt| (receipt.version.as_str() == at.to_string()).then_some(at + receipt.size));
        if in_order != Some(expected) {
            let message = format!("the parts are not consecutive, or do not have the {expected} bytes that were sent");
            return Err(self.error(ErrorKind::InvalidRequest, operation, Some(key), &message));
        }
        let mut chunk = ChunkResponse::Stored(state.stored);
        if state.uncertain {
            let query = format!("bytes */{size}");
            chunk = self.chunk(operation, key, upload, &Payload::default(), query, Some(crc32c)).await?;
        }
        if let ChunkResponse::Stored(stored) = chunk {
            if stored != state.stored && stored != size {
                return Err(self.incomplete(operation, key, &format!("the server has {stored} of {size} bytes")));
            }
            let rest = if stored == size { Bytes::new() } else { state.rest.clone() };
            let range =
                if rest.is_empty() { format!("bytes */{size}") } else { format!("bytes {stored}-{}/{size}", size - 1) };
            state.uncertain = true;
            chunk = self.chunk(operation, key, upload, &Payload::from(rest), range, Some(crc32c)).await?;
        }
        match chunk {
            ChunkResponse::Complete(object) => {
                let written = Written { name: key, nonce: upload.nonce.as_deref(), size, crc32c };
                self.verify(operation, key, &written, *object).await
            }
            ChunkResponse::Stored(stored) => {
                Err(self.incomplete(operation, key, &format!("the server has {stored} of {size} bytes")))
            }
        }
    }

    /// The error of a server that has stored less than it was sent. It may store the rest when that is sent again.
    fn incomplete(&self, operation: Operation, key: &str, message: &str) -> Error {
        self.error(ErrorKind::Protocol, operation, Some(key), message)
    }

    /// Cancels an upload. Succeeds if it does not exist.
    pub(super) async fn cancel_resumable(&self, key: &str, upload: &Resumable) -> Result<()> {
        let (operation, payload) = (Operation::Abort, Payload::default());
        let path = upload.session.clone();
        let request = self.request(operation, "DELETE", Some(key), path, &[], Vec::new(), &payload);
        let (response, dialect) = self.response_of(&request).await?;
        match response.status {
            // 499: cancelled.
            200..=299 | 404 | 410 | 499 => Ok(()),
            _ => Err(response.into_error(operation, request.key, &dialect).await),
        }
    }

    /// Sends a chunk, or a query without bytes. `range` is its `Content-Range`; `crc32c` that of the object, which the server
    /// compares before it makes the object.
    async fn chunk(
        &self,
        operation: Operation,
        key: &str,
        upload: &Resumable,
        chunk: &Payload,
        range: String,
        crc32c: Option<u32>,
    ) -> Result<ChunkResponse> {
        let path = upload.session.clone();
        let mut headers = vec![("content-range", Cow::Owned(range))];
        headers.extend(crc32c.map(|crc32c| ("x-goog-hash", Cow::Owned(format!("crc32c={}", encode(crc32c))))));
        let request = self.request(operation, "PUT", Some(key), path, &[], headers, chunk);
        let (response, dialect) = self.response_of(&request).await?;
        match response.status {
            // The header is absent if nothing is stored. The last byte is inclusive.
            308 => match response.header("range") {
                None => Ok(ChunkResponse::Stored(0)),
                Some(range) => {
                    // An emulator may send the range only, or in the form of a Content-Range.
                    let range = range.trim().trim_start_matches("bytes").trim_start_matches(['=', ' ']);
                    let last = range.strip_prefix("0-").and_then(|last| last.split('/').next()?.parse::<u64>().ok());
                    let invalid = || self.protocol(operation, key, "the Range header is not valid");
                    Ok(ChunkResponse::Stored(last.and_then(|last| last.checked_add(1)).ok_or_else(invalid)?))
                }
            },
            200..=299 => Ok(ChunkResponse::Complete(Box::new(self.parse(operation, request.key, response).await?))),
            404 | 410 => {
                let error = response.into_error(operation, request.key, &dialect).await;
                Err(error.with_kind(ErrorKind::UploadGone))
            }
            _ => Err(response.into_error(operation, request.key, &dialect).await),
        }
    }

    /// Sends a request and returns its response with any status.
    async fn response_of(&self, request: &Request<'_>) -> Result<(Response, BucketDialect<'_>)> {
        let dialect = self.dialect(request.operation).await?;
        let response = exchange(request, &self.account.origin, &dialect).await;
        let url = || dialect.url(request.key);
        Ok((response.map_err(|failure| failure.into_error(request.operation, url()))?, dialect))
    }
}

/// The bytes from what is stored to `until`: those of the rest, and those of the part at `offset`.
fn bytes_from(state: &ResumableState, offset: u64, payload: &Payload, until: u64) -> Payload {
    let mut pieces = Vec::new();
    if state.stored < offset {
        pieces.push(state.rest.clone());
    }
    let mut at = offset;
    for piece in payload.pieces() {
        let end = at + piece.len() as u64;
        let cut = |position: u64| usize::try_from(position.clamp(at, end) - at).expect("in memory");
        let (from, to) = (cut(state.stored), cut(until));
        if from < to {
            pieces.push(piece.slice(from..to));
        }
        at = end;
    }
    Payload::new(pieces)
}
