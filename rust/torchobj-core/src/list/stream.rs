//! Lists a prefix, in parallel where the store allows it. `ranges` decides what to request; `pages` validates the responses.
//!
//! A store that ignores `start_after` is listed page after page. The first range of keys is listed from the start of the listing, and
//! any other is found to be ignored by its first page, so the pages that were returned before are in order.

use std::sync::Arc;

use super::filter::Filter;
use super::pages::Pages;
use super::ranges::{NextRequest, Ranges};
use crate::client::Client;
use crate::engine::{Batch, BatchRequest, permitted};
use crate::error::Result;
use crate::types::{ListPage, ListRequest};

/// Maximum number of concurrent requests of one listing. A response of S3 with 1000 keys has about 350 KB.
const MAX_REQUESTS: usize = 32;

/// Options of a listing.
#[derive(Debug)]
pub struct ListOptions<'a> {
    /// Keys with this delimiter after the prefix are grouped into common prefixes.
    pub delimiter: Option<&'a str>,
    /// Only keys that sort after this one.
    pub start_after: Option<&'a str>,
    /// Selects the objects. Its limit has no effect.
    pub filter: Option<Filter>,
    /// Whether pages are in key order, if the store lists in order.
    pub ordered: bool,
}

impl Default for ListOptions<'_> {
    fn default() -> Self {
        Self { delimiter: None, start_after: None, filter: None, ordered: true }
    }
}

/// A listing and its position. Dropping it aborts its requests.
#[derive(Debug)]
pub struct ListStream {
    client: Arc<Client>,
    listing: ListState,
    /// Selects entries, given the prefix.
    filter: Option<(Filter, String)>,
}

#[derive(Debug)]
enum ListState {
    /// Page after page.
    Serial(Pages),
    /// Ranges of keys. `last`: the last returned key.
    Parallel { ranges: Ranges, requests: Option<Batch<RangeRequest>>, last: Option<String> },
}

impl ListStream {
    /// A listing of the keys that begin with `prefix`.
    pub fn new(client: Arc<Client>, prefix: &str, options: ListOptions<'_>) -> Self {
        let ListOptions { delimiter, start_after, filter, ordered } = options;
        let narrowed = filter.as_ref().map_or_else(|| prefix.to_owned(), |filter| filter.narrow(prefix));
        let parallel = client.store().capabilities().parallel_listing && !client.ignores_start_after();
        let listing = if parallel && delimiter.is_none() {
            let last = start_after.map(str::to_owned);
            ListState::Parallel { ranges: Ranges::new(&narrowed, start_after, ordered), requests: None, last }
        } else {
            ListState::Serial(Pages::new(&narrowed, delimiter, start_after))
        };
        Self { client, listing, filter: filter.map(|filter| (filter, prefix.to_owned())) }
    }

    /// Returns whether the last page was returned.
    pub fn ended(&self) -> bool {
        match &self.listing {
            ListState::Serial(pages) => pages.ended(),
            ListState::Parallel { ranges, .. } => ranges.ended(),
        }
    }

    /// Returns the next page; `None` after the last one.
    ///
    /// # Errors
    /// Those of [`Pages::next`].
    pub async fn next(&mut self) -> Result<Option<ListPage>> {
        let mut page = match &mut self.listing {
            ListState::Serial(pages) => pages.next(&self.client).await?,
            ListState::Parallel { ranges, requests, last } => {
                let new = || Batch::new(permitted([self.client.permits()]), true);
                match next_of(&self.client, ranges, requests.get_or_insert_with(new)).await? {
                    NextPage::Page(page) => {
                        if let Some(entry) = page.as_ref().and_then(|page| page.entries.last()) {
                            *last = Some(entry.key.clone());
                        }
                        page
                    }
                    NextPage::StartIgnored => {
                        let mut pages = Pages::new(&ranges.prefix, None, last.as_deref());
                        let page = pages.next(&self.client).await;
                        self.listing = ListState::Serial(pages);
                        page?
                    }
                }
            }
        };
        if let (Some(page), Some((filter, prefix))) = (&mut page, &self.filter) {
            page.entries.retain(|entry| filter.selects(prefix, entry));
        }
        Ok(page)
    }
}

/// What a parallel listing has next.
enum NextPage {
    Page(Option<ListPage>),
    /// The store ignores `start_after`.
    StartIgnored,
}

async fn next_of(client: &Arc<Client>, ranges: &mut Ranges, requests: &Batch<RangeRequest>) -> Result<NextPage> {
    loop {
        let limit = requests.limit().min(MAX_REQUESTS);
        while let Some(request) = ranges.next_request(requests.pending(), limit) {
            requests.push(RangeRequest { client: client.clone(), request });
        }
        if let Some(page) = ranges.pop() {
            return Ok(NextPage::Page(Some(page)));
        }
        let Some((_, response)) = requests.next().await else { return Ok(NextPage::Page(None)) };
        match response? {
            RangeResponse::Page { pages, .. } if pages.ignores_start => {
                client.set_ignores_start_after(&ranges.prefix);
                return Ok(NextPage::StartIgnored);
            }
            RangeResponse::Page { lower, pages, page } => ranges.received(&lower, pages, page),
            RangeResponse::Directories(page) => ranges.directories(&page),
        }
        // The first page is returned without requests for others, which the caller may not need.
        if requests.pending() == 0
            && let Some(page) = ranges.pop()
        {
            return Ok(NextPage::Page(Some(page)));
        }
    }
}

struct RangeRequest {
    client: Arc<Client>,
    request: NextRequest,
}

/// The response to a [`NextRequest`].
enum RangeResponse {
    Page { lower: String, pages: Box<Pages>, page: Option<ListPage> },
    Directories(ListPage),
}

impl BatchRequest for RangeRequest {
    type Output = RangeResponse;

    async fn run(self) -> Result<RangeResponse> {
        match self.request {
            NextRequest::Page { lower, mut pages, end } => {
                let page = pages.next_until(&self.client, end.as_deref()).await?;
                Ok(RangeResponse::Page { lower, pages, page })
            }
            NextRequest::Directories { parent, start_after } => {
                let request = ListRequest {
                    prefix: &parent,
                    delimiter: Some("/"),
                    start_after: Some(&start_after),
                    ..ListRequest::default()
                };
                Ok(RangeResponse::Directories(self.client.list(request).await?))
            }
        }
    }
}
