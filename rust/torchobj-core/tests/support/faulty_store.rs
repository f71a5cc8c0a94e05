//! A store with scripted faults, for tests of the policies without a network. Unit tests and tests of the crate include it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;

use torchobj_core::buffer::{Dest, Memory, PendingBuffer};
use torchobj_core::error::{Error, ErrorKind, Operation, Result};
use torchobj_core::store::{GetResult, ObjectChecksum, ObjectStore};
use torchobj_core::types::{
    Attributes, Capabilities, Condition, GetRequest, ListPage, ListRequest, ObjectHead, PartReceipt, Payload,
    PutOptions, Upload, Version,
};
use torchobj_core::url::ObjectUrl;

/// The fault of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The call fails with this kind, without an effect.
    Fail(ErrorKind),
    /// The call takes effect, but its response is lost.
    LoseResponse,
    /// The call is delayed by this time.
    Delay(Duration),
    /// The store completes the commit after this time, even if the caller has cancelled it, and sends no response.
    CommitWithoutResponse(Duration),
    /// The connection breaks after this many bytes of the body.
    CutBody(usize),
    /// The body stalls after this many bytes.
    StallBody(usize),
    /// The body arrives at this many bytes per second.
    DripBody(usize),
    /// The call panics without an effect, as a bug of a store would.
    Panic,
    /// The response has the range one byte before the requested one.
    WrongRange,
    /// The response to a HEAD request has this size.
    WrongSize(u64),
    /// The store ignores the `start_after` of the listing.
    IgnoreStart,
}

type Script = Arc<Mutex<Vec<(Operation, VecDeque<Fault>)>>>;

/// Makes a page of a listing from its number, from 0, and the request.
type MakePage = Box<dyn FnMut(usize, &ListRequest<'_>) -> ListPage + Send>;

/// Scripted listings that replace those of the inner store.
struct Listings {
    ordered: bool,
    requests: usize,
    make: MakePage,
}

impl std::fmt::Debug for Listings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Listings({} requests)", self.requests)
    }
}

/// A store with scripted faults, above another store.
#[derive(Debug)]
pub(crate) struct FaultyStore {
    inner: Arc<dyn ObjectStore>,
    script: Script,
    listings: Mutex<Option<Listings>>,
    identity: String,
}

impl FaultyStore {
    /// `inner` without faults.
    pub(crate) fn new(inner: Arc<dyn ObjectStore>) -> Self {
        Self { inner, script: Script::default(), listings: Mutex::default(), identity: String::new() }
    }

    /// The same at another endpoint.
    #[cfg(test)]
    pub(crate) fn at(self, identity: &str) -> Self {
        Self { identity: identity.to_owned(), ..self }
    }

    /// Adds faults for the next calls of `operation`, one per call.
    pub(crate) fn script(&self, operation: Operation, faults: impl IntoIterator<Item = Fault>) {
        let mut script = self.script.lock().expect("no holder of this lock panics");
        script.push((operation, faults.into_iter().collect()));
    }

    /// Replaces listings by pages that `make` returns. `ordered` is the capability of the store.
    pub(crate) fn list_by(
        &self,
        ordered: bool,
        make: impl FnMut(usize, &ListRequest<'_>) -> ListPage + Send + 'static,
    ) {
        let listings = Listings { ordered, requests: 0, make: Box::new(make) };
        *self.listings.lock().expect("no holder of this lock panics") = Some(listings);
    }

    /// Number of faults that are left.
    pub(crate) fn pending(&self) -> usize {
        self.script.lock().expect("no holder of this lock panics").iter().map(|(_, faults)| faults.len()).sum()
    }

    fn next(&self, operation: Operation) -> Option<Fault> {
        let mut script = self.script.lock().expect("no holder of this lock panics");
        script.iter_mut().filter(|(of, _)| *of == operation).find_map(|(_, faults)| faults.pop_front())
    }

    async fn call<T>(&self, operation: Operation, key: &str, call: impl Future<Output = Result<T>>) -> Result<T> {
        self.call_with(self.next(operation), operation, key, call).await
    }

    async fn call_with<T>(
        &self,
        fault: Option<Fault>,
        operation: Operation,
        key: &str,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let reset = |message| Err(self.inner.error(ErrorKind::Reset, operation, key, message));
        match fault {
            None => call.await,
            Some(Fault::Fail(kind)) => Err(self.inner.error(kind, operation, key, "by script")),
            Some(Fault::LoseResponse) => {
                call.await?;
                reset("the response was lost by script")
            }
            Some(Fault::Panic) => panic!("{operation} of {key}, by script"),
            Some(Fault::Delay(by)) => {
                tokio::time::sleep(by).await;
                call.await
            }
            Some(body @ (Fault::CutBody(_) | Fault::StallBody(_) | Fault::DripBody(_) | Fault::WrongRange)) => {
                panic!("{body:?} is for reads, not for {operation}")
            }
            Some(fault @ Fault::CommitWithoutResponse(_)) => panic!("{fault:?} is for commits, not for {operation}"),
            Some(fault @ Fault::WrongSize(_)) => panic!("{fault:?} is for HEAD requests, not for {operation}"),
            Some(Fault::IgnoreStart) => panic!("it is for listings, not for {operation}"),
        }
    }
}

struct FaultyBody {
    inner: Box<dyn GetResult>,
    fault: Fault,
    error: Option<Error>,
}

#[async_trait]
impl GetResult for FaultyBody {
    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn version(&self) -> Option<&Version> {
        self.inner.version()
    }

    fn has_length(&self) -> bool {
        self.inner.has_length()
    }

    fn range(&self) -> Range<u64> {
        let Range { start, end } = self.inner.range();
        if self.fault == Fault::WrongRange { start.saturating_sub(1)..end.saturating_sub(1) } else { start..end }
    }

    fn attributes(&self) -> Attributes {
        self.inner.attributes()
    }

    fn checksum(&self) -> Option<ObjectChecksum> {
        self.inner.checksum()
    }

    async fn read_into(&mut self, dest: &mut Dest) -> Result<()> {
        if let Fault::DripBody(bytes_per_s) = self.fault {
            while dest.remaining() > 0 {
                tokio::time::sleep(Duration::from_secs(1)).await;
                let length = bytes_per_s.min(dest.remaining());
                let (_pending, mut piece) =
                    PendingBuffer::new(Memory::allocate(length).expect("tests allocate little memory"));
                self.inner.read_into(&mut piece).await?;
                dest.fill(piece.written());
            }
            return Ok(());
        }
        let (Fault::CutBody(left) | Fault::StallBody(left)) = &mut self.fault else {
            return self.inner.read_into(dest).await;
        };
        let capacity = dest.remaining();
        if capacity <= *left {
            self.inner.read_into(dest).await?;
            *left -= capacity - dest.remaining();
            return Ok(());
        }
        let (_pending, mut piece) = PendingBuffer::new(Memory::allocate(*left).expect("tests allocate little memory"));
        self.inner.read_into(&mut piece).await?;
        *left -= dest.fill(piece.written());
        match self.error.take() {
            Some(error) if matches!(self.fault, Fault::CutBody(_)) => Err(error),
            _ => std::future::pending().await,
        }
    }
}

#[async_trait]
impl ObjectStore for FaultyStore {
    fn url(&self, key: &str) -> String {
        self.inner.url(key)
    }

    fn identity(&self) -> String {
        self.identity.clone()
    }

    async fn cache_identity(&self) -> Option<String> {
        Some(self.identity())
    }

    fn capabilities(&self) -> Capabilities {
        let capabilities = self.inner.capabilities();
        match &*self.listings.lock().expect("no holder of this lock panics") {
            Some(listings) => {
                Capabilities { ordered_listing: listings.ordered, parallel_listing: false, ..capabilities }
            }
            None => capabilities,
        }
    }

    async fn open(&self, request: GetRequest<'_>) -> Result<Box<dyn GetResult>> {
        let key = request.key;
        let fault = self.next(Operation::Get);
        match fault {
            Some(fault @ (Fault::CutBody(_) | Fault::StallBody(_) | Fault::DripBody(_) | Fault::WrongRange)) => {
                let inner = self.inner.open(request).await?;
                let error = self.inner.error(ErrorKind::Reset, Operation::Get, key, "the body was cut by script");
                Ok(Box::new(FaultyBody { inner, fault, error: Some(error) }))
            }
            Some(Fault::Fail(kind)) => Err(self.inner.error(kind, Operation::Get, key, "by script")),
            Some(Fault::LoseResponse) => Err(self.inner.error(ErrorKind::Reset, Operation::Get, key, "by script")),
            Some(Fault::Panic) => panic!("read of {key}, by script"),
            Some(fault @ (Fault::CommitWithoutResponse(_) | Fault::WrongSize(_) | Fault::IgnoreStart)) => {
                panic!("{fault:?} is not for reads")
            }
            Some(Fault::Delay(by)) => {
                tokio::time::sleep(by).await;
                self.inner.open(request).await
            }
            None => self.inner.open(request).await,
        }
    }

    async fn head(&self, key: &str) -> Result<ObjectHead> {
        self.call(Operation::Head, key, self.inner.head(key)).await
    }

    async fn head_with_checksum(&self, key: &str) -> Result<ObjectHead> {
        let fault = self.next(Operation::Head);
        if let Some(Fault::WrongSize(size)) = fault {
            return Ok(ObjectHead { size, ..self.inner.head_with_checksum(key).await? });
        }
        self.call_with(fault, Operation::Head, key, self.inner.head_with_checksum(key)).await
    }

    async fn list(&self, mut request: ListRequest<'_>) -> Result<ListPage> {
        if let Some(listings) = &mut *self.listings.lock().expect("no holder of this lock panics") {
            listings.requests += 1;
            return Ok((listings.make)(listings.requests - 1, &request));
        }
        let mut fault = self.next(Operation::List);
        if fault == Some(Fault::IgnoreStart) {
            (request.start_after, fault) = (None, None);
        }
        self.call_with(fault, Operation::List, request.prefix, self.inner.list(request.clone())).await
    }

    async fn put(&self, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version> {
        self.call(Operation::Put, key, self.inner.put(key, payload, options)).await
    }

    async fn begin_upload(&self, key: &str, options: &PutOptions) -> Result<Upload> {
        self.call(Operation::BeginUpload, key, self.inner.begin_upload(key, options)).await
    }

    async fn put_part(&self, upload: &Upload, number: u32, offset: u64, payload: &Payload) -> Result<PartReceipt> {
        self.call(Operation::PutPart, &upload.key, self.inner.put_part(upload, number, offset, payload)).await
    }

    async fn commit(&self, upload: &Upload, parts: &[PartReceipt], condition: &Condition) -> Result<Version> {
        let fault = self.next(Operation::Commit);
        if let Some(Fault::CommitWithoutResponse(after)) = fault {
            let (inner, upload, parts) = (self.inner.clone(), upload.clone(), parts.to_vec());
            let condition = condition.clone();
            tokio::spawn(async move {
                tokio::time::sleep(after).await;
                inner.commit(&upload, &parts, &condition).await
            });
            return std::future::pending().await;
        }
        self.call_with(fault, Operation::Commit, &upload.key, self.inner.commit(upload, parts, condition)).await
    }

    async fn committed(&self, upload: &Upload, parts: &[PartReceipt]) -> Result<Option<Version>> {
        self.call(Operation::Head, &upload.key, self.inner.committed(upload, parts)).await
    }

    async fn abort(&self, upload: &Upload) -> Result<()> {
        self.call(Operation::Abort, &upload.key, self.inner.abort(upload)).await
    }

    async fn uploads(&self, prefix: &str) -> Result<Vec<Upload>> {
        self.call(Operation::ListUploads, prefix, self.inner.uploads(prefix)).await
    }

    async fn copy(&self, source: &ObjectUrl, key: &str) -> Result<Version> {
        self.call(Operation::Copy, key, self.inner.copy(source, key)).await
    }

    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, Error)>> {
        let key = keys.first().map_or("", String::as_str);
        self.call(Operation::Delete, key, self.inner.delete(keys)).await
    }

    async fn delete_if(&self, key: &str, version: &Version) -> Result<()> {
        self.call(Operation::Delete, key, self.inner.delete_if(key, version)).await
    }
}
