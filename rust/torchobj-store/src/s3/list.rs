//! Listing a bucket, on the hot path.

use torchobj_core::error::{ErrorKind, Operation, Result};
use torchobj_core::types::{ListPage, ListRequest, Payload};

use super::Bucket;
use super::answer::{ServerError, error};
use super::request::Ask;
use super::xml;

/// A page of a thousand keys of 1024 bytes, each byte encoded by three, is 4 MiB.
const LARGEST_PAGE_BYTES: usize = 16 << 20;

impl Bucket {
    /// One page of ListObjectsV2.
    pub(super) async fn list(&self, request: &ListRequest<'_>) -> Result<ListPage> {
        let most = request.max_entries.map(|most| most.min(1000).to_string());
        let query = [
            request.continuation.map(|token| ("continuation-token", token)),
            request.delimiter.map(|delimiter| ("delimiter", delimiter)),
            Some(("encoding-type", "url")),
            Some(("list-type", "2")),
            most.as_deref().map(|most| ("max-keys", most)),
            Some(("prefix", request.prefix)),
            request.start_after.map(|key| ("start-after", key)),
        ];
        let query: Vec<(&str, &str)> = query.into_iter().flatten().collect();
        let payload = Payload::default();
        let operation = Operation::List;
        let ask = Ask { operation, method: "GET", key: None, query: &query, headers: Vec::new(), payload: &payload };
        let mut answer = self.ask(&ask).await?;
        let text = answer.lease.read_text("GET", LARGEST_PAGE_BYTES).await;
        let text = text.map_err(|failure| self.failure(operation, Some(request.prefix), failure))?;
        match xml::list_page(&text) {
            Ok(page) => Ok(page),
            Err(problem) => {
                let said = ServerError::parse(&text);
                if said.code.is_none() {
                    let message = problem.to_string();
                    return Err(self.error(ErrorKind::Protocol, operation, Some(request.prefix), &message));
                }
                let header = |name: &str| answer.header(name).map(str::to_owned);
                Err(error(operation, self.url_of(Some(request.prefix)), answer.status, said, header))
            }
        }
    }
}
