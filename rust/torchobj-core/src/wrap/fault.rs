//! A store that fails by script: what the policies must survive, over any store and without a network.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;

use crate::buffer::{Dest, Landing, Memory};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::store::{ObjectStore, Opened};
use crate::types::{
    Capabilities, Condition, GetRequest, ListPage, ListRequest, ObjectHead, PartReceipt, Payload, PutOptions, Upload,
    Version,
};
use crate::url::ObjectUrl;

/// What one call does instead of succeeding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Fails with this kind before anything is done.
    Fail(ErrorKind),
    /// Is done, and then its answer is lost.
    LoseAnswer,
    /// Answers after this long.
    Late(Duration),
    /// A commit that the store finishes after this long, even when the caller has given it up, without a response.
    CommitUnanswered(Duration),
    /// Breaks the body after so many bytes.
    CutBody(usize),
    /// Stands still in the body after so many bytes.
    StallBody(usize),
    /// Brings so many bytes of the body each second.
    DripBody(usize),
    /// Panics before anything is done: a bug of a store's.
    Panic,
    /// Answers with the bytes before those that were asked for.
    WrongRange,
}

type Script = Arc<Mutex<Vec<(Operation, VecDeque<Fault>)>>>;

/// Makes the pages of listings, of a number from 0 and the request.
type MakePage = Box<dyn FnMut(usize, &ListRequest<'_>) -> ListPage + Send>;

/// Listings in place of the inner store's.
struct Listings {
    ordered: bool,
    asked: usize,
    make: MakePage,
}

impl std::fmt::Debug for Listings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Listings({} asked)", self.asked)
    }
}

/// A store over another that fails by script.
#[derive(Debug)]
pub struct FaultyStore {
    inner: Arc<dyn ObjectStore>,
    script: Script,
    listings: Mutex<Option<Listings>>,
}

impl FaultyStore {
    /// `inner`, with nothing failing yet.
    pub fn new(inner: Arc<dyn ObjectStore>) -> Self {
        Self { inner, script: Script::default(), listings: Mutex::default() }
    }

    /// The next calls of `operation` meet these faults, one each.
    pub fn script(&self, operation: Operation, faults: impl IntoIterator<Item = Fault>) {
        let mut script = self.script.lock().expect("no holder of this lock panics");
        script.push((operation, faults.into_iter().collect()));
    }

    /// Listings are made by `make` from now on, and are said to be `ordered` or not.
    pub fn list_by(&self, ordered: bool, make: impl FnMut(usize, &ListRequest<'_>) -> ListPage + Send + 'static) {
        let listings = Listings { ordered, asked: 0, make: Box::new(make) };
        *self.listings.lock().expect("no holder of this lock panics") = Some(listings);
    }

    /// Faults that no call has met yet.
    pub fn pending(&self) -> usize {
        self.script.lock().expect("no holder of this lock panics").iter().map(|(_, faults)| faults.len()).sum()
    }

    fn next(&self, operation: Operation) -> Option<Fault> {
        let mut script = self.script.lock().expect("no holder of this lock panics");
        script.iter_mut().filter(|(of, _)| *of == operation).find_map(|(_, faults)| faults.pop_front())
    }

    async fn meet<T>(&self, operation: Operation, key: &str, call: impl Future<Output = Result<T>>) -> Result<T> {
        self.act(self.next(operation), operation, key, call).await
    }

    async fn act<T>(
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
            Some(Fault::LoseAnswer) => {
                call.await?;
                reset("the answer was lost by script")
            }
            Some(Fault::Panic) => panic!("{operation} of {key}, by script"),
            Some(Fault::Late(by)) => {
                tokio::time::sleep(by).await;
                call.await
            }
            Some(body @ (Fault::CutBody(_) | Fault::StallBody(_) | Fault::DripBody(_) | Fault::WrongRange)) => {
                panic!("{body:?} is for reads, not for {operation}")
            }
            Some(fault @ Fault::CommitUnanswered(_)) => panic!("{fault:?} is for commits, not for {operation}"),
        }
    }
}

struct FaultyBody {
    inner: Box<dyn Opened>,
    fault: Fault,
    error: Option<Error>,
}

#[async_trait]
impl Opened for FaultyBody {
    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn version(&self) -> Option<&Version> {
        self.inner.version()
    }

    fn announced(&self) -> bool {
        self.inner.announced()
    }

    fn range(&self) -> Range<u64> {
        let Range { start, end } = self.inner.range();
        if self.fault == Fault::WrongRange { start.saturating_sub(1)..end.saturating_sub(1) } else { start..end }
    }

    async fn read_into(&mut self, dest: &mut Dest) -> Result<()> {
        if let Fault::DripBody(bytes_per_s) = self.fault {
            while dest.remaining() > 0 {
                tokio::time::sleep(Duration::from_secs(1)).await;
                let length = bytes_per_s.min(dest.remaining());
                let (_landing, mut piece) = Landing::new(Memory::allocate(length).expect("a test has memory"));
                self.inner.read_into(&mut piece).await?;
                dest.fill(piece.written());
            }
            return Ok(());
        }
        let (Fault::CutBody(left) | Fault::StallBody(left)) = &mut self.fault else {
            return self.inner.read_into(dest).await;
        };
        let room = dest.remaining();
        if room <= *left {
            self.inner.read_into(dest).await?;
            *left -= room - dest.remaining();
            return Ok(());
        }
        let (_landing, mut piece) = Landing::new(Memory::allocate(*left).expect("a test has memory"));
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

    fn capabilities(&self) -> Capabilities {
        let capabilities = self.inner.capabilities();
        match &*self.listings.lock().expect("no holder of this lock panics") {
            Some(listings) => Capabilities { ordered_listing: listings.ordered, ..capabilities },
            None => capabilities,
        }
    }

    async fn open(&self, request: GetRequest<'_>) -> Result<Box<dyn Opened>> {
        let key = request.key;
        let fault = self.next(Operation::Get);
        match fault {
            Some(fault @ (Fault::CutBody(_) | Fault::StallBody(_) | Fault::DripBody(_) | Fault::WrongRange)) => {
                let inner = self.inner.open(request).await?;
                let error = self.inner.error(ErrorKind::Reset, Operation::Get, key, "the body was cut by script");
                Ok(Box::new(FaultyBody { inner, fault, error: Some(error) }))
            }
            Some(Fault::Fail(kind)) => Err(self.inner.error(kind, Operation::Get, key, "by script")),
            Some(Fault::LoseAnswer) => Err(self.inner.error(ErrorKind::Reset, Operation::Get, key, "by script")),
            Some(Fault::Panic) => panic!("read of {key}, by script"),
            Some(fault @ Fault::CommitUnanswered(_)) => panic!("{fault:?} is for commits, not for reads"),
            Some(Fault::Late(by)) => {
                tokio::time::sleep(by).await;
                self.inner.open(request).await
            }
            None => self.inner.open(request).await,
        }
    }

    async fn head(&self, key: &str) -> Result<ObjectHead> {
        self.meet(Operation::Head, key, self.inner.head(key)).await
    }

    async fn list(&self, request: ListRequest<'_>) -> Result<ListPage> {
        if let Some(listings) = &mut *self.listings.lock().expect("no holder of this lock panics") {
            listings.asked += 1;
            return Ok((listings.make)(listings.asked - 1, &request));
        }
        self.meet(Operation::List, request.prefix, self.inner.list(request.clone())).await
    }

    async fn put(&self, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version> {
        self.meet(Operation::Put, key, self.inner.put(key, payload, options)).await
    }

    async fn begin_upload(&self, key: &str, options: &PutOptions) -> Result<Upload> {
        self.meet(Operation::BeginUpload, key, self.inner.begin_upload(key, options)).await
    }

    async fn put_part(&self, upload: &Upload, number: u32, offset: u64, payload: &Payload) -> Result<PartReceipt> {
        self.meet(Operation::PutPart, &upload.key, self.inner.put_part(upload, number, offset, payload)).await
    }

    async fn commit(&self, upload: &Upload, parts: &[PartReceipt], condition: &Condition) -> Result<Version> {
        let fault = self.next(Operation::Commit);
        if let Some(Fault::CommitUnanswered(after)) = fault {
            let (inner, upload, parts) = (self.inner.clone(), upload.clone(), parts.to_vec());
            let condition = condition.clone();
            tokio::spawn(async move {
                tokio::time::sleep(after).await;
                inner.commit(&upload, &parts, &condition).await
            });
            return std::future::pending().await;
        }
        self.act(fault, Operation::Commit, &upload.key, self.inner.commit(upload, parts, condition)).await
    }

    async fn committed(&self, upload: &Upload, parts: &[PartReceipt]) -> Result<Option<Version>> {
        self.meet(Operation::Head, &upload.key, self.inner.committed(upload, parts)).await
    }

    async fn abort(&self, upload: &Upload) -> Result<()> {
        self.meet(Operation::Abort, &upload.key, self.inner.abort(upload)).await
    }

    async fn uploads(&self, prefix: &str) -> Result<Vec<Upload>> {
        self.meet(Operation::ListUploads, prefix, self.inner.uploads(prefix)).await
    }

    async fn copy(&self, source: &ObjectUrl, key: &str) -> Result<Version> {
        self.meet(Operation::Copy, key, self.inner.copy(source, key)).await
    }

    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, Error)>> {
        let key = keys.first().map_or("", String::as_str);
        self.meet(Operation::Delete, key, self.inner.delete(keys)).await
    }

    async fn delete_if(&self, key: &str, version: &Version) -> Result<()> {
        self.meet(Operation::Delete, key, self.inner.delete_if(key, version)).await
    }
}
