//! Opens a read and checks that the response matches the request: version, size and range. Reads no body.

use tokio::time::Instant;

use crate::client::Client;
use crate::error::{ErrorKind, Operation, Result};
use crate::policy::Permit;
use crate::store::GetResult;
use crate::types::{ByteRange, GetRequest, Version};

/// What all responses to one read must match, as far as it is known from a listing or from the first response.
#[derive(Clone, Debug, Default)]
pub(crate) struct Expected {
    /// Size of the whole object in bytes.
    pub(crate) size: Option<u64>,
    pub(crate) version: Option<Version>,
}

impl Expected {
    /// A request for `range` of the expected object.
    pub(crate) fn request<'a>(&'a self, key: &'a str, range: Option<ByteRange>) -> GetRequest<'a> {
        GetRequest { range, size: self.size, version: self.version.as_ref(), ..GetRequest::whole(key) }
    }

    /// What the other responses to the read must match after the first one, which has the expected version if there is one.
    pub(crate) fn after(self, first: &dyn GetResult) -> Self {
        let version = self.version.or_else(|| first.version().cloned().map(Version::found));
        Self { size: Some(first.size()), version }
    }
}

/// A response whose body was not read yet, and the permit of its request.
pub(crate) struct First {
    pub(crate) result: Box<dyn GetResult>,
    pub(crate) requested_at: Instant,
    pub(crate) response_at: Instant,
    /// The permit of its request; `None` if the object is on the local disk.
    pub(crate) permit: Option<Permit>,
}

impl Client {
    /// Opens a read, with retries.
    pub(crate) async fn open_first(&self, request: GetRequest<'_>, bytes: u64) -> Result<First> {
        self.retry(|| self.open_once(request.clone(), bytes)).await
    }

    /// One attempt to open a read of about `bytes` bytes, on the local disk if the object is there.
    pub(crate) async fn open_once(&self, request: GetRequest<'_>, bytes: u64) -> Result<First> {
        let Some(result) = self.store().open_local(&request).await else {
            return self.request_once(request, bytes).await;
        };
        self.check(&request, &*result)?;
        let now = Instant::now();
        Ok(First { result, requested_at: now, response_at: now, permit: None })
    }

    /// One attempt to request a read of about `bytes` bytes from the store.
    pub(super) async fn request_once(&self, request: GetRequest<'_>, bytes: u64) -> Result<First> {
        let permit = self.permit().await;
        match self.open(request.clone(), bytes).await {
            Ok((result, [requested_at, response_at])) => {
                self.check(&request, &*result)?;
                Ok(First { result, requested_at, response_at, permit: Some(permit) })
            }
            // Refused as beyond the end, although the object is known to be longer.
            Err(error) if error.kind() == ErrorKind::Range && contains(&request) => {
                let size = request.size.unwrap_or_default();
                Err(error
                    .with_kind(ErrorKind::Protocol)
                    .with_hint(format!("the object is expected to have {size} bytes")))
            }
            Err(error) => Err(error),
        }
    }

    /// Returns an error if a response does not match `request`. A store that ignores ranges may respond with the whole
    /// object, if the range starts at 0.
    fn check(&self, request: &GetRequest<'_>, result: &dyn GetResult) -> Result<()> {
        let refuse = |kind, message: &str| Err(self.store().error(kind, Operation::Get, request.key, message));
        if let (Some(expected), Some(actual)) = (request.version, result.version())
            && expected != actual
        {
            return refuse(
                ErrorKind::Changed,
                &format!("the object changed: it was {expected:?}, now it is {actual:?}"),
            );
        }
        let (size, answered) = (result.size(), result.range());
        if let Some(expected) = request.size.filter(|expected| *expected != size) {
            let message = format!("expected an object of {expected} bytes, the response is for one of {size} bytes");
            return refuse(ErrorKind::Protocol, &message);
        }
        if request.version.is_some() && result.version().is_none() {
            return refuse(ErrorKind::Protocol, "the response has no version");
        }
        let expected = match &request.range {
            None => 0..size,
            Some(ByteRange::Bounded(range)) => range.start..range.end.min(size),
            Some(ByteRange::From(start)) => *start..size,
            Some(ByteRange::Suffix(length)) => size.saturating_sub(*length)..size,
        };
        if answered != expected && !(answered == (0..size) && expected.start == 0) {
            let message = format!("requested bytes {expected:?} of {size}, the response has {answered:?}");
            // A server without ranges from the end, of which the same bytes are requested from the start; or one that responds
            // with no bytes to a range beyond the object, instead of with 416.
            let is_suffix = matches!(request.range, Some(ByteRange::Suffix(_)));
            let is_beyond = answered.is_empty() && expected.start >= size;
            return refuse(if is_suffix || is_beyond { ErrorKind::Range } else { ErrorKind::Protocol }, &message);
        }
        Ok(())
    }
}

/// Returns whether the object has bytes in the requested range, as far as its size is known.
fn contains(request: &GetRequest<'_>) -> bool {
    request.size.is_some_and(|size| ByteRange::resolve(request.range.as_ref(), size).is_some() && size > 0)
}
