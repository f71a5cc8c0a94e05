//! Opens a read and checks that the response is to what was asked: its version, its size, its range. Reads no body.

use tokio::time::Instant;

use crate::client::Client;
use crate::error::{ErrorKind, Operation, Result};
use crate::store::Opened;
use crate::transfer::Permit;
use crate::types::{ByteRange, GetRequest, Version};

/// What every response to one read must be of, as far as it is known: from a listing, or from the first response.
#[derive(Clone, Debug, Default)]
pub(super) struct Expected {
    /// Size of the whole object in bytes.
    pub(super) size: Option<u64>,
    pub(super) version: Option<Version>,
}

impl Expected {
    /// A request for `range` of such an object.
    pub(super) fn request<'a>(&'a self, key: &'a str, range: Option<ByteRange>) -> GetRequest<'a> {
        GetRequest { key, range, size: self.size, version: self.version.as_ref() }
    }
}

/// A response whose body is not read yet, and the permit of its request.
pub(super) struct First {
    pub(super) opened: Box<dyn Opened>,
    pub(super) answered: Instant,
    pub(super) permit: Permit,
}

impl Client {
    /// Opens a read, with retries.
    pub(super) async fn open_first(&self, request: GetRequest<'_>, bytes: u64) -> Result<First> {
        let mut attempts = self.attempts();
        loop {
            match self.open_once(request.clone(), bytes).await {
                Ok(first) => {
                    attempts.succeeded();
                    return Ok(first);
                }
                Err(error) => attempts.failed(error).await?,
            }
        }
    }

    /// One attempt to open a read of about `bytes`.
    pub(super) async fn open_once(&self, request: GetRequest<'_>, bytes: u64) -> Result<First> {
        let permit = self.permit().await;
        match self.open(request.clone(), bytes).await {
            Ok((opened, answered)) => {
                self.check(&request, &*opened)?;
                Ok(First { opened, answered, permit })
            }
            // Refused as behind the end of an object that is known to be longer.
            Err(error) if error.kind() == ErrorKind::Range && contains(&request) => {
                let size = request.size.unwrap_or_default();
                Err(error
                    .with_kind(ErrorKind::Protocol)
                    .with_hint(format!("the object is expected to have {size} bytes")))
            }
            Err(error) => Err(error),
        }
    }

    /// Refuses a response that is not to `request`. A store that ignores ranges may answer with the whole object, if
    /// that begins where the range does.
    fn check(&self, request: &GetRequest<'_>, opened: &dyn Opened) -> Result<()> {
        let refuse = |kind, message: &str| Err(self.store().error(kind, Operation::Get, request.key, message));
        if let (Some(asked), Some(got)) = (request.version, opened.version())
            && asked != got
        {
            return refuse(ErrorKind::Changed, &format!("the object changed: it was {asked:?}, now it is {got:?}"));
        }
        let (size, answered) = (opened.size(), opened.range());
        if let Some(expected) = request.size.filter(|expected| *expected != size) {
            let message = format!("expected an object of {expected} bytes, the response is of one of {size} bytes");
            return refuse(ErrorKind::Protocol, &message);
        }
        if request.version.is_some() && opened.version().is_none() {
            return refuse(ErrorKind::Protocol, "the response does not say which version it is of");
        }
        let expected = match &request.range {
            None => 0..size,
            Some(ByteRange::Bounded(range)) => range.start..range.end.min(size),
            Some(ByteRange::From(start)) => *start..size,
            Some(ByteRange::Suffix(length)) => size.saturating_sub(*length)..size,
        };
        if answered != expected && !(answered == (0..size) && expected.start == 0) {
            let message = format!("asked for bytes {expected:?} of {size}, the response has {answered:?}");
            return refuse(ErrorKind::Protocol, &message);
        }
        Ok(())
    }
}

/// Whether the object has bytes in the range that is asked for, as far as is known.
fn contains(request: &GetRequest<'_>) -> bool {
    request.size.is_some_and(|size| ByteRange::resolve(request.range.as_ref(), size).is_some() && size > 0)
}
