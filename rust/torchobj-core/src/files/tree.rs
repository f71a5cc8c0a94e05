//! Transfers of trees: many files concurrently, within the permits of the client. A failure of one file does not stop the
//! others.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::mpsc;

use super::Transferred;
use super::counters::Counters;
use super::download::Download;
use super::folder::Folder;
use super::local::in_place;
use super::upload::UploadFile;
use super::walk::Walk;
use crate::client::Client;
use crate::engine::{Batch, BatchRequest, permitted};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::list::{Filter, ListOptions, ListStream};
use crate::runtime::Task;
use crate::types::PutOptions;

/// Files that are found but not yet started. More than any limit on concurrent requests.
const WAITING: usize = 4096;

/// Options of the transfer of a tree.
#[derive(Debug, Default)]
pub struct TreeOptions {
    /// Selects files by their path relative to the folder or prefix.
    pub filter: Filter,
    /// Attributes and condition of uploaded objects.
    pub put: PutOptions,
    /// Content types of uploaded objects by the ends of their names, in lower case, such as `.jpg`; the longest end counts.
    pub content_types: HashMap<String, String>,
    /// Whether files that are equal are kept.
    pub skip_unchanged: bool,
    /// Whether the result contains each file that was transferred.
    pub lists_done: bool,
}

/// What was transferred.
#[derive(Debug, Default)]
pub struct TreeResult {
    /// Number of files that were transferred.
    pub transferred: u64,
    /// Number of files that were skipped.
    pub skipped: u64,
    /// Number of bytes that were transferred.
    pub bytes: u64,
    /// Relative paths of the files that were transferred, in no order, with `lists_done`.
    pub done: Vec<(String, Transferred)>,
    /// Relative paths and errors of the files that failed, in no order.
    pub failures: Vec<(String, Error)>,
}

/// A file that was found, or the relative path and error of what could not be read.
type Item = std::result::Result<FileTransfer, (String, Error)>;

/// The transfer of one file.
enum Transfer {
    Upload(UploadFile),
    Download(Download, Arc<Folder>),
}

struct FileTransfer {
    client: Arc<Client>,
    name: String,
    transfer: Transfer,
    counters: Arc<Counters>,
}

impl FileTransfer {
    fn new(client: &Arc<Client>, name: String, transfer: Transfer, counters: &Arc<Counters>) -> Self {
        Self { client: client.clone(), name, transfer, counters: counters.clone() }
    }
}

impl BatchRequest for FileTransfer {
    type Output = (String, Result<Transferred>);

    async fn run(self) -> Result<Self::Output> {
        let Self { client, name, transfer, counters } = self;
        let result = match transfer {
            Transfer::Upload(upload) => client.upload_file(upload, &counters).await,
            Transfer::Download(download, folder) => client.download_file(download, &folder, &name, &counters).await,
        };
        if let Ok(done) = &result {
            counters.done(done.size, done.skipped);
        }
        Ok((name, result))
    }
}

impl Client {
    /// Uploads the files below `folder` to keys that begin with `prefix`.
    ///
    /// # Errors
    /// If the folder itself cannot be read, there is no such bucket, or there are no credentials. Failures of files are in
    /// the result.
    pub async fn upload_tree(
        self: &Arc<Self>,
        folder: &Path,
        prefix: &str,
        options: TreeOptions,
        counters: &Arc<Counters>,
    ) -> Result<TreeResult> {
        let (sender, receiver) = mpsc::channel(WAITING);
        let (client, counted, lists_done) = (self.clone(), counters.clone(), options.lists_done);
        let (folder, prefix): (PathBuf, String) = (folder.to_owned(), prefix.to_owned());
        let walking = async move {
            let walk = move || {
                Walk::new(&folder, &options.filter).run(|found| {
                    let item = match found {
                        Err(failure) => Err(failure),
                        Ok(found) => {
                            counted.found(found.size);
                            let mut put = PutOptions { tree_bytes: Some(prefix.len()), ..options.put.clone() };
                            if put.attributes.content_type.is_none() {
                                put.attributes.content_type = content_type(&options.content_types, &found.name);
                            }
                            let upload = UploadFile {
                                path: found.path,
                                key: format!("{prefix}{}", found.name),
                                options: put,
                                skip_unchanged: options.skip_unchanged,
                            };
                            Ok(FileTransfer::new(&client, found.name, Transfer::Upload(upload), &counted))
                        }
                    };
                    // The receiver is dropped if the transfer is cancelled.
                    sender.blocking_send(item).is_ok()
                })?;
                counted.found_all();
                Ok(())
            };
            match tokio::task::spawn_blocking(walk).await {
                Ok(walked) => walked,
                Err(panic) => std::panic::resume_unwind(panic.into_panic()),
            }
        };
        self.transfer_all(receiver, Task::spawn(walking), lists_done).await
    }

    /// Downloads the objects whose keys begin with `prefix` to files below `folder`.
    ///
    /// # Errors
    /// If the listing fails, or there are no credentials any more. Failures of files are in the result.
    pub async fn download_tree(
        self: &Arc<Self>,
        prefix: &str,
        folder: Folder,
        options: TreeOptions,
        counters: &Arc<Counters>,
    ) -> Result<TreeResult> {
        let (sender, receiver) = mpsc::channel(WAITING);
        let (client, counted, target) = (self.clone(), counters.clone(), Arc::new(folder));
        let (prefix, lists_done, folder) = (prefix.to_owned(), options.lists_done, target.clone());
        let listing = async move {
            let listed = ListOptions { filter: Some(options.filter), ordered: false, ..ListOptions::default() };
            let mut pages = ListStream::new(client.clone(), &prefix, listed);
            while let Some(page) = pages.next().await? {
                for entry in page.entries {
                    let name = entry.key.strip_prefix(&prefix).unwrap_or(&entry.key).to_owned();
                    if Folder::is_temporary(&name) {
                        log::warn!("{} has the name of a temporary file: skipped", client.store().url(&entry.key));
                        continue;
                    }
                    counted.found(entry.size.unwrap_or_default());
                    let download = Download {
                        key: entry.key,
                        listed: Some((entry.size, entry.modified_ms)),
                        version: None,
                        skip_unchanged: options.skip_unchanged,
                    };
                    let transfer = Transfer::Download(download, folder.clone());
                    let item = Ok(FileTransfer::new(&client, name, transfer, &counted));
                    if sender.send(item).await.is_err() {
                        return Ok(());
                    }
                }
            }
            counted.found_all();
            Ok(())
        };
        let result = self.transfer_all(receiver, Task::spawn(listing), lists_done).await?;
        // Once for each folder, and not for each of its files.
        in_place(|| target.sync())?;
        Ok(result)
    }

    /// Runs the transfers that `finding` sends.
    async fn transfer_all(
        self: &Arc<Self>,
        mut receiver: mpsc::Receiver<Item>,
        finding: Task<Result<()>>,
        lists_done: bool,
    ) -> Result<TreeResult> {
        let batch = Batch::new(permitted([self.permits()]), false);
        let mut result = TreeResult::default();
        let mut open = true;
        while open || batch.pending() > 0 {
            tokio::select! {
                item = receiver.recv(), if open && batch.pending() < WAITING => match item {
                    None => open = false,
                    Some(Ok(transfer)) => batch.push(transfer),
                    Some(Err(failure)) => result.failures.push(failure),
                },
                Some((_, done)) = batch.next(), if batch.pending() > 0 => {
                    let (name, done) = done?;
                    match done {
                        // Every other file would fail in the same way.
                        Err(error) if matches!(error.kind(), ErrorKind::NoBucket | ErrorKind::Credentials) => {
                            return Err(error);
                        }
                        Err(error) => result.failures.push((name, error)),
                        Ok(done) if done.skipped => result.skipped += 1,
                        Ok(done) => {
                            result.transferred += 1;
                            result.bytes += done.size;
                            if lists_done {
                                result.done.push((name, done));
                            }
                        }
                    }
                }
            }
        }
        match finding.await {
            Ok(found) => found?,
            Err(lost) if lost.is_panic() => std::panic::resume_unwind(lost.into_panic()),
            Err(lost) => {
                let error = self.store().error(ErrorKind::Cancelled, Operation::List, "", "the search was cancelled");
                return Err(error.with_source(lost));
            }
        }
        Ok(result)
    }
}

/// The content type of the longest end of a file name that `types` contains. Dots at its beginning begin no end.
fn content_type(types: &HashMap<String, String>, name: &str) -> Option<String> {
    let name = name.rsplit('/').next().unwrap_or(name).trim_start_matches('.').to_lowercase();
    name.match_indices('.').find_map(|(at, _)| types.get(&name[at..])).cloned()
}
