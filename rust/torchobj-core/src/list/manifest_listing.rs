//! Lists a prefix into a manifest. Logs the progress of a long listing.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::filter::Filter;
use super::pages;
use super::stream::{ListOptions, ListStream};
use crate::client::Client;
use crate::error::Result;
use crate::manifest::Manifest;
use crate::types::ListEntry;

/// Interval at which the progress of a long listing is logged.
const REPORT_INTERVAL: Duration = Duration::from_secs(2);

/// The state of a listing into a manifest.
#[derive(Debug)]
pub struct ManifestListing {
    stream: ListStream,
    prefix: String,
    /// Number of objects that the filter selected.
    selected: usize,
    /// Number of objects received, which may exceed the limit of the filter.
    received: usize,
    started: Instant,
    reported: Instant,
}

impl ManifestListing {
    /// A listing of the objects of `prefix` that `filter` selects, before its first page.
    pub fn new(client: &Arc<Client>, prefix: &str, filter: &Filter) -> Self {
        let now = Instant::now();
        let options = ListOptions { filter: Some(filter.clone()), ..ListOptions::default() };
        let stream = ListStream::new(client.clone(), prefix, options);
        Self { stream, prefix: prefix.to_owned(), selected: 0, received: 0, started: now, reported: now }
    }

    /// Returns the selected entries of the next page.
    async fn page(&mut self, client: &Client) -> Result<Vec<ListEntry>> {
        let Some(page) = self.stream.next().await? else { return Ok(Vec::new()) };
        self.received += page.entries.len();
        if self.reported.elapsed() >= REPORT_INTERVAL {
            self.reported = Instant::now();
            let seconds = self.started.elapsed().as_secs_f64();
            log::info!("listing {}: {} objects after {seconds:.1} s", client.store().url(&self.prefix), self.received);
        }
        Ok(page.entries)
    }
}

impl Client {
    /// Lists the objects under `prefix` that `filter` selects, in key order. `base` is the URL of this bucket in the
    /// manifest.
    ///
    /// # Errors
    /// Those of [`super::Pages::next`].
    pub async fn list_into(
        self: &Arc<Self>,
        manifest: &mut Manifest,
        base: &str,
        prefix: &str,
        filter: &Filter,
    ) -> Result<()> {
        let mut listed = ManifestListing::new(self, prefix, filter);
        while self.list_page_into(manifest, base, filter, &mut listed).await? {}
        manifest.shrink();
        Ok(())
    }

    /// Adds the next page of a listing. Returns whether there are more. The listing of a store without ordered listings is
    /// added at once, sorted by key, so that its order is the same on every rank and in every epoch.
    ///
    /// # Errors
    /// Those of [`super::Pages::next`].
    pub async fn list_page_into(
        &self,
        manifest: &mut Manifest,
        base: &str,
        filter: &Filter,
        listed: &mut ManifestListing,
    ) -> Result<bool> {
        let mut entries = listed.page(self).await?;
        if !self.store().capabilities().ordered_listing {
            while !listed.stream.ended() {
                entries.extend(listed.page(self).await?);
            }
            pages::sort(self, &listed.prefix, &mut entries)?;
        }
        for entry in entries {
            if filter.limit.is_some_and(|limit| listed.selected >= limit) {
                return Ok(false);
            }
            listed.selected += 1;
            manifest.push(base, &entry.key, entry.size, entry.version.as_ref());
        }
        Ok(!listed.stream.ended())
    }
}
